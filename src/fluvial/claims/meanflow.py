"""The claim of MeanFlow: one network call beats flow matching of the same cost sampled in few.

Two arms get the same images, the same network from the same initial weights, the same wall time and
the same tuning of the learning rate on validation images: MeanFlow, and flow matching, which is
MeanFlow with r = t throughout and the plain squared error. A flow-matching step is cheaper, so that
arm takes more steps. Their samples are compared by Fréchet distance to held-out images, in the
features of a classifier trained on the training images.
"""

from __future__ import annotations

import functools
import math
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fluvial.claims.figure import image_grid, samples_and_curves
from fluvial.claims.parallel import threads_each
from fluvial.claims.report import Report, open_run, write_report
from fluvial.claims.resumable import Resumable
from fluvial.claims.verdict import Comparison
from fluvial.core.gaussian.ode import Euler
from fluvial.core.noise import KeyedNoise
from fluvial.core.time import LogitNormal
from fluvial.data import SETS, scaled
from fluvial.images.meanflow import Guidance, MeanFlow, TimePairs
from fluvial.metrics import (
    ConvFeatures,
    Interval,
    bootstrap_interval,
    frechet_distance,
    train_classifier,
)
from fluvial.networks import DiT
from fluvial.training.files import load_model, save_model
from fluvial.training.threads import threads

SYSTEM = "meanflow"
CLAIM = (
    "With one network evaluation, MeanFlow's Fréchet distance to held-out images is below that of "
    "flow matching of the same network, data and wall time sampled in 1, 2 and 4 Euler steps."
)
RIVAL_STEPS = (1, 2, 4)
"""Euler steps of flow matching that one MeanFlow evaluation is claimed to beat."""
MARGIN = 0.0
"""Of the difference in log Fréchet distance."""

Arm = Literal["meanflow", "flow matching"]
ARMS: tuple[Arm, Arm] = ("meanflow", "flow matching")
EVALUATIONS: dict[Arm, tuple[int, ...]] = {
    "meanflow": (1, 2, 4),
    "flow matching": (*RIVAL_STEPS, 8, 64),
}
"""Network evaluations a sample at which each arm is measured."""
PICTURED: tuple[tuple[Arm, int], ...] = (
    ("meanflow", 1),
    ("flow matching", 1),
    ("flow matching", 2),
    ("flow matching", 4),
    ("flow matching", 64),
)
SHOWN = 20
"""Images in a row of the figure."""
TIMED_STEPS = 15
SEARCH_SEED, SAMPLE_SEED = 1_000, 2_000
MODEL = "model.safetensors"
Scores: TypeAlias = Mapping[Arm, Mapping[int, Mapping[int, Interval]]]


@dataclass(frozen=True)
class Config:
    """Everything a run of the claim depends on.

    Args:
        data: a name in `fluvial.data.SETS`, or the path of an ``.npz`` file with arrays ``x``
            (rows, channels, height, width), uint8 images or float latents of any scale, and
            integer ``label`` (rows,); 30 rows or more.
        patch: side of a patch of the `DiT`.
        width: of the `DiT`.
        depth: of the `DiT`.
        heads: of the `DiT`.
        steps: optimiser steps of the MeanFlow arm. Flow matching takes as many as fit into the
            same time, by step times measured at the start of the run.
        batch_size: of both arms.
        betas: of AdamW, in both arms.
        ema: decay of the averaged weights of both arms.
        warmup: steps over which the learning rates rise.
        decay: share of the steps over which they fall.
        t_mean: of the logit-normal law of the times, in both arms.
        t_std: of the same.
        ratio: share of rows with r < t in the MeanFlow arm.
        p: power of MeanFlow's adaptive weight.
        c: constant of MeanFlow's adaptive weight.
        omega: guidance of MeanFlow in training; omega = 1 with kappa = 0 for none.
        kappa: the second knob of the guidance.
        lr: learning rates of MeanFlow; several are tried on validation images first.
        rival_lr: learning rates of flow matching, in the same way.
        search_share: share of ``steps`` that a learning rate is tried for.
        seeds: one training of each arm a seed.
        samples: images that a distance is measured on, at most as many as are held out.
        classifier_epochs: of the network whose features are compared.
        side_by_side: train the two arms at the same time, each on half of the cores; else in turn.
    """

    data: str = "animals"
    patch: int = 7
    width: int = 128
    depth: int = 3
    heads: int = 4
    steps: int = 1300
    batch_size: int = 64
    betas: tuple[float, float] = (0.9, 0.95)
    ema: float = 0.995
    warmup: int = 50
    decay: float = 0.3
    t_mean: float = -0.4
    t_std: float = 1.0
    ratio: float = 0.5
    p: float = 0.75
    c: float = 1e-3
    omega: float = 1.0
    kappa: float = 0.0
    lr: tuple[float, ...] = (3e-3,)
    rival_lr: tuple[float, ...] = (3e-3,)
    search_share: float = 0.25
    seeds: tuple[int, ...] = (0,)
    samples: int = 10_000
    classifier_epochs: int = 6
    side_by_side: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "rival_lr", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} needs at least one value")
        if self.samples < 2:
            raise ValueError(f"samples must be at least 2, got {self.samples}")


