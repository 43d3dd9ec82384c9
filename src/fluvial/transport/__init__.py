"""Maps and bridges between two distributions."""

from __future__ import annotations

from fluvial.transport.schrodinger_bridge import Reference, SchrodingerBridge

__all__ = ["Reference", "SchrodingerBridge"]
