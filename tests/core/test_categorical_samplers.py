"""Samplers of tokens: their laws by enumeration of all states, and by draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.categorical.bounds import elbo
from fluvial.core.categorical.draws import Moves
from fluvial.core.categorical.masked import (
    Confident,
    FirstHitting,
    Gibbs,
    Remasking,
    remasking_loop,
)
from fluvial.core.categorical.paths import (
    CategoricalPath,
    MixturePath,
    marginal_probs,
    moves_probs,
    posterior_probs,
)
from fluvial.core.categorical.predictions import Cached, Tempered, convert
from fluvial.core.categorical.samplers import TauLeaping, Tweedie
from fluvial.core.categorical.schedules import Cosine
from fluvial.core.categorical.steering import Infilling, TokenGuidance
from fluvial.core.gaussian.sde import PredictorCorrector
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import grid_pairs, uniform_grid

from .categorical_toys import (
    JOINT,
    MARGINAL,
    SOURCES,
    ExactField,
    all_states,
    joint_given,
    time,
    total_variation,
)
from .toys import assert_shares

NOISE = KeyedNoise(11)
INDEPENDENT = torch.outer(JOINT.sum(1), JOINT.sum(0))


def source_law(path: CategoricalPath) -> Tensor:
    return torch.outer(path.pi, path.pi).flatten()


def ancestral_table(path: CategoricalPath, t: Tensor, s: Tensor) -> Tensor:
    x = all_states(path.states)
    return joint_given(posterior_probs(path, x, ExactField(path)(x, t), t, s))


def leaping_table(sampler: TauLeaping, path: CategoricalPath, t: Tensor, s: Tensor) -> Tensor:
    if s == 0 or path.alpha(t) == 0:
        return ancestral_table(path, t, s)
    x = all_states(path.states)
    clean = ExactField(path)(x, t)
    return joint_given(moves_probs(path, x, clean, sampler.moves(x, clean, t, s, path)))


def propagated(path: CategoricalPath, steps: int, table: Any = ancestral_table) -> Tensor:
    """The law of pairs of data tokens after all steps, (9,)."""
    law = source_law(path)
    for t, s in uniform_grid(steps):
        law = law @ table(path, t, s)
    square = law.reshape(path.states, path.states)
    assert float(square[3:].sum() + square[:, 3:].sum()) < 1e-12
    return square[:3, :3].flatten()


def drawn_pairs(
    path: CategoricalPath, sampler: Any, pairs: Tensor, rows: int, field: Any = None, **more: Any
) -> Tensor:
    x = path.source(torch.zeros(rows, 2, dtype=torch.int64), NOISE)
    field = ExactField(path) if field is None else field
    x = simulate(x, pairs, sampler, path, field, NOISE.at(1), **more)
    return x[:, 0] * 3 + x[:, 1]


# Laws by enumeration


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_ancestral_absorbing(steps: int) -> None:
    law = propagated(CategoricalPath(3), steps)
    exact = (1 - 1 / steps) * JOINT + INDEPENDENT / steps
    torch.testing.assert_close(law, exact.flatten(), rtol=0, atol=1e-12)
    assert total_variation(law, JOINT.flatten()) == pytest.approx(0.215 / steps, abs=1e-12)


@pytest.mark.parametrize(
    ("source", "kind", "errors"),
    [
        ("uniform", CategoricalPath, (0.137568, 0.073910, 0.037395, 0.018667)),
        ("uniform", MixturePath, (0.137568, 0.070306, 0.034724, 0.017138)),
        ("marginal", CategoricalPath, (0.137469, 0.073871, 0.037454, 0.018716)),
    ],
)
def test_ancestral_and_jump_steps(source: str, kind: Any, errors: tuple[float, ...]) -> None:
    path = kind(3, SOURCES[source])
    for steps, error in zip((2, 4, 8, 16), errors, strict=True):
        law = propagated(path, steps)
        assert total_variation(law, JOINT.flatten()) == pytest.approx(error, abs=1e-6)


def test_tau_leaping() -> None:
    path, sampler = CategoricalPath(3, "uniform"), TauLeaping()

    def table(path: CategoricalPath, t: Tensor, s: Tensor) -> Tensor:
        return leaping_table(sampler, path, t, s)

    for steps, error in ((4, 0.085020), (8, 0.046603)):
        law = propagated(path, steps, table)
        assert total_variation(law, JOINT.flatten()) == pytest.approx(error, abs=1e-6)


@pytest.mark.parametrize("kind", [CategoricalPath, MixturePath])
@pytest.mark.parametrize("source", SOURCES)
def test_correctors_leave_the_law_of_x_t(source: str, kind: Any) -> None:
    """Of first order: the error of a step falls as h^2, and so with a(t) > 0."""
    path, t = kind(3, SOURCES[source], Cosine(2.0)), time(0.5)
    sampler = TauLeaping("linear", corrector=lambda t: 0.8)
    x = all_states(3)
    errors = []
    for h in (1e-2, 5e-3):
        now, then = (JOINT.flatten() @ joint_given(marginal_probs(path, x, v)) for v in (t, t - h))
        errors.append(total_variation(now @ leaping_table(sampler, path, t, t - h), then))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    plain = leaping_table(TauLeaping("linear"), path, t, t - h)
    corrected = leaping_table(sampler, path, t, t - h)
    assert float((plain - corrected).abs().max()) > 1e-3


@dataclass
class Paired:
    """The exact law of x_0 given x_t and x_1, two tokens of a coupling with a joint law `JOINT`."""

    path: MixturePath
    predicts: str = "clean"

    def __call__(self, x: Tensor, t: Tensor, *, x1: Tensor, **cond: Any) -> Tensor:
        # given x_1, a token is x_1 with drop or else x_0
        alpha, drop = self.path.alpha(t), self.path.drop(t)
        like = alpha * torch.nn.functional.one_hot(x, 3) + drop * (x == x1).unsqueeze(-1)
        law = JOINT * like[:, 0, :, None] * like[:, 1, None, :]
        p = torch.stack([law.sum(2), law.sum(1)], dim=1)
        total = p.sum(-1, keepdim=True)
        return torch.where(total > 0, p / torch.where(total > 0, total, 1.0), 1 / 3)


@pytest.mark.parametrize("end", [(0, 2), (1, 1)])
def test_corrector_towards_a_given_end(end: tuple[int, int]) -> None:
    """Both velocities together leave the law of x_t given x_1 as it is, to first order."""
    path, t = MixturePath(3, "uniform", Cosine(2.0)), time(0.5)
    x, x1 = all_states(3), torch.tensor([end])

    def law(t: Tensor) -> Tensor:
        start = torch.nn.functional.one_hot(x, 3).double()
        last = torch.nn.functional.one_hot(x1, 3).double()
        return JOINT.flatten() @ joint_given(path.alpha(t) * start + path.drop(t) * last)

    clean = Paired(path)(x, t, x1=x1.expand(9, 2))
    sampler, errors = TauLeaping("linear", corrector=lambda t: 0.8), []
    for h in (1e-2, 5e-3):
        moves = sampler.moves(x, clean, t, t - h, path, x1.expand(9, 2))
        table = joint_given(moves_probs(path, x, clean, moves, x1.expand(9, 2)))
        errors.append(total_variation(law(t) @ table, law(t - h)))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    plain = TauLeaping("linear").moves(x, clean, t, t - h, path, x1.expand(9, 2))
    assert float((moves.leave - plain.leave).abs().max()) > 1e-3
    # towards a draw of the source instead, the law is another one
    moves = sampler.moves(x, clean, t, t - h, path)
    table = joint_given(moves_probs(path, x, clean, moves))
    assert total_variation(law(t) @ table, law(t - h)) > 10 * errors[1]


def test_draws_of_a_corrected_bridge_follow_the_enumerated_law() -> None:
    path, rows = MixturePath(3, "uniform"), 20_000
    x, x1 = all_states(3), torch.tensor([[0, 2]])
    sampler, field = TauLeaping(corrector=2.0), Paired(path)
    law = torch.nn.functional.one_hot(torch.tensor(2), 9).double()
    for t, s in uniform_grid(4):
        clean = field(x, t, x1=x1.expand(9, 2))
        if s == 0 or t == 1:
            table = joint_given(posterior_probs(path, x, clean, t, s))
        else:
            moves = sampler.moves(x, clean, t, s, path, x1.expand(9, 2))
            table = joint_given(moves_probs(path, x, clean, moves, x1.expand(9, 2)))
        law = law @ table
    ends, mask = x1.expand(rows, 2), torch.ones(rows, 2, dtype=torch.bool)
    out = simulate(ends, uniform_grid(4), sampler, path, field, NOISE, x1=ends, mask=mask)
    assert_shares(out[:, 0] * 3 + out[:, 1], law)
    # where absorbing, all ends are the mask
    absorbing = CategoricalPath(3), MixturePath(3)
    start = torch.full((200, 2), 3)
    runs = [
        simulate(start, uniform_grid(4), sampler, path, ExactField(path), NOISE, **cond)
        for path, cond in zip(absorbing, ({}, {"x1": start}), strict=True)
    ]
    assert torch.equal(*runs)


def test_remasking_of_first_order_is_the_corrector() -> None:
    path, t, h, a = CategoricalPath(3), time(0.5), 1e-4, 0.8
    x = all_states(4)
    clean = ExactField(path)(x, t)
    leap = TauLeaping("linear", corrector=lambda t: a).moves(x, clean, t, t - h, path)
    sigma, reveal = Remasking("cap", a / 0.5 * h).shares(x, torch.ones(16, 2), t, t - h, path)
    exact = torch.where(x == 3, reveal, sigma)
    torch.testing.assert_close(leap.leave, exact, rtol=1e-3, atol=0)


def remasking_table(
    sampler: Remasking, path: CategoricalPath, t: Tensor, s: Tensor, clean: Tensor | None = None
) -> Tensor:
    x = all_states(4)
    clean = ExactField(path)(x, t) if clean is None else clean
    sigma, reveal = sampler.shares(x, torch.ones(16, 2, dtype=torch.float64), t, s, path)
    hidden = x == 3
    moves = Moves(torch.where(hidden, reveal, 0.0), torch.ones(()), None)
    probs = moves_probs(path, x, clean, moves)
    again = torch.where(hidden, 0.0, sigma).unsqueeze(-1)
    mask = torch.nn.functional.one_hot(torch.full_like(x, 3), 4)
    return joint_given((1 - again) * probs + again * mask)


def test_remasking() -> None:
    path, sampler = CategoricalPath(3), Remasking("rescale", 0.5)
    for steps, error, plain in (
        (4, 0.062568, 0.053750),
        (8, 0.038727, 0.026875),
        (16, 0.024250, 0.013438),
    ):
        law = source_law(path)
        for t, s in uniform_grid(steps):
            law = law @ remasking_table(sampler, path, t, s)
            masked = law.reshape(4, 4)[3].sum()
            assert float(masked) == pytest.approx(float(path.drop(s)), abs=1e-12)
        law = law.reshape(4, 4)[:3, :3].flatten()
        assert total_variation(law, JOINT.flatten()) == pytest.approx(error, abs=1e-6)
        assert total_variation(propagated(path, steps), JOINT.flatten()) == pytest.approx(
            plain, abs=1e-6
        )
    x, ones = all_states(4), torch.ones(16, 2)
    sigma, _ = Remasking("cap", 5.0).shares(x, ones, time(0.6), time(0.3), path)
    assert float(sigma) == pytest.approx(0.75)


def test_bound_of_remasking() -> None:
    """Against the divergences of the steps by enumeration, and above -ln p(x_0) of their law."""
    path, sampler, steps, count = CategoricalPath(3), Remasking("rescale", 0.5), 4, 400
    data, field = all_states(3), ExactField(path, power=0.5)
    bounds = torch.zeros(9, dtype=torch.float64)
    law = source_law(path)
    for t, s in uniform_grid(steps):
        table = remasking_table(sampler, path, t, s, field(all_states(4), t))
        law = law @ table
        for i, x0 in enumerate(data):
            one = torch.nn.functional.one_hot(x0, 3).double().expand(16, 2, 3)
            true = remasking_table(sampler, path, t, s, one)
            reached = joint_given(marginal_probs(path, x0[None], t))[0]
            terms = torch.special.xlogy(true, true) - torch.special.xlogy(true, table)
            # a state with a token that is not x_0's does not occur
            bounds[i] += (reached * torch.where(reached[:, None] > 0, terms, 0.0).sum(1)).sum()
    exact = -law.reshape(4, 4)[:3, :3].flatten().log()
    assert (bounds > exact + 1e-3).all()
    options: dict[str, Any] = {"form": "discrete", "steps": steps}
    rows = data.repeat(count, 1)
    bound = elbo(path, field, rows, NOISE, remasking=sampler, **options)
    nats = bound.nats.reshape(count, 9)
    assert ((nats.mean(0) - bounds).abs() < 5 * nats.std(0) / math.sqrt(count)).all()
    assert bound.name == "ELBO at T = 4, remasking (rescale, 0.5)"
    # what is masked again has to be written again
    plain = elbo(path, field, rows, NOISE, **options)
    assert (bound.nats >= plain.nats - 1e-12).all() and bound.nats.mean() > plain.nats.mean() + 0.1
    none = elbo(path, field, rows, NOISE, remasking=Remasking("cap", 0.0), **options)
    assert torch.allclose(none.nats, plain.nats, rtol=1e-12)
    uniform = CategoricalPath(3, "uniform")
    for wrong in (
        lambda: elbo(path, field, rows, NOISE, remasking=sampler),
        lambda: elbo(path, field, rows, NOISE, remasking=Remasking("confidence"), **options),
        lambda: elbo(uniform, ExactField(uniform), rows, NOISE, remasking=sampler, **options),
    ):
        with pytest.raises(ValueError, match="remasking goes with form 'discrete'"):
            wrong()


def test_remasking_draws_its_law_and_shares_by_confidence() -> None:
    path, rows = CategoricalPath(3), 20_000
    sampler = Remasking("rescale", 0.5)
    law = source_law(path)
    for t, s in uniform_grid(4):
        law = law @ remasking_table(sampler, path, t, s)
    pair = drawn_pairs(path, sampler, uniform_grid(4), rows)
    assert_shares(pair, law.reshape(4, 4)[:3, :3].flatten())
    drawn = torch.tensor([[0.9, 0.1, 1.0], [0.5, 0.5, 1.0]]).double()
    x = torch.tensor([[0, 1, 3], [0, 1, 3]])
    sigma, reveal = Remasking("confidence", 0.3).shares(x, drawn, time(0.6), time(0.3), path)
    weights = torch.tensor([[-0.9, -0.1], [-0.5, -0.5]]).double().softmax(1) * 2
    torch.testing.assert_close(sigma[:, :2], weights * 0.3 * 0.75)
    assert float(reveal) == pytest.approx((0.7 - (1 - 0.3 * 0.75) * 0.4) / 0.6)
    # padding has no share
    x, drawn = (torch.cat([v, v[:, :1]], 1) for v in (x, drawn))
    mask = torch.arange(4) < 3
    more, _ = Remasking("confidence", 0.3).shares(
        x, drawn, time(0.6), time(0.3), path, mask.expand(2, 4)
    )
    torch.testing.assert_close(more[:, :2], sigma[:, :2])


def test_remasking_by_confidence_keeps_the_share_of_masks() -> None:
    """In the mean over the tokens of a row, at every level; but not the law of a token."""
    path, rows, steps = CategoricalPath(3), 20_000, 4
    x = path.source(torch.zeros(rows, 2, dtype=torch.int64), NOISE)
    table = torch.tensor([[0.98, 0.01, 0.01], [0.34, 0.33, 0.33]]).double()

    class Uneven:
        predicts = "clean"

        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            return table.expand(len(x), 2, 3)

    for k in range(1, steps):
        pairs = uniform_grid(steps)[:k]
        masked = simulate(x, pairs, Remasking("confidence", 0.35), path, Uneven(), NOISE) == 3
        share = masked.double().mean(1)
        error = float(share.std()) / math.sqrt(rows)
        assert abs(float(share.mean()) - float(path.drop(pairs[-1, 1]))) < 5 * error < 0.02
    # the token that is surer is masked less often
    surplus = (masked[:, 1].double() - masked[:, 0].double()) / math.sqrt(rows)
    assert float(surplus.sum()) > 5 * float(surplus.std()) * math.sqrt(rows)
    # one token, or equal probabilities, have nothing to share
    for field, width in ((Uninformed(MARGINAL), 1), (Uninformed(torch.ones(3).double() / 3), 2)):
        start = x[:2_000, :width]
        out = [
            simulate(start, uniform_grid(6), Remasking(rule, 0.3), path, field, NOISE)
            for rule in ("confidence", "rescale")
        ]
        assert torch.equal(*out)


def test_the_loop_holds_and_then_ends() -> None:
    path = CategoricalPath(3, "absorbing", Cosine())
    grid = remasking_loop(path, 40)
    held = grid[:, 0] == grid[:, 1]
    assert len(grid) == 40 and int(held.sum()) == 20 and grid[0, 0] == 1 and grid[-1, 1] == 0
    torch.testing.assert_close(path.alpha(grid[held, 0]), torch.full((20,), 0.9).double())
    pair = drawn_pairs(path, Remasking("loop", 0.2), grid, 2_000)
    assert int(pair.max()) < 9
    x = all_states(4)
    for t, s, most in ((0.5, 0.5, 0.2), (0.5, 0.4, 0.0)):
        sigma, reveal = Remasking("loop", 0.2).shares(x, torch.ones(16, 2), time(t), time(s), path)
        assert float(sigma) == pytest.approx(most)
        assert float(reveal) > 0


# Laws by draws


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", [CategoricalPath, MixturePath])
@pytest.mark.parametrize(
    "sampler", [Ancestral(), TauLeaping("exponential", 0.5)], ids=["ancestral", "leap"]
)
def test_draws_follow_the_enumerated_law(source: str, kind: Any, sampler: Any) -> None:
    path, rows = kind(3, SOURCES[source]), 10_000
    table = (
        ancestral_table
        if isinstance(sampler, Ancestral)
        else lambda path, t, s: leaping_table(sampler, path, t, s)
    )
    pair = drawn_pairs(path, sampler, uniform_grid(4), rows)
    law = source_law(path)
    for t, s in uniform_grid(4):
        law = law @ table(path, t, s)
    square = law.reshape(path.states, path.states)[:3, :3].flatten()
    assert_shares(pair, square)


def test_fields_of_any_kind_give_the_same_samples() -> None:
    path = CategoricalPath(3, "uniform")
    pairs = uniform_grid(5, 0.95)
    x = path.sample(all_states(3).repeat(200, 1), time(0.95), NOISE).x
    cavity, score = ExactField(path, "cavity"), ExactField(path, "score")
    whole = simulate(x, pairs, Ancestral(), path, ExactField(path), NOISE)
    for field in (cavity, score):
        again = simulate(x, pairs, Ancestral(), path, convert(field, "clean", path), NOISE)
        assert torch.equal(whole, again)
        leap = simulate(x, pairs, TauLeaping(), path, field, NOISE)
        assert torch.equal(leap, simulate(x, pairs, TauLeaping(), path, ExactField(path), NOISE))
    assert convert(score, "score", path) is score
    with pytest.raises(ValueError, match="'score'"):
        simulate(x, pairs, Tweedie(), path, cavity, NOISE)
    with pytest.raises(ValueError, match="'clean'"):
        simulate(x, pairs, Ancestral(), path, cavity, NOISE)


def test_tweedie_is_ancestral_for_a_score_of_a_clean_law() -> None:
    path, rows = CategoricalPath(3, "uniform"), 20_000
    start = path.sample(all_states(3)[:1].expand(rows, 2), time(0.9), NOISE).x
    law = joint_given(marginal_probs(path, all_states(3)[:1], time(0.9)))[0]
    pairs = uniform_grid(3, 0.9)
    for t, s in pairs:
        law = law @ ancestral_table(path, t, s)
    x = simulate(start, pairs, Tweedie(), path, ExactField(path, "score"), NOISE.at(1))
    assert_shares(x[:, 0] * 3 + x[:, 1], law)


def test_tweedie_leaves_no_mask_and_noises_again() -> None:
    """Of a learned score, whose sum is not alpha / drop, too."""
    path, x = CategoricalPath(3), torch.full((500, 2), 3)
    score = Uninformed(torch.tensor([0.02, 0.02, 0.01, 1.0]).double(), "score")
    out = simulate(x, uniform_grid(2, 0.9), Tweedie(), path, score, NOISE)
    assert int(out.max()) < 3
    uniform = CategoricalPath(3, "uniform")
    x0 = torch.zeros(10_000, 1, dtype=torch.int64)
    field = Uninformed(torch.ones(3).double(), "score")
    up = simulate(x0, grid_pairs([0.0, 0.2, 0.5]), Tweedie(), uniform, field, NOISE)
    assert_shares(up.flatten(), marginal_probs(uniform, x0[:1], time(0.5))[0, 0])


def test_first_hitting_is_exact() -> None:
    path = CategoricalPath(3, "absorbing", Cosine())
    pair = drawn_pairs(path, FirstHitting(), uniform_grid(2), 20_000)
    assert_shares(pair, JOINT.flatten())


@dataclass
class Uninformed:
    """The same law everywhere; keeps the times it was asked at."""

    probs: Tensor
    predicts: str = "clean"

    def __post_init__(self) -> None:
        self.times: list[Tensor] = []

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        self.times.append(t)
        return self.probs.expand(*x.shape, -1)


def test_first_hitting_reveals_at_the_times_of_the_process() -> None:
    path, rows, field = CategoricalPath(3), 20_000, Uninformed(MARGINAL)
    x = path.source(torch.zeros(rows, 3, dtype=torch.int64), NOISE)
    out = simulate(x, uniform_grid(3), FirstHitting(), path, field, NOISE)
    drops = torch.stack([path.drop(t) for t in field.times])
    # the order statistics of three uniforms, largest first
    for drop, mean in zip(drops, (0.75, 0.5, 0.25), strict=True):
        spread = math.sqrt(mean * (1 - mean) / 5)
        assert abs(float(drop.mean()) - mean) < 5 * spread / math.sqrt(rows)
    assert bool((drops.diff(dim=0) < 0).all())
    assert_shares(out.flatten(), MARGINAL)
    fast = simulate(x, uniform_grid(2), FirstHitting(2), path, field, NOISE)
    assert int(fast.max()) < 3
    partly = torch.where(torch.arange(3) == 1, 2, x)
    kept = simulate(partly, uniform_grid(2), FirstHitting(), path, field, NOISE)
    assert bool((kept[:, 1] == 2).all()) and int(kept.max()) < 3


def test_confident_unmasking_is_another_law() -> None:
    path, rows = CategoricalPath(3), 20_000
    law = torch.tensor(
        [0.12, 0.015, 0.03, 0.045, 0.09, 0.09, 0.16, 0.13, 0.32], dtype=torch.float64
    )
    assert total_variation(law, JOINT.flatten()) == pytest.approx(0.21, abs=1e-9)
    # by enumeration: the likelier of the two drawn tokens stays, and the other is drawn given it
    first, second = JOINT.sum(1), JOINT.sum(0)
    exact = torch.zeros(3, 3).double()
    for a in range(3):
        for b in range(3):
            chance = first[a] * second[b]
            if first[a] >= second[b]:
                exact[a] += chance * JOINT[a] / first[a]
            else:
                exact[:, b] += chance * JOINT[:, b] / second[b]
    torch.testing.assert_close(law, exact.flatten(), rtol=0, atol=1e-12)
    assert_shares(drawn_pairs(path, Confident("drawn"), uniform_grid(2), rows), exact.flatten())
    assert_shares(drawn_pairs(path, Confident("random"), uniform_grid(2), rows), JOINT.flatten())


def test_confidence_scores_and_schedule() -> None:
    path = CategoricalPath(4)
    table = torch.tensor([[0.4, 0.4, 0.1, 0.1], [0.55, 0.43, 0.01, 0.01], [0.5, 0.2, 0.15, 0.15]])

    @dataclass
    class Table:
        predicts: str = "clean"

        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            return table.expand(len(x), 3, 4)

    x = torch.full((50, 3), 4)
    for score, order in (("max", (1, 2, 0)), ("margin", (2, 1, 0)), ("entropy", (1, 0, 2))):
        done = simulate(x, uniform_grid(3)[:1], Confident(score), path, Table(), NOISE)
        assert bool((done[:, order[0]] < 4).all()) and int((done == 4).sum()) == 100
        done = simulate(x, uniform_grid(3)[:2], Confident(score), path, Table(), NOISE)
        assert bool((done[:, order[2]] == 4).all()) and int((done == 4).sum()) == 50
    # ceil(3 drop(s)): 2, 1, 0 and, of seven steps, 3 3 3 2 2 1 0 rounded up
    left = []
    for k in range(1, 8):
        out = simulate(x, uniform_grid(7)[:k], Confident("max"), path, Table(), NOISE)
        left.append(int((out[0] == 4).sum()))
    assert left == [math.ceil(3 * (7 - k) / 7) for k in range(1, 8)]
    noisy = simulate(x, uniform_grid(3)[:1], Confident("max", 50.0), path, Table(), NOISE)
    assert len({tuple(row) for row in (noisy == 4).tolist()}) == 3


def test_gibbs_leaves_the_law_as_it_is() -> None:
    """Exact at t = 0, where all is visible, and at any t, where the pattern of masks stays too."""
    path, rows = CategoricalPath(3), 20_000
    x0 = all_states(3)[NOISE.categorical(JOINT.flatten().expand(rows, 9))]
    for t in (0.0, 0.4):
        x = path.sample(x0, time(t), NOISE).x
        out = simulate(x, time(t).expand(3, 2), Gibbs(), path, ExactField(path), NOISE.at(2))
        law = JOINT.flatten() @ joint_given(marginal_probs(path, all_states(3), time(t)))
        some = law.nonzero().flatten()
        index = torch.full((16,), -1).scatter(0, some, torch.arange(len(some)))
        assert_shares(index[out[:, 0] * 4 + out[:, 1]], law[some])
        assert torch.equal(out == 3, x == 3) and not torch.equal(out, x)
    both = PredictorCorrector(Ancestral(), Gibbs())
    pairs = grid_pairs([1.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0])
    pair = drawn_pairs(path, both, pairs, 5_000)
    shares = torch.bincount(pair, minlength=9) / 5_000
    assert total_variation(shares.double(), JOINT.flatten()) < 0.06  # plain: .1075 in two steps


# Fields made of fields, and steering


def test_tempering() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05]).double()
    x, t = torch.full((2, 3), 4), time(0.5)

    def tempered(**options: Any) -> Tensor:
        return Tempered(Uninformed(probs), **options)(x, t)[0, 0]

    def close(value: Tensor, wanted: tuple[float, ...]) -> None:
        torch.testing.assert_close(value, torch.tensor(wanted).double(), rtol=0, atol=1e-6)

    close(tempered(temperature=0.5), (0.684932, 0.246575, 0.061644, 0.006849))
    close(tempered(top_p=0.9), (0.526316, 0.315789, 0.157895, 0))
    close(tempered(top_k=2), (0.625, 0.375, 0, 0))
    close(tempered(forbidden=torch.tensor([0])), (0, 0.6, 0.3, 0.1))
    close(tempered(temperature=1e-3), (1, 0, 0, 0))
    close(tempered(), (0.5, 0.3, 0.15, 0.05))
    for bad in ({"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 0}):
        with pytest.raises(ValueError, match="got"):
            Tempered(Uninformed(probs), **bad)
    with pytest.raises(ValueError, match="'clean'"):
        Tempered(Uninformed(probs, "score"))


def test_tempering_tokens_one_by_one_is_not_tempering_the_joint() -> None:
    path, rows = CategoricalPath(3), 20_000
    sharp = JOINT**2 / (JOINT**2).sum()
    firsts = [JOINT.sum(1) ** 2, JOINT.sum(0) ** 2]
    firsts = [first / first.sum() for first in firsts]
    rows_given = JOINT**2 / (JOINT**2).sum(1, keepdim=True)
    columns_given = JOINT**2 / (JOINT**2).sum(0)
    exact = (firsts[0][:, None] * rows_given + firsts[1] * columns_given) / 2
    assert total_variation(exact, sharp) == pytest.approx(0.031471, abs=1e-6)
    field = Tempered(ExactField(path), temperature=0.5)
    pair = drawn_pairs(path, FirstHitting(), uniform_grid(2), rows, field)
    assert_shares(pair, exact.flatten())


def test_a_cache_changes_nothing_but_the_number_of_calls() -> None:
    path = CategoricalPath(3)
    cached = Cached(ExactField(path))
    plain = drawn_pairs(path, Ancestral(), uniform_grid(40), 50)
    pair = drawn_pairs(path, Ancestral(), uniform_grid(40), 50, cached)
    assert torch.equal(pair, plain)
    assert 100 <= cached.calls <= 150  # a call for the masks and one or two for what was revealed
    seen: list[Any] = []

    @dataclass
    class Labelled:
        predicts: str = "clean"

        def __call__(self, x: Tensor, t: Tensor, *, label: Tensor) -> Tensor:
            seen.append(label)
            return MARGINAL.expand(*x.shape, 3)

    field = Cached(Labelled())
    x, label = torch.full((3, 2), 3), torch.arange(3)
    field(x, time(0.5), label=label)
    x = x.clone()
    x[1] = 0
    field(x, time(0.5), label=label)
    assert seen[1].tolist() == [1]


def test_a_cache_does_not_mix_conditions() -> None:
    table = torch.tensor([[0.6, 0.4, 0.0], [0.2, 0.4, 0.4]]).double()

    @dataclass
    class Labelled:
        predicts: str = "clean"

        def __call__(self, x: Tensor, t: Tensor, *, label: int | None) -> Tensor:
            return table[1 if label is None else label].expand(*x.shape, 3)

    x, t, cached = torch.full((2, 2), 3), time(0.5), Cached(Labelled())
    for label in (0, 1, 1, 0):
        torch.testing.assert_close(cached(x, t, label=label), Labelled()(x, t, label=label))
    guided = [TokenGuidance(2.0).bend(f)(x, t, label=0) for f in (cached, Labelled())]
    torch.testing.assert_close(*guided)


def test_known_tokens_stay() -> None:
    known, where = torch.tensor([[0, 2]]), torch.tensor([[False, True]])
    steer = Infilling(known, where)
    for source in SOURCES.values():
        path = CategoricalPath(3, source)
        samplers: list[Any] = [Ancestral(), TauLeaping("exponential", 0.3)]
        if path.absorbing:
            samplers += [Remasking("rescale", 0.9), Confident(), FirstHitting()]
        for sampler in samplers:
            x = steer.place(path.source(torch.zeros(500, 2, dtype=torch.int64), NOISE))
            out = simulate(x, uniform_grid(4), sampler, path, ExactField(path), NOISE, steer)
            assert bool((out[:, 1] == 2).all())
    # given the second token, of an absorbing path the first has its conditional law
    path = CategoricalPath(3)
    x = steer.place(path.source(torch.zeros(20_000, 2, dtype=torch.int64), NOISE))
    out = simulate(x, uniform_grid(3), Ancestral(), path, ExactField(path), NOISE, steer)
    assert_shares(out[:, 0], JOINT[:, 2] / JOINT[:, 2].sum())
    with pytest.raises(TypeError, match="int64"):
        Infilling(known.float(), where)
    with pytest.raises(ValueError, match="shape"):
        Infilling(known, where[:, :1])
    start = path.source(torch.zeros(4, 3, dtype=torch.int64), NOISE)
    with pytest.raises(ValueError, match=r"known must have shape \(4, 3\)"):
        simulate(start, uniform_grid(1), Ancestral(), path, Uninformed(MARGINAL), NOISE, steer)
    with pytest.raises(ValueError, match="known must hold tokens 0 .. 2"):
        wrong = Infilling(known + 2, where)
        simulate(x, uniform_grid(1), Ancestral(), path, ExactField(path), NOISE, wrong)


def test_guidance_in_logarithms() -> None:
    table = torch.tensor([[0.6, 0.4, 0.0], [0.2, 0.4, 0.4]]).double()

    @dataclass
    class Labelled:
        predicts: str = "clean"

        def __call__(self, x: Tensor, t: Tensor, *, label: int | None) -> Tensor:
            return table[1 if label is None else 0].expand(*x.shape, 3)

    path = CategoricalPath(3)
    exact = table[0] ** 2 / table[1]
    exact = exact / exact.sum()
    field = TokenGuidance(2.0).bend(Labelled())
    x = torch.full((20_000, 1), 3)
    torch.testing.assert_close(field(x, time(0.5), label=0)[0, 0], exact)
    out = simulate(
        x, uniform_grid(2), Ancestral(), path, Labelled(), NOISE, TokenGuidance(2.0), label=0
    )
    assert int(out.max()) < 2
    assert_shares(out.flatten(), exact[:2])
    assert TokenGuidance(1.0).bend(field) is field
    for bad in ({"scale": math.inf}, {"scale": 1.0, "null": {}}):
        with pytest.raises(ValueError, match="got"):
            TokenGuidance(**bad)
    with pytest.raises(ValueError, match="'clean'"):
        TokenGuidance(2.0).bend(ExactField(path, "score"))


# What every sampler keeps


@dataclass
class Oracle:
    truth: Tensor
    predicts: str = "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return torch.nn.functional.one_hot(self.truth[: len(x)], 3).float()


SAMPLERS: dict[str, Any] = {
    "ancestral": Ancestral(),
    "leap": TauLeaping(),
    "leap, linear, corrected": TauLeaping("linear", 0.4),
    "first hitting": FirstHitting(),
    "first hitting, 3 a call": FirstHitting(3),
    "confident": Confident(),
    "confident, gumbel": Confident("max", 2.0),
    "remasking": Remasking("rescale", 0.3),
    "remasking, confidence": Remasking("confidence", 0.3),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("case", SAMPLERS)
def test_what_every_sampler_keeps(case: str, source: str) -> None:
    path, sampler = CategoricalPath(3, SOURCES[source]), SAMPLERS[case]
    masked = ("first", "confident", "remasking")
    if case.startswith(masked) and not path.absorbing:
        with pytest.raises(ValueError, match="absorbing"):
            simulate(
                torch.zeros(1, 2).long(),
                uniform_grid(1),
                sampler,
                path,
                Oracle(torch.zeros(1, 2).long()),
                NOISE,
            )
        return
    truth = (torch.arange(12)[:, None] + torch.arange(7)) % 3
    mask = torch.arange(7) < 4 + torch.arange(12)[:, None] % 4
    x = path.source(torch.where(mask, 0, -9), NOISE, mask=mask)
    assert bool((x[~mask] == -9).all())
    x = torch.where(mask, x, 1)
    for steps in (1, 2, 9):
        out = simulate(x, uniform_grid(steps), sampler, path, Oracle(truth), NOISE, mask=mask)
        assert torch.equal(out, torch.where(mask, truth, 1)) and out.dtype == torch.int64
    # a row does not depend on its batch, and depends on its seed
    field = Uninformed(MARGINAL)
    whole = simulate(x, uniform_grid(8), sampler, path, field, NOISE, mask=mask)
    for rows in (torch.arange(5), torch.arange(5, 12)):
        part = simulate(
            x[rows], uniform_grid(8), sampler, path, field, NOISE.rows(rows), mask=mask[rows]
        )
        assert torch.equal(part, whole[rows])
    other = simulate(x, uniform_grid(8), sampler, path, field, KeyedNoise(1), mask=mask)
    assert not torch.equal(other, whole)
    assert torch.equal(other == 1, (other == 1) | ~mask)


def test_pairs_that_rise_noise_again() -> None:
    """Forward and backward: from the data to t = .5 and back, one token at a time."""
    path, rows = CategoricalPath(3), 20_000
    x0 = torch.zeros(rows, 2, dtype=torch.int64)
    up = simulate(x0, grid_pairs([0.0, 0.2, 0.5]), Ancestral(), path, ExactField(path), NOISE)
    assert_shares((up == 3).long().flatten(), torch.tensor([0.5, 0.5]).double())
    for sampler in (TauLeaping(), Ancestral()):
        back = simulate(up, grid_pairs([0.5, 0.0]), sampler, path, ExactField(path), NOISE.at(9))
        assert int(back.max()) < 3


def test_of_ten_jump_steps_a_tenth_waits_for_the_last() -> None:
    path = MixturePath(2, torch.tensor([1.0, 0.0]))
    field = Uninformed(torch.tensor([0.0, 1.0]))
    x = torch.zeros(20_000, 1, dtype=torch.int64)
    out = simulate(x, uniform_grid(10)[:9], Ancestral(), path, field, NOISE)
    assert_shares(out.flatten(), torch.tensor([0.1, 0.9]).double())
    waits = 1.0
    for t, s in uniform_grid(10)[:9]:
        moves = TauLeaping().moves(x[:1], field(x[:1], t), t, s, path)
        waits *= 1 - float(moves.leave)
    assert waits == pytest.approx(0.145298, abs=1e-6)


def test_bad_samplers_are_refused() -> None:
    for make in (
        lambda: TauLeaping("midpoint"),  # type: ignore[arg-type]
        lambda: TauLeaping(corrector=-1.0),
        lambda: FirstHitting(0),
        lambda: Confident("first"),  # type: ignore[arg-type]
        lambda: Confident("entropy", 1.0),
        lambda: Remasking("often"),  # type: ignore[arg-type]
        lambda: Remasking("rescale", 2.0),
        lambda: remasking_loop(CategoricalPath(3), 2),
    ):
        with pytest.raises(ValueError, match="got"):
            make()
    path, x = CategoricalPath(3), torch.zeros(1, 2).long()
    with pytest.raises(ValueError, match=r"pairs \(t, t\)"):
        simulate(x, grid_pairs([0.5, 0.2]), Gibbs(), path, ExactField(path), NOISE)
    with pytest.raises(ValueError, match="s <= t"):
        simulate(x, grid_pairs([0.2, 0.5]), Remasking(), path, ExactField(path), NOISE)
    for sampler in (FirstHitting(), Confident()):
        with pytest.raises(ValueError, match="s <= t"):
            simulate(x, grid_pairs([0.2, 0.5]), sampler, path, ExactField(path), NOISE)
    uniform = CategoricalPath(3, "uniform")
    leap = grid_pairs([0.5, 0.2]), TauLeaping(corrector=1.0)
    with pytest.raises(ValueError, match="needs a MixturePath"):
        simulate(x, *leap, uniform, ExactField(uniform), NOISE, x1=x)
    flow = MixturePath(3, "uniform")
    for bad, message in ((x + 3, "x1 must hold"), (x[:, :1], "x1 must have shape")):
        with pytest.raises(ValueError, match=message):
            simulate(x, *leap, flow, ExactField(flow), NOISE, x1=bad)
    for sampler in (Ancestral(), Confident(), Confident("entropy"), FirstHitting(), Remasking()):
        with pytest.raises(ValueError, match="clean must be"):
            simulate(x + 3, uniform_grid(2), sampler, path, Uninformed(MARGINAL * math.nan), NOISE)
