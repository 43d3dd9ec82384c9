"""Samplers that draw noise. On Gaussian data a step is affine in x and z, so that mean and variance
of what a sampler makes are propagated exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.multistep import DDIM, DPMSolver
from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import VE, AlphaSigmaPath, CustomPath, Linear, VPCosine, VPLinear
from fluvial.core.gaussian.schedule import karras_grid, time_of, with_corrections
from fluvial.core.gaussian.sde import EDMHeun, EulerMaruyama, Langevin, PredictorCorrector
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Run, Steering
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import grid_pairs, uniform_grid

from .toys import BlockField, BlockGaussian, Constant, Counting, VectorGaussian

NOISE = KeyedNoise(3)
MEAN = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
STD = torch.tensor([0.6, 1.0, 1.7], dtype=torch.float64)
SMOOTH = VPLinear(1.0, 4.0)
PATHS = [Linear(), VPLinear(), VPCosine(), VE(0.1, 5.0)]
KINDS = ["clean", "noise", "velocity", "score"]


def name(path: Any) -> str:
    return type(path).__name__


def time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def state(batch: int = 4) -> Tensor:
    return NOISE.normal(torch.empty(batch, 3, dtype=torch.float64))


class ByRow(Constant):
    """Every draw of a row is its value."""

    value: Any

    def normal(self, like: Tensor, tag: str = "") -> Tensor:
        return self.value[:, None].expand_as(like)


def affine(sampler: Any, toy: VectorGaussian, pair: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(A, b, C), with x_s = A x + b + C z for a sampler that draws once a step."""
    x, z = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    start = x[:, None].expand(3, 3)
    shift, gained, drawn = simulate(start, pair[None], sampler, toy.path, toy, ByRow(z))
    return gained - shift, shift, drawn - shift


