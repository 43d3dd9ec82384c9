"""Likelihood under the flow, against densities that are known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from fluvial.adapters.tabulated import Tabulated
from fluvial.core.gaussian.fields import KINDS
from fluvial.core.gaussian.likelihood import bits_per_dimension, dequantise, log_likelihood
from fluvial.core.gaussian.paths import AlphaSigmaPath, Linear, VPCosine, VPLinear
from fluvial.core.noise import KeyedNoise
from fluvial.core.time import uniform_grid

from .toys import ALARM, BlockField, BlockGaussian, VectorGaussian

NOISE = KeyedNoise(3)
MEAN = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
STD = torch.tensor([0.6, 1.0, 1.7], dtype=torch.float64)
X = MEAN + STD * NOISE.normal(torch.empty(5, 3, dtype=torch.float64))
FIXED = uniform_grid(32, 0.0, 1.0)


def name(path: Any) -> str:
    return type(path).__name__ if isinstance(path, AlphaSigmaPath) else str(path)


def normal(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return torch.distributions.Normal(mean, std).log_prob(x).sum(-1)


def assert_close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("path", [Linear(), VPCosine()], ids=name)
@pytest.mark.parametrize("kind", KINDS)
def test_gaussian(path: AlphaSigmaPath, kind: str) -> None:
    toy, exact = VectorGaussian(path, MEAN, STD, kind), normal(X, MEAN, STD)
    with torch.no_grad():
        assert_close(log_likelihood(X, path, toy, tolerance=1e-6), exact, 1e-5)
        if kind in ("velocity", "clean"):  # others do not determine the velocity at t = 1
            assert_close(log_likelihood(X, path, toy, pairs=FIXED), exact, 1e-6)


def test_order_of_the_fixed_steps() -> None:
    path, exact = Linear(), normal(X, MEAN, STD)
    toy = VectorGaussian(path, MEAN, STD, "velocity")
    few, many = (
        float((log_likelihood(X, path, toy, pairs=uniform_grid(n, 0, 1)) - exact).abs().max())
        for n in (32, 64)
    )
    assert abs(math.log2(few / many) - 4) < 0.3


def test_from_a_later_start() -> None:
    """A variance-preserving path: the velocity diverges at 0, and the source is not quite p_1."""
    path, start = VPLinear(), 1e-3
    toy = VectorGaussian(path, MEAN, STD, "score")

    def source(x: Tensor) -> Tensor:
        mean, var = toy.moments(torch.ones((), dtype=torch.float64))
        return normal(x, mean, var.sqrt())

    mean, var = toy.moments(torch.tensor(start, dtype=torch.float64))
    exact = normal(X, mean, var.sqrt())
    assert_close(
        log_likelihood(X, path, toy, start=start, tolerance=1e-7, source=source), exact, 1e-6
    )
    plain = log_likelihood(X, path, toy, start=start, tolerance=1e-7)
    # alpha(1)^2 = 4e-5 is what the default source leaves out
    assert 1e-6 < (plain - exact).abs().max() < 0.05


def test_block_path() -> None:
    """Critically damped Langevin: position and momentum of each coordinate are one Gaussian."""
    path = BlockGaussian(beta=1.0, mass=0.5)
    mean = torch.tensor([1.0, 0.2], dtype=torch.float64)
    cov = torch.tensor([[0.5, 0.1], [0.1, 0.3]], dtype=torch.float64)
    field = BlockField(path, mean, cov)

    def density(x: Tensor, t: float) -> Tensor:
        law = torch.distributions.MultivariateNormal(
            *field.moments(torch.tensor(t, dtype=torch.float64))
        )
        return law.log_prob(x.mT).sum(1)

    x = mean[:, None] + 0.5 * NOISE.normal(torch.empty(3, 2, 2, dtype=torch.float64))
    pairs = uniform_grid(20, 0.1, 1.0)
    log_p = log_likelihood(x, path, field, pairs=pairs, source=lambda x: density(x, 1.0))
    assert_close(log_p, density(x, 0.1), 1e-6)


@dataclass(frozen=True)
class Mixture:
    """The field of sum_k w_k N(m_k, s_k^2 I) on a path: a mean of clean predictions."""

    path: AlphaSigmaPath
    weights: Tensor
    means: Tensor
    stds: Tensor
    predicts: str = "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        alpha, sigma = self.path.alpha(t), self.path.sigma(t)
        var = (alpha * self.stds).square() + sigma.square()
        gap = x[:, None] - alpha * self.means
        log = self.weights.log() - gap.square().sum(-1) / (2 * var) - x.shape[1] / 2 * var.log()
        guess = self.means + (alpha * self.stds.square() / var)[:, None] * gap
        return (log.softmax(1)[..., None] * guess).sum(1)


def test_mixture() -> None:
    weights, stds = torch.tensor([0.3, 0.7]).double(), torch.tensor([0.4, 0.7]).double()
    means = torch.tensor([[-1.0, 0.5], [1.0, 0.0]]).double()
    x = 1.5 * NOISE.normal(torch.empty(6, 2, dtype=torch.float64))
    parts = torch.stack([normal(x, m, s) for m, s in zip(means, stds, strict=True)], 1)
    exact = (parts + weights.log()).logsumexp(1)
    path = Linear()
    field = Mixture(path, weights, means, stds)
    assert_close(log_likelihood(x, path, field, tolerance=1e-7), exact, 1e-6)
    assert_close(log_likelihood(x, path, field, pairs=uniform_grid(50, 0, 1)), exact, 1e-6)


class Net(nn.Module):
    predicts = "velocity"

    def __init__(self) -> None:
        super().__init__()
        wide = torch.empty(6, 4, dtype=torch.float64)
        self.first = nn.Parameter(NOISE.normal(wide, "first") / 2)
        self.second = nn.Parameter(NOISE.normal(wide.T, "second").mT.T / 2)

    def forward(self, x: Tensor, t: Tensor, *, shift: float = 0.0) -> Tensor:
        x = torch.cat([x, t.to(x).expand(len(x), 1)], 1)
        return torch.tanh(x @ self.first.T + shift) @ self.second[:3].T


def test_network_against_the_determinant_of_its_flow() -> None:
    net, pairs = Net(), uniform_grid(20, 0.0, 1.0)

    def flow(x: Tensor) -> Tensor:
        for t, s in pairs:
            h, m = s - t, (s + t) / 2
            k1 = net(x, t, shift=0.3)
            k2 = net(x + h / 2 * k1, m, shift=0.3)
            k3 = net(x + h / 2 * k2, m, shift=0.3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + net(x + h * k3, s, shift=0.3))
        return x

    jacobians = torch.func.vmap(torch.func.jacrev(lambda x: flow(x[None])[0]))(X)
    exact = normal(flow(X), torch.zeros(3), torch.ones(3)) + torch.linalg.slogdet(jacobians)[1]
    assert_close(log_likelihood(X, Linear(), net, pairs=pairs, shift=0.3), exact, 1e-6)
    loss = -log_likelihood(X, Linear(), net, pairs=uniform_grid(1, 0, 1))
    loss.mean().backward()  # maximum likelihood can be trained
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


# Hutchinson's estimate


COV = torch.tensor([[1.0, 0.5, 0.2], [0.5, 0.8, -0.3], [0.2, -0.3, 0.6]], dtype=torch.float64)


@dataclass(frozen=True)
class Correlated:
    """Data N(0, COV) on the linear path, whose flow is x_1 = COV^(-1/2) x_0: the Jacobians of the
    velocity commute, and their integral over time is -log(COV) / 2."""

    predicts: str = "velocity"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        eye = torch.eye(3, dtype=torch.float64)
        matrix = ((t - 1) * COV + t * eye) @ torch.linalg.inv((1 - t) ** 2 * COV + t**2 * eye)
        return x @ matrix.to(x)


VALUES, VECTORS = torch.linalg.eigh(COV)
INTEGRAL = -0.5 * VECTORS @ torch.diag(VALUES.log()) @ VECTORS.T


def density_at_the_source(x: Tensor) -> Tensor:
    end = x @ VECTORS @ torch.diag(VALUES**-0.5) @ VECTORS.T
    return normal(end, torch.zeros(3), torch.ones(3))


@pytest.mark.parametrize("law", ["rademacher", "gaussian"])
@pytest.mark.parametrize("probes", [1, 2])
def test_estimate_is_a_quadratic_form_of_its_probes(law: Any, probes: int) -> None:
    x = NOISE.normal(torch.empty(7, 3, dtype=torch.float64), "x")
    out = log_likelihood(
        x, Linear(), Correlated(), noise=NOISE, probes=probes, law=law, pairs=FIXED
    )
    forms = []
    for i in range(probes):
        if law == "gaussian":
            z = NOISE.normal(x, f"probe {i}")
        else:
            z = torch.where(NOISE.uniform(x, f"probe {i}") < 0.5, -1.0, 1.0).double()
        forms.append((z @ INTEGRAL * z).sum(1))
    assert_close(out, density_at_the_source(x) + torch.stack(forms).mean(0), 1e-6)


@pytest.mark.parametrize("law", ["rademacher", "gaussian"])
def test_estimate_is_unbiased(law: Any) -> None:
    n = 4000
    x = torch.tensor([[0.3, -0.7, 0.4]], dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(torch.zeros(3).double(), COV).log_prob(x)
    assert_close(log_likelihood(x, Linear(), Correlated(), pairs=FIXED), exact, 1e-6)
    out = log_likelihood(
        x.expand(n, 3), Linear(), Correlated(), noise=NOISE, law=law, pairs=uniform_grid(12, 0, 1)
    )
    off = INTEGRAL - torch.diag(INTEGRAL.diagonal()) if law == "rademacher" else INTEGRAL
    variance = float(2 * off.square().sum())
    z = float(stats.norm.isf(ALARM / 4))
    assert abs(float(out.mean() - exact)) < z * math.sqrt(variance / n)
    # squares of quadratic forms have kurtosis up to 15
    assert abs(float(out.var()) / variance - 1) < z * math.sqrt(14 / n)


def test_rows_do_not_depend_on_their_batch() -> None:
    path = Linear()
    toy = VectorGaussian(path, MEAN, STD, "velocity")
    for options in ({"pairs": uniform_grid(4, 0, 1)}, {"tolerance": 1e-5}):
        whole = log_likelihood(X, path, toy, noise=NOISE, **options)  # type: ignore[arg-type]
        parts = [
            log_likelihood(X[rows], path, toy, noise=NOISE.rows(rows), **options)  # type: ignore
            for rows in (torch.tensor([0, 1]), torch.tensor([2, 3, 4]))
        ]
        assert_close(torch.cat(parts), whole, 1e-12 if "pairs" in options else 1e-3)


@pytest.mark.parametrize("pairs", [None, FIXED])
def test_dtype(pairs: Tensor | None) -> None:
    path = Linear()
    out = log_likelihood(X.float(), path, VectorGaussian(path, MEAN, STD, "velocity"), pairs=pairs)
    assert out.dtype == torch.float32 and out.shape == (5,)
    assert_close(out.double(), normal(X, MEAN, STD), 1e-4)


@pytest.mark.parametrize("pairs", [None, FIXED])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, pairs: Tensor | None) -> None:
    """Summed up in float32: what is lost is what the field's own rounding costs."""
    path, seen = Linear(), []

    class Seen(VectorGaussian):
        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:  # type: ignore[override]
            seen.append(x.dtype)
            return super().__call__(x, t)

    x = X.to(dtype)
    out = log_likelihood(x, path, Seen(path, MEAN, STD, "velocity"), pairs=pairs, tolerance=1e-2)
    assert set(seen) == {dtype} and out.dtype == torch.float32
    assert_close(out.double(), normal(x.double(), MEAN, STD), 20 * torch.finfo(dtype).eps)


