"""The system-embedded bridge against closed forms, its class, files and command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import fluvial
from fluvial.cli import main
from fluvial.core.gaussian.fields import predicted
from fluvial.core.gaussian.paths import AlphaSigmaPath, Linear
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.operators.base import check_operator
from fluvial.core.operators.blur import Blur, gaussian_kernel
from fluvial.core.operators.dense import Dense, dense
from fluvial.core.operators.diagonal import Mask, random_mask
from fluvial.core.operators.downsample import AveragePool, Bicubic
from fluvial.core.operators.fourier import SubsampledFourier, columns_mask
from fluvial.core.operators.radon import Radon
from fluvial.core.protocols import Run, Steering
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import uniform_grid
from fluvial.data.format import Format
from fluvial.inverse.system_embedded_bridge import (
    SB,
    VE,
    VP,
    EmbeddedPath,
    Regression,
    ReverseEuler,
    ScalarBridge,
    Schedule,
    SystemEmbeddedBridge,
    Task,
    backwards,
    ddnm,
    perturb,
    pigdm,
)
from fluvial.inverse.system_embedded_bridge.process import span
from fluvial.inverse.system_embedded_bridge.recipe import Recipe
from fluvial.inverse.system_embedded_bridge.schedules import schedule
from fluvial.inverse.system_embedded_bridge.tasks import Name
from fluvial.networks import MLP, UNet
from fluvial.training.files import read_header, save_model

NOISE = KeyedNoise(0)
MRI = SB(0.5, 2.0)
IMAGE = (1, 8, 8)


def number(value: Any) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, check_dtype=False)


class Drawn:
    """Noise whose draws are given: by (step, tag) a tensor; else 0."""

    def __init__(self, values: dict[tuple[int | None, str], Tensor], step: int | None = None):
        self.values, self.step = values, step

    def normal(self, like: Tensor, tag: str = "") -> Tensor:
        return self.values.get((self.step, tag), torch.zeros_like(like))

    uniform = categorical = normal

    def at(self, step: int) -> Drawn:
        return Drawn(self.values, step)

    def rows(self, ids: Tensor) -> Drawn:
        return self


class Zero:
    """The operator that measures nothing."""

    def A(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 1)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return y.new_zeros(len(y), *IMAGE)

    A_dagger = A_adjoint


def operators(shape: tuple[int, ...] = IMAGE) -> dict[str, Any]:
    size = math.prod(shape)
    return {
        "mask": Mask(random_mask(torch.empty(1, *shape), 0.5, NOISE)),
        "pool": AveragePool((2, 2), shape),
        "bicubic": Bicubic(2, shape),
        "fourier": SubsampledFourier(columns_mask(shape[-2:], torch.tensor([[0, 1, 3]])), shape),
        "blur": Blur(gaussian_kernel(1.0)[:, 1:-1, 1:-1], shape),
        "dense": Dense(NOISE.normal(torch.empty(5, size).double(), "dense"), shape),
        "radon": dense(Radon(torch.linspace(0, 3, 5), shape), shape, cutoff=1e-2),
    }


# Check 1: the operators


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_have_projectors(dtype: torch.dtype) -> None:
    like = torch.empty(3, *IMAGE, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for operator in operators().values():
        check_operator(operator, like, tolerance)
        x = NOISE.normal(like)
        once = operator.A_dagger(operator.A(x))
        assert_close(operator.A_dagger(operator.A(once)), once, 10 * tolerance)


def test_pooling_as_the_brief_has_it() -> None:
    pool = AveragePool((2, 2), IMAGE)
    y = NOISE.normal(torch.empty(2, 1, 4, 4).double())
    assert_close(pool.A_dagger(y), 4 * pool.A_adjoint(y))
    units = torch.eye(16).double().reshape(16, 1, 4, 4)
    back = pool.A_dagger(units).flatten(1)
    cov = (back.mT @ back).reshape(8, 8, 8, 8)
    for i in range(8):
        for j in range(8):
            block = torch.zeros(8, 8).double()
            block[i // 2 * 2 : i // 2 * 2 + 2, j // 2 * 2 : j // 2 * 2 + 2] = 1
            assert_close(cov[i, j], block)


# Checks 2 and 6: the schedules


def test_schedules_values() -> None:
    t = number([0.25, 0.5, 0.75])
    want = {
        "alpha": [0.79934211, 0.5, 0.20065789],
        "beta": [0.12697882, 0.19791667, 0.12697882],
        "gamma": [0.20065789, 0.5, 0.79934211],
    }
    for name, values in want.items():
        assert_close(getattr(MRI, name)(t), number(values), 1e-8)
    assert_close(MRI.alpha_rate(t[:2]), number([-0.98684211, -1.42105263]), 1e-8)
    assert MRI.total == pytest.approx(0.79166667, abs=1e-8)
    assert float(SB().beta(number(0.5))) == pytest.approx(3.0625e-4, abs=1e-12)
    assert float(SB().alpha(number(0.25))) == pytest.approx(0.89923469, abs=1e-8)
    with pytest.raises(ValueError, match="schedule must be one of sb, vp, ve, got 'edm'"):
        schedule("edm")
    assert schedule("sb", beta_min=0.5, beta_max=2.0) == MRI
    assert schedule(**MRI.as_json()) == MRI and schedule(**VE().as_json()) == VE()


@pytest.mark.parametrize("path", [MRI, SB(), VP(), VE()], ids=["MRI", "SB", "VP", "VE"])
def test_schedules_rates_and_ends(path: Schedule) -> None:
    t, h = torch.linspace(0.03, 0.97, 40, dtype=torch.float64), 1e-6
    for name in ("alpha", "beta", "gamma", "sigma"):
        value, rate = getattr(path, name), getattr(path, f"{name}_rate")
        slope = (value(t + h) - value(t - h)) / (2 * h)
        assert float((slope - rate(t)).abs().amax() / rate(t).abs().amax().clamp(min=1)) < 1e-6
    inside = path.inside
    assert_close(inside.sigma(t).square(), path.gamma(t))
    ends = number([0.0, 1.0])
    assert_close(path.gamma(ends), number([0.0, 1.0]))
    assert float(path.alpha(ends)[0]) == 1 and float(path.beta(ends)[0]) == 0
    assert float(path.alpha(ends)[1]) == (1 if isinstance(path, VE) else 0)
    assert path.singular == (not isinstance(path, VE))
    # F and G are those of the marginals: G^2 = beta' - 2 beta alpha' / alpha, in the range gamma'
    drift, spread = (scale.value for scale in path.sde(t))
    assert_close(drift, path.alpha_rate(t) / path.alpha(t), 1e-9)
    wanted = path.beta_rate(t) - 2 * path.beta(t) * drift
    assert_close(spread.square(), wanted, 1e-9)
    assert_close(inside.sde(t)[1].value.square(), path.gamma_rate(t))
    assert_close(spread.square(), AlphaSigmaPath.sde(path, t)[1].value.square(), 1e-9)
    if isinstance(path, SB):
        assert_close(path.alpha(t), 1 - path.gamma(t))
        assert_close(spread.square(), path.b(t))
        s, rest = path.clock(t)
        assert_close(s + rest, torch.full_like(t, path.total))
    if isinstance(path, VP):
        assert_close(spread.square(), 1 / (1 - t), 1e-9)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: SB(0.0), "beta_min must be positive and finite, got 0.0"),
        (lambda: SB(1e-4, -1.0), "beta_max must be positive and finite, got -1.0"),
        (lambda: SB(math.nan), "beta_min must be positive"),
        (lambda: VE(0.0), "variance must be positive and finite, got 0.0"),
    ],
)
def test_bad_schedules(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


# The process


@pytest.mark.parametrize("path", [MRI, VP(), VE()], ids=["SB", "VP", "VE"])
@pytest.mark.parametrize("consistent", [True, False])
def test_draws_have_the_law_of_the_process(path: Schedule, consistent: bool) -> None:
    """x_t is linear in its noises: their images under `perturb` give the exact covariance."""
    operator = Dense(NOISE.normal(torch.empty(5, 8).double(), "dense"), (1, 2, 4))
    std, t = number([[0.3, 0.1, 0.2, 0.5, 0.4]]), 0.6
    size, seen = 8, 5
    x0 = NOISE.normal(torch.empty(1, 1, 2, 4).double(), "x0")

    def run(tag: str, count: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        units = torch.eye(count).double().reshape(count, *shape)
        noise = Drawn({(None, tag): units})
        x, c, _ = perturb(
            path, operator, std, x0.expand(count, -1, -1, -1), number(t), noise,
            consistent=consistent,
        )  # fmt: skip
        x_mean, c_mean, _ = perturb(
            path, operator, std, x0, number(t), Drawn({}), consistent=consistent
        )
        return (x - x_mean).flatten(1), (c - c_mean).flatten(1)

    both, fresh, null = (
        run(tag, count, shape)
        for tag, count, shape in (
            ("measurement", seen, (seen,)),
            ("range", seen, (seen,)),
            ("null", size, (1, 2, 4)),
        )
    )
    cov = sum(one[0].mT @ one[0] for one in (both, fresh, null))
    p = operator.project(torch.eye(size).double().reshape(size, 1, 2, 4)).flatten(1)
    back = operator.A_dagger(torch.diag(std[0])).flatten(1)
    gamma, beta = float(path.gamma(number(t))), float(path.beta(number(t)))
    whole = gamma * back.mT @ back + beta * (torch.eye(size).double() - p)
    assert_close(cov, whole, 1e-10)
    # and with A^+ y: the bridge's correlation, or none
    cross = both[0].mT @ both[1]
    assert_close(cross, (gamma if consistent else 0.0) * back.mT @ back, 1e-10)
    # the law of the path itself, whose own draws they agree with
    embedded = EmbeddedPath.of(path, operator, std)
    scale, level = embedded.marginal(number(t))
    mean = perturb(path, operator, std, x0, number(t), Drawn({}), consistent=consistent)[0]
    assert_close(mean, scale @ x0, 1e-10)
    units = torch.eye(size).double().reshape(size, 1, 2, 4)
    one = level @ embedded.white(units, Drawn({(None, "source"): units}), "source")
    n = torch.eye(seen).double()
    two = level @ embedded.white(
        torch.zeros(seen, 1, 2, 4).double(), Drawn({(None, "source of the measurement"): n}),
        "source",
    )  # fmt: skip
    law = one.flatten(1).mT @ one.flatten(1) + two.flatten(1).mT @ two.flatten(1)
    assert_close(law, whole, 1e-10)


def test_noise_in_the_range_is_that_of_the_measurement() -> None:
    """Pitfall 7: after pooling, every pixel of a block gets the same."""
    pool = AveragePool((2, 2), IMAGE)
    path = EmbeddedPath.of(VP(), pool, 0.1)
    white = path.white(torch.empty(2, *IMAGE).double(), NOISE, "x")
    seen = pool.project(white)
    assert_close(seen[..., ::2, ::2], seen[..., 1::2, 1::2])
    many = path.white(torch.empty(4_000, *IMAGE).double(), NOISE, "y")
    std = float(pool.project(many).std())
    assert std == pytest.approx(0.1, rel=5 / math.sqrt(2 * 16 * 4_000))  # 5 standard errors


def test_pixel_variance_of_a_half_spectrum() -> None:
    """Check 8, in the orthonormal convention: (HW)^2 / HW times the variance unnormalised."""
    columns = torch.arange(5)[None]
    fourier = SubsampledFourier(columns_mask((8, 8), columns), IMAGE)
    units = torch.eye(80).double().reshape(80, 1, 40, 2)
    variance = fourier.A_dagger(units).square().sum((0, 1)) / 64
    assert_close(variance, torch.full((8, 8), (4 * 8 * 3 + 16) / 64**2).double())
    assert float(variance[0, 0]) == pytest.approx(0.0273438, abs=1e-7)


# Check 4 and 5: a Gaussian posterior, by the impulse response of the sampler itself

PRIOR = number([[1.0, 0.8], [0.8, 1.0]])
SEES_FIRST = Dense(number([[1.0, 0.0]]))


class Exact:
    """E[x_0 | x_t] of the Gaussian prior."""

    predicts = "clean"

    def __init__(self, path: EmbeddedPath) -> None:
        self.path = path

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        scale, cov = self.path.moments(t)
        # the range is the first coordinate; S = .25 multiplies its variance
        h, c = torch.diag(scale.values), torch.diag(cov.values * number([0.25, 1.0]))
        gain = PRIOR @ h @ torch.linalg.pinv(h @ PRIOR @ h + c, hermitian=True)
        return x @ gain.mT


def posterior(path: Schedule, steps: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the sampler, with y = 1 and y's noise of variance .25.

    Row 0 is the mean. Each other row has y = 0 and one unit of noise, in one direction of one step
    or of the start; the covariance is the sum of squares of what becomes of them.
    """
    embedded = EmbeddedPath.of(path, SEES_FIRST, 0.5)
    method = options.get("method", "ancestral")
    tag = {"ancestral": "posterior", "sde": "euler-maruyama"}[method]
    rows = 1 + 2 * (steps + 1)
    y = torch.zeros(rows, 1, dtype=torch.float64)
    y[0] = 1
    values: dict[tuple[int | None, str], Tensor] = {}
    for k in range(-1, steps):
        first = 1 + 2 * (k + 1)
        null, seen = torch.zeros(rows, 2).double(), torch.zeros(rows, 1).double()
        null[first, 1] = 1
        seen[first + 1, 0] = 1
        step, name = (None, "source") if k < 0 else (k, tag)
        values[step, name], values[step, f"{name} of the measurement"] = null, seen
    x = backwards(embedded, Exact(embedded), y, Drawn(values), steps=steps, **options)
    return x[0], x[1:].mT @ x[1:]


