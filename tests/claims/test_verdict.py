"""The rule of verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fluvial.claims.verdict import Comparison, judge


def test_interval_is_that_of_a_paired_t_test() -> None:
    differences = [0.3, 0.5, 0.1, 0.45]
    expected = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    low, high = Comparison("x", differences).interval
    assert low == pytest.approx(expected.low, rel=1e-12)
    assert high == pytest.approx(expected.high, rel=1e-12)


@pytest.mark.parametrize(
    ("differences", "margin", "verdict"),
    [
        ([1.0, 1.1, 0.9], 0.0, "holds"),
        ([1.0, 1.1, 0.9], 2.0, "fails"),
        ([1.0, 1.1, 0.9], 0.9, "undecided"),
        ([-1.0, -1.1, -0.9], 0.0, "fails"),
        ([1.0, -1.0, 0.2], 0.0, "undecided"),
        ([5.0, 5.0], 0.0, "undecided"),
        ([5.0], 0.0, "undecided"),
        ([5.0, 5.0, 5.0], 5.0, "undecided"),
    ],
)
def test_verdict_of_one_comparison(differences: list[float], margin: float, verdict: str) -> None:
    assert Comparison("x", differences, margin).verdict == verdict


def test_all_must_hold_and_one_failure_is_enough() -> None:
    holds = Comparison("h", [1.0, 1.1, 0.9])
    fails = Comparison("f", [-1.0, -1.1, -0.9])
    open_ = Comparison("u", [1.0, -1.0, 0.2])
    assert judge([holds, holds]) == "holds"
    assert judge([holds, open_]) == "undecided"
    assert judge([holds, open_, fails]) == "fails"
    assert judge([]) == "undecided"


def test_one_seed_has_no_interval_and_its_json_is_json() -> None:
    comparison = Comparison("x", [0.25])
    assert comparison.interval == (-math.inf, math.inf)
    assert comparison.as_json()["low"] is None
    assert comparison.as_json()["mean"] == 0.25


def test_coverage_of_the_interval() -> None:
    rng = np.random.default_rng(0)
    trials = 2000
    inside = 0
    for differences in rng.normal(0.7, 2.0, (trials, 3)):
        low, high = Comparison("x", list(differences)).interval
        inside += low < 0.7 < high
    # five standard errors of a share of 0.95
    assert abs(inside / trials - 0.95) < 5 * math.sqrt(0.95 * 0.05 / trials)
