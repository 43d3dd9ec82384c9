"""Image files as arrays of levels 0 to 255, and levels as numbers in [-1, 1]."""

from __future__ import annotations

import errno
import os
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from torch import Tensor
from tqdm import tqdm

from fluvial.data.store import Rows, digest, keep

Source: TypeAlias = Path | BytesIO
Resize: TypeAlias = Literal["crop", "pad", "stretch"]
T = TypeVar("T")

NAMED = 50
"""Bad files that an error or a note names."""

_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_DEEP_MODES = (*_SIXTEEN_BIT, "F")
_TURN = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What brings an image of each EXIF orientation upright."""

_ALPHA = "alpha channel, transparent parts put on white"
_DEEP = "more than 8 bits a channel, reduced to 8"
_ANIMATED = "several frames or pages, the first taken"
_CMYK = "CMYK, converted without a colour profile"

# Errors of the disk or the process and not of one file: what they hit may be whole.
_NOT_THE_FILE = {errno.EIO, errno.ESTALE, errno.ENOENT, errno.EMFILE, errno.ENFILE}


def scaled(images: Tensor) -> Tensor:
    """x / 127.5 - 1: levels 0 to 255 as numbers in [-1, 1].

    Args:
        images: uint8, any shape.

    Returns:
        float32, the same shape.

    Raises:
        TypeError: ``images`` is not uint8.
    """
    if images.dtype != torch.uint8:
        raise TypeError(f"images must be uint8, got {images.dtype}")
    return images.float() / 127.5 - 1


def to_uint8(images: Tensor) -> Tensor:
    """The inverse of `scaled`: (x + 1) 127.5, rounded and clamped to 0 ... 255.

    ``to_uint8(scaled(x)) == x`` for all 256 levels.

    Args:
        images: floating point, any shape; what lies outside [-1, 1] becomes black or white.

    Returns:
        uint8, the same shape.

    Raises:
        TypeError: ``images`` is not of a floating-point type.
        ValueError: ``images`` holds NaN, which has no level.
    """
    if not images.is_floating_point():
        raise TypeError(f"images must be of a floating-point type, got {images.dtype}")
    if images.isnan().any():
        raise ValueError("images must not hold NaN")
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True)
class Options:
    """How images are read; the arguments of `fluvial.data.read`.

    Args:
        size: (height, width) they are to have; None for that of all images, if they agree.
        channels: 1 or 3; None for 3 unless every image is grey.
        resize: as in `fit`.
        skip_bad: leave out files that cannot be read.
        cache: folder for what is decoded or unpacked; None for memory.
        progress: show progress bars.
    """

    size: tuple[int, int] | None = None
    channels: int | None = None
    resize: Resize = "crop"
    skip_bad: bool = False
    cache: Path | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        if self.channels not in (None, 1, 3):
            raise ValueError(
                f"channels must be 1 (grey), 3 (colour) or None, got {self.channels!r}"
            )
        if self.resize not in ("crop", "pad", "stretch"):
            raise ValueError(f"resize must be crop, pad or stretch, got {self.resize!r}")
        if self.size is not None and (
            not isinstance(self.size, tuple)
            or len(self.size) != 2
            or not all(isinstance(side, int) and side >= 1 for side in self.size)
        ):
            raise ValueError(f"size must be a positive number or (height, width), got {self.size}")


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says before it is decoded.

    Args:
        height, width: after the rotation that EXIF asks for.
        grey: has one channel, or a palette of greys.
        traits: what a user should know.
    """

    height: int
    width: int
    grey: bool
    traits: tuple[str, ...]


def header(source: Source) -> Header:
    """Of an image file."""
    with Image.open(source) as image:
        width, height = image.size
        # Image's own method: that of PNG decodes the image to find what may stand after it. TIFF
        # gives the size after the rotation.
        if image.format != "TIFF" and _orientation(Image.Image.getexif, image) >= 5:
            width, height = height, width
        grey = image.mode in ("1", "L", "LA", "La", *_DEEP_MODES)
        if image.mode == "P":
            palette = np.array(image.getpalette("RGB") or [0, 0, 0]).reshape(-1, 3)
            grey = bool((palette == palette[:, :1]).all())
        traits = {
            _ALPHA: image.has_transparency_data and image.mode not in _DEEP_MODES,
            _DEEP: image.mode in _DEEP_MODES,
            # the further pictures in a camera's JPEG are previews
            _ANIMATED: image.format != "MPO" and getattr(image, "is_animated", False),
            _CMYK: image.mode == "CMYK",
        }
    return Header(height, width, grey, tuple(trait for trait, holds in traits.items() if holds))


