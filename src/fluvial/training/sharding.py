"""Weights that may be spread over processes (fully sharded data parallel), as if they were not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fluvial.core.protocols import Objective


def sharded(value: Tensor) -> bool:
    """Is this a DTensor? Asked without importing them, which takes a second."""
    return hasattr(value, "full_tensor")


def local(value: Any) -> Tensor:
    """The part of a tensor that this process holds."""
    return value.to_local() if sharded(value) else value


def full(value: Any) -> Tensor:
    """The whole of a tensor that may be sharded. Every process has to ask."""
    return value.full_tensor() if sharded(value) else value


@torch.no_grad()
def put(value: Any, whole: Tensor) -> None:
    """Overwrite a tensor, which may be sharded, by a whole one that every process has."""
    if sharded(value):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = value.device_mesh, value.placements
        whole = distribute_tensor(whole.to(value.device), mesh, placements, src_data_rank=None)
    value.copy_(whole)


def whole_state(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: full(value.detach()) for name, value in weights.items()}


@contextmanager
def gathered(objective: Any) -> Iterator[None]:
    """Within the block the layers of a sharded objective may be called one by one."""
    if hasattr(objective, "unshard"):
        objective.unshard()
    try:
        yield
    finally:
        if hasattr(objective, "reshard"):
            objective.reshard()


def put_state(objective: Objective, weights: Mapping[str, Tensor]) -> None:
    live = objective.state_dict(keep_vars=True)
    if not any(map(sharded, live.values())):
        objective.load_state_dict(weights)
        return
    for name, value in live.items():
        put(value, weights[name])


def optimizer_state(objective: Objective, optimizer: torch.optim.Optimizer) -> Any:
    if not any(map(sharded, objective.parameters())):
        return optimizer.state_dict()
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True)
    return state_dict.get_optimizer_state_dict(objective, optimizer, options=options)


def load_optimizer(objective: Objective, optimizer: torch.optim.Optimizer, saved: Any) -> None:
    spread = any(map(sharded, objective.parameters()))
    # that of spread weights is filed under the names of parameters, else under their numbers
    if spread != any(isinstance(key, str) for key in saved["state"]):
        was = "whole" if spread else "sharded"
        raise ValueError(f"the checkpoint is of a training with {was} weights: go on with such")
    if not spread:
        optimizer.load_state_dict(saved)
        return
    from torch.distributed.checkpoint import state_dict

    # a parameter that no batch has used yet has no state
    options = state_dict.StateDictOptions(full_state_dict=True, strict=False)
    state_dict.set_optimizer_state_dict(objective, optimizer, saved, options=options)