def moments(sampler: Any, toy: VectorGaussian, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance at the end of ``pairs``, from the right ones at their start."""
    mean, var = toy.moments(pairs[0, 0])
    for pair in pairs:
        gain, shift, spread = affine(sampler, toy, pair)
        mean, var = gain * mean + shift, gain.square() * var + spread.square()
    return mean, var


def law_error(sampler: Any, toy: VectorGaussian, pairs: Tensor) -> float:
    mean, var = moments(sampler, toy, pairs)
    exact_mean, exact_var = toy.moments(pairs[-1, 1])
    return float(torch.cat([mean - exact_mean, var - exact_var]).abs().max())


# The reverse SDE and its family


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("diffusion", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("path", PATHS, ids=name)
def test_euler_maruyama_formula(path: AlphaSigmaPath, diffusion: float, kind: str) -> None:
    x, z = state(), 0.7
    for t, s in ((time(0.6), time(0.55)), (time(0.3), time(0.4))):
        drift, spread = (scale.value for scale in path.sde(t))
        score = VectorGaussian(path, MEAN, STD, "score")(x, t)
        sign = 1.0 if s > t else -1.0
        # F x - (1 + a) / 2 G^2 score backwards, F x - (1 - a) / 2 G^2 score forwards
        rate = drift * x - 0.5 * (1 - sign * diffusion) * spread.square() * score
        exact = x + (s - t) * rate + math.sqrt(diffusion * abs(s - t)) * spread * z
        toy = VectorGaussian(path, MEAN, STD, kind)
        pair = torch.stack([t, s])[None]
        out = simulate(x, pair, EulerMaruyama(diffusion), path, toy, Constant(z))
        torch.testing.assert_close(out, exact, rtol=1e-11, atol=1e-11)


def test_without_diffusion_it_is_eulers_method() -> None:
    for path in PATHS:
        toy = VectorGaussian(path, MEAN, STD, "velocity")
        pairs = uniform_grid(4)
        out = [simulate(state(), pairs, s, path, toy, NOISE) for s in (Euler(), EulerMaruyama(0.0))]
        assert torch.equal(*out)


@pytest.mark.parametrize("diffusion", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("path", "start", "end"),
    [
        (SMOOTH, 1.0, 0.0),
        (SMOOTH, 0.05, 0.95),
        (VPCosine(), 0.8, 0.1),
    ],
)
def test_weak_order_of_euler_maruyama(
    path: AlphaSigmaPath, start: float, end: float, diffusion: float
) -> None:
    toy = VectorGaussian(path, MEAN, STD)
    errors = [
        law_error(EulerMaruyama(diffusion), toy, uniform_grid(steps, start, end))
        for steps in (60, 120)
    ]
    assert errors[1] > 1e-6
    assert abs(math.log2(errors[0] / errors[1]) - 1) < 0.15


@pytest.mark.parametrize("path", [Linear(), VPCosine()], ids=name)
def test_from_pure_noise_the_first_step_redraws(path: AlphaSigmaPath) -> None:
    toy, pairs = VectorGaussian(path, MEAN, STD), uniform_grid(10)
    for diffusion in (0.1, 1.0):
        sampler = EulerMaruyama(diffusion)
        gain, shift, spread = affine(sampler, toy, pairs[0])
        alpha, sigma = path.alpha(pairs[0, 1]), path.sigma(pairs[0, 1])
        torch.testing.assert_close(gain, torch.zeros(3).double())
        torch.testing.assert_close(shift, alpha * MEAN)
        torch.testing.assert_close(spread, sigma.expand(3))
    errors = [law_error(EulerMaruyama(1.0), toy, uniform_grid(steps)) for steps in (40, 80)]
    assert errors[1] < 0.6 * errors[0] < 0.1


def test_forwards_from_the_data_it_is_the_paths_own_sde() -> None:
    toy = VectorGaussian(SMOOTH, MEAN, STD)
    drift, spread = SMOOTH.sde(time(0))
    gain, shift, noise = affine(EulerMaruyama(1.0), toy, torch.tensor([0.0, 0.1]).double())
    torch.testing.assert_close(gain, (1 + 0.1 * drift.value).expand(3))
    torch.testing.assert_close(noise, (math.sqrt(0.1) * spread.value).expand(3))
    assert (shift.abs() < 1e-15).all()


# A path of matrices

BLOCK = BlockGaussian(beta=1.0, gamma=1.0, mass=0.5)
BLOCK_FIELD = BlockField(
    BLOCK,
    torch.tensor([1.0, 0.2]).double(),
    torch.tensor([[0.5, 0.1], [0.1, 0.3]]).double(),
)


def block_step(sampler: Any, pair: Tensor, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance after one step; the draw is read off by a basis too."""

    class Basis(Constant):
        def normal(self, like: Tensor, tag: str = "") -> Tensor:
            return torch.eye(2).double()[:, :, None] if self.value else torch.zeros_like(like)

    def step(x: Tensor, value: float) -> Tensor:
        run = Run(BLOCK, BLOCK_FIELD, Basis(value), 0, *pair, {}, Steering(), {})
        return sampler.step(x, None, run)[0][:, :, 0].T

    zero = torch.zeros(2, 2, 1).double()
    shift = step(zero, 0.0)
    gain, spread = step(torch.eye(2).double()[:, :, None], 0.0) - shift, step(zero, 1.0) - shift
    return gain @ mean + shift[:, 0], gain @ cov @ gain.T + spread @ spread.T


@pytest.mark.parametrize(("diffusion", "start", "end"), [(1.0, 0.8, 0.2), (2.0, 0.2, 0.8)])
def test_weak_order_on_the_block_path(diffusion: float, start: float, end: float) -> None:
    errors = []
    for steps in (20, 40):
        mean, cov = BLOCK_FIELD.moments(time(start))
        for pair in uniform_grid(steps, start, end):
            mean, cov = block_step(EulerMaruyama(diffusion), pair, mean, cov)
        errors.append(float((cov - BLOCK_FIELD.moments(time(end))[1]).abs().max()))
    assert errors[1] > 1e-6
    assert abs(math.log2(errors[0] / errors[1]) - 1) < 0.15


# Correctors


@pytest.mark.parametrize("path", PATHS, ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_langevin_formula(path: AlphaSigmaPath, kind: str) -> None:
    x, t, snr, z = state(), time(0.4), 0.2, 0.7
    step = 2 * (snr * path.sigma(t)) ** 2
    exact = x + step * VectorGaussian(path, MEAN, STD, "score")(x, t) + (2 * step).sqrt() * z
    toy = VectorGaussian(path, MEAN, STD, kind)
    out = simulate(x, t.expand(1, 2), Langevin(snr), path, toy, Constant(z))
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)


def test_langevin_tends_to_the_marginal() -> None:
    """From anywhere, to a variance too large by O(step)."""
    path, t = VPCosine(), time(0.5)
    toy, excess = VectorGaussian(path, MEAN, STD), []
    exact_mean, exact = toy.moments(t)
    for snr in (0.1, 0.05):
        gain, shift, spread = affine(Langevin(snr), toy, t.expand(2))
        assert (gain.abs() < 1).all()
        torch.testing.assert_close(shift / (1 - gain), exact_mean)
        excess.append(spread.square() / (1 - gain.square()) / exact - 1)
    torch.testing.assert_close(
        excess[0] / excess[1], torch.full((3,), 4.0).double(), rtol=0.02, atol=0
    )


def test_langevin_on_the_block_path() -> None:
    """Preconditioned by the covariance of the noise, it keeps the law to order step^2."""
    errors = []
    for snr in (0.1, 0.05):
        mean, cov = BLOCK_FIELD.moments(time(0.5))
        moved, changed = block_step(Langevin(snr), torch.tensor([0.5, 0.5]).double(), mean, cov)
        torch.testing.assert_close(moved, mean)
        errors.append(float((changed - cov).abs().max()))
    assert abs(math.log2(errors[0] / errors[1]) - 4) < 0.05  # the step is quadratic in snr


def test_langevin_does_nothing_to_data_and_refuses_to_move() -> None:
    path = Linear()
    toy, x = VectorGaussian(path, MEAN, STD), state()
    assert torch.equal(simulate(x, torch.zeros(1, 2), Langevin(), path, toy, NOISE), x)
    with pytest.raises(ValueError, match=r"Langevin takes pairs \(t, t\), got \(1.0, 0.5\)"):
        simulate(x, uniform_grid(2), Langevin(), path, toy, NOISE)


def test_correctors_take_back_errors_of_the_predictor() -> None:
    path, pairs = VPCosine(), uniform_grid(5, 0.95, 0.5)
    toy = VectorGaussian(path, MEAN, STD)
    alone = law_error(Euler(), toy, pairs)
    errors = []
    for number in (2, 8):
        sampler = PredictorCorrector(Euler(), Langevin(0.15))
        errors.append(law_error(sampler, toy, with_corrections(pairs, number)))
    assert alone > 1.5 * errors[0] > 3 * errors[1]


def test_predictor_corrector_takes_turns() -> None:
    path, pairs = VPCosine(), with_corrections(uniform_grid(3, 0.9, 0.1))
    toy, x = VectorGaussian(path, MEAN, STD), state()
    out = simulate(x, pairs, PredictorCorrector(DPMSolver(2), Langevin()), path, toy, NOISE)
    memory = ()
    for k, (t, s) in enumerate(pairs):
        run = Run(path, toy, NOISE.at(k), k, t, s, {}, Steering(), {})
        if k % 2:
            x, _, _ = Langevin().step(x, None, run)
        else:
            x, memory, _ = DPMSolver(2).step(x, memory, run)
    assert torch.equal(out, x)


# EDM


def published(
    denoise: Any, x: Tensor, sigmas: list[float], churn: float, low: float, high: float, s: float
) -> Tensor:
    """Algorithm 2 of Karras et al. (2022) with sigma(t) = t and alpha = 1, line by line."""
    count = len(sigmas) - 1
    for i in range(count):
        gamma = min(churn / count, math.sqrt(2) - 1) if low <= sigmas[i] <= high else 0.0
        eps = s * NOISE.at(i).normal(x, "churn")
        hat = sigmas[i] + gamma * sigmas[i]
        x_hat = x + math.sqrt(hat**2 - sigmas[i] ** 2) * eps
        d = (x_hat - denoise(x_hat, hat)) / hat
        x = x_hat + (sigmas[i + 1] - hat) * d
        if sigmas[i + 1] != 0:
            d_next = (x - denoise(x, sigmas[i + 1])) / sigmas[i + 1]
            x = x_hat + (sigmas[i + 1] - hat) * (d + d_next) / 2
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("churn", [0.0, 3.0, 30.0])
@pytest.mark.parametrize("path", PATHS, ids=name)
def test_edm_as_published(path: AlphaSigmaPath, churn: float, kind: str) -> None:
    def denoise(x: Tensor, sigma: float) -> Tensor:
        return MEAN + STD.square() / (STD.square() + sigma**2) * (x - MEAN)

    steps = 8
    pairs = karras_grid(path, steps, level_max=3.0, level_min=0.05)
    sigmas = [float(path.sigma(t) / path.alpha(t)) for t in [*pairs[:, 0], pairs[-1, 1]]]
    x = 3.0 * state()
    exact = published(denoise, x, sigmas, churn, 0.1, 2.0, 1.007)
    toy = VectorGaussian(path, MEAN, STD, kind)
    sampler = EDMHeun(churn / steps, s_min=0.1, s_max=2.0, s_noise=1.007)
    counted = Counting(toy)
    out = simulate(path.alpha(pairs[0, 0]) * x, pairs, sampler, path, counted, NOISE)
    torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)
    assert len(counted.calls) == 2 * steps - 1


