"""What a step count costs on the model at hand: schemes beside a fine run on the same motion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.protocols import Field, Noise
from fluvial.core.simulate import simulate
from fluvial.dynamics.wasserstein_samplers.brownian import SharedBrownian
from fluvial.dynamics.wasserstein_samplers.clock import clock_grid
from fluvial.dynamics.wasserstein_samplers.sampler import SCHEMES, Scheme, WassersteinSampler


@torch.no_grad()
def shared_runs(
    field: Field,
    x: Float[Tensor, "batch *event"],
    *,
    path: AlphaSigmaPath,
    noise: Noise,
    counts: Mapping[Scheme, Sequence[int]],
    cells: int,
    grid: Callable[[int], Tensor] | None = None,
    hessian: Literal["auto", "dense", "jvp"] = "auto",
    order: int = 6,
    **cond: Any,
) -> tuple[Tensor, dict[tuple[Scheme, int], Tensor]]:
    """(reference, states by scheme and number of steps), all from ``x`` and by one motion.

    The reference is ``"so-jvp"`` in ``cells`` steps. Its own error is about that of half as many
    steps, divided by 2: ask for those too where it matters. The midpoint schemes ask for no score
    at times below the last that the reference asks for.

    Args:
        field: any, along ``path``.
        x: states where the grids begin.
        path: of the field.
        noise: keyed noise, of the motion and of what the schemes draw besides.
        counts: numbers of steps by scheme; each divides ``cells``.
        cells: steps of the reference.
        grid: pairs of a number of steps; by default `clock_grid` to the end of the path. The times
            of fewer steps must be among those of ``cells`` steps.
        hessian, order: of ``"so"``.
        **cond: passed on to the field.

    Raises:
        ValueError: a count does not divide ``cells``; times that are not among those of the cells.
    """
    odd = sorted({n for values in counts.values() for n in values if n < 1 or cells % n})
    if odd:
        raise ValueError(f"counts must divide cells = {cells}, got {odd}")
    grid = partial(clock_grid, path) if grid is None else grid
    finest = grid(cells)
    brownian = SharedBrownian(noise.at(0), x, path, finest)
    t_min = float(finest[-1, 0])
    simulated: Any = simulate  # whose parts take any state, and these only tensors

    def run(scheme: Scheme, steps: int) -> Tensor:
        sampler = WassersteinSampler(
            scheme, hessian=hessian, order=order, t_min=t_min, brownian=brownian
        )
        return simulated(x, grid(steps), sampler, path, field, noise.at(1), **cond)

    runs = {(scheme, n): run(scheme, n) for scheme, values in counts.items() for n in values}
    return run("so-jvp", cells), runs


def strong_errors(
    field: Field,
    x: Float[Tensor, "batch *event"],
    *,
    schemes: Sequence[Scheme] = SCHEMES,
    counts: Sequence[int],
    **options: Any,
) -> dict[Scheme, dict[int, float]]:
    """sqrt(E |x - reference|^2) by scheme and number of steps, |.| the norm of an event.

    A bound on the Wasserstein-2 distance between what the scheme makes and what steps without end
    would make of the same field; of the field's own error it says nothing.

    Args:
        schemes, counts: which, and in how many steps each.
        **options: of `shared_runs`: ``path``, ``noise`` and ``cells`` at least.
    """
    reference, runs = shared_runs(
        field, x, counts={scheme: tuple(counts) for scheme in schemes}, **options
    )
    return {
        scheme: {n: strong_error(runs[scheme, n], reference) for n in counts} for scheme in schemes
    }


def strong_error(x: Tensor, reference: Tensor) -> float:
    """sqrt(E |x - reference|^2)."""
    return float((x - reference).double().flatten(1).square().sum(1).mean().sqrt())
