"""Conformal masks: the checks of the method against closed forms, brute force and simulation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image
from scipy import stats

import fluvial
from fluvial import cli
from fluvial.core.noise import KeyedNoise
from fluvial.training.recipe import as_json, from_json
from fluvial.trust.conformal_masks import (
    Box,
    Calibration,
    Calibrator,
    ConfidenceMask,
    Custom,
    Difference,
    EnlargingNet,
    Gaussian,
    Panel,
    RestorationFlow,
    Variance,
    bentkus,
    calibrate,
    draw_masks,
    evaluate,
    hoeffding,
    masked_psnr,
    worst,
)
from fluvial.trust.conformal_masks import calibration as calibration_module
from fluvial.trust.conformal_masks.calibration import QUANTILES, steps
from fluvial.trust.conformal_masks.flow import hatched
from fluvial.trust.conformal_masks.kernels import lab
from fluvial.trust.conformal_masks.recipe import Recipe

ERRORS = [np.array([0.1, 0.5, 2.0]), np.array([0.2, 0.3, 1.0]), np.array([0.0, 0.9, 0.4])]
SCORES = [np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0]), np.array([0.5, 2.5, 2.0])]


def thresholds(calibration: Calibration, group: str = "") -> list[float]:
    return [calibration.threshold(level, group).score for level in calibration.levels]


def brute_force(scores: Any, errors: Any, level: float, bound: float) -> float:
    """sup {t : risk(t) <= level}: the risk is constant between scores and continuous from the left,
    so the sup is the first score whose inclusion is too much."""
    if bound / (len(scores) + 1) > level:
        return -math.inf
    for c in np.unique(np.concatenate(scores)):
        losses = [float(d[s <= c].max(initial=0.0)) for s, d in zip(scores, errors, strict=True)]
        if math.fsum([*losses, bound]) / (len(scores) + 1) > level:
            return float(c)
    return math.inf


# Thresholds


def test_three_images_of_three_pixels() -> None:
    levels = [0.7, 0.8, 0.9, 1.1, 1.2, 1.7, 2.0]
    found = calibrate(SCORES, ERRORS, levels, 3.0)
    assert thresholds(found) == [-math.inf, 1.0, 2.0, 2.5, 3.0, 4.0, math.inf]
    assert found.mask(SCORES[0], 0.9).tolist() == [True, False, False]
    assert found.mask(SCORES[0], 1.2).tolist() == [True, True, False]
    assert not found.mask(SCORES[0], 0.7).any() and found.mask(SCORES[0], 2.0).all()
    part = found.parts[""]
    assert part.n == 3
    # at level 1.2 the threshold is 3: largest errors 0.5, 0.3 and 0.9
    assert part.means[4] == pytest.approx((0.5 + 0.3 + 0.9) / 3)
    assert part.quantiles[4] == pytest.approx(np.quantile([0.5, 0.3, 0.9], QUANTILES))
    assert part.over[5] == pytest.approx(1 / 3)  # 2.0 of 2.0, 0.3, 0.9 over 1.7


@pytest.mark.parametrize("seed", range(60))
def test_thresholds_equal_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 8))
    scores, errors = [], []
    for _ in range(n):
        d = int(rng.integers(1, 7))
        scores.append(rng.choice([0.0, 0.1, 0.2, 0.5, 0.7, 1.0], d))
        # on a grid of tenths, so that sums meet levels up to their last bit
        errors.append(rng.integers(0, 11, d) / 10 if seed % 2 else rng.random(d))
    levels = [0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0]
    found = calibrate(scores, errors, levels, 1.0)
    assert thresholds(found) == [brute_force(scores, errors, level, 1.0) for level in levels]


def test_few_images_give_empty_masks_and_lenient_levels_full_ones() -> None:
    rng = np.random.default_rng(0)
    scores = [rng.random(20) for _ in range(60)]
    errors = [3 * rng.random(20) for _ in range(60)]
    largest = (math.fsum(float(error.max()) for error in errors) + 3) / 61
    found = calibrate(scores, errors, [3 / 61 * (1 - 1e-12), 3 / 61, largest, 2.99], 3.0)
    assert thresholds(found)[0] == -math.inf
    assert thresholds(found)[1] == min(score.min() for score in scores)  # no error at all is let in
    assert thresholds(found)[2:] == [math.inf, math.inf]
    assert found.needed(3 / 61) == 60 and found.needed(3 / 61 * (1 - 1e-12)) == 61
    assert (found.needed(0.05), found.needed(0.1), found.needed(5.0)) == (59, 29, 1)
    assert "every mask is empty: 61 images or more are needed" in str(found)
    assert found.empty(3 / 61 * (1 - 1e-12)) == "every mask is empty: 61 images or more are needed"
    assert found.empty(3 / 61) == ""
    hopeless = calibrate([np.zeros(4)] * 60, [np.full(4, 2.0)] * 60, [0.1], 3.0)
    assert hopeless.empty(0.1) == ""  # the threshold is 0, the only score there is
    assert not hopeless.mask(np.zeros(4), 0.1).any()
    assert "everything is trusted" in str(found)


def test_masks_are_nested_and_do_not_see_the_scale_of_the_score() -> None:
    rng = np.random.default_rng(1)
    scores = [rng.integers(0, 30, 40) for _ in range(50)]
    errors = [rng.random(40) * score / 30 for score in scores]
    new, levels = rng.integers(0, 30, (5, 40)), [0.1, 0.2, 0.3, 0.5]
    found = calibrate(scores, errors, levels, 1.0)
    masks = [found.mask(new, level) for level in levels]
    for small, large in zip(masks, masks[1:], strict=False):
        assert (small <= large).all() and small.sum() < large.sum()
    for change in (lambda s: s + 7.0, lambda s: s.astype(float) ** 3 - 2.0):
        other = calibrate([change(s) for s in scores], errors, levels, 1.0)
        for level, mask in zip(levels, masks, strict=True):
            assert_array_equal(other.mask(change(new), level), mask)


def test_steps_say_all_that_the_maps_say() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        score, error = rng.integers(0, 12, 50) / 4, np.maximum(rng.normal(size=50), 0)
        found = steps(score, error)
        at = np.array([-1.0, *np.arange(0, 13) / 4, 0.3, 99.0])
        assert_array_equal(found.at(at), [error[score < t].max(initial=0.0) for t in at])
        assert (np.diff(found.scores) > 0).all() and (np.diff(found.errors) > 0).all()
    assert len(steps(np.ones(4), np.zeros(4)).scores) == 0
    # of pixels in random order about the logarithm of their number is left
    long = [len(steps(rng.random(4096), rng.random(4096)).scores) for _ in range(50)]
    assert np.mean(long) < 3 * math.log(4096)


def test_given_thresholds_need_one_sum_each_and_stay_below_the_exact_one() -> None:
    rng = np.random.default_rng(3)
    scores = [rng.random(30) for _ in range(80)]
    errors = [np.clip(score * rng.random(), 0, 1) for score in scores]
    levels = [0.05, 0.2, 0.3, 1.0]
    exact = thresholds(calibrate(scores, errors, levels, 1.0))
    grid = np.linspace(0, 1, 101)
    among = Calibrator(levels, 1.0, thresholds=grid)
    for score, error in zip(scores, errors, strict=True):
        among.add(score, error)
        assert [len(total) for _, total in among._sums.values()] == [102] and not among._steps
    found = thresholds(among.finish())
    for on_grid, t in zip(found, exact, strict=True):
        assert on_grid <= t and (on_grid == t or t - on_grid < 0.01 + 1e-12)
    all_of_them = np.unique(np.concatenate(scores))
    assert thresholds(calibrate(scores, errors, levels, 1.0, thresholds=all_of_them)) == exact
    below = calibrate(scores, errors, [0.02], 1.0, thresholds=[2.0])
    assert thresholds(below) == [-math.inf]


def test_memory_stops_growing_and_the_threshold_stays_below_the_exact_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(20)
    scores = [rng.random(30) for _ in range(400)]
    errors = [np.clip(score * rng.random(), 0, 1) for score in scores]
    groups, levels = ["a", "b"] * 200, [0.002, 0.05, 0.2, 0.3, 1.0]
    for ties in ("strict", "random"):
        options: Any = {"groups": groups, "ties": ties}
        exact = calibrate(scores, errors, levels, 1.0, **options)
        with monkeypatch.context() as patch:
            patch.setattr(calibration_module, "EXACT", 1_000)
            patch.setattr(calibration_module, "GRID", 200)
            calibrator = Calibrator(levels, 1.0, ties=ties)
            kept = []
            for score, error, group in zip(scores, errors, groups, strict=True):
                calibrator.add(score, error, group)
                steps_kept = sum(len(one.scores) for k in calibrator._steps.values() for one in k)
                kept.append(steps_kept + sum(len(total) for _, total in calibrator._sums.values()))
            found = calibrator.finish()
        assert max(kept) <= 1_000 and kept[-1] == kept[200] <= 402
        for group in ("a", "b"):
            assert found.parts[group].n == 200 and found.parts[group].quantiles == ()
            for one, other in zip(thresholds(found, group), thresholds(exact, group), strict=True):
                assert one <= other and (one == other or other - one < 0.05)
            for level in levels:
                masks = [c.mask(scores[0], level, group=group) for c in (found, exact)]
                assert (masks[0] <= masks[1]).all()


def test_generators_are_read_once_and_groups_are_calibrated_apart() -> None:
    rng = np.random.default_rng(4)
    scores = [rng.random((3, 4)) for _ in range(60)]
    errors = [rng.random((3, 4)) * score for score in scores]
    groups = ["day" if k % 3 else "night" for k in range(60)]
    levels = [0.1, 0.3]
    found = calibrate(iter(scores), (e for e in errors), levels, 1.0, groups=iter(groups))
    for group in ("day", "night"):
        rows = [k for k in range(60) if groups[k] == group]
        alone = calibrate([scores[k] for k in rows], [errors[k] for k in rows], levels, 1.0)
        assert thresholds(found, group) == thresholds(alone)
        assert found.parts[group].n == len(rows)
        assert_array_equal(found.mask(scores[0], 0.3, group=group), alone.mask(scores[0], 0.3))
    assert thresholds(found, "day") != thresholds(found, "night")
    with pytest.raises(
        ValueError, match="group 'dusk' was not calibrated; there is 'day', 'night'"
    ):
        found.mask(scores[0], 0.3, group="dusk")
    numbered: Any = [k % 2 for k in range(60)]  # classes, as data sets give them
    by_class = calibrate(scores, errors, levels, 1.0, groups=numbered)
    assert set(by_class.parts) == {"0", "1"}
    assert evaluate(by_class, scores, errors, groups=numbered)[0].n == 60


# Guarantees, by simulation

REPETITIONS, TEST = 100, 100


def images(rng: np.random.Generator, n: int, floor: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(scores, errors) of n images of 30 pixels; their errors are more than their scores say."""
    s, v = rng.random((n, 30)), rng.random((n, 1))
    error = np.clip(2 * s * v + 0.1 * rng.random((n, 30)), 0, 3)
    return (np.floor(4 * s) / 4 if floor else s), error


