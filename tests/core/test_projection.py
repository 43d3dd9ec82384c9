"""The projection onto h(u) = 0: closed forms, structure against dense matrices, contradictions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import Linear
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import simulate
from fluvial.core.steering.projection import (
    CleanProjection,
    Constraint,
    FinalProjection,
    Pins,
    Rows,
    equations,
    gauss_newton,
    linear_equations,
    project,
    stack,
    window_pattern,
)
from fluvial.core.time import uniform_grid

NOISE = KeyedNoise(7)
SHAPE = (6, 5)


def draw(*shape: int, tag: str = "x") -> Tensor:
    return NOISE.normal(torch.empty(shape, dtype=torch.float64), tag)


def sphere(n: int = 2) -> Constraint:
    return equations(lambda u: u.square().sum(1, keepdim=True) - 1, (n,))


def neighbours(u: Tensor) -> Tensor:
    """A local law: u_(i+1) = 0.6 u_i + 0.3 sin u_(i-1)."""
    return (u[:, 2:] - 0.6 * u[:, 1:-1] - 0.3 * u[:, :-2].sin()).flatten(1)


def local(known: bool = True, shape: tuple[int, int] = SHAPE) -> Constraint:
    flat = torch.arange(shape[0] * shape[1]).reshape(shape)
    windows = torch.stack([flat[:-2], flat[1:-1], flat[2:]], -1).reshape(-1, 3)
    pattern = window_pattern(windows.tolist()) if known else None
    return equations(neighbours, shape, pattern=pattern, name="local")


def values(rows: int | None = None) -> Constraint:
    index = torch.tensor([0, 7, 13])
    pinned = draw(3, tag="pins") if rows is None else draw(rows, 3, tag="pins")
    return Constraint(SHAPE, [Pins(index, pinned)])


def dense_step(u: Tensor, base: Tensor, constraint: Constraint, damp: float) -> Tensor:
    """The step as the paper writes it, by a dense Jacobian of all equations."""
    moved = []
    for k, (here, start) in enumerate(zip(u, base, strict=True)):
        one = constraint.take(torch.tensor([k]))
        jacobian = torch.func.jacrev(lambda v, one=one: one.residual(v[None])[0])(here)
        jacobian = jacobian.reshape(one.count, -1)
        h = one.residual(here[None])[0] + jacobian @ (start - here).flatten()
        square = jacobian @ jacobian.T + damp * torch.eye(one.count, dtype=u.dtype)
        moved.append(start - (jacobian.T @ torch.linalg.solve(square, h)).reshape(here.shape))
    return torch.stack(moved)


# Closed forms


@pytest.mark.parametrize("method", ["sqp", "root"])
def test_linear_equations_are_projected_orthogonally(method: str):
    a, b, u = draw(4, 30, tag="a"), draw(4, tag="b"), draw(3, *SHAPE)
    constraint = linear_equations(a, b, SHAPE)
    found = project(u, constraint, method=method)
    assert found.worst <= 1e-12
    wanted = u.flatten(1) - (u.flatten(1) @ a.T - b) @ torch.linalg.pinv(a).T
    assert (found.u.flatten(1) - wanted).abs().max() <= 1e-12
    again = project(found.u, constraint, method=method)
    assert (again.u - found.u).abs().max() <= 1e-12 and again.iterations <= 1
    moved = (found.u - u).flatten(1).T
    outside = moved - a.T @ torch.linalg.lstsq(a.T, moved).solution
    assert outside.abs().max() <= 1e-12


def test_the_circle_is_approached_as_newton_does():
    u, wanted = torch.tensor([[2.0, 0.0]], dtype=torch.float64), (1.25, 1.025, 1.00030488)
    for k, value in enumerate((*wanted, 1.00000005), 1):
        assert abs(float(gauss_newton(u, sphere(), steps=k)[0, 0]) - value) < 1e-8
    state = u.clone()
    for value in (*wanted, 1.00000005):  # along a ray a step from the first point is the same
        state = sphere().system.step(state, u, torch.empty(1, 0, dtype=torch.float64), 0.0)
        assert abs(float(state[0, 0]) - value) < 1e-7
    for method in ("sqp", "root"):
        assert (project(u, sphere(), method=method).u - u / 2).abs().max() < 1e-10


def test_sequential_programming_finds_the_nearest_point_and_newton_another():
    law = equations(lambda u: u[:, :1].square() + 4 * u[:, 1:].square() - 4, (2,))
    u = torch.tensor([[1.5, 1.2], [-1.8, 0.6]], dtype=torch.float64)
    nearest, root = project(u, law), project(u, law, method="root")
    assert nearest.worst <= 1e-10 and root.worst <= 1e-10
    assert bool(nearest.nearest.all()) and not bool(root.nearest.any())
    for start, point in zip(u, nearest.u, strict=True):
        best = minimize(
            lambda v, start=start: float(((v - start.numpy()) ** 2).sum()),
            start.numpy(),
            constraints={"type": "eq", "fun": lambda v: v[0] ** 2 + 4 * v[1] ** 2 - 4},
            method="SLSQP",
            options={"ftol": 1e-14},
        )
        assert np.abs(best.x - point.numpy()).max() < 1e-6
    assert ((root.u - u).norm(dim=1) > (nearest.u - u).norm(dim=1) + 1e-4).all()


# Structure


@pytest.mark.parametrize("damp", [0.0, 1e-2])
@pytest.mark.parametrize("known", [True, False])
def test_a_step_is_that_of_the_dense_jacobian(known: bool, damp: float):
    u = draw(3, *SHAPE)
    constraint = local(known)
    wanted = dense_step(u, u, constraint, damp)
    assert (gauss_newton(u, constraint, damp=damp) - wanted).abs().max() < 1e-11


def test_values_are_eliminated_exactly():
    u = draw(4, *SHAPE)
    constraint = stack(values(4), local())
    stepped = gauss_newton(u, constraint)
    assert (stepped - dense_step(u, u, constraint, 0.0)).abs().max() < 1e-11
    assert torch.equal(stepped.flatten(1)[:, [0, 7, 13]], draw(4, 3, tag="pins"))
    # and in the step of sequential programming, whose base is another point
    base = draw(4, *SHAPE, tag="base")
    found = constraint.system.step(
        u.flatten(1), base.flatten(1), constraint.pinned[1], 0.0
    ).reshape(u.shape)
    assert (found - dense_step(u, base, constraint, 0.0)).abs().max() < 1e-11


def test_without_a_pattern_and_with_many_equations_there_is_no_jacobian(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("fluvial.core.steering.projection.DENSE", 3)
    u = draw(3, *SHAPE)
    free, wanted = stack(values(), local(False)), stack(values(), local())
    assert type(free.system).__name__ == "_Free" and type(wanted.system).__name__ == "_Sparse"
    for damp in (0.0, 1e-2):
        a, b = gauss_newton(u, free, damp=damp), gauss_newton(u, wanted, damp=damp)
        assert (a - b).abs().max() < 1e-9
    assert (project(u, free).u - project(u, wanted).u).abs().max() < 1e-7


def test_rows_of_a_colour_share_no_coordinate():
    rows = local(True, (9, 7)).rows[0]
    colours = rows.colours
    row, column = rows.pattern.numpy()
    for colour in range(colours.max() + 1):
        used = column[np.isin(row, np.flatnonzero(colours == colour))]
        assert len(used) == len(set(used.tolist()))
    assert colours.max() + 1 <= 5  # three coordinates a row; the fewest is 3


def test_a_running_sum_is_the_same_manifold_and_step():
    u = draw(3, *SHAPE)

    def steps(u: Tensor) -> Tensor:
        return u.square().sum(1).diff(dim=1)

    flat = torch.arange(30).reshape(SHAPE)
    pattern = window_pattern([flat[:, k : k + 2].reshape(-1).tolist() for k in range(4)])
    local_form = Constraint(SHAPE, [Rows(steps, 4, pattern, cumulative=True)])
    whole = equations(lambda u: u.square().sum(1)[:, 1:] - u.square().sum(1)[:, :1], SHAPE)
    assert (local_form.residual(u) - whole.residual(u)).abs().max() < 1e-13
    assert (gauss_newton(u, local_form) - dense_step(u, u, whole, 0.0)).abs().max() < 1e-10


# Contradictions and dependent equations


def test_dependent_equations_do_no_harm():
    a, b = draw(3, 30, tag="a"), draw(3, tag="b")
    twice = linear_equations(
        torch.cat([a, a, a[:1] + a[1:2]]), torch.cat([b, b, b[:1] + b[1:2]]), SHAPE
    )
    u = draw(2, *SHAPE)
    found, wanted = project(u, twice), project(u, linear_equations(a, b, SHAPE))
    assert found.worst < 1e-10 and (found.u - wanted.u).abs().max() < 1e-9


def test_contradictions_get_the_least_squares_point_and_its_residual():
    a = torch.cat([draw(3, 30, tag="a")] * 2)
    b, u = draw(6, tag="b"), draw(2, *SHAPE)
    constraint = linear_equations(a, b, SHAPE)
    with pytest.raises(ValueError, match=r"max \|h\| is .* in event \d.*contradict"):
        project(u, constraint)
    found = project(u, constraint, strict=False)
    assert not found.converged.any()
    moved = torch.linalg.pinv(a) @ (b - u.flatten(1) @ a.T).T
    assert (found.u.flatten(1) - u.flatten(1) - moved.T).abs().max() < 1e-8
    assert (found.residual - (found.u.flatten(1) @ a.T - b)).abs().max() < 1e-12


def test_values_that_differ_at_one_place_meet_in_the_middle():
    index = torch.tensor([4])
    twice = Constraint((6,), [Pins(index, torch.tensor([v])) for v in (1.0, 3.0)])
    found = project(draw(2, 6), twice, strict=False)
    assert (found.u[:, 4] - 2).abs().max() < 1e-12
    assert (found.residual - torch.tensor([1.0, -1.0])).abs().max() < 1e-12


@pytest.mark.parametrize("known", [True, False])
def test_equations_of_very_different_sizes(known: bool):
    """Their order of magnitude is the user's units, and must not decide what is met."""
    u, weights = draw(2, *SHAPE), 10.0 ** (-2 * torch.arange(5, dtype=torch.float64)[:, None])
    a, b = draw(5, 30, tag="a"), draw(5, tag="b")
    if known:
        constraint = linear_equations(weights * a, weights[:, 0] * b, SHAPE)
    else:
        constraint = equations(lambda u: (u.flatten(1) @ a.T - b) * weights[:, 0], SHAPE)
    found = project(u, constraint, tol=1e-20, strict=False)
    wanted = u.flatten(1) - (u.flatten(1) @ a.T - b) @ torch.linalg.pinv(a).T
    assert (found.u.flatten(1) - wanted).abs().max() < 1e-10


