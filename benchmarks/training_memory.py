"""Peak memory of a training next to that of a loop written by hand.

    python benchmarks/training_memory.py [--width W] [--steps N]

Each figure is a process of its own: a DiT of 20 M parameters by default, batch 8, fused AdamW. The
loop by hand keeps no averages and writes nothing. The trainer is a whole call of `train`, with its
last checkpoint and weights if it has a folder. The peak is that of the resident set (Linux) above
what it was before the network was made. A small training of the same kind runs first, so that the
code it loads is not counted (6 MB more for the trainer, whatever the network), and the C library
returns every large block at once (MALLOC_MMAP_THRESHOLD_), so that what is resident is in use.

Aim: at most the loop by hand and one copy of the weights for each average.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from fluvial.data import animals
from fluvial.images import MeanFlow, TimePairs
from fluvial.networks import DiT
from fluvial.training.loop import Stage, Training, train

BATCH = 8
SMALL = 24  # width of the network that warms up
RATES = (0.999, 0.9995, 0.9999)


def status(name: str) -> float:
    """A line of /proc/self/status, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"/proc/self/status has no {name}: this benchmark needs Linux")


def network(width: int) -> DiT:
    return DiT(size=28, channels=1, patch=7, width=width, depth=7, heads=6)


def by_hand(width: int, steps: int) -> None:
    images = animals().x.float() / 127.5 - 1
    ready()
    net = network(width)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
    for _ in range(steps):
        x0 = images[torch.randint(len(images), (BATCH,))]
        t, noise = torch.rand(BATCH), torch.randn_like(x0)
        velocity = noise - x0
        error = net(x0 + t[:, None, None, None] * velocity, t) - velocity
        error.square().flatten(1).sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def trainer(width: int, steps: int, rates: int, checkpoint_every: int | None) -> None:
    data = animals()
    ready()
    model = MeanFlow(network(width), times=TimePairs(ratio=0.0), p=0.0, format=data.format)
    training = Training(
        steps=steps,
        batch_size=BATCH,
        ema=RATES[:rates],
        checkpoint_every=checkpoint_every or steps,
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        out = Path(folder) if checkpoint_every else None
        train(Stage(model, {"x": data.x}, training), out=out)


def ready() -> None:
    """Begin to measure: what the process holds, and its peak, are counted from here."""
    global before
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident


before = 0.0


def measured(*arguments: object) -> float:
    """MB at the peak of a process of its own."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    command = [sys.executable, __file__, "--worker", json.dumps(arguments)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        torch.set_num_threads(1)
        arguments = json.loads(options.worker)
        run: Callable[..., None] = by_hand if len(arguments) == 2 else trainer
        run(SMALL, *arguments[1:])
        run(*arguments)
        print(status("VmHWM") - before)
        return

    width, steps = options.width, options.steps
    parameters = sum(value.numel() for value in network(width).parameters())
    copy = 4 * parameters / 1e6
    base = measured(width, steps)
    print(
        f"DiT of {parameters / 1e6:.1f} M parameters ({copy:.0f} MB a copy), batch {BATCH}, "
        f"{steps} steps, torch {torch.__version__}"
    )
    print(f"{'':44} {'peak, MB':>9} {'aim, MB':>9} {'copies above':>13}")
    print(f"{'by hand':44} {base:9.0f}")
    for rates in (1, 3):
        for every, name in (
            (None, "no folder"),
            (steps, "last checkpoint"),
            (2, "a checkpoint every 2 steps"),
        ):
            peak, aim = measured(width, steps, rates, every), base + rates * copy
            print(
                f"{f'trainer, {rates} average(s), {name}':44} {peak:9.0f} {aim:9.0f} "
                f"{(peak - base) / copy:13.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
