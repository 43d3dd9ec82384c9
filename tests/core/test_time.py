"""Laws of times, and grids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from fluvial.core.gaussian.levels import LogNormalSigma, time_of_level
from fluvial.core.gaussian.paths import VE, AlphaSigmaPath, Linear, VPCosine, VPLinear
from fluvial.core.noise import KeyedNoise
from fluvial.core.time import (
    LogitNormal,
    Stratified,
    Uniform,
    check_pairs,
    grid_pairs,
    uniform_grid,
)

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
        (LogNormalSigma(Linear(), -0.4, 1.3), stats.norm(-0.4, 1.3)),
    ],
)
def test_laws(times: Any, law: Any) -> None:
    t = times(torch.empty(N, 2, 3, dtype=torch.float64), NOISE)
    assert t.shape == (N,) and (t >= 0).all() and (t <= 1).all()
    sample = t if isinstance(times, Uniform) else torch.logit(t)
    assert stats.kstest(sample.numpy(), law.cdf).pvalue > ALARM


@pytest.mark.parametrize("times", [Uniform(0.1, 0.9), LogitNormal(), LogNormalSigma(VPCosine())])
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
        (LogNormalSigma, (Linear(), math.nan)),
        (LogNormalSigma, (Linear(), 0.0, 0.0)),
    ],
)
def test_bad_laws(law: Any, arguments: tuple[float, float]) -> None:
    with pytest.raises(ValueError):
        law(*arguments)


# Levels


PATHS = [Linear(), VPLinear(), VPCosine(), VE()]


def name(path: Any) -> str:
    return type(path).__name__


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_time_of_level(path: AlphaSigmaPath) -> None:
    t = torch.tensor([1e-9, 1e-6, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0], dtype=torch.float64)
    level = path.sigma(t) / path.alpha(t)
    torch.testing.assert_close(time_of_level(path, level), t, rtol=1e-9, atol=1e-14)
    assert time_of_level(path, torch.tensor(1e30)).item() == 1
    assert time_of_level(path, level.float().reshape(2, 4)).shape == (2, 4)
    assert time_of_level(path, level.float()).dtype == torch.float32


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_law_of_levels(path: AlphaSigmaPath) -> None:
    t = LogNormalSigma(path)(torch.empty(N, 1, dtype=torch.float64), NOISE)
    level = (path.sigma(t) / path.alpha(t)).log()
    normal = -1.2 + 1.2 * NOISE.normal(torch.empty(N, dtype=torch.float64), "time")
    torch.testing.assert_close(level, normal, rtol=1e-6, atol=1e-6)


def test_levels_of_the_linear_path_are_logit_normal() -> None:
    like = torch.empty(100, 2, dtype=torch.float64)
    times = LogNormalSigma(Linear(), -0.7, 1.1)(like, NOISE)
    torch.testing.assert_close(times, LogitNormal(-0.7, 1.1)(like, NOISE), rtol=1e-12, atol=0)


# Even times


LAWS = [Uniform(0.1, 0.7), LogitNormal(-0.4, 1.3), LogNormalSigma(VPLinear())]


@pytest.mark.parametrize("law", LAWS, ids=name)
def test_quantiles_belong_to_the_laws(law: Any) -> None:
    t = law(torch.empty(N, dtype=torch.float64), NOISE)
    u = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    share = (t[:, None] <= law.quantile(u)).double().mean(0)
    assert ((share - u).abs() < stats.kstwo.isf(ALARM, N)).all()
    assert (law.quantile(u).diff() > 0).all()


@pytest.mark.parametrize("rows", [torch.arange(100), torch.arange(37, 137)])
def test_even_times_cover_evenly(rows: Tensor) -> None:
    """Gaps of a rotation by the golden ratio take three lengths, of at most phi^2 to 1."""
    t = Stratified()(torch.empty(100, dtype=torch.float64), NOISE.rows(rows)).sort().values
    gaps = torch.cat([t, t[:1] + 1]).diff()
    assert gaps.max() < 2 / 100 and gaps.min() > 0.5 / 100
    assert len(torch.unique((gaps * 1e9).round())) <= 3


def test_each_even_time_has_the_law() -> None:
    like = torch.empty(3, dtype=torch.float64)
    t = torch.stack([Stratified()(like, NOISE.at(step)) for step in range(1000)])
    for row in t.T:
        assert stats.kstest(row.numpy(), "uniform").pvalue > ALARM
    for law in LAWS:
        assert torch.equal(Stratified(law)(like, NOISE), law.quantile(Stratified()(like, NOISE)))


def test_even_times_lower_the_variance_of_a_mean() -> None:
    like = torch.empty(64, dtype=torch.float64)
    means = [
        torch.stack([times(like, NOISE.at(step)).square().mean() for step in range(200)])
        for times in (Uniform(), Stratified())
    ]
    assert means[1].std() < means[0].std() / 4


def test_even_times_are_keyed() -> None:
    times, like = Stratified(LogitNormal()), torch.empty(8, 2)
    t = times(like, NOISE)
    assert t.shape == (8,) and t.dtype == torch.float32
    ids = torch.tensor([5, 2])
    torch.testing.assert_close(times(like[:2], NOISE.rows(ids)), t[ids], rtol=1e-6, atol=0)
    assert not (times(like, NOISE.at(1)) == t).any() and not (times(like, NOISE, "b") == t).any()
    with pytest.raises(TypeError, match="needs a KeyedNoise, got Constant"):
        times(like, Constant(0.5))
    with pytest.raises(ValueError, match="2 row ids for a batch of 8"):
        times(like, NOISE.rows(ids))


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


def test_pairs_that_are_no_tensor() -> None:
    with pytest.raises(TypeError, match="pairs must be a tensor, got list; see grid_pairs"):
        check_pairs([(1.0, 0.0)])  # type: ignore[arg-type]
