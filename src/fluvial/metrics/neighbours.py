"""Precision, recall, density and coverage: who lies in whose neighbourhood.

Distances between all pairs are needed, but never all at the same time: they are taken in blocks of
a bounded size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fluvial.metrics.checks import pair
from fluvial.metrics.distances import MEMORY, centred, squared_distances, tiles

TIES = 1e-9
"""By what share of its square a radius is enlarged: of whole numbers many distances are equal, and
rounding must not decide which of them lie inside."""


class PrecisionRecall(NamedTuple):
    """Shares of samples and of real rows."""

    precision: float
    recall: float


class DensityCoverage(NamedTuple):
    """Mean crowding of samples, and share of real rows."""

    density: float
    coverage: float


def precision_recall(
    samples: Tensor | np.ndarray,
    real: Tensor | np.ndarray,
    *,
    k: int = 3,
    memory: int = MEMORY,
) -> PrecisionRecall:
    r"""How many samples lie among the real rows, and how many real rows among the samples.

    With B(z) the closed ball about a row that just holds its k nearest others of its own set,

    .. math::
        \text{precision} = \frac1N \#\{i : s_i \in \textstyle\bigcup_j B(r_j)\}, \qquad
        \text{recall} = \frac1M \#\{j : r_j \in \textstyle\bigcup_i B(s_i)\}

    (Kynkäänniemi et al., Improved precision and recall metric for assessing generative models,
    2019.) The value for two samples of one law is below 1 and depends on N, M, D and k: look at two
    halves of real data. One far real row makes a large ball and may count many bad samples as good,
    which `density_coverage` avoids.

    Args:
        samples: features, real, (N, D), N above ``k``.
        real: features, real, (M, D), M above ``k``.
        k: which neighbour, at least 1.
        memory: bytes that a block of pairs may take.

    Raises:
        TypeError, ValueError: an argument is not a finite real matrix, the columns differ, or there
            are not more rows than ``k``.
    """
    x, y = _pair(samples, real, k)
    among_real, _ = _inside(x, y, _radii(y, k, memory), memory)
    among_samples, _ = _inside(y, x, _radii(x, k, memory), memory)
    return PrecisionRecall(_share(among_real > 0), _share(among_samples > 0))


def density_coverage(
    samples: Tensor | np.ndarray,
    real: Tensor | np.ndarray,
    *,
    k: int = 5,
    memory: int = MEMORY,
) -> DensityCoverage:
    r"""How many real neighbourhoods a sample lies in, and how many of them have a sample.

    With B(r) the closed ball about a real row that just holds its k nearest others,

    .. math::
        \text{density} = \frac{1}{k N} \sum_{ij} [s_i \in B(r_j)], \qquad
        \text{coverage} = \frac1M \#\{j : \exists i\ s_i \in B(r_j)\}

    (Naeem et al., Reliable fidelity and diversity metrics for generative models, 2020.) For samples
    of the real law the density is 1 in the mean; it may be larger. The coverage of N = M such
    samples is 1 - 2^-k in the limit, and for all N and M

    .. math::
        1 - \prod_{i=0}^{k-1} \frac{M - 1 - i}{N + M - 1 - i}.

    Args:
        samples, real, memory: as for `precision_recall`.
        k: which neighbour, at least 1.

    Raises:
        TypeError, ValueError: as `precision_recall`.
    """
    x, y = _pair(samples, real, k)
    around, held = _inside(x, y, _radii(y, k, memory), memory)
    density = float(around.double().sum()) / (k * len(x))
    return DensityCoverage(density, _share(held > 0))


def _pair(samples: Tensor | np.ndarray, real: Tensor | np.ndarray, k: int) -> tuple[Tensor, Tensor]:
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return centred(*pair(samples, real, ("samples", "real"), least=k + 1))


def _radii(x: Tensor, k: int, memory: int) -> Tensor:
    """Squared distance of each row to its k-th nearest other row, ties included."""
    radii = []
    for rows, across in tiles(len(x), len(x), memory):
        nearest = x.new_empty(len(x[rows]), 0)
        for columns in across:
            squares = squared_distances(x[rows], x[columns])
            # a row is not its own neighbour; one that equals it is
            squares.diagonal(rows.start - columns.start).fill_(torch.inf)
            closest = squares.topk(min(k, squares.shape[1]), largest=False).values
            nearest = torch.cat([nearest, closest], 1)
            nearest = nearest.topk(min(k, nearest.shape[1]), largest=False).values
        radii.append(nearest.amax(1))
    return torch.cat(radii) * (1 + TIES)


def _inside(x: Tensor, y: Tensor, radii: Tensor, memory: int) -> tuple[Tensor, Tensor]:
    """Of each x the number of balls about ``y`` that hold it, of each ball that of the x in it."""
    balls = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    held = torch.zeros(len(y), dtype=torch.int64, device=x.device)
    for rows, across in tiles(len(x), len(y), memory):
        for columns in across:
            inside = squared_distances(x[rows], y[columns]) <= radii[columns]
            balls[rows] += inside.sum(1)
            held[columns] += inside.sum(0)
    return balls, held


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())