def test_events_of_one_number() -> None:
    path = Linear()
    toy = VectorGaussian(path, MEAN[:1], STD[:1], "velocity")
    for pairs in (None, FIXED):
        for noise in (None, NOISE):
            out = log_likelihood(X[:, 0], path, toy, pairs=pairs, noise=noise)
            assert_close(out, normal(X[:, :1], MEAN[:1], STD[:1]), 1e-4)


def test_source_of_a_table() -> None:
    """The flow starts from what the path's source draws, N(0, I), where sigma(1) is less."""
    path = Tabulated(torch.tensor([0.3]))  # of one entry, and so without kinks
    toy = VectorGaussian(path, MEAN, STD, "velocity")
    with torch.no_grad():
        out = log_likelihood(X, path, toy, tolerance=1e-6)
    one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    points = toy.flow(torch.tensor([[0.0] * 3, [1.0] * 3]).double(), one, zero)  # affine
    assert_close(out, normal(X, points[0], points[1] - points[0]), 1e-4)


# Bits


def test_bits_per_dimension() -> None:
    """A uniform byte has 8 bits, whatever the units."""
    x = torch.empty(2, 3, 4, 4)
    for width in (1.0, 2 / 256, 1 / 127.5):
        log_p = torch.full((2,), -48 * math.log(256 * width))
        assert_close(bits_per_dimension(log_p, x, width), torch.full((2,), 8.0), 1e-6)
    log_p = torch.tensor([-40.0, 3.0])
    assert_close(bits_per_dimension(log_p, x, 2 / 256), -log_p / 48 / math.log(2) + 7, 1e-6)