def simulated(
    rule: str, *, floor: bool = False, level: float = 0.5, leaked: int = 0
) -> tuple[float, float, float]:
    """(mean largest error, its standard error, trusted share) over calibrations and test images."""
    rng = np.random.default_rng(5)
    errors, shares = [], []
    for repetition in range(REPETITIONS):
        scores, found = images(rng, 60 + leaked, floor)
        found[60:] = 0.0
        noise = KeyedNoise(6).at(repetition)
        ties: Any = "random" if rule == "random" else "strict"
        calibration = calibrate(scores, found, [level], 3.0, ties=ties, noise=noise)
        new, error = images(rng, TEST, floor)
        if rule == "weak":
            mask = new <= calibration.threshold(level).score
        else:
            mask = calibration.mask(new, level, noise=noise)
        errors.append((error * mask).max(1).mean())
        shares.append(mask.mean())
    spread = float(np.std(errors, ddof=1)) / math.sqrt(REPETITIONS)
    return float(np.mean(errors)), spread, float(np.mean(shares))


def near(value: float, spread: float, wanted: float, published: float) -> bool:
    """Within four standard errors of both simulations together."""
    return abs(value - wanted) < 4 * math.hypot(spread, published)


def test_the_error_is_at_most_the_level() -> None:
    mean, spread, share = simulated("strict")
    assert mean + 4 * spread < 0.5
    assert near(mean, spread, 0.463, 0.005)
    assert share == pytest.approx(0.43, abs=0.02)


def test_tied_scores_want_the_strict_inequality() -> None:
    # scores in quarters, which meet the threshold: with <= the level is exceeded
    strict, spread, _ = simulated("strict", floor=True)
    assert strict + 4 * spread < 0.5
    assert near(strict, spread, 0.285, 0.005)
    weak, spread, _ = simulated("weak", floor=True)
    assert weak - 3 * spread > 0.5
    assert near(weak, spread, 0.537, 0.006)
    broken, spread, _ = simulated("random", floor=True)
    assert 0.42 < broken < 0.5
    # one pixel at the threshold itself
    found = calibrate(SCORES, ERRORS, [0.9], 3.0)
    assert not found.mask(np.array([found.threshold(0.9).score]), 0.9).any()


def test_random_numbers_break_ties_lexicographically() -> None:
    rng, noise = np.random.default_rng(7), KeyedNoise(3)
    scores = [rng.integers(0, 3, 6).astype(float) for _ in range(12)]
    errors = [rng.random(6) for _ in range(12)]
    found = calibrate(scores, errors, [0.3, 0.5], 1.0, ties="random", noise=noise)
    like = torch.empty(1, 6, dtype=torch.float64)
    numbers = [noise.at(k).uniform(like, "calibration")[0].numpy() for k in range(12)]
    # as if score and number were one number: the scores are whole and the numbers below 1
    joined = [score + number for score, number in zip(scores, numbers, strict=True)]
    for level in (0.3, 0.5):
        limit = found.threshold(level)
        assert limit.score + limit.tie == pytest.approx(brute_force(joined, errors, level, 1.0))
        new = rng.integers(0, 3, 400).astype(float)
        mask = found.mask(new, level, noise=noise.at(9))
        drawn = noise.at(9).uniform(torch.empty(1, 400, dtype=torch.float64), "mask")[0].numpy()
        assert_array_equal(mask, new + drawn < limit.score + limit.tie)
        at = mask[new == limit.score].mean()  # some of those at the threshold, and not all
        assert abs(at - limit.tie) < 4 * math.sqrt(0.25 / (new == limit.score).sum())
        tensor = found.mask(torch.from_numpy(new), level, noise=noise.at(9))
        assert_array_equal(tensor.numpy(), mask)


