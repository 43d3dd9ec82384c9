"""Schrödinger bridges: closed form for Gaussians, exact on a grid, by networks for data."""

from __future__ import annotations

from fluvial.transport.schrodinger_bridge.bridge import SchrodingerBridge
from fluvial.transport.schrodinger_bridge.gaussian import (
    GaussianCoupling,
    GaussianField,
    gaussian_bridge,
    gaussian_imf,
    gaussian_ipf,
    scalar_imf,
)
from fluvial.transport.schrodinger_bridge.grid import (
    coupling_kl,
    grid_imf,
    grid_ipf,
    sinkhorn,
    transition_kernels,
    whole_kernel,
)
from fluvial.transport.schrodinger_bridge.rates import finite_state_rate_bound, imf_rate_bound
from fluvial.transport.schrodinger_bridge.reference import Reference

__all__ = [
    "GaussianCoupling",
    "GaussianField",
    "Reference",
    "SchrodingerBridge",
    "coupling_kl",
    "finite_state_rate_bound",
    "gaussian_bridge",
    "gaussian_imf",
    "gaussian_ipf",
    "grid_imf",
    "grid_ipf",
    "imf_rate_bound",
    "scalar_imf",
    "sinkhorn",
    "transition_kernels",
    "whole_kernel",
]
