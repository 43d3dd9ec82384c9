"""Pieces of networks that work under `torch.func.jvp`, also inside `torch.compile`.

Attention goes through `scaled_dot_product_attention`, whose fused kernels have no forward-mode
derivative: whoever takes a jvp of a network chooses the MATH backend around the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional
from torch.nn.utils import skip_init
from torch.utils.checkpoint import checkpoint

from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import class_per_row, per_row

T = TypeVar("T")
Start: TypeAlias = Literal["xavier", "small", "zero"]


class Linear(nn.Linear):
    """A linear layer that says how `initialise` should start it."""

    start: Start


class Conv(nn.Conv2d):
    """A convolution that says how `initialise` should start it."""

    start: Start


def linear(inputs: int, outputs: int, start: Start = "xavier", *, bias: bool = True) -> Linear:
    """A layer with its weights left for `initialise`, so that no global seed is used."""
    layer = skip_init(Linear, inputs, outputs, bias=bias)
    layer.start = start
    return layer


def conv(inputs: int, outputs: int, side: int, start: Start = "xavier") -> Conv:
    """A convolution that keeps the size, its weights left for `initialise`; ``side`` is odd."""
    layer = skip_init(Conv, inputs, outputs, side, padding=side // 2)
    layer.start = start
    return layer


def initialise(module: nn.Module, seed: int) -> None:
    """Start layers: ``"xavier"`` uniform, ``"small"`` N(0, 0.02^2) as embeddings, or ``"zero"``.

    Biases are zero.
    Keyed by parameter name, so that a layer starts the same whatever else the network holds.
    """
    noise = KeyedNoise(seed)
    for prefix, part in module.named_modules():
        if isinstance(part, nn.Embedding):
            part.weight.data = 0.02 * noise.normal(part.weight, prefix)
        elif isinstance(part, Linear | Conv):
            if part.bias is not None:
                part.bias.data.zero_()
            match part.start:
                case "zero":
                    part.weight.data.zero_()
                case "small":
                    part.weight.data = 0.02 * noise.normal(part.weight, prefix)
                case "xavier":
                    outputs, inputs, *window = part.weight.shape
                    bound = math.sqrt(6 / ((inputs + outputs) * math.prod(window)))
                    part.weight.data = bound * (2 * noise.uniform(part.weight, prefix) - 1)


def recompute(block: Callable[..., T], *inputs: Tensor | None) -> T:
    """``block(*inputs)`` without keeping its activations, computed again when gradients are.

    Where a tangent passes, as in `torch.func.jvp`, activations are kept as usual: what is computed
    again in the backward pass would have no tangents.
    """
    if any(value is not None and unpack_dual(value).tangent is not None for value in inputs):
        return block(*inputs)
    # no random state is kept, as no block draws
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)


def through(
    blocks: Iterable[nn.Module], z: Tensor, *inputs: Tensor | None, checkpoint: bool
) -> Tensor:
    """``z`` after all blocks, z <- block(z, *inputs), by `recompute` if ``checkpoint``."""
    for block in blocks:
        z = recompute(block, z, *inputs) if checkpoint else block(z, *inputs)
    return z


def layer_norm(x: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-6) over the last dimension, without affine parameters."""
    if torch.compiler.is_compiling():
        # a compiled jvp over the fused layer norm fails in torch 2.13
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6)


class GroupNorm(nn.Module):
    """gain (x - mean) / sqrt(var + 1e-6) + bias, moments over a group of channels and all pixels.

    Groups are as many as divide the channels, up to 32, with 4 channels in each at least. Without
    ``affine`` gain is 1 and bias 0.
    """

    def __init__(self, channels: int, *, affine: bool = True) -> None:
        super().__init__()
        self.groups = max(
            count
            for count in range(1, 33)
            if channels % count == 0 and (count == 1 or channels >= 4 * count)
        )
        self.gain = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return functional.group_norm(x, self.groups, self.gain, self.bias, 1e-6)
        # a compiled jvp over the fused group norm fails in torch 2.13, as over the layer norm
        groups = x.reshape(len(x), self.groups, -1)
        centred = groups - groups.mean(-1, keepdim=True)
        scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)
        x = scaled.reshape(x.shape)
        if self.gain is None or self.bias is None:
            return x
        return x * self.gain[:, None, None] + self.bias[:, None, None]


