"""Gaussian paths and conversions against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.fields import KINDS, convert, ends, express, predict
from fluvial.core.gaussian.multistep import DDIM, UniPC
from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import (
    VE,
    AlphaSigmaPath,
    CustomPath,
    Linear,
    VPCosine,
    VPLinear,
)
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.scales import Block
from fluvial.core.simulate import simulate
from fluvial.core.time import uniform_grid

from .toys import BlockField, BlockGaussian, Constant, VectorGaussian

CUSTOM = CustomPath(
    lambda t: torch.cos(0.5 * math.pi * t),
    lambda t: torch.sqrt(1 - torch.cos(0.5 * math.pi * t) ** 2),
)
PATHS = [Linear(), VPLinear(), VPCosine(), VE(), CUSTOM]
CLOSED = PATHS[:4]
DTYPES = [torch.float32, torch.float64]
MEAN = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
STD = torch.tensor([0.3, 1.0, 1.7], dtype=torch.float64)
NOISE = KeyedNoise(11)
INSIDE = torch.tensor([1e-4, 1e-3, 0.03, 0.2, 0.5, 0.8, 0.97, 0.999, 1 - 1e-4]).double()
PAIRS = [(1.0, 0.5), (1.0, 0.0), (0.5, 0.5), (0.7, 0.2), (0.3, 0.0), (1e-3, 1e-4), (0.999, 0.998)]
ENDS = [(0.0, 0.0), (1.0, 1.0), (1.0, 0.0)]


def name(path: Any) -> str:
    return type(path).__name__ if isinstance(path, (AlphaSigmaPath, BlockGaussian)) else str(path)


def time(t: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(t, dtype=dtype)


def state(batch: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return KeyedNoise(seed).normal(torch.empty(batch, 3, dtype=dtype))


def assert_close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# Schedules


def test_schedules_are_those_of_the_papers() -> None:
    t = INSIDE
    assert_close(Linear().alpha(t), 1 - t, 0)
    assert_close(Linear().sigma(t), t, 0)
    vp, beta = VPLinear(), 0.1 + 19.9 * t
    integral = 0.1 * t + 19.9 * t**2 / 2
    assert_close(vp.alpha(t), torch.exp(-integral / 2), 1e-14)
    assert_close(vp.sigma(t), torch.sqrt(-torch.expm1(-integral)), 1e-14)
    assert_close(vp.sde(t)[0].value, -beta / 2, 1e-14)
    assert_close(vp.sde(t)[1].value, beta.sqrt(), 1e-14)
    assert_close(VPCosine().alpha(t), torch.cos(math.pi * t / 2), 1e-14)
    for path in (vp, VPCosine(), CUSTOM):
        assert_close(path.alpha(t) ** 2 + path.sigma(t) ** 2, torch.ones_like(t), 1e-14)
    ve = VE(0.01, 50)
    assert_close(ve.alpha(t), torch.ones_like(t), 0)
    assert_close(ve.sigma(t) ** 2 + 0.01**2, (0.01 * 5000**t) ** 2, 1e-11)
    assert_close(ve.sde(t)[1].value, 0.01 * 5000**t * math.sqrt(2 * math.log(5000)), 1e-12)


@pytest.mark.parametrize("path", PATHS, ids=name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ends_of_the_schedules(path: AlphaSigmaPath, dtype: torch.dtype) -> None:
    zero, one = time(0.0, dtype), time(1.0, dtype)
    assert path.alpha(zero) == 1 and path.sigma(zero) == 0
    if isinstance(path, Linear | VPCosine):
        assert path.alpha(one) == 0 and path.sigma(one) == 1
    for t in (zero, one):
        for scale in path.rates(t):
            as_float = scale.value.float()
            assert as_float.isfinite() and scale.value.dtype == dtype
            assert as_float == 0 or (1 / as_float).isfinite()


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_rates_are_derivatives(path: AlphaSigmaPath) -> None:
    t = INSIDE.clone().requires_grad_()
    for function, rate in ((path.alpha, path.alpha_rate), (path.sigma, path.sigma_rate)):
        value = function(t)
        exact = torch.zeros_like(t)
        if value.requires_grad:
            (exact,) = torch.autograd.grad(value.sum(), t)
        torch.testing.assert_close(rate(INSIDE), exact, rtol=1e-9, atol=1e-12)
        inner, h = INSIDE[2:-2], 1e-5
        finite = (function(inner + h) - function(inner - h)) / (2 * h)
        torch.testing.assert_close(rate(inner), finite, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_sde_has_the_marginals(path: AlphaSigmaPath) -> None:
    """The moments' equations: alpha' = F alpha and (sigma^2)' = 2 F sigma^2 + G^2."""
    drift, diffusion = (scale.value for scale in path.sde(INSIDE))
    alpha, sigma = path.alpha(INSIDE), path.sigma(INSIDE)
    assert_close(drift * alpha, path.alpha_rate(INSIDE), 1e-9)
    growth = 2 * drift * sigma.square() + diffusion.square()
    assert_close(growth, 2 * sigma * path.sigma_rate(INSIDE), 1e-9)
    assert (diffusion > 0).all()