def test_dependent_equations_are_counted():
    a, u = draw(3, 30, tag="a"), draw(2, *SHAPE)
    rows = torch.cat([a, a[:1] + a[1:2], torch.zeros(1, 30, dtype=a.dtype)])
    sparse = linear_equations(rows, torch.zeros(5, dtype=a.dtype), SHAPE)
    dense = equations(lambda v: v.flatten(1) @ rows.T, SHAPE)
    pins = Constraint(SHAPE, [Pins(torch.tensor([0, 1, 1, 2, 1]), torch.zeros(5))])
    for constraint, count in ((sparse, 2), (dense, 2), (pins, 2), (stack(pins, sparse), 4)):
        assert constraint.dependent(u).tolist() == [count, count]
        jacobian = torch.func.jacrev(lambda v, c=constraint: c.residual(v[None])[0])(u[0])
        rank = int(torch.linalg.matrix_rank(jacobian.reshape(constraint.count, -1)))
        assert constraint.count - count == rank
    assert local().dependent(u).tolist() == local(False).dependent(u).tolist() == [0, 0]
    # values that are known take away what an equation reads
    index = torch.arange(15)
    assert stack(Constraint(SHAPE, [Pins(index, u[0].flatten()[index])]), local()).dependent(
        u
    ).tolist() == [5, 5]


