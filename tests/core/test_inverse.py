"""Solvers of linear inverse problems, where the posterior of a Gaussian is known."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from fluvial.core.gaussian.fields import KINDS, convert
from fluvial.core.gaussian.multistep import DDIM, DPMSolver, UniPC
from fluvial.core.gaussian.ode import RK4, Euler, Heun, Midpoint
from fluvial.core.gaussian.paths import VE, AlphaSigmaPath, Linear, VPCosine, VPLinear
from fluvial.core.gaussian.sde import EDMHeun, EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Run, Steering
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.steering.inverse import (
    DDNM,
    DPS,
    DDNMPlus,
    PiGDM,
    RePaint,
    _conjugate_gradients,
    resampled,
)
from fluvial.core.time import check_pairs, uniform_grid

from .toys import ALARM, BlockField, BlockGaussian, Constant, Counting, VectorGaussian

NOISE = KeyedNoise(3)
SIZE, STD = 4, 0.8
MEAN = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
X = NOISE.normal(torch.empty(5, SIZE, dtype=torch.float64))


def name(value: Any) -> str:
    return value if isinstance(value, str) else type(value).__name__


def time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def assert_close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class Dense:
    matrix: Tensor

    def A(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T.to(x)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return y @ self.matrix.to(y)

    def A_dagger(self, y: Tensor) -> Tensor:
        return y @ torch.linalg.pinv(self.matrix).T.to(y)


@dataclass(frozen=True)
class Masked:
    seen: Tensor

    def A(self, x: Tensor) -> Tensor:
        return x[:, self.seen]

    def A_adjoint(self, y: Tensor) -> Tensor:
        out = y.new_zeros(len(y), SIZE)
        out[:, self.seen] = y
        return out

    A_dagger = A_adjoint


@dataclass(frozen=True)
class Pool:
    """Means of neighbouring pairs: singular values 1 / sqrt(2)."""

    def A(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, 2)).mean(2)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return y.repeat_interleave(2, 1) / 2

    def A_dagger(self, y: Tensor) -> Tensor:
        return y.repeat_interleave(2, 1)


DENSE = Dense(NOISE.normal(torch.empty(3, SIZE, dtype=torch.float64), "A"))
FLAT = Dense(DENSE.matrix[[0, 1, 0]])  # of rank 2
MASK = Masked(torch.tensor([0, 2]))
CASES = [
    (DENSE, torch.tensor([[1.0, -0.5, 0.3]], dtype=torch.float64)),
    (FLAT, torch.tensor([[1.0, -0.5, 1.0]], dtype=torch.float64)),
    (MASK, torch.tensor([[1.5, 1.0]], dtype=torch.float64)),
    (Pool(), torch.tensor([[0.7, -0.2]], dtype=torch.float64)),
]


def toy(path: AlphaSigmaPath, kind: str = "clean") -> VectorGaussian:
    return VectorGaussian(path, MEAN, torch.full((SIZE,), STD, dtype=torch.float64), kind)


def matrix(operator: Any) -> Tensor:
    return operator.A(torch.eye(SIZE, dtype=torch.float64)).T


def posterior(operator: Any, y: Tensor, obs_noise: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of p(x_0 | y), by the gain of the prediction."""
    a = matrix(operator)
    gram = STD**2 * a @ a.T + obs_noise**2 * torch.eye(len(a), dtype=torch.float64)
    gain = STD**2 * a.T @ torch.linalg.pinv(gram, rtol=1e-12)
    mean = MEAN + gain @ (y[0] - a @ MEAN)
    return mean, STD**2 * (torch.eye(SIZE, dtype=torch.float64) - gain @ a)


def posterior_clean(
    path: AlphaSigmaPath, operator: Any, y: Tensor, obs_noise: float, x: Tensor, t: Tensor
) -> Tensor:
    """E[x_0 | x_t = x, y] in closed form."""
    mean, cov = posterior(operator, y, obs_noise)
    alpha, sigma = path.alpha(t), path.sigma(t)
    gain = (
        alpha
        * cov
        @ torch.linalg.inv(alpha**2 * cov + sigma**2 * torch.eye(SIZE, dtype=torch.float64))
    )
    return mean + (x - alpha * mean) @ gain.T


