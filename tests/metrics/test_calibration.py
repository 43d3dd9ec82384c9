from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss

from fluvial.metrics import (
    brier_score,
    coverage_curve,
    crps,
    expected_calibration_error,
    interval_coverage,
    reliability_curve,
)

RNG = np.random.default_rng


def forecasts(rows: int = 400) -> tuple[np.ndarray, np.ndarray]:
    p = RNG(0).uniform(size=rows)
    return p, (RNG(1).uniform(size=rows) < p**2).astype(int)


def classes(rows: int = 300) -> tuple[np.ndarray, np.ndarray]:
    p = RNG(2).dirichlet(np.ones(4), size=rows)
    return p, RNG(3).integers(0, 4, rows)


@pytest.mark.parametrize("strategy", ["uniform", "quantile"])
def test_agrees_with_scikit_learn(strategy: str) -> None:
    p, outcome = forecasts()
    p[:3] = [0.0, 1.0, 0.2]  # the ends, and an edge
    found = reliability_curve(p, outcome, bins=5, strategy=strategy)
    observed, predicted = calibration_curve(outcome, p, n_bins=5, strategy=strategy)
    np.testing.assert_allclose(found.observed, observed, rtol=1e-12)
    np.testing.assert_allclose(found.predicted, predicted, rtol=1e-12)
    assert int(found.number.sum()) == len(p)


@pytest.mark.slow
def test_of_more_rows_than_torch_takes_quantiles_of() -> None:
    """2^24 and one: 17 million forecasts, as a segmentation has."""
    p = torch.rand(2**24 + 1, generator=torch.Generator().manual_seed(0))
    curve = reliability_curve(p, p < 0.5, bins=4, strategy="quantile")
    assert curve.number.tolist() == pytest.approx([2**22] * 4, rel=1e-3)
    assert curve.observed.tolist() == pytest.approx([1, 1, 0, 0], abs=1e-3)


def test_by_hand() -> None:
    p = torch.tensor([0.1, 0.3, 0.9, 0.9])
    outcome = torch.tensor([0, 1, 1, 0])
    curve = reliability_curve(p, outcome, bins=2)
    torch.testing.assert_close(curve.predicted, torch.tensor([0.2, 0.9]).double())
    assert curve.observed.tolist() == [0.5, 0.5] and curve.number.tolist() == [2, 2]
    assert expected_calibration_error(p, outcome, bins=2) == pytest.approx(0.35)
    # bins without rows are left out
    assert reliability_curve(p, outcome, bins=10).number.tolist() == [1, 1, 2]


def test_of_classes_the_confidence_of_the_answer() -> None:
    p, outcome = classes()
    found = reliability_curve(p, outcome)
    hit = (p.argmax(1) == outcome).astype(int)
    wanted = reliability_curve(p.max(1), hit)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_a_calibrated_forecast_has_a_small_error() -> None:
    rng, rows, bins = RNG(4), 20_000, 10
    p = rng.uniform(size=rows)
    outcome = (rng.uniform(size=rows) < p).astype(int)
    found = expected_calibration_error(p, outcome, bins=bins)
    # sum over bins of n_b / N E|observed - predicted|, of about normal shares
    curve = reliability_curve(p, outcome, bins=bins)
    spread = (curve.predicted * (1 - curve.predicted) / curve.number).sqrt()
    wanted = float((curve.number / rows * spread).sum()) * math.sqrt(2 / math.pi)
    assert wanted == pytest.approx(0.4 * math.sqrt(bins / rows), rel=0.25)  # the docstring's
    # |normal| has a deviation of 0.6; the mean over 10 bins one of 0.6 / sqrt(10) of a typical one
    assert abs(found - wanted) < 4 * 0.6 * float(spread.max()) / math.sqrt(bins)


def test_brier_score() -> None:
    p, outcome = forecasts()
    assert float(brier_score(p, outcome).mean()) == pytest.approx(
        brier_score_loss(outcome, p), rel=1e-12
    )
    several, answer = classes()
    one_hot = np.eye(4)[answer]
    np.testing.assert_allclose(brier_score(several, answer), ((several - one_hot) ** 2).sum(1))
    both = np.stack([1 - p, p], 1)
    np.testing.assert_allclose(brier_score(both, outcome), 2 * brier_score(p, outcome))


def test_interval_coverage() -> None:
    low, high = np.array([0.0, 0.0, -np.inf, 2.0]), np.array([1.0, 1.0, 0.0, np.inf])
    assert interval_coverage(low, high, np.array([0.0, 1.1, -5.0, 3.0])) == 0.75
    assert interval_coverage(torch.from_numpy(low), high, np.full(4, 1.0)) == 0.5


def test_coverage_is_exact_for_exchangeable_draws() -> None:
    """The truth in each of the M + 1 places between draws once: what ranks of one law do."""
    count = 19
    draws = np.tile(RNG(5).permutation(count) + 1.0, (count + 1, 1))
    truth = np.arange(count + 1) + 0.5
    levels = (0.1, 0.2, 0.5, 0.8, 0.9)
    curve = coverage_curve(draws, truth, levels=levels)
    np.testing.assert_allclose(curve.observed, levels, atol=1e-12)
    np.testing.assert_allclose(curve.width, 20 * np.array(levels), rtol=1e-12)
    assert curve.level.tolist() == list(levels)
    for same in (np.array(levels), torch.tensor(levels, dtype=torch.float64)):
        assert torch.equal(coverage_curve(draws, truth, levels=same).width, curve.width)


