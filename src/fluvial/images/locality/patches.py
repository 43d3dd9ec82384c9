"""Score machines that see a patch around each pixel: local, and local and equivariant.

Kamb and Ganguli, "An analytic theory of creativity in convolutional diffusion models", ICML 2025,
arXiv 2412.20292.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor

from fluvial.images.locality.classical import split
from fluvial.images.locality.denoiser import Denoiser, by_time
from fluvial.images.locality.posterior import plan, posterior_mean


class LocalScoreMachine(Denoiser):
    """The posterior mean of every pixel from the k x k window around it, of all channels.

    D(u) = sum_i p_i(u) x_i(u), p(u) = softmax_i(-|x - alpha x_i|^2 over window(u) / (2 sigma^2)).

    Windows end at the edges of the image. k = 1 knows each pixel's histogram, and k >= 2 H - 1
    makes the optimal denoiser. Sums over windows are two products with banded matrices, so that
    their cost does not depend on k.

    Args:
        images: (N, channels, height, width).
        k: odd side of the window; or sides by time, ``{t: k}``: the one of the nearest level of
            noise is taken.
        path, format, memory, progress: see `Denoiser`.

    Raises:
        ValueError: images of another shape, or a ``k`` that is not odd and positive.
    """

    def __init__(self, images: Tensor, *, k: int | Mapping[float, int], **options: Any) -> None:
        super().__init__(images, **options)
        if images.ndim != 4:
            raise ValueError(
                f"images must have shape (N, channels, height, width), got {tuple(images.shape)}"
            )
        self._check_k(k)
        self.k = k

    def _options(self) -> dict[str, Any]:
        return {"k": by_time(self.k)}

    def at_scale(self, k: int | Mapping[float, int]) -> Self:
        """The same machine with other windows; shares the images."""
        self._check_k(k)
        return self._with(k=k)

    @property
    def largest(self) -> float:
        """The most that k may be."""
        return math.inf

    def _check_k(self, k: int | Mapping[float, int]) -> None:
        for side in k.values() if isinstance(k, Mapping) else (k,):
            if side < 1 or side % 2 == 0:
                raise ValueError(f"k must be odd and positive, got {side}")
        if not k:
            raise ValueError("k must hold a side for one time at least, got none")

    def _denoise(self, u: Tensor, level: Tensor) -> Tensor:
        if isinstance(self.k, Mapping):
            return self._by_level(
                u, level, lambda u, r: self._with_k(u, r, self._chosen(self.k, float(r)))
            )
        return self._with_k(u, level, self.k)

    def _with_k(self, u: Tensor, level: Tensor, k: int) -> Tensor:
        channels, height, width = self.shape
        down, across = (_band(side, k, u) for side in (height, width))

        def compare(u: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
            return _compare_windows(u, images.T.contiguous(), down, across, channels)

        size = self.size * u.itemsize
        rows, chunk = plan(
            len(u), len(self.images), pair=size, image=size, memory=self.memory, device=u.device
        )
        parts = [
            posterior_mean(part, self._chunks(chunk, part), compare, s)
            for part, s in split(u, 0.5 / level.square(), rows)
        ]
        return torch.cat(parts, 1).permute(1, 2, 0).flatten(1)


class EquivariantLocalScoreMachine(LocalScoreMachine):
    """The posterior mean of every pixel over the k x k patches of all images at all positions.

    D(u) = sum_j p_j(u) c_j with c_j the centre of patch j and

        p(u) = softmax_j(-|x over window(u) - alpha patch_j|^2 / (2 sigma^2)).

    What it draws are mosaics of patches.

    The patches of all positions are the local machine's windows on all cyclic shifts of the images,
    and that is how it is computed: H W times the work of the local machine. Of large sets, use a
    part.

    Args:
        images: (N, channels, height, width).
        k: as for `LocalScoreMachine`.
        boundary: ``"circular"``: windows wrap around, and cyclic shifts of x shift D.
            ``"broken"``: windows end at the edges, and a pixel whose window crosses an edge or a
            corner is compared only with patches that cross the same one by as much; the others with
            patches that cross none. From k >= H on that is the local machine.
        train_patches: with the circular boundary, ``"valid"`` patches that lie inside the image, as
            published, or ``"circular"`` ones that wrap around too.
        path, format, memory, progress: see `Denoiser`.

    Raises:
        ValueError: as `LocalScoreMachine`; an unknown option; with the circular boundary, ``k``
            above height or width.
    """

    def __init__(
        self,
        images: Tensor,
        *,
        k: int | Mapping[float, int],
        boundary: Literal["circular", "broken"] = "circular",
        train_patches: Literal["valid", "circular"] = "valid",
        **options: Any,
    ) -> None:
        if boundary not in ("circular", "broken"):
            raise ValueError(f"boundary must be 'circular' or 'broken', got {boundary!r}")
        if train_patches not in ("valid", "circular"):
            raise ValueError(f"train_patches must be 'valid' or 'circular', got {train_patches!r}")
        if boundary == "broken" and train_patches == "circular":
            raise ValueError("train_patches='circular' needs boundary='circular', got 'broken'")
        self.boundary, self.train_patches = boundary, train_patches
        super().__init__(images, k=k, **options)

    def _options(self) -> dict[str, Any]:
        own = {"boundary": self.boundary, "train_patches": self.train_patches}
        return {**super()._options(), **own}

    @property
    def largest(self) -> float:
        """The most that k may be: with the circular boundary, the side of the images."""
        return min(self.shape[1:]) if self.boundary == "circular" else math.inf

    def _check_k(self, k: int | Mapping[float, int]) -> None:
        super()._check_k(k)
        largest = max(k.values() if isinstance(k, Mapping) else (k,))
        if largest > self.largest:
            raise ValueError(
                f"k must be at most {self.largest}, the side of the images, with "
                f"boundary='circular', got {largest}"
            )

    def _with_k(self, u: Tensor, level: Tensor, k: int) -> Tensor:
        channels, height, width = self.shape
        circular = self.boundary == "circular"
        down, across = (_band(side, k, u, circular=circular) for side in (height, width))
        size, shifts = self.size * u.itemsize, height * width
        rows, candidates = plan(
            len(u),
            len(self.images) * shifts,
            pair=size,
            image=size,
            memory=self.memory,
            device=u.device,
        )
        images_each = min(len(self.images), candidates)
        shifts_each = max(1, candidates // images_each)

        def shifted(like: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
            some = torch.arange(shifts, device=like.device).split(shifts_each)
            for part in self._bar(some, "shifts"):
                for images in self._chunks(images_each, like, what=None):
                    yield images, part

        def compare(u: Tensor, chunk: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            images, some = chunk
            places, allowed = self._places(some, k)
            pixels = images.T.reshape(channels, height * width, len(images))
            columns = pixels[:, places].reshape(self.size, -1)  # by shift, then by image
            q, values = _compare_windows(u, columns, down, across, channels)
            apart = q.unflatten(-1, (len(some), len(images)))
            # no weight is left of it, and no infinity makes a NaN
            apart.masked_fill_(~allowed[:, None, :, None], torch.finfo(q.dtype).max)
            return apart.flatten(-2), values

        parts = [
            posterior_mean(part, shifted(part), compare, s)
            for part, s in split(u, 0.5 / level.square(), rows)
        ]
        return torch.cat(parts, 1).permute(1, 2, 0).flatten(1)

    def _places(self, shifts: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(pixels, shifts): the pixel a shift brings there, and may the two be compared?"""
        _, height, width = self.shape
        half = k // 2
        places, allowed = [], []
        for side, by in ((height, shifts // width), (width, shifts % width)):
            here = torch.arange(side, device=shifts.device)[:, None]
            there = (here + by) % side
            places.append(there)
            if self.boundary == "broken":
                # how far from the start or the end, of those whose window crosses it
                kind = torch.where((here >= half) & (here < side - half), -1, here)
                allowed.append(kind == kind[:, 0][there])
            elif self.train_patches == "valid":
                allowed.append((there >= half) & (there < side - half))
            else:
                allowed.append(torch.ones_like(there, dtype=torch.bool))
        rows, columns = places
        place = (rows[:, None] * width + columns).flatten(0, 1)
        return place, (allowed[0][:, None] & allowed[1]).flatten(0, 1)


def _band(side: int, k: int, like: Tensor, *, circular: bool = False) -> Tensor | None:
    """The matrix that sums k neighbours along one side; None for the identity."""
    if k == 1:
        return None
    place = torch.arange(side, device=like.device)
    apart = (place[:, None] - place).abs()
    if circular:
        apart = torch.minimum(apart, side - apart)
    return (apart <= k // 2).to(like.dtype)


def _compare_windows(
    u: Tensor, columns: Tensor, down: Tensor | None, across: Tensor | None, channels: int
) -> tuple[Tensor, Tensor]:
    """Squared differences over the window of every pixel, (pixels, batch, c), and its values.

    Args:
        u: (batch, d).
        columns: images, (d, c).
        down, across: what sums along the height, and along the width.
        channels: d is channels times height times width.
    """
    q = (u.T[:, :, None] - columns[:, None]).square_().unflatten(0, (channels, -1))
    q = q.sum(0) if channels > 1 else q[0]
    if down is not None and across is not None:
        shape, (height, width) = q.shape, (len(down), len(across))
        q = across @ (down @ q.reshape(height, -1)).view(height, width, -1)
        q = q.view(shape)
    return q, columns.view(channels, -1, columns.shape[1]).permute(1, 2, 0)
