"""How good samples are: distances between sets of features, with intervals."""

from __future__ import annotations

from fluvial.metrics.bootstrap import Interval, bootstrap_interval
from fluvial.metrics.features import ConvFeatures, train_classifier
from fluvial.metrics.frechet import frechet_distance

__all__ = [
    "ConvFeatures",
    "Interval",
    "bootstrap_interval",
    "frechet_distance",
    "train_classifier",
]
