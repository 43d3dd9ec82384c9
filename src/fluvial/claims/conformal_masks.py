"""The claim of conformal masks: the error inside them is at the level, for any restorer and score.

Photographs in grey, cut into squares and made four times smaller, are restored by two methods that
draw from what may have been there: ridge regressions with resampled residuals, and a small
conditional flow. Both are fitted on some photographs, kernels are chosen on others, and one pool of
squares of photographs that neither has seen is parted at random, many times, into squares that
calibrate and squares that are measured on.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Literal, cast

import matplotlib

matplotlib.use("Agg")  # a run has no screen
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from fluvial.claims.report import Report, open_run, write_report
from fluvial.claims.resumable import Resumable
from fluvial.claims.verdict import Comparison
from fluvial.core.noise import KeyedNoise
from fluvial.data.photographs import HELD_OUT, LICENCES, TRAINING, VALIDATION, crops, tiles
from fluvial.training.files import atomic, write_json
from fluvial.trust.conformal_masks import (
    Box,
    Calibration,
    ConfidenceMask,
    Difference,
    EnlargingNet,
    Gaussian,
    RestorationFlow,
    Variance,
    calibrate,
)
from fluvial.trust.conformal_masks.picture import hatch

SYSTEM = "conformal-masks"
CLAIM = (
    "The largest error inside a conformal mask is at most the level on average, for two restorers "
    "and every score, a random one included, and within 0.03 of it where the mask is neither empty "
    "nor full; the variance of restorations trusts at least twice the area of a random score at "
    "level 0.05, where intervals that are valid for each pixel exceed the level or trust less; and "
    "with the restorer's own training images among those calibrated on, the error stays below the "
    "bound for leakage."
)
TOLERANCE = 0.002
"""Of an error over its level: four standard errors of 200 splits whose means vary by 0.007."""
TIGHT = 0.03
"""How far an error may be below level - bound / (n + 1)."""
AREA = 2.0
"""Trusted by the variance, over trusted by a random score."""
AREA_LEVEL = 0.05
NEITHER = (0.01, 0.99)
"""Trusted shares between which a mask counts as neither empty nor full."""
COVERAGE = 0.9
"""Of the intervals that are valid for each pixel."""
CUT = 0.5
"""Share of the validation pixels that the uncalibrated cut trusts."""
BATCHES = 20
"""Groups of splits; the comparisons are paired by group."""
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
"""Of the ridge regressions."""
BOUND = 1.0

Name = Literal["ridge", "flow"]
RESTORERS: tuple[Name, ...] = ("ridge", "flow")
OURS = "smoothed variance"
SCORES = (
    OURS,
    "pixel variance",
    "variance of smoothed",
    "paper's form",
    "clipped and blurred",
    "constant",
    "random",
)
PIXELWISE, UNCALIBRATED = "intervals of each pixel", "uncalibrated cut"
MAPS = "maps.npz"
MODEL = "model.safetensors"


@dataclass(frozen=True)
class Config:
    """Everything a run of the claim depends on.

    Args:
        files: a folder of photographs to restore by ``pipeline``, in place of all below that is
            about photographs; empty for those that ship in packages.
        pipeline: a super-resolution pipeline of diffusers, a folder or the name on its hub.
        evaluations: of the pipeline, an image.
        size: side of the squares.
        factor: by which they are made smaller.
        training: squares that the restorers are fitted on.
        validation: squares that kernels and penalties are chosen on, at most.
        pool: squares that are parted into calibration and test, at most; 0 for all there are.
        classes: of the ridge regressions.
        draws: restorations a square.
        kernel: side of the box of the error.
        blur: in place of the box a Gaussian of this deviation; 0 for the box.
        kernels: sides of the box of the scores, of which one is chosen.
        levels: that are judged.
        curve: further levels, for the figure.
        calibration: squares of a split that are calibrated on.
        leaked: of those, in the runs with leakage, training squares of the restorer.
        splits: of the pool.
        width: of the flow's network.
        blocks: of the flow's network.
        steps: optimiser steps of the flow.
        batch_size: of the flow.
        lr: of the flow.
        simulation: steps of a restoration by the flow.
        seed: of everything.
    """

    files: str = ""
    pipeline: str = ""
    evaluations: int = 15
    size: int = 24
    factor: int = 4
    training: int = 6_000
    validation: int = 400
    pool: int = 0
    classes: int = 24
    draws: int = 10
    kernel: int = 5
    blur: float = 0.0
    kernels: tuple[int, ...] = (1, 3, 5, 7, 9)
    levels: tuple[float, ...] = (0.05, 0.10, 0.15)
    curve: tuple[float, ...] = (0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2)
    calibration: int = 300
    leaked: int = 60
    splits: int = 200
    width: int = 64
    blocks: int = 3
    steps: int = 3_000
    batch_size: int = 64
    lr: float = 2e-3
    simulation: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size % self.factor:
            raise ValueError(f"size {self.size} does not divide by factor {self.factor}")
        if not 0 < self.leaked < self.calibration:
            raise ValueError(
                f"leaked must lie between 0 and calibration {self.calibration}, got {self.leaked}"
            )
        if self.pool and self.pool <= self.calibration:
            raise ValueError(f"pool must exceed calibration {self.calibration}, got {self.pool}")
        if self.splits < 2:
            raise ValueError(f"splits must be at least 2, got {self.splits}")
        if bool(self.files) != bool(self.pipeline):
            raise ValueError("files and pipeline are given together, or neither")


PRESETS: dict[str, Config] = {
    "smoke": Config(
        size=12,
        training=60,
        validation=12,
        pool=24,
        classes=2,
        draws=3,
        kernels=(1, 3),
        curve=(),
        calibration=12,
        leaked=4,
        splits=4,
        width=8,
        blocks=1,
        steps=2,
        batch_size=8,
        simulation=1,
    ),
    "laptop": Config(
        training=3_000, validation=200, pool=800, splits=60, steps=600, simulation=2, kernels=(1, 5)
    ),
    "record": Config(width=32, steps=2_000),
    # crops of 2048 pixels, the published number of images, kernels and levels
    "full": Config(
        files="photographs",
        pipeline="CompVis/ldm-super-resolution-4x-openimages",
        size=2048,
        kernel=31,
        blur=64.0,
        kernels=(31,),
        levels=(0.075, 0.1, 0.2),
        curve=(),
        calibration=1_600,
    ),
}


def run(
    config: Config, preset: str, out: Path, *, force: bool = False, progress: bool = True
) -> Report:
    """Run the claim into the folder ``out``; go on where an interrupted run of it stopped.

    Raises:
        FileExistsError: ``out`` holds something else, or a finished run; see `open_run`.
        FileNotFoundError: the data is a folder that is not there.
        ModuleNotFoundError: scikit-image, which ships the photographs, or diffusers is missing.
    """
    if config.files:
        paths = photographs(config)  # a folder that is not there is found before any work
        return _with_pipeline(config, preset, open_run(out, preset, config, force=force), paths)
    run = _ClaimRun(config, open_run(out, preset, config, force=force), progress)
    found = {name: run.splits(name) for name in RESTORERS}
    report = Report(
        system=SYSTEM,
        claim=CLAIM,
        preset=preset,
        config=config,
        comparisons=[c for name in RESTORERS for c in comparisons(config, name, found[name])],
        table=[row for name in RESTORERS for row in rows(config, name, found[name])],
        data=run.provenance(),
        seconds=run.spent(),
        notes=run.notes(found),
    )
    run.draw(found)
    write_report(report, out)
    return report


# Restorers


class Ridge:
    """Restorer A: a ridge regression in each of some classes, and a residual of a training square.

    Small squares, less their mean, are parted into classes by k-means. In each class what is
    missing from the smoothly enlarged square is regressed on the small one; a draw is the
    prediction and the residual of a random training square of the class.
    """

    def __init__(self, config: Config, clean: Tensor, chosen_on: Tensor) -> None:
        self.config = config
        x, missing = self._parts(clean)
        self.means = KMeans(config.classes, n_init=2, random_state=config.seed).fit(x)
        others = self._parts(chosen_on)
        errors = {}
        for penalty in PENALTIES:
            self.maps = self._fitted(x, missing, penalty)
            errors[penalty] = float(np.square(others[1] - self._predicted(others[0])).mean())
        self.penalty = min(errors, key=errors.__getitem__)
        self.maps = self._fitted(x, missing, self.penalty)
        self.residuals = missing - self._predicted(x)
        classes = self.means.predict(x)
        self.members = [np.flatnonzero(classes == k) for k in range(config.classes)]

    def draw(self, clean: Tensor, num: int, noise: KeyedNoise) -> Tensor:
        """(num, batch, 1, size, size), restorations of the degraded squares, in [0, 1]."""
        x, _ = self._parts(clean)
        smooth = enlarged(clean, self.config)
        classes = self.means.predict(x)
        uniform = noise.uniform(torch.empty(len(x), num, dtype=torch.float64)).numpy()
        sizes = np.array([len(members) for members in self.members])[classes]
        places = (uniform * sizes[:, None]).astype(int)
        chosen = np.stack(
            [self.members[k][place] for k, place in zip(classes, places, strict=True)]
        )
        found = self._predicted(x)[:, None] + self.residuals[chosen]
        images = torch.from_numpy(found).movedim(1, 0).reshape(num, *smooth.shape)
        return (smooth.double() + images).clamp(0, 1)

    def _parts(self, clean: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """(small squares less their mean, what is missing from them), a row a square."""
        small = functional.avg_pool2d(clean.double(), self.config.factor).flatten(1)
        missing = (clean - enlarged(clean, self.config)).double().flatten(1)
        return (small - small.mean(1, keepdim=True)).numpy(), missing.numpy()

    def _fitted(self, x: np.ndarray, y: np.ndarray, penalty: float) -> list[np.ndarray]:
        classes = self.means.predict(x)
        maps = []
        for k in range(self.config.classes):
            design = _with_one(x[classes == k])
            square = design.T @ design + penalty * np.eye(design.shape[1])
            maps.append(np.linalg.solve(square, design.T @ y[classes == k]))
        return maps

    def _predicted(self, x: np.ndarray) -> np.ndarray:
        result = np.empty((len(x), self.config.size**2))
        classes = self.means.predict(x)
        for k, matrix in enumerate(self.maps):
            result[classes == k] = _with_one(x[classes == k]) @ matrix
        return result


class Flow:
    """Restorer B: a `RestorationFlow` of the same squares."""

    def __init__(self, config: Config, clean: Tensor, chosen_on: Tensor, out: Path, bar: bool):
        self.model = RestorationFlow(
            EnlargingNet(
                channels=1,
                factor=config.factor,
                width=config.width,
                blocks=config.blocks,
                seed=config.seed,
            ),
            factor=config.factor,
            steps=config.simulation,
            draws=config.draws,
            kernel=config.kernel,
        ).fit(
            2 * clean - 1,
            validation=2 * chosen_on - 1,
            out=out,
            progress=bar,
            steps=config.steps,
            batch_size=config.batch_size,
            lr=config.lr,
            warmup=min(50, config.steps),
            schedule="cosine",
            clip=1.0,
            ema=(0.99, 0.998),
            seed=config.seed,
        )

    def draw(self, clean: Tensor, num: int, noise: KeyedNoise) -> Tensor:
        """(num, batch, 1, size, size), restorations of the degraded squares, in [0, 1]."""
        x = self.model.degrade(clean)
        return torch.stack([self.model.restorations(x, noise.at(k)) for k in range(num)])


def _with_one(x: np.ndarray) -> np.ndarray:
    return np.hstack([x, np.ones((len(x), 1))])


def enlarged(clean: Tensor, config: Config) -> Tensor:
    """Squares made smaller and smoothly larger again."""
    small = functional.avg_pool2d(clean, config.factor)
    return functional.interpolate(small, scale_factor=float(config.factor), mode="bicubic")


def squares(config: Config, names: Sequence[str], count: int) -> Tensor:
    """Squares in [0, 1] that tile photographs, (n, 1, size, size), in random order: all of them, or
    the first ``count``."""
    found, _ = tiles(names, config.size)
    like = torch.empty(len(found), dtype=torch.float64)
    order = KeyedNoise(config.seed).uniform(like, "squares").argsort()
    return found[order[: count or None]].float() / 255


# Maps of a restorer: all that splits need


@dataclass(frozen=True)
class Maps:
    """Errors and scores of the squares of one photograph pool, (n, pixels) each."""

    error: np.ndarray
    scores: Mapping[str, np.ndarray]

    def of(self, rows: np.ndarray) -> Maps:
        return Maps(self.error[rows], {name: score[rows] for name, score in self.scores.items()})


def maps(
    config: Config,
    draw: Callable[[Tensor, int, KeyedNoise], Tensor],
    clean: Tensor,
    kernel: int,
    noise: KeyedNoise,
    *,
    bar: bool = False,
) -> Maps:
    """Restore squares, ``config.draws`` times each."""
    error, box = _error(config), Box(kernel)
    kinds = {
        OURS: Variance("smoothed-variance", box),
        "pixel variance": Variance("pixel"),
        "variance of smoothed": Variance("variance-of-smoothed", box),
        "paper's form": Variance("paper", box),
        "clipped and blurred": Variance("smoothed-variance", box, clip=0.95, blur=1.0),
    }
    errors, scores = [], {name: list[np.ndarray]() for name in kinds}
    for start in tqdm(range(0, len(clean), 100), desc="restoring", leave=False, disable=not bar):
        part = clean[start : start + 100]
        drawn = draw(part, config.draws, noise.at(start))
        errors.append(error(part, drawn[0]).reshape(len(part), -1))
        for name, score in kinds.items():
            scores[name].append(score(drawn).reshape(len(part), -1))
    joined = {name: np.concatenate(parts) for name, parts in scores.items()}
    whole = np.concatenate(errors)
    joined["constant"] = np.zeros_like(whole)
    joined["random"] = noise.uniform(torch.from_numpy(whole), "score").numpy()
    return Maps(whole, joined)


def _error(config: Config) -> Difference:
    return Difference(kernel=Box(config.kernel), colour="grey")


def chosen_kernel(config: Config, found: Mapping[int, Maps]) -> int:
    """The side of the box whose variance trusts most, one half of the squares on the other."""

    def share(one: Maps) -> float:
        half = len(one.error) // 2
        calibration = _calibrated(one.of(np.arange(half)), OURS, (AREA_LEVEL, *config.levels))
        rest = one.scores[OURS][half:]
        return sum(float(calibration.mask(rest, level).mean()) for level in calibration.levels)

    return max(found, key=lambda kernel: share(found[kernel]))


def _calibrated(one: Maps, score: str, levels: Sequence[float]) -> Calibration:
    return calibrate(one.scores[score], one.error, sorted(set(levels)), BOUND)


# Splits

Found = Mapping[str, Any]
"""By score: "error" and "trusted", (splits, levels) each; and the same under "leakage"."""


def split_measures(
    config: Config, pool: Maps, leaked: Maps, cut: float, seed: int
) -> dict[str, dict[str, list[float]]]:
    """What one split shows: by arm, the mean largest error and the trusted share at each level."""
    noise = KeyedNoise(config.seed).at(1).at(seed)
    order = noise.uniform(torch.empty(len(pool.error), dtype=torch.float64)).argsort().numpy()
    ours, test = pool.of(order[: config.calibration]), pool.of(order[config.calibration :])
    levels = all_levels(config)
    result = {}
    for name in SCORES:
        calibration = _calibrated(ours, name, levels)
        masks = [calibration.mask(test.scores[name], level) for level in levels]
        result[name] = _measured(test.error, masks)
    result[PIXELWISE] = _measured(test.error, pixelwise(ours, test, levels))
    result[UNCALIBRATED] = _measured(test.error, [test.scores[OURS] < cut for _ in levels])
    # training squares in the places of some of those calibrated on
    place = noise.uniform(torch.empty(len(leaked.error), dtype=torch.float64), "leak").argsort()
    fresh = ours.of(np.arange(config.leaked, config.calibration))
    known = leaked.of(place[: config.leaked].numpy())
    mixed = Maps(
        np.concatenate([fresh.error, known.error]),
        {OURS: np.concatenate([fresh.scores[OURS], known.scores[OURS]])},
    )
    calibration = _calibrated(mixed, OURS, levels)
    masks = [calibration.mask(test.scores[OURS], level) for level in levels]
    result["leakage"] = _measured(test.error, masks)
    return result


def all_levels(config: Config) -> list[float]:
    """Judged and drawn, from the smallest."""
    return sorted({*config.levels, *config.curve, AREA_LEVEL})


def pixelwise(ours: Maps, test: Maps, levels: Sequence[float]) -> list[np.ndarray]:
    """Masks from intervals that cover each pixel's error with probability `COVERAGE`.

    For every place in the square the conformal quantile q of error / deviation over the calibration
    squares; a pixel is trusted where q times its deviation is at most the level.
    """
    n = len(ours.error)
    tiny = 1e-6
    ratios = ours.error / (np.sqrt(ours.scores[OURS]) + tiny)
    rank = min(n, math.ceil((n + 1) * COVERAGE))
    q = np.sort(ratios, axis=0)[rank - 1]
    half = q * (np.sqrt(test.scores[OURS]) + tiny)
    return [half <= level for level in levels]


def _measured(error: np.ndarray, masks: Sequence[np.ndarray]) -> dict[str, list[float]]:
    return {
        "error": [float((error * mask).max(1).mean()) for mask in masks],
        "trusted": [float(mask.mean()) for mask in masks],
    }


# Verdict


def _of(found: Found, arm: str, what: str, level: float, config: Config) -> np.ndarray:
    """(splits,)"""
    return np.array(found[arm][what])[:, all_levels(config).index(level)]


def _grouped(values: np.ndarray) -> list[float]:
    """Means of `BATCHES` groups of splits, or of fewer splits as they are."""
    parts = np.array_split(values, min(BATCHES, len(values)))
    return [float(part.mean()) for part in parts]


def _worst(
    config: Config, differences: Mapping[float, np.ndarray], name: str, margin: float
) -> Comparison:
    """That of the level at which the claim is nearest to being wrong."""
    level = min(differences, key=lambda level: float(differences[level].mean()))
    return Comparison(
        f"{name} (level {level:g}, the least favourable)", _grouped(differences[level]), margin
    )


def comparisons(config: Config, restorer: Name, found: Found) -> list[Comparison]:
    """Of one restorer; positive differences are in the claim's favour."""

    def of(arm: str, what: str, level: float) -> np.ndarray:
        return _of(found, arm, what, level, config)

    levels, n = config.levels, config.calibration
    result = [
        _worst(
            config,
            {level: level - of(score, "error", level) for level in levels},
            f"{restorer}: level less the largest error, score {score}",
            -TOLERANCE,
        )
        for score in SCORES
    ]
    between = [
        level
        for level in levels
        if NEITHER[0] < float(of(OURS, "trusted", level).mean()) < NEITHER[1]
    ]
    if between:
        least = {level: level - BOUND / (n + 1) - TIGHT for level in between}
        result.append(
            _worst(
                config,
                {level: of(OURS, "error", level) - least[level] for level in between},
                f"{restorer}: largest error, score {OURS}, less level - 1/(n + 1) - {TIGHT:g}",
                0.0,
            )
        )
    ours, random = (of(name, "trusted", AREA_LEVEL) for name in (OURS, "random"))
    result += [
        Comparison(
            f"{restorer}: trusted share of {OURS} less {AREA:g} times that of a random score, "
            f"level {AREA_LEVEL:g}",
            _grouped(ours - AREA * random),
        ),
        _against_intervals(config, restorer, found),
        _worst(
            config,
            {
                level: min(BOUND, level * (n + 1) / (n - config.leaked + 1))
                - of("leakage", "error", level)
                for level in levels
            },
            f"{restorer}: bound under leakage less the largest error",
            -TOLERANCE,
        ),
    ]
    return result


