"""What the operators share, products and sums of any `LinearOperator`, and a check of one.

An operator maps events of ``in_shape`` to measurements of ``out_shape``, in the dtype and on the
device of what it is given, which must be floating. Its parameters have a leading dimension: of
size 1 they are those of every row, else each row has its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.core.operators.iterative import Map, least_squares
from fluvial.core.protocols import LinearOperator

PseudoInverse: TypeAlias = Literal["exact", "truncated", "iterative"]
Shape: TypeAlias = tuple[int, ...]


class Operator(ABC):
    """A linear map of rows, with shapes that are checked.

    Attributes:
        in_shape, out_shape: of one event and of its measurement; None where a part of a product or
            a sum does not say.
        rows: 1 if all rows have one map, else how many have maps of their own.
        pseudo_inverse: what `A_dagger` is. ``"exact"``: to rounding. ``"truncated"``: of the
            operator without its singular values of at most ``cutoff`` times the largest, so that
            A^+ A is the projector on the rest. ``"iterative"``: by conjugate gradients, until the
            residual of A^T A x = A^T y is ``tolerance`` times A^T y.
        cutoff: of a truncated one; else 0.
        tolerance: of an iterative one; else 0.
        iterations: of an iterative one, at most: a warning says where more are needed.
    """

    in_shape: Shape | None
    out_shape: Shape | None
    rows: int = 1
    pseudo_inverse: PseudoInverse = "exact"
    cutoff: float = 0.0
    tolerance: float = 0.0
    iterations: int = 0
    widens: ClassVar[bool] = False

    def A(self, x: Tensor) -> Tensor:
        """(batch, *in_shape) to (batch, *out_shape)."""
        return self._apply(self._forward, "x", x, self.in_shape, self.out_shape)

    def A_adjoint(self, y: Tensor) -> Tensor:
        """A^T y, (batch, *out_shape) to (batch, *in_shape)."""
        return self._apply(self._adjoint, "y", y, self.out_shape, self.in_shape)

    def A_dagger(self, y: Tensor) -> Tensor:
        """A^+ y: of all x with the least |A x - y|, the shortest."""
        return self._apply(self._dagger, "y", y, self.out_shape, self.in_shape)

    def project(self, x: Tensor) -> Tensor:
        """A^+ A x."""
        return self.A_dagger(self.A(x))

    @property
    def spectrum(self) -> Tensor | None:
        """Singular values of the map of one event, (rows, k); None where they are not known.

        Those that are not listed are 0.
        """
        return None

    @property
    def rank(self) -> Tensor | None:
        """How many dimensions `project` keeps, (rows,); None without a spectrum."""
        values = self.spectrum
        if values is None:
            return None
        floor = max(self.cutoff, values.shape[-1] * torch.finfo(values.dtype).eps)
        return (values > floor * values.amax(-1, keepdim=True)).sum(-1)

    @abstractmethod
    def _forward(self, x: Tensor, /) -> Tensor: ...
    @abstractmethod
    def _adjoint(self, y: Tensor, /) -> Tensor: ...

    def _dagger(self, y: Tensor, /) -> Tensor:
        return least_squares(self._forward, self._adjoint, y, self.tolerance, self.iterations)

    def __matmul__(self, inner: LinearOperator) -> Product:
        return Product(self, inner)

    def __add__(self, other: LinearOperator) -> Sum:
        return Sum(self, other)

    def _apply(
        self, inner: Map, name: str, x: Tensor, shape: Shape | None, result: Shape | None
    ) -> Tensor:
        """``inner`` of what is checked: no rows are none, and half precision is widened for those
        that Fourier transforms and sparse products serve, which do not know it."""
        self._check(name, x, shape)
        if len(x) == 0 and result is not None:
            return x.new_zeros(0, *result)
        if self.widens and x.dtype.itemsize < 4:
            return inner(x.float()).to(x.dtype)
        return inner(x)

    def _check(self, name: str, x: Tensor, shape: Shape | None) -> None:
        # of integers, the operator's own numbers would be cut to integers
        if not x.is_floating_point():
            raise TypeError(f"{name} must be floating for {type(self).__name__}, got {x.dtype}")
        if shape is None:
            return
        if x.shape[1:] != shape or (self.rows != 1 and len(x) != self.rows):
            wanted = ("batch" if self.rows == 1 else self.rows, *shape)
            raise ValueError(
                f"{name} must be ({', '.join(map(str, wanted))}) for {type(self).__name__}, got "
                f"{tuple(x.shape)}"
            )

    def _like(self, name: str, x: Tensor) -> Any:
        """The constant ``name`` in the dtype and on the device of ``x``, converted once."""
        value: Tensor = getattr(self, name)
        dtype = value.dtype
        if dtype.is_floating_point or dtype.is_complex:
            dtype = x.dtype.to_complex() if dtype.is_complex else x.dtype
        if value.dtype == dtype and value.device == x.device:
            return value
        cache = self.__dict__.setdefault("_converted", {})
        key = name, dtype, x.device
        if key not in cache:
            converted = value.to(x.device, dtype)
            try:
                converted.data_ptr()
            except RuntimeError:  # made inside a transformation of torch.func, and ends with it
                return converted
            if converted.requires_grad:
                return converted
            cache[key] = converted
        return cache[key]


class Iterative(Operator):
    """What products and sums share: shapes and rows of the parts, and how long to iterate."""

    pseudo_inverse: PseudoInverse = "iterative"
    widens = True  # half precision is too little for the iterations

    def _iterate(self, tolerance: float, iterations: int) -> None:
        if not (0 < tolerance < 1 and iterations >= 1):
            raise ValueError(
                "tolerance must lie in (0, 1) and iterations be at least 1, got "
                f"{tolerance} and {iterations}"
            )
        self.tolerance, self.iterations = tolerance, iterations


def _common_rows(*parts: Any) -> int:
    rows = {getattr(part, "rows", 1) for part in parts} - {1}
    if len(rows) > 1:
        raise ValueError(f"operators must be of as many rows, got {sorted(rows)}")
    return int(rows.pop()) if rows else 1


class Product(Iterative):
    """A x = outer.A(inner.A(x)); also written ``outer @ inner``. Its pseudo-inverse is iterative.

    Args:
        outer, inner: any `LinearOperator`.
        tolerance, iterations: of the pseudo-inverse, see `Operator`.

    Raises:
        ValueError: the shapes or the rows of the two do not fit, ``tolerance`` is outside (0, 1),
            or ``iterations`` below 1.
    """

    def __init__(
        self,
        outer: LinearOperator,
        inner: LinearOperator,
        tolerance: float = 1e-6,
        iterations: int = 500,
    ) -> None:
        before, after = getattr(inner, "out_shape", None), getattr(outer, "in_shape", None)
        if before != after and None not in (before, after):
            raise ValueError(f"outer takes {after}, but inner measures {before}")
        self.outer, self.inner, self.rows = outer, inner, _common_rows(outer, inner)
        self.in_shape = getattr(inner, "in_shape", None)
        self.out_shape = getattr(outer, "out_shape", None)
        self._iterate(tolerance, iterations)

    def _forward(self, x: Tensor) -> Tensor:
        return self.outer.A(self.inner.A(x))

    def _adjoint(self, y: Tensor) -> Tensor:
        return self.inner.A_adjoint(self.outer.A_adjoint(y))


class Sum(Iterative):
    """A x = first.A(x) + second.A(x); also written ``first + second``. Else as `Product`."""

    def __init__(
        self,
        first: LinearOperator,
        second: LinearOperator,
        tolerance: float = 1e-6,
        iterations: int = 500,
    ) -> None:
        for name in ("in_shape", "out_shape"):
            one, two = getattr(first, name, None), getattr(second, name, None)
            if one != two and None not in (one, two):
                raise ValueError(f"both must have one {name}, got {one} and {two}")
            setattr(self, name, two if one is None else one)
        self.first, self.second, self.rows = first, second, _common_rows(first, second)
        self._iterate(tolerance, iterations)

    def _forward(self, x: Tensor) -> Tensor:
        return self.first.A(x) + self.second.A(x)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self.first.A_adjoint(y) + self.second.A_adjoint(y)


def check_operator(operator: LinearOperator, like: Tensor, tolerance: float = 1e-5) -> None:
    """Raise unless adjoint and pseudo-inverse are what they say, on random vectors.

    <A x, y> = <x, A^T y>; A^+ A A^+ = A^+; A^+ A and A A^+ symmetric, so that A^+ A is an
    orthogonal projector. That A A^+ A = A is not asked for, as it does not hold of a truncated one.
    How far one that is iterative is from a projector depends on the condition of A; of it is asked
    what it promises, |A^T (A A^+ y - y)| within twice its own tolerance of |A^T y|.

    Args:
        operator: any.
        like: (batch, *event), of the shape, dtype and device that it takes.
        tolerance: relative.

    Raises:
        ValueError: one of them is further off.
    """
    noise = KeyedNoise(0)
    u, v = noise.normal(like, "u"), noise.normal(like, "v")
    a = operator.A(u)
    y, z = noise.normal(a, "y"), noise.normal(a, "z")

    def inner(one: Tensor, two: Tensor) -> Tensor:
        return (one * two).flatten(1).sum(1)

    def refuse(what: str, error: Tensor, most: float) -> None:
        if not float(error) <= most:
            raise ValueError(f"{what} of {type(operator).__name__}: off by {float(error):.1e}")

    tiny = torch.finfo(like.dtype).tiny
    pairs = {
        "A_adjoint is not the adjoint of A": (
            inner(a, y),
            inner(u, operator.A_adjoint(y)),
            inner(a, a) * inner(y, y),
        )
    }
    back, own = operator.A_dagger(y), getattr(operator, "tolerance", 0.0)
    if own:
        wanted = operator.A_adjoint(y)
        left = operator.A_adjoint(operator.A(back)) - wanted
        error = (inner(left, left) / inner(wanted, wanted).clamp(min=tiny)).amax().sqrt()
        refuse("A_dagger does not solve A^T A x = A^T y", error, 2 * own + tolerance)
    else:
        forth = operator.A_dagger(z)
        pairs |= {
            "A_dagger A A_dagger is not A_dagger": (
                inner(operator.A_dagger(operator.A(back)), u),
                inner(back, u),
                inner(back, back) * inner(u, u),
            ),
            "A_dagger A is no orthogonal projector": (
                inner(operator.A_dagger(a), v),
                inner(u, operator.A_dagger(operator.A(v))),
                inner(u, u) * inner(v, v),
            ),
            "A A_dagger is no orthogonal projector": (
                inner(operator.A(back), z),
                inner(y, operator.A(forth)),
                inner(y, y) * inner(z, z),
            ),
        }
    for what, (one, two, scale) in pairs.items():
        refuse(what, ((one - two).abs() / scale.clamp(min=tiny).sqrt()).amax(), tolerance)


def rows_and_shape(name: str, values: Tensor, in_shape: Shape | None) -> tuple[int, Shape]:
    """(rows, event shape) of values (1 or batch, *event), whose sizes of 1 may be shared.

    Raises:
        ValueError: the values have no leading dimension, no entries, or do not fit ``in_shape``.
    """
    if values.ndim < 2 or values.numel() == 0:
        raise ValueError(
            f"{name} must be (1 or batch, *event), not empty, got {tuple(values.shape)}"
        )
    shape = tuple(values.shape[1:]) if in_shape is None else tuple(in_shape)
    if len(shape) != values.ndim - 1 or any(
        v not in (1, n) for v, n in zip(values.shape[1:], shape, strict=True)
    ):
        raise ValueError(f"{name} {tuple(values.shape[1:])} does not fit in_shape {shape}")
    return len(values), shape


def modes(values: Tensor, size: int) -> Tensor:
    """(rows, k) singular values, each ``size / k`` times."""
    flat = values.flatten(1)
    return flat.repeat(1, size // flat.shape[1])


def check_cutoff(cutoff: float) -> float:
    if not 0 <= cutoff < 1:
        raise ValueError(f"cutoff must lie in [0, 1), got {cutoff}")
    return cutoff
