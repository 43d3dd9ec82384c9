from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap as scipy_bootstrap
from scipy.stats import norm

from fluvial.metrics import (
    bootstrap_interval,
    brier_score,
    classifier_test,
    crps,
    density_coverage,
    energy_distance,
    expected_calibration_error,
    frechet_distance,
    kid,
    mmd,
    precision_recall,
    psnr,
    sliced_wasserstein,
    ssim,
)

RNG = np.random.default_rng


def coverage(draw, statistic, target: float, repeats: int, resamples: int = 50) -> float:
    intervals = [
        bootstrap_interval(statistic, *draw(), resamples=resamples, seed=seed)
        for seed in range(repeats)
    ]
    return float(np.mean([low <= target <= high for _, low, high in intervals]))


def mean_deviation(n: int) -> float:
    """E[s] of n draws of a normal law with deviation 1."""
    return math.sqrt(2 / (n - 1)) * math.exp(math.lgamma(n / 2) - math.lgamma((n - 1) / 2))


def test_covers_the_expected_distance_of_samples_that_differ() -> None:
    """One dimension, where E[FD] is known in closed form for every N."""
    n, m, repeats, shift, scale = 80, 120, 40, 0.3, 1.5
    rng = RNG(0)
    deviations = mean_deviation(n) * mean_deviation(m) * scale
    target = shift**2 + (1 / n + scale**2 / m) + 1 + scale**2 - 2 * deviations

    def draw() -> tuple[np.ndarray, np.ndarray]:
        return rng.normal(size=(n, 1)), shift + scale * rng.normal(size=(m, 1))

    hit = coverage(draw, frechet_distance, target, repeats)
    # 4 standard errors of a share of 0.95, and 2 % for the quantiles of 50 resamples
    assert abs(hit - 0.95) < 4 * math.sqrt(0.95 * 0.05 / repeats) + 0.02


def test_covers_the_floor() -> None:
    """Two samples of one distribution in 8 dimensions, where resampling doubles the bias."""
    n, repeats = 60, 30
    rng = RNG(1)

    def draw() -> tuple[np.ndarray, np.ndarray]:
        a, b = rng.normal(size=(2, n, 8))
        return a, b

    values = [frechet_distance(*draw()) for _ in range(300)]
    target = float(np.mean(values))
    hit = coverage(draw, frechet_distance, target, repeats)
    assert hit > 0.95 - 4 * math.sqrt(0.95 * 0.05 / repeats)

    # why the interval is moved: the percentiles themselves lie above what they should hold
    a, b = draw()
    resampled = [
        frechet_distance(a[rng.integers(0, n, n)], b[rng.integers(0, n, n)]) for _ in range(100)
    ]
    assert np.quantile(resampled, 0.025) > target
    bias = np.mean(resampled) - frechet_distance(a, b)
    assert 0.7 < bias / target < 1.4  # the bias at the floor is the whole of the value


def test_a_mean_has_the_interval_of_theory() -> None:
    x = RNG(2).normal(size=400)
    estimate, low, high = bootstrap_interval(np.mean, x, resamples=2000)
    assert estimate == x.mean() and low < estimate < high
    half = 1.96 * x.std() / math.sqrt(400)
    # a 2.5 % quantile of 2000 draws has a standard error of 0.06 standard deviations
    tolerance = 4 * 0.06 / 1.96
    assert estimate - low == pytest.approx(half, rel=tolerance)
    assert high - estimate == pytest.approx(half, rel=tolerance)


def test_level_orders_the_widths() -> None:
    x = RNG(3).normal(size=100)
    widths = [np.ptp(bootstrap_interval(np.mean, x, level=level)[1:]) for level in (0.5, 0.9, 0.95)]
    assert widths == sorted(widths) and widths[0] < widths[-1]


def test_samples_are_resampled_on_their_own() -> None:
    """The difference of a sample and itself varies: rows are not drawn in pairs."""
    x = RNG(4).normal(size=200)
    _, low, high = bootstrap_interval(lambda a, b: a.mean() - b.mean(), x, x)
    half = 1.96 * x.std() * math.sqrt(2 / 200)
    assert (high - low) / 2 == pytest.approx(half, rel=0.4)
    together = np.stack([x, x], 1)
    assert bootstrap_interval(lambda z: (z[:, 0] - z[:, 1]).mean(), together)[1:] == (0, 0)


def test_depends_on_the_seed_alone() -> None:
    before, legacy = torch.random.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    a, b = RNG(5).normal(size=(2, 50, 3))

    def interval(seed: int, *samples: torch.Tensor | np.ndarray) -> tuple[float, ...]:
        return bootstrap_interval(frechet_distance, *samples, resamples=40, seed=seed)

    one = interval(1, a, b)
    assert one == interval(1, a, b) != interval(2, a, b)
    assert one == interval(1, torch.tensor(a), torch.tensor(b))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002


