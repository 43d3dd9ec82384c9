"""Samplers with Wasserstein bounds, against closed forms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import expm, sqrtm
from torch import Tensor, nn

from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.losses import NetworkField
from fluvial.core.gaussian.paths import VE, AlphaSigmaPath, Linear, VPCosine, VPLinear, numbers
from fluvial.core.gaussian.schedule import log_snr_grid, reschedule, time_of
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import simulate
from fluvial.core.steering.guidance import ClassifierFree
from fluvial.core.time import grid_pairs, uniform_grid
from fluvial.dynamics.wasserstein_samplers import (
    SCHEMES,
    SharedBrownian,
    WassersteinSampler,
    clock_grid,
    gaussian_moments,
    guaranteed_steps,
    w2_bound,
)
from fluvial.dynamics.wasserstein_samplers.clock import clock_of
from fluvial.dynamics.wasserstein_samplers.sampler import phi1, phi2, root_series
from fluvial.dynamics.wasserstein_samplers.theory import PROVEN, gaussian_step
from fluvial.networks import MLP, DiT, UNet

from ..core.toys import Constant, Counting, Projection, VectorGaussian, assert_law

T = 8.0
PAPER = VPLinear(T, T)
NOISE = KeyedNoise(3)
MIDPOINTS = ("rem", "rei")
LONG: dict[str, Any] = {"horizon": 4.0, "steps": 40}
JVP: Any = torch.func.jvp


def float64(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def name(path: Any) -> str:
    return type(path).__name__


def clocks(path: AlphaSigmaPath, *s: float) -> Tensor:
    """Pairs of the times with these clocks."""
    return grid_pairs(time_of(path, torch.expm1(float64(*s)).sqrt()))


def state(rows: int = 4, dim: int = 3) -> Tensor:
    return NOISE.normal(torch.empty(rows, dim, dtype=torch.float64))


def gaussian(mean: float = 0.0, var: float = 0.25, path: AlphaSigmaPath = PAPER) -> VectorGaussian:
    return VectorGaussian(path, float64(mean), float64(math.sqrt(var)), "noise")


@dataclass(frozen=True)
class Mixture:
    """The score of sum_i w_i N(m_i, v I), m (K, d), along a path of scalars."""

    path: AlphaSigmaPath
    means: Tensor
    var: float
    log_weights: Tensor
    predicts: str = "score"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        alpha: Any
        sigma: Any
        if t.ndim:
            alpha, sigma = self.path.alpha(t)[:, None], self.path.sigma(t)[:, None]
        else:
            alpha, sigma = numbers(self.path, float(t))
        var = alpha * alpha * self.var + sigma * sigma
        ways = self.means * (alpha[..., None] if t.ndim else alpha) - x[:, None]
        weights = (self.log_weights - ways.square().sum(-1) / (2 * var)).softmax(1)
        return (weights[:, :, None] * ways).sum(1) / var


@dataclass(frozen=True)
class Bimodal:
    """The score of data N(-1/2, 0.36) and N(1/2, 0.36) in equal parts, in few operations."""

    path: AlphaSigmaPath
    predicts: str = "score"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        alpha, sigma = (f(t) for f in (self.path.alpha, self.path.sigma))
        a, var = 0.5 * alpha, 0.36 * alpha * alpha + sigma * sigma
        if t.ndim == 0:
            a, var = float(a), float(var)
        else:
            a, var = a[:, None], var[:, None]
        return torch.tanh(x * (a / var)) * (a / var) - x * (1 / var)


@dataclass(frozen=True)
class Draws:
    """Normal numbers by tag, and one uniform number."""

    normals: Mapping[str, float]
    u: float = 0.5

    def normal(self, like: Tensor, tag: str = "") -> Tensor:
        return torch.full_like(like, self.normals.get(tag, 0.0))

    def uniform(self, like: Tensor, tag: str = "") -> Tensor:
        return torch.full_like(like, self.u)

    def at(self, step: int) -> Draws:
        return self

    def rows(self, ids: Tensor) -> Draws:
        return self


def step_of(
    sampler: WassersteinSampler, toy: VectorGaussian, s: float, h: float, u: float = 0.5
) -> tuple[float, float, float, float]:
    """(A, b, C, C') of a step, x -> A x + b + C z + C' z', z' the second draw of a midpoint."""
    pairs = clocks(toy.path, s, s - h)

    def step(x: float, z: float, rest: float) -> float:
        draws: Any = Draws({"brownian": z, "rest": rest}, u)
        return simulate(float64([x]), pairs, sampler, toy.path, toy, draws).item()  # type: ignore

    b = step(0, 0, 0)
    return step(1, 0, 0) - b, b, step(0, 1, 0) - b, step(0, 0, 1) - b


# The brief's numbers


@pytest.mark.parametrize(
    ("scheme", "gain", "spread"),
    [
        ("em", 0.8665480973, 0.1),
        ("ei", 0.8631554927, 0.1051709181),
        ("so", 0.8677442991, 0.0877669283),
    ],
)
def test_one_step_on_a_gaussian(scheme: Any, gain: float, spread: float) -> None:
    a, _, c, _ = step_of(WassersteinSampler(scheme), gaussian(), 0.5, 0.1)
    assert a == pytest.approx(gain, abs=1e-9)
    assert c * c == pytest.approx(spread, abs=1e-9)


def test_on_unit_variance_so_is_the_exact_transition() -> None:
    toy, h = gaussian(var=1.0), 0.1
    for hessian in ("dense", "jvp"):
        a, b, c, _ = step_of(WassersteinSampler("so", hessian=hessian), toy, 0.5, h)
        assert a == pytest.approx(math.exp(-h / 2), abs=1e-12)
        assert c * c == pytest.approx(1 - math.exp(-h), abs=1e-12)
        assert b == 0
        assert a * a + c * c == pytest.approx(1, abs=1e-12)
    for scheme, variance in (
        ("em", 1 / (1 - h / 4)),
        ("ei", math.expm1(h) / (1 - (2 - math.exp(h / 2)) ** 2)),
    ):
        a, _, c, _ = step_of(WassersteinSampler(scheme), toy, 0.5, h)
        assert c * c / (1 - a * a) == pytest.approx(variance, abs=1e-10)
    assert 1 / (1 - h / 4) == pytest.approx(1.0256410, abs=1e-7)
    assert math.expm1(h) / (1 - (2 - math.exp(h / 2)) ** 2) == pytest.approx(1.0526200, abs=1e-7)


@pytest.mark.parametrize(
    ("scheme", "variance"),
    [
        ("em", 0.30250850),
        ("ei", 0.30744665),
        ("rem", 0.24897324),
        ("rei", 0.24940108),
        ("so", 0.25656123),
    ],
)
def test_final_variance(scheme: Any, variance: float) -> None:
    assert gaussian_moments(scheme, 0.0, 0.25, **LONG)[1] == pytest.approx(variance, abs=1e-7)


@pytest.mark.parametrize(("u", "rho"), [(0.25, 0.5093639565), (0.5, 0.7158892348)])
def test_correlation_of_the_two_integrals(u: float, rho: float) -> None:
    """Of whole and part, of which the step sees z and z' over disjoint parts of the interval."""
    h = 0.1
    linear = gaussian(var=1e12)  # no score: the step's noise is the integral over the whole step
    _, _, c, c_rest = step_of(WassersteinSampler("rei"), linear, 4.0, h, u)
    assert c / math.hypot(c, c_rest) == pytest.approx(rho, abs=1e-9)
    assert c * c + c_rest * c_rest == pytest.approx(math.expm1(h), abs=1e-9)


@pytest.mark.parametrize("u", [0.0, 1e-12, 1e-6, 0.4, 1.0 - 2**-24])
def test_midpoints_at_the_ends_of_the_step(u: float) -> None:
    """rho as printed is 0 / 0 at U = 0; the step has no such place."""
    h = 0.1
    _, _, c, c_rest = step_of(WassersteinSampler("rei"), gaussian(var=1e12), 4.0, h, u)
    part, whole = math.expm1(h * u), math.expm1(h)
    rho = -math.exp(h * (1 + u) / 2) * math.expm1(-h * u) / math.sqrt(part * whole) if u else 0.0
    assert c / math.hypot(c, c_rest) == pytest.approx(rho, abs=1e-9)
    assert rho == pytest.approx({0.0: 0.0, 1.0 - 2**-24: 1.0}.get(u, rho), abs=1e-7)
    _, _, c, c_rest = step_of(WassersteinSampler("rem"), gaussian(var=1e12), 4.0, h, u)
    # x_m / 2 carries the part's noise once more
    exact = h + h * h * u + (h / 2) ** 2 * h * u
    assert c * c + c_rest * c_rest == pytest.approx(exact, abs=1e-9)


def test_coefficients_of_the_root() -> None:
    printed = (1, 1 / 2, 5 / 24, 1 / 16, 79 / 5760, 3 / 1280, 71 / 193536)
    assert root_series(6) == pytest.approx(printed, abs=1e-16)
    z = float64(0.4)
    assert np.polyval(root_series(30)[::-1], 0.4) == pytest.approx(phi1(2 * z).sqrt().item())


def test_phi_functions() -> None:
    z = float64(0.0, 1e-12, -1e-12, 1e-300)
    torch.testing.assert_close(phi1(z), torch.ones(4).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(phi2(z), torch.full((4,), 0.5).double(), rtol=0, atol=1e-10)
    # phi_1 = 1 + z phi_2, and phi_2 is continuous where the series ends
    z = torch.linspace(-40, 20, 997, dtype=torch.float64)
    torch.testing.assert_close(phi1(z), 1 + z * phi2(z), rtol=1e-12, atol=1e-13)
    edge = phi2(float64(-1 - 1e-9, -1 + 1e-9, 1 - 1e-9, 1 + 1e-9))
    assert abs(edge.diff()[::2]).max() < 1e-9
    assert phi1(z.float()).dtype == phi2(z.float()).dtype == torch.float32


# Second order: the identity, and the step it leads to


MIX = Mixture(
    PAPER,
    float64([0.0, 1.0], [-1.0, 0.3], [0.8, -0.9]),
    0.3,
    float64(0.5, 0.2, 0.3).log(),
)


def log_density(y: Tensor, s: Tensor) -> Tensor:
    alpha = torch.exp(-s / 2)
    var = alpha.square() * MIX.var - torch.expm1(-s)
    ways = (y - alpha * MIX.means).square().sum(-1)
    return torch.logsumexp(MIX.log_weights - ways / (2 * var) - var.log(), 0)


def test_drift_in_time_follows_from_fokker_planck() -> None:
    """M = grad(Laplacian log p) / 2 - d score / ds = -score / 2 - H g, and L g + M = y / 4."""
    y, s = float64(0.3, -0.4), torch.tensor(0.7, dtype=torch.float64)
    grad, hessian = torch.func.grad, torch.func.hessian
    score = grad(log_density)(y, s)
    H = hessian(log_density)(y, s)
    laplacian = grad(lambda y: hessian(log_density)(y, s).trace())(y)
    rate = JVP(lambda s: grad(log_density)(y, s), (s,), (torch.ones_like(s),))[1]
    g = y / 2 + score
    M = -score / 2 - H @ g
    torch.testing.assert_close(M, laplacian / 2 - rate, rtol=0, atol=1e-10)
    L = torch.eye(2).double() / 2 + H
    torch.testing.assert_close(L @ g + M, y / 4, rtol=0, atol=1e-10)
    torch.testing.assert_close(MIX(y[None], s / T)[0], score, rtol=0, atol=1e-12)


@pytest.mark.parametrize("path", [PAPER, VPLinear(), Linear()], ids=name)
def test_so_is_the_published_formula(path: AlphaSigmaPath) -> None:
    """With matrix functions by scipy, g, M and all."""
    s, h = torch.tensor(0.7, dtype=torch.float64), 0.15
    pairs = clocks(path, 0.7, 0.7 - h)
    y, z = float64(0.3, -0.4), 0.6
    score = torch.func.grad(log_density)(y, s).numpy()
    H = torch.func.hessian(log_density)(y, s).numpy()
    L, g, one = np.eye(2) / 2 + H, y.numpy() / 2 + score, np.eye(2)
    M = -score / 2 - H @ g
    whole = expm(h * L)
    inverse = np.linalg.inv(L)
    exact = y.numpy() + inverse @ (whole - one) @ g
    exact = exact + inverse @ inverse @ (whole - one - h * L) @ M
    exact = exact + sqrtm(inverse @ (whole @ whole - one) / 2).real @ np.full(2, z)
    toy = replace(MIX, path=path)
    scales = [np.hypot(*numbers(path, float(t))) for t in pairs[0]]
    start = y[None] * scales[0]
    for kind in ("score", "noise", "clean", "velocity"):
        out = simulate(
            start, pairs, WassersteinSampler("so"), path, convert(toy, kind, path), Constant(z)
        )
        np.testing.assert_allclose(out[0] / scales[1], exact, rtol=0, atol=1e-10)
    cheap = y.numpy() * (1 + h * h / 8) + h * g + math.sqrt(h) * (one + h * L / 2) @ np.full(2, z)
    out = simulate(start, pairs, WassersteinSampler("so-jvp"), path, toy, Constant(z))
    np.testing.assert_allclose(out[0] / scales[1], cheap, rtol=0, atol=1e-12)


@dataclass(frozen=True)
class LinearScore:
    """The score H x at every time."""

    H: Tensor
    predicts: str = "score"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return x @ self.H.T


def test_series_and_eigenvalues_agree() -> None:
    h, dim = 0.5, 5
    drawn = NOISE.normal(torch.empty(dim, dim, dtype=torch.float64), "matrix")
    symmetric = drawn + drawn.T
    size = torch.linalg.matrix_norm(symmetric, 2)
    pairs, x = clocks(PAPER, 1.0, 1.0 - h), state(6, dim)

    def difference(norm: float, order: int) -> float:
        L = symmetric * (norm / (h * size))
        toy = LinearScore(L - torch.eye(dim).double() / 2)
        dense, series = (
            simulate(x, pairs, WassersteinSampler("so", **how), PAPER, toy, NOISE)
            for how in ({"hessian": "dense"}, {"hessian": "jvp", "order": order})
        )
        return float((dense - series).abs().max())

    assert difference(0.3, 6) < 2e-6
    assert 1e-5 < difference(1.0, 6) < 5e-4  # what truncation leaves
    assert difference(1.0, 20) < 1e-12


def test_an_event_beyond_200_numbers_takes_the_series() -> None:
    assert WassersteinSampler("so").calls(200) == (1, 200)
    assert WassersteinSampler("so").calls(201) == (0, 6)
    assert WassersteinSampler("so-jvp").calls(2) == (0, 1)
    assert WassersteinSampler("so", hessian="jvp", order=3).calls(2) == (0, 3)
    assert [WassersteinSampler(scheme).calls(2)[0] for scheme in ("em", "ei", "rem", "rei")] == [
        1,
        1,
        2,
        2,
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_field_is_asked_as_often_as_said(scheme: Any) -> None:
    for hessian in ("dense", "jvp"):
        toy, sampler = Counting(gaussian()), WassersteinSampler(scheme, hessian=hessian)
        simulate(state(4, 1), clocks(PAPER, 1.0, 0.9), sampler, PAPER, toy, NOISE)
        once, products = sampler.calls(1)
        assert len(toy.calls) == once + products


# Moments: the recursion is that of the sampler


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_the_affine_map_of_the_recursion(scheme: Any) -> None:
    nodes = np.array([0.03, 0.5, 0.97]) if scheme in MIDPOINTS else np.array([0.5])
    for mean, var, s, h in ((0.7, 0.25, 0.5, 0.1), (-1.0, 2.0, 0.3, 0.3), (0.2, 1.0, 3.0, 0.05)):
        gain, shift, spread = gaussian_step(scheme, mean, var, s, h, nodes)
        for k, u in enumerate(nodes):
            a, b, c, c_rest = step_of(WassersteinSampler(scheme), gaussian(mean, var), s, h, u)
            assert (a, b) == pytest.approx((gain[k], shift[k]), abs=1e-11)
            assert c * c + c_rest * c_rest == pytest.approx(spread[k], abs=1e-11)


def test_midpoints_are_better_in_law_than_along_the_path() -> None:
    """On N(1, 1/4) with T = 8 and 160 steps: errors of (mean, standard deviation)."""
    measured = {}
    for scheme in SCHEMES:
        mean, var = gaussian_moments(scheme, 1.0, 0.25, horizon=8.0, steps=160)
        measured[scheme] = math.hypot(mean - 1, math.sqrt(var) - 0.5)
    assert measured["rem"] == pytest.approx(3.7e-4, rel=0.02)
    assert measured["so"] == pytest.approx(1.8e-3, rel=0.03)
    assert measured["em"] == pytest.approx(2.5e-2, rel=0.03)


@pytest.mark.parametrize(
    ("scheme", "order"), [("em", 1), ("ei", 1), ("rem", 2), ("rei", 2), ("so", 2), ("so-jvp", 2)]
)
def test_order_in_law(scheme: Any, order: float) -> None:
    """Of the variance; the start, N(0, 1 - e^-T), is wrong by e^-T."""
    errors = [
        abs(gaussian_moments(scheme, 0.0, 0.25, horizon=16.0, steps=steps)[1] - 0.25)
        for steps in (800, 1600)
    ]
    assert math.log2(errors[0] / errors[1]) > order - 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_samples_have_the_moments_of_the_recursion(scheme: Any) -> None:
    mean, var, path = 0.7, 0.25, VPLinear(0.1, 7.9)
    x = WassersteinSampler(scheme).sample(
        gaussian(mean, var, path),
        4000,
        path=path,
        shape=(2,),
        noise=NOISE,
        steps=12,
        dtype=torch.float64,
        batch_size=4000,
    )
    m, v = gaussian_moments(scheme, mean, var, horizon=4.0, steps=12)
    assert_law(x, float64(m), float64(math.sqrt(v)))


# Time and paths


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_path_of_scalars_is_the_same_diffusion(scheme: Any) -> None:
    """In its clock, and divided by sqrt(alpha^2 + sigma^2): steps of any schedule are those of the
    path of constant rate, to rounding."""
    y = state(5, 2)
    grid = (2.0, 1.6, 0.9, 0.2, 0.0)
    outs = []
    for path in (PAPER, VPLinear(0.1, 20.0), VPCosine(), Linear(), VE(0.1, 30.0)):
        toy = replace(MIX, path=path)
        start = y * math.hypot(*numbers(path, float(clocks(path, 2.0, 1.0)[0, 0])))
        x = simulate(start, clocks(path, *grid), WassersteinSampler(scheme), path, toy, NOISE)
        outs.append(x)  # at t = 0 the scale is 1
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-8, atol=1e-8)


def test_the_clock_is_the_integral_of_beta() -> None:
    path = VPLinear(0.1, 20.0)
    t = 0.37
    assert clock_of(*numbers(path, t)) == pytest.approx(0.1 * t + 19.9 * t * t / 2, rel=1e-12)
    assert clock_of(*numbers(VPLinear(5.0, 5.0), t)) == pytest.approx(5 * t, rel=1e-12)
    assert clock_of(*numbers(Linear(), 1.0)) == math.inf
    grid = clock_grid(VPLinear(5.0, 5.0), 10)
    torch.testing.assert_close(grid, uniform_grid(10), rtol=0, atol=1e-12)
    assert (grid[0, 0], grid[-1, 1]) == (1, 0)
    grid = clock_grid(path, 7, horizon=3.0)
    s = float64(*[clock_of(*numbers(path, float(t))) for t in (*grid[:, 0], grid[-1, 1])])
    torch.testing.assert_close(s, torch.linspace(3, 0, 8, dtype=torch.float64), rtol=0, atol=1e-12)


def test_em_is_euler_maruyama_on_a_path_of_constant_rate() -> None:
    x, toy = state(5, 2), MIX
    ours, theirs = (
        simulate(x, uniform_grid(9, 1.0, 0.1), sampler, PAPER, toy, Constant(0.3))
        for sampler in (WassersteinSampler("em"), EulerMaruyama())
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    # on others, once the field has been brought to that path
    path = VPLinear(0.1, 2 * T - 0.1)
    field = reschedule(replace(toy, path=path), path, PAPER)
    ours = simulate(
        x,
        clock_grid(path, 9),
        WassersteinSampler("em"),
        path,
        replace(toy, path=path),
        Constant(0.3),
    )
    theirs = simulate(x, uniform_grid(9), EulerMaruyama(), PAPER, field, Constant(0.3))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_from_pure_noise_the_first_step_redraws(scheme: Any) -> None:
    toy = replace(gaussian(0.5, 0.25, Linear()), predicts="velocity")
    out = simulate(
        float64([3.0]),
        grid_pairs([1.0, 0.75]),
        WassersteinSampler(scheme),
        Linear(),
        toy,
        Constant(2),
    )
    assert out.item() == pytest.approx(0.25 * 0.5 + 0.75 * 2)
    x = WassersteinSampler(scheme).sample(
        toy, 50, path=Linear(), shape=(1,), noise=NOISE, pairs=uniform_grid(8)
    )
    assert x.isfinite().all()


def test_rising_pairs_are_the_paths_transition_and_equal_times_do_nothing() -> None:
    x, toy = state(), gaussian()
    for pair in ([0.2, 0.6], [0.0, 0.6]):
        out = simulate(x, grid_pairs(pair), WassersteinSampler("so"), PAPER, toy, NOISE)
        expected = PAPER.transition(x, float64(pair[0])[0], float64(pair[1])[0], NOISE.at(0))
        assert torch.equal(out, expected)
    assert torch.equal(
        simulate(x, grid_pairs([0.5, 0.5]), WassersteinSampler("rem"), PAPER, toy, NOISE), x
    )


# One Brownian motion


def test_strong_orders() -> None:
    """The errors of 1,000 paths beside a reference on the same motion; published are 2,000."""
    path = VPLinear(6.0, 6.0)
    toy = Bimodal(path)
    like = torch.empty(1000, 1, dtype=torch.float64)
    x = math.sqrt(-math.expm1(-6)) * NOISE.normal(like)
    brownian = SharedBrownian(KeyedNoise(0), like, path, clock_grid(path, 960))

    # the reference: the scheme of order 1.5 on every cell, with the derivative in closed form
    h, y = 6 / 960, x.clone()
    for k in range(960):
        s = 6 - k * h
        alpha, var = math.exp(-s / 2) / 2, 0.36 * math.exp(-s) - math.expm1(-s)
        lean = torch.tanh(y * (alpha / var))
        score = (alpha * lean - y) / var
        L = 0.5 + ((alpha * alpha / var) * (1 - lean * lean) - 1) / var
        dW = brownian.over(s, s - h, like, NOISE).integral(0.0)
        y = (1 + h / 2 + h * h / 8) * y + h * score + (1 + h / 2 * L) * dW

    @torch.no_grad()
    def error(scheme: Any, steps: int) -> float:
        sampler = WassersteinSampler(scheme, brownian=brownian)
        out: Any = simulate(x, clock_grid(path, steps), sampler, path, toy, NOISE)
        return float((out - y).square().mean().sqrt())

    published = {
        "em": (7.2e-2, 3.6e-2, 1.7e-2, 8.9e-3),
        "ei": (1.1e-1, None, None, 1.3e-2),
        "rem": (6.4e-2, None, None, 7.0e-3),
        "rei": (1.06e-1, None, None, 1.1e-2),
        "so": (1.0e-2, 3.9e-3, 1.3e-3),  # 4.6e-4 at 240 steps
    }
    first = []
    for scheme, values in published.items():
        counts = (30, 60, 120, 240)[: len(values)]
        errors = [error(scheme, n) for n in counts]
        for got, value in zip(errors, values, strict=True):
            assert value is None or got == pytest.approx(value, rel=0.2), (scheme, errors)
        slope = -np.polyfit(np.log(counts), np.log(errors), 1)[0]
        low, high = (1.3, 2.0) if scheme == "so" else (0.85, 1.2)
        assert low < slope < high, (scheme, slope)
        if scheme != "so":
            first.append(errors[2])
        else:
            assert 5 < min(first) / errors[2] < max(first) / errors[2] < 25
    assert max(first) < 2 * min(first)


def test_cells_add_up_and_finer_cells_are_the_same_motion() -> None:
    like = torch.empty(3, 2, dtype=torch.float64)
    path = VPLinear(2.0, 2.0)
    coarse, fine = (
        SharedBrownian(KeyedNoise(7), like, path, clock_grid(path, cells)) for cells in (6, 12)
    )
    for start, end in ((2.0, 0.0), (2.0, 5 / 3), (1.0, 1 / 3)):
        whole = coarse.over(start, end, like, NOISE).integral(0.0)
        torch.testing.assert_close(
            whole, fine.over(start, end, like, NOISE).integral(0.0), rtol=0, atol=1e-12
        )
    parts = [fine.over(2 - k / 3, 2 - (k + 1) / 3, like, NOISE).integral(0.0) for k in range(6)]
    whole = fine.over(2.0, 0.0, like, NOISE).integral(0.0)
    torch.testing.assert_close(sum(parts), whole, rtol=0, atol=1e-12)


def test_integrals_over_cells_have_their_laws() -> None:
    """Of 20,000 rows; cells as of a grid that is uneven in the clock."""
    h, rate, u = 0.8, 0.5, 0.37
    path = VPLinear(0.1, 20.0)
    like = torch.empty(20_000, 1, dtype=torch.float64)
    pairs = torch.cat([clocks(path, 2.0, h), clocks(path, *np.linspace(h, 0, 41) ** 2 / h)])
    shared = SharedBrownian(KeyedNoise(7), like, path, pairs)
    motion = shared.over(h, 0.0, like, NOISE)
    part, whole = motion.split(rate, torch.full((len(like),), u, dtype=torch.float64))
    plain = motion.integral(0.0)
    assert_law(plain, torch.zeros(1).double(), float64(math.sqrt(h)))
    assert_law(whole, torch.zeros(1).double(), float64(math.sqrt(math.expm1(h))))
    assert_law(part, torch.zeros(1).double(), float64(math.sqrt(math.expm1(u * h))))
    # covariances: of the whole with the part, and with the plain increment
    assert_law(
        whole - math.exp((1 - u) * h / 2) * part,
        torch.zeros(1).double(),
        float64(math.sqrt(math.expm1((1 - u) * h))),
    )
    gap = math.expm1(h) - 4 * math.expm1(h / 2) + h  # the variance of whole - plain
    assert_law(whole - plain, torch.zeros(1).double(), float64(math.sqrt(gap)))
    # the series' moments add up to the integral
    series = sum(rate**k * motion.moment(k) for k in range(12))
    torch.testing.assert_close(series, whole, rtol=0, atol=1e-10)
    basis = torch.ones(len(like), 1, 1, dtype=torch.float64)
    modes = motion.modes(torch.full((len(like), 1), rate, dtype=torch.float64), basis)
    torch.testing.assert_close(modes, whole, rtol=0, atol=1e-10)


def test_errors_grow_as_the_root_of_the_dimension() -> None:
    path = VPLinear(4.0, 4.0)
    toy = gaussian(0.0, 0.25, path)
    like = torch.empty(400, 16, dtype=torch.float64)
    brownian = SharedBrownian(KeyedNoise(1), like, path, clock_grid(path, 32))
    x = NOISE.normal(like)

    def run(scheme: Any, steps: int) -> Tensor:
        sampler = WassersteinSampler(scheme, hessian="jvp", brownian=brownian)
        return simulate(x, clock_grid(path, steps), sampler, path, toy, NOISE)  # type: ignore

    reference = run("so-jvp", 32)
    for scheme in SCHEMES:
        squares = (run(scheme, 8) - reference).square()
        # a sum of 16 independent numbers against one of them, each a mean over 400 rows
        assert squares.sum(1).mean() / squares[:, 0].mean() == pytest.approx(16, rel=0.5)
        assert squares.mean() > 1e-5


def test_shared_motion_refuses_what_it_does_not_have() -> None:
    like = torch.empty(3, 2, dtype=torch.float64)
    pairs = clock_grid(PAPER, 10)
    shared = SharedBrownian(NOISE, like, PAPER, pairs)
    for x, grid, message in (
        (state(3, 2), clock_grid(PAPER, 20), "inside of a cell"),
        (state(3, 1), clock_grid(PAPER, 5), r"is for states \(3, 2\)"),
        (state(3, 2).float(), clock_grid(PAPER, 5), "float32"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(x, grid, WassersteinSampler(brownian=shared), PAPER, gaussian(), NOISE)
    with pytest.raises(ValueError, match="where alpha is 0"):
        SharedBrownian(NOISE, like, Linear(), uniform_grid(4))
    with pytest.raises(ValueError, match="must fall"):
        SharedBrownian(NOISE, like, PAPER, grid_pairs([0.2, 0.4]))


# Any field of ours


class Label(nn.Module):
    """A network with a condition a row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP(shape=(3,), width=8, depth=1, num_classes=2, seed=1).double()
        noise = KeyedNoise(5)
        for i, parameter in enumerate(self.inner.parameters()):
            parameter.data = 0.3 * noise.at(i).normal(parameter[None])[0]

    def forward(self, x: Tensor, t: Tensor, *, label: Tensor) -> Tensor:
        return self.inner(x, t, label=label)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_do_not_depend_on_their_batch(scheme: Any) -> None:
    options: dict[str, Any] = {
        "path": VPLinear(),
        "shape": (3,),
        "noise": NOISE,
        "steps": 6,
        "label": torch.arange(7) % 2,
        "dtype": torch.float64,
    }
    network = NetworkField(Label(), "noise")
    whole, parts, again = (
        WassersteinSampler(scheme).sample(network, 7, batch_size=size, **options)
        for size in (7, 3, 7)
    )
    assert torch.equal(whole, again)
    torch.testing.assert_close(whole, parts, rtol=1e-10, atol=1e-10)
    other = WassersteinSampler(scheme).sample(
        network, 7, **{**options, "label": torch.arange(7)[:] // 6}
    )
    assert not torch.allclose(whole, other)


def test_product_of_a_network_is_that_of_its_jacobian() -> None:
    """Of forward mode; the Jacobian is not symmetric, and its transpose gives something else."""
    network, path = Label(), VPLinear()
    label, x, z = torch.tensor([1]), state(1, 3), 0.7
    pairs = clocks(path, 1.0, 0.8)
    t = pairs[0, 0]
    alpha, sigma = numbers(path, float(t))

    def score(x: Tensor) -> Tensor:
        return -network(x[None], t[None], label=label)[0] / sigma

    H = torch.autograd.functional.jacobian(score, x[0])
    assert (H - H.T).abs().max() > 1e-3
    h = 0.2
    L = H + torch.eye(3).double() / 2
    noise = torch.full((3,), z, dtype=torch.float64)
    exact = (1 + h / 2 + h * h / 8) * x[0] + h * score(x[0])
    exact = exact + math.sqrt(h) * (noise + h / 2 * L @ noise)
    out = simulate(
        x,
        pairs,
        WassersteinSampler("so-jvp"),
        path,
        NetworkField(network, "noise"),
        Constant(z),
        label=label,
    )
    torch.testing.assert_close(out[0], exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["U-Net", "DiT"])
def test_image_networks(kind: str, scheme: Any) -> None:
    network: nn.Module = (
        UNet(size=8, channels=1, width=8, multipliers=(1, 2), blocks=1, attention=(4,), heads=2)
        if kind == "U-Net"
        else DiT(size=8, channels=1, patch=4, width=16, depth=1, heads=2)
    )
    noise = KeyedNoise(2)
    for i, parameter in enumerate(network.parameters()):
        parameter.data += 0.05 * noise.at(i).normal(parameter[None])[0]
    x = WassersteinSampler(scheme, hessian="jvp", order=2).sample(
        NetworkField(network, "noise"),
        2,
        path=VPLinear(),
        shape=(1, 8, 8),
        noise=NOISE,
        steps=2,
        horizon=3.0,
    )
    assert x.shape == (2, 1, 8, 8) and x.dtype == torch.float32
    assert x.isfinite().all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_steering_is_seen_at_every_evaluation(scheme: Any) -> None:
    sampler = WassersteinSampler(scheme, t_min=0.02)  # the plane makes scores steep
    plane = Projection(float64(1.0, 1.0), 0.6)
    toy = replace(MIX, path=PAPER)
    # the clean prediction is corrected: a deterministic pull towards the plane
    x = sampler.sample(
        toy, 200, path=PAPER, shape=(2,), noise=NOISE, steps=40, steer=plane, dtype=torch.float64
    )
    torch.testing.assert_close(
        x.sum(1), torch.full((200,), 0.6, dtype=torch.float64), rtol=0, atol=1e-9
    )
    loose = replace_end(plane)
    x = sampler.sample(
        toy, 200, path=PAPER, shape=(2,), noise=NOISE, steps=40, steer=loose, dtype=torch.float64
    )
    spread = (x.sum(1) - 0.6).std()
    free = sampler.sample(
        toy, 200, path=PAPER, shape=(2,), noise=NOISE, steps=40, dtype=torch.float64
    )
    assert spread < 0.8 * free.sum(1).std()


def replace_end(plane: Projection) -> Projection:
    """The same without the projection at the end."""

    class Loose(Projection):
        def end(self, x0: Any, aim: Any) -> Any:
            return x0

    return Loose(plane.normal, plane.value)


def test_guidance_takes_times_of_rows() -> None:
    @dataclass(frozen=True)
    class Shifted:
        predicts: str = "noise"

        def __call__(self, x: Tensor, t: Tensor, *, label: Any, **cond: Any) -> Tensor:
            return gaussian(0.0 if label is None else 1.0)(x, t)

    steer = ClassifierFree(scale=1.0, null={"label": None})
    for scheme in MIDPOINTS:
        out = WassersteinSampler(scheme).sample(
            Shifted(), 500, path=PAPER, shape=(1,), noise=NOISE, steps=60, steer=steer, label=1.0
        )
        assert abs(out.mean() - 1) < 0.15


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dtype_in_is_dtype_out(scheme: Any) -> None:
    kept = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = WassersteinSampler(scheme).sample(
            gaussian(), 6, path=PAPER, shape=(2,), noise=NOISE, steps=24, dtype=dtype
        )
        assert x.dtype == dtype
        kept[dtype] = x.double()
    torch.testing.assert_close(kept[torch.float32], kept[torch.float64], rtol=1e-4, atol=1e-4)
    assert (kept[torch.bfloat16] - kept[torch.float64]).abs().max() < 0.3


def test_a_grid_that_is_fine_where_the_score_is_steep() -> None:
    """Pitfall 2: near the data h times the curvature must stay below 1."""
    toy = gaussian(0.0, 0.01)
    spreads = {
        grid: float(
            WassersteinSampler("em")
            .sample(toy, 2000, path=PAPER, shape=(1,), noise=NOISE, pairs=pairs)
            .std()
        )
        for grid, pairs in (
            ("even", clock_grid(PAPER, 40)),
            ("fine", log_snr_grid(PAPER, 40, level_min=0.02)),
        )
    }
    assert abs(spreads["fine"] - 0.1) < 0.03 < 0.2 < spreads["even"]


@dataclass
class Times:
    """A field that notes the times it is asked at."""

    predicts: str = "noise"
    seen: list[Tensor] = field(default_factory=list)

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        self.seen.append(t.double().min())
        return torch.zeros_like(x)


def test_midpoints_stay_above_the_smallest_time() -> None:
    for t_min in (0.0, 0.05):
        times = Times()
        WassersteinSampler("rem", t_min=t_min).sample(
            times, 300, path=PAPER, shape=(1,), noise=NOISE, steps=10
        )
        lowest = float(torch.stack(times.seen).min())
        assert lowest == pytest.approx(0.05) if t_min else 0 < lowest < 0.01


def test_start_and_end() -> None:
    times = Times()
    x1 = state(4, 2)
    x = WassersteinSampler("em").sample(
        times, 4, path=PAPER, shape=(2,), noise=Constant(0.0), steps=8, x1=x1
    )
    torch.testing.assert_close(x, x1 * (1 + 0.5 * T / 8) ** 8)
    assert x.dtype == torch.float64
    short = VPLinear(2.0, 2.0)
    x = WassersteinSampler("em").sample(
        Times(),
        3,
        path=short,
        shape=(2,),
        noise=Constant(1.0),
        pairs=grid_pairs([1e-9, 0.0]),
    )
    assert x.shape == (3, 2)
    start = []

    @dataclass
    class First(Times):
        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            start.append(x.clone())
            return super().__call__(x, t)

    WassersteinSampler("em").sample(
        First(), 3, path=short, shape=(2,), noise=Constant(1.0), steps=1
    )
    torch.testing.assert_close(start[0], torch.full((3, 2), math.sqrt(1 - math.exp(-2.0))))
    assert WassersteinSampler("so").sample(
        times, 0, path=PAPER, shape=(2,), noise=NOISE, steps=2
    ).shape == (0, 2)


# Bounds


FACTS: dict[str, Any] = {"dim": 4, "convexity": 1.5, "smoothness": 3.0, "second_moment": 9.0}


@pytest.mark.parametrize(
    ("scheme", "first", "learnt"),
    [
        ("em", 9.0, 2.0),
        ("ei", 8.0, 2.0),
        ("rem", (2 / math.sqrt(3) * 4 + 0.5 / math.sqrt(3)), 6.0),
        ("rei", 2 / math.sqrt(3) * 4, 6.0),
    ],
)
def test_bound_of_first_order(scheme: Any, first: float, learnt: float) -> None:
    """L_max = 4, m_min = 1, so that m_min - 1/2 = 1/2; d = 4."""
    h = 0.01
    start = 3 * math.exp(-7)
    steps = first * math.sqrt(4 * h) if scheme in ("em", "ei") else 2 * first * math.sqrt(h)
    assert w2_bound(scheme, h=h, horizon=7.0, **FACTS) == pytest.approx(start + steps)
    assert w2_bound(scheme, h=h, horizon=7.0, score_error=0.1, **FACTS) == pytest.approx(
        start + steps + 0.1 * learnt
    )


def test_bound_of_second_order() -> None:
    h, growth = 0.01, math.exp(3.5 * 0.01)
    start = 3 * math.exp(-7)
    steps = growth * 2 * (8 + math.sqrt(2) * 0.6 / 4) / 0.5 * h
    assert w2_bound("so", h=h, horizon=7.0, hessian_lipschitz=0.6, **FACTS) == pytest.approx(
        start + steps
    )
    learnt = growth / 0.5 * (0.1 + 2 / 3 * math.sqrt(4 * h) * 0.2 + h / 2 * 0.3)
    assert w2_bound(
        "so",
        h=h,
        horizon=7.0,
        hessian_lipschitz=0.6,
        score_error=0.1,
        hessian_error=0.2,
        drift_error=0.3,
        **FACTS,
    ) == pytest.approx(start + steps + learnt)


@pytest.mark.parametrize("scheme", PROVEN)
def test_bound_is_above_what_gaussian_data_give(scheme: Any) -> None:
    for mean, var in ((0.0, 0.25), (1.5, 1.0), (-2.0, 1.6)):
        for horizon, steps in ((1.0, 10), (4.0, 20), (8.0, 400)):
            m, v = gaussian_moments(scheme, mean, var, horizon=horizon, steps=steps)
            measured = math.hypot(m - mean, math.sqrt(v) - math.sqrt(var))
            bound = w2_bound(
                scheme,
                dim=1,
                h=horizon / steps,
                horizon=horizon,
                convexity=1 / var,
                smoothness=1 / var,
                second_moment=mean**2 + var,
            )
            assert measured < bound


@pytest.mark.parametrize("scheme", PROVEN)
def test_guaranteed_steps_reach_their_accuracy_at_the_rate_of_the_corollaries(scheme: Any) -> None:
    facts = {**FACTS, "hessian_lipschitz": 0.5}

    def steps(accuracy: float, **changed: Any) -> int:
        horizon, count = guaranteed_steps(scheme, accuracy, **{**facts, **changed})
        bound = w2_bound(scheme, h=horizon / count, horizon=horizon, **{**facts, **changed})
        assert 0.9 * accuracy < bound <= accuracy * (1 + 1e-9)
        return count

    power = 1 if scheme == "so" else 2
    # between accuracies a thousandfold apart the logarithm grows by a factor, here below 1.8
    assert 0 < math.log10(steps(1e-6) / steps(1e-3)) / 3 - power < 0.1
    wide = steps(1e-4, dim=400) / steps(1e-4, dim=4)
    assert wide == pytest.approx(10.0**power, rel=0.02 if scheme != "rem" else 0.15)


def test_bound_beyond_the_largest_number_is_infinite() -> None:
    facts: dict[str, Any] = {**FACTS, "smoothness": 300.0, "h": 5.0, "horizon": 5.0}
    for error in (0.0, 0.1):
        assert w2_bound("so", score_error=error, **facts) == math.inf


def test_loose_accuracy_needs_one_step() -> None:
    horizon, steps = guaranteed_steps("em", 1e4, **FACTS)
    assert steps == 1 and horizon > 0


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "euler"}, "scheme must be one of em, ei, rem, rei, so, so-jvp, got 'euler'"),
        ({"hessian": "full"}, "hessian must be"),
        ({"order": 0}, "order must be at least 1, got 0"),
        ({"t_min": 1.0}, r"t_min must lie in \[0, 1\), got 1.0"),
    ],
)
def test_bad_samplers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WassersteinSampler(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num": -1}, "need num >= 0"),
        ({"batch_size": 0}, "batch_size >= 1"),
        ({"steps": None}, "either steps or pairs"),
        ({"pairs": uniform_grid(3)}, "either steps or pairs"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": None, "pairs": uniform_grid(3), "horizon": 1.0}, "horizon goes with steps"),
        ({"steps": None, "pairs": uniform_grid(3, 1.0, 0.2)}, "must fall to 0"),
        ({"steps": None, "pairs": grid_pairs([0.5, 0.7, 0.0])}, "must fall to 0"),
        ({"steps": None, "pairs": torch.zeros(0, 2)}, "pairs must have shape"),
        ({"horizon": 9.0}, "horizon must be positive, finite and at most 8"),
        ({"horizon": 0.0}, "horizon must be positive"),
        ({"path": Linear()}, "at most inf"),
        ({"x1": torch.zeros(2, 1)}, r"x1 must have shape \(4, 1\)"),
        ({"x1": torch.full((4, 1), math.nan)}, "x1 holds values that are not finite"),
    ],
)
def test_bad_requests(options: dict[str, Any], message: str) -> None:
    toy = Counting(gaussian())
    request: dict[str, Any] = {"num": 4, "path": PAPER, "shape": (1,), "noise": NOISE, "steps": 3}
    request |= options
    num = request.pop("num")
    with pytest.raises(ValueError, match=message):
        WassersteinSampler().sample(toy, num, **request)
    assert not toy.calls  # before any work


@pytest.mark.parametrize("hessian", ["dense", "jvp"])
@pytest.mark.parametrize("shape", [(), (0,), (1, 1)])
def test_events_without_sides_and_without_numbers(shape: tuple[int, ...], hessian: Any) -> None:
    like = torch.empty(3, *shape)
    shared = SharedBrownian(NOISE, like, PAPER, clock_grid(PAPER, 4))
    for brownian in (None, shared):
        sampler = WassersteinSampler("so", hessian=hessian, brownian=brownian)
        x = sampler.sample(Times(), 3, path=PAPER, shape=shape, noise=NOISE, steps=2)
        assert x.shape == (3, *shape)


def test_a_field_that_is_not_finite() -> None:
    @dataclass(frozen=True)
    class Broken:
        predicts: str = "score"

        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            return x * math.inf

    with pytest.raises(FloatingPointError, match="not finite"):
        WassersteinSampler("em").sample(Broken(), 2, path=PAPER, shape=(1,), noise=NOISE, steps=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "so-jvp"}, "scheme must be one of em, ei, rem, rei, so, got"),
        ({"convexity": 0.5}, "convexity must exceed 1/2"),
        ({"smoothness": 1.0}, "smoothness must be finite and at least convexity"),
        ({"dim": 0}, "dim must be at least 1"),
        ({"h": 0.0}, "h must be positive"),
        ({"horizon": math.inf}, "horizon must be positive"),
        ({"second_moment": 0.0}, "second_moment must be positive"),
        ({"score_error": -0.1}, "score_error must be finite and not negative"),
    ],
)
def test_bad_bounds(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        w2_bound(**{"scheme": "em", "h": 0.1, "horizon": 5.0, **FACTS, **options})


def test_bad_moments_and_accuracies() -> None:
    with pytest.raises(ValueError, match="accuracy must be positive"):
        guaranteed_steps("em", 0.0, **FACTS)
    with pytest.raises(ValueError, match="hessian_lipschitz"):
        guaranteed_steps("so", 0.1, hessian_lipschitz=-1.0, **FACTS)
    for scheme, mean, var, options, message in (
        ("sde", 0.0, 1.0, LONG, "scheme must be one of"),
        ("em", math.nan, 1.0, LONG, "mean must be finite"),
        ("em", 0.0, 0.0, LONG, "variance positive"),
        ("em", 0.0, 1.0, {**LONG, "horizon": 0.0}, "horizon must be"),
        ("em", 0.0, 1.0, {**LONG, "steps": 0}, "steps must be"),
    ):
        with pytest.raises(ValueError, match=message):
            gaussian_moments(scheme, mean, var, **options)  # type: ignore[arg-type]
