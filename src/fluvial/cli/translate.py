"""``fluvial translate RUN INPUT``: rows of one data set taken to the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fluvial.cli.console import duration, note, only_errors, show, show_json
from fluvial.cli.flags import as_flags, parse
from fluvial.cli.train import _device

EXAMPLES = """\
fluvial translate runs/paintings photos --out as-paintings
fluvial translate runs/paintings paintings --reverse --out as-photos.png
fluvial translate runs/batches patients.csv --out corrected.csv --seed 1"""


@dataclass(frozen=True)
class Translate:
    """Take data to the other side of a model that was trained on two data sets.

    Row i of the result is what became of row i of the input: of a folder, the images in the order
    of their paths. It depends on the seed and on i, as the process that joins the sets is random.

    Args:
        run: folder of a run, or the file of a model.
        input: data like those the model was trained on as --data: a folder of images, an .npy or
            .npz file, or a table.
        out: where to write: for images .png (one picture), a name without suffix (a folder with
            one PNG an image), .npz or .npy; for tables .csv or .parquet; for arrays .npz or .npy.
        reverse: the input is like the --target of the training, and is taken back.
        steps: of the simulation; by default those of the training.
        last_noise: where the simulation ends. on keeps the noise of its last step, as in training,
            which fits tables; off takes the prediction without it, which fits images; auto takes
            what fits.
        label: column or array of the input to leave out.
        seed: of the noise.
        batch_size: rows at a time.
        device: where to compute; auto takes the first there is of cuda, mps and cpu.
        force: replace what is there: a file, or those files of a folder that have the same names.
        json: print where the result is as one JSON document in place of text.
        quiet: no progress.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    input: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="INPUT")]
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    reverse: bool = False
    steps: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    last_noise: Literal["auto", "on", "off"] = "auto"
    label: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    seed: int = 0
    batch_size: int = 256
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    force: bool = False
    json: bool = False
    quiet: bool = False


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    command = parse(Translate, argv, prog="fluvial translate", examples=EXAMPLES)
    try:
        with only_errors(command.json):
            document = _translate(command)
    except (ValueError, OSError) as error:
        text = str(error).replace("or force it", "or --force")
        raise ValueError(as_flags(text, Translate)) from error
    if command.json:
        show_json(document)
    else:
        rows = f"{document['rows']:,} row{'s' * (document['rows'] != 1)}"
        show(f"{rows} in {duration(document['seconds'])}: {command.out}")
    return 0


def _translate(command: Translate) -> dict[str, Any]:
    import fluvial
    from fluvial.core.gaussian.sde import EulerMaruyama
    from fluvial.core.noise import KeyedNoise
    from fluvial.core.simulate import Ancestral
    from fluvial.data.write import check_output, write_samples
    from fluvial.models import system_of

    for name in ("steps", "batch_size"):
        value = getattr(command, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if command.seed < 0:
        raise ValueError(f"seed must not be negative, got {command.seed}")
    device = _device(command.device)
    if not system_of(command.run).joins:
        raise ValueError(
            f"{command.run} does not join two data sets; fluvial sample {command.run} "
            f"--out {command.out} draws what it has learnt"
        )
    model = fluvial.load(command.run)
    if model.format is None:
        raise ValueError(
            f"{command.run} was fitted on tensors, and does not say what a file is to be read as; "
            "its translate takes tensors"
        )
    check_output(command.out, model.format, force=command.force)
    data = _read(command, model.format)
    begin = time.perf_counter()
    moved = model.to(device).translate(
        data.x,
        "forward" if command.reverse else "backward",
        noise=KeyedNoise(command.seed),
        steps=command.steps,
        sampler={"auto": None, "on": EulerMaruyama(), "off": Ancestral()}[command.last_noise],
        batch_size=command.batch_size,
        progress=not command.quiet,
    )
    write_samples(command.out, moved.cpu(), None, model.format, force=command.force)
    return {
        "out": str(command.out),
        "rows": len(moved),
        "shape": list(model.format.shape),
        "reverse": command.reverse,
        "last_noise": command.last_noise,
        "seed": command.seed,
        "steps": command.steps or model.steps,
        "seconds": time.perf_counter() - begin,
    }


def _read(command: Translate, format: Any) -> Any:
    """The input, which has to be like the data of the training."""
    from fluvial.data import read

    sized: dict[str, Any] = {}
    if format.kind == "images":
        channels, *size = format.shape
        sized = {"size": tuple(size), "channels": channels, "resize": format.resize}
    data = read(command.input, label=command.label, progress=not command.quiet, **sized)
    for name in ("kind", "shape", "columns"):
        found, wanted = getattr(data.format, name), getattr(format, name)
        if found != wanted:
            raise ValueError(
                f"INPUT: {data.name} has {name} {found}, the model was trained on {wanted}"
            )
    for line in data.notes:
        note(line)
    return data
