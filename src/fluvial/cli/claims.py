"""``fluvial claims``: the verdicts that were recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluvial.cli.console import show, show_json
from fluvial.cli.flags import parse

EXAMPLES = """\
fluvial claims
fluvial claims --json"""


@dataclass(frozen=True)
class Claims:
    """List the claims of the available systems: what was claimed, and what a recorded run found.

    Args:
        json: print one JSON document in place of text.
    """

    json: bool = False


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    command = parse(Claims, argv, prog="fluvial claims", examples=EXAMPLES)
    from fluvial.claims.recorded import claims_text, recorded_claims

    claims = recorded_claims()
    if command.json:
        show_json([claim.as_json() for claim in claims])
    else:
        show(claims_text(claims))
    return 0
