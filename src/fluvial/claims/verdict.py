"""The one rule by which every claim is judged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scipy import stats

Verdict = Literal["holds", "fails", "undecided"]

RULE = (
    "Every comparison is paired by seed: one difference a seed, positive where the claim is right. "
    "It holds if the 95 % Student interval of the mean difference lies above the margin, fails if "
    "the interval lies below it, and is undecided otherwise. The claim holds if all comparisons "
    "hold, fails if any fails, and is undecided otherwise. Margins are fixed in the claim's file "
    "before the run; fewer than 3 seeds decide nothing."
)
LEVEL = 0.95
FEWEST_SEEDS = 3


@dataclass(frozen=True)
class Comparison:
    """A paired comparison.

    Args:
        name: what is compared, in words.
        differences: one number a seed, positive where the claim is right.
        margin: what the mean difference has to exceed.
    """

    name: str
    differences: Sequence[float]
    margin: float = 0.0

    @property
    def mean(self) -> float:
        return math.fsum(self.differences) / len(self.differences)

    @property
    def interval(self) -> tuple[float, float]:
        """Student's interval of the mean; unbounded for one seed."""
        count = len(self.differences)
        if count < 2:
            return -math.inf, math.inf
        spread = math.sqrt(math.fsum((d - self.mean) ** 2 for d in self.differences) / (count - 1))
        half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * spread / math.sqrt(count)
        return self.mean - half, self.mean + half

    @property
    def verdict(self) -> Verdict:
        low, high = self.interval
        if len(self.differences) < FEWEST_SEEDS:
            return "undecided"
        return "holds" if low > self.margin else "fails" if high < self.margin else "undecided"

    def as_json(self) -> Mapping[str, Any]:
        low, high = self.interval
        return {
            "name": self.name,
            "margin": self.margin,
            "differences": list(self.differences),
            "mean": self.mean,
            "low": low if math.isfinite(low) else None,
            "high": high if math.isfinite(high) else None,
            "verdict": self.verdict,
        }


def judge(comparisons: Sequence[Comparison]) -> Verdict:
    """The verdict over all comparisons of a claim."""
    verdicts = {comparison.verdict for comparison in comparisons}
    if "fails" in verdicts:
        return "fails"
    return "holds" if verdicts == {"holds"} else "undecided"
