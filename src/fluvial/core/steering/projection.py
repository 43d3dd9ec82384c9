"""Hard constraints h(u) = 0: what they are, the step towards them, and the nearest point on them.

A `Constraint` is a stack of parts. `Pins` are values of single coordinates: they are eliminated in
closed form. `Rows` are any differentiable equations; where they say which coordinates each of them
reads (their ``pattern``), the Jacobian J is found by as many backward passes as the equations have
colours, rows of one colour sharing no coordinate, and J J^T is factored as a sparse matrix, all
events of a batch at once. Rows without a pattern have a dense Jacobian while there are few of them,
and else none at all: the step is found by conjugate gradients on products with J and J^T.

From a base point x and the linearisation at u, the step is

    u <- x - J^T (J J^T + damp I)^-1 [h(u) + J (x - u)],

the point of the linearised manifold next to x. With x = u at every step this is Gauss and Newton's
method (``"root"``); with x held fixed it is sequential quadratic programming (``"sqp"``), whose
fixed point is a point of the manifold with x - u in the range of J^T: a nearest one. One step of
either is the same.

Without damping the inverse is the pseudo-inverse: dependent equations do no harm, and of equations
that contradict each other the step goes to the least-squares solution. (The matrix is factored with
a shift of 1e-11 of its largest diagonal entry, which is removed by refinement.) All is computed in
double precision.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.linalg import splu
from torch import Tensor

from fluvial.core.operators.iterative import conjugate_gradients
from fluvial.core.protocols import Run, State, Steering

Method: TypeAlias = Literal["sqp", "root"]
DENSE = 512
"""Rows without a pattern, up to which their Jacobian is formed."""
COLOURS = 62
"""Rows that need more colours are treated as if their pattern were not known."""
SHIFT = 1e-11
"""Of the factored matrix, as a share of its largest diagonal entry, where there is no damping."""
REFINEMENTS, ROUNDS = 30, 5
HALVINGS = 12
"""Of a step of Gauss and Newton's method, in search of a smaller residual."""
ITERATIONS, TOLERANCE = 500, 1e-12
"""Of conjugate gradients: most of them, and the relative residual at which they end."""


@dataclass(frozen=True, eq=False)
class Pins:
    """Values of single coordinates: h = u[index] - values.

    Args:
        index: (p,) int64, flat indices into an event.
        values: (p,), or (rows, p) with one row an event of the batch.
        name: of the equations in `Constraint.named`.
    """

    index: Tensor
    values: Tensor
    name: str = "values"

    @property
    def count(self) -> int:
        return len(self.index)

    def residual(self, u: Tensor) -> Tensor:
        return u.flatten(1)[:, self.index.to(u.device)] - self.values.to(u)


@dataclass(frozen=True, eq=False)
class Rows:
    """Equations given by a differentiable function.

    Args:
        function: (batch, *shape) to (batch, count); each event on its own.
        count: equations.
        pattern: (2, nnz) int64, equation and flat coordinate of every entry of the Jacobian that
            may differ from 0; None where that is not known.
        linear: the Jacobian is the same everywhere, and is found and factored once.
        cumulative: the residual is the running sum of the equations: a balance since the start,
            while the function gives that of every step, which reads two steps only. The manifold,
            and the step towards it, are the same.
        name: of the equations in `Constraint.named`.
    """

    function: Callable[[Tensor], Tensor]
    count: int
    pattern: Tensor | None = None
    linear: bool = False
    cumulative: bool = False
    name: str = "equations"

    def residual(self, u: Tensor) -> Tensor:
        h = self.function(u)
        return h.cumsum(1) if self.cumulative else h

    @cached_property
    def colours(self) -> np.ndarray | None:
        """(count,) a colour for each row, such that rows of one colour share no coordinate; None
        where that is not known, or more than `COLOURS` are needed."""
        if self.pattern is None:
            return None
        row, column = self.pattern.cpu().numpy()
        order = np.argsort(row, kind="stable")
        parts = np.split(column[order], np.cumsum(np.bincount(row, minlength=self.count))[:-1])
        taken = np.zeros(int(column.max(initial=0)) + 1, dtype=np.int64)  # colours as bits
        colours = np.zeros(self.count, dtype=np.int64)
        for k, columns in enumerate(parts):
            used = int(np.bitwise_or.reduce(taken[columns])) if len(columns) else 0
            free = (~used & (used + 1)).bit_length() - 1
            if free >= COLOURS:
                return None
            colours[k] = free
            taken[columns] |= 1 << free
        return colours


