"""What categorical samplers and losses cost beside the network.

    python benchmarks/categorical.py [--threads N] [--classes V ...] [--batch N] [--length L]

* sampling: a run of T steps around a bidirectional transformer, over T times the network's own
  forward pass (its logits alone) on the states that the run visits. Aim: at most 1.15.
* training: a masked-diffusion step (`TokenMatching`: noise, loss, backward, AdamW) over a bare loop
  that does the same with `torch.rand`, `cross_entropy` and the weight 1 / t. Aim: at most 1.05.

Contestants take turns, one after the other, and their times are CPU times of the thread, which do
not count what other programs take; a figure is the median of the ratios of the turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.categorical.masked import Confident, FirstHitting, Remasking
from fluvial.core.categorical.objective import TokenMatching
from fluvial.core.categorical.paths import CategoricalPath, MixturePath
from fluvial.core.categorical.predictions import TokenField
from fluvial.core.categorical.samplers import TauLeaping
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import Stratified, uniform_grid
from fluvial.networks import TokenTransformer


def seconds(call: Callable[[], Any]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def ratio(ours: Callable[[], Any], bare: Callable[[], Any], turns: int) -> tuple[float, float]:
    """(median of ours / bare, median seconds of ours); one turn to warm up."""
    pairs = [(seconds(ours), seconds(bare)) for _ in range(turns + 1)][1:]
    return statistics.median(a / b for a, b in pairs), statistics.median(a for a, _ in pairs)


class Recorded(nn.Module):
    """A network that keeps what it was called with."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.calls = network, []

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.calls.append((x, t))
        return self.network(x, t)


@torch.no_grad()
def sampling(path: CategoricalPath, sampler: Any, network: nn.Module, args: Any) -> None:
    noise, steps = KeyedNoise(0), args.steps
    x = path.source(torch.zeros(args.batch, args.length, dtype=torch.int64), noise)
    recorded = Recorded(network)
    run = (uniform_grid(steps), sampler, path)
    simulate(x, *run, TokenField(recorded, path), noise)
    calls = recorded.calls
    value, took = ratio(
        lambda: simulate(x, *run, TokenField(network, path), noise),
        lambda: [network(*call) for call in calls],
        args.turns,
    )
    name = f"{type(path).__name__} {path.kind}, {type(sampler).__name__}"
    rate = args.batch * args.length / took
    print(f"  {name:45s} {value:6.3f}  ({1e3 * took / steps:.1f} ms a step, {rate:.0f} tokens/s)")


def training(classes: int, args: Any) -> None:
    def network() -> nn.Module:
        return build(classes, classes + 1, args)

    data = torch.randint(classes, (args.batch, args.length), generator=torch.Generator())
    ours = TokenMatching(network(), CategoricalPath(classes), times=Stratified())
    bare = network()
    optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in (ours, bare)]
    noise, step = KeyedNoise(0), iter(range(10**9))

    def ours_step() -> None:
        ours({"x": data}, noise.at(next(step)))["loss"].backward()
        optimizers[0].step()
        optimizers[0].zero_grad(set_to_none=True)

    def bare_step() -> None:
        t = torch.rand(len(data))
        masked = torch.rand(data.shape) < t[:, None]
        logits = bare(torch.where(masked, classes, data), t)
        loss = functional.cross_entropy(logits.flatten(0, 1), data.flatten(), reduction="none")
        (loss.reshape(data.shape) * masked / t[:, None]).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad(set_to_none=True)

    value, took = ratio(ours_step, bare_step, 3 * args.turns)
    print(f"  training step {value:37.3f}  ({1e3 * took:.1f} ms)")


def build(outputs: int, vocabulary: int, args: Any) -> nn.Module:
    return TokenTransformer(
        vocabulary=vocabulary,
        outputs=outputs,
        width=args.width,
        depth=args.depth,
        heads=args.width // 32,
        time=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--classes", type=int, nargs="+", default=[27, 50_257])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for classes in args.classes:
        print(f"V = {classes}, batch {args.batch} x {args.length}: over the network alone")
        absorbing = CategoricalPath(classes)
        network = build(classes, classes + 1, args).eval()
        for sampler in (Ancestral(), FirstHitting(8), Confident(), Remasking()):
            sampling(absorbing, sampler, network, args)
        for path in (CategoricalPath(classes, "uniform"), MixturePath(classes, "uniform")):
            sampling(path, Ancestral(), network, args)
        sampling(CategoricalPath(classes, "uniform"), TauLeaping(), network, args)
        training(classes, args)


if __name__ == "__main__":
    main()
