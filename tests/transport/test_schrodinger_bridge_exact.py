"""Reference processes, Gaussian bridges in closed form, bridges on a grid, rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ot
import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.losses import Matching
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import uniform_grid
from fluvial.transport.schrodinger_bridge import (
    GaussianCoupling,
    GaussianField,
    Reference,
    coupling_kl,
    finite_state_rate_bound,
    gaussian_bridge,
    gaussian_imf,
    gaussian_ipf,
    grid_imf,
    grid_ipf,
    imf_rate_bound,
    scalar_imf,
    sinkhorn,
    transition_kernels,
    whole_kernel,
)
from fluvial.transport.schrodinger_bridge.gaussian import drift_matrix, spread

from ..core.toys import Constant

BROWNIAN = Reference(1.0)
REFERENCES = [BROWNIAN, Reference(0.7), Reference(1.3, 0.5), Reference(0.8, 3.0)]
IDS = ["brownian", "brownian 0.7", "ou 0.5", "ou 3"]


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


S0, S1 = f64([[2, 0.5], [0.5, 1]]), f64([[1, -0.3], [-0.3, 0.5]])
M0, M1 = f64([1, -1]), f64([-0.5, 2])
MARGINALS = GaussianCoupling.independent(M0, S0, M1, S1)
UNIT = GaussianCoupling.independent(f64([0]), f64([[1]]), f64([0]), f64([[1]]))
"""Two standard normal numbers."""


def derivative(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """Of (n, *any) values at (n,) times, each of which depends on its own time."""
    t = t.clone().requires_grad_()
    values = function(t)
    columns = values.reshape(len(t), -1).unbind(1)
    slopes = [torch.autograd.grad(column.sum(), t, retain_graph=True)[0] for column in columns]
    return torch.stack(slopes, 1).reshape(values.shape)


# Reference processes


def test_bridge_of_ornstein_and_uhlenbeck() -> None:
    reference, t, x = Reference(1.3, 0.5), f64([0.3]), f64([[0.2]])
    w0, w1, v = reference.weights(t)
    assert float(w0 * 0.7 - w1 * 0.4) == pytest.approx(0.3642473, abs=1e-6)
    assert float(v) == pytest.approx(0.3488327, abs=1e-6)
    # the drifts at x of the bridge from 0.7 to -0.4; the brief's backward one runs against time
    backward = reference.drift(x, _score(reference, x, f64([[0.7]]), t))
    forward = -reference.drift(x, _score(reference, x, f64([[-0.4]]), 1 - t))
    assert float(forward) == pytest.approx(-0.8572133, abs=1e-6)
    assert float(backward) == pytest.approx(-1.6529471, abs=1e-6)


def _score(reference: Reference, x: Tensor, end: Tensor, t: Tensor) -> Tensor:
    return -(x - reference.alpha(t) * end) / reference.sigma(t).square()


@pytest.mark.parametrize("reference", REFERENCES, ids=IDS)
def test_bridge_is_the_process_given_its_ends(reference: Reference) -> None:
    t, one = f64([0.1, 0.5, 0.9]), f64(1)
    scale, level = reference.alpha(t), reference.sigma(t)
    # (x_t, x_1) given x_0 are normal; condition on x_1
    later = reference.alpha(one - t)
    gain = level.square() * later / reference.sigma(one).square()
    w0, w1, v = reference.weights(t)
    assert torch.allclose(w1, gain, atol=1e-14)
    assert torch.allclose(w0, scale - gain * reference.alpha(one), atol=1e-14)
    assert torch.allclose(v, level.square() * (1 - gain * later), atol=1e-14)
    # and the noise over the rest of the way adds up
    rest = reference.sigma(one - t).square()
    assert torch.allclose(later.square() * level.square() + rest, reference.sigma(one).square())


@pytest.mark.parametrize("reference", REFERENCES, ids=IDS)
def test_draws_of_the_bridge(reference: Reference) -> None:
    x0, x1, t = f64([[1.0, -2]]).expand(3, 2), f64([[0.5, 3]]).expand(3, 2), f64([0.1, 0.5, 0.999])
    w0, w1, v = (w[:, None] for w in reference.weights(t))
    for z in (0.0, 1.5):
        draw = reference.sample(x0, t, Constant(z), x1)
        assert torch.allclose(draw.x, w0 * x0 + w1 * x1 + v.sqrt() * z, atol=1e-13)
        assert draw.x0 is x0 and draw.x1 is x1
        score = _score(reference, draw.x, x0, t[:, None])
        assert torch.allclose(draw.target("score"), score, rtol=1e-9)
        assert torch.allclose(draw.target("noise"), -reference.sigma(t)[:, None] * score)
        assert torch.equal(draw.target("clean"), x0)
        assert torch.allclose(draw.target("drift"), reference.drift(draw.x, score), rtol=1e-9)
        assert torch.allclose(reference.score(draw.x, draw.target("drift")), score, rtol=1e-9)


def test_targets_of_the_brownian_bridge() -> None:
    reference, t, z = Reference(1.7), f64([0.05, 0.4, 0.9]), 0.8
    x0, x1, s = f64([[1.0], [2], [-3]]), f64([[0.0], [5], [1]]), f64([0.05, 0.4, 0.9])[:, None]
    backward = reference.sample(x0, t, Constant(z), x1)
    assert torch.allclose(backward.target("drift"), (backward.x - x0) / s, atol=1e-12)
    against_time = x0 - x1 - 1.7 * ((1 - s) / s).sqrt() * z
    assert torch.allclose(-backward.target("drift"), against_time, atol=1e-12)
    forward = reference.sample(x1, 1 - t, Constant(z), x0)  # seen from the other end
    assert torch.allclose(forward.x, backward.x, atol=1e-14)
    assert torch.allclose(-forward.target("drift"), (x1 - forward.x) / (1 - s), atol=1e-12)
    ahead = x1 - x0 - 1.7 * (s / (1 - s)).sqrt() * z
    assert torch.allclose(-forward.target("drift"), ahead, atol=1e-12)


@pytest.mark.parametrize("reference", REFERENCES, ids=IDS)
def test_a_bridge_seen_from_its_other_end_is_a_bridge(reference: Reference) -> None:
    t = f64([0.2, 0.7])
    (w0, w1, v), (u0, u1, u) = reference.weights(t), reference.weights(1 - t)
    assert torch.allclose(w0, u1) and torch.allclose(w1, u0) and torch.allclose(v, u)
    exact = derivative(lambda t: torch.stack(reference.weights(t), 1), t)
    assert torch.allclose(torch.stack(reference.weight_rates(t), 1), exact, atol=1e-13)
    assert torch.allclose(reference.sigma_rate(t), derivative(reference.sigma, t))
    assert torch.allclose(reference.alpha_rate(t), derivative(reference.alpha, t))


@pytest.mark.parametrize("reference", REFERENCES, ids=IDS)
def test_posterior_goes_on_along_the_bridge(reference: Reference) -> None:
    x0, x1, t, s = f64([[1.0]]), f64([[-2.0]]), f64([0.8]), f64([0.3])
    mean = reference.sample(x0, t, Constant(0.0), x1).x
    onwards = reference.posterior(mean, x0, t, s, Constant(0.0))
    w0, w1, v = reference.weights(s)
    assert torch.allclose(onwards, w0 * x0 + w1 * x1, atol=1e-13)
    # what the noise at t and that between t and s add up to
    early = reference.weights(t)[2].sqrt()
    slope = reference.posterior(mean + early, x0, t, s, Constant(0.0)) - onwards
    fresh = reference.posterior(mean, x0, t, s, Constant(1.0)) - onwards
    assert torch.allclose(slope.square() + fresh.square(), v, atol=1e-13)


def test_a_slow_reversion_is_brownian_motion() -> None:
    slow, t = Reference(1.3, 1e-7), f64([0.2, 0.9])
    for one, other in zip(slow.weights(t), Reference(1.3).weights(t), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert slow.regularisation == pytest.approx(1.69, abs=1e-6)


def test_without_an_end_the_process_runs_free() -> None:
    reference, x0 = Reference(1.3, 0.5), torch.full((20_000, 2), 2.0, dtype=torch.float64)
    t, error = torch.full((20_000,), 0.4, dtype=torch.float64), 5 / math.sqrt(40_000)
    draw = reference.sample(x0, t, KeyedNoise(0))
    for x, time in ((draw.x, f64(0.4)), (draw.x1, f64(1))):
        z = (x - reference.alpha(time) * x0) / reference.sigma(time)
        assert abs(float(z.mean())) < error and abs(float(z.var()) - 1) < error * math.sqrt(2)
    gap = (draw.x1 - reference.alpha(f64(0.6)) * draw.x) / reference.sigma(f64(0.6))
    assert abs(float((gap * (draw.x - draw.x.mean())).mean())) < error


def test_bad_references() -> None:
    for diffusion, reversion in ((0, 0), (-1, 0), (math.nan, 0), (math.inf, 0)):
        with pytest.raises(ValueError, match="diffusion must be positive and finite, got"):
            Reference(diffusion, reversion)
    for reversion in (-1, 101, math.nan):
        with pytest.raises(ValueError, match=r"reversion must lie in \[0, 100\], got"):
            Reference(1, reversion)
    with pytest.raises(ValueError, match="x1 has shape"):
        BROWNIAN.sample(f64([[1.0]]), f64([0.5]), KeyedNoise(0), f64([[1.0, 2]]))
    with pytest.raises(TypeError, match="x0 must be floating"):
        BROWNIAN.sample(torch.ones(1, 2, dtype=torch.int64), f64([0.5]), KeyedNoise(0))
    draw = BROWNIAN.sample(f64([[1.0]]), f64([0.5]), KeyedNoise(0))
    with pytest.raises(ValueError, match=r"targets 'clean', .* got 'velocity'"):
        draw.target("velocity")


# Gaussians in closed form


def couplings(sigma2: float, iterations: int) -> tuple[list[float], list[float]]:
    reference = Reference(math.sqrt(sigma2))
    found = gaussian_imf(UNIT, reference, iterations)
    bridge = gaussian_bridge(UNIT, reference)
    return [float(one.cross) for one in found], [float(one.kl(bridge)) for one in found]


@pytest.mark.parametrize(
    ("sigma2", "values", "limit"),
    [
        (1, [0.54629302, 0.61114283, 0.61738508, 0.61797300, 0.61802826], 0.6180339887),
        (4, [0.21856059, 0.23479694, 0.23597584], 0.2360679775),
    ],
)
def test_iterations_of_unit_gaussians(sigma2: float, values: list[float], limit: float) -> None:
    found, _ = couplings(sigma2, len(values))
    assert found == pytest.approx([0, *values], abs=1e-7)
    reference = Reference(math.sqrt(sigma2))
    assert float(gaussian_bridge(UNIT, reference).cross) == pytest.approx(limit, abs=1e-9)
    c = 0.0
    for value in values:
        c = scalar_imf(c, 1, 1, reference)
        assert c == pytest.approx(value, abs=1e-8)


@pytest.mark.parametrize(
    ("sigma2", "values", "ratio"),
    [(1, [0.37743, 8.3567e-3, 8.4954e-5, 7.6093e-7], 0.008830),
     (4, [3.0346e-2, 1.7996e-4, 9.5583e-7], 0.005253)],
)  # fmt: skip
def test_divergences_of_unit_gaussians(sigma2: float, values: list[float], ratio: float) -> None:
    _, kls = couplings(sigma2, 6)
    assert kls[: len(values)] == pytest.approx(values, rel=1e-3)
    assert kls[6] / kls[5] == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize(
    ("sigma2", "slope"), [(0.25, 0.036555), (1, 0.093969), (4, 0.072477), (10, 0.026898)]
)
def test_slope_at_the_fixed_point(sigma2: float, slope: float) -> None:
    reference = Reference(math.sqrt(sigma2))
    fixed, step = float(gaussian_bridge(UNIT, reference).cross), 1e-5
    assert scalar_imf(fixed, 1, 1, reference) == pytest.approx(fixed, abs=1e-14)
    up, down = (scalar_imf(fixed + h, 1, 1, reference) for h in (step, -step))
    assert (up - down) / (2 * step) == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("c", [-0.8, 0.0, 0.9, math.sqrt(1.2) - 0.5 + 1e-9])
def test_the_scalar_map_in_all_its_cases(c: float) -> None:
    # D > 0, D < 0 and D near 0
    start = GaussianCoupling(f64([0.3]), f64([[2]]), f64([-1]), f64([[0.6]]), f64([[c]]))
    for diffusion in (0.3, 1.0, 3.0):
        exact = gaussian_imf(start, Reference(diffusion), 1, steps=2000)[1]
        wanted = scalar_imf(c, 2, 0.6, Reference(diffusion))
        assert float(exact.cross) == pytest.approx(wanted, abs=1e-8)


def test_the_bridge_of_two_matrices() -> None:
    bridge = gaussian_bridge(MARGINALS, BROWNIAN)
    wanted = f64([[0.95395385, -0.15642292], [0.08938453, 0.28356990]])
    assert torch.allclose(bridge.cross, wanted, atol=1e-7)


@pytest.mark.parametrize("reference", REFERENCES, ids=IDS)
def test_the_bridge_is_the_fixed_point_of_both(reference: Reference) -> None:
    bridge = gaussian_bridge(MARGINALS, reference)
    assert float((gaussian_imf(bridge, reference, 1)[1].cross - bridge.cross).abs().max()) < 1e-8
    # Markov and in the reciprocal class: its precision differs from the reference's on the ends
    # only, so the off-diagonal block of the inverse covariance is that of the reference
    cross = torch.linalg.inv(bridge.covariance)[:2, 2:]
    assert torch.allclose(cross, -torch.eye(2).double() / reference.regularisation, atol=1e-9)
    last = gaussian_ipf(MARGINALS, reference, 400)[-1]
    assert float(last.kl(bridge)) < 1e-12
    mirrored = gaussian_bridge(MARGINALS.mirrored, reference)
    assert torch.allclose(mirrored.cross, bridge.cross.mT, atol=1e-12)


@pytest.mark.parametrize("reference", REFERENCES, ids=IDS)
def test_imf_keeps_marginals_falls_and_does_not_know_directions(reference: Reference) -> None:
    bridge = gaussian_bridge(MARGINALS, reference)
    found = gaussian_imf(MARGINALS, reference, 6)
    kls = [float(one.kl(bridge)) for one in found]
    assert all(after < before for before, after in zip(kls, kls[1:], strict=False))
    for one, other in zip(found, gaussian_imf(MARGINALS.mirrored, reference, 6), strict=True):
        assert torch.equal(one.cov0, S0) and torch.equal(one.mean1, M1)
        assert torch.allclose(other.cross, one.cross.mT, atol=1e-8)


@pytest.mark.parametrize("reference", REFERENCES, ids=IDS)
def test_the_projection_has_the_marginals_of_the_bridges(reference: Reference) -> None:
    # d Cov(x_t) / dt = K Cov + Cov K^T + sigma^2 at every time, of any coupling
    coupling = GaussianCoupling(M0, S0, M1, S1, f64([[0.3, -0.2], [0.4, 0.1]]))
    t = f64([0.0, 0.2, 0.6, 1.0])
    rate = derivative(lambda t: spread(coupling, reference, t), t)
    half = drift_matrix(coupling, reference, t) @ spread(coupling, reference, t)
    noise = reference.diffusion**2 * torch.eye(2, dtype=torch.float64)
    assert torch.allclose(half + half.mT + noise, rate, atol=1e-12)
    assert torch.allclose(spread(coupling, reference, f64(1)), S1, atol=1e-12)


def test_the_integrator_has_order_four() -> None:
    exact = gaussian_imf(MARGINALS, BROWNIAN, 1, steps=640)[1].cross
    errors = [
        float((gaussian_imf(MARGINALS, BROWNIAN, 1, steps=n)[1].cross - exact).abs().max())
        for n in (20, 40, 80)
    ]
    for coarse, fine in zip(errors, errors[1:], strict=False):
        assert 3.7 < math.log2(coarse / fine) < 4.3


def test_rotations_contract_more_slowly() -> None:
    sigma2, d = 0.5, 2
    zero, unit = torch.zeros(d).double(), torch.eye(d).double()
    reference = Reference(math.sqrt(sigma2))
    bridge = gaussian_bridge(GaussianCoupling.independent(zero, unit, zero, unit), reference)
    c = float(bridge.cross[0, 0])
    turn = f64([[0, 1e-4], [-1e-4, 0]])
    start = GaussianCoupling(zero, unit, zero, unit, bridge.cross + turn)
    moved = gaussian_imf(start, reference, 2)
    rate = -2 * c * math.log(c) / sigma2
    for before, after in zip(moved, moved[1:], strict=False):
        left, right = (float(one.cross[0, 1]) for one in (before, after))
        assert right / left == pytest.approx(rate, rel=1e-4)
    kls = [float(one.kl(bridge)) for one in moved]
    assert kls[1] / kls[0] == pytest.approx(rate**2, rel=1e-4)
    assert rate > (scalar_imf(c + 1e-5, 1, 1, reference) - c) / 1e-5


def test_ipf_keeps_one_marginal_at_a_time() -> None:
    reference = Reference(0.8, 0.6)
    found = gaussian_ipf(MARGINALS, reference, 6)
    start = GaussianCoupling.from_reference(M0, S0, reference)
    assert torch.equal(found[0].cross, start.cross)
    assert torch.allclose(start.mean1, math.exp(-0.6) * M0)
    for k, one in enumerate(found):
        ours = (one.mean1, one.cov1, M1, S1) if k % 2 else (one.mean0, one.cov0, M0, S0)
        assert torch.allclose(ours[0], ours[2]) and torch.allclose(ours[1], ours[3])
        cross = torch.linalg.inv(one.covariance)[:2, 2:]
        assert torch.allclose(cross, -torch.eye(2).double() / reference.regularisation)
    bridge = gaussian_bridge(MARGINALS, reference)
    kls = [float(one.kl(bridge)) for one in found]
    assert all(after < before for before, after in zip(kls, kls[1:], strict=False))


def test_ipf_of_unit_gaussians_contracts_by_the_fourth_power() -> None:
    bridge = gaussian_bridge(UNIT, BROWNIAN)
    c = float(bridge.cross)
    gaps = [float(one.cross) - c for one in gaussian_ipf(UNIT, BROWNIAN, 12)][::2]
    assert gaps[6] / gaps[5] == pytest.approx(c**4, rel=1e-3)


def test_a_batch_is_its_problems() -> None:
    parts = (MARGINALS, MARGINALS.mirrored)
    names = ("mean0", "cov0", "mean1", "cov1", "cross")
    batch = GaussianCoupling(*(torch.stack([getattr(p, name) for p in parts]) for name in names))
    both = gaussian_imf(batch, BROWNIAN, 2)
    bridge = gaussian_bridge(batch, BROWNIAN)
    kls = both[2].kl(bridge)
    for k, part in enumerate(parts):
        one = gaussian_imf(part, BROWNIAN, 2)
        assert torch.allclose(both[2].cross[k], one[2].cross, atol=1e-14)
        wanted = one[2].kl(gaussian_bridge(part, BROWNIAN))
        assert float(kls[k]) == pytest.approx(float(wanted), rel=1e-9)
        last = gaussian_ipf(part, BROWNIAN, 3)[3].cross
        assert torch.allclose(gaussian_ipf(batch, BROWNIAN, 3)[3].cross[k], last)


def test_divergence_and_cost_of_couplings() -> None:
    bridge = gaussian_bridge(MARGINALS, BROWNIAN)
    other = gaussian_ipf(MARGINALS, BROWNIAN, 1)[1]
    normal = torch.distributions.MultivariateNormal
    one, two = (normal(c.mean, c.covariance) for c in (bridge, other))
    wanted = torch.distributions.kl_divergence(one, two)
    assert float(bridge.kl(other)) == pytest.approx(float(wanted), rel=1e-10)
    # a difference of 1e-9, whose divergence is 1e-18 and less than the rounding of its terms
    close = GaussianCoupling(M0, S0, M1, S1, bridge.cross + 1e-9 * f64([[0, 1], [0, 0]]))
    far = GaussianCoupling(M0, S0, M1, S1, bridge.cross + 1e-4 * f64([[0, 1], [0, 0]]))
    assert float(close.kl(bridge)) == pytest.approx(1e-10 * float(far.kl(bridge)), rel=1e-3)
    x0, x1 = bridge.sample(50_000, KeyedNoise(0))
    squares = (x0 - x1).square().sum(1)
    error = 5 * float(squares.std()) / math.sqrt(50_000)
    assert float(squares.mean()) == pytest.approx(float(bridge.cost), abs=error)


def test_bad_couplings() -> None:
    bad = f64([[1, 2], [2, 1]])
    for changes, message in (
        ({"cov0": bad}, "cov0 must be positive definite"),
        ({"cov1": f64([[1, 0.5], [0.4, 1]])}, "cov1 must be symmetric"),
        ({"cov1": f64([[1]])}, r"matrices \(\*batch, d, d\), got"),
        ({"mean1": f64([0, math.nan])}, "mean1 holds values that are not finite"),
        ({"cross": 9 * S0}, "cross is too large"),
    ):
        values = {"mean0": M0, "cov0": S0, "mean1": M1, "cov1": S1, "cross": 0 * S0, **changes}
        with pytest.raises(ValueError, match=message):
            GaussianCoupling(**values)
    with pytest.raises(TypeError, match="mean0 must be a floating tensor, got torch.int64"):
        GaussianCoupling.independent(torch.tensor([1, 2]), S0, M1, S1)
    with pytest.raises(ValueError, match="iterations >= 0"):
        gaussian_imf(MARGINALS, BROWNIAN, -1)
    with pytest.raises(ValueError, match="iterations >= 0"):
        gaussian_ipf(MARGINALS, BROWNIAN, -1)
    for c, reference, message in ((1.0, BROWNIAN, "c="), (0.0, Reference(1, 1), "Brownian")):
        with pytest.raises(ValueError, match=message):
            scalar_imf(c, 1, 1, reference)


# The exact field, its regression and its simulation


@pytest.mark.parametrize("reference", [BROWNIAN, Reference(1.3, 0.5)], ids=["brownian", "ou"])
@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_regression_of_bridges_returns_the_exact_drift(
    reference: Reference, direction: str
) -> None:
    coupling = GaussianCoupling(M0, S0, M1, S1, f64([[0.3, -0.2], [0.4, 0.1]]))
    coupling = coupling if direction == "backward" else coupling.mirrored
    num, t = 100_000, f64(0.35)
    x0, x1 = coupling.sample(num, KeyedNoise(1))
    draw = reference.sample(x0, t.expand(num), KeyedNoise(2), x1)
    ones = torch.cat([draw.x, torch.ones(num, 1).double()], 1)
    slopes = torch.linalg.lstsq(ones, draw.target("drift")).solution
    # seen from the other end the backward drift is the forward one, less its sign
    K = -drift_matrix(coupling.mirrored, reference, 1 - t)
    assert torch.allclose(slopes[:2].T, K, atol=0.02 * float(K.abs().max()))
    field = convert(GaussianField(coupling, reference), "score", reference)
    points = f64([[0.0, 0], [1, 0], [0, 1]])
    drift = reference.drift(points, field(points, t))
    assert torch.allclose(drift[1:] - drift[0], K.T, atol=1e-11)
    assert torch.allclose(drift[0], slopes[2], atol=0.05)
    w0, w1, _ = reference.weights(t)
    mean, rates = w0 * coupling.mean0 + w1 * coupling.mean1, reference.weight_rates(t)
    wanted = rates[0] * coupling.mean0 + rates[1] * coupling.mean1
    there = reference.drift(mean[None], field(mean[None], t))
    assert torch.allclose(there[0], wanted, atol=1e-12)


@dataclass(frozen=True)
class Impulse:
    """1 for row k at step k - 1, and 0 else: the response of a linear sampler to every draw."""

    step: int = -1

    def normal(self, like: Tensor, tag: str = "") -> Tensor:
        drawn = torch.zeros_like(like)
        drawn[self.step + 1] = 1
        return drawn

    uniform = categorical = normal

    def at(self, step: int) -> Impulse:
        return Impulse(step)

    def rows(self, ids: Tensor) -> Impulse:
        return self


def response(reference: Reference, coupling: GaussianCoupling, steps: int, sampler: Any) -> Tensor:
    """(steps + 1,): of the end to the start, and to the draw of each step."""
    start = torch.zeros(steps + 1, 1, dtype=torch.float64)
    start[0] = 1
    field = GaussianField(coupling, reference)
    return simulate(start, uniform_grid(steps), sampler, reference, field, Impulse())[:, 0]


@pytest.mark.parametrize(
    ("steps", "variance"), [(20, 1.0156), (50, 1.0062), (100, 1.0031), (1000, 1.0003)]
)
def test_bias_of_the_simulated_end(steps: int, variance: float) -> None:
    # the fixed point of IMF with simulated couplings: C <- the response to the start
    c = 0.618034
    coupling = GaussianCoupling(f64([0]), f64([[1]]), f64([0]), f64([[1]]), f64([[c]]))
    answer = response(BROWNIAN, coupling, steps, EulerMaruyama())
    assert float(answer[0]) == pytest.approx(c, abs=2e-6)
    assert float(answer.square().sum()) == pytest.approx(variance, abs=6e-5)


@pytest.mark.parametrize("sampler", [EulerMaruyama(), Ancestral()], ids=["euler", "ancestral"])
@pytest.mark.parametrize("reference", [BROWNIAN, Reference(1.3, 0.5)], ids=["brownian", "ou"])
def test_simulations_converge_to_the_bridge(reference: Reference, sampler: Any) -> None:
    marginals = GaussianCoupling.independent(f64([0]), f64([[2]]), f64([0]), f64([[0.6]]))
    for side in (marginals, marginals.mirrored):
        bridge = gaussian_bridge(side, reference)
        errors = []
        for steps in (40, 80, 160):
            answer = response(reference, bridge, steps, sampler)
            cross, end = answer[0] * bridge.cov1[0, 0], answer[1:].square().sum()
            total = answer[0].square() * bridge.cov1[0, 0] + end
            errors.append([float(cross - bridge.cross), float(total - bridge.cov0)])
        for k in range(2):
            error = [abs(row[k]) for row in errors]
            # order one; h log(1 / h) for the variance that Ancestral leaves out
            assert error[2] < 0.06
            assert error[0] < 1e-5 or 1.5 < error[0] / error[1] < 2.4


def test_matching_learns_the_drift_of_a_coupling_by_its_loss() -> None:
    # the exact field has the smallest loss of all near it, on a batch of the coupling
    coupling = gaussian_bridge(MARGINALS, BROWNIAN)
    x0, x1 = coupling.sample(4_000, KeyedNoise(3))
    exact = convert(GaussianField(coupling, BROWNIAN), "score", BROWNIAN)

    class Shifted(torch.nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = torch.nn.Parameter(f64(by))

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            return exact(x, t) * (1 + self.by)

    losses = {}
    for by in (-0.1, 0.0, 0.1):
        matching = Matching(Shifted(by), BROWNIAN, predicts="score", measure="noise")
        losses[by] = matching({"x": x0, "x1": x1}, KeyedNoise(4))["loss"].item()
    assert losses[0.0] < min(losses[-0.1], losses[0.1])


# A grid


def line() -> tuple[Tensor, Tensor, Tensor]:
    """The two marginals of the brief's check on 60 points."""
    x = torch.linspace(-3, 3, 60, dtype=torch.float64)
    p0 = torch.exp(-(x + 0.5).square() / 0.8)
    left, right = (torch.exp(-(x - m).square() / 0.3) for m in (-1.2, 1.0))
    p1 = left / left.sum() + right / right.sum()
    return x, p0 / p0.sum(), p1 / p1.sum()


