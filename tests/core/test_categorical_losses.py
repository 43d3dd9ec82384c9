"""Bounds, losses and training, against sums over all states of two dependent tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fluvial.core.categorical.bounds import elbo
from fluvial.core.categorical.losses import (
    continuous_terms,
    discrete_terms,
    flow_terms,
    negative_log,
    prior_terms,
    score_entropy_terms,
)
from fluvial.core.categorical.objective import TokenMatching
from fluvial.core.categorical.paths import CategoricalPath, MixturePath, marginal_probs
from fluvial.core.categorical.paths import posterior_probs as reverse
from fluvial.core.categorical.predictions import TokenField, convert_prediction, log_clean
from fluvial.core.categorical.schedules import (
    Cosine,
    Geometric,
    Linear,
    LogDrop,
    Polynomial,
    Schedule,
    Sine,
    UniformDrop,
    d3pm_cosine,
)
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import LogitNormal, Stratified, uniform_grid
from fluvial.networks import CausalTransformer, TokenTransformer
from fluvial.training.loop import Stage, Training, train

from .categorical_toys import (
    ENTROPY,
    INFORMATION,
    JOINT,
    MARGINAL,
    SOURCES,
    ExactField,
    all_states,
    discrete_bound,
    expected,
    time,
)

NOISE = KeyedNoise(5)
Terms = Callable[..., Tensor]


def integral(path: CategoricalPath, terms: Terms, field: Any, nodes: int = 24) -> float:
    """Over t from 0 to 1, Gauss and Legendre in the cube root of t: there are logarithms of t."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    total = 0.0
    for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
        total += weight * 3 * point**2 * expected(path, terms, time(point**3), field)
    return total


# Bounds by enumeration


def test_entropy_of_the_toy() -> None:
    assert pytest.approx((ENTROPY, INFORMATION), abs=1e-6) == (2.068479, 0.116489)


@pytest.mark.parametrize(
    ("schedule", "steps", "bound"),
    [
        (Linear(), 1, 2.184967),
        (Linear(), 2, 2.126723),
        (Linear(), 4, 2.097601),
        (Linear(), 8, 2.083040),
        (Cosine(), 4, 2.103947),
        (Sine(), 4, 2.103947),
        (Cosine(2.0), 4, 2.102597),
    ],
)
def test_discrete_bound_absorbing(schedule: Schedule, steps: int, bound: float) -> None:
    path = CategoricalPath(3, "absorbing", schedule)
    value = discrete_bound(path, ExactField(path), steps)
    assert value == pytest.approx(bound, abs=1e-6)
    if schedule == Linear():
        assert value == pytest.approx(ENTROPY + INFORMATION / steps, abs=1e-12)


def test_discrete_bound_of_imperfect_networks() -> None:
    path = CategoricalPath(3)
    field = ExactField(path, power=0.5)
    for steps, bound in ((1, 2.188055), (2, 2.143828), (4, 2.121715)):
        assert discrete_bound(path, field, steps) == pytest.approx(bound, abs=1e-6)
    independent = ExactField(path, joint=torch.outer(JOINT.sum(1), JOINT.sum(0)))
    for steps in (1, 3, 4):
        assert discrete_bound(path, independent, steps) == pytest.approx(2.184967, abs=1e-6)


@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Sine(), Polynomial(2.0)])
def test_continuous_bound_absorbing_does_not_see_the_schedule(schedule: Schedule) -> None:
    path = CategoricalPath(3, "absorbing", schedule)
    assert integral(path, continuous_terms, ExactField(path)) == pytest.approx(ENTROPY, abs=1e-6)
    imperfect = ExactField(path, power=0.5)
    assert integral(path, continuous_terms, imperfect) == pytest.approx(2.099601, abs=1e-6)
    assert integral(path, flow_terms, imperfect) == pytest.approx(2.099601, abs=1e-6)


