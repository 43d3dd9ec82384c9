from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fluvial.metrics import bootstrap_interval, frechet_distance

RNG = np.random.default_rng


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These matrices are too small to gain from more, and lose much where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def coverage(draw, statistic, target: float, repeats: int, resamples: int = 80) -> float:
    intervals = [
        bootstrap_interval(statistic, *draw(), resamples=resamples, seed=seed)
        for seed in range(repeats)
    ]
    return float(np.mean([low <= target <= high for _, low, high in intervals]))


def mean_deviation(n: int) -> float:
    """E[s] of n draws of a normal law with deviation 1."""
    return math.sqrt(2 / (n - 1)) * math.exp(math.lgamma(n / 2) - math.lgamma((n - 1) / 2))


@pytest.mark.parametrize(("shift", "scale"), [(1.0, 1.0), (0.3, 1.5)])
def test_covers_the_expected_distance_of_samples_that_differ(shift: float, scale: float) -> None:
    """One dimension, where E[FD] is known in closed form for every N."""
    n, m, repeats = 80, 120, 100
    rng = RNG(0)
    deviations = mean_deviation(n) * mean_deviation(m) * scale
    target = shift**2 + (1 / n + scale**2 / m) + 1 + scale**2 - 2 * deviations

    def draw() -> tuple[np.ndarray, np.ndarray]:
        return rng.normal(size=(n, 1)), shift + scale * rng.normal(size=(m, 1))

    hit = coverage(draw, frechet_distance, target, repeats)
    # 4 standard errors of a share of 0.95, and 2 % for the quantiles of 80 resamples
    assert abs(hit - 0.95) < 4 * math.sqrt(0.95 * 0.05 / repeats) + 0.02


def test_covers_the_floor() -> None:
    """Two samples of one distribution in 8 dimensions, where resampling doubles the bias."""
    n, repeats = 60, 60
    rng = RNG(1)

    def draw() -> tuple[np.ndarray, np.ndarray]:
        a, b = rng.normal(size=(2, n, 8))
        return a, b

    values = [frechet_distance(*draw()) for _ in range(400)]
    target = float(np.mean(values))
    hit = coverage(draw, frechet_distance, target, repeats, resamples=60)
    assert hit > 0.95 - 4 * math.sqrt(0.95 * 0.05 / repeats)

    # why the interval is moved: the percentiles themselves lie above what they should hold
    a, b = draw()
    resampled = [
        frechet_distance(a[rng.integers(0, n, n)], b[rng.integers(0, n, n)]) for _ in range(200)
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
    one = bootstrap_interval(frechet_distance, a, b, seed=1)
    assert one == bootstrap_interval(frechet_distance, a, b, seed=1)
    assert one != bootstrap_interval(frechet_distance, a, b, seed=2)
    tensors = bootstrap_interval(frechet_distance, torch.tensor(a), torch.tensor(b), seed=1)
    assert one == tensors
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
