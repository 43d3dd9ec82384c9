"""Linear maps that coefficients of a path are made of.

A scale maps (batch, *event) to (batch, *event). The kinds differ in what they treat alike:

========== ================================================ ========================
kind       the map                                          coefficients
========== ================================================ ========================
`Scalar`   one number                                       () or (batch,)
`Diagonal` a number for every coordinate                    (1 or batch, *event)
`Spectral` a number for every mode of an orthonormal basis  (1 or batch, *modes)
`Split`    a number for the range of A^+, another for the   (2,) or (batch, 2)
           null space of A
`Block`    a 2x2 matrix for position and momentum           (2, 2) or (batch, 2, 2)
========== ================================================ ========================

Scales of a kind can be added, multiplied (``S @ other``), inverted and factored, and a `Scalar`
goes with every kind, so that a formula written with scales holds for all. Of one kind, all but
`Block` commute.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from operator import add
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from fluvial.core.protocols import LinearOperator, left_broadcast

K = TypeVar("K", bound="Kind")


class Kind:
    """What the kinds of scales share: the algebra of their coefficients."""

    __array_ufunc__ = None  # an array times a scale is the scale's to work out

    @property
    def coefficients(self) -> Any:
        raise NotImplementedError

    def with_coefficients(self: K, coefficients: Any) -> K:
        """A scale of this kind, basis and operator with other coefficients."""
        raise NotImplementedError

    @staticmethod
    def multiply(a: Any, b: Any) -> Any:
        """The coefficients of a product."""
        return a * b

    def spread(self, number: Any) -> Any:
        """``number``, () or (batch,), shaped to multiply the coefficients."""
        return left_broadcast(number, self.coefficients) if isinstance(number, Tensor) else number

    def identity(self: K) -> K:
        return self.with_coefficients(torch.ones_like(self.coefficients))

    def apply(self, x: Tensor) -> Tensor:
        """``S @ x``."""
        raise NotImplementedError

    @property
    def T(self: K) -> K:
        """The adjoint."""
        return self

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, Tensor):
            return self.apply(other)
        if type(self) is not type(other):
            if isinstance(self, Scalar) and isinstance(other, Kind):
                return self.value * other
            if isinstance(other, Scalar):
                return other.value * self
        a, b = _of_one_kind(self, other)
        return a.with_coefficients(a.multiply(a.coefficients, b.coefficients))

    def __rmul__(self: K, number: Any) -> K:
        return self.with_coefficients(self.spread(number) * self.coefficients)

    def __add__(self, other: Any) -> Any:
        if type(self) is not type(other):
            if isinstance(self, Scalar) and isinstance(other, Kind):
                return other + self
            if isinstance(other, Scalar):
                return self + other.value * self.identity()
        a, b = _of_one_kind(self, other)
        return a.with_coefficients(a.coefficients + b.coefficients)

    def __sub__(self, other: Any) -> Any:
        return self + -1 * other

    def __rsub__(self: K, number: float) -> K:
        return number * self.identity() + -1 * self

    def inverse(self: K) -> K:
        """The pseudo-inverse: 1 over each coefficient, 0 where it is 0."""
        values = self.coefficients
        zero = values == 0
        return self.with_coefficients(torch.where(zero, 0.0, 1 / torch.where(zero, 1.0, values)))

    def cholesky(self: K) -> K:
        """A root R of a scale without negative eigenvalues, S = R R^T. Those below 0 count as 0."""
        return self.with_coefficients(self.coefficients.clamp(min=0).sqrt())

    def solve(self, x: Tensor) -> Tensor:
        """The pseudo-inverse applied to ``x``."""
        return self.inverse().apply(x)


def _of_one_kind(a: Any, b: Any) -> tuple[Any, Any]:
    if type(a) is not type(b):
        raise TypeError(
            f"a {type(a).__name__} goes with its own kind and with Scalar, got {type(b).__name__}"
        )
    if isinstance(a, Spectral) and a.basis is not b.basis and a.basis != b.basis:
        raise ValueError(f"two spectral scales must share a basis, got {a.basis} and {b.basis}")
    if isinstance(a, Split) and a.operator is not b.operator:
        raise ValueError(
            "two split scales must share an operator, the same object, got "
            f"{type(a.operator).__name__} and {type(b.operator).__name__}"
        )
    return a._beside(b) if isinstance(a, Block) else (a, b)


def mix(*terms: tuple[Any, Tensor]) -> Tensor:
    """The sum of S @ x over ``terms`` (S, x), in as few passes over x as there can be.

    `Spectral` scales of a basis share one inverse transform, `Split` ones of an operator one
    projection.
    """
    groups: dict[type, list[tuple[Any, Tensor]]] = {}
    for scale, x in terms:
        groups.setdefault(type(scale), []).append((scale, x))
    parts = []
    for kind, group in groups.items():
        if kind in (Spectral, Split, Block):
            for scale, _ in group[1:]:
                _of_one_kind(group[0][0], scale)
            parts.append(kind._mix(group))
        else:
            parts += [scale @ x for scale, x in group]
    return functools.reduce(add, parts)


@dataclass(frozen=True, eq=False)
class Scalar(Kind):
    """``value`` times the identity. ``value``: () or (batch,). Products have the dtype of ``x``."""

    value: Tensor

    @property
    def coefficients(self) -> Tensor:
        return self.value

    def with_coefficients(self, coefficients: Tensor) -> Scalar:
        return Scalar(coefficients)

    def apply(self, x: Tensor) -> Tensor:
        # A value of shape () never decides the dtype of a product, and may stay on the host.
        value = self.value
        return left_broadcast(value.to(x) if value.ndim else value, x) * x

    def logdet(self, x: Tensor) -> Tensor:
        """d log|value| with d the number of coordinates of one event of ``x``; (batch,)."""
        size = math.prod(x.shape[1:])
        return (size * self.value.abs().log()).to(x).expand(x.shape[0])


@dataclass(frozen=True, eq=False)
class Diagonal(Kind):
    """``values`` (1 or batch, *event) times the state. Products have the dtype of ``x``.

    Sizes of 1 in ``values`` are shared: (1, channels, 1, 1) is a number for each channel.

    Raises:
        ValueError: when applied to a state of another shape.
    """

    values: Tensor

    @property
    def coefficients(self) -> Tensor:
        return self.values

    def with_coefficients(self, coefficients: Tensor) -> Diagonal:
        return Diagonal(coefficients)

    def apply(self, x: Tensor) -> Tensor:
        _check_fits(self.values, x.shape, "a diagonal scale")
        return self.values.to(x) * x

    def logdet(self, x: Tensor) -> Tensor:
        """The sum of log|value| over the coordinates of one event of ``x``; (batch,)."""
        _check_fits(self.values, x.shape, "a diagonal scale")
        return self.values.abs().log().expand(x.shape).flatten(1).sum(1).to(x)


class Basis(Protocol):
    """An orthonormal basis of real events. ``weights`` is how many real modes a coefficient is."""

    def forward(self, x: Tensor) -> Tensor: ...
    def inverse(self, coefficients: Tensor) -> Tensor: ...
    @property
    def weights(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Spectral(Kind):
    """V diag(``values``) V^T with V the modes of ``basis``; values are (1 or batch, *modes).

    In the `Fourier` basis a value may be complex; that at -k must be the conjugate of that at k,
    as it is for the transform of a real kernel.

    Raises:
        ValueError: when applied to a state whose coefficients have another shape, or two bases meet
            in a sum or a product.
    """

    basis: Basis
    values: Tensor

    @property
    def coefficients(self) -> Tensor:
        return self.values

    def with_coefficients(self, coefficients: Tensor) -> Spectral:
        return replace(self, values=coefficients)

    @property
    def T(self) -> Spectral:
        return replace(self, values=self.values.conj()) if self.values.is_complex() else self

    def cholesky(self) -> Spectral:
        if self.values.is_complex():
            raise ValueError("a Spectral scale with complex values has no real root")
        return super().cholesky()

    def apply(self, x: Tensor) -> Tensor:
        return self.basis.inverse(self._weigh(x)).to(x.dtype)

    @staticmethod
    def _mix(terms: list[tuple[Spectral, Tensor]]) -> Tensor:
        total = functools.reduce(add, [s._weigh(x) for s, x in terms])
        return terms[0][0].basis.inverse(total).to(terms[0][1].dtype)

    def _weigh(self, x: Tensor) -> Tensor:
        modes = self.basis.forward(x)
        _check_fits(self.values, modes.shape, "a spectral scale, whose state has modes of shape")
        dtype = modes.dtype if self.values.is_complex() else modes.real.dtype
        return self.values.to(modes.device, dtype) * modes

    def logdet(self, x: Tensor) -> Tensor:
        """The sum of log|value| over the modes of one event of ``x``; (batch,)."""
        shape = self.basis.forward(x[:1]).shape
        values = self.values.abs().log().expand(len(x), *shape[1:])
        return (values * self.basis.weights.to(values)).flatten(1).sum(1).to(x)


@dataclass(frozen=True, eq=False)
class Split(Kind):
    """inside P + outside (I - P) with P = A^+ A, the projector on what ``operator`` measures.

    ``values``: (2,) or (batch, 2), the numbers inside and outside. A x stays as it is where the
    number inside is 1. The pseudo-inverse of the operator must be one, so that P is a projector;
    `fluvial.core.operators.base.check_operator` says whether it is.

    Raises:
        ValueError: ``values`` has another shape, or two operators meet in a sum or a product.
    """

    operator: LinearOperator
    values: Tensor

    def __post_init__(self) -> None:
        if self.values.shape[-1:] != (2,) or self.values.ndim > 2:
            raise ValueError(
                f"values must have shape (2,) or (batch, 2), got {tuple(self.values.shape)}"
            )

    @property
    def coefficients(self) -> Tensor:
        return self.values

    def with_coefficients(self, coefficients: Tensor) -> Split:
        return replace(self, values=coefficients)

    def spread(self, number: Any) -> Any:
        return number.unsqueeze(-1) if isinstance(number, Tensor) else number

    def apply(self, x: Tensor) -> Tensor:
        return Split._mix([(self, x)])

    @staticmethod
    def _mix(terms: list[tuple[Split, Tensor]]) -> Tensor:
        outside = [Scalar(s.values[..., 1]) @ x for s, x in terms]
        extra = [Scalar(s.values[..., 0] - s.values[..., 1]) @ x for s, x in terms]
        total = functools.reduce(add, extra)
        return functools.reduce(add, outside) + project(terms[0][0].operator, total)

    def logdet(self, x: Tensor) -> Tensor:
        """r log|inside| + (d - r) log|outside|, r the rank of the operator; (batch,).

        Raises:
            TypeError: the operator does not know its rank.
        """
        rank = getattr(self.operator, "rank", None)
        if rank is None:
            raise TypeError(f"{type(self.operator).__name__} does not know its rank")
        inside, outside = self.values.abs().unbind(-1)
        rank = torch.as_tensor(rank, dtype=inside.dtype, device=inside.device)
        rest = math.prod(x.shape[1:]) - rank
        # 0 log 0 is 0 where one of the two spaces is empty
        return (rank.xlogy(inside) + rest.xlogy(outside)).to(x).expand(x.shape[0])


def project(operator: LinearOperator, x: Tensor) -> Tensor:
    """A^+ A x: what the operator measures of ``x``. By ``operator.project`` where it has one."""
    short = getattr(operator, "project", None)
    return cast(Tensor, operator.A_dagger(operator.A(x)) if short is None else short(x))


class Block(Kind):
    """A 2x2 matrix that mixes dimension 1 of (batch, 2, *rest), such as position and momentum.

    ``matrix``: (2, 2) or (batch, 2, 2). Products have the dtype of ``x``. An array stays one until
    it meets a tensor: of 4 numbers, NumPy has computed what torch has not begun.
    """

    @staticmethod
    def multiply(a: Any, b: Any) -> Any:
        return a @ b

    def __init__(self, matrix: Tensor | np.ndarray) -> None:
        if matrix.shape[-2:] != (2, 2) or matrix.ndim > 3:
            raise ValueError(
                f"matrix must have shape (2, 2) or (batch, 2, 2), got {tuple(matrix.shape)}"
            )
        self._matrix = matrix

    @property
    def matrix(self) -> Tensor:
        m = self._matrix
        return m if isinstance(m, Tensor) else torch.from_numpy(m)

    @property
    def coefficients(self) -> Any:
        return self._matrix

    def identity(self) -> Block:
        return Block(np.eye(2))

    def with_coefficients(self, coefficients: Any) -> Block:
        return Block(coefficients)

    def spread(self, number: Any) -> Any:
        return number[..., None, None] if getattr(number, "ndim", 0) else number

    def __rmul__(self, number: Any) -> Block:
        matrix = self._matrix
        if isinstance(number, Tensor):
            matrix = self.matrix.to(number.device) if number.ndim else self.matrix
        return Block(self.spread(number) * matrix)

    def _beside(self, other: Block) -> tuple[Block, Block]:
        """The two with coefficients that go together, on the device of the one that is not here."""
        if isinstance(self._matrix, np.ndarray) and isinstance(other._matrix, np.ndarray):
            return self, other
        a, b = self.matrix, other.matrix
        there, dtype = b if a.device.type == "cpu" else a, torch.promote_types(a.dtype, b.dtype)
        return Block(a.to(there.device, dtype)), Block(b.to(there.device, dtype))

    @property
    def T(self) -> Block:
        return Block(self.coefficients.swapaxes(-1, -2))

    def apply(self, x: Tensor) -> Tensor:
        return Block._mix([(self, x)])

    @staticmethod
    def _mix(terms: list[tuple[Block, Tensor]]) -> Tensor:
        first = terms[0][1]
        matrices, states = [], []
        for scale, x in terms:
            _check_pair(x)
            matrices.append(
                scale.matrix.to(x).expand(-1 if scale.matrix.ndim > 2 else len(x), 2, 2)
            )
            states.append(x.unsqueeze(-1).flatten(2))
        with torch.autocast(first.device.type, enabled=False):  # which would halve the precision
            return torch.bmm(torch.cat(matrices, -1), torch.cat(states, 1)).reshape(first.shape)

    def inverse(self) -> Block:
        """The pseudo-inverse; where det is below rounding error the matrix counts as of rank one.

        Of rank two it is the adjugate over det, of rank one the transpose over the sum of squares.
        """
        m, lib = self._matrix, _library(self._matrix)
        (a, b), (c, d) = (m[..., 0, 0], m[..., 0, 1]), (m[..., 1, 0], m[..., 1, 1])
        det, squares = a * d - b * c, a * a + b * b + c * c + d * d
        full = abs(det) > 4 * lib.finfo(m.dtype).eps * squares
        lower = lib.where(full, det, squares)
        back = 1 / lib.where(lower == 0, 1.0, lower)
        upper = (d, a), (-b, c), (-c, b), (a, d)
        return _block(*[lib.where(full, two, one) * back for two, one in upper])

    def cholesky(self) -> Block:
        """The lower triangular root; a negative pivot counts as 0."""
        m, lib = self._matrix, _library(self._matrix)
        a, c, d = m[..., 0, 0], m[..., 1, 0], m[..., 1, 1]
        top = lib.where(a > 0, a, 0.0) ** 0.5
        side = c / lib.where(top > 0, top, lib.inf)
        rest = d - side * side
        return _block(top, 0 * top, side, lib.where(rest > 0, rest, 0.0) ** 0.5)

    def logdet(self, x: Tensor) -> Tensor:
        """(d / 2) log|det matrix| with d the number of coordinates of one event; (batch,)."""
        _check_pair(x)
        size = math.prod(x.shape[2:])
        return (size * torch.linalg.det(self.matrix).abs().log()).to(x).expand(x.shape[0])


def _library(x: Any) -> Any:
    return torch if isinstance(x, Tensor) else np


def _block(*entries: Any) -> Block:
    if isinstance(entries[0], Tensor):
        return Block(torch.stack(entries, -1).unflatten(-1, (2, 2)))
    matrix = np.empty((*entries[0].shape, 2, 2))
    for k, entry in enumerate(entries):
        matrix[..., k // 2, k % 2] = entry
    return Block(matrix)


def _check_pair(x: Tensor) -> None:
    if x.ndim < 2 or x.shape[1] != 2:
        raise ValueError(f"a block scale acts on (batch, 2, *rest), got {tuple(x.shape)}")


def _check_fits(values: Tensor, shape: torch.Size, what: str) -> None:
    if values.ndim != len(shape) or any(
        v not in (1, n) for v, n in zip(values.shape, shape, strict=True)
    ):
        raise ValueError(f"values {tuple(values.shape)} do not fit {what} of {tuple(shape)}")


# Orthonormal bases, over the last dimensions of a state


@dataclass(frozen=True)
class Fourier:
    """exp(2 pi i k x / n): periodic. Coefficients are the half-spectrum of `torch.fft.rfftn`.

    Args:
        shape: of the last dimensions of the state.
    """

    shape: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfftn(x, dim=_dims(x, self.shape), norm="ortho")

    def inverse(self, coefficients: Tensor) -> Tensor:
        dims = tuple(range(-len(self.shape), 0))
        return torch.fft.irfftn(coefficients, self.shape, dim=dims, norm="ortho")

    @property
    def weights(self) -> Tensor:
        """1 for the columns that are their own conjugates, 2 elsewhere."""
        width = self.shape[-1]
        weights = torch.full((width // 2 + 1,), 2.0, dtype=torch.float64)
        weights[[0, -1] if width % 2 == 0 else [0]] = 1.0
        return weights

    def laplacian(self) -> Tensor:
        """Eigenvalues of minus the Laplacian of the periodic unit interval or cube, float64."""
        axes = [torch.fft.fftfreq(n, 1 / n, dtype=torch.float64) for n in self.shape]
        axes[-1] = torch.fft.rfftfreq(self.shape[-1], 1 / self.shape[-1], dtype=torch.float64)
        return _sum_of_squares([2 * math.pi * k for k in axes])


@dataclass(frozen=True)
class Cosine:
    """cos(pi k (i + 1/2) / n), k = 0 .. n - 1: the DCT-II, no flux across the boundary.

    By one complex transform of n numbers in an axis (Makhoul, IEEE Trans. ASSP 1980).

    Args:
        shape: of the last dimensions of the state.
    """

    shape: tuple[int, ...]

    weights = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        for dim in _dims(x, self.shape):
            x = _dct(x.movedim(dim, -1)).movedim(-1, dim)
        return x

    def inverse(self, coefficients: Tensor) -> Tensor:
        for dim in _dims(coefficients, self.shape):
            coefficients = _idct(coefficients.movedim(dim, -1)).movedim(-1, dim)
        return coefficients

    def laplacian(self) -> Tensor:
        """Eigenvalues of minus the Laplacian of the unit interval or cube, float64."""
        return _sum_of_squares([math.pi * torch.arange(n).double() for n in self.shape])


@dataclass(frozen=True)
class Sine:
    """sin(pi k i / (n + 1)), i, k = 1 .. n: the DST-I, 0 at the boundary. Its own inverse.

    Args:
        shape: of the last dimensions of the state.
    """

    shape: tuple[int, ...]

    weights = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        for dim in _dims(x, self.shape):
            x = _dst(x.movedim(dim, -1)).movedim(-1, dim)
        return x

    inverse = forward

    def laplacian(self) -> Tensor:
        """Eigenvalues of minus the Laplacian of the unit interval or cube, float64."""
        return _sum_of_squares([math.pi * torch.arange(1, n + 1).double() for n in self.shape])


def _dims(x: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    if tuple(x.shape[1:][-len(shape) :]) != tuple(shape):
        raise ValueError(f"the basis is one of {shape}, got a state of {tuple(x.shape)}")
    return tuple(range(-len(shape), 0))


def _sum_of_squares(axes: list[Tensor]) -> Tensor:
    return functools.reduce(add, torch.meshgrid(*[a.square() for a in axes], indexing="ij"))


def _turn(x: Tensor) -> tuple[Tensor, Tensor]:
    """exp(-i pi k / 2n) and the norm of the mode k, as (n,)."""
    n = x.shape[-1]
    angle = torch.arange(n, dtype=x.dtype, device=x.device) * (-math.pi / (2 * n))
    norm = torch.full_like(angle, math.sqrt(2 / n))
    norm[0] = math.sqrt(1 / n)
    return torch.polar(torch.ones_like(angle), angle), norm


def _order(x: Tensor) -> Tensor:
    """0, 2, 4, ..., 5, 3, 1."""
    index = torch.arange(x.shape[-1], device=x.device)
    return torch.cat([index[::2], index[1::2].flip(0)])


def _dct(x: Tensor) -> Tensor:
    turn, norm = _turn(x)
    return (torch.fft.fft(x[..., _order(x)]) * turn).real * norm


def _idct(x: Tensor) -> Tensor:
    turn, norm = _turn(x)
    x, half = x / norm, x.shape[-1] // 2
    mirrored = torch.nn.functional.pad(x.flip(-1)[..., :half], (1, 0))
    spectrum = torch.complex(x[..., : half + 1], -mirrored) * turn[: half + 1].conj()
    return torch.fft.irfft(spectrum, x.shape[-1])[..., _order(x).argsort()]


def _dst(x: Tensor) -> Tensor:
    n = x.shape[-1]
    edge = torch.zeros_like(x[..., :1])
    odd = torch.cat([edge, x, edge, -x.flip(-1)], -1)
    return torch.fft.rfft(odd).imag[..., 1 : n + 1] * -math.sqrt(1 / (2 * (n + 1)))
