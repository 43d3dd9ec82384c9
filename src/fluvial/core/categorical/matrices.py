"""Discrete time with any step matrices: D3PM with banded or Gaussian transitions, for small V.

`CategoricalPath` needs no matrices; here a token may move to neighbours first, as grey levels do.
Cumulative products are kept in float64, T V^2 numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fluvial.core.categorical.draws import (
    check_prediction,
    check_probs,
    check_tokens,
    double,
    draw_classes,
    real_tokens,
    uniform,
)
from fluvial.core.protocols import Draw, Noise


class MatrixPath:
    """q(x_k | x_{k-1}) = Q_k(x_{k-1}, x_k) at t = k / T; rows are where from (Austin et al., 2021).

    Args:
        matrices: (T, V, V), rows >= 0 that sum to 1.
        prior: (V,) the law of the source; by default that of the last step from uniform tokens.

    Raises:
        ValueError: rows that are no probabilities; in a call, a time that is no multiple of 1 / T,
            t < s, tokens out of range.
    """

    mask_token = None

    def __init__(self, matrices: Tensor, prior: Tensor | None = None) -> None:
        q = matrices.detach().double().cpu()
        if q.ndim != 3 or q.shape[1] != q.shape[2] or not len(q):
            raise ValueError(f"matrices must have shape (T, V, V), got {tuple(matrices.shape)}")
        if not bool((q >= 0).all()) or not bool(((q.sum(-1) - 1).abs() < 1e-9).all()):
            raise ValueError("matrices must have rows >= 0 that sum to 1")
        self.steps, self.classes = len(q), q.shape[1]
        cumulative = [torch.eye(self.classes, dtype=torch.float64)]
        for step in q:
            cumulative.append(cumulative[-1] @ step)
        self.matrices, self.cumulative = q, torch.stack(cumulative)
        self.pi = self.cumulative[-1].mean(0) if prior is None else prior.detach().double().cpu()
        if (
            self.pi.shape != (self.classes,)
            or not bool((self.pi >= 0).all())
            or abs(float(self.pi.sum()) - 1) > 1e-6
        ):
            raise ValueError(f"prior must be ({self.classes},) probabilities, got {prior}")

    @property
    def states(self) -> int:
        return self.classes

    def source(self, like: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """x_1: independent draws of the prior, in the shape of ``like``."""
        probs = self.pi.to(like.device).expand(*like.shape, -1)
        return self._draw(probs, like, noise, "source", cond)

    def sample(
        self, x0: Tensor, t: Tensor, noise: Noise, x1: Tensor | None = None, **cond: Any
    ) -> Draw:
        """A draw of q(x_t | x_0)."""
        mask = cond.get("mask")
        check_tokens(x0, self.classes, mask)

        def target(kind: str) -> Tensor:
            if kind not in ("clean", "cavity"):
                raise ValueError(f"MatrixPath has targets 'clean' and 'cavity', got {kind!r}")
            return x0

        start = functional.one_hot(real_tokens(x0, mask), self.classes).to(double(x0))
        x = self._draw(_times(start, self._between(0, t, x0)), x0, noise, "sample", cond)
        return Draw(x, x0, x1, t, target)

    def posterior(
        self, x: Tensor, clean: Tensor, t: Tensor, s: Tensor, noise: Noise, **cond: Any
    ) -> Tensor:
        """A draw of P(x_s | x_t = x), ``clean`` the law of the clean token given all of x_t."""
        probs = self.posterior_probs(real_tokens(x, cond.get("mask")), clean, t, s)
        return self._draw(probs, x, noise, "posterior", cond)

    def posterior_probs(self, x: Tensor, clean: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """sum_k p_k Q_st(j, x) Q_0s(k, j) / Q_0t(k, x), (batch, *event, V)."""
        check_prediction(clean, x, self.classes)
        p = clean if clean.is_floating_point() else functional.one_hot(clean, self.classes)
        p = p.to(double(x))
        check_probs(p)
        end = functional.one_hot(x, self.classes).to(p)
        likelihood = _times(end, self._between(0, t, x).mT)
        w = torch.where(likelihood > 0, p / torch.where(likelihood > 0, likelihood, 1.0), 0.0)
        probs = _times(end, self._between(s, t, x).mT) * _times(w, self._between(0, s, x))
        total = probs.sum(-1, keepdim=True)
        return torch.where(total > 0, probs / torch.where(total > 0, total, 1.0), end)

    def transition(self, x: Tensor, s: Tensor, t: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """A draw of q(x_t | x_s = x)."""
        start = functional.one_hot(real_tokens(x, cond.get("mask")), self.classes).to(double(x))
        return self._draw(_times(start, self._between(s, t, x)), x, noise, "transition", cond)

    def readout(self, x: Tensor, clean: Tensor) -> Tensor:
        return x

    def _between(self, s: Tensor | int, t: Tensor, like: Tensor) -> Tensor:
        """Q_st, (V, V) or one a row."""
        upper = self._index(t)
        if isinstance(s, int):
            return self.cumulative[upper].to(like.device)
        lower = self._index(s)
        if bool((lower > upper).any()):
            raise ValueError(f"s must not exceed t, got s={s.tolist()} and t={t.tolist()}")
        lower, upper = torch.broadcast_tensors(lower, upper)
        products = []
        for low, high in zip(lower.flatten().tolist(), upper.flatten().tolist(), strict=True):
            product = torch.eye(self.classes, dtype=torch.float64)
            for step in self.matrices[low:high]:
                product = product @ step
            products.append(product)
        return (
            torch.stack(products).reshape(*lower.shape, self.classes, self.classes).to(like.device)
        )

    def _index(self, t: Tensor) -> Tensor:
        index = (t.double().cpu() * self.steps).round()
        if not bool(((t.double().cpu() * self.steps - index).abs() < 1e-6).all()):
            raise ValueError(f"times must be multiples of 1 / {self.steps}, got {t.tolist()}")
        return index.long()

    def _draw(
        self, probs: Tensor, like: Tensor, noise: Noise, tag: str, cond: dict[str, Any]
    ) -> Tensor:
        x = draw_classes(probs, uniform(like, noise, tag))
        mask = cond.get("mask")
        return x if mask is None else torch.where(mask, x, like)


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows (batch, *event, V) times one matrix, or one a row of the batch."""
    if matrix.ndim == 2:
        return rows @ matrix
    return (rows.flatten(1, -2) @ matrix).reshape(rows.shape)


