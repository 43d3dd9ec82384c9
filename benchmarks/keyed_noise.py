"""What keyed noise costs, in multiples of torch.randn and torch.rand.

    python benchmarks/keyed_noise.py [--threads N] [--device cpu] [--no-compile]

The contestants for a shape take turns within one run, so that a busy machine slows all of them; a
ratio is one of medians. torch.randn uses one thread on a CPU whatever their number.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from fluvial.core.noise import KeyedNoise

SHAPES = [(128, 64), (64, 784), (256, 3, 32, 32), (1024, 3, 64, 64)]
ELEMENTS = 30_000_000  # drawn by each contestant for each shape, about


def medians(contestants: list[Callable[[], object]], repeats: int, device: str) -> list[float]:
    """Seconds a call, after a warm-up that also compiles."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    for contestant in contestants:
        contestant()
    seconds: list[list[float]] = [[] for _ in contestants]
    for _ in range(repeats):
        for contestant, times in zip(contestants, seconds, strict=True):
            wait()
            start = time.perf_counter()
            contestant()
            wait()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    noises = [KeyedNoise(0)] + [KeyedNoise(0, compile=True)] * options.compile
    names = ["eager", "compiled"][: len(noises)]

    print(f"torch {torch.__version__}, {options.device}, float32, {options.threads} thread(s)")
    print(f"{'shape':>18} {'draw':>8} {'ns/element':>11}" + "".join(f"{n:>10}" for n in names))
    for shape in SHAPES:
        like = torch.empty(shape, device=options.device)
        repeats = max(5, min(300, ELEMENTS // like.numel()))
        for name, reference in (("normal", torch.randn), ("uniform", torch.rand)):
            calls: list[Callable[[], object]] = [partial(reference, shape, device=options.device)]
            calls += [partial(getattr(noise, name), like) for noise in noises]
            base, *times = medians(calls, repeats, options.device)
            row = f"{'x'.join(map(str, shape)):>18} {name:>8} {base / like.numel() * 1e9:>11.2f}"
            print(row + "".join(f"{t / base:>9.1f}x" for t in times), flush=True)


if __name__ == "__main__":
    main()
