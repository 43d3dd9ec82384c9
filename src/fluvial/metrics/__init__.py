"""How good samples are: distances between sets of rows, task metrics, calibration, intervals.

Metrics of sets take (N, D) and (M, D), tensors or arrays, compute in float64 on the device of the
first, and give a number; metrics of pairs give one for every row. `bootstrap_interval` puts an
interval around any of them, and `evaluate` does all of it for files of samples and data.
"""

from __future__ import annotations

from fluvial.metrics.bootstrap import Interval, bootstrap_interval
from fluvial.metrics.calibration import (
    Coverage,
    Reliability,
    brier_score,
    coverage_curve,
    crps,
    expected_calibration_error,
    interval_coverage,
    reliability_curve,
)
from fluvial.metrics.classifier_test import ClassifierTest, classifier_test
from fluvial.metrics.energy import energy_distance
from fluvial.metrics.evaluate import Evaluation, evaluate
from fluvial.metrics.extract import extract
from fluvial.metrics.features import ConvFeatures, train_classifier
from fluvial.metrics.frechet import frechet_distance, frechet_infinity
from fluvial.metrics.mmd import kid, kid_subsets, median_distance, mmd
from fluvial.metrics.moments import Moments
from fluvial.metrics.neighbours import density_coverage, precision_recall
from fluvial.metrics.pictures import psnr, ssim
from fluvial.metrics.pretrained import EfficientNetLite
from fluvial.metrics.sliced import max_sliced_wasserstein, sliced_wasserstein
from fluvial.metrics.wasserstein import gaussian_wasserstein, wasserstein

__all__ = [
    "ClassifierTest",
    "ConvFeatures",
    "Coverage",
    "EfficientNetLite",
    "Evaluation",
    "Interval",
    "Moments",
    "Reliability",
    "bootstrap_interval",
    "brier_score",
    "classifier_test",
    "coverage_curve",
    "crps",
    "density_coverage",
    "energy_distance",
    "evaluate",
    "expected_calibration_error",
    "extract",
    "frechet_distance",
    "frechet_infinity",
    "gaussian_wasserstein",
    "interval_coverage",
    "kid",
    "kid_subsets",
    "max_sliced_wasserstein",
    "median_distance",
    "mmd",
    "precision_recall",
    "psnr",
    "reliability_curve",
    "sliced_wasserstein",
    "ssim",
    "train_classifier",
    "wasserstein",
]
