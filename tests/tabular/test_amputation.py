"""Gaps made on purpose: their rates, what they depend on, and what they leave alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from fluvial.core.noise import KeyedNoise
from fluvial.tabular import ampute
from fluvial.tabular.amputation import MECHANISMS

X = KeyedNoise(0).normal(torch.empty(3_000, 6, dtype=torch.float64)).numpy()
X[:, 1] += X[:, 0]


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("rate", [0.2, 0.6])
def test_the_rate_is_the_one_that_was_asked_for(mechanism: Any, rate: float) -> None:
    made = ampute(X, rate, mechanism, tail=0.8)
    open_ = [j for j in range(6) if j not in made.complete]
    assert len(made.complete) == (2 if mechanism == "mar" else 0)
    assert made.mask[:, list(made.complete)].all()
    # the mean chance is solved for; what is drawn is binomial, five deviations wide
    assert made.chance[:, open_].mean(0) == pytest.approx(np.full(len(open_), rate), abs=1e-3)
    spread = math.sqrt(rate * (1 - rate) / len(X))
    assert abs((~made.mask)[:, open_].mean(0) - rate).max() < 5 * spread
    assert made.rate == pytest.approx((~made.mask).mean())
    assert np.array_equal(np.isnan(made.data), ~made.mask)
    assert (made.data[made.mask] == X[made.mask]).all()


def test_completely_at_random_depends_on_nothing() -> None:
    made = ampute(X, 0.4, "mcar")
    assert (made.chance == 0.4).all()
    lost = (~made.mask).astype(float)
    together = np.corrcoef(np.concatenate([lost, X], 1).T)[:6]
    np.fill_diagonal(together, 0)
    assert abs(together).max() < 5 / math.sqrt(len(X))


def test_at_random_depends_on_whole_columns_alone() -> None:
    made = ampute(X, 0.4, "mar", strength=2.0)
    whole = list(made.complete)
    for j in set(range(6)) - set(whole):
        logit = np.log(made.chance[:, j] / (1 - made.chance[:, j]))
        design = np.column_stack([X[:, whole], np.ones(len(X))])
        rest = logit - design @ np.linalg.lstsq(design, logit, rcond=None)[0]
        assert abs(rest).max() < 1e-8  # linear in them, and nothing else
        assert logit.std() == pytest.approx(2.0)
    other = X.copy()
    other[:, [j for j in range(6) if j not in whole]] = 0.5
    assert np.allclose(ampute(other, 0.4, "mar", strength=2.0).chance, made.chance)


def test_not_at_random_depends_on_the_value_itself() -> None:
    made = ampute(X, 0.4, "mnar", strength=1.5)
    for j in range(6):
        logit = np.log(made.chance[:, j] / (1 - made.chance[:, j]))
        assert abs(stats.pearsonr(logit, X[:, j]).statistic) == pytest.approx(1)
        assert logit.std() == pytest.approx(1.5)
        seen = X[made.mask[:, j], j].mean()
        assert abs(seen - X[:, j].mean()) > 0.2
    assert np.allclose(ampute(X, 0.4, "mnar", strength=0.0).chance, 0.4)
    cut = ampute(X, 0.2, "mnar-quantile", tail=0.25)
    for j in range(6):
        lost = X[cut.chance[:, j] > 0, j]
        kept = X[cut.chance[:, j] == 0, j]
        assert lost.min() >= kept.max() or lost.max() <= kept.min()
        assert len(lost) == 750 and cut.chance[:, j].max() == pytest.approx(0.8)


def test_the_logistic_kind_of_not_at_random_hides_what_it_depends_on() -> None:
    made, known = (ampute(X, 0.4, kind) for kind in ("mnar-logistic", "mar"))
    inside = list(known.complete)
    assert np.allclose(made.chance[:, inside], 0.4)
    open_ = [j for j in range(6) if j not in inside]
    assert np.array_equal(made.chance[:, open_], known.chance[:, open_])
    assert not made.mask[:, inside].all()


def test_a_seed_gives_the_same_and_a_rows_draws_are_its_own() -> None:
    one, two = ampute(X, 0.3, seed=4), ampute(X[:100], 0.3, seed=4)
    assert np.array_equal(one.mask[:100], two.mask)
    assert not np.array_equal(ampute(X, 0.3, seed=5).mask, one.mask)


def test_frames_tensors_and_gaps_that_are_there() -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {
            "x": rng.normal(size=200),
            "n": rng.integers(0, 9, 200),
            "b": rng.random(200) < 0.5,
            "k": pd.Categorical(rng.choice(["u", "v"], 200)),
            "t": rng.choice(["p", "q", "r"], 200),
        }
    )
    table.loc[3, "x"] = np.nan
    before = table.copy()
    for mechanism in MECHANISMS:
        made = ampute(table, 0.4, mechanism)
        pd.testing.assert_frame_equal(table, before)
        assert np.array_equal(made.data.isna().to_numpy(), ~made.mask)
        assert not made.mask[3, 0]
        for j, name in enumerate(table):
            seen = made.mask[:, j]
            assert made.data[name][seen].tolist() == table[name][seen].tolist()
        assert isinstance(made.data["k"].dtype, pd.CategoricalDtype)
    made = ampute(table, 0.4)
    assert [str(made.data[c].dtype) for c in "nb"] == ["Int64", "boolean"]
    tensor = ampute(torch.from_numpy(X).float(), 0.4)
    assert tensor.data.dtype == torch.float32
    assert np.array_equal(tensor.data.isnan().numpy(), ~tensor.mask)
    assert ampute(np.arange(20).reshape(10, 2), 0.4).data.dtype == np.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 0.0}, r"rate must lie in \(0, 1\)"),
        ({"mechanism": "random"}, "mechanism must be one of mcar, mar"),
        ({"observed": 1.0}, "observed must lie"),
        ({"strength": -1.0}, "strength must not be negative"),
        ({"tail": 0.1}, r"tail must lie in \[rate, 1\]"),
        ({"X": X[:, 0]}, "X must be a table"),
        ({"X": X[:, :1], "mechanism": "mar"}, "needs two columns"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ampute(**{"X": X, "rate": 0.4, **arguments})
