"""Scores: how doubtful each pixel of a restoration is, from several restorations of one image.

Any score gives valid masks. What it decides is how large they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np

from fluvial.trust.conformal_masks.calibration import Map
from fluvial.trust.conformal_masks.kernels import Box, Gaussian, Kernel, as_pixels

Kind: TypeAlias = Literal["pixel", "smoothed-variance", "variance-of-smoothed", "paper"]
PUBLISHED = Box(31)
"""The kernel of the paper, for crops of 2048 x 2048 pixels."""


class ScoreMap(Protocol):
    """(draws, degraded image) to a map, (height, width): large where the image is doubtful.

    ``draws`` are the restorations, (draws, channels, height, width) in [0, 1]; for the names in
    reports an object may have a ``__str__`` of its own.
    """

    def __call__(self, draws: np.ndarray, x: Any) -> Map: ...


@dataclass(frozen=True)
class Variance:
    """How much M restorations mu_1 ... mu_M of one image differ, at each pixel.

    With E the average over them, V = E[mu^2] - E[mu]^2 (of the population, divided by M) and K a
    kernel,

    ==================== ==================================
    kind                 score, averaged over channels
    ==================== ==================================
    pixel                V
    smoothed-variance    V * K
    variance-of-smoothed E[(mu * K)^2] - (E[mu * K])^2
    paper                E[mu^2] * K - (E[mu * K])^2
    ==================== ==================================

    The paper's form, as it is written there, exceeds the one above it by the average of
    (mu^2) * K - (mu * K)^2, so that texture raises it where all restorations agree. A kernel of one
    pixel makes the four the same.

    Args:
        kind: see the table.
        kernel: K; published 31 x 31 boxes in crops of 2048 x 2048, `PUBLISHED`.
        clip: quantile of the map, of each image for itself, above which it is cut off: published
            0.95. It makes equal scores.
        blur: standard deviation of a Gaussian blur after that, in pixels: published 64.

    Raises:
        ValueError: an unknown kind, or ``clip`` outside (0, 1].
    """

    kind: Kind = "smoothed-variance"
    kernel: Kernel = Box(5)  # noqa: RUF009 (frozen)
    clip: float | None = None
    blur: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.clip is not None and not 0 < self.clip <= 1:
            raise ValueError(f"clip must be a quantile in (0, 1], got {self.clip}")
        if self.blur is not None:
            Gaussian(self.blur)

    def __call__(self, draws: Map, x: Any = None) -> np.ndarray:
        """(height, width) of draws (M, channels, height, width), or (..., height, width) of many.

        Many images at a time are (M, ..., channels, height, width).

        Raises:
            ValueError: fewer than two draws, or no images.
        """
        if len(draws) < 2:
            raise ValueError(f"a variance needs two restorations or more, got {len(draws)}")
        mu = as_pixels("draws", draws)
        if mu.ndim < 4:
            raise ValueError(
                f"draws must be (draws, ..., channels, height, width), got {tuple(draws.shape)}"
            )
        match self.kind:
            case "pixel":
                score = mu.var(0)
            case "smoothed-variance":
                score = self.kernel(mu.var(0))
            case "variance-of-smoothed":
                score = self.kernel(mu).var(0)
            case _:
                # E[mu^2] * K - (E[mu] * K)^2 = V * K + (E[mu]^2) * K - (E[mu] * K)^2
                mean = mu.mean(0)
                texture = self.kernel(mean**2) - self.kernel(mean) ** 2
                score = self.kernel(mu.var(0)) + np.maximum(texture, 0.0)
        score = score.mean(-3)
        if self.clip is not None:
            top = np.quantile(score, self.clip, axis=(-2, -1), keepdims=True)
            score = np.minimum(score, top)
        return score if self.blur is None else Gaussian(self.blur)(score)

    def __str__(self) -> str:
        name = "variance of pixels" if self.kind == "pixel" else f"{self.kind}, {self.kernel}"
        name += "" if self.clip is None else f", clipped at {self.clip:g}"
        return name if self.blur is None else f"{name}, blurred by {self.blur:g}"
