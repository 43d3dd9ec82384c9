"""The time in which every Gaussian path of scalars is one and the same diffusion.

Let s = log(1 + sigma^2 / alpha^2) and y = x / sqrt(alpha^2 + sigma^2). Then y_t = e^(-s / 2) x_0 +
sqrt(1 - e^-s) eps, and since the transitions of a Gaussian process are fixed by its marginals
given the clean end, y solves dy = -y / 2 ds + dW. On a variance-preserving path y is x and s the
integral of beta, so that a step of any length in t is one of its exact length in s.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fluvial.core.gaussian.levels import time_of
from fluvial.core.gaussian.paths import AlphaSigmaPath, numbers
from fluvial.core.time import grid_pairs


def clock_of(alpha: float, sigma: float) -> float:
    """s, infinite where alpha = 0. On ``VPLinear(T, T)`` it is T t."""
    return math.log1p((sigma / alpha) ** 2) if alpha else math.inf


def clock_grid(path: AlphaSigmaPath, steps: int, horizon: float | None = None) -> Tensor:
    """``steps`` steps of equal length in the clock, from ``horizon`` to 0, as pairs of times.

    Args:
        path: that of the field.
        steps: their number.
        horizon: clock at the start, the paper's T; by default that of the end of the path.

    Raises:
        ValueError: ``steps`` < 1; ``horizon`` is not positive, beyond the end of the path, or left
            out where that is infinite.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    end = clock_of(*numbers(path, 1.0))
    horizon = end if horizon is None else horizon
    if not (0 < horizon <= end * (1 + 1e-12) and math.isfinite(horizon)):
        raise ValueError(
            f"horizon must be positive, finite and at most {end:g}, the clock at which "
            f"{type(path).__name__} ends, got {horizon}"
        )
    clocks = horizon * torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    times = time_of(path, torch.expm1(clocks).sqrt())
    if horizon >= end:
        times[0] = 1.0
    return grid_pairs(times)
