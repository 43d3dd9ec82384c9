"""Regression of what a path knows at (x_t, t): flow matching and diffusion by one objective.

On a path of scalars any prediction fixes the clean one, at given x_t, by an affine map. So an error
of one kind is an error of another times a number that depends on t alone. With e the error of the
clean prediction and r = sigma / alpha,

======== ==========================
kind     its error
======== ==========================
clean    e
noise    -e / r
score    e / (r sigma)
velocity (alpha' - sigma' / r) e
======== ==========================

and the objectives of the literature differ in weights only (Kingma and Gao, NeurIPS 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fluvial.core.couplings import Coupling
from fluvial.core.gaussian.fields import KINDS
from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.protocols import Noise, Objective, Path, left_broadcast, per_row
from fluvial.core.time import Times, Uniform

Weight = Callable[[Tensor, Any], Tensor]
"""(t, path) -> (batch,), t in float64. An attribute ``measure`` says which error it weighs."""

# Ratios are kept within these bounds, so that factors that diverge at an end of the path, and that
# cancel there, do cancel in floating point too.
LEAST, MOST = 2.0**-30, 2.0**30


@dataclass(frozen=True)
class SNR:
    """alpha^2 / sigma^2 on the clean error: the error of the noise (Ho et al., NeurIPS 2020)."""

    measure: ClassVar[str] = "clean"

    def __call__(self, t: Tensor, path: AlphaSigmaPath) -> Tensor:
        return _ratio(path, t) ** -2


@dataclass(frozen=True)
class MinSNR:
    """min(alpha^2 / sigma^2, gamma) on the clean error (Hang et al., ICCV 2023)."""

    gamma: float = 5.0
    measure: ClassVar[str] = "clean"

    def __post_init__(self) -> None:
        if not 0 < self.gamma < math.inf:
            raise ValueError(f"gamma must be positive and finite, got {self.gamma}")

    def __call__(self, t: Tensor, path: AlphaSigmaPath) -> Tensor:
        return (_ratio(path, t) ** -2).clamp(max=self.gamma)


@dataclass(frozen=True)
class TruncatedSNR:
    """max(alpha^2 / sigma^2, 1) on the clean error (Salimans and Ho, ICLR 2022)."""

    measure: ClassVar[str] = "clean"

    def __call__(self, t: Tensor, path: AlphaSigmaPath) -> Tensor:
        return (_ratio(path, t) ** -2).clamp(min=1.0)


@dataclass(frozen=True)
class EDM:
    """(r^2 + std^2) / (r std)^2 on the clean error, r = sigma / alpha (Karras et al., 2022).

    The inverse square of the output scale of `EDMPreconditioned`: its network starts with a loss of
    1 at every t, if ``std`` is the standard deviation of the data.
    """

    std: float = 0.5
    measure: ClassVar[str] = "clean"

    def __post_init__(self) -> None:
        if not 0 < self.std < math.inf:
            raise ValueError(f"std must be positive and finite, got {self.std}")

    def __call__(self, t: Tensor, path: AlphaSigmaPath) -> Tensor:
        return _ratio(path, t) ** -2 + self.std**-2


class Matching(Objective):
    """Learns a field by regression: flow matching, score matching, denoising.

    With x_t and its ends drawn from ``path``, t from ``times``,

        loss = mean over rows of weight(t) * mean over coordinates of (prediction - target)^2,

    where prediction and target are of the kind ``measure``.

    Batches hold ``"x"``, data; ``"x1"``, if the source end is given and not drawn; and conditions,
    any other entries, which go to the network and the path.

    Args:
        network: called as ``network(x, t, **conditions)``, t (batch,).
        path: any; where prediction and measure differ, and for the weights here, one of scalars.
        predicts: what the network predicts, any kind the path has; by default what the network says
            it ``predicts``, or else the velocity.
        measure: the kind of error; by default that which the weight is for, or else ``predicts``.
        weight: (t, path) -> (batch,), a factor of the squared error of kind ``measure``; None is 1.
            Those here are for the clean error.
        times: law of t. A velocity or noise level that diverges at an end of the path needs times
            that stay away from it, such as ``Uniform(1e-3, 1.0)`` for velocities on `VPLinear`.
        coupling: how the ends of a batch are paired; None leaves them as they come, independent
            where the source end is drawn. It pairs within the rows of one call: a batch in parts is
            paired within its parts.
        drop: share of the rows whose conditions are replaced by ``null``, for guidance.
        null: conditions that mean none, such as ``{"label": 10}`` or ``{"context": zeros}``, each
            value shaped as one row or a number; by default the label ``network.num_classes``.

    Raises:
        ValueError: an unknown kind; a weight for another kind of error than ``measure``; kinds that
            differ on a path whose scales are not scalars; ``drop`` outside [0, 1), or positive
            without ``null``.

    Citation: Lipman et al., ICLR 2023; Song et al., ICLR 2021; Ho and Salimans, 2022 (``drop``).
    """

    def __init__(
        self,
        network: nn.Module,
        path: Path,
        *,
        predicts: str | None = None,
        measure: str | None = None,
        weight: Weight | None = None,
        times: Times = Uniform(),  # noqa: B008 (frozen)
        coupling: Coupling | None = None,
        drop: float = 0.0,
        null: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        predicts = str(predicts or getattr(network, "predicts", "velocity"))
        weighed = getattr(weight, "measure", None)
        measure = measure or weighed or predicts
        scalar = isinstance(path, AlphaSigmaPath)  # other paths refuse a kind when asked for it
        for name, kind in (("predicts", predicts), ("measure", measure)):
            if scalar and kind not in KINDS:
                raise ValueError(f"{name} must be one of {', '.join(KINDS)}, got {kind!r}")
        if weighed not in (None, measure):
            raise ValueError(
                f"{type(weight).__name__} weighs the {weighed} error, got measure={measure!r}"
            )
        if not scalar and (weighed or measure != predicts):
            raise ValueError(
                f"{type(path).__name__} has no scalar coefficients: measure what the network "
                f"predicts, {predicts!r}, with a weight of your own, got measure={measure!r}"
            )
        if null is None:
            count = getattr(network, "num_classes", 0)
            null = {"label": count} if count else {}
        if not 0 <= drop < 1 or (drop > 0 and not null):
            raise ValueError(f"need 0 <= drop < 1, and null if drop > 0, got {drop} and {null}")
        self.network, self.path, self.times, self.coupling = network, path, times, coupling
        self.predicts, self.measure, self.weight = predicts, measure, weight
        self.drop, self.null = drop, dict(null)

    @property
    def field(self) -> NetworkField:
        """What was learned."""
        return NetworkField(self.network, self.predicts)

    def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
        """The loss of one batch.

        Returns:
            ``loss``, (); ``error``, the mean squared error of every row, of the kind that the
            network predicts and without a weight; ``t``, the times of the rows.

        Raises:
            ValueError: no ``"x"``; a condition to drop that the batch does not have; a prediction
                of another shape than ``x``.
        """
        if "x" not in batch:
            raise ValueError(f"batch must hold 'x', got {', '.join(batch) or 'nothing'}")
        x0, x1 = batch["x"], batch.get("x1")
        cond = {name: value for name, value in batch.items() if name not in ("x", "x1")}
        if self.coupling is not None:
            x1 = cast(Tensor, self.path.source(x0, noise, **cond)) if x1 is None else x1
            x1 = x1[self.coupling(x0, x1, noise, cond.get("label"))]
        t = self.times(x0, noise)
        cond = self._dropped(cond, t, noise)

        draw = self.path.sample(x0, t, noise, x1, **cond)
        target = cast(Tensor, draw.target(self.predicts))
        prediction = self.network(draw.x, t, **cond)
        if prediction.shape != target.shape:
            raise ValueError(
                f"the network returned {tuple(prediction.shape)} for x of {tuple(target.shape)}"
            )
        error = (prediction - target).square().unsqueeze(1).flatten(1).mean(1)
        factor = self._factor(t.double())
        weight = 1.0 if self.weight is None else self.weight(t.double(), self.path)
        loss = error * torch.as_tensor(factor * weight).to(error)
        return {"loss": loss.mean(), "error": error.detach(), "t": t}

    def _factor(self, t: Tensor) -> Tensor | float:
        """(an error of kind `measure` / the error of kind `predicts`)^2; the network's own error is
        taken, and not converted, since a conversion loses digits near the ends of the path."""
        if self.measure == self.predicts:
            return 1.0
        path = cast(AlphaSigmaPath, self.path)
        return (_per_clean(self.measure, t, path) / _per_clean(self.predicts, t, path)).square()

    def _dropped(self, cond: dict[str, Tensor], t: Tensor, noise: Noise) -> dict[str, Tensor]:
        if self.drop == 0:
            return cond
        missing = sorted(set(self.null) - set(cond))
        if missing:
            raise ValueError(f"batch lacks the conditions to drop: {', '.join(missing)}")
        rows = noise.uniform(t, "drop") < self.drop
        cond = dict(cond)
        for name, none in self.null.items():
            value = cond[name]
            cond[name] = torch.where(
                left_broadcast(rows, value), torch.as_tensor(none).to(value), value
            )
        return cond


@dataclass(frozen=True)
class NetworkField:
    """A network as a field: called with one time a row."""

    network: nn.Module
    predicts: str

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return cast(Tensor, self.network(x, per_row(t, x), **cond))


def _ratio(path: AlphaSigmaPath, t: Tensor) -> Tensor:
    return (path.sigma(t) / path.alpha(t)).clamp(LEAST, MOST)


def _per_clean(kind: str, t: Tensor, path: AlphaSigmaPath) -> Tensor:
    """An error of a kind over that of the clean prediction."""
    ratio = _ratio(path, t)
    match kind:
        case "noise":
            return -1 / ratio
        case "score":
            return 1 / (ratio * path.sigma(t).clamp(min=LEAST))
        case "velocity":
            return path.alpha_rate(t) - path.sigma_rate(t) / ratio
    return torch.ones_like(t)
