from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fluvial.images.meanflow import Guidance
from fluvial.images.recipe import Recipe
from fluvial.metrics import frechet_distance
from fluvial.networks import MLP, DiT
from fluvial.training.recipe import as_json, from_json
from fluvial.training.stage import Training

SMALL: dict[str, Any] = {"width": 16, "depth": 1, "steps": 4, "batch_size": 8, "ema": (0.5,)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUVIAL_CACHE", str(tmp_path / "cache"))


def folder(path: Path, size: tuple[int, int], count: int = 20, classes: int = 2) -> Path:
    rng = np.random.default_rng(0)
    for k in range(count):
        image = Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8))
        place = path / f"class {k % classes}" if classes else path
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{k}.png")
    return path


def array(path: Path, *shape: int) -> Path:
    np.save(path, np.random.default_rng(0).normal(5, 2, shape))
    return path


def test_every_field_of_a_training_is_a_hyper_parameter() -> None:
    assert {field.name for field in fields(Training)} <= set(asdict(Recipe()))


def test_rules_for_what_is_not_given() -> None:
    for steps, validate, sample in ((100, 100, 100), (2_000, 200, 400), (50_000, 5_000, 10_000)):
        training = Recipe(steps=steps).training
        assert (training.validate_every, training.sample_every) == (validate, sample)
    assert Recipe().training.lr == pytest.approx(3e-3)
    assert Recipe(width=768).training.lr == pytest.approx(5e-4)
    given = Recipe(lr=0.1, validate_every=3, sample_every=7).training
    assert (given.lr, given.validate_every, given.sample_every) == (0.1, 3, 7)


def test_as_json_and_back() -> None:
    recipe = Recipe(size=(8, 12), channels=1, ema=(0.5, 0.9), lr=0.1, label="kind", clip=1.0)
    assert from_json(Recipe, json.loads(json.dumps(as_json(recipe)))) == recipe
    with pytest.raises(ValueError, match=r"hyper-parameters of another version: \['colour'\]"):
        from_json(Recipe, {"colour": 3})


@pytest.mark.parametrize(
    ("size", "patch"),
    [
        ((8, 8), 2),
        ((28, 28), 7),
        ((32, 32), 8),
        ((64, 64), 8),
        ((48, 64), 8),
        ((96, 96), 12),
        ((2, 3), 1),
    ],
)
def test_the_patch_is_near_8_and_makes_16_to_64(
    size: tuple[int, int], patch: int, tmp_path: Path
) -> None:
    job = Recipe(**{**SMALL, "validation": 0}).prepare(folder(tmp_path / "x", size), progress=False)
    assert job.recipe.patch == patch and job.model.network.args["patch"] == patch
    assert job.recipe.size == (size[0] if size[0] == size[1] else size)
    assert job.model.shape == (3, *size)