def test_dequantise() -> None:
    n, width = 20_000, 1 / 127.5
    whole = torch.arange(n).remainder(256)[:, None]
    x = whole.double() * width - 1
    out = dequantise(x, NOISE, width)
    assert torch.equal(((out + 1) / width).round().long(), whole)
    inside = ((out - x) / width + 0.5).flatten().numpy()
    assert stats.kstest(inside, "uniform").pvalue > ALARM
    assert torch.equal(dequantise(x[3:5], NOISE.rows(torch.tensor([3, 4])), width), out[3:5])


# Bad input


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"x": X.clone().fill_(math.nan)}, "x must hold finite rows"),
        ({"x": X[:0]}, "x must hold finite rows"),
        ({"probes": 0}, "probes >= 1"),
        ({"law": "uniform"}, "rademacher"),
        ({"start": 1.0}, "start"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"pairs": uniform_grid(4)}, "pairs must rise to 1"),
        ({"pairs": uniform_grid(4, 0.0, 0.9)}, "pairs must rise to 1"),
        ({"pairs": torch.empty(0, 2)}, "pairs must have shape"),
        ({"field": VectorGaussian(Linear(), MEAN, STD, "drift")}, "kind must be one of"),
    ],
)
def test_bad_arguments(options: dict[str, Any], match: str) -> None:
    toy = VectorGaussian(Linear(), MEAN, STD)
    with pytest.raises(ValueError, match=match):
        log_likelihood(**{"x": X, "path": Linear(), "field": toy, **options})


def test_bad_types() -> None:
    with pytest.raises(TypeError, match="x must be floating"):
        log_likelihood(X.long(), Linear(), VectorGaussian(Linear(), MEAN, STD))
    for function in (
        lambda bin: dequantise(X, NOISE, bin),
        lambda bin: bits_per_dimension(X[:, 0], X, bin),
    ):
        for bin in (0.0, -1.0, math.nan, math.inf):
            with pytest.raises(ValueError, match="bin must be positive"):
                function(bin)
