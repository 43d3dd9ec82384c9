"""Gaussian paths x_t = alpha(t) x_0 + sigma(t) eps with scalar coefficients.

A time of shape () is kept as it comes (`simulate` gives it in float64, on the host), so schedules
are evaluated in double precision and cost no kernel. Times of shape (batch,) set the precision of
the schedule, not the dtype of the result, which is that of ``x``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluvial.core.protocols import Draw, Noise
from fluvial.core.scales import Scalar

# A rate that diverges is cut off where it and its inverse are still numbers of float32.
CEILING = 2.0**60


class AlphaSigmaPath(ABC):
    """x_t = alpha(t) x_0 + sigma(t) eps, eps ~ N(0, I), with alpha(0) = 1 and sigma(0) = 0.

    A path is four functions of t; posterior, transition, velocity and SDE follow:

    * velocity of the flow given both ends: alpha' x_0 + sigma' eps;
    * SDE dx = F x dt + G dW with F = alpha' / alpha and G^2 = 2 sigma (sigma' - F sigma);
    * with rho = (alpha_t sigma_s) / (alpha_s sigma_t), the root of the ratio of signal-to-noise
      ratios, q(x_s | x_t, x_0) = N(alpha_s x_0 + sigma_s rho eps_t, sigma_s^2 (1 - rho^2)), where
      eps_t = (x_t - alpha_t x_0) / sigma_t (Sohl-Dickstein et al., ICML 2015; Kingma et al.,
      NeurIPS 2021). It is a point at s = 0 and needs nothing from x_t where alpha_t = 0.
    """

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def sigma(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def alpha_rate(self, t: Tensor) -> Tensor:
        """d alpha / dt."""

    @abstractmethod
    def sigma_rate(self, t: Tensor) -> Tensor:
        """d sigma / dt, kept finite where it diverges (at t = 0 of a variance-preserving path)."""

    # Path

    def source(self, like: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """x_1 ~ N(0, sigma(1)^2 I), shaped as ``like``."""
        return self.source_level @ noise.normal(like, "source")

    def sample(
        self, x0: Tensor, t: Tensor, noise: Noise, x1: Tensor | None = None, **cond: Any
    ) -> Draw:
        """x_t = alpha x_0 + sigma eps. A given ``x1`` is the source end: eps = x1 / sigma(1)."""
        if not x0.is_floating_point():
            raise TypeError(f"x0 must be floating, got {x0.dtype}")
        if x1 is None:
            eps = noise.normal(x0, "source")
            x1 = self.source_level @ eps
        elif x1.shape != x0.shape:
            raise ValueError(f"x1 has shape {tuple(x1.shape)}, x0 {tuple(x0.shape)}")
        else:
            eps = self.source_level.solve(x1)
        scale, level = self.marginal(t)
        x = scale @ x0 + level @ eps

        def target(kind: str) -> Tensor:
            match kind:
                case "clean":
                    return x0
                case "noise":
                    return eps
                case "velocity":
                    scale_rate, level_rate = self.rates(t)
                    return scale_rate @ x0 + level_rate @ eps
                case "score":
                    return -level.solve(eps)
            raise ValueError(
                f"{type(self).__name__} has targets 'clean', 'noise', 'velocity' and 'score', "
                f"got {kind!r}"
            )

        return Draw(x, x0, x1, t, target)

    def posterior(
        self, x: Tensor, clean: Tensor, t: Tensor, s: Tensor, noise: Noise, **cond: Any
    ) -> Tensor:
        """A draw of q(x_s | x_t = x, x_0 = clean), s <= t."""
        rho, shrink = self._correlation(t, s)
        from_x = shrink * rho
        from_clean = self.alpha(s) - from_x * self.alpha(t)
        spread = self.sigma(s) * _root(1 - rho.square())
        mean = Scalar(from_x) @ x + Scalar(from_clean) @ clean
        return mean + Scalar(spread) @ noise.normal(x, "posterior")

    def transition(self, x: Tensor, s: Tensor, t: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """A draw of q(x_t | x_s = x), s <= t."""
        rho, _ = self._correlation(t, s)
        mean = _ratio(self.alpha(t), self.alpha(s))
        spread = self.sigma(t) * _root(1 - rho.square())
        return Scalar(mean) @ x + Scalar(spread) @ noise.normal(x, "transition")

    def readout(self, x: Tensor, clean: Tensor) -> Tensor:
        return x

    # GaussianPath

    def marginal(self, t: Tensor, **cond: Any) -> tuple[Scalar, Scalar]:
        """(alpha, sigma)."""
        return Scalar(self.alpha(t)), Scalar(self.sigma(t))

    def rates(self, t: Tensor, **cond: Any) -> tuple[Scalar, Scalar]:
        """(alpha', sigma')."""
        return Scalar(self.alpha_rate(t)), Scalar(self.sigma_rate(t))

    def sde(self, t: Tensor, **cond: Any) -> tuple[Scalar, Scalar]:
        """(F, G). Both are infinite where alpha is 0: the SDE of the linear path ends at t < 1."""
        drift = self.alpha_rate(t) / self.alpha(t)
        diffusion = _root(2 * self.sigma(t) * (self.sigma_rate(t) - drift * self.sigma(t)))
        return Scalar(drift), Scalar(diffusion)

    @property
    def source_level(self) -> Scalar:
        """Of x_1 = level @ eps: sigma(1)."""
        return Scalar(self.sigma(torch.ones((), dtype=torch.float64)))

    def _correlation(self, t: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """(rho, sigma_s / sigma_t); both ratios are 1 where 0 / 0, which is where s = t."""
        shrink = _ratio(self.sigma(s), self.sigma(t))
        return shrink * _ratio(self.alpha(t), self.alpha(s)), shrink


def _ratio(upper: Tensor, lower: Tensor) -> Tensor:
    zero = lower == 0
    return torch.where(zero, 1.0, upper / torch.where(zero, 1.0, lower))


def _root(x: Tensor) -> Tensor:
    return x.clamp(min=0).sqrt()


@dataclass(frozen=True)
class Linear(AlphaSigmaPath):
    """alpha = 1 - t, sigma = t: flow matching and rectified flow.

    Lipman et al., ICLR 2023; Liu et al., ICLR 2023.
    """

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def sigma(self, t: Tensor) -> Tensor:
        return t

    def alpha_rate(self, t: Tensor) -> Tensor:
        return -torch.ones_like(t)

    def sigma_rate(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)


@dataclass(frozen=True)
class VPLinear(AlphaSigmaPath):
    """Variance preserving, beta(t) = beta_min + t (beta_max - beta_min) (Song et al., ICLR 2021).

    log alpha = -(t^2 (beta_max - beta_min) / 2 + t beta_min) / 2 and sigma^2 = 1 - alpha^2, taken
    as -expm1(2 log alpha) so that small t loses no digits.
    """

    beta_min: float = 0.1
    beta_max: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.beta_min <= self.beta_max < math.inf:
            raise ValueError(
                f"need 0 < beta_min <= beta_max, got {self.beta_min} and {self.beta_max}"
            )

    def _log_alpha(self, t: Tensor) -> Tensor:
        return -0.25 * t.square() * (self.beta_max - self.beta_min) - 0.5 * t * self.beta_min

    def _beta(self, t: Tensor) -> Tensor:
        return self.beta_min + t * (self.beta_max - self.beta_min)

    def alpha(self, t: Tensor) -> Tensor:
        return self._log_alpha(t).exp()

    def sigma(self, t: Tensor) -> Tensor:
        return _root(-torch.expm1(2 * self._log_alpha(t)))

    def alpha_rate(self, t: Tensor) -> Tensor:
        return -0.5 * self._beta(t) * self.alpha(t)

    def sigma_rate(self, t: Tensor) -> Tensor:
        # sigma sigma' = beta alpha^2 / 2 is finite at 0, sigma' is not
        return 0.5 * self._beta(t) * self.alpha(t).square() / self.sigma(t).clamp(min=1 / CEILING)

    def sde(self, t: Tensor, **cond: Any) -> tuple[Scalar, Scalar]:
        beta = self._beta(t)
        return Scalar(-0.5 * beta), Scalar(beta.sqrt())


@dataclass(frozen=True)
class VPCosine(AlphaSigmaPath):
    """Variance preserving, alpha = cos(pi t / 2), sigma = sin(pi t / 2) (Nichol & Dhariwal, 2021).

    The offset of the discrete schedule is left out; alpha is a sine of 1 - t so that it is 0 at
    t = 1 exactly.
    """

    def alpha(self, t: Tensor) -> Tensor:
        return torch.sin(0.5 * math.pi * (1 - t))

    def sigma(self, t: Tensor) -> Tensor:
        return torch.sin(0.5 * math.pi * t)

    def alpha_rate(self, t: Tensor) -> Tensor:
        return -0.5 * math.pi * self.sigma(t)

    def sigma_rate(self, t: Tensor) -> Tensor:
        return 0.5 * math.pi * self.alpha(t)


@dataclass(frozen=True)
class VE(AlphaSigmaPath):
    """Variance exploding: alpha = 1, sigma^2 = sigma_min^2 ((sigma_max / sigma_min)^(2 t) - 1).

    The exact marginal of dx = sigma_min (sigma_max / sigma_min)^t sqrt(2 log(sigma_max /
    sigma_min)) dW from data at t = 0 (Song et al., ICLR 2021).
    """

    sigma_min: float = 0.01
    sigma_max: float = 50.0

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            raise ValueError(
                f"need 0 < sigma_min < sigma_max, got {self.sigma_min} and {self.sigma_max}"
            )

    @property
    def _log_ratio(self) -> float:
        return math.log(self.sigma_max / self.sigma_min)

    def alpha(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def sigma(self, t: Tensor) -> Tensor:
        return self.sigma_min * _root(torch.expm1(2 * t * self._log_ratio))

    def alpha_rate(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)

    def sigma_rate(self, t: Tensor) -> Tensor:
        return 0.5 * self._diffusion(t).square() / self.sigma(t).clamp(min=1 / CEILING)

    def _diffusion(self, t: Tensor) -> Tensor:
        growth = self.sigma_min * torch.exp(t * self._log_ratio)
        return math.sqrt(2 * self._log_ratio) * growth

    def sde(self, t: Tensor, **cond: Any) -> tuple[Scalar, Scalar]:
        return Scalar(torch.zeros_like(t)), Scalar(self._diffusion(t))


@dataclass(frozen=True)
class CustomPath(AlphaSigmaPath):
    """The user's alpha and sigma; derivatives by forward-mode differentiation.

    Where the derivative of sigma diverges at t = 0, `sde` returns G = 0 there, not its limit.

    Args:
        alpha_of, sigma_of: elementwise functions of a tensor of times, differentiable by torch.

    Raises:
        ValueError: alpha(0) is not 1, sigma(0) is not 0, a value is not finite, or alpha / sigma
            does not fall as t grows.
    """

    alpha_of: Callable[[Tensor], Tensor]
    sigma_of: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        grid = torch.linspace(0, 1, 101, dtype=torch.float64)
        alpha, sigma = self.alpha(grid), self.sigma(grid)
        for name, values in (("alpha_of", alpha), ("sigma_of", sigma)):
            if getattr(values, "shape", None) != grid.shape or not bool(values.isfinite().all()):
                raise ValueError(f"{name} must map (n,) times to (n,) finite values, got {values}")
        if abs(float(alpha[0]) - 1) > 1e-6 or abs(float(sigma[0])) > 1e-6:
            raise ValueError(
                "a path starts at the data: alpha_of(0) = 1 and sigma_of(0) = 0, got "
                f"{float(alpha[0])} and {float(sigma[0])}"
            )
        if not bool((torch.atan2(sigma, alpha).diff() > 0).all()):
            raise ValueError("alpha_of / sigma_of must fall strictly as t grows from 0 to 1")

    def alpha(self, t: Tensor) -> Tensor:
        return self.alpha_of(t)

    def sigma(self, t: Tensor) -> Tensor:
        return self.sigma_of(t)

    def alpha_rate(self, t: Tensor) -> Tensor:
        return _rate(self.alpha_of, t, 0.0)

    def sigma_rate(self, t: Tensor) -> Tensor:
        return _rate(self.sigma_of, t, CEILING)


def _rate(function: Callable[[Tensor], Tensor], t: Tensor, undefined: float) -> Tensor:
    t = t.contiguous()  # jvp refuses a time that was expanded to the rows
    rate = torch.func.jvp(function, (t,), (torch.ones_like(t),))[1]
    rate = rate.to(t.dtype)  # where t is (), a tangent may come back in double precision
    return rate.nan_to_num(nan=undefined).clamp(-CEILING, CEILING)


# The same formulas for one time on the host, as numbers of Python: a sampler asks for them at every
# step, and a torch operation on a scalar takes longer than a whole formula here.


def numbers(path: AlphaSigmaPath, t: float) -> tuple[float, float]:
    """(alpha, sigma) at t. A path that is none of the above is asked with a float64 tensor."""
    kind = type(path)  # not isinstance: a subclass may have formulas of its own
    if kind is Linear:
        return 1 - t, t
    if kind is VPCosine:
        return math.sin(0.5 * math.pi * (1 - t)), math.sin(0.5 * math.pi * t)
    if isinstance(path, VPLinear) and kind is VPLinear:
        log_alpha = -0.25 * t * t * (path.beta_max - path.beta_min) - 0.5 * t * path.beta_min
        return math.exp(log_alpha), math.sqrt(-math.expm1(2 * log_alpha))
    if isinstance(path, VE) and kind is VE:
        return 1.0, path.sigma_min * math.sqrt(math.expm1(2 * t * path._log_ratio))
    time = torch.tensor(t, dtype=torch.float64)
    return float(path.alpha(time)), float(path.sigma(time))


def rate_numbers(path: AlphaSigmaPath, t: float) -> tuple[float, float]:
    """(alpha', sigma') at t, as `numbers`."""
    kind = type(path)
    if kind is Linear:
        return -1.0, 1.0
    alpha, sigma = numbers(path, t)
    if kind is VPCosine:
        return -0.5 * math.pi * sigma, 0.5 * math.pi * alpha
    if isinstance(path, VPLinear) and kind is VPLinear:
        beta = path.beta_min + t * (path.beta_max - path.beta_min)
        return -0.5 * beta * alpha, 0.5 * beta * alpha * alpha / max(sigma, 1 / CEILING)
    if isinstance(path, VE) and kind is VE:
        growth = path.sigma_min * math.exp(t * path._log_ratio)
        return 0.0, path._log_ratio * growth * growth / max(sigma, 1 / CEILING)
    time = torch.tensor(t, dtype=torch.float64)
    return float(path.alpha_rate(time)), float(path.sigma_rate(time))
