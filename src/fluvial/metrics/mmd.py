"""Maximum mean discrepancy, and the kernel distance of features (KID)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.metrics.checks import pair
from fluvial.metrics.distances import MEMORY, centred, squared_distances, tiles

Kernel: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps float64 (n, D) and (m, D) to (n, m)."""

Name: TypeAlias = Literal["gaussian", "laplace", "rational_quadratic"]


def gaussian(*bandwidths: float) -> Kernel:
    """The mean over h of exp(-|x - y|^2 / (2 h^2))."""
    return _radial(lambda squares, h: (squares / (-2 * h * h)).exp_(), bandwidths)


def laplace(*bandwidths: float) -> Kernel:
    """The mean over h of exp(-|x - y| / h), with the Euclidean norm."""
    return _radial(lambda squares, h: (squares.sqrt() / -h).exp_(), bandwidths)


def rational_quadratic(*bandwidths: float, exponent: float = 1.0) -> Kernel:
    """The mean over h of (1 + |x - y|^2 / (2 a h^2))^-a, a the exponent."""
    if not exponent > 0:
        raise ValueError(f"exponent must be positive, got {exponent}")
    return _radial(
        lambda squares, h: (squares / (2 * exponent * h * h) + 1).pow_(-exponent), bandwidths
    )


def polynomial(degree: int = 3, scale: float | None = None, offset: float = 1.0) -> Kernel:
    """(scale x y + offset)^degree; the scale is 1 / D if not given."""
    if degree < 1:
        raise ValueError(f"degree must be at least 1, got {degree}")

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.T).mul_(1 / x.shape[1] if scale is None else scale).add_(offset).pow_(degree)

    return kernel


KERNELS: dict[str, Callable[..., Kernel]] = {
    "gaussian": gaussian,
    "laplace": laplace,
    "rational_quadratic": rational_quadratic,
}


def mmd(
    a: Tensor | np.ndarray,
    b: Tensor | np.ndarray,
    *,
    kernel: Name | Kernel = "gaussian",
    bandwidth: float | Sequence[float] | None = None,
    unbiased: bool = True,
    memory: int = MEMORY,
) -> float:
    r"""The squared maximum mean discrepancy.

    .. math::
        \mathrm{MMD}^2 = \mathrm{E}\,k(X, X') + \mathrm{E}\,k(Y, Y') - 2\,\mathrm{E}\,k(X, Y)

    (Gretton et al., A kernel two-sample test, 2012). The unbiased estimate leaves pairs of a row
    and itself out of the first two means; it is negative about half of the time for samples of one
    law. The biased one is at least 0, and by E[k(x, x) - k(X, X')] (1/N + 1/M) too large there.

    Args:
        a, b: real, (N, D) and (M, D), N and M at least 2.
        kernel: its name, or a function of (n, D) and (m, D) that gives (n, m), such as
            `polynomial`, or `gaussian` of chosen bandwidths.
        bandwidth: h of a named kernel, or several, whose kernels are averaged; `median_distance`
            of both together if None. Fix it where values are to be compared.
        unbiased: leave out a row and itself.
        memory: bytes that a block of pairs may take.

    Raises:
        TypeError, ValueError: ``a`` or ``b`` is not a finite real matrix with at least 2 rows, the
            columns differ, a bandwidth is not positive or given for a kernel that has one, there
            is no kernel of this name, the kernel gives NaN or another shape than (n, m), or the
            median distance is 0.
    """
    x, y = pair(a, b)
    if isinstance(kernel, str):
        if kernel not in KERNELS:
            raise ValueError(
                f"kernel must be one of {', '.join(get_args(Name))} or a function, got {kernel!r}"
            )
        if bandwidth is None:
            bandwidth = median_distance(x, y)
        kernel = KERNELS[kernel](*map(float, np.ravel(bandwidth)))
        x, y = centred(x, y)
    elif bandwidth is not None:
        raise ValueError("bandwidth is for a kernel given by name: this one has its own")
    within = [_mean(kernel, z, None, memory, unbiased) for z in (x, y)]
    return sum(within) - 2 * _mean(kernel, x, y, memory)


def kid(a: Tensor | np.ndarray, b: Tensor | np.ndarray, *, memory: int = MEMORY) -> float:
    r"""The kernel distance of features: the unbiased squared MMD with k(x, y) = (x y / D + 1)^3.

    (Bińkowski, Sutherland, Arbel and Gretton, Demystifying MMD GANs, 2018.) Over all pairs of
    rows, the U-statistic: of the unbiased estimates from these rows it varies least. Published
    values are means over subsets: `kid_subsets`. Features are commonly those of a classifier;
    unlike the Fréchet distance, values of different N may be compared.

    Args:
        a, b: features, real, (N, D) and (M, D), N and M at least 2.
        memory: bytes that a block of pairs may take.

    Raises:
        TypeError, ValueError: as `mmd`.
    """
    return mmd(a, b, kernel=polynomial(), memory=memory)


