"""Solvers of the flow, by their measured order and by what steering does to them."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.fields import predicted
from fluvial.core.gaussian.ode import RK4, Euler, Heun, Midpoint
from fluvial.core.gaussian.paths import AlphaSigmaPath, Linear, VPCosine, VPLinear
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Run, Steering
from fluvial.core.simulate import simulate
from fluvial.core.time import uniform_grid

from .toys import BlockField, BlockGaussian, Counting, VectorGaussian

NOISE = KeyedNoise(3)
MEAN = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
STD = torch.tensor([0.6, 1.0, 1.7], dtype=torch.float64)
SMOOTH = VPLinear(1.0, 4.0)
SAMPLERS = [(Euler(), 1), (Heun(), 2), (Midpoint(), 2), (RK4(), 4)]


def name(path: Any) -> str:
    return "" if isinstance(path, int) else type(path).__name__


def time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def slope(errors: dict[int, float]) -> float:
    """Of the log of the error against the log of the step."""
    (few, coarse), (many, fine) = errors.items()
    assert fine > 1e-12  # not rounding
    return math.log(coarse / fine) / math.log(many / few)


def order(
    path: AlphaSigmaPath,
    kind: str,
    sampler: Any,
    start: float,
    end: float,
    numbers: tuple[int, int] = (32, 64),
) -> float:
    toy = VectorGaussian(path, MEAN, STD, kind)
    mean, var = toy.moments(time(start))
    x = mean + var.sqrt() * NOISE.normal(torch.empty(8, 3, dtype=torch.float64))
    exact = toy.flow(x, time(start), time(end))
    errors = {}
    for steps in numbers:
        out = simulate(x, uniform_grid(steps, start, end), sampler, path, toy, NOISE)
        errors[steps] = float((out - exact).abs().max())
    return slope(errors)


@pytest.mark.parametrize(("start", "end"), [(0.95, 0.05), (0.05, 0.95)])
@pytest.mark.parametrize("kind", ["clean", "velocity"])  # others: see test_kinds
@pytest.mark.parametrize("path", [VPCosine(), SMOOTH], ids=name)
@pytest.mark.parametrize(("sampler", "expected"), SAMPLERS, ids=name)
def test_order(
    sampler: Any, expected: int, path: AlphaSigmaPath, kind: str, start: float, end: float
) -> None:
    assert abs(order(path, kind, sampler, start, end) - expected) < 0.1


@pytest.mark.parametrize(
    # On Gaussians along the linear path Midpoint has order three, by accident: dx/dt = x q' / (2 q)
    # with a quadratic q, which the method integrates to one order more.
    ("sampler", "expected"),
    [(Euler(), 1), (Heun(), 2), (Midpoint(), 3), (RK4(), 4)],
    ids=name,
)
def test_order_on_the_linear_path(sampler: Any, expected: int) -> None:
    for start, end in ((0.95, 0.05), (0.05, 0.95)):
        measured = order(Linear(), "velocity", sampler, start, end, (64, 128))
        assert abs(measured - expected) < 0.15


@pytest.mark.parametrize("path", [Linear(), SMOOTH], ids=name)
@pytest.mark.parametrize("sampler", [sampler for sampler, _ in SAMPLERS], ids=name)
def test_kinds(sampler: Any, path: AlphaSigmaPath) -> None:
    x, pairs = NOISE.normal(torch.empty(4, 3).double()), uniform_grid(5, 0.95, 0.1)
    out = {
        kind: simulate(x, pairs, sampler, path, VectorGaussian(path, MEAN, STD, kind), NOISE)
        for kind in ["clean", "noise", "velocity", "score", "mean_velocity"]
    }
    for other in out.values():
        torch.testing.assert_close(other, out["velocity"], rtol=1e-12, atol=1e-12)
    assert torch.equal(out["mean_velocity"], out["velocity"])


@pytest.mark.parametrize(
    ("path", "kind", "start", "end", "heun", "midpoint", "rk4"),
    [
        (Linear(), "velocity", 1.0, 0.0, 2, 3, 4),
        (Linear(), "clean", 1.0, 0.0, 2, 3, 4),
        (Linear(), "velocity", 0.0, 1.0, 2, 3, 4),
        (VPCosine(), "velocity", 1.0, 0.0, 2, 2, 4),
        (SMOOTH, "velocity", 1.0, 0.0, 2, 2, 4),  # Heun ends with Euler's step, RK4 with Ralston's
        (SMOOTH, "clean", 1.0, 0.0, 2, 2, 4),
        (SMOOTH, "noise", 1.0, 0.0, 2, 2, 4),
        (SMOOTH, "clean", 0.0, 1.0, 1, 2, 1),  # begin where the velocity is undetermined: Heun, RK4
        (Linear(), "noise", 1.0, 0.0, 1, 2, 1),
    ],
)
def test_order_up_to_the_ends(
    path: AlphaSigmaPath, kind: str, start: float, end: float, heun: int, midpoint: int, rk4: int
) -> None:
    for sampler, expected in ((Heun(), heun), (Midpoint(), midpoint), (RK4(), rk4)):
        steps = (64, 128) if sampler.__class__ is RK4 and expected == 4 else (32, 64)
        assert abs(order(path, kind, sampler, start, end, steps) - expected) < 0.15


@pytest.mark.parametrize("path", [Linear(), SMOOTH], ids=name)
@pytest.mark.parametrize(
    ("sampler", "expected"), [(Euler(), 1), (Heun(), 3), (Midpoint(), 3), (RK4(), 5)], ids=name
)
def test_round_trip(path: AlphaSigmaPath, sampler: Any, expected: int) -> None:
    """Encode, then decode: a method of even order undoes itself to one order more."""
    toy = VectorGaussian(path, MEAN, STD, "clean")
    x = MEAN + STD * NOISE.normal(torch.empty(4, 3).double())
    errors = {}
    for steps in (24, 48):
        pairs = uniform_grid(steps, 0.1, 0.9)
        there = simulate(x, pairs, sampler, path, toy, NOISE)
        back = simulate(there, pairs.flip(0, 1), sampler, path, toy, NOISE)
        errors[steps] = float((back - x).abs().max())
    assert abs(slope(errors) - expected) < 0.15


BLOCK = BlockGaussian(beta=1.0, gamma=1.0, mass=0.5)
BLOCK_FIELD = BlockField(
    BLOCK, torch.tensor([1.0, 0.2]).double(), torch.eye(2, dtype=torch.float64) * 0.5
)


@functools.cache
def block_flow(start: float, end: float) -> tuple[Tensor, Tensor]:
    """A start, and where the flow carries it, by Runge and Kutta's method of order 4."""
    x = NOISE.normal(torch.empty(4, 2, 3, dtype=torch.float64))
    n = 150
    mean, cov = BLOCK_FIELD.moments(torch.linspace(start, end, 2 * n + 1, dtype=torch.float64))
    pull = 0.5 * BLOCK.GG @ torch.linalg.inv(cov)

    def velocity(x: Tensor, k: int) -> Tensor:
        return BLOCK.F @ x + pull[k] @ (x - mean[k][:, None])

    y, h = x, (end - start) / n
    for k in range(0, 2 * n, 2):
        k1 = velocity(y, k)
        k2 = velocity(y + h / 2 * k1, k + 1)
        k3 = velocity(y + h / 2 * k2, k + 1)
        k4 = velocity(y + h * k3, k + 2)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return x, y


