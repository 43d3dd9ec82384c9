"""``fluvial list``: the systems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluvial import catalog
from fluvial.cli.console import show, show_json
from fluvial.cli.flags import parse

EXAMPLES = """\
fluvial list
fluvial list --json"""


@dataclass(frozen=True)
class List:
    """List the systems: name, wing, whether it is available yet, and what it is for.

    Args:
        json: print one JSON document in place of a table.
    """

    json: bool = False


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    command = parse(List, argv, prog="fluvial list", examples=EXAMPLES)
    rows = [
        {
            "name": system.name,
            "wing": system.wing,
            "status": system.status,
            "purpose": system.purpose,
        }
        for system in catalog.SYSTEMS
    ]
    if command.json:
        show_json(rows)
        return 0
    columns = ("name", "wing", "status")
    widths = [max(len(row[key]) for row in rows) for key in columns]
    for row in rows:
        cells = [row[key].ljust(width) for key, width in zip(columns, widths, strict=True)]
        show("  ".join([*cells, row["purpose"]]))
    return 0
