"""Noise levels sigma / alpha of a path: the time of a level, and a law of times by their levels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fluvial.core.gaussian.paths import VE, AlphaSigmaPath, Linear, VPCosine, VPLinear
from fluvial.core.protocols import Noise


def time_of(path: AlphaSigmaPath, level: Tensor) -> Tensor:
    """t with sigma(t) / alpha(t) = ``level``, elementwise; 1 where the path ends below it.

    In closed form for the paths of `fluvial.core.gaussian.paths`, by bisection for others.
    """
    level = level.double()
    kind = type(path)  # not isinstance: a subclass may have formulas of its own
    if kind is Linear:
        t = 1 / (1 + 1 / level)
    elif kind is VPCosine:
        t = level.atan() * (2 / math.pi)
    elif isinstance(path, VE) and kind is VE:
        growth = math.log(path.sigma_max / path.sigma_min)
        t = torch.log1p((level / path.sigma_min).square()) / (2 * growth)
    elif isinstance(path, VPLinear) and kind is VPLinear:
        # -log alpha = log(1 + r^2) / 2 is a quadratic in t, solved without a difference
        depth = 2 * torch.log1p(level.square())
        slope = path.beta_max - path.beta_min
        root = (path.beta_min**2 + slope * depth).sqrt()
        t = torch.where(depth.isinf(), 1.0, depth / (path.beta_min + root))
    else:
        t = torch.where(level == 0, 0.0, time_of_level(path, level))
        t = torch.where(level.isinf(), 1.0, t)
    return t.clamp(max=1)


def time_of_level(path: AlphaSigmaPath, level: Tensor) -> Tensor:
    """t with sigma(t) / alpha(t) = ``level``, elementwise; 1 where the path ends below it.

    By bisection in float64: to 2^-60 absolutely, or to the last bit.

    Args:
        path: sigma / alpha rises with t, as it does on every path of scalars.
        level: positive, any shape; the result has its shape, dtype and device.
    """
    target = level.double().atan()
    low, high = torch.zeros_like(target), torch.ones_like(target)
    for _ in range(60):
        middle = (low + high) / 2
        below = torch.atan2(path.sigma(middle), path.alpha(middle)) < target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high.to(level.dtype)


@dataclass(frozen=True)
class LogNormalSigma:
    """log(sigma / alpha) ~ N(mean, std^2): the law of EDM (Karras et al., NeurIPS 2022).

    ``sigma / alpha`` is the noise level of x_t / alpha, which EDM calls sigma. A draw beyond the
    level at which the path ends is put there, at t = 1. On the linear path this is LogitNormal.

    Args:
        path: whose levels are meant.
        mean, std: P_mean and P_std, by default those for images of standard deviation 0.5.

    Raises:
        ValueError: ``mean`` or ``std`` is not finite, or ``std`` not positive.
    """

    path: AlphaSigmaPath
    mean: float = -1.2
    std: float = 1.2

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 0 < self.std < math.inf):
            raise ValueError(
                f"mean must be finite and std positive and finite, got {self.mean} and {self.std}"
            )

    def __call__(self, like: Tensor, noise: Noise, tag: str = "time") -> Tensor:
        """(batch,) times in the dtype and on the device of ``like``."""
        return self._time(noise.normal(like.new_empty(like.shape[:1]), tag))

    def quantile(self, u: Tensor) -> Tensor:
        return self._time(torch.special.ndtri(u))

    def _time(self, normal: Tensor) -> Tensor:
        return time_of(self.path, torch.exp(self.std * normal + self.mean)).to(normal.dtype)
