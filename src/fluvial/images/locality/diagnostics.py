"""How far the denoisers of networks and of data sets agree, and what an output looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fluvial.core.protocols import Field


class Match(NamedTuple):
    """Agreement of images with reference images, (batch,) each, in float64.

    r2 = 1 - sum (a - b)^2 / (d var(b)) with b the reference, mse the mean of (a - b)^2, correlation
    that of a and b over the d coordinates. Both are NaN, r2 also -inf, where b is constant.
    """

    r2: Tensor
    mse: Tensor
    correlation: Tensor


def agreement(images: Tensor, reference: Tensor, *, divisor: int = 1) -> Match:
    """`Match` of ``images`` (batch, *event) with ``reference``.

    Args:
        divisor: var(b) divides by d - ``divisor``; 1 as published, 0 for the usual R^2.

    Raises:
        ValueError: the shapes differ, or there are no rows of more numbers than ``divisor``.
    """
    if images.shape != reference.shape or images.ndim < 2 or images[:1].numel() <= divisor:
        raise ValueError(
            f"images and reference must have one shape (batch, *event) of more than {divisor} "
            f"numbers a row, got {tuple(images.shape)} and {tuple(reference.shape)}"
        )
    a, b = (value.detach().flatten(1).double() for value in (images, reference))
    error = (a - b).square().sum(1)
    size = a.shape[1]
    left, right = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    spread = right.square().sum(1)
    correlation = (left * right).sum(1) / (left.square().sum(1) * spread).sqrt()
    return Match(1 - error / (size * spread / (size - divisor)), error / size, correlation)


@torch.no_grad()
def match(field: Field, reference: Field, x: Tensor, t: Tensor) -> Match:
    """How well ``field`` predicts the clean images that ``reference`` sees in the same states.

    Args:
        field, reference: that predict ``"clean"``; `fluvial.core.gaussian.fields.convert` makes
            such of others.
        x: (batch, *event), states at ``t``.
        t: () or (batch,). With hardly any signal left, an error of a network that predicts noise is
            multiplied by 1 / alpha: compare where alpha^2 is in [0.05, 0.995].

    Raises:
        ValueError: a field predicts something else.
    """
    for name, one in (("field", field), ("reference", reference)):
        if one.predicts != "clean":
            raise ValueError(
                f"{name} must predict 'clean', got {one.predicts!r}; convert(field, 'clean', path) "
                "makes one"
            )
    return agreement(field(x, t), reference(x, t))


def sensitivity(field: Field, x: Tensor, t: Tensor, index: int | Sequence[int]) -> Tensor:
    """Rows of the Jacobian d field(x, t)_m / dx: what coordinate m of the output looks at.

    For a field that predicts ``"clean"``: of the optimal denoiser J = (alpha / sigma^2) Cov(x_0 |
    x_t), of the Wiener filter W / alpha. By reverse-mode differentiation, one pass a coordinate; a
    field must treat the rows of a batch apart from one another.

    Args:
        field: any that autograd can differentiate, networks too.
        x: (batch, *event).
        t: () or (batch,).
        index: m, in the flattened event; or several.

    Returns:
        (batch, *event); of several coordinates (batch, len(index), *event).

    Raises:
        ValueError: an index out of range, or a field whose output does not depend on x.
    """
    indices = [index] if isinstance(index, int) else [int(m) for m in index]
    size = x[0].numel()
    if not indices or not all(-size <= m < size for m in indices):
        raise ValueError(f"index must lie in [0, {size}), got {index}")
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        output = field(x, t).flatten(1)
        if not output.requires_grad:
            raise ValueError("field must depend on x in a way that autograd can differentiate")
        rows = [
            torch.autograd.grad(output[:, m].sum(), x, retain_graph=k + 1 < len(indices))[0]
            for k, m in enumerate(indices)
        ]
    return rows[0] if isinstance(index, int) else torch.stack(rows, 1)


def radius(rows: Tensor, index: int) -> Tensor:
    """sum_n |J_mn| dist(m, n) / sum_n |J_mn|: how far a coordinate looks, in pixels.

    Args:
        rows: (..., channels, height, width), rows m of Jacobians or of gains.
        index: m, in the flattened event. Channels of one pixel are at distance 0.

    Returns:
        (...): NaN where a row is 0.
    """
    height, width = rows.shape[-2:]
    place = index % (height * width)
    down = torch.arange(height, dtype=rows.dtype, device=rows.device) - place // width
    across = torch.arange(width, dtype=rows.dtype, device=rows.device) - place % width
    distance = torch.hypot(*torch.broadcast_tensors(down[:, None], across))
    weight = rows.abs().sum(-3)
    return (weight * distance).sum((-2, -1)) / weight.sum((-2, -1))


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """a . b / (|a| |b|) over all but the first dimension, (batch,): of Jacobian and Wiener rows."""
    return torch.cosine_similarity(a.flatten(1), b.flatten(1), dim=1)
