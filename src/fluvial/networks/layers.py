"""Pieces of a transformer that work under `torch.func.jvp`, also inside `torch.compile`.

Attention goes through `scaled_dot_product_attention`, whose fused kernels have no forward-mode
derivative: whoever takes a jvp of a network chooses the MATH backend around the call.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import skip_init

from fluvial.core.noise import KeyedNoise


class Linear(nn.Linear):
    """A linear layer that says how `initialise` should start it."""

    start: Literal["xavier", "small", "zero"]


def linear(
    inputs: int, outputs: int, start: Literal["xavier", "small", "zero"] = "xavier"
) -> Linear:
    """A layer with its weights left for `initialise`, so that no global seed is used."""
    layer = skip_init(Linear, inputs, outputs)
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
        elif isinstance(part, Linear):
            part.bias.data.zero_()
            match part.start:
                case "zero":
                    part.weight.data.zero_()
                case "small":
                    part.weight.data = 0.02 * noise.normal(part.weight, prefix)
                case "xavier":
                    bound = math.sqrt(6 / (part.in_features + part.out_features))
                    part.weight.data = bound * (2 * noise.uniform(part.weight, prefix) - 1)


def layer_norm(x: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-6) over the last dimension, without affine parameters."""
    if torch.compiler.is_compiling():
        # a compiled jvp over the fused layer norm fails in torch 2.13
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-6)
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6)


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


class LabelEmbedding(nn.Module):
    """One vector a class and one, the last, for "no label"."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.table = skip_init(nn.Embedding, num_classes + 1, width)

    def forward(self, label: Tensor | None, batch: int) -> Tensor:
        if label is None:
            return self.table.weight[self.num_classes].expand(batch, -1)
        return self.table(label)


def check_heads(width: int, heads: int) -> None:
    """Raise `ValueError` unless ``width`` splits into ``heads``."""
    if heads < 1 or width < 1 or width % heads:
        raise ValueError(f"width must be a multiple of heads, got width={width}, heads={heads}")
