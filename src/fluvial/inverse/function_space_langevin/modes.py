"""Functions on a grid as coefficients in an orthonormal basis, coarse modes first."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fluvial.core.scales import Cosine, Sine


@dataclass(frozen=True)
class Modes:
    """An orthonormal basis of the functions on the unit interval, square, ...

    ``"sine"``: 2^(d/2) prod sin(pi k_i x_i), k_i = 1 .. n_i, functions that are 0 at the boundary,
    on the points i / (n + 1). ``"cosine"``: products of 1 and sqrt(2) cos(pi k x), k = 0 .. n - 1,
    functions without a slope across it, on the points (i + 1/2) / n.

    Orthonormal under the integral, and not under the sum over the points: the coefficients of a
    function do not grow as the grid is refined. They stand in the order of the largest k_i, then
    of k, so that on cubes those of a coarse grid are the first ones of every finer grid: a change
    of resolution is a change of their number, and of nothing else.

    Args:
        shape: of the grid.
        kind: of the basis.

    Raises:
        ValueError: another kind, or a side below 1.
    """

    shape: tuple[int, ...]
    kind: Literal["sine", "cosine"] = "sine"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(side) for side in self.shape))
        if self.kind not in ("sine", "cosine"):
            raise ValueError(f"kind must be sine or cosine, got {self.kind!r}")
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape needs positive sides, got {self.shape}")

    def __len__(self) -> int:
        """Their number, J."""
        return math.prod(self.shape)

    @functools.cached_property
    def basis(self) -> Sine | Cosine:
        """Of the values on the grid, in the order of the grid, orthonormal under the sum."""
        return Sine(self.shape) if self.kind == "sine" else Cosine(self.shape)

    @property
    def density(self) -> float:
        """Points a unit of volume: the sum over the points over this is the integral."""
        return float(math.prod(side + (self.kind == "sine") for side in self.shape))

    @functools.cached_property
    def frequencies(self) -> Tensor:
        """k, (J, d) int64."""
        first = int(self.kind == "sine")
        grids = torch.meshgrid(
            *[torch.arange(first, first + side) for side in self.shape], indexing="ij"
        )
        return torch.stack([grid.flatten() for grid in grids], 1)[self.order]

    @functools.cached_property
    def order(self) -> Tensor:
        """Where in the flattened grid of modes the j-th one is, (J,) int64."""
        largest = functools.reduce(
            torch.maximum,
            torch.meshgrid(*[torch.arange(side) for side in self.shape], indexing="ij"),
        )
        return largest.flatten().argsort(stable=True)

    @functools.cached_property
    def place(self) -> Tensor:
        """The inverse of ``order``."""
        return self.order.argsort()

    @functools.cached_property
    def laplacian(self) -> Tensor:
        """Eigenvalues pi^2 |k|^2 of minus the Laplacian, (J,) float64."""
        return (math.pi * self.frequencies.double()).square().sum(1)

    def coefficients(self, functions: Tensor) -> Tensor:
        """(batch, *shape) values on the grid to (batch, J).

        Raises:
            ValueError: values on another grid.
        """
        self._check("functions", functions, self.shape)
        modes = self.basis.forward(functions).flatten(1)
        return modes[:, self.order.to(modes.device)] / math.sqrt(self.density)

    def functions(self, coefficients: Tensor) -> Tensor:
        """(batch, J) to values on the grid (batch, *shape); fewer coefficients stand for the first.

        Raises:
            ValueError: more coefficients than there are modes.
        """
        count = coefficients.shape[-1]
        if coefficients.ndim != 2 or count > len(self):
            raise ValueError(
                f"coefficients must be (batch, at most {len(self)}), got "
                f"{tuple(coefficients.shape)}"
            )
        padded = torch.nn.functional.pad(coefficients, (0, len(self) - count))
        grid = padded[:, self.place.to(padded.device)].unflatten(1, self.shape)
        return self.basis.inverse(grid) * math.sqrt(self.density)

    def _check(self, name: str, x: Tensor, event: Sequence[int]) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"{name} must be a floating tensor, got {getattr(x, 'dtype', type(x))}")
        if tuple(x.shape[1:]) != tuple(event):
            raise ValueError(f"{name} must have shape (batch, {event}), got {tuple(x.shape)}")


def power_law(coefficients: Tensor, modes: Modes) -> tuple[float, float]:
    """(scale, decay) of variance = scale |k|^(-2 decay), by regression of log power on log |k|^2.

    Args:
        coefficients: (rows, J), about their mean.
        modes: theirs. The constant mode of a cosine basis is left out.

    Raises:
        ValueError: fewer than two modes with power and |k| > 0.
    """
    square = modes.laplacian / math.pi**2
    power = coefficients.double().square().mean(0)
    use = (square > 0) & (power > 0)
    if len(square[use].unique()) < 2:
        raise ValueError("functions have power in fewer than two frequencies: no decay to fit")
    x, y = square[use].log(), power[use].log()
    centred = x - x.mean()
    decay = -float((centred * y).sum() / centred.square().sum())
    return math.exp(float(y.mean()) + decay * float(x.mean())), decay
