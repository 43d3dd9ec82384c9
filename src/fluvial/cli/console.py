"""What is printed, by the main process alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any


def first() -> bool:
    """Is this the first process that a launcher started on this machine, or the only one?"""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def several() -> bool:
    """Did a launcher start more than one process?"""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def note(text: object) -> None:
    """One line on the standard error."""
    if first():
        complain(text)


def complain(text: object) -> None:
    """One line on the standard error, from every process: each may be the only one to fail."""
    number = "" if first() else f" (process {os.environ.get('RANK')})"
    print(f"fluvial{number}: {' '.join(str(text).split())}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """A result on the standard output."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def show_json(content: Any) -> None:
    """A result on the standard output, as JSON."""
    show(json.dumps(content, indent=2, ensure_ascii=False))


@contextmanager
def only_errors(json: bool) -> Iterator[None]:
    """Within the block what is printed goes to standard error, if JSON is printed after it."""
    if not json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def duration(seconds: float) -> str:
    """Seconds in words."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.2g} s"
