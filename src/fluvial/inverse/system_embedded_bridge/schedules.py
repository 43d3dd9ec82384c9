"""How fast the two parts of a signal go: the schedules SB, VP and VE of the system-embedded bridge.

Of x_t = (P + alpha Q) x_0 + sqrt(gamma) A^+ S^(1/2) n + sqrt(beta) Q eps, with P = A^+ A, Q = 1 - P
and S the covariance of the measurement's noise, a schedule is three functions of t: alpha and beta
of the null space, and gamma of the range. Clean at t = 0, and gamma(1) = 1: the state ends as
A^+ y in law, plus noise of variance beta(1) in the null space.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fluvial.core.gaussian.paths import CEILING, AlphaSigmaPath
from fluvial.core.scales import Scalar


class Schedule(AlphaSigmaPath):
    """The path of the null space, sigma = sqrt(beta), with the clock gamma of the range."""

    @abstractmethod
    def beta(self, t: Tensor) -> Tensor:
        """The variance in the null space."""

    @abstractmethod
    def beta_rate(self, t: Tensor) -> Tensor:
        """d beta / dt."""

    @abstractmethod
    def gamma(self, t: Tensor) -> Tensor:
        """The variance in the range, in units of that of A^+ n: from 0 to 1."""

    @abstractmethod
    def gamma_rate(self, t: Tensor) -> Tensor:
        """d gamma / dt."""

    def sigma(self, t: Tensor) -> Tensor:
        return self.beta(t).clamp(min=0).sqrt()

    def sigma_rate(self, t: Tensor) -> Tensor:
        return _root_rate(self.beta_rate(t), self.sigma(t))

    @property
    def inside(self) -> AlphaSigmaPath:
        """The path of the range, with alpha = 1 and sigma = sqrt(gamma)."""
        return _Range(self)

    @property
    def singular(self) -> bool:
        """Does the SDE blow up at t = 1?"""
        return float(self.alpha(torch.ones((), dtype=torch.float64))) == 0.0

    def as_json(self) -> dict[str, Any]:
        """Its name and numbers; `schedule` makes it again."""
        name = next(name for name, kind in SCHEDULES.items() if type(self) is kind)
        return {"name": name, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class _Range(AlphaSigmaPath):
    of: Schedule

    def alpha(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def sigma(self, t: Tensor) -> Tensor:
        return self.of.gamma(t).clamp(min=0).sqrt()

    def alpha_rate(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)

    def sigma_rate(self, t: Tensor) -> Tensor:
        return _root_rate(self.of.gamma_rate(t), self.sigma(t))

    def sde(self, t: Tensor, **cond: Any) -> tuple[Scalar, Scalar]:
        # by gamma', which stays finite at t = 0 where the rate of sigma does not
        return Scalar(torch.zeros_like(t)), Scalar(self.of.gamma_rate(t).clamp(min=0).sqrt())


def _root_rate(rate: Tensor, root: Tensor) -> Tensor:
    """d sqrt(f) / dt, cut off where it diverges."""
    return rate / (2 * root.clamp(min=1 / CEILING))


@dataclass(frozen=True)
class SB(Schedule):
    """Null space: a Brownian bridge from x_0 to 0 in the clock s(t) = int_0^t b; range: s / S.

    b(t) = (sqrt(beta_min) + u (sqrt(beta_max) - sqrt(beta_min)))^2 with u = min(t, 1 - t), and with
    s1(t) = S - s(t), S = s(1),

        alpha = s1 / S,    beta = s s1 / S,    gamma = s / S.

    s is that of a symmetric b, s(t) = S - s(1 - t) for t > 1/2, so that s + s1 is constant and the
    rates are derivatives (corrected: the published code integrates b on beyond 1/2 as if it rose).

    Args:
        beta_min, beta_max: of b; published 1e-4 and 1e-2 for images and tomography, .5 and 2 for
            magnetic resonance.

    Raises:
        ValueError: one of them is not positive and finite.
    """

    beta_min: float = 1e-4
    beta_max: float = 1e-2

    def __post_init__(self) -> None:
        for name in ("beta_min", "beta_max"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")

    @property
    def total(self) -> float:
        """S."""
        low, slope = math.sqrt(self.beta_min), math.sqrt(self.beta_max) - math.sqrt(self.beta_min)
        return 2 * (low * low / 2 + low * slope / 4 + slope * slope / 24)

    def b(self, t: Tensor) -> Tensor:
        """The rate of the clock."""
        low, high = math.sqrt(self.beta_min), math.sqrt(self.beta_max)
        return (low + torch.minimum(t, 1 - t) * (high - low)).square()

    def _s(self, t: Tensor) -> Tensor:
        """s up to t = 1/2, from a polynomial that loses no digits at 0."""
        low, slope = math.sqrt(self.beta_min), math.sqrt(self.beta_max) - math.sqrt(self.beta_min)
        return t * (low * low + t * (low * slope + t * slope * slope / 3))

    def clock(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """(s, s1)."""
        near = self._s(torch.minimum(t, 1 - t))
        first = t <= 0.5
        return torch.where(first, near, self.total - near), torch.where(
            first, self.total - near, near
        )

    def alpha(self, t: Tensor) -> Tensor:
        return self.clock(t)[1] / self.total

    def alpha_rate(self, t: Tensor) -> Tensor:
        return -self.b(t) / self.total

    def beta(self, t: Tensor) -> Tensor:
        s, rest = self.clock(t)
        return s * rest / self.total

    def beta_rate(self, t: Tensor) -> Tensor:
        s, rest = self.clock(t)
        return self.b(t) * (rest - s) / self.total

    def gamma(self, t: Tensor) -> Tensor:
        return self.clock(t)[0] / self.total

    def gamma_rate(self, t: Tensor) -> Tensor:
        return self.b(t) / self.total

    def sde(self, t: Tensor, **cond: Any) -> tuple[Scalar, Scalar]:
        return Scalar(-self.b(t) / self.clock(t)[1]), Scalar(self.b(t).sqrt())


@dataclass(frozen=True)
class VP(Schedule):
    """Variance preserving: alpha = sqrt(1 - t), beta = gamma = t."""

    def alpha(self, t: Tensor) -> Tensor:
        return (1 - t).clamp(min=0).sqrt()

    def alpha_rate(self, t: Tensor) -> Tensor:
        return -1 / (2 * self.alpha(t).clamp(min=1 / CEILING))

    def beta(self, t: Tensor) -> Tensor:
        return t

    def beta_rate(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def gamma(self, t: Tensor) -> Tensor:
        return t

    def gamma_rate(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def sde(self, t: Tensor, **cond: Any) -> tuple[Scalar, Scalar]:
        return Scalar(-0.5 / (1 - t)), Scalar((1 - t).rsqrt())


@dataclass(frozen=True)
class VE(Schedule):
    """Variance exploding: alpha = 1, beta = variance t, gamma = t.

    Args:
        variance: of the start, in the null space; 100 as published. The start forgets x_0 up to a
            share of 1 / variance of it.

    Raises:
        ValueError: it is not positive and finite.
    """

    variance: float = 100.0

    def __post_init__(self) -> None:
        if not 0 < self.variance < math.inf:
            raise ValueError(f"variance must be positive and finite, got {self.variance}")

    def alpha(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def alpha_rate(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)

    def beta(self, t: Tensor) -> Tensor:
        return self.variance * t

    def beta_rate(self, t: Tensor) -> Tensor:
        return torch.full_like(t, self.variance)

    def gamma(self, t: Tensor) -> Tensor:
        return t

    def gamma_rate(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def sde(self, t: Tensor, **cond: Any) -> tuple[Scalar, Scalar]:
        return Scalar(torch.zeros_like(t)), Scalar(torch.full_like(t, math.sqrt(self.variance)))


SCHEDULES: dict[str, type[Schedule]] = {"sb": SB, "vp": VP, "ve": VE}


def schedule(name: str, **numbers: Any) -> Schedule:
    """A schedule by its name, with other numbers than its defaults.

    Raises:
        ValueError: an unknown name, or a number that is out of its range.
        TypeError: a number that the schedule does not have.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r}")
    return SCHEDULES[name](**numbers)
