"""The one training loop: stages, averages, validation, exact resume, on one process or many.

Batches and noise are functions of (seed, step), so a resumed run has nothing to restore but
weights, averages and the optimiser, and a row has its noise whichever process and part of a batch
it is in.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Noise
from fluvial.training.averages import Averages
from fluvial.training.batches import Batches
from fluvial.training.files import (
    load_checkpoint,
    save_checkpoint,
    save_model,
    write_json,
)
from fluvial.training.interrupt import Interrupt
from fluvial.training.log import MetricsFile, checked_trackers, flat, plain
from fluvial.training.processes import ON_CPU
from fluvial.training.sharding import (
    gathered,
    load_optimizer,
    optimizer_state,
    put_state,
    sharded,
    whole_state,
)
from fluvial.training.stage import Data, Stage, Training

LOG_EVERY = 50
"""Steps whose logged terms are averaged into one line of metrics.jsonl."""
AGREE_EVERY = 10
"""Steps after which several processes ask one another whether to stop."""
BINS = 10
"""Equal parts of [0, 1] in which terms are logged by time."""
LOCK = ".lock"
"""File that a training holds in its folder."""
VALIDATION = KeyedNoise(0)
"""Of every validation, so that the curves of different runs compare."""

_FREE = ("checkpoint_every", "keep")
"""Fields of `Training` that may differ when a run is resumed: its results do not depend on them."""


@dataclass(frozen=True)
class Outcome:
    """What a stage ended with.

    Args:
        steps: optimiser steps.
        seconds: that they took, all sessions together.
        weights: the weights the objective has now, "ema-0.9999" for instance.
        validation: the measured terms of every set of weights, by its name; empty without
            validation data.
    """

    steps: int
    seconds: float
    weights: str
    validation: Mapping[str, Mapping[str, Any]]


def train(
    *stages: Stage,
    out: Path | None = None,
    resume: bool = True,
    progress: bool = True,
    config: Mapping[str, Any] | None = None,
    trackers: Sequence[str] = (),
) -> list[Outcome]:
    """Train the stages in turn. Their objectives hold averaged weights afterwards.

    Started by ``accelerate launch`` or ``torchrun`` it runs on all their processes: each computes
    its part of every batch. The loss curve and the weights are those of one process but for the
    order in which sums are rounded. A fully sharded objective is trained as such.

    A run in a folder writes ``training.json`` (its configuration), ``metrics.jsonl`` (one line
    every `LOG_EVERY` steps and one every validation), ``checkpoints/``, ``samples/`` and, at the
    end, ``weights/`` (the last, every average, the best of the validations). Ctrl-C,
    SIGTERM and SIGHUP end the step, write a checkpoint and are passed on; a second one does not
    wait. After that, as after a crash, the same call goes on and gives the same bits as a run that
    was never stopped.

    Args:
        *stages: what to train.
        out: folder of the run; None writes nothing.
        resume: go on from the latest checkpoint in ``out``, if there is one.
        progress: show a progress bar.
        config: what else the result depends on, as numbers, strings and nestings of them: kept in
            ``training.json``, and compared before a training is resumed.
        trackers: names of trackers known to `accelerate` ("tensorboard", "wandb", ...), which get
            what ``metrics.jsonl`` gets.

    Raises:
        ValueError: the data are empty or uneven; a batch does not divide over processes and parts;
            the checkpoint in ``out`` is damaged, or of another configuration (the differences are
            named); a precision the device does not have.
        FileExistsError: ``out`` holds files and no training, or another process trains into it.
        FloatingPointError: a logged term is not finite; looked at every `LOG_EVERY` steps and
            before a checkpoint is written.
    """
    if not stages:
        raise ValueError("stages is empty: there is nothing to train")
    if len({stage.name for stage in stages}) < len(stages):
        raise ValueError(f"stages need different names, got {[stage.name for stage in stages]}")
    run = _Run(stages, out, progress, dict(config or {}), trackers)
    with run:
        return run.train(resume)


@dataclass
class _State:
    """Where a run is. All of it is in a checkpoint."""

    stage: int = 0
    step: int = 0
    seconds: float = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict)
    by_time: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0
    best: float | None = None
    validation: dict[str, Any] = field(default_factory=dict)
    outcomes: list[dict[str, Any]] = field(default_factory=list)


class _Run:
    def __init__(
        self,
        stages: Sequence[Stage],
        out: Path | None,
        progress: bool,
        config: dict[str, Any],
        trackers: Sequence[str],
    ) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        if trackers and out is None:
            raise ValueError("trackers need a folder to write to: pass out=")
        self.stages, self.out, self.config = stages, out, config
        self.accelerator = Accelerator(
            mixed_precision="no",  # torch's autocast, for one process as for many
            device_placement=False,
            log_with=checked_trackers(trackers) or None,
            project_dir=str(out) if out else None,
            # a batch may leave out a parameter: an embedding of labels where none are given
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
            **ON_CPU,
        )
        self.processes = self.accelerator.num_processes
        self.process = self.accelerator.process_index
        self.main = self.accelerator.is_main_process
        self.progress = progress and self.main
        self.terminal = sys.stderr.isatty()  # a log file wants few lines
        self.trackers = trackers
        self.state = _State()
        self.objectives = list(dict.fromkeys(stage.objective for stage in stages))
        self.batches: dict[int, Batches] = {}
        for stage in stages:
            parts = self.processes * stage.training.accumulation
            if stage.training.batch_size % parts:
                raise ValueError(
                    f"batch_size {stage.training.batch_size} does not divide into "
                    f"{stage.training.accumulation} parts on each of {self.processes} processes"
                )
            device = next(stage.objective.parameters()).device.type
            if stage.training.precision == "fp16" and device == "cpu":
                raise ValueError("precision 'fp16' needs an accelerator, and the model is on cpu")

    def __enter__(self) -> Self:
        self._lock = self._locked()
        # launchers tell their processes twice, and then wait half a minute
        self.interrupt = Interrupt(patience=25.0 if self.processes > 1 else 0.0)
        self.log: MetricsFile | None = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.interrupt.close()
        if self._lock:
            self._lock.release()
        if self.log:
            self.log.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _locked(self) -> Any:
        """The folder, held against other trainings for as long as this process lives."""
        from filelock import FileLock, Timeout

        if not self.out or not self.main:
            return None
        if self.out.is_dir():
            there = {path.name for path in self.out.iterdir()} - {LOCK}
            if there and not there & {"training.json", "run.json"}:
                raise FileExistsError(
                    f"out: {self.out} is not empty and holds no training; choose another folder"
                )
        self.out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.out / LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise FileExistsError(
                f"out: another process is training into {self.out}; wait for it, or choose another "
                "folder"
            ) from error
        return lock

    def train(self, resume: bool) -> list[Outcome]:
        # data that are there already are checked and compared before any work
        for k, stage in enumerate(self.stages):
            if not callable(stage.data):
                self._open(k, stage.data)
        self.described = self._describe()
        found = self._latest(resume)
        saved = None if found is None else self._restore(found)
        if self.out and self.main:
            write_json(self.out / "training.json", self.described)
            self.log = MetricsFile(
                self.out,
                [stage.name for stage in self.stages],
                (self.state.stage, self.state.step),
            )
        if self.trackers:
            settings = {name: plain(value) for name, value in flat(self.described).items()}
            self.accelerator.init_trackers("fluvial", config=settings)
        for k in range(self.state.stage, len(self.stages)):
            if k > self.state.stage:
                outcomes = self.state.outcomes
                self.state, saved = _State(stage=k, outcomes=outcomes), None
            _StageRun(self, k, saved).train()
        return [Outcome(**outcome) for outcome in self.state.outcomes]

    def _open(self, k: int, data: Data) -> Batches:
        training = self.stages[k].training
        self.batches[k] = Batches(data, training.batch_size, training.seed)
        return self.batches[k]

    def data(self, k: int) -> Batches:
        if k not in self.batches:
            made = self.stages[k].data
            assert callable(made)
            self._open(k, made())
        return self.batches[k]

    def _describe(self) -> dict[str, Any]:
        stages = []
        for k, stage in enumerate(self.stages):
            described: dict[str, Any] = {"name": stage.name, **asdict(stage.training)}
            if not callable(stage.data):
                described["rows"] = self.batches[k].rows
                described["data"] = self.batches[k].fingerprint()
            if stage.validation is not None:
                described["validation"] = Batches(stage.validation, 1, 0).fingerprint()
            stages.append(described)
        # one stage is described by its fields alone
        return {**(stages[0] if len(stages) == 1 else {"stages": stages}), **self.config}

    # Checkpoints

    @property
    def done(self) -> int:
        """Steps of all stages so far."""
        before = self.stages[: self.state.stage]
        return self.state.step + sum(stage.training.steps for stage in before)

    def _latest(self, resume: bool) -> Path | None:
        if not self.out:
            return None
        folder = self.out / "checkpoints"
        if self.main:
            # of a write that a crash cut short, and of the run that is started over
            for left in [*folder.glob(".step-*"), *([] if resume else folder.glob("step-*.pt"))]:
                left.unlink()
        self.accelerator.wait_for_everyone()
        return max(folder.glob("step-*.pt"), default=None)

    def _restore(self, path: Path) -> dict[str, Any]:
        saved = load_checkpoint(path)
        _check_same(saved["config"], self.described, saved["state"]["step"], path)
        for objective, weights in zip(self.objectives, saved["objectives"], strict=True):
            put_state(objective, weights)
        self.state = _State(**saved["state"])
        return saved

    def save(self, averages: Averages, optimizer: Any, scaler: Any) -> None:
        if not self.out:
            return
        objective = self.stages[self.state.stage].objective
        content = {
            "config": self.described,
            "state": {
                **{name: getattr(self.state, name) for name in _State.__dataclass_fields__},
                "sums": self.over(self.state.sums, "mean"),
                "by_time": self.over(self.state.by_time, "sum"),
            },
            "objectives": [whole_state(one.state_dict()) for one in self.objectives],
            "averages": {name: whole_state(weights) for name, weights in averages.of.items()},
            "optimizer": optimizer_state(objective, optimizer),
            "scaler": scaler.state_dict(),
        }
        if self.main:
            folder = self.out / "checkpoints"
            save_checkpoint(folder / f"step-{self.done:08d}.pt", content)
            keep = self.stages[self.state.stage].training.keep
            for old in sorted(folder.glob("step-*.pt"))[:-keep]:
                old.unlink()
        self.accelerator.wait_for_everyone()

    def write(self, name: str, weights: Mapping[str, Tensor], stage: Stage) -> None:
        """Weights of an objective as RUN/weights/NAME.safetensors."""
        if not self.out:
            return
        whole = whole_state(weights)
        if self.main:
            folder = self.out / "weights"
            prefix = f"{stage.name}-" if len(self.stages) > 1 else ""
            header = {"system": "weights", "step": self.state.step}
            save_model(folder / f"{prefix}{name}.safetensors", whole, header, overwrite=True)

    def report(self, values: dict[str, Any]) -> None:
        """A line of metrics.jsonl, and of every tracker."""
        stage = {"stage": self.stages[self.state.stage].name} if len(self.stages) > 1 else {}
        if self.log:
            self.log.write({"step": self.state.step, **stage, **values})
        if self.trackers:
            numbers = {
                name: value
                for name, value in flat(values).items()
                if isinstance(value, int | float)
            }
            self.accelerator.log(numbers, step=self.state.step)

    def over(self, values: Mapping[str, Tensor], how: str) -> dict[str, Tensor]:
        """The "mean" or "sum" over the processes."""
        if self.processes == 1:
            return dict(values)
        return {name: self.accelerator.reduce(v.clone(), how) for name, v in values.items()}

    def stop(self) -> bool:
        """Has any process been asked to stop?"""
        if self.processes == 1:
            return self.interrupt.seen is not None
        if self.state.step % AGREE_EVERY:
            return False
        if self.interrupt.seen is not None:
            self.accelerator.set_trigger()
        return self.accelerator.check_trigger()


class _StageRun:
    def __init__(self, run: _Run, k: int, saved: Mapping[str, Any] | None) -> None:
        self.run, self.stage, self.state = run, run.stages[k], run.state
        self.training = self.stage.training
        self.objective = self.stage.objective
        self.batches = run.data(k)
        parameters = list(self.objective.parameters())
        self.device = parameters[0].device
        distributed = any(map(sharded, parameters))
        optimizer: Any = torch.optim.AdamW(
            parameters,
            self.training.lr,
            betas=self.training.betas,
            weight_decay=self.training.weight_decay,
            fused=not distributed,
        )
        self.model: nn.Module = self.objective
        if run.processes > 1 and not distributed:
            self.model, optimizer = run.accelerator.prepare(
                self.objective, optimizer, device_placement=[True, True]
            )
            optimizer = optimizer.optimizer
            self.device = run.accelerator.device
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.training.precision == "fp16"
        )
        self.averages = Averages(self.objective, self.training.rates)
        if saved is not None:
            self.averages.load(saved["averages"])
            load_optimizer(self.objective, optimizer, saved["optimizer"])
            self.scaler.load_state_dict(saved["scaler"])
            for part in (self.state.sums, self.state.by_time):
                part.update({name: value.to(self.device) for name, value in part.items()})
            if not run.main:  # their sum over the processes is in the checkpoint
                self.state.by_time.clear()
        noise = KeyedNoise(self.training.seed)
        self.noise = noise.at(k) if k else noise

    def train(self) -> None:
        run, state, training = self.run, self.state, self.training
        self.objective.train()
        # on the clock are steps, measurements and files, but no pause between sessions
        begin = time.perf_counter() - state.seconds
        logged = (state.seconds, state.step)
        bar = tqdm(
            total=training.steps,
            initial=state.step,
            desc=self.stage.name,
            disable=not run.progress,
            unit="step",
            mininterval=0.1 if run.terminal else 30.0,
        )
        with bar:
            while state.step < training.steps:
                self._step(state.step)
                state.step += 1
                state.count += 1
                bar.update()
                last = state.step == training.steps
                stop = run.stop()
                saving = last or stop or state.step % training.checkpoint_every == 0
                logging = last or state.step % LOG_EVERY == 0
                if saving or logging:
                    means = self._means()
                state.seconds = time.perf_counter() - begin
                if logging:
                    seconds, steps = state.seconds - logged[0], state.step - logged[1]
                    logged = (state.seconds, state.step)
                    speed = steps * training.batch_size / max(seconds, 1e-9)
                    bar.set_postfix(
                        {
                            **{n: f"{v:.4g}" for n, v in means.items() if isinstance(v, float)},
                            "rows/s": f"{speed:.0f}",
                        },
                        refresh=run.terminal,
                    )
                    run.report(
                        {
                            "seconds": state.seconds,
                            "rows_per_second": speed,
                            "lr": training.rate(state.step - 1),
                            **means,
                        }
                    )
                    state.sums.clear()
                    state.by_time.clear()
                    state.count = 0
                if self.stage.validation is not None and (
                    last or state.step % training.validate_every == 0
                ):
                    self._validate(self.stage.validation)
                    state.seconds = time.perf_counter() - begin
                if last or (training.sample_every and state.step % training.sample_every == 0):
                    self._preview()
                    state.seconds = time.perf_counter() - begin
                if saving:
                    run.save(self.averages, self.optimizer, self.scaler)
                if stop:
                    run.interrupt.raise_it()
        self._finish()

    def _step(self, step: int) -> None:
        training, run = self.training, self.run
        parts = training.accumulation * run.processes
        size = training.batch_size // parts
        for group in self.optimizer.param_groups:
            group["lr"] = training.rate(step)
        for part in range(training.accumulation):
            first = (part * run.processes + run.process) * size
            rows = slice(first, first + size)
            noise: Noise = self.noise.at(step)
            if parts > 1:
                noise = noise.rows(torch.arange(rows.start, rows.stop))
            batch = {
                name: value.to(self.device, non_blocking=True)
                for name, value in self.batches(step, rows).items()
            }
            if part + 1 < training.accumulation:
                # gradients meet once, at the last part
                with run.accelerator.no_sync(self.model):
                    self._backward(batch, noise)
            else:
                self._backward(batch, noise)
        if training.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.objective.parameters(), training.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.objective.after_step()
        self.averages.update(step)

    def _backward(self, batch: Data, noise: Noise) -> None:
        terms = self._terms(self.model, batch, noise)
        self.scaler.scale(terms["loss"] / self.training.accumulation).backward()
        sums, by_time = self.state.sums, self.state.by_time
        for name, value in terms.items():
            if name == "t":
                continue
            value = value.detach()
            if value.ndim and "t" in terms:
                by_time[name] = by_time.get(name, 0) + _by_time(terms["t"], value)
            sums[name] = sums.get(name, 0) + value.mean() / self.training.accumulation

    def _terms(self, model: nn.Module, batch: Data, noise: Noise) -> Mapping[str, Tensor]:
        kinds = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
        kind = kinds[self.training.precision]
        if kind is None:
            return model(batch, noise)
        with torch.autocast(self.device.type, kind):
            return model(batch, noise)

    def _means(self) -> dict[str, Any]:
        """Terms averaged since the last line, the same on every process."""
        means: dict[str, Any] = {
            name: float(value) / self.state.count
            for name, value in self.run.over(self.state.sums, "mean").items()
        }
        if not all(map(math.isfinite, means.values())):
            raise FloatingPointError(
                f"a logged term is not finite at step {self.state.step}: {means}"
            )
        return {**means, **_as_by_time(self.run.over(self.state.by_time, "sum"))}

    # Measurements

    @torch.no_grad()
    def _validate(self, data: Data) -> None:
        self.objective.eval()
        results = {"last": self._measure(data)}
        for name in self.averages.of:
            with self.averages.applied(name):
                results[name] = self._measure(data)
        self.objective.train()
        self.state.validation = results
        self.run.report({"seconds": self.state.seconds, "validation": results})
        name = self._best_average()
        value = results[name][self.objective.criterion]
        if self.state.best is None or value < self.state.best:
            self.state.best = value
            self.run.write("best", self.averages.of[name], self.stage)

    def _best_average(self) -> str:
        measured, criterion = self.state.validation, self.objective.criterion
        return min(
            self.averages.of, key=lambda name: measured[name][criterion] if measured else 0.0
        )

    def _measure(self, data: Data) -> dict[str, Any]:
        rows = len(next(iter(data.values())))
        sums: dict[str, Tensor] = {}
        tables: dict[str, Tensor] = {}
        size, run = self.training.batch_size // self.training.accumulation, self.run
        for start in range(0, rows, size):
            ids = torch.arange(start, min(start + size, rows))
            mine = ids[run.process :: run.processes]
            # a sharded model needs every process in every forward pass, one with nothing to add too
            weight = float(len(mine))
            mine = mine if len(mine) else ids[:1]
            batch = {
                name: value[mine.to(value.device)].to(self.device) for name, value in data.items()
            }
            terms = self._terms(self.objective, batch, VALIDATION.rows(mine))
            for name, value in terms.items():
                if name == "t":
                    continue
                if value.ndim and "t" in terms:
                    table = _by_time(terms["t"], value) * bool(weight)
                    tables[name] = tables.get(name, 0) + table
                sums[name] = sums.get(name, 0) + value.mean() * (weight / rows)
        means = {name: float(value) for name, value in run.over(sums, "sum").items()}
        return {**means, **_as_by_time(run.over(tables, "sum"))}

    def _preview(self) -> None:
        if self.stage.preview and self.run.out:
            path = self.run.out / "samples" / f"step-{self.run.done:08d}"
            self.objective.eval()
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.averages.applied(self._best_average()), gathered(self.objective):
                self.stage.preview(path)
            self.objective.train()

    def _finish(self) -> None:
        run, state = self.run, self.state
        self.optimizer.zero_grad(set_to_none=True)
        run.write("last", self.objective.state_dict(), self.stage)
        for name, weights in self.averages.of.items():
            run.write(name, weights, self.stage)
        chosen = self._best_average()
        outcome = {
            "steps": state.step,
            "seconds": state.seconds,
            "weights": chosen,
            "validation": state.validation,
        }
        state.outcomes.append(outcome)
        self.objective.finish(self.averages.of[chosen])


def _by_time(t: Tensor, value: Tensor) -> Tensor:
    """(2, BINS): sums and counts of the values by their times."""
    bins = (t.detach() * BINS).long().clamp_(0, BINS - 1)
    members = functional.one_hot(bins, BINS).to(value.dtype)
    return torch.stack([value.detach() @ members, members.sum(0)])


def _as_by_time(tables: Mapping[str, Tensor]) -> dict[str, Any]:
    if not tables:
        return {}
    means = {
        name: [total / count if count else None for total, count in table.T.tolist()]
        for name, table in tables.items()
    }
    return {"by_time": means}


# Configuration


def _check_same(saved: Mapping[str, Any], wanted: Mapping[str, Any], done: int, path: Path) -> None:
    before, now = (json.loads(json.dumps(flat(one))) for one in (saved, wanted))
    free = set(_FREE)
    if before.get("schedule") == now.get("schedule") == "constant" and now["steps"] >= done:
        free.add("steps")  # where the rate does not fall, a training can be made longer
    different = [
        f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in {**before, **now}
        if before.get(name) != now.get(name) and name.rpartition(".")[2] not in free
    ]
    if different:
        raise ValueError(
            f"{path} belongs to another configuration: {'; '.join(different)}. Use another folder, "
            "or resume=False to start over"
        )


__all__ = ["LOG_EVERY", "Batches", "Outcome", "Stage", "Training", "train"]
