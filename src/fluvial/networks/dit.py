"""The diffusion transformer: patches, adaptive layer norm, conditions added into one vector.

Peebles and Xie, "Scalable Diffusion Models with Transformers", ICCV 2023.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from fluvial.networks.layers import (
    Conditioned,
    Patches,
    attend,
    check_heads,
    initialise,
    layer_norm,
    linear,
    through,
)


class DiT(Conditioned):
    """Diffusion transformer with adaLN-zero, called as ``network(x, t, h=, label=, vector=, ...)``.

    The condition is c = emb(t) + emb(h) + emb(label) + emb(vector); every block is modulated by a
    linear map of SiLU(c) that starts at zero, and so does the last layer: the network starts at 0.
    A sequence enters by a cross-attention in every block, z <- z + attend(norm(z), context), whose
    last layer starts at zero too (Chen et al., "PixArt-alpha", ICLR 2024).

    Args:
        size: height and width, or one number for both.
        channels: of the image.
        patch: side of a patch; divides ``size``.
        width, depth, heads: of the transformer. B 768/12/12, M 1024/16/16, L 1024/24/16,
            XL 1152/28/16.
        num_classes: number of labels; 0 for an unconditional network.
        mlp_ratio: hidden width of the MLP over ``width``.
        vector: numbers of a vector condition; 0 for none.
        context: numbers of one token of a sequence condition; 0 for none.
        checkpoint: compute the blocks again in the backward pass instead of keeping their
            activations; the attribute of this name may be set at any time. Gradients are the same.
        seed: of the initial weights.

    Raises:
        ValueError: ``patch`` does not divide ``size``, ``width`` does not split into heads or four
            parts, a count is not positive; in a call, an image or a condition of another shape, a
            condition that the network does not have.
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
        vector: int = 0,
        context: int = 0,
        checkpoint: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        counts = min(num_classes, vector, context)
        if width % 4 or depth < 1 or counts < 0 or int(mlp_ratio * width) < 1:
            raise ValueError(
                "need width a multiple of 4, depth >= 1, num_classes, vector and context >= 0 and "
                f"mlp_ratio * width >= 1, got width={width}, depth={depth}, "
                f"num_classes={num_classes}, vector={vector}, context={context}, "
                f"mlp_ratio={mlp_ratio}"
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
        # left out where 0, so that trainings from before there were any can be resumed
        self.args |= {"vector": vector} if vector else {}
        self.args |= {"context": context} if context else {}
        self.checkpoint = checkpoint
        self.patches = Patches(size, channels, patch)
        self.shape = self.patches.shape
        self.register_buffer("positions", _positions(*self.patches.grid, width), persistent=False)
        self.embed = linear(self.patches.values, width)
        self.embed_conditions(width, num_classes, vector)
        self.context = _Context(context, width) if context else None
        self.blocks = nn.ModuleList(
            _Block(width, heads, mlp_ratio, context > 0) for _ in range(depth)
        )
        self.modulation = linear(width, 2 * width, start="zero")
        self.out = linear(width, self.patches.values, start="zero")
        initialise(self, seed)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        *,
        h: Tensor | None = None,
        label: Tensor | None = None,
        vector: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """The prediction at (x, t).

        Args:
            x: (batch, channels, height, width).
            t: () or (batch,), in [0, 1].
            h: length of the jump that ends at t - h, shaped as ``t``; 0 by default.
            label: (batch,) classes, ``num_classes`` meaning none; none by default.
            vector: (batch, vector); zeros by default. Where zeros are not to mean "none", spend one
                more number on saying so.
            context: (batch, n, context), tokens in any number; none by default.
            context_mask: (batch, n) bool, True for the tokens to look at; all by default. A row
                without any is a row without context.
        """
        z = self.embed(self.patches(x)) + self.positions
        c = self.condition(x, t, h, label, vector)
        if self.context is not None:
            tokens, seen = self.context(context, context_mask, c)
        elif context is not None or context_mask is not None:
            raise ValueError("context given to a network with context=0")
        else:
            tokens = seen = None
        z = through(self.blocks, z, c, tokens, seen, checkpoint=self.checkpoint)
        shift, scale = self.modulation(c)[:, None].chunk(2, dim=-1)
        return self.patches.join(self.out(layer_norm(z) * (1 + scale) + shift))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, mlp_ratio: float, context: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = linear(width, 3 * width)
        self.mix = linear(width, width)
        self.expand = linear(width, int(mlp_ratio * width))
        self.contract = linear(int(mlp_ratio * width), width)
        self.modulation = linear(width, 6 * width, start="zero")
        self.cross = _CrossAttention(width, heads) if context else None

    def forward(self, z: Tensor, c: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, dim=-1)
        mixed = attend(self.qkv(layer_norm(z) * (1 + scale1) + shift1), self.heads)
        z = z + gate1 * self.mix(mixed)
        if self.cross is not None:
            z = z + self.cross(layer_norm(z), context, mask)
        hidden = self.expand(layer_norm(z) * (1 + scale2) + shift2)
        return z + gate2 * self.contract(functional.gelu(hidden, approximate="tanh"))


class _Context(nn.Module):
    """The tokens to look at; the first is a learned "none", there for every row."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.embed = linear(inputs, width)
        self.none = skip_init(nn.Embedding, 1, width)

    def forward(
        self, context: Tensor | None, mask: Tensor | None, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """((batch, 1 + n, width), (batch, 1, 1, 1 + n) bool)."""
        batch = len(like)
        if context is None:
            if mask is not None:
                raise ValueError("context_mask given without context")
            context = like.new_empty(batch, 0, self.inputs)
        if context.ndim != 3 or (len(context), context.shape[2]) != (batch, self.inputs):
            raise ValueError(
                f"context must have shape ({batch}, n, {self.inputs}), got {tuple(context.shape)}"
            )
        if mask is None:
            mask = context.new_ones(context.shape[:2], dtype=torch.bool)
        if mask.dtype != torch.bool or mask.shape != context.shape[:2]:
            raise ValueError(
                f"context_mask must be bool of shape {tuple(context.shape[:2])}, "
                f"got {mask.dtype} of {tuple(mask.shape)}"
            )
        none = self.none.weight.expand(batch, 1, -1)
        tokens = torch.cat([none, self.embed(context.to(like.dtype))], dim=1)
        seen = torch.cat([mask.new_ones(batch, 1), mask], dim=1)
        return layer_norm(tokens), seen[:, None, None]


class _CrossAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = linear(width, width)
        self.kv = linear(width, 2 * width)
        self.mix = linear(width, width, start="zero")

    def forward(self, z: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, width = z.shape
        q = self.q(z).reshape(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        k, v = (
            self.kv(context)
            .reshape(batch, context.shape[1], 2, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.mix(mixed.transpose(1, 2).reshape(batch, tokens, width))


def _positions(rows: int, columns: int, width: int) -> Tensor:
    """Fixed sine-cosine positions (rows * columns, width): columns first, then rows."""
    rates = torch.exp(-math.log(10_000.0) * torch.arange(width // 4).double() / (width // 4))
    down, across = torch.meshgrid(
        torch.arange(rows).double(), torch.arange(columns).double(), indexing="ij"
    )
    angles = [axis.reshape(-1, 1) * rates for axis in (across, down)]
    return torch.cat([wave for a in angles for wave in (a.sin(), a.cos())], dim=-1).float()
