"""Objectives of flow matching and diffusion: equivalences, weights, preconditioning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fluvial.core.gaussian.fields import KINDS, convert, ends, express
from fluvial.core.gaussian.levels import LogNormalSigma
from fluvial.core.gaussian.losses import EDM, SNR, Matching, MinSNR, TruncatedSNR
from fluvial.core.gaussian.ode import Euler, Heun
from fluvial.core.gaussian.paths import VE, AlphaSigmaPath, Linear, VPCosine, VPLinear
from fluvial.core.gaussian.precondition import EDMPreconditioned
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import Stratified, Uniform, uniform_grid

from .toys import ALARM, BlockGaussian, VectorGaussian

NOISE = KeyedNoise(3)
PATHS = [Linear(), VPLinear(), VPCosine(), VE()]
X0 = NOISE.normal(torch.empty(16, 3, dtype=torch.float64), "x0")
INSIDE = Uniform(0.05, 0.95)


def name(value: Any) -> str:
    return value if isinstance(value, str) else type(value).__name__


def assert_close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class Guess(nn.Module):
    """Some clean prediction, expressed as a prediction of any kind."""

    def __init__(self, path: AlphaSigmaPath, kind: str) -> None:
        super().__init__()
        self.path, self.predicts = path, kind
        self.weight = nn.Parameter(
            torch.tensor([[0.5, 0.1, 0], [0, 0.7, 0.2], [-0.3, 0, 0.4]]).double()
        )

    def forward(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        clean = torch.tanh(x @ self.weight.T) + t[:, None]
        pair = ends("clean", clean, x, t, self.path)
        return express(self.predicts, *pair, t, self.path)


def objective(path: AlphaSigmaPath, kind: str, **options: Any) -> Matching:
    return Matching(Guess(path, kind), path, **{"times": INSIDE, **options})


def loss(path: AlphaSigmaPath, kind: str, **options: Any) -> Tensor:
    return objective(path, kind, **options)({"x": X0}, NOISE)["loss"]


# Equivalences


@pytest.mark.parametrize("path", PATHS, ids=name)
@pytest.mark.parametrize("measure", KINDS)
def test_loss_depends_on_what_is_measured_not_on_what_is_predicted(
    path: AlphaSigmaPath, measure: str
) -> None:
    plain = loss(path, measure)  # the network's own error, as it is
    draw = path.sample(X0, INSIDE(X0, NOISE), NOISE)
    guess = Guess(path, measure)(draw.x, draw.t)
    assert_close(plain, (guess - draw.target(measure)).square().mean(), 1e-12)
    for kind in KINDS:
        assert_close(loss(path, kind, measure=measure), plain, 1e-9)


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_noise_loss_is_the_clean_loss_weighted_by_snr(path: AlphaSigmaPath) -> None:
    noise = loss(path, "noise")
    for kind in KINDS:
        assert_close(loss(path, kind, weight=SNR()), noise, 1e-9)
    inverse = loss(path, "noise", weight=lambda t, path: (path.sigma(t) / path.alpha(t)) ** 2)
    assert_close(inverse, loss(path, "clean"), 1e-9)


def test_velocity_loss_is_a_weighted_clean_loss() -> None:
    """1 / t^2 on the linear path, (pi / 2)^2 / sigma^2 on the cosine path."""
    assert_close(
        loss(Linear(), "velocity"), loss(Linear(), "clean", weight=lambda t, path: t**-2), 1e-12
    )
    assert_close(
        loss(VPCosine(), "velocity"),
        loss(VPCosine(), "clean", weight=lambda t, path: (math.pi / 2 / path.sigma(t)) ** 2),
        1e-12,
    )


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_weights(path: AlphaSigmaPath) -> None:
    t = INSIDE(X0, NOISE)
    snr = (path.alpha(t) / path.sigma(t)) ** 2
    assert_close(SNR()(t, path), snr, 1e-12)
    assert_close(MinSNR(3.0)(t, path), torch.minimum(snr, torch.tensor(3.0)), 1e-12)
    assert_close(TruncatedSNR()(t, path), torch.maximum(snr, torch.tensor(1.0)), 1e-12)
    level = snr**-0.5
    assert_close(EDM(0.4)(t, path), (level**2 + 0.4**2) / (level * 0.4) ** 2, 1e-12)
    # as published for a network that predicts noise: min(SNR, gamma) / SNR on its own error
    published = loss(path, "noise", weight=lambda t, _: snr.clamp(max=5.0) / snr)
    assert_close(loss(path, "noise", weight=MinSNR()), published, 1e-9)


@pytest.mark.parametrize("path", PATHS, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_that_cancel_do_so_at_the_ends(path: AlphaSigmaPath, dtype: torch.dtype) -> None:
    x0 = X0.to(dtype)

    def times(like: Tensor, noise: Any, tag: str = "") -> Tensor:
        return torch.tensor([0.0, 1.0, 1e-7, 1 - 1e-7] * 4, dtype=like.dtype)

    class Zero(nn.Module):
        predicts = "noise"

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return 0 * x

    out = Matching(Zero(), path, times=times, weight=SNR())({"x": x0}, NOISE)
    eps = path.sample(x0, times(x0, NOISE), NOISE).target("noise")
    assert_close(out["loss"], eps.square().mean(), 1e-6)
    assert out["loss"].dtype == dtype


def test_error_of_the_exact_field() -> None:
    """The clean loss at one time is the mean variance of p(x_0 | x_t)."""
    path, std = VPCosine(), torch.tensor([0.3, 1.0, 1.7], dtype=torch.float64)
    toy = VectorGaussian(path, torch.zeros(3).double(), std)

    class Exact(nn.Module):
        predicts = "clean"

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return toy(x, t)

    n, t = 20_000, torch.tensor(0.4, dtype=torch.float64)
    x0 = std * NOISE.normal(torch.empty(n, 3, dtype=torch.float64), "data")
    out = Matching(Exact(), path, times=lambda like, noise: t.expand(len(like)))({"x": x0}, NOISE)
    signal, level = (path.alpha(t) * std).square(), path.sigma(t).square()
    var = std.square() * level / (signal + level)
    z = float(stats.norm.isf(ALARM / 2))
    assert (
        abs(float(out["loss"] - var.mean())) < z * math.sqrt(float(2 * var.square().sum()) / n) / 3
    )
    assert_close(out["error"].mean(), out["loss"], 1e-12)


# What it is given and returns


class Spy(nn.Module):
    num_classes = 4

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        self.seen = x.detach(), t, cond
        return self.scale * x


def test_terms_and_gradients() -> None:
    spy = Spy()
    out = Matching(spy, Linear(), weight=lambda t, path: 1 + t)({"x": X0}, NOISE)
    draw = Linear().sample(X0, out["t"], NOISE)
    assert torch.equal(out["t"], Uniform()(X0, NOISE)) and torch.equal(spy.seen[0], draw.x)
    error = (draw.x - draw.target("velocity")).square().mean(1)
    assert_close(out["error"], error, 1e-14)
    assert_close(out["loss"], ((1 + out["t"]) * error).mean(), 1e-14)
    assert not out["error"].requires_grad
    out["loss"].backward()
    assert spy.scale.grad is not None and spy.scale.grad != 0


def test_field() -> None:
    spy = Spy()
    field = Matching(spy, Linear(), predicts="noise").field
    assert field.predicts == "noise"
    field(X0.float(), torch.tensor(0.5, dtype=torch.float64), label=3)
    assert torch.equal(spy.seen[1], torch.full((16,), 0.5)) and spy.seen[2] == {"label": 3}


def test_conditions_and_given_source() -> None:
    spy, x1 = Spy(), NOISE.normal(X0, "x1")
    batch = {"x": X0, "x1": x1, "label": torch.arange(16) % 4, "extra": X0[:, :1]}
    t = Matching(spy, Linear())(batch, NOISE)["t"][:, None]
    assert_close(spy.seen[0], (1 - t) * X0 + t * x1, 1e-14)
    assert set(spy.seen[2]) == {"label", "extra"} and spy.seen[2]["extra"] is batch["extra"]


def test_coupling_moves_the_source_and_nothing_else() -> None:
    spy, label = Spy(), torch.arange(16) % 4
    calls = []

    def reverse(x0: Tensor, x1: Tensor, noise: Any, label: Any = None) -> Tensor:
        calls.append((x0, x1, label))
        return torch.arange(len(x0)).flip(0)

    t = Matching(spy, Linear(), coupling=reverse)({"x": X0, "label": label}, NOISE)["t"][:, None]
    eps = NOISE.normal(X0, "source")
    assert_close(spy.seen[0], (1 - t) * X0 + t * eps.flip(0), 1e-14)
    assert torch.equal(calls[0][1], eps) and calls[0][0] is X0
    assert calls[0][2] is label and spy.seen[2]["label"] is label


def test_dropped_labels() -> None:
    n, spy = 4000, Spy()
    batch = {"x": X0[:1].expand(n, 3), "label": torch.arange(n) % 4, "extra": torch.ones(n, 2)}
    Matching(spy, Linear(), drop=0.2)(batch, NOISE)
    seen = spy.seen[2]["label"]
    dropped = seen == 4
    assert torch.equal(seen[~dropped], batch["label"][~dropped])
    assert stats.binomtest(int(dropped.sum()), n, 0.2).pvalue > ALARM
    assert spy.seen[2]["extra"] is batch["extra"] and batch["label"].max() == 3
    null = {"label": 9, "extra": torch.tensor([5.0, 6.0])}
    Matching(spy, Linear(), drop=0.2, null=null)(batch, NOISE)
    assert torch.equal(spy.seen[2]["label"] == 9, dropped)
    assert torch.equal(spy.seen[2]["extra"][dropped].unique(dim=0), torch.tensor([[5.0, 6.0]]))
    assert (spy.seen[2]["extra"][~dropped] == 1).all()


def test_no_loss_reads_a_value() -> None:
    """Tensors on the meta device have none: on an accelerator, reading one would be a wait."""
    path = VPLinear()
    net = EDMPreconditioned(Record().to("meta"), path)
    times = Stratified(LogNormalSigma(path))
    matching = Matching(net, path, weight=EDM(), times=times, drop=0.1)
    batch = {"x": X0.float().to("meta"), "label": torch.zeros(16, dtype=torch.int64).to("meta")}
    out = matching(batch, NOISE)
    assert out["error"].shape == (16,) and out["loss"].device.type == "meta"


@pytest.mark.parametrize("times", [Uniform(), Stratified()], ids=name)
def test_loss_of_a_batch_is_the_mean_of_its_parts(times: Any) -> None:
    spy = Spy()
    matching = Matching(spy, Linear(), times=times, drop=0.3)
    batch = {"x": X0, "label": torch.arange(16) % 4}
    whole = matching(batch, NOISE)
    parts = []
    for rows in torch.arange(16).split(4):
        part = {key: value[rows] for key, value in batch.items()}
        parts.append(matching(part, NOISE.rows(rows)))
    assert_close(torch.stack([part["loss"] for part in parts]).mean(), whole["loss"], 1e-14)
    assert torch.equal(torch.cat([part["t"] for part in parts]), whole["t"])


def test_paths_without_scalars() -> None:
    path = BlockGaussian()
    x0 = NOISE.normal(torch.empty(6, 2, 3, dtype=torch.float64))
    out = Matching(Spy(), path, predicts="score", times=INSIDE)({"x": x0}, NOISE)
    draw = path.sample(x0, INSIDE(x0, NOISE), NOISE)
    assert_close(out["loss"], (draw.x - draw.target("score")).square().mean(), 1e-14)
    for options in ({"measure": "clean"}, {"weight": SNR()}):
        with pytest.raises(ValueError, match="has no scalar coefficients"):
            Matching(Spy(), path, predicts="score", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no target"):
        Matching(Spy(), path, predicts="drift")({"x": x0}, NOISE)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"predicts": "velocty"}, "predicts must be one of"),
        ({"measure": "nois"}, "measure must be one of"),
        ({"measure": "noise", "weight": MinSNR()}, "MinSNR weighs the clean error"),
        ({"drop": 1.0}, "0 <= drop < 1"),
        ({"drop": -0.1}, "0 <= drop < 1"),
        ({"drop": 0.1, "null": {}}, "null if drop > 0"),
    ],
)
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Matching(Spy(), Linear(), **options)


def test_events_of_one_number() -> None:
    x0 = X0[:, 0]
    out = Matching(Spy(), Linear(), predicts="clean", times=INSIDE)({"x": x0}, NOISE)
    draw = Linear().sample(x0, INSIDE(x0, NOISE), NOISE)
    assert_close(out["loss"], (draw.x - x0).square().mean(), 1e-14)


def test_bad_batches() -> None:
    with pytest.raises(ValueError, match="batch must hold 'x', got label"):
        Matching(Spy(), Linear())({"label": X0}, NOISE)
    with pytest.raises(ValueError, match="lacks the conditions to drop: label"):
        Matching(Spy(), Linear(), drop=0.1)({"x": X0}, NOISE)
    with pytest.raises(ValueError, match="the network returned"):
        Matching(Narrow(), Linear())({"x": X0}, NOISE)
    with pytest.raises(TypeError, match="x0 must be floating"):
        Matching(Spy(), Linear(), times=lambda x, n: torch.rand(0))({"x": X0.long()}, NOISE)
    for build in (lambda: MinSNR(0.0), lambda: EDM(math.nan), lambda: EDM(-1.0)):
        with pytest.raises(ValueError, match="must be positive"):
            build()


class Narrow(nn.Module):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return x[:, :2]


# Preconditioning


class Record(nn.Module):
    num_classes = 7

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        self.seen = x, t, cond
        return self.value.to(x.dtype) + 0 * x


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_published_coefficients(path: AlphaSigmaPath) -> None:
    net, s, t = Record(0.7), 0.6, INSIDE(X0, NOISE)
    out = EDMPreconditioned(net, path, s)(X0, t, label=5)
    z, r = X0 / path.alpha(t)[:, None], (path.sigma(t) / path.alpha(t))[:, None]
    total = r**2 + s**2
    assert_close(out, s**2 / total * z + r * s / total.sqrt() * 0.7, 1e-12)
    assert_close(net.seen[0], z / total.sqrt(), 1e-12)
    assert_close(net.seen[1], r[:, 0].log() / 4, 1e-12)
    assert net.seen[2] == {"label": 5}


@pytest.mark.parametrize("path", PATHS, ids=name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_preconditioned_at_the_ends(path: AlphaSigmaPath, dtype: torch.dtype) -> None:
    net, x = Record(0.7), X0.to(dtype)
    field = EDMPreconditioned(net, path, 0.6)
    for t in (torch.tensor(0.0).double(), torch.zeros(16, dtype=dtype)):
        assert_close(field(x, t), x, 1e-7)
        assert net.seen[1].shape == (16,) and (net.seen[1] <= -2).all()
    out = field(x, torch.ones((), dtype=torch.float64))
    assert out.dtype == net.seen[0].dtype == net.seen[1].dtype == dtype
    assert all(part.isfinite().all() for part in (out, *net.seen[:2]))
    if isinstance(path, Linear | VPCosine):
        assert_close(out, torch.full_like(x, 0.6 * 0.7), 1e-6)  # all depends on the network


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_unit_variance(path: AlphaSigmaPath) -> None:
    """Of the network's input and target, on data of standard deviation std: by second moments."""
    s, t = 0.6, INSIDE(X0, NOISE)
    alpha, sigma = path.alpha(t), path.sigma(t)
    net = Record()
    field = EDMPreconditioned(net, path, s)

    def coefficients(x: Tensor) -> tuple[Tensor, Tensor]:
        skip = field(x, t)[:, 0]
        return net.seen[0][:, 0].clone(), skip

    (in_x0, skip_x0), (in_eps, skip_eps) = (
        coefficients(scale[:, None] * torch.ones(16, 1).double()) for scale in (alpha, sigma)
    )
    assert_close(in_x0.square() * s**2 + in_eps.square(), torch.ones(16).double(), 1e-12)
    # target of F: (x_0 - skip) / c_out, and 1 / c_out^2 is the weight
    variance = (1 - skip_x0).square() * s**2 + skip_eps.square()
    assert_close(EDM(s)(t, path) * variance, torch.ones(16).double(), 1e-12)