def test_leaked_images_raise_the_error_and_the_bound_holds() -> None:
    mean, spread, _ = simulated("strict", level=0.4, leaked=20)
    assert near(mean, spread, 0.488, 0.007)
    assert mean - 3 * spread > 0.4
    rng = np.random.default_rng(8)
    found = calibrate(*images(rng, 80), [0.4], 3.0)
    bound = found.leakage_bound(0.4, 20)
    assert bound == pytest.approx(0.4 * 81 / 61) and mean + 4 * spread < bound
    assert found.leakage_bound(0.4, 0) == pytest.approx(0.4)
    assert found.leakage_bound(0.4, 80) == 3.0  # no more than errors can be
    with pytest.raises(ValueError, match="leaked must lie between 0 and the 80 images, got 81"):
        found.leakage_bound(0.4, 81)


def test_psnr_follows_from_pointwise_errors_and_not_from_smoothed_ones() -> None:
    rng = np.random.default_rng(9)
    pointwise = Difference("pointwise", colour="rgb")
    maps, pairs = [], []
    for _ in range(240):
        true = rng.random((3, 8, 8))
        blur = rng.random((8, 8))
        noise = 0.2 * blur * rng.normal(size=(3, 8, 8)) * rng.random()
        restored = np.clip(true + noise, 0, 1)
        pairs.append((true, restored))
        maps.append((blur, pointwise(true, restored)))
    found = calibrate(*zip(*maps[:200], strict=True), [0.2, 0.3], 3.0, pointwise=True)
    for level in (0.2, 0.3):
        psnrs = []
        for (score, error), (true, restored) in zip(maps[200:], pairs[200:], strict=True):
            mask = found.mask(score, level)
            if mask.any():
                psnrs.append(masked_psnr(true, restored, mask))
                # of one image: the mean square is at most the squared largest error
                assert psnrs[-1] >= -20 * math.log10(worst(error, mask))
        assert np.mean(psnrs) > found.psnr_bound(level, len(psnrs) / 40)
    assert calibrate(SCORES, ERRORS, [0.1], 3.0, pointwise=True).psnr_bound(0.1) == 20
    assert found.psnr_bound(0.2) == pytest.approx(13.979, abs=1e-3)
    # a checkerboard of +-0.2: averages over even squares see nothing of it
    board = 0.2 * (-1.0) ** np.add.outer(np.arange(8), np.arange(8))
    true = np.full((8, 8), 0.5)
    smooth = Difference("signed", Box(2, "wrap"), "grey")(true, true + board)
    assert_allclose(smooth, 0, atol=1e-15)
    everywhere = np.ones((8, 8), bool)
    assert masked_psnr(true, true + board, everywhere) == pytest.approx(13.979, abs=1e-3)
    assert_allclose(Difference("absolute", Box(2, "wrap"), "grey")(true, true + board), 0.2)
    with pytest.raises(ValueError, match="psnr_bound needs a pointwise error, got error"):
        calibrate(SCORES, ERRORS, [1.0], 3.0).psnr_bound(1.0)
    assert math.isnan(masked_psnr(true, true, ~everywhere))
    assert masked_psnr(true, true, everywhere) == math.inf


# With high probability


def test_bounds_cover_the_mean_of_every_bernoulli_law() -> None:
    for n in (1, 5, 40):
        k = np.arange(n + 1)
        for delta in (0.05, 0.2):
            for upper in (hoeffding, bentkus):
                bounds = np.array([upper(3 * i / n, n, 3.0, delta) for i in k])
                for mean in (0.01, 0.1, 0.3, 0.7, 0.99):
                    missed = stats.binom.pmf(k, n, mean)[bounds < 3 * mean].sum()
                    assert missed <= delta + 1e-12
            # never below the exact bound for losses of 0 and 1, whose tail has no factor e
            exact = stats.beta.ppf(1 - delta, k + 1, n - k)[:-1]
            found = [bentkus(i / n, n, 1.0, delta) for i in k[:-1]]
            assert (np.array(found) >= exact - 1e-9).all()
    assert hoeffding(0.3, 50, 2.0, 0.1) == 0.3 + 2 * math.sqrt(math.log(10) / 100)
    # no loss among n: (1 - r)^n = delta
    assert bentkus(0.0, 30, 3.0, 0.1) == pytest.approx(3 * (1 - 0.1 ** (1 / 30)))
    assert bentkus(0.02, 300, 1.0, 0.1) < hoeffding(0.02, 300, 1.0, 0.1)
    assert bentkus(1.0, 10, 1.0, 0.1) == 1.0


@pytest.mark.parametrize("guarantee", ["hoeffding", "bentkus"])
def test_risk_is_controlled_with_high_probability(guarantee: Any) -> None:
    upper = {"hoeffding": hoeffding, "bentkus": bentkus}[guarantee]
    rng, delta, level = np.random.default_rng(10), 0.2, 0.6
    new, error = images(rng, 3_000)
    exceeded = 0
    for _ in range(60):
        scores, errors = images(rng, 100)
        found = calibrate(scores, errors, [level], 3.0, guarantee=guarantee, delta=delta)
        limit = found.threshold(level).score
        # the sup: allowed with what is below, not with the pixel at the threshold
        for t, allowed in ((limit, True), (np.nextafter(limit, 9), False)):
            losses = (errors * (scores < t)).max(1)
            assert (upper(losses.mean(), 100, 3.0, delta) <= level + 1e-9) == allowed
        exceeded += (error * found.mask(new, level)).max(1).mean() > level
    # the chance is at most delta: 4 standard errors of 60 draws, and those of the 3,000 images
    assert exceeded / 60 < delta + 4 * math.sqrt(delta * (1 - delta) / 60)
    needed = found.needed(level)
    assert upper(0.0, needed, 3.0, delta) <= level < upper(0.0, needed - 1, 3.0, delta)
    with pytest.raises(ValueError, match="the leakage bound is for the guarantee 'mean'"):
        found.leakage_bound(level, 1)
    assert f"with probability {1 - delta:g}" in str(found)


# Scores and errors


