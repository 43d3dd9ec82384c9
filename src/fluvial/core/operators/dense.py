"""Operators given by a matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fluvial.core.operators.base import Operator, Shape, check_cutoff
from fluvial.core.protocols import LinearOperator

LARGEST = 4096


class Dense(Operator):
    """y = M x of flattened events. The singular value decomposition is made once, in float64.

    Args:
        matrix: (m, n), or (batch, m, n) with one for every row.
        in_shape, out_shape: of events and measurements; by default (n,) and (m,).
        cutoff: singular values of at most this, relative to the largest, count as 0 in A^+, which
            then is truncated; 0 for those of rounding error alone, and then it is exact.

    Raises:
        ValueError: the matrix has no such shape, is not finite or is 0, the shapes have other
            sizes, or ``cutoff`` is outside [0, 1).
    """

    in_shape: Shape
    out_shape: Shape

    def __init__(
        self,
        matrix: Tensor,
        in_shape: Shape | None = None,
        out_shape: Shape | None = None,
        cutoff: float = 0.0,
    ) -> None:
        if matrix.ndim not in (2, 3) or matrix.numel() == 0:
            raise ValueError(
                f"matrix must be (m, n) or (batch, m, n), not empty, got {tuple(matrix.shape)}"
            )
        if not bool(matrix.isfinite().all()) or not bool((matrix != 0).any()):
            raise ValueError("matrix must be finite and not 0")
        m, n = matrix.shape[-2:]
        self.in_shape, self.out_shape = tuple(in_shape or (n,)), tuple(out_shape or (m,))
        if math.prod(self.in_shape) != n or math.prod(self.out_shape) != m:
            raise ValueError(
                f"a matrix of {(m, n)} does not map {self.in_shape} to {self.out_shape}"
            )
        self.matrix = matrix if matrix.ndim == 3 else matrix[None]
        self.rows = len(self.matrix)
        self.cutoff = check_cutoff(cutoff)
        self.pseudo_inverse = "truncated" if cutoff else "exact"
        u, self._spectrum, vt = torch.linalg.svd(self.matrix.double(), full_matrices=False)
        floor = cutoff or max(m, n) * torch.finfo(torch.float64).eps
        kept = self._spectrum > floor * self._spectrum[:, :1]
        self.right = torch.where(kept.unsqueeze(-1), vt, 0.0)  # the directions that are kept
        inverse = torch.where(kept, 1 / torch.where(kept, self._spectrum, 1.0), 0.0)
        self.inverse = (self.right.mT * inverse.unsqueeze(-2)) @ u.mT

    @property
    def spectrum(self) -> Tensor:
        return self._spectrum

    def _forward(self, x: Tensor) -> Tensor:
        return _times(x, self._like("matrix", x).mT).unflatten(1, self.out_shape)

    def _adjoint(self, y: Tensor) -> Tensor:
        return _times(y, self._like("matrix", y)).unflatten(1, self.in_shape)

    def _dagger(self, y: Tensor) -> Tensor:
        return _times(y, self._like("inverse", y).mT).unflatten(1, self.in_shape)

    def project(self, x: Tensor) -> Tensor:
        self._check("x", x, self.in_shape)
        right = self._like("right", x)
        return _times(_times(x, right.mT), right).unflatten(1, self.in_shape)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """Rows of ``x`` times the one matrix, or each times its own."""
    x = x.flatten(1)
    return x @ matrix[0] if len(matrix) == 1 else torch.bmm(x.unsqueeze(1), matrix).squeeze(1)


def dense(operator: LinearOperator, in_shape: Shape, cutoff: float = 0.0, rows: int = 1) -> Dense:
    """``operator`` as a matrix in float64, such as to truncate its singular values.

    ``rows`` is how many it has of its own.

    Raises:
        ValueError: an event has more than 4,096 coordinates.
    """
    n = math.prod(in_shape)
    if n > LARGEST:
        raise ValueError(
            f"an event of {n} coordinates is too large for a matrix, at most {LARGEST}"
        )
    units = torch.eye(n, dtype=torch.float64).reshape(n, *in_shape)
    if rows == 1:
        columns = operator.A(units)
        return Dense(columns.flatten(1).mT, in_shape, tuple(columns.shape[1:]), cutoff)
    columns = torch.stack([operator.A(unit.expand(rows, *in_shape)) for unit in units], -1)
    return Dense(columns.flatten(1, -2), in_shape, tuple(columns.shape[1:-1]), cutoff)
