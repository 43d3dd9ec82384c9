"""The claim of the samplers with Wasserstein bounds: second order needs fewer steps.

Every scheme follows one Brownian motion on one field, beside a run with many steps; the root mean
square of the difference is the error, which bounds the Wasserstein distance that the steps cost.
Four targets: a log-concave posterior whose score is an exact sum, the score of a small network
trained on digits, and a U-Net and a diffusion transformer trained on pictures.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import matplotlib

matplotlib.use("Agg")  # a run has no screen
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import NullFormatter
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.decomposition import PCA
from torch import Tensor
from torch.nn import functional

from fluvial.claims.report import Report, open_run, write_report
from fluvial.claims.resumable import Resumable
from fluvial.claims.verdict import Comparison
from fluvial.core.gaussian.losses import Matching
from fluvial.core.gaussian.multistep import DDIM
from fluvial.core.gaussian.paths import AlphaSigmaPath, VPLinear
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Field, left_broadcast
from fluvial.core.simulate import simulate
from fluvial.core.time import grid_pairs, uniform_grid
from fluvial.data import SETS, scaled
from fluvial.dynamics.wasserstein_samplers import (
    Scheme,
    WassersteinSampler,
    shared_runs,
    strong_error,
)
from fluvial.metrics import sliced_wasserstein
from fluvial.networks import MLP, DiT, UNet
from fluvial.training.files import atomic
from fluvial.training.loop import Stage, Training, train

SYSTEM = "wasserstein-samplers"
CLAIM = (
    "On a shared Brownian path the second-order schemes beat Euler-Maruyama in fewer steps: on a "
    "log-concave posterior local linearisation in 25 steps is closer to the reference than "
    "Euler-Maruyama in 100, and its error falls by a power of the step that is larger by 0.4; on a "
    "learned score of digits it has at most a third of the error in 200 steps; and on the learned "
    "scores of images, a U-Net's and a transformer's, the one-product form reaches in at most half "
    "of the steps the error that Euler-Maruyama has in the most steps tried."
)
SLOPE_MARGIN = 0.4
"""Of the difference of fitted orders; the order expected is 1 more or 1/2."""
DIGITS_MARGIN = math.log(3)
"""Of the log of the ratio of the errors."""
STEPS_MARGIN = math.log(2)
"""Of the log of the ratio of the numbers of steps."""

Arm = Literal["log-concave", "digits", "U-Net", "DiT"]
ARMS: tuple[Arm, ...] = get_args(Arm)
IMAGE_ARMS: tuple[Arm, Arm] = ("U-Net", "DiT")
HORIZON = 5.0
"""T of the first two targets."""
SHORTEST = 2e-7
"""Last step of the reference on digits, of which a score of 1 / sqrt(s) makes 2 sqrt(T 2e-7)."""
NAMES: dict[Scheme, str] = {
    "em": "EM",
    "ei": "EI",
    "rem": "REM",
    "rei": "REI",
    "so": "SO",
    "so-jvp": "SO, one product",
}
SAMPLE_SEED, TIMED = 3_000, 5
Outcome: TypeAlias = Mapping[str, Mapping[int, Mapping[str, float]]]
"""By scheme and number of steps: "error" and, of images, "distance"."""


@dataclass(frozen=True)
class Config:
    """Everything a run of the claim depends on.

    Args:
        data: a name in `fluvial.data.SETS`; square images with labels.
        pool: side of the squares of pixels that are averaged.
        beta: of the path of the image networks, `VPLinear`.
        end: time at which their runs are compared, above 0; the clean prediction there is the
            sample.
        unet_width: channels of the `UNet` at full size, twice as many at half of it.
        patch: side of a patch of the `DiT`.
        dit_width: of the `DiT`.
        dit_depth: of the `DiT`.
        steps: optimiser steps of each image network.
        batch_size: of the same.
        lr: of the same.
        ema: decay of their averaged weights.
        images: rows that are sampled and compared.
        counts: steps from t = 1 to ``end`` at which schemes are compared on images.
        series_counts: those of SO by its power series, six products a step.
        cells: steps of the reference on images.
        digits_steps: optimiser steps of the network on digits.
        digits_counts: steps on digits.
        digits_cells: of the reference there, before the last are divided; see `refined`.
        counts_exact: steps on the log-concave posterior.
        cells_exact: of the reference there.
        paths: rows on the last two targets.
        seeds: one run of everything a seed: other networks, motions and rows of data.
        side_by_side: two targets at a time, each on half of the cores.
    """

    data: str = "animals"
    pool: int = 2
    beta: tuple[float, float] = (0.1, 20.0)
    end: float = 0.02
    unet_width: int = 16
    patch: int = 2
    dit_width: int = 64
    dit_depth: int = 3
    steps: int = 500
    batch_size: int = 64
    lr: float = 3e-3
    ema: float = 0.99
    images: int = 50
    counts: tuple[int, ...] = (8, 16, 32, 64)
    series_counts: tuple[int, ...] = (8, 16)
    cells: int = 128
    digits_steps: int = 4000
    digits_counts: tuple[int, ...] = (25, 50, 100, 200)
    digits_cells: int = 1600
    counts_exact: tuple[int, ...] = (25, 50, 100)
    cells_exact: int = 400
    paths: int = 150
    seeds: tuple[int, ...] = (0,)
    side_by_side: bool = True

    def __post_init__(self) -> None:
        for name in ("counts", "digits_counts", "counts_exact", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} needs at least one value")
        for name in ("counts", "digits_counts", "counts_exact"):
            if len(set(getattr(self, name))) < 2:
                raise ValueError(f"{name} needs two values or more, for a slope")
        if not 0 < self.end < 1:
            raise ValueError(f"end must lie between 0 and 1, got {self.end}")
        largest = max(self.digits_counts)
        if self.digits_cells % (2 * largest) or self.digits_cells < 4 * largest:
            raise ValueError(
                f"digits_cells must be a multiple of {2 * largest}, twice the most digits_counts, "
                f"and {4 * largest} at least, got {self.digits_cells}"
            )
        if min(self.images, self.paths) < 2:
            raise ValueError(f"need images and paths >= 2, got {self.images} and {self.paths}")


PRESETS: dict[str, Config] = {
    "smoke": Config(
        data="digits",
        pool=4,
        patch=7,
        unet_width=8,
        dit_width=16,
        dit_depth=1,
        steps=2,
        batch_size=8,
        images=4,
        counts=(2, 4),
        series_counts=(2,),
        cells=8,
        digits_steps=2,
        digits_counts=(2, 4),
        digits_cells=16,
        counts_exact=(4, 8),
        cells_exact=16,
        paths=8,
        side_by_side=False,
    ),
    "laptop": Config(
        steps=150,
        images=20,
        series_counts=(8,),
        cells=64,
        counts=(8, 16, 32),
        digits_steps=1000,
        digits_cells=800,
    ),
    "record": Config(seeds=(0, 1, 2)),
    # the U-Net of the paper's MNIST experiment is not described; T = 2 in 10 steps of 0.2, 100
    # epochs of 60,000 images
    "full": Config(
        data="digits",
        pool=1,
        beta=(2.0, 2.0),
        end=1e-3,
        unet_width=64,
        dit_width=384,
        dit_depth=12,
        steps=187_500,
        batch_size=32,
        lr=1e-4,
        ema=0.9999,
        images=1000,
        counts=(5, 10),
        series_counts=(5, 10),
        cells=200,
        seeds=(0, 1, 2),
        side_by_side=False,
    ),
}


@dataclass(frozen=True)
class Points:
    """The clean prediction for data that are one of ``points`` (K, d), with weights.

    E[x_0 | x_t] is the mean of the points under weights times exp(-|x - alpha m|^2 / (2 sigma^2)):
    an exact sum at every time.
    """

    path: AlphaSigmaPath
    points: Tensor
    log_weights: Tensor
    predicts: str = "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        alpha, sigma = self.path.alpha(t), self.path.sigma(t)
        ratio, factor = (
            left_broadcast(f, x) for f in (alpha / sigma**2, 0.5 * (alpha / sigma) ** 2)
        )
        logits = (ratio * x) @ self.points.T - factor * self.points.square().sum(1)
        logits = logits + self.log_weights
        # numbers below the smallest normal one are slow, and e^-100 is nothing beside 1
        logits = (logits - logits.detach().amax(1, keepdim=True)).clamp(min=-100)
        return logits.softmax(1) @ self.points


def posterior(seed: int) -> Points:
    """Bayesian logistic regression on 20 patients, on a grid of 61 x 61 parameters."""
    data = load_breast_cancer()
    x = data.data[:, :2]
    x = (x - x.mean(0)) / x.std(0)
    rows = np.random.default_rng(seed).permutation(len(x))[:20]
    x, y = torch.from_numpy(x[rows]), torch.from_numpy(2.0 * data.target[rows] - 1)
    line = torch.linspace(-4.5, 2.5, 61, dtype=torch.float64)
    points = torch.cartesian_prod(line, line)
    log = -points.square().sum(1) / 2 - functional.softplus(-y * (points @ x.T)).sum(1)
    kept = log > log.max() - 20
    return Points(VPLinear(HORIZON, HORIZON), points[kept], log[kept])


def whitened_digits() -> Tensor:
    """scikit-learn's 1,797 digits, 8 whitened principal components."""
    return torch.from_numpy(PCA(8, whiten=True).fit_transform(load_digits().data)).float()


