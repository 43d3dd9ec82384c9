from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import Linear
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Steering
from fluvial.core.simulate import simulate
from fluvial.core.steering.guidance import ClassifierFree
from fluvial.core.time import LogitNormal, Uniform, uniform_grid
from fluvial.data.format import Format
from fluvial.data.images import scaled
from fluvial.images.meanflow import (
    AverageVelocity,
    FreeGuidance,
    Guidance,
    MeanFlow,
    TimePairs,
)
from fluvial.networks import ContextTransformer, DiT
from fluvial.training.files import load_model, save_model
from fluvial.training.use import read_use

NOISE = KeyedNoise(3)
CLASSES = 3
JVP: Any = torch.func.jvp  # whose type forgets about tuples


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass
class FixedNoise:
    """The draws that a test wants."""

    eps: Tensor
    uniforms: Mapping[str, Tensor] = field(default_factory=dict)

    def normal(self, like: Tensor, tag: str = "") -> Tensor:
        assert tag == "source" and like.shape == self.eps.shape
        return self.eps

    def uniform(self, like: Tensor, tag: str = "") -> Tensor:
        return self.uniforms[tag]


@dataclass(frozen=True)
class FixedTimes:
    t: Tensor
    r: Tensor

    def __call__(self, like: Tensor, noise: Any) -> tuple[Tensor, Tensor]:
        return self.t, self.r


class Gauss(nn.Module):
    """The average velocity of data N(m, s^2), in closed form."""

    shape = (1,)

    def __init__(self, m: float = 0.5, s: float = 2.0) -> None:
        super().__init__()
        self.m, self.s = m, s
        self.unused = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def tau(self, t: Tensor) -> Tensor:
        return ((1 - t) ** 2 * self.s**2 + t**2).sqrt()

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        slope = (t - (1 - t) * self.s**2) / self.tau(t) ** 2
        return -self.m + slope * (x - (1 - t) * self.m)

    def flow(self, x: Tensor, t: Tensor, r: Tensor) -> Tensor:
        return (1 - r) * self.m + self.tau(r) / self.tau(t) * (x - (1 - t) * self.m)

    def forward(self, x: Tensor, t: Tensor, *, h: Tensor) -> Tensor:
        t, r = t[:, None], (t - h)[:, None]
        still = r == t
        u = (x - self.flow(x, t, r)) / torch.where(still, 1.0, t - r)
        return torch.where(still, self.velocity(x, t), u)


class LinearNet(nn.Module):
    """u = a x + b r + c t."""

    def __init__(self, a: float, b: float, c: float) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(float64(v)) for v in (a, b, c))

    def forward(self, x: Tensor, t: Tensor, *, h: Tensor) -> Tensor:
        return self.a * x + self.b * (t - h)[:, None] + self.c * t[:, None]


class Toy(nn.Module):
    """A perceptron with every condition there is and two heads; remembers how it was called."""

    def __init__(self, dim: int = 2, width: int = 16, num_classes: int = CLASSES) -> None:
        super().__init__()
        self.shape, self.num_classes, self.has_velocity_head = (dim,), num_classes, True
        sizes = {
            "inner": (width, dim + 2 + CLASSES + 1 + 3),
            "bias": (width,),
            "outer": (dim, width),
            "second": (dim, width),
        }
        noise = KeyedNoise(0)
        self.weights = nn.ParameterDict(
            {
                name: 0.5 * noise.normal(torch.empty(size, dtype=torch.float64), name)
                for name, size in sizes.items()
            }
        )
        self.calls: list[dict[str, Tensor]] = []

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        *,
        h: Tensor,
        label: Tensor | None = None,
        omega: Tensor | None = None,
        t_min: Tensor | None = None,
        t_max: Tensor | None = None,
        velocity: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        ones = torch.ones_like(t)
        if label is None:
            label = torch.full((len(x),), CLASSES)
        values = [
            t,
            h,
            0 * ones if omega is None else 1 - 1 / omega,
            0 * ones if t_min is None else t_min,
            ones if t_max is None else t_max,
        ]
        self.calls.append({"h": h, "label": label, "t_min": values[3], "t_max": values[4]})
        onehot = nn.functional.one_hot(label.long(), CLASSES + 1).to(x.dtype)
        inputs = torch.cat([x, onehot, torch.stack([v.expand(len(x)) for v in values], 1)], 1)
        w = self.weights
        hidden = torch.tanh(inputs @ w["inner"].T + w["bias"])
        u = hidden @ w["outer"].T
        return (u, hidden @ w["second"].T) if velocity else u


class ByLabel(nn.Module):
    """One velocity a class and one for none, whatever x, t and h; ``of`` may use omega."""

    num_classes = 1

    def __init__(self, of: Callable[[Tensor], Tensor], null: float) -> None:
        super().__init__()
        self.of, self.null, self.calls = of, null, 0

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        *,
        h: Tensor,
        label: Tensor,
        omega: Tensor | float = 1.0,
        t_min: Tensor | float = 0.0,
        t_max: Tensor | float = 1.0,
    ) -> Tensor:
        self.calls += 1
        value = torch.where(label == 1, self.null, self.of(torch.as_tensor(omega).to(x)))
        return value[:, None] + 0 * x


def small_dit(**changes: Any) -> DiT:
    options: dict[str, Any] = {
        "size": 4,
        "channels": 1,
        "patch": 2,
        "width": 8,
        "depth": 1,
        "heads": 2,
        "num_classes": CLASSES,
    }
    return awake(DiT(**(options | changes)))


def awake(network: nn.Module) -> Any:
    """The network with no weight at zero."""
    for name, value in network.named_parameters():
        value.data = value + 0.1 * KeyedNoise(1).normal(value, name)
    return network


def data(rows: int = 12, dim: int = 2) -> tuple[Tensor, Tensor]:
    x = KeyedNoise(5).normal(torch.empty(rows, dim, dtype=torch.float64))
    return x, torch.arange(rows) % CLASSES


# E1, E2: the closed form


