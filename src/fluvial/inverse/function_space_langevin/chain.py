"""The Markov chain: preconditioned Langevin steps, what is kept of them, and whether they mixed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

from fluvial.core.protocols import Field, Run, State, Steering
from fluvial.inverse.function_space_langevin.forward import Forward
from fluvial.inverse.function_space_langevin.theory import Principal, check_step

LOBATTO = ((0.5 * (1 - 5**-0.5), 0.5 * (1 + 5**-0.5)), (1 / 12, 5 / 12))
"""Gauss and Lobatto's rule on [0, 1]: inner nodes, weights of an end and of an inner node."""


@dataclass(frozen=True, eq=False)
class PosteriorDrift:
    """S(x, t) + C A^T (y - A x) / obs_noise^2: the drift of the posterior, a field.

    Args:
        prior: a field that predicts S.
        gain: C / obs_noise^2, (J,) or (J, J), with the C of S.
        forward: A.
        y: the measurement, (1 or batch, *measured).

    All are in the dtype and on the device of the states.
    """

    prior: Field
    gain: Tensor
    forward: Forward
    y: Tensor
    predicts: str = "drift"

    @property
    def linear(self) -> bool:
        """Is it linear in x? A prior says so by ``linear``."""
        return bool(getattr(self.prior, "linear", False))

    @property
    def diagonal(self) -> bool:
        """Is the drift of a mode a function of that mode alone? A prior says so by ``diagonal``."""
        prior = bool(getattr(self.prior, "diagonal", False))
        return prior and self.forward.diagonal and self.gain.ndim == 1

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        pull = self.forward.A_adjoint(self.y - self.forward.A(x))
        pull = self.gain * pull if self.gain.ndim == 1 else pull @ self.gain.mT
        return cast(Tensor, self.prior(x, t, **cond)) + pull


class PreconditionedLangevin:
    """Pairs (t, t): a step h of dX = drift dtau + sqrt(2 C) dW, the field's drift at t.

    In the frame W of ``principal``, W W^T = C, in which a linear drift falls apart into modes of
    the rates kappa,

        x <- x + W (gain W^-1 drift + spread xi),    xi ~ N(0, I),

    with gain = h and spread^2 = 2 h of Euler's method; or, ``exact``, gain = (1 - exp(-h kappa)) /
    kappa and spread^2 = (1 - exp(-2 h kappa)) / kappa, which is the exact step if the drift is
    linear with these rates, and else exponential Euler, exact for the linear part. Its noise is
    keyed by the mode: chains with fewer modes are the first modes of those with more.

    With ``metropolis`` a step is accepted by Metropolis and Hastings' rule. The ratio of densities
    is the integral of <C^-1 drift, dx> along the step, by the trapezoidal rule if the field says
    that it is ``linear``, where that is exact, else by Lobatto's rule of four nodes: no density is
    asked for, and a learned field that is no gradient has none. If the field says that its modes
    are independent (``diagonal``), each is accepted or not by itself, and the rate of acceptance
    does not fall with their number.

    Args:
        h: step > 0.
        principal: frame and rates.
        exact: take the exact step of the linear part.
        metropolis: correct each step.

    Raises:
        ValueError: ``h`` is not positive, or too large for Euler's method, h max(kappa) >= 2; at a
            step, a field that does not predict a drift or a pair with s != t.
    """

    def __init__(
        self,
        h: float,
        principal: Principal,
        *,
        exact: bool = True,
        metropolis: bool = False,
    ) -> None:
        if not 0 < h < math.inf:
            raise ValueError(f"h must be positive and finite, got {h}")
        kappa = principal.rates.double()
        if exact:
            self.gain = -torch.expm1(-h * kappa) / kappa
            self.spread = (-torch.expm1(-2 * h * kappa) / kappa).sqrt()
        else:
            check_step(h, kappa)
            self.gain = torch.full_like(kappa, h)
            self.spread = torch.full_like(kappa, math.sqrt(2 * h))
        self.principal, self.metropolis = principal, metropolis
        self.tried = 0
        self.accepted: Tensor | float = 0.0

    @property
    def acceptance(self) -> Tensor | None:
        """Share of accepted steps, () or (J,) where modes are independent; None without a test."""
        return torch.as_tensor(self.accepted) / self.tried if self.tried else None

    def start(self, x: Tensor) -> None:
        self.tried, self.accepted = 0, 0.0
        # converted once, and not at every step
        frame = Principal(*(part.to(x) for part in self.principal))
        self._like_x = self.gain.to(x), self.spread.to(x), frame
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor]:
        if run.s != run.t:
            raise ValueError(
                f"PreconditionedLangevin takes pairs (t, t), got ({float(run.t)}, {float(run.s)})"
            )
        if run.field.predicts != "drift":
            raise ValueError(
                f"PreconditionedLangevin needs a field that predicts 'drift', got "
                f"{run.field.predicts!r}"
            )
        xi = run.noise.normal(x, "langevin")
        drift = self._drift(x, run) if memory is None else memory
        gain, spread, frame = self._like_x
        if not self.metropolis:
            if frame.frame.ndim == 1:
                moved = torch.addcmul(torch.addcmul(x, gain, drift), spread * frame.frame, xi)
            else:
                moved = x + frame.colour(gain * frame.whiten(drift) + spread * xi)
            return moved, None, moved
        here = frame.whiten(drift)
        jump = gain * here + spread * xi  # in the frame
        proposal = x + frame.colour(jump)
        arrived = self._drift(proposal, run)
        both = here + frame.whiten(arrived)
        if getattr(run.field, "linear", False):
            density = 0.5 * both * jump
        else:
            nodes, (end, inner) = LOBATTO
            points = [self._drift(torch.lerp(x, proposal, node), run) for node in nodes]
            density = (end * both + inner * frame.whiten(points[0] + points[1])) * jump
        back = xi + gain / spread * both  # minus the noise that would go back
        log_ratio = density + 0.5 * (xi.square() - back.square())
        independent = bool(getattr(run.field, "diagonal", False))
        if not independent:
            log_ratio = log_ratio.sum(1, keepdim=True)
        accept = run.noise.uniform(log_ratio, "accept").log() < log_ratio
        self.tried += 1
        self.accepted = self.accepted + accept.double().mean(0 if independent else None)
        x = torch.where(accept, proposal, x)
        return x, torch.where(accept, arrived, drift), x

    @staticmethod
    def _drift(x: Tensor, run: Run) -> Tensor:
        return cast(Tensor, run.field(x, run.t, **run.cond))