def test_divergences_on_a_line() -> None:
    x, p0, p1 = line()
    kernels = transition_kernels(x, BROWNIAN, 20)
    bridge = sinkhorn(p0, p1, whole_kernel(kernels))
    found = grid_imf(p0, p1, kernels, 8)
    kls = [float(coupling_kl(one, bridge)) for one in found]
    assert kls[:5] == pytest.approx([0.227, 8.79e-3, 2.79e-4, 9.06e-6, 3.00e-7], rel=0.03)
    assert float((found[8] - bridge).abs().sum()) < 1e-6
    for one in found:
        assert float((one.sum(1) - p0).abs().max()) < 1e-12
        assert float((one.sum(0) - p1).abs().max()) < 1e-12


def test_one_step_projects_nothing() -> None:
    x, p0, p1 = line()
    start, after = grid_imf(p0, p1, transition_kernels(x, BROWNIAN, 1), 1)
    assert float((start - after).abs().max()) < 1e-12
    firsts = []
    for steps in (2, 4, 16):  # the more times between, the faster
        kernels = transition_kernels(x, BROWNIAN, steps)
        bridge = sinkhorn(p0, p1, whole_kernel(kernels))
        firsts.append(float(coupling_kl(grid_imf(p0, p1, kernels, 1)[1], bridge)))
    assert firsts[0] > firsts[1] > firsts[2]