def test_closed_form_numbers() -> None:
    net = Gauss()
    model = MeanFlow(net)
    u = model.average_velocity(float64(1.0)[:, None], 1.0, 0.0)
    assert abs(float(u) + 1.5) < 1e-12
    sample = model.sample(1, noise=NOISE, x1=float64(1.0)[:, None])
    assert abs(float(sample) - 2.5) < 1e-12
    x, t, r = float64(-1.0)[:, None], float64(0.75), float64(0.25)
    assert abs(float(net.velocity(x, t)) + 0.15384615) < 1e-8
    u = model.average_velocity(x, t, r)
    assert abs(float(u) - 1.04587327) < 1e-8
    assert abs(float(x - 0.5 * u) + 1.52293663) < 1e-8


def identity_error(dr: float, dt: float) -> float:
    """max |u - v + (t - r) du| with du along (v, dr, dt)."""
    net = Gauss()
    noise, like = KeyedNoise(0), torch.empty(50, dtype=torch.float64)
    x = noise.normal(like[:, None])
    t = 0.3 + 0.7 * noise.uniform(like, "t")
    r = 0.8 * t * noise.uniform(like, "r")
    v = net.velocity(x, t[:, None])
    u, du = JVP(lambda x, r, t: net(x, t, h=t - r), (x, r, t), (v, dr + 0 * r, dt + 0 * t))
    return float((u - v + (t - r)[:, None] * du).abs().max())


def test_identity_holds_for_the_right_tangent_alone() -> None:
    assert identity_error(dr=0, dt=1) < 1e-12
    for dr, dt in ((0, 0), (1, 0), (1, 1)):
        assert identity_error(dr, dt) > 0.1


@pytest.mark.parametrize(
    "times",
    [{"steps": 1}, {"steps": 2}, {"steps": 7}, {"grid": [1, 0.9, 0.31, 0.05, 0]}],
    ids=str,
)
def test_any_grid_ends_at_the_same_point(times: dict[str, Any]) -> None:
    net = Gauss()
    x1 = NOISE.normal(torch.empty(20, 1, dtype=torch.float64), "source")
    exact = net.flow(x1, float64(1.0), float64(0.0))
    assert (MeanFlow(net).sample(20, noise=NOISE, **times) - exact).abs().max() < 1e-12


def test_jumps_add_up() -> None:
    net = Gauss()
    x, t, q, r = float64(-1.0)[:, None], float64(0.9), float64(0.6), float64(0.2)
    u = MeanFlow(net).average_velocity
    whole = (t - r) * u(x, t, r)
    parts = (q - r) * u(net.flow(x, t, q), q, r) + (t - q) * u(x, t, q)
    assert (whole - parts).abs().max() < 1e-12


def test_loss_is_zero_at_the_exact_average_velocity() -> None:
    """Where it can be: all data in one point, so that v_c is the marginal velocity."""
    net = Gauss(s=1e-9)
    x0 = torch.full((40, 1), 0.5, dtype=torch.float64)
    terms = MeanFlow(net, times=TimePairs(ratio=0.5)).loss(x0, noise=NOISE)
    assert terms["delta"].shape == (40,) and terms["delta"].max() < 1e-12
    assert terms["fm_error"] < 1e-12


# E3, E4: by hand


def test_without_a_jump_the_target_is_the_velocity() -> None:
    """E3, on a network whose derivative is huge."""
    net = LinearNet(0.5, 1e6, -1e6)
    x0, eps, t = float64(-0.5)[:, None], float64(1.0)[:, None], float64(0.6)
    model = MeanFlow(net, times=FixedTimes(t, t), p=0.0)  # type: ignore[arg-type]
    terms = model.loss(x0, noise=FixedNoise(eps))  # type: ignore[arg-type]
    assert abs(terms["loss"].item() - (0.5 * 0.4 - 1.5) ** 2) < 1e-9
    assert terms["delta"] == terms["fm_error"]


@pytest.mark.parametrize(
    ("p", "loss", "gradients"),
    [
        (1.0, 0.99610895, (-1.28 / 2.57, -0.64 / 2.57, -1.92 / 2.57)),
        (0.5, 1.59688413, None),
        (0.0, 2.56, (-1.28, -0.64, -1.92)),
    ],
)
def test_hand_case(p: float, loss: float, gradients: tuple[float, ...] | None) -> None:
    """E4: u = 0, du/dt = -0.25, target 1.6, delta 2.56."""
    net = LinearNet(0.5, 2.0, -1.0)
    times: Any = FixedTimes(float64(0.6), float64(0.2))
    noise: Any = FixedNoise(float64(1.0)[:, None])
    terms = MeanFlow(net, times=times, p=p, c=0.01).loss(float64(-0.5)[:, None], noise=noise)
    assert abs(terms["loss"].item() - loss) < 1e-8
    assert abs(float(terms["delta"]) - 2.56) < 1e-12
    assert terms["fm_error"] == 0
    if gradients:
        terms["loss"].backward()
        for value, wanted in zip((net.a, net.b, net.c), gradients, strict=True):
            assert value.grad is not None and abs(value.grad.item() - wanted) < 1e-12


# E5: guidance


def one_step_delta(model: MeanFlow, t: float = 0.5, drop: float = 1.0) -> float:
    """delta of a row with r = t and v_c = 1."""
    rows: Any = FixedNoise(
        float64(1.0)[:, None],
        {"drop": float64(drop), "omega": float64(0.5), "t_min": float64(0.5), "t_max": float64(0)},
    )
    x0 = torch.zeros(1, 1, dtype=torch.float64)
    model.times = FixedTimes(float64(t), float64(t))  # type: ignore[assignment]
    return float(model.loss(x0, torch.zeros(1, dtype=torch.int64), noise=rows)["delta"])


