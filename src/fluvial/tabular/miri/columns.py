"""Columns of a table as numbers of unit scale, and back.

=========== ============================================ ===========================================
kind        in the network                               what is drawn becomes
=========== ============================================ ===========================================
numeric     one standardised number                      a number within the column's bounds
integer     one standardised number                      the nearest whole number within them
boolean     one standardised number, of 0 and 1          true above 1/2
categorical one of two: as boolean; of more: one 0/1     the category of the largest number
            number a category, each standardised
date        one standardised number, time since the      the nearest multiple of the column's unit:
            earliest                                     days, if all are whole days, and so on
=========== ============================================ ===========================================

Only columns of unequal kinds have to be told apart: an array of floats is numeric throughout. In a
data frame the dtype says the kind. Floats that are all whole numbers are integers there, as that is
how pandas keeps integers with gaps; ordered categories are integers too, by their rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, Literal, get_args

import numpy as np

Kind = Literal["numeric", "integer", "boolean", "categorical", "date"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_CATEGORIES = 100
"""A column with more different texts is no category but a name, and cannot be drawn."""
EXACT = 2**53
"""Whole numbers up to here are exact in float64."""
FAR = 1e30
"""In the units of the networks: no bound."""
UNITS = {
    "days": 86_400 * 10**9,
    "hours": 3_600 * 10**9,
    "minutes": 60 * 10**9,
    "seconds": 10**9,
    "milliseconds": 10**6,
    "microseconds": 10**3,
    "nanoseconds": 1,
}
"""In nanoseconds, the coarsest first."""


@dataclass(frozen=True)
class Column:
    """What a column is and how it is scaled.

    Values of a column are floats with NaN for gaps: the numbers themselves, 0 and 1, the index of
    a category (-1 for one that was not seen in fitting), or nanoseconds since ``origin``; large
    whole numbers are counted from ``origin`` too.

    Args:
        name: of the column.
        kind: see the table above.
        mean, scale: of each encoded number, over the observed rows; a scale of 0 becomes 1.
        low, high: bounds of what may be drawn, in the column's own units; None for no bound.
        categories: of a categorical column or, in their order, of an ordered one.
        origin: of dates, nanoseconds since 1970; of whole numbers beyond 2^53, the least of them,
            which is subtracted.
        unit: of dates, nanoseconds; 1 otherwise.
        observed: rows with a value.
    """

    name: str
    kind: Kind
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    low: float | None = None
    high: float | None = None
    categories: tuple[Any, ...] = ()
    origin: int = 0
    unit: int = 1
    observed: int = 0

    @property
    def width(self) -> int:
        """Numbers in the network."""
        return len(self.mean)

    @property
    def constant(self) -> bool:
        """Has it one value only?"""
        return self.low is not None and self.low == self.high

    @property
    def bounds(self) -> tuple[list[float], list[float]]:
        """(low, high) of each encoded number, in the units of the networks."""
        if self.width > 1:
            ends = [(0.0, 1.0)] * self.width
        else:
            ends = [
                (
                    -math.inf if self.low is None else self.low,
                    math.inf if self.high is None else self.high,
                )
            ]
        scaled = [
            [
                min(max((end - m) / s, -FAR), FAR)
                for end, m, s in zip(side, self.mean, self.scale, strict=True)
            ]
            for side in zip(*ends, strict=True)
        ]
        return scaled[0], scaled[1]

    def encode(self, values: np.ndarray) -> np.ndarray:
        """(n,) values to (n, width) float32; 0, the mean, in gaps and for unseen categories.

        Raises:
            ValueError: a value is so far from those of the fit that float32 does not reach it.
        """
        if self.width == 1:
            with np.errstate(over="ignore"):
                z = ((values - self.mean[0]) / self.scale[0])[:, None]
        else:
            hot = values[:, None] == np.arange(self.width)
            z = (hot - np.array(self.mean)) / np.array(self.scale)
        unknown = np.isnan(values)
        if self.categories:
            unknown |= values < 0
        z[unknown] = 0
        with np.errstate(over="ignore"):
            result = z.astype(np.float32)
        if not np.isfinite(result).all():
            far = values[~np.isfinite(result).all(1)][0]
            raise ValueError(f"column {self.name!r} holds {far:.3g}, too far from what was fitted")
        return result

    def decode(self, z: np.ndarray) -> np.ndarray:
        """(n, width) from the networks to (n,) values, float64."""
        x = z.astype(np.float64) * np.array(self.scale) + np.array(self.mean)
        if self.width > 1:
            return x.argmax(1).astype(np.float64)
        return self.settle(x[:, 0])

    def settle(self, x: np.ndarray) -> np.ndarray:
        """The nearest values that the column can have."""
        low, high = self.low, self.high
        if self.kind in ("boolean", "categorical"):
            return (x > 0.5).astype(np.float64)
        if self.kind != "numeric":
            x = np.rint(x / self.unit) * self.unit
            low = None if low is None else math.ceil(low / self.unit) * self.unit
            high = None if high is None else math.floor(high / self.unit) * self.unit
        if low is not None or high is not None:
            x = np.clip(x, low, high)
        return x

    def average(self, draws: np.ndarray) -> np.ndarray:
        """(m, n) values to (n,): the mean, settled; of categories the most frequent."""
        if self.kind == "categorical" and len(self.categories) > 2:
            counts = (draws[..., None] == np.arange(len(self.categories))).sum(0)
            result: np.ndarray = counts.argmax(1).astype(np.float64)
            return result
        return self.settle(draws.mean(0))

    def as_json(self) -> dict[str, Any]:
        """All fields, as JSON holds them.

        Raises:
            TypeError: a category is not a text, a number or a truth value.
        """
        for category in self.categories:
            if not isinstance(category, str | int | float | bool):
                raise TypeError(
                    f"column {self.name!r} cannot be saved: its category {category!r} is a "
                    f"{type(category).__name__}, and no text, number or truth value"
                )
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Column:
        """The column that `as_json` wrote."""
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in content.items()
        }
        return cls(**values)


def learn_column(
    name: str,
    values: np.ndarray,
    kind: Kind = "numeric",
    *,
    categories: Sequence[Any] = (),
    bounds: tuple[float | None, float | None] | None = None,
    clamp: bool = True,
    origin: int = 0,
) -> Column:
    """A column from its values.

    Args:
        name: for messages.
        values: (n,), NaN in gaps.
        kind: of the column.
        categories: that the values count, if it is categorical or ordered.
        bounds: stated (low, high) in place of the least and largest value seen; None in either
            place for no bound there.
        clamp: bound what is drawn by the least and largest value seen.
        origin: of dates and large whole numbers.

    Raises:
        ValueError: there is no value at all; numbers are too large to be scaled; the bounds are no
            interval, or a value lies outside of them.
    """
    seen = values[~np.isnan(values)].astype(np.float64)
    if not len(seen):
        raise ValueError(f"column {name!r} has no value at all: leave it out")
    count = len(categories)
    if bounds is not None:
        _check_bounds(name, bounds, kind if not count else "categorical")
    if kind == "categorical" and count > 2:
        share = np.bincount(seen.astype(int), minlength=count) / len(seen)
        spread = np.sqrt(share * (1 - share))
        scale = np.where(spread > 0, spread, 1.0)
        return Column(
            name,
            kind,
            tuple(share.tolist()),
            tuple(scale.tolist()),
            categories=tuple(categories),
            observed=len(seen),
        )
    least, most = float(seen.min()), float(seen.max())
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = float(seen.mean()), float(seen.std())
    if not math.isfinite(mean) or not math.isfinite(std):
        raise ValueError(f"column {name!r} reaches {max(-least, most):.3g}, too large to be scaled")
    if bounds is not None:
        low, high = (None if end is None else end - origin for end in bounds)
        if (low is not None and least < low) or (high is not None and most > high):
            raise ValueError(
                f"bounds of {name!r} are {bounds}, and its values reach from {least + origin:g} to "
                f"{most + origin:g}"
            )
    if bounds is None or least == most:
        low, high = least, most
    if least == most:
        mean, std = least, 1.0
    elif bounds is None and not clamp and kind not in ("boolean", "categorical"):
        low = high = None
    if count:  # of an ordered or a two-valued column there is nothing beyond its categories
        low, high = (least, most) if least == most else (0.0, count - 1.0)
    unit = 1
    if kind == "date":
        whole = seen.astype(np.int64)
        # offsets from the earliest decide: days at noon are whole days too
        unit = next(u for u in UNITS.values() if not (whole % u).any())
    # a deviation that rounding alone makes is none
    scale_one = std if std > 1e-12 * max(abs(least), abs(most), 1e-300) else 1.0
    return Column(
        name,
        kind,
        (mean,),
        (scale_one,),
        low,
        high,
        categories=tuple(categories),
        origin=origin,
        unit=unit,
        observed=len(seen),
    )


def _check_bounds(name: str, bounds: Any, kind: str) -> None:
    """Two numbers in order, None for no end, of a column of numbers."""
    if kind not in ("numeric", "integer"):
        raise ValueError(f"bounds of {name!r}: the column is {kind}, and bounds are for numbers")
    pair = isinstance(bounds, Sequence | np.ndarray) and len(bounds) == 2
    ends = [end for end in bounds if end is not None] if pair else [math.nan]
    real = all(isinstance(end, Real) and not isinstance(end, bool) for end in ends)
    if not real or not all(map(math.isfinite, ends)) or ends != sorted(ends):
        raise ValueError(
            f"bounds of {name!r}: (low, high) must be finite or None, and in order, got {bounds!r}"
        )


# Data frames


@dataclass(frozen=True)
class Read:
    """A column of a data frame as numbers: kind, values with NaN in gaps, categories, origin."""

    kind: Kind
    values: np.ndarray
    categories: tuple[Any, ...] = ()
    origin: int = 0


def read_series(series: Any, name: str, kind: Kind | None = None) -> Read:
    """A column of a data frame, of a kind that its dtype says or that is given.

    Raises:
        TypeError: it holds what is neither numbers, truth values, dates nor categories.
        ValueError: it has more than `MOST_CATEGORIES` different texts, or does not fit ``kind``.
    """
    read = _read_series(series, name, kind)
    if kind == "boolean" and read.kind != "boolean":
        read = _texts(series, series.isna().to_numpy(dtype=bool), name)
        if len(read.categories) > 2:
            raise ValueError(
                f"kinds: column {name!r} is no boolean, with {len(read.categories)} values"
            )
    elif kind in ("numeric", "integer") and (read.categories or read.kind != kind):
        raise ValueError(f"kinds: column {name!r} is {read.kind} by its values, and not {kind}")
    return read


def _read_series(series: Any, name: str, kind: Kind | None) -> Read:
    import pandas
    from pandas.api import types

    gaps = series.isna().to_numpy(dtype=bool)
    dtype = series.dtype
    if isinstance(dtype, pandas.SparseDtype):
        raise TypeError(f"column {name!r} is sparse: make it dense, by .sparse.to_dense()")
    if kind == "categorical" and not isinstance(dtype, pandas.CategoricalDtype):
        return _texts(series, gaps, name)
    if isinstance(dtype, pandas.CategoricalDtype):
        codes = series.cat.codes.to_numpy().astype(np.float64)
        codes[gaps] = np.nan
        levels = list(dtype.categories)
        if dtype.ordered:
            return Read("integer", codes, tuple(map(_plain, levels)))
        present = sorted(set(codes[~gaps].astype(int).tolist()))
        if len(present) > MOST_CATEGORIES:
            raise ValueError(_many(name, len(present)))
        rank = {code: k for k, code in enumerate(present)}
        values = np.array([np.nan if np.isnan(c) else rank[int(c)] for c in codes], np.float64)
        return Read("categorical", values, tuple(_plain(levels[code]) for code in present))
    if types.is_bool_dtype(dtype):
        return Read("boolean", series.to_numpy(dtype=np.float64, na_value=np.nan))
    if types.is_datetime64_any_dtype(dtype) or types.is_timedelta64_dtype(dtype):
        return _dates(series, gaps, name)
    if types.is_numeric_dtype(dtype) and not types.is_complex_dtype(dtype):
        values = series.to_numpy(dtype=np.float64, na_value=np.nan)
        _finite(values, name)
        seen = values[~gaps]
        origin = _origin(series[~gaps]) if types.is_integer_dtype(dtype) else 0
        if origin:
            values[~gaps] = [int(value) - origin for value in series[~gaps]]
        whole = types.is_integer_dtype(dtype) or (len(seen) > 0 and bool((seen % 1 == 0).all()))
        own: Kind = "integer" if whole else "numeric"
        return Read(kind if kind in ("numeric", "integer") else own, values, origin=origin)
    seen = series[~gaps]
    if len(seen) and all(isinstance(value, bool | np.bool_) for value in seen):
        values = np.full(len(series), np.nan)
        values[~gaps] = seen.to_numpy().astype(np.float64)
        return Read("boolean", values)
    if all(isinstance(value, str) for value in seen):
        return _texts(series, gaps, name)
    try:
        # a truth value among numbers would be filled with 0.37
        if any(isinstance(value, str | bool | np.bool_) for value in seen):
            raise TypeError
        values = np.full(len(series), np.nan)
        values[~gaps] = [float(value) for value in seen]
    except (TypeError, ValueError):
        kinds = sorted({type(value).__name__ for value in seen})
        raise TypeError(
            f"column {name!r} holds values of type {', '.join(kinds[:4])}: need numbers, truth "
            "values, dates (datetime64), or texts of a few kinds"
        ) from None
    _finite(values, name)
    if kind not in ("numeric", "integer"):
        whole = all(isinstance(value, int | np.integer) for value in seen)
        kind = "integer" if len(seen) and whole else "numeric"
    return Read(kind, values)


def codes_of(series: Any, column: Column) -> np.ndarray:
    """The values of a new frame's column, read as the fitted one; -1 for unseen categories.

    Raises:
        TypeError, ValueError: it cannot be read so.
    """
    gaps = series.isna().to_numpy(dtype=bool)
    if gaps.all():
        return np.full(len(series), np.nan)
    if column.categories:
        rank = {category: k for k, category in enumerate(column.categories)}
        result = np.full(len(series), np.nan)
        seen = [_plain(value) for value in series[~gaps]]
        result[~gaps] = [rank.get(value, -1) for value in seen]
        forms = {isinstance(category, str) for category in column.categories}
        odd = [v for v in seen if v not in rank and isinstance(v, str) not in forms]
        if odd:
            raise TypeError(
                f"column {column.name!r} was categorical in fitting, with {column.categories[0]!r} "
                f"for one, and holds {odd[0]!r} of type {type(odd[0]).__name__} now"
            )
        return result
    read = read_series(series, column.name)
    if read.categories or (read.kind == "date") != (column.kind == "date"):
        raise TypeError(
            f"column {column.name!r} was {column.kind} in fitting, and is {read.kind} now"
        )
    return read.values + (read.origin - column.origin)


def write_series(series: Any, column: Column, gaps: np.ndarray, values: np.ndarray) -> Any:
    """A copy of a frame's column with values in its gaps, of the same dtype.

    Args:
        series: the column.
        column: what it is.
        gaps: (n,) bool.
        values: those of the gaps, in order.
    """
    import pandas
    from pandas.api import types

    if not gaps.any():
        return series.copy()
    dtype = series.dtype
    drawn: Any
    if column.categories:
        drawn = [column.categories[int(k)] for k in values]
        if isinstance(dtype, pandas.CategoricalDtype):
            by = {_plain(level): level for level in dtype.categories}
            drawn = [by.get(value, value) for value in drawn]
    elif column.kind == "boolean":
        drawn = [bool(value) for value in values]
    elif column.kind == "date":
        stamps = column.origin + values.astype(np.int64)
        if types.is_timedelta64_dtype(dtype):
            drawn = pandas.to_timedelta(stamps, unit="ns")
        else:
            zone = getattr(dtype, "tz", None)
            drawn = pandas.to_datetime(stamps, unit="ns", utc=zone is not None)
            drawn = drawn if zone is None else drawn.tz_convert(zone)
    elif types.is_integer_dtype(dtype):
        own = getattr(dtype, "numpy_dtype", dtype)
        ends = np.iinfo(own)  # float64 rounds the largest ones beyond it
        numbers = [column.origin + int(value) for value in values]
        drawn = np.array([min(max(one, ends.min), ends.max) for one in numbers], own)
    elif types.is_object_dtype(dtype):
        drawn = _objects(series[~gaps], column, values)
    else:
        drawn = values.tolist()
    try:
        if isinstance(dtype, pandas.CategoricalDtype) and not set(drawn) <= set(dtype.categories):
            raise ValueError
        array = pandas.Series(drawn, dtype=dtype).array
    except (ValueError, TypeError):
        raise TypeError(
            f"column {column.name!r}: {dtype} cannot hold what is drawn, {drawn[0]!r} for one; "
            "give it the dtype of the fit"
        ) from None
    result = series.copy()
    result.iloc[np.flatnonzero(gaps)] = array
    return result


def _objects(seen: Any, column: Column, values: np.ndarray) -> list[Any]:
    """Drawn numbers as Python's ints or decimal numbers, where the observed ones are such."""
    if column.kind == "integer":
        return [int(value) for value in values]
    if len(seen) and all(isinstance(value, Decimal) for value in seen):
        places = max(0, *(-int(value.as_tuple().exponent) for value in seen), 0)
        return [round(Decimal(value), places) for value in values.tolist()]
    return list(values.tolist())


