"""The sampler, its baselines and the class: the checks of the method, then their use."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import Linear, VPCosine
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import simulate
from fluvial.core.steering.projection import (
    Constraint,
    equations,
    linear_equations,
    project,
    stack,
)
from fluvial.core.time import uniform_grid
from fluvial.networks import FNO, MLP
from fluvial.networks.fno import SpectralConvolution
from fluvial.physics import PhysicsConstrainedFlow, pde
from fluvial.physics.constraints import burgers_mass, dirichlet, initial_condition, mass
from fluvial.physics.physics_constrained_flow import (
    ECI,
    PCFM,
    DFlow,
    EmpiricalDenoiser,
    GuidedEuler,
    OfficialField,
    ProjectedState,
    field_scores,
    relaxed,
    sample_under,
    steady_scales,
    worst_residual,
)

NOISE = KeyedNoise(5)
GRID = (8, 6)
PATH = Linear()


def draw(*shape: int, tag: str = "x") -> Tensor:
    return NOISE.normal(torch.empty(shape, dtype=torch.float64), tag)


class GaussianField:
    """The exact velocity of data N(0, c^2)."""

    predicts = "velocity"

    def __init__(self, c: float) -> None:
        self.c = c

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        gain = (1 - t) * self.c**2 / ((1 - t) ** 2 * self.c**2 + t**2)
        return x * ((1 - gain * (1 - t)) / t - gain)


class Towards:
    """The exact velocity of one field: (x - x*) / t."""

    predicts = "velocity"

    def __init__(self, point: Tensor) -> None:
        self.point = point

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return (x - self.point) / t


class Bent:
    """A velocity that depends on x and t in no special way."""

    predicts = "velocity"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return torch.sin(2 * x + t) + x.roll(1, -1) * 0.3


def sphere(shape: tuple[int, ...]) -> Constraint:
    return equations(lambda u: u.square().flatten(1).sum(1, keepdim=True) - 1, shape)


def run(field: Any, sampler: Any, steps: int, x: Tensor, noise: Any = NOISE, steer: Any = None):
    return simulate(x, uniform_grid(steps), sampler, PATH, field, noise, steer)


# 3: PCFM without the correction, with fixed noise, is ECI


@pytest.mark.parametrize("kind", ["values", "mean"])
@pytest.mark.parametrize(("damp", "tolerance"), [(0.0, 1e-10), (1e-6, 2e-5)])
def test_without_correction_it_overwrites_as_eci_does(kind: str, damp: float, tolerance: float):
    x, steps = draw(3, *GRID), 7
    mask = draw(*GRID, tag="mask") > 0.5
    values = draw(*GRID, tag="values")
    if kind == "values":
        constraint = dirichlet(mask, values)
    else:
        weight = torch.full((1, 48), 48**-0.5, dtype=x.dtype)  # of norm 1, as damp is absolute
        constraint = linear_equations(weight, torch.tensor([0.3 * 48**0.5]).double(), GRID)

    def overwritten(clean: Tensor) -> Tensor:
        if kind == "values":
            return torch.where(mask, values, clean)
        shift = constraint.residual(clean).neg() * 48**-0.5
        assert ((0.3 - clean.mean((1, 2))) - shift[:, 0]).abs().max() < 1e-7
        return clean + shift[..., None]

    ours, theirs, state = PCFM(constraint, guide_weight=0.0, damp=damp), ECI(constraint), x
    for k in range(steps):  # by hand
        t, s = 1 - k / steps, 1 - (k + 1) / steps
        clean = overwritten(state - t * Bent()(state, torch.tensor(t, dtype=torch.float64)))
        state = (1 - s) * clean + s * x
        pairs = uniform_grid(steps)[: k + 1]
        for sampler, bound in ((ours, tolerance), (theirs, 1e-10)):
            found = simulate(x, pairs, sampler, PATH, Bent(), NOISE)
            assert (found - state).abs().max() <= bound


def test_eci_mixes_and_draws_anew():
    x, constraint = draw(2, *GRID), dirichlet(draw(*GRID, tag="mask") > 0.5, draw(*GRID))
    plain, mixed = (run(Bent(), ECI(constraint, n), 4, x) for n in (1, 3))
    fresh = run(Bent(), ECI(constraint, 3, redraw=2), 4, x)
    assert (plain - mixed).abs().max() > 1e-3 and (fresh - mixed).abs().max() > 1e-3
    for u in (plain, mixed, fresh):
        assert constraint.residual(u).abs().max() == 0


# 4: the spread of the three kinds of noise


@pytest.mark.parametrize(
    ("c", "wanted"),
    [
        (1.0, {1: 0, 2: 0.5, 4: 0.8850, 10: 1.4721, 50: 2.9440, 100: 3.8490}),
        (0.5, {1: 0, 2: 0.2, 4: 0.38045, 10: 0.6270}),
    ],
)
def test_fixed_noise_spreads_too_much(c: float, wanted: dict[int, float]):
    x = torch.ones(1, 1, dtype=torch.float64)
    for steps, value in wanted.items():
        found = run(GaussianField(c), PCFM(Constraint((1,))), steps, x)
        assert abs(float(found) - value) < 1e-4


@pytest.mark.parametrize(("steps", "wanted"), [(10, 0.8790), (100, 0.9872)])
def test_implied_noise_is_eulers_method(steps: int, wanted: float):
    x = torch.ones(1, 1, dtype=torch.float64)
    sampler = PCFM(Constraint((1,)), renoise="implied")
    found = float(run(GaussianField(1.0), sampler, steps, x))
    assert abs(found - wanted) < 1e-4
    assert abs(found - float(run(GaussianField(1.0), Euler(), steps, x))) < 1e-12
    # on any path, and where the simulation does not start at the source
    x = draw(4, *GRID)
    pairs = uniform_grid(9)[3:]
    for path in (Linear(), VPCosine()):
        sampler = PCFM(Constraint(GRID), renoise="implied")
        ours = simulate(x, pairs, sampler, path, Bent(), NOISE)
        one = simulate(x, pairs, Euler(), path, Bent(), NOISE)
        if isinstance(path, Linear):
            assert (ours - one).abs().max() < 1e-12
        assert ours.isfinite().all()


class Units:
    """The draw of step k is 1 in coordinate k + 1 alone: a sampler that is linear in its draws
    returns their coefficients, the norm of which is the deviation for draws that are normal."""

    def __init__(self, k: int = 0) -> None:
        self.k = k

    def at(self, k: int) -> Units:
        return Units(k)

    def normal(self, like: Tensor, tag: str = "") -> Tensor:
        return torch.eye(like.shape[1], dtype=like.dtype)[[self.k + 1]]


@pytest.mark.parametrize(("steps", "wanted"), [(10, 0.6335), (100, 0.6946), (1000, 0.7047)])
def test_fresh_noise_spreads_too_little(steps: int, wanted: float):
    x = torch.eye(steps + 1, dtype=torch.float64)[:1]
    sampler = PCFM(Constraint((steps + 1,)), renoise="fresh")
    found = run(GaussianField(1.0), sampler, steps, x, Units())
    assert abs(float(found.norm()) - wanted) < 1e-4
    drawn = run(GaussianField(1.0), PCFM(Constraint((4_000,)), renoise="fresh"), 10, draw(1, 4_000))
    assert abs(float(drawn.std()) / 0.6335 - 1) < 4 / math.sqrt(2 * 4_000)  # standard errors


# 5 and 6


@pytest.mark.parametrize("renoise", ["fixed", "implied", "fresh"])
def test_one_field_gives_its_projection_whatever_the_noise(renoise: Any):
    point = draw(1, *GRID, tag="point")
    constraint = sphere(GRID)
    wanted = project(point, constraint).u
    for steps in (1, 3, 8):
        sampler = PCFM(constraint, guide_weight=0.0, newton=9, renoise=renoise)
        x = draw(3, *GRID)
        found = run(Towards(point), sampler, steps, x)
        assert (project(found, constraint).u - wanted).abs().max() < 1e-6


def test_one_step_gives_the_projection_of_the_mean():
    rows = draw(20, *GRID, tag="rows")
    constraint = initial_condition(draw(8, tag="start"), GRID)
    made = sample_under(
        EmpiricalDenoiser(rows), GRID, 5, noise=NOISE, constraint=constraint, steps=1
    )
    wanted = project(rows.mean(0, keepdim=True), constraint).u
    # the last correction moves towards h = 0 only along what it reads; it ends on the manifold
    assert (made.u - wanted).abs().max() < 1e-6
    assert made.worst == 0


# 7: the relaxed correction


def test_the_correction_shrinks_its_error_as_a_quadratic_does():
    a, b = draw(4, 48, tag="a") / 7, draw(4, tag="b")
    law = linear_equations(a, b, GRID)
    y, v, gamma, lam, eta, steps = (
        draw(2, *GRID, tag="y"),
        draw(2, *GRID, tag="v"),
        0.6,
        1.5,
        0.02,
        9,
    )
    found = relaxed(y, law, lambda u: u - gamma * v, lam, steps, eta).flatten(1)
    inner = torch.eye(4, dtype=y.dtype) + lam * a @ a.T
    defect = (y - gamma * v).flatten(1) @ a.T - b
    fixed = y.flatten(1) - lam * torch.linalg.solve(inner, defect.T).T @ a
    _, sigma, right = torch.linalg.svd(a, full_matrices=False)
    before, after = ((u - fixed) @ right.T for u in (y.flatten(1), found))
    shrunk = (1 - 2 * eta * (1 + lam * sigma**2)) ** steps
    assert (after - shrunk * before).abs().max() < 1e-12
    one = equations(lambda u: u, (1,))
    moved = relaxed(torch.ones(1, 1), one, lambda u: u, 1.0, 20, 1e-2)
    assert abs(float(moved) - 0.72100) < 1e-5


def test_a_step_that_is_too_long_is_halved_for_the_event_that_needs_it():
    y = draw(3, 8)

    def cost(u: Tensor, law: Constraint) -> Tensor:
        return (u - y).square().sum(1) + law.residual(u).square().sum(1)

    stiff = equations(lambda u: 50 * (u[:, :1] + u[:, 1:2].square()), (8,))
    moved = relaxed(y, stiff, lambda u: u, 1.0, 20, 1e-2)
    plain = y
    for _ in range(3):  # what descent without a look at the objective does
        leaf = plain.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(cost(leaf, stiff).sum(), leaf)
        plain = plain - 1e-2 * gradient
    assert (cost(plain, stiff) > cost(y, stiff)).any()
    assert (cost(moved, stiff) < 0.1 * cost(y, stiff)).all()
    # an event at which h is not finite stays, and does not disturb the others
    rooted = equations(lambda u: u[:, :1].sqrt() - 2, (8,))
    y[:, 0] = torch.tensor([1.0, -1.0, 3.0])
    moved = relaxed(y, rooted, lambda u: u, 1.0, 20, 1e-2)
    alone = relaxed(y[[0, 2]], rooted, lambda u: u, 1.0, 20, 1e-2)
    assert torch.equal(moved[1], y[1]) and torch.equal(moved[[0, 2]], alone)
    assert (moved[[0, 2], 0] > y[[0, 2], 0]).all()


def test_the_sampler_is_its_algorithm_step_by_step():
    """Against the algorithm as the paper's code has it, by dense Jacobians."""
    law = burgers_mass(GRID, 0.1, 0.1)
    start = draw(8, tag="start")
    constraint = stack(initial_condition(start, GRID), law)
    x = draw(2, *GRID)
    steps, weight, inner, eta = 3, 0.7, 4, 1e-2
    state = x
    for k in range(steps):
        t, s = 1 - k / steps, 1 - (k + 1) / steps
        v = Bent()(state, torch.tensor(t, dtype=torch.float64))
        clean = state - t * v
        moved = []
        for u in clean:
            j = torch.func.jacrev(lambda w: constraint.residual(w[None])[0])(u)
            j = j.reshape(constraint.count, -1)
            step = j.T @ torch.linalg.solve(j @ j.T, constraint.residual(u[None])[0])
            moved.append(u - step.reshape(GRID))
        y = (1 - s) * torch.stack(moved) + s * x
        u, gamma = y, max(s, 1e-3)
        for _ in range(inner):
            leaf = u.clone().requires_grad_()
            h = constraint.residual(leaf - gamma * v)
            value = (leaf - y).square().sum() + weight * h.square().sum()
            (gradient,) = torch.autograd.grad(value, leaf)
            u = u - eta * gradient
        state = u
    sampler = PCFM(constraint, guide_weight=weight, guide_steps=inner, damp=0.0)
    assert (run(Bent(), sampler, steps, x) - state).abs().max() < 1e-9
    # damping is of the masses' rows only, which carry dx: it is felt at their scale
    damped = PCFM(constraint, guide_weight=weight, guide_steps=inner)
    assert 0 < (run(Bent(), damped, steps, x) - state).abs().max() < 1e-3


