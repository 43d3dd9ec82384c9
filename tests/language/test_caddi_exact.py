"""CaDDi against closed forms, enumerations and laws."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from fluvial.core.categorical import schedules
from fluvial.core.noise import KeyedNoise
from fluvial.language import CaDDi
from fluvial.language.caddi import IndependentLevels
from fluvial.language.caddi.context import Calls, block_mask, kept_levels
from fluvial.language.caddi.sampling import verify
from fluvial.networks import CausalTransformer

from .toys import (
    NOISE,
    chances,
    exact,
    expected_bound,
    law,
    random_model,
    random_network,
    sequences,
    tokens,
    trajectories,
)

# Levels


def test_derived_schedule() -> None:
    """alpha_k = 1 / (k + 1), alpha_T = 0; what is revealed falls in equal steps (check 1)."""
    levels = IndependentLevels(3, steps=8)
    wanted = torch.tensor([1 / (k + 1) for k in range(8)] + [0.0], dtype=torch.float64)
    assert torch.allclose(levels.alphas, wanted, rtol=0, atol=1e-15)
    assert levels.alphas.dtype == torch.float64 and levels.alphas[0] == 1
    eighths = torch.arange(8, -1, -1, dtype=torch.float64) / 8
    assert torch.allclose(levels.revealed(), eighths, rtol=0, atol=1e-15)
    assert IndependentLevels.schedule(1).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    "base", [schedules.Cosine(), schedules.Power(2.0), schedules.Linear(end=0.1)], ids=str
)
def test_any_schedule_is_matched(base: Any) -> None:
    """The trajectory from k on shows as many tokens as the chain at k."""
    alphas = IndependentLevels.schedule(6, base)
    t = torch.arange(7, dtype=torch.float64) / 6
    levels = IndependentLevels(2, steps=6, alphas=alphas)
    assert torch.allclose(levels.revealed(), base.alpha(t), rtol=0, atol=1e-14)


def test_equal_information() -> None:
    """I(x_0; x_{k:T}) of the levels is I(x_0; x_k) of the chain, whatever the data."""
    p, steps = law(2, 2), 3
    process = IndependentLevels(2, steps=steps)
    data = sequences(2, 2)
    for k in range(1, steps + 1):
        # all x_{k:T}; levels below k are summed over by leaving them out
        part = IndependentLevels(2, steps=steps - k + 1, alphas=[1.0, *process.alphas[k:].tolist()])
        paths = torch.stack(list(trajectories(part, 2)))
        joint = torch.stack(
            [
                w * chances(part, x.expand(len(paths), 2), paths)
                for w, x in zip(p, data, strict=True)
            ]
        )
        b = 1 - k / steps
        chain = IndependentLevels(2, steps=1, alphas=[1.0, b])
        one = torch.stack(list(trajectories(chain, 2)))
        other = torch.stack(
            [w * chances(chain, x.expand(len(one), 2), one) for w, x in zip(p, data, strict=True)]
        )

        def information(joint: Tensor) -> float:
            split = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
            return float(torch.special.xlogy(joint, joint / split.clamp(min=1e-300)).sum())

        assert abs(information(joint) - information(other)) < 1e-14


@pytest.mark.parametrize("source", ["absorbing", "uniform"])
def test_levels_have_their_law_and_are_independent(source: Any) -> None:
    process = IndependentLevels(3, steps=3, source=source, alphas=[1.0, 0.7, 0.4, 0.2])
    count = 40_000
    x0 = torch.tensor([[1, 2]]).expand(count, 2)
    x = process.sample(x0, NOISE)
    assert x.shape == (count, 3, 2) and x.dtype == torch.int64
    code = (x * process.states ** torch.arange(6).reshape(3, 2)).flatten(1).sum(1)
    paths = torch.stack(list(trajectories(process, 2)))
    order = (paths * process.states ** torch.arange(6).reshape(3, 2)).flatten(1).sum(1)
    q = torch.zeros(process.states**6, dtype=torch.float64)
    q[order] = chances(process, x0[:1].expand(len(paths), 2), paths)
    assert abs(float(q.sum()) - 1) < 1e-12
    seen = torch.bincount(code, minlength=len(q)).double()
    big = q * count >= 5
    rest = torch.tensor([float(count * q[~big].sum())])
    f_obs = torch.cat([seen[big], seen[~big].sum()[None]])
    f_exp = torch.cat([count * q[big], rest.double()])
    keep = f_exp > 0
    assert stats.chisquare(f_obs[keep], f_exp[keep]).pvalue > 1e-3
    # some levels, and a level made again
    some = process.sample(x0, NOISE.at(1), torch.tensor([[2, 3]]).expand(count, 2))
    shown = (some == x0[:, None]).double().mean((0, 2))
    extra = 0.0 if source == "absorbing" else 1 / 3
    wanted = torch.tensor([a + (1 - a) * extra for a in (0.4, 0.2)]).double()
    assert ((shown - wanted).abs() < 5 * math.sqrt(0.25 / (2 * count))).all()
    again = process.renoise(x0, 2, NOISE.at(2))
    assert abs(float((again == x0).double().mean()) - wanted[0]) < 5 * math.sqrt(0.25 / 2 / count)


def test_noise_of_a_row_is_its_own() -> None:
    for source in ("absorbing", "uniform"):
        process = IndependentLevels(5, steps=4, source=source)  # type: ignore[arg-type]
        x0 = tokens(6)
        rows = torch.tensor([4, 1])
        assert torch.equal(
            process.sample(x0, NOISE)[rows], process.sample(x0[rows], NOISE.rows(rows))
        )
        assert torch.equal(
            process.renoise(x0, 2, NOISE)[rows], process.renoise(x0[rows], 2, NOISE.rows(rows))
        )


@pytest.mark.parametrize("source", ["absorbing", "uniform"])
def test_terms_are_divergences(source: Any) -> None:
    """Against the sum over all symbols, written out; check 3."""
    process = IndependentLevels(4, steps=3, source=source, alphas=[1.0, 0.3, 0.0, 0.5])
    log_p = NOISE.normal(torch.empty(2, 3, 5, 4, dtype=torch.float64)).log_softmax(-1)
    x0 = tokens(6, 5, 4).reshape(2, 3, 5)
    k = torch.arange(1, 4)[:, None]
    terms = process.terms(log_p, x0, k)

    def noised(p: Tensor, alpha: float) -> Tensor:
        if source == "absorbing":
            return torch.cat([alpha * p, torch.full_like(p[..., :1], 1 - alpha)], -1)
        return alpha * p + (1 - alpha) / 4

    one = torch.nn.functional.one_hot(x0, 4).double()
    for i, alpha in enumerate([1.0, 0.3, 0.0]):
        q, p = noised(one[:, i], alpha), noised(log_p[:, i].exp(), alpha)
        wanted = (torch.special.xlogy(q, q) - torch.special.xlogy(q, p)).sum(-1)
        assert torch.allclose(terms[:, i], wanted, rtol=0, atol=1e-14)
    if source == "absorbing":
        log_p = torch.tensor([[[0.6, 0.4, 0.0, 0.0]]], dtype=torch.float64).log()
        value = process.terms(log_p, torch.zeros(1, 1, dtype=torch.int64), torch.tensor(2))
        assert abs(float(value) - 0.3 * math.log(1 / 0.6)) < 1e-15 and abs(value - 0.153248) < 1e-6


def test_terms_have_gradients_where_alpha_is_zero_or_one() -> None:
    process = IndependentLevels(3, steps=3, source="uniform", alphas=[1.0, 0.0, 0.5, 0.0])
    logits = NOISE.normal(torch.empty(2, 3, 4, 3)).requires_grad_()
    terms = process.terms(
        logits.log_softmax(-1), tokens(6, 4, 3).reshape(2, 3, 4), torch.arange(1, 4)[:, None]
    )
    terms.sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert (logits.grad[:, 1] == 0).all() and (logits.grad[:, 0] != 0).all()


def test_prior() -> None:
    x0 = tokens(3)
    assert IndependentLevels(5, steps=4).prior(x0).tolist() == [0.0] * 3
    ends = [1.0, 0.5, 0.3]
    assert IndependentLevels(5, steps=2, alphas=ends).prior(x0).isinf().all()
    q = torch.tensor([0.3 + 0.7 / 5] + [0.7 / 5] * 4, dtype=torch.float64)
    wanted = 6 * float((q * (5 * q).log()).sum())
    value = IndependentLevels(5, steps=2, source="uniform", alphas=ends).prior(x0)
    assert torch.allclose(value, torch.full_like(value, wanted), rtol=1e-14)


# Bounds


@pytest.mark.parametrize("variant", ["block", "ar"])
def test_bound_of_one_token_is_its_entropy(variant: Any) -> None:
    """Check 2: V = 2, p = (0.7, 0.3), T = 3, all visibility patterns."""
    p = torch.tensor([0.7, 0.3], dtype=torch.float64)
    bound, plain = expected_bound(exact(p, 2, 1, 3, variant=variant), p)
    assert abs(bound - 0.6108643020548935) < 1e-12 and abs(plain - bound) < 1e-12


# augmented, the exact network counts the copy as one more observation, which is none of masks
@pytest.mark.parametrize(
    ("source", "augmented"), [("absorbing", False), ("uniform", False), ("absorbing", True)]
)
def test_bound_of_blocks_is_a_bound(source: Any, augmented: bool) -> None:
    """Against the divergences of p(x_{k-1} | x_{k:T}) enumerated, and above the entropy."""
    p = law(2, 2)
    model = exact(p, 2, 2, 2, source, augmented=augmented)
    bound, _ = expected_bound(model, p)
    entropy = float(-(p * p.log()).sum())
    assert entropy + 1e-4 < bound < 1.3 * entropy
    data = sequences(2, 2)
    process, total = model.levels, 0.0
    for levels in trajectories(process, 2):
        weights = p * chances(process, data, levels.expand(4, 2, 2))
        for k in (1, 2):
            mu = model.predict(levels[None], k)[0].exp()  # (L, V)
            alpha = float(process.alphas[k - 1])
            for w, x in zip(weights, data, strict=True):
                if w == 0:
                    continue
                one = torch.nn.functional.one_hot(x, 2).double()
                pad = source == "absorbing"
                q, r = (
                    torch.cat([alpha * v, torch.full((2, 1), 1 - alpha).double()], 1)
                    if pad
                    else alpha * v + (1 - alpha) / 2
                    for v in (one, mu)
                )
                some = q > 0
                total += float(w * (q[some] * (q[some] / r[some]).log()).sum())
    assert abs(total - bound) < 1e-12


def test_bound_of_autoregressive_guesses() -> None:
    """Two equal fair bits at T = 2: alpha times the cross-entropy makes 0.75 of the one bit."""
    p = torch.tensor([0.5, 0.0, 0.0, 0.5], dtype=torch.float64)
    bound, plain = expected_bound(exact(p, 2, 2, 2, variant="ar"), p)
    assert abs(plain / math.log(2) - 0.75) < 1e-12
    assert abs(bound / math.log(2) - 1.0) < 1e-12
    for source in ("absorbing", "uniform"):
        p = law(2, 2, seed=3)
        entropy = float(-(p * p.log()).sum())
        bound, _ = expected_bound(exact(p, 2, 2, 2, source, variant="ar"), p)  # type: ignore[arg-type]
        assert bound > entropy + 1e-4


@pytest.mark.parametrize("source", ["absorbing", "uniform"])
@pytest.mark.parametrize("options", [{}, {"keep": 1}, {"augmented": True}, {"variant": "ar"}])
def test_bound_of_any_network_is_above_its_likelihood(source: Any, options: Any) -> None:
    """Of every sequence; p(x_0) is the sum over all trajectories and guesses."""
    model = random_model(
        network={"vocabulary": 3}, classes=2, length=2, steps=2, source=source, **options
    )
    process, data = model.levels, sequences(2, 2)
    paths = torch.stack(list(trajectories(process, 2)))
    count, last = len(paths), paths[:, -1]
    p = (
        (last == 2).all(1).double()
        if source == "absorbing"
        else torch.full((count,), 0.25).double()
    )
    for k in (2, 1):
        guess = []
        for x in data.unsqueeze(1).expand(4, count, 2):
            log_p = model.predict(paths, k, tokens=x if model.variant == "ar" else None)
            guess.append(log_p.gather(-1, x[..., None])[..., 0].sum(1).exp())
        if k == 2:
            alphas = [1.0, float(process.alphas[1])]
            one = IndependentLevels(2, steps=1, source=source, alphas=alphas)
            shown = [chances(one, x.expand(count, 2), paths[:, :1]) for x in data]
            p = p * sum(g * q for g, q in zip(guess, shown, strict=True))
    likelihood = torch.stack([(p * g).sum() for g in guess])
    assert abs(float(likelihood.sum()) - 1) < 1e-12
    for x, wanted in zip(data, likelihood, strict=True):
        weight = chances(process, x.expand(count, 2), paths)
        some = weight > 0
        nats = model.nats(x.expand(int(some.sum()), 2), paths[some]).sum(1)
        assert float(weight[some] @ nats) > -float(wanted.log())


def test_one_level_is_the_likelihood() -> None:
    p = law(3, 2)
    model = exact(p, 3, 2, 1, variant="ar")
    data = sequences(3, 2)
    bound = model.bound(data, NOISE, batch_size=4)
    assert torch.allclose(bound.nats, -p.log(), rtol=0, atol=1e-12)
    assert bound.name == "likelihood of an autoregressive model"
    assert bound.tokens.tolist() == [2] * 9


def test_bound_is_the_mean_over_levels() -> None:
    p = law(3, 2, seed=1)
    model = exact(p, 3, 2, 3)
    count = 4000
    x0 = sequences(3, 2)[
        torch.multinomial(p, count, True, generator=torch.Generator().manual_seed(0))
    ]
    bound = model.bound(x0, NOISE, batch_size=1000)
    wanted, _ = expected_bound(model, p)
    assert abs(float(bound.nats.mean()) - wanted) < 4 * float(bound.nats.std()) / math.sqrt(count)
    assert str(bound).endswith("(ELBO at T = 3, independent levels)")


def test_less_context_bounds_no_better() -> None:
    p = law(2, 2, seed=5)
    bounds = [
        # of which level 4 shows nothing
        expected_bound(exact(p, 2, 2, 4, keep=keep, kept=kept), p)[0]
        for keep, kept in ((None, "last"), (2, "last"), (1, "last"), (3, "spread"))
    ]
    whole, two, one, spread = bounds
    entropy = float(-(p * p.log()).sum())
    assert entropy < whole < two < one and whole < spread < one


# Masks and places


def test_masks() -> None:
    """Check 4, of blocks."""
    mask = block_mask((2, 1), (2, 1), 2, lambda k: kept_levels(k, 2))
    rows = [[True, True, False, False]] * 2 + [[True] * 4] * 2
    assert mask.tolist() == rows
    mask = block_mask((3, 2, 1), (3, 2, 1), 1, lambda k: kept_levels(k, 3, 2))
    assert mask.int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_kept_levels() -> None:
    assert kept_levels(2, 5) == (5, 4, 3, 2)
    assert kept_levels(1, 8, 3) == (3, 2, 1) and kept_levels(7, 8, 3) == (8, 7)
    assert kept_levels(1, 8, 3, "spread") == (8, 5, 1)
    assert kept_levels(3, 8, 1, "spread") == (3,)
    for k in range(1, 65):
        for keep in (2, 3, 5, 64):
            seen = kept_levels(k, 64, keep, "spread")
            assert len(seen) == min(keep, 65 - k) == len(set(seen))
            assert seen[-1] == k and seen[0] == 64 and list(seen) == sorted(seen, reverse=True)


def test_augmented_predictions_see_the_block_and_what_is_before_in_the_copy() -> None:
    """Check 4: L = 4, 3 blocks and a copy."""
    model = random_model(length=4, steps=3, augmented=True)
    levels = tokens(3, 4).reshape(1, 3, 4)
    copy = tokens(1, 4, tag="copy")

    def predict(levels: Tensor, copy: Tensor) -> Tensor:
        with torch.no_grad():
            return Calls(model, None, keep=False).tail(levels, 1, copy[:, :-1], at=1)[0]

    out = predict(levels, copy)
    for j in range(4):
        changed = levels.clone()
        changed[0, 0, j] = (levels[0, 0, j] + 1) % 5
        assert ((predict(changed, copy) - out).abs().amax(-1) > 1e-6).all()
        other = copy.clone()
        other[0, j] = (copy[0, j] + 1) % 5
        moved = (predict(levels, other) - out).abs().amax(-1)
        assert (moved[: j + 1] == 0).all() and (moved[j + 1 :] > 1e-6).all()


def test_one_level_is_the_plain_network() -> None:
    """Check 6: T = 1, prompt dropped, is the autoregressive network on the start and the tokens."""
    x = tokens()
    start = torch.full((5, 1), 5)
    for mode in ("split", "additive"):
        network = random_network(levels=mode)
        model = CaDDi(network, classes=5, length=6, steps=1, variant="ar")
        plain = CausalTransformer(**network.args | {"levels": mode}).double()
        plain.load_state_dict(network.state_dict())
        got = model.predict(torch.full((5, 1, 6), 5), 1, tokens=x)
        wanted = plain(torch.cat([start, x[:, :-1]], 1))[..., :5].log_softmax(-1)
        assert torch.allclose(got, wanted, rtol=0, atol=1e-12)
    base = CausalTransformer(**network.args | {"levels": None}).double()
    base.load_state_dict(network.state_dict())
    assert torch.allclose(base(x), network(x), rtol=0, atol=1e-12)


# Sampling


def fits(draws: Tensor, p: Tensor, classes: int) -> float:
    """The p-value of sequences under a law of all of them."""
    length = draws.shape[1]
    code = (draws * classes ** torch.arange(length - 1, -1, -1)).sum(1)
    seen = torch.bincount(code, minlength=len(p))
    return float(stats.chisquare(seen.numpy(), (p * len(draws)).numpy()).pvalue)


@pytest.mark.parametrize("source", ["absorbing", "uniform"])
@pytest.mark.parametrize("speculative", ["match", "jacobi", "off"])
def test_exact_autoregressive_guesses_sample_the_law(source: Any, speculative: Any) -> None:
    p = law(3, 2)
    model = exact(p, 3, 2, 3, source, variant="ar")
    x = model.sample(6000, noise=KeyedNoise(3), speculative=speculative, batch_size=3000)
    assert fits(x, p, 3) > 1e-3


def test_exact_blocks_sample_what_they_should() -> None:
    """The law of two levels, summed over the level between."""
    p = law(2, 2, seed=2)
    model = exact(p, 2, 2, 2)
    process, data = model.levels, sequences(2, 2)
    blank = torch.full((1, 2, 2), 2)
    first = model.predict(blank, 2)[0].exp()
    guess = torch.stack([first[0, g[0]] * first[1, g[1]] for g in data])
    wanted = torch.zeros(4, dtype=torch.float64)
    for level in sequences(3, 2):
        levels = torch.stack([level, torch.tensor([2, 2])])
        weight = (guess * chances(process, data, levels.expand(4, 2, 2))).sum()
        mu = model.predict(levels[None], 1)[0].exp()
        wanted += weight * torch.stack([mu[0, x[0]] * mu[1, x[1]] for x in data])
    x = model.sample(20_000, noise=KeyedNoise(5), batch_size=20_000)
    assert fits(x, wanted, 2) > 1e-3
    assert fits(x, p, 2) < 1e-3  # two levels are too few for the law itself
    single = law(4, 1)
    x = exact(single, 4, 1, 3, "uniform").sample(20_000, noise=KeyedNoise(6), batch_size=20_000)
    assert fits(x, single, 4) > 1e-3


def test_the_match_rule_is_exact_and_the_ratio_rule_is_not() -> None:
    """Check 5: a token made of the draft is shown half the time; 4e5 draws."""
    count = 400_000
    like = torch.empty(count, 1, dtype=torch.float64)
    draft = (NOISE.uniform(like, "draft") < 0.5).long()
    shown = NOISE.uniform(like, "shown") < 0.5
    seen = torch.where(draft == 1, 0.9, 0.1)
    one = torch.where(shown, seen, 0.7).double()
    p = torch.stack([1 - one, one], -1)
    u, v = NOISE.uniform(like, "u"), NOISE.uniform(like, "v")
    y, accepted = verify(p, draft, u)
    assert torch.equal(accepted, y == draft)
    assert abs(float((y == draft)[shown].double().mean()) - 0.9) < 0.003
    assert abs(float(y[~shown].double().mean()) - 0.7) < 0.003
    y, accepted = verify(p, draft, u, rule="ratio", q=torch.full_like(p, 0.5), v=v)
    assert float((y == draft)[shown].double().mean()) == 1.0
    # where the draft is a draw of q given all, as where nothing is shown, the rule is right
    assert abs(float(y[~shown].double().mean()) - 0.7) < 0.003
    assert (accepted | (y != draft)).all()


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("options", [{}, {"keep": 2}, {"keep": 2, "kept": "spread"}], ids=str)
def test_drafts_change_nothing(options: Any, steps: int) -> None:
    """With equal noise the match rule gives what decoding without drafts gives, in fewer calls."""
    model = random_model(variant="ar", steps=steps, **options)
    fast, quick = model.sample(40, noise=NOISE, trace=True, temperature=0.3)
    slow, long = model.sample(40, noise=NOISE, trace=True, temperature=0.3, speculative="off")
    assert torch.equal(fast, slow) and torch.equal(quick.levels, long.levels)
    assert torch.equal(quick.guesses, long.guesses)
    assert (long.passes == 6).all() and (quick.passes[:, -1] == 6).all()
    if steps > 1:
        assert quick.passes[:, :-1].double().mean() < 5
    at_once, some = model.sample(40, noise=NOISE, trace=True, temperature=0.3, speculative="jacobi")
    assert torch.equal(at_once, slow) and torch.equal(some.guesses, long.guesses)
    assert (some.passes <= 6).all() and some.passes.double().mean() < quick.passes.double().mean()
    alone = [
        model.sample(
            1, noise=NOISE.rows(torch.tensor([row])), temperature=0.3, speculative="jacobi"
        )
        for row in (0, 7, 39)
    ]
    assert torch.equal(torch.cat(alone), slow[[0, 7, 39]])


def test_tokens_drawn_at_once_settle_in_one_call_where_they_do_not_depend_on_others() -> None:
    """Independent tokens are right at the first call; the second sees that none has changed."""
    one = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    p = (one[:, None] * one).flatten()
    _, trace = exact(p, 3, 2, 3, variant="ar").sample(
        200, noise=NOISE, trace=True, speculative="jacobi"
    )
    assert (trace.passes <= 2).all()
    assert not trace.passes[:, 1:].eq(1).all() and trace.passes.eq(1).any()


def test_greedy_drafts() -> None:
    """Check 8: a draft that is the answer takes one call; the output is plain greedy decoding."""
    model = random_model(variant="ar")
    fast, trace = model.sample(20, noise=NOISE, trace=True, speculative="greedy")
    slow, plain = model.sample(20, noise=NOISE, trace=True, temperature=0.0, speculative="off")
    assert torch.equal(fast, slow) and torch.equal(trace.levels, plain.levels)
    same = (trace.guesses[:, :-1] == trace.guesses[:, 1:]).all(2)
    assert same.any() and not same.all()
    assert (trace.passes[:, :-1][same] == 1).all()
    # level by level, from the trace, token by token
    for k in range(4, 0, -1):
        guess = torch.zeros(20, 6, dtype=torch.int64)
        for i in range(6):
            guess[:, i] = model.predict(trace.levels, k, tokens=guess)[:, i].argmax(-1)
        assert torch.equal(guess, trace.guesses[:, k - 1])
    sure = torch.full((9,), 1e-9, dtype=torch.float64)
    sure[5] = 1 - 8e-9
    x, trace = exact(sure, 3, 2, 3, variant="ar").sample(
        4, noise=NOISE, trace=True, speculative="greedy"
    )
    assert x.tolist() == [[1, 2]] * 4 and trace.passes.tolist() == [[1, 1, 2]] * 4
    assert trace.revised.tolist() == [0.0, 0.0, 0.0]
