"""The one loop that every sampler runs in, and the ancestral sampler."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from fluvial.core.arguments import kind_of
from fluvial.core.protocols import (
    Field,
    Noise,
    Path,
    Run,
    Sampler,
    State,
    Steering,
    batch_size,
    take,
)
from fluvial.core.time import check_pairs


def simulate(
    x: State,
    pairs: Tensor,
    sampler: Sampler,
    path: Path,
    field: Field,
    noise: Noise,
    steer: Steering | None = None,
    **cond: Any,
) -> State:
    """Carry ``x`` through ``pairs`` of times.

    Step ``k`` takes the state from ``t`` to ``s`` with the draws of ``noise.at(k)``, so the result
    for a row does not depend on the batch it sits in. Times reach the parts as float64 scalars on
    the host: schedules are exact to double precision, and no step waits for an accelerator.
    Gradients flow through all steps, though not to ``pairs``; call under ``torch.no_grad()`` where
    none are wanted.

    Args:
        x: the state at ``pairs[0, 0]``, usually `Path.source`.
        pairs: (K, 2), each row (t, s) in [0, 1]. s < t generates, s > t encodes, s = t is a step of
            a Markov chain. Times may repeat, rise and fall, but each step starts where the one
            before it ended.
        sampler: how one pair is stepped.
        path: how data becomes noise.
        field: what is predicted at (x, t).
        noise: keyed noise; rows default to 0 .. batch - 1.
        steer: hooks that bend the simulation; none by default.
        **cond: passed on to the field and to the path.

    Returns:
        ``path.readout`` of the last state, after ``steer.end``.

    Raises:
        TypeError: ``sampler`` is a class.
        ValueError: ``pairs`` is empty, not (K, 2), not finite, outside [0, 1] or not a chain; the
            leaves of ``x`` disagree about the batch size.
    """
    if isinstance(sampler, type):
        raise TypeError(f"sampler must be an instance, got {kind_of(sampler)}: call it")
    check_pairs(pairs)
    batch_size(x)
    steer = Steering() if steer is None else steer

    field = steer.bend(field)
    memory, aim = sampler.start(x), steer.start(x)
    times = torch.cat([pairs[:1, 0], pairs[:, 1]]).detach().double().cpu().unbind()
    watches = getattr(steer.after, "__func__", None) is not Steering.after
    last = len(pairs) - 1
    for k, (t, s) in enumerate(pairwise(times)):
        watched = watches or k == last
        run = Run(path, field, _AtStep(noise, k), k, t, s, cond, steer, aim, watched)
        x, memory, clean = sampler.step(x, memory, run)
        if watches:
            x, aim, kept = steer.after(x, cast(State, clean), aim, run)
            if kept is not None:
                memory, clean = take(memory, kept), take(clean, kept)
    return steer.end(path.readout(x, clean), aim)


class _AtStep:
    """``noise.at(step)``, worked out when something is drawn: most steps of an ODE draw nothing."""

    def __init__(self, noise: Noise, step: int) -> None:
        self.noise, self.step = noise, step

    def normal(self, like: Tensor, tag: str = "") -> Tensor:
        return self.noise.at(self.step).normal(like, tag)

    def uniform(self, like: Tensor, tag: str = "") -> Tensor:
        return self.noise.at(self.step).uniform(like, tag)

    def categorical(self, probs: Tensor, tag: str = "") -> Tensor:
        return self.noise.at(self.step).categorical(probs, tag)

    def at(self, step: int) -> Noise:
        return self.noise.at(self.step).at(step)

    def rows(self, ids: Tensor) -> Noise:
        return self.noise.at(self.step).rows(ids)


class Ancestral:
    """Predict the clean end, then draw from the path's posterior: x_s ~ q(x_s | x_t, x̂_0(x_t, t)).

    With the path's own posterior this is DDPM (Ho et al., NeurIPS 2020), image-to-image bridges,
    absorbing and uniform discrete diffusion, and every other method that is simulated by
    re-noising its best guess. Where s > t the step is the path's transition, x_s ~ q(x_s | x_t):
    restarts and encoding. Where s = t it changes nothing.
    """

    def start(self, x: State) -> None:
        return None

    def step(self, x: State, memory: Any, run: Run) -> tuple[State, Any, State]:
        if run.field.predicts != "clean":
            raise ValueError(
                f"Ancestral needs a field that predicts 'clean', got {run.field.predicts!r}; the "
                "convert(field, 'clean', path) of the kind of path makes one"
            )
        clean = run.clean(run.field(x, run.t, **run.cond), x)
        if run.s > run.t:
            x = run.path.transition(x, run.t, run.s, run.noise, **run.cond)
        else:
            x = run.path.posterior(x, clean, run.t, run.s, run.noise, **run.cond)
        return x, memory, clean