def test_an_event_at_which_h_is_not_finite_stays(monkeypatch: pytest.MonkeyPatch):
    u = draw(3, *SHAPE).abs()
    u[1, 0, 0] = -1.0

    def roots(v: Tensor) -> Tensor:
        return v[:, 0, :2].sqrt() - 0.3

    for pattern in (None, window_pattern([[0], [1]])):
        for dense in (512, 1):
            monkeypatch.setattr("fluvial.core.steering.projection.DENSE", dense)
            law = equations(roots, SHAPE, pattern=pattern)
            moved = gauss_newton(u, law)
            assert torch.equal(moved[1], u[1]) and bool(moved.isfinite().all())
            found = project(u, law, strict=False)
            assert found.converged.tolist() == [True, False, True]
            assert torch.equal(found.u[1], u[1])
            with pytest.raises(ValueError, match="h is not finite there"):
                project(u, law)


def test_a_failure_says_why():
    u = draw(20, *SHAPE)
    size = equations(lambda v: 1e9 * (v.sin().sum(2) - 0.3), SHAPE)  # in steps of 6e-8
    with pytest.raises(ValueError, match="that is the rounding of these equations"):
        project(u, size)
    u = u[:1]
    with pytest.raises(ValueError, match="contradict each other there .1 depend"):
        project(u, linear_equations(torch.ones(2, 30), torch.tensor([0.0, 1.0]), SHAPE))
    law = equations(lambda v: v.square().flatten(1).sum(1, keepdim=True) + 1, SHAPE)
    with pytest.raises(ValueError, match="no solution was found near u"):
        project(draw(1, *SHAPE), law)