@pytest.mark.parametrize(("sampler", "expected"), SAMPLERS, ids=name)
@pytest.mark.parametrize(("kind", "start", "end"), [("score", 0.8, 0.2), ("clean", 0.2, 0.8)])
def test_order_on_the_block_path(
    sampler: Any, expected: int, kind: str, start: float, end: float
) -> None:
    field = replace(BLOCK_FIELD, predicts=kind)
    x, exact = block_flow(start, end)
    errors = {}
    for steps in (16, 32) if expected < 3 else (24, 48):
        out = simulate(x, uniform_grid(steps, start, end), sampler, BLOCK, field, NOISE)
        assert out.shape == (4, 3)
        errors[steps] = float((out - exact[:, 0]).abs().max())
    assert abs(slope(errors) - expected) < 0.15


@pytest.mark.parametrize("path", [Linear(), SMOOTH, VPCosine()], ids=name)
def test_formulas(path: AlphaSigmaPath) -> None:
    toy = VectorGaussian(path, MEAN, STD, "velocity")
    x, t, s = NOISE.normal(torch.empty(4, 3).double()), time(0.6), time(0.2)
    pairs = torch.stack([t, s])[None]
    h = s - t
    euler = x + h * toy(x, t)
    heun = x + h * (toy(x, t) + toy(euler, s)) / 2
    middle = x + h * toy(x + h / 2 * toy(x, t), t + h / 2)
    v1 = toy(x, t)
    v2 = toy(x + h / 2 * v1, t + h / 2)
    v3 = toy(x + h / 2 * v2, t + h / 2)
    v4 = toy(x + h * v3, s)
    classical = x + h * (v1 + 2 * v2 + 2 * v3 + v4) / 6
    steps = [(Euler(), euler, 1), (Heun(), heun, 2), (Midpoint(), middle, 2), (RK4(), classical, 4)]
    for sampler, exact, calls in steps:
        counted = Counting(toy)
        out = simulate(x, pairs, sampler, path, counted, NOISE)
        torch.testing.assert_close(out, exact, rtol=1e-14, atol=1e-14)
        assert len(counted.calls) == calls
    last = uniform_grid(1, 0.6, 0.0)
    for sampler, calls in ((Heun(), 1), (RK4(), 3)):  # none at s = 0
        counted = Counting(toy)
        out = simulate(x, last, sampler, path, counted, NOISE)
        assert len(counted.calls) == calls
    v2 = toy(x - t / 2 * v1, t / 2)
    v3 = toy(x - 3 * t / 4 * v2, t / 4)
    ralston = x - t * (2 * v1 + 3 * v2 + 4 * v3) / 9
    torch.testing.assert_close(out, ralston, rtol=1e-14, atol=1e-14)


