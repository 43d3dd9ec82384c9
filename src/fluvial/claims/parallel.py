"""Arms of a claim trained at the same time: they share the machine's good and bad minutes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch


def side_by_side(function: Callable[..., object], calls: Sequence[tuple[Any, ...]]) -> None:
    """Run ``function(*arguments)`` for every call, each in a process of its own.

    The cores are shared out evenly. On Ctrl-C the processes are interrupted and waited for, so
    that each can leave its checkpoint.

    Args:
        function: importable by its name; leaves its results in files.
        calls: arguments, picklable.

    Raises:
        RuntimeError: a process failed; what it said is on the standard error.
    """
    threads = threads_each(len(calls))
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_call, args=(function, arguments, threads)) for arguments in calls
    ]
    started = []
    try:
        for process in processes:
            process.start()
            started.append(process)
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in started:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGINT)
        for process in started:
            process.join()
        raise
    failed = [process.exitcode for process in processes if process.exitcode]
    if INTERRUPTED in failed:
        raise KeyboardInterrupt
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(processes)} processes failed, see above")


INTERRUPTED = 130


def threads_each(count: int) -> int:
    """Threads of each of ``count`` processes that share the machine."""
    return max(1, torch.get_num_threads() // count)


def _call(function: Callable[..., object], arguments: tuple[Any, ...], threads: int) -> None:
    torch.set_num_threads(threads)
    try:
        function(*arguments)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
