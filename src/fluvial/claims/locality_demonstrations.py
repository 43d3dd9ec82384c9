"""What stands beside the claim of the locality denoiser: demonstrations, maps and the figure.

Digits: a perceptron against all denoisers. Photographs: the sensitivity of a perceptron and of a
small U-Net, trained on patches, against the Wiener filter's. Neither is judged.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.levels import time_of
from fluvial.core.gaussian.losses import Matching
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Field
from fluvial.core.time import Uniform
from fluvial.images.locality import (
    EquivariantLocalScoreMachine,
    LocalityDenoiser,
    LocalScoreMachine,
    NearestDenoiser,
    OptimalDenoiser,
    Spectrum,
    WienerDenoiser,
    agreement,
    cosine,
    linear_beta_path,
    radius,
    sensitivity,
)
from fluvial.networks import MLP, UNet
from fluvial.training.files import atomic
from fluvial.training.loop import Stage, Training, train

PATH = linear_beta_path()
NOISE = KeyedNoise(4_000)
DIGITS = (0.394, 0.895, 0.994)
"""Shares of signal at which digits are compared."""
SIDE = 12
"""Of the patches of photographs, in pixels."""
OURS = "locality"

Score: TypeAlias = Mapping[str, float]
Row: TypeAlias = tuple[str, Tensor, Tensor | None]
"""Title, maps by level (levels, height, width), and components (5, height, width)."""


def time_at(a: float) -> Tensor:
    """t with alpha(t)^2 = a."""
    return time_of(PATH, torch.tensor(math.sqrt((1 - a) / a), dtype=torch.float64))


def noisy(x: Tensor, a: float, noise: KeyedNoise) -> Tensor:
    """The images with noise, alpha^2 = a."""
    return cast(Tensor, PATH.sample(x, time_at(a), noise).x)


def noise_prediction(network: nn.Module) -> Matching:
    """The objective of all networks here."""
    return Matching(network, PATH, predicts="noise", times=Uniform(1e-3, 1.0))


def clean_field(network: nn.Module) -> Field:
    """What a network that predicts noise estimates the clean image to be."""
    return convert(noise_prediction(network).field, "clean", PATH)


def at_scale(denoiser: Any, scale: Any) -> Any:
    """The denoiser with another threshold or side, where it has one."""
    return denoiser if scale is None else denoiser.at_scale(scale)


def best_scale(estimates: Sequence[Tensor], target: Tensor, scales: Sequence[Any]) -> Any:
    """The scale whose estimates have the highest mean R^2 to the target."""
    r2 = [float(agreement(estimate, target).r2.mean()) for estimate in estimates]
    return scales[int(np.argmax(r2))]


def scores(estimates: Mapping[str, Tensor], target: Tensor, clean: Tensor) -> dict[str, Score]:
    """Agreement with a target, mean over images, and the squared error to the clean images."""
    result: dict[str, Score] = {}
    for name, estimate in estimates.items():
        match = agreement(estimate, target)
        result[name] = {
            "r2": float(match.r2.mean()),
            "correlation": float(match.correlation.nan_to_num().mean()),
            "clean": float((estimate - clean).square().mean()),
        }
    return result


# Sensitivity


def centre(shape: Sequence[int]) -> int:
    """Index of the pixel in the middle, in the first channel."""
    return shape[-2] // 2 * shape[-1] + shape[-1] // 2


def mean_rows(field: Field, x: Tensor, levels: Sequence[float]) -> Tensor:
    """Mean Jacobian row of the centre over noisy images, (levels, channels, height, width)."""
    middle = centre(x.shape[1:])
    return torch.stack(
        [
            sensitivity(field, noisy(x, a, NOISE.at(k)), time_at(a), middle).mean(0)
            for k, a in enumerate(levels)
        ]
    )


def wiener_rows(wiener: WienerDenoiser, levels: Sequence[float]) -> Tensor:
    """Rows of the centre of the Wiener gain, shaped as those of `mean_rows`."""
    gains = [wiener.gain(math.sqrt(a), math.sqrt(1 - a))[centre(wiener.shape)] for a in levels]
    return torch.stack(gains).float().reshape(-1, *wiener.shape)


def components(spectrum: Spectrum, shape: Sequence[int]) -> Tensor:
    """The first five principal components, in the first channel."""
    whole = torch.zeros(5, math.prod(shape))
    vectors = spectrum.vectors[:, :5].T.float()
    whole[: len(vectors), spectrum.varying] = vectors
    return whole.reshape(5, *shape)[:, 0].contiguous()


def _alike(field: Field, x: Tensor, held: Tensor, levels: Sequence[float]) -> dict[str, Any]:
    """The centre's mean Jacobian row against its row of the Wiener filter, by level."""
    wiener = WienerDenoiser(x, path=PATH, progress=False)
    rows, gains, middle = (
        mean_rows(field, held, levels),
        wiener_rows(wiener, levels),
        centre(x[0].shape),
    )
    return {
        "cosine": cosine(rows, gains).tolist(),
        "radius": radius(rows, middle).tolist(),
        "radius of the Wiener filter": radius(gains, middle).tolist(),
        "rows": rows[:, 0].tolist(),
        "gains": gains[:, 0].tolist(),
        "components": components(wiener.spectrum, wiener.shape).tolist(),
    }


