"""Feynman-Kac particles, where the tilted law is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from fluvial.core.gaussian.paths import AlphaSigmaPath, VPLinear
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Run
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.steering.particles import FeynmanKac
from fluvial.core.time import uniform_grid

from .toys import (
    ALARM,
    AbsorbingTokens,
    Constant,
    Remember,
    TokenField,
    VectorGaussian,
    token_state,
)

NOISE = KeyedNoise(3)
PATH = VPLinear(0.1, 12.0)
POTENTIALS = ["difference", "max", "sum"]


def assert_mean(groups: Tensor, exact: float, bias: float = 0.0) -> None:
    """Independent means of groups (n,) have this expectation, up to ``bias``."""
    n = len(groups)
    t = float(stats.t.isf(ALARM / 2, n - 1))
    assert abs(float(groups.mean()) - exact) < t * float(groups.std()) / math.sqrt(n) + bias


# A Gaussian tilted by a quadratic reward


TOY = VectorGaussian(
    PATH, torch.tensor([0.5], dtype=torch.float64), torch.tensor([0.8], dtype=torch.float64)
)


def ancestral_moments(pairs: Tensor) -> tuple[float, float]:
    """Mean and variance of what `Ancestral` makes of the source: x_s = a x + b + c eps."""
    mean, var = 0.0, float(PATH.sigma(torch.tensor(1.0).double())) ** 2
    x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for pair in pairs:
        low, high = simulate(x, pair[None], Ancestral(), PATH, TOY, Constant(0.0))[:, 0].tolist()
        noisy = float(simulate(x, pair[None], Ancestral(), PATH, TOY, Constant(1.0))[0, 0])
        mean, var = low + (high - low) * mean, (high - low) ** 2 * var + (noisy - low) ** 2
    return mean, var


def quadratic(x: Tensor, **cond: Any) -> Tensor:
    return -(x[:, 0] - 1.5).square()


def tilted(pairs: Tensor, scale: float) -> tuple[float, float]:
    mean, var = ancestral_moments(pairs)
    precision = 1 / var + 2 * scale
    return (mean / var + 2 * scale * 1.5) / precision, 1 / precision


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        *((20, {"resampling": kind}) for kind in ("systematic", "multinomial")),
        *((20, {"threshold": share}) for share in (0.0, 1.0)),
        *((5, {"potential": kind, "threshold": 1.0}) for kind in POTENTIALS),
        *((5, {"potential": kind, "threshold": 0.3}) for kind in ("max", "sum")),
    ],
)
def test_tilted_gaussian(steps: int, options: dict[str, Any]) -> None:
    """Mean and variance; particles of a group lean on each other, groups do not."""
    groups, size, scale, pairs = 30, 200, 1.0, uniform_grid(steps)
    start = PATH.source(torch.empty(groups * size, 1, dtype=torch.float64), NOISE)
    steer = FeynmanKac(quadratic, size, scale, **options)
    out = simulate(start, pairs, Ancestral(), PATH, TOY, NOISE, steer)
    x = out.reshape(groups, size)
    mean, var = tilted(pairs, scale)
    base, _ = ancestral_moments(pairs)
    assert mean - base > 0.3
    # the bias of normalised weights is of the order of 1 / size
    assert_mean(x.mean(1), mean, 2 / size)
    assert_mean((x - mean).square().mean(1), var, 2 / size)


def test_small_groups_lean_to_the_prior() -> None:
    """As the number of particles grows the law goes from the sampler's own to the tilted one."""
    pairs = uniform_grid(10)
    start = PATH.source(torch.empty(4096, 1, dtype=torch.float64), NOISE)
    base, goal = ancestral_moments(pairs)[0], tilted(pairs, 1.0)[0]
    means = [
        float(
            simulate(
                start, pairs, Ancestral(), PATH, TOY, NOISE, FeynmanKac(quadratic, size)
            ).mean()
        )
        for size in (2, 8, 64)
    ]
    assert base + 0.2 < means[0] < means[1] < means[2] < goal + 0.1


# Two points


class TwoPoints:
    """Data at -1 and 1, each with probability 1/2."""

    predicts = "clean"

    def __init__(self, path: AlphaSigmaPath) -> None:
        self.path = path

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return torch.tanh(self.path.alpha(t) / self.path.sigma(t).square() * x)


def sign(x: Tensor, **cond: Any) -> Tensor:
    return (x[:, 0] > 0).double()


