"""Gaps made on purpose, with a stated mechanism and rate: to test what fills them.

Values are missing

* **completely at random** (MCAR) if the chance depends on nothing,
* **at random** (MAR) if it depends on what is observed alone,
* **not at random** (MNAR) if it depends on what is missing

(Rubin, Inference and missing data, 1976). The logistic mechanisms are those of Muzellec et al.,
Missing data imputation using optimal transport, ICML 2020: the chance is the logistic function of a
linear form, of which the intercept is solved for the rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.tabular.checks import number, whole

Mechanism = Literal["mcar", "mar", "mnar", "mnar-logistic", "mnar-quantile"]
MECHANISMS: tuple[Mechanism, ...] = get_args(Mechanism)


@dataclass(frozen=True, eq=False)
class Amputed:
    """A table with gaps, and how they came about.

    Args:
        data: as what came in, NaN or NA in the gaps.
        mask: (n, d) bool, True where there is a value.
        chance: (n, d), with which each entry was to go missing.
        complete: numbers of the columns that lost nothing by design.
    """

    data: Any
    mask: np.ndarray
    chance: np.ndarray
    complete: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Share of all entries that are missing."""
        return float(1 - self.mask.mean())


def ampute(
    X: Any,
    rate: float = 0.4,
    mechanism: Mechanism = "mcar",
    *,
    observed: float = 0.3,
    strength: float = 1.0,
    tail: float = 0.5,
    seed: int = 0,
) -> Amputed:
    r"""Take entries out of a table.

    With z the standardised columns (of texts and categories, their codes) and
    :math:`\sigma` the logistic function, the chance of entry (i, j) to go missing is

    ================= =================================================================
    ``mcar``          rate
    ``mar``           :math:`\sigma(s\,w_j z_{i,O} + c_j)`: O a random subset of the
                      columns, which stay whole; the others have this chance
    ``mnar``          :math:`\sigma(\pm s\,z_{ij} + c_j)`: self-masking; the sign is drawn
                      by column
    ``mnar-logistic`` as ``mar``, and the columns O lose entries completely at random
    ``mnar-quantile`` rate / tail in the upper or lower tail of the column, by a sign that
                      is drawn, and 0 elsewhere: censored
    ================= =================================================================

    Here w_j is a random vector for which :math:`w_j z` has deviation 1 over the rows, s the
    strength, and c_j is solved for, so that the mean chance of the column is the rate.

    Args:
        X: (n, d) array, tensor or data frame. Gaps that are there stay.
        rate: expected share of the entries of every column that is not kept whole.
        mechanism: see above.
        observed: share of the columns in O, at least one and not all.
        strength: s, deviation of the logit; 0 makes ``mar`` and ``mnar`` completely random.
        tail: share of the rows that can lose an entry under ``mnar-quantile``.
        seed: of everything that is drawn; row i's draws depend on the seed and i alone.

    Returns:
        The table and its mask. Of a frame, columns of integers and of truth values that lose
        entries become those dtypes of pandas that know gaps.

    Raises:
        ValueError: a share is out of its range; the mechanism is unknown, or needs more columns; X
            is no table, or holds infinity.
        TypeError: X holds what are no real numbers, or, in a frame, values without an order.
    """
    number("rate", rate, "lie in (0, 1)", lambda share: 0 < share < 1)
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism must be one of {', '.join(MECHANISMS)}, got {mechanism!r}")
    number("observed", observed, "lie in (0, 1)", lambda share: 0 < share < 1)
    number("strength", strength, "not be negative or infinite", lambda s: 0 <= s < np.inf)
    wanted = f"lie in [rate, 1] for a rate of {rate}"
    number("tail", tail, wanted, lambda share: rate <= share <= 1)
    seed = whole("seed", seed, least=0)
    z, before = _scaled(X)
    n, d = z.shape
    subset = mechanism in ("mar", "mnar-logistic")
    if subset and d < 2:
        raise ValueError(f"mechanism {mechanism} needs two columns or more, got {d}")
    noise = KeyedNoise(seed)
    chance = np.full((n, d), rate)
    complete: tuple[int, ...] = ()
    if subset:
        count = min(max(1, round(observed * d)), d - 1)
        order = noise.uniform(torch.empty(d, dtype=torch.float64), "columns").argsort().numpy()
        inside, outside = np.sort(order[:count]), np.sort(order[count:])
        drawn = noise.normal(torch.empty(d, count, dtype=torch.float64), "weights").numpy()
        for j in outside:
            logit = z[:, inside] @ drawn[j]
            spread = logit.std()
            chance[:, j] = _solved(strength * logit / (spread if spread > 0 else 1.0), rate)
        if mechanism == "mar":
            chance[:, inside] = 0
            complete = tuple(inside.tolist())
    elif mechanism != "mcar":
        signs = np.where(noise.uniform(torch.empty(d), "signs").numpy() < 0.5, -1.0, 1.0)
        for j in range(d):
            if mechanism == "mnar":
                chance[:, j] = _solved(strength * signs[j] * z[:, j], rate)
            else:
                # ranks of equal values are by row: a column of few values keeps its rate
                rank = np.argsort(np.argsort(signs[j] * z[:, j], kind="stable"), kind="stable")
                lost = rank >= n - round(tail * n)
                chance[:, j] = np.where(lost, rate / max(lost.mean(), 1 / n), 0.0).clip(max=1)
    u = noise.uniform(torch.empty(n, d, dtype=torch.float64), "entries").numpy()
    mask = (u >= chance) & ~before
    return Amputed(_without(X, mask), mask, chance, complete)