@pytest.mark.parametrize(
    ("omega", "kappa", "target", "scale", "calls"),
    [
        (2.0, 0.0, 1.8, 2.0, 2),
        (1.0, 0.5, 1.2, 2.0, 3),
        (0.2, 0.92, 0.728, 2.5, 3),
        (0.3, 0.7, 0.72, 1.0, 2),
        (1.0, 0.0, 1.0, 1.0, 1),
    ],
)
def test_guided_target(omega: float, kappa: float, target: float, scale: float, calls: int) -> None:
    guidance = Guidance(omega, kappa, interval=(0.4, 0.6))
    assert abs(guidance.scale - scale) < 1e-12
    net = ByLabel(lambda w: 0.6 + 0 * w, null=0.2)
    model = MeanFlow(net, guidance=guidance)
    assert abs(one_step_delta(model) - (0.6 - target) ** 2) < 1e-12
    assert net.calls == calls
    for t in (0.39, 0.61):  # outside the interval
        assert abs(one_step_delta(model, t) - 0.4**2) < 1e-12
    # a dropped row learns v_c under the null label
    assert abs(one_step_delta(model, drop=0.0) - 0.8**2) < 1e-12


@pytest.mark.parametrize(("omega", "kappa"), [(2.0, 0.0), (1.0, 0.5), (0.2, 0.92)])
def test_fixed_point_of_guidance(omega: float, kappa: float) -> None:
    guidance = Guidance(omega, kappa)
    net = ByLabel(lambda w: 0.2 + guidance.scale * (1 - 0.2) + 0 * w, null=0.2)
    assert one_step_delta(MeanFlow(net, guidance=guidance)) < 1e-24


def test_fixed_point_of_free_guidance() -> None:
    """v_null + omega (v - v_null), also for t outside the drawn interval, since r = t."""
    net = ByLabel(lambda w: 0.2 + w * (1 - 0.2), null=0.2)
    for t in (0.01, 0.5, 0.99):
        assert one_step_delta(MeanFlow(net, guidance=FreeGuidance()), t) < 1e-24


@pytest.mark.parametrize("beta", [1.0, 0.0, 2.0, 3.5])
def test_law_of_omega(beta: float) -> None:
    like = torch.empty(20_000, dtype=torch.float64)
    omega, low, high = FreeGuidance(omega_max=8.0, beta=beta).draw(like, NOISE)

    def cdf(w: Any) -> Any:
        if beta == 1:
            return np.log(w) / np.log(8)
        return (w ** (1 - beta) - 1) / (8 ** (1 - beta) - 1)

    assert stats.kstest(omega.numpy(), cdf).pvalue > 1e-6
    assert stats.kstest(low.numpy(), "uniform", (0, 0.5)).pvalue > 1e-6
    assert stats.kstest(high.numpy(), "uniform", (0.5, 0.5)).pvalue > 1e-6
    assert omega.min() >= 1 and omega.max() <= 8


def test_free_guidance_conditions_of_rows_without_a_jump() -> None:
    net = Toy()
    x0, label = data(200)
    model = MeanFlow(net, times=TimePairs(ratio=0.5), guidance=FreeGuidance())
    model.loss(x0, label, noise=NOISE)
    flow, jump = net.calls[-2:]
    assert len(flow["h"]) + len(jump["h"]) == 200 and not flow["h"].any()
    assert (flow["t_min"] == 0).all() and (flow["t_max"] == 1).all()
    assert (jump["t_min"] > 0).all() and (jump["t_max"] < 1).all()


# E6: against a plain implementation


