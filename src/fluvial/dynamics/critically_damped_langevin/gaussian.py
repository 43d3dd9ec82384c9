"""Gaussian data: the score in closed form, and the exact law that any sampler ends with.

With the exact score of data N(0, std^2) a step of a sampler is an affine map, U <- B U + R z, whose
matrices are found by carrying unit states and unit noise through the sampler itself. The covariance
then follows P <- B P B^T + R R^T from the source on, and nothing is estimated.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluvial.core.gaussian.linear import OrnsteinUhlenbeck
from fluvial.core.protocols import Run, Sampler, Steering
from fluvial.core.scales import Block
from fluvial.core.time import check_pairs
from fluvial.dynamics.critically_damped_langevin.path import CriticallyDamped

MOST_DRAWS = 4
"""Draws of a step, at most."""


@dataclass(frozen=True)
class GaussianScore:
    """-P_t^-1 U, P_t = M diag(std^2, v0) M^T + S: the score of positions N(0, std^2 I).

    Args:
        path: whose ``v0`` is the variance of the momentum of the data.
        std: standard deviation of the positions, > 0.
    """

    path: CriticallyDamped
    std: float
    predicts: str = "score"

    def __post_init__(self) -> None:
        if not 0 < self.std < math.inf:
            raise ValueError(f"std must be positive and finite, got {self.std}")

    @functools.cached_property
    def _process(self) -> OrnsteinUhlenbeck:
        data = Block(np.diag([self.std**2, self.path.v0]))
        return replace(self.path.process, initial=data)

    def cov(self, t: Tensor) -> Block:
        """P_t."""
        cov: Block = self._process.moments(t)[1]
        return cov

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return -self.cov(t).solve(x)


def gaussian_law(
    path: CriticallyDamped, std: float, sampler: Sampler, pairs: Tensor, start: Tensor | None = None
) -> Tensor:
    """Covariance of (position, momentum) at the end of a simulation with the exact score.

    Args:
        path: of the process.
        std: standard deviation of the data's positions.
        sampler: without memory, linear in state and noise: those here and in
            `fluvial.core.gaussian`.
        pairs: (K, 2), as for `fluvial.core.simulate.simulate`.
        start: covariance at ``pairs[0, 0]``, S_inf by default.

    Returns:
        (2, 2) float64.

    Raises:
        ValueError: the sampler has a memory, or draws more than 4 times a step.
    """
    check_pairs(pairs)
    score = GaussianScore(path, std)
    cov = path.stationary.matrix if start is None else start.double()
    states = torch.zeros(2 + 2 * MOST_DRAWS, 2, 1, dtype=torch.float64)
    states[:2, :, 0] = torch.eye(2)
    if sampler.start(states) is not None:
        raise ValueError(f"{type(sampler).__name__} has a memory: its steps are no affine maps")
    times = torch.cat([pairs[:1, 0], pairs[:, 1]]).double().unbind()
    for k, (t, s) in enumerate(pairwise(times)):
        run = Run(path, score, _Impulses(), k, t, s, {}, Steering(), {}, False)
        moved: Any = sampler.step(states, None, run)[0]
        columns = moved[:, :, 0].mT
        step, spread = columns[:, :2], columns[:, 2:]
        cov = step @ cov @ step.mT + spread @ spread.mT
    return cov


def gaussian_w2(
    path: CriticallyDamped,
    std: float,
    sampler: Sampler,
    pairs: Tensor,
    *,
    dim: int = 1,
    start: Tensor | None = None,
) -> float:
    """The Wasserstein-2 distance of the positions to the data, |sqrt(P_xx) - std| sqrt(dim).

    Args:
        path, std, sampler, pairs, start: as for `gaussian_law`.
        dim: number of coordinates.
    """
    end = gaussian_law(path, std, sampler, pairs, start)
    return abs(math.sqrt(float(end[0, 0])) - std) * math.sqrt(dim)


@dataclass
class _Impulses:
    """Noise whose k-th tag is 1 in rows 2 + 2 k (position) and 3 + 2 k (momentum), else 0."""

    tags: list[str] = field(default_factory=list)

    def normal(self, like: Tensor, tag: str = "") -> Tensor:
        if tag not in self.tags:
            self.tags.append(tag)
        row = 2 + 2 * self.tags.index(tag)
        if row >= len(like):
            raise ValueError(f"the law of a step with more than {MOST_DRAWS} draws is not followed")
        draw = torch.zeros_like(like)
        draw[row, 0] = draw[row + 1, 1] = 1.0
        return draw

    def uniform(self, like: Tensor, tag: str = "") -> Tensor:
        raise ValueError("the law of a step that draws uniforms is not followed")

    def categorical(self, probs: Tensor, tag: str = "") -> Tensor:
        raise ValueError("the law of a step that draws classes is not followed")

    def at(self, step: int) -> _Impulses:
        return self

    def rows(self, ids: Tensor) -> _Impulses:
        return self
