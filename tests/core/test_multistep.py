"""Solvers made for diffusions: by their order, against diffusers, and at the ends of time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.levels import time_of
from fluvial.core.gaussian.multistep import DDIM, DPMSolver, UniPC
from fluvial.core.gaussian.ode import Heun
from fluvial.core.gaussian.paths import VE, AlphaSigmaPath, Linear, VPCosine, VPLinear
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Run, Steering
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import grid_pairs, uniform_grid

from .toys import BlockField, BlockGaussian, Constant, Counting, VectorGaussian

NOISE = KeyedNoise(3)
MEAN = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
STD = torch.tensor([0.6, 1.0, 1.7], dtype=torch.float64)
PATHS = [Linear(), VPLinear(), VPCosine(), VE(0.1, 5.0)]
KINDS = ["clean", "noise", "velocity", "score"]
SOLVERS = {
    "DDIM": DDIM(),
    "2M": DPMSolver(2),
    "3M": DPMSolver(3),
    "3M published": DPMSolver(3, published=True),
    "UniPC-2 bh1": UniPC(2, "bh1"),
    "UniPC-2": UniPC(2),
    "UniPC-3 bh1": UniPC(3, "bh1"),
    "UniPC-3": UniPC(3),
    "UniP-2": UniPC(2, correct=False),
    "UniP-3": UniPC(3, "bh1", correct=False),
}
ORDERS = dict(zip(SOLVERS, [1, 2, 3, 2, 3, 3, 4, 4, 2, 3], strict=True))


def name(path: Any) -> str:
    return type(path).__name__


def time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def state(batch: int = 4, seed: int = 3) -> Tensor:
    return KeyedNoise(seed).normal(torch.empty(batch, 3, dtype=torch.float64))


# Orders, on grids of equal steps in lambda whose first and last steps are short: the warm-up at low
# order is then no larger than the error of the whole.


def ramped(path: AlphaSigmaPath, h: float, reach: float = 2.0) -> Tensor:
    """Pairs from lambda = -reach to reach: steps of h, and h^2, 2 h^2, 4 h^2, ... at both ends."""
    ramp = [h * h * 2**i for i in range(math.ceil(math.log2(1 / h)))]
    length = 2 * reach - 2 * sum(ramp)
    number = round(length / h)
    steps = torch.tensor([*ramp, *[length / number] * number, *ramp[::-1]], dtype=torch.float64)
    log_ratio = torch.cat([steps.new_zeros(1), steps.cumsum(0)]) - reach
    return grid_pairs(time_of(path, (-log_ratio).exp()))


def error(solver: Any, path: AlphaSigmaPath, pairs: Tensor) -> float:
    toy = VectorGaussian(path, MEAN, STD)
    mean, var = toy.moments(pairs[0, 0])
    x = mean + var.sqrt() * state()
    out = simulate(x, pairs, solver, path, toy, NOISE)
    return float((out - toy.flow(x, pairs[0, 0], pairs[-1, 1])).abs().max())


@pytest.mark.parametrize("rises", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
def test_order(solver: str, rises: bool) -> None:
    path = Linear()  # a function of lambda alone, up to scale: every path has these errors
    errors = []
    for h in (1 / 16, 1 / 32) if ORDERS[solver] < 3 else (1 / 32, 1 / 64):
        pairs = ramped(path, h)
        errors.append(error(SOLVERS[solver], path, pairs.flip(0, 1) if rises else pairs))
    assert errors[1] > 1e-10
    assert abs(math.log2(errors[0] / errors[1]) - ORDERS[solver]) < 0.15


@pytest.mark.parametrize("solver", SOLVERS)
def test_round_trip(solver: str) -> None:
    """Encode and decode; the order of the whole is the method's, or more where errors cancel."""
    path, x = VPCosine(), MEAN + STD * state()
    toy, errors = VectorGaussian(path, MEAN, STD), []
    for h in (1 / 16, 1 / 32):
        pairs = ramped(path, h)
        there = simulate(x, pairs.flip(0, 1), SOLVERS[solver], path, toy, NOISE)
        back = simulate(there, pairs, SOLVERS[solver], path, toy, NOISE)
        errors.append(float((back - x).abs().max()))
    assert errors[1] > 1e-12
    assert math.log2(errors[0] / errors[1]) > ORDERS[solver] - 0.15


