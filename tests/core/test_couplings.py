"""Pairings of ends: optimality, laws, and what they do to conditions."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fluvial.core.couplings import (
    ConditionalOptimalTransport,
    EntropicOptimalTransport,
    Independent,
    OptimalTransport,
    straightness,
)
from fluvial.core.gaussian.paths import Linear
from fluvial.core.noise import KeyedNoise
from fluvial.core.time import uniform_grid

from .toys import ALARM, VectorGaussian, assert_shares

NOISE = KeyedNoise(3)
COUPLINGS = [
    Independent(),
    OptimalTransport(),
    EntropicOptimalTransport(1.0),
    ConditionalOptimalTransport(),
    ConditionalOptimalTransport(2.0),
]
X0 = NOISE.normal(torch.empty(6, 2, 2, dtype=torch.float64), "x0")
X1 = NOISE.normal(torch.empty(6, 2, 2, dtype=torch.float64), "x1")
LABEL = torch.tensor([0, 1, 0, 1, 2, 0])


def name(value: Any) -> str:
    return type(value).__name__


def costs(x0: Tensor, x1: Tensor) -> Tensor:
    return (x0.flatten(1)[:, None] - x1.flatten(1)).square().sum(-1)


def cost(x0: Tensor, x1: Tensor, rows: Tensor) -> float:
    return float((x0 - x1[rows]).square().sum())


def is_permutation(rows: Tensor) -> bool:
    return torch.equal(rows.sort().values, torch.arange(len(rows)))


def test_independent() -> None:
    """Every permutation of three rows is as likely as any."""
    order = {p: i for i, p in enumerate(permutations(range(3)))}
    x = torch.zeros(3, 1)
    drawn = [order[tuple(Independent()(x, x, NOISE.at(k)).tolist())] for k in range(600)]
    assert_shares(torch.tensor(drawn), torch.ones(6).double())


def test_optimal_transport_is_the_best_permutation() -> None:
    rows = OptimalTransport()(X0, X1, NOISE)
    assert is_permutation(rows)
    best = min(cost(X0, X1, torch.tensor(p)) for p in permutations(range(6)))
    assert cost(X0, X1, rows) == pytest.approx(best, rel=1e-12)
    x0, x1 = (NOISE.normal(torch.empty(200, 5), tag) for tag in "ab")
    rows = OptimalTransport()(x0, x1, NOISE)
    ours = torch.from_numpy(linear_sum_assignment(costs(x0, x1).numpy())[1])
    assert is_permutation(rows) and torch.equal(rows, ours)


def test_entropic_plan() -> None:
    """Two pairs of points: the plan is known, and partners are drawn from it."""
    x0, x1, reg = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.2], [-0.1]]), 1.5
    n = 200
    c = costs(x0.double(), x1.double())
    # p / (1/2 - p) = exp(-(c_00 + c_11 - c_01 - c_10) / (2 reg))
    odds = math.exp(-float(c[0, 0] + c[1, 1] - c[0, 1] - c[1, 0]) / (2 * reg))
    probs = torch.tensor([odds, 1.0]).double()
    coupling = EntropicOptimalTransport(reg)
    drawn = torch.stack([coupling(x0, x1, NOISE.at(k)) for k in range(n)])
    own = (drawn == torch.arange(2)).flatten()  # rows draw independently
    assert_shares(own.long(), probs.flip(0))


def test_entropic_limits() -> None:
    x0, x1 = (NOISE.normal(torch.empty(60, 2, dtype=torch.float64), tag) for tag in "ab")
    exact = cost(x0, x1, OptimalTransport()(x0, x1, NOISE))
    independent = float(costs(x0, x1).mean() * 60)
    price = [
        cost(x0, x1, EntropicOptimalTransport(reg)(x0, x1, NOISE)) for reg in (0.05, 1.0, 100.0)
    ]
    assert exact < price[0] < 1.5 * exact + 1 and price[0] < price[1] < price[2]
    assert abs(price[2] / independent - 1) < 0.3


def test_sinkhorn_that_did_not_converge_says_so() -> None:
    x0, x1 = (NOISE.normal(torch.empty(30, 2, dtype=torch.float64), tag) for tag in "ab")
    with pytest.warns(RuntimeWarning, match="misses its marginals"):
        EntropicOptimalTransport(1e-3, iterations=10)(x0, x1, NOISE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EntropicOptimalTransport(1.0)(x0, x1, NOISE)


# Conditions


def two_classes(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Classes at -2 and 2 on a line, and a standard normal source."""
    label = (NOISE.uniform(torch.empty(n), "label") < 0.5).long()
    x0 = (4.0 * label - 2)[:, None] + 0.3 * NOISE.normal(torch.empty(n, 1), "x0")
    return x0, NOISE.normal(torch.empty(n, 1), "x1"), label