def test_gaussian_posterior_by_the_reverse_sde() -> None:
    want = {
        MRI: ((0.80017, 0.63836), (0.19884, 0.15908, 0.48699), 1e-2),
        VP(): ((0.80067, 0.63846), (0.19820, 0.15870, 0.48661), 1e-2),
        VE(): ((0.79898, 0.63689), (0.19979, 0.15992, 0.44349), 1e-5),
    }
    for path, (mean, cov, early) in want.items():
        found, spread = posterior(path, 1_000, method="sde", t_max=1 - early, t_min=1e-5)
        assert_close(found, number(mean), 1e-4)
        assert_close(spread[[0, 0, 1], [0, 1, 1]], number(cov), 1e-4)


class Official(EulerMaruyama):
    """The published drift: beta' / beta in both blocks."""

    def step(self, x: Tensor, memory: Any, run: Run) -> Any:
        path: Any = run.path
        schedule, t, h = path.outside, run.t, float(run.t - run.s)
        drift = float(schedule.alpha_rate(t) / schedule.alpha(t))
        one = float(schedule.beta_rate(t) / schedule.beta(t))
        scale, _ = path.moments(t)
        clean = predicted(x, run).clean
        r = scale @ clean - x
        q = x - path.operator.project(x)
        other = r - path.operator.project(r)
        return x + h * (-drift * q + one * r - 2 * drift * other), memory, clean


