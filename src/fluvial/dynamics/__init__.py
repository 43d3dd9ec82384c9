"""Diffusions and their discretisations."""

from __future__ import annotations

from fluvial.dynamics.critically_damped_langevin import CriticallyDamped, CriticallyDampedLangevin
from fluvial.dynamics.wasserstein_samplers import SharedBrownian, WassersteinSampler

__all__ = [
    "CriticallyDamped",
    "CriticallyDampedLangevin",
    "SharedBrownian",
    "WassersteinSampler",
]
