"""The exact field of a finite set of fields, and how samples are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fluvial.core.gaussian.paths import AlphaSigmaPath, Linear
from fluvial.core.protocols import per_row
from fluvial.core.steering.projection import Constraint
from fluvial.physics.constraints import residual_norms


class EmpiricalDenoiser:
    """E[x_0 | x_t] for x_0 uniform over given rows: the field that a perfect training would find.

        x_hat = sum_i w_i x_i,   w = softmax_i (alpha <x, x_i> - alpha^2 |x_i|^2 / 2) / sigma^2.

    Args:
        rows: (n, *shape), floating.
        path: alpha and sigma.

    Raises:
        ValueError: no rows, or not finite.
    """

    predicts = "clean"

    def __init__(self, rows: Tensor, path: AlphaSigmaPath = Linear()) -> None:  # noqa: B008
        if rows.ndim < 2 or not len(rows) or not bool(rows.isfinite().all()):
            raise ValueError(f"rows must be (n, *shape), finite, got shape {tuple(rows.shape)}")
        self.rows, self.path = rows.flatten(1), path
        self.squares = self.rows.square().sum(1)

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        rows = self.rows.to(x)
        time = per_row(t, x)
        alpha, sigma = self.path.alpha(time), self.path.sigma(time)
        # at sigma = 0 the weights go to the nearest row
        level = sigma.square().clamp(min=torch.finfo(x.dtype).tiny ** 0.5)
        logits = alpha[:, None] * (x.flatten(1) @ rows.T)
        logits = logits - alpha[:, None].square() * self.squares.to(x) / 2
        weights = (logits / level[:, None]).softmax(1)
        return (weights @ rows).reshape(x.shape)


def field_scores(
    samples: Tensor,
    reference: Tensor,
    constraint: Constraint,
    *,
    features: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Any]:
    """How samples of one condition compare with reference fields that share it.

    Args:
        samples, reference: (rows, *shape), two rows or more.
        constraint: of the condition.
        features: (rows, *shape) to (rows, d), for a Fréchet distance: the paper takes those of a
            pretrained transformer of equations; without, there is none.

    Returns:
        ``mmse`` and ``smse``, mean squared differences over the grid of the means and of the
        standard deviations; ``spread``, the ratio of the root mean variances; ``low`` and ``high``
        of the samples, for bounds that a projection may overstep; ``residual``, see
        `residual_norms`; ``frechet`` with ``features``.

    Raises:
        ValueError: shapes that differ, or fewer than two rows.
    """
    if samples.shape[1:] != reference.shape[1:] or min(len(samples), len(reference)) < 2:
        raise ValueError(
            "need two rows or more of one shape, got samples "
            f"{tuple(samples.shape)} and reference {tuple(reference.shape)}"
        )
    u, v = samples.double(), reference.double()
    found: dict[str, Any] = {
        "mmse": float((u.mean(0) - v.mean(0)).square().mean()),
        "smse": float((u.std(0) - v.std(0)).square().mean()),
        "spread": float((u.var(0).mean() / v.var(0).mean()).sqrt()),
        "low": float(u.min()),
        "high": float(u.max()),
        "residual": residual_norms(constraint, samples),
    }
    if features is not None:
        from fluvial.metrics import frechet_distance

        found["frechet"] = float(frechet_distance(features(samples), features(reference)))
    return found


def worst_residual(scores: Mapping[str, Any]) -> float:
    """max |h| over all equations of `field_scores`."""
    return max((one["max"] for one in scores["residual"].values()), default=0.0)
