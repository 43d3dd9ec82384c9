"""The process with the measurement system inside its coefficients, and how it is simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, cast, get_args

import torch
from torch import Tensor

from fluvial.core.gaussian.fields import predicted
from fluvial.core.gaussian.linear import RangeNull
from fluvial.core.protocols import (
    Field,
    LinearOperator,
    Noise,
    Run,
    Sampler,
    Steering,
    left_broadcast,
)
from fluvial.core.scales import Split, mix
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import uniform_grid
from fluvial.inverse.system_embedded_bridge.schedules import Schedule

Method: TypeAlias = Literal["ancestral", "sde", "ode"]
Deviation: TypeAlias = float | Tensor
"""S^(1/2), the root of the covariance of a measurement's noise: one standard deviation, or one for
each of its numbers, shaped to go with (batch, *measurement)."""


@dataclass(frozen=True, eq=False)
class EmbeddedPath(RangeNull):
    """x_t = (P + alpha Q) x_0 + sqrt(gamma) A^+ S^(1/2) n + sqrt(beta) Q eps, P = A^+ A, Q = 1 - P.

    It is the law of

        dx = (alpha' / alpha) Q x dt + sqrt(gamma') A^+ S^(1/2) dW_y
             + sqrt(beta' - 2 beta alpha' / alpha) Q dW_x,

    whose noise in the range is that of the measurement brought back by A^+: correlated, where A is
    no mask. Measured without noise, the range stands still. Make it with `of`.

    Args:
        inside, outside, operator: see `RangeNull`.
        obs_noise: S^(1/2).

    Citation: Sobieski et al., NeurIPS 2025, arXiv 2506.23726.
    """

    obs_noise: Deviation = 0.0

    @classmethod
    def of(cls, schedule: Schedule, operator: LinearOperator, obs_noise: Deviation = 0.0) -> Self:
        """The path of a schedule for one system."""
        inside = schedule.inside if noisy(obs_noise) else None
        return cls(inside, schedule, operator, obs_noise)

    def white(self, like: Tensor, noise: Noise, tag: str, **cond: Any) -> Tensor:
        """A^+ S^(1/2) n + Q eps, n in the space of measurements and eps in that of events."""
        operator = cast(LinearOperator, cond.get("operator", self.operator))
        eps = noise.normal(like, tag)
        if self.inside is None:  # the range gets none
            return eps
        seen = operator.A(eps)
        n = scaled_noise(self.obs_noise, noise.normal(seen, f"{tag} of the measurement"))
        return eps + operator.A_dagger(n - seen)

    def scale(self, values: Sequence[float]) -> Split:
        """The number in the range, the one in the null space."""
        operator = cast(LinearOperator, self.operator)
        return Split(operator, torch.tensor(values, dtype=torch.float64))


def noisy(obs_noise: Deviation) -> bool:
    """Is there any noise?"""
    return bool((obs_noise != 0).any()) if isinstance(obs_noise, Tensor) else obs_noise != 0


def scaled_noise(obs_noise: Deviation, n: Tensor) -> Tensor:
    """S^(1/2) n."""
    return (obs_noise.to(n) if isinstance(obs_noise, Tensor) else obs_noise) * n


def perturb(
    schedule: Schedule,
    operator: LinearOperator,
    obs_noise: Deviation,
    x0: Tensor,
    t: Tensor,
    noise: Noise,
    *,
    consistent: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x_t, A^+ y, y) of clean ``x0`` at ``t``, () or (batch,): what a step of training sees.

    y = A x_0 + S^(1/2) n. In the range of A^+ the noise of x_t is A^+ S^(1/2) n_t, with

        n_t = gamma n + sqrt(gamma (1 - gamma)) n',

    the bridge's law given its end A^+ y, so that the same noise is in both, as it is when a
    measurement is restored. If not ``consistent`` n_t = sqrt(gamma) n', as published: the network
    is then taught with two measurements, and is too sure of the range when it gets one twice.
    """
    seen = operator.A(x0)
    n = scaled_noise(obs_noise, noise.normal(seen, "measurement"))
    y = seen + n
    gamma = left_broadcast(schedule.gamma(t.double()), seen)
    fresh = scaled_noise(obs_noise, noise.normal(seen, "range"))
    if consistent:
        n_t = gamma.to(n) * n + (gamma * (1 - gamma)).clamp(min=0).sqrt().to(n) * fresh
    else:
        n_t = gamma.sqrt().to(n) * fresh
    sigma = left_broadcast(schedule.sigma(t.double()), x0).to(x0)
    alpha = left_broadcast(schedule.alpha(t.double()), x0).to(x0)
    # alpha x_0 + sigma eps in all of the space, and A^+ puts right what it says of the range
    free = alpha * x0 + sigma * noise.normal(x0, "null")
    x = free + operator.A_dagger(seen + n_t - operator.A(free))
    return x, operator.A_dagger(y), y


