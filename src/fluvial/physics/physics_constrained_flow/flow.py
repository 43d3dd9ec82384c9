"""The class: a flow of fields, trained without any constraint, and samples under any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fluvial.core.arguments import whole_number
from fluvial.core.gaussian.losses import Matching
from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import Linear
from fluvial.core.protocols import Field, Noise, Sampler, Steering
from fluvial.core.simulate import simulate
from fluvial.core.steering.projection import Constraint, project
from fluvial.core.time import uniform_grid
from fluvial.networks import describe, rebuild
from fluvial.physics.physics_constrained_flow.baselines import DFlow
from fluvial.physics.physics_constrained_flow.sampler import PCFM
from fluvial.training.files import load_model, put_weights, save_model
from fluvial.training.loop import train
from fluvial.training.stage import Stage, Training
from fluvial.training.use import IntendedUse, read_use

SYSTEM = "physics-constrained-flow"
Method: TypeAlias = Callable[[Constraint], Sampler | Steering | DFlow]
"""A way to sample under a constraint: a class such as `PCFM` or `ECI`, or a function that makes one
with options."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """Samples, and how well they keep their constraint.

    Attributes:
        u: (num, *shape).
        residual: (num, m) in float64, h of ``u`` as it is here, after its cast.
        converged: (num,), whether the final projection reached its tolerance before the cast; None
            without one.
        nearest: (num,), see `fluvial.core.steering.projection.Projection`; None likewise.
        iterations: most steps of the final projection.
    """

    u: Tensor
    residual: Tensor
    converged: Tensor | None
    nearest: Tensor | None
    iterations: int

    @property
    def worst(self) -> float:
        """max |h|."""
        return float(self.residual.abs().max()) if self.residual.numel() else 0.0


class PhysicsConstrainedFlow(Matching):
    """Fields u under h(u) = 0, from a flow that was trained without it.

    A network learns the velocity eps - x_0 of x_t = (1 - t) x_0 + t eps, eps white noise, by
    squared error (functional flow matching). `sample` then draws under any constraint that is given
    there (`fluvial.physics.constraints`, or `equations` of your own) by `PCFM`, and projects what
    comes out onto h = 0 in double precision.

    The paper draws eps from a Gaussian process of length scale 0.001, whose neighbours on its grids
    are correlated by less than 1e-4: white noise.

    Args:
        network: called as ``network(x, t)``; `fluvial.networks.FNO` is the paper's.
        standardise: train on (u - mean) / deviation of the data, one mean and deviation for all
            coordinates; the paper trains on u.
        shape: of a field; by default that of the network or of the data of `fit`.

    Raises:
        TypeError: ``network`` is not a module.

    Citation: Utkarsh, Cai, Edelman, Gomez-Bombarelli and Rackauckas, NeurIPS 2025, arXiv
    2506.04171.
    """

    intended: tuple[str, ...] = (
        "drawing solutions of an equation under conditions that are known",
    )
    out_of_scope: tuple[dict[str, str], ...] = ()
    offset: Tensor
    scale: Tensor

    def __init__(
        self, network: nn.Module, *, standardise: bool = False, shape: Sequence[int] | None = None
    ) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"network must be a module, got {type(network).__name__}")
        super().__init__(network, Linear(), predicts="velocity")
        shape = getattr(network, "shape", None) if shape is None else shape
        self.shape = None if shape is None else tuple(shape)
        self.standardise = standardise
        self.register_buffer("offset", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.use: IntendedUse | None = IntendedUse(intended=self.intended)

    # Training

    def fit(
        self,
        fields: Tensor,
        *,
        steps: int,
        validation: Tensor | None = None,
        out: str | Path | None = None,
        resume: bool = True,
        progress: bool = True,
        trackers: Sequence[str] = (),
        preview: Callable[[Path], None] | None = None,
        **training: Any,
    ) -> Self:
        """Train on fields (rows, *shape).

        Args:
            fields: floating, finite.
            steps: optimiser steps. Published: 20,000 of batch 256 with Adam, 3e-4, halved down to
                1e-4 where the validation loss stays; here the rate is constant, or falls by
                ``schedule``.
            validation: fields that are not trained on.
            out, resume, progress, trackers: see `fluvial.training.loop.train`.
            preview: see `fluvial.training.stage.Stage`.
            **training: other fields of `fluvial.training.stage.Training`.

        Raises:
            TypeError: fields that are no floating tensor.
            ValueError: no rows, another shape, values that are not finite, or constant ones where
                they are to be standardised.
        """
        self._check("fields", fields)
        if validation is not None:
            self._check("validation", validation)
        shape = tuple(fields.shape[1:])
        if self.standardise:
            deviation = fields.double().std()
            if not float(deviation) > 0:
                raise ValueError("fields are constant, and cannot be standardised")
            self.offset.copy_(fields.double().mean())
            self.scale.copy_(deviation)
        self.shape = shape
        held = None if validation is None else {"x": self._encoded(validation)}
        rule = Training(
            steps=steps, **{"lr": 3e-4, "betas": (0.9, 0.999), "clip": 100.0, **training}
        )
        train(
            Stage(self, {"x": self._encoded(fields)}, rule, held, preview),
            out=None if out is None else Path(out),
            resume=resume,
            progress=progress,
            config={"network": describe(self.network), **self._options()},
            trackers=trackers,
        )
        return self.eval()

    def _check(self, name: str, fields: Tensor) -> None:
        if not isinstance(fields, Tensor) or not fields.is_floating_point():
            got = fields.dtype if isinstance(fields, Tensor) else type(fields).__name__
            raise TypeError(f"{name} must be a floating tensor, got {got}")
        if fields.ndim < 2 or not len(fields):
            raise ValueError(f"{name} must have shape (rows, *shape), got {tuple(fields.shape)}")
        if self.shape is not None and tuple(fields.shape[1:]) != self.shape:
            raise ValueError(
                f"{name} must have events of {self.shape}, got {tuple(fields.shape[1:])}"
            )
        if not bool(fields.isfinite().all()):
            raise ValueError(f"{name} holds values that are not finite")

    def _encoded(self, u: Tensor) -> Tensor:
        return ((u.double() - self.offset) / self.scale).to(next(self.network.parameters()))

    # Sampling

    @torch.no_grad()
    def sample(
        self,
        num: int,
        *,
        noise: Noise,
        constraint: Constraint | None = None,
        method: Method | None = PCFM,
        steps: int = 100,
        final: bool = True,
        tol: float = 1e-10,
        max_iter: int = 50,
        strict: bool = True,
        dtype: torch.dtype | None = None,
        batch_size: int = 256,
        progress: bool = False,
    ) -> Sampled:
        """Fields that obey a constraint.

        Args:
            num: fields; a constraint with values an event must have as many.
            noise: keyed noise; field i depends on row i of it only.
            constraint: h, in the units of the data; none for the flow as it was trained.
            method: how it is kept on the way. ``functools.partial(PCFM, renoise="implied")`` gives
                options; None leaves it to the final projection alone.
            steps: of equal length.
            final: project the samples in double precision.
            tol, max_iter, strict: of that, see `project`.
            dtype: of the fields, by default that of the network. They are cast after the
                projection, and the residual is of what was cast: about 1e-7 of their size in
                float32, and ``tol`` in float64.
            batch_size: fields drawn at once.
            progress: show a bar.

        Raises:
            ValueError: a count below 1, a constraint for events of another shape or number, a
                velocity that is not finite, or an event that the projection does not bring to the
                tolerance; of the last, an event is counted within its ``batch_size``.
            TypeError: a constraint or a method of another kind.
        """
        if self.shape is None:
            raise ValueError("the shape of a field is not known yet: fit, or give shape=")
        was_training = self.training
        self.eval()
        try:
            return sample_under(
                self.field,
                self.shape,
                num,
                noise=noise,
                constraint=constraint,
                method=method,
                steps=steps,
                final=final,
                tol=tol,
                max_iter=max_iter,
                strict=strict,
                like=next(self.network.parameters()),
                dtype=dtype,
                offset=float(self.offset),
                scale=float(self.scale),
                batch_size=batch_size,
                progress=progress,
            )
        finally:
            self.train(was_training)

    # Files

    def _options(self) -> dict[str, Any]:
        return {
            "standardise": self.standardise,
            "shape": None if self.shape is None else list(self.shape),
        }

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """One safetensors file: weights, how the network is built, and the statement of use."""
        header = {"system": SYSTEM, "network": describe(self.network), "options": self._options()}
        use = self.use and self.use.for_system(SYSTEM, self.out_of_scope)
        save_model(path, self.state_dict(), header, use=use, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | Path, *, network: nn.Module | None = None) -> Self:
        """The model that `save` wrote, on the CPU.

        Args:
            path: of the file.
            network: built as it was; needed only for a class that is not fluvial's.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a model of this system, or the weights do not fit.
        """
        weights, header = load_model(path, SYSTEM)
        network = rebuild(header["network"]) if network is None else network
        options = cast(Mapping[str, Any], header["options"])
        model = cls(network, **options)
        put_weights(model, weights, path)
        model.use = read_use(path)
        return model.eval()


@torch.no_grad()
def sample_under(
    field: Field,
    shape: Sequence[int],
    num: int,
    *,
    noise: Noise,
    constraint: Constraint | None = None,
    method: Method | None = PCFM,
    sampler: Sampler | None = None,
    steps: int = 100,
    final: bool = True,
    tol: float = 1e-10,
    max_iter: int = 50,
    strict: bool = True,
    like: Tensor | None = None,
    dtype: torch.dtype | None = None,
    offset: float = 0.0,
    scale: float = 1.0,
    batch_size: int = 256,
    progress: bool = False,
) -> Sampled:
    """Samples of any field on the linear path under a constraint: `PhysicsConstrainedFlow.sample`.

    Args:
        field: of any kind; of a `MeanFlow`, a `Matching`, or `EmpiricalDenoiser`.
        shape: of an event.
        sampler: of the flow where the method is a steering, or None; Euler's by default.
        like: in whose dtype and on whose device the field is called; float64 on the CPU by default.
        offset, scale: the field is one of z, and the constraint of u = offset + scale z.
        num, noise, constraint, method, steps, final, tol, max_iter, strict: as there.
        dtype, batch_size, progress: as there.

    Raises:
        ValueError, TypeError: as there.
    """
    num = whole_number("num", num)
    steps = whole_number("steps", steps)
    batch_size = whole_number("batch_size", batch_size)
    if num < 1 or steps < 1 or batch_size < 1:
        raise ValueError(
            f"need num, steps and batch_size of at least 1, got {num}, {steps} and {batch_size}"
        )
    limits = Constraint(shape) if constraint is None else constraint
    if not isinstance(limits, Constraint):
        raise TypeError(
            f"constraint must be a Constraint, got {type(limits).__name__}; `equations` makes one "
            "of a function, `stack` one of several"
        )
    if method is not None and not callable(method):
        raise TypeError(
            f"method must make a sampler of a constraint, as PCFM or partial(PCFM, newton=2) do, "
            f"got {type(method).__name__}"
        )
    if not callable(getattr(noise, "rows", None)):
        raise TypeError(f"noise must be keyed, as KeyedNoise(0), got {type(noise).__name__}")
    if limits.shape != tuple(shape):
        raise ValueError(f"the constraint is for events of {limits.shape}, got {tuple(shape)}")
    if len(limits.pinned[1]) not in (1, num):
        raise ValueError(
            f"constraint holds values of {len(limits.pinned[1])} events, got num={num}"
        )
    like = torch.zeros((), dtype=torch.float64) if like is None else like
    pairs, path = uniform_grid(steps), Linear()
    run: Any = simulate
    parts = []
    for first in tqdm(range(0, num, batch_size), desc="fields", disable=not progress):
        rows = torch.arange(first, min(first + batch_size, num))
        here = limits.take(rows)
        inner = here.rescaled(offset, scale)
        keyed = noise.rows(rows)
        x = path.source(like.new_empty(len(rows), *shape), keyed)
        made = None if method is None or constraint is None else method(inner)
        if isinstance(made, DFlow):
            x = made.optimise(x, pairs, path, field, keyed)
        stepper: Any = Euler() if sampler is None else sampler
        steer = made if isinstance(made, Steering) else None
        if made is not None and not isinstance(made, Steering | DFlow):
            stepper = made
        z = run(x, pairs, stepper, path, field, keyed, steer)
        u = offset + scale * z.double()
        parts.append(_finished(u, here, final, tol, max_iter, strict, dtype or like.dtype))
    return Sampled(
        torch.cat([part.u for part in parts]),
        torch.cat([part.residual for part in parts]),
        None if parts[0].converged is None else torch.cat([p.converged for p in parts]),  # type: ignore[misc]
        None if parts[0].nearest is None else torch.cat([p.nearest for p in parts]),  # type: ignore[misc]
        max(part.iterations for part in parts),
    )


def _finished(
    u: Tensor,
    constraint: Constraint,
    final: bool,
    tol: float,
    max_iter: int,
    strict: bool,
    dtype: torch.dtype,
) -> Sampled:
    """Projected in double precision, then cast; the residual is of what was cast."""
    if not bool(u.isfinite().all()):
        raise ValueError("the sampler returned values that are not finite")
    found = None
    if final:
        found = project(u, constraint, tol=tol, max_iter=max_iter, strict=strict)
        u = found.u
    cast_u = u.to(dtype)
    return Sampled(
        cast_u,
        constraint.residual(cast_u.double()),
        None if found is None else found.converged,
        None if found is None else found.nearest,
        0 if found is None else found.iterations,
    )
