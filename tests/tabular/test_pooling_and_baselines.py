"""Rubin's rules against their closed forms, and what MIRI is compared with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_wine

from fluvial.core.noise import KeyedNoise
from fluvial.tabular import ampute, pool
from fluvial.tabular.baselines import (
    BASELINES,
    DRAWING,
    GAIN,
    MIWAE,
    SETTINGS,
    TDM,
    KnewImp,
    TabCSDI,
    crps,
    draws,
    tune,
)


def test_rubins_rules_by_hand() -> None:
    pooled = pool([1.0, 2.0, 4.0, 5.0], [0.5, 0.5, 1.0, 2.0])
    assert pooled.estimate == 3 and pooled.within == 1 and pooled.m == 4
    assert pooled.between == pytest.approx(10 / 3)
    assert pooled.variance == pytest.approx(1 + 1.25 * 10 / 3)
    r = 1.25 * 10 / 3
    nu = 3 * (1 + 1 / r) ** 2
    assert pooled.df == pytest.approx(nu)
    assert pooled.missing_information == pytest.approx((r + 2 / (nu + 3)) / (r + 1))
    low, high = pooled.interval(0.9)
    assert high - 3 == pytest.approx(stats.t.ppf(0.95, nu) * math.sqrt(1 + r))
    assert low + high == pytest.approx(6)
    small = pool([1.0, 2.0, 4.0, 5.0], [0.5, 0.5, 1.0, 2.0], complete_df=20)
    share = r / (1 + r)
    own = 21 / 23 * 20 * (1 - share)
    assert small.df == pytest.approx(1 / (1 / nu + 1 / own)) and small.df < nu


def test_fillings_that_agree_cost_nothing() -> None:
    pooled = pool(np.full((3, 2), 4.0), np.full((3, 2), 0.25))
    assert (pooled.variance == 0.25).all() and np.isinf(pooled.df).all()
    assert pooled.missing_information.tolist() == [0, 0]
    low, high = pooled.interval()
    assert high - low == pytest.approx(2 * stats.norm.ppf(0.975) * 0.5)
    assert pool([1.0, 1.0], [1.0, 1.0], complete_df=9).df == pytest.approx(10 / 12 * 9)
    assert pool([1.0, 2.0], [0.0, 0.0]).missing_information == 1


def test_pooled_intervals_cover() -> None:
    # the mean of n numbers of which k are missing and drawn anew, rightly, given the others
    n, k, m, trials = 40, 16, 5, 400
    noise = KeyedNoise(3)
    like = torch.empty(trials, n - k, dtype=torch.float64)
    seen = noise.normal(like, "seen").numpy()
    drawn = noise.normal(torch.empty(trials, m, k + n, dtype=torch.float64), "drawn").numpy()
    hits = []
    for t in range(trials):
        s = seen[t]
        estimates, variances = [], []
        for j in range(m):
            # a proper draw: mean and variance from their posterior, then the missing numbers
            u = drawn[t, j]
            variance = ((s - s.mean()) ** 2).sum() / (u[: n - k - 1] ** 2).sum()
            mean = s.mean() + u[n - k - 1] * math.sqrt(variance / (n - k))
            full = np.concatenate([s, mean + math.sqrt(variance) * u[n - k : n]])
            estimates.append(full.mean())
            variances.append(full.var(ddof=1) / n)
        low, high = pool(estimates, variances, complete_df=n - 1).interval()
        hits.append(low < 0 < high)
    # 95 %, and four binomial deviations of 400 trials
    assert abs(np.mean(hits) - 0.95) < 4 * math.sqrt(0.95 * 0.05 / trials)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [1.0]), "m at least 2"),
        (([1.0, 2.0], [1.0]), "one shape"),
        (([1.0, np.nan], [1.0, 1.0]), "finite"),
        (([1.0, 2.0], [1.0, -1.0]), "at least 0"),
    ],
)
def test_bad_estimates(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pool(*arguments)
    with pytest.raises(ValueError, match="complete_df must be positive"):
        pool([1.0, 2.0], [1.0, 1.0], complete_df=0)
    with pytest.raises(ValueError, match="level must lie"):
        pool([1.0, 2.0], [1.0, 1.0]).interval(1.0)


# Baselines

QUICK: dict[str, dict[str, Any]] = {
    "MissForest": {"trees": 3, "iterations": 1},
    "IterativeImputer": {"iterations": 2},
    "IterativeImputer, posterior": {"iterations": 2},
    "GAIN": {"steps": 10},
    "MIWAE": {"steps": 5, "hidden": 8, "samples": 3, "importance": 5},
    "TabCSDI": {"steps": 5, "levels": 4, "width": 8, "blocks": 1},
    "TDM": {"steps": 5},
    "KnewImp": {"steps": 3, "epochs": 3},
    "MIRI": {"rounds": 1, "epochs": 2, "ode_steps": 3, "hidden": (8,)},
}


@pytest.mark.parametrize("name", BASELINES)
def test_every_way_to_fill_keeps_what_is_observed(name: str) -> None:
    x = ampute(load_wine().data, 0.3, seed=1).data
    seen = ~np.isnan(x)
    imputer = BASELINES[name](0, **QUICK.get(name, {}))
    filled = imputer.fit_transform(x)
    assert filled.shape == x.shape and np.isfinite(filled).all()
    assert (filled[seen] == x[seen]).all()
    assert np.allclose(filled, BASELINES[name](0, **QUICK.get(name, {})).fit_transform(x))
    assert np.isfinite(imputer.transform(x[:5])).all()
    for setting in SETTINGS[name]:
        BASELINES[name](0, **setting)
    assert len(SETTINGS[name]) == 3


def test_gain_learns_a_line() -> None:
    z = KeyedNoise(0).normal(torch.empty(600, 2, dtype=torch.float64)).numpy()
    x = np.column_stack([z[:, 0], 2 * z[:, 0] + 0.1 * z[:, 1], z[:, 0]])
    made = ampute(x, 0.2, seed=2)
    filled = GAIN(steps=300, lr=1e-2, random_state=0).fit_transform(made.data)
    error = (filled - x)[~made.mask].std() / x[~made.mask].std()
    assert error < 0.8  # the mean has 1
    hollow = made.data.copy()
    hollow[:, 1] = np.nan
    with pytest.raises(ValueError, match="column 1 of X has no value"):
        GAIN(steps=1).fit(hollow)


DEEP: dict[str, Any] = {
    "MIWAE": MIWAE(steps=200, hidden=32, samples=5, latent=2, importance=50, lr=3e-3),
    "TabCSDI": TabCSDI(steps=300, levels=20, width=32, blocks=1, lr=2e-3),
    "TDM": TDM(steps=400, lr=0.03, blocks=1, batch_size=64),
    "KnewImp": KnewImp(steps=60, epochs=60, bandwidth=0.5),
}


@pytest.mark.parametrize("name", DEEP)
def test_networks_learn_a_gaussians_conditional(name: str) -> None:
    # of correlation 0.95: a draw has an error of 0.44, a conditional mean 0.31, the mean 1
    z = KeyedNoise(3).normal(torch.empty(400, 2, dtype=torch.float64)).numpy()
    x = np.column_stack([z[:, 0], 0.95 * z[:, 0] + math.sqrt(1 - 0.95**2) * z[:, 1]])
    made = ampute(x, 0.3, seed=4)
    made.data[made.mask.sum(1) == 0, 0] = x[made.mask.sum(1) == 0, 0]
    gaps = np.isnan(made.data)
    imputer = DEEP[name].set_params(random_state=5)
    filled = imputer.fit_transform(made.data)
    mean = np.where(gaps, np.nanmean(made.data, 0), made.data)
    error, usual = (np.sqrt(((one - x)[gaps] ** 2).mean()) for one in (filled, mean))
    assert error < 0.8 * usual
    assert (filled[~gaps] == made.data[~gaps]).all()
    again = imputer.transform(made.data)
    assert np.sqrt(((again - x)[gaps] ** 2).mean()) < 0.8 * usual
    if name in DRAWING:
        several = imputer.sample(made.data, 3)
        assert np.array_equal(several[0], filled) and (several[1] != several[2])[gaps].all()


@pytest.mark.parametrize("make", [MIWAE, TabCSDI, TDM, KnewImp, GAIN])
def test_networks_say_what_they_cannot_fill(make: Any) -> None:
    hollow = np.array([[1.0, np.nan], [2.0, np.nan]])
    with pytest.raises(ValueError, match="column 1 of X has no value at all"):
        make().fit(hollow)
    if make is TDM:
        with pytest.raises(ValueError, match="X needs 2 columns or more, got 1"):
            make().fit(hollow[:, :1])


def test_crps_is_proper() -> None:
    truth = KeyedNoise(1).normal(torch.empty(4_000, dtype=torch.float64)[None])[0].numpy()
    many = KeyedNoise(2).normal(torch.empty(20, 4_000, dtype=torch.float64)).numpy()
    # of N(0, 1) against itself: 1 / sqrt(pi); of its mean: sqrt(2 / pi)
    assert crps(many, truth) == pytest.approx(1 / math.sqrt(math.pi), abs=0.03)
    assert crps(many[:1] * 0, truth) == pytest.approx(math.sqrt(2 / math.pi), abs=0.03)
    assert crps(many, truth) < min(crps(0.5 * many, truth), crps(2 * many, truth))


def test_tuning_looks_at_observed_entries_and_several_draws_differ() -> None:
    x = ampute(load_wine().data, 0.3, seed=1).data
    before = x.copy()
    best, scores = tune(BASELINES["KNN"], SETTINGS["KNN"], x)
    assert best is SETTINGS["KNN"][int(np.argmin(scores))] and len(scores) == 3
    assert np.array_equal(x, before, equal_nan=True)
    # with the seed of the gaps too, other entries are hidden than are missing
    again = ampute(load_wine().data, 0.4, seed=1_000).data
    _, scores = tune(BASELINES["mean"], SETTINGS["mean"], again, seed=1_000)
    assert np.isfinite(scores).all() and len(set(scores)) == 3
    with pytest.raises(ValueError, match="too few observed entries to hide"):
        tune(BASELINES["mean"], SETTINGS["mean"], np.array([[1.0, 2.0]]))
    gaps = np.isnan(x)

    def make(seed: int) -> Any:
        return BASELINES["IterativeImputer, posterior"](seed, iterations=1)

    drawn = draws(make, x, 2)
    assert (drawn[0] != drawn[1])[gaps].all() and (drawn[0] == drawn[1])[~gaps].all()
    ours = draws(lambda seed: BASELINES["MIRI"](seed, **QUICK["MIRI"]), x, 2)
    assert (ours[0] != ours[1])[gaps].mean() > 0.9  # some of both are clamped to the same bound
