"""Writes the page."""

from __future__ import annotations

import datetime
import os
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import fluvial
from fluvial.report.runs import Kind, Run, kind_of, read_run, reason
from fluvial.training.files import atomic, new_folder

if TYPE_CHECKING:
    from jinja2 import Template

PAGE = "index.html"
"""The name of the page in its folder."""

CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that may not stand in HTML."""


def write_report_page(runs: Sequence[Path], out: Path, *, force: bool = False) -> Path:
    """Write one self-contained HTML page about runs, and return its path, ``out/index.html``.

    A run is the folder of a training or of a claim, finished, stopped or damaged: what is missing
    or broken in it is named on the page. Among several paths, those that are no run are listed at
    the end of the page; a run given twice is shown once. The page asks for nothing outside itself
    and runs no script. ``metrics.jsonl`` is read line by line: a million lines take about half a
    minute and no more memory than a thousand.

    Args:
        runs: folders of runs, in the order in which they are shown.
        out: a folder that is new or empty.
        force: write into a folder that holds other files; only ``index.html`` is replaced.

    Raises:
        TypeError: ``runs`` is a single path.
        ValueError: ``runs`` is empty, or none of them is a run.
        FileNotFoundError: one of them does not exist.
        FileExistsError: ``out`` is not empty and ``force`` is false, or it is a file.
    """
    folders, left_out = _folders(runs)
    folder = new_folder(out, force=force)
    page = _render([read_run(path, kind) for path, kind in folders], left_out)
    target = folder / PAGE
    with atomic(target) as temporary:
        # names from the file system may hold bytes that are no text
        temporary.write_bytes(page.encode("utf-8", "replace"))
    return target


def _folders(runs: Sequence[Path]) -> tuple[list[tuple[Path, Kind]], list[tuple[str, str]]]:
    """(runs with their kind, other paths with what is wrong with them)."""
    if isinstance(runs, (str, bytes, os.PathLike)):
        raise TypeError(
            f"runs: need a sequence of folders, got the single path {os.fsdecode(runs)}"
        )
    paths = [Path(path) for path in runs]
    if not paths:
        raise ValueError("runs: need one folder of a run or more, got none")
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"runs: there is no folder {path}")
    found: dict[Path, tuple[Path, Kind]] = {}
    left_out = []
    for path in paths:
        try:
            kind = kind_of(path)
        except (OSError, ValueError) as error:
            left_out.append((str(path), reason(error)))
            continue
        if path.resolve() in found:
            left_out.append((str(path), "it was given twice, and is shown once"))
        found.setdefault(path.resolve(), (path, kind))
    if not found:
        what = "; ".join(f"{path}: {why}" for path, why in left_out)
        raise ValueError(f"runs: need one folder of a run or more, got {what}")
    return list(found.values()), left_out


def _labels(runs: Sequence[Run]) -> list[str]:
    """The names of folders, with as many parents as tell them apart."""
    parts = [run.path.resolve().parts for run in runs]
    deepest = max(map(len, parts))
    labels = [run.name for run in runs]
    for depth in range(2, deepest + 1):
        often = Counter(labels)
        labels = [
            "/".join(own[-depth:]) if often[label] > 1 else label
            for label, own in zip(labels, parts, strict=True)
        ]
    return labels


def _render(runs: Sequence[Run], left_out: Sequence[tuple[str, str]]) -> str:
    from markupsafe import Markup

    from fluvial.report.sections import comparisons, section, summary

    labels = _labels(runs)
    named = list(zip(runs, labels, strict=True))
    rows = summary(runs, labels)
    page: str = _template().render(
        style=Markup(_packaged("page.css")),
        title=_title(runs),
        labels=labels,
        lead=_lead(runs),
        summary=rows,
        columns={name for row in rows for name, value in row.items() if value},
        comparisons=comparisons(runs, labels),
        sections=[section(run, label, i) for i, (run, label) in enumerate(named, 1)],
        left_out=left_out,
        version=fluvial.__version__,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )
    return CONTROL.sub("\ufffd", page.strip() + "\n")


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_packaged("page.html"))


def _packaged(name: str) -> str:
    return (resources.files("fluvial.report") / name).read_text(encoding="utf-8")


def _title(runs: Sequence[Run]) -> str:
    systems = {run.system for run in runs if run.system}
    of = f" of {systems.pop()}" if len(systems) == 1 else ""
    return f"{len(runs)} runs{of}" if len(runs) > 1 else f"One run{of}"


def _lead(runs: Sequence[Run]) -> str:
    kinds, states = Counter(run.kind for run in runs), Counter(run.state for run in runs)
    if len(runs) == 1:
        return f"A {runs[0].kind}, {runs[0].state}."
    words = {"training": ("training", "trainings"), "claim": ("claim", "claims")}
    what = " and ".join(f"{n} {words[kind][n > 1]}" for kind, n in kinds.items())
    return f"{what}: {', '.join(f'{n} {state}' for state, n in states.items())}."
