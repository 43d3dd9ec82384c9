"""Samplers of the reverse process.

With tau falling by w over a step, the reverse process is

    dU = -A U dtau + Q s dtau + Q^(1/2) dW,    Q = diag(epsilon, sigma)^2, s the score at U,

and where epsilon = 0 only the momentum part of the score enters. All work with a field of any kind,
corrected by the steering at every evaluation, and only on pairs that fall.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fluvial.core.gaussian.fields import Prediction, predicted
from fluvial.core.protocols import Run, Sampler
from fluvial.core.scales import Block, mix
from fluvial.dynamics.critically_damped_langevin.path import CriticallyDamped


class EM:
    """Euler-Maruyama: U + h (G G^T s - F U) + sqrt(h) G z, h the length of the step.

    One evaluation a step; published with 1,000 steps. `fluvial.core.gaussian.sde.EulerMaruyama` is
    the same, to rounding, for any path and any amount of noise. This one is several times faster
    where the field predicts the score, as it needs neither clean end nor noise.
    """

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        path, h = _falling(run, "EM")
        z = run.noise.normal(x, "em")
        guess = predicted(x, run)
        x = _euler(path, x, score(guess), run.t, h) + math.sqrt(h) * path.sde(run.t)[1] @ z
        return x, memory, guess.clean if run.watched else None


def _euler(path: CriticallyDamped, x: Tensor, score: Tensor, t: Tensor, h: float) -> Tensor:
    drift, spread = path.sde(t)
    return mix((1 - h * drift, x), (h * spread @ spread.T, score))


class Leapfrog:
    """Half a step of the momentum v and of the position x, all the noise, half a step of x and v.

    With w and w' what tau falls by in the first and in the second half of the step,

        v += w (x + 2 a v + sigma^2 s_v),    x += w (epsilon^2 s_x - a^2 v),
        (x, v) += sqrt(w + w') (epsilon z_x, sigma z_v),
        x += w' (epsilon^2 s'_x - a^2 v),    v += w' (x + 2 a v + sigma^2 s'_v).

    Two evaluations a step: s at the start, and s' after the noise, in the middle of the step.
    """

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        path, (first, second) = _halves(run, "Leapfrog")
        z = run.noise.normal(x, "leapfrog")
        guess = predicted(x, run)
        clean = guess.clean if run.watched else None
        (x, v), (s_x, s_v) = x.unbind(1), score(guess).unbind(1)
        v = v + first * _push(path, x, v, s_v)
        x = x + first * _drift(path, v, s_x)
        spread = math.sqrt(first + second) * Block(np.diag([path.epsilon, path.sigma]))
        u = torch.stack([x, v], 1) + spread @ z
        middle = replace(run, t=0.5 * (run.t + run.s))
        (x, v), (s_x, s_v) = u.unbind(1), score(predicted(u, middle)).unbind(1)
        x = x + second * _drift(path, v, s_x)
        v = v + second * _push(path, x, v, s_v)
        return torch.stack([x, v], 1), memory, clean


def _push(path: CriticallyDamped, x: Tensor, v: Tensor, score: Tensor) -> Tensor:
    return x + 2 * path.a * v + path.sigma**2 * score


def _drift(path: CriticallyDamped, v: Tensor, score: Tensor) -> Tensor:
    return path.epsilon**2 * score - path.a**2 * v


class SSCS:
    """Symmetric splitting: the pull of the stationary score exactly, the rest by Euler's method.

        O: dU = (-A - Q S^-1) U dtau + Q^(1/2) dW,    E: dU = Q (s + S^-1 U) dtau,

    with S the stationary covariance. O is the time reversal of the stationary process, and its
    moments are exact. A step is half of O, one Euler step of E, and the other half of O; with
    constant beta and epsilon = 0 it is the sampler of Dockhorn et al. (ICLR 2022). One evaluation a
    step. For data of the stationary law E is nothing, and the law is exact whatever the step.

    Args:
        score_at: the time at which the score is asked in a step: its start, as published, or its
            middle.
    """

    def __init__(self, score_at: Literal["start", "middle"] = "start") -> None:
        if score_at not in ("start", "middle"):
            raise ValueError(f"score_at must be 'start' or 'middle', got {score_at!r}")
        self.score_at = score_at

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        path, (first, second) = _halves(run, "SSCS")
        middle = 0.5 * (run.t + run.s)
        x = self._exact(path, x, middle, run.t, run.noise.normal(x, "sscs-first"))
        guess = predicted(x, run if self.score_at == "start" else replace(run, t=middle))
        pull = float(first + second) * path.process.noise
        x = x + mix((pull, score(guess)), (pull @ path.stationary.inverse(), x))
        x = self._exact(path, x, run.s, middle, run.noise.normal(x, "sscs-second"))
        return x, memory, guess.clean if run.watched else None

    def _exact(
        self, path: CriticallyDamped, x: Tensor, s: Tensor, t: Tensor, noise: Tensor
    ) -> Tensor:
        flow, cov = path.reverse.kernel(s, t)
        return mix((flow, x), (cov.cholesky(), noise))


class Denoised:
    """``sampler``, and steps to t = 0 by Euler's method for the reverse process, without noise.

    For grids whose last pair is (t_min, 0): the noise that is left at t_min is taken off, not
    exchanged (Dockhorn et al., with t_min = 1e-3).
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def start(self, x: Tensor) -> Any:
        return self.sampler.start(x)

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Any, Any, Any]:
        if run.s > 0:
            return self.sampler.step(x, memory, run)
        path, h = _falling(run, "Denoised")
        guess = predicted(x, run)
        x = _euler(path, x, score(guess), run.t, h)
        return x, memory, guess.clean if run.watched else None


def score(guess: Prediction) -> Tensor:
    """The score that a prediction stands for; as it came, if it is one."""
    if guess.kind == "score":
        return guess.value
    return -guess.path.marginal(guess.t, **guess.cond)[1].T.solve(guess.ends()[1])


def _falling(run: Run, name: str) -> tuple[CriticallyDamped, float]:
    """The path, and the length of the step."""
    path = run.path
    if not isinstance(path, CriticallyDamped):
        raise TypeError(f"{name} needs a CriticallyDamped path, got {type(path).__name__}")
    h = float(run.t) - float(run.s)
    if not h > 0:
        raise ValueError(f"{name} takes pairs that fall, got ({float(run.t)}, {float(run.s)})")
    return path, h


def _halves(run: Run, name: str) -> tuple[CriticallyDamped, tuple[Tensor, Tensor]]:
    """The path, and what tau falls by in the first and in the second half of a step."""
    path, _ = _falling(run, name)
    begin, middle, end = (path.tau(t) for t in (run.t, 0.5 * (run.t + run.s), run.s))
    return path, (begin - middle, middle - end)
