from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import ot
import pytest
import torch
from scipy.stats import wasserstein_distance

from fluvial.metrics import (
    frechet_distance,
    gaussian_wasserstein,
    max_sliced_wasserstein,
    sliced_wasserstein,
    wasserstein,
)
from fluvial.metrics.sliced import directions
from fluvial.metrics.wasserstein import quantile_power

RNG = np.random.default_rng


def pair(columns: int = 3, rows: tuple[int, int] = (23, 17)) -> tuple[np.ndarray, np.ndarray]:
    rng = RNG(columns)
    return rng.normal(size=(rows[0], columns)), rng.normal(size=(rows[1], columns)) * 1.3 + 0.2


@pytest.mark.parametrize("p", [1, 2, 3.5])
def test_the_best_of_all_permutations(p: float) -> None:
    a, b = pair(2, (5, 5))
    cost = np.linalg.norm(a[:, None] - b, axis=-1) ** p
    best = min(cost[range(5), list(order)].mean() for order in permutations(range(5)))
    assert wasserstein(a, b, p=p) == pytest.approx(best ** (1 / p), rel=1e-12)


@pytest.mark.parametrize("columns", [3, 30])
def test_agrees_with_pot(columns: int) -> None:
    a, b = pair(columns)
    weights = [np.full(len(x), 1 / len(x)) for x in (a, b)]
    wanted = ot.emd2(*weights, ot.dist(a, b, "sqeuclidean"))
    assert wasserstein(a, b) == pytest.approx(math.sqrt(wanted), rel=1e-9)
    wanted = ot.emd2(*weights, ot.dist(a, b, "euclidean"))
    assert wasserstein(a, b, p=1) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("rows", [(23, 17), (12, 18), (5, 1), (20, 20)])
def test_one_dimension_agrees_with_scipy_and_pot(rows: tuple[int, int]) -> None:
    a, b = pair(1, rows)
    assert wasserstein(a, b, p=1) == pytest.approx(
        wasserstein_distance(a[:, 0], b[:, 0]), rel=1e-12
    )
    wanted = ot.wasserstein_1d(a[:, 0], b[:, 0], p=3)
    assert wasserstein(a, b, p=3) == pytest.approx(wanted ** (1 / 3), rel=1e-12)
    # in two dimensions of which one is constant, by the simplex
    flat = [np.pad(x, ((0, 0), (0, 1))) for x in (a, b)]
    assert wasserstein(*flat, p=3) == pytest.approx(wasserstein(a, b, p=3), rel=1e-10)


def test_moved_points() -> None:
    a, _ = pair(4)
    move = np.array([3.0, 0, 4, 0])
    for p in (1, 2, 5):
        assert wasserstein(a, a + move, p=p) == pytest.approx(5, rel=1e-10)
    assert wasserstein(a, a[::-1]) == 0
    assert wasserstein(1e9 * a, 1e9 * a + move) == pytest.approx(5, rel=1e-6)
    assert wasserstein(1e-200 * a, 3e-200 * a) == pytest.approx(1e-200 * wasserstein(a, 3 * a))


