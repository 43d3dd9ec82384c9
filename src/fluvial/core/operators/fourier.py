"""Some frequencies of a signal or an image, as magnetic resonance measures them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fluvial.core.operators.base import Operator, Shape


class SubsampledFourier(Operator):
    """The orthonormal half-spectrum (`torch.fft.rfftn`) at chosen frequencies. Exact.

    A measurement is (*leading, count, 2): real and imaginary part of each frequency kept, in the
    order of the flattened mask. The half-spectrum holds one of each pair k, -k. The singular value
    of a frequency is 1 where both are in it (the columns that are their own conjugates, 0 and, of
    an even width, the last), and 1 / sqrt(2) elsewhere. A^+ is the inverse transform with zeros.

    Args:
        kept: bool, (1 or batch, *sides[:-1], sides[-1] // 2 + 1), of as many dimensions as are
            transformed; every row keeps as many. Whole columns always will do: see `columns_mask`.
        in_shape: of the event, whose last dimensions are ``sides``.

    Raises:
        TypeError: ``kept`` is not bool.
        ValueError: ``kept`` does not fit ``in_shape``, keeps nothing, not as much in every row, or
            k without -k in a column that is its own conjugate, where A^+ A would be no projector.
    """

    in_shape: Shape
    out_shape: Shape
    widens = True

    def __init__(self, kept: Tensor, in_shape: Shape) -> None:
        if kept.dtype != torch.bool:
            raise TypeError(f"kept must be bool, got {kept.dtype}")
        dims = kept.ndim - 1
        self.in_shape = tuple(in_shape)
        self.sides = self.in_shape[len(self.in_shape) - dims :]
        half = (*self.sides[:-1], self.sides[-1] // 2 + 1) if 0 < dims <= len(in_shape) else None
        if kept.shape[1:] != half or len(kept) == 0:
            raise ValueError(
                f"kept must be (1 or batch, *half) with the half-spectrum of an event of "
                f"{self.in_shape}, got {tuple(kept.shape)}"
            )
        counts = kept.flatten(1).sum(1)
        if not bool((counts == counts[0]).all()) or counts[0] == 0:
            raise ValueError(
                f"kept must keep as many frequencies in every row, and some, got {counts.tolist()}"
            )
        own = [0] if self.sides[-1] % 2 else [0, -1]
        columns = mirrored = kept[..., own]
        for axis in range(1, dims):
            mirrored = mirrored.flip(axis).roll(1, axis)
        if not torch.equal(columns, mirrored):
            raise ValueError(
                "kept must hold -k with k in the columns that are their own conjugates, whose "
                "frequencies come in pairs"
            )
        self.rows, self.half, self.dims = len(kept), half, tuple(range(-dims, 0))
        self.count = int(counts[0])
        leading = self.in_shape[: len(self.in_shape) - dims]
        self.out_shape = (*leading, self.count, 2)
        lead = (1,) * len(leading)
        self.index = kept.flatten(1).nonzero()[:, 1].reshape(self.rows, *lead, self.count)
        weights = torch.full(half, 2.0, dtype=torch.float64, device=kept.device)
        weights[..., own] = 1.0
        self.weights = weights.flatten()[self.index].unsqueeze(-1)

    @property
    def spectrum(self) -> Tensor:
        weights = self.weights.reshape(self.rows, self.count)
        images = math.prod(self.in_shape[: len(self.in_shape) - len(self.dims)])
        values = [row.rsqrt().repeat_interleave(row.long()).repeat(images) for row in weights]
        longest = max(map(len, values))
        return torch.stack([torch.nn.functional.pad(v, (0, longest - len(v))) for v in values])

    def _forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfftn(x, dim=self.dims, norm="ortho").flatten(-len(self.dims))
        index = self._like("index", x)
        if self.rows == 1:
            kept = modes.index_select(-1, index.flatten())
        else:
            kept = modes.gather(-1, index.expand(*modes.shape[:-1], self.count))
        return torch.view_as_real(kept)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._dagger(y / self._like("weights", y))

    def _dagger(self, y: Tensor) -> Tensor:
        kept, index = torch.view_as_complex(y.contiguous()), self._like("index", y)
        modes = kept.new_zeros(*kept.shape[:-1], math.prod(self.half))
        if self.rows == 1:
            modes = modes.index_copy(-1, index.flatten(), kept)
        else:
            modes = modes.scatter(-1, index.expand(kept.shape), kept)
        modes = modes.unflatten(-1, self.half)
        return torch.fft.irfftn(modes, self.sides, dim=self.dims, norm="ortho")


def columns_mask(sides: Shape, columns: Tensor) -> Tensor:
    """(1 or batch, *half) bool: whole ``columns`` of the half-spectrum of an event of ``sides``.

    Args:
        sides: that are transformed; the last is that of the columns.
        columns: (1 or batch, k) int, in [0, sides[-1] // 2].

    Raises:
        ValueError: a column is outside.
    """
    width = sides[-1] // 2 + 1
    if columns.ndim != 2 or not bool(((columns >= 0) & (columns < width)).all()):
        raise ValueError(f"columns must be (1 or batch, k), in [0, {width - 1}], got {columns}")
    kept = torch.zeros(len(columns), width, dtype=torch.bool, device=columns.device)
    kept = kept.scatter(1, columns, True).reshape(-1, *[1] * (len(sides) - 1), width)
    return kept.expand(-1, *sides[:-1], width).contiguous()