PRESETS: dict[str, Config] = {
    "smoke": Config(
        data="digits",
        patch=14,
        width=16,
        depth=1,
        heads=2,
        steps=3,
        batch_size=16,
        samples=60,
        classifier_epochs=1,
        side_by_side=False,
    ),
    # the learning rates that the record chose on validation images
    "laptop": Config(samples=500, lr=(6e-3,), rival_lr=(6e-3,)),
    "record": Config(
        steps=2600, seeds=(0, 1, 2), lr=(1.5e-3, 3e-3, 6e-3), rival_lr=(1.5e-3, 3e-3, 6e-3)
    ),
    # DiT-B/4 on 32x32x4 latents of ImageNet-256, as published: 80 epochs of 1,281,167 images
    "full": Config(
        data="imagenet-latents.npz",
        patch=4,
        width=768,
        depth=12,
        heads=12,
        steps=400_000,
        batch_size=256,
        ema=0.9999,
        warmup=0,
        decay=0.0,
        ratio=0.25,
        p=1.0,
        c=1e-2,
        kappa=0.5,
        lr=(1e-4,),
        rival_lr=(1e-4,),
        samples=50_000,
        side_by_side=False,
    ),
}


def build(config: Config, arm: Arm, shape: Sequence[int], num_classes: int, seed: int) -> MeanFlow:
    """The model of an arm: both have the same network and the same initial weights."""
    channels, height, width = shape
    network = DiT(
        size=(height, width),
        channels=channels,
        patch=config.patch,
        width=config.width,
        depth=config.depth,
        heads=config.heads,
        num_classes=num_classes,
        seed=seed,
    )
    law = LogitNormal(config.t_mean, config.t_std)
    if arm == "flow matching":
        return MeanFlow(network, times=TimePairs(law, ratio=0.0), p=0.0)
    guided = (config.omega, config.kappa) != (1.0, 0.0)
    return MeanFlow(
        network,
        times=TimePairs(law, ratio=config.ratio),
        p=config.p,
        c=config.c,
        guidance=Guidance(config.omega, config.kappa) if guided else None,
    )


def run(
    config: Config, preset: str, out: Path, *, force: bool = False, progress: bool = True
) -> Report:
    """Run the claim into the folder ``out``; go on where an interrupted run of it stopped.

    Raises:
        FileExistsError: ``out`` holds something else, or a finished run; see `open_run`.
        FileNotFoundError: the data is a file that is not there.
    """
    data = _read(config.data)
    run = _ClaimRun(config, open_run(out, preset, config, force=force), progress)
    rates = zip_longest(config.lr, config.rival_lr)
    for candidates in rates if max(len(config.lr), len(config.rival_lr)) > 1 else ():
        run.each("search", [(arm, lr) for arm, lr in zip(ARMS, candidates, strict=True)])
    best = {arm: run.best_lr(arm) for arm in ARMS}
    for seed in config.seeds:
        run.each("distances", [(arm, best[arm], seed) for arm in ARMS])
    scores: Scores = {
        arm: {seed: run.distances(arm, best[arm], seed) for seed in config.seeds} for arm in ARMS
    }
    one = {seed: scores["meanflow"][seed][1].estimate for seed in config.seeds}
    comparisons = [
        Comparison(
            f"log Fréchet distance of flow matching in {count} Euler step{'s' * (count > 1)}, less "
            "that of MeanFlow in 1",
            [math.log(scores["flow matching"][seed][count].estimate / one[seed]) for seed in one],
            MARGIN,
        )
        for count in RIVAL_STEPS
    ]
    report = Report(
        system=SYSTEM,
        claim=CLAIM,
        preset=preset,
        config=config,
        comparisons=comparisons,
        table=run.table(scores),
        data={
            **data.provenance,
            **{f"{name} images": str(len(x)) for name, (x, _) in data.parts.items()},
        },
        seconds=run.spent(),
        notes=run.notes(),
    )
    run.draw(scores)
    shutil.copyfile(run.folder("meanflow", config.seeds[0]) / MODEL, out / MODEL)
    write_report(report, out)
    return report


