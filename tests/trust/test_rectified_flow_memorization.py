"""Pairs, reference fields, gradient variance, and flows that memorise: the exact checks."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import ot
import pytest
import torch
from torch import Tensor, nn

from fluvial.core.gaussian.losses import Matching
from fluvial.core.gaussian.ode import Heun
from fluvial.core.gaussian.paths import Linear
from fluvial.core.noise import KeyedNoise
from fluvial.core.time import Uniform
from fluvial.models import load
from fluvial.networks import MLP
from fluvial.training.files import load_model, save_model
from fluvial.trust.rectified_flow_memorization import (
    EmpiricalField,
    GaussianPairField,
    NoisyLinear,
    PairedFlow,
    PairOptimal,
    closest_approach,
    couple,
    gradient_variance,
    memorization_report,
    optimal_field_noisy_loss,
    optimal_field_on_independent,
    optimal_field_on_rotated,
    rotated_field_on_rotated,
    rotation,
    transport,
)
from fluvial.trust.rectified_flow_memorization import pairs as pairs_module
from fluvial.trust.rectified_flow_memorization.pairs import root

NOISE = KeyedNoise(7)
ANGLES = (60, 90, 120)
MANY = 400_000


def normal(*shape: int, tag: str = "", dtype: torch.dtype = torch.float64) -> Tensor:
    return NOISE.normal(torch.empty(*shape, dtype=dtype), tag)


def standard(matrix: Tensor, noise: float = 0.0) -> GaussianPairField:
    """The field of x_0 = matrix x_1."""
    return GaussianPairField(torch.zeros(len(matrix), dtype=torch.float64), matrix, noise)


def time(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@pytest.fixture(scope="module")
def gaussian() -> Tensor:
    return normal(100_000, 2)


# Proposition 1: variance follows the mismatch (E1 to E4)


@pytest.mark.parametrize("degrees", ANGLES)
def test_matching_field_has_no_loss_and_no_variance(gaussian: Tensor, degrees: int) -> None:
    phi = math.radians(degrees)
    pairs = couple(gaussian, kind="rotated", phi=phi)
    found = gradient_variance(standard(rotation(phi, 2)), *pairs, samples=10_000)
    assert found.loss < 1e-20 and found.variance < 1e-20


@pytest.mark.parametrize("degrees", ANGLES)
def test_optimal_field_pays_for_a_rotation(gaussian: Tensor, degrees: int) -> None:
    phi = math.radians(degrees)
    pairs = couple(gaussian, kind="rotated", phi=phi)
    found = gradient_variance(standard(torch.eye(2)), *pairs, samples=MANY)
    wanted = optimal_field_on_rotated(phi)
    assert wanted == pytest.approx({60: (2, 8), 90: (4, 16), 120: (6, 24)}[degrees])
    # the squared norm of a plane's residual is exponential: a relative error of 1 / sqrt(n)
    assert found.loss == pytest.approx(wanted.loss, rel=0.01)
    assert found.per_parameter["theta"] == pytest.approx(wanted.variance, rel=0.01)
    assert found.variance == pytest.approx(sum(found.per_parameter.values()))


def test_independent_pairs_cost_as_much_as_a_right_angle(gaussian: Tensor) -> None:
    found = gradient_variance(standard(torch.eye(2)), gaussian, gaussian.flip(0), samples=MANY)
    wanted = optimal_field_on_independent()
    assert wanted == (4, 16) and wanted == pytest.approx(optimal_field_on_rotated(math.pi / 2))
    assert found.loss == pytest.approx(4, rel=0.01)
    assert found.per_parameter["theta"] == pytest.approx(16, rel=0.01)
    assert optimal_field_on_independent(6) == (12, 48)


@pytest.mark.parametrize(
    ("degrees", "loss", "variance"),
    [(60, 0.0060460, 0.0294560), (90, 0.0157080, 0.1028319), (120, 0.0362760, 0.4102079)],
)
def test_noise_costs_the_rotated_field(
    gaussian: Tensor, degrees: int, loss: float, variance: float
) -> None:
    phi = math.radians(degrees)
    wanted = rotated_field_on_rotated(phi, 0.05)
    assert wanted == pytest.approx((loss, variance), rel=1e-5)
    pairs = couple(gaussian, kind="rotated", phi=phi)
    field, path = standard(rotation(phi, 2)), NoisyLinear(0.05)
    found = gradient_variance(field, *pairs, path=path, samples=MANY)
    assert found.loss == pytest.approx(loss, rel=0.01)
    assert found.per_parameter["theta"] == pytest.approx(variance, rel=0.02)
    optimal = gradient_variance(standard(torch.eye(2)), gaussian, gaussian, path=path, samples=1000)
    assert optimal.loss < 1e-25 and optimal.variance < 1e-25
    assert rotated_field_on_rotated(phi, 0.1, 4).loss == pytest.approx(8 * loss, rel=1e-5)


def test_noise_costs_the_optimal_field_where_it_contracts(gaussian: Tensor) -> None:
    deviations = torch.tensor([0.5, 1.5], dtype=torch.float64)
    field = standard(torch.diag(deviations))
    found = gradient_variance(
        field, gaussian, gaussian * deviations, path=NoisyLinear(0.1), samples=100_000
    )
    assert found.loss == pytest.approx(optimal_field_noisy_loss(deviations, 0.1), rel=0.03)
    assert optimal_field_noisy_loss(torch.ones(3), 0.1) == 0


def test_closed_form_gradients_are_those_of_autograd() -> None:
    model = PairOptimal(normal(3, tag="theta"), 0.2 * normal(3, 3, tag="Theta"))
    x, t = normal(20, 3, tag="x"), NOISE.uniform(torch.empty(20, dtype=torch.float64))
    velocity = normal(20, 3, tag="v")
    losses, theta, Theta = model.gradients(x, t, velocity)
    for i in range(20):
        loss = (model(x[i : i + 1], t[i : i + 1]) - velocity[i]).square().sum()
        wanted = torch.autograd.grad(loss, [model.theta, model.Theta])
        assert abs(losses[i] - loss) < 1e-10
        assert (theta[i] - wanted[0]).abs().max() < 1e-10
        assert (Theta[i] - wanted[1]).abs().max() < 1e-10


# Gradient variance of networks


def network(dim: int = 3, seed: int = 0) -> MLP:
    net = MLP(shape=(dim,), width=8, depth=1, seed=seed).double()
    for name, value in net.named_parameters():
        value.data += 0.1 * NOISE.normal(value.data.flatten()[None], name)[0].reshape(value.shape)
    return net


def test_rows_and_batches_estimate_one_variance() -> None:
    z, y = normal(50, 3, tag="z"), normal(50, 3, tag="y")
    net = network()
    rows = gradient_variance(net, z, y, samples=2000)
    batches = gradient_variance(net, z, y, samples=1500, batch_size=10)
    assert (rows.batch_size, batches.batch_size, batches.samples) == (1, 10, 1500)
    # squared norms of gradients have a relative deviation of about 1 here: 1 / sqrt(150)
    assert batches.variance == pytest.approx(rows.variance, rel=0.33)
    assert batches.loss == pytest.approx(rows.loss, rel=0.12)
    assert rows.per_parameter.keys() == dict(net.named_parameters()).keys()
    # the closed form of the pair-optimal class, its rows by vmap and its batches
    model = PairOptimal(normal(3, tag="theta"), 0.2 * normal(3, 3, tag="Theta"))
    closed = gradient_variance(model, z, y, samples=2000)
    by_vmap = gradient_variance(_Wrapped(model), z, y, samples=2000)
    assert by_vmap.variance == pytest.approx(closed.variance, rel=1e-9)
    assert by_vmap.relative == pytest.approx(closed.relative, rel=1e-9)
    assert by_vmap.loss == pytest.approx(closed.loss, rel=1e-12)


class _Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.inner(x, t)


def test_loss_of_the_variance_is_that_of_the_objective() -> None:
    z, y = normal(64, 3, tag="z"), normal(64, 3, tag="y")
    net = network()
    found = gradient_variance(net, z, y, samples=64)
    rows = (NOISE_ROWS() * 64).long()
    loss = Matching(net, Linear())({"x": y[rows], "x1": z[rows]}, KeyedNoise(0))["loss"]
    assert found.loss == pytest.approx(3 * float(loss.detach()), rel=1e-12)


def NOISE_ROWS() -> Tensor:
    return KeyedNoise(0).uniform(torch.empty(64, dtype=torch.float64), "pair")


def test_variance_is_deterministic_and_leaves_the_network_alone() -> None:
    z, y = normal(10, 3, tag="z"), normal(10, 3, tag="y")
    net = network().train()
    first = gradient_variance(net, z, y, samples=100)
    assert net.training and all(p.grad is None for p in net.parameters())
    assert gradient_variance(net, z, y, samples=100) == first
    assert gradient_variance(net, z, y, samples=100, noise=KeyedNoise(1)) != first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": EmpiricalField(normal(4, 3), normal(4, 3), 0.1)}, "EmpiricalField"),
        ({"model": GaussianPairField(torch.zeros(3), torch.eye(3), 0.1)}, "interpolant_noise"),
        ({"model": nn.Identity()}, "no parameters"),
        ({"samples": 1}, "two batches"),
        ({"samples": 30, "batch_size": 20}, "two batches"),
        ({"x_target": normal(5, 3)}, "same number of rows"),
        ({"x_source": normal(4, 3) * math.nan}, "finite"),
    ],
)
def test_bad_input_of_the_variance(change: dict[str, Any], message: str) -> None:
    arguments = {"model": network(), "x_source": normal(4, 3), "x_target": normal(4, 3)} | change
    with pytest.raises((TypeError, ValueError), match=message):
        gradient_variance(**arguments)


# Counter-example 1 and the population minimiser (E5)

MEAN = torch.tensor([2.0, -1.0], dtype=torch.float64)
TURNED = -torch.eye(2, dtype=torch.float64)


@pytest.mark.parametrize("steps", [5, 7, 101])
def test_odd_steps_reproduce_the_turned_pairing(steps: int) -> None:
    z = normal(50, 2)
    end = transport(GaussianPairField(MEAN, TURNED), z, steps=steps)
    assert (end - (MEAN - z)).abs().max() < 1e-12


@pytest.mark.parametrize("steps", [2, 6, 100])
def test_even_steps_meet_the_singular_time(steps: int) -> None:
    with pytest.raises(ValueError, match=r"t = 0\.5.*odd number"):
        transport(GaussianPairField(MEAN, TURNED), normal(3, 2), steps=steps)
    times = torch.tensor([0.3, 0.5, 0.7], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"t = 0\.5"):
        GaussianPairField(MEAN, TURNED)(normal(3, 2), times)


@pytest.mark.parametrize(("noise", "slope"), [(0.05, 0.99969), (0.5, 0.99997)])
def test_any_noise_turns_the_flow_into_the_optimal_map(noise: float, slope: float) -> None:
    # the field is linear: Euler's method multiplies by 1 + h g(s), with g asked for at all times
    steps = 100_000
    s = torch.arange(steps, dtype=torch.float64) / steps
    field = GaussianPairField(MEAN, TURNED, noise)
    ahead = torch.tensor([1.0, 0.0], dtype=torch.float64)
    w = -field(ahead + s[:, None] * MEAN, 1 - s)
    assert (w[:, 1] - MEAN[1]).abs().max() < 1e-12
    assert (w - MEAN)[:, 0].div(steps).add(1).prod() == pytest.approx(slope, abs=1e-5)
    # and w itself, as it was derived for this case
    wanted = -2 * (1 - 2 * s) / ((1 - 2 * s) ** 2 + noise**2)
    assert (w[:, 0] - MEAN[0] - wanted).abs().max() < 1e-9


@pytest.mark.parametrize(("steps", "slope"), [(11, -0.479), (101, 0.730), (1001, 0.969)])
def test_long_steps_jump_over_the_layer(steps: int, slope: float) -> None:
    z = normal(4, 2)
    end = transport(GaussianPairField(MEAN, TURNED, 0.05), z, steps=steps)
    assert ((end - MEAN) / z).numpy() == pytest.approx(slope, abs=5e-4)


def test_noisy_field_minimises_the_noisy_loss() -> None:
    """By the normal equations: the residual is uncorrelated with x, at every time."""
    matrix = root(torch.tensor([[2.0, 0.5], [0.5, 0.7]])) @ rotation(2.0, 2)
    field = GaussianPairField(MEAN, matrix, 0.3)
    eye = torch.eye(2, dtype=torch.float64)
    for t in (0.1, 0.5, 0.9):
        s = 1 - t
        b = (1 - s) * eye + s * matrix
        # cov(w, x) = Theta B^T must equal the slope times cov(x) = B B^T + sigma^2 I
        slope = -(field(eye + s * MEAN, time(t)) + MEAN).T
        assert (slope @ (b @ b.T + 0.09 * eye) - field.change @ b.T).abs().max() < 1e-12


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_one_time_and_many_agree_and_dtype_stays(noise: float) -> None:
    field = GaussianPairField(MEAN, rotation(1.0, 2), noise)
    x, t = normal(5, 2), time(0.3)
    assert torch.allclose(field(x, t), field(x, t.expand(5)), atol=1e-13, rtol=0)
    assert field(x.float(), t.float()).dtype == torch.float32
    assert field(x[:, None], t).shape == (5, 1, 2)


# Finite pairs (E6, E7)


def test_one_pair_has_one_direction() -> None:
    z, y = normal(1, 3, tag="z"), normal(1, 3, tag="y")
    field = EmpiricalField(z, y, 0.1)
    for t in (0.0, 0.4, 1.0):
        velocity = field(10 * normal(6, 3), time(t))
        assert (velocity - (z - y)).abs().max() < 1e-12


def test_two_crossing_lines() -> None:
    z = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    y = -z
    crossing = torch.zeros(1, 2, dtype=torch.float64)
    field = EmpiricalField(z, y, 0.01)
    assert (field(crossing, time(0.5)) - (z - y).mean(0)).abs().max() < 1e-12
    # off the crossing the nearer line's direction, as the noise goes to 0
    off = torch.tensor([[0.0, 0.1], [0.0, -0.1]], dtype=torch.float64)
    assert (field(off, time(0.5)) - (z - y).mean(0)).norm() < 1e-12  # lines are at one point there
    near = EmpiricalField(z, y, 1e-3)(0.01 - 0.4 * z, time(0.3))
    assert (near - (z - y)).abs().max() < 1e-12


def naive(z: Tensor, y: Tensor, noise: float, x: Tensor, t: Tensor) -> Tensor:
    t = t.expand(len(x))[:, None, None]
    centres = (1 - t) * y + t * z
    p = (-(x[:, None] - centres).square().sum(2) / (2 * noise**2)).softmax(1)
    return p @ (z - y)


@pytest.mark.parametrize("memory", [2**28, 4000, 64 * 6])
def test_blocks_do_not_change_the_field(memory: int) -> None:
    z, y, x = normal(37, 6, tag="z"), 5 + normal(37, 6, tag="y"), 3 + normal(11, 6, tag="x")
    field = EmpiricalField(z.reshape(37, 2, 3), y.reshape(37, 2, 3), 0.7, memory=memory)
    times = NOISE.uniform(torch.empty(11, dtype=torch.float64))
    for t in (times, time(0.3), time(0.0), time(1.0)):
        wanted = naive(z, y, 0.7, x, t)
        assert (field(x.reshape(11, 2, 3), t).flatten(1) - wanted).abs().max() < 1e-11
    assert field(x.reshape(11, 2, 3).float(), time(0.5)).dtype == torch.float32


def test_far_from_every_line_weights_do_not_vanish() -> None:
    z, y = normal(5, 2, tag="z"), normal(5, 2, tag="y")
    velocity = EmpiricalField(z, y, 1e-3)(1e4 * normal(3, 2), time(0.5))
    gaps = (velocity[:, None] - (z - y)).norm(dim=2).amin(1)
    assert velocity.isfinite().all() and gaps.max() < 1e-9


def test_little_noise_returns_the_training_pairs() -> None:
    z, y = normal(20, 8, tag="z"), normal(20, 8, tag="y")
    end = transport(EmpiricalField(z, y, 1e-3), z, steps=200)
    assert (end - y).norm(dim=1).max() < 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interpolant_noise": 0.0}, "positive"),
        ({"interpolant_noise": -1.0}, "at least 0"),
        ({"x_target": normal(3, 2)}, "same number of rows"),
        ({"x_source": torch.zeros(4, 2, dtype=torch.int64)}, "floating"),
        ({"x_source": normal(4, 2) / 0}, "finite"),
        ({"memory": 100}, "memory"),
    ],
)
def test_bad_pairs_of_a_field(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x_source": normal(4, 2),
        "x_target": normal(4, 2),
        "interpolant_noise": 0.1,
    }
    with pytest.raises((TypeError, ValueError), match=message):
        EmpiricalField(**(arguments | change))


def test_bad_input_of_fields() -> None:
    with pytest.raises(ValueError, match="shapes"):
        GaussianPairField(torch.zeros(2), torch.eye(3))
    with pytest.raises(ValueError, match="finite"):
        GaussianPairField(torch.zeros(2), torch.eye(2) / 0)
    with pytest.raises(ValueError, match="interpolant_noise"):
        GaussianPairField(torch.zeros(2), torch.eye(2), -0.1)
    with pytest.raises(ValueError, match="2 numbers a row"):
        standard(torch.eye(2))(normal(4, 3), time(0.5))
    with pytest.raises(ValueError, match="shape"):
        EmpiricalField(normal(4, 2), normal(4, 2), 0.1)(normal(4, 3), time(0.5))
    with pytest.raises(ValueError, match="shapes"):
        PairOptimal(torch.zeros(2), torch.eye(3))
    with pytest.raises(ValueError, match="phi"):
        rotated_field_on_rotated(math.pi, 0.1)
    with pytest.raises(ValueError, match="dim"):
        optimal_field_on_rotated(1.0, 3)
    with pytest.raises(ValueError, match="deviations"):
        optimal_field_noisy_loss(torch.zeros(2), 0.1)


# Lemma 2 and the couplings (E8, E9)


@pytest.mark.parametrize("steps", [1, 4, 33])
def test_a_second_rectification_changes_nothing(steps: int) -> None:
    phi = math.radians(120)
    z, y = couple(normal(50, 4), kind="rotated", phi=phi)
    field = standard(rotation(phi, 4))
    again = couple(z, kind="reflow", field=field, steps=steps)[1]
    assert (again - y).abs().max() < 1e-10
    # which is far from the optimal map, the identity: |2 sin(phi / 2) z|
    assert (again - z).norm() == pytest.approx(2 * math.sin(phi / 2) * float(z.norm()))


def cost(pairs: tuple[Tensor, Tensor]) -> float:
    return float((pairs[0] - pairs[1]).square().sum())


def rows(x: Tensor) -> list[list[float]]:
    return sorted(x.flatten(1).tolist())


def test_the_assignment_is_optimal() -> None:
    z, y = normal(40, 3, tag="z"), normal(40, 3, tag="y")
    pairs = couple(z, y, "ot")
    assert pairs[0] is z and rows(pairs[1]) == rows(y)
    best = cost(pairs)
    for k in range(100):
        assert best <= cost(couple(z, y, "independent", noise=NOISE.at(k)))
    uniform = np.full(40, 1 / 40)
    wanted = 40 * ot.emd2(uniform, uniform, ot.dist(z.numpy(), y.numpy()))
    assert best == pytest.approx(wanted, rel=1e-6)


def test_shuffling_keeps_the_targets_and_is_done_once() -> None:
    z, y = normal(40, 2, 2, tag="z"), normal(40, 2, 2, tag="y")
    pairs = couple(z, y, "shuffled")
    assert rows(pairs[1]) == rows(y)
    assert torch.equal(pairs[1], couple(z, y, "shuffled")[1])
    assert not torch.equal(pairs[1], couple(z, y, "shuffled", noise=NOISE)[1])
    assert cost(pairs) > 1.3 * cost(couple(z, y, "ot"))


def test_rotation_keeps_mean_and_covariance_of_the_target() -> None:
    z = normal(500, 4)
    z = (z - z.mean(0)) @ torch.linalg.inv(root(z.T.cov(correction=0)))  # exactly white
    y = normal(500, 4, tag="y") @ normal(4, 4, tag="mix") + 3
    turned = couple(z, y, "rotated", phi=0.7)[1]
    assert torch.allclose(turned.mean(0), y.mean(0), atol=1e-12)
    assert torch.allclose(turned.T.cov(correction=0), y.T.cov(correction=0), atol=1e-10)


def test_large_sets_are_assigned_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs_module, "MOST", 16)
    z, y = normal(41, 2, tag="z"), normal(41, 2, tag="y")
    pairs = couple(z, y, "ot")
    assert rows(pairs[1]) == rows(y)
    assert cost(pairs) < cost((z, y))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "nearest"}, "kind must be one of ot"),
        ({"x_target": normal(5, 3)}, "same number of rows"),
        ({"x_target": None}, "x_target is missing"),
        ({"kind": "rotated"}, "phi is missing"),
        ({"kind": "rotated", "phi": 1.0}, "even, got 3"),
        ({"kind": "rotated", "phi": math.inf, "x_target": None}, "finite angle"),
        ({"kind": "reflow"}, "field is missing"),
        ({"x_source": normal(4, 3) * math.nan}, "finite"),
        ({"x_source": torch.zeros(4, 3, dtype=torch.uint8)}, "floating"),
        ({"x_source": normal(0, 3), "x_target": normal(0, 3)}, "needs rows"),
    ],
)
def test_bad_input_of_couplings(change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        couple(**({"x_source": normal(4, 3), "x_target": normal(4, 3)} | change))


# Interpolants


@pytest.mark.parametrize("interpolant", ["constant", "bridge"])
@pytest.mark.parametrize("target", ["plain", "interpolant"])
def test_interpolants(interpolant: Any, target: Any) -> None:
    z, y, t = normal(6, 2, tag="z"), normal(6, 2, tag="y"), torch.linspace(0.1, 0.9, 6).double()
    path = NoisyLinear(0.3, interpolant, target)
    eps = NOISE.normal(y, "interpolant")
    draw = path.sample(y, t, NOISE, z)
    if interpolant == "constant":
        level, rate = torch.full_like(t, 0.3), torch.zeros_like(t)
    else:
        level, rate = torch.func.jvp(
            lambda t: 0.3 * (t * (1 - t)).sqrt(), (t,), (torch.ones_like(t),)
        )
    middle = (1 - t)[:, None] * y + t[:, None] * z
    assert torch.allclose(draw.x, middle + level[:, None] * eps, atol=1e-14)
    wanted = z - y + (rate[:, None] * eps if target == "interpolant" else 0)
    assert torch.allclose(draw.target("velocity"), wanted, atol=1e-13)
    with pytest.raises(ValueError, match="velocity"):
        draw.target("clean")


def test_without_noise_the_path_is_linear() -> None:
    z, y, t = normal(6, 2, tag="z"), normal(6, 2, tag="y"), torch.linspace(0, 1, 6).double()
    draw, wanted = (path.sample(y, t, NOISE, z) for path in (NoisyLinear(0.0), Linear()))
    assert torch.equal(draw.x, wanted.x)
    assert torch.equal(draw.target("clean"), y)
    ends = NoisyLinear(0.3, "bridge", "interpolant").sample(y, t.round(), NOISE, z)
    assert torch.equal(ends.x, torch.where(t.round()[:, None] == 0, y, z))
    with pytest.raises(ValueError, match="train on"):
        NoisyLinear().posterior(y, y, t, t, NOISE)
    with pytest.raises(ValueError, match="train on"):
        NoisyLinear().transition(y, t, t, NOISE)
    for change in ({"interpolant_noise": -1}, {"interpolant": "x"}, {"target": "x"}):
        with pytest.raises(ValueError, match=next(iter(change))):
            NoisyLinear(**change)


# The protocol


def test_report_tells_memorised_from_optimal() -> None:
    """At 180 degrees: without noise the trained pairing, with it the optimal map."""
    z = normal(60, 2)
    pairs = z, MEAN - z, MEAN + z
    memorised = memorization_report(GaussianPairField(MEAN, TURNED), *pairs, steps=101)
    assert memorised.verdict == "memorised" and memorised.to_paired < 1e-12
    assert memorised.to_ot == pytest.approx(memorised.paired_to_ot)
    noisy = memorization_report(GaussianPairField(MEAN, TURNED, 0.05), *pairs, steps=1001)
    assert noisy.verdict == "not memorised"
    assert noisy.to_ot == pytest.approx(0.031 / 2 * noisy.paired_to_ot, rel=0.02)
    assert noisy.relative_noise == pytest.approx(0.05 * math.sqrt(2) / noisy.paired_to_ot)
    assert noisy.ratio == pytest.approx(noisy.to_paired / noisy.to_ot)
    assert str(noisy).startswith("not memorised: ")
    assert set(noisy.to_dict()) > {"to_paired", "to_ot", "ratio", "verdict"}


def test_report_warns_of_steps_that_jump_over_the_layer() -> None:
    z = normal(60, 2)
    field = GaussianPairField(MEAN, TURNED, 0.05)
    with pytest.warns(RuntimeWarning, match=r"layer of width 0\.04.*more than 21"):
        found = memorization_report(field, z, MEAN - z, MEAN + z, steps=11)
    assert found.verdict == "memorised"  # which is wrong, and what the warning is for
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memorization_report(field, z, MEAN - z, MEAN + z, steps=100)
    bridge = flow(0.05, interpolant="bridge").double()
    with pytest.warns(RuntimeWarning, match=r"layer of width 0\.02"):  # half as wide
        memorization_report(bridge, z, MEAN - z, MEAN + z, steps=30)
    same = memorization_report(field, z, MEAN + z, MEAN + z)
    assert same.verdict == "undecidable" and same.ratio == 1 and math.isnan(same.relative_noise)
    with pytest.raises(ValueError, match="same number of rows"):
        memorization_report(field, z, MEAN - z, z[:5])


@pytest.mark.parametrize("memory", [2**28, 64 * 12 * 3])
def test_closest_approach(memory: int) -> None:
    z, y = normal(12, 3, tag="z"), normal(12, 3, tag="y")
    t = torch.linspace(0, 1, 4001, dtype=torch.float64)[:, None, None]
    lines = (1 - t) * y + t * z
    gaps = torch.stack([(lines - lines[:, i : i + 1]).norm(dim=2).amin(0) for i in range(12)])
    gaps.fill_diagonal_(math.inf)
    found = closest_approach(z, y, memory=memory)
    # on a grid a gap is larger by less than the distance of half a step
    assert (found <= gaps.amin(1) + 1e-9).all() and (found > gaps.amin(1) - 2e-3).all()
    assert closest_approach(z, -z).max() < 1e-7  # every line goes through 0
    with pytest.raises(ValueError, match="two pairs"):
        closest_approach(z[:1], y[:1])


@pytest.mark.parametrize("dim", [3, 6])
def test_the_closest_approach_is_the_scale_of_the_noise(dim: int) -> None:
    z, y = normal(100, dim, tag="z"), normal(100, dim, tag="y")
    optimal, shuffled = (couple(z, y, kind)[1] for kind in ("ot", "shuffled"))
    gap = float(closest_approach(z, shuffled).median())
    low, high = (
        memorization_report(EmpiricalField(z, shuffled, factor * gap), z, shuffled, optimal)
        for factor in (0.25, 2.0)
    )
    assert low.ratio < 0.1 and high.ratio > 4 / 3


# The flow


def flow(noise: float = 0.0, **options: Any) -> PairedFlow:
    return PairedFlow(MLP(shape=(2,), width=32, depth=1), interpolant_noise=noise, **options)


PAIRS = normal(64, 2, dtype=torch.float32), 1 + normal(64, 2, tag="y", dtype=torch.float32)
QUICK: dict[str, Any] = {"batch_size": 64, "lr": 5e-3, "ema": 0.9, "progress": False}


def test_flow_learns_a_map_and_carries_new_rows() -> None:
    """x_0 = x_1 / 2 + 1: lines do not cross, and the map is all there is to learn."""
    z = normal(256, 2, dtype=torch.float32)
    model = flow(0.05).fit(z, z / 2 + 1, steps=200, **QUICK)
    new = normal(100, 2, tag="new", dtype=torch.float32)
    error = model.translate(new, steps=50) - (new / 2 + 1)
    assert error.norm(dim=1).mean() < 0.15  # 1.3 for a flow that stays where it is
    heun = model.translate(new, steps=10, sampler=Heun())
    assert (heun - (new / 2 + 1)).norm(dim=1).mean() < 0.15
    assert model.sample(3, noise=NOISE, steps=5).shape == (3, 2)


def test_fit_is_deterministic_and_depends_on_the_noise() -> None:
    def weights(**options: Any) -> list[Tensor]:
        model = flow(**options).fit(*PAIRS, steps=3, **QUICK)
        return [p.detach() for p in model.parameters()]

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    base = weights()
    assert same(base, weights())
    for options in (
        {"noise": 0.05},
        {"pairs": "independent"},
        {"pairs": "ot"},
        {"noise": 0.05, "interpolant": "bridge"},
    ):
        assert not same(base, weights(**options)), options
    bridge = flow(0.1, interpolant="bridge", target="interpolant")
    assert bridge.times == Uniform(1e-3, 1 - 1e-3) and flow().times == Uniform()


def test_translate_does_not_depend_on_batches() -> None:
    model = flow().fit(*PAIRS, steps=3, **QUICK)
    whole = model.translate(PAIRS[0], steps=3)
    parts = model.translate(PAIRS[0], steps=3, batch_size=10)
    assert torch.allclose(whole, parts, atol=1e-6)
    noise = KeyedNoise(4)
    assert torch.allclose(
        model.sample(6, noise=noise, steps=2)[4:],
        model.sample(2, noise=noise.rows(torch.tensor([4, 5])), steps=2),
        atol=1e-6,
    )


def test_labels_reach_the_network() -> None:
    net = MLP(shape=(2,), width=16, depth=1, num_classes=2)
    label = torch.arange(64) % 2
    target = torch.where(label[:, None] == 1, 2.0, -2.0).expand(64, 2)
    model = PairedFlow(net).fit(PAIRS[0], target, label, steps=100, **QUICK)
    ends = [model.translate(PAIRS[0][:20], steps=10, label=k).mean() for k in (0, 1)]
    assert ends[0] < -1 and ends[1] > 1
    found = gradient_variance(model, PAIRS[0], target, label=label, samples=50)
    assert math.isfinite(found.variance)


def test_save_and_load(tmp_path: Path) -> None:
    model = flow(0.07, interpolant="bridge", pairs="ot").fit(*PAIRS, steps=3, **QUICK)
    model.save(tmp_path / "m.safetensors")
    again = PairedFlow.load(tmp_path / "m.safetensors")
    assert again.path == model.path == NoisyLinear(0.07, "bridge")
    assert (again.pairs, again.shape, again.source) == ("ot", (2,), model.source)
    assert torch.equal(again.translate(PAIRS[0], steps=2), model.translate(PAIRS[0], steps=2))
    assert again.use == model.use.for_system("rectified-flow-memorization")
    assert isinstance(load(tmp_path / "m.safetensors"), PairedFlow)
    with pytest.raises(FileExistsError):
        model.save(tmp_path / "m.safetensors")
    weights, header = load_model(tmp_path / "m.safetensors")
    save_model(tmp_path / "other.safetensors", weights, {**header, "system": "meanflow"})
    with pytest.raises(ValueError, match="'meanflow'"):
        PairedFlow.load(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="do not fit"):
        PairedFlow.load(tmp_path / "m.safetensors", network=MLP(shape=(2,), width=8, depth=1))
    with pytest.raises(FileNotFoundError):
        PairedFlow.load(tmp_path / "missing")


def test_a_fit_is_resumed(tmp_path: Path) -> None:
    whole = flow(0.1).fit(*PAIRS, steps=6, **QUICK)
    options = {**QUICK, "out": tmp_path / "run", "schedule": "constant"}
    flow(0.1).fit(*PAIRS, steps=3, **options)
    resumed = flow(0.1).fit(*PAIRS, steps=6, **options)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="interpolant_noise was 0.1, is 0.2"):
        flow(0.2).fit(*PAIRS, steps=6, **options)


def test_sources_that_are_not_normal_are_not_sampled() -> None:
    model = flow().fit(5 + PAIRS[0], PAIRS[1], steps=1, **QUICK)
    with pytest.raises(ValueError, match=r"mean 5.*translate"):
        model.sample(2, noise=NOISE)
    assert model.fit(None, PAIRS[1], steps=1, **QUICK).sample(2, noise=NOISE).shape == (2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_source": PAIRS[0][:5]}, "same number of rows"),
        ({"x_source": PAIRS[0] * math.nan}, "finite"),
        ({"x_target": (255 * PAIRS[1]).to(torch.uint8)}, "floating"),
        ({"x_target": PAIRS[1].double(), "x_source": PAIRS[0].double()}, "float64"),
        ({"x_source": normal(4, 3), "x_target": normal(4, 3)}, "shape"),
        ({"label": torch.zeros(64)}, "label must be integers"),
        ({"steps": 0}, "steps"),
    ],
)
def test_bad_input_of_fit(change: dict[str, Any], message: str) -> None:
    arguments = {"x_source": PAIRS[0], "x_target": PAIRS[1], "steps": 1, **QUICK} | change
    with pytest.raises((TypeError, ValueError), match=message):
        flow().fit(**arguments)


def test_bad_input_of_the_flow() -> None:
    for options in ({"noise": -1.0}, {"pairs": "random"}, {"interpolant": "x"}, {"target": "x"}):
        with pytest.raises(ValueError, match="must be"):
            flow(**options)
    with pytest.raises(ValueError, match="network's"):
        flow(shape=(3,))
    with pytest.raises(ValueError, match="shape is unknown"):
        PairedFlow(nn.Linear(2, 2)).sample(1, noise=NOISE)
    with pytest.raises(ValueError, match="batch_size"):
        flow().translate(PAIRS[0], batch_size=0)
    with pytest.raises(ValueError, match="num"):
        flow().sample(0, noise=NOISE)
    with pytest.raises(ValueError, match="steps"):
        flow().translate(PAIRS[0], steps=0)