def test_an_iteration_by_hand() -> None:
    # three states, two steps, kernels that differ: the sums written out
    p0, p1 = f64([0.5, 0.3, 0.2]), f64([0.2, 0.2, 0.6])
    kernels = torch.softmax(KeyedNoise(0).normal(torch.empty(2, 3, 3).double()), -1)
    pi, q = p0[:, None] * p1, kernels[0] @ kernels[1]
    law = torch.zeros(3, 3, 3).double()  # of (X_0, X_1, X_2)
    for i in range(3):
        for j in range(3):
            law[i, :, j] = pi[i, j] * kernels[0][i] * kernels[1][:, j] / q[i, j]
    first, second = law.sum(2), law.sum(0)
    first, second = first / first.sum(1, keepdim=True), second / second.sum(1, keepdim=True)
    wanted = p0[:, None] * (first @ second)
    assert torch.allclose(grid_imf(p0, p1, kernels, 1)[1], wanted, atol=1e-15)


def test_problems_in_front_are_solved_each() -> None:
    x, p0, p1 = line()
    kernels = torch.stack([transition_kernels(x, Reference(s), 6) for s in (1.0, 2.0)])
    bridges = sinkhorn(p0, p1, whole_kernel(kernels))
    found, fitted = grid_imf(p0, p1, kernels, 2), grid_ipf(p0, p1, whole_kernel(kernels), 3)
    kls = coupling_kl(found[2], bridges)
    for k in range(2):
        one = grid_imf(p0, p1, kernels[k], 2)[2]
        assert torch.allclose(found[2][k], one, atol=1e-16)
        bridge = sinkhorn(p0, p1, whole_kernel(kernels[k]))
        assert torch.allclose(bridges[k], bridge, atol=1e-13)
        assert float(kls[k]) == pytest.approx(float(coupling_kl(one, bridge)), rel=1e-6)
        assert torch.allclose(fitted[3][k], grid_ipf(p0, p1, whole_kernel(kernels[k]), 3)[3])


