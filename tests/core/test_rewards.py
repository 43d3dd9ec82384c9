"""Reward gradients, on Gaussian data where a linear reward shifts the law and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.fields import KINDS, convert
from fluvial.core.gaussian.ode import Euler, Heun
from fluvial.core.gaussian.paths import VE, AlphaSigmaPath, Linear, VPCosine, VPLinear
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Run, Steering
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.steering.rewards import (
    Differentiable,
    RewardGradient,
    clean_and_covariance,
    isotropic_variance,
)
from fluvial.core.time import uniform_grid

from .toys import BlockField, BlockGaussian, Counting, VectorGaussian

NOISE = KeyedNoise(3)
PATHS = [Linear(), VPLinear(), VPCosine(), VE(0.1, 5.0)]
MEAN = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
STD = torch.tensor([0.6, 1.0, 1.7], dtype=torch.float64)
SLOPE = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
X = NOISE.normal(torch.empty(4, 3, dtype=torch.float64))


def name(value: Any) -> str:
    return value if isinstance(value, str) else type(value).__name__


def time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def run_at(path: Any, field: Any, t: float, steer: Steering | None = None, **cond: Any) -> Run:
    return Run(path, field, NOISE, 0, time(t), time(0.1), cond, steer or Steering(), {})


def linear(x: Tensor, **cond: Any) -> Tensor:
    return x @ SLOPE.to(x)


def assert_close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# The covariance


@pytest.mark.parametrize("path", PATHS, ids=name)
@pytest.mark.parametrize("kind", [*KINDS, "mean_velocity"])
def test_covariance(path: AlphaSigmaPath, kind: str) -> None:
    """Of x_0 given x_t: std^2 sigma^2 / (alpha^2 std^2 + sigma^2) a coordinate."""
    toy, v = VectorGaussian(path, MEAN, STD, kind), NOISE.normal(X, "v")
    for t in (0.1, 0.5, 0.9):
        signal, level = (path.alpha(time(t)) * STD).square(), path.sigma(time(t)).square()
        exact = STD.square() * level / (signal + level)
        clean, covariance = clean_and_covariance(X, run_at(path, toy, t), 1.0)
        assert_close(covariance(v), exact * v, 1e-9)
        assert_close(clean.detach(), replace(toy, predicts="clean")(X, time(t)), 1e-9)
    same = VectorGaussian(path, MEAN, 0.7 * torch.ones(3).double(), kind)
    for t in (0.1, 0.9):
        run = run_at(path, same, t)
        assert_close(
            clean_and_covariance(X, run, 0.7)[1](v), isotropic_variance(run, 0.7) * v, 1e-9
        )


def test_covariance_where_nothing_is_known() -> None:
    run = run_at(Linear(), VectorGaussian(Linear(), MEAN, STD), 1.0)
    assert torch.equal(clean_and_covariance(X, run, 0.5)[1](X), 0.25 * X)
    assert isotropic_variance(run, 0.5) == 0.25


def test_covariance_on_the_block_path() -> None:
    path = BlockGaussian()
    mean, prior = torch.tensor([1.0, 0.2]).double(), torch.tensor([[0.5, 0.1], [0.1, 0.3]]).double()
    field, t = BlockField(path, mean, prior), 0.4
    scale, level = (part.matrix for part in path.marginal(time(t)))
    exact = torch.linalg.inv(
        torch.linalg.inv(prior) + scale.T @ torch.linalg.inv(level @ level.T) @ scale
    )
    x, v = (NOISE.normal(torch.empty(4, 2, 3).double(), tag) for tag in "xv")
    _, covariance = clean_and_covariance(x, run_at(path, field, t), 1.0)
    assert_close(covariance(v), exact @ v, 1e-9)
    with pytest.raises(TypeError, match="scalar coefficients, got BlockGaussian"):
        isotropic_variance(run_at(path, field, t), 1.0)


# A linear reward: p(x_0) exp(scale b x_0) is the Gaussian around mean + scale std^2 b


@pytest.mark.parametrize("path", [VPLinear(), VE(0.1, 5.0)], ids=name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", [Ancestral(), Euler(), Heun()], ids=name)
def test_tilted_gaussian(path: AlphaSigmaPath, kind: str, sampler: Any) -> None:
    toy, steer = VectorGaussian(path, MEAN, STD, kind), RewardGradient(linear, scale=1.3)
    moved = replace(toy, mean=MEAN + 1.3 * STD.square() * SLOPE)
    fields = [
        convert(field, "clean", path) if isinstance(sampler, Ancestral) else field
        for field in (toy, moved)
    ]
    with torch.no_grad():
        out = simulate(X, uniform_grid(5), sampler, path, fields[0], NOISE, steer)
        exact = simulate(X, uniform_grid(5), sampler, path, fields[1], NOISE)
    assert_close(out, exact, 1e-8)
    assert not out.requires_grad


@pytest.mark.parametrize("path", [Linear(), VPCosine()], ids=name)
@pytest.mark.parametrize("through", ["network", "clean"])
def test_tilted_isotropic_gaussian_from_pure_noise(path: AlphaSigmaPath, through: Any) -> None:
    """Both ways are exact with the right std, also where alpha = 0."""
    toy = VectorGaussian(path, MEAN, 0.7 * torch.ones(3).double())
    steer = RewardGradient(linear, scale=-2.0, through=through, std=0.7)
    moved = replace(toy, mean=MEAN - 2 * 0.49 * SLOPE)
    for sampler in (Ancestral(), Heun()):
        out = simulate(X, uniform_grid(5), sampler, path, toy, NOISE, steer)
        assert_close(out, simulate(X, uniform_grid(5), sampler, path, moved, NOISE), 1e-10)


@pytest.mark.parametrize("through", ["network", "clean"])
def test_normalised(through: Any) -> None:
    """The shift has a length of scale posterior standard deviations, along C_t b."""
    path, std = VPCosine(), 0.7
    toy = VectorGaussian(path, MEAN, STD)
    steer = RewardGradient(linear, 0.5, through, normalise=True, std=std)
    run = run_at(path, steer.bend(toy), 0.4, steer)
    clean = toy(X, run.t)
    shift = steer.clean(clean, X, {}, run) - clean
    length = 0.5 * float(isotropic_variance(run, std).sqrt()) * math.sqrt(3)
    assert_close(shift.norm(dim=1), torch.full((4,), length, dtype=torch.float64), 1e-12)
    plain = replace(steer, normalise=False).clean(clean, X, {}, run) - clean
    cosine = torch.nn.functional.cosine_similarity(shift, plain)
    assert_close(cosine, torch.ones(4).double(), 1e-12)
    tiny = replace(steer, reward=lambda x: 1e-9 * linear(x))
    assert_close(tiny.clean(clean, X, {}, run) - clean, shift, 1e-9)
    flat = replace(steer, reward=lambda x: 0 * linear(x))
    assert torch.equal(flat.clean(clean, X, {}, run), clean)


# How it is called


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sampler", "calls"), [(Euler(), 4), (Heun(), 7)], ids=name)
def test_field_is_called_once_an_evaluation(kind: str, sampler: Any, calls: int) -> None:
    path = VPLinear()
    counted = Counting(VectorGaussian(path, MEAN, STD, kind))
    simulate(X, uniform_grid(4), sampler, path, counted, NOISE, RewardGradient(linear))
    assert len(counted.calls) == calls


def test_mean_velocity_is_asked_for_its_limit() -> None:
    path, steer = Linear(), RewardGradient(linear)
    out = [
        simulate(
            X, uniform_grid(4, 0.9), Euler(), path, VectorGaussian(path, MEAN, STD, k), NOISE, steer
        )
        for k in ("velocity", "mean_velocity")
    ]
    assert_close(*out, 1e-12)


def test_recorded_graph_is_used_for_its_own_state_only() -> None:
    toy = VectorGaussian(VPCosine(), MEAN, STD)
    field = Differentiable(toy)
    assert field.predicts == "clean"
    run = run_at(VPCosine(), field, 0.4)
    assert not field(X, run.t).requires_grad and field.last is not None
    other = X + 1
    assert_close(clean_and_covariance(other, run, 1.0)[0].detach(), toy(other, run.t), 1e-12)
    later = replace(run, t=time(0.6))
    assert_close(clean_and_covariance(X, later, 1.0)[0].detach(), toy(X, later.t), 1e-12)


def test_conditions_and_dtype() -> None:
    path, seen = VPCosine(), []

    def reward(x: Tensor, *, label: Tensor) -> Tensor:
        seen.append((x.dtype, label))
        return linear(x) * label

    toy = VectorGaussian(path, MEAN, STD, "velocity")
    label = torch.tensor([0.0, 0.0, 1.0, 1.0])
    for through in ("network", "clean"):
        steer = RewardGradient(reward, through=through)  # type: ignore[arg-type]
        out = simulate(
            X.float(), uniform_grid(3, 0.9), Euler(), path, toy, NOISE, steer, label=label
        )
        assert out.dtype == torch.float32 and seen[-1] == (torch.float32, label)
        plain = simulate(X.float(), uniform_grid(3, 0.9), Euler(), path, toy, NOISE)
        assert (out[:2] - plain[:2]).abs().max() < 1e-5 < (out[2:] - plain[2:]).abs().min()


@pytest.mark.parametrize("through", ["network", "clean"])
@pytest.mark.parametrize("normalise", [False, True])
def test_no_step_reads_a_value(through: Any, normalise: bool) -> None:
    """Tensors on the meta device have none: on an accelerator, reading one would be a wait."""

    class StandardNormal:
        predicts = "clean"

        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            return (1 - t) / ((1 - t) ** 2 + t**2) * x

    steer = RewardGradient(lambda x: x.sum(1), 1.0, through, normalise)
    x = torch.empty(4, 3, device="meta")
    out = simulate(x, uniform_grid(3), Heun(), Linear(), StandardNormal(), NOISE, steer)
    assert out.shape == x.shape and out.device.type == "meta"


def test_a_nonlinear_reward_rises() -> None:
    path = Linear()
    toy = VectorGaussian(path, MEAN, STD, "velocity")
    centre = torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64)

    def reward(x: Tensor) -> Tensor:
        return -(x - centre).square().sum(1)

    rewards = [
        float(
            reward(
                simulate(
                    X, uniform_grid(30), Euler(), path, toy, NOISE, RewardGradient(reward, scale)
                )
            ).mean()
        )
        for scale in (0.0, 0.3, 1.0)
    ]
    assert rewards[0] < rewards[1] < rewards[2]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"scale": math.nan}, "scale must be finite"),
        ({"through": "nothing"}, "through must be"),
        ({"std": 0.0}, "std must be positive"),
        ({"std": math.inf}, "std must be positive"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RewardGradient(linear, **arguments)


class Opaque:
    predicts = "velocity"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return x.detach()


@pytest.mark.parametrize(
    ("reward", "match"),
    [
        (lambda x: x.sum(), r"reward must be differentiable, \(4,\), got \(\)"),
        (lambda x: linear(x).detach(), "without a gradient"),
    ],
)
def test_bad_rewards(reward: Any, match: str) -> None:
    toy = VectorGaussian(Linear(), MEAN, STD)
    with pytest.raises(ValueError, match=match):
        simulate(X, uniform_grid(2), Euler(), Linear(), toy, NOISE, RewardGradient(reward))
    with pytest.raises(TypeError, match="reward must give a tensor, got float"):
        steer = RewardGradient(lambda x: 1.0)  # type: ignore[arg-type, return-value]
        simulate(X, uniform_grid(2), Euler(), Linear(), toy, NOISE, steer)


def test_fields_without_gradient() -> None:
    with pytest.raises(ValueError, match="a field that can be differentiated in x"):
        simulate(X, uniform_grid(2), Euler(), Linear(), Opaque(), NOISE, RewardGradient(linear))
