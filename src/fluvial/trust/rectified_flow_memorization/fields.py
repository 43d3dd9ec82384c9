"""Velocity fields of straight-line interpolations that need no training.

The paper runs s = 1 - t from the source to the target and writes w = dx/ds; these fields return the
library's velocity dx/dt = -w.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.core.protocols import left_broadcast
from fluvial.trust.rectified_flow_memorization.pairs import check_pairs

SINGULAR = 1e-12
"""How near to 0 an eigenvalue of B_s may come."""
MEMORY = 2**28
"""Bytes of the block of pairs that `EmpiricalField` looks at together, by default: 256 MiB."""


@dataclass(frozen=True, eq=False)
class GaussianPairField:
    """The field of pairs x_0 = mean + matrix x_1, x_1 ~ N(0, I), interpolated by straight lines.

    With s = 1 - t, Theta = A - I and B_s = I + s Theta, the paper's Lemma 1:

        w(x, s) = mean + Theta B_s^-1 (x - s mean),

    which has loss 0 on every pair, as long as B_s is invertible. With a noise sigma in the
    interpolant, x_t + sigma eps, the minimiser is (derived)

        w(x, s) = mean + Theta B_s^T (B_s B_s^T + sigma^2 I)^-1 (x - s mean).

    A = M^(1/2) is the optimal map to N(mean, M), A = M^(1/2) R the optimal map after a rotation.
    For M = I and a rotation by phi, det B_s = (1 - s)^2 + s^2 + 2 s (1 - s) cos phi in every plane:
    lines meet at phi = 180 degrees and s = 1/2 alone, and there all of them do.

    Args:
        mean: (d,).
        matrix: A, (d, d).
        interpolant_noise: sigma; at least 0.

    Raises:
        ValueError: shapes that do not fit, a value that is not finite, a negative noise. When
            called: x of another size, or, without noise, a time at which B_s is singular.

    Citation: Reu et al., NeurIPS 2025, arXiv 2510.18118, Lemma 1.
    """

    mean: Tensor
    matrix: Tensor
    interpolant_noise: float = 0.0
    predicts: str = "velocity"
    _eigenvalues: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_noise(self.interpolant_noise)
        mean, matrix = self.mean.double(), self.matrix.double()
        if mean.ndim != 1 or matrix.shape != (len(mean), len(mean)):
            raise ValueError(
                "mean and matrix must have shapes (d,) and (d, d), got "
                f"{tuple(mean.shape)} and {tuple(matrix.shape)}"
            )
        if not bool(mean.isfinite().all() and matrix.isfinite().all()):
            raise ValueError("mean and matrix must be finite, got NaN or infinite values")
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "matrix", matrix)
        # B_s has the eigenvalues 1 - s + s a: that says when it is singular, at no cost in a step
        object.__setattr__(self, "_eigenvalues", torch.linalg.eigvals(matrix.cpu()))

    @property
    def change(self) -> Tensor:
        """Theta = A - I."""
        return self.matrix - torch.eye(len(self.mean)).to(self.matrix)

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        flat, s = x.flatten(1).double(), 1 - t.double()
        if flat.shape[1] != len(self.mean):
            raise ValueError(
                f"x must have {len(self.mean)} numbers a row, got shape {tuple(x.shape)}"
            )
        if not self.interpolant_noise:
            self._check_regular(s)
        mean, change = self.mean.to(x.device), self.change.to(x.device)
        w = pair_velocity(mean, change, flat, s.to(x.device), self.interpolant_noise)
        return -w.reshape(x.shape).to(x.dtype)

    def _check_regular(self, s: Tensor) -> None:
        s = s.cpu()
        nearness = (1 - s[..., None] + s[..., None] * self._eigenvalues).abs().amin(-1)
        if bool((nearness <= SINGULAR).any()):
            time = float((1 - s).flatten()[int(nearness.flatten().argmin())])
            raise ValueError(
                f"the field is undetermined at t = {time:g}, where lines meet (B_s is singular); "
                "take steps that miss this time, such as an odd number of equal ones, or "
                "interpolant_noise > 0"
            )


class PairOptimal(nn.Module):
    """The trainable class of the fields above: one of them has loss 0 for every linear pairing.

        w(x, s) = theta + Theta (I + s Theta)^-1 (x - s theta),

    called as ``network(x, t)``, which returns the velocity -w.

    Args:
        theta: (d,), the initial theta.
        Theta: (d, d), the initial Theta = A - I.

    Citation: Reu et al., NeurIPS 2025, arXiv 2510.18118.
    """

    predicts = "velocity"

    def __init__(self, theta: Tensor, Theta: Tensor) -> None:
        super().__init__()
        if theta.ndim != 1 or Theta.shape != (len(theta), len(theta)):
            raise ValueError(
                "theta and Theta must have shapes (d,) and (d, d), got "
                f"{tuple(theta.shape)} and {tuple(Theta.shape)}"
            )
        self.theta = nn.Parameter(theta.detach().clone())
        self.Theta = nn.Parameter(Theta.detach().clone())

    def forward(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return -pair_velocity(self.theta, self.Theta, x.flatten(1), 1 - t.to(x)).reshape(x.shape)

    @torch.no_grad()
    def gradients(self, x: Tensor, t: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the squared error of every row, in closed form (derived).

        With r the error of w and y = x - s theta,

            d/dtheta = -2 B^-T r,   d/dTheta = -2 (B^-T r) (B^-1 y)^T.

        Args:
            x: (n, *event).
            t: (n,).
            velocity: (n, *event), what the field should be there.

        Returns:
            (squared error (n,), d/dtheta (n, d), d/dTheta (n, d, d)).
        """
        s = 1 - t.to(x)
        residual = self(x, t).sub_(velocity).flatten(1)  # (x_0 - x_1) - w
        b = _lines(self.Theta, s)
        back = torch.linalg.solve(b.mT, residual[..., None])
        start = torch.linalg.solve(b, (x.flatten(1) - s[:, None] * self.theta)[..., None])
        return residual.square().sum(1), -2 * back.squeeze(-1), -2 * back @ start.mT


