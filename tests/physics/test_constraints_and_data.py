"""Data of the equations, and the laws they obey."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.core.steering.projection import Constraint, gauss_newton, project, stack
from fluvial.physics import pde
from fluvial.physics.constraints import (
    burgers_boundary,
    burgers_local,
    burgers_mass,
    burgers_mass_exact,
    conservation,
    constraint_floor,
    dirichlet,
    initial_condition,
    mass,
    reaction_diffusion_mass,
    reaction_diffusion_steady,
)

NOISE = KeyedNoise(3)
GRID = (32, 32)
DX = 1 / 31


def burgers_set(rows: int = 4, place: float | None = 0.4) -> tuple[Tensor, Tensor]:
    return pde.burgers_fields(rows, GRID, NOISE, place=place, width=0.05)


def reaction_set(rows: int = 4, shape: tuple[int, int] = (32, 25)) -> Tensor:
    start = pde.reaction_starts(1, shape[0], NOISE)[0]
    return pde.reaction_fields(rows, shape, NOISE, start=start)


def vorticity_set(rows: int = 3) -> Tensor:
    start = pde.vorticity_starts(1, 12, NOISE).expand(rows, -1, -1)
    phases = torch.linspace(0, 1.5, rows, dtype=torch.float64)
    return pde.vorticity_fields(start, phases, saves=5, dt=0.02)


def sets() -> dict[str, tuple[Constraint, Tensor]]:
    """The task sets of the paper, with fields near their manifolds."""
    fields, drawn = burgers_set()
    local = burgers_local(GRID, DX, DX, 5)
    heat, _ = pde.heat_fields(4, GRID, NOISE, phase=math.pi / 4)
    reaction, grid = reaction_set(), (32, 25)
    w = vorticity_set()
    return {
        "heat": (stack(initial_condition(heat[0, :, 0], GRID), mass(GRID, 2 * math.pi / 32)), heat),
        "reaction": (
            stack(
                initial_condition(reaction[0, :, 0], grid),
                reaction_diffusion_mass(grid, 1 / 32, 1 / 25),
            ),
            reaction,
        ),
        "reaction, steady": (
            stack(
                initial_condition(reaction[0, :, 0], grid),
                reaction_diffusion_steady(grid, 1 / 32, 1 / 25),
            ),
            reaction,
        ),
        "burgers start": (
            stack(initial_condition(fields[0, :, 0], GRID), local, burgers_mass(GRID, DX, DX)),
            fields,
        ),
        "burgers start, exact": (
            stack(
                initial_condition(fields[0, :, 0], GRID), local, burgers_mass_exact(GRID, DX, DX)
            ),
            fields,
        ),
        "burgers boundary": (
            stack(burgers_boundary(drawn[:, 1], GRID), burgers_mass(GRID, DX, DX)),
            fields,
        ),
        "vorticity": (
            stack(initial_condition(w[0, ..., 0], w.shape[1:]), mass(w.shape[1:], 1 / 144)),
            w,
        ),
    }


SETS = sets()


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_reached_to_machine_precision(name: str):
    constraint, fields = SETS[name]
    start = fields + 0.05 * NOISE.normal(fields, "start")
    found = project(start, constraint)
    assert found.converged.all() and found.worst <= 1e-10
    single = project(start.float(), constraint)
    scale = float(start.abs().max())
    assert single.worst <= 64 * torch.finfo(torch.float32).eps * scale


@pytest.mark.parametrize("name", SETS)
def test_the_jacobian_by_colours_is_that_of_all_rows(name: str):
    constraint, fields = SETS[name]
    fields = fields[:1] + 0.05 * NOISE.normal(fields[:1], "start")
    one = constraint.take(torch.tensor([0]))
    jacobian = torch.func.jacrev(lambda u: one.residual(u[None])[0])(fields[0])
    jacobian = jacobian.reshape(one.count, -1)
    pinv = torch.linalg.pinv(jacobian)  # where equations depend on each other, too
    wanted = fields.flatten(1) - (pinv @ one.residual(fields)[0])[None]
    assert (gauss_newton(fields, one).flatten(1) - wanted).abs().max() < 1e-8


def test_masses_of_heat_are_independent_of_the_initial_values():
    heat, _ = pde.heat_fields(8, GRID, NOISE)
    assert (2 * math.pi / 32 * heat.sum(1)).abs().max() < 3e-14 * 10
    constraint = SETS["heat"][0]
    jacobian = torch.func.jacrev(lambda u: constraint.residual(u[None])[0])(heat[0])
    rank = int(torch.linalg.matrix_rank(jacobian.reshape(constraint.count, -1)))
    assert rank == constraint.count == 63


def test_the_jacobian_of_the_burgers_masses_is_that_of_differences():
    u = burgers_set(1)[0][0] + 0.01 * NOISE.normal(torch.empty(1, *GRID).double())[0]
    law, direction = burgers_mass(GRID, DX, DX), NOISE.normal(u[None], "direction")[0]
    jvp = torch.func.jvp(lambda v: law.residual(v[None])[0], (u,), (direction,))[1]
    e = 1e-5
    ahead, behind = (law.residual((u + k * e * direction)[None])[0] for k in (1, -1))
    assert ((ahead - behind) / (2 * e) - jvp).norm() <= 1e-9 * jvp.norm()


# What solutions obey


def test_exact_laws_are_obeyed_to_rounding_and_the_papers_are_not():
    fields, _ = burgers_set(8, None)
    exact = constraint_floor(burgers_mass_exact(GRID, DX, DX), fields)["mass"]["max"]
    local = constraint_floor(burgers_local(GRID, DX, DX, 31), fields)["local"]["max"]
    published = constraint_floor(burgers_mass(GRID, DX, DX), fields)["mass"]["max"]
    assert exact < 2e-15 and local < 2e-15 and published > 1e-3
    reaction, grid = reaction_set(8), (32, 25)
    steady = constraint_floor(reaction_diffusion_steady(grid, 1 / 32, 1 / 25), reaction)["mass"]
    published = constraint_floor(reaction_diffusion_mass(grid, 1 / 32, 1 / 25), reaction)["mass"]
    assert steady["max"] < 1e-5 and published["max"] > 10 * steady["max"]
    w = vorticity_set()
    assert constraint_floor(mass(w.shape[1:], 1 / 144), w)["mass"]["max"] < 1e-15


def test_the_sum_of_local_laws_is_the_exact_balance():
    u = NOISE.normal(torch.empty(2, *GRID, dtype=torch.float64))
    local = burgers_local(GRID, DX, DX, 31).residual(u).reshape(2, 30, 31).sum(1) * DX
    assert (local.cumsum(1) - burgers_mass_exact(GRID, DX, DX).residual(u)).abs().max() < 1e-12


def test_a_balance_of_the_user():
    """Linear advection by a speed of 1: what leaves is u at the right end."""
    law = conservation(
        GRID, 0.1, 0.2, flux=lambda u: (u[:, 0], u[:, -1]), source=lambda u: 0 * u, linear=True
    )
    u = NOISE.normal(torch.empty(2, *GRID, dtype=torch.float64))
    m, f = 0.1 * u.sum(1), u[:, 0] - u[:, -1]
    gain = np.concatenate([np.zeros((2, 1)), np.cumsum((f[:, 1:] + f[:, :-1]) * 0.1, 1)], 1)
    assert (law.residual(u) - (m - m[:, :1] - gain)[:, 1:]).abs().max() < 1e-12
    assert law.linear and project(u, law).worst < 1e-12


# The solvers


def test_reaction_without_growth_decays_as_its_modes():
    """A cosine of the cells decays by its eigenvalue of the discrete Laplacian; a flux adds."""
    n, nu = 24, 5e-3
    x = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    start, zero = torch.cos(2 * math.pi * x)[None], torch.zeros(1, dtype=torch.float64)
    times = pde.reaction_times(11)
    fields = pde.reaction_diffusion(start, zero, zero, times=times, rho=0.0, nu=nu)
    rate = 4 * nu * n**2 * math.sin(math.pi / n) ** 2
    assert (fields[0] - start[0][:, None] * torch.exp(-rate * times)).abs().max() < 1e-7
    left = torch.tensor([0.03], dtype=torch.float64)
    moved = pde.reaction_diffusion(start, left, -left, times=times, rho=0.0)
    grown = moved.sum(1)[0] / n - 0.06 * times
    assert (grown - grown[0]).abs().max() < 1e-9


def test_a_shock_moves_at_half_the_height():
    place = torch.tensor([0.25], dtype=torch.float64)
    n, steps = 201, 160
    start = (torch.linspace(0, 1, n, dtype=torch.float64) < 0.25).double()[None]
    fields = pde.burgers(start, torch.ones(1), steps=steps, dx=1 / 200, dt=1 / 200)
    found = fields[0, :, -1].sum() / 200  # the mass left of the shock
    assert abs(float(found) - float(place + 0.5 * steps / 200)) < 0.01


def test_godunov_takes_the_right_side_of_a_shock():
    left, right = torch.tensor([2.0, -1.0, 1.0, -2.0]), torch.tensor([1.0, -3.0, 2.0, -1.0])
    wanted = torch.tensor([2.0, 4.5, 0.5, 0.5])
    assert torch.equal(pde.godunov(left, right), wanted)


def test_vorticity_of_one_mode_decays_as_it_should():
    """A single wave carries nothing: it decays by its viscous rate, of order two in the step."""
    n = 16
    x = torch.arange(n, dtype=torch.float64) / n
    start = torch.sin(2 * math.pi * x)[:, None].expand(n, n)[None]
    force, errors = torch.zeros_like(start), []
    for dt in (0.5, 0.25):
        fields = pde.navier_stokes(start, force, saves=5, dt=dt, viscosity=1e-2)
        wanted = start[0] * math.exp(-4 * 1e-2 * 4 * math.pi**2)
        errors.append(float((fields[0, ..., -1] - wanted).abs().max()))
    assert 3.8 < errors[0] / errors[1] < 4.2


def test_vorticity_keeps_what_it_keeps_without_viscosity():
    """Energy and enstrophy of the flow change with the first order of the step only."""
    start = pde.vorticity_starts(2, 24, NOISE)
    w_hat = torch.fft.fft2(start)
    w_hat[:, 8:17] = w_hat[:, :, 8:17] = 0  # what is dealiased is not in the start
    start, changes = torch.fft.ifft2(w_hat).real, []
    for dt in (4e-3, 2e-3):
        fields = pde.navier_stokes(
            start, torch.zeros_like(start), saves=2, interval=0.2, dt=dt, viscosity=0.0
        )
        enstrophy = fields.square().sum((1, 2))
        changes.append(float((enstrophy[:, 1] / enstrophy[:, 0] - 1).abs().max()))
    assert changes[1] < 2e-3 and 1.7 < changes[0] / changes[1] < 2.3


def test_starts_have_their_law():
    w = pde.vorticity_starts(600, 8, NOISE)
    assert w.mean((1, 2)).abs().max() < 1e-12
    k = torch.fft.fftfreq(8, 1 / 8, dtype=torch.float64)
    square = k[:, None].square() + k.square()
    power = 2 * 7.0**3 * (4 * math.pi**2 * square + 49) ** -2.5 * 8**4
    power[0, 0] = 0
    found = torch.fft.fft2(w).abs().square().mean(0)
    # a mean of 600 exponentials, or squares of normals for real modes; 64 modes
    assert ((found - power).abs() <= 5 * math.sqrt(2 / 600) * power + 1e-20).all()
    u = pde.reaction_starts(50, 32, NOISE)
    assert (u.amin(1) == 0).all() and (u.amax(1) == 1).all()


def test_rows_depend_on_their_own_noise_only():
    whole, _ = pde.burgers_fields(4, GRID, NOISE)
    part, _ = pde.burgers_fields(2, GRID, NOISE.rows(torch.tensor([2, 3])))
    assert torch.equal(whole[2:], part)


# Bad input


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: initial_condition(torch.zeros(5), GRID), ValueError, r"values must be \(32,\)"),
        (lambda: dirichlet(torch.ones(3, 3), torch.ones(3, 3)), TypeError, "bool"),
        (
            lambda: dirichlet(torch.ones(3, 3, dtype=torch.bool), torch.ones(4)),
            ValueError,
            "9 entries",
        ),
        (lambda: burgers_local(GRID, DX, DX, 32), ValueError, r"\[1, 31\]"),
        (lambda: mass((9,), 0.1), ValueError, r"\(\*space, n_t\) with two saves or more, .*\(9,\)"),
        (lambda: mass((9, 1), 0.1), ValueError, "two saves"),
        (lambda: initial_condition(torch.tensor(0.0), (9,)), ValueError, r"\(\*space, n_t\)"),
        (
            lambda: conservation((4, 4), 0.1, 0.1, source=lambda u: u[:, 0]),
            ValueError,
            "source must return",
        ),
        (
            lambda: conservation((4, 4), 0.1, 0.1, flux=lambda u: (u[:, 0], u[:, 0, :1])),
            ValueError,
            "flux must return two of",
        ),
        (lambda: reaction_diffusion_mass((4, 9), 0.1, 0.1), ValueError, "five points"),
        (
            lambda: conservation((4, 4, 4), 0.1, 0.1, flux=lambda u: (u, u)),
            ValueError,
            "events",
        ),
        (
            lambda: pde.burgers(torch.ones(1, 5), torch.ones(1), steps=2, dx=0.1, dt=0.2),
            ValueError,
            "dt must be at most",
        ),
        (
            lambda: pde.navier_stokes(torch.zeros(1, 8, 8), torch.zeros(1, 8, 8), saves=2, dt=0.3),
            ValueError,
            "divide",
        ),
    ],
)
def test_bad_input_is_refused(make: object, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()


def test_values_where_a_mask_says():
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, 2] = mask[2, 0] = True
    values = torch.arange(12.0).reshape(3, 4)
    for given in (values, values[mask], values.expand(2, 3, 4)):
        found = project(torch.zeros(2, 3, 4), dirichlet(mask, given))
        assert torch.equal(found.u[1], torch.where(mask, values, 0.0)) and found.worst == 0
