"""What critically damped Langevin diffusion costs beside the network.

    python benchmarks/critically_damped_langevin.py [--threads N] [--rounds N]

* Kernels: a draw of x_t at one time a row, as in training, against `VPLinear` on a state of the
  same shape, and the coefficients M and L alone. Aim: at most 2 times the scalar path.
* Steps: a step of every sampler on (batch, 2, 3, 32, 32) with a field that returns a tensor it has
  ready, against `EulerMaruyama` of the scalar path, and against torchsde's "euler" and "srk" for
  the same reverse process, where it is installed.

Contestants take turns. Time is CPU time of the process, which does not count what other programs of
a busy machine take, and the lowest of all rounds.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fluvial.core.gaussian.paths import VPLinear
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Sampler
from fluvial.core.simulate import simulate
from fluvial.core.time import uniform_grid
from fluvial.dynamics.critically_damped_langevin import EM, SSCS, CriticallyDamped, Leapfrog

try:
    import torchsde
except ImportError:
    torchsde = None

PATHS = {"epsilon = 0": CriticallyDamped(1.0), "epsilon = 0.25": CriticallyDamped(1.0, 0.25)}
VP = VPLinear()
NOISE = KeyedNoise(0)
CALLS = 10
STEPS = 20
SHAPES = {"256 x 2 x 10": (256, 2, 10), "64 x 2 x 3 x 32 x 32": (64, 2, 3, 32, 32)}


class Ready:
    """A field that returns a tensor it has ready."""

    predicts = "score"

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return self.value


class Reverse(torch.nn.Module):
    """The reverse process in s = 1 - t, flat rows, as torchsde takes it."""

    sde_type, noise_type = "ito", "diagonal"

    def __init__(self, path: CriticallyDamped, score: Tensor) -> None:
        super().__init__()
        self.score = score.flatten(1)
        drift, spread = path.sde(torch.tensor(0.5, dtype=torch.float64))
        self.matrix = drift.matrix.float()
        self.level = spread.matrix.diagonal().float().repeat_interleave(score[0, 0].numel())

    def f(self, s: Tensor, u: Tensor) -> Tensor:
        pulled = torch.einsum("ij,bjk->bik", self.matrix, u.unflatten(1, (2, -1))).flatten(1)
        return self.level.square() * self.score - pulled

    def g(self, s: Tensor, u: Tensor) -> Tensor:
        return self.level.expand_as(u)


def measure(
    contestants: Mapping[str, Callable[[], object]], calls: int, rounds: int
) -> dict[str, float]:
    """Microseconds of a call: the lowest of all rounds, in which the contestants take turns."""
    best = dict.fromkeys(contestants, math.inf)
    gc.disable()
    for k in range(rounds + 1):
        for name, call in contestants.items():
            begin = time.process_time()
            for _ in range(calls):
                call()
            if k:  # the first ones warm up
                best[name] = min(best[name], (time.process_time() - begin) / calls)
        gc.collect()
    return {name: 1e6 * seconds for name, seconds in best.items()}


def kernels(rounds: int) -> None:
    for title, shape in SHAPES.items():
        x, t = NOISE.normal(torch.empty(shape)), torch.linspace(1e-3, 1, shape[0])
        paths: dict[str, Any] = {"VPLinear": VP, **PATHS}
        draws = {name: partial(p.sample, x, t, NOISE) for name, p in paths.items()}
        coefficients = {name: partial(p.marginal, t) for name, p in paths.items()}
        for what, contestants in (("draw", draws), ("coefficients", coefficients)):
            found = measure(contestants, CALLS, rounds)
            against = found["VPLinear"]
            print(f"{what}, {title}: VPLinear {against:.0f} us", end="")
            for name in PATHS:
                print(f"; {name} {found[name]:.0f} us, {found[name] / against:.2f}x", end="")
            print(flush=True)


def steps(rounds: int) -> None:
    shape = SHAPES["64 x 2 x 3 x 32 x 32"]
    x = NOISE.normal(torch.empty(shape))
    pairs = uniform_grid(STEPS)
    samplers: dict[str, Sampler] = {"EM": EM(), "leapfrog": Leapfrog(), "SSCS": SSCS()}
    contestants: dict[str, Callable[[], object]] = {
        "VPLinear, EulerMaruyama": lambda: simulate(x, pairs, EulerMaruyama(), VP, Ready(-x), NOISE)
    }
    for (name, sampler), (title, path) in (
        (one, other) for one in samplers.items() for other in PATHS.items()
    ):
        contestants[f"{name}, {title}"] = partial(
            simulate, x, pairs, sampler, path, Ready(-x), NOISE
        )
    if torchsde is not None:
        for method, (title, path) in (
            (m, other) for m in ("euler", "srk") for other in PATHS.items()
        ):
            sde = Reverse(path, -x)
            contestants[f"torchsde {method}, {title}"] = partial(
                torchsde.sdeint,
                sde,
                x.flatten(1),
                torch.tensor([0.0, 1.0]),
                method=method,
                dt=1 / STEPS,
            )
    found = measure(contestants, 1, rounds)
    against = found["VPLinear, EulerMaruyama"]
    for name, microseconds in found.items():
        print(
            f"step, {name}: {microseconds / STEPS / 1e3:.2f} ms, {microseconds / against:.2f}x",
            flush=True,
        )
    if torchsde is None:
        print("torchsde is not installed: left out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    with torch.no_grad():
        kernels(options.rounds)
        steps(options.rounds)


if __name__ == "__main__":
    main()
