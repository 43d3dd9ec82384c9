"""Photographs that ship inside scikit-learn and scikit-image, parted once, and squares cut of them.

Squares of one photograph are no independent draws, so what a model must never have seen is kept
apart by the photograph: `TRAINING` for what is fitted, `VALIDATION` for what is chosen, `HELD_OUT`
for what is reported. Squares of one pool of `HELD_OUT`, parted at random, are exchangeable.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.data.packages import extra

TRAINING = ("china", "coffee", "coins", "grass", "gravel", "moon")
VALIDATION = ("brick", "rocket")
HELD_OUT = ("astronaut", "camera", "chelsea", "flower")
_LEARN = ("china", "flower")
LICENCES = "china and flower CC BY 2.0; those of scikit-image public domain or CC0"
LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue, of ITU-R BT.601."""


@functools.cache
def photograph(name: str) -> Tensor:
    """(channels, height, width), uint8: three channels, or one where it ships so.

    Raises:
        ValueError: an unknown name.
        ModuleNotFoundError: scikit-image is not installed.
    """
    known = (*TRAINING, *VALIDATION, *HELD_OUT)
    if name not in known:
        raise ValueError(f"name must be one of {', '.join(sorted(known))}, got {name!r}")
    if name in _LEARN:
        from sklearn.datasets import load_sample_image

        pixels = load_sample_image(f"{name}.jpg")
    else:
        pixels = getattr(extra("skimage.data", "vision", "these photographs"), name)()
    array: Any = np.atleast_3d(np.asarray(pixels))[..., :3]
    return torch.from_numpy(array.transpose(2, 0, 1).copy())


def grey(images: Tensor) -> Tensor:
    """(..., 1, height, width) luma of (..., 1 or 3, height, width); uint8 stays uint8.

    Raises:
        ValueError: another number of channels.
    """
    if images.ndim < 3 or images.shape[-3] not in (1, 3):
        raise ValueError(f"images must be (..., 1 or 3, height, width), got {tuple(images.shape)}")
    if images.shape[-3] == 1:
        return images
    exact = images if images.is_floating_point() else images.double()
    luma = torch.einsum("...chw,c->...hw", exact, exact.new_tensor(LUMA)).unsqueeze(-3)
    return luma if images.is_floating_point() else luma.round().to(images.dtype)


def tiles(
    names: Sequence[str], size: int | tuple[int, int], *, colour: bool = False
) -> tuple[Tensor, Tensor]:
    """All squares side by side, no two of which overlap: (count, 1 or 3, size, size) and whose.

    Args:
        names: of photographs.
        size: of a side, or (height, width).
        colour: three channels, a grey photograph repeated; else one.

    Returns:
        uint8 squares and, for each, the number of its photograph in ``names``, int64.

    Raises:
        ValueError: no names, an unknown one, or a size that is not positive or does not fit.
    """
    parts = []
    for image, (height, width) in _sources(names, size, colour):
        rows, columns = image.shape[1] // height, image.shape[2] // width
        part = image[:, : rows * height, : columns * width]
        part = part.reshape(len(image), rows, height, columns, width).permute(1, 3, 0, 2, 4)
        parts.append(part.reshape(-1, len(image), height, width))
    whose = torch.repeat_interleave(torch.tensor([len(part) for part in parts]))
    return torch.cat(parts), whose


def crops(
    names: Sequence[str],
    size: int | tuple[int, int],
    count: int,
    *,
    seed: int = 0,
    colour: bool = False,
) -> Tensor:
    """(count, 1 or 3, size, size) uint8 squares at random places, in turn of the photographs.

    Args:
        names, size, colour: as in `tiles`.
        count: how many.
        seed: of the places.

    Raises:
        ValueError: as `tiles`, and a negative ``count``.
    """
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    sources = _sources(names, size, colour)
    channels, (height, width) = len(sources[0][0]), sources[0][1]
    places = KeyedNoise(seed).uniform(torch.empty(count, 2, dtype=torch.float64))
    result = torch.empty(count, channels, height, width, dtype=torch.uint8)
    for k, (image, _) in enumerate(sources):
        rows = torch.arange(k, count, len(sources))
        room = torch.tensor([image.shape[1] - height + 1, image.shape[2] - width + 1])
        top, left = (places[rows] * room).long().unbind(1)
        down, right = torch.arange(height)[:, None], torch.arange(width)
        inside = (top[:, None, None] + down, left[:, None, None] + right)
        result[rows] = image[:, inside[0], inside[1]].movedim(0, 1)
    return result


def _sources(
    names: Sequence[str], size: int | tuple[int, int], colour: bool
) -> list[tuple[Tensor, tuple[int, int]]]:
    if isinstance(names, str) or not names:
        raise ValueError(f"names must be a sequence of one name or more, got {names!r}")
    height, width = (size, size) if isinstance(size, int) else size
    if min(height, width) < 1:
        raise ValueError(f"size must be positive, got {size}")
    result = []
    for name in names:
        image = photograph(name)
        image = image.expand(3, -1, -1) if colour else grey(image)
        if height > image.shape[1] or width > image.shape[2]:
            raise ValueError(f"size {size} does not fit in {name}, {tuple(image.shape[1:])}")
        result.append((image, (height, width)))
    return result