@pytest.mark.parametrize(
    ("sides", "changes", "message"),
    [
        ((26, 26), {}, "patch: none fits images of 26 x 26, .* multiples of 8, size=24"),
        ((28, 30), {}, r"patch: none fits images of 28 x 30, .* size=\(32, 32\)"),
        ((16, 24), {"patch": 3}, "patch 3 does not divide 16 x 24; 1, 2, 4, 8 would"),
        ((8, 8), {"patch": 4, "heads": 3}, "width must be a multiple of heads"),
    ],
)
def test_networks_that_do_not_fit(
    sides: tuple[int, int], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    place = folder(tmp_path / "x", sides)
    with pytest.raises(ValueError, match=message):
        Recipe(**SMALL, **changes).prepare(place, progress=False)


def test_large_images_are_not_trained_on_by_accident(tmp_path: Path) -> None:
    place = folder(tmp_path / "x", (64, 160), count=2, classes=0)
    with pytest.raises(ValueError, match=r"size: the images are 64 x 160; .* size=\(64, 160\) if"):
        Recipe(**SMALL, validation=0).prepare(place, progress=False)
    job = Recipe(**SMALL, validation=0, size=(64, 160)).prepare(place, progress=False)
    assert job.model.shape == (3, 64, 160)


def test_a_size_that_does_not_fit_is_named_before_the_data_are_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none fits images of 37 x 37"):
        Recipe(size=37).prepare(tmp_path / "nowhere", progress=False)


def test_images_with_classes(tmp_path: Path) -> None:
    job = Recipe(**SMALL, patch=4).prepare(folder(tmp_path / "x", (8, 8)), progress=False)
    assert isinstance(job.model.network, DiT) and job.model.network.num_classes == 2
    assert job.model.guidance == Guidance(1.0, 0.0, drop=0.1)
    assert job.held is not None and (len(job.train), len(job.held)) == (18, 2)
    assert job.about["rows"] == {"train": 18, "validation": 2}
    assert job.about["format"]["label_names"] == ["class 0", "class 1"]
    assert job.model.format == job.data.format
    rows, held = job.rows
    assert rows["x"] is job.train.x and held is not None and held["label"] is job.held.label


def test_without_labels_there_is_no_guidance(tmp_path: Path) -> None:
    place = folder(tmp_path / "x", (8, 8), classes=0)
    job = Recipe(**SMALL, patch=4).prepare(place, progress=False)
    assert job.model.guidance is None and job.model.network.num_classes == 0
    assert set(job.rows[0]) == {"x"}
    for changes in ({"kappa": 0.5}, {"omega": 2.0}):
        with pytest.raises(ValueError, match="guide towards labels, and these data have none"):
            Recipe(**SMALL, patch=4, **changes).prepare(place, progress=False)


@pytest.mark.parametrize(
    ("shape", "kind", "patch", "width"),
    [
        ((30, 3), MLP, None, 256),
        ((30, 5, 7), MLP, None, 256),
        ((30, 2, 6, 8), DiT, 1, 128),
        ((30, 2, 37, 41), MLP, None, 256),
    ],
)
def test_arrays(
    shape: tuple[int, ...], kind: type, patch: int | None, width: int, tmp_path: Path
) -> None:
    job = Recipe(depth=1).prepare(array(tmp_path / "x.npy", *shape), progress=False)
    assert type(job.model.network) is kind
    assert (job.recipe.patch, job.recipe.width) == (patch, width)
    assert job.recipe.lr == pytest.approx(0.384 / width)
    assert (job.recipe.size, job.recipe.channels) == (None, None)


def test_a_patch_is_for_images(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"patch is for images, and x.npy holds none"):
        Recipe(patch=2).prepare(array(tmp_path / "x.npy", 30, 3), progress=False)


def test_rows_that_are_held_out(tmp_path: Path) -> None:
    many = Recipe(**SMALL).prepare(array(tmp_path / "x.npy", 25_000, 1), progress=False)
    assert many.held is not None and (len(many.train), len(many.held)) == (24_000, 1_000)
    none = Recipe(**SMALL, validation=0).prepare(array(tmp_path / "y.npy", 30, 1), progress=False)
    assert none.held is None and len(none.train) == 30 and none.measure() == []
    other = Recipe(**SMALL, seed=1).prepare(tmp_path / "x.npy", progress=False)
    assert other.held is not None and not torch.equal(other.held.x, many.held.x)
    with pytest.raises(
        ValueError, match="leaves no row .* has 3 .*; hold out another share, or nothing"
    ):
        Recipe(**SMALL).prepare(array(tmp_path / "z.npy", 3, 1), progress=False)


def test_labels_of_a_file_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    array(Path("x.npy"), 30, 2)
    np.save("y.npy", np.arange(30) % 3)
    job = Recipe(**SMALL, label="y.npy").prepare("x.npy", progress=False)
    assert job.recipe.label == str(tmp_path / "y.npy")
    assert job.model.network.num_classes == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation": -0.1}, "validation must be a share"),
        ({"validation": 1.0}, "validation must be a share"),
        ({"channels": 2}, "channels must be 1 for grey or 3 for colour, got 2"),
        ({"patch": 0}, "patch must be at least 1"),
        ({"width": 0}, "width must be at least 1"),
        ({"depth": 0}, "depth must be at least 1"),
        ({"heads": 0}, "heads must be at least 1"),
        ({"seed": -1}, "seed must not be negative"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"validate_every": 0}, "validate_every must be at least 1"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"ratio": 1.5}, "ratio must be a share"),
        ({"kappa": 1.0}, "kappa must lie in"),
        ({"drop": 2.0}, "drop must be a share"),
    ],
    ids=str,
)
def test_bad_values_are_named_at_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**changes)


def test_fit_preview_and_measure(tmp_path: Path) -> None:
    place = array(tmp_path / "x.npy", 80, 3)
    job = Recipe(**SMALL, validation=0.25).prepare(place, progress=False)
    job.fit(tmp_path / "run", progress=False)
    assert (tmp_path / "run" / "samples" / "step-00000004.png").exists()
    (metric,) = job.measure()
    assert metric["name"] == "Fréchet distance"
    assert metric["what"].startswith(
        "20 samples in one step against 20 held-out rows, in the first"
    )
    # three components are the whole space, and a rotation changes no distance
    assert job.held is not None
    encode = job.data.format.encode
    assert metric["floor"] == pytest.approx(
        frechet_distance(encode(job.train.x[:20]), encode(job.held.x)), rel=1e-4
    )
    assert metric["value"] > metric["floor"]


def test_previews_are_the_same_draw_at_every_step(tmp_path: Path) -> None:
    job = Recipe(**SMALL, patch=4).prepare(folder(tmp_path / "x", (8, 8)), progress=False)
    for name in ("a", "b.c"):
        job.preview(tmp_path / name)
    one, two = (tmp_path / "a.png").read_bytes(), (tmp_path / "b.png").read_bytes()
    assert one == two


def test_a_preview_of_arrays_of_channels(tmp_path: Path) -> None:
    job = Recipe(**SMALL).prepare(array(tmp_path / "x.npy", 30, 2, 6, 8), progress=False)
    job.preview(tmp_path / "x")
    with Image.open(tmp_path / "x.png") as picture:
        assert picture.mode == "L" and picture.size == (9 * 71, 9 * 55)