@pytest.mark.parametrize(
    ("source", "bounds"),
    [
        ("uniform", (2.184967, 2.141631, 2.107167, 2.088103)),
        ("marginal", (2.184967, 2.142680, 2.107849, 2.088471)),
    ],
)
def test_discrete_bound_elsewhere(source: str, bounds: tuple[float, ...]) -> None:
    path = CategoricalPath(3, SOURCES[source])
    for steps, bound in zip((1, 2, 4, 8), bounds, strict=True):
        assert discrete_bound(path, ExactField(path), steps) == pytest.approx(bound, abs=1e-6)
    late = {"uniform": 2.070943, "marginal": 2.070991}[source]
    assert discrete_bound(path, ExactField(path), 64) == pytest.approx(late, abs=1e-6)


def test_a_schedule_that_does_not_end_at_0_pays_the_prior() -> None:
    path = CategoricalPath(3, "uniform", Linear(0.05))
    assert discrete_bound(path, ExactField(path), 4) == pytest.approx(2.105354, abs=1e-6)
    paid = (JOINT.flatten() * prior_terms(path, all_states(3)).sum(1)).sum()
    assert float(paid) == pytest.approx(0.004923, abs=1e-6)
    assert (
        float(prior_terms(CategoricalPath(3, "absorbing", Linear(0.05)), all_states(3)).min())
        == math.inf
    )
    path = CategoricalPath(3, MARGINAL, Linear(0.05))
    law = marginal_probs(path, torch.arange(3)[:, None], time(1.0))[:, 0]
    exact = (law * (law / path.pi).log()).sum(1)
    torch.testing.assert_close(prior_terms(path, torch.arange(3)[:, None])[:, 0], exact)


@pytest.mark.parametrize("source", ["uniform", "marginal"])
@pytest.mark.parametrize("schedule", [Linear(), Cosine(2.0)])
def test_continuous_bound_elsewhere(source: str, schedule: Schedule) -> None:
    path = CategoricalPath(3, SOURCES[source], schedule)
    field = ExactField(path)
    assert integral(path, continuous_terms, field) == pytest.approx(ENTROPY, abs=1e-4)
    loose = {"uniform": 2.661485, "marginal": 2.630489}[source]
    assert integral(path, flow_terms, field) == pytest.approx(loose, abs=1e-4)


@pytest.mark.parametrize(
    ("source", "diffusion", "flow"),
    [("uniform", 1.425294, 2.094587), ("marginal", 1.458553, 2.080736)],
)
def test_integrands(source: str, diffusion: float, flow: float) -> None:
    path, t = CategoricalPath(3, SOURCES[source]), time(0.6)
    field = ExactField(path)
    assert expected(path, continuous_terms, t, field) == pytest.approx(diffusion, abs=1e-6)
    assert expected(path, flow_terms, t, field) == pytest.approx(flow, abs=1e-6)

    def by_score(path: Any, log_p: Tensor, x: Tensor, x0: Tensor, t: Tensor) -> Tensor:
        score = convert_prediction(log_p.exp(), "clean", "score", x, t, path)
        return score_entropy_terms(path, score.log(), x, x0, t)

    assert expected(path, by_score, t, field) == pytest.approx(diffusion, abs=1e-6)


def test_score_entropy() -> None:
    """Without the rate beta = 1 / alpha = 2.5, at alpha = .4 of the linear schedule."""
    path, t = CategoricalPath(3, "uniform"), time(0.6)
    log_s = torch.tensor([[[1.5, 1.0, 0.5]]]).double().log()
    x = torch.tensor([[1]])
    for x0, value in ((0, 0.257530), (1, 0.232273)):
        terms = score_entropy_terms(path, log_s, x, torch.tensor([[x0]]), t)
        assert float(terms) / 2.5 == pytest.approx(value, abs=1e-6)
    absorbing = CategoricalPath(3)
    p = torch.tensor([[[0.5, 0.3, 0.2]]]).double()
    x = torch.tensor([[3]])
    score = convert_prediction(p, "clean", "score", x, t, absorbing)
    terms = score_entropy_terms(absorbing, score.log(), x, torch.tensor([[0]]), t)
    assert float(terms) / 2.5 == pytest.approx(0.462098, abs=1e-6)
    assert pytest.approx(0.4 / 0.6 * math.log(2), abs=1e-6) == 0.462098


