"""Discrete time with any step matrices: D3PM with banded or Gaussian transitions, for small V.

`CategoricalPath` needs no matrices; here a token may move to neighbours first, as grey levels do.
All is in float64: 2 T V^2 numbers are kept, and a bound or a draw takes some of (batch, *event, V).
Of grey levels, as D3PM has them (Austin et al., NeurIPS 2021):

    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    path = MatrixPath(torch.stack([gaussian_matrix(256, float(b)) for b in betas]))

`TokenMatching` with ``loss="elbo"``, `elbo` with the form "discrete", conversions between clean and
cavity predictions, and `simulate.Ancestral` go with it. All times are multiples of 1 / T, (), or
(batch,), and are looked at on the host.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from fluvial.core.arguments import kind_of, whole_number
from fluvial.core.categorical.draws import (
    check_mask,
    check_prediction,
    check_probs,
    check_tokens,
    double,
    draw_classes,
    real_number,
    real_tokens,
    uniform,
)
from fluvial.core.categorical.paths import CategoricalPath, check_like
from fluvial.core.protocols import Draw, Noise


class MatrixPath:
    """q(x_k | x_{k-1}) = Q_k(x_{k-1}, x_k) at t = k / T; rows are where from (Austin et al., 2021).

    Args:
        matrices: (T, V, V), rows >= 0 that sum to 1.
        prior: (V,) the law of the source; by default that of the last step from uniform tokens.

    Raises:
        ValueError: rows that are no probabilities; in a call, a time that is no multiple of 1 / T
            or not (), or (batch,), t < s, tokens out of range, an end ``x1``.
        TypeError: ``matrices``, ``prior`` or a time is no tensor; in a call, tokens that are not
            int64.
    """

    mask_token = None
    absorbing = False

    def __init__(self, matrices: Tensor, prior: Tensor | None = None) -> None:
        if not isinstance(matrices, Tensor):
            raise TypeError(f"matrices must be a tensor, got {type(matrices).__name__}")
        if prior is not None and not isinstance(prior, Tensor):
            raise TypeError(f"prior must be a tensor, got {kind_of(prior)}")
        q = matrices.detach().double().cpu()
        if q.ndim != 3 or q.shape[1] != q.shape[2] or not q.numel():
            raise ValueError(f"matrices must have shape (T, V, V), got {tuple(matrices.shape)}")
        if not bool((q >= 0).all()) or not bool(((q.sum(-1) - 1).abs() < 1e-6).all()):
            raise ValueError("matrices must have rows >= 0 that sum to 1")
        q = q / q.sum(-1, keepdim=True)
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
        check_like(like, cond.get("mask"))
        probs = self.pi.to(like.device, double(like)).expand(*like.shape, -1)
        return self._draw(probs, like, noise, "source", cond)

    def sample(
        self, x0: Tensor, t: Tensor, noise: Noise, x1: Tensor | None = None, **cond: Any
    ) -> Draw:
        """A draw of q(x_t | x_0)."""
        if x1 is not None:
            raise ValueError("a MatrixPath draws its source itself: x1 must be None")
        mask = cond.get("mask")
        self.check_data(x0, mask)

        def target(kind: str) -> Tensor:
            if kind not in ("clean", "cavity"):
                raise ValueError(f"MatrixPath has targets 'clean' and 'cavity', got {kind!r}")
            return x0

        x = self._draw(self.marginal_probs(real_tokens(x0, mask), t), x0, noise, "sample", cond)
        return Draw(x, x0, x1, t, target)

    def posterior(
        self, x: Tensor, clean: Tensor, t: Tensor, s: Tensor, noise: Noise, **cond: Any
    ) -> Tensor:
        """A draw of P(x_s | x_t = x), ``clean`` the law of the clean token given all of x_t."""
        check_tokens(x, self.classes, cond.get("mask"), name="x")
        probs = self.posterior_probs(real_tokens(x, cond.get("mask")), clean, t, s)
        return self._draw(probs, x, noise, "posterior", cond)

    def transition(self, x: Tensor, s: Tensor, t: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """A draw of q(x_t | x_s = x)."""
        check_tokens(x, self.classes, cond.get("mask"), name="x")
        start = real_tokens(x, cond.get("mask"))
        probs = _rows(self._between(s, t, x), start)
        return self._draw(probs, x, noise, "transition", cond)

    def readout(self, x: Tensor, clean: Tensor) -> Tensor:
        return x

    def masked(self, x: Tensor) -> Tensor:
        """Which tokens hold a mask symbol beyond the classes: none do."""
        return x == self.classes

    def check_data(self, x0: Tensor, mask: Tensor | None = None) -> None:
        """Raise unless ``x0`` is tokens of the data; values are looked at on the CPU only."""
        check_tokens(x0, self.classes, mask)

    # Laws, (batch, *event, V) float64

    def marginal_probs(self, x0: Tensor, t: Tensor) -> Tensor:
        """q(x_t | x_0)."""
        return _rows(self._cumulative(t, x0), x0)

    def likelihood(self, x: Tensor, t: Tensor) -> Tensor:
        """D_k = q(x_t = x | x_0 = k)."""
        return _rows(self._cumulative(t, x).mT, x)

    def posterior_probs(self, x: Tensor, clean: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """sum_k p_k Q_st(j, x) Q_0s(k, j) / D_k; where the state excludes all of p, x stays."""
        check_prediction(clean, x, self.classes)
        if not clean.is_floating_point():
            check_tokens(clean, self.classes, None, name="clean")
        p = clean if clean.is_floating_point() else functional.one_hot(clean, self.classes)
        p = p.to(double(x))
        check_probs(p)
        likelihood = self.likelihood(x, t)
        w = torch.where(likelihood > 0, p / torch.where(likelihood > 0, likelihood, 1.0), 0.0)
        probs = self.reached(w, x, t, s)
        total = probs.sum(-1, keepdim=True)
        end = functional.one_hot(x, self.classes).to(p)
        return torch.where(total > 0, probs / torch.where(total > 0, total, 1.0), end)

    def reached(self, w: Tensor, x: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """Q_st(j, x) sum_k w_k Q_0s(k, j): P(x_s = j | x_t = x) for w = p / D."""
        start = self._cumulative(s, x)
        carried = (w.flatten(1, -2) @ start).reshape(w.shape)
        return carried * _rows(self._between(s, t, x).mT, x)

    def _cumulative(self, t: Tensor, like: Tensor) -> Tensor:
        """Q_0t, (V, V) or one a row."""
        return self.cumulative[self._index(t)].to(like.device, double(like))

    def _between(self, s: Tensor, t: Tensor, like: Tensor) -> Tensor:
        """Q_st, (V, V) or one a row."""
        lower, upper = torch.broadcast_tensors(self._index(s), self._index(t))
        if bool((lower > upper).any()):
            raise ValueError(f"s must not exceed t, got s={s.tolist()} and t={t.tolist()}")
        pairs = torch.stack([lower.flatten(), upper.flatten()], dim=1)
        pairs, which = pairs.unique(dim=0, return_inverse=True)
        products = torch.stack(
            [
                reduce(torch.matmul, self.matrices[low:high], self.cumulative[0])
                for low, high in pairs.tolist()
            ]
        )
        return products[which.reshape(lower.shape)].to(like.device, double(like))

    def _index(self, t: Tensor) -> Tensor:
        if not isinstance(t, Tensor):
            raise TypeError(f"times must be tensors, got {t!r}; see torch.tensor")
        if not t.is_floating_point():
            raise TypeError(f"times must be in floating point, got {t.dtype}")
        if t.ndim > 1:
            raise ValueError(
                f"times of a MatrixPath must be () or (batch,), got shape {tuple(t.shape)}"
            )
        position = t.double().cpu() * self.steps
        index = position.round()
        whole = ((position - index).abs() < 1e-6) & (index >= 0) & (index <= self.steps)
        if not bool(whole.all()):
            raise ValueError(
                f"times must be multiples of 1 / {self.steps} in [0, 1], got {t.tolist()}"
            )
        return index.long()

    def _draw(
        self, probs: Tensor, like: Tensor, noise: Noise, tag: str, cond: dict[str, Any]
    ) -> Tensor:
        x = draw_classes(probs, uniform(like, noise, tag))
        mask = cond.get("mask")
        check_mask(like, mask)
        return x if mask is None else torch.where(mask, x, like)

    def __repr__(self) -> str:
        return f"MatrixPath({self.classes} classes, {self.steps} steps)"


TokenPath: TypeAlias = CategoricalPath | MatrixPath
"""What goes with the discrete bound, and with clean and cavity predictions."""


def _rows(matrix: Tensor, x: Tensor) -> Tensor:
    """The rows at ``x`` of one matrix, or of one a row of the batch: (batch, *event, V)."""
    if matrix.ndim == 2:
        return matrix[x]
    if len(matrix) != len(x):
        raise ValueError(f"got {len(matrix)} times for a batch of {len(x)}")
    return matrix[torch.arange(len(x), device=x.device).reshape(-1, *[1] * (x.ndim - 1)), x]


def gaussian_matrix(classes: int, beta: float) -> Tensor:
    """The discretised Gaussian step of D3PM: j != i with weight exp(-4 |i - j|^2 / ((V-1)^2 beta)).

    Symmetric, with the rest on the diagonal, so that uniform tokens stay uniform: entries off the
    diagonal are divided by the sum of the weights of all distances, -(V - 1) .. V - 1.

    Raises:
        ValueError: fewer than 2 classes, or ``beta`` not positive.
    """
    classes, beta = whole_number("classes", classes), real_number("beta", beta)
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
    classes, width = whole_number("classes", classes), whole_number("width", width)
    beta = real_number("beta", beta)
    if not 0 < beta <= 1 or width < 1 or classes < 2:
        raise ValueError(f"need 0 < beta <= 1, width >= 1, classes >= 2, got {beta}, {width}")
    index = torch.arange(classes)
    near = (index[:, None] - index).abs() <= width
    matrix = torch.where(near, beta / classes, 0.0).double().fill_diagonal_(0)
    return matrix + torch.diag(1 - matrix.sum(1))