def gaussian_matrix(classes: int, beta: float) -> Tensor:
    """The discretised Gaussian step of D3PM: j != i with weight exp(-4 |i - j|^2 / ((V-1)^2 beta)).

    Symmetric, with the rest on the diagonal, so that uniform tokens stay uniform: entries off the
    diagonal are divided by the sum of the weights of all distances, -(V - 1) .. V - 1.

    Raises:
        ValueError: fewer than 2 classes, or ``beta`` not positive.
    """
    if classes < 2 or not beta > 0:
        raise ValueError(f"need classes >= 2 and beta > 0, got {classes} and {beta}")
    index = torch.arange(classes, dtype=torch.float64)
    distance = (index[:, None] - index).square()
    width = (classes - 1) ** 2 * beta
    reach = torch.arange(1 - classes, classes, dtype=torch.float64).square()
    matrix = torch.exp(-4 * distance / width) / torch.exp(-4 * reach / width).sum()
    matrix.fill_diagonal_(0)
    return matrix + torch.diag(1 - matrix.sum(1))


def banded_matrix(classes: int, beta: float, width: int) -> Tensor:
    """The banded step of D3PM: beta / V to each class at most ``width`` away, the rest stays.

    Raises:
        ValueError: ``beta`` not in (0, 1], or ``width`` < 1.
    """
    if not 0 < beta <= 1 or width < 1 or classes < 2:
        raise ValueError(f"need 0 < beta <= 1, width >= 1, classes >= 2, got {beta}, {width}")
    index = torch.arange(classes)
    near = (index[:, None] - index).abs() <= width
    matrix = torch.where(near, beta / classes, 0.0).double().fill_diagonal_(0)
    return matrix + torch.diag(1 - matrix.sum(1))
