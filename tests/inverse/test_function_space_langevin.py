from __future__ import annotations

import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.fft
import scipy.linalg
import torch
from scipy import optimize
from torch import Tensor

import fluvial
from fluvial.claims import function_space_langevin as claim
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import simulate
from fluvial.inverse.function_space_langevin import (
    FunctionSpaceLangevin,
    Gaussian,
    GaussianPrior,
    LearnedDrift,
    LearnedPrior,
    ModeNetwork,
    Modes,
    OperatorNetwork,
    PreconditionedLangevin,
    ProductPrior,
    ScoreError,
    clean_prediction,
    coloured_path,
    effective_samples,
    is_trace_class,
    law_after,
    matrix_of,
    mode_kl,
    power_law,
    preconditioner,
    principal,
    r_hat,
    rates,
    regress_error,
    small_time_kl,
    stationary,
)
from fluvial.training.files import save_model

KINDS = ("identity", "prior", "posterior", "optimal")
NOISE = KeyedNoise(3)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return KeyedNoise(seed).normal(torch.empty(shape, dtype=torch.float64))


def time_of(tau: float) -> float:
    return -math.expm1(-tau)


def at(tau: float) -> Tensor:
    return torch.tensor(time_of(tau), dtype=torch.float64)


def decaying(size: int, power: float = 2.0) -> Tensor:
    return torch.arange(1, size + 1, dtype=torch.float64) ** -power


# 1. The stationary law