def reference(
    net: Toy,
    x0: Tensor,
    label: Tensor,
    eps: Tensor,
    t: Tensor,
    r: Tensor,
    uniforms: Mapping[str, Tensor],
    options: Mapping[str, Any],
) -> Tensor:
    """The loss as in the papers: all rows through one product, and a target without gradient."""
    p, c = options.get("p", 1.0), options.get("c", 1e-2)
    tangent, guidance = options.get("tangent", "target"), options.get("guidance")
    t_, r_ = t[:, None], r[:, None]
    x, v_c = (1 - t_) * x0 + t_ * eps, eps - x0
    dropped = torch.zeros(len(x0), dtype=torch.bool)
    cond: dict[str, Tensor] = {}
    if guidance:
        dropped = uniforms["drop"] < guidance.drop
        label = torch.where(dropped, CLASSES, label)
    if isinstance(guidance, FreeGuidance):
        still = r == t
        cond = {
            "omega": guidance.omega_max ** uniforms["omega"],
            "t_min": torch.where(still, 0, 0.5 * uniforms["t_min"]),
            "t_max": torch.where(still, 1, 0.5 + 0.5 * uniforms["t_max"]),
        }

    def both(x: Tensor, r: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        u, v = net(x, t, h=t - r, label=label, velocity=True, **cond)
        return u, (v if tangent == "head" else u)

    with torch.no_grad():
        own = both(x, t, t)[1]
        null = net(x, t, h=0 * t, velocity=True)[1 if tangent == "head" else 0]
    v_g = v_c
    if isinstance(guidance, Guidance):
        omega, kappa = guidance.omega, guidance.kappa
        low, high = guidance.interval
        inside = (low <= t) & (t <= high) & ~dropped
        guided = omega * v_c + (1 - omega - kappa) * null + kappa * own
        v_g = torch.where(inside[:, None], guided, v_c)
    elif guidance:
        inside = (cond["t_min"] <= t) & (t <= cond["t_max"]) & ~dropped
        scale = torch.where(inside, cond["omega"], 1.0)[:, None]
        v_g = v_c + (1 - 1 / scale) * (own - null)
    along = v_g if tangent == "target" else own
    (u, v), (du, _) = JVP(both, (x, r, t), (along, torch.zeros_like(r), torch.ones_like(t)))
    pairs = [(u, (v_g - (t_ - r_) * du).detach())]
    if tangent == "head":
        pairs.append((v, v_g))
    total = x0.new_zeros(())
    for prediction, target in pairs:
        delta = (prediction - target).square().sum(1)
        total = total + (delta / (delta + c).detach() ** p).mean()
    return total


OPTIONS: list[dict[str, Any]] = [
    {},
    {"p": 0.0},
    {"p": 0.5, "c": 1e-3},
    {"p": 0.75, "tangent": "boundary"},
    {"tangent": "head"},
    {"guidance": Guidance(2.0, 0.0)},
    {"guidance": Guidance(1.0, 0.5, drop=0.4)},
    {"guidance": Guidance(0.2, 0.92, interval=(0.3, 0.8), drop=0.0)},
    {"guidance": Guidance(1.0, 0.5), "tangent": "boundary"},
    {"guidance": FreeGuidance(drop=0.3)},
    {"guidance": FreeGuidance(), "tangent": "boundary"},
    {"guidance": FreeGuidance(), "tangent": "head", "p": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_loss_and_gradient_equal_a_plain_implementation(options: dict[str, Any]) -> None:
    net = Toy()
    x0, label = data(24)
    noise, like = KeyedNoise(11), x0[:, 0]
    eps = noise.normal(x0)
    t = 0.05 + 0.9 * noise.uniform(like, "t")
    r = torch.where(torch.arange(24) % 3 == 0, t, t * noise.uniform(like, "r"))
    uniforms = {
        name: noise.uniform(like, name + "!") for name in ("drop", "omega", "t_min", "t_max")
    }
    times: Any = FixedTimes(t, r)
    fixed: Any = FixedNoise(eps, uniforms)
    parameters = list(net.parameters())
    loss = MeanFlow(net, times=times, **options).loss(x0, label, noise=fixed)["loss"]
    wanted = reference(net, x0, label, eps, t, r, uniforms, options)
    assert abs((loss - wanted).item()) < 1e-12
    got = torch.autograd.grad(loss, parameters, allow_unused=True)
    for mine, theirs in zip(
        got, torch.autograd.grad(wanted, parameters, allow_unused=True), strict=True
    ):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert (mine - theirs).abs().max() < 1e-11


def test_flow_matching_is_the_special_case() -> None:
    net = Toy()
    x0, label = data(20)
    times = TimePairs(ratio=0.0)
    loss = MeanFlow(net, times=times, p=0.0).loss(x0, label, noise=NOISE)["loss"]
    t, r = times(x0, NOISE)
    assert torch.equal(t, r)
    eps, s = NOISE.normal(x0, "source"), t[:, None]
    u = net((1 - s) * x0 + s * eps, t, h=0 * t, label=label)
    wanted = (u - (eps - x0)).square().sum(1).mean()
    assert torch.equal(loss, wanted)
    parameters = list(net.parameters())[:3]
    for mine, theirs in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(wanted, parameters), strict=True
    ):
        assert (mine - theirs).abs().max() < 1e-14


def test_only_rows_with_a_jump_pay_for_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counting(function: Any, primals: Any, tangents: Any, **more: Any) -> Any:
        sizes.append(len(primals[0]))
        return JVP(function, primals, tangents, **more)

    monkeypatch.setattr(torch.func, "jvp", counting)
    net = Toy()
    x0, label = data(40)
    for ratio in (0.0, 0.4, 1.0):
        times = TimePairs(ratio=ratio)
        t, r = times(x0, NOISE)
        jumps = int((r < t).sum())
        net.calls, sizes[:] = [], []
        terms = MeanFlow(net, times=times).loss(x0, label, noise=NOISE)
        assert sizes == ([jumps] if jumps else [])
        assert sum(len(call["h"]) for call in net.calls) == 40
        assert bool(terms["fm_error"] > 0) == (jumps < 40)


def test_gradient_of_the_head_error_reaches_the_head() -> None:
    net = Toy()
    x0, label = data()
    MeanFlow(net, tangent="head").loss(x0, label, noise=NOISE)["loss"].backward()
    for name in ("outer", "second"):
        gradient = net.weights[name].grad
        assert gradient is not None and gradient.abs().sum() > 0


# E7: times


def test_law_of_the_sorted_times() -> None:
    like = torch.empty(200_000, dtype=torch.float64)
    draw = LogitNormal(-0.4, 1.0)(like, NOISE)
    # standard error of a median: 1 / (2 f sqrt(n)), f the density there
    f = stats.norm.pdf(0) / (0.401312 * (1 - 0.401312))
    assert abs(float(draw.median()) - 0.401312) < 5 / (2 * f * math.sqrt(len(like)))
    t, r = TimePairs(ratio=1.0)(like, NOISE)
    assert (r <= t).all()
    assert abs(float(t.mean()) - 0.5347) < 2e-3
    assert abs(float(r.mean()) - 0.3015) < 2e-3


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.75, 1.0])
def test_share_of_jumps(ratio: float) -> None:
    like = torch.empty(20_000, 3)
    t, r = TimePairs(ratio=ratio)(like, NOISE)
    share = float((r < t).float().mean())
    assert (r <= t).all() and t.shape == (20_000,) and t.dtype == torch.float32
    assert abs(share - ratio) <= 3 * math.sqrt(ratio * (1 - ratio) / len(like)) + 1e-6


def test_separate_law_of_the_earlier_time() -> None:
    """r ~ its law, then r = t for a share of the rows, then r = min(r, t)."""
    like = torch.empty(20_000, dtype=torch.float64)
    times = TimePairs(LogitNormal(-0.6, 1.6), LogitNormal(-4.0, 1.6), ratio=0.75)
    t, r = times(like, NOISE)
    assert (r <= t).all()
    logit = torch.logit(t).numpy()
    assert stats.kstest(logit, "norm", (-0.6, 1.6)).pvalue > 1e-6
    # P(r < t) = 0.75 P(n < 3.4 / (1.6 sqrt 2))
    share = 0.75 * stats.norm.cdf(3.4 / (1.6 * math.sqrt(2)))
    assert abs(float((r < t).double().mean()) - share) < 5 * math.sqrt(0.25 / len(like))
    t, r = TimePairs(Uniform(), Uniform(), ratio=1.0)(like, NOISE)
    assert abs(float((r < t).double().mean()) - 0.5) < 5 * math.sqrt(0.25 / len(like))


# E8: a network at zero


def test_zero_network() -> None:
    net = DiT(size=4, channels=1, patch=2, width=8, depth=1, heads=2)
    model = MeanFlow(net, p=0.0, times=TimePairs(ratio=0.5))
    x0 = NOISE.normal(torch.empty(10, 1, 4, 4), "data")
    terms = model.loss(x0, noise=NOISE)
    v = NOISE.normal(x0, "source") - x0
    assert torch.allclose(terms["loss"], v.square().sum((1, 2, 3)).mean(), rtol=1e-6)
    sample = model.sample(6, noise=NOISE)
    assert torch.equal(sample, NOISE.normal(sample, "source"))