# Baselines


def test_guidance_is_heuns_step_less_a_gradient():
    law = linear_equations(draw(3, 48, tag="a"), draw(3, tag="b"), GRID)
    x, scale = draw(2, *GRID), 0.5
    a, b = draw(3, 48, tag="a"), draw(3, tag="b")
    state = x
    for t, s in ((1.0, 0.5), (0.5, 0.0)):
        v = Bent()(state, torch.tensor(t, dtype=torch.float64))
        if s > 0:
            v = (v + Bent()(state, torch.tensor(s, dtype=torch.float64))) / 2
        defect = (state - t * v).flatten(1) @ a.T - b
        state = state + (s - t) * v - scale * (2 / 3 * defect @ a).reshape(state.shape)
    assert (run(Bent(), GuidedEuler(law, scale), 2, x) - state).abs().max() < 1e-12


def test_scales_of_guidance_do_not_overshoot():
    """The largest curvature of each group, against the eigenvalues of its Jacobian."""
    masses = mass(GRID, 0.5)
    law = stack(initial_condition(draw(8, tag="start"), GRID), masses)
    found = steady_scales(law, draw(1, *GRID), 0.9)
    jacobian = torch.func.jacrev(lambda u: masses.residual(u[None])[0])(draw(*GRID))
    largest = torch.linalg.eigvalsh(jacobian.reshape(5, -1) @ jacobian.reshape(5, -1).T)[-1]
    assert found == pytest.approx({"initial": 0.9 * 8 / 2, "mass": float(0.9 * 5 / 2 / largest)})
    assert largest > 5  # the masses of all times share the first field

    class Still:
        predicts = "velocity"

        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            return torch.zeros_like(x)

    x = draw(3, *GRID)
    ends = {
        name: law.residual(run(Still(), GuidedEuler(law, scale), 30, x)).abs().max()
        for name, scale in (("each", found), ("one", 0.9 * 8 / 2))
    }
    assert ends["each"] < 0.1 * law.residual(x).abs().max() and ends["one"] > 1e3
    with pytest.raises(ValueError, match=r"scale must be of \['initial', 'mass'\]"):
        GuidedEuler(law, {"mass": 1.0})