def test_the_clean_prediction_is_that_at_t() -> None:
    path = VPCosine()
    toy = VectorGaussian(path, MEAN, STD, "noise")
    x, t, s = NOISE.normal(torch.empty(4, 3).double()), time(0.6), time(0.2)
    exact = replace(toy, predicts="clean")(x, t)
    for sampler in (Euler(), Heun(), Midpoint(), RK4()):
        run = Run(path, toy, NOISE, 0, t, s, {}, Steering(), {})
        _, memory, clean = sampler.step(x, sampler.start(x), run)
        assert memory is None
        torch.testing.assert_close(clean, exact, rtol=1e-12, atol=1e-12)


class Shift(Steering):
    """Adds a constant to every clean prediction: the field of data that lie elsewhere."""

    def __init__(self, by: float) -> None:
        self.by, self.times = by, []

    def clean(self, clean: Any, x: Any, aim: Any, run: Run) -> Any:
        self.times.append(float(run.t))
        return clean + self.by


@pytest.mark.parametrize("path", [Linear(), SMOOTH, VPCosine()], ids=name)
@pytest.mark.parametrize("kind", ["clean", "noise", "velocity", "score"])
@pytest.mark.parametrize("sampler", [Euler(), Heun(), Midpoint(), RK4()], ids=name)
def test_steering_of_the_clean_prediction(path: AlphaSigmaPath, kind: str, sampler: Any) -> None:
    """Shifted clean predictions give the same simulation whatever the field predicts, and it is
    that of a field which predicts the shifted clean end itself."""

    class Shifted(VectorGaussian):
        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:  # type: ignore[override]
            return super().__call__(x, t) + 0.7

    toy = VectorGaussian(path, MEAN, STD, kind)
    x = NOISE.normal(torch.empty(4, 3).double())
    pairs, steer = uniform_grid(4, 0.99, 0.0), Shift(0.7)
    out = simulate(x, pairs, sampler, path, toy, NOISE, steer)
    exact = simulate(x, pairs, sampler, path, Shifted(path, MEAN, STD), NOISE)
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)
    plain = simulate(x, pairs, sampler, path, toy, NOISE)
    assert (out - plain).abs().min() > 0.1
    assert steer.times == pytest.approx(stage_times(sampler, pairs), abs=1e-15)


