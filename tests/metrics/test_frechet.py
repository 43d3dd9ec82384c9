from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from fluvial.core.noise import KeyedNoise
from fluvial.metrics import Moments, frechet_distance, frechet_infinity

RNG = np.random.default_rng


def white(rows: int, columns: int, seed: int) -> np.ndarray:
    """Features whose sample mean is exactly 0 and sample covariance exactly the identity."""
    x = RNG(seed).normal(size=(rows, columns))
    q, _ = np.linalg.qr(x - x.mean(0))
    return q * np.sqrt(rows - 1)


def rotation(size: int, seed: int) -> np.ndarray:
    return np.linalg.qr(RNG(seed).normal(size=(size, size)))[0]


def pair(rows_a: int = 60, rows_b: int = 40, columns: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Two samples with covariances that do not commute."""
    rng = RNG(3)
    a = rng.normal(size=(rows_a, columns)) @ rng.normal(size=(columns, columns))
    b = rng.normal(size=(rows_b, columns)) @ rng.normal(size=(columns, columns)) + 1
    return a, b


def by_eigenvalues(a: np.ndarray, b: np.ndarray) -> float:
    """The definition, with the eigenvalues of the product: right to about 1e-7 only."""
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    root = np.sqrt(np.clip(np.linalg.eigvals(cov_a @ cov_b).real, 0, None)).sum()
    return np.sum((a.mean(0) - b.mean(0)) ** 2) + np.trace(cov_a + cov_b) - 2 * root


def test_diagonal_gaussians_have_a_closed_form() -> None:
    std_a, std_b = np.array([1.0, 0.5, 3.0, 1e-3]), np.array([2.0, 0.5, 0.0, 2e-3])
    mean_a, mean_b = np.array([0.0, 1.0, -2.0, 5.0]), np.array([1.0, 1.0, 2.0, 5.0])
    a, b = white(30, 4, 0) * std_a + mean_a, white(50, 4, 1) * std_b + mean_b
    wanted = np.sum((mean_a - mean_b) ** 2) + np.sum((std_a - std_b) ** 2)
    assert frechet_distance(a, b) == pytest.approx(wanted, rel=1e-12)


def test_one_dimension_is_a_distance_of_means_and_deviations() -> None:
    a, b = RNG(0).normal(size=(20, 1)), 3 * RNG(1).normal(size=(30, 1)) + 1
    wanted = (a.mean() - b.mean()) ** 2 + (a.std(ddof=1) - b.std(ddof=1)) ** 2
    assert frechet_distance(a, b) == pytest.approx(wanted, rel=1e-12)


def test_agrees_with_the_matrix_root() -> None:
    a, b = pair()
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    root = np.trace(sqrtm(cov_a @ cov_b)).real
    wanted = np.sum((a.mean(0) - b.mean(0)) ** 2) + np.trace(cov_a + cov_b) - 2 * root
    assert frechet_distance(a, b) == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize(("rows_a", "rows_b"), [(5, 4), (2, 2), (3, 200), (20, 21)])
def test_fewer_rows_than_columns(rows_a: int, rows_b: int) -> None:
    a, b = RNG(0).normal(size=(rows_a, 20)), RNG(1).normal(size=(rows_b, 20)) + 0.3
    value = frechet_distance(a, b)
    assert value == pytest.approx(by_eigenvalues(a, b), rel=1e-6)
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-13 * np.square(a).sum())


def test_features_in_a_subspace() -> None:
    """Columns of zeros and a rotation change nothing: covariances of rank 6 in 30 dimensions."""
    a, b = pair()
    turn = rotation(30, 7)
    wide_a, wide_b = (np.pad(x, ((0, 0), (0, 24))) @ turn for x in (a, b))
    assert frechet_distance(wide_a, wide_b) == pytest.approx(frechet_distance(a, b), rel=1e-11)


def test_ranges_that_do_not_meet() -> None:
    """Covariances with orthogonal ranges: the trace of the root is 0."""
    a, b = np.zeros((10, 4)), np.zeros((10, 4))
    a[:, :2], b[:, 2:] = white(10, 2, 0), white(10, 2, 1)
    assert frechet_distance(a, b) == pytest.approx(4, rel=1e-12)


def test_constant_features() -> None:
    a, b = np.full((4, 3), 2.0), np.full((9, 3), 1.0)
    assert frechet_distance(a, b) == 3
    assert frechet_distance(a, a) == 0


def test_the_same_features_have_distance_zero() -> None:
    a, _ = pair()
    for x in (a, 1e6 * a, a + 1e6, np.repeat(a, 3, axis=1)):
        assert 0 <= frechet_distance(x, x[::-1]) <= 1e-12 * np.square(x - x.mean(0)).sum()


def test_symmetry() -> None:
    a, b = pair()
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-13)


def test_rigid_motion_leaves_it() -> None:
    a, b = pair()
    turn, move = rotation(6, 8), RNG(9).normal(size=6)
    moved = frechet_distance(a @ turn + move, b @ turn + move)
    assert moved == pytest.approx(frechet_distance(a, b), rel=1e-12)


def test_scaling_is_quadratic() -> None:
    a, b = pair()
    for factor in (1e-6, 3.0, 1e6):
        scaled = frechet_distance(factor * a, factor * b)
        assert scaled == pytest.approx(factor**2 * frechet_distance(a, b), rel=1e-12)


def test_shift_of_one_adds_its_square() -> None:
    a, _ = pair()
    move = np.arange(6.0)
    assert frechet_distance(a, a + move) == pytest.approx(np.sum(move**2), rel=1e-11)


def test_bias_falls_as_one_over_n() -> None:
    """Two samples of one distribution, at N = 50 and N = 200: means in the ratio of 4."""
    rng = RNG(0)
    means, errors = [], []
    for rows in (50, 200):
        values = [frechet_distance(*rng.normal(size=(2, rows, 5))) for _ in range(200)]
        means.append(np.mean(values))
        errors.append(np.std(values) / np.sqrt(len(values)) / np.mean(values))
    # 4 standard errors of the ratio, and the next order of the bias, of size D/N = 10 %
    assert means[0] / means[1] == pytest.approx(4, rel=4 * np.hypot(*errors) + 0.1)


def test_tensors_and_arrays_of_any_precision() -> None:
    a, b = pair()
    wanted = frechet_distance(a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.tensor(a, requires_grad=True)
        assert frechet_distance(x, torch.tensor(b)) == wanted
        assert frechet_distance(x, b) == wanted
    # float32 rounds the features by 6e-8 of their size
    assert frechet_distance(a.astype(np.float32), torch.tensor(b).float()) == pytest.approx(
        wanted, rel=1e-5
    )
    whole = np.arange(12).reshape(6, 2)
    assert frechet_distance(whole, torch.from_numpy(whole**2)) == pytest.approx(
        by_eigenvalues(whole, whole**2), rel=1e-6
    )


@pytest.mark.parametrize("columns", [20, 60])
def test_better_than_the_bare_version_where_singular(columns: int) -> None:
    """Two planes of half the dimensions that share a part: known from their coordinates."""
    half = columns // 2
    rng = RNG(0)
    small = [rng.normal(size=(4 * columns, half)) for _ in range(2)]
    frames = [rotation(columns, seed)[:half] for seed in (1, 2)]
    a, b = (x @ frame for x, frame in zip(small, frames, strict=True))
    # in coordinates: roots of full rank, and the singular values of a product of three
    roots = [np.linalg.qr(x - x.mean(0), mode="r") / np.sqrt(len(x) - 1) for x in small]
    overlap = np.linalg.svd(roots[0] @ frames[0] @ frames[1].T @ roots[1].T, compute_uv=False)
    spread = sum(np.square(root).sum() for root in roots)
    wanted = np.sum((a.mean(0) - b.mean(0)) ** 2) + spread - 2 * overlap.sum()

    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    shift = np.sum((a.mean(0) - b.mean(0)) ** 2) + np.trace(cov_a + cov_b)
    bare = [
        shift - 2 * np.trace(sqrtm(cov_a @ cov_b)).real,
        shift - 2 * np.sqrt(np.linalg.eigvals(cov_a @ cov_b).astype(complex)).real.sum(),
    ]
    error = abs(frechet_distance(a, b) - wanted) / spread
    assert error < 1e-13
    for value in bare:
        assert abs(value - wanted) / spread > 1e4 * error


def test_of_what_an_extractor_gives() -> None:
    """A module in training mode, batches that do not divide the rows."""
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5))
    a, b = (x.reshape(len(x), 1, 2, 3) for x in pair())
    wanted = frechet_distance(*pair())
    ours = frechet_distance(torch.from_numpy(a), b, features=network, batch_size=7)
    assert ours == pytest.approx(wanted, rel=1e-12)
    assert network.training
    with pytest.raises(ValueError, match=r"b must have shape \(N, ...\) with N at least 2"):
        frechet_distance(a, b[:1], features=network)
    with pytest.raises(ValueError, match="b must be finite"):
        frechet_distance(a, b * np.nan, features=network)


def test_moments_in_place_of_features() -> None:
    a, b = pair()
    wanted = frechet_distance(a, b)
    reference = Moments().update(b)
    assert frechet_distance(a, reference) == wanted
    assert frechet_distance(Moments().update(a[:9]).update(a[9:]), reference) == pytest.approx(
        wanted, rel=1e-12
    )
    with pytest.raises(ValueError, match="b must hold at least 2 rows, got 0"):
        frechet_distance(a, Moments())
    with pytest.raises(ValueError, match="same number of columns, got 6 and 5"):
        frechet_distance(a, Moments().update(b[:, :5]))


def test_extrapolation_frees_of_the_bias() -> None:
    """Gaussians at a known distance: the plain mean is 10 standard errors off, this one none."""
    rng, repeats, columns = RNG(4), 80, 5
    std, truth = 1.5, 0.25 * columns + 0.3**2
    plain, freed, against = [], [], []
    for seed in range(repeats):
        a = rng.normal(size=(80, columns))
        b = std * rng.normal(size=(120, columns))
        b[:, 0] += 0.3
        plain.append(frechet_distance(a, b))
        freed.append(frechet_infinity(a, b, seed=seed))
        against.append(frechet_infinity(a, Moments().update(b), seed=seed))
    error = np.std(freed) / np.sqrt(repeats)
    bias = np.mean(plain) - truth
    assert bias > 10 * np.std(plain) / np.sqrt(repeats)
    # 4 standard errors, and the second order of the bias: D k / N of it for k = 4 at most
    assert abs(np.mean(freed) - truth) < 4 * error + bias * columns / 80
    # a fixed reference keeps its own share of the bias
    assert np.mean(freed) < np.mean(against) < np.mean(plain)


def test_extrapolation_is_a_line_through_the_levels() -> None:
    """Two levels: twice the whole less the mean of the halves."""
    a, b = pair(60, 60)
    value = frechet_infinity(a, Moments().update(b), levels=2, seed=3)
    order = KeyedNoise(3).uniform(torch.empty(60, dtype=torch.float64), tag="parts of a").argsort()
    halves = [frechet_distance(a[half], b) for half in order.split(30)]
    assert value == pytest.approx(2 * frechet_distance(a, b) - np.mean(halves), rel=1e-10)
    assert value == frechet_infinity(a, Moments().update(b), levels=2, seed=3)
    assert value != frechet_infinity(a, Moments().update(b), levels=2, seed=4)
    doubled = frechet_infinity(a, b, levels=2, features=lambda x: 2 * x)
    assert doubled == pytest.approx(4 * frechet_infinity(a, b, levels=2), rel=1e-10)


def test_extrapolation_refuses() -> None:
    a, b = pair()
    with pytest.raises(ValueError, match="levels must be at least 2"):
        frechet_infinity(a, b, levels=1)
    with pytest.raises(ValueError, match="b must have at least 48 rows for 8 parts .* got 40"):
        frechet_infinity(a, b, levels=4)
    with pytest.raises(TypeError, match="a must be a tensor or array, which can be cut"):
        frechet_infinity(Moments().update(a), b)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (np.zeros(5), ValueError, "shape"),
        (np.zeros((5, 2, 2)), ValueError, "shape"),
        (np.zeros((1, 2)), ValueError, "N at least 2"),
        (np.zeros((5, 0)), ValueError, "D at least 1"),
        (np.full((5, 2), np.nan), ValueError, "finite"),
        (torch.full((5, 2), torch.inf), ValueError, "finite"),
        (np.zeros((5, 2), complex), TypeError, "real"),
        (torch.zeros((5, 2), dtype=torch.complex64), TypeError, "real"),
        ([[1.0, 2.0], [3.0, 4.0]], TypeError, "got list"),
        (np.array([["x", "y"]] * 3), TypeError, "real"),
    ],
)
def test_refuses(name: str, bad: object, error: type[Exception], message: str) -> None:
    features = {"a": np.eye(5, 2), "b": np.eye(5, 2), name: bad}
    with pytest.raises(error, match=f"{name} must.*{message}"):
        frechet_distance(**features)


def test_refuses_different_columns() -> None:
    with pytest.raises(ValueError, match="same number of columns, got 2 and 3"):
        frechet_distance(np.eye(5, 2), np.eye(5, 3))