# Rows, dtypes, states


def test_a_batch_is_the_sum_of_its_parts() -> None:
    net = small_dit().double()
    x0 = NOISE.normal(torch.empty(9, 1, 4, 4, dtype=torch.float64), "data")
    label = torch.arange(9) % CLASSES
    model = MeanFlow(net, guidance=Guidance(), times=TimePairs(ratio=0.5), p=0.5)
    whole = model.loss(x0, label, noise=NOISE)
    rows = torch.arange(9)
    for name in ("loss", "delta"):
        single = [
            model.loss(x0[i], label[i], noise=NOISE.rows(i))[name].mean() for i in rows.split(1)
        ]
        assert whole[name].dtype == torch.float64
        assert abs((whole[name].mean() - torch.stack(single).mean()).item()) < 1e-10
        two = [model.loss(x0[i], label[i], noise=NOISE.rows(i))[name].mean() for i in rows.split(5)]
        assert abs((whole[name].mean() - (5 * two[0] + 4 * two[1]) / 9).item()) < 1e-10
    # the terms of a row are in its place
    for i in rows.split(1):
        part = model.loss(x0[i], label[i], noise=NOISE.rows(i))
        assert torch.allclose(part["delta"], whole["delta"][i], atol=1e-12)
        assert torch.allclose(part["t"], whole["t"][i], atol=1e-12)


def test_samples_do_not_depend_on_the_batch_size() -> None:
    model = MeanFlow(small_dit().double(), guidance=Guidance())
    label = torch.arange(11) % CLASSES
    whole = model.sample(11, noise=NOISE, label=label, steps=3)
    split = model.sample(11, noise=NOISE, label=label, steps=3, batch_size=4)
    assert whole.dtype == torch.float64 and whole.shape == (11, 1, 4, 4)
    assert (whole - split).abs().max() < 1e-12
    one = model.sample(11, noise=NOISE, label=1, steps=3)
    assert (one[1] - whole[1]).abs().max() < 1e-12


def test_sample_from_a_given_start() -> None:
    model = MeanFlow(small_dit(), guidance=Guidance())
    x1 = NOISE.normal(torch.empty(5, 1, 4, 4), "mine")
    got = model.sample(5, noise=KeyedNoise(0), x1=x1, batch_size=2)
    u = model.average_velocity(x1, 1.0, 0.0)
    assert torch.allclose(got, x1 - u, atol=1e-6)
    assert not torch.allclose(got, model.sample(5, noise=KeyedNoise(0)))


def test_no_samples() -> None:
    model = MeanFlow(small_dit())
    assert model.sample(0, noise=NOISE).shape == (0, 1, 4, 4)


@pytest.mark.parametrize("steer", [None, ClassifierFree(1.7)])
def test_euler_integrates_the_velocity(steer: Steering | None) -> None:
    model = MeanFlow(small_dit().double(), guidance=Guidance())
    label = torch.arange(6) % CLASSES
    sampler: Any = Euler()
    got = model.sample(6, noise=NOISE, steps=4, sampler=sampler, steer=steer, label=label)
    x = NOISE.normal(got, "source")
    for t, s in uniform_grid(4):
        v = model.average_velocity(x, t, t, label=label)
        if steer is not None:
            null = model.average_velocity(x, t, t)
            v = null + 1.7 * (v - null)
        x = x + (s - t) * v
    assert (got - x).abs().max() < 1e-12


def test_steering_turns_the_jump() -> None:
    class Onto(Steering):
        def clean(self, clean: Any, x: Any, aim: Any, run: Any) -> Any:
            return torch.ones_like(clean)

    model = MeanFlow(small_dit())
    assert torch.allclose(model.sample(3, noise=NOISE, steps=2, steer=Onto()), torch.ones(()))


def test_field_works_in_the_loop() -> None:
    model = MeanFlow(small_dit())
    x1 = NOISE.normal(torch.empty(4, 1, 4, 4), "source")
    assert model.field.predicts == "mean_velocity"
    loop: Any = simulate
    with torch.no_grad():
        got = loop(x1, uniform_grid(2), AverageVelocity(), Linear(), model.field, NOISE)
    assert torch.equal(got, model.sample(4, noise=NOISE, steps=2))


def test_free_guidance_inputs_reach_the_network() -> None:
    net = awake(
        ContextTransformer(
            size=4, channels=1, patch=2, width=8, depth=1, heads=2, num_classes=CLASSES
        )
    )
    model = MeanFlow(net, guidance=FreeGuidance(), tangent="boundary")
    plain = model.sample(4, noise=NOISE, label=0)
    assert torch.equal(plain, model.sample(4, noise=NOISE, label=0, omega=1.0, t_min=0, t_max=1.0))
    weak = model.sample(4, noise=NOISE, label=0, omega=4.0, t_min=0.4, t_max=0.65)
    assert not torch.allclose(plain, weak)
    each = model.sample(4, noise=NOISE, label=0, omega=torch.tensor([4.0, 1, 4, 1]), batch_size=3)
    assert torch.allclose(each[1], plain[1], atol=1e-6)
    assert not torch.allclose(each[2], plain[2])


def test_second_head_of_the_context_transformer() -> None:
    net = ContextTransformer(
        size=4,
        channels=1,
        patch=2,
        width=8,
        depth=2,
        heads=2,
        num_classes=CLASSES,
        velocity_depth=1,
    )
    model = MeanFlow(
        awake(net), guidance=FreeGuidance(), tangent="head", times=TimePairs(ratio=0.5)
    )
    x0 = NOISE.normal(torch.empty(12, 1, 4, 4), "data")
    model.loss(x0, torch.arange(12) % CLASSES, noise=NOISE)["loss"].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.heads.parameters())


