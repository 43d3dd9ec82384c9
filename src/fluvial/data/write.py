"""Samples in the form of the data they are like: pictures, arrays, tables, texts."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from fluvial.data.format import Format

SUFFIXES = {
    "images": (".png", "", ".npz", ".npy"),
    "arrays": (".npz", ".npy"),
    "table": (".csv", ".parquet", ".npz", ".npy"),
    "text": (".txt", ".jsonl", ".npz", ".npy"),
}
"""Suffixes of the files that samples of each kind of data can be written to; "" is a folder."""

GRID_PIXELS = 640
"""Small images of a grid are magnified, by a whole number, up to this many pixels a row."""


TEXT_LINES = 32
"""Lines of a picture of texts."""


def check_output(path: Path, format: Format, *, force: bool = False) -> None:
    """Refuse a place that samples cannot be written to, before they are drawn.

    Raises:
        ValueError: the suffix of ``path`` is none for this kind of data.
        FileExistsError: ``path`` is a file, or a folder that is not empty, and ``force`` is false;
            or one where the other is wanted.
    """
    suffixes = SUFFIXES[format.kind]
    if path.suffix.lower() not in suffixes:
        wanted = [suffix or "a folder (no suffix)" for suffix in suffixes]
        what = {"table": "rows of a table", "text": "texts"}.get(format.kind, format.kind)
        raise ValueError(
            f"out: {what} are written as {', '.join(wanted[:-1])} or {wanted[-1]}, got {path}"
        )
    folder = not path.suffix
    if path.exists() and path.is_dir() != folder:
        raise FileExistsError(f"out: {path} is a {'file' if folder else 'folder'}; choose another")
    if path.exists() and not force and (not folder or any(path.iterdir())):
        raise FileExistsError(
            f"out: {path} {'is not empty' if folder else 'exists'}; choose another, or force it"
        )


def write_samples(
    path: Path,
    x: Tensor,
    label: Tensor | None,
    format: Format,
    *,
    columns: int | None = None,
    label_column: str = "label",
    force: bool = False,
) -> None:
    """Write samples; the suffix of ``path`` says how.

    ``.png`` is one picture, the images in rows. A folder holds one PNG an image, "00000.png", with
    the name of the class in the file's name, or, of several classes, in folders named after them.
    ``.npz`` holds ``x`` and, with labels, ``label``, the classes' names; ``.npy`` holds ``x``.
    ``.csv`` and ``.parquet`` have the columns of the table and then one of the labels. ``.jsonl``
    holds an object a text, with ``text`` and ``label``; ``.txt`` is to be read, see `write_texts`;
    the arrays of text are its tokens.

    Args:
        path: the place; a file is replaced as a whole, once it is written.
        x: (n, *format.shape), in the units of the data, as `Format.decode` gives them.
        label: (n,) classes, or None.
        format: of the data.
        columns: images in a row of a grid; by default a grid is about square.
        label_column: name of the column of the labels.
        force: replace a file; of a folder those of the same names.

    Raises:
        ValueError, FileExistsError: as `check_output`.
        ModuleNotFoundError: pyarrow is missing, for ``.parquet``.
    """
    check_output(path, format, force=force)
    names = None if label is None else [format.label_names[k] for k in label.tolist()]
    array = x.cpu().numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix.lower():
        case "":
            _write_folder(path, array, names)
        case ".png":
            image_grid(path, x, columns)
        case ".npz":
            with _replacing(path) as temporary, temporary.open("wb") as file:
                if names is None:
                    np.savez(file, x=array)
                else:
                    np.savez(file, x=array, label=np.array(names))
        case ".npy":
            with _replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, array)
        case ".txt":
            write_texts(path, format.text(x))
        case ".jsonl":
            with _replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
                for k, text in enumerate(format.text(x)):
                    row = {"text": text} if names is None else {"text": text, "label": names[k]}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
        case ".csv":
            _write_csv(path, _table(array, names, format, label_column))
        case ".parquet":
            _write_parquet(path, _table(array, names, format, label_column))


def write_texts(path: Path, texts: Sequence[str], title: str = "") -> None:
    """Texts for the eye: a line ``--- 1 ---``, the first text and an empty line, and so on.

    A line of a text that begins with ``---`` or with a backslash gets a backslash more in front of
    it, so that the texts can be told apart.

    Args:
        path: of the file, which is replaced as a whole.
        texts: of any length, with line breaks or not.
        title: lines above the first text.
    """
    with _replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        if title:
            file.write(f"{title}\n\n")
        for k, text in enumerate(texts, 1):
            body = re.sub(r"^(---|\\)", r"\\\1", text, flags=re.MULTILINE)
            file.write(f"--- {k} ---\n{body}\n\n")


def text_picture(path: Path, texts: Sequence[str], columns: int = 64) -> None:
    """The first texts as a picture of `TEXT_LINES` lines, as one PNG; line breaks are shown as ↵.

    Args:
        path: of the picture, which is replaced as a whole.
        texts: of any length.
        columns: characters of a line, after which a text is broken.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines: list[str] = []
    for text in texts:
        shown = "".join(c if c.isprintable() else " " for c in text.replace("\n", "\u21b5"))
        lines += [shown[k : k + columns] for k in range(0, len(shown), columns)] or [""]
        lines.append("")
    figure = Figure(figsize=(5, 5))
    FigureCanvasAgg(figure)
    # a monospaced character is 0.6 of its size wide, and there are 72 points in an inch
    wide = max(columns // 2, *map(len, lines))
    high = max(TEXT_LINES // 2, min(TEXT_LINES, len(lines)))
    size = min(4.9 * 72 / (0.6 * wide), 4.9 * 72 / (1.3 * high))
    figure.text(
        0.01,
        0.99,
        "\n".join(lines[:TEXT_LINES]),
        family="monospace",
        fontsize=size,
        linespacing=1.2,
        va="top",
        parse_math=False,
    )
    with _replacing(path) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of characters that the font lacks
        figure.savefig(temporary, dpi=192, format="png")


def image_grid(path: Path, images: Tensor, columns: int | None = None) -> None:
    """Images (n, 1 or 3, height, width), uint8, in rows, as one PNG; unused places are white.

    Args:
        path: of the picture, which is replaced as a whole.
        images: uint8.
        columns: images in a row; the square root of their number, rounded up, by default.
    """
    pixels = images.cpu().numpy()
    count, channels, height, width = pixels.shape
    columns = min(count, columns or int(np.ceil(np.sqrt(count))))
    rows = -(-count // columns)
    # one pixel of white between images tells dark pictures apart
    sheet = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1, channels), 255, np.uint8)
    for k, image in enumerate(pixels):
        top, left = k // columns * (height + 1), k % columns * (width + 1)
        sheet[top : top + height, left : left + width] = image.transpose(1, 2, 0)
    picture = Image.fromarray(sheet.squeeze(-1) if channels == 1 else sheet)
    scale = max(1, GRID_PIXELS // picture.width)
    size = (scale * picture.width, scale * picture.height)
    with _replacing(path) as temporary:
        picture.resize(size, Image.Resampling.NEAREST).save(temporary, format="png")


def scatter(path: Path, data: Tensor, samples: Tensor, names: Sequence[str] = ()) -> None:
    """The first two numbers of every event, of data and of samples, as one PNG; of events of one
    number the two histograms.

    Args:
        path: of the picture, which is replaced as a whole.
        data, samples: (n, *event) and (m, *event), in the same units.
        names: of the numbers; counted by default.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    x, y = (rows.cpu().flatten(1)[:, :2].double().numpy() for rows in (data, samples))
    names = [*names[:2], *(f"number {k + 1}" for k in range(len(names), 2))]
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    if x.shape[1] == 1:
        low, high = min(x.min(), y.min()), max(x.max(), y.max())
        bins = np.linspace(low, high + (low == high), 41).tolist()
        axes.hist(x[:, 0], bins, density=True, color="0.75", label="data")
        axes.hist(y[:, 0], bins, density=True, histtype="step", color="C0", label="samples")
        axes.set_ylabel("density")
    else:
        size = max(2.0, min(16.0, 4000 / len(x)))
        axes.scatter(x[:, 0], x[:, 1], s=size, color="0.7", linewidths=0, label="data")
        axes.scatter(y[:, 0], y[:, 1], s=size, color="C0", linewidths=0, label="samples", alpha=0.7)
        axes.set_ylabel(names[1])
    axes.set_xlabel(names[0])
    axes.legend(frameon=False, loc="upper right", markerscale=2)
    axes.spines[["top", "right"]].set_visible(False)
    FigureCanvasAgg(figure)
    with _replacing(path) as temporary:
        figure.savefig(temporary, dpi=128, format="png")


def _write_folder(path: Path, images: np.ndarray, names: Sequence[str] | None) -> None:
    """One PNG an image; a new folder appears when all are written."""
    digits = max(5, len(str(len(images) - 1)))
    classes = sorted(set(names or ()))
    plain = _file_names(classes)
    new = not path.exists() or not any(path.iterdir())
    place = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)) if new else path
    try:
        for k, image in enumerate(images):
            name = f"{k:0{digits}d}"
            folder = place
            if names is not None and len(classes) == 1:
                name = f"{name}-{plain[names[k]]}"
            elif names is not None:
                folder = place / plain[names[k]]
                folder.mkdir(exist_ok=True)
            pixels = image.transpose(1, 2, 0)
            picture = Image.fromarray(pixels.squeeze(-1) if len(image) == 1 else pixels)
            picture.save(folder / f"{name}.png")
        if new:
            place.chmod(0o777 & ~_umask())
            if path.exists():
                path.rmdir()
            place.rename(path)
    except BaseException:
        if new:
            shutil.rmtree(place, ignore_errors=True)
        raise


def _file_names(classes: Sequence[str]) -> dict[str, str]:
    """Names of classes as names of files, different ones for different classes."""
    plain = {name: re.sub(r'[\x00-\x1f/\\:*?"<>|]', "_", name).strip(". ") for name in classes}
    often = [name.lower() for name in plain.values()]  # some file systems take A and a for one
    return {
        name: safe if safe and often.count(safe.lower()) == 1 else f"{k}-{safe or 'class'}"
        for k, (name, safe) in enumerate(plain.items())
    }


def _table(
    x: np.ndarray, names: Sequence[str] | None, format: Format, label_column: str
) -> dict[str, Sequence[object]]:
    """The columns: whole numbers as such, the others to about a millionth of their deviation, which
    is how finely a model in float32 tells them apart."""
    columns: dict[str, Sequence[object]] = {}
    scales = np.broadcast_to(format.scale, len(format.columns)).tolist()
    for name, values, scale in zip(format.columns, x.T.tolist(), scales, strict=True):
        digits = None if name in format.integers else 6 - math.floor(math.log10(scale))
        columns[name] = [round(value, digits) for value in values]
    if names is not None:
        while label_column in columns:
            label_column += "_"
        columns[label_column] = list(names)
    return columns


def _write_csv(path: Path, columns: dict[str, Sequence[object]]) -> None:
    with _replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _write_parquet(path: Path, columns: dict[str, Sequence[object]]) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Parquet needs the package pyarrow; install it with `pip install 'fluvial[tabular]'`, "
            "or write .csv",
            name="pyarrow",
        ) from error
    with _replacing(path) as temporary:
        parquet.write_table(pyarrow.table(columns), temporary)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of ``path`` when the block ends without an error."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
