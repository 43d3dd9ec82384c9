from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
import torch

from fluvial.metrics import Moments, frechet_distance, moments

RNG = np.random.default_rng


@pytest.fixture(params=["orthogonal", "products"])
def short_blocks(request, monkeypatch) -> None:
    """Blocks so short that these small samples fill many, with or without products."""
    monkeypatch.setattr(moments, "FIRST", 8)
    monkeypatch.setattr(moments, "LATER", 16)
    if request.param == "orthogonal":
        monkeypatch.setattr(moments, "ERROR", 0.0)


def features(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    rng = RNG(seed)
    return rng.normal(size=(rows, columns)) @ rng.normal(size=(columns, columns)) + 3


def assert_those_of(found: Moments, x: np.ndarray) -> None:
    assert found.count == len(x)
    np.testing.assert_allclose(found.mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(x.T), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(
        found.root.T @ found.root, np.cov(x.T) * (len(x) - 1), rtol=1e-11, atol=1e-11
    )


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("cuts", [(0, 100), (0, 1, 2, 50, 100), (0, 30, 31, 99, 100)])
def test_batches_change_nothing(cuts: tuple[int, ...]) -> None:
    x = features(100, 4)
    found = Moments()
    for start, stop in pairwise(cuts):
        assert found.update(x[start:stop]) is found
    assert_those_of(found, x)


@pytest.mark.usefixtures("short_blocks")
def test_merged_in_any_order() -> None:
    x = features(90, 4)
    parts = [Moments().update(x[k : k + 30]) for k in (0, 30, 60)]
    first, second, third = parts
    for merged in (first.merge(second).merge(third), third.merge(first.merge(second))):
        assert_those_of(merged, x)
    assert_those_of(first, x[:30])
    assert_those_of(first.merge(Moments()), x[:30])
    assert_those_of(Moments().merge(first), x[:30])
    # what was merged goes on by itself
    merged = first.merge(second)
    merged.update(x[60:])
    assert_those_of(merged, x)
    assert_those_of(first, x[:30])


def way(found: Moments) -> str:
    if found._scatter is None:
        return "orthogonal"
    return "products" if found._axes is None else "coordinates"


def test_the_way_that_keeps_small_directions_is_taken(monkeypatch) -> None:
    monkeypatch.setattr(moments, "FIRST", 8)
    monkeypatch.setattr(moments, "LATER", 16)
    x = features(200, 4)
    thin = x * np.array([1, 1, 1, 1e-9])
    plain, coordinates = Moments().update(x), Moments().update(thin)
    assert way(plain) == "products" and way(coordinates) == "coordinates"
    assert_those_of(plain, x)
    assert_those_of(coordinates, thin)
    # a later block that dwarfs what was: small directions would drown
    more = 1e9 * features(32, 4, 1)
    for found, before in ((plain, x), (coordinates, thin)):
        both = np.concatenate([before, more])
        found.update(more)
        assert way(found) == "orthogonal"
        np.testing.assert_allclose(found.covariance, np.cov(both.T), rtol=1e-10)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("first", [200, 16])
def test_directions_that_are_not_there(first: int) -> None:
    """A column of zeros, one of a constant, one that is the sum of two others; then some move."""
    rng = RNG(3)
    x = rng.normal(size=(200, 5))
    x[:first, 0], x[:first, 2] = 0, 7
    x[:, 4] = x[:, 1] + x[:, 3]
    found = Moments().update(x)
    np.testing.assert_allclose(found.covariance, np.cov(x.T), rtol=1e-12, atol=1e-13)
    rank = 2 if first == 200 else 4
    values = torch.linalg.svdvals(found.root)
    assert float(values[rank]) < 1e-13 * float(values[0]) < float(values[rank - 1])


@pytest.mark.usefixtures("short_blocks")
def test_small_directions_survive() -> None:
    """A deviation of 1e-12 beside one of 1, along turned axes: lost in any covariance."""
    rng = RNG(1)
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    x = rng.normal(size=(300, 3))
    white = np.linalg.qr(x - x.mean(0))[0]
    found = Moments().update(white * np.array([1, 1e-4, 1e-12]) @ turn)
    values = torch.linalg.svdvals(found.root)
    assert float(values[2]) == pytest.approx(1e-12, rel=1e-2)
    assert float(values[1]) == pytest.approx(1e-4, rel=1e-11)


def test_pickled_and_gathered() -> None:
    x = features(40, 3)
    found = pickle.loads(pickle.dumps(Moments(3).update(x[:20])))
    assert_those_of(found.update(torch.from_numpy(x[20:])), x)


def test_a_batch_may_be_filled_anew() -> None:
    x = features(20, 3)
    batch, found = np.empty((5, 3)), Moments()
    for k in range(0, 20, 5):
        batch[:] = x[k : k + 5]
        found.update(batch)
    assert_those_of(found, x)


def test_float32_is_widened_before_it_is_added_up() -> None:
    x = (features(50, 3) + 1e4).astype(np.float32)
    assert_those_of(Moments().update(x), x.astype(np.float64))


def test_of_a_published_covariance() -> None:
    x, y = features(60, 4), features(50, 4, 1) + 1
    found = Moments.from_covariance(x.mean(0), np.cov(x.T), 60)
    assert_those_of(found, x)
    wanted = frechet_distance(x, y)
    assert frechet_distance(found, y) == pytest.approx(wanted, rel=1e-12)
    assert frechet_distance(y, found) == pytest.approx(wanted, rel=1e-12)
    more = Moments.from_covariance(x.mean(0), np.cov(x.T), 60).update(y)
    assert_those_of(more, np.concatenate([x, y]))
    # of rank 1: the rounding of its zeros is taken for zeros
    flat = np.outer([1, 2, 3], [1, 2, 3]) * 1.0
    one = Moments.from_covariance(np.zeros(3), flat, 10)
    assert frechet_distance(one, Moments.from_covariance(np.zeros(3), 4 * flat, 10)) == (
        pytest.approx(14, rel=1e-13)
    )


@pytest.mark.parametrize(
    ("mean", "covariance", "count", "message"),
    [
        (np.zeros(2), np.eye(3), 5, r"mean must have shape \(3,\)"),
        (np.zeros(()), np.eye(1), 5, r"mean must have shape \(1,\) .* got \(\)"),
        (np.zeros(2), np.ones((2, 3)), 5, r"covariance must have shape \(D, D\)"),
        (np.zeros(2), np.array([[1, 2], [0, 1.0]]), 5, "covariance must be symmetric"),
        (np.zeros(2), np.diag([1, -0.1]), 5, "no negative eigenvalue, got -0.1"),
        (np.zeros(2), np.eye(2), 1, "count must be at least 2"),
        (np.full(2, np.nan), np.eye(2), 5, "mean must be finite"),
        (np.zeros(2), np.full((2, 2), np.inf), 5, "covariance must be finite"),
    ],
)
def test_refuses_what_is_no_covariance(mean, covariance, count, message) -> None:
    with pytest.raises(ValueError, match=message):
        Moments.from_covariance(mean, covariance, count)


def test_refuses() -> None:
    found = Moments(3)
    with pytest.raises(TypeError, match="mean must be a tensor or array of real numbers, got list"):
        Moments.from_covariance([0.0, 0.0], np.eye(2), 5)
    with pytest.raises(ValueError, match="dim must be at least 1"):
        Moments(0)
    with pytest.raises(ValueError, match=r"features must have shape \(N, 3\), got \(5, 2\)"):
        found.update(np.zeros((5, 2)))
    with pytest.raises(ValueError, match="features must be finite"):
        found.update(np.full((5, 3), np.nan))
    with pytest.raises(TypeError, match="features must be a tensor"):
        found.update([[1.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match="hold no rows"):
        _ = found.mean
    with pytest.raises(ValueError, match="at least 2 rows, got 1"):
        _ = found.update(np.zeros((1, 3))).covariance
    with pytest.raises(ValueError, match="same number of columns, got 3 and 2"):
        found.merge(Moments().update(np.zeros((4, 2))))
