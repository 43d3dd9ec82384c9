"""Arrays in .npy and .npz files, and what arrays from anywhere have in common."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image

from fluvial.data.dataset import DataSet
from fluvial.data.format import Format, choices
from fluvial.data.images import Options, fit
from fluvial.data.store import SMALL, Rows, as_tensor, digest, keep, memory_map, slices

_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}

_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.0+)?")
"""Text of a whole number. 007 is a name."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?")


def read_array(path: Path, member: str | None, label: str | None, options: Options) -> DataSet:
    """An .npy file, or one array of an .npz file, with labels.

    An .npy file is memory-mapped. An array of an .npz file is held in memory up to 256 MB, and
    unpacked once into the cache beyond that.

    Args:
        path: exists.
        member: name of an array in an .npz file; None for ``x``, or the only one.
        label: name of the array of labels in an .npz file, by default ``label`` if there is one;
            path of an .npy file with the labels of another.
        options: what images are brought to.

    Raises:
        ValueError: no file of this kind, or damaged; no array of this name; see `from_array`.
        FileNotFoundError: there is no file of labels.
    """
    notes: list[str] = []
    labels = None
    if path.suffix.lower() == ".npy":
        x = memory_map(path)
        if label is not None:
            place = Path(label).expanduser()
            if not place.is_file():
                raise FileNotFoundError(
                    f"label: there is no file {label}; labels of an .npy file are in another one"
                )
            labels = memory_map(place)
    else:
        x, labels = _npz(path, member, label, options.cache, notes)
    return from_array(x, labels, path.name, options, notes)


def from_array(
    x: np.ndarray,
    labels: np.ndarray | None,
    name: str,
    options: Options,
    notes: Sequence[str] = (),
) -> DataSet:
    """Images if ``x`` is uint8 of shape (N, C, H, W) with C 1 or 3, or (N, H, W), or (N, H, W, C);
    else an array of numbers, to be standardised: by the mean and standard deviation of every
    column of (N, D), of every channel, dimension 1, of more dimensions.

    Raises:
        ValueError: there are no rows; ``x`` holds anything but finite real numbers; the labels do
            not fit; it cannot be told which dimension of images is that of the channels; an array
            that is no images has its channels last; a size or number of channels is asked for, and
            ``x`` is no images.
    """
    notes = list(notes)
    x = _numbers(x, options.cache, notes)
    number = label_names = None
    if labels is not None:
        number, label_names = label_numbers(labels, len(x))
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        images = _as_images(x, notes)
        if images is not None:
            images = _refitted(images, options, notes)
            form = Format(
                "images", images.shape[1:], label_names=label_names or (), resize=options.resize
            )
            return _users(images, number, form, name, notes)
    if x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] == x.shape[2] > 4:
        raise ValueError(
            f"x of shape {x.shape} ({x.dtype}) looks like (N, height, width, channels); images are "
            "uint8 with 1 or 3 channels, other arrays (N, channels, ...): transpose it"
        )
    if options.size or options.channels:
        raise ValueError(
            f"size and channels are for images, uint8 of shape (N, 1 or 3, height, width); "
            f"{name} holds {x.dtype} of shape {x.shape}"
        )
    if x.ndim == 1:
        x = x[:, None]
    if x.dtype.kind in "iu":
        notes.append(
            f"whole numbers ({x.dtype}) that are not images: each batch is converted to float32, "
            "and samples are not rounded"
        )
    mean, std, constant = moments(x)
    if constant:
        what = "column" if x.ndim == 2 else "channel"
        listed = ", ".join(map(str, constant[:8])) + (", ..." if len(constant) > 8 else "")
        plural = "s" * (len(constant) != 1)
        notes.append(f"{len(constant)} {what}{plural} of one value only ({listed}): scaled by 1")
    form = Format("arrays", x.shape[1:], mean, std, label_names or ())
    return _users(x, number, form, name, notes)