@pytest.mark.parametrize(
    ("path", "start", "end"),
    [(SMOOTH, 0.95, 0.05), (SMOOTH, 0.05, 0.95), (VPCosine(), 0.9, 0.1), (Linear(), 0.1, 0.9)],
)
def test_order_of_edm(path: AlphaSigmaPath, start: float, end: float) -> None:
    toy, errors = VectorGaussian(path, MEAN, STD), []
    mean, var = toy.moments(time(start))
    x = mean + var.sqrt() * state()
    for steps in (32, 64):
        out = simulate(x, uniform_grid(steps, start, end), EDMHeun(), path, toy, NOISE)
        errors.append(float((out - toy.flow(x, time(start), time(end))).abs().max()))
    assert abs(math.log2(errors[0] / errors[1]) - 2) < 0.15


def test_churn_keeps_the_law() -> None:
    toy = VectorGaussian(VPCosine(), MEAN, STD)
    errors = [
        law_error(EDMHeun(4 / steps), toy, uniform_grid(steps, 0.9, 0.1)) for steps in (40, 80)
    ]
    assert abs(math.log2(errors[0] / errors[1]) - 2) < 0.15


def test_churn_stops_at_the_end_of_the_path() -> None:
    """At the level of t = 1, where VE ends, however much there should be."""
    path = VE(0.1, 5.0)
    seen: list[float] = []

    class Watching(VectorGaussian):
        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:  # type: ignore[override]
            seen.append(float(t))
            return super().__call__(x, t)

    pairs = grid_pairs([0.98, 0.6])
    simulate(state(), pairs, EDMHeun(0.4), path, Watching(path, MEAN, STD), NOISE)
    assert seen == [1.0, 0.6]
    seen.clear()
    simulate(state(), pairs.flip(0, 1), EDMHeun(0.4), path, Watching(path, MEAN, STD), NOISE)
    assert seen == [0.6, 0.98]  # no churn where time rises
    seen.clear()
    simulate(state(), grid_pairs([0.5, 0.4]), EDMHeun(0.1), path, Watching(path, MEAN, STD), NOISE)
    level = 1.1 * path.sigma(time(0.5)) / path.alpha(time(0.5))
    assert seen == pytest.approx([float(time_of(path, level)), 0.4], abs=1e-14)


