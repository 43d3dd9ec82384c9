"""How `fluvial train conformal-masks` makes a restorer with masks of any images."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.data import DataSet, read, to_uint8
from fluvial.data.write import image_grid
from fluvial.training.loop import Training
from fluvial.training.processes import is_main
from fluvial.training.recipe import training_of
from fluvial.trust.conformal_masks.flow import SYSTEM, EnlargingNet, RestorationFlow
from fluvial.trust.conformal_masks.mask import LEVELS
from fluvial.trust.conformal_masks.picture import Panel, draw_masks

PREVIEW = KeyedNoise(1)
"""Of the restorations that are shown."""
SHOWN = 8
"""Images in the preview."""
PICTURED = 4
"""Images in the picture of the masks."""
MEASURED = 200
"""Held-out images that the masks are measured on, at most."""


@dataclass(frozen=True)
class Recipe:
    """A `RestorationFlow` of a user's images: a part of them trains it, another calibrates it.

    Args:
        size: height and width to bring images to, or one number for both, multiples of the factor;
            by default the size they have, if all have the same. The guarantee is for images of
            this size: larger ones are restored in tiles.
        channels: 1 for grey, 3 for colour; by default 3, unless every image is grey.
        resize: how images of another size are brought to it: crop (the largest centred part), pad
            (the whole image on black) or stretch.
        skip_bad: leave out images that cannot be read, and list them in the notes.
        validation: share of the images that is held out: the loss on them is measured while
            training, and the masks at the end.
        calibration: share of the images that the masks are calibrated on.
        factor: of the enlargement.
        width: channels of the network.
        depth: residual blocks of the network.
        levels: of the masks.
        kernel: side of the squares over which score and error are averaged.
        draws: restorations that an image's score is made of.
        simulation: steps of a restoration, of two network calls each.
        steps: optimiser steps.
        batch_size: images a step, over all processes and parts.
        accumulation: parts a batch is computed in, one after another, to save memory.
        lr: peak learning rate of AdamW.
        betas: of AdamW.
        weight_decay: of AdamW.
        warmup: steps over which the learning rate rises from 0.
        schedule: how it falls: constant (not at all), linear or cosine.
        decay: share of the steps over which it falls.
        clip: largest norm of the gradient.
        precision: of the network's arithmetic: no (float32), bf16, or fp16 on a GPU.
        ema: decays of the averages of the weights; the best on the held-out images is the model.
        checkpoint_every: steps between checkpoints, from which a run goes on.
        keep: checkpoints kept, the latest ones.
        validate_every: steps between measurements on held-out images.
        sample_every: steps between previews in RUN/samples.
        seed: of the initial weights, the parts, the order of the images and the noise.

    Raises:
        ValueError: a value is out of its range.
    """

    size: int | tuple[int, int] | None = None
    channels: int | None = None
    resize: Literal["crop", "pad", "stretch"] = "crop"
    skip_bad: bool = False
    validation: float = 0.1
    calibration: float = 0.2
    factor: int = 4
    width: int = 96
    depth: int = 4
    levels: tuple[float, ...] = LEVELS
    kernel: int = 5
    draws: int = 10
    simulation: int = 4
    steps: int = 2_000
    batch_size: int = 64
    accumulation: int = 1
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: int = 50
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    decay: float = 1.0
    clip: float | None = 1.0
    precision: Literal["no", "bf16", "fp16"] = "no"
    ema: tuple[float, ...] = (0.99, 0.999)
    checkpoint_every: int = 250
    keep: int = 1
    validate_every: int = 250
    sample_every: int | None = 1_000
    seed: int = 0

    GROUPS: ClassVar[Mapping[str, str]] = {
        "reading": "size",
        "network": "factor",
        "method": "levels",
        "training": "steps",
    }
    """The first field of each group of hyper-parameters."""

    def __post_init__(self) -> None:
        for name in ("validation", "calibration"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be a share in (0, 1), got {getattr(self, name)}")
        if self.validation + self.calibration >= 1:
            raise ValueError(
                "validation and calibration leave nothing to train on, together they are "
                f"{self.validation + self.calibration:g}"
            )
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels must be 1 for grey or 3 for colour, got {self.channels}")
        for name in ("factor", "width", "depth", "kernel", "simulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.draws < 2:
            raise ValueError(f"draws must be at least 2, got {self.draws}")
        if not self.levels or not all(0 < level < math.inf for level in self.levels):
            raise ValueError(f"levels must be one positive number or more, got {self.levels}")
        if len(set(self.levels)) < len(self.levels):
            raise ValueError(f"levels must differ, got {self.levels}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        _ = self.training  # whose own checks speak

    @property
    def training(self) -> Training:
        """How the loop trains."""
        return training_of(self)

    def prepare(self, source: str | os.PathLike[str], *, progress: bool = True) -> Job:
        """Read the images and build the model: what is wrong with either is found here.

        Args:
            source: of images; see `fluvial.data.read`.
            progress: show progress bars.

        Raises:
            As `fluvial.data.read` and `fluvial.data.DataSet.split`; ValueError if there are no
            images, the factor does not fit their size, or a level is above the bound of the error,
            1 for grey images and 3 for colour.
        """
        data = read(
            source,
            size=self.size,
            channels=self.channels,
            resize=self.resize,
            skip_bad=self.skip_bad,
            progress=progress,
        )
        if data.format.kind != "images":
            raise ValueError(f"{data.name} holds {data.format.kind}; what is restored are images")
        data = data.unlabelled
        channels, height, width = data.format.shape
        model = RestorationFlow(
            EnlargingNet(
                channels=channels,
                factor=self.factor,
                width=self.width,
                blocks=self.depth,
                seed=self.seed,
            ),
            factor=self.factor,
            steps=self.simulation,
            draws=self.draws,
            kernel=self.kernel,
            format=data.format,
        )
        bound = model.mask.error.bound
        if max(self.levels) > bound:
            raise ValueError(
                f"levels must be at most the bound {bound:g} of the error, got {max(self.levels):g}"
            )
        try:
            parts = data.split(
                train=1 - self.validation - self.calibration,
                validation=self.validation,
                test=self.calibration,
                seed=self.seed,
            )
        except ValueError as error:
            raise ValueError(f"{str(error).partition(';')[0]}; more images are needed") from error
        recipe = replace(self, size=(height, width), channels=channels)
        return Job(recipe, model, data, parts["train"], parts["validation"], parts["test"])


@dataclass
class Job:
    """A restorer and the images it is made of; see `fluvial.training.run.Job`.

    Args:
        recipe: with a value for every hyper-parameter that was left to the data.
        model: untrained.
        data: all of it.
        train, held, calibration: its parts.
    """

    recipe: Recipe
    model: RestorationFlow
    data: DataSet
    train: DataSet
    held: DataSet
    calibration: DataSet
    system: str = SYSTEM

    @property
    def about(self) -> dict[str, Any]:
        about = self.train.about(
            train=len(self.train), validation=len(self.held), calibration=len(self.calibration)
        )
        return {**about, "notes": [*self.train.notes, *self._shortage()]}

    @property
    def rows(self) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        return {"x": self.train.x}, {"x": self.held.x}

    def _shortage(self) -> list[str]:
        """What to know of levels for which there are too few calibration images."""
        n, bound = len(self.calibration), self.model.mask.error.bound
        return [
            f"{n} images to calibrate on: every mask of level {level:g} will be empty, for which "
            # less a rounding error of the quotient
            f"{math.ceil(bound / level * (1 - 1e-12)) - 1:,} or more are needed"
            for level in self.recipe.levels
            if bound / (n + 1) > level
        ]

    def fit(self, out: Path, *, progress: bool, trackers: Sequence[str] = ()) -> None:
        self.model.fit(
            self.train.x,
            validation=self.held.x,
            out=out,
            progress=progress,
            trackers=trackers,
            preview=self.preview,
            **asdict(self.recipe.training),
        )
        self.model.calibrate(self.calibration.x, levels=self.recipe.levels, progress=progress)
        if is_main():
            self.picture(out / "masks.png")

    def preview(self, path: Path) -> None:
        """Images enlarged smoothly, as the model restores them, and as they are, row by row."""
        clean = self.model.pixels(self.held.x[:SHOWN])
        x = self.model.file(clean)
        smooth = self.model.enlarge(x).clamp(0, 1)
        restored = self.model.restorations(x, PREVIEW)
        if is_main():
            rows = torch.cat([smooth, restored, clean]).cpu()
            image_grid(path.with_suffix(".png"), to_uint8(2 * rows - 1), len(clean))

    def picture(self, path: Path) -> None:
        """Held-out images with their masks and true errors."""
        levels = sorted(self.recipe.levels)
        level = levels[len(levels) // 2]
        panels = []
        for k, clean in enumerate(self.model.pixels(self.held.x[:PICTURED]).cpu()):
            x = self.model.file(clean)
            image, trusted = self.model.restore(x, level, noise=PREVIEW.at(k))
            error = self.model.mask.error(clean, image)
            panels.append(Panel(image, trusted, degraded=x, true=clean, error=error))
        draw_masks(path, panels, level)

    def measure(self) -> list[dict[str, Any]]:
        """Of the masks on held-out images: the largest error inside, and the trusted share."""
        clean = self.model.pixels(self.held.x[:MEASURED])
        result = []
        for found in self.model.mask.evaluate(clean, self.model.file):
            of = f"{found.n} held-out images, calibrated on {len(self.calibration)}"
            result += [
                {
                    "name": f"largest error inside the mask, level {found.level:g}",
                    "value": found.mean,
                    "floor": None,
                    "what": f"mean over {of}; {100 * found.over:.0f} % of them are over the level",
                },
                {
                    "name": f"trusted share, level {found.level:g}",
                    "value": found.trusted,
                    "floor": None,
                    "what": f"of the pixels, mean over {of}",
                },
            ]
        return result
