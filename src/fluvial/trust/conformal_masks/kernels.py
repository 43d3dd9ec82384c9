"""Images as (..., channels, height, width) numbers in [0, 1], and the kernels that smooth maps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from scipy.ndimage import gaussian_filter, uniform_filter
from torch import Tensor

from fluvial.trust.conformal_masks.calibration import check_map

Border: TypeAlias = Literal["reflect", "nearest", "mirror", "wrap"]
"""How a map goes on beyond its border, as in `scipy.ndimage`. All keep a kernel's weights at 1."""

WHITE = np.array([0.95047, 1.0, 1.08883])
"""D65, the white of sRGB."""
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
"""Linear sRGB to CIE XYZ (IEC 61966-2-1)."""


@dataclass(frozen=True)
class Box:
    """Means over squares of ``size`` x ``size`` pixels; size 1 changes nothing.

    Args:
        size: of a side.
        border: beyond the border.
    """

    size: int = 5
    border: Border = "reflect"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Over the last two dimensions."""
        if self.size == 1:
            return values
        smooth = uniform_filter(values, self.size, mode=self.border, axes=(-2, -1))
        return _within(smooth, values)

    def __str__(self) -> str:
        return f"box {self.size}"


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian blur, cut off at four standard deviations.

    Args:
        sigma: standard deviation in pixels.
        border: beyond the border.
    """

    sigma: float
    border: Border = "reflect"

    def __post_init__(self) -> None:
        if not 0 < self.sigma < math.inf:
            raise ValueError(f"sigma must be positive, got {self.sigma}")

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Over the last two dimensions."""
        smooth = gaussian_filter(values, self.sigma, mode=self.border, axes=(-2, -1))
        return _within(smooth, values)

    def __str__(self) -> str:
        return f"Gaussian {self.sigma:g}"


Kernel: TypeAlias = Box | Gaussian


def _within(smooth: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Averages lie between the smallest and the largest value; rounding may push them out."""
    return np.clip(smooth, values.min(), values.max())


def as_pixels(name: str, image: Any) -> np.ndarray:
    """An image, or many, as float64 (..., channels, height, width); (height, width) is grey.

    Raises:
        TypeError: no array or tensor of real numbers.
        ValueError: not finite, outside [0, 1], or of another shape.
    """
    check_map(name, image)
    array = image.detach().cpu().double().numpy() if isinstance(image, Tensor) else image
    array = np.asarray(array, np.float64)
    if array.ndim == 2:
        array = array[None]
    if array.ndim < 3 or array.shape[-3] not in (1, 3):
        raise ValueError(
            f"{name} must be (height, width) or (..., 1 or 3, height, width), got "
            f"{tuple(array.shape)}"
        )
    low, high = float(array.min()), float(array.max())
    if low < 0 or high > 1:
        raise ValueError(f"{name} must lie in [0, 1], it reaches from {low:g} to {high:g}")
    return array


def lab(image: np.ndarray) -> np.ndarray:
    """(..., 3, height, width) of sRGB as CIE Lab, each channel brought to [0, 1].

    L / 100, a / 254 + 0.5 and b / 254 + 0.5, under D65.
    """
    if image.shape[-3] != 3:
        raise ValueError(f"Lab needs three channels, got {image.shape[-3]}")
    linear = np.where(image <= 0.04045, image / 12.92, ((image + 0.055) / 1.055) ** 2.4)
    xyz = np.einsum("ij,...jhw->...ihw", TO_XYZ / WHITE[:, None], linear)
    cut = 6 / 29
    f = np.where(xyz > cut**3, np.cbrt(xyz), xyz / (3 * cut**2) + 4 / 29)
    x, y, z = (f[..., k, :, :] for k in range(3))
    channels = (1.16 * y - 0.16, 500 / 254 * (x - y) + 0.5, 200 / 254 * (y - z) + 0.5)
    return np.clip(np.stack(channels, axis=-3), 0.0, 1.0)  # against rounding alone
