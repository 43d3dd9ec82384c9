"""A folder of image files."""

from __future__ import annotations

import os
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fluvial.data.dataset import DataSet
from fluvial.data.format import Format
from fluvial.data.images import Options, pictures
from fluvial.data.store import as_tensor, digest

_QUIET = {"thumbs.db", "desktop.ini", "__macosx", "@eadir"}
"""What systems leave in folders. Left out without a note, as are names that begin with a dot."""
_NO_PICTURES = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
"""Formats that Pillow knows, and decodes with the help of other programs or not at all."""
_PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}

_SAMPLED_FILES, _SAMPLED_BYTES = 8, 2**16


@dataclass(frozen=True, slots=True)
class _File:
    """A file found. ``problem`` says why it cannot be read; empty for those to be tried."""

    place: str
    path: str
    size: int
    mtime_ns: int
    problem: str


@dataclass
class _Found:
    files: list[_File]
    ignored: Counter[str]
    notes: list[str]


def read_folder(folder: Path, options: Options) -> DataSet:
    """The images of a folder and of all folders in it.

    Folders of the first level are classes, in the order of their names; images without such folders
    have no label. Files are in the order of their paths. See `fluvial.data.images.decode` for how
    an image is read.

    Args:
        folder: exists.
        options: what is asked for. Decoded images are found again in the cache by the paths, sizes
            and times of the files, some bytes of some of them, and the options.

    Raises:
        ValueError: there are no images; they stand both in ``folder`` and in folders in it; its
            folders are parts and not classes; an image cannot be read; the sizes differ and
            ``size`` is None.
    """
    found = _Found([], Counter(), [])
    _walk(folder, "", frozenset(), _suffixes(), found)
    files = sorted(found.files, key=lambda file: file.place)
    if not files:
        held = f": it holds {_counted(found.ignored)}" if found.ignored else ""
        raise ValueError(f"the folder {folder} holds no image that Pillow opens{held}")
    flat = [file for file in files if "/" not in file.place]
    if flat and len(flat) < len(files):
        nested = next(file for file in files if "/" in file.place)
        raise ValueError(
            f"the folder {folder} holds images itself ({_shown(flat[0].place)}) and in folders in "
            f"it ({_shown(nested.place)}): put all into class folders, or none"
        )
    classes = sorted({_class(file) for file in files})
    if not flat and {name.lower() for name in classes} <= _PARTS:
        raise ValueError(
            f"the folders of {folder} look like parts of a data set, not like classes: "
            f"{', '.join(classes)}; read one of them, {folder / classes[0]} for instance"
        )

    def file(index: int) -> Path:
        if files[index].problem:
            raise ValueError(files[index].problem)
        return Path(files[index].path)

    x, good, notes = pictures(
        [_shown(file.place) for file in files], file, options, digest(_signature(files))
    )
    notes += found.notes
    if found.ignored:
        notes.append(f"ignored {_counted(found.ignored)}, which Pillow does not open as images")
    label, names = None, np.array([])
    if not flat:
        names, numbers = np.unique([_class(files[index]) for index in good], return_inverse=True)
        label = torch.from_numpy(numbers.astype(np.int64))
    return DataSet(
        x=as_tensor(x),
        label=label,
        format=Format(
            "images", x.shape[1:], label_names=tuple(map(str, names)), resize=options.resize
        ),
        name=_shown(folder.resolve().name) or "images",
        licence="unknown",
        source="the user's files",
        notes=tuple(notes),
    )


def _walk(
    folder: Path, place: str, above: frozenset[tuple[int, int]], suffixes: set[str], found: _Found
) -> None:
    """Add what is in ``folder`` to ``found``; ``place`` is its path from the first one, "a/b/"."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:
        found.notes.append(
            f"the link {_shown(place)} leads to a folder that it is in: not followed"
        )
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise ValueError(f"the folder {folder} cannot be listed: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith(".") or entry.name.lower() in _QUIET:
            continue
        problem = ""
        try:
            status = entry.stat()
        except OSError as error:  # a link that leads nowhere or to itself
            status, problem = entry.stat(follow_symlinks=False), str(error.strerror)
        if not problem and stat.S_ISDIR(status.st_mode):
            _walk(Path(entry.path), f"{place}{entry.name}/", above | {here}, suffixes, found)
            continue
        suffix = os.path.splitext(entry.name)[1].lower()
        if suffix not in suffixes:
            found.ignored[suffix or "without suffix"] += 1
            continue
        if not problem and not stat.S_ISREG(status.st_mode):
            problem = "not a regular file"
        elif not problem and status.st_size == 0:
            problem = "empty"
        elif not problem and not os.access(entry.path, os.R_OK):
            problem = "no permission to read it"
        found.files.append(
            _File(place + entry.name, entry.path, status.st_size, status.st_mtime_ns, problem)
        )


def _suffixes() -> set[str]:
    """Those of the formats that Pillow opens, and plugins that were registered with it."""
    Image.init()
    formats = Image.registered_extensions()
    return {
        suffix
        for suffix, name in formats.items()
        if name in Image.OPEN and name not in _NO_PICTURES
    }


def _signature(files: list[_File]) -> Iterator[bytes]:
    """What tells this list of files from others."""
    for file in files:
        facts = f"{file.size} {file.mtime_ns} {file.problem}"
        yield os.fsencode(file.place) + b"\0" + facts.encode()
    # archives are unpacked with times of their own: two versions of a set may agree in all of these
    readable = [file.path for file in files if not file.problem]
    for path in readable[:: max(1, len(readable) // _SAMPLED_FILES)]:
        with open(path, "rb") as content:
            yield content.read(_SAMPLED_BYTES)


def _class(file: _File) -> str:
    """The first folder of the path; accents in one form, for the name may be typed."""
    return unicodedata.normalize("NFC", _shown(file.place.partition("/")[0]))


def _shown(name: str) -> str:
    """A name as Unicode text: a file's may be any bytes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _counted(suffixes: Counter[str]) -> str:
    total = suffixes.total()
    listed = ", ".join(f"{number} {suffix}" for suffix, number in suffixes.most_common(5))
    return (
        f"{total} other file{'s' * (total != 1)} ({listed}{', ...' if len(suffixes) > 5 else ''})"
    )