def test_projected_states_are_on_the_manifold_at_every_step():
    law = sphere(GRID)
    x = draw(3, *GRID)
    u = run(Bent(), Euler(), 5, x, steer=ProjectedState(law, 0.0))
    one = run(Bent(), Euler(), 5, x)
    assert law.residual(u).abs().max() < law.residual(one).abs().min()


def test_optimised_noise_brings_the_residual_down():
    rows = draw(30, *GRID, tag="rows")
    law = initial_condition(rows[0, :, 0], GRID)
    field, pairs, x = GaussianField(1.0), uniform_grid(6), draw(3, *GRID)
    found = DFlow(law, lr=0.5, iterations=15).optimise(x, pairs, PATH, field, NOISE)
    before, after = (law.residual(run(field, Euler(), 6, u)).square().mean() for u in (x, found))
    assert after < 0.8 * before


def test_every_method_runs_under_every_kind_of_field():
    rows = draw(30, *GRID, tag="rows").float()
    law = stack(initial_condition(rows[0, :, 0], GRID), mass(GRID, 0.1))
    denoiser = EmpiricalDenoiser(rows)

    class Mean:
        predicts = "mean_velocity"

        def __call__(self, x: Tensor, t: Tensor, *, s: Tensor, **cond: Any) -> Tensor:
            return (x - denoiser(x, t)) / t

    methods = [PCFM, ECI, ProjectedState, partial(GuidedEuler, scale=0.1), None]
    methods += [partial(DFlow, iterations=2), partial(PCFM, renoise="implied")]
    for method in methods:
        for field in (denoiser, Mean()):
            made = sample_under(
                field,
                GRID,
                3,
                noise=NOISE,
                constraint=law,
                method=method,
                steps=4,
                like=torch.zeros(()),
            )
            assert made.u.dtype == torch.float32 and made.worst < 2e-6
            assert torch.equal(made.residual, law.residual(made.u.double()))