@pytest.mark.parametrize("reference", [BROWNIAN, Reference(1.3, 0.5)], ids=["brownian", "ou"])
def test_the_grid_knows_the_gaussian_bridge(reference: Reference) -> None:
    x = torch.linspace(-9, 9, 181, dtype=torch.float64)
    normal = [torch.exp(-(x - m).square() / (2 * v)) for m, v in ((1.0, 2.0), (-0.5, 0.6))]
    p0, p1 = (p / p.sum() for p in normal)
    plan = sinkhorn(p0, p1, transition_kernels(x, reference, 1)[0])
    cross = x @ plan @ x - (p0 @ x) * (p1 @ x)
    exact = GaussianCoupling.independent(f64([1]), f64([[2]]), f64([-0.5]), f64([[0.6]]))
    assert float(cross) == pytest.approx(float(gaussian_bridge(exact, reference).cross), abs=1e-4)


def test_sinkhorn_agrees_with_pot() -> None:
    x, p0, p1 = line()
    for diffusion in (0.4, 1.0):
        cost = (x[:, None] - x).square()
        kernel = torch.exp(-cost / (2 * diffusion**2))
        ours = sinkhorn(p0, p1, kernel)
        theirs = ot.sinkhorn(
            p0.numpy(),
            p1.numpy(),
            cost.numpy(),
            reg=2 * diffusion**2,
            method="sinkhorn_log",
            numItermax=10_000,
            stopThr=1e-12,
        )
        assert float((ours - torch.from_numpy(theirs)).abs().max()) < 1e-6


