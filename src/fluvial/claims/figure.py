"""Pictures of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a run has no screen
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from torch import Tensor

from fluvial.data import to_uint8
from fluvial.training.files import atomic


def image_grid(path: Path, images: Tensor, columns: int) -> None:
    """Images (n, channels, height, width) in [-1, 1], row by row, each pixel twice as large.

    n is a multiple of ``columns``. Of more than three channels (latents) the first is drawn.
    """
    strip = _tiles(images, columns)
    picture = Image.fromarray(strip.squeeze(-1) if strip.shape[-1] == 1 else strip)
    size = (2 * picture.width, 2 * picture.height)
    with atomic(path) as temporary:
        picture.resize(size, Image.Resampling.NEAREST).save(temporary, format="png")


def _tiles(images: Tensor, columns: int) -> np.ndarray:
    """(rows * height, columns * width, channels) uint8."""
    drawn = images if images.shape[1] in (1, 3) else images[:, :1]
    pixels = to_uint8(drawn.clamp(-1, 1)).numpy()
    _, channels, height, width = pixels.shape
    grid = pixels.reshape(-1, columns, channels, height, width).transpose(0, 3, 1, 4, 2)
    return grid.reshape(-1, columns * width, channels)


def samples_and_curves(
    path: Path,
    rows: Sequence[tuple[str, Tensor]],
    curves: Mapping[str, Mapping[int, float]],
    floor: float,
) -> None:
    """Rows of images above a plot of distance against network evaluations, as a PNG.

    Args:
        path: of the picture; replaced atomically.
        rows: (title, images (n, channels, height, width) in [-1, 1]); all of one shape.
        curves: by name, distance by number of evaluations.
        floor: the distance between real images.
    """
    count, _, height, width = rows[0][1].shape
    inches = 9.0
    tile = inches * 0.86 / count
    top = len(rows) * tile * height / width * 1.12
    figure = plt.figure(figsize=(inches, top + 3.2))
    grid = figure.add_gridspec(2, 1, height_ratios=[top, 3.2])
    strips, plot = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    axes = strips.subplots(
        len(rows),
        1,
        gridspec_kw={"hspace": 0.08, "left": 0.14, "right": 0.995, "top": 0.99, "bottom": 0.01},
    )
    for axis, (title, images) in zip(np.atleast_1d(axes), rows, strict=True):
        strip = _tiles(images, count)
        axis.imshow(
            strip.squeeze(-1) if strip.shape[-1] == 1 else strip, cmap="gray", vmin=0, vmax=255
        )
        axis.set_axis_off()
        axis.text(-0.01, 0.5, title, transform=axis.transAxes, ha="right", va="center", fontsize=8)

    axis = plot.subplots(gridspec_kw={"left": 0.14, "right": 0.97, "bottom": 0.2, "top": 0.96})
    for name, curve in curves.items():
        axis.plot(list(curve), list(curve.values()), marker="o", label=name)
    axis.axhline(floor, color="0.5", linestyle="--", label="real images")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({count for curve in curves.values() for count in curve})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.set_xlabel("network evaluations a sample")
    axis.set_ylabel("Fréchet distance")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
    plt.close(figure)
