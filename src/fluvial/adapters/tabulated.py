"""The path of a table of noise levels, as discrete-time diffusions have it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.scales import Scalar


@dataclass(frozen=True, eq=False)
class Tabulated(AlphaSigmaPath):
    """Variance preserving, with alpha^2 at t = (n + 1) / T the n-th of T entries of a table.

    Timestep n has had n + 1 doses of noise; t = 0 is data, which has had none. Between the entries
    the angle phi, with alpha = cos(phi) and sigma = sin(phi), is linear in t. So alpha^2 + sigma^2
    is 1 everywhere, rates are finite, and a velocity is phi' (alpha eps - sigma x_0): phi' times
    what is called a v-prediction (Salimans and Ho, ICLR 2022). At an entry, phi' is that of the
    piece below.

    The source is N(0, I), as such models are sampled, and not N(0, sigma(1)^2 I): their tables end
    short of pure noise, and data of unit variance have unit variance there.

    Args:
        alphas_cumprod: (T,), falling from below 1 to 0 or more; called alpha bar in DDPM.

    Raises:
        ValueError: another shape, or entries that do not fall strictly within [0, 1).
    """

    alphas_cumprod: Tensor
    timesteps: int = field(init=False)
    _angles: Tensor = field(init=False, repr=False)
    _rest: Tensor = field(init=False, repr=False)  # pi / 2 - angle, so that alpha may be 0 exactly
    _slopes: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        table = torch.as_tensor(self.alphas_cumprod).detach().to("cpu", torch.float64)
        if table.ndim != 1 or not len(table):
            raise ValueError(f"alphas_cumprod must have shape (T,), got {tuple(table.shape)}")
        table = torch.cat([table.new_ones(1), table])
        if not (bool((table.diff() < 0).all()) and table[-1] >= 0):
            worst = int((table.diff() >= 0).to(torch.uint8).argmax())
            raise ValueError(
                "alphas_cumprod must fall strictly from below 1 to 0 or more, got "
                f"{float(table[worst + 1])} at {worst} and {float(table[-1])} at the end"
            )
        alpha, sigma = table.sqrt(), (1 - table).sqrt()
        object.__setattr__(self, "timesteps", len(table) - 1)
        object.__setattr__(self, "_angles", torch.atan2(sigma, alpha))
        object.__setattr__(self, "_rest", torch.atan2(alpha, sigma))
        object.__setattr__(self, "_slopes", self._angles.diff() * self.timesteps)

    def timestep(self, t: Tensor) -> Tensor:
        """n = T t - 1, which between entries is no integer; 0 below t = 1 / T."""
        return torch.as_tensor(self._index(t) - 1, dtype=t.dtype, device=t.device).clamp(min=0)

    def alpha(self, t: Tensor) -> Tensor:
        return self._interpolate(t, self._rest)[0].sin()

    def sigma(self, t: Tensor) -> Tensor:
        return self._interpolate(t, self._angles)[0].sin()

    def alpha_rate(self, t: Tensor) -> Tensor:
        return -self.angle_rate(t) * self.sigma(t)

    def sigma_rate(self, t: Tensor) -> Tensor:
        return self.angle_rate(t) * self.alpha(t)

    def angle_rate(self, t: Tensor) -> Tensor:
        """phi', shaped as ``t``."""
        return self._slopes.to(t, non_blocking=True)[self._below(self._index(t))]

    def marginal(self, t: Tensor, **cond: Any) -> tuple[Scalar, Scalar]:
        rest, angle = self._interpolate(t, self._rest, self._angles)
        return Scalar(rest.sin()), Scalar(angle.sin())

    def sde(self, t: Tensor, **cond: Any) -> tuple[Scalar, Scalar]:
        # G^2 = 2 phi' tan(phi), without a difference of nearly equal numbers
        rate, tangent = self.angle_rate(t), self.sigma(t) / self.alpha(t)
        return Scalar(-rate * tangent), Scalar((2 * rate * tangent).sqrt())

    @property
    def source_level(self) -> Scalar:
        return Scalar(torch.ones((), dtype=torch.float64))

    def _interpolate(self, t: Tensor, *tables: Tensor) -> list[Tensor]:
        index = self._index(t)
        below = self._below(index)
        return [
            torch.lerp(table[below], table[below + 1], index - below)
            for table in (table.to(t, non_blocking=True) for table in tables)
        ]

    def _index(self, t: Tensor) -> float | Tensor:
        """T t, an integer where it misses one by no more than rounding; a number for one time.

        A sampler asks many times a step, and numbers of Python are ten times as fast as tensors.
        """
        error = 8 * self.timesteps * torch.finfo(t.dtype).eps
        differentiated = t.requires_grad or unpack_dual(t).tangent is not None
        if not (t.ndim or differentiated or t.device.type != "cpu"):
            number = float(t) * self.timesteps
            return float(round(number)) if abs(number - round(number)) < error else number
        index = t * self.timesteps
        missed = index.round() - index
        return index + torch.where(missed.abs() < error, missed, 0.0).detach()

    def _below(self, index: float | Tensor) -> Any:
        """The entry below, of those with data in front."""
        if isinstance(index, float):
            return min(max(math.ceil(index) - 1, 0), self.timesteps - 1)
        return (index.detach().ceil() - 1).clamp(0, self.timesteps - 1).long()