def test_deterministic_and_without_global_state(tmp_path: Path) -> None:
    def states() -> tuple[list[int], Any, str]:
        numpy_state = str(np.random.get_state())  # noqa: NPY002
        return torch.get_rng_state().tolist(), random.getstate(), numpy_state

    def run() -> tuple[Tensor, Tensor]:
        model = MeanFlow(small_dit(), guidance=Guidance())
        x = NOISE.normal(torch.empty(10, 1, 4, 4), "data")
        loss = model.loss(x, torch.arange(10) % CLASSES, noise=NOISE)["loss"].detach()
        model.fit(x, torch.arange(10) % CLASSES, steps=3, batch_size=4, progress=False)
        return loss, model.sample(5, noise=NOISE, label=2, steps=2)

    before = states()
    first = run()
    assert states() == before
    torch.manual_seed(99)
    second = run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_sampling_keeps_the_mode() -> None:
    model = MeanFlow(small_dit())
    assert model.train().sample(1, noise=NOISE) is not None and model.training
    with pytest.raises(IndexError):
        model.sample(2, noise=NOISE.rows(torch.arange(1)))
    assert model.training
    model.eval().sample(1, noise=NOISE)
    assert not model.training


# Errors


def test_bad_options() -> None:
    net = small_dit()
    for options in (
        {"p": -1.0},
        {"p": math.nan},
        {"c": 0.0},
        {"c": math.inf},
        {"tangent": "other"},
        {"tangent": "head"},
        {"guidance": FreeGuidance()},
    ):
        with pytest.raises(ValueError):
            MeanFlow(net, **options)
    for other in (small_dit(num_classes=0), LinearNet(0, 0, 0)):
        with pytest.raises(ValueError, match="num_classes"):
            MeanFlow(other, guidance=Guidance())
    for make in (
        lambda: Guidance(kappa=1.0),
        lambda: Guidance(omega=math.inf),
        lambda: Guidance(interval=(0.6, 0.5)),
        lambda: Guidance(interval=(0.0, 1.5)),
        lambda: Guidance(drop=1.1),
        lambda: FreeGuidance(omega_max=1.0),
        lambda: FreeGuidance(beta=math.nan),
        lambda: FreeGuidance(drop=-0.1),
        lambda: TimePairs(ratio=1.5),
    ):
        with pytest.raises(ValueError):
            make()


def test_bad_batches() -> None:
    model = MeanFlow(Toy(), guidance=Guidance())
    x0, label = data(4)

    def refused(error: type[Exception], words: str, *batch: Any) -> None:
        with pytest.raises(error, match=words):
            model.loss(*batch, noise=NOISE)
        with pytest.raises(error, match=words):
            model.fit(*batch, steps=1, progress=False)

    refused(TypeError, "floating", x0.long(), label)
    refused(ValueError, "not finite", x0.where(x0 != x0[0], math.nan), label)
    refused(ValueError, "shape", x0[:, :1], label)
    refused(ValueError, "rows", x0[:0], label[:0])
    refused(ValueError, "label is missing", x0)
    refused(ValueError, "label must have shape", x0, label[:3])
    refused(TypeError, "integer", x0, label.double())
    refused(ValueError, r"0 \.\. 2", x0, label + 1)
    refused(ValueError, r"0 \.\. 2", x0, label - 1)
    model = MeanFlow(small_dit(num_classes=0))
    refused(ValueError, "num_classes=0", torch.zeros(4, 1, 4, 4), label)


def test_bad_calls_of_sample() -> None:
    model = MeanFlow(small_dit())
    with pytest.raises(ValueError, match="shape"):
        MeanFlow(LinearNet(0, 0, 0)).sample(1, noise=NOISE)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("num", {"num": -1}),
        ("batch_size", {"batch_size": 0}),
        ("steps", {"steps": 0}),
        ("1 to 0", {"grid": [1, 0.5]}),
        ("1 to 0", {"grid": [0.9, 0]}),
        ("1 to 0", {"grid": [1, 0.5, 0.5, 0]}),
        ("1 to 0", {"grid": [1, 0.2, 0.5, 0]}),
        ("two times", {"grid": [1]}),
        ("lie in", {"grid": [1, math.nan, 0]}),
        ("label", {"label": 3}),
        ("label", {"label": -1}),
        ("label", {"label": torch.zeros(3, dtype=torch.int64)}),
        ("x1", {"x1": torch.zeros(3, 1, 4, 4)}),
        ("x1", {"x1": torch.full((2, 1, 4, 4), math.inf)}),
        ("omega", {"omega": torch.ones(3)}),
    ]
    for words, options in wrong:
        with pytest.raises(ValueError, match=words):
            model.sample(**{"num": 2, "noise": NOISE, **options})
    with pytest.raises(TypeError, match="label"):
        model.sample(2, noise=NOISE, label=torch.zeros(2))


def test_bad_times() -> None:
    model, x = MeanFlow(small_dit()), torch.zeros(2, 1, 4, 4)
    for t, s in ((0.5, 0.6), (1.1, 0.5), (0.5, -0.1), (math.nan, 0.0)):
        with pytest.raises(ValueError, match="0 <= s <= t <= 1"):
            model.average_velocity(x, t, s)
    with pytest.raises(ValueError, match="0 <= s <= t <= 1"):
        model.average_velocity(x, torch.tensor([0.5, 0.2]), torch.tensor([0.4, 0.3]))


# Training and files


def test_fit_scales_uint8() -> None:
    images = (NOISE.uniform(torch.empty(12, 1, 4, 4)) * 256).to(torch.uint8)
    options: dict[str, Any] = {"steps": 3, "batch_size": 5, "progress": False, "lr": 1e-2}
    one = MeanFlow(small_dit(num_classes=0)).fit(images, **options)
    two = MeanFlow(small_dit(num_classes=0)).fit(scaled(images), **options)
    assert torch.equal(one.sample(3, noise=NOISE), two.sample(3, noise=NOISE))
    assert not one.training


def test_fit_learns_the_shape_of_the_event() -> None:
    model = MeanFlow(LinearNet(0.1, 0.1, 0.1))
    assert model.shape is None
    model.fit(data(5, dim=3)[0], steps=1, batch_size=2, progress=False)
    assert model.sample(2, noise=NOISE).shape == (2, 3)


