"""The claim of iterative Markovian fitting: it converges exponentially to the Schrödinger bridge.

Part 1 is exact: smoothed histograms of real data on a grid, where the bridge is known and every
iteration is a matrix product. Part 2 is DSBM, the same iteration by networks, on the digits 5-9 and
0-4 in a few principal components, beside one-shot bridge matching (the first iteration alone), DSB
(iterative proportional fitting) and rectified flow. All four get the same rows, the same number of
gradient steps a network and the same optimiser. The four are compared on held-out digits: by the
transport cost E |x_0 - x_1|^2 of what they make, which at the bridge is that of entropic optimal
transport, and by how well they keep the two marginals.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import matplotlib

matplotlib.use("Agg")  # a run has no screen
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

from fluvial.claims.report import Report, open_run, write_report
from fluvial.claims.resumable import Resumable
from fluvial.claims.verdict import Comparison
from fluvial.core.couplings import Independent
from fluvial.core.gaussian.losses import Matching
from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import Linear
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import simulate
from fluvial.core.time import uniform_grid
from fluvial.data import SETS, scaled
from fluvial.metrics import sliced_wasserstein
from fluvial.networks import MLP, UNet
from fluvial.training.files import atomic, load_model, save_model
from fluvial.training.loop import Stage, Training, train
from fluvial.transport.schrodinger_bridge import (
    Reference,
    SchrodingerBridge,
    coupling_kl,
    grid_imf,
    grid_ipf,
    sinkhorn,
    transition_kernels,
    whole_kernel,
)

SYSTEM = "schrodinger-bridge-imf"
CLAIM = (
    "Iterative Markovian fitting converges exponentially to the Schrödinger bridge, faster the "
    "longer the horizon: exact, its divergence from the bridge falls along a straight line on a "
    "logarithmic axis for three decades and more, by a smaller factor for a larger sigma. By "
    "networks, its error in transport cost is at most half of one-shot bridge matching's with "
    "marginals within 20 % as good, and its marginals have the better variances than those of "
    "iterative proportional fitting."
)
DECADES = 3.0
"""Of the divergence, over which a curve is to be straight."""
BEND = 0.05
"""How far a curve may be from the straight line, as a share of the decades it falls."""
COST_MARGIN = math.log(2)
"""Of log(one-shot bridge matching's error in cost / DSBM's)."""
SLICED_MARGIN = -math.log(1.2)
"""Of log(one-shot bridge matching's sliced Wasserstein distance / DSBM's)."""
VARIANCE_MARGIN = 0.0
"""Of log(DSB's error in variance / DSBM's)."""

Arm = Literal["DSBM", "one-shot bridge matching", "DSB", "rectified flow"]
ARMS: tuple[Arm, ...] = ("DSBM", "one-shot bridge matching", "DSB", "rectified flow")
WAYS = ("backward", "forward")
HORIZONS = {"line": (0.5, 1.0, 2.0, 4.0, 8.0), "plane": (0.5, 1.0, 2.0, 4.0)}
"""sigma^2, on the line of the breast cancers and in the plane of the digits."""
JUDGED = (1.0, 2.0, 4.0, 8.0)
"""Those over which the factor is claimed to fall."""
SAMPLE_SEED = 2_000
DRAWS = 4
"""Translations of the held-out rows that a measure is averaged over."""
SHOWN = 8
"""Rows in the figure."""
MODEL = "model.safetensors"


@dataclass(frozen=True)
class Config:
    """Everything a run of the claim depends on.

    Args:
        line: points of the grid of the first exact problem.
        side: points of a side of the grid of the second.
        line_steps: steps of the reference in the first.
        plane_steps: steps of the reference in the second.
        iterations: of exact IMF.
        share: of the rows that a seed's histograms are made of.
        files: two .npz files with an array x (rows, channels, height, width), uint8 or of the order
            of 1: what is translated, and to what; none for the digits.
        components: principal components of the digits.
        rows: at most, of each side.
        width: of the networks.
        diffusion: sigma of the reference of part 2.
        simulation: steps of a simulation.
        half_iterations: of DSBM and DSB. One-shot bridge matching and rectified flow take as many
            steps a network.
        steps: optimiser steps of a half-iteration.
        first_steps: of the first half-iteration of a direction of DSBM; ``steps`` if None.
        renew: steps of DSBM after which its pairs are made anew; None for once a half-iteration.
        away: how far the times of its training stay from 0 and 1.
        pairs: simulated for a half-iteration.
        batch_size: of all arms.
        lr: of all arms.
        ema: decay of the averaged weights of all arms.
        seeds: a split of the data and a training of each arm a seed.
        side_by_side: two arms at the same time, each on half of the cores.
    """

    line: int = 90
    side: int = 20
    line_steps: int = 20
    plane_steps: int = 10
    iterations: int = 7
    share: float = 0.9
    files: tuple[str, ...] = ()
    components: int = 8
    rows: int = 10_000
    width: int = 64
    diffusion: float = 1.0
    simulation: int = 30
    half_iterations: int = 10
    steps: int = 600
    first_steps: int | None = None
    renew: int | None = None
    away: float = 1e-3
    pairs: int = 4_000
    batch_size: int = 256
    lr: float = 1e-3
    ema: float = 0.99
    seeds: tuple[int, ...] = (0,)
    side_by_side: bool = True

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("seeds needs at least one value")
        if len(self.files) not in (0, 2):
            raise ValueError(f"files must be two, or none for the digits, got {self.files}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must lie in (0, 1], got {self.share}")
        if self.half_iterations < 2:
            raise ValueError(f"half_iterations must be at least 2, got {self.half_iterations}")

    @property
    def steps_a_direction(self) -> int:
        """Optimiser steps that every arm spends on each direction."""
        first = self.steps if self.first_steps is None else self.first_steps
        return first + (self.half_iterations // 2 - 1) * self.steps


PRESETS: dict[str, Config] = {
    "smoke": Config(
        line=30,
        side=7,
        line_steps=4,
        plane_steps=3,
        iterations=4,
        rows=150,
        width=16,
        simulation=4,
        half_iterations=4,
        steps=3,
        pairs=32,
        batch_size=32,
        side_by_side=False,
    ),
    "laptop": Config(steps=400),
    "record": Config(seeds=(0, 1, 2, 3, 4)),
    # MNIST to EMNIST letters: the published step sizes sum to sigma^2 = 1.02
    "full": Config(
        files=("emnist-letters.npz", "mnist.npz"),
        rows=100_000,
        width=64,
        diffusion=math.sqrt(1.02),
        half_iterations=40,
        steps=5_000,
        first_steps=100_000,
        renew=1_000,
        away=1e-4,
        pairs=10_000,
        batch_size=128,
        lr=1e-4,
        ema=0.999,
        side_by_side=False,
    ),
}


def network(config: Config, shape: Sequence[int], seed: int) -> nn.Module:
    """Of one direction: an `MLP` for vectors, a `UNet` for images."""
    if len(shape) == 1:
        return MLP(shape=shape, width=config.width, depth=2, ratio=1.0, seed=seed)
    channels, height, width = shape
    return UNet(
        size=(height, width),
        channels=channels,
        width=config.width,
        multipliers=(1, 2, 2),
        attention=(height // 2,),
        seed=seed,
    )


def bridge(config: Config, shape: Sequence[int], seed: int) -> SchrodingerBridge:
    """The model of three arms: the same networks and the same initial weights."""
    return SchrodingerBridge(
        network(config, shape, 2 * seed),
        network(config, shape, 2 * seed + 1),
        reference=Reference(config.diffusion),
        steps=config.simulation,
        shape=shape,
    )


def run(
    config: Config, preset: str, out: Path, *, force: bool = False, progress: bool = True
) -> Report:
    """Run the claim into the folder ``out``; go on where an interrupted run of it stopped.

    Raises:
        FileExistsError: ``out`` holds something else, or a finished run; see `open_run`.
        FileNotFoundError: the data is a file that is not there.
    """
    read_sides(config, config.seeds[0])  # a file that is not there is found before any work
    run = _ClaimRun(config, open_run(out, preset, config, force=force), progress)
    for seed in config.seeds:
        run.exact(seed)
        for pair in (ARMS[:2], ARMS[2:]):
            run.train(pair, seed)
    scores = {arm: [run.scores(arm, seed) for seed in config.seeds] for arm in ARMS}
    exact = [run.exact(seed) for seed in config.seeds]
    report = Report(
        system=SYSTEM,
        claim=CLAIM,
        preset=preset,
        config=config,
        comparisons=[*_exact_comparisons(exact), *_network_comparisons(scores)],
        table=run.table(scores),
        data=run.provenance(),
        seconds=run.spent(),
        notes=run.notes(exact),
    )
    run.draw(scores, exact[0])
    shutil.copyfile(run.folder("DSBM", config.seeds[0]) / MODEL, out / MODEL)
    write_report(report, out)
    return report


Translate: TypeAlias = Callable[[Tensor, str, KeyedNoise], Tensor]
"""(rows, direction, noise) -> where they go."""


# Verdict

Exact: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]
Scores: TypeAlias = Mapping[Arm, Sequence[Mapping[str, Mapping[str, float]]]]


def ratio(kls: Sequence[float]) -> float:
    """r_2 = KL_3 / KL_2."""
    return kls[3] / kls[2]


def bend(kls: Sequence[float]) -> float:
    """How far log KL is from a line, at most, over the iterations in which it falls by `DECADES`,
    as a share of what it falls; infinite if it does not fall so far."""
    logs = np.log10(kls)
    reached = np.flatnonzero(logs[0] - logs >= DECADES)
    if not len(reached):
        return math.inf
    n = np.arange(max(int(reached[0]), 3) + 1)
    line = np.polyval(np.polyfit(n, logs[n], 1), n)
    return float(np.abs(logs[n] - line).max() / (logs[0] - logs[n[-1]]))


def _exact_comparisons(exact: Sequence[Exact]) -> list[Comparison]:
    result = []
    for problem, horizons in HORIZONS.items():
        bends = [max(bend(one[problem][str(s)]["imf"]) for s in horizons) for one in exact]
        result.append(
            Comparison(
                f"{BEND:g} less the largest distance of a curve from a line, as a share of the "
                f"first {DECADES:g} decades or more ({problem})",
                [max(BEND - value, -1.0) for value in bends],
            )
        )
        judged = [s for s in horizons if s in JUDGED]
        for low, high in zip(judged, judged[1:], strict=False):
            result.append(
                Comparison(
                    f"log of the factor r_2 at sigma^2 {low:g}, less that at {high:g} ({problem})",
                    [
                        math.log(
                            ratio(one[problem][str(low)]["imf"])
                            / ratio(one[problem][str(high)]["imf"])
                        )
                        for one in exact
                    ],
                )
            )
    return result


def _mean(score: Mapping[str, Mapping[str, float]], name: str) -> float:
    """Over the two directions."""
    return statistics.fmean(score[way][name] for way in WAYS)


def _network_comparisons(scores: Scores) -> list[Comparison]:
    def logs(name: str, rival: Arm) -> list[float]:
        return [
            math.log(_mean(theirs, name) / _mean(ours, name))
            for ours, theirs in zip(scores["DSBM"], scores[rival], strict=True)
        ]

    return [
        Comparison(
            "log relative error in transport cost of one-shot bridge matching, less that of DSBM",
            logs("cost error", "one-shot bridge matching"),
            COST_MARGIN,
        ),
        Comparison(
            "log sliced Wasserstein distance of one-shot bridge matching, less that of DSBM",
            logs("sliced", "one-shot bridge matching"),
            SLICED_MARGIN,
        ),
        Comparison(
            "log error in variance of DSB, less that of DSBM",
            logs("variance error", "DSB"),
            VARIANCE_MARGIN,
        ),
    ]


# The run


class _ClaimRun(Resumable[Config]):
    """The steps of a run. Each leaves a file in ``out``, and is skipped where that file is."""

    def folder(self, arm: Arm, seed: int) -> Path:
        return self.out / f"{arm.replace(' ', '-')}-{seed}"

    # Part 1

    def exact(self, seed: int) -> Exact:
        """KL of IMF, and of IPF after as many full cycles, by problem and sigma^2."""

        def make() -> Any:
            problems = {"line": line(self.config, seed), "plane": plane(self.config, seed)}
            steps = {"line": self.config.line_steps, "plane": self.config.plane_steps}
            return {
                name: {
                    str(s): _curves(*problem, Reference(math.sqrt(s)), steps[name], self.config)
                    for s in HORIZONS[name]
                }
                for name, problem in problems.items()
            }

        return cast(Exact, self.stored(f"exact-{seed}.json", make))

    # Part 2

    def train(self, arms: Sequence[Arm], seed: int) -> None:
        """Train and measure arms, at the same time unless the configuration says otherwise."""
        done = {arm for arm in arms if (self.folder(arm, seed) / "scores.json").exists()}
        self.each("scores", [(arm, seed) for arm in arms if arm not in done])

    def scores(self, arm: Arm, seed: int) -> dict[str, dict[str, float]]:
        """What is measured of an arm on held-out rows, by direction."""
        folder = self.folder(arm, seed)

        def make() -> Any:
            sides = read_sides(self.config, seed)
            self._fit(arm, seed, sides)
            translate = self._fitted(arm, seed, sides)
            return measure(
                translate, sides, self.config.diffusion, KeyedNoise(SAMPLE_SEED).at(seed)
            )

        return cast(dict[str, dict[str, float]], self.stored(f"{folder.name}/scores.json", make))

    def _fit(self, arm: Arm, seed: int, sides: Sides) -> None:
        """Train an arm, or go on, and save it."""
        config, folder, model = self.config, self.folder(arm, seed), self._build(arm, seed, sides)
        each = config.steps_a_direction
        shared: dict[str, Any] = {
            "batch_size": config.batch_size,
            "lr": config.lr,
            "ema": config.ema,
            "seed": seed,
        }
        if isinstance(model, Matching):
            count = max(len(sides.x0[0]), len(sides.x1[0]))
            data = {
                name: part[torch.arange(count) % len(part)]
                for name, part in (("x", sides.x0[0]), ("x1", sides.x1[0]))
            }
            stage = Stage(model, data, Training(steps=each, clip=1.0, **shared))
            train(stage, out=folder, progress=self.progress)
            header = {"system": "weights"}
            save_model(folder / MODEL, model.state_dict(), header, overwrite=True)
            return
        one_shot = arm == "one-shot bridge matching"
        published: dict[str, Any] = {"away": config.away}
        if arm == "DSBM":
            published |= {"first_steps": config.first_steps, "renew": config.renew}
        if arm == "DSB":
            published = {}  # its chains have times of their own
        model.fit(
            sides.x0[0],
            sides.x1[0],
            half_iterations=2 if one_shot else config.half_iterations,
            steps=each if one_shot else config.steps,
            pairs=config.pairs,
            method="dsb" if arm == "DSB" else "dsbm",
            out=folder,
            progress=self.progress,
            **published,
            **shared,
        ).save(folder / MODEL, overwrite=True)

    def _build(self, arm: Arm, seed: int, sides: Sides) -> SchrodingerBridge | Matching:
        shape = sides.x0[0].shape[1:]
        if arm == "rectified flow":
            first = network(self.config, shape, 2 * seed)
            return Matching(first, Linear(), coupling=Independent())
        return bridge(self.config, shape, seed)

    def _fitted(self, arm: Arm, seed: int, sides: Sides) -> Translate:
        """A trained arm."""
        model = self._build(arm, seed, sides)
        model.load_state_dict(load_model(self.folder(arm, seed) / MODEL)[0])
        if isinstance(model, Matching):
            return lambda x, way, noise: _along(model, x, way, self.config.simulation)
        return lambda x, way, noise: model.translate(x, cast(Any, way), noise=noise)

    # What is left behind

    def provenance(self) -> dict[str, str]:
        sides = read_sides(self.config, self.config.seeds[0])
        return {
            **sides.provenance,
            **{
                f"{part} rows": f"{len(sides.x1[k])} translated to {len(sides.x0[k])}"
                for k, part in enumerate(("training", "held-out"))
            },
            "exact problems": "breast_cancer (mean radius) and digits of scikit-learn, which has "
            "them from the UCI repository (CC BY 4.0)",
        }

    def table(self, scores: Scores) -> list[dict[str, Any]]:
        """One row an arm and direction; means over seeds."""
        ends = {"backward": "5-9 to 0-4", "forward": "0-4 to 5-9"}
        if self.config.files:
            ends = {"backward": "source to target", "forward": "target to source"}
        rows = []
        for arm, over in scores.items():
            for way in WAYS:
                mean = {n: statistics.fmean(one[way][n] for one in over) for n in over[0][way]}
                rows.append(
                    {
                        "arm": arm,
                        "direction": ends[way],
                        "cost": mean["cost"],
                        "entropic OT": mean["entropic cost"],
                        "cost error": mean["cost error"],
                        "sliced W2": mean["sliced"],
                        "floor": mean["floor"],
                        "variance error": mean["variance error"],
                        "its floor": mean["variance floor"],
                    }
                )
        return rows

    def notes(self, exact: Sequence[Exact]) -> list[str]:
        """What has to be said beside the table."""
        config = self.config
        factors = []
        for problem, horizons in HORIZONS.items():
            values = [
                f"{statistics.fmean(ratio(one[problem][str(s)]['imf']) for one in exact):.4f} at "
                f"{s:g}"
                for s in horizons
            ]
            factors.append(f"{problem}: {', '.join(values)}")
        each = config.steps_a_direction
        return [
            f"Exact part, factor r_2 = KL_3 / KL_2 by sigma^2, mean over seeds: "
            f"{'; '.join(factors)}. A seed's histograms are of {config.share:.0%} of the rows.",
            f"Networks: {each} gradient steps a direction in every arm, of batch "
            f"{config.batch_size}; rectified flow has one network for both. No arm was tuned: "
            f"learning rate {config.lr:g} for all. {config.pairs} pairs, or chains of DSB, a "
            f"half-iteration; simulations of {config.simulation} steps.",
            "The cost of entropic optimal transport is Sinkhorn's on the held-out rows, with the "
            "weight 2 sigma^2; of 1,000 rows a side it is about 0.7 % above that of 2,500. A cost "
            "error is relative to it, a variance error the mean over coordinates of |variance / "
            f"that of held-out rows - 1|; both, and the distance, are means over {DRAWS} "
            "translations. Floors are those of training rows against held-out ones.",
        ]

    def draw(self, scores: Scores, exact: Exact) -> None:
        """``figure.png``: curves of the exact part, costs and marginals of the arms, pictures."""
        figure: Any = plt.figure(figsize=(9.5, 7.6), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1.05))
        titles = {"line": "breast cancers, 1-D grid", "plane": "digits, 2-D grid"}
        for axis, (problem, curves) in zip(top.subplots(1, 2), exact.items(), strict=True):
            for k, (s, curve) in enumerate(curves.items()):
                for name, style in (("imf", "-"), ("ipf", ":")):
                    values = curve[name]
                    label = f"$\\sigma^2$ = {float(s):g}" if name == "imf" else None
                    axis.plot(values, style, marker=".", color=f"C{k}", label=label)
            axis.set_yscale("log")
            axis.set_ylim(bottom=1e-16)
            axis.set_xticks(range(self.config.iterations + 1))
            axis.set_xlabel("iteration (dotted: Sinkhorn's cycles)")
            axis.set_title(titles[problem], fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
        top.axes[0].set_ylabel("KL from the bridge, nats")
        top.axes[0].legend(frameon=False, fontsize=8, loc="lower left")
        left, right = bottom.subfigures(1, 2, width_ratios=(1, 1.25))
        self._plot_arms(left.subplots(), scores)
        self._plot_pictures(right.subplots())
        with atomic(self.out / "figure.png") as path:
            figure.savefig(path, dpi=150, format="png")
        plt.close(figure)

    def _plot_arms(self, axis: Any, scores: Scores) -> None:
        for k, (arm, over) in enumerate(scores.items()):
            for way, marker in zip(WAYS, ("o", "^"), strict=True):
                x, y = ([one[way][name] for one in over] for name in ("cost", "sliced"))
                label = arm if way == "backward" else None
                axis.scatter(x, y, marker=marker, color=f"C{k}", label=label, s=28)
        first = scores["DSBM"][0]["backward"]
        axis.axvline(first["entropic cost"], color="0.5", linestyle="--", lw=1)
        axis.axhline(first["floor"], color="0.5", linestyle=":", lw=1)
        axis.set_xlabel("transport cost (dashed: entropic OT)")
        axis.set_ylabel("sliced W2 to held-out rows (dotted: floor)")
        axis.legend(frameon=False, fontsize=7)
        axis.spines[["top", "right"]].set_visible(False)

    def _plot_pictures(self, axis: Any) -> None:
        """Held-out rows of the source, and what the arms make of them."""
        seed = self.config.seeds[0]
        sides = read_sides(self.config, seed)
        x = sides.x1[1][:SHOWN]
        rows = [("source", x)]
        noise = KeyedNoise(SAMPLE_SEED).at(seed)
        rows += [(arm, self._fitted(arm, seed, sides)(x, "backward", noise)) for arm in ARMS]
        strips = [np.concatenate(list(sides.picture(part)), axis=1) for _, part in rows]
        axis.imshow(np.concatenate(strips), cmap="gray", vmin=0, vmax=1)
        height = strips[0].shape[0]
        names = [name.replace(" ", "\n", 1) for name, _ in rows]
        axis.set_yticks([(k + 0.5) * height for k in range(len(rows))], names, fontsize=8)
        axis.set_xticks([])
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)


# Part 1: exact problems


def _curves(
    p0: Tensor, p1: Tensor, points: Tensor, reference: Reference, steps: int, config: Config
) -> dict[str, list[float]]:
    kernels = transition_kernels(points, reference, steps)
    whole = whole_kernel(kernels)
    target = sinkhorn(p0, p1, whole)
    imf = grid_imf(p0, p1, kernels, config.iterations)
    ipf = grid_ipf(p0, p1, whole, 2 * config.iterations)[::2]
    return {
        "imf": [float(coupling_kl(one, target)) for one in imf],
        "ipf": [float(coupling_kl(one, target)) for one in ipf],
    }


def line(config: Config, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean radius of benign and of malignant tumours, standardised."""
    x, label = load_breast_cancer(return_X_y=True)
    radius = torch.from_numpy((x[:, :1] - x[:, 0].mean()) / x[:, 0].std())
    points = torch.linspace(-4, 5, config.line, dtype=torch.float64)[:, None]
    return (*_histograms(radius, torch.from_numpy(label) == 1, points, config, seed), points)


