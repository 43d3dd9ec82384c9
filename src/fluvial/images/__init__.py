"""Image generation."""

from __future__ import annotations

from fluvial.images.locality import (
    EquivariantLocalScoreMachine,
    LocalityDenoiser,
    LocalScoreMachine,
    NearestDenoiser,
    OptimalDenoiser,
    WienerDenoiser,
)
from fluvial.images.meanflow import FreeGuidance, Guidance, MeanFlow, TimePairs

__all__ = [
    "EquivariantLocalScoreMachine",
    "FreeGuidance",
    "Guidance",
    "LocalScoreMachine",
    "LocalityDenoiser",
    "MeanFlow",
    "NearestDenoiser",
    "OptimalDenoiser",
    "TimePairs",
    "WienerDenoiser",
]
