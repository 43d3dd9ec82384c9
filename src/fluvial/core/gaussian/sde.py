"""Samplers that draw noise: the reverse SDE, Langevin correctors, EDM's Heun with churn.

A path x_t = M x_0 + L eps is the law of dx = F x dt + G dW. Its marginals p_t are also those of

    dx = (v + sign(ds) (a / 2) G G^T score) ds + sqrt(a) G dW,    a >= 0,

in either direction of time, with v = F x - G G^T score / 2 the velocity of the probability flow:
what the noise adds to the spread, the drift towards denser regions takes back.

Every evaluation of the field is corrected by the steering, and those of one step see the same
``run.noise`` (see `fluvial.core.gaussian.ode`). The samplers draw with tags of their own, so a
steering may draw what it likes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from fluvial.core.gaussian.fields import combine, predicted, scalars
from fluvial.core.gaussian.levels import time_of
from fluvial.core.gaussian.linear import LinearSDE
from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.protocols import Run, Sampler
from fluvial.core.scales import Scalar


class EulerMaruyama:
    """x_s = x_t + (s - t) v + |s - t| (a / 2) G G^T score + sqrt(a |s - t|) G z, a = ``diffusion``.

    Weak order one; one evaluation a step. ``diffusion = 0`` is Euler's method for the probability
    flow and 1 the reverse SDE of the path (Song et al., ICLR 2021); more noise, up to any amount,
    forgets errors of earlier steps faster and needs shorter steps, since G^2 |s - t| a / sigma^2
    should be small. Pairs that rise simulate the same family forwards, and with a = 1 the path's
    own SDE, from t = 0 on with any a, as the score is undetermined there.

    Where alpha = 0, G is infinite: any amount of noise replaces all of x at once. Steps from there
    draw x_s = alpha_s clean + sigma_s z, which is what the SDE does for a clean prediction that
    stays as it is over the step.

    Args:
        diffusion: a >= 0.

    Raises:
        ValueError: ``diffusion`` is negative or not finite.
    """

    def __init__(self, diffusion: float = 1.0) -> None:
        if not 0 <= diffusion < math.inf:
            raise ValueError(f"diffusion must be finite and not negative, got {diffusion}")
        self.diffusion = diffusion

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        guess = predicted(x, run)
        clean = guess.clean if run.watched else None
        h = float(run.s) - float(run.t)
        if self.diffusion == 0 or h == 0:
            return torch.add(x, guess.velocity, alpha=h), memory, clean
        z = _noise(x, "euler-maruyama", guess.path, run)
        _, spread = guess.path.sde(run.t, **run.cond)
        if guess.alpha_sigma is None:
            _, level = guess.path.marginal(run.t, **run.cond)
            score = -level.T.solve(guess.ends()[1])
            pull = spread @ (spread.T @ score)
            x = x + h * guess.velocity + 0.5 * self.diffusion * abs(h) * pull
            return x + math.sqrt(self.diffusion * abs(h)) * (spread @ z), memory, clean
        g, sigma = float(cast(Scalar, spread).value), guess.alpha_sigma[1]
        if math.isinf(g):
            alpha_s, sigma_s = scalars(run.path, run.s, run.cond, "EulerMaruyama")
            return combine(sigma_s, z, alpha_s, guess.clean), memory, clean
        pull = -0.5 * self.diffusion * abs(h) * g * g / sigma if sigma else 0.0
        alpha_rate, sigma_rate = guess.rates
        x = guess.mix(h * alpha_rate, h * sigma_rate + pull, on_x=1.0)
        return x.add_(z, alpha=g * math.sqrt(self.diffusion * abs(h))), memory, clean


class Langevin:
    """Pairs (t, t): x <- x + step L L^T score + sqrt(2 step) L z, step = 2 snr^2.

    A Markov chain whose law tends to the marginal at t, up to O(step), and which so corrects what
    other steps left there (Song et al., ICLR 2021, algorithms 4 and 5). L L^T score is -L eps, so
    on a path of scalars the step is that of the score, 2 (snr sigma)^2. The paper scales each step
    by the ratio of the norms of z and the score in the batch, which is near sigma; sigma itself
    makes the step of a row independent of the others.

    Args:
        snr: > 0; the paper's r.

    Raises:
        ValueError: ``snr`` is not positive and finite; at a step, a pair with s != t.
    """

    def __init__(self, snr: float = 0.16) -> None:
        if not 0 < snr < math.inf:
            raise ValueError(f"snr must be positive and finite, got {snr}")
        self.snr = snr

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor | None]:
        if run.s != run.t:
            raise ValueError(
                f"Langevin takes pairs (t, t), got ({float(run.t)}, {float(run.s)}); "
                "PredictorCorrector takes both kinds"
            )
        guess = predicted(x, run)
        clean = guess.clean if run.watched else None
        step = 2 * self.snr**2
        z = _noise(x, "langevin", guess.path, run)
        if guess.alpha_sigma is None:
            _, level = guess.path.marginal(run.t, **run.cond)
            x = x + level @ (math.sqrt(2 * step) * z - step * guess.ends()[1])
            return x, memory, clean
        sigma = guess.alpha_sigma[1]
        x = guess.mix(0.0, -step * sigma, on_x=1.0)
        return x.add_(z, alpha=math.sqrt(2 * step) * sigma), memory, clean


class PredictorCorrector:
    """One sampler for the pairs that move, another for those that stay (Song et al., ICLR 2021).

    ``with_corrections`` of `fluvial.core.gaussian.schedule` puts pairs (s, s) into a grid.

    Args:
        predictor: for pairs with s != t; any sampler.
        corrector: for pairs with s = t, such as `Langevin`.
    """

    def __init__(self, predictor: Sampler, corrector: Sampler) -> None:
        self.predictor, self.corrector = predictor, corrector

    def start(self, x: Any) -> tuple[Any, Any]:
        return self.predictor.start(x), self.corrector.start(x)

    def step(self, x: Any, memory: tuple[Any, Any], run: Run) -> tuple[Any, Any, Any]:
        predictor, corrector = memory
        if run.s == run.t:
            x, corrector, clean = self.corrector.step(x, corrector, run)
        else:
            x, predictor, clean = self.predictor.step(x, predictor, run)
        return x, (predictor, corrector), clean


class EDMHeun:
    """Heun's method for x / alpha in r = sigma / alpha, after adding noise: EDM's algorithm 2.

    With r the noise level at t, a step to s < t first raises it, where s_min <= r <= s_max,

        x / alpha <- x / alpha + s_noise sqrt(r_hat^2 - r^2) z,    r_hat = (1 + churn) r,

    then takes an Euler step, x' = alpha_s D + sigma_s eps with D and eps predicted at r_hat, and
    then x_s = x' + alpha_s (r_s - r_hat) (eps' - eps) / 2 with eps' predicted at (x', s). Second
    order and two evaluations a step; one where s = 0 or alpha = 0 at the start, the step to x'.

    In EDM alpha is 1, sigma is the time, and the field predicts D; here the path and the field are
    any, and the grid is the run's (`fluvial.core.gaussian.schedule.karras_grid` has theirs). Noise
    is not raised beyond the level at which the path ends, nor where s > t. The clean prediction
    returned is D, after the noise.

    Args:
        churn: S_churn divided by the number of steps, at most sqrt(2) - 1: more is cut, as
            published. 0 is deterministic.
        s_min, s_max, s_noise: as published.

    Raises:
        ValueError: ``churn`` or ``s_noise`` is negative, or ``s_min`` > ``s_max``; at a step, a
            path without one alpha and one sigma for all rows.

    Citation: Karras, Aittala, Aila and Laine, NeurIPS 2022.
    """

    def __init__(
        self,
        churn: float = 0.0,
        s_min: float = 0.0,
        s_max: float = math.inf,
        s_noise: float = 1.0,
    ) -> None:
        if not (churn >= 0 and s_noise >= 0):
            raise ValueError(f"churn and s_noise must be >= 0, got {churn} and {s_noise}")
        if not s_min <= s_max:
            raise ValueError(f"s_min must be at most s_max, got {s_min} and {s_max}")
        self.churn = min(churn, math.sqrt(2) - 1)
        self.s_min, self.s_max, self.s_noise = s_min, s_max, s_noise

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor]:
        if run.s == run.t:
            return x, memory, predicted(x, run).clean
        alpha, sigma = scalars(run.path, run.t, run.cond, "EDMHeun")
        alpha_s, sigma_s = scalars(run.path, run.s, run.cond, "EDMHeun")
        level = sigma / alpha if alpha else math.inf
        if self.churn and run.s < run.t and alpha and self.s_min <= level <= self.s_max:
            x, level, run = self._raise(x, alpha, level, run)
        guess = predicted(x, run)
        euler = guess.mix(alpha_s, sigma_s)
        if sigma_s == 0 or math.isinf(level):
            return euler, memory, guess.clean
        half = 0.5 * (sigma_s - alpha_s * level)
        after = predicted(euler, replace(run, t=run.s))
        x = guess.mix(alpha_s, sigma_s - half).add_(after.mix(0.0, half))
        return x, memory, guess.clean

    def _raise(self, x: Tensor, alpha: float, level: float, run: Run) -> tuple[Tensor, float, Run]:
        """(x, r_hat, run at its time): the path's transition, if s_noise is 1."""
        aim = torch.tensor((1 + self.churn) * level, dtype=torch.float64)
        run = replace(run, t=time_of(cast(AlphaSigmaPath, run.path), aim))
        alpha_hat, sigma_hat = scalars(run.path, run.t, run.cond, "EDMHeun")
        spread = math.sqrt(max(sigma_hat**2 - (alpha_hat * level) ** 2, 0.0))
        z = run.noise.normal(x, "churn")
        x = combine(alpha_hat / alpha, x, self.s_noise * spread, z)
        return x, sigma_hat / alpha_hat if alpha_hat else math.inf, run


def _noise(x: Tensor, tag: str, path: Any, run: Run) -> Tensor:
    """z, of the colour that the path gives its noise (`fluvial.core.gaussian.linear`)."""
    if isinstance(path, LinearSDE):
        return path.white(x, run.noise, tag, **run.cond)
    return run.noise.normal(x, tag)
