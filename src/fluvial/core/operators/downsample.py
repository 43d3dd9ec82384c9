"""Smaller images: averages of blocks, and the bicubic filter."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fluvial.core.operators.base import Operator, Shape

POOL: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class AveragePool(Operator):
    """Means of blocks of ``factor`` coordinates, in the last dimensions. A^+ = size A^T. Exact.

    Args:
        factor: of 1 to 3 dimensions.
        in_shape: of the event; its last dimensions are multiples of ``factor``.

    Raises:
        ValueError: they are not, or ``factor`` is no such tuple of positive numbers.
    """

    in_shape: Shape
    out_shape: Shape
    widens = True

    def __init__(self, factor: tuple[int, ...], in_shape: Shape) -> None:
        self.factor = tuple(factor)
        self.in_shape, self.out_shape = tuple(in_shape), _smaller(self.factor, in_shape)
        self.size = math.prod(self.factor)

    @property
    def spectrum(self) -> Tensor:
        count = math.prod(self.out_shape)
        return torch.full((1, count), self.size**-0.5, dtype=torch.float64)

    def _forward(self, x: Tensor) -> Tensor:
        dims = len(self.factor)
        images = x.reshape(-1, 1, *x.shape[x.ndim - dims :])
        return POOL[dims](images, self.factor).reshape(len(x), *self.out_shape)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._dagger(y / self.size)

    def _dagger(self, y: Tensor) -> Tensor:
        for k, dim in zip(self.factor, range(-len(self.factor), 0), strict=True):
            y = y.repeat_interleave(k, dim)
        return y


class Bicubic(Operator):
    """Downsampling of images by the antialiased bicubic filter of Pillow and torch. Exact.

    By one small matrix an axis, so that the pseudo-inverse is one of each.

    Args:
        factor: in both of the last dimensions.
        in_shape: of the event; its last two dimensions are multiples of ``factor``.

    Raises:
        ValueError: they are not, or ``factor`` is not positive.
    """

    in_shape: Shape
    out_shape: Shape

    def __init__(self, factor: int, in_shape: Shape) -> None:
        self.in_shape, self.out_shape = tuple(in_shape), _smaller((factor, factor), in_shape)
        self.first, self.second = (_bicubic(n, factor) for n in self.in_shape[-2:])
        self.first_inverse = torch.linalg.pinv(self.first)
        self.second_inverse = torch.linalg.pinv(self.second)

    @property
    def spectrum(self) -> Tensor:
        first, second = (torch.linalg.svdvals(m) for m in (self.first, self.second))
        return torch.outer(first, second).flatten().repeat(math.prod(self.in_shape[:-2]))[None]

    def _forward(self, x: Tensor) -> Tensor:
        return self._like("first", x) @ (x @ self._like("second", x).mT)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._like("first", y).mT @ y @ self._like("second", y)

    def _dagger(self, y: Tensor) -> Tensor:
        return self._like("first_inverse", y) @ y @ self._like("second_inverse", y).mT


def _smaller(factor: tuple[int, ...], in_shape: Shape) -> Shape:
    sides = tuple(in_shape)[len(in_shape) - len(factor) :]
    if not 1 <= len(factor) <= min(3, len(in_shape)) or min(factor) < 1:
        raise ValueError(f"factor must be positive, for up to 3 dimensions, got {factor}")
    if any(n == 0 or n % k for n, k in zip(sides, factor, strict=True)):
        raise ValueError(f"in_shape {tuple(in_shape)} must be divisible by factor {factor}")
    small = [n // k for n, k in zip(sides, factor, strict=True)]
    return (*in_shape[: len(in_shape) - len(factor)], *small)


def _bicubic(n: int, factor: int) -> Tensor:
    """(n / factor, n): what torch does to the unit vectors along one axis."""
    units = torch.eye(n, dtype=torch.float64)[None, None]
    size = (n // factor, n)
    return F.interpolate(units, size, mode="bicubic", antialias=True, align_corners=False)[0, 0]
