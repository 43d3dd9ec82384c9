"""``fluvial run SYSTEM``: the claim of a system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import tyro

from fluvial import catalog
from fluvial.cli.console import note, only_errors, show, show_json
from fluvial.cli.flags import as_flags, options_of, parse, value_of, with_options

EXAMPLES = """\
fluvial run meanflow
fluvial run meanflow --preset record --out runs/meanflow-record"""


@dataclass(frozen=True)
class Run:
    """Run the claim of a system against its baseline, on real data; preset record also judges it.

    Args:
        system: a name from `fluvial list`.
        preset: smoke (seconds), laptop (minutes, indicative), record (seeds and a verdict) or full
            (the paper's scale). It sets the defaults of the claim's own flags.
        out: folder of the run; runs/SYSTEM-PRESET by default. An interrupted run goes on there.
        json: print the result as one JSON document in place of a table.
        force: delete a run that is in the folder.
        quiet: no progress.
    """

    system: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SYSTEM")]
    preset: Literal["smoke", "laptop", "record", "full"] = "laptop"
    out: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="")] = None
    json: bool = False
    force: bool = False
    quiet: bool = False


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    if not argv or argv[0].startswith("-"):
        parse(Run, argv, prog="fluvial run", examples=EXAMPLES)
    claim = _claim(argv[0])
    # the preset decides the defaults of the claim's own flags, so it is looked for first
    preset = value_of("--preset", argv)
    defaults = claim.PRESETS.get(preset or "laptop", claim.PRESETS["laptop"])
    flags = with_options(Run, claim.Config, defaults, {"claim": _first(claim.Config)})
    command: Any = parse(flags, argv, prog=f"fluvial run {argv[0]}", examples=EXAMPLES)
    out = command.out or Path("runs") / f"{command.system}-{command.preset}"
    try:
        config = options_of(command, claim.Config)
    except ValueError as error:
        raise ValueError(as_flags(str(error), claim.Config)) from error
    try:
        with only_errors(command.json):
            report = claim.run(
                config, command.preset, out, force=command.force, progress=not command.quiet
            )
    except KeyboardInterrupt:
        note("interrupted; the same command goes on from here")
        return 130
    if command.json:
        show_json(report.as_json())
    else:
        show(f"{report.as_text()}\n\nSamples, figure, card, table and model: {out}")
    return 0


def _first(options: Any) -> str:
    return next(iter(options.__dataclass_fields__))


def _claim(name: str) -> ModuleType:
    system = catalog.get(name)
    if system.claim is None:
        raise ValueError(f"{name} is planned, it has no claim to run yet")
    return import_module(system.claim)
