from __future__ import annotations

import errno
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fluvial.data import DataSet, Format, read
from fluvial.data.arrays import moments
from fluvial.data.store import memory_map


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(3, 2, shape).astype(np.float32)


def quiet(path: Path | str, **options: Any) -> DataSet:
    return read(path, progress=False, **options)


def npy(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


def mapped(x: torch.Tensor, path: Path) -> bool:
    """Whether the tensor lies in a mapping of a file in ``path``."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no list of mappings on this system")
    for line in maps.read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= x.data_ptr() < high:
            return str(path) in line
    return False


def test_npy_is_mapped_and_standardised(tmp_path: Path) -> None:
    x = normal(50, 4)
    path = npy(tmp_path / "x.npy", x)
    data = quiet(path)
    assert torch.equal(data.x, torch.from_numpy(x)) and data.label is None
    assert mapped(data.x, tmp_path)
    assert (data.format.kind, data.format.shape) == ("arrays", (4,))
    wide = x.astype(np.float64)
    assert data.format.shift == pytest.approx(wide.mean(0), rel=1e-12)
    assert data.format.scale == pytest.approx(wide.std(0), rel=1e-12)
    z = data.format.encode(data.x).double()
    assert z.mean(0).abs().max() < 1e-6 and (z.std(0, correction=0) - 1).abs().max() < 1e-6
    assert (data.name, data.licence, data.source) == ("x.npy", "unknown", "the user's files")
    assert not data.notes
    before = path.read_bytes()
    data.x.zero_()
    assert path.read_bytes() == before


def test_more_dimensions_are_scaled_by_channel(tmp_path: Path) -> None:
    x = normal(20, 3, 4, 5)
    data = quiet(npy(tmp_path / "x.npy", x))
    assert data.format.shape == (3, 4, 5)
    assert data.format.shift == pytest.approx(x.astype(np.float64).mean((0, 2, 3)), rel=1e-12)
    assert data.format.scale == pytest.approx(x.astype(np.float64).std((0, 2, 3)), rel=1e-12)
    assert quiet(npy(tmp_path / "y.npy", x[:, 0, 0, 0])).x.shape == (20, 1)


def test_moments_do_not_depend_on_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(1000, 3, 2) + 1e4  # where sums of squares would lose all digits
    whole = moments(x)
    monkeypatch.setattr("fluvial.data.store.BLOCK", 7 * x[:1].nbytes)
    blocks = moments(x)
    assert blocks[0] == pytest.approx(whole[0], rel=1e-14)
    assert blocks[1] == pytest.approx(whole[1], rel=1e-11)
    assert whole[1] == pytest.approx(x.astype(np.float64).std((0, 2)), rel=1e-11)


def test_constant_columns_are_scaled_by_one(tmp_path: Path) -> None:
    x = normal(300, 3).astype(np.float64)
    x[:, 1] = 0.1  # its computed deviation is not quite 0
    data = quiet(npy(tmp_path / "x.npy", x))
    assert data.format.scale[1] == 1.0
    assert data.notes == ("1 column of one value only (1): scaled by 1",)
    assert data.format.encode(data.x)[:, 1].abs().max() < 1e-6


@pytest.mark.parametrize(
    ("place", "where"),
    [((17, 2), "row 17, column 2"), ((0, 0), "row 0, column 0")],
)
def test_numbers_that_are_not_finite(
    tmp_path: Path, place: tuple[int, int], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluvial.data.store.BLOCK", 64)
    x = normal(40, 3)
    x[place] = np.nan
    x[39] = np.inf
    with pytest.raises(ValueError, match=f"x holds 4 numbers that are NaN .* first in {where}"):
        quiet(npy(tmp_path / "x.npy", x))
    with pytest.raises(ValueError, match=r"1 number that is NaN or infinite.*row 1, index \(0, 2"):
        moments(np.array([[[1.0, 2, 3]], [[4, 5, np.nan]]]))


def test_numbers_too_large(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="column 1 are too large"):
        quiet(npy(tmp_path / "x.npy", np.array([[0, 1e200], [1, -1e200]])))


@pytest.mark.parametrize(
    ("shape", "wanted", "note"),
    [
        ((9, 3, 6, 5), (9, 3, 6, 5), ""),
        ((9, 1, 6, 5), (9, 1, 6, 5), ""),
        ((9, 6, 5), (9, 1, 6, 5), r"(N, height, width) = (9, 6, 5)"),
        ((9, 6, 5, 3), (9, 3, 6, 5), r"(N, height, width, channels) = (9, 6, 5, 3)"),
        ((9, 6, 5, 1), (9, 1, 6, 5), r"(N, height, width, channels) = (9, 6, 5, 1)"),
    ],
)
def test_images(tmp_path: Path, shape: tuple[int, ...], wanted: tuple[int, ...], note: str) -> None:
    x = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    data = quiet(npy(tmp_path / "x.npy", x))
    assert (data.format.kind, data.x.shape) == ("images", wanted)
    assert note in "".join(data.notes) and len(data.notes) == (1 if note else 0)
    assert mapped(data.x, tmp_path)
    last = x[-1] if len(shape) == 3 or not note else x[-1].transpose(2, 0, 1)
    assert np.array_equal(data.x[-1].squeeze(), last.squeeze())


def test_images_whose_channels_cannot_be_told(tmp_path: Path) -> None:
    path = npy(tmp_path / "x.npy", np.zeros((9, 3, 6, 1), np.uint8))
    with pytest.raises(ValueError, match=r"\(9, 3, 6, 1\) may be"):
        quiet(path)


@pytest.mark.parametrize("dtype, channels", [(np.float32, 3), (np.uint8, 4)])
def test_channels_at_the_end_are_not_taken_for_a_side(
    tmp_path: Path, dtype: type, channels: int
) -> None:
    np.save(tmp_path / "x.npy", np.zeros((5, 8, 8, channels), dtype))
    with pytest.raises(ValueError, match=r"looks like \(N, height, width, channels\)"):
        read(tmp_path / "x.npy")


def test_images_of_another_size(tmp_path: Path) -> None:
    x = np.zeros((4, 8, 12, 3), np.uint8)
    x[:, :, 6:] = 200
    data = quiet(npy(tmp_path / "x.npy", x), size=4, channels=1)
    assert data.x.shape == (4, 1, 4, 4)
    assert data.x[0, 0, 0, 0] < 20 and data.x[0, 0, 0, 3] > 180
    assert "were brought to 1 x 4 x 4, crop" in data.notes[-1]
    for array in (normal(4, 3), np.zeros((4, 2, 8, 8), np.uint8)):
        with pytest.raises(ValueError, match="size and channels are for images"):
            quiet(npy(tmp_path / "y.npy", array), size=4)


def test_whole_numbers_are_converted_by_the_batch(tmp_path: Path) -> None:
    x = np.arange(60, dtype=np.int16).reshape(20, 3)
    data = quiet(npy(tmp_path / "x.npy", x))
    assert data.x.dtype == torch.int16 and data.format.kind == "arrays"
    assert "each batch is converted" in data.notes[0]
    assert data.format.encode(data.x[:2]).dtype == torch.float32
    flags = quiet(npy(tmp_path / "b.npy", np.arange(90).reshape(10, 3, 3) % 2 == 0))
    assert flags.format.kind == "arrays" and set(flags.x.unique().tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", [">f4", ">i2", "<f2", "longdouble"])
def test_types_that_torch_does_not_have(tmp_path: Path, cache: Path, dtype: str) -> None:
    x = np.rint(normal(20, 3)).astype(dtype)
    path = npy(tmp_path / "x.npy", x)
    data = quiet(path)
    assert np.array_equal(data.x.numpy(), x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fluvial.data.arrays.SMALL", 0)
        large = quiet(path)
    assert torch.equal(large.x, data.x)
    assert mapped(large.x, cache if dtype != "<f2" else tmp_path)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([{1: 2}, None]), "not an .npy file that can be read"),
        (np.zeros(3, "U4"), "text cannot be modelled"),
        (np.zeros(3, "M8[s]"), "must hold real numbers"),
        (np.zeros(3, "c8"), "real and imaginary"),
        (np.zeros(3, [("a", "f4")]), "a table of several columns"),
        (np.zeros((0, 3)), "must have rows"),
        (np.zeros((3, 0)), "must have rows"),
        (np.float64(3), "must have rows"),
    ],
)
def test_arrays_that_are_no_data(tmp_path: Path, array: Any, message: str) -> None:
    path = tmp_path / "x.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        quiet(path)


@pytest.mark.parametrize("keep", [0, 20, 100, 200])
def test_damaged_npy(tmp_path: Path, keep: int) -> None:
    path = npy(tmp_path / "x.npy", normal(50, 4))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="x.npy is not an .npy file that can be read"):
        quiet(path)


def test_order_by_column_is_noted(tmp_path: Path) -> None:
    data = quiet(npy(tmp_path / "x.npy", np.asfortranarray(normal(20, 3))))
    assert "Fortran" in data.notes[0] and torch.equal(data.x, torch.from_numpy(normal(20, 3)))


def test_a_mapping_larger_than_memory_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux refuses a mapping that may be written to and is larger than memory: ENOMEM."""
    load, modes = np.load, []

    def refused(path: Path, mmap_mode: str, **options: Any) -> np.ndarray:
        modes.append(mmap_mode)
        if mmap_mode == "c":
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return load(path, mmap_mode=mmap_mode, **options)

    path = npy(tmp_path / "x.npy", normal(20, 3))
    monkeypatch.setattr(np, "load", refused)
    data = quiet(path)
    assert modes == ["c", "r"] and mapped(data.x, tmp_path)
    assert torch.equal(data.x, torch.from_numpy(normal(20, 3)))


def test_memory_map_shares_the_file(tmp_path: Path) -> None:
    array = memory_map(npy(tmp_path / "x.npy", normal(20, 3)))
    assert isinstance(array, np.memmap)
    with pytest.raises(FileNotFoundError):
        memory_map(tmp_path / "y.npy")


@pytest.mark.parametrize(
    ("label", "numbers", "names"),
    [
        (np.array([5, -1, 5, 9]), [1, 0, 1, 2], ("-1", "5", "9")),
        (np.array([[5], [1], [5], [9]], np.uint8), [1, 0, 1, 2], ("1", "5", "9")),
        (np.array([5.0, 1, 5, 9]), [1, 0, 1, 2], ("1", "5", "9")),
        (np.array(["b", "a", "b", "ö"]), [1, 0, 1, 2], ("a", "b", "ö")),
        (np.array([b"b", b"a", b"b", b"c"]), [1, 0, 1, 2], ("a", "b", "c")),
        (np.array(["10", "9", "10", "2.0"]), [2, 1, 2, 0], ("2", "9", "10")),
        (np.array(["007", "9", "7", "07"]), [0, 3, 2, 1], ("007", "07", "7", "9")),
        (np.array([True, False, True, True]), [1, 0, 1, 1], ("False", "True")),
    ],
)
@pytest.mark.parametrize("compress", [False, True])
def test_labels(
    tmp_path: Path, label: np.ndarray, numbers: list[int], names: tuple[str, ...], compress: bool
) -> None:
    (np.savez_compressed if compress else np.savez)(tmp_path / "d.npz", x=normal(4, 2), label=label)
    data = quiet(tmp_path / "d.npz")
    assert data.label.tolist() == numbers and data.label.dtype == torch.int64
    assert data.label_names == names
    npy(tmp_path / "x.npy", normal(4, 2))
    beside = quiet(tmp_path / "x.npy", label=str(npy(tmp_path / "label.npy", label)))
    assert beside.label.tolist() == numbers and beside.label_names == names


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (np.zeros(3), r"label must have shape \(4,\)"),
        (np.eye(4), r"got \(4, 4\); of one-hot rows take argmax"),
        (np.array([0, 1.5, 2, 2]), "whole numbers or names, got 1.5"),
        (np.array(["0.25", "1.5", "2", "3"]), "whole numbers or names, got 0.25"),
        (np.array([0, np.nan, 2, 2]), "label: 1 of 4 are missing"),
        (np.array([0, np.inf, 2, 2]), "whole numbers"),
        (np.array(["a", "", " ", "b"]), "label: 2 of 4 are missing"),
        (np.zeros(4, "c8"), "got complex64"),
        (np.array(["a", None, 1, 2], object), "Python objects"),
    ],
)
def test_labels_that_are_none(tmp_path: Path, label: np.ndarray, message: str) -> None:
    np.savez(tmp_path / "d.npz", x=normal(4, 2), label=label, allow_pickle=True)
    with pytest.raises(ValueError, match=message):
        quiet(tmp_path / "d.npz")


