"""The claim of the locality denoiser: it predicts what trained networks denoise.

A U-Net and a diffusion transformer are trained on the images that the denoisers are made of. On
held-out images with noise, each network's estimate of the clean image is compared with that of the
locality denoiser and of every baseline, in the same states. What the denoisers leave open, the
threshold of the masks and the sides of the windows by level of noise, is chosen for each network on
validation images, from equally many values.

Two demonstrations stand beside the claim and judge nothing: a perceptron on digits, and a
perceptron and a small U-Net on patches of photographs, whose sensitivity is compared with the
Wiener filter's.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from fluvial.claims import locality_demonstrations as demonstrations
from fluvial.claims.figure import image_grid
from fluvial.claims.locality_demonstrations import (
    DIGITS,
    OURS,
    PATH,
    Score,
    at_scale,
    best_scale,
    clean_field,
    components,
    mean_rows,
    noise_prediction,
    noisy,
    time_at,
    wiener_rows,
)
from fluvial.claims.report import Report, open_run, write_report
from fluvial.claims.resumable import Resumable
from fluvial.claims.verdict import Comparison
from fluvial.core.gaussian.losses import Matching
from fluvial.core.gaussian.multistep import DDIM
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Field
from fluvial.core.simulate import simulate
from fluvial.data import read, scaled
from fluvial.images.locality import (
    Denoiser,
    EquivariantLocalScoreMachine,
    LocalityDenoiser,
    LocalScoreMachine,
    NearestDenoiser,
    OptimalDenoiser,
    cosine,
)
from fluvial.networks import DiT, UNet
from fluvial.training.files import load_model, save_model
from fluvial.training.loop import Stage, Training, train

SYSTEM = "locality-denoiser"
CLAIM = (
    "On held-out images with noise, the locality denoiser predicts the clean image that a trained "
    "U-Net, and a trained diffusion transformer, estimates with a higher R^2 than the optimal "
    "denoiser, the Wiener filter, the nearest training image, the local and the equivariant local "
    "score machine."
)
MARGIN = 0.0
"""Of the difference in R^2, mean over the levels of noise and the held-out images."""

Arm = Literal["U-Net", "DiT"]
ARMS: tuple[Arm, Arm] = ("U-Net", "DiT")
BASELINES = ("optimal", "Wiener", "nearest", "local", "equivariant")
METHODS = (OURS, *BASELINES)
GROUPS = ((OURS,), BASELINES)
"""Denoisers computed in one process each."""

VALIDATION, TEST, SAMPLES = KeyedNoise(1_000), KeyedNoise(2_000), KeyedNoise(3_000)
MODEL, NETWORK = "model.safetensors", "network.safetensors"
MAPPED, SHOWN = 32, 8
"""Held-out images that a mean sensitivity is taken over, and samples that are drawn."""

Choice: TypeAlias = Mapping[float, Any]
"""Scales by level."""


@dataclass(frozen=True)
class Config:
    """Everything a run of the claim depends on.

    Args:
        data: a name in `fluvial.data.SETS`, or another source of images for `fluvial.data.read`.
        images: training images, at most: of the networks and of all denoisers but the equivariant
            machine.
        equivariant_images: those of the equivariant machine, whose cost is that of the local one
            times the number of pixels.
        unet_width: channels of the first level.
        unet_multipliers: of the other levels.
        unet_blocks: residual blocks a level.
        dit_patch: side of a patch.
        dit_width: of the transformer.
        dit_depth: of the transformer.
        dit_heads: of the transformer.
        unet_steps: optimiser steps.
        dit_steps: optimiser steps.
        batch_size: of both networks.
        lr: of both networks.
        ema: decay of the averaged weights.
        levels: of noise, by the share of signal alpha^2.
        taus: thresholds that are tried.
        sides: of windows that are tried, by both patch machines.
        validation: images on which they are.
        test: held-out images.
        seeds: one training of each network and one draw of the noise a seed.
        demonstration_steps: of the perceptrons on digits and patches.
        memory: bytes that a denoiser's temporaries may take.
        side_by_side: train the networks at the same time, each on half of the cores; denoisers too.
    """

    data: str = "animals"
    images: int = 10_000
    equivariant_images: int = 24
    unet_width: int = 16
    unet_multipliers: tuple[int, ...] = (1, 2, 4)
    unet_blocks: int = 1
    dit_patch: int = 4
    dit_width: int = 96
    dit_depth: int = 4
    dit_heads: int = 4
    unet_steps: int = 600
    dit_steps: int = 2000
    batch_size: int = 32
    lr: float = 2e-3
    ema: float = 0.99
    levels: tuple[float, ...] = (0.078, 0.394, 0.656, 0.895, 0.994)
    taus: tuple[float, ...] = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
    sides: tuple[int, ...] = (1, 3, 5, 7, 9, 11, 13, 17)
    validation: int = 10
    test: int = 24
    seeds: tuple[int, ...] = (0,)
    demonstration_steps: int = 1500
    memory: int = 1 << 30
    side_by_side: bool = True

    def __post_init__(self) -> None:
        for name in ("seeds", "levels", "taus", "sides"):
            if not getattr(self, name):
                raise ValueError(f"{name} needs at least one value")
        if len(self.taus) != len(self.sides):
            raise ValueError(
                "taus and sides must be equally many trials, got "
                f"{len(self.taus)} and {len(self.sides)}"
            )
        if not all(0 < a < 1 for a in self.levels):
            raise ValueError(f"levels must lie in (0, 1), got {self.levels}")
        for name in ("images", "equivariant_images", "validation", "test"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, got {getattr(self, name)}")


PRESETS: dict[str, Config] = {
    "smoke": Config(
        data="digits",
        images=60,
        equivariant_images=2,
        unet_width=4,
        unet_multipliers=(1, 1),
        dit_patch=14,
        dit_width=16,
        dit_depth=1,
        dit_heads=2,
        unet_steps=2,
        dit_steps=3,
        batch_size=8,
        levels=(0.394, 0.895),
        taus=(0.1, 0.02),
        sides=(3, 7),
        validation=3,
        test=4,
        demonstration_steps=3,
        side_by_side=False,
    ),
    "laptop": Config(
        images=2000,
        equivariant_images=8,
        unet_steps=200,
        dit_steps=600,
        taus=(0.5, 0.2, 0.05, 0.01),
        sides=(1, 3, 7, 13),
        validation=6,
        test=16,
        demonstration_steps=500,
    ),
    "record": Config(seeds=(0, 1, 2)),
    # CIFAR-10 as published: 200 epochs of 50,000 images, the authors' U-Net without dropout; the
    # transformer has the size S of its paper
    "full": Config(
        data="cifar10",
        images=50_000,
        equivariant_images=1000,
        unet_width=128,
        unet_multipliers=(1, 2, 3, 4),
        unet_blocks=2,
        dit_patch=2,
        dit_width=384,
        dit_depth=12,
        dit_heads=6,
        unet_steps=78_000,
        dit_steps=78_000,
        batch_size=128,
        lr=1e-4,
        ema=0.9999,
        validation=100,
        test=1000,
        seeds=(0, 1, 2),
    ),
}


def build(config: Config, arm: Arm, shape: Sequence[int], seed: int) -> Matching:
    """The objective of a network that predicts noise, of images of this shape."""
    channels, height, width = shape
    network: nn.Module
    if arm == "U-Net":
        network = UNet(
            size=(height, width),
            channels=channels,
            width=config.unet_width,
            multipliers=config.unet_multipliers,
            blocks=config.unet_blocks,
            heads=2,
            seed=seed,
        )
    else:
        network = DiT(
            size=(height, width),
            channels=channels,
            patch=config.dit_patch,
            width=config.dit_width,
            depth=config.dit_depth,
            heads=config.dit_heads,
            seed=seed,
        )
    return noise_prediction(network)


def run(
    config: Config, preset: str, out: Path, *, force: bool = False, progress: bool = True
) -> Report:
    """Run the claim into the folder ``out``; go on where an interrupted run of it stopped.

    Raises:
        FileExistsError: ``out`` holds something else, or a finished run; see `open_run`.
        FileNotFoundError, ValueError: the data is not there, or not of images.
    """
    data = _read(config)
    run = _ClaimRun(config, open_run(out, preset, config, force=force), progress)
    for seed in config.seeds:
        run.each("fit", [(arm, seed) for arm in ARMS])
    run.each("outputs", [(group, None) for group in GROUPS])
    scores: dict[Arm, dict[int, dict[float, dict[str, Score]]]] = {arm: {} for arm in ARMS}
    for seed in config.seeds:
        for arm in ARMS:
            run.choice(arm, seed)
        run.each("outputs", [(group, seed) for group in GROUPS])
        for arm in ARMS:
            scores[arm][seed] = run.scores(arm, seed)
    run.each("demonstrate", [("digits",), ("photographs",)])
    comparisons = [
        Comparison(
            f"R^2 to the {arm}, mean over levels: locality less {name}",
            [
                statistics.fmean(
                    scores[arm][seed][a][OURS]["r2"] - scores[arm][seed][a][name]["r2"]
                    for a in config.levels
                )
                for seed in config.seeds
            ],
            MARGIN,
        )
        for arm in ARMS
        for name in BASELINES
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
            **{f"{name} images": str(len(x)) for name, x in data.parts.items()},
        },
        seconds=run.spent(),
        notes=run.notes(scores),
    )
    run.draw(scores)
    write_report(report, out)
    return report


Scores: TypeAlias = Mapping[Arm, Mapping[int, Mapping[float, Mapping[str, Score]]]]


class _ClaimRun(Resumable[Config]):
    """The steps of a run. Each leaves a file in ``out``, and is skipped where that file is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data = _read(self.config)
        self._denoisers: dict[str, Denoiser] = {}

    def _tensors(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        path = self.out / f"{name}.safetensors"
        if not path.exists():
            save_model(path, make(), {"system": "tensors"})
        return load_model(path)[0]

    # Networks

    def folder(self, arm: Arm, seed: int) -> Path:
        return self.out / f"{arm.lower()}-{seed}"

    def fit(self, arm: Arm, seed: int) -> nn.Module:
        """The trained network of an arm."""
        config, path = self.config, self.folder(arm, seed) / NETWORK
        objective = build(config, arm, self.data.shape, seed)
        if not path.exists():
            steps = config.unet_steps if arm == "U-Net" else config.dit_steps
            if self.progress:
                print(f"{arm}: seed {seed}, {steps} steps", file=sys.stderr)
            training = _training(config, steps, seed)
            stage = Stage(objective, {"x": scaled(self.data.parts["train"])}, training)
            train(stage, out=path.parent, progress=self.progress)
            save_model(path, objective.network.state_dict(), {"system": "network"})
        objective.network.load_state_dict(load_model(path)[0])
        return objective.network.eval()

    def field(self, arm: Arm, seed: int) -> Field:
        """What the network estimates the clean image to be."""
        return clean_field(self.fit(arm, seed))

    # Denoisers

    def states(self, a: float, seed: int | None) -> Tensor:
        """Images with noise: the validation images, or the held-out ones as a seed draws them."""
        level = self.config.levels.index(a)
        name, count, noise = (
            ("validation", self.config.validation, VALIDATION)
            if seed is None
            else ("test", self.config.test, TEST.at(seed))
        )
        x = scaled(self.data.parts[name][:count])
        return noisy(x, a, noise.at(level))

    def denoiser(self, name: str) -> Denoiser:
        """One of `METHODS`, made of the training images."""
        if name not in self._denoisers:
            x = self.data.parts["train"]
            options: dict[str, Any] = {
                "path": PATH,
                "memory": self.config.memory,
                "progress": self.progress,
            }
            few = x[: self.config.equivariant_images]
            make: dict[str, Callable[[], Denoiser]] = {
                OURS: lambda: LocalityDenoiser(x, **options),
                "optimal": lambda: OptimalDenoiser(x, **options),
                "Wiener": lambda: cast(LocalityDenoiser, self.denoiser(OURS)).wiener,
                "nearest": lambda: NearestDenoiser(x, **options),
                "local": lambda: LocalScoreMachine(x, k=3, **options),
                "equivariant": lambda: EquivariantLocalScoreMachine(
                    few, k=3, boundary="broken", **options
                ),
            }
            self._denoisers[name] = make[name]()
        return self._denoisers[name]

    def candidates(self, name: str) -> Sequence[Any]:
        """What may be chosen: thresholds or sides; nothing, of a denoiser that has neither."""
        if name == OURS:
            return self.config.taus
        return self.config.sides if name in ("local", "equivariant") else ()

    def outputs(self, names: Sequence[str], seed: int | None) -> None:
        """Estimates of the clean images, with all candidates or with those chosen for a seed."""
        for name in names:
            self.estimates(name, seed)

    def estimates(self, name: str, seed: int | None) -> dict[str, Tensor]:
        """By level and scale, those of the validation images (no seed) or the held-out ones."""

        def make() -> dict[str, Tensor]:
            wanted = [
                (a, scale)
                for a in self.config.levels
                for scale in self.candidates(name) or (None,)
                if seed is None or any(self.choice(arm, seed)[name][a] == scale for arm in ARMS)
            ]
            if self.progress:
                print(f"{name}: {len(wanted)} settings", file=sys.stderr)
            estimates = {}
            for a, scale in wanted:
                denoiser = at_scale(self.denoiser(name), scale)
                estimates[_key(a, scale)] = denoiser(self.states(a, seed), time_at(a))
            return estimates

        part = "validation" if seed is None else f"test-{seed}"
        return self._tensors(f"{part}/{name}", make)

    def choice(self, arm: Arm, seed: int) -> dict[str, Choice]:
        """The scales with the highest R^2 to the network on validation images, by level."""

        def make() -> dict[str, list[Any]]:
            field, chosen = self.field(arm, seed), {name: list[Any]() for name in METHODS}
            for a in self.config.levels:
                with torch.no_grad():
                    target = field(self.states(a, None), time_at(a))
                for name, scales in chosen.items():
                    candidates, best = self.candidates(name), None
                    if candidates:
                        got = self.estimates(name, None)
                        tried = [got[_key(a, scale)] for scale in candidates]
                        best = best_scale(tried, target, candidates)
                    scales.append(best)
            return chosen

        stored = self.stored(f"{self.folder(arm, seed).name}/choice.json", make)
        return {
            name: dict(zip(self.config.levels, values, strict=True))
            for name, values in stored.items()
        }

    def scores(self, arm: Arm, seed: int) -> dict[float, dict[str, Score]]:
        """Agreement with the network on held-out images, by level and denoiser."""

        def make() -> list[dict[str, Score]]:
            field, choice = self.field(arm, seed), self.choice(arm, seed)
            clean = scaled(self.data.parts["test"][: self.config.test])
            rows = []
            for a in self.config.levels:
                with torch.no_grad():
                    target = field(self.states(a, seed), time_at(a))
                got = {
                    name: self.estimates(name, seed)[_key(a, choice[name][a])] for name in METHODS
                }
                rows.append(demonstrations.scores({**got, arm: target}, target, clean))
            return rows

        stored = self.stored(f"{self.folder(arm, seed).name}/scores.json", make)
        return dict(zip(self.config.levels, stored, strict=True))

    # Demonstrations

    def demonstrate(self, name: str) -> dict[str, Any]:
        """A perceptron on digits, or a perceptron and a U-Net on patches of photographs."""
        config, tenth = self.config, 10 * self.config.test

        def make() -> dict[str, Any]:
            steps = config.demonstration_steps
            if name == "digits":
                few = 6 * config.equivariant_images
                return demonstrations.digits(steps, few, tenth, config.levels, self.progress)
            return demonstrations.photographs(steps, tenth, config.levels, self.progress)

        return cast(dict[str, Any], self.stored(f"{name}.json", make))

    def maps(self) -> dict[str, Tensor]:
        """Mean Jacobian rows of the centre, (levels, channels, height, width), by name."""

        def make() -> dict[str, Tensor]:
            x, seed = scaled(self.data.parts["test"][:MAPPED]), self.config.seeds[0]
            locality = cast(LocalityDenoiser, self.denoiser(OURS))
            choice = self.choice("U-Net", seed)[OURS]
            tuned = locality.at_scale({float(time_at(a)): choice[a] for a in self.config.levels})
            levels = self.config.levels
            return {
                **{arm: mean_rows(self.field(arm, seed), x, levels) for arm in ARMS},
                OURS: mean_rows(tuned, x[: MAPPED // 4], levels),
                "Wiener": wiener_rows(locality.wiener, levels),
                "components": components(locality.wiener.spectrum, self.data.shape),
            }

        return self._tensors("maps", make)

    # Results

    def table(self, scores: Scores) -> list[dict[str, Any]]:
        """One row a network, level and denoiser; means over seeds."""
        rows = []
        for arm in ARMS:
            for a in self.config.levels:
                for name in (*METHODS, arm):
                    over = [scores[arm][seed][a][name] for seed in self.config.seeds]
                    scales = {
                        str(self.choice(arm, seed)[name][a])
                        for seed in self.config.seeds
                        if name != arm and self.candidates(name)
                    }
                    rows.append(
                        {
                            "network": arm,
                            "alpha^2": a,
                            "denoiser": name if name != arm else "the network itself",
                            "R^2": statistics.fmean(score["r2"] for score in over),
                            "correlation": statistics.fmean(s["correlation"] for s in over),
                            "MSE to the clean image": statistics.fmean(s["clean"] for s in over),
                            "tau or side": ", ".join(sorted(scales)),
                        }
                    )
        return rows

    def notes(self, scores: Scores) -> list[str]:
        """What has to be said beside the table."""
        config, digits = self.config, self.demonstrate("digits")
        photographs, maps = self.demonstrate("photographs"), self.maps()
        train, test = len(self.data.parts["train"]), min(config.test, len(self.data.parts["test"]))

        def listed(values: Sequence[float]) -> str:
            return ", ".join(f"{value:.2f}" for value in values)

        best = []
        for arm in ARMS:
            winners = []
            for a in config.levels:
                mean = {
                    name: statistics.fmean(
                        scores[arm][seed][a][name]["r2"] for seed in config.seeds
                    )
                    for name in METHODS
                }
                winners.append(f"{a:g} {max(mean, key=lambda name: mean[name])}")
            best.append(f"{arm}: {', '.join(winners)}")
        rows = [
            f"alpha^2 = {a:g}: "
            + ", ".join(f"{name} {row[name]['r2']:.2f}" for name in METHODS)
            + f"; MSE to the clean digit {row[OURS]['clean']:.3f}, Wiener "
            f"{row['Wiener']['clean']:.3f}, optimal {row['optimal']['clean']:.3f}, perceptron "
            f"{row['perceptron']['clean']:.3f}"
            for a, row in zip(DIGITS, digits["scores"], strict=True)
        ]
        levels = listed(config.levels)
        wiener = maps["Wiener"]
        alike = "; ".join(f"{arm} {listed(cosine(maps[arm], wiener).tolist())}" for arm in ARMS)
        return [
            f"R^2 and correlation of the estimates of the clean image, mean over {test} held-out "
            f"images; R^2 as published, the variance with divisor d - 1. Networks and denoisers "
            f"have the same {train} training images, the equivariant machine the first "
            f"{min(train, config.equivariant_images)} of them, as its cost is "
            f"{math.prod(self.data.shape[1:])} times that of the local one.",
            f"tau and the sides were chosen for each network, seed and level on "
            f"{config.validation} validation images, from {len(config.taus)} values each.",
            f"The U-Net ({config.unet_width} channels, multipliers "
            f"{'-'.join(map(str, config.unet_multipliers))}, {config.unet_steps} steps) and the "
            f"DiT (width {config.dit_width}, depth {config.dit_depth}, {config.dit_steps} steps) "
            "are much smaller than published ones, and trained for much shorter; they predict "
            "noise. A small network is closer to linear than a large one, which favours the Wiener "
            "filter.",
            f"The highest R^2 by alpha^2. {'. '.join(best)}.",
            "Digits of 8 x 8, perceptron, R^2 to it on held-out digits. " + ". ".join(rows) + ".",
            "Cosine between the mean Jacobian row of the centre and the row of the Wiener filter "
            f"at alpha^2 = {levels}. Perceptron on patches of photographs: "
            f"{listed(photographs['cosine'])}; U-Net on them: "
            f"{listed(photographs['cosine of the U-Net'])}; perceptron on digits: "
            f"{listed(digits['cosine'])}. On {self.data.provenance['name']}: {alike}.",
            "Mean distance that the centre looks at, in pixels, at these levels. Patches of "
            f"photographs: perceptron {listed(photographs['radius'])}, U-Net "
            f"{listed(photographs['radius of the U-Net'])}, Wiener filter "
            f"{listed(photographs['radius of the Wiener filter'])}.",
            "samples.png, from equal noise in 10 steps, row by row: U-Net, DiT, locality, the "
            "training images nearest to these, optimal, Wiener, nearest, local.",
        ]

    def draw(self, scores: Scores) -> None:
        """Agreement by level with sensitivity maps beside components, and samples."""
        maps = self.maps()
        curves: dict[str, dict[str, list[float]]] = {
            arm: {
                name: [
                    statistics.fmean(scores[arm][s][a][name]["r2"] for s in self.config.seeds)
                    for a in self.config.levels
                ]
                for name in METHODS
            }
            for arm in ARMS
        }
        photographs, name = self.demonstrate("photographs"), self.data.provenance["name"]
        faces = demonstrations.faces(self.config.levels)
        rows: list[demonstrations.Row] = [
            *((f"{arm},\n{name}", maps[arm][:, 0], None) for arm in ARMS),
            (f"locality,\n{name}", maps[OURS][:, 0], None),
            (f"Wiener,\n{name}", maps["Wiener"][:, 0], maps["components"]),
            ("perceptron,\nphotographs", torch.tensor(photographs["rows"]), None),
            (
                "Wiener,\nphotographs",
                torch.tensor(photographs["gains"]),
                torch.tensor(photographs["components"]),
            ),
            *([] if faces is None else [faces]),
        ]
        demonstrations.figure(self.out / "figure.png", self.config.levels, curves, rows)
        self._samples()

    def _samples(self) -> None:
        """From equal noise: networks, denoisers, and the images nearest to the locality's."""
        seed, nearest = self.config.seeds[0], self.denoiser("nearest")
        choice = self.choice("U-Net", seed)
        start = SAMPLES.normal(torch.empty(SHOWN, *self.data.shape))

        def drawn(field: Field) -> Tensor:
            simulated: Any = simulate
            pairs = nearest._grid(10)
            return cast(Tensor, simulated(start, pairs, DDIM(), PATH, field, SAMPLES))

        with torch.no_grad():
            rows = [drawn(self.field(arm, seed)) for arm in ARMS]
            for name in METHODS[:-1]:  # the equivariant machine would take minutes
                scale = None
                if self.candidates(name):
                    scale = {float(time_at(a)): choice[name][a] for a in self.config.levels}
                tuned = at_scale(self.denoiser(name), scale)
                rows.append(drawn(tuned))
                if name == OURS:
                    rows.append(nearest.denoise(rows[-1], 1.0, 1.0))
                    tuned.save(self.out / MODEL, overwrite=True)
        image_grid(self.out / "samples.png", torch.cat(rows), SHOWN)


@dataclass(frozen=True)
class _Data:
    """uint8 images by part."""

    parts: dict[str, Tensor]
    provenance: dict[str, str]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parts["train"].shape[1:])


@functools.cache
def _read(config: Config) -> _Data:
    data = read(config.data, progress=False)
    if data.format.kind != "images":
        raise ValueError(f"data: need images, {config.data} holds {data.format.kind}")
    parts = {name: part.x for name, part in data.split().items()}
    parts["train"] = parts["train"][: config.images]
    provenance = {"name": data.name, "source": data.source, "licence": data.licence}
    return _Data(parts, provenance)


def _training(config: Config, steps: int, seed: int) -> Training:
    return Training(
        steps=steps,
        batch_size=config.batch_size,
        lr=config.lr,
        ema=config.ema,
        warmup=min(50, steps // 4),
        schedule="linear",
        decay=0.5,
        seed=seed,
    )


def _key(a: float, scale: Any) -> str:
    """Of a file of tensors."""
    return f"{a:g} {scale}"
