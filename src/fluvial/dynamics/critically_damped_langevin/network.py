"""The residual network of the official code."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.protocols import per_row
from fluvial.networks.layers import initialise, linear


class ResidualMLP(nn.Module):
    """Layers h <- h + ReLU(W h + V e(t)) between two linear maps, called as ``network(x, t)``.

    e(t) = ReLU(U [sin(t w), cos(t w)]), w_i = 10000^(-i / (width / 2 - 1)), as in the official code
    of Strasman et al., where t in [0, 1] enters as it is and most of e(t) is nearly linear in t;
    ``time_scale = 1000`` uses all of the frequencies. The official code has a network like this for
    either part of the score; here one has both, at the cost of one.

    Args:
        inputs: numbers of a row: 2 d for positions and momenta in d dimensions.
        outputs: d for the momentum part of the score (epsilon = 0), 2 d for all of it.
        width: even, at least 4.
        depth: number of residual layers.
        time_scale: by which t is multiplied.
        seed: of the initial weights.

    Raises:
        ValueError: a size is out of its range; in a call, rows of another size.
    """

    rates: Tensor

    def __init__(
        self,
        *,
        inputs: int,
        outputs: int,
        width: int = 512,
        depth: int = 3,
        time_scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(inputs, outputs, depth) < 1 or width < 4 or width % 2:
            raise ValueError(
                "need inputs, outputs and depth >= 1 and an even width >= 4, got "
                f"inputs={inputs}, outputs={outputs}, depth={depth}, width={width}"
            )
        if not 0 < time_scale < math.inf:
            raise ValueError(f"time_scale must be positive and finite, got {time_scale}")
        self.args = {
            "inputs": inputs,
            "outputs": outputs,
            "width": width,
            "depth": depth,
            "time_scale": time_scale,
        }
        half = width // 2
        exponents = torch.arange(half, dtype=torch.float64) / (half - 1)
        rates = time_scale * torch.exp(-math.log(10_000.0) * exponents)
        self.register_buffer("rates", rates.float(), persistent=False)
        self.embed = linear(inputs, width)
        self.time = linear(width, width, bias=False)
        self.layers = nn.ModuleList(linear(width, width) for _ in range(depth))
        self.shifts = nn.ModuleList(linear(width, width) for _ in range(depth))
        self.out = linear(width, outputs)
        initialise(self, seed)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """(batch, inputs) to (batch, outputs); t is () or (batch,)."""
        if x.ndim != 2 or x.shape[1] != self.args["inputs"]:
            raise ValueError(
                f"x must have shape (batch, {self.args['inputs']}), got {tuple(x.shape)}"
            )
        angles = per_row(t, x)[:, None] * self.rates.to(x.dtype)
        e = functional.relu(self.time(torch.cat([angles.sin(), angles.cos()], 1)))
        h = self.embed(x)
        for layer, shift in zip(self.layers, self.shifts, strict=True):
            h = h + functional.relu(layer(h) + shift(e))
        return self.out(h)
