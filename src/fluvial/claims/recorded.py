"""The verdicts that were recorded: what ``fluvial claims`` lists."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fluvial import catalog

RESULTS = Path(__file__).parent / "results"
"""Where ``record`` runs leave their results, one JSON file a system."""

NOT_RECORDED = "not recorded"
"""The verdict of a claim that no ``record`` run has judged."""


@dataclass(frozen=True)
class Figure:
    """A comparison of a claim: the mean difference over seeds, positive where the claim is right.

    Args:
        name: what is compared.
        mean: over seeds.
        low, high: the 95 % interval of the mean, ``None`` where it is unbounded.
        margin: what the mean has to exceed.
        verdict: of this comparison.
    """

    name: str
    mean: float
    low: float | None
    high: float | None
    margin: float
    verdict: str


@dataclass(frozen=True)
class Recorded:
    """A system's claim, and what a ``record`` run found.

    Args:
        system: its name.
        verdict: ``"holds"``, ``"fails"``, ``"undecided"`` or ``"not recorded"``.
        claim: in words; ``None``, as everything below, where nothing was recorded.
        date: of the run, ``YYYY-MM-DD``.
        seeds: that were run.
        figures: its comparisons.
    """

    system: str
    verdict: str = NOT_RECORDED
    claim: str | None = None
    date: str | None = None
    seeds: tuple[int, ...] | None = None
    figures: tuple[Figure, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def recorded_claims(results: Path = RESULTS) -> tuple[Recorded, ...]:
    """The claims of all available systems, in the order of the catalog.

    Raises:
        ValueError: a file in ``results`` is not the result of a system that is available; the
            message names it.
    """
    systems = [system.name for system in catalog.available()]
    found = {path.stem: _read(path) for path in sorted(results.glob("*.json"))}
    for name in found:
        if name not in systems:
            raise ValueError(f"{name}.json: there is no available system of this name")
    return tuple(found.get(name, Recorded(name)) for name in systems)


def _read(path: Path) -> Recorded:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["system"] != path.stem:
            raise ValueError(f"'system' is {record['system']!r}, need {path.stem!r}")
        config = record["config"]
        # a claim over splits of one pool has one seed
        seeds = [config["seed"]] if "seed" in config else config["seeds"]
        return Recorded(
            system=record["system"],
            verdict=record["verdict"],
            claim=record["claim"],
            date=record["date"],
            seeds=tuple(int(seed) for seed in seeds),
            figures=tuple(_figure(row) for row in record["comparisons"]),
        )
    except KeyError as error:
        raise ValueError(f"{path.name}: a recorded result needs {error}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is not a recorded result: {error}") from error


def _figure(row: Mapping[str, Any]) -> Figure:
    low, high = (None if row[end] is None else float(row[end]) for end in ("low", "high"))
    return Figure(
        row["name"], float(row["mean"]), low, high, float(row["margin"]), str(row["verdict"])
    )


def claims_text(claims: Sequence[Recorded], width: int = 88) -> str:
    """A row a system, then what each recorded claim says and its comparisons, for a terminal."""
    header = ("system", "verdict", "date", "seeds", "comparisons that hold")
    rows = [header, *map(_row, claims)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for claim in claims:
        if claim.claim is None:
            continue
        lines += ["", *textwrap.wrap(f"{claim.system}: {claim.claim}", width)]
        for figure in claim.figures:
            interval = (
                "no interval"
                if figure.low is None or figure.high is None
                else f"95 % interval {figure.low:.3g} to {figure.high:.3g}"
            )
            words = (
                f"{figure.name}: {figure.mean:.3g}, {interval}, margin {figure.margin:g}: "
                f"{figure.verdict}"
            )
            lines += textwrap.wrap(words, width, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)


def _row(claim: Recorded) -> tuple[str, ...]:
    if claim.verdict == NOT_RECORDED:
        return claim.system, claim.verdict, "", "", ""
    holding = sum(figure.verdict == "holds" for figure in claim.figures)
    seeds = ", ".join(map(str, claim.seeds or ()))
    held = f"{holding} of {len(claim.figures)}"
    return claim.system, claim.verdict, claim.date or "", seeds, held