Part: TypeAlias = Pins | Rows


class Constraint:
    """Equations h(u) = 0 for events of one shape.

    Args:
        shape: of an event.
        parts: `Pins` and `Rows`, in the order of the residual.

    Raises:
        ValueError: an index or a pattern outside the event, values of another number or not finite,
            a function of another shape, one that cannot be differentiated, or more equations than
            coordinates.
        TypeError: an index that is not int64.
    """

    def __init__(self, shape: Sequence[int], parts: Sequence[Part] = ()) -> None:
        self.shape = tuple(int(side) for side in shape)
        self.parts = tuple(parts)
        self.size = math.prod(self.shape)
        self.count = sum(part.count for part in self.parts)
        for part in self.parts:
            self._check(part)
        unknowns = self.size - len(self.pinned[0])
        rows = sum(part.count for part in self.rows)
        if rows > unknowns + sum(p.count for p in self.parts if isinstance(p, Pins)):
            raise ValueError(f"parts hold {rows} equations for {unknowns} free coordinates")

    def _check(self, part: Part) -> None:
        if isinstance(part, Pins):
            if part.index.dtype != torch.int64 or part.index.ndim != 1:
                raise TypeError(f"index must be (p,) int64, got {part.index.dtype}")
            if part.count and not 0 <= int(part.index.min()) <= int(part.index.max()) < self.size:
                raise ValueError(f"index must lie in [0, {self.size}), as events are {self.shape}")
            if part.values.shape[-1:] != part.index.shape or part.values.ndim > 2:
                raise ValueError(
                    f"values must be ({part.count},) or (rows, {part.count}), got "
                    f"{tuple(part.values.shape)}"
                )
            if not bool(part.values.isfinite().all()):
                raise ValueError(f"values of {part.name} are not all finite")
            return
        if part.count > self.size:
            raise ValueError(f"{part.name}: {part.count} equations for {self.size} coordinates")
        if part.pattern is not None and part.pattern.numel():
            top = part.pattern.amax(1).tolist()
            if int(part.pattern.min()) < 0 or top[0] >= part.count or top[1] >= self.size:
                raise ValueError(
                    f"pattern of {part.name} must lie in {part.count} equations and {self.size} "
                    f"coordinates, got {top}"
                )
        with torch.enable_grad():
            u = torch.full((1, *self.shape), 0.5, dtype=torch.float64, requires_grad=True)
            h = part.function(u)
        if tuple(h.shape) != (1, part.count):
            raise ValueError(
                f"function of {part.name} must return (batch, {part.count}), got {tuple(h.shape)} "
                "for a batch of 1"
            )
        if part.count and not h.requires_grad:
            raise ValueError(f"function of {part.name} cannot be differentiated by torch")

    def residual(self, u: Tensor) -> Tensor:
        """h(u), (batch, count), part by part; in the dtype of ``u``.

        Raises:
            ValueError: ``u`` is not (batch, *shape).
        """
        self._check_event(u)
        if not self.parts:
            return u.new_zeros(len(u), 0)
        return torch.cat([part.residual(u) for part in self.parts], 1)

    def named(self, u: Tensor) -> dict[str, Tensor]:
        """The residual by the names of the parts, each (batch, equations)."""
        self._check_event(u)
        found: dict[str, list[Tensor]] = {}
        for part in self.parts:
            found.setdefault(part.name, []).append(part.residual(u))
        return {name: torch.cat(parts, 1) for name, parts in found.items()}

    def take(self, rows: Tensor) -> Constraint:
        """The constraint of some events of a batch."""
        return self._with_pins(
            lambda pins: (
                replace(pins, values=pins.values[rows])
                if pins.values.ndim == 2 and len(pins.values) > 1
                else pins
            )
        )

    def rescaled(self, offset: float, scale: float) -> Constraint:
        """The constraint on z of ``u = offset + scale z``."""

        def inner(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda z: function(offset + scale * z)

        if (offset, scale) == (0.0, 1.0):
            return self
        return Constraint(
            self.shape,
            [
                replace(part, values=(part.values.double() - offset) / scale)
                if isinstance(part, Pins)
                else replace(part, function=inner(part.function))
                for part in self.parts
            ],
        )

    @property
    def rows(self) -> tuple[Rows, ...]:
        return tuple(part for part in self.parts if isinstance(part, Rows))

    @property
    def linear(self) -> bool:
        """Whether all equations are."""
        return all(part.linear for part in self.rows)

    @cached_property
    def pinned(self) -> tuple[Tensor, Tensor]:
        """(index (p,), values (1 or rows, p)) of all pins, each coordinate once: of one that is
        pinned several times the mean, which is the least-squares solution."""
        pins = [part for part in self.parts if isinstance(part, Pins)]
        if not pins:
            return torch.empty(0, dtype=torch.int64), torch.empty(1, 0, dtype=torch.float64)
        rows = max(len(torch.atleast_2d(part.values)) for part in pins)
        values = torch.cat(
            [torch.atleast_2d(part.values.double()).expand(rows, -1) for part in pins], 1
        )
        index, place = torch.unique(torch.cat([part.index for part in pins]), return_inverse=True)
        sums = values.new_zeros(rows, len(index)).index_add_(1, place, values)
        return index, sums / torch.bincount(place, minlength=len(index))

    @cached_property
    def system(self) -> _System:
        """How the step is found."""
        rows = self.rows
        if not sum(part.count for part in rows):
            return _System(self)
        if all(part.colours is not None for part in rows):
            return _Sparse(self)
        if sum(part.count for part in rows) <= DENSE:
            return _Dense(self)
        return _Free(self)

    def _with_pins(self, change: Callable[[Pins], Pins]) -> Constraint:
        changed = Constraint.__new__(Constraint)
        changed.shape, changed.size, changed.count = self.shape, self.size, self.count
        changed.parts = tuple(change(p) if isinstance(p, Pins) else p for p in self.parts)
        changed.__dict__["system"] = self.system  # it knows the pins' places, not their values
        return changed

    def _check_event(self, u: Tensor) -> None:
        if tuple(u.shape[1:]) != self.shape:
            raise ValueError(
                f"the constraint is for events of {self.shape}, got {tuple(u.shape[1:])}"
            )


def stack(*constraints: Constraint) -> Constraint:
    """All equations of several constraints on events of one shape.

    Raises:
        ValueError: nothing was given, or shapes differ.
    """
    shapes = {one.shape for one in constraints}
    if len(shapes) != 1:
        raise ValueError(f"constraints must be for events of one shape, got {sorted(shapes)}")
    return Constraint(shapes.pop(), [part for one in constraints for part in one.parts])


def equations(
    function: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    *,
    pattern: Tensor | None = None,
    linear: bool = False,
    name: str = "equations",
) -> Constraint:
    """Any differentiable equations of the user: ``function`` takes (batch, *shape) to (batch, m).

    Args:
        function: acts on each event on its own.
        shape: of an event.
        pattern, linear, name: see `Rows`. `window_pattern` and a sparse matrix's indices are
            patterns.

    Raises:
        ValueError: as `Constraint`.
    """
    with torch.no_grad():
        h = function(torch.full((1, *shape), 0.5, dtype=torch.float64))
    if not isinstance(h, Tensor) or h.ndim != 2 or len(h) != 1:
        raise ValueError(f"function must return (batch, m), got {getattr(h, 'shape', type(h))}")
    return Constraint(shape, [Rows(function, h.shape[1], pattern, linear, False, name)])


def linear_equations(matrix: Tensor, offset: Tensor, shape: Sequence[int]) -> Constraint:
    """A u = b.

    Args:
        matrix: A, (m, size), dense or sparse.
        offset: b, (m,).
        shape: of an event, of ``size`` values.

    Raises:
        ValueError: shapes that do not go together.
    """
    size = math.prod(shape)
    if matrix.ndim != 2 or matrix.shape[1] != size or tuple(offset.shape) != (len(matrix),):
        raise ValueError(
            f"need matrix (m, {size}) and offset (m,), got {tuple(matrix.shape)} and "
            f"{tuple(offset.shape)}"
        )
    entries = (matrix.to_sparse_coo() if matrix.layout == torch.strided else matrix).coalesce()
    (row, column), value = entries.indices(), entries.values()

    def function(u: Tensor) -> Tensor:
        terms = u.flatten(1)[:, column] * value.to(u)
        zeros = u.new_zeros(len(u), len(offset))
        return zeros.index_add(1, row, terms) - offset.to(u)

    return Constraint(
        shape, [Rows(function, len(offset), entries.indices(), linear=True, name="linear")]
    )


# How the step is found. Each class solves for the coordinates that are not pinned.


class _System:
    """The step, of pins alone. Subclasses add the equations.

    It must not read the values of the pins from the constraint it was made with: others share it.
    """

    def __init__(self, constraint: Constraint) -> None:
        self.rows, self.shape, self.size = constraint.rows, constraint.shape, constraint.size
        self.index = constraint.pinned[0]
        free = torch.ones(self.size, dtype=torch.bool)
        free[self.index] = False
        self.free = free

    def step(self, u: Tensor, base: Tensor, values: Tensor, damp: float) -> Tensor:
        """The next point, (batch, size), from u and base (batch, size) in double precision."""
        moved = base.clone()
        index = self.index.to(u.device)
        moved[:, index] = values.to(u)
        if self.rows:
            gap = base - u
            gap[:, index] = values.to(u) - u[:, index]
            moved = moved - self.correction(u, gap, damp)
        return moved

    def correction(self, u: Tensor, gap: Tensor, damp: float) -> Tensor:
        """J_f^T (J_f J_f^T + damp I)^-1 [h(u) + J gap], 0 at the pins."""
        raise NotImplementedError

    def _graph(self, u: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(leaf, h of each `Rows`) for differentiation."""
        leaf = u.detach().reshape(-1, *self.shape).requires_grad_()
        return leaf, [part.function(leaf) for part in self.rows]


class _Sparse(_System):
    """J by colours, and a sparse factorisation of J J^T."""

    def __init__(self, constraint: Constraint) -> None:
        super().__init__(constraint)
        rows, columns, self.gather = [], [], []
        start = 0
        for part in self.rows:
            row, column = cast(Tensor, part.pattern).cpu().numpy()
            colours = cast(np.ndarray, part.colours)
            groups = []
            for colour in range(int(colours.max(initial=-1)) + 1):
                entries = np.flatnonzero(colours[row] == colour)
                weight = torch.from_numpy((colours == colour).astype(np.float64))
                groups.append((weight, torch.from_numpy(column[entries])))
                rows.append(row[entries] + start)
                columns.append(column[entries])
            self.gather.append(groups)
            start += part.count
        self.count = start
        row, column = np.concatenate(rows), np.concatenate(columns)
        order = np.lexsort((column, row))
        self.order, self.row, self.column = order, row[order], column[order]
        self.indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=start))])
        self.permutation: np.ndarray | None = None
        self.constant: np.ndarray | None = None
        self.factors: dict[float, Any] = {}

    def correction(self, u: Tensor, gap: Tensor, damp: float) -> Tensor:
        with torch.enable_grad():
            leaf, h = self._graph(u)
            if self.linear:
                if self.constant is None:
                    self.constant = self._values(leaf, h)[:1]
                values = self.constant
            else:
                values = self._values(leaf, h)
        right = torch.cat(h, 1).detach().cpu().numpy()
        jacobian = self._matrix(values)
        batch = len(right)
        if self.linear:
            right = right + (jacobian @ gap.cpu().numpy().T).T
            inner = self._freed(jacobian, 1)
            if damp not in self.factors:
                self.factors[damp] = self._factor(inner, damp, 1)
            solution = self.factors[damp](right.T)
            moved = np.ascontiguousarray((inner.T @ solution).T)
        else:
            flat = right.reshape(-1) + jacobian @ gap.cpu().numpy().reshape(-1)
            inner = self._freed(jacobian, batch)
            solve = self._factor(inner, damp, batch)
            moved = (inner.T @ solve(flat)).reshape(batch, self.size)
        return torch.from_numpy(moved).to(u)

    @cached_property
    def linear(self) -> bool:
        return all(part.linear for part in self.rows)

    def _values(self, leaf: Tensor, h: Sequence[Tensor]) -> np.ndarray:
        """(batch, nnz) entries of the Jacobian, in the order of the sparse matrix."""
        found = []
        for one, groups in zip(h, self.gather, strict=True):
            for weight, column in groups:
                cotangent = weight.to(leaf).expand_as(one)
                (gradient,) = torch.autograd.grad(one, leaf, cotangent, retain_graph=True)
                found.append(gradient.flatten(1)[:, column.to(leaf.device)])
        return torch.cat(found, 1).cpu().numpy()[:, self.order]

    def _matrix(self, values: np.ndarray) -> Any:
        """The Jacobians as the blocks of one sparse matrix."""
        batch, entries = values.shape
        columns = (self.column + self.size * np.arange(batch)[:, None]).reshape(-1)
        pointer = self.indptr[:-1] + entries * np.arange(batch)[:, None]
        pointer = np.append(pointer.reshape(-1), batch * entries)
        shape = (batch * self.count, batch * self.size)
        return sparse.csr_matrix((values.reshape(-1), columns, pointer), shape=shape)

    def _freed(self, jacobian: Any, batch: int) -> Any:
        """Without the entries at the pins, which become 0."""
        free = np.tile(self.free.numpy()[self.column], batch)
        return sparse.csr_matrix(
            (jacobian.data * free, jacobian.indices, jacobian.indptr), shape=jacobian.shape
        )

    def _factor(self, inner: Any, damp: float, batch: int) -> Callable[[np.ndarray], np.ndarray]:
        """A solver of J J^T + damp, as a pseudo-inverse where there is no damping."""
        square = (inner @ inner.T).tocsr()
        shift = damp or SHIFT * max(float(square.diagonal().max()), 1e-300)
        if self.permutation is None:
            block = square[: self.count, : self.count] + shift * sparse.identity(self.count)
            self.permutation = splu(
                block.tocsc(),
                permc_spec="MMD_AT_PLUS_A",
                diag_pivot_thresh=0.0,
                options={"SymmetricMode": True},
            ).perm_c.argsort()
        order = self.permutation + self.count * np.arange(batch)[:, None]
        order = order.reshape(-1)
        shifted = (square + shift * sparse.identity(square.shape[0], format="csr"))[order][:, order]
        factor = splu(
            shifted.tocsc(),
            permc_spec="NATURAL",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
        back = order.argsort()

        def solve(right: np.ndarray) -> np.ndarray:
            return _refined(
                lambda r: factor.solve(np.ascontiguousarray(r[order]))[back],
                lambda x: square @ x,
                right,
                damp,
            )

        return solve


def _refined(solve: Any, product: Any, right: Any, damp: float) -> Any:  # arrays or tensors
    """The solution of (S + damp) x = right from solutions of (S + shift) x = r, by refinement.

    What of the right side is outside the range of S is left out: the least-squares solution.
    """
    if damp or not right.size:
        return solve(right)
    size = float(abs(right).max())
    for _ in range(ROUNDS):
        x, rest = _polished(solve, product, right)
        if float(abs(rest).max()) <= 1e-9 * size:
            break
        # what is outside the range is divided by the shift, and so are the errors of its rounding:
        # it is taken away, but for the part of the range that these errors brought into it
        right = right - (rest - solve(product(rest)))
    return x


def _polished(solve: Any, product: Any, right: Any) -> tuple[Any, Any]:
    """(x, right - S x), refined while that falls."""
    x = solve(right)
    rest = right - product(x)
    now = float(abs(rest).max())
    for _ in range(REFINEMENTS):
        if now == 0:
            break
        better = x + solve(rest)
        left = right - product(better)
        before, now = now, float(abs(left).max())
        if now > 0.5 * before:
            break
        x, rest = better, left
    return x, rest


class _Dense(_System):
    """J row by row, for few equations of which nothing is known."""

    def correction(self, u: Tensor, gap: Tensor, damp: float) -> Tensor:
        with torch.enable_grad():
            leaf, parts = self._graph(u)
            h = torch.cat(parts, 1)
            rows = [
                torch.autograd.grad(h[:, k].sum(), leaf, retain_graph=True)[0].flatten(1)
                for k in range(h.shape[1])
            ]
        jacobian = torch.stack(rows, 1)
        right = h.detach() + (jacobian @ gap[..., None])[..., 0]
        inner = jacobian * self.free.to(jacobian)
        square = inner @ inner.mT
        diagonal = square.diagonal(dim1=1, dim2=2)
        # each event its own, so that it does not depend on the batch
        shift = damp or SHIFT * diagonal.amax(1).clamp(min=1e-300)[:, None, None]
        eye = torch.eye(len(rows), dtype=u.dtype, device=u.device)
        factor = torch.linalg.cholesky(square + shift * eye)
        x = _refined(
            lambda r: torch.cholesky_solve(r, factor), lambda y: square @ y, right[..., None], damp
        )
        return (inner.mT @ x)[..., 0]


class _Free(_System):
    """No Jacobian: conjugate gradients on J^T J + damp, from products with J and J^T."""

    def correction(self, u: Tensor, gap: Tensor, damp: float) -> Tensor:
        free = self.free.to(u)
        with torch.enable_grad():
            leaf, parts = self._graph(u)
            h = torch.cat(parts, 1)
            weight = torch.zeros_like(h, requires_grad=True)
            # J^T w is linear in w: its derivative along w is a product with J
            (back,) = torch.autograd.grad(h, leaf, weight, create_graph=True)

        def transposed(w: Tensor) -> Tensor:
            (g,) = torch.autograd.grad(h, leaf, w, retain_graph=True)
            return g.flatten(1)

        def product(d: Tensor) -> Tensor:
            (g,) = torch.autograd.grad(back, weight, d.reshape_as(back), retain_graph=True)
            return g

        right = free * transposed(h.detach() + product(gap))
        with warnings.catch_warnings():  # the next step corrects what is left
            warnings.simplefilter("ignore", RuntimeWarning)
            return conjugate_gradients(
                lambda d: free * transposed(product(free * d)) + damp * d,
                right,
                ITERATIONS,
                TOLERANCE,
            )


# Use


def gauss_newton(u: Tensor, constraint: Constraint, *, steps: int = 1, damp: float = 0.0) -> Tensor:
    """``steps`` of Gauss and Newton's method from ``u`` (batch, *shape) towards the manifold.

    Args:
        u: floating; the result has its dtype.
        constraint: h.
        steps: at least 1.
        damp: added to J J^T of what is not pinned; 0 for the pseudo-inverse.

    Raises:
        ValueError: events of another shape; a count or a damping out of its range.
    """
    if steps < 1 or not 0 <= damp < math.inf:
        raise ValueError(f"need steps >= 1 and damp >= 0, got {steps} and {damp}")
    state = _start(u, constraint)
    if constraint.count:
        for _ in range(steps):
            state = _next(state, state, constraint, damp)
    return state.reshape(u.shape).to(u.dtype)


@dataclass(frozen=True, eq=False)
class Projection:
    """What `project` found.

    Attributes:
        u: (batch, *shape), in the dtype that was given.
        residual: (batch, m) in float64, of ``u`` itself: after its cast.
        iterations: steps of the slowest event.
        converged: (batch,), max |h| <= tol before the cast.
        nearest: (batch,), by sequential quadratic programming alone: x - u is in the range of J^T.
    """

    u: Tensor
    residual: Tensor
    iterations: int
    converged: Tensor
    nearest: Tensor

    @property
    def worst(self) -> float:
        """max |h| of ``u``, after its cast."""
        return float(self.residual.abs().max()) if self.residual.numel() else 0.0


def project(
    u: Tensor,
    constraint: Constraint,
    *,
    tol: float = 1e-10,
    max_iter: int = 50,
    method: Method = "sqp",
    strict: bool = True,
) -> Projection:
    """The point of the manifold that is, locally, nearest to every event of ``u``.

    In double precision, cast last. An event is done when max |h| <= tol and its last step is below
    1e-8 of its size; it does not move any more, whatever others do. Where sequential quadratic
    programming does not converge, far from the manifold or at the kinks of an upwind flux, Gauss
    and Newton's method with a line search goes on from the best point.

    Args:
        u: (batch, *shape), floating, finite.
        constraint: h.
        tol: of max |h|, before the cast.
        max_iter: steps of each method.
        method: ``"sqp"``, or ``"root"`` for Gauss and Newton's from the start.
        strict: raise where an event does not converge. Else the best point is returned and
            ``converged`` says which; of linear equations that contradict each other that is the
            least-squares solution, and ``residual`` its residual.

    Raises:
        ValueError: events of another shape or not finite; ``tol``, ``max_iter`` or ``method`` out
            of range; with ``strict``, an event that does not converge, with the worst residual.
    """
    if not 0 < tol < math.inf or max_iter < 1:
        raise ValueError(f"need tol > 0 and max_iter >= 1, got {tol} and {max_iter}")
    if method not in ("sqp", "root"):
        raise ValueError(f"method must be sqp or root, got {method!r}")
    base = _start(u, constraint)
    if not bool(base.isfinite().all()):
        raise ValueError("u holds values that are not finite")
    search = _Search(base, constraint, tol)
    if method == "sqp":
        search.run(max_iter, fixed=True)
    nearest = search.done.clone()
    search.run(max_iter, fixed=False)
    found = search.best.reshape(u.shape).to(u.dtype)
    with torch.no_grad():
        residual = constraint.residual(found.double())
    if strict and not bool(search.done.all()):
        event = int(search.worst.argmax())
        raise ValueError(
            f"the projection did not reach tol={tol:g}: max |h| is {float(search.worst[event]):.3g}"
            f" in event {event} after {search.iterations} steps; the equations contradict each "
            "other there, or u is too far from them (strict=False returns the least-squares point)"
        )
    return Projection(found, residual, search.iterations, search.done, nearest)


class _Search:
    """The iterations of `project`, event by event."""

    def __init__(self, base: Tensor, constraint: Constraint, tol: float) -> None:
        self.base, self.constraint, self.tol = base, constraint, tol
        self.best, self.iterations = base, 0
        self.worst = self._worst(base)
        self.done = self.worst <= tol

    def _worst(self, u: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.constraint.residual(u.reshape(-1, *self.constraint.shape))
        if not h.shape[1]:
            return h.new_zeros(len(h))
        return h.abs().amax(1).nan_to_num(nan=math.inf)

    def run(self, max_iter: int, *, fixed: bool) -> None:
        """``fixed``: always from the point that was given (SQP); else from the last one (root)."""
        linear = self.constraint.linear
        state, idle = self.best, torch.zeros_like(self.worst)
        for _ in range(min(max_iter, 3) if linear else max_iter):
            live = (~self.done & (idle < 8)).nonzero()[:, 0]
            if not len(live):
                break
            constraint = self.constraint.take(live)
            here = state[live]
            moved = _next(here, self.base[live] if fixed else here, constraint, 0.0)
            if not fixed:
                moved = self._shortened(here, moved, live)
            self.iterations += 1
            worst = _Search(moved, constraint, self.tol).worst
            length = (moved - here).abs().amax(1)
            # a step to a point where h is not finite is none
            bad = ~worst.isfinite()
            moved = torch.where(bad[:, None], here, moved)
            settled = length <= 1e-8 * (1 + here.abs().amax(1))
            done = (worst <= self.tol) & (settled | linear | (not fixed))
            better = (worst < self.worst[live]) | done
            idle[live] = torch.where(worst < 0.9 * self.worst[live], 0.0, idle[live] + 1)
            state = state.clone()
            state[live] = moved
            self.best = self.best.clone()
            self.best[live[better]] = moved[better]
            self.worst = self.worst.clone()
            self.worst[live[better]] = worst[better]
            self.done = self.done.clone()
            self.done[live] = done

    def _shortened(self, here: Tensor, moved: Tensor, live: Tensor) -> Tensor:
        """A half of the step, a quarter, and so on, where |h| would rise otherwise."""
        if self.constraint.linear:
            return moved
        constraint = self.constraint.take(live)

        def size(u: Tensor) -> Tensor:
            with torch.no_grad():
                h = constraint.residual(u.reshape(-1, *constraint.shape))
            return h.norm(dim=1).nan_to_num(nan=math.inf)

        before = size(here)
        for _ in range(HALVINGS):
            rises = size(moved) > before
            if not bool(rises.any()):
                break
            moved = torch.where(rises[:, None], (here + moved) / 2, moved)
        return moved


def _start(u: Tensor, constraint: Constraint) -> Tensor:
    """(batch, size) in double precision."""
    if not isinstance(u, Tensor) or not u.is_floating_point():
        raise TypeError(f"u must be a floating tensor, got {getattr(u, 'dtype', type(u))}")
    constraint._check_event(u)
    rows = len(constraint.pinned[1])
    if rows not in (1, len(u)):
        raise ValueError(f"the constraint holds values of {rows} events, got {len(u)}")
    return u.detach().flatten(1).double()


def _next(u: Tensor, base: Tensor, constraint: Constraint, damp: float) -> Tensor:
    return constraint.system.step(u, base, constraint.pinned[1], damp)


@dataclass
class FinalProjection(Steering):
    """The sample is projected onto the manifold when the simulation ends; see `project`.

    Attributes:
        found: the `Projection` of the last simulation; its ``u`` is what was returned.

    Args:
        constraint, tol, max_iter, strict: of `project`.
    """

    constraint: Constraint
    tol: float = 1e-10
    max_iter: int = 50
    strict: bool = True
    found: Projection | None = None

    def end(self, x0: State, aim: Any) -> State:
        self.found = project(
            cast(Tensor, x0),
            self.constraint,
            tol=self.tol,
            max_iter=self.max_iter,
            strict=self.strict,
        )
        return self.found.u


@dataclass
class CleanProjection(FinalProjection):
    """Every clean prediction takes a Gauss-Newton step towards the manifold, and the sample is
    projected onto it: `DDNM` for equations that need not be linear. With any sampler.

    Args:
        damp: of the step; see `gauss_newton`.
    """

    damp: float = 0.0

    def clean(self, clean: State, x: State, aim: Any, run: Run) -> State:
        return gauss_newton(cast(Tensor, clean), self.constraint, damp=self.damp)


def window_pattern(rows: Sequence[Sequence[int]]) -> Tensor:
    """(2, nnz): equation k reads the flat coordinates ``rows[k]``."""
    row = [torch.full((len(columns),), k, dtype=torch.int64) for k, columns in enumerate(rows)]
    column = [torch.as_tensor(columns, dtype=torch.int64) for columns in rows]
    return torch.stack([torch.cat(row), torch.cat(column)])
