"""Conformal confidence masks: where a restored image may be trusted, with a guarantee."""

from __future__ import annotations

from fluvial.trust.conformal_masks.calibration import (
    Calibration,
    Calibrator,
    Evaluation,
    bentkus,
    calibrate,
    evaluate,
    hoeffding,
    worst,
)
from fluvial.trust.conformal_masks.errors import Custom, Difference, masked_psnr
from fluvial.trust.conformal_masks.flow import EnlargingNet, RestorationFlow
from fluvial.trust.conformal_masks.kernels import Box, Gaussian
from fluvial.trust.conformal_masks.mask import ConfidenceMask, Restored
from fluvial.trust.conformal_masks.picture import Panel, draw_masks
from fluvial.trust.conformal_masks.scores import Variance

__all__ = [
    "Box",
    "Calibration",
    "Calibrator",
    "ConfidenceMask",
    "Custom",
    "Difference",
    "EnlargingNet",
    "Evaluation",
    "Gaussian",
    "Panel",
    "RestorationFlow",
    "Restored",
    "Variance",
    "bentkus",
    "calibrate",
    "draw_masks",
    "evaluate",
    "hoeffding",
    "masked_psnr",
    "worst",
]
