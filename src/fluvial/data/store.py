"""Arrays that are larger than memory: read in blocks, kept in a cache folder, memory-mapped."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

Cache: TypeAlias = str | os.PathLike[str] | None

SMALL = 2**28
"""Bytes up to which an array that has to be rewritten is held in memory."""
BLOCK = 2**24
"""Bytes of a block of rows."""

_LAYOUT = 1
"""Of the entries. Part of every key: a change of what is kept makes new entries."""
_HEADER = 256
"""Bytes of the header of an .npy file: room for any shape."""


@dataclass
class Rows:
    """An array as blocks of rows.

    Args:
        shape: of the array, with at least as many rows as will come.
        dtype: of the array.
        blocks: arrays (rows, *shape[1:]), to be gone through once.
        facts: to be kept with the array, as JSON; complete once the blocks are through.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    blocks: Iterable[np.ndarray]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize


def cache_folder(cache: Cache) -> Path | None:
    """The folder that an argument ``cache`` stands for.

    Args:
        cache: a folder, None for none, or "default": the environment variable FLUVIAL_CACHE, else
            ``~/.cache/fluvial``.
    """
    if cache is None:
        return None
    if cache == "default":
        cache = os.environ.get("FLUVIAL_CACHE") or "~/.cache/fluvial"
    return Path(cache).expanduser()


def digest(*parts: Any) -> str:
    """A name for what depends on ``parts``: what JSON can hold, bytes, or iterators of bytes."""
    hasher = blake2b(digest_size=16)
    for part in (_LAYOUT, *parts):
        content = [part] if isinstance(part, bytes) else part
        if not isinstance(part, Iterator | bytes):
            content = [json.dumps(part).encode()]
        for chunk in content:
            hasher.update(len(chunk).to_bytes(8, "little") + chunk)
        hasher.update(b"end")
    return hasher.hexdigest()


def slices(rows: int, row_bytes: int) -> Iterator[slice]:
    """Ranges of rows of at most `BLOCK` bytes, or of one row."""
    step = max(1, BLOCK // max(1, row_bytes))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def memory_map(path: Path) -> np.ndarray:
    """The array of an .npy file, mapped. What is written to it does not reach the file.

    A mapping that may be written to counts as memory that may be needed, and one larger than the
    machine's memory is refused. Such a file is mapped for reading alone: writing to it ends the
    process.

    Raises:
        ValueError: not an .npy file, damaged, or of Python objects.
    """
    try:
        try:
            return np.load(path, mmap_mode="c", allow_pickle=False)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not an .npy file that can be read: {error}") from error


def as_tensor(array: np.ndarray) -> Tensor:
    """Of the same memory, mapped or not."""
    with warnings.catch_warnings():
        # of an array mapped for reading alone, see `memory_map`
        warnings.filterwarnings("ignore", "The given NumPy array is not writ", UserWarning)
        return torch.from_numpy(array)


def keep(
    make: Callable[[], Rows], cache: Path | None, key: str
) -> tuple[np.ndarray, dict[str, Any]]:
    """The array of ``make()`` and its facts: from the cache if it is there, else made and kept.

    An entry of the cache is a folder ``key`` with ``x.npy`` and ``facts.json``, made under another
    name and then renamed: it is whole or not there. Of processes that want the same entry one makes
    it, the others wait.

    Args:
        make: called if needed.
        cache: folder; None to hold the array in memory.
        key: names all that the result depends on.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    if cache is None:
        rows = make()
        whole = np.empty(rows.shape, rows.dtype)
        count = 0
        for block in rows.blocks:
            whole[count : count + len(block)] = block
            count += len(block)
        return whole[:count], rows.facts
    place = cache / key
    entry = _entry(place)
    if entry is None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            lock = FileLock(cache / f".{key}.lock")
            lock.acquire()
        except OSError as error:
            raise OSError(
                f"cache: the folder {cache} cannot be written to ({error.strerror}); name another "
                "in the environment variable FLUVIAL_CACHE or as cache="
            ) from error
        try:
            entry = _entry(place) or _make(make(), place)
        finally:
            lock.release()
    return entry


def _make(rows: Rows, place: Path) -> tuple[np.ndarray, dict[str, Any]]:
    part = place.with_name(f".{place.name}.part")
    for remains in (part, place):  # of a process that was killed; of an entry that is damaged
        shutil.rmtree(remains, ignore_errors=True)
    free = shutil.disk_usage(place.parent).free
    if rows.nbytes > free:
        raise OSError(
            f"cache: {rows.nbytes / 1e9:.1f} GB are needed in {place.parent}, {free / 1e9:.1f} GB "
            "are free; name another folder in the environment variable FLUVIAL_CACHE or as cache="
        )
    part.mkdir()
    try:
        with (part / "x.npy").open("wb") as file:
            # not through a mapping, which ends the process when the disk is full
            file.seek(_HEADER)
            count = 0
            for block in rows.blocks:
                file.write(np.ascontiguousarray(block, rows.dtype).data)
                count += len(block)
            file.seek(0)
            file.write(_npy_header((count, *rows.shape[1:]), rows.dtype))
            file.flush()
            os.fsync(file.fileno())
        with (part / "facts.json").open("w", encoding="utf-8") as facts:
            json.dump(rows.facts, facts)
            facts.flush()
            os.fsync(facts.fileno())
        part.rename(place)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    entry = _entry(place)
    if entry is None:
        raise OSError(f"cache: {place} was changed while it was written")
    return entry


def _entry(place: Path) -> tuple[np.ndarray, dict[str, Any]] | None:
    """What is kept; None if there is nothing, or it is damaged."""
    try:
        facts = json.loads((place / "facts.json").read_text(encoding="utf-8"))
        return memory_map(place / "x.npy"), facts
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _npy_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """Of version 1.0 of the .npy format, of a length that does not depend on the number of rows."""
    fields = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    start = b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little")
    return start + (repr(fields).ljust(_HEADER - 11) + "\n").encode("latin1")