def test_coverage_shows_intervals_that_are_too_narrow() -> None:
    rng, rows = RNG(6), 2000
    truth = rng.normal(size=rows)
    draws = rng.normal(size=(rows, 99))
    fits = coverage_curve(draws, truth)
    error = np.sqrt(fits.level * (1 - fits.level) / rows)
    assert ((fits.observed - fits.level).abs() < 4 * error).all()
    narrow = coverage_curve(draws / 2, truth)
    assert (narrow.observed < fits.level - 4 * error).all()
    np.testing.assert_allclose(narrow.width, fits.width / 2, rtol=1e-12)


@pytest.mark.parametrize("fair", [True, False])
def test_crps_by_definition(fair: bool) -> None:
    draws, truth = RNG(7).normal(size=(5, 8)) + 1e6, RNG(8).normal(size=5) + 1e6
    spread = np.abs(draws[:, :, None] - draws[:, None]).sum((1, 2)) / (8 * (7 if fair else 8))
    wanted = np.abs(draws - truth[:, None]).mean(1) - spread / 2
    np.testing.assert_allclose(crps(draws, truth, fair=fair), wanted, rtol=1e-8)


def test_crps_of_a_step_function() -> None:
    """The integral of (F(z) - [z >= y])^2, with F the ensemble's distribution function."""
    draws, truth = np.array([[0.0, 1.0, 3.0]]), np.array([2.0])
    # (1/3)^2 on [0, 1], (2/3)^2 on [1, 2], (1/3)^2 on [2, 3]
    assert float(crps(draws, truth, fair=False)) == pytest.approx(6 / 9, rel=1e-12)
    assert float(crps(draws[:, :1], truth, fair=False)) == 2


def test_fair_crps_is_that_of_the_law() -> None:
    """Of a normal law in closed form, in the mean over few draws."""
    rng, y = RNG(9), 0.7
    law = y * (2 * norm.cdf(y) - 1) + 2 * norm.pdf(y) - 1 / math.sqrt(math.pi)
    draws, truth = rng.normal(size=(4000, 3)), np.full(4000, y)
    fair = crps(draws, truth)
    assert abs(float(fair.mean()) - law) < 4 * float(fair.std()) / math.sqrt(4000)
    # with the divisor M it is too large by E|X - X'| / (2 M)
    plain = crps(draws, truth, fair=False)
    error = float(plain.std()) / math.sqrt(4000)
    assert abs(float(plain.mean()) - law - 1 / (3 * math.sqrt(math.pi))) < 4 * error


@pytest.mark.parametrize("metric", [reliability_curve, expected_calibration_error, brier_score])
@pytest.mark.parametrize(
    ("p", "outcome", "error", "message"),
    [
        (np.zeros((2, 2, 2)), np.zeros(2), ValueError, r"probabilities must have shape \(N,\)"),
        (np.zeros((2, 1)), np.zeros(2), ValueError, "K at least 2"),
        (np.zeros(0), np.zeros(0), ValueError, r"got \(0,\)"),
        (np.zeros(3), np.zeros(2), ValueError, r"outcomes must have shape \(3,\)"),
        (np.array([0.5, 1.1]), np.zeros(2), ValueError, r"lie in \[0, 1\], got values from 0.5"),
        (np.array([0.5, np.nan]), np.zeros(2), ValueError, "probabilities must be finite"),
        (np.array([0.5, 0.5]), np.array([0, 2]), ValueError, "numbers from 0 to 1, got 2.0"),
        (np.array([0.5, 0.5]), np.array([0, 0.5]), ValueError, "got 0.5"),
        (np.full((2, 2), 0.6), np.zeros(2), ValueError, "must sum to 1"),
        ([0.5, 0.5], np.zeros(2), TypeError, "probabilities must be a tensor"),
    ],
)
def test_refuses_what_is_no_forecast(metric, p, outcome, error, message) -> None:
    with pytest.raises(error, match=message):
        metric(p, outcome)


def test_refuses() -> None:
    p, outcome = forecasts(10)
    with pytest.raises(ValueError, match="bins must be at least 1"):
        reliability_curve(p, outcome, bins=0)
    with pytest.raises(ValueError, match="strategy must be uniform or quantile"):
        expected_calibration_error(p, outcome, strategy="even")
    draws, truth = RNG(0).normal(size=(4, 9)), np.zeros(4)
    for level in (0.0, 0.81, 1.0):
        with pytest.raises(ValueError, match=r"levels must lie in \(0, 0.8\], as far as 9 draws"):
            coverage_curve(draws, truth, levels=(level,))
    for metric in (lambda x, y: coverage_curve(x, y, levels=(0.5,)), crps):
        with pytest.raises(ValueError, match=r"draws must have shape \(N, M\)"):
            metric(draws[0], truth)
        with pytest.raises(ValueError, match=r"truth must have shape \(4,\)"):
            metric(draws, truth[:3])
        with pytest.raises(ValueError, match="draws must be finite"):
            metric(draws * np.nan, truth)
    with pytest.raises(ValueError, match="draws must be at least 2 for the fair score, got 1"):
        crps(draws[:, :1], truth)
    with pytest.raises(ValueError, match="low must not lie above high"):
        interval_coverage(np.ones(2), np.zeros(2), np.zeros(2))
    with pytest.raises(ValueError, match="neither may be NaN"):
        interval_coverage(np.full(2, np.nan), np.zeros(2), np.zeros(2))
    with pytest.raises(ValueError, match="must have the same shape"):
        interval_coverage(np.zeros(2), np.zeros(3), np.zeros(2))
