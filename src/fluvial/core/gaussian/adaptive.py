"""The probability flow with steps of the solver's own choice, through torchdiffeq."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fluvial.core.gaussian.fields import Prediction, predict
from fluvial.core.gaussian.levels import time_of
from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.protocols import Field, GaussianPath, batch_size

METHODS = ("dopri5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun")


def integrate(
    field: Field,
    path: GaussianPath,
    x: Tensor,
    t_from: float,
    t_to: float,
    *,
    method: str = "dopri5",
    rtol: float = 1e-5,
    atol: float = 1e-5,
    **cond: Any,
) -> tuple[Tensor, int]:
    """Carry ``x`` along dx/dt = v(x, t) from ``t_from`` to ``t_to``, either way.

    Generates where ``t_to`` < ``t_from``, encodes where it is larger. The error of a step is held
    below atol + rtol |x|, in root mean square over the batch; so the steps, and the last digits of
    a row, depend on its batch. Gradients flow through the solver. States and times are summed up in
    float32 at least; the field sees the dtype of ``x``.

    A field that predicts no velocity leaves it undetermined at t = 0 and, if it predicts noise or
    score, where alpha = 0. At such an end the last stretch, or the first, is one step with frozen
    ends as in `DDIM`: up to the level sigma / alpha = max(0.01 sqrt(rtol), eps^(1/3)), or from
    alpha / sigma = max(rtol, 100 eps) on, eps the precision of ``x``. For data of standard
    deviation d that is wrong by level^2 / (2 d^2), or by the ratio times the mean, relatively.

    Args:
        field: of any kind of a Gaussian path.
        x: the state at ``t_from``, floating.
        t_from, t_to: in [0, 1].
        method: one of dopri5, dopri8, bosh3, fehlberg2, adaptive_heun.
        rtol, atol: positive.
        **cond: passed on to the field and to the path.

    Returns:
        (x at ``t_to``, the number of evaluations of the field).

    Raises:
        TypeError: ``x`` is not floating.
        ValueError: a time outside [0, 1], a tolerance that is not positive, an unknown method, or a
            solver that got stuck, as it does on a field that is not finite.
    """
    import torchdiffeq

    batch_size(x)
    if not x.is_floating_point():
        raise TypeError(f"x must be floating, got {x.dtype}")
    if not (0 <= t_from <= 1 and 0 <= t_to <= 1):
        raise ValueError(f"t_from and t_to must lie in [0, 1], got {t_from} and {t_to}")
    if not (0 < rtol < math.inf and 0 < atol < math.inf):
        raise ValueError(f"rtol and atol must be positive and finite, got {rtol} and {atol}")
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    if t_from == t_to or not x.numel():
        return x, 0
    evaluations = 0

    def guess(x: Tensor, t: float) -> Prediction:
        nonlocal evaluations
        evaluations += 1
        time = torch.tensor(t, dtype=torch.float64)
        kind, value = predict(field, x, time, **cond)
        return Prediction(kind, value, x, time, path, cond)

    def frozen(x: Tensor, t: float, s: float) -> Tensor:
        return guess(x, t).frozen(torch.tensor(s, dtype=torch.float64))

    begin, end = (_reachable(field, path, t, x.dtype, rtol) for t in (t_from, t_to))
    if (end - begin) * (t_to - t_from) <= 0:  # nothing but the last stretch
        return frozen(x, t_from, t_to), evaluations
    if begin != t_from:
        x = frozen(x, t_from, begin)
    low, high = min(begin, end), max(begin, end)

    dtype = x.dtype

    def velocity(t: Tensor, x: Tensor) -> Tensor:
        # torchdiffeq rounds t to the dtype of x and moves it by the last bit
        return guess(x.to(dtype), min(max(float(t), low), high)).velocity.to(x.dtype)

    times = torch.tensor([begin, end], dtype=torch.float64, device=x.device)
    options = {
        "step_t": times[1:],  # land there: the solver would pass it and interpolate
        "first_step": 0.01 * (high - low),  # its own guess would put x into the gradient of t
    }
    try:
        x = torchdiffeq.odeint(
            velocity,
            x.to(torch.promote_types(dtype, torch.float32)),
            times,
            rtol=rtol,
            atol=atol,
            method=method,
            options=options,
        )[1].to(dtype)
    except AssertionError as error:
        reason = str(error).partition(": tensor")[0]
        raise ValueError(
            f"{method} got stuck between t_from = {t_from} and t_to = {t_to}: {reason}"
        ) from error
    if end != t_to:
        x = frozen(x, end, t_to)
    return x, evaluations


def _reachable(
    field: Field, path: GaussianPath, t: float, dtype: torch.dtype, rtol: float
) -> float:
    """t, or the nearest time to it where the velocity is determined, and not by rounding alone."""
    if field.predicts in ("velocity", "mean_velocity") or 0 < t < 1:
        return t
    eps = torch.finfo(dtype).eps
    near = max(0.01 * math.sqrt(rtol), eps ** (1 / 3))
    if not isinstance(path, AlphaSigmaPath):
        return max(t, near)
    if t == 0:
        return float(time_of(path, torch.tensor(near)))
    if field.predicts == "clean" or path.alpha(torch.ones((), dtype=torch.float64)) > 0:
        return t
    return float(time_of(path, torch.tensor(1 / max(rtol, 100 * eps))))
