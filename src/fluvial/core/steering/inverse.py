"""Linear inverse problems y = A x_0 + n without training: the posterior of a prior that is a field.

An operator is any `LinearOperator`, such as those of `fluvial.core.operators`. ``y`` holds one
measurement a row, or one for all rows. To guide by conditions too, bend the field first:
``ClassifierFree(2.0).bend(field)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fluvial.core.gaussian.fields import ends, predict
from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.operators.iterative import conjugate_gradients as _conjugate_gradients
from fluvial.core.protocols import GaussianPath, LinearOperator, Run, State, Steering
from fluvial.core.steering.rewards import (
    WITHOUT_GRADIENT,
    Differentiable,
    GradientSteering,
    check_std,
    clean_and_covariance,
    isotropic_variance,
)
from fluvial.core.time import check_pairs, grid_pairs


@dataclass
class DPS(GradientSteering):
    """Diffusion posterior sampling: p(y | x_t) is taken as p(y | x_0 = x_hat(x_t)).

    With ``obs_noise`` s, the clean prediction moves by what that likelihood's score implies,

        x_hat <- x_hat + scale / s^2 * C_t A^T (y - A x_hat),

    with C_t = Cov[x_0 | x_t] by one backward pass through the field. It leaves out the spread of
    A x_0 about A x_hat, and so pulls too hard: posteriors come out too narrow. Solvers are stable
    from some (|A| std / s)^2 / 2 steps on only. Without ``obs_noise``, the published algorithm,

        x_s <- x_s - scale * grad_x |y - A x_hat(x_t)|   after every step that falls,

    whose effect depends on the number of steps: ``scale`` is tuned for one grid. There x_t is where
    the sampler called the field last, and the field may not predict a mean velocity.

    Args:
        operator, y: the measurement.
        obs_noise: standard deviation of n.
        scale: of the correction; 1 with ``obs_noise`` by the derivation.
        std: standard deviation of the data, for C_t where alpha = 0.

    Raises:
        ValueError: ``y`` is not finite; ``obs_noise``, ``scale`` or ``std`` is not positive.

    Citation: Chung, Kim, McCann, Klasky and Ye, ICLR 2023.
    """

    operator: LinearOperator
    y: Tensor
    obs_noise: float | None = None
    scale: float = 1.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _check_y(self.y)
        check_std(self.std)
        if self.obs_noise is not None and not 0 < self.obs_noise < math.inf:
            raise ValueError(f"obs_noise must be positive, or None, got {self.obs_noise}")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {self.scale}")

    def clean(self, clean: State, x: State, aim: Any, run: Run) -> State:
        if self.obs_noise is None:
            return clean
        clean = cast(Tensor, clean)
        residual = _residual(self.operator, self.y, clean)
        _, covariance = clean_and_covariance(cast(Tensor, x), run, self.std)
        shift = covariance(self.operator.A_adjoint(residual))
        return clean + self.scale / self.obs_noise**2 * shift

    def after(self, x: State, clean: State, aim: Any, run: Run) -> tuple[State, Any, Tensor | None]:
        field = run.field
        if self.obs_noise is not None or run.s > run.t:
            return x, aim, None
        if not isinstance(field, Differentiable) or field.last is None:
            raise ValueError("DPS without obs_noise needs a sampler that calls the field it bent")
        _, t, leaf, value = field.last
        if not value.requires_grad:
            raise ValueError(WITHOUT_GRADIENT)
        with torch.enable_grad():
            path = cast(GaussianPath, run.path)
            guess, _ = ends(field.predicts, value, leaf, t, path, **run.cond)
            # the gradient of a norm is 0 / 0 at 0
            squares = (
                _residual(self.operator, self.y, guess).square().unsqueeze(1).flatten(1).sum(1)
            )
            length = squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()
            (gradient,) = torch.autograd.grad(length.sum(), leaf)
        return cast(Tensor, x) - self.scale * gradient, aim, None


@dataclass
class PiGDM(GradientSteering):
    """Pseudoinverse-guided diffusion: x_0 | x_t is taken as N(x_hat, r_t^2 I).

        x_hat <- x_hat + C_t A^T (obs_noise^2 I + r_t^2 A A^T)^-1 (y - A x_hat),

    r_t^2 = std^2 sigma^2 / (alpha^2 std^2 + sigma^2), C_t = Cov[x_0 | x_t] by one backward pass
    through the field. Exact for data N(mean, std^2 I) and any operator. The system is solved by
    conjugate gradients, one iteration for each distinct singular value of A, so one for masks and
    averages; without noise the pseudo-inverse solves it.

    Args:
        operator, y: the measurement.
        obs_noise: standard deviation of n, 0 allowed.
        std: standard deviation of the data about their mean.
        iterations: of conjugate gradients, at most.

    Raises:
        ValueError: ``y`` is not finite, ``obs_noise`` is negative, ``std`` not positive,
            ``iterations`` below 1.

    Citation: Song, Vahdat, Mardani and Kautz, ICLR 2023; Pokle et al., TMLR 2024 (flows).
    """

    operator: LinearOperator
    y: Tensor
    obs_noise: float = 0.0
    std: float = 1.0
    iterations: int = 20

    def __post_init__(self) -> None:
        _check_y(self.y)
        _check_obs_noise(self.obs_noise)
        check_std(self.std)
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}")

    def clean(self, clean: State, x: State, aim: Any, run: Run) -> State:
        clean, operator = cast(Tensor, clean), self.operator
        residual = _residual(operator, self.y, clean)
        variance = isotropic_variance(run, self.std)
        if self.obs_noise == 0:  # A^T (A A^T)^+ is the pseudo-inverse
            back = operator.A_dagger(residual) / variance.clamp(min=torch.finfo(torch.float32).tiny)
        else:
            solved = _conjugate_gradients(
                lambda u: self.obs_noise**2 * u + variance * operator.A(operator.A_adjoint(u)),
                residual,
                self.iterations,
            )
            back = operator.A_adjoint(solved)
        _, covariance = clean_and_covariance(cast(Tensor, x), run, self.std)
        return clean + covariance(back)


@dataclass
class DDNM(Steering):
    """The range of A^T from the measurement, its null space from the model, at every step.

        x_hat <- A^+ y + (I - A^+ A) x_hat

    The sample satisfies A x_0 = y to rounding, so y must be without noise (`DDNMPlus` where it is
    not). Published with DDIM of eta 0.85; `Ancestral`, eta 1, and solvers of the flow work too.

    Args:
        operator, y: the measurement.

    Raises:
        ValueError: ``y`` is not finite.

    Citation: Wang, Yu and Zhang, ICLR 2023.
    """

    operator: LinearOperator
    y: Tensor

    def __post_init__(self) -> None:
        _check_y(self.y)

    def clean(self, clean: State, x: State, aim: Any, run: Run) -> State:
        return self.end(clean, aim)

    def end(self, x0: State, aim: Any) -> State:
        x0 = cast(Tensor, x0)
        return x0 + self.operator.A_dagger(_residual(self.operator, self.y, x0))


@dataclass
class DDNMPlus:
    """`DDNM` for a measurement with noise: a sampler, since the noise it adds must make room.

    A step draws from the path's posterior q(x_s | x_t, x_0 = x_hat) = N(m, k^2 I), whose mean has
    the coefficient c = alpha_s (1 - rho^2) on x_hat, k = sigma_s sqrt(1 - rho^2). With

        x_hat <- x_hat + g A^+ (y - A x_hat),      g = min(1, k / (c obs_noise)),

    the measurement brings the noise g c obs_noise into the range of A^+, where the step adds the
    rest only, of variance k^2 - (g c obs_noise)^2. Steps that rise are the path's transition, for
    the time travel of the paper (`resampled`).

    Each step takes the measurement's noise as new, while it is the same in all. So the more steps
    there are, the more of that noise stays in the sample; `PiGDM` weighs it as the posterior does.

    Args:
        operator, y: the measurement.
        obs_noise: standard deviation of A^+ n along its directions, as if A had equal singular
            values a: that of n over a. For masks that is the noise of y, for averages of k
            coordinates sqrt(k) times that.

    Raises:
        ValueError: ``y`` is not finite, ``obs_noise`` is negative.
        TypeError: in a step, a path without scalar coefficients.

    Citation: Wang, Yu and Zhang, ICLR 2023 (section 3.3, the form without singular vectors).
    """

    operator: LinearOperator
    y: Tensor
    obs_noise: float

    def __post_init__(self) -> None:
        _check_y(self.y)
        _check_obs_noise(self.obs_noise)

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor]:
        path, operator, t, s = run.path, self.operator, run.t, run.s
        if not isinstance(path, AlphaSigmaPath):
            raise TypeError(f"DDNMPlus needs scalar coefficients, got {type(path).__name__}")
        kind, value = predict(run.field, x, t, **run.cond)
        clean = cast(Tensor, run.clean(ends(kind, value, x, t, path, **run.cond)[0], x))
        if s > t:
            return path.transition(x, t, s, run.noise, **run.cond), memory, clean

        if s == t:
            return x, memory, clean
        rho = path.alpha(t) * path.sigma(s) / (path.alpha(s) * path.sigma(t))
        weight = path.alpha(s) * (1 - rho.square())
        spread = path.sigma(s) * (1 - rho.square()).clamp(min=0).sqrt()
        arriving = weight * self.obs_noise
        gain = 1.0 if arriving <= spread else spread / arriving
        missing = (spread.square() - (gain * arriving).square()).clamp(min=0).sqrt()

        clean = clean + gain * operator.A_dagger(_residual(operator, self.y, clean))
        noise = run.noise.normal(x, "posterior")
        seen = operator.A_dagger(operator.A(noise))
        x = path.sigma(s) / path.sigma(t) * rho * x + weight * clean
        return x + spread * (noise - seen) + missing * seen, memory, clean


@dataclass
class RePaint(Steering):
    """After every step that falls, what was measured is replaced by its own noised version.

        x_s <- x_s + A^+ A (x'_s - x_s),      x'_s ~ q(x_s | x_0 = A^+ y).

    For a mask: the known region is drawn along the path from the known values. One pass harmonises
    the two regions poorly; simulate along `resampled` pairs, with `Ancestral`, so that each stretch
    of the way is travelled several times.

    Args:
        operator, y: the measurement, without noise: the sample satisfies A x_0 = y to rounding.

    Raises:
        ValueError: ``y`` is not finite.

    Citation: Lugmayr et al., CVPR 2022.
    """

    operator: LinearOperator
    y: Tensor

    def __post_init__(self) -> None:
        _check_y(self.y)

    def after(self, x: State, clean: State, aim: Any, run: Run) -> tuple[State, Any, Tensor | None]:
        if run.s > run.t:
            return x, aim, None
        x, operator = cast(Tensor, x), self.operator
        # A known = y, as of A^+ y; its other part is not used
        known = x + operator.A_dagger(_residual(operator, self.y, x))
        drawn = cast(Tensor, run.path.sample(known, run.s, run.noise, **run.cond).x)
        return x + operator.A_dagger(operator.A(drawn - x)), aim, None


def resampled(pairs: Tensor, jump: int, repeats: int) -> Tensor:
    """Pairs that travel every stretch of ``jump`` steps ``repeats`` times, rising in between.

    A rise of a whole stretch is one step: the path's transition has the law of its parts.

    Args:
        pairs: (K, 2), falling times.
        jump: steps of a stretch; the last may be shorter. RePaint: 10, of 250 steps.
        repeats: 1 changes nothing. RePaint: 10.

    Returns:
        (K repeats + (repeats - 1) ceil(K / jump), 2), for `fluvial.core.simulate.simulate`.

    Raises:
        ValueError: ``pairs`` is no chain or does not fall, ``jump`` or ``repeats`` is below 1.
    """
    check_pairs(pairs)
    if not bool((pairs[:, 1] < pairs[:, 0]).all()):
        raise ValueError(f"pairs must fall, got {pairs.tolist()}")
    if jump < 1 or repeats < 1:
        raise ValueError(f"jump and repeats must be at least 1, got {jump} and {repeats}")
    times = [float(pairs[0, 0])]
    for first in range(0, len(pairs), jump):
        stretch = [float(t) for t in pairs[first : first + jump, 1]]
        top = float(pairs[first, 0])
        times += stretch + ([top, *stretch] * (repeats - 1))
    return grid_pairs(times)


def _check_y(y: Tensor) -> None:
    if not isinstance(y, Tensor) or not y.is_floating_point():
        got = y.dtype if isinstance(y, Tensor) else type(y).__name__
        raise TypeError(f"y must be a floating tensor, got {got}")
    if y.ndim == 0 or not bool(y.isfinite().all()):
        raise ValueError(f"y must be finite, (batch, ...), got shape {tuple(y.shape)}")


def _check_obs_noise(obs_noise: float) -> None:
    if not 0 <= obs_noise < math.inf:
        raise ValueError(f"obs_noise must be at least 0 and finite, got {obs_noise}")


def _residual(operator: LinearOperator, y: Tensor, x: Tensor) -> Tensor:
    """y - A x; `ValueError` where their shapes differ by more than the rows of ``y``."""
    seen = operator.A(x)
    if y.shape[1:] != seen.shape[1:] or len(y) not in (1, len(seen)):
        raise ValueError(
            f"y must have the shape of A(x), {tuple(seen.shape)}, or one row, got {tuple(y.shape)}"
        )
    return y.to(seen) - seen
