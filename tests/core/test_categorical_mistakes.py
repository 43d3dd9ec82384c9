"""Mistakes with token data are refused at once, by a message that names the argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluvial.core.categorical.bounds import elbo
from fluvial.core.categorical.edges import pair_mask, symmetric, upper_triangle
from fluvial.core.categorical.masked import Confident, FirstHitting, Remasking, remasking_loop
from fluvial.core.categorical.matrices import MatrixPath, banded_matrix, gaussian_matrix
from fluvial.core.categorical.objective import TokenMatching
from fluvial.core.categorical.paths import (
    CategoricalPath,
    MixturePath,
    marginal_probs,
    transition_probs,
)
from fluvial.core.categorical.predictions import (
    Cached,
    Tempered,
    TokenField,
    convert,
    convert_prediction,
)
from fluvial.core.categorical.samplers import TauLeaping, Tweedie
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
from fluvial.core.categorical.steering import Infilling, TokenGuidance
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Run, State, Steering
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import Stratified, Uniform, uniform_grid

V, L, B = 5, 4, 3
NOISE = KeyedNoise(0)
X0 = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1], [0, 0, 4, 4]])
EVEN = torch.full((B, L, V), 1 / V)
HALF, THIRD = torch.tensor(0.5), torch.tensor(0.3)
MASKED, FLAT = CategoricalPath(V), CategoricalPath(V, "uniform")
JUMPS = MixturePath(V, "uniform")
STEPS = MatrixPath(torch.stack([gaussian_matrix(V, 0.3)] * 4))
PATHS = [MASKED, FLAT, JUMPS, CategoricalPath(V, torch.full((V,), 1 / V)), STEPS]
Change = Callable[[Tensor], Any]


class Network(nn.Module):
    """A table of logits, spoilt by ``change``."""

    def __init__(self, change: Change = lambda y: y) -> None:
        super().__init__()
        self.table, self.change = nn.Embedding(V + 1, V), change

    def forward(self, x: Tensor, t: Tensor, **cond: Any) -> Any:
        return self.change(self.table(x))


class Constant:
    """A field that predicts ``value`` for any state."""

    def __init__(self, value: Any, predicts: str = "clean") -> None:
        self.value, self.predicts = value, predicts

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Any:
        return self.value


def run(path: Any, field: Any, sampler: Any = None, **options: Any) -> Any:
    x = options.pop("x", None)
    x = path.source(X0, NOISE) if x is None else x
    pairs = options.pop("pairs", uniform_grid(4))
    noise = options.pop("noise", NOISE)
    return simulate(x, pairs, sampler or Ancestral(), path, field, noise, **options)


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_tokens_masks_and_times(path: Any) -> None:
    network = Network()
    field = TokenField(network, path)
    for bad in (X0.float(), X0.int(), X0.tolist(), X0.bool()):
        for call in (
            lambda x=bad: path.sample(x, HALF, NOISE),
            lambda x=bad: path.posterior(x, EVEN, HALF, HALF, NOISE),
            lambda x=bad: elbo(path, field, x, NOISE, "discrete", steps=4),
            lambda x=bad: TokenMatching(network, path, steps=4)({"x": x}, NOISE),
            lambda x=bad: field(x, HALF),
        ):
            with pytest.raises(TypeError, match="x0? must be int64 tokens"):
                call()
    for bad in (X0 + V + 1, X0 - 1):
        with pytest.raises(ValueError, match="x must hold tokens 0"):
            run(path, field, x=bad)  # the network's table fails before the path looks
    row = torch.ones(B, 1, dtype=torch.bool)
    constant = Constant(EVEN)
    for mask, error in ((row, ValueError), (row.float(), ValueError), (row.tolist(), TypeError)):
        for call in (
            lambda m=mask: path.source(X0, NOISE, mask=m),
            lambda m=mask: path.sample(X0, HALF, NOISE, mask=m),
            lambda m=mask: path.posterior(X0, EVEN, HALF, HALF, NOISE, mask=m),
            lambda m=mask: run(path, constant, mask=m),
            lambda m=mask: elbo(path, constant, X0, NOISE, "discrete", steps=4, mask=m),
            lambda m=mask: TokenMatching(network, path, steps=4)({"x": X0, "mask": m}, NOISE),
        ):
            with pytest.raises(error, match="mask must be"):
                call()
    with pytest.raises(TypeError, match="like must be int64 tokens where there is a mask"):
        path.source(X0.double(), NOISE, mask=torch.ones_like(X0, dtype=torch.bool))
    with pytest.raises(TypeError, match="like must be a tensor, got list"):
        path.source(X0.tolist(), NOISE)
    for t in (torch.tensor(True), torch.tensor(1), HALF + 0j):
        with pytest.raises(TypeError, match="times must be in floating point"):
            path.sample(X0, t, NOISE)
    for bad_noise in (0, KeyedNoise):
        with pytest.raises(TypeError, match="noise must be keyed noise"):
            path.sample(X0, HALF, bad_noise)
        with pytest.raises(TypeError, match="noise must be keyed noise"):
            TokenMatching(network, path, steps=4)({"x": X0}, bad_noise)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 2 row ids for a batch of 3"):
        run(path, constant, noise=NOISE.rows(torch.arange(2)), x=X0)
    assert run(path, field, x=X0[:0]).shape == (0, L)


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_predictions(path: Any) -> None:
    negative = EVEN.clone()
    negative[..., 0], negative[..., 1] = -0.2, 0.6
    hole = EVEN.clone()
    hole[..., 2] = math.nan
    wrong = {
        "twice": EVEN * 2,
        "nan": hole,
        "negative": negative,
        "logarithms": EVEN.log(),
        "infinite": EVEN * math.inf,
    }
    for name, p in wrong.items():
        fields = [Tempered(Constant(p), 0.5, 3, 0.9)]
        fields += [] if name == "twice" else [convert(Constant(p, "cavity"), "clean", path)]
        for field in fields:
            with pytest.raises(ValueError, match="prediction must be probabilities"):
                run(path, field)
        with pytest.raises(ValueError, match="a clean prediction must be probabilities"):
            run(path, Constant(p), steer=TokenGuidance(2.0), label=0)
        with pytest.raises(ValueError, match="must predict probabilities that sum to 1"):
            elbo(path, Constant(p), X0, NOISE, "discrete", steps=4)
    for p in (None, EVEN.tolist(), X0.int(), X0.bool()):
        with pytest.raises(TypeError, match="clean must be probabilities"):
            run(path, Constant(p))
        for field in (Tempered(Constant(p)), convert(Constant(p, "cavity"), "clean", path)):
            with pytest.raises(TypeError, match="prediction must be in floating point"):
                run(path, field)
        with pytest.raises(TypeError, match="prediction must be in floating point"):
            elbo(path, Constant(p), X0, NOISE, "discrete", steps=4)
    with pytest.raises(TypeError, match="prediction must be in floating point, got torch.int64"):
        elbo(path, Constant(X0), X0, NOISE, "discrete", steps=4)
    with pytest.raises(ValueError, match="clean must hold tokens 0 .. 4, got"):
        run(path, Constant(torch.full_like(X0, V)))
    assert torch.equal(run(path, Constant(X0)), X0)
    x = path.source(X0, NOISE)
    broken = convert_prediction(hole, "cavity", "clean", x, HALF, path)
    assert broken.isnan().any()  # and not a one-hot, which would pass for a sure prediction


def test_broken_scores() -> None:
    path = CategoricalPath(V, "uniform", Geometric())
    hole = EVEN.clone()
    hole[..., 2] = math.nan
    assert convert_prediction(hole, "score", "clean", X0, HALF, path).isnan().any()
    for s in (hole, EVEN.log()):  # a score and its logarithm are easily taken for each other
        for call in (
            lambda s=s: run(path, Constant(s, "score"), Tweedie()),
            lambda s=s: run(path, Constant(s, "score"), TauLeaping()),
            lambda s=s: run(path, convert(Constant(s, "score"), "clean", path)),
            lambda s=s: elbo(path, Constant(s, "score"), X0, NOISE),
        ):
            with pytest.raises(ValueError, match="a score must hold ratios >= 0"):
                call()
    for s in (EVEN[..., 1:], EVEN[:, 1:], EVEN[:1]):
        for call in (
            lambda s=s: run(path, Constant(s, "score"), Tweedie()),
            lambda s=s: elbo(path, Constant(s, "score"), X0, NOISE),
        ):
            with pytest.raises(ValueError, match=r"a score must have shape \(3, 4, 5\)"):
                call()
    # of an absorbing path a score has an entry for the mask
    late = uniform_grid(4, start=0.9)
    with pytest.raises(ValueError, match=r"a score must have shape \(3, 4, 6\)"):
        run(MASKED, Constant(EVEN, "score"), Tweedie(), pairs=late)
    # the ratio of a token to itself is 1, whatever a field says of it
    one = torch.ones_like(EVEN)
    ragged = one.scatter(-1, X0.unsqueeze(-1), 0.0)
    assert elbo(path, Constant(one, "score"), X0, NOISE).nats.isfinite().all()
    assert not elbo(path, Constant(ragged, "score"), X0, NOISE).nats.isnan().any()


def test_padding_of_fields_that_are_converted() -> None:
    path = CategoricalPath(V, "uniform", Geometric())
    mask = torch.ones_like(X0, dtype=torch.bool)
    mask[:, -1] = False
    padded = torch.where(mask, X0, V)  # a symbol that the network takes, and the path has not
    network = Network()
    for sampler, kind in ((TauLeaping(), "score"), (TauLeaping(), "cavity"), (Tweedie(), "score")):
        field = TokenField(network, path, "score", kind)
        x = run(path, field, sampler, x=padded, mask=mask)
        zeros = run(path, field, sampler, x=torch.where(mask, X0, 0), mask=mask)
        assert bool((x[:, -1] == V).all())
        assert torch.equal(x[:, :-1], zeros[:, :-1])
    x = run(path, convert(field, "clean", path), x=padded, mask=mask)
    assert bool((x[:, -1] == V).all())


CHANGES: dict[str, tuple[Change, type[Exception]]] = {
    "few": (lambda y: y[..., :-1], ValueError),
    "short": (lambda y: y[:, :-1], ValueError),
    "flat": (lambda y: y.flatten(0, 1), ValueError),
    "tuple": (lambda y: (y, y), TypeError),
    "none": (lambda y: None, TypeError),
    "numpy": (lambda y: y.detach().numpy(), TypeError),
    "int": (lambda y: y.long(), TypeError),
    "complex": (lambda y: y + 0j, TypeError),
}


@pytest.mark.parametrize("change", CHANGES)
def test_networks(change: str) -> None:
    spoil, error = CHANGES[change]
    network = Network(spoil)
    for path in (MASKED, FLAT, STEPS):
        with pytest.raises(error, match="the network must return"):
            TokenField(network, path)(X0, HALF)
        with pytest.raises(error, match="the network must return"):
            TokenMatching(network, path, steps=4)({"x": X0}, NOISE)


def test_parts_of_another_type() -> None:
    network: Any = Network()
    field = TokenField(network, MASKED)
    wrong: Any = None
    for wrong in (Network, lambda x, t: network(x, t), None):
        with pytest.raises(TypeError, match="network must be a module"):
            TokenField(wrong, MASKED)
        with pytest.raises(TypeError, match="network must be a module"):
            TokenMatching(wrong, MASKED)
    for wrong in (CategoricalPath, None, "absorbing"):
        for call in (
            lambda p=wrong: TokenField(network, p),
            lambda p=wrong: convert(field, "cavity", p),
            lambda p=wrong: convert_prediction(EVEN, "clean", "cavity", X0, HALF, p),
            lambda p=wrong: elbo(p, field, X0, NOISE),
        ):
            with pytest.raises(TypeError, match="path must be a CategoricalPath"):
                call()
    for wrong in (TokenField, network, None):
        for call in (
            lambda f=wrong: convert(f, "clean", MASKED),
            lambda f=wrong: Tempered(f),
            lambda f=wrong: Cached(f),
            lambda f=wrong: elbo(MASKED, f, X0, NOISE),
        ):
            with pytest.raises(TypeError, match="field must be a field"):
                call()
    for wrong in (Remasking, "cap"):
        with pytest.raises(TypeError, match="remasking must be a Remasking"):
            elbo(MASKED, field, X0, NOISE, "discrete", steps=4, remasking=wrong)
    for wrong in (Linear, "linear"):
        for law in (UniformDrop, LogDrop):
            with pytest.raises(TypeError, match="schedule must be a Schedule"):
                law(wrong)
    for wrong in (Uniform, Stratified, 0.5, "uniform"):
        with pytest.raises(TypeError, match="times must be a law of times"):
            TokenMatching(network, MASKED, times=wrong)
    wrong = ["label"]
    with pytest.raises(TypeError, match="null must map names"):
        TokenMatching(network, MASKED, drop=0.1, null=wrong)
    with pytest.raises(TypeError, match="null must map names"):
        TokenGuidance(2.0, wrong)
    wrong = X0
    with pytest.raises(TypeError, match="batch must map names to tensors, got Tensor"):
        TokenMatching(network, MASKED)(wrong, NOISE)
    wrong = X0.tolist()
    for call in (lambda: upper_triangle(wrong), lambda: symmetric(wrong), lambda: pair_mask(wrong)):
        with pytest.raises(TypeError, match="must be a tensor, got list"):
            call()
    with pytest.raises(TypeError, match="known must be int64 and where bool, got list"):
        Infilling(wrong, X0 == 0)
    for wrong in (X0.tolist(), X0.float()):
        with pytest.raises(TypeError, match="x must be int64 tokens"):
            Infilling(X0, X0 == 0).place(wrong)


def test_numbers() -> None:
    network, field = Network(), TokenField(Network(), MASKED)
    text: Any = "4"
    half: Any = 2.5
    for call in (
        lambda n: TokenMatching(network, MASKED, steps=n),
        lambda n: elbo(MASKED, field, X0, NOISE, "discrete", steps=n),
        lambda n: elbo(MASKED, field, X0, NOISE, draws=n),
        lambda n: FirstHitting(n),
        lambda n: Tempered(field, top_k=n),
        lambda n: remasking_loop(MASKED, n),
        lambda n: d3pm_cosine(n),
        lambda n: gaussian_matrix(n, 0.1),
        lambda n: banded_matrix(5, 0.5, n),
    ):
        for bad in (text, half):
            with pytest.raises(TypeError, match="must be a whole number, got"):
                call(bad)
    for call in (
        lambda n: TokenMatching(network, MASKED, aux=n),
        lambda n: TokenMatching(network, MASKED, drop=n),
        lambda n: Tempered(field, n),
        lambda n: Confident("max", n),
        lambda n: Remasking("cap", n),
        lambda n: TauLeaping(corrector=n),
        lambda n: TokenGuidance(n),
        lambda n: gaussian_matrix(5, n),
        lambda n: Linear(n),
        lambda n: Cosine(n),
        lambda n: Geometric(n),
        lambda n: LogDrop(Linear(), n),
    ):
        with pytest.raises(TypeError, match="must be a number, got '4'"):
            call(text)
    with pytest.raises(TypeError, match="values must be numbers"):
        Table(text)
    with pytest.raises(TypeError, match="alpha_of must be a function"):
        Custom(text)
    for strength, error in ((-1.0, ValueError), (math.nan, ValueError), (torch.ones(2), TypeError)):
        leaps = TauLeaping(corrector=lambda t, a=strength: a)
        with pytest.raises(error, match=r"corrector\(t\) must be"):
            run(FLAT, Constant(EVEN), leaps)
    for forbidden, error in (
        ([1], TypeError),
        (torch.tensor([1.0]), TypeError),
        (torch.tensor([V]), ValueError),
        (torch.tensor([-1]), ValueError),
    ):
        with pytest.raises(error, match="forbidden must "):
            Tempered(field, forbidden=forbidden)(MASKED.source(X0, NOISE), HALF)  # type: ignore


def test_parts_that_do_not_go_together() -> None:
    network = Network()
    masked, flat = TokenField(network, MASKED), TokenField(network, FLAT)
    for sampler in (FirstHitting(), Confident(), Remasking(), TauLeaping()):
        with pytest.raises(ValueError, match="field was made for"):
            run(MASKED, flat, sampler)
        with pytest.raises(ValueError, match="field was made for"):
            run(MASKED, Cached(Tempered(flat)), sampler)
    with pytest.raises(ValueError, match="field was made for"):
        run(FLAT, masked, TauLeaping())
    with pytest.raises(ValueError, match="field was made for"):
        elbo(FLAT, masked, X0, NOISE)
    # another schedule, and a mixture path where absorbing, are no mistakes
    run(MixturePath(V, "absorbing", Cosine()), masked, TauLeaping())
    for sampler in (FirstHitting(), Confident(), Remasking()):
        with pytest.raises(ValueError, match="needs an absorbing path"):
            run(FLAT, flat, sampler)
    with pytest.raises(ValueError, match="remasking_loop needs an absorbing path"):
        remasking_loop(FLAT, 8)
    for sampler in (Confident("max"), Confident("margin"), Confident("entropy")):
        with pytest.raises(TypeError, match="clean must be in floating point, got torch.int64"):
            run(MASKED, Constant(X0), sampler)
    with pytest.raises(ValueError, match="x1 of an absorbing path must hold the mask symbol 5"):
        TokenMatching(network, MASKED)({"x": X0, "x1": X0}, NOISE)
    with pytest.raises(ValueError, match="x1 must be None"):
        STEPS.sample(X0, HALF, NOISE, X0)
    same = X0.clone()
    same[2] = 0
    cached = Cached(Constant(EVEN))
    cached(same, HALF)
    with pytest.raises(ValueError, match="the field of Cached must predict the rows"):
        cached(
            torch.where(torch.tensor([[True], [True], [False]]), X0.flip(1), 0), HALF
        )  # one row stays, and two are asked for
    # of Tweedie no clean prediction is corrected: on a path without masks a known token would do
    # nothing but overwrite the sample
    path = CategoricalPath(V, "uniform", Geometric())
    score = TokenField(network, path, predicts="score")
    keep = Infilling(X0, X0 < 2)
    with pytest.raises(ValueError, match="Tweedie steps the score"):
        run(path, score, Tweedie(), steer=keep)
    score = TokenField(network, MASKED, predicts="score")
    start = keep.place(MASKED.source(X0, NOISE))
    x = run(MASKED, score, Tweedie(), x=start, pairs=uniform_grid(4, start=0.9), steer=keep)
    assert torch.equal(x[X0 < 2], X0[X0 < 2])


class Shorter(Steering):
    def clean(self, clean: State, x: State, aim: Any, run: Run) -> State:
        assert isinstance(clean, Tensor)
        return clean[:, 1:]


def test_steering_that_changes_shapes() -> None:
    cases = [(MASKED, FirstHitting()), (MASKED, Confident()), (MASKED, Remasking())]
    for path, sampler in [*cases, (FLAT, TauLeaping()), (JUMPS, Ancestral()), (STEPS, None)]:
        with pytest.raises(ValueError, match="clean must have shape"):
            run(path, Constant(EVEN), sampler, steer=Shorter())


def test_times_of_predictions_and_laws() -> None:
    rows = torch.full((B + 1,), 0.5)
    for path in (MASKED, FLAT):
        field = TokenField(Network(), path)
        for call in (
            lambda t, f=field: f(X0, t),
            lambda t, p=path: convert_prediction(EVEN, "clean", "score", X0, t, p),
            lambda t, p=path: marginal_probs(p, X0, t),
            lambda t, p=path: transition_probs(p, X0, torch.zeros(()), t),
        ):
            for t in (torch.tensor(1.5), torch.tensor(math.nan), rows):
                with pytest.raises(ValueError, match="times must "):
                    call(t)
            with pytest.raises(TypeError, match="times must be tensors"):
                call(0.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="s must not exceed t"):
            transition_probs(path, X0, HALF, THIRD)
        with pytest.raises(ValueError, match="x must hold tokens"):
            marginal_probs(path, X0 + V, HALF)
    for x in (X0 + 1, MASKED.source(X0, NOISE)):  # a mask symbol on a path that has none
        with pytest.raises(ValueError, match="x must hold tokens 0 .. 4, got"):
            convert_prediction(EVEN, "clean", "cavity", x, HALF, FLAT)
    with pytest.raises(TypeError, match="path must be a CategoricalPath"):
        marginal_probs(STEPS, X0, HALF)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "schedule",
    [
        Linear(),
        Cosine(2, 0.008),
        Sine(),
        Power(0.5),
        Polynomial(),
        Geometric(),
        ExponentialTilted(),
        Table([0.6, 0.3, 0.0]),
        Custom(lambda t: 1 - t**2),
    ],
    ids=lambda s: type(s).__name__,
)
def test_times_of_shares_pass_the_check(schedule: Schedule) -> None:
    path = CategoricalPath(V, "absorbing", schedule)
    field = TokenField(Network(), path)
    t = schedule.time(torch.linspace(0, 1, 1001, dtype=torch.float64)[1:])
    assert bool(((t >= 0) & (t <= 1)).all())
    assert elbo(path, field, X0, NOISE, "count", draws=4).nats.shape == (B,)
    assert run(path, field, FirstHitting(), pairs=uniform_grid(L)).max() < V


def test_gradient_where_nothing_is_possible() -> None:
    path = CategoricalPath(V, torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]))
    p = torch.zeros(B, L, V, dtype=torch.float64, requires_grad=True)
    q = convert_prediction(p, "clean", "cavity", X0, HALF, path)
    q.square().sum().backward()
    assert torch.equal(q.argmax(-1), X0)
    assert p.grad is not None and not p.grad.isnan().any()