def plane(config: Config, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The digits 0-4 and 5-9 in two principal components, standardised."""
    x, label = load_digits(return_X_y=True)
    rows = torch.from_numpy(x)
    z = _Components.of(rows, 2).encode(rows)
    side = torch.linspace(-2.6, 2.6, config.side, dtype=torch.float64)
    points = torch.cartesian_prod(side, side)
    return (*_histograms(z, torch.from_numpy(label) < 5, points, config, seed), points)


def _histograms(
    x: Tensor, ours: Tensor, points: Tensor, config: Config, seed: int
) -> tuple[Tensor, Tensor]:
    """Densities of a share of the rows of either kind, smoothed by a Gaussian of deviation 0.3."""
    chosen = KeyedNoise(seed).uniform(torch.empty(len(x), dtype=torch.float64)).argsort()
    chosen = chosen[: round(config.share * len(x))]
    result = []
    for kind in (ours, ~ours):
        rows = x[chosen[kind[chosen]]]
        density = torch.exp(-torch.cdist(points, rows).square() / (2 * 0.3**2)).sum(1)
        result.append(density / density.sum())
    return result[0], result[1]


# Part 2: rows and measures


@dataclass(frozen=True)
class Sides:
    """(training rows, held-out rows) of either side, and how a row is shown."""

    x0: tuple[Tensor, Tensor]
    x1: tuple[Tensor, Tensor]
    picture: Callable[[Tensor], np.ndarray]
    provenance: dict[str, str]


@lru_cache(maxsize=1)
def read_sides(config: Config, seed: int) -> Sides:
    """The rows of a seed's split."""
    if config.files:
        return _from_files(config, seed)
    data = SETS["digits"]()
    parts = data.split(train=0.6, validation=None, test=0.4, seed=seed)
    train_part, test = parts["train"], parts["test"]
    pixels = [part.x.flatten(1).double() / 255 for part in (train_part, test)]
    components = _Components.of(pixels[0], config.components)
    sides = []
    for low in (True, False):
        rows = []
        for part, x in zip((train_part, test), pixels, strict=True):
            label = part.label
            assert label is not None
            chosen = x[(label < 5) == low][: config.rows]
            rows.append(components.encode(chosen).float())
        sides.append((rows[0], rows[1]))
    return Sides(
        sides[0],
        sides[1],
        lambda x: components.decode(x.double()).reshape(-1, 28, 28).clamp(0, 1).numpy(),
        {"name": data.name, "source": data.source, "licence": data.licence},
    )


def _from_files(config: Config, seed: int) -> Sides:
    """Two files of images, a tenth of each held out; sides are padded to multiples of 4."""
    sides = []
    for name in reversed(config.files):
        path = Path(name)
        if not path.is_file():
            raise FileNotFoundError(f"files: there is no {name}")
        try:
            with np.load(path) as arrays:
                x = torch.from_numpy(arrays["x"])
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(f"files: {path} is no .npz file with an array x ({error})") from error
        if x.ndim != 4 or len(x) < 20:
            raise ValueError(
                f"files: {path} must hold x (rows, channels, height, width) with 20 rows or more, "
                f"got {tuple(x.shape)}"
            )
        x = scaled(x) if x.dtype == torch.uint8 else x.float()
        order = KeyedNoise(seed).uniform(torch.empty(len(x), dtype=torch.float64)).argsort()
        x = x[order[: config.rows]]
        across, down = (-x.shape[3] % 4, -x.shape[2] % 4)
        x = nn.functional.pad(x, (0, across, 0, down), value=float(x.min()))
        held = len(x) // 10
        sides.append((x[held:], x[:held]))
    return Sides(
        sides[0],
        sides[1],
        lambda x: ((x[:, 0] + 1) / 2).clamp(0, 1).numpy(),
        {"name": " to ".join(Path(name).name for name in config.files), "source": "user's files"},
    )


@dataclass(frozen=True)
class _Components:
    """The first principal components of rows, each of deviation 1, and the way back."""

    mean: Tensor
    axes: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, rows: Tensor, count: int) -> _Components:
        values, axes = torch.linalg.eigh(torch.cov(rows.T, correction=0))
        axes = axes[:, -count:].flip(1)
        # the sign of an axis is arbitrary: its largest entry is positive
        axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
        return cls(rows.mean(0), axes, values[-count:].flip(0).sqrt())

    def encode(self, rows: Tensor) -> Tensor:
        return (rows - self.mean) @ self.axes / self.deviation

    def decode(self, z: Tensor) -> Tensor:
        return (z * self.deviation) @ self.axes.T + self.mean


