"""What an imputer gets, an array, a tensor or a frame, as columns of numbers with gaps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from sklearn.utils.validation import validate_data
from torch import Tensor

from fluvial.tabular.miri.columns import (
    Column,
    Kind,
    codes_of,
    learn_column,
    read_series,
    write_series,
)


class Table:
    """Input of an imputer: where its gaps are, its columns as numbers, and the way back."""

    def __init__(self, kind: str, data: Any, gaps: np.ndarray, names: list[str]) -> None:
        self.kind, self.data, self.gaps, self.names = kind, data, gaps, names
        self.shape: tuple[int, int] = gaps.shape

    @classmethod
    def read(cls, owner: Any, X: Any, mask: Any, *, reset: bool) -> Table:
        """Check an input as scikit-learn does.

        Args:
            owner: the imputer; its number of features and their names are set, or compared.
            X, mask: as `MIRIImputer.fit` takes them.
            reset: set them.

        Raises:
            ValueError: X is no table, or not that of the fit; the mask does not fit.
            TypeError: X is an array of dates.
        """
        kind = "tensor" if isinstance(X, Tensor) else "frame" if hasattr(X, "iloc") else "array"
        if kind == "frame" and getattr(X, "ndim", 2) != 2:
            raise ValueError(f"X must be a table with rows and columns, got {type(X).__name__}")
        if kind == "frame":
            if not X.columns.is_unique:
                twice = X.columns[X.columns.duplicated()].unique().tolist()
                raise ValueError(f"X must have column names that differ, got twice: {twice[:5]}")
            validate_data(owner, X, reset=reset, skip_check_array=True)
            if not len(X) or not X.shape[1]:
                raise ValueError(
                    f"Found array with {len(X)} sample(s) and {X.shape[1]} feature(s) while a "
                    "minimum of 1 of each is required by MIRIImputer."
                )
            data, gaps = X, X.isna().to_numpy(dtype=bool)
            names = [str(name) for name in X.columns]
        else:
            values = X.detach().cpu().numpy() if isinstance(X, Tensor) else _numbers(X)
            data = validate_data(
                owner,
                values,
                reset=reset,
                dtype=[np.float64, np.float32],
                ensure_all_finite="allow-nan",
            )
            gaps, names = np.isnan(data), [f"x{j}" for j in range(data.shape[1])]
            if kind == "tensor":
                data = (X, data)
        if mask is not None:
            seen = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask)
            if seen.dtype.kind not in "bui" or seen.shape != gaps.shape:
                raise ValueError(
                    f"mask must be truth values shaped as X, {gaps.shape}, got {seen.dtype} of "
                    f"{seen.shape}"
                )
            if seen.dtype.kind != "b" and not np.isin(seen, (0, 1)).all():
                raise ValueError(
                    f"mask must be truth values, got {seen[~np.isin(seen, (0, 1))][0]}"
                )
            gaps = gaps | ~seen.astype(bool)
        return cls(kind, data, gaps, names)

    @property
    def array(self) -> np.ndarray:
        """The numbers of an array or tensor."""
        return cast(np.ndarray, self.data[1] if self.kind == "tensor" else self.data)

    def by_number(self, what: str, given: Mapping[Any, Any] | None) -> dict[int, Any]:
        """Settings by column, with the columns' numbers for their names.

        Raises:
            ValueError: they are no mapping, or of a column that X does not have, or of one twice.
        """
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"{what} must be a mapping by column, got {given!r}")
        result: dict[int, Any] = {}
        own = list(self.data.columns) if self.kind == "frame" else []
        for key, value in (given or {}).items():
            if key in own:
                j = own.index(key)
            elif (
                isinstance(key, int | np.integer)
                and not isinstance(key, bool)
                and 0 <= key < self.shape[1]
            ):
                j = int(key)
            else:
                raise ValueError(f"{what} names a column {key!r} that X does not have")
            if j in result:
                raise ValueError(f"{what} names column {j} twice, by its number and its name")
            result[j] = value
        return result

    def learn(
        self,
        j: int,
        kind: Kind | None,
        bounds: tuple[float | None, float | None] | None,
        clamp: bool,
    ) -> Column:
        """Column j from its values, of a kind and within bounds if they are given."""
        name = self.names[j]
        if self.kind == "frame":
            series = self.data.iloc[:, j]
            if self.gaps[:, j].any():
                series = series.mask(self.gaps[:, j])
            read = read_series(series, name, kind)
            return learn_column(
                name,
                read.values,
                read.kind,
                categories=read.categories,
                bounds=bounds,
                clamp=clamp,
                origin=read.origin,
            )
        values = np.where(self.gaps[:, j], np.nan, self.array[:, j].astype(np.float64))
        if kind in ("categorical", "boolean"):
            levels = np.unique(values[~np.isnan(values)])
            if kind == "boolean" and len(levels) > 2:
                raise ValueError(f"kinds: column {name!r} is no boolean, with {len(levels)} values")
            if len(levels) > 1_000:
                raise ValueError(f"kinds: column {name!r} has {len(levels)} categories")
            codes = np.where(np.isnan(values), np.nan, np.searchsorted(levels, values))
            categories = [float(level) for level in levels]
            return learn_column(name, codes, "categorical", categories=categories, bounds=bounds)
        return learn_column(name, values, kind or "numeric", bounds=bounds, clamp=clamp)

    def values_of(self, columns: Sequence[Column]) -> None:
        """Read the columns as those that were fitted.

        Raises:
            TypeError: they were not numbers, and this is an array.
        """
        self.columns = columns
        if self.kind != "frame":
            for column in columns:
                if column.kind == "date" or any(isinstance(c, str) for c in column.categories):
                    raise TypeError(
                        f"column {column.name!r} was {column.kind} in fitting: X must be a data "
                        f"frame again, got {'a tensor' if self.kind == 'tensor' else 'an array'}"
                    )

    def column(self, j: int) -> np.ndarray:
        """(n,) numbers with NaN in the gaps; read each time, so that no second table is held."""
        if self.kind == "frame":
            values = codes_of(self.data.iloc[:, j], self.columns[j])
            return np.where(self.gaps[:, j], np.nan, values)
        values = np.where(self.gaps[:, j], np.nan, self.array[:, j].astype(np.float64))
        levels = self.columns[j].categories
        if not levels:
            return values
        known = np.array(levels)
        codes = np.searchsorted(known, values).clip(max=len(known) - 1)
        return np.where(np.isnan(values), np.nan, np.where(known[codes] == values, codes, -1))

    def filled(self, values: Sequence[np.ndarray]) -> Any:
        """What came in, copied, with values in the gaps of every column."""
        if self.kind == "frame":
            frame = self.data.copy()
            for j, column in enumerate(self.columns):
                if len(values[j]):
                    series = write_series(self.data.iloc[:, j], column, self.gaps[:, j], values[j])
                    frame.isetitem(j, series.array)
            return frame
        result = np.array(self.array, order="C")
        for j, column in enumerate(self.columns):
            drawn = values[j]
            if column.categories and len(drawn):
                drawn = np.array(column.categories)[drawn.astype(int)]
            result[self.gaps[:, j], j] = drawn
        if self.kind == "tensor":
            X = self.data[0]
            floating = X.dtype if X.is_floating_point() else torch.float64
            return torch.from_numpy(result).to(X.device, floating)
        return result


def _numbers(X: Any) -> Any:
    """An array whose gaps are NaN, where a masked one has them in its mask."""
    if isinstance(X, np.ma.MaskedArray):
        return np.ma.filled(X.astype(X.dtype if X.dtype.kind == "f" else np.float64), np.nan)
    if isinstance(X, np.ndarray) and X.dtype.kind in "mM":  # would be read as counts
        raise TypeError(f"X must hold numbers, got {X.dtype}: dates go in a data frame")
    return X
