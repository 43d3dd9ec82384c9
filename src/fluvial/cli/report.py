"""``fluvial report RUNS``: a page about runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fluvial.cli.console import show
from fluvial.cli.flags import parse

EXAMPLES = """\
fluvial report runs/photos --out page
fluvial report runs/* --out runs-compared --force"""


@dataclass(frozen=True)
class Report:
    """Write one self-contained page about runs, finished or not: figures, curves, tables, cards.

    Args:
        runs: folders of trainings and of claims, shown in this order.
        out: folder for the page, index.html; new or empty.
        force: write into a folder that holds other files; only index.html is replaced.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    force: bool = False


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    command = parse(Report, argv, prog="fluvial report", examples=EXAMPLES)
    from fluvial.report import write_report_page

    show(str(write_report_page(command.runs, command.out, force=command.force)))
    return 0