def test_ipf_is_sinkhorn_a_half_at_a_time() -> None:
    x, p0, p1 = line()
    kernel = transition_kernels(x, BROWNIAN, 1)[0]
    found = grid_ipf(p0, p1, kernel, 120)
    assert torch.allclose(found[0], p0[:, None] * kernel, atol=1e-15)
    for k, one in enumerate(found):
        side, wanted = (one.sum(0), p1) if k % 2 else (one.sum(1), p0)
        assert torch.allclose(side, wanted, atol=1e-14)
    bridge = sinkhorn(p0, p1, kernel)
    assert float(coupling_kl(found[-1], bridge)) < 1e-12
    kls = [float(coupling_kl(bridge, one)) for one in found[:12]]
    assert all(after < before for before, after in zip(kls, kls[1:], strict=False))


def test_a_symmetric_reference_knows_no_direction() -> None:
    # a circle, whose kernel is symmetric; two different marginals
    angle = torch.arange(24, dtype=torch.float64) * (2 * math.pi / 24)
    kernel = torch.softmax(3 * torch.cos(angle[:, None] - angle), -1)
    p0, p1 = (torch.softmax(torch.cos(angle - shift) * size, 0) for shift, size in ((0, 1), (2, 3)))
    forth = grid_imf(p0, p1, kernel.expand(5, -1, -1), 3)
    back = grid_imf(p1, p0, kernel.expand(5, -1, -1), 3)
    for one, other in zip(forth, back, strict=True):
        assert torch.allclose(one, other.T, atol=1e-15)