def test_loss_starts_at_one() -> None:
    """Whatever the time, in the mean over data of standard deviation std."""
    n, s, path = 20_000, 0.6, VPLinear()
    x0 = s * NOISE.normal(torch.empty(n, 1, dtype=torch.float64), "data")
    net = EDMPreconditioned(Record(), path, s)
    matching = Matching(net, path, weight=EDM(s), times=LogNormalSigma(path))
    assert (matching.predicts, matching.measure, matching.null) == ("clean", "clean", {"label": 7})
    out = matching({"x": x0}, NOISE)
    z = float(stats.norm.isf(ALARM / 2))
    assert abs(float(out["loss"].detach()) - 1) < z * math.sqrt(2 / n)  # squares of N(0, 1)


@pytest.mark.parametrize("path", [Linear(), VPCosine(), VE(0.01, 5.0)], ids=name)
def test_silent_network_is_the_exact_denoiser_in_every_sampler(path: AlphaSigmaPath) -> None:
    s = torch.full((3,), 0.6, dtype=torch.float64)
    toy = VectorGaussian(path, 0 * s, s)
    field = EDMPreconditioned(Record(), path, 0.6)
    start = path.source(torch.empty(8, 3, dtype=torch.float64), NOISE)
    for sampler in (Ancestral(), Euler(), Heun()):
        with torch.no_grad():
            out, exact = (
                simulate(start, uniform_grid(6), sampler, path, part, NOISE)
                for part in (field, toy)
            )
        assert_close(out, exact, 1e-10)
    velocity = convert(field, "velocity", path)(start, torch.tensor(0.3).double())
    assert_close(velocity, convert(toy, "velocity", path)(start, torch.tensor(0.3).double()), 1e-10)


def test_bad_preconditioning() -> None:
    for std in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="std must be positive"):
            EDMPreconditioned(Record(), Linear(), std)
    with pytest.raises(TypeError, match="path must have scalar"):
        EDMPreconditioned(Record(), BlockGaussian())  # type: ignore[arg-type]
