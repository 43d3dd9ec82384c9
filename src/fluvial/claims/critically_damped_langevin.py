"""The claim of critically damped Langevin diffusion with position noise, and of its samplers.

Every arm gets the same data, network, training steps, network calls and tuning of the learning
rate: the process with and without noise on the position, where it mixes slowly (a = 0.25) and where
it mixes (a = 1); beside each a the process without position noise whose prior has the variance of
the data, since half of what position noise does is to match that variance; the process of Dockhorn
et al. with their values; and a variance-preserving diffusion. Samples are compared by sliced
Wasserstein distance to held-out rows. Beside it stands the exact error of the same sampler on
normal data.
"""

from __future__ import annotations

import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a run has no screen
import matplotlib.pyplot as plt
import numpy as np
import sklearn
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fluvial.claims.report import Report, open_run, write_report
from fluvial.claims.resumable import Resumable
from fluvial.claims.verdict import Comparison
from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.losses import Matching
from fluvial.core.gaussian.paths import VPLinear
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Sampler, Steering
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import Uniform, uniform_grid
from fluvial.data import DataSet, Format
from fluvial.dynamics.critically_damped_langevin import (
    EM,
    SSCS,
    CriticallyDamped,
    CriticallyDampedLangevin,
    GaussianScore,
    Leapfrog,
    ResidualMLP,
    gaussian_w2,
)
from fluvial.dynamics.critically_damped_langevin.model import OFFICIAL, Output
from fluvial.metrics import sliced_wasserstein
from fluvial.training.files import atomic, save_model
from fluvial.training.loop import Stage, Training, train

SYSTEM = "critically-damped-langevin"
CLAIM = (
    "On ten principal components of handwritten digits, position noise of 0.5 at least halves the "
    "sliced Wasserstein distance of critically damped Langevin diffusion to held-out data where it "
    "mixes slowly (a = 0.25), and where it mixes (a = 1) the best position noise is at most 5 % "
    "worse than none; its splitting sampler in 50 network calls is at most 5 % worse than "
    "Euler-Maruyama in 200; and with a = 1 and epsilon = 0.25 it is closer in 50 calls than a "
    "variance-preserving diffusion of equal network, training and calls."
)
SLOW, FAST = 0.25, 1.0
"""The two a of the claim."""
HALVED = math.log(2)
"""Margin of the log ratio of distances at a = 0.25, epsilon = 0 over epsilon = 0.5."""
NOT_WORSE = -math.log(1.05)
"""Margin of the log ratios that may be 5 % worse."""
BETTER = 0.0
"""Margin of the log ratio of the variance-preserving diffusion over CLD."""

SIGMA = math.sqrt(2)
VP = "VP"
JITTER = 1e-6
LEAST_TIME = 1e-5
SEARCH_SEED, SAMPLE_SEED = 1_000, 2_000
EXACT_A, EXACT_EPSILON = (0.1, 0.25, 0.5, 1.0, 2.0), (0.0, 0.1, 0.25, 0.5, 1.0)
"""The grid of the paper's figure, for the exact error on normal data."""
MODEL = "model.safetensors"


@dataclass(frozen=True)
class Arm:
    """A forward process: ``a`` is None for the variance-preserving one."""

    a: float | None
    epsilon: float = 0.0
    sigma: float = SIGMA

    @property
    def name(self) -> str:
        if self.a is None:
            return VP
        matched = "" if self.sigma == SIGMA else ", matched prior"
        return f"CLD a={self.a:g} epsilon={self.epsilon:g}{matched}"

    @property
    def path(self) -> CriticallyDamped:
        assert self.a is not None
        return CriticallyDamped(self.a, self.epsilon, self.sigma)