@pytest.mark.parametrize(("solver", "low", "high"), [("2M", 1.7, 2.0), ("UniPC-2", 2.0, 2.15)])
def test_order_from_end_to_end(solver: str, low: float, high: float) -> None:
    """Equal steps in t are long in lambda at the ends, where the first and last are of order one:
    the whole is of order two, for 2M up to a slow factor."""
    errors = [error(SOLVERS[solver], Linear(), uniform_grid(steps)) for steps in (64, 128)]
    assert low < math.log2(errors[0] / errors[1]) < high


def test_the_published_third_order_step_halves_its_second_difference() -> None:
    """The 3M of the authors' code and ours differ by alpha h phi_3(-h) D'' / 2, by that alone."""
    path = VPCosine()
    toy = VectorGaussian(path, MEAN, STD)
    pairs = uniform_grid(3, 0.9, 0.3)
    ours, theirs = (
        simulate(state(), pairs, DPMSolver(3, published=flag), path, toy, NOISE)
        for flag in (False, True)
    )
    times = [*pairs[:, 0], pairs[-1, 1]]
    lam = [float((path.alpha(t) / path.sigma(t)).log()) for t in times]
    x, m = state(), []
    for k in range(3):
        m.append(toy(x, times[k]))
        x = simulate(x if k == 0 else state(), pairs[: k + 1], DPMSolver(3), path, toy, NOISE)
    h = lam[3] - lam[2]
    # twice the divided difference of second order is the second derivative of the parabola
    upper, lower = (m[2] - m[1]) / (lam[2] - lam[1]), (m[1] - m[0]) / (lam[1] - lam[0])
    second = 2 * h * h * (upper - lower) / (lam[2] - lam[0])
    phi_3 = (math.exp(-h) - 1 + h - h * h / 2) / (-h) ** 3
    step = path.alpha(times[3]) * h * phi_3 * second / 2
    torch.testing.assert_close(ours - theirs, step, rtol=1e-9, atol=1e-12)


