"""Solvers of the flow, by their measured order and by what steering does to them."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.ode import Euler, Heun, steered_velocity
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
SAMPLERS = [(Euler(), 1), (Heun(), 2)]


def name(path: Any) -> str:
    return "" if isinstance(path, int) else type(path).__name__


def time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def slope(errors: dict[int, float]) -> float:
    """Of the log of the error against the log of the step."""
    (few, coarse), (many, fine) = errors.items()
    assert fine > 1e-10  # not rounding
    return math.log(coarse / fine) / math.log(many / few)


def order(path: AlphaSigmaPath, kind: str, sampler: Any, start: float, end: float) -> float:
    toy = VectorGaussian(path, MEAN, STD, kind)
    mean, var = toy.moments(time(start))
    x = mean + var.sqrt() * NOISE.normal(torch.empty(8, 3, dtype=torch.float64))
    exact = toy.flow(x, time(start), time(end))
    errors = {}
    for steps in (32, 64):
        out = simulate(x, uniform_grid(steps, start, end), sampler, path, toy, NOISE)
        errors[steps] = float((out - exact).abs().max())
    return slope(errors)


@pytest.mark.parametrize(("start", "end"), [(0.95, 0.05), (0.05, 0.95)])
@pytest.mark.parametrize("kind", ["clean", "noise", "velocity", "score", "mean_velocity"])
@pytest.mark.parametrize("path", [Linear(), SMOOTH], ids=name)
@pytest.mark.parametrize(("sampler", "expected"), SAMPLERS, ids=name)
def test_order(
    sampler: Any, expected: int, path: AlphaSigmaPath, kind: str, start: float, end: float
) -> None:
    assert abs(order(path, kind, sampler, start, end) - expected) < 0.1


@pytest.mark.parametrize(
    ("path", "kind", "start", "end", "expected"),
    [
        (Linear(), "velocity", 1.0, 0.0, 2),
        (Linear(), "clean", 1.0, 0.0, 2),
        (Linear(), "velocity", 0.0, 1.0, 2),
        (VPCosine(), "velocity", 1.0, 0.0, 2),
        (SMOOTH, "velocity", 1.0, 0.0, 2),  # ends with an Euler step
        (SMOOTH, "clean", 1.0, 0.0, 2),
        (SMOOTH, "noise", 1.0, 0.0, 2),
        (SMOOTH, "clean", 0.0, 1.0, 1),  # begins where the velocity is undetermined
        (Linear(), "noise", 1.0, 0.0, 1),
    ],
)
def test_order_of_heun_up_to_the_ends(
    path: AlphaSigmaPath, kind: str, start: float, end: float, expected: int
) -> None:
    assert abs(order(path, kind, Heun(), start, end) - expected) < 0.15


BLOCK = BlockGaussian(beta=1.0, gamma=1.0, mass=0.5)
BLOCK_FIELD = BlockField(
    BLOCK, torch.tensor([1.0, 0.2]).double(), torch.eye(2, dtype=torch.float64) * 0.5
)


@functools.cache
def block_flow(start: float, end: float) -> tuple[Tensor, Tensor]:
    """A start, and where the flow carries it, by Runge and Kutta's method of order 4."""
    x = NOISE.normal(torch.empty(4, 2, 3, dtype=torch.float64))
    n = 50
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
@pytest.mark.parametrize("kind", ["score", "clean"])
@pytest.mark.parametrize(("start", "end"), [(0.8, 0.2), (0.2, 0.8)])
def test_order_on_the_block_path(
    sampler: Any, expected: int, kind: str, start: float, end: float
) -> None:
    field = replace(BLOCK_FIELD, predicts=kind)
    x, exact = block_flow(start, end)
    errors = {}
    for steps in (16, 32):
        out = simulate(x, uniform_grid(steps, start, end), sampler, BLOCK, field, NOISE)
        assert out.shape == (4, 3)
        errors[steps] = float((out - exact[:, 0]).abs().max())
    assert abs(slope(errors) - expected) < 0.1