def build(config: Config, arm: Arm, shape: Sequence[int], num_classes: int, seed: int) -> Matching:
    """The objective of a learned target: a network that predicts the noise."""
    if arm == "digits":
        network: Any = MLP(shape=shape, width=128, depth=3, seed=seed)
        return Matching(network, VPLinear(HORIZON, HORIZON), predicts="noise")
    channels, size, _ = shape
    if arm == "U-Net":
        network = UNet(
            size=size,
            channels=channels,
            width=config.unet_width,
            multipliers=(1, 2) if size % 2 == 0 else (1,),
            blocks=1,
            num_classes=num_classes,
            seed=seed,
        )
    else:
        network = DiT(
            size=size,
            channels=channels,
            patch=config.patch,
            width=config.dit_width,
            depth=config.dit_depth,
            heads=4,
            num_classes=num_classes,
            seed=seed,
        )
    return Matching(network, VPLinear(*config.beta), predicts="noise")


def run(
    config: Config, preset: str, out: Path, *, force: bool = False, progress: bool = True
) -> Report:
    """Run the claim into the folder ``out``; go on where an interrupted run of it stopped.

    Raises:
        FileExistsError: ``out`` holds something else, or a finished run; see `open_run`.
        ValueError: there is no image set of that name.
    """
    data = _read(config)
    run = _ClaimRun(config, open_run(out, preset, config, force=force), progress)
    for seed in config.seeds:
        run.each("outcome", [("log-concave", seed), ("digits", seed)])
        run.each("outcome", [(arm, seed) for arm in IMAGE_ARMS])
    outcomes = {arm: [run.outcome(arm, seed) for seed in config.seeds] for arm in ARMS}
    costs = {arm: run.cost(arm) for arm in ARMS}
    report = Report(
        system=SYSTEM,
        claim=CLAIM,
        preset=preset,
        config=config,
        comparisons=_comparisons(config, outcomes),
        table=_table(config, outcomes, costs, run.floor()),
        data=data.provenance,
        seconds=run.spent(),
        notes=_notes(config, data, outcomes, costs, run.references()),
    )
    draw(out / "figure.png", config, outcomes, costs)
    write_report(report, out)
    return report


