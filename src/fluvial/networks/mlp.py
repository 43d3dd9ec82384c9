"""A residual multilayer perceptron for vectors: rows of tables, points, short arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

from fluvial.networks.layers import (
    Conditioned,
    initialise,
    layer_norm,
    linear,
)


class MLP(Conditioned):
    """Residual blocks with adaLN-zero, called as ``network(x, t, h=, label=)``.

    The blocks of a `DiT` without attention and with one token, the event as a vector:

        z = W x,   z <- z + gate (W2 gelu(W1 (norm(z) (1 + scale) + shift))) in every block,

    where shift, scale and gate are linear maps of SiLU(emb(t) + emb(h) + emb(label)) that start at
    zero. So does the last layer: the network starts at 0.

    Args:
        shape: of one event; of more than one dimension, it is flattened.
        width, depth: size of z, and number of blocks.
        num_classes: number of labels; 0 for an unconditional network.
        ratio: hidden width of a block over ``width``.
        seed: of the initial weights.

    Raises:
        ValueError: a count is not positive; in a call, an event of another shape.
    """

    def __init__(
        self,
        *,
        shape: Sequence[int],
        width: int,
        depth: int,
        num_classes: int = 0,
        ratio: float = 4.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not shape or min(*shape, width, depth) < 1 or num_classes < 0 or int(ratio * width) < 1:
            raise ValueError(
                "need positive sizes in shape, width >= 1, depth >= 1, num_classes >= 0 and "
                f"ratio * width >= 1, got shape={tuple(shape)}, width={width}, depth={depth}, "
                f"num_classes={num_classes}, ratio={ratio}"
            )
        self.shape = tuple(shape)
        self.args = {
            "shape": self.shape,
            "width": width,
            "depth": depth,
            "num_classes": num_classes,
            "ratio": ratio,
        }
        values = math.prod(shape)
        self.embed = linear(values, width)
        self.embed_conditions(width, num_classes, vector=0)
        self.blocks = nn.ModuleList(_Block(width, int(ratio * width)) for _ in range(depth))
        self.modulation = linear(width, 2 * width, start="zero")
        self.out = linear(width, values, start="zero")
        initialise(self, seed)

    def forward(
        self, x: Tensor, t: Tensor, *, h: Tensor | None = None, label: Tensor | None = None
    ) -> Tensor:
        """Args:
        x: (batch, *shape).
        t: () or (batch,), in [0, 1].
        h: length of the jump that ends at t - h, shaped as ``t``; 0 by default.
        label: (batch,) classes, ``num_classes`` meaning none; none by default.
        """
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(
                f"x must have shape (batch, {', '.join(map(str, self.shape))}), "
                f"got {tuple(x.shape)}"
            )
        c = self.condition(x, t, h, label, None)
        z = self.embed(x.flatten(1))
        for block in self.blocks:
            z = block(z, c)
        shift, scale = self.modulation(c).chunk(2, dim=-1)
        return self.out(layer_norm(z) * (1 + scale) + shift).reshape(x.shape)


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = linear(width, hidden)
        self.contract = linear(hidden, width)
        self.modulation = linear(width, 3 * width, start="zero")

    def forward(self, z: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(c).chunk(3, dim=-1)
        hidden = self.expand(layer_norm(z) * (1 + scale) + shift)
        return z + gate * self.contract(functional.gelu(hidden, approximate="tanh"))
