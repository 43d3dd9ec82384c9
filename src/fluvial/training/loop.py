"""A minimal training loop: AdamW, warm-up and decay, EMA, resumable checkpoints, a progress bar.

Batches and noise are functions of (seed, step), so a resumed run has nothing to restore but the
weights, their average and the optimiser.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2s
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Objective
from fluvial.training.files import atomic, load_checkpoint, save_checkpoint, write_json

LOG_EVERY = 50
"""Steps whose logged terms are averaged into one line of metrics.jsonl."""


@dataclass(frozen=True)
class Training:
    """How to train.

    Args:
        steps: optimiser steps.
        batch_size: rows a step, drawn without replacement within an epoch.
        lr: peak learning rate of AdamW.
        betas, weight_decay: of AdamW.
        warmup: steps over which the learning rate rises linearly from 0.
        decay: share of the steps, the last ones, over which it falls linearly to 0.
        clip: largest norm of the gradient; None for no clipping.
        ema: decay of the average of the weights. Early on the decay is (1 + k) / (10 + k), if
            smaller, so that the average forgets its start.
        checkpoint_every: steps between checkpoints.
        seed: of the order of the data and of the noise.
    """

    steps: int
    batch_size: int = 128
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: int = 0
    decay: float = 0.0
    clip: float | None = None
    ema: float = 0.9999
    checkpoint_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, got {self.lr}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must lie in [0, 1), got {self.ema}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be a share in [0, 1], got {self.decay}")
        if self.warmup < 0:
            raise ValueError(f"warmup must not be negative, got {self.warmup}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive or None, got {self.clip}")

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        falling = self.decay * self.steps
        fall = min(1.0, (self.steps - step) / falling) if falling else 1.0
        return self.lr * rise * fall


class Batches:
    """Rows of a data set in a shuffled order that is a function of (seed, step).

    Every epoch is a permutation of its own; a batch may reach into the next epoch, so all have the
    same size.
    """

    def __init__(self, data: Mapping[str, Tensor], batch_size: int, seed: int) -> None:
        sizes = {name: len(value) for name, value in data.items()}
        if not any(sizes.values()):
            raise ValueError("data is empty")
        if len(set(sizes.values())) != 1:
            raise ValueError(f"data needs the same number of rows in every part, got {sizes}")
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.rows = next(iter(sizes.values()))
        self._orders: dict[int, Tensor] = {}

    def __call__(self, step: int) -> dict[str, Tensor]:
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        first, last = positions.start // self.rows, (positions.stop - 1) // self.rows
        parts = [
            self._order(epoch)[
                max(0, positions.start - epoch * self.rows) : positions.stop - epoch * self.rows
            ]
            for epoch in range(first, last + 1)
        ]
        rows = torch.cat(parts)
        return {name: value[rows] for name, value in self.data.items()}

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            # a batch needs an epoch's order and perhaps the next: keep no more
            self._orders = {k: v for k, v in self._orders.items() if k >= epoch - 1}
            like = torch.empty(self.rows, dtype=torch.float64)
            self._orders[epoch] = KeyedNoise(self.seed).at(epoch).uniform(like, "order").argsort()
        return self._orders[epoch]


def train(
    objective: Objective,
    data: Mapping[str, Tensor],
    training: Training,
    *,
    out: Path | None = None,
    resume: bool = True,
    progress: bool = True,
    description: str = "training",
    config: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Minimise ``objective`` over ``data``; returns the averaged weights (a state dict).

    ``objective`` holds the last weights afterwards. Batches move to the device of its parameters.

    Args:
        objective: called as ``objective(batch, noise)``.
        data: tensors with the same number of rows.
        training: how.
        out: folder for ``training.json``, ``metrics.jsonl`` and ``checkpoint.pt``; None writes
            nothing. Ctrl-C saves a checkpoint before it is passed on.
        resume: go on from the checkpoint in ``out``, if there is one.
        progress: show a progress bar.
        description: its text.
        config: what else the result depends on, as numbers, strings and nestings of them: kept in
            ``training.json``, and compared before a training is resumed.

    Raises:
        ValueError: the data is empty or uneven; the checkpoint in ``out`` is damaged, or of another
            configuration (the differences are named).
        FloatingPointError: a logged term is not finite; looked at every `LOG_EVERY` steps and
            before a checkpoint is written.
    """
    batches = Batches(data, training.batch_size, training.seed)
    config = {
        **asdict(training),
        "rows": batches.rows,
        "data": _fingerprint(data),
        **(config or {}),
    }
    device = next(objective.parameters()).device
    optimizer = torch.optim.AdamW(
        objective.parameters(),
        training.lr,
        betas=training.betas,
        weight_decay=training.weight_decay,
        fused=True,
    )
    average = {name: value.detach().clone() for name, value in objective.state_dict().items()}
    done, seconds = 0, 0.0
    sums: dict[str, Tensor] = {}
    checkpoint = out / "checkpoint.pt" if out else None
    if checkpoint and resume and checkpoint.exists():
        saved = load_checkpoint(checkpoint)
        # how often it is saved does not change a training
        _check_same(
            {**saved["config"], "checkpoint_every": training.checkpoint_every}, config, checkpoint
        )
        objective.load_state_dict(saved["objective"])
        optimizer.load_state_dict(saved["optimizer"])
        average = {name: value.to(device) for name, value in saved["average"].items()}
        sums = {name: value.to(device) for name, value in saved["sums"].items()}
        done, seconds = saved["step"], saved["seconds"]
    log = _Log(out, done) if out else None
    if out and not done:
        write_json(out / "training.json", config)

    objective.train()
    noise = KeyedNoise(training.seed)
    tracked = [
        (average[name], value) for name, value in objective.state_dict(keep_vars=True).items()
    ]
    start = time.perf_counter() - seconds
    bar = tqdm(
        total=training.steps, initial=done, desc=description, disable=not progress, unit="step"
    )

    def save() -> None:
        if checkpoint:
            save_checkpoint(
                checkpoint,
                {
                    "config": config,
                    "step": done,
                    "seconds": time.perf_counter() - start,
                    "sums": sums,
                    "objective": objective.state_dict(),
                    "average": average,
                    "optimizer": optimizer.state_dict(),
                },
            )

    interrupt = _Interrupt()
    try:
        for step in range(done, training.steps):
            batch = {
                name: value.to(device, non_blocking=True) for name, value in batches(step).items()
            }
            terms = objective(batch, noise.at(step))
            terms["loss"].backward()
            if training.clip is not None:
                nn.utils.clip_grad_norm_(objective.parameters(), training.clip)
            for group in optimizer.param_groups:
                group["lr"] = training.rate(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            objective.after_step()
            _average(tracked, min(training.ema, (1 + step) / (10 + step)))
            for name, value in terms.items():
                sums[name] = sums.get(name, 0) + value.detach()
            done = step + 1
            bar.update()
            last, stop = done == training.steps, interrupt.seen
            saving = last or stop or done % training.checkpoint_every == 0
            logging = last or done % LOG_EVERY == 0
            if saving or logging:
                count = (done - 1) % LOG_EVERY + 1
                means = {name: float(value) / count for name, value in sums.items()}
                if not all(map(math.isfinite, means.values())):
                    raise FloatingPointError(f"a logged term is not finite at step {done}: {means}")
            if logging:
                sums = {}
                bar.set_postfix({name: f"{value:.4g}" for name, value in means.items()})
                if log:
                    log.write({"step": done, "seconds": time.perf_counter() - start, **means})
            if saving:
                save()
            if stop:
                break
        if interrupt.seen:
            raise KeyboardInterrupt
    finally:
        interrupt.close()
        bar.close()
        if log:
            log.close()
    return average


def _fingerprint(data: Mapping[str, Tensor]) -> str:
    """Tells data sets apart by 64 of their rows, spread evenly."""
    digest = blake2s(digest_size=8)
    for name in sorted(data):
        value = data[name]
        rows = torch.linspace(0, len(value) - 1, min(64, len(value))).long()
        part = value[rows.to(value.device)].cpu()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _average(pairs: list[tuple[Tensor, Tensor]], decay: float) -> None:
    with torch.no_grad():
        floats = [(a, v.detach()) for a, v in pairs if a.is_floating_point()]
        torch._foreach_lerp_([a for a, _ in floats], [v for _, v in floats], 1 - decay)
        for a, v in pairs:
            if not a.is_floating_point():
                a.copy_(v)


def _check_same(saved: Mapping[str, object], wanted: Mapping[str, object], path: Path) -> None:
    different = [
        f"{name} was {saved.get(name)!r}, is {wanted.get(name)!r}"
        for name in {**saved, **wanted}
        if saved.get(name) != wanted.get(name)
    ]
    if different:
        raise ValueError(
            f"{path} belongs to another configuration: {'; '.join(different)}. Use another folder, "
            "or resume=False to start over"
        )


class _Interrupt:
    """Ctrl-C, held back until the step is whole. A second one does not wait."""

    def __init__(self) -> None:
        self.seen = False
        # only the main thread may handle signals; elsewhere an interrupt never arrives
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._previous = signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True

    def close(self) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._previous)


class _Log:
    """metrics.jsonl, one object a line; lines past the checkpoint that is resumed are dropped."""

    def __init__(self, out: Path, done: int) -> None:
        path = out / "metrics.jsonl"
        kept = ""
        if done and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= done:
                        kept += line + "\n"
                except (ValueError, KeyError):
                    break  # the line that a crash cut short
        with atomic(path) as temporary:
            temporary.write_text(kept, encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, float]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
