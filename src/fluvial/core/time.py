"""Times: distributions to train on, grids to sample along.

Training-time distributions are callables ``times(like, noise) -> t`` with one time a row; sampling
grids are functions that return pairs (K, 2) for `fluvial.core.simulate.simulate`. The laws here
have a ``quantile`` too, the inverse of their distribution function, by which `Stratified` spreads
the times of a batch evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Noise

if TYPE_CHECKING:
    pass


class Times(Protocol):
    """A law of training times."""

    def __call__(self, like: Tensor, noise: Noise, tag: str = "time") -> Tensor:
        """(batch,) times in the dtype and on the device of ``like`` (batch, *event)."""
        ...


class Quantiles(Protocol):
    """A law given by its quantile function, nondecreasing from [0, 1) to [0, 1]."""

    def quantile(self, u: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Uniform:
    """t ~ U[low, high); rounding may reach high."""

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.low < self.high <= 1.0:
            raise ValueError(f"need 0 <= low < high <= 1, got low={self.low}, high={self.high}")

    def __call__(self, like: Tensor, noise: Noise, tag: str = "time") -> Tensor:
        """(batch,) times in the dtype and on the device of ``like``."""
        return self.quantile(noise.uniform(like.new_empty(like.shape[:1]), tag))

    def quantile(self, u: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * u

    def density(self, t: Tensor) -> Tensor:
        return torch.full_like(t, 1 / (self.high - self.low))


@dataclass(frozen=True)
class LogitNormal:
    """t = sigmoid(std n + mean), n ~ N(0, 1) (Esser et al., ICML 2024)."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 0 < self.std < math.inf):
            raise ValueError(
                f"mean must be finite and std positive and finite, got {self.mean} and {self.std}"
            )

    def __call__(self, like: Tensor, noise: Noise, tag: str = "time") -> Tensor:
        """(batch,) times in the dtype and on the device of ``like``."""
        normal = noise.normal(like.new_empty(like.shape[:1]), tag)
        return torch.sigmoid(self.std * normal + self.mean)

    def quantile(self, u: Tensor) -> Tensor:
        return torch.sigmoid(self.std * torch.special.ndtri(u) + self.mean)


@dataclass(frozen=True)
class Stratified:
    """Times of a law, spread evenly over a batch: t_i = quantile((u + i phi) mod 1).

    phi = (sqrt(5) - 1) / 2 and u ~ U[0, 1) is one draw for all rows of a step, so each time has the
    law, and any run of neighbouring rows covers it evenly: of n points the largest gap is O(1 / n).
    A batch of such times estimates the mean over t with less variance than independent ones
    (Kingma et al., NeurIPS 2021, use multiples of 1 / n for phi, which ties a row's time to the
    size of its batch). Row numbers are those of the noise; they need not start at 0.

    Args:
        law: anything with a ``quantile(u)``, such as `Uniform` or `LogitNormal`.
    """

    law: Quantiles = Uniform()

    def __call__(self, like: Tensor, noise: Noise, tag: str = "time") -> Tensor:
        """(batch,) times in the dtype and on the device of ``like``.

        Raises:
            TypeError: ``noise`` is not a `KeyedNoise`: no other says which rows it is for.
        """
        if not isinstance(noise, KeyedNoise):
            raise TypeError(f"Stratified needs a KeyedNoise, got {type(noise).__name__}")
        ids = torch.arange(len(like)) if noise.ids is None else noise.ids
        if len(ids) != len(like):
            raise ValueError(f"got {len(ids)} row ids for a batch of {len(like)}")
        first = replace(noise, ids=None).uniform(torch.empty(1, dtype=torch.float64), tag)
        golden = (math.sqrt(5) - 1) / 2
        u = (first.to(ids.device) + ids.double() * golden) % 1
        t = self.law.quantile(u.to(like.device, non_blocking=True))
        return t.to(like.dtype)


def uniform_grid(steps: int, start: float = 1.0, end: float = 0.0) -> Tensor:
    """``steps`` equal steps from ``start`` to ``end`` as pairs (steps, 2), float64."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return grid_pairs(torch.linspace(start, end, steps + 1, dtype=torch.float64))


def grid_pairs(times: Sequence[float] | Tensor) -> Tensor:
    """Consecutive pairs ((t_0, t_1), (t_1, t_2), ...) of a list of K + 1 times, float64 (K, 2).

    Raises:
        ValueError: fewer than two times, a time that is not finite or lies outside [0, 1].
    """
    times = torch.as_tensor(times, dtype=torch.float64)
    if times.ndim != 1 or len(times) < 2:
        raise ValueError(f"times must hold at least two times, got shape {tuple(times.shape)}")
    pairs = torch.stack([times[:-1], times[1:]], dim=1)
    check_pairs(pairs)
    return pairs


def check_pairs(pairs: Tensor) -> None:
    """Raise `ValueError` unless ``pairs`` is a chain of (t, s) in [0, 1], shape (K, 2), K > 0;
    `TypeError` unless it is a tensor."""
    if not isinstance(pairs, Tensor):
        raise TypeError(f"pairs must be a tensor, got {type(pairs).__name__}; see grid_pairs")
    if pairs.ndim != 2 or pairs.shape[1] != 2 or len(pairs) == 0:
        raise ValueError(f"pairs must have shape (K, 2) with K > 0, got {tuple(pairs.shape)}")
    low, high = pairs.aminmax()
    if not (low >= 0 and high <= 1):
        raise ValueError(f"pairs must lie in [0, 1], got {pairs.tolist()}")
    if not torch.equal(pairs[1:, 0], pairs[:-1, 1]):
        raise ValueError(f"each pair must start where the last one ended, got {pairs.tolist()}")
