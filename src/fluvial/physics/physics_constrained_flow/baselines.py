"""What the paper compares with: overwriting, guidance, optimised noise, projected states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from fluvial.core.gaussian.fields import ends, predicted, scalars
from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.protocols import Field, Noise, Path, Run, State, Steering
from fluvial.core.simulate import simulate
from fluvial.core.steering.projection import Constraint, Pins, gauss_newton
from fluvial.physics.physics_constrained_flow.sampler import check_finite


@dataclass
class ECI:
    """Extrapolate, correct, interpolate: the clean prediction is overwritten, and noised again.

    At every t, ``mix`` times: x_hat is overwritten; all but the last time x goes back to t, and the
    last time to s, along the path to the noise of the start. Overwriting is exact for values and
    for linear equations (a mean is shifted by its defect); other equations are left out.

    Args:
        constraint: what is overwritten.
        mix: mixing steps, calls of the field at each t.
        redraw: every how many mixing steps the noise is drawn anew; None for never.

    Raises:
        ValueError: a count below 1.

    Citation: Cheng et al., ICLR 2025, arXiv 2412.01786.
    """

    constraint: Constraint
    mix: int = 1
    redraw: int | None = None

    def __post_init__(self) -> None:
        if self.mix < 1 or (self.redraw is not None and self.redraw < 1):
            raise ValueError(
                f"need mix >= 1 and redraw >= 1 or None, got {self.mix} and {self.redraw}"
            )

    @cached_property
    def overwritten(self) -> Constraint:
        """The part of the constraint that has a closed form."""
        parts = [p for p in self.constraint.parts if isinstance(p, Pins) or p.linear]
        return Constraint(self.constraint.shape, parts)

    def start(self, x: Tensor) -> Tensor:
        return x

    def step(self, x: Tensor, memory: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        path = cast(AlphaSigmaPath, run.path)
        here = scalars(run.path, run.t, run.cond, "ECI")
        there = scalars(run.path, run.s, run.cond, "ECI")
        clean = x
        for k in range(self.mix):
            guess = predicted(x, run)
            check_finite(guess.value, run)
            clean = gauss_newton(guess.clean, self.overwritten)
            if self.redraw is not None and (run.k * self.mix + k + 1) % self.redraw == 0:
                memory = path.source(x, run.noise.at(k))
            noise = path.source_level.solve(memory)
            alpha, sigma = there if k == self.mix - 1 else here
            x = alpha * clean + sigma * noise
        return x, memory, clean


@dataclass
class GuidedEuler:
    """DiffusionPDE: a Heun step of the flow, less a gradient of the residual at the clean end.

        x_s = x + (s - t) (v(x, t) + v(x, s)) / 2 - scale grad_x loss(x_hat_0(x)),

    both velocities at x, the second left out in the last step; x_hat_0 is the clean end at (x, t)
    with v held fixed. The loss of an event is the mean square of the equations of each name, summed
    over the names, as masked values and a residual are in the paper.

    Args:
        constraint: h.
        scale: eta; 200 in the paper's comparison, where the loss is over the batch too: there that
            is 200 over the batch size. Or one for each name, as DiffusionPDE has one for the
            values and one for the residual: `steady_scales` makes such that do not overshoot.

    Raises:
        ValueError: ``scale`` is not positive and finite, or not of the names of the equations.

    Citation: Huang et al., NeurIPS 2024, arXiv 2406.17763.
    """

    constraint: Constraint
    scale: float | Mapping[str, float] = 200.0

    def __post_init__(self) -> None:
        names = {part.name for part in self.constraint.parts}
        if isinstance(self.scale, Mapping) and set(self.scale) != names:
            raise ValueError(f"scale must be of {sorted(names)}, got {sorted(self.scale)}")
        scales = self.scale.values() if isinstance(self.scale, Mapping) else [self.scale]
        if not all(0 < scale < math.inf for scale in scales):
            raise ValueError(f"scale must be positive and finite, got {self.scale}")

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: None, run: Run) -> tuple[Tensor, None, Tensor]:
        guess = predicted(x, run)
        velocity = guess.velocity
        if run.s > 0:
            velocity = (velocity + predicted(x, replace(run, t=run.s)).velocity) / 2
        check_finite(velocity, run)
        path = cast(AlphaSigmaPath, run.path)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            clean, _ = ends("velocity", velocity.detach(), leaf, run.t, path, **run.cond)
            loss = residual_loss(self.constraint, clean, self.scale)
            (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        step = (float(run.s) - float(run.t)) * velocity
        return x + step - gradient, memory, guess.clean


def residual_loss(
    constraint: Constraint, u: Tensor, scale: float | Mapping[str, float] = 1.0
) -> Tensor:
    """(batch,): the mean square of the equations of each name times its scale, summed over the
    names; 0 without any equations."""
    scales = scale if isinstance(scale, Mapping) else dict.fromkeys(constraint.named(u), scale)
    means = [scales[name] * h.square().mean(1) for name, h in constraint.named(u).items()]
    return torch.stack(means).sum(0) if means else 0 * u.flatten(1).sum(1)


def steady_scales(constraint: Constraint, u: Tensor, share: float = 0.5) -> dict[str, float]:
    """Scales for `GuidedEuler`: a step of the mean square of the equations of one name takes at
    most ``share`` of a defect away, at ``u``; above 2 it grows.

    The mean square of m equations has the second derivative 2 J^T J / m, whose largest eigenvalue
    is found by 50 power iterations. A balance since the start has a large one, as every equation of
    it reads the first field.

    Args:
        constraint: h.
        u: (1, *shape), a field near those that are drawn.
        share: positive.

    Raises:
        ValueError: a share that is not positive and finite.
    """
    if not 0 < share < math.inf:
        raise ValueError(f"share must be positive and finite, got {share}")
    found = {}
    with torch.enable_grad():
        leaf = u.detach().double().requires_grad_()
        for name, h in constraint.named(leaf).items():
            weight = torch.zeros_like(h, requires_grad=True)
            # J^T w is linear in w: its derivative along w is a product with J
            (back,) = torch.autograd.grad(h, leaf, weight, create_graph=True)
            d = torch.arange(leaf.numel(), dtype=leaf.dtype, device=leaf.device).cos()
            d, largest = d.reshape(leaf.shape), 0.0
            for _ in range(50):
                (w,) = torch.autograd.grad(back, weight, d, retain_graph=True)
                (d,) = torch.autograd.grad(h, leaf, w, retain_graph=True)
                largest = max(float(d.norm()), 1e-300)
                d = d / largest
            found[name] = share * h.shape[1] / (2 * largest)
    return found


@dataclass
class ProjectedState(Steering):
    """PDM: after every step the noisy state takes a Gauss-Newton step onto h = 0.

    It forces an equation of the data on the noise: right for data on an affine manifold and late
    times only.

    Args:
        constraint: h.
        damp: see `gauss_newton`.

    Citation: Christopher, Baek and Fioretto, NeurIPS 2024, arXiv 2402.03559.
    """

    constraint: Constraint
    damp: float = 1e-6

    def after(self, x: State, clean: State, aim: Any, run: Run) -> tuple[State, Any, Tensor | None]:
        return gauss_newton(cast(Tensor, x), self.constraint, damp=self.damp), aim, None


@dataclass
class DFlow:
    """Optimises the noise through the whole simulation, so that its end has a small residual.

    L-BFGS on the sum over events of `residual_loss` of what Euler's method makes of the noise. The
    gradient goes back through all steps: memory and time are those of training. Events of a batch
    share the optimiser's curvature.

    Args:
        constraint: h.
        lr: of a step of the optimiser.
        iterations: of the optimiser.

    Raises:
        ValueError: ``lr`` or ``iterations`` is not positive.

    Citation: Ben-Hamu et al., ICML 2024, arXiv 2402.14017.
    """

    constraint: Constraint
    lr: float = 0.1
    iterations: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf or self.iterations < 1:
            raise ValueError(
                f"need lr > 0 and iterations >= 1, got {self.lr} and {self.iterations}"
            )

    def optimise(
        self, x1: Tensor, pairs: Tensor, path: Path, field: Field, noise: Noise, **cond: Any
    ) -> Tensor:
        """The source end (batch, *shape) to simulate from, starting at ``x1``."""
        run: Any = simulate
        with torch.enable_grad():
            start = x1.detach().clone().requires_grad_()
            optimiser = torch.optim.LBFGS([start], lr=self.lr, max_iter=self.iterations)

            def closure() -> Tensor:
                optimiser.zero_grad()
                end = run(start, pairs, Euler(), path, field, noise, **cond)
                loss = residual_loss(self.constraint, end).sum()
                if not loss.requires_grad:
                    raise ValueError("DFlow needs a field that can be differentiated in x")
                (start.grad,) = torch.autograd.grad(loss, start)
                return loss

            optimiser.step(closure)
        found = start.detach()
        if not bool(found.isfinite().all()):
            raise ValueError(f"the noise diverged at lr={self.lr:g}; take a smaller one")
        return found
