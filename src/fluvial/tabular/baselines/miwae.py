"""MIWAE: a deep latent variable model, fitted to and conditioned on what is observed."""

from __future__ import annotations

from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn
from torch.distributions import StudentT
from torch.nn import functional

from fluvial.core.noise import KeyedNoise
from fluvial.networks.layers import initialise, linear
from fluvial.tabular.baselines.learned import Learned, batches, update
from fluvial.tabular.seeds import mixed

BLOCK = 1 << 15
"""Latent draws that are decoded at a time, at most."""


class MIWAE(Learned):
    r"""The missing data importance-weighted autoencoder.

    Rows come from z ~ N(0, I) by independent Student laws whose parameters a network gives; another
    network gives q(z | x_obs), from x with zeros in its gaps. Both maximise the bound

    .. math:: E \log \frac1K \sum_k \frac{p(x_{obs} \mid z_k)\, p(z_k)}{q(z_k \mid x_{obs})}.

    Gaps are drawn by importance resampling: of so many z ~ q one is chosen by its weight, and x_mis
    is drawn given it. The mean of many draws is the paper's single imputation.

    Args:
        latent: numbers of z (paper: 10).
        hidden: units of the two hidden layers of each network (paper: 128).
        samples: K (paper: 20).
        importance: draws of z for every row that is filled (paper: 10,000).
        steps: of Adam (paper: 2,000 epochs).
        batch_size: rows a step (paper: 64).
        lr: of Adam (1e-3).
        random_state: seed.

    Citation: Mattei and Frellsen, ICML 2019.
    """

    counts = ("latent", "hidden", "samples", "importance", "steps", "batch_size")
    positive = ("lr",)

    def __init__(
        self,
        latent: int = 10,
        hidden: int = 128,
        samples: int = 20,
        importance: int = 500,
        steps: int = 2_000,
        batch_size: int = 64,
        lr: float = 1e-3,
        random_state: Any = None,
    ) -> None:
        self.latent = latent
        self.hidden = hidden
        self.samples = samples
        self.importance = importance
        self.steps = steps
        self.batch_size = batch_size
        self.lr = lr
        self.random_state = random_state

    def _learn(self, z: Tensor, m: Tensor, noise: KeyedNoise) -> None:
        d = z.shape[1]
        self.encoder_ = _Layers(d, self.hidden, 2 * self.latent, mixed(self.seed_, 0))
        self.decoder_ = _Layers(self.latent, self.hidden, 3 * d, mixed(self.seed_, 1))
        weights = [*self.encoder_.parameters(), *self.decoder_.parameters()]
        optimizer = torch.optim.Adam(weights, lr=self.lr, fused=True)

        def draw(noise: KeyedNoise) -> tuple[Tensor, ...]:
            return (noise.normal(z.new_empty(len(z), self.samples, self.latent), "latent"),)

        for rows, e in batches(noise, len(z), self.batch_size, self.steps, draw):
            _, ratio = self._weighed(z[rows], m[rows], e)
            update(optimizer, -ratio.logsumexp(1).mean())

    def _fill(self, z: Tensor, m: Tensor, noise: KeyedNoise) -> Tensor:
        parts = []
        for rows in torch.arange(len(z)).split(max(1, BLOCK // self.importance)):
            drawn = noise.rows(rows)
            e = drawn.normal(z.new_empty(len(rows), self.importance, self.latent), "latent")
            latent, ratio = self._weighed(z[rows], m[rows], e)
            chosen = drawn.categorical((ratio - ratio.amax(1, keepdim=True)).exp(), "chosen")
            law = self._law(latent[torch.arange(len(rows)), chosen])
            u = drawn.uniform(z[rows].double(), "draw").clamp(1e-9, 1 - 1e-9)
            t = torch.from_numpy(stats.t.ppf(u.numpy(), law.df.double().numpy()))
            parts.append((law.loc + law.scale * t).to(z))
        return torch.cat(parts)

    def _weighed(self, x: Tensor, m: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        """(z, log p(x_obs | z) p(z) / q(z | x_obs)): so many draws of z for every row."""
        mean, spread = self.encoder_(x).chunk(2, 1)
        scale = functional.softplus(spread) + 1e-3
        z = mean[:, None] + scale[:, None] * e
        inside = self._law(z).log_prob(x[:, None])
        seen = torch.where(m[:, None], inside, torch.zeros_like(inside)).sum(-1)
        # log p(z) - log q(z): the constants of the two Gaussians cancel
        return z, seen + (0.5 * (e.square() - z.square()) + scale[:, None].log()).sum(-1)

    def _law(self, z: Tensor) -> StudentT:
        """Of every entry given z; degrees of freedom above 3, as the paper's code has it."""
        loc, scale, df = self.decoder_(z).chunk(3, -1)
        scale, df = functional.softplus(scale) + 1e-3, functional.softplus(df) + 3
        return StudentT(df, loc, scale, validate_args=False)


class _Layers(nn.Module):
    """Two hidden layers with ReLU."""

    def __init__(self, inputs: int, hidden: int, outputs: int, seed: int) -> None:
        super().__init__()
        self.first, self.second = linear(inputs, hidden), linear(hidden, hidden)
        self.out = linear(hidden, outputs)
        initialise(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.out(functional.relu(self.second(functional.relu(self.first(x)))))
        return value
