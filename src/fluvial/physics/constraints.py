"""Laws of fields (batch, n_x, n_t) or (batch, n_x, n_y, n_t), whose last axis is physical time.

Each function returns a `Constraint`; `stack` joins them. Masses of a law that sums over space are
dx sum_i u_i. Balances since the start are given step by step (`Rows.cumulative`), so that every
equation reads two steps only.

Of the laws of the paper those that sum a source or a flux by the trapezoidal rule are not obeyed by
the solutions of the solvers exactly: see `constraint_floor`. Those marked *exact* are, to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fluvial.core.steering.projection import (
    Constraint,
    Pins,
    Rows,
    equations,
    linear_equations,
    stack,
)
from fluvial.physics.pde import NU, RHO, godunov

# Values


def initial_condition(values: Tensor, shape: Sequence[int]) -> Constraint:
    """u(x, 0) = values.

    Args:
        values: (*space), or (rows, *space) for a value an event.
        shape: of an event, (*space, n_t).

    Raises:
        ValueError: values of another shape, or a shape without space and time.
    """
    if len(shape) < 2:
        raise ValueError(
            f"shape must be (*space, n_t), got {tuple(shape)}; `dirichlet` sets values anywhere"
        )
    space = tuple(shape[:-1])
    if tuple(values.shape[-len(space) :]) != space or values.ndim > len(space) + 1:
        raise ValueError(f"values must be {space} or (rows, *{space}), got {tuple(values.shape)}")
    places = _flat(shape)[..., 0].reshape(-1)
    flat = values.reshape(*values.shape[: values.ndim - len(space)], -1)
    return Constraint(shape, [Pins(places, flat, "initial")])


def dirichlet(mask: Tensor, values: Tensor) -> Constraint:
    """u = values where ``mask`` is true.

    Args:
        mask: (*shape) bool.
        values: (*shape) or (rows, *shape), read where the mask is true; or (p,) or (rows, p), one
            for each of its true places, in order.

    Raises:
        TypeError: ``mask`` is not bool.
        ValueError: values of another shape.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {mask.dtype}")
    places = mask.reshape(-1).nonzero()[:, 0]
    if tuple(values.shape[-mask.ndim :]) == tuple(mask.shape):
        values = values.reshape(*values.shape[: values.ndim - mask.ndim], -1)[..., places]
    if values.shape[-1:] != places.shape or values.ndim > 2:
        raise ValueError(
            f"values must have the shape of mask, or {len(places)} entries, got "
            f"{tuple(values.shape)}"
        )
    return Constraint(tuple(mask.shape), [Pins(places, values, "values")])


def burgers_boundary(left: Tensor | float, shape: tuple[int, int]) -> Constraint:
    """u_0 = left and u_(n-1) = u_(n-2), from step 1 on: *exact*.

    Args:
        left: one number, or (rows,).
        shape: (n_x, n_t).
    """
    n, steps = shape
    flat = _flat(shape)
    values = torch.as_tensor(left, dtype=torch.float64)
    values = values[:, None] if values.ndim else values
    values = values.expand(*values.shape[:-1], steps - 1)
    pattern = _pattern([torch.stack([flat[-1, k], flat[-2, k]]) for k in range(1, steps)])
    rows = Rows(lambda u: u[:, -1, 1:] - u[:, -2, 1:], steps - 1, pattern, True, False, "boundary")
    return Constraint(shape, [Pins(flat[0, 1:], values, "boundary"), rows])


# Balances


