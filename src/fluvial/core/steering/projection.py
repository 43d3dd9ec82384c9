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
a shift of 1e-11 of its largest diagonal entry, which is removed by refinement; equations whose
gradients differ by more than a factor of 1,000 are brought to one length before, and then it is of
the equations so scaled that the squares are least.) All is computed in double precision. An event
at which h or its derivative is not finite stays where it is.
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
UNEVEN = 1e6
"""Between diagonal entries of J J^T: from there on equations are scaled."""
DEPENDENT = 1e-8
"""A pivot below this, of J J^T with a diagonal of 1, is of an equation that depends on others."""
ONE_PASS = 2**16
"""Coordinates of all events and colours that go through a function together."""
CHUNK = 2**26
"""Entries of the dense Jacobians that are held at once."""
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
        function: (batch, *shape) to (batch, count), in double precision; each event on its own.
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
        h = self.function(u.double())
        return (h.cumsum(1) if self.cumulative else h).to(u.dtype)

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
            a function that fails, that returns another shape, that mixes the events of a batch,
            that is not linear where it was said to be or cannot be differentiated, or more
            equations than coordinates.
        TypeError: a shape that is none, an index that is not int64.
    """

    def __init__(self, shape: Sequence[int], parts: Sequence[Part] = ()) -> None:
        self.shape = _shape(shape)
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
        u = _probes(self.shape)
        with torch.enable_grad():
            h = _called(part.function, u.requires_grad_(), part.name)
            one = _called(part.function, u[:1], part.name)
        if tuple(h.shape) != (3, part.count) or tuple(one.shape) != (1, part.count):
            raise ValueError(
                f"function of {part.name} must return (batch, {part.count}), got {tuple(h.shape)} "
                "for a batch of 3"
            )
        if part.count and not h.requires_grad:
            raise ValueError(f"function of {part.name} cannot be differentiated by torch")
        size = 1e-9 * (1 + float(h.detach().nan_to_num(0, 0, 0).abs().amax()) if h.numel() else 0.0)
        if not torch.allclose(h[:1], one, rtol=1e-6, atol=size, equal_nan=True):
            raise ValueError(
                f"function of {part.name} mixes the events of a batch: h of the first of three is "
                "not what it is alone"
            )
        if part.linear and not torch.allclose(h[0] + h[1], 2 * h[2], rtol=1e-6, atol=size):
            raise ValueError(f"function of {part.name} is not linear, as linear=True says")

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
        taken = self._with(
            [
                replace(part, values=part.values[rows])
                if isinstance(part, Pins) and part.values.ndim == 2 and len(part.values) > 1
                else part
                for part in self.parts
            ]
        )
        taken.__dict__["system"] = self.system  # it knows the pins' places, not their values
        return taken

    def rescaled(self, offset: float, scale: float) -> Constraint:
        """The constraint on z of ``u = offset + scale z``."""

        def inner(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda z: function(offset + scale * z)

        if (offset, scale) == (0.0, 1.0):
            return self
        parts: list[Part] = []
        for part in self.parts:
            if isinstance(part, Pins):
                parts.append(replace(part, values=(part.values.double() - offset) / scale))
            else:
                other = replace(part, function=inner(part.function))
                other.__dict__["colours"] = part.colours  # the pattern's, which is the same
                parts.append(other)
        return self._with(parts)

    def dependent(self, u: Tensor) -> Tensor:
        """(batch,) how many equations depend on others at ``u``, to first order.

        Their gradients are combinations of those of others, to 1e-4 of their length; or they have
        no gradient. Consistent ones do no harm; those that contradict others leave a residual. The
        rank of J is ``count`` less this.

        Raises:
            ValueError: events of another shape, or so many equations without a pattern that there
                is no Jacobian.
        """
        state = _start(u, self)
        pinned = [part.count for part in self.parts if isinstance(part, Pins)]
        twice = sum(pinned) - len(self.pinned[0])
        return self.system.dependent(state) + twice

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

    def _with(self, parts: Sequence[Part]) -> Constraint:
        """As many equations of the same places, which need no check."""
        changed = Constraint.__new__(Constraint)
        changed.shape, changed.size, changed.count = self.shape, self.size, self.count
        changed.parts = tuple(parts)
        return changed

    def _check_event(self, u: Tensor) -> None:
        if tuple(u.shape[1:]) != self.shape:
            raise ValueError(
                f"the constraint is for events of {self.shape}, got {tuple(u.shape[1:])}"
            )


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        found = tuple(int(side) for side in shape)
    except TypeError as error:
        raise TypeError(f"shape must be a tuple of whole numbers, got {shape!r}") from error
    if min(found, default=1) < 1:
        raise ValueError(f"shape must have sides of at least 1, got {found}")
    return found


def _probes(shape: tuple[int, ...]) -> Tensor:
    """Three events to try a function on, with values in [.3, .6], the third between the others."""
    u = torch.full((math.prod(shape),), 0.5, dtype=torch.float64)
    v = torch.linspace(0.3, 0.6, len(u), dtype=torch.float64)
    return torch.stack([u, v, (u + v) / 2]).reshape(3, *shape)


def _called(function: Callable[[Tensor], Tensor], u: Tensor, name: str) -> Tensor:
    try:
        h = function(u)
    except Exception as error:
        raise ValueError(
            f"function of {name} fails on a float64 batch of shape {tuple(u.shape)}: {error}"
        ) from error
    if not isinstance(h, Tensor) or h.ndim != 2 or len(h) != len(u):
        got = tuple(h.shape) if isinstance(h, Tensor) else type(h).__name__
        raise ValueError(
            f"function of {name} must return (batch, m), got {got} for a batch of {len(u)}"
        )
    return h


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
        function: acts on each event on its own, in double precision whatever the dtype of samples.
        shape: of an event.
        pattern, linear, name: see `Rows`. `window_pattern` and a sparse matrix's indices are
            patterns.

    Raises:
        ValueError: as `Constraint`; a pattern without a coordinate that an equation reads.
        TypeError: a shape that is none.
    """
    u = _probes(_shape(shape))
    with torch.no_grad():
        h = _called(function, u, name)
    if pattern is not None:
        pattern = torch.unique(pattern, dim=1)  # entries given twice would count twice
    part = Rows(function, h.shape[1], pattern, linear, False, name)
    constraint = Constraint(shape, [part])
    if pattern is not None and part.colours is not None and part.count:
        missed = _missed(part, u[1:2])
        if missed is not None:
            raise ValueError(
                f"pattern of {name} lacks coordinates that its equations read, such as "
                f"{missed} (flat index)"
            )
    return constraint


