from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.neighbors import NearestNeighbors

from fluvial.metrics import density_coverage, neighbours, precision_recall

RNG = np.random.default_rng


def pair(columns: int = 3, rows: tuple[int, int] = (40, 33)) -> tuple[np.ndarray, np.ndarray]:
    rng = RNG(columns)
    return rng.normal(size=(rows[0], columns)) * 0.8 + 0.3, rng.normal(size=(rows[1], columns))


def balls(x: np.ndarray, k: int) -> np.ndarray:
    """Radii by scikit-learn; the first neighbour of a row of the set is itself."""
    return NearestNeighbors(n_neighbors=k + 1).fit(x).kneighbors(x)[0][:, k]


@pytest.mark.parametrize("memory", [2**20, 4000, 64])
@pytest.mark.parametrize("columns", [3, 30])  # differences one by one, and by products
def test_by_definition_with_the_neighbours_of_scikit_learn(columns: int, memory: int) -> None:
    samples, real = pair(columns, (40, 33) if memory > 64 else (9, 8))
    for k in (1, 4):
        distance = cdist(samples, real)
        inside_real = distance <= balls(real, k)
        inside_samples = balls(samples, k) >= distance.T
        found = precision_recall(samples, real, k=k, memory=memory)
        assert found == (inside_real.any(1).mean(), inside_samples.any(1).mean())
        found = density_coverage(samples, real, k=k, memory=memory)
        assert found.density == pytest.approx(inside_real.sum() / (k * len(samples)), rel=1e-12)
        assert found.coverage == inside_real.any(0).mean()


def test_the_real_rows_themselves() -> None:
    """A row lies in its own ball and its k nearest others lie on or within it."""
    for columns in (3, 30):
        _, real = pair(columns)
        assert precision_recall(real, real) == (1, 1)
        assert density_coverage(real, real[::-1], k=5) == (pytest.approx(6 / 5), 1)


def test_samples_far_away() -> None:
    samples, real = pair()
    assert precision_recall(samples + 100, real) == (0, 0)
    assert density_coverage(samples + 100, real) == (0, 0)
    # half of them: of the samples, and of the real rows
    both = np.concatenate([samples + 100, real[:20]])
    assert precision_recall(both, real).precision == 20 / 60
    assert precision_recall(real[:20], np.concatenate([real[:20], real[:20] + 100])).recall == 0.5


def test_a_mode_that_is_missing_shows_in_recall_and_coverage() -> None:
    rng = RNG(0)
    real = rng.normal(size=(200, 2)) + 50 * (np.arange(200) % 2)[:, None]
    samples = rng.normal(size=(200, 2))
    precision, recall = precision_recall(samples, real)
    density, coverage = density_coverage(samples, real)
    assert precision > 0.85 and recall <= 0.5
    assert coverage <= 0.5
    assert density == pytest.approx(1, abs=0.2)  # twice the samples in half of the balls


def test_one_far_row_makes_a_large_ball() -> None:
    """Why density and coverage are there."""
    rng = RNG(1)
    real = np.concatenate([rng.normal(size=(99, 2)), [[1000.0, 0]]])
    samples = rng.normal(size=(100, 2)) + np.array([500.0, 0])
    assert precision_recall(samples, real).precision == 1
    density, coverage = density_coverage(samples, real)
    assert density < 0.21 and coverage == 0.01


@pytest.mark.parametrize(("count", "others"), [(30, 30), (20, 40)])
def test_coverage_and_density_of_samples_of_the_real_law(count: int, others: int) -> None:
    """Their means are known for any continuous law."""
    rng, k, repeats = RNG(2), 3, 150
    values = np.array(
        [
            density_coverage(rng.normal(size=(count, 2)), rng.normal(size=(others, 2)), k=k)
            for _ in range(repeats)
        ]
    )
    wanted = 1 - math.prod((others - 1 - i) / (count + others - 1 - i) for i in range(k))
    error = values.std(0) / math.sqrt(repeats)
    assert abs(values[:, 1].mean() - wanted) < 4 * error[1]
    assert abs(values[:, 0].mean() - 1) < 4 * error[0]


def test_equal_distances_lie_inside() -> None:
    """Corners of a cube, turned: a corner's 3 neighbours are all as far, but for rounding."""
    corners = np.stack(np.meshgrid(*[[0.0, 1.0]] * 3), -1).reshape(8, 3)
    turn = np.linalg.qr(RNG(0).normal(size=(40, 40)))[0][:3]
    for real in (corners, corners @ turn + 3):
        for k in (1, 2, 3):
            assert density_coverage(real, real, k=k).density == pytest.approx(4 / k)


def test_all_pairs_are_never_in_memory(monkeypatch) -> None:
    sizes = []
    original = neighbours.squared_distances

    def recorded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        squares = original(x, y)
        sizes.append(squares.numel() * squares.element_size())
        return squares

    monkeypatch.setattr(neighbours, "squared_distances", recorded)
    samples, real = pair(20, (300, 200))
    limited = precision_recall(samples, real, memory=100_000)
    assert max(sizes) <= 20_000 and sum(sizes) == 8 * (300**2 + 200**2 + 2 * 300 * 200)
    assert limited == precision_recall(samples, real)


@pytest.mark.parametrize("metric", [precision_recall, density_coverage])
def test_refuses(metric) -> None:
    samples, real = pair()
    for bad, error, message in (
        (real[:3], ValueError, "samples must have shape .* with N at least 4"),
        (real[0], ValueError, "samples must have shape"),
        (real * np.nan, ValueError, "samples must be finite"),
        (real.tolist(), TypeError, "samples must be a tensor"),
    ):
        with pytest.raises(error, match=message):
            metric(bad, real, k=3)
        with pytest.raises(error, match=message.replace("samples", "real")):
            metric(samples, bad, k=3)
    with pytest.raises(ValueError, match="k must be at least 1"):
        metric(samples, real, k=0)
    with pytest.raises(ValueError, match="samples and real must have the same number of columns"):
        metric(samples, real[:, :2])
    with pytest.raises(ValueError, match="memory must be at least 64 bytes"):
        metric(samples, real, memory=63)
