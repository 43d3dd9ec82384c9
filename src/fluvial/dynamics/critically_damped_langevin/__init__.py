"""Critically damped Langevin diffusion with position noise (Strasman et al., NeurIPS 2025)."""

from __future__ import annotations

from fluvial.dynamics.critically_damped_langevin.gaussian import (
    GaussianScore,
    gaussian_law,
    gaussian_w2,
)
from fluvial.dynamics.critically_damped_langevin.model import (
    CriticallyDampedLangevin,
    NetworkScore,
)
from fluvial.dynamics.critically_damped_langevin.network import ResidualMLP
from fluvial.dynamics.critically_damped_langevin.path import CriticallyDamped, SpeedClock
from fluvial.dynamics.critically_damped_langevin.samplers import EM, SSCS, Denoised, Leapfrog

__all__ = [
    "EM",
    "SSCS",
    "CriticallyDamped",
    "CriticallyDampedLangevin",
    "Denoised",
    "GaussianScore",
    "Leapfrog",
    "NetworkScore",
    "ResidualMLP",
    "SpeedClock",
    "gaussian_law",
    "gaussian_w2",
]
