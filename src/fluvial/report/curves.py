"""The curves of a training, read from ``metrics.jsonl`` in one pass and little memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

LIMIT = 600
"""Most points of a curve: more than a plot has pixels to show."""

SNAPSHOTS = 60
"""Most rows of losses by time that are kept of a training."""

MOST_CURVES = 100
"""Most curves of one file; a training has about ten."""

LONGEST_LINE = 1 << 20
"""In bytes. A longer one was not written by a training, and is skipped without being read whole."""

LARGEST = 1e200
"""Numbers beyond it count as not finite: sums of them overflow."""

NO_TERM = frozenset({"step", "seconds", "by_time", "validation", "stage"})
"""Keys of a line that are no curve."""


@dataclass(slots=True)
class Bucket:
    """Points that stand next to each other in a curve."""

    first: float
    last: float
    count: int
    x: float
    y: float
    low: float
    high: float

    def merge(self, other: Bucket) -> None:
        self.last = other.last
        self.count += other.count
        self.x += other.x
        self.y += other.y
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)


class Curve:
    """A stream of points as means over buckets of equal counts, at most ``limit`` of them.

    A point at or before the x of an earlier one replaces what stands from there on: that is a
    training that was resumed from an earlier checkpoint.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.size = 1  # points a bucket
        self.buckets: list[Bucket] = []

    def add(self, x: float, y: float) -> None:
        buckets = self.buckets
        while buckets and buckets[-1].last >= x:
            buckets.pop()
        point = Bucket(x, x, 1, x, y, y, y)
        if buckets and buckets[-1].count < self.size:
            buckets[-1].merge(point)
            return
        buckets.append(point)
        if len(buckets) > self.limit:
            for left, right in zip(buckets[::2], buckets[1::2], strict=False):
                left.merge(right)
            self.buckets = buckets[::2]
            self.size *= 2

    @property
    def points(self) -> list[tuple[float, float]]:
        """(mean x, mean y) of every bucket."""
        return [(b.x / b.count, b.y / b.count) for b in self.buckets]

    @property
    def band(self) -> list[tuple[float, float, float]]:
        """(mean x, smallest y, largest y) of every bucket; empty if each holds one point."""
        if self.size == 1:
            return []
        return [(b.x / b.count, b.low, b.high) for b in self.buckets]

    def __len__(self) -> int:
        return len(self.buckets)


