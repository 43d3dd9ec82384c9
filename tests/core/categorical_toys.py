"""Two dependent tokens of three classes, whose every conditional law is known by enumeration."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fluvial.core.categorical.losses import discrete_terms, prior_terms
from fluvial.core.categorical.matrices import MatrixPath, TokenPath
from fluvial.core.categorical.paths import marginal_probs
from fluvial.core.categorical.predictions import convert_prediction

JOINT = torch.tensor(
    [[0.20, 0.05, 0.05], [0.05, 0.15, 0.10], [0.10, 0.10, 0.20]], dtype=torch.float64
)
MARGINAL = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
PREDICTED = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
ENTROPY = float(-(JOINT * JOINT.log()).sum())
INFORMATION = float((JOINT * (JOINT / torch.outer(JOINT.sum(1), JOINT.sum(0))).log()).sum())
SOURCES = {"absorbing": "absorbing", "uniform": "uniform", "marginal": MARGINAL}


def time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def all_states(states: int, length: int = 2) -> Tensor:
    """(states^length, length)"""
    return torch.tensor(list(product(range(states), repeat=length)))


def law_of_x0() -> tuple[Tensor, Tensor]:
    """(9, 2) clean states and their probabilities."""
    return all_states(3), JOINT.flatten()


def law_of_x(path: TokenPath, x0: Tensor, t: Tensor) -> Tensor:
    """q(x_t | x_0), (..., states); of a `MatrixPath` by the product of its matrices."""
    if not isinstance(path, MatrixPath):
        return marginal_probs(path, x0, t)
    whole = torch.eye(path.states, dtype=torch.float64)
    for k in range(round(float(t) * path.steps)):
        whole = whole @ path.matrices[k]
    return whole[x0]


@dataclass
class ExactField:
    """The exact q(x_0^i | x_t), or the cavity's, or another kind, of any path over `JOINT`."""

    path: TokenPath
    predicts: str = "clean"
    power: float = 1.0
    joint: Tensor = field(default_factory=lambda: JOINT)

    def __call__(self, x: Tensor, t: Tensor, **cond: object) -> Tensor:
        p = self._clean(x, t)
        if self.predicts == "cavity" or self.predicts == "clean":
            return p
        return convert_prediction(p, "clean", self.predicts, x, t, self.path)

    def likelihoods(self, x: Tensor, t: Tensor) -> Tensor:
        """q(x_t^i | x_0^i = k), (n, 2, 3)."""
        if self.path.absorbing:  # the posterior does not depend on t; at an end it would be 0 / 0
            t = torch.full_like(t, 0.5)
        return torch.stack(
            [
                law_of_x(self.path, torch.full_like(x, k), t)
                .gather(-1, x.unsqueeze(-1))
                .squeeze(-1)
                for k in range(3)
            ],
            dim=-1,
        )

    def _clean(self, x: Tensor, t: Tensor) -> Tensor:
        like = self.likelihoods(x, t)
        first, second = like[:, 0], like[:, 1]
        if self.predicts == "cavity":
            a = (self.joint * second[:, None, :]).sum(2)
            b = (self.joint * first[:, :, None]).sum(1)
        else:
            whole = self.joint * first[:, :, None] * second[:, None, :]
            a, b = whole.sum(2), whole.sum(1)
        p = torch.stack([a, b], dim=1)
        p = torch.where(p.sum(-1, keepdim=True) > 0, p, 1.0)
        p = (p / p.sum(-1, keepdim=True)) ** self.power
        return p / p.sum(-1, keepdim=True)


def joint_given(probs: Tensor) -> Tensor:
    """(n, 2, S) laws of independent tokens as laws of pairs, (n, S^2)."""
    return (probs[:, 0, :, None] * probs[:, 1, None, :]).flatten(1)


def total_variation(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().sum() / 2)


def expected(path: TokenPath, terms: Any, t: Tensor, field: Any, *times: Tensor) -> float:
    """The mean of the terms of both tokens over x_0 ~ JOINT and x_t, by enumeration."""
    x0, x = all_states(3), all_states(path.states)
    clean, now = x0.repeat_interleave(len(x), 0), x.repeat(len(x0), 1)
    weights = JOINT.flatten()[:, None] * joint_given(law_of_x(path, x0, t))
    log_p = field(now, t).log()
    some = weights.flatten() > 0
    values = terms(path, log_p, now, clean, t, *times).sum(1)
    return float((weights.flatten()[some] * values[some]).sum())


def discrete_bound(path: TokenPath, field: Any, steps: int) -> float:
    """The bound at T = ``steps``, by enumeration."""
    total = float((JOINT.flatten() * prior_terms(path, all_states(3)).sum(1)).sum())
    for k in range(1, steps + 1):
        t, s = time(k / steps), time((k - 1) / steps)
        total += expected(path, discrete_terms, t, field, s)
    return total
