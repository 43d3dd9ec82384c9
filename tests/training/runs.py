"""Compare runs, and start them in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluvial.training.files import load_checkpoint, load_model

SCRIPT = Path(__file__).with_name("script.py")


def latest(out: Path) -> Path:
    return max((out / "checkpoints").glob("step-*.pt"))


def step_of(out: Path) -> int:
    return load_checkpoint(latest(out))["state"]["step"]


def metrics(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without their times."""
    timed = {"seconds", "rows_per_second"}
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in timed} for line in lines]


def weights(out: Path) -> dict[str, dict[str, Tensor]]:
    return {path.stem: load_model(path)[0] for path in (out / "weights").iterdir()}


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, Mapping):
        assert a.keys() == b.keys()
        for name in a:
            assert_same(a[name], b[name])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, two in zip(a, b, strict=True):
            assert_same(one, two)
    else:
        assert a == b


def assert_same_run(one: Path, two: Path) -> None:
    a, b = load_checkpoint(latest(one)), load_checkpoint(latest(two))
    assert a["state"].pop("seconds") > 0 and b["state"].pop("seconds") > 0
    assert_same(a, b)
    assert metrics(one) == metrics(two)
    assert_same(weights(one), weights(two))


def start(out: Path, *options: str, processes: int = 1) -> subprocess.Popen[str]:
    """`script.py` in a process, or in several."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return subprocess.Popen(
        [sys.executable, *(several if processes > 1 else []), str(SCRIPT), str(out), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",
        },
    )


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