def test_dense_jacobians_of_a_large_batch_are_held_in_parts(monkeypatch: pytest.MonkeyPatch):
    u, law = draw(5, *SHAPE), stack(values(5), local(False))
    whole = gauss_newton(u, law)
    monkeypatch.setattr("fluvial.core.steering.projection.CHUNK", 2 * 30 * law.rows[0].count)
    assert (gauss_newton(u, law) - whole).abs().max() < 1e-13


def test_a_pattern_may_name_an_entry_twice():
    u = draw(2, *SHAPE)
    pattern = local().rows[0].pattern
    again = equations(neighbours, SHAPE, pattern=torch.cat([pattern, pattern[:, ::2]], 1))
    assert (gauss_newton(u, again) - gauss_newton(u, local())).abs().max() < 1e-13
    assert gauss_newton(u[:0], again).shape == (0, *SHAPE)


def test_colours_go_one_by_one_where_events_are_large(monkeypatch: pytest.MonkeyPatch):
    u, law = draw(3, *SHAPE), stack(values(3), local())
    whole = gauss_newton(u, law)
    for most in (1, 30 * 3 * 2):  # one at a time, and two
        monkeypatch.setattr("fluvial.core.steering.projection.ONE_PASS", most)
        assert (gauss_newton(u, law) - whole).abs().max() < 1e-13


# What the user receives


def test_the_residual_is_of_the_array_after_its_cast():
    u = draw(3, *SHAPE).float()
    found = project(u, local())
    assert found.u.dtype == torch.float32 and found.converged.all()
    assert torch.equal(found.residual, local().residual(found.u.double()))
    assert 1e-10 < found.worst < 32 * torch.finfo(torch.float32).eps
    assert project(u.double(), local()).worst <= 1e-10


def test_an_event_does_not_depend_on_its_batch():
    u = draw(4, *SHAPE)
    u[2] *= 3
    constraint = stack(values(4), local())
    whole = project(u, constraint).u
    for k in range(4):
        one = torch.tensor([k])
        assert (project(u[one], constraint.take(one)).u - whole[one]).abs().max() < 1e-12


class Shift:
    predicts = "velocity"

    def __call__(self, x: Tensor, t: Tensor, **cond: object) -> Tensor:
        return 0.3 * x.sin()


