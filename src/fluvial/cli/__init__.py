"""The command line: ``fluvial COMMAND``, a module a command."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import fluvial
from fluvial.cli.console import complain, note

COMMANDS = {
    "train": "train a system on your own data, or go on with a training",
    "sample": "draw samples from a trained model",
    "translate": "take data to the other side of a model that joins two data sets",
    "restore": "restore an image, with a mask of the pixels to trust",
    "evaluate": "measure samples against data, beside the floor of real rows",
    "audit": "look for copies of training data among the samples of a model",
    "report": "one page about any number of runs, to read in a browser",
    "card": "write the model card of a run anew",
    "list": "the systems, and which are available",
    "claims": "the claims that were judged, and their verdicts",
    "run": "run a system's claim against its baseline",
}
"""The commands, and what each does."""

EXAMPLES = """\
examples:
  fluvial train meanflow --data photos --size 64 --out runs/photos
  fluvial sample runs/photos --n 64 --out samples.png
  fluvial report runs/photos --out page

`fluvial COMMAND --help` describes a command with all its flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Returns:
        The exit status: 0; 1 for an error that is a fault of fluvial, after its traceback; 2 for
        what can be put right by the user, said in one line; 130 for Ctrl-C and 143 for SIGTERM.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return _run(argv)
        except SystemExit as stop:  # after --help, and from a training that was stopped
            return stop.code if isinstance(stop.code, int) else 0
        except KeyboardInterrupt:
            note("interrupted")
            return 130
        except BrokenPipeError:  # `fluvial list | head`
            sys.stdout = None
            return 0
        except (ValueError, TypeError, OSError, ModuleNotFoundError, FloatingPointError) as error:
            complain(error)
            return 2
        except RuntimeError as error:
            if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
                raise
            complain(
                "the memory does not suffice: compute a batch in --accumulation parts, or smaller"
            )
            return 2


def _run(argv: list[str]) -> int:
    if argv in ([], ["-h"], ["--help"], ["help"]):
        print(_help())
        return 0
    if argv == ["--version"]:
        print(fluvial.__version__)
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise ValueError(f"there is no command {name!r}; {hint}")
    module = "systems" if name == "list" else name  # a module `list` would hide Python's own
    status: int = import_module(f"fluvial.cli.{module}").main(rest)
    return status


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fluvial COMMAND ...",
            "",
            "Generative modelling by transport: many methods on one core.",
            "",
            "commands:",
            *lines,
            "",
            EXAMPLES,
        ]
    )


def _show_warning(message: Any, *args: Any, **kwargs: Any) -> None:
    note(f"warning: {message}")


__all__ = ["COMMANDS", "main"]
