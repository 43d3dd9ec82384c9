"""Data with their labels, their format and where they come from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluvial.data.format import Format
from fluvial.data.store import SMALL, Cache, Rows, as_tensor, cache_folder, digest, keep, slices

HELD_OUT = 1_000
"""Rows that `DataSet.hold_out` holds out at most."""
STRETCHES = 8
"""Stretches of text that a part of it is made of."""


@dataclass(frozen=True, eq=False)
class DataSet:
    """Rows, labels, format and provenance.

    Args:
        x: (N, *format.shape), rows first: uint8 for images; integers for text, of the smallest type
            that holds them; floating point, or integers, else. May be memory-mapped and larger than
            memory: take rows of it, not all of it.
        label: int64, (N,), each an index into ``label_names``; None for data without labels.
        format: how the rows become the numbers a model sees.
        name: of the set.
        licence: "unknown" for a user's own files.
        source: where the files came from: package and version, for instance.
        citation: whom to cite, and a homepage; empty if not known.
        notes: what happened while the data were read.

    Raises:
        TypeError: ``x`` or ``label`` is no tensor, or of a type it may not have.
        ValueError: a shape is wrong, there are no rows, a label has no name, or ``name``,
            ``licence`` or ``source`` is empty.
    """

    x: Tensor
    label: Tensor | None
    format: Format
    name: str
    licence: str
    source: str
    citation: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        images = self.format.kind == "images"
        if not isinstance(self.x, Tensor) or (
            self.x.dtype != torch.uint8 if images else _odd(self.x)
        ):
            got = self.x.dtype if isinstance(self.x, Tensor) else type(self.x).__name__
            wanted = "torch.uint8" if images else "floating-point or integer"
            raise TypeError(f"x must be a {wanted} tensor for {self.format.kind}, got {got}")
        if tuple(self.x.shape[1:]) != self.format.shape or not len(self.x):
            raise ValueError(
                f"x must have shape (N, {', '.join(map(str, self.format.shape))}) with one row or "
                f"more, as format.shape says, got {tuple(self.x.shape)}"
            )
        if self.label is not None:
            if not isinstance(self.label, Tensor) or self.label.dtype != torch.int64:
                got = self.label.dtype if isinstance(self.label, Tensor) else type(self.label)
                raise TypeError(f"label must be a torch.int64 tensor or None, got {got}")
            if self.label.shape != self.x.shape[:1]:
                raise ValueError(
                    f"label must have shape ({len(self.x)},) as x has {len(self.x)} rows, "
                    f"got {tuple(self.label.shape)}"
                )
            low, high = int(self.label.min()), int(self.label.max())
            if low < 0 or high >= len(self.label_names):
                raise ValueError(
                    f"label must lie in [0, {len(self.label_names)}), one number for each of "
                    f"label_names, got values from {low} to {high}"
                )
        for field in ("name", "licence", "source"):
            if not getattr(self, field):
                raise ValueError(f"{field} must not be empty: every set says where it comes from")

    def __len__(self) -> int:
        return len(self.x)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.format.label_names

    def split(
        self,
        *,
        train: float | None = 0.8,
        validation: float | None = 0.1,
        test: float | None = 0.1,
        seed: int = 0,
        cache: Cache = "default",
    ) -> dict[str, DataSet]:
        """Parts with the same share of every class, and no row in common.

        Of rows that are equal in every number only the first is kept (with its label), so that the
        parts share no image and none holds an image twice: the parts of the 10,000 animals, of
        which 9,716 are distinct, hold at most 9,716. Rows that are vectors, as those of a table,
        are all kept, and equal ones may be in two parts: how often a row occurs is then part of
        what is modelled. A class of n rows gives a part of share f between f n - 1 and f n + 1 of
        them; data without labels are one class. Shares that sum to less than 1 leave rows out.

        The rows of a part are in random order, so its first k rows are a random sample of it. The
        same set, shares and seed give the same parts on every machine.

        Text is not torn apart so: a part is made of up to `STRETCHES` stretches of rows that follow
        one another, spread over the text, and keeps their order. Equal rows are kept.

        Parts larger than 256 MB are memory-mapped files in the cache, written once. Together they
        take as much room there as the data.

        Args:
            train, validation, test: shares of each class, in (0, 1]; None for no such part.
            seed: not negative.
            cache: folder for parts that are large, "default" as in `fluvial.data.read`; None to
                hold them in memory.

        Returns:
            The parts asked for, by name.

        Raises:
            ValueError: a share is not in (0, 1], they sum to more than 1, all are None, the seed
                is negative, or a class has too few rows to be in every part.
        """
        shares = {
            part: share
            for part, share in (("train", train), ("validation", validation), ("test", test))
            if share is not None
        }
        if not shares:
            raise ValueError("train, validation and test are all None: at least one is needed")
        for part, share in shares.items():
            if not 0 < share <= 1:
                raise ValueError(
                    f"{part} must be a share in (0, 1], or None for no such part, got {share}"
                )
        total = math.fsum(shares.values())
        if total > 1 + 1e-9:
            raise ValueError(f"{', '.join(shares)} must sum to at most 1, got {total}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        if self.format.kind == "text":
            return self._stretches(shares, seed, cache)

        vectors, large = len(self.format.shape) == 1, self._row_bytes * len(self) > SMALL
        digests = None if vectors and not large else self._digests()
        if vectors or digests is None:
            distinct = np.arange(len(self))
        else:
            # NumPy returns the first occurrence of each, for it sorts stably
            distinct = np.sort(np.unique(digests, return_index=True)[1])
        notes: tuple[str, ...] = self.notes
        if len(distinct) < len(self):
            notes += (
                f"{len(self) - len(distinct)} of {len(self)} rows, equal to an earlier one, are in "
                "no part",
            )
        if self.label is None:
            labels = np.zeros(len(distinct), dtype=np.int64)
        else:
            labels = self.label.cpu().numpy()[distinct]
        mix = np.empty(len(distinct), dtype=np.uint64)
        rows: dict[str, list[np.ndarray]] = {part: [] for part in shares}
        for label, label_name in enumerate(self.label_names or ("",)):
            members = np.flatnonzero(labels == label)
            if not len(members):
                continue
            # NumPy promises that the raw stream of a bit generator never changes; it makes no such
            # promise for Generator.permutation.
            stream = np.random.PCG64([seed, label])
            order = np.argsort(stream.random_raw(len(members)), kind="stable")
            # keys of their own for the order in a part: a part holds a range of the first ones, and
            # the ends of the range differ from class to class
            mix[members] = stream.random_raw(len(members))
            members = members[order]
            start, upto = 0, 0.0
            for part, share in shares.items():
                upto += share
                stop = min(len(members), math.floor(upto * len(members) + 0.5))
                if stop == start:
                    noun = "image" if self.format.kind == "images" else "row"
                    whose = self.name if self.label is None else f"class {label_name!r}"
                    raise ValueError(
                        f"{part}={share} leaves no {noun} of {whose}, which has {len(members)} to "
                        "share out; choose larger shares, None for a part, or more data"
                    )
                rows[part].append(members[start:stop])
                start = stop

        parts = {}
        for part, by_class in rows.items():
            chosen = np.concatenate(by_class)
            chosen = distinct[chosen[np.argsort(mix[chosen], kind="stable")]]
            index = torch.from_numpy(chosen).to(self.x.device)
            parts[part] = replace(
                self,
                x=self._taken(index, cache, None if digests is None else digests[chosen].tobytes()),
                label=None if self.label is None else self.label[index],
                notes=notes,
            )
        return parts

    def hold_out(self, share: float, *, seed: int = 0) -> tuple[DataSet, DataSet | None]:
        """(the rows to train on, those held out), by `split`: for what is measured of a model.

        Args:
            share: of each class that is held out, in [0, 1), but no more than `HELD_OUT` rows in
                all; nothing is held out, and all rows stay, for 0.
            seed: of the choice.

        Raises:
            ValueError: as `split`.
        """
        share = min(share, HELD_OUT / len(self))
        if not share:
            return self, None
        try:
            parts = self.split(train=1 - share, validation=share, test=None, seed=seed)
        except ValueError as error:
            reason = str(error).partition(";")[0]
            raise ValueError(
                f"{reason}; hold out another share, or nothing, validation=0"
            ) from error
        return parts["train"], parts["validation"]

    @property
    def unlabelled(self) -> DataSet:
        """The rows without their labels."""
        return replace(self, label=None, format=replace(self.format, label_names=()))

    def about(self, **rows: int) -> dict[str, Any]:
        """Provenance and format, as the settings of a run hold them, with the ``rows`` of each
        part."""
        return {
            "name": self.name,
            "source": self.source,
            "licence": self.licence,
            "citation": self.citation,
            "rows": rows,
            "notes": list(self.notes),
            "format": self.format.summary(),
        }

    def _stretches(self, shares: dict[str, float], seed: int, cache: Cache) -> dict[str, DataSet]:
        """`split` of text."""
        rows = len(self)
        number = max(1, min(STRETCHES, int(rows * min(shares.values()))))
        first = int(np.random.PCG64(seed).random_raw()) % rows
        ends = [k * rows // number for k in range(number + 1)]
        key = None
        if rows * self._row_bytes > SMALL:
            blocks = (self.x[part].contiguous() for part in slices(rows, self._row_bytes))
            key = digest("text", (block.view(torch.uint8).numpy().tobytes() for block in blocks))
        parts, upto = {}, 0.0
        for part, share in shares.items():
            before, upto = upto, upto + share
            pieces = [
                np.arange(
                    low + math.floor(before * (high - low) + 0.5),
                    low + min(high - low, math.floor(upto * (high - low) + 0.5)),
                )
                for low, high in pairwise(ends)
            ]
            # a stretch that the end of the text cuts goes on at its start
            chosen = np.sort((np.concatenate(pieces) + first) % rows)
            if not len(chosen):
                raise ValueError(
                    f"{part}={share} leaves no window of {self.name}, which has {rows} to share "
                    "out; choose larger shares, None for a part, shorter windows, or more text"
                )
            content = None if key is None else f"{key} {part} {shares} {seed}".encode()
            x = self._taken(torch.from_numpy(chosen).to(self.x.device), cache, content)
            label = None if self.label is None else self.label[chosen]
            parts[part] = replace(self, x=x, label=label)
        return parts

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.format.shape) * self.x.element_size()

    def _taken(self, index: Tensor, cache: Cache, content: bytes | None) -> Tensor:
        """The rows of an index: in memory, or in a file if they are large."""
        if content is None or cache is None or len(index) * self._row_bytes <= SMALL:
            return self.x[index]

        def make() -> Rows:
            parts = slices(len(index), self._row_bytes)
            like = self.x[:1].cpu().numpy()
            blocks = (self.x[index[part]].cpu().numpy() for part in parts)
            return Rows((len(index), *like.shape[1:]), like.dtype, blocks)

        # by content: the same rows are the same entry, wherever they came from
        key = digest("rows", str(self.x.dtype), self.format.shape, content)
        return as_tensor(keep(make, cache_folder(cache), key)[0])

    def _digests(self) -> np.ndarray:
        """16 bytes for each row."""

        def each() -> Iterator[bytes]:
            for part in slices(len(self), self._row_bytes):
                block = self.x[part].cpu().flatten(1).contiguous().view(torch.uint8).numpy()
                yield from (blake2b(row, digest_size=16).digest() for row in block)

        return np.fromiter(each(), dtype="S16", count=len(self))


def _odd(x: Tensor) -> bool:
    return x.is_complex() or x.is_quantized
