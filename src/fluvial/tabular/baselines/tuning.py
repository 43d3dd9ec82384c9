"""A setting for each imputer, by what it makes of entries hidden for the purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from fluvial.tabular.amputation import ampute
from fluvial.tabular.baselines.gain import GAIN
from fluvial.tabular.baselines.learned import check_seen
from fluvial.tabular.baselines.miwae import MIWAE
from fluvial.tabular.baselines.tabcsdi import TabCSDI
from fluvial.tabular.checks import whole
from fluvial.tabular.miri.imputer import MIRIImputer
from fluvial.tabular.seeds import mixed

Make = Callable[..., Any]
"""(seed, **setting) -> an imputer."""
HIDDEN = 7
"""Tells the seed of what `tune` hides from that of what is missing."""


def draws(make: Callable[[int], Any], X: np.ndarray, m: int, seed: int = 0) -> np.ndarray:
    """(m, n, d): m fillings, by one imputer that draws, or by imputers of different seeds.

    Raises:
        ValueError: m is no whole number, or below 1.
    """
    m = whole("m", m)
    imputer = make(seed)
    if m > 1 and isinstance(imputer, MIRIImputer | GAIN | MIWAE | TabCSDI):
        result: np.ndarray = imputer.fit(X).sample(X, m)
        return result
    return np.stack([make(mixed(seed, k) % 2**31).fit_transform(X) for k in range(m)])


def crps(values: np.ndarray, truth: np.ndarray) -> float:
    """Mean continuous ranked probability score of m draws: E|X - y| - E|X - X'| / 2.

    Of one draw it is the mean absolute error. It is proper: fixing too narrow a law does not pay.
    The second mean is over different draws, so that the number of draws does not matter either.

    Args:
        values: (m, k).
        truth: (k,).

    Raises:
        ValueError: the shapes do not fit, or are empty.
    """
    if values.ndim != 2 or not values.size or values.shape[1:] != truth.shape:
        raise ValueError(
            f"values must be (m, k) and truth (k,), got {values.shape} and {truth.shape}"
        )
    near = np.abs(values - truth).mean()
    m = len(values)
    if m == 1:
        return float(near)
    pairs = [np.abs(values[i] - values[j]).mean() for i in range(m) for j in range(i)]
    return float(near - np.mean(pairs) / 2)


def _made(make: Make, setting: Mapping[str, Any], seed: int) -> Any:
    return make(seed, **setting)


def tune(
    make: Make,
    settings: Sequence[Mapping[str, Any]],
    X: Any,
    *,
    share: float = 0.2,
    m: int = 1,
    seed: int = 0,
) -> tuple[Mapping[str, Any], list[float]]:
    """The setting that fills hidden entries best, by `crps` in units of the columns' deviations.

    Args:
        make: of the imputer, see `fluvial.tabular.baselines.BASELINES`.
        settings: to choose from.
        X: (n, d) of numbers with NaN in the gaps; its observed entries alone are used.
        share: of the observed entries that is hidden.
        m: draws of each setting; 1 where an imputer gives the same every time.
        seed: of what is hidden and of the imputers.

    Returns:
        (the setting, the scores of all).

    Raises:
        ValueError: there are no settings, ``m`` is no whole number, X is no table of numbers or has
            a column without a value, or nothing could be hidden.
        TypeError: ``make`` cannot be called, or the settings are no mappings.
    """
    m, seed = whole("m", m), whole("seed", seed, least=0)
    if not callable(make):
        raise TypeError(f"make must make an imputer, as those of BASELINES do, got {make!r}")
    if isinstance(settings, Mapping) or not all(isinstance(one, Mapping) for one in settings):
        raise TypeError(f"settings must be a list of mappings, got {settings!r}")
    if not len(settings):
        raise ValueError("settings must hold one at least, got none")
    X = np.asarray(X.detach().cpu() if isinstance(X, Tensor) else X, np.float64)
    if X.ndim != 2 or not X.size:
        raise ValueError(f"X must be a table with rows and columns, got shape {X.shape}")
    check_seen(X)
    # a seed apart: by that of X's own gaps, the entries to hide would be just those
    held = ampute(X, share, "mcar", seed=mixed(seed, HIDDEN) % 2**32)
    hidden = ~held.mask & ~np.isnan(X)
    # an imputer drops a column without any value: it keeps one
    for j in np.flatnonzero(np.isnan(held.data).all(0)):
        row = int(np.flatnonzero(hidden[:, j])[0])
        held.data[row, j], hidden[row, j] = X[row, j], False
    if not hidden.any():
        raise ValueError(f"X has too few observed entries to hide a share of {share}")
    scale = np.nanstd(X, 0)
    scale = np.where(scale > 0, scale, 1.0)
    scores = []
    for setting in settings:
        filled = draws(partial(_made, make, setting), held.data, m, seed)
        scores.append(crps((filled / scale)[:, hidden], (X / scale)[hidden]))
    return settings[int(np.argmin(scores))], scores
