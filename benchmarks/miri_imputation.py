"""MIRI beside IterativeImputer, MissForest and hyperimpute on one table, in one run.

    .venv/bin/python benchmarks/miri_imputation.py [--rows N] [--columns D] [--only NAME ...]
    ... --rows 100000 --columns 50 --only MIRI IterativeImputer
    ... --rows 1000000 --columns 10 --only MIRI --max-steps 500

The table is made: five hidden factors, each column a bent mixture of them with noise, so that its
law is not Gaussian and every column says something of the others; 30 % of the entries go missing
completely at random. Every contestant fills it in a process of its own, by its usual setting, and
is measured by

* seconds of the wall and of the CPU,
* peak memory beyond what the process held with the table, which another one has made, read,
* root mean square error of the filled entries, in deviations (a draw has up to sqrt(2) times that
  of a conditional mean),
* sliced Wasserstein distance of the filled table to the true one.

``hyperimpute`` takes part if it can be imported (pip install hyperimpute, into an environment of
its own with fluvial in it); it brings much that is not needed here.

Aim: 100,000 x 50 in minutes on two cores, time and memory in proportion to the rows; a distance
below that of IterativeImputer.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

NAMES = (
    "mean",
    "IterativeImputer",
    "IterativeImputer, posterior",
    "MissForest",
    "hyperimpute",
    "MIRI",
)
SLOW = {"MissForest": 20_000, "hyperimpute": 20_000}
"""Rows beyond which a contestant is left out unless it is asked for by --only."""


def table(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(truth, with gaps), float32."""
    from fluvial.tabular import ampute

    rng = np.random.default_rng(0)
    factors = rng.normal(size=(rows, 5)).astype(np.float32)
    weights = rng.normal(size=(5, columns)).astype(np.float32)
    truth = np.tanh(factors @ weights) + 0.3 * (factors**2) @ abs(weights) / 5
    truth += 0.2 * rng.normal(size=truth.shape).astype(np.float32)
    truth = (truth - truth.mean(0)) / truth.std(0)
    return truth, ampute(truth, 0.3, seed=1).data.astype(np.float32)


def imputer(name: str, options: dict[str, Any]) -> Any:
    """A contestant."""
    if name == "hyperimpute":
        from hyperimpute.plugins.imputers import Imputers

        return Imputers().get("hyperimpute")
    from fluvial.tabular.baselines import BASELINES

    return BASELINES[name](0, **(options if name == "MIRI" else {}))


def peak() -> float:
    """Peak memory of this process, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, folder: Path, threads: int, options: dict[str, Any], queue: Any) -> None:
    """One contestant; puts its numbers into the queue."""
    import torch

    from fluvial.metrics import sliced_wasserstein

    torch.set_num_threads(threads)
    truth, holed = (np.load(folder / f"{part}.npy") for part in ("truth", "holed"))
    gaps = np.isnan(holed)
    one = imputer(name, options)
    before, wall, cpu = peak(), time.perf_counter(), time.process_time()
    filled = np.asarray(one.fit_transform(holed))
    wall, cpu, memory = time.perf_counter() - wall, time.process_time() - cpu, peak() - before
    error = float(np.sqrt(((filled - truth)[gaps] ** 2).mean()))
    some = slice(0, 100_000)
    apart = sliced_wasserstein(filled[some], truth[some], projections=64)
    queue.put((wall, cpu, memory, error, apart))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=NAMES)
    parser.add_argument("--rounds", type=int, help="of MIRI")
    parser.add_argument("--max-steps", type=int, help="of a round of MIRI")
    given = parser.parse_args()
    options = {
        name: getattr(given, name) for name in ("rounds", "max_steps") if getattr(given, name)
    }
    names = given.only or [name for name in NAMES if given.rows <= SLOW.get(name, given.rows)]
    print(f"{given.rows:,} rows x {given.columns} columns, 30 % missing, {given.threads} threads")
    print(f"{'':28}{'wall s':>9}{'CPU s':>9}{'MiB':>9}{'RMSE':>9}{'sliced W2':>11}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, values in zip(("truth", "holed"), table(given.rows, given.columns), strict=True):
            np.save(folder / f"{part}.npy", values)
        for contestant in names:
            compete(contestant, folder, given.threads, options)


def compete(name: str, folder: Path, threads: int, options: dict[str, Any]) -> None:
    """One contestant's line."""
    if name == "hyperimpute" and importlib.util.find_spec("hyperimpute") is None:
        print(f"{name:28}not installed", flush=True)
        return
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=measure, args=(name, folder, threads, options, queue))
    process.start()
    while process.is_alive() and queue.empty():
        time.sleep(0.2)
    if queue.empty():
        print(f"{name:28}failed", file=sys.stderr)
        return
    wall, cpu, memory, error, apart = queue.get()
    process.join()
    print(f"{name:28}{wall:9.1f}{cpu:9.1f}{memory:9.0f}{error:9.3f}{apart:11.4f}", flush=True)


if __name__ == "__main__":
    main()
