"""Classifier-free guidance."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.fields import KINDS, convert
from fluvial.core.gaussian.ode import Euler, Heun
from fluvial.core.gaussian.paths import Linear, VPCosine
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import simulate
from fluvial.core.steering.guidance import ClassifierFree
from fluvial.core.time import uniform_grid

from .toys import Counting, VectorGaussian

NOISE = KeyedNoise(3)
X = NOISE.normal(torch.empty(4, 3, dtype=torch.float64))
CONDITIONAL = torch.tensor([1.0, 2.0, 3.0]).double()
UNCONDITIONAL = torch.tensor([0.3, -0.5, 0.0]).double()


def time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


class Labelled:
    """Returns a constant that depends on its conditions."""

    predicts = "velocity"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        value = UNCONDITIONAL if cond.get("label") is None else CONDITIONAL
        return (value * cond.get("factor", 1)).to(x).expand_as(x)


def guided(scale: float, **options: Any) -> tuple[Any, Counting]:
    field = Counting(Labelled())
    return ClassifierFree(scale, **options).bend(field), field


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 1.1, 7.5, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_formula(scale: float, dtype: torch.dtype) -> None:
    field, counted = guided(scale)
    assert field.predicts == "velocity"
    exact = UNCONDITIONAL + scale * (CONDITIONAL - UNCONDITIONAL)
    x = X.to(dtype)
    for t in (time(0.5), torch.full((4,), 0.5).to(dtype)):
        value = field(x, t, label=1)
        assert value.dtype == dtype
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(value, exact.to(x).expand_as(x), rtol=8 * eps, atol=8 * eps)
    assert len(counted.calls) == (2 if scale == 1 else 4)


def test_scale_one_is_the_field_itself() -> None:
    field = Labelled()
    assert ClassifierFree(1.0).bend(field) is field
    assert torch.equal(guided(0.0)[0](X, time(0.5), label=1), UNCONDITIONAL.expand_as(X))


@pytest.mark.parametrize(
    ("t", "calls"), [(0.0, 1), (0.19, 1), (0.2, 2), (0.5, 2), (0.8, 2), (0.81, 1), (1.0, 1)]
)
def test_interval_at_one_time(t: float, calls: int) -> None:
    field, counted = guided(3.0, interval=(0.2, 0.8))
    value = field(X, time(t), label=1)
    assert len(counted.calls) == calls
    exact = CONDITIONAL if calls == 1 else UNCONDITIONAL + 3 * (CONDITIONAL - UNCONDITIONAL)
    assert torch.equal(value, exact.expand_as(X))


def test_interval_by_rows() -> None:
    t = torch.tensor([0.1, 0.2, 0.8, 0.9]).double()
    field, _ = guided(3.0, interval=(0.2, 0.8))
    value = field(X, t, label=1)
    for i in range(4):
        assert torch.equal(value[i : i + 1], field(X[i : i + 1], t[i], label=1))


def test_null_conditions() -> None:
    field, counted = guided(2.0)
    field(X, time(0.5), label=1, factor=2)
    assert counted.calls == [{"label": 1, "factor": 2}, {"label": None, "factor": 2}]
    field, counted = guided(2.0, null={"factor": 0, "other": 5})
    value = field(X, time(0.5), label=1, factor=2)
    assert counted.calls[1] == {"label": 1, "factor": 0, "other": 5}
    assert torch.equal(value, (2 * 2 * CONDITIONAL).expand_as(X))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"scale": math.nan}, "scale must be finite"),
        ({"scale": math.inf}, "scale must be finite"),
        ({"scale": 1.0, "interval": (0.5, 0.2)}, "interval"),
        ({"scale": 1.0, "interval": (-0.1, 0.2)}, "interval"),
        ({"scale": 1.0, "interval": (0.5, 1.1)}, "interval"),
        ({"scale": 1.0, "interval": (math.nan, 1.0)}, "interval"),
        ({"scale": 1.0, "null": {}}, "null"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ClassifierFree(**arguments)


class TwoGaussians:
    """N(mean, std^2) with a label, and a wider N(0, wide^2) without."""

    def __init__(self, path: Any, kind: str, std: float, wide: float) -> None:
        self.predicts = kind
        ones = torch.ones(3, dtype=torch.float64)
        self.labelled = VectorGaussian(path, ones, std * ones, kind)
        self.plain = VectorGaussian(path, 0 * ones, wide * ones, kind)

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return (self.plain if cond.get("label") is None else self.labelled)(x, t)


@pytest.mark.parametrize("kind", KINDS)
def test_guided_gaussian(kind: str) -> None:
    """Its score is that of p(x | label)^w p(x)^(1 - w) at every t: linear, with known slope."""
    path, scale, t = VPCosine(), 2.5, time(0.4)
    steer = ClassifierFree(scale)
    score = convert(steer.bend(TwoGaussians(path, kind, 0.5, 1.5)), "score", path)(X, t, label=0)
    alpha, sigma = float(path.alpha(t)), float(path.sigma(t))
    narrow, wide = (alpha * 0.5) ** 2 + sigma**2, (alpha * 1.5) ** 2 + sigma**2
    exact = -scale * (X - alpha) / narrow - (1 - scale) * X / wide
    torch.testing.assert_close(score, exact, rtol=1e-12, atol=1e-12)


def test_guided_law() -> None:
    """Equal spreads: the guided field is that of data around scale * mean, at any t and scale."""
    path, scale = Linear(), 3.0
    field = TwoGaussians(path, "velocity", 0.5, 0.5)
    out = simulate(
        X, uniform_grid(8), Heun(), path, field, NOISE, ClassifierFree(scale), label=torch.zeros(4)
    )
    moved = replace(field.labelled, mean=scale * field.labelled.mean)
    exact = simulate(X, uniform_grid(8), Heun(), path, moved, NOISE)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)


def test_guided_for_a_part_of_the_way() -> None:
    path, scale, pairs = Linear(), 3.0, uniform_grid(8)
    field = TwoGaussians(path, "velocity", 0.5, 0.5)
    steer = ClassifierFree(scale, interval=(0.6, 1.0))
    out = simulate(X, pairs, Euler(), path, field, NOISE, steer, label=torch.zeros(4))
    moved = replace(field.labelled, mean=scale * field.labelled.mean)
    half = simulate(X, pairs[:4], Euler(), path, moved, NOISE)
    exact = simulate(half, pairs[4:], Euler(), path, field.labelled, NOISE)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
