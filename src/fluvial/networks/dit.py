"""The diffusion transformer: patches, adaptive layer norm, conditions added into one vector.

Peebles and Xie, "Scalable Diffusion Models with Transformers", ICCV 2023.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.protocols import per_row
from fluvial.networks.layers import (
    LabelEmbedding,
    Patches,
    ScalarEmbedding,
    check_heads,
    initialise,
    layer_norm,
    linear,
)


class DiT(nn.Module):
    """Diffusion transformer with adaLN-zero, called as ``network(x, t, h=, label=)``.

    The condition is c = emb(t) + emb(h) + emb(label); every block is modulated by a linear map of
    SiLU(c) that starts at zero, and so does the last layer: the network starts at 0.

    Args:
        size: height and width, or one number for both.
        channels: of the image.
        patch: side of a patch; divides ``size``.
        width, depth, heads: of the transformer. B 768/12/12, M 1024/16/16, L 1024/24/16,
            XL 1152/28/16.
        num_classes: number of labels; 0 for an unconditional network.
        mlp_ratio: hidden width of the MLP over ``width``.
        seed: of the initial weights.

    Raises:
        ValueError: ``patch`` does not divide ``size``, ``width`` does not split into heads or four
            parts, a count is not positive; in a call, an image of another shape.
    """

    positions: Tensor

    def __init__(
        self,
        *,
        size: int | tuple[int, int],
        channels: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        num_classes: int = 0,
        mlp_ratio: float = 4.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        if width % 4 or depth < 1 or num_classes < 0:
            raise ValueError(
                "need width a multiple of 4, depth >= 1, num_classes >= 0, got "
                f"width={width}, depth={depth}, num_classes={num_classes}"
            )
        self.args = {
            "size": size,
            "channels": channels,
            "patch": patch,
            "width": width,
            "depth": depth,
            "heads": heads,
            "num_classes": num_classes,
            "mlp_ratio": mlp_ratio,
        }
        self.patches = Patches(size, channels, patch)
        self.shape, self.num_classes = self.patches.shape, num_classes
        self.register_buffer("positions", _positions(*self.patches.grid, width), persistent=False)
        self.embed = linear(self.patches.values, width)
        self.time = ScalarEmbedding(width)
        self.interval = ScalarEmbedding(width)
        self.label = LabelEmbedding(num_classes, width) if num_classes else None
        self.blocks = nn.ModuleList(_Block(width, heads, mlp_ratio) for _ in range(depth))
        self.modulation = linear(width, 2 * width, start="zero")
        self.out = linear(width, self.patches.values, start="zero")
        initialise(self, seed)

    def forward(
        self, x: Tensor, t: Tensor, *, h: Tensor | None = None, label: Tensor | None = None
    ) -> Tensor:
        """Args:
        x: (batch, channels, height, width).
        t: () or (batch,), in [0, 1].
        h: length of the jump that ends at t - h, shaped as ``t``; 0 by default.
        label: (batch,) classes, ``num_classes`` meaning none; none by default.
        """
        t = per_row(t, x)
        h = torch.zeros_like(t) if h is None else per_row(h, x)
        c = self.time(t) + self.interval(h)
        if self.label is not None:
            c = c + self.label(label, len(x))
        elif label is not None:
            raise ValueError("label given to a network with num_classes=0")
        c = functional.silu(c)
        z = self.embed(self.patches(x)) + self.positions
        for block in self.blocks:
            z = block(z, c)
        shift, scale = self.modulation(c)[:, None].chunk(2, dim=-1)
        return self.patches.join(self.out(layer_norm(z) * (1 + scale) + shift))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = linear(width, 3 * width)
        self.mix = linear(width, width)
        self.expand = linear(width, int(mlp_ratio * width))
        self.contract = linear(int(mlp_ratio * width), width)
        self.modulation = linear(width, 6 * width, start="zero")

    def forward(self, z: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, dim=-1)
        z = z + gate1 * self._attend(layer_norm(z) * (1 + scale1) + shift1)
        hidden = self.expand(layer_norm(z) * (1 + scale2) + shift2)
        return z + gate2 * self.contract(functional.gelu(hidden, approximate="tanh"))

    def _attend(self, z: Tensor) -> Tensor:
        batch, tokens, width = z.shape
        qkv = self.qkv(z).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.mix(mixed.transpose(1, 2).reshape(batch, tokens, width))


def _positions(rows: int, columns: int, width: int) -> Tensor:
    """Fixed sine-cosine positions (rows * columns, width): columns first, then rows."""
    rates = torch.exp(-math.log(10_000.0) * torch.arange(width // 4).double() / (width // 4))
    down, across = torch.meshgrid(
        torch.arange(rows).double(), torch.arange(columns).double(), indexing="ij"
    )
    angles = [axis.reshape(-1, 1) * rates for axis in (across, down)]
    return torch.cat([wave for a in angles for wave in (a.sin(), a.cos())], dim=-1).float()