class Subsets(NamedTuple):
    """Mean and standard deviation of a value over subsets."""

    mean: float
    std: float


def kid_subsets(
    a: Tensor | np.ndarray,
    b: Tensor | np.ndarray,
    *,
    size: int = 1000,
    subsets: int = 100,
    seed: int = 0,
) -> Subsets:
    """`kid` of random subsets, as it is published: its mean, and its standard deviation over them.

    The deviation is that of one subset, with divisor ``subsets``, and no error of the mean.

    Args:
        a, b: as for `kid`.
        size: rows of a subset, drawn without replacement.
        subsets: how many.
        seed: of the subsets, which depend on it and on N and M alone.

    Raises:
        TypeError, ValueError: as `mmd`; or ``size`` is below 2 or above N or M, or ``subsets`` is
            below 1.
    """
    x, y = pair(a, b)
    if not 2 <= size <= min(len(x), len(y)):
        raise ValueError(
            f"size must be at least 2 and at most the rows of a and b, {len(x)} and {len(y)}, "
            f"got {size}"
        )
    if subsets < 1:
        raise ValueError(f"subsets must be at least 1, got {subsets}")
    chosen = []
    for z, tag in ((x, "a"), (y, "b")):
        like = torch.empty(subsets, len(z), dtype=torch.float64)
        chosen.append(KeyedNoise(seed).uniform(like, tag=tag).argsort(1)[:, :size].to(z.device))
    values = [kid(x[rows], y[others]) for rows, others in zip(*chosen, strict=True)]
    return Subsets(float(np.mean(values)), float(np.std(values)))


def median_distance(
    a: Tensor | np.ndarray, b: Tensor | np.ndarray, *, rows: int = 2000, seed: int = 0
) -> float:
    """The median Euclidean distance between different rows of both together, for a bandwidth.

    (The heuristic of Gretton et al., 2012, section 8; of an even number of pairs the lower median.)

    Args:
        a, b: real, (N, D) and (M, D), at least 1 row each.
        rows: of both together, at most; more are drawn from at random.
        seed: of that draw.

    Raises:
        TypeError, ValueError: ``a`` or ``b`` is not a finite real matrix, or the median is 0, as
            where most rows are equal.
    """
    x, y = pair(a, b, least=1)
    both = torch.cat(centred(x, y))
    if len(both) > rows:
        like = torch.empty(len(both), dtype=torch.float64)
        both = both[KeyedNoise(seed).uniform(like, tag="rows").argsort()[:rows].to(both.device)]
    squares = squared_distances(both, both)
    upper = torch.triu_indices(len(both), len(both), 1, device=both.device)
    median = float(squares[upper[0], upper[1]].median().sqrt())
    if median == 0:
        raise ValueError(
            "the median distance is 0, as most rows of a and b are equal: give a bandwidth"
        )
    return median


def _radial(of_squares: Callable[[Tensor, float], Tensor], bandwidths: Sequence[float]) -> Kernel:
    if not bandwidths or not all(0 < h < float("inf") for h in bandwidths):
        raise ValueError(f"bandwidth must be positive, one or more, got {tuple(bandwidths)}")

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        squares = squared_distances(x, y)
        total = of_squares(squares, bandwidths[0])
        for h in bandwidths[1:]:
            total += of_squares(squares, h)
        return total / len(bandwidths)

    return kernel


def _mean(
    kernel: Kernel, x: Tensor, y: Tensor | None, memory: int, unbiased: bool = False
) -> float:
    """Of the kernel over all pairs of rows; ``y`` None for ``x`` itself."""
    other = x if y is None else y
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for rows, across in tiles(len(x), len(other), memory):
        for columns in across:
            u, v = x[rows], other[columns]
            values = kernel(u, v)
            if values.shape != (len(u), len(v)):
                raise ValueError(
                    f"kernel must give shape ({len(u)}, {len(v)}) for {len(u)} and {len(v)} rows, "
                    f"got {tuple(values.shape)}"
                )
            total += values.sum(dtype=torch.float64)
            if unbiased:
                total -= values.diagonal(rows.start - columns.start).sum(dtype=torch.float64)
    mean = float(total) / (len(x) * len(other) - unbiased * len(x))
    if not math.isfinite(mean):
        raise ValueError(f"kernel must give finite numbers, got a mean of {mean}")
    return mean
