"""What the memorisation audit and the optimal pairing cost.

    python benchmarks/memorization.py [--images 1000 10000] [--queries N] [--rows 1000]

Audit: time and peak memory of `audit_memorization` on synthetic uint8 images of 32 x 32 x 3, for
several numbers of training images, with as many samples and held-out images as ``--queries``, each
in a process of its own. The data are made before the clock starts; the memory is what the process
holds at its peak beyond what it holds then, to be read against the limit of a block (256 MiB by
default). ``--naive`` adds the usual few lines: floats of everything and one `torch.cdist`.

Pairing: `couple(..., "ot")` of ``--rows`` rows next to POT's ``emd`` on given costs
and to scipy's assignment; the costs of the results are compared. With torchcfm (its own
environment) the draws of x_t and targets of its ConditionalFlowMatcher are compared with
`NoisyLinear` given the same t and noise, and its exact optimal-transport sampler is timed too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import ot
import torch
from scipy.optimize import linear_sum_assignment

from fluvial.core.noise import KeyedNoise
from fluvial.data import scaled
from fluvial.trust.memorization_audit import audit_memorization
from fluvial.trust.rectified_flow_memorization import NoisyLinear, couple

SHAPE = (3, 32, 32)


def images(count: int, seed: int) -> torch.Tensor:
    """Smooth random images, so that some are nearer than others."""
    rng = np.random.default_rng(seed)
    parts = []
    for start in range(0, count, 5000):
        coarse = rng.normal(size=(min(5000, count - start), 3, 8, 8)).astype("f4")
        fine = coarse.repeat(4, 2).repeat(4, 3)
        parts.append((np.tanh(fine) * 127.5 + 127.5).astype("u1"))
    return torch.from_numpy(np.concatenate(parts))


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def audit(count: int, queries: int, memory: int, naive: bool, pipe: Any) -> None:
    train, holdout, samples = images(count, 0), images(queries, 1), images(queries, 2)
    before, begin, cpu = peak(), time.perf_counter(), time.process_time()
    if naive:
        x, y = (scaled(part).flatten(1) for part in (train, samples))
        near = torch.cdist(y, x).topk(2, largest=False).values
        assert bool(near.isfinite().all())
    else:
        audit_memorization(samples, train, holdout, memory=memory)
    pipe.send((time.perf_counter() - begin, time.process_time() - cpu, peak() - before))


def in_process(*arguments: Any) -> tuple[float, float, int]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=audit, args=(*arguments, theirs))
    process.start()
    process.join()
    if process.exitcode or not ours.poll():
        return float("nan"), float("nan"), 0
    return ours.recv()


def audits(options: argparse.Namespace) -> None:
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"audit, {options.queries:,} samples and held-out images, {options.memory} MiB a block")
    for count in options.images:
        for naive in (False, True)[: 1 + options.naive]:
            seconds, cpu, used = in_process(count, options.queries, options.memory << 20, naive)
            name = "naive, samples against train only" if naive else "audit"
            print(
                f"{count:>8,} images  {name:34s} {seconds:8.1f} s ({cpu:.1f} s of CPU)  "
                f"{used / 2**20:8.0f} MiB",
                flush=True,
            )


def pairing(rows: int, rounds: int) -> None:
    z, y = (KeyedNoise(k).normal(torch.empty(rows, 64, dtype=torch.float64)) for k in (0, 1))
    weights = np.full(rows, 1 / rows)
    costs = ot.dist(z.numpy(), y.numpy())
    contestants: dict[str, Callable[[], float]] = {
        "couple": lambda: float((z - couple(z, y, "ot")[1]).square().sum()),
        "POT, emd": lambda: rows * float((ot.emd(weights, weights, costs) * costs).sum()),
        "scipy, assignment": lambda: float(costs[linear_sum_assignment(costs)].sum()),
    }
    if find_spec("torchcfm"):
        from torchcfm.optimal_transport import OTPlanSampler

        plan = OTPlanSampler("exact")
        contestants["torchcfm, plan"] = lambda: (
            rows * float((plan.get_map(z.float(), y.float()) * costs).sum())
        )
    times: dict[str, list[float]] = {name: [] for name in contestants}
    found = {}
    for _ in range(rounds):
        for name, call in contestants.items():
            begin = time.perf_counter()
            found[name] = call()
            times[name].append(time.perf_counter() - begin)
    best = found["scipy, assignment"]
    for name, values in times.items():
        print(
            f"pairing of {rows:,} rows, {name:18s} {statistics.median(values):7.3f} s, cost "
            f"{found[name] / best - 1:+.1e} of the best"
        )


def same_as_torchcfm() -> None:
    if not find_spec("torchcfm"):
        print("torchcfm is not installed: draws are not compared")
        return
    from torchcfm.conditional_flow_matching import ConditionalFlowMatcher

    noise = KeyedNoise(0)
    z, y = (noise.normal(torch.empty(500, 8), tag) for tag in ("z", "y"))
    t = noise.uniform(torch.empty(500), "t")
    for level in (0.0, 0.05):
        draw = NoisyLinear(level).sample(y, t, noise, z)
        peer = ConditionalFlowMatcher(sigma=level)
        # its clock runs from the source to the target
        eps = noise.normal(y, "interpolant")
        x = peer.sample_xt(z, y, 1 - t, eps)
        target = peer.compute_conditional_flow(z, y, 1 - t, x)
        gap = max(
            float((draw.x - x).abs().max()), float((draw.target("velocity") + target).abs().max())
        )
        print(f"torchcfm, sigma {level}: x_t and targets differ by {gap:.1e} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, nargs="*", default=[1000, 10_000])
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--memory", type=int, default=256, help="MiB of a block")
    parser.add_argument("--naive", action="store_true")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    audits(options)
    pairing(options.rows, options.rounds)
    same_as_torchcfm()


if __name__ == "__main__":
    main()
