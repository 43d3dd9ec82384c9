from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fluvial.data import read
from fluvial.data.format import Format
from fluvial.data.write import check_output, image_grid, scatter, write_samples

NAMES = ("cat", "owl/night", "..")
IMAGES = Format("images", (1, 4, 6), label_names=NAMES)
COLOUR = Format("images", (3, 4, 6))
ARRAYS = Format("arrays", (2, 5))
TABLE = Format(
    "table",
    (3,),
    (1e9, 4.0, 0.0),
    (1e3, 2.0, 1e-4),
    label_names=("a", "b"),
    columns=("time", "count", "label"),
    integers=("count",),
)


def images(count: int, channels: int = 1) -> Tensor:
    return torch.arange(count * channels * 24, dtype=torch.uint8).reshape(count, channels, 4, 6)


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


def test_a_grid(tmp_path: Path) -> None:
    """Row by row, magnified by whole numbers, white between the images and where none is left."""
    x = images(5)
    image_grid(tmp_path / "x.png", x, 3)
    sheet = pixels(tmp_path / "x.png")
    scale = 640 // 20
    assert sheet.shape == (scale * 9, scale * 20)
    assert np.array_equal(sheet[::scale, ::scale].repeat(scale, 0).repeat(scale, 1), sheet)
    small = sheet[::scale, ::scale]
    for k, image in enumerate(x[:, 0].numpy()):
        top, left = 5 * (k // 3), 7 * (k % 3)
        assert np.array_equal(small[top : top + 4, left : left + 6], image)
    assert (small[4] == 255).all() and (small[:, 6] == 255).all() and (small[5:, 14:] == 255).all()


def test_a_grid_is_about_square_and_in_colour(tmp_path: Path) -> None:
    image_grid(tmp_path / "x.png", images(7, 3))
    assert pixels(tmp_path / "x.png").shape == (32 * 14, 32 * 20, 3)
    image_grid(tmp_path / "one.png", torch.zeros(1, 3, 700, 700, dtype=torch.uint8), 8)
    assert pixels(tmp_path / "one.png").shape == (700, 700, 3)


@pytest.mark.parametrize("format", [IMAGES, COLOUR], ids=["grey", "colour"])
def test_a_folder(format: Format, tmp_path: Path) -> None:
    x = images(3, format.shape[0])
    write_samples(tmp_path / "out", x, None, format)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["00000.png", "00001.png", "00002.png"]
    for name, image in zip(names, x.numpy(), strict=True):
        found = pixels(tmp_path / "out" / name)
        assert np.array_equal(
            found if found.ndim == 2 else found.transpose(2, 0, 1), image.squeeze()
        )
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_folder_with_classes(tmp_path: Path) -> None:
    x = images(4)
    write_samples(tmp_path / "one", x, torch.tensor([1, 1, 1, 1]), IMAGES)
    assert sorted(path.name for path in (tmp_path / "one").iterdir())[0] == "00000-owl_night.png"
    write_samples(tmp_path / "all", x, torch.tensor([0, 1, 2, 0]), IMAGES)
    found = {
        path.relative_to(tmp_path / "all").as_posix() for path in (tmp_path / "all").rglob("*.png")
    }
    assert found == {"cat/00000.png", "owl_night/00001.png", "0-class/00002.png", "cat/00003.png"}
    assert sorted(read(tmp_path / "all", cache=None, progress=False).label.tolist()) == [0, 1, 1, 2]


def test_classes_that_differ_have_folders_that_differ(tmp_path: Path) -> None:
    format = Format("images", (1, 4, 6), label_names=("a/b", "a_b", "A_B"))
    write_samples(tmp_path / "x", images(3), torch.tensor([0, 1, 2]), format)
    assert sorted(path.name.lower() for path in (tmp_path / "x").iterdir()) == [
        "0-a_b",
        "1-a_b",
        "2-a_b",
    ]


def test_arrays_come_back(tmp_path: Path) -> None:
    x = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    write_samples(tmp_path / "x.npy", x, None, ARRAYS)
    assert np.array_equal(np.load(tmp_path / "x.npy"), x)
    write_samples(tmp_path / "x.NPZ", x, None, ARRAYS)
    with np.load(tmp_path / "x.NPZ") as packed:
        assert list(packed) == ["x"] and np.array_equal(packed["x"], x)
    write_samples(tmp_path / "y.npz", images(3), torch.tensor([2, 0, 0]), IMAGES)
    with np.load(tmp_path / "y.npz") as packed:
        assert packed["x"].dtype == np.uint8 and packed["label"].tolist() == ["..", "cat", "cat"]


ROWS = torch.tensor([[1e9 + 1 / 3, 7.0, 1e-4 / 3], [1e9 - 1, -2.0, 0.0]], dtype=torch.float64)


def test_a_table(tmp_path: Path) -> None:
    """Numbers to a millionth of their deviation, whole ones as such, labels by name."""
    write_samples(tmp_path / "deep" / "x.csv", ROWS, torch.tensor([1, 0]), TABLE)
    with (tmp_path / "deep" / "x.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["time", "count", "label", "label_"],
            ["1000000000.333", "7", "3.33333e-05", "b"],
            ["999999999.0", "-2", "0.0", "a"],
        ]
    write_samples(tmp_path / "x.csv", ROWS, torch.tensor([1, 0]), TABLE, label_column="kind")
    assert (tmp_path / "x.csv").read_text().startswith("time,count,label,kind\n")


def test_parquet(tmp_path: Path) -> None:
    write_samples(tmp_path / "x.parquet", ROWS, None, TABLE)
    data = read(tmp_path / "x.parquet")
    assert data.format.columns == TABLE.columns and "count" in data.format.integers
    assert np.allclose(data.x, ROWS, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "format", "message"),
    [
        ("x.jpg", IMAGES, r"images are written as .png, a folder \(no suffix\), .npz or .npy, got"),
        ("x.png", ARRAYS, "arrays are written as .npz or .npy, got"),
        ("x", TABLE, "rows of a table are written as .csv, .parquet, .npz or .npy, got"),
    ],
)
def test_suffixes(name: str, format: Format, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        check_output(tmp_path / name, format, force=True)


def test_what_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    file, folder = tmp_path / "x.npy", tmp_path / "x"
    file.write_text("mine")
    folder.mkdir()
    check_output(folder, IMAGES)  # empty
    (folder / "00000.png").write_text("mine")
    (folder / "other.txt").write_text("mine")
    for path in (file, folder):
        with pytest.raises(FileExistsError, match="choose another, or force it"):
            write_samples(path, images(2), None, IMAGES)
        write_samples(path, images(2), None, IMAGES, force=True)
    assert np.array_equal(np.load(file), images(2))
    assert (folder / "other.txt").read_text() == "mine"
    assert np.array_equal(pixels(folder / "00000.png"), images(2)[0, 0])
    (tmp_path / "a.npy").mkdir()
    (tmp_path / "b").write_text("mine")
    for name, kind in (("a.npy", "folder"), ("b", "file")):
        with pytest.raises(FileExistsError, match=f"is a {kind}; choose another"):
            check_output(tmp_path / name, IMAGES, force=True)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.npy").write_text("old")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(np, "save", full)
    monkeypatch.setattr(Image.Image, "save", full)
    for name in ("old.npy", "x", "x.png"):
        with pytest.raises(OSError, match="no space"):
            write_samples(tmp_path / name, images(2), None, IMAGES, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["old.npy"]
    assert (tmp_path / "old.npy").read_text() == "old"


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 4)])
def test_a_scatter(shape: tuple[int, ...], tmp_path: Path) -> None:
    x = torch.randn(50, *shape, generator=torch.Generator().manual_seed(0))
    scatter(tmp_path / "x.png", x, x[:20] + 1, ("length",))
    picture = pixels(tmp_path / "x.png")
    assert picture.shape == (640, 640, 4) and len(np.unique(picture.reshape(-1, 4), axis=0)) > 10