def _users(
    x: np.ndarray, label: np.ndarray | None, form: Format, name: str, notes: Sequence[str]
) -> DataSet:
    return DataSet(
        x=as_tensor(x),
        label=None if label is None else torch.from_numpy(label),
        format=form,
        name=name,
        licence="unknown",
        source="the user's files",
        notes=tuple(notes),
    )


def label_numbers(values: np.ndarray, rows: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as int64 numbers 0 to K - 1, and the names of the K that occur.

    Args:
        values: (rows,), or (rows, 1): whole numbers of any type, or text; numbers are ordered by
            value, texts that all are whole numbers too.
        rows: how many there must be.

    Raises:
        ValueError: the shape or type is another, a label is missing, or a number is not whole.
    """
    if values.shape == (rows, 1):
        values = values[:, 0]
    if values.shape != (rows,):
        hint = ""
        if values.ndim == 2 and len(values) == rows:
            hint = "; of one-hot rows take argmax(1)"
        raise ValueError(
            f"label must have shape ({rows},), one for each row, got {values.shape}{hint}"
        )
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8")
    if values.dtype.kind == "U":
        missing = int((np.char.strip(values) == "").sum())
        if missing:
            raise ValueError(f"label: {missing} of {rows} are missing; leave those rows out")
        texts, places = np.unique(values, return_inverse=True)
        if all(_WHOLE.fullmatch(text) for text in texts.tolist()):
            # ordered as numbers: 2 before 10
            values = np.array([int(text.partition(".")[0]) for text in texts.tolist()])[places]
        elif all(_NUMBER.fullmatch(text) for text in texts.tolist()):
            values = texts.astype(np.float64)[places]
    if values.dtype.kind == "f":
        missing = int(np.isnan(values).sum())
        if missing:
            raise ValueError(f"label: {missing} of {rows} are missing; leave those rows out")
        if not (np.isfinite(values).all() and (values == np.rint(values)).all()):
            odd = values[values != np.rint(values)] if np.isfinite(values).all() else values
            raise ValueError(f"label must hold whole numbers or names, got {odd.flat[0]}")
        values = values.astype(np.int64)
    if values.dtype.kind not in "biuU":
        raise ValueError(f"label must hold whole numbers or names, got {values.dtype}")
    names, numbers = np.unique(values, return_inverse=True)
    return numbers.astype(np.int64), tuple(map(str, names))


def moments(
    x: np.ndarray, columns: Sequence[str] = ()
) -> tuple[tuple[float, ...], tuple[float, ...], list[int]]:
    """Mean and standard deviation along dimension 1, in float64 and in blocks.

    Args:
        x: real numbers, (N, D) or (N, C, ...).
        columns: names, for messages.

    Returns:
        The means; the standard deviations (of N, not N - 1), 1 where there is only one value; and
        the indices of those.

    Raises:
        ValueError: a number is NaN or infinite, or so large that the square of its distance from
            the mean is infinite.
    """
    axes = (0, *range(2, x.ndim))
    count, mean, squares = 0, np.zeros(x.shape[1]), np.zeros(x.shape[1])
    low, high = np.full(x.shape[1], np.inf), np.full(x.shape[1], -np.inf)
    odd, first = 0, ""
    for part in slices(len(x), x[:1].nbytes):
        block = x[part].astype(np.float64)
        finite = np.isfinite(block)
        if not finite.all():
            if not odd:
                row, *rest = np.argwhere(~finite)[0].tolist()
                where = f"column {columns[rest[0]]!r}" if columns else f"column {rest[0]}"
                first = (
                    f"row {part.start + row}, {where if x.ndim == 2 else f'index {tuple(rest)}'}"
                )
            odd += int(block.size - finite.sum())
        if odd:
            continue
        # Chan, Golub and LeVeque: the moments of a union from those of its parts
        size = block.size // x.shape[1]
        with np.errstate(over="ignore", invalid="ignore"):
            centre = block.mean(axes)
            shift = centre - mean
            around = block - centre.reshape(-1, *(1,) * (x.ndim - 2))
            squares += (around**2).sum(axes) + shift**2 * (count * size / (count + size))
            mean += shift * (size / (count + size))
        count += size
        low, high = np.minimum(low, block.min(axes)), np.maximum(high, block.max(axes))
    if odd:
        raise ValueError(
            f"x holds {odd} number{'s' * (odd != 1)} that {'are' if odd != 1 else 'is'} NaN or "
            f"infinite, the first in {first}; leave those rows out, or fill them in"
        )
    std = np.sqrt(squares / count)
    large = np.flatnonzero(~np.isfinite(std))
    if len(large):
        where = columns[large[0]] if columns else large[0]
        raise ValueError(
            f"x: the numbers of column {where} are too large to be squared; scale them"
        )
    # by its extremes: rounding leaves a column of one value a deviation that is not quite 0
    constant = (low == high) | (std == 0)
    return (
        tuple(mean.tolist()),
        tuple(np.where(constant, 1, std).tolist()),
        np.flatnonzero(constant).tolist(),
    )


def _numbers(x: np.ndarray, cache: Path | None, notes: list[str]) -> np.ndarray:
    """The array in a type of real numbers that PyTorch has."""
    if x.dtype.kind not in "biuf":
        wanted = "a table of several columns is read from .csv or .parquet"
        if x.dtype.kind in "USO":
            wanted = "text cannot be modelled as numbers"
        elif x.dtype.kind == "c":
            wanted = "keep the real and imaginary part as two channels"
        raise ValueError(f"x must hold real numbers, got {x.dtype}: {wanted}")
    if x.ndim == 0 or 0 in x.shape:
        raise ValueError(f"x must have rows, and numbers in them, got shape {x.shape}")
    if x.ndim > 1 and len(x) > 1 and not x.flags.c_contiguous and x.flags.f_contiguous:
        notes.append(
            "stored column by column (Fortran order), so that a row is spread over the whole file: "
            "np.ascontiguousarray makes it faster to read"
        )
    if x.dtype == bool:
        return x.view(np.int8)
    native = x.dtype.newbyteorder("=")
    if x.dtype.kind == "f" and x.dtype.itemsize > 8:
        native = np.dtype(np.float64)
    if native == x.dtype and x.flags.aligned:
        return x

    def make() -> Rows:
        blocks = (x[part].astype(native) for part in slices(len(x), x[:1].nbytes))
        return Rows(x.shape, native, blocks)

    source = getattr(x, "filename", None)
    if x.nbytes <= SMALL or source is None:
        return x.astype(native)
    status = Path(source).stat()
    key = digest("native", str(source), status.st_size, status.st_mtime_ns, str(native))
    return keep(make, cache, key)[0]


def _as_images(x: np.ndarray, notes: list[str]) -> np.ndarray | None:
    """uint8 (N, C, H, W), a view; None for no images."""
    if x.ndim == 3:
        notes.append(f"(N, height, width) = {x.shape} was read as images of one channel")
        return x[:, None]
    first, last = x.shape[1] in (1, 3), x.shape[3] in (1, 3)
    if first and last:
        raise ValueError(
            f"x of shape {x.shape} may be (N, channels, height, width) or (N, height, width, "
            "channels): save images with sides other than 1 and 3"
        )
    if last:
        notes.append(f"(N, height, width, channels) = {x.shape} was read as images")
        return x.transpose(0, 3, 1, 2)
    return x if first else None


def _refitted(x: np.ndarray, options: Options, notes: list[str]) -> np.ndarray:
    """Images of the size and the number of channels that are asked for."""
    _, has, *sides = x.shape
    height, width = options.size or sides
    channels = options.channels or has
    if (channels, height, width) == x.shape[1:]:
        return x

    def blocks() -> Iterator[np.ndarray]:
        for row in x:
            pixels = row[0] if has == 1 else np.ascontiguousarray(row.transpose(1, 2, 0))
            image = Image.fromarray(pixels).convert("L" if channels == 1 else "RGB")
            yield fit(image, (height, width), options.resize)[None]

    notes.append(
        f"images of {has} x {sides[0]} x {sides[1]} (channels x height x width) were brought to "
        f"{channels} x {height} x {width}, {options.resize}"
    )
    rows = Rows((len(x), channels, height, width), np.dtype(np.uint8), blocks())
    cache = None if rows.nbytes <= SMALL else options.cache
    key = ""
    if cache is not None:
        contents = (x[part].tobytes() for part in slices(len(x), x[:1].nbytes))
        key = digest("refitted", rows.shape, options.resize, contents)
    return keep(lambda: rows, cache, key)[0]


def _npz(
    path: Path, member: str | None, label: str | None, cache: Path | None, notes: list[str]
) -> tuple[np.ndarray, np.ndarray | None]:
    """The array and the labels of an .npz file."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = {
                info.filename.removesuffix(".npy"): info
                for info in archive.infolist()
                if info.filename.endswith(".npy")
            }
            heads = {name: _head(archive, info) for name, info in infos.items()}
            member, label = _chosen(path, heads, member, label)
            rest = sorted(heads.keys() - {member, label})
            if rest:
                hint = "" if label else "; labels are chosen with label='NAME'"
                notes.append(f"not used: {', '.join(rest)}{hint}")
            x = _member(archive, infos[member], heads[member], cache)
            labels = _member(archive, infos[label], heads[label], cache) if label else None
    except (zipfile.BadZipFile, zipfile.LargeZipFile, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is not an .npz file that can be read: {error}") from error
    return x, labels


_Head = tuple[tuple[int, ...], bool, np.dtype]


def _chosen(
    path: Path, heads: dict[str, _Head], member: str | None, label: str | None
) -> tuple[str, str | None]:
    """The names of the array and of the labels."""
    listed = ", ".join(f"{name} {shape} {dtype}" for name, (shape, _, dtype) in heads.items())
    if not heads:
        raise ValueError(f"{path} holds no arrays")
    for what, name in (("x", member), ("label", label)):
        if name is not None and name not in heads:
            raise ValueError(f"{what}: {path} has no array {name!r}; {choices(name, list(heads))}")
    if label is None and member in (None, "x") and "label" in heads and len(heads) > 1:
        label = "label"
    if member is None:
        others = [name for name in heads if name != label]
        if "x" not in others and len(others) != 1:
            raise ValueError(
                f"{path} holds {listed}, and none is called x; choose one as "
                f"{path.name}:{next(iter(heads))}, and labels with label='NAME'"
            )
        member = "x" if "x" in others else others[0]
    return member, label


def _head(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _Head:
    with archive.open(info) as file:
        return _read_head(file, info.filename)


def _read_head(file: IO[bytes], name: str) -> _Head:
    try:
        return _HEADERS[np.lib.format.read_magic(file)](file)
    except (ValueError, KeyError) as error:
        raise ValueError(f"the array {name} has a header that cannot be read: {error}") from error


def _member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, head: _Head, cache: Path | None
) -> np.ndarray:
    shape, by_column, dtype = head
    name = info.filename.removesuffix(".npy")
    if dtype.hasobject:
        raise ValueError(
            f"the array {name} holds Python objects, which are not loaded: they may run code; save "
            "it as numbers or text, array.astype(str) for instance"
        )
    if not shape or by_column or math.prod(shape) * dtype.itemsize <= SMALL or cache is None:
        with archive.open(info) as file:
            try:
                return np.lib.format.read_array(file, allow_pickle=False)
            except ValueError as error:
                raise ValueError(f"the array {name} is damaged: {error}") from error

    def blocks() -> Iterator[np.ndarray]:
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        with archive.open(info) as file:
            _read_head(file, name)
            for part in slices(shape[0], row_bytes):
                wanted = (part.stop - part.start) * row_bytes
                content = file.read(wanted)
                if len(content) < wanted:
                    raise ValueError(f"the array {name} is damaged: it ends too early")
                yield np.frombuffer(content, dtype).reshape(-1, *shape[1:])

    # the checksum of the content is in the archive
    key = digest("npz", info.CRC, info.file_size, shape, dtype.str)
    facts: dict[str, Any] = {}
    return keep(lambda: Rows(shape, dtype, blocks(), facts), cache, key)[0]
