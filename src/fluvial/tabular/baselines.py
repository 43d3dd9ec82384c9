"""What else fills a table: scikit-learn's imputers, MissForest and GAIN, behind one form.

`BASELINES` makes each from a seed and a setting; `SETTINGS` lists as many settings for each, and
`tune` chooses among them on entries that are hidden for the purpose, so that a comparison gives all
of them, and MIRI, the same effort.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.ensemble import RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer, KNNImputer, SimpleImputer
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.noise import KeyedNoise
from fluvial.networks.layers import initialise, linear
from fluvial.tabular.amputation import ampute
from fluvial.tabular.miri.imputer import MIRIImputer, _seed
from fluvial.tabular.miri.rounds import mixed


class Quietly(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """An imputer on standardised columns, without warnings that it has not converged.

    Neighbours need columns of one scale; chained equations stop early by design here.

    Args:
        imputer: an imputer of scikit-learn.
    """

    def __init__(self, imputer: Any) -> None:
        self.imputer = imputer

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from X, (n, d) with NaN in the gaps."""
        self.fit_transform(X)
        return self

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Learn from X and fill its gaps."""
        from sklearn.base import clone

        x = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan")
        self.scaler_ = StandardScaler().fit(x)
        self.imputer_ = clone(self.imputer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            filled = self.imputer_.fit_transform(self.scaler_.transform(x))
        return self._back(x, filled)

    def transform(self, X: Any) -> Any:
        """Fill the gaps of other rows."""
        check_is_fitted(self, "imputer_")
        x = validate_data(self, X, reset=False, dtype=np.float64, ensure_all_finite="allow-nan")
        return self._back(x, self.imputer_.transform(self.scaler_.transform(x)))

    def _back(self, x: np.ndarray, filled: np.ndarray) -> np.ndarray:
        result: np.ndarray = np.where(np.isnan(x), self.scaler_.inverse_transform(filled), x)
        return result


class GAIN(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """Generative adversarial imputation nets.

    A generator fills the gaps from what is observed, the mask and noise; a discriminator tells for
    every entry whether it was observed, with a hint that shows it most of the mask. The generator's
    loss adds ``weight`` times its error on observed entries. Columns are scaled to [0, 1] by their
    observed range. Networks, noise, hint and losses are those of the paper's code: two hidden
    layers as wide as the table, ReLU, noise U(0, 0.01).

    Args:
        steps: of each network (paper's code: 10,000).
        batch_size: rows a step (128).
        weight: alpha (100).
        hint: chance that the hint shows an entry of the mask (0.9).
        lr: of Adam (1e-3).
        random_state: seed.

    Citation: Yoon, Jordon and van der Schaar, ICML 2018.
    """

    def __init__(
        self,
        steps: int = 2_000,
        batch_size: int = 128,
        weight: float = 100.0,
        hint: float = 0.9,
        lr: float = 1e-3,
        random_state: Any = None,
    ) -> None:
        self.steps = steps
        self.batch_size = batch_size
        self.weight = weight
        self.hint = hint
        self.lr = lr
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train both networks on X, (n, d) with NaN in the gaps."""
        x = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan")
        gaps = np.isnan(x)
        if gaps.all(0).any():
            raise ValueError(f"column {int(gaps.all(0).argmax())} of X has no value at all")
        self.low_ = np.nanmin(x, 0)
        span = np.nanmax(x, 0) - self.low_
        self.span_ = np.where(span > 0, span, 1.0)
        self.seed_ = _seed(self.random_state)
        noise = KeyedNoise(self.seed_)
        z, m = self._scaled(x)
        d = x.shape[1]
        self.net_ = _Perceptron(d, mixed(self.seed_, 0))
        judge = _Perceptron(d, mixed(self.seed_, 1))
        optimizers = [
            torch.optim.Adam(net.parameters(), lr=self.lr, fused=True) for net in (self.net_, judge)
        ]
        like = torch.empty(len(z), dtype=torch.float64)
        batches = max(1, round(len(z) / self.batch_size))
        with torch.enable_grad():
            for epoch in range(-(-self.steps // batches)):
                drawn = noise.at(1 + epoch)
                fuzz, hint = drawn.uniform(z, "noise"), drawn.uniform(z, "hint")
                order = drawn.uniform(like, "rows").argsort()
                for rows in order.tensor_split(batches)[: self.steps - epoch * batches]:
                    x1, m1 = z[rows], m[rows]
                    made = self.net_(torch.where(m1 > 0, x1, 0.01 * fuzz[rows]), m1)
                    filled = torch.where(m1 > 0, x1, made)
                    shown = (hint[rows] < self.hint).to(x1) * m1
                    told = judge(filled.detach(), shown)
                    _update(optimizers[1], functional.binary_cross_entropy(told, m1))
                    told = judge(filled, shown)
                    fooled = -((1 - m1) * (told + 1e-8).log()).mean()
                    error = (m1 * (x1 - made).square()).mean() / m1.mean()
                    _update(optimizers[0], fooled + self.weight * error)
        self.net_.eval()
        return self

    def transform(self, X: Any) -> Any:
        """Fill the gaps of X."""
        check_is_fitted(self, "net_")
        x = validate_data(self, X, reset=False, dtype=np.float64, ensure_all_finite="allow-nan")
        z, m = self._scaled(x)
        noise = KeyedNoise(self.seed_).at(0)
        start = torch.where(m > 0, z, 0.01 * noise.uniform(z, "noise"))
        with torch.no_grad():
            made = self.net_(start, m).double().numpy() * self.span_ + self.low_
        return np.where(np.isnan(x), made, x)

    def _scaled(self, x: np.ndarray) -> tuple[Tensor, Tensor]:
        z = (x - self.low_) / self.span_
        gaps = np.isnan(z)
        return (
            torch.from_numpy(np.where(gaps, 0.0, z).astype(np.float32)),
            torch.from_numpy((~gaps).astype(np.float32)),
        )


class _Perceptron(nn.Module):
    """Two hidden layers as wide as the table; a number in (0, 1) for every entry."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.first, self.second = linear(2 * width, width), linear(width, width)
        self.out = linear(width, width)
        initialise(self, seed)

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        hidden = functional.relu(self.first(torch.cat([x, m], 1)))
        value: Tensor = self.out(functional.relu(self.second(hidden))).sigmoid()
        return value


def _update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# One form for all

Make = Callable[..., Any]
"""(seed, **setting) -> an imputer."""


def _mean(seed: int, strategy: str = "mean") -> Any:
    return SimpleImputer(strategy=strategy)


def _knn(seed: int, neighbours: int = 5) -> Any:
    return Quietly(KNNImputer(n_neighbors=neighbours))


def _iterative(seed: int, iterations: int = 10, posterior: bool = False) -> Any:
    return Quietly(
        IterativeImputer(max_iter=iterations, sample_posterior=posterior, random_state=seed)
    )


def _posterior(seed: int, iterations: int = 10) -> Any:
    return _iterative(seed, iterations, posterior=True)


def miss_forest(seed: int, trees: int = 100, iterations: int = 10, leaf: int = 1) -> Any:
    """MissForest: chained equations whose regressions are random forests.

    Args:
        seed: of the forests and the order.
        trees: of a forest.
        iterations: passes over the columns, at most.
        leaf: rows of a leaf, at least.

    Citation: Stekhoven and Bühlmann, Bioinformatics 2012.
    """
    forest = RandomForestRegressor(
        n_estimators=trees, min_samples_leaf=leaf, max_features="sqrt", random_state=seed
    )
    return Quietly(IterativeImputer(estimator=forest, max_iter=iterations, random_state=seed))


def _gain(seed: int, **setting: Any) -> Any:
    return GAIN(**setting, random_state=seed)


def _miri(seed: int, **setting: Any) -> Any:
    return MIRIImputer(**setting, progress=False, random_state=seed)


BASELINES: Mapping[str, Make] = {
    "mean": _mean,
    "KNN": _knn,
    "IterativeImputer": _iterative,
    "IterativeImputer, posterior": _posterior,
    "MissForest": miss_forest,
    "GAIN": _gain,
    "MIRI": _miri,
}
"""All ways to fill a table, MIRI among them, by name."""

SETTINGS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "mean": ({"strategy": "mean"}, {"strategy": "median"}, {"strategy": "most_frequent"}),
    "KNN": ({"neighbours": 5}, {"neighbours": 10}, {"neighbours": 20}),
    "IterativeImputer": ({"iterations": 5}, {"iterations": 10}, {"iterations": 20}),
    "IterativeImputer, posterior": ({"iterations": 5}, {"iterations": 10}, {"iterations": 20}),
    "MissForest": ({"leaf": 1}, {"leaf": 3}, {"leaf": 5}),
    "GAIN": ({"weight": 10.0}, {"weight": 100.0}, {"weight": 1000.0}),
    "MIRI": ({"epochs": 50}, {"epochs": 100}, {"epochs": 200}),
}
"""Three settings of each, its usual one among them."""
HIDDEN = 7
"""Tells the seed of what `tune` hides from that of what is missing."""


def draws(make: Callable[[int], Any], X: np.ndarray, m: int, seed: int = 0) -> np.ndarray:
    """(m, n, d): fillings by m imputers of different seeds; `MIRIImputer` draws from one."""
    imputer = make(seed)
    if isinstance(imputer, MIRIImputer):
        result: np.ndarray = imputer.fit(X).sample(X, m)
        return result
    return np.stack([make(mixed(seed, k) % 2**31).fit_transform(X) for k in range(m)])


def crps(values: np.ndarray, truth: np.ndarray) -> float:
    """Mean continuous ranked probability score of m draws: E|X - y| - E|X - X'| / 2.

    Of one draw it is the mean absolute error. It is proper: fixing too narrow a law does not pay.
    The second mean is over different draws, so that the number of draws does not matter either.

    Args:
        values: (m, k).
        truth: (k,).
    """
    near = np.abs(values - truth).mean()
    m = len(values)
    if m == 1:
        return float(near)
    pairs = [np.abs(values[i] - values[j]).mean() for i in range(m) for j in range(i)]
    return float(near - np.mean(pairs) / 2)


def _made(make: Make, setting: Mapping[str, Any], seed: int) -> Any:
    return make(seed, **setting)


def tune(
    make: Make,
    settings: Sequence[Mapping[str, Any]],
    X: np.ndarray,
    *,
    share: float = 0.2,
    m: int = 1,
    seed: int = 0,
) -> tuple[Mapping[str, Any], list[float]]:
    """The setting that fills hidden entries best, by `crps` in units of the columns' deviations.

    Args:
        make: of the imputer, see `BASELINES`.
        settings: to choose from.
        X: (n, d) with NaN in the gaps; its observed entries alone are used.
        share: of the observed entries that is hidden.
        m: draws of each setting; 1 where an imputer gives the same every time.
        seed: of what is hidden and of the imputers.

    Returns:
        (the setting, the scores of all).

    Raises:
        ValueError: nothing could be hidden.
    """
    # a seed apart: by that of X's own gaps, the entries to hide would be just those
    held = ampute(X, share, "mcar", seed=mixed(seed, HIDDEN) % 2**32)
    hidden = ~held.mask & ~np.isnan(X)
    # an imputer drops a column without any value: it keeps one
    for j in np.flatnonzero(np.isnan(held.data).all(0)):
        row = int(np.flatnonzero(hidden[:, j])[0])
        held.data[row, j], hidden[row, j] = X[row, j], False
    if not hidden.any():
        raise ValueError(f"X has too few observed entries to hide a share of {share}")
    scale = np.nanstd(X, 0)
    scale = np.where(scale > 0, scale, 1.0)
    scores = []
    for setting in settings:
        filled = draws(partial(_made, make, setting), held.data, m, seed)
        scores.append(crps((filled / scale)[:, hidden], (X / scale)[hidden]))
    return settings[int(np.argmin(scores))], scores
