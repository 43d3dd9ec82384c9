"""What is estimated from several fillings of one table, taken together: Rubin's rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from fluvial.tabular.checks import number


@dataclass(frozen=True, eq=False)
class Pooled:
    r"""An estimate from m fillings.

    Args:
        estimate: mean of the m estimates.
        variance: total, :math:`T = \bar U + (1 + 1/m) B`.
        within: :math:`\bar U`, mean of the m variances: of having so many rows.
        between: B, variance of the m estimates: of not knowing what is missing.
        df: degrees of freedom of Student's law.
        missing_information: share of the information that the gaps cost,
            :math:`(r + 2 / (\nu + 3)) / (r + 1)` with :math:`r = (1 + 1/m) B / \bar U`.
        m: fillings.
    """

    estimate: np.ndarray
    variance: np.ndarray
    within: np.ndarray
    between: np.ndarray
    df: np.ndarray
    missing_information: np.ndarray
    m: int

    @property
    def std_error(self) -> np.ndarray:
        """Root of the total variance."""
        return np.sqrt(self.variance)

    def interval(self, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Student's interval around the estimate.

        Raises:
            ValueError: ``level`` is no share in (0, 1).
        """
        number("level", level, "lie in (0, 1)", lambda share: 0 < share < 1)
        half = stats.t.ppf((1 + level) / 2, self.df) * self.std_error
        return self.estimate - half, self.estimate + half


def pool(estimates: Any, variances: Any, *, complete_df: float | None = None) -> Pooled:
    r"""Rubin's rules (Multiple imputation for nonresponse in surveys, 1987).

    The degrees of freedom are Rubin's, :math:`\nu = (m - 1)(1 + 1/r)^2`, or, if those of the
    complete table are given, Barnard and Rubin's (Biometrika, 1999), which never exceed them.

    Args:
        estimates: (m, ...), one of each filling.
        variances: (m, ...), their squared standard errors, as if the table had been complete.
        complete_df: degrees of freedom the estimate has of a complete table, such as n - k of a
            regression.

    Raises:
        ValueError: fewer than two fillings, shapes that differ, a variance below 0 or a number that
            is not finite.
    """
    q, u = _numbers("estimates", estimates), _numbers("variances", variances)
    if q.shape != u.shape or not q.ndim or len(q) < 2:
        raise ValueError(
            f"estimates and variances must have one shape, (m, ...) with m at least 2, got "
            f"{q.shape} and {u.shape}"
        )
    if not np.isfinite(q).all() or not np.isfinite(u).all() or (u < 0).any():
        raise ValueError("estimates must be finite, and variances finite and at least 0")
    if complete_df is not None:
        number("complete_df", complete_df, "be positive and finite", lambda df: 0 < df < np.inf)
    m = len(q)
    within, between = u.mean(0), q.var(0, ddof=1)
    added = (1 + 1 / m) * between
    total = within + added
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = added / within
        share = np.where(total > 0, added / total, 0.0)
        df = np.where(share > 0, (m - 1) / share**2, np.inf)
        if complete_df is not None:
            own = (complete_df + 1) / (complete_df + 3) * complete_df * (1 - share)
            df = np.where(np.isinf(df), own, df * own / (df + own))
        lost = np.where(
            np.isfinite(ratio), (ratio + 2 / (df + 3)) / (ratio + 1), np.where(total > 0, 1.0, 0.0)
        )
    return Pooled(q.mean(0), total, within, between, df, lost, m)


def _numbers(name: str, values: Any) -> np.ndarray:
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be numbers of one shape, (m, ...): {error}") from error
