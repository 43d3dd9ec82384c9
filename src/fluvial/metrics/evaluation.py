"""What an evaluation finds: metrics of samples beside those of as many real rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.metrics.bootstrap import Interval

FEWEST = 16
"""Rows of a side, at least."""


@dataclass(frozen=True)
class Measured:
    """A metric of the samples, and of as many real rows in their place.

    Args:
        name: as `evaluate` takes it.
        title: as a reader knows it.
        better: which values are good, in a word or two.
        value: of samples against the reference, with its interval.
        floor: of other real rows against the same reference.
    """

    name: str
    title: str
    better: str
    value: Interval
    floor: Interval


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found; as text, a table.

    Args:
        kind: of the data: "images", "arrays", "table" or "text".
        rows: n, of samples, of the reference, and of the floor.
        features: in what the metrics were taken, in words.
        level: nominal coverage of the intervals.
        measured: one for each metric.
        notes: what a reader has to know.
    """

    kind: str
    rows: int
    features: str
    level: float
    measured: tuple[Measured, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        interval = f"{100 * self.level:g} % interval"
        table = [("metric", "samples", interval, "floor", interval, "better")]
        for m in self.measured:
            table.append((m.title, *_cells(m.value), *_cells(m.floor), m.better))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for row in table:
            numbers = [cell.rjust(w) for cell, w in zip(row[1:-1], widths[1:-1], strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *numbers, row[-1]]))
        floor = f"floor: {self.rows:,} other real rows in place of the samples"
        return "\n".join([*lines, "", floor, f"features: {self.features}", *self.notes])

    def as_json(self) -> dict[str, Any]:
        """The fields, as JSON holds them."""
        return {
            "kind": self.kind,
            "rows": self.rows,
            "features": self.features,
            "level": self.level,
            "metrics": {
                m.name: {
                    "title": m.title,
                    "better": m.better,
                    "value": m.value._asdict(),
                    "floor": m.floor._asdict(),
                }
                for m in self.measured
            },
            "notes": list(self.notes),
        }


def cut(found: Interval, span: tuple[float, float]) -> Interval:
    """The interval within the values that the metric can have."""
    least, most = span
    return Interval(found.estimate, max(found.low, least), min(found.high, most))


def order_of(count: int, seed: int, tag: str) -> Tensor:
    """A random order of so many rows; ``tag`` says of which."""
    return KeyedNoise(seed).uniform(torch.empty(count, dtype=torch.float64), tag=tag).argsort()


def one_source(samples: Any, against: Any) -> bool:
    """Are they one place, or one object?"""
    paths = [Path(s) for s in (samples, against) if isinstance(s, (str, os.PathLike))]
    same = len(paths) == 2 and (
        os.fspath(samples) == os.fspath(against)
        or (all(path.exists() for path in paths) and paths[0].samefile(paths[1]))
    )
    return same or samples is against


def _cells(interval: Interval) -> tuple[str, str]:
    value, low, high = (f"{number:.4g}" for number in interval)
    return value, f"[{low}, {high}]"
