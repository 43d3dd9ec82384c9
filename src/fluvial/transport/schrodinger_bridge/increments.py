"""Diffusion Schrödinger bridges by iterative proportional fitting: the baseline of DSBM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.losses import NetworkField
from fluvial.core.protocols import Field, Noise, Objective
from fluvial.transport.schrodinger_bridge.reference import Reference


class IncrementMatching(Objective):
    """Learns the drift that takes a simulated chain back, from its increments.

    The chain x_{k+1} = x_k + h f(x_k, t_k) + sigma sqrt(h) z_k has, to first order in h, the
    backward drift whose regression target at (x_{k+1}, t_{k+1}) is

        f(x_{k+1}, t_k) + sigma z_k / sqrt(h)    (see `increments`);

    the loss is the mean squared error of the drift. Where DSBM keeps both marginals and the
    reference's bridges, this keeps the chain alone, so that the reference enters through the first
    chain only, and errors add up.

    Args:
        network: called as ``network(x, t)``, on the clock that is 0 at the end it aims at.
        reference: the reference process.
        predicts: "score", "noise" or "clean", of which the drift is made.

    Citation: De Bortoli, Thornton, Heng and Doucet, NeurIPS 2021.
    """

    def __init__(self, network: nn.Module, reference: Reference, predicts: str) -> None:
        super().__init__()
        self.network, self.reference = network, reference
        self.score = convert(NetworkField(network, predicts), "score", reference)

    def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
        """``loss``, and ``error``, that of every row, at its time ``t``."""
        x, t = batch["x"], batch["t"]
        drift = self.reference.drift(x, self.score(x, t))
        error = (drift - batch["drift"]).square().unsqueeze(1).flatten(1).mean(1)
        return {"loss": error.mean(), "error": error.detach(), "t": t}


@dataclass(frozen=True)
class Free:
    """The reference process that starts from the end a simulation starts from, as its field.

    A simulation from t = 1 down has the drift F x - G^2 score in t increasing; that of the free
    process is a x, as its own time runs the other way.
    """

    reference: Reference
    predicts: str = "score"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return self.reference.score(x, self.reference.reversion * x)


def increments(states: Tensor, field: Field, reference: Reference) -> dict[str, Tensor]:
    """What `IncrementMatching` learns from, for the direction opposite to a simulation.

    Args:
        states: (N + 1, n, *event), Euler-Maruyama steps of equal length, the start first.
        field: what was simulated, on its own clock, which falls from 1 to 0; predicts a score.
        reference: the reference process.

    Returns:
        ``x`` (N n, *event), ``t`` (N n,) on the clock of the other direction, and ``drift``.
    """
    steps, rows = len(states) - 1, states.shape[1]
    drifts = []
    for k in range(steps):
        clock = torch.tensor(1 - k / steps, dtype=torch.float64)

        def forward(x: Tensor, clock: Tensor = clock) -> Tensor:
            return -reference.drift(x, field(x, clock))

        move = (states[k + 1] - states[k]) * steps
        drifts.append(move + forward(states[k + 1]) - forward(states[k]))
    t = torch.arange(1, steps + 1, device=states.device, dtype=states.dtype) / steps
    return {
        "x": states[1:].flatten(0, 1),
        "t": t.repeat_interleave(rows),
        "drift": torch.cat(drifts),
    }