def run_at(path: Any, field: Any, t: float, steer: Steering, s: float = 0.1) -> Run:
    return Run(path, field, NOISE, 0, time(t), time(s), {}, steer, steer.start(X))


def pushed(path: AlphaSigmaPath, steer: Steering, steps: int, start: float = 1.0) -> Any:
    """Mean and covariance of what Heun's method makes of the source: all maps here are affine."""
    basis = torch.cat([torch.zeros(1, SIZE), torch.eye(SIZE)]).double()
    x = simulate(
        path.sigma(time(1.0)) * basis, uniform_grid(steps, start), Heun(), path,
        toy(path, "velocity"), NOISE, steer,
    )  # fmt: skip
    linear = (x[1:] - x[:1]).T
    return x[0], linear @ linear.T


# PiGDM


@pytest.mark.parametrize("path", [Linear(), VPLinear(), VE(0.1, 5.0)], ids=name)
@pytest.mark.parametrize(("operator", "y"), CASES, ids=name)
@pytest.mark.parametrize("obs_noise", [0.0, 0.1, 1.0])
def test_pigdm_is_exact_for_isotropic_gaussians(
    path: AlphaSigmaPath, operator: Any, y: Tensor, obs_noise: float
) -> None:
    """The clean prediction is that under the posterior, at every time."""
    steer = PiGDM(operator, y, obs_noise, std=STD)
    for kind in KINDS:
        field = steer.bend(toy(path, kind))
        for t in (0.05, 0.5, 0.95):
            clean = toy(path)(X, time(t))
            out = steer.clean(clean, X, {}, run_at(path, field, t, steer))
            assert_close(out, posterior_clean(path, operator, y, obs_noise, X, time(t)), 1e-8)


@pytest.mark.parametrize(("path", "obs_noise"), [(Linear(), 0.1), (VPCosine(), 0.5)], ids=name)
def test_pigdm_samples_the_posterior(path: AlphaSigmaPath, obs_noise: float) -> None:
    operator, y = CASES[0]
    mean, cov = posterior(operator, y, obs_noise)
    errors = []
    for steps in (16, 32):
        ours = pushed(path, PiGDM(operator, y, obs_noise, std=STD), steps)
        errors.append(max(float((ours[0] - mean).abs().max()), float((ours[1] - cov).abs().max())))
    assert errors[1] < 2e-3 and 3 < errors[0] / errors[1] < 5  # of order two, from pure noise on


def test_pigdm_without_noise_satisfies_the_measurement_in_the_limit() -> None:
    operator, y = CASES[0]
    errors = []
    for steps in (16, 32):
        mean, cov = pushed(VPCosine(), PiGDM(operator, y, std=STD), steps)
        errors.append(float((operator.A(mean[None]) - y).abs().max()))
    assert errors[1] < 2e-3 and errors[0] / errors[1] > 3
    a = matrix(operator)
    assert (a @ cov @ a.T).abs().max() < 1e-6


def test_conjugate_gradients() -> None:
    a = NOISE.normal(torch.empty(6, 6, dtype=torch.float64), "a")
    spd = a @ a.T + 0.1 * torch.eye(6, dtype=torch.float64)
    right = NOISE.normal(torch.empty(3, 6, dtype=torch.float64), "b")
    right[1] = 0
    out = _conjugate_gradients(lambda u: u @ spd, right, 40)  # far more than it takes
    assert_close(out, right @ torch.linalg.inv(spd), 1e-8)
    assert torch.equal(out[1], torch.zeros(6).double())
    assert torch.equal(out[:1], _conjugate_gradients(lambda u: u @ spd, right[:1], 40))
    once = _conjugate_gradients(lambda u: 3 * u, right.reshape(3, 2, 3), 1)
    assert_close(once, right.reshape(3, 2, 3) / 3, 1e-14)


# DPS


