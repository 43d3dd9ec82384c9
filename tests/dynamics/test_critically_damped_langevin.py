"""Critically damped Langevin diffusion: the brief's exact checks, invariants, misuse, files."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import linalg
from torch import Tensor, nn

import fluvial
from fluvial.cli import main as cli
from fluvial.core.gaussian.adaptive import integrate
from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.linear import CustomClock, LinearClock
from fluvial.core.gaussian.losses import Matching
from fluvial.core.gaussian.ode import RK4, Euler, Heun
from fluvial.core.gaussian.paths import Linear
from fluvial.core.gaussian.schedule import quadratic_grid
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import GaussianPath, Sampler, Steering
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import Uniform, uniform_grid
from fluvial.data.format import Format
from fluvial.dynamics.critically_damped_langevin import (
    EM,
    SSCS,
    CriticallyDamped,
    CriticallyDampedLangevin,
    Denoised,
    GaussianScore,
    Leapfrog,
    NetworkScore,
    ResidualMLP,
    SpeedClock,
    gaussian_law,
    gaussian_w2,
)
from fluvial.networks import MLP
from fluvial.training.files import load_model

NOISE = KeyedNoise(5)
DOCKHORN = CriticallyDamped()
PATHS = [DOCKHORN, CriticallyDamped(2.0, 0.25), CriticallyDamped(1.0, 0.5)]
TIMES = torch.tensor([1e-5, 1e-3, 0.1, 0.5, 1.0], dtype=torch.float64)


def normal(*shape: int, tag: str = "") -> Tensor:
    return NOISE.normal(torch.empty(shape, dtype=torch.float64), tag)


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def symmetric(xx: float, xv: float, vv: float) -> Tensor:
    return torch.tensor([[xx, xv], [xv, vv]], dtype=torch.float64)


def close(a: Any, b: Any, tolerance: float, *, rtol: float = 0.0) -> None:
    a, b = (torch.as_tensor(np.asarray(part)).double() for part in (a, b))
    torch.testing.assert_close(a, b, rtol=rtol, atol=tolerance)


def at(tau: float) -> Tensor:
    """The time of the default clock at which tau has this value."""
    return number(tau / 4)


class Exact(nn.Module):
    """The network that knows the score of Gaussian data, in what the objective asks of it."""

    def __init__(self, score: GaussianScore, shift: float = 0.0, output: str = "score") -> None:
        super().__init__()
        self.score, self.shift, self.output = score, shift, output
        self.unused = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, u: Tensor, t: Tensor) -> Tensor:
        value = self.score(u.unflatten(1, (2, -1)), t)
        return (value if self.score.path.epsilon else value[:, 1:]).flatten(1) + self.shift


# The process: checks 1 to 5


def test_moments_solve_their_equations_and_their_closed_forms() -> None:
    for k in range(20):
        u = NOISE.at(k).uniform(torch.empty(1, 5, dtype=torch.float64))[0].tolist()
        a, epsilon, sigma, tau, v0 = 0.1 + 2.9 * u[0], 3 * u[1], 0.1 + 3 * u[2], 4 * u[3], u[4]
        path = CriticallyDamped(a, epsilon, sigma, v0=v0)
        drift, noise = (getattr(path.process, name).matrix for name in ("drift", "noise"))
        assert np.array_equal(drift, [[0, a**2], [-1, -2 * a]])
        assert np.array_equal(noise, np.diag([epsilon**2, sigma**2]))
        e, q = epsilon**2, (a * sigma) ** 2
        s = path.stationary.matrix
        close(s, symmetric((5 * e + q) / (4 * a), -e / (2 * a**2), (e + q) / (4 * a**3)), 1e-14)
        close(drift @ s + s @ drift.T + noise, np.zeros((2, 2)), 1e-12 * float(s.abs().max()))
        z, decay = a * tau, math.exp(-2 * a * tau)
        cov = s - decay * symmetric(
            ((5 + 6 * z + 2 * z**2) * e + (1 + 2 * z + 2 * z**2) * q) / (4 * a),
            -(e * (1 + z) ** 2 + q * z**2) / (2 * a**2),
            ((1 + 2 * z + 2 * z**2) * e + (1 - 2 * z + 2 * z**2) * q) / (4 * a**3),
        )
        flow = torch.from_numpy(linalg.expm(drift.numpy() * tau))
        close(flow, math.exp(-z) * np.array([[1 + z, a * z], [-tau, 1 - z]]), 1e-12)
        tolerance = 1e-12 * float(s.abs().max())
        hybrid = cov + v0 * flow[:, 1:] @ flow[:, 1:].T
        for t in (at(tau), at(tau).reshape(1)):
            zero = torch.zeros_like(t)
            for law, wanted in ((path.kernel(zero, t), cov), (path.moments(t), hybrid)):
                close(law[0].matrix.reshape(2, 2), flow, 1e-12)
                close(law[1].matrix.reshape(2, 2), wanted, tolerance)
        # the noise that is left of stationary one goes the other way round
        close(path.reverse.drift.matrix, s @ drift.T @ s.inverse(), 1e-9)
        back, left = (block.matrix for block in path.reverse.kernel(number(0.0), at(tau)))
        close(back, s @ flow.T @ s.inverse(), 1e-9)
        close(left, s - back @ s @ back.T, 1e3 * tolerance)


def test_covariances_have_the_values_of_the_brief() -> None:
    plain = CriticallyDamped(2.0, v0=0.0)
    close(plain.moments(at(0.5))[1].matrix, symmetric(0.32332358, 0.13533528, 0.21616618), 1e-8)
    noisy = CriticallyDamped(1.0, 0.5, v0=0.0)
    close(noisy.moments(at(1.0))[1].matrix, symmetric(0.36420187, 0.07800292, 0.45254008), 1e-8)
    hybrid = DOCKHORN.moments(at(1.0))[1]
    close(hybrid.matrix, symmetric(0.76482720, 0.07252993, 0.22728861), 1e-8)
    close(hybrid.cholesky().matrix[1, 1], 0.46947893, 1e-8)
    hybrid = CriticallyDamped(1.0, 0.5).moments(at(1.0))[1]
    close(hybrid.matrix, symmetric(0.36555523, 0.07800292, 0.45254008), 1e-8)
    close(torch.linalg.det(hybrid.matrix), 0.15934394, 1e-8)


def test_small_times_lose_no_digits() -> None:
    powers = symmetric(3, 2, 1)
    path = CriticallyDamped(2.0, v0=0.0)
    ratios = path.moments(at(1e-3))[1].matrix / 1e-3**powers
    close(ratios, symmetric(10.6347, 3.98403, 1.99202), 5e-5)
    for tau in (1e-5, 1e-9):
        for t in (at(tau), at(tau).reshape(1)):
            cov = path.moments(t)[1].matrix.reshape(2, 2)
            close(cov / tau**powers, symmetric(32 / 3, 4, 2), 10 * tau * 8, rtol=1e-12)
            # det = a^4 sigma^4 tau^4 / 12, of which single precision would leave nothing
            close(torch.linalg.det(cov) / tau**4, 16 * 4 / 12, 1e3 * tau, rtol=1e-9)
    noisy = CriticallyDamped(2.0, 0.25, v0=0.0).moments(at(1e-9))[1].matrix
    close(noisy[0, 0] / 1e-9, 0.25**2, 1e-8)


def test_the_reversal_of_the_stationary_process_is_critically_damped() -> None:
    reverse = CriticallyDamped(1.0, 0.25).reverse
    drift = reverse.drift.matrix
    close(drift, [[-0.10846343, -1.00657354], [0.78964667, -1.89153657]], 1e-8)
    turn = drift + torch.eye(2)  # twice an eigenvalue of -1, and no second eigenvector
    close(turn @ turn, np.zeros((2, 2)), 1e-12)
    close(DOCKHORN.reverse.drift.matrix, [[0, -4], [1, -4]], 1e-12)
    close(DOCKHORN.stationary.matrix, torch.diag(torch.tensor([1, 0.25])), 1e-12)


def test_dockhorns_process_is_this_one() -> None:
    beta, gamma, mass = 4.0, 1.0, 0.25
    drift = beta * np.array([[0, 1 / mass], [-1, -gamma / mass]])
    for t in (0.1, 0.7):
        flow, cov = (block.matrix for block in replace(DOCKHORN, v0=0.0).moments(number(t)))
        close(flow, linalg.expm(drift * t), 1e-12)
        noise = np.diag([0, 2 * gamma * beta])
        both = linalg.expm(np.block([[drift, noise], [np.zeros((2, 2)), -drift.T]]) * t)
        close(cov, both[:2, 2:] @ both[:2, :2].T, 1e-12)


@pytest.mark.parametrize(
    ("clock", "tau"),
    [
        (LinearClock(1.0, 7.0), lambda t: t + 3 * t**2),
        (SpeedClock(lambda t: 1 + 6 * t), lambda t: t + 3 * t**2),
        (SpeedClock(lambda t: torch.exp(2 * t)), lambda t: (torch.exp(2 * t) - 1) / 2),
        (CustomClock(lambda t: 2 * t + torch.sin(t)), lambda t: 2 * t + torch.sin(t)),
    ],
)
def test_any_clock(clock: Any, tau: Callable[[Tensor], Tensor]) -> None:
    path = CriticallyDamped(1.0, 0.3, clock=clock, v0=0.0)
    close(path.tau(TIMES), tau(TIMES), 1e-13)
    for t in (TIMES, TIMES[3]):
        there = at(1.0) * 0 + tau(t) / 4  # of a path with beta = 4
        for mine, other in zip(
            path.moments(t), replace(path, clock=LinearClock(4.0)).moments(there), strict=True
        ):
            close(mine.matrix, other.matrix, 1e-12)
    drift, spread = path.sde(TIMES[3])
    step = 1e-6
    speed = (tau(TIMES[3] + step) - tau(TIMES[3] - step)) / (2 * step)
    close(drift.matrix, speed * path.process.drift.matrix, 1e-7)
    close(spread.matrix.square(), speed * path.process.noise.matrix, 1e-7)


@pytest.mark.parametrize("path", PATHS)
def test_rates_are_the_derivatives_of_mean_and_covariance(path: CriticallyDamped) -> None:
    assert isinstance(path, GaussianPath)
    step = 1e-6
    for t in (0.05, 0.5, 1.0 - step):
        rates = [block.matrix for block in path.rates(number(t))]
        level = path.marginal(number(t))[1].matrix
        (m, c), (m_, c_) = (path.moments(number(t + s)) for s in (-step, step))
        close(rates[0], (m_.matrix - m.matrix) / (2 * step), 1e-6)
        grown = rates[1] @ level.mT
        close(grown + grown.mT, (c_.matrix - c.matrix) / (2 * step), 1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_the_conditional_law_of_hybrid_score_matching_has_the_marginal_of_the_data(
    path: CriticallyDamped,
) -> None:
    score = GaussianScore(path, 1.5)
    scale, cov = path.moments(TIMES)
    position = torch.diag(torch.tensor([1.5**2, 0.0], dtype=torch.float64))
    close(scale.matrix @ position @ scale.matrix.mT + cov.matrix, score.cov(TIMES).matrix, 1e-13)
    # and with the covariance of denoising score matching it has another
    _, wrong = replace(path, v0=0.0).moments(TIMES)
    gap = scale.matrix @ position @ scale.matrix.mT + wrong.matrix - score.cov(TIMES).matrix
    assert float(gap.abs().amax((-2, -1)).min()) > 1e-8
    whole = torch.diag(torch.tensor([1.5**2, path.v0], dtype=torch.float64))
    close(scale.matrix @ whole @ scale.matrix.mT + wrong.matrix, score.cov(TIMES).matrix, 1e-13)


@pytest.mark.parametrize("path", [*PATHS, replace(PATHS[2], clock=LinearClock(1.0, 5.0))])
def test_draws_of_the_path_fit_together(path: CriticallyDamped) -> None:
    """x_s after a bridge from x_t has the law of x_s, in exact moments through unit draws."""
    unit = torch.eye(2).double()[..., None]
    s, t = number(0.3), number(0.8)

    class Fixed(KeyedNoise):
        def normal(self, like: Tensor, tag: str = "") -> Tensor:
            return values[: len(like)].expand_as(like) * (len(like) > 1)

    zero, values = torch.zeros(2, 2, 1).double(), unit
    level = path.sample(zero, t, Fixed(0)).x[..., 0].mT  # columns of the root at t
    close(level @ level.mT, path.moments(t)[1].matrix, 1e-12)
    from_x = path.posterior(torch.eye(2).double()[..., None][:1], zero[:1], t, s, Fixed(0))
    assert from_x.shape == (1, 2, 1)
    columns = [
        path.posterior(e[None], zero[:1], t, s, Fixed(0))[0, :, 0]
        for e in torch.eye(2).double()[..., None]
    ]
    gain = torch.stack(columns, 1)
    spread = path.posterior(zero, zero, t, s, Fixed(0))[..., 0].mT
    back = gain @ path.moments(t)[1].matrix @ gain.mT + spread @ spread.mT
    close(back, path.moments(s)[1].matrix, 1e-12)
    forth = torch.stack(
        [
            path.transition(e[None], s, t, Fixed(0))[0, :, 0]
            for e in torch.eye(2).double()[..., None]
        ],
        1,
    )
    added = path.transition(zero, s, t, Fixed(0))[..., 0].mT
    close(
        forth @ path.moments(s)[1].matrix @ forth.mT + added @ added.mT,
        path.moments(t)[1].matrix,
        1e-12,
    )
    source = path.source(zero, Fixed(0))[..., 0].mT
    close(source @ source.mT, path.stationary.matrix, 1e-12)


# Samplers on Gaussian data: checks 6, 7 and 9


def variance(path: CriticallyDamped, sampler: Sampler, pairs: Tensor, std: float = 1.0) -> float:
    return float(gaussian_law(path, std, sampler, pairs)[0, 0])


def test_sscs_is_exact_for_stationary_data() -> None:
    for path in (
        replace(DOCKHORN, v0=0.25),
        CriticallyDamped(0.7, 0.0, 1.3, LinearClock(1.0, 7.0), v0=1.3**2 / (4 * 0.7)),
    ):
        end = path.stationary.matrix
        for sampler in (SSCS(), SSCS("middle")):
            for pairs in (uniform_grid(1), uniform_grid(7), quadratic_grid(12)):
                law = gaussian_law(path, math.sqrt(float(end[0, 0])), sampler, pairs)
                close(law, end, 1e-12)
    close(variance(replace(DOCKHORN, v0=0.25), EM(), uniform_grid(100)), 1.0434748, 5e-8)


@pytest.mark.parametrize(
    ("path", "sampler", "steps", "wanted"),
    [
        (PATHS[0], EM(), 100, 1.03808286),
        (PATHS[1], EM(), 100, 1.03944777),
        (PATHS[2], EM(), 100, 1.02307618),
        (PATHS[0], SSCS(), 50, 0.99949635),
        (PATHS[0], SSCS(), 100, 1.00095092),
        (PATHS[1], SSCS(), 50, 1.00086469),
        (PATHS[1], SSCS(), 100, 1.00155138),
    ],
)
def test_variances_of_the_brief(
    path: CriticallyDamped, sampler: Sampler, steps: int, wanted: float
) -> None:
    close(variance(path, sampler, uniform_grid(steps)), wanted, 1e-8)
    distance = gaussian_w2(path, 1.0, sampler, uniform_grid(steps), dim=9)
    close(distance, 3 * abs(math.sqrt(wanted) - 1), 3e-8)


@pytest.mark.parametrize(("path", "wanted"), [(PATHS[0], 1.000004), (PATHS[1], 1.000005)])
def test_the_probability_flow_is_wrong_by_mixing_alone(
    path: CriticallyDamped, wanted: float
) -> None:
    score, units = GaussianScore(path, 1.0), torch.eye(2).double()[..., None]
    ends, _ = integrate(score, path, units, 1.0, 1e-6, method="dopri8", rtol=1e-8, atol=1e-8)
    flow = ends[..., 0].mT
    law = flow @ path.stationary.matrix @ flow.mT
    close(law[0, 0], wanted, 2e-6)
    assert abs(variance(path, RK4(), uniform_grid(100)) - float(law[0, 0])) < 3e-5


def test_a_simulation_is_what_the_recursion_says() -> None:
    """The affine maps of `gaussian_law` against `simulate`, in float64 and by their draws."""
    path = CriticallyDamped(1.0, 0.5, clock=LinearClock(2.0, 6.0))
    score, pairs = GaussianScore(path, 0.8), uniform_grid(6)
    for sampler in (EM(), Leapfrog(), SSCS(), EulerMaruyama(0.5)):
        x1 = path.source(torch.empty(20_000, 2, 1, dtype=torch.float64), NOISE)
        x = simulate(x1, pairs, sampler, path, score, NOISE)
        wanted = gaussian_law(path, 0.8, sampler, pairs)[0, 0]
        # a sample variance of n normal values has the relative deviation sqrt(2 / n)
        assert abs(float(x.var() / wanted) - 1) < 5 * math.sqrt(2 / len(x))


@pytest.mark.parametrize("path", [*PATHS, replace(PATHS[2], clock=LinearClock(2.0, 6.0))])
def test_em_is_the_cores_euler_maruyama(path: CriticallyDamped) -> None:
    for pairs in (uniform_grid(10), quadratic_grid(10, end=1e-3)):
        close(
            gaussian_law(path, 0.7, EM(), pairs),
            gaussian_law(path, 0.7, EulerMaruyama(), pairs),
            1e-11,
        )


@pytest.mark.parametrize("sampler", [EM(), Leapfrog(), SSCS(), SSCS("middle")])
@pytest.mark.parametrize("path", [*PATHS, replace(PATHS[1], clock=LinearClock(2.0, 6.0))])
def test_samplers_converge_with_order_one(path: CriticallyDamped, sampler: Sampler) -> None:
    # from the law of x_1 itself: what is left is the discretisation
    start = GaussianScore(path, 0.6).cov(number(1.0)).matrix
    errors = [gaussian_w2(path, 0.6, sampler, uniform_grid(n), start=start) for n in (100, 200)]
    assert errors[1] < 0.05
    assert math.log2(errors[0] / errors[1]) == pytest.approx(1, abs=0.25)


def test_the_error_is_mixing_and_a_discretisation_in_proportion_to_the_step() -> None:
    """Of the reverse SDE from the law S in place of P_1, in the limit of short steps, the end is

        P_0 + G (S - P_1) G^T,   G = P_0 M^T P_1^-1,   S - P_1 = M (S - P_0) M^T,

    since G is how the mean of x_0 depends on x_1. So mixing enters as M twice, exp(-2 a tau(1)) up
    to a polynomial, in the law of x_1, and again in what the reverse process remembers of it.
    """
    remains = []
    for end in (1.0, 2.0, 3.0, 4.0):
        path = CriticallyDamped(1.0, 0.25, clock=LinearClock(end))
        score = GaussianScore(path, 1.0)
        begin, last = (score.cov(number(t)).matrix for t in (0.0, 1.0))
        flow, stays = path.moments(number(1.0))[0].matrix, path.stationary.matrix
        close(stays - last, flow @ (stays - begin) @ flow.mT, 1e-13)
        gain = begin @ flow.mT @ last.inverse()
        mixing = float((gain @ (stays - last) @ gain.mT)[0, 0])
        short, long = (variance(path, SSCS(), uniform_grid(n)) - 1 for n in (100, 50))
        assert 2 * short - long == pytest.approx(mixing, abs=1e-3)  # a term in h drops out
        remains.append(abs(mixing))
    rates = -np.diff(np.log(remains))
    assert (rates[:-1] < rates[1:]).all() and 2 * path.a < rates[-1] < 4 * path.a


def test_epsilon_trades_mixing_for_discretisation() -> None:
    """At a = 1/4 the prior matches the data near epsilon = 0.42; at a = 2 all noise costs steps."""
    slow = [gaussian_w2(CriticallyDamped(0.25, e), 1.0, SSCS(), uniform_grid(50)) for e in (0, 0.5)]
    fast = [gaussian_w2(CriticallyDamped(2.0, e), 1.0, EM(), uniform_grid(50)) for e in (0, 0.5)]
    assert slow[1] < 0.1 * slow[0] and fast[0] < fast[1]
    matched = CriticallyDamped(0.25, math.sqrt((4 * 0.25 - 0.25**2 * 2) / 5))
    close(matched.stationary.matrix[0, 0], 1.0, 1e-12)


# Samplers: how they step


def test_leapfrog_asks_the_score_at_the_start_and_in_the_middle() -> None:
    asked = []

    class Asked(GaussianScore):
        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            asked.append(float(t))
            return super().__call__(x, t)

    path = CriticallyDamped(1.0, 0.5)
    start = path.source(torch.empty(3, 2, 1).double(), NOISE)
    for sampler, times in (
        (Leapfrog(), [1.0, 0.75, 0.5, 0.25]),
        (SSCS(), [1.0, 0.5]),
        (SSCS("middle"), [0.75, 0.25]),
        (EM(), [1.0, 0.5]),
    ):
        asked.clear()
        simulate(start, uniform_grid(2), sampler, path, Asked(path, 1.0), NOISE)
        assert asked == times


def test_the_last_step_takes_noise_off() -> None:
    path, pairs = CriticallyDamped(1.0, 0.5), uniform_grid(50, end=1e-3)
    left = torch.cat([pairs, torch.tensor([[1e-3, 0.0]], dtype=torch.float64)])
    for sampler in (EM(), SSCS(), Leapfrog()):
        law = gaussian_law(path, 1.0, sampler, pairs)
        score = GaussianScore(path, 1.0)
        drift, spread = (block.matrix for block in path.sde(number(1e-3)))
        pull = drift + spread @ spread @ score.cov(number(1e-3)).matrix.inverse()
        step = torch.eye(2) - 1e-3 * pull
        close(gaussian_law(path, 1.0, Denoised(sampler), left), step @ law @ step.mT, 1e-13)


@pytest.mark.parametrize("sampler", [EM(), Leapfrog(), SSCS(), Denoised(EM())])
def test_samplers_refuse_other_paths_and_rising_pairs(sampler: Sampler) -> None:
    path, x = CriticallyDamped(), torch.zeros(2, 2, 1)
    score: Any = GaussianScore(path, 1.0)
    for pairs in (uniform_grid(2, start=0.0, end=1.0), torch.tensor([[0.0, 0.0]])):
        with pytest.raises(ValueError, match="takes pairs that fall"):
            simulate(x, pairs.double(), sampler, path, score, NOISE)
    with pytest.raises(TypeError, match="needs a CriticallyDamped path, got Linear"):
        simulate(x, torch.tensor([[1.0, 0.0]]), sampler, Linear(), score, NOISE)


def test_the_recursion_refuses_what_is_no_affine_map() -> None:
    class Remembers(EM):
        def start(self, x: Tensor) -> Any:
            return x

    class Draws(EM):
        def step(self, x: Tensor, memory: Any, run: Any) -> Any:
            for k in range(5):
                x = x + run.noise.normal(x, str(k))
            return x, memory, None

    class Uniforms(EM):
        def step(self, x: Tensor, memory: Any, run: Any) -> Any:
            return run.noise.uniform(x), memory, None

    path, pairs = CriticallyDamped(), uniform_grid(2)
    for sampler, message in (
        (Remembers(), "has a memory"),
        (Draws(), "more than 4 draws"),
        (Uniforms(), "draws uniforms"),
    ):
        with pytest.raises(ValueError, match=message):
            gaussian_law(path, 1.0, sampler, pairs)
    with pytest.raises(ValueError, match="std must be positive"):
        gaussian_w2(path, 0.0, EM(), pairs)


# The score and its field


@pytest.mark.parametrize("a", [0.25, 2.0])
def test_the_momentum_part_of_a_score_determines_the_rest(a: float) -> None:
    path = CriticallyDamped(a)
    score = GaussianScore(path, 0.7)
    field = NetworkScore(Exact(score), path)
    clean = convert(field, "clean", path)
    u = normal(7, 2, 3)
    for t in (0.01, 0.3, 1.0):
        exact = score(u, number(t))
        close(field(u, number(t)), exact, 1e-8, rtol=1e-8)
        times = torch.full((7,), t, dtype=torch.float64)
        close(field(u, times), exact, 1e-8, rtol=1e-8)
        scale, cov = path.moments(number(t))
        # E[x_0 | U], and no momentum
        prior = torch.diag(torch.tensor([0.7**2, 0.0], dtype=torch.float64))
        gain = prior @ scale.matrix.mT @ score.cov(number(t)).matrix.inverse()
        wanted = torch.einsum("ij,bjk->bik", gain, u)
        close(clean(u, number(t)), wanted, 1e-7)
    assert bool(field(u, number(0.0)).isfinite().all())


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
@pytest.mark.parametrize("output", ["noise", "mixed"])
def test_outputs_stand_for_scores(epsilon: float, output: Any) -> None:
    path = CriticallyDamped(1.0, epsilon)
    value, u = normal(5, 2 if epsilon else 1, 3, tag="value"), normal(5, 2, 3)

    class Fixed(nn.Module):
        def forward(self, u: Tensor, t: Tensor) -> Tensor:
            return value.flatten(1)

    t = torch.linspace(0.1, 1, 5, dtype=torch.float64)
    field = NetworkScore(Fixed(), path, output, jitter=1e-6)
    cov = path.moments(t)[1].matrix + 1e-6 * torch.eye(2)
    noise = value if epsilon else torch.cat([torch.zeros_like(value), value], 1)
    wanted = -torch.linalg.solve(torch.linalg.cholesky(cov).mT, noise)
    if output == "mixed":
        wanted[:, 1] -= u[:, 1] / cov[:, 1, 1, None]
    close(field(u, t)[:, 1], wanted[:, 1], 1e-10)
    if epsilon:
        close(field(u, t), wanted, 1e-9)


def test_every_sampler_of_the_core_that_takes_matrices_works_on_the_field() -> None:
    """The learned field, here the exact one of a network that gives the momentum part alone."""
    path = CriticallyDamped(1.0)
    score = GaussianScore(path, 0.8)
    field = NetworkScore(Exact(score), path)
    x1 = path.source(torch.empty(4, 2, 3).double(), NOISE)
    pairs = uniform_grid(10)
    for sampler in (Heun(), RK4(), Euler(), EulerMaruyama(), EM(), Leapfrog(), SSCS()):
        ours = simulate(x1, pairs, sampler, path, field, NOISE)
        close(ours, simulate(x1, pairs, sampler, path, score, NOISE), 1e-6)
    samples = [
        simulate(x1, pairs, Ancestral(), path, convert(f, "clean", path), NOISE)
        for f in (field, score)
    ]
    close(*samples, 1e-6)
    assert samples[0].shape == (4, 3)
    ends = [integrate(f, path, x1, 1.0, 1e-3)[0] for f in (field, score)]
    close(*ends, 1e-6)


def test_steering_moves_the_clean_end() -> None:
    """The clean prediction is set to a point, and the samples go there."""

    class Point(Steering):
        def clean(self, clean: Any, x: Any, aim: Any, run: Any) -> Tensor:
            return path.state(torch.full_like(clean[:, 0], 2.0))

    path = CriticallyDamped(1.0)
    field = NetworkScore(Exact(GaussianScore(path, 1.0)), path)
    x1 = path.source(torch.empty(50, 2, 3).double(), NOISE)
    for sampler in (EM(), SSCS(), Leapfrog()):
        x = simulate(x1, quadratic_grid(50), sampler, path, field, NOISE, Point())
        close(x, torch.full_like(x, 2.0), 0.2)


# Objectives: check 8 and the losses of the official code


def loss_of(model: CriticallyDampedLangevin, x: Tensor, noise: Any = NOISE) -> float:
    with torch.no_grad():
        return float(model.loss(x, noise=noise)["loss"])


def floor(score: GaussianScore, dim: int, hybrid: bool = True) -> float:
    """The least loss there is: the variance of the target given the state, over t in [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    t = torch.from_numpy((nodes + 1) / 2)
    path = score.path if hybrid else replace(score.path, v0=0.0)
    cov = path.moments(t)[1].matrix
    gap = cov.inverse() - score.cov(t).matrix.inverse()
    det = torch.linalg.det(cov)
    if path.epsilon:
        values = gap.diagonal(dim1=-2, dim2=-1).sum(-1) * (det if hybrid else 1)
    else:
        values = gap[:, 1, 1] * (det / cov[:, 0, 0] if hybrid else 1)
    return dim * float(values @ torch.from_numpy(weights / 2))


@pytest.mark.parametrize("path", [DOCKHORN, CriticallyDamped(0.5), CriticallyDamped(1.0, 0.5)])
def test_the_exact_score_has_the_least_loss_and_a_shift_costs_its_weight(
    path: CriticallyDamped,
) -> None:
    rows, dim = 60_000, 2
    score = GaussianScore(path, 0.8)
    x = 0.8 * normal(rows, dim, tag="data")
    exact, up, down = (
        CriticallyDampedLangevin(Exact(score, shift), path=path, times=Uniform(), jitter=0.0)
        for shift in (0.0, 0.5, -0.5)
    )
    with torch.no_grad():
        terms = exact.loss(x, noise=NOISE)
    deviation = float(terms["error"].std()) / math.sqrt(rows)
    assert abs(float(terms["loss"]) - floor(score, dim)) < 5 * deviation
    # what is linear in the shift drops out of the mean of both
    rise = (loss_of(up, x) + loss_of(down, x)) / 2 - float(terms["loss"])
    t = torch.linspace(0, 1, 20_001, dtype=torch.float64)[1:]
    cov = path.moments(t)[1].matrix
    det = torch.linalg.det(cov)
    weight = float((det if path.epsilon else det / cov[:, 0, 0]).mean())
    parts = 2 if path.epsilon else 1
    assert rise == pytest.approx(weight * 0.25 * dim * parts, rel=0.02)


def test_losses_are_those_of_the_official_code() -> None:
    x, t = normal(6, 3, tag="x"), torch.linspace(0.05, 1, 6, dtype=torch.float64)

    def times(like: Tensor, noise: Any, tag: str = "time") -> Tensor:
        return t

    class Linear_(nn.Module):
        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(normal(outputs, 6, tag="weight"))

        def forward(self, u: Tensor, t: Tensor) -> Tensor:
            return u @ self.weight.T + t[:, None]

    for epsilon in (0.0, 0.5):
        network = Linear_(6 if epsilon else 3)
        path = CriticallyDamped(1.0, epsilon)
        model = CriticallyDampedLangevin(network, path=path, times=times)
        flow, cov = (block.matrix for block in path.moments(t))
        cov = cov + 1e-6 * torch.eye(2)
        root = torch.linalg.cholesky(cov)
        r = NOISE.normal(torch.empty(6, 2, 3).double(), "source")
        added = root @ r
        u = flow[:, :, :1] * x[:, None] + added
        score = network(u.flatten(1), t)
        det = torch.linalg.det(cov)
        if epsilon:
            error = score.unflatten(1, (2, 3)) + cov.inverse() @ added
            wanted = det * error.square().sum((1, 2))
        else:
            spread = (det / cov[:, 0, 0]).sqrt()[:, None]
            wanted = (spread * score + r[:, 1]).square().sum(1)
        terms = model.loss(x, noise=NOISE)
        close(terms["error"].detach(), wanted.detach(), 1e-9, rtol=1e-9)
        close(terms["loss"].detach(), wanted.mean().detach(), 1e-9, rtol=1e-9)

        # denoising score matching: the momentum is given, and nothing is weighed
        model = CriticallyDampedLangevin(network, path=path, times=times, matching="denoising")
        cov = replace(path, v0=0.0).moments(t)[1].matrix + 1e-6 * torch.eye(2)
        v = 0.1 * NOISE.normal(x, "momentum")
        added = torch.linalg.cholesky(cov) @ r
        u = flow @ torch.stack([x, v], 1) + added
        target = -cov.inverse() @ added
        if not epsilon:
            target = -r[:, 1:] / torch.linalg.cholesky(cov)[:, 1:, 1:]
        error = network(u.flatten(1), t).unflatten(1, (-1, 3)) - target
        terms = model.loss(x, noise=NOISE)
        close(terms["error"].detach(), error.detach().square().sum((1, 2)), 0.0, rtol=1e-8)


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_denoising_has_the_same_minimum(epsilon: float) -> None:
    path = CriticallyDamped(1.0, epsilon)
    score = GaussianScore(path, 0.8)
    x = 0.8 * normal(60_000, 1, tag="data")
    times = Uniform(0.2, 1.0)  # an error without weight has no mean at 0
    models = [
        CriticallyDampedLangevin(
            Exact(score, shift), path=path, times=times, matching="denoising", jitter=0.0
        )
        for shift in (0.0, 0.2, -0.2)
    ]
    exact, up, down = (loss_of(model, x) for model in models)
    parts = 2 if epsilon else 1
    assert (up + down) / 2 - exact == pytest.approx(0.04 * parts, rel=1e-6)
    # at the minimum the slope is 0, up to the deviation of 60,000 rows
    assert abs(up - down) / 0.4 < 5 * 2 * math.sqrt(exact / 60_000)


def test_single_precision_is_finite_at_the_earliest_times() -> None:
    def times(like: Tensor, noise: Any, tag: str = "time") -> Tensor:
        return torch.full((len(like),), 1e-5, dtype=like.dtype)

    for path in (CriticallyDamped(0.1), CriticallyDamped(2.0, v0=0.0), CriticallyDamped(0.1, 0.1)):
        for output in ("score", "noise", "mixed"):
            network = ResidualMLP(inputs=4, outputs=4 if path.epsilon else 2, width=8, depth=1)
            model = CriticallyDampedLangevin(
                network, path=path, output=output, times=times, jitter=1e-9
            )
            loss = model.loss(normal(50, 2).float(), noise=NOISE)["loss"]
            loss.backward()
            assert bool(loss.detach().isfinite())
            assert all(bool(p.grad.isfinite().all()) for p in network.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_arithmetic_beside_a_network_in_half_precision_is_not(dtype: torch.dtype) -> None:
    def times(like: Tensor, noise: Any, tag: str = "time") -> Tensor:
        return torch.full((len(like),), 1e-5, dtype=like.dtype)

    class Half(nn.Module):
        def __init__(self, outputs: int) -> None:
            super().__init__()
            self.unused, self.outputs = nn.Parameter(torch.zeros(())), outputs

        def forward(self, u: Tensor, t: Tensor) -> Tensor:
            assert u.dtype == t.dtype == torch.float32
            return u[:, : self.outputs].to(torch.float16)

    x = normal(50, 2).float()
    for epsilon in (0.0, 0.1):
        for output in ("score", "noise", "mixed"):
            model = CriticallyDampedLangevin(
                Half(4 if epsilon else 2),
                path=CriticallyDamped(1.0, epsilon),
                output=output,
                times=times,
                jitter=1e-9,
            )
            wanted = loss_of(model, x)
            with torch.autocast("cpu", dtype):
                assert loss_of(model, x) == wanted < math.inf


def test_the_cores_objective_trains_on_the_path() -> None:
    path = CriticallyDamped(1.0, 0.5)
    score = GaussianScore(path, 0.8)

    class Whole(nn.Module):
        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return score(x, t)

    matching = Matching(Whole(), path, predicts="score", times=Uniform(0.2, 1.0))
    states = path.state(0.8 * normal(60_000, 1, tag="data"))
    terms = matching({"x": states}, NOISE)
    nodes, weights = np.polynomial.legendre.leggauss(64)
    t = torch.from_numpy(0.6 + 0.4 * nodes)
    gap = path.moments(t)[1].matrix.inverse() - score.cov(t).matrix.inverse()
    wanted = float(gap.diagonal(dim1=-2, dim2=-1).mean(-1) @ torch.from_numpy(weights / 2))
    deviation = float(terms["error"].std()) / math.sqrt(len(states))
    assert abs(float(terms["loss"]) - wanted) < 5 * deviation


# The model: training, sampling, files


def small(epsilon: float = 0.0, **options: Any) -> CriticallyDampedLangevin:
    network = ResidualMLP(inputs=4, outputs=4 if epsilon else 2, width=32, depth=2)
    path = CriticallyDamped(1.0, epsilon)
    return CriticallyDampedLangevin(network, path=path, **{"shape": (2,), **options})


def points(rows: int = 500) -> Tensor:
    """Two clusters, of mean 0 and variance 1 along the first coordinate."""
    x = 0.3 * normal(rows, 2, tag="points").float()
    x[:, 0] += torch.where(torch.arange(rows) % 2 == 0, 0.95, -0.95)
    return x


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_a_model_learns_two_clusters(epsilon: float) -> None:
    model = small(epsilon, output="noise").fit(
        points(), steps=300, batch_size=128, lr=5e-3, ema=0.98, progress=False
    )
    for sampler, steps in ((EM(), 100), (SSCS(), 50)):
        x = model.sample(400, noise=NOISE, sampler=sampler, steps=steps)
        sides = x[:, 0].abs()
        assert float((sides < 0.3).float().mean()) < 0.16  # 0.24 of a normal
        assert abs(float(sides.mean()) - 0.95) < 0.1
        assert abs(float((x[:, 0] > 0).float().mean()) - 0.5) < 0.12
        assert abs(float(x[:, 1].std()) - 0.3) < 0.1


def test_training_is_deterministic_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def fit(**options: Any) -> dict[str, Tensor]:
        model = small(0.5).fit(
            points(64),
            steps=6,
            batch_size=16,
            ema=0.9,
            checkpoint_every=3,
            progress=False,
            **options,
        )
        return model.state_dict()

    class Stop(Exception):
        pass

    model = small(0.5)
    calls = 0

    def interrupted(batch: Any, noise: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise Stop
        return CriticallyDampedLangevin.forward(model, batch, noise)

    model.forward = interrupted  # type: ignore[method-assign]
    with pytest.raises(Stop):
        model.fit(
            points(64),
            steps=6,
            batch_size=16,
            ema=0.9,
            checkpoint_every=3,
            progress=False,
            out=tmp_path / "run",
        )
    whole, resumed = fit(), fit(out=tmp_path / "run")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_samples_depend_on_their_row_alone() -> None:
    path = CriticallyDamped(1.0)
    model = CriticallyDampedLangevin(Exact(GaussianScore(path, 1.0)), path=path, shape=(2,))
    options: dict[str, Any] = {"noise": NOISE, "steps": 5}
    whole = model.sample(7, **options)
    assert whole.shape == (7, 2) and whole.dtype == torch.float64
    torch.testing.assert_close(whole, model.sample(7, batch_size=3, **options))
    rows = torch.arange(2, 7)
    torch.testing.assert_close(whole[2:], model.sample(5, noise=NOISE.rows(rows), steps=5))
    both = model.sample(7, momentum=True, **options)
    assert both.shape == (7, 2, 2) and torch.equal(both[:, 0], whole)
    given = path.source(torch.empty(7, 2, 2).double(), NOISE)
    assert torch.equal(model.sample(7, x1=given, **options), whole)
    assert not torch.equal(model.sample(7, noise=KeyedNoise(6), steps=5), whole)
    assert model.sample(0, **options).shape == (0, 2)
    grid = quadratic_grid(5, end=1e-3)
    left = model.sample(7, noise=NOISE, grid=grid)
    ended = model.sample(7, noise=NOISE, grid=grid, denoise=True)
    assert left.isfinite().all() and 0 < float((left - ended).abs().max()) < 0.2
    early = model.sample(7, noise=NOISE, steps=5, t_min=0.2)
    assert torch.equal(early, model.sample(7, noise=NOISE, grid=uniform_grid(5, end=0.2)))


def test_images_have_their_channels_side_by_side() -> None:
    class Record(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))
            self.shapes: set[tuple[int, ...]] = set()

        def forward(self, u: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
            self.shapes.add(tuple(u.shape))
            self.label = label
            return -self.weight * u

    network = Record()
    path = CriticallyDamped(2.0, 0.25)
    model = CriticallyDampedLangevin(network, path=path, jitter=1e-9)
    images = normal(9, 3, 4, 4).float()
    labels = torch.arange(9) % 3
    model.fit(images, labels, steps=1, batch_size=8, progress=False)
    assert network.shapes == {(8, 6, 4, 4)} and network.label is not None
    x = model.sample(5, noise=NOISE, steps=2, label=torch.tensor([0, 1, 2, 0, 1]), batch_size=2)
    assert x.shape == (5, 3, 4, 4) and network.label.tolist() == [1]
    model.sample(5, noise=NOISE, steps=1, label=2)
    assert network.label.shape == ()


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    data = Format("arrays", (2,), shift=(3.0, -1.0), scale=(2.0, 0.5))
    for epsilon, options in (
        (0.0, {"output": "mixed", "jitter": 0.0}),
        (0.5, {"matching": "denoising", "times": Uniform(1e-3, 1.0), "format": data}),
    ):
        model = small(epsilon, **options)
        clock = LinearClock(1.0, 7.0) if epsilon else LinearClock(3.0)
        model.path = replace(model.path, clock=clock)
        model.fit(
            data.decode(points(40)) if epsilon else points(40),
            steps=2,
            progress=False,
            batch_size=8,
        )
        file = tmp_path / f"{epsilon}.safetensors"
        model.save(file)
        with pytest.raises(FileExistsError):
            model.save(file)
        wanted = model.sample(3, noise=NOISE, steps=3)
        for loaded in (CriticallyDampedLangevin.load(file), fluvial.load(file)):
            assert isinstance(loaded, CriticallyDampedLangevin) and not loaded.training
            assert loaded.path == model.path and loaded.field.matching == model.field.matching
            assert loaded._options() == model._options() and loaded.format == model.format
            assert torch.equal(loaded.sample(3, noise=NOISE, steps=3), wanted)
        assert loaded.use.system == "critically-damped-langevin"
        again = tmp_path / f"{epsilon}-again.safetensors"
        loaded.save(again)
        assert load_model(again)[1] == load_model(file)[1]


def test_files_with_other_networks(tmp_path: Path) -> None:
    ours = CriticallyDampedLangevin(
        MLP(shape=(4,), width=8, depth=1), path=CriticallyDamped(1.0, 0.5), shape=(2,)
    )
    ours.save(tmp_path / "ours.safetensors")
    loaded = fluvial.load(tmp_path / "ours.safetensors")
    assert loaded.sample(2, noise=NOISE, steps=2).shape == (2, 2)

    theirs = CriticallyDampedLangevin(nn.Linear(4, 2), shape=(2,))
    theirs.save(tmp_path / "theirs.safetensors")
    with pytest.raises(ValueError, match="build it as it was"):
        fluvial.load(tmp_path / "theirs.safetensors")
    with pytest.raises(ValueError, match="do not fit the network"):
        CriticallyDampedLangevin.load(tmp_path / "theirs.safetensors", network=nn.Linear(4, 4))
    fluvial.load(tmp_path / "theirs.safetensors", network=nn.Linear(4, 2))

    other = small()
    other.path = CriticallyDamped(clock=SpeedClock(lambda t: 1 + t))
    with pytest.raises(ValueError, match="clock is a SpeedClock, which a file cannot hold"):
        other.save(tmp_path / "clock.safetensors")
    other = small(times=lambda like, noise, tag="time": noise.uniform(like[:, 0]))
    other.fit(points(20), steps=1, batch_size=8, progress=False)
    with pytest.raises(ValueError, match="times is a function, which a file cannot hold"):
        other.save(tmp_path / "times.safetensors")
    with pytest.raises(FileNotFoundError):
        CriticallyDampedLangevin.load(tmp_path / "none.safetensors")


def test_the_command_line_samples(tmp_path: Path) -> None:
    data = Format("table", (2,), shift=(3.0, -1.0), scale=(2.0, 0.5), columns=("a", "b"))
    model = small(format=data)
    model.save(tmp_path / "model.safetensors")
    out = tmp_path / "samples.csv"
    arguments = [str(tmp_path / "model.safetensors"), "--n", "5", "--steps", "3", "--quiet"]
    assert cli(["sample", *arguments, "--out", str(out), "--device", "cpu"]) == 0
    table = np.loadtxt(out, delimiter=",", skiprows=1)
    wanted = data.decode(model.sample(5, noise=KeyedNoise(0), steps=3))
    np.testing.assert_allclose(table, wanted.numpy(), rtol=1e-5)


# The network


def test_the_network_is_the_official_one() -> None:
    network = ResidualMLP(inputs=4, outputs=2, width=6, depth=2, seed=3).double()
    x, t = normal(5, 4), torch.linspace(0, 1, 5, dtype=torch.float64)
    w = torch.exp(-math.log(10_000.0) * torch.arange(3) / 2).double()
    close(network.rates, w, 1e-7)
    angles = t[:, None] * network.rates
    e = torch.relu(torch.cat([angles.sin(), angles.cos()], 1) @ network.time.weight.T)
    h = x @ network.embed.weight.T + network.embed.bias
    for layer, shift in zip(network.layers, network.shifts, strict=True):
        h = h + torch.relu(h @ layer.weight.T + layer.bias + e @ shift.weight.T + shift.bias)
    wanted = h @ network.out.weight.T + network.out.bias
    close(network(x, t).detach(), wanted.detach(), 1e-12)
    assert network.time.bias is None
    scaled = ResidualMLP(inputs=4, outputs=2, width=6, depth=2, seed=3, time_scale=1000).double()
    close(scaled(x, t / 1000).detach(), wanted.detach(), 1e-6)
    assert torch.equal(
        ResidualMLP(inputs=4, outputs=2, width=6, seed=3).embed.weight.double(),
        network.embed.weight,
    )


def test_the_whole_score_costs_one_layer_more() -> None:
    """Two networks, as in the official code, would cost twice as much."""
    half, whole = (
        sum(p.numel() for p in ResidualMLP(inputs=20, outputs=n, width=256).parameters())
        for n in (10, 20)
    )
    assert 1 < whole / half < 1.01


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"a": 0.0}, "a must be positive and finite, got 0.0"),
        ({"a": math.nan}, "a must be positive"),
        ({"sigma": 0.0}, "sigma must be positive"),
        ({"epsilon": -0.1}, "epsilon must be finite and not negative, got -0.1"),
        ({"epsilon": math.inf}, "epsilon must be finite"),
        ({"v0": -1.0}, "v0 must be finite and not negative"),
    ],
)
def test_processes_that_there_are_not(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CriticallyDamped(**options)


@pytest.mark.parametrize("clock", [4.0, lambda t: 4 * t])
def test_clocks_that_there_are_not(clock: Any) -> None:
    with pytest.raises(TypeError, match=r"clock must give tau\(t\) and its rate, such as Linear"):
        CriticallyDamped(clock=clock)


@pytest.mark.parametrize("beta", [lambda t: -t, lambda t: 1 / t, lambda t: torch.ones(3)])
def test_speeds_that_there_are_not(beta: Any) -> None:
    with pytest.raises(ValueError, match="beta_of must map"):
        SpeedClock(beta)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "velocity"}, "output must be 'score', 'noise' or 'mixed', got 'velocity'"),
        ({"matching": "sliced"}, "matching must be 'hybrid' or 'denoising', got 'sliced'"),
        ({"jitter": -1.0}, "jitter must be finite and not negative"),
        ({"format": Format("arrays", (3,))}, r"shape is \(2,\) and that of format \(3,\)"),
    ],
)
def test_models_that_there_are_not(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_networks_that_do_not_fit() -> None:
    for epsilon, outputs, wanted in ((0.0, 4, "1 x 2"), (0.5, 2, "2 x 2")):
        network = ResidualMLP(inputs=4, outputs=outputs, width=8)
        model = CriticallyDampedLangevin(network, path=CriticallyDamped(1.0, epsilon), shape=(2,))
        with pytest.raises(ValueError, match=f"must return {wanted} numbers"):
            model.loss(points(5), noise=NOISE)
        with pytest.raises(ValueError, match=f"must return {wanted} numbers"):
            model.sample(2, noise=NOISE, steps=1)
    with pytest.raises(ValueError, match=r"x must have shape \(batch, 4\)"):
        ResidualMLP(inputs=4, outputs=2)(torch.zeros(3, 5), torch.zeros(3))
    for options in ({"inputs": 0}, {"width": 5}, {"width": 2}, {"depth": 0}):
        with pytest.raises(ValueError, match="an even width"):
            ResidualMLP(**{"inputs": 4, "outputs": 2, **options})
    with pytest.raises(ValueError, match="time_scale must be positive"):
        ResidualMLP(inputs=4, outputs=2, time_scale=0.0)


def test_data_that_do_not_fit() -> None:
    model, x = small(), points(5)
    bad = x.clone()
    bad[3, 1] = math.nan
    for value, error, message in (
        (x.numpy(), TypeError, "x0 must be a tensor, got ndarray"),
        (x.double(), TypeError, "x0 is torch.float64 and the network torch.float32"),
        (x[:, :1], ValueError, r"x0 must have shape \(batch, 2\), got \(5, 1\)"),
        (x[:0], ValueError, "x0 needs rows"),
        (x[:, 0], ValueError, "x0 needs rows and an event shape"),
        (bad, ValueError, "not finite"),
    ):
        with pytest.raises(error, match=message):
            model.loss(value, noise=NOISE)
        with pytest.raises(error, match=message):
            model.fit(value, steps=1, progress=False)
    encoded = small(format=Format("arrays", (2,)))
    with pytest.raises(TypeError, match="x0 is torch.float64 and the network torch.float32"):
        encoded.loss(x.double(), noise=NOISE)
    with pytest.raises(ValueError, match="in row 3 first"):
        model.fit(bad, steps=1, progress=False)
    with pytest.raises(ValueError, match="label must be a tensor"):
        model.fit(x, torch.zeros(4), steps=1, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num": -1}, "num >= 0"),
        ({"batch_size": 0}, "batch_size >= 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"t_min": 1.0}, "grid must fall from 1"),
        ({"t_min": -0.5}, "must lie in"),
        ({"grid": uniform_grid(3, start=0.5)}, "grid must fall from 1"),
        ({"grid": uniform_grid(3, start=0.0, end=1.0)}, "grid must fall from 1"),
        ({"denoise": True}, "denoise needs a grid that ends above 0"),
        ({"x1": torch.zeros(3, 2)}, r"x1 must have shape \(3, 2, 2\), got \(3, 2\)"),
        ({"x1": torch.full((3, 2, 2), math.nan)}, "x1 holds values that are not finite"),
        ({"label": torch.zeros(2)}, r"label must be a number or \(3, ...\), got shape \(2,\)"),
    ],
)
def test_samples_that_cannot_be_drawn(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small().sample(**{"num": 3, "noise": NOISE, "steps": 2, **options})


def test_a_model_that_does_not_know_its_shape() -> None:
    with pytest.raises(ValueError, match="the event's shape is unknown"):
        small(shape=None).sample(1, noise=NOISE)


def test_score_times_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="score_at must be 'start' or 'middle', got 'end'"):
        SSCS("end")  # type: ignore[arg-type]


def test_paths_are_values() -> None:
    path = CriticallyDamped(1.0, 0.5)
    path.moments(TIMES)
    copy = pickle.loads(pickle.dumps(path))
    assert copy == path and hash(copy) == hash(path)
    close(copy.moments(TIMES)[1].matrix, path.moments(TIMES)[1].matrix, 0.0)
    with pytest.raises(ValueError, match="'clean', 'noise', 'velocity' and 'score', got 'drift'"):
        path.sample(normal(2, 2, 1), number(0.5), NOISE).target("drift")