# Demonstrations


def digits(
    steps: int, equivariant_images: int, held_out: int, levels: Sequence[float], progress: bool
) -> dict[str, Any]:
    """A perceptron on the 8 x 8 digits of scikit-learn: all denoisers against it, held out.

    Scales are chosen on 50 further digits.
    """
    pixels = torch.tensor(load_digits().images, dtype=torch.float32) / 8 - 1
    order = KeyedNoise(0).uniform(pixels[:, 0, 0].double()).argsort()
    pixels = pixels[order, None]
    x, tuning, held = pixels[:1400], pixels[1400:1450], pixels[1450:][:held_out]
    field = _trained(MLP(shape=x.shape[1:], width=256, depth=2), x, steps, progress)
    options: dict[str, Any] = {"path": PATH, "progress": False}
    locality, sides = LocalityDenoiser(x, **options), (1, 3, 5, 7, 9, 11)
    few = x[:equivariant_images]
    denoisers: dict[str, tuple[Any, Sequence[Any]]] = {
        OURS: (locality, (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)),
        "optimal": (OptimalDenoiser(x, **options), (None,)),
        "Wiener": (locality.wiener, (None,)),
        "nearest": (NearestDenoiser(x, **options), (None,)),
        "local": (LocalScoreMachine(x, k=3, **options), sides),
        "equivariant": (
            EquivariantLocalScoreMachine(few, k=3, boundary="broken", **options),
            sides,
        ),
    }
    rows = []
    for a in DIGITS:
        t, got = time_at(a), {}
        tuned, states = noisy(tuning, a, NOISE.at(0)), noisy(held, a, NOISE.at(1))
        with torch.no_grad():
            target, aim = field(states, t), field(tuned, t)
        for name, (denoiser, scales) in denoisers.items():
            best = scales[0]
            if len(scales) > 1:
                tried = [at_scale(denoiser, scale)(tuned, t) for scale in scales]
                best = best_scale(tried, aim, scales)
            got[name] = at_scale(denoiser, best)(states, t)
        rows.append(scores({**got, "perceptron": target}, target, held))
    return {"scores": rows, **_alike(field, x, held, levels)}


