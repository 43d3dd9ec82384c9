"""Work spread over the processes that `accelerate launch` or `torchrun` started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")

FSDP_CONFIG = Path(__file__).with_name("fsdp.yaml")
"""For ``accelerate launch --config_file``: weights spread over processes, for large models."""

ON_CPU = {} if torch.accelerator.is_available() else {"cpu": True}
"""What `accelerate` has to be told on a machine that has nothing but its CPU."""


def sample_across(draw: Callable[[Tensor], Tensor], num: int) -> Tensor:
    """Samples of rows 0 ... num - 1, every process drawing its share; all get all of them.

    With keyed noise they are the samples of one process, but for the last bits of the network's
    arithmetic in batches of another size::

        sample_across(lambda rows: model.sample(len(rows), noise=noise.rows(rows)), 50_000)

    Args:
        draw: takes row numbers (n,), gives the samples (n, *event) of those rows.
        num: how many.
    """
    from accelerate.utils import gather

    here, processes = process()
    if processes == 1 or num == 0:
        return draw(torch.arange(num))
    # equal shares, the last rows drawn twice: a sharded model needs every process in every call
    share = -(-num // processes)
    rows = torch.arange(here * share, (here + 1) * share).clamp(max=num - 1)
    return gather(draw(rows).contiguous())[:num]


def process() -> tuple[int, int]:
    """(number of this process, number of processes)."""
    from accelerate import PartialState

    # without a device of theirs processes that were launched would each believe to be alone
    state = PartialState(**ON_CPU)
    return state.process_index, state.num_processes


def is_main() -> bool:
    """Is this the process that writes files and prints?"""
    return process()[0] == 0


def shared(work: Callable[[], T]) -> T:
    """What ``work`` gives on the main process, on every process; so are its mistakes."""
    from accelerate.utils import broadcast_object_list

    answer: list[Any] = [None, None]
    if is_main():
        try:
            answer[0] = work()
        except (OSError, ValueError) as error:
            answer[1] = error
    broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return cast(T, answer[0])