@dataclass(frozen=True)
class Config:
    """Everything a run of the claim depends on.

    Args:
        data: digits (8 x 8, of scikit-learn), funnel or mg25 (the sets of the paper).
        components: principal components of the digits, or dimensions of the other sets.
        rows: of the other sets, 10 of 12 to train on; ignored for the digits, which are 1,797.
        a: rates of damping; 0.25 and 1 are among them.
        epsilon: noise on the position; 0, 0.25 and 0.5 are among them.
        width: of the residual network.
        depth: of the residual network.
        time_scale: by which its time is multiplied; 1 is official.
        output: what the networks give: the score (official), or noise.
        steps: optimiser steps of every training.
        batch_size: rows a step.
        ema: decay of the averaged weights.
        lr: learning rates of Adam; several are tried for every arm on validation rows first.
        search_share: share of ``steps`` that a learning rate is tried for.
        seeds: one training of each arm a seed.
        many: network calls a sample, the larger of two numbers at which arms are measured.
        few: the smaller one, even.
        projections: of the sliced distance.
        draws: sets of samples over which a distance is averaged, each as large as what is held out.
        exact_steps: of Euler-Maruyama on normal data, for the figure.
        side_by_side: train in two processes, each on half of the cores; else in turn.
    """

    data: str = "digits"
    components: int = 10
    rows: int = 60_000
    a: tuple[float, ...] = (SLOW, FAST)
    epsilon: tuple[float, ...] = (0.0, 0.25, 0.5)
    width: int = 256
    depth: int = 3
    time_scale: float = 1.0
    output: Output = "score"
    steps: int = 3_000
    batch_size: int = 256
    ema: float = 0.995
    lr: tuple[float, ...] = (1e-3,)
    search_share: float = 0.15
    seeds: tuple[int, ...] = (0,)
    many: int = 200
    few: int = 50
    projections: int = 500
    draws: int = 2
    exact_steps: int = 1_000
    side_by_side: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "seeds"):
            if not getattr(self, name):
                raise ValueError(f"{name} needs at least one value")
        for name, needed in (("a", {SLOW, FAST}), ("epsilon", {0.0, 0.25, 0.5})):
            if not needed <= set(getattr(self, name)):
                raise ValueError(f"{name} must hold {sorted(needed)}, got {getattr(self, name)}")
        for name in ("draws", "projections", "components", "rows", "many"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.few < 2 or self.few % 2 or self.exact_steps < 32:
            raise ValueError(
                "few must be even and positive, and exact_steps at least 32, got "
                f"{self.few} and {self.exact_steps}"
            )
        if self.data not in SETS:
            raise ValueError(f"data must be one of {', '.join(SETS)}, got {self.data!r}")

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Those of the grid, with a matched prior, of Dockhorn et al., and the other process."""
        grid = [Arm(a, epsilon) for a, epsilon in product(self.a, self.epsilon)]
        # the variance of the position, a sigma^2 / 4, is 1
        matched = [Arm(a, 0.0, 2 / math.sqrt(a)) for a in self.a]
        return tuple(dict.fromkeys([*grid, *matched, Arm(2.0), Arm(None)]))

    def ways(self, arm: Arm) -> tuple[tuple[str, int], ...]:
        """(sampler, network calls) at which an arm is measured."""
        em, few = (("EM", self.many), ("EM", self.few)), self.few
        if arm.a is None:
            return (*em, ("ancestral", self.many), ("ancestral", few))
        return (*em, ("SSCS", few), ("leapfrog", few))


def _digits(config: Config) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """Principal components of the training rows, each of variance 1 there."""
    pixels, label = load_digits(return_X_y=True)
    data = DataSet(
        x=torch.from_numpy(pixels),
        label=torch.from_numpy(label).long(),
        format=Format("arrays", (64,), label_names=tuple("0123456789")),
        name="optical digits",
        licence="CC BY 4.0",
        source=f"scikit-learn {sklearn.__version__}",
        citation=(
            "E. Alpaydin and C. Kaynak, Optical recognition of handwritten digits, UCI Machine "
            "Learning Repository, 1998"
        ),
    )
    parts = {name: part.x for name, part in data.split(train=0.6, validation=0.1, test=0.3).items()}
    mean = parts["train"].mean(0)
    _, values, rows = torch.linalg.svd(parts["train"] - mean, full_matrices=False)
    scale = values[: config.components] / math.sqrt(len(parts["train"]) - 1)
    axes = rows[: config.components].T / scale
    about = {"name": data.name, "source": data.source, "licence": data.licence}
    return {name: ((x - mean) @ axes).float() for name, x in parts.items()}, about


def _drawn(config: Config) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """Ten parts of the rows to train on, one for validation and one held out."""
    noise, dim = KeyedNoise(0), config.components
    z = noise.normal(torch.empty(config.rows, dim, dtype=torch.float64), config.data)
    if config.data == "funnel":  # x_1 ~ N(0, 1), the others N(0, e^(x_1))
        x = torch.cat([z[:, :1], z[:, 1:] * torch.exp(z[:, :1] / 2)], 1)
    else:  # 25 modes on a lattice in the plane
        mode = torch.floor(5 * noise.uniform(torch.empty(config.rows, 2).double(), "mode")) - 2
        x = torch.cat([mode + 0.1 * z[:, :2], math.sqrt(0.1) * z[:, 2:]], 1)
    x = (x - x.mean(0)) / x.std(0)
    held = len(x) // 12
    parts = {"train": x[2 * held :], "validation": x[held : 2 * held], "test": x[:held]}
    about = {"name": config.data, "source": "drawn, as in the official code", "licence": "none"}
    return {name: part.float() for name, part in parts.items()}, about


SETS: dict[str, Callable[[Config], tuple[Mapping[str, Tensor], Mapping[str, str]]]] = {
    "digits": _digits,
    "funnel": _drawn,
    "mg25": _drawn,
}

PRESETS: dict[str, Config] = {
    "smoke": Config(
        components=3,
        width=8,
        depth=1,
        steps=2,
        batch_size=16,
        projections=5,
        draws=1,
        exact_steps=32,
        many=4,
        few=2,
        side_by_side=False,
    ),
    "laptop": Config(steps=1_500),
    "record": Config(seeds=(0, 1, 2), lr=(5e-4, 1e-3, 2e-3)),
    # the funnel in 100 dimensions as published: 2,000 epochs of 50,000 points
    "full": Config(
        data="funnel",
        components=100,
        a=EXACT_A,
        epsilon=EXACT_EPSILON,
        width=512,
        steps=390_625,
        ema=0.9999,
        lr=(2e-4,),
        seeds=(0, 1, 2, 3, 4),
        projections=2_000,
        side_by_side=False,
    ),
}


def build(config: Config, arm: Arm, seed: int) -> CriticallyDampedLangevin | Matching:
    """The model of an arm. All networks have the same layers but for the first and the last."""
    dim = config.components

    def network(inputs: int, outputs: int) -> nn.Module:
        return ResidualMLP(
            inputs=inputs,
            outputs=outputs,
            width=config.width,
            depth=config.depth,
            time_scale=config.time_scale,
            seed=seed,
        )

    times = Uniform(LEAST_TIME, 1.0)
    if arm.a is None:
        kind = "score" if config.output == "score" else "noise"
        # the error of the noise is that of the score times sigma, as in the other arms
        return Matching(network(dim, dim), VPLinear(), predicts=kind, measure="noise", times=times)
    return CriticallyDampedLangevin(
        network(2 * dim, 2 * dim if arm.epsilon else dim),
        path=arm.path,
        output=config.output,
        times=times,
        jitter=JITTER,
        shape=(dim,),
    )


@torch.no_grad()
def draw(
    model: CriticallyDampedLangevin | Matching,
    sampler: str,
    calls: int,
    rows: int,
    noise: KeyedNoise,
    steer: Steering | None = None,
) -> Tensor:
    """Samples (rows, dimensions) of an arm in ``calls`` network calls each."""
    steps = calls // 2 if sampler == "leapfrog" else calls
    if isinstance(model, CriticallyDampedLangevin):
        chosen: dict[str, Sampler] = {"EM": EM(), "SSCS": SSCS(), "leapfrog": Leapfrog()}
        return model.sample(
            rows, noise=noise, sampler=chosen[sampler], steps=steps, batch_size=rows, steer=steer
        )
    path, field = VPLinear(), model.field
    like = torch.empty(rows, next(model.network.parameters()).shape[1])
    return simulate(  # type: ignore[return-value]
        path.source(like, noise),
        uniform_grid(steps),
        EulerMaruyama() if sampler == "EM" else Ancestral(),
        path,
        field if sampler == "EM" else convert(field, "clean", path),
        noise,
    )


def exact(arm: Arm, sampler: str, calls: int) -> float | None:
    """The error of the arm's sampler on N(0, 1), with the exact score; None for VP."""
    if arm.a is None:
        return None
    chosen: dict[str, Sampler] = {"EM": EM(), "SSCS": SSCS(), "leapfrog": Leapfrog()}
    steps = calls // 2 if sampler == "leapfrog" else calls
    return gaussian_w2(arm.path, 1.0, chosen[sampler], uniform_grid(steps))


def run(
    config: Config, preset: str, out: Path, *, force: bool = False, progress: bool = True
) -> Report:
    """Run the claim into the folder ``out``; go on where an interrupted run of it stopped.

    Raises:
        FileExistsError: ``out`` holds something else, or a finished run; see `open_run`.
    """
    run = _ClaimRun(config, open_run(out, preset, config, force=force), progress)
    if len(config.lr) > 1:
        run.each("search", list(product(config.arms, config.lr)))
    run.each("distances", [(arm, seed) for seed in config.seeds for arm in config.arms])
    comparisons = run.comparisons()
    report = Report(
        system=SYSTEM,
        claim=CLAIM,
        preset=preset,
        config=config,
        comparisons=comparisons,
        table=run.table(),
        data={**run.about, **{f"{name} rows": str(len(x)) for name, x in run.parts.items()}},
        seconds=run.spent(),
        notes=run.notes(),
    )
    run.draw()
    shutil.copyfile(run.folder(Arm(FAST, 0.25), config.seeds[0]) / MODEL, out / MODEL)
    write_report(report, out)
    return report


class _ClaimRun(Resumable[Config]):
    """The steps of a run. Each leaves a file in ``out``, and is skipped where that file is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parts, self.about = SETS[self.config.data](self.config)

    def folder(self, arm: Arm, seed: int) -> Path:
        return self.out / f"{_slug(arm)}-{seed}"

    # One training

    def _fit(
        self, arm: Arm, seed: int, lr: float, steps: int, folder: Path
    ) -> CriticallyDampedLangevin | Matching:
        if self.progress:
            print(f"{arm.name}: seed {seed}, learning rate {lr:g}, {steps} steps", file=sys.stderr)
        model = build(self.config, arm, seed)
        options = {
            **OFFICIAL,
            "lr": lr,
            "batch_size": self.config.batch_size,
            "ema": self.config.ema,
            "seed": seed,
        }
        stage = Stage(model, {"x": self.parts["train"]}, Training(steps=steps, **options))
        train(stage, out=folder, progress=self.progress, config={"arm": arm.name})
        return model.eval()

    def _distance(self, samples: Tensor, part: str) -> float:
        """Mean over sets of samples, each with as many rows as the part has."""
        rows = self.parts[part]
        return statistics.fmean(
            sliced_wasserstein(one, rows, projections=self.config.projections)
            for one in samples.split(len(rows))[: self.config.draws]
        )

    def _samples(
        self, model: CriticallyDampedLangevin | Matching, sampler: str, calls: int, seed: int
    ) -> Tensor:
        rows = self.config.draws * max(len(self.parts[part]) for part in ("validation", "test"))
        return draw(model, sampler, calls, rows, KeyedNoise(SAMPLE_SEED).at(seed))

    def search(self, arm: Arm, lr: float) -> float:
        """Mean log distance to the validation rows after a shorter training; 0 without a choice."""
        if len(self.config.lr) == 1:
            return 0.0
        folder = self.out / "search" / f"{_slug(arm)}-{lr:g}"

        def measure() -> float:
            steps = max(1, round(self.config.search_share * self.config.steps))
            model = self._fit(arm, SEARCH_SEED, lr, steps, folder)
            return statistics.fmean(
                math.log(self._distance(self._samples(model, *way, SEARCH_SEED), "validation"))
                for way in self.config.ways(arm)
                if way[1] == self.config.few
            )

        return float(self.stored(f"search/{folder.name}.json", measure))

    def best_lr(self, arm: Arm) -> float:
        """The learning rate with the lowest score of `search`."""
        return min(self.config.lr, key=lambda lr: self.search(arm, lr))

    def distances(self, arm: Arm, seed: int) -> dict[tuple[str, int], dict[str, float]]:
        """By sampler and calls: the distances to validation and test rows, and the time it took."""
        folder = self.folder(arm, seed)

        def measure() -> list[Any]:
            model = self._fit(arm, seed, self.best_lr(arm), self.config.steps, folder)
            if isinstance(model, CriticallyDampedLangevin):
                model.save(folder / MODEL, overwrite=True)
            else:
                save_model(folder / MODEL, model.network.state_dict(), {"system": "weights"})
            found = []
            for way in self.config.ways(arm):
                begin = time.process_time()
                samples = self._samples(model, *way, seed)
                seconds = time.process_time() - begin
                values = {part: self._distance(samples, part) for part in ("validation", "test")}
                found.append([*way, {**values, "seconds": 1_000 * seconds / len(samples)}])
            return found

        stored = self.stored(f"{folder.name}/distances.json", measure)
        return {(sampler, calls): values for sampler, calls, values in stored}

    # All of them

    def over(self, arm: Arm, way: tuple[str, int], key: str = "test") -> list[float]:
        """One number a seed."""
        return [self.distances(arm, seed)[way][key] for seed in self.config.seeds]

    def chosen(
        self, arms: Sequence[Arm], ways: Sequence[tuple[str, int]]
    ) -> tuple[Arm, tuple[str, int]]:
        """The arm and the way of sampling of the least mean distance to the validation rows."""
        return min(
            product(arms, ways),
            key=lambda pair: statistics.fmean(self.over(pair[0], pair[1], "validation")),
        )

    def comparisons(self) -> list[Comparison]:
        """What the claim is judged by: log ratios of distances, positive where it is right."""
        many, fewer = self.config.many, self.config.few
        em, few = ("EM", many), ("SSCS", fewer)
        noisy, _ = self.chosen([Arm(FAST, e) for e in self.config.epsilon if e], [em])
        grid = [Arm(a, epsilon) for a in (SLOW, FAST) for epsilon in (0.0, 0.25, 0.5)]
        splitting = np.mean(
            [np.log(self.over(arm, em)) - np.log(self.over(arm, few)) for arm in grid], axis=0
        )
        (vp, vp_way), (ours, our_way) = (
            self.chosen([arm], [way for way in self.config.ways(arm) if way[1] == fewer])
            for arm in (Arm(None), Arm(FAST, 0.25))
        )

        def ratio(worse: list[float], better: list[float]) -> list[float]:
            return [math.log(a / b) for a, b in zip(worse, better, strict=True)]

        return [
            Comparison(
                f"log distance at a = {SLOW:g} and epsilon = 0 less that at epsilon = 0.5, by EM "
                f"in {many}",
                ratio(self.over(Arm(SLOW), em), self.over(Arm(SLOW, 0.5), em)),
                HALVED,
            ),
            Comparison(
                f"log distance at a = {FAST:g} and epsilon = 0 less that at epsilon = "
                f"{noisy.epsilon:g}, the best on validation rows, by EM in {many}",
                ratio(self.over(Arm(FAST), em), self.over(noisy, em)),
                NOT_WORSE,
            ),
            Comparison(
                f"log distance by EM in {many} less that by SSCS in {fewer}, mean of a = {SLOW:g} "
                f"and {FAST:g} with epsilon = 0, 0.25 and 0.5",
                splitting.tolist(),
                NOT_WORSE,
            ),
            Comparison(
                f"log distance of VP by {vp_way[0]} less that of {ours.name} by {our_way[0]}, each "
                f"the best on validation rows, in {fewer}",
                ratio(self.over(vp, vp_way), self.over(ours, our_way)),
                BETTER,
            ),
        ]

    def floor(self) -> float:
        """The distance of training rows to held-out ones, in equal numbers."""

        def measure() -> float:
            return self._distance(self.parts["train"][: len(self.parts["test"])], "test")

        return float(self.stored("floor.json", measure))

    def table(self) -> list[dict[str, Any]]:
        """One row an arm and a way of sampling; distances are means over seeds."""
        rows: list[dict[str, Any]] = []
        every = [(arm, way) for arm in self.config.arms for way in self.config.ways(arm)]
        for arm, way in every:
            values = self.over(arm, way)
            rows.append(
                {
                    "arm": arm.name,
                    "sampler": way[0],
                    "calls": way[1],
                    "sliced W2": statistics.fmean(values),
                    "least": min(values),
                    "most": max(values),
                    "exact W2 on N(0, 1)": exact(arm, *way),
                    "CPU s per 1,000": statistics.fmean(self.over(arm, way, "seconds")),
                }
            )
        return [*rows, {**dict.fromkeys(rows[0]), "arm": "floor", "sliced W2": self.floor()}]

    def normal(self) -> dict[str, dict[str, float]]:
        """The exact error of EM on N(0, 1) by a and epsilon, the matched epsilon among them."""

        def measure() -> dict[str, dict[str, float]]:
            grid = uniform_grid(self.config.exact_steps)
            return {
                f"{a:g}": {
                    f"{epsilon:.6g}": gaussian_w2(CriticallyDamped(a, epsilon), 1.0, EM(), grid)
                    for epsilon in sorted({*EXACT_EPSILON, _matched(a)})
                }
                for a in EXACT_A
            }

        return self.stored("exact.json", measure)

    def slopes(self) -> dict[str, float]:
        """Powers of the number of steps by which the exact error falls from the true law of x_1."""

        def measure() -> dict[str, float]:
            counts = [self.config.exact_steps // k for k in (8, 4, 2)]
            found = {}
            samplers: dict[str, Sampler] = {"EM": EM(), "SSCS": SSCS()}
            for name, epsilon in product(samplers, (0.0, 0.5)):
                path = CriticallyDamped(FAST, epsilon)
                start = GaussianScore(path, 1.0).cov(torch.ones(()).double())
                errors = [
                    gaussian_w2(path, 1.0, samplers[name], uniform_grid(n), start=start.matrix)
                    for n in counts
                ]
                slope = np.polyfit(np.log(counts), np.log(errors), 1)[0]
                found[f"{name}, epsilon = {epsilon:g}"] = float(slope)
            return found

        return self.stored("slopes.json", measure)

    def notes(self) -> list[str]:
        """What has to be said beside the table."""
        many = self.config.many
        em = ("EM", many)
        test, sizes = len(self.parts["test"]), {}
        for arm in self.config.arms:
            network = build(self.config, arm, 0).network
            sizes[arm.name] = sum(parameter.numel() for parameter in network.parameters())
        plain, noisy, matched = (
            statistics.fmean(self.over(arm, em))
            for arm in (Arm(SLOW), Arm(SLOW, 0.5), Arm(SLOW, 0.0, 2 / math.sqrt(SLOW)))
        )
        slopes = "; ".join(f"{name}: {slope:.2f}" for name, slope in self.slopes().items())
        rates = "; ".join(f"{arm.name} {self.best_lr(arm):g}" for arm in self.config.arms)
        errors = "; ".join(
            f"a = {a}: " + ", ".join(f"{error:.2g} at {e}" for e, error in row.items())
            for a, row in self.normal().items()
        )
        return [
            f"Sliced distances of {self.config.projections} projections between {test} samples and "
            f"{test} held-out rows, mean of {self.config.draws} sets of samples; the floor is "
            "between training and held-out rows, in equal numbers. Least and most are over seeds.",
            f"Position noise at a = {SLOW:g} brings the variance of the prior to that of the data: "
            f"{plain:.3f} without it, {noisy:.3f} with epsilon = 0.5, and {matched:.3f} without it "
            f"where sigma = {2 / math.sqrt(SLOW):g} does so instead (EM in {many}).",
            "The exact error is that of the row's sampler with the exact score of N(0, 1). By EM "
            f"in {self.config.exact_steps} steps it is, by epsilon with the matched ones among "
            f"them, for {errors}.",
            f"From the true law of x_1 on, it is a power of the number of steps: {slopes}.",
            f"Parameters: {min(sizes.values()):,} to {max(sizes.values()):,}. Every training takes "
            f"{self.config.steps} steps of {self.config.batch_size} rows.",
            f"Learning rates, each chosen on validation rows from {len(self.config.lr)}: {rates}.",
            f"The network is the official one with width {self.config.width} (512 in the paper), "
            "both parts of the score on one trunk.",
        ]

    # The figure

    def draw(self) -> None:
        """The error against epsilon, exact and learned, and the path of a sample by epsilon."""
        figure, (normal, learned, paths) = plt.subplots(1, 3, figsize=(12, 3.6), layout="tight")
        for key, row in self.normal().items():
            at = f"{_matched(float(key)):.6g}"
            (line,) = normal.plot([float(e) for e in row], list(row.values()), label=f"a = {key}")
            normal.plot(float(at), row[at], "o", color=line.get_color())
        normal.set(yscale="log", xlabel="epsilon", ylabel="exact error, N(0, 1)")
        normal.set_title(
            f"EM in {self.config.exact_steps} steps; dots: prior of variance 1", fontsize=9
        )
        normal.set_ylim(bottom=1e-4)
        normal.legend(frameon=False, fontsize=8, ncols=2, loc="lower right")

        many = self.config.many
        em = ("EM", many)
        for a in self.config.a:
            arms = [Arm(a, epsilon) for epsilon in self.config.epsilon]
            means = [statistics.fmean(self.over(arm, em)) for arm in arms]
            (line,) = learned.plot(self.config.epsilon, means, "-o", label=f"a = {a:g}")
            for seed in range(len(self.config.seeds)):
                values = [self.over(arm, em)[seed] for arm in arms]
                learned.plot(self.config.epsilon, values, ".", color=line.get_color(), alpha=0.5)
            matched = statistics.fmean(self.over(Arm(a, 0.0, 2 / math.sqrt(a)), em))
            learned.plot(0, matched, "D", markerfacecolor="none", color=line.get_color())
        learned.axhline(
            statistics.fmean(self.over(Arm(None), em)), color="0.3", linestyle=":", label="VP"
        )
        learned.axhline(self.floor(), color="0.5", linestyle="--", label="real rows")
        learned.set(yscale="log", xlabel="epsilon", ylabel="sliced W2 to held-out rows")
        learned.set_title(f"learned, EM in {many}; diamonds: prior matched by sigma", fontsize=9)
        learned.set_yticks([0.1, 0.2, 0.3, 0.5], ["0.1", "0.2", "0.3", "0.5"])
        learned.minorticks_off()
        learned.legend(frameon=False, fontsize=8)

        seed = self.config.seeds[0]
        for k, epsilon in enumerate(self.config.epsilon):
            model = CriticallyDampedLangevin.load(self.folder(Arm(FAST, epsilon), seed) / MODEL)
            seen = _Seen()
            draw(model, "EM", many, 1, KeyedNoise(SAMPLE_SEED), seen)
            times = 1 - np.arange(1, many + 1) / many
            paths.plot(times, np.array(seen.positions) + 2 * k, label=f"epsilon = {epsilon:g}")
        paths.invert_xaxis()
        paths.set(xlabel="t, from noise to data", ylabel="first component, each raised by 2")
        paths.set_title(f"one sample, a = {FAST:g}, the same noise", fontsize=9)
        paths.legend(frameon=False, fontsize=8)
        for axis in (normal, learned, paths):
            axis.spines[["top", "right"]].set_visible(False)
        with atomic(self.out / "figure.png") as temporary:
            figure.savefig(temporary, dpi=150, format="png")
        plt.close(figure)


class _Seen(Steering):
    """Remembers the first coordinate of the first row after every step."""

    def __init__(self) -> None:
        self.positions: list[float] = []

    def after(self, x: Any, clean: Any, aim: Any, run: Any) -> Any:
        self.positions.append(float(x[0, 0, 0]))
        return x, aim, None


def _matched(a: float) -> float:
    """The epsilon at which the prior of the position has variance 1; 0 where there is none."""
    return math.sqrt(max(0.0, (4 * a - (a * SIGMA) ** 2) / 5))


def _slug(arm: Arm) -> str:
    return arm.name.replace(", ", "-").replace(" ", "-").replace("=", "")
