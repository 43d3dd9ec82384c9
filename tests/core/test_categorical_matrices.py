"""Any step matrices: bounds, losses, conversions and draws, against sums over all trajectories."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluvial.core.categorical.bounds import elbo
from fluvial.core.categorical.losses import discrete_terms, prior_terms
from fluvial.core.categorical.matrices import (
    MatrixPath,
    TokenPath,
    banded_matrix,
    gaussian_matrix,
)
from fluvial.core.categorical.objective import TokenMatching
from fluvial.core.categorical.paths import CategoricalPath, posterior_probs, transition_probs
from fluvial.core.categorical.predictions import (
    TokenField,
    convert,
    convert_prediction,
    log_clean,
)
from fluvial.core.categorical.samplers import TauLeaping, Tweedie
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import Stratified, uniform_grid

from .categorical_toys import (
    ENTROPY,
    INFORMATION,
    JOINT,
    MARGINAL,
    SOURCES,
    ExactField,
    all_states,
    discrete_bound,
    joint_given,
    time,
)
from .toys import assert_shares

NOISE = KeyedNoise(7)
BETAS = (0.1, 0.3, 0.6, 0.9)


def gaussian() -> MatrixPath:
    return MatrixPath(torch.stack([gaussian_matrix(3, beta) for beta in BETAS]))


def banded() -> MatrixPath:
    """A token moves to a neighbour at most: after one step some x_0 are impossible."""
    return MatrixPath(torch.stack([banded_matrix(3, beta, 1) for beta in BETAS]), MARGINAL)


def skewed() -> MatrixPath:
    """Matrices that are not symmetric, and a prior that is not their law."""
    weights = NOISE.uniform(torch.empty(4, 9, dtype=torch.float64)).reshape(4, 3, 3) + 0.05
    return MatrixPath(weights / weights.sum(-1, keepdim=True), torch.full((3,), 1 / 3))


PATHS = {"gaussian": gaussian, "banded": banded, "skewed": skewed}


def reverse(path: TokenPath, x: Tensor, clean: Tensor, t: Tensor, s: Tensor) -> Tensor:
    if isinstance(path, MatrixPath):
        return path.posterior_probs(x, clean, t, s)
    return posterior_probs(path, x, clean, t, s)


def bound_by_trajectories(path: TokenPath, field: Any, steps: int) -> float:
    """E ln q(x_1 .. x_T | x_0) / p(x_0 .. x_T), over all (x_0, .., x_T) of two tokens."""
    x = all_states(path.states)
    data = all_states(3) @ torch.tensor([path.states, 1])
    joint, ratio = JOINT.flatten(), torch.zeros(9, dtype=torch.float64)
    for k in range(1, steps + 1):
        t, s = time(k / steps), time((k - 1) / steps)
        if isinstance(path, MatrixPath):
            forward = joint_given(path.matrices[k - 1][x])
        else:
            forward = joint_given(transition_probs(path, x, s, t))
        backward = joint_given(reverse(path, x, field(x, t), t, s)).T
        if k == 1:
            forward, backward = forward[data], backward[data]
        joint = joint.unsqueeze(-1) * forward
        ratio = ratio.unsqueeze(-1) + forward.log() - backward.log()
    ratio = ratio - torch.outer(path.pi, path.pi).flatten().log()
    return float((joint[joint > 0] * ratio[joint > 0]).sum())


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("case", PATHS)
def test_bound_is_that_of_all_trajectories(case: str, power: float) -> None:
    path = PATHS[case]()
    field = ExactField(path, power=power)
    exact = bound_by_trajectories(path, field, 4)
    assert discrete_bound(path, field, 4) == pytest.approx(exact, abs=1e-10)
    assert exact > ENTROPY


@pytest.mark.parametrize("source", SOURCES)
def test_bound_of_other_paths_is_that_of_all_trajectories(source: str) -> None:
    path = CategoricalPath(3, SOURCES[source])
    for power in (1.0, 0.5):
        field = ExactField(path, power=power)
        exact = bound_by_trajectories(path, field, 3)
        assert discrete_bound(path, field, 3) == pytest.approx(exact, abs=1e-10)


def test_bound_of_uniform_steps_is_that_of_the_uniform_path() -> None:
    uniform = CategoricalPath(3, "uniform")
    x = torch.arange(3)[None]
    pairs = [(k / 4, (k + 1) / 4) for k in range(4)]
    path = MatrixPath(
        torch.stack([transition_probs(uniform, x, time(s), time(t))[0] for s, t in pairs])
    )
    assert discrete_bound(path, ExactField(path), 4) == pytest.approx(2.107167, abs=1e-6)
    assert discrete_bound(path, ExactField(path), 2) == pytest.approx(2.141631, abs=1e-6)
    assert float(prior_terms(path, all_states(3)).max()) < 1e-12
    one = ENTROPY + INFORMATION
    assert discrete_bound(path, ExactField(path), 1) == pytest.approx(one, abs=1e-9)


@pytest.mark.parametrize("case", PATHS)
def test_posterior_is_bayes_rule_over_all_states(case: str) -> None:
    """q(x_s | x_t, x_0) of two tokens from the joint law of (x_s, x_t), for every pair of times."""
    path = PATHS[case]()
    x0, x = all_states(3), all_states(3)
    clean, now = x0.repeat_interleave(9, 0), x.repeat(9, 1)
    for low in range(4):
        for high in range(low + 1, 5):
            first, then = torch.eye(3).double(), torch.eye(3).double()
            for step in path.matrices[:low]:
                first = first @ step
            for step in path.matrices[low:high]:
                then = then @ step
            both = joint_given(first[x0]).unsqueeze(-1) * joint_given(then[x]).unsqueeze(0)
            reached = both.sum(1)  # (9 of x_0, 9 of x_t)
            exact = (both / reached.clamp(min=1e-300).unsqueeze(1)).mT.reshape(81, 9)
            result = reverse(path, now, clean, time(high / 4), time(low / 4))
            some = reached.flatten() > 0
            torch.testing.assert_close(joint_given(result)[some], exact[some], rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", PATHS)
def test_terms_are_divergences(case: str) -> None:
    path = PATHS[case]()
    x0, x = all_states(3).repeat_interleave(9, 0), all_states(3).repeat(9, 1)
    p = NOISE.uniform(torch.empty(81, 2, 3, dtype=torch.float64)) + 0.05
    p = p / p.sum(-1, keepdim=True)
    for high in (2, 3, 4):
        t, s = time(high / 4), time((high - 1) / 4)
        some = (path.marginal_probs(x0, t).gather(-1, x[..., None])[..., 0] > 0).all(1)
        true, model = reverse(path, x, x0, t, s), reverse(path, x, p, t, s)
        exact = (torch.special.xlogy(true, true) - torch.special.xlogy(true, model)).sum(-1)
        terms = discrete_terms(path, p.log(), x, x0, t, s)
        torch.testing.assert_close(terms[some], exact[some], rtol=0, atol=1e-12)
        low = discrete_terms(path, p.log().float(), x, x0, t, s)
        assert low.dtype == torch.float32
        torch.testing.assert_close(low[some].double(), exact[some], rtol=1e-4, atol=1e-6)
        rows = torch.full((81,), float(t)).double(), torch.full((81,), float(s)).double()
        torch.testing.assert_close(discrete_terms(path, p.log(), x, x0, *rows), terms)
    first = discrete_terms(path, p.log(), x, x0, time(0.25), time(0.0))
    last = reverse(path, x, p, time(0.25), time(0.0)).gather(-1, x0[..., None])[..., 0]
    some = last > 0
    torch.testing.assert_close(first[some], -last[some].log())


@pytest.mark.parametrize("case", PATHS)
def test_cavity_and_clean(case: str) -> None:
    path, x = PATHS[case](), all_states(3)
    for k in range(1, 5):
        t = time(k / 4)
        clean, cavity = ExactField(path)(x, t), ExactField(path, "cavity")(x, t)
        torch.testing.assert_close(convert_prediction(cavity, "cavity", "clean", x, t, path), clean)
        back = convert_prediction(clean, "clean", "cavity", x, t, path)
        allowed = path.likelihood(x, t) > 0  # of classes that x excludes a clean law says nothing
        cavity = torch.where(allowed, cavity, 0.0)
        torch.testing.assert_close(back, cavity / cavity.sum(-1, keepdim=True))
        by_logits = log_clean(cavity.clamp(min=1e-200).log(), "cavity", x, t, path)
        torch.testing.assert_close(by_logits.exp(), clean, rtol=0, atol=1e-12)
    rows = torch.arange(9) % 4 / 4 + 0.25
    mixed = ExactField(path, "cavity")(x, time(0.5))
    by_row = convert_prediction(mixed, "cavity", "clean", x, rows, path)
    for row in range(9):
        one = slice(row, row + 1)
        alone = convert_prediction(mixed[one], "cavity", "clean", x[one], rows[row], path)
        torch.testing.assert_close(by_row[one], alone)


class Exact(nn.Module):
    """The exact prediction as logits, in the place of a network."""

    def __init__(self, path: MatrixPath, kind: str) -> None:
        super().__init__()
        self.path, self.kind = path, kind
        self.one = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, t: Tensor, **cond: Tensor) -> Tensor:
        logits = torch.empty(*x.shape, 3, dtype=torch.float64)
        for time_of_rows in t.unique():
            rows = t == time_of_rows
            logits[rows] = ExactField(self.path, self.kind)(x[rows], time_of_rows).log()
        return logits.clamp(min=-600) * self.one


@pytest.mark.parametrize(("case", "kind"), [("gaussian", "cavity"), ("banded", "clean")])
def test_objective_and_elbo_are_the_bound(case: str, kind: str) -> None:
    path, rows = PATHS[case](), 2_000
    exact = discrete_bound(path, ExactField(path), 4)
    x0 = all_states(3)[NOISE.categorical(JOINT.flatten().expand(rows, 9))]
    bound = elbo(path, ExactField(path, kind), x0, NOISE, "discrete", steps=4)
    assert bound.name == "ELBO at T = 4"
    error = float(bound.nats.std() / math.sqrt(rows))
    assert abs(float(bound.nats.mean()) - exact) < 5 * error < 0.3

    prior = float((JOINT.flatten() * prior_terms(path, all_states(3)).sum(1)).sum())
    objective = TokenMatching(
        Exact(path, kind), path, predicts=kind, steps=4, times=Stratified(), aux=0.0
    )
    terms = objective({"x": x0}, NOISE)
    nats = terms["elbo_T4"]
    error = float(nats.std() / math.sqrt(rows))
    assert abs(float(terms["loss"].detach()) - (exact - prior) / 2) < 5 * error < 0.3
    terms["loss"].backward()
    assert bool(objective.network.one.grad.isfinite())

    # padding changes nothing, whatever it holds, and has finite gradients
    mask = torch.ones_like(x0, dtype=torch.bool)
    mask[:, 1] = False
    losses = []
    for pad in (0, 2):
        x = torch.where(mask, x0, pad)
        network = Free()
        loss = TokenMatching(network, path, predicts="cavity", steps=4)(
            {"x": x, "mask": mask}, NOISE
        )
        loss["loss"].backward()
        assert bool(network.table.grad.isfinite().all())
        losses.append(float(loss["loss"].detach()))
    assert losses[0] == losses[1]


class Free(nn.Module):
    """One row of logits for all."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64))

    def forward(self, x: Tensor, t: Tensor, **cond: Tensor) -> Tensor:
        return self.table.expand(*x.shape, 3)


