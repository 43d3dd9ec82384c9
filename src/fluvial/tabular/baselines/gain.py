"""GAIN: a generator and a discriminator that looks for what was missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.noise import KeyedNoise
from fluvial.networks.layers import initialise, linear
from fluvial.tabular.baselines.learned import Learned, batches, update
from fluvial.tabular.seeds import mixed


class GAIN(Learned):
    """Generative adversarial imputation nets.

    A generator fills the gaps from what is observed, the mask and noise; a discriminator tells for
    every entry whether it was observed, with a hint that shows it most of the mask. The generator's
    loss adds ``weight`` times its error on observed entries. Columns are scaled to [0, 1] by their
    observed range. Networks, noise, hint and losses are those of the paper's code: two hidden
    layers as wide as the table, ReLU, noise U(0, 0.01).

    Args:
        steps: of each network (paper's code: 10,000).
        batch_size: rows a step (128).
        weight: alpha (100).
        hint: chance that the hint shows an entry of the mask (0.9).
        lr: of Adam (1e-3).
        random_state: seed.

    Citation: Yoon, Jordon and van der Schaar, ICML 2018.
    """

    counts = ("steps", "batch_size")
    positive = ("lr",)
    shares = ("hint",)
    weights = ("weight",)

    def __init__(
        self,
        steps: int = 2_000,
        batch_size: int = 128,
        weight: float = 100.0,
        hint: float = 0.9,
        lr: float = 1e-3,
        random_state: Any = None,
    ) -> None:
        self.steps = steps
        self.batch_size = batch_size
        self.weight = weight
        self.hint = hint
        self.lr = lr
        self.random_state = random_state

    def _units(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        low = np.nanmin(x, 0)
        return low, np.nanmax(x, 0) - low

    def _learn(self, z: Tensor, m: Tensor, noise: KeyedNoise) -> None:
        m = m.to(z)
        d = z.shape[1]
        self.net_ = _Perceptron(d, mixed(self.seed_, 0))
        judge = _Perceptron(d, mixed(self.seed_, 1))
        optimizers = [
            torch.optim.Adam(net.parameters(), lr=self.lr, fused=True) for net in (self.net_, judge)
        ]

        def draw(noise: KeyedNoise) -> tuple[Tensor, ...]:
            return noise.uniform(z, "noise"), noise.uniform(z, "hint")

        parts = batches(noise, len(z), self.batch_size, self.steps, draw)
        for rows, fuzz, hint in parts:
            x1, m1 = z[rows], m[rows]
            made = self.net_(torch.where(m1 > 0, x1, 0.01 * fuzz), m1)
            filled = torch.where(m1 > 0, x1, made)
            shown = (hint < self.hint).to(x1) * m1
            told = judge(filled.detach(), shown)
            update(optimizers[1], functional.binary_cross_entropy(told, m1))
            told = judge(filled, shown)
            fooled = -((1 - m1) * (told + 1e-8).log()).mean()
            error = (m1 * (x1 - made).square()).mean() / m1.mean()
            update(optimizers[0], fooled + self.weight * error)

    def _fill(self, z: Tensor, m: Tensor, noise: KeyedNoise) -> Tensor:
        made: Tensor = self.net_(torch.where(m, z, 0.01 * noise.uniform(z, "noise")), m.to(z))
        return made


class _Perceptron(nn.Module):
    """Two hidden layers as wide as the table; a number in (0, 1) for every entry."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.first, self.second = linear(2 * width, width), linear(width, width)
        self.out = linear(width, width)
        initialise(self, seed)

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        hidden = functional.relu(self.first(torch.cat([x, m], 1)))
        value: Tensor = self.out(functional.relu(self.second(hidden))).sigmoid()
        return value
