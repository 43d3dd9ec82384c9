"""Guarantees, attribution, memorisation, intended use."""

from __future__ import annotations

from fluvial.trust.memorization_audit import MemorizationAudit, audit_memorization
from fluvial.trust.rectified_flow_memorization import PairedFlow

__all__ = ["MemorizationAudit", "PairedFlow", "audit_memorization"]
