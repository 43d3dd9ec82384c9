"""Reads the folder of a run, finished or not. What cannot be read is named, never raised."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fluvial.report.curves import Metrics, number, read_metrics

FORMAT = 1
"""Latest version of ``run.json`` and ``result.json`` that is understood."""

LARGEST_JSON = 16 << 20
"""In bytes: a larger file is not one of ours."""

Kind = Literal["training", "claim"]


@dataclass
class Run:
    """A run, as far as it can be read.

    Args:
        path: its folder.
        kind: a training, or the run of a claim.
        state: ``"finished"``, ``"stopped"`` (it can go on) or ``"damaged"`` (a file that every run
            has is missing or broken).
        settings: ``run.json`` or, of a claim, ``config.json``.
        loop: ``training.json``.
        result: ``result.json``; empty if there is none.
        metrics: the curves of a training.
        problems: sentences about what is missing or broken.
    """

    path: Path
    kind: Kind
    state: Literal["finished", "stopped", "damaged"] = "finished"
    settings: dict[str, Any] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.resolve().name or str(self.path)

    @property
    def system(self) -> str:
        """Its name, "" if no file says it."""
        return text(self.result.get("system")) or text(self.settings.get("system"))

    @property
    def data(self) -> dict[str, Any]:
        """Name, source, licence and counts."""
        data = self.result.get("data") if self.kind == "claim" else self.settings.get("data")
        if isinstance(data, str):
            return {"name": data}
        if data is None and self.kind == "claim" and "data" in self.settings:
            return {"name": self.settings["data"]}
        return mapping(data)

    @property
    def recipe(self) -> dict[str, Any]:
        """Hyper-parameters."""
        if self.kind == "training":
            return mapping(self.settings.get("recipe"))
        return mapping(self.result.get("config")) or {
            key: value for key, value in self.settings.items() if key not in ("preset", "system")
        }

    @property
    def preset(self) -> str:
        """Of a claim."""
        return text(self.result.get("preset")) or text(self.settings.get("preset"))

    @property
    def step(self) -> float | None:
        """How far a training came."""
        steps = [number(self.result.get("steps")), self.metrics.step, _last_checkpoint(self.path)]
        return max((step for step in steps if step is not None), default=None)

    @property
    def planned(self) -> float | None:
        """The steps it was to take."""
        for source in (self.loop, self.recipe):
            steps = number(source.get("steps"))
            if steps is not None:
                return steps
        return None

    @property
    def seconds(self) -> float | None:
        seconds = number(self.result.get("seconds"))
        return self.metrics.seconds if seconds is None else seconds

    @property
    def versions(self) -> dict[str, Any]:
        return mapping(self.result.get("versions")) or mapping(self.settings.get("versions"))

    @property
    def verdict(self) -> str:
        """Of a claim; "" for a training and for a claim without a result."""
        return text(self.result.get("verdict")) if self.kind == "claim" else ""

    @property
    def weights(self) -> str:
        """The set of weights whose validation is shown first, "" if none was validated."""
        sets = list(dict.fromkeys(w for s in self.metrics.stages.values() for w in s.validation))
        chosen = text(self.result.get("weights"))
        return chosen if chosen in sets else sets[-1] if sets else ""

    def rows(self, key: str) -> list[dict[str, Any]]:
        """A list of objects of the result, whatever is not an object left out."""
        content = self.result.get(key)
        return (
            [row for row in content if isinstance(row, dict)] if isinstance(content, list) else []
        )

    def sentences(self, source: Mapping[str, Any]) -> list[str]:
        """The notes of a result or of data."""
        notes = source.get("notes")
        return [text(note) for note in notes if text(note)] if isinstance(notes, list) else []


def kind_of(folder: Path) -> Kind:
    """The kind of a run, decided by the files that are there.

    Raises:
        ValueError: it is no run; the message says why.
        OSError: the folder cannot be listed.
    """
    if not folder.is_dir():
        raise ValueError("it is a file, and a run is a folder")
    there = {path.name for path in folder.iterdir()}
    if there & {"run.json", "training.json", "metrics.jsonl"}:
        return "training"
    if "result.json" in there or ("config.json" in there and _of_a_claim(folder / "config.json")):
        return "claim"
    if not there:
        raise ValueError("it is empty")
    inside = sorted(name for name in there if (folder / name / "run.json").is_file())
    hint = f"; its folder {inside[0]} is a run" if inside else ""
    raise ValueError(f"it has neither run.json (a training) nor config.json (a claim){hint}")


def _of_a_claim(path: Path) -> bool:
    """Other programs write a ``config.json`` too; one that is broken may be a claim's."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return True
    return isinstance(content, dict) and "preset" in content


def read_run(folder: Path, kind: Kind) -> Run:
    """A run. A metrics file of any length is read in one pass."""
    run = Run(folder, kind)
    main = "run.json" if kind == "training" else "config.json"
    run.settings = _read(run, main, needed=kind == "training" or _absent(folder, "result.json"))
    run.result = _read(run, "result.json", needed=False)
    if not run.result and run.state == "finished":
        run.state = "stopped"
    if kind == "training":
        run.loop = _read(run, "training.json", needed=False)
        _read_metrics(run)
    for file, content in ((main, run.settings), ("result.json", run.result)):
        version = number(content.get("format"))
        if version is not None and version > FORMAT:
            run.problems.append(
                f"{file} has format {version:g}, this version of fluvial reads up to {FORMAT}."
            )
    return run


def _absent(folder: Path, name: str) -> bool:
    return not (folder / name).exists()


def _read(run: Run, name: str, *, needed: bool) -> dict[str, Any]:
    """A JSON object of a run; a file that is needed or broken makes the run damaged."""
    path = run.path / name
    try:
        if not path.exists():
            if needed:
                run.state = "damaged"
                run.problems.append(f"{name} is missing.")
            return {}
        if not path.is_file():
            raise ValueError("it is not a file")
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"it is larger than {LARGEST_JSON >> 20} MB")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
    except (OSError, ValueError, RecursionError) as error:
        run.state = "damaged"
        run.problems.append(f"{name} cannot be read: {reason(error)}.")
        return {}
    return content


def _read_metrics(run: Run) -> None:
    path = run.path / "metrics.jsonl"
    try:
        if not path.exists():
            run.problems.append("metrics.jsonl is missing: there are no curves.")
            return
        if not path.is_file():
            raise OSError("it is not a file")
        run.metrics = read_metrics(path)
    except OSError as error:
        run.problems.append(f"metrics.jsonl cannot be read: {reason(error)}.")
    run.problems += run.metrics.problems


def _last_checkpoint(folder: Path) -> float | None:
    steps = [step for step, _ in numbered(folder / "checkpoints", "pt")]
    return float(max(steps)) if steps else None


def numbered(folder: Path, suffix: str) -> list[tuple[int, Path]]:
    """The files ``step-00000500.SUFFIX`` of a folder with their steps, in order."""
    try:
        paths = list(folder.iterdir()) if folder.is_dir() else []
    except OSError:
        return []
    found = [(re.fullmatch(rf"step-(\d{{1,15}})\.{suffix}", p.name), p) for p in paths]
    return sorted((int(match[1]), path) for match, path in found if match)


def mapping(value: Any) -> dict[str, Any]:
    """``value`` if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def text(value: Any) -> str:
    """A string or number as text, "" for anything else."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else ""


def reason(error: Exception) -> str:
    """What went wrong, in a few words and without the path of this machine."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON (line {error.lineno})"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).split("\n")[0][:200]
