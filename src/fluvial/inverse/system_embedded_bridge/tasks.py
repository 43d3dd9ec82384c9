"""Measurement systems by their names, for the command line and for files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from fluvial.core.noise import KeyedNoise
from fluvial.core.operators.base import Operator
from fluvial.core.operators.blur import Blur, gaussian_kernel
from fluvial.core.operators.dense import LARGEST, dense
from fluvial.core.operators.diagonal import Mask, box_mask
from fluvial.core.operators.downsample import AveragePool, Bicubic
from fluvial.core.operators.fourier import SubsampledFourier, columns_mask
from fluvial.core.operators.radon import Radon

Name: TypeAlias = Literal["inpainting", "pooling", "bicubic", "deblurring", "fourier", "radon"]


@dataclass(frozen=True)
class Task:
    """A measurement system of images, by a name and a number.

    ============ =============================================== ==========================
    name         what is measured                                ``amount``, by default
    ============ =============================================== ==========================
    inpainting   all but a box in the middle                     share of each side, 0.5
    pooling      means of square blocks                          side of a block, 2
    bicubic      a smaller image, by the bicubic filter          by how much smaller, 2
    deblurring   a Gaussian blur of the image, periodic          its deviation, 1.5 pixels
    fourier      columns of the half-spectrum: half of them the  share of the columns, 0.4
                 lowest, the others at random, always the same
    radon        sums along parallel rays                        angles, 16
    ============ =============================================== ==========================

    Args:
        name: of the system.
        amount: see above; None for the default.
        obs_noise: standard deviation of the measurement's noise; images are in [-1, 1].

    Raises:
        ValueError: an unknown name, or a number that is out of its range.
    """

    name: Name
    amount: float | None = None
    obs_noise: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in get_args(Name):
            raise ValueError(f"task must be one of {', '.join(get_args(Name))}, got {self.name!r}")
        if self.amount is None:
            object.__setattr__(self, "amount", DEFAULTS[self.name])
        amount = self._amount
        if self.name in ("inpainting", "fourier"):
            fine, wanted = 0 < amount < 1, "lie in (0, 1)"
        elif self.name == "deblurring":
            fine, wanted = 0 < amount < math.inf, "be positive"
        else:
            fine, wanted = amount >= 1 and amount == int(amount), "be a whole number of at least 1"
        if not fine:
            raise ValueError(f"amount of {self.name} must {wanted}, got {amount}")
        if not 0 <= self.obs_noise < math.inf:
            raise ValueError(f"obs_noise must be at least 0 and finite, got {self.obs_noise}")

    @property
    def _amount(self) -> float:
        assert self.amount is not None
        return float(self.amount)

    def as_json(self) -> dict[str, Any]:
        """The fields, as JSON holds them."""
        return asdict(self)

    @property
    def pictures(self) -> bool:
        """Are its measurements pictures?"""
        return self.name not in ("fourier", "radon")

    @property
    def smaller(self) -> int:
        """By how much smaller its measurements are, where they are pictures."""
        return int(self._amount) if self.name in ("pooling", "bicubic") else 1

    def operator(self, shape: Sequence[int]) -> Operator:
        """A, for images of (channels, height, width).

        Raises:
            ValueError: the number does not fit the size.
        """
        return MAKE[self.name](self._amount, tuple(map(int, shape)))


Shape: TypeAlias = tuple[int, ...]


def _inpainting(share: float, shape: Shape) -> Operator:
    size = tuple(max(1, round(share * n)) for n in shape[1:])
    start = torch.tensor([[(n - k) // 2 for n, k in zip(shape[1:], size, strict=True)]])
    return Mask(box_mask((1, *shape[1:]), size, start), shape)


def _pooling(side: float, shape: Shape) -> Operator:
    return AveragePool((int(side), int(side)), shape)


def _bicubic(factor: float, shape: Shape) -> Operator:
    return Bicubic(int(factor), shape)


def _deblurring(std: float, shape: Shape) -> Operator:
    kernel = gaussian_kernel(std)
    trim = [max(0, -(-(k - n) // 2)) for k, n in zip(kernel.shape[1:], shape[1:], strict=True)]
    high, wide = (slice(k, n - k) for k, n in zip(trim, kernel.shape[1:], strict=True))
    kernel = kernel[:, high, wide]
    return Blur(kernel / kernel.sum(), shape, cutoff=0.02)


def _fourier(share: float, shape: Shape) -> Operator:
    width = shape[-1] // 2 + 1
    count = max(1, round(share * width))
    low = -(-count // 2)
    order = KeyedNoise(0).uniform(torch.empty(width - low, dtype=torch.float64)).argsort() + low
    columns = torch.cat([torch.arange(low), order[: count - low]])[None]
    return SubsampledFourier(columns_mask(shape[1:], columns), shape)


def _radon(angles: float, shape: Shape) -> Operator:
    views = torch.arange(int(angles), dtype=torch.float64) * (math.pi / int(angles))
    rays = Radon(views, shape)
    if math.prod(shape) > LARGEST:
        return rays
    return dense(rays, shape, cutoff=0.02)


DEFAULTS: Mapping[str, float] = {
    "inpainting": 0.5,
    "pooling": 2,
    "bicubic": 2,
    "deblurring": 1.5,
    "fourier": 0.4,
    "radon": 16,
}
MAKE: Mapping[str, Callable[[float, Shape], Operator]] = {
    "inpainting": _inpainting,
    "pooling": _pooling,
    "bicubic": _bicubic,
    "deblurring": _deblurring,
    "fourier": _fourier,
    "radon": _radon,
}
