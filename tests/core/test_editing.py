"""SDEdit and inpainting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.gaussian.ode import Euler, Heun
from fluvial.core.gaussian.paths import AlphaSigmaPath, Linear, VPCosine, VPLinear
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.steering.editing import Inpainting, sdedit
from fluvial.core.time import uniform_grid

from .toys import VectorGaussian

NOISE = KeyedNoise(3)
MEAN = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
STD = torch.tensor([0.6, 1.0, 1.7], dtype=torch.float64)
X = NOISE.normal(torch.empty(5, 3, dtype=torch.float64), "input")


def name(value: Any) -> str:
    return type(value).__name__


def time(t: float) -> Tensor:
    return torch.tensor(t, dtype=torch.float64)


# SDEdit


@pytest.mark.parametrize("path", [Linear(), VPCosine()], ids=name)
@pytest.mark.parametrize("start", [0.2, 0.7])
def test_sdedit_is_the_flow_of_the_noised_input(path: AlphaSigmaPath, start: float) -> None:
    toy = VectorGaussian(path, MEAN, STD, "velocity")
    noised = path.sample(X, time(start), NOISE).x
    exact = toy.flow(noised, time(start), time(0.0))
    out = sdedit(X, uniform_grid(80, start), Heun(), path, toy, NOISE)
    torch.testing.assert_close(out, exact, rtol=1e-3, atol=1e-3)


def test_the_start_says_how_much_is_kept() -> None:
    path, toy = Linear(), VectorGaussian(Linear(), MEAN, STD, "velocity")

    def gap(start: float) -> float:
        out = [sdedit(x, uniform_grid(10, start), Heun(), path, toy, NOISE) for x in (X, X + 1)]
        return float((out[1] - out[0]).abs().max())

    gaps = [gap(start) for start in (1e-3, 0.3, 0.6, 1.0)]
    assert gaps == sorted(gaps, reverse=True)
    assert abs(gaps[0] - 1) < 0.01 and gaps[-1] == 0
    near = sdedit(X, uniform_grid(1, 1e-6), Heun(), path, toy, NOISE)
    torch.testing.assert_close(near, X, rtol=0, atol=1e-4)


def test_sdedit_is_keyed_and_passes_conditions() -> None:
    path, seen = VPLinear(), []

    class Labelled(VectorGaussian):
        def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:  # type: ignore[override]
            seen.append(cond)
            return super().__call__(x, t)

    toy, pairs = Labelled(path, MEAN, STD), uniform_grid(4, 0.5)
    whole = sdedit(X, pairs, Ancestral(), path, toy, NOISE, label=1)
    assert seen == [{"label": 1}] * 4
    rows = torch.tensor([3, 1])
    part = sdedit(X[rows], pairs, Ancestral(), path, toy, NOISE.rows(rows))
    torch.testing.assert_close(part, whole[rows], rtol=1e-14, atol=1e-14)
    assert sdedit(X.float(), pairs, Ancestral(), path, toy, NOISE).dtype == torch.float32
    with pytest.raises(ValueError, match="pairs must have shape"):
        sdedit(X, torch.empty(0, 2), Ancestral(), path, toy, NOISE)


# Inpainting


MASK = torch.tensor([[True, False, True]])


@pytest.mark.parametrize("sampler", [Ancestral(), Euler(), Heun()], ids=name)
def test_inpainting(sampler: Any) -> None:
    path, known = VPLinear(), X.clone()
    known[:, 1] = math.nan  # not known, not read
    toy, steer = VectorGaussian(path, MEAN, STD), Inpainting(known, MASK)
    start = path.source(X, NOISE)
    out = simulate(start, uniform_grid(6), sampler, path, toy, NOISE, steer)
    assert torch.equal(out[:, [0, 2]], X[:, [0, 2]])
    plain = simulate(start, uniform_grid(6), sampler, path, toy, NOISE)
    assert torch.equal(out[:, 1], plain[:, 1])  # independent coordinates
    one = simulate(
        start.float(), uniform_grid(6), sampler, path, toy, NOISE, Inpainting(X[:1], MASK[0])
    )
    assert one.dtype == torch.float32
    assert torch.equal(one[:, [0, 2]], X[:1, [0, 2]].float().expand(5, 2))


class Correlated:
    """Data N(0, [[1, r], [r, 1]])."""

    predicts = "clean"

    def __init__(self, path: AlphaSigmaPath, r: float) -> None:
        self.path, self.cov = path, torch.tensor([[1, r], [r, 1]], dtype=torch.float64)

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        alpha, sigma = self.path.alpha(t), self.path.sigma(t)
        noisy = alpha**2 * self.cov + sigma**2 * torch.eye(2, dtype=torch.float64)
        return x @ (alpha * self.cov @ torch.linalg.inv(noisy)).T


def test_what_is_known_draws_the_rest_along() -> None:
    path, known = VPLinear(), torch.tensor([[1.5, 0.0]], dtype=torch.float64)
    field, n = Correlated(path, 0.9), 2000
    start = path.source(torch.empty(n, 2, dtype=torch.float64), NOISE)
    steer = Inpainting(known, torch.tensor([True, False]))
    out = simulate(start, uniform_grid(50), Ancestral(), path, field, NOISE, steer)
    plain = simulate(start, uniform_grid(50), Ancestral(), path, field, NOISE)
    # towards the conditional mean 1.35, by more than 20 standard errors
    assert 0.5 < float(out[:, 1].mean()) < 1.5 and abs(float(plain[:, 1].mean())) < 0.2


def test_bad_masks() -> None:
    with pytest.raises(TypeError, match="mask must be bool, got torch.float32"):
        Inpainting(X, MASK.float())
    for known, mask, match in (
        (X.numpy(), MASK, "known must be a tensor, got ndarray"),
        (X, MASK.numpy(), "mask must be a tensor, got ndarray"),
    ):
        with pytest.raises(TypeError, match=match):
            Inpainting(known, mask)
    path = Linear()
    for known in (X[:4], X[:, :1].expand(5, 1), X[None]):
        steer = Inpainting(known, torch.ones(known.shape[1:], dtype=torch.bool))
        with pytest.raises(ValueError, match=r"the shape of the state, \(5, 3\), or one row, got"):
            simulate(
                X, uniform_grid(2), Euler(), path, VectorGaussian(path, MEAN, STD), NOISE, steer
            )
    with pytest.raises(ValueError, match="must broadcast to known"):
        Inpainting(X, torch.ones(5, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="known must be finite where mask is True"):
        Inpainting(X / 0, MASK)