class Recorder(Steering):
    """Keeps every ``thin``-th state after ``burn`` steps: states, and moments over all of them.

    Args:
        steps: of the run, for the progress bar.
        burn, thin: as above.
        states: keep the states themselves; moments alone need no memory.
        progress: show a bar.
    """

    def __init__(
        self, steps: int, burn: int, thin: int, *, states: bool = True, progress: bool = False
    ) -> None:
        self.burn, self.thin, self.states = burn, thin, states
        self.kept: list[Tensor] = []
        self.count = 0
        self.last: Tensor | None = None
        self.bar = tqdm(total=steps, desc="langevin", disable=not progress)

    def after(self, x: State, clean: State, aim: Any, run: Run) -> tuple[State, Any, Tensor | None]:
        self.bar.update()
        done = run.k + 1 - self.burn
        if done > 0 and done % self.thin == 0:
            self._keep(cast(Tensor, x))
        return x, aim, None

    def end(self, x0: State, aim: Any) -> State:
        self.bar.close()
        return x0

    def _keep(self, x: Tensor) -> None:
        if self.states:
            self.kept.append(x)
        if self.last is None:
            # about a point in their midst squares do not cancel
            self.origin = x.double().mean(0)
            self.first = x.double() - self.origin
            self.sums = self.first.new_zeros(3, x.shape[1])
        centred = x.double() - self.origin
        self.sums[0] += centred.sum(0)
        self.sums[1] += centred.square().sum(0)
        if self.last is not None:
            self.sums[2] += (centred * self.last).sum(0)
        self.count += len(x)
        self.last = centred

    @property
    def mean(self) -> Tensor:
        """Over chains and kept steps, (J,) float64."""
        return self.origin + self.sums[0] / self.count

    @property
    def variance(self) -> Tensor:
        """About the mean over chains and kept steps, (J,) float64."""
        return self.sums[1] / self.count - (self.sums[0] / self.count).square()

    @property
    def autocorrelation(self) -> Tensor:
        """Of a kept state and the next one, (J,) float64; NaN if one was kept.

        As the slope of the regression of the next on the one before: of a chain that is still on
        its way, whose variance grows, the quotient of products and squares would say less.
        """
        assert self.last is not None
        pairs = self.count - len(self.last)
        if not pairs:
            return torch.full_like(self.origin, math.nan)
        before = (self.sums[0] - self.last.sum(0)) / pairs
        after = (self.sums[0] - self.first.sum(0)) / pairs
        squares = (self.sums[1] - self.last.square().sum(0)) / pairs - before.square()
        return (self.sums[2] / pairs - before * after) / squares


def r_hat(draws: Tensor) -> Tensor:
    """Split R-hat of (chains, kept, J), (J,): near 1 once chains forgot where they started.

    The root of the ratio of the variance over all half chains to that within them.

    Raises:
        ValueError: fewer than four kept states.

    Citation: Gelman et al., Bayesian Data Analysis, 3rd edition, section 11.4.
    """
    _check_draws(draws)
    half = draws.shape[1] // 2
    parts = torch.cat([draws[:, :half], draws[:, -half:]]).double()
    within = parts.var(1).mean(0)
    between = parts.mean(1).var(0)
    return ((within * (half - 1) / half + between) / within).sqrt()


def effective_samples(draws: Tensor) -> Tensor:
    """Independent draws that would estimate the mean as well as (chains, kept, J) do, (J,).

    m n / (1 + 2 sum of the autocorrelations), which are pooled over chains about the common mean
    and summed in pairs, as long as the pairs fall and are positive.

    Raises:
        ValueError: fewer than four kept states.

    Citation: Geyer, Statistical Science 1992; Vehtari et al., Bayesian Analysis 2021.
    """
    _check_draws(draws)
    chains, kept, _ = draws.shape
    centred = draws.double() - draws.double().mean((0, 1))
    spectrum = torch.fft.rfft(centred, 2 * kept, dim=1)
    autocovariance = torch.fft.irfft(spectrum.abs().square(), 2 * kept, dim=1)[:, :kept].mean(0)
    # n - k products at lag k, of which the sum is taken over n as usual
    rho = autocovariance / autocovariance[0]
    pairs = rho[: kept // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    falling = pairs.cummin(0)[0]
    positive = (falling > 0).cumprod(0)
    return chains * kept / (2 * (falling * positive).sum(0) - 1).clamp(min=1 / kept)


def _check_draws(draws: Tensor) -> None:
    if draws.ndim != 3 or draws.shape[1] < 4:
        raise ValueError(f"draws must be (chains, 4 or more, J), got {tuple(draws.shape)}")
