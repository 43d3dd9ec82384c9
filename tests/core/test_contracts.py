"""Every toy through `simulate`: with and without steering, whole and in two batches, by its law."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.ode import Euler, Heun
from fluvial.core.gaussian.paths import VE, AlphaSigmaPath, Linear, VPCosine, VPLinear
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import GaussianPath, Run, Scale, Steering, batch_size, leaves, take
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import grid_pairs, uniform_grid

from .toys import (
    AbsorbingTokens,
    BlockField,
    BlockGaussian,
    Counting,
    FeynmanKac,
    Infill,
    Langevin,
    Projection,
    Remember,
    TokenField,
    VectorGaussian,
    assert_law,
    assert_shares,
    token_state,
)

PATHS = [Linear(), VPLinear(), VPCosine(), VE(0.1, 5.0)]
MEAN = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
STD = torch.tensor([0.3, 1.0, 1.7], dtype=torch.float64)
BLOCK_MEAN = torch.tensor([1.0, 0.2], dtype=torch.float64)
BLOCK_COV = torch.tensor([[0.5, 0.1], [0.1, 0.3]], dtype=torch.float64)
PROBS = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
NOISE = KeyedNoise(7)


def name(path: object) -> str:
    return type(path).__name__


def time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def vectors(path: AlphaSigmaPath, batch: int, seed: int = 7) -> Tensor:
    return path.source(torch.empty(batch, 3, dtype=torch.float64), KeyedNoise(seed))


def padded(x: Any, width: int) -> dict[str, Tensor]:
    pad = (0, width - x["mask"].shape[1])
    return {
        "tokens": torch.nn.functional.pad(x["tokens"], pad, value=len(PROBS)),
        "mask": torch.nn.functional.pad(x["mask"], pad),
    }


def test_protocols() -> None:
    for path in [*PATHS, BlockGaussian()]:
        assert isinstance(path, GaussianPath)
        assert all(isinstance(scale, Scale) for scale in path.marginal(time(0.5)))
    assert not isinstance(AbsorbingTokens(3), GaussianPath)


# The law of the results


def ancestral_moments(toy: VectorGaussian, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of what `Ancestral` makes of the source; Bayes' rule in precisions."""
    path = toy.path
    mean, var = torch.zeros_like(MEAN), path.sigma(time(1)).square().expand(3)
    for t, s in pairs:
        alpha, sigma, alpha_s, sigma_s = path.alpha(t), path.sigma(t), path.alpha(s), path.sigma(s)
        ratio = alpha / alpha_s
        step = sigma.square() - (ratio * sigma_s).square()
        cov = 1 / (1 / sigma_s.square() + ratio.square() / step)  # 0 at s = 0
        on_x, on_clean = cov * ratio / step, alpha_s - ratio * cov * ratio / step * alpha_s
        gain = alpha * STD.square() / ((alpha * STD).square() + sigma.square())
        clean = MEAN + gain * (mean - alpha * MEAN)
        mean = on_x * mean + on_clean * clean
        var = (on_x + on_clean * gain).square() * var + cov
    return mean, var


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_law_of_ancestral_vector(path: AlphaSigmaPath) -> None:
    toy = VectorGaussian(path, MEAN, STD)
    pairs = uniform_grid(8)
    x = simulate(vectors(path, 20_000), pairs, Ancestral(), path, toy, KeyedNoise(1))
    mean, var = ancestral_moments(toy, pairs)
    assert_law(x, mean, var.sqrt())


@pytest.mark.parametrize("path", [Linear(), VPLinear()], ids=name)
def test_ancestral_chain_tends_to_the_data(path: AlphaSigmaPath) -> None:
    toy = VectorGaussian(path, MEAN, STD)
    errors = []
    for steps in (200, 400):
        _, var = ancestral_moments(toy, uniform_grid(steps))
        errors.append(float((var - STD.square()).abs().max()))
    assert errors[1] < 0.05
    assert 0.45 < errors[1] / errors[0] < 0.55  # first order