def test_scores_of_two_restorations() -> None:
    draws = np.stack([np.zeros((1, 3, 3)), np.ones((1, 3, 3))])
    kinds: Any = ("pixel", "smoothed-variance", "variance-of-smoothed", "paper")
    rng = np.random.default_rng(11)
    random = rng.random((5, 3, 7, 6))
    for kind in kinds:
        assert_allclose(Variance(kind, Box(1))(draws), 0.25)  # of the population
        assert_allclose(Variance(kind, Box(1))(random), random.var(0).mean(0))
    box, moved = Box(3), random.var(0)
    assert_allclose(Variance("smoothed-variance", box)(random), box(moved).mean(0))
    assert_allclose(
        Variance("variance-of-smoothed", box)(random), box(random).var(0).mean(0), atol=1e-15
    )
    written = box((random**2).mean(0)) - box(random).mean(0) ** 2
    assert_allclose(Variance("paper", box)(random), written.mean(0), atol=1e-14)
    # texture on which all agree: only the paper's form reacts
    same = np.repeat(random[:1], 4, axis=0)
    assert Variance("paper", box)(same).max() > 0.01
    assert_allclose(Variance("variance-of-smoothed", box)(same), 0, atol=1e-15)


def test_a_score_is_clipped_at_its_own_quantile_and_blurred() -> None:
    random = np.random.default_rng(12).random((4, 1, 9, 9))
    plain, clipped = Variance("pixel")(random), Variance("pixel", clip=0.9)(random)
    top = np.quantile(plain, 0.9)
    assert_array_equal(clipped, np.minimum(plain, top))
    assert (clipped == top).sum() > 5  # which makes ties
    assert_array_equal(Variance("pixel", clip=0.9, blur=1.5)(random), Gaussian(1.5)(clipped))
    many = np.stack([random, 1 - random**2], axis=1)  # (draws, images, channels, height, width)
    both = Variance(clip=0.9, blur=1.0)(many)
    for k in range(2):
        assert_allclose(both[k], Variance(clip=0.9, blur=1.0)(many[:, k]), rtol=1e-12)
    tensor = Variance()(torch.from_numpy(random))
    assert_array_equal(tensor, Variance()(random))


def test_errors_of_every_kind_and_colour() -> None:
    rng = np.random.default_rng(13)
    y, mu = rng.random((2, 3, 6, 5))
    box = Box(3)
    difference = np.abs(y - mu).sum(0)
    assert_allclose(Difference("pointwise", colour="rgb")(y, mu), difference)
    assert_allclose(Difference("absolute", box, "rgb")(y, mu), box(difference))
    assert_allclose(
        Difference("signed", box, "rgb")(y, mu), np.abs(box(y) - box(mu)).sum(0), atol=1e-12
    )
    luma = np.tensordot([0.299, 0.587, 0.114], y - mu, 1)
    assert_allclose(Difference("pointwise", colour="grey")(y, mu), np.abs(luma))
    assert_allclose(Difference("pointwise")(y, mu), np.abs(lab(y) - lab(mu)).sum(0), atol=1e-12)
    assert (Difference().bound, Difference(colour="grey").bound) == (3.0, 1.0)
    one = Difference("pointwise", colour="grey")
    assert_array_equal(one(torch.zeros(4, 4), torch.ones(4, 4)), np.ones((4, 4)))
    black, white = np.zeros((3, 4, 4)), np.ones((3, 4, 4))
    for error in (Difference(), Difference("signed", Gaussian(2.0)), Difference(colour="rgb")):
        assert error(black, white).max() <= error.bound
    assert_allclose(Difference(colour="rgb")(black, white), 3.0)
    many = Difference()(np.stack([y, mu]), np.stack([mu, mu]))
    assert_allclose(many[0], Difference()(y, mu))
    assert_allclose(many[1], 0)


def test_lab_is_that_of_scikit_image() -> None:
    color = pytest.importorskip("skimage.color")
    image = np.random.default_rng(14).random((3, 16, 16))
    image[:, 0, :4] = [[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 0, 1]]
    theirs = color.rgb2lab(image, channel_axis=0)
    ours = lab(image)
    assert_allclose(ours[0], theirs[0] / 100, atol=1e-4)
    assert_allclose(ours[1:], theirs[1:] / 254 + 0.5, atol=2e-4)


def test_a_users_own_error() -> None:
    y, mu = np.zeros((1, 5, 5)), np.full((1, 5, 5), 0.5)
    marked = np.zeros((5, 5))
    marked[2, 2] = 3.0
    error = Custom(lambda true, restored: marked, 3.0, kernel=Box(3), name="meaning")
    assert_allclose(error(y, mu)[1:4, 1:4], 3 / 9)
    assert str(error) == "meaning, box 3" and error.bound == 3.0
    assert Custom(lambda a, b: torch.ones(5, 5), 1.0)(y, mu).shape == (5, 5)
    with pytest.raises(
        ValueError, match=r"must lie in \[0, 2\], it reaches from 0 to 3; clip=True"
    ):
        Custom(lambda a, b: marked, 2.0)(y, mu)
    assert Custom(lambda a, b: marked, 2.0, clip=True)(y, mu).max() == 2.0
    with pytest.raises(ValueError, match="the map of function must be finite"):
        Custom(lambda a, b: marked * np.nan, 3.0)(y, mu)


# Files, bad input


