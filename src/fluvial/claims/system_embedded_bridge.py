"""The claim of system-embedded bridges: knowing the measurement system restores better than not.

Squares of photographs, measured in three ways: the lower half missing; means of 2 x 2 pixels with
noise; a few columns of the spectrum, others for every picture, with noise. Five arms restore them:
the system-embedded bridge, a bridge with numbers for coefficients (I2SB), direct regression, and
two methods that guide an unconditional flow without training for the system (DDNM and PiGDM). All
have the same network, weights at the start, rows, batches and optimiser; the flow is trained once
for all three systems, by as many steps as each of the others. All but the regression make as many
network calls for a picture; PiGDM goes backward through each as well.

Photographs that are restored are other ones than those trained on. Two systems are then changed at
test time: the noise is doubled, once unknown to every arm and once told to those that take it (on
the photographs of `VALIDATION` the bridge restored better untold; both are judged), and the
spectrum has a column fewer.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import matplotlib
import torch
from torch import Tensor

from fluvial.claims.report import Report, open_run, write_report
from fluvial.claims.resumable import Resumable
from fluvial.claims.verdict import Comparison
from fluvial.core.gaussian.losses import Matching
from fluvial.core.gaussian.paths import Linear
from fluvial.core.noise import KeyedNoise
from fluvial.core.operators.base import Operator
from fluvial.core.operators.diagonal import Mask
from fluvial.core.operators.downsample import AveragePool
from fluvial.core.operators.fourier import SubsampledFourier, columns_mask
from fluvial.core.protocols import Noise
from fluvial.data import read, scaled
from fluvial.data.format import Format
from fluvial.data.photographs import (
    HELD_OUT,
    LICENCES,
    TRAINING,
    VALIDATION,
    crops,
    grey,
    photograph,
)
from fluvial.inverse.system_embedded_bridge import (
    SB,
    PairedRestorer,
    Regression,
    ScalarBridge,
    SystemEmbeddedBridge,
    ddnm,
    pigdm,
)
from fluvial.metrics import frechet_distance, psnr, ssim
from fluvial.networks import UNet
from fluvial.training.files import atomic, load_model, save_model
from fluvial.training.loop import Stage, Training, train

matplotlib.use("Agg")  # a run has no screen
import matplotlib.pyplot as plt  # noqa: E402

SYSTEM = "system-embedded-bridge"
CLAIM = (
    "At equal network, training and network calls, the system-embedded bridge restores noisy means "
    "of pixels and noisy columns of the spectrum better by 0.3 dB than a bridge with scalar "
    "coefficients; what is measured without noise it keeps to a part in 100,000, where that one "
    "changes it by a part in 100 or more; and its PSNR drops by less when the noise is doubled, "
    "told or not, or a column is missing that it was trained with."
)
PSNR_MARGIN = 0.3
"""dB, of the bridge over the scalar one, on the systems with noise."""
KEPT, CHANGED = 1e-5, 1e-2
"""Relative error in what is measured without noise: at most, of the bridge; at least, of the other.
"""
DROP_MARGIN = 0.0
"""dB, of the scalar bridge's loss of PSNR under another system over the bridge's."""

Arm = Literal["system-embedded bridge", "scalar bridge", "regression", "DDNM", "PiGDM"]
ARMS: tuple[Arm, ...] = ("system-embedded bridge", "scalar bridge", "regression", "DDNM", "PiGDM")
TRAINED: tuple[Arm, ...] = ARMS[:3]
System: TypeAlias = Literal["inpainting", "pooling", "fourier"]
SYSTEMS: tuple[System, ...] = ("inpainting", "pooling", "fourier")
CONDITIONS: Mapping[System, tuple[str, ...]] = {
    "inpainting": ("as trained",),
    "pooling": ("as trained", "twice the noise", "twice the noise, told"),
    "fourier": ("as trained", "twice the noise", "twice the noise, told", "a column fewer"),
}
FLOW = "flow"
TEST, MEASURE, RESTORE, COLUMNS, FLOOR = range(1_000, 6_000, 1_000)
"""Seeds of the draws."""
PATCH = 4
"""Side of the patches whose distribution is compared."""
SHOWN = ("astronaut", 64, 160, 7)
"""Photograph, first row and column, and tiles of a side, in the figure."""
MODEL = "model.safetensors"


@dataclass(frozen=True)
class Config:
    """Everything a run of the claim depends on.

    Args:
        data: photographs, which ship in packages, or what `fluvial train` reads: a folder of
            images, a tenth of which is held out.
        size: side of the pictures.
        channels: of the pictures, 1 or 3.
        rows: squares to train on.
        test: squares that are restored.
        pooling_noise: standard deviation of the noise of means; pictures are in [-1, 1].
        fourier_noise: of the real and imaginary parts of the orthonormal spectrum.
        columns: of the half-spectrum: the lowest, and how many others at random.
        schedule: of the system-embedded bridge, sb, vp or ve.
        beta_min, beta_max: of SB, of both bridges.
        width: of the U-Net.
        multipliers: of the width, a level each.
        blocks: residual blocks a level.
        steps: optimiser steps of every training.
        batch_size, lr, ema: of every training.
        calls: network calls of a restoration.
        seeds: a training of each arm and a test set a seed.
        side_by_side: train on two processes.
    """

    data: str = "photographs"
    size: int = 16
    channels: int = 1
    rows: int = 6_000
    test: int = 96
    pooling_noise: float = 0.1
    fourier_noise: float = 0.05
    columns: tuple[int, int] = (2, 1)
    schedule: Literal["sb", "vp", "ve"] = "sb"
    beta_min: float = 1e-4
    beta_max: float = 1e-2
    width: int = 16
    multipliers: tuple[int, ...] = (1, 2)
    blocks: int = 1
    steps: int = 320
    batch_size: int = 32
    lr: float = 2e-3
    ema: float = 0.99
    calls: int = 20
    seeds: tuple[int, ...] = (0,)
    side_by_side: bool = True

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("seeds needs at least one value")
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, got {self.channels}")
        for name in ("rows", "test", "steps", "batch_size", "calls", "width", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.size % PATCH or self.size < 2 * PATCH:
            raise ValueError(f"size must be a multiple of {PATCH} and above it, got {self.size}")
        low, others = self.columns
        if low < 1 or others < 1 or low + others > self.size // 2 + 1:
            raise ValueError(
                f"columns must be two positive numbers of at most {self.size // 2 + 1} in all, got "
                f"{self.columns}"
            )
        if self.schedule not in ("sb", "vp", "ve"):
            raise ValueError(f"schedule must be sb, vp or ve, got {self.schedule!r}")
        _ = self.bridge  # whose own checks speak

    @property
    def bridge(self) -> SB:
        """SB's schedule."""
        return SB(self.beta_min, self.beta_max)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.size, self.size


