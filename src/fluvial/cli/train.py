"""``fluvial train SYSTEM``: a training on the user's data, new or gone on with."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fluvial import catalog
from fluvial.cli.console import duration, first, note, only_errors, several, show, show_json
from fluvial.cli.flags import as_flags, options_of, parse, value_of, with_options

EXAMPLES = """\
fluvial train meanflow --data photos --size 64
fluvial train meanflow --data table.csv --label species --out runs/table
fluvial train meanflow --data animals --steps 5000 --ema 0.999 0.9999 --trackers tensorboard
fluvial train schrodinger-bridge-imf --data photos --target paintings --size 64
fluvial train miri-imputation --data holes.csv --out runs/filled
fluvial train caddi-discrete-diffusion --data corpus.txt --out runs/text
fluvial train --resume runs/meanflow-1
torchrun --nproc-per-node 2 -m fluvial.cli train meanflow --data photos --size 64"""

FREE = ("checkpoint_every", "keep")
"""Hyper-parameters that may change when a training goes on: its result does not depend on them."""


@dataclass(frozen=True)
class Train:
    """Train a system on your own data, into a folder of its own.

    Images, arrays, tables and text are read, a part of them is held out, and a network of a fitting
    kind is trained. Stopped by Ctrl-C or a crash, a training goes on with --resume and ends with
    the same weights. Every hyper-parameter of a system is a flag: `fluvial train SYSTEM --help`.

    Args:
        system: a name from `fluvial list`; not needed with --resume.
        data: what to train on: a folder of images, in class folders or not; an .npy or .npz file;
            a table, .csv, .tsv or .parquet; hf:OWNER/NAME of Hugging Face; animals or digits; for a
            system of language a .txt file, a folder of them, or a .jsonl, .csv or .parquet file.
        target: what to translate the data to, in the same forms, for a system that joins two sets.
        out: folder of the run, new or empty; the next free runs/SYSTEM-N by default.
        resume: folder of a run to go on with. It knows its data and hyper-parameters; of those
            checkpoint-every, keep and, where the schedule is constant and one data set is learnt,
            steps may change.
        trackers: also log to these, as `accelerate` names them: tensorboard, wandb, ...
        device: where to train; auto takes the first there is of cuda, mps and cpu, and goes on
            where a run began.
        json: print the result as one JSON document in place of text.
        quiet: no progress.
    """

    system: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SYSTEM")]
    data: Annotated[
        str | None, tyro.conf.arg(metavar="SOURCE", help_behavior_hint="(required)")
    ] = None
    target: Annotated[str | None, tyro.conf.arg(metavar="SOURCE", help_behavior_hint="")] = None
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    trackers: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")
    ] = ()
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    json: bool = False
    quiet: bool = False


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    argv = list(argv)
    typed = shlex.join(["fluvial", "train", *argv])
    folder = value_of("--resume", argv)
    settings = None
    if folder is not None:
        from fluvial.training.run import read_settings

        settings = read_settings(Path(folder))
    system = _system(argv, settings)
    if system is None:
        parse(Train, argv, prog="fluvial train", examples=EXAMPLES)
        raise AssertionError("without a system there is only help, or a mistake")
    kind = system.load_recipe()
    default = kind()
    if settings is not None:
        from fluvial.training.recipe import from_json

        default = from_json(kind, settings["recipe"])
    flags = with_options(Train, kind, default, kind.GROUPS)
    command: Any = parse(flags, argv, prog=f"fluvial train {system.name}", examples=EXAMPLES)
    try:
        recipe = options_of(command, kind)
        with only_errors(command.json):
            if settings is None:
                end = _train(command, recipe, typed)
            else:
                end = _resume(command, default, recipe, settings)
    except (ValueError, OSError) as error:
        text = str(error).replace("train with resume=False", "begin another run")
        raise ValueError(as_flags(text, Train, kind)) from error
    if command.json and end.result is not None:
        show_json({"run": str(end.out), **end.result})
    elif end.text:
        show(end.text)
    return end.status


@dataclass(frozen=True)
class _End:
    """How a command ended: what it printed depends on --json."""

    status: int
    out: Path
    result: dict[str, Any] | None = None
    text: str = ""


def _system(argv: list[str], settings: dict[str, Any] | None) -> catalog.System | None:
    """The system that is named in ``argv``, put there if the run to go on with names it."""
    named = next((arg for arg in argv if arg in {s.name for s in catalog.SYSTEMS}), None)
    if named is None and argv and not argv[0].startswith("-"):
        named = argv[0]  # which the catalog will say more about
    if settings is not None:
        if named is None:
            argv.insert(0, settings["system"])
        elif named != settings["system"]:
            raise ValueError(f"the run is of {settings['system']}, not of {named}")
        named = settings["system"]
    if named is None:
        return None
    system = catalog.get(named)
    if system.recipe is None:
        able = ", ".join(s.name for s in catalog.SYSTEMS if s.recipe)
        why = "is planned" if system.planned else "does not train on data of your own"
        raise ValueError(f"{named} {why}; there is {able}")
    return system


def _train(command: Any, recipe: Any, typed: str) -> _End:
    """A new training."""
    from fluvial.training.log import checked_trackers
    from fluvial.training.loop import LOCK
    from fluvial.training.run import begin, check_new

    if command.data is None:
        raise ValueError("--data is missing: what to train on; see fluvial train --help")
    sources = [command.data]
    if _joins(command.system):
        if command.target is None:
            raise ValueError("--target is missing: what to translate the data to")
        sources.append(command.target)
    elif command.target is not None:
        raise ValueError(f"--target is for systems that join two data sets, not {command.system}")
    # mistakes are found before the data are read, which may take long
    device = _device(command.device)
    checked_trackers(command.trackers)
    if command.out is not None and first():
        check_new(command.out)
    job = recipe.prepare(*sources, progress=not command.quiet and first())
    out = begin(
        job,
        command.out,
        source=_place(command.data),
        target=command.target and _place(command.target),
        command=typed,
        device=device,
        trackers=command.trackers,
    )
    try:
        return _fit(job, out, device, command.trackers, quiet=command.quiet)
    except ValueError:  # what the loop finds before the first step
        if first() and not (out / "training.json").exists():
            for name in ("run.json", LOCK):
                (out / name).unlink(missing_ok=True)
            with suppress(OSError):
                out.rmdir()
        raise


def _resume(command: Any, before: Any, recipe: Any, settings: dict[str, Any]) -> _End:
    """A training that goes on."""
    from fluvial.training.run import go_on, last_checkpoint, read_result

    out = command.resume
    if command.out not in (None, out):
        raise ValueError("--out and --resume name two folders; --resume alone goes on in its own")
    joins = _joins(settings["system"])
    sources = [settings["source"], *([settings["target"]] if joins else [])]
    for flag, given, was in zip(
        ("--data", "--target"), (command.data, command.target), [*sources, None], strict=False
    ):
        if given is not None and _place(given) != was:
            raise ValueError(f"{flag} was {was}; leave it out, or begin another run")
    _check_changes(before, recipe, joins=joins)
    done = last_checkpoint(out)
    if done is not None and recipe.steps < done[0]:
        raise ValueError(f"--steps {recipe.steps}: the training is at step {done[0]} already")
    result = read_result(out)
    if result is not None and done is None:
        raise ValueError(
            f"{out} is finished and its checkpoints are gone: there is nothing to go on from; "
            "begin another run"
        )
    if result is not None and recipe.steps <= result["steps"]:
        return _End(0, out, result, _finished(recipe, settings, out))
    device = _device(settings["device"] if command.device == "auto" else command.device)
    job = recipe.prepare(*sources, progress=not command.quiet and first())
    go_on(job, out)
    trackers = command.trackers or settings["trackers"]
    return _fit(job, out, device, trackers, quiet=command.quiet)


def _check_changes(before: Any, now: Any, *, joins: bool) -> None:
    longer = before.schedule == "constant" and not joins
    free = {*FREE, *(["steps"] if longer else [])}
    names = [field.name for field in fields(before)]
    changed = [name for name in names if getattr(before, name) != getattr(now, name)]
    refused = [
        f"--{name.replace('_', '-')} was {getattr(before, name)} and is {getattr(now, name)}"
        for name in changed
        if name not in free
    ]
    if refused:
        why = ""
        if "steps" in changed and joins:
            why = " (its half-iterations share the steps out)"
        elif "steps" in changed and "steps" not in free:
            why = f" (the {before.schedule} schedule of its learning rate ends with its steps)"
        raise ValueError(
            f"a training goes on as it began{why}, but {', '.join(refused)}; leave that out, or "
            "begin another run"
        )


def _finished(recipe: Any, settings: dict[str, Any], out: Path) -> str:
    joins = _joins(settings["system"])
    longer = f"fluvial train --resume {_quoted(out)} --steps {2 * recipe.steps}"
    if joins:
        longer = "begin another run; the half-iterations of this one have shared its steps out"
    elif recipe.schedule != "constant":
        longer = "begin another run; the learning rate of this one has fallen to its end"
    return "\n".join(
        [
            f"{out} is finished, after {recipe.steps:,} steps.",
            f"{'to translate:   ' if joins else 'to sample:      '} "
            f"{_using(out, settings['system'], settings['data']['format']['kind'])}",
            f"to train longer: {longer}",
        ]
    )


def _device(name: str) -> str:
    """The device to train on.

    Raises:
        ValueError: it is not there.
    """
    import torch

    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(device for device, found in there.items() if found)
    if not there[name]:
        raise ValueError(f"--device {name}: PyTorch finds none on this machine")
    if several():
        from accelerate import PartialState

        # of its own accord accelerate takes processes without a GPU for strangers to one another
        PartialState(cpu=name == "cpu")
    return name


def _place(source: str) -> str:
    """A source in a form that finds it again from any folder."""
    from fluvial.data import SETS

    if source in SETS or source.startswith("hf:"):
        return source
    return os.path.abspath(os.path.expanduser(source))


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _joins(system: str) -> bool:
    return catalog.get(system).joins


def _using(out: Path, system: str, kind: str) -> str:
    """What can be done with a run."""
    suffix = {"images": ".png", "arrays": ".npz", "table": ".csv", "text": ".txt"}[kind]
    if _joins(system):
        return f"fluvial translate {_quoted(out)} INPUT --out translated{suffix}"
    if system == "conformal-masks":
        return f"fluvial restore {_quoted(out)} IMAGE --out restored"
    number = 16 if kind == "text" else 64
    return f"fluvial sample {_quoted(out)} --n {number} --out samples{suffix}"


def _fit(job: Any, out: Path, device: str, trackers: Sequence[str], *, quiet: bool) -> _End:
    """Train, and say how it went."""
    from fluvial.models import write_card
    from fluvial.training.processes import shared
    from fluvial.training.run import train_job

    if catalog.get(job.system).fills:  # by a loop of its own
        try:
            result, text = job.complete(out, device, progress=not quiet)
        except KeyboardInterrupt:
            note(f"stopped {job.kept(out)}; go on with: fluvial train --resume {_quoted(out)}")
            return _End(130, out)
        write_card(out)
        return _End(0, out, result, text)
    if not several():  # several processes are placed by the loop
        job.model.to(device)
    if not quiet:
        _announce(job, out, device)
    try:
        result = train_job(job, out, progress=not quiet, trackers=trackers)
    except (KeyboardInterrupt, SystemExit) as stop:
        _say_stopped(out, job.recipe.steps)
        return _End(143 if isinstance(stop, SystemExit) else 130, out)
    except FloatingPointError as error:
        raise FloatingPointError(
            f"{error}; begin another run with a smaller --lr, or with --clip 1"
        ) from error
    shared(lambda: write_card(out))
    return _End(0, out, result, _summary(job, result, out) if first() else "")


def _announce(job: Any, out: Path, device: str) -> None:
    rows, format = job.about["rows"], job.data.format
    held = f", {rows['validation']:,} held out" if "validation" in rows else ""
    classes = len(format.label_names)
    labels = f", {classes} class{'es' * (classes != 1)}" if classes else ""
    what = f"rows of {' x '.join(map(str, format.shape))}"
    if format.kind == "text":
        what = f"windows of {format.shape[0]} tokens"
        labels = f"; the vocabulary has {format.tokenizer.size:,} "
        labels += "characters" if format.tokenizer.alphabet else "tokens"
    note(f"{job.data.name}: {rows['train']:,} {what} to train on{held}{labels}")
    for line in job.about["notes"]:
        note(line)
    parameters = sum(value.numel() for value in job.model.parameters())
    network = type(job.model.network).__name__
    note(
        f"{network} of {parameters:,} parameters on {device}, {job.recipe.steps:,} steps, in {out}"
    )


def _say_stopped(out: Path, steps: int) -> None:
    from fluvial.training.run import last_checkpoint

    done = last_checkpoint(out)
    again = f"fluvial train --resume {_quoted(out)}"
    if several():
        again = f"-m fluvial.cli train --resume {_quoted(out)}, with the same launcher"
    if done is None:
        note(f"stopped before the first checkpoint; begin again with: {again}")
    else:
        note(f"stopped at step {done[0]} of {steps}, kept in {done[1]}; go on with: {again}")


def _summary(job: Any, result: dict[str, Any], out: Path) -> str:
    from fluvial.training.run import Curves

    rows = job.about["rows"]["train"]
    noun = "windows" if job.data.format.kind == "text" else "rows"
    lines = [
        f"{job.system}, trained on {rows:,} {noun} of {job.data.name}: {result['steps']:,} steps "
        f"in {duration(result['seconds'])}"
    ]
    facts: dict[str, str] = {}
    if curve := Curves.read(out, job.model.criterion).chosen:
        (start, before), (_, after) = curve[0], curve[-1]
        facts[f"held-out {job.model.criterion}"] = (
            f"{before:.4g} at step {start}, {after:.4g} at the end ({result['weights']})"
        )
    for metric in result["metrics"]:
        if metric["floor"] is not None:
            facts[metric["name"]] = f"{metric['value']:.4g}, real data {metric['floor']:.4g}"
        elif job.data.format.kind == "text" and not metric["name"].startswith("validation "):
            facts[metric["name"]] = f"{metric['value']:.4g}, {metric['what']}"
    facts["model"] = str(out / "model.safetensors")
    facts["card"] = str(out / "README.md")
    facts["curves and samples"] = str(out / "figure.png")
    width = max(map(len, facts))
    lines += [f"  {name.ljust(width)}  {fact}" for name, fact in facts.items()]
    lines += [f"note: {text}" for text in result["notes"]]
    lines.append(f"next: {_using(out, job.system, job.data.format.kind)}")
    return "\n".join(lines)
