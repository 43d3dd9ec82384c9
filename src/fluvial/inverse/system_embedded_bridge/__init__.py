"""System-embedded diffusion bridges: what is measured is denoised, what is not is generated.

Sobieski, Tivnan, Wang, Yoon, Jin, Wu, Li and Biecek, "System-Embedded Diffusion Bridge Models",
NeurIPS 2025, arXiv 2506.23726. What is marked (corrected) in the sources of this library differs
from the published code, and is checked in the tests.
"""

from __future__ import annotations

from fluvial.inverse.system_embedded_bridge.baselines import Regression, ScalarBridge, ddnm, pigdm
from fluvial.inverse.system_embedded_bridge.bridge import SystemEmbeddedBridge
from fluvial.inverse.system_embedded_bridge.process import (
    EmbeddedPath,
    ReverseEuler,
    backwards,
    perturb,
)
from fluvial.inverse.system_embedded_bridge.restorer import PairedRestorer, Systems
from fluvial.inverse.system_embedded_bridge.schedules import SB, VE, VP, Schedule
from fluvial.inverse.system_embedded_bridge.tasks import Task

__all__ = [
    "SB",
    "VE",
    "VP",
    "EmbeddedPath",
    "PairedRestorer",
    "Regression",
    "ReverseEuler",
    "ScalarBridge",
    "Schedule",
    "SystemEmbeddedBridge",
    "Systems",
    "Task",
    "backwards",
    "ddnm",
    "perturb",
    "pigdm",
]
