"""Operators that keep the shape and act on every coordinate alone: weights and masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fluvial.core.operators.base import Operator, Shape, check_cutoff, modes, rows_and_shape
from fluvial.core.protocols import Noise


class Diagonal(Operator):
    """y = values x, coordinate by coordinate.

    Args:
        values: (1 or batch, *event); sizes of 1 are shared where ``in_shape`` has others.
        in_shape: by default the event of ``values``.
        cutoff: values of at most this, relative to the largest of their row, count as 0 in A^+,
            which then is truncated; with 0 it is exact.

    Raises:
        ValueError: ``values`` does not fit, is not finite or is 0 in a row, or ``cutoff`` is
            outside [0, 1).
    """

    in_shape: Shape
    out_shape: Shape

    def __init__(self, values: Tensor, in_shape: Shape | None = None, cutoff: float = 0.0) -> None:
        self.rows, self.in_shape = rows_and_shape("values", values, in_shape)
        self.out_shape = self.in_shape
        if not bool(values.isfinite().all()) or not bool((values != 0).flatten(1).any(1).all()):
            raise ValueError("values must be finite and not 0 in all of a row")
        self.values, self.cutoff = values, check_cutoff(cutoff)
        self.pseudo_inverse = "truncated" if cutoff else "exact"
        sizes = values.abs()
        kept = sizes > cutoff * sizes.amax(tuple(range(1, values.ndim)), keepdim=True)
        self.kept = kept.double()
        self.inverse = torch.where(kept, 1 / torch.where(kept, values, 1), 0)

    @property
    def spectrum(self) -> Tensor:
        return modes(self.values.abs().double(), math.prod(self.in_shape))

    def _forward(self, x: Tensor) -> Tensor:
        return self._like("values", x) * x

    _adjoint = _forward

    def _dagger(self, y: Tensor) -> Tensor:
        return self._like("inverse", y) * y

    def project(self, x: Tensor) -> Tensor:
        self._check("x", x, self.in_shape)
        return self._like("kept", x) * x


class Mask(Diagonal):
    """y = x where the mask is true, and 0 elsewhere: A = A^T = A^+. Exact.

    By a product, so what is not seen must be finite.

    Args:
        seen: bool, (1 or batch, *event); sizes of 1 are shared where ``in_shape`` has others, such
            as one mask for all channels.
        in_shape: by default the event of ``seen``.

    Raises:
        TypeError: ``seen`` is not bool.
        ValueError: ``seen`` does not fit, or a row sees nothing.
    """

    def __init__(self, seen: Tensor, in_shape: Shape | None = None) -> None:
        if seen.dtype != torch.bool:
            raise TypeError(f"seen must be bool, got {seen.dtype}")
        if not bool(seen.flatten(1).any(1).all()):
            raise ValueError("seen must be true somewhere in every row")
        super().__init__(seen.double(), in_shape)

    def _dagger(self, y: Tensor) -> Tensor:
        return self._forward(y)

    def project(self, x: Tensor) -> Tensor:
        return self.A(x)


def random_mask(like: Tensor, share: float, noise: Noise, tag: str = "mask") -> Tensor:
    """(batch, *event) bool, true at a random ``share`` of each event: round(share n), at least 1.

    Args:
        like: (batch, *event); of images with channels, ``like[:, :1]`` for one mask a row.
        share: in (0, 1].

    Raises:
        ValueError: ``share`` is outside (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1], got {share}")
    order = noise.uniform(like, tag).flatten(1).argsort(1)
    seen = order.argsort(1) < max(1, round(share * order.shape[1]))
    return seen.reshape(like.shape)


def box_mask(shape: Shape, size: Shape, start: Tensor) -> Tensor:
    """(1 or batch, *shape) bool, false inside a box: what lies behind it is to be painted in.

    Args:
        shape: of the event.
        size: of the box, in the last dimensions of the event.
        start: its first corner, (1 or batch, len(size)) int.

    Raises:
        ValueError: the box has no size or does not lie inside the event, or hides all of it.
    """
    sides = shape[len(shape) - len(size) :]
    if len(size) > len(shape) or start.ndim != 2 or start.shape[1] != len(size):
        raise ValueError(
            f"a box of {size} in {shape} needs start (1 or batch, {len(size)}), got "
            f"{tuple(start.shape)}"
        )
    last = torch.tensor(sides, device=start.device) - torch.tensor(size, device=start.device)
    if min(size) < 1 or not bool(((start >= 0) & (start <= last)).all()) or size == shape:
        raise ValueError(f"a box of {size} must lie inside {sides}, and not hide {shape}")
    seen = torch.zeros(len(start), *shape, dtype=torch.bool, device=start.device)
    for axis, (k, n) in enumerate(zip(size, sides, strict=True)):
        beyond = torch.arange(n, device=start.device) - start[:, axis, None]
        outside = (beyond < 0) | (beyond >= k)
        after = len(sides) - 1 - axis
        seen |= outside.reshape(len(start), *[1] * (len(shape) - 1 - after), n, *[1] * after)
    return seen