def test_a_calibration_is_saved_and_loaded(tmp_path: Path) -> None:
    rng = np.random.default_rng(15)
    scores, errors = images(rng, 40, floor=True)
    found = calibrate(
        scores,
        errors,
        [0.01, 0.5, 3.0],
        3.0,
        groups=["a", "b"] * 20,
        ties="random",
        metric="L1",
        score="variance",
    )
    path = tmp_path / "calibration.json"
    found.save(path)
    again = Calibration.load(path)
    assert again == found
    assert {"-inf", "inf"} <= {
        t[0] for t in json.loads(path.read_text())["parts"]["a"]["thresholds"]
    }
    for level in found.levels:
        assert_array_equal(
            again.mask(scores, level, group="b"), found.mask(scores, level, group="b")
        )
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        found.save(path)
    found.save(path, overwrite=True)
    with pytest.raises(FileNotFoundError, match="no calibration at"):
        Calibration.load(tmp_path / "none.json")
    for content, message in (
        ({}, "not the calibration of a conformal mask"),
        ({**found.as_json(), "format": 9}, "has format 9, this version of fluvial reads up to 1"),
        ({**found.as_json(), "parts": {"a": {}}}, "the calibration is damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            Calibration.from_json(content)
    path.write_text("{")
    with pytest.raises(ValueError, match="is no JSON file"):
        Calibration.load(path)


def test_bad_maps_and_options_are_refused() -> None:
    good = np.ones(3)
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        ([], [], {}, "scores is empty: there is no image"),
        ([good], [np.ones(4)], {}, r"score and error of image 0 must have one shape"),
        ([good * np.nan], [good], {}, "score of image 0 must be finite"),
        ([good], [good * np.inf], {}, "error of image 0 must be finite"),
        ([good], [4 * good], {}, r"error of image 0 must lie in \[0, 3\], it reaches from 4 to 4"),
        ([good], [-good], {}, r"must lie in \[0, 3\]"),
        ([good, good], [good], {}, "must be equally many; one of them ends after 1"),
        ([good], [good], {"groups": []}, "must be equally many; one of them ends after 0"),
        ([np.ones(0)], [np.ones(0)], {}, "score of image 0 holds no pixels"),
        ([good], [good], {"ties": "loose"}, "ties must be 'strict' or 'random'"),
        ([good], [good], {"guarantee": "sure"}, "guarantee must be one of mean"),
        ([good], [good], {"delta": 1.0}, r"delta must lie in \(0, 1\)"),
        ([good], [good], {"thresholds": [np.nan]}, "thresholds must be finite"),
    ]
    for scores, errors, options, message in cases:
        with pytest.raises(ValueError, match=message):
            calibrate(scores, errors, [0.5], 3.0, **options)
    for levels, message in (
        ([], "levels is empty"),
        ([0.1, 0.1], "levels must differ"),
        ([0.0], "level must be positive and finite, got 0"),
        ([0.1, 10.0], "levels must be at most the bound 3 of the errors, got 10"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate([good], [good], levels, 3.0)
    with pytest.raises(ValueError, match="bound must be positive and finite, got 0"):
        calibrate([good], [good], [0.5], 0.0)
    with pytest.raises(TypeError, match="score of image 0 must be an array or a tensor, got list"):
        calibrate([[1.0]], [good], [0.5], 3.0)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="must hold real numbers, got complex128"):
        calibrate([good * 1j], [good], [0.5], 3.0)
    found = calibrate(SCORES, ERRORS, [0.9, 1.2], 3.0)
    with pytest.raises(ValueError, match="level 0.5 was not calibrated; there is 0.9, 1.2"):
        found.mask(good, 0.5)
    with pytest.raises(ValueError, match="score must be finite"):
        found.mask(good * np.nan, 0.9)
    with pytest.raises(ValueError, match="error and trusted must have one shape"):
        worst(good, np.ones(2, bool))
    for bad, message in (
        (lambda: Variance("mean"), "kind must be one of pixel"),  # type: ignore[arg-type]
        (lambda: Variance(clip=0.0), "clip must be a quantile"),
        (lambda: Variance()(np.zeros((1, 1, 4, 4))), "needs two restorations or more, got 1"),
        (lambda: Variance()(np.full((2, 1, 4, 4), 2.0)), r"draws must lie in \[0, 1\]"),
        (lambda: Variance()(np.zeros((3, 4, 4))), "draws must be"),
        (lambda: Box(0), "size must be at least 1"),
        (lambda: Gaussian(0.0), "sigma must be positive"),
        (lambda: Difference("l2"), "kind must be one of pointwise"),  # type: ignore[arg-type]
        (lambda: Difference()(np.zeros((1, 4, 4)), np.zeros((1, 4, 4))), "needs three channels"),
        (lambda: Difference()(np.zeros((3, 4, 4)), np.zeros((3, 4, 5))), "must have one shape"),
        (lambda: Difference()(np.zeros((4, 4, 3)), np.zeros((4, 4, 3))), "1 or 3, height, width"),
        (lambda: Custom(lambda a, b: a, 0.0), "bound must be positive"),
        (lambda: draw_masks("x.png", [], 0.1), "panels is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            bad()


def test_evaluation_reports_single_images() -> None:
    rng = np.random.default_rng(16)
    found = calibrate(*images(rng, 60), [0.01, 0.5], 3.0)
    new, error = images(rng, 30)
    empty, half = evaluate(found, new, error)
    assert (empty.mean, empty.trusted, empty.empty, empty.over) == (0.0, 0.0, 1.0, 0.0)
    mask = new < found.threshold(0.5).score
    largest = (error * mask).max(1)
    assert half.n == 30 and half.mean == pytest.approx(largest.mean())
    assert half.standard_error == pytest.approx(largest.std(ddof=1) / math.sqrt(30))
    assert half.over == (largest > 0.5).mean() and half.trusted == pytest.approx(mask.mean())
    assert half.quantiles == pytest.approx(np.quantile(largest, QUANTILES))
    with pytest.raises(ValueError, match="scores is empty"):
        evaluate(found, [], [])


# Any restorer


def blurred(y: Any) -> Any:
    return y.reshape(*y.shape[:-2], y.shape[-2] // 2, 2, y.shape[-1] // 2, 2).mean((-3, -1))


def as_tensor(x: torch.Tensor, noise: KeyedNoise) -> torch.Tensor:
    large = x.repeat_interleave(2, -1).repeat_interleave(2, -2)
    spread = 0.3 * large  # bright pixels are doubtful
    return large + spread * noise.normal(large)


def as_array(x: np.ndarray, noise: KeyedNoise) -> np.ndarray:
    large = x.repeat(2, -1).repeat(2, -2)
    rng = np.random.default_rng(noise.seed)
    return large + 0.3 * large * rng.normal(size=large.shape)


def some_images(count: int, kind: str) -> list[Any]:
    """Of two sizes."""
    rng = np.random.default_rng(17)
    found = []
    for k in range(count):
        large = rng.random((1, 3 + k % 2, 4)).repeat(2, 1).repeat(2, 2)
        image = np.clip(large + 0.3 * large * rng.normal(size=large.shape), 0, 1)
        found.append(torch.from_numpy(image) if kind == "tensor" else image)
    return found


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_any_restorer_of_images_of_any_size(kind: str, tmp_path: Path) -> None:
    restorer: Any = as_tensor if kind == "tensor" else as_array
    options: dict[str, Any] = {
        "score": Variance("pixel"),
        "error": Difference("pointwise", colour="grey"),
        "draws": 6,
    }
    mask = ConfidenceMask(restorer, **options)
    data = some_images(60, kind)
    with pytest.raises(ValueError, match="nothing was calibrated"):
        mask.restore(blurred(data[0]), 0.3)
    assert mask.calibrate(iter(data[:40]), blurred, levels=(0.02, 0.3, 0.4)) is mask
    assert mask.calibration is not None
    assert mask.calibration.pointwise and mask.calibration.metric == "pointwise grey error"
    image, trusted = mask.restore(blurred(data[41]), 0.4)
    assert type(image) is type(trusted) is type(data[0])
    assert image.shape == data[41].shape and trusted.shape == image.shape[1:]
    assert image.dtype == data[41].dtype and 0 < trusted.sum() < math.prod(trusted.shape)
    again = mask.restore(blurred(data[41]), 0.4)
    assert (again.image == image).all() and (again.trusted == trusted).all()
    other = mask.restore(blurred(data[41]), 0.4, noise=KeyedNoise(99))
    assert (other.image != image).any()
    assert not mask.restore(blurred(data[41]), 0.02).trusted.any()  # 49 images are needed
    # dark pixels are those that vary less
    dark = blurred(data[41]).mean((0,)) < 0.2
    found = mask.evaluate(data[40:], blurred)
    assert found[1].n == 20 and found[1].mean < 0.3 + 4 * found[1].standard_error
    assert found[0].empty == 1 and dark.shape == (trusted.shape[0] // 2, trusted.shape[1] // 2)
    same = ConfidenceMask(restorer, **options).calibrate(
        data[:40], blurred, levels=(0.02, 0.3, 0.4)
    )
    assert same.calibration == mask.calibration
    path = tmp_path / "mask.json"
    mask.save(path)
    loaded = ConfidenceMask(restorer, **options).load(path)
    assert (loaded.restore(blurred(data[41]), 0.4).trusted == trusted).all()
    for other_option in ({"score": Variance()}, {"draws": 5}, {"draws": 2, "prediction": "mean"}):
        with pytest.raises(ValueError, match="was calibrated with"):
            ConfidenceMask(restorer, **{**options, **other_option}).load(path)


def test_own_functions_are_known_by_their_names_in_another_process(tmp_path: Path) -> None:
    class Worst:
        bound, pointwise = 1.0, False

        def __call__(self, true: Any, restored: Any) -> np.ndarray:
            return np.abs(true - restored).max(0)

    def mask() -> ConfidenceMask:
        def own(draws: np.ndarray, x: Any) -> np.ndarray:  # at another address each time
            return draws.std(0).mean(0)

        return ConfidenceMask(as_array, score=own, error=Worst(), draws=3)

    fitted = mask().calibrate(some_images(20, "array"), blurred, levels=[0.5])
    fitted.save(tmp_path / "mask.json")
    assert mask().load(tmp_path / "mask.json").calibration == fitted.calibration
    assert " at 0x" not in str(fitted.calibration)


def test_restorations_that_are_no_image_in_the_unit_interval_are_refused() -> None:
    grey, x = Difference("pointwise", colour="grey"), np.full((1, 4, 4), 0.5)

    class TooFew:
        def __call__(self, x: Any, noise: KeyedNoise) -> Any: ...
        def draws(self, x: Any, num: int, noise: KeyedNoise) -> Any:
            return np.stack([x] * (num - 1))

    restorers: list[tuple[Any, type[Exception], str]] = [
        (lambda x, noise: (255 * x).astype(np.uint8), TypeError, "floating-point .* got uint8"),
        (lambda x, noise: torch.ones(1, 4, 4, dtype=torch.uint8), TypeError, "got uint8"),
        (lambda x, noise: None, TypeError, "got NoneType"),
        (lambda x, noise: 255 * x, ValueError, "they reach from 0 to 127.5"),
        (TooFew(), ValueError, "restorer must make 6 draws, got 5"),
    ]
    for restorer, kind, message in restorers:
        with pytest.raises(kind, match=message):
            ConfidenceMask(restorer, error=grey, draws=6).predict(x)
    # a little outside is cut off
    over, _ = ConfidenceMask(lambda x, noise: x + 0.7, error=grey, draws=2).predict(x)
    assert_array_equal(over, np.ones((1, 4, 4)))

    def fails(x: Any, noise: KeyedNoise) -> Any:
        raise RuntimeError("out of credit")

    with pytest.raises(RuntimeError, match="out of credit") as caught:
        ConfidenceMask(fails, error=grey).calibrate([(x, x)], None)
    assert caught.value.__notes__ == ["with image 0"]


def test_bad_images_are_refused_before_they_are_restored() -> None:
    def never(x: Any, noise: KeyedNoise) -> Any:
        raise AssertionError("called")

    grey, x = Difference("pointwise", colour="grey"), np.full((1, 4, 4), 0.5)
    mask = ConfidenceMask(never, error=grey)
    cases: list[tuple[list[Any], type[Exception], str]] = [
        ([(x, 255 * x)], ValueError, r"image 0 must lie in \[0, 1\]"),
        ([(x, np.ones((4, 4, 4)))], ValueError, "image 0 must be"),  # RGBA
        ([(x, x * np.nan)], ValueError, "image 0 must be finite"),
        ([x], TypeError, r"image 0 must be a pair \(degraded, clean\) where degrade is None"),
        ([], ValueError, "images is empty"),
    ]
    for images, kind, message in cases:
        with pytest.raises(kind, match=message):
            mask.calibrate(images, None)
    plain = ConfidenceMask(lambda x, noise: x, error=grey, draws=2)
    with pytest.raises(ValueError, match="groups goes on after the 1 images"):
        plain.calibrate([(x, x)], None, groups=["a", "b"])
    with pytest.raises(TypeError, match=r"error must be an error map with a bound.* got function"):
        ConfidenceMask(never, error=lambda a, b: abs(a - b))  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="score must be callable, got str"):
        ConfidenceMask(never, score="pixel")  # type: ignore[arg-type]


def test_pairs_predictions_draws_at_once_and_own_scores() -> None:
    data = some_images(30, "tensor")
    pairs = [(blurred(y), y) for y in data]
    grey = Difference("pointwise", colour="grey")

    class AtOnce:
        def __call__(self, x: torch.Tensor, noise: KeyedNoise) -> torch.Tensor:
            raise AssertionError("draws were to be made at once")

        def draws(self, x: torch.Tensor, num: int, noise: KeyedNoise) -> torch.Tensor:
            return torch.stack([as_tensor(x, noise.at(k)) for k in range(num)])

    options: dict[str, Any] = {"error": grey, "draws": 4}
    one_by_one = ConfidenceMask(as_tensor, **options).calibrate(data, blurred, levels=[0.4])
    at_once = ConfidenceMask(AtOnce(), **options).calibrate(pairs, None, levels=[0.4])
    assert at_once.calibration == one_by_one.calibration
    x, noise = blurred(data[0]), KeyedNoise(4)
    drawn = torch.stack([as_tensor(x, noise.at(k)) for k in range(4)]).clamp(0, 1)
    first, _ = one_by_one.predict(x, noise=noise)
    assert_array_equal(first, drawn[0])
    mean, _ = ConfidenceMask(as_tensor, prediction="mean", **options).predict(x, noise=noise)
    assert_allclose(mean, drawn.mean(0))
    own: Any = ConfidenceMask(
        as_tensor,
        prediction=lambda x, noise: x.repeat_interleave(2, -1).repeat_interleave(2, -2),
        score=lambda draws, x: x[0].repeat_interleave(2, -1).repeat_interleave(2, -2),
        **options,
    )
    image, score = own.predict(x)
    assert_array_equal(image, np.kron(x, np.ones((2, 2))))
    assert_array_equal(score, image[0])
    grouped = own.calibrate(data, blurred, levels=[0.4], groups=["a", "b"] * 15)
    assert set(grouped.calibration.parts) == {"a", "b"}
    assert own.restore(x, 0.4, group="b").trusted.shape == score.shape


def test_bad_restorers_are_refused() -> None:
    x, grey = torch.rand(1, 4, 4), Difference("pointwise", colour="grey")
    with pytest.raises(TypeError, match="restorer must be callable, got int"):
        ConfidenceMask(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draws must be at least 1"):
        ConfidenceMask(as_tensor, draws=0)
    with pytest.raises(ValueError, match="prediction must be 'first', 'mean' or a function"):
        ConfidenceMask(as_tensor, prediction="last")  # type: ignore[arg-type]
    restorers: list[tuple[Any, str]] = [
        (lambda x, noise: x * math.nan, "restorer returned values that are not finite"),
        (lambda x, noise: x.expand(2, 1, 4, 4), "restorer must return one image"),
        (lambda x, noise: x.expand(2, 4, 4), "the image of restorer must be"),
        (lambda x, noise: x[:, : 2 + noise.seed % 2], "images of one shape"),
    ]
    for restorer, message in restorers:
        with pytest.raises(ValueError, match=message):
            ConfidenceMask(restorer, error=grey, draws=6).predict(x)
    plain: Any = lambda x, noise: x  # noqa: E731
    wrong = ConfidenceMask(plain, error=grey, draws=2, score=lambda draws, x: np.zeros(3))
    with pytest.raises(ValueError, match="score must be a map of"):
        wrong.predict(x)
    mask = ConfidenceMask(plain, error=grey, draws=2)
    with pytest.raises(ValueError, match="image 0 has shape"):
        mask.calibrate([torch.rand(1, 8, 8)], blurred)
    with pytest.raises(ValueError, match=r"image 0 must lie in \[0, 1\]"):
        mask.calibrate([(x, 2 + x)], None)
    with pytest.raises(ValueError, match="groups ends after 1 images"):
        mask.calibrate([(x, x)] * 2, None, groups=["a"])


# The flow


def tiny(channels: int = 1, seed: int = 0) -> RestorationFlow:
    network = EnlargingNet(channels=channels, factor=2, width=8, blocks=1, seed=seed)
    return RestorationFlow(network, factor=2, steps=1, draws=3, kernel=3)


def trained(count: int = 40) -> tuple[RestorationFlow, torch.Tensor]:
    x = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    model = tiny()
    model.fit(x[:20], steps=2, batch_size=8, lr=1e-3, ema=0.5, progress=False)
    return model, x


def test_a_flow_is_trained_calibrated_saved_and_loaded(tmp_path: Path) -> None:
    model, x = trained()
    small = model.degrade(x)
    assert small.shape == (40, 1, 4, 4)
    assert_allclose(small[0, 0, 0, 0], x[0, 0, :2, :2].mean(), rtol=1e-6)
    missing = x[:20] - model.enlarge(small[:20])
    assert model.scale == pytest.approx(float(missing.double().square().mean().sqrt()))
    with pytest.raises(ValueError, match="nothing was calibrated"):
        model.restore(small[0], 0.2)
    with pytest.raises(ValueError, match="there are no examples to restore"):
        model.sample(1, noise=KeyedNoise(0))
    model.calibrate(x[20:], levels=(0.5, 0.9))
    assert model.calibration is not None and model.calibration.parts[""].n == 20
    given = model.file(model.pixels(x[20:22]))
    assert torch.equal((255 * given).round() / 255, given)  # as a file of 8 bits holds it
    image, trusted = model.restore(given[0], 0.5)
    assert image.shape == (1, 8, 8) and trusted.shape == (8, 8) and trusted.dtype == torch.bool
    assert float(image.min()) >= 0 and float(image.max()) <= 1
    path = tmp_path / "model.safetensors"
    model.save(path)
    again = fluvial.load(path)
    assert isinstance(again, RestorationFlow) and again.calibration == model.calibration
    loaded = again.restore(given[0], 0.5)
    assert torch.equal(loaded.image, image) and torch.equal(loaded.trusted, trusted)
    assert again.use is not None and "identification" in {e.id for e in again.use.out_of_scope}
    sample = again.sample(5, noise=KeyedNoise(3))
    assert sample.shape == (5, 1, 8, 8)
    rows = again.sample(2, noise=KeyedNoise(3).rows(torch.tensor([3, 1])))
    assert torch.equal(rows, sample[[3, 1]])
    assert again.sample(2, noise=KeyedNoise(3), steps=2).shape == (2, 1, 8, 8)
    # the thresholds are those of these weights
    again.load_state_dict(again.state_dict())
    assert again.calibration is None


def test_larger_images_are_restored_in_tiles() -> None:
    model, x = trained()
    model.calibrate(x[20:], levels=(0.5,))
    small = torch.rand(1, 9, 4, generator=torch.Generator().manual_seed(1))
    image, trusted = model.restore(small, 0.5, noise=KeyedNoise(5))
    assert image.shape == (1, 18, 8) and trusted.shape == (18, 8)
    # the last tile begins where it ends at the border, and overlaps
    for k, top in enumerate((0, 4, 5)):
        part = model.mask.restore(small[:, top : top + 4], 0.5, noise=KeyedNoise(5).at(k))
        rows = slice(2 * top, 2 * top + (2 if top == 4 else 8))
        assert torch.equal(image[:, rows], part.image[:, : rows.stop - rows.start])
        assert torch.equal(trusted[rows], part.trusted[: rows.stop - rows.start])
    with pytest.raises(ValueError, match=r"x must be \(1, height, width\) of at least 4 x 4"):
        model.restore(small[:, :3], 0.5)
    with pytest.raises(TypeError, match=r"x must be a floating-point tensor .* got torch.uint8"):
        model.restore((255 * small).byte(), 0.5)
    for bad, message in (
        (255 * small, r"x must lie in \[0, 1\]"),
        (small * math.nan, "x must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            model.restore(bad, 0.5)
    with pytest.raises(ValueError, match="groups are calibrated by ConfidenceMask"):
        model.calibrate(x[20:], groups=["a"] * 20)


def test_restorations_do_not_depend_on_the_batch_and_any_size_will_do() -> None:
    model = tiny(channels=3)
    for p in model.parameters():
        p.data = 0.1 * KeyedNoise(2).normal(p)
    x = torch.rand(3, 3, 5, 6, generator=torch.Generator().manual_seed(2))
    all_rows = model.restorations(x, KeyedNoise(1))
    assert all_rows.shape == (3, 3, 10, 12)
    one = model.restorations(x[1:2], KeyedNoise(1).rows(torch.tensor([1])))
    assert_allclose(all_rows[1:2], one, atol=1e-6)
    untrained = tiny().restorations(torch.full((1, 1, 4, 4), 0.5), KeyedNoise(1))
    assert untrained.std() > 0.1  # the network starts at 0: the noise stays as it is


def test_a_colour_flow_measures_lab_and_options_are_checked() -> None:
    model = RestorationFlow(EnlargingNet(channels=3, factor=4), shape=(3, 8, 12))
    assert str(model.mask.error) == "absolute lab error, box 5" and model.mask.draws == 10
    for options, message in (
        ({"factor": 0}, "factor must be at least 1, got 0"),
        ({"draws": 1}, "draws must be at least 2, got 1"),
        ({"shape": (1, 9, 8)}, "size: 9 x 8 does not divide by the factor 4; 8 x 8 does"),
        ({"shape": (2, 8, 8)}, r"images must be \(1 or 3, height, width\)"),
    ):
        with pytest.raises(ValueError, match=message):
            RestorationFlow(EnlargingNet(channels=1, factor=4), **options)
    with pytest.raises(ValueError, match="need positive counts"):
        EnlargingNet(channels=1, factor=2, width=0)
    with pytest.raises(ValueError, match=r"x must lie in \[-1, 1\]"):
        tiny().fit(torch.full((4, 1, 8, 8), 2.0), steps=1)
    with pytest.raises(TypeError, match="x must be floating where the model has no format"):
        tiny().fit(torch.zeros(4, 1, 8, 8, dtype=torch.uint8), steps=1)


def test_hatching_leaves_what_is_trusted() -> None:
    image = torch.cat([torch.full((1, 16, 8), 0.9), torch.full((1, 16, 8), 0.1)], dim=2)
    trusted = torch.zeros(16, 16, dtype=torch.bool)
    trusted[:8] = True
    found = hatched(image, trusted)
    assert torch.equal(found[:, :8], image[:, :8])
    changed = found[:, 8:] != image[:, 8:]
    assert 0.2 < changed.double().mean() < 0.3  # every fourth diagonal
    assert set(found[:, 8:][changed].tolist()) == {0.0, 1.0}


# Recipe and command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(18)
    for k in range(40):
        pixels = rng.integers(0, 256, (4, 4)).repeat(2, 0).repeat(2, 1).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{k:02d}.png")
    return place


def test_train_sample_and_restore_from_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    options = ["--steps", "2", "--batch-size", "4", "--width", "8", "--depth", "1", "--factor", "2"]
    options += ["--draws", "2", "--simulation", "1", "--levels", "0.3", "0.9", "--quiet"]
    train = ["train", "conformal-masks", "--data", str(folder), "--out", str(out), *options]
    assert cli.main(train) == 0
    for name in ("model.safetensors", "masks.png", "README.md", "result.json"):
        assert (out / name).stat().st_size > 0
    names = [entry["name"] for entry in json.loads((out / "result.json").read_text())["metrics"]]
    assert (
        "largest error inside the mask, level 0.3" in names and "trusted share, level 0.9" in names
    )
    model = fluvial.load(out)
    assert model.calibration.levels == (0.3, 0.9) and model.calibration.parts[""].n == 8
    samples = tmp_path / "samples.npz"
    assert cli.main(["sample", str(out), "--n", "3", "--out", str(samples), "--quiet"]) == 0
    with np.load(samples) as found:
        assert found["x"].shape == (3, 1, 8, 8)
    capsys.readouterr()
    image, place = str(folder / "00.png"), tmp_path / "restored"
    restore = ["restore", str(out), image, "--level", "0.9", "--out", str(place)]
    assert cli.main([*restore, "--degrade", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["size"] == [8, 8] and 0 <= document["worst"] <= 1
    with Image.open(place / "trusted.png") as mask:
        assert np.asarray(mask).shape == (8, 8) and set(np.unique(mask)) <= {0, 255}
        assert (np.asarray(mask) > 0).mean() == pytest.approx(document["trusted"])
    with Image.open(place / "restored.png") as restored:
        assert restored.size == (8, 8)
    assert (place / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main([*restore[:-1], str(tmp_path / "large")]) == 0  # 8 x 8 to 16 x 16, in tiles
    said = capsys.readouterr()
    assert "the level is that of a tile of 4 x 4" in said.err and "16 x 16 pixels" in said.out
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "odd.png")
    odd = ["restore", str(out), str(tmp_path / "odd.png"), "--degrade", "--level", "0.9", "--quiet"]
    assert cli.main([*odd, "--out", str(tmp_path / "odd")]) == 0
    assert capsys.readouterr().err == ""
    Image.fromarray(np.zeros((4, 3), np.uint8)).save(tmp_path / "small.png")
    small = ["restore", str(out), str(tmp_path / "small.png"), "--level", "0.9"]
    assert cli.main([*small, "--out", str(tmp_path / "small")]) == 2
    assert "has 4 x 3 pixels, at least 4 x 4 are needed" in capsys.readouterr().err
    assert not (tmp_path / "small").exists()
    for arguments, message in (
        (restore, "is not empty; choose another folder or --force"),
        ([*restore[:4], "0.5", "--out", str(tmp_path / "x")], "level 0.5 was not calibrated"),
        (["restore", str(out), "none.png", "--out", "x", "--level", "0.9"], "there is no file"),
        ([*restore, "--seed", "-1"], "--seed must not be negative"),
    ):
        assert cli.main(arguments) == 2
        assert message in capsys.readouterr().err


def test_a_recipe_is_checked_and_survives_json(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(size=(8, 8), levels=(0.1, 0.3), ema=(0.5,))
    assert from_json(Recipe, json.loads(json.dumps(as_json(recipe)))) == recipe
    for options, message in (
        ({"calibration": 0.0}, r"calibration must be a share in \(0, 1\)"),
        ({"validation": 0.5, "calibration": 0.5}, "leave nothing to train on"),
        ({"channels": 2}, "channels must be 1 for grey or 3 for colour"),
        ({"factor": 0}, "factor must be at least 1"),
        ({"draws": 1}, "draws must be at least 2"),
        ({"levels": ()}, "levels must be one positive number or more"),
        ({"levels": (0.1, 0.1)}, "levels must differ"),
        ({"seed": -1}, "seed must not be negative"),
        ({"steps": 0}, "steps must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Recipe(**options)
    with pytest.raises(ValueError, match="levels must be at most the bound 1 of the error, got 5"):
        Recipe(factor=2, levels=(0.5, 5.0)).prepare(folder, progress=False)
    with pytest.raises(ValueError, match="size: 8 x 8 does not divide by the factor 3; 9 x 9 does"):
        Recipe(factor=3).prepare(folder, progress=False)
    table = tmp_path / "table.csv"
    table.write_text("a,b\n" + "\n".join(f"{k},{k * k}" for k in range(20)))
    with pytest.raises(ValueError, match="what is restored are images"):
        Recipe().prepare(table, progress=False)
    job = Recipe(factor=2).prepare(folder, progress=False)
    assert job.about["rows"] == {"train": 28, "validation": 4, "calibration": 8}
    assert job.about["notes"] == [  # 1 / 9 is above two of the levels
        f"8 images to calibrate on: every mask of level {level:g} will be empty, for which {n} or "
        "more are needed"
        for level, n in ((0.05, 19), (0.1, 9))
    ]
    parts = [set(map(bytes, part.x.numpy())) for part in (job.train, job.held, job.calibration)]
    assert not parts[0] & parts[2] and not parts[0] & parts[1] and not parts[1] & parts[2]


def test_a_picture_of_masks(tmp_path: Path) -> None:
    rng = np.random.default_rng(19)
    true, restored = rng.random((2, 3, 12, 10))
    trusted = np.add.outer(np.arange(12), np.arange(10)) < 9
    error = Difference("pointwise")(true, restored)
    sizes = []
    for k, options in enumerate(
        ({}, {"true": true, "error": error, "degraded": true[:, ::2, ::2]})
    ):
        path = tmp_path / f"{k}.png"
        panels = [Panel(restored, trusted, **options), Panel(restored, ~trusted | True, **options)]
        draw_masks(path, panels, 0.2, title="masks")
        with Image.open(path) as picture:
            sizes.append(picture.size)
    assert sizes[1][0] > sizes[0][0]
    with pytest.raises(ValueError, match="trusted must be a map of"):
        draw_masks(tmp_path / "x.png", [Panel(restored, trusted.T)], 0.2)
