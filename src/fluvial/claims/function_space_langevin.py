"""The claim of function-space Langevin: with the preconditioner a finer grid costs nothing more.

A photograph is deblurred, which is the backward heat equation: y = exp(-T Laplacian) f + noise, of
its coarse modes. The grid of the unknown function is refined from 32 x 32 modes to 128 x 128, and
the chain is watched: its largest stable step, the rates of its modes, and how far its samples are
from the exact posterior after a fixed number of steps. The prior is Gaussian, fitted to windows of
other photographs, so the posterior is known; in a second part it is a network trained on them.

Every arm takes Euler steps of a twentieth of its largest stable step, which is measured on the
chain itself: the error of Euler's method is then the same in all arms, at most 5 % of a variance.
Arms without a preconditioner come twice, since they may choose how to fail: at the smoothing time
of the others, and without smoothing, which only the exact score of a Gaussian allows.
"""

from __future__ import annotations

import functools
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import matplotlib
import torch
from torch import Tensor
from tqdm import tqdm

from fluvial.claims.report import Report, open_run, write_report
from fluvial.claims.resumable import Resumable
from fluvial.claims.verdict import Comparison
from fluvial.core.noise import KeyedNoise
from fluvial.data.photographs import LICENCES, grey, photograph
from fluvial.inverse.function_space_langevin import (
    FunctionSpaceLangevin,
    ModeNetwork,
    Modes,
    OperatorNetwork,
    ScoreError,
    mode_kl,
    power_law,
    regress_error,
)
from fluvial.training.files import atomic, load_model, save_model, write_json

matplotlib.use("Agg")  # a run has no screen
import matplotlib.pyplot as plt  # noqa: E402

SYSTEM = "function-space-langevin"
CLAIM = (
    "With the preconditioner of the posterior, neither the largest stable step of the Langevin "
    "chain nor its distance from the posterior after a fixed number of steps changes when the grid "
    "is refined to 16 times the modes; without one, the step shrinks or the distance grows, more "
    "than tenfold."
)
TENFOLD = 1.0
"""Margin of a growth in decades."""
TENTH = 0.10
"""Growth that counts as none."""
SPREAD, DECADES = 0.05, 2.0
"""Largest deviation of the log rates with the preconditioner; fewest decades of them without."""

Arm: TypeAlias = Literal["identity", "unsmoothed", "prior", "posterior", "optimal"]
ARMS: Mapping[Arm, tuple[str, bool]] = {
    "identity": ("identity", True),
    "unsmoothed": ("identity", False),
    "prior": ("prior", True),
    "posterior": ("posterior", True),
    "optimal": ("optimal", True),
}
"""Preset of C, and whether the score is smoothed."""
LABELS: Mapping[str, str] = {
    "identity": "C = 1",
    "unsmoothed": "C = 1, t = 0",
    "prior": "C of the prior",
    "posterior": "C of the posterior",
    "optimal": "optimal C",
}
LEARNED: tuple[Arm, ...] = ("identity", "posterior")

TESTS = ("camera", "astronaut", "chelsea")
"""Photographs that are deblurred, one a seed."""
OTHERS = ("china", "flower", "coffee", "rocket", "coins", "moon", "brick", "grass", "gravel")
"""Photographs that priors are fitted to."""
SHARE = 0.05
"""Of the largest stable step."""
PROBE = 200
"""Steps in which a chain that is not stable shows it."""
SHELLS = 20
"""Groups of modes of like frequency, over which autocorrelations are averaged."""
FIT, TRUTH, ERROR, MEASURE, CHAIN, WINDOWS = range(1_000, 7_000, 1_000)
"""Seeds of the draws."""