def test_edm_on_a_users_path() -> None:
    """The time of a level is found by bisection where there is no formula."""
    custom = CustomPath(lambda t: 1 - t, lambda t: t)
    pairs = uniform_grid(5)
    out = [
        simulate(state(), pairs, EDMHeun(0.2), path, VectorGaussian(path, MEAN, STD), NOISE)
        for path in (Linear(), custom)
    ]
    torch.testing.assert_close(*out, rtol=1e-12, atol=1e-12)


# All of them

SAMPLERS = [
    EulerMaruyama(0.5),
    EulerMaruyama(2.0),
    EDMHeun(),
    EDMHeun(0.3),
    DDIM(0.5),
    PredictorCorrector(EulerMaruyama(), Langevin()),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=name)
@pytest.mark.parametrize("path", PATHS, ids=name)
def test_from_end_to_end_and_back(path: AlphaSigmaPath, sampler: Any) -> None:
    x = path.source(torch.empty(4, 3).double(), NOISE)
    for kind in KINDS:
        toy = VectorGaussian(path, MEAN, STD, kind)
        there = simulate(x, uniform_grid(6), sampler, path, toy, NOISE)
        back = simulate(there, uniform_grid(6, 0.0, 1.0), sampler, path, toy, NOISE)
        assert there.isfinite().all() and back.isfinite().all()


