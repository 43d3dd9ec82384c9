"""Photographs that ship in packages, and squares of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fluvial.data.photographs import (
    HELD_OUT,
    TRAINING,
    VALIDATION,
    crops,
    grey,
    photograph,
    tiles,
)

NAMES = (*TRAINING, *VALIDATION, *HELD_OUT)


def test_parts_have_no_photograph_in_common_and_all_can_be_read() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for name in NAMES:
        image = photograph(name)
        assert image.dtype == torch.uint8 and len(image) in (1, 3)
        assert image.float().std() > 10, name


def test_grey_is_that_of_pillow() -> None:
    from PIL import Image

    image = photograph("chelsea")
    wanted = np.asarray(Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L"))
    difference = (grey(image)[0].int() - torch.from_numpy(wanted.astype(np.int32))).abs()
    assert difference.max() <= 1  # Pillow's weights are rounded to 16 bits
    assert grey(image.double() / 255).dtype == torch.float64
    assert torch.equal(grey(photograph("camera")), photograph("camera"))
    with pytest.raises(ValueError, match=r"images must be \(\.\.\., 1 or 3"):
        grey(torch.zeros(2, 4, 4))


@pytest.mark.parametrize("colour", [False, True])
def test_tiles_put_together_are_the_photograph(colour: bool) -> None:
    squares, whose = tiles(("coffee", "camera"), (40, 50), colour=colour)
    assert squares.shape == (10 * 12 + 12 * 10, 3 if colour else 1, 40, 50)
    assert whose.bincount().tolist() == [120, 120]
    coffee = photograph("coffee") if colour else grey(photograph("coffee"))
    rows = [torch.cat(list(squares[12 * r : 12 * (r + 1)]), 2) for r in range(10)]
    assert torch.equal(torch.cat(rows, 1), coffee)
    camera = photograph("camera")
    assert torch.equal(squares[120 + 11, :1], camera[:, 40:80, 50:100])


def test_crops_lie_in_their_photographs() -> None:
    found = crops(("rocket", "moon"), 16, 11, seed=3)
    assert found.shape == (11, 1, 16, 16)
    for k, square in enumerate(found):
        image = grey(photograph(("rocket", "moon")[k % 2]))[0]
        windows = image.unfold(0, 16, 1).unfold(1, 16, 1)
        assert bool((windows == square[0]).flatten(2).all(2).any()), k
    assert torch.equal(found, crops(("rocket", "moon"), 16, 11, seed=3))
    assert not torch.equal(found, crops(("rocket", "moon"), 16, 11, seed=4))
    # places are drawn a row, whatever the count
    assert torch.equal(found[:5], crops(("rocket", "moon"), 16, 5, seed=3))
    assert crops(("rocket",), 8, 0, colour=True).shape == (0, 3, 8, 8)


def test_every_place_is_drawn_alike() -> None:
    image = photograph("moon")[0]
    found = crops(("moon",), image.shape[0] - 1, 400)  # four places
    share = (found[:, 0, :1, :1].flatten() == image[0, 0]).double().mean()
    same = (image[:2, :2] == image[0, 0]).double().mean()
    assert abs(float(share - same)) < 4 * (0.25 * 0.75 / 400) ** 0.5


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="name must be one of astronaut, .*got 'lena'"):
        photograph("lena")
    for names in ("china", ()):
        with pytest.raises(ValueError, match="names must be a sequence of one name or more"):
            tiles(names, 8)
    for size in (0, (8, -1)):
        with pytest.raises(ValueError, match="size must be positive"):
            tiles(("china",), size)
    with pytest.raises(ValueError, match=r"size 500 does not fit in china, \(427, 640\)"):
        crops(("china",), 500, 2)
    with pytest.raises(ValueError, match="count must not be negative, got -1"):
        crops(("china",), 5, -1)