@pytest.mark.parametrize("observed", [6, 9])
@pytest.mark.parametrize("kind", ["identity", "prior", "posterior", "scaled"])
def test_without_smoothing_the_chain_tends_to_the_posterior_whatever_c(
    kind: Any, observed: int
) -> None:
    mu, a = decaying(9), normal(7, observed)
    gram, y = a.T @ a, normal(1, 7, seed=1)[0]
    c = 0.3 + decaying(9, 1.0) if kind == "scaled" else preconditioner(kind, mu, gram, 0.3)
    full = torch.zeros(9, 9, dtype=torch.float64)
    full[:observed, :observed] = gram / 0.3**2
    wanted = torch.linalg.inv(torch.diag(1 / mu) + full)
    law = stationary(mu, c, gram, 0.3, a.T @ y)
    assert torch.allclose(law.cov, wanted, rtol=0, atol=1e-10)
    data = torch.nn.functional.pad(a.T @ y, (0, 9 - observed)) / 0.3**2
    assert torch.allclose(law.mean, wanted @ data, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_stationary_law_solves_the_lyapunov_equation(kind: Any) -> None:
    """B V + V B^T = 2 C for the drift -B (x - m), at t > 0 and with errors of the score."""
    mu, t, noise = decaying(6), time_of(0.2), 0.4
    a = torch.diag(0.5 + decaying(6, 1.0)) if kind == "optimal" else normal(5, 6)
    gram, y = a.T @ a, normal(1, len(a), seed=1)[0]
    given = gram.diagonal() if kind == "optimal" else gram
    c = preconditioner(kind, mu, given, noise, t=t if kind == "optimal" else 0.0)
    dense = c.ndim == 2
    slope = torch.zeros(6).double() if dense else 0.1 * c * normal(1, 6, seed=2)[0]
    bias = 0.1 * normal(1, 6, seed=3)[0]
    law = stationary(mu, c, given, noise, a.T @ y, t, slope, bias)
    full = c if dense else torch.diag(c)
    smoothed = (1 - t) * torch.diag(mu) + t * full
    b = full @ torch.linalg.inv(smoothed) + torch.diag(slope) + full @ gram / noise**2
    cov = scipy.linalg.solve_continuous_lyapunov(b.numpy(), 2 * full.numpy())
    mean = torch.linalg.solve(b, full @ a.T @ y / noise**2 - bias)
    actual = law.cov if law.cov.ndim == 2 else torch.diag(law.cov)
    assert np.allclose(actual, cov, rtol=1e-9, atol=1e-12)
    assert torch.allclose(law.mean, mean, rtol=1e-9, atol=1e-12)
    eigenvalues = torch.linalg.eigvals(b).real.sort()[0]
    found = rates(mu, c, given, noise, t, slope).sort()[0]
    assert torch.allclose(found, eigenvalues, rtol=1e-9)


# 2. and 3. The worked problems


def test_brownian_sheet() -> None:
    j = torch.arange(1, 201, dtype=torch.float64) - 0.5
    mu = (j[:, None] * j * math.pi**2) ** -2
    assert float(mu[0, 0]) == pytest.approx(0.16425572, abs=5e-9)
    assert float(mu.sum()) == pytest.approx(0.24949365, abs=2e-8)  # (corrected) last digits
    assert float(mu[-1, -1]) == pytest.approx(6.4808e-12, rel=1e-5)
    law = stationary(mu.flatten()[:1], f64(0.01), f64(1.0), 0.01, f64(2.0))
    assert float(law.cov) == pytest.approx(9.993916e-5, rel=1e-7)
    assert float(law.mean) == pytest.approx(2 * float(mu[0, 0]) / (float(mu[0, 0]) + 1e-4))


def heat(j: int, k: int) -> tuple[float, float, float]:
    zeta = math.pi**2 * (j * j + k * k)
    mu, a = math.exp(-0.1 * zeta), math.exp(-0.1 * zeta)
    law = stationary(f64(mu), f64(mu), f64(a * a), 0.005, f64(a))
    return mu, float(law.cov), float(law.mean)


def test_backward_heat() -> None:
    assert heat(1, 1) == pytest.approx((0.1389111, 1.283613e-3, 7.132326), rel=1e-6)
    assert heat(1, 2) == pytest.approx((0.007191883, 7.086441e-3, 2.038594), rel=1e-6)
    assert heat(2, 2)[1:] == pytest.approx((3.723465e-4, 5.545689e-3), rel=1e-6)


def test_heat_with_variances_of_1e_193_stays_finite() -> None:
    modes = Modes((15, 15))
    mu, a = torch.exp(-0.1 * modes.laplacian), torch.exp(-0.1 * modes.laplacian)
    assert 0 < mu.min() < 1e-190
    for kind in KINDS:
        c = preconditioner(kind, mu, a.square(), 0.005)
        if kind == "identity":
            continue  # its rates are 1 / mu
        kappa = rates(mu, c, a.square(), 0.005, t=1e-3)
        assert kappa.isfinite().all() and kappa.min() > 0.9
    c = preconditioner("posterior", mu, a.square(), 0.005)
    assert (rates(mu, c, a.square(), 0.005, t=1e-3) - 1).abs().max() < 1e-3
    model = FunctionSpaceLangevin(modes, a, 0.005, variance=mu)
    y = model.measure(modes.functions(mu.sqrt()[None]), noise=NOISE)
    chains = model.sample(y, 4, noise=NOISE, steps=50)
    assert chains.draws is not None and chains.draws.isfinite().all()


# 4. Rates


def test_rates_of_the_toy() -> None:
    j = torch.arange(1, 101, dtype=torch.float64)
    mu, gram = j**-2, torch.exp(-0.2 * j)
    plain = rates(mu, preconditioner("identity", mu, gram, 0.05), gram, 0.05)
    assert float(plain.min()) == pytest.approx(144.7586, abs=5e-5)
    assert int(plain.argmin()) == 7
    assert float(plain.max()) == pytest.approx(10000.0, abs=1e-5)
    assert int(plain.argmax()) == 99
    assert 2 / float(plain.max()) == pytest.approx(2e-4)
    prior = rates(mu, preconditioner("prior", mu, gram, 0.05), gram, 0.05)
    assert prior.aminmax() == (pytest.approx(1.0, abs=1e-6), pytest.approx(328.4923, abs=5e-5))
    best = rates(mu, preconditioner("posterior", mu, gram, 0.05), gram, 0.05)
    assert torch.allclose(best, torch.ones_like(best), rtol=1e-14)


def test_posterior_preconditioner_of_a_dense_operator_makes_all_rates_one() -> None:
    mu, a = decaying(12), normal(5, 8)
    c = preconditioner("posterior", mu, a.T @ a, 0.1)
    assert c.shape == (12, 12)
    assert torch.allclose(rates(mu, c, a.T @ a, 0.1), torch.ones(12).double(), rtol=1e-10)


def test_curvature_is_that_of_a_quadratic_potential() -> None:
    mu, gram = decaying(5), 0.3 + decaying(5)
    bent = preconditioner("posterior", mu, gram, 0.2, curvature=3.0)
    sharper = preconditioner("posterior", 1 / (1 / mu + 3.0), gram, 0.2)
    assert torch.allclose(bent, sharper, rtol=1e-14)


# 5. The optimal preconditioner


def test_optimal_preconditioner_is_the_root_to_first_order() -> None:
    mu, noise, a, error = 0.7, 0.3, 0.5, 0.4
    lam0, lam1 = 0.2377358491, -0.1484135226

    def found(tau: float) -> float:
        arguments = {"t": time_of(tau), "score_error": error}
        return float(preconditioner("optimal", f64(mu), f64(a * a), noise, **arguments))

    assert found(0.0) == pytest.approx(lam0, abs=1e-10)
    for tau in (1e-2, 1e-3, 1e-4):
        assert (found(tau) - found(0.0)) / tau == pytest.approx(lam1, rel=1e-7)

        def gap(lam: float, tau: float = tau) -> float:
            t = time_of(tau)
            pull = lam / ((1 - t) * mu + t * lam)
            return pull + lam * a * a / noise**2 + error * tau - 1

        root = optimize.brentq(gap, 0.1, 0.4, xtol=1e-16, rtol=1e-15)
        assert root - found(tau) == pytest.approx(0.0076 * tau**2, rel=0.02, abs=2e-15)
        kappa = rates(f64(mu), f64(found(tau)), f64(a * a), noise, time_of(tau), error * tau)
        assert abs(float(kappa) - 1) < 0.05 * tau**2 + 1e-14


def test_optimal_preconditioner_of_an_unobserved_mode_and_its_clip() -> None:
    mu = f64(0.7, 0.2)
    t = time_of(0.01)
    best = preconditioner("optimal", mu, f64(1.0), 0.3, t=t, score_error=f64(0.0, 5.0))
    assert float(best[1]) == pytest.approx(0.2 * (1 - 5 * 0.01))
    clipped = preconditioner("optimal", mu, f64(1.0), 0.3, t=0.5, score_error=f64(0.0, 50.0))
    assert float(clipped[1]) == pytest.approx(0.01 * 0.2)


# 6. The divergence


def kl_of(eb: float, tau: float = 1e-6, ea: float = 0.0) -> float:
    mu, lam, gram, noise, data = f64(0.7), f64(0.25), f64(0.25), 0.3, f64(0.5 * 1.2)
    law = stationary(mu, lam, gram, noise, data, time_of(tau), ea, eb)
    truth = stationary(mu, lam, gram, noise, data)
    return float(mode_kl(law.mean, law.variance, truth.mean, truth.variance))


def test_divergence_of_a_biased_score() -> None:
    assert kl_of(0.02) == pytest.approx(7.6078e-4, rel=1e-4)
    assert kl_of(0.1) == pytest.approx(1.90190e-2, rel=1e-5)


@pytest.mark.parametrize("eb", [0.02, 0.1, -0.05])
@pytest.mark.parametrize("e", [0.3, -0.4])
def test_small_time_expansion_is_right_to_second_order(eb: float, e: float) -> None:
    def rest(tau: float) -> float:
        first = small_time_kl(
            f64(0.7), f64(0.25), f64(0.25), 0.3, f64(0.6), tau, slope=e * tau, bias=eb
        )
        return kl_of(eb, tau, e * tau) - float(first)

    # a right first order leaves tau^2: halved time, a quarter of the rest
    assert rest(2e-3) / rest(1e-3) == pytest.approx(4, rel=0.02)


def test_divergence_keeps_its_digits() -> None:
    r = f64(1e-9, 1e-6, 9e-4, 1.1e-3, 0.5)
    kl = mode_kl(torch.zeros(5), 1 + r, torch.zeros(5), torch.ones(5).double())
    exact = [0.5 * (x - np.log1p(np.longdouble(x))) for x in ((1 + r) - 1).numpy()]
    assert float(kl[0]) == pytest.approx(0.25e-18, rel=1e-6)
    assert np.allclose(kl[1:], np.array(exact[1:], dtype=float), rtol=1e-9)


# 7. The discrete chain


@pytest.mark.parametrize("exact", [True, False])
def test_chain_has_the_mean_variance_and_autocorrelation_of_its_recursion(exact: bool) -> None:
    modes, mu, h, num = Modes((6,)), decaying(6), 0.3, 4000
    a = f64(1.0, 0.5, 0.3, 0.2)
    error = ScoreErrorOf(mu, slope=f64(0.1, -0.1, 0.0, 0.05, 0.2, -0.1), bias=0.05)
    model = FunctionSpaceLangevin(modes, a, 0.4, variance=mu, preconditioner="prior", t=0.05)
    assert model.cov_noise is not None
    kappa = principal(mu, model.cov_noise, model.gram, 0.4, 0.05, error.slope)
    h = 0.3 / float(kappa.rates.max())
    y = f64(0.5, -0.4, 0.3, 0.1)
    law = stationary(mu, mu, model.gram, 0.4, a * y, 0.05, error.slope, error.bias)
    prior = ScoreError(GaussianPrior(mu, mu), error.slope, error.bias)
    # exactness is relative to the model's own rates, which a score error changes
    sampler = PreconditionedLangevin(h, kappa, exact=exact)
    x = mu.sqrt() * NOISE.normal(torch.empty(num, 6, dtype=torch.float64), "start")
    steps = 40
    pairs = torch.full((steps, 2), 0.05, dtype=torch.float64)
    final = simulate(x, pairs, sampler, coloured_path(mu), model.drift(y, prior), NOISE)
    assert isinstance(final, Tensor)
    wanted = law_after(
        steps, h, kappa, law.mean, Gaussian(torch.zeros(6), mu), "exact" if exact else "euler"
    )
    error_of_mean = (wanted.cov / num).sqrt()
    assert ((final.mean(0) - wanted.mean).abs() < 4 * error_of_mean).all()
    # 3 % is 1.3 deviations of a sample variance of 4,000, so 9 % are 4
    assert torch.allclose(final.var(0), wanted.cov, rtol=4 * math.sqrt(2 / num))
    if exact:
        return
    limit = law_after(10**6, h, kappa, law.mean, Gaussian(torch.zeros(6), mu), "euler")
    c = kappa.frame.square()
    assert torch.allclose(limit.cov, 2 * h * c / (1 - (1 - h * kappa.rates) ** 2), rtol=1e-12)


class ScoreErrorOf:
    def __init__(self, mu: Tensor, slope: Tensor, bias: float) -> None:
        self.slope, self.bias = slope * 0.5, bias * mu.sqrt()


def test_euler_inflates_the_variance_and_the_exact_step_does_not() -> None:
    modes, mu = Modes((40,)), decaying(40)
    model = FunctionSpaceLangevin(modes, torch.ones(20), 0.1, variance=mu)
    y = model.measure(modes.functions(mu.sqrt()[None]), noise=NOISE)
    truth = model.posterior(y).variance
    run: dict[str, Any] = {"noise": NOISE, "steps": 200, "h": 0.5, "thin": 4, "states": False}
    for exact, wanted in ((False, 4 / 3), (True, 1.0)):
        chains = model.sample(y, 200, exact=exact, **run)
        # 40 modes of 200 x 37 states, of which a kept one and the next correlate by exp(-2)
        assert float((chains.variance / truth).mean()) == pytest.approx(wanted, rel=0.015)
        rho = 0.5**4 if not exact else math.exp(-2)
        assert float(chains.autocorrelation.mean()) == pytest.approx(rho, abs=0.01)


def test_without_a_preconditioner_unobserved_modes_become_white_noise() -> None:
    mu = Modes((30, 30)).frequencies.double().square().sum(1) ** -3.0
    one = preconditioner("identity", mu, f64(1.0), 0.1)
    law = stationary(mu, one, f64(1.0), 0.1, f64(0.3), 1e-3)
    assert torch.allclose(law.cov[-100:], torch.tensor(1e-3).double(), rtol=1e-3)
    c = preconditioner("prior", mu, f64(1.0), 0.1)
    assert torch.allclose(stationary(mu, c, f64(1.0), 0.1, f64(0.3), 1e-3).cov[1:], mu[1:])


# 8. Score priors


def test_product_prior_with_a_quadratic_potential_is_gaussian() -> None:
    mu, c = decaying(4), f64(2.0, 0.5, 10.0, 40.0)
    lam = f64(0.5, 0.1, 1.0, 0.02)
    x = normal(5, 4)
    prior = ProductPrior(mu, lam, lambda u: 0.5 * c[:, None] * u.square())
    sharper = GaussianPrior(1 / (1 / mu + c), lam)
    for tau in (0.0, 1e-3, 0.3, 2.0):
        t = at(tau)
        assert torch.allclose(prior(x, t), sharper(x, t), rtol=1e-8, atol=1e-12)


def test_both_ways_of_writing_the_score() -> None:
    mu, c, lam, tau = 1.0, 2.0, 0.5, 0.3
    t = at(tau)
    x = f64(1.0, -2.0)[:, None]
    prior = ProductPrior(f64(mu), f64(lam), lambda u: 0.5 * c * u.square())
    assert torch.allclose(prior(x, t), -1.3279144 * x, rtol=1e-7)
    # (corrected) -e^(-tau/2) C C_mu / C_tau E[phi'(X_0) | x] - C / C_tau x, and the clean end
    clean = clean_prediction(prior, x, t)
    smoothed = math.exp(-tau) * mu + float(t) * lam
    first = -math.exp(-tau / 2) * lam * mu / smoothed * c * clean - lam / smoothed * x
    assert torch.allclose(first, prior(x, t), rtol=1e-10)
    sharp = 1 / (1 / mu + c)
    gain = math.exp(-tau / 2) * sharp / (math.exp(-tau) * sharp + float(t) * lam)
    assert torch.allclose(clean, gain * x, rtol=1e-10)


def test_clean_prediction_of_a_double_well_by_integration() -> None:
    mu, lam, t = 1.0, 0.4, 0.2
    prior = ProductPrior(f64(mu), f64(lam), lambda u: 3 * (u.square() - 1).square(), nodes=96)
    u = np.linspace(-6, 6, 200_001)
    density = np.exp(-3 * (u**2 - 1) ** 2 - u**2 / (2 * mu))
    for x in (-1.3, 0.1, 0.8):
        weight = density * np.exp(-((x - math.sqrt(1 - t) * u) ** 2) / (2 * t * lam))
        wanted = (u * weight).sum() / weight.sum()
        clean = clean_prediction(prior, f64(x)[:, None], torch.tensor(t, dtype=torch.float64))
        assert float(clean) == pytest.approx(wanted, abs=1e-8)


def test_dense_gaussian_prior_is_that_of_its_diagonal() -> None:
    mu, lam, x = decaying(5), decaying(5, 1.0), normal(3, 5)
    t = torch.tensor(0.3).double()
    dense = GaussianPrior(mu, torch.diag(lam))(x, t)
    assert torch.allclose(dense, GaussianPrior(mu, lam)(x, t), rtol=1e-12)


def test_path_is_the_paper_s_process() -> None:
    lam, tau = decaying(4), 0.7
    t = at(tau)
    scale, level = coloured_path(lam).marginal(t)
    x = normal(2, 4)
    assert torch.allclose(scale @ x, math.exp(-tau / 2) * x, rtol=1e-14)
    assert torch.allclose(level @ x, (float(t) * lam).sqrt() * x, rtol=1e-14)
    end, noise = coloured_path(lam).marginal(torch.ones(()).double())
    assert torch.equal(end @ x, torch.zeros_like(x))
    assert torch.allclose(noise @ x, lam.sqrt() * x, rtol=1e-14)


# 9. Resolution


@pytest.mark.parametrize("metropolis", [False, True])
def test_coarse_chains_are_the_first_modes_of_fine_ones(metropolis: bool) -> None:
    first = []
    for side in (8, 16):
        modes = Modes((side, side))
        mu = modes.frequencies.double().square().sum(1) ** -1.5
        model = FunctionSpaceLangevin(modes, torch.ones(20), 0.1, variance=mu)
        y = torch.linspace(-0.1, 0.2, 20, dtype=torch.float64)
        chains = model.sample(y, 3, noise=NOISE, steps=30, h=0.4, metropolis=metropolis)
        assert chains.draws is not None
        first.append(chains.draws[..., :64])
    assert first[0].shape == (3, 2, 64)
    assert torch.equal(*first)


# The basis


@pytest.mark.parametrize("shape", [(7,), (6, 9), (3, 4, 5)])
def test_transforms_are_scipy_s_under_the_integral(shape: tuple[int, ...]) -> None:
    f = normal(2, *shape)
    axes = tuple(range(1, len(shape) + 1))
    for kind, wanted, points in (
        ("sine", scipy.fft.dstn(f.numpy(), 1, axes=axes, norm="ortho"), 1),
        ("cosine", scipy.fft.dctn(f.numpy(), 2, axes=axes, norm="ortho"), 0),
    ):
        modes = Modes(shape, kind)  # type: ignore[arg-type]
        c = modes.coefficients(f)
        flat = torch.from_numpy(wanted).flatten(1)[:, modes.order]
        assert torch.allclose(c * math.sqrt(math.prod(n + points for n in shape)), flat, atol=1e-13)
        assert torch.allclose(modes.functions(c), f, atol=1e-13)
        assert modes.functions(c.float()).dtype == torch.float32


@pytest.mark.parametrize(("kind", "k"), [("sine", (2, 3)), ("cosine", (1, 0)), ("cosine", (2, 3))])
def test_coefficients_of_a_function_do_not_depend_on_the_grid(
    kind: Any, k: tuple[int, int]
) -> None:
    for side in (5, 12):
        modes = Modes((side, side), kind)
        i = torch.arange(side, dtype=torch.float64)
        x = (i + 1) / (side + 1) if kind == "sine" else (i + 0.5) / side
        wave = torch.sin if kind == "sine" else torch.cos
        parts = [wave(math.pi * n * x) * (1 if n == 0 else math.sqrt(2)) for n in k]
        c = modes.coefficients((parts[0][:, None] * parts[1])[None])[0]
        at_k = (modes.frequencies == torch.tensor(k)).all(1)
        assert torch.allclose(c, at_k.double(), atol=1e-14)
        assert float(modes.laplacian[at_k]) == pytest.approx(math.pi**2 * (k[0] ** 2 + k[1] ** 2))


def test_modes_of_a_coarse_grid_come_first() -> None:
    coarse, fine = Modes((4, 4)), Modes((9, 9))
    assert torch.equal(fine.frequencies[:16], coarse.frequencies)
    assert torch.equal(fine.order.argsort(), fine.place)
    c = normal(1, 16)
    again = fine.coefficients(fine.functions(c))
    assert torch.allclose(again[:, :16], c, atol=1e-14) and again[:, 16:].abs().max() < 1e-14


def test_power_law_is_found_again() -> None:
    modes = Modes((12, 12))
    square = modes.frequencies.double().square().sum(1)
    scale, decay = power_law((0.3 * square**-1.7).sqrt()[None], modes)
    assert (scale, decay) == (pytest.approx(0.3), pytest.approx(1.7))


def test_trace_class_is_told_by_the_decay() -> None:
    assert is_trace_class(decaying(100, 1.2)) and not is_trace_class(decaying(100, 0.9))
    assert not is_trace_class(torch.ones(100))
    two_d = Modes((20, 20)).laplacian
    assert is_trace_class(two_d**-1.2) and not is_trace_class(two_d**-0.8)


# What is measured


class Heat:
    """An operator on functions with the three methods of the protocol, and nothing else."""

    def __init__(self, modes: Modes, spectrum: Tensor) -> None:
        self.modes, self.spectrum = modes, spectrum

    def A(self, x: Tensor) -> Tensor:
        return self.modes.functions(self.modes.coefficients(x) * self.spectrum)

    A_adjoint = A

    def A_dagger(self, y: Tensor) -> Tensor:
        raise NotImplementedError


def test_spectrum_matrix_and_operator_are_one_measurement() -> None:
    modes = Modes((4, 4))
    a = torch.exp(-0.02 * modes.laplacian)
    mu = modes.laplacian**-1.5
    operator = Heat(modes, a)
    # its values on the grid, of which each is a measurement with the noise of all of them
    scale = math.sqrt(modes.density)
    by_values = FunctionSpaceLangevin(modes, operator, 0.1 * scale, variance=mu)
    by_spectrum = FunctionSpaceLangevin(modes, a, 0.1, variance=mu)
    by_matrix = FunctionSpaceLangevin(modes, torch.diag(a), 0.1, variance=mu)
    matrix = matrix_of(operator, modes)
    as_matrix = FunctionSpaceLangevin(modes, matrix, 0.1 * scale, variance=mu)
    y = normal(1, 16)[0]
    on_grid = modes.functions(y[None])[0]
    wanted = by_spectrum.posterior(y)
    for model, data in (
        (by_values, on_grid),
        (by_matrix, y),
        (as_matrix, on_grid.flatten()),
    ):
        law = model.posterior(data)
        assert torch.allclose(law.mean, wanted.mean, atol=1e-12)
        assert torch.allclose(law.variance, wanted.variance, rtol=1e-10)
        assert torch.allclose(
            model.gram if model.gram.ndim == 1 else model.gram.diagonal(),
            model.observed.gram_diagonal,
        )
    # the drift, and so the chains, up to rounding
    chains = [
        model.sample(data, 3, noise=NOISE, steps=8, thin=2)
        for model, data in ((by_spectrum, y), (by_values, on_grid))
    ]
    assert torch.allclose(chains[0].draws, chains[1].draws, atol=1e-12)  # type: ignore[arg-type]


def test_core_operators_serve() -> None:
    from fluvial.core.operators.radon import Radon

    modes = Modes((9, 9))
    radon = Radon(torch.linspace(0, 2.5, 4), (9, 9))
    mu = 3 * modes.laplacian**-1.5
    model = FunctionSpaceLangevin(modes, radon, 0.3, variance=mu)
    x, y = normal(2, 81), normal(2, 4, 9, seed=1)
    inner = (model.observed.A(x) * y).sum()
    assert float(inner) == pytest.approx(float((x * model.observed.A_adjoint(y)).sum()))
    matrix = matrix_of(radon, modes)
    assert torch.allclose(matrix.square().sum(0), model.gram)
    exact = FunctionSpaceLangevin(modes, matrix, 0.3, variance=mu)
    truth = mu.sqrt()[None] * normal(1, 81, seed=2)
    data = model.measure(modes.functions(truth), noise=NOISE)[0]
    law = exact.posterior(data.flatten())
    assert exact.cov_noise is not None and exact.cov_noise.shape == (81, 81)
    run: dict[str, Any] = {"noise": NOISE, "steps": 60, "h": 1.0, "thin": 1}
    chains = exact.sample(data.flatten(), 100, **run)
    deviation = law.variance.sqrt()
    # 4,500 draws, of which neighbours correlate by 1 / e: some 2,000 independent ones
    assert ((chains.mean - law.mean).abs() / deviation).max() < 4.5 / math.sqrt(2000)
    assert torch.allclose(chains.variance, law.variance, rtol=5 * math.sqrt(2 / 2000))
    # with the diagonal of the Gram alone it is the same law, reached by Euler and Metropolis
    run |= {"steps": 400, "h": 0.4, "burn": 200, "exact": False, "metropolis": True}
    approximate = model.sample(data, 60, **run)
    assert 0.2 < float(approximate.acceptance) < 0.99  # type: ignore[arg-type]
    assert ((approximate.mean - law.mean).abs() / deviation).max() < 0.35


# Metropolis


def test_metropolis_takes_every_exact_step_of_a_gaussian() -> None:
    model = FunctionSpaceLangevin(Modes((20,)), torch.ones(8), 0.1, variance=decaying(20))
    y = normal(1, 8)[0]
    kept = [
        model.sample(y, 5, noise=NOISE, steps=20, h=0.7, metropolis=metropolis)
        for metropolis in (False, True)
    ]
    assert torch.allclose(kept[0].draws, kept[1].draws, atol=1e-13)  # type: ignore[arg-type]
    assert torch.equal(kept[1].acceptance, torch.ones(20).double())  # type: ignore[arg-type]
    matrix = FunctionSpaceLangevin(
        Modes((6,)), normal(4, 6), 0.3, variance=decaying(6), preconditioner="prior"
    )
    chains = matrix.sample(normal(1, 4)[0], 5, noise=NOISE, steps=20, metropolis=True)
    assert float(chains.acceptance) > 1 - 1e-12  # type: ignore[arg-type]


def test_metropolis_corrects_euler() -> None:
    mu = decaying(40)
    model = FunctionSpaceLangevin(Modes((40,)), torch.ones(20), 0.1, variance=mu)
    y, truth = torch.zeros(20).double(), model.posterior(torch.zeros(20).double()).variance
    chains = model.sample(
        y, 200, noise=NOISE, steps=200, h=0.5, thin=4, exact=False, metropolis=True, states=False
    )
    assert float((chains.variance / truth).mean()) == pytest.approx(1.0, rel=0.015)
    assert 0.7 < float(chains.acceptance.mean()) < 0.99  # type: ignore[union-attr]


def test_acceptance_does_not_fall_with_independent_modes() -> None:
    rates_of = []
    for side in (4, 16):
        modes = Modes((side, side))
        mu = modes.laplacian**-1.5
        model = FunctionSpaceLangevin(modes, torch.ones(4), 0.1, variance=mu)
        y = torch.zeros(4).double()
        run: dict[str, Any] = {"noise": NOISE, "steps": 20, "h": 0.6, "exact": False}
        chains = model.sample(y, 8, metropolis=True, **run)
        assert chains.acceptance is not None
        rates_of.append(chains.acceptance[:16])
    assert torch.equal(*rates_of)


def moments(log_density: np.ndarray, x: np.ndarray) -> tuple[float, float]:
    weight = np.exp(log_density - log_density.max())
    mean = (x * weight).sum() / weight.sum()
    return float(mean), float(((x - mean) ** 2 * weight).sum() / weight.sum())


@pytest.mark.parametrize("exact", [True, False])
def test_chain_of_a_double_well_samples_the_smoothed_posterior(exact: bool) -> None:
    """Its density is p_t exp(-|y - A x|^2 / 2 s^2): Proposition 5.2 without an error."""
    mu, a, noise, y, t = 1.0, 0.8, 0.9, 0.5, 0.1

    def phi(u: Any) -> Any:
        return 2 * (u**2 - 1) ** 2

    model = FunctionSpaceLangevin(
        Modes((1,)), f64(a), noise, prior=phi, variance=f64(mu), t=t, preconditioner="prior"
    )
    u = np.linspace(-4, 4, 2001)
    prior = np.exp(-phi(u) - u**2 / (2 * mu))
    kernel = np.exp(-((u[:, None] - math.sqrt(1 - t) * u) ** 2) / (2 * t * mu))
    mean, variance = moments(np.log(kernel @ prior) - (y - a * u) ** 2 / (2 * noise**2), u)
    run: dict[str, Any] = {"noise": NOISE, "steps": 120, "h": 0.25, "thin": 2, "burn": 40}
    corrected = model.sample(f64(y), 500, exact=exact, metropolis=True, **run)
    # 500 chains that mix slowly between the wells: at least one independent draw of each
    error = math.sqrt(variance / 500)
    assert abs(float(corrected.mean) - mean) < 4 * error
    assert abs(float(corrected.variance) - variance) < 4 * error * math.sqrt(2 * variance)
    plain = model.sample(f64(y), 500, exact=exact, **run)
    assert abs(float(plain.variance) - variance) > abs(float(corrected.variance) - variance)


def test_score_for_another_preconditioner_is_right_without_smoothing_only() -> None:
    mu, c, other = decaying(5), decaying(5, 1.0), decaying(5, 3.0)
    x = normal(2, 5)

    def phi(u: Tensor) -> Tensor:
        return u.square().square()

    for t, same in ((0.0, True), (0.3, False)):
        time = torch.tensor(t, dtype=torch.float64)
        changed = other / c * ProductPrior(mu, c, phi)(x, time)
        right = ProductPrior(mu, other, phi)(x, time)
        assert torch.allclose(changed, right, rtol=1e-8) is same


# Learned priors


def test_untrained_network_is_the_gaussian() -> None:
    modes, mu = Modes((5, 5)), 2 * Modes((5, 5)).laplacian ** -1.2
    lam, x, t = mu / (1 + 3 * mu), normal(3, 25), torch.tensor(0.2, dtype=torch.float64)
    for network in (ModeNetwork(modes.frequencies), OperatorNetwork(modes, kept=3, width=4)):
        learned = LearnedPrior(network.double(), mu, lam)
        wanted = GaussianPrior(mu, lam)(x, t)
        assert torch.allclose(LearnedDrift(learned)(x, t), wanted, rtol=1e-12)
        eps = learned(x, t.expand(3))
        assert torch.allclose(-(lam / t).sqrt() * eps, wanted, rtol=1e-12)
        # nothing diverges where eps is 0
        start = LearnedDrift(learned)(x, torch.tensor(0.0, dtype=torch.float64))
        assert torch.allclose(start, -lam / mu * x, rtol=1e-12)


def awake(network: Any) -> Any:
    with torch.no_grad():
        for name, value in network.named_parameters():
            value += 0.3 * KeyedNoise(1).normal(value, name)
    return network


def test_mode_network_sees_a_mode_alone_and_operator_network_does_not() -> None:
    modes = Modes((4, 4))
    x, time = normal(2, 16).float(), torch.full((2,), 0.3)
    moved = x.clone()
    moved[:, 3] += 1
    alone = awake(ModeNetwork(modes.frequencies, width=8))
    changed = alone(moved, time[:, None].expand(2, 16)) != alone(x, time[:, None].expand(2, 16))
    assert changed[:, 3].all() and int(changed.sum()) == 2
    assert torch.equal(
        alone(x[:, :4], time[:, None].expand(2, 4)), alone(x, time[:, None].expand(2, 16))[:, :4]
    )
    together = awake(OperatorNetwork(modes, kept=2, width=4, depth=2))
    assert int((together(moved, time) != together(x, time)).sum()) == 32
    padded = torch.nn.functional.pad(x[:, :9], (0, 7))
    assert torch.allclose(together(x[:, :9], time), together(padded, time)[:, :9], atol=1e-6)
    assert not torch.allclose(together(x, time), together(x, 2 * time), atol=1e-3)


def test_table_of_a_learned_score_is_the_network() -> None:
    modes = Modes((3, 3))
    mu = modes.laplacian**-1.2
    network = awake(ModeNetwork(modes.frequencies, width=8)).double()
    field = LearnedDrift(LearnedPrior(network, mu, 0.3 * mu))
    x, t = mu.sqrt() * normal(500, 9), torch.tensor(0.05, dtype=torch.float64)
    x[0] *= 1e6
    with torch.no_grad():
        tabulated = field(x, t)
        exact = field.prior.drift(x, t)
    gauss = GaussianPrior(mu, 0.3 * mu)(x, t)
    spread = (exact - gauss).std(0)
    assert (spread > 0.1 * gauss[1:].std(0)).all()
    # straight lines between values that are 0.07 apart in asinh(8 x)
    assert ((tabulated - exact)[1:].abs() < 5e-3 * spread).all()
    # far out a constant, beside what the Gaussian says there
    assert torch.allclose(tabulated[0], exact[0], rtol=1e-4)
    assert torch.equal(field(x, t), exact)  # with gradients it is the network itself


def laplace(rows: int, mu: Tensor, seed: int = 0) -> Tensor:
    u = KeyedNoise(seed).uniform(torch.empty(rows, len(mu), dtype=torch.float64)) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs()) * (mu / 2).sqrt()