def _origin(seen: Any) -> int:
    """What is subtracted from whole numbers that float64 would not tell apart; 0 from others."""
    least, most = (int(seen.min()), int(seen.max())) if len(seen) else (0, 0)
    return least if max(-least, most) > EXACT >= most - least else 0


def _texts(series: Any, gaps: np.ndarray, name: str) -> Read:
    seen = [_plain(value) for value in series[~gaps]]
    levels = sorted(set(seen), key=lambda value: (str(type(value)), value))
    if len(levels) > MOST_CATEGORIES:
        raise ValueError(_many(name, len(levels)))
    rank = {level: k for k, level in enumerate(levels)}
    values = np.full(len(series), np.nan)
    values[~gaps] = [rank[value] for value in seen]
    return Read("categorical", values, tuple(levels))


def _dates(series: Any, gaps: np.ndarray, name: str) -> Read:
    seen = series[~gaps]
    values = np.full(len(series), np.nan)
    if not len(seen):
        return Read("date", values)
    if getattr(seen.dtype, "tz", None) is not None:
        seen = seen.dt.tz_convert("UTC").dt.tz_localize(None)
    kind = "timedelta64" if str(seen.dtype).startswith("timedelta") else "datetime64"
    seconds = seen.to_numpy().astype(f"{kind}[s]").astype(np.int64)
    # nanoseconds, and their differences, are of 64 bits
    if max(abs(seconds).max(), np.ptp(seconds)) > 2**63 // 10**9 - 1:
        raise ValueError(
            f"column {name!r} reaches from {seen.min()} to {seen.max()}: dates must lie in 1678 to "
            "2261, and within 292 years"
        )
    stamps = seen.to_numpy().astype(f"{kind}[ns]").astype(np.int64)
    origin = int(stamps.min())
    values[~gaps] = stamps - origin
    return Read("date", values, origin=origin)


def _finite(values: np.ndarray, name: str) -> None:
    if np.isinf(values).any():
        raise ValueError(f"column {name!r} contains infinity: only NaN is a gap")


def _many(name: str, count: int) -> str:
    return (
        f"column {name!r} has {count} different values, more than {MOST_CATEGORIES}: that is no "
        "category that could be drawn; leave it out"
    )


def _plain(value: Any) -> Any:
    """NumPy's scalars as Python's."""
    return value.item() if isinstance(value, np.generic) else value
