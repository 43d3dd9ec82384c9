"""Effective samples a second of the slowest mode as the grid is refined, beside a pCN chain.

    python benchmarks/function_space_langevin.py [--sides N ...] [--chains N] [--steps N]

The backward heat equation on a square, with a Gaussian prior of power-law decay, of which the modes
of the coarsest grid are observed: only their number J changes. All chains start from draws of the
exact posterior. Contestants:

* Euler's method with the four preconditioners, in steps of 0.1 / max(rates), so that no variance is
  off by more than 5 %; C = 1 without smoothing, the others at t = 1e-3;
* the exact step of the linear part with the posterior's C, h = 1, with and without Metropolis;
* pCN (Cotter, Roberts, Stuart and White, Statistical Science 2013), x <- sqrt(1 - b^2) x +
  b C_mu^(1/2) xi, accepted by the ratio of likelihoods; b is tuned to accept a quarter. It is what
  hIPPYlib and CUQIpy offer for such priors; it is written out here, with the same keyed noise.

Columns: milliseconds a step of all chains, CPU time of the thread, which does not count what other
programs of a busy machine take; effective samples a second of the slowest mode, tanh(rate / 2) for
each chain and step, with the rate in closed form, of pCN as measured in the slowest group of modes
of like frequency; KL a mode from the exact posterior.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fluvial.claims.function_space_langevin import shell_rates
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import simulate
from fluvial.inverse.function_space_langevin import (
    FunctionSpaceLangevin,
    Gaussian,
    Modes,
    Recorder,
    coloured_path,
    mode_kl,
)

OBSERVED, HEAT_TIME, OBS_NOISE = 16, 2e-3, 0.02 / 16
NOISE = KeyedNoise(0)


class PCN:
    """A sampler for pairs (t, t) that needs no drift: the prior is its proposal's own law."""

    def __init__(self, model: FunctionSpaceLangevin, y: Tensor, size: float) -> None:
        assert model.variance is not None
        self.root, self.model, self.y, self.size = model.variance.sqrt(), model, y, size
        self.accepted: list[float] = []

    def misfit(self, x: Tensor) -> Tensor:
        residual = (self.y - self.model.observed.A(x)) / self.model.obs_noise
        return 0.5 * residual.square().sum(1)

    def start(self, x: Tensor) -> Tensor:
        return self.misfit(x)

    def step(self, x: Tensor, memory: Tensor, run: Any) -> tuple[Tensor, Tensor, Tensor]:
        xi = run.noise.normal(x, "pcn")
        moved = math.sqrt(1 - self.size**2) * x + self.size * self.root.to(x) * xi
        misfit = self.misfit(moved)
        accept = run.noise.uniform(misfit, "accept").log() < memory - misfit
        self.accepted.append(float(accept.double().mean()))
        x = torch.where(accept[:, None], moved, x)
        return x, torch.where(accept, misfit, memory), x


class Idle:
    """A field that pCN does not ask."""

    predicts = "drift"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        raise NotImplementedError


def model_of(side: int, kind: Any, t: float) -> FunctionSpaceLangevin:
    modes = Modes((side, side))
    variance = 0.16 * modes.frequencies.double().square().sum(1) ** -1.6
    spectrum = torch.exp(-HEAT_TIME * modes.laplacian[: OBSERVED**2])
    return FunctionSpaceLangevin(
        modes, spectrum, OBS_NOISE, preconditioner=kind, t=t, variance=variance
    )


def draws(law: Gaussian, chains: int) -> Tensor:
    like = law.mean.expand(chains, -1)
    return law.mean + law.variance.sqrt() * NOISE.normal(like, "posterior")


def row(side: int, name: str, seconds: float, effective: str, found: Any, law: Gaussian) -> None:
    kl = float(mode_kl(found.mean, found.variance, law.mean, law.variance).mean())
    print(f"{side:>5} {name:<28} {1e3 * seconds:>8.2f} {effective:>12} {kl:>10.2g}", flush=True)


def timed(run: Callable[[], Any], steps: int) -> tuple[Any, float]:
    """What it returned, and CPU seconds a step."""
    begin = time.thread_time()
    return run(), (time.thread_time() - begin) / steps


def langevin(side: int, y: Tensor, law: Gaussian, chains: int, steps: int) -> None:
    start = Modes((side, side)).functions(draws(law, chains))
    kinds: list[tuple[str, Any, dict[str, Any]]] = [
        (f"Euler, C = {kind}", kind, {"exact": False, "thin": 10})
        for kind in ("identity", "prior", "posterior", "optimal")
    ]
    kinds += [
        ("exact step", "posterior", {"thin": 1}),
        ("exact step, Metropolis", "posterior", {"thin": 1, "metropolis": True}),
    ]
    for name, kind, run in kinds:
        model = model_of(side, kind, 0.0 if kind == "identity" else 1e-3)
        kappa = model.principal().rates
        h = 1.0 if run.get("exact", True) else 0.1 / float(kappa.max())
        sample = partial(
            model.sample, y, chains, noise=NOISE, x0=start, states=False, steps=steps, h=h, burn=0
        )
        found, seconds = timed(partial(sample, **run), steps)
        # rho is 1 - h kappa or exp(-h kappa), known exactly
        slowest = h * float(kappa.min())
        rate = slowest if run.get("exact", True) else -math.log1p(-slowest)
        row(side, name, seconds, f"{chains * math.tanh(rate / 2) / seconds:.3g}", found, law)


def pcn(side: int, y: Tensor, law: Gaussian, chains: int, steps: int) -> None:
    model, x = model_of(side, "posterior", 0.0), draws(law, chains)
    assert model.variance is not None
    path = coloured_path(model.variance)

    def run(size: float, count: int) -> tuple[Recorder, PCN]:
        sampler, record = PCN(model, y, size), Recorder(count, 0, 10, states=False)
        pairs = torch.zeros(count, 2, dtype=torch.float64)
        simulate(x, pairs, sampler, path, Idle(), NOISE, record)
        return record, sampler

    size = 1.0
    while sum(run(size, 20)[1].accepted) / 20 < 0.25:
        size /= 1.3
    (found, _), seconds = timed(partial(run, size, steps), steps)
    _, rates = shell_rates(found.autocorrelation, model.modes, 10)
    # a chain of this length does not tell slower ones from each other
    rate = max(float(rates.min()), 0.1 / steps)
    sign = "<" if rate == 0.1 / steps else ""
    effective = f"{sign}{chains * math.tanh(rate / 2) / seconds:.3g}"
    row(side, f"pCN, b = {size:.2g}", seconds, effective, found, law)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, float64, {options.chains} chains, {options.steps} steps, "
        "1 thread"
    )
    print(f"{'n':>5} {'chain':<28} {'ms/step':>8} {'samples/s':>12} {'KL a mode':>10}")
    for side in options.sides:
        model = model_of(side, "posterior", 0.0)
        assert model.variance is not None
        truth = model.variance.sqrt() * NOISE.normal(model.variance[None], "truth")
        y = model.measure(model.modes.functions(truth), noise=NOISE)
        law = model.posterior(y)
        for contest in (langevin, pcn):
            contest(side, y, law, options.chains, options.steps)


if __name__ == "__main__":
    main()
