"""Grids against their formulas and diffusers; fields of one path used on another."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.multistep import DDIM, DPMSolver, UniPC
from fluvial.core.gaussian.ode import RK4
from fluvial.core.gaussian.paths import (
    VE,
    AlphaSigmaPath,
    CustomPath,
    Linear,
    VPCosine,
    VPLinear,
    numbers,
    rate_numbers,
)
from fluvial.core.gaussian.schedule import (
    Rescheduled,
    karras_grid,
    log_snr_grid,
    quadratic_grid,
    reschedule,
    resolution_shift,
    shifted_grid,
    time_of,
    token_shift,
    with_corrections,
)
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import simulate
from fluvial.core.time import grid_pairs, uniform_grid

from .toys import VectorGaussian

NOISE = KeyedNoise(3)
MEAN = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
STD = torch.tensor([0.6, 1.0, 1.7], dtype=torch.float64)
CUSTOM = CustomPath(lambda t: 1 - t, lambda t: t)
PATHS = [Linear(), VPLinear(), VPCosine(), VE(0.1, 5.0), CUSTOM]
KINDS = ["clean", "noise", "velocity", "score"]


def name(path: Any) -> str:
    return type(path).__name__ if isinstance(path, AlphaSigmaPath) else str(path)


def time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def levels(path: AlphaSigmaPath, pairs: Tensor) -> Tensor:
    """sigma / alpha at every time of a grid."""
    times = torch.cat([pairs[:, 0], pairs[-1:, 1]])
    return path.sigma(times) / path.alpha(times)


# The time of a level, and coefficients as numbers


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_time_of_inverts_the_level(path: AlphaSigmaPath) -> None:
    t = torch.tensor([0.0, 1e-8, 1e-3, 0.2, 0.5, 0.9, 0.999]).double()
    back = time_of(path, path.sigma(t) / path.alpha(t))
    torch.testing.assert_close(back, t, rtol=1e-9, atol=1e-14)
    ends = time_of(path, torch.tensor([0.0, math.inf, 1e300]).double())
    assert ends[0] == 0 and ends[1] == 1 and 1 - ends[2] < 1e-15
    if float(path.alpha(time(1))) > 0:
        beyond = 2 * path.sigma(time(1)) / path.alpha(time(1))
        assert float(time_of(path, beyond)) == 1


def test_a_subclass_is_asked_for_its_own_formulas() -> None:
    class Slow(VPLinear):
        def _log_alpha(self, t: Tensor) -> Tensor:
            return super()._log_alpha(t) / 2

    for t in (0.0, 0.3, 1.0):
        level = Slow().sigma(time(t)) / Slow().alpha(time(t))
        torch.testing.assert_close(time_of(Slow(), level), time(t), rtol=1e-12, atol=1e-12)
        assert numbers(Slow(), t) == (float(Slow().alpha(time(t))), float(Slow().sigma(time(t))))


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_numbers_are_those_of_the_tensors(path: AlphaSigmaPath) -> None:
    for t in (0.0, 1e-9, 0.1, 0.5, 1.0):
        pair = [float(path.alpha(time(t))), float(path.sigma(time(t)))]
        assert numbers(path, t) == pytest.approx(pair, rel=1e-14, abs=1e-300)
        rates = [float(path.alpha_rate(time(t))), float(path.sigma_rate(time(t)))]
        assert rate_numbers(path, t) == pytest.approx(rates, rel=1e-13, abs=1e-300)


# Grids


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_grids_of_levels(path: AlphaSigmaPath) -> None:
    steps, high, low, rho = 6, 4.0, 0.01, 7.0
    i = np.arange(steps)
    karras = (high ** (1 / rho) + i / (steps - 1) * (low ** (1 / rho) - high ** (1 / rho))) ** rho
    even = np.exp(np.linspace(math.log(high), math.log(low), steps))
    for grid, exact in ((karras_grid, karras), (log_snr_grid, even)):
        pairs = grid(path, steps, level_max=high, level_min=low)
        assert pairs.shape == (steps, 2) and pairs.dtype == torch.float64
        assert pairs[-1, 1] == 0 and (pairs[:, 1] < pairs[:, 0]).all()
        torch.testing.assert_close(
            levels(path, pairs), torch.tensor([*exact, 0.0]), rtol=1e-9, atol=1e-12
        )


def test_grids_start_at_80_or_where_the_path_ends() -> None:
    for grid in (karras_grid, log_snr_grid):
        assert float(levels(Linear(), grid(Linear(), 5))[0]) == pytest.approx(80)
        assert float(grid(VE(0.1, 5.0), 5)[0, 0]) == 1
        one = grid(Linear(), 1)
        assert one.shape == (1, 2) and one[0, 1] == 0
        start = Linear().sample(torch.zeros(2, 3), one[0, 0], NOISE).x
        torch.testing.assert_close(
            start, float(one[0, 0]) * NOISE.normal(torch.empty(2, 3), "source")
        )


def test_karras_grid_against_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.EulerDiscreteScheduler(use_karras_sigmas=True)
    theirs = scheduler._convert_to_karras(torch.tensor([80.0, 0.002]), num_inference_steps=10)
    ours = levels(Linear(), karras_grid(Linear(), 10))[:-1]
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-6)
    theirs = scheduler._convert_to_exponential(torch.tensor([80.0, 0.002]), 10)
    ours = levels(Linear(), log_snr_grid(Linear(), 10))[:-1]
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-6)


def test_quadratic_grid() -> None:
    pairs = quadratic_grid(4)
    torch.testing.assert_close(pairs[:, 0], torch.tensor([16, 9, 4, 1]).double() / 16)
    assert pairs[0, 0] == 1 and pairs[-1, 1] == 0
    rising = quadratic_grid(3, 0.04, 0.49)
    assert rising[0, 0] == 0.04 and rising[-1, 1] == 0.49 and (rising[:, 1] > rising[:, 0]).all()


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0])
def test_shifted_grid_against_diffusers(shift: float) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 8, 8))
    pairs = shifted_grid(8, shift)
    theirs = scheduler.sigmas.double()
    torch.testing.assert_close(pairs[:, 0], theirs[:-1], rtol=1e-6, atol=1e-6)
    assert pairs[0, 0] == 1 and pairs[-1, 1] == 0
    uniform = levels(Linear(), uniform_grid(8))[1:]
    torch.testing.assert_close(levels(Linear(), pairs)[1:], shift * uniform, rtol=1e-12, atol=0)


def test_token_shift_against_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    for tokens in (256, 1024, 4096, 6000):
        mu = 0.5 + (tokens - 256) * (1.15 - 0.5) / (4096 - 256)  # FLUX.1's calculate_shift
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 8, 8), mu=mu)
        pairs = shifted_grid(8, token_shift(tokens))
        theirs = scheduler.sigmas.double()[:-1]
        torch.testing.assert_close(pairs[:, 0], theirs, rtol=1e-6, atol=1e-6)
    assert resolution_shift(1024**2, 256**2) == 4
    assert resolution_shift(64, 64) == 1


def test_a_shift_cannot_be_applied_twice() -> None:
    once = shifted_grid(8, 3.0)
    with pytest.raises(TypeError, match="steps must be an int, the number of steps, got Tensor"):
        shifted_grid(once, 3.0)  # type: ignore[arg-type]


def test_with_corrections() -> None:
    pairs = grid_pairs([0.9, 0.5, 0.0])
    assert with_corrections(pairs, 2).tolist() == [[0.9, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.0]]
    assert torch.equal(with_corrections(pairs, 0), pairs)


def test_encoding_is_the_grid_turned_round() -> None:
    pairs = karras_grid(Linear(), 4)
    rising = pairs.flip(0, 1)
    assert torch.equal(rising[:, 1], pairs[:, 0].flip(0)) and rising[0, 0] == 0
    assert torch.equal(rising[1:, 0], rising[:-1, 1])


# Change of schedule

SAME_REACH = [path for path in PATHS if not isinstance(path, VE)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("trained", "sampled"), [pair for pair in product(PATHS, PATHS) if pair[0] != pair[1]], ids=name
)
def test_rescheduled_field_is_that_of_the_other_path(
    trained: AlphaSigmaPath, sampled: AlphaSigmaPath, kind: str
) -> None:
    field = reschedule(VectorGaussian(trained, MEAN, STD, kind), trained, sampled)
    exact = VectorGaussian(sampled, MEAN, STD, kind)
    assert field.predicts == kind
    x = NOISE.normal(torch.empty(3, 3).double())
    for level in (0.01, 0.3, 1.0, 4.0):
        t = time_of(sampled, time(level))
        torch.testing.assert_close(field(x, t), exact(x, t), rtol=1e-8, atol=1e-8)
    rows = time_of(sampled, torch.tensor([0.01, 1.0, 4.0]).double())
    torch.testing.assert_close(field(x, rows), exact(x, rows), rtol=1e-8, atol=1e-8)
    single = field(x.float(), rows.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact(x, rows), rtol=2e-3, atol=2e-3)


def test_mean_velocity_becomes_velocity() -> None:
    toy = VectorGaussian(Linear(), MEAN, STD, "mean_velocity")
    field = reschedule(toy, Linear(), VPCosine())
    assert field.predicts == "velocity"
    x, t = NOISE.normal(torch.empty(3, 3).double()), time(0.4)
    exact = VectorGaussian(VPCosine(), MEAN, STD, "velocity")(x, t)
    torch.testing.assert_close(field(x, t), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_is_the_identity(kind: str) -> None:
    vp, linear = VPLinear(), Linear()
    toy = VectorGaussian(vp, MEAN, STD, kind)
    there = reschedule(toy, vp, linear)
    assert reschedule(there, linear, vp) is toy
    assert reschedule(toy, vp, VPLinear()) is toy
    assert reschedule(there, linear, VPCosine()) == Rescheduled(toy, vp, VPCosine())
    back = Rescheduled(Rescheduled(toy, vp, linear), linear, vp)  # through the formulas
    x = NOISE.normal(torch.empty(3, 3).double())
    for t in (1e-3, 0.3, 0.9, 1.0):
        torch.testing.assert_close(back(x, time(t)), toy(x, time(t)), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_same_steps_in_level_give_the_same_sample(kind: str) -> None:
    """Samplers of levels do not see the path: trained on VP, sampled along the linear path."""
    vp, linear = VPLinear(), Linear()
    toy = VectorGaussian(vp, MEAN, STD, kind)
    along_vp, along_linear = (karras_grid(path, 8, 20.0) for path in (vp, linear))
    x = NOISE.normal(torch.empty(4, 3).double())
    x_linear = linear.alpha(along_linear[0, 0]) / vp.alpha(along_vp[0, 0]) * x
    for sampler in (DDIM(), DPMSolver(2), DPMSolver(3), UniPC(3)):
        ours = simulate(x, along_vp, sampler, vp, toy, NOISE)
        field = reschedule(toy, vp, linear)
        other = simulate(x_linear, along_linear, sampler, linear, field, NOISE)
        torch.testing.assert_close(other, ours, rtol=1e-7, atol=1e-7)


def test_sampling_from_beyond_the_trained_levels() -> None:
    """From t = 1 of the linear path with a field of VP, which ends at r = 152."""
    vp, linear = VPLinear(), Linear()
    exact = VectorGaussian(linear, MEAN, STD, "velocity")
    x = NOISE.normal(torch.empty(4, 3).double())
    for kind in KINDS:
        field = reschedule(VectorGaussian(vp, MEAN, STD, kind), vp, linear)
        out = simulate(x, uniform_grid(50), RK4(), linear, field, NOISE)
        flow = exact.flow(x, time(1), time(0))
        assert (out - flow).abs().max() < 0.05  # the mean at 152, times alpha there, is missed
        at_the_end = field(x, time(1))
        assert at_the_end.isfinite().all()
    clean = reschedule(VectorGaussian(vp, MEAN, STD), vp, linear)(x, time(1))
    assert (clean - MEAN).abs().max() < 0.1
    noise = reschedule(VectorGaussian(vp, MEAN, STD, "noise"), vp, linear)(x, time(1))
    torch.testing.assert_close(noise, x)  # alpha is 0: x is the noise


# What is refused


def test_errors() -> None:
    path = Linear()
    for grid in (karras_grid, log_snr_grid):
        for high, low in ((1.0, 1.0), (1.0, 2.0), (1.0, 0.0), (math.nan, 0.1)):
            with pytest.raises(ValueError, match="need 0 < level_min < level_max"):
                grid(path, 5, high, low)
        with pytest.raises(ValueError, match="level_max <= 4.99.*at which VE ends, got .* and 80"):
            grid(VE(0.1, 5.0), 5, 80.0)
        # which ends at sqrt(50^2 - 0.01^2)
        torch.testing.assert_close(grid(VE(0.01, 50.0), 5, 50.0), grid(VE(0.01, 50.0), 5))
        with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
            grid(path, 0)
    with pytest.raises(ValueError, match="rho must be positive"):
        karras_grid(path, 5, rho=0.0)
    for start, end in ((1.1, 0.0), (1.0, -0.1)):
        with pytest.raises(ValueError, match="start and end must lie in"):
            quadratic_grid(5, start, end)
        with pytest.raises(ValueError, match="start and end must lie in"):
            shifted_grid(5, 2.0, start, end)
    for shift in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="shift must be positive"):
            shifted_grid(5, shift)
    with pytest.raises(ValueError, match="numbers of pixels must be positive"):
        resolution_shift(0, 64)
    with pytest.raises(ValueError, match="tokens must be positive, got 0"):
        token_shift(0)
    with pytest.raises(ValueError, match="base_tokens and max_tokens must differ"):
        token_shift(10, 256, 256)
    with pytest.raises(ValueError, match="number must be >= 0, got -1"):
        with_corrections(uniform_grid(2), -1)
    with pytest.raises(ValueError, match="pairs must have shape"):
        with_corrections(torch.ones(3))