def conservation(
    shape: Sequence[int],
    dx: float,
    dt: float,
    *,
    flux: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    source: Callable[[Tensor], Tensor] | None = None,
    linear: bool = False,
) -> Constraint:
    """m_k - m_0 = sum of the source and of flux in less flux out, by the trapezoidal rule in time.

    m_k = dx sum u_k over space, k >= 1.

    Args:
        shape: of an event, (*space, n_t).
        dx: volume of a cell.
        dt: between saves.
        flux: u to (left, right), each (batch, n_t), of events (n_x, n_t): fluxes in the direction
            of x at the two ends; none by default.
        source: u to (batch, *space, n_t), pointwise.
        linear: whether flux and source are.

    Raises:
        ValueError: a shape without an axis of space and two saves, or of more than one axis of
            space where there is a flux; a source or flux of another shape.
    """
    if len(shape) < 2 or shape[-1] < 2:
        raise ValueError(
            "shape must be (*space, n_t) with two saves or more, as a balance is of masses in "
            f"time, got {tuple(shape)}; `equations` makes a law of fields without time"
        )
    steps = shape[-1]
    flat = _flat(shape).reshape(-1, steps)
    if flux is not None and len(shape) != 2:
        raise ValueError(f"flux is for events (n_x, n_t), got {tuple(shape)}")

    def balance(u: Tensor) -> Tensor:
        flatter = u.flatten(1, -2)
        gain = dx * flatter.sum(1).diff(dim=1)
        rate = torch.zeros_like(flatter[:, 0])
        if source is not None:
            gained = source(u)
            if gained.shape != u.shape:
                raise ValueError(f"source must return {tuple(u.shape)}, got {tuple(gained.shape)}")
            rate = rate + dx * gained.flatten(1, -2).sum(1)
        if flux is not None:
            left, right = flux(u)
            if not left.shape == right.shape == rate.shape:
                raise ValueError(
                    f"flux must return two of {tuple(rate.shape)}, got {tuple(left.shape)} and "
                    f"{tuple(right.shape)}"
                )
            rate = rate + left - right
        if source is None and flux is None:
            return gain
        return gain - dt * (rate[:, 1:] + rate[:, :-1]) / 2

    pattern = _pattern([flat[:, k - 1 : k + 1].reshape(-1) for k in range(1, steps)])
    affine = linear or (flux is None and source is None)
    return Constraint(shape, [Rows(balance, steps - 1, pattern, affine, True, "mass")])


def mass(shape: Sequence[int], dx: float) -> Constraint:
    """m_k = m_0: what a periodic or closed domain conserves. *Exact* for heat and vorticity.

    Args:
        shape: of an event.
        dx: volume of a cell.
    """
    return conservation(shape, dx, 1.0)


def reaction_diffusion_mass(
    shape: tuple[int, int], dx: float, dt: float, *, nu: float = NU, rho: float = RHO
) -> Constraint:
    """The paper's balance of reaction and diffusion, fluxes from one-sided differences of order 4.

    The left flux is -nu (-25 u_0 + 48 u_1 - 36 u_2 + 16 u_3 - 3 u_4) / (12 dx), the right one its
    mirror image.

    Raises:
        ValueError: fewer than five points.
    """
    if shape[0] < 5:
        raise ValueError(f"shape needs five points in x, got {shape[0]}")
    weights = (-25.0, 48.0, -36.0, 16.0, -3.0)

    def flux(u: Tensor) -> tuple[Tensor, Tensor]:
        w = u.new_tensor(weights) / (12 * dx)
        left = -nu * torch.einsum("bit,i->bt", u[:, :5], w)
        right = nu * torch.einsum("bit,i->bt", u[:, -5:].flip(1), w)
        return left, right

    return conservation(shape, dx, dt, flux=flux, source=lambda u: rho * u * (1 - u))


def reaction_diffusion_steady(
    shape: tuple[int, int], dx: float, dt: float, *, rho: float = RHO
) -> Constraint:
    """Fluxes that do not change in time: m_(k+1) - m_k less the source is the same in every step.

    It needs no estimate of a flux, so that solutions obey it up to the rule by which the source is
    summed, O(dt^3) a step: about 1e-8 on a grid of 25 saves, where `reaction_diffusion_mass` is off
    by 1e-2.
    """
    steps = shape[1]
    flat = _flat(shape)

    def change(u: Tensor) -> Tensor:
        rate = rho * dx * (u * (1 - u)).sum(1)
        gain = dx * u.sum(1).diff(dim=1) - dt * (rate[:, 1:] + rate[:, :-1]) / 2
        return gain.diff(dim=1)

    pattern = _pattern([flat[:, k : k + 3].reshape(-1) for k in range(steps - 2)])
    return Constraint(shape, [Rows(change, steps - 2, pattern, name="mass")])