class ReverseEuler:
    """Euler's step of the reverse SDE, or of the probability flow, with the clean end predicted.

        x <- x + h (-F x + (1 + a) / 2 K r) + sqrt(a h) G n,    r = H D - x, K = G G^T / Sigma,

    which is gamma' / gamma in the range and beta' / beta - 2 alpha' / alpha in the null space, and
    a = 1 for the SDE, 0 for the flow. As `fluvial.core.gaussian.sde.EulerMaruyama`, with one
    projection a step and one more for the noise, where that takes ten: operators may be slow.

    Args:
        diffusion: a.
        end: the step that ends there gets no noise.
    """

    def __init__(self, diffusion: float, end: float) -> None:
        self.diffusion, self.end = diffusion, end

    def start(self, x: Any) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor]:
        path, t = cast(EmbeddedPath, run.path), run.t
        clean = predicted(x, run).clean
        h, a = float(t - run.s), self.diffusion
        on_x: list[float] = []
        on_clean: list[float] = []
        on_noise: list[float] = []
        for part in (path.inside, path.outside):
            if part is None:  # what stays does not move
                numbers = 1.0, 0.0, 0.0
            else:
                drift, spread = (float(scale.value) for scale in part.sde(t))
                pull = (1 + a) / 2 * (spread / float(part.sigma(t))) ** 2
                numbers = (
                    1 - h * (drift + pull),
                    h * pull * float(part.alpha(t)),
                    math.sqrt(a * h) * spread,
                )
            for values, value in zip((on_x, on_clean, on_noise), numbers, strict=True):
                values.append(value)
        terms = [(path.scale(on_x), x), (path.scale(on_clean), clean)]
        if a and float(run.s) != self.end:
            z = path.white(x, run.noise, "euler-maruyama", **run.cond)
            terms.append((path.scale(on_noise), z))
        return mix(*terms), memory, clean


ENDS: dict[str, tuple[float, float]] = {
    "ancestral": (1.0, 0.0),
    "sde": (1 - 1e-2, 1e-5),
    "ode": (1 - 1e-2, 1e-5),
}
"""(t_max, t_min) of each method. Published for the SDE: 1e-5 off both ends, for some data with
SB 1e-2 off 0 and 1e-2 or 5e-2 off 1; VP in 100 steps of the SDE from 1 - 1e-5 multiplies the null
space by some -500 at once."""


def span(
    method: Method, schedule: Schedule, t_max: float | None, t_min: float | None
) -> tuple[float, float]:
    """(t_max, t_min) to simulate between.

    Raises:
        ValueError: an unknown method; times that are not 0 <= t_min < t_max <= 1; an end at which
            the method's coefficients are infinite.
    """
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {', '.join(get_args(Method))}, got {method!r}")
    high, low = (
        default if value is None else value
        for default, value in zip(ENDS[method], (t_max, t_min), strict=True)
    )
    if not 0 <= low < high <= 1:
        raise ValueError(f"need 0 <= t_min < t_max <= 1, got t_min={low} and t_max={high}")
    if method != "ancestral" and high == 1 and schedule.singular:
        raise ValueError(
            f"t_max must be below 1 for method {method!r}, as alpha of "
            f"{type(schedule).__name__} is 0 there; 'ancestral' starts at 1"
        )
    return high, low


def backwards(
    path: EmbeddedPath,
    field: Field,
    y: Tensor,
    noise: Noise,
    *,
    steps: int,
    method: Method = "ancestral",
    t_max: float | None = None,
    t_min: float | None = None,
    steer: Steering | None = None,
) -> Tensor:
    """Simulate from the measurement to the clean end.

    The start is A^+ y + sqrt(beta(t_max)) Q eps. Equal steps of

    * ``"ancestral"``: the exact Gaussian step from t to s given the predicted clean end. From t = 1
      exactly, to s = 0, where it returns the prediction; nothing blows up at either end;
    * ``"sde"``: Euler and Maruyama's step of the reverse SDE, x <- x + h (-F x + K r) + sqrt(h) G
      n with r = H D - x and K = (gamma' / gamma) P + (beta' / beta - 2 alpha' / alpha) Q, and no
      noise in the last one. (corrected: the published code has beta' / beta in the range too, which
      for SB is negative near t = 1 and drives away from the prediction);
    * ``"ode"``: Euler's step of the probability flow, with K / 2 and no noise.

    Args:
        path: of the system.
        field: predicts the clean end.
        y: (batch, *measurement).
        noise: keyed noise.
        steps: network calls.
        method: see above.
        t_max, t_min: where to start and end; see `ENDS`.
        steer: bends the simulation.

    Raises:
        ValueError: as `span`; ``steps`` below 1.
    """
    schedule = cast(Schedule, path.outside)
    high, low = span(method, schedule, t_max, t_min)
    operator = cast(LinearOperator, path.operator)
    back = operator.A_dagger(y)
    eps = noise.normal(back, "source")
    level = float(schedule.sigma(torch.tensor(high, dtype=torch.float64)))
    x = back + level * (eps - operator.A_dagger(operator.A(eps)))
    samplers: dict[str, Sampler] = {
        "ancestral": Ancestral(),
        "sde": ReverseEuler(1.0, low),
        "ode": ReverseEuler(0.0, low),
    }
    pairs = uniform_grid(steps, high, low)
    return cast(Tensor, simulate(x, pairs, samplers[method], path, field, noise, steer))
