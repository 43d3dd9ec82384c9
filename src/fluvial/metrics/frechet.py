"""The Fréchet distance between two sets of features."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.metrics.checks import real, rows_of, same_columns
from fluvial.metrics.extract import Extractor, batches
from fluvial.metrics.moments import Moments


def frechet_distance(
    a: Tensor | np.ndarray | Moments,
    b: Tensor | np.ndarray | Moments,
    *,
    features: Extractor | None = None,
    batch_size: int = 256,
) -> float:
    r"""The squared 2-Wasserstein distance of the Gaussians fitted to ``a`` and ``b``.

    .. math::
        \mathrm{FD} = |\mu_a - \mu_b|^2
            + \operatorname{tr}\bigl(S_a + S_b - 2 (S_a S_b)^{1/2}\bigr)

    with the sample means and the covariances with divisor N - 1 (Dowson and Landau, The Fréchet
    distance between multivariate normal distributions, 1982; on features of a classifier as FID,
    Heusel et al., GANs trained by a two time-scale update rule converge to a local Nash
    equilibrium, 2017). In units of the square of the features.

    With S_a = A^T A and S_b = B^T B the trace of the root is the sum of the singular values of
    A B^T: no root of a matrix is taken, nothing can become complex, and covariances that are not
    of full rank (N <= D) are no special case. Everything in float64. `Moments` finds A and B.

    The estimate is biased upwards by a term of order 1/N that depends on the features: compare
    values of the same N and M only, look at the value of two halves of real data for the floor, or
    take `frechet_infinity`.

    Args:
        a, b: features, real, shapes (N, D) and (M, D), with N and M at least 2; or their `Moments`,
            of which one can be kept for many comparisons.
        features: maps a batch to its features; ``a`` and ``b`` are then what it takes, (N, *event),
            and the features themselves are never held all at once.
        batch_size: of ``features``.

    Returns:
        The distance, at least 0.

    Raises:
        TypeError: an argument is not a tensor or array of real numbers.
        ValueError: it is not a matrix, has fewer than 2 rows, no columns, NaN or inf; or the
            numbers of columns differ.
    """
    x, y = (_moments(n, v, features, batch_size) for n, v in (("a", a), ("b", b)))
    same_columns(("a", "b"), (len(x.mean), len(y.mean)))
    return _distance(x, y)


def frechet_infinity(
    a: Tensor | np.ndarray,
    b: Tensor | np.ndarray | Moments,
    *,
    levels: int = 3,
    features: Extractor | None = None,
    batch_size: int = 256,
    seed: int = 0,
) -> float:
    r"""The Fréchet distance without its bias of order 1/N, by linear extrapolation.

    The mean of the estimate is FD + c/N + O(1/N^2) (Chong and Forsyth, Effectively unbiased FID and
    Inception Score and where to find them, 2020, who draw subsets of 15 sizes). Here the rows, in
    random order, are cut into k = 1, 2, 4, ... disjoint parts of N/k, so that every row counts
    at every size; the means over the parts are fitted by

    .. math::
        \mathrm{FD}_k = \mathrm{FD}_\infty + c\,k / N,

    and the intercept is returned. Parts of ``a`` are compared with parts of ``b`` of the same k,
    which frees the value of both biases; `Moments` cannot be cut, and keep theirs.

    The standard error is about 1.5 times that of the plain estimate, and near 0 the value may be
    negative: it is unbiased. Terms of second order are left, of size (D k / N)^2.

    Args:
        a: features, real, (N, D).
        b: features (M, D), or the `Moments` of a reference.
        levels: number of sizes, at least 2; the smallest parts have N / 2^(levels - 1) rows.
        features, batch_size: as for `frechet_distance`.
        seed: of the order.

    Raises:
        TypeError, ValueError: as `frechet_distance`; or ``levels`` is below 2, or the smallest
            parts have fewer rows than columns, where the bias is not linear in 1/N.
    """
    if levels < 2:
        raise ValueError(f"levels must be at least 2, got {levels}")
    leaves = 2 ** (levels - 1)
    x = _parts("a", a, leaves, features, batch_size, seed)
    fixed = isinstance(b, Moments)
    y = [b] if isinstance(b, Moments) else _parts("b", b, leaves, features, batch_size, seed)
    same_columns(("a", "b"), (len(x[0].mean), len(y[0].mean)))
    counts, means = [], []
    while x:
        values = [_distance(p, q) for p, q in zip(x, y * len(x) if fixed else y, strict=True)]
        counts.append(len(x))
        means.append(float(np.mean(values)))
        x, y = _joined(x), y if fixed else _joined(y)
    return float(np.polynomial.polynomial.polyfit(counts, means, 1)[0])


def _distance(x: Moments, y: Moments) -> float:
    mean_x, mean_y = x.mean, y.mean.to(x.mean.device)
    root_x = x.root / (x.count - 1) ** 0.5
    root_y = y.root.to(root_x.device) / (y.count - 1) ** 0.5
    shift = (mean_x - mean_y).square().sum()
    overlap = torch.linalg.svdvals(root_x @ root_y.T).sum()
    # equal covariances leave rounding errors of either sign
    spread = (root_x.square().sum() + root_y.square().sum() - 2 * overlap).clamp(min=0)
    return float(shift + spread)


def _moments(name: str, value: Any, features: Extractor | None, batch_size: int) -> Moments:
    """Of the whole of an argument."""
    if isinstance(value, Moments):
        if value.count < 2:
            raise ValueError(f"{name} must hold at least 2 rows, got {value.count}")
        return value
    return _gathered(name, _source(name, value, features), features, batch_size)


def _source(name: str, value: Any, features: Extractor | None) -> Tensor | np.ndarray:
    if features is None:
        return rows_of(name, value)
    value = real(name, value)
    if value.ndim < 1 or len(value) < 2:
        raise ValueError(
            f"{name} must have shape (N, ...) with N at least 2, got {tuple(value.shape)}"
        )
    return value


def _gathered(
    name: str, rows: Tensor | np.ndarray, features: Extractor | None, batch_size: int
) -> Moments:
    blocks: Iterator[Any] = (
        iter([rows]) if features is None else batches(features, rows, batch_size)
    )
    moments = Moments()
    try:
        for block in blocks:
            moments.update(block)
    except ValueError as error:
        raise ValueError(str(error).replace("features must be", f"{name} must be", 1)) from None
    return moments


def _parts(
    name: str, value: Any, leaves: int, features: Extractor | None, batch_size: int, seed: int
) -> list[Moments]:
    """Moments of disjoint parts of equal size, in random order; up to ``leaves`` - 1 rows stay."""
    if isinstance(value, Moments):
        raise TypeError(f"{name} must be a tensor or array, which can be cut, got Moments")
    rows = _source(name, value, features)
    size = len(rows) // leaves
    if size < 2:
        raise ValueError(f"{name} must have at least {2 * leaves} rows, got {len(rows)}")
    like = torch.empty(len(rows), dtype=torch.float64)
    order = KeyedNoise(seed).uniform(like, tag=f"parts of {name}").argsort()
    parts = []
    for part in order[: size * leaves].split(size):
        index = part.to(rows.device) if isinstance(rows, Tensor) else part.numpy()
        parts.append(_gathered(name, rows[index], features, batch_size))
    columns = len(parts[0].mean)
    if size < columns:
        raise ValueError(
            f"{name} must have at least {leaves * columns} rows for {leaves} parts of no fewer "
            f"rows than the {columns} columns, got {len(rows)}; lower levels, or take fewer "
            "features"
        )
    return parts


def _joined(parts: list[Moments]) -> list[Moments]:
    """Neighbours merged; nothing after the last."""
    return [p.merge(q) for p, q in zip(parts[::2], parts[1::2], strict=False)]