def test_a_network_of_the_official_code_is_a_field():
    def theirs(tau: Tensor, u: Tensor) -> Tensor:  # the velocity towards N(0, 1)
        return -GaussianField(1.0)(u, (1 - tau)[:, None])

    x = draw(3, 4)
    ours = run(GaussianField(1.0), Euler(), 5, x)
    assert (run(OfficialField(theirs), Euler(), 5, x) - ours).abs().max() < 1e-12


def test_the_empirical_denoiser_is_bayes():
    rows, x = draw(6, 2, 3, tag="rows"), draw(4, 2, 3)
    t = torch.tensor(0.3, dtype=torch.float64)
    density = torch.exp(-(x[:, None] - 0.7 * rows).flatten(2).square().sum(2) / (2 * 0.09))
    weights = density / density.sum(1, keepdim=True)
    wanted = torch.einsum("bn,nij->bij", weights, rows)
    assert (EmpiricalDenoiser(rows)(x, t) - wanted).abs().max() < 1e-10
    assert torch.equal(EmpiricalDenoiser(rows)(rows[:1], torch.zeros(())), rows[:1])


def test_scores_are_zero_for_the_reference_itself():
    u = draw(9, *GRID)
    law = mass(GRID, 0.1)
    same = field_scores(u, u, law, features=lambda v: v.flatten(1)[:, :3])
    assert same["mmse"] == same["smse"] == 0 and same["spread"] == 1 and same["frechet"] < 1e-6
    moved = field_scores(u + 0.1, u, law)
    assert abs(moved["mmse"] - 0.01) < 1e-12 and moved["smse"] < 1e-12
    assert worst_residual(same) == float(law.residual(u).abs().max())


