"""What a run of a claim leaves behind: a folder with its result, table and card."""

from __future__ import annotations

import datetime
import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import fluvial
from fluvial.claims.verdict import RULE, Comparison, judge
from fluvial.models import ABOUT
from fluvial.training.card import write_claim_card
from fluvial.training.files import atomic, new_folder, write_json

RESULTS = Path(__file__).parent / "results"
"""Where the results of ``record`` runs are kept, one JSON file a system."""


@dataclass(frozen=True)
class Report:
    """The outcome of a run.

    Args:
        system, claim: what was run, and the claim in words.
        preset: only ``"record"`` is judged.
        config: everything the run depended on.
        comparisons: what the verdict is computed from.
        table: rows of the printed table, all with the same keys.
        data: what the run was trained and measured on, with licence and provenance.
        seconds: how long the run took, all its sessions together.
        notes: what a reader has to know beside the numbers.
    """

    system: str
    claim: str
    preset: str
    config: Any
    comparisons: Sequence[Comparison]
    table: Sequence[Mapping[str, Any]]
    data: Mapping[str, str]
    seconds: float
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def verdict(self) -> str:
        """`judge` over the comparisons for ``record``; ``"not judged"`` for every other preset."""
        return judge(self.comparisons) if self.preset == "record" else "not judged"

    def as_json(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "claim": self.claim,
            "preset": self.preset,
            "verdict": self.verdict,
            "rule": RULE,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": {
                "fluvial": fluvial.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "seconds": round(self.seconds, 1),
            "config": asdict(self.config),
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
            "table": [dict(row) for row in self.table],
            "data": dict(self.data),
            "notes": list(self.notes),
        }

    def as_text(self) -> str:
        """The table and the comparisons, for a terminal and for the card."""
        lines = [self.claim, "", markdown_table(self.table), ""]
        for comparison in self.comparisons:
            low, high = comparison.interval
            interval = f", 95 % interval {low:.3g} to {high:.3g}" if low > -1e300 else ""
            lines.append(
                f"- {comparison.name}: mean difference {comparison.mean:.3g}{interval}, margin "
                f"{comparison.margin:g}"
            )
        if self.preset == "record":
            lines += ["", f"Verdict: the claim {VERBS[self.verdict]}."]
        else:
            lines += ["", "Indicative only: a verdict needs the preset `record`."]
        return "\n".join(lines)


VERBS = {"holds": "holds", "fails": "fails", "undecided": "is undecided"}


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of a table as aligned Markdown."""
    header = list(rows[0])
    cells = [header] + [[_cell(row[name]) for name in header] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def open_run(out: Path, preset: str, config: Any, *, force: bool) -> Path:
    """The folder of a run: a new one, or an unfinished one of the same preset and configuration.

    Raises:
        FileExistsError: ``out`` holds a finished run, a run of another configuration (the
            differences are named) or anything else; ``force`` deletes a run, and only a run.
    """
    wanted = {"preset": preset, **json.loads(json.dumps(asdict(config)))}
    marker = out / "config.json"
    if marker.is_file():
        if not force:
            found = json.loads(marker.read_text(encoding="utf-8"))
            different = [
                f"{key} was {found.get(key)!r}, is {value!r}"
                for key, value in wanted.items()
                if found.get(key) != value
            ]
            if different:
                raise FileExistsError(
                    f"{out} holds a run of another configuration ({'; '.join(different)}); choose "
                    "another folder, or --force to delete that run"
                )
            if (out / "result.json").exists():
                raise FileExistsError(
                    f"{out} holds a finished run; choose another folder, or --force to delete it"
                )
            return out
        shutil.rmtree(out)
    elif force and out.is_dir() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty and not a run; force deletes runs only")
    folder = new_folder(out)
    write_json(folder / "config.json", wanted)
    return folder


def write_report(report: Report, out: Path) -> None:
    """``table.md``, the card and, last, ``result.json``; a record also beside its claim.

    A record is the preset as it stands: a run of it with other options is judged as well, but kept
    in its own folder alone.
    """
    content = report.as_json()
    with atomic(out / "table.md") as path:
        path.write_text(markdown_table(report.table) + "\n", encoding="utf-8")
    write_claim_card(
        out,
        system=report.system,
        preset=report.preset,
        evaluation=report.as_text(),
        data=report.data,
        notes=report.notes,
        config=content["config"],
        seconds=report.seconds,
        versions=content["versions"],
        about=ABOUT,
    )
    claim = import_module(f"fluvial.claims.{report.system.replace('-', '_')}")
    if report.preset == "record" and report.config == claim.PRESETS["record"]:
        write_json(RESULTS / f"{report.system}.json", content)
    write_json(out / "result.json", content)
