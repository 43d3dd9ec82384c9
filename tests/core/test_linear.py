"""Paths of linear SDEs: against integrated moments, closed forms and the paths of scalars."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.linear import (
    CustomClock,
    LinearClock,
    LinearSDE,
    OrnsteinUhlenbeck,
    RangeNull,
)
from fluvial.core.gaussian.paths import VE, AlphaSigmaPath, VPLinear
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.operators.dense import Dense
from fluvial.core.operators.diagonal import Mask
from fluvial.core.operators.downsample import AveragePool
from fluvial.core.protocols import GaussianPath, Run, Steering
from fluvial.core.scales import Block, Cosine, Diagonal, Fourier, Scalar, Sine, Spectral, Split
from fluvial.core.time import uniform_grid

from .toys import BlockField, BlockGaussian, Constant, assert_law

NOISE = KeyedNoise(11)


def number(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def block(rows: Any) -> Block:
    return Block(number(rows))


def langevin(
    a: float, eps: float, sigma: float = math.sqrt(2), beta: float = 1.0, v0: float = 0.0
) -> OrnsteinUhlenbeck:
    """Critically damped Langevin dynamics, v0 the variance of the first momentum."""
    return OrnsteinUhlenbeck(
        block([[0, a * a], [-1, -2 * a]]),
        block([[eps**2, 0], [0, sigma**2]]),
        LinearClock(beta),
        block([[0, 0], [0, v0]]) if v0 else None,
    )


@dataclass(frozen=True)
class Bridge(AlphaSigmaPath):
    """A Brownian bridge from the data to 0, in the clock s(t) = t: alpha and sigma end at 0."""

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def sigma(self, t: Tensor) -> Tensor:
        return (t * (1 - t)).sqrt()

    def alpha_rate(self, t: Tensor) -> Tensor:
        return -torch.ones_like(t)

    def sigma_rate(self, t: Tensor) -> Tensor:
        return (1 - 2 * t) / (2 * self.sigma(t))


@dataclass(frozen=True)
class Brownian(AlphaSigmaPath):
    """x_0 + scale W(t)."""

    scale: float = 1.0

    def alpha(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def sigma(self, t: Tensor) -> Tensor:
        return self.scale * t.sqrt()

    def alpha_rate(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)

    def sigma_rate(self, t: Tensor) -> Tensor:
        return self.scale / (2 * t.sqrt())


EVENT = (2, 3)
DECAY = 0.1 + NOISE.uniform(torch.empty(1, *EVENT, dtype=torch.float64), "decay")
LAMBDA = 0.1 + NOISE.uniform(torch.empty(1, *EVENT, dtype=torch.float64), "lambda")
MASK = Mask(torch.tensor([[True, False, True]]).reshape(1, 1, 3), EVENT)
WIDE = Dense(NOISE.normal(torch.empty(2, 6, dtype=torch.float64), "wide"), EVENT)
RISING = LinearClock(0.3, 4.0)
HEAT = Cosine(EVENT)
CURVED = CustomClock(lambda t: torch.expm1(1.5 * t) + t)
PATHS: dict[str, LinearSDE] = {
    "scalar": OrnsteinUhlenbeck(Scalar(number(-0.5)), Scalar(number(1.0)), RISING),
    "scalar, no drift": OrnsteinUhlenbeck(Scalar(number(0.0)), Scalar(number(2.0)), CURVED),
    "diagonal": OrnsteinUhlenbeck(Diagonal(-DECAY), Diagonal(LAMBDA), CURVED),
    "diagonal noise": OrnsteinUhlenbeck(Scalar(number(-0.5)), Diagonal(LAMBDA), RISING),
    "diagonal drift": OrnsteinUhlenbeck(Diagonal(-DECAY), Scalar(number(1.0)), RISING),
    "heat": OrnsteinUhlenbeck(
        Spectral(HEAT, -0.02 * HEAT.laplacian()[None]), Scalar(number(0.7)), RISING
    ),
    "spectral": OrnsteinUhlenbeck(
        Spectral(Sine(EVENT), -DECAY), Spectral(Sine(EVENT), LAMBDA), CURVED
    ),
    "fourier": OrnsteinUhlenbeck(
        Scalar(number(-0.5)),
        Spectral(Fourier(EVENT), 1 / (1 + Fourier(EVENT).laplacian()[None])),
        RISING,
    ),
    "split": OrnsteinUhlenbeck(
        Split(WIDE, number([-0.2, -1.0])), Split(WIDE, number([0.3, 1.0])), RISING
    ),
    "critical": langevin(2.0, 0.0, beta=4.0),
    "critical, both noises": langevin(1.0, 0.5, beta=4.0, v0=0.01),
    "overdamped": OrnsteinUhlenbeck(
        block([[0.1, 1.0], [-1.0, -5.0]]), block([[0.3, 0.2], [0.2, 0.5]]), RISING
    ),
    "underdamped": OrnsteinUhlenbeck(
        block([[0, 4.0], [-4.0, -0.5]]), block([[0, 0], [0, 1.0]]), CURVED
    ),
    "free particle": OrnsteinUhlenbeck(block([[0, 1], [0, 0]]), block([[0, 0], [0, 1]]), RISING),
    "growing": OrnsteinUhlenbeck(block([[1.0, 2.0], [0.5, 0.3]]), Scalar(number(0.4)), RISING),
    "range and null": RangeNull(Brownian(0.5), VPLinear(0.2, 5.0), WIDE),
    "range without noise": RangeNull(None, Brownian(), MASK),
    "bridge": RangeNull(Brownian(0.5), Bridge(), MASK),
}


def dense(scale: Any) -> np.ndarray:
    """The 6 x 6 matrix of a scale of one event; of a block, 2 x 2."""
    if isinstance(scale, Block):
        return scale.matrix.numpy()
    units = torch.eye(6, dtype=torch.float64).reshape(6, *EVENT)
    return (scale @ units).flatten(1).mT.numpy()


def coefficients(path: Any) -> Callable[[float], tuple[np.ndarray, np.ndarray]]:
    """(F, G G^T) as matrices at a time, from constant matrices and numbers of that time."""
    drift, spread = (dense(scale) for scale in path.sde(number(0.5)))
    if isinstance(path, OrnsteinUhlenbeck):

        def beta(u: float) -> float:
            return (
                1.5 * math.exp(1.5 * u) + 1 if path.clock is CURVED else float(path.clock.rate(u))
            )

        def of_clock(u: float) -> tuple[np.ndarray, np.ndarray]:
            share = beta(u) / beta(0.5)
            return share * drift, share * spread @ spread.T

        return of_clock
    inside = dense(Split(path.operator, number([1.0, 0.0])))

    def of_parts(u: float) -> tuple[np.ndarray, np.ndarray]:
        (f, g), (a, b) = (scale.values.tolist() for scale in path.sde(number(u)))
        outside = np.eye(6) - inside
        return f * inside + g * outside, a * a * inside + b * b * outside

    return of_parts


@pytest.mark.parametrize("key", PATHS)
def test_kernels_solve_the_moment_equations(key: str) -> None:
    """M' = F M and C' = F C + C F^T + G G^T from s on, integrated to a relative error of 1e-12."""
    path = PATHS[key]
    of = coefficients(path)
    size = len(of(0.5)[0])

    def rate(u: float, state: np.ndarray) -> np.ndarray:
        drift, square = of(u)
        scale, cov = state.reshape(2, size, size)
        return np.stack([drift @ scale, drift @ cov + cov @ drift.T + square]).ravel()

    start = np.stack([np.eye(size), np.zeros((size, size))]).ravel()
    for s, t in ((0.01, 0.02), (0.3, 0.31), (0.2, 0.95)):
        out = solve_ivp(rate, (s, t), start, method="DOP853", rtol=1e-12, atol=1e-15).y[:, -1]
        want_scale, want_cov = out.reshape(2, size, size)
        scale, cov = (dense(part) for part in path.kernel(number(s), number(t)))
        np.testing.assert_allclose(scale, want_scale, rtol=1e-10, atol=1e-12)
        deviation = np.sqrt(np.diag(want_cov))  # every entry by its own measure
        assert (np.abs(cov - want_cov) <= 1e-10 * np.outer(deviation, deviation) + 1e-15).all()


@pytest.mark.parametrize("key", PATHS)
def test_kernels_compose(key: str) -> None:
    """From s to u by way of t: M_us = M_ut M_ts and C_us = M_ut C_ts M_ut^T + C_ut."""
    path, (s, t, u) = PATHS[key], (number(v) for v in (0.1, 0.4, 0.9))
    (one, cov), (two, added), (both, total) = (
        path.kernel(*pair) for pair in ((s, t), (t, u), (s, u))
    )
    np.testing.assert_allclose(dense(two @ one), dense(both), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(
        dense(two @ cov @ two.T + added), dense(total), rtol=1e-12, atol=1e-14
    )
    still, nothing = path.kernel(t, t)
    np.testing.assert_allclose(dense(still), np.eye(len(dense(still))), atol=1e-15)
    assert np.abs(dense(nothing)).max() < 1e-15


@pytest.mark.parametrize("key", PATHS)
def test_rates(key: str) -> None:
    """M' is that of M, and L' L^T + L L'^T that of C."""
    path, t, h = PATHS[key], 0.37, 1e-5
    assert isinstance(path, GaussianPath)

    def slope(function: Callable[[float], np.ndarray]) -> np.ndarray:
        four = [function(t + k * h) for k in (-2, -1, 1, 2)]
        return (four[0] - 8 * four[1] + 8 * four[2] - four[3]) / (12 * h)

    scale_rate, level_rate = path.rates(number(t))
    _, level = path.marginal(number(t))
    want_scale = slope(lambda u: dense(path.moments(number(u))[0]))
    want_cov = slope(lambda u: dense(path.moments(number(u))[1]))
    np.testing.assert_allclose(dense(scale_rate), want_scale, rtol=1e-8, atol=1e-8)
    half = dense(level_rate) @ dense(level).T
    np.testing.assert_allclose(half + half.T, want_cov, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("key", PATHS)
def test_posterior_is_the_conditional_of_the_joint_law(key: str) -> None:
    """Of (x_s, x_t) given x_0, by the regression of one on the other."""
    path, s, t = PATHS[key], number(0.3), number(0.8)
    scale, cov = (dense(part) for part in path.moments(s))
    end, cov_end = (dense(part) for part in path.moments(t))
    forth = dense(path.kernel(s, t)[0])
    gain = cov @ forth.T @ np.linalg.pinv(cov_end, rcond=1e-13)
    from_x, from_clean, rest = (dense(part) for part in path.bridge(s, t))
    np.testing.assert_allclose(from_x, gain, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(from_clean, scale - gain @ end, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(rest, cov - gain @ forth @ cov, rtol=1e-9, atol=1e-11)

    x, clean = NOISE.normal(torch.empty(2, 3, 2, 3).double())
    mean = path.posterior(x, clean, t, s, Constant(0.0))
    shape = (2, 3) if key in BLOCKS else (6, 1)

    def times(matrix: np.ndarray, v: Tensor) -> Tensor:
        return (torch.from_numpy(matrix) @ v.reshape(3, *shape)).reshape(v.shape)

    assert_close(mean, times(from_x, x) + times(from_clean, clean), 1e-11)
    drawn = path.posterior(x, clean, t, s, Constant(1.0)) - mean
    root = dense(path.bridge(s, t)[2].cholesky())
    np.testing.assert_allclose(root @ root.T, rest, rtol=1e-9, atol=1e-12)
    assert_close(drawn, times(root, torch.ones_like(x)), 1e-12)


BLOCKS = {key for key, path in PATHS.items() if isinstance(path.sde(number(0.5))[0], Block)}


@pytest.mark.parametrize("key", PATHS)
def test_ends_of_the_posterior(key: str) -> None:
    path, x = PATHS[key], NOISE.normal(torch.empty(3, *EVENT).double(), "x")
    clean = NOISE.normal(x, "clean")
    for t in (0.0, 0.5, 1.0):
        assert path.posterior(x, clean, number(t), number(t), NOISE) is x
        assert path.transition(x, number(t), number(t), NOISE) is x
    if path.initial is None:
        assert_close(path.posterior(x, clean, number(0.5), number(0.0), NOISE), clean)
    # rows that stay and rows that move
    s, t = number([0.2, 0.5, 0.0]), number([0.2, 0.8, 0.4])
    moved = path.posterior(x, clean, t, s, NOISE)
    assert torch.equal(moved[0], x[0]) and not torch.equal(moved[1], x[1])
    forth = path.transition(x, s, t, NOISE)
    assert torch.equal(forth[0], x[0])
    for row in range(3):
        alone = KeyedNoise(11, ids=torch.tensor([row]))
        args = x[row : row + 1], s[row], t[row], alone
        assert_close(path.transition(*args), forth[row : row + 1])
    assert path.posterior(x, clean, number(1.0), number(0.5), NOISE).isfinite().all()


@pytest.mark.parametrize("key", PATHS)
def test_sample_and_targets(key: str) -> None:
    path, x0 = PATHS[key], NOISE.normal(torch.empty(3, *EVENT).double(), "x0")
    t = number([0.2, 0.5, 0.9])
    draw = path.sample(x0, t, NOISE)
    scale, level = path.marginal(t)
    eps = draw.target("noise")
    assert torch.equal(eps, NOISE.normal(x0, "source"))
    assert_close(draw.x, scale @ x0 + level @ eps)
    assert torch.equal(draw.target("clean"), x0)
    scale_rate, level_rate = path.rates(t)
    assert_close(draw.target("velocity"), scale_rate @ x0 + level_rate @ eps)
    drift, spread = path.sde(t)
    flow = drift @ draw.x - 0.5 * (spread @ (spread.T @ draw.target("score")))
    assert_close(draw.target("velocity"), flow, 1e-9)
    with pytest.raises(ValueError, match="has targets 'clean', 'noise'"):
        draw.target("drift")
    with pytest.raises(TypeError, match="x0 must be floating, got torch.int64"):
        path.sample(x0.long(), t, NOISE)
    if isinstance(path, RangeNull):
        with pytest.raises(ValueError, match="given x0 alone"):
            path.sample(x0, t, NOISE, x1=x0)
    else:
        x1 = path.source(x0, NOISE)
        assert_close(path.sample(x0, t, NOISE, x1=x1).x, draw.x, 1e-10)
        with pytest.raises(ValueError, match="x1 has shape"):
            path.sample(x0, t, NOISE, x1=x1[:1])


@pytest.mark.parametrize("key", PATHS)
def test_dtype_is_that_of_the_state(key: str) -> None:
    path, x = PATHS[key], NOISE.normal(torch.empty(3, *EVENT).double(), "x")
    low = x.float()
    for t, s in (
        (number(0.8), number(0.3)),
        (torch.tensor([0.7, 0.8, 0.9]), torch.full((3,), 0.2)),
    ):
        pairs = [
            (path.sample(x, t, NOISE).x, path.sample(low, t, NOISE).x),
            (path.posterior(x, x, t, s, NOISE), path.posterior(low, low, t, s, NOISE)),
            (path.transition(x, s, t, NOISE), path.transition(low, s, t, NOISE)),
        ]
        for exact, rounded in pairs:
            assert rounded.dtype == torch.float32
            torch.testing.assert_close(rounded, exact.float(), rtol=1e-4, atol=1e-4)


# Special cases: the paths of scalars


SCALARS: list[tuple[AlphaSigmaPath, OrnsteinUhlenbeck]] = [
    (
        VPLinear(0.1, 20.0),
        OrnsteinUhlenbeck(Scalar(number(-0.5)), Scalar(number(1.0)), LinearClock(0.1, 20.0)),
    ),
    (
        VE(0.01, 50.0),
        OrnsteinUhlenbeck(
            Scalar(number(0.0)),
            Scalar(number(1.0)),
            CustomClock(lambda t: VE(0.01, 50.0).sigma(t).square()),
        ),
    ),
]


@pytest.mark.parametrize(("peer", "path"), SCALARS, ids=["vp", "ve"])
@pytest.mark.parametrize("times", ["one", "rows"])
def test_scalar_paths_are_special_cases(
    peer: AlphaSigmaPath, path: OrnsteinUhlenbeck, times: str
) -> None:
    t, s = number([0.9, 0.6, 0.01]), number([0.2, 0.5, 0.001])
    x, clean = NOISE.normal(torch.empty(2, 3, *EVENT).double())
    both = (t, s) if times == "rows" else (t[0], s[0])
    for ours, theirs in ((path.marginal, peer.marginal), (path.sde, peer.sde)):
        for one, two in zip(ours(both[0]), theirs(both[0]), strict=True):
            assert_close(one.value, two.value, 1e-14)
    for one, two in zip(path.rates(both[0]), peer.rates(both[0]), strict=True):
        assert_close(one.value, two.value, 1e-12)
    scale = float(x.abs().max() * peer.sigma(both[0]).max())
    for ours, theirs in (
        (path.sample(x, both[0], NOISE).x, peer.sample(x, both[0], NOISE).x),
        (path.source(x, NOISE), peer.source(x, NOISE)),
        (path.transition(x, *both[::-1], NOISE), peer.transition(x, *both[::-1], NOISE)),
        (path.posterior(x, clean, *both, NOISE), peer.posterior(x, clean, *both, NOISE)),
    ):
        assert ((ours - theirs).abs() / scale).max() < 1e-12


def test_structured_paths_are_scalar_ones_where_their_numbers_are_equal() -> None:
    clock, x = LinearClock(0.1, 20.0), NOISE.normal(torch.empty(3, *EVENT).double(), "x")
    t, s = number(0.7), number(0.2)
    ones = torch.ones(1, *EVENT, dtype=torch.float64)
    pairs = [
        (Diagonal(-0.5 * ones), Diagonal(ones)),
        (Spectral(Cosine(EVENT), -0.5 * ones), Spectral(Cosine(EVENT), ones)),
        (Split(WIDE, number([-0.5, -0.5])), Split(WIDE, number([1.0, 1.0]))),
        (block([[-0.5, 0], [0, -0.5]]), block([[1, 0], [0, 1]])),
    ]
    want = VPLinear(0.1, 20.0)
    for drift, noise in pairs:
        path = OrnsteinUhlenbeck(drift, noise, clock)
        if isinstance(drift, Spectral):  # the same noise, drawn in the basis: the law is the same
            assert_close(
                path.posterior(x, 2 * x, t, s, Constant(0.0)),
                want.posterior(x, 2 * x, t, s, Constant(0.0)),
            )
        assert_close(path.sample(x, t, NOISE).x, want.sample(x, t, NOISE).x)
        assert_close(path.posterior(x, 2 * x, t, s, NOISE), want.posterior(x, 2 * x, t, s, NOISE))
        assert_close(path.transition(x, s, t, NOISE), want.transition(x, s, t, NOISE))
    nothing = RangeNull(Brownian(), want, Mask(torch.tensor([[[True, False, False]]]), EVENT))
    assert_close(nothing.sample(x, t, NOISE).x[..., 1:], want.sample(x, t, NOISE).x[..., 1:])


# Critically damped Langevin dynamics


@pytest.mark.parametrize(
    ("a", "eps", "sigma"), [(0.1, 0.0, 1.4), (1.0, 0.25, 2.0), (3.0, 1.0, 0.5)]
)
def test_critical_damping_in_closed_form(a: float, eps: float, sigma: float) -> None:
    """m = e^{-a tau} [[1 + a tau, a^2 tau], [-tau, 1 - a tau]] and S = S_inf - m S_inf m^T."""
    path = langevin(a, eps, sigma)
    stay = np.array(
        [
            [(5 * eps**2 + a**2 * sigma**2) / (4 * a), -(eps**2) / (2 * a**2)],
            [-(eps**2) / (2 * a**2), (eps**2 + a**2 * sigma**2) / (4 * a**3)],
        ]
    )
    np.testing.assert_allclose(dense(path.stationary()), stay, rtol=1e-13, atol=1e-15)
    drift = np.array([[0, a * a], [-1, -2 * a]])
    left = drift @ stay + stay @ drift.T + np.diag([eps**2, sigma**2])
    assert np.abs(left).max() < 1e-13 * max(1, np.abs(stay).max() * a * a)
    for tau in (0.3, 0.7, 1.0):
        m = math.exp(-a * tau) * np.array([[1 + a * tau, a * a * tau], [-tau, 1 - a * tau]])
        scale, cov = (dense(part) for part in path.moments(number(tau)))
        np.testing.assert_allclose(scale, m, rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(cov, stay - m @ stay @ m.T, atol=1e-12 * np.abs(stay).max())


def test_values_of_critical_damping() -> None:
    cov = langevin(2.0, 0.0).moments(number(0.5))[1].matrix
    assert_close(cov, number([[0.32332358, 0.13533528], [0.13533528, 0.21616618]]), 1e-8)
    cov = langevin(1.0, 0.5).moments(number(1.0))[1].matrix
    assert_close(cov, number([[0.36420187, 0.07800292], [0.07800292, 0.45254008]]), 1e-8)
    path = langevin(2.0, 0.0, v0=0.01)  # hybrid score matching: the first momentum is not given
    cov = path.moments(number(1.0))[1].matrix
    assert_close(cov, number([[0.76482720, 0.07252993], [0.07252993, 0.22728861]]), 1e-8)
    assert_close(path.marginal(number(1.0))[1].matrix[1, 1], number(0.46947893), 1e-8)
    cov = langevin(1.0, 0.5, v0=0.01).moments(number(1.0))[1].matrix
    assert_close(torch.linalg.det(cov), number(0.15934394), 1e-8)


@pytest.mark.parametrize("tau", [1e-3, 1e-5, 1e-8])
def test_short_times_keep_their_digits(tau: float) -> None:
    """With noise in the momentum alone C is about [[16 tau^3 / 3 s, ..]]: from the first terms of
    the series, which are all that double precision sees."""
    cov = langevin(2.0, 0.0).kernel(number(0.0), number(tau))[1].matrix
    # int_0^tau of the products of 4 u e^{-2u} and (1 - 2 u) e^{-2u}, times 2, to the fourth order
    want = [
        32 * (tau**3 / 3 - tau**4 + 8 / 5 * tau**5 - 16 / 9 * tau**6),
        8 * (tau**2 / 2 - 2 * tau**3 + 4 * tau**4 - 16 / 3 * tau**5),
        2 * (tau - 4 * tau**2 + 28 / 3 * tau**3 - 44 / 3 * tau**4),
    ]
    got = number([cov[0, 0], cov[0, 1], cov[1, 1]])
    torch.testing.assert_close(got, number(want), rtol=max(1e-12, 20 * tau**4 * 10), atol=0.0)
    limit = [cov[0, 0] / tau**3, cov[0, 1] / tau**2, cov[1, 1] / tau]
    torch.testing.assert_close(number(limit), number([32 / 3, 4.0, 2.0]), rtol=5 * tau, atol=0.0)


def test_the_toy_of_position_and_momentum() -> None:
    """Dockhorn's process by Van Loan's matrix exponential."""
    toy, path = BlockGaussian(), langevin(2.0, 0.0, beta=4.0)
    t, s = number([0.9, 0.3]), number([0.5, 0.01])
    assert_close(path.moments(t)[0].matrix, toy.flow_matrix(t))
    assert_close(path.moments(t)[1].matrix, toy.cov(t))
    assert_close(path.stationary().matrix, number([[1.0, 0.0], [0.0, 0.25]]))
    x = NOISE.normal(torch.empty(2, 2, 5).double())
    assert_close(
        path.sample(x, t, KeyedNoise(0)).x,
        path.marginal(t)[0] @ x + path.marginal(t)[1] @ KeyedNoise(0).normal(x, "source"),
    )
    assert_close(path.posterior(x, 2 * x, t, s, NOISE), toy.posterior(x, 2 * x, t, s, NOISE), 1e-9)
    assert_close(path.transition(x, s, t, NOISE), toy.transition(x, s, t, NOISE), 1e-11)
    for ours, theirs in zip(path.rates(t), toy.rates(t), strict=True):
        assert_close(ours.matrix, theirs.matrix, 1e-9)


def test_reversal_of_time_stays_critically_damped() -> None:
    """The linear part of the reverse SDE, A_t = -A - Q S_inf^-1, and its exact step."""
    path = langevin(1.0, 0.25)
    stay = path.stationary()
    reverse = -1 * path.drift - path.noise @ stay.inverse()
    want = [[-0.10846343, -1.00657354], [0.78964667, -1.89153657]]
    assert_close(reverse.matrix, number(want), 1e-8)
    back = OrnsteinUhlenbeck(reverse, path.noise, LinearClock(1.0))
    assert_close(back.stationary().matrix, stay.matrix)
    scale, cov = back.kernel(number(0.0), number(0.7))
    forth = path.kernel(number(0.0), number(0.7))[0]
    assert_close(scale.matrix, (stay @ forth.T @ stay.inverse()).matrix)
    assert_close(cov.matrix, (stay - scale @ stay @ scale.T).matrix)


@dataclass(frozen=True)
class Exact(BlockField):
    """The field of Gaussian data on any path of blocks."""

    def moments(self, t: Tensor) -> tuple[Tensor, Tensor]:
        scale, added = self.path.moments(t)  # type: ignore[attr-defined]
        m = scale.matrix
        return m @ self.mean, m @ self.cov @ m.mT + added.matrix


def test_an_ancestral_step_is_the_conditional_mean() -> None:
    """With E[x_0 | x_t] as the clean end, the mean of the posterior is E[x_s | x_t]."""
    path, t, s = langevin(2.0, 0.25, beta=4.0), number(0.7), number(0.2)
    field = Exact(path, number([1.0, 0.3]), number([[0.25, 0.1], [0.1, 0.2]]), "clean")  # type: ignore[arg-type]
    x = NOISE.normal(torch.empty(3, 2, 4).double())
    (mean, cov), (end, cov_end) = field.moments(s), field.moments(t)
    gain = cov @ path.kernel(s, t)[0].matrix.mT @ torch.linalg.inv(cov_end)
    want = mean[:, None] + gain @ (x - end[:, None])
    assert_close(path.posterior(x, field(x, t), t, s, Constant(0.0)), want, 1e-10)


@pytest.mark.parametrize(("a", "eps", "want"), [(2.0, 0.0, 1.03808286), (2.0, 0.25, 1.03944777)])
def test_euler_maruyama_along_it(a: float, eps: float, want: float) -> None:
    """The variance of positions after 100 steps from the stationary law, data N(0, 1) and first
    momenta N(0, .01), by the recursion that the sampler's affine steps make."""
    path = langevin(a, eps, beta=4.0, v0=0.01)
    field = Exact(path, number([0.0, 0.0]), number([[1.0, 0.0], [0.0, 0.0]]))  # type: ignore[arg-type]
    sampler, units = EulerMaruyama(), torch.eye(2).double().unsqueeze(-1)
    cov = path.stationary().matrix
    for k, (t, s) in enumerate(uniform_grid(100)):
        run = Run(path, field, Constant(0.0), k, t, s, {}, Steering(), None)
        step, _, _ = sampler.step(units, None, run)
        drawn, _, _ = sampler.step(0 * units, None, replace(run, noise=Constant(1.0)))
        b = step[..., 0].mT
        cov = b @ cov @ b.mT + torch.diag(drawn[0, :, 0].square())
    assert_close(cov[0, 0], number(want), 1e-6)


def test_gradients_by_time() -> None:
    """The coefficients are functions of t that torch differentiates, in either mode."""
    for key, path in PATHS.items():
        if isinstance(path, RangeNull) or key == "bridge":
            continue
        t = number([0.3, 0.6])

        def cov(t: Tensor, path: LinearSDE = path) -> Tensor:
            moment = path.moments(t)[1]
            return moment.matrix if isinstance(moment, Block) else moment.coefficients

        def flow(path: LinearSDE = path, t: Tensor = t) -> Tensor:
            (drift, spread), (_, c) = path.sde(t), path.moments(t)
            rate = drift @ c + c @ drift.T + spread @ spread.T
            return rate.matrix if isinstance(rate, Block) else rate.coefficients

        value, rate = torch.func.jvp(cov, (t,), (torch.ones_like(t),))
        assert_close(value, cov(t), 1e-12)
        assert_close(rate, flow(), 1e-9)
        leaf = t.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(cov(leaf).sum(), leaf)
        assert_close(gradient.sum(), rate.sum(), 1e-9)


# Range and null space


def test_posterior_of_a_measurement() -> None:
    """Prior covariance [[1, .8], [.8, 1]], the first coordinate measured with variance .25, y = 1:
    the ancestral sampler starts at y and has the exact posterior mean (.8, .64) at every step."""
    prior = number([[1.0, 0.8], [0.8, 1.0]])
    operator = Mask(torch.tensor([[True, False]]))
    path = RangeNull(Brownian(0.5), Bridge(), operator)
    y = number([[1.0, 0.0]])

    def clean(x: Tensor, t: Tensor) -> Tensor:
        scale, cov = path.moments(t)
        h, c = (torch.diag(s.values.expand(2)) for s in (scale, cov))
        return x @ (prior @ h @ torch.linalg.pinv(h @ prior @ h + c)).mT

    for steps in (1, 7, 50):
        x = path.source(torch.empty(1, 2).double(), Constant(0.0), y=y)
        assert_close(x, y)
        for t, s in uniform_grid(steps):
            x = path.posterior(x, clean(x, t), t, s, Constant(0.0))
        assert_close(x, number([[0.8, 0.64]]))


def test_the_range_stays_where_it_is_measured_without_noise() -> None:
    image = NOISE.normal(torch.empty(3, 1, 4, 4).double(), "image")
    pool = AveragePool((2, 2), (1, 4, 4))
    path = RangeNull(None, VPLinear())
    y = pool.A(image)
    for t in (0.1, 0.6, 1.0):
        assert_close(pool.A(path.sample(image, number(t), NOISE, operator=pool).x), y)
    x = path.source(image, NOISE, operator=pool, y=y)
    assert_close(pool.A(x), y)
    assert (x - pool.A_dagger(y)).abs().max() > 0.1
    x = path.posterior(x, image, number(1.0), number(0.4), NOISE, operator=pool)
    assert_close(pool.A(x), y)


def test_operators_of_rows() -> None:
    masks = torch.tensor([[True, False], [False, True]])
    path, x = RangeNull(Brownian(), VPLinear()), NOISE.normal(torch.empty(2, 2).double())
    t = number([0.3, 0.8])
    both = path.sample(x, t, NOISE, operator=Mask(masks)).x
    for row in range(2):
        alone = KeyedNoise(11, ids=torch.tensor([row]))
        one = path.sample(
            x[row : row + 1], t[row : row + 1], alone, operator=Mask(masks[row : row + 1])
        )
        assert_close(one.x, both[row : row + 1])


def test_coloured_noise() -> None:
    """Noise of the measurement, brought back: A^+ n in the range, white in the null space."""

    class Measured(RangeNull):
        def white(self, like: Tensor, noise: Any, tag: str, **cond: Any) -> Tensor:
            white = noise.normal(like, tag)
            n = noise.normal(WIDE.A(like), tag + "-y")
            return white - WIDE.project(white) + WIDE.A_dagger(n)

    path = Measured(Brownian(0.5), VPLinear(), WIDE)
    x = torch.zeros(40_000, *EVENT, dtype=torch.float64)
    drawn = path.sample(x, number(0.4), NOISE).x
    assert_law(WIDE.A(drawn), torch.zeros(2), 0.5 * number([0.4, 0.4]).sqrt())


# Bad input


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"drift": Scalar(number(math.nan))}, ValueError, "drift must be finite, got"),
        ({"noise": Scalar(number(-1.0))}, ValueError, "noise must be finite and a covariance"),
        ({"initial": Scalar(number(-1.0))}, ValueError, "initial must be finite and a covariance"),
        ({"noise": block([[1, 2], [2, 1]])}, ValueError, "noise must be finite and a covariance"),
        ({"noise": block([[1, 0.5], [0, 1]])}, ValueError, "noise must be finite and a covariance"),
        (
            {"drift": Diagonal(-DECAY), "noise": block([[1, 0], [0, 1]])},
            TypeError,
            "Diagonal goes with its own kind",
        ),
        (
            {"drift": Block(torch.zeros(3, 2, 2)), "noise": block([[1, 0], [0, 1]])},
            ValueError,
            "drift must be one block for all rows",
        ),
        (
            {"drift": block([[-1, 0], [0, -1]]), "clock": CustomClock(lambda t: t / (1 - t))},
            ValueError,
            "the clock must end",
        ),
    ],
)
def test_bad_processes(change: dict[str, Any], error: type[Exception], match: str) -> None:
    good: dict[str, Any] = {
        "drift": Scalar(number(-0.5)),
        "noise": Scalar(number(1.0)),
        "clock": LinearClock(1.0),
        "initial": None,
    }
    OrnsteinUhlenbeck(**good)
    with pytest.raises(error, match=match):
        OrnsteinUhlenbeck(**{**good, **change})


