"""Has a flow stored its training pairs? The distances to look at in place of the loss."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fluvial.core.protocols import Sampler
from fluvial.trust.rectified_flow_memorization.fields import MEMORY, check_noise
from fluvial.trust.rectified_flow_memorization.pairs import check_pairs, transport


@dataclass(frozen=True)
class MemorizationReport:
    """Where training sources end, against their training partner and the optimal one.

    Args:
        to_paired: mean L2 distance of the end points to the partners of the training.
        to_paired_std: deviation of the same over rows.
        to_ot: mean L2 distance to the partners of the optimal pairing.
        to_ot_std: deviation of the same over rows.
        paired_to_ot: mean L2 distance between the two partners: the scale of the others.
        ratio: ``to_paired`` over ``to_ot``; infinite where the optimal partner is met exactly.
        verdict: ``"memorised"`` if ``to_paired`` is below ``to_ot``; ``"undecidable"`` where the
            two partners are the same rows.
        relative_noise: sigma sqrt(d) over ``paired_to_ot``: about 0.1 in the paper's experiments;
            NaN where the partners are the same.
        steps: of the integration.
    """

    to_paired: float
    to_paired_std: float
    to_ot: float
    to_ot_std: float
    paired_to_ot: float
    ratio: float
    verdict: Literal["memorised", "not memorised", "undecidable"]
    relative_noise: float
    steps: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {self.to_paired:.3g} +- {self.to_paired_std:.3g} to the training "
            f"partner, {self.to_ot:.3g} +- {self.to_ot_std:.3g} to the optimal one (ratio "
            f"{self.ratio:.3g}; the partners are {self.paired_to_ot:.3g} apart), in {self.steps} "
            f"steps, at relative noise {self.relative_noise:.3g}"
        )


def memorization_report(
    model: Any,
    x_source: Tensor,
    x_target: Tensor,
    x_ot: Tensor,
    *,
    steps: int = 100,
    sampler: Sampler | None = None,
    interpolant_noise: float | None = None,
) -> MemorizationReport:
    """Integrate from the training sources and measure where they end.

    Args:
        model: a `PairedFlow` or anything with ``translate(x_source, steps=, sampler=)``, or a
            velocity field.
        x_source: (rows, *event), the sources it was trained on.
        x_target: their partners in training.
        x_ot: their partners under the optimal pairing (``couple(..., "ot")``).
        steps: equal steps.
        sampler: Euler's method by default.
        interpolant_noise: of the training; by default the model's own.

    Warns:
        RuntimeWarning: a step is not shorter than the layer, about sigma over the deviation of the
            sources, in which noise turns the flow where lines cross: such steps jump over it, and
            the result looks memorised.

    Raises:
        ValueError: shapes differ, values are not finite, ``steps`` is not positive.
    """
    check_pairs(x_source, x_target)
    check_pairs(x_source, x_ot)
    paired_to_ot = _distances(x_target, x_ot)
    path = getattr(model, "path", model)
    if interpolant_noise is None:
        interpolant_noise = float(getattr(path, "interpolant_noise", 0.0))
    check_noise(interpolant_noise)
    layer = interpolant_noise / float(x_source.double().std(correction=0))
    if getattr(path, "interpolant", "constant") == "bridge":
        layer /= 2  # sqrt(t (1 - t)) is at most 1/2
    if 0 < layer <= 1 / steps:
        warnings.warn(
            f"{steps} steps may jump over the layer of width {layer:.3g} that the interpolant's "
            f"noise makes where lines cross: take more than {math.ceil(1 / layer)}, or report both",
            RuntimeWarning,
            stacklevel=2,
        )
    translate: Callable[..., Tensor] | None = getattr(model, "translate", None)
    with torch.no_grad():
        if translate is not None:
            end = translate(x_source, steps=steps, sampler=sampler)
        else:
            end = transport(model, x_source, steps=steps, sampler=sampler)
    to_paired, to_ot = (_distances(end.to(x), x) for x in (x_target, x_ot))
    near, far = float(to_paired.mean()), float(to_ot.mean())
    apart = float(paired_to_ot.mean())
    verdict: Literal["memorised", "not memorised", "undecidable"] = "undecidable"
    if apart:
        verdict = "memorised" if near < far else "not memorised"
    return MemorizationReport(
        to_paired=near,
        to_paired_std=float(to_paired.std(correction=0)),
        to_ot=far,
        to_ot_std=float(to_ot.std(correction=0)),
        paired_to_ot=apart,
        ratio=near / far if far else math.inf,
        verdict=verdict,
        relative_noise=interpolant_noise * math.sqrt(x_source[0].numel()) / apart
        if apart
        else math.nan,
        steps=steps,
    )


def _distances(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() - y.double()).flatten(1).norm(dim=1)


def closest_approach(x_source: Tensor, x_target: Tensor, *, memory: int = MEMORY) -> Tensor:
    """How near each line comes to any other at an equal time, (rows,), float64.

        min over j != i and t of |(1 - t) (x_0^i - x_0^j) + t (x_1^i - x_1^j)|.

    Noise in the interpolant blurs two lines into one only where they come within a few sigma of
    each other. The median is the scale to choose sigma by: for `EmpiricalField` on shuffled pairs
    of N(0, I) with principal components of images, 3 to 8 dimensions, the end points pass from the
    training to the optimal partners about where sigma is this median, and have not left the former
    at a quarter of it. For whole images the median is far above the deviation of the data, and no
    sigma that leaves the data recognisable reaches it. Exact, in blocks.

    Args:
        x_source, x_target: (rows, *event), pairs, at least two.
        memory: bytes that a block may take.

    Raises:
        ValueError: fewer than two pairs, shapes that differ, values that are not finite.
    """
    check_pairs(x_source, x_target)
    if len(x_source) < 2:
        raise ValueError(f"there must be at least two pairs, got {len(x_source)}")
    ends = [x.flatten(1).double() for x in (x_source, x_target)]
    z, y = (x - x.mean(0) for x in ends)
    zz, yy, zy = ((a * b).sum(1) for a, b in ((z, z), (y, y), (z, y)))
    size, closest = max(1, memory // (8 * 8 * len(z))), []
    for rows in torch.arange(len(z)).split(size):
        a, b = z[rows], y[rows]
        # squares and product of the differences of the ends
        far = zz[rows, None] + zz - 2 * a @ z.T
        near = yy[rows, None] + yy - 2 * b @ y.T
        both = zy[rows, None] + zy - a @ y.T - b @ z.T
        spread = far + near - 2 * both  # |difference of the directions|^2
        t = ((near - both) / spread.clamp(min=1e-300)).clamp(0, 1)
        squares = (1 - t).square() * near + t.square() * far + 2 * t * (1 - t) * both
        squares[torch.arange(len(rows)), rows] = math.inf
        closest.append(squares.amin(1).clamp(min=0).sqrt())
    return torch.cat(closest)
