"""The schemes of `WassersteinSampler` beside diffusers' stochastic schedulers.

    python benchmarks/wasserstein_samplers.py [--threads N] [--steps N] [--rows N] [--turns N]

Two tables.

* Time: milliseconds a step of one batch, the network's evaluations included, on a U-Net and a DiT
  for 14 x 14 images. Contestants take turns; CPU time of the thread, which does not count what
  other programs of a busy machine take, and the lowest of all turns. In brackets: over an
  evaluation of the network. Diffusers: `DDPMScheduler` and `DPMSolverMultistepScheduler` with
  algorithm_type="sde-dpmsolver++", orders 1 and 2, as in its pipelines.
* Quality, in equal numbers of steps and with the same field: a mixture of four normal laws in the
  plane, whose score is exact. The error on a shared Brownian path, sqrt(E |x - reference|^2), and
  the sliced W2 distance to as many draws of the mixture, beside its floor. The betas of diffusers
  are those of the path. `DDPMScheduler` draws its own noise, so that it has a distance only.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler
from torch import Tensor, nn

from fluvial.core.gaussian.losses import NetworkField
from fluvial.core.gaussian.paths import AlphaSigmaPath, VPLinear, numbers
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import left_broadcast
from fluvial.core.simulate import simulate
from fluvial.core.time import uniform_grid
from fluvial.dynamics.wasserstein_samplers import (
    SCHEMES,
    SharedBrownian,
    WassersteinSampler,
    shared_runs,
    strong_error,
)
from fluvial.dynamics.wasserstein_samplers.clock import clock_of
from fluvial.metrics import sliced_wasserstein
from fluvial.networks import DiT, UNet

PATH = VPLinear()
TRAINED = 1000
"""Times in diffusers' tables; entry i stands for t = (i + 1) / 1000."""
NOISE = KeyedNoise(0)


def schedulers() -> dict[str, Any]:
    t = torch.arange(TRAINED + 1, dtype=torch.float64) / TRAINED
    kept = PATH.alpha(t).square()
    betas = (1 - kept[1:] / kept[:-1]).clamp(max=0.9999).numpy()
    shared: dict[str, Any] = {"trained_betas": betas, "timestep_spacing": "trailing"}
    sde = partial(
        DPMSolverMultistepScheduler,
        **shared,
        algorithm_type="sde-dpmsolver++",
        solver_type="midpoint",
    )
    return {
        "diffusers DDPM": DDPMScheduler(**shared, clip_sample=False),
        "diffusers SDE-DPM-Solver++ 1": sde(solver_order=1),
        "diffusers SDE-DPM-Solver++ 2M": sde(solver_order=2),
    }


def theirs(
    scheduler: Any, field: Any, x: Tensor, steps: int, noises: list[Tensor] | None = None
) -> Tensor:
    """The loop of diffusers' pipelines; ``noises`` are the normal numbers of the steps."""
    scheduler.set_timesteps(steps)
    for k, i in enumerate(scheduler.timesteps):
        value = field(x, torch.tensor((int(i) + 1) / TRAINED, dtype=torch.float64))
        options = {} if noises is None else {"variance_noise": noises[k]}
        x = scheduler.step(value, i, x, return_dict=False, **options)[0]
    return x


# Time