class RMSNorm(nn.Module):
    """gain x / sqrt(mean(x^2) + 1e-6) over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


class ScalarEmbedding(nn.Module):
    """Sinusoid, linear, SiLU, linear: (batch,) to (batch, width).

    The sinusoid is [cos(t w_i), sin(t w_i)] with w_i = 10000^(-2 i / frequencies). ``t`` enters
    raw, in [0, 1]: multiplied by 1000, as networks of discrete steps do, its derivative would make
    a MeanFlow diverge.
    """

    rates: Tensor

    def __init__(self, width: int, frequencies: int = 256) -> None:
        super().__init__()
        half = torch.arange(frequencies // 2, dtype=torch.float64) / (frequencies // 2)
        rates = torch.exp(-math.log(10_000.0) * half).float()
        self.register_buffer("rates", rates, persistent=False)
        self.inner = linear(frequencies, width, start="small")
        self.outer = linear(width, width, start="small")

    def forward(self, t: Tensor) -> Tensor:
        angles = t[:, None] * self.rates.to(t.dtype)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.outer(functional.silu(self.inner(waves)))


class Patches(nn.Module):
    """Images (batch, channels, height, width) as tokens (batch, tokens, channels * patch^2)."""

    def __init__(self, size: int | tuple[int, int], channels: int, patch: int) -> None:
        super().__init__()
        height, width = (size, size) if isinstance(size, int) else size
        if min(height, width, channels, patch) < 1 or height % patch or width % patch:
            raise ValueError(
                f"size must be a positive multiple of patch, got size={size}, patch={patch}"
            )
        self.shape = (channels, height, width)
        self.grid = (height // patch, width // patch)
        self.patch = patch
        self.values = channels * patch * patch

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(
                f"x must have shape (batch, {', '.join(map(str, self.shape))}), "
                f"got {tuple(x.shape)}"
            )
        rows, columns = self.grid
        split = x.reshape(len(x), self.shape[0], rows, self.patch, columns, self.patch)
        return split.permute(0, 2, 4, 1, 3, 5).reshape(len(x), rows * columns, self.values)

    def join(self, tokens: Tensor) -> Tensor:
        """The image of these tokens."""
        rows, columns = self.grid
        split = tokens.reshape(len(tokens), rows, columns, self.shape[0], self.patch, self.patch)
        return split.permute(0, 3, 1, 4, 2, 5).reshape(len(tokens), *self.shape)


def look_up(name: str, table: nn.Embedding, index: Tensor) -> Tensor:
    """Rows of a table; on the CPU a `ValueError` where there is no such row."""
    try:
        return table(index.long())
    except IndexError:
        raise ValueError(
            f"{name} must lie in 0 .. {table.num_embeddings - 1}, got values from "
            f"{int(index.min())} to {int(index.max())}"
        ) from None


class LabelEmbedding(nn.Module):
    """One vector a class and one, the last, for "no label"."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.table = skip_init(nn.Embedding, num_classes + 1, width)

    def forward(self, label: Tensor | None, x: Tensor) -> Tensor:
        """(batch, width) for a ``label`` () or (batch,), of which ``num_classes`` means none."""
        if label is None:
            return self.table.weight[self.num_classes].expand(len(x), -1)
        return look_up("label", self.table, class_per_row(label, x))


class Conditioned(nn.Module):
    """A network of one condition c = SiLU(emb(t) + emb(h) + emb(label) + emb(vector))."""

    time: ScalarEmbedding
    interval: ScalarEmbedding
    label: LabelEmbedding | None
    vector: nn.Sequential | None

    def embed_conditions(self, width: int, num_classes: int, vector: int) -> None:
        """Make the embeddings, to ``width``, of classes and of ``vector`` numbers, if any."""
        self.time = ScalarEmbedding(width)
        self.interval = ScalarEmbedding(width)
        self.label = LabelEmbedding(num_classes, width) if num_classes else None
        self.vector = (
            nn.Sequential(linear(vector, width, "small"), nn.SiLU(), linear(width, width, "small"))
            if vector
            else None
        )
        self.num_classes, self.vector_size = num_classes, vector

    def condition(
        self,
        x: Tensor,
        t: Tensor,
        h: Tensor | None,
        label: Tensor | None,
        vector: Tensor | None,
    ) -> Tensor:
        """c, (batch, width)."""
        t = per_row(t, x)
        h = torch.zeros_like(t) if h is None else per_row(h, x)
        c = self.time(t) + self.interval(h)
        if self.label is not None:
            c = c + self.label(label, x)
        elif label is not None:
            raise ValueError("label given to a network with num_classes=0")
        if self.vector is not None:
            size = self.vector_size
            vector = x.new_zeros(len(x), size) if vector is None else vector.to(x.dtype)
            if tuple(vector.shape) != (len(x), size):
                raise ValueError(
                    f"vector must have shape ({len(x)}, {size}), got {tuple(vector.shape)}"
                )
            c = c + self.vector(vector)
        elif vector is not None:
            raise ValueError("vector given to a network with vector=0")
        return functional.silu(c)


def attend(qkv: Tensor, heads: int) -> Tensor:
    """Self-attention of (batch, tokens, 3 width), queries, keys and values of all heads."""
    batch, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.reshape(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(q, k, v)
    return mixed.transpose(1, 2).reshape(batch, tokens, width)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): pairs (x_i, x_{i + d/2}) turned by their angles."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def check_heads(width: int, heads: int) -> None:
    """Raise `ValueError` unless ``width`` splits into ``heads``."""
    if heads < 1 or width < 1 or width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width}, heads={heads}")
