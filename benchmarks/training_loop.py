"""A flow-matching step through the whole trainer next to a loop written by hand.

    python benchmarks/training_loop.py [--steps N] [--threads N]

Both sides train the same DiT of 1 M parameters on the animals (batch 64, fused AdamW, an average of
the weights at 0.999) and log the loss every 50 steps. The trainer is one call of `train` with its
progress bar, its folder and its signal handlers. The loop by hand is a careful one: images scaled
once, beforehand, time and noise from torch's generator, the average by one fused call.

They take turns in blocks of steps within one process: the loop by hand runs inside the trainer's
hook `after_step`, off its clock. Wall time is what matters, but includes waiting for the other
programs of a busy machine; CPU time does not. A ratio is the median of those of neighbouring
blocks, with their quartiles; beside it the ratio of the fastest tenths, and that of whole calls,
start to end: optimiser, averages, logs, the last checkpoint and the weights, of which the loop by
hand writes none. What the trainer adds to a step, in ms, is seen best with a network so small that
its noise does not hide it.

Aim: at most 1.05 times the loop by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from fluvial.data import animals
from fluvial.data.format import Format
from fluvial.images import MeanFlow, TimePairs
from fluvial.networks import DiT
from fluvial.training.loop import LOG_EVERY, Stage, Training, train

AIM = 1.05
BLOCK = 2  # steps of a turn
BATCH = 64
RATE = 1e-3
EMA = 0.999


def network(width: int = 128, depth: int = 3) -> DiT:
    return DiT(size=28, channels=1, patch=7, width=width, depth=depth, heads=4)


def small() -> DiT:
    """For what the loops themselves cost."""
    return network(16, 1)


def recipe(steps: int, clip: float | None) -> Training:
    # of the checkpoints only the last: what one costs is the business of checkpoint_write.py
    return Training(
        steps=steps, batch_size=BATCH, lr=RATE, ema=EMA, clip=clip, checkpoint_every=steps
    )


def by_hand(
    net: nn.Module, images: Tensor, clip: float | None, log: io.TextIOBase
) -> Callable[[], None]:
    """One step of the loop that a practitioner writes. ``images``: scaled, float32."""
    parameters: list[Tensor] = list(net.parameters())
    optimizer = torch.optim.AdamW(parameters, RATE, (0.9, 0.95), weight_decay=0.0, fused=True)
    averages = [value.detach().clone() for value in parameters]
    rows, total, count = by_hand_batches(len(images)), torch.zeros(()), 0

    def step() -> None:
        nonlocal count
        x0 = images[next(rows)]
        t = torch.sigmoid(torch.randn(len(x0)) - 0.4)
        noise = torch.randn_like(x0)
        velocity = noise - x0
        error = net(x0 + t[:, None, None, None] * velocity, t) - velocity
        loss = error.square().flatten(1).sum(1).mean()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            decay = min(EMA, (1 + count) / (10 + count))
            torch._foreach_lerp_(averages, parameters, 1 - decay)
        total.add_(loss.detach())
        count += 1
        if count % LOG_EVERY == 0:
            log.write(json.dumps({"step": count, "loss": float(total) / LOG_EVERY}) + "\n")
            total.zero_()

    return step


def by_hand_batches(rows: int) -> Iterator[Tensor]:
    while True:
        yield from torch.randperm(rows)[: rows // BATCH * BATCH].split(BATCH)


CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time}


def now() -> list[float]:
    return [clock() for clock in CLOCKS.values()]


class Turns(MeanFlow):
    """A flow matching that after every block of its steps runs as many of another loop."""

    other: Callable[[], None]

    def prepare(self, other: Callable[[], None]) -> None:
        self.other, self.steps = other, 0
        self.moments: list[list[float]] = []  # at the ends of all blocks, ours and theirs

    def after_step(self) -> None:
        self.steps += 1
        if self.steps % BLOCK == 0:
            self.moments.append(now())
            for _ in range(BLOCK):
                self.other()
            self.moments.append(now())


def in_turns(
    levels: Tensor,
    format: Format,
    training: Training,
    build: Callable[[], nn.Module],
    make: Callable[[nn.Module], Callable[[], None]],
) -> dict[str, str]:
    """The trainer against the loop whose step ``make`` makes: a row of figures for each clock."""
    make(build())()  # the first step of a process imports parts of torch
    begin = now()
    other = make(build())
    made = now()
    model = Turns(build(), times=TimePairs(ratio=0.0), p=0.0, format=format)
    model.prepare(other)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        train(Stage(model, {"x": levels}, training), out=Path(folder))
        end = now()
    rows = {}
    for k, name in enumerate(CLOCKS):
        times = [moment[k] for moment in model.moments]
        blocks = [1e3 * (b - a) / BLOCK for a, b in itertools.pairwise(times)]
        theirs, ours = blocks[2::2], blocks[1::2]  # the first two blocks warm up
        added = statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
        low, middle, high = statistics.quantiles(
            (a / b for a, b in zip(ours, theirs, strict=True)), n=4
        )
        fast = statistics.quantiles(ours, n=10)[0] / statistics.quantiles(theirs, n=10)[0]
        whole = sum(b - a for a, b in zip(times[::2], times[1::2], strict=True))
        whole_ratio = (end[k] - made[k] - whole) / (made[k] - begin[k] + whole)
        rows[name] = (
            f"{statistics.median(ours):8.1f} {statistics.median(theirs):8.1f} {added:7.2f} "
            f"{middle:8.3f} {low:7.3f} - {high:5.3f} {fast:8.3f} {whole_ratio:8.3f}"
        )
    return rows


HEADER = f"{'ours':>8} {'theirs':>8} {'added':>7} {'ratio':>8} {'quartiles':>15} {'fastest':>8}"
HEADER += f" {'whole':>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    begin = time.perf_counter()
    import accelerate  # noqa: F401 (the first training does)

    print(f"import accelerate, once a process: {time.perf_counter() - begin:.1f} s")
    data = animals()
    images = data.x.float() / 127.5 - 1
    size = sum(value.numel() for value in network().parameters())
    print(
        f"DiT of {size / 1e6:.2f} M parameters, batch {BATCH}, {options.steps} steps, torch "
        f"{torch.__version__}, {options.threads} thread(s); ms a step"
    )
    print(f"{'':24} {HEADER}")
    for build, clip, name, aim in (
        (network, None, "1 M, no clipping", f"   aim <= {AIM}"),
        (network, 1.0, "1 M, clipped at 1", f"   aim <= {AIM}"),
        (small, None, "small, no clipping", ""),
    ):
        rows = in_turns(
            data.x,
            data.format,
            recipe(options.steps, clip),
            build,
            lambda net: by_hand(net, images, clip, io.StringIO()),  # noqa: B023 (called at once)
        )
        for clock, row in rows.items():
            print(f"{f'{name}, {clock}':24} {row}{aim}", flush=True)


if __name__ == "__main__":
    main()
