"""What categorical samplers and losses cost beside the network.

    python benchmarks/categorical.py [--threads N] [--classes V ...] [--batch N] [--length L]
        [--only NAME ...]

* sampling: a run of T steps around a bidirectional transformer, over T times the network's own
  forward pass (its logits alone) on the states that the run visits. Aim: at most 1.15.
* training: a masked-diffusion step (`TokenMatching`: noise, loss, backward, AdamW) over a bare loop
  that does the same with `torch.rand`, `cross_entropy` and the weight 1 / t. Aim: at most 1.05.
* flow_matching 1.0.10, where it is installed: its Euler solver of the mixture path and its
  generalised KL around the same network; and what either sampler loses of a toy's joint law.

Fields put probabilities in the place of logits (``overwrite``), but in the line that says "kept".

Contestants take turns, one after the other, and their times are CPU times of the thread, which do
not count what other programs take; a figure is the median of the ratios of the turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
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
def measured(name: str, run: Callable[[nn.Module], Any], network: nn.Module, args: Any) -> None:
    """Print the time of ``run(network)`` over that of the calls of the network that it makes."""
    if args.only and not any(part in name for part in args.only):
        return
    recorded = Recorded(network)
    run(recorded)
    calls = recorded.calls
    value, took = ratio(
        lambda: run(network), lambda: [network(*call) for call in calls], args.turns
    )
    step, rate = 1e3 * took / len(calls), args.batch * args.length / took
    print(f"  {name:45s} {value:6.3f}  ({step:.1f} ms a step, {rate:.0f} tokens/s)", flush=True)


def sampling(
    path: CategoricalPath, sampler: Any, network: nn.Module, args: Any, overwrite: bool = True
) -> None:
    noise = KeyedNoise(0)
    x = path.source(torch.zeros(args.batch, args.length, dtype=torch.int64), noise)

    def run(network: nn.Module) -> None:
        field = TokenField(network, path, overwrite=overwrite)
        simulate(x, uniform_grid(args.steps), sampler, path, field, noise)

    name = f"{type(path).__name__} {path.kind}, {type(sampler).__name__}"
    measured(name if overwrite else name + ", kept", run, network, args)


def peer(classes: int, network: nn.Module, args: Any) -> None:
    """flow_matching's Euler solver of the uniform mixture path; its time is 1 - t."""
    from flow_matching.path import MixtureDiscreteProbPath
    from flow_matching.path.scheduler import PolynomialConvexScheduler
    from flow_matching.solver import MixtureDiscreteEulerSolver

    x = torch.randint(classes, (args.batch, args.length), generator=torch.Generator())
    path = MixtureDiscreteProbPath(PolynomialConvexScheduler(n=1.0))

    def run(network: nn.Module) -> None:
        def model(x: Tensor, t: Tensor) -> Tensor:
            return network(x, 1 - t).softmax(-1)

        MixtureDiscreteEulerSolver(model, path, classes).sample(x, 1 / args.steps)

    measured("flow_matching uniform, Euler", run, network, args)


def training_of_flows(classes: int, args: Any) -> None:
    """The loss of the uniform mixture path, ours over flow_matching's."""
    from flow_matching.loss import MixturePathGeneralizedKL
    from flow_matching.path import MixtureDiscreteProbPath
    from flow_matching.path.scheduler import PolynomialConvexScheduler

    data = torch.randint(classes, (args.batch, args.length), generator=torch.Generator())
    networks = [build(classes, classes, args) for _ in range(2)]
    path = MixtureDiscreteProbPath(PolynomialConvexScheduler(n=1.0))
    ours = TokenMatching(networks[0], MixturePath(classes, "uniform"), loss="flow")
    theirs, noise, step = MixturePathGeneralizedKL(path), KeyedNoise(0), iter(range(10**9))

    def ours_step() -> None:
        ours({"x": data}, noise.at(next(step)))["loss"].backward()
        ours.zero_grad(set_to_none=True)

    def their_step() -> None:
        t = torch.rand(len(data)) * 0.999
        sample = path.sample(t=t, x_0=torch.randint(classes, data.shape), x_1=data)
        logits = networks[1](sample.x_t, 1 - t)
        theirs(logits=logits, x_1=data, x_t=sample.x_t, t=t).backward()
        networks[1].zero_grad(set_to_none=True)

    value, took = ratio(ours_step, their_step, args.turns)
    print(f"  flow loss and backward, over flow_matching's {value:6.3f}  ({1e3 * took:.1f} ms)")


@torch.no_grad()
def laws(rows: int = 200_000) -> None:
    """Total variation to a joint law of two tokens, with the exact posterior as the network."""
    joint = torch.tensor([[0.20, 0.05, 0.05], [0.05, 0.15, 0.10], [0.10, 0.10, 0.20]])
    pairs = torch.tensor(list(product(range(3), repeat=2)))
    flow = MixturePath(3, "uniform")

    class Exact:
        predicts = "clean"

        def __call__(self, x: Any, t: Tensor, **cond: Any) -> Tensor:
            keep = 1 - (t.reshape(-1)[0] if t.ndim else t).float()
            like = keep * torch.eye(3) + (1 - keep) / 3
            law = joint * like[:, pairs[:, 0]].T[:, :, None] * like[:, pairs[:, 1]].T[:, None, :]
            p = torch.stack([law.sum(2), law.sum(1)], dim=1)
            return (p / p.sum(-1, keepdim=True))[x[:, 0] * 3 + x[:, 1]]

    x = flow.source(torch.zeros(rows, 2, dtype=torch.int64), KeyedNoise(0))

    def distance(x: Any) -> float:
        shares = torch.bincount(x[:, 0] * 3 + x[:, 1], minlength=9) / rows
        return float((shares - joint.flatten()).abs().sum() / 2)

    for steps in (2, 4, 8):
        ours = simulate(x, uniform_grid(steps), Ancestral(), flow, Exact(), KeyedNoise(1))
        text = f"  total variation in {steps} steps, jump steps {distance(ours):.4f}"
        if find_spec("flow_matching"):
            from flow_matching.path import MixtureDiscreteProbPath
            from flow_matching.path.scheduler import PolynomialConvexScheduler
            from flow_matching.solver import MixtureDiscreteEulerSolver

            path = MixtureDiscreteProbPath(PolynomialConvexScheduler(n=1.0))
            solver = MixtureDiscreteEulerSolver(lambda x, t: Exact()(x, 1 - t), path, 3)
            text += f", Euler of flow_matching {distance(solver.sample(x, 1 / steps)):.4f}"
        print(text, flush=True)


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
    parser.add_argument("--only", nargs="+", help="samplers with one of these in their names")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for classes in args.classes:
        print(f"V = {classes}, batch {args.batch} x {args.length}: over the network alone")
        absorbing = CategoricalPath(classes)
        network = build(classes, classes + 1, args).eval()
        sampling(absorbing, Ancestral(), network, args, overwrite=False)
        for sampler in (Ancestral(), FirstHitting(8), Confident(), Remasking()):
            sampling(absorbing, sampler, network, args)
        for path in (CategoricalPath(classes, "uniform"), MixturePath(classes, "uniform")):
            sampling(path, Ancestral(), network, args)
        sampling(CategoricalPath(classes, "uniform"), TauLeaping(), network, args)
        training(classes, args)
        if find_spec("flow_matching"):
            peer(classes, network, args)
            training_of_flows(classes, args)
        else:
            print("  flow_matching is not installed: it does not take part")
    laws()


if __name__ == "__main__":
    main()