def _against_intervals(config: Config, restorer: Name, found: Found) -> Comparison:
    """By how much the intervals of each pixel exceed the level, or trust less, whichever is more on
    average over splits."""
    over, less = intervals_differ(config, found, AREA_LEVEL)
    exceed = float(over.mean()) > float(less.mean())
    what = (
        "largest error of intervals of each pixel less the level"
        if exceed
        else f"trusted share of {OURS} less that of intervals of each pixel"
    )
    return Comparison(
        f"{restorer}: {what}, level {AREA_LEVEL:g}", _grouped(over if exceed else less)
    )


def intervals_differ(config: Config, found: Found, level: float) -> tuple[np.ndarray, np.ndarray]:
    """(error of the intervals above the level, our trusted share above theirs), (splits,) each."""
    over = _of(found, PIXELWISE, "error", level, config) - level
    ours, theirs = (_of(found, arm, "trusted", level, config) for arm in (OURS, PIXELWISE))
    return over, ours - theirs


def rows(config: Config, restorer: Name, found: Found) -> list[dict[str, Any]]:
    """Of the table: every arm of a restorer."""
    result = []
    for arm in (*SCORES, PIXELWISE, UNCALIBRATED, "leakage"):
        row: dict[str, Any] = {"restorer": restorer, "masks": arm}
        if arm == "leakage":
            row["masks"] = f"{OURS}, {config.leaked} of {config.calibration} leaked"
        for level in config.levels:
            error = _of(found, arm, "error", level, config)
            row[f"error, level {level:g}"] = float(error.mean())
            row[f"standard error, level {level:g}"] = float(error.std(ddof=1)) / math.sqrt(
                len(error)
            )
            row[f"trusted, level {level:g}"] = float(
                _of(found, arm, "trusted", level, config).mean()
            )
        result.append(row)
    return result


