"""The scale of a denoiser by time: sides of windows, or thresholds, that match a target best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from fluvial.core.gaussian.fields import ends, predict
from fluvial.core.gaussian.multistep import DDIM
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Field, Run
from fluvial.core.simulate import simulate
from fluvial.images.locality.denoiser import Denoiser
from fluvial.images.locality.locality import LocalityDenoiser
from fluvial.images.locality.patches import LocalScoreMachine

Scaled: TypeAlias = LocalScoreMachine | LocalityDenoiser
"""A denoiser with an ``at_scale``: of k, or of tau."""


@torch.no_grad()
def calibrate_scales(
    denoiser: Scaled,
    states: Mapping[float, Tensor],
    target: Field | Tensor,
    *,
    scales: Sequence[Any] | None = None,
    growing: bool = False,
) -> dict[float, Any]:
    """The scale of every time at which a denoiser matches a target best.

    The result is a mapping ``{t: k}`` or ``{t: tau}`` for ``denoiser.at_scale``.

    Args:
        denoiser: a local or equivariant score machine, or a `LocalityDenoiser`.
        states: by time, (batch, *event): noisy validation images, or `trajectory` of a network; 10
            to 20 rows, at 20 times, are what published calibrations use.
        target: a field, whose noise prediction is to be matched: by the median cosine over the
            rows. Or the clean images of the states: by the mean squared error.
        scales: candidates, from the most local to the least. By default k = 3, 5, ..., 17, as far
            as windows that wrap around fit the images, or tau = 0.5, 0.2, 0.1, 0.05, 0.02, 0.01,
            0.005, 0.002.
        growing: let scales grow with the noise, as published for the equivariant machine: from the
            scale of the time before, on for as long as the match does not get worse.

    Raises:
        ValueError: no states, no candidates.
    """
    if scales is None:
        scales = (
            [k for k in range(3, 18, 2) if k <= denoiser.largest]
            if isinstance(denoiser, LocalScoreMachine)
            else (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
        )
    if not states or not len(scales):
        raise ValueError(f"need states and scales, got {len(states)} and {len(scales)}")
    chosen, first = {}, 0
    for t in sorted(states):
        best, at = -float("inf"), first
        for number in range(first, len(scales)):
            score = _score(cast(Any, denoiser).at_scale(scales[number]), states[t], t, target)
            if score > best:
                best, at = score, number
            elif growing and score < best:  # masks of different tau may be the same
                break
        chosen[t] = scales[at]
        first = at if growing else 0
    return chosen


def _score(denoiser: Denoiser, x: Tensor, t: float, target: Field | Tensor) -> float:
    """The larger, the better."""
    time = torch.tensor(t, dtype=torch.float64)
    clean = denoiser(x, time)
    if isinstance(target, Tensor):
        return -float((clean - target).square().mean())
    ours = ends("clean", clean, x, time, denoiser.path)[1]
    theirs = ends(*predict(target, x, time), x, time, denoiser.path)[1]
    return float(torch.cosine_similarity(ours.flatten(1), theirs.flatten(1)).median())


@torch.no_grad()
def trajectory(field: Field, x: Tensor, pairs: Tensor, path: Any) -> dict[float, Tensor]:
    """The states of `DDIM` before every step, by time.

    Args:
        field: of any kind.
        x: (batch, *event), at ``pairs[0, 0]``.
        pairs: (K, 2) falling times.
        path: the field's.
    """
    watch = _Watched(DDIM())
    simulate(x, pairs, watch, path, field, KeyedNoise(0))
    return watch.states


class _Watched:
    """A sampler that keeps what it was given."""

    def __init__(self, sampler: DDIM) -> None:
        self.sampler, self.states = sampler, dict[float, Tensor]()

    def start(self, x: Tensor) -> Any:
        return self.sampler.start(x)

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        self.states[float(run.t)] = x
        return self.sampler.step(x, memory, run)