def _scaled(X: Any) -> tuple[np.ndarray, np.ndarray]:
    """Standardised numbers, 0 in gaps, and where the gaps are."""
    if hasattr(X, "iloc") and X.ndim == 2:
        import pandas

        columns = []
        for j in range(X.shape[1]):
            series = X.iloc[:, j]
            name = X.columns[j]
            if pandas.api.types.is_complex_dtype(series.dtype):
                raise TypeError(f"column {name!r} of X must hold real numbers, got {series.dtype}")
            if not pandas.api.types.is_numeric_dtype(series.dtype):
                try:
                    codes = series.astype("category").cat.codes.astype(np.float64)
                except TypeError as error:
                    raise TypeError(f"column {name!r} of X cannot be ordered: {error}") from error
                series = codes.where(codes >= 0)
            columns.append(series.to_numpy(dtype=np.float64, na_value=np.nan))
        values = np.stack(columns, 1) if columns else np.empty((len(X), 0))
    else:
        array = np.ma.asanyarray(X.detach().cpu() if isinstance(X, Tensor) else X)
        if array.dtype.kind in "cmM":
            raise TypeError(f"X must hold real numbers, got {array.dtype}")
        values = np.ma.filled(array.astype(np.float64), np.nan)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"X must be a table with rows and columns, got shape {values.shape}")
    if np.isinf(values).any():
        raise ValueError(f"column {int(np.isinf(values).any(0).argmax())} of X contains infinity")
    gaps = np.isnan(values)
    centred = np.ma.array(values, mask=gaps)
    centred = centred - centred.mean(0)
    spread = np.asarray(centred.std(0).filled(0.0))
    z = np.asarray((centred / np.where(spread > 0, spread, 1.0)).filled(0.0))
    return z, gaps


def _solved(logit: np.ndarray, rate: float) -> np.ndarray:
    """sigma(logit + c), of mean ``rate``: c by bisection, to the last bits."""
    least, most = logit.min(), logit.max()
    edge = np.log(rate / (1 - rate))
    low, high = edge - most, edge - least
    for _ in range(80):
        middle = (low + high) / 2
        if _logistic(logit + middle).mean() < rate:
            low = middle
        else:
            high = middle
    return _logistic(logit + (low + high) / 2)


def _logistic(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = 0.5 * (1 + np.tanh(x / 2))
    return result


def _without(X: Any, mask: np.ndarray) -> Any:
    if isinstance(X, Tensor):
        X = X if X.is_floating_point() else X.double()
        return X.masked_fill(torch.from_numpy(~mask).to(X.device), torch.nan)
    if hasattr(X, "iloc"):
        from pandas.api import types

        X = X.copy()
        for j in np.flatnonzero(~mask.all(0)):
            series = X.iloc[:, j]
            if series.dtype.kind in "iub" if isinstance(series.dtype, np.dtype) else False:
                wide = "UInt64" if series.dtype == np.uint64 else "Int64"
                nullable = "boolean" if types.is_bool_dtype(series.dtype) else wide
                series = series.astype(nullable)
            X.isetitem(j, series.mask(~mask[:, j]))  # names may occur twice
        return X
    array = np.array(X)
    array = array if array.dtype.kind == "f" else array.astype(np.float64)
    array[~mask] = np.nan
    return array
