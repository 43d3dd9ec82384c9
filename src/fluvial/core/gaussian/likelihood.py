"""Likelihood of data under the probability flow, by the instantaneous change of variables.

Along dx/dt = v(x, t) a density changes by d log p / dt = -div v (Chen et al., NeurIPS 2018; Song
et al., ICLR 2021), so with x_1 where the flow carries x from t = 0 to 1,

    log p(x) = log p_1(x_1) + integral of div v(x_t, t) dt over [0, 1].

The divergence is the trace of the Jacobian: exact, one backward pass a coordinate, or Hutchinson's
estimate E[z^T J z] with E[z z^T] = I, one backward pass a probe (Grathwohl et al., ICLR 2019).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.protocols import Field, GaussianPath, Noise, batch_size
from fluvial.core.time import check_pairs

Derivative = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (x, t) -> (velocity, divergence)


def log_likelihood(
    x: Tensor,
    path: GaussianPath,
    field: Field,
    *,
    noise: Noise | None = None,
    probes: int = 1,
    law: Literal["rademacher", "gaussian"] = "rademacher",
    pairs: Tensor | None = None,
    start: float = 0.0,
    tolerance: float = 1e-5,
    source: Callable[[Tensor], Tensor] | None = None,
    **cond: Any,
) -> Tensor:
    """log p(x) in nats, one a row: exact up to the integration, or unbiased up to it.

    Computed and returned in float32 at least; the field sees the dtype of ``x``. Call under
    ``torch.no_grad()`` where no gradient is wanted.

    Args:
        x: (batch, *event), floating: data at the time ``start``.
        path, field: the field may predict any kind that converts to a velocity along ``path``.
        noise: of the probes, which are the same all along the way, so that what a solver sees is
            smooth in time. None: the exact trace, at the price of one backward pass a coordinate
            and evaluation.
        probes: number of probes a row.
        law: of their entries; the estimate of random signs has the smaller variance.
        pairs: fixed steps of Runge and Kutta's method of order 4, a rising chain that ends at 1,
            such as ``uniform_grid(50, 0.0, 1.0)``; its first time takes the place of ``start``.
            Where the field does not determine the velocity at an end, as one that predicts noise
            does not where alpha = 0, the order is one. None: Dormand and Prince's adaptive method,
            whose steps wait for an accelerator.
        start: where the velocity diverges at t = 0, as on variance-preserving paths unless the
            field was made for it, a small time such as 1e-5; the density is then that of x_start.
        tolerance: absolute and relative, on the worst row of a batch.
        source: x_1 -> log p_1(x_1), (batch,); by default that of the path's source, on a path of
            matrices N(0, L L^T) with the noise level L of ``path.marginal(1)``.
        **cond: passed on to the field.

    Raises:
        TypeError: ``x`` is not floating.
        ValueError: ``x`` has no rows, or on the CPU a value that is not finite; ``pairs`` is no
            rising chain that ends at 1; ``start``, ``tolerance``, ``probes`` or ``law`` is out of
            range; a field of another kind.
    """
    if not x.is_floating_point():
        raise TypeError(f"x must be floating, got {x.dtype}")
    if batch_size(x) == 0 or (x.device.type == "cpu" and not bool(x.isfinite().all())):
        raise ValueError(f"x must hold finite rows, got shape {tuple(x.shape)}")
    if probes < 1 or law not in ("rademacher", "gaussian"):
        raise ValueError(
            f"need probes >= 1 and law 'rademacher' or 'gaussian', got {probes}, {law!r}"
        )
    if not (0 <= start < 1 and 0 < tolerance < math.inf):
        raise ValueError(
            f"need 0 <= start < 1 and a positive tolerance, got {start} and {tolerance}"
        )
    if pairs is not None:
        check_pairs(pairs)
        if not bool((pairs[:, 1] > pairs[:, 0]).all()) or pairs[-1, 1] != 1:
            raise ValueError(f"pairs must rise to 1, got {pairs.tolist()}")

    velocity, dtype = convert(field, "velocity", path), x.dtype
    x = x.to(torch.promote_types(dtype, torch.float32))
    directions = _unit_vectors(x) if noise is None else _probes(x, noise, probes, law)
    count = 1 if noise is None else probes

    def derivative(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        value, pull = cast(
            Any, torch.func.vjp(lambda x: velocity(x.to(dtype), t, **cond).to(x.dtype), x)
        )
        # a loop, and not vmap, under which fused attention has no backward pass
        forms = [_sums(pull(z)[0] * z) for z in directions]
        return value, torch.stack(forms).sum(0) / count

    if pairs is None:
        end, change = _adaptive(derivative, x, start, tolerance)
    else:
        end, change = _fixed(derivative, x, pairs)
    return (_source(path)(end) if source is None else source(end)) + change


def bits_per_dimension(log_p: Tensor, x: Tensor, bin: float) -> Tensor:
    """-log_2 of the probability of a bin, per coordinate: -(log p / d + log bin) / log 2.

    Args:
        log_p: (batch,), log densities of rows from `dequantise`, in nats.
        x: (batch, *event), for its number of coordinates d.
        bin: distance between neighbouring values, in the units of ``x``: 1 / 127.5 for bytes scaled
            as x / 127.5 - 1, and 2 / 256, an offset of 7 bits, where 256 bins tile [-1, 1].

    Raises:
        ValueError: ``bin`` is not positive.
    """
    _check_bin(bin)
    return -(log_p / math.prod(x.shape[1:]) + math.log(bin)) / math.log(2)


def dequantise(x: Tensor, noise: Noise, bin: float) -> Tensor:
    """x + bin (u - 1/2), u ~ U[0, 1): values of a grid become a density constant on its bins.

    The mean of log p over draws is a lower bound of the log-probability of the bins plus
    -d log bin, by Jensen's inequality (Theis et al., ICLR 2016).

    Args:
        x: (batch, *event), floating, each value the middle of its bin.
        bin: width of the bins, in the units of ``x``.

    Raises:
        TypeError: ``x`` is not floating.
        ValueError: ``bin`` is not positive.
    """
    _check_bin(bin)
    return x + bin * (noise.uniform(x, "dequantise") - 0.5)


def _check_bin(bin: float) -> None:
    if not 0 < bin < math.inf:
        raise ValueError(f"bin must be positive and finite, got {bin}")


def _sums(x: Tensor) -> Tensor:
    """Over the coordinates of every row, also where an event is one number."""
    return x.unsqueeze(1).flatten(1).sum(1)


def _unit_vectors(x: Tensor) -> Tensor:
    """(d, batch, *event): coordinate i of every row at once, as rows do not interact."""
    size = math.prod(x.shape[1:])
    unit = torch.eye(size, dtype=x.dtype, device=x.device).reshape(size, 1, *x.shape[1:])
    return unit.expand(size, *x.shape)


def _probes(x: Tensor, noise: Noise, probes: int, law: str) -> Tensor:
    """(probes, batch, *event)."""
    like = x.new_empty(x.shape)
    if law == "gaussian":
        return torch.stack([noise.normal(like, f"probe {i}") for i in range(probes)])
    return torch.stack(
        [
            torch.where(noise.uniform(like, f"probe {i}") < 0.5, -1, 1).to(x.dtype)
            for i in range(probes)
        ]
    )


def _source(path: GaussianPath) -> Callable[[Tensor], Tensor]:
    if isinstance(path, AlphaSigmaPath):
        level: Any = path.source_level
    else:
        level = path.marginal(torch.ones((), dtype=torch.float64))[1]

    def log_density(x: Tensor) -> Tensor:
        squares = _sums(level.solve(x).square())
        size = math.prod(x.shape[1:])
        return -0.5 * (squares + size * math.log(2 * math.pi)) - level.logdet(x)

    return log_density


def _fixed(derivative: Derivative, x: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    change = x.new_zeros(len(x))
    for t, s in pairs.double().cpu():
        h, middle = s - t, (t + s) / 2
        v1, d1 = derivative(x, t)
        v2, d2 = derivative(x + h / 2 * v1, middle)
        v3, d3 = derivative(x + h / 2 * v2, middle)
        v4, d4 = derivative(x + h * v3, s)
        x = x + h / 6 * (v1 + 2 * v2 + 2 * v3 + v4)
        change = change + h / 6 * (d1 + 2 * d2 + 2 * d3 + d4)
    return x, change


def _adaptive(
    derivative: Derivative, x: Tensor, start: float, tolerance: float
) -> tuple[Tensor, Tensor]:
    from torchdiffeq import odeint

    def worst_row(state: tuple[Tensor, Tensor]) -> Tensor:
        """Or else a row's error would be hidden by those of its batch."""
        x, change = state
        per_row = x.unsqueeze(1).flatten(1).square().mean(1)
        return torch.maximum(per_row.sqrt().amax(), change.abs().amax())

    ends, changes = odeint(
        lambda t, state: derivative(state[0], t),
        (x, x.new_zeros(len(x))),
        torch.tensor([start, 1.0], dtype=torch.float64, device=x.device),
        rtol=tolerance,
        atol=tolerance,
        method="dopri5",
        options={"norm": worst_row},
    )
    return ends[-1], changes[-1]