@pytest.mark.parametrize("sampler", SAMPLERS, ids=name)
def test_rows_do_not_depend_on_their_batch(sampler: Any) -> None:
    path, ids = VPCosine(), torch.arange(6)
    toy, x = VectorGaussian(path, MEAN, STD, "noise"), state(6)
    pairs = with_corrections(uniform_grid(4, 0.9, 0.0))
    if not isinstance(sampler, PredictorCorrector):
        pairs = uniform_grid(4, 0.9, 0.0)
    whole = simulate(x, pairs, sampler, path, toy, NOISE)
    parts = [
        simulate(x[part], pairs, sampler, path, toy, NOISE.rows(part)) for part in ids.split([2, 4])
    ]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole, simulate(x, pairs, sampler, path, toy, NOISE))
    single = simulate(x.float(), pairs, sampler, path, toy, NOISE)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=name)
def test_steering_of_the_clean_prediction(sampler: Any) -> None:
    class Shift(Steering):
        def clean(self, clean: Any, x: Any, aim: Any, run: Run) -> Any:
            return clean + 0.7

    class Shifted(VectorGaussian):
        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:  # type: ignore[override]
            return super().__call__(x, t) + 0.7

    path, pairs = VPCosine(), with_corrections(uniform_grid(3, 0.95, 0.0))
    if not isinstance(sampler, PredictorCorrector):
        pairs = uniform_grid(3, 0.95, 0.0)
    exact = simulate(state(), pairs, sampler, path, Shifted(path, MEAN, STD), NOISE)
    for kind in KINDS:
        toy = VectorGaussian(path, MEAN, STD, kind)
        out = simulate(state(), pairs, sampler, path, toy, NOISE, Shift())
        torch.testing.assert_close(out, exact, rtol=1e-9, atol=1e-9)


def test_errors() -> None:
    for diffusion in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="diffusion must be finite and not negative"):
            EulerMaruyama(diffusion)
    for snr in (0.0, math.inf):
        with pytest.raises(ValueError, match="snr must be positive"):
            Langevin(snr)
    with pytest.raises(ValueError, match="churn and s_noise must be >= 0"):
        EDMHeun(-0.1)
    with pytest.raises(ValueError, match="s_min must be at most s_max, got 2.0 and 1.0"):
        EDMHeun(0.1, s_min=2.0, s_max=1.0)
    x = torch.zeros(2, 2, 3).double()
    with pytest.raises(ValueError, match="EDMHeun needs a path with one alpha and one sigma"):
        simulate(x, uniform_grid(2, 0.8, 0.2), EDMHeun(), BLOCK, BLOCK_FIELD, NOISE)


def test_reverse_sde_and_ancestral_agree_in_the_limit() -> None:
    """Both are the reverse SDE: one affine map to order step^2 (order 3/2 for the noise)."""
    toy, gaps = VectorGaussian(SMOOTH, MEAN, STD), []
    for h in (0.02, 0.01):
        pair = torch.tensor([0.5, 0.5 - h]).double()
        ours, theirs = (affine(sampler, toy, pair) for sampler in (EulerMaruyama(), Ancestral()))
        gaps.append([float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)])
    for (coarse, fine), order in zip(zip(*gaps, strict=True), (2, 2, 1.5), strict=True):
        assert abs(math.log2(coarse / fine) - order) < 0.1
