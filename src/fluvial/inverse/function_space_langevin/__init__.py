"""Preconditioned Langevin dynamics with score priors in function space.

Baldassari, Garnier, Solna and de Hoop, "Preconditioned Langevin Dynamics with Score-Based
Generative Models for Infinite-Dimensional Linear Bayesian Inverse Problems", NeurIPS 2025,
arXiv 2505.18276. What is marked (corrected) in the sources of this library differs from the paper,
and is checked in the tests.
"""

from __future__ import annotations

from fluvial.inverse.function_space_langevin.chain import (
    PosteriorDrift,
    PreconditionedLangevin,
    Recorder,
    effective_samples,
    r_hat,
)
from fluvial.inverse.function_space_langevin.forward import matrix_of
from fluvial.inverse.function_space_langevin.langevin import Chains, FunctionSpaceLangevin
from fluvial.inverse.function_space_langevin.modes import Modes, power_law
from fluvial.inverse.function_space_langevin.networks import ModeNetwork, OperatorNetwork
from fluvial.inverse.function_space_langevin.priors import (
    GaussianPrior,
    LearnedDrift,
    LearnedPrior,
    ProductPrior,
    ScoreError,
    clean_prediction,
    coloured_path,
    regress_error,
)
from fluvial.inverse.function_space_langevin.theory import (
    Gaussian,
    Principal,
    is_trace_class,
    law_after,
    mode_kl,
    preconditioner,
    principal,
    rates,
    small_time_kl,
    stationary,
)

__all__ = [
    "Chains",
    "FunctionSpaceLangevin",
    "Gaussian",
    "GaussianPrior",
    "LearnedDrift",
    "LearnedPrior",
    "ModeNetwork",
    "Modes",
    "OperatorNetwork",
    "PosteriorDrift",
    "PreconditionedLangevin",
    "Principal",
    "ProductPrior",
    "Recorder",
    "ScoreError",
    "clean_prediction",
    "coloured_path",
    "effective_samples",
    "is_trace_class",
    "law_after",
    "matrix_of",
    "mode_kl",
    "power_law",
    "preconditioner",
    "principal",
    "r_hat",
    "rates",
    "regress_error",
    "small_time_kl",
    "stationary",
]
