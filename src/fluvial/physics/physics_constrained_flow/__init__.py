"""Physics-constrained flow matching: hard constraints on the samples of a trained flow.

Utkarsh, Cai, Edelman, Gomez-Bombarelli and Rackauckas, "Physics-Constrained Flow Matching: Sampling
Generative Models with Hard Constraints", NeurIPS 2025, arXiv 2506.04171.
"""

from __future__ import annotations

from fluvial.physics.physics_constrained_flow.baselines import (
    ECI,
    DFlow,
    GuidedEuler,
    ProjectedState,
    residual_loss,
    steady_scales,
)
from fluvial.physics.physics_constrained_flow.exact import (
    EmpiricalDenoiser,
    field_scores,
    worst_residual,
)
from fluvial.physics.physics_constrained_flow.flow import (
    PhysicsConstrainedFlow,
    Sampled,
    sample_under,
)
from fluvial.physics.physics_constrained_flow.sampler import PCFM, OfficialField, Renoise, relaxed

__all__ = [
    "ECI",
    "PCFM",
    "DFlow",
    "EmpiricalDenoiser",
    "GuidedEuler",
    "OfficialField",
    "PhysicsConstrainedFlow",
    "ProjectedState",
    "Renoise",
    "Sampled",
    "field_scores",
    "relaxed",
    "residual_loss",
    "sample_under",
    "steady_scales",
    "worst_residual",
]
