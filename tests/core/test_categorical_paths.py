"""Schedules, categorical paths and predictions, against enumeration and the closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.categorical.matrices import MatrixPath, banded_matrix, gaussian_matrix
from fluvial.core.categorical.paths import (
    CategoricalPath,
    MixturePath,
    ReferenceBridge,
    marginal_probs,
    posterior_probs,
    rate_matrix_rows,
    transition_probs,
)
from fluvial.core.categorical.predictions import convert_prediction, tweedie_probs
from fluvial.core.categorical.schedules import (
    Cosine,
    Custom,
    ExponentialTilted,
    Geometric,
    Linear,
    LogDrop,
    Polynomial,
    Power,
    Schedule,
    Sine,
    Table,
    UniformDrop,
    d3pm_cosine,
)
from fluvial.core.noise import KeyedNoise

from .categorical_toys import (
    JOINT,
    MARGINAL,
    PREDICTED,
    SOURCES,
    ExactField,
    all_states,
    joint_given,
    time,
)
from .toys import assert_shares

NOISE = KeyedNoise(3)
SCHEDULES: list[Schedule] = [
    Linear(),
    Linear(1e-3),
    Cosine(),
    Cosine(2.0, 0.008),
    Sine(),
    Power(2.0),
    Polynomial(2.0),
    Geometric(),
    ExponentialTilted(),
    Custom(lambda t: (1 - t) * torch.exp(-t)),
]


def name(value: object) -> str:
    return repr(value) if isinstance(value, Linear | Cosine) else type(value).__name__


def close(value: Tensor, wanted: Any, tolerance: float = 1e-6) -> None:
    wanted = torch.as_tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(value.double(), wanted, rtol=0, atol=tolerance)


# Schedules


@pytest.mark.parametrize(
    ("schedule", "alphas"),
    [
        (Cosine(), (0.923880, 0.707107, 0.382683)),
        (Cosine(2.0), (0.853553, 0.5, 0.146447)),
        (Sine(), (0.617317, 0.292893, 0.076120)),
        (ExponentialTilted(), (0.642626, 0.379885, 0.172011)),
        (Geometric(1e-4, 20.0), (0.997887, 0.956264, 0.388391)),
        (Linear(), (0.75, 0.5, 0.25)),
        (d3pm_cosine(4), (0.920333, 0.702740, 0.379832)),
    ],
    ids=name,
)
def test_alpha(schedule: Schedule, alphas: tuple[float, ...]) -> None:
    close(schedule.alpha(torch.tensor([0.25, 0.5, 0.75]).double()), alphas)


def test_d3pm_cosine_ends_at_what_its_clamp_leaves() -> None:
    close(d3pm_cosine(4).alpha(time(1.0)), 0.000380)


@pytest.mark.parametrize(
    ("schedule", "weight"),
    [
        (Linear(), 4.0),
        (Cosine(), 7.896926),
        (Cosine(2.0), 7.584476),
        (Sine(), 3.792238),
        (Power(2.0), 3.428571),
        (Polynomial(2.0), 8.0),
    ],
    ids=name,
)
def test_weight(schedule: Schedule, weight: float) -> None:
    t = time(0.25)
    close(-schedule.alpha_rate(t) / schedule.drop(t), weight)


@pytest.mark.parametrize("schedule", [*SCHEDULES, d3pm_cosine(8)], ids=name)
def test_a_schedule_agrees_with_itself(schedule: Schedule) -> None:
    t = torch.linspace(0.01, 0.99, 36, dtype=torch.float64)
    close(schedule.alpha(t) + schedule.drop(t), torch.ones(36), 1e-12)
    close(schedule.time(schedule.drop(t)), t, 1e-9)
    h = 1e-6
    close(schedule.alpha_rate(t), (schedule.alpha(t + h) - schedule.alpha(t - h)) / (2 * h), 1e-5)
    ends = schedule.alpha(torch.tensor([0.0, 1.0]).double())
    assert abs(ends[0] - 1) < 1e-15 and 0 <= ends[1] < 0.01
    assert float(schedule.drop(time(0.0))) == 0
    assert schedule.alpha(torch.tensor([0.3, 0.4])).dtype == torch.float32


@pytest.mark.parametrize("schedule", [*SCHEDULES[:7], ExponentialTilted()], ids=name)
def test_drop_keeps_its_digits_at_small_times(schedule: Schedule) -> None:
    t = 1e-12
    slope = float(-schedule.alpha_rate(time(t)))
    expected = {Cosine(): math.pi**2 / 8 * t**2, Polynomial(2.0): t**2}.get(schedule, slope * t)
    if schedule == Cosine(2.0, 0.008):
        expected = slope * t
    assert abs(float(schedule.drop(time(t))) / expected - 1) < 1e-9


def test_bad_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="fall"):
        Table([0.5, 0.6])
    with pytest.raises(ValueError, match="fall"):
        Table([1.0, 0.5])
    with pytest.raises(ValueError, match="alpha_of must not rise"):
        Custom(lambda t: 0.5 * (1 - t) * (1 + torch.cos(8 * t) ** 2))
    with pytest.raises(ValueError, match=r"alpha_of\(0\)"):
        Custom(lambda t: 0.5 - 0.5 * t)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        Custom(lambda t: 1 - 2 * t)
    for make in (
        lambda: Linear(1.0),
        lambda: Cosine(0.0),
        lambda: Power(-1.0),
        lambda: Polynomial(0.0),
        lambda: Geometric(2.0, 1.0),
        lambda: LogDrop(Linear(), 0.0),
    ):
        with pytest.raises(ValueError, match="got"):
            make()


@pytest.mark.parametrize("law", [UniformDrop(Cosine()), LogDrop(Sine(), 1e-3)], ids=name)
def test_densities_of_training_times(law: Any) -> None:
    u = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    h = 1e-6
    slope = (law.quantile(u + h) - law.quantile(u - h)) / (2 * h)
    close(law.density(law.quantile(u)) * slope, torch.ones(19), 1e-6)
    t = law(torch.empty(5, 2, dtype=torch.float64), NOISE)
    assert t.shape == (5,) and bool(((t > 0) & (t <= 1)).all())


# Laws


def step_matrix(path: CategoricalPath, s: float, t: float) -> Tensor:
    x = torch.arange(path.states)[None]
    return transition_probs(path, x, time(s), time(t))[0]


@pytest.mark.parametrize("source", SOURCES)
def test_step_matrices_multiply(source: str) -> None:
    path = CategoricalPath(3, SOURCES[source], Cosine())
    times = [0.0, *sorted(NOISE.uniform(torch.empty(1, 5, dtype=torch.float64))[0].tolist()), 0.97]
    whole = torch.eye(path.states, dtype=torch.float64)
    for s, t in zip(times[:-1], times[1:], strict=True):
        whole = whole @ step_matrix(path, s, t)
    close(whole, step_matrix(path, 0.0, 0.97), 1e-12)
    close(whole[:3], marginal_probs(path, torch.arange(3)[None], time(0.97))[0], 1e-12)


@pytest.mark.parametrize("source", SOURCES)
def test_the_generator_makes_the_step(source: str) -> None:
    path = CategoricalPath(3, SOURCES[source], Linear())
    generator = torch.ones(path.states, 1).double() @ path.pi[None] - torch.eye(path.states)
    exact = torch.linalg.matrix_exp(1.7 * generator)
    close(step_matrix(path, 0.0, 1 - math.exp(-1.7)), exact, 1e-12)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("schedule", [Linear(), Cosine(2.0), Sine()], ids=name)
def test_posterior_is_bayes_rule_for_every_pair_of_tokens(source: str, schedule: Schedule) -> None:
    """q(x_s | x_t, x_0), all states of two tokens at once, and what it is marginalised over p."""
    path = CategoricalPath(3, SOURCES[source], schedule)
    s, t = time(0.3), time(0.65)
    forward, step = step_matrix(path, 0.0, 0.3), step_matrix(path, 0.3, 0.65)
    both = step_matrix(path, 0.0, 0.65)
    x0, x = all_states(3), all_states(path.states)
    clean, now = x0.repeat_interleave(len(x), 0), x.repeat(len(x0), 1)
    reached = both[clean, now]
    exact = forward[clean] * step.T[now] / reached.unsqueeze(-1)
    possible = (reached > 0).all(1)
    result = posterior_probs(path, now, clean, t, s)
    close(result[possible], exact[possible], 1e-12)
    close(joint_given(result[possible]).sum(1), torch.ones(int(possible.sum())), 1e-12)
    one_hot = torch.nn.functional.one_hot(clean, 3).double()
    close(posterior_probs(path, now, one_hot, t, s), result, 1e-14)
    # under a law of the clean token that the state allows
    p = (JOINT / JOINT.sum(1, keepdim=True))[clean]
    weights = p * both[:3].T[now]
    p = torch.where(weights.sum(-1, keepdim=True) > 0, weights, 1.0)
    p = p / p.sum(-1, keepdim=True)
    w = torch.where(both[:3].T[now] > 0, p / both[:3].T[now].clamp(min=1e-300), 0.0)
    mixed = (w @ forward[:3]) * step.T[now]
    close(posterior_probs(path, now, p, t, s), mixed / mixed.sum(-1, keepdim=True), 1e-12)


def one(path: CategoricalPath, x: int, clean: Any, t: float, s: float) -> Tensor:
    clean = torch.as_tensor(clean)
    clean = clean[None, None] if clean.ndim else clean[None, None]
    return posterior_probs(path, torch.tensor([[x]]), clean, time(t), time(s))[0, 0]


def test_posterior_values() -> None:
    uniform, marginal = CategoricalPath(3, "uniform"), CategoricalPath(3, MARGINAL)
    close(one(uniform, 1, 0, 0.6, 0.3), (0.571429, 0.357143, 0.071429))
    close(one(marginal, 1, 0, 0.6, 0.3), (0.607143, 0.35, 0.042857))
    close(one(uniform, 1, 1, 0.6, 0.3), (0.023810, 0.952381, 0.023810))
    close(one(marginal, 1, 1, 0.6, 0.3), (0.033251, 0.953448, 0.013300))
    close(one(uniform, 1, PREDICTED, 0.6, 0.3), (0.307143, 0.535714, 0.157143))
    close(one(marginal, 1, PREDICTED, 0.6, 0.3), (0.334975, 0.531034, 0.133990))
    absorbing = CategoricalPath(3)
    close(one(absorbing, 3, PREDICTED, 0.6, 0.3), (0.25, 0.15, 0.1, 0.5))
    close(one(absorbing, 1, PREDICTED, 0.6, 0.3), (0, 1, 0, 0), 0.0)


def test_a_cavity_is_no_clean_prediction() -> None:
    """The law of a cavity in the place of x_0, and what taking one for the other costs."""
    for source, given, worst in (
        ("uniform", (0.200893, 0.691964, 0.107143), (0.151604, 0.159439)),
        ("marginal", (0.214286, 0.7, 0.085714), (0.155673, 0.220328)),
    ):
        path = CategoricalPath(3, SOURCES[source])
        t, s = time(0.6), time(0.3)
        x = torch.tensor([[1]])
        clean = convert_prediction(PREDICTED[None, None], "cavity", "clean", x, t, path)
        close(posterior_probs(path, x, clean, t, s)[0, 0], given)

        x = all_states(3)
        clean, cavity = ExactField(path)(x, t), ExactField(path, "cavity")(x, t)
        close(convert_prediction(cavity, "cavity", "clean", x, t, path), clean, 1e-12)
        close(convert_prediction(clean, "clean", "cavity", x, t, path), cavity, 1e-12)
        exact = posterior_probs(path, x, clean, t, s)
        as_clean = convert_prediction(clean, "cavity", "clean", x, t, path)
        crossed = posterior_probs(path, x, as_clean, t, s)
        other = posterior_probs(path, x, cavity, t, s)
        errors = [float((p - exact)[:, 0].abs().sum(-1).max()) / 2 for p in (crossed, other)]
        assert errors == pytest.approx(worst, abs=1e-6)


def test_kinds_of_a_state() -> None:
    path, x, t, s = CategoricalPath(3, "uniform"), torch.tensor([[1, 2]]), time(0.6), time(0.3)
    clean, cavity = ExactField(path)(x, t), ExactField(path, "cavity")(x, t)
    close(clean[0, 0], (0.148148, 0.555556, 0.296296))
    close(cavity[0, 0], (0.235294, 0.294118, 0.470588))
    close(posterior_probs(path, x, clean, t, s)[0, 0], (0.119048, 0.687831, 0.193122))
    close(ExactField(path, "score")(x, t)[0, 0], (0.925926, 1, 1.222222))
    path = CategoricalPath(3, MARGINAL)
    close(ExactField(path, "score")(x, t)[0, 0], (1.300518, 1, 1.067358))


@pytest.mark.parametrize("source", SOURCES)
def test_scores_are_ratios_and_go_back(source: str) -> None:
    path, t, s = CategoricalPath(3, SOURCES[source]), time(0.6), time(0.3)
    x = all_states(path.states)
    table = joint_given(marginal_probs(path, all_states(3), t))
    law = (JOINT.flatten() @ table).reshape(path.states, path.states)
    ratios = (
        torch.stack([law[:, x[:, 1]].T, law[x[:, 0]]], dim=1) / law[x[:, 0], x[:, 1]][:, None, None]
    )
    clean = ExactField(path)(x, t)
    score = convert_prediction(clean, "clean", "score", x, t, path)
    moving = (x == 3) if path.absorbing else torch.ones_like(x, dtype=torch.bool)
    # a token that may not be masked has no way to be another: only the mask is its neighbour
    expected = ratios[moving]
    close(score[moving], expected, 1e-12)
    close(convert_prediction(score, "score", "clean", x, t, path), clean, 1e-12)
    exact = posterior_probs(path, x, clean, t, s)
    close(tweedie_probs(score, x, t, s, path), exact, 1e-12)
    with pytest.raises(ValueError, match="says nothing"):
        tweedie_probs(score, x, time(1.0), s, path)
    if source != "absorbing":
        with pytest.raises(ValueError, match="says nothing"):
            convert_prediction(score, "score", "clean", x, time(1.0), path)


def test_rates() -> None:
    x, p, t = torch.tensor([[1]]), PREDICTED[None, None], time(0.6)
    uniform = CategoricalPath(3, "uniform")
    close(rate_matrix_rows(uniform, x, p, t)[0, 0], (1.5, -2.5, 1.0))
    jump = rate_matrix_rows(MixturePath(3, "uniform"), x, p, t)[0, 0]
    close(jump, (0.833333, -1.166667, 0.333333))


@pytest.mark.parametrize("kind", [CategoricalPath, MixturePath])
@pytest.mark.parametrize("source", SOURCES)
def test_rates_are_the_limit_of_short_steps(source: str, kind: Any) -> None:
    path = kind(3, SOURCES[source], Cosine(2.0))
    x, t, h = all_states(path.states), time(0.6), 1e-7
    clean = ExactField(path)(x, t)
    start = torch.nn.functional.one_hot(x, path.states)
    slope = (posterior_probs(path, x, clean, t, t - h) - start) / h
    close(rate_matrix_rows(path, x, clean, t), slope, 1e-5)


@pytest.mark.parametrize("source", SOURCES)
def test_diffusion_and_flow_have_the_same_marginals_and_other_joints(source: str) -> None:
    """One exact reverse step of either, from the exact law at t, gives the exact law at s of every
    token; pairs (x_s, x_t) agree only where absorbing."""
    t, s = time(0.6), time(0.3)
    x = torch.arange(CategoricalPath(3, SOURCES[source]).states)[None].T
    kept = []
    for kind in (CategoricalPath, MixturePath):
        path = kind(3, SOURCES[source])
        x0 = torch.zeros_like(x)
        now = marginal_probs(path, x0[:1], t)[0, 0]
        table = posterior_probs(path, x, x0, t, s)[:, 0]
        close(now @ table, marginal_probs(path, x0[:1], s)[0, 0], 1e-12)
        kept.append(float(now @ table.diag()))
    expected = {"uniform": (0.714286, 0.8), "marginal": (0.770286, 0.85)}
    if source in expected:
        assert kept == pytest.approx(expected[source], abs=1e-6)
    else:
        assert kept[0] == pytest.approx(kept[1], abs=1e-12)


@pytest.mark.parametrize("source", SOURCES)
def test_posterior_of_a_mixture_is_that_of_its_jumps(source: str) -> None:
    """q(x_s | x_t, x_0), from all (x_0, x_1) and the time of the one jump between them."""
    path, t, s = MixturePath(3, SOURCES[source], Sine()), time(0.6), time(0.3)
    late, early = path.alpha(t), path.drop(s)
    x0, x = all_states(3), all_states(path.states)
    eye = torch.eye(path.states).double()
    both = torch.zeros(3, path.states, path.states).double()  # of (x_s, x_t) given x_0
    for k in range(3):
        both[k, k, k] += late  # at t it has jumped to x_0 already
        both[k, k] += (1 - late - early) * path.pi  # between t and s
        both[k] += early * eye * path.pi  # not yet
    clean, now = x0.repeat_interleave(len(x), 0), x.repeat(len(x0), 1)
    reached = both.sum(1)[clean, now]
    exact = both.mT[clean, now] / reached.clamp(min=1e-300).unsqueeze(-1)
    some = (reached > 0).all(1)
    result = posterior_probs(path, now, clean, t, s)
    close(joint_given(result[some]), joint_given(exact[some]), 1e-12)


def test_posterior_of_a_pinned_chain_is_that_of_the_chain() -> None:
    """q(x_s | x_t, x_0, x_1) for all states of both tokens and both ends does not see x_1."""
    path = ReferenceBridge(3, MARGINAL, Custom(lambda t: 0.2**t))
    first, then, last = (step_matrix(path, *pair) for pair in ((0, 0.25), (0.25, 0.5), (0.5, 1)))
    x0, x = all_states(3).repeat_interleave(9, 0), all_states(3).repeat(9, 1)
    result = joint_given(posterior_probs(path, x, x0, time(0.5), time(0.25)))
    both = first[:, :, None, None] * then[None, :, :, None] * last[None, None]  # x0, xs, xt, x1
    given = (both / both.sum(1, keepdim=True)).permute(0, 2, 3, 1)
    for x1 in all_states(3):
        close(result, joint_given(given[x0, x, x1.expand(81, 2)]), 1e-12)


@pytest.mark.parametrize(
    ("source", "expected"),
    [("uniform", (0.07, -0.053333, -0.05)), ("marginal", (-0.075, -0.092, -0.033))],
)
def test_two_velocities_one_path_of_laws(source: str, expected: tuple[float, ...]) -> None:
    """Net flow into the states (0, 0), (0, 1), (0, 2), towards the data."""
    t, h = time(0.6), 1e-6
    x = all_states(3)
    flows = []
    for kind in (CategoricalPath, MixturePath):
        path = kind(3, SOURCES[source])
        law = JOINT.flatten() @ joint_given(marginal_probs(path, x, t))
        rates = rate_matrix_rows(path, x, ExactField(path)(x, t), t)
        eye = torch.eye(3).double()
        first = torch.einsum("nj,nk->njk", rates[:, 0], eye[x[:, 1]])
        second = torch.einsum("nj,nk->njk", eye[x[:, 0]], rates[:, 1])
        flows.append(torch.einsum("n,njk->jk", law, first + second).flatten())
    close(flows[0], flows[1], 1e-12)
    close(flows[0][:3], expected)
    path = CategoricalPath(3, SOURCES[source])
    laws = [JOINT.flatten() @ joint_given(marginal_probs(path, x, t + d)) for d in (-h, h)]
    close(flows[0], (laws[0] - laws[1]) / (2 * h), 1e-8)


def test_reference_bridge() -> None:
    path = ReferenceBridge(3, "uniform", Custom(lambda t: 0.2**t))
    x0, x1 = torch.tensor([[0]]), torch.tensor([[1]])

    def law(t: float, first: Tensor = x0, last: Tensor = x1) -> Tensor:
        a, b = path.bridge_shares(first, last, time(t))
        rest = path.pi * (1 - a - b)
        return (
            torch.nn.functional.one_hot(first, 3) * a.unsqueeze(-1)
            + torch.nn.functional.one_hot(last, 3) * b.unsqueeze(-1)
            + rest
        )[0, 0]

    close(law(0.5), (0.436339, 0.436339, 0.127322))
    close(law(0.25), (0.682671, 0.220583, 0.096746))
    table = posterior_probs(path, torch.arange(3)[:, None], x0.expand(3, 1), time(0.5), time(0.25))
    close(law(0.5) @ table[:, 0], law(0.25), 1e-12)
    step = [step_matrix(path, *pair) for pair in ((0, 0.4), (0.4, 1), (0, 1))]
    for a in range(3):
        for b in range(3):
            exact = step[0][a] * step[1][:, b] / step[2][a, b]
            close(law(0.4, torch.tensor([[a]]), torch.tensor([[b]])), exact, 1e-12)
    draw = path.sample(
        torch.zeros(20_000, 1).long(), time(0.5), NOISE, torch.ones(20_000, 1).long()
    )
    assert_shares(draw.x.flatten(), law(0.5))
    for make in (
        lambda: ReferenceBridge(3, "absorbing", Linear(0.1)),
        lambda: ReferenceBridge(3, "uniform", Linear()),
    ):
        with pytest.raises(ValueError, match="must"):
            make()


# Draws


@pytest.mark.parametrize("kind", [CategoricalPath, MixturePath])
@pytest.mark.parametrize("source", SOURCES)
def test_draws_have_the_laws_they_are_said_to_have(source: str, kind: Any) -> None:
    path, n = kind(3, SOURCES[source]), 20_000
    t, s = time(0.6), time(0.3)
    x0 = torch.ones(n, 1, dtype=torch.int64)
    positive = marginal_probs(path, x0[:1], t)[0, 0]
    assert_support(path.sample(x0, t, NOISE).x, positive)
    assert_support(path.source(x0, NOISE), path.pi)
    later = path.transition(x0, s, t, NOISE)
    assert_support(later, transition_probs(path, x0[:1], s, t)[0, 0])
    clean = PREDICTED.expand(n, 1, 3)
    for token in range(path.states):
        x = torch.full_like(x0, token)
        exact = posterior_probs(path, x[:1], clean[:1], t, s)[0, 0]
        assert_support(path.posterior(x, clean, t, s, NOISE), exact)


def assert_support(x: Tensor, probs: Tensor) -> None:
    """Draws have these probabilities; what has none is never drawn."""
    assert not bool((probs[x.flatten()] == 0).any())
    some = probs.nonzero().flatten()
    if len(some) > 1:
        index = torch.full((len(probs),), -1).scatter(0, some, torch.arange(len(some)))
        assert_shares(index[x.flatten()], probs[some])


def test_times_may_differ_by_row_and_by_token() -> None:
    path = CategoricalPath(5, "uniform")
    x0 = torch.arange(5).repeat(4, 1)
    per_token = torch.linspace(0.1, 0.9, 20, dtype=torch.float64).reshape(4, 5)
    clean = torch.full((4, 5, 5), 0.2, dtype=torch.float64)
    for t in (per_token[:, 0], per_token):
        x = path.sample(x0, t, NOISE).x
        probs = posterior_probs(path, x, clean, t, t / 2)
        for row in range(4):
            for token in range(5):
                at = t[row] if t.ndim == 1 else t[row, token]
                one = posterior_probs(
                    path, x[row : row + 1, token : token + 1], clean[:1, :1], at, at / 2
                )
                close(probs[row, token], one[0, 0], 1e-14)


def test_padding_is_never_touched() -> None:
    mask = torch.tensor([[True, True, False], [True, False, False]])
    x0 = torch.where(mask, 1, 77)
    for source in SOURCES.values():
        path = CategoricalPath(3, source)
        x1 = path.source(x0, NOISE, mask=mask)
        x = path.sample(x0, time(0.9), NOISE, mask=mask).x
        y = path.transition(torch.where(mask, 1, 2), time(0.1), time(0.9), NOISE, mask=mask)
        z = path.posterior(
            torch.where(mask, x, 0),
            torch.full((2, 3, 3), 1 / 3),
            time(0.9),
            time(0.0),
            NOISE,
            mask=mask,
        )
        for got, pad in ((x1, 77), (x, 77), (y, 2), (z, 0)):
            assert bool((got[~mask] == pad).all())
    clean = torch.full((2, 3, 3), 1 / 3).double()
    bridge = ReferenceBridge(3, MARGINAL, Linear(0.2))
    steps = MatrixPath(gaussian_matrix(3, 0.3).expand(2, 3, 3))
    for path in (bridge, steps):
        x = path.sample(x0, time(0.5), NOISE, mask=mask).x
        y = path.transition(x, time(0.5), time(1.0), NOISE, mask=mask)
        z = path.posterior(y, clean, time(1.0), time(0.5), NOISE, mask=mask)
        for got in (x, y, z):
            assert bool((got[~mask] == 77).all()) and int(got[mask].max()) < 3


def test_rare_tokens_get_their_share() -> None:
    """65,536 equally likely symbols revealed with probability 1e-3, in float32: about 20 of 20,000
    tokens, where a float32 race gives 1.6. Poisson(20) is in 6 .. 40 but for 1e-4 of the seeds."""
    classes, tokens = 65_536, 20_000
    path = CategoricalPath(classes)
    x = torch.full((1, tokens), classes)
    clean = torch.full((1, 1, classes), 1 / classes).expand(1, tokens, classes)
    out = path.posterior(x, clean, time(0.5), time(0.4995), NOISE)
    revealed = int((out != classes).sum())
    assert 6 <= revealed <= 40
    assert len(out[out != classes].unique()) == revealed
    # of a rarer kind still: what is left is uniform over the symbols
    spread = path.posterior(x[:, :100], clean[:, :100], time(0.5), time(0.0), NOISE)
    assert_shares((spread.flatten() * 8 // classes), torch.full((8,), 1 / 8).double())


def test_small_steps_add_up_to_a_large_one() -> None:
    """A token that is seldom moved is moved as often as it should: 10,000 steps of 1e-4."""
    path, n, steps = CategoricalPath(4), 20_000, 50
    x = torch.full((n, 1), 4)
    clean = torch.full((1, 1, 4), 0.25).expand(n, 1, 4)
    for k in range(steps):
        t, s = 1 - k * 1e-4, 1 - (k + 1) * 1e-4
        x = path.posterior(x, clean, time(t), time(s), NOISE.at(k))
    share = steps * 1e-4
    assert_shares((x == 4).long().flatten(), torch.tensor([share, 1 - share]).double())


@pytest.mark.parametrize("source", ["absorbing", "uniform"])
def test_one_class_is_certain(source: Any) -> None:
    path, x0 = CategoricalPath(1, source), torch.zeros(50, 1, dtype=torch.int64)
    x = path.sample(x0, time(0.5), NOISE).x
    assert set(x.flatten().tolist()) == ({0, 1} if path.absorbing else {0})
    assert torch.equal(path.posterior(x, torch.ones(50, 1, 1), time(0.5), time(0.0), NOISE), x0)


# Matrices


@pytest.mark.parametrize("matrix", [gaussian_matrix(5, 0.3), banded_matrix(5, 0.4, 2)])
def test_matrix_path_is_bayes_rule(matrix: Tensor) -> None:
    close(matrix.sum(1), torch.ones(5), 1e-12)
    close(matrix, matrix.T, 1e-14)
    path = MatrixPath(matrix.expand(4, 5, 5))
    q = [torch.linalg.matrix_power(matrix, k) for k in range(5)]
    x0, x = all_states(5).T
    exact = q[1][x0] * q[2].T[x] / q[3][x0, x][:, None]
    got = path.posterior_probs(x[:, None], x0[:, None], time(0.75), time(0.25))
    close(got[:, 0], exact, 1e-12)
    by_row = path.posterior_probs(
        x[:, None], x0[:, None], torch.full((25,), 0.75), torch.full((25,), 0.25)
    )
    close(by_row, got, 1e-14)
    n = 20_000
    zero = torch.zeros(n, 1, dtype=torch.int64)
    assert_support(path.sample(zero, time(0.5), NOISE).x, q[2][0])
    assert_support(path.transition(zero, time(0.25), time(0.5), NOISE), q[1][0])
    clean = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2]).double().expand(n, 1, 5)
    probs = path.posterior_probs(zero[:1], clean[:1], time(0.5), time(0.25))[0, 0]
    assert_support(path.posterior(zero, clean, time(0.5), time(0.25), NOISE), probs)


def test_matrix_path_of_uniform_steps_is_the_uniform_path() -> None:
    uniform = CategoricalPath(3, "uniform")
    steps = torch.stack([step_matrix(uniform, k / 4, (k + 1) / 4) for k in range(4)])
    path = MatrixPath(steps)
    x = all_states(3)
    clean = ExactField(uniform)(x, time(0.75))
    got = path.posterior_probs(x, clean, time(0.75), time(0.5))
    close(got, posterior_probs(uniform, x, clean, time(0.75), time(0.5)), 1e-12)
    with pytest.raises(ValueError, match="multiples"):
        path.sample(x, time(0.3), NOISE)
    with pytest.raises(ValueError, match="rows"):
        MatrixPath(torch.ones(2, 3, 3))
    with pytest.raises(ValueError, match="prior"):
        MatrixPath(steps, torch.tensor([1.5, -0.5, 0.0]))
    with pytest.raises(ValueError, match="x0 must hold"):
        path.sample(x + 1, time(0.5), NOISE)
    with pytest.raises(TypeError, match="int64"):
        path.sample(x.int(), time(0.5), NOISE)
    for bad in (clean * torch.nan, -clean, 0 * clean):
        with pytest.raises(ValueError, match="clean must be"):
            path.posterior(x, bad, time(0.75), time(0.5), NOISE)


# Bad input


def test_bad_input_is_refused() -> None:
    for bad in (torch.tensor([0.5, 0.6]), torch.tensor([1.5, -0.5]), torch.ones(3) / 3, "masked"):
        with pytest.raises(ValueError, match="source"):
            CategoricalPath(2, bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="classes"):
        CategoricalPath(0)
    path = CategoricalPath(3)
    with pytest.raises(ValueError, match="mask symbol is 3"):
        path.sample(torch.tensor([[0, 3]]), time(0.5), NOISE)
    with pytest.raises(ValueError, match="tokens 0"):
        path.sample(torch.tensor([[-1]]), time(0.5), NOISE)
    with pytest.raises(TypeError, match="int64"):
        path.sample(torch.tensor([[0.0]]), time(0.5), NOISE)
    with pytest.raises(ValueError, match="shape"):
        path.sample(torch.tensor([0]), time(0.5), NOISE)
    x, p = torch.tensor([[3, 3]]), PREDICTED.expand(1, 2, 3)
    with pytest.raises(ValueError, match="s must not exceed t"):
        path.posterior(x, p, time(0.3), time(0.5), NOISE)
    for bad in (p * torch.nan, -p, 0 * p, p + 1):
        with pytest.raises(ValueError, match="clean must be"):
            path.posterior(x, bad, time(0.5), time(0.0), NOISE)
    uniform = CategoricalPath(3, "uniform")
    with pytest.raises(ValueError, match="NaN"):
        uniform.posterior(x.clamp(max=2), p * torch.nan, time(0.5), time(0.0), NOISE)
    with pytest.raises(ValueError, match="shape"):
        path.posterior(x, p[..., :2], time(0.5), time(0.0), NOISE)
    data = x.clamp(max=2)
    for source in SOURCES.values():
        path = CategoricalPath(3, source)
        top, half, third = path.states, time(0.5), time(0.25)
        for bad in (data + top, data - 3):
            with pytest.raises(ValueError, match="x must hold tokens"):
                path.posterior(bad, p, half, third, NOISE)
            with pytest.raises(ValueError, match="x must hold tokens"):
                path.transition(bad, third, half, NOISE)
        with pytest.raises(TypeError, match="x must be int64"):
            path.posterior(data.int(), p, half, third, NOISE)
        with pytest.raises(ValueError, match="s must not exceed t"):
            path.transition(data, half, third, NOISE)
        for t in (-0.25, 1.25, math.nan):
            with pytest.raises(ValueError, match=r"times must lie in \[0, 1\]"):
                path.sample(data, time(t), NOISE)
            with pytest.raises(ValueError, match=r"times must lie in \[0, 1\]"):
                path.rates(data, p, time(t))
        with pytest.raises(ValueError, match="times must have shape"):
            path.sample(data, torch.full((2,), 0.5), NOISE)
        with pytest.raises(TypeError, match="times must be tensors"):
            path.sample(data, 0.5, NOISE)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a cavity prediction must have shape"):
            convert_prediction(p[..., :2], "cavity", "clean", data, half, path)
        for rows in (data[:0], data[:, :0]):  # nothing to do is done
            empty = torch.zeros(*rows.shape, 3)
            assert path.sample(rows, half, NOISE).x.shape == rows.shape
            assert path.posterior(rows, empty, half, third, NOISE).shape == rows.shape
    flow = MixturePath(3, "uniform")
    for x1, message in ((data + 3, "x1 must hold"), (data[:, :1], "x1 must have shape")):
        with pytest.raises(ValueError, match=message):
            flow.sample(data, half, NOISE, x1)
    with pytest.raises(TypeError, match="classes must be an integer"):
        CategoricalPath(3.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="schedule must be a Schedule"):
        CategoricalPath(3, "uniform", "cosine")  # type: ignore[arg-type]
    path = CategoricalPath(3)
    with pytest.raises(ValueError, match="targets"):
        path.sample(x.clamp(max=2), time(0.5), NOISE).target("noise")
    with pytest.raises(ValueError, match="kind must be"):
        convert_prediction(p, "clean", "noise", x, time(0.5), path)
