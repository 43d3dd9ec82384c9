"""The denoisers that came before: optimal for the data set, optimal among linear ones, nearest."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from fluvial.images.locality.denoiser import Denoiser, _double, level_of
from fluvial.images.locality.posterior import CACHED, TEMPORARIES, plan, posterior_mean
from fluvial.images.locality.spectrum import Spectrum


class OptimalDenoiser(Denoiser):
    """D = sum_i p_i x_i with p = softmax_i(-|x - alpha x_i|^2 / (2 T sigma^2)).

    The posterior mean of the empirical distribution, which minimises every denoising loss over the
    data set. A sampler that follows it draws images of the data set: it memorises.

    Computed in float64: with low noise, distances in float32 would lose the digits that decide.

    Args:
        images, path, format, memory, progress: see `Denoiser`.
        temperature: T > 0.
        top_k: how many of the nearest images to keep; None for all.

    Raises:
        ValueError: ``temperature`` is not positive, or ``top_k`` less than 1.
    """

    def __init__(
        self,
        images: Tensor,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(images, **options)
        check_temperature(temperature)
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None for all images, got {top_k}")
        self.temperature, self.top_k = temperature, top_k

    def _options(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_k": self.top_k}

    def _denoise(self, u: Tensor, level: Tensor) -> Tensor:
        exact = u.to(_double(u))
        precision = 0.5 / (level.square() * self.temperature)
        if self.top_k is not None:
            return self._among(exact, precision, self.top_k).to(u.dtype)
        rows, size = self._plan(exact)
        parts = [
            posterior_mean(part, self._chunks(size, part), _compare_whole, s)
            for part, s in split(exact, precision, rows)
        ]
        return torch.cat(parts, 1)[0].to(u.dtype)

    def _among(self, u: Tensor, precision: Tensor, count: int) -> Tensor:
        """The mean over the ``count`` nearest images, whose weights are found first."""
        indices = self._nearest(u.detach(), count)
        rows = max(1, self.memory // (TEMPORARIES * indices[0].numel() * self.size * u.itemsize))
        means = []
        for (part, s), near in zip(split(u, precision, rows), indices.split(rows), strict=True):
            images = self._rows(near, part)
            squares = (part[:, None] - images).square().sum(-1)
            factor = s[:, None] if s.ndim else float(s)
            weights = torch.softmax(-(squares - squares.detach().amin(1, True)) * factor, 1)
            means.append((weights[:, None] @ images)[:, 0])
        return torch.cat(means)

    def _nearest(self, u: Tensor, count: int) -> Tensor:
        """Indices of the nearest images to each row of ``u``, (batch, ``count`` or all)."""
        rows, size = self._plan(u)
        found = []
        for part in u.split(rows):
            best = u.new_empty(len(part), 0)
            indices = torch.empty(len(part), 0, dtype=torch.int64, device=u.device)
            seen = 0
            for images in self._chunks(size, u):
                q = _compare_whole(part, images)[0][0]
                here = torch.arange(seen, seen + len(images), device=u.device)
                seen += len(images)
                best, kept = torch.cat([best, q], 1).topk(min(count, seen), largest=False)
                indices = torch.cat([indices, here.expand(len(part), -1)], 1).gather(1, kept)
            found.append(indices)
        return torch.cat(found)

    def _plan(self, u: Tensor) -> tuple[int, int]:
        """A pair is one distance, an image all its numbers."""
        return plan(
            len(u),
            len(self.images),
            pair=u.itemsize,
            image=self.size * u.itemsize,
            memory=self.memory,
            device=u.device,
        )

    def _rows(self, index: Tensor, like: Tensor) -> Tensor:
        """(*index, d), in the dtype and on the device of ``like``."""
        rows = self.images[index.flatten().to(self.images.device)]
        rows = rows if self.format is None else self.format.encode(rows)
        return rows.to(like).reshape(*index.shape, self.size)


class NearestDenoiser(OptimalDenoiser):
    """D = the image closest to x / alpha: the optimal denoiser as the temperature goes to 0.

    The derivative is 0 wherever it exists.

    Args:
        images, path, format, memory, progress: see `Denoiser`.
    """

    def __init__(self, images: Tensor, **options: Any) -> None:
        super().__init__(images, top_k=1, **options)

    def _options(self) -> dict[str, Any]:
        return {}


class WienerDenoiser(Denoiser):
    """D = mu + W (x / alpha - mu), W = A S (A S + B I)^-1, A = alpha^2 and B = sigma^2.

    The best linear denoiser, and the posterior mean if the data are Gaussian with mean mu and
    covariance S (divisor N - 1). With S = U diag(l) U^T, W = U diag(A l / (A l + B)) U^T: a soft
    projection onto the components whose signal-to-noise ratio A l / B exceeds 1. Of fewer images
    than coordinates W vanishes off their span, so that with very little noise it is worse than no
    denoiser at all.

    Args:
        images: two or more.
        path, format, memory, progress: see `Denoiser`.
        spectrum: of these images, if it is known already.

    Raises:
        ValueError: fewer than two images; when first called, ``memory`` too small for the
            principal components.
    """

    least_images: ClassVar[int] = 2

    def __init__(self, images: Tensor, *, spectrum: Spectrum | None = None, **options: Any) -> None:
        super().__init__(images, **options)
        self._spectrum = spectrum

    @property
    def spectrum(self) -> Spectrum:
        """Mean and principal components, computed at their first use."""
        if self._spectrum is None:
            like = torch.empty(0, dtype=torch.float32, device=self.images.device)
            if self.images.dtype == torch.float64 and self.format is None:
                like = like.double()
            rows = max(1, min(self.memory, CACHED) // (8 * self.size))
            self._spectrum = Spectrum.of(
                lambda: self._chunks(rows, like, "covariance"),
                len(self.images),
                self.size,
                self.memory,
            )
        return self._spectrum

    def gain(self, alpha: float, sigma: float) -> Tensor:
        """W, (d, d) float64. The sensitivity of output m is W_m / alpha, whatever x is.

        Raises:
            ValueError: alpha or sigma is negative or not finite, or both are 0.
        """
        spectrum = self.spectrum
        level = level_of(alpha, sigma)
        where = spectrum.varying
        whole = spectrum.mean.new_zeros(self.size, self.size)
        whole[where[:, None], where] = spectrum.gain(level)
        return whole

    def _denoise(self, u: Tensor, level: Tensor) -> Tensor:
        spectrum = self.spectrum
        exact = u.to(spectrum.mean) - spectrum.mean
        parts = exact[:, spectrum.varying] @ spectrum.vectors * spectrum.shrink(level)
        change = torch.zeros_like(exact).index_copy(1, spectrum.varying, parts @ spectrum.vectors.T)
        return (spectrum.mean + change).to(u)


def check_temperature(temperature: float) -> None:
    """`ValueError` unless it is positive and finite."""
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")


def split(u: Tensor, precision: Tensor, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Queries with their precision, () or (batch,), ``rows`` at a time."""
    parts = u.split(rows)
    return list(
        zip(
            parts,
            precision.split(rows) if precision.ndim else [precision] * len(parts),
            strict=True,
        )
    )


def _compare_whole(u: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """|u - x_i|^2 less |u|^2, which all images share, (1, batch, c); and the images, (1, c, d)."""
    q = torch.addmm(images.square().sum(1), u, images.T, alpha=-2)
    return q[None], images[None]
