"""Mean and principal components of a data set: what the Wiener filter is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT64 = 8
COPIES = 3
"""Matrices of the size of the covariance that its decomposition needs room for."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The eigendecomposition of the covariance S = U diag(l) U^T, divisor N - 1, in float64.

    Coordinates that are the same number in every image are left out: they have no variance, and
    round-off must not give them any.

    Args:
        mean: (d,).
        varying: (a,) indices of the coordinates that vary.
        values: (r,) eigenvalues, falling, not negative; r <= min(N - 1, a).
        vectors: (a, r), U.
    """

    mean: Tensor
    varying: Tensor
    values: Tensor
    vectors: Tensor

    def shrink(self, level: Tensor) -> Tensor:
        """l / (l + level^2) of every component, for a level () or (batch,): (r,) or (batch, r)."""
        values = self.values
        return values / (values + level.to(values.device, values.dtype)[..., None].square())

    def gain(self, level: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        """Rows of W = U diag(l / (l + level^2)) U^T, (rows, a), on the coordinates that vary."""
        return (self.vectors[rows] * self.shrink(level)) @ self.vectors.T

    @classmethod
    def of(
        cls, chunks: Callable[[], Iterator[Tensor]], count: int, size: int, memory: int
    ) -> Spectrum:
        """Of the images in ``chunks()``, each (c, d), ``count`` in all, with d = ``size``.

        By the covariance where there are more images than coordinates, else by the singular values
        of the images themselves.

        Raises:
            ValueError: ``memory`` has no room for it.
        """
        needed = FLOAT64 * COPIES * min(count, size) * size
        if needed > memory:
            raise ValueError(
                f"memory must be at least {needed} bytes for the principal components of {count} "
                f"images of {size} numbers, got {memory}"
            )
        first = next(chunks())
        low, high = first[0], first[0]
        total = torch.zeros(size, dtype=torch.float64, device=first.device)
        for chunk in chunks():
            low, high = torch.minimum(low, chunk.amin(0)), torch.maximum(high, chunk.amax(0))
            total += chunk.sum(0, dtype=torch.float64)
        mean, varying = total / count, (high > low).nonzero().squeeze(1)
        # exact where nothing varies
        mean = torch.where(high > low, mean, low.double())
        centre = mean[varying]
        if count > len(varying):
            cov = torch.zeros(len(varying), len(varying), dtype=torch.float64, device=mean.device)
            for chunk in chunks():
                centred = chunk[:, varying].double() - centre
                cov.addmm_(centred.T, centred)
            values, vectors = torch.linalg.eigh(cov.div_(count - 1))
            values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
        else:
            centred = torch.cat([chunk[:, varying].double() for chunk in chunks()]) - centre
            _, singular, rows = torch.linalg.svd(centred, full_matrices=False)
            values, vectors = singular[: count - 1].square() / (count - 1), rows[: count - 1].T
        return cls(mean, varying, values, vectors.contiguous())
