"""What a filled table is like beside what was observed, column by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fluvial.tabular.miri.columns import UNITS, Column
from fluvial.training.files import atomic

FEW = 30
"""Observed values below which a column is named as one that little is known of."""
SHOWN = 12
"""Columns in the figure, those with most gaps."""


@dataclass(frozen=True)
class ColumnReport:
    """A column before and after.

    Args:
        name, kind: of the column.
        missing: entries.
        share: of the rows.
        observed: mean and standard deviation of the observed values, or the shares of the three
            most frequent categories.
        drawn: the same of what was drawn.
        distance: largest difference of the two distribution functions (Kolmogorov and Smirnov), or
            half the sum of the differences of the shares of categories; 0 to 1. Under MAR and MNAR
            the two are not to be equal.
        spread: how much several draws of one entry differ: their standard deviation over that of
            the observed values, root mean square over entries (of at most 10,000 rows, evenly
            spaced among those with gaps); of categories, the share of
            pairs of draws that differ. Near 0 the rest of the row says all; near 1 (of categories,
            the ``spread_of_none``) it says nothing.
        spread_of_none: what the spread is of draws from the observed values, whatever the row.
    """

    name: str
    kind: str
    missing: int
    share: float
    observed: dict[str, float]
    drawn: dict[str, float]
    distance: float | None
    spread: float | None
    spread_of_none: float | None


def column_report(
    column: Column, values: np.ndarray, drawn: np.ndarray, draws: np.ndarray
) -> ColumnReport:
    """A column's part of the report.

    Args:
        column: what it is.
        values: (n,) with NaN in gaps, in the column's own numbers.
        drawn: (k,) what its gaps were filled with.
        draws: (m, l) several fillings of some of them; l may be 0.
    """
    seen = values[~np.isnan(values)]
    seen = seen[seen >= 0] if column.categories else seen
    missing = len(drawn)
    discrete = column.kind in ("boolean", "categorical")
    if discrete:
        names = [str(name) for name in column.categories] or ["false", "true"]
        shares = [
            np.bincount(part.astype(int), minlength=len(names)) / max(len(part), 1)
            for part in (seen, drawn)
        ]
        most = np.argsort(-shares[0], kind="stable")[:3]
        observed, filled = ({names[k]: float(share[k]) for k in most} for share in shares)
        distance = float(abs(shares[0] - shares[1]).sum() / 2)
        none = float(1 - (shares[0] ** 2).sum())
        pairs = [
            (draws[i] != draws[j]).mean() for i in range(len(draws)) for j in range(i)
        ] if draws.shape[1] else []  # fmt: skip
        spread = float(np.mean(pairs)) if pairs else None
    else:
        scale, origin = _units(column)
        observed, filled = (
            {
                "mean": origin + float(part.mean()) / scale,
                "std": float(part.std()) / scale,
            }
            if len(part)
            else {}
            for part in (seen, drawn)
        )
        both = np.sort(np.concatenate([seen, drawn]))
        steps = [
            np.searchsorted(np.sort(part), both, side="right") / max(len(part), 1)
            for part in (seen, drawn)
        ]
        distance = float(abs(steps[0] - steps[1]).max())
        own = float(seen.std())
        none = 1.0
        spread = None
        if draws.shape[1] and len(draws) > 1 and own > 0:
            spread = float(np.sqrt(draws.var(0, ddof=1).mean()) / own)
    return ColumnReport(
        column.name,
        column.kind,
        missing,
        missing / len(values),
        observed,
        filled if missing else {},
        distance if missing else None,
        spread,
        none if spread is not None else None,
    )


def _units(column: Column) -> tuple[float, float]:
    """Of dates: nanoseconds a day, and days since 1970 of the origin; else 1, and the origin."""
    day = 86_400e9
    return (day, column.origin / day) if column.kind == "date" else (1.0, float(column.origin))


def assumptions(columns: Sequence[Column], rows: int, left: Mapping[str, str]) -> list[str]:
    """What a reader has to know of how the gaps were filled."""
    result = [
        "Whether a value is missing is taken to depend on nothing but the values that are there "
        "(missing at random). Where it depends on the missing value itself, as where high incomes "
        "are kept back, what was drawn is biased, and nothing in the table tells.",
        "What was drawn is one draw from what the rest of the row allows, and no best guess: use "
        "several fillings (--copies) for standard errors, and --draws 20 for best guesses.",
        "Nothing is drawn beyond the least and the largest observed value of a column.",
    ]
    few = [
        f"{one.name} ({one.observed} of {rows})"
        for one in columns
        if one.observed < FEW or one.observed < 0.2 * rows
    ]
    if few:
        result.append(f"Little is known of columns with few values: {', '.join(few)}.")
    constant = [one.name for one in columns if one.constant]
    if constant:
        result.append(f"Columns of one value only were filled with it: {', '.join(constant)}.")
    ranked = [one.name for one in columns if one.kind == "integer"]
    if ranked:
        result.append(f"Columns of whole numbers were rounded: {', '.join(ranked)}.")
    for name, why in left.items():
        result.append(f"{name} was left as it is, gaps and all, and not used: {why}.")
    return result


def as_markdown(
    title: str, reports: Sequence[ColumnReport], facts: Sequence[str], notes: Sequence[str]
) -> str:
    """The report as text."""
    lines = [f"# {title}", "", *(f"- {fact}" for fact in facts), ""]
    lines += ["## Columns", ""]
    lines += [
        "| column | kind | missing | share | observed | drawn | distance | spread (of none) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in reports:
        spread = "" if one.spread is None else f"{one.spread:.2f} ({one.spread_of_none:.2f})"
        cells = [
            one.name,
            one.kind,
            f"{one.missing:,}",
            f"{one.share:.1%}",
            _listed(one.observed),
            _listed(one.drawn),
            "" if one.distance is None else f"{one.distance:.3f}",
            spread,
        ]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    lines += [
        "",
        "Observed and drawn: mean and standard deviation, or shares of the most frequent "
        "categories; of dates in days since 1970. Distance: of the two distributions, 0 to 1; it "
        "need not be 0 where what is missing differs from what is there. Spread: how much several "
        "draws of one entry differ, beside how much draws would that ignore the row.",
        "",
        "## What was recognised and assumed",
        "",
        *(f"- {note}" for note in notes),
        "",
    ]
    return "\n".join(lines)


def _listed(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


def as_json(reports: Sequence[ColumnReport]) -> list[dict[str, Any]]:
    """The columns' parts, as JSON holds them."""
    return [asdict(one) for one in reports]


