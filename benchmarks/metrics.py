"""The Fréchet distance next to a bare version in NumPy and SciPy: time, and digits.

    python benchmarks/metrics.py [--rows N] [--columns D] [--rounds K]

The bare version is the definition: means, `np.cov` of both sets, and the trace of the root as the
sum of the roots of the eigenvalues of the product of the covariances. Both get the same float64
arrays and take turns; wall time is what a user waits for, CPU time does not count other programs.
The default is small. The size of the aim is ``--rows 50000 --columns 2048``, which needs 6 GB and
some minutes.

Then both, and the bare version with `scipy.linalg.sqrtm`, on covariances that are nearly or wholly
singular and whose distance is known in closed form: the columns of two sets are uncorrelated, their
deviations fall by a constant factor from 1 to the smallest, in opposite order in the two sets, and
the whole is turned by a random rotation.

Aim: at most 1.2 times the bare version at 50,000 x 2,048, and fewer wrong digits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import scipy.linalg
import torch

from fluvial.metrics import frechet_distance

AIM, FULL = 1.2, (50_000, 2048)
SMALLEST = (1e-3, 1e-6, 1e-9, 0.0)
"""Deviations of the smallest column, 0 for half of them at 0."""


def bare(a: np.ndarray, b: np.ndarray) -> float:
    shift = a.mean(0) - b.mean(0)
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    values = scipy.linalg.eigvals(cov_a @ cov_b)
    root = np.sqrt(values.astype(complex)).real.sum()
    return float(shift @ shift + np.trace(cov_a) + np.trace(cov_b) - 2 * root)


def by_sqrtm(a: np.ndarray, b: np.ndarray) -> float:
    shift = a.mean(0) - b.mean(0)
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = np.trace(scipy.linalg.sqrtm(cov_a @ cov_b)).real
    return float(shift @ shift + np.trace(cov_a) + np.trace(cov_b) - 2 * root)


METHODS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "fluvial": frechet_distance,
    "bare, eigenvalues": bare,
    "bare, sqrtm": by_sqrtm,
}


def known(smallest: float, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Two sets of 4 D rows and their distance."""
    rng = np.random.default_rng(seed)
    if smallest:
        std = np.geomspace(1, smallest, columns)
    else:
        std = np.where(np.arange(columns) < columns // 2, 1.0, 0.0)
    other = np.roll(std[::-1], 1)
    turn = np.linalg.qr(rng.normal(size=(columns, columns)))[0]
    sets = []
    for deviations in (std, other):
        x = rng.normal(size=(4 * columns, columns))
        white = np.linalg.qr(x - x.mean(0))[0] * np.sqrt(len(x) - 1)
        sets.append(white * deviations @ turn)
    return sets[0], sets[1], float(np.sum((std - other) ** 2))


def times(rows: int, columns: int, rounds: int, least: float) -> None:
    """With deviations that fall from 1 to ``least`` along random axes."""
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.normal(size=(columns, columns)))[0]
    mix = np.geomspace(1, least, columns)[:, None] * turn
    a, b = (rng.normal(size=(rows, columns)) @ mix + shift for shift in (0.0, 0.1))
    print(
        f"{rows:,} x {columns:,}, deviations from 1 to {least:g}, {rounds} round(s), "
        f"{torch.get_num_threads()} thread(s)"
    )
    names = ["fluvial", "bare, eigenvalues"]
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    values = {}
    for _ in range(rounds):
        for name in names:
            wall, cpu = time.perf_counter(), time.process_time()
            values[name] = METHODS[name](a, b)
            spent[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    median = {
        name: [statistics.median(part) for part in zip(*pairs, strict=True)]
        for name, pairs in spent.items()
    }
    base = median["bare, eigenvalues"]
    aim = f"   aim <= {AIM}" if (rows, columns) == FULL else ""
    for name, (wall, cpu) in median.items():
        print(
            f"{name:20s} {wall:7.2f} s wall {cpu:7.2f} s CPU   {wall / base[0]:5.2f} x wall "
            f"{cpu / base[1]:5.2f} x CPU   value {values[name]:.10g}{aim}"
        )


def digits(columns: int) -> None:
    print(f"\nerror of the distance, of the traces, {columns} columns")
    print(f"{'smallest deviation':20s}" + "".join(f"{name:>20s}" for name in METHODS))
    for smallest in SMALLEST:
        a, b, truth = known(smallest, columns, 1)
        trace = a.var(0).sum() + b.var(0).sum()
        errors = [abs(method(a, b) - truth) / trace for method in METHODS.values()]
        label = f"{smallest:g}" if smallest else "half of them 0"
        print(f"{label:20s}" + "".join(f"{error:20.1e}" for error in errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--columns", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for least in (1.0, 1e-4):
        times(options.rows, options.columns, options.rounds, least)
    digits(64)


if __name__ == "__main__":
    main()
