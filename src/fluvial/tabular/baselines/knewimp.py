"""KnewImp: gaps moved up the learned density of the table, by a flow in a kernel's space."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.noise import KeyedNoise
from fluvial.networks.layers import initialise, linear
from fluvial.tabular.baselines.learned import Learned
from fluvial.tabular.seeds import mixed


class KnewImp(Learned):
    r"""Kernelized negative entropy-regularised Wasserstein gradient flow imputation.

    In turn, an energy is fitted to the filled table by denoising score matching, and the gaps are
    moved, all rows together, along

    .. math:: u(x_i) = \frac1n \sum_j k(x_i, x_j)\, s(x_j) - \lambda \nabla_{x_j} k(x_i, x_j)

    in which the entropy has the other sign than in sampling: the filled values are to be likely and
    not diverse. k is Gaussian.

    `fit_transform` gives the table that was fitted. New rows are moved among its rows by its last
    energy.

    Args:
        rounds: turns (paper's code: 2).
        epochs: of the energy in each turn, all rows at a time (200).
        steps: of the gaps in each turn (500).
        bandwidth: of the kernel, in deviations of the columns (0.5).
        entropy: lambda (10).
        noise: deviation of what the energy is fitted to take away (0.1).
        lr: of Adam for the gaps (0.1).
        particles: rows j of the sum, at most, drawn anew for every step; it bounds the kernel.
        random_state: seed.

    Citation: Chen et al., Rethinking the diffusion models for missing data imputation: a gradient
    flow perspective, NeurIPS 2024.
    """

    counts = ("rounds", "epochs", "steps", "particles")
    positive = ("bandwidth", "noise", "lr")
    weights = ("entropy",)

    def __init__(
        self,
        rounds: int = 2,
        epochs: int = 200,
        steps: int = 500,
        bandwidth: float = 0.5,
        entropy: float = 10.0,
        noise: float = 0.1,
        lr: float = 0.1,
        particles: int = 500,
        random_state: Any = None,
    ) -> None:
        self.rounds = rounds
        self.epochs = epochs
        self.steps = steps
        self.bandwidth = bandwidth
        self.entropy = entropy
        self.noise = noise
        self.lr = lr
        self.particles = particles
        self.random_state = random_state

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Learn the gaps of X, and fill them."""
        x, _, _ = self._fit(X)
        return self._back(x, self.filled_)

    def _learn(self, z: Tensor, m: Tensor, noise: KeyedNoise) -> None:
        self.net_ = _Energy(z.shape[1], mixed(self.seed_, 0))
        x = _started(z, m, noise)
        mover = torch.optim.Adam([x], lr=self.lr)
        for turn in range(self.rounds):
            drawn = noise.at(turn)
            learner = torch.optim.Adam(self.net_.parameters(), lr=1e-3, fused=True)
            for epoch in range(self.epochs):
                e = drawn.at(epoch).normal(x, "noise")
                score = self.net_.score(x.detach() + self.noise * e, train=True)
                loss = 0.5 * (score + e / self.noise).square().sum(1).mean()
                learner.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.net_.parameters(), 100.0)
                learner.step()
            self._move(x, m, None, mover, drawn.at(self.epochs))
        self.filled_ = x.detach()

    def _fill(self, z: Tensor, m: Tensor, noise: KeyedNoise) -> Tensor:
        x = _started(z, m, noise)
        self._move(x, m, self.filled_, torch.optim.Adam([x], lr=self.lr), noise)
        return x

    def _move(
        self,
        x: Tensor,
        m: Tensor,
        others: Tensor | None,
        optimizer: torch.optim.Optimizer,
        noise: KeyedNoise,
    ) -> None:
        """x by so many steps, in place."""
        width = self.bandwidth**2
        like = torch.empty(len(x) if others is None else len(others), dtype=torch.float64)
        for step in range(self.steps):
            y = x.detach() if others is None else others
            if len(y) > self.particles:
                y = y[noise.at(step).uniform(like, "particles").argsort()[: self.particles]]
            k = torch.exp(-torch.cdist(x.detach(), y).square() / (2 * width))
            pull = (x.detach() * k.sum(1, keepdim=True) - k @ y) / width
            flow = (k @ self.net_.score(y) - self.entropy * pull) / len(y)
            if not flow.isfinite().all():
                break
            x.grad = torch.where(m, torch.zeros_like(flow), -flow)
            optimizer.step()


def _started(z: Tensor, m: Tensor, noise: KeyedNoise) -> Tensor:
    return torch.where(m, z, 0.1 * noise.normal(z, "start"))


class _Energy(nn.Module):
    """Two hidden layers of 128 with SiLU; one number for every row."""

    def __init__(self, columns: int, seed: int) -> None:
        super().__init__()
        self.first, self.second, self.out = linear(columns, 128), linear(128, 128), linear(128, 1)
        initialise(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.out(functional.silu(self.second(functional.silu(self.first(x)))))
        return value

    def score(self, x: Tensor, train: bool = False) -> Tensor:
        """Minus the gradient."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=train)
        return -slope
