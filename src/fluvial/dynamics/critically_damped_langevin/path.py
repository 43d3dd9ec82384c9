"""The forward process: position and momentum, critically damped, with noise on both."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluvial.core.gaussian.linear import Clock, LinearClock, LinearSDE, OrnsteinUhlenbeck
from fluvial.core.protocols import Noise
from fluvial.core.scales import Block

NODES, WEIGHTS = (torch.from_numpy(part) for part in np.polynomial.legendre.leggauss(32))


@dataclass(frozen=True)
class SpeedClock:
    """The user's beta; tau by Gauss and Legendre's rule with 32 nodes.

    The integral is exact where beta is a polynomial of degree 63 or less, and to rounding where it
    is smooth.

    Args:
        beta_of: > 0, an elementwise function of a tensor of times.

    Raises:
        ValueError: beta is not positive and finite on [0, 1], or no elementwise function.
    """

    beta_of: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        times = torch.linspace(0, 1, 101, dtype=torch.float64)
        beta = self.beta_of(times)
        if getattr(beta, "shape", None) != times.shape or not bool(
            (beta.isfinite() & (beta > 0)).all()
        ):
            raise ValueError(f"beta_of must map (n,) times to (n,) positive numbers, got {beta}")

    def __call__(self, t: Tensor) -> Tensor:
        nodes, weights = NODES.to(t), WEIGHTS.to(t)
        return 0.5 * t * (self.rate(0.5 * t[..., None] * (nodes + 1)) @ weights)

    def rate(self, t: Tensor) -> Tensor:
        return self.beta_of(t)


@dataclass(frozen=True)
class CriticallyDamped(LinearSDE):
    """dU = beta A U dt + sqrt(beta) diag(epsilon, sigma) dW, A = [[0, a^2], [-1, -2 a]].

    U is position and momentum, a state (batch, 2, *event); the paper calls the momentum velocity. A
    has the double eigenvalue -a, `OrnsteinUhlenbeck` has the moments, and what stays is

        S = [[(5 epsilon^2 + a^2 sigma^2) / 4a, -epsilon^2 / 2a^2],
             [.,                (epsilon^2 + a^2 sigma^2) / 4a^3]].

    ``epsilon = 0`` is the process of Dockhorn et al. (ICLR 2022), with their values at the
    defaults: all noise enters by the momentum, and the variance of a position begins as tau^3.

    Data are positions. The clean end of the path is (position, 0): the momentum of the data, drawn
    from N(0, v0), is part of the noise, whose covariance begins as diag(0, v0). So the path's
    conditional law is that of hybrid score matching. With ``v0 = 0`` the clean end is (position,
    momentum), and the law is that of denoising score matching.

    Args:
        a: > 0. The process forgets its start as exp(-a tau(1)).
        epsilon: >= 0, noise on the position.
        sigma: > 0, noise on the momentum.
        clock: tau and beta, the speed of the process. The published ones are constant.
        v0: >= 0, the variance of the momentum at t = 0.

    Raises:
        TypeError: ``clock`` is no clock.
        ValueError: a value is out of its range.

    Citation: Strasman et al., NeurIPS 2025, arXiv 2511.02419; Dockhorn, Vahdat and Kreis, ICLR
    2022, arXiv 2112.07068.
    """

    a: float = 2.0
    epsilon: float = 0.0
    sigma: float = math.sqrt(2)
    clock: Clock = LinearClock(4.0)
    v0: float = 0.01

    def __post_init__(self) -> None:
        for name in ("a", "sigma"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not (callable(self.clock) and hasattr(self.clock, "rate")):
            raise TypeError(
                "clock must give tau(t) and its rate, such as LinearClock(4.0) or "
                f"SpeedClock(beta), got {self.clock!r}"
            )
        for name in ("epsilon", "v0"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")

    @functools.cached_property
    def process(self) -> OrnsteinUhlenbeck:
        """A, Q = diag(epsilon, sigma)^2 and the clock."""
        drift = Block(np.array([[0.0, self.a**2], [-1.0, -2 * self.a]]))
        noise = Block(np.diag([self.epsilon**2, self.sigma**2]))
        return OrnsteinUhlenbeck(drift, noise, self.clock, self.initial)

    @functools.cached_property
    def stationary(self) -> Block:
        """S."""
        return self.process.stationary()

    @functools.cached_property
    def reverse(self) -> OrnsteinUhlenbeck:
        """The time reversal of the stationary process: drift -A - Q S^-1, as damped as A."""
        drift, noise = self.process.drift, self.process.noise
        pull = noise @ self.stationary.inverse()
        return OrnsteinUhlenbeck(-1 * drift - pull, noise, self.clock)

    def tau(self, t: Tensor) -> Tensor:
        """The integral of beta from 0 to t, float64."""
        return self.clock(t.double())

    def state(self, position: Tensor, momentum: Tensor | None = None) -> Tensor:
        """(batch, 2, *event) of positions (batch, *event); the momentum is 0 by default."""
        momentum = torch.zeros_like(position) if momentum is None else momentum
        return torch.stack([position, momentum], 1)

    # LinearSDE

    @property
    def initial(self) -> Block | None:
        """diag(0, v0)."""
        return Block(np.diag([0.0, self.v0])) if self.v0 else None

    def kernel(self, s: Tensor, t: Tensor, **cond: Any) -> tuple[Block, Block]:
        return self.process.kernel(s, t)

    def moments(self, t: Tensor, **cond: Any) -> tuple[Block, Block]:
        return self.process.moments(t)

    def sde(self, t: Tensor, **cond: Any) -> tuple[Block, Block]:
        return self.process.sde(t)

    # Path

    def source(self, like: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """x_1 ~ N(0, S), shaped as ``like``, (batch, 2, *event)."""
        return self.stationary.cholesky() @ noise.normal(like, "source")

    def readout(self, x: Tensor, clean: Any) -> Tensor:
        """The positions."""
        return x[:, 0]
