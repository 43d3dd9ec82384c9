"""Editing an input with a field: noise it part of the way and come back; keep a part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fluvial.core.protocols import Field, Noise, Path, Run, Sampler, State, Steering
from fluvial.core.simulate import simulate
from fluvial.core.time import check_pairs


def sdedit(
    x: Tensor,
    pairs: Tensor,
    sampler: Sampler,
    path: Path,
    field: Field,
    noise: Noise,
    steer: Steering | None = None,
    **cond: Any,
) -> State:
    """SDEdit: x_t ~ q(x_t | x_0 = x) at t = ``pairs[0, 0]``, then simulated along ``pairs``.

    The earlier the start, the more of ``x`` is kept; from a start at 1 nothing is, on a path that
    ends in pure noise. Conditions say what to make of it.

    Args:
        x: (batch, *event), the input to edit: a photo, a sketch, a sample of another field.
        pairs: such as ``uniform_grid(25, start=0.5)``.
        sampler, path, field, noise, steer, cond: as in `fluvial.core.simulate.simulate`.

    Raises:
        ValueError: as `fluvial.core.simulate.simulate`.

    Citation: Meng et al., ICLR 2022.
    """
    check_pairs(pairs)
    # seldom does a simulation have so many steps that its draws would be these
    start = path.sample(x, pairs.double()[0, 0].cpu(), noise, **cond).x
    return simulate(start, pairs, sampler, path, field, noise, steer, **cond)


@dataclass
class Inpainting(Steering):
    """Known coordinates replace those of every clean prediction, and of the sample, exactly.

        x_hat <- mask * known + (1 - mask) * x_hat

    `DDNM` with a mask as its operator. `RePaint` and `PiGDM` also serve masks, and make the two
    regions agree better, at a higher price.

    Args:
        known: (batch, *event), or (1, *event) for all rows; any finite value where not known.
        mask: bool, broadcasts against ``known``; True where known.

    Raises:
        TypeError: ``mask`` is not bool, or either is not a tensor.
        ValueError: the shapes do not broadcast, or a known value is not finite; in a call, a state
            of another shape than ``known``.
    """

    known: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        for name, value in (("known", self.known), ("mask", self.mask)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
        if self.mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool, got {self.mask.dtype}")
        try:
            values = self.known[self.mask.expand_as(self.known)]
        except RuntimeError:
            raise ValueError(
                f"mask {tuple(self.mask.shape)} must broadcast to known {tuple(self.known.shape)}"
            ) from None
        if not bool(values.isfinite().all()):
            raise ValueError("known must be finite where mask is True")

    def clean(self, clean: State, x: State, aim: Any, run: Run) -> State:
        return self.end(clean, aim)

    def end(self, x0: State, aim: Any) -> State:
        x0 = cast(Tensor, x0)
        shape = self.known.shape
        if shape[1:] != x0.shape[1:] or shape[0] not in (1, len(x0)):
            raise ValueError(
                f"known must have the shape of the state, {tuple(x0.shape)}, or one row, "
                f"got {tuple(shape)}"
            )
        return torch.where(self.mask.to(x0.device), self.known.to(x0), x0)
