"""Denoisers made of a data set alone, and what they say about trained ones.

`LocalityDenoiser` reads the receptive field of every coordinate off the Wiener filter of the data
(Lukoianov et al., NeurIPS 2025, arXiv 2509.09672). Beside it stand those it is compared with:
`OptimalDenoiser`, `WienerDenoiser`, `NearestDenoiser`, `LocalScoreMachine` and
`EquivariantLocalScoreMachine`. All are fields that predict the clean end and are computed exactly,
over the whole data set and in bounded memory.

Why statistics make receptive fields local: in the eigendirections of the covariance S the gain of
the Wiener filter is A l / (A l + B), with A = alpha^2 and B = sigma^2: a soft projection onto the
components whose signal-to-noise ratio exceeds 1. With little noise it is nearly the identity. Where
statistics are the same at every place, it is a convolution whose width grows with the noise; of
aligned images, such as centred faces, it follows the principal components. Nothing of this knows of
convolutions.
"""

from __future__ import annotations

from fluvial.images.locality.calibration import calibrate_scales, trajectory
from fluvial.images.locality.classical import NearestDenoiser, OptimalDenoiser, WienerDenoiser
from fluvial.images.locality.denoiser import Clip, Denoiser, linear_beta_path
from fluvial.images.locality.diagnostics import (
    Match,
    agreement,
    cosine,
    match,
    radius,
    sensitivity,
)
from fluvial.images.locality.locality import LocalityDenoiser
from fluvial.images.locality.patches import EquivariantLocalScoreMachine, LocalScoreMachine
from fluvial.images.locality.spectrum import Spectrum

__all__ = [
    "Clip",
    "Denoiser",
    "EquivariantLocalScoreMachine",
    "LocalScoreMachine",
    "LocalityDenoiser",
    "Match",
    "NearestDenoiser",
    "OptimalDenoiser",
    "Spectrum",
    "WienerDenoiser",
    "agreement",
    "calibrate_scales",
    "cosine",
    "linear_beta_path",
    "match",
    "radius",
    "sensitivity",
    "trajectory",
]
