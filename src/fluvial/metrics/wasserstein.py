"""Wasserstein distances that are exact: of samples, of one dimension, of Gaussians."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fluvial.metrics.checks import Values, check_order, pair
from fluvial.metrics.distances import centred, squared_distances
from fluvial.metrics.moments import Moments

LIMIT = 5000
"""Rows of a sample beyond which the exact distance wants a decision."""


def wasserstein(
    a: Tensor | np.ndarray, b: Tensor | np.ndarray, *, p: float = 2, limit: int = LIMIT
) -> float:
    r"""The p-Wasserstein distance of two samples, exactly.

    .. math::
        W_p^p = \min_\pi \sum_{ij} \pi_{ij} |x_i - y_j|^p,
        \qquad \sum_j \pi_{ij} = 1/N, \quad \sum_i \pi_{ij} = 1/M

    with the Euclidean norm, by POT's network simplex (Bonneel et al., Displacement interpolation
    using Lagrangian mass transport, 2011); of one column by the quantiles, at any size. Time
    grows about as N^3 and memory as N M, three matrices of 8 bytes a pair: 5,000 rows a side
    take 0.6 GB and about a minute. Of a sample in D dimensions it is biased upwards by N^(-1/D):
    compare values of the same N and D only.

    Args:
        a, b: real, (N, D) and (M, D), at least 1 row each.
        p: at least 1.
        limit: rows that a sample of more than one column may have.

    Raises:
        TypeError, ValueError: ``a`` or ``b`` is not a finite real matrix, the columns differ, ``p``
            is below 1, or a sample has more rows than ``limit``.
        RuntimeError: the solver gave up.
    """
    x, y = pair(a, b, least=1)
    check_order(p)
    if x.shape[1] == 1:
        return float(quantile_distances(x, y, p)[0])
    if max(len(x), len(y)) > limit:
        raise ValueError(
            f"a and b must have at most {limit} rows for the exact distance, got {len(x)} and "
            f"{len(y)}: take fewer rows, raise limit, or take sliced_wasserstein"
        )
    # here: POT takes a second to import
    import ot

    x, y = centred(x, y)
    cost = squared_distances(x, y).cpu()
    scale = float(cost.max())
    if scale == 0:
        return 0.0
    # powers of numbers up to 1: none overflows, and the solver's tolerance is absolute
    cost = (cost / scale) ** (p / 2)
    weights = [np.full(len(z), 1 / len(z)) for z in (x, y)]
    value, log = ot.emd2(*weights, cost.numpy(), numItermax=10**9, log=True)
    if log["warning"] is not None:
        raise RuntimeError(f"the exact distance was not found: {log['warning']}")
    return float(max(value, 0.0) ** (1 / p) * math.sqrt(scale))


def quantile_distances(x: Tensor, y: Tensor, p: float) -> Tensor:
    r"""W_p of every column, (D,), in closed form.

    .. math::
        W_p^p = \int_0^1 |F^{-1}(q) - G^{-1}(q)|^p\,dq

    """
    gaps, weights = _gaps(x, y)
    # powers of numbers up to 1: none overflows, and the largest does not vanish
    largest = gaps.amax(0)
    unit = torch.where(largest > 0, largest, 1)
    return unit * (weights @ (gaps / unit).pow(p)).pow(1 / p)


def quantile_power(x: Tensor, y: Tensor, p: float) -> Tensor:
    """W_p^p of every column, (D,), differentiable in ``x`` and ``y``, (N, D) and (M, D)."""
    gaps, weights = _gaps(x, y)
    return weights @ gaps.pow(p)


def _gaps(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """|F^-1 - G^-1| where it is constant, (K, D), and the lengths of these pieces, (K,)."""
    x, y = x.sort(0).values, y.sort(0).values
    if len(x) == len(y):
        return (x - y).abs(), x.new_full((len(x),), 1 / len(x))
    # both quantile functions are steps: between two neighbours of this grid, in units of 1 / N M,
    # both are constant
    count, other = len(x), len(y)
    ends = torch.cat(
        [
            torch.arange(1, count + 1, device=x.device) * other,
            torch.arange(1, other + 1, device=x.device) * count,
        ]
    ).unique()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    weights = (ends - starts).to(x.dtype) / (count * other)
    return (x[starts // other] - y[starts // count]).abs(), weights


def gaussian_wasserstein(
    mean_a: Values, covariance_a: Values, mean_b: Values, covariance_b: Values
) -> float:
    r"""The 2-Wasserstein distance of two Gaussians, which is the root of the Fréchet distance.

    .. math::
        W_2^2 = |m_a - m_b|^2 + \operatorname{tr}\bigl(S_a + S_b - 2 (S_a S_b)^{1/2}\bigr)

    (Olkin and Pukelsheim, The distance between two random vectors with given dispersion matrices,
    1982.) The covariances may be singular.

    Args:
        mean_a, mean_b: real, (D,).
        covariance_a, covariance_b: real, symmetric, no negative eigenvalues, (D, D).

    Raises:
        TypeError, ValueError: an argument is something else, or the D differ.
    """
    # here: frechet takes the other functions of this package
    from fluvial.metrics.frechet import frechet_distance

    pairs = (("a", mean_a, covariance_a), ("b", mean_b, covariance_b))
    both = []
    for name, mean, covariance in pairs:
        try:
            both.append(Moments.from_covariance(mean, covariance, 2))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
    return math.sqrt(frechet_distance(*both))