def test_npz_arrays_by_name(tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    np.savez(path, images=normal(4, 2))
    assert quiet(path).x.shape == (4, 2)  # the only one
    np.savez(path, x=normal(4, 2), y=np.arange(4))
    data = quiet(path)
    assert data.label is None and data.notes == (
        "not used: y; labels are chosen with label='NAME'",
    )
    assert quiet(path, label="y").label.tolist() == [0, 1, 2, 3]
    np.savez(path, x_train=normal(4, 2), y_train=np.arange(4), x_test=normal(2, 2))
    with pytest.raises(
        ValueError, match=r"x_train \(4, 2\) float32, y_train .* none is called x; .*d.npz:x_train"
    ):
        quiet(path)
    data = quiet(f"{path}:x_train", label="y_train")
    assert data.x.shape == (4, 2) and data.notes == ("not used: x_test",)
    assert data.name == "d.npz"
    with pytest.raises(ValueError, match="x: .* no array 'x_trian'; did you mean x_train"):
        quiet(f"{path}:x_trian")
    with pytest.raises(ValueError, match="label: .* no array 'z'; there are x_train, y_train, x_t"):
        quiet(f"{path}:x_train", label="z")
    np.savez(path)
    with pytest.raises(ValueError, match="holds no arrays"):
        quiet(path)
    with pytest.raises(FileNotFoundError, match="label: there is no file z"):
        quiet(npy(tmp_path / "x.npy", normal(2, 2)), label="z")


@pytest.mark.parametrize("compress", [False, True])
def test_large_npz_is_unpacked_once(
    tmp_path: Path, cache: Path, compress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluvial.data.arrays.SMALL", 0)
    monkeypatch.setattr("fluvial.data.store.BLOCK", 100)
    save = np.savez_compressed if compress else np.savez
    save(tmp_path / "d.npz", x=normal(30, 4), label=np.arange(30) % 3)
    data = quiet(tmp_path / "d.npz")
    assert torch.equal(data.x, torch.from_numpy(normal(30, 4))) and mapped(data.x, cache)
    assert data.label.tolist() == [0, 1, 2] * 10
    times = {path: path.stat().st_mtime_ns for path in cache.rglob("x.npy")}
    assert len(times) == 2
    assert torch.equal(quiet(tmp_path / "d.npz").x, data.x)
    assert times == {path: path.stat().st_mtime_ns for path in cache.rglob("x.npy")}
    assert not mapped(quiet(tmp_path / "d.npz", cache=None).x, tmp_path)


@pytest.mark.parametrize("small", [0, 2**28])
def test_damaged_npz(tmp_path: Path, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluvial.data.arrays.SMALL", small)
    path = tmp_path / "d.npz"
    path.write_bytes(b"junk")
    with pytest.raises(ValueError, match="not an .npz file that can be read"):
        quiet(path)
    np.savez(path, x=normal(50, 4))
    content = bytearray(path.read_bytes())
    content[400] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"not an .npz file that can be read: Bad CRC-32"):
        quiet(path)
    for text, message in ((b"no array", "header"), (b"\x93NUMPY\x01\x00v\x00{'descr", "header")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", text)
        with pytest.raises(ValueError, match=message):
            quiet(path)
    whole = tmp_path / "x.npy"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", npy(whole, normal(50, 4)).read_bytes()[:500])
    with pytest.raises(ValueError, match="damaged|not an .npz"):
        quiet(path)


def vectors(copies: int = 2, rows: int = 200) -> DataSet:
    x = torch.from_numpy(normal(rows // copies, 3)).repeat(copies, 1)
    return DataSet(x, None, Format("arrays", (3,)), "vectors", "none", "made here")


def test_split_without_labels_keeps_every_vector() -> None:
    parts = vectors().split()
    assert [len(part) for part in parts.values()] == [160, 20, 20]
    assert all(part.label is None for part in parts.values())
    together = torch.cat([part.x for part in parts.values()])
    assert torch.equal(together[:, 0].sort()[0], vectors().x[:, 0].sort()[0])
    with pytest.raises(ValueError, match="test=0.1 leaves no row of vectors, which has 4"):
        vectors(rows=4).split()


def test_split_of_larger_events_keeps_equal_rows_once() -> None:
    x = torch.from_numpy(normal(40, 2, 3)).repeat(2, 1, 1)
    data = DataSet(x, None, Format("arrays", (2, 3)), "events", "none", "made here")
    parts = data.split()
    assert [len(part) for part in parts.values()] == [32, 4, 4]
    assert parts["test"].notes == ("40 of 80 rows, equal to an earlier one, are in no part",)
    together = torch.cat([part.x for part in parts.values()]).flatten(1)
    assert len(together.unique(dim=0)) == 40


@pytest.mark.parametrize("shape", [(200, 5), (200, 3, 4, 4)])
def test_parts_of_large_data_are_mapped_files(
    tmp_path: Path, cache: Path, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = quiet(npy(tmp_path / "x.npy", normal(*shape)))
    small = data.split(seed=4)
    monkeypatch.setattr("fluvial.data.dataset.SMALL", 0)
    monkeypatch.setattr("fluvial.data.store.BLOCK", 1000)
    large = data.split(seed=4)
    for part in small:
        assert torch.equal(small[part].x, large[part].x)
        assert mapped(large[part].x, cache) and not mapped(small[part].x, cache)
    assert len(list(cache.rglob("x.npy"))) == 3
    again = data.split(seed=4)  # found again
    assert torch.equal(again["test"].x, small["test"].x)
    assert len(list(cache.rglob("x.npy"))) == 3
    assert not mapped(data.split(seed=4, cache=None)["train"].x, cache)


def test_training_reads_rows_and_not_the_file(tmp_path: Path) -> None:
    """A sparse file of 1 TB: what would copy it, or go through it, would not end."""
    path = tmp_path / "x.npy"
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": (2**22, 1, 512, 512)}
        )
        try:
            file.truncate(file.tell() + 2**40)
        except OSError:
            pytest.skip("no sparse files here")
    data = quiet(path)
    assert data.x.shape == (2**22, 1, 512, 512)
    batch = data.x[torch.tensor([0, 2**22 - 1, 77])]
    assert data.format.encode(batch).unique().tolist() == [-1]