def test_training_learns_the_score_of_heavy_tails() -> None:
    modes, mu = Modes((16,)), decaying(16)
    model = FunctionSpaceLangevin(
        modes, torch.ones(4), 0.2, prior=ModeNetwork(modes.frequencies), decay="free", centre=False
    )
    functions = modes.functions(laplace(4000, mu))
    model.fit(functions, steps=120, batch_size=256, lr=1e-2, ema=0.9, progress=False)
    variance, cov = model.variance, model.cov_noise
    assert variance is not None and cov is not None
    # a sample variance of 4,000 with a kurtosis of 6
    assert torch.allclose(variance, mu, rtol=4 * math.sqrt(5 / 4000))
    t = 0.1
    x0 = laplace(400, mu, seed=1)
    x = math.sqrt(1 - t) * x0 + (t * cov).sqrt() * normal(400, 16, seed=2)
    u = torch.linspace(-14, 14, 4001, dtype=torch.float64)
    time = torch.tensor(t, dtype=torch.float64)
    with torch.no_grad():
        learned, gauss = model.prior(x, time), GaussianPrior(variance, cov)(x, time)
    assert isinstance(learned, Tensor)
    for j in (6, 15):
        grid = u * mu[j].sqrt()
        logs = -math.sqrt(2) * u.abs() - (x[:, j, None] - math.sqrt(1 - t) * grid).square() / (
            2 * t * cov[j]
        )
        clean = (logs.softmax(1) * grid).sum(1)
        exact = -(x[:, j] - math.sqrt(1 - t) * clean) / t
        error, of_gauss = ((s[:, j] - exact).square().mean() for s in (learned, gauss))
        assert float(error) < 0.25 * float(of_gauss)


