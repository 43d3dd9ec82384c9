"""MIRI: gaps of a table drawn anew, round by round, until they no longer tell which they were."""

from __future__ import annotations

from fluvial.tabular.miri.columns import Column
from fluvial.tabular.miri.diagnostics import cross_mmd, mask_auc, mutual_information
from fluvial.tabular.miri.imputer import MIRIImputer
from fluvial.tabular.miri.rounds import Round, Rounds, impute_images, run_rounds

__all__ = [
    "Column",
    "MIRIImputer",
    "Round",
    "Rounds",
    "cross_mmd",
    "impute_images",
    "mask_auc",
    "mutual_information",
    "run_rounds",
]