class _ClaimRun(Resumable[Config]):
    """The steps of a run. Each leaves a file in ``out``, and is skipped where that file is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.data = _read(self.config)

    def outcome(self, arm: Arm, seed: int) -> Outcome:
        """Errors and distances of a target, for one seed."""
        stored = self.stored(f"{_folder(arm, seed)}.json", partial(self._measure, arm, seed))
        return {
            scheme: {int(count): values for count, values in by_count.items()}
            for scheme, by_count in stored["outcome"].items()
        }

    def _measure(self, arm: Arm, seed: int) -> dict[str, Any]:
        if self.progress:
            print(f"{arm}: seed {seed}", file=sys.stderr)
        field, path = self._field(arm, seed)
        noise = KeyedNoise(SAMPLE_SEED).at(seed)
        if arm in IMAGE_ARMS:
            return self._measure_images(arm, field, path, noise)
        dim = 2 if arm == "log-concave" else 8
        dtype = torch.float64 if arm == "log-concave" else torch.float32
        exact = arm == "log-concave"
        counts = self.config.counts_exact if exact else self.config.digits_counts
        cells = self.config.cells_exact if exact else self.config.digits_cells
        x = path.source(torch.empty(self.config.paths, dim, dtype=dtype), noise)
        reference, runs = shared_runs(
            field,
            x,
            path=path,
            noise=noise,
            counts={**dict.fromkeys(NAMES, counts), "so-jvp": _with_half(counts, cells)},
            cells=cells,
            grid=None if exact else self._digits_grid,
        )
        errors = {key: {"error": strong_error(x, reference)} for key, x in runs.items()}
        half = errors.pop(("so-jvp", cells // 2)) if cells // 2 not in counts else None
        half = half or errors["so-jvp", cells // 2]
        return {"outcome": _nested(errors), "half": half["error"]}

    def _digits_grid(self, steps: int) -> Tensor:
        """Equal steps for the schemes; refined ones for the reference and for half of it."""
        counts, cells = self.config.digits_counts, self.config.digits_cells
        if steps in counts:
            return uniform_grid(steps)
        finest = refined(cells, max(counts))
        return finest if steps == cells else grid_pairs([*finest[::2, 0].tolist(), 0.0])

    def _measure_images(
        self, arm: Arm, field: Field, path: AlphaSigmaPath, noise: KeyedNoise
    ) -> dict[str, Any]:
        config = self.config
        real, label = self.data.held(config.images)
        x = path.source(torch.empty_like(real), noise)
        counts: dict[Scheme, Sequence[int]] = dict.fromkeys(NAMES, config.counts)
        counts["so"] = config.series_counts
        counts["so-jvp"] = _with_half(config.counts, config.cells)
        reference, runs = shared_runs(
            field,
            x,
            path=path,
            noise=noise,
            counts=counts,
            cells=config.cells,
            grid=lambda steps: uniform_grid(steps, 1.0, config.end),
            hessian="jvp",
            label=label,
        )
        last, simulated = grid_pairs([config.end, 0.0]), cast(Any, simulate)

        @torch.no_grad()
        def distance(x: Tensor) -> float:
            clean = simulated(x, last, DDIM(), path, field, noise, label=label)
            return sliced_wasserstein(clean.flatten(1), real.flatten(1))

        measured = {
            key: {"error": strong_error(x, reference), "distance": distance(x)}
            for key, x in runs.items()
        }
        half = measured["so-jvp", config.cells // 2]["error"]
        if config.cells // 2 not in config.counts:
            del measured["so-jvp", config.cells // 2]
        return {"outcome": _nested(measured), "half": half, "reference": distance(reference)}

    def _field(self, arm: Arm, seed: int) -> tuple[Field, AlphaSigmaPath]:
        if arm == "log-concave":
            exact = posterior(seed)
            return exact, exact.path
        if arm == "digits":
            data: dict[str, Tensor] = {"x": whitened_digits()}
            training = Training(
                steps=self.config.digits_steps, batch_size=256, lr=1e-3, ema=0.999, seed=seed
            )
            objective = build(self.config, arm, (8,), 0, seed)
        else:
            x, label = self.data.parts["train"]
            data = {"x": x, "label": label}
            training = Training(
                steps=self.config.steps,
                batch_size=self.config.batch_size,
                lr=self.config.lr,
                ema=self.config.ema,
                warmup=min(50, self.config.steps),
                schedule="linear",
                decay=0.5,
                seed=seed,
            )
            objective = build(self.config, arm, x.shape[1:], self.data.num_classes, seed)
        folder = self.out / _folder(arm, seed)
        train(
            Stage(objective, data, training),
            out=folder,
            progress=self.progress,
            config={"arm": arm, "seed": seed},
        )
        objective.eval()
        return objective.field, cast(AlphaSigmaPath, objective.path)

    def cost(self, arm: Arm) -> float:
        """What a product costs, in evaluations of the field: median times, measured in turn."""

        def measure() -> float:
            field, path = self._field(arm, self.config.seeds[0])
            cond: dict[str, Any] = {}
            if arm in IMAGE_ARMS:
                like, cond["label"] = self.data.held(self.config.images)
            else:
                exact = arm == "log-concave"
                dtype = torch.float64 if exact else torch.float32
                like = torch.empty(self.config.paths, 2 if exact else 8, dtype=dtype)
            x, pairs = KeyedNoise(0).normal(like), grid_pairs([0.6, 0.5])
            schemes: tuple[Scheme, ...] = ("em", "so-jvp")
            seconds: dict[Scheme, list[float]] = {scheme: [] for scheme in schemes}
            simulated: Any = simulate
            for k in range(TIMED + 1):
                for scheme in schemes:
                    sampler = WassersteinSampler(scheme)
                    start = time.perf_counter()
                    with torch.no_grad():
                        simulated(x, pairs, sampler, path, field, KeyedNoise(k), **cond)
                    if k:
                        seconds[scheme].append(time.perf_counter() - start)
            return statistics.median(seconds["so-jvp"]) / statistics.median(seconds["em"])

        return float(self.stored(f"cost-{_folder(arm, 0)}.json", measure))

    def references(self) -> dict[Arm, dict[str, float]]:
        """By target, means over seeds: "half", the error of half as many steps as the reference
        has, and of images "reference", the distance of its samples."""
        result: dict[Arm, dict[str, float]] = {}
        for arm in ARMS:
            stored = [
                json.loads((self.out / f"{_folder(arm, seed)}.json").read_text(encoding="utf-8"))
                for seed in self.config.seeds
            ]
            result[arm] = {
                name: statistics.fmean(part[name] for part in stored)
                for name in ("half", "reference")
                if name in stored[0]
            }
        return result

    def floor(self) -> float:
        """The distance between two sets of real images that no network was trained on."""
        real, label = self.data.held(self.config.images)
        other = self.data.like(label, "validation")
        return sliced_wasserstein(other.flatten(1), real.flatten(1))


def refined(cells: int, count: int) -> Tensor:
    """Pairs of ``cells`` equal steps from 1 to 0, those after 1 - 1 / ``count`` shorter towards 0.

    The noise that a network predicts need not vanish with t, and then its score grows as
    1 / sqrt(s). Equal steps h of any scheme converge to the end of that as sqrt(h) only: the
    reference in equal steps would be as wrong as the schemes beside it. Here the last steps are all
    the same part of the time that is left, ``count / cells``, until that is `SHORTEST`. The number
    of steps is even.
    """
    equal = torch.linspace(1, 0, cells + 1, dtype=torch.float64)[: cells - cells // count + 1]
    part = count / cells
    shorter = math.ceil(math.log(SHORTEST * count) / math.log1p(-part))
    shorter += (len(equal) - 1 + shorter + 1) % 2
    left = (1 - part) ** torch.arange(1, shorter + 1, dtype=torch.float64) / count
    return grid_pairs([*equal.tolist(), *left.tolist(), 0.0])


def _with_half(counts: Sequence[int], cells: int) -> tuple[int, ...]:
    return tuple(sorted({*counts, cells // 2}))


def _folder(arm: Arm, seed: int) -> str:
    return f"{arm.lower()}-{seed}"


def _nested(measured: Mapping[tuple[Scheme, int], Any]) -> dict[str, dict[str, Any]]:
    nested: dict[str, dict[str, Any]] = {}
    for (scheme, count), values in measured.items():
        nested.setdefault(scheme, {})[str(count)] = values
    return nested


# What is made of the outcomes


def slope(errors: Mapping[int, Mapping[str, float]]) -> float:
    """The power of 1 / steps with which the error falls, by least squares of the logarithms."""
    counts = sorted(errors)
    logs = [math.log(errors[count]["error"]) for count in counts]
    return -float(np.polyfit(np.log(counts), logs, 1)[0])


def steps_to_reach(errors: Mapping[int, Mapping[str, float]], error: float) -> float:
    """The number of steps with that error, between two counts by a power law, beyond them by the
    law of the two nearest."""
    counts = sorted(errors)
    logs = [math.log(errors[count]["error"]) for count in counts]
    aim = math.log(error)
    i = next((i for i in range(1, len(counts)) if logs[i] <= aim), len(counts) - 1)
    power = (logs[i - 1] - logs[i]) / math.log(counts[i] / counts[i - 1])
    return counts[i - 1] * math.exp((logs[i - 1] - aim) / power) if power > 0 else math.inf


def _comparisons(config: Config, outcomes: Mapping[Arm, Sequence[Outcome]]) -> list[Comparison]:
    fewest, most = min(config.counts_exact), max(config.counts_exact)
    exact, digits = outcomes["log-concave"], outcomes["digits"]
    last = max(config.digits_counts)
    comparisons = [
        Comparison(
            f"log-concave: log error of EM in {most} steps, less that of SO in {fewest}",
            [math.log(o["em"][most]["error"] / o["so"][fewest]["error"]) for o in exact],
        ),
        Comparison(
            "log-concave: order of SO, less that of EM",
            [slope(o["so"]) - slope(o["em"]) for o in exact],
            SLOPE_MARGIN,
        ),
        Comparison(
            f"digits: log error of EM in {last} steps, less that of SO",
            [math.log(o["em"][last]["error"] / o["so"][last]["error"]) for o in digits],
            DIGITS_MARGIN,
        ),
    ]
    top = max(config.counts)
    for arm in IMAGE_ARMS:
        ratios = [
            math.log(top / steps_to_reach(o["so-jvp"], o["em"][top]["error"]))
            for o in outcomes[arm]
        ]
        comparisons.append(
            Comparison(
                f"{arm}: log of the steps of EM, {top}, over those of SO with one product for the "
                "same error",
                ratios,
                STEPS_MARGIN,
            )
        )
    return comparisons


def _dim(arm: Arm) -> int:
    """Enough of it to know whether the Hessian is formed."""
    return {"log-concave": 2, "digits": 8}.get(arm, 1 << 20)


def evaluations(arm: Arm, scheme: Scheme, steps: int, cost: float) -> float:
    """Of the field, for one sample: a product counts ``cost``."""
    once, products = WassersteinSampler(scheme, order=6).calls(_dim(arm))
    return steps * (once + products * cost)


def _table(
    config: Config,
    outcomes: Mapping[Arm, Sequence[Outcome]],
    costs: Mapping[Arm, float],
    floor: float,
) -> list[dict[str, Any]]:
    """One row a target, scheme and number of steps; means over seeds."""
    rows = []
    for arm in ARMS:
        for scheme, by_count in outcomes[arm][0].items():
            for count, values in sorted(by_count.items()):
                over = [outcome[scheme][count] for outcome in outcomes[arm]]
                cost = evaluations(arm, cast(Scheme, scheme), count, costs[arm])
                rows.append(
                    {
                        "target": arm,
                        "scheme": NAMES[cast(Scheme, scheme)],
                        "steps": count,
                        "evaluations": cost,
                        "error": statistics.fmean(each["error"] for each in over),
                        "sliced W2": statistics.fmean(each["distance"] for each in over)
                        if "distance" in values
                        else None,
                    }
                )
    real = {"target": "real images (floor)", "scheme": None, "steps": None, "evaluations": None}
    return [*rows, {**real, "error": None, "sliced W2": floor}]


def _notes(
    config: Config,
    data: _Data,
    outcomes: Mapping[Arm, Sequence[Outcome]],
    costs: Mapping[Arm, float],
    references: Mapping[Arm, Mapping[str, float]],
) -> list[str]:
    top = max(config.counts)
    notes = [
        "Error: root mean square distance, in the norm of an event, to the reference on the same "
        "Brownian motion, which is SO with one product in "
        f"{config.cells_exact} (log-concave), {config.digits_cells} (digits) and {config.cells} "
        "(images) steps, on digits with shorter ones at the end. Half of these steps differ from "
        "the reference by "
        + "; ".join(f"{arm} {values['half']:.2g}" for arm, values in references.items())
        + ".",
        "Evaluations count a product with the Hessian at its measured cost, with the evaluation in "
        "it: " + "; ".join(f"{arm} {cost:.1f}" for arm, cost in costs.items()) + ". SO forms the "
        "Hessian on the first two targets and takes six products a step on images.",
        f"Images: {data.provenance['name']} averaged over {config.pool} x {config.pool} pixels, "
        f"{' x '.join(map(str, data.shape[1:]))} pixels; a U-Net of width {config.unet_width} and "
        f"a DiT of width {config.dit_width} and depth {config.dit_depth}, trained for "
        f"{config.steps} steps of {config.batch_size}, far smaller than the paper's full scale. "
        f"Runs go from t = 1 to {config.end} in equal steps of t on VPLinear{config.beta}, and the "
        "clean prediction there is the sample.",
        f"Sliced W2: {config.images} samples against as many held-out images of the same classes; "
        "the reference has "
        + "; ".join(f"{arm} {references[arm]['reference']:.4g}" for arm in IMAGE_ARMS)
        + ". With so few rows it tells coarse runs from fine ones, and no more.",
    ]
    for arm in IMAGE_ARMS:
        reach = {
            scheme: [
                steps_to_reach(outcome[scheme], outcome["em"][top]["error"])
                for outcome in outcomes[arm]
            ]
            for scheme in outcomes[arm][0]
            if len(outcomes[arm][0][scheme]) > 1
        }
        parts = "; ".join(
            f"{NAMES[cast(Scheme, scheme)]} {statistics.fmean(steps):.3g} steps, {spent:.3g} "
            "evaluations"
            for scheme, steps in reach.items()
            for spent in [
                evaluations(arm, cast(Scheme, scheme), 1, costs[arm]) * statistics.fmean(steps)
            ]
        )
        notes.append(f"{arm}, to the error of EM in {top} steps: {parts}.")
    return notes


def draw(
    path: Path,
    config: Config,
    outcomes: Mapping[Arm, Sequence[Outcome]],
    costs: Mapping[Arm, float],
) -> None:
    """Error against the step and against evaluations, a column a target."""
    figure, axes = plt.subplots(
        2, len(ARMS), figsize=(13, 6.4), layout="constrained", sharey="col", squeeze=False
    )
    for column, arm in enumerate(ARMS):
        length = HORIZON if arm not in IMAGE_ARMS else 1 - config.end
        upper, lower = axes[0, column], axes[1, column]
        for i, (scheme, by_count) in enumerate(outcomes[arm][0].items()):
            counts = sorted(by_count)
            errors = [
                math.exp(
                    statistics.fmean(math.log(o[scheme][count]["error"]) for o in outcomes[arm])
                )
                for count in counts
            ]
            name = cast(Scheme, scheme)
            style = {"marker": "osDv^P"[i % 6], "color": f"C{i}", "label": NAMES[name]}
            upper.plot([length / count for count in counts], errors, **style)
            spent = [evaluations(arm, name, count, costs[arm]) for count in counts]
            lower.plot(spent, errors, **style)
        _guides(upper, outcomes[arm][0], length)
        upper.set_title(arm)
        upper.set_xlabel("step in the clock" if arm not in IMAGE_ARMS else "step in t")
        lower.set_xlabel("evaluations a sample")
        for axis in (upper, lower):
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.tick_params(which="both", labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        ticks = [length / count for count in sorted(outcomes[arm][0]["em"])]
        upper.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks])
        upper.minorticks_off()
        if max(spent) < 1_000:  # one decade or so, in which the minor ticks' labels collide
            lower.xaxis.set_minor_formatter(NullFormatter())
        # the exponential schemes blow up where a step is long
        largest = max(o["em"][min(o["em"])]["error"] for o in outcomes[arm])
        if upper.get_ylim()[1] > 5 * largest:
            upper.set_ylim(top=5 * largest)
    for row in axes:
        row[0].set_ylabel("error on a shared path")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)


def _guides(axis: Any, outcome: Outcome, length: float) -> None:
    """Slopes 1 and 1.5, through the finest errors of EM and of SO with one product."""
    for scheme, power in (("em", 1.0), ("so-jvp", 1.5)):
        counts = sorted(outcome[scheme])
        steps = np.array([length / count for count in counts])
        end = outcome[scheme][counts[-1]]["error"] * 0.8
        axis.plot(steps, end * (steps / steps[-1]) ** power, color="0.6", linestyle=":", zorder=0)
        axis.annotate(
            f"{power:g}", (steps[0], end * (steps[0] / steps[-1]) ** power), color="0.4", fontsize=8
        )


# Data


@dataclass(frozen=True)
class _Data:
    """Floating images by part, with their labels."""

    parts: dict[str, tuple[Tensor, Tensor]]
    num_classes: int
    provenance: dict[str, str]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parts["train"][0].shape[1:])

    def held(self, count: int) -> tuple[Tensor, Tensor]:
        """Held-out images and their labels, the classes in turn."""
        label = torch.arange(count) % self.num_classes
        return self.like(label, "test"), label

    def like(self, label: Tensor, part: str) -> Tensor:
        """Images of a part with these labels."""
        x, labels = self.parts[part]
        rows = torch.empty(len(label), dtype=torch.int64)
        for k in range(self.num_classes):
            wanted, there = (label == k).nonzero()[:, 0], (labels == k).nonzero()[:, 0]
            if len(there) < len(wanted):
                raise ValueError(
                    f"images: {len(wanted)} of class {k} are wanted, and {part} has {len(there)}"
                )
            rows[wanted] = there[: len(wanted)]
        return x[rows]


@functools.cache
def _read(config: Config) -> _Data:
    if config.data not in SETS:
        raise ValueError(f"data: there is no image set {config.data!r} ({', '.join(SETS)})")
    data = SETS[config.data]()
    parts = {
        name: (functional.avg_pool2d(scaled(part.x), config.pool), cast(Tensor, part.label))
        for name, part in data.split().items()
    }
    provenance = {
        "name": data.name,
        "source": data.source,
        "licence": data.licence,
        "other data": "breast_cancer and digits of scikit-learn",
    }
    return _Data(parts, len(data.label_names), provenance)