def test_operator_network_trains_and_its_score_error_is_measured() -> None:
    modes = Modes((6, 6))
    mu = modes.laplacian**-1.5
    x = mu.sqrt() * normal(400, 36)
    x = x * (0.3 + KeyedNoise(2).uniform(x[:, :1]))  # modes that are large together
    model = FunctionSpaceLangevin(
        modes, torch.ones(4), 0.01, prior=OperatorNetwork(modes, kept=4, width=8, depth=1)
    )
    functions = modes.functions(x)
    options: dict[str, Any] = {"batch_size": 64, "lr": 1e-2, "ema": 0.5, "progress": False}
    model.fit(functions, steps=1, **options)
    before = float(model.loss(functions, noise=NOISE)["loss"].detach())
    model.fit(functions, steps=60, **options)
    assert float(model.loss(functions, noise=NOISE)["loss"].detach()) < before
    chains = model.sample(torch.zeros(4), 4, noise=NOISE, steps=8, thin=2, metropolis=True)
    assert chains.draws is not None and chains.draws.dtype == torch.float32
    assert chains.acceptance is not None and chains.acceptance.ndim == 0


def test_error_of_a_score_is_found_by_regression() -> None:
    mu, lam, x = decaying(5), decaying(5, 1.0), normal(50, 5)
    t = torch.tensor(0.1, dtype=torch.float64)
    wrong = ScoreError(GaussianPrior(mu, lam), f64(0.1, 0.2, -0.1, 0, 0.3), f64(0, 1, 2, 3, 4))
    slope, bias = regress_error(wrong, mu, lam, x, t)
    assert torch.allclose(slope, wrong.slope, atol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(bias, wrong.bias, atol=1e-12)  # type: ignore[arg-type]


# Fitting


def test_fit_of_a_few_functions_gives_the_law_of_their_decay() -> None:
    modes = Modes((16, 16), "cosine")
    square = modes.frequencies.double().square().sum(1)
    law = torch.where(square > 0, 0.2 * square.clamp(min=1) ** -1.4, 0.5)
    mean = 3 * law.sqrt()
    x = mean + law.sqrt() * normal(40, 256)
    model = FunctionSpaceLangevin(modes, torch.ones(4), 0.1).fit(modes.functions(x))
    assert model.variance is not None and model.mean is not None
    assert torch.allclose(model.variance[1:], law[1:], rtol=0.3)
    assert float(model.variance[0]) == pytest.approx(0.5, rel=4 * math.sqrt(2 / 40))
    assert ((model.mean - mean).abs() < 5 * (law / 40).sqrt()).all()
    about_zero = FunctionSpaceLangevin(modes, torch.ones(4), 0.1, centre=False)
    assert about_zero.fit(modes.functions(x)).mean.abs().max() == 0  # type: ignore[union-attr]


def test_measurement_is_explained_about_the_mean() -> None:
    modes, mean = Modes((6,)), torch.linspace(1, 2, 6, dtype=torch.float64)
    model = FunctionSpaceLangevin(modes, torch.ones(3), 0.1, variance=decaying(6), mean=mean)
    law = model.posterior(mean[:3])
    assert torch.allclose(law.mean, mean)
    chains = model.sample(mean[:3], 400, noise=NOISE, steps=20, h=1.0, thin=1)
    assert ((chains.mean - mean).abs() < 5 * (law.variance / 2000).sqrt()).all()
    assert torch.allclose(chains.mean_function(), modes.functions(chains.mean[None])[0])


# Chains


def chain_model(**options: Any) -> tuple[FunctionSpaceLangevin, Tensor]:
    model = FunctionSpaceLangevin(Modes((5,)), torch.ones(3), 0.2, variance=decaying(5), **options)
    return model, f64(0.3, -0.2, 0.1)


def test_a_chain_depends_on_its_row_alone_and_thinning_changes_nothing() -> None:
    model, y = chain_model()
    run: dict[str, Any] = {"noise": NOISE, "steps": 24, "h": 0.3, "burn": 0}
    all_states = model.sample(y, 6, thin=1, **run)
    assert all_states.draws is not None
    again = model.sample(y, 6, thin=1, **run)
    assert torch.equal(again.draws, all_states.draws)  # type: ignore[arg-type]
    some = model.sample(y, 2, thin=6, **run)
    assert torch.equal(some.draws, all_states.draws[:2, 5::6])  # type: ignore[arg-type]
    rows = model.sample(y, 2, thin=1, **{**run, "noise": NOISE.rows(torch.tensor([4, 1]))})
    assert torch.equal(rows.draws, all_states.draws[[4, 1]])  # type: ignore[arg-type]
    each = model.sample(torch.stack([y, 2 * y]), 2, thin=1, **run)
    assert torch.equal(each.draws[:1], all_states.draws[:1])  # type: ignore[index]


def test_chains_have_the_dtype_of_the_measurement() -> None:
    model, y = chain_model()
    run: dict[str, Any] = {"noise": NOISE, "steps": 40, "h": 0.2, "metropolis": True}
    double, single = model.sample(y, 4, **run).draws, model.sample(y.float(), 4, **run).draws
    assert double is not None and single is not None
    assert (double.dtype, single.dtype) == (torch.float64, torch.float32)
    # the same noise, but for the tails of single precision
    assert torch.allclose(double.float(), single, atol=1e-4)
    assert model.posterior(y.float()).mean.dtype == torch.float64


def test_moments_are_those_of_the_draws() -> None:
    model, y = chain_model()
    chains = model.sample(y, 7, noise=NOISE, steps=40, thin=3, burn=10)
    draws = chains.draws
    assert draws is not None and draws.shape == (7, 10, 5)
    flat = draws.flatten(0, 1)
    assert torch.allclose(chains.mean, flat.mean(0), atol=1e-13)
    assert torch.allclose(chains.variance, flat.var(0, correction=0), rtol=1e-10)
    before, after = draws[:, :-1].flatten(0, 1), draws[:, 1:].flatten(0, 1)
    slope = [
        np.polyfit(*pair, 1)[0] for pair in zip(before.T.numpy(), after.T.numpy(), strict=True)
    ]
    assert np.allclose(chains.autocorrelation, slope, rtol=1e-9)
    assert chains.functions().shape == (70, 5)
    assert torch.allclose(chains.std_function(), chains.functions().std(0))
    moments_only = model.sample(y, 7, noise=NOISE, steps=40, thin=3, burn=10, states=False)
    assert torch.equal(moments_only.mean, chains.mean)
    with pytest.raises(ValueError, match="states=True"):
        moments_only.functions()


def test_diagnostics_of_an_autoregression() -> None:
    rho, steps, num = 0.8, 400, 40
    xi = normal(steps, num, 3)
    x = torch.empty(num, steps, 3, dtype=torch.float64)
    state = xi[0]
    for k in range(steps):
        state = rho * state + math.sqrt(1 - rho**2) * xi[k]
        x[:, k] = state
    wanted = num * steps * (1 - rho) / (1 + rho)
    assert torch.allclose(effective_samples(x), torch.tensor(wanted).double(), rtol=0.15)
    # means of half chains vary by the correlation time over their length
    inflation = (1 + rho) / (1 - rho) / (steps / 2)
    assert torch.allclose(r_hat(x).square() - 1, torch.tensor(inflation).double(), rtol=0.4)
    apart = x.clone()
    apart[: num // 2, :, 1] += 3
    assert float(r_hat(apart)[1]) > 1.5
    assert float(effective_samples(apart)[1]) < 0.05 * wanted
    model, y = chain_model()
    chains = model.sample(y, 8, noise=NOISE, steps=60, h=1.0, thin=1)
    assert chains.r_hat().shape == chains.effective_samples().shape == (5,)


def test_refining_the_grid_changes_no_rate_with_the_preconditioner_and_all_without() -> None:
    spread, fastest = {}, {}
    for kind in ("identity", "posterior"):
        for side in (8, 32):
            modes = Modes((side, side))
            mu, gram = 0.1 * modes.laplacian**-1.6, torch.exp(-1e-3 * modes.laplacian[:64])
            kappa = rates(mu, preconditioner(kind, mu, gram, 0.01), gram, 0.01)  # type: ignore
            spread[kind, side] = float(kappa.max() / kappa.min())
            fastest[kind, side] = float(kappa.max())
    assert spread["posterior", 32] == pytest.approx(1) == fastest["posterior", 32]
    assert spread["identity", 32] > 20 * spread["identity", 8]
    assert fastest["identity", 32] > 20 * fastest["identity", 8]


# Files


@pytest.mark.parametrize("which", ["spectrum", "matrix", "operator"])
def test_saved_and_loaded_it_draws_the_same(which: str, tmp_path: Path) -> None:
    modes = Modes((4, 4))
    a = torch.exp(-0.01 * modes.laplacian)
    forward = {"spectrum": a[:9], "matrix": normal(5, 9), "operator": Heat(modes, a)}[which]
    network = awake(ModeNetwork(modes.frequencies, width=4)) if which == "spectrum" else None
    model = FunctionSpaceLangevin(modes, forward, 0.1, prior=network, decay="free")
    functions = modes.functions(modes.laplacian**-0.8 * normal(30, 16))
    model.fit(functions, **({"steps": 1, "progress": False} if network else {}))
    y = model.measure(functions[:1], noise=NOISE)
    path = tmp_path / "model.safetensors"
    model.save(path)
    again = FunctionSpaceLangevin.load(path, forward=forward if which == "operator" else None)
    options: dict[str, Any] = {"noise": NOISE, "steps": 12, "thin": 2}
    wanted = model.sample(y, 3, **options).draws
    draws = again.sample(y, 3, **options).draws
    # eigenvectors of a matrix depend on where in memory it lies
    assert torch.allclose(draws, wanted, rtol=0, atol=1e-11)  # type: ignore[arg-type]
    assert torch.equal(draws, wanted) or which == "matrix"  # type: ignore[arg-type]
    assert again.use is not None and again.use.system == "function-space-langevin"
    with pytest.raises(FileExistsError):
        model.save(path)
    if which == "operator":
        with pytest.raises(ValueError, match="pass forward="):
            FunctionSpaceLangevin.load(path)
    else:
        assert torch.equal(fluvial.load(path).variance, model.variance)


def test_what_cannot_be_saved_or_loaded_is_said(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_model(path, {"a": torch.ones(1)}, {"system": "meanflow"})
    with pytest.raises(ValueError, match="'meanflow', not 'function-space-langevin'"):
        FunctionSpaceLangevin.load(path)
    with pytest.raises(ValueError, match="fit functions"):
        FunctionSpaceLangevin(Modes((4,)), torch.ones(2), 0.1).save(tmp_path / "x")
    potential = FunctionSpaceLangevin(
        Modes((4,)), torch.ones(2), 0.1, prior=lambda u: u**4, variance=decaying(4)
    )
    with pytest.raises(ValueError, match="potential is code"):
        potential.save(tmp_path / "x")


# Bad input


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"obs_noise": 0.0}, "obs_noise must be positive"),
        ({"forward": torch.ones(5)}, "forward must be .* N <= 4"),
        ({"forward": f64(1.0, math.nan)}, "forward holds values"),
        ({"t": 1.0}, r"t must lie in \[0, 1\)"),
        ({"decay": "fast"}, "decay must be"),
        ({"preconditioner": "best"}, "preconditioner must be one of identity"),
        ({"preconditioner": f64(1, 1, 1)}, r"cov_noise must be \(4,\)"),
        ({"preconditioner": f64(1, -1, 1, 1)}, "cov_noise must be positive"),
        ({"preconditioner": torch.ones(4, 4).tril()}, "symmetric"),
        ({"variance": f64(1, 0, 1, 1)}, "variance must be positive and finite, got 0 at 1"),
        ({"variance": f64(1, 1)}, r"variance must be \(4,\)"),
        ({"mean": torch.zeros(4)}, "mean is given without variance"),
        ({"variance": decaying(4), "mean": torch.zeros(3)}, "mean must be"),
        ({"variance": decaying(4), "score_error": 0.1}, "score_error is for kind='optimal'"),
        (
            {"preconditioner": "optimal", "variance": decaying(4), "forward": torch.eye(4)},
            "diagonal Gram",
        ),
        ({"variance": decaying(4), "curvature": -100.0}, "posterior precision negative"),
        (
            {"prior": lambda u: u**4, "preconditioner": torch.eye(4)},
            "a matrix is for a Gaussian prior",
        ),
    ],
    ids=str,
)
def test_bad_models_are_refused(options: dict[str, Any], match: str) -> None:
    given = {"forward": torch.ones(2), "obs_noise": 0.1, **options}
    with pytest.raises(ValueError, match=match):
        FunctionSpaceLangevin(Modes((4,)), given.pop("forward"), given.pop("obs_noise"), **given)