@pytest.mark.parametrize(("operator", "y"), CASES, ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_dps_is_the_gradient_of_the_likelihood_at_the_clean_prediction(
    operator: Any, y: Tensor, kind: str
) -> None:
    """In terms of the score: grad_x log N(y; A x_hat(x), obs_noise^2)."""
    path, t, obs_noise = VPLinear(), time(0.6), 0.4
    steer = DPS(operator, y, obs_noise, scale=0.7)
    field = toy(path, kind)
    clean = toy(path)(X, t)
    out = steer.clean(clean, X, {}, run_at(path, steer.bend(field), 0.6, steer))
    leaf = X.clone().requires_grad_()
    fit = (y - operator.A(toy(path)(leaf, t))).square().sum() / (2 * obs_noise**2)
    score = -torch.autograd.grad(fit, leaf)[0]
    assert_close(out - clean, 0.7 * path.sigma(t).square() / path.alpha(t) * score, 1e-9)


def test_how_far_dps_is_from_the_posterior() -> None:
    """It leaves out the spread of A x_0 given x_t, so it is sure too early: here, at the smallest
    noise, a standard deviation is two fifths too small, and a mean is off by 1.5 of them. It gets
    better as the noise grows; PiGDM is exact."""
    operator, y = CASES[0]
    far = []
    for obs_noise in (0.5, 2.0, 8.0):
        mean, cov = posterior(operator, y, obs_noise)
        ours = pushed(Linear(), DPS(operator, y, obs_noise, std=STD), 40)
        ratio = (ours[1].diagonal() / cov.diagonal()).sqrt()
        assert (ratio < 1).all()
        far.append((float((ours[0] - mean).abs().max()), float(1 - ratio.min())))
    assert 0.4 < far[0][0] < 0.6 and 0.35 < far[0][1] < 0.45
    assert far[0] > far[1] > far[2] and far[2][0] < 0.02 and far[2][1] < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_published_dps(kind: str) -> None:
    """x_s - scale grad |y - A x_hat(x_t)| after the step, and nothing where it rises."""
    path, (operator, y) = VPLinear(), CASES[0]
    steer, pairs = DPS(operator, y, scale=0.3), torch.tensor([[0.6, 0.4]], dtype=torch.float64)
    leaf = X.clone().requires_grad_()
    length = (y - operator.A(toy(path)(leaf, time(0.6)))).norm(dim=1)
    (gradient,) = torch.autograd.grad(length.sum(), leaf)
    plain = simulate(X, pairs, Euler(), path, toy(path, kind), NOISE)
    counted = Counting(toy(path, kind))
    with torch.no_grad():
        out = simulate(X, pairs, Euler(), path, counted, NOISE, steer)
    assert_close(out, plain - 0.3 * gradient, 1e-9)
    assert len(counted.calls) == 1
    rising = pairs.flip(1)
    out, plain = (
        simulate(X, rising, Euler(), path, toy(path, kind), NOISE, s) for s in (steer, None)
    )
    assert torch.equal(out, plain)


def test_published_dps_fits_the_measurement() -> None:
    path, (operator, y) = VPLinear(), CASES[0]
    misfits = []
    for scale in (None, 0.3):
        steer = None if scale is None else DPS(operator, y, scale=scale)
        out = simulate(X, uniform_grid(150), Ancestral(), path, toy(path), NOISE, steer)
        misfits.append(float((operator.A(out) - y).norm(dim=1).mean()))
    # it ends by stepping to and fro across the solution, at a distance that goes with the scale
    assert misfits[1] < 0.25 * misfits[0]
    exact = DPS(MASK, MASK.A(X), scale=0.3)  # a misfit of 0 has no direction
    run = run_at(path, exact.bend(Point(X)), 0.5, exact)
    run.field(X, run.t)
    assert torch.equal(exact.after(X, X, {}, run)[0], X)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Point:
    """A constant clean prediction that says it depends on x."""

    at: Tensor
    predicts: str = "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return self.at + 0 * x


# DDNM


@pytest.mark.parametrize(("operator", "y"), CASES, ids=name)
@pytest.mark.parametrize("sampler", [Ancestral(), Euler(), Heun()], ids=name)
def test_ddnm_satisfies_the_measurement(operator: Any, y: Tensor, sampler: Any) -> None:
    path = VPLinear()
    out, plain = (
        simulate(X, uniform_grid(6), sampler, path, toy(path), NOISE, steer)
        for steer in (DDNM(operator, y), None)
    )
    assert_close(operator.A(out), y.expand(5, -1), 1e-13)
    # the prior is isotropic: nothing moves in the null space
    null = torch.eye(SIZE, dtype=torch.float64) - torch.linalg.pinv(matrix(operator)) @ matrix(
        operator
    )
    assert_close(out @ null, plain @ null, 1e-10)
    single = simulate(
        X.float(), uniform_grid(6), sampler, path, toy(path), NOISE, DDNM(operator, y)
    )
    assert single.dtype == torch.float32
    assert_close(operator.A(single), y.float().expand(5, -1), 1e-5)


def test_ddnm_has_the_posterior_of_an_isotropic_gaussian() -> None:
    operator, y = CASES[0]
    mean, cov = posterior(operator, y, 0.0)
    ours = pushed(VPCosine(), DDNM(operator, y), 64)
    assert_close(ours[0], mean, 1e-3)
    assert_close(ours[1], cov, 1e-3)


def test_measurements_of_every_row() -> None:
    path, y = VPLinear(), NOISE.normal(torch.empty(5, 2).double(), "y")
    for steer in (DDNM(MASK, y), PiGDM(MASK, y, 0.3, std=STD), RePaint(MASK, y)):
        out = simulate(X, uniform_grid(4), Ancestral(), path, toy(path), NOISE, steer)
        for i in range(5):
            one = replace(steer, y=y[i : i + 1])
            row = simulate(
                X[i : i + 1], uniform_grid(4), Ancestral(), path, toy(path),
                NOISE.rows(torch.tensor([i])), one,
            )  # fmt: skip
            assert_close(row, out[i : i + 1], 1e-12)


# DDNM+


@pytest.mark.parametrize("path", [Linear(), VPLinear()], ids=name)
@pytest.mark.parametrize(("operator", "y"), CASES, ids=name)
def test_ddnm_plus_without_noise_is_ddnm(path: AlphaSigmaPath, operator: Any, y: Tensor) -> None:
    pairs = torch.tensor(
        [[1.0, 0.7], [0.7, 0.4], [0.4, 0.4], [0.4, 0.6], [0.6, 0.0]], dtype=torch.float64
    )
    for kind in ("clean", "velocity"):
        out = simulate(X, pairs, DDNMPlus(operator, y, 0.0), path, toy(path, kind), NOISE)
        exact = simulate(X, pairs, Ancestral(), path, toy(path), NOISE, DDNM(operator, y))
        assert_close(out, exact, 1e-10)


@pytest.mark.parametrize("obs_noise", [0.01, 0.5, 5.0])
@pytest.mark.parametrize(("t", "s"), [(1.0, 0.8), (0.5, 0.4), (0.2, 0.1), (0.1, 0.0)])
def test_a_step_of_ddnm_plus_has_the_noise_of_the_posterior(
    t: float, s: float, obs_noise: float
) -> None:
    """That of the measurement and its own add up: by the coefficients of each, with a mask."""
    path, pairs = VPLinear(), torch.tensor([[t, s]], dtype=torch.float64)
    y = torch.zeros(1, 2, dtype=torch.float64)

    def step(y: Tensor, noise: float) -> Tensor:
        sampler = DDNMPlus(MASK, y, obs_noise)
        return simulate(X, pairs, sampler, path, Point(X), Constant(noise))

    on_y = MASK.A(step(y + obs_noise, 0.0) - step(y, 0.0))
    on_noise = step(y, 1.0) - step(y, 0.0)
    plain = [
        simulate(X, pairs, Ancestral(), path, Point(X), Constant(value)) for value in (0.0, 1.0)
    ]
    spread = plain[1] - plain[0]
    assert_close(on_y.square() + MASK.A(on_noise).square(), MASK.A(spread).square(), 1e-12)
    assert_close(on_noise[:, [1, 3]], spread[:, [1, 3]], 1e-12)
    if obs_noise == 0.01 and s > 0:
        # the measurement is trusted in full, as long as its noise fits in
        rho = (
            path.alpha(time(t)) * path.sigma(time(s)) / (path.alpha(time(s)) * path.sigma(time(t)))
        )
        assert_close(on_y, (obs_noise * path.alpha(time(s)) * (1 - rho**2)).expand_as(on_y), 1e-12)


def test_law_of_ddnm_plus() -> None:
    """Denoising, A = I: means lie between those of the posterior and the measurement, where DDNM
    leaves them all. Its steps take the measurement's noise as fresh each time, so with more of them
    it keeps more of it."""
    n, obs_noise, path = 2000, 1.0, VPLinear()
    every = Masked(torch.arange(SIZE))
    y = torch.full((1, SIZE), 1.0, dtype=torch.float64)
    mean, cov = posterior(every, y, obs_noise)
    start = path.source(torch.empty(n, SIZE, dtype=torch.float64), NOISE)
    z = float(stats.norm.isf(ALARM / 2))
    shares = []
    for steps in (10, 80):
        sampler = DDNMPlus(every, y, obs_noise)
        out = simulate(start, uniform_grid(steps), sampler, path, toy(path), NOISE)
        share = (out.mean(0) - mean) / (y[0] - mean)
        error = z * out.std(0) / math.sqrt(n) / (y[0] - mean).abs()
        assert (share - error > 0).all() and (share + error < 1).all()
        assert (out.std(0) < cov.diagonal().sqrt()).all()
        shares.append((share, error))
    assert (shares[1][0] - shares[0][0] > shares[0][1] + shares[1][1]).any()


# RePaint


@pytest.mark.parametrize(("operator", "y"), CASES, ids=name)
def test_repaint_satisfies_the_measurement(operator: Any, y: Tensor) -> None:
    path, pairs = VPLinear(), resampled(uniform_grid(6), 2, 3)
    out = simulate(X, pairs, Ancestral(), path, toy(path), NOISE, RePaint(operator, y))
    assert_close(operator.A(out), y.expand(5, -1), 1e-12)


def test_a_step_of_repaint() -> None:
    path, y = VPLinear(), NOISE.normal(torch.empty(5, 2).double(), "y")
    pairs = torch.tensor([[0.6, 0.4]], dtype=torch.float64)
    out, plain = (
        simulate(X, pairs, Ancestral(), path, toy(path), NOISE, steer)
        for steer in (RePaint(MASK, y), None)
    )
    known = path.sample(MASK.A_dagger(y), time(0.4), NOISE.at(0)).x
    assert_close(MASK.A(out), MASK.A(known), 1e-14)
    assert_close(out[:, [1, 3]], plain[:, [1, 3]], 1e-14)
    up = pairs.flip(1)
    assert torch.equal(
        *(simulate(X, up, Ancestral(), path, toy(path), NOISE, s) for s in (RePaint(MASK, y), None))
    )


@dataclass(frozen=True)
class Correlated:
    """Data N(0, [[1, r], [r, 1]])."""

    path: AlphaSigmaPath
    r: float
    predicts: str = "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        cov = torch.tensor([[1, self.r], [self.r, 1]], dtype=torch.float64)
        alpha, sigma = self.path.alpha(t), self.path.sigma(t)
        noisy = alpha**2 * cov + sigma**2 * torch.eye(2, dtype=torch.float64)
        return x @ (alpha * cov @ torch.linalg.inv(noisy)).T


def test_travelling_again_harmonises() -> None:
    """x_0 known to be 1, x_1 correlated with it by 0.9: its mean should be 0.9. Without noise a
    simulation is the mean of those with it, as all is linear."""
    path, field = VPLinear(), Correlated(VPLinear(), 0.9)
    first = Masked(torch.tensor([0]))
    y = torch.ones(1, 1, dtype=torch.float64)

    @dataclass(frozen=True)
    class First(Masked):
        def A_adjoint(self, y: Tensor) -> Tensor:
            return torch.cat([y, 0 * y], 1)

        A_dagger = A_adjoint

    steer = RePaint(First(first.seen), y)
    means = []
    for repeats in (1, 3, 10):
        pairs = resampled(uniform_grid(24), 4, repeats)
        out = simulate(
            torch.zeros(1, 2).double(), pairs, Ancestral(), path, field, Constant(0), steer
        )
        means.append(float(out[0, 1]))
    assert means[0] < means[1] < means[2] < 0.9 + 1e-6
    assert abs(means[2] - 0.9) < 0.5 * abs(means[0] - 0.9)


def test_resampled_pairs() -> None:
    grid = uniform_grid(4)
    assert torch.equal(resampled(grid, 2, 1), grid) and torch.equal(resampled(grid, 9, 1), grid)
    out = resampled(grid, 2, 2)
    times = [1.0, 0.75, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.5, 0.25, 0.0]
    assert out[:, 0].tolist() == times[:-1] and out[:, 1].tolist() == times[1:]
    for steps, jump, repeats in ((7, 3, 2), (5, 1, 4), (3, 10, 3)):
        pairs = resampled(uniform_grid(steps), jump, repeats)
        check_pairs(pairs)
        assert len(pairs) == steps * repeats + (repeats - 1) * math.ceil(steps / jump)
    for arguments, match in (
        ((grid.flip(1), 2, 2), "each pair must start"),
        ((uniform_grid(3, 0.0, 1.0), 2, 2), "pairs must fall"),
        ((grid, 0, 2), "jump and repeats"),
        ((grid, 2, 0), "jump and repeats"),
    ):
        with pytest.raises(ValueError, match=match):
            resampled(*arguments)


# Bad input


Y = torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: DPS(MASK, Y, 0.0), "obs_noise must be positive, or None"),
        (lambda: DPS(MASK, Y, math.nan), "obs_noise must be positive, or None"),
        (lambda: DPS(MASK, Y, scale=0.0), "scale must be positive"),
        (lambda: DPS(MASK, Y, std=0.0), "std must be positive"),
        (lambda: PiGDM(MASK, Y, -1.0), "obs_noise must be at least 0"),
        (lambda: PiGDM(MASK, Y, std=math.nan), "std must be positive"),
        (lambda: PiGDM(MASK, Y, iterations=0), "iterations must be at least 1"),
        (lambda: DDNMPlus(MASK, Y, math.inf), "obs_noise must be at least 0"),
        *(
            (lambda make=make, y=y: make(y), "y must be finite")
            for make in (
                lambda y: DPS(MASK, y),
                lambda y: PiGDM(MASK, y),
                lambda y: DDNM(MASK, y),
                lambda y: DDNMPlus(MASK, y, 0.1),
                lambda y: RePaint(MASK, y),
            )
            for y in (Y + math.nan, torch.tensor(0.0))
        ),
    ],
)
def test_bad_arguments(build: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build()


@pytest.mark.parametrize(
    ("y", "got"), [(Y.long(), "torch.int64"), (Y.numpy(), "ndarray"), ([0.0, 0.0], "list")]
)
def test_measurements_of_another_type(y: Any, got: str) -> None:
    for build in (DPS, PiGDM, DDNM, RePaint, lambda operator, y: DDNMPlus(operator, y, 0.1)):
        with pytest.raises(TypeError, match=f"y must be a floating tensor, got {got}"):
            build(MASK, y)


class Opaque:
    predicts = "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return x.detach()


@pytest.mark.parametrize(
    "steer", [DPS(MASK, Y, 0.1), DPS(MASK, Y), PiGDM(MASK, Y, 0.1)], ids=["DPS", "as published", ""]
)
def test_fields_without_gradient(steer: Any) -> None:
    with pytest.raises(ValueError, match="a field that can be differentiated in x"):
        simulate(X, uniform_grid(2), Euler(), Linear(), Opaque(), NOISE, steer)
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode takes it away"):
        x = X.clone()
        simulate(x, uniform_grid(2), Euler(), Linear(), toy(Linear()), NOISE, steer)


@pytest.mark.parametrize("y", [torch.zeros(1, 3), torch.zeros(3, 2), torch.zeros(2)])
def test_measurements_of_another_shape(y: Tensor) -> None:
    path = VPLinear()
    for steer in (DPS(MASK, y, 0.1), DPS(MASK, y), PiGDM(MASK, y), DDNM(MASK, y)):
        with pytest.raises(ValueError, match="y must have the shape of A"):
            simulate(X, uniform_grid(2), Ancestral(), path, toy(path), NOISE, steer)
    with pytest.raises(ValueError, match="y must have the shape of A"):
        simulate(X, uniform_grid(2), DDNMPlus(MASK, y, 0.1), path, toy(path), NOISE)


def test_paths_without_scalars() -> None:
    path = BlockGaussian()
    field = BlockField(path, torch.zeros(2).double(), torch.eye(2).double(), "clean")
    x = torch.zeros(5, 2, SIZE, dtype=torch.float64)
    with pytest.raises(TypeError, match="DDNMPlus needs scalar coefficients"):
        simulate(x, uniform_grid(2), DDNMPlus(MASK, Y, 0.1), path, field, NOISE)


@dataclass(frozen=True)
class FirstTwo:
    """A mask that is no tensor."""

    def A(self, x: Tensor) -> Tensor:
        return x[:, :2]

    def A_adjoint(self, y: Tensor) -> Tensor:
        return torch.cat([y, 0 * y], 1)

    A_dagger = A_adjoint


@dataclass(frozen=True)
class StandardNormal:
    predicts: str = "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return (1 - t) / ((1 - t) ** 2 + t**2) * x


@pytest.mark.parametrize(
    "method",
    [
        DPS(FirstTwo(), Y, 1.0),
        DPS(FirstTwo(), Y),
        PiGDM(FirstTwo(), Y),
        PiGDM(FirstTwo(), Y, 0.1),
        DDNM(FirstTwo(), Y),
        DDNMPlus(FirstTwo(), Y, 0.1),
        RePaint(FirstTwo(), Y),
    ],
    ids=name,
)
def test_no_step_reads_a_value(method: Any) -> None:
    """Tensors on the meta device have none: on an accelerator, reading one would be a wait."""
    method = copy.copy(method)
    method.y = Y.to("meta")
    x = torch.empty(5, SIZE, device="meta")
    sampler, steer = (method, None) if isinstance(method, DDNMPlus) else (Heun(), method)
    out = simulate(x, uniform_grid(3), sampler, Linear(), StandardNormal(), NOISE, steer)
    assert out.shape == x.shape and out.device.type == "meta"


@pytest.mark.parametrize(
    "steer",
    [
        DPS(MASK, Y.double(), 1.0),
        DPS(MASK, Y.double()),
        PiGDM(MASK, Y.double(), 0.1),
        RePaint(MASK, Y.double()),
    ],
    ids=name,
)
def test_dtype(steer: Any) -> None:
    path = VPLinear()
    out = simulate(X.float(), uniform_grid(30), Ancestral(), path, toy(path), NOISE, steer)
    assert out.dtype == torch.float32 and out.isfinite().all()


@pytest.mark.parametrize(
    "sampler",
    [
        Ancestral(),
        DDIM(0.85),
        DPMSolver(),
        UniPC(),
        Euler(),
        Midpoint(),
        Heun(),
        RK4(),
        EDMHeun(),
        EulerMaruyama(),
    ],
    ids=name,
)
def test_every_sampler(sampler: Any) -> None:
    """The measurement is met, and the gradient costs no call of the field."""
    path, (operator, y) = VPLinear(), CASES[0]
    out = simulate(X, uniform_grid(6), sampler, path, toy(path), NOISE, DDNM(operator, y))
    assert_close(operator.A(out), y.expand(5, -1), 1e-12)
    fields = [Counting(toy(path)), Counting(toy(path))]
    for field, steer in zip(fields, (None, PiGDM(operator, y, 0.3, std=STD)), strict=True):
        simulate(X, uniform_grid(6), sampler, path, field, NOISE, steer)
    assert len(fields[0].calls) == len(fields[1].calls)


def test_converted_fields() -> None:
    path, steer = VPCosine(), PiGDM(MASK, Y.double(), 0.2, std=STD)
    field = convert(toy(path, "velocity"), "clean", path)
    counted = Counting(field)
    out = simulate(X, uniform_grid(5), Ancestral(), path, counted, NOISE, steer)
    assert len(counted.calls) == 5
    exact = simulate(X, uniform_grid(5), Ancestral(), path, toy(path), NOISE, steer)
    assert_close(out, exact, 1e-10)
