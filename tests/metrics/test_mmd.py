from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist, pdist
from scipy.stats import energy_distance as scipy_energy
from sklearn.gaussian_process.kernels import RationalQuadratic
from sklearn.metrics.pairwise import polynomial_kernel, rbf_kernel

from fluvial.metrics import energy_distance, kid, kid_subsets, median_distance, mmd
from fluvial.metrics.distances import squared_distances
from fluvial.metrics.mmd import gaussian, polynomial, rational_quadratic

RNG = np.random.default_rng
COLUMNS = [3, 40]  # differences one by one, and by products


def pair(columns: int = 3, rows: tuple[int, int] = (23, 17)) -> tuple[np.ndarray, np.ndarray]:
    rng = RNG(columns)
    return rng.normal(size=(rows[0], columns)), rng.normal(size=(rows[1], columns)) * 1.3 + 0.2


def by_definition(kernel, a: np.ndarray, b: np.ndarray, unbiased: bool) -> float:
    within = 0.0
    for x in (a, b):
        k = kernel(x, x)
        n = len(x)
        within += (k.sum() - np.trace(k)) / (n * (n - 1)) if unbiased else k.mean()
    return within - 2 * kernel(a, b).mean()


KERNELS = {
    "gaussian": lambda x, y: rbf_kernel(x, y, gamma=1 / (2 * 1.5**2)),
    "laplace": lambda x, y: np.exp(-cdist(x, y) / 1.5),
    "rational_quadratic": RationalQuadratic(length_scale=1.5, alpha=1.0),
}


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_by_definition_with_the_kernels_of_scikit_learn(name, unbiased, columns) -> None:
    a, b = pair(columns)
    wanted = by_definition(KERNELS[name], a, b, unbiased)
    for memory in (2**20, 4000):  # one block, and blocks of ten by ten pairs
        found = mmd(a, b, kernel=name, bandwidth=1.5, unbiased=unbiased, memory=memory)
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-13)


def test_bandwidths_are_averaged_and_kernels_passed() -> None:
    a, b = pair()
    several = mmd(a, b, bandwidth=(0.5, 2.0))
    assert several == pytest.approx(
        (mmd(a, b, bandwidth=0.5) + mmd(a, b, bandwidth=2.0)) / 2, rel=1e-12
    )
    assert mmd(a, b, kernel=gaussian(0.5, 2.0)) == pytest.approx(several, rel=1e-12)
    wide = mmd(a, b, kernel=rational_quadratic(1.5, exponent=1e7))
    assert wide == pytest.approx(mmd(a, b, bandwidth=1.5), rel=1e-5)  # its limit


def test_gaussians_have_a_closed_form() -> None:
    """Mean of the unbiased estimate: E k(X, Y) of normal X and Y is that of a wider kernel."""
    h, shift, scale, rng = 1.2, 0.5, 1.4, RNG(0)

    def mean_kernel(mean: float, variance: float) -> float:
        return h / math.sqrt(h**2 + variance) * math.exp(-(mean**2) / (2 * (h**2 + variance)))

    truth = mean_kernel(0, 2) + mean_kernel(0, 2 * scale**2) - 2 * mean_kernel(shift, 1 + scale**2)
    values, biased = [], []
    for _ in range(150):
        a, b = rng.normal(size=(12, 1)), shift + scale * rng.normal(size=(15, 1))
        values.append(mmd(a, b, bandwidth=h))
        biased.append(mmd(a, b, bandwidth=h, unbiased=False))
    error = np.std(values) / math.sqrt(len(values))
    assert abs(np.mean(values) - truth) < 4 * error
    # the diagonal: E[k(x, x) - k(X, X')] / N for each
    bias = (1 - mean_kernel(0, 2)) / 12 + (1 - mean_kernel(0, 2 * scale**2)) / 15
    assert abs(np.mean(biased) - truth - bias) < 4 * error
    assert min(biased) > 0


def test_kid_by_definition() -> None:
    a, b = pair(40)
    kernel = lambda x, y: polynomial_kernel(x, y, degree=3, gamma=1 / 40, coef0=1)  # noqa: E731
    wanted = by_definition(kernel, a, b, True)
    assert kid(a, b) == pytest.approx(wanted, rel=1e-10)
    assert kid(a, b, memory=4000) == pytest.approx(wanted, rel=1e-10)
    assert mmd(a, b, kernel=polynomial(2, scale=0.5, offset=0.0)) == pytest.approx(
        by_definition(
            lambda x, y: polynomial_kernel(x, y, degree=2, gamma=0.5, coef0=0), a, b, True
        ),
        rel=1e-10,
    )


def test_kid_of_subsets() -> None:
    a, b = pair(5, (30, 40))
    whole = kid_subsets(a, b[:30], size=30, subsets=3)
    assert whole.mean == pytest.approx(kid(a, b[:30]), rel=1e-10)  # every subset is all
    assert whole.std == pytest.approx(0, abs=1e-12)
    found = kid_subsets(a, b, size=10, subsets=100)
    # the mean of one subset, drawn again and again, is that of all rows
    assert abs(found.mean - kid(a, b)) < 4 * found.std / math.sqrt(100)
    assert found == kid_subsets(a, b, size=10, subsets=100)
    assert found != kid_subsets(a, b, size=10, subsets=100, seed=1)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("unbiased", [True, False])
def test_energy_distance_by_definition(columns: int, unbiased: bool) -> None:
    a, b = pair(columns)
    wanted = by_definition(lambda x, y: -cdist(x, y), a, b, unbiased)
    for memory in (2**20, 4000):
        found = energy_distance(a, b, unbiased=unbiased, memory=memory)
        assert found == pytest.approx(wanted, rel=1e-9)