def test_states_without_mass() -> None:
    x, p0, p1 = line()
    p0, p1 = torch.where(x < 0, p0, 0), torch.where(x > -2, p1, 0)
    p0, p1 = p0 / p0.sum(), p1 / p1.sum()
    kernels = transition_kernels(x, BROWNIAN, 10)
    bridge = sinkhorn(p0, p1, whole_kernel(kernels))
    found = grid_imf(p0, p1, kernels, 6)
    kls = [float(coupling_kl(one, bridge)) for one in found]
    assert all(after < before for before, after in zip(kls, kls[1:], strict=False))
    assert kls[6] < 1e-6 and float((found[6].sum(1) - p0).abs().max()) < 1e-12
    # any coupling is a start, a deterministic one too
    order = torch.eye(60, dtype=torch.float64).flip(0) / 60
    even = torch.full((60,), 1 / 60, dtype=torch.float64)
    away, bridge = transition_kernels(x, Reference(2.0), 10), None
    bridge = sinkhorn(even, even, whole_kernel(away))
    found = grid_imf(even, even, away, 5, coupling=order)
    assert float(coupling_kl(found[5], bridge)) < 1e-6


def test_divergence_of_couplings_keeps_its_digits() -> None:
    q = torch.full((2, 2), 0.25, dtype=torch.float64)
    for size in (0.1, 1e-3, 1e-6, 1e-9):
        p = q * (1 + size * f64([[1, -1], [-1, 1]]))
        exact = 0.5 * ((1 + size) * math.log1p(size) + (1 - size) * math.log1p(-size))
        exact = size**2 / 2 if size < 1e-4 else exact
        assert float(coupling_kl(p, q)) == pytest.approx(exact, rel=1e-6)
    corner = f64([[1.0, 0], [0, 0]])
    assert float(coupling_kl(corner, q)) == pytest.approx(math.log(4))
    assert float(coupling_kl(q, corner)) == math.inf
    assert float(coupling_kl(corner, corner)) == 0


