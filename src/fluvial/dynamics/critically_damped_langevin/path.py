"""The forward process: position and momentum, critically damped, with noise on both."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import special
from torch import Tensor

from fluvial.core.gaussian.linear import Clock, LinearClock, LinearSDE
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


class CriticalKernel:
    """dU = A U dtau + Q^(1/2) dW in two dimensions, where A has the double eigenvalue -a.

    N = A + a has N^2 = 0, so exp(A tau) = exp(-a tau) (1 + tau N), and the covariance integrates
    exp(-2 a s) times a polynomial of degree two in s. With z = 2 a tau and P the regularised
    incomplete gamma function,

        C = Q P(1, z) / 2a + (N Q + Q N^T) P(2, z) / (2a)^2 + 2 N Q N^T P(3, z) / (2a)^3,

    where P(2, z) = P(3, z) + z^2 exp(-z) / 2 and P(1, z) = P(2, z) + z exp(-z): no digits are lost
    where tau is small.

    Args:
        drift: A, (2, 2) float64.
        noise: Q, (2, 2) float64, symmetric.
        initial: covariance at tau = 0, (2, 2); 0 by default.
    """

    def __init__(
        self, drift: np.ndarray, noise: np.ndarray, initial: np.ndarray | None = None
    ) -> None:
        self.drift, self.noise = drift, noise
        self.a = -0.5 * float(drift.trace())
        self.turn = drift + self.a * np.eye(2)
        first, second, third = self._carried(noise) / (2 * self.a) ** np.arange(1, 4)[:, None]
        third = 2 * third
        self.stationary = (first + second + third).reshape(2, 2)
        """The covariance that stays, (2, 2)."""
        # flow and covariance in the functions of tau below
        self._weights = np.zeros((6, 8))
        self._weights[:2, :4] = np.stack([np.eye(2), self.turn]).reshape(2, 4)
        self._weights[2, 4:] = first + second + third
        self._weights[4, 4:] = 2 * self.a * first
        self._weights[5, 4:] = 2 * self.a**2 * (first + second)
        if initial is not None:
            self._weights[3:, 4:] += self._carried(initial)

    def _carried(self, cov: np.ndarray) -> np.ndarray:
        """Coefficients of 1, tau and tau^2 in (1 + tau N) cov (1 + tau N)^T, (3, 4)."""
        once = self.turn @ cov
        return np.stack([cov, once + once.T, once @ self.turn.T]).reshape(3, 4)

    def __call__(self, tau: Tensor) -> tuple[Block, Block]:
        """(exp(A tau), the covariance after tau)."""
        if tau.ndim == 0 and tau.device.type == "cpu":  # numbers, for a step of a sampler
            terms = self._functions(float(tau), math.exp, lambda z: special.gammainc(3.0, z))
            flow, cov = (np.array(terms) @ self._weights).reshape(2, 2, 2)
            return Block(flow), Block(cov)
        three = torch.tensor(3.0, dtype=tau.dtype, device=tau.device)
        terms = self._functions(tau, torch.exp, lambda z: torch.special.gammainc(three, z))
        both = torch.stack(terms, -1) @ torch.from_numpy(self._weights).to(tau.device)
        flows, covs = both.unflatten(-1, (2, 2, 2)).unbind(-3)
        return Block(flows), Block(covs)

    def _functions(self, tau: Any, exp: Any, third: Any) -> list[Any]:
        """exp(-a tau) times 1 and tau, P(3, z), exp(-z) times 1, tau and tau^2."""
        root = exp(-self.a * tau)
        decay = root * root
        once = decay * tau
        return [root, root * tau, third(2 * self.a * tau), decay, once, once * tau]


@dataclass(frozen=True)
class CriticallyDamped(LinearSDE):
    """dU = beta A U dt + sqrt(beta) diag(epsilon, sigma) dW, A = [[0, a^2], [-1, -2 a]].

    U is position and momentum, a state (batch, 2, *event); the paper calls the momentum velocity. A
    has the double eigenvalue -a, `CriticalKernel` has the closed forms, and what stays is

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
        for name in ("epsilon", "v0"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")

    @functools.cached_property
    def process(self) -> CriticalKernel:
        """The process in tau."""
        drift = np.array([[0.0, self.a**2], [-1.0, -2 * self.a]])
        return CriticalKernel(drift, np.diag([self.epsilon**2, self.sigma**2]))

    def started(self, initial: np.ndarray) -> CriticalKernel:
        """The process in tau, from a covariance (2, 2) at t = 0 on."""
        return CriticalKernel(self.process.drift, self.process.noise, initial)

    @functools.cached_property
    def reverse(self) -> CriticalKernel:
        """The time reversal of the stationary process: drift -A - Q S^-1, as damped as A."""
        pull = self.process.noise @ np.linalg.inv(self.process.stationary)
        return CriticalKernel(-self.process.drift - pull, self.process.noise)

    @property
    def stationary(self) -> Block:
        """S."""
        return Block(self.process.stationary)

    @functools.cached_property
    def _hybrid(self) -> CriticalKernel:
        return self.started(np.diag([0.0, self.v0]))

    @functools.cached_property
    def _coefficients(self) -> tuple[Block, Block]:
        """A and diag(epsilon, sigma)."""
        return Block(self.process.drift), Block(np.diag([self.epsilon, self.sigma]))

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
        return self.process(self.tau(t) - self.tau(s))

    def moments(self, t: Tensor, **cond: Any) -> tuple[Block, Block]:
        return self._hybrid(self.tau(t))

    def sde(self, t: Tensor, **cond: Any) -> tuple[Block, Block]:
        beta: Any = self.clock.rate(t.double())
        if beta.ndim == 0 and beta.device.type == "cpu":
            beta = float(beta)
        drift, spread = self._coefficients
        return beta * drift, beta**0.5 * spread

    # Path

    def source(self, like: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """x_1 ~ N(0, S), shaped as ``like``, (batch, 2, *event)."""
        return self.stationary.cholesky() @ noise.normal(like, "source")

    def readout(self, x: Tensor, clean: Any) -> Tensor:
        """The positions."""
        return x[:, 0]