@pytest.mark.parametrize("path", [Linear(), VPCosine()], ids=name)
def test_law_of_the_flow(path: AlphaSigmaPath) -> None:
    toy = VectorGaussian(path, MEAN, STD, "velocity")
    x = simulate(vectors(path, 5_000), uniform_grid(60), Heun(), path, toy, NOISE)
    exact = toy.flow(vectors(path, 5_000), time(1), time(0))
    assert (x - exact).abs().max() < 0.02  # the standard errors below are twice that and more
    assert_law(exact, MEAN, STD)


def block_moments(field: BlockField, pairs: Tensor) -> tuple[Tensor, Tensor]:
    path = field.path
    mean = torch.zeros(2, dtype=torch.float64)
    cov = torch.diag(torch.tensor([1, path.mass], dtype=torch.float64))
    t, s = pairs.T
    gains, extras = path.gain(t, s)
    scales, scales_s = path.flow_matrix(t), path.flow_matrix(s)
    centres, spreads = field.moments(t)
    guesses = field.cov @ scales.mT @ torch.linalg.inv(spreads)
    for k in range(len(pairs)):
        scale, gain, guess = scales[k], gains[k], guesses[k]
        clean = field.mean + guess @ (mean - centres[k])
        mean = scales_s[k] @ clean + gain @ (mean - scale @ clean)
        step = scales_s[k] @ guess + gain @ (torch.eye(2, dtype=torch.float64) - scale @ guess)
        cov = step @ cov @ step.mT + extras[k]
    return mean, cov


def block_source(batch: int) -> Tensor:
    return BlockGaussian().source(torch.empty(batch, 2, 3, dtype=torch.float64), NOISE)


def test_law_of_ancestral_block() -> None:
    path = BlockGaussian()
    field = BlockField(path, BLOCK_MEAN, BLOCK_COV, "clean")
    pairs = uniform_grid(10)
    x = simulate(block_source(8_000), pairs, Ancestral(), path, field, KeyedNoise(1))
    assert x.shape == (8_000, 3)  # momentum is dropped
    mean, cov = block_moments(field, pairs)
    assert_law(x, mean[0], cov[0, 0].sqrt())
    errors = [
        float((block_moments(field, uniform_grid(steps))[1] - BLOCK_COV).abs().max())
        for steps in (1_500, 3_000)
    ]
    assert errors[1] < 0.04
    assert errors[1] < 0.7 * errors[0]  # towards 1/2: the momentum is fast next to these steps


def test_law_of_tokens() -> None:
    path, state = AbsorbingTokens(3), token_state(10_000, 2, 3)
    x = simulate(
        path.source(state, NOISE), uniform_grid(5), Ancestral(), path, TokenField(PROBS), NOISE
    )
    pair = x["tokens"][:, 0] * 3 + x["tokens"][:, 1]
    assert_shares(pair, torch.outer(PROBS, PROBS).flatten())


def test_tokens_are_absorbed_with_the_survival_probability() -> None:
    path = AbsorbingTokens(3)
    x = {"tokens": torch.zeros(20_000, 1, dtype=torch.long), "mask": torch.ones(20_000, 1).bool()}
    pairs = grid_pairs([0.0, 0.3, 0.6])
    x = simulate(x, pairs, Ancestral(), path, TokenField(PROBS), NOISE)
    assert_shares((x["tokens"][:, 0] == 3).long(), torch.tensor([0.4, 0.6]).double())


def test_growing_state() -> None:
    path, batch = AbsorbingTokens(3, grow=0.25), 10_000
    x = simulate(
        path.source(token_state(batch, 1, 3), NOISE),
        uniform_grid(4),
        Remember(),
        path,
        TokenField(PROBS),
        NOISE,
    )
    assert x["mask"].shape == (batch, 4)  # three of the four steps end at s > 0
    assert torch.equal(x["tokens"] == 3, ~x["mask"])
    gained = x["mask"].sum(1) - 1
    binomial = torch.tensor([math.comb(3, k) * 0.25**k * 0.75 ** (3 - k) for k in range(4)])
    assert_shares(gained, binomial.double())
    assert_shares(x["tokens"][x["mask"]], PROBS)


# Whole and split: a row does not depend on its batch


