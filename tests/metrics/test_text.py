"""Models of counts, bits of text under a model, entropy and variety."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.metrics import evaluate
from fluvial.metrics.text import (
    NGram,
    bits,
    distinct,
    language_model_log_probs,
    ngram_divergence,
    unigram_entropy,
)
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


def test_divergence_of_ngrams_by_hand() -> None:
    x, y = torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 1]])
    # the pairs are 00, 01 and 01, 11: p = (1/2, 1/2, 0), q = (0, 1/2, 1/2), half a bit
    assert ngram_divergence(x, y, 2, 2) == pytest.approx(0.5)
    assert ngram_divergence(x, x, 2, 2) == pytest.approx(0)
    assert ngram_divergence(torch.zeros(2, 4).long(), torch.ones(3, 4).long(), 2, 3) == (
        pytest.approx(1)
    )
    with pytest.raises(ValueError, match=r"y must be rows of n=3 tokens or more, got \(1, 2\)"):
        ngram_divergence(x, y[:, :2], 2, 3)


def texts(count: int, length: int, seed: int, letters: str = "abcd") -> list[str]:
    """Of a Markov chain that goes on to the next letter three times of four."""
    u = KeyedNoise(seed).uniform(torch.empty(count, length, dtype=torch.float64)).tolist()
    found = []
    for row in u:
        place, text = int(row[0] * len(letters)), ""
        for value in row:
            place += 1 if value < 0.75 else 2
            text += letters[place % len(letters)]
        found.append(text)
    return found


def test_texts_of_the_law_reach_the_floor_and_others_do_not() -> None:
    real = texts(1, 8_000, 0)
    found = {m.name: m for m in evaluate(texts(60, 40, 1), real, resamples=40).measured}
    assert list(found) == ["bits", "divergence", "entropy", "distinct"]
    for m in found.values():
        assert m.value.low <= m.floor.high and m.floor.low <= m.value.high, m.name
    # of the chain: the entropy of 3/4 and 1/4, and of four letters that are alike
    assert found["bits"].value.estimate == pytest.approx(0.811, abs=0.1)
    assert found["entropy"].floor.estimate == pytest.approx(2, abs=0.01)
    other = {m.name: m for m in evaluate(texts(60, 40, 1, "dbca"), real, resamples=40).measured}
    assert other["bits"].value.low > other["bits"].floor.high + 0.5
    assert other["divergence"].value.low > other["divergence"].floor.high
    dull = evaluate(["abcd" * 10] * 60, real, resamples=40)
    cheap = {m.name: m for m in dull.measured}
    assert cheap["bits"].value.high < cheap["bits"].floor.low  # likely, and worth nothing
    assert cheap["distinct"].value.high < cheap["distinct"].floor.low
    assert "near the floor" in str(dull) and dull.kind == "text" and dull.rows == 60


def test_notes_on_texts() -> None:
    real = texts(100, 40, 0)
    copied = evaluate([real[3], *texts(29, 40, 1, "abcx"), "short"], real, resamples=40)
    assert "1 of 30 samples stand in the data as they are" in copied.notes
    assert "1 samples of fewer than 40 characters are left out" in copied.notes
    assert "1 character of the samples not in the data: ['x']" in copied.notes
    assert any("THE SAME" in note for note in evaluate(real, real, resamples=40).notes)
    loud = [text.upper() for text in real]
    plain = evaluate(texts(30, 40, 1), loud, metrics=["entropy"], resamples=40)
    assert any("normalise='letters' is missing" in note for note in plain.notes)
    lower = evaluate(texts(30, 40, 1), loud, metrics="bits", normalise="letters", resamples=40)
    assert lower.measured[0].value.estimate < 1.1 and not any("missing" in n for n in lower.notes)


def test_texts_that_cannot_be_evaluated() -> None:
    real = texts(100, 40, 0)
    for call, error, message in (
        (lambda: evaluate(real[:5], real), ValueError, "samples must be at least 16 texts"),
        (lambda: evaluate([], real), ValueError, "samples must be at least 16 texts"),
        (lambda: evaluate(real, real[:20]), ValueError, "against must have 32 stretches of 40"),
        (lambda: evaluate(real, torch.zeros(99, 3)), TypeError, "against must be the place of a"),
        (lambda: evaluate(torch.zeros(99, 3), real), ValueError, "against is text and samples"),
        (lambda: evaluate(real, real, metrics="kid"), ValueError, "there is no 'kid' of texts"),
        (lambda: evaluate(real, real, channels=1), ValueError, "channels is not of texts, got 1"),
        (
            lambda: evaluate(torch.zeros(99, 3), torch.ones(99, 3), normalise="lower"),
            ValueError,
            "normalise is of texts",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