def burgers_mass(shape: tuple[int, int], dx: float, dt: float) -> Constraint:
    """The paper's balance: the mass of all cells, fluxes u^2 / 2 of the end cells by the
    trapezoidal rule. Solutions miss it by 4e-3 on average on the paper's grid."""

    def flux(u: Tensor) -> tuple[Tensor, Tensor]:
        return u[:, 0].square() / 2, u[:, -1].square() / 2

    return conservation(shape, dx, dt, flux=flux)


def burgers_mass_exact(shape: tuple[int, int], dx: float, dt: float) -> Constraint:
    """The balance of the cells 1 .. n - 2 with Godunov's fluxes at their two edges: *exact*."""
    steps = shape[1]
    flat = _flat(shape)

    def balance(u: Tensor) -> Tensor:
        gain = dx * u[:, 1:-1].sum(1).diff(dim=1)
        left = godunov(u[:, 0, :-1], u[:, 1, :-1])
        right = godunov(u[:, -2, :-1], u[:, -1, :-1])
        return gain - dt * (left - right)

    pattern = _pattern([torch.cat([flat[:, k - 1], flat[1:-1, k]]) for k in range(1, steps)])
    return Constraint(shape, [Rows(balance, steps - 1, pattern, False, True, "mass")])


def burgers_local(shape: tuple[int, int], dx: float, dt: float, steps: int = 5) -> Constraint:
    """Godunov's update of every inner cell in the first ``steps`` steps: *exact*.

    u_i^(n+1) - u_i^n + dt / dx (F_(i+1/2) - F_(i-1/2)) = 0.

    Raises:
        ValueError: ``steps`` not in 1 .. n_t - 1.
    """
    n, saves = shape
    if not 1 <= steps < saves:
        raise ValueError(f"steps must lie in [1, {saves - 1}], got {steps}")
    flat = _flat(shape)

    def update(u: Tensor) -> Tensor:
        now, then = u[:, :, :steps], u[:, 1:-1, 1 : steps + 1]
        flux = godunov(now[:, :-1], now[:, 1:])
        return (then - now[:, 1:-1] + dt / dx * flux.diff(dim=1)).flatten(1)

    cells = [flat[:-2, :steps], flat[1:-1, :steps], flat[2:, :steps], flat[1:-1, 1 : steps + 1]]
    columns = torch.stack([cell.reshape(-1) for cell in cells], 1)
    count = (n - 2) * steps
    row = torch.arange(count).repeat_interleave(4)
    return Constraint(
        shape, [Rows(update, count, torch.stack([row, columns.reshape(-1)]), name="local")]
    )


# What data leave of a law


def constraint_floor(constraint: Constraint, fields: Tensor) -> dict[str, dict[str, float]]:
    """The residual of given fields, by the names of the equations: see `residual_norms`.

    Print it beside the residual of samples: below it, a sample obeys the law better than solutions.
    """
    return residual_norms(constraint, fields)


def residual_norms(constraint: Constraint, u: Tensor) -> dict[str, dict[str, float]]:
    """{"max", "rms", "l2"} of the residual by the names of the equations, in double precision.

    ``l2`` is the Euclidean norm of an event's residual, averaged over events.
    """
    with torch.no_grad():
        named = constraint.named(u.double())
    return {
        name: {
            "max": float(h.abs().max()) if h.numel() else 0.0,
            "rms": float(h.square().mean().sqrt()) if h.numel() else 0.0,
            "l2": float(h.norm(dim=1).mean()) if h.numel() else 0.0,
        }
        for name, h in named.items()
    }


def _flat(shape: Sequence[int]) -> Tensor:
    """The flat index of every coordinate."""
    return torch.arange(math.prod(shape)).reshape(tuple(shape))


def _pattern(rows: Sequence[Tensor]) -> Tensor:
    row = np.repeat(np.arange(len(rows)), [len(columns) for columns in rows])
    return torch.stack([torch.from_numpy(row), torch.cat(list(rows))])


__all__ = [
    "burgers_boundary",
    "burgers_local",
    "burgers_mass",
    "burgers_mass_exact",
    "conservation",
    "constraint_floor",
    "dirichlet",
    "equations",
    "initial_condition",
    "linear_equations",
    "mass",
    "reaction_diffusion_mass",
    "reaction_diffusion_steady",
    "residual_norms",
    "stack",
]