@pytest.mark.parametrize("path", [VPLinear(), VE()], ids=name)
def test_sde_is_exact_at_the_ends(path: AlphaSigmaPath) -> None:
    near = torch.tensor([1e-9, 1 - 1e-9]).double()
    for at, beside in zip(path.sde(torch.tensor([0.0, 1.0]).double()), path.sde(near), strict=True):
        torch.testing.assert_close(at.value, beside.value, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("path", "custom"),
    [
        (path, CustomPath(path.alpha, path.sigma))
        for path in (Linear(), VPLinear(), VPCosine(), VE())
    ],
    ids=name,
)
def test_custom_path_equals_the_path_it_copies(path: AlphaSigmaPath, custom: CustomPath) -> None:
    for t in [INSIDE, time(0.3)]:
        for ours, theirs in zip(
            [*path.marginal(t), *path.rates(t), *path.sde(t)],
            [*custom.marginal(t), *custom.rates(t), *custom.sde(t)],
            strict=True,
        ):
            torch.testing.assert_close(theirs.value, ours.value, rtol=1e-7, atol=1e-9)
    x, clean = state(4), state(4, seed=2)
    for t, s in [*PAIRS, *ENDS]:
        a = path.posterior(x, clean, time(t), time(s), NOISE)
        assert torch.equal(a, custom.posterior(x, clean, time(t), time(s), NOISE))