def _along(flow: Matching, x: Tensor, way: str, steps: int) -> Tensor:
    """Euler steps of a flow from one side to the other."""
    pairs = uniform_grid(steps) if way == "backward" else uniform_grid(steps, 0.0, 1.0)
    run: Any = simulate
    with torch.no_grad():
        return cast(Tensor, run(x, pairs, Euler(), Linear(), flow.eval().field, KeyedNoise(0)))


def measure(
    translate: Translate, sides: Sides, diffusion: float, noise: KeyedNoise
) -> dict[str, dict[str, float]]:
    """By direction, means over `DRAWS` translations of the held-out rows, and their floors."""
    wanted = entropic_cost(sides.x0[1], sides.x1[1], diffusion)
    result = {}
    starts = {"backward": (sides.x1, sides.x0), "forward": (sides.x0, sides.x1)}
    for way, (begin, end) in starts.items():
        x, there, real = begin[1], end[1], end[0][: len(begin[1])]
        rows = []
        for k in range(DRAWS):
            moved = translate(x, way, noise.at(k))
            cost = float((moved - x).flatten(1).square().sum(1).mean())
            rows.append((cost, _sliced(moved, there), _variance_error(moved, there)))
        cost, sliced, variance = map(statistics.fmean, zip(*rows, strict=True))
        result[way] = {
            "cost": cost,
            "entropic cost": wanted,
            "cost error": abs(cost / wanted - 1),
            "sliced": sliced,
            "floor": _sliced(real, there),
            "variance error": variance,
            "variance floor": _variance_error(real, there),
        }
    return result


def _sliced(x: Tensor, there: Tensor) -> float:
    return sliced_wasserstein(x.flatten(1), there.flatten(1))


def entropic_cost(x0: Tensor, x1: Tensor, diffusion: float) -> float:
    """E |x_0 - x_1|^2 under the plan of entropic optimal transport of weight 2 sigma^2."""
    import ot

    costs = torch.cdist(x0.flatten(1).double(), x1.flatten(1).double()).square().numpy()
    plan = ot.sinkhorn(
        [], [], costs, 2 * diffusion**2, method="sinkhorn_log", numItermax=5_000, stopThr=1e-9
    )
    return float((plan * costs).sum())


def _variance_error(x: Tensor, there: Tensor) -> float:
    wanted = there.double().var(0)
    # of images some pixels never vary
    ratio = x.double().var(0)[wanted > 1e-6] / wanted[wanted > 1e-6]
    return float((ratio - 1).abs().mean())
