"""Solvers made for diffusions: exact for a clean prediction that stays as it is over a step.

With lambda = log(alpha / sigma), half the log of the signal-to-noise ratio, h = lambda_s - lambda_t
and D(lambda) the clean prediction along the trajectory, the probability flow is

    x_s = (sigma_s / sigma_t) x_t + sigma_s int exp(lambda) D(lambda) dlambda,

over lambda from lambda_t to lambda_s. `DDIM` freezes D. `DPMSolver` and `UniPC` continue it by a
polynomial through the predictions of earlier steps, so that a step costs one evaluation whatever
the order. With phi_1(z) = (e^z - 1) / z and phi_{k+1}(z) = (phi_k(z) - 1 / k!) / z,

    x_s = (sigma_s / sigma_t) x_t + alpha_s h (phi_1(-h) D + phi_2(-h) h D' + phi_3(-h) h^2 D'' ...)

Pairs that rise (h < 0) encode by the same formulas. Where lambda is infinite, at t = 0 and where
alpha = 0, there is no polynomial: a step that starts or ends there freezes D, and is then what the
first-order formula tends to, x_s = alpha_s D + sigma_s eps; later steps do not look back there. Nor
do they look back beyond a turn of time, as two predictions at one lambda give no slope.

`DPMSolver`, `UniPC` and `DDIM` with noise need a path with one alpha and one sigma for all rows.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from fluvial.core.gaussian.fields import Prediction, predicted, scalars
from fluvial.core.protocols import Run

Past: TypeAlias = tuple[tuple[float, Tensor], ...]
"""(lambda, clean prediction) of earlier steps, the latest first."""

_ONE_OVER_FACTORIAL = tuple(1 / math.factorial(k) for k in range(20))


class DDIM:
    """x_s = alpha_s D + sigma_s (sqrt(1 - eta^2 (1 - rho^2)) eps + eta sqrt(1 - rho^2) z).

    D and eps are the clean end and the noise that the field predicts at (x, t), z is fresh noise
    and rho the correlation of the noises at t and s given the clean end, the smaller of alpha_t
    sigma_s / (alpha_s sigma_t) and its inverse (Song, Meng and Ermon, ICLR 2021).

    ``eta = 0`` is deterministic and of order one: Euler's method for x / alpha in sigma / alpha.
    ``eta = 1`` is `fluvial.core.simulate.Ancestral`, to the same draws; where s > t that is the
    path's transition. In between, eta^2 is the share of the variance (1 - rho^2) sigma_s^2 that is
    drawn anew.

    On a path of matrices eta must be 0. The step is M_s D + L_s eps, of a flow that has the
    marginals of the path's, and is the path's own where L' is the rate of L.

    Raises:
        ValueError: ``eta`` is outside [0, 1]; at a step, eta > 0 on a path without one alpha and
            one sigma for all rows.
    """

    def __init__(self, eta: float = 0.0) -> None:
        if not 0 <= eta <= 1:
            raise ValueError(f"eta must lie in [0, 1], got {eta}")
        self.eta = eta

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        guess = predicted(x, run)
        clean = guess.clean if run.watched else None
        if run.s == run.t:
            return x, memory, clean
        if self.eta == 0:
            return guess.frozen(run.s), memory, clean
        alpha_t, sigma_t = scalars(run.path, run.t, run.cond, "DDIM with eta > 0")
        alpha_s, sigma_s = scalars(run.path, run.s, run.cond, "DDIM with eta > 0")
        falling, rising = alpha_t * sigma_s, alpha_s * sigma_t
        rho = min(falling, rising) / max(falling, rising)
        fresh = self.eta * math.sqrt(1 - rho * rho)
        x = guess.mix(alpha_s, sigma_s * math.sqrt(1 - fresh * fresh))
        z = run.noise.normal(x, "posterior" if run.s < run.t else "transition")
        return x.add_(z, alpha=sigma_s * fresh), memory, clean


class DPMSolver:
    """DPM-Solver++(2M) and (3M): order two and three for one evaluation a step.

    With m_0 the clean prediction at t, m_1 and m_2 those of the steps before, h_1 and h_2 the
    lengths of those steps in lambda, r_i = h_i / h, D_1 = (m_0 - m_1) / r_1 and D_2 = (m_1 - m_2) /
    r_2:

    * 2M: x_s = (sigma_s / sigma_t) x_t + alpha_s h phi_1(-h) (m_0 + D_1 / 2);
    * 3M: x_s = (sigma_s / sigma_t) x_t + alpha_s h (phi_1(-h) m_0 + phi_2(-h) D' + phi_3(-h) D''),
      D'' = 2 (D_1 - D_2) / (r_1 + r_2) and D' = D_1 + r_1 D'' / 2.

    These are the first two derivatives, times h and h^2, of the parabola through the predictions.
    The authors' code and those that follow it leave out the 2 in D'', which makes the order two,
    with a smaller error where steps are long; ``published=True`` does the same. 2M and this 3M are
    the predictors of `UniPC`.

    The first step is of order one and the second of order two at most, so the whole has order three
    only if the first is short next to the others. A step to s = 0 is of order one (see the module);
    on a path whose sigma^2 is linear there, as the variance-preserving ones, that error is of the
    order of the step, and a grid that is fine there keeps it small.

    Args:
        order: 2 or 3.
        steps: the number of steps of the run, to lower the order over its last ones to the number
            of steps left, as published for fewer than 15 steps. None keeps the order.
        published: the 3M of the authors' code.

    Raises:
        ValueError: ``order`` is neither 2 nor 3, or ``steps`` not positive; at a step, a path
            without one alpha and one sigma for all rows, or a run of more than ``steps`` steps.

    Citation: Lu, Zhou, Bao, Chen, Li and Zhu, 2022 (arXiv:2211.01095).
    """

    def __init__(self, order: int = 2, steps: int | None = None, published: bool = False) -> None:
        _check(order, steps)
        self.order, self.steps, self.published = order, steps, published

    def start(self, x: Tensor) -> Past:
        return ()

    def step(self, x: Tensor, memory: Past, run: Run) -> tuple[Tensor, Past, Tensor]:
        guess = predicted(x, run)
        if run.s == run.t:
            return x, memory, guess.clean
        log_ratio, alpha, sigma, h = _stride(guess, run, "DPMSolver")
        past = _reach(memory, log_ratio, h, _order(self.order, self.steps, run.k) - 1)
        points = [point for point, _ in past]
        weights = _dpm_weights(points, log_ratio, h, alpha, self.published)
        x = guess.mix(alpha - sum(weights), sigma)
        for weight, (_, clean) in zip(weights, past, strict=True):
            x.add_(clean, alpha=weight)
        return x, ((log_ratio, guess.clean), *memory)[: self.order - 1], guess.clean


class UniPC:
    """The unified predictor-corrector, B(h) version, in its multistep form on clean predictions.

    With m_0 the clean prediction at t and m_i those of earlier steps, r_i = (lambda_i - lambda_t) /
    h,

        x_s = (sigma_s / sigma_t) x_t + alpha_s h (phi_1(-h) m_0 + B sum_i a_i (m_i - m_0) / r_i),
        sum_i a_i r_i^(k-1) = k! phi_{k+1}(-h) / B,   k = 1, 2, ...,

    where B = 1 is the variant "bh1" and B = phi_1(-h) "bh2". The predictor has order - 1 earlier
    points and as many equations; the corrector has the new prediction at r = 1 too and one equation
    more. a = 1/2 stands for the solution of a single equation. The corrector is applied when the
    next step has evaluated the field at the predicted x_s, so that a step costs one evaluation; the
    last step of a run is a prediction.

    The predictor alone has order ``order``. With the corrector the order is ``order`` + 1, given
    accurate first steps: the first is of order one with a corrector of order two, and so on.

    Args:
        order: 2 or 3.
        variant: "bh2", or "bh1", recommended for fewer than 10 steps without guidance. From
            alpha = 0 on, bh1 has no limit, and its first step stays uncorrected.
        correct: False for the predictor alone, UniP.
        steps: as for `DPMSolver`.

    Raises:
        ValueError: as `DPMSolver`, or ``variant`` is neither.

    Citation: Zhao, Bai, Rao, Zhou and Lu, NeurIPS 2023.
    """

    def __init__(
        self,
        order: int = 2,
        variant: Literal["bh1", "bh2"] = "bh2",
        correct: bool = True,
        steps: int | None = None,
    ) -> None:
        _check(order, steps)
        if variant not in ("bh1", "bh2"):
            raise ValueError(f"variant must be 'bh1' or 'bh2', got {variant!r}")
        self.order, self.variant, self.correct, self.steps = order, variant, correct, steps

    def start(self, x: Tensor) -> dict[str, Any]:
        # `frozen` is the last step's x_s for a frozen D, from which both its prediction and its
        # correction are made; `points` the number of earlier points that its prediction used.
        return {"past": (), "frozen": None, "points": 0}

    def step(
        self, x: Tensor, memory: dict[str, Any], run: Run
    ) -> tuple[Tensor, dict[str, Any], Tensor]:
        guess = predicted(x, run)
        if run.s == run.t:
            return x, memory, guess.clean
        log_ratio, alpha, sigma, h = _stride(guess, run, "UniPC")
        past: Past = memory["past"]
        if past and self.correct:
            x = self._correct(memory, log_ratio, guess)
            guess = Prediction("clean", guess.clean, x, run.t, guess.path, run.cond)
        earlier = _reach(past, log_ratio, h, _order(self.order, self.steps, run.k) - 1)
        weights = self._weights([(point - log_ratio) / h for point, _ in earlier], h, alpha)
        start = guess.mix(alpha, sigma)
        x = _move(start, guess.clean, weights, [m for _, m in earlier])
        past = ((log_ratio, guess.clean), *past)[: self.order]
        return x, {"past": past, "frozen": start, "points": len(earlier)}, guess.clean

    def _correct(self, memory: dict[str, Any], log_ratio: float, guess: Prediction) -> Tensor:
        """The state at the end of the last step, now that there is a prediction for it."""
        (last, clean), *earlier = memory["past"]
        h = log_ratio - last
        from_pure_noise = last == -math.inf and self.variant == "bh2"
        if math.isinf(log_ratio) or math.isinf(last) and not from_pure_noise:
            return guess.x
        alpha, _ = cast(tuple[float, float], guess.alpha_sigma)
        earlier = earlier[: memory["points"]]
        points = [(point - last) / h for point, _ in earlier] + [1.0]
        weights = self._weights(points, h, alpha)
        return _move(memory["frozen"], clean, weights, [m for _, m in earlier] + [guess.clean])

    def _weights(self, points: list[float], h: float, alpha: float) -> list[float]:
        """alpha h B a_i / r_i for points r_i."""
        scale = alpha * h if self.variant == "bh1" else -alpha * math.expm1(-h)
        if len(points) < 2:
            return [0.5 * scale / point for point in points]
        phi = _phi(-h, len(points) + 1)
        unit = 1.0 if self.variant == "bh1" else phi[0]
        right = [math.factorial(k + 1) * value / unit for k, value in enumerate(phi[1:])]
        solved = _solve_vandermonde(points, right)
        return [scale * each / point for each, point in zip(solved, points, strict=True)]


def _stride(guess: Prediction, run: Run, sampler: str) -> tuple[float, float, float, float]:
    """(lambda at t, alpha_s, sigma_s, h)."""
    pair = guess.alpha_sigma or scalars(run.path, run.t, run.cond, sampler)
    alpha, sigma = scalars(run.path, run.s, run.cond, sampler)
    log_ratio = _log_ratio(*pair)
    return log_ratio, alpha, sigma, _log_ratio(alpha, sigma) - log_ratio


def _log_ratio(alpha: float, sigma: float) -> float:
    if sigma == 0:
        return math.inf
    return math.log(alpha / sigma) if alpha else -math.inf


def _reach(past: Past, log_ratio: float, h: float, number: int) -> Past:
    """The latest ``number`` points or fewer: up to one at infinity or before a turn of time."""
    if math.isinf(h):
        return ()
    for i, (point, _) in enumerate(past[:number]):
        if math.isinf(point) or (log_ratio - point) * h <= 0:
            return past[:i]
        log_ratio = point
    return past[:number]


def _dpm_weights(
    points: list[float], log_ratio: float, h: float, alpha: float, published: bool
) -> list[float]:
    """w with x_s = (frozen) + sum_i w_i (m_i - m_0)."""
    if not points:
        return []
    r_1 = (log_ratio - points[0]) / h
    if len(points) == 1:
        return [0.5 * alpha * math.expm1(-h) / r_1]
    r_2 = (points[0] - points[1]) / h
    _, phi_2, phi_3 = _phi(-h, 3)
    # phi_2 D' + phi_3 D'' = on_1 D_1 + on_2 D_2
    on_2 = -(phi_2 * r_1 + phi_3 * (1 if published else 2)) / (r_1 + r_2)
    on_1 = phi_2 - on_2
    return [alpha * h * (on_2 / r_2 - on_1 / r_1), -alpha * h * on_2 / r_2]


def _phi(z: float, number: int) -> list[float]:
    """phi_1(z), ..., phi_number(z)."""
    if abs(z) >= 0.1:
        phi = [math.expm1(z) / z]
        for k in range(1, number):
            phi.append((phi[-1] - _ONE_OVER_FACTORIAL[k]) / z)
        return phi
    # That recursion loses digits here; downwards it gains them. Its start is Taylor's series.
    last = 0.0
    for k in range(number + 9, number - 1, -1):
        last = last * z + _ONE_OVER_FACTORIAL[k]
    phi = [last]
    for k in range(number - 1, 0, -1):
        phi.insert(0, phi[0] * z + _ONE_OVER_FACTORIAL[k])
    return phi


def _solve_vandermonde(points: list[float], right: list[float]) -> list[float]:
    """a with sum_i a_i r_i^k = b_k, k = 0 .. n - 1 (Björck and Pereyra, Math. Comp. 1970)."""
    a, n = list(right), len(points)
    for k in range(n - 1):
        for i in range(n - 1, k, -1):
            a[i] -= points[k] * a[i - 1]
    for k in range(n - 2, -1, -1):
        for i in range(k + 1, n):
            a[i] /= points[i] - points[i - k - 1]
        for i in range(k, n - 1):
            a[i] -= a[i + 1]
    return a


def _move(start: Tensor, clean: Tensor, weights: list[float], others: list[Tensor]) -> Tensor:
    """start + sum_i w_i (m_i - clean), a new tensor."""
    x = torch.sub(start, clean, alpha=sum(weights))
    for weight, other in zip(weights, others, strict=True):
        x.add_(other, alpha=weight)
    return x


def _order(order: int, steps: int | None, k: int) -> int:
    if steps is None:
        return order
    if k >= steps:
        raise ValueError(f"steps is {steps}, but the run has more")
    return min(order, steps - k)


def _check(order: int, steps: int | None) -> None:
    if order not in (2, 3):
        raise ValueError(f"order must be 2 or 3, got {order}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be positive, got {steps}")
