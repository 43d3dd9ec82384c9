"""Calibrating conformal masks next to direct search and bisection, and peak memory.

    python benchmarks/conformal_masks.py [--images N] [--pixels D] [--counts N ...]

Part 1, time, for three levels. Direct search goes through the distinct scores from the smallest and
works out the risk of each on the maps, until it exceeds the last level. There are 1.2 million of
them for 300 images of 4,096 pixels where scores are continuous, which would take an hour: there its
time is that of a hundred probes, times the number it would need. Scores of 8 bits have 256 values,
and direct search is run to its end. Bisection halves the sorted list of all distinct scores; it
needs up to 21 probes a level, each over all maps. `calibrate` sorts every image once. All find the
same thresholds, which is checked: by direct search where it ends, by bisection, and by the risk at
the threshold and just below it.

Part 2, memory: the peak of what Python and NumPy hold, for growing numbers of images that come from
a generator. By default up to 2^19 steps are kept, for exact
thresholds; with thresholds given in advance (1,000 of them) nothing is kept but their sums.

Time is CPU time of the process, in one thread.

Aim: ten times faster than direct search, at equal answers; a peak that stops growing.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fluvial.trust.conformal_masks import calibrate

LEVELS, BOUND = (0.2, 0.5, 0.8), 3.0
PROBES = 100
GRID = np.linspace(0.0, 1.0, 1_000)


def maps(count: int, pixels: int, *, bits: int | None = None) -> Iterator[tuple[np.ndarray, ...]]:
    """(score, error) of each image."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        score = rng.random(pixels)
        error = np.clip(2 * score * rng.random() + 0.1 * rng.random(pixels), 0, BOUND)
        yield (score if bits is None else np.floor(score * 2**bits) / 2**bits), error


def risk(scores: np.ndarray, errors: np.ndarray, t: float) -> float:
    """Just above t."""
    losses = np.where(scores <= t, errors, 0.0).max(1)
    return float((losses.sum() + BOUND) / (len(scores) + 1))


def direct(scores: np.ndarray, errors: np.ndarray) -> list[float]:
    """One pass over the candidates for all levels together."""
    found: list[float] = []
    for t in np.unique(scores):
        value = risk(scores, errors, t)
        found += [float(t) for level in LEVELS[len(found) :] if value > level]
        if len(found) == len(LEVELS):
            return found
    return found + [np.inf] * (len(LEVELS) - len(found))


def bisection(scores: np.ndarray, errors: np.ndarray) -> list[float]:
    candidates = np.append(np.unique(scores), np.inf)
    found = []
    for level in LEVELS:
        low, high = 0, len(candidates) - 1
        while low < high:
            middle = (low + high) // 2
            if risk(scores, errors, candidates[middle]) > level:
                high = middle
            else:
                low = middle + 1
        found.append(float(candidates[low]))
    return found


def ours(scores: np.ndarray, errors: np.ndarray) -> list[float]:
    calibration = calibrate(scores, errors, LEVELS, BOUND)
    return [calibration.threshold(level).score for level in LEVELS]


def timed(
    function: Callable[..., Any], *arguments: np.ndarray, repeats: int = 5
) -> tuple[float, Any]:
    """(least CPU seconds, result)."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        result = function(*arguments)
        seconds.append(time.process_time() - start)
    return min(seconds), result


def speed(count: int, pixels: int) -> None:
    print(f"{count} images of {pixels} pixels, levels {LEVELS}, CPU seconds")
    for name, bits in (("8-bit scores", 8), ("continuous scores", None)):
        scores, errors = map(np.array, zip(*maps(count, pixels, bits=bits), strict=True))
        mine, t = timed(ours, scores, errors)
        halved, same = timed(bisection, scores, errors, repeats=2)
        assert t == same, (t, same)
        if bits is not None:
            searched, same = timed(direct, scores, errors, repeats=1)
            assert t == same, (t, same)
            how = ""
        else:
            candidates = np.unique(scores)
            probe, _ = timed(
                lambda s, e, c=candidates: sum(risk(s, e, x) for x in c[:PROBES]),
                scores,
                errors,
                repeats=1,
            )
            needed = int(np.searchsorted(candidates, t[-1])) + 1
            searched, how = probe / PROBES * needed, f" ({needed:,} probes, from {PROBES})"
            for level, limit in zip(LEVELS, t, strict=True):
                below = float(candidates[np.searchsorted(candidates, limit) - 1])
                assert risk(scores, errors, below) <= level < risk(scores, errors, limit)
        print(
            f"  {name}: calibrate {mine:.3f}, bisection {halved:.3f} ({halved / mine:.1f} x), "
            f"direct search {searched:.3g} ({searched / mine:,.0f} x){how}"
        )


def peak(count: int, pixels: int, thresholds: np.ndarray | None) -> float:
    """MiB that Python and NumPy held at most."""
    scores, errors = _Column(count, pixels, 0), _Column(count, pixels, 1)
    tracemalloc.start()
    calibrate(scores, errors, LEVELS, BOUND, thresholds=thresholds)
    found = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    return found


class _Column:
    """One of two maps of every image, made as it is asked for."""

    def __init__(self, count: int, pixels: int, column: int) -> None:
        self.arguments, self.column = (count, pixels), column

    def __iter__(self) -> Iterator[np.ndarray]:
        return (row[self.column] for row in maps(*self.arguments))


def memory(counts: list[int], pixels: int) -> None:
    print(f"peak memory in MiB, images of {pixels} pixels")
    for count in counts:
        default, given = (peak(count, pixels, grid) for grid in (None, GRID))
        whole = 2 * 8 * count * pixels / 2**20
        print(
            f"  {count:,} images: default {default:.1f}, given thresholds {given:.1f}, "
            f"all maps {whole:.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--pixels", type=int, default=4_096)
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 1_000, 10_000])
    arguments = parser.parse_args()
    speed(arguments.images, arguments.pixels)
    memory(arguments.counts, arguments.pixels)


if __name__ == "__main__":
    main()