def test_what_is_not_trace_class_is_flagged() -> None:
    modes = Modes((10, 10))
    with pytest.warns(UserWarning, match="not trace-class"):
        FunctionSpaceLangevin(modes, torch.ones(2), 0.1, preconditioner=torch.ones(100))
    with pytest.warns(UserWarning, match="variance: .* white noise"):
        FunctionSpaceLangevin(modes, torch.ones(2), 0.1, variance=modes.laplacian**-0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FunctionSpaceLangevin(modes, torch.ones(2), 0.1, variance=modes.laplacian**-1.5)


def test_bad_functions_are_refused() -> None:
    model = FunctionSpaceLangevin(Modes((4,)), torch.ones(2), 0.1)
    good = normal(5, 4)
    with pytest.raises(TypeError, match="floating"):
        model.fit(torch.ones(5, 4, dtype=torch.int64))
    for functions, match in (
        (normal(5, 3), "functions must have shape"),
        (good[:1], "two or more"),
        (good / 0, "not finite, in row 0"),
    ):
        with pytest.raises(ValueError, match=match):
            model.fit(functions)
    with pytest.raises(ValueError, match="no network for"):
        model.fit(good, steps=3)
    with pytest.raises(ValueError, match="no network to train"):
        model.loss(good, noise=NOISE)
    learned = FunctionSpaceLangevin(
        Modes((4,)), torch.ones(2), 0.1, prior=ModeNetwork(Modes((4,)).frequencies)
    )
    with pytest.raises(ValueError, match="a network is trained for"):
        learned.fit(good)
    with pytest.raises(ValueError, match="fit functions"):
        learned.sample(f64(1, 1), noise=NOISE)
    flat = FunctionSpaceLangevin(Modes((4,)), torch.ones(2), 0.1, decay="free")
    with pytest.raises(ValueError, match="modes must be positive"):
        flat.fit(torch.ones(5, 4))


@pytest.mark.parametrize(
    ("y", "options", "match"),
    [
        (f64(1, 1), {}, r"y must have shape \(3,\)"),
        (f64(1, 1, math.inf), {}, "y holds values"),
        (torch.ones(2, 3).double(), {"num": 3}, "one a chain, got 2"),
        (None, {"num": 0}, "num=0"),
        (None, {"steps": 5, "thin": 10}, "burn <= steps - thin"),
        (None, {"h": 0.0}, "h must be positive"),
        (None, {"h": 2.1, "exact": False}, "h must be below 2 / max"),
        (None, {"x0": torch.zeros(2, 5), "num": 3}, "x0 must hold 3 functions"),
    ],
    ids=str,
)
def test_bad_runs_are_refused(y: Tensor | None, options: dict[str, Any], match: str) -> None:
    model, good = chain_model()
    with pytest.raises(ValueError, match=match):
        model.sample(good if y is None else y, **{"noise": NOISE, **options})


def test_a_covariance_that_is_none_and_a_complex_operator_are_refused() -> None:
    for bad in (-torch.eye(4).double(), 1 - torch.eye(4).double()):
        with pytest.raises(ValueError, match="cov_noise must be positive definite"):
            FunctionSpaceLangevin(Modes((4,)), torch.ones(4), 0.1, preconditioner=bad)
    with pytest.raises(TypeError, match="forward must be real, got torch.complex64"):
        FunctionSpaceLangevin(Modes((4,)), torch.ones(4, dtype=torch.complex64), 0.1)


def test_other_bad_calls_are_refused() -> None:
    model, y = chain_model()
    with pytest.raises(TypeError, match="y must be a floating tensor"):
        model.sample(torch.ones(3, dtype=torch.int64), noise=NOISE)
    with pytest.raises(ValueError, match="runs away if its score errs by more than 100 %"):
        rates(decaying(3), decaying(3), f64(1.0), 0.1, slope=f64(0, -1.2, 0))
    with pytest.raises(ValueError, match="slope needs a diagonal cov_noise"):
        rates(decaying(3), torch.eye(3), f64(1.0), 0.1, slope=0.1)
    with pytest.raises(ValueError, match="4096 are the most"):
        preconditioner("posterior", decaying(5000), torch.eye(2), 0.1)
    with pytest.raises(ValueError, match=r"gram must be \(N,\)"):
        rates(decaying(3), decaying(3), torch.ones(4), 0.1)
    with pytest.raises(ValueError, match="no closed form"):
        FunctionSpaceLangevin(
            Modes((3,)), torch.ones(2), 0.1, prior=lambda u: u**4, variance=decaying(3)
        ).posterior(f64(1, 1))
    with pytest.raises(TypeError, match="an object with A and A_adjoint"):
        FunctionSpaceLangevin(Modes((3,)), "blur", 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind must be sine or cosine"):
        Modes((3,), "fourier")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most 3"):
        Modes((3,)).functions(torch.ones(1, 4))
    sampler = PreconditionedLangevin(0.1, model.principal())
    drift, path = model.drift(y), coloured_path(decaying(5))
    pairs = f64(1e-3, 2e-3)[None]
    with pytest.raises(ValueError, match=r"pairs \(t, t\)"):
        simulate(torch.zeros(1, 5).double(), pairs, sampler, path, drift, NOISE)
    with pytest.raises(ValueError, match="predicts 'drift', got 'score'"):
        score = type("Score", (), {"predicts": "score", "__call__": lambda *a: None})()
        simulate(torch.zeros(1, 5).double(), f64(0, 0)[None], sampler, path, score, NOISE)
    for draws in (torch.ones(2, 3, 1), torch.ones(2, 8)):
        with pytest.raises(ValueError, match="draws must be"):
            r_hat(draws)


# The claim


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("smoke") / "run"
    report = claim.run(claim.PRESETS["smoke"], "smoke", out, progress=False)
    return out, json.loads(json.dumps(report.as_json()))


def test_claim_has_its_schema_and_all_its_files(smoke: tuple[Path, dict[str, Any]]) -> None:
    out, result = smoke
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["system"], result["verdict"]) == ("function-space-langevin", "not judged")
    rows = {(row["prior"], row["arm"], row["modes"]): row for row in result["table"]}
    assert len(rows) == 2 * len(claim.ARMS) + 2 * len(claim.LEARNED)
    for row in rows.values():
        assert np.isfinite([value for value in row.values() if isinstance(value, float)]).all()
    assert len(result["comparisons"]) == 9
    for name in ("config.json", "table.md", "README.md", "model.safetensors"):
        assert (out / name).stat().st_size > 0, name
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert fluvial.load(out / "model.safetensors").modes.shape == (8, 8)


def test_claim_goes_on_where_it_stopped(smoke: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, result = smoke
    again = tmp_path / "again"
    for kind in ("gaussian", "train"):  # as a killed run would leave it: the last part not done
        shutil.copytree(out / kind, again / kind)
    (again / "gaussian" / "posterior-8-0.json").unlink()
    shutil.copyfile(out / "config.json", again / "config.json")
    resumed = claim.run(claim.PRESETS["smoke"], "smoke", again, progress=False).as_json()
    assert json.loads(json.dumps(resumed))["comparisons"] == result["comparisons"]


def test_largest_stable_step_is_two_over_the_fastest_rate() -> None:
    task = claim.problem(claim.PRESETS["smoke"], 8, 4, 0)
    for arm in claim.ARMS:
        model = claim.build(claim.PRESETS["smoke"], task, arm, 8, 0)
        wanted = 2 / float(model.principal().rates.max())
        found = claim.stable_step(model, task.y, None, 0)
        # 200 steps show growth by 3.5 % and more, in a grid of factors of 4 %
        assert 0.96 < found / wanted < 1.08


def test_rates_of_shells_are_those_of_their_modes() -> None:
    modes = Modes((16, 16))
    wanted = 0.01 * modes.frequencies.double().square().sum(1)
    frequency, found = claim.shell_rates(torch.exp(-3 * wanted), modes, 3)
    assert torch.allclose(found, 0.01 * frequency.square(), rtol=0.2)


def test_windows_are_means_over_squares_and_leave_out_the_photograph() -> None:
    image = torch.arange(48, dtype=torch.float64).reshape(6, 8)
    part = claim.window(image, 2, f64(0.99, 0.0, 0.99))
    block = image[:6, 2:8].reshape(2, 3, 2, 3).mean((1, 3))
    assert torch.allclose(part, block - block.mean())
    assert not set(claim.TESTS) & set(claim.OTHERS)
    with pytest.raises(ValueError, match="finer than an image"):
        claim.window(image, 9, f64(0, 0, 0))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"sides": (8,)}, "sides must rise"),
        ({"learned_sides": (8, 4)}, "learned_sides must rise"),
        ({"observed": 5}, "observed must be at most"),
        ({"seeds": ()}, "seeds"),
        ({"crops": 1}, "crops"),
    ],
    ids=str,
)
def test_bad_configurations_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        replace(claim.PRESETS["smoke"], **options)


@pytest.mark.slow
def test_full_preset_builds_and_takes_one_step() -> None:
    config = claim.PRESETS["full"]
    side = config.learned_sides[-1]
    task = claim.problem(config, side, config.learned_sides[0], 0)
    model = claim.learned_model(config, task, "posterior", 0)
    crops = claim.windows(4, side, 1).float()
    model.fit(crops, steps=1, batch_size=2, lr=config.lr, progress=False)
    chains = model.sample(task.y.float(), 1, noise=NOISE, steps=1, burn=0, thin=1)
    assert chains.draws is not None and chains.draws.isfinite().all()