def test_the_official_drift_diverges_and_ours_does_not() -> None:
    """Pitfall 1. With the published drift the posterior mean .8 becomes 1.86 for e1 = .01."""
    path = EmbeddedPath.of(MRI, SEES_FIRST, 0.5)
    pairs, start = uniform_grid(1_000, 1 - 1e-2, 1e-5), number([[1.0, 0.0]])
    wrong = simulate(start, pairs, Official(), path, Exact(path), Drawn({}))
    assert float(wrong[0, 0]) == pytest.approx(1.86, abs=0.005)
    for early in (1e-2, 1e-5):
        options: dict[str, Any] = {"steps": 250, "method": "sde", "t_max": 1 - early}
        right = backwards(path, Exact(path), number([[1.0]]), Drawn({}), **options)
        assert float(right[0, 0]) == pytest.approx(0.8, abs=5e-3)


def test_gaussian_posterior_by_ancestral_steps() -> None:
    exact = number([[0.2, 0.16], [0.16, 0.488]])
    for path in (MRI, SB(), VP()):
        for steps in (1, 7, 100):
            mean, _ = posterior(path, steps)
            assert_close(mean, number([0.8, 0.64]))
    _, cov = posterior(MRI, 100)
    assert_close(cov[[0, 0, 1], [0, 1, 1]], number([0.18989, 0.15490, 0.46058]), 1e-5)
    errors = [float((posterior(MRI, n)[1] - exact).norm()) for n in (25, 50, 100, 200)]
    orders = [math.log2(a / b) for a, b in zip(errors, errors[1:], strict=False)]
    # the measured order rises to one: .64, .74, .81 (and .85 at 400)
    assert orders == sorted(orders) and 0.78 < orders[-1] < 1.0


def test_the_flow_has_the_marginals() -> None:
    """Of x at t = 1 from the process itself, the flow makes the prior again; it is order one."""
    path = EmbeddedPath.of(VE(4.0), SEES_FIRST, 0.5)
    scale, cov = path.moments(number(1.0))
    h, c = torch.diag(scale.values), torch.diag(cov.values * number([0.25, 1.0]))
    start, errors = torch.linalg.cholesky(h @ PRIOR @ h + c), []
    for steps in (50, 100, 200):
        pairs = uniform_grid(steps, 1.0, 1e-6)
        flow = ReverseEuler(0.0, 1e-6)
        x = simulate(start.mT.clone(), pairs, flow, path, Exact(path), Drawn({}))
        errors.append(float((x.mT @ x - PRIOR).norm()))
    assert errors[-1] < 0.02
    orders = [math.log2(a / b) for a, b in zip(errors, errors[1:], strict=False)]
    assert orders == pytest.approx([1.0, 1.0], abs=0.15)


def test_steps_are_those_of_the_core() -> None:
    """`EulerMaruyama` on the same path, with the same noise in it, takes the same steps."""
    x, clean = (NOISE.normal(torch.empty(3, *IMAGE).double(), tag) for tag in "ab")
    pairs = uniform_grid(4, 0.9, 0.1)
    for operator in operators().values():
        for std in (0.0, 0.1):
            for schedule_ in (MRI, VP(), VE()):
                path = EmbeddedPath.of(schedule_, operator, std)
                for a in (0.0, 1.0):
                    ours = simulate(x, pairs, ReverseEuler(a, -1.0), path, Fixed(clean), NOISE)
                    core = simulate(x, pairs, EulerMaruyama(a), path, Fixed(clean), NOISE)
                    assert_close(ours, core, 1e-8)


# Check 3: without noise the range stays


