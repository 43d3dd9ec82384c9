"""What is measured: y = A x + noise, as a map of coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from tqdm import tqdm

from fluvial.core.protocols import LinearOperator
from fluvial.inverse.function_space_langevin.modes import Modes
from fluvial.inverse.function_space_langevin.theory import LARGEST

Measurement: TypeAlias = Tensor | LinearOperator
"""A spectrum (N,), a matrix (M, N), or an operator on functions."""

PROBES = 256
"""Modes that an operator is applied to at once."""


class Forward(Protocol):
    """A of coefficients (batch, J), its adjoint, and its Gram A^T A, (N,) or (N, N).

    ``diagonal``: is a number of y the measurement of one mode?
    """

    @property
    def diagonal(self) -> bool: ...
    def A(self, x: Tensor) -> Tensor: ...
    def A_adjoint(self, y: Tensor) -> Tensor: ...
    @property
    def gram(self) -> Tensor: ...
    @property
    def gram_diagonal(self) -> Tensor: ...
    @property
    def stored(self) -> Tensor:
        """What of it a file can hold."""
        ...

    def like(self, x: Tensor) -> Forward:
        """The same for states in the dtype and on the device of ``x``."""
        ...


@dataclass(frozen=True, eq=False)
class Spectrum:
    """y_j = a_j x_j of the first N of ``size`` modes."""

    values: Tensor
    size: int
    diagonal = True

    def A(self, x: Tensor) -> Tensor:
        return x[:, : len(self.values)] * self.values

    def A_adjoint(self, y: Tensor) -> Tensor:
        return _padded(y * self.values, self.size)

    @property
    def gram(self) -> Tensor:
        return self.values.double().square()

    @property
    def gram_diagonal(self) -> Tensor:
        return self.gram

    @property
    def stored(self) -> Tensor:
        return self.values

    def like(self, x: Tensor) -> Spectrum:
        return Spectrum(self.values.to(x), self.size)


@dataclass(frozen=True, eq=False)
class Matrix:
    """y = A x of the first N of ``size`` modes, A (M, N)."""

    values: Tensor
    size: int
    diagonal = False

    def A(self, x: Tensor) -> Tensor:
        return x[:, : self.values.shape[1]] @ self.values.mT

    def A_adjoint(self, y: Tensor) -> Tensor:
        return _padded(y @ self.values, self.size)

    @property
    def gram(self) -> Tensor:
        values = self.values.double()
        return values.mT @ values

    @property
    def gram_diagonal(self) -> Tensor:
        return self.values.double().square().sum(0)

    @property
    def stored(self) -> Tensor:
        return self.values

    def like(self, x: Tensor) -> Matrix:
        return Matrix(self.values.to(x), self.size)


@dataclass(frozen=True, eq=False)
class OnFunctions:
    """An operator on the values of functions on a grid, as a map of their coefficients.

    Its Gram is a matrix that is not formed: `gram` is the diagonal, |A v_j|^2 for every mode v_j.
    """

    operator: LinearOperator
    modes: Modes
    squares: Tensor
    diagonal = False

    @classmethod
    def of(cls, operator: LinearOperator, modes: Modes, progress: bool) -> OnFunctions:
        """Applies the operator to every mode once."""
        parts = [rows.square().sum(1) for rows in _columns(operator, modes, progress)]
        return cls(operator, modes, torch.cat(parts))

    def A(self, x: Tensor) -> Tensor:
        return self.operator.A(self.modes.functions(x))

    def A_adjoint(self, y: Tensor) -> Tensor:
        # the modes are orthonormal under the integral, the adjoint is one under the sum
        return self.modes.coefficients(self.operator.A_adjoint(y)) * self.modes.density

    @property
    def gram(self) -> Tensor:
        return self.squares

    @property
    def gram_diagonal(self) -> Tensor:
        return self.squares

    @property
    def stored(self) -> Tensor:
        return self.squares

    def like(self, x: Tensor) -> OnFunctions:
        return self  # an operator sees to it itself


def forward_map(forward: Measurement, modes: Modes, *, progress: bool = False) -> Forward:
    """The map of coefficients that a spectrum, a matrix or an operator stands for.

    Args:
        forward: a spectrum (N,) of the first N modes; a matrix (M, N) on their coefficients; or an
            object with ``A`` and ``A_adjoint`` on functions (batch, *modes.shape), which is applied
            to every mode once for the diagonal of its Gram.
        modes: of the functions.
        progress: show a bar while it is.

    Raises:
        TypeError: something else.
        ValueError: more columns than modes, or a value that is not finite.
    """
    if isinstance(forward, Tensor):
        if forward.ndim not in (1, 2) or not 1 <= forward.shape[-1] <= len(modes):
            raise ValueError(
                f"forward must be (N,) or (M, N) with N <= {len(modes)} modes, got "
                f"{tuple(forward.shape)}"
            )
        if forward.is_complex():
            raise TypeError(f"forward must be real, got {forward.dtype}")
        if not bool(forward.isfinite().all()):
            raise ValueError("forward holds values that are not finite")
        values = forward.detach().double()
        return (Spectrum if forward.ndim == 1 else Matrix)(values, len(modes))
    if not (hasattr(forward, "A") and hasattr(forward, "A_adjoint")):
        raise TypeError(
            "forward must be a spectrum, a matrix or an object with A and A_adjoint, got "
            f"{type(forward).__name__}"
        )
    return OnFunctions.of(forward, modes, progress)


def matrix_of(operator: LinearOperator, modes: Modes, *, progress: bool = False) -> Tensor:
    """The matrix (M, J) of an operator on functions, for the exact posterior preconditioner.

    Raises:
        ValueError: more than 4,096 modes.
    """
    if len(modes) > LARGEST:
        raise ValueError(f"modes: a matrix of {len(modes)} is not formed, {LARGEST} are the most")
    return torch.cat(list(_columns(operator, modes, progress))).mT


def _columns(operator: Any, modes: Modes, progress: bool) -> Any:
    """A v_j in float64, (count, M), for one mode after another."""
    starts = range(0, len(modes), PROBES)
    for start in tqdm(starts, desc="probing the operator", disable=not progress):
        count = min(PROBES, len(modes) - start)
        unit = torch.zeros(count, len(modes), dtype=torch.float64)
        unit[torch.arange(count), start + torch.arange(count)] = 1.0
        yield operator.A(modes.functions(unit)).flatten(1)


def _padded(x: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, size - x.shape[-1]))