def test_bad_input_on_a_grid() -> None:
    x, p0, p1 = line()
    kernels = transition_kernels(x, BROWNIAN, 2)
    for arguments, message in (
        ((2 * p0, p1, kernels), "p0 must sum to 1, got 2"),
        ((p0, -p1, kernels), "p1 must be finite and at least 0"),
        ((p0[1:] / p0[1:].sum(), p1, kernels), r"p0 and p1 must have shape \(m,\)"),
        ((p0, p1, 2 * kernels), "rows that sum to 1"),
        ((p0, p1, kernels[0]), r"kernels must have shape \(\*batch, K, m, m\)"),
    ):
        with pytest.raises(ValueError, match=message):
            grid_imf(*arguments, 1)
    with pytest.raises(TypeError, match="p0 must be a floating tensor, got list"):
        grid_imf([0.5, 0.5], p1, kernels, 1)
    for call in (lambda: grid_imf(p0, p1, kernels, -1), lambda: grid_ipf(p0, p1, kernels[0], -1)):
        with pytest.raises(ValueError, match="iterations must be at least 0"):
            call()
    with pytest.raises(ValueError, match="coupling must have the marginals"):
        grid_imf(p0, p1, kernels, 1, coupling=p1[:, None] * p0)
    with pytest.raises(ValueError, match="coupling must have shape"):
        grid_imf(p0, p1, kernels, 1, coupling=p0)
    # states that the reference does not join
    far = transition_kernels(100 * x, BROWNIAN, 2)
    with pytest.raises(ValueError, match="below 1e-300, between states that the coupling joins"):
        grid_imf(p0, p1, far, 1)
    apart = torch.block_diag(*2 * [torch.full((30, 30), 1 / 30, dtype=torch.float64)])
    left = (torch.arange(60) < 30).double() / 30
    with pytest.raises(ValueError, match="kernel must be positive between the states"):
        sinkhorn(left, left.flip(0), apart)
    with pytest.raises(RuntimeError, match="misses its marginal by .* after 2 cycles"):
        sinkhorn(p0, p1, kernels[0], most=2)
    with pytest.raises(ValueError, match="tolerance > 0"):
        sinkhorn(p0, p1, kernels[0], tolerance=0)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        transition_kernels(x, BROWNIAN, 0)
    with pytest.raises(ValueError, match="points must be finite"):
        transition_kernels(f64([[[1.0]]]), BROWNIAN, 1)