class Snapshots:
    """A stream of (step, row), of which evenly spaced ones and the last are kept."""

    def __init__(self, limit: int = SNAPSHOTS) -> None:
        self.limit = limit
        self.stride = 1
        self.seen = 0
        self.rows: list[tuple[float, Any]] = []
        self.last: tuple[float, Any] | None = None

    def add(self, step: float, row: Any) -> None:
        if self.seen % self.stride == 0:
            self.rows.append((step, row))
            if len(self.rows) > self.limit:
                self.rows = self.rows[::2]
                self.stride *= 2
        self.seen += 1
        self.last = (step, row)

    def first_middle_last(self) -> list[tuple[float, list[float | None]]]:
        """Up to three rows of numbers, in order; what is no row of numbers is left out."""
        if self.last is None:
            return []
        rows = [row for row in self.rows if row[0] < self.last[0]] + [self.last]
        good = [(step, numbers) for step, row in rows if (numbers := _numbers(row))]
        return [good[i] for i in sorted({0, len(good) // 2, len(good) - 1})] if good else []


def _numbers(row: Any) -> list[float | None]:
    if not isinstance(row, list) or len(row) > 1000:
        return []
    values = [number(value) for value in row]
    return values if any(value is not None for value in values) else []


def number(value: Any) -> float | None:
    """``value`` as a finite float, ``None`` if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if -LARGEST < value < LARGEST else None


@dataclass
class Stage:
    """What one stage of a training left.

    Args:
        training: curves by term: loss, its terms, lr, rows_per_second.
        validation: curves by set of weights and term.
        by_time: losses in bins of t, by set of weights ("" for the training itself) and term.
    """

    training: dict[str, Curve] = field(default_factory=dict)
    validation: dict[str, dict[str, Curve]] = field(default_factory=dict)
    by_time: dict[str, dict[str, Snapshots]] = field(default_factory=dict)


@dataclass
class Metrics:
    """What ``metrics.jsonl`` says.

    Args:
        stages: by name, ``None`` for a training in one stage.
        step, seconds: of the last line, ``None`` if there is none.
        problems: sentences about what could not be read or drawn.
    """

    stages: dict[str | None, Stage] = field(default_factory=dict)
    step: float | None = None
    seconds: float | None = None
    problems: list[str] = field(default_factory=list)


def read_metrics(path: Path) -> Metrics:
    """Read a file of any length, one line in memory at a time.

    Broken lines and values that are not finite are left out and counted in the problems. The
    memory is bounded by `MOST_CURVES` curves of `LIMIT` buckets, about 20 MB; in practice 2 MB.

    Raises:
        OSError: the file cannot be read.
    """
    reader = _Reader()
    with path.open("rb") as file:
        for line_number, line in enumerate(_lines(file), 1):
            if line is not None and not line.strip():
                continue
            entry = None if line is None else _parse(line)
            if entry is None:
                reader.broken.append(line_number, f"line {line_number}")
            else:
                reader.read(entry)
    return reader.finish(path.name)


def _lines(file: Any) -> Iterator[bytes | None]:
    """The lines of a file, ``None`` for one that is too long."""
    for piece in iter(partial(file.readline, LONGEST_LINE), b""):
        if len(piece) < LONGEST_LINE or piece.endswith(b"\n"):
            yield piece
            continue
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(LONGEST_LINE)
        yield None


def _parse(line: bytes) -> tuple[float, dict[str, Any]] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    step = number(entry.get("step"))
    return None if step is None or step < 0 else (step, entry)


class _Count:
    """How often something happened, and where first."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def append(self, _: float, where: str) -> None:
        if not self.count:
            self.first = where
        self.count += 1


class _Reader:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.broken = _Count()
        self.not_finite: dict[str, _Count] = {}
        self.curves = 0
        self.dropped: set[str] = set()

    def read(self, parsed: tuple[float, dict[str, Any]]) -> None:
        step, entry = parsed
        self.metrics.step = step
        seconds = number(entry.get("seconds"))
        if seconds is not None:
            self.metrics.seconds = seconds
        name = entry.get("stage")
        stage_name = None if name is None else str(name)[:100]
        stage = self.metrics.stages.get(stage_name)
        if stage is None:
            if len(self.metrics.stages) >= MOST_CURVES:
                return
            stage = self.metrics.stages[stage_name] = Stage()
        self.terms(stage.training, "training", step, entry)
        self.times(stage, "", step, entry)
        validation = entry.get("validation")
        if isinstance(validation, Mapping):
            for weights, terms in validation.items():
                if isinstance(terms, Mapping) and self.room(stage.validation, weights):
                    curves = stage.validation.setdefault(weights, {})
                    self.terms(curves, f"validation of {weights}", step, terms)
                    self.times(stage, weights, step, terms)

    def terms(
        self, curves: dict[str, Curve], what: str, step: float, values: Mapping[str, Any]
    ) -> None:
        for term, value in values.items():
            if term in NO_TERM:
                continue
            # the common case first: this loop takes most of the time of a long file
            if type(value) is not float or not -LARGEST < value < LARGEST:
                y = number(value)
                if y is None:
                    if value is None or (isinstance(value, float) and not math.isfinite(value)):
                        count = self.not_finite.setdefault(f"{term} ({what})", _Count())
                        count.append(step, f"step {step:.0f}")
                    continue
                value = y
            curve = curves.get(term)
            if curve is None:
                if not self.room(curves, term):
                    continue
                curve = curves[term] = Curve()
                self.curves += 1
            curve.add(step, value)

    def times(self, stage: Stage, weights: str, step: float, values: Mapping[str, Any]) -> None:
        by_time = values.get("by_time")
        if not isinstance(by_time, Mapping) or not self.room(stage.by_time, weights):
            return
        terms = stage.by_time.setdefault(weights, {})
        for term, row in by_time.items():
            if term not in terms:
                if not self.room(terms, term):
                    continue
                terms[term] = Snapshots()
                self.curves += 1
            terms[term].add(step, row)

    def room(self, place: Mapping[str, Any], name: str) -> bool:
        """Whether a curve is known or may still be begun."""
        if name in place or self.curves < MOST_CURVES:
            return True
        if len(self.dropped) < MOST_CURVES:
            self.dropped.add(name)
        return False

    def finish(self, file: str) -> Metrics:
        problems = self.metrics.problems
        if self.broken.count:
            problems.append(
                f"{self.broken.count} line{'s' * (self.broken.count > 1)} of {file} could not be "
                f"read and {'are' if self.broken.count > 1 else 'is'} left out, the first is "
                f"{self.broken.first}."
            )
        for name, count in list(self.not_finite.items())[:5]:
            problems.append(
                f"{name} was not finite {count.count} time{'s' * (count.count > 1)}, first at "
                f"{count.first}."
            )
        if self.dropped:
            problems.append(f"{file} holds more than {MOST_CURVES} curves; the first are drawn.")
        return self.metrics
