"""What the theorems promise, and what the schemes do to Gaussian data exactly.

All times here are clocks, the paper's s; a step has the length h = T / N.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from fluvial.dynamics.wasserstein_samplers.sampler import SCHEMES, Scheme, root_series

Proven = Literal["em", "ei", "rem", "rei", "so"]
PROVEN: tuple[Proven, ...] = ("em", "ei", "rem", "rei", "so")
"""Schemes with a theorem."""


def w2_bound(
    scheme: Proven,
    *,
    dim: int,
    h: float,
    horizon: float,
    convexity: float,
    smoothness: float,
    second_moment: float,
    score_error: float = 0.0,
    hessian_error: float = 0.0,
    drift_error: float = 0.0,
    hessian_lipschitz: float = 0.0,
) -> float:
    r"""The bound on the Wasserstein-2 distance between samples and data, up to a numerical factor.

    For a density exp(-f) with ``convexity`` I <= f'' <= ``smoothness`` I. With m = min(1,
    convexity), which must exceed 1/2, L = 1 + smoothness and T the horizon,

        W2 <= e^(-m T) sqrt(E |x_0|^2) + C_1 sqrt(d h) + C_2 score_error,

    ========== =============================================== ===============
    scheme     C_1                                             C_2
    ========== =============================================== ===============
    em         (L + 1/2) / (m - 1/2)                           1 / (m - 1/2)
    ei         L / (m - 1/2)                                   1 / (m - 1/2)
    rem        (L / sqrt(3) + 1 / (2 sqrt(3 d))) / (m - 1/2)   3 / (m - 1/2)
    rei        L / sqrt(3) / (m - 1/2)                         3 / (m - 1/2)
    ========== =============================================== ===============

    and for so, with c = e^((L - 1/2) h) / (m - 1/2) and L_F the Lipschitz constant of the Hessian,

        W2 <= e^(-m T) sqrt(E |x_0|^2) + c sqrt(d) (L^(3/2) + sqrt(2) L_F / 4) h
              + c (score_error + (2/3) sqrt(h d) hessian_error + (h / 2) drift_error).

    Args:
        scheme: ``"so-jvp"`` has no theorem.
        dim: d, numbers in an event.
        h: length of a step in the clock.
        horizon: T, the clock at the start.
        convexity: m_0 > 1/2, the smallest eigenvalue of f'' anywhere.
        smoothness: L_0, the largest.
        second_moment: E |x_0|^2 of the data.
        score_error: of the score, in L2 along the samples.
        hessian_error, drift_error: those of H and of M, for so.
        hessian_lipschitz: L_F, of the Hessian of the score in Frobenius norm, for so.

    Raises:
        ValueError: a scheme without a theorem; ``convexity`` is at most 1/2 or above
            ``smoothness``; another number is not positive, an error negative.

    Citation: theorems 1, 3 and 4 of Yu and Yu, NeurIPS 2025.
    """
    gap = _gap(scheme, dim, convexity, smoothness, second_moment)
    for name, number in (("h", h), ("horizon", horizon)):
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {number}")
    errors = {
        "score_error": score_error,
        "hessian_error": hessian_error,
        "drift_error": drift_error,
        "hessian_lipschitz": hessian_lipschitz,
    }
    for name, number in errors.items():
        if not 0 <= number < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {number}")
    start = math.exp(-(gap + 0.5) * horizon) * math.sqrt(second_moment)
    steps = _discretisation(scheme, dim, h, gap, smoothness, hessian_lipschitz)
    learnt = score_error
    match scheme:
        case "rem" | "rei":
            learnt *= 3
        case "so":
            learnt += 2 / 3 * math.sqrt(h * dim) * hessian_error + h / 2 * drift_error
            exponent = (0.5 + smoothness) * h
            learnt *= math.exp(exponent) if exponent < 700 else math.inf if learnt else 1.0
    return start + steps + learnt / gap


def guaranteed_steps(
    scheme: Proven,
    accuracy: float,
    *,
    dim: int,
    convexity: float,
    smoothness: float,
    second_moment: float,
    hessian_lipschitz: float = 0.0,
) -> tuple[float, int]:
    """(horizon, steps) for which `w2_bound` is at most ``accuracy``, the score being exact.

    Half of it is left to the start and half to the steps. Steps grow as d / accuracy^2, for so as
    sqrt(d) / accuracy, both times a logarithm (corollaries 2 and 5). As the bound leaves out a
    numerical factor, and is far from tight, such numbers compare schemes; they are more than is
    needed.

    Raises:
        ValueError: ``accuracy`` is not positive; otherwise as `w2_bound`.
    """
    gap = _gap(scheme, dim, convexity, smoothness, second_moment)
    if not 0 < accuracy < math.inf:
        raise ValueError(f"accuracy must be positive and finite, got {accuracy}")
    if not 0 <= hessian_lipschitz < math.inf:
        raise ValueError(
            f"hessian_lipschitz must be finite and not negative, got {hessian_lipschitz}"
        )
    short = math.log(2 * math.sqrt(second_moment) / accuracy) / (gap + 0.5)
    horizon = max(short, 1e-3)  # accuracies beyond the data's own size leave nothing to do

    def error(h: float) -> float:
        return _discretisation(scheme, dim, h, gap, smoothness, hessian_lipschitz)

    low, high = math.log(1e-300), math.log(horizon)
    if error(horizon) > accuracy / 2:
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if error(math.exp(middle)) <= accuracy / 2 else (low, middle)
        high = low
    return horizon, math.ceil(horizon / math.exp(high))


def _gap(
    scheme: Proven, dim: int, convexity: float, smoothness: float, second_moment: float
) -> float:
    """min(1, m_0) - 1/2, after the checks."""
    if scheme not in PROVEN:
        raise ValueError(f"scheme must be one of {', '.join(PROVEN)}, got {scheme!r}")
    if dim < 1:
        raise ValueError(f"dim must be at least 1, got {dim}")
    if not 0.5 < convexity < math.inf:
        raise ValueError(
            f"convexity must exceed 1/2, the rate at which the forward drift contracts, got "
            f"{convexity}"
        )
    if not convexity <= smoothness < math.inf:
        raise ValueError(
            f"smoothness must be finite and at least convexity, got {smoothness} and {convexity}"
        )
    if not 0 < second_moment < math.inf:
        raise ValueError(f"second_moment must be positive and finite, got {second_moment}")
    return min(1.0, convexity) - 0.5


def _discretisation(
    scheme: Proven, dim: int, h: float, gap: float, smoothness: float, hessian_lipschitz: float
) -> float:
    """C_1 times its power of h and d."""
    top = 1 + smoothness
    match scheme:
        case "em":
            return (top + 0.5) * math.sqrt(dim * h) / gap
        case "ei":
            return top * math.sqrt(dim * h) / gap
        case "rem":
            return (math.sqrt(dim / 3) * top + 0.5 / math.sqrt(3)) * math.sqrt(h) / gap
        case "rei":
            return math.sqrt(dim / 3) * top * math.sqrt(h) / gap
    size = top**1.5 + math.sqrt(2) * hessian_lipschitz / 4
    exponent = (top - 0.5) * h
    return math.exp(exponent) * math.sqrt(dim) * size * h / gap if exponent < 700 else math.inf


def gaussian_moments(
    scheme: Scheme, mean: float, variance: float, *, horizon: float, steps: int
) -> tuple[float, float]:
    """(mean, variance) of what a scheme makes of data N(mean, variance), with their exact score.

    Every scheme is then affine, x -> A x + b + noise of variance q, so that the two moments follow
    a recursion from N(0, 1 - e^-T). A and b of the midpoint schemes depend on U; the moments are
    averaged over it by 24 nodes of Gauss and Legendre.

    Args:
        scheme: one of the six.
        mean, variance: of the data, in one dimension; others are independent.
        horizon: T, the clock at the start.
        steps: of equal length.

    Raises:
        ValueError: an unknown scheme, a variance or horizon that is not positive, ``steps`` < 1.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    if not (math.isfinite(mean) and 0 < variance < math.inf):
        raise ValueError(
            f"mean must be finite and variance positive and finite, got {mean} and {variance}"
        )
    if not 0 < horizon < math.inf:
        raise ValueError(f"horizon must be positive and finite, got {horizon}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    nodes, weights = np.polynomial.legendre.leggauss(24)
    u, weights = (nodes + 1) / 2, weights / 2
    h = horizon / steps
    m, v = 0.0, -math.expm1(-horizon)
    for k in range(steps):
        gain, shift, spread = gaussian_step(scheme, mean, variance, horizon - k * h, h, u)
        second = gain**2 * (v + m * m) + 2 * gain * shift * m + shift**2 + spread
        m = float(np.sum(weights * (gain * m + shift)))
        v = float(np.sum(weights * second)) - m * m
    return m, v


def gaussian_step(
    scheme: Scheme, mean: float, variance: float, s: float, h: float, u: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(A, b, q) of the step from s to s - h, for each of the random points ``u`` (n,)."""

    def law(s: np.ndarray | float) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of x_s; the score is (mean - x) / variance."""
        return mean * np.exp(-0.5 * np.asarray(s)), variance * np.exp(-s) - np.expm1(-s)

    at, var = (float(part) for part in law(s))
    rate = 0.5 - 1 / var
    gain: np.ndarray | float
    shift: np.ndarray | float
    spread: np.ndarray | float
    match scheme:
        case "em":
            gain, shift, spread = 1 + h * rate, h * at / var, h
        case "ei":
            pull = 2 * math.expm1(h / 2) / var
            gain, shift, spread = math.exp(h / 2) - pull, pull * at, math.expm1(h)
        case "rem":
            to_gain, to_shift = 1 + h * u * rate, h * u * at / var
            at_u, var_u = law(s - h * u)
            again = h * (0.5 - 1 / var_u)
            gain, shift = 1 + again * to_gain, again * to_shift + h * at_u / var_u
            spread = again**2 * h * u + 2 * again * h * u + h
        case "rei":
            pull_u = 2 * np.expm1(h * u / 2) / var
            to_gain, to_shift = np.exp(h * u / 2) - pull_u, pull_u * at
            at_u, var_u = law(s - h * u)
            growth = np.exp((1 - u) * h / 2)
            again = -h * growth / var_u
            gain, shift = math.exp(h / 2) + again * to_gain, again * to_shift - again * at_u
            spread = (again**2 + 2 * again * growth) * np.expm1(h * u) + math.expm1(h)
        case "so":
            z = h * rate
            third = (math.expm1(z) - z) / z**2 if abs(z) > 1e-3 else 0.5 + z / 6 + z * z / 24
            gain, shift = 1 + z + h * h / 4 * third, h * at / var
            spread = h * (math.expm1(2 * z) / (2 * z) if z else 1.0)
        case "so-jvp":
            z = h * rate
            gain, shift = 1 + z + h * h / 8, h * at / var
            spread = h * (1 + root_series(1)[1] * z) ** 2
    ones = np.ones_like(u)
    return gain * ones, shift * ones, spread * ones
