"""A training run in a process of its own, for tests that kill it or start several of it."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Noise, Objective
from fluvial.training.loop import Stage, Training, train
from fluvial.training.processes import is_main, sample_across


class Flow(Objective):
    """Flow matching of points with a network that has a layer no batch uses."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, 2))
        self.unused = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        noise = KeyedNoise(7)
        for name, value in self.named_parameters():
            value.data = 0.3 * noise.normal(value, name)
        self.pause, self.die = 0.0, None

    def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
        time.sleep(self.pause)
        x0 = batch["x"]
        t = noise.uniform(x0.new_empty(len(x0)), "t")
        eps = noise.normal(x0, "source")
        x = (1 - t)[:, None] * x0 + t[:, None] * eps
        error = (self.body(torch.cat([x, t[:, None]], 1)) - (eps - x0)).square().sum(1)
        return {"loss": error.mean(), "error": error, "t": t}

    def after_step(self) -> None:
        self.steps += 1
        if self.steps == self.die:
            os._exit(9)


def points(rows: int, seed: int) -> dict[str, Tensor]:
    x = KeyedNoise(seed).normal(torch.empty(rows, 2))
    return {"x": torch.stack([x[:, 0], x[:, 0].square() + 0.1 * x[:, 1]], 1)}


TRAINING = Training(
    steps=120,
    batch_size=12,
    lr=1e-2,
    warmup=10,
    schedule="cosine",
    clip=1.0,
    ema=(0.9, 0.99),
    checkpoint_every=17,
    keep=2,
    validate_every=30,
)


def stage(training: Training = TRAINING, objective: Flow | None = None) -> Stage:
    return Stage(objective or Flow(), points(40, 1), training, validation=points(15, 2))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--die", type=int, help="after this many steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    objective = Flow()
    objective.pause = options.pause
    objective.die = options.die
    if options.shard:
        from accelerate import PartialState
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        PartialState(cpu=True)
        fully_shard(objective, mesh=init_device_mesh("cpu", (PartialState().num_processes,)))
    training = replace(TRAINING, accumulation=options.accumulation)
    print("ready", flush=True)
    train(stage(training, objective), out=options.out, progress=False)

    if not options.shard:  # whose layers work inside the objective's forward pass only
        samples = sample(objective)
        if is_main():
            torch.save(samples, options.out / "samples.pt")


@torch.no_grad()
def sample(objective: Flow) -> Tensor:
    noise = KeyedNoise(3)
    return sample_across(
        lambda rows: objective.body(noise.rows(rows).normal(torch.empty(len(rows), 3))), 7
    )


if __name__ == "__main__":
    main()
