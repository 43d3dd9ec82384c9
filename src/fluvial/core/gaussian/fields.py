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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fluvial.core.gaussian.paths import AlphaSigmaPath, numbers, rate_numbers
from fluvial.core.protocols import Field, GaussianPath, Run, Steering
from fluvial.core.scales import Scalar

KINDS = ("clean", "noise", "velocity", "score")


def predict(field: Field, x: Tensor, t: Tensor, **cond: Any) -> tuple[str, Tensor]:
    """(kind, value) of a field at (x, t); a mean velocity is asked for u(x, t, t), its limit v.

    Raises:
        TypeError: ``x`` is not floating.
        ValueError: an unknown kind, or a value of another shape than ``x``, which would broadcast.
    """
    if not x.is_floating_point():
        raise TypeError(f"x must be floating, got {x.dtype}")
    if field.predicts == "mean_velocity":
        kind, value = "velocity", field(x, t, **{**cond, "s": t})
    else:
        kind = _check(field.predicts)
        value = field(x, t, **cond)
    if value.shape != x.shape:
        raise ValueError(f"the field returned {tuple(value.shape)} for x of {tuple(x.shape)}")
    return kind, value.to(x.dtype)  # under autocast a network returns another


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


# What samplers see: predictions at one time for all rows, where coefficients are numbers of Python.


class Prediction:
    """What a field predicts at (x, t), t of shape () on the host: any kind of it, on demand.

    On a path with one alpha and one sigma for all rows, each kind is a x + b value, with a and b
    computed in double precision, in at most two passes over x. On other paths it is what `ends` and
    `express` make of it.

    Attributes:
        alpha_sigma: the two numbers at t, or None on other paths.
    """

    _clean: Tensor | None = None
    _pair: tuple[float, float] | None = None
    _asked = False
    _weights: tuple[float, float, float, float] | None = None

    def __init__(
        self,
        kind: str,
        value: Tensor,
        x: Tensor,
        t: Tensor,
        path: GaussianPath,
        cond: Mapping[str, Any],
    ) -> None:
        self.kind, self.value, self.x, self.t, self.path, self.cond = kind, value, x, t, path, cond
        if kind == "clean":
            self._clean = value

    @property
    def alpha_sigma(self) -> tuple[float, float] | None:
        if not self._asked:
            self._pair, self._asked = alpha_sigma(self.path, self.t, self.cond), True
        return self._pair

    @property
    def rates(self) -> tuple[float, float]:
        """(alpha', sigma'), where `alpha_sigma` is not None."""
        if getattr(type(self.path), "rates", None) is AlphaSigmaPath.rates:
            return rate_numbers(cast(AlphaSigmaPath, self.path), float(self.t))
        return cast(tuple[float, float], _numbers(self.path.rates(self.t, **self.cond)))

    @property
    def clean(self) -> Tensor:
        if self._clean is None:
            self._clean = self.ends()[0] if self.alpha_sigma is None else self.mix(1.0, 0.0)
        return self._clean

    @property
    def velocity(self) -> Tensor:
        if self.kind == "velocity":
            return self.value
        if self.alpha_sigma is None:
            return express("velocity", *self.ends(), self.t, self.path, **self.cond)
        return self.mix(*self.rates)

    def ends(self) -> tuple[Tensor, Tensor]:
        """(clean, noise)."""
        if self.alpha_sigma is None:
            return ends(self.kind, self.value, self.x, self.t, self.path, **self.cond)
        return self.clean, self.value if self.kind == "noise" else self.mix(0.0, 1.0)

    def frozen(self, s: Tensor) -> Tensor:
        """M_s clean + L_s noise: where the flow is at s if both ends stay as they are predicted."""
        pair = alpha_sigma(self.path, s, self.cond)
        if pair is not None and self.alpha_sigma is not None:
            return self.mix(*pair)
        scale, level = self.path.marginal(s, **self.cond)
        clean, noise = self.ends()
        return scale @ clean + level @ noise

    def mix(self, on_clean: float, on_noise: float, on_x: float = 0.0) -> Tensor:
        """``on_clean`` clean + ``on_noise`` noise + ``on_x`` x, where `alpha_sigma` is not None."""
        if self._weights is None:
            self._weights = self._solve()
        clean_x, clean_value, noise_x, noise_value = self._weights
        return combine(
            on_x + on_clean * clean_x + on_noise * noise_x,
            self.x,
            on_clean * clean_value + on_noise * noise_value,
            self.value,
        )

    def _solve(self) -> tuple[float, float, float, float]:
        """(a, b, c, d) with clean = a x + b value and noise = c x + d value, as in `ends`."""
        alpha, sigma = cast(tuple[float, float], self.alpha_sigma)
        match self.kind:
            case "clean":
                back = _inverse(sigma)
                return 0.0, 1.0, back, -alpha * back
            case "noise":
                back = _inverse(alpha)
                return back, -sigma * back, 0.0, 1.0
            case "score":
                back = _inverse(alpha)
                return back, sigma * sigma * back, 0.0, -sigma
        alpha_rate, sigma_rate = self.rates
        back = _inverse(alpha * sigma_rate - sigma * alpha_rate)
        return sigma_rate * back, -sigma * back, -alpha_rate * back, alpha * back


def predicted(x: Tensor, run: Run) -> Prediction:
    """The field's prediction at (x, run.t), its clean end corrected by the steering."""
    path = cast(GaussianPath, run.path)
    kind, value = predict(run.field, x, run.t, **run.cond)
    guess = Prediction(kind, value, x, run.t, path, run.cond)
    if getattr(run.steer.clean, "__func__", None) is Steering.clean:  # corrects nothing
        return guess
    clean = cast(Tensor, run.clean(guess.clean, x))
    if clean is guess.clean:
        return guess
    return Prediction("clean", clean, x, run.t, path, run.cond)


def alpha_sigma(path: Any, t: Tensor, cond: Mapping[str, Any]) -> tuple[float, float] | None:
    """(alpha, sigma) at t, or None where there is not one of each for all rows."""
    if t.ndim == 0 and getattr(type(path), "marginal", None) is AlphaSigmaPath.marginal:
        return numbers(path, float(t))
    return _numbers(path.marginal(t, **cond))


def scalars(path: Any, t: Tensor, cond: Mapping[str, Any], sampler: str) -> tuple[float, float]:
    """`alpha_sigma` for a sampler that needs it.

    Raises:
        ValueError: the path's coefficients are matrices, or differ by row.
    """
    pair = alpha_sigma(path, t, cond)
    if pair is None:
        raise ValueError(
            f"{sampler} needs a path with one alpha and one sigma for all rows, got "
            f"{type(path).__name__}"
        )
    return pair


def _numbers(scales: tuple[Any, Any]) -> tuple[float, float] | None:
    for scale in scales:
        if not (isinstance(scale, Scalar) and scale.value.ndim == 0):
            return None
    return float(scales[0].value), float(scales[1].value)


def combine(a: float, x: Tensor, b: float, y: Tensor) -> Tensor:
    """a x + b y, a new tensor, in as few passes as there can be."""
    if a == 0:
        return torch.mul(y, b)
    if b == 0:
        return torch.mul(x, a)
    if a == 1:
        return torch.add(x, y, alpha=b)
    if b == 1:
        return torch.add(y, x, alpha=a)
    return torch.mul(x, a).add_(y, alpha=b)


def _inverse(x: float) -> float:
    return 1 / x if x else 0.0


def _check(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind
