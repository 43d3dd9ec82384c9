"""Data sets that ship inside packages, with their provenance. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable

from fluvial.data.animals import animals
from fluvial.data.digits import digits
from fluvial.data.images import ImageSet, scaled, to_uint8

__all__ = ["IMAGE_SETS", "ImageSet", "animals", "digits", "scaled", "to_uint8"]

IMAGE_SETS: dict[str, Callable[[], ImageSet]] = {"animals": animals, "digits": digits}
"""The image sets, by name."""
