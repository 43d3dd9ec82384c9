"""Steps of a claim's run that leave files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fluvial.claims.resumable import Resumable


@dataclass(frozen=True)
class Config:
    side_by_side: bool


@dataclass
class Run(Resumable):
    config: Any
    out: Path
    progress: bool

    def step(self, name: str, value: int) -> int:
        return int(self.stored(f"{name}/step.json", lambda: [value, os.getpid(), self.progress])[0])


def test_a_step_is_done_once(tmp_path: Path) -> None:
    run = Run(Config(False), tmp_path, False)
    assert run.step("a", 1) == 1
    assert run.step("a", 2) == 1, "the file was there"
    run.each("step", [("a", 3), ("b", 4)])
    assert Run(Config(False), tmp_path, False).step("b", 5) == 4


@pytest.mark.parametrize("apart", [False, True])
def test_steps_in_two_processes_leave_the_same(tmp_path: Path, apart: bool) -> None:
    run = Run(Config(apart), tmp_path, True)
    run.each("step", [(name, k) for k, name in enumerate("abc")])
    kept = [run.stored(f"{name}/step.json", lambda: None) for name in "abc"]
    assert [value for value, _, _ in kept] == [0, 1, 2]
    (first, second, third) = (process for _, process, _ in kept)
    assert first == third and (first != second) == apart == (first != os.getpid())
    assert [shown for _, _, shown in kept] == [True, not apart, True]  # one bar


def test_time_adds_up_over_sessions(tmp_path: Path) -> None:
    first = Run(Config(False), tmp_path, False)
    first.started -= 100
    assert 100 <= first.spent() < 110
    second = Run(Config(False), tmp_path, False)
    second.started -= 50
    assert 150 <= second.spent() < 160
