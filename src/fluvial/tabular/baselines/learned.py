"""What the imputers with networks have in common: checks, scales, seeds, and the way back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.tabular.checks import number, whole
from fluvial.tabular.seeds import seed_of
from fluvial.training.threads import threads

LEARN, FILL = 0, 1
"""Steps of the keyed noise."""


class Learned(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Fills the gaps of a table by what it learned; columns are standardised by what is observed.

    A subclass learns in ``_learn`` and fills in ``_fill``.
    """

    random_state: Any
    least = 1
    """Columns that are needed."""
    counts: ClassVar[tuple[str, ...]] = ()
    """Hyper-parameters that are whole numbers of at least 1."""
    positive: ClassVar[tuple[str, ...]] = ()
    """Those that are positive and finite."""
    shares: ClassVar[tuple[str, ...]] = ()
    """Those that lie in [0, 1]."""
    weights: ClassVar[tuple[str, ...]] = ()
    """Those that are finite and at least 0."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from X, (n, d) with NaN in the gaps.

        Raises:
            ValueError: a column has no value or numbers that are too large, there are too few
                columns, or a hyper-parameter is out of its range.
        """
        self._fit(X)
        return self

    def transform(self, X: Any) -> Any:
        """X with its gaps filled; the same every time."""
        return self._several(X, 1)[0]

    def sample(self, X: Any, m: int) -> np.ndarray:
        """(m, n, d): m fillings, of which the first is that of `transform`.

        Raises:
            ValueError: m is no whole number, or below 1.
        """
        return self._several(X, whole("m", m))

    def _check(self) -> None:
        """The hyper-parameters, each by the name it has."""
        for name in self.counts:
            whole(name, getattr(self, name))
        for names, wanted, fits in (
            (self.positive, "be positive and finite", lambda value: 0 < value < math.inf),
            (self.shares, "lie in [0, 1]", lambda value: 0 <= value <= 1),
            (self.weights, "be finite and at least 0", lambda value: 0 <= value < math.inf),
        ):
            for name in names:
                number(name, getattr(self, name), wanted, fits)

    def _fit(self, X: Any) -> tuple[np.ndarray, Tensor, Tensor]:
        self._check()
        x = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan")
        check_seen(x)
        if x.shape[1] < self.least:
            raise ValueError(f"X needs {self.least} columns or more, got {x.shape[1]}")
        with np.errstate(over="ignore", invalid="ignore"):
            self.offset_, span = self._units(x)
        large = ~(np.isfinite(self.offset_) & np.isfinite(span))
        if large.any():
            raise ValueError(
                f"column {int(large.argmax())} of X has numbers too large to be scaled"
            )
        self.constant_ = ~(span > 0)
        self.span_ = np.where(span > 0, span, 1.0)
        self.seed_ = seed_of(self.random_state)
        z, m = self._scaled(x)
        with torch.enable_grad(), threads(1):  # the networks are too small to gain from more
            self._learn(z, m, KeyedNoise(self.seed_).at(LEARN))
        return x, z, m

    def _several(self, X: Any, count: int) -> np.ndarray:
        check_is_fitted(self, "span_")
        x = validate_data(self, X, reset=False, dtype=np.float64, ensure_all_finite="allow-nan")
        z, m = self._scaled(x)
        noise = KeyedNoise(self.seed_).at(FILL)
        with torch.no_grad(), threads(1):
            return np.stack([self._back(x, self._fill(z, m, noise.at(k))) for k in range(count)])

    def _units(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What becomes 0 in each column, and what becomes 1."""
        return np.nanmean(x, 0), np.nanstd(x, 0)

    def _scaled(self, x: np.ndarray) -> tuple[Tensor, Tensor]:
        """(z, m): float32, 0 in the gaps; and True where observed."""
        gaps = np.isnan(x)
        with np.errstate(over="ignore"):
            z = np.where(gaps, 0.0, (x - self.offset_) / self.span_).astype(np.float32)
        far = ~np.isfinite(z).all(0)
        if far.any():
            raise ValueError(
                f"column {int(far.argmax())} of X holds numbers too far from the fit's"
            )
        return torch.from_numpy(z), torch.from_numpy(~gaps)

    def _back(self, x: np.ndarray, z: Tensor) -> np.ndarray:
        made = z.detach().double().numpy() * self.span_ + self.offset_
        made = np.where(self.constant_, self.offset_, made)  # there is no other value to draw
        result: np.ndarray = np.where(np.isnan(x), made, x)
        return result

    def _learn(self, z: Tensor, m: Tensor, noise: KeyedNoise) -> None:
        raise NotImplementedError

    def _fill(self, z: Tensor, m: Tensor, noise: KeyedNoise) -> Tensor:
        """Values for all entries; what is observed is put back afterwards."""
        raise NotImplementedError


def check_seen(x: np.ndarray) -> None:
    """Is there a value in every column of (n, d) numbers?

    Raises:
        ValueError: there is none.
    """
    none = np.isnan(x).all(0)
    if none.any():
        raise ValueError(f"column {int(none.argmax())} of X has no value at all: leave it out")


Draws = Callable[[KeyedNoise], tuple[Tensor, ...]]
"""Noise of an epoch to tensors of all rows."""


def batches(
    noise: KeyedNoise, rows: int, size: int, steps: int, draw: Draws = lambda noise: ()
) -> Iterator[tuple[Tensor, ...]]:
    """Of each step: numbers of its rows, and what is drawn for them.

    Epochs are in random order, cut into batches of equal size; noise is drawn for an epoch at a
    time, as many small draws cost more than the networks.
    """
    like = torch.empty(rows, dtype=torch.float64)
    count = max(1, round(rows / size))
    for epoch in range(-(-steps // count)):
        now = noise.at(epoch)
        drawn, order = draw(now), now.uniform(like, "rows").argsort()
        for part in order.tensor_split(count)[: steps - epoch * count]:
            yield part, *(one[part] for one in drawn)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step down the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
