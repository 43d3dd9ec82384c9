"""What the system-embedded bridge is compared with, at the same network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.noise import KeyedNoise
from fluvial.core.operators.base import Operator
from fluvial.core.protocols import Field, LinearOperator, Noise, Sampler, Steering, left_broadcast
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.steering.inverse import DDNM, DDNMPlus, PiGDM
from fluvial.core.time import uniform_grid
from fluvial.data.format import Format
from fluvial.inverse.system_embedded_bridge.process import Deviation, scaled_noise
from fluvial.inverse.system_embedded_bridge.restorer import Loss, PairedRestorer
from fluvial.inverse.system_embedded_bridge.schedules import SB


class ScalarBridge(PairedRestorer):
    """The bridge from A^+ y to x_0 with numbers for coefficients: I2SB.

        x_t = alpha x_0 + (1 - alpha) A^+ y + sigma eps,

    alpha and sigma those of `SB`, in all of the space. It is SB's own path for x_t - A^+ y, and
    restores by that path's ancestral steps, which are I2SB's.

    Args:
        network, loss, format: see `PairedRestorer`.
        schedule: alpha and sigma.
        steps: of the restoration.

    Citation: Liu et al., I2SB: Image-to-Image Schrödinger Bridge, ICML 2023, arXiv 2302.05872.
    """

    def __init__(
        self,
        network: nn.Module,
        schedule: SB = SB(),  # noqa: B008 (frozen)
        *,
        steps: int = 50,
        loss: Loss = "absolute",
        format: Format | None = None,
    ) -> None:
        super().__init__(network, loss=loss, format=format)
        self.schedule, self.steps = schedule, steps

    def noised(
        self, x0: Tensor, t: Tensor, operator: LinearOperator, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        c = _pseudo_inverse(operator, self.obs_noise, x0, noise)
        alpha, sigma = (
            left_broadcast(f(t.double()), x0).to(x0)
            for f in (self.schedule.alpha, self.schedule.sigma)
        )
        return c + alpha * (x0 - c) + sigma * noise.normal(x0, "source"), c

    @torch.no_grad()
    def restore(
        self,
        measurement: Tensor,
        operator: LinearOperator | None = None,
        *,
        noise: Noise = KeyedNoise(0),
        steps: int | None = None,
        batch_size: int = 256,
    ) -> Tensor:
        """As `SystemEmbeddedBridge.restore`, by ancestral steps."""
        pairs = uniform_grid(self.steps if steps is None else steps)

        def run(y: Tensor, c: Tensor, operator: LinearOperator, noise: Noise) -> Tensor:
            field = _AboutTheStart(self, c)
            start = torch.zeros_like(c)
            moved = simulate(start, pairs, Ancestral(), self.schedule, field, noise)
            return c + cast(Tensor, moved)

        return self._restored(measurement, operator, self.obs_noise, noise, batch_size, False, run)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "schedule": self.schedule.as_json(), "steps": self.steps}


@dataclass(frozen=True)
class _AboutTheStart:
    """D - A^+ y at x = A^+ y + z."""

    model: PairedRestorer
    c: Tensor
    predicts: str = "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return self.model.denoise(self.c + x, self.c, t) - self.c


def _last(like: Tensor, noise: Noise, tag: str = "time") -> Tensor:
    return like.new_ones(len(like))


class Regression(PairedRestorer):
    """x_0 from A^+ y in one call of the same network, at t = 1, by the same loss."""

    times = staticmethod(_last)

    def noised(
        self, x0: Tensor, t: Tensor, operator: LinearOperator, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        c = _pseudo_inverse(operator, self.obs_noise, x0, noise)
        return c, c

    @torch.no_grad()
    def restore(
        self,
        measurement: Tensor,
        operator: LinearOperator | None = None,
        *,
        noise: Noise = KeyedNoise(0),
        batch_size: int = 256,
    ) -> Tensor:
        """As `SystemEmbeddedBridge.restore`, in one network call and without noise."""

        def run(y: Tensor, c: Tensor, operator: LinearOperator, noise: Noise) -> Tensor:
            return self.denoise(c, c, torch.ones((), dtype=torch.float64))

        return self._restored(measurement, operator, self.obs_noise, noise, batch_size, False, run)


def _pseudo_inverse(
    operator: LinearOperator, obs_noise: Deviation, x0: Tensor, noise: Noise
) -> Tensor:
    """A^+ y, with the noise that `perturb` gives the same rows."""
    seen = operator.A(x0)
    return operator.A_dagger(seen + scaled_noise(obs_noise, noise.normal(seen, "measurement")))


# Without training: a prior that knows of no system


def ddnm(
    field: Field,
    path: AlphaSigmaPath,
    y: Tensor,
    operator: Operator,
    *,
    obs_noise: float = 0.0,
    steps: int = 50,
    noise: Noise = KeyedNoise(0),
) -> Tensor:
    """x_0 from y by an unconditional prior: `DDNM` by ancestral steps, with noise `DDNMPlus`.

    Args:
        field: the prior, of any kind.
        path: that it was trained on.
        y: (batch, *measurement).
        operator: with a spectrum, if there is noise: its deviation is taken for that of the least
            singular value of A.
        obs_noise: standard deviation of y's noise.
        steps: network calls.
        noise: keyed noise.

    Citation: Wang, Yu and Zhang, ICLR 2023.
    """
    start = path.source(operator.A_dagger(y), noise)
    sampler: Sampler
    if obs_noise:
        values = cast(Tensor, operator.spectrum)
        least = float(values[values > 1e-6 * values.amax()].amin())
        sampler, steer = DDNMPlus(operator, y, obs_noise / least), None
    else:
        sampler, steer, field = Ancestral(), DDNM(operator, y), convert(field, "clean", path)
    return _from(start, field, path, sampler, steer, steps, noise)


def pigdm(
    field: Field,
    path: AlphaSigmaPath,
    y: Tensor,
    operator: LinearOperator,
    *,
    obs_noise: float = 0.0,
    std: float = 1.0,
    steps: int = 50,
    noise: Noise = KeyedNoise(0),
) -> Tensor:
    """x_0 from y by an unconditional prior: `PiGDM` by ancestral steps.

    Each step also goes backward through the network, some two calls more.

    Args:
        field, path, y, operator, obs_noise, steps, noise: see `ddnm`.
        std: standard deviation of the data.

    Citation: Song, Vahdat, Mardani and Kautz, ICLR 2023.
    """
    start = path.source(operator.A_dagger(y), noise)
    steer = PiGDM(operator, y, obs_noise, std)
    return _from(start, convert(field, "clean", path), path, Ancestral(), steer, steps, noise)


def _from(
    start: Tensor,
    field: Field,
    path: AlphaSigmaPath,
    sampler: Sampler,
    steer: Steering | None,
    steps: int,
    noise: Noise,
) -> Tensor:
    with torch.no_grad():
        run: Any = simulate
        return cast(Tensor, run(start, uniform_grid(steps), sampler, path, field, noise, steer))
