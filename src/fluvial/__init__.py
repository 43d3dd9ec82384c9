"""Fluvial: generative modelling by transport.

A *path* says how data becomes noise, a *field* is learned along it by minimising an *objective*,
a *sampler* simulates the field back, and *steering* bends the simulation. `fluvial.core` holds
these parts, the wings (`fluvial.images`, ...) the methods made of them, `fluvial.catalog` the list.

`load` gives back any saved model, `IntendedUse` says what one is for. The names of the core can be
taken from here too, ``from fluvial import KeyedNoise``; each is imported at its first use, so that
``import fluvial`` itself stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_CORE = {
    "Draw": "fluvial.core.protocols",
    "Field": "fluvial.core.protocols",
    "GaussianPath": "fluvial.core.protocols",
    "Noise": "fluvial.core.protocols",
    "Objective": "fluvial.core.protocols",
    "Path": "fluvial.core.protocols",
    "Run": "fluvial.core.protocols",
    "Sampler": "fluvial.core.protocols",
    "Scale": "fluvial.core.protocols",
    "State": "fluvial.core.protocols",
    "Steering": "fluvial.core.protocols",
    "Ancestral": "fluvial.core.simulate",
    "simulate": "fluvial.core.simulate",
    "KeyedNoise": "fluvial.core.noise",
    "IntendedUse": "fluvial.training.use",
    "load": "fluvial.models",
}

if TYPE_CHECKING:
    from fluvial.core.noise import KeyedNoise
    from fluvial.core.protocols import (
        Draw,
        Field,
        GaussianPath,
        Noise,
        Objective,
        Path,
        Run,
        Sampler,
        Scale,
        State,
        Steering,
    )
    from fluvial.core.simulate import Ancestral, simulate
    from fluvial.models import load
    from fluvial.training.use import IntendedUse

__all__ = [
    "Ancestral",
    "Draw",
    "Field",
    "GaussianPath",
    "IntendedUse",
    "KeyedNoise",
    "Noise",
    "Objective",
    "Path",
    "Run",
    "Sampler",
    "Scale",
    "State",
    "Steering",
    "__version__",
    "load",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _CORE:
        value = getattr(import_module(_CORE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fluvial' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_CORE})