# The run


class _ClaimRun(Resumable[Config]):
    """The steps of a run. Each leaves a file in ``out``, and is skipped where that file is."""

    def data(self) -> tuple[Tensor, Tensor, Tensor]:
        """(training, validation, pool), squares in [0, 1]."""
        config = self.config
        training = crops(TRAINING, config.size, config.training, seed=config.seed).float() / 255
        return (
            training,
            squares(config, VALIDATION, config.validation),
            squares(config, HELD_OUT, config.pool),
        )

    def maps(self, name: Name) -> tuple[Maps, Maps, dict[str, Any]]:
        """(pool, training squares, what was chosen) of a restorer."""
        folder = self.out / name
        if not (folder / MAPS).exists():
            self._restore(name, folder)
        with np.load(folder / MAPS) as found:
            parts = [
                Maps(found[f"{part} error"], {s: found[f"{part} {s}"] for s in SCORES})
                for part in ("pool", "training")
            ]
        chosen = json.loads((folder / "chosen.json").read_text(encoding="utf-8"))
        return parts[0], parts[1], chosen

    def _restore(self, name: Name, folder: Path) -> None:
        config = self.config
        training, validation, pool = self.data()
        chosen: dict[str, Any] = {}
        restorer: Ridge | Flow
        if name == "ridge":
            restorer = Ridge(config, training, validation)
            chosen["penalty"] = restorer.penalty
        else:
            restorer = Flow(config, training, validation, folder / "training", self.progress)
        noise = KeyedNoise(config.seed).at(2).at(zlib.crc32(name.encode()))
        drawn = restorer.draw(validation, config.draws, noise)
        error = _error(config)(validation, drawn[0]).reshape(len(validation), -1)
        tried = {
            kernel: Maps(error, {OURS: Variance(kernel=Box(kernel))(drawn).reshape(error.shape)})
            for kernel in config.kernels
        }
        kernel = chosen_kernel(config, tried)
        chosen |= {"kernel": kernel, "cut": float(np.quantile(tried[kernel].scores[OURS], CUT))}
        leaked = training[: max(config.leaked, min(len(training), 4 * config.leaked))]
        found = {
            "pool": maps(config, restorer.draw, pool, kernel, noise.at(1), bar=self.progress),
            "training": maps(config, restorer.draw, leaked, kernel, noise.at(2)),
        }
        rest = pool[config.calibration :]  # not calibrated on, in the figure
        shown = _panel(config, restorer.draw, rest, kernel, noise.at(3))
        arrays = {f"shown {key}": value for key, value in shown.items()}
        for part, one in found.items():
            arrays[f"{part} error"] = one.error
            arrays |= {f"{part} {score}": values for score, values in one.scores.items()}
        folder.mkdir(exist_ok=True)
        write_json(folder / "chosen.json", chosen)
        if isinstance(restorer, Flow):
            restorer.model.calibrate(2 * pool[: config.calibration] - 1, levels=config.levels)
            restorer.model.save(self.out / MODEL, overwrite=True)
        with atomic(folder / MAPS) as path, path.open("wb") as file:
            np.savez(file, **cast(Any, arrays))

    def splits(self, name: Name) -> Found:
        """Measures of all splits, by arm: (splits, levels)."""
        path = self.out / name / "splits.json"
        if not path.exists():
            pool, leaked, chosen = self.maps(name)
            measured = [
                split_measures(self.config, pool, leaked, chosen["cut"], split)
                for split in tqdm(
                    range(self.config.splits),
                    desc=f"splits, {name}",
                    leave=False,
                    disable=not self.progress,
                )
            ]
            write_json(
                path,
                {
                    arm: {what: [one[arm][what] for one in measured] for what in measured[0][arm]}
                    for arm in measured[0]
                },
            )
        return cast(Found, json.loads(path.read_text(encoding="utf-8")))

    # What is left behind

    def provenance(self) -> dict[str, str]:
        training, validation, pool = self.data()
        return {
            "source": "photographs that ship in scikit-learn and scikit-image",
            "licence": LICENCES,
            "restorers fitted on": f"{len(training)} random squares of {', '.join(TRAINING)}",
            "kernels chosen on": f"{len(validation)} squares of {', '.join(VALIDATION)}",
            "pool of calibration and test": f"{len(pool)} squares of {', '.join(HELD_OUT)}",
        }

    def notes(self, found: Mapping[Name, Found]) -> list[str]:
        config = self.config
        lines = [
            f"Squares of {config.size} pixels, grey, made {config.factor} times smaller; error: "
            f"mean of absolute errors over {config.kernel} x {config.kernel} pixels, bound 1. "
            f"Every split calibrates on {config.calibration} squares of the pool and measures on "
            "the others; splits share the pool, and the intervals are over splits, given the pool.",
            "The photographs are few, so the numbers speak of squares of these photographs; the "
            "guarantee does not ask for more than exchangeable squares.",
        ]
        for name in RESTORERS:
            _, _, chosen = self.maps(name)
            levels = [
                level
                for level in config.levels
                if float(_of(found[name], "leakage", "error", level, config).mean()) > level
            ]
            exceeded = (
                f"exceeds level {', '.join(f'{level:g}' for level in levels)}"
                if levels
                else "exceeds no level here"
            )
            other = [
                level
                for level in config.levels
                if max(float(d.mean()) for d in intervals_differ(config, found[name], level)) <= 0
            ]
            intervals = (
                f" At level {', '.join(f'{level:g}' for level in other)} intervals of each pixel "
                "neither exceed the level nor trust less."
                if other
                else ""
            )
            cut = _of(found[name], UNCALIBRATED, "error", config.levels[0], config)
            lines.append(
                f"{name}: box of {chosen['kernel']} chosen for the scores. With "
                f"{config.leaked} of {config.calibration} calibration squares out of its training "
                f"squares the error {exceeded}. A cut that trusts half of the validation pixels "
                f"has an error of {float(cut.mean()):.3g} on the pool, whatever level is wanted."
                + intervals
            )
        return lines

    def draw(self, found: Mapping[Name, Found]) -> None:
        """``figure.png``."""
        path = self.out / "figure.png"
        if not path.exists():
            shown = {}
            for name in RESTORERS:
                with np.load(self.out / name / MAPS) as arrays:
                    keys = ("image", "true", "error", "score")
                    shown[name] = {key: arrays[f"shown {key}"] for key in keys}
            masks = {}
            for name in RESTORERS:
                pool, _, _ = self.maps(name)
                first = pool.of(np.arange(self.config.calibration))
                masks[name] = _calibrated(first, OURS, self.config.levels)
            figure(self.config, found, shown, masks, path)