@pytest.mark.parametrize("potential", POTENTIALS)
@pytest.mark.parametrize("resampling", ["systematic", "multinomial"])
def test_two_points(potential: Any, resampling: Any) -> None:
    """By symmetry the sampler's own law is even, so the tilted odds are e^scale."""
    groups, size, scale = 30, 200, math.log(3.0)
    start = PATH.source(torch.empty(groups * size, 1, dtype=torch.float64), NOISE)
    steer = FeynmanKac(sign, size, scale, potential, resampling)
    out = simulate(start, uniform_grid(6), Ancestral(), PATH, TwoPoints(PATH), NOISE, steer)
    assert_mean(sign(out).reshape(groups, size).mean(1), 0.75, 2 / size)


@pytest.mark.parametrize("resampling", ["systematic", "multinomial"])
def test_groups_of_two_by_enumeration(resampling: Any) -> None:
    """One step to 0: both 1 with chance 1/4, mixed with 1/2 and then 1 with weight 3/4: the mean
    share is 1/4 + 1/2 * 3/4, exactly."""
    n = 4000
    start = PATH.source(torch.empty(2 * n, 1, dtype=torch.float64), NOISE)
    steer = FeynmanKac(sign, 2, math.log(3.0), resampling=resampling)
    out = simulate(start, uniform_grid(1), Ancestral(), PATH, TwoPoints(PATH), NOISE, steer)
    assert_mean(sign(out).reshape(n, 2).mean(1), 0.625)


# Resampling


def resample(steer: FeynmanKac, weights: Tensor, noise: Any, last: bool = True) -> Any:
    return steer._resample(weights.log().flatten(), noise, last)


def test_systematic_counts() -> None:
    """Each particle is kept floor or ceil of size * weight times, with that mean."""
    size, n = 8, 600
    weights = torch.tensor([0.3, 0.02, 0.0, 0.18, 0.25, 0.05, 0.1, 0.1], dtype=torch.float64)
    steer = FeynmanKac(quadratic, size)
    rows, fresh = resample(steer, weights.repeat(n), NOISE)
    assert fresh.all()
    own = rows.reshape(n, size) - size * torch.arange(n)[:, None]
    assert ((own >= 0) & (own < size)).all() and (own.diff(dim=1) >= 0).all()
    counts = torch.nn.functional.one_hot(own, size).sum(1).double()
    share = size * weights
    assert ((counts >= share.floor()) & (counts <= share.ceil())).all()
    for k in range(size):
        assert stats.binomtest(
            int(counts[:, k].sum() - n * share[k].floor()), n, float(share[k] % 1)
        ).pvalue > ALARM  # fmt: skip


def test_multinomial_counts() -> None:
    size, n = 4, 1500
    weights = torch.tensor([0.5, 0.0, 0.2, 0.3], dtype=torch.float64)
    rows, _ = resample(
        FeynmanKac(quadratic, size, resampling="multinomial"), weights.repeat(n), NOISE
    )
    own = rows % size
    counts = torch.bincount(own, minlength=size).double()
    assert counts[1] == 0
    assert stats.chisquare(counts[[0, 2, 3]], weights[[0, 2, 3]] * n * size).pvalue > ALARM
    pairs = own.reshape(n, size)[:, :2]  # independent draws, unlike systematic ones
    same = int((pairs[:, 0] == pairs[:, 1]).sum())
    assert stats.binomtest(same, n, float(weights.square().sum())).pvalue > ALARM