def lowest(contestants: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """CPU milliseconds of the quickest turn of each."""
    best = dict.fromkeys(contestants, math.inf)
    for _ in range(turns + 1):
        for name, contestant in contestants.items():
            start = time.thread_time()
            contestant()
            best[name] = min(best[name], (time.thread_time() - start) * 1e3)
    return best


@torch.no_grad()
def times(rows: int, steps: int, turns: int) -> None:
    networks: dict[str, nn.Module] = {
        "U-Net": UNet(size=14, channels=1, width=16, multipliers=(1, 2), blocks=1),
        "DiT": DiT(size=14, channels=1, patch=2, width=64, depth=3, heads=4),
    }
    for name, network in networks.items():
        field = NetworkField(network, "noise")
        x = NOISE.normal(torch.empty(rows, 1, 14, 14))
        pairs, simulated = uniform_grid(steps, 1.0, 0.02), simulate
        contestants: dict[str, Callable[[], object]] = {
            "an evaluation": lambda field=field, x=x: [  # type: ignore[misc]
                field(x, torch.tensor(0.5)) for _ in range(steps)
            ]
        }
        for scheme in SCHEMES:
            sampler = WassersteinSampler(scheme, hessian="jvp")
            contestants[f"{scheme}, six products" if scheme == "so" else scheme] = partial(
                simulated, x, pairs, sampler, PATH, field, NOISE
            )
        for title, scheduler in schedulers().items():
            contestants[title] = partial(theirs, scheduler, field, x, steps)
        best = lowest(contestants, turns)
        print(f"\n{name}, {rows} images, milliseconds a step (evaluations)")
        for title, value in best.items():
            ratio = value / best["an evaluation"]
            print(f"  {title:32s} {value / steps:9.2f}  ({ratio:.2f})")


# Quality


@dataclass(frozen=True)
class Mixture:
    """The noise prediction for data of four normal laws of variance ``var``."""

    path: AlphaSigmaPath
    var: float = 0.05
    predicts: str = "noise"

    @property
    def means(self) -> Tensor:
        return torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]]).double()

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        alpha, sigma = (left_broadcast(f(t), x) for f in (self.path.alpha, self.path.sigma))
        var = alpha**2 * self.var + sigma**2
        means = self.means
        weights = (x @ means.T * (alpha / var)).softmax(1)  # the means have one norm
        return sigma * (x - alpha * (weights @ means)) / var

    def draws(self, rows: int, noise: KeyedNoise) -> Tensor:
        like = torch.empty(rows, 2, dtype=torch.float64)
        which = torch.arange(rows) % 4
        return self.means[which] + math.sqrt(self.var) * noise.normal(like, "draws")


@torch.no_grad()
def quality(rows: int) -> None:
    field, cells = Mixture(PATH), 800
    x = PATH.source(torch.empty(rows, 2, dtype=torch.float64), NOISE)
    real, other = (field.draws(rows, KeyedNoise(k)) for k in (1, 2))
    counts = (10, 20, 40, 80)
    reference, runs = shared_runs(
        field,
        x,
        path=PATH,
        noise=NOISE,
        counts=dict.fromkeys(SCHEMES, counts),
        cells=cells,
        grid=uniform_grid,
    )
    motion = SharedBrownian(NOISE.at(0), x, PATH, uniform_grid(cells))

    def normals(steps: int) -> list[Tensor]:
        clocks = [clock_of(*numbers(PATH, 1 - k / steps)) for k in range(steps + 1)]
        return [
            motion.over(s, e, x, NOISE).integral(0.0) / math.sqrt(s - e)
            for s, e in zip(clocks, clocks[1:], strict=False)
        ]

    print(f"\nA mixture, {rows} rows: error on a shared path, then sliced W2, by steps")
    print(f"  {'':32s}" + "".join(f"{n:>16d}" for n in counts))
    results: dict[str, list[tuple[float | None, float]]] = {}
    for scheme in SCHEMES:
        results[scheme] = [
            (strong_error(runs[scheme, n], reference), sliced_wasserstein(runs[scheme, n], real))
            for n in counts
        ]
    for name, scheduler in schedulers().items():
        results[name] = []
        for n in counts:
            shared = None if name == "diffusers DDPM" else normals(n)
            out = theirs(scheduler, field, x, n, shared)
            error = None if shared is None else strong_error(out, reference)
            results[name].append((error, sliced_wasserstein(out, real)))
    for name, cells_ in results.items():
        texts = [
            f"{'' if error is None else f'{error:.4f}':>9s}{distance:7.3f}"
            for error, distance in cells_
        ]
        print(f"  {name:32s}" + "".join(texts))
    print(
        f"  reference {sliced_wasserstein(reference, real):.3f}, "
        f"floor {sliced_wasserstein(other, real):.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--draws", type=int, default=2000, help="rows of the mixture")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    times(arguments.rows, arguments.steps, arguments.turns)
    quality(arguments.draws)


if __name__ == "__main__":
    main()
