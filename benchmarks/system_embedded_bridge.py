"""The system-embedded bridge next to training-free restoration, and what its projections cost.

    .venv/bin/python benchmarks/system_embedded_bridge.py [--steps N]

Part 1, the cost of a step but for the network: one ancestral step, one of the reverse SDE, and one
of the core's Euler and Maruyama, which takes the same step by general algebra, for four operators.

Part 2, digits of scikit-learn (8 x 8, in [-1, 1]; 1,400 to train on, 397 to test), three systems as
in the method's demonstration: the lower half missing; means of 2 x 2 with noise of 0.1; the columns
0, 1 and 3 of the spectrum with noise of 0.05. The bridge and the unconditional flow that DDNM and
PiGDM guide have the same U-Net and training. PSNR and CPU milliseconds an image.

Time is CPU time of the process, in one thread: it does not count what other programs take.

Aim: a step of at most half of the core's; a higher PSNR than methods without training on every
system.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from fluvial.core.gaussian.losses import Matching
from fluvial.core.gaussian.paths import Linear
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.operators.blur import Blur, gaussian_kernel
from fluvial.core.operators.diagonal import Mask
from fluvial.core.operators.downsample import AveragePool
from fluvial.core.operators.fourier import SubsampledFourier, columns_mask
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import uniform_grid
from fluvial.inverse.system_embedded_bridge import (
    SB,
    EmbeddedPath,
    ReverseEuler,
    SystemEmbeddedBridge,
    ddnm,
    pigdm,
)
from fluvial.metrics import psnr
from fluvial.networks import UNet
from fluvial.training.loop import Stage, Training, train

SHAPE = (1, 8, 8)
CALLS = 50


def systems() -> dict[str, tuple[Any, float]]:
    seen = torch.ones(1, *SHAPE, dtype=torch.bool)
    seen[:, :, 4:] = False
    columns = columns_mask((8, 8), torch.tensor([[0, 1, 3]]))
    return {
        "lower half": (Mask(seen), 0.0),
        "pooling": (AveragePool((2, 2), SHAPE), 0.1),
        "spectrum": (SubsampledFourier(columns, SHAPE), 0.05),
    }


def unet(channels: int) -> UNet:
    return UNet(size=8, channels=channels, width=32, multipliers=(1, 2), blocks=1)


def rule(steps: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "batch_size": 64,
        "lr": 1e-3,
        "betas": (0.9, 0.99),
        "schedule": "cosine",
        "clip": 1.0,
        "ema": 0.99,
    }


def digits(steps: int) -> None:
    pixels = torch.from_numpy(load_digits().images).float()[:, None] / 8 - 1
    order = KeyedNoise(0).uniform(torch.empty(len(pixels))).argsort()
    ours, clean = pixels[order[:1_400]], pixels[order[1_400:]]
    prior = Matching(unet(1), Linear())
    train(Stage(prior, {"x": ours}, Training(**rule(steps))), progress=False)
    prior.eval()
    print(f"part 2: {steps} steps, {CALLS} calls, {len(clean)} digits: dB (CPU ms an image)")
    names = ("A^+ y", "SDB", "DDNM", "PiGDM")
    print(f"{'':12}" + "".join(f"{name:>16}" for name in names))
    for name, (operator, std) in systems().items():
        model = SystemEmbeddedBridge(unet(2), steps=CALLS)
        model.fit(ours, operator, obs_noise=std, progress=False, **rule(steps))
        y = model.measure(clean)
        options: dict[str, Any] = {"obs_noise": std, "steps": CALLS}
        arms: dict[str, Callable[[], Tensor]] = {
            "A^+ y": lambda: operator.A_dagger(y),  # noqa: B023 (called at once)
            "SDB": lambda: model.restore(y),  # noqa: B023
            "DDNM": lambda: ddnm(prior.field, Linear(), y, operator, **options),  # noqa: B023
            "PiGDM": lambda: pigdm(
                prior.field,
                Linear(),
                y,  # noqa: B023
                operator,  # noqa: B023
                std=0.75,
                **options,  # noqa: B023
            ),
        }
        cells = []
        for arm in names:
            begin = time.process_time()
            x = arms[arm]().clamp(-1, 1)
            spent = 1_000 * (time.process_time() - begin) / len(clean)
            cells.append(f"{float(psnr(x, clean, data_range=2).mean()):.2f} ({spent:.1f})")
        print(f"{name:12}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


class Still:
    predicts = "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return x


def steps_alone() -> None:
    shape = (1, 64, 64)
    operators = {
        "mask": Mask(KeyedNoise(0).uniform(torch.empty(1, *shape)) < 0.5),
        "pooling": AveragePool((2, 2), shape),
        "spectrum": SubsampledFourier(columns_mask((64, 64), torch.arange(12)[None]), shape),
        "blur": Blur(gaussian_kernel(1.5), shape),
    }
    print("part 1: CPU ms of a step for 64 images of 64 x 64, without a network")
    print(f"{'':12}{'ancestral':>12}{'SDE':>12}{'core SDE':>12}{'ratio':>8}")
    x, steps = KeyedNoise(1).normal(torch.empty(64, *shape)), 20
    pairs = uniform_grid(steps, 0.95, 0.05)
    for name, operator in operators.items():
        path = EmbeddedPath.of(SB(), operator, 0.1)
        times = []
        for sampler in (Ancestral(), ReverseEuler(1.0, 0.0), EulerMaruyama()):
            spent = math.inf
            for _ in range(3):
                begin = time.process_time()
                simulate(x, pairs, sampler, path, Still(), KeyedNoise(2))
                spent = min(spent, 1_000 * (time.process_time() - begin) / steps)
            times.append(spent)
        row = "".join(f"{value:12.1f}" for value in times)
        print(f"{name:12}{row}{times[1] / times[2]:8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000, help="of every training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        steps_alone()
    digits(options.steps)


if __name__ == "__main__":
    main()