class _ClaimRun(Resumable[Config]):
    """The steps of a run. Each leaves a file in ``out``, and is skipped where that file is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data = _read(self.config.data)
        self.classifier = self._classifier()
        self.step_seconds: dict[str, float] = self.stored("step_seconds.json", self._time_steps)
        ours, rival = (self.step_seconds[arm] for arm in ARMS)
        self.steps: dict[str, int] = {
            "meanflow": self.config.steps,
            "flow matching": round(self.config.steps * max(1.0, ours / rival)),
        }

    def _classifier(self) -> ConvFeatures:
        path = self.out / "classifier.safetensors"
        images, labels = self.data.parts["train"]
        if path.exists():
            network = ConvFeatures(images.shape[1], self.data.num_classes)
            network.load_state_dict(load_model(path)[0])
            return network.eval()
        network = train_classifier(
            images / self.data.bound,
            labels,
            num_classes=self.data.num_classes,
            epochs=self.config.classifier_epochs,
            progress=self.progress,
        )
        save_model(path, network.state_dict(), {"system": "classifier"})
        return network

    def _features(self, images: Tensor) -> Tensor:
        bound = self.data.bound
        return self.classifier.features(images.clamp(-bound, bound) / bound)

    def _time_steps(self) -> dict[str, float]:
        """Median seconds of a training step of each arm, measured in turn."""
        images, labels = (part[: self.config.batch_size] for part in self.data.parts["train"])
        models = {arm: self._build(arm, 0) for arm in ARMS}
        times: dict[str, list[float]] = {arm: [] for arm in ARMS}
        with threads(threads_each(len(ARMS) if self.config.side_by_side else 1)):
            for k in range(TIMED_STEPS):
                for arm, model in models.items():
                    begin = time.perf_counter()
                    model.loss(images, labels, noise=KeyedNoise(k))["loss"].backward()
                    times[arm].append(time.perf_counter() - begin)
                    model.zero_grad()
        return {arm: statistics.median(values) for arm, values in times.items()}

    def _build(self, arm: Arm, seed: int) -> MeanFlow:
        shape = self.data.parts["train"][0].shape[1:]
        return build(self.config, arm, shape, self.data.num_classes, seed)

    def folder(self, arm: Arm, seed: int) -> Path:
        return self.out / f"{arm.replace(' ', '-')}-{seed}"

    def _fit(self, arm: Arm, seed: int, lr: float, steps: int, folder: Path) -> MeanFlow:
        if self.progress:
            print(f"{arm}: seed {seed}, learning rate {lr:g}, {steps} steps", file=sys.stderr)
        return self._build(arm, seed).fit(
            *self.data.parts["train"],
            steps=steps,
            batch_size=self.config.batch_size,
            lr=lr,
            betas=self.config.betas,
            ema=self.config.ema,
            warmup=self.config.warmup,
            schedule="linear" if self.config.decay else "constant",
            decay=self.config.decay or 1.0,
            seed=seed,
            out=folder,
            progress=self.progress,
        )

    def _candidates(self, arm: Arm) -> tuple[float, ...]:
        return self.config.lr if arm == "meanflow" else self.config.rival_lr

    def search(self, arm: Arm, lr: float | None) -> float:
        """Mean log distance to the validation images after a shorter training; 0 if no choice."""
        if lr is None or len(self._candidates(arm)) == 1:
            return 0.0
        folder = self.out / "search" / f"{arm.replace(' ', '-')}-{lr:g}"

        def measure() -> float:
            steps = max(1, round(self.config.search_share * self.steps[arm]))
            model = self._fit(arm, SEARCH_SEED, lr, steps, folder)
            counts = (1,) if arm == "meanflow" else RIVAL_STEPS
            return statistics.fmean(
                math.log(self._distance(model, arm, count, "validation", SEARCH_SEED).estimate)
                for count in counts
            )

        return float(self.stored(f"search/{folder.name}.json", measure))

    def best_lr(self, arm: Arm) -> float:
        """The learning rate with the lowest score of `search`."""
        return min(self._candidates(arm), key=lambda lr: self.search(arm, lr))

    def distances(self, arm: Arm, lr: float, seed: int) -> dict[int, Interval]:
        """Fréchet distance to held-out images, by the number of evaluations."""
        folder = self.folder(arm, seed)

        def measure() -> dict[int, Interval]:
            model = self._fit(arm, seed, lr, self.steps[arm], folder)
            model.save(folder / MODEL, overwrite=True)
            return {
                count: self._distance(model, arm, count, "test", seed) for count in EVALUATIONS[arm]
            }

        stored = self.stored(f"{folder.name}/distances.json", measure)
        return {int(count): Interval(*values) for count, values in stored.items()}

    def _distance(self, model: MeanFlow, arm: Arm, count: int, part: str, seed: int) -> Interval:
        """Samples with the labels of a part against its images, as many of each."""
        images, labels = (rows[: self.config.samples] for rows in self.data.parts[part])
        samples = self._samples(model, arm, count, labels, seed)
        return bootstrap_interval(frechet_distance, self._features(samples), self._features(images))

    def _samples(self, model: MeanFlow, arm: Arm, count: int, labels: Tensor, seed: int) -> Tensor:
        return model.sample(
            len(labels),
            sampler=Euler() if arm == "flow matching" else None,
            steps=count,
            label=labels,
            noise=KeyedNoise(SAMPLE_SEED).at(seed),
        )

    def floor(self) -> Interval:
        """The distance between two sets of real images that no arm was trained on."""

        def measure() -> Interval:
            # as many of each as of samples, or as many as there are
            images = [
                self.data.parts[part][0][: self.config.samples] for part in ("validation", "test")
            ]
            return bootstrap_interval(frechet_distance, *map(self._features, images))

        return Interval(*self.stored("floor.json", measure))

    def accuracy(self) -> float:
        """Of the classifier, on held-out images."""
        images, labels = self.data.parts["test"]
        return self.classifier.accuracy(images / self.data.bound, labels)

    def table(self, scores: Scores) -> list[dict[str, Any]]:
        """One row an arm and number of evaluations; means over seeds."""
        rows = []
        for arm in ARMS:
            for count in EVALUATIONS[arm]:
                over = [scores[arm][seed][count] for seed in self.config.seeds]
                rows.append(_row(arm, count, self.steps[arm], over))
        return [*rows, _row("real images (floor)", None, None, [self.floor()])]

    def notes(self) -> list[str]:
        """What has to be said beside the table."""
        test, validation = (len(self.data.parts[part][0]) for part in ("test", "validation"))
        samples = min(self.config.samples, test)
        best = "; ".join(f"{arm} {self.best_lr(arm):g}" for arm in ARMS)
        seconds = "; ".join(f"{arm} {value:.3f} s" for arm, value in self.step_seconds.items())
        return [
            f"Distances between {samples} samples and {samples} held-out images, in 64 features of "
            f"a classifier trained on the training images (held-out accuracy "
            f"{self.accuracy():.3f}); the floor is between {min(samples, validation)} validation "
            f"and {samples} held-out images.",
            "Low and high are the mean ends of the seeds' 95 % bootstrap intervals.",
            f"A training step, measured in turn: {seconds}. Steps of each arm: "
            f"{'; '.join(f'{arm} {count}' for arm, count in self.steps.items())}.",
            f"Learning rates: {best}, each chosen on validation images from "
            f"{len(self.config.lr)} and {len(self.config.rival_lr)}.",
        ]

    def draw(self, scores: Scores) -> None:
        """Samples of both arms, and the distance against the number of evaluations."""
        seed = self.config.seeds[0]
        models = {arm: MeanFlow.load(self.folder(arm, seed) / MODEL) for arm in ARMS}
        labels = torch.arange(SHOWN) % self.data.num_classes
        rows = [
            (
                f"{arm}\n{count} evaluation{'s' * (count > 1)}",
                self._samples(models[arm], arm, count, labels, seed),
            )
            for arm, count in PICTURED
        ]
        images, classes = self.data.parts["test"]
        rows.append(("held-out\nimages", torch.stack([images[classes == k][0] for k in labels])))
        curves: dict[str, dict[int, float]] = {
            arm: {
                count: statistics.fmean(scores[arm][seed][count].estimate for seed in scores[arm])
                for count in EVALUATIONS[arm]
            }
            for arm in ARMS
        }
        samples_and_curves(self.out / "figure.png", rows, curves, self.floor().estimate)
        # one class a row, in one evaluation
        classes = torch.arange(min(10, self.data.num_classes)).repeat_interleave(SHOWN)
        samples = self._samples(models["meanflow"], "meanflow", 1, classes, seed)
        image_grid(self.out / "samples.png", samples, SHOWN)


def _row(
    arm: str, count: int | None, steps: int | None, over: Sequence[Interval]
) -> dict[str, Any]:
    return {
        "arm": arm,
        "evaluations": count,
        "training steps": steps,
        "Fréchet distance": statistics.fmean(part.estimate for part in over),
        "low": statistics.fmean(part.low for part in over),
        "high": statistics.fmean(part.high for part in over),
    }


@dataclass(frozen=True)
class _Data:
    """Floating images by part, with their labels."""

    parts: dict[str, tuple[Tensor, Tensor]]
    num_classes: int
    provenance: dict[str, str]

    @property
    def bound(self) -> float:
        """The largest absolute value of the training data, at least 1."""
        return max(1.0, float(self.parts["train"][0].abs().max()))


@functools.cache
def _read(name: str) -> _Data:
    if name in SETS:
        data = SETS[name]()
        provenance = {"name": data.name, "source": data.source, "licence": data.licence}
        parts = {
            part: (scaled(rows.x), rows.label)
            for part, rows in data.split().items()
            if rows.label is not None  # all of these sets have labels
        }
        return _Data(parts, len(data.label_names), provenance)
    path = Path(name)
    if not path.is_file():
        raise FileNotFoundError(
            f"data: there is no image set {name!r} ({', '.join(SETS)}) and no such .npz file"
        )
    try:
        with np.load(path) as arrays:
            x, label = arrays["x"], arrays["label"]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(
            f"data: {path} is not an .npz file with arrays x and label ({error})"
        ) from error
    if x.ndim != 4 or label.shape != (len(x),) or len(x) < 30:
        raise ValueError(
            "data: need x (rows, channels, height, width) and label (rows,) with 30 rows or more, "
            f"got {x.shape} and {label.shape}"
        )
    if not np.issubdtype(label.dtype, np.integer):
        raise ValueError(f"data: label must hold integers, got {label.dtype}")
    if not np.isfinite(x).all():
        raise ValueError("data: x holds values that are not finite")
    # classes that occur, numbered from 0
    names, label = np.unique(label, return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"data: need two classes or more, label holds only {names[0]}")
    x, label = torch.from_numpy(x), torch.from_numpy(label)
    x = scaled(x) if x.dtype == torch.uint8 else x.float()
    order = KeyedNoise(0).uniform(torch.empty(len(x), dtype=torch.float64)).argsort()
    held = len(x) // 10
    rows = {
        "train": order[2 * held :],
        "validation": order[held : 2 * held],
        "test": order[:held],
    }
    parts = {part: (x[chosen], label[chosen]) for part, chosen in rows.items()}
    return _Data(parts, len(names), {"name": path.name, "source": "the user's file"})
