"""Samplers whose Wasserstein distance to the data has a bound; see `WassersteinSampler`."""

from __future__ import annotations

from fluvial.dynamics.wasserstein_samplers.brownian import SharedBrownian
from fluvial.dynamics.wasserstein_samplers.clock import clock_grid
from fluvial.dynamics.wasserstein_samplers.errors import (
    shared_runs,
    strong_error,
    strong_errors,
)
from fluvial.dynamics.wasserstein_samplers.sampler import SCHEMES, Scheme, WassersteinSampler
from fluvial.dynamics.wasserstein_samplers.theory import (
    gaussian_moments,
    guaranteed_steps,
    w2_bound,
)

__all__ = [
    "SCHEMES",
    "Scheme",
    "SharedBrownian",
    "WassersteinSampler",
    "clock_grid",
    "gaussian_moments",
    "guaranteed_steps",
    "shared_runs",
    "strong_error",
    "strong_errors",
    "w2_bound",
]
