"""Reference processes of Schrödinger bridges: Brownian motion and Ornstein-Uhlenbeck, as paths."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from fluvial.core.gaussian.paths import CEILING, AlphaSigmaPath
from fluvial.core.protocols import Draw, Noise
from fluvial.core.scales import Scalar

ONE = torch.ones((), dtype=torch.float64)


@dataclass(frozen=True)
class Reference(AlphaSigmaPath):
    """dX = -a X dt + sigma dB on [0, 1], and its bridges between two given ends.

    With S(u) = sinh(a u) / a, which is u for Brownian motion (a = 0), the process has
    alpha = exp(-a t) and sigma(t)^2 = sigma^2 exp(-a t) S(t), and its bridge from x_0 to x_1 is

        x_t = [S(1 - t) x_0 + S(t) x_1] / S(1) + sqrt(v) z,    v = sigma^2 S(t) S(1 - t) / S(1).

    The drift of a bridge, in t increasing as every drift here, is

        forwards  -a coth(a (1 - t)) x + x_1 / S(1 - t),     towards x_1,
        backwards  a coth(a t) x - x_0 / S(t),               towards x_0 as t falls.

    The second is the first seen from the other end: with t -> 1 - t and the ends exchanged the
    bridge stays as it is and a drift changes its sign. So one direction is enough. All is written
    for the backward one, in which the bridge is a diffusion path: `posterior` is the law of x_s
    given x_t and x_0, and the backward drift is F x - G^2 score with the path's own F, G and score.
    A field E[x_0 | x_t] or E[score | x_t] of a coupling is then simulated by
    `fluvial.core.gaussian.sde.EulerMaruyama` (with its ``diffusion=1``) or
    `fluvial.core.simulate.Ancestral`, and learned by `fluvial.core.gaussian.losses.Matching`. It
    is not the score of the bridge's marginals, so no other sampler of that path serves.

    Args:
        diffusion: sigma. A horizon T of dX = dB is sigma^2 = T.
        reversion: a, 0 for Brownian motion.

    Raises:
        ValueError: ``diffusion`` is not positive and finite, or ``reversion`` not in [0, 100].

    Citation: Shi et al., NeurIPS 2023, arXiv 2303.16852.
    """

    diffusion: float = 1.0
    reversion: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.diffusion < math.inf:
            raise ValueError(f"diffusion must be positive and finite, got {self.diffusion}")
        if not 0 <= self.reversion <= 100:
            raise ValueError(f"reversion must lie in [0, 100], got {self.reversion}")

    # AlphaSigmaPath

    def alpha(self, t: Tensor) -> Tensor:
        return torch.exp(-self.reversion * t)

    def sigma(self, t: Tensor) -> Tensor:
        return self.diffusion * (self.alpha(t) * self._sinh(t)).sqrt()

    def alpha_rate(self, t: Tensor) -> Tensor:
        return -self.reversion * self.alpha(t)

    def sigma_rate(self, t: Tensor) -> Tensor:
        # sigma sigma' = diffusion^2 alpha^2 / 2 is finite at 0, sigma' is not
        half = 0.5 * (self.diffusion * self.alpha(t)).square()
        return half / self.sigma(t).clamp(min=1 / CEILING)

    def sde(self, t: Tensor, **cond: Any) -> tuple[Scalar, Scalar]:
        """(-a, sigma)."""
        return (
            Scalar(torch.full_like(t, -self.reversion)),
            Scalar(torch.full_like(t, self.diffusion)),
        )

    def source(self, like: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """Where the process ends that starts at ``like``: a draw of q(x_1 | x_0)."""
        return self.transition(like, 0 * ONE, ONE, noise)

    def sample(
        self, x0: Tensor, t: Tensor, noise: Noise, x1: Tensor | None = None, **cond: Any
    ) -> Draw:
        """A draw of the bridge at ``t`` from x0 to x1; x1 is drawn from q(x_1 | x_0) by default.

        Its targets are "clean", x_0; "score", that of q(x_t | x_0), and "noise", -sigma(t) score;
        and "drift", the backward drift -a x - sigma^2 score.
        """
        if not x0.is_floating_point():
            raise TypeError(f"x0 must be floating, got {x0.dtype}")
        x1 = self.source(x0, noise) if x1 is None else x1
        if x1.shape != x0.shape:
            raise ValueError(f"x1 has shape {tuple(x1.shape)}, x0 {tuple(x0.shape)}")
        rho, _ = self._correlation(ONE, t)
        end = self.source_level.solve(x1 - Scalar(self.alpha(ONE)) @ x0)
        z = noise.normal(x0, "bridge")
        eps = Scalar(rho) @ end + Scalar((1 - rho.square()).clamp(min=0).sqrt()) @ z
        draw = super().sample(x0, t, noise, self.source_level @ eps)

        def target(kind: str) -> Tensor:
            match kind:
                case "velocity":  # not that of the base class, in which x_1 is noise
                    raise ValueError(
                        "a bridge has targets 'clean', 'noise', 'score' and 'drift', got "
                        "'velocity': the velocity of its flow is the mean of the drifts of two "
                        "directions"
                    )
                case "drift":
                    score = cast(Tensor, draw.target("score"))
                    return self.drift(cast(Tensor, draw.x), score)
            return cast(Tensor, draw.target(kind))

        return replace(draw, x1=x1, target=target)

    # Bridges

    def drift(self, x: Tensor, score: Tensor) -> Tensor:
        """-a x - sigma^2 score: the backward drift that a score of q(x_t | x_0) stands for."""
        return -self.reversion * x - self.diffusion**2 * score

    def score(self, x: Tensor, drift: Tensor) -> Tensor:
        """The inverse of `drift`."""
        return -(drift + self.reversion * x) / self.diffusion**2

    def weights(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(w_0, w_1, v): x_t = w_0 x_0 + w_1 x_1 + sqrt(v) z on the bridge; shaped as ``t``."""
        ahead, behind, whole = self._sinh(1 - t), self._sinh(t), self._sinh(ONE.to(t))
        return ahead / whole, behind / whole, self.diffusion**2 * behind * ahead / whole

    def weight_rates(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The derivatives of `weights`."""
        ahead, behind, whole = self._sinh(1 - t), self._sinh(t), self._sinh(ONE.to(t))
        down, up = torch.cosh(self.reversion * (1 - t)), torch.cosh(self.reversion * t)
        variance = self.diffusion**2 * (up * ahead - behind * down) / whole
        return -down / whole, up / whole, variance

    @property
    def regularisation(self) -> float:
        """sigma^2 S(1): with it as the weight of the entropy, and the cost |x_0 - x_1|^2 / 2,
        entropic optimal transport has the coupling of the bridge. A solver for the cost |x_0 -
        x_1|^2 takes twice as much."""
        return self.diffusion**2 * float(self._sinh(ONE))

    def _sinh(self, u: Tensor) -> Tensor:
        """S(u)."""
        return torch.sinh(self.reversion * u) / self.reversion if self.reversion else u
