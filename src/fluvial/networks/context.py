"""The transformer of Improved Mean Flows: every condition is a few tokens in the sequence.

Geng et al., "Improved Mean Flows", CVPR 2026, arXiv 2512.02012.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from fluvial.core.protocols import per_row
from fluvial.networks.layers import (
    LabelEmbedding,
    Patches,
    RMSNorm,
    ScalarEmbedding,
    check_heads,
    initialise,
    linear,
    rotate,
    through,
)

TOKENS = {"label": 8, "omega": 4, "t_min": 2, "t_max": 2, "h": 4}
"""Tokens a condition, as published."""


class ContextTransformer(nn.Module):
    """In-context conditions instead of adaLN, called as ``network(x, t, h=, label=, omega=, ...)``.

    Only the jump's length h enters, not t. omega enters as 1 - 1 / omega. Blocks have RMSNorm (also
    on queries and keys), rotary positions on the image tokens' rows and columns, SwiGLU of ratio
    8/3, and residual gates per channel that start at zero. The last layer starts at zero.

    Args:
        size, channels, patch, width, depth, heads, num_classes, checkpoint, seed: as
            `fluvial.networks.DiT`. Published: B 768/12, M 768/24, L 1024/32, XL 1024/48.
        velocity_depth: blocks of a second head that predicts the velocity; it branches off after
            ``depth - velocity_depth`` blocks, and is asked for with ``velocity=True``. 0: no such
            head. Published: 8.
    """

    cos: Tensor
    sin: Tensor

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
        velocity_depth: int = 0,
        checkpoint: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        if (width // heads) % 4:
            raise ValueError(
                f"rotary positions need width / heads a multiple of 4, got {width} / {heads}"
            )
        if not 0 <= velocity_depth < depth or num_classes < 0:
            raise ValueError(
                "need 0 <= velocity_depth < depth and num_classes >= 0, got "
                f"velocity_depth={velocity_depth}, depth={depth}, num_classes={num_classes}"
            )
        self.args = {
            "size": size,
            "channels": channels,
            "patch": patch,
            "width": width,
            "depth": depth,
            "heads": heads,
            "num_classes": num_classes,
            "velocity_depth": velocity_depth,
        }
        self.checkpoint = checkpoint
        self.patches = Patches(size, channels, patch)
        self.shape, self.num_classes = self.patches.shape, num_classes
        self.has_velocity_head = velocity_depth > 0
        self.counts = {
            name: count for name, count in TOKENS.items() if num_classes or name != "label"
        }
        self.embed = linear(self.patches.values, width)
        self.scalars = nn.ModuleDict(
            {name: ScalarEmbedding(width) for name in self.counts if name != "label"}
        )
        self.label = LabelEmbedding(num_classes, width) if num_classes else None
        self.slots = skip_init(nn.Embedding, sum(self.counts.values()), width)
        shared = depth - velocity_depth
        self.trunk = nn.ModuleList(_Block(width, heads) for _ in range(shared))
        self.heads = nn.ModuleList(
            _Head(width, heads, velocity_depth, self.patches.values)
            for _ in range(2 if velocity_depth else 1)
        )
        angles = _angles(*self.patches.grid, width // heads, sum(self.counts.values()))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        initialise(self, seed)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        *,
        h: Tensor | None = None,
        label: Tensor | None = None,
        omega: Tensor | None = None,
        t_min: Tensor | None = None,
        t_max: Tensor | None = None,
        velocity: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Args:
        x: (batch, channels, height, width).
        t: not used; here because every network takes it.
        h, omega, t_min, t_max: () or (batch,); by default 0, 1, 0 and 1.
        label: (batch,) classes, ``num_classes`` meaning none; none by default.
        velocity: return (average velocity, velocity) instead of the average velocity.
        """
        ones = x.new_ones(len(x))
        values = {
            "omega": 0 * ones if omega is None else 1 - 1 / per_row(omega, x),
            "t_min": 0 * ones if t_min is None else per_row(t_min, x),
            "t_max": ones if t_max is None else per_row(t_max, x),
            "h": 0 * ones if h is None else per_row(h, x),
        }
        if self.label is None and label is not None:
            raise ValueError("label given to a network with num_classes=0")
        if velocity and not self.has_velocity_head:
            raise ValueError("velocity=True needs a network with velocity_depth > 0")
        tokens = []
        for name, count in self.counts.items():
            if name == "label":
                token = self.label(label, x)  # type: ignore[misc]
            else:
                token = self.scalars[name](values[name])
            tokens.append(token[:, None].expand(-1, count, -1))
        context = torch.cat(tokens, dim=1) + self.slots.weight
        z = torch.cat([context, self.embed(self.patches(x))], dim=1)
        z = through(self.trunk, z, self.cos, self.sin, checkpoint=self.checkpoint)
        skip = len(self.slots.weight)
        heads = self.heads if velocity else self.heads[:1]
        first, *rest = (
            self.patches.join(head(z, self.cos, self.sin, skip, self.checkpoint)) for head in heads
        )
        return (first, rest[0]) if velocity else first


class _Head(nn.Module):
    def __init__(self, width: int, heads: int, depth: int, values: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.norm = RMSNorm(width)
        self.out = linear(width, values, start="zero")

    def forward(self, z: Tensor, cos: Tensor, sin: Tensor, skip: int, checkpoint: bool) -> Tensor:
        z = through(self.blocks, z, cos, sin, checkpoint=checkpoint)
        return self.out(self.norm(z[:, skip:]))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        hidden = 8 * width // 3
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.norm_q, self.norm_k = RMSNorm(width // heads), RMSNorm(width // heads)
        self.qkv = linear(width, 3 * width)
        self.mix = linear(width, width)
        self.expand = linear(width, 2 * hidden)
        self.contract = linear(hidden, width)
        self.gate1, self.gate2 = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, z: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        z = z + self.gate1 * self._attend(self.norm1(z), cos, sin)
        gate, value = self.expand(self.norm2(z)).chunk(2, dim=-1)
        return z + self.gate2 * self.contract(functional.silu(gate) * value)

    def _attend(self, z: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, width = z.shape
        qkv = self.qkv(z).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q = rotate(self.norm_q(q), cos, sin)
        k = rotate(self.norm_k(k), cos, sin)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.mix(mixed.transpose(1, 2).reshape(batch, tokens, width))


def _angles(rows: int, columns: int, dim: int, context: int) -> Tensor:
    """(context + rows * columns, dim / 2): rows, then columns; 0 for the context."""
    rates = 10_000.0 ** (-torch.arange(dim // 4).float() / (dim // 4))
    down, across = torch.meshgrid(
        torch.arange(rows).float(), torch.arange(columns).float(), indexing="ij"
    )
    image = torch.cat([axis.reshape(-1, 1) * rates for axis in (down, across)], dim=-1)
    return torch.cat([torch.zeros(context, dim // 2), image])
