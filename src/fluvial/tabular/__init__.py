"""Tables with gaps: filling them, making them, and estimating with several fillings."""

from __future__ import annotations

from fluvial.tabular.amputation import Amputed, ampute
from fluvial.tabular.miri import MIRIImputer
from fluvial.tabular.pooling import Pooled, pool

__all__ = ["Amputed", "MIRIImputer", "Pooled", "ampute", "pool"]
