"""Steering of token simulations: known tokens, and guidance by the field's own conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as field_of
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from fluvial.core.arguments import kind_of
from fluvial.core.categorical.draws import (
    check_prediction,
    check_tokens,
    real_number,
    tensor_kind,
)
from fluvial.core.categorical.predictions import check_clean
from fluvial.core.protocols import Field, Run, State, Steering


@dataclass
class Infilling(Steering):
    """Known tokens replace those of every clean prediction, and of the sample, exactly.

    On an absorbing path they are visible throughout: begin with `place`, after each step they are
    put back. On other paths they are noised with the rest, as the field expects it.

    Args:
        known: (batch, *event) int64, or (1, *event) for all rows; any token where not known.
        where: bool, of the same shape; True where known.

    Raises:
        TypeError: ``known`` is not int64 or ``where`` is not bool.
        ValueError: their shapes differ; in use, from that of the state, or ``known`` holds tokens
            that are none of the data (on the CPU).
    """

    known: Tensor
    where: Tensor

    def __post_init__(self) -> None:
        kinds = (
            getattr(self.known, "dtype", None),
            getattr(self.where, "dtype", None),
        )
        if kinds != (torch.int64, torch.bool):
            raise TypeError(
                "known must be int64 and where bool, got "
                f"{tensor_kind(self.known)} and {tensor_kind(self.where)}"
            )
        if self.known.shape != self.where.shape:
            raise ValueError(
                f"known has shape {tuple(self.known.shape)}, where {tuple(self.where.shape)}"
            )

    def place(self, x: Tensor) -> Tensor:
        """``x`` with the known tokens."""
        if not isinstance(x, Tensor) or x.dtype != torch.int64:
            raise TypeError(f"x must be int64 tokens, got {tensor_kind(x)}")
        self._check(x.shape)
        return torch.where(self.where.to(x.device), self.known.to(x.device), x)

    def clean(self, clean: State, x: State, aim: Any, run: Run) -> State:
        clean = cast(Tensor, clean)
        check_prediction(clean, cast(Tensor, x), clean.shape[-1] if _floats(clean) else 0)
        if not clean.is_floating_point():
            return self.place(clean)
        self._check(clean.shape[:-1])
        where = self.where.to(clean.device)
        tokens = torch.where(where, self.known.to(clean.device), 0)
        check_tokens(tokens, clean.shape[-1], None, name="known")
        known = functional.one_hot(tokens, clean.shape[-1]).to(clean)
        return torch.where(where.unsqueeze(-1), known, clean)

    def after(self, x: State, clean: State, aim: Any, run: Run) -> tuple[State, Any, Tensor | None]:
        if getattr(run.path, "mask_token", None) is not None:
            x = self.place(cast(Tensor, x))
        return x, aim, None

    def end(self, x0: State, aim: Any) -> State:
        return self.place(cast(Tensor, x0))

    def _check(self, shape: torch.Size) -> None:
        if self.known.shape[1:] != shape[1:] or len(self.known) not in (1, shape[0]):
            raise ValueError(
                f"known must have shape {tuple(shape)} or {(1, *shape[1:])}, got "
                f"{tuple(self.known.shape)}"
            )


def _floats(clean: object) -> bool:
    return isinstance(clean, Tensor) and clean.is_floating_point() and clean.ndim > 0


@dataclass
class TokenGuidance(Steering):
    """p ∝ p_null^(1 - scale) p_cond^scale, of clean predictions: guidance in logarithms.

    `fluvial.core.steering.guidance.ClassifierFree` would add probabilities, which can be negative.
    A class that the conditional field excludes stays excluded.

    Args:
        scale: 1 is the conditional field, called alone; above 1 sharpens.
        null: conditions of the unconditional call; those not named keep their values.

    Raises:
        ValueError: ``scale`` is not finite, ``null`` names no condition; where the field is bent,
            it does not predict "clean"; in the first call, predictions that are no probabilities.
        TypeError: ``scale`` is no number, ``null`` no mapping.
    """

    scale: float
    null: Mapping[str, Any] = field_of(default_factory=lambda: {"label": None})

    def __post_init__(self) -> None:
        real_number("scale", self.scale)
        if not isinstance(self.null, Mapping):
            raise TypeError(f"null must map names to conditions, got {kind_of(self.null)}")
        if not abs(self.scale) < float("inf"):
            raise ValueError(f"scale must be finite, got {self.scale}")
        if not self.null:
            raise ValueError("null must name the conditions to drop, got an empty mapping")

    def bend(self, field: Field) -> Field:
        if field.predicts != "clean":
            raise ValueError(
                f"TokenGuidance needs a field that predicts 'clean', got {field.predicts!r}; see "
                "convert"
            )
        return field if self.scale == 1 else _Guided(field, self.scale, self.null)


@dataclass(frozen=True)
class _Guided:
    field: Field
    scale: float
    null: Mapping[str, Any]
    predicts: str = "clean"
    _seen: list[bool] = field_of(default_factory=list, init=False, repr=False, compare=False)

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        conditional: Tensor = self.field(x, t, **cond)
        free: Tensor = self.field(x, t, **{**cond, **self.null})
        if not self._seen:  # what is normalised below is not seen to be none later on
            for p in (conditional, free):
                check_clean(p, x, cond.get("mask"))
            self._seen.append(True)
        tiny = torch.finfo(free.dtype).tiny
        # the logarithms of what both exclude cancel
        one, none = conditional.clamp(min=tiny).log(), free.clamp(min=tiny).log()
        logits = none + self.scale * (one - none)
        # a NaN is no class that is excluded
        return torch.where(conditional <= 0, -torch.inf, logits).softmax(-1)