SHOWN = 8
"""Squares in the figure."""


def _panel(
    config: Config,
    draw: Callable[[Tensor, int, KeyedNoise], Tensor],
    pool: Tensor,
    kernel: int,
    noise: KeyedNoise,
) -> dict[str, np.ndarray]:
    """Restored squares from the middle of the contrasts of the pool, with errors and scores."""
    order = pool.flatten(1).std(1).argsort()
    rows = order[torch.linspace(0.4, 0.98, SHOWN).mul(len(order) - 1).long()]
    clean = pool[rows]
    drawn = draw(clean, config.draws, noise)
    return {
        "image": drawn[0, :, 0].numpy(),
        "true": clean[:, 0].numpy(),
        "error": _error(config)(clean, drawn[0]),
        "score": Variance(kernel=Box(kernel))(drawn),
    }


def figure(
    config: Config,
    found: Mapping[Name, Found],
    shown: Mapping[Name, Mapping[str, np.ndarray]],
    masks: Mapping[Name, Calibration],
    path: Path,
) -> None:
    """Error and trusted share against the level, and restored squares with the doubtful hatched."""
    levels = all_levels(config)
    level = config.levels[len(config.levels) // 2]
    drawn = plt.figure(figsize=(11, 9.4), layout="constrained")
    top, bottom = cast(Any, drawn.subfigures(2, 1, height_ratios=(3.6, 5.4)))
    axes = top.subplots(1, 3)
    for axis, name in zip(axes, RESTORERS, strict=False):
        axis.plot([0, max(levels)], [0, max(levels)], color="0.6", ls="--", lw=1, label="level")
        for k, arm in enumerate((*SCORES, PIXELWISE)):
            style: dict[str, Any] = {"color": f"C{k}", "lw": 1.0}
            if arm == OURS:
                style |= {"lw": 2.2}
            elif arm == PIXELWISE:
                style = {"color": "black", "ls": ":", "lw": 1.6}
            values = np.array(found[name][arm]["error"]).mean(0)
            axis.plot(levels, values, marker=".", ms=4, label=arm, **style)
        cut = np.array(found[name][UNCALIBRATED]["error"]).mean(0)
        axis.plot(levels, cut, color="0.4", lw=1.2, ls=(0, (6, 2)), label=UNCALIBRATED)
        axis.set_title(f"{name}: largest error inside the mask", fontsize=10)
        axis.set_xlabel("level")
        axis.set_ylim(0, 1.15 * max(levels))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=7, loc="upper left")
    for k, arm in enumerate((*SCORES, PIXELWISE)):
        for name, ls in zip(RESTORERS, ("-", "--"), strict=True):
            colour = "black" if arm == PIXELWISE else f"C{k}"
            values = np.array(found[name][arm]["trusted"]).mean(0)
            axes[2].plot(
                levels,
                values,
                ls=ls,
                color=colour,
                lw=2.2 if arm == OURS else 1.0,
            )
    for name, ls in zip(RESTORERS, ("-", "--"), strict=True):
        axes[2].plot([], [], color="0.3", ls=ls, label=name)
    axes[2].legend(frameon=False, fontsize=8, loc="lower right")
    axes[2].set_title("trusted share of the pixels", fontsize=10)
    axes[2].set_xlabel("level")
    axes[2].set_ylim(0, 1.02)
    axes[2].spines[["top", "right"]].set_visible(False)
    grid = bottom.subplots(3 * len(RESTORERS) - 1, SHOWN, squeeze=False)
    worst = max(float(one["error"].max()) for one in shown.values())
    kinds: list[tuple[Name, str]] = [("ridge", "true")]
    kinds += [(name, what) for name in RESTORERS for what in ("image", "error")]
    for row, (name, what) in zip(grid, kinds, strict=True):
        one = shown[name]
        for k, axis in enumerate(row):
            trusted = masks[name].mask(one["score"][k], level)
            if what == "error":
                axis.imshow(one["error"][k], cmap="magma", vmin=0, vmax=worst)
            else:
                axis.imshow(one[what][k], cmap="gray", vmin=0, vmax=1)
            if what == "image":
                hatch(axis, trusted)
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
        labels = {
            "true": "true",
            "image": f"{name}, doubtful\nat level {level:g}",
            "error": "its true error",
        }
        row[0].set_ylabel(labels[what], rotation=0, ha="right", va="center", fontsize=9)
    with atomic(path) as temporary:
        drawn.savefig(temporary, dpi=150, format="png")
    plt.close(drawn)