def run_vector(ids: Tensor, path: AlphaSigmaPath, kind: str, sampler: Any, steer: Any) -> Tensor:
    toy = VectorGaussian(path, MEAN, STD, kind)
    x = vectors(path, 12)[ids]
    return simulate(x, uniform_grid(5), sampler, path, toy, NOISE.rows(ids), steer)


def run_block(ids: Tensor, kind: str, sampler: Any) -> Tensor:
    path = BlockGaussian()
    field = BlockField(path, BLOCK_MEAN, BLOCK_COV, kind)
    x = block_source(12)[ids]
    return simulate(x, uniform_grid(5), sampler, path, field, NOISE.rows(ids))


def run_tokens(ids: Tensor, grow: float, steer: Steering | None) -> dict[str, Tensor]:
    path = AbsorbingTokens(3, grow)
    x = path.source(token_state(len(ids), 3, 3), NOISE)
    field = TokenField(PROBS)
    return padded(simulate(x, uniform_grid(4), Ancestral(), path, field, NOISE.rows(ids), steer), 6)


KNOWN = torch.tensor([[-1, 2, -1]])
BIT_FOR_BIT: dict[str, Callable[[Tensor], Any]] = {
    "vector ancestral": lambda ids: run_vector(ids, Linear(), "clean", Ancestral(), None),
    "vector euler": lambda ids: run_vector(ids, VPLinear(), "score", Euler(), None),
    "vector heun": lambda ids: run_vector(ids, VPCosine(), "velocity", Heun(), None),
    "tokens": lambda ids: run_tokens(ids, 0.0, None),
    "tokens growing": lambda ids: run_tokens(ids, 0.4, None),
    "tokens infilled": lambda ids: run_tokens(ids, 0.0, Infill(KNOWN)),
    "tokens resampled": lambda ids: run_tokens(ids, 0.0, FeynmanKac(1.0, 3)),
    "tokens growing and resampled": lambda ids: run_tokens(ids, 0.4, FeynmanKac(1.0, 3)),
}
ROUNDED: dict[str, Callable[[Tensor], Any]] = {  # products of matrices: sums in another order
    "block ancestral": lambda ids: run_block(ids, "clean", Ancestral()),
    "block heun": lambda ids: run_block(ids, "score", Heun()),
    "vector projected": lambda ids: run_vector(
        ids, Linear(), "clean", Ancestral(), Projection(torch.tensor([1.0, 2.0, -1.0]), 0.5)
    ),
}


@pytest.mark.parametrize("case", [*BIT_FOR_BIT, *ROUNDED])
def test_split_batch(case: str) -> None:
    run = {**BIT_FOR_BIT, **ROUNDED}[case]
    ids = torch.arange(12)
    whole, parts = leaves(run(ids)), [leaves(run(part)) for part in (ids[:3], ids[3:])]
    for i, leaf in enumerate(whole):
        joined = torch.cat([part[i] for part in parts])
        assert len(joined.unique(dim=0)) > 1 or leaf.dtype == torch.bool
        if case in BIT_FOR_BIT:
            assert torch.equal(leaf, joined)
        else:
            torch.testing.assert_close(leaf, joined, rtol=1e-12, atol=1e-12)


def test_step_k_draws_with_the_noise_of_step_k() -> None:
    path = Linear()
    toy = VectorGaussian(path, MEAN, STD)
    x = vectors(path, 4)
    for k, (t, s) in enumerate(uniform_grid(3)):
        x = path.posterior(x, toy(x, t), t, s, NOISE.at(k))
    whole = simulate(vectors(path, 4), uniform_grid(3), Ancestral(), path, toy, NOISE)
    assert torch.equal(whole, x)


def test_times_and_conditions_reach_the_parts() -> None:
    seen: list[Any] = []

    class Watching(Linear):
        def posterior(self, x: Any, clean: Any, t: Any, s: Any, noise: Any, **cond: Any) -> Any:
            seen.append((t, s, cond))
            return super().posterior(x, clean, t, s, noise, **cond)

    path = Watching()
    field = Counting(VectorGaussian(path, MEAN, STD))
    x = vectors(path, 4).float()
    pairs = torch.tensor([[1, 0.1], [0.1, 0]])  # float32
    out = simulate(x, pairs, Ancestral(), path, field, NOISE, label=3)
    assert out.dtype == torch.float32
    assert [cond for *_, cond in seen] == field.calls == [{"label": 3}] * 2
    for (t, s, _), pair in zip(seen, pairs.double(), strict=True):
        assert t.dtype == s.dtype == torch.float64 and t.ndim == s.ndim == 0
        assert (t, s) == tuple(pair)


