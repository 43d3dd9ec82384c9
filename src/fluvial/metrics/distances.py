"""Distances between all pairs of rows, in blocks of a bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

MEMORY = 2**28
"""Bytes that a block of pairs may take, by default: 256 MiB."""

COPIES = 8
"""Matrices of the size of a block that ``memory`` has to have room for."""

DIRECT = 16
"""Columns up to which differences are taken one by one, which costs no more than a product."""


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """|x_i - y_j|^2, (n, m), of float64 (n, D) and (m, D).

    In more than `DIRECT` columns by |x|^2 + |y|^2 - 2 x y, with an error of about eps times
    |x|^2 + |y|^2: have the rows centred. What lies below D eps times that is 0, so that equal rows
    have distance 0.
    """
    if x.shape[1] <= DIRECT:
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square_()
    size = x.square().sum(1)[:, None] + y.square().sum(1)
    squares = torch.addmm(size, x, y.T, alpha=-2)
    smallest = size.mul_(x.shape[1] * torch.finfo(x.dtype).eps)
    return squares.masked_fill_(squares <= smallest, 0)


def tiles(rows: int, columns: int, memory: int) -> Iterator[tuple[slice, list[slice]]]:
    """Blocks that cover a (rows, columns) matrix: slices of rows, each with slices of columns.

    Raises:
        ValueError: ``memory`` is too small for a block of one pair.
    """
    pairs = memory // (8 * COPIES)
    if pairs < 1:
        raise ValueError(f"memory must be at least {8 * COPIES} bytes, got {memory}")
    width = min(columns, max(math.isqrt(pairs), pairs // rows))
    height = min(rows, pairs // width)
    across = [slice(start, start + width) for start in range(0, columns, width)]
    for start in range(0, rows, height):
        yield slice(start, start + height), across


def centred(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both less their common mean, which changes no distance and spares its digits."""
    mean = (x.sum(0) + y.sum(0)) / (len(x) + len(y))
    return x - mean, y - mean