def test_plain_transport_skews_the_conditional_law_and_the_aware_one_does_not() -> None:
    n = 400
    x0, x1, label = two_classes(n)
    plain = x1[OptimalTransport()(x0, x1, NOISE, label)][:, 0]
    # on a line the best permutation sorts: class 1 takes all of the upper source
    assert plain[label == 1].min() > plain[label == 0].max()
    for kind, sign in ((0, -1), (1, 1)):
        share = int((label == kind).sum())
        # mean of half a normal: sqrt(2 / pi), with a standard error below 1 / sqrt(share)
        centre = sign * math.sqrt(2 / math.pi)
        assert abs(float(plain[label == kind].mean()) - centre) < 5 / math.sqrt(share)
        assert stats.kstest(plain[label == kind].numpy(), "norm").pvalue < 1e-20

    aware = x1[ConditionalOptimalTransport()(x0, x1, NOISE, label)][:, 0]
    for kind in (0, 1):
        # exactly the source rows that were drawn beside this class, a sample of the source
        ours, drawn = aware[label == kind].sort().values, x1[label == kind, 0].sort().values
        assert torch.equal(ours, drawn)
        assert stats.kstest(ours.numpy(), "norm").pvalue > ALARM
        # and sorted within the class
        order = x0[label == kind, 0].argsort()
        assert (aware[label == kind][order].diff() >= 0).all()


def test_weight_trades_skew_for_cost() -> None:
    x0, x1, label = two_classes(200)
    skews, prices, crossed = [], [], []
    for weight in (0.0, 1.0, 4.0, 16.0, 1e6, math.inf):
        rows = ConditionalOptimalTransport(weight)(x0, x1, NOISE, label)
        assert is_permutation(rows)
        got = x1[rows, 0]
        skews.append(float(got[label == 1].mean() - got[label == 0].mean()))
        prices.append(cost(x0, x1, rows))
        crossed.append(int((label != label[rows]).sum()))
    assert torch.equal(
        ConditionalOptimalTransport(0.0)(x0, x1, NOISE, label), OptimalTransport()(x0, x1, NOISE)
    )
    assert skews == sorted(skews, reverse=True) and prices == sorted(prices)
    assert crossed == sorted(crossed, reverse=True) and crossed[-2:] == [0, 0]
    assert prices[-1] == pytest.approx(prices[-2])
    assert prices[-1] < cost(x0, x1, Independent()(x0, x1, NOISE))


def test_continuous_conditions() -> None:
    """The permutation minimises |x0 - x1|^2 + weight |c0 - c1|^2."""
    condition = NOISE.normal(torch.empty(6, 3, dtype=torch.float64), "c")
    weight = 1.7

    def price(rows: Tensor) -> float:
        return cost(X0, X1, rows) + weight * cost(condition, condition, rows)

    rows = ConditionalOptimalTransport(weight)(X0, X1, NOISE, condition)
    assert price(rows) == pytest.approx(min(price(torch.tensor(p)) for p in permutations(range(6))))


def test_labels_on_both_ends() -> None:
    label, label1 = torch.tensor([0, 0, 0, 1, 1, 0]), torch.tensor([1, 0, 1, 1, 0, 1])
    coupling = ConditionalOptimalTransport()
    drawn = torch.stack([coupling(X0, X1, NOISE.at(k), label, label1) for k in range(300)])
    assert (label1[drawn] == label).all()
    # 4 rows of class 0 share 2, evenly: uniform marginals of the plan
    counts = torch.bincount(drawn[:, label == 0].flatten(), minlength=6)
    assert abs(int(counts[1]) - 600) < 5 * math.sqrt(1200 / 4)
    with pytest.raises(ValueError, match="x1 has no row of class 1, x0 has 2"):
        coupling(X0, X1, NOISE, label, torch.zeros(6, dtype=torch.int64))


# All of them


@pytest.mark.parametrize("coupling", COUPLINGS, ids=name)
def test_keyed(coupling: Any) -> None:
    rows = coupling(X0, X1, NOISE, LABEL)
    assert rows.shape == (6,) and rows.dtype == torch.int64 and ((rows >= 0) & (rows < 6)).all()
    assert torch.equal(coupling(X0, X1, NOISE, LABEL), rows)
    assert torch.equal(coupling(X0.float(), X1.float(), NOISE, LABEL), rows)
    shifted = coupling(X0, X1, NOISE.rows(torch.arange(10, 16)), LABEL)
    drawn = isinstance(coupling, Independent | EntropicOptimalTransport)
    assert torch.equal(shifted, rows) != drawn
    leaf = X0.clone().requires_grad_()
    assert torch.equal(coupling(leaf, X1, NOISE, LABEL), rows)
    assert coupling(X0[:1], X1[:1], NOISE, LABEL[:1]).tolist() == [0]


@pytest.mark.parametrize("coupling", COUPLINGS, ids=name)
@pytest.mark.parametrize("x1", [X1[:5], X1[:, :1], X1[0], X1[:0]])
def test_unequal_batches(coupling: Any, x1: Tensor) -> None:
    with pytest.raises(ValueError, match="x0 and x1 must have the same number of rows"):
        coupling(X0, x1, NOISE, LABEL)


@pytest.mark.parametrize("coupling", COUPLINGS[1:], ids=name)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite(coupling: Any, value: float) -> None:
    x = X0.clone()
    x[2, 0, 1] = value
    for pair in ((x, X1), (X0, x)):
        with pytest.raises(ValueError, match="must be finite"):
            coupling(*pair, NOISE, LABEL)


