"""Conjugate gradients, row by row, and linear maps that torch differentiates as such."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fluvial.core.protocols import left_broadcast

Map = Callable[[Tensor], Tensor]

CHECK_EVERY = 10  # iterations between looks at the residual, which wait for an accelerator


def conjugate_gradients(
    matrix: Map, right: Tensor, iterations: int, tolerance: float = 0.0
) -> Tensor:
    """matrix^-1 right, row by row, from 0 on; the matrix is symmetric and not negative.

    Rows whose residual is at most ``tolerance`` times ``right``, or solved to rounding, stand
    still. With a tolerance the iterations end when all do, and a warning says where some do not;
    without, nothing is looked at.
    """

    def product(a: Tensor, b: Tensor) -> Tensor:
        return left_broadcast((a * b).unsqueeze(1).flatten(1).sum(1), a)

    solution, residual, direction = torch.zeros_like(right), right, right
    squares = product(residual, residual)
    least = max(tolerance, torch.finfo(right.dtype).eps) ** 2 * squares
    for k in range(iterations):
        image = matrix(direction)
        step = torch.where(squares > least, squares / product(direction, image), 0)
        solution, residual = solution + step * direction, residual - step * image
        fresh = product(residual, residual)
        turn = torch.where(squares > least, fresh / squares, 0)
        squares, direction = fresh, residual + turn * direction
        if tolerance and (k + 1) % CHECK_EVERY == 0 and not bool((squares > least).any()):
            return solution
    if tolerance and bool((squares > least).any()):
        missed = float((squares / least).amax().sqrt()) * tolerance
        warnings.warn(
            f"conjugate gradients left a relative residual of {missed:.1e} after {iterations} "
            f"iterations, of {tolerance:.1e} wanted",
            RuntimeWarning,
            stacklevel=2,
        )
    return solution


def least_squares(A: Map, adjoint: Map, y: Tensor, tolerance: float, iterations: int) -> Tensor:
    """A^+ y, from A^T A x = A^T y by `conjugate_gradients`.

    Its derivative is the pseudo-inverse again, that of A or of A^T, and not that of the iterations.
    """

    def dagger(y: Tensor) -> Tensor:
        return conjugate_gradients(lambda x: adjoint(A(x)), adjoint(y), iterations, tolerance)

    def transposed(x: Tensor) -> Tensor:
        return conjugate_gradients(lambda y: A(adjoint(y)), A(x), iterations, tolerance)

    return linear(y, dagger, transposed)


def linear(x: Tensor, forward: Map, adjoint: Map) -> Tensor:
    """``forward(x)``, differentiated by ``forward`` and ``adjoint`` and not through their parts."""
    result: Tensor = _Linear.apply(x, forward, adjoint)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, forward: Map, adjoint: Map) -> Tensor:
        return forward(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.map, ctx.adjoint = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return linear(gradient, ctx.adjoint, ctx.map), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return linear(tangent, ctx.map, ctx.adjoint)