def photographs(
    steps: int, held_out: int, levels: Sequence[float], progress: bool
) -> dict[str, Any]:
    """A perceptron and a small U-Net on 1,200 patches of the photographs of scikit-learn."""
    x, held = _patches(1200, left=True), _patches(held_out, left=False)
    unet = UNet(size=SIDE, channels=1, width=16, multipliers=(1, 2), blocks=1, heads=2)
    perceptron = MLP(shape=x.shape[1:], width=256, depth=2)
    ours = _alike(_trained(perceptron, x, steps, progress), x, held, levels)
    theirs = _alike(_trained(unet, x, max(1, steps // 3), progress), x, held, levels)
    return {**ours, **{f"{name} of the U-Net": theirs[name] for name in ("cosine", "radius")}}


def _trained(network: nn.Module, x: Tensor, steps: int, progress: bool) -> Field:
    training = Training(
        steps=steps, batch_size=128, lr=1e-3, ema=0.99, schedule="linear", decay=0.5
    )
    train(Stage(noise_prediction(network), {"x": x}, training), progress=progress)
    return clean_field(network.eval())


def _patches(count: int, *, left: bool) -> Tensor:
    """Grey patches of the two photographs at half resolution: of the left 4 / 5, or the rest."""
    found = []
    for number, image in enumerate(load_sample_images().images):
        grey = torch.tensor(image).float().mean(2)[None, None] / 127.5 - 1
        grey = functional.avg_pool2d(grey, 2)[0, 0]
        cut = grey.shape[1] * 4 // 5
        part = grey[:, :cut] if left else grey[:, cut:]
        windows = part.unfold(0, SIDE, 1).unfold(1, SIDE, 1).flatten(0, 1)
        order = KeyedNoise(number).uniform(torch.empty(len(windows), dtype=torch.float64)).argsort()
        found.append(windows[order[: count // 2]])
    return torch.cat(found)[:, None].contiguous()


def faces(levels: Sequence[float]) -> Row | None:
    """Of 100 aligned faces of 25 x 25, from scikit-image if it is installed: the Wiener filter."""
    if importlib.util.find_spec("skimage") is None:
        return None
    from skimage.data import lfw_subset

    x = torch.tensor(lfw_subset()[:100], dtype=torch.float32)[:, None] * 2 - 1
    wiener = WienerDenoiser(x, path=PATH, progress=False)
    shown = components(wiener.spectrum, wiener.shape)
    return "Wiener,\nfaces", wiener_rows(wiener, levels)[:, 0], shown


# The figure


def figure(
    path: Path,
    levels: Sequence[float],
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    rows: Sequence[Row],
) -> None:
    """R^2 by level, above rows of maps: sensitivity on the left, principal components right.

    Args:
        path: of the picture, a PNG; replaced atomically.
        levels: shares of signal, alpha^2.
        curves: by network and by denoiser, a value a level.
        rows: of maps; each picture has a colour scale of its own, 0 in white.
    """
    inches, height = 9.0, 0.86 * len(rows)
    picture = plt.figure(figsize=(inches, 3.0 + height))
    grid = picture.add_gridspec(2, 1, height_ratios=[3.0, height])
    top, bottom = picture.add_subfigure(grid[0]), picture.add_subfigure(grid[1])
    axes = top.subplots(
        1, 2, sharey=True, gridspec_kw={"left": 0.08, "right": 0.99, "bottom": 0.17, "top": 0.9}
    )
    for axis, (network, by_name) in zip(axes, curves.items(), strict=True):
        for name, values in by_name.items():
            width = 2.2 if name == OURS else 1.2
            left = [1 - value for value in values]
            axis.plot(range(len(levels)), left, marker="o", ms=4, lw=width, label=name)
        axis.set_title(f"agreement with the {network}", fontsize=9)
        axis.set_xticks(range(len(levels)), [f"{a:g}" for a in levels])
        axis.set_xlabel("share of signal, alpha²", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        # most are near 1: what they leave is drawn, on a logarithmic scale that falls
        axis.set_yscale("log")
    most = 1 - max(max(values) for by_name in curves.values() for values in by_name.values())
    axes[0].set_ylim(1.5, 0.7 * max(most, 1e-4))
    marks = [
        mark for mark in (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995) if 1 - mark > 0.7 * most
    ]
    axes[0].yaxis.set_major_locator(FixedLocator([1 - mark for mark in marks]))
    axes[0].yaxis.set_major_formatter(FixedFormatter([f"{mark:g}" for mark in marks]))
    axes[0].yaxis.set_minor_locator(NullLocator())
    axes[0].set_ylabel("R²")
    axes[0].legend(frameon=False, fontsize=8)

    tiles = bottom.subplots(
        len(rows),
        len(levels) + 5,
        squeeze=False,
        gridspec_kw={"left": 0.13, "right": 0.99, "top": 0.93, "bottom": 0.01, "hspace": 0.08},
    )
    for line, (title, maps, parts) in zip(tiles, rows, strict=True):
        line[0].text(
            -0.15, 0.5, title, transform=line[0].transAxes, ha="right", va="center", fontsize=8
        )
        shown = [*maps, *([None] * 5 if parts is None else parts)]
        for axis, image in zip(line, shown, strict=True):
            axis.set_axis_off()
            if image is not None:
                bound = float(image.abs().max()) or 1.0
                axis.imshow(image.numpy(), cmap="RdBu_r", vmin=-bound, vmax=bound)
    for axis, a in zip(tiles[0], levels, strict=False):
        axis.set_title(f"{a:g}", fontsize=8)
    for number, axis in enumerate(tiles[0][len(levels) :]):
        axis.set_title(f"component {number + 1}", fontsize=7)
    with atomic(path) as temporary:
        picture.savefig(temporary, dpi=150, format="png")
    plt.close(picture)
