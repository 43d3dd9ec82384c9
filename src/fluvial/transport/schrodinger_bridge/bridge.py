"""Schrödinger bridges between two data sets, by networks: `SchrodingerBridge`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from fluvial.core.couplings import Coupling, Independent
from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.losses import Matching, NetworkField
from fluvial.core.gaussian.ode import Midpoint
from fluvial.core.gaussian.sde import EulerMaruyama
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Field, Noise, Objective, Run, Sampler, Steering
from fluvial.core.simulate import Ancestral, simulate
from fluvial.core.time import Uniform, uniform_grid
from fluvial.data.format import Format
from fluvial.networks import describe, rebuild
from fluvial.training.batches import Batches
from fluvial.training.files import load_model, put_weights, save_model
from fluvial.training.loop import Stage, Training, train
from fluvial.training.processes import is_main
from fluvial.training.sharding import whole_state
from fluvial.training.stage import Data
from fluvial.training.use import IntendedUse, derive, read_use
from fluvial.transport.schrodinger_bridge.increments import Free, IncrementMatching, increments
from fluvial.transport.schrodinger_bridge.reference import Reference

SYSTEM = "schrodinger-bridge-imf"
Direction: TypeAlias = Literal["backward", "forward"]
DIRECTIONS: tuple[Direction, Direction] = ("backward", "forward")
MEASURES = {"score": "noise", "noise": "noise", "clean": "clean"}
"""What networks may predict, and the error by which each is trained."""


class SchrodingerBridge(nn.Module):
    """The stochastic process that joins two data sets and is closest to a reference process.

    P* minimises KL(P | Q) over processes with the law of x0 at t = 0 and of x1 at t = 1. It is the
    only one that is Markov and has the bridges of the reference Q, and iterative Markovian fitting
    alternates two projections onto these: fill in a coupling with Q's bridges, and take the
    diffusion whose drift is the conditional mean of theirs,

        backward  b(x, t) = E[a coth(a t) x - x_0 / S(t) | x_t = x],
        forward   f(x, t) = E[-a coth(a (1 - t)) x + x_1 / S(1 - t) | x_t = x]

    (`Reference`; for Brownian motion (x - x_0) / t and (x_1 - x) / (1 - t)). A network learns each,
    by regression on pairs (x_0, x_1) with a bridge between them. Pairs for one direction are true
    points of one side with what the other direction makes of them, so that each corrects the
    marginals of the other (diffusion Schrödinger bridge matching, DSBM). At the limit E |x_0 -
    x_1|^2 is that of entropic optimal transport with weight 2 sigma^2.

    Networks, fields and samplers live on the clock of their direction, 1 where it starts and 0 at
    the end it aims at: the backward one's is t, the forward one's 1 - t, as a bridge seen from its
    other end is a bridge.

    Args:
        network0: of the backward direction, which aims at x0; called as ``network(x, t)``.
        network1: of the forward direction, which aims at x1.
        reference: the process to stay close to. Its diffusion is in the units of the data, after
            ``format``: more makes the map noisier and the iteration converge faster.
        predicts: what the networks predict: the ``"score"`` of q(x_t | end), which is the drift
            but for known terms, its ``"noise"``, or the end, ``"clean"``.
        measure: the kind of error that is squared. By default a bounded one, "noise" for score and
            noise (the published ``loss_scale``) and "clean" for clean (``mean_match``); "score" is
            the plain error of the drift.
        steps: of a simulation, when pairs are made and by default afterwards. Euler's method makes
            the end of a unit Gaussian bridge of sigma = 1 too wide: its variance is 1.0156 with 20
            steps and 1.0031 with 100.
        shape: of one event; taken from the networks, ``format`` or the data if left out.
        format: how the user's data become numbers, and back; one for both sides.

    Raises:
        ValueError: a value out of its range; networks, ``shape`` and ``format`` that disagree.

    Citation: Shi et al., NeurIPS 2023, arXiv 2303.16852; Gentiloni Silveri et al., NeurIPS 2025,
        arXiv 2510.20871 (the rate).
    """

    criterion = "loss"
    intended: tuple[str, ...] = ("translating between the two data sets it was trained on",)
    out_of_scope: tuple[dict[str, str], ...] = ()

    def __init__(
        self,
        network0: nn.Module,
        network1: nn.Module,
        *,
        reference: Reference = Reference(),  # noqa: B008 (frozen)
        predicts: str = "score",
        measure: str | None = None,
        steps: int = 30,
        shape: Sequence[int] | None = None,
        format: Format | None = None,
    ) -> None:
        super().__init__()
        if network0 is network1:
            raise ValueError("network0 and network1 are one network; the directions need their own")
        if predicts not in MEASURES:
            raise ValueError(f"predicts must be one of {', '.join(MEASURES)}, got {predicts!r}")
        measure = MEASURES[predicts] if measure is None else measure
        if measure not in MEASURES:
            raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {measure!r}")
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        said = {
            "shape": shape,
            "network0": getattr(network0, "shape", None),
            "network1": getattr(network1, "shape", None),
            "format": None if format is None else format.shape,
        }
        shapes = {name: tuple(map(int, s)) for name, s in said.items() if s is not None}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"the shape of an event differs: {shapes}")
        self.network0: Any = network0
        self.network1: Any = network1
        self.reference, self.steps = reference, steps
        self.predicts, self.measure = predicts, measure
        self.shape: tuple[int, ...] | None = next(iter(shapes.values()), None)
        self.format = format
        self.use: IntendedUse | None = IntendedUse(intended=self.intended)

    @property
    def network(self) -> nn.Module:
        """That of the backward direction, for what is said of both."""
        return cast(nn.Module, self.network0)

    def network_of(self, direction: Direction) -> nn.Module:
        """``network0`` or ``network1``."""
        _check_direction(direction)
        return cast(nn.Module, self.network0 if direction == "backward" else self.network1)

    # Training

    def fit(
        self,
        x0: Tensor,
        x1: Tensor,
        *,
        half_iterations: int = 20,
        steps: int = 5_000,
        first_steps: int | None = None,
        pairs: int = 10_000,
        renew: int | None = None,
        coupling: Coupling | None = Independent(),  # noqa: B008 (frozen)
        method: Literal["dsbm", "dsb"] = "dsbm",
        directions: Sequence[Direction] = DIRECTIONS,
        away: float = 1e-3,
        out: str | Path | None = None,
        resume: bool = True,
        progress: bool = True,
        trackers: Sequence[str] = (),
        preview: Callable[[Path], None] | None = None,
        **training: Any,
    ) -> Self:
        """Learn the bridge between two data sets, and hold the averaged weights.

        The directions are trained in turn, a stage of the loop each, with a new optimiser. The
        first time each is trained on the first coupling: with two half-iterations that is all, and
        is bridge matching in one shot. After that a direction is trained on pairs that the one
        trained before it makes.

        Args:
            x0, x1: (n, *event) and (m, *event), the two sides; in the user's units if the model has
                a format.
            half_iterations: trainings of one direction; published: 40 for the Gaussians.
            steps: optimiser steps of each; published: 10,000 for the Gaussians, 5,000 for images.
            first_steps: of those on the first coupling, ``steps`` by default; published: 100,000
                for images.
            pairs: that a direction is trained on. Trajectories for ``"dsb"``.
            renew: steps after which the pairs are made anew, with a new optimiser too; None for
                once a half-iteration. Published: 1,000 for images.
            coupling: the first coupling: how the rows of a batch are paired, independently or by
                minibatch optimal transport; None for the reference process from the side that the
                first direction aims at, x0, which only that direction is trained on (DSBM-IPF).
            method: ``"dsb"`` is iterative proportional fitting on simulated chains, for comparison;
                ``coupling`` and ``away`` do not apply.
            directions: in what order. ``("backward",)`` alone is the published ablation IMF-b,
                whose marginals drift.
            away: how far times stay from 0 and 1.
            out, resume, progress, trackers: see `fluvial.training.loop.train`.
            preview: see `fluvial.training.loop.Stage`; called in the last stage.
            **training: other fields of `fluvial.training.loop.Training`; an average of 0.999 and
                clipping at 1 by default.

        Raises:
            TypeError: data that are no tensors, or not floating where the model has no format.
            ValueError: no rows, shapes that differ, values that are not finite, a number out of its
                range; and as `fluvial.training.loop.train`.
        """
        for name, count in (
            *(("half_iterations", half_iterations), ("steps", steps), ("pairs", pairs)),
            *(("first_steps", first_steps), ("renew", renew)),
        ):
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if not 0 < away < 0.5:
            raise ValueError(f"away must lie in (0, 0.5), got {away}")
        if method not in ("dsbm", "dsb"):
            raise ValueError(f"method must be 'dsbm' or 'dsb', got {method!r}")
        for direction in directions:
            _check_direction(direction)
        if not directions or (method == "dsb" and len(set(directions)) < 2):
            raise ValueError(f"{method} trains both directions in turn, got {tuple(directions)}")
        sides = {"backward": self._encoded("x0", x0), "forward": self._encoded("x1", x1)}
        if x0.shape[1:] != x1.shape[1:]:
            raise ValueError(
                f"x0 and x1 must have events of one shape, got {tuple(x0.shape)} and "
                f"{tuple(x1.shape)}"
            )
        rule = Training(steps=steps, **{"ema": 0.999, "clip": 1.0, **training})
        times = Uniform(away, 1 - away)
        source = _Source(self, sides, pairs, coupling, method, times, rule.seed, progress)
        # the reference coupling is for the direction that is trained first
        together = 1 if coupling is None or method == "dsb" else len(directions)
        stages: list[Stage] = []
        for k in range(half_iterations):
            direction = directions[k % len(directions)]
            before = None if k < together else directions[(k - 1) % len(directions)]
            count = first_steps if before is None and first_steps is not None else steps
            parts = _split(count, count if before is None or renew is None else renew)
            for part, count in enumerate(parts):
                name = f"{k + 1:02d}-{direction}" + (f"-{part + 1}" if len(parts) > 1 else "")
                objective, data = source.stage(len(stages), direction, before)
                stages.append(Stage(objective, data, replace(rule, steps=count), name=name))
        stages[-1] = replace(stages[-1], preview=preview)
        train(
            *stages,
            out=None if out is None else Path(out),
            resume=resume,
            progress=progress,
            config={
                "bridge": {
                    "networks": [describe(self.network0), describe(self.network1)],
                    **self._options(),
                    "shape": None,  # may be learnt from the data, which have a fingerprint
                    "coupling": repr(coupling),
                    "method": method,
                    "pairs": pairs,
                    "away": away,
                    "x0": Batches({"x": sides["backward"]}, 1, 0).fingerprint(),
                    "x1": Batches({"x": sides["forward"]}, 1, 0).fingerprint(),
                }
            },
            trackers=trackers,
        )
        self.shape = tuple(x0.shape[1:])
        if self.use is not None and self.use.system is not None:
            # the statement of the model in a file that this one was made of
            self.use = derive([self.use], intended=self.intended)
        return self.eval()

    def _encoded(self, name: str, x: Tensor) -> Tensor:
        """Rows as the networks see them."""
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.ndim < 2 or not len(x):
            raise ValueError(f"{name} must have shape (rows, *event), got {tuple(x.shape)}")
        if self.shape is not None and tuple(x.shape[1:]) != self.shape:
            event = ", ".join(map(str, self.shape))
            raise ValueError(f"{name} must have shape (rows, {event}), got {tuple(x.shape)}")
        if self.format is not None:
            x = self.format.encode(x)
        elif not x.is_floating_point():
            raise TypeError(f"{name} must be floating, got {x.dtype}")
        if not bool(x.isfinite().all()):
            raise ValueError(f"{name} holds values that are not finite")
        return x.detach().to(next(self.parameters()))

    # Simulation

    def field(self, direction: Direction) -> Field:
        """What a direction's network predicts, on the direction's clock, as a field."""
        return NetworkField(self.network_of(direction), self.predicts)

    def drift(self, x: Tensor, t: Tensor, direction: Direction = "backward") -> Tensor:
        """The drift of a direction at (x, t), in t increasing; t () or (batch,), in (0, 1).

        Forwards dx = f dt + sigma dB; backwards dx = b dt + sigma dB with dt < 0.
        """
        score = convert(self.field(direction), "score", self.reference)
        if direction == "backward":
            return self.reference.drift(x, score(x, t))
        return -self.reference.drift(x, score(x, 1 - t))

    def flow(self, direction: Direction = "backward") -> Field:
        """The velocity of the probability flow, (f + b) / 2, as a field on the direction's clock.

        With s_0 and s_1 the scores that the networks stand for, dx/dt = sigma^2 (s_1(x, 1 - t) -
        s_0(x, t)) / 2, for Ornstein-Uhlenbeck too, and the same with the two exchanged.
        """
        _check_direction(direction)
        ours, theirs = (
            convert(self.field(which), "score", self.reference)
            for which in (direction, _other(direction))
        )
        return _Flow(ours, theirs, self.reference.diffusion)

    @torch.no_grad()
    def sample(
        self,
        x: Float[Tensor, "rows *event"],
        *,
        direction: Direction = "backward",
        noise: Noise,
        steps: int | None = None,
        sampler: Sampler | None = None,
        batch_size: int = 1_000,
    ) -> Tensor:
        """Trajectories from ``x``, (steps + 1, rows, *event), the start first.

        Args:
            x: at t = 1 for the backward direction, at t = 0 for the forward one; numbers as the
                networks see them.
            direction: which way.
            noise: keyed noise; row i of the result depends on row i of it only.
            steps: equal steps, by default those of the training.
            sampler: `EulerMaruyama`, which the training uses, by default. `Ancestral` draws from
                the reference's bridge to the predicted end and adds no noise in its last step: for
                data near a surface, such as images. Of smooth data it makes the ends too narrow, by
                about sigma^2 log(steps) / steps in variance.
            batch_size: rows at a time.

        Raises:
            TypeError, ValueError: as `translate`.
        """
        return self._simulate(
            self._checked(x), direction, noise, steps, sampler, batch_size=batch_size, record=True
        ).to(x.dtype)

    @torch.no_grad()
    def translate(
        self,
        x: Tensor,
        direction: Direction = "backward",
        *,
        noise: Noise = KeyedNoise(0),
        steps: int | None = None,
        sampler: Sampler | None = None,
        steer: Steering | None = None,
        batch_size: int = 1_000,
        progress: bool = False,
    ) -> Tensor:
        """The other ends of ``x``, (rows, *event), in the units of the data.

        Floating as ``x`` is; float64 for a table, uint8 for images.

        Args:
            x: points of the side that the direction starts from, in the units of the data.
            direction: ``"backward"`` takes x1 to x0, ``"forward"`` x0 to x1.
            noise, steps, batch_size: as for `sample`.
            sampler: as for `sample`; `Ancestral` by default where ``format`` is of images.
            steer: bends the simulation; what it is shown as clean is the end aimed at.
            progress: show a progress bar over batches.

        Raises:
            TypeError: ``x`` is no tensor, or not of the kind that was trained on.
            ValueError: an unknown direction, another shape, values that are not finite, counts that
                are not positive.
        """
        if sampler is None and self.format is not None and self.format.kind == "images":
            sampler = Ancestral()
        end = self._simulate(
            self._checked(self._encoded("x", x)),
            direction,
            noise,
            steps,
            sampler,
            steer,
            batch_size=batch_size,
            progress=progress,
        )
        end = end.to(x.dtype) if x.is_floating_point() else end
        return end if self.format is None else self.format.decode(end)

    @torch.no_grad()
    def ode(
        self,
        x: Tensor,
        direction: Direction = "backward",
        *,
        steps: int | None = None,
        sampler: Sampler | None = None,
        batch_size: int = 1_000,
    ) -> Tensor:
        """The other ends of ``x`` along the probability flow dx/dt = (f + b) / 2: a map, no noise.

        It has the marginals of the bridge, and not its coupling.

        Args:
            x: (rows, *event), as for `sample`.
            direction: which way.
            steps: equal steps.
            sampler: of the ODE, `Midpoint` by default: at the ends the drifts of networks that
                predict the end or the noise are undetermined.
            batch_size: rows at a time.
        """
        solver = Midpoint() if sampler is None else sampler
        return self._simulate(
            self._checked(x),
            self.flow(direction),
            KeyedNoise(0),
            steps,
            solver,
            batch_size=batch_size,
        ).to(x.dtype)

    def _checked(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x must be a floating tensor, got {getattr(x, 'dtype', type(x))}")
        if self.shape is None:
            raise ValueError("the event's shape is unknown: fit first, or give shape=")
        if tuple(x.shape[1:]) != self.shape:
            event = ", ".join(map(str, self.shape))
            raise ValueError(f"x must have shape (rows, {event}), got {tuple(x.shape)}")
        if not bool(x.isfinite().all()):
            raise ValueError("x holds values that are not finite")
        return x.to(next(self.parameters()))

    def _simulate(
        self,
        x: Tensor,
        what: Direction | Field,
        noise: Noise,
        steps: int | None = None,
        sampler: Sampler | None = None,
        steer: Steering | None = None,
        *,
        batch_size: int = 1_000,
        record: bool = False,
        progress: bool = False,
    ) -> Tensor:
        """The last states, (rows, *event), or all of them, (steps + 1, rows, *event)."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        sampler = EulerMaruyama() if sampler is None else sampler
        field = self.field(what) if isinstance(what, str) else what
        if isinstance(sampler, Ancestral):
            field = convert(field, "clean", self.reference)
        pairs = uniform_grid(self.steps if steps is None else steps)
        result = x.new_empty(len(pairs) + 1 if record else 1, *x.shape)
        was_training, run = self.training, cast(Any, simulate)
        self.eval()
        try:
            starts = range(0, len(x), batch_size)
            for start in tqdm(starts, desc="simulating", leave=False, disable=not progress):
                rows = torch.arange(start, min(len(x), start + batch_size))
                used = _Recorder(sampler) if record else sampler
                result[-1, rows] = run(
                    x[rows], pairs, used, self.reference, field, noise.rows(rows), steer
                )
                if isinstance(used, _Recorder):
                    result[:-1, rows] = torch.stack(used.states)
        finally:
            self.train(was_training)
        return result if record else result[0]

    # Files

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """One safetensors file: the weights, all that `load` needs, and the statement of use.

        Of several processes all have to call it, and the main one writes.
        """
        header = {
            "system": SYSTEM,
            "network": describe(self.network0),
            "network1": describe(self.network1),
            "options": self._options(),
            "data": None if self.format is None else self.format.as_json(),
        }
        use = self.use and self.use.for_system(SYSTEM, self.out_of_scope)
        weights = whole_state(self.state_dict())
        if is_main():
            save_model(path, weights, header, use=use, overwrite=overwrite)

    def _options(self) -> dict[str, Any]:
        return {
            "reference": asdict(self.reference),
            "predicts": self.predicts,
            "measure": self.measure,
            "steps": self.steps,
            "shape": self.shape,
        }

    @classmethod
    def load(cls, path: str | Path, *, network: tuple[nn.Module, nn.Module] | None = None) -> Self:
        """The model that `save` wrote, on the CPU.

        Args:
            path: of the file.
            network: ``network0`` and ``network1``, built as they were; needed only for classes that
                are not fluvial's.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a Schrödinger bridge, or the weights do not fit the networks.
        """
        weights, header = load_model(path, SYSTEM)
        networks = network or (rebuild(header["network"]), rebuild(header["network1"]))
        options, data = dict(header["options"]), header.get("data")
        options["reference"] = Reference(**options["reference"])
        model = cls(*networks, format=data and Format.from_json(data), **options)
        put_weights(model, weights, path)
        model.use = read_use(path)
        return model.eval()


