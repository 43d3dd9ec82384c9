"""A MeanFlow training step against a flow-matching step of the same DiT, in one run.

Prints medians of interleaved steps (forward, backward, optimiser) and their ratio for several
shares of rows that need the Jacobian-vector product, eager and with the network compiled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from fluvial.core.noise import KeyedNoise
from fluvial.images import MeanFlow, TimePairs
from fluvial.networks import DiT

STEPS = 12
CASES = {
    "DiT of the laptop preset": (
        {"size": 28, "channels": 1, "patch": 7, "width": 128, "depth": 3, "heads": 4},
        64,
    ),
    "DiT of half the width of B": (
        {"size": 32, "channels": 4, "patch": 4, "width": 384, "depth": 6, "heads": 6},
        32,
    ),
}


def stepper(case: dict[str, int], batch: int, ratio: float, compiled: bool) -> Callable[[], None]:
    model = MeanFlow(
        DiT(**case, num_classes=10),
        times=TimePairs(ratio=ratio),
        p=1.0 if ratio else 0.0,
    )
    if compiled:
        model.network.compile(dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    x = KeyedNoise(0).normal(torch.empty(batch, case["channels"], case["size"], case["size"]))
    label = torch.arange(batch) % 10
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        model.loss(x, label, noise=KeyedNoise(1).at(count))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, (case, batch) in CASES.items():
        for compiled in (False, True):
            steps = {ratio: stepper(case, batch, ratio, compiled) for ratio in (0.0, 0.25, 0.5)}
            times: dict[float, list[float]] = {ratio: [] for ratio in steps}
            for round_ in range(STEPS + 2):
                for ratio, step in steps.items():
                    begin = time.perf_counter()
                    step()
                    if round_ >= 2:  # the first ones compile and warm up
                        times[ratio].append(time.perf_counter() - begin)
            medians = {ratio: statistics.median(values) for ratio, values in times.items()}
            mode = "compiled" if compiled else "eager"
            print(
                f"{name}, batch {batch}, {mode}: flow matching {1e3 * medians[0.0]:.0f} ms", end=""
            )
            for ratio in (0.25, 0.5):
                print(f"; MeanFlow at {ratio:.0%}: {medians[ratio] / medians[0.0]:.2f}x", end="")
            print(flush=True)


if __name__ == "__main__":
    main()
