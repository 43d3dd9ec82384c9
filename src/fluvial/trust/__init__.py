"""Guarantees, attribution, memorisation, intended use."""

from __future__ import annotations

from fluvial.trust.conformal_masks import ConfidenceMask, RestorationFlow, calibrate
from fluvial.trust.memorization_audit import MemorizationAudit, audit_memorization
from fluvial.trust.rectified_flow_memorization import PairedFlow

__all__ = [
    "ConfidenceMask",
    "MemorizationAudit",
    "PairedFlow",
    "RestorationFlow",
    "audit_memorization",
    "calibrate",
]
