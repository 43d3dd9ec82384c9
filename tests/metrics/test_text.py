"""Models of counts, bits of text under a model, entropy and variety."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.metrics.text import NGram, bits, distinct, language_model_log_probs, unigram_entropy
from fluvial.networks import CausalTransformer

V = 3


def drawn(rows: int, length: int, classes: int = V, seed: int = 0) -> Tensor:
    """Tokens, small ones more often."""
    u = KeyedNoise(seed).uniform(torch.empty(rows, length, dtype=torch.float64))
    return (u.square() * classes).long()


def test_two_letters_by_hand() -> None:
    model = NGram(torch.tensor([[0, 1, 0, 0, 1]]), 2, order=2)
    # p_1(0) = (3 + 2 / 2) / (5 + 2); after 0 came 1, 0 and 1, after 1 came 0
    p0 = 4 / 7
    assert model.probs(torch.tensor([[0], [1]])).flatten().tolist() == pytest.approx(
        [(1 + 2 * p0) / 5, (2 + 2 * (1 - p0)) / 5, (1 + p0) / 2, (1 - p0) / 2]
    )
    assert model.probs(torch.empty(1, 0, dtype=torch.int64))[0, 0].item() == pytest.approx(p0)
    wanted = [math.log(1 - p0), math.log((1 - p0) / 2)]
    assert model.log_probs(torch.tensor([[1, 1]]))[0].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("order", [1, 3])
def test_agrees_with_the_recursion(order: int) -> None:
    texts, x = drawn(4, 9), drawn(6, 7, seed=1)
    grams = [
        Counter(tuple(row[i : i + k]) for row in texts.tolist() for i in range(len(row) - k + 1))
        for k in range(1, order + 1)
    ]

    def p(word: int, before: tuple[int, ...]) -> float:
        lower = 1 / V if not before else p(word, before[1:])
        if not before:
            seen = {w: grams[0][(w,)] for w in range(V)}
        else:
            seen = {w: grams[len(before)][(*before, w)] for w in range(V)}
        total, kinds = sum(seen.values()), sum(c > 0 for c in seen.values())
        return (seen[word] + kinds * lower) / (total + kinds) if total else lower

    found = NGram(texts, V, order).log_probs(x).exp()
    for row, values in zip(x.tolist(), found.tolist(), strict=True):
        for i, value in enumerate(values):
            assert value == pytest.approx(p(row[i], tuple(row[max(0, i - order + 1) : i])))


def test_sums_to_one_after_whatever_came_before() -> None:
    model = NGram([drawn(1, 40)[0], drawn(1, 25, seed=1)[0]], V, order=4)
    for n in range(5):
        before = torch.tensor(list(itertools.product(range(V), repeat=n)), dtype=torch.int64)
        p = model.probs(before.reshape(V**n, n))
        assert p.shape == (V**n, V) and bool((p > 0).all())
        assert torch.allclose(p.sum(1), torch.ones(V**n, dtype=torch.float64), atol=1e-14)


def test_nothing_is_counted_across_ends() -> None:
    two = NGram([torch.tensor([0, 1]), torch.tensor([1, 0])], 2, order=2)
    one = NGram(torch.tensor([[0, 1, 1, 0]]), 2, order=2)
    after = torch.tensor([[1]])
    assert two.probs(after)[0, 0] > 0.7
    assert one.probs(after)[0, 0].item() == pytest.approx(0.5)


def test_more_before_predicts_better() -> None:
    text = torch.arange(600)[None] % 5
    nats = [-NGram(text, 5, k).log_probs(text[:, :100]).mean().item() for k in (1, 2)]
    assert nats[0] == pytest.approx(math.log(5), abs=0.01) and nats[1] < 0.1


def test_bits_under_a_network() -> None:
    network = CausalTransformer(vocabulary=V + 1, width=8, depth=1, heads=2, seed=3).double()
    with torch.no_grad():
        network.out.weight.mul_(30)  # a law that is not flat
    x = drawn(5, 6)
    found = language_model_log_probs(network, x, start=V, batch_size=2)
    assert found.shape == (5, 6) and found.dtype == torch.float64
    # all rows of three tokens, together
    rows = torch.tensor(list(itertools.product(range(V), repeat=3)))
    total = language_model_log_probs(network, rows, start=V).sum(1).exp().sum()
    assert total.item() == pytest.approx(1.0, abs=1e-12)
    # without a start the first is not predicted, and all V + 1 classes are possible
    rest = language_model_log_probs(network, x)
    logits = network(x[:, :-1]).log_softmax(-1)
    assert torch.equal(rest, logits.gather(-1, x[:, 1:, None])[..., 0].detach())
    assert bits(torch.full((4, 2), math.log(0.25))) == pytest.approx(2.0)


def test_entropy_and_variety() -> None:
    even = torch.arange(27).repeat(10)[None]
    assert unigram_entropy(even, 27) == pytest.approx(math.log2(27))
    assert unigram_entropy(torch.zeros(2, 9, dtype=torch.int64), 27) == 0
    # the bias of Miller, at 4 standard errors of the mean of 400: V - 1 = 2 degrees of freedom
    n = 60
    u = KeyedNoise(5).uniform(torch.empty(400, n, dtype=torch.float64))
    low = [math.log2(3) - unigram_entropy(row[None], 3) for row in (u * 3).long()]
    one = 1 / (n * math.log(2))  # chi-squared of 2 / (2 n ln 2): mean and standard deviation
    assert sum(low) / 400 == pytest.approx(one, abs=4 * one / 20)
    x = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 2]])
    assert [distinct(x, n) for n in (1, 2, 4)] == [3 / 8, 4 / 6, 1.0]


def test_bad_input() -> None:
    x = drawn(2, 4)
    for call, message in (
        (lambda: NGram(x, V, 0), "order=0"),
        (lambda: NGram(x, 1 << 21, 3), r"classes\*\*order < 2\*\*63"),
        (lambda: NGram(x + 1, 2), "0 .. 1"),
        (lambda: NGram([], 2), "texts must hold tokens"),
        (lambda: unigram_entropy(x[:0], V), "must hold tokens"),
        (lambda: distinct(x, 5), "n=5"),
        (lambda: language_model_log_probs(lambda x: x, x), "must return logits"),
        (lambda: language_model_log_probs(lambda x: x, x[:, :1]), "some to predict"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="int64"):
        NGram(x.int(), V)
    with pytest.raises(TypeError, match="int64"):
        language_model_log_probs(lambda x: x, x.float())
