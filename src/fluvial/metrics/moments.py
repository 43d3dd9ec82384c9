"""Mean and covariance of features that arrive in batches."""

from __future__ import annotations

import math
from copy import copy

import torch
from torch import Tensor

from fluvial.metrics.checks import Values, float64, matrix, real, rows_of, same_columns

ERROR = 1e-10
"""Of the root of a covariance, relative to its norm: what adding up products may cost."""

FIRST, LATER = 2048, 16384
"""Rows of a block at least, the first and the later ones; or 1.5 and 8 times the columns."""

EPS = torch.finfo(torch.float64).eps


class Moments:
    r"""Mean and covariance of rows, in float64, batch by batch; two can be merged.

    Kept are the number n of rows, their mean, and an upper triangular root R of the scatter

    .. math::
        R^T R = \sum_i (x_i - \bar x)(x_i - \bar x)^T, \qquad
        R \leftarrow \mathrm{qr}\begin{pmatrix} R \\ X - \bar x_X \\
            \sqrt{n m / (n + m)}\,(\bar x_X - \bar x) \end{pmatrix}

    for a block X of m rows (Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for
    computing sample variances, 1979; the triangular factor of a stack from those of its parts:
    Demmel et al., Communication-optimal parallel and sequential QR and LU factorizations, 2012).
    Squaring never takes place, so a direction whose deviation is 1e-12 of the largest is still
    there, which in a covariance drowns below the rounding of 1.

    Of many rows the products are added up all the same, at half the cost, where small directions
    are known to survive it. The first block gives R_0, whose smallest singular value is a lower
    bound for all that follows, and the relative error of the root is about

    .. math::
        |\delta R| / |R|_F \approx \mathrm{eps}\,|R|_F \, / \, \sigma_{\min}(R_0),

    which may be `ERROR` at most. If it were more, the rows are taken in the coordinates
    of the first block, where all directions are about alike,

    .. math::
        R = \mathrm{chol}\Bigl(1 + \sum Y^T Y\Bigr) R_0, \qquad Y = (X - \bar x) R_0^{-1},

    as a preconditioned Cholesky QR (Fukaya et al., Shifted Cholesky QR for computing the QR
    factorization of ill-conditioned matrices, 2020), with the error eps tr(1 + sum Y^T Y) in every
    direction; and where rows go far beyond those of the first block, so that this too would be
    above `ERROR`, by the orthogonal factors above. Rows wait in a buffer of at most 8 D rows
    (16,384 where D is small). Objects can be pickled, and so gathered from several processes and
    merged.

    Args:
        dim: D, the number of columns; None to take it from the first batch.

    Raises:
        ValueError: ``dim`` is below 1.
    """

    def __init__(self, dim: int | None = None) -> None:
        if dim is not None and dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        self.dim = dim
        self._count = 0
        self._mean: Tensor | None = None
        self._root: Tensor | None = None
        # in place of the root, while products are added up
        self._scatter: Tensor | None = None
        self._axes: Tensor | None = None  # R_0, if in its coordinates
        self._least = 0.0  # lower bound on the singular values of R
        self._buffer: list[Tensor] = []

    @classmethod
    def from_covariance(cls, mean: Values, covariance: Values, count: int) -> Moments:
        """Of a mean (D,) and a covariance (D, D) with divisor N - 1, as they are published.

        Eigenvalues below D eps times the largest are rounding and become 0. What a covariance has
        lost cannot be had back: the distance is then as right as its small eigenvalues are.

        Args:
            count: N, at least 2.

        Raises:
            TypeError: not real numbers.
            ValueError: the shapes do not fit, there is NaN or inf, the covariance is not symmetric
                or has an eigenvalue that is negative beyond rounding, or ``count`` is below 2.
        """
        spread = matrix("covariance", covariance, least=1)
        if spread.shape[0] != spread.shape[1]:
            raise ValueError(f"covariance must have shape (D, D), got {tuple(spread.shape)}")
        centre = float64("mean", real("mean", mean)).to(spread.device)
        if centre.shape != spread.shape[:1]:
            raise ValueError(
                f"mean must have shape ({len(spread)},) as covariance has {len(spread)} rows, "
                f"got {tuple(mean.shape)}"
            )
        if count < 2:
            raise ValueError(f"count must be at least 2, got {count}")
        size = float(spread.abs().max())
        if float((spread - spread.T).abs().max()) > 1e-6 * size:
            raise ValueError("covariance must be symmetric")
        values, vectors = torch.linalg.eigh((spread + spread.T) / 2)
        tiny = len(spread) * torch.finfo(torch.float64).eps * float(values.abs().max())
        if float(values.min()) < -max(tiny, 1e-6 * size):
            raise ValueError(
                f"covariance must have no negative eigenvalue, got {float(values.min())}"
            )
        self = cls(len(spread))
        self._count, self._mean = count, centre
        kept = torch.where(values > tiny, values, 0) * (count - 1)
        self._root = _triangle(kept.sqrt()[:, None] * vectors.T)
        return self

    def update(self, features: Values) -> Moments:
        """Take in a batch, (N, D), N at least 1; gives itself.

        Raises:
            TypeError: ``features`` is not a tensor or array of real numbers.
            ValueError: it is not (N, D), or holds NaN or inf.
        """
        features = rows_of("features", features, least=1)
        if self.dim is None:
            self.dim = features.shape[1]
        if features.shape[1] != self.dim:
            raise ValueError(
                f"features must have shape (N, {self.dim}), got {tuple(features.shape)}"
            )
        start = 0
        while start < len(features):
            # the first block is short: what it says of the small directions decides on the rest
            size = max(LATER, 8 * self.dim) if self._count else max(FIRST, 3 * self.dim // 2)
            part = features[start : start + size - self._waiting]
            self._buffer.append(float64("features", part))
            start += len(part)
            if self._waiting == size:
                self._flush()
            else:  # the batch is the caller's, who may fill it anew
                self._buffer[-1] = self._buffer[-1].clone()
        return self

    def merge(self, other: Moments) -> Moments:
        """Those of both sets of rows, as a new object.

        Raises:
            ValueError: the numbers of columns differ.
        """
        if not (self.count and other.count):
            return _copy(self if self.count else other)
        same_columns(("moments", "other"), (len(self.mean), len(other.mean)))
        merged = _copy(self)
        merged._absorb(
            other.root.to(self.mean.device), other.mean.to(self.mean.device), other.count
        )
        return merged

    @property
    def count(self) -> int:
        """Number of rows."""
        return self._count + self._waiting

    @property
    def _waiting(self) -> int:
        return sum(map(len, self._buffer))

    @property
    def mean(self) -> Tensor:
        """(D,), float64.

        Raises:
            ValueError: there are no rows.
        """
        self._flush()
        if self._mean is None:
            raise ValueError("moments hold no rows: update them first")
        return self._mean

    @property
    def root(self) -> Tensor:
        """R, (min(N, D), D), with R^T R the sum of squares about the mean."""
        _ = self.mean
        if self._scatter is None:
            assert self._root is not None
            return self._root
        root = torch.linalg.cholesky(self._scatter, upper=True)
        return root if self._axes is None else root @ self._axes

    @property
    def covariance(self) -> Tensor:
        """(D, D), with divisor N - 1.

        Raises:
            ValueError: there are fewer than 2 rows.
        """
        if self.count < 2:
            raise ValueError(f"a covariance needs at least 2 rows, got {self.count}")
        return _gram(self.root) / (self.count - 1)

    def _flush(self) -> None:
        if not self._buffer:
            return
        device = self._buffer[0].device if self._mean is None else self._mean.device
        parts = [part.to(device) for part in self._buffer]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._buffer = []
        mean = rows.mean(0)
        self._absorb(rows - mean, mean, len(rows))

    def _absorb(self, centred: Tensor, mean: Tensor, count: int) -> None:
        """``count`` rows with this mean, whose scatter is ``centred``^T ``centred``."""
        if self._mean is None:
            self._root, self._mean, self._count = _triangle(centred), mean, count
            return
        shift = (mean - self._mean) * math.sqrt(self._count * count / (self._count + count))
        self._mean = self._mean + (mean - self._mean) * (count / (self._count + count))
        self._count += count
        if not self._added(centred, shift):
            root, self._scatter, self._axes = self.root, None, None
            self._root = _triangle(torch.cat([root, centred, shift[None]]))

    def _added(self, centred: Tensor, shift: Tensor) -> bool:
        """Add products, if the small directions of what is known so far survive it."""
        sizes = float(centred.norm()), float(shift.norm())
        if self._scatter is None:
            assert self._root is not None
            if len(centred) < FIRST or self._root.shape[0] < self._root.shape[1]:
                return False  # little to gain, or directions that are not known yet
            self._begin(math.hypot(float(self._root.norm()), *sizes))
        assert self._scatter is not None
        trace = float(self._scatter.trace())
        if self._axes is None:
            if not EPS * math.hypot(trace**0.5, *sizes) <= ERROR * self._least:
                return False
        else:
            centred = _solve(self._axes, centred)
            shift = _solve(self._axes, shift[None])[0]
            trace += float(centred.norm() ** 2 + shift.norm() ** 2)
            if not EPS * trace <= ERROR:  # NaN as well
                return False
        self._scatter = self._scatter + _gram(centred) + torch.outer(shift, shift)
        return True

    def _begin(self, size: float) -> None:
        """From the root to products: in the coordinates of the rows, or of the root."""
        root, self._root = self._root, None
        assert root is not None
        unit = torch.eye(len(root), dtype=torch.float64, device=root.device)
        # 0 or NaN where the root is singular
        self._least = 1 / float(_solve(root, unit).norm())
        if EPS * size <= ERROR * self._least:
            self._scatter, self._axes = _gram(root), None
            return
        # columns of zeros, and others without a direction of their own, become rounding
        diagonal = root.diagonal()
        smallest = EPS * root.norm()
        patch = torch.where(diagonal.abs() < smallest, smallest - diagonal, 0)
        self._scatter, self._axes = unit, root + patch.diag()


def _triangle(rows: Tensor) -> Tensor:
    return torch.linalg.qr(rows, mode="r").R


def _solve(root: Tensor, rows: Tensor) -> Tensor:
    """rows root^-1."""
    return torch.linalg.solve_triangular(root.T, rows.T, upper=False).T


def _gram(rows: Tensor) -> Tensor:
    """rows^T rows."""
    if rows.device.type == "cpu":  # NumPy sees that the result is symmetric, and computes half
        array = rows.numpy()
        return torch.from_numpy(array.T @ array)
    return rows.T @ rows


def _copy(moments: Moments) -> Moments:
    moments._flush()
    clone = copy(moments)
    clone._buffer = []
    return clone
