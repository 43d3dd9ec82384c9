"""What the projection of physics-constrained flow matching costs.

    python benchmarks/physics_constrained_flow.py [--rounds N] [--largest N]

* Growth: one Gauss-Newton step under known initial values, the balance of mass and five steps of
  Godunov's scheme together, a field at a time on grids n x n up to 512 x 512 = 2^18 points, and 16
  fields at a time on grids up to 128 x 128 = 2^14. Aim: linear in the number of points: a constant,
  which is what a few hundred calls of torch and SciPy take, and a time a point; where points
  prevail, an exponent of log time in log points of about 1.
* Against a dense Jacobian: the same step, and the whole final projection to max |h| <= 1e-10, at
  the paper's sizes (heat 100 x 100, reaction-diffusion 128 x 100, Burgers 101 x 101), by
  `fluvial.core.steering.projection` and by the algorithm as the paper's code has it: J by reverse
  mode, J J^T and its solution, in double precision. Aim: at most half the time at the same
  residual.

Contestants take turns. Time is CPU time of the thread, the only one, and the lowest of all rounds.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.core.steering.projection import Constraint, gauss_newton, project, stack
from fluvial.physics import pde
from fluvial.physics.constraints import (
    burgers_local,
    burgers_mass,
    initial_condition,
    mass,
    reaction_diffusion_mass,
)

NOISE = KeyedNoise(0)
SIDES = (16, 32, 64, 128, 181, 256, 362, 512)
BATCH = 16
MOST = 2**18
"""Points of all fields together, at most."""


def burgers(n: int, rows: int = 1) -> tuple[Constraint, Tensor]:
    """All three kinds of equations, and fields near the manifold."""
    shape, d = (n, n), 1 / (n - 1)
    fields, _ = pde.burgers_fields(rows, shape, NOISE, place=0.4)
    start = initial_condition(fields[0, :, 0], shape)
    constraint = stack(start, burgers_local(shape, d, d, 5), burgers_mass(shape, d, d))
    return constraint, fields + 0.01 * NOISE.normal(fields, "off")


def paper() -> dict[str, tuple[Constraint, Tensor]]:
    """One field a task, at the paper's sizes."""
    heat, _ = pde.heat_fields(1, (100, 100), NOISE)
    reaction = pde.reaction_fields(1, (128, 100), NOISE)
    found = {
        "heat 100 x 100": (mass((100, 100), 2 * math.pi / 100), heat),
        "reaction 128 x 100": (reaction_diffusion_mass((128, 100), 1 / 128, 1 / 100), reaction),
    }
    cases = {
        name: (
            stack(initial_condition(u[0, :, 0], u.shape[1:]), law),
            u + 0.01 * NOISE.normal(u, "off"),
        )
        for name, (law, u) in found.items()
    }
    cases["Burgers 101 x 101"] = burgers(101)
    return cases


def dense_step(u: Tensor, base: Tensor, constraint: Constraint) -> Tensor:
    """u <- base - J^T (J J^T)^-1 [h(u) + J (base - u)] of one field, J by reverse mode.

    Damped by 1e-12, as the equations of Burgers' task nearly depend on each other.
    """
    jacobian = torch.func.jacrev(lambda v: constraint.residual(v[None])[0], chunk_size=64)(u[0])
    jacobian = jacobian.reshape(constraint.count, -1)
    h = constraint.residual(u)[0] + jacobian @ (base - u).flatten()
    square = jacobian @ jacobian.T + 1e-12 * torch.eye(len(h), dtype=u.dtype)
    factor = torch.linalg.cholesky(square)
    step = jacobian.T @ torch.cholesky_solve(h[:, None], factor)
    return base - step.reshape(u.shape)


def dense_projection(u: Tensor, constraint: Constraint) -> Tensor:
    """By sequential programming, until max |h| <= 1e-10."""
    state = u
    for _ in range(50):
        state = dense_step(state, u, constraint)
        if float(constraint.residual(state).abs().max()) <= 1e-10:
            break
    return state


def projected(u: Tensor, constraint: Constraint) -> Tensor:
    return project(u, constraint).u


def measure(contestants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of a call: the lowest of all rounds, in which the contestants take turns."""
    best = dict.fromkeys(contestants, math.inf)
    gc.disable()
    for k in range(rounds + 1):
        for name, call in contestants.items():
            begin = time.thread_time()
            call()
            if k:  # the first ones warm up, and find the colours and the order of elimination
                best[name] = min(best[name], time.thread_time() - begin)
        gc.collect()
    return {name: 1e3 * seconds for name, seconds in best.items()}


def growth(rounds: int, largest: int) -> None:
    for rows in (1, BATCH):
        points, times = [], []
        for n in [side for side in SIDES if side <= largest and rows * side**2 <= MOST]:
            constraint, u = burgers(n, rows)
            found = measure({"ours": partial(gauss_newton, u, constraint)}, rounds)
            points.append(rows * n * n)
            times.append(found["ours"])
            print(
                f"{rows} field(s), {n} x {n}, {points[-1]} points, {constraint.count} equations: "
                f"{times[-1]:.2f} ms, {1e3 * times[-1] / points[-1]:.2f} us a point",
                flush=True,
            )
        if len(points) < 4:
            continue
        # least squares of relative errors
        design = np.stack([np.ones(len(points)), points], 1) / np.array(times)[:, None]
        constant, each = nnls(design, np.ones(len(points)))[0]
        off = abs((constant + each * np.array(points)) / times - 1).max()
        slope = np.polyfit(np.log(points[-4:]), np.log(times[-4:]), 1)[0]
        print(
            f"{rows} field(s): {constant:.2f} ms + {1e3 * each:.3f} us a point, at most "
            f"{100 * off:.0f} % off; exponent over the last 4 grids {slope:.2f}",
            flush=True,
        )


def against(rounds: int) -> None:
    for name, (constraint, u) in paper().items():
        steps: dict[str, Callable[[], Tensor]] = {
            "ours": partial(gauss_newton, u, constraint),
            "dense": partial(dense_step, u, u, constraint),
        }
        whole: dict[str, Callable[[], Tensor]] = {
            "ours": partial(projected, u, constraint),
            "dense": partial(dense_projection, u, constraint),
        }
        for what, contestants in (("a step", steps), ("projection", whole)):
            worst = {
                side: float(constraint.residual(call()).abs().max())
                for side, call in contestants.items()
            }
            found = measure(contestants, rounds)
            print(
                f"{name}, {constraint.count} equations, {what}: ours {found['ours']:.1f} ms, dense "
                f"{found['dense']:.1f} ms, {found['dense'] / found['ours']:.1f} times; max |h| "
                f"{worst['ours']:.1e} and {worst['dense']:.1e}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=512, help="side of the largest grid")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    growth(arguments.rounds, arguments.largest)
    against(arguments.rounds)


if __name__ == "__main__":
    main()
