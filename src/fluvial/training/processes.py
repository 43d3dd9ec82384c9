"""Work spread over the processes that `accelerate launch` or `torchrun` started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

FSDP_CONFIG = Path(__file__).with_name("fsdp.yaml")
"""For ``accelerate launch --config_file``: weights spread over processes, for large models."""


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
    if processes == 1:
        return draw(torch.arange(num))
    # equal shares, the last rows drawn twice: a sharded model needs every process in every call
    share = -(-num // processes)
    rows = torch.arange(here * share, (here + 1) * share).clamp(max=num - 1)
    return gather(draw(rows).contiguous())[:num]


def process() -> tuple[int, int]:
    """(number of this process, number of processes)."""
    from accelerate import PartialState

    state = PartialState()
    return state.process_index, state.num_processes


def is_main() -> bool:
    """Is this the process that writes files and prints?"""
    return process()[0] == 0


def on_main(work: Callable[[], T]) -> T | None:
    """Call ``work`` on the main process while the others wait for it."""
    from accelerate import PartialState

    result = work() if is_main() else None
    PartialState().wait_for_everyone()
    return result
