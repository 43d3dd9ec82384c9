"""Image generation."""

from __future__ import annotations

from fluvial.images.meanflow import FreeGuidance, Guidance, MeanFlow, TimePairs

__all__ = ["FreeGuidance", "Guidance", "MeanFlow", "TimePairs"]
