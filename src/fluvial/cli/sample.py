"""``fluvial sample RUN``: samples of a trained model."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fluvial.cli.console import duration, first, only_errors, several, show, show_json
from fluvial.cli.flags import as_flags, parse
from fluvial.cli.train import _device

if TYPE_CHECKING:
    from torch import Tensor

EXAMPLES = """\
fluvial sample runs/photos --n 64 --out samples.png
fluvial sample runs/photos --n 1000 --label cat dog --out samples
fluvial sample runs/table --n 500 --seed 1 --out samples.csv
fluvial sample runs/photos --n 10000 --weights best --out samples.npz
fluvial sample runs/text --n 16 --prompt "Dear Sir" --temperature 0.8 --out samples.txt
torchrun --nproc-per-node 2 -m -- fluvial.cli sample runs/photos --n 50000 --out samples"""


@dataclass(frozen=True)
class Sample:
    """Draw samples from a trained model, in the units of the data it was trained on.

    Sample i depends on the seed, on i and on its label, and neither on --n nor on --batch-size, but
    for the last bits of the arithmetic.

    Args:
        run: folder of a run, or the file of a model.
        n: how many.
        out: where to write them. Images: .png (one picture), a name without suffix (a folder with
            one PNG an image, in folders by class if there are several), .npz or .npy. Tables: .csv
            or .parquet. Text: .txt (to read) or .jsonl (to work with). Arrays: .npz or .npy.
        steps: network calls a sample; by default what the model is made for. A MeanFlow is made
            for one; two may be better.
        temperature: of texts: below 1 tokens are more likely ones and texts more alike, 0 takes the
            likeliest; 1 by default.
        top_p: of texts: tokens are drawn from the likeliest that have this probability together; 1,
            all of them, by default.
        prompt: what every text begins with.
        ending: what every text ends with; between a prompt and an ending the gap is filled.
        label: names of classes, taken in turn; by default all of them, for a model with labels.
        seed: of the draw.
        weights: weights of the run: those it chose, last, best (on the held-out rows, at any step),
            or an average, as ema-0.999.
        columns: images in a row of a picture; as many as there are rows by default.
        batch_size: samples at a time.
        device: where to compute; auto takes the first there is of cuda, mps and cpu.
        force: replace what is there: a file, or those files of a folder that have the same names.
        json: print where the samples are as one JSON document in place of text.
        quiet: no progress.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    n: int = 64
    steps: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    temperature: Annotated[float | None, tyro.conf.arg(help_behavior_hint="")] = None
    top_p: Annotated[float | None, tyro.conf.arg(help_behavior_hint="")] = None
    prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    ending: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    label: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")] = ()
    seed: int = 0
    weights: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    columns: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    batch_size: int = 256
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    force: bool = False
    json: bool = False
    quiet: bool = False


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    command = parse(Sample, argv, prog="fluvial sample", examples=EXAMPLES)
    try:
        with only_errors(command.json):
            document = _sample(command)
    except (ValueError, OSError) as error:
        text = str(error).replace("or force it", "or --force")
        raise ValueError(as_flags(text, Sample)) from error
    if command.json:
        show_json(document)
    else:
        what = f"{command.n:,} sample{'s' * (command.n != 1)}"
        show(f"{what} in {duration(document['seconds'])}: {command.out}")
    return 0


