"""The picture of masks: the restored image, the doubtful area hatched, and the true error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fluvial.training.files import atomic
from fluvial.trust.conformal_masks.calibration import Map, worst
from fluvial.trust.conformal_masks.kernels import as_pixels

DOUBT = "#d1495b"
"""Colour of what is not to be trusted."""
INCHES = 2.6
"""Height of an image."""
WIDEST = 13.0
"""Of the picture, in inches."""


@dataclass(frozen=True)
class Panel:
    """A row of the picture.

    Args:
        restored: (channels, height, width) in [0, 1].
        trusted: (height, width) of booleans.
        degraded: what it was restored from, of any size, if it is to be shown.
        true: the true image, if it is known and to be shown.
        error: (height, width), if it is known.
        title: at the left.
    """

    restored: Map
    trusted: Map
    degraded: Map | None = None
    true: Map | None = None
    error: Map | None = None
    title: str = ""


def draw_masks(
    path: str | Path,
    panels: Sequence[Panel],
    level: float,
    *,
    bound: float | None = None,
    title: str = "",
) -> None:
    """A PNG with a row for each image: degraded, restored, restored with the doubtful area hatched,
    true image, true error with the outline of the mask.

    Args:
        path: of the picture; replaced atomically.
        panels: rows; what none of them has gets no column.
        level: of the masks, for the titles and the scale of the errors.
        bound: where the scale of the errors ends; by default the largest there is.
        title: above all.

    Raises:
        ValueError: no panels, or maps that do not fit their image.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not panels:
        raise ValueError("panels is empty: there is nothing to draw")
    names = ["degraded", "restored", "mask"]
    names += ["true"] if any(panel.true is not None for panel in panels) else []
    names += ["error"] if any(panel.error is not None for panel in panels) else []
    if all(panel.degraded is None for panel in panels):
        names.remove("degraded")
    height, width = as_pixels("restored", panels[0].restored).shape[-2:]
    side = min(INCHES, (WIDEST - 1.2) / len(names) * height / width)
    figure = Figure(
        figsize=(side * width / height * len(names) + 1.2, side * len(panels) + 0.7),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), len(names), squeeze=False)
    errors = [np.asarray(panel.error) for panel in panels if panel.error is not None]
    top = bound or max([float(error.max()) for error in errors] + [level])
    shown = None
    for row, panel in zip(axes, panels, strict=True):
        image = as_pixels("restored", panel.restored)
        trusted = _array(panel.trusted).astype(bool)
        if trusted.shape != image.shape[-2:]:
            raise ValueError(f"trusted must be a map of {image.shape[-2:]}, got {trusted.shape}")
        for axis, name in zip(row, names, strict=True):
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
            under = {"degraded": panel.degraded, "true": panel.true}.get(name, panel.restored)
            if name == "error" and panel.error is not None:
                shown = axis.imshow(_array(panel.error), cmap="magma", vmin=0, vmax=top)
                _outline(axis, trusted, "white")
                axis.set_xlabel(f"largest inside {worst(_array(panel.error), trusted):.3f}")
            elif name != "error" and under is not None:
                _show(axis, as_pixels(name, under))
            if name == "mask":
                hatch(axis, trusted)
                axis.set_xlabel(f"{100 * trusted.mean():.0f} % trusted")
        row[0].set_ylabel(panel.title)
    heads = {
        "degraded": "given",
        "restored": "restored",
        "mask": f"doubtful at level {level:g}",
        "true": "true",
        "error": "true error",
    }
    for axis, name in zip(axes[0], names, strict=True):
        axis.set_title(heads[name], fontsize=10)
    if shown is not None:
        bar = figure.colorbar(shown, ax=axes[:, -1], fraction=0.06, pad=0.03)
        bar.ax.axhline(level, color="white", lw=1.5)
        bar.set_ticks([0.0, level, top], labels=["0", f"level {level:g}", f"{top:.2g}"])
    if title:
        figure.suptitle(title, fontsize=11)
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")


def _array(values: Map) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _show(axis: Any, image: np.ndarray) -> None:
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    axis.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")


def hatch(axis: Any, trusted: np.ndarray) -> None:
    """Draw the area that is not trusted, (height, width), on the axes of an image.

    It is paler, under coloured lines, and has an outline.
    """
    import matplotlib

    if trusted.all():
        return
    doubt = np.pad((~trusted).astype(float), 1, mode="edge")
    y, x = np.mgrid[-1 : trusted.shape[0] + 1, -1 : trusted.shape[1] + 1]
    with matplotlib.rc_context({"hatch.linewidth": 0.7}):
        drawn = axis.contourf(
            x, y, doubt, levels=[0.5, 2.0], colors=[(1.0, 1.0, 1.0, 0.4)], hatches=["///"]
        )
    drawn.set_edgecolor(DOUBT)
    drawn.set_linewidth(0.0)
    _outline(axis, trusted, DOUBT)
    axis.set_xlim(-0.5, trusted.shape[1] - 0.5)
    axis.set_ylim(trusted.shape[0] - 0.5, -0.5)


def _outline(axis: Any, trusted: np.ndarray, colour: str) -> None:
    if trusted.any() and not trusted.all():
        axis.contour(trusted.astype(float), levels=[0.5], colors=[colour], linewidths=1.1)