def _missed(part: Rows, u: Tensor) -> int | None:
    """A coordinate at which J^T w by the colours is not J^T w."""
    pattern, colours = cast(Tensor, part.pattern).cpu(), torch.from_numpy(part.colours)
    row, column = pattern
    weight = 1 + torch.arange(part.count, dtype=u.dtype).sin() / 2
    with torch.enable_grad():
        leaf = u.detach().requires_grad_()
        h = part.function(leaf)

    def back(w: Tensor) -> Tensor:
        return torch.autograd.grad(h, leaf, w[None], retain_graph=True)[0].reshape(-1)

    wanted = back(weight)
    found = torch.zeros_like(wanted)
    for colour in range(int(colours.max()) + 1):
        here = colours[row] == colour
        gradient = back((colours == colour).to(u))
        found.index_add_(0, column[here], weight[row[here]] * gradient[column[here]])
    error = (found - wanted).abs()  # at a point where h has no derivative it says nothing
    worst = int(error.nan_to_num(0, 0, 0).argmax())
    return worst if float(error[worst]) > 1e-8 * float(wanted.abs().max()) else None


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
        if self.rows and len(u):
            gap = base - u
            gap[:, index] = values.to(u) - u[:, index]
            moved = moved - self.correction(u, gap, damp)
        return moved

    def correction(self, u: Tensor, gap: Tensor, damp: float) -> Tensor:
        """J_f^T (J_f J_f^T + damp I)^-1 [h(u) + J gap], 0 at the pins, and 0 for an event at which
        h or J is not finite."""
        raise NotImplementedError

    def dependent(self, u: Tensor) -> Tensor:
        """(batch,) equations whose rows of J_f depend on others."""
        return torch.zeros(len(u), dtype=torch.int64)

    def _graph(self, u: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(leaf, h of each `Rows`) for differentiation."""
        leaf = u.detach().reshape(-1, *self.shape).requires_grad_()
        return leaf, [part.function(leaf) for part in self.rows]


class _Sparse(_System):
    """J by colours, and a sparse factorisation of J J^T."""

    def __init__(self, constraint: Constraint) -> None:
        super().__init__(constraint)
        rows, columns, counts = [], [], []
        self.weights: list[Tensor] = []  # of each part: (colours, equations), 1 for those of one
        start = 0
        for part in self.rows:
            row, column = cast(Tensor, part.pattern).cpu().numpy()
            colours = cast(np.ndarray, part.colours)
            groups = range(int(colours.max(initial=-1)) + 1)
            weights = torch.from_numpy(colours == np.arange(len(groups))[:, None])
            self.weights.append(weights.double())
            for colour in groups:
                entries = np.flatnonzero(colours[row] == colour)
                rows.append(row[entries] + start)
                columns.append(column[entries])
                counts.append(len(entries))
            start += part.count
        self.count = start
        row, column = np.concatenate(rows), np.concatenate(columns)
        order = np.lexsort((column, row))
        self.row, self.column = row[order], column[order]
        # where the entries of each colour are, in the event and among all
        ends = np.cumsum(counts)[:-1]
        places = np.split(order.argsort(), ends)
        self.gather = list(zip(np.split(column, ends), places, strict=True))
        self.indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=start))])
        self.kept = self.free.numpy()[self.column].astype(np.float64)  # entries not at the pins
        self.layout: tuple[int, np.ndarray, np.ndarray] | None = None
        self.permutation: np.ndarray | None = None
        self.constant: np.ndarray | None = None
        self.factors: dict[float, Any] = {}

    def correction(self, u: Tensor, gap: Tensor, damp: float) -> Tensor:
        right, values = self._linearised(u)
        batch, flat_gap = len(right), gap.cpu().numpy()
        if self.linear:
            right = right + (self._matrix(values) @ flat_gap.T).T
            right[~np.isfinite(right).all(1)] = 0
            inner = self._matrix(values * self.kept)
            if damp not in self.factors:
                self.factors[damp] = self._factor(inner, damp, 1)
            solution = self.factors[damp](right.T)
            moved = np.ascontiguousarray((inner.T @ solution).T)
        else:
            bad = ~(np.isfinite(right).all(1) & np.isfinite(values).all(1))
            if bad.any():
                right, values = right.copy(), values.copy()
                right[bad] = values[bad] = 0
            flat = right.reshape(-1) + self._matrix(values) @ flat_gap.reshape(-1)
            inner = self._matrix(values * self.kept)
            solve = self._factor(inner, damp, batch)
            moved = (inner.T @ solve(flat)).reshape(batch, self.size)
        return torch.from_numpy(moved).to(u)

    def dependent(self, u: Tensor) -> Tensor:
        values = np.nan_to_num(self._linearised(u)[1], nan=0.0, posinf=0.0, neginf=0.0)
        found = []
        for one in values * self.kept:
            inner = self._matrix(one[None])
            square = inner @ inner.T
            lengths = np.sqrt(square.diagonal())
            scale = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
            square = sparse.diags(scale) @ square @ sparse.diags(scale)
            factor = _factored(square + SHIFT * sparse.identity(self.count), "MMD_AT_PLUS_A")
            found.append(int((abs(factor.U.diagonal()) < DEPENDENT).sum()))
        return torch.tensor(found).expand(len(u))

    def _linearised(self, u: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """(h, entries of J), (batch, count) and (batch, nnz); one row of entries of linear ones."""
        event = u.detach().reshape(-1, *self.shape)
        if self.linear and self.constant is not None:
            now = torch.cat([part.function(event) for part in self.rows], 1)
            return now.detach().cpu().numpy(), self.constant
        found, values = [], np.empty((len(u), len(self.column)))
        places = iter(self.gather)
        for part, weights in zip(self.rows, self.weights, strict=True):
            # few colours of small events in one pass, as the events of a batch; else one by one
            several = max(1, min(len(weights), ONE_PASS // u.numel()))
            with torch.enable_grad():
                leaf = event.repeat(several, *[1] * len(self.shape)).requires_grad_()
                h = part.function(leaf)
            found.append(h.detach()[: len(u)].cpu().numpy())
            for some in weights.split(several) if len(weights) else ():
                weight = torch.zeros_like(h).reshape(several, len(u), -1)
                weight[: len(some)] = some.to(h)[:, None]
                (back,) = torch.autograd.grad(h, leaf, weight.reshape(h.shape), retain_graph=True)
                rows = back.reshape(several, len(u), -1).cpu().numpy()
                for gradient in rows[: len(some)]:
                    column, place = next(places)
                    values[:, place] = gradient[:, column]
        if self.linear:
            self.constant = values = values[:1]
        return np.concatenate(found, 1), values

    @cached_property
    def linear(self) -> bool:
        return all(part.linear for part in self.rows)

    def _matrix(self, values: np.ndarray) -> Any:
        """The Jacobians as the blocks of one sparse matrix."""
        batch, entries = values.shape
        shape = (batch * self.count, batch * self.size)
        if self.layout is None or self.layout[0] != batch:
            kind = np.int32 if max(*shape, batch * entries) < 2**31 else np.int64
            columns = self.column + self.size * np.arange(batch)[:, None]
            pointer = self.indptr[:-1] + entries * np.arange(batch)[:, None]
            pointer = np.append(pointer.reshape(-1), batch * entries)
            self.layout = batch, columns.reshape(-1).astype(kind), pointer.astype(kind)
        _, columns, pointer = self.layout
        return sparse.csr_matrix((values.reshape(-1), columns, pointer), shape=shape)

    def _factor(self, inner: Any, damp: float, batch: int) -> Callable[[np.ndarray], np.ndarray]:
        """A solver of J J^T + damp, as a pseudo-inverse where there is no damping."""
        square = (inner @ inner.T).tocsr()
        diagonal = square.diagonal().reshape(batch, self.count)
        scale = None if damp else _scales(torch.from_numpy(diagonal))
        if scale is not None:
            diagonal = diagonal * scale.numpy() ** 2
            by = sparse.diags(scale.numpy().reshape(-1))
            square = (by @ square @ by).tocsr()
        # each event its own, so that it does not depend on the batch
        shift = damp or SHIFT * diagonal.max(1).clip(min=1e-300)
        shifts = sparse.diags(np.broadcast_to(np.reshape(shift, (-1, 1)), diagonal.shape).ravel())
        shifted = (square + shifts).tocsr()
        if self.permutation is None:
            block = shifted[: self.count, : self.count]
            self.permutation = _factored(block, "MMD_AT_PLUS_A").perm_c.argsort()
        order = self.permutation + self.count * np.arange(batch)[:, None]
        order = order.reshape(-1)
        factor = _factored(shifted[order][:, order], "NATURAL")
        back = order.argsort()

        def solve(right: np.ndarray) -> np.ndarray:
            if scale is not None:
                right = by @ right
            x = _refined(
                lambda r: factor.solve(np.ascontiguousarray(r[order]))[back],
                lambda x: square @ x,
                right,
                damp,
            )
            return x if scale is None else by @ x

        return solve


def _factored(square: Any, order: str) -> Any:
    """Of a symmetric matrix in rows: its columns are the same."""
    return splu(
        square.tocsr().T,
        permc_spec=order,
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )


def _scales(diagonal: Tensor) -> Tensor | None:
    """(batch, count) factors that bring equations to one length; None where lengths are even."""
    top = diagonal.amax(1, keepdim=True)
    there = diagonal > 1e-20 * top
    least = torch.where(there, diagonal, math.inf).amin(1, keepdim=True)
    uneven = top > UNEVEN * least
    if not bool(uneven.any()):
        return None
    return torch.where(there & uneven, diagonal.clamp(min=1e-300).rsqrt(), 1.0)


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
        each = max(1, CHUNK // (self.size * sum(part.count for part in self.rows)))
        parts = zip(u.split(each), gap.split(each), strict=True)
        return torch.cat([self._corrected(here, way, damp) for here, way in parts])

    def _corrected(self, u: Tensor, gap: Tensor, damp: float) -> Tensor:
        h, jacobian = self._linearised(u)
        fine = h.isfinite().all(1) & jacobian.isfinite().all(2).all(1)
        h = torch.where(fine[:, None], h, 0.0)
        jacobian = torch.where(fine[:, None, None], jacobian, 0.0)
        right = h + (jacobian @ gap[..., None])[..., 0]
        inner = jacobian * self.free.to(jacobian)
        square = inner @ inner.mT
        diagonal = square.diagonal(dim1=1, dim2=2)
        scale = None if damp else _scales(diagonal)
        if scale is not None:
            inner, right = inner * scale[..., None], right * scale
            square = square * scale[..., None] * scale[:, None]
            diagonal = square.diagonal(dim1=1, dim2=2)
        # each event its own, so that it does not depend on the batch
        shift = damp or SHIFT * diagonal.amax(1).clamp(min=1e-300)[:, None, None]
        eye = torch.eye(square.shape[1], dtype=u.dtype, device=u.device)
        factor = torch.linalg.cholesky(square + shift * eye)
        x = _refined(
            lambda r: torch.cholesky_solve(r, factor), lambda y: square @ y, right[..., None], damp
        )
        return (inner.mT @ x)[..., 0]

    def dependent(self, u: Tensor) -> Tensor:
        found = []
        for one in u.split(1):
            inner = self._linearised(one)[1].nan_to_num(0, 0, 0) * self.free.to(one)
            lengths = inner.norm(dim=2, keepdim=True)
            inner = torch.where(lengths > 0, inner / lengths, 0.0)
            found.append((torch.linalg.eigvalsh(inner @ inner.mT) < DEPENDENT).sum(1))
        return torch.cat(found)

    def _linearised(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """(h, J), (batch, count) and (batch, count, size)."""
        with torch.enable_grad():
            leaf, parts = self._graph(u)
            h = torch.cat(parts, 1)
            rows = [
                torch.autograd.grad(h[:, k].sum(), leaf, retain_graph=True)[0].flatten(1)
                for k in range(h.shape[1])
            ]
        return h.detach(), torch.stack(rows, 1)


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
        # of an event without a derivative: products with its J are left out, too
        fine = right.isfinite().all(1, keepdim=True)
        right = torch.where(fine, right, 0.0)
        with warnings.catch_warnings():  # the next step corrects what is left
            warnings.simplefilter("ignore", RuntimeWarning)
            return conjugate_gradients(
                lambda d: torch.where(fine, free * transposed(product(free * d)) + damp * d, 0.0),
                right,
                ITERATIONS,
                TOLERANCE,
            )

    def dependent(self, u: Tensor) -> Tensor:
        raise ValueError(
            f"there is no Jacobian of more than {DENSE} equations without a pattern; give one"
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
            f" in event {event} after {search.iterations} steps; "
            + _reason(search.best[[event]], constraint.take(torch.tensor([event])), search, event)
            + " (strict=False returns the best point)"
        )
    return Projection(found, residual, search.iterations, search.done, nearest)


def _reason(u: Tensor, constraint: Constraint, search: _Search, event: int) -> str:
    """Why an event of a search did not converge."""
    worst = float(search.worst[event])
    if not math.isfinite(worst):
        return "h is not finite there, from the start on: keep its function defined for every u"
    shape = (-1, *constraint.shape)
    with torch.no_grad():
        # what h changes by where every value changes by a few of its last bits
        signs = 1 - 2 * (torch.arange(u.shape[1], device=u.device) % 2).to(u)
        nudged = u * (1 + 8 * torch.finfo(u.dtype).eps * signs)
        moved = constraint.residual(nudged.reshape(shape)) - constraint.residual(u.reshape(shape))
        rounding = float(moved.abs().max())
    if worst <= 8 * rounding:
        return "that is the rounding of these equations: divide them by their size, or raise tol"
    if isinstance(constraint.system, _Free):
        return "the equations contradict each other there, or u is too far from them"
    count = int(constraint.dependent(u.reshape(shape)))
    if count:
        return f"the equations contradict each other there ({count} depend on others)"
    return "no solution was found near u: it is too far from one, or there is none"


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