def test_resume_refuses_other_options(tmp_path: Path) -> None:
    x = NOISE.normal(torch.empty(10, 1, 4, 4), "data")

    def fit(p: float = 1.0, width: int = 8, rows: int = 10, steps: int = 2) -> None:
        model = MeanFlow(small_dit(width=width, num_classes=0), p=p)
        model.fit(
            x[:rows],
            steps=steps,
            batch_size=2,
            schedule="cosine",
            out=tmp_path,
            progress=False,
        )

    fit()
    fit()
    for name, changes in (
        ("p was 1.0, is 0.5", {"p": 0.5}),
        ("width", {"width": 16}),
        ("rows", {"rows": 9}),
        ("steps was 2, is 3", {"steps": 3}),
    ):
        with pytest.raises(ValueError, match=name):
            fit(**changes)


FILED: list[dict[str, Any]] = [
    {},
    {"guidance": Guidance(0.2, 0.92, (0.0, 0.75), 0.2), "p": 0.75, "c": 1e-3},
    {"times": TimePairs(LogitNormal(-0.6, 1.6), Uniform(0.1, 0.9), 0.75), "tangent": "boundary"},
]


@pytest.mark.parametrize("options", FILED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_save_and_load(options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = MeanFlow(small_dit().to(dtype), **options)
    model.save(tmp_path / "model")
    again = MeanFlow.load(tmp_path / "model")
    for name in ("times", "p", "c", "guidance", "tangent", "shape"):
        assert getattr(again, name) == getattr(model, name)
    assert not again.training
    kwargs: dict[str, Any] = {"noise": NOISE, "label": 1, "steps": 2}
    assert torch.equal(model.sample(3, **kwargs), again.sample(3, **kwargs))


def test_save_and_load_of_free_guidance(tmp_path: Path) -> None:
    net = ContextTransformer(
        size=(4, 8),
        channels=1,
        patch=2,
        width=8,
        depth=2,
        heads=2,
        num_classes=2,
        velocity_depth=1,
    )
    model = MeanFlow(awake(net), guidance=FreeGuidance(4.0, 0.5, 0.2), tangent="head")
    model.save(tmp_path / "model")
    again = MeanFlow.load(tmp_path / "model")
    assert again.guidance == model.guidance and again.tangent == "head"
    sample = again.sample(2, noise=NOISE, label=1, omega=3.0)
    assert torch.equal(sample, model.sample(2, noise=NOISE, label=1, omega=3.0))


def test_save_does_not_overwrite(tmp_path: Path) -> None:
    model = MeanFlow(small_dit())
    model.save(tmp_path / "model")
    with pytest.raises(FileExistsError, match="overwrite"):
        model.save(tmp_path / "model")
    model.save(tmp_path / "model", overwrite=True)


def test_load_of_other_files(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with pytest.raises(FileNotFoundError):
        MeanFlow.load(path)
    path.write_bytes(b"not a model")
    with pytest.raises(ValueError, match="readable"):
        MeanFlow.load(path)
    model = MeanFlow(small_dit())
    model.save(path, overwrite=True)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="readable"):
        MeanFlow.load(path)
    for header in ({"system": "classifier"}, {}):
        save_model(path, {"w": torch.ones(2)}, header, overwrite=True)
        with pytest.raises(ValueError, match="meanflow"):
            MeanFlow.load(path)
    model.save(path, overwrite=True)
    with pytest.raises(ValueError, match="do not fit"):
        MeanFlow.load(path, network=small_dit(width=16))


def test_a_network_of_ones_own(tmp_path: Path) -> None:
    model = MeanFlow(LinearNet(0.3, -0.2, 0.1), shape=(2,))
    model.save(tmp_path / "model")
    with pytest.raises(ValueError, match="network="):
        MeanFlow.load(tmp_path / "model")
    again = MeanFlow.load(tmp_path / "model", network=LinearNet(0, 0, 0))
    assert torch.equal(again.sample(4, noise=NOISE), model.sample(4, noise=NOISE))


def energy_distance(x: Tensor, y: Tensor) -> float:
    """2 E|x - y| - E|x - x'| - E|y - y'|, unbiased."""

    def within(z: Tensor) -> Tensor:
        return torch.cdist(z, z).sum() / (len(z) * (len(z) - 1))

    return float(2 * torch.cdist(x, y).mean() - within(x) - within(y))


@pytest.mark.parametrize("tangent", ["target", "boundary"])
def test_training_makes_one_step_samples(tangent: Any) -> None:
    """Two clusters: the energy distance of one-step samples falls tenfold."""

    def clusters(rows: int, seed: int) -> Tensor:
        x = 0.1 * KeyedNoise(seed).normal(torch.empty(rows, 2))
        return x + 1.5 * torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)[:, None]

    model = MeanFlow(Toy(width=64).float(), times=TimePairs(ratio=0.5), p=0.75, tangent=tangent)
    held_out = clusters(400, seed=2)
    before = energy_distance(model.sample(400, noise=NOISE), held_out)
    model.fit(
        clusters(400, seed=1),
        steps=300,
        lr=1e-2,
        schedule="linear",
        decay=0.5,
        ema=0.98,
        progress=False,
    )
    after = energy_distance(model.sample(400, noise=NOISE), held_out)
    assert after < 0.1 * before


# The user's units, names of classes, validation, use


def test_a_format_is_part_of_the_model(tmp_path: Path) -> None:
    """Fitted on the user's numbers it is what it is on encoded ones, and it is saved."""
    x = 50 + 7 * NOISE.normal(torch.empty(30, 3), "data")
    x[:, 2] = (10 * x[:, 2]).round()
    data_format = Format(
        "table",
        (3,),
        shift=tuple(x.mean(0).tolist()),
        scale=tuple(x.std(0).tolist()),
        columns=("a", "b", "c"),
        integers=("c",),
    )
    options: dict[str, Any] = {"steps": 4, "batch_size": 8, "progress": False}
    one = MeanFlow(LinearNet(0.1, 0.2, 0.3).float(), format=data_format).fit(x, **options)
    two = MeanFlow(LinearNet(0.1, 0.2, 0.3).float()).fit(data_format.encode(x), **options)
    assert torch.equal(one.network.a, two.network.a)
    assert one.shape == (3,)
    dit = MeanFlow(small_dit(), format=Format("images", (1, 4, 4), label_names=("x", "y", "z")))
    dit.save(tmp_path / "model")
    again = MeanFlow.load(tmp_path / "model")
    assert again.format == dit.format
    by_name, by_number = (again.sample(3, label=label, noise=NOISE) for label in ("y", 1))
    assert torch.equal(by_name, by_number)
    with pytest.raises(ValueError, match="no class 'w'"):
        again.sample(3, label="w", noise=NOISE)
    with pytest.raises(ValueError, match="knows no names"):
        MeanFlow(small_dit()).sample(3, label="y", noise=NOISE)
    with pytest.raises(ValueError, match=r"shape of an event differs.*\(3, 4, 4\)"):
        MeanFlow(small_dit(), format=Format("images", (3, 4, 4)))


def test_uint8_images_give_a_format_and_a_failed_fit_none(tmp_path: Path) -> None:
    images = (NOISE.uniform(torch.empty(12, 1, 4, 4)) * 256).to(torch.uint8)
    options: dict[str, Any] = {"steps": 2, "progress": False}
    model = MeanFlow(small_dit(num_classes=0))
    with pytest.raises(ValueError, match="does not divide"):
        model.fit(images, batch_size=5, accumulation=2, **options)
    assert model.format is None
    model.fit(images, batch_size=5, **options)
    assert model.format == Format("images", (1, 4, 4))
    decoded = model.format.decode(model.sample(2, noise=NOISE))
    assert decoded.dtype == torch.uint8 and decoded.shape == (2, 1, 4, 4)


def test_memory_mapped_data_are_not_copied(tmp_path: Path) -> None:
    images = (NOISE.uniform(torch.empty(12, 1, 4, 4)) * 256).to(torch.uint8)
    np.save(tmp_path / "x.npy", images.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="c")
    model = MeanFlow(small_dit(num_classes=0), format=Format("images", (1, 4, 4)))
    plain = MeanFlow(small_dit(num_classes=0))
    rows = model._rows(torch.from_numpy(mapped), None)
    assert rows["x"].data_ptr() == mapped.ctypes.data
    options: dict[str, Any] = {"steps": 3, "batch_size": 5, "progress": False}
    model.fit(torch.from_numpy(mapped), **options)
    plain.fit(images, **options)
    assert torch.equal(model.sample(2, noise=NOISE), plain.sample(2, noise=NOISE))


def test_values_that_are_not_finite_are_found_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluvial.images.meanflow.BLOCK", 64)
    x = torch.zeros(100, 1, 4, 4)
    x[77, 0, 1, 1] = float("inf")
    with pytest.raises(ValueError, match="in row 77 first"):
        MeanFlow(small_dit(num_classes=0)).fit(x, steps=1, progress=False)


def test_validation_chooses_the_average(tmp_path: Path) -> None:
    x, label = NOISE.normal(torch.empty(40, 1, 4, 4), "data"), torch.arange(40) % CLASSES
    model = MeanFlow(small_dit(), times=TimePairs(ratio=0.5))
    model.fit(
        x[:30],
        label[:30],
        validation=(x[30:], label[30:]),
        steps=20,
        batch_size=8,
        lr=1e-2,
        ema=(0.5, 0.99),
        out=tmp_path,
        progress=False,
    )
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured = lines[-1]["validation"]
    best = min(("ema-0.5", "ema-0.99"), key=lambda name: measured[name]["delta"])
    weights = load_model(tmp_path / "weights" / f"{best}.safetensors")[0]
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name
    terms = model.loss(x[30:], label[30:], noise=KeyedNoise(0))
    assert terms["delta"].mean().item() == pytest.approx(measured[best]["delta"], rel=1e-4)
    assert len(measured[best]["by_time"]["delta"]) == 10


def test_parts_of_a_batch_train_as_the_whole() -> None:
    """Also where the product with the Jacobian is taken on some rows only."""
    x = NOISE.normal(torch.empty(24, 1, 4, 4, dtype=torch.float64), "data")
    models = [MeanFlow(small_dit(num_classes=0).double(), times=TimePairs(ratio=0.5)) for _ in "ab"]
    for model, parts in zip(models, (1, 3), strict=True):
        model.fit(x, steps=5, batch_size=12, accumulation=parts, lr=1e-3, progress=False)
    one, two = (model.sample(4, noise=NOISE, steps=2) for model in models)
    assert torch.allclose(one, two, atol=1e-7)


def test_autocast_reaches_the_product_with_the_jacobian() -> None:
    x = NOISE.normal(torch.empty(24, 1, 4, 4), "data")
    models = [MeanFlow(small_dit(num_classes=0), times=TimePairs(ratio=1.0)) for _ in "ab"]
    for model, precision in zip(models, ("no", "bf16"), strict=True):
        model.fit(x, steps=3, batch_size=12, lr=1e-3, precision=precision, progress=False)
    one, two = (model.sample(4, noise=NOISE) for model in models)
    assert two.dtype == torch.float32 and not torch.equal(one, two)
    assert (one - two).abs().max() < 0.05  # bfloat16 has 8 bits, and three steps


def test_the_statement_of_use_is_saved_and_inherited(tmp_path: Path) -> None:
    model = MeanFlow(small_dit(num_classes=0))
    model.save(tmp_path / "one")
    first = read_use(tmp_path / "one")
    assert first is not None and first.system == "meanflow"
    assert [entry.id for entry in first.out_of_scope][:2] == [
        "weapon-control",
        "unverified-safety-critical",
    ]
    again = MeanFlow.load(tmp_path / "one")
    again.save(tmp_path / "two")
    assert again.use == first == read_use(tmp_path / "two")
    again.fit(NOISE.normal(torch.empty(8, 1, 4, 4)), steps=1, batch_size=4, progress=False)
    again.save(tmp_path / "three")
    third = read_use(tmp_path / "three")
    assert third is not None and third.base_model == (first.digest,)
    # a file without one: no statement, and the same samples
    bare = load_model(tmp_path / "one")
    save_model(tmp_path / "bare", bare[0], {k: v for k, v in bare[1].items() if k != "format"})
    without = MeanFlow.load(tmp_path / "bare")
    assert without.use is None
    assert torch.equal(without.sample(2, noise=NOISE), model.sample(2, noise=NOISE))
