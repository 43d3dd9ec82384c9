"""The panels of the figure of the memorisation study, from what was measured and from theory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.trust.rectified_flow_memorization import (
    GaussianPairField,
    NoisyLinear,
    couple,
    gradient_variance,
    optimal_field_on_rotated,
    rotated_field_on_rotated,
    rotation,
)

SAMPLES = 20_000
"""Of every dot of the theory."""
ANGLES = tuple(range(15, 151, 15))
"""Its degrees; beyond 150 Monte-Carlo means hardly converge."""


def distances(
    axes: Any,
    title: str,
    noises: Sequence[float],
    reports: Sequence[Sequence[Mapping[str, float]]],
) -> None:
    """Distances of the end points to both partners, against the noise; a dot a seed."""
    places = np.arange(len(noises))
    for name, label, colour in (
        ("to_paired", "training partner", "C3"),
        ("to_ot", "optimal partner", "C0"),
    ):
        values = np.array([[one[name] for one in seeds] for seeds in reports])
        axes.plot(places, values.mean(1), marker="o", color=colour, label=f"to the {label}")
        for column in values.T:
            axes.plot(places, column, ".", color=colour, alpha=0.5)
    apart = np.mean([one["paired_to_ot"] for one in reports[0]])
    axes.axhline(apart, color="0.6", linestyle="--", label="between the two")
    axes.set_xticks(places, [f"{noise:g}" for noise in noises])
    axes.set_ylim(bottom=0)
    _finish(axes, title, "noise of the interpolant", "mean distance of the end")


def trajectories(axes: Any, title: str, way: Tensor, target: Tensor, optimal: Tensor) -> None:
    """Rows of ``way`` (steps, rows, D) in their first two coordinates, with their partners."""
    for i in range(way.shape[1]):
        axes.plot(way[:, i, 0], way[:, i, 1], color=f"C{i}", linewidth=1.2)
        axes.plot(*way[0, i, :2], ".", color=f"C{i}")
        axes.plot(*target[i, :2], "x", color=f"C{i}", markersize=8)
        axes.plot(*optimal[i, :2], "o", color=f"C{i}", markersize=8, fillstyle="none")
    _finish(axes, title, "first component", "second component", legend=False)


def training(axes: Any, what: str, curves: Mapping[str, Mapping[int, float]]) -> None:
    """Something along trainings, by name and step: with and without noise, of two sets."""
    for k, (name, curve) in enumerate(curves.items()):
        colour, style = ("C3", "C0")[k % 2], ("-", "--")[k // 2]
        axes.plot(
            list(curve), list(curve.values()), marker=".", color=colour, linestyle=style, label=name
        )
    axes.set_yscale("log")
    _finish(axes, "along the training", "training step", what)


def pictures(axes: Any, rows: Mapping[str, Tensor]) -> None:
    """A strip a row of images (n, channels, height, width) in [-1, 1]; the first channel."""
    strips = [torch.cat(list(images[:, 0].clamp(-1, 1)), 1) for images in rows.values()]
    axes.imshow(torch.cat(strips).numpy(), cmap="gray", vmin=-1, vmax=1)
    height = len(strips[0])
    axes.set_yticks([height * (k + 0.5) for k in range(len(rows))], list(rows))
    axes.set_xticks([])
    axes.tick_params(length=0)


def theory(axes: Any) -> None:
    """Variance in theta against the angle of the pairing, closed forms with Monte-Carlo dots."""
    x = KeyedNoise(0).normal(torch.empty(SAMPLES, 2, dtype=torch.float64))
    mean, eye = torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    noise, angles = 0.05, np.radians(np.linspace(1, 150, 150))
    curves = {
        "optimal field, rotated pairs": [optimal_field_on_rotated(a).variance for a in angles],
        f"rotated field, its own pairs, noise {noise:g}": [
            rotated_field_on_rotated(a, noise).variance for a in angles
        ],
    }
    for k, (name, values) in enumerate(curves.items()):
        axes.plot(np.degrees(angles), values, color=f"C{k}", label=name)
    for degrees in ANGLES:
        phi = math.radians(degrees)
        turned = rotation(phi, 2)
        pairs = couple(x, kind="rotated", phi=phi)
        for k, (matrix, level) in enumerate(((eye, 0.0), (turned, noise))):
            found = gradient_variance(
                GaussianPairField(mean, matrix), *pairs, path=NoisyLinear(level), samples=SAMPLES
            )
            axes.plot(degrees, found.per_parameter["theta"], "o", color=f"C{k}", markersize=4)
    axes.axhline(16, color="0.6", linestyle="--", label="optimal field, independent pairs")
    axes.set_yscale("log")
    title = f"closed forms, with dots from {SAMPLES:,} samples"
    _finish(axes, title, "angle of the pairing, degrees", "variance of the gradient in theta")


def crossing(axes: Any) -> None:
    """Pairs turned by 180 degrees, whose lines all meet: where Euler's method takes z."""
    zero, ahead = (torch.tensor(x, dtype=torch.float64) for x in ([0.0, 0.0], [1.0, 0.0]))
    counts = np.unique(np.geomspace(3, 1025, 16).round().astype(int) | 1)
    for k, noise in enumerate((0.0, 0.02, 0.05, 0.5)):
        field = GaussianPairField(zero, -torch.eye(2, dtype=torch.float64), noise)
        for shift, style in ((0, "o-"), (1, "x:")):
            if not noise and shift:
                continue  # a step ends where the field is 0 / 0
            ends = []
            for n in (counts - shift).tolist():
                t = 1 - torch.arange(n, dtype=torch.float64) / n
                # a linear field: a step multiplies by what it does to one row
                velocity = field(ahead.expand(n, 2), t)[:, 0]
                ends.append(float((1 - velocity / n).prod()))
            label = f"noise {noise:g}, {'even' if shift else 'odd'} steps"
            axes.plot(counts - shift, ends, style, color=f"C{k}", markersize=4, label=label)
    axes.set_xscale("log")
    axes.set_ylim(-2.3, 1.2)
    title = "pairs turned by 180 degrees: all lines meet at t = 1/2"
    what = "end over start: -1 trained, 1 optimal"
    _finish(axes, title, "steps of Euler's method", what, legend=False)
    axes.legend(frameon=False, fontsize=7, ncols=2, loc="lower center")


def _finish(axes: Any, title: str, x: str, y: str, *, legend: bool = True) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if legend:
        axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
