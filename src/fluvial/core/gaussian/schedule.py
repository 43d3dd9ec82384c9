"""Grids to sample along, and a field trained on one Gaussian path used on another.

What a network sees of a path is the level of noise r = sigma / alpha in x / alpha = x_0 + r eps.
Two paths are the same states at other times and scales, so that a field of one is a field of the
other. Grids choose the levels at which a field is evaluated. They are pairs (K, 2) that fall, in
float64; ``pairs.flip(0, 1)`` rises, to encode.

A grid of levels starts below t = 1 where the path ends with more noise than the grid. A state for
its start is ``path.sample(torch.zeros(shape), pairs[0, 0], noise).x``, noise of the right level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluvial.core.gaussian.fields import ends, express, predict
from fluvial.core.gaussian.levels import time_of
from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.protocols import Field, left_broadcast
from fluvial.core.scales import Scalar
from fluvial.core.time import check_pairs, grid_pairs

# Grids


def log_snr_grid(
    path: AlphaSigmaPath, steps: int, level_max: float | None = None, level_min: float = 0.002
) -> Tensor:
    """``steps`` times of levels from ``level_max`` to ``level_min``, even in log r, then 0.

    Evenly in the log of the signal-to-noise ratio -2 log r, so the steps of `DPMSolver` and `UniPC`
    are of one length (Lu et al., NeurIPS 2022); elsewhere called the exponential grid.

    Args:
        level_max: by default 80, or the level at which the path ends, if that is less.

    Raises:
        ValueError: ``steps`` < 1, the levels are not positive and falling, or the path ends below
            ``level_max``.
    """
    _check_steps(steps)
    level_max, level_min = _levels(path, level_max, level_min)
    logs = torch.linspace(math.log(level_max), math.log(level_min), steps, dtype=torch.float64)
    return _to_zero(path, logs.exp())


def karras_grid(
    path: AlphaSigmaPath,
    steps: int,
    level_max: float | None = None,
    level_min: float = 0.002,
    rho: float = 7.0,
) -> Tensor:
    """``steps`` times of levels from ``level_max`` to ``level_min``, evenly in r^(1 / rho), then 0.

    The grid of EDM, for data of standard deviation 0.5 (Karras et al., NeurIPS 2022).

    Raises:
        ValueError: as `log_snr_grid`, or ``rho`` is not positive.
    """
    _check_steps(steps)
    level_max, level_min = _levels(path, level_max, level_min)
    if not 0 < rho < math.inf:
        raise ValueError(f"rho must be positive and finite, got {rho}")
    first, last = level_max ** (1 / rho), level_min ** (1 / rho)
    return _to_zero(path, torch.linspace(first, last, steps, dtype=torch.float64) ** rho)


def quadratic_grid(steps: int, start: float = 1.0, end: float = 0.0) -> Tensor:
    """``steps`` steps from ``start`` to ``end``, evenly spaced in sqrt(t): fine where t is small.

    The quadratic grid of DDIM (Song, Meng and Ermon, ICLR 2021).

    Raises:
        ValueError: ``steps`` < 1, or ``start`` or ``end`` is outside [0, 1].
    """
    _check_steps(steps)
    if not (0 <= start <= 1 and 0 <= end <= 1):
        raise ValueError(f"start and end must lie in [0, 1], got {start} and {end}")
    roots = torch.linspace(math.sqrt(start), math.sqrt(end), steps + 1, dtype=torch.float64)
    times = roots.square()
    times[0], times[-1] = start, end
    return grid_pairs(times)


def shifted_grid(steps: int, shift: float, start: float = 1.0, end: float = 0.0) -> Tensor:
    """Equal steps, with every time t then moved to shift t / (1 + (shift - 1) t).

    On the linear path this multiplies every level of noise by ``shift``; above 1 more of the steps
    are spent where there is much noise, as large images need (Esser et al., ICML 2024).

    A shift belongs to the grid and to nothing else: paths and fields have none, and this function
    starts from a number of steps, not from times, so it cannot be applied to its own result.

    Args:
        steps: at least 1.
        shift: positive. See `resolution_shift` and `token_shift` for those that depend on the size.
        start, end: before the shift; 0 and 1 stay where they are.

    Raises:
        ValueError: ``steps`` < 1, ``shift`` is not positive and finite, or ``start`` or ``end`` is
            outside [0, 1].
    """
    _check_steps(steps)
    if not 0 < shift < math.inf:
        raise ValueError(f"shift must be positive and finite, got {shift}")
    if not (0 <= start <= 1 and 0 <= end <= 1):
        raise ValueError(f"start and end must lie in [0, 1], got {start} and {end}")
    times = torch.linspace(start, end, steps + 1, dtype=torch.float64)
    return grid_pairs(shift * times / (1 + (shift - 1) * times))


def resolution_shift(pixels: int, trained_pixels: int) -> float:
    """sqrt(pixels / trained_pixels): the shift that leaves the same doubt about the image.

    A constant image of n pixels at level r is known up to r / sqrt(n) (Esser et al., ICML 2024,
    section 5.3.2). Pixels count positions, not channels.

    Raises:
        ValueError: a number of pixels is not positive.
    """
    if not (pixels > 0 and trained_pixels > 0):
        raise ValueError(f"numbers of pixels must be positive, got {pixels} and {trained_pixels}")
    return math.sqrt(pixels / trained_pixels)


def token_shift(
    tokens: int,
    base_tokens: int = 256,
    max_tokens: int = 4096,
    base_log_shift: float = 0.5,
    max_log_shift: float = 1.15,
) -> float:
    """exp(mu), mu linear in the number of tokens from ``base_log_shift`` to ``max_log_shift``.

    The dynamic shift of FLUX.1 and of the models that follow it, whose configurations name the
    values base_image_seq_len, max_image_seq_len, base_shift and max_shift. Beyond the two numbers
    of tokens the line goes on.

    Raises:
        ValueError: ``tokens`` is not positive, or the two numbers of tokens are equal.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be positive, got {tokens}")
    if base_tokens == max_tokens:
        raise ValueError(f"base_tokens and max_tokens must differ, got {base_tokens} twice")
    slope = (max_log_shift - base_log_shift) / (max_tokens - base_tokens)
    return math.exp(base_log_shift + slope * (tokens - base_tokens))


