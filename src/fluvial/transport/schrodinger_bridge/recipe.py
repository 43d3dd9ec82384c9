"""How `fluvial train schrodinger-bridge-imf` joins any two data sets: hyper-parameters, steps."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from fluvial.core.couplings import Coupling, Independent, OptimalTransport
from fluvial.core.noise import KeyedNoise
from fluvial.data import DataSet, read
from fluvial.data.format import Format
from fluvial.data.write import image_grid, scatter
from fluvial.metrics import sliced_wasserstein
from fluvial.networks import MLP, UNet
from fluvial.training.loop import Training
from fluvial.training.processes import is_main
from fluvial.training.recipe import training_of
from fluvial.transport.schrodinger_bridge.bridge import SYSTEM, Direction, SchrodingerBridge
from fluvial.transport.schrodinger_bridge.reference import Reference

PREVIEW = KeyedNoise(1)
"""Of the translations that are shown and measured."""
SHOWN = 8
"""Images in a row of a preview, and rows of each side in it."""
DOTS = 1_000
"""Rows in the preview of data that are no images."""

FIRST: dict[str, Coupling | None] = {
    "independent": Independent(),
    "ot": OptimalTransport(),
    "reference": None,
}


@dataclass(frozen=True)
class Recipe:
    """A Schrödinger bridge of a user's two data sets: a `UNet` for images, an `MLP` for tables and
    arrays.

    Args:
        size: height and width to bring images to, or one number for both, multiples of 4; by
            default the size they have, if all have the same.
        channels: 1 for grey, 3 for colour; by default 3, unless every image is grey.
        resize: how images of another size are brought to it: crop (the largest centred part), pad
            (the whole image on black) or stretch.
        label: a column of tables, or an array of .npz files, to leave out. Folders of images may
            be in class folders, which do not matter here.
        skip_bad: leave out images that cannot be read, and list them in the notes.
        validation: share of the rows of each side that is held out, at most 1,000 rows: what the
            bridge is measured on at the end. 0 for none.
        width: of the networks; by default 32 of a U-Net, 128 of an MLP.
        depth: blocks of an MLP, or of each level of a U-Net.
        diffusion: noise of the reference process, in units in which images lie in [-1, 1] and the
            columns of tables, of both sides together, have the deviation 1. Less keeps a row
            nearer to where it came from and takes more half-iterations.
        reversion: pull of the reference towards 0 (Ornstein-Uhlenbeck); 0 is Brownian motion.
        first: how rows are paired at first: independently, by optimal transport in a batch (ot), or
            with what the reference makes of them.
        half_iterations: trainings of one direction, in turn; two are bridge matching in one shot.
        pairs: rows that are translated for the training of the other direction.
        simulation: steps of a translation.
        steps: optimiser steps, over all half-iterations together, a multiple of their number.
        batch_size: rows a step, over all processes and parts.
        accumulation: parts a batch is computed in, one after another, to save memory.
        lr: peak learning rate of AdamW.
        betas: of AdamW.
        weight_decay: of AdamW.
        warmup: steps over which the learning rate rises from 0, in every half-iteration.
        schedule: how it falls in every half-iteration: constant (not at all), linear or cosine.
        decay: share of the steps over which it falls.
        clip: largest norm of the gradient.
        precision: of the networks' arithmetic: no (float32), bf16, or fp16 on a GPU.
        ema: decay of the average of the weights.
        checkpoint_every: steps between checkpoints, from which a run goes on.
        keep: checkpoints kept, the latest ones.
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
    width: int | None = None
    depth: int = 2
    diffusion: float = 1.0
    reversion: float = 0.0
    first: Literal["independent", "ot", "reference"] = "independent"
    half_iterations: int = 10
    pairs: int = 4_000
    simulation: int = 30
    steps: int = 10_000
    batch_size: int = 128
    accumulation: int = 1
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: int = 50
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    decay: float = 0.5
    clip: float | None = 1.0
    precision: Literal["no", "bf16", "fp16"] = "no"
    ema: float = 0.99
    checkpoint_every: int = 250
    keep: int = 1
    seed: int = 0

    GROUPS: ClassVar[Mapping[str, str]] = {
        "reading": "size",
        "network": "width",
        "method": "diffusion",
        "training": "steps",
    }
    """The first field of each group of hyper-parameters."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be a share in [0, 1), got {self.validation}")
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels must be 1 for grey or 3 for colour, got {self.channels}")
        for name in ("width", "depth", "half_iterations", "pairs", "simulation"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.first not in FIRST:
            raise ValueError(f"first must be one of {', '.join(FIRST)}, got {self.first!r}")
        if self.steps < self.half_iterations:
            raise ValueError(
                f"steps must be at least one for each of {self.half_iterations} half-iterations, "
                f"got {self.steps}"
            )
        if self.steps % self.half_iterations:
            near = self.steps // self.half_iterations * self.half_iterations
            raise ValueError(
                f"steps must be a multiple of the {self.half_iterations} half-iterations, got "
                f"{self.steps}; {near} and {near + self.half_iterations} are"
            )
        if self.size is not None:
            _check_size((self.size, self.size) if isinstance(self.size, int) else self.size)
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        # whose own checks speak
        _ = self.training, self.reference

    @property
    def training(self) -> Training:
        """How the loop trains in a half-iteration."""
        return training_of(self, steps=self.steps // self.half_iterations)

    @property
    def reference(self) -> Reference:
        """The reference process."""
        return Reference(self.diffusion, self.reversion)

    def prepare(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        *,
        progress: bool = True,
    ) -> Job:
        """Read both sides and build the model: what is wrong with either is found here.

        Args:
            source: what is translated, x1; see `fluvial.data.read`.
            target: what it is translated to, x0.
            progress: show progress bars.

        Raises:
            As `fluvial.data.read` and `fluvial.data.DataSet.split`; ValueError if the two are not
            of one kind, shape and columns, or the networks do not fit the size.
        """
        options: dict[str, Any] = {
            "size": self.size,
            "channels": self.channels,
            "resize": self.resize,
            "label": self.label,
            "skip_bad": self.skip_bad,
            "progress": progress,
        }
        ours, theirs = (read(place, **options).unlabelled for place in (source, target))
        format = _shared(ours, theirs)
        ours, theirs = replace(ours, format=format), replace(theirs, format=format)
        images = format.kind == "images"
        if images:
            _check_size(format.shape[1:])
        width = self.width or (32 if images else 128)
        recipe = replace(
            self,
            width=width,
            channels=format.shape[0] if images else self.channels,
            size=cast(tuple[int, int], format.shape[1:]) if images else self.size,
        )
        model = recipe._model(format)
        parts = [side.hold_out(self.validation, seed=self.seed) for side in (ours, theirs)]
        return Job(recipe, model, ours, theirs, parts[0], parts[1])

    def _model(self, format: Format) -> SchrodingerBridge:
        width = cast(int, self.width)
        networks: list[UNet | MLP] = []
        for seed in (2 * self.seed, 2 * self.seed + 1):
            if format.kind == "images":
                channels, high, wide = format.shape
                unet = UNet(
                    size=(high, wide), channels=channels, width=width, blocks=self.depth, seed=seed
                )
                networks.append(unet)
            else:
                mlp = MLP(shape=format.shape, width=width, depth=self.depth, ratio=1.0, seed=seed)
                networks.append(mlp)
        return SchrodingerBridge(
            *networks, reference=self.reference, steps=self.simulation, format=format
        )


@dataclass
class Job:
    """A bridge and the two data sets it joins; see `fluvial.training.run.Job`.

    Args:
        recipe: with a value for every hyper-parameter that was left to the data.
        model: untrained.
        source, target: all rows of x1 and of x0.
        ours, theirs: their parts (train, held out); None where no rows are held out.
    """

    recipe: Recipe
    model: SchrodingerBridge
    source: DataSet
    target: DataSet
    ours: tuple[DataSet, DataSet | None]
    theirs: tuple[DataSet, DataSet | None]
    system: str = SYSTEM

    @property
    def data(self) -> DataSet:
        """The source, under the name of both."""
        return replace(self.source, name=f"{self.source.name} to {self.target.name}")

    @property
    def about(self) -> dict[str, Any]:
        sides = (self.source, self.target)
        trained = sum(len(part[0]) for part in (self.ours, self.theirs))
        held = sum(len(part[1] or ()) for part in (self.ours, self.theirs))
        both = {
            name: "; ".join(dict.fromkeys(getattr(side, name) for side in sides))
            for name in ("source", "licence", "citation")
        }
        notes = [*self.ours[0].notes, *self.theirs[0].notes]
        about = self.data.about(train=trained, **({"validation": held} if held else {}))
        return {**about, **both, "notes": notes}

    @property
    def rows(self) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        held = self.ours[1]
        return {"x": self.ours[0].x}, None if held is None else {"x": held.x}

    def fit(self, out: Path, *, progress: bool, trackers: Sequence[str] = ()) -> None:
        self.model.fit(
            self.theirs[0].x,
            self.ours[0].x,
            half_iterations=self.recipe.half_iterations,
            pairs=self.recipe.pairs,
            coupling=FIRST[self.recipe.first],
            out=out,
            progress=progress,
            trackers=trackers,
            preview=self.preview,
            **asdict(self.recipe.training),
        )

    def preview(self, path: Path) -> None:
        """Translations, into ``path`` with the suffix .png, on the main process.

        Images and below each row what it becomes; of other data the first two numbers, beside those
        of target rows.
        """
        if not is_main():
            return
        path, shape = path.with_suffix(".png"), self.data.format.shape
        if len(shape) == 3:
            x = self.ours[0].x[: SHOWN**2 // 2]
            rows = [*zip(x.split(SHOWN), self._translated(x).split(SHOWN), strict=True)]
            grid = torch.cat([part for pair in rows for part in pair])
            if self.data.format.kind != "images":  # the first channel, three deviations either way
                grey = (self.data.format.encode(grid)[:, :1] / 3 + 1) * 127.5
                grid = grey.round().clamp(0, 255).to(torch.uint8)
            image_grid(path, grid, SHOWN)
        else:
            x = self.ours[0].x[:DOTS]
            names = self.data.format.columns
            scatter(path, self.theirs[0].x[:DOTS], self._translated(x), names)

    def measure(self) -> list[dict[str, Any]]:
        """Of both directions, how far the translations of held-out rows are from held-out rows of
        the other side, with the distance of training rows for a floor; and how far they moved."""
        result = []
        sides = {"backward": (self.ours, self.theirs), "forward": (self.theirs, self.ours)}
        for direction, (begin, end) in sides.items():
            if begin[1] is None or end[1] is None or min(len(begin[1]), len(end[1])) < 2:
                continue
            moved = self._translated(begin[1].x, cast(Direction, direction))
            start, arrived, there, real = (
                self.data.format.encode(x).flatten(1).double()
                for x in (begin[1].x, moved, end[1].x, end[0].x[: len(begin[1])])
            )
            way = f"{begin[0].name} to {end[0].name}"
            result += [
                {
                    "name": f"sliced Wasserstein distance, {way}",
                    "value": sliced_wasserstein(arrived, there),
                    "floor": sliced_wasserstein(real, there),
                    "what": f"{len(moved)} held-out rows, translated, against {len(there)} "
                    f"held-out ones; the floor is {len(real)} training rows against the same",
                },
                {
                    "name": f"root mean square of the change, {way}",
                    "value": math.sqrt(float((arrived - start).square().mean())),
                    "floor": None,
                    "what": "over rows and coordinates, in the units of the networks",
                },
            ]
        return result

    def _translated(self, x: Tensor, direction: Direction = "backward") -> Tensor:
        return self.model.translate(x, direction, noise=PREVIEW).to(x.dtype).cpu()


def _check_size(sides: Sequence[int]) -> None:
    """A `UNet` of three levels halves its images twice."""
    if any(side % 4 for side in sides):
        near = [max(4, 4 * round(side / 4)) for side in sides]
        raise ValueError(
            f"size: images of {' x '.join(map(str, sides))} are halved twice, so both sides must "
            f"be multiples of 4; bring them to size={tuple(near)}"
        )


def _shared(source: DataSet, target: DataSet) -> Format:
    """One format for both: shift and scale are those of all rows of the two together."""
    ours, theirs = source.format, target.format
    same = {
        "kind": (ours.kind, theirs.kind),
        "shape": (ours.shape, theirs.shape),
        "columns": (ours.columns, theirs.columns),
    }
    for name, (here, there) in same.items():
        if here != there:
            how = ""
            if name == "shape" and ours.kind == "images":
                channels, *size = ours.shape
                how = f"; bring both to one, size={tuple(size)} and channels={channels}, say"
            raise ValueError(
                f"target must have the {name} of the data, {here} of {source.name}; {target.name} "
                f"has {there}{how}"
            )
    if ours.kind == "images":
        return ours
    share = len(source) / (len(source) + len(target))
    shift, scale = [], []
    for m, s, n, r in zip(ours.shift, ours.scale, theirs.shift, theirs.scale, strict=True):
        shift.append(share * m + (1 - share) * n)
        spread = share * s * s + (1 - share) * r * r + share * (1 - share) * (m - n) ** 2
        scale.append(math.sqrt(spread))
    return replace(
        ours,
        shift=tuple(shift),
        scale=tuple(scale),
        integers=tuple(name for name in ours.integers if name in theirs.integers),
    )
