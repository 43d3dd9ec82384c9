"""How a user's data become the numbers a model sees, and back. Saved inside every model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from fluvial.data.images import Resize, scaled, to_uint8
from fluvial.data.tokenizer import Tokenizer

Kind: TypeAlias = Literal["images", "arrays", "table", "text"]

_LISTED = 12
"""Names that an error lists; of more it gives the closest ones."""


@dataclass(frozen=True)
class Format:
    """encode: (x - shift) / scale, and decode: x scale + shift.

    Images are levels 0 to 255 and become x / 127.5 - 1, in [-1, 1]; what is decoded is rounded and
    clamped to levels. Arrays and tables become numbers of mean 0 and standard deviation 1 if
    ``shift`` and ``scale`` are those of the data. Text is tokens: they are encoded as int64 and
    decoded as they are; `text` makes texts of them.

    Args:
        kind: "images" (uint8), "arrays" (of any event shape), "table" (one column a number) or
            "text" (tokens, integers).
        shape: of one event: (channels, height, width) of images, (columns,) of a table, (tokens,)
            of text.
        shift: one number, or one for each channel or column: along dimension 1 of a batch. Empty
            for the kind's own, 127.5 of images and 0 of the others.
        scale: positive, of the same form; empty for 127.5 and 1.
        label_names: names of the classes; empty for data without labels.
        columns: names of the columns of a table.
        integers: those columns of a table that hold whole numbers; they are rounded when decoded.
        resize: how images of another size were brought to this one.
        tokenizer: of text.
        characters_per_token: of text, in the mean: what turns bits a token into bits a character.

    Raises:
        ValueError: the fields do not fit together, or a name occurs twice.
    """

    kind: Kind
    shape: tuple[int, ...]
    shift: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    label_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    resize: Resize = "crop"
    tokenizer: Tokenizer | None = None
    characters_per_token: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.resize not in get_args(Resize):
            raise ValueError(
                f"resize must be one of {', '.join(get_args(Resize))}, got {self.resize!r}"
            )
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape needs one positive number or more, got {self.shape}")
        if self.kind != "arrays" and len(self.shape) != (3 if self.kind == "images" else 1):
            wanted = {"images": "(channels, height, width)", "text": "(tokens,)"}
            raise ValueError(
                f"shape of {self.kind} must be {wanted.get(self.kind, '(columns,)')}, got "
                f"{self.shape}"
            )
        own = (127.5, 127.5) if self.kind == "images" else (0.0, 1.0)
        for name, default in zip(("shift", "scale"), own, strict=True):
            values = tuple(float(v) for v in getattr(self, name)) or (default,)
            if len(values) not in (1, self.shape[0]) or not all(map(math.isfinite, values)):
                raise ValueError(
                    f"{name} needs one finite number, or one for each of {self.shape[0]}, "
                    f"got {_some(values)}"
                )
            if name == "scale" and min(values) <= 0:
                raise ValueError(f"scale must be positive, got {_some(values)}")
            if self.kind in ("images", "text") and values != (default,):
                raise ValueError(f"{name} of {self.kind} is {default}, got {_some(values)}")
            object.__setattr__(self, name, values)
        for name in ("label_names", "columns", "integers"):
            values = getattr(self, name)
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise ValueError(f"{name} must differ, {_some(twice)} occurs twice")
        if len(self.columns) != (self.shape[0] if self.kind == "table" else 0):
            raise ValueError(
                f"columns must name the {self.shape[0]} columns of a table, and nothing else, "
                f"got {_some(self.columns)} for {self.kind}"
            )
        if not set(self.integers) <= set(self.columns):
            raise ValueError(f"integers must be among the columns, got {_some(self.integers)}")
        if (self.kind == "text") != isinstance(self.tokenizer, Tokenizer):
            got = type(self.tokenizer).__name__
            raise ValueError(f"tokenizer must be a Tokenizer for text alone, got {got}")
        if not 0 < self.characters_per_token < math.inf:
            raise ValueError(
                f"characters_per_token must be positive, got {self.characters_per_token}"
            )

    def encode(self, x: Tensor) -> Tensor:
        """(x - shift) / scale, as a model sees it.

        Args:
            x: (batch, *shape): uint8 images; any real type else. Integers and float64 are shifted
                and scaled in float64, before the result is rounded to float32.

        Returns:
            float32, the same shape; int64 for text.

        Raises:
            TypeError: images are not uint8, or tokens no integers.
            ValueError: the shape is another.
        """
        self._check(x)
        if self.kind == "text":
            return _tokens(x)
        if self.kind == "images":
            return scaled(x)
        wide = x.to(_wide(x)) if not x.is_floating_point() else x.to(_at_least_float32(x))
        return ((wide - self._along(self.shift, wide)) / self._along(self.scale, wide)).float()

    def decode(self, x: Tensor) -> Tensor:
        """The inverse of `encode`: in the user's units.

        Args:
            x: floating point, (batch, *shape).

        Returns:
            uint8 for images, rounded and clamped; float64 for a table, its integer columns rounded;
            int64 for text, the tokens as they are;
            else of the type of ``x``, float32 or wider.

        Raises:
            TypeError: ``x`` is not of a floating-point type; tokens are no integers.
            ValueError: the shape is another, or images hold NaN.
        """
        self._check(x)
        if self.kind == "text":
            return _tokens(x)
        if self.kind == "images":
            return to_uint8(x)
        if not x.is_floating_point():
            raise TypeError(f"x must be of a floating-point type, got {x.dtype}")
        wide = x.to(_wide(x) if self.kind == "table" else _at_least_float32(x))
        wide = wide * self._along(self.scale, wide) + self._along(self.shift, wide)
        if self.integers:
            whole = [self.columns.index(name) for name in self.integers]
            wide[:, whole] = wide[:, whole].round()
        return wide

    def text(self, x: Tensor) -> list[str]:
        """The texts of tokens (batch, n), one a row; a mask symbol becomes a white square.

        Raises:
            ValueError: the data are no text, or ``x`` has no rows of tokens.
        """
        if self.tokenizer is None:
            raise ValueError(f"text: these data are {self.kind}, not text")
        if x.ndim != 2:
            raise ValueError(f"x must have shape (batch, n), got {tuple(x.shape)}")
        return [self.tokenizer.decode(row) for row in _tokens(x).cpu()]

    def label(self, name: str) -> int:
        """The number of a class.

        Raises:
            ValueError: there is no class of this name.
        """
        if name in self.label_names:
            return self.label_names.index(name)
        if not self.label_names:
            raise ValueError(f"label {name!r}: these data have no labels")
        raise ValueError(f"label: there is no class {name!r}; {choices(name, self.label_names)}")

    def as_json(self) -> dict[str, Any]:
        """The fields, as JSON holds them."""
        content = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
        if self.tokenizer is None:
            del content["tokenizer"], content["characters_per_token"]
        return content

    def summary(self) -> dict[str, Any]:
        """`as_json` with a tokenizer by its size and digest: one of a language model has megabytes.

        For settings that are shown and compared; a format cannot be made of it.
        """
        content = self.as_json()
        if self.tokenizer is not None:
            kind = "characters" if self.tokenizer.alphabet else "tokenizers"
            content["tokenizer"] = {
                "kind": kind,
                "size": self.tokenizer.size,
                "normalise": self.tokenizer.normalise,
                "digest": self.tokenizer.digest,
            }
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Format:
        """The inverse of `as_json`.

        Raises:
            ValueError: a field is missing, unknown or does not fit.
        """
        known = {field.name for field in fields(cls)}
        if not isinstance(content, Mapping) or set(content) - known:
            got = sorted(set(content) - known) if isinstance(content, Mapping) else content
            raise ValueError(f"the format of the data has unknown fields: {got}")
        try:
            values: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in content.items()
            }
            if values.get("tokenizer") is not None:
                values["tokenizer"] = Tokenizer(**values["tokenizer"])
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"the format of the data is damaged: {error}") from error

    def _check(self, x: Tensor) -> None:
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(
                f"x must have shape (batch, {', '.join(map(str, self.shape))}), "
                f"got {tuple(x.shape)}"
            )

    def _along(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        """The numbers along dimension 1 of a batch."""
        return like.new_tensor(values).reshape(-1, *(1,) * (len(self.shape) - 1))


def choices(name: str, names: Sequence[str]) -> str:
    """The end of an error that says what can be chosen in place of ``name``."""
    close = get_close_matches(name, names, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{meant}there {'is' if len(names) == 1 else 'are'} {_some(names)}"


def _some(values: Sequence[Any]) -> str:
    """The first ones of many."""
    rest = len(values) - _LISTED
    return ", ".join(map(str, values[:_LISTED])) + (f" and {rest} more" if rest > 0 else "")


def _tokens(x: Tensor) -> Tensor:
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"x must be integer tokens, got {x.dtype}")
    return x.long()


def _wide(x: Tensor) -> torch.dtype:
    # the GPUs of Apple have no float64
    return torch.float32 if x.device.type == "mps" else torch.float64


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
