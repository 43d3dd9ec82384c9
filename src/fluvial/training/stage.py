"""What is trained, on what, and how: the stages that the loop goes through."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from torch import Tensor

from fluvial.core.protocols import Objective

Data: TypeAlias = Mapping[str, Tensor]
"""Tensors with the same number of rows, in memory or memory-mapped."""


@dataclass(frozen=True)
class Training:
    """How to train.

    Args:
        steps: optimiser steps.
        batch_size: rows a step, over all processes, drawn without replacement within an epoch.
        accumulation: parts a batch is computed in, one after another. The gradient is that of the
            whole batch; the memory that of a part.
        lr: peak learning rate of AdamW.
        betas, weight_decay: of AdamW.
        warmup: steps over which the learning rate rises linearly from 0.
        schedule: how it falls: not at all, linearly, or as half a period of a cosine, to 0.
        decay: share of the steps, the last ones, over which it falls.
        clip: largest norm of the gradient; None for no clipping.
        precision: of the forward pass, where its operations allow: "bf16" or "fp16" (autocast,
            with loss scaling for "fp16"), or "no" for that of the weights.
        ema: decays of the averages of the weights, one or several. Which one to use is chosen
            afterwards, by the validation loss if there are validation data; else the first. In the
            first 9 / (1 - ema) steps the decay is smaller, (1 + k) / (10 + k) at step k.
        checkpoint_every: steps between checkpoints.
        keep: checkpoints kept, the latest ones.
        validate_every: steps between measurements on the validation data.
        sample_every: steps between samples; None for samples at the end only.
        seed: of the order of the data and of the noise.
    """

    steps: int
    batch_size: int = 128
    accumulation: int = 1
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay: float = 1.0
    clip: float | None = None
    precision: Literal["no", "bf16", "fp16"] = "no"
    ema: float | tuple[float, ...] = 0.9999
    checkpoint_every: int = 500
    keep: int = 1
    validate_every: int = 500
    sample_every: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            *("steps", "batch_size", "accumulation", "checkpoint_every", "keep"),
            *("validate_every", "sample_every"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
            if value is not None and value % 1:
                raise ValueError(f"{name} must be a whole number, got {value}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive, got {self.lr}")
        if not self.rates or not all(0 <= rate < 1 for rate in self.rates):
            raise ValueError(f"ema needs decays in [0, 1), got {self.ema}")
        if len(set(self.rates)) < len(self.rates):
            raise ValueError(f"ema holds a decay twice: {self.ema}")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(f"schedule must be constant, linear or cosine, got {self.schedule!r}")
        if self.precision not in ("no", "bf16", "fp16"):
            raise ValueError(f"precision must be no, bf16 or fp16, got {self.precision!r}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be a share in (0, 1], got {self.decay}")
        if self.warmup < 0:
            raise ValueError(f"warmup must not be negative, got {self.warmup}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive or None, got {self.clip}")

    @property
    def rates(self) -> tuple[float, ...]:
        """The decays of the averages."""
        return tuple(self.ema) if isinstance(self.ema, tuple | list) else (self.ema,)

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        rise = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        left = min(1.0, (self.steps - step) / (self.decay * self.steps))
        match self.schedule:
            case "constant":
                fall = 1.0
            case "linear":
                fall = left
            case "cosine":
                fall = (1 - math.cos(math.pi * left)) / 2
        return self.lr * rise * fall


@dataclass(frozen=True)
class Stage:
    """One objective, trained on one set of data.

    Args:
        objective: called as ``objective(batch, noise)``; see `fluvial.core.protocols.Objective`.
        data: tensors with the same number of rows; or a function that makes them, called when the
            stage begins, for data that an earlier stage's model generates. It must give the same
            data when a training is resumed.
        training: how.
        validation: data that are not trained on, measured with noise and times that are the same
            at every measurement and in every run.
        preview: called with a path without suffix, on every process, while the objective has
            averaged weights: draws samples, and writes them there if the process is the main one.
        name: of the stage, where there are several.
    """

    objective: Objective
    data: Data | Callable[[], Data]
    training: Training
    validation: Data | None = None
    preview: Callable[[Path], None] | None = None
    name: str = "training"
