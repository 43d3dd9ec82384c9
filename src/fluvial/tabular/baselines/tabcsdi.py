"""TabCSDI: a diffusion model of the missing entries given the observed ones."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.noise import KeyedNoise
from fluvial.networks.layers import attend, initialise, layer_norm, linear
from fluvial.tabular.baselines.learned import Learned, batches, update
from fluvial.tabular.seeds import mixed

BLOCK = 1 << 14
"""Entries that are filled at a time, at most."""


class TabCSDI(Learned):
    r"""Conditional score-based diffusion of tables.

    In training the observed entries of each row are split at random into those that are shown and
    those to be foretold, in a share that is drawn too; noise is added to the latter, at one of T
    levels, and the network tells it. Gaps are drawn by T ancestral steps with all observed entries
    shown. Every entry is a token: gated residual blocks with attention over the columns, told the
    column, whether it is shown, and the level. The variances rise as
    :math:`\beta_i = (\sqrt{10^{-4}} + \dots \sqrt{0.5})^2`.

    Two things are not the paper's. Tokens know their column at once, and not from the first gate
    on, after which attention can tell columns apart. And the network does not tell the noise but
    :math:`v = \sqrt{\bar\alpha}\, \epsilon - \sqrt{1 - \bar\alpha}\, x`, from which the noise
    follows. An error of the noise is enlarged :math:`1/\sqrt{\bar\alpha}` times on the way to x,
    and in some hundred steps the paper's form ended far outside of the table.

    Args:
        levels: T (paper's code: 150; CSDI: 50).
        width: channels of a token (paper: 64).
        blocks: of the network (4).
        heads: of attention (2).
        steps: of Adam (500 epochs of batches of 8).
        batch_size: rows a step.
        lr: of Adam (5e-4); a tenth after three quarters of the steps, a hundredth after nine
            tenths, as in CSDI.
        random_state: seed.

    Citation: Zheng and Charoenphakdee, Diffusion models for missing value imputation in tabular
    data, 2022, arXiv:2210.17128; Tashiro et al. (CSDI), NeurIPS 2021.
    """

    counts = ("levels", "width", "blocks", "heads", "steps", "batch_size")
    positive = ("lr",)

    def __init__(
        self,
        levels: int = 50,
        width: int = 64,
        blocks: int = 4,
        heads: int = 2,
        steps: int = 4_000,
        batch_size: int = 64,
        lr: float = 5e-4,
        random_state: Any = None,
    ) -> None:
        self.levels = levels
        self.width = width
        self.blocks = blocks
        self.heads = heads
        self.steps = steps
        self.batch_size = batch_size
        self.lr = lr
        self.random_state = random_state

    def _check(self) -> None:
        super()._check()
        if self.width % self.heads:
            raise ValueError(f"heads must divide width {self.width}, got {self.heads}")

    def _learn(self, z: Tensor, m: Tensor, noise: KeyedNoise) -> None:
        self.net_ = _Tokens(
            z.shape[1], self.width, self.blocks, self.heads, self.levels, mixed(self.seed_, 0)
        )
        _, kept = self._variances()
        optimizer = torch.optim.Adam(
            self.net_.parameters(), lr=self.lr, weight_decay=1e-6, fused=True
        )
        milestones = [round(0.75 * self.steps), round(0.9 * self.steps)]
        rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones)

        def draw(noise: KeyedNoise) -> tuple[Tensor, ...]:
            shown = m & (noise.uniform(z, "shown") >= noise.uniform(z[:, :1], "share"))
            level = (noise.uniform(z[:, 0].double(), "level") * self.levels).long()
            return shown, level, noise.normal(z, "noise")

        for rows, shown, level, e in batches(noise, len(z), self.batch_size, self.steps, draw):
            x, target = z[rows], m[rows] & ~shown
            keep = kept[level].to(x)[:, None]
            noisy = keep.sqrt() * x + (1 - keep).sqrt() * e
            error = self.net_(noisy, x, shown, level) - (keep.sqrt() * e - (1 - keep).sqrt() * x)
            missed = torch.where(target, error, torch.zeros_like(error))
            update(optimizer, missed.square().sum() / target.sum().clamp(min=1))
            rate.step()

    def _fill(self, z: Tensor, m: Tensor, noise: KeyedNoise) -> Tensor:
        beta, kept = self._variances()
        parts = []
        for rows in torch.arange(len(z)).split(max(1, BLOCK // z.shape[1])):
            drawn, seen, given = noise.rows(rows), m[rows], z[rows]
            x = drawn.at(self.levels).normal(given, "noise")
            for i in reversed(range(self.levels)):
                level = torch.full((len(rows),), i)
                part, keep = float(beta[i]), float(kept[i])
                e = math.sqrt(keep) * self.net_(x, given, seen, level) + math.sqrt(1 - keep) * x
                x = (x - part / math.sqrt(1 - keep) * e) / math.sqrt(1 - part)
                if i:
                    spread = (1 - float(kept[i - 1])) / (1 - keep) * part
                    x = x + math.sqrt(spread) * drawn.at(i).normal(x, "noise")
            parts.append(x)
        return torch.cat(parts)

    def _variances(self) -> tuple[Tensor, Tensor]:
        """(beta, product of 1 - beta), float64."""
        ends = math.sqrt(1e-4), math.sqrt(0.5)
        beta = torch.linspace(*ends, self.levels, dtype=torch.float64).square()
        return beta, (1 - beta).cumprod(0)


class _Tokens(nn.Module):
    """The velocity of every entry, (n, d), from (noisy, given, shown, level)."""

    def __init__(
        self, columns: int, width: int, blocks: int, heads: int, levels: int, seed: int
    ) -> None:
        super().__init__()
        self.enter = linear(2 + 17, width)
        self.column = nn.Parameter(torch.empty(columns, 16))
        self.level = nn.Sequential(linear(64, width), nn.SiLU(), linear(width, width), nn.SiLU())
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(blocks))
        self.last, self.out = linear(width, width), linear(width, 1, "zero")
        initialise(self, seed)
        self.column.data = KeyedNoise(seed).normal(self.column, "column")
        steps = torch.arange(levels)[:, None] * 10 ** torch.linspace(0, 4, 32)
        self.register_buffer("waves", torch.cat([steps.sin(), steps.cos()], 1))

    waves: Tensor

    def forward(self, noisy: Tensor, given: Tensor, shown: Tensor, level: Tensor) -> Tensor:
        known = shown.to(noisy)
        pair = torch.stack([given * known, noisy * (1 - known)], -1)
        column = self.column.expand(len(noisy), -1, -1)
        side = torch.cat([column, known[..., None]], -1)
        x = functional.relu(self.enter(torch.cat([pair, side], -1)))
        told = self.level(self.waves[level])[:, None]
        total = torch.zeros_like(x)
        for block in self.blocks:
            x, skip = block(x, side, told)
            total = total + skip
        last = functional.relu(self.last(total / math.sqrt(len(self.blocks))))
        value: Tensor = self.out(last)[..., 0]
        return value


class _Block(nn.Module):
    """Attention over the columns, a gate, and two ways out: onward and to the end."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.level, self.side = linear(width, width), linear(17, 2 * width)
        self.qkv, self.join = linear(width, 3 * width), linear(width, width)
        self.wide, self.narrow = linear(width, 64), linear(64, width)
        self.middle, self.out = linear(width, 2 * width), linear(width, 2 * width)

    def forward(self, x: Tensor, side: Tensor, told: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.level(told)
        attended = attend(self.qkv(y), self.heads)
        y = layer_norm(y + self.join(attended))
        y = layer_norm(y + self.narrow(functional.gelu(self.wide(y))))
        gate, value = (self.middle(y) + self.side(side)).chunk(2, -1)
        onward, skip = self.out(gate.sigmoid() * value.tanh()).chunk(2, -1)
        return (x + onward) / math.sqrt(2), skip