@pytest.mark.parametrize("case", ["gaussian", "skewed"])
def test_ancestral_draws_follow_the_enumerated_law(case: str) -> None:
    path, rows, x = PATHS[case](), 20_000, all_states(3)
    law = torch.outer(path.pi, path.pi).flatten()
    for t, s in uniform_grid(4):
        law = law @ joint_given(reverse(path, x, ExactField(path)(x, t), t, s))
    start = path.source(torch.zeros(rows, 2, dtype=torch.int64), NOISE)
    cavity = ExactField(path, "cavity")
    out = simulate(
        start, uniform_grid(4), Ancestral(), path, convert(cavity, "clean", path), NOISE.at(1)
    )
    assert_shares(out[:, 0] * 3 + out[:, 1], law)
    truth = torch.tensor([[0, 2]])
    oracle = torch.nn.functional.one_hot(truth, 3).double()

    class Oracle:
        predicts = "clean"

        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            return oracle.expand(len(x), 2, 3)

    for steps in (1, 2, 4):
        out = simulate(start[:50], uniform_grid(steps), Ancestral(), path, Oracle(), NOISE)
        assert torch.equal(out, truth.expand(50, 2))


def test_what_matrices_do_not_have_is_refused() -> None:
    path, x0 = gaussian(), all_states(3)
    for options in ({}, {"loss": "flow"}, {"loss": "cross_entropy"}, {"steps": 3}):
        with pytest.raises(ValueError, match="steps that divide"):
            TokenMatching(Free(), path, **options)
    for options in ({}, {"form": "flow"}, {"form": "discrete", "steps": 3}):
        with pytest.raises(ValueError, match="form 'discrete' alone"):
            elbo(path, ExactField(path), x0, NOISE, **options)
    with pytest.raises(ValueError, match="clean and cavity"):
        TokenField(Free(), path, "score")
    with pytest.raises(ValueError, match="clean and cavity"):
        convert_prediction(ExactField(path)(x0, time(0.5)), "clean", "score", x0, time(0.5), path)
    for sampler in (TauLeaping(), Tweedie()):
        field = ExactField(path)
        field.predicts = "score" if isinstance(sampler, Tweedie) else "clean"
        with pytest.raises(ValueError, match="CategoricalPath"):
            simulate(x0, uniform_grid(2), sampler, path, field, NOISE)
    for times in (torch.full((9, 2), 0.5), torch.tensor(1.25), torch.tensor(math.nan)):
        with pytest.raises(ValueError, match="times"):
            path.sample(x0, times, NOISE)
    with pytest.raises(ValueError, match="2 times for a batch of 9"):
        path.sample(x0, torch.full((2,), 0.5), NOISE)
    with pytest.raises(ValueError, match="s must not exceed t"):
        path.transition(x0, time(0.5), time(0.25), NOISE)
    with pytest.raises(ValueError, match="x must hold tokens"):
        path.transition(x0 + 3, time(0.25), time(0.5), NOISE)
    with pytest.raises(TypeError, match="matrices must be a tensor"):
        MatrixPath([[1.0]])  # type: ignore[arg-type]