@pytest.mark.parametrize(
    ("alpha", "sigma", "match"),
    [
        (lambda t: 0.9 * (1 - t), lambda t: t, "starts at the data"),
        (lambda t: 1 - t, lambda t: t + 0.1, "starts at the data"),
        (lambda t: 1 - t, lambda t: t / (1 - t), "sigma_of must map"),
        (lambda t: (1 - t).log(), lambda t: t, "alpha_of must map"),
        (lambda t: torch.ones(()), lambda t: t, "alpha_of must map"),
        (lambda t: 1.0, lambda t: t, "alpha_of must map"),
        (lambda t: 1 - t, lambda t: t * (1 - t), "fall strictly"),
        (lambda t: 1 + 0 * t, lambda t: (t - 0.5).relu(), "fall strictly"),
    ],
)
def test_bad_custom_paths(alpha: Any, sigma: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CustomPath(alpha, sigma)


@pytest.mark.parametrize(
    "build",
    [
        lambda: VPLinear(beta_min=0.0),
        lambda: VPLinear(beta_min=2.0, beta_max=1.0),
        lambda: VPLinear(beta_max=math.inf),
        lambda: VPLinear(beta_min=math.nan),
        lambda: VE(sigma_min=0.0),
        lambda: VE(sigma_min=2.0, sigma_max=1.0),
        lambda: VE(sigma_max=math.nan),
    ],
)
def test_bad_schedules(build: Any) -> None:
    with pytest.raises(ValueError, match="need 0 <"):
        build()


# sample, source, targets


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_draws_and_targets(path: AlphaSigmaPath) -> None:
    x0, t = state(6), torch.tensor([0.0, 1e-3, 0.3, 0.6, 0.99, 1.0]).double()
    draw = path.sample(x0, t, NOISE)
    eps = NOISE.normal(x0, "source")
    alpha, sigma = path.alpha(t)[:, None], path.sigma(t)[:, None]
    assert torch.equal(draw.x, alpha * x0 + sigma * eps)
    assert draw.x0 is x0 and draw.t is t
    assert torch.equal(draw.target("clean"), x0)
    assert_close(draw.target("noise"), eps, 1e-14)
    velocity = path.alpha_rate(t)[:, None] * x0 + path.sigma_rate(t)[:, None] * eps
    assert_close(draw.target("velocity"), velocity, 1e-14)
    score = -(draw.x - alpha * x0) / sigma.square()
    assert_close(draw.target("score")[1:], score[1:], 1e-6)
    assert (draw.target("score")[0] == 0).all()  # no noise, and the pseudo-inverse
    for kind in ("drift", "mean_velocity", ""):
        with pytest.raises(ValueError, match="'clean', 'noise', 'velocity' and 'score'"):
            draw.target(kind)


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_the_source_end(path: AlphaSigmaPath) -> None:
    x0, one = state(5), time(1.0)
    draw = path.sample(x0, time(0.4), NOISE)
    assert torch.equal(draw.x1, path.source(x0, NOISE))
    again = path.sample(x0, time(0.4), KeyedNoise(99), x1=draw.x1)
    assert again.x1 is draw.x1
    assert_close(again.x, draw.x, 1e-14)
    end = path.sample(x0, one, NOISE)
    assert_close(end.x, path.alpha(one) * x0 + end.x1, 1e-14)


def test_bad_samples() -> None:
    with pytest.raises(TypeError, match="x0 must be floating"):
        Linear().sample(torch.zeros(2, 3, dtype=torch.long), time(0.5), NOISE)
    with pytest.raises(ValueError, match="x1 has shape"):
        Linear().sample(state(4), time(0.5), NOISE, x1=state(3))


# posterior and transition, as affine maps with Gaussian noise


def posterior_map(path: Any, t: Tensor, s: Tensor, ones: Tensor) -> list[Tensor]:
    """Coefficients of x, of clean and of the noise."""
    zero = torch.zeros_like(ones)
    return [
        path.posterior(ones, zero, t, s, Constant(0.0)),
        path.posterior(zero, ones, t, s, Constant(0.0)),
        path.posterior(zero, zero, t, s, Constant(1.0)),
    ]


def transition_map(path: Any, s: Tensor, t: Tensor, ones: Tensor) -> list[Tensor]:
    return [
        path.transition(ones, s, t, Constant(0.0)),
        path.transition(torch.zeros_like(ones), s, t, Constant(1.0)),
    ]


ONES = torch.ones(1, 1, dtype=torch.float64)


@pytest.mark.parametrize("path", PATHS, ids=name)
@pytest.mark.parametrize(("t", "s"), [*PAIRS, *ENDS])
def test_posterior_and_transition_compose(path: AlphaSigmaPath, t: float, s: float) -> None:
    t_, s_ = time(t), time(s)
    alpha, sigma, alpha_s, sigma_s = path.alpha(t_), path.sigma(t_), path.alpha(s_), path.sigma(s_)
    on_x, on_clean, spread = (float(c) for c in posterior_map(path, t_, s_, ONES))
    step, step_spread = (float(c) for c in transition_map(path, s_, t_, ONES))
    assert all(map(math.isfinite, (on_x, on_clean, spread, step, step_spread)))
    # q(x_t | x_s) q(x_s | x_0) = q(x_t | x_0)
    assert step * alpha_s == pytest.approx(float(alpha), abs=1e-12)
    assert (step * sigma_s) ** 2 + step_spread**2 == pytest.approx(float(sigma) ** 2, rel=1e-9)
    # q(x_s | x_t, x_0) q(x_t | x_0) = q(x_t | x_s) q(x_s | x_0): mean, variance, covariance
    assert on_x * alpha + on_clean == pytest.approx(float(alpha_s), abs=1e-12)
    assert (on_x * sigma) ** 2 + spread**2 == pytest.approx(
        float(sigma_s) ** 2, abs=1e-14, rel=1e-9
    )
    assert on_x * sigma**2 == pytest.approx(float(step * sigma_s**2), abs=1e-14, rel=1e-9)
    if s == t:
        assert (on_x, on_clean, spread) == (1, 0, 0) and (step, step_spread) == (1, 0)
    elif s == 0:
        assert (on_x, on_clean, spread) == (0, 1, 0)
    if t == 1 and s < t and alpha == 0:
        assert on_x == 0 and spread == sigma_s and step == 0 and step_spread == 1


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_posterior_is_bayes_rule(path: AlphaSigmaPath) -> None:
    t, s = time(0.7), time(0.2)
    ratio = path.alpha(t) / path.alpha(s)
    step = path.sigma(t) ** 2 - (ratio * path.sigma(s)) ** 2
    var = 1 / (1 / path.sigma(s) ** 2 + ratio**2 / step)
    on_x, on_clean, spread = posterior_map(path, t, s, ONES)
    assert_close(on_x, (var * ratio / step).expand(1, 1), 1e-12)
    assert_close(on_clean, (var * path.alpha(s) / path.sigma(s) ** 2).expand(1, 1), 1e-12)
    assert_close(spread, var.sqrt().expand(1, 1), 1e-12)


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_times_of_rows(path: AlphaSigmaPath) -> None:
    pairs = torch.tensor([*PAIRS, *ENDS]).double()
    t, s = pairs.T
    x, clean = state(len(pairs)), state(len(pairs), seed=2)
    toy = VectorGaussian(path, MEAN, STD)
    posterior = path.posterior(x, clean, t, s, NOISE)
    transition = path.transition(x, s, t, NOISE)
    draw = path.sample(clean, t, NOISE)
    for i in range(len(pairs)):
        rows, row = NOISE.rows(torch.tensor([i])), slice(i, i + 1)
        assert_close(path.posterior(x[row], clean[row], t[i], s[i], rows), posterior[row], 1e-14)
        assert_close(path.transition(x[row], s[i], t[i], rows), transition[row], 1e-14)
        one = path.sample(clean[row], t[i], rows)
        assert_close(one.x, draw.x[row], 1e-14)
        assert_close(one.target("velocity"), draw.target("velocity")[row], 1e-14)
        for kind in KINDS:
            field = convert(toy, kind, path)
            assert_close(field(x[row], t[i]), field(x, t)[row], 1e-9)


# Conversions


@pytest.mark.parametrize("path", PATHS, ids=name)
@pytest.mark.parametrize(("source", "kind"), product(KINDS, KINDS))
def test_conversions_agree_with_closed_forms(path: AlphaSigmaPath, source: str, kind: str) -> None:
    toy = VectorGaussian(path, MEAN, STD, source)
    exact = replace(toy, predicts=kind)
    t = INSIDE
    noise = state(len(t))
    x = path.alpha(t)[:, None] * (MEAN + STD * state(len(t), seed=2))
    x = x + path.sigma(t)[:, None] * noise
    field = convert(toy, kind, path)
    assert field.predicts == kind
    # An end is found from the other after division by alpha or sigma, which costs those digits.
    lost = 1 / torch.minimum(path.alpha(t), path.sigma(t))[:, None].clamp(max=1)
    for dtype, eps in ((torch.float64, 1e-15), (torch.float32, 1e-6)):
        given, wanted = field(x.to(dtype), t.to(dtype)), exact(x, t)
        assert given.dtype == dtype
        scale = 1 + wanted.abs() + x.abs()
        error = (given.double() - wanted).abs() / scale / lost.square()
        assert error.max() < 10 * eps
        if dtype == torch.float64 and not isinstance(path, CustomPath | VE):
            # -(x - alpha clean) / sigma^2: at t = 1e-4 an absolute error of 1e-16 / 1e-8
            atol = 1e-7 if (source, kind) == ("clean", "score") else 1e-9
            torch.testing.assert_close(given, wanted, rtol=1e-9, atol=atol)


class Prediction:
    """A field that predicts something else than the truth."""

    def __init__(self, kind: str) -> None:
        self.predicts = kind

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return 0.5 * x + 1


@pytest.mark.parametrize("path", PATHS, ids=name)
@pytest.mark.parametrize(("source", "kind"), product(KINDS, KINDS))
def test_conversions_are_finite_at_the_ends(path: AlphaSigmaPath, source: str, kind: str) -> None:
    toy = VectorGaussian(path, MEAN, STD, source)
    for dtype, times in product(DTYPES, ("scalar", "rows")):
        x = state(4, dtype)
        for end in (0.0, 1.0):
            t = time(end) if times == "scalar" else torch.full((4,), end, dtype=dtype)
            for field in (toy, Prediction(source)):
                value = convert(field, kind, path)(x, t)
                assert value.dtype == dtype and value.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_another_type_take_that_of_the_state(kind: str) -> None:
    """As of a network under autocast: what is solved keeps its type and its digits."""

    class Coarse(VectorGaussian):
        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:  # type: ignore[override]
            return super().__call__(x, t).bfloat16()

    path, x = VPCosine(), state(4)
    toy, fine = Coarse(path, MEAN, STD, kind), VectorGaussian(path, MEAN, STD, kind)
    assert predict(toy, x, time(0.5))[1].dtype == x.dtype
    for sampler in (Euler(), DDIM(), UniPC(), EulerMaruyama()):
        out = simulate(x, uniform_grid(4, 0.9, 0.0), sampler, path, toy, NOISE)
        exact = simulate(x, uniform_grid(4, 0.9, 0.0), sampler, path, fine, NOISE)
        assert out.dtype == x.dtype and (out - exact).abs().max() < 0.2


class OneNumber:
    """A field whose values would broadcast."""

    def __init__(self, kind: str) -> None:
        self.predicts = kind

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return x[:, :1]


@pytest.mark.parametrize("kind", [*KINDS, "mean_velocity"])
def test_values_of_another_shape_and_states_of_integers(kind: str) -> None:
    path, x, half = Linear(), state(4), time(0.5)
    with pytest.raises(ValueError, match=r"the field returned \(4, 1\) for x of \(4, 3\)"):
        predict(OneNumber(kind), x, half)
    for other in {"clean", "noise"} - {kind}:
        with pytest.raises(ValueError, match="the field returned"):
            convert(OneNumber(kind), other, path)(x, half)
    with pytest.raises(TypeError, match="x must be floating, got torch.int64"):
        predict(OneNumber(kind), x.long(), half)


@pytest.mark.parametrize("path", [Linear(), VPCosine()], ids=name)
@pytest.mark.parametrize("end", [0.0, 1.0])
def test_a_velocity_fixes_both_ends_at_both_ends(path: AlphaSigmaPath, end: float) -> None:
    t, clean, noise = time(end), state(4), state(4, seed=2)
    scale, level = path.marginal(t)
    x = scale @ clean + level @ noise
    velocity = express("velocity", clean, noise, t, path)
    for given, exact in zip(ends("velocity", velocity, x, t, path), (clean, noise), strict=True):
        assert_close(given, exact, 1e-14)


@pytest.mark.parametrize("path", CLOSED, ids=name)
def test_the_data_end(path: AlphaSigmaPath) -> None:
    """At t = 0 every kind knows the clean end, x itself; a clean prediction is believed."""
    x, t = state(4), time(0.0)
    for kind in ("noise", "velocity", "score"):
        toy = VectorGaussian(path, MEAN, STD, kind)
        assert_close(convert(toy, "clean", path)(x, t), x, 1e-12)


@pytest.mark.parametrize("path", PATHS, ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trips(path: AlphaSigmaPath, kind: str) -> None:
    for t in (time(0.2), time(0.6), torch.tensor([0.1, 0.4, 0.5, 0.7]).double()):
        clean, noise = state(4), state(4, seed=2)
        scale, level = path.marginal(t)
        x = scale @ clean + level @ noise
        value = express(kind, clean, noise, t, path)
        for given, exact in zip(ends(kind, value, x, t, path), (clean, noise), strict=True):
            assert_close(given, exact, 1e-10)


def test_mean_velocity_is_asked_for_its_limit() -> None:
    path, x, t = Linear(), state(4), torch.tensor([0.2, 0.4, 0.6, 0.8]).double()
    toy = VectorGaussian(path, MEAN, STD, "mean_velocity")
    velocity = replace(toy, predicts="velocity")
    for cond in ({}, {"s": torch.zeros(())}):
        kind, value = predict(toy, x, t, **cond)
        assert kind == "velocity" and torch.equal(value, velocity(x, t))
    assert torch.equal(convert(toy, "velocity", path)(x, t), velocity(x, t))
    assert_close(convert(toy, "clean", path)(x, t), replace(toy, predicts="clean")(x, t), 1e-12)


def test_unknown_kinds_are_refused_by_name() -> None:
    path, x, t = Linear(), state(2), time(0.5)
    toy = VectorGaussian(path, MEAN, STD)
    for attempt in (
        lambda: convert(toy, "drift", path),
        lambda: convert(Prediction("drift"), "clean", path),
        lambda: predict(Prediction("drift"), x, t),
        lambda: ends("drift", x, x, t, path),
        lambda: express("drift", x, x, t, path),
    ):
        with pytest.raises(ValueError, match="clean, noise, velocity, score, got 'drift'"):
            attempt()
    assert convert(toy, "clean", path) is toy


# Precision: what comes in decides what goes out


@pytest.mark.parametrize("path", PATHS, ids=name)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("times", ["scalar", "rows", "rows of float64"])
def test_dtypes(path: AlphaSigmaPath, dtype: torch.dtype, times: str) -> None:
    x = state(4).to(dtype)
    t, s = time(0.7), time(0.2)
    if times != "scalar":
        row_dtype = dtype if times == "rows" else torch.float64
        t, s = t.to(row_dtype).expand(4), s.to(row_dtype).expand(4)
    draw = path.sample(x, t, NOISE)
    results = [
        path.source(x, NOISE),
        path.posterior(x, x, t, s, NOISE),
        path.transition(x, s, t, NOISE),
        draw.x,
        draw.x1,
        path.sample(x, t, NOISE, x1=x).x,
        *(draw.target(kind) for kind in KINDS),
        *(end for kind in KINDS for end in ends(kind, x, x, t, path)),
        *(express(kind, x, x, t, path) for kind in KINDS),
        *(scale @ x for scale in (*path.marginal(t), *path.rates(t), *path.sde(t))),
        *(scale.solve(x) for scale in path.marginal(t)),
        *(scale.logdet(x) for scale in path.marginal(t)),
    ]
    assert {result.dtype for result in results} == {dtype}
    assert all(result.isfinite().all() for result in results)


# The block path


BLOCK = BlockGaussian()
FIELD = BlockField(
    BLOCK, torch.tensor([1.0, 0.2]).double(), torch.tensor([[0.5, 0.1], [0.1, 0.3]]).double()
)
EYE = torch.eye(2, dtype=torch.float64)[None]  # a batch of one state, whose columns probe a matrix
BLOCK_TIMES = torch.tensor([0.01, 0.1, 0.4, 0.7, 1.0]).double()


def test_block_coefficients() -> None:
    t, h = BLOCK_TIMES[:-1], 1e-6
    (scale, level), (scale_rate, level_rate) = BLOCK.marginal(t), BLOCK.rates(t)
    after, before = BLOCK.marginal(t + h)[0].matrix, BLOCK.marginal(t - h)[0].matrix
    assert_close(scale_rate.matrix, (after - before) / (2 * h), 1e-7)
    growth = (BLOCK.cov(t + h) - BLOCK.cov(t - h)) / (2 * h)
    both = level_rate.matrix @ level.matrix.mT
    assert_close(both + both.mT, growth, 1e-6)
    assert_close(level.matrix @ level.matrix.mT, BLOCK.cov(t), 1e-12)
    drift, diffusion = BLOCK.sde(t)
    flow = drift.matrix @ BLOCK.cov(t)
    assert_close(growth, flow + flow.mT + diffusion.matrix @ diffusion.matrix.mT, 1e-6)
    stationary = torch.diag(torch.tensor([1, BLOCK.mass])).double()
    exact = stationary - scale.matrix @ stationary @ scale.matrix.mT
    assert_close(BLOCK.cov(t), exact, 1e-12)


@pytest.mark.parametrize(("t", "s"), [(1.0, 0.4), (0.7, 0.1), (0.5, 0.5), (0.5, 0.0), (0.0, 0.0)])
def test_block_posterior_and_transition_compose(t: float, s: float) -> None:
    t_, s_ = time(t), time(s)
    zero = torch.zeros_like(EYE)
    flow, flow_s, cov, cov_s = (
        BLOCK.flow_matrix(t_),
        BLOCK.flow_matrix(s_),
        BLOCK.cov(t_),
        BLOCK.cov(s_),
    )

    class Basis(Constant):
        def normal(self, like: Tensor, tag: str = "") -> Tensor:
            return EYE

    on_x = BLOCK.posterior(EYE, zero, t_, s_, Constant(0.0))[0]
    on_clean = BLOCK.posterior(zero, EYE, t_, s_, Constant(0.0))[0]
    spread = BLOCK.posterior(zero, zero, t_, s_, Basis(0.0))[0]
    step = BLOCK.transition(EYE, s_, t_, Constant(0.0))[0]
    step_spread = BLOCK.transition(zero, s_, t_, Basis(0.0))[0]
    assert_close(step @ flow_s, flow, 1e-12)
    assert_close(step @ cov_s @ step.mT + step_spread @ step_spread.mT, cov, 1e-12)
    assert_close(on_x @ flow + on_clean, flow_s, 1e-12)
    assert_close(on_x @ cov @ on_x.mT + spread @ spread.mT, cov_s, 1e-12)
    assert_close(on_x @ cov, cov_s @ step.mT, 1e-12)


@pytest.mark.parametrize(("source", "kind"), product(("clean", "noise", "score"), KINDS))
def test_block_conversions_agree_with_closed_forms(source: str, kind: str) -> None:
    x = KeyedNoise(5).normal(torch.empty(len(BLOCK_TIMES), 2, 3, dtype=torch.float64))
    field = convert(replace(FIELD, predicts=source), kind, BLOCK)
    exact = replace(FIELD, predicts=kind)
    assert_close(field(x, BLOCK_TIMES), exact(x, BLOCK_TIMES), 1e-7)
    for i, t in enumerate(BLOCK_TIMES):
        assert_close(field(x[i : i + 1], t), exact(x, BLOCK_TIMES)[i : i + 1], 1e-7)
    for end in (time(0.0), time(1.0)):
        assert field(x, end).isfinite().all()
        assert field(x.float(), end).dtype == torch.float32


def test_block_velocity_does_not_determine_the_ends() -> None:
    x = torch.zeros(2, 2, 3, dtype=torch.float64)
    for kind in ("clean", "noise", "score"):
        field = convert(replace(FIELD, predicts="velocity"), kind, BLOCK)
        with pytest.raises(ValueError, match="does not determine the clean end on BlockGaussian"):
            field(x, time(0.5))
    # The reason: [[M, L], [M', L']] is singular, as noise enters the momentum alone.
    t = time(0.5)
    rows = [torch.cat([a.matrix, b.matrix], 1) for a, b in (BLOCK.marginal(t), BLOCK.rates(t))]
    assert torch.linalg.matrix_rank(torch.cat(rows), rtol=1e-10) == 3


def test_block_targets() -> None:
    x0 = KeyedNoise(5).normal(torch.empty(len(BLOCK_TIMES), 2, 3, dtype=torch.float64))
    draw = BLOCK.sample(x0, BLOCK_TIMES, NOISE)
    for kind in ("clean", "noise", "score"):
        clean, noise = ends(kind, draw.target(kind), draw.x, BLOCK_TIMES, BLOCK)
        assert_close(clean, x0, 1e-9)
        assert_close(noise, draw.target("noise"), 1e-7)
        for other in KINDS:
            assert_close(express(other, clean, noise, BLOCK_TIMES, BLOCK), draw.target(other), 1e-4)
    assert isinstance(BLOCK.marginal(BLOCK_TIMES)[0], Block)