@pytest.mark.parametrize("source", SOURCES)
def test_terms_are_divergences_of_the_reverse_laws(source: str) -> None:
    path, t, s = CategoricalPath(3, SOURCES[source]), time(0.6), time(0.3)
    x0, x = all_states(3), all_states(path.states)
    x0, x = x0.repeat_interleave(len(x), 0), x.repeat(9, 1)
    some = (marginal_probs(path, x0, t).gather(-1, x[..., None])[..., 0] > 0).all(1)
    x0, x = x0[some], x[some]
    p = ExactField(path)(x, t)
    true, model = reverse(path, x, x0, t, s), reverse(path, x, p, t, s)
    exact = (torch.special.xlogy(true, true) - torch.special.xlogy(true, model)).sum(-1)
    torch.testing.assert_close(
        discrete_terms(path, p.log(), x, x0, t, s), exact, rtol=0, atol=1e-12
    )
    first = discrete_terms(path, p.log(), x, x0, t, time(0.0))
    nll = negative_log(p.log(), x0)
    torch.testing.assert_close(first, nll, rtol=0, atol=1e-12)
    h = 1e-6
    rate = discrete_terms(path, p.log(), x, x0, t, t - h) / h
    torch.testing.assert_close(
        continuous_terms(path, p.log(), x, x0, t), rate, rtol=1e-4, atol=1e-5
    )
    # float32 keeps what it can of a short step
    low = discrete_terms(path, p.log().float(), x, x0, t, t - 1e-3)
    assert low.dtype == torch.float32
    exact = discrete_terms(path, p.log(), x, x0, t, t - 1e-3)
    torch.testing.assert_close(low.double(), exact, rtol=1e-4, atol=1e-8)


def kl_of_a_step(path: CategoricalPath, x: Tensor, x0: Tensor, p: Tensor, *times: Tensor) -> Tensor:
    true, model = reverse(path, x, x0, *times), reverse(path, x, p, *times)
    return (torch.special.xlogy(true, true) - torch.special.xlogy(true, model)).sum(-1)


def test_step_of_the_jump_bridge() -> None:
    """KL of one jump step, rho = (alpha_s - alpha_t) / drop_t = .15 / .6."""
    path, t, s = MixturePath(3, "uniform"), time(0.6), time(0.45)
    p = torch.tensor([[[0.5, 0.3, 0.2]]]).double()
    for x, x0, value in ((1, 0, 0.101804), (1, 1, 0.192372)):
        terms = discrete_terms(path, p.log(), torch.tensor([[x]]), torch.tensor([[x0]]), t, s)
        assert float(terms) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("source", SOURCES)
