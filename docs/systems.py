"""Pages written when the documentation is built: one a system, and the table of all systems.

A system's page is its class's docstring and the result its claim recorded, a JSON file beside the
claim. Nothing here knows any system: tables are made from the keys they come with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fluvial
from fluvial import catalog
from fluvial.catalog import System

RESULTS = Path(fluvial.__file__).parent / "claims" / "results"
FIGURES = Path(__file__).parent / "figures"

MEANING = {
    "holds": "The claim holds.",
    "fails": "The claim fails.",
    "undecided": "The runs do not decide the claim.",
}


def number(value: Any) -> str:
    """A value of a JSON file as the text of a table's cell."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {number(item)}" for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(number(item) for item in value)
    text = str(value)
    for mark in "\\`*_<>[]$|":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table whose columns are their keys, in the order in which they come."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    numeric = [
        all(isinstance(row.get(column), (int, float, type(None))) for row in rows)
        for column in columns
    ]
    lines = [
        [number(column.replace("_", " ")) for column in columns],
        ["---:" if right else "---" for right in numeric],
        *([number(row[column]) if column in row else "" for column in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def result(record: Mapping[str, Any]) -> str:
    """A recorded result as Markdown."""
    parts = [f"**{MEANING.get(record['verdict'], record['verdict'])}**"]
    if record.get("claim"):
        parts.append(f"What was claimed: {number(record['claim'])}")
    if record.get("rule"):
        parts.append(f"The rule, fixed before the run: {number(record['rule'])}")
    if record.get("comparisons"):
        parts += ["### Comparisons", table(record["comparisons"])]
    if record.get("table"):
        parts += ["### Measurements", table(record["table"])]
    if record.get("notes"):
        parts += ["### Notes", "\n".join(f"- {number(note)}" for note in record["notes"])]
    facts = [key for key in ("preset", "date", "seconds", "versions") if key in record]
    parts += ["### The run", "\n".join(f"- {key}: {number(record[key])}" for key in facts)]
    if record.get("config"):
        config = json.dumps(record["config"], indent=2, ensure_ascii=False)
        parts += [f"```json\n{config}\n```"]
    return "\n\n".join(parts)


def read_result(system: System) -> Mapping[str, Any] | None:
    """The recorded result of a system, ``None`` if there is none.

    Raises:
        ValueError: the file is not that of a result of this system.
    """
    path = RESULTS / f"{system.name}.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("system") != system.name:
        raise ValueError(f"{path.name}: expected an object whose 'system' is {system.name!r}")
    if "verdict" not in record:
        raise ValueError(f"{path.name}: has no 'verdict'")
    return record


def exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def page(system: System) -> str:
    """The page of an available system."""
    assert system.cls is not None
    figure = FIGURES / f"{system.name}.png"
    record = read_result(system)
    parts = [f"# {system.name}", f"{system.purpose[0].upper()}{system.purpose[1:]}."]
    parts.append(f"Paper: {system.citation_markdown}.")
    if figure.exists():
        parts.append(f"![The figure of {system.name}'s claim](../../figures/{figure.name})")
    parts.append("## The class")
    if exists(system.cls.rpartition(".")[0]):
        parts.append(f"```{{eval-rst}}\n.. autoclass:: {system.cls}\n   :no-index:\n```")
    else:
        parts.append("Not in this version.")
    parts += ["## The claim", f"Run it: `fluvial run {system.name}`."]
    parts.append("Not recorded yet." if record is None else result(record))
    return "\n\n".join(parts) + "\n"


def put(path: Path, text: str) -> None:
    """Write a file unless it holds this text already, so that Sphinx reads only what changed."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def write(folder: Path) -> None:
    """Write the pages of all available systems and the table of all systems into ``folder``."""
    for system in catalog.available():
        put(folder / "systems" / f"{system.name}.md", page(system))
    linked = catalog.markdown_table()
    for system in catalog.available():
        linked = linked.replace(
            f"| `{system.name}` |", f"| [`{system.name}`](generated/systems/{system.name}.md) |"
        )
    put(folder / "table.md", linked + "\n")
