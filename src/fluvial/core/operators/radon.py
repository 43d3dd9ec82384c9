"""Parallel-beam tomography."""

from __future__ import annotations

import math
import warnings

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from fluvial.core.operators.base import Iterative, Shape
from fluvial.core.operators.iterative import linear


class Radon(Iterative):
    """Sums along parallel rays: the sums of the columns of the image turned by each angle.

    The geometry is that of `skimage.transform.radon` with ``circle=True``, to rounding: as many
    detectors as columns, the centre at n // 2, bilinear interpolation, 0 outside of the image. It
    is a sparse matrix, made once, of some 3 n^2 entries an angle, so that the adjoint is exact.

    The pseudo-inverse is iterative: the operator has small singular values, and `least_squares` to
    a tolerance is a regularisation. To cut them off instead, for images of up to 64 x 64, see
    `fluvial.core.operators.dense.dense`.

    Args:
        angles: in radians, (k,), or (batch, k) with some for every row.
        in_shape: (*leading, n, n).
        tolerance, iterations: of the pseudo-inverse, see `Operator`.

    Raises:
        ValueError: ``angles`` are none or not finite, the image is not square, ``tolerance`` is
            outside (0, 1), or ``iterations`` below 1.
    """

    in_shape: Shape
    out_shape: Shape

    def __init__(
        self, angles: Tensor, in_shape: Shape, tolerance: float = 1e-4, iterations: int = 500
    ) -> None:
        if angles.ndim not in (1, 2) or angles.numel() == 0 or not bool(angles.isfinite().all()):
            raise ValueError(f"angles must be finite, (k,) or (batch, k), got {angles}")
        if len(in_shape) < 2 or in_shape[-1] != in_shape[-2] or 0 in in_shape:
            raise ValueError(f"in_shape must be (*leading, n, n), got {tuple(in_shape)}")
        self._iterate(tolerance, iterations)
        self.in_shape, n = tuple(in_shape), in_shape[-1]
        rows = angles.detach().cpu().double().reshape(-1, angles.shape[-1]).numpy()
        self.rows, count = rows.shape
        self.out_shape = (*self.in_shape[:-2], count, n)
        images = [sparse.vstack([_rays(angle, n) for angle in row]) for row in rows]
        matrix = sparse.block_diag(images, format="csr")
        self._sizes = matrix.shape
        self._store("forth", matrix)
        self._store("back", matrix.T.tocsr())

    def _store(self, name: str, matrix: sparse.csr_matrix) -> None:
        for part in ("indptr", "indices", "data"):
            setattr(self, f"{name}_{part}", torch.from_numpy(getattr(matrix, part)))

    def _times(self, name: str, x: Tensor, shape: Shape) -> Tensor:
        """Rows that share a matrix are its columns; of others, the events lie below one another."""
        crow, column, values = (
            self._like(f"{name}_{part}", x) for part in ("indptr", "indices", "data")
        )
        sizes = self._sizes if name == "forth" else self._sizes[::-1]
        with warnings.catch_warnings():  # torch says that the format is young
            warnings.simplefilter("ignore", UserWarning)
            matrix = torch.sparse_csr_tensor(crow, column, values, size=sizes)
        events = x.reshape(len(x), -1, math.prod(x.shape[-2:]))
        if self.rows == 1:
            return (matrix @ events.flatten(0, 1).mT).mT.reshape(len(x), *shape)
        out = matrix @ events.mT.flatten(0, 1)
        return out.unflatten(0, (len(x), -1)).mT.reshape(len(x), *shape)

    def _forward(self, x: Tensor) -> Tensor:
        return linear(x, self._project_rays, self._back_project)

    def _adjoint(self, y: Tensor) -> Tensor:
        return linear(y, self._back_project, self._project_rays)

    def _project_rays(self, x: Tensor) -> Tensor:
        return self._times("forth", x, self.out_shape)

    def _back_project(self, y: Tensor) -> Tensor:
        return self._times("back", y, self.in_shape)


def _rays(angle: float, n: int) -> sparse.csr_matrix:
    """(n, n^2): how much of every pixel every detector sees."""
    cos, sin, centre = math.cos(angle), math.sin(angle), n // 2
    row, column = np.mgrid[:n, :n]
    x = cos * column + sin * row - centre * (cos + sin - 1)
    y = -sin * column + cos * row - centre * (cos - sin - 1)
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    parts = []
    for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
        weight = (1 - abs(y - top - dy)) * (1 - abs(x - left - dx))
        inside = (
            (top + dy >= 0) & (top + dy < n) & (left + dx >= 0) & (left + dx < n) & (weight > 0)
        )
        pixel = (top + dy) * n + left + dx
        parts.append((weight[inside], column[inside], pixel[inside]))
    weights, detectors, pixels = (np.concatenate(part) for part in zip(*parts, strict=True))
    return sparse.csr_matrix((weights, (detectors, pixels)), (n, n * n))
