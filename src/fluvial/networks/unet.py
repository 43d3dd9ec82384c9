"""The U-Net of diffusion models: residual blocks, modulated group norm, attention where it is low.

Ho et al., "Denoising Diffusion Probabilistic Models", NeurIPS 2020; the blocks and their starting
weights are those of Dhariwal and Nichol, "Diffusion Models Beat GANs on Image Synthesis", NeurIPS
2021 (ADM).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.networks.layers import (
    Conditioned,
    GroupNorm,
    attend,
    conv,
    initialise,
    linear,
    recompute,
)


class UNet(Conditioned):
    """Convolutional network of several resolutions, called as ``network(x, t, h=, label=, ...)``.

    Down: ``blocks`` residual blocks a level, then a block that averages over squares of pixels.
    Middle: two blocks, the first with attention. Up: ``blocks + 1`` blocks a level, each given the
    output of its counterpart on the way down, then a block that repeats pixels. A block is

        z <- W z + conv(silu(norm(conv(silu(norm z))) (1 + scale) + shift))

    with scale and shift linear maps of c = SiLU(emb(t) + emb(h) + emb(label) + emb(vector)). Its
    last convolution starts at zero, and so does the network's: the network starts at 0.

    Args:
        size: height and width, or one number for both. A call may come with another size, if
            ``factors`` divide it.
        channels: of the image.
        width: channels of the first level; conditions are embedded in 4 times as many numbers.
        multipliers: channels of each level over ``width``.
        factors: by which height and width shrink from a level to the next; 2 by default.
        blocks: residual blocks a level.
        attention: heights of the feature maps, for an image of ``size``, with attention after every
            residual block, as in 32 x 32 images (16, 8). The middle always has it.
        heads: of the attention; they divide the channels where there is attention.
        num_classes: number of labels; 0 for an unconditional network.
        vector: numbers of a vector condition; 0 for none.
        checkpoint: compute the blocks again in the backward pass instead of keeping their
            activations; the attribute of this name may be set at any time. Gradients are the same.
        seed: of the initial weights.

    Raises:
        ValueError: a count is not positive, ``factors`` are not one fewer than ``multipliers`` or
            do not divide ``size``, no level has a height that ``attention`` names, ``heads`` do not
            divide; in a call, an image that ``factors`` do not divide, a condition of another shape
            or one that the network does not have.
    """

    def __init__(
        self,
        *,
        size: int | tuple[int, int],
        channels: int,
        width: int,
        multipliers: Sequence[int] = (1, 2, 2),
        factors: Sequence[int] | None = None,
        blocks: int = 2,
        attention: Sequence[int] = (),
        heads: int = 4,
        num_classes: int = 0,
        vector: int = 0,
        checkpoint: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        height, breadth = (size, size) if isinstance(size, int) else size
        multipliers, attention = tuple(multipliers), tuple(attention)
        factors = (2,) * (len(multipliers) - 1) if factors is None else tuple(factors)
        counts = (height, breadth, channels, width, blocks, heads, *multipliers, *factors)
        if not multipliers or min(counts) < 1 or min(num_classes, vector) < 0:
            raise ValueError(
                "need positive sizes and counts, num_classes and vector >= 0, got "
                f"size={size}, channels={channels}, width={width}, multipliers={multipliers}, "
                f"factors={factors}, blocks={blocks}, heads={heads}, num_classes={num_classes}, "
                f"vector={vector}"
            )
        if len(factors) != len(multipliers) - 1:
            raise ValueError(
                f"factors must be one fewer than multipliers, got {factors} and {multipliers}"
            )
        self.args = {
            "size": size,
            "channels": channels,
            "width": width,
            "multipliers": multipliers,
            "factors": factors,
            "blocks": blocks,
            "attention": attention,
            "heads": heads,
            "num_classes": num_classes,
            "vector": vector,
        }
        self.checkpoint = checkpoint
        self.shape, self.factor = (channels, height, breadth), math.prod(factors)
        self._check(self.shape)
        heights = [height // math.prod(factors[:level]) for level in range(len(multipliers))]
        if unknown := set(attention) - set(heights):
            raise ValueError(
                f"attention must be among the heights {heights}, got {sorted(unknown)}"
            )
        sizes = [width * multiplier for multiplier in multipliers]
        attended = {level for level, height in enumerate(heights) if height in attention}
        if wrong := {sizes[level] for level in (*attended, -1) if sizes[level] % heads}:
            raise ValueError(f"heads must divide the channels, got {heads} and {sorted(wrong)}")

        self.embed_conditions(4 * width, num_classes, vector)
        self.enter = conv(channels, width, 3)
        self.down = nn.ModuleList()
        now, skips = width, [width]
        for level, then in enumerate(sizes):
            here = heads if level in attended else 0
            for _ in range(blocks):
                self.down.append(_Block(now, then, 4 * width, heads=here))
                now = then
                skips.append(now)
            if level < len(factors):
                self.down.append(_Block(now, now, 4 * width, down=factors[level]))
                skips.append(now)
        self.middle = nn.ModuleList(_Block(now, now, 4 * width, heads=k) for k in (heads, 0))
        self.up = nn.ModuleList()
        for level, then in reversed(list(enumerate(sizes))):
            here = heads if level in attended else 0
            for _ in range(blocks + 1):
                self.up.append(_Block(now, then, 4 * width, skip=skips.pop(), heads=here))
                now = then
            if level:
                self.up.append(_Block(now, now, 4 * width, up=factors[level - 1]))
        self.norm = GroupNorm(now)
        self.out = conv(now, channels, 3, start="zero")
        initialise(self, seed)

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        *,
        h: Tensor | None = None,
        label: Tensor | None = None,
        vector: Tensor | None = None,
    ) -> Tensor:
        """The prediction at (x, t).

        Args:
            x: (batch, channels, height, width), height and width multiples of all factors' product.
            t: () or (batch,), in [0, 1].
            h: length of the jump that ends at t - h, shaped as ``t``; 0 by default.
            label: (batch,) classes, ``num_classes`` meaning none; none by default.
            vector: (batch, vector); zeros by default. Where zeros are not to mean "none", spend one
                more number on saying so.
        """
        self._check(tuple(x.shape[1:]))
        c = self.condition(x, t, h, label, vector)
        z = self.enter(x)
        skips = [z]
        for block in self.down:
            z = self._run(block, z, c)
            skips.append(z)
        for block in itertools.chain(self.middle, self.up):
            if block.takes_skip:
                z = torch.cat([z, skips.pop()], dim=1)
            z = self._run(block, z, c)
        return self.out(functional.silu(self.norm(z)))

    def _run(self, block: nn.Module, z: Tensor, c: Tensor) -> Tensor:
        return recompute(block, z, c) if self.checkpoint else block(z, c)

    def _check(self, shape: tuple[int, ...]) -> None:
        channels, factor = self.shape[0], self.factor
        if len(shape) != 3 or shape[0] != channels or shape[1] % factor or shape[2] % factor:
            raise ValueError(
                f"images must have shape ({channels}, height, width) with height and width "
                f"multiples of {factor}, by which this network shrinks them; got {shape}: pad or "
                "resize them"
            )


class _Block(nn.Module):
    def __init__(
        self,
        inputs: int,
        outputs: int,
        conditions: int,
        *,
        skip: int = 0,
        heads: int = 0,
        down: int = 1,
        up: int = 1,
    ) -> None:
        super().__init__()
        inputs += skip
        self.takes_skip, self.shrink, self.grow = skip > 0, down, up
        self.norm1 = GroupNorm(inputs)
        self.conv1 = conv(inputs, outputs, 3)
        self.norm2 = GroupNorm(outputs, affine=False)
        self.modulation = linear(conditions, 2 * outputs)
        self.conv2 = conv(outputs, outputs, 3, start="zero")
        self.match = conv(inputs, outputs, 1) if inputs != outputs else None
        self.attention = _Attention(outputs, heads) if heads else None

    def forward(self, z: Tensor, c: Tensor) -> Tensor:
        y = functional.silu(self.norm1(z))
        if self.shrink > 1:
            y, z = _shrink(y, self.shrink), _shrink(z, self.shrink)
        if self.grow > 1:
            y, z = _grow(y, self.grow), _grow(z, self.grow)
        scale, shift = self.modulation(c)[:, :, None, None].chunk(2, dim=1)
        y = functional.silu(self.norm2(self.conv1(y)) * (1 + scale) + shift)
        z = (z if self.match is None else self.match(z)) + self.conv2(y)
        return z if self.attention is None else self.attention(z)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = GroupNorm(width)
        self.qkv = linear(width, 3 * width)
        self.mix = linear(width, width, start="zero")

    def forward(self, z: Tensor) -> Tensor:
        tokens = self.norm(z).flatten(2).mT  # (batch, pixels, channels)
        mixed = self.mix(attend(self.qkv(tokens), self.heads))
        return z + mixed.mT.reshape(z.shape)


def _shrink(z: Tensor, factor: int) -> Tensor:
    """Means over squares of ``factor`` x ``factor`` pixels."""
    return functional.avg_pool2d(z, factor)


def _grow(z: Tensor, factor: int) -> Tensor:
    """Every pixel ``factor`` x ``factor`` times."""
    return z.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