def test_quantiles_are_differentiable() -> None:
    """The slope of the mean square of sorted differences, in the order of the rows."""
    a, b = pair(1, (6, 6))
    x = torch.from_numpy(a).requires_grad_()
    quantile_power(x, torch.from_numpy(b), 2).sum().backward()
    rank = a[:, 0].argsort().argsort()
    np.testing.assert_allclose(x.grad, (a - np.sort(b, 0)[rank]) / 3, rtol=1e-12)
    # of twice as many equal points the same
    y = torch.from_numpy(a).requires_grad_()
    twice = torch.from_numpy(np.repeat(b, 2, 0))
    quantile_power(y, twice, 2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_gaussians() -> None:
    a, b = pair(4, (60, 50))
    cov_a, cov_b = np.cov(a.T), np.cov(b.T)
    found = gaussian_wasserstein(a.mean(0), cov_a, b.mean(0), cov_b)
    wanted = ot.gaussian.bures_wasserstein_distance(a.mean(0), b.mean(0), cov_a, cov_b)
    assert found == pytest.approx(float(wanted), rel=1e-9)
    assert found**2 == pytest.approx(frechet_distance(a, b), rel=1e-10)
    singular = np.diag([4.0, 0.0]), np.diag([0.0, 9.0])
    assert gaussian_wasserstein(np.zeros(2), singular[0], np.array([1.0, 0]), singular[1]) == (
        pytest.approx(math.sqrt(1 + 4 + 9), rel=1e-13)
    )


@pytest.mark.parametrize("rows", [(23, 17), (20, 20)])
@pytest.mark.parametrize("p", [1, 2])
def test_sliced_agrees_with_pot_along_the_same_directions(p: int, rows: tuple[int, int]) -> None:
    a, b = pair(3, rows)
    along = directions(3, 16, seed=2).numpy().T
    found = sliced_wasserstein(a, b, p=p, projections=16, seed=2)
    wanted = ot.sliced_wasserstein_distance(a, b, projections=along, p=p)
    assert found == pytest.approx(wanted, rel=1e-10)
    found = max_sliced_wasserstein(a, b, p=p, projections=16, steps=0, seed=2)
    wanted = ot.max_sliced_wasserstein_distance(a, b, projections=along, p=p)
    assert found == pytest.approx(wanted, rel=1e-10)


def test_sliced_in_one_dimension_is_exact() -> None:
    a, b = pair(1)
    assert sliced_wasserstein(a, b, projections=3) == pytest.approx(wasserstein(a, b), rel=1e-12)
    assert max_sliced_wasserstein(a, b, projections=1) == pytest.approx(
        wasserstein(a, b), rel=1e-12
    )


def test_sliced_of_moved_points() -> None:
    """W along u is |<u, move>|: its mean square is |move|^2 / D, its maximum |move|."""
    a, _ = pair(3)
    move = np.array([2.0, -1.0, 2.0])
    found = sliced_wasserstein(a, a + move, projections=4000)
    # <u, m>^2 / |m|^2 has mean 1 / D and variance 2 (D - 1) / (D^2 (D + 2))
    spread = math.sqrt(2 * 2 / (9 * 5) / 4000)
    assert abs(found**2 / 9 - 1 / 3) < 4 * spread
    assert max_sliced_wasserstein(a, a + move, projections=2) == pytest.approx(3, rel=1e-6)


def test_max_sliced_only_rises() -> None:
    a, b = pair(8, (40, 30))
    values = [max_sliced_wasserstein(a, b, projections=8, steps=k) for k in (0, 1, 5, 50)]
    assert values == sorted(values) and values[-1] > 1.1 * values[0]
    assert values[-1] < wasserstein(a, b)  # a projection shortens


def test_directions_are_keyed() -> None:
    first, more = directions(5, 3), directions(5, 10)
    assert torch.equal(first, more[:3])
    assert not torch.equal(first, directions(5, 3, seed=1))
    assert torch.allclose(more.norm(dim=1), torch.ones(10, dtype=torch.float64))
    a, b = pair()
    assert sliced_wasserstein(a, b) == sliced_wasserstein(a, b) != sliced_wasserstein(a, b, seed=1)


@pytest.mark.parametrize("metric", [wasserstein, sliced_wasserstein, max_sliced_wasserstein])
def test_refuses(metric) -> None:
    a, b = pair()
    with pytest.raises(ValueError, match="p must be at least 1 and finite, got 0.5"):
        metric(a, b, p=0.5)
    with pytest.raises(ValueError, match="p must be at least 1 and finite"):
        metric(a, b, p=math.inf)
    with pytest.raises(ValueError, match="a must be finite"):
        metric(a * np.nan, b)
    with pytest.raises(ValueError, match="b must have shape"):
        metric(a, b[0])
    with pytest.raises(ValueError, match="same number of columns, got 3 and 2"):
        metric(a, b[:, :2])


def test_refuses_sizes_and_counts(monkeypatch) -> None:
    a, b = pair()
    with pytest.raises(ValueError, match="at most 20 rows for the exact distance, got 23 and 17"):
        wasserstein(a, b, limit=20)
    wasserstein(a[:, :1], b[:, :1], limit=5)  # one column has no limit
    with pytest.raises(ValueError, match="projections must be at least 1, got 0"):
        sliced_wasserstein(a, b, projections=0)
    with pytest.raises(ValueError, match="steps must not be negative"):
        max_sliced_wasserstein(a, b, steps=-1)
    with pytest.raises(ValueError, match="b: covariance must be symmetric"):
        gaussian_wasserstein(np.zeros(2), np.eye(2), np.zeros(2), np.array([[1, 2], [0, 1.0]]))
    monkeypatch.setattr(ot, "emd2", lambda *args, **options: (0.0, {"warning": "too slow"}))
    with pytest.raises(RuntimeError, match="not found: too slow"):
        wasserstein(a, b)