PRESETS: dict[str, Config] = {
    "smoke": Config(
        rows=64,
        test=48,
        width=8,
        steps=2,
        batch_size=8,
        calls=2,
        side_by_side=False,
    ),
    "laptop": Config(steps=220, test=64),
    "record": Config(seeds=(0, 1, 2)),
    # the published sizes; data is to be a folder of images of 256 pixels
    "full": Config(
        data="images",
        size=256,
        channels=3,
        rows=27_000,
        test=3_000,
        fourier_noise=0.0087,
        columns=(16, 34),
        width=64,
        multipliers=(1, 2, 4, 8, 16),
        blocks=2,
        steps=860_000,
        batch_size=8,
        lr=1e-4,
        ema=0.999,
        calls=100,
        side_by_side=False,
    ),
}


# The systems


def system(config: Config, name: System, rows: int, noise: Noise, fewer: int = 0) -> Operator:
    """A system for ``rows`` pictures; of the spectrum, with ``fewer`` of the random columns."""
    shape = config.shape
    if name == "inpainting":
        seen = torch.ones(1, 1, config.size, config.size, dtype=torch.bool)
        seen[:, :, config.size // 2 :] = False
        return Mask(seen, shape)
    if name == "pooling":
        return AveragePool((2, 2), shape)
    low, others = config.columns
    width = config.size // 2 + 1
    order = noise.uniform(torch.empty(rows, width - low, dtype=torch.float64), "columns")
    random = order.argsort(1)[:, : others - fewer] + low
    columns = torch.cat([torch.arange(low).expand(rows, low), random], 1)
    return SubsampledFourier(columns_mask(shape[1:], columns), shape)


def obs_noise(config: Config, name: System) -> float:
    """Standard deviation of a system's noise."""
    found = {"pooling": config.pooling_noise, "fourier": config.fourier_noise}
    return found.get(name, 0.0)


def under(config: Config, name: System, condition: str, rows: int) -> tuple[Operator, float]:
    """(operator, deviation) of a system at test time."""
    fewer = int(condition == "a column fewer")
    twice = 2 if condition.startswith("twice the noise") else 1
    operator = system(config, name, rows, KeyedNoise(COLUMNS), fewer)
    return operator, twice * obs_noise(config, name)


# The arms


def network(config: Config, seed: int, *, channels: int) -> UNet:
    """The same for all arms, but for the channels that go in and come out."""
    return UNet(
        size=config.size,
        channels=channels,
        width=config.width,
        multipliers=config.multipliers,
        blocks=config.blocks,
        seed=seed,
    )


def build(config: Config, arm: str, seed: int) -> PairedRestorer | Matching:
    """An arm before training: the same weights for all that take pairs."""
    if arm == FLOW:
        return Matching(network(config, seed, channels=config.channels), Linear())
    net = network(config, seed, channels=2 * config.channels)
    if arm == "system-embedded bridge":
        schedule = config.bridge if config.schedule == "sb" else config.schedule
        return SystemEmbeddedBridge(
            net, schedule, steps=config.calls, format=Format("images", config.shape)
        )
    if arm == "scalar bridge":
        return ScalarBridge(net, config.bridge, steps=config.calls)
    return Regression(net)


def fit(config: Config, arm: str, name: System, seed: int, x: Tensor, **options: Any) -> Any:
    """A trained arm, on pictures in [-1, 1]; ``options`` go to the training."""
    model = build(config, arm, seed)
    shared: dict[str, Any] = {
        "steps": config.steps,
        "batch_size": config.batch_size,
        "lr": config.lr,
        "betas": (0.9, 0.99),
        "warmup": min(20, config.steps // 4),
        "schedule": "cosine",
        "clip": 1.0,
        "ema": config.ema,
        "seed": seed,
    }
    if isinstance(model, Matching):
        train(Stage(model, {"x": x}, Training(**shared)), **options)
        return model.eval()

    def draw(like: Tensor, noise: Noise) -> Operator:
        return system(config, name, len(like), noise)

    images: Tensor = (x * 127.5 + 127.5).round().to(torch.uint8) if model.format else x
    operator = draw if name == "fourier" else draw(x[:1], KeyedNoise(0))
    return model.fit(images, operator, obs_noise=obs_noise(config, name), **shared, **options)


def restored(
    config: Config, arm: Arm, model: Any, y: Tensor, operator: Operator, std: float, noise: Noise
) -> Tensor:
    """What an arm makes of measurements, in [-1, 1] but for what it oversteps."""
    if isinstance(model, Matching):
        options: dict[str, Any] = {"obs_noise": std, "steps": config.calls, "noise": noise}
        if arm == "DDNM":
            return ddnm(model.field, Linear(), y, operator, **options)
        return pigdm(model.field, Linear(), y, operator, std=0.5, **options)
    if isinstance(model, SystemEmbeddedBridge):
        return model.restore(
            y, operator, obs_noise=std, noise=cast(KeyedNoise, noise), decode=False
        )
    return cast(Tensor, model.restore(y, operator, noise=noise))


# The pictures


@lru_cache(maxsize=2)
def pictures(config: Config, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(training, test, other held-out) pictures in [-1, 1]."""
    if config.data == "photographs":
        colour = config.channels == 3
        return (
            scaled(crops(TRAINING, config.size, config.rows, seed=seed, colour=colour)),
            scaled(crops(HELD_OUT, config.size, config.test, seed=TEST + seed, colour=colour)),
            scaled(crops(HELD_OUT, config.size, config.test, seed=FLOOR + seed, colour=colour)),
        )
    data = read(config.data, size=config.size, channels=config.channels, progress=False)
    ours, theirs = data.hold_out(0.1, seed=seed)
    held = scaled(cast(Any, theirs).x[: 2 * config.test])
    return scaled(ours.x[: config.rows]), held[::2], held[1::2]


def measure(x: Tensor, operator: Operator, std: float, seed: int) -> Tensor:
    """y = A x + n; twice the noise is twice the same."""
    seen = operator.A(x)
    return seen + std * KeyedNoise(MEASURE).at(seed).normal(seen)


def scores(x: Tensor, clean: Tensor, y: Tensor, operator: Operator) -> dict[str, float]:
    """Means over the pictures ``x`` that were restored."""
    # the error in what was measured is that of the whole: of parts of it that were cut off too
    gap = (operator.A(x) - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)
    x = x.clamp(-1, 1)
    return {
        "PSNR": float(psnr(x, clean, data_range=2).mean()),
        "SSIM": float(ssim(x, clean, data_range=2, window="uniform").mean()),
        "distance": distance(x, clean),
        "consistency": float(gap.mean()),
    }


def distance(x: Tensor, clean: Tensor) -> float:
    """The Fréchet distance of patches less their mean: of texture, where both share the levels."""
    return frechet_distance(_patches(x), _patches(clean))


def _patches(x: Tensor) -> Tensor:
    parts = x.double().unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
    rows = parts.flatten(4).flatten(0, 3)
    return rows - rows.mean(1, keepdim=True)


# The run

Scores: TypeAlias = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By system, condition and measure."""


def run(
    config: Config, preset: str, out: Path, *, force: bool = False, progress: bool = True
) -> Report:
    """Run the claim into the folder ``out``; go on where an interrupted run of it stopped.

    Raises:
        FileExistsError: ``out`` holds something else, or a finished run; see `open_run`.
        FileNotFoundError: the data are a folder that is not there.
    """
    pictures(config, config.seeds[0])  # data that are not there are found before any work
    run = _ClaimRun(config, open_run(out, preset, config, force=force), progress)
    for seed in config.seeds:
        run.train(seed)
    found = {arm: [run.scores(arm, seed) for seed in config.seeds] for arm in (*ARMS, "A^+ y")}
    report = Report(
        system=SYSTEM,
        claim=CLAIM,
        preset=preset,
        config=config,
        comparisons=comparisons(found),
        table=run.table(found),
        data=run.provenance(),
        seconds=run.spent(),
        notes=run.notes(),
    )
    run.draw()
    shutil.copyfile(run.folder(ARMS[0], "pooling", config.seeds[0]) / MODEL, out / MODEL)
    write_report(report, out)
    return report


def comparisons(found: Mapping[str, Sequence[Scores]]) -> list[Comparison]:
    """What the verdict is computed from."""
    ours, theirs = found["system-embedded bridge"], found["scalar bridge"]
    result = []
    for name in ("pooling", "fourier"):
        gains = [
            a[name]["as trained"]["PSNR"] - b[name]["as trained"]["PSNR"]
            for a, b in zip(ours, theirs, strict=True)
        ]
        result.append(Comparison(f"PSNR over the scalar bridge's, dB ({name})", gains, PSNR_MARGIN))
    kept, changed = (
        [max(one["inpainting"]["as trained"]["consistency"], 1e-12) for one in arm]
        for arm in (ours, theirs)
    )
    result += [
        Comparison(
            f"decades that the relative error in what is measured is below {KEPT:g} (inpainting)",
            [math.log10(KEPT / value) for value in kept],
        ),
        Comparison(
            f"decades that the scalar bridge's is above {CHANGED:g} (inpainting)",
            [math.log10(value / CHANGED) for value in changed],
        ),
    ]
    for condition in ("twice the noise", "twice the noise, told", "a column fewer"):
        names = [name for name in SYSTEMS if condition in CONDITIONS[name]]
        drops = [
            statistics.fmean(
                (theirs_[name]["as trained"]["PSNR"] - theirs_[name][condition]["PSNR"])
                - (ours_[name]["as trained"]["PSNR"] - ours_[name][condition]["PSNR"])
                for name in names
            )
            for ours_, theirs_ in zip(ours, theirs, strict=True)
        ]
        result.append(
            Comparison(
                f"loss of PSNR of the scalar bridge less that of the bridge, dB ({condition})",
                drops,
                DROP_MARGIN,
            )
        )
    return result


class _ClaimRun(Resumable[Config]):
    """The steps of a run. Each leaves a file in ``out``, and is skipped where that file is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._models: dict[Path, Any] = {}

    def folder(self, arm: str, name: str, seed: int) -> Path:
        return self.out / f"{arm.replace(' ', '-')}-{name}-{seed}"

    def train(self, seed: int) -> None:
        """All trainings of a seed, in two processes unless the configuration says otherwise."""
        jobs = [(arm, name) for name in SYSTEMS for arm in TRAINED]
        flow: tuple[Any, Any] = (FLOW, "all")
        jobs.append(flow)
        waiting = [job for job in jobs if not (self.folder(*job, seed) / MODEL).exists()]
        self.each("fit_all", [(waiting[k::2], seed) for k in range(2)])
        left = [arm for arm in ARMS if not self._scores_file(arm, seed).exists()]
        # PiGDM takes as long as the others together
        shares = [[arm for arm in left if (arm == "PiGDM") == alone] for alone in (False, True)]
        self.each("score_all", [(share, seed) for share in shares if share])

    def score_all(self, arms: Sequence[Arm], seed: int) -> None:
        for arm in arms:
            self.scores(arm, seed)

    def fit_all(self, jobs: Sequence[tuple[Any, Any]], seed: int) -> None:
        x, _, _ = pictures(self.config, seed)
        for arm, name in jobs:
            folder = self.folder(arm, name, seed)
            model = fit(self.config, arm, name, seed, x, out=folder, progress=self.progress)
            if isinstance(model, SystemEmbeddedBridge):
                model.save(folder / MODEL, overwrite=True)
            else:
                header = {"system": "weights"}
                save_model(folder / MODEL, model.state_dict(), header, overwrite=True)

    def fitted(self, arm: Arm, name: System, seed: int) -> Any:
        """A trained arm."""
        kind, whose = (arm, name) if arm in TRAINED else (FLOW, "all")
        folder = self.folder(kind, whose, seed)
        if folder not in self._models:
            model = build(self.config, kind, seed)
            model.load_state_dict(load_model(folder / MODEL)[0])
            self._models[folder] = model.eval()
        return self._models[folder]

    def _scores_file(self, arm: str, seed: int) -> Path:
        return self.out / f"scores-{arm.replace(' ', '-').replace('^', '')}-{seed}.json"

    def scores(self, arm: str, seed: int) -> Scores:
        """What is measured of an arm, or of the pseudo-inverse, on held-out pictures."""

        def make() -> Any:
            _, clean, _ = pictures(self.config, seed)
            found: dict[str, dict[str, dict[str, float]]] = {}
            for name in SYSTEMS:
                model = None if arm == "A^+ y" else self.fitted(cast(Arm, arm), name, seed)
                for condition in CONDITIONS[name]:
                    operator, std = under(self.config, name, condition, len(clean))
                    y = measure(clean, operator, std, seed)
                    x = operator.A_dagger(y)
                    if model is not None:
                        noise = KeyedNoise(RESTORE).at(seed)
                        told = std if "told" in condition else obs_noise(self.config, name)
                        x = restored(self.config, cast(Arm, arm), model, y, operator, told, noise)
                    one = scores(x, clean, y, operator)
                    found.setdefault(name, {})[condition] = one
            return found

        return cast(Scores, self.stored(self._scores_file(arm, seed).name, make))

    # What is left behind

    def provenance(self) -> dict[str, str]:
        config = self.config
        sizes = f"{config.rows} and {config.test} of {config.size} x {config.size} pixels"
        if config.data != "photographs":
            return {"name": Path(config.data).name, "source": config.data, "pictures": sizes}
        return {
            "name": "photographs of scikit-image and scikit-learn",
            "source": f"trained on {', '.join(TRAINING)}; chosen on {', '.join(VALIDATION)}; "
            f"restored {', '.join(HELD_OUT)}",
            "licence": LICENCES,
            "pictures": f"{sizes}, at random places",
        }

    def table(self, found: Mapping[str, Sequence[Scores]]) -> list[dict[str, Any]]:
        """One row a system, condition and arm; means over seeds."""
        floors = []
        for seed in self.config.seeds:
            _, clean, other = pictures(self.config, seed)
            floors.append(distance(other, clean))
        rows = []
        for name in SYSTEMS:
            for condition in CONDITIONS[name]:
                for arm, over in found.items():
                    ones = [one[name][condition] for one in over]
                    mean = {key: statistics.fmean(one[key] for one in ones) for key in ones[0]}
                    rows.append(
                        {
                            "system": name,
                            "at test": condition,
                            "arm": arm,
                            "PSNR, dB": round(mean["PSNR"], 3),
                            "SSIM": mean["SSIM"],
                            "Fréchet distance": mean["distance"],
                            "floor": statistics.fmean(floors),
                            "|A x - y| / |y|": mean["consistency"],
                            "calls": _calls(arm, self.config),
                        }
                    )
        return rows

    def notes(self) -> list[str]:
        """What has to be said beside the table."""
        config = self.config
        size = sum(p.numel() for p in network(config, 0, channels=2 * config.channels).parameters())
        return [
            f"Every training: {config.steps} steps of batch {config.batch_size}, a U-Net of "
            f"{size:,} parameters; the published one has widths up to 1,024 and sees some 860,000 "
            "batches of 8. The flow is trained once for three systems, and has one channel for two "
            "at its first and last layer. The learning rate is one for all arms; it and SB's betas "
            "are the published ones for images or were chosen on no picture that is restored here.",
            "DDNM with noise is DDNM+. PiGDM makes as many calls and goes backward through each, "
            "some two calls more. The system-embedded bridge and the methods without training are "
            "told the operator they restore from; the scalar bridge and the regression see A^+ y. "
            "Of noise that is twice that of the training nobody is told but where it says so.",
            "PSNR and SSIM (7 x 7 windows) of pictures clamped to [-1, 1], data range 2. The "
            f"Fréchet distance is that of patches of {PATCH} x {PATCH} pixels less their mean, of "
            "texture; its floor is that of other squares of the held-out photographs. A regression "
            "aims at medians, and blurs what is not measured: a high PSNR with a large distance.",
        ]

    def draw(self) -> None:
        """``figure.png``: a held-out photograph in tiles, each measured and restored by itself."""
        config, seed = self.config, self.config.seeds[0]
        tiles, across = _shown(config, seed)
        names = ("clean", "A⁺y", *ARMS)
        rows = []
        for name in SYSTEMS:
            operator, std = under(config, name, "as trained", len(tiles))
            y = measure(tiles, operator, std, seed)
            noise = KeyedNoise(RESTORE).at(seed).at(1)
            parts = [tiles, operator.A_dagger(y)]
            for arm in ARMS:
                model = self.fitted(arm, name, seed)
                parts.append(restored(config, arm, model, y, operator, std, noise))
            rows.append(parts)
        figure: Any = plt.figure(figsize=(1.75 * len(names), 1.85 * len(rows) + 0.3))
        grid = figure.subplots(len(rows), len(names), squeeze=False)
        titles = {"inpainting": "lower half\nof each tile", "pooling": "means of\n2 x 2, noise"}
        for line, name, parts in zip(grid, SYSTEMS, rows, strict=True):
            for axis, title, part in zip(line, names, parts, strict=True):
                axis.imshow(_joined(part, across), cmap="gray", vmin=0, vmax=1)
                axis.set_xticks([])
                axis.set_yticks([])
                axis.spines[:].set_visible(False)
                if name == SYSTEMS[0]:
                    axis.set_title(title.replace("-embedded", "-\nembedded"), fontsize=9)
                if title not in ("clean",):
                    value = float(psnr(part.clamp(-1, 1), tiles, data_range=2).mean())
                    axis.set_xlabel(f"{value:.1f} dB", fontsize=8, labelpad=2)
            line[0].set_ylabel(titles.get(name, "columns of\nthe spectrum"), fontsize=9)
        figure.tight_layout(pad=0.4)
        with atomic(self.out / "figure.png") as path:
            figure.savefig(path, dpi=150, format="png")
        plt.close(figure)


def _shown(config: Config, seed: int) -> tuple[Tensor, int]:
    """(tiles, how many in a row)."""
    if config.data != "photographs":
        return pictures(config, seed)[1][:16], 4
    name, top, left, count = SHOWN
    side = count * config.size
    image = photograph(name)
    image = image if config.channels == 3 else grey(image)
    image = scaled(image[:, top : top + side, left : left + side])
    tiles = image.unfold(1, config.size, config.size).unfold(2, config.size, config.size)
    return tiles.permute(1, 2, 0, 3, 4).flatten(0, 1).contiguous(), tiles.shape[2]


def _joined(tiles: Tensor, across: int) -> Any:
    """Tiles as one picture in [0, 1]."""
    rows = [torch.cat(list(row), -1) for row in tiles.split(across)]
    picture = ((torch.cat(rows, -2) + 1) / 2).clamp(0, 1)
    return picture[0] if len(picture) == 1 else picture.permute(1, 2, 0)


def _calls(arm: str, config: Config) -> int:
    return {"A^+ y": 0, "regression": 1}.get(arm, config.calls)
