"""A Fourier neural operator over fields on a grid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import per_row
from fluvial.networks.layers import initialise, linear


class SpectralConvolution(nn.Module):
    """K u = F^-1 (R F u): a matrix over channels for each of the lowest frequencies, 0 for others.

    Of an axis but the last, the frequencies -m/2 .. (m - 1)/2 of m modes; of the last, 0 .. m/2. So
    the weights do not depend on the grid, which must have as many frequencies.

    Args:
        width: channels.
        modes: m of each axis.
    """

    def __init__(self, width: int, modes: Sequence[int]) -> None:
        super().__init__()
        self.modes = tuple(modes)
        kept = (*self.modes[:-1], self.modes[-1] // 2 + 1)
        # (out, in, *kept) complex numbers, as pairs of reals: files and optimisers know these
        self.weight = nn.Parameter(torch.empty(width, width, *kept, 2))

    def forward(self, u: Tensor) -> Tensor:
        """``u``: (batch, width, *grid)."""
        axes = tuple(range(2, u.ndim))
        spectrum = torch.fft.rfftn(u, dim=axes, norm="forward")
        low = spectrum
        places = [self._kept(k, side) for k, side in enumerate(u.shape[2:])]
        for axis, place in zip(axes, places, strict=True):
            low = low.index_select(axis, place.to(u.device))
        weight = torch.view_as_complex(self.weight)
        mixed = torch.einsum("bi...,oi...->bo...", low, weight)
        for axis, place in zip(axes, places, strict=True):
            shape = list(mixed.shape)
            shape[axis] = spectrum.shape[axis]
            mixed = mixed.new_zeros(shape).index_copy(axis, place.to(u.device), mixed)
        return torch.fft.irfftn(mixed, s=u.shape[2:], dim=axes, norm="forward")

    def _kept(self, axis: int, side: int) -> Tensor:
        m = self.modes[axis]
        if axis == len(self.modes) - 1:
            return torch.arange(m // 2 + 1)
        return torch.arange(-(m // 2), m - m // 2) % side


class FNO(nn.Module):
    """A Fourier neural operator of fields, called as ``network(x, t)``.

    The field, the coordinates of its grid in [0, 1] and an embedding of the time are lifted to
    ``width`` channels by a perceptron, go through ``depth`` layers

        u <- gelu(K u + W u),   the last one without gelu,

    K a `SpectralConvolution` and W a matrix over channels, and are brought to one channel by a
    perceptron (Li et al., ICLR 2021). The embedding is of z = 2000 (1 - t): sines and cosines of z
    times exp(-log(2000) k / (embedding / 2 - 1)). 1 - t is the clock of the official code.

    Args:
        shape: of an event, the grid: of one to three axes. Calls may have another grid that has
            ``modes``.
        modes: kept an axis, both signs counted; one number for all axes.
        width: channels.
        depth: layers.
        lift: hidden width of the two perceptrons.
        embedding: channels of the time, even.
        seed: of the initial weights.

    Raises:
        ValueError: a count out of its range, or more modes than the grid has; in a call, an event
            of another number of axes or a coarser grid.

    Defaults are the paper's for heat, but ``modes``, of which it keeps 32.
    """

    def __init__(
        self,
        *,
        shape: Sequence[int],
        modes: int | Sequence[int] = 16,
        width: int = 64,
        depth: int = 4,
        lift: int = 256,
        embedding: int = 32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.shape = tuple(int(side) for side in shape)
        kept = (modes,) * len(self.shape) if isinstance(modes, int) else tuple(modes)
        if not 1 <= len(self.shape) <= 3 or len(kept) != len(self.shape):
            raise ValueError(
                f"shape must have one to three axes and modes as many, got {self.shape} and {kept}"
            )
        if min(kept) < 1 or any(m > n for m, n in zip(kept, self.shape, strict=True)):
            raise ValueError(f"modes must lie in 1 .. {self.shape}, got {kept}")
        if min(width, depth, lift) < 1 or embedding < 4 or embedding % 2:
            raise ValueError(
                "need width, depth and lift of at least 1 and an even embedding of 4 or more, got "
                f"{width}, {depth}, {lift} and {embedding}"
            )
        self.modes = kept
        self.args: dict[str, Any] = {
            "shape": self.shape,
            "modes": self.modes,
            "width": width,
            "depth": depth,
            "lift": lift,
            "embedding": embedding,
        }
        self.embedding = embedding
        self.lift = nn.Sequential(
            linear(1 + len(self.shape) + embedding, lift), nn.GELU(), linear(lift, width)
        )
        self.spectral = nn.ModuleList(SpectralConvolution(width, kept) for _ in range(depth))
        self.local = nn.ModuleList(linear(width, width) for _ in range(depth))
        self.project = nn.Sequential(linear(width, lift), nn.GELU(), linear(lift, 1))
        initialise(self, seed)
        noise = KeyedNoise(seed)
        for name, part in self.named_modules():
            if isinstance(part, SpectralConvolution):
                part.weight.data = noise.normal(part.weight, name) / width

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Args:
        x: (batch, *grid).
        t: () or (batch,), in [0, 1].
        """
        grid = x.shape[1:]
        if len(grid) != len(self.shape) or any(
            n < m for n, m in zip(grid, self.modes, strict=True)
        ):
            raise ValueError(
                f"x must have shape (batch, *grid) with a grid of {len(self.shape)} axes and at "
                f"least {self.modes} points, got {tuple(x.shape)}"
            )
        time = self._embedded(per_row(t, x))
        axes = [torch.linspace(0, 1, n, dtype=x.dtype, device=x.device) for n in grid]
        places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)
        # a linear layer of constant channels is a shift: they need no copies over the grid
        first, act, second = self.lift
        assert isinstance(first, nn.Linear)
        parts = first.weight.split([1, len(grid), self.embedding], 1)
        z = x[..., None] * parts[0][:, 0] + places @ parts[1].T + first.bias
        u = second(act(z + (time @ parts[2].T).reshape(len(x), *[1] * len(grid), -1)))
        last = len(self.spectral) - 1
        for k, (spectral, local) in enumerate(zip(self.spectral, self.local, strict=True)):
            u = spectral(u.movedim(-1, 1)).movedim(1, -1) + local(u)
            u = functional.gelu(u) if k < last else u
        return self.project(u)[..., 0]

    def _embedded(self, t: Tensor) -> Tensor:
        half = self.embedding // 2
        k = torch.arange(half, dtype=t.dtype, device=t.device)
        angles = 2000 * (1 - t)[:, None] * torch.exp(-math.log(2000) * k / (half - 1))
        return torch.cat([angles.sin(), angles.cos()], 1)