def test_energy_distance_is_an_mmd() -> None:
    a, b = pair()
    for unbiased in (True, False):
        found = mmd(a, b, kernel=lambda x, y: -torch.cdist(x, y), unbiased=unbiased)
        assert energy_distance(a, b, unbiased=unbiased) == pytest.approx(found, rel=1e-6)


def test_energy_distance_agrees_with_scipy() -> None:
    a, b = pair(1)
    ours = energy_distance(a, b, unbiased=False)
    assert math.sqrt(ours) == pytest.approx(scipy_energy(a[:, 0], b[:, 0]), rel=1e-10)


def test_energy_distance_of_shifted_points() -> None:
    """Two clusters of equal points a distance apart: twice the distance."""
    a, b = np.zeros((4, 20)), np.zeros((6, 20))
    b[:, 3] = 5
    assert energy_distance(a, b) == pytest.approx(10, rel=1e-12)
    assert energy_distance(a, a) == 0


@pytest.mark.parametrize("columns", COLUMNS)
def test_median_distance(columns: int) -> None:
    a, b = pair(columns)
    pairs = np.sort(pdist(np.concatenate([a, b])))
    assert median_distance(a, b) == pytest.approx(pairs[(len(pairs) - 1) // 2], rel=1e-12)
    few = median_distance(a, b, rows=10)
    assert few == median_distance(a, b, rows=10) != median_distance(a, b, rows=10, seed=1)
    assert np.isclose(pairs, few, rtol=1e-12).any()
    assert mmd(a, b) == mmd(a, b, bandwidth=median_distance(a, b))


def test_equal_rows_have_distance_zero_far_from_the_origin() -> None:
    x = torch.from_numpy(RNG(0).normal(size=(6, 50)) + 1e6)
    squares = squared_distances(x, x.flip(0))
    assert (squares.flip(0).diagonal() == 0).all()
    centred = x - x.mean(0)
    np.testing.assert_allclose(
        squared_distances(centred, centred).numpy(), cdist(x, x) ** 2, rtol=1e-7, atol=1e-8
    )


def test_tensors_arrays_and_devices_of_any_precision() -> None:
    a, b = pair()
    tensors = torch.tensor(a, requires_grad=True), torch.tensor(b)
    for metric in (mmd, kid, energy_distance):
        assert metric(*tensors) == metric(a, b)
        assert metric(tensors[0], b) == metric(a, b)
        half = metric(a.astype(np.float32), b.astype(np.float32))
        assert half == pytest.approx(metric(a, b), rel=1e-4)


@pytest.mark.parametrize("metric", [mmd, kid, energy_distance, median_distance])
def test_refuses_what_is_no_matrix(metric) -> None:
    good = np.eye(5, 2)
    for bad, error, message in (
        (np.zeros(5), ValueError, r"must have shape \(N, D\)"),
        (np.zeros((0, 2)), ValueError, "N at least"),
        (np.full((5, 2), np.nan), ValueError, "must be finite"),
        ("x", TypeError, "got str"),
    ):
        with pytest.raises(error, match=f"a {message}" if message[0] == "m" else message):
            metric(bad, good)
        with pytest.raises(error, match=f"b {message}" if message[0] == "m" else message):
            metric(good, bad)
    with pytest.raises(ValueError, match="same number of columns, got 2 and 3"):
        metric(good, np.eye(5, 3))


def test_refuses() -> None:
    a, b = pair()
    with pytest.raises(ValueError, match="kernel must be one of gaussian, laplace"):
        mmd(a, b, kernel="cubic")
    for bandwidth in (0.0, -1.0, math.nan, (), (1.0, 0.0)):
        with pytest.raises(ValueError, match="bandwidth must be positive"):
            mmd(a, b, bandwidth=bandwidth)
    with pytest.raises(ValueError, match="bandwidth is for a kernel given by name"):
        mmd(a, b, kernel=polynomial(), bandwidth=1.0)
    with pytest.raises(ValueError, match="kernel must give finite numbers"):
        mmd(a, b, kernel=lambda x, y: torch.full((len(x), len(y)), math.nan))
    for bad, got in ((lambda x, y: x, "2"), (lambda x, y: (x @ y.T)[:, :1], "1")):
        with pytest.raises(ValueError, match=rf"kernel must give shape \(23, 23\) .*{got}\)"):
            mmd(a[:, :2], b[:, :2], kernel=bad)
    several = mmd(a, b, bandwidth=(0.5, 2.0))
    assert several == mmd(a, b, bandwidth=np.array([0.5, 2.0]))
    assert several == mmd(a, b, bandwidth=torch.tensor([0.5, 2.0]))
    with pytest.raises(ValueError, match="degree must be at least 1"):
        polynomial(0)
    with pytest.raises(ValueError, match="exponent must be positive"):
        rational_quadratic(1.0, exponent=0.0)
    with pytest.raises(ValueError, match="median distance is 0"):
        mmd(np.zeros((4, 2)), np.zeros((5, 2)))
    with pytest.raises(ValueError, match="memory must be at least 64 bytes"):
        energy_distance(a, b, memory=8)
    with pytest.raises(ValueError, match="size must be at least 2 and at most"):
        kid_subsets(a, b, size=18)
    with pytest.raises(ValueError, match="subsets must be at least 1"):
        kid_subsets(a, b, size=5, subsets=0)
