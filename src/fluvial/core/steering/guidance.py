"""Guidance of a field by its own conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fluvial.core.protocols import Field, Steering, left_broadcast


@dataclass
class ClassifierFree(Steering):
    """f_w = f(x, t | null) + scale (f(x, t | cond) - f(x, t | null)) for t inside ``interval``.

    Outside the interval the conditional field is used alone, at half the price (Ho and Salimans,
    2022; Kynkäänniemi et al., NeurIPS 2024). The kinds of a Gaussian path are affine in each
    other, so guiding any of them guides all.

    Args:
        scale: 1 is the conditional field, called alone; 0 the unconditional one; above 1 sharpens.
        null: conditions of the unconditional call, such as ``{"label": None}``; those not named
            keep their values.
        interval: (low, high), times at which to guide.

    Raises:
        ValueError: ``interval`` is not within [0, 1] or not ordered, ``scale`` is not finite,
            ``null`` names no condition.
    """

    scale: float
    null: Mapping[str, Any] = field(default_factory=lambda: {"label": None})
    interval: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            raise ValueError(f"interval must satisfy 0 <= low <= high <= 1, got {self.interval}")
        if not abs(self.scale) < float("inf"):
            raise ValueError(f"scale must be finite, got {self.scale}")
        if not self.null:
            raise ValueError("null must name the conditions to drop, got an empty mapping")

    def bend(self, field: Field) -> Field:
        if self.scale == 1:
            return field
        return _Guided(field, self.scale, self.null, self.interval)


@dataclass(frozen=True)
class _Guided:
    field: Field
    scale: float
    null: Mapping[str, Any]
    interval: tuple[float, float]

    @property
    def predicts(self) -> str:
        return self.field.predicts

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        conditional: Tensor = self.field(x, t, **cond)
        low, high = self.interval
        inside = (t >= low) & (t <= high)
        if t.ndim == 0 and not inside:
            return conditional
        unconditional: Tensor = self.field(x, t, **{**cond, **self.null})
        guided = unconditional + self.scale * (conditional - unconditional)
        return torch.where(left_broadcast(inside, x), guided, conditional) if t.ndim else guided
