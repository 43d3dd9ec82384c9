"""``fluvial audit MODEL_OR_SAMPLES --train DATA --holdout DATA``: are training data copied?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fluvial.cli.console import only_errors, show, show_json
from fluvial.cli.flags import as_flags, parse

EXAMPLES = """\
fluvial audit runs/photos --train photos --holdout more-photos
fluvial audit samples.npz --train train.npz --holdout test.npz --out audit
fluvial audit samples.csv --train train.csv --holdout test.csv --level 0.05 --json"""


@dataclass(frozen=True)
class Audit:
    """Look for copies of training rows among the samples of a model, beside held-out real rows.

    Args:
        source: folder of a run or file of a model, which is sampled; or samples: a folder of
            images, an .npy or .npz file, or a table.
        train: the data it was trained on, without the rows of --holdout.
        holdout: real data of the same origin that it was not trained on.
        n: samples; by default 1,000 of a model, and all there are of samples.
        level: share of held-out rows that the threshold may call copies.
        features: in what images are compared.
        steps: network calls a sample, of a model; by default what the model takes.
        size: what images are brought to, if they differ; by default that of the model.
        label: column or array of labels to leave out.
        drop_duplicates: leave out held-out rows that are training rows too, which are an error.
        seed: of the samples and of the test.
        memory: MiB that a block of the search may take.
        out: folder for the audit as JSON and text, and a figure of the closest pairs.
        force: write into a folder that is not empty.
        json: print one JSON document in place of a table.
        quiet: no progress.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL_OR_SAMPLES")]
    train: Annotated[str, tyro.conf.arg(metavar="DATA")]
    holdout: Annotated[str, tyro.conf.arg(metavar="DATA")]
    n: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    level: float = 0.01
    features: Literal["pixels", "efficientnet-lite0"] = "pixels"
    steps: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    size: Annotated[int | None, tyro.conf.arg(help_behavior_hint="")] = None
    label: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    drop_duplicates: bool = False
    seed: int = 0
    memory: int = 256
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    force: bool = False
    json: bool = False
    quiet: bool = False


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    command = parse(Audit, argv, prog="fluvial audit", examples=EXAMPLES)
    try:
        with only_errors(command.json):
            audit = _audit(command)
    except (ValueError, OSError) as error:
        text = str(error).replace("pass duplicates='drop'", "--drop-duplicates")
        raise ValueError(as_flags(text.replace("or force it", "or --force"), Audit)) from error
    if command.json:
        show_json(audit.to_dict())
    else:
        show(str(audit))
        if command.out is not None:
            show(f"\nAudit and figure of the closest pairs: {command.out}")
    return 0


def _audit(command: Audit) -> Any:
    import torch

    import fluvial
    from fluvial.core.noise import KeyedNoise
    from fluvial.data import read
    from fluvial.metrics import EfficientNetLite
    from fluvial.training.files import new_folder
    from fluvial.trust.memorization_audit import NUM, audit_memorization

    if command.seed < 0:
        raise ValueError(f"seed must not be negative, got {command.seed}")
    if command.memory < 1:
        raise ValueError(f"memory must be at least 1 MiB, got {command.memory}")
    reading: dict[str, Any] = {"size": command.size, "label": command.label}
    path = Path(command.source)
    for place in (path, Path(command.train), Path(command.holdout)):
        if place.suffix.lower() in (".txt", ".jsonl"):
            raise ValueError(
                f"texts are not audited, got {place}; fluvial evaluate SAMPLES --against DATA "
                "counts those that stand in the data as they are"
            )
    model: Any = None
    if path.suffix == ".safetensors" or (path / "model.safetensors").is_file():
        model = fluvial.load(path)
        if model.format is not None and model.format.kind == "text":
            raise ValueError(
                f"texts are not audited, and {path} writes them; fluvial evaluate SAMPLES "
                "--against DATA counts those that stand in the data as they are"
            )
        if model.format is not None and model.format.kind == "images":
            channels, *sides = model.format.shape
            reading |= {"size": tuple(sides), "channels": channels}
    train, holdout = (
        read(source, progress=not command.quiet, **reading)
        for source in (command.train, command.holdout)
    )
    if command.features != "pixels" and train.format.kind != "images":
        raise ValueError(f"features {command.features!r} are of images, got {train.format.kind}")
    options: dict[str, Any] = {}
    parts = [train.x, holdout.x]
    if model is not None:
        options = {} if command.steps is None else {"steps": command.steps}
        classes = getattr(model.network, "num_classes", 0)
        if classes:
            options["label"] = torch.arange(command.n or NUM) % classes
    else:
        if command.steps is not None:
            raise ValueError("steps are those of a model, and these are samples")
        samples = read(command.source, progress=not command.quiet, **reading)
        if {data.format.columns for data in (train, holdout, samples)} != {train.format.columns}:
            raise ValueError("samples, train and holdout must have the same columns in one order")
        if {data.format.kind for data in (train, holdout, samples)} != {train.format.kind}:
            raise ValueError("samples, train and holdout must be of one kind, all images or none")
        model = samples.x
        if train.format.kind != "images":  # by the scales of the training data
            model, *parts = (train.format.encode(part) for part in (model, *parts))
    if command.out is not None:
        new_folder(command.out, force=command.force)  # before the work
    audit = audit_memorization(
        model,
        *parts,
        num=command.n,
        features=None if command.features == "pixels" else EfficientNetLite(),
        level=command.level,
        memory=command.memory << 20,
        noise=KeyedNoise(command.seed),
        duplicates="drop" if command.drop_duplicates else "refuse",
        progress=not command.quiet,
        **options,
    )
    if command.out is not None:
        audit.save(command.out, overwrite=True)
    return audit
