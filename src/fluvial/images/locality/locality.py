"""The denoiser whose receptive fields are those of the Wiener filter.

Lukoianov, Yuan, Solomon and Sitzmann, "Locality in Image Diffusion Models Emerges from Data
Statistics", NeurIPS 2025, arXiv 2509.09672.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from fluvial.images.locality.classical import WienerDenoiser, check_temperature, split
from fluvial.images.locality.denoiser import Denoiser, by_time, level_of
from fluvial.images.locality.posterior import Windows, csr, plan, posterior_mean

SPARSE = 0.1
"""Share of a mask's entries up to which a sparse product is faster than a dense one."""
NEGLIGIBLE = 1e-6
"""Entries W_mm by which ``threshold="global"`` does not divide."""


class LocalityDenoiser(Denoiser):
    """The posterior mean of every coordinate from those that matter to it in the Wiener filter.

    With W the gain of the Wiener filter at this level of noise (see `WienerDenoiser`),

        M_mn = 1 if |W_mn| >= tau max_n' |W_mn'| or m = n, else 0,
        D_m  = sum_i p_i(m) x_i(m),
        p(m) = softmax_i(-sum_n M_mn (x_n - alpha x_i(n))^2 / (2 T sigma^2)):

    a softmax over the whole set for every coordinate m, pixel and channel. With little noise the
    fields are small, with much they follow the principal components. M of ones is the optimal
    denoiser, and M = I a denoiser by histograms of single coordinates. Coordinates that do not vary
    have fields of their own only.

    Queries of one level share its mask, and the latest masks are kept. A call in which every row
    has a level of its own makes a mask for each.

    Args:
        images: (N, *event), N >= 2.
        tau: in [0, 1]; or values by time, ``{t: tau}``: the one of the nearest level of noise is
            taken. Published: 0.005 for MNIST and Fashion-MNIST, 0.02 for CelebA-HQ and AFHQ in
            64 x 64, 0.05 for CIFAR-10. 0 does not threshold: squared differences are weighted by
            the row |W_mn| over its largest entry, or over W_mm if the threshold is global.
        threshold: ``"row"`` as above. ``"global"``, as in the authors' code: rows are divided by
            W_mm (by 1 where that is below 1e-6), and compared with tau times the largest entry of
            the whole. Where variances differ much, as at the borders of digits, hardly any pixel is
            left in most fields.
        temperature: T > 0.
        path, format, memory, progress: see `Denoiser`. A quarter of the memory keeps masks.

    Raises:
        ValueError: fewer than two images, an option out of its range; when first called, ``memory``
            too small for the principal components.

    Citation: Lukoianov et al., NeurIPS 2025, arXiv 2509.09672.
    """

    least_images: ClassVar[int] = 2

    def __init__(
        self,
        images: Tensor,
        *,
        tau: float | Mapping[float, float] = 0.02,
        threshold: Literal["row", "global"] = "row",
        temperature: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(images, **options)
        check_temperature(temperature)
        if threshold not in ("row", "global"):
            raise ValueError(f"threshold must be 'row' or 'global', got {threshold!r}")
        _check_tau(tau)
        self.tau, self.threshold, self.temperature = tau, threshold, temperature
        self.wiener = WienerDenoiser(images, **options)
        self._windows: OrderedDict[tuple[Any, ...], Windows] = OrderedDict()

    def _options(self) -> dict[str, Any]:
        return {
            "tau": by_time(self.tau),
            "threshold": self.threshold,
            "temperature": self.temperature,
        }

    def to(self, device: torch.device | str) -> Self:
        super().to(device)
        self.wiener = self.wiener._with(images=self.images, _spectrum=None)
        return self

    def at_scale(self, tau: float | Mapping[float, float]) -> Self:
        """The same denoiser with another tau; shares the images, the statistics and the masks."""
        _check_tau(tau)
        return self._with(tau=tau)

    def mask(self, alpha: float, sigma: float) -> Tensor:
        """M, (d, d): bool, or float64 weights if tau is 0.

        Raises:
            ValueError: alpha or sigma is negative or not finite, or both are 0.
        """
        level = level_of(alpha, sigma)
        tau = self._chosen(self.tau, float(level))
        varying = self.wiener.spectrum.varying
        dtype = torch.float64 if tau == 0 else torch.bool
        whole = torch.eye(self.size, dtype=dtype, device=varying.device)
        if len(varying):
            whole[varying[:, None], varying] = torch.cat(list(self._rows(level, tau)))
        return whole

    def _denoise(self, u: Tensor, level: Tensor) -> Tensor:
        return self._by_level(u, level, self._at_level)

    def _at_level(self, u: Tensor, level: Tensor) -> Tensor:
        spectrum = self.wiener.spectrum
        mean, varying = spectrum.mean.to(u), spectrum.varying.to(u.device)
        result = mean.expand(len(u), -1)
        if not len(varying):
            return result.clone()  # rows of their own
        every = len(varying) == self.size
        windows = self._window(level, u)

        def compare(u: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
            columns = (images if every else images[:, varying]).T.contiguous()
            squares = (u.T[:, :, None] - columns[:, None]).square_()
            q = windows(squares.flatten(1)).view(squares.shape)
            return q, columns[:, :, None]

        size = self.size * u.itemsize
        kept = sum(window.bytes for window in self._windows.values())
        rows, chunk = plan(
            len(u),
            len(self.images),
            pair=size,
            image=size,
            memory=max(self.memory - kept, self.memory // 2),
            device=u.device,
        )
        precision = 0.5 / (level.square() * self.temperature)
        parts = [
            posterior_mean(part, self._chunks(chunk, part), compare, s)
            for part, s in split(u if every else u[:, varying], precision, rows)
        ]
        means = torch.cat(parts, 1)[..., 0].T
        return means if every else result.index_copy(1, varying, means)

    # Masks

    def _window(self, level: Tensor, like: Tensor) -> Windows:
        """The mask on the coordinates that vary, from those kept or made."""
        tau = self._chosen(self.tau, float(level))
        key = (float(level), tau, like.dtype, like.device)
        if key not in self._windows:
            made = self._make(level, tau, like)
            room = self.memory // 4 - made.bytes
            while self._windows and sum(kept.bytes for kept in self._windows.values()) > room:
                self._windows.popitem(last=False)
            self._windows[key] = made
        self._windows.move_to_end(key)
        return self._windows[key]

    def _make(self, level: Tensor, tau: float, like: Tensor) -> Windows:
        """The mask in the dtype and on the device of ``like``, sparse if it has few entries."""
        blocks = self._rows(level, tau)
        if tau == 0:
            return Windows(torch.cat([block.to(like) for block in blocks]))
        counts, columns = [], []
        for block in blocks:
            counts.append(block.sum(1))
            columns.append(block.nonzero()[:, 1].int())  # row by row
        count, column = torch.cat(counts), torch.cat(columns)
        size, entries = len(count), len(column)
        fits = size**2 * like.itemsize <= self.memory // 4
        if like.device.type == "mps" or (fits and entries > SPARSE * size**2):
            row = torch.arange(size, device=count.device).repeat_interleave(count)
            dense = like.new_zeros(size, size)
            dense[row.to(like.device), column.to(like.device).long()] = 1.0
            return Windows(dense)
        return Windows(_csr(count, column, like))

    def _rows(self, level: Tensor, tau: float) -> Iterator[Tensor]:
        """The mask on the coordinates that vary, some rows at a time."""
        spectrum = self.wiener.spectrum
        size = len(spectrum.varying)
        at_once = max(1, self.memory // (64 * size))
        blocks = [slice(start, start + at_once) for start in range(0, size, at_once)]
        largest = 1.0
        if self.threshold == "global":
            largest = max(float(self._strength(level, rows).max()) for rows in blocks)
        for rows in blocks:
            strength = self._strength(level, rows)
            if tau == 0:
                yield strength
            else:
                mask = strength >= tau * largest
                mask.diagonal(rows.start).fill_(True)
                yield mask

    def _strength(self, level: Tensor, rows: slice) -> Tensor:
        """|W_mn| over the largest of its row, or over W_mm."""
        gain = self.wiener.spectrum.gain(level, rows)
        own = gain.diagonal(rows.start).clone()
        gain = gain.abs_()
        if self.threshold == "row":
            return gain / gain.amax(1, keepdim=True)
        return gain / torch.where(own.abs() < NEGLIGIBLE, 1.0, own.abs())[:, None]


def _csr(count: Tensor, column: Tensor, like: Tensor) -> Tensor:
    """The square matrix of ones whose rows have ``count`` entries each, in these columns."""
    start = torch.cat([count.new_zeros(1), count.cumsum(0)]).int()
    ones = like.new_ones(len(column))
    return csr(start.to(like.device), column.to(like.device), ones)


def _check_tau(tau: float | Mapping[float, float]) -> None:
    for value in tau.values() if isinstance(tau, Mapping) else (tau,):
        if not 0 <= value <= 1:
            raise ValueError(f"tau must lie in [0, 1], got {value}")
    if isinstance(tau, Mapping) and not tau:
        raise ValueError("tau must hold a value for one time at least, got none")
