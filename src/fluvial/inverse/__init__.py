"""Inverse problems: unknown functions and images from incomplete or blurred measurements."""

from __future__ import annotations

from fluvial.inverse.function_space_langevin import FunctionSpaceLangevin
from fluvial.inverse.system_embedded_bridge import SystemEmbeddedBridge

__all__ = ["FunctionSpaceLangevin", "SystemEmbeddedBridge"]
