"""The command line: ``fluvial list`` and ``fluvial run SYSTEM``."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import tyro

import fluvial
from fluvial import catalog


@dataclass(frozen=True)
class List:
    """List the systems.

    Args:
        json: print JSON instead of a table.
    """

    json: bool = False


@dataclass(frozen=True)
class Run:
    """Run the claim of a system.

    Args:
        system: a name from `fluvial list`.
        preset: smoke (seconds), laptop (minutes, indicative), record (seeds and a verdict) or full
            (the paper's scale).
        out: folder of the run; runs/SYSTEM-PRESET by default. An interrupted run goes on there.
        json: print the result as JSON instead of a table.
        force: delete a run that is in the folder.
        quiet: no progress.
    """

    system: tyro.conf.Positional[str]
    preset: Literal["smoke", "laptop", "record", "full"] = "laptop"
    out: Path | None = None
    json: bool = False
    force: bool = False
    quiet: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 0, 2 for a bad request, 130 for Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv == ["--version"]:
            print(fluvial.__version__)
            return 0
        if argv[:1] == ["run"]:
            return _run(argv[1:])
        command = tyro.extras.subcommand_cli_from_dict(
            {"list": List, "run": Run}, prog="fluvial", args=argv, description=_about()
        )
        return _list(command)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `fluvial list | head`
        sys.stdout = None
        return 0
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"fluvial: {error}", file=sys.stderr)
        return 2


def _about() -> str:
    return "Generative modelling by transport: many methods on one core."


def _list(command: List) -> int:
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
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return 0
    widths = [max(len(row[key]) for row in rows) for key in ("name", "wing", "status")]
    for row in rows:
        cells = [
            row[key].ljust(w) for key, w in zip(("name", "wing", "status"), widths, strict=True)
        ]
        print("  ".join([*cells, row["purpose"]]))
    return 0


def _claim(name: str) -> ModuleType:
    system = catalog.get(name)
    if system.claim is None:
        raise ValueError(f"{name} is planned, it has no claim to run yet")
    return importlib.import_module(system.claim)


def _run(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        tyro.cli(Run, args=["--help"], prog="fluvial run")
    claim = _claim(argv[0])
    # the preset decides the defaults of the claim's own flags, so it is looked for first
    chosen = [b for a, b in zip(argv, argv[1:], strict=False) if a == "--preset"]
    chosen += [arg.removeprefix("--preset=") for arg in argv if arg.startswith("--preset=")]
    defaults = claim.PRESETS.get(chosen[-1] if chosen else "laptop", claim.PRESETS["laptop"])
    flags = make_dataclass(
        "Flags",
        [("config", Annotated[claim.Config, tyro.conf.OmitArgPrefixes], defaults)],
        bases=(Run,),
        frozen=True,
    )
    flags.__doc__ = Run.__doc__
    command: Any = tyro.cli(flags, args=argv, prog="fluvial run")
    out = command.out or Path("runs") / f"{command.system}-{command.preset}"
    report = claim.run(
        command.config, command.preset, out, force=command.force, progress=not command.quiet
    )
    if command.json:
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        print(f"{report.as_text()}\n\nSamples, figure, card, table and model: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