# Full scale: a pipeline of diffusers on a folder of photographs


class Pipeline:
    """A super-resolution pipeline of diffusers as a restorer, (3, height, width) in [0, 1]."""

    def __init__(self, source: str, evaluations: int) -> None:
        try:
            from diffusers import DiffusionPipeline
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "a pipeline needs the extra 'vision': pip install 'fluvial[vision]'"
            ) from error
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.pipeline: Any = DiffusionPipeline.from_pretrained(
            source, local_files_only=os.path.isdir(source)
        ).to(self.device)
        self.pipeline.set_progress_bar_config(disable=True)
        self.evaluations = evaluations

    def __call__(self, x: Tensor, noise: KeyedNoise) -> Tensor:
        from PIL import Image

        pixels = (255 * x).round().to(torch.uint8).permute(1, 2, 0).numpy()
        # its own generator: torch's seeds have 63 bits
        generator = torch.Generator(self.device).manual_seed(noise.seed >> 1)
        options: dict[str, Any] = {"num_inference_steps": self.evaluations, "generator": generator}
        if "prompt" in signature(self.pipeline.__call__).parameters:
            options["prompt"] = ""
        found = self.pipeline(image=Image.fromarray(pixels), output_type="np", **options).images[0]
        return torch.from_numpy(np.asarray(found)).permute(2, 0, 1)


