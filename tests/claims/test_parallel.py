"""Processes side by side."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from fluvial.claims.parallel import side_by_side, threads_each


def test_every_call_is_made(tmp_path: Path) -> None:
    side_by_side(Path.write_text, [(tmp_path / name, name) for name in ("a", "b")])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "a", "b": "b"}


def test_a_failure_is_passed_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="1 of 2 processes failed"):
        side_by_side(Path.read_text, [(Path(__file__),), (tmp_path / "missing",)])
    assert "FileNotFoundError" in capfd.readouterr().err


def test_an_interruption_reaches_every_process() -> None:
    begin = time.monotonic()
    # to this process alone, not to its group as a terminal would send it
    timer = threading.Timer(6.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        side_by_side(time.sleep, [(600,), (600,)])
    timer.join()
    assert time.monotonic() - begin < 300


def test_threads_are_shared_out() -> None:
    assert threads_each(1) == torch.get_num_threads()
    assert threads_each(10_000) == 1