@pytest.mark.parametrize("path", [SB(), VP(), VE()], ids=["SB", "VP", "VE"])
def test_the_range_is_never_touched_without_noise(path: Schedule) -> None:
    x0 = NOISE.normal(torch.empty(2, *IMAGE).double(), "x0")
    for operator in operators().values():
        y = operator.A(x0)
        for t in (0.0, 0.3, 0.999, 1.0):
            x, c, seen = perturb(path, operator, 0.0, x0, number(t), NOISE)
            assert_close(operator.A_dagger(operator.A(x)), c, 1e-9)
            assert_close(c, operator.A_dagger(y), 1e-12)
            assert_close(seen, y)
            if operator.pseudo_inverse == "exact":  # else A x leaves out what A^+ does
                assert_close(operator.A(x), y, 1e-9)
        embedded = EmbeddedPath.of(path, operator)

        class Copies:
            predicts = "clean"

            def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
                free = 0.3 * x.flip(0)
                return free + c - operator.A_dagger(operator.A(free))  # noqa: B023

        watch = Watch()
        for method in ("ancestral", "sde", "ode"):
            end = backwards(embedded, Copies(), y, NOISE, steps=5, method=method, steer=watch)
            for state in (*watch.states, end):
                seen = operator.A_dagger(operator.A(state))
                assert_close(seen, c, 1e-6)


class Watch(Steering):
    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def after(self, x: Any, clean: Any, aim: Any, run: Run) -> Any:
        self.states.append(x)
        return x, aim, None


# Check 7: no measurement, and a whole one


def test_nothing_measured_is_plain_diffusion() -> None:
    x0 = NOISE.normal(torch.empty(3, *IMAGE).double(), "x0")
    clean = NOISE.normal(x0, "clean")
    embedded, t, s = EmbeddedPath.of(VP(), Zero(), 0.1), number(0.7), number(0.4)
    plain = VP()
    assert_close(embedded.sample(x0, t, NOISE).x, plain.sample(x0, t, NOISE).x)
    ours = embedded.posterior(x0, clean, t, s, NOISE)
    assert_close(ours, plain.posterior(x0, clean, t, s, NOISE))
    assert_close(
        embedded.posterior(x0, clean, number(1.0), s, NOISE),
        plain.posterior(x0, clean, number(1.0), s, NOISE),
    )
    x = perturb(plain, Zero(), 0.1, x0, t, NOISE)[0]
    assert_close(x, math.sqrt(0.3) * x0 + math.sqrt(0.7) * NOISE.normal(x0, "null"))
    run = simulate(x0, uniform_grid(3), Ancestral(), plain, Fixed(clean), NOISE)
    assert_close(simulate(x0, uniform_grid(3), Ancestral(), embedded, Fixed(clean), NOISE), run)
    pairs = uniform_grid(3, 0.9, 0.1)
    for sampler in (EulerMaruyama(), EulerMaruyama(0.0)):
        assert_close(
            simulate(x0, pairs, sampler, embedded, Fixed(clean), NOISE),
            simulate(x0, pairs, sampler, plain, Fixed(clean), NOISE),
            1e-10,
        )


def test_all_measured_is_denoising() -> None:
    whole = Mask(torch.ones(1, *IMAGE, dtype=torch.bool))
    x0 = NOISE.normal(torch.empty(3, *IMAGE).double(), "x0")
    x, c, y = perturb(VP(), whole, 0.2, x0, number(0.36), NOISE, consistent=False)
    assert_close(x, x0 + 0.6 * 0.2 * NOISE.normal(x0, "range"))
    assert_close(c, y)
    assert_close(y, x0 + 0.2 * NOISE.normal(x0, "measurement"))
    end, _, y = perturb(VP(), whole, 0.2, x0, number(1.0), NOISE)
    assert_close(end, y)


class Fixed:
    predicts = "clean"

    def __init__(self, clean: Tensor) -> None:
        self.clean = clean

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return self.clean


def test_rows_have_operators_and_times_of_their_own() -> None:
    x0 = NOISE.normal(torch.empty(4, *IMAGE).double(), "x0")
    seen = random_mask(x0, 0.4, NOISE)
    t = number([0.0, 0.3, 0.9, 1.0])
    both = perturb(MRI, Mask(seen), 0.1, x0, t, NOISE)
    for row in range(4):
        alone = NOISE.rows(torch.tensor([row]))
        one = perturb(MRI, Mask(seen[row : row + 1]), 0.1, x0[row : row + 1], t[row], alone)
        for a, b in zip(one, both, strict=True):
            assert_close(a[0], b[row])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "heun"}, "method must be one of ancestral, sde, ode, got 'heun'"),
        ({"t_max": 1.5}, "need 0 <= t_min < t_max <= 1, got t_min=0.0 and t_max=1.5"),
        ({"t_min": 1.0}, "need 0 <= t_min < t_max <= 1"),
        ({"method": "sde", "t_max": 1.0}, "t_max must be below 1 for method 'sde', as alpha of VP"),
    ],
)
def test_bad_spans(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        span(**{"method": "ancestral", "t_max": None, "t_min": None, **options}, schedule=VP())
    assert span("sde", VE(), 1.0, None) == (1.0, 1e-5)


# The class


class Linear1(nn.Module):
    """A network of a class that is not the library's, for events of any size."""

    def __init__(self, channels: int = 2) -> None:
        super().__init__()
        self.mix = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.mix(x) * (1 + t[:, None, None, None])


def unet(seed: int = 0, channels: int = 1, size: int = 8) -> UNet:
    network = UNet(
        size=size, channels=2 * channels, width=8, multipliers=(1, 2), blocks=1, seed=seed
    )
    noise = KeyedNoise(seed)
    for name, value in network.named_parameters():  # those that start at 0 too
        value.data += 0.05 * noise.normal(value.detach()[None], name)[0]
    return network


FORMAT = Format("images", IMAGE)
PICTURES = (NOISE.uniform(torch.empty(12, *IMAGE), "pictures") * 255).round().to(torch.uint8)
POOL = AveragePool((2, 2), IMAGE)
TINY: dict[str, Any] = {"steps": 2, "batch_size": 4, "progress": False, "ema": 0.5}


def trained(**options: Any) -> SystemEmbeddedBridge:
    model = SystemEmbeddedBridge(unet(), format=FORMAT, steps=4, **options)
    return model.fit(PICTURES, POOL, obs_noise=0.1, validation=PICTURES[:3], **TINY)


@pytest.mark.slow
def test_a_trained_model_has_the_posterior() -> None:
    """Of the Gaussian prior, by squared error: within what training and sampling leave."""
    x0 = NOISE.normal(torch.empty(4_000, 2), "x0") @ torch.linalg.cholesky(PRIOR).float().mT
    network = MLP(shape=(4,), width=48, depth=1, ratio=2.0)
    model = SystemEmbeddedBridge(network, "vp", loss="squared")
    model.fit(
        x0, SEES_FIRST, obs_noise=0.5, steps=500, batch_size=192, lr=4e-3, schedule="cosine",
        ema=0.98, progress=False,
    )  # fmt: skip
    draws = model.restore(torch.ones(2_000, 1), SEES_FIRST, steps=30, batch_size=2_000)
    exact = posterior(VP(), 30)[1].float()
    # a standard error is .015 of the mean, .015 of a variance of .49; the rest is the network's
    torch.testing.assert_close(draws.mean(0), torch.tensor([0.8, 0.64]), atol=0.1, rtol=0)
    torch.testing.assert_close(draws.mT.cov(), exact, atol=0.1, rtol=0)


def test_restored_pictures() -> None:
    model = trained()
    y = model.measure(PICTURES)
    assert (y.shape, y.dtype) == ((12, 1, 4, 4), torch.float32)
    x = model.restore(y)
    assert (x.shape, x.dtype) == (PICTURES.shape, torch.uint8)
    assert torch.equal(x, model.restore(y, POOL, obs_noise=0.1, steps=4, noise=KeyedNoise(0)))
    assert not torch.equal(x, model.restore(y, noise=KeyedNoise(1)))
    # in other batches but for rounding
    near = (model.restore(y, batch_size=5).int() - x.int()).abs()
    assert int(near.amax()) <= 1
    # small pictures, and one of them
    small = (y.clamp(-1, 1) * 127.5 + 127.5).round().to(torch.uint8)
    whole = model.restore(small)
    alone = model.restore(small[0])
    assert alone.shape == IMAGE and int((alone.int() - whole[0].int()).abs().amax()) <= 1
    for method in ("sde", "ode"):
        other = model.restore(y, method=method, steps=8)
        assert (other.shape, other.dtype) == (PICTURES.shape, torch.uint8)


def test_without_noise_what_is_measured_stays() -> None:
    x0 = FORMAT.encode(PICTURES)
    model = SystemEmbeddedBridge(unet(), VP(), steps=5)
    for operator in operators().values():
        y = operator.A(x0)
        x = model.restore(y, operator)
        assert float((operator.A_dagger(operator.A(x) - y)).norm() / y.norm()) < 1e-5
        if operator.pseudo_inverse == "exact":
            assert float((operator.A(x) - y).norm() / y.norm()) < 1e-6
        loose = model.restore(y, operator, keep=False)
        assert float((operator.A_dagger(operator.A(loose) - y)).norm() / y.norm()) > 1e-2


def test_other_systems_than_that_of_the_training() -> None:
    model = trained()
    x0 = PICTURES[:3]
    # masks that differ by row, at test and in training
    seen = random_mask(torch.empty(3, *IMAGE), 0.5, NOISE)
    x = model.restore(model.measure(x0, Mask(seen), obs_noise=0.0), Mask(seen), obs_noise=0.0)
    assert torch.equal(x[seen], x0[seen])
    # a larger picture, of a height that the network's factor does not divide
    large = AveragePool((3, 3), (1, 9, 15))
    image = model.restore(torch.zeros(2, 1, 3, 5), large, steps=2)
    assert image.shape == (2, 1, 9, 15)

    def masks(like: Tensor, noise: Any) -> Mask:
        return Mask(random_mask(like, 0.3, noise))

    model = SystemEmbeddedBridge(unet(), format=FORMAT, steps=2).fit(PICTURES, masks, **TINY)
    with pytest.raises(ValueError, match="that of the training differs from batch to batch"):
        model.restore(torch.zeros(1, *IMAGE))
    assert model.restore(torch.zeros(3, *IMAGE), Mask(seen)).shape == (3, *IMAGE)
    with pytest.raises(ValueError, match="operator has maps of 3 rows, got 2 measurements"):
        model.restore(torch.zeros(2, *IMAGE), Mask(seen))


@pytest.mark.parametrize("kind", [SB(1e-3, 0.1), VP(), VE(9.0)], ids=["SB", "VP", "VE"])
def test_files(kind: Schedule, tmp_path: Path) -> None:
    model = SystemEmbeddedBridge(unet(), kind, format=FORMAT, consistent=False, steps=3)
    std = torch.linspace(0.05, 0.2, 16).reshape(1, 1, 4, 4)
    model.fit(PICTURES, POOL, obs_noise=std, **TINY)
    model.examples = model.measure(PICTURES[:5])
    model.save(tmp_path / "model.safetensors")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        model.save(tmp_path / "model.safetensors")
    again = fluvial.load(tmp_path / "model.safetensors")
    assert isinstance(again, SystemEmbeddedBridge) and again.schedule == kind
    assert (again.consistent, again.steps, again.loss) == (False, 3, "absolute")
    y = model.measure(PICTURES)
    assert torch.equal(again.restore(y, POOL), model.restore(y))
    assert again.use is not None and again.use.system == "system-embedded-bridge"
    with pytest.raises(ValueError, match="operator must be given, as that of the training is not"):
        again.restore(y)
    rows = torch.arange(3, 7)
    noise = KeyedNoise(4)
    before = again.use.digest
    assert_close(
        again.fit(PICTURES, POOL, **TINY).sample(4, noise=noise.rows(rows)),
        again.sample(7, noise=noise)[rows], 1e-2,
    )  # fmt: skip
    assert again.use.base_model == (before,)


def test_network_of_another_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SystemEmbeddedBridge(Linear1(), steps=2).double()
    x0 = FORMAT.encode(PICTURES).double()
    y = model.fit(x0, POOL, **TINY).measure(x0)
    x = model.restore(y)
    assert x.dtype == torch.float64
    path = tmp_path / "model.safetensors"
    model.save(path)
    with pytest.raises(ValueError, match="is not a network of fluvial"):
        SystemEmbeddedBridge.load(path)
    again = SystemEmbeddedBridge.load(path, network=Linear1())
    assert torch.equal(again.restore(y, POOL), x)
    header = read_header(path)
    assert header["system"] == "system-embedded-bridge"
    with pytest.raises(ValueError, match="'meanflow', not 'system-embedded-bridge'"):
        save_model(tmp_path / "other", {"w": torch.ones(1)}, {"system": "meanflow"})
        SystemEmbeddedBridge.load(tmp_path / "other")


def test_training_is_a_function_of_its_seed() -> None:
    one, two = (trained().state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    loss = SystemEmbeddedBridge(unet(), format=FORMAT)
    loss.operator = POOL
    x0 = FORMAT.encode(PICTURES)
    whole = loss({"x": x0}, NOISE)
    parts = [loss({"x": x0[r]}, NOISE.rows(r)) for r in torch.arange(12).split(6)]
    torch.testing.assert_close(whole["loss"], (parts[0]["loss"] + parts[1]["loss"]) / 2)
    assert whole["error"].shape == whole["t"].shape == (12,)


class Random(AveragePool):
    """A pseudo-inverse that is none."""

    def _adjoint(self, y: Tensor) -> Tensor:
        return super()._dagger(y) / 4

    def _dagger(self, y: Tensor) -> Tensor:
        return super()._dagger(y) * 1.2


class Affine(Mask):
    """Fills holes with ones."""

    def _forward(self, x: Tensor) -> Tensor:
        seen = self._like("values", x)
        return seen * x + (1 - seen)


def test_projectors_that_are_none_are_refused() -> None:
    model = SystemEmbeddedBridge(unet(), format=FORMAT, steps=2)
    wrong = Random((2, 2), IMAGE)
    affine = Affine(torch.arange(64).reshape(1, *IMAGE) % 3 > 0)
    for operator, match in (
        (wrong, "A_dagger A A_dagger is not A_dagger of Random: off by"),
        (affine, "A_adjoint is not the adjoint of A of Affine: off by"),
    ):
        with pytest.raises(ValueError, match=match):
            model.fit(PICTURES, operator, **TINY)
        assert model.operator is None
    with pytest.raises(ValueError, match="is not A_dagger of Random"):
        model.restore(torch.zeros(2, 1, 4, 4), wrong)


def test_bad_models() -> None:
    for make, match in (
        (lambda: SystemEmbeddedBridge(unet(), "edm"), "schedule must be one of sb, vp, ve"),
        (lambda: SystemEmbeddedBridge(unet(), steps=0), "steps must be at least 1, got 0"),
        (lambda: SystemEmbeddedBridge(unet(), loss="l3"), "loss must be absolute or squared"),
        (
            lambda: SystemEmbeddedBridge(UNet(size=8, channels=3, width=8)),
            "network must have twice the channels of an event",
        ),
        (
            lambda: SystemEmbeddedBridge(unet(), format=Format("images", (3, 8, 8))),
            "network must have twice the 3 channels of the format, got 2",
        ),
        (
            lambda: SystemEmbeddedBridge(unet(), task=Task("pooling")),
            "task needs a format of images",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            make()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"images": PICTURES.numpy()}, TypeError, "images must be a tensor, got ndarray"),
        ({"images": PICTURES.float()}, TypeError, "images must be uint8"),
        ({"images": PICTURES[:0]}, ValueError, r"images must have shape \(rows, \*event\)"),
        ({"images": PICTURES[..., :4]}, ValueError, r"x must have shape \(batch, 1, 8, 8\)"),
        ({"operator": None}, ValueError, "operator is not known yet: fit with one"),
        (
            {"operator": Mask(random_mask(torch.empty(12, *IMAGE), 0.5, NOISE))},
            ValueError,
            "operator must have one map for all rows, got one of 12 maps",
        ),
        (
            {"operator": AveragePool((2, 2), (1, 4, 4))},
            ValueError,
            r"operator takes events of \(1, 4, 4\), got \(1, 8, 8\)",
        ),
        ({"obs_noise": -1.0}, ValueError, "obs_noise must be at least 0 and finite, got -1"),
        ({"obs_noise": torch.ones(3)}, ValueError, r"one or \(1, \*\(1, 4, 4\)\), got \(3,\)"),
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
    ],
)
def test_bad_training(change: dict[str, Any], error: type[Exception], match: str) -> None:
    model = SystemEmbeddedBridge(unet(), format=FORMAT)
    good: dict[str, Any] = {"images": PICTURES, "operator": POOL, **TINY}
    with pytest.raises(error, match=match):
        model.fit(**{**good, **change})
    bare = SystemEmbeddedBridge(unet())
    with pytest.raises(TypeError, match="images must be floating for a model without a format"):
        bare.fit(PICTURES, POOL, **TINY)
    with pytest.raises(ValueError, match="images holds values that are not finite"):
        bare.fit(torch.full((2, *IMAGE), math.nan), POOL, **TINY)


def test_bad_measurements() -> None:
    model = SystemEmbeddedBridge(unet(), format=FORMAT, steps=2)
    fourier = operators()["fourier"]
    y = torch.zeros(2, 1, 4, 4)
    for arguments, options, error, match in (
        ((y, POOL), {"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ((y, POOL), {"method": "heun"}, ValueError, "method must be one of"),
        ((y, POOL), {"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ((y, POOL), {"obs_noise": math.nan}, ValueError, "obs_noise must be at least 0"),
        ((y[..., :2], POOL), {}, ValueError, r"measurement must have shape \(1, 4, 4\)"),
        ((y / 0, POOL), {}, ValueError, "measurement holds values that are not finite"),
        ((y.long(), POOL), {}, TypeError, "measurement must be floating, got torch.int64"),
        (([1.0], POOL), {}, TypeError, "measurement must be a tensor, got list"),
        ((y,), {}, ValueError, "operator must be given, as that of the training is not known"),
        (
            (torch.zeros(2, *fourier.out_shape, dtype=torch.uint8), fourier), {}, ValueError,
            "measurement must be floating, as SubsampledFourier does not make images of images",
        ),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            model.restore(*arguments, **options)
    with pytest.raises(ValueError, match="there are no examples to restore"):
        model.sample(2, noise=NOISE)


class Half:
    """A user's own operator, which says nothing of itself: the left half."""

    def A(self, x: Tensor) -> Tensor:
        return x[..., : x.shape[-1] // 2]

    def A_adjoint(self, y: Tensor) -> Tensor:
        return torch.cat([y, 0 * y], -1)

    A_dagger = A_adjoint


class Rows(Half):
    """Each row has a map of its own."""

    values = random_mask(torch.empty(12, *IMAGE), 0.5, NOISE).float()

    def A(self, x: Tensor) -> Tensor:
        return self.values * x

    A_adjoint = A_dagger = A


class Spectrum(Half):
    def A(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x)


def test_operators_of_the_user() -> None:
    model = SystemEmbeddedBridge(unet(), format=FORMAT, steps=2).fit(PICTURES, Half(), **TINY)
    y = Half().A(PICTURES)
    restored = model.restore(y)
    torch.testing.assert_close(Half().A(restored), y, rtol=0, atol=0)
    torch.testing.assert_close(model.restore(y[0]), restored[0], rtol=0, atol=1)
    rows = Rows()
    with pytest.raises(ValueError, match=r"operator fails on 2 events of \(1, 8, 8\) .* by rows"):
        model.restore(torch.zeros(12, *IMAGE), rows)
    rows.rows = 12
    assert model.restore(torch.zeros(12, *IMAGE), rows, batch_size=5).shape == PICTURES.shape
    wide = Half()
    wide.in_shape = (1, 4, 12)
    assert model.restore(torch.zeros(3, 1, 4, 6), wide).shape == (3, 1, 4, 12)
    wide.in_shape = (3, 8, 8)
    with pytest.raises(ValueError, match="an event of operator has 3 channels, and the network 2"):
        model.restore(torch.zeros(3, 3, 8, 4), wide)
    for operator, error, match in (
        (torch.eye(8), TypeError, "operator must have A, A_adjoint and A_dagger, .* got Tensor"),
        (lambda like, noise: 3, ValueError, "operator must draw operators, got int"),
        (Spectrum(), ValueError, "operator must make a row of real numbers of each row"),
    ):
        with pytest.raises(error, match=match):
            model.fit(PICTURES, operator, **TINY)
        assert isinstance(model.operator, Half) and model.operator is not wide
    with pytest.raises(TypeError, match="operator must have A, A_adjoint and A_dagger, got Tensor"):
        model.restore(y, torch.eye(8))


def test_very_small_pictures() -> None:
    model = SystemEmbeddedBridge(UNet(size=8, channels=2, width=8, multipliers=(1, 1, 1)), steps=2)
    for size in ((1, 1), (2, 2), (1, 6), (3, 3)):
        x = NOISE.normal(torch.empty(2, 1, *size))
        whole = Mask(torch.ones(1, 1, *size, dtype=torch.bool), (1, *size))
        assert model.restore(x, whole, obs_noise=0.1).shape == x.shape


def test_a_refused_training_leaves_the_system(tmp_path: Path) -> None:
    std = torch.full((1, 40, 40), 0.1)
    x = torch.zeros(4, 1, 40, 40)
    model = SystemEmbeddedBridge(unet(), steps=2)
    whole = Mask(torch.ones(1, 1, 40, 40, dtype=torch.bool), (1, 40, 40))
    kept = {**TINY, "out": tmp_path / "run"}
    model.fit(x, whole, obs_noise=std, **kept)
    other = std.clone()
    other[0, 20, 20] = 0.2  # where a tensor that is printed has dots
    with pytest.raises(ValueError, match="belongs to another configuration: restorer.obs_noise"):
        model.fit(x, whole, obs_noise=other, **kept)
    assert model.obs_noise is std and model.operator is whole


# Tasks and baselines


@pytest.mark.parametrize("name", get_args(Name))
def test_tasks(name: Any, tmp_path: Path) -> None:
    shape = (3, 8, 8)
    task = Task(name, obs_noise=0.05)
    operator = task.operator(shape)
    check_operator(operator, torch.empty(2, *shape).double(), 1e-8)
    assert Task(**json.loads(json.dumps(task.as_json()))) == task
    model = SystemEmbeddedBridge(
        unet(channels=3), format=Format("images", shape), steps=2, task=task
    )
    images = PICTURES.expand(-1, 3, -1, -1)
    y = model.fit(images, **TINY).measure(images)
    model.save(tmp_path / "m")
    again = fluvial.load(tmp_path / "m")
    assert torch.equal(again.restore(y), model.restore(y))
    small = torch.zeros(2, *operator.out_shape, dtype=torch.uint8)
    if task.pictures:
        assert model.restore(small).shape == (2, *shape)
    else:
        with pytest.raises(ValueError, match="does not make images of images"):
            model.restore(small)


def test_bad_tasks() -> None:
    for arguments, match in (
        (("denoising",), "task must be one of inpainting, pooling"),
        (("inpainting", 1.0), r"amount of inpainting must lie in \(0, 1\), got 1.0"),
        (("pooling", 1.5), "amount of pooling must be a whole number of at least 1"),
        (("deblurring", -1.0), "amount of deblurring must be positive"),
        (("radon", 4, -0.1), "obs_noise must be at least 0"),
    ):
        with pytest.raises(ValueError, match=match):
            Task(*arguments)
    with pytest.raises(ValueError, match="must be divisible by factor"):
        Task("pooling", 3).operator(IMAGE)


def test_the_scalar_bridge_is_i2sb() -> None:
    """One ancestral step against the posterior of I2SB written out, and the law of x_t."""
    x0 = FORMAT.encode(PICTURES)
    bridge = ScalarBridge(unet(), MRI)
    bridge.obs_noise = 0.1
    t = torch.full((12,), 0.3)
    x, c = bridge.noised(x0, t, POOL, NOISE)
    s, rest = MRI.clock(number(0.3))
    a = float(rest / MRI.total)
    wanted = a * x0 + (1 - a) * c + float(s * rest / MRI.total) ** 0.5 * NOISE.normal(x0, "source")
    torch.testing.assert_close(x, wanted, atol=1e-5, rtol=0)
    y = POOL.A(x0)
    c = POOL.A_dagger(y)
    found = bridge.fit(x0, POOL, **TINY).restore(y, steps=2)
    clean = bridge.denoise(c, c, number(1.0))
    q = float(MRI.gamma(number(0.5)))
    eps = NOISE.at(0).normal(x0, "posterior")
    half = (1 - q) * clean + q * c + math.sqrt(MRI.total * q * (1 - q)) * eps
    torch.testing.assert_close(found, bridge.denoise(half, c, number(0.5)), atol=1e-5, rtol=1e-5)


def test_regression_is_one_call() -> None:
    x0 = FORMAT.encode(PICTURES)
    model = Regression(unet()).fit(x0, POOL, **TINY)
    assert torch.equal(model({"x": x0}, NOISE)["t"], torch.ones(12))
    y = POOL.A(x0)
    c = POOL.A_dagger(y)
    assert torch.equal(model.restore(y), model.denoise(c, c, number(1.0)))


def test_training_free_baselines_have_a_gaussian_posterior() -> None:
    """Of a prior N(0, 1) they are exact: PiGDM in mean and variance, DDNM in what is not seen."""

    class Normal:
        predicts = "clean"

        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
            alpha, sigma = Linear().alpha(t), Linear().sigma(t)
            return x * alpha / (alpha**2 + sigma**2)

    operator = Dense(number([[1.0, 0.0]]))
    y = torch.ones(2_000, 1, dtype=torch.float64)
    for restore, options in ((pigdm, {"obs_noise": 0.5}), (ddnm, {}), (ddnm, {"obs_noise": 0.5})):
        x = restore(Normal(), Linear(), y, operator, steps=120, noise=NOISE, **options)
        assert float(x[:, 1].mean()) == pytest.approx(0.0, abs=0.1)
        assert float(x[:, 1].var()) == pytest.approx(1.0, abs=0.15)
        if not options:
            assert_close(x[:, :1], y)
        elif restore is pigdm:
            assert float(x[:, 0].mean()) == pytest.approx(0.8, abs=0.06)
            assert float(x[:, 0].var()) == pytest.approx(0.2, abs=0.05)


# The command line


def folder(path: Path, count: int = 14) -> Path:
    path.mkdir()
    pixels = (NOISE.uniform(torch.empty(count, 10, 8), "files") * 255).byte().numpy()
    for k, image in enumerate(pixels):
        Image.fromarray(image).save(path / f"{k:02d}.png")
    return path


FLAGS = ["--steps", "2", "--batch-size", "4", "--width", "8", "--simulation", "2", "--quiet"]


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, run = folder(tmp_path / "photos"), tmp_path / "run"
    train = ["train", "system-embedded-bridge", "--data", str(source)]
    flags = [*FLAGS, "--task", "pooling", "--obs-noise", "0.1", "--validation", "0.3"]
    assert main([*train, "--out", str(run), *flags]) == 0
    assert "2 steps in" in capsys.readouterr().out
    settings = json.loads((run / "run.json").read_text())
    assert settings["recipe"]["amount"] == 2 and settings["recipe"]["size"] == [10, 8]
    names = [row["name"] for row in json.loads((run / "result.json").read_text())["metrics"]]
    assert names[:2] == ["PSNR of restored images, dB", "PSNR of measured images, dB"]
    assert (run / "figure.png").stat().st_size > 1000
    sheet = tmp_path / "samples.png"
    assert main(["sample", str(run), "--n", "6", "--out", str(sheet), "--quiet"]) == 0
    assert sheet.stat().st_size > 100
    model = fluvial.load(run)
    assert model.restore(model.measure(PICTURES.repeat(1, 1, 2, 1)[:, :, :10])).shape[2:] == (10, 8)
    for arguments, message in (
        ([*train, "--task", "fog"], "--task must be inpainting, pooling"),
        ([*train, "--task", "pooling", "--amount", "3"], "must be divisible by factor"),
        ([*train, "--amount", "2"], "amount of inpainting must lie in (0, 1), got 2"),
        ([*train, "--process", "sb", "--simulation", "0"], "--simulation must be at least 1"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["inpainting", "bicubic"])
def test_images_restored_from_the_command_line(
    name: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = SystemEmbeddedBridge(unet(), format=FORMAT, steps=2, task=Task(name))
    file, out, photo = (tmp_path / n for n in ("model.safetensors", "out", "photo.png"))
    model.save(file)
    pixels = PICTURES[0].repeat(1, 2, 1)[:, :13]  # 13 x 8
    Image.fromarray(pixels[0].numpy()).save(photo)
    command = ["restore", str(file), str(photo), "--quiet", "--out"]
    assert main([*command, str(out)]) == 0
    times = {"inpainting": 1, "bicubic": 2}[name]
    with Image.open(out / "restored.png") as image:
        restored = torch.from_numpy(np.array(image))[None]
    assert restored.shape == (1, 13 * times, 8 * times)
    if name == "inpainting":  # without noise what the task measures is the image that was given
        operator = Task(name).operator(restored.shape)
        assert_close(operator.A(restored[None].double()), operator.A(pixels[None].double()))
    capsys.readouterr()
    assert main([*command, str(tmp_path / "clean"), "--degrade", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["size"] == [13 - 13 % times, 8] and document["psnr"] > 0
    with Image.open(tmp_path / "clean" / "measured.png") as image:
        assert image.size == (8 // times, 13 // times)
    SystemEmbeddedBridge(unet(), format=FORMAT, task=Task("radon")).save(file, overwrite=True)
    assert main([*command, str(tmp_path / "no")]) == 2
    assert "has the task radon, whose measurements are no images" in capsys.readouterr().err


def test_bad_recipes(tmp_path: Path) -> None:
    for options, match in (
        ({"validation": 1.0}, "validation must be a share"),
        ({"channels": 2}, "channels must be 1 for grey or 3"),
        ({"process": "x"}, "process must be one of sb, vp, ve"),
        ({"seed": -1}, "seed must not be negative"),
        ({"lr": 0.0}, "lr must be positive"),
    ):
        with pytest.raises(ValueError, match=match):
            Recipe(**options)
    job = Recipe(validation=0.0, size=16).prepare(folder(tmp_path / "a"), progress=False)
    assert job.measure() == [] and job.rows[1] is None and "validation" not in job.about["rows"]
    with pytest.raises(ValueError, match="size: the images are 200 x 200; say at which size"):
        (tmp_path / "b").mkdir()
        for k in range(3):
            Image.new("L", (200, 200), k).save(tmp_path / "b" / f"{k}.png")
        Recipe().prepare(tmp_path / "b", progress=False)
    np.save(tmp_path / "rows.npy", np.zeros((20, 3)) + np.arange(20)[:, None])
    with pytest.raises(ValueError, match="what is restored are images"):
        Recipe().prepare(tmp_path / "rows.npy", progress=False)
