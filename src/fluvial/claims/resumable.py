"""The run of a claim as steps that leave files, so that an interrupted one goes on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from fluvial.claims.parallel import side_by_side
from fluvial.training.files import write_json

C = TypeVar("C")


@dataclass
class Resumable(Generic[C]):
    """What the runs of claims share; each has the steps, and reads its data in `__post_init__`.

    Args:
        config: the claim's own; ``side_by_side`` says whether steps may run in two processes.
        out: the folder of the run.
        progress: whether to show any.
    """

    config: C
    out: Path
    progress: bool

    def __post_init__(self) -> None:
        self.started = time.perf_counter()

    def stored(self, name: str, make: Callable[[], Any]) -> Any:
        """What is in the JSON file ``name`` of the folder, made first where there is none."""
        path = self.out / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, make())
        return json.loads(path.read_text(encoding="utf-8"))

    def spent(self) -> float:
        """Seconds of this session and of the ones before it, which the folder keeps."""
        path = self.out / "sessions.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        sessions = [*before, time.perf_counter() - self.started]
        write_json(path, sessions)
        return math.fsum(sessions)

    def each(self, method: str, calls: Sequence[tuple[Any, ...]]) -> None:
        """Call a method with each of ``calls``, in two processes that take every other one, unless
        the configuration says otherwise. What it returns is in files."""
        if not cast(Any, self.config).side_by_side or len(calls) < 2:
            _call(self, method, calls)
            return
        side_by_side(
            _elsewhere,
            # one bar is enough: the processes take about the same time
            [
                (type(self), (self.config, self.out, self.progress and k == 0), method, calls[k::2])
                for k in range(2)
            ],
        )


def _call(run: Resumable[Any], method: str, calls: Sequence[tuple[Any, ...]]) -> None:
    for arguments in calls:
        getattr(run, method)(*arguments)


def _elsewhere(
    kind: Callable[..., Resumable[Any]],
    attributes: tuple[Any, ...],
    method: str,
    calls: Sequence[tuple[Any, ...]],
) -> None:
    _call(kind(*attributes), method, calls)
