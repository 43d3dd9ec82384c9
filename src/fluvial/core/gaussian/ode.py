"""Solvers of the probability-flow ODE dx/dt = v(x, t), forwards and backwards.

Explicit Runge-Kutta methods on the pairs they are given; `fluvial.core.gaussian.adaptive` chooses
its own steps, and `fluvial.core.gaussian.multistep` has solvers made for diffusions.

A method that evaluates the field several times in a step does so with the steering's correction of
the clean prediction at every evaluation, at its own time and state: the ODE that is solved is that
of the corrected field. The clean prediction it returns is the one at the start of the step. All
evaluations of a step see the same ``run.noise``, so a steering that draws noise draws the same for
each: what is solved over the step is the ODE of that draw, to the method's order. Draws of
their own would be averaged over the evaluations, and a method would shrink the steering's noise by
their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fluvial.core.gaussian.fields import predicted
from fluvial.core.protocols import Run


class Euler:
    """x_s = x_t + (s - t) v(x_t, t). First order; one evaluation a step."""

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        guess = predicted(x, run)
        clean = guess.clean if run.watched else None
        return torch.add(x, guess.velocity, alpha=float(run.s) - float(run.t)), memory, clean


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

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        if run.s == 0:
            return Euler().step(x, memory, run)
        x, clean = runge_kutta(x, run, nodes=(1.0,), rows=((1.0,),), weights=(0.5, 0.5))
        return x, memory, clean


class Midpoint:
    """x_s = x_t + (s - t) v(x_m, m) with m = (t + s) / 2 and x_m the Euler step to it.

    Second order; two evaluations a step, neither at s. Where the velocity at t is undetermined (see
    `Heun`) only x_m is wrong by O(s - t), and the order stays two.
    """

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        x, clean = runge_kutta(x, run, nodes=(0.5,), rows=((0.5,),), weights=(0.0, 1.0))
        return x, memory, clean


class RK4:
    """The classical method of Runge and Kutta: fourth order; four evaluations a step.

    Its last evaluation is at s. A step that ends at s = 0, where a velocity made from a noise or
    clean prediction is undetermined, is taken by Ralston's method of order three instead, with
    evaluations at 0, 1/2 and 3/4 of the step: its error over one step is of order four, so the
    order of the whole stays four. A start where the velocity is undetermined costs the order as it
    does `Heun`.
    """

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        if run.s == 0:
            x, clean = runge_kutta(
                x,
                run,
                nodes=(0.5, 0.75),
                rows=((0.5,), (0.0, 0.75)),
                weights=(2 / 9, 3 / 9, 4 / 9),
            )
        else:
            x, clean = runge_kutta(
                x,
                run,
                nodes=(0.5, 0.5, 1.0),
                rows=((0.5,), (0.0, 0.5), (0.0, 0.0, 1.0)),
                weights=(1 / 6, 2 / 6, 2 / 6, 1 / 6),
            )
        return x, memory, clean


def runge_kutta(
    x: Tensor,
    run: Run,
    nodes: Sequence[float],
    rows: Sequence[Sequence[float]],
    weights: Sequence[float],
) -> tuple[Tensor, Tensor | None]:
    """One step of an explicit method, x_s = x_t + h sum_i b_i v_i, h = s - t.

    v_i = v(x_t + h sum_j a_ij v_j, t + c_i h). ``nodes`` are c, ``rows`` the lines of a, both
    without the first stage, which is at (x_t, t); ``weights`` are b.

    Returns:
        (x_s, clean prediction at t).
    """
    guess = predicted(x, run)
    clean = guess.clean if run.watched else None
    h = run.s - run.t
    slopes = [guess.velocity]
    for node, row in zip(nodes, rows, strict=True):
        stage = replace(run, t=run.s if node == 1 else run.t + node * h)
        slopes.append(predicted(_move(x, float(h), row, slopes), stage).velocity)
    return _move(x, float(h), weights, slopes), clean


def _move(x: Tensor, h: float, weights: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    """x + h sum_i w_i v_i, a new tensor."""
    (first, slope), *rest = [pair for pair in zip(weights, slopes, strict=True) if pair[0]]
    moved = torch.add(x, slope, alpha=h * first)
    for weight, slope in rest:
        moved.add_(slope, alpha=h * weight)
    return moved