@pytest.mark.parametrize("betas", [(0.0, 1.0), (1.0, -1.0), (1.0, math.inf), (math.nan, None)])
def test_bad_linear_clocks(betas: tuple[float, float | None]) -> None:
    with pytest.raises(ValueError, match="betas must be positive and finite"):
        LinearClock(*betas)


@pytest.mark.parametrize(
    ("tau", "match"),
    [
        (lambda t: t + 1, "values from 0 on"),
        (lambda t: t.sum(), "values from 0 on"),
        (lambda t: t * (1 - t), "must rise strictly"),
        (lambda t: t / (0.5 - t), "values from 0 on|must rise"),
    ],
)
def test_bad_custom_clocks(tau: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CustomClock(tau)


def test_what_has_no_stationary_law() -> None:
    for key in ("free particle", "growing", "scalar, no drift"):
        with pytest.raises(ValueError, match="drift must"):
            PATHS[key].stationary()  # type: ignore[attr-defined]
    stay = PATHS["diagonal"].stationary()  # type: ignore[attr-defined]
    assert_close(stay.values, LAMBDA / (2 * DECAY))


def test_what_a_range_and_null_path_needs() -> None:
    path, x = RangeNull(None, VPLinear()), torch.zeros(2, *EVENT)
    with pytest.raises(ValueError, match="needs an operator"):
        path.sample(x, number(0.5), NOISE)
    with pytest.raises(ValueError, match="source needs y"):
        replace(path, operator=MASK).source(x, NOISE)


def test_fields_are_converted_along_it() -> None:
    """Between score, noise and clean end, exactly: by `Block`, and by `Diagonal`."""
    for path, shape in ((langevin(1.0, 0.5, beta=4.0), (2, 5)), (PATHS["diagonal"], EVENT)):
        x0, t = NOISE.normal(torch.empty(3, *shape).double(), "x0"), number(0.4)
        draw = path.sample(x0, t, NOISE)

        @dataclass
        class Known:
            draw: Any
            predicts: str = "score"

            def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
                return self.draw.target(self.predicts)

        for kind in ("clean", "noise", "velocity"):
            field = convert(Known(draw), kind, path)
            assert_close(field(draw.x, t), draw.target(kind), 1e-9)