def with_corrections(pairs: Tensor, number: int = 1) -> Tensor:
    """The pairs, each followed by ``number`` pairs (s, s), for `PredictorCorrector`.

    None follow a pair to s = 0, where the law is that of the data and no score is known.

    Raises:
        ValueError: ``pairs`` is not a chain in [0, 1], or ``number`` is negative.
    """
    check_pairs(pairs)
    if number < 0:
        raise ValueError(f"number must be >= 0, got {number}")
    rows = [
        row
        for pair in pairs
        for row in [pair, *[pair[1].expand(2)] * (number if pair[1] > 0 else 0)]
    ]
    return torch.stack(rows)


# Change of schedule


def reschedule(field: Field, trained: AlphaSigmaPath, sampled: AlphaSigmaPath) -> Field:
    """``field`` of the path ``trained`` as a field of the path ``sampled``; see `Rescheduled`.

    A field that came from ``sampled`` comes back as it was, and so does one whose paths are equal.
    """
    if trained == sampled:
        return field
    if isinstance(field, Rescheduled) and field.sampled == trained:
        if field.trained == sampled:
            return field.field
        return Rescheduled(field.field, field.trained, sampled)
    return Rescheduled(field, trained, sampled)


@dataclass(frozen=True)
class Rescheduled:
    """A field of one scalar path, asked along another.

    At (x, t) of ``sampled`` it asks the field at the time t' of ``trained`` with the same level of
    noise, sigma / alpha, and at the state x' = c x, where c takes (alpha, sigma)(t) to
    (alpha', sigma')(t'). Clean end and noise are then the same on both; velocity and score are made
    from them along ``sampled``. A mean velocity becomes the velocity.

    Levels beyond the last of ``trained`` are asked at its end, t' = 1, with x scaled to its noise.
    The clean prediction there is that of the end, and the noise is what makes x of it.

    Made by `reschedule`.
    """

    field: Field
    trained: AlphaSigmaPath
    sampled: AlphaSigmaPath

    @property
    def predicts(self) -> str:
        kind = self.field.predicts
        return "velocity" if kind == "mean_velocity" else kind

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        exact = t.double()
        alpha, sigma = self.sampled.alpha(exact), self.sampled.sigma(exact)
        there = time_of(self.trained, sigma / alpha)
        alpha_there, sigma_there = self.trained.alpha(there), self.trained.sigma(there)
        factor = torch.hypot(alpha_there, sigma_there) / torch.hypot(alpha, sigma)
        x_there, t_there = Scalar(factor) @ x, there.to(t.dtype)
        kind, value = predict(self.field, x_there, t_there, **cond)
        if kind == "clean":
            return value
        beyond = sigma * alpha_there > alpha * sigma_there * (1 + 1e-9)
        if kind == "noise" and beyond.ndim == 0 and not beyond:
            return value
        clean, noise = ends(kind, value, x_there, t_there, self.trained)
        _, there_is_none = ends("clean", clean, x, t, self.sampled)
        noise = torch.where(left_broadcast(beyond, x), there_is_none, noise)
        return express(kind, clean, noise, t, self.sampled)


def _to_zero(path: AlphaSigmaPath, levels: Tensor) -> Tensor:
    return grid_pairs(torch.cat([time_of(path, levels), levels.new_zeros(1)]))


def _levels(path: AlphaSigmaPath, level_max: float | None, level_min: float) -> tuple[float, float]:
    one = torch.ones((), dtype=torch.float64)
    end = float(path.sigma(one) / path.alpha(one))
    if level_max is None:
        level_max = min(80.0, end)
    # a hair more is the end too: VE(0.01, 50) ends at sqrt(50^2 - 0.01^2)
    if not 0 < level_min < level_max <= end * (1 + 1e-6):
        raise ValueError(
            f"need 0 < level_min < level_max <= {end:.7g}, the level at which "
            f"{type(path).__name__} ends, got {level_min} and {level_max}"
        )
    return level_max, level_min


def _check_steps(steps: int) -> None:
    if not isinstance(steps, int):
        raise TypeError(f"steps must be an int, the number of steps, got {type(steps).__name__}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
