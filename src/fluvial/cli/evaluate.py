"""``fluvial evaluate SAMPLES --against DATA``: metrics of samples, each beside its floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from fluvial.cli.console import only_errors, show, show_json
from fluvial.cli.flags import as_flags, parse

EXAMPLES = """\
fluvial evaluate samples --against photos
fluvial evaluate samples.npz --against animals --metrics frechet coverage
fluvial evaluate samples.csv --against table.csv --json
fluvial evaluate samples.jsonl --against held-out.txt"""


@dataclass(frozen=True)
class Evaluate:
    """Measure samples against data, beside the floor: as many real rows in the samples' place.

    Args:
        samples: a folder of images, an .npy or .npz file, a table, or a .txt or .jsonl file of
            texts, as `fluvial sample` writes.
        against: real data, as --data of `fluvial train`; best rows that were not trained on.
        metrics: names: frechet, kid, mmd, energy, sliced, wasserstein, precision, recall, density,
            coverage, classifier; of texts bits, divergence, entropy, distinct; by default those
            that fit the data.
        features: in what images are compared; by default the principal components of pixels.
        rows: of each side at most; most metrics take time with its square.
        size: height and width that images are brought to, if they differ, or one number for both.
        channels: 1 for grey, 3 for colour, if samples and data differ.
        label: column or array of labels to leave out, of the two or of the one that has them.
        normalise: what is done to texts first: none, lower or letters, as in the training.
        seed: of the rows and of the resampling.
        json: print one JSON document in place of a table.
        quiet: no progress.
    """

    samples: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SAMPLES")]
    against: Annotated[str, tyro.conf.arg(metavar="DATA")]
    metrics: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")
    ] = ()
    features: Annotated[
        Literal["pixels", "efficientnet-lite0"] | None, tyro.conf.arg(help_behavior_hint="")
    ] = None
    rows: int = 1000
    size: Annotated[int | tuple[int, int] | None, tyro.conf.arg(help_behavior_hint="")] = None
    channels: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    label: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    normalise: Annotated[
        Literal["none", "lower", "letters"] | None, tyro.conf.arg(help_behavior_hint="")
    ] = None
    seed: int = 0
    json: bool = False
    quiet: bool = False


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    command = parse(Evaluate, argv, prog="fluvial evaluate", examples=EXAMPLES)
    from fluvial.metrics.evaluate import evaluate

    try:
        with only_errors(command.json):
            result = evaluate(
                command.samples,
                command.against,
                metrics=command.metrics or None,
                features=command.features,
                rows=command.rows,
                size=command.size,
                channels=command.channels,
                label=command.label,
                normalise=command.normalise,
                seed=command.seed,
                progress=not command.quiet,
            )
    except (ValueError, FileNotFoundError) as error:
        text = as_flags(str(error), Evaluate).replace("--samples", "SAMPLES")
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(text) from error
    if command.json:
        show_json(result.as_json())
    else:
        show(str(result))
    return 0
