"""Couplings: which source row is the far end of which data row, in a batch.

A coupling is called as ``coupling(x0, x1, noise, label=None)`` and returns ``rows`` (batch,): the
partner of ``x0[i]`` is ``x1[rows[i]]``. Every data row keeps its place, so that conditions stay
with it, and is used once. The plans of optimal transport are solved on the host; a loss that uses
one waits for an accelerator.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fluvial.core.gaussian.fields import convert
from fluvial.core.protocols import Field, GaussianPath, Noise
from fluvial.core.time import check_pairs


class Coupling(Protocol):
    def __call__(
        self, x0: Tensor, x1: Tensor, noise: Noise, label: Tensor | None = None
    ) -> Tensor: ...


@dataclass(frozen=True)
class Independent:
    """A random permutation, whatever order the ends came in."""

    def __call__(self, x0: Tensor, x1: Tensor, noise: Noise, label: Tensor | None = None) -> Tensor:
        _check(x0, x1)
        return noise.uniform(_like(x0), "coupling").argsort().to(x0.device)


@dataclass(frozen=True)
class OptimalTransport:
    """The permutation that minimises sum |x0_i - x1_rows(i)|^2 (Pooladian et al., ICML 2023).

    Minibatch optimal transport: paths cross less and flows are straighter (Tong et al., TMLR 2024).
    If the data carry conditions, each draws its source rows from nearby: p(x1 | condition) is not
    p(x1) any more, while samples start from p(x1). Use `ConditionalOptimalTransport` there.
    """

    def __call__(self, x0: Tensor, x1: Tensor, noise: Noise, label: Tensor | None = None) -> Tensor:
        """Raises:
        ValueError: unequal batches or events, no rows, a value that is not finite.
        """
        _check(x0, x1)
        return _optimal(_costs(x0, x1), x0)


@dataclass(frozen=True)
class EntropicOptimalTransport:
    """Partners drawn from the plan that minimises E |x0 - x1|^2 - reg * entropy (Cuturi, 2013).

    Sinkhorn's iterations in the log domain. Row i draws its partner from the plan's row i, so every
    x0 is used once and the x1 follow their law in expectation. ``reg -> 0`` is optimal transport,
    ``reg -> inf`` independence; reg = 2 sigma^2 is the Schrödinger bridge of a Brownian motion
    sigma W over [0, 1] (Tong et al., AISTATS 2024).

    Args:
        reg: in the units of |x0 - x1|^2, a sum over coordinates.
        iterations: at most. If they do not suffice, a `RuntimeWarning` says so.

    Raises:
        ValueError: ``reg`` or ``iterations`` is not positive.
    """

    reg: float
    iterations: int = 2000

    def __post_init__(self) -> None:
        if not (0 < self.reg < math.inf and self.iterations >= 1):
            raise ValueError(
                f"need reg > 0 and iterations >= 1, got {self.reg} and {self.iterations}"
            )

    def __call__(self, x0: Tensor, x1: Tensor, noise: Noise, label: Tensor | None = None) -> Tensor:
        """Raises:
        ValueError: unequal batches or events, no rows, a value that is not finite.
        """
        import ot

        _check(x0, x1)
        plan = ot.sinkhorn(
            [],
            [],
            _costs(x0, x1),
            self.reg,
            method="sinkhorn_log",
            numItermax=self.iterations,
            stopThr=1e-6,
            warn=False,
        )
        excess = max(float(np.abs(plan.sum(i) * len(plan) - 1).mean()) for i in (0, 1))
        if not excess < 0.01:
            warnings.warn(
                f"Sinkhorn's plan misses its marginals by {excess:.1%} after {self.iterations} "
                f"iterations: raise iterations, or reg={self.reg}",
                RuntimeWarning,
                stacklevel=2,
            )
        return _draw(plan, noise, x0)


@dataclass(frozen=True)
class ConditionalOptimalTransport:
    """Optimal transport of (x, condition): cost |x0 - x1|^2 + weight * mismatch of conditions.

    Each source row carries a condition too, by default that of the data row beside it, of which a
    drawn source is independent. At ``weight = inf`` rows are paired within their class only: every
    class then has source rows that follow p(x1), and sampling from p(x1) under a condition meets
    what was trained. Finite weights trade that for shorter paths; 0 is plain optimal transport.

    The mismatch is 1 where labels, integers, differ; between floating conditions (batch, *any) it
    is their squared distance.

    Args:
        weight: in the units of |x0 - x1|^2, a sum over coordinates.

    Raises:
        ValueError: ``weight`` is negative or NaN.

    Citation: Chemseddine et al., JMLR 2025; Cheng and Schwing, ICCV 2025.
    """

    weight: float = math.inf

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise ValueError(f"weight must be at least 0, got {self.weight}")

    def __call__(
        self,
        x0: Tensor,
        x1: Tensor,
        noise: Noise,
        label: Tensor | None = None,
        label1: Tensor | None = None,
    ) -> Tensor:
        """Args:
        label: (batch,) integers or (batch, *any) floating, of ``x0``.
        label1: of ``x1``, where that is data of its own. Classes may then differ in their counts:
            partners are drawn from the plan, and a row of x1 may be used more or less than once.

        Raises:
            ValueError: unequal batches or events, no rows, a value that is not finite; no label, or
                not one a row; a class of ``x0`` that no row of ``x1`` has; floating conditions at
                an infinite weight.
            TypeError: a label that is not a tensor.
        """
        _check(x0, x1)
        label1 = label if label1 is None else label1
        for name, value in (("label", label), ("label1", label1)):
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
            if value is None or value.shape[:1] != x0.shape[:1]:
                got = "none" if value is None else tuple(value.shape)
                raise ValueError(
                    f"{name} must have one entry for each of {len(x0)} rows, got {got}"
                )
        assert label is not None and label1 is not None
        costs, label, label1 = _costs(x0, x1), label.cpu(), label1.cpu()
        if self.weight < math.inf:
            return _optimal(costs + self.weight * _mismatch(label, label1), x0)
        if label.is_floating_point() or label.ndim != 1:
            raise ValueError(
                "pairing within classes needs integer labels (batch,), got "
                f"{label.dtype} {tuple(label.shape)}: give a finite weight"
            )
        plan = np.zeros_like(costs)
        for kind in label.unique():
            ours, theirs = ((part == kind).nonzero()[:, 0].numpy() for part in (label, label1))
            if not len(theirs):
                raise ValueError(f"x1 has no row of class {int(kind)}, x0 has {len(ours)}")
            block = np.ix_(ours, theirs)
            plan[block] = _exact(costs[block])
        return _draw(plan, noise, x0)


def straightness(x: Tensor, pairs: Tensor, path: GaussianPath, field: Field, **cond: Any) -> Tensor:
    """Mean over the way of |v(x_t, t) - (x_1 - x_0)|^2, one a row: 0 if the flow goes straight.

    What a coupling is to lower (Liu et al., ICLR 2023), along the Euler steps of ``pairs``. Where
    it is 0, one step of Euler's method arrives where many do.

    Args:
        x: (batch, *event), the state at ``pairs[0, 0]``.
        pairs: (K, 2), times all falling or all rising.

    Raises:
        ValueError: ``pairs`` is no chain, or turns.
    """
    check_pairs(pairs)
    pairs = pairs.double().cpu()
    steps = pairs[:, 1] - pairs[:, 0]
    if not (bool((steps > 0).all()) or bool((steps < 0).all())):
        raise ValueError(f"pairs must all fall or all rise, got {pairs.tolist()}")
    velocity = convert(field, "velocity", path)
    velocities = []
    for (t, _), step in zip(pairs, steps, strict=True):
        velocities.append(velocity(x, t, **cond))
        x = x + step * velocities[-1]
    shares = (steps / steps.sum()).to(x).reshape(-1, 1, 1)
    way = torch.stack([_rows(velocity) for velocity in velocities])
    return (shares * (way - (shares * way).sum(0)).square()).sum((0, 2))


def _check(x0: Tensor, x1: Tensor) -> None:
    if x0.shape != x1.shape or x0.ndim == 0 or len(x0) == 0:
        raise ValueError(
            "x0 and x1 must have the same number of rows, at least one, of one shape, got "
            f"{tuple(x0.shape)} and {tuple(x1.shape)}"
        )


def _like(x: Tensor) -> Tensor:
    return torch.empty(len(x), dtype=torch.float64)


def _rows(x: Tensor) -> Tensor:
    """(batch, *event) as (batch, d), also where an event is one number."""
    return x.unsqueeze(1).flatten(1)


def _costs(x0: Tensor, x1: Tensor) -> np.ndarray[Any, Any]:
    """|x0_i - x1_j|^2, each less its mean, in float64, on the host.

    Moving either end adds a number to every row and one to every column, which changes no plan of
    given marginals; the digits of the differences would be lost far from the origin.
    """
    a, b = (_rows(x.detach()).double() for x in (x0, x1))
    a, b = a - a.mean(0), b - b.mean(0)
    # |a - b|^2 = |a|^2 - 2 a b + |b|^2: one matrix product, in double precision
    squares = a.square().sum(1)[:, None] - 2 * a @ b.T + b.square().sum(1)
    return _finite("x0 and x1", squares.clamp(min=0).cpu().numpy())


def _finite(names: str, costs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not np.isfinite(costs).all():
        raise ValueError(f"{names} must be finite, got NaN or infinite values")
    return costs


def _mismatch(label: Tensor, label1: Tensor) -> np.ndarray[Any, Any]:
    if label.is_floating_point() or label1.is_floating_point():
        a, b = _rows(label.double()), _rows(label1.double())
        squares = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()
        return _finite("label and label1", squares.numpy())
    if label.ndim != 1 or label1.ndim != 1:
        raise ValueError(f"integer labels must have shape (batch,), got {tuple(label.shape)}")
    return (label[:, None] != label1).double().numpy()


def _exact(costs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    import ot

    return np.asarray(ot.emd([], [], costs, numItermax=10_000_000))


def _optimal(costs: np.ndarray[Any, Any], x0: Tensor) -> Tensor:
    """Of equally many rows, a best plan is a permutation, which is found sooner as one."""
    from scipy.optimize import linear_sum_assignment

    return torch.from_numpy(linear_sum_assignment(costs)[1]).to(x0.device)


def _draw(plan: np.ndarray[Any, Any], noise: Noise, x0: Tensor) -> Tensor:
    """A column for every row, with the row's probabilities."""
    return noise.categorical(torch.from_numpy(plan), "coupling").to(x0.device)