def pair_velocity(
    mean: Tensor, change: Tensor, x: Tensor, s: Tensor, interpolant_noise: float = 0.0
) -> Tensor:
    """w(x, s) of `GaussianPairField`, rows x (n, d), s of shape () or (n,)."""
    b = _lines(change, s)
    y = x - left_broadcast(s, x) * mean
    if interpolant_noise:
        eye = torch.eye(len(mean)).to(b)
        inverse = torch.linalg.solve(b @ b.mT + interpolant_noise**2 * eye, b).mT
        return mean + _apply(change @ inverse, y)
    if b.ndim == 2:
        return mean + torch.linalg.solve(b, y.T).T @ change.T
    return mean + torch.linalg.solve(b, y[..., None]).squeeze(-1) @ change.T


def _lines(change: Tensor, s: Tensor) -> Tensor:
    """B_s = I + s Theta, (d, d) or (n, d, d)."""
    return torch.eye(len(change)).to(change) + s[..., None, None] * change


def _apply(matrix: Tensor, y: Tensor) -> Tensor:
    return y @ matrix.T if matrix.ndim == 2 else (matrix @ y[..., None]).squeeze(-1)


class EmpiricalField:
    """The minimiser of the loss on finitely many pairs with a noise sigma in the interpolant.

        V(x, t) = sum_i p_i (x_1^i - x_0^i),
        p_i proportional to exp(-|x - (1 - t) x_0^i - t x_1^i|^2 / (2 sigma^2)):

    no training, every pair looked at, exact (derived). Where sigma is far below the distance
    between lines one weight is 1, and this field takes training sources to their training partners
    as surely as without noise. Noise ends that only where lines come within a few sigma of each
    other, or where a network cannot resolve what this field resolves: see
    `fluvial.trust.rectified_flow_memorization.report.closest_approach`.

    A call takes two products of (batch, d) and (d, pairs) in float64, in blocks within ``memory``,
    with a running log-sum-exp. The pairs stay as they are given, in their own dtype.

    Args:
        x_source: (pairs, *event), x_1.
        x_target: (pairs, *event), x_0.
        interpolant_noise: sigma, positive.
        memory: bytes that a block may take, beside the pairs themselves.

    Raises:
        TypeError: the pairs are not floating.
        ValueError: unequal shapes, a value that is not finite, no pairs, ``interpolant_noise`` not
            positive, too little memory. When called: an event of another shape.

    Citation: Reu et al., NeurIPS 2025, arXiv 2510.18118.
    """

    predicts = "velocity"

    def __init__(
        self, x_source: Tensor, x_target: Tensor, interpolant_noise: float, memory: int = MEMORY
    ) -> None:
        check_pairs(x_source, x_target)
        check_noise(interpolant_noise)
        if interpolant_noise == 0:
            raise ValueError(
                "interpolant_noise must be positive: without it the minimiser is determined on the "
                "lines only"
            )
        self.x_source, self.x_target = x_source.detach(), x_target.detach()
        self.interpolant_noise, self.memory = interpolant_noise, memory
        self.shape = tuple(x_source.shape[1:])
        size = math.prod(self.shape)
        # a block of k pairs holds four times k x d numbers; one of m x k weights four of them
        self._pairs = max(1, min(len(x_source), memory // 2 // (4 * 8 * size)))
        self._rows = memory // 2 // (4 * 8 * self._pairs)
        if self._rows < 1 or 4 * 8 * size > memory // 2:
            raise ValueError(f"memory must be at least {64 * size} bytes, got {memory}")
        # about their mean, which changes no distance between a point and a point of a line
        self._middle = (_mean(x_source, self._pairs) + _mean(x_target, self._pairs)) / 2
        # one block is kept as it is; several are made again at every call
        self._kept = list(self._made()) if self._pairs == len(x_source) else None
        self._products = torch.cat(
            [
                torch.stack([(a * b).sum(1) for a, b in ((y, y), (y, z), (z, z))])
                for z, y in self._blocks()
            ],
            1,
        )

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(f"x must have shape (batch, {self.shape}), got {tuple(x.shape)}")
        t = t.to(x.device, torch.float64).expand(len(x))
        parts = [
            self._velocity(rows.flatten(1).double() - self._middle.to(x.device), times[:, None])
            for rows, times in zip(x.split(self._rows), t.split(self._rows), strict=True)
        ]
        return torch.cat(parts).to(x.dtype).reshape(x.shape) if parts else x.clone()

    def _velocity(self, x: Tensor, t: Tensor) -> Tensor:
        highest = x.new_full((len(x), 1), -math.inf)
        weight, total = torch.zeros_like(highest), torch.zeros_like(x)
        products = self._products.to(x.device).split(self._pairs, 1)
        for (source, target), (tt, st, ss) in zip(self._blocks(), products, strict=True):
            source, target = source.to(x.device), target.to(x.device)
            # |x - c|^2 / 2 less |x|^2 / 2, which is the same for all pairs, at c of time t
            half = ((1 - t).square() * tt + t.square() * ss).div_(2).add_(t * (1 - t) * st)
            half.sub_((x * (1 - t)) @ target.T).sub_((x * t) @ source.T)
            logits = half.div_(-(self.interpolant_noise**2))
            higher = torch.maximum(highest, logits.amax(1, keepdim=True))
            weights = logits.sub_(higher).exp_()
            shrink = (highest - higher).exp_()
            weight = weight.mul_(shrink).add_(weights.sum(1, keepdim=True))
            total = total.mul_(shrink).addmm_(weights, source - target)
            highest = higher
        return total / weight

    def _blocks(self) -> Iterable[tuple[Tensor, Tensor]]:
        return self._made() if self._kept is None else self._kept

    def _made(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(x_1, x_0) of a block of pairs after another, in float64 and about their mean."""
        blocks = (part.split(self._pairs) for part in (self.x_source, self.x_target))
        for source, target in zip(*blocks, strict=True):
            yield (
                source.flatten(1).double() - self._middle,
                target.flatten(1).double() - self._middle,
            )


def _mean(x: Tensor, rows: int) -> Tensor:
    total = sum(part.flatten(1).double().sum(0) for part in x.split(rows))
    return torch.as_tensor(total) / len(x)


def check_noise(interpolant_noise: float) -> None:
    """Raise unless it is a finite number, at least 0."""
    if not 0 <= interpolant_noise < math.inf:
        raise ValueError(
            f"interpolant_noise must be finite and at least 0, got {interpolant_noise}"
        )
