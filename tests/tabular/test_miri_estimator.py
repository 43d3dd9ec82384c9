"""`MIRIImputer` keeps scikit-learn's contract: its own estimator checks, none expected to fail."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from fluvial.tabular import MIRIImputer


@parametrize_with_checks([MIRIImputer()], expected_failed_checks=lambda estimator: {})
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    check(estimator)
