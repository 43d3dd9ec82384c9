"""TDM: gaps moved until batches of the table are alike, after a map that is learned with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.noise import KeyedNoise
from fluvial.networks.layers import initialise, linear
from fluvial.tabular.baselines.learned import Learned, batches
from fluvial.tabular.seeds import mixed


class TDM(Learned):
    """Transformed distribution matching.

    The gaps are themselves what is learned. Two batches of rows of the filled table go through an
    invertible map, and the cost of transport between them, by the distance and not its square, is
    brought down over the gaps and over the weights of the map together. The map is made of
    affine couplings of two halves of the columns, bounded as in the paper's code; transport between
    batches of one size is a matching, and solved exactly.

    `fit_transform` gives the table that was fitted. New rows start as the paper's do and are
    moved as the paper's are, against that table and with its map as it is.

    Args:
        steps: of RMSprop (paper's code: 10,000).
        batch_size: rows of a batch; at most the largest power of two in half of the rows (512).
        lr: of the gaps and the map (1e-2).
        blocks: couplings of both halves (3).
        wide: units of the two hidden layers of each of their networks, times the columns (2).
        spread: deviation of the noise about the columns' means that the gaps start from (0.1).
        random_state: seed.

    Citation: Zhao, Sun, Dezfouli and Bonilla, ICML 2023.
    """

    least = 2
    counts = ("steps", "batch_size", "blocks", "wide")
    positive = ("lr",)
    weights = ("spread",)

    def __init__(
        self,
        steps: int = 2_000,
        batch_size: int = 128,
        lr: float = 1e-2,
        blocks: int = 3,
        wide: int = 2,
        spread: float = 0.1,
        random_state: Any = None,
    ) -> None:
        self.steps = steps
        self.batch_size = batch_size
        self.lr = lr
        self.blocks = blocks
        self.wide = wide
        self.spread = spread
        self.random_state = random_state

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Learn the gaps of X, and fill them."""
        x, _, _ = self._fit(X)
        return self._back(x, self.filled_)

    def _learn(self, z: Tensor, m: Tensor, noise: KeyedNoise) -> None:
        self.net_ = _Couplings(z.shape[1], self.blocks, self.wide, mixed(self.seed_, 0))
        self.filled_ = self._moved(z, m, None, noise, [*self.net_.parameters()])

    def _fill(self, z: Tensor, m: Tensor, noise: KeyedNoise) -> Tensor:
        if m.all():
            return z
        with torch.enable_grad():
            return self._moved(z, m, self.filled_, noise, [])

    def _moved(
        self,
        z: Tensor,
        m: Tensor,
        others: Tensor | None,
        noise: KeyedNoise,
        weights: list[nn.Parameter],
    ) -> Tensor:
        start = torch.where(m, z, self.spread * noise.normal(z, "start"))
        gaps = start.clone().requires_grad_()
        optimizer = torch.optim.RMSprop([gaps, *weights], lr=self.lr, foreach=True)
        whole = start if others is None else others
        half = max(1, min(len(z), len(whole)) // 2)
        size = min(self.batch_size, 1 << (half.bit_length() - 1))
        parts = (
            batches(noise.at(k), len(one), size, self.steps) for k, one in enumerate((z, whole))
        )
        for (first,), (second,) in zip(*parts, strict=True):
            count = min(len(first), len(second))
            first, second = first[:count], second[:count]
            filled = torch.where(m, z, gaps)
            target = filled if others is None else others
            a, b = self.net_(torch.cat([filled[first], target[second]])).split(count)
            with torch.no_grad():
                costs = torch.cdist(a, b).double().numpy()
            if not np.isfinite(costs).all():  # as the paper's code, it stops there
                break
            pairs = torch.from_numpy(linear_sum_assignment(costs)[1])
            # a row that meets itself has distance 0, and no direction
            apart = (a - b[pairs]).square().sum(1).clamp(min=1e-12).sqrt()
            optimizer.zero_grad()
            apart.mean().backward()
            optimizer.step()
        return torch.where(m, z, gaps).detach()


class _Couplings(nn.Module):
    """x -> (x1 e^s(x2) + t(x2), x2 e^s(y1) + t(y1)), so many times; |s| below 5."""

    def __init__(self, columns: int, blocks: int, wide: int, seed: int) -> None:
        super().__init__()
        self.cut = columns // 2
        rest, hidden = columns - self.cut, wide * columns
        self.nets = nn.ModuleList(
            _Subnet(i, hidden, 2 * o)
            for _ in range(blocks)
            for i, o in ((rest, self.cut), (self.cut, rest))
        )
        initialise(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        one, two = x[:, : self.cut], x[:, self.cut :]
        for k in range(0, len(self.nets), 2):
            one = self._moved(one, self.nets[k](two))
            two = self._moved(two, self.nets[k + 1](one))
        return torch.cat([one, two], 1)

    def _moved(self, x: Tensor, given: Tensor) -> Tensor:
        s, t = given.chunk(2, 1)
        return x * (5 * 0.636 * (s / 5).atan()).exp() + t


class _Subnet(nn.Module):
    """Two hidden layers with SELU."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = linear(inputs, hidden), linear(hidden, hidden)
        self.out = linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.out(functional.selu(self.second(functional.selu(self.first(x)))))
        return value
