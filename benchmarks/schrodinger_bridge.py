"""Exact IMF next to POT's Sinkhorn, and DSBM next to torchcfm's SB-CFM, in one run.

    .venv-bench/bin/python benchmarks/schrodinger_bridge.py [--steps N] [--seeds N]

Part 1, on the two exact problems of the claim. The bridge is worked out first, to 1e-13. Then every
contestant is run to a divergence of 1e-9 from it: IMF in iterations, each 3 K products of m x m
matrices, against POT's ``ot.sinkhorn`` (in the log domain and not) in cycles. Sinkhorn is what to
use for a coupling on a grid: a cycle costs 2 m^2 and gives no process. IMF gives the process at
every iteration, both marginals right. The figures say what that costs. A row of 1,000 states is
timed for one iteration alone.

Part 2, digits 5-9 to 0-4 in eight principal components, as in the claim. DSBM and SB-CFM have the
same networks, batches, optimiser and number of gradient steps a network. SB-CFM (Tong et al.,
AISTATS 2024) pairs every batch by entropic optimal transport and learns a flow and a score, from
which its process is simulated; DSBM learns two drifts. Measured are the transport cost beside that
of Sinkhorn on the held-out rows, the sliced Wasserstein distance beside its floor, and CPU time.

Time is CPU time of the process, in one thread: it does not count what other programs take.

Aim: DSBM's error in cost no larger than SB-CFM's, its marginals as near; exact IMF within a hundred
times of Sinkhorn's time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import ot
import torch
from torch import Tensor, nn

try:
    from torchcfm.conditional_flow_matching import SchrodingerBridgeConditionalFlowMatcher
except ImportError as error:
    print(
        f"{error}. The peers have an environment of their own; see benchmarks/peers_training.py",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

from fluvial.claims.schrodinger_bridge_imf import (
    Config,
    Sides,
    Translate,
    bridge,
    line,
    measure,
    network,
    plane,
    read_sides,
)
from fluvial.core.noise import KeyedNoise
from fluvial.transport.schrodinger_bridge import (
    Reference,
    coupling_kl,
    grid_imf,
    sinkhorn,
    transition_kernels,
    whole_kernel,
)

NEAR = 1e-9
"""Nats from the bridge that part 1 goes to."""


def cpu(call: Callable[[], object], turns: int = 3) -> float:
    """Milliseconds of CPU time, the least of some turns."""
    times = []
    for _ in range(turns):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return 1000 * min(times)


def first(near: Callable[[int], bool]) -> int:
    """The least number that is enough, by doubling and bisection."""
    high = 1
    while not near(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if near(middle) else (middle, high)
    return high


def exact(config: Config) -> None:
    problems = (
        ("line, 90 states", line(config, 0), config.line_steps),
        ("plane, 400 states", plane(config, 0), config.plane_steps),
    )
    print(f"part 1: to a divergence of {NEAR:g}; ms of CPU time")
    print(f"{'':26}{'IMF':>24}{'POT, log domain':>24}{'POT':>24}{'ratio':>8}")
    for name, (p0, p1, points), steps in problems:
        for variance in (1.0, 4.0):
            kernels = transition_kernels(points, Reference(variance**0.5), steps)
            whole = whole_kernel(kernels)
            target, costs = sinkhorn(p0, p1, whole), -whole.log().numpy()

            def imf(count: int) -> Tensor:
                return grid_imf(p0, p1, kernels, count)[-1]  # noqa: B023 (called at once)

            def pot(count: int, method: str) -> Tensor:
                plan = ot.sinkhorn(
                    p0.numpy(),  # noqa: B023
                    p1.numpy(),  # noqa: B023
                    costs,  # noqa: B023
                    1.0,
                    method=method,
                    numItermax=count,
                    stopThr=0,
                    warn=False,
                )
                return torch.from_numpy(plan)

            cells, times = [], []
            for solve in (
                imf,
                lambda n: pot(n, "sinkhorn_log"),  # noqa: B023
                lambda n: pot(n, "sinkhorn"),  # noqa: B023
            ):
                count = first(lambda n: float(coupling_kl(solve(n), target)) < NEAR)  # noqa: B023
                times.append(cpu(lambda: solve(count)))  # noqa: B023
                cells.append(f"{count} in {times[-1]:.1f}")
            title = f"{name}, sigma^2 {variance:g}"
            row = "".join(f"{cell:>24}" for cell in cells)
            print(f"{title:26}{row}{times[0] / times[1]:8.1f}", flush=True)
    points = torch.linspace(-4, 5, 1000, dtype=torch.float64)
    p = torch.full((1000,), 1e-3, dtype=torch.float64)
    kernels = transition_kernels(points, Reference(2.0), 10)
    setting = cpu(lambda: grid_imf(p, p, kernels, 0), 1)
    once = cpu(lambda: grid_imf(p, p, kernels, 1), 1) - setting
    print(
        f"1,000 states, 10 steps: {once / 1000:.2f} s an iteration, {setting / 1000:.2f} s before"
    )


def sb_cfm(config: Config, sides: Sides, seed: int) -> Translate:
    """torchcfm's matcher with a flow and a score, the loss of its tutorial; time runs from x1 to
    x0."""
    shape = sides.x0[0].shape[1:]
    flow, score = network(config, shape, 2 * seed), network(config, shape, 2 * seed + 1)
    matcher = SchrodingerBridgeConditionalFlowMatcher(sigma=config.diffusion, ot_method="sinkhorn")
    both = nn.ModuleList([flow, score])
    optimizer = torch.optim.AdamW(both.parameters(), config.lr, betas=(0.9, 0.95), weight_decay=0)
    average = {name: value.clone() for name, value in both.state_dict().items()}
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (torchcfm draws partners from the global generator)
    steps = config.half_iterations // 2 * config.steps
    for step in range(steps):
        x, y = (
            side[torch.randint(len(side), (config.batch_size,))]
            for side in (sides.x1[0], sides.x0[0])
        )
        t, xt, ut, eps = matcher.sample_location_and_conditional_flow(x, y, return_noise=True)
        weight = matcher.compute_lambda(t)[:, None]
        loss = (flow(xt, t) - ut).square().mean() + (weight * score(xt, t) + eps).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        optimizer.step()
        decay = min(config.ema, (1 + step) / (10 + step))
        for name, value in both.state_dict().items():
            average[name].lerp_(value, 1 - decay)
    both.load_state_dict(average)

    @torch.no_grad()
    def translate(x: Tensor, way: str, noise: KeyedNoise) -> Tensor:
        count = config.simulation
        sign = 1.0 if way == "backward" else -1.0
        for k in range(count):
            t = torch.full((len(x),), k / count if sign > 0 else 1 - k / count)
            # by its loss the second network is the score times sigma^2 / 2
            drift = sign * flow(x, t) + score(x, t)
            z = noise.at(k).normal(x)
            x = x + drift / count + config.diffusion * count**-0.5 * z
        return x

    return translate


def dsbm(config: Config, sides: Sides, seed: int) -> Translate:
    model = bridge(config, sides.x0[0].shape[1:], seed)
    model.fit(
        sides.x0[0],
        sides.x1[0],
        half_iterations=config.half_iterations,
        steps=config.steps,
        pairs=config.pairs,
        batch_size=config.batch_size,
        lr=config.lr,
        ema=config.ema,
        seed=seed,
        progress=False,
    )
    return lambda x, way, noise: model.translate(x, way, noise=noise)  # type: ignore[arg-type]


def networks(config: Config, seeds: int) -> None:
    steps = config.half_iterations // 2 * config.steps
    print(
        f"part 2: {steps} gradient steps a network, {seeds} seed(s), torchcfm "
        f"{importlib.metadata.version('torchcfm')}; both directions, means over seeds"
    )
    print(f"{'':10}{'cost error':>12}{'sliced W2':>12}{'floor':>10}{'variance':>10}{'CPU s':>10}")
    for name, fit in (("DSBM", dsbm), ("SB-CFM", sb_cfm)):
        rows = []
        for seed in range(seeds):
            sides = read_sides(config, seed)
            begin = time.process_time()
            translate = fit(config, sides, seed)
            seconds = time.process_time() - begin
            found = measure(translate, sides, config.diffusion, KeyedNoise(7).at(seed))
            for one in found.values():
                names = ("cost error", "sliced", "floor", "variance error")
                rows.append((*(one[name] for name in names), seconds))
        mean = [statistics.fmean(column) for column in zip(*rows, strict=True)]
        print(
            f"{name:10}{mean[0]:12.3f}{mean[1]:12.3f}{mean[2]:10.3f}{mean[3]:10.3f}{mean[4]:10.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="of a half-iteration")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # POT's, of plans that are stopped early
    config = Config(steps=options.steps)
    exact(config)
    networks(config, options.seeds)


if __name__ == "__main__":
    main()