@pytest.mark.parametrize("path", [Linear(), SMOOTH, VPCosine()], ids=name)
def test_formulas(path: AlphaSigmaPath) -> None:
    toy = VectorGaussian(path, MEAN, STD, "velocity")
    x, t, s = NOISE.normal(torch.empty(4, 3).double()), time(0.6), time(0.2)
    pairs = torch.stack([t, s])[None]
    euler = x + (s - t) * toy(x, t)
    assert torch.equal(simulate(x, pairs, Euler(), path, toy, NOISE), euler)
    heun = x + (s - t) * (toy(x, t) + toy(euler, s)) / 2
    out = simulate(x, pairs, Heun(), path, toy, NOISE)
    torch.testing.assert_close(out, heun, rtol=1e-14, atol=1e-14)
    counted = Counting(toy)
    last = uniform_grid(1, 0.6, 0.0)
    out = simulate(x, last, Heun(), path, counted, NOISE)
    assert torch.equal(out, x - t * toy(x, t)) and len(counted.calls) == 1


def test_the_clean_prediction_is_that_at_t() -> None:
    path = VPCosine()
    toy = VectorGaussian(path, MEAN, STD, "noise")
    x, t, s = NOISE.normal(torch.empty(4, 3).double()), time(0.6), time(0.2)
    exact = replace(toy, predicts="clean")(x, t)
    for sampler in (Euler(), Heun()):
        run = Run(path, toy, NOISE, 0, t, s, {}, Steering(), {})
        _, memory, clean = sampler.step(x, sampler.start(x), run)
        assert memory is None
        torch.testing.assert_close(clean, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sampler", [Euler(), Heun()], ids=name)
def test_mean_velocity_equals_velocity(sampler: Any) -> None:
    path = Linear()
    x = NOISE.normal(torch.empty(4, 3).double())
    out = [
        simulate(x, uniform_grid(4), sampler, path, VectorGaussian(path, MEAN, STD, kind), NOISE)
        for kind in ("velocity", "mean_velocity")
    ]
    assert torch.equal(*out)


class Shift(Steering):
    """Adds a constant to every clean prediction: the field of data that lie elsewhere."""

    def __init__(self, by: float) -> None:
        self.by, self.times = by, []

    def clean(self, clean: Any, x: Any, aim: Any, run: Run) -> Any:
        self.times.append(float(run.t))
        return clean + self.by


@pytest.mark.parametrize("path", [Linear(), SMOOTH, VPCosine()], ids=name)
@pytest.mark.parametrize("kind", ["clean", "noise", "velocity", "score"])
@pytest.mark.parametrize("sampler", [Euler(), Heun()], ids=name)
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
    starts = pairs[:, 0].tolist()
    both = [t for pair in pairs.tolist() for t in pair][:-1]  # the last step is an Euler step
    assert steer.times == (starts if isinstance(sampler, Euler) else both)


@pytest.mark.parametrize("kind", ["clean", "noise", "velocity", "score", "mean_velocity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_velocity_without_steering(kind: str, dtype: torch.dtype) -> None:
    path = VPCosine()
    toy = VectorGaussian(path, MEAN, STD, kind)
    x, t = NOISE.normal(torch.empty(4, 3, dtype=dtype)), time(0.6)
    run = Run(path, toy, NOISE, 0, t, time(0.2), {}, Steering(), {})
    velocity, clean = steered_velocity(x, run)
    assert velocity.dtype == clean.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    exact = replace(toy, predicts="velocity")(x.double(), t)
    torch.testing.assert_close(velocity.double(), exact, rtol=tolerance, atol=tolerance)
    if kind in ("velocity", "mean_velocity"):
        assert torch.equal(velocity, replace(toy, predicts="velocity")(x, t))
