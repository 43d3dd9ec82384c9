"""Where the numbers of a run go: metrics.jsonl, and trackers by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fluvial.training.files import atomic


class MetricsFile:
    """metrics.jsonl, one object a line; lines past the checkpoint that is resumed are dropped."""

    def __init__(self, out: Path, names: Sequence[str], done: tuple[int, int]) -> None:
        path = out / "metrics.jsonl"
        with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as kept:
            if done > (0, 0) and path.exists():
                with path.open(encoding="utf-8", errors="replace") as lines:
                    for line in lines:
                        try:
                            values = json.loads(line)
                            at = (names.index(values.get("stage", names[0])), values["step"])
                        except (ValueError, KeyError):
                            break  # the line that a crash cut short
                        if at <= done:
                            kept.write(line)
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def checked_trackers(trackers: Sequence[str]) -> list[str]:
    """The names of trackers, each known and installed."""
    if not trackers:
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    installed = [str(tracker) for tracker in get_available_trackers()]
    for name in trackers:
        if name not in LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            raise ValueError(f"trackers: there is no tracker {name!r}; known are {known}")
        if name not in installed:
            raise ModuleNotFoundError(f"the tracker {name} is not installed: pip install {name}")
    return list(trackers)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists of mappings as one, with names joined by dots."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            for part in value:
                result |= flat(part, f"{prefix}{part.get('name', name)}.")
        else:
            result[f"{prefix}{name}"] = value
    return result


def plain(value: Any) -> Any:
    """What every tracker takes as a hyper-parameter."""
    return value if isinstance(value, int | float | str | bool) else json.dumps(value, default=str)