# Rates


@pytest.mark.parametrize(("sigma2", "bound"), [(1, 1.386294), (4, 0.446287), (10, 0.190620)])
def test_bound_of_two_unit_gaussians(sigma2: float, bound: float) -> None:
    reference = Reference(math.sqrt(sigma2))
    assert imf_rate_bound(1, 1, reference) == pytest.approx(bound, abs=1e-6)
    _, kls = couplings(sigma2, 5)
    assert all(after / before <= bound for before, after in zip(kls, kls[1:], strict=False))
    assert imf_rate_bound(1, 1, Reference(math.sqrt(1.5415))) == pytest.approx(1, abs=1e-4)


def test_bound_holds_for_gaussians_of_any_shape_and_start() -> None:
    noise, tightest = KeyedNoise(5), math.inf
    for k in range(12):
        parts = noise.at(k).normal(torch.empty(3, 3, 3).double())
        cov0, cov1 = (part @ part.T / 3 + 0.2 * torch.eye(3).double() for part in parts[:2])
        roots = [torch.linalg.cholesky(cov) for cov in (cov0, cov1)]
        turn = torch.linalg.qr(parts[2]).Q
        mean = torch.zeros(3).double()
        start = GaussianCoupling(mean, cov0, mean, cov1, 0.9 * roots[0] @ turn @ roots[1].T)
        reference = Reference(0.7 + 0.2 * k)
        convex = [1 / float(torch.linalg.eigvalsh(cov)[-1]) for cov in (cov0, cov1)]
        bound, bridge = imf_rate_bound(*convex, reference), gaussian_bridge(start, reference)
        kls = [float(one.kl(bridge)) for one in gaussian_imf(start, reference, 3)]
        for before, after in zip(kls, kls[1:], strict=False):
            assert after <= bound * before
        tightest = min(tightest, bound * kls[0] / kls[1])
    assert tightest < 50  # the check is not of an empty bound


def test_bound_of_finite_spaces() -> None:
    p0, p1, kernel = f64([0.5, 0.5]), f64([0.4, 0.6]), f64([[0.7, 0.3], [0.4, 0.6]])
    kernels = kernel.expand(2, -1, -1)
    bound = finite_state_rate_bound(p0, p1, kernels)
    assert bound == pytest.approx(1 - (0.3**3 * 0.5 * 0.4) ** 3 / 4, abs=1e-15) and bound < 1
    bridge = sinkhorn(p0, p1, whole_kernel(kernels))
    kls = [float(coupling_kl(one, bridge)) for one in grid_imf(p0, p1, kernels, 4)]
    assert all(kl <= bound ** (n - 1) * kls[0] for n, kl in enumerate(kls) if n)


def test_bad_rates() -> None:
    with pytest.raises(ValueError, match="convexity1 must be positive, got 0"):
        imf_rate_bound(1, 0, BROWNIAN)
    with pytest.raises(ValueError, match="must be a Brownian motion"):
        imf_rate_bound(1, 1, Reference(1, 1))
    with pytest.raises(ValueError, match=r"kernels must have shape \(K, m, m\), got \(2, 2\)"):
        finite_state_rate_bound(f64([0.5, 0.5]), f64([0.5, 0.5]), torch.full((2, 2), 0.5))
    with pytest.raises(ValueError, match="must be positive, got"):
        finite_state_rate_bound(f64([1, 0]), f64([0.5, 0.5]), torch.full((1, 2, 2), 0.5))