def test_statistic_sees_samples_of_the_same_kind_and_size() -> None:
    seen = []

    def statistic(images: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        seen.append((images.shape, images.dtype, values.shape, values.dtype))
        return images.float().mean()

    images = torch.zeros(7, 2, 3, 3, dtype=torch.uint8)
    values = np.zeros(5, np.float32)
    interval = bootstrap_interval(statistic, images, values, resamples=40)
    assert interval == (0, 0, 0)
    assert len(seen) == 41 and len(set(seen)) == 1


def test_halves_give_a_mean_its_standard_error() -> None:
    """Of halves without replacement the deviations are those of the mean, for even and odd N."""
    for count in (400, 401, 5):
        x = RNG(6).normal(size=count)
        estimate, low, high = bootstrap_interval(np.mean, x, method="half", resamples=2000)
        # 5 rows have only 10 halves, whose mean square is all that can be asked for
        half = 1.96 * x.std() / math.sqrt(count)
        assert low < estimate == x.mean() < high
        assert (high - low) / 2 == pytest.approx(half, rel=0.12 if count > 5 else 0.4)


def test_halves_are_halves() -> None:
    seen = []

    def statistic(a: np.ndarray, b: torch.Tensor) -> float:
        seen.append((a.tolist(), b.tolist()))
        return 0.0

    bootstrap_interval(statistic, np.arange(10), torch.arange(7), method="half", resamples=60)
    assert seen[0] == (list(range(10)), list(range(7)))
    for a, b in seen[1:]:
        assert len(set(a)) == len(a) == 5 and len(set(b)) == len(b) == 3
    # every row is in about half of them: 4 deviations of a share of 60
    shares = np.array([[k in a for k in range(10)] for a, _ in seen[1:]]).mean(0)
    assert (abs(shares - 0.5) < 4 * 0.5 / math.sqrt(60)).all()


def test_halves_where_equal_rows_upset() -> None:
    """Recall: with replacement a neighbour is often the row itself, and the radius 0."""
    a, b = RNG(7).normal(size=(2, 60, 2))
    recall = lambda x, y: precision_recall(x, y).recall  # noqa: E731
    truth = np.std([recall(*RNG(seed).normal(size=(2, 60, 2))) for seed in range(100, 200)])
    interval = bootstrap_interval(recall, a, b, method="half", resamples=100)
    # wider than need be where both laws are equal and halves are small, and never far narrower
    assert 0.7 < (interval.high - interval.low) / (4 * truth) < 3
    again = [recall(*(x[RNG(seed).integers(0, 60, 60)] for x in (a, b))) for seed in range(100)]
    assert np.mean(again) < interval.estimate - truth  # off, before it is moved


def test_bca_agrees_with_scipy() -> None:
    """The same resamples up to their number: ends within the error of a quantile of 2000."""
    x, y = RNG(8).lognormal(size=30), RNG(9).lognormal(size=25)
    spread = math.sqrt(x.var() / 30 + y.var() / 25)
    for statistic, samples in (
        (np.mean, (x,)),
        (lambda a, b: a.mean(-1) - b.mean(-1), (x, y)),
    ):
        ours = bootstrap_interval(statistic, *samples, method="bca", resamples=2000)
        theirs = scipy_bootstrap(
            samples,
            lambda *parts, axis=-1, statistic=statistic: (
                statistic(*parts, axis=axis) if len(parts) == 1 else statistic(*parts)
            ),
            method="BCa",
            n_resamples=2000,
            rng=RNG(0),
        ).confidence_interval
        # a 2.5 % quantile of 2000 has a standard error of 0.06 deviations; two of them, 4 of those
        assert ours[1:] == pytest.approx(theirs, abs=4 * 0.06 * math.sqrt(2) * spread)
        percentile = bootstrap_interval(statistic, *samples, method="percentile", resamples=2000)
        if len(samples) == 1:  # skewed to the right: BCa lies to the right as well
            assert ours.low > percentile.low and ours.high > percentile.high


def test_bca_of_a_skewed_mean_by_hand() -> None:
    """Acceleration of a mean: the skewness over 6 sqrt(N); the quantiles at its two shares."""
    x = RNG(10).exponential(size=40)
    resampled = []
    bootstrap_interval(lambda z: resampled.append(z.mean()) or z.mean(), x, resamples=100)
    values = np.array(resampled[1:])
    skew = np.mean((x - x.mean()) ** 3) / x.std() ** 3 / (6 * math.sqrt(40))
    shift = norm.ppf((values < x.mean()).mean())
    z = shift + norm.ppf([0.025, 0.975])
    wanted = np.quantile(values, norm.cdf(shift + z / (1 - skew * z)))
    found = bootstrap_interval(np.mean, x, method="bca", resamples=100)
    assert found[1:] == pytest.approx(tuple(wanted), rel=1e-9)
    # of a statistic that no row moves
    assert bootstrap_interval(lambda z: 1.0, x, method="bca") == (1, 1, 1)


def test_bca_leaves_many_rows_out_in_groups() -> None:
    calls = []
    x = RNG(11).normal(size=1050)
    bootstrap_interval(lambda z: calls.append(len(z)) or z.mean(), x, method="bca", resamples=40)
    assert len(calls) == 1 + 40 + 100
    assert set(calls[41:]) == {1039, 1040}


def test_bca_covers_a_skewed_mean_better() -> None:
    """Of 30 exponential numbers: the percentile interval ends below the mean too often."""
    rng, repeats = RNG(12), 60
    ends: dict[str, list[tuple[float, float]]] = {"percentile": [], "bca": []}
    for seed in range(repeats):
        x = rng.exponential(size=30)
        for method, found in ends.items():
            found.append(bootstrap_interval(np.mean, x, method=method, resamples=60, seed=seed)[1:])
    low, high = np.array(ends["bca"]).T
    hit = np.mean((low <= 1) & (high >= 1))
    assert hit > 0.95 - 4 * math.sqrt(0.95 * 0.05 / repeats)
    assert np.sum(high < 1) < np.sum(np.array(ends["percentile"])[:, 1] < 1)


def test_pairs_stay_together() -> None:
    x = torch.from_numpy(RNG(13).normal(size=(50, 2)))
    same = x[:, 0].numpy()
    assert bootstrap_interval(lambda a, b: (a - b).mean(), same, same, paired=True) == (0, 0, 0)
    for method in ("centred", "half", "percentile", "bca"):
        paired = bootstrap_interval(
            lambda a, b: (a - b).mean(), x[:, 0], x[:, 1], paired=True, method=method
        )
        whole = bootstrap_interval(lambda z: (z[:, 0] - z[:, 1]).mean(), x, method=method)
        assert paired == pytest.approx(whole, rel=1e-12)
    with pytest.raises(ValueError, match=r"same number of rows, got \[50, 49\]"):
        bootstrap_interval(lambda a, b: 0.0, x, x[:49], paired=True)


def test_around_every_kind_of_metric() -> None:
    """Pairs, one sample, two samples; the estimate is the metric itself."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 12, 1, 12, 12, generator=generator)
    draws, truth = RNG(14).normal(size=(40, 9)), RNG(15).normal(size=40)
    p, outcome = RNG(16).uniform(size=(40)), RNG(17).integers(0, 2, 40)
    a, b = RNG(18).normal(size=(2, 40, 3))
    cases = [
        (lambda u, v: psnr(u, v, data_range=1).mean(), (x, y), True, "bca"),
        (lambda u, v: ssim(u, v, data_range=1).mean(), (x, y), True, "bca"),
        (lambda d, t: crps(d, t).mean(), (draws, truth), True, "bca"),
        (expected_calibration_error, (p, outcome), True, "centred"),
        (lambda q, o: brier_score(q, o).mean(), (p, outcome), True, "percentile"),
        (np.mean, (classifier_test(a, b).correct,), False, "percentile"),
        (kid, (a, b), False, "half"),
        (lambda u, v: mmd(u, v, bandwidth=1.0), (a, b), False, "half"),
        (energy_distance, (a, b), False, "half"),
        (lambda u, v: sliced_wasserstein(u, v, projections=8), (a, b), False, "half"),
        (lambda u, v: density_coverage(u, v).coverage, (a, b), False, "half"),
        (frechet_distance, (a, b), False, "centred"),
    ]
    for statistic, samples, paired, method in cases:
        found = bootstrap_interval(statistic, *samples, paired=paired, method=method, resamples=40)
        assert found.estimate == float(statistic(*samples))
        assert found.low < found.high
        assert found.low <= found.estimate + (found.high - found.low)


@pytest.mark.parametrize(
    ("samples", "settings", "error", "message"),
    [
        ([], {}, ValueError, "samples: at least one"),
        ([[1.0, 2.0]], {}, TypeError, r"samples\[0\] must be a tensor"),
        ([np.ones(3), np.ones(1)], {}, ValueError, r"samples\[1\] must have at least 2 rows"),
        ([torch.tensor(3.0)], {}, ValueError, "at least 2 rows"),
        ([np.ones(3)], {"level": 1.0}, ValueError, "level"),
        ([np.ones(3)], {"level": 0.0}, ValueError, "level"),
        ([np.ones(3)], {"level": 95}, ValueError, "level"),
        ([np.ones(3)], {"resamples": 39}, ValueError, "resamples must be at least 40"),
        ([np.ones(3)], {"resamples": 0}, ValueError, "resamples"),
        ([np.ones(3)], {"seed": -1}, ValueError, "seed"),
        ([np.ones(3)], {"method": "basic"}, ValueError, "method must be one of centred, half"),
        ([np.ones(3)], {"method": "half"}, ValueError, "at least 4 rows"),
        ([np.array([1.0, np.nan])], {}, ValueError, "statistic must be finite"),
    ],
)
def test_refuses(samples, settings, error, message) -> None:
    with pytest.raises(error, match=message):
        bootstrap_interval(np.mean, *samples, **settings)


@pytest.mark.parametrize("value", [np.ones(2), torch.ones(2), "x", None, 1j])
def test_refuses_what_is_not_a_number(value: object) -> None:
    with pytest.raises(ValueError, match="statistic must give one number"):
        bootstrap_interval(lambda x: value, np.ones(3))