# Pairs that rise or stand still


@pytest.mark.parametrize(("sampler", "order"), [(Euler(), 1), (Heun(), 3)])
@pytest.mark.parametrize("path", [Linear(), VPLinear(1.0, 4.0)], ids=name)
def test_encode_and_decode(path: AlphaSigmaPath, sampler: Any, order: int) -> None:
    """A method of even order p undoes itself to order p + 1: its leading errors cancel."""
    toy = VectorGaussian(path, MEAN, STD, "velocity")
    x = MEAN + STD * vectors(path, 16)
    errors = []
    for steps in (32, 64):
        times = torch.linspace(0.05, 1, steps + 1, dtype=torch.float64)
        pairs = grid_pairs(torch.cat([times, times.flip(0)[1:]]))
        back = simulate(x, pairs, sampler, path, toy, NOISE)
        errors.append(float((back - x).abs().max()))
    assert errors[1] > 1e-10
    assert abs(math.log2(errors[0] / errors[1]) - order) < 0.15


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_ancestral_encodes_by_the_transition(path: AlphaSigmaPath) -> None:
    toy = VectorGaussian(path, MEAN, STD)
    x = MEAN + STD * KeyedNoise(3).normal(torch.empty(20_000, 3, dtype=torch.float64))
    for end in (0.5, 1.0):
        out = simulate(x, grid_pairs([0.0, 0.2, end]), Ancestral(), path, toy, NOISE)
        mean, var = toy.moments(time(end))
        assert_law(out, mean, var.sqrt())


def test_markov_chain_at_one_time() -> None:
    path, t, size, steps = Linear(), time(0.4), 0.05, 30
    toy = VectorGaussian(path, MEAN, STD, "score")
    mean, var = torch.zeros_like(MEAN), torch.zeros_like(MEAN)
    centre, spread = toy.moments(t)
    for _ in range(steps):
        mean = mean + size * (centre - mean) / spread
        var = (1 - size / spread).square() * var + 2 * size
    x = torch.zeros(20_000, 3, dtype=torch.float64)
    out = simulate(x, t.expand(steps, 2), Langevin(size), path, toy, NOISE)
    assert_law(out, mean, var.sqrt())


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("sampler", [Ancestral(), Euler(), Heun()], ids=name)
@pytest.mark.parametrize("path", PATHS, ids=name)
def test_standing_still(path: AlphaSigmaPath, sampler: Any, t: float) -> None:
    x = vectors(path, 5)
    toy = VectorGaussian(path, MEAN, STD)
    out = simulate(x, torch.tensor([[t, t]]).double(), sampler, path, toy, NOISE)
    torch.testing.assert_close(out, x, rtol=1e-14, atol=0)


# Steering


@pytest.mark.parametrize("sampler", [Ancestral(), Euler(), Heun()], ids=name)
@pytest.mark.parametrize("kind", ["clean", "noise", "velocity", "score"])
def test_steering_that_does_nothing(sampler: Any, kind: str) -> None:
    path = VPCosine()
    if isinstance(sampler, Ancestral):
        kind = "clean"
    ids = torch.arange(12)
    plain = run_vector(ids, path, kind, sampler, None)
    assert torch.equal(plain, run_vector(ids, path, kind, sampler, Steering()))


@pytest.mark.parametrize("sampler", [Ancestral(), Euler(), Heun()], ids=name)
def test_exact_projection(sampler: Any) -> None:
    ids, normal = torch.arange(12), torch.tensor([1.0, 2.0, -1.0]).double()
    out = run_vector(ids, Linear(), "clean", sampler, Projection(normal, 0.5))
    assert (out @ normal - 0.5).abs().max() < 1e-14
    first = torch.tensor([1.0, 0.0, 0.0]).double()
    out = run_vector(ids, Linear(), "clean", sampler, Projection(first, 0.5))
    assert (out[:, 0] == 0.5).all()
    free = run_vector(ids, Linear(), "clean", sampler, None)
    assert torch.equal(out[:, 1:], free[:, 1:])  # independent of the one that is fixed


