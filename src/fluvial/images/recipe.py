"""How `fluvial train meanflow` makes a model of any data: every hyper-parameter, and the steps."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.core.time import LogitNormal
from fluvial.data import DataSet, read
from fluvial.data.dataset import HELD_OUT
from fluvial.data.read import refuse_large
from fluvial.data.write import image_grid, scatter
from fluvial.images.meanflow import Guidance, MeanFlow, TimePairs
from fluvial.metrics import frechet_distance
from fluvial.networks import MLP, DiT
from fluvial.training.loop import Training
from fluvial.training.processes import is_main, sample_across
from fluvial.training.recipe import absolute, training_of

PATCH = 8
"""Side in pixels that a patch is chosen near to."""
PATCHES = range(16, 65)
"""Of an image, if the patch is chosen for it: fewer are blind, more take long."""
RATE = 0.384
"""Learning rate times width: 0.003 at width 128, where it served 28 x 28 images best."""
COMPONENTS = 32
"""Principal components in which samples are compared with held-out rows."""
PREVIEW = KeyedNoise(1)
"""Of the samples that are drawn while training: the same starts at every step of every run."""
SHOWN = 8
"""Images in a row of a preview, and rows."""
DOTS = 1_000
"""Samples in the preview of data that are no images."""


@dataclass(frozen=True)
class Recipe:
    """A MeanFlow of a user's data: a `DiT` for images and for arrays (rows, channels, height,
    width), an `MLP` for tables and other arrays.

    Args:
        size: height and width to bring images to, or one number for both; by default the size they
            have, if all have the same, and no side is above 128.
        channels: 1 for grey, 3 for colour; by default 3, unless every image is grey.
        resize: how images of another size are brought to it: crop (the largest centred part), pad
            (the whole image on black) or stretch.
        label: where the classes are: a column of a table, an array of an .npz file, the path of an
            .npy file of labels for an .npy file. The classes of images are their folders.
        skip_bad: leave out images that cannot be read, and list them in the notes.
        validation: share of the rows that is held out, at most 1,000 rows. The loss on them is
            measured while training, and chooses among the averages of the weights. 0 for none.
        patch: side of a patch of the transformer, which divides height and width; by default the
            one nearest to 8 that makes 16 to 64 patches of an image. Half the patch makes four
            times as many, for finer images, and takes four times as long.
        width: of the network; by default 128 of a transformer, 256 of an MLP.
        depth: blocks of the network.
        heads: attention heads of the transformer; they divide the width.
        ratio: share of rows trained on jumps between two times; the others are flow matching.
        t_mean: mean of the normal whose logistic function is the law of the times.
        t_std: its standard deviation.
        p: power of the adaptive weight; 0 is the plain squared error.
        c: constant of the adaptive weight.
        tangent: the velocity along which the network is differentiated: the one it learns (target),
            or its own (boundary, a network call more).
        omega: guidance towards the label, learnt in training; 1 with kappa 0 is none. The scale is
            omega / (1 - kappa), and 2 or 3 makes samples more typical and less varied.
        kappa: second knob of the guidance, the share of the network's own velocity; more than 0
            costs about half a step more.
        drop: share of the labels left out, so that the model can also sample without one.
        steps: optimiser steps.
        batch_size: rows a step, over all processes and parts.
        accumulation: parts a batch is computed in, one after another, to save memory.
        lr: peak learning rate of AdamW; by default 0.003 at width 128, and in inverse proportion to
            the width.
        betas: of AdamW.
        weight_decay: of AdamW.
        warmup: steps over which the learning rate rises from 0.
        schedule: how the learning rate falls over the last steps: constant (not at all; such a
            training can be made longer), linear or cosine.
        decay: share of the steps over which it falls.
        clip: largest norm of the gradient; by default it is not clipped.
        precision: of the network's arithmetic: no (float32), bf16, or fp16 on a GPU.
        ema: decays of the averages of the weights. Every one costs a copy of the weights; the best
            on the held-out rows is the model. Two are the same until step 9 / (1 - the smaller).
        checkpoint_every: steps between checkpoints, from which a run goes on.
        keep: checkpoints kept, the latest ones.
        validate_every: steps between measurements on held-out rows; by default a tenth of the
            steps, at least 100.
        sample_every: steps between previews in RUN/samples; by default a fifth of the steps, at
            least 100.
        seed: of the initial weights, the held-out rows, the order of the rows and the noise.

    Raises:
        ValueError: a value is out of its range.
    """

    size: int | tuple[int, int] | None = None
    channels: int | None = None
    resize: Literal["crop", "pad", "stretch"] = "crop"
    label: str | None = None
    skip_bad: bool = False
    validation: float = 0.1
    patch: int | None = None
    width: int | None = None
    depth: int = 3
    heads: int = 4
    ratio: float = 0.5
    t_mean: float = -0.4
    t_std: float = 1.0
    p: float = 0.75
    c: float = 1e-3
    tangent: Literal["target", "boundary"] = "target"
    omega: float = 1.0
    kappa: float = 0.0
    drop: float = 0.1
    steps: int = 1_500
    batch_size: int = 64
    accumulation: int = 1
    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: int = 50
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    decay: float = 0.3
    clip: float | None = None
    precision: Literal["no", "bf16", "fp16"] = "no"
    ema: tuple[float, ...] = (0.99, 0.999)
    checkpoint_every: int = 250
    keep: int = 1
    validate_every: int | None = None
    sample_every: int | None = None
    seed: int = 0

    GROUPS: ClassVar[Mapping[str, str]] = {
        "reading": "size",
        "network": "patch",
        "method": "ratio",
        "training": "steps",
    }
    """The first field of each group of hyper-parameters."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be a share in [0, 1), got {self.validation}")
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels must be 1 for grey or 3 for colour, got {self.channels}")
        for name in ("patch", "width", "depth", "heads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        # whose own checks speak
        _ = self.training, self.times, self.guidance

    @property
    def training(self) -> Training:
        """How the loop trains."""
        lr = RATE / (self.width or 128) if self.lr is None else self.lr
        return training_of(self, lr=lr)

    @property
    def times(self) -> TimePairs:
        """The law of the times."""
        return TimePairs(LogitNormal(self.t_mean, self.t_std), ratio=self.ratio)

    @property
    def guidance(self) -> Guidance:
        """That of data with labels."""
        return Guidance(self.omega, self.kappa, drop=self.drop)

    def prepare(self, source: str | os.PathLike[str], *, progress: bool = True) -> Job:
        """Read the data and build the model: what is wrong with either is found here.

        Args:
            source: see `fluvial.data.read`.
            progress: show progress bars.

        Raises:
            As `fluvial.data.read` and `fluvial.data.DataSet.split`; ValueError if the patch does
            not fit the size, the heads not the width, or guidance is asked for without labels.
        """
        if self.size is not None:  # known before a folder is read, which may take long
            self._patch_of((self.size, self.size) if isinstance(self.size, int) else self.size)
        data = read(
            source,
            size=self.size,
            channels=self.channels,
            resize=self.resize,
            label=self.label,
            skip_bad=self.skip_bad,
            progress=progress,
        )
        if data.label is None and (self.omega, self.kappa) != (1.0, 0.0):
            raise ValueError("omega and kappa guide towards labels, and these data have none")
        if self.size is None:
            refuse_large(data)
        train, held = data.hold_out(self.validation, seed=self.seed)
        recipe = self._resolved(data)
        return Job(recipe, recipe._model(data), data, train, held)

    def _resolved(self, data: DataSet) -> Recipe:
        """With values for all that are chosen by the data."""
        patch, sides = None, data.format.shape[1:]
        if len(sides) == 2:
            patch = self._patch_of(sides, must=data.format.kind == "images")
        elif self.patch is not None:
            raise ValueError(f"patch is for images, and {data.name} holds none")
        width = self.width or (256 if patch is None else 128)
        sized: dict[str, Any] = {}
        if data.format.kind == "images":
            channels, height, width_ = data.format.shape
            sized = {"size": height if height == width_ else (height, width_), "channels": channels}
        recipe = replace(self, patch=patch, width=width, **sized)
        training = recipe.training
        return replace(
            recipe,
            label=absolute(self.label),
            lr=training.lr,
            validate_every=training.validate_every,
            sample_every=training.sample_every,
        )

    def _patch_of(self, sides: Sequence[int], *, must: bool = True) -> int | None:
        """The patch for events of this height and width, None for a network without patches."""
        shown = " x ".join(map(str, sides))
        patch = self.patch or _patch(sides)
        if patch is None and must:
            near = [max(8, 8 * round(side / 8)) for side in dict.fromkeys(sides)]
            raise ValueError(
                f"patch: none fits images of {shown}, too little divides both sides; bring them to "
                f"multiples of 8, size={near[0] if len(near) == 1 else tuple(near)}"
            )
        if patch is not None and any(side % patch for side in sides):
            fitting = ", ".join(map(str, _divisors(sides)))
            raise ValueError(f"patch {patch} does not divide {shown}; {fitting} would")
        return patch

    def _model(self, data: DataSet) -> MeanFlow:
        shape, classes = data.format.shape, len(data.label_names) if data.label is not None else 0
        width = cast(int, self.width)
        network: DiT | MLP
        if self.patch is None:
            network = MLP(
                shape=shape, width=width, depth=self.depth, num_classes=classes, seed=self.seed
            )
        else:
            network = DiT(
                size=(shape[1], shape[2]),
                channels=shape[0],
                patch=self.patch,
                width=width,
                depth=self.depth,
                heads=self.heads,
                num_classes=classes,
                seed=self.seed,
            )
        return MeanFlow(
            network,
            times=self.times,
            p=self.p,
            c=self.c,
            guidance=self.guidance if classes else None,
            tangent=self.tangent,
            format=data.format,
        )


@dataclass
class Job:
    """A MeanFlow and the data it is trained on; see `fluvial.training.run.Job`.

    Args:
        recipe: with a value for every hyper-parameter that was left to the data.
        model: untrained.
        data: all of it.
        train, held: its parts; None where no rows are held out.
    """

    recipe: Recipe
    model: MeanFlow
    data: DataSet
    train: DataSet
    held: DataSet | None
    system: str = "meanflow"

    @property
    def about(self) -> dict[str, Any]:
        held = {} if self.held is None else {"validation": len(self.held)}
        return self.train.about(train=len(self.train), **held)

    @property
    def rows(self) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        return _rows(self.train), None if self.held is None else _rows(self.held)

    def fit(self, out: Path, *, progress: bool, trackers: Sequence[str] = ()) -> None:
        self.model.fit(
            self.train.x,
            self.train.label,
            validation=None if self.held is None else (self.held.x, self.held.label),
            out=out,
            progress=progress,
            trackers=trackers,
            preview=self.preview,
            **asdict(self.recipe.training),
        )

    def preview(self, path: Path) -> None:
        """Draw samples into ``path`` with the suffix .png, on the main process.

        Images in rows of one class, where there are classes; of other data the first two numbers,
        beside those of training rows.
        """
        shape, classes = self.data.format.shape, len(self.data.label_names)
        num = SHOWN**2 if len(shape) == 3 else min(DOTS, len(self.train))
        label = None if self.train.label is None else self.train.label[:num]
        if label is not None and len(shape) == 3:
            drawn = min(classes, SHOWN)
            label = torch.arange(drawn).repeat_interleave(SHOWN // drawn * SHOWN)
            num = len(label)
        samples = self._sample(num, label, PREVIEW)
        path = path.with_suffix(".png")
        if not is_main():
            return
        if len(shape) != 3:
            decoded = self.data.format.decode(samples)
            scatter(path, self.train.x[:num], decoded, self.data.format.columns)
        elif self.data.format.kind == "images":
            image_grid(path, self.data.format.decode(samples), SHOWN)
        else:  # the first channel, three deviations to either side of the mean
            grey = (samples[:, :1] / 3 + 1) * 127.5
            image_grid(path, grey.round().clamp(0, 255).to(torch.uint8), SHOWN)

    def measure(self) -> list[dict[str, Any]]:
        """The Fréchet distance of samples to the held-out rows, with its floor.

        In the first `COMPONENTS` principal components of training rows, or fewer: a quarter of the
        number of held-out rows. Samples have the labels of the held-out rows, and the floor is the
        distance of as many training rows.
        """
        if self.held is None or len(self.held) < 8:
            return []
        num = len(self.held)
        samples = self._sample(num, self.held.label, PREVIEW).flatten(1).double()
        train, held = (
            self.data.format.encode(part.x[: num + HELD_OUT]).flatten(1).double()
            for part in (self.train, self.held)
        )
        # not of the rows of the floor, which axes made for them would draw apart from the others
        others = train[num:] if len(train) >= 2 * num else train
        mean = others.mean(0)
        axes = torch.linalg.svd(others - mean, full_matrices=False).Vh
        axes = axes[: min(COMPONENTS, num // 4)].T
        there, drawn, floor = ((x - mean) @ axes for x in (held, samples, train[:num]))
        count = axes.shape[1]
        noun = "images" if self.data.format.kind == "images" else "rows"
        return [
            {
                "name": "Fréchet distance",
                "value": frechet_distance(drawn, there),
                "floor": frechet_distance(floor, there),
                "what": f"{num} samples in one step against {num} held-out {noun}, in the first "
                f"{count} principal component{'s' * (count > 1)} of training {noun}; the floor is "
                f"{len(floor)} training {noun} against the same",
            }
        ]

    def _sample(self, num: int, label: Tensor | None, noise: KeyedNoise) -> Tensor:
        """Samples on the CPU, every process drawing its share."""

        def draw(rows: Tensor) -> Tensor:
            part = None if label is None else label[rows]
            return self.model.sample(len(rows), noise=noise.rows(rows), label=part)

        return sample_across(draw, num).cpu()


def _rows(data: DataSet) -> dict[str, Tensor]:
    return {"x": data.x} if data.label is None else {"x": data.x, "label": data.label}


def _patch(sides: Sequence[int]) -> int | None:
    """The side nearest to `PATCH` of those that make as many patches as `PATCHES`, or None.

    An image of fewer pixels than that is cut into its pixels.
    """
    if math.prod(sides) < PATCHES.start:
        return 1
    fitting = [
        patch for patch in _divisors(sides) if math.prod(side // patch for side in sides) in PATCHES
    ]
    return min(fitting, key=lambda patch: abs(patch - PATCH), default=None)


def _divisors(sides: Sequence[int]) -> list[int]:
    common = math.gcd(*sides)
    return [k for k in range(1, common + 1) if common % k == 0]
