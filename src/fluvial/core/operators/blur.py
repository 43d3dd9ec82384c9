"""Circulant blurs of signals and images, and their kernels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fluvial.core.operators.base import Operator, Shape, check_cutoff, modes


class Blur(Operator):
    """Convolution with a kernel around its middle, periodic in the last dimensions. By FFT.

    The pseudo-inverse divides by the transfer function. It is truncated, or, with ``cutoff`` 0,
    exact: what a blur damps to 1e-8, say, is then raised 1e8 times, and with it rounding.

    Args:
        kernel: (1 or batch, *sizes), of as many dimensions as are blurred, 1 or 2 or more. Other
            dimensions of the event, such as channels, are blurred alike.
        in_shape: of the event.
        cutoff: relative to the largest value of the transfer function, in [0, 1).

    Raises:
        ValueError: the kernel is empty, larger than the event, not finite or 0 in a row, or
            ``cutoff`` is outside [0, 1).
    """

    in_shape: Shape
    out_shape: Shape
    widens = True

    def __init__(self, kernel: Tensor, in_shape: Shape, cutoff: float = 1e-3) -> None:
        dims = kernel.ndim - 1
        self.in_shape = self.out_shape = tuple(in_shape)
        self.sides = self.in_shape[len(self.in_shape) - dims :]
        if kernel.numel() == 0 or not 0 < dims <= len(self.in_shape):
            raise ValueError(
                f"kernel must be (1 or batch, *sizes) for an event of {self.in_shape}, got "
                f"{tuple(kernel.shape)}"
            )
        if any(k > n for k, n in zip(kernel.shape[1:], self.sides, strict=True)):
            raise ValueError(f"a kernel of {tuple(kernel.shape[1:])} is larger than {self.sides}")
        if not bool(kernel.isfinite().all()) or not bool((kernel != 0).flatten(1).any(1).all()):
            raise ValueError("kernel must be finite and not 0 in a row")
        self.rows, self.cutoff = len(kernel), check_cutoff(cutoff)
        self.pseudo_inverse = "truncated" if cutoff else "exact"
        self.dims = tuple(range(-dims, 0))
        padding = [
            p for k, n in zip(kernel.shape[1:], self.sides, strict=True) for p in (n - k, 0)
        ]  # of the last dimension first, once it is reversed
        padded = F.pad(kernel.double(), padding[::-1])
        padded = padded.roll([-(k // 2) for k in kernel.shape[1:]], self.dims)
        gains = torch.fft.fftn(padded, dim=self.dims).abs().flatten(1)
        self._spectrum = modes(gains, math.prod(self.in_shape))
        lead = (1,) * (len(self.in_shape) - dims)
        transfer = torch.fft.rfftn(padded, dim=self.dims)
        self.transfer = transfer.reshape(len(kernel), *lead, *transfer.shape[1:])
        self.conjugate = self.transfer.conj().resolve_conj()
        floor = cutoff or gains.shape[1] ** 0.5 * torch.finfo(torch.float64).eps
        least = (floor * gains.amax(1)).reshape(-1, *[1] * len(self.in_shape))
        kept = self.transfer.abs() > least
        self.inverse = torch.where(kept, 1 / torch.where(kept, self.transfer, 1.0), 0.0)
        self.kept = kept.double()

    @property
    def spectrum(self) -> Tensor:
        return self._spectrum

    def _filter(self, name: str, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfftn(x, dim=self.dims) * self._like(name, x)
        return torch.fft.irfftn(spectrum, self.sides, dim=self.dims)

    def _forward(self, x: Tensor) -> Tensor:
        return self._filter("transfer", x)

    def _adjoint(self, y: Tensor) -> Tensor:
        return self._filter("conjugate", y)

    def _dagger(self, y: Tensor) -> Tensor:
        return self._filter("inverse", y)

    def project(self, x: Tensor) -> Tensor:
        return self._apply(lambda x: self._filter("kept", x), "x", x, self.in_shape, self.in_shape)


def gaussian_kernel(std: Tensor | float, dims: int = 2, angle: Tensor | float = 0.0) -> Tensor:
    """exp(-z^T C^-1 z / 2), normalised, cut off at 4 standard deviations of the widest.

    Args:
        std: one for all axes, or (1 or batch, dims), of an image that of its rows first.
        dims: of the kernel, where ``std`` is one number.
        angle: in radians, by which a 2-D kernel is turned, as in `motion_kernel`; one or (batch,).

    Returns:
        (1 or batch, *sizes), float64, sizes odd.

    Raises:
        ValueError: ``std`` is not positive and finite, or a kernel that is not 2-D is turned.
    """
    std = torch.as_tensor(std, dtype=torch.float64)
    std = std.expand(1, dims) if std.ndim == 0 else std
    angle = torch.as_tensor(angle, dtype=torch.float64, device=std.device).reshape(-1)
    if std.ndim != 2 or not bool(((std > 0) & std.isfinite()).all()):
        raise ValueError(f"std must be positive, one or (1 or batch, dims), got {std}")
    if std.shape[1] != 2 and bool((angle != 0).any()):
        raise ValueError(f"only a kernel of 2 dimensions can be turned, got {std.shape[1]}")
    radius = math.ceil(4 * float(std.amax()))
    axis = torch.arange(-radius, radius + 1, dtype=torch.float64, device=std.device)
    places = torch.stack(torch.meshgrid([axis] * std.shape[1], indexing="ij"))
    if std.shape[1] == 2:
        cos, sin = (a.reshape(-1, 1, 1) for a in (angle.cos(), angle.sin()))
        row, column = places
        places = torch.stack([cos * row - sin * column, sin * row + cos * column], 1)
    square = (places / std.reshape(*std.shape, *[1] * std.shape[1])).square().sum(1)
    return _normalised((-square / 2).exp())


def motion_kernel(length: Tensor | int, angle: Tensor | float = 0.0) -> Tensor:
    """The mean of ``length`` points in a line, one pixel apart, each shared out bilinearly.

    Args:
        length: in pixels, at least 1; one or (batch,).
        angle: in radians, from the axis of the columns (to the right) towards that of the rows
            (down); one or (batch,).

    Returns:
        (1 or batch, size, size), float64, size odd.

    Raises:
        ValueError: ``length`` is below 1.
    """
    length = torch.as_tensor(length).reshape(-1)
    angle = torch.as_tensor(angle, dtype=torch.float64, device=length.device).reshape(-1)
    if not bool((length >= 1).all()):
        raise ValueError(f"length must be at least 1, got {length.tolist()}")
    most = int(length.amax())
    radius = most // 2 + 1
    points = torch.arange(most, dtype=torch.float64, device=length.device)
    used = points < length[:, None]
    along = points - (length[:, None].double() - 1) / 2
    axis = torch.arange(-radius, radius + 1, dtype=torch.float64, device=length.device)

    def hats(places: Tensor) -> Tensor:  # (batch, points) to (batch, points, size)
        return (1 - (places.unsqueeze(-1) - axis).abs()).clamp(min=0)

    rows, columns = (hats(along * part[:, None]) for part in (angle.sin(), angle.cos()))
    return _normalised((used.unsqueeze(-1) * rows).mT @ columns)


def _normalised(kernel: Tensor) -> Tensor:
    return kernel / kernel.flatten(1).sum(1).reshape(-1, *[1] * (kernel.ndim - 1))