def test_bad_labels() -> None:
    coupling = ConditionalOptimalTransport()
    for label, match in (
        (None, "label must have one entry for each of 6 rows, got none"),
        (LABEL[:5], "label must have one entry"),
        (LABEL.double(), "give a finite weight"),
        (LABEL[:, None], "give a finite weight"),
    ):
        with pytest.raises(ValueError, match=match):
            coupling(X0, X1, NOISE, label)
    with pytest.raises(ValueError, match="label1 must have one entry"):
        coupling(X0, X1, NOISE, LABEL, LABEL[:2])
    with pytest.raises(ValueError, match="must be finite"):
        ConditionalOptimalTransport(1.0)(X0, X1, NOISE, torch.full((6, 1), math.nan))
    with pytest.raises(ValueError, match="integer labels must have shape"):
        ConditionalOptimalTransport(1.0)(X0, X1, NOISE, LABEL[:, None])


@pytest.mark.parametrize(
    "build",
    [
        lambda: EntropicOptimalTransport(0.0),
        lambda: EntropicOptimalTransport(math.nan),
        lambda: EntropicOptimalTransport(1.0, 0),
        lambda: ConditionalOptimalTransport(-1.0),
        lambda: ConditionalOptimalTransport(math.nan),
    ],
)
def test_bad_arguments(build: Any) -> None:
    with pytest.raises(ValueError, match="need reg > 0|weight must be"):
        build()


@pytest.mark.parametrize("shift", [0.0, 1e3, 1e9])
def test_far_from_the_origin(shift: float) -> None:
    """Moving either end changes no plan: the digits of the differences are those that count."""
    # of eighths, which 1e9 leaves as they are
    x0, x1 = ((8 * NOISE.normal(torch.empty(40, 2).double(), tag)).round() / 8 for tag in "ab")
    exact, entropic = OptimalTransport(), EntropicOptimalTransport(1.0)
    for a, b in ((shift, shift), (shift, -shift), (0.0, shift)):
        rows = exact(x0 + a, x1 + b, NOISE)  # of several that are best
        assert cost(x0, x1, rows) == pytest.approx(cost(x0, x1, exact(x0, x1, NOISE)))
        assert torch.equal(entropic(x0 + a, x1 + b, NOISE), entropic(x0, x1, NOISE))


@pytest.mark.parametrize("coupling", COUPLINGS, ids=name)
def test_events_of_one_number(coupling: Any) -> None:
    x0, x1 = X0[:, 0, 0], X1[:, 0, 0]
    rows = coupling(x0, x1, NOISE, LABEL)
    assert torch.equal(rows, coupling(x0[:, None], x1[:, None], NOISE, LABEL))


def test_labels_that_are_no_tensors() -> None:
    with pytest.raises(TypeError, match="label must be a tensor, got list"):
        ConditionalOptimalTransport()(X0, X1, NOISE, LABEL.tolist())  # type: ignore[arg-type]


# Straightness


@dataclass(frozen=True)
class Sorted:
    """The velocity of the optimal coupling of N(0, I) and N(mean, std^2 I): straight lines."""

    mean: float
    std: float
    predicts: str = "velocity"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        z = (x - (1 - t) * self.mean) / ((1 - t) * self.std + t)
        return z - self.mean - self.std * z


def test_straight_flow() -> None:
    x = NOISE.normal(torch.empty(5, 3, dtype=torch.float64))
    for pairs in (uniform_grid(7), uniform_grid(5, 0.0, 1.0)):
        s = straightness(x, pairs, Linear(), Sorted(0.5, 0.3))
        assert s.shape == (5,) and (s < 1e-25).all()


def test_bent_flow() -> None:
    """Independent coupling: x_t = f(t) x_1, f^2 = (1 - t)^2 std^2 + t^2; by quadrature."""
    std = 0.4
    zero = torch.zeros(2, dtype=torch.float64)
    toy = VectorGaussian(Linear(), zero, zero + std)
    x = NOISE.normal(torch.empty(4, 2, dtype=torch.float64))
    t = np.linspace(0, 1, 20_001)
    rate = (t - (1 - t) * std**2) / np.sqrt((1 - t) ** 2 * std**2 + t**2)
    exact = x.square().sum(1) * float(np.mean((rate - (1 - std)) ** 2))
    s = straightness(x, uniform_grid(400), Linear(), toy)
    torch.testing.assert_close(s, exact, rtol=0.01, atol=0)
    assert straightness(x.float(), uniform_grid(3), Linear(), toy).dtype == torch.float32
    one = VectorGaussian(Linear(), zero[:1], zero[:1] + std)
    flat = straightness(x[:, 0], uniform_grid(9), Linear(), one)
    torch.testing.assert_close(flat, straightness(x[:, :1], uniform_grid(9), Linear(), one))
    with pytest.raises(ValueError, match="pairs must all fall or all rise"):
        straightness(x, torch.tensor([[1.0, 0.5], [0.5, 0.7]]), Linear(), toy)