@dataclass(frozen=True)
class _Source:
    """Where the stages of a training get their objectives and their data from."""

    model: SchrodingerBridge
    sides: dict[str, Tensor]
    pairs: int
    coupling: Coupling | None
    method: str
    times: Uniform
    seed: int
    progress: bool

    def stage(
        self, number: int, direction: Direction, before: Direction | None
    ) -> tuple[Objective, Callable[[], Data]]:
        """(objective, data) of a direction: on what ``before`` makes or, where that is None, on the
        first coupling. ``number`` is the stage's; each draws rows and noise of its own."""
        model, network = self.model, self.model.network_of(direction)
        if self.method == "dsb":
            objective = IncrementMatching(network, model.reference, model.predicts)
            return objective, lambda: self._chains(number, direction, before)
        matching = Matching(
            network,
            model.reference,
            predicts=model.predicts,
            measure=model.measure,
            times=self.times,
            coupling=self.coupling if before is None else None,
        )
        if before is None:
            return matching, lambda: self._first(number, direction)
        return matching, lambda: self._pairs(number, direction, before)

    def _first(self, number: int, direction: Direction) -> Data:
        """Rows of both sides, as many as the larger has; of one alone for the reference."""
        ours, theirs = self.sides[direction], self.sides[_other(direction)]
        if self.coupling is None:
            return {"x": ours}
        count = max(len(ours), len(theirs))
        return {"x": self._rows(ours, count, number), "x1": self._rows(theirs, count, number)}

    def _pairs(self, number: int, direction: Direction, before: Direction) -> Data:
        """True points of the side that ``before`` starts from, and what it makes of them."""
        start = self._rows(self.sides[_other(before)], self.pairs, number)
        with torch.no_grad():
            noise = KeyedNoise(self.seed).at(number)
            end = self.model._simulate(start, before, noise, progress=self.progress)
        return {"x": end, "x1": start} if direction == before else {"x": start, "x1": end}

    def _chains(self, number: int, direction: Direction, before: Direction | None) -> Data:
        """Increments of chains that start from the side that ``direction`` aims at."""
        start = self._rows(self.sides[direction], self.pairs, number)
        reference, noise = self.model.reference, KeyedNoise(self.seed).at(number)
        field: Field = Free(reference)
        if before is not None:
            field = convert(self.model.field(before), "score", reference)
        with torch.no_grad():
            simulate = self.model._simulate
            states = simulate(start, field, noise, record=True, progress=self.progress)
            return increments(states, field, reference)

    def _rows(self, x: Tensor, count: int, number: int) -> Tensor:
        """``count`` rows in a random order, all as often as one another, or nearly."""
        return Batches({"x": x}, count, self.seed)(number)["x"]


@dataclass(frozen=True)
class _Flow:
    ours: Field
    theirs: Field
    diffusion: float
    predicts: str = "velocity"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return (self.theirs(x, 1 - t) - self.ours(x, t)) * (self.diffusion**2 / 2)


class _Recorder:
    """A sampler that keeps the states it starts from."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.states = sampler, list[Tensor]()

    def start(self, x: Tensor) -> Any:
        return self.sampler.start(x)

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Any, Any, Any]:
        self.states.append(x)
        return self.sampler.step(x, memory, run)


def _other(direction: str) -> Direction:
    return "forward" if direction == "backward" else "backward"


def _split(total: int, most: int) -> list[int]:
    """``total`` in parts of ``most``, and the rest."""
    return [min(most, total - done) for done in range(0, total, most)]


def _check_direction(direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be 'backward' or 'forward', got {direction!r}")
