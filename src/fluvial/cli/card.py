"""``fluvial card RUN``: the model card of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fluvial.cli.console import show
from fluvial.cli.flags import parse

EXAMPLES = "fluvial card runs/photos"


@dataclass(frozen=True)
class Card:
    """Write the model card of a training anew, RUN/README.md, from what is in the run's folder.

    What was written below the card's last line stays, and so do keys added to its front matter.

    Args:
        run: folder of the training.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    command = parse(Card, argv, prog="fluvial card", examples=EXAMPLES)
    from fluvial.models import write_card

    show(str(write_card(command.run)))
    return 0
