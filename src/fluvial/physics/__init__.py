"""Fields and shapes under physical laws."""

from __future__ import annotations

from fluvial.physics.physics_constrained_flow import PhysicsConstrainedFlow

__all__ = ["PhysicsConstrainedFlow"]