def decode(source: Source, size: tuple[int, int], channels: int, resize: Resize) -> np.ndarray:
    """uint8, (channels, height, width), of an image file.

    The first frame; rotated as EXIF asks; transparent parts on white; colours to grey by the luma
    of ITU-R 601. A 16-bit image is scaled by 255 / 65535, one of floating-point numbers by 255,
    from [0, 1]. Colour profiles are not applied. A JPEG much larger than ``size`` is decoded at a
    half, a quarter or an eighth of its size, at least twice ``size``.

    Raises:
        ValueError: 32-bit integers outside [0, 65535], or floating-point numbers outside [0, 1]:
            their black and white are not known.
        OSError, Exception: the file is damaged; Pillow raises errors of many kinds.
    """
    with Image.open(source) as image:
        height, width = size
        if image.format in ("JPEG", "MPO"):
            turned = _orientation(Image.Image.getexif, image) >= 5
            least = (2 * height, 2 * width) if turned else (2 * width, 2 * height)
            image.draft("L" if channels == 1 else None, least)
        image.load()
        turn = _TURN.get(_orientation(type(image).getexif, image))
        upright = image if turn is None else image.transpose(turn)
        return fit(_eight_bit(upright, channels), size, resize)


def fit(image: Image.Image, size: tuple[int, int], resize: Resize) -> np.ndarray:
    """uint8, (channels, height, width), of a grey or RGB image, with antialiasing (Lanczos).

    "crop" takes the largest centred part of the wanted proportions, "pad" puts the whole image in
    the middle of a black one, "stretch" changes the proportions.
    """
    height, width = size
    if image.size != (width, height):
        if resize == "crop":
            scale = min(image.width / width, image.height / height)
            left, top = (image.width - scale * width) / 2, (image.height - scale * height) / 2
            # rounding may put the far corner outside the image by a last bit
            right = min(left + scale * width, image.width)
            bottom = min(top + scale * height, image.height)
            image = _resized(image, (width, height), (left, top, right, bottom))
        elif resize == "pad":
            scale = min(width / image.width, height / image.height)
            inner = max(1, round(scale * image.width)), max(1, round(scale * image.height))
            small = _resized(image, inner, None)
            image = Image.new(image.mode, (width, height))
            image.paste(small, ((width - inner[0]) // 2, (height - inner[1]) // 2))
        else:
            image = _resized(image, (width, height), None)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _resized(
    image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float] | None
) -> Image.Image:
    # a gap of 3 between the two steps of reducing is not seen in the result, says Pillow
    return image.resize(size, Image.Resampling.LANCZOS, box=box, reducing_gap=3.0)


def _orientation(getexif: Callable[[Any], Image.Exif], image: Image.Image) -> int:
    try:
        value = getexif(image).get(ExifTags.Base.Orientation, 1)
    except Exception:  # EXIF is damaged, in one of many ways, and the image may be whole
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _eight_bit(image: Image.Image, channels: int) -> Image.Image:
    """In mode L or RGB."""
    if image.mode in _DEEP_MODES:
        pixels = np.asarray(image).astype(np.float64)
        white = 1.0 if image.mode == "F" else 65535.0
        low, high = pixels.min(), pixels.max()
        if not (low >= 0 and high <= white):
            raise ValueError(
                f"holds numbers from {low:g} to {high:g}, read are {white:g} for white and 0 for "
                "black; scale it, or keep its numbers in an .npy file"
            )
        image = Image.fromarray(np.rint(pixels * (255 / white)).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white_ground = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white_ground, image)
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def pictures(
    names: Sequence[str], file: Callable[[int], Source], options: Options, identity: str
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Image files as one array: each is decoded once, into the cache if there is one.

    Args:
        names: of the files, for messages.
        file: the file of an index, or an error that says why there is none.
        options: what is asked for.
        identity: tells these files from others; by it and the options they are found in the cache.

    Returns:
        uint8 (N, C, H, W); the indices of the N files; notes.

    Raises:
        ValueError: a file cannot be read: all that cannot are found first; or ``size`` is None and
            the images are of different sizes.
    """
    # with and without skip_bad an entry is the same: after the error nothing is decoded again
    key = digest("images", options.size, options.channels, options.resize, identity)
    x, facts = keep(lambda: _decoded(names, file, options), options.cache, key)
    bad: dict[int, str] = dict(facts["bad"])
    notes = list(facts["notes"])
    if bad and not options.skip_bad:
        raise ValueError(
            f"{_bad(bad, names)}; repair or remove them, or leave them out with skip_bad=True"
        )
    if bad:
        notes.append(f"left out: {_bad(bad, names)}")
    good = np.array([index for index in range(len(names)) if index not in bad], dtype=np.int64)
    return x, good, notes


def _decoded(names: Sequence[str], file: Callable[[int], Source], options: Options) -> Rows:
    """The images, with facts "bad", a list of (index, why), and "notes"."""
    Image.init()
    headers: dict[int, Header] = {}
    bad: list[tuple[int, str]] = []
    for index, found in _threaded(
        lambda k: header(file(k)), range(len(names)), "headers", options.progress
    ):
        if isinstance(found, str):
            bad.append((index, found))
        else:
            headers[index] = found
    if not headers:
        raise ValueError(_bad(dict(bad), names))
    heights, widths = {h.height for h in headers.values()}, {h.width for h in headers.values()}
    spread = f"of {_range(heights)} x {_range(widths)} pixels (height x width)"
    if options.size is None and (len(heights) > 1 or len(widths) > 1):
        raise ValueError(
            f"size: the images are {spread}; say which size they are to have, for instance size=64 "
            "or size=(48, 64)"
        )
    size = options.size or (min(heights), min(widths))
    channels = options.channels or (1 if all(h.grey for h in headers.values()) else 3)

    def blocks() -> Iterator[np.ndarray]:
        for index, found in _threaded(
            lambda k: decode(file(k), size, channels, options.resize),
            sorted(headers),
            "decoding",
            options.progress,
        ):
            if isinstance(found, str):
                bad.append((index, found))
            else:
                yield found[None]
        if len(bad) == len(names):
            raise ValueError(_bad(dict(bad), names))

    notes = _notes(list(headers.values()), size, channels, options.resize, spread)
    return Rows(
        (len(headers), channels, *size),
        np.dtype(np.uint8),
        blocks(),
        {"bad": bad, "notes": notes},
    )


def _bad(bad: dict[int, str], names: Sequence[str]) -> str:
    """How many of the files are bad, and the first of them."""
    listed = [f"{names[index]} ({bad[index]})" for index in sorted(bad)[:NAMED]]
    rest = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    return f"{len(bad)} of {len(names)} images cannot be read: {', '.join(listed)}{rest}"


def _threaded(
    function: Callable[[int], T], indices: Sequence[int], what: str, progress: bool
) -> Iterator[tuple[int, T | str]]:
    """(index, result, or why there is none), in order, from as many threads as there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = min(32, cores or 1)

    def attempt(index: int) -> T | str:
        try:
            return function(index)
        except Exception as error:  # a damaged image fails in as many ways as there are formats
            if isinstance(error, OSError) and error.errno in _NOT_THE_FILE:
                raise
            return _reason(error)

    pending: deque[tuple[int, Future[T | str]]] = deque()
    with (
        # of Pillow, about large images and damaged metadata: an image is read, or listed as bad
        warnings.catch_warnings(action="ignore"),
        ThreadPoolExecutor(threads) as pool,
        tqdm(total=len(indices), desc=what, unit="image", disable=not progress) as bar,
    ):
        try:
            for index in indices:
                pending.append((index, pool.submit(attempt, index)))
                if len(pending) >= 8 * threads:  # no more than these are held at once
                    first, future = pending.popleft()
                    yield first, future.result()
                    bar.update()
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
                bar.update()
        finally:
            for _, future in pending:
                future.cancel()


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not an image that Pillow can read"
    if isinstance(error, Image.DecompressionBombError):
        return (
            f"more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels, twice the limit that can be "
            "raised in PIL.Image.MAX_IMAGE_PIXELS"
        )
    return str(error) or type(error).__name__


def _range(sides: set[int]) -> str:
    return f"{min(sides)}" if len(sides) == 1 else f"{min(sides)} to {max(sides)}"


def _notes(
    headers: Sequence[Header], size: tuple[int, int], channels: int, resize: str, spread: str
) -> list[str]:
    def images(number: int) -> str:
        return f"{number} image{'s' * (number != 1)}"

    notes = []
    wanted = f"{size[0]} x {size[1]}"
    other = sum((h.height, h.width) != size for h in headers)
    if other:
        notes.append(f"brought to {wanted} ({resize}): {images(other)}; all are {spread}")
    smaller = sum(h.height < size[0] or h.width < size[1] for h in headers)
    if smaller:
        notes.append(f"enlarged to {wanted}: {images(smaller)}")
    coloured = sum(not h.grey for h in headers)
    if channels == 1 and coloured:
        notes.append(f"colour made grey: {images(coloured)}")
    traits = Counter(trait for h in headers for trait in h.traits)
    return notes + [f"{trait}: {images(number)}" for trait, number in traits.items()]