def _sample(command: Sample) -> dict[str, Any]:
    import torch

    import fluvial
    from fluvial.data import Format
    from fluvial.data.write import check_output, write_samples
    from fluvial.models import system_of
    from fluvial.training.processes import shared

    for name in ("n", "steps", "columns", "batch_size"):
        value = getattr(command, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if command.seed < 0:
        raise ValueError(f"seed must not be negative, got {command.seed}")
    if command.temperature is not None and not 0 <= command.temperature < math.inf:
        raise ValueError(f"temperature must be at least 0 and finite, got {command.temperature}")
    if command.top_p is not None and not 0 < command.top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {command.top_p}")
    device = _device(command.device)
    system = system_of(command.run)
    if system.joins:
        raise ValueError(
            f"{command.run} joins two data sets and makes nothing of noise; fluvial translate "
            f"{command.run} INPUT --out {command.out} takes rows of one to the other"
        )
    if system.fills:
        raise ValueError(
            f"{command.run} fills the gaps of tables and makes no rows of its own; in Python, "
            "fluvial.load(RUN).transform(rows) fills others"
        )
    model = fluvial.load(command.run, weights=command.weights)
    if not hasattr(model, "format"):
        raise ValueError(
            f"{command.run} holds a {type(model).__name__}, whose samples need more than a number; "
            "in Python, fluvial.load(RUN).sample(...) makes them"
        )
    format = model.format
    if format is None:  # fitted on tensors, of which no more is known
        if model.shape is None:
            raise ValueError(f"{command.run} does not say the shape of its samples")
        format = Format("arrays", model.shape)
    if first():
        check_output(command.out, format, force=command.force)
    takes, kind = signature(model.sample).parameters, type(model).__name__
    if command.label and "label" not in takes:
        raise ValueError(f"label: the {kind} in {command.run} takes no labels")
    if command.steps is not None and "steps" not in takes:
        raise ValueError(f"steps: the {kind} in {command.run} has a number of steps of its own")
    for name in ("temperature", "top_p", "prompt", "ending"):
        needs = "known" if name in ("prompt", "ending") else name
        if getattr(command, name) is not None and (needs not in takes or format.kind != "text"):
            raise ValueError(f"{name}: the {kind} in {command.run} makes no text")
    options = {
        name: value
        for name in ("steps", "temperature", "top_p")
        if (value := getattr(command, name)) is not None
    }
    options |= _known(command, format)
    names = command.label or (format.label_names if _labelled(model) else ())
    classes = torch.tensor([format.label(name) for name in names], dtype=torch.int64)
    label = classes[torch.arange(command.n) % len(classes)] if len(classes) else None
    if several():
        from accelerate import PartialState

        device = PartialState().device
    begin = time.perf_counter()
    samples = _draw(model.to(device), format, label, command, options)
    seconds = time.perf_counter() - begin
    shared(
        lambda: write_samples(
            command.out,
            samples,
            label,
            format,
            columns=command.columns,
            label_column=_label_column(command.run),
            force=command.force,
        )
    )
    counts = {name: int((label == format.label(name)).sum()) for name in names} if names else None
    return {
        "out": str(command.out),
        "n": command.n,
        "shape": list(format.shape),
        "labels": counts,
        "seed": command.seed,
        "steps": command.steps,
        "seconds": seconds,
    }


def _labelled(model: Any) -> bool:
    return bool(getattr(getattr(model, "network", None), "num_classes", 0))


def _known(command: Sample, format: Any) -> dict[str, Tensor]:
    """Tokens that every text has, as `CaDDi.sample` takes them."""
    import torch

    if command.prompt is None and command.ending is None:
        return {}
    (length,) = format.shape
    known = torch.zeros(length, dtype=torch.int64)
    keep = torch.zeros(length, dtype=torch.bool)
    for name, text in (("prompt", command.prompt), ("ending", command.ending)):
        try:
            tokens = torch.from_numpy(format.tokenizer.encode(text or ""))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if len(tokens) + int(keep.sum()) > length:
            room = length - int(keep.sum())
            raise ValueError(f"{name}: it has {len(tokens)} tokens, and there is room for {room}")
        where = slice(len(tokens)) if name == "prompt" else slice(length - len(tokens), length)
        known[where], keep[where] = tokens, True
    return {"known": known, "keep_known": keep}


def _draw(
    model: Any, format: Any, label: Tensor | None, command: Sample, options: dict[str, Any]
) -> Tensor:
    """The samples in the units of the data, on the CPU, batch after batch."""
    import torch
    from tqdm import tqdm

    from fluvial.core.noise import KeyedNoise
    from fluvial.training.processes import process, sample_across

    noise = KeyedNoise(command.seed)
    size = command.batch_size * process()[1]
    parts = []
    with tqdm(
        total=command.n, desc="sampling", unit="sample", disable=command.quiet or not first()
    ) as bar:
        for start in range(0, command.n, size):
            num = min(size, command.n - start)

            def draw(rows: Tensor, start: int = start) -> Tensor:
                rows = rows + start
                part: dict[str, Any] = {} if label is None else {"label": label[rows]}
                if "known" in options:
                    part["known"] = options["known"].expand(len(rows), -1)
                return model.sample(
                    len(rows),
                    noise=noise.rows(rows),
                    batch_size=command.batch_size,
                    **{**options, **part},
                )

            samples = sample_across(draw, num)
            if samples.is_floating_point() or format.kind == "text":  # else tokens without texts
                samples = format.decode(samples)
            parts.append(samples.cpu())
            bar.update(num)
    return torch.cat(parts)


def _label_column(run: Path) -> str:
    """The column of the labels in the table that a run was trained on."""
    from fluvial.training.run import read_settings

    try:
        return str(read_settings(run)["recipe"].get("label") or "label")
    except (OSError, ValueError):
        return "label"
