"""What samplers cost beside the network, next to diffusers' and azula's.

    python benchmarks/samplers.py [--threads N] [--steps N] [--batch N ...]

The network is replaced by one that returns a tensor it has ready. Each contestant makes one batch
of 3 x 32 x 32 images in float32, its grid of times made beforehand (azula's inside), in N steps and
in 3 N. A figure is what one more step costs, the difference over 2 N; after it in brackets stands
the whole run of N steps, over N. Contestants take turns. Time is CPU time of the thread, which does
not count what other programs of a busy machine take, and the lowest of all turns.

* diffusers: `FlowMatchEulerDiscreteScheduler` for Euler's method on the linear path,
  `DPMSolverMultistepScheduler` and `UniPCMultistepScheduler` for the multistep solvers, with the
  same kind of prediction; return_dict=False, the loop of its pipelines.
* azula: its sampler of the same formula, or the one nearest to it, on the schedule of the same
  name, without a progress bar.

Samplers that draw noise are listed apart: keyed noise costs more than torch's generator, which
`keyed_noise.py` measures.

Aim: at most half of diffusers', and no more than azula's.

azula is used where it is installed: ``pip install --no-deps azula einops`` into an environment of
its own, in which this file runs.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from torch import Tensor

from fluvial.core.gaussian.multistep import DDIM, DPMSolver, UniPC
from fluvial.core.gaussian.ode import Euler, Heun
from fluvial.core.gaussian.paths import AlphaSigmaPath, Linear, VPCosine
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import uniform_grid

try:
    import azula.denoise
    import azula.noise
    import azula.sample
except ImportError:
    azula = None  # type: ignore[assignment]

SHAPE = (3, 32, 32)
Contestant = Callable[[], object]


class Ready:
    """A field that returns a tensor it has ready."""

    def __init__(self, predicts: str, value: Tensor) -> None:
        self.predicts, self.value = predicts, value

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return self.value


def ours(sampler: Any, path: AlphaSigmaPath, kind: str, x: Tensor, steps: int) -> Contestant:
    field, noise, pairs = Ready(kind, torch.randn_like(x)), KeyedNoise(0), uniform_grid(steps)

    @torch.no_grad()
    def run() -> Tensor:
        return simulate(x, pairs, sampler, path, field, noise)  # type: ignore

    return run


def diffusers(scheduler: Any, x: Tensor, steps: int) -> Contestant:
    value = torch.randn_like(x)

    @torch.no_grad()
    def run() -> Tensor:
        state = x
        for t in scheduler.timesteps:
            state = scheduler.step(value, t, state, return_dict=False)[0]
        return state

    run.prepare = lambda: scheduler.set_timesteps(steps)  # type: ignore[attr-defined]
    return run


def azulas(name: str, schedule: str, x: Tensor, steps: int) -> Contestant | None:
    if azula is None:
        return None
    value = torch.randn_like(x)

    class Denoiser(azula.denoise.Denoiser):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.schedule = getattr(azula.noise, schedule)()

        def forward(self, x_t: Tensor, t: Tensor, **kwargs: Any) -> Any:
            return azula.denoise.DiracPosterior(value)

    sampler = getattr(azula.sample, name)(Denoiser(), steps=steps, silent=True)
    return lambda: sampler(x)


def rows(x: Tensor, steps: int) -> dict[str, dict[str, Contestant | None]]:
    """Contestants by row; "ours" first."""
    linear, cosine = Linear(), VPCosine()
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}

    def row(mine: Contestant, theirs: Any, name: str, schedule: str) -> dict[str, Any]:
        peer = diffusers(theirs, x, steps) if theirs is not None else None
        return {"ours": mine, "diffusers": peer, "azula": azulas(name, schedule, x, steps)}

    def mine(sampler: Any, path: AlphaSigmaPath, kind: str) -> Contestant:
        return ours(sampler, path, kind, x, steps)

    rectified, vp = "RectifiedSchedule", "CosineSchedule"
    return {
        "Euler, linear, velocity": row(
            mine(Euler(), linear, "velocity"),
            FlowMatchEulerDiscreteScheduler(),
            "EulerSampler",
            rectified,
        ),
        "Euler, linear, clean": row(
            mine(Euler(), linear, "clean"), None, "EulerSampler", rectified
        ),
        "Euler, cosine, clean": row(mine(Euler(), cosine, "clean"), None, "EulerSampler", vp),
        "Heun, linear, clean": row(mine(Heun(), linear, "clean"), None, "HeunSampler", rectified),
        "DDIM, linear, clean": row(mine(DDIM(), linear, "clean"), None, "EulerSampler", rectified),
        "DPM-Solver++ 2M, linear, velocity": row(
            mine(DPMSolver(2), linear, "velocity"),
            DPMSolverMultistepScheduler(solver_order=2, **flow),
            "xEABSampler",
            rectified,
        ),
        "DPM-Solver++ 2M, cosine, noise": row(
            mine(DPMSolver(2), cosine, "noise"),
            DPMSolverMultistepScheduler(solver_order=2),
            "xEABSampler",
            vp,
        ),
        "DPM-Solver++ 3M, cosine, noise": row(
            mine(DPMSolver(3), cosine, "noise"),
            DPMSolverMultistepScheduler(solver_order=3),
            "xEABSampler",
            vp,
        ),
        "UniPC-2, cosine, noise": row(
            mine(UniPC(2), cosine, "noise"),
            UniPCMultistepScheduler(solver_order=2),
            "xEABSampler",
            vp,
        ),
        "UniPC-3, cosine, noise": row(
            mine(UniPC(3), cosine, "noise"),
            UniPCMultistepScheduler(solver_order=3),
            "xEABSampler",
            vp,
        ),
        "drawing: Ancestral, linear, clean": row(
            mine(Ancestral(), linear, "clean"), None, "DDPMSampler", rectified
        ),
        "drawing: Euler-Maruyama, cosine, clean": row(
            mine(EulerMaruyama(), cosine, "clean"), None, "ItoSampler", vp
        ),
    }


def lowest(contestants: dict[str, Contestant], turns: int) -> dict[str, float]:
    """CPU microseconds of the quickest turn of each."""
    best = dict.fromkeys(contestants, float("inf"))
    gc.disable()
    for _ in range(turns + 1):
        for name, contestant in contestants.items():
            getattr(contestant, "prepare", lambda: None)()
            start = time.thread_time()
            contestant()
            best[name] = min(best[name], (time.thread_time() - start) * 1e6)
    gc.enable()
    return best


def measure(
    short: dict[str, Contestant | None], long: dict[str, Contestant | None], steps: int, turns: int
) -> dict[str, tuple[float, float]]:
    """(microseconds of one more step, those of a run over its steps) by contestant."""
    runs = {f"{name} {i}": run for i, row in enumerate((short, long)) for name, run in row.items()}
    best = lowest({name: run for name, run in runs.items() if run is not None}, turns)
    return {
        name: ((best[f"{name} 1"] - best[f"{name} 0"]) / (2 * steps), best[f"{name} 0"] / steps)
        for name, run in short.items()
        if run is not None
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.steps} steps")
    for batch in options.batch:
        x = torch.randn(batch, *SHAPE)
        title = f"{batch} x 3 x 32 x 32, us a step"
        print(f"\n{title:40} {'ours':>16} {'diffusers':>29} {'azula':>29}")
        short, long = rows(x, options.steps), rows(x, 3 * options.steps)
        for title, row in short.items():
            found = measure(row, long[title], options.steps, options.turns)
            line = f"{title:40} {found['ours'][0]:>8.1f} [{found['ours'][1]:.1f}]".ljust(57)
            for peer in ("diffusers", "azula"):
                text = "-"
                if peer in found:
                    one, whole = found[peer]
                    ratios = found["ours"][0] / one, found["ours"][1] / whole
                    text = f"{one:.1f} [{whole:.1f}], {ratios[0]:.2f} [{ratios[1]:.2f}]"
                line += f" {text:>29}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