def draw_report(
    path: Path, columns: Sequence[Column], values: Sequence[np.ndarray], drawn: Sequence[np.ndarray]
) -> None:
    """Observed and drawn values of the columns with most gaps, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    order = sorted(range(len(columns)), key=lambda j: -len(drawn[j]))
    chosen = [j for j in order if len(drawn[j])][:SHOWN] or order[:1]
    across = min(4, len(chosen))
    down = -(-len(chosen) // across)
    figure = Figure(figsize=(2.6 * across + 0.4, 2.1 * down + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for axis in axes[len(chosen) :]:
        axis.set_axis_off()
    for j, axis in zip(chosen, axes, strict=False):
        column = columns[j]
        scale, origin = _units(column)
        large = column.kind != "date" and column.origin  # no bins between such numbers
        origin = 0.0 if large else origin
        seen = values[j][~np.isnan(values[j])]
        parts = {"observed": seen / scale + origin, "drawn": drawn[j] / scale + origin}
        if column.kind in ("boolean", "categorical"):
            names = [str(name) for name in column.categories] or ["false", "true"]
            for k, (label, part) in enumerate(parts.items()):
                part = part[part >= 0]
                heights = np.bincount(part.astype(int), minlength=len(names)) / max(len(part), 1)
                at = np.arange(len(names)) + 0.4 * k - 0.2
                axis.bar(at, heights, 0.38, color=f"C{k}", alpha=0.8, label=label)
            shown = names if len(names) <= 6 else []
            axis.set_xticks(range(len(shown)), [name[:10] for name in shown], fontsize=7)
        else:
            both = np.concatenate(list(parts.values()))
            low, high = float(both.min()), float(both.max())
            if high - low <= 1e-9 * max(abs(low), abs(high)):  # too near for edges between them
                low, high = low - 0.1 * (abs(low) or 1), high + 0.1 * (abs(high) or 1)
            bins = np.linspace(low, high, min(30, max(5, int(len(both) ** 0.5))) + 1)
            whole = column.kind == "integer" or column.unit == UNITS["days"]
            if whole and np.ptp(both) <= 30:  # a bar a number, or a day
                bins = np.arange(np.floor(both.min()), np.floor(both.max()) + 2) - 0.5
            if column.origin and not large:
                axis.xaxis.set_major_locator(AutoDateLocator(minticks=2, maxticks=4))
                axis.xaxis.set_major_formatter(ConciseDateFormatter(axis.xaxis.get_major_locator()))
                axis.xaxis.get_offset_text().set_fontsize(7)
            elif 0 < len(column.categories) <= 6:  # ordered: by rank
                names = [str(name)[:10] for name in column.categories]
                axis.set_xticks(range(len(names)), names, fontsize=7)
            for k, (label, part) in enumerate(parts.items()):
                if len(part):
                    axis.hist(part, bins, density=True, color=f"C{k}", alpha=0.55, label=label)
        less = f" - {column.origin}" if large else ""
        axis.set_title(f"{column.name[:24]}{less}, {len(drawn[j])} missing", fontsize=8)
        axis.set_yticks([])
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=7)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