@dataclass(frozen=True)
class Config:
    """Everything a run of the claim depends on.

    Args:
        sides: modes an axis of the grids, coarse to fine.
        observed: modes an axis that are measured, at most the first of ``sides``.
        heat_time: T of the blur.
        obs_noise: of a pixel of the detector, which has ``observed`` pixels an axis.
        t: smoothing time of the score, tau = -log(1 - t) = 1e-3 in the paper.
        score_error: deviation of the relative error of the exact score, over tau.
        windows: of other photographs, that the variances of the modes are fitted to.
        chains: side by side.
        steps: of each, a quarter of which is left out.
        seeds: one photograph, measurement, error of the score and set of chains a seed.
        learned_sides: grids of the second part.
        network: of independent modes, or a Fourier-type operator.
        width, depth: of the network.
        crops: windows of other photographs that it is trained on.
        train_steps, batch_size, lr: of its training.
        learned_chains, learned_steps: of the second part.
        side_by_side: compute on two processes.
    """

    sides: tuple[int, ...] = (32, 64, 128)
    observed: int = 32
    heat_time: float = 5e-4
    obs_noise: float = 0.02
    t: float = 1e-3
    score_error: float = 0.1
    windows: int = 16
    chains: int = 16
    steps: int = 2_000
    seeds: tuple[int, ...] = (0,)
    learned_sides: tuple[int, ...] = (16, 64)
    network: Literal["modes", "operator"] = "modes"
    width: int = 32
    depth: int = 2
    crops: int = 2_000
    train_steps: int = 300
    batch_size: int = 4
    lr: float = 1e-2
    learned_chains: int = 8
    learned_steps: int = 500
    side_by_side: bool = True

    def __post_init__(self) -> None:
        for name in ("sides", "learned_sides"):
            sides = getattr(self, name)
            if len(sides) < 2 or list(sides) != sorted(set(sides)) or sides[0] < 2:
                raise ValueError(f"{name} must rise, two grids or more, got {sides}")
        if not 1 <= self.observed <= self.sides[0]:
            raise ValueError(
                f"observed must be at most the coarsest grid, {self.sides[0]}, got {self.observed}"
            )
        if not self.seeds:
            raise ValueError("seeds needs at least one value")
        if min(self.windows, self.crops) < 2:
            raise ValueError(f"windows and crops must be at least 2, got {self.windows}")


PRESETS: dict[str, Config] = {
    "smoke": Config(
        sides=(4, 8),
        observed=4,
        windows=4,
        chains=4,
        steps=40,
        learned_sides=(4, 8),
        width=4,
        depth=1,
        crops=16,
        train_steps=3,
        batch_size=8,
        learned_chains=4,
        learned_steps=20,
        side_by_side=False,
    ),
    "laptop": Config(),
    "record": Config(
        chains=64,
        seeds=(0, 1, 2),
        crops=8_000,
        train_steps=1_000,
        learned_chains=16,
        learned_steps=2_000,
    ),
    # a Fourier-type operator on windows of 256 x 256 pixels
    "full": Config(
        sides=(64, 256),
        observed=64,
        chains=64,
        steps=20_000,
        seeds=(0, 1, 2),
        learned_sides=(64, 256),
        network="operator",
        width=64,
        depth=4,
        crops=20_000,
        train_steps=100_000,
        batch_size=32,
        lr=1e-3,
        learned_chains=64,
        learned_steps=20_000,
    ),
}


# Data


@functools.cache
def brightness(name: str) -> Tensor:
    """(height, width) grey of a photograph in [0, 1], float64."""
    return grey(photograph(name).double() / 255)[0]


