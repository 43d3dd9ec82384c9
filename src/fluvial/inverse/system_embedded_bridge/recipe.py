"""How `fluvial train system-embedded-bridge` makes a restorer of any images: hyper-parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.data import DataSet, read
from fluvial.data.read import refuse_large
from fluvial.data.write import image_grid
from fluvial.inverse.system_embedded_bridge.bridge import SYSTEM, SystemEmbeddedBridge
from fluvial.inverse.system_embedded_bridge.tasks import Name, Task
from fluvial.metrics import psnr
from fluvial.networks import UNet
from fluvial.training.loop import Training
from fluvial.training.processes import is_main
from fluvial.training.recipe import training_of

MEASURED = 64
"""Held-out images that are restored at the end, at most."""
EXAMPLES = 16
"""Their measurements that are kept in the model, for `fluvial sample`."""
PREVIEW = KeyedNoise(1)
"""Of what is shown and measured."""
SHOWN = 8
"""Images in a row of a preview."""


@dataclass(frozen=True)
class Recipe:
    """A restorer of a user's images for one measurement system, with a `UNet`.

    Args:
        size: height and width to bring images to, or one number for both; by default the size they
            have, if all have the same, and no side is above 128.
        channels: 1 for grey, 3 for colour; by default 3, unless every image is grey.
        resize: how images of another size are brought to it: crop (the largest centred part), pad
            (the whole image on black) or stretch.
        skip_bad: leave out images that cannot be read, and list them in the notes.
        validation: share of the images that is held out, at most 1,000: the loss on them chooses
            among the averages of the weights, and some are restored. 0 for none.
        width: of the network's first level; the two below have twice as many channels.
        depth: residual blocks a level.
        task: what is measured of an image: inpainting (all but a box in the middle), pooling (means
            of square blocks), bicubic (a smaller image), deblurring (a blurred one), fourier
            (columns of the spectrum) or radon (sums along rays).
        amount: how much: share of each side that is hidden (inpainting, 0.5 by default), side of a
            block (pooling, 2), by how much smaller (bicubic, 2), deviation of the blur in pixels
            (deblurring, 1.5), share of the columns (fourier, 0.4), number of angles (radon, 16).
        obs_noise: standard deviation of the measurement's noise, in units in which images lie in
            [-1, 1].
        process: what is not measured comes from: sb (a bridge that ends at nothing), vp or ve
            (noise). sb stays nearest to what is measured, vp and ve vary more.
        simulation: network calls of a restoration.
        loss: absolute learns medians, squared means.
        steps: optimiser steps.
        batch_size: rows a step, over all processes and parts.
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
        validate_every: steps between measurements on held-out images; by default a tenth of the
            steps, at least 100.
        sample_every: steps between previews in RUN/samples; by default a fifth of the steps, at
            least 100.
        seed: of the initial weights, the held-out images, the order of the images and the noise.

    Raises:
        ValueError: a value is out of its range.
    """

    size: int | tuple[int, int] | None = None
    channels: int | None = None
    resize: Literal["crop", "pad", "stretch"] = "crop"
    skip_bad: bool = False
    validation: float = 0.1
    width: int = 32
    depth: int = 1
    task: Name = "inpainting"
    amount: float | None = None
    obs_noise: float = 0.0
    process: Literal["sb", "vp", "ve"] = "sb"
    simulation: int = 50
    loss: Literal["absolute", "squared"] = "absolute"
    steps: int = 2_000
    batch_size: int = 32
    accumulation: int = 1
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    warmup: int = 50
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    decay: float = 1.0
    clip: float | None = 1.0
    precision: Literal["no", "bf16", "fp16"] = "no"
    ema: tuple[float, ...] = (0.99, 0.999)
    checkpoint_every: int = 250
    keep: int = 1
    validate_every: int | None = None
    sample_every: int | None = None
    seed: int = 0

    GROUPS: ClassVar[Mapping[str, str]] = {
        "reading": "size",
        "network": "width",
        "method": "task",
        "training": "steps",
    }
    """The first field of each group of hyper-parameters."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be a share in [0, 1), got {self.validation}")
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels must be 1 for grey or 3 for colour, got {self.channels}")
        for name in ("width", "depth", "simulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.process not in ("sb", "vp", "ve"):
            raise ValueError(f"process must be one of sb, vp, ve, got {self.process!r}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        # whose own checks speak
        _ = self.training, self.system

    @property
    def training(self) -> Training:
        """How the loop trains."""
        return training_of(self)

    @property
    def system(self) -> Task:
        """What is measured."""
        return Task(self.task, self.amount, self.obs_noise)

    def prepare(self, source: str | os.PathLike[str], *, progress: bool = True) -> Job:
        """Read the images and build the model: what is wrong with either is found here.

        Args:
            source: of images; see `fluvial.data.read`.
            progress: show progress bars.

        Raises:
            As `fluvial.data.read` and `fluvial.data.DataSet.hold_out`; ValueError if there are no
            images, they are large and no size was asked for, or the task does not fit their size.
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
        if self.size is None:
            refuse_large(data)
        data = data.unlabelled
        channels, height, width = data.format.shape
        system = self.system
        training = self.training
        recipe = replace(
            self,
            size=height if height == width else (height, width),
            channels=channels,
            amount=system.amount,
            validate_every=training.validate_every,
            sample_every=training.sample_every,
        )
        try:
            model = recipe._model(data, system)
        except ValueError as error:
            raise ValueError(f"amount: {error}") from error
        train, held = data.hold_out(self.validation, seed=self.seed)
        return Job(recipe, model, data, train, held)

    def _model(self, data: DataSet, system: Task) -> SystemEmbeddedBridge:
        channels, height, width = data.format.shape
        network = UNet(
            size=(height + -height % 4, width + -width % 4),  # what is halved twice; it is padded
            channels=2 * channels,
            width=self.width,
            blocks=self.depth,
            seed=self.seed,
        )
        return SystemEmbeddedBridge(
            network,
            self.process,
            steps=self.simulation,
            loss=self.loss,
            format=data.format,
            task=system,
        )


@dataclass
class Job:
    """A restorer and the images it is trained on; see `fluvial.training.run.Job`.

    Args:
        recipe: with a value for every hyper-parameter that was left to the data.
        model: untrained.
        data: all of it.
        train, held: its parts; None where no images are held out.
    """

    recipe: Recipe
    model: SystemEmbeddedBridge
    data: DataSet
    train: DataSet
    held: DataSet | None
    system: str = SYSTEM

    @property
    def about(self) -> dict[str, Any]:
        held = {} if self.held is None else {"validation": len(self.held)}
        return self.train.about(train=len(self.train), **held)

    @property
    def rows(self) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        return {"x": self.train.x}, None if self.held is None else {"x": self.held.x}

    @property
    def shown(self) -> Tensor:
        """Images that are restored: held out, if any are."""
        return (self.train if self.held is None else self.held).x[:MEASURED]

    def fit(self, out: Path, *, progress: bool, trackers: Sequence[str] = ()) -> None:
        self.model.fit(
            self.train.x,
            validation=None if self.held is None else self.held.x,
            out=out,
            progress=progress,
            trackers=trackers,
            preview=self.preview,
            **asdict(self.recipe.training),
        )
        self.model.examples = self.model.measure(self.shown[:EXAMPLES], noise=PREVIEW).cpu()

    def preview(self, path: Path) -> None:
        """What is measured, brought back by A^+; restored; and as it was: row by row."""
        clean = self.shown[:SHOWN]
        measured, restored = self._restored(clean)
        if is_main():
            rows = torch.cat([measured, restored, clean.cpu()])
            image_grid(path.with_suffix(".png"), rows, len(clean))

    def measure(self) -> list[dict[str, Any]]:
        """PSNR of restored held-out images, and of their measurements, brought back."""
        if self.held is None:
            return []
        clean = self.shown
        measured, restored = self._restored(clean)
        return [
            {
                "name": f"PSNR of {name} images, dB",
                "value": float(psnr(x, clean.cpu(), data_range=255).clamp(max=100).mean()),
                "floor": None,
                "what": f"mean over {len(clean)} held-out images, {what}",
            }
            for name, x, what in (
                ("restored", restored, f"in {self.recipe.simulation} network calls"),
                ("measured", measured, "by the pseudo-inverse alone"),
            )
        ]

    def _restored(self, clean: Tensor) -> tuple[Tensor, Tensor]:
        """(A^+ y, restored), uint8, on the CPU."""
        y = self.model.measure(clean, noise=PREVIEW)
        back = cast(Any, self.model.operator).A_dagger(y)
        format = self.data.format
        return format.decode(back).cpu(), self.model.restore(y, noise=PREVIEW).cpu()