# DDIM


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_ddim_with_all_noise_is_ancestral(path: AlphaSigmaPath) -> None:
    toy, x = VectorGaussian(path, MEAN, STD), path.source(torch.empty(4, 3).double(), NOISE)
    for pairs in (uniform_grid(5), uniform_grid(5, 0.0, 1.0), torch.tensor([[0.4, 0.4]]).double()):
        ancestral = simulate(x, pairs, Ancestral(), path, toy, NOISE)
        out = simulate(x, pairs, DDIM(1.0), path, toy, NOISE)
        torch.testing.assert_close(out, ancestral, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("path", PATHS, ids=name)
def test_ddim_keeps_the_marginals_of_a_point(path: AlphaSigmaPath, eta: float) -> None:
    """Where the clean prediction is right, every eta draws x_s from the marginal at s."""
    toy = VectorGaussian(path, MEAN, torch.zeros(3).double())
    for pair in ([1.0, 0.6], [0.6, 0.2], [0.2, 0.7], [0.3, 0.0]):
        t, s = torch.tensor(pair).double()

        def step(x: Tensor, z: float, pairs: Tensor) -> Tensor:
            return simulate(x, pairs, DDIM(eta), path, toy, Constant(z))

        zero = torch.zeros(1, 3).double()
        pairs = torch.stack([t, s])[None]
        shift = step(zero, 0.0, pairs)
        gain, spread = step(zero + 1, 0.0, pairs) - shift, step(zero, 1.0, pairs) - shift
        mean, var = toy.moments(t)
        torch.testing.assert_close(gain * mean + shift, toy.moments(s)[0].expand(1, 3))
        var = gain.square() * var + spread.square()
        torch.testing.assert_close(var, toy.moments(s)[1].expand(1, 3), rtol=1e-9, atol=1e-12)
        ratio = path.alpha(t) * path.sigma(s) / (path.alpha(s) * path.sigma(t))
        rho = min(ratio, 1 / ratio)
        fresh = eta * (1 - rho.square()).sqrt() * path.sigma(s)
        torch.testing.assert_close(spread, fresh.expand(1, 3), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("path", PATHS, ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_ddim_formula(path: AlphaSigmaPath, kind: str) -> None:
    x, (t, s) = state(), (time(0.6), time(0.2))
    exact = path.alpha(s) * VectorGaussian(path, MEAN, STD)(x, t)
    exact = exact + path.sigma(s) * VectorGaussian(path, MEAN, STD, "noise")(x, t)
    toy = VectorGaussian(path, MEAN, STD, kind)
    out = simulate(x, torch.stack([t, s])[None], DDIM(), path, toy, NOISE)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)


def test_ddim_on_the_block_path() -> None:
    """Marginals are right to order one; with noise, or by DPM-Solver, the path is refused."""
    path = BlockGaussian(beta=1.0, gamma=1.0, mass=0.5)
    cov = torch.tensor([[0.5, 0.1], [0.1, 0.3]]).double()
    field = BlockField(path, torch.tensor([1.0, 0.2]).double(), cov)
    basis = torch.eye(2).double()[:, :, None]
    errors = []
    for steps in (20, 40):
        mean, cov = field.moments(time(0.8))
        for t, s in uniform_grid(steps, 0.8, 0.2):
            run = Run(path, field, NOISE, 0, t, s, {}, Steering(), {})
            shift = DDIM().step(torch.zeros(1, 2, 1).double(), None, run)[0][0, :, 0]
            gain = DDIM().step(basis, None, run)[0][:, :, 0].T - shift[:, None]
            mean, cov = gain @ mean + shift, gain @ cov @ gain.T
        errors.append(float((cov - field.moments(time(0.2))[1]).abs().max()))
    assert abs(math.log2(errors[0] / errors[1]) - 1) < 0.1
    x = torch.zeros(2, 2, 3).double()
    for solver in (DDIM(0.5), DPMSolver(), UniPC()):
        with pytest.raises(ValueError, match="one alpha and one sigma for all rows, got BlockGau"):
            simulate(x, uniform_grid(2, 0.8, 0.2), solver, path, field, NOISE)


# Against diffusers, step by step: its schedulers on our sigmas, with our field


@dataclass
class Wave:
    """A smooth field that is nobody's posterior mean: nothing cancels."""

    predicts: str

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return torch.sin(x + 2 * t) - 0.3 * x


CONFIGS = {
    "epsilon": (VPCosine(), "noise", {"prediction_type": "epsilon"}),
    "sample": (VPLinear(), "clean", {"prediction_type": "sample"}),
    "flow": (
        Linear(),
        "velocity",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True},
    ),
}


def follow(scheduler: Any, solver: Any, path: AlphaSigmaPath, kind: str, times: Tensor) -> None:
    """Both from one state; every state must agree. Their sums are of single precision."""
    scheduler.set_timesteps(len(times) - 1)
    level = path.sigma(times)
    if not scheduler.config.use_flow_sigmas:
        level = level / path.alpha(times)
    scheduler.sigmas = level
    field, x = Wave(kind), state()
    y, memory = x, solver.start(x)
    for k, (t, s) in enumerate(grid_pairs(times)):
        run = Run(path, field, NOISE, k, t, s, {}, Steering(), {})
        output = field(y, t)
        y = scheduler.step(output, scheduler.timesteps[k], y, return_dict=False)[0]
        x, memory, _ = solver.step(x, memory, run)
        torch.testing.assert_close(x, y, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("steps", [8, 20])
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("config", CONFIGS)
def test_dpm_solver_against_diffusers(config: str, order: int, steps: int) -> None:
    diffusers = pytest.importorskip("diffusers")
    path, kind, options = CONFIGS[config]
    scheduler = diffusers.DPMSolverMultistepScheduler(solver_order=order, **options)
    times = torch.linspace(0.95, 0, steps + 1, dtype=torch.float64)
    solver = DPMSolver(order, steps if steps < 15 else None, published=True)
    follow(scheduler, solver, path, kind, times)


@pytest.mark.parametrize("variant", ["bh1", "bh2"])
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("config", CONFIGS)
def test_unipc_against_diffusers(config: str, order: int, variant: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    path, kind, options = CONFIGS[config]
    scheduler = diffusers.UniPCMultistepScheduler(
        solver_order=order, solver_type=variant, **options
    )
    times = torch.linspace(0.95, 0.02, 13, dtype=torch.float64)
    follow(scheduler, UniPC(order, variant, steps=12), path, kind, times)  # type: ignore[arg-type]


@pytest.mark.parametrize("eta", [0.0, 0.4, 1.0])
def test_ddim_against_diffusers(eta: float) -> None:
    diffusers = pytest.importorskip("diffusers")
    path, steps = VPCosine(), 10
    scheduler = diffusers.DDIMScheduler(
        num_train_timesteps=steps,
        clip_sample=False,
        prediction_type="epsilon",
        set_alpha_to_one=True,
    )
    scheduler.set_timesteps(steps)
    times = torch.linspace(0.98, 0, steps + 1, dtype=torch.float64)
    scheduler.alphas_cumprod = path.alpha(times[:-1]).square().flip(0)
    scheduler.final_alpha_cumprod = torch.ones(()).double()
    field, solver, x = Wave("noise"), DDIM(eta), state()
    y = x
    for k, (t, s) in enumerate(grid_pairs(times)):
        run = Run(path, field, NOISE.at(k), k, t, s, {}, Steering(), {})
        z = NOISE.at(k).normal(x, "posterior")
        options = {"eta": eta, "variance_noise": z if eta else None, "return_dict": False}
        y = scheduler.step(field(y, t), int(scheduler.timesteps[k]), y, **options)[0]
        x, _, _ = solver.step(x, None, run)
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


# The ends of time


@pytest.mark.parametrize("solver", ["DDIM", "3M", "UniPC-2 bh1", "UniPC-3"])
@pytest.mark.parametrize(("path", "kind"), product(PATHS, KINDS), ids=str)
def test_ends_are_exact(path: AlphaSigmaPath, kind: str, solver: str) -> None:
    """From 1 to 0 the first step and the last are those of frozen ends, and nothing is NaN."""
    toy = VectorGaussian(path, MEAN, STD, kind)
    clean = VectorGaussian(path, MEAN, STD)
    x = path.source(torch.empty(4, 3).double(), NOISE)
    sampler, pairs = SOLVERS[solver], uniform_grid(6)
    memory, predictions = sampler.start(x), []
    for k, (t, s) in enumerate(pairs):
        run = Run(path, toy, NOISE, k, t, s, {}, Steering(), {})
        x, memory, guess = sampler.step(x, memory, run)
        predictions.append(guess)
        assert x.isfinite().all()
        if k == 0:
            first = simulate(
                path.source(torch.empty(4, 3).double(), NOISE), pairs[:1], DDIM(), path, toy, NOISE
            )
            torch.testing.assert_close(x, first, rtol=1e-12, atol=1e-12)
    if not isinstance(sampler, UniPC):  # which corrects x before its last prediction
        torch.testing.assert_close(x, predictions[-1], rtol=1e-12, atol=1e-12)
    back = simulate(x, uniform_grid(6, 0.0, 1.0), sampler, path, toy, NOISE)
    assert back.isfinite().all()
    single = simulate(x, torch.tensor([[1.0, 0.0]]).double(), sampler, path, clean, NOISE)
    torch.testing.assert_close(single, clean(x, time(1)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_step_that_stays_changes_nothing(solver: str) -> None:
    path, sampler, x = VPCosine(), SOLVERS[solver], state()
    toy = VectorGaussian(path, MEAN, STD)
    for t in (0.0, 0.4, 1.0):
        pairs = torch.tensor([[t, t]]).double()
        assert torch.equal(simulate(x, pairs, sampler, path, toy, NOISE), x)
    moves = uniform_grid(4, 0.9, 0.3)
    stays = torch.cat([moves[:2], moves[1, 1].expand(1, 2), moves[2:]])
    plain, with_stay = (simulate(x, p, sampler, path, toy, NOISE) for p in (moves, stays))
    assert torch.equal(plain, with_stay)


def test_history_ends_where_time_turns() -> None:
    path, toy = VPCosine(), VectorGaussian(VPCosine(), MEAN, STD)
    there = grid_pairs([0.8, 0.7, 0.6])
    turn = grid_pairs([0.8, 0.7, 0.6, 0.65])
    for sampler in (DPMSolver(3), UniPC(3, correct=False)):
        x = simulate(state(), there, sampler, path, toy, NOISE)
        euler = simulate(x, turn[2:], DDIM(), path, toy, NOISE)
        out = simulate(state(), turn, sampler, path, toy, NOISE)
        torch.testing.assert_close(out, euler, rtol=1e-13, atol=1e-13)
    zigzag = grid_pairs([0.5, 0.7, 0.5, 0.7, 0.5, 0.0, 0.5])
    for solver in SOLVERS.values():
        assert simulate(state(), zigzag, solver, path, toy, NOISE).isfinite().all()


# The core's contracts


@pytest.mark.parametrize("solver", SOLVERS)
def test_memory_moves_with_the_rows(solver: str) -> None:
    class Roll(Steering):
        def after(self, x: Any, clean: Any, aim: Any, run: Run) -> Any:
            kept = torch.arange(len(x)).roll(1)
            return x[kept], aim, kept

    path, sampler, pairs = VPCosine(), SOLVERS[solver], uniform_grid(4, 0.9, 0.1)
    toy = VectorGaussian(path, MEAN, STD)
    plain = simulate(state(), pairs, sampler, path, toy, NOISE)
    rolled = simulate(state(), pairs, sampler, path, toy, NOISE, Roll())
    assert torch.equal(rolled, plain.roll(4, 0))


@pytest.mark.parametrize("solver", SOLVERS)
def test_rows_do_not_depend_on_their_batch(solver: str) -> None:
    path, sampler, pairs = Linear(), SOLVERS[solver], uniform_grid(5)
    toy, x = VectorGaussian(path, MEAN, STD, "velocity"), state(6)
    whole = simulate(x, pairs, sampler, path, toy, NOISE)
    parts = [simulate(x[part], pairs, sampler, path, toy, NOISE) for part in ([0, 1], [2, 3, 4, 5])]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_evaluation_a_step_in_the_dtype_of_the_state(solver: str) -> None:
    path, sampler, pairs = VPCosine(), SOLVERS[solver], uniform_grid(6)
    for kind in KINDS:
        counted = Counting(VectorGaussian(path, MEAN, STD, kind))
        exact = simulate(state(), pairs, sampler, path, counted, NOISE)
        assert len(counted.calls) == 6
        out = simulate(state().float(), pairs, sampler, path, counted, NOISE)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("solver", SOLVERS)
def test_steering_of_the_clean_prediction(solver: str) -> None:
    """Is that of a field which predicts the corrected clean end itself."""

    class Shift(Steering):
        def clean(self, clean: Any, x: Any, aim: Any, run: Run) -> Any:
            return clean + 0.7

    class Shifted(VectorGaussian):
        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:  # type: ignore[override]
            return super().__call__(x, t) + 0.7

    path, sampler, pairs = VPCosine(), SOLVERS[solver], uniform_grid(5, 0.95, 0.0)
    exact = simulate(state(), pairs, sampler, path, Shifted(path, MEAN, STD), NOISE)
    for kind in KINDS:
        toy = VectorGaussian(path, MEAN, STD, kind)
        out = simulate(state(), pairs, sampler, path, toy, NOISE, Shift())
        torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)


def test_better_than_heun_at_equal_cost() -> None:
    """What these solvers are for: 20 evaluations along a path that is stiff near the data."""
    path = VPLinear()
    grid = grid_pairs(time_of(path, torch.logspace(1.5, -1.5, 21, dtype=torch.float64)))
    every_second = grid_pairs([*grid[::2, 0], grid[-1, 1]])
    heun = error(Heun(), path, every_second)
    for solver in (DPMSolver(2), DPMSolver(3), UniPC(2), UniPC(3)):
        assert error(solver, path, grid) < heun / 2


# What is refused


def test_errors() -> None:
    for eta in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="eta must lie in"):
            DDIM(eta)
    for solver in (DPMSolver, UniPC):
        with pytest.raises(ValueError, match="order must be 2 or 3, got 1"):
            solver(1)
        with pytest.raises(ValueError, match="steps must be positive, got 0"):
            solver(2, steps=0)
        path = Linear()
        with pytest.raises(ValueError, match="steps is 2, but the run has more"):
            simulate(
                state(),
                uniform_grid(3),
                solver(2, steps=2),
                path,
                VectorGaussian(path, MEAN, STD),
                NOISE,
            )
    with pytest.raises(ValueError, match="variant must be 'bh1' or 'bh2', got 'bh3'"):
        UniPC(2, "bh3")  # type: ignore[arg-type]
