"""The folder of a training run: what `fluvial train` writes beside what the loop writes.

``run.json`` is written at the start and says what is trained on what; ``result.json`` is written
last, so a run that has one is finished.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import fluvial
from fluvial.training.batches import Batches
from fluvial.training.files import atomic, write_json
from fluvial.training.log import checked_trackers
from fluvial.training.loop import LOCK
from fluvial.training.processes import shared
from fluvial.training.recipe import as_json
from fluvial.training.sharding import gathered

FORMAT = 1
"""Version of the layout of ``run.json`` and ``result.json``."""
RUNS = Path("runs")
"""Where runs go that are not told where to go."""


class Job(Protocol):
    """A training that is ready to begin: a system's model, its data and how to fit it.

    ``recipe`` is a dataclass of all hyper-parameters, ``steps`` among them; ``model`` is an
    objective with ``save``, ``use`` and ``out_of_scope``, as every system's class.
    """

    system: str
    recipe: Any
    model: Any

    @property
    def about(self) -> Mapping[str, Any]:
        """The entry "data" of ``run.json``."""
        ...

    @property
    def rows(self) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor] | None]:
        """Data to train on and data held out, as the loop gets them."""
        ...

    def fit(self, out: Path, *, progress: bool, trackers: Sequence[str]) -> None:
        """Train into a folder, or go on in it."""
        ...

    def measure(self) -> list[dict[str, Any]]:
        """Measured numbers of the finished model, the entry "metrics" of ``result.json``."""
        ...


def check_new(out: Path) -> None:
    """Refuse a folder that a run cannot be written into.

    Raises:
        FileExistsError: ``out`` is a file or a folder that is not empty; says what is in it.
    """
    if out.is_dir() and not {path.name for path in out.iterdir()} - {LOCK}:
        return
    if (out / "result.json").is_file():
        raise FileExistsError(f"out: {out} holds a finished run; choose another folder")
    if (out / "run.json").is_file():
        raise FileExistsError(
            f"out: {out} holds a run that is not finished; go on with it by --resume {out}, or "
            "choose another folder"
        )
    if out.exists():
        what = "is not empty" if out.is_dir() else "is a file"
        raise FileExistsError(f"out: {out} {what}; choose another folder")


def read_settings(out: Path) -> dict[str, Any]:
    """``run.json`` of a run.

    Raises:
        FileNotFoundError: there is no run in the folder.
        ValueError: the file is damaged, or of a later format.
    """
    path = out / "run.json"
    if not path.is_file():
        what = "it has no run.json" if out.is_dir() else "there is no such folder"
        raise FileNotFoundError(f"{out} is not a training run: {what}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["format"]
        names = ("system", "source", "device", "trackers", "recipe", "data")
        _ = [content[name] for name in names]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    if version > FORMAT:
        raise ValueError(
            f"{path} has format {version}, this version of fluvial reads up to {FORMAT}"
        )
    return dict(content)


def read_result(out: Path) -> dict[str, Any] | None:
    """``result.json`` of a run, None while it is not finished.

    Raises:
        ValueError: the file is damaged.
    """
    path = out / "result.json"
    if not path.is_file():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def last_checkpoint(out: Path) -> tuple[int, Path] | None:
    """(step, path) of the checkpoint that a run goes on from, None without one."""
    path = max((out / "checkpoints").glob("step-*.pt"), default=None)
    match = path and re.fullmatch(r"step-(\d+)\.pt", path.name)
    return (int(match[1]), path) if match and path else None


def begin(
    job: Job,
    out: Path | None,
    *,
    source: str,
    command: str,
    target: str | None = None,
    device: str = "cpu",
    trackers: Sequence[str] = (),
) -> Path:
    """A new folder with ``run.json`` in it.

    Args:
        job: what is trained.
        out: the folder; None for the next free ``runs/SYSTEM-N``.
        source: what the data were read from, in a form that finds them again.
        command: as it was typed.
        target: the same for the other side of a system that joins two data sets.
        device, trackers: kept for a resume.

    Raises:
        FileExistsError: as `check_new`.
        ValueError, ModuleNotFoundError: a tracker is unknown or not installed.
    """
    checked_trackers(trackers)

    def write() -> str:
        folder = _next_free(job.system) if out is None else out
        check_new(folder)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / "run.json").touch(exist_ok=False)  # of two at the same moment one gets it
        except FileExistsError:
            check_new(folder)
        _write_settings(
            job,
            folder,
            {
                "command": command,
                "source": source,
                **({} if target is None else {"target": target}),
                "device": device,
                "trackers": list(trackers),
            },
        )
        return str(folder)

    return Path(shared(write))


def _next_free(system: str) -> Path:
    """The first of runs/SYSTEM-1, -2, ... that does not exist, made."""
    number = 1
    while True:
        folder = RUNS / f"{system}-{number}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1


def _write_settings(job: Job, folder: Path, typed: Mapping[str, Any]) -> None:
    parameters = sum(value.numel() for value in job.model.parameters())
    content = {
        "format": FORMAT,
        "kind": "training",
        "system": job.system,
        **typed,
        "recipe": as_json(job.recipe),
        "parameters": parameters,
        "data": dict(job.about),
        "versions": {
            "fluvial": fluvial.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    if job.model.use is not None:
        use = job.model.use.for_system(job.system, job.model.out_of_scope)
        content["use_digest"] = use.digest
    write_json(folder / "run.json", content)


def go_on(job: Job, out: Path) -> None:
    """Make a run that was stopped, or is made longer, ready to go on.

    Raises:
        ValueError: the data are others than those it began with.
    """
    path = out / "training.json"
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        train, held = job.rows
        parts = {"data": Batches(train, 1, 0).fingerprint()}
        if held is not None:
            parts["validation"] = Batches(held, 1, 0).fingerprint()
        if any(before.get(name, found) != found for name, found in parts.items()):
            was, now = before.get("rows"), len(next(iter(train.values())))
            count = (
                f" ({was:,} rows to train on then, {now:,} now)" if was not in (None, now) else ""
            )
            raise ValueError(
                f"the data have changed since {out} began{count}: put them back as they were, or "
                "begin another run"
            )

    def write() -> None:
        (out / "result.json").unlink(missing_ok=True)
        settings = read_settings(out)
        write_json(out / "run.json", {**settings, "recipe": as_json(job.recipe)})

    shared(write)


def train_job(
    job: Job, out: Path, *, progress: bool = True, trackers: Sequence[str] = ()
) -> dict[str, Any]:
    """Fit in a folder that `begin` or `go_on` made ready, then save and measure.

    Writes ``model.safetensors``, ``figure.png`` and, last, ``result.json``, whose content is
    returned.

    Raises:
        KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM, after a checkpoint was written.
        As `fluvial.training.loop.train`.
    """
    job.fit(out, progress=progress, trackers=trackers)
    with gathered(job.model):
        metrics = job.measure()
    job.model.save(out / "model.safetensors", overwrite=True)

    def write() -> dict[str, Any]:
        curves = Curves.read(out, job.model.criterion)
        draw(out, curves)
        result = {
            "format": FORMAT,
            "system": job.system,
            "seconds": curves.seconds,
            "steps": job.recipe.steps,
            "metrics": [*metrics, *curves.metrics()],
            "weights": curves.weights,
            "notes": curves.notes(),
        }
        write_json(out / "result.json", result)
        return result

    return shared(write)


@dataclass(frozen=True)
class Curves:
    """What the loop measured, from ``metrics.jsonl``.

    Args:
        criterion: the term by which weights are compared.
        weights: the average that the model has.
        seconds: of the training.
        training: (step, value) of the criterion; steps of several stages are counted on.
        validation: the same by the name of the weights, "last" among them.
    """

    criterion: str
    weights: str
    seconds: float
    training: list[tuple[int, float]]
    validation: dict[str, list[tuple[int, float]]]

    @classmethod
    def read(cls, out: Path, criterion: str) -> Curves:
        """The curves of a run."""
        training: list[tuple[int, float]] = []
        validation: dict[str, list[tuple[int, float]]] = {}
        described = json.loads((out / "training.json").read_text(encoding="utf-8"))
        stages = described.get("stages", [described])
        done = accumulate([stage["steps"] for stage in stages], initial=0)
        before = dict(zip([stage["name"] for stage in stages], done, strict=False))
        seconds = dict.fromkeys(before, 0.0)
        with (out / "metrics.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                values = json.loads(line)
                stage = values.get("stage", stages[0]["name"])
                step, seconds[stage] = before[stage] + values["step"], values["seconds"]
                if criterion in values:
                    training.append((step, values[criterion]))
                for name, terms in values.get("validation", {}).items():
                    validation.setdefault(name, []).append((step, terms[criterion]))
        rates = stages[-1]["ema"]
        averages = [f"ema-{rate}" for rate in (rates if isinstance(rates, list) else [rates])]
        # as the loop chooses: by the last validation, else the first
        chosen = min(averages, key=lambda name: validation[name][-1][1] if validation else 0.0)
        return cls(criterion, chosen, sum(seconds.values()), training, validation)

    @property
    def chosen(self) -> list[tuple[int, float]]:
        """(step, value) of the chosen weights on the validation data; empty without such data."""
        return self.validation.get(self.weights, [])

    def metrics(self) -> list[dict[str, Any]]:
        """The last validation, as an entry of "metrics"."""
        if not self.chosen:
            return []
        return [
            {
                "name": f"validation {self.criterion}",
                "value": self.chosen[-1][1],
                "floor": None,
                "what": f"mean over the held-out rows, at fixed times and noise, of {self.weights}",
            }
        ]

    def notes(self) -> list[str]:
        """What has to be said beside the numbers."""
        if not self.chosen:
            return [
                "The loss was not measured on held-out rows: the first of the averages was taken."
            ]
        name, (step, best) = min(
            (
                (name, point)
                for name, curve in self.validation.items()
                for point in curve
                if name != "last"
            ),
            key=lambda entry: entry[1][1],
        )
        end = self.chosen[-1]
        if best < 0.95 * end[1]:
            return [
                f"The validation {self.criterion} was lowest at step {step} ({best:.4g}, {name}) "
                f"and is {end[1]:.4g} at the end: the model may have begun to repeat its training "
                "data. The weights of that step are kept as weights/best.safetensors."
            ]
        return []


def draw(out: Path, curves: Curves) -> None:
    """``figure.png``: the curves of a run, and its last samples."""
    import matplotlib.image
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = max((out / "samples").glob("step-*.png"), default=None)
    figure = Figure(figsize=(11 if picture else 6, 5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, 2 if picture else 1, width_ratios=(1.1, 1) if picture else None)
    plot = figure.add_subplot(grid[0, 0])
    plot.plot(*zip(*curves.training, strict=True), color="0.75", label="training rows, as it went")
    for k, (name, curve) in enumerate(curves.validation.items()):
        style: dict[str, Any] = {"color": "0.35", "lw": 1.0, "ls": (0, (1 + k, 2))}
        if name == curves.weights:
            style = {"color": "C0", "lw": 2.0, "zorder": 1}
        label = f"held-out rows, {name}{' (chosen)' if name == curves.weights else ''}"
        plot.plot(*zip(*curve, strict=True), marker="." if len(curve) < 30 else "", label=label)
        plot.lines[-1].set(**style)
    values = [v for curve in (curves.training, *curves.validation.values()) for _, v in curve]
    if 0 < 10 * min(values) < max(values):
        plot.set_yscale("log")
    plot.set_xlabel("step")
    plot.set_ylabel(curves.criterion)
    plot.legend(frameon=False)
    plot.spines[["top", "right"]].set_visible(False)
    if picture:
        image = matplotlib.image.imread(picture)
        shown = figure.add_subplot(grid[0, 1])
        shown.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="antialiased")
        shown.set_axis_off()
        shown.set_title(f"samples after {int(picture.stem.removeprefix('step-')):,} steps")
    with atomic(out / "figure.png") as temporary:
        figure.savefig(temporary, dpi=150, format="png")
