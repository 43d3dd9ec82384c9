"""One Brownian motion for runs of several schemes and step counts."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluvial.core.gaussian.fields import scalars
from fluvial.core.noise import BrownianPath
from fluvial.core.protocols import Noise
from fluvial.core.scales import Scalar
from fluvial.core.time import check_pairs
from fluvial.dynamics.wasserstein_samplers.clock import clock_of


class SharedBrownian:
    """The increments of a Brownian motion over the steps of a fine grid, the cells.

    Samplers that share it solve one stochastic differential equation with one noise, so that they
    can be compared row by row: the error on a shared path, sqrt(E |x - reference|^2), bounds the
    Wasserstein distance, and it is what the paper's proofs bound. Every coarser grid must be made
    of whole cells.

    The integral of f dW over a step is the sum of f at the middles of its cells times their
    increments. The randomised midpoints lie inside of cells; there the motion is filled in by a
    Brownian bridge, from the noise of the run.

    The motion is that of `BrownianPath` at multiples of a power of two: where all cells are of one
    length in the clock, a grid with twice as many cells refines the same motion.

    Args:
        noise: keyed noise of the motion.
        like: (batch, *event), as the state.
        path: along which is sampled.
        pairs: (cells, 2), falling; the increments of all of them are kept.

    Raises:
        ValueError: ``pairs`` is not a falling chain, or starts where alpha = 0 and the motion is
            infinite; at a step, a time that is not a boundary of cells, a state of another shape.
    """

    def __init__(self, noise: Noise, like: Tensor, path: Any, pairs: Tensor) -> None:
        check_pairs(pairs)
        if not bool((pairs[:, 1] < pairs[:, 0]).all()):
            raise ValueError(f"pairs must fall, got {pairs.tolist()}")
        times = torch.cat([pairs[:1, 0], pairs[:, 1]]).double().cpu()
        clocks = [clock_of(*scalars(path, t, {}, "SharedBrownian")) for t in times.unbind()]
        if math.isinf(clocks[0]):
            raise ValueError(
                f"pairs start at {float(times[0])}, where alpha is 0 and the clock infinite"
            )
        cells = len(pairs)
        self._clocks = [-clock for clock in clocks]  # rising, for bisection
        size = 1 << (cells - 1).bit_length()
        motion = BrownianPath(noise, like, 1 / size)
        self._increments = torch.empty(cells, *like.shape, dtype=like.dtype, device=like.device)
        for i in range(cells):
            length = clocks[i] - clocks[i + 1]
            increment = motion.increment(i / size, (i + 1) / size)
            self._increments[i] = increment * math.sqrt(size * length)

    def over(self, start: float, end: float, like: Tensor, noise: Noise) -> Cells:
        """The cells between two clocks, for a state ``like``; ``noise`` fills them in."""
        first, last = self._boundary(start), self._boundary(end)
        increments = self._increments[first:last]
        if increments.shape[1:] != like.shape or increments.dtype != like.dtype:
            raise ValueError(
                f"brownian is for states {tuple(increments.shape[1:])} of {increments.dtype}, got "
                f"{tuple(like.shape)} of {like.dtype}"
            )
        offset = self._clocks[first]
        edges = [clock - offset for clock in self._clocks[first : last + 1]]
        return Cells(increments, edges, noise)

    def _boundary(self, clock: float) -> int:
        tolerance = 1e-9 * (1 + clock)
        index = bisect.bisect_left(self._clocks, -clock - tolerance)
        if index == len(self._clocks) or abs(self._clocks[index] + clock) > tolerance:
            raise ValueError(
                f"a step begins or ends at the clock {clock:.6g}, inside of a cell of brownian"
            )
        return index


@dataclass(frozen=True)
class Cells:
    """The motion over one step; see `sampler._Motion`, which says what the methods return."""

    increments: Tensor
    edges: Sequence[float]
    noise: Noise

    @property
    def h(self) -> float:
        return self.edges[-1]

    @property
    def middles(self) -> Tensor:
        """(cells,), float64."""
        edges = torch.tensor(self.edges, dtype=torch.float64)
        return (edges[1:] + edges[:-1]) / 2

    def _sum(self, weights: Tensor) -> Tensor:
        weights = weights.to(self.increments)
        return torch.tensordot(weights, self.increments, dims=1)

    def integral(self, rate: float) -> Tensor:
        return self._sum(torch.exp(rate * (self.h - self.middles)))

    def split(self, rate: float, u: Tensor) -> tuple[Tensor, Tensor]:
        edges = torch.tensor(self.edges, dtype=torch.float64, device=u.device)
        cell = torch.searchsorted(edges, self.h * u, right=True).sub_(1)
        cell = cell.clamp(0, len(self.edges) - 2)
        lengths = edges.diff()
        share = ((self.h * u - edges[cell]) / lengths[cell]).clamp(0, 1)

        weights = torch.exp(-rate * self.middles).to(self.increments)
        weighed = self.increments * weights.reshape(-1, *[1] * (self.increments.ndim - 1))
        rows = torch.arange(len(u), device=u.device)
        before = (weighed.cumsum(0) - weighed)[cell, rows]
        bridge = (share * (1 - share) * lengths[cell]).sqrt()
        inside = Scalar(share) @ self.increments[cell, rows]
        inside = inside + Scalar(bridge) @ self.noise.normal(inside, "bridge")
        inside = Scalar(weights[cell]) @ inside
        return Scalar(torch.exp(rate * self.h * u)) @ (before + inside), self.integral(rate)

    def moment(self, k: int) -> Tensor:
        return self._sum((self.h - self.middles) ** k / math.factorial(k))

    def modes(self, rates: Tensor, basis: Tensor) -> Tensor:
        turned = torch.einsum(
            "bij,nbi->nbj",
            basis,
            self.increments.reshape(len(self.increments), *rates.shape).to(basis),
        )
        ages = (self.h - self.middles).to(basis)
        return (torch.exp(ages[:, None, None] * rates) * turned).sum(0)
