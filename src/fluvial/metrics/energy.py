"""The energy distance."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fluvial.metrics.checks import pair
from fluvial.metrics.distances import MEMORY, centred, squared_distances, tiles


def energy_distance(
    a: Tensor | np.ndarray,
    b: Tensor | np.ndarray,
    *,
    unbiased: bool = True,
    memory: int = MEMORY,
) -> float:
    r"""The energy distance of two samples.

    .. math::
        2\,\mathrm{E}|X - Y| - \mathrm{E}|X - X'| - \mathrm{E}|Y - Y'|

    with the Euclidean norm: 0 if and only if the laws are equal (Székely and Rizzo, Energy
    statistics: a class of statistics based on distances, 2013). In units of the data, with nothing
    to choose; it is the squared MMD of the kernel -|x - y|. `scipy.stats.energy_distance` is
    the root of the biased estimate in one dimension.

    Args:
        a, b: real, (N, D) and (M, D), N and M at least 2. Columns of different units want to be
            scaled first.
        unbiased: leave out pairs of a row and itself; the value is then negative about half of the
            time for samples of one law. The biased one is at least 0.
        memory: bytes that a block of pairs may take.

    Raises:
        TypeError, ValueError: ``a`` or ``b`` is not a finite real matrix with at least 2 rows, or
            the columns differ.
    """
    x, y = centred(*pair(a, b))
    own = len(x) * (len(x) - unbiased), len(y) * (len(y) - unbiased)
    within = _sum(x, x, memory) / own[0] + _sum(y, y, memory) / own[1]
    return 2 * _sum(x, y, memory) / (len(x) * len(y)) - within


def _sum(x: Tensor, y: Tensor, memory: int) -> float:
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for rows, across in tiles(len(x), len(y), memory):
        for columns in across:
            total += squared_distances(x[rows], y[columns]).sqrt_().sum()
    return float(total)