@pytest.mark.parametrize("value", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("resampling", ["systematic", "multinomial"])
def test_rows_are_always_ones_that_have_weight(value: float, resampling: Any) -> None:
    weights = torch.tensor([0.0, 0.3, 0.7, 0.0], dtype=torch.float64)
    steer = FeynmanKac(quadratic, 4, resampling=resampling)
    rows, _ = resample(steer, weights.repeat(3), Constant(value))
    assert set((rows % 4).tolist()) <= {1, 2}


def test_threshold() -> None:
    """Sizes 4, 2.13 and 1: below the threshold times 4 rows are drawn, above they stay."""
    weights = torch.tensor([[1, 1, 1, 1], [4, 1, 1, 1], [1, 0, 0, 0]]).double()
    for threshold, expected in (
        (1.0, [True, True, True]),
        (0.7, [False, True, True]),
        (0.3, [False, False, True]),
        (0.0, [False, False, False]),
    ):
        steer = FeynmanKac(quadratic, 4, threshold=threshold)
        rows, fresh = resample(steer, weights, NOISE, last=False)
        assert fresh.reshape(3, 4).all(1).tolist() == expected
        assert fresh.reshape(3, 4).any(1).tolist() == expected
        stays = ~fresh
        assert torch.equal(rows[stays], torch.arange(12)[stays])
        assert resample(steer, weights, NOISE)[1].all()


def test_weights_are_kept_until_a_group_is_resampled() -> None:
    x = torch.tensor([[0.0], [1.0], [1.4], [1.5]], dtype=torch.float64)
    steer = FeynmanKac(quadratic, 2, scale=0.7, threshold=0.8)
    aim = steer.start(x)
    half, end = torch.tensor(0.5).double(), torch.tensor(0.0).double()
    run = Run(PATH, TOY, NOISE, 0, torch.tensor(1.0).double(), half, {}, steer, aim)
    moved, aim, kept = steer.after(x, x, aim, run)
    assert kept is not None and kept[2:].tolist() == [2, 3] and set(kept[:2].tolist()) <= {0, 1}
    assert torch.equal(moved, x[kept])  # type: ignore[index]
    reward = 0.7 * quadratic(x)
    weight = aim["total"] - aim["before"]
    torch.testing.assert_close(weight, torch.cat([0 * reward[:2], reward[2:]]))
    torch.testing.assert_close(aim["total"], reward[kept])
    moved, aim, kept = steer.after(x, x, aim, replace(run, s=end))
    assert torch.equal(aim["before"], aim["total"])
    torch.testing.assert_close(aim["total"], reward[kept])  # whatever came before


@pytest.mark.parametrize("potential", POTENTIALS)
def test_potentials(potential: Any) -> None:
    """On one particle's way: log G_k, and their sum at the end."""
    x = torch.zeros(2, 1, dtype=torch.float64)
    values = [0.5, -0.2, 0.9, 0.3, 0.1]
    given = iter(values)
    steer = FeynmanKac(
        lambda x: torch.full((2,), next(given), dtype=torch.float64), 2, 2.0, potential, threshold=0
    )
    aim, gains, before = steer.start(x), [], 0.0
    for k, s in enumerate([0.8, 0.6, 0.4, 0.2, 0.0]):
        s = torch.tensor(s).double()
        run = Run(PATH, TOY, NOISE, k, s + 0.1, s, {}, steer, aim)
        _, aim, _ = steer.after(x, x, aim, run)
        gains.append(float(aim["total"][0]) - before)
        before += gains[-1]
    exact = {
        "difference": [1.0, -1.4, 2.2, -1.2],
        "max": [1.0, 1.0, 1.8, 1.8],
        "sum": [1.0, 0.6, 2.4, 3.0],
    }[potential]
    assert gains[:4] == pytest.approx(exact) and sum(gains) == pytest.approx(2 * values[-1])


# In the loop


def zeros(x: Any, **cond: Any) -> Tensor:
    """Number of zeros among tokens, or its expectation under probabilities."""
    tokens = x["tokens"]
    return (tokens[..., 0] if tokens.is_floating_point() else (tokens == 0).double()).sum(1)


def test_tokens_whose_tilted_law_is_exact() -> None:
    """Independent tokens: zeros get the odds p e^scale. The sampler's memory follows its rows."""
    groups, size, scale = 30, 100, 0.8
    probs = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    state = token_state(groups * size, 3, 3)
    steer = FeynmanKac(zeros, size, scale, threshold=0.9)
    out = simulate(
        state, uniform_grid(8), Remember(), AbsorbingTokens(3), TokenField(probs), NOISE, steer
    )
    odds = float(probs[0] / (1 - probs[0])) * math.exp(scale)
    share = zeros(out).reshape(groups, size).mean(1) / 3
    assert_mean(share, odds / (1 + odds), 2 / size)


@pytest.mark.parametrize("resampling", ["systematic", "multinomial"])
def test_groups_do_not_depend_on_their_batch(resampling: Any) -> None:
    start = PATH.source(torch.empty(12, 1, dtype=torch.float64), NOISE)
    steer = FeynmanKac(quadratic, 4, resampling=resampling)

    def run(rows: Tensor) -> Tensor:
        return simulate(
            start[rows], uniform_grid(6), Ancestral(), PATH, TOY, NOISE.rows(rows), steer
        )

    whole = run(torch.arange(12))
    for rows in (torch.arange(4), torch.arange(4, 12)):
        torch.testing.assert_close(run(rows), whole[rows], rtol=1e-12, atol=1e-12)
    assert len(whole.unique()) < 12  # some were dropped
    for bad in (6, 0):
        with pytest.raises(ValueError, match=f"multiple of group=4, got {bad}"):
            run(torch.arange(bad))


def test_best_of_every_group() -> None:
    start = PATH.source(torch.empty(12, 1, dtype=torch.float64), NOISE)
    everyone, best = (
        simulate(
            start, uniform_grid(6), Ancestral(), PATH, TOY, NOISE,
            FeynmanKac(quadratic, 4, best=choice),
        )
        for choice in (False, True)
    )  # fmt: skip
    assert best.shape == (3, 1)
    rewards = quadratic(everyone).reshape(3, 4)
    assert torch.equal(quadratic(best), rewards.max(1).values)


@pytest.mark.parametrize("resampling", ["systematic", "multinomial"])
def test_no_step_reads_a_value(resampling: Any) -> None:
    """Tensors on the meta device have none: on an accelerator, reading one would be a wait."""
    steer = FeynmanKac(quadratic, 4, resampling=resampling, best=True)
    x = torch.empty(8, 1, device="meta")
    out = simulate(x, uniform_grid(3), Ancestral(), PATH, TwoPoints(PATH), NOISE, steer)
    assert out.shape == (2, 1) and out.device.type == "meta"


def test_dtype_and_conditions() -> None:
    seen = []

    def reward(x: Tensor, *, label: int) -> Tensor:
        seen.append((x.dtype, label))
        return quadratic(x)

    start = PATH.source(torch.empty(4, 1), NOISE)
    steer = FeynmanKac(reward, 2)
    out = simulate(start, uniform_grid(3), Ancestral(), PATH, TOY, NOISE, steer, label=7)
    assert out.dtype == torch.float32 and seen == [(torch.float32, 7)] * 3


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"group": 1}, "group >= 2"),
        ({"group": 2.5}, "group >= 2"),
        ({"scale": math.nan}, "finite scale"),
        ({"threshold": 1.5}, "threshold in"),
        ({"threshold": math.nan}, "threshold in"),
        ({"potential": "min"}, "potential must be"),
        ({"resampling": "residual"}, "resampling must be"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        FeynmanKac(quadratic, **{"group": 4, **arguments})


@pytest.mark.parametrize(
    ("reward", "error", "match"),
    [
        (lambda x: x, ValueError, r"reward must be \(4,\), got \(4, 1\)"),
        (lambda x: x[:, 0].tolist(), TypeError, "reward must give a tensor, got list"),
        (lambda x: x[:, 0] * math.nan, ValueError, "reward must be finite, or -inf to forbid"),
        (lambda x: x[:, 0] + math.inf, ValueError, "reward must be finite, or -inf to forbid"),
    ],
)
def test_bad_rewards(reward: Any, error: Any, match: str) -> None:
    start = torch.zeros(4, 1, dtype=torch.float64)
    with pytest.raises(error, match=match):
        steer = FeynmanKac(reward, 2)
        simulate(start, uniform_grid(2), Ancestral(), PATH, TOY, NOISE, steer)


@pytest.mark.parametrize("potential", POTENTIALS)
@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_what_is_forbidden(potential: Any, threshold: float) -> None:
    """exp(-inf) is 0: no such particle comes out of a group that has others; and none of another
    group takes its place where a group has no others."""
    start = PATH.source(torch.empty(80, 1, dtype=torch.float64), NOISE)
    start[:4] = -50  # from where no particle comes back

    def reward(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] > 0, 0.1 * x[:, 0], -math.inf)

    steer = FeynmanKac(reward, 4, 1.0, potential, threshold=threshold)
    path, field = Straight(), Straight()
    out = simulate(start, uniform_grid(4), Ancestral(), path, field, NOISE, steer)
    groups, before = out.reshape(20, 4), start.reshape(20, 4)
    mixed = (before > 0).any(1)
    assert (groups[mixed] > 0).all() and mixed.sum() > 10
    assert torch.equal(groups[~mixed], before[~mixed]) and (~mixed).any()


class Straight:
    """A path and its field on which nothing moves."""

    predicts = "clean"

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return x

    def posterior(self, x: Tensor, clean: Tensor, t: Tensor, s: Tensor, noise: Any) -> Tensor:
        return x

    def readout(self, x: Tensor, clean: Tensor) -> Tensor:
        return x