def test_steerings_work_with_any_sampler():
    x = draw(3, *SHAPE)
    final = FinalProjection(stack(values(), local()))
    u = simulate(x, uniform_grid(4), Euler(), Linear(), Shift(), NOISE, final)
    assert final.found is not None and torch.equal(final.found.u, u)
    assert final.constraint.residual(u).abs().max() <= 1e-10
    bare = simulate(x, uniform_grid(4), Euler(), Linear(), Shift(), NOISE)
    assert (project(bare, final.constraint).u - u).abs().max() < 1e-12
    along = CleanProjection(final.constraint)
    u = simulate(x, uniform_grid(4), Euler(), Linear(), Shift(), NOISE, along)
    assert along.constraint.residual(u).abs().max() <= 1e-10


# Bad input


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: equations(lambda u: u.sum(), (3,)), ValueError, r"must return \(batch, m\)"),
        (lambda: equations(lambda u: u.detach()[:, :1], (3,)), ValueError, "differentiated"),
        (lambda: equations(lambda u: torch.cat([u, u], 1), (3,)), ValueError, "6 equations for 3"),
        (lambda: Constraint((3,), [Pins(torch.tensor([3]), torch.ones(1))]), ValueError, r"\[0, 3"),
        (lambda: Constraint((3,), [Pins(torch.tensor([0.0]), torch.ones(1))]), TypeError, "int64"),
        (lambda: Constraint((3,), [Pins(torch.tensor([0]), torch.ones(2))]), ValueError, "must be"),
        (
            lambda: Constraint((3,), [Pins(torch.tensor([0]), torch.tensor([np.nan]))]),
            ValueError,
            "finite",
        ),
        (
            lambda: equations(lambda u: u[:, :1], (3,), pattern=torch.tensor([[0], [5]])),
            ValueError,
            "pattern",
        ),
        (
            lambda: equations(
                lambda u: u[:, :1] * u[:, 2:], (3,), pattern=torch.tensor([[0], [0]])
            ),
            ValueError,
            "lacks coordinates that its equations read, such as 2",
        ),
        (
            lambda: equations(lambda u: u.square().sum(1, keepdim=True), (3,), linear=True),
            ValueError,
            "not linear",
        ),
        (lambda: equations(lambda u: u - u.mean(), (3,)), ValueError, "mixes the events"),
        (lambda: equations(lambda u: u.sum().reshape(1, 1), (3,)), ValueError, "for a batch of 3"),
        (
            lambda: equations(lambda u: u @ torch.ones(3, 1), (3,)),
            ValueError,
            r"fails on a float64 batch of shape \(3, 3\)",
        ),
        (lambda: equations(lambda u: u[:, :1], 3), TypeError, "shape must be a tuple"),
        (lambda: Constraint((3, 0)), ValueError, "sides of at least 1"),
        (lambda: stack(sphere(2), sphere(3)), ValueError, "one shape"),
        (lambda: linear_equations(torch.ones(1, 4), torch.ones(1), (3,)), ValueError, "matrix"),
        (lambda: project(draw(2, 3), sphere(2)), ValueError, r"events of \(2,\), got \(3,\)"),
        (lambda: project(torch.ones(2, 2, dtype=torch.int64), sphere()), TypeError, "floating"),
        (lambda: project(torch.full((1, 2), np.inf), sphere()), ValueError, "not finite"),
        (lambda: project(draw(2, 2), sphere(), tol=0.0), ValueError, "tol > 0"),
        (lambda: project(draw(2, 2), sphere(), method="lm"), ValueError, "sqp or root"),
        (lambda: gauss_newton(draw(2, 2), sphere(), damp=-1.0), ValueError, "damp"),
        (lambda: project(draw(3, *SHAPE), values(4)), ValueError, "4 events, got 3"),
    ],
)
def test_bad_input_is_refused(make: object, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()


def test_an_unreachable_level_is_reported():
    law = equations(lambda u: u.square().sum(1, keepdim=True) + 1, (2,))
    with pytest.raises(ValueError, match="did not reach tol"):
        project(draw(2, 2), law)
    found = project(draw(2, 2), law, strict=False)
    assert not found.converged.any() and found.worst >= 1
