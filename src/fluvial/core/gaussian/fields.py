"""Exact conversion between what fields predict: clean, noise, velocity, score.

Given x = M x_0 + L eps, any one prediction fixes both ends, and the ends fix every other kind:

======== ============================= ==============================
kind     value from the ends           the ends from the value
======== ============================= ==============================
clean    x_0                           eps = L^-1 (x - M x_0)
noise    eps                           x_0 = M^-1 (x - L eps)
score    -L^-T eps                     eps = -L^T score, then as noise
velocity M' x_0 + L' eps               x_0 = D^-1 (L' x - L v), eps = D^-1 (M v - M' x)
======== ============================= ==============================

with D = M L' - L M', which is 1 on the linear path and pi / 2 on the cosine path: conversions from
a velocity are exact at both ends. Where M or L is singular (the clean end of a path knows no noise,
the noise end of some knows no data) the inverse is the pseudo-inverse, so the undetermined end is 0
and everything stays finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fluvial.core.protocols import Field, GaussianPath
from fluvial.core.scales import Scalar

KINDS = ("clean", "noise", "velocity", "score")


def predict(field: Field, x: Tensor, t: Tensor, **cond: Any) -> tuple[str, Tensor]:
    """(kind, value) of a field at (x, t); a mean velocity is asked for u(x, t, t), its limit v."""
    if field.predicts == "mean_velocity":
        return "velocity", field(x, t, **{**cond, "s": t})
    _check(field.predicts)
    return field.predicts, field(x, t, **cond)


def ends(
    kind: str, value: Tensor, x: Tensor, t: Tensor, path: GaussianPath, **cond: Any
) -> tuple[Tensor, Tensor]:
    """(clean, noise) that a prediction stands for.

    Raises:
        ValueError: ``kind`` is none of `KINDS`, or a velocity on a path whose scales are not
            scalars: where noise enters some coordinates only, it does not determine the ends.
    """
    scale, level = path.marginal(t, **cond)
    match _check(kind):
        case "clean":
            return value, level.solve(x - scale @ value)
        case "noise":
            return scale.solve(x - level @ value), value
        case "score":
            noise = -(level.T @ value)
            return scale.solve(x - level @ noise), noise
    scale_rate, level_rate = path.rates(t, **cond)
    if not isinstance(scale, Scalar):
        raise ValueError(
            f"a velocity does not determine the clean end on {type(path).__name__}; use a field "
            "that predicts 'clean', 'noise' or 'score'"
        )
    turn = scale @ level_rate - level @ scale_rate
    return (
        turn.solve(level_rate @ x - level @ value),
        turn.solve(scale @ value - scale_rate @ x),
    )


def express(
    kind: str, clean: Tensor, noise: Tensor, t: Tensor, path: GaussianPath, **cond: Any
) -> Tensor:
    """The prediction of a kind that two ends stand for."""
    match _check(kind):
        case "clean":
            return clean
        case "noise":
            return noise
        case "score":
            return -path.marginal(t, **cond)[1].T.solve(noise)
    scale_rate, level_rate = path.rates(t, **cond)
    return scale_rate @ clean + level_rate @ noise


def convert(field: Field, kind: str, path: GaussianPath) -> Field:
    """The same field, predicting ``kind``. A field that does already comes back as it is."""
    _check(kind)
    if field.predicts != "mean_velocity":
        _check(field.predicts)
    return field if field.predicts == kind else Converted(field, kind, path)


@dataclass(frozen=True)
class Converted:
    """A field seen as one of another kind; made by `convert`."""

    field: Field
    predicts: str
    path: GaussianPath

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        kind, value = predict(self.field, x, t, **cond)
        if kind == self.predicts:
            return value
        clean, noise = ends(kind, value, x, t, self.path, **cond)
        return express(self.predicts, clean, noise, t, self.path, **cond)


def _check(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind
