"""The flow with steps of the solver's choice: its error, its ends, its evaluations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.adaptive import METHODS, integrate
from fluvial.core.gaussian.paths import VE, AlphaSigmaPath, Linear, VPCosine, VPLinear
from fluvial.core.noise import KeyedNoise

from .toys import BlockField, BlockGaussian, Counting, VectorGaussian

NOISE = KeyedNoise(3)
MEAN = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
STD = torch.tensor([0.6, 1.0, 1.7], dtype=torch.float64)
PATHS = [Linear(), VPLinear(1.0, 4.0), VPCosine(), VE(0.1, 5.0)]
KINDS = ["clean", "noise", "velocity", "score", "mean_velocity"]


def name(path: Any) -> str:
    return type(path).__name__


def time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


def typical(toy: VectorGaussian, t: float, batch: int = 4) -> Tensor:
    mean, var = toy.moments(time(t))
    return mean + var.sqrt() * NOISE.normal(torch.empty(batch, 3, dtype=torch.float64))


@pytest.mark.parametrize(("t_from", "t_to"), [(1.0, 0.0), (0.0, 1.0), (0.8, 0.3), (0.3, 0.8)])
@pytest.mark.parametrize("path", PATHS, ids=name)
def test_error_is_of_the_order_of_the_tolerance(
    path: AlphaSigmaPath, t_from: float, t_to: float
) -> None:
    for kind in KINDS:
        if t_from == 0 and "velocity" in kind and not isinstance(path, (Linear, VPCosine)):
            continue  # the toy's own velocity is wrong where sigma' diverges
        toy = VectorGaussian(path, MEAN, STD, kind)
        x = typical(toy, t_from)
        exact = toy.flow(x, time(t_from), time(t_to))
        scale = toy.moments(time(t_to))[1].sqrt()
        counted = Counting(toy)
        out, evaluations = integrate(counted, path, x, t_from, t_to, rtol=1e-6, atol=1e-6)
        assert evaluations == len(counted.calls) > 0
        assert ((out - exact) / scale).abs().max() < 1e-4


def test_error_falls_with_the_tolerance() -> None:
    path = VPCosine()
    toy = VectorGaussian(path, MEAN, STD, "velocity")
    x, errors, calls = typical(toy, 1.0), [], []
    for tolerance in (1e-3, 1e-6, 1e-9):
        out, evaluations = integrate(toy, path, x, 1.0, 0.0, rtol=tolerance, atol=tolerance)
        errors.append(float((out - toy.flow(x, time(1), time(0))).abs().max()))
        calls.append(evaluations)
    assert errors[0] > 30 * errors[1] > 900 * errors[2]
    assert calls == sorted(calls)


@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str) -> None:
    path = Linear()
    toy = VectorGaussian(path, MEAN, STD, "clean")
    x = typical(toy, 0.9)
    out, _ = integrate(toy, path, x, 0.9, 0.1, method=method, rtol=1e-4, atol=1e-4)
    assert (out - toy.flow(x, time(0.9), time(0.1))).abs().max() < 5e-3


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_round_trip(path: AlphaSigmaPath) -> None:
    toy = VectorGaussian(path, MEAN, STD, "noise")
    x = typical(toy, 0.0)
    there, _ = integrate(toy, path, x, 0.0, 1.0, rtol=1e-7, atol=1e-7)
    back, _ = integrate(toy, path, there, 1.0, 0.0, rtol=1e-7, atol=1e-7)
    # one part is the solver's, the other that of the frozen ends: level^2 / (2 std^2), both ways
    level = torch.finfo(torch.float64).eps ** (1 / 3)
    assert ((back - x).abs() < 2e-5 + level**2 / STD.square() * 4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_times_stay_inside_and_on_the_host(dtype: torch.dtype) -> None:
    seen: list[Tensor] = []

    class Watching(VectorGaussian):
        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:  # type: ignore[override]
            seen.append(t)
            assert x.dtype == dtype and t.dtype == torch.float64 and t.ndim == 0
            assert cond == {"label": 3}
            return super().__call__(x, t)

    path = VPLinear()
    for t_from, t_to in ((0.7, 0.2), (0.2, 0.7), (1.0, 0.0)):
        seen.clear()
        toy = Watching(path, MEAN, STD)
        out, _ = integrate(toy, path, typical(toy, t_from).to(dtype), t_from, t_to, label=3)
        assert out.dtype == dtype
        assert min(t_from, t_to) <= min(seen) and max(seen) <= max(t_from, t_to)
    assert min(seen) > 0  # a clean prediction makes no velocity there


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("path", [Linear(), VPCosine()], ids=name)
def test_half_precision(path: AlphaSigmaPath, dtype: torch.dtype) -> None:
    """Steps and times are not rounded to the field's few digits."""
    toy = VectorGaussian(path, MEAN, STD, "velocity")
    x = typical(toy, 1.0).to(dtype)
    out, _ = integrate(toy, path, x, 1.0, 0.0, rtol=1e-3, atol=1e-3)
    exact = toy.flow(x.double(), time(1.0), time(0.0))
    assert out.dtype == dtype
    assert ((out.double() - exact) / STD).abs().max() < 10 * torch.finfo(dtype).eps + 5e-3


def test_the_last_stretch_alone() -> None:
    """Where both times are nearer to an undetermined end than the solver goes: one step."""
    path = Linear()
    for kind in ("clean", "noise"):
        toy = Counting(VectorGaussian(path, MEAN, STD, kind))
        x = typical(toy.field, 1e-7)  # type: ignore[arg-type]
        for t_from, t_to in ((1e-7, 0.0), (0.0, 1e-7)):
            out, evaluations = integrate(toy, path, x, t_from, t_to)
            assert evaluations == 1
            torch.testing.assert_close(out, x, rtol=1e-5, atol=1e-5)
    assert integrate(toy, path, x, 0.3, 0.3) == (x, 0)


def test_on_the_block_path() -> None:
    path = BlockGaussian(beta=1.0, gamma=1.0, mass=0.5)
    field = BlockField(path, torch.tensor([1.0, 0.2]).double(), torch.eye(2).double() * 0.5)
    x = NOISE.normal(torch.empty(3, 2, 2, dtype=torch.float64))
    there, _ = integrate(field, path, x, 0.2, 0.9, rtol=1e-8, atol=1e-8)
    # the flow maps mean to mean, and the covariance to the covariance
    mean, cov = field.moments(time(0.2))
    basis = torch.cat([torch.zeros(1, 2, 1), torch.eye(2)[:, :, None]]).double()
    moved, _ = integrate(field, path, basis, 0.2, 0.9, rtol=1e-8, atol=1e-8)
    gain = (moved[1:] - moved[0])[:, :, 0].T
    to_mean, to_cov = field.moments(time(0.9))
    torch.testing.assert_close(gain @ mean + moved[0, :, 0], to_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gain @ cov @ gain.T, to_cov, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gain @ x + moved[0], there, rtol=1e-6, atol=1e-6)
    assert integrate(field, path, x, 0.9, 0.0)[0].isfinite().all()


def test_gradients() -> None:
    path, mean = Linear(), MEAN.clone().requires_grad_()
    toy = VectorGaussian(path, mean, STD, "velocity")
    x = typical(VectorGaussian(path, MEAN, STD), 0.9).requires_grad_()
    out, _ = integrate(toy, path, x, 0.9, 0.1, rtol=1e-7, atol=1e-7)
    exact = toy.flow(x, time(0.9), time(0.1))
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), (x, mean)),
        torch.autograd.grad(exact.sum(), (x, mean)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_errors() -> None:
    path = Linear()
    toy, x = VectorGaussian(path, MEAN, STD), torch.zeros(2, 3).double()
    with pytest.raises(TypeError, match="x must be floating, got torch.int64"):
        integrate(toy, path, x.long(), 1.0, 0.0)
    for times in ((1.1, 0.0), (1.0, -0.1), (math.nan, 0.0)):
        with pytest.raises(ValueError, match="t_from and t_to must lie in"):
            integrate(toy, path, x, *times)
    for tolerance in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="rtol and atol must be positive"):
            integrate(toy, path, x, 1.0, 0.0, rtol=tolerance)
    with pytest.raises(ValueError, match="method must be one of dopri5, .*, got 'rk4'"):
        integrate(toy, path, x, 1.0, 0.0, method="rk4")
    bad = VectorGaussian(path, MEAN * math.nan, STD, "velocity")
    with pytest.raises(ValueError, match="dopri5 got stuck between t_from = 1.0 and t_to") as error:
        integrate(bad, path, x, 1.0, 0.0)
    assert "\n" not in str(error.value)
    assert integrate(toy, path, x[:0], 1.0, 0.0)[0].shape == (0, 3)