def test_terms_of_a_mixture_path_are_those_of_its_jumps(source: str) -> None:
    path, t, s = MixturePath(3, SOURCES[source]), time(0.6), time(0.3)
    x0, x = all_states(3), all_states(path.states)
    x0, x = x0.repeat_interleave(len(x), 0), x.repeat(9, 1)
    some = (marginal_probs(path, x0, t).gather(-1, x[..., None])[..., 0] > 0).all(1)
    x0, x = x0[some], x[some]
    p = ExactField(path)(x, t)
    exact = kl_of_a_step(path, x, x0, p, t, s)
    result = discrete_terms(path, p.log(), x, x0, t, s)
    torch.testing.assert_close(result, exact, rtol=0, atol=1e-12)
    first = discrete_terms(path, p.log(), x, x0, t, time(0.0))
    torch.testing.assert_close(first, negative_log(p.log(), x0), rtol=0, atol=1e-12)
    h = 1e-6
    rate = discrete_terms(path, p.log(), x, x0, t, t - h) / h
    limit = continuous_terms(path, p.log(), x, x0, t)
    torch.testing.assert_close(limit, rate, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(limit, flow_terms(path, p.log(), x, x0, t), rtol=0, atol=1e-12)
    low = discrete_terms(path, p.log().float(), x, x0, t, t - 1e-3)
    exact = discrete_terms(path, p.log(), x, x0, t, t - 1e-3)
    torch.testing.assert_close(low.double(), exact, rtol=1e-4, atol=1e-8)


def test_bounds_of_a_mixture_path_say_so() -> None:
    path, x0 = MixturePath(3, "uniform"), all_states(3)
    flow = elbo(path, ExactField(path), x0, NOISE, "flow")
    for kind in ("clean", "score"):
        bound = elbo(path, ExactField(path, kind), x0, NOISE)
        assert bound.name == flow.name == "ELBO of the mixture path in continuous time"
        torch.testing.assert_close(bound.nats, flow.nats)
    bound = elbo(path, ExactField(path), x0, NOISE, "discrete", steps=2)
    assert bound.name == "ELBO of the mixture path at T = 2"
    absorbing = MixturePath(3)
    assert elbo(absorbing, ExactField(absorbing), x0, NOISE).name == "ELBO in continuous time"
    network = Logits(3)
    assert TokenMatching(network, path).name == "elbo_flow"
    assert TokenMatching(network, path, steps=4).name == "elbo_flow_T4"
    with pytest.raises(ValueError, match="bound of a diffusion"):
        TokenMatching(network, path, predicts="score")


def test_a_token_that_the_source_never_has_costs_nothing_where_it_stays() -> None:
    path, x = CategoricalPath(3, torch.tensor([0.0, 0.5, 0.5])), torch.tensor([[0]])
    p = torch.tensor([[[0.5, 0.3, 0.2]]]).double()
    t, s = time(0.6), time(0.3)
    assert float(kl_of_a_step(path, x, x, p, t, s)) == 0
    assert float(discrete_terms(path, p.log(), x, x, t, s)) == 0
    assert float(continuous_terms(path, p.log(), x, x, t)) == 0


def test_a_score_may_be_0() -> None:
    """Of what cannot be it should be; of the truth the cost is infinite."""
    path, t, x = CategoricalPath(3), time(0.5), torch.tensor([[3]])
    log_s = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]]).double().log()
    terms = [score_entropy_terms(path, log_s, x, torch.tensor([[k]]), t) for k in (0, 1)]
    assert float(terms[0]) == pytest.approx(0, abs=1e-12) and float(terms[1]) == math.inf


