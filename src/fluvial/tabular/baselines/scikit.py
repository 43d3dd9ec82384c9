"""scikit-learn's imputers and MissForest, on standardised columns."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin, clone
from sklearn.ensemble import RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_iterative_imputer  # noqa: F401
from sklearn.impute import IterativeImputer
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, validate_data

from fluvial.tabular.baselines.learned import check_seen


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
        """Learn from X and fill its gaps.

        Raises:
            ValueError: a column has no value.
        """
        x = validate_data(self, X, dtype=np.float64, ensure_all_finite="allow-nan")
        check_seen(x)
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


def miss_forest(seed: int, trees: int = 100, iterations: int = 10, leaf: int = 1) -> Quietly:
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
