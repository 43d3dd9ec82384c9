"""Linear maps that coefficients of a path are made of: scalar and 2x2 block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluvial.core.protocols import left_broadcast


@dataclass(frozen=True, eq=False)
class Scalar:
    """``value`` times the identity. ``value``: () or (batch,). Products have the dtype of ``x``."""

    value: Tensor

    @property
    def T(self) -> Scalar:
        return self

    def __matmul__(self, x: Any) -> Any:
        if isinstance(x, Scalar):
            return Scalar(self.value * x.value)
        return _times(self.value, x)

    def __add__(self, other: Scalar) -> Scalar:
        return Scalar(self.value + other.value)

    def __sub__(self, other: Scalar) -> Scalar:
        return Scalar(self.value - other.value)

    def solve(self, x: Tensor) -> Tensor:
        """x / value; 0 where value is 0 (the pseudo-inverse)."""
        zero = self.value == 0
        inverse = torch.where(zero, 0.0, 1 / torch.where(zero, 1.0, self.value))
        return _times(inverse, x)

    def logdet(self, x: Tensor) -> Tensor:
        """d log|value| with d the number of coordinates of one event of ``x``; (batch,)."""
        size = math.prod(x.shape[1:])
        return (size * self.value.abs().log()).to(x).expand(x.shape[0])


@dataclass(frozen=True, eq=False)
class Block:
    """A 2x2 matrix that mixes dimension 1 of (batch, 2, *rest), such as position and momentum.

    ``matrix``: (2, 2) or (batch, 2, 2). Products have the dtype of ``x``.
    """

    matrix: Tensor

    def __post_init__(self) -> None:
        if self.matrix.shape[-2:] != (2, 2) or self.matrix.ndim > 3:
            raise ValueError(
                f"matrix must have shape (2, 2) or (batch, 2, 2), got {tuple(self.matrix.shape)}"
            )

    @property
    def T(self) -> Block:
        return Block(self.matrix.mT)

    def __matmul__(self, x: Any) -> Any:
        if isinstance(x, Block):
            return Block(self.matrix @ x.matrix)
        return _mix(self.matrix, x)

    def __add__(self, other: Block) -> Block:
        return Block(self.matrix + other.matrix)

    def __sub__(self, other: Block) -> Block:
        return Block(self.matrix - other.matrix)

    def solve(self, x: Tensor) -> Tensor:
        """The pseudo-inverse applied to ``x``; singular values below rounding error count as 0."""
        return _mix(torch.linalg.pinv(self.matrix), x)

    def logdet(self, x: Tensor) -> Tensor:
        """(d / 2) log|det matrix| with d the number of coordinates of one event; (batch,)."""
        _check_pair(x)
        size = math.prod(x.shape[2:])
        return (size * torch.linalg.det(self.matrix).abs().log()).to(x).expand(x.shape[0])


def _times(value: Tensor, x: Tensor) -> Tensor:
    # A value of shape () never decides the dtype of a product, and may stay on the host.
    return left_broadcast(value.to(x) if value.ndim else value, x) * x


def _mix(matrix: Tensor, x: Tensor) -> Tensor:
    _check_pair(x)
    return (matrix.to(x) @ x.unsqueeze(-1).flatten(2)).reshape(x.shape)


def _check_pair(x: Tensor) -> None:
    if x.ndim < 2 or x.shape[1] != 2:
        raise ValueError(f"a block scale acts on (batch, 2, *rest), got {tuple(x.shape)}")