def stage_times(sampler: Any, pairs: Tensor) -> list[float]:
    """Where a sampler evaluates the field: all of these predictions are corrected."""
    times = []
    for t, s in pairs.tolist():
        nodes = {"Euler": [0], "Heun": [0, 1], "Midpoint": [0, 0.5], "RK4": [0, 0.5, 0.5, 1]}
        last = {"Heun": [0], "RK4": [0, 0.5, 0.75]} if s == 0 else {}
        times += [t + node * (s - t) for node in {**nodes, **last}[name(sampler)]]
    return times


@pytest.mark.parametrize("sampler", [Heun(), Midpoint(), RK4()], ids=name)
def test_a_steering_that_draws_draws_once_a_step(sampler: Any) -> None:
    """The step is that of the field shifted by the draw: its noise is not averaged away."""

    class Draw(Steering):
        def clean(self, clean: Any, x: Any, aim: Any, run: Run) -> Any:
            return clean + run.noise.normal(x, "draw")

    class Fixed(Steering):
        def clean(self, clean: Any, x: Any, aim: Any, run: Run) -> Any:
            return clean + NOISE.at(run.k).normal(x, "draw")

    path = VPCosine()
    toy, x = VectorGaussian(path, MEAN, STD), NOISE.normal(torch.empty(4, 3).double())
    pairs = uniform_grid(3, 0.9, 0.2)
    out = [simulate(x, pairs, sampler, path, toy, NOISE, steer) for steer in (Draw(), Fixed())]
    assert torch.equal(*out)
    assert (out[0] - simulate(x, pairs, sampler, path, toy, NOISE)).abs().min() > 1e-3


def test_gradients_reach_the_field_and_the_start() -> None:
    path, mean = Linear(), MEAN.clone().requires_grad_()
    x = NOISE.normal(torch.empty(2, 3).double()).requires_grad_()
    for sampler in (Euler(), Heun(), Midpoint(), RK4()):
        for kind in ("clean", "velocity"):
            toy = VectorGaussian(path, mean, STD, kind)
            out = simulate(x, uniform_grid(4, 0.9, 0.1), sampler, path, toy, NOISE)
            on_x, on_mean = torch.autograd.grad(out.sum(), (x, mean))
            shifted = simulate(
                x.detach() + 1e-4, uniform_grid(4, 0.9, 0.1), sampler, path, toy, NOISE
            )
            change = (shifted - out.detach()).sum(0) / 1e-4  # affine in x, one coordinate each
            torch.testing.assert_close(on_x.sum(0), change.detach(), rtol=1e-6, atol=1e-6)
            assert (on_mean.abs() > 0.1).all()


def test_clean_predictions_that_nobody_reads_are_not_made() -> None:
    path, x = VPCosine(), NOISE.normal(torch.empty(4, 3).double())
    toy, (t, s) = VectorGaussian(path, MEAN, STD, "velocity"), (time(0.6), time(0.2))
    parts: dict[str, Any] = {"path": path, "field": toy, "noise": NOISE, "k": 0, "t": t, "s": s}
    parts |= {"cond": {}, "steer": Steering(), "aim": {}}
    for sampler in (Euler(), Heun(), Midpoint(), RK4()):
        x_s, _, clean = sampler.step(x, None, Run(**parts))
        same, _, nothing = sampler.step(x, None, Run(**parts, watched=False))
        assert torch.equal(x_s, same) and clean.shape == x.shape and nothing is None


@pytest.mark.parametrize("kind", ["clean", "noise", "velocity", "score", "mean_velocity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_velocity_without_steering(kind: str, dtype: torch.dtype) -> None:
    path = VPCosine()
    toy = VectorGaussian(path, MEAN, STD, kind)
    x, t = NOISE.normal(torch.empty(4, 3, dtype=dtype)), time(0.6)
    run = Run(path, toy, NOISE, 0, t, time(0.2), {}, Steering(), {})
    guess = predicted(x, run)
    velocity, clean = guess.velocity, guess.clean
    assert velocity.dtype == clean.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    exact = replace(toy, predicts="velocity")(x.double(), t)
    torch.testing.assert_close(velocity.double(), exact, rtol=tolerance, atol=tolerance)
    if kind in ("velocity", "mean_velocity"):
        assert torch.equal(velocity, replace(toy, predicts="velocity")(x, t))