def test_losses_are_finite_at_the_ends_of_time_in_float32() -> None:
    for source in SOURCES.values():
        path = CategoricalPath(3, source)
        x0 = torch.tensor([[0, 1, 2]] * 5)
        t = torch.tensor([0.0, 1e-30, 1e-9, 1 - 1e-9, 1.0], dtype=torch.float64)
        x = path.sample(x0, t, NOISE).x
        logits = NOISE.normal(torch.empty(5, 3, 3)).requires_grad_()
        log_p = log_clean(logits, "cavity", x, t, path)
        for terms in (continuous_terms, flow_terms):
            loss = terms(path, log_p, x, x0, t)
            assert bool(loss.isfinite().all()) and bool((loss >= -1e-6).all())
            (grad,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
            assert bool(grad.isfinite().all())
        loss = discrete_terms(path, log_p, x, x0, torch.ones(5) / 4, torch.zeros(5))
        assert bool(loss.isfinite().all())


# Estimates of bounds


@pytest.mark.parametrize(
    ("source", "form", "exact"),
    [
        ("absorbing", "continuous", ENTROPY),
        ("absorbing", "count", ENTROPY),
        ("absorbing", "flow", ENTROPY),
        ("uniform", "continuous", ENTROPY),
        ("uniform", "flow", 2.661485),
        ("marginal", "continuous", ENTROPY),
        ("absorbing", "discrete", ENTROPY + INFORMATION / 4),
        ("uniform", "discrete", 2.107167),
    ],
)
def test_estimates_of_bounds(source: str, form: Any, exact: float) -> None:
    path, rows = CategoricalPath(3, SOURCES[source]), 4_000
    pair = NOISE.categorical(JOINT.flatten().expand(rows, 9))
    x0 = all_states(3)[pair]
    steps = 4 if form == "discrete" else None
    bound = elbo(path, ExactField(path), x0, NOISE, form, steps=steps, draws=4)
    error = float(bound.nats.std() / math.sqrt(rows))
    assert abs(float(bound.nats.mean()) - exact) < 5 * error < 0.3
    assert bound.bits_per_token == pytest.approx(float(bound.nats.mean()) / 2 / math.log(2))
    assert bound.perplexity == pytest.approx(math.exp(bound.nats_per_token))
    assert bound.name in str(bound) and "8000 tokens" in str(bound)


def test_counts_of_an_imperfect_network() -> None:
    path, rows = CategoricalPath(3), 4_000
    x0 = all_states(3)[NOISE.categorical(JOINT.flatten().expand(rows, 9))]
    bound = elbo(path, ExactField(path, power=0.5), x0, NOISE, "count", draws=4)
    error = float(bound.nats.std() / math.sqrt(rows))
    assert abs(float(bound.nats.mean()) - 2.099601) < 5 * error < 0.06
    assert 5 * error < 2.099601 - ENTROPY + 0.05


def test_score_fields_have_the_same_bound() -> None:
    path = CategoricalPath(3, "uniform")
    x0 = all_states(3)
    bounds = [
        elbo(path, ExactField(path, kind), x0, NOISE) for kind in ("clean", "cavity", "score")
    ]
    for bound in bounds[1:]:
        torch.testing.assert_close(bound.nats, bounds[0].nats, rtol=1e-5, atol=1e-5)


def test_counts_have_less_variance_and_padding_does_not_count() -> None:
    path = CategoricalPath(3)
    x0 = all_states(3).repeat(400, 1)
    field = ExactField(path)
    spread = [
        float(elbo(path, field, x0, NOISE, form).nats.std()) for form in ("count", "continuous")
    ]
    assert spread[0] < spread[1]
    mask = torch.ones_like(x0, dtype=torch.bool)
    mask[::2, 1] = False
    given: list[Tensor] = []

    class Watching(ExactField):
        def __call__(self, x: Tensor, t: Tensor, **cond: object) -> Tensor:
            given.append(x)
            return super().__call__(x, t)

    for form in ("count", "continuous", "flow"):
        bound = elbo(path, Watching(path), x0, NOISE, form, mask=mask, draws=2)
        assert bound.tokens.tolist()[:2] == [1, 2]
    assert all(bool((x[~mask] == x0[~mask]).all()) for x in given)


@pytest.mark.parametrize("source", ["absorbing", "marginal"])
def test_padding_may_hold_any_symbol(source: str) -> None:
    """The mask symbol of an absorbing path; elsewhere a symbol beyond the classes, or one of them
    that the source never has, at t = 1 too."""
    pi = torch.tensor([0.0, 0.5, 0.5])
    path = CategoricalPath(3, "absorbing" if source == "absorbing" else pi)
    mask = torch.tensor([[True, True], [True, False]])
    losses, nats = [], []
    for pad in (0, 1, 3):
        x0 = torch.where(mask, torch.tensor([[1, 2], [2, 2]]), pad)
        network = Padded(3)
        for options in ({"predicts": "cavity", "steps": 1, "aux": 0.1}, {}):
            objective = TokenMatching(network, path, **options)
            loss = objective({"x": x0, "mask": mask}, NOISE)["loss"]
            (grad,) = torch.autograd.grad(loss, network.table)
            assert bool(grad.isfinite().all()) and bool((grad != 0).any())
            losses.append(float(loss.detach()))
        forms = ["continuous", "flow", *(["count"] if path.absorbing else [])]
        nats += [elbo(path, objective.field, x0, NOISE, f, mask=mask).nats for f in forms]
        steps = elbo(path, objective.field, x0, NOISE, "discrete", steps=2, mask=mask)
        nats.append(steps.nats)
        pairs = uniform_grid(2)
        start = path.source(x0, NOISE, mask=mask)
        out = simulate(start, pairs, Ancestral(), path, objective.field, NOISE, mask=mask)
        assert bool((out[~mask] == pad).all()) and int(out[mask].max()) < 3
    assert losses[:2] == losses[2:4] == losses[4:]
    third = len(nats) // 3
    for one, other in zip(nats[:third] * 2, nats[third:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_nothing_to_count_is_refused() -> None:
    path = CategoricalPath(3)
    for shape in ((0, 2), (2, 0)):
        x0 = torch.zeros(shape, dtype=torch.int64)
        with pytest.raises(ValueError, match="must hold tokens"):
            elbo(path, ExactField(path), x0, NOISE)
        with pytest.raises(ValueError, match="must hold tokens"):
            TokenMatching(Logits(4), path)({"x": x0}, NOISE)
        network = TokenTransformer(vocabulary=4, outputs=3, width=8, depth=1, heads=2)
        assert network(x0).shape == (*shape, 3)


def test_geometric_noise_adds_the_reconstruction() -> None:
    path, rows = CategoricalPath(3, "uniform", Geometric(0.3, 12.0)), 4_000
    x0 = all_states(3)[NOISE.categorical(JOINT.flatten().expand(rows, 9))]
    bound = elbo(path, ExactField(path), x0, NOISE, draws=8)
    t0 = time(1e-15)
    start = expected(path, lambda p, log_p, x, x0, t: negative_log(log_p, x0), t0, ExactField(path))
    whole = integral(path, continuous_terms, ExactField(path), 48)
    error = float(bound.nats.std() / math.sqrt(rows))
    assert abs(float(bound.nats.mean()) - start - whole) < 5 * error


def test_bad_bounds_are_refused() -> None:
    path, x0 = CategoricalPath(3, "uniform"), all_states(3)
    for arguments in (
        {"form": "count"},
        {"form": "discrete"},
        {"steps": 3},
        {"draws": 0},
        {"form": "x"},
    ):
        with pytest.raises(ValueError, match=r"form|draws"):
            elbo(path, ExactField(path), x0, NOISE, **arguments)
    with pytest.raises(ValueError, match="x0 must hold"):
        elbo(path, ExactField(path), x0 + 1, NOISE)
    with pytest.raises(ValueError, match="steps >= 1"):
        elbo(path, ExactField(path), x0, NOISE, "discrete", steps=0)
    with pytest.raises(ValueError, match="padding alone"):
        elbo(path, ExactField(path), x0, NOISE, mask=torch.zeros(9, 2, dtype=torch.bool))

    @dataclass
    class Wrong:
        value: Tensor
        predicts: str = "clean"

        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            return self.value

    right = torch.full((9, 2, 3), 1 / 3)
    for value, message in (
        (right * math.nan, "sum to 1"),
        (right.log(), "sum to 1"),
        (right[..., :2], "shape"),
    ):
        for form, steps in (("flow", None), ("discrete", 2)):
            with pytest.raises(ValueError, match=message):
                elbo(path, Wrong(value), x0, NOISE, form, steps=steps)


# Objectives


class Logits(nn.Module):
    """Free logits of every pair of tokens: can be exact in discrete or without time."""

    def __init__(self, states: int, outputs: int = 3) -> None:
        super().__init__()
        self.states = states
        self.table = nn.Parameter(torch.zeros(states**2, 2, outputs, dtype=torch.float64))

    def forward(self, x: Tensor, t: Tensor, **cond: Tensor) -> Tensor:
        assert t.shape == x.shape[:1] and t.dtype == torch.float64
        return self.table[x[:, 0] * self.states + x[:, 1]]


class Padded(nn.Module):
    """Logits of a token and its place alone, padding or not."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        first = torch.arange(2 * outputs * 5, dtype=torch.float64).sin()
        self.table = nn.Parameter(first.reshape(5, 2, outputs))

    def forward(self, x: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        return self.table[x, torch.arange(2)]


OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "MDLM": ("absorbing", {"times": Stratified()}),
    "MDLM, even drops": ("absorbing", {"times": Stratified(UniformDrop(Cosine()))}),
    "D3PM absorbing": ("absorbing", {"predicts": "cavity", "steps": 1, "aux": 0.01}),
    "SEDD absorbing": ("absorbing", {"predicts": "score", "times": LogDrop(Linear(), 0.01)}),
    "masked cross-entropy": ("absorbing", {"loss": "cross_entropy"}),
}


@pytest.mark.parametrize("case", OBJECTIVES)
def test_objectives_learn_the_conditional_laws(case: str) -> None:
    """Without time, on an absorbing path, all have the same optimum: the exact conditionals."""
    source, options = OBJECTIVES[case]
    schedule = Cosine() if "even" in case else Linear()
    path = CategoricalPath(3, SOURCES[source], schedule)
    network = Logits(path.states)
    objective = TokenMatching(network, path, **options)
    rows = 1000 * JOINT.flatten()
    x0 = all_states(3).repeat_interleave(rows.round().long(), 0)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    for step in range(60):
        optimizer.param_groups[0]["lr"] = 0.1 if step < 30 else 0.02
        loss = objective({"x": x0}, NOISE.at(step))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x = torch.tensor([[3, 3], [0, 3], [1, 3], [3, 2]])
    if options.get("steps"):  # one step sees masks only
        x = x[:1]
    learned, exact = objective.field(x, time(0.5)).detach(), ExactField(path)(x, time(0.5))
    assert float((learned - exact).abs().max()) < 0.05


def test_objective_values_are_the_bounds() -> None:
    """With the exact field as its network, the mean loss is the bound a token, up to the prior."""

    class Exact(nn.Module):
        def __init__(self, path: CategoricalPath, kind: str) -> None:
            super().__init__()
            self.field, self.one = ExactField(path, kind), nn.Parameter(torch.ones(()).double())

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return (self.field(x, t) * self.one).log().clamp(min=-700)

    rows = 1_500
    x0 = all_states(3)[NOISE.categorical(JOINT.flatten().expand(rows, 9))]
    cases: list[tuple[str, str, dict[str, Any], float]] = [
        ("uniform", "clean", {}, ENTROPY),
        ("uniform", "cavity", {}, ENTROPY),
        ("marginal", "cavity", {"steps": 4}, 2.107849),
        ("uniform", "clean", {"loss": "flow"}, 2.661485),
        ("uniform", "score", {}, ENTROPY),
    ]
    for source, kind, options, bound in cases:
        path = CategoricalPath(3, SOURCES[source])
        objective = TokenMatching(
            Exact(path, kind), path, predicts=kind, times=Stratified(), **options
        )
        terms = objective({"x": x0}, NOISE)
        nats = terms[objective.name]
        error = float(nats.std() / math.sqrt(rows))
        assert abs(float(terms["loss"].detach()) - bound / 2) < 5 * error
        assert objective.name == {4: "elbo_T4"}.get(
            options.get("steps"), "elbo_flow" if "loss" in options else "elbo_continuous"
        )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "bidirectional": lambda: TokenTransformer(
        vocabulary=6, outputs=5, width=16, depth=1, heads=2, time=True, num_classes=2
    ),
    "causal": lambda: CausalTransformer(vocabulary=6, width=16, depth=1, heads=2, time=True),
}


@pytest.mark.parametrize(("network", "predicts"), [("bidirectional", "clean"), ("causal", "score")])
def test_the_training_loop_trains_it(network: str, predicts: str, tmp_path: Any) -> None:
    x = (torch.arange(8) + torch.arange(64)[:, None]) % 5
    data = {"x": x, "mask": torch.arange(8) < 4 + x[:, :1]}
    options: dict[str, Any] = {}
    if network == "bidirectional":
        data["label"] = x[:, 0] % 2
        options["drop"] = 0.2
    path = CategoricalPath(5)
    objective = TokenMatching(
        NETWORKS[network](), path, predicts=predicts, times=Stratified(), **options
    )
    training = Training(steps=30, batch_size=32, lr=1e-2, ema=0.9, accumulation=2)
    stage = Stage(objective, data, training, validation=data)
    (outcome,) = train(stage, out=tmp_path / "run", progress=False)
    measured = outcome.validation["last"]
    assert measured["elbo_continuous"] < 0.92 * math.log(5)  # untrained: 0.99 of it
    terms = objective(data, NOISE)
    parts = [
        objective({k: v[part] for k, v in data.items()}, NOISE.rows(torch.arange(64)[part]))["loss"]
        for part in (slice(0, 32), slice(32, 64))
    ]
    torch.testing.assert_close(terms["loss"], sum(parts) / 2)
    field = objective.field
    cond = {"label": data["label"]} if "label" in data else {}
    probs = field(path.sample(x, time(0.5), NOISE).x, time(0.5), **cond)
    assert isinstance(field, TokenField)
    torch.testing.assert_close(probs.sum(-1), torch.ones(64, 8))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("output", ["clean", "cavity"])
def test_fields_may_overwrite_logits(source: str, output: str) -> None:
    path, x, t = CategoricalPath(3, SOURCES[source]), all_states(3), time(0.5)
    x = torch.where(torch.arange(9)[:, None] % 3 == 0, path.states - 1, x)
    for more in (0, 2):  # outputs that are not used too
        table = torch.arange(18.0 * (3 + more)).sin().reshape(9, 2, 3 + more)
        kept = []

        class Fresh(nn.Module):
            def forward(self, x: Tensor, t: Tensor) -> Tensor:
                kept.append(table.clone())  # noqa: B023
                return kept[-1]  # noqa: B023

        plain = TokenField(Fresh(), path, output)(x, t)
        torch.testing.assert_close(kept[-1], table, rtol=0, atol=0)
        over = TokenField(Fresh(), path, output, overwrite=True)(x, t)
        torch.testing.assert_close(over, plain)
        weights = table.clone().requires_grad_()
        grad = TokenField(Free(weights), path, output, overwrite=True)(x, t)
        torch.testing.assert_close(grad.detach(), plain)
        torch.testing.assert_close(weights.detach(), table, rtol=0, atol=0)


class Free(nn.Module):
    """The same logits at all states."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.logits


def test_outputs_beyond_the_states_are_not_used() -> None:
    x0, rest = all_states(3), torch.full((9, 2, 2), 1e3).double()
    for predicts in ("clean", "cavity", "score"):
        losses = []
        for more in (0, 2):
            network = Logits(3, 3 + more)
            network.table.data = torch.cat(
                [torch.arange(54.0).double().sin().reshape(9, 2, 3), rest], 2
            )[..., : 3 + more]
            objective = TokenMatching(network, CategoricalPath(3, "uniform"), predicts=predicts)
            losses.append(float(objective({"x": x0}, NOISE)["loss"].detach()))
        assert losses[0] == losses[1]


def test_bad_objectives_are_refused() -> None:
    path, network = CategoricalPath(3), Logits(4)
    with pytest.raises(TypeError, match="path must be"):
        TokenMatching(network, "absorbing")  # type: ignore[arg-type]
    for options in (
        {"loss": "mse"},
        {"predicts": "noise"},
        {"predicts": "score", "steps": 3},
        {"steps": 0},
        {"aux": -1.0},
        {"drop": 0.5},
        {"times": LogitNormal()},
        {"times": UniformDrop(Linear()), "steps": 3},
    ):
        with pytest.raises(ValueError, match="got"):
            TokenMatching(network, path, **options)
    objective = TokenMatching(network, path)
    with pytest.raises(ValueError, match="must hold 'x'"):
        objective({"y": all_states(3)}, NOISE)
    with pytest.raises(ValueError, match="x0 must hold"):
        objective({"x": all_states(4)}, NOISE)
    with pytest.raises(ValueError, match="logits"):
        TokenMatching(Logits(4, 2), path)({"x": all_states(3)}, NOISE)
    with pytest.raises(ValueError, match="logits"):
        TokenField(Logits(4, 2), path)(all_states(3), time(0.5))


def test_d3pm_cosine_in_discrete_steps() -> None:
    path = CategoricalPath(3, "uniform", d3pm_cosine(4))
    value = discrete_bound(path, ExactField(path), 4)
    assert ENTROPY < value < ENTROPY + INFORMATION