def window(image: Tensor, side: int, where: Tensor) -> Tensor:
    """side x side means over squares of f x f pixels, less their mean.

    ``where`` are three numbers in [0, 1): f, among those that fit and at most 4, and the place.
    """
    largest = min(4, *(length // side for length in image.shape))
    if largest < 1:
        raise ValueError(
            f"a grid of {side} x {side} is finer than an image of {tuple(image.shape)}"
        )
    factor = 1 + int(where[0] * largest)
    size = side * factor
    row, column = (int(w * (n - size + 1)) for w, n in zip(where[1:], image.shape, strict=True))
    part = image[row : row + size, column : column + size]
    part = part.reshape(side, factor, side, factor).mean((1, 3))
    return part - part.mean()


def windows(count: int, side: int, seed: int) -> Tensor:
    """(count, side, side) windows of `OTHERS`, in turn."""
    images = [brightness(name) for name in OTHERS]
    where = KeyedNoise(WINDOWS).at(seed).uniform(torch.empty(count, 3, dtype=torch.float64))
    return torch.stack(
        [window(images[k % len(images)], side, place) for k, place in enumerate(where)]
    )


def truth(side: int, seed: int) -> Tensor:
    """(side, side): the middle of a photograph of `TESTS`, as large as fits, less its mean."""
    image = brightness(TESTS[seed % len(TESTS)])
    return window(image, side, image.new_tensor([0.999, 0.5, 0.5]))


# One arm on one grid


@dataclass(frozen=True)
class Problem:
    """The measured photograph, and the prior of its modes, for one seed and all grids.

    Attributes:
        modes: of the finest grid.
        coefficients: (J,) of the photograph.
        variance: (J,) of the prior.
        y: what is measured.
    """

    modes: Modes
    coefficients: Tensor
    variance: Tensor
    spectrum: Tensor
    noise: float
    y: Tensor


@functools.lru_cache(8)
def problem(config: Config, side: int, observed: int, seed: int) -> Problem:
    modes = Modes((side, side))
    x = modes.coefficients(truth(side, seed)[None])[0]
    scale, decay = power_law(modes.coefficients(windows(config.windows, side, FIT)), modes)
    square = modes.frequencies.double().square().sum(1)
    # the first modes of the finest grid are those of every grid
    spectrum = torch.exp(-config.heat_time * modes.laplacian[: observed**2])
    noise = config.obs_noise / observed
    y = spectrum * x[: observed**2]
    y = y + noise * KeyedNoise(MEASURE).at(seed).normal(y[None])[0]
    return Problem(modes, x, scale * square**-decay, spectrum, noise, y)


def build(config: Config, task: Problem, arm: Arm, side: int, seed: int) -> FunctionSpaceLangevin:
    """The Gaussian model of an arm on a grid."""
    preset, smoothed = ARMS[arm]
    error = _error_rate(config, task, seed)[: side**2]
    return FunctionSpaceLangevin(
        Modes((side, side)),
        task.spectrum,
        task.noise,
        preconditioner=preset,  # type: ignore[arg-type]
        score_error=error if preset == "optimal" else 0.0,
        t=config.t if smoothed else 0.0,
        variance=task.variance[: side**2],
    )


def learned_model(config: Config, task: Problem, arm: Arm, seed: int) -> FunctionSpaceLangevin:
    """The model of an arm of the second part on the finest grid, nothing fitted."""
    shape: dict[str, int] = {"width": config.width, "depth": config.depth, "seed": seed}
    return FunctionSpaceLangevin(
        task.modes,
        task.spectrum,
        task.noise,
        prior=(
            ModeNetwork(task.modes.frequencies, **shape)
            if config.network == "modes"
            else OperatorNetwork(task.modes, **shape)
        ),
        preconditioner=ARMS[arm][0],  # type: ignore[arg-type]
        t=config.t,
        centre=False,
    )


def _error_rate(config: Config, task: Problem, seed: int) -> Tensor:
    """epsilon_j: the relative error of the score over tau."""
    return config.score_error * KeyedNoise(ERROR).at(seed).normal(task.variance[None])[0]


@torch.no_grad()
def stable_step(model: FunctionSpaceLangevin, y: Tensor, prior: Any, seed: int) -> float:
    """The largest h with which x <- x + h drift(x) stays bounded for `PROBE` steps, to 4 %.

    From a draw of the prior, without the chain's noise, which excites what the start does already.
    Many steps are tried at once, a row each.
    """
    assert model.variance is not None
    drift, t = model.drift(y, prior), torch.tensor(model.t, dtype=torch.float64)
    deviation = model.variance.sqrt()
    start = deviation * KeyedNoise(CHAIN).at(seed).normal(deviation[None], "start")

    def bounded(h: Tensor) -> Tensor:
        x = start.expand(len(h), -1)
        for _ in range(PROBE):
            x = x + h[:, None] * drift(x, t)
        # False where it overflowed
        return x.norm(dim=1) < 1e3 * deviation.norm()

    coarse = 16.0 * 4.0 ** -torch.arange(20, dtype=torch.float64)
    largest = coarse[bounded(coarse)].max()
    fine = largest * 4 ** (torch.arange(32, dtype=torch.float64) / 32)
    return float(fine[bounded(fine)].max())


def shell_rates(autocorrelation: Tensor, modes: Modes, lag: int) -> tuple[Tensor, Tensor]:
    """(|k|, rate a step) of groups of modes, from their mean autocorrelation after ``lag`` steps.

    The noise of one mode's autocorrelation would be taken for a spread of the rates.
    """
    logs = modes.frequencies.double().square().sum(1).log() / 2
    place = ((logs - logs[0]) / (logs[-1] - logs[0]) * (SHELLS - 1e-9)).long()
    counts = torch.bincount(place, minlength=SHELLS)
    means = torch.zeros(2, SHELLS, dtype=torch.float64)
    means[0].index_add_(0, place, autocorrelation)
    means[1].index_add_(0, place, logs)
    means = means[:, counts > 0] / counts[counts > 0]
    rates = -means[0].clamp(1e-9, 1 - 1e-9).log() / lag
    return means[1].exp(), rates


@torch.no_grad()
def measure(
    model: FunctionSpaceLangevin,
    task: Problem,
    prior: Any,
    seed: int,
    chains: int,
    steps: int,
    pictures: Path | None,
) -> dict[str, Any]:
    """Run an arm's chains, and say how they went. Pictures go to a file."""
    begin = time.perf_counter()
    size = len(model.modes)
    stable = stable_step(model, task.y, prior, seed)
    h, burn = SHARE * stable, steps // 4
    thin = min(10, max(1, (steps - burn) // 4))
    run = model.sample(
        task.y.float(),  # variances here are 1e-8 and more
        chains,
        noise=KeyedNoise(CHAIN).at(seed),
        steps=steps,
        h=h,
        exact=False,
        burn=burn,
        thin=thin,
        prior=prior,
        states=pictures is not None,
    )
    assert model.variance is not None
    kl = mode_kl(run.mean, run.variance, *_reference(task, size))
    error = task.coefficients.clone()
    error[:size] -= run.mean
    frequency, rates = shell_rates(run.autocorrelation, model.modes, thin)
    energy = run.variance.sum() + run.mean.square().sum()
    if pictures is not None:
        last = model.modes.functions(run.draws[:1, -1].double())[0]  # type: ignore[index]
        images = {"mean": run.mean_function(), "std": run.std_function(), "draw": last}
        save_model(pictures, {k: v.float() for k, v in images.items()}, {}, overwrite=True)
    return {
        "stable": stable,
        "h": h,
        "kl": float(kl.mean()),
        "rmse": float(error.norm() / task.coefficients.norm()),
        "energy": float(energy / task.coefficients[:size].square().sum()),
        "frequency": frequency.tolist(),
        "rates": rates.tolist(),
        "seconds": time.perf_counter() - begin,
    }


def _reference(task: Problem, size: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of the exact posterior of the Gaussian prior, of the first modes."""
    gram, noise = task.spectrum.square(), task.noise
    pull = torch.zeros_like(task.variance)
    data = torch.zeros_like(task.variance)
    pull[: len(gram)] = gram / noise**2
    data[: len(gram)] = task.spectrum * task.y / noise**2
    variance = task.variance / (1 + task.variance * pull)
    return (variance * data)[:size], variance[:size]


# The run


def run(
    config: Config, preset: str, out: Path, *, force: bool = False, progress: bool = True
) -> Report:
    """Run the claim into the folder ``out``; go on where an interrupted run of it stopped.

    Raises:
        FileExistsError: ``out`` holds something else, or a finished run; see `open_run`.
        ModuleNotFoundError: scikit-image, of the extra ``vision``, is missing.
    """
    photograph(TESTS[0])
    run = _ClaimRun(config, open_run(out, preset, config, force=force), progress)
    seeds, arms = config.seeds, list(ARMS)
    run.all(
        [
            ("gaussian", arm, side, seed)
            for side in reversed(config.sides)
            for arm in arms
            for seed in seeds
        ]
    )
    run.all([("train", arm, config.learned_sides[-1], seed) for arm in LEARNED for seed in seeds])
    run.all(
        [
            ("learned", arm, side, seed)
            for side in reversed(config.learned_sides)
            for arm in LEARNED
            for seed in seeds
        ]
    )
    report = Report(
        system=SYSTEM,
        claim=CLAIM,
        preset=preset,
        config=config,
        comparisons=run.comparisons(),
        table=run.table(),
        data={
            "name": "photographs",
            "source": "scikit-learn and scikit-image, shipped in the packages",
            "licence": LICENCES,
            "deblurred": ", ".join(dict.fromkeys(TESTS[seed % len(TESTS)] for seed in seeds)),
            "prior": ", ".join(OTHERS),
        },
        seconds=run.spent(),
        notes=run.notes(),
    )
    run.draw()
    shutil.copyfile(run.weights("posterior", seeds[0]), out / "model.safetensors")
    write_report(report, out)
    return report


Job: TypeAlias = tuple[Literal["gaussian", "train", "learned"], Arm, int, int]
"""Kind, arm, side of the grid, seed."""


class _ClaimRun(Resumable[Config]):
    """The jobs of a run. Each leaves a file in ``out``, and is skipped where that file is."""

    def folder(self, *job: Any) -> Path:
        kind, arm, side, seed = job
        return self.out / kind / f"{arm}-{side}-{seed}.json"

    def all(self, jobs: Sequence[Job]) -> None:
        """Do the jobs, on two processes unless the configuration says otherwise."""
        left = [job for job in jobs if not self.folder(*job).exists()]
        self.each("do", [(left[k::2],) for k in range(2)])

    def do(self, jobs: Sequence[Job]) -> None:
        bar = tqdm(jobs, unit="job", disable=not self.progress)
        for job in bar:
            bar.set_description(" ".join(map(str, job)))
            path = self.folder(*job)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, getattr(self, f"_{job[0]}")(*job[1:]))

    def result(self, *job: Any) -> dict[str, Any]:
        return dict(json.loads(self.folder(*job).read_text(encoding="utf-8")))

    def _pictures(self, kind: str, arm: Arm, side: int, seed: int) -> Path | None:
        """Where the images of a job go: only of the finest grid and the first seed."""
        sides = self.config.sides if kind == "gaussian" else self.config.learned_sides
        if side != sides[-1] or seed != self.config.seeds[0]:
            return None
        return self.folder(kind, arm, side, seed).with_suffix(".safetensors")

    def _gaussian(self, arm: Arm, side: int, seed: int) -> dict[str, Any]:
        config = self.config
        task = problem(config, config.sides[-1], config.observed, seed)
        model = build(config, task, arm, side, seed)
        error = _error_rate(config, task, seed)[: side**2] * -math.log1p(-model.t)
        return measure(
            model,
            task,
            ScoreError(model.prior, slope=error),
            seed,
            config.chains,
            config.steps,
            self._pictures("gaussian", arm, side, seed),
        )

    def learned_problem(self, seed: int) -> Problem:
        sides = self.config.learned_sides
        return problem(self.config, sides[-1], sides[0], seed)

    def _train(self, arm: Arm, side: int, seed: int) -> dict[str, Any]:
        config, begin = self.config, time.perf_counter()
        model = learned_model(config, self.learned_problem(seed), arm, seed)
        crops = windows(config.crops, side, FIT + 1 + seed).float()
        held = max(2, len(crops) // 8)
        model.fit(
            crops[held:],
            steps=config.train_steps,
            batch_size=config.batch_size,
            lr=config.lr,
            ema=0.99,
            warmup=20,
            schedule="linear",
            seed=seed,
            progress=False,
        )
        model.save(self.weights(arm, seed), overwrite=True)
        return {**_errors(model, crops[:held]), "seconds": time.perf_counter() - begin}

    def weights(self, arm: Arm, seed: int) -> Path:
        job = ("train", arm, self.config.learned_sides[-1], seed)
        return self.folder(*job).with_suffix(".safetensors")

    def _learned(self, arm: Arm, side: int, seed: int) -> dict[str, Any]:
        fine, task = FunctionSpaceLangevin.load(self.weights(arm, seed)), self.learned_problem(seed)
        assert fine.variance is not None
        # a coarser grid has the first modes of the fine one: the same network, and fewer of them
        model = FunctionSpaceLangevin(
            Modes((side, side)),
            task.spectrum,
            task.noise,
            prior=fine.network,
            preconditioner=ARMS[arm][0],  # type: ignore[arg-type]
            t=self.config.t,
            variance=fine.variance[: side**2],
        )
        return measure(
            model,
            replace(task, variance=fine.variance),
            None,
            seed,
            self.config.learned_chains,
            self.config.learned_steps,
            self._pictures("learned", arm, side, seed),
        )

    # What it comes to

    def means(self, kind: str, arm: Arm, what: str) -> list[float]:
        """A number by grid, mean over seeds."""
        sides = self.config.sides if kind == "gaussian" else self.config.learned_sides
        return [
            _mean([self.result(kind, arm, side, seed) for seed in self.config.seeds], what)
            for side in sides
        ]

    def growth(self, kind: str, arm: Arm, what: str, seed: int) -> float:
        """log of a number on the finest grid over that on the coarsest."""
        sides = self.config.sides if kind == "gaussian" else self.config.learned_sides
        coarse, fine = (self.result(kind, arm, side, seed)[what] for side in (sides[0], sides[-1]))
        return math.log(fine / coarse)

    def comparisons(self) -> list[Comparison]:
        side, seeds = self.config.sides[-1], self.config.seeds

        def decades(arm: Arm, seed: int) -> float:
            rates = self.result("gaussian", arm, side, seed)["rates"]
            return math.log10(max(rates) / min(rates))

        def spread(seed: int) -> float:
            rates = self.result("gaussian", "posterior", side, seed)["rates"]
            return statistics.pstdev(map(math.log, rates))

        def tenfold(name: str, value: Callable[[int], float]) -> Comparison:
            return Comparison(name, [value(seed) / math.log(10) for seed in seeds], TENFOLD)

        def unchanged(name: str, value: Callable[[int], float]) -> Comparison:
            return Comparison(name, [TENTH - abs(math.expm1(value(seed))) for seed in seeds])

        def of(kind: str, arm: Arm, what: str) -> Callable[[int], float]:
            return lambda seed: self.growth(kind, arm, what, seed)

        return [
            tenfold(
                "decades by which the distance from the posterior grows, C = 1",
                of("gaussian", "identity", "kl"),
            ),
            tenfold(
                "decades by which the distance grows, C = 1 without smoothing",
                of("gaussian", "unsmoothed", "kl"),
            ),
            tenfold(
                "decades by which the largest stable step shrinks, C = 1 without smoothing",
                lambda seed: -self.growth("gaussian", "unsmoothed", "stable", seed),
            ),
            unchanged(
                "a tenth, less the change of the distance, C of the posterior",
                of("gaussian", "posterior", "kl"),
            ),
            unchanged(
                "a tenth, less the change of the largest stable step, C of the posterior",
                of("gaussian", "posterior", "stable"),
            ),
            Comparison(
                "decades of the modes' rates on the finest grid, C = 1",
                [min(decades("identity", s), decades("unsmoothed", s)) for s in seeds],
                DECADES,
            ),
            Comparison(
                "0.05, less the deviation of the log rates there, C of the posterior",
                [SPREAD - spread(seed) for seed in seeds],
            ),
            tenfold(
                "decades by which the distance grows, learned prior, C = 1",
                of("learned", "identity", "kl"),
            ),
            unchanged(
                "a tenth, less the change of the largest stable step, learned prior, C of the "
                "posterior",
                of("learned", "posterior", "stable"),
            ),
        ]

    def table(self) -> list[dict[str, Any]]:
        """One row an arm and grid; means over seeds."""
        config, rows = self.config, []
        parts: list[tuple[str, Sequence[Arm], tuple[int, ...]]] = [
            ("gaussian", list(ARMS), config.sides),
            ("learned", LEARNED, config.learned_sides),
        ]
        for kind, arms, sides in parts:
            for arm in arms:
                for side in sides:
                    results = [self.result(kind, arm, side, seed) for seed in config.seeds]
                    slow = [min(one["rates"]) for one in results]
                    fast = [max(one["rates"]) for one in results]
                    rows.append(
                        {
                            "prior": kind,
                            "arm": LABELS[arm],
                            "modes": side**2,
                            "stable step": _mean(results, "stable"),
                            "KL a mode": _mean(results, "kl"),
                            "decades of rates": statistics.fmean(
                                math.log10(f / s) for f, s in zip(fast, slow, strict=True)
                            ),
                            "steps to forget": statistics.fmean(1 / rate for rate in slow),
                            "error of the mean": _mean(results, "rmse"),
                            "energy": _mean(results, "energy"),
                            "seconds": _mean(results, "seconds"),
                        }
                    )
        return rows

    def notes(self) -> list[str]:
        config = self.config
        trained = {
            arm: [
                self.result("train", arm, config.learned_sides[-1], seed) for seed in config.seeds
            ]
            for arm in LEARNED
        }
        errors = "; ".join(
            f"{LABELS[arm]} {_mean(results, 'slope'):.2g} and {_mean(results, 'bias'):.2g}"
            for arm, results in trained.items()
        )
        return [
            f"Euler steps of {SHARE:g} times the largest stable one, measured to 4 %; "
            f"{config.steps} of them, {config.chains} chains, the first quarter left out.",
            "KL a mode: of the normal law with the mean and variance of a mode's samples from the "
            "exact posterior, mean over modes; of a learned prior, from that of the Gaussian of "
            "the same variances, so that it holds what is not Gaussian in photographs.",
            f"Rates of {SHELLS} groups of modes of like frequency, from their mean autocorrelation "
            "10 steps apart; steps to forget: the inverse of the smallest.",
            "Error of the posterior mean and energy of the samples over those of the photograph on "
            "the finest grid and on this grid; of white noise the energy grows with the grid.",
            f"The learned score against that of the Gaussian, at t = {config.t:g} on windows left "
            f"out, medians over modes of the relative slope and of the bias over the deviation of "
            f"S: {errors}.",
            "A score that is learned has one smoothing time, so C = 1 without smoothing is there "
            "for the exact one alone.",
        ]

    def draw(self) -> None:
        """Images and curves."""
        draw(self, self.out / "figure.png")


def _mean(results: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.fmean(one[name] for one in results)


@torch.no_grad()
def _errors(model: FunctionSpaceLangevin, functions: Tensor) -> dict[str, float]:
    """What a learned score has beyond the Gaussian: medians of |slope| / s and |bias| / std S."""
    assert model.variance is not None and model.cov_noise is not None
    x = model.modes.coefficients(functions.double())
    t = torch.tensor(model.t, dtype=torch.float64)
    noise = KeyedNoise(ERROR).normal(x)
    x = (1 - model.t) ** 0.5 * x + (t * model.cov_noise).sqrt() * noise
    slope, bias = regress_error(model.prior, model.variance, model.cov_noise, x, t)
    smoothed = (1 - model.t) * model.variance + t * model.cov_noise
    pull = model.cov_noise / smoothed
    return {
        "slope": float((slope.abs() / pull).median()),
        "bias": float((bias.abs() / (pull * smoothed.sqrt())).median()),
    }


def draw(run: _ClaimRun, path: Path) -> None:
    """Posterior means, samples and deviations above rates, divergence and error."""
    config, seed = run.config, run.config.seeds[0]
    side, shown = config.sides[-1], ("identity", "unsmoothed", "posterior")
    task = problem(config, side, config.observed, seed)
    measured = torch.nn.functional.pad(task.y, (0, len(task.modes) - len(task.y)))
    photographs = task.modes.functions(torch.stack([task.coefficients, measured]))

    def pictures(kind: str, arm: str, side: int) -> dict[str, Tensor]:
        return load_model(run.folder(kind, arm, side, seed).with_suffix(".safetensors"))[0]

    arms = [pictures("gaussian", arm, side) for arm in shown]
    learned = pictures("learned", "posterior", config.learned_sides[-1])["mean"]
    columns = [
        ("", dict(zip(("mean", "draw", "std"), (*photographs, learned), strict=True))),
        *zip((LABELS[arm] for arm in shown), arms, strict=True),
    ]
    grey = {
        "cmap": "gray",
        "vmin": float(photographs[0].min()),
        "vmax": float(photographs[0].max()),
    }
    hot = {"cmap": "magma", "vmin": 0.0, "vmax": 2 * float(arms[-1]["std"].max())}
    left = ("photograph", "measured", "mean with a\nlearned prior")
    figure = plt.figure(figsize=(9, 9.2))
    parts: Any = figure.subfigures(2, 1, height_ratios=[6.2, 3.0])
    spaces = {"hspace": 0.06, "wspace": 0.06, "left": 0.13, "right": 0.96, "top": 0.95}
    axes = parts[0].subplots(3, 4, gridspec_kw={**spaces, "bottom": 0.01})
    for column, (title, images) in enumerate(columns):
        axes[0, column].set_title(title, fontsize=9)
        for row, name in enumerate(("mean", "draw", "std")):
            axes[row, column].imshow(images[name], **(hot if column and name == "std" else grey))
            axes[row, column].set_axis_off()
    for row, right in enumerate(("mean", "one sample", "deviation")):
        for column, x, text, turn in ((0, -0.06, left[row], 0), (3, 1.05, right, 90)):
            axis = axes[row, column]
            place = {"ha": "right" if turn == 0 else "left", "va": "center", "rotation": turn}
            axis.text(x, 0.5, text, transform=axis.transAxes, fontsize=9, **place)

    below = {"wspace": 0.3, "left": 0.07, "right": 0.98, "bottom": 0.16, "top": 0.9}
    plots = parts[1].subplots(1, 3, gridspec_kw=below)
    for k, arm in enumerate(ARMS):
        one, style = run.result("gaussian", arm, side, seed), {"color": f"C{k}", "markersize": 3}
        line = {**style, "marker": "o", "linestyle": ":" if arm == "optimal" else "-"}
        plots[0].plot(one["frequency"], one["rates"], label=LABELS[arm], **line)
        for axis, what in ((plots[1], "kl"), (plots[2], "rmse")):
            axis.plot(config.sides, run.means("gaussian", arm, what), label=LABELS[arm], **line)
            if arm in LEARNED:
                dashed = {**style, "linestyle": "--", "marker": "s"}
                axis.plot(config.learned_sides, run.means("learned", arm, what), **dashed)
    ticks = sorted({*config.sides, *config.learned_sides})
    for axis, what, title in (
        (plots[0], f"frequency |k|, {side} x {side} modes", "rate of a step"),
        (plots[1], "modes an axis", "KL a mode from the posterior"),
        (plots[2], "modes an axis", "relative error of the mean"),
    ):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel(what, fontsize=9)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8, which="both")
        axis.spines[["top", "right"]].set_visible(False)
        if axis is not plots[0]:
            axis.set_xticks(ticks, [str(n) for n in ticks])
    plots[0].plot([], [], "s--", color="0.5", markersize=3, label="learned prior")
    plots[0].legend(frameon=False, fontsize=7)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    plt.close(figure)