def test_infilling() -> None:
    path, batch = AbsorbingTokens(3), 5_000
    x = path.source(token_state(batch, 3, 3), NOISE)
    x = simulate(x, uniform_grid(4), Ancestral(), path, TokenField(PROBS), NOISE, Infill(KNOWN))
    assert (x["tokens"][:, 1] == 2).all()
    assert_shares(x["tokens"][:, 0] * 3 + x["tokens"][:, 2], torch.outer(PROBS, PROBS).flatten())


@pytest.mark.parametrize("grow", [0.0, 0.3])
def test_law_of_particles(grow: float) -> None:
    """Weights e^reward = 3 a zero: a token is 0 with probability 3 p / (3 p + 1 - p) = 3/4."""
    path, group, groups = AbsorbingTokens(3, grow), 64, 256
    steer = FeynmanKac(math.log(3.0), group)
    x = path.source(token_state(group * groups, 2, 3), NOISE)
    x = simulate(x, uniform_grid(4), Remember(), path, TokenField(PROBS), NOISE, steer)
    rows = torch.arange(group * groups)
    for kept in steer.kept:
        assert torch.equal(kept // group, rows // group)  # no row leaves its group
        assert not torch.equal(kept, rows)
    assert torch.equal(x["tokens"] == 3, ~x["mask"])
    zero = (x["tokens"][:, :2] == 0).double().mean(1).reshape(groups, group).mean(1)
    error = float(zero.std()) / math.sqrt(groups)
    assert error < 0.01
    # Five standard errors of independent groups, and the bias of a ratio of means over a group, of
    # the order of the weights' relative variance, 1/4 a token, over the number of particles.
    assert abs(float(zero.mean()) - 0.75) < 5 * error + 1 / group


def test_the_end_hook_sees_the_readout() -> None:
    class End(Steering):
        def end(self, x0: Any, aim: Any) -> Any:
            assert x0.shape == (4, 3)  # without momentum
            return x0 + 1

    path = BlockGaussian()
    field = BlockField(path, BLOCK_MEAN, BLOCK_COV, "clean")
    x, pairs = block_source(4), uniform_grid(2)
    plain = simulate(x, pairs, Ancestral(), path, field, NOISE)
    assert torch.equal(simulate(x, pairs, Ancestral(), path, field, NOISE, End()), plain + 1)


def test_last_clean_follows_the_rows() -> None:
    class Guess(Linear):
        def readout(self, x: Tensor, clean: Tensor) -> Tensor:
            return clean

    class Roll(Steering):
        def after(self, x: Any, clean: Any, aim: Any, run: Run) -> Any:
            kept = torch.arange(len(x)).roll(1)
            return x[kept], aim, kept

    path = Guess()
    toy = VectorGaussian(path, MEAN, STD)
    x = vectors(path, 5)
    pairs = torch.tensor([[0.9, 0.5]]).double()
    out = simulate(x, pairs, Ancestral(), path, toy, NOISE, Roll())
    assert torch.equal(out, toy(x, pairs[0, 0]).roll(1, 0))


def test_hooks_are_called_in_order() -> None:
    log: list[str] = []

    class Log(Steering):
        def bend(self, field: Any) -> Any:
            log.append("bend")
            return replace(field, mean=field.mean + 1)

        def start(self, x: Any) -> Any:
            log.append("start")
            return torch.zeros(len(x))

        def clean(self, clean: Any, x: Any, aim: Any, run: Run) -> Any:
            log.append(f"clean {run.k} {float(aim[0])}")
            assert run.aim is aim and isinstance(run.field, VectorGaussian)
            assert torch.equal(run.field.mean, MEAN + 1)
            return clean

        def after(self, x: Any, clean: Any, aim: Any, run: Run) -> Any:
            log.append(f"after {run.k}")
            return x, aim + 1, None

        def end(self, x0: Any, aim: Any) -> Any:
            log.append(f"end {float(aim[0])}")
            return x0 + 10

    path = Linear()
    toy, x = VectorGaussian(path, MEAN, STD), vectors(path, 2)
    out = simulate(x, uniform_grid(2), Ancestral(), path, toy, NOISE, Log())
    assert log[:2] in (["bend", "start"], ["start", "bend"])
    assert log[2:] == ["clean 0 0.0", "after 0", "clean 1 1.0", "after 1", "end 2.0"]
    shifted = replace(toy, mean=MEAN + 1)
    assert torch.equal(out, simulate(x, uniform_grid(2), Ancestral(), path, shifted, NOISE) + 10)


# What is refused


@pytest.mark.parametrize(
    "pairs",
    [
        torch.empty(0, 2),
        torch.ones(2),
        torch.ones(1, 3),
        torch.ones(1, 2, 1),
        torch.tensor([[1.1, 0.0]]),
        torch.tensor([[1.0, -0.1]]),
        torch.tensor([[float("nan"), 0.0]]),
        torch.tensor([[1.0, float("nan")]]),
        torch.tensor([[float("inf"), 0.0]]),
        torch.tensor([[1.0, 0.5], [0.4, 0.0]]),
    ],
)
def test_bad_pairs(pairs: Tensor) -> None:
    path = Linear()
    field = Counting(VectorGaussian(path, MEAN, STD))
    with pytest.raises(ValueError, match="pair"):
        simulate(vectors(path, 2), pairs, Ancestral(), path, field, NOISE)
    assert not field.calls  # before any work


@pytest.mark.parametrize(
    "state",
    [
        {"tokens": torch.zeros(3, 2), "mask": torch.ones(2, 2)},
        {"tokens": torch.zeros(3, 2), "mask": torch.tensor(1)},
        torch.tensor(1.0),
        {},
    ],
)
def test_bad_states(state: Any) -> None:
    with pytest.raises(ValueError, match="batch"):
        simulate(state, uniform_grid(2), Ancestral(), AbsorbingTokens(3), TokenField(PROBS), NOISE)


def test_empty_batch() -> None:
    path = Linear()
    toy = VectorGaussian(path, MEAN, STD)
    for sampler in (Ancestral(), Euler(), Heun()):
        out = simulate(vectors(path, 0), uniform_grid(2), sampler, path, toy, NOISE)
        assert out.shape == (0, 3)
    block = BlockGaussian()
    field = BlockField(block, BLOCK_MEAN, BLOCK_COV, "clean")
    x = torch.empty(0, 2, 3, dtype=torch.float64)
    assert simulate(x, uniform_grid(2), Heun(), block, field, NOISE).shape == (0, 3)


def test_state_helpers() -> None:
    state = {"b": torch.arange(6).reshape(3, 2), "a": torch.arange(3)}
    assert [leaf.ndim for leaf in leaves(state)] == [1, 2]  # in the order of the names
    assert batch_size(state) == 3
    rows = torch.tensor([2, 2, 0])
    nested = {"x": [state["a"], (state["b"], None)], "step": torch.tensor(4), "name": "k"}
    moved = take(nested, rows)
    assert moved["x"][0].tolist() == [2, 2, 0]
    assert torch.equal(moved["x"][1][0], state["b"][rows]) and moved["x"][1][1] is None
    assert moved["step"] == 4 and moved["name"] == "k"


def test_absorbing_tokens_are_kept_with_probability_one_minus_t():
    path, batch, width = AbsorbingTokens(3), 4_000, 5
    x0 = {**token_state(batch, width, 3), "tokens": torch.ones(batch, width, dtype=torch.int64)}
    t = torch.linspace(0, 1, 5, dtype=torch.float64).repeat_interleave(batch // 5)
    draw = path.sample(x0, t, NOISE)
    assert draw.target("clean") is x0
    with pytest.raises(ValueError, match="'noise'"):
        draw.target("noise")
    kept = (draw.x["tokens"] == 1).double()
    for level in t.unique():
        share = 1 - float(level)
        count = int((t == level).sum()) * width
        error = 5 * math.sqrt(share * (1 - share) / count)
        assert abs(float(kept[t == level].mean()) - share) <= error
