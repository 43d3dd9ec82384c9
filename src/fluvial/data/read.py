"""One function for every source of data."""

from __future__ import annotations

import os
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from fluvial.data.animals import animals
from fluvial.data.arrays import from_array, read_array
from fluvial.data.dataset import DataSet
from fluvial.data.digits import digits
from fluvial.data.folder import read_folder
from fluvial.data.hub import read_hub
from fluvial.data.images import Options, Resize
from fluvial.data.store import Cache, cache_folder
from fluvial.data.tables import SUFFIXES, read_table

SETS = {"animals": animals, "digits": digits}
"""The sets that ship in packages, by name."""
LARGE = 128
"""Side of images, in pixels, beyond which a size must be asked for."""

_POSSIBLE = (
    f"a shipped set ({', '.join(SETS)}), a folder of images, an .npy or .npz file, a table "
    "(.csv, .tsv, .parquet), or hf:OWNER/NAME of Hugging Face"
)


def read(
    source: str | os.PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    resize: Resize = "crop",
    label: str | None = None,
    skip_bad: bool = False,
    cache: Cache = "default",
    progress: bool = True,
) -> DataSet:
    """Data of any source, with format and provenance.

    ===================================  =========================================================
    ``source``                           what is read
    ===================================  =========================================================
    ``animals``, ``digits``              a set that ships in a package; ``./digits`` is a folder
    a folder                             the images in it: JPEG, PNG, WebP, TIFF, GIF, BMP and what
                                         else Pillow opens. Folders in it are classes, named as they
                                         are; without them there are no labels
    ``FILE.npy``                         an array, memory-mapped; ``label`` names an .npy file
    ``FILE.npz``, ``FILE.npz:NAME``      the array ``x``, the only one, or NAME; labels in ``label``
    ``.csv``, ``.tsv``, ``.parquet``     a table of numbers; ``label`` names the column of the class
    ``hf:OWNER/NAME``                    a data set of Hugging Face, or a folder that their package
    ``hf:OWNER/NAME:CONFIG@SPLIT``       `datasets` loads, ``hf:./folder``
    ===================================  =========================================================

    uint8 arrays (N, C, H, W), (N, H, W) and (N, H, W, C) with C 1 or 3 are images. Other numbers
    are standardised by ``format``, for which the data are gone through once, in blocks.

    Args:
        source: see above.
        size: height and width that images are to have, or one number for both; None if all have the
            same.
        channels: 1 for grey, 3 for colour; None for 3 unless every image is grey.
        resize: how images of other sizes are brought to ``size``: "crop" takes the largest centred
            part of its proportions, "pad" puts the whole image in the middle of a black one,
            "stretch" changes the proportions. All are antialiased.
        label: where the labels are, for all sources but folders and shipped sets.
        skip_bad: leave out images that cannot be read, and list them in the notes.
        cache: folder for decoded images and unpacked arrays: "default" for the environment variable
            FLUVIAL_CACHE, else ``~/.cache/fluvial``; None to hold them in memory.
        progress: show progress bars.

    Returns:
        The data. ``notes`` says what was changed or left out.

    Raises:
        FileNotFoundError: there is no such source.
        ValueError: the source is of no kind that can be read, is damaged or empty, or an argument
            does not fit it. Every image that cannot be read is found here, not in training.
        ModuleNotFoundError: a package is missing; the message says how to install it.
        OSError: the cache cannot be written.
    """
    options = Options(
        (size, size) if isinstance(size, int) else size,
        channels,
        resize,
        skip_bad,
        cache_folder(cache),
        progress,
    )
    text = os.fspath(source)
    if text in SETS:
        if label is not None:
            raise ValueError(f"label: the labels of {text} are known, got {label!r}")
        return _shipped(text, options)
    if text.startswith("hf:"):
        return read_hub(text.removeprefix("hf:"), label, options)
    path, member = Path(text).expanduser(), None
    if path.is_dir():
        if label is not None:
            raise ValueError(f"label: the classes of images are their folders, got {label!r}")
        return read_folder(path, options)
    if not path.exists() and ".npz:" in path.name:
        file, _, member = text.rpartition(":")
        path = Path(file).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"there is no {text}{_meant(path)}; a source is {_POSSIBLE}")
    if path.suffix.lower() in (".npy", ".npz"):
        return read_array(path, member, label, options)
    if path.name.lower().endswith(SUFFIXES):
        if options.size or options.channels:
            raise ValueError(f"size and channels are for images, and {path} is a table")
        return read_table(path, label=label)
    raise ValueError(f"{path} cannot be read{_hint(path)}; a source is {_POSSIBLE}")


def _shipped(name: str, options: Options) -> DataSet:
    data = SETS[name]()
    if not options.size and not options.channels:
        return data
    changed = from_array(data.x.numpy(), None, name, options)
    return replace(
        data,
        x=changed.x,
        format=replace(changed.format, label_names=data.label_names),
        notes=changed.notes,
    )


def _meant(path: Path) -> str:
    """A name close to one that is not there: beside it, or of a shipped set."""
    names = {name: name for name in SETS} if path.name == str(path) else {}
    if path.parent.is_dir():
        names |= {entry.name: str(entry) for entry in path.parent.iterdir()}
    close = get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f" (did you mean {names[close[0]]}?)" if close else ""


def _hint(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix in (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar"):
        return ": unpack it and give the folder"
    if suffix in (".xls", ".xlsx", ".ods"):
        return ": save the sheet as .csv"
    if suffix in (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif"):
        return ": give the folder that the images are in"
    if suffix in (".txt", ".text", ".jsonl"):
        return ": text is read by read_text, and learned by fluvial train caddi-discrete-diffusion"
    if suffix in (".pkl", ".pickle", ".pt", ".pth"):
        return ": files of Python objects may run code; save the array as .npy"
    return ""


def refuse_large(data: DataSet) -> None:
    """Of images whose size nobody has chosen: a training on large ones would take days on a laptop.

    Raises:
        ValueError: a side is above `LARGE`.
    """
    height, width = data.format.shape[-2:] if data.format.kind == "images" else (0, 0)
    if max(height, width) > LARGE:
        raise ValueError(
            f"size: the images are {height} x {width}; say at which size to train, size=64 for "
            f"instance, or size={height if height == width else (height, width)} if it is meant"
        )
