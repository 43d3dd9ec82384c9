from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fluvial.adapters.tabulated import Tabulated
from fluvial.core.gaussian.fields import ends
from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.noise import KeyedNoise

NOISE = KeyedNoise(3)
BETAS = torch.linspace(1e-4, 0.02, 1000)
TABLE = (1 - BETAS).cumprod(0)
PATH = Tabulated(TABLE)
GRID = torch.linspace(0, 1, 457, dtype=torch.float64)


def entries(dtype: torch.dtype) -> Tensor:
    return (torch.arange(1000, dtype=dtype) + 1) / 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_at_the_entries(dtype: torch.dtype) -> None:
    """Also for times of float32, one a row, which miss the entries by rounding."""
    t = entries(dtype)
    assert torch.equal(PATH.timestep(t), torch.arange(1000, dtype=dtype))
    error = 1e-15 if dtype == torch.float64 else 1e-6
    assert (PATH.alpha(t).double() - TABLE.double().sqrt()).abs().max() < error
    assert (PATH.sigma(t).double() - (1 - TABLE.double()).sqrt()).abs().max() < error
    assert PATH.alpha(t).dtype == PATH.sigma(t).dtype == PATH.sigma_rate(t).dtype == dtype
    scales = PATH.marginal(t)
    assert torch.equal(scales[0].value, PATH.alpha(t))
    assert torch.equal(scales[1].value, PATH.sigma(t))
    one = t[436]
    assert torch.equal(PATH.alpha(one), PATH.alpha(t)[436]) and PATH.alpha(one).shape == ()


def test_ends() -> None:
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert PATH.alpha(t)[0] == 1 and PATH.sigma(t)[0] == 0
    assert PATH.alpha(t)[1] == pytest.approx(math.sqrt(TABLE[-1]), rel=1e-14)
    assert torch.equal(PATH.timestep(t), torch.tensor([0.0, 999.0]))
    assert PATH.timestep(torch.tensor(1e-4)) == 0
    assert PATH.timestep(torch.tensor(0.0125, dtype=torch.float64)) == 11.5


def test_angle_is_linear_between_entries() -> None:
    alpha, sigma = PATH.alpha(GRID), PATH.sigma(GRID)
    assert torch.allclose(alpha.square() + sigma.square(), torch.ones_like(GRID), atol=1e-15)
    a, b, middle = (torch.tensor(t, dtype=torch.float64) for t in (0.5, 0.501, 0.50025))
    angles = [torch.atan2(PATH.sigma(t), PATH.alpha(t)) for t in (a, b, middle)]
    assert angles[2] == pytest.approx(float(0.75 * angles[0] + 0.25 * angles[1]), abs=1e-15)
    assert bool((torch.atan2(sigma, alpha).diff() > 0).all())


def test_rates() -> None:
    """Central differences off the entries; from below at them, and from above at 0."""
    step = 1e-6
    t = GRID[1:-1]
    t = t[(t * 1000 - (t * 1000).round()).abs() > 0.01]
    for value, rate in ((PATH.alpha, PATH.alpha_rate), (PATH.sigma, PATH.sigma_rate)):
        slope = (value(t + step) - value(t - step)) / (2 * step)
        assert len(t) > 400 and torch.allclose(slope, rate(t), rtol=1e-6, atol=1e-9)
    at = entries(torch.float64)
    slope = (PATH.sigma(at) - PATH.sigma(at - step)) / step
    assert torch.allclose(slope, PATH.sigma_rate(at), rtol=1e-4)
    zero = torch.zeros((), dtype=torch.float64)
    assert PATH.sigma_rate(zero) == pytest.approx(1000 * math.asin(math.sqrt(1 - TABLE[0])))
    assert PATH.alpha_rate(zero) == 0
    _, derivative = torch.func.jvp(PATH.sigma, (at,), (torch.ones_like(at),))
    assert torch.allclose(derivative, PATH.sigma_rate(at), rtol=1e-9)
    one = at[500]  # whose numbers are those of Python where nothing is differentiated
    _, derivative = torch.func.jvp(PATH.sigma, (one,), (torch.ones_like(one),))
    assert derivative == pytest.approx(float(PATH.sigma_rate(one)), rel=1e-9)
    PATH.sigma(one.requires_grad_()).backward()
    assert one.grad == pytest.approx(float(derivative), rel=1e-9)


def test_a_velocity_is_a_v_prediction() -> None:
    clean, noise = (
        NOISE.normal(torch.empty(7, 2).double()),
        NOISE.normal(torch.empty(7, 2).double(), "b"),
    )
    t = torch.tensor([0.0, 0.001, 0.0305, 0.5, 0.7, 0.999, 1.0], dtype=torch.float64)
    alpha, sigma = PATH.alpha(t)[:, None], PATH.sigma(t)[:, None]
    x, v = alpha * clean + sigma * noise, alpha * noise - sigma * clean
    rate = PATH.angle_rate(t)[:, None]
    draw = PATH.sample(clean, t, NOISE, x1=noise)
    assert torch.allclose(draw.target("velocity"), rate * v, rtol=1e-10)
    found = ends("velocity", rate * v, x, t, PATH)
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(found, (clean, noise), strict=True))


def test_sde_is_that_of_the_formulas() -> None:
    t = GRID[1:-1]
    mine, theirs = PATH.sde(t), AlphaSigmaPath.sde(PATH, t)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a.value, b.value, rtol=1e-6)
    # over one timestep the variance is kept: alpha falls by sqrt(1 - beta)
    s, t = entries(torch.float64)[[400, 401]]
    rho, _ = PATH._correlation(t, s)
    assert (PATH.alpha(t) / PATH.alpha(s)).square() == pytest.approx(
        1 - float(BETAS[401]), abs=1e-6
    )
    assert 0 < rho < 1


def test_source_is_standard_noise() -> None:
    x = PATH.source(torch.empty(20_000, 2, dtype=torch.float64), NOISE)
    assert torch.equal(x, NOISE.normal(x, "source"))


def test_no_signal_at_the_end() -> None:
    path = Tabulated(torch.tensor([0.9, 0.5, 0.0]))
    one = torch.ones((), dtype=torch.float64)
    assert path.alpha(one) == 0 and path.sigma(one) == 1
    clean, noise = NOISE.normal(torch.empty(4, 2)), NOISE.normal(torch.empty(4, 2), "b")
    velocity = path.angle_rate(one) * -clean
    found = ends("velocity", velocity, noise, one, path)
    assert torch.allclose(found[0], clean) and torch.allclose(found[1], noise)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.zeros(0), r"shape \(T,\), got \(0,\)"),
        (torch.full((2, 2), 0.5), r"shape \(T,\), got \(2, 2\)"),
        (torch.tensor([1.0, 0.5]), "fall strictly"),
        (torch.tensor([0.5, 0.5]), "fall strictly"),
        (torch.tensor([0.5, -0.1]), "fall strictly"),
        (torch.tensor([0.5, math.nan]), "fall strictly"),
    ],
)
def test_bad_tables(table: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tabulated(table)
