"""Labelled image sets that ship inside Python packages, with where they come from."""

from __future__ import annotations

import gzip
import hashlib
import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images, labels and provenance.

    Args:
        images: uint8, (N, C, H, W), grey or colour levels 0 to 255.
        labels: int64, (N,), each an index into ``label_names``.
        label_names: the names of the classes.
        name: of the set.
        licence: under which the package distributes it.
        source: package and version the files came from.
        citation: whom to cite, and a homepage; empty if not known.

    Raises:
        TypeError: ``images`` is not a uint8 tensor, ``labels`` not an int64 one.
        ValueError: a shape is wrong, a label has no name, or ``name``, ``licence`` or ``source``
            is empty.
    """

    images: Tensor
    labels: Tensor
    label_names: tuple[str, ...]
    name: str
    licence: str
    source: str
    citation: str = ""

    def __post_init__(self) -> None:
        for field, value, dtype in (
            ("images", self.images, torch.uint8),
            ("labels", self.labels, torch.int64),
        ):
            if not isinstance(value, Tensor) or value.dtype != dtype:
                got = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"{field} must be a {dtype} tensor, got {got}")
        if self.images.ndim != 4 or 0 in self.images.shape:
            raise ValueError(
                f"images must have shape (N, C, H, W), none of them 0, "
                f"got {tuple(self.images.shape)}"
            )
        if self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels must have shape ({len(self.images)},) as images has "
                f"{len(self.images)} rows, got {tuple(self.labels.shape)}"
            )
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= len(self.label_names):
            raise ValueError(
                f"labels must lie in [0, {len(self.label_names)}), one for each of label_names, "
                f"got values from {low} to {high}"
            )
        for field in ("name", "licence", "source"):
            if not getattr(self, field):
                raise ValueError(f"{field} must not be empty: every set says where it comes from")

    def __len__(self) -> int:
        return len(self.images)

    def split(
        self,
        *,
        train: float | None = 0.8,
        validation: float | None = 0.1,
        test: float | None = 0.1,
        seed: int = 0,
    ) -> dict[str, ImageSet]:
        """Parts with the same share of every class and no image in common.

        Of images that are equal in every pixel only the first is kept (with its label), so that
        the parts share no image and none holds an image twice: the parts of the 10,000 animals,
        of which 9,716 are distinct, hold at most 9,716. A class of n distinct images gives a part
        of share f between f n - 1 and f n + 1 of them. Shares that sum to less than 1 leave
        images out.

        The rows of a part are in random order, so its first k rows are a random sample of it. The
        same set, shares and seed give the same parts on every machine.

        Args:
            train, validation, test: shares of each class, in (0, 1]; None for no such part.
            seed: not negative.

        Returns:
            The parts asked for, by name.

        Raises:
            ValueError: a share is not in (0, 1], they sum to more than 1, all are None, the seed
                is negative, or a class has too few images to be in every part.
        """
        shares = {
            part: share
            for part, share in (("train", train), ("validation", validation), ("test", test))
            if share is not None
        }
        if not shares:
            raise ValueError("train, validation and test are all None: at least one is needed")
        for part, share in shares.items():
            if not 0 < share <= 1:
                raise ValueError(
                    f"{part} must be a share in (0, 1], or None for no such part, got {share}"
                )
        total = math.fsum(shares.values())
        if total > 1 + 1e-9:
            raise ValueError(f"{', '.join(shares)} must sum to at most 1, got {total}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")

        distinct = self._first_of_equals()
        labels = self.labels.cpu().numpy()[distinct]
        mix = np.empty(len(distinct), dtype=np.uint64)
        rows: dict[str, list[np.ndarray]] = {part: [] for part in shares}
        for label, label_name in enumerate(self.label_names):
            members = np.flatnonzero(labels == label)
            if not len(members):
                continue
            # NumPy promises that the raw stream of a bit generator never changes; it makes no such
            # promise for Generator.permutation.
            stream = np.random.PCG64([seed, label])
            order = np.argsort(stream.random_raw(len(members)), kind="stable")
            # keys of their own for the order in a part: a part holds a range of the first ones, and
            # the ends of the range differ from class to class
            mix[members] = stream.random_raw(len(members))
            members = members[order]
            start, upto = 0, 0.0
            for part, share in shares.items():
                upto += share
                stop = min(len(members), math.floor(upto * len(members) + 0.5))
                if stop == start:
                    raise ValueError(
                        f"{part}={share} leaves no image of class {label_name!r}, "
                        f"which has {len(members)} distinct ones"
                    )
                rows[part].append(members[start:stop])
                start = stop

        parts = {}
        for part, by_class in rows.items():
            chosen = np.concatenate(by_class)
            chosen = chosen[np.argsort(mix[chosen], kind="stable")]
            index = torch.from_numpy(distinct[chosen]).to(self.images.device)
            parts[part] = replace(self, images=self.images[index], labels=self.labels[index])
        return parts

    def _first_of_equals(self) -> np.ndarray:
        """Row indices of the first of each group of equal images, ascending."""
        first: dict[bytes, int] = {}
        for row, image in enumerate(self.images.cpu().numpy()):
            first.setdefault(image.tobytes(), row)
        return np.fromiter(first.values(), dtype=np.int64)


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


def read_gzip(package: str, file: str, sha256: str, install: str) -> bytes:
    """The unpacked content of a gzip file inside an installed package, which is not imported.

    Args:
        package: name by which the package would be imported, without dots.
        file: path of the file inside it.
        sha256: hexadecimal digest of the file as it lies there, packed.
        install: the command that installs the package, for the error messages.

    Raises:
        ModuleNotFoundError: the package is not installed.
        FileNotFoundError: it is, without this file.
        ValueError: the file is damaged or of another version: its digest differs.
    """
    # a package is looked up here and not imported: importing one may need what it depends on
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(
            f"the package {package} is not installed; install it with `{install}`", name=package
        )
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / file
        if path.is_file():
            packed = path.read_bytes()
            break
    else:
        raise FileNotFoundError(
            f"the installed package {package} has no file {file}; install it with `{install}`"
        )
    digest = hashlib.sha256(packed).hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{path} is damaged or of another version: its SHA-256 is {digest}, wanted {sha256}; "
            f"install it with `{install}`"
        )
    return gzip.decompress(packed)
