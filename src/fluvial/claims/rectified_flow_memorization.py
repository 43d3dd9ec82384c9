"""The claim of the memorisation study: fixed pairs are reproduced, and interpolant noise ends it.

A flow is trained on sources N(0, I) and real images paired by a shuffled optimal assignment, then
integrated from its training sources. Where they end is measured against the partner of the training
and against the optimal partner, for several amounts of noise in the interpolant. Two sets of real
images are judged, each in its first principal components, where lines come near each other. A
third, of whole pixels, is shown and not judged: there lines stay far apart.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib

matplotlib.use("Agg")  # a run has no screen
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn

from fluvial.claims import memorization_panels as panels
from fluvial.claims.report import Report, open_run, write_report
from fluvial.claims.resumable import Resumable
from fluvial.claims.verdict import Comparison
from fluvial.core.noise import KeyedNoise
from fluvial.data import SETS, scaled
from fluvial.metrics import median_distance, mmd
from fluvial.networks import MLP, UNet
from fluvial.training.files import atomic, write_json
from fluvial.trust.rectified_flow_memorization import (
    PairedFlow,
    closest_approach,
    couple,
    gradient_variance,
    memorization_report,
)
from fluvial.trust.rectified_flow_memorization.flow import SYSTEM

CLAIM = (
    "Trained without noise in the interpolant on fixed, shuffled pairs of Gaussian sources and "
    "real images, a rectified flow takes its training sources to their training partners: they end "
    "less than half as far from these as from the optimal partners. With noise of the order of the "
    "distance between lines they end less than 3/4 as far from the optimal as from the training "
    "partners, and new samples are nearer to held-out rows than without noise."
)
MEMORISED = math.log(2)
"""Margin of log(to the optimal partner / to the training partner), without noise."""
ENDED = math.log(4 / 3)
"""Margin of log(to the training partner / to the optimal partner), with noise."""
NEARER = 0.0
"""Margin of MMD^2 to held-out rows without noise, less that with noise. An untrained flow, which
leaves sources where they are, near the optimal partners, has none."""
DIGITS_CURE = 0.2
"""Noise at which digits are judged."""

Part = Literal["digits", "images", "pixels"]
Pairing = Literal["shuffled", "reflow"]
NOISE = KeyedNoise(0)
SOURCES, FRESH = 1, 2
BATCH = 16
"""Pairs of each of the gradients whose variance is measured."""
MODEL = "model.safetensors"
COLUMNS = (
    *("set", "pairs", "noise", "noise / gap", "loss", "gradient variance"),
    *("to training partner", "to optimal partner", "memorised", "MMD^2 of new samples"),
)
REPORTED = ("to_paired", "to_paired_std", "to_ot", "to_ot_std", "paired_to_ot", "verdict")
SHOWN, FOLLOWED = 10, 8
"""Images in a row of the figure, and digits whose way is drawn."""


@dataclass(frozen=True)
class Config:
    """Everything a run of the claim depends on.

    Args:
        data: the images: a name in `fluvial.data.SETS`, or an ``.npz`` file with ``x`` (rows,
            channels, height, width), uint8.
        components: principal components of the images that are paired; 0 for their pixels.
        pairs: of images.
        noises: of the interpolant, for the images; 0 and ``cure`` are among them.
        cure: noise at which the images are judged.
        digits_noises: for the digits, in 3 components; 0 and 0.2 are among them.
        digits_pairs: of digits.
        reflow_noises: for the digits paired with where the flow without noise took the sources: a
            second rectification.
        pixel_noises: for whole images, first seed only and not judged; none leaves this out.
        pixel_pairs: of whole images.
        network: of the images: a perceptron (mlp) or a U-Net.
        width: of the networks.
        depth: residual blocks of the perceptron.
        steps: optimiser steps of every training.
        batch_size: pairs a step.
        lr: of AdamW, falling as a cosine.
        ema: decay of the averaged weights.
        euler: steps of the integration.
        points: at which the gradient variance is measured along a training.
        gradients: of 16 pairs each, whose variance that is.
        seeds: of pairs, sources, weights and batches.
        side_by_side: two trainings at a time, each on half of the cores; else in turn.
    """

    data: str = "animals"
    components: int = 4
    pairs: int = 200
    noises: tuple[float, ...] = (0.0, 0.05, 0.1, 0.2, 0.4)
    cure: float = 0.4
    digits_noises: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
    digits_pairs: int = 100
    reflow_noises: tuple[float, ...] = (0.0, 0.2)
    pixel_noises: tuple[float, ...] = (0.0, 0.05, 1.0)
    pixel_pairs: int = 100
    network: Literal["mlp", "unet"] = "mlp"
    width: int = 192
    depth: int = 2
    steps: int = 2000
    batch_size: int = 128
    lr: float = 2e-3
    ema: float = 0.99
    euler: int = 200
    points: int = 20
    gradients: int = 100
    seeds: tuple[int, ...] = (0,)
    side_by_side: bool = True

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("seeds needs at least one value")
        for name, needed in (("noises", self.cure), ("digits_noises", DIGITS_CURE)):
            if not {0.0, needed} <= set(getattr(self, name)):
                raise ValueError(f"{name} must hold 0 and {needed:g}, got {getattr(self, name)}")


PRESETS: dict[str, Config] = {
    "smoke": Config(
        data="digits",
        noises=(0.0, 0.4),
        digits_noises=(0.0, 0.2),
        reflow_noises=(0.0,),
        digits_pairs=12,
        pairs=12,
        pixel_noises=(),
        width=8,
        depth=1,
        steps=4,
        batch_size=8,
        euler=10,
        points=2,
        gradients=4,
        side_by_side=False,
    ),
    "laptop": Config(
        noises=(0.0, 0.4), digits_noises=(0.0, 0.05, 0.2), reflow_noises=(0.0,), pixel_noises=()
    ),
    "record": Config(seeds=(0, 1, 2)),
    # CelebA at 64 x 64 as published: 5,000 pairs, a U-Net, 0.05
    "full": Config(
        data="celeba-64.npz",
        components=0,
        pairs=5000,
        noises=(0.0, 0.05),
        cure=0.05,
        pixel_noises=(),
        network="unet",
        width=128,
        steps=100_000,
        lr=2e-4,
        ema=0.9999,
        seeds=(0, 1, 2),
        side_by_side=False,
    ),
}


class Arm(NamedTuple):
    """One training: which set, how paired, with how much noise in the interpolant."""

    part: Part
    pairing: Pairing
    noise: float

    def folder(self, seed: int) -> str:
        return f"{self.part}-{self.pairing}-{self.noise:g}-{seed}"


def arms(config: Config) -> list[list[Arm]]:
    """In two rounds: what a second rectification starts from comes first."""
    first = [Arm("digits", "shuffled", noise) for noise in config.digits_noises]
    first += [Arm("images", "shuffled", noise) for noise in config.noises]
    first += [Arm("pixels", "shuffled", noise) for noise in config.pixel_noises]
    return [first, [Arm("digits", "reflow", noise) for noise in config.reflow_noises]]


def build(config: Config, part: Part, shape: Sequence[int], noise: float, seed: int) -> PairedFlow:
    """The untrained model of an arm: all of a part and seed start from the same weights."""
    network: nn.Module
    if part == "images" and config.network == "unet":
        network = UNet(size=(shape[1], shape[2]), channels=shape[0], width=config.width, seed=seed)
    else:
        network = MLP(shape=shape, width=config.width, depth=config.depth, ratio=1.0, seed=seed)
    return PairedFlow(network, interpolant_noise=noise)


def run(
    config: Config, preset: str, out: Path, *, force: bool = False, progress: bool = True
) -> Report:
    """Run the claim into the folder ``out``; go on where an interrupted run of it stopped.

    Raises:
        FileExistsError: ``out`` holds something else, or a finished run; see `open_run`.
        FileNotFoundError: the data is a file that is not there.
    """
    run = _ClaimRun(config, open_run(out, preset, config, force=force), progress)
    for round_ in arms(config):
        run.train(
            [
                (arm, seed)
                for seed in config.seeds
                for arm in round_
                if arm.part != "pixels" or seed == config.seeds[0]
            ]
        )
    report = Report(
        system=SYSTEM,
        claim=CLAIM,
        preset=preset,
        config=config,
        comparisons=run.comparisons(),
        table=run.table(),
        data=run.provenance(),
        seconds=run.spent(),
        notes=run.notes(),
    )
    run.draw()
    first = out / Arm("images", "shuffled", config.cure).folder(config.seeds[0]) / MODEL
    (out / MODEL).write_bytes(first.read_bytes())
    write_report(report, out)
    return report


# Data


@dataclass(frozen=True)
class _Set:
    """Rows to pair and rows held out, with what brings them back to pixels."""

    rows: Tensor
    held: Tensor
    decode: Callable[[Tensor], Tensor]
    provenance: str

    def mmd(self, x: Tensor) -> float:
        """Squared, to the held-out rows, with a kernel half as wide as their median distance."""
        width = median_distance(self.held[::2], self.held[1::2]) / 2
        return mmd(x, self.held, bandwidth=width)


def _read(config: Config, part: Part) -> _Set:
    if part == "digits":
        from sklearn.datasets import load_digits

        x = torch.from_numpy(load_digits().data)[:, None].unflatten(2, (8, 8)) / 8 - 1
        order = NOISE.uniform(torch.empty(len(x), dtype=torch.float64), "split").argsort()
        held = len(x) // 3
        source = "digits of scikit-learn (BSD-3-Clause; UCI, E. Alpaydin and C. Kaynak)"
        return _components(x[order[held:]], x[order[:held]], 3, source)
    if config.data in SETS:
        data = SETS[config.data]()
        parts = data.split()
        train, test = (scaled(parts[name].x).double() for name in ("train", "test"))
        source = f"{data.name}, {data.source} ({data.licence})"
    else:
        path = Path(config.data)
        if not path.is_file():
            raise FileNotFoundError(
                f"data: there is no image set {config.data!r} ({', '.join(SETS)}) and no such file"
            )
        with np.load(path) as arrays:
            x = torch.from_numpy(arrays["x"])
        if x.dtype != torch.uint8 or x.ndim != 4 or len(x) < 2 * config.pairs:
            raise ValueError(
                f"data: need x (rows, channels, height, width), uint8, of {2 * config.pairs} rows "
                f"or more, got {x.dtype} {tuple(x.shape)}"
            )
        train, test = scaled(x[: -config.pairs]), scaled(x[-config.pairs :])
        source = f"{path.name}, the user's file"
    if part == "pixels" or not config.components:
        std = train.std()
        return _Set((train / std).float(), (test / std).float(), lambda x: x * std, source)
    return _components(train, test, config.components, source)


def _components(train: Tensor, test: Tensor, count: int, source: str) -> _Set:
    """In principal components of the training rows, on one scale, of unit deviation over all."""
    shape, mean = train.shape[1:], train.flatten(1).mean(0)
    axes = torch.linalg.eigh((train.flatten(1) - mean).T.cov())[1].flip(1)[:, :count]
    rows, held = ((x.flatten(1) - mean) @ axes for x in (train, test))
    std = rows.std()

    def decode(x: Tensor) -> Tensor:
        return (mean + x.double() @ axes.T * std).reshape(-1, *shape)

    return _Set((rows / std).float(), (held / std).float(), decode, source)


class _Pairs(NamedTuple):
    """Sources with their partners, and the optimal ones."""

    source: Tensor
    target: Tensor
    optimal: Tensor


# The run


class _ClaimRun(Resumable[Config]):
    """The steps of a run. Each training leaves a file in ``out``, and is skipped where that is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sets: dict[Part, _Set] = {}

    def set(self, part: Part) -> _Set:
        if part not in self._sets:
            self._sets[part] = _read(self.config, part)
        return self._sets[part]

    def pairs(self, arm: Arm, seed: int) -> _Pairs:
        """The pairs of an arm: a function of its part, its pairing and the seed."""
        rows = self.set(arm.part).rows
        counts = {"digits": self.config.digits_pairs, "images": self.config.pairs}
        count = counts.get(arm.part, self.config.pixel_pairs)
        noise = NOISE.at(seed)
        order = noise.uniform(torch.empty(len(rows), dtype=torch.float64), "rows").argsort()
        target = rows[order[:count]]
        source = noise.at(SOURCES).normal(target, "source")
        if arm.pairing == "reflow":
            first = PairedFlow.load(self.out / Arm(arm.part, "shuffled", 0).folder(seed) / MODEL)
            target = first.translate(source, steps=self.config.euler)
        optimal = couple(source, target, "ot", noise=noise)[1]
        if arm.pairing == "shuffled":
            target = couple(source, target, "shuffled", noise=noise)[1]
        return _Pairs(source, target, optimal)

    def train(self, jobs: Sequence[tuple[Arm, int]]) -> None:
        """Every training that has not ended, two at a time unless the configuration says else."""
        self.each("fit", [job for job in jobs if not self._scores(*job).exists()])

    def _scores(self, arm: Arm, seed: int) -> Path:
        return self.out / arm.folder(seed) / "scores.json"

    def fit(self, arm: Arm, seed: int) -> None:
        """One training with everything that is measured of it."""
        config, folder = self.config, self.out / arm.folder(seed)
        if self.progress:
            print(f"{arm.part}, {arm.pairing}, noise {arm.noise:g}, seed {seed}", file=sys.stderr)
        data, pairs = self.set(arm.part), self.pairs(arm, seed)
        model = build(config, arm.part, pairs.source.shape[1:], arm.noise, seed)
        watched = seed == config.seeds[0] and arm in _watched(config)

        def variance() -> dict[str, Any]:
            found = gradient_variance(
                model,
                pairs.source,
                pairs.target,
                path=model.path,
                samples=BATCH * config.gradients,
                batch_size=BATCH,
            )
            return {"loss": found.loss, "variance": found.variance, "relative": found.relative}

        def preview(path: Path) -> None:
            write_json(path.with_suffix(".json"), variance())

        model.fit(
            pairs.source,
            pairs.target,
            steps=config.steps,
            batch_size=config.batch_size,
            lr=config.lr,
            schedule="cosine",
            ema=config.ema,
            seed=seed,
            sample_every=max(1, config.steps // config.points) if watched else config.steps,
            preview=preview if watched else None,
            out=folder,
            progress=self.progress,
        )
        model.save(folder / MODEL, overwrite=True)
        report = memorization_report(model, *pairs, steps=config.euler).to_dict()
        scores = {
            "report": {name: report[name] for name in REPORTED},
            "variance": variance(),
            **self._fresh(model, data, seed),
        }
        write_json(folder / "scores.json", scores)

    def _fresh(self, model: PairedFlow, data: _Set, seed: int) -> dict[str, float]:
        """Squared MMD of new samples to held-out rows; of whole images none, which says little."""
        if data.rows.ndim > 2:
            return {}
        samples = model.sample(
            len(data.held), noise=NOISE.at(seed).at(FRESH), steps=self.config.euler
        )
        return {"mmd": data.mmd(samples)}

    def scores(self, arm: Arm) -> list[dict[str, Any]]:
        """Of every seed that was run."""
        paths = [self._scores(arm, seed) for seed in self.config.seeds]
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]

    def comparisons(self) -> list[Comparison]:
        return [
            *self._compared("digits", DIGITS_CURE),
            *self._compared("images", self.config.cure),
        ]

    def _compared(self, part: Part, cure: float) -> list[Comparison]:
        none, some = (self.scores(Arm(part, "shuffled", noise)) for noise in (0.0, cure))
        found = [
            Comparison(
                f"{part}, no noise: log distance to the optimal partner, less that to the training "
                "partner",
                [_log_ratio(one["report"]) for one in none],
                MEMORISED,
            ),
            Comparison(
                f"{part}, noise {cure:g}: log distance to the training partner, less that to the "
                "optimal partner",
                [-_log_ratio(one["report"]) for one in some],
                ENDED,
            ),
        ]
        if "mmd" in none[0]:
            name = f"{part}: MMD^2 of new samples without noise, less that with noise {cure:g}"
            pairs = zip(none, some, strict=True)
            found.append(Comparison(name, [a["mmd"] - b["mmd"] for a, b in pairs], NEARER))
        return found

    def gap(self, part: Part) -> float:
        """Median closest approach of the shuffled lines, mean over seeds."""
        found = []
        for seed in self.config.seeds:
            pairs = self.pairs(Arm(part, "shuffled", 0.0), seed)
            found.append(float(closest_approach(pairs.source, pairs.target).median()))
        return statistics.fmean(found)

    def table(self) -> list[dict[str, Any]]:
        """One row an arm; means over seeds."""
        rows, gaps = [], {part: self.gap(part) for part in self._parts()}
        for arm in [arm for round_ in arms(self.config) for arm in round_]:
            scores = self.scores(arm)
            reports = [one["report"] for one in scores]
            variances = [one["variance"] for one in scores]
            memorised = sum(one["verdict"] == "memorised" for one in reports)
            values = (
                *(arm.part, arm.pairing, arm.noise, arm.noise / gaps[arm.part]),
                *(_mean(variances, "loss"), _mean(variances, "variance")),
                *(_mean(reports, "to_paired"), _mean(reports, "to_ot")),
                f"{memorised} of {len(reports)}",
                _mean(scores, "mmd") if "mmd" in scores[0] else None,
            )
            rows.append(dict(zip(COLUMNS, values, strict=True)))
        return rows + [row for part in self._parts() for row in self._references(part)]

    def _references(self, part: Part) -> list[dict[str, Any]]:
        """What sources and real rows give in the place of samples."""
        data, ends, values = self.set(part), [], []
        for seed in self.config.seeds:
            pairs = self.pairs(Arm(part, "shuffled", 0.0), seed)
            ends.append(
                [float((pairs.source - x).flatten(1).norm(dim=1).mean()) for x in pairs[1:]]
            )
            if data.rows.ndim == 2:
                fresh = NOISE.at(seed).at(FRESH).normal(data.held, "source")
                values.append((data.mmd(fresh), data.mmd(data.rows[: len(data.held)])))
        paired, optimal = np.mean(ends, 0).tolist()
        start, floor = np.mean(values, 0).tolist() if values else (None, None)
        none: dict[str, Any] = {**dict.fromkeys(COLUMNS), "set": part}
        flowless = {
            "pairs": "no flow",
            "to training partner": paired,
            "to optimal partner": optimal,
            "MMD^2 of new samples": start,
        }
        real = {"pairs": "real rows (floor)", "MMD^2 of new samples": floor}
        return [none | flowless, *([none | real] if values else [])]

    def _parts(self) -> list[Part]:
        return ["digits", "images", *(["pixels"] if self.config.pixel_noises else [])]  # type: ignore[list-item]

    def provenance(self) -> dict[str, str]:
        return {part: self.set(part).provenance for part in self._parts() if part != "pixels"}

    def notes(self) -> list[str]:
        """What has to be said beside the table."""
        config = self.config
        apart = {
            part: _mean(
                [one["report"] for one in self.scores(Arm(part, "shuffled", 0.0))], "paired_to_ot"
            )
            for part in self._parts()
        }
        sizes = {
            "digits": f"{config.digits_pairs} digits in 3 principal components",
            "images": f"{config.pairs} images in "
            + (f"{config.components} principal components" if config.components else "pixels"),
            "pixels": f"{config.pixel_pairs} whole images, first seed only, not judged",
        }
        return [
            *(
                f"{part}: {sizes[part]}; the two partners of a source are {apart[part]:.3g} "
                f"apart, and the median line comes within {self.gap(part):.3g} of another at an "
                "equal time (gap)."
                for part in self._parts()
            ),
            "Rows are on the scale of unit deviation over all numbers. Losses are sums over "
            "coordinates.",
            f"Distances after {config.euler} steps of Euler's method from the training sources. "
            "The optimal partner is that of the exact assignment; the shuffled one is a random "
            "permutation of it, drawn once.",
            "reflow: the partner is where the flow trained without noise on the shuffled pairs "
            "took the source, and the optimal partner is among these: a second rectification.",
            "no flow: the sources as they are, which in few dimensions lie near the optimal "
            "partners already: the distance to these says little about the quality of a flow, for "
            "which look at MMD^2, of as many new samples as held-out rows, with real rows in the "
            "samples' place as the floor.",
            "The paper's images are CelebA at 64 x 64 with a U-Net and a noise of 0.05; here the "
            f"network is a perceptron of width {config.width}, and noise is chosen by the gap. On "
            "whole pixels lines stay far apart, and small noise is not expected to end "
            "memorisation: those rows show it.",
        ]

    # Pictures

    def draw(self) -> None:
        """Distances, trajectories, gradient variance, theory, and the images."""
        config = self.config
        figure = plt.figure(figsize=(11.0, 15.0), layout="constrained")
        grid = figure.add_gridspec(5, 2, height_ratios=[1, 1, 1, 1, 1.25])
        axes = [[figure.add_subplot(grid[row, column]) for column in (0, 1)] for row in range(4)]
        sweeps: dict[Part, tuple[float, ...]] = {
            "digits": config.digits_noises,
            "images": config.noises,
        }
        for place, (part, noises) in zip(axes[0], sweeps.items(), strict=True):
            scores = [self.scores(Arm(part, "shuffled", noise)) for noise in noises]
            reports = [[one["report"] for one in seeds] for seeds in scores]
            title = f"{part}: the median line comes within {self.gap(part):.2g} of another"
            panels.distances(place, title, noises, reports)
        for place, noise in zip(axes[1], (0.0, DIGITS_CURE), strict=True):
            title = f"digits, noise {noise:g}: x training partner, o optimal partner"
            panels.trajectories(place, title, *self._way(noise))
        panels.training(axes[2][0], "loss", self._curves("loss"))
        panels.training(axes[2][1], "variance of the loss gradient", self._curves("variance"))
        panels.theory(axes[3][0])
        panels.crossing(axes[3][1])
        panels.pictures(figure.add_subplot(grid[4, :]), self._images())
        with atomic(self.out / "figure.png") as path:
            figure.savefig(path, dpi=120, format="png")
        plt.close(figure)

    def _model(self, arm: Arm) -> PairedFlow:
        """Of the first seed."""
        return PairedFlow.load(self.out / arm.folder(self.config.seeds[0]) / MODEL)

    def _way(self, noise: float) -> tuple[Tensor, Tensor, Tensor]:
        """Digits along the flow (steps + 1, rows, 3), their training and their optimal partners."""
        arm = Arm("digits", "shuffled", noise)
        source, target, optimal = (x[:FOLLOWED] for x in self.pairs(arm, self.config.seeds[0]))
        field, way = self._model(arm).field, [source]
        for k in range(self.config.euler):
            t = torch.tensor(1 - k / self.config.euler)
            with torch.no_grad():
                way.append(way[-1] - field(way[-1], t) / self.config.euler)
        return torch.stack(way), target, optimal

    def _curves(self, name: str) -> dict[str, dict[int, float]]:
        """What was measured along the trainings of the first seed, by arm and step."""
        curves = {}
        for arm in _watched(self.config):
            folder = self.out / arm.folder(self.config.seeds[0]) / "samples"
            curves[f"{arm.part}, noise {arm.noise:g}"] = {
                int(path.stem.rpartition("-")[2]): json.loads(path.read_text("utf-8"))[name]
                for path in sorted(folder.glob("step-*.json"))
            }
        return curves

    def _images(self) -> dict[str, Tensor]:
        """The first images of a seed: where they should and where they do end, in pixels."""
        arms = [Arm("images", "shuffled", noise) for noise in (0.0, self.config.cure)]
        pairs = self.pairs(arms[0], self.config.seeds[0])
        source, target, optimal = (x[:SHOWN] for x in pairs)
        ends = [self._model(arm).translate(source, steps=self.config.euler) for arm in arms]
        rows = {
            "training partner": target,
            "flow, no noise": ends[0],
            f"flow, noise {self.config.cure:g}": ends[1],
            "optimal partner": optimal,
        }
        return {name: self.set("images").decode(x) for name, x in rows.items()}


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def _log_ratio(report: Mapping[str, Any]) -> float:
    """log(distance to the optimal partner / distance to the training partner)."""
    return math.log(report["to_ot"] / report["to_paired"])


def _watched(config: Config) -> list[Arm]:
    """Trainings along which the gradient variance is measured."""
    digits = [Arm("digits", "shuffled", noise) for noise in (0.0, DIGITS_CURE)]
    return [*digits, *(Arm("images", "shuffled", noise) for noise in (0.0, config.cure))]
