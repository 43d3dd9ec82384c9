"""Fidelity errors: how far a restoration is from the true image, at each pixel, within a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np

from fluvial.trust.conformal_masks.calibration import Map, check_map
from fluvial.trust.conformal_masks.kernels import Box, Kernel, as_pixels, lab

Kind: TypeAlias = Literal["pointwise", "signed", "absolute"]
Colour: TypeAlias = Literal["lab", "rgb", "grey"]


class ErrorMap(Protocol):
    """(true image, restored image), both (channels, height, width) in [0, 1], to (height, width).

    ``bound`` is what it is at most, for every conceivable pair of images; ``pointwise`` says
    whether it is the error of the pixel alone, the sum of the absolute differences of channels.
    """

    @property
    def bound(self) -> float: ...
    @property
    def pointwise(self) -> bool: ...
    def __call__(self, true: Map, restored: Map) -> np.ndarray: ...


@dataclass(frozen=True)
class Difference:
    """The L1 distance of colours, of single pixels or of neighbourhoods.

    With K a kernel of weights that sum to 1, and sums over channels,

    ========= ==================== ===========================================
    kind      error                bounds what
    ========= ==================== ===========================================
    pointwise |Y - mu|             every pixel, and so the PSNR inside the mask
    signed    |Y * K - mu * K|     local averages: fine texture may differ
    absolute  |Y - mu| * K         the average of pixel errors around a pixel
    ========= ==================== ===========================================

    Args:
        kind: see the table.
        kernel: K, of the last two.
        colour: "lab" is CIE Lab with each channel in [0, 1], of three channels; "rgb" the three
            channels as they are; "grey" their luma, or the one channel there is.

    Raises:
        ValueError: an unknown kind or colour.
    """

    kind: Kind = "absolute"
    kernel: Kernel = Box(5)  # noqa: RUF009 (frozen)
    colour: Colour = "lab"

    def __post_init__(self) -> None:
        for name, wanted in (("kind", get_args(Kind)), ("colour", get_args(Colour))):
            if getattr(self, name) not in wanted:
                raise ValueError(
                    f"{name} must be one of {', '.join(wanted)}, got {getattr(self, name)!r}"
                )

    @property
    def bound(self) -> float:
        """1 for every channel."""
        return 1.0 if self.colour == "grey" else 3.0

    @property
    def pointwise(self) -> bool:
        """Whether `Calibration.psnr_bound` follows, for the PSNR in the channels of ``colour``."""
        return self.kind == "pointwise"

    def __call__(self, true: Map, restored: Map) -> np.ndarray:
        """(..., height, width).

        Raises:
            ValueError: two shapes, values outside [0, 1], channels that the colours do not have.
        """
        y, mu = as_pixels("true", true), as_pixels("restored", restored)
        if y.shape != mu.shape:
            raise ValueError(
                f"true and restored must have one shape, got {tuple(true.shape)} and "
                f"{tuple(restored.shape)}"
            )
        y, mu = self._coloured(y), self._coloured(mu)
        if self.kind == "signed":
            error = np.abs(self.kernel(y - mu)).sum(-3)
        else:
            error = np.abs(y - mu).sum(-3)
            error = self.kernel(error) if self.kind == "absolute" else error
        return np.minimum(error, self.bound)  # against rounding alone

    def _coloured(self, image: np.ndarray) -> np.ndarray:
        channels = image.shape[-3]
        if self.colour == "grey":
            # weights of ITU-R BT.601
            weights = np.array([[0.299], [0.587], [0.114]])[:, :, None]
            return image if channels == 1 else (image * weights).sum(-3, keepdims=True)
        if channels != 3:
            raise ValueError(f"colour {self.colour!r} needs three channels, got {channels}")
        return lab(image) if self.colour == "lab" else image

    def __str__(self) -> str:
        kernel = "" if self.kind == "pointwise" else f", {self.kernel}"
        return f"{self.kind} {self.colour} error{kernel}"


@dataclass(frozen=True)
class Custom:
    """A user's own map: where two images differ in meaning, for instance, marked by people.

    Args:
        function: (true, restored) to a map, as `ErrorMap`.
        bound: what the map is at most; the paper's semantic error has 3.
        kernel: smooths the map; published a Gaussian of 64 pixels.
        clip: cut off what lies above ``bound`` in place of refusing it.
        name: in words.

    Raises:
        ValueError: ``bound`` is not positive; in a call, a map that is not finite, is negative or
            exceeds the bound, or a kernel for a map that is not (height, width).
    """

    function: Callable[[Any, Any], Map]
    bound: float
    kernel: Kernel | None = None
    clip: bool = False
    name: str = "custom error"
    pointwise: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.bound < math.inf:
            raise ValueError(f"bound must be positive and finite, got {self.bound}")

    def __call__(self, true: Map, restored: Map) -> np.ndarray:
        found: Any = self.function(true, restored)
        check_map("the map of function", found)
        error = np.asarray(found.detach().cpu() if hasattr(found, "detach") else found, np.float64)
        if error.min() < 0 or (error.max() > self.bound and not self.clip):
            raise ValueError(
                f"the map of function must lie in [0, {self.bound:g}], it reaches from "
                f"{error.min():g} to {error.max():g}; clip=True cuts it off"
            )
        error = np.minimum(error, self.bound)
        if self.kernel is None:
            return error
        if error.ndim < 2:
            raise ValueError(f"a kernel needs a map (height, width), got {tuple(error.shape)}")
        return self.kernel(error)

    def __str__(self) -> str:
        return self.name if self.kernel is None else f"{self.name}, {self.kernel}"


def masked_psnr(true: Map, restored: Map, trusted: Map) -> float:
    """PSNR in dB of the trusted pixels, peak 1, over all channels; NaN if the mask is empty.

    Infinite where nothing differs.

    Raises:
        ValueError: shapes that differ, values outside [0, 1].
    """
    y, mu = as_pixels("true", true), as_pixels("restored", restored)
    mask = np.asarray(trusted.detach().cpu() if hasattr(trusted, "detach") else trusted, bool)
    if y.shape != mu.shape or y.shape[-2:] != mask.shape:
        raise ValueError(
            f"true, restored and trusted must have one height and width, got {tuple(true.shape)}, "
            f"{tuple(restored.shape)} and {tuple(trusted.shape)}"
        )
    if not mask.any():
        return math.nan
    square = float(((y - mu) ** 2)[..., mask].mean())
    return math.inf if square == 0 else -10 * math.log10(square)
