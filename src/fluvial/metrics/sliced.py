"""Sliced Wasserstein distances: one-dimensional ones along many directions."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.metrics.checks import check_order, pair
from fluvial.metrics.wasserstein import quantile_distances, quantile_power

CHUNK = 2**25
"""Projections, rows times directions, that are sorted at a time."""


def directions(dim: int, count: int, seed: int = 0) -> Tensor:
    """Unit vectors, uniform on the sphere, (count, dim), float64; row i depends on (seed, i).

    Raises:
        ValueError: ``dim`` or ``count`` is below 1.
    """
    for name, value in (("dim", dim), ("count", count)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    drawn = KeyedNoise(seed).normal(torch.empty(count, dim, dtype=torch.float64), "directions")
    return F.normalize(drawn, dim=1)


def sliced_wasserstein(
    a: Tensor | np.ndarray,
    b: Tensor | np.ndarray,
    *,
    p: float = 2,
    projections: int = 256,
    seed: int = 0,
) -> float:
    r"""The sliced p-Wasserstein distance.

    .. math::
        SW_p^p = \mathrm{E}_u\, W_p^p(\langle u, X\rangle, \langle u, Y\rangle), \qquad |u| = 1

    over random directions, each exactly (Bonneel et al., Sliced and Radon Wasserstein barycenters
    of measures, 2015). In units of the data; of one column it is the Wasserstein distance. Values
    are to be compared with the same seed and number of projections: the directions, `directions`,
    are then the same.

    Args:
        a, b: real, (N, D) and (M, D), at least 1 row each.
        p: at least 1.
        projections: number of directions. The standard error falls as its root.
        seed: of the directions.

    Raises:
        TypeError, ValueError: ``a`` or ``b`` is not a finite real matrix, the columns differ, ``p``
            or ``projections`` is below 1.
    """
    x, y = pair(a, b, least=1)
    check_order(p)
    along = _along(x, y, _directions(x, projections, seed), p)
    largest = float(along.max())  # powers of numbers up to 1 do not overflow
    return largest * float((along / largest).pow(p).mean() ** (1 / p)) if largest else 0.0


def max_sliced_wasserstein(
    a: Tensor | np.ndarray,
    b: Tensor | np.ndarray,
    *,
    p: float = 2,
    projections: int = 256,
    steps: int = 50,
    seed: int = 0,
) -> float:
    r"""The largest p-Wasserstein distance along one direction, from below.

    .. math::
        \max_{|u| = 1} W_p(\langle u, X\rangle, \langle u, Y\rangle)

    (Deshpande et al., Max-sliced Wasserstein distance and its use for GANs, 2019.) The best of
    random directions is improved by gradient steps on the sphere, each taken only if it raises the
    value; so this is a lower bound, and never below the best of the directions. The maximum is
    biased upwards by the search itself: compare values of the same N and D.

    Args:
        a, b, p, seed: as for `sliced_wasserstein`.
        projections: directions to start from, at least 1.
        steps: gradient steps, not negative; 0 for the best of the directions alone.

    Raises:
        TypeError, ValueError: as `sliced_wasserstein`; or ``steps`` is negative.
    """
    x, y = pair(a, b, least=1)
    check_order(p)
    if steps < 0:
        raise ValueError(f"steps must not be negative, got {steps}")
    starts = _directions(x, projections, seed)
    along = _along(x, y, starts, p)
    best, unit, rate = along.max(), starts[along.argmax()], 1.0
    if not best:
        return 0.0
    for _ in range(steps):
        unit = unit.detach().requires_grad_()
        value = quantile_power(x @ unit[:, None] / best, y @ unit[:, None] / best, p)[0]
        (slope,) = torch.autograd.grad(value, unit)
        with torch.no_grad():
            slope -= (slope @ unit) * unit
            step = F.normalize(slope, dim=0) * rate
            ahead = F.normalize(unit + step, dim=0)
            reached = quantile_distances(x @ ahead[:, None], y @ ahead[:, None], p)[0]
        if reached > best:
            best, unit, rate = reached, ahead, min(1.0, 2 * rate)
        else:
            rate /= 4
    return float(best)


def _directions(x: Tensor, projections: int, seed: int) -> Tensor:
    if projections < 1:
        raise ValueError(f"projections must be at least 1, got {projections}")
    return directions(x.shape[1], projections, seed).to(x.device)


def _along(x: Tensor, y: Tensor, units: Tensor, p: float) -> Tensor:
    """W_p along each direction, (count,)."""
    parts = units.split(max(1, CHUNK // (len(x) + len(y))))
    return torch.cat([quantile_distances(x @ u.T, y @ u.T, p) for u in parts])
