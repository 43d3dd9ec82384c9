"""Pairings of source rows with target rows, fixed before a training."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fluvial.core.couplings import Independent, OptimalTransport
from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import Linear
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Field, Noise, Sampler
from fluvial.core.simulate import simulate
from fluvial.core.time import uniform_grid

Kind = Literal["ot", "shuffled", "independent", "rotated", "reflow"]
KINDS = ("ot", "shuffled", "independent", "rotated", "reflow")

MOST = 5000
"""Rows assigned to each other exactly; more are split into blocks, since time grows as N^3."""


def couple(
    x_source: Tensor,
    x_target: Tensor | None = None,
    kind: Kind = "ot",
    *,
    phi: float | None = None,
    field: Field | None = None,
    steps: int = 100,
    noise: Noise = KeyedNoise(0),
) -> tuple[Tensor, Tensor]:
    """Row i of the result's source and row i of its target are a pair. The source keeps its order.

    =========== ===============================================================================
    kind        partner of source row x_1
    =========== ===============================================================================
    ot          that of the exact assignment of least sum of |x_1 - x_0|^2; beyond 5,000 rows the
                assignment is exact within blocks of at most 5,000, drawn at random
    shuffled    the optimal partner of a row drawn at random, each once: ``ot`` after one random
                permutation, so that both marginals stay and the map is destroyed
    independent any row of the target, each used once
    rotated     mu + M^(1/2) R_phi x_1, mu and M the mean and covariance of ``x_target`` (0 and I
                without one), R_phi a rotation by ``phi`` in the planes of coordinates (0, 1),
                (2, 3), ...
    reflow      where the flow of ``field`` takes x_1, by ``steps`` of Euler's method
    =========== ===============================================================================

    Permutations are drawn once, from ``noise``. Permuting anew for every batch is another thing:
    pairs are then independent draws, and there is no pairing to memorise.

    Args:
        x_source: (rows, *event), floating and finite.
        x_target: as many rows of the same shape.
        kind: of pairing.
        phi: angle in radians.
        field: a velocity field, for ``reflow``.
        steps: of Euler's method, for ``reflow``.
        noise: keyed, of the permutations and blocks.

    Raises:
        ValueError: shapes or numbers of rows differ, a value is not finite, no rows; ``rotated``
            without a finite ``phi`` or in an odd number of dimensions; ``reflow`` without a field;
            an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    _check(x_source, x_target)
    if kind == "rotated":
        return x_source, _rotated(x_source, x_target, phi)
    if kind == "reflow":
        if field is None:
            raise ValueError("field is missing: kind 'reflow' needs the flow that makes the pairs")
        return x_source, transport(field, x_source, steps=steps)
    if x_target is None:
        raise ValueError(f"x_target is missing: kind {kind!r} pairs two sets of rows")
    if kind == "independent":
        return x_source, x_target[Independent()(x_source, x_target, noise)]
    partners = x_target[_assigned(x_source, x_target, noise)]
    if kind == "shuffled":
        partners = partners[Independent()(partners, partners, noise)]
    return x_source, partners


def transport(
    field: Field,
    x: Tensor,
    *,
    steps: int = 100,
    sampler: Sampler | None = None,
    noise: Noise = KeyedNoise(0),
    **cond: Any,
) -> Tensor:
    """Where the flow takes source rows: from t = 1 to t = 0 in equal steps, by Euler's method.

    Args:
        field: a velocity field; other kinds are read along the linear path.
        x: (rows, *event), at t = 1.
        steps: equal steps.
        sampler: another solver.
        noise: for solvers and fields that draw.
        **cond: conditions of the field.
    """
    solver = Euler() if sampler is None else sampler
    end = simulate(x, uniform_grid(steps), solver, Linear(), field, noise, **cond)
    return cast(Tensor, end)


def rotation(phi: float, dim: int) -> Tensor:
    """R_phi: the rotation by ``phi`` in each of the planes (0, 1), (2, 3), ...; float64.

    Raises:
        ValueError: ``phi`` is not finite, or ``dim`` not even and positive.
    """
    if not math.isfinite(phi):
        raise ValueError(f"phi must be a finite angle in radians, got {phi}")
    if dim < 2 or dim % 2:
        raise ValueError(f"phi rotates planes: the number of dimensions must be even, got {dim}")
    cos, sin = math.cos(phi), math.sin(phi)
    plane = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
    return torch.block_diag(*[plane] * (dim // 2))


def root(matrix: Tensor) -> Tensor:
    """The symmetric root of a covariance (d, d), in float64."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T


def _rotated(x_source: Tensor, x_target: Tensor | None, phi: float | None) -> Tensor:
    if phi is None:
        raise ValueError("phi is missing: kind 'rotated' needs the angle, in radians")
    flat = x_source.flatten(1).double()
    turned = flat @ rotation(phi, flat.shape[1]).to(flat.device).T
    if x_target is not None:
        rows = x_target.flatten(1).double()
        turned = rows.mean(0) + turned @ root(rows.T.cov(correction=0))
    return turned.to(x_source.dtype).reshape(x_source.shape)


def _assigned(x_source: Tensor, x_target: Tensor, noise: Noise) -> Tensor:
    """The partner of every source row: exact, in blocks of nearly equal size."""
    blocks = math.ceil(len(x_source) / MOST)
    if blocks == 1:
        return OptimalTransport()(x_source, x_target, noise)
    like = torch.empty(len(x_source), dtype=torch.float64)
    orders = [noise.uniform(like, tag).argsort() for tag in ("source block", "target block")]
    partners = torch.empty(len(x_source), dtype=torch.int64)
    for ours, theirs in zip(*(order.tensor_split(blocks) for order in orders), strict=True):
        rows = OptimalTransport()(x_source[ours], x_target[theirs], noise)
        partners[ours] = theirs[rows.cpu()]
    return partners.to(x_source.device)


def check_rows(name: str, x: Tensor) -> None:
    """Raise unless ``x`` is floating and finite, (rows, *event), with a row and a coordinate."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a floating tensor, got {got}")
    if x.ndim < 2 or x.numel() == 0:
        raise ValueError(f"{name} needs rows and an event shape, got shape {tuple(x.shape)}")
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or infinite values")


def check_pairs(x_source: Tensor, x_target: Tensor) -> None:
    """Raise unless both are rows of one shape, in the same number."""
    check_rows("x_source", x_source)
    check_rows("x_target", x_target)
    if x_source.shape != x_target.shape:
        raise ValueError(
            "x_source and x_target must have the same number of rows of one shape, got "
            f"{tuple(x_source.shape)} and {tuple(x_target.shape)}"
        )


def _check(x_source: Tensor, x_target: Tensor | None) -> None:
    if x_target is None:
        check_rows("x_source", x_source)
    else:
        check_pairs(x_source, x_target)
