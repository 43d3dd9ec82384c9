"""Laws of times, and grids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.core.time import LogitNormal, Uniform, check_pairs, grid_pairs, uniform_grid

from .toys import ALARM, Constant

NOISE = KeyedNoise(5)
N = 20_000


@pytest.mark.parametrize(
    ("times", "law"),
    [
        (Uniform(), stats.uniform()),
        (Uniform(0.2, 0.5), stats.uniform(0.2, 0.3)),
        (LogitNormal(), stats.norm()),
        (LogitNormal(-0.4, 1.3), stats.norm(-0.4, 1.3)),
    ],
)
def test_laws(times: Any, law: Any) -> None:
    t = times(torch.empty(N, 2, 3, dtype=torch.float64), NOISE)
    assert t.shape == (N,) and (t >= 0).all() and (t <= 1).all()
    sample = torch.logit(t) if isinstance(times, LogitNormal) else t
    assert stats.kstest(sample.numpy(), law.cdf).pvalue > ALARM


@pytest.mark.parametrize("times", [Uniform(0.1, 0.9), LogitNormal()])
def test_times_are_keyed(times: Any) -> None:
    for dtype in (torch.float32, torch.float64):
        like = torch.empty(8, 2, dtype=dtype)
        t = times(like, NOISE)
        assert t.dtype == dtype
        assert torch.equal(times(like, NOISE), t)
        ids = torch.tensor([5, 2])
        # A sigmoid of a vector and one of its rest may differ in the last bit.
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(times(like[:2], NOISE.rows(ids)), t[ids], rtol=eps, atol=0)
        assert not (times(like, NOISE, "other") == t).any()
        assert not (times(like, NOISE.at(1)) == t).any()


def test_formulas() -> None:
    like = torch.empty(3, dtype=torch.float64)
    assert Uniform(0.2, 0.6)(like, Constant(0.25)).tolist() == pytest.approx([0.3] * 3)
    exact = 1 / (1 + math.exp(-(2 * 0.7 - 0.4)))
    assert LogitNormal(-0.4, 2.0)(like, Constant(0.7)).tolist() == pytest.approx([exact] * 3)


@pytest.mark.parametrize(
    ("law", "arguments"),
    [
        (Uniform, (-0.1, 0.5)),
        (Uniform, (0.5, 0.5)),
        (Uniform, (0.6, 0.5)),
        (Uniform, (0.5, 1.1)),
        (Uniform, (math.nan, 1.0)),
        (Uniform, (0.0, math.nan)),
        (LogitNormal, (0.0, 0.0)),
        (LogitNormal, (0.0, -1.0)),
        (LogitNormal, (0.0, math.nan)),
        (LogitNormal, (0.0, math.inf)),
        (LogitNormal, (math.nan, 1.0)),
        (LogitNormal, (math.inf, 1.0)),
    ],
)
def test_bad_laws(law: Any, arguments: tuple[float, float]) -> None:
    with pytest.raises(ValueError):
        law(*arguments)


def test_uniform_grid() -> None:
    pairs = uniform_grid(4)
    assert pairs.dtype == torch.float64
    assert pairs.tolist() == [[1.0, 0.75], [0.75, 0.5], [0.5, 0.25], [0.25, 0.0]]
    assert uniform_grid(2, 0.0, 1.0).tolist() == [[0.0, 0.5], [0.5, 1.0]]
    assert uniform_grid(2, 0.3, 0.3).tolist() == [[0.3, 0.3]] * 2
    for steps in (1, 3, 7, 1000):
        grid = uniform_grid(steps)
        assert grid.shape == (steps, 2) and grid[0, 0] == 1 and grid[-1, 1] == 0
        check_pairs(grid)
    for steps in (0, -1):
        with pytest.raises(ValueError, match="steps"):
            uniform_grid(steps)
    for start, end in ((1.1, 0.0), (1.0, -0.1), (math.nan, 0.0)):
        with pytest.raises(ValueError):
            uniform_grid(3, start, end)


def test_grid_pairs() -> None:
    exact = [[1.0, 0.5], [0.5, 0.75], [0.75, 0.75]]
    times = [1.0, 0.5, 0.75, 0.75]
    for given in (times, tuple(times), torch.tensor(times), torch.tensor(times).double()):
        pairs = grid_pairs(given)
        assert pairs.dtype == torch.float64 and pairs.tolist() == exact
    assert grid_pairs([1, 0]).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    "times", [[], [1.0], torch.ones(2, 2), [1.0, math.nan], [1.0, -0.5], [2.0, 1.0], [math.inf, 0]]
)
def test_bad_times(times: Any) -> None:
    with pytest.raises(ValueError):
        grid_pairs(times)


@pytest.mark.parametrize(
    "pairs",
    [torch.tensor([[1, 0]]), torch.tensor([[1.0, 0.3], [0.3, 0.3]]), torch.ones(1, 2)],
)
def test_good_pairs(pairs: Tensor) -> None:
    check_pairs(pairs)
