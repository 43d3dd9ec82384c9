"""The classifier two-sample test: can a classifier tell samples from data?"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.metrics.checks import pair

Classifier: TypeAlias = Literal["logistic", "mlp", "neighbours"]


@dataclass(frozen=True, eq=False)
class ClassifierTest:
    """Result of `classifier_test`.

    Args:
        accuracy: on the rows held out; 0.5 for samples of one law.
        null: (low, high), what the accuracy lies in with probability of at least ``level`` for
            samples of one law.
        p_value: probability of at least this accuracy for samples of one law, at most.
        correct: (n,) bool, of each held-out row, those of ``a`` first: for an interval of the
            accuracy, as ``bootstrap_interval(np.mean, test.correct)``.
    """

    accuracy: float
    null: tuple[float, float]
    p_value: float
    correct: np.ndarray


def classifier_test(
    a: Tensor | np.ndarray,
    b: Tensor | np.ndarray,
    *,
    classifier: Classifier | Any = "logistic",
    level: float = 0.95,
    seed: int = 0,
) -> ClassifierTest:
    r"""The accuracy of a classifier that is to tell ``a`` from ``b``, on rows it has not seen.

    (Lopez-Paz and Oquab, Revisiting classifier two-sample tests, 2017.) As many rows of each, half
    of them to train on and n in all to test on. Under the null hypothesis the number of right
    answers has mean n / 2 and at most the spread of

    .. math::
        \mathrm{Binomial}(n, 1/2),

    whatever the classifier: rows of both are exchangeable, and fixing how many there are of each
    only lowers the variance, to n p (1 - p) for one that answers "a" with probability p. The null
    interval and the p-value are those of the binomial law. What a classifier does not see stays
    unseen: "logistic" finds differences of means, "neighbours" and "mlp" any, with enough rows.

    Columns are scaled by the mean and deviation of the training half. A classifier of your own is
    any estimator of scikit-learn's kind, and is cloned.

    Args:
        a, b: real, (N, D) and (M, D), at least 8 rows each; of the larger one rows are left out at
            random.
        classifier: "logistic" regression, "mlp" with one hidden layer of 64, "neighbours" with the
            root of the number of training rows, or an estimator with ``fit`` and ``predict``.
        level: of the null interval, in (0, 1).
        seed: of the split and the classifier.

    Raises:
        TypeError, ValueError: ``a`` or ``b`` is not a finite real matrix with at least 8 rows, the
            columns differ, ``level`` is not in (0, 1), or the classifier is none.
    """
    x, y = pair(a, b, least=8)
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    count = min(len(x), len(y))
    half = count // 2
    noise = KeyedNoise(seed)
    train, test = [], []
    for z, tag in ((x, "a"), (y, "b")):
        like = torch.empty(len(z), dtype=torch.float64)
        rows = noise.uniform(like, tag=tag).argsort()[:count].to(z.device)
        train.append(z[rows[:half]].cpu().numpy())
        test.append(z[rows[half:]].cpu().numpy())
    mean, std = np.concatenate(train).mean(0), np.concatenate(train).std(0)
    std[std == 0] = 1
    model = _estimator(classifier, 2 * half, seed)
    with warnings.catch_warnings():
        # one that has not converged is less able, and the test as valid
        warnings.filterwarnings("ignore", category=_convergence_warning())
        model.fit((np.concatenate(train) - mean) / std, np.repeat([0, 1], half))
    answers = np.asarray(model.predict((np.concatenate(test) - mean) / std))
    correct = answers == np.repeat([0, 1], count - half)
    return _result(correct, level)


def _result(correct: np.ndarray, level: float) -> ClassifierTest:
    from scipy.stats import binom

    law = binom(len(correct), 0.5)
    hits = int(correct.sum())
    low = law.ppf((1 - level) / 2) / len(correct)
    return ClassifierTest(
        accuracy=hits / len(correct),
        null=(float(low), float(1 - low)),
        p_value=float(law.sf(hits - 1)),
        correct=correct,
    )


def _estimator(classifier: Any, rows: int, seed: int) -> Any:
    from sklearn.base import clone
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.neural_network import MLPClassifier

    if classifier == "logistic":
        return LogisticRegression(max_iter=1000)
    if classifier == "neighbours":
        return KNeighborsClassifier(max(1, int(rows**0.5)))
    if classifier == "mlp":
        return MLPClassifier((64,), early_stopping=rows >= 100, random_state=seed)
    if isinstance(classifier, str):
        raise ValueError(
            f"classifier must be one of {', '.join(get_args(Classifier))} or an estimator, "
            f"got {classifier!r}"
        )
    if not (hasattr(classifier, "fit") and hasattr(classifier, "predict")):
        raise TypeError(
            "classifier must be a name or an estimator with fit and predict, "
            f"got {type(classifier).__name__}"
        )
    return clone(classifier)


def _convergence_warning() -> type[Warning]:
    from sklearn.exceptions import ConvergenceWarning

    return ConvergenceWarning