def photographs(config: Config) -> list[Path]:
    """The files of the user's folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds too few images to calibrate and to measure on.
    """
    folder = Path(config.files)
    if not folder.is_dir():
        raise FileNotFoundError(f"files: there is no folder {folder}")
    suffixes = {".png", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".bmp"}
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    if len(paths) <= config.calibration:
        raise ValueError(
            f"files: {folder} holds {len(paths)} images, more than calibration "
            f"{config.calibration} are needed"
        )
    return paths


def pipeline_mask(config: Config, restorer: Callable[[Any, KeyedNoise], Any]) -> ConfidenceMask:
    """The masks of the full preset: Lab colours and the kernels of the paper."""
    return ConfidenceMask(
        restorer,
        score=Variance(kernel=Box(config.kernel), clip=0.95, blur=config.blur or None),
        error=Difference(kernel=Gaussian(config.blur) if config.blur else Box(config.kernel)),
        draws=config.draws,
        noise=KeyedNoise(config.seed),
    )


def _with_pipeline(config: Config, preset: str, out: Path, paths: Sequence[Path]) -> Report:
    """One random split of a user's photographs."""
    from fluvial.data.images import decode

    started = time.perf_counter()
    noise = KeyedNoise(config.seed)
    order = noise.uniform(torch.empty(len(paths), dtype=torch.float64)).argsort().tolist()

    def image(number: int) -> Tensor:
        pixels = decode(paths[number], (config.size, config.size), 3, "crop")
        return torch.from_numpy(pixels.copy()).float() / 255

    def degrade(y: Tensor) -> Tensor:
        return (255 * functional.avg_pool2d(y, config.factor)).round() / 255

    mask = pipeline_mask(config, Pipeline(config.pipeline, config.evaluations))
    ours, test = order[: config.calibration], order[config.calibration :]
    mask.calibrate(map(image, ours), degrade, levels=config.levels, progress=True)
    mask.save(out / "calibration.json", overwrite=True)
    found = mask.evaluate(map(image, test), degrade, progress=True)
    report = Report(
        system=SYSTEM,
        claim=CLAIM,
        preset=preset,
        config=config,
        comparisons=[
            Comparison(f"level less the largest error, level {one.level:g}", [one.level - one.mean])
            for one in found
        ],
        table=[
            {
                "level": one.level,
                "error": one.mean,
                "standard error": one.standard_error,
                "images over the level": one.over,
                "trusted": one.trusted,
            }
            for one in found
        ],
        data={
            "source": f"{len(paths)} images of {Path(config.files).name}",
            "licence": "that of the user's images",
            "calibrated on": str(len(ours)),
            "measured on": str(len(test)),
        },
        seconds=time.perf_counter() - started,
        notes=[str(mask.calibration)],
    )
    write_report(report, out)
    return report
