"""A run that is killed, at any moment, ends with the bits of one that was not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fluvial.core.noise import KeyedNoise

from .runs import SCRIPT, assert_same_run, finish, start, step_of

PARTS = ("--accumulation", "3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    finish(start(folder, *PARTS))
    return folder


def test_killed_at_random_moments_and_resumed(whole: Path, tmp_path: Path) -> None:
    """Most of the time passes inside an accumulation: there is a pause in every part of a batch."""
    # another draw every day, and the same all day
    draw = KeyedNoise(int(time.time()) // 86_400).uniform(torch.empty(4)).tolist()
    done, numbers = 0, (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP)
    for share, number in zip(draw, numbers, strict=True):
        process = start(tmp_path, *PARTS, "--pause", "0.002")
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.1 + 0.2 * share)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        # where the signal came before the training began, Python's own way to die is kept
        wanted = {
            signal.SIGINT: (1, 130, -signal.SIGINT),
            signal.SIGTERM: (128 + signal.SIGTERM, -signal.SIGTERM),
            signal.SIGKILL: (-signal.SIGKILL,),
            signal.SIGHUP: (128 + signal.SIGHUP, -signal.SIGHUP),
        }
        assert process.returncode in wanted[number], (draw, errors)
        if (tmp_path / "checkpoints").exists():
            assert step_of(tmp_path) >= done, draw
            done = step_of(tmp_path)
    finish(start(tmp_path, *PARTS))
    assert_same_run(whole, tmp_path)


def test_a_kill_in_the_middle_of_a_write(whole: Path, tmp_path: Path) -> None:
    """The process dies when half of a checkpoint's bytes are on the disk."""
    code = f"""
import os, runpy, sys
from contextlib import contextmanager
from fluvial.training import files

before = files.atomic

@contextmanager
def atomic(path):
    with before(path) as temporary:
        yield temporary
        if "step-00000051" in str(path):
            data = temporary.read_bytes()
            temporary.write_bytes(data[: len(data) // 2])
            os._exit(9)

files.atomic = atomic
sys.argv = ["script", {str(tmp_path)!r}, "--accumulation", "3"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 9
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names[1:] == ["step-00000017.pt", "step-00000034.pt"]
    assert names[0].startswith(".step-00000051.pt")
    finish(start(tmp_path, *PARTS))
    assert_same_run(whole, tmp_path)
    assert not list((tmp_path / "checkpoints").glob(".*"))
