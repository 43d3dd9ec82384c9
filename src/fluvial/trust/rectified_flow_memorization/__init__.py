"""Do straight-path flows memorise their pairs? Gradient variance, reference fields, and the cure.

Reu, Dromigny, Bronstein and Vargas, "Gradient Variance Reveals Failure Modes in Flow-Based
Generative Models", NeurIPS 2025, arXiv 2510.18118. What is marked (derived) was worked out for this
library and is checked in its tests.
"""

from __future__ import annotations

from fluvial.trust.rectified_flow_memorization.fields import (
    EmpiricalField,
    GaussianPairField,
    PairOptimal,
)
from fluvial.trust.rectified_flow_memorization.flow import NoisyLinear, PairedFlow
from fluvial.trust.rectified_flow_memorization.pairs import couple, rotation, transport
from fluvial.trust.rectified_flow_memorization.report import (
    MemorizationReport,
    closest_approach,
    memorization_report,
)
from fluvial.trust.rectified_flow_memorization.variance import (
    GradientVariance,
    gradient_variance,
    optimal_field_noisy_loss,
    optimal_field_on_independent,
    optimal_field_on_rotated,
    rotated_field_on_rotated,
)

__all__ = [
    "EmpiricalField",
    "GaussianPairField",
    "GradientVariance",
    "MemorizationReport",
    "NoisyLinear",
    "PairOptimal",
    "PairedFlow",
    "closest_approach",
    "couple",
    "gradient_variance",
    "memorization_report",
    "optimal_field_noisy_loss",
    "optimal_field_on_independent",
    "optimal_field_on_rotated",
    "rotated_field_on_rotated",
    "rotation",
    "transport",
]
