"""The Fréchet distance between two sets of features."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def frechet_distance(a: Tensor | np.ndarray, b: Tensor | np.ndarray) -> float:
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
    of full rank (N <= D) are no special case. Everything in float64.

    The estimate is biased upwards by a term of order 1/N that depends on the features: compare
    values of the same N and M only, and look at the value of two halves of real data for the floor.

    Args:
        a, b: features, real, shapes (N, D) and (M, D), with N and M at least 2.

    Returns:
        The distance, at least 0.

    Raises:
        TypeError: an argument is not a tensor or array of real numbers.
        ValueError: it is not a matrix, has fewer than 2 rows, no columns, NaN or inf; or the
            numbers of columns differ.
    """
    x, y = _matrix("a", a), _matrix("b", b)
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"a and b must have the same number of columns, got {x.shape[1]} and {y.shape[1]}"
        )
    mean_x, mean_y = x.mean(0), y.mean(0)
    root_x, root_y = _root(x - mean_x), _root(y - mean_y)
    shift = (mean_x - mean_y).square().sum()
    overlap = torch.linalg.svdvals(root_x @ root_y.T).sum()
    # equal covariances leave rounding errors of either sign
    spread = (root_x.square().sum() + root_y.square().sum() - 2 * overlap).clamp(min=0)
    return float(shift + spread)


def _root(centred: Tensor) -> Tensor:
    """R, (min(N, D), D), with R^T R the sample covariance of the (N, D) centred features."""
    return torch.linalg.qr(centred, mode="r").R / math.sqrt(len(centred) - 1)


def _matrix(name: str, value: Tensor | np.ndarray) -> Tensor:
    """``value`` as a checked float64 matrix on the CPU."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        matrix = torch.from_numpy(value.astype(np.float64))
    elif isinstance(value, Tensor) and not value.is_complex():
        matrix = value.detach().cpu().double()
    else:
        got = value.dtype if isinstance(value, (Tensor, np.ndarray)) else type(value).__name__
        raise TypeError(f"{name} must be a tensor or array of real numbers, got {got}")
    if matrix.ndim != 2 or matrix.shape[0] < 2 or matrix.shape[1] < 1:
        raise ValueError(
            f"{name} must have shape (N, D) with N at least 2 and D at least 1, "
            f"got {tuple(matrix.shape)}"
        )
    if not matrix.isfinite().all():
        raise ValueError(f"{name} must be finite, got NaN or inf")
    return matrix
