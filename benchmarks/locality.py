"""Denoisers of a data set: time and memory against the number of images, and against peers.

    python benchmarks/locality.py [--images N ...] [--queries N] [--threads N]

First table: for sets of 1,400, 10,000 and 50,000 images of 28 x 28 (the animals, and shifted copies
of them), every denoiser on a batch of queries at A = alpha^2 = 0.394 and 0.895, each in a process
of its own: CPU seconds per denoised image, the lowest of three, and peak memory of the process
above what it held with the data loaded, principal components and masks included (on Linux). "naive"
is the locality denoiser as its formulas stand, all (queries, images, pixels) differences at once
and a dense mask; it is left out where that takes more than 8 GB. Masks and principal components are
made before the clock starts; their seconds stand apart.

Second table: denoising of held-out animals, mean squared error and CPU seconds an image, next to
the Wiener filter of scipy (local moments in 5 x 5 windows) and the unsupervised Wiener
deconvolution and non-local means of scikit-image, which see one image and the level of noise, and
know no data set.

CPU time of all threads, as other programs of a busy machine do not count in it.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.signal import wiener as local_wiener
from skimage.restoration import denoise_nl_means, unsupervised_wiener
from torch import Tensor

from fluvial.claims.report import markdown_table
from fluvial.core.noise import KeyedNoise
from fluvial.data import animals, scaled
from fluvial.images import (
    EquivariantLocalScoreMachine,
    LocalityDenoiser,
    LocalScoreMachine,
    NearestDenoiser,
    OptimalDenoiser,
    WienerDenoiser,
)

LEVELS = (0.394, 0.895)
TAU = 0.05
MOST = 8 << 30


def data(count: int) -> tuple[Tensor, Tensor]:
    """(training images, held-out images): copies are moved by a pixel or two."""
    parts = animals().split()
    x = scaled(parts["train"].x)
    moved = [torch.roll(x, (k % 3, k // 3), (2, 3)) for k in range(math.ceil(count / len(x)))]
    return torch.cat(moved)[:count].contiguous(), scaled(parts["test"].x)


class Naive:
    """Everything at once."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.of_masks = x.flatten(1), LocalityDenoiser(x, tau=TAU)

    def prepare(self, alpha: float, sigma: float) -> None:
        self.mask = self.of_masks.mask(alpha, sigma).float()

    def denoise(self, y: Tensor, alpha: float, sigma: float) -> Tensor:
        squares = (y.flatten(1)[:, None] - alpha * self.x).square()
        q = squares @ self.mask.T
        p = torch.softmax(-q / (2 * sigma**2), 1)
        return (p * self.x).sum(1).reshape(y.shape)


MAKE: dict[str, Callable[[Tensor], Any]] = {
    "optimal": OptimalDenoiser,
    "nearest": NearestDenoiser,
    "Wiener": WienerDenoiser,
    "local, k = 5": lambda x: LocalScoreMachine(x, k=5),
    "locality": lambda x: LocalityDenoiser(x, tau=TAU),
    "naive locality": Naive,
}


def memory(name: str) -> float:
    """A line of /proc/self/status in MB: VmRSS is held now, VmHWM the most since a reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measure(name: str, count: int, queries: int, a: float, threads: int, send: Any) -> None:
    torch.set_num_threads(threads)
    x, held = data(count)
    alpha, sigma = math.sqrt(a), math.sqrt(1 - a)
    y = held[:queries]
    y = alpha * y + sigma * KeyedNoise(0).normal(y)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of loading
    held_before, begin = memory("VmRSS"), time.process_time()
    denoiser = MAKE[name](x)
    if isinstance(denoiser, Naive):
        denoiser.prepare(alpha, sigma)
    if isinstance(denoiser, LocalityDenoiser):
        denoiser._window(torch.tensor(sigma / alpha, dtype=torch.float64), y)
    elif isinstance(denoiser, WienerDenoiser):
        _ = denoiser.spectrum
    prepared = time.process_time() - begin
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        denoiser.denoise(y, alpha, sigma)
        seconds.append(time.process_time() - begin)
    send.send((min(seconds) / queries, memory("VmHWM") - held_before, prepared))


def against_size(counts: list[int], queries: int, threads: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    rows = []
    for count in counts:
        for name in MAKE:
            if name.startswith("naive") and 3 * 4 * 784 * count * queries > MOST:
                continue
            row: dict[str, Any] = {"images": count, "denoiser": name}
            for a in LEVELS:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=measure, args=(name, count, queries, a, threads, theirs)
                )
                process.start()
                theirs.close()
                each, most, prepared = ours.recv()
                process.join()
                row |= {
                    f"s per image, A = {a}": each,
                    f"MB, A = {a}": most,
                    f"s to prepare, A = {a}": prepared,
                }
            rows.append(row)
    return rows


def peers(count: int, queries: int) -> list[dict[str, Any]]:
    x, held = data(count)
    clean = held[:queries]
    rows: list[dict[str, Any]] = []

    def one(name: str, denoise: Callable[[Tensor, float, float], Tensor]) -> None:
        row: dict[str, Any] = {"denoiser": name}
        for a in LEVELS:
            alpha, sigma = math.sqrt(a), math.sqrt(1 - a)
            y = alpha * clean + sigma * KeyedNoise(0).normal(clean)
            denoise(y[:1], alpha, sigma)  # masks and principal components
            begin = time.process_time()
            got = denoise(y, alpha, sigma)
            row[f"s per image, A = {a}"] = (time.process_time() - begin) / queries
            row[f"MSE, A = {a}"] = float((got - clean).square().mean())
        rows.append(row)

    def each(function: Callable[[np.ndarray, float], np.ndarray]) -> Any:
        def denoise(y: Tensor, alpha: float, sigma: float) -> Tensor:
            images = [
                function(image, sigma / alpha) for image in (y[:, 0] / alpha).double().numpy()
            ]
            return torch.from_numpy(np.stack(images))[:, None].float().clamp(-1, 1)

        return denoise

    delta = np.zeros((3, 3))
    delta[1, 1] = 1.0
    one("noisy image itself", lambda y, alpha, sigma: y / alpha)
    one("scipy wiener, 5 x 5", each(lambda image, r: local_wiener(image, 5, noise=r * r)))
    one(
        "skimage unsupervised_wiener",
        each(lambda image, r: unsupervised_wiener(image, delta, clip=False, rng=0)[0]),
    )
    one(
        "skimage denoise_nl_means",
        each(
            lambda image, r: denoise_nl_means(
                image, patch_size=5, patch_distance=9, h=0.8 * r, sigma=r, fast_mode=False
            )
        ),
    )
    few = x[:50]
    for name, denoiser in {
        **{name: make(x) for name, make in MAKE.items() if name != "naive locality"},
        "equivariant, k = 5, 50 images": EquivariantLocalScoreMachine(few, k=5),
    }.items():
        one(name, denoiser.denoise)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, nargs="+", default=[1400, 10_000, 50_000])
    parser.add_argument("--queries", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    print(markdown_table(against_size(given.images, given.queries, given.threads)))
    print()
    torch.set_num_threads(given.threads)
    print(markdown_table(peers(7000, 32)))
