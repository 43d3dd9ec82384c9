"""Solvers of the probability-flow ODE dx/dt = v(x, t), forwards and backwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from fluvial.core.gaussian.fields import ends, express, predict
from fluvial.core.protocols import GaussianPath, Run


class Euler:
    """x_s = x_t + (s - t) v(x_t, t). First order; one evaluation a step."""

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor]:
        velocity, clean = steered_velocity(x, run)
        return x + (run.s - run.t) * velocity, memory, clean


class Heun:
    """x_s = x_t + (s - t) (v(x_t, t) + v(x_e, s)) / 2 with x_e the Euler step.

    Second order; two evaluations a step. A step that ends at s = 0 is an Euler step, since a
    velocity made from a noise or clean prediction is undetermined there; its error is of the order
    of the whole, so the order stays two (Karras et al., NeurIPS 2022). A step that starts where the
    velocity is undetermined is wrong by O(s - t), and the whole is then of order one: from t = 0 on
    a variance-preserving path unless the field predicts a velocity, from t = 1 on a path with
    alpha(1) = 0 if it predicts noise or score.
    """

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor]:
        velocity, clean = steered_velocity(x, run)
        euler = x + (run.s - run.t) * velocity
        if run.s == 0:
            return euler, memory, clean
        after, _ = steered_velocity(euler, replace(run, t=run.s))
        return x + 0.5 * (run.s - run.t) * (velocity + after), memory, clean


def steered_velocity(x: Tensor, run: Run) -> tuple[Tensor, Tensor]:
    """(velocity, clean prediction) at (x, run.t), both after `Steering.clean`."""
    path = cast(GaussianPath, run.path)
    kind, value = predict(run.field, x, run.t, **run.cond)
    clean, noise = ends(kind, value, x, run.t, path, **run.cond)
    steered = cast(Tensor, run.clean(clean, x))
    if steered is clean:
        if kind == "velocity":
            return value, clean
    else:
        _, noise = ends("clean", steered, x, run.t, path, **run.cond)
    return express("velocity", steered, noise, run.t, path, **run.cond), steered