# The network


@pytest.mark.parametrize("shape", [(9,), (8, 7), (6, 5, 8)])
def test_the_spectral_convolution_is_one_in_frequency(shape: tuple[int, ...]):
    modes = tuple(4 for _ in shape)
    layer = SpectralConvolution(2, modes).double()
    u = draw(3, 2, *shape)
    layer.weight.data = draw(*layer.weight.shape, tag="weight")
    weight = torch.view_as_complex(layer.weight.data)
    spectrum = torch.fft.rfftn(u, dim=tuple(range(2, u.ndim)))
    wanted = torch.zeros_like(spectrum)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in spectrum.shape[2:])).reshape(
        -1, len(shape)
    ):
        at, k, kept = (..., *place.tolist()), [], True
        for axis, (n, m) in enumerate(zip(shape, modes, strict=True)):
            f = int(place[axis])
            if axis < len(shape) - 1:
                f = f if f < (n + 1) // 2 else f - n
                kept &= -(m // 2) <= f < m - m // 2
                k.append(f + m // 2)
            else:
                kept &= f <= m // 2
                k.append(f)
        if kept:
            wanted[at] = spectrum[at] @ weight[(..., *k)].T
    found = layer(u)
    back = torch.fft.irfftn(wanted, s=shape, dim=tuple(range(2, u.ndim)))
    assert (found - back).abs().max() < 1e-12


def test_the_operator_sees_the_time_and_serves_finer_grids():
    network = FNO(shape=(8, 6), modes=4, width=6, depth=2, lift=12, embedding=8)
    x = draw(3, 8, 6).float()
    now, then = (network(x, torch.full((), t)) for t in (0.2, 0.7))
    assert now.shape == x.shape and (now - then).abs().max() > 1e-3
    # band-limited input on a finer grid: the same function there, where the two grids meet
    assert network(draw(2, 16, 12).float(), torch.rand(2)).shape == (2, 16, 12)
    value, tangent = torch.func.jvp(lambda u: network(u, torch.tensor(0.3)), (x,), (x,))
    assert value.shape == tangent.shape == x.shape
    with pytest.raises(ValueError, match="grid of 2 axes"):
        network(draw(2, 3, 6).float(), torch.tensor(0.1))


@pytest.mark.parametrize(
    "wrong", [{"modes": 9}, {"embedding": 5}, {"width": 0}, {"shape": (4,) * 4}]
)
def test_an_operator_of_wrong_sizes_is_refused(wrong: dict[str, Any]):
    with pytest.raises(ValueError, match="modes|embedding|width|axes"):
        FNO(**{"shape": (8, 8), "modes": 4, "width": 4, "depth": 1, "embedding": 8, **wrong})


# The class


def small() -> FNO:
    return FNO(shape=GRID, modes=4, width=6, depth=2, lift=8, embedding=8, seed=1)


def fitted(**options: Any) -> PhysicsConstrainedFlow:
    fields = pde.heat_fields(40, GRID, NOISE)[0].float()
    model = PhysicsConstrainedFlow(small(), **options)
    return model.fit(fields, steps=4, batch_size=8, progress=False)


def test_a_model_is_fitted_saved_and_loaded(tmp_path: Path):
    model = fitted(standardise=True)
    law = stack(initial_condition(torch.linspace(-1, 1, 8), GRID), mass(GRID, 0.1))
    made = model.sample(3, noise=NOISE, constraint=law, steps=3, dtype=torch.float64)
    assert made.u.dtype == torch.float64 and made.worst <= 1e-10 and made.converged.all()
    single = model.sample(3, noise=NOISE, constraint=law, steps=3)
    assert single.u.dtype == torch.float32 and 0 <= single.worst < 1e-5
    assert (single.u - made.u).abs().max() < 1e-5
    free = model.sample(3, noise=NOISE, steps=3)
    assert free.worst == 0 and free.u.shape == (3, *GRID)
    model.save(tmp_path / "model.safetensors")
    again = PhysicsConstrainedFlow.load(tmp_path / "model.safetensors")
    other = again.sample(3, noise=NOISE, constraint=law, steps=3, dtype=torch.float64)
    assert torch.equal(other.u, made.u) and again.shape == GRID
    with pytest.raises(ValueError, match="is not known yet"):
        PhysicsConstrainedFlow(torch.nn.Linear(2, 2)).sample(1, noise=NOISE)


def test_standardised_samples_obey_laws_in_the_units_of_the_data():
    fields = 100 + 30 * pde.heat_fields(40, GRID, NOISE)[0]
    model = PhysicsConstrainedFlow(small(), standardise=True)
    model.fit(fields.float(), steps=3, batch_size=8, progress=False)
    law = equations(lambda u: u[:, :, 0].square().mean(1, keepdim=True) / 1e4 - 1.05, GRID)
    made = model.sample(3, noise=NOISE, constraint=law, steps=3, dtype=torch.float64)
    assert made.worst <= 1e-10 and 50 < float(made.u.mean()) < 150


def test_samples_do_not_depend_on_the_batch():
    model = fitted()
    values = draw(5, 8, tag="values").float()
    law = stack(initial_condition(values, GRID), mass(GRID, 0.1))
    whole, parts = (
        model.sample(5, noise=NOISE, constraint=law, steps=3, batch_size=n) for n in (5, 2)
    )
    assert (whole.u - parts.u).abs().max() < 1e-5
    assert torch.equal(whole.u[..., 0], values)


def test_functions_see_double_precision_whatever_the_dtype_of_samples():
    seen = set()

    def law(u: Tensor) -> Tensor:
        seen.add(u.dtype)
        return u.flatten(1) @ torch.full((48, 1), 0.1, dtype=torch.float64) - 1

    constraint = equations(law, GRID)
    assert constraint.residual(torch.zeros(1, *GRID)).dtype == torch.float32
    for method in (PCFM, ECI, ProjectedState, partial(GuidedEuler, scale=0.1), DFlow):
        made = fitted().sample(2, noise=NOISE, constraint=constraint, steps=2, method=method)
        assert made.u.dtype == torch.float32 and made.worst < 1e-5
    assert seen == {torch.float64}


def test_a_network_of_the_user_serves():
    model = PhysicsConstrainedFlow(MLP(shape=GRID, width=8, depth=1))
    made = model.sample(2, noise=NOISE, constraint=mass(GRID, 0.1), steps=2, method=ECI)
    assert made.worst < 1e-5


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PCFM(Constraint(GRID), renoise="none"), ValueError, "renoise must be one of"),
        (lambda: PCFM(Constraint(GRID), guide_lr=0.0), ValueError, "guide_lr > 0"),
        (lambda: PCFM(Constraint(GRID), newton=0), ValueError, "newton >= 1"),
        (lambda: PCFM(Constraint(GRID), damp=-1.0), ValueError, "damp"),
        (lambda: ECI(Constraint(GRID), 0), ValueError, "mix >= 1"),
        (lambda: GuidedEuler(Constraint(GRID), math.inf), ValueError, "scale"),
        (lambda: DFlow(Constraint(GRID), lr=0.0), ValueError, "lr > 0"),
        (lambda: EmpiricalDenoiser(torch.empty(0, 3)), ValueError, "rows"),
        (lambda: field_scores(draw(2, 3), draw(2, 4), Constraint((3,))), ValueError, "one shape"),
        (lambda: PhysicsConstrainedFlow(Bent()), TypeError, "module"),
        (
            lambda: sample_under(Bent(), GRID, 2, noise=NOISE, constraint=mass((4, 4), 1.0)),
            ValueError,
            r"events of \(4, 4\)",
        ),
        (
            lambda: sample_under(
                Bent(), GRID, 2, noise=NOISE, constraint=initial_condition(draw(3, 8), GRID)
            ),
            ValueError,
            "3 events, got num=2",
        ),
        (
            lambda: sample_under(Bent(), GRID, 2, noise=NOISE, constraint=lambda u: u),
            TypeError,
            "constraint must be a Constraint, got function",
        ),
        (
            lambda: sample_under(
                Bent(), GRID, 2, noise=NOISE, constraint=mass(GRID, 1.0), method=PCFM(mass(GRID, 1))
            ),
            TypeError,
            "method must make a sampler of a constraint",
        ),
        (lambda: sample_under(Bent(), GRID, 2, noise=0), TypeError, "keyed"),
        (
            lambda: sample_under(
                lambda_field(lambda x, t: x / 0), GRID, 2, noise=NOISE, constraint=mass(GRID, 1.0)
            ),
            ValueError,
            "not finite at t = 1",
        ),
        (
            lambda: simulate(
                draw(2, *GRID), uniform_grid(4)[2:], PCFM(mass(GRID, 1.0)), PATH, Bent(), NOISE
            ),
            ValueError,
            "starts at t = 1",
        ),
        (lambda: fitted().fit(torch.zeros(3, 4, 4), steps=1), ValueError, r"events of \(8, 6\)"),
        (lambda: fitted().fit(torch.zeros(3, *GRID).int(), steps=1), TypeError, "floating"),
        (
            lambda: PhysicsConstrainedFlow(small()).fit(torch.full((3, *GRID), math.nan), steps=1),
            ValueError,
            "not finite",
        ),
    ],
)
def test_bad_input_is_refused(make: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()


def lambda_field(function: Any) -> Any:
    field: Any = type("Field", (), {"__call__": lambda self, x, t, **cond: function(x, t)})()
    field.predicts = "velocity"
    return field
