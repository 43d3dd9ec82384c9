from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, norm
from sklearn.dummy import DummyClassifier
from sklearn.tree import DecisionTreeClassifier

from fluvial.metrics import bootstrap_interval, classifier_test

RNG = np.random.default_rng
CLASSIFIERS = ["logistic", "neighbours", "mlp"]


def test_finds_the_best_accuracy_there_is() -> None:
    """Two Gaussians a distance d apart: Phi(d / 2), by a linear classifier."""
    rng, count = RNG(0), 2000
    a, b = rng.normal(size=(count, 2)), rng.normal(size=(count, 2))
    b[:, 0] += 1.5
    test = classifier_test(a, b)
    best = norm.cdf(0.75)
    # of n = 2000 answers; what fitting three numbers to 2000 rows loses is below that
    assert abs(test.accuracy - best) < 4 * math.sqrt(best * (1 - best) / count) + 0.005
    assert test.p_value < 1e-10 and test.accuracy > test.null[1]
    assert len(test.correct) == count and test.correct.mean() == test.accuracy
    interval = bootstrap_interval(np.mean, test.correct, method="percentile")
    assert interval.low < best < interval.high


@pytest.mark.parametrize("classifier", ["logistic", "neighbours"])
def test_one_law_is_called_different_no_more_often_than_it_says(classifier: str) -> None:
    rng, repeats, level = RNG(1), 12, 0.8
    inside, values = [], []
    for seed in range(repeats):
        a, b = rng.normal(size=(2, 60, 2))
        test = classifier_test(a, b, classifier=classifier, level=level, seed=seed)
        inside.append(test.null[0] <= test.accuracy <= test.null[1])
        values.append(test.p_value)
    # at least 80 % inside in the mean, 4 standard errors of a share of 12
    assert np.mean(inside) > 0.8 - 4 * math.sqrt(0.16 / repeats)
    assert min(values) > 1e-4 / repeats


@pytest.mark.parametrize("classifier", ["neighbours", "mlp", DecisionTreeClassifier()])
def test_a_difference_of_spread_is_seen_by_those_that_can(classifier) -> None:
    rng = RNG(2)
    a, b = rng.normal(size=(200, 2)), 4 * rng.normal(size=(200, 2))
    assert classifier_test(a, b, classifier=classifier).accuracy > 0.7
    blind = classifier_test(a, b)
    assert 0.35 < blind.accuracy < 0.65


def test_null_is_the_binomial_law() -> None:
    a, b = RNG(3).normal(size=(2, 50, 2))
    test = classifier_test(a, b, level=0.9)
    hits = round(test.accuracy * 50)
    assert test.p_value == pytest.approx(
        binomtest(hits, 50, alternative="greater").pvalue, rel=1e-10
    )
    low, high = (round(50 * end) for end in test.null)
    mass = [math.comb(50, k) / 2**50 for k in range(51)]
    assert sum(mass[low : high + 1]) >= 0.9 > sum(mass[low + 1 : high])


def test_one_answer_for_all_is_right_half_of_the_time() -> None:
    """As many rows of both in both halves, whatever came in."""
    a, b = RNG(4).normal(size=(30, 2)), RNG(5).normal(size=(101, 2))
    test = classifier_test(a, b, classifier=DummyClassifier(strategy="most_frequent"))
    assert test.accuracy == 0.5 and len(test.correct) == 30


def test_depends_on_the_seed_alone() -> None:
    a, b = RNG(6).normal(size=(2, 30, 3))
    before, legacy = torch.random.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    for classifier in CLASSIFIERS:
        one, same, other = (
            classifier_test(a, b, classifier=classifier, seed=seed).correct for seed in (1, 1, 2)
        )
        assert np.array_equal(one, same) and not np.array_equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], legacy)  # noqa: NPY002
    tensors = classifier_test(torch.from_numpy(a), torch.from_numpy(b), seed=1)
    assert np.array_equal(tensors.correct, classifier_test(a, b, seed=1).correct)


def test_scaling_and_constant_columns_change_nothing() -> None:
    a, b = RNG(7).normal(size=(2, 60, 2))
    wide = [np.pad(x * [1e6, 1e-6] + 5, ((0, 0), (0, 1))) for x in (a, b + 0.7)]
    plain = classifier_test(a, b + 0.7, classifier="neighbours")
    assert np.array_equal(classifier_test(*wide, classifier="neighbours").correct, plain.correct)


def test_refuses() -> None:
    a, b = RNG(8).normal(size=(2, 20, 2))
    with pytest.raises(ValueError, match="a must have shape .* N at least 8"):
        classifier_test(a[:7], b)
    with pytest.raises(ValueError, match="b must be finite"):
        classifier_test(a, b * np.inf)
    with pytest.raises(ValueError, match="same number of columns"):
        classifier_test(a, b[:, :1])
    with pytest.raises(ValueError, match="level must lie in"):
        classifier_test(a, b, level=1.0)
    with pytest.raises(ValueError, match="classifier must be one of logistic, mlp, neighbours"):
        classifier_test(a, b, classifier="forest")
    with pytest.raises(TypeError, match="fit and predict, got int"):
        classifier_test(a, b, classifier=3)
