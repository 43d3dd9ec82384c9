"""The claim of physics-constrained flow matching: hard constraints, and samples that gain by them.

Five tasks: heat, reaction and diffusion, vorticity of a two-dimensional flow, and inviscid Burgers'
equation with shocks, of which once the start and once the boundary is known. In each a flow of
fields is given that knows nothing of the condition, and samples are wanted that have it: known
values, and a balance of mass; with a known start of Burgers' equation a few steps of its scheme,
too. The flow is the exact one of a finite set of solutions (`EmpiricalDenoiser`), and, for heat and
reaction, a Fourier neural operator trained on them as well.

Physics-constrained flow matching (PCFM), with the noise of the paper and with that the field
implies, is compared with the flow alone (FFM), overwriting (ECI), guidance by a gradient
(DiffusionPDE), optimised noise (D-Flow) and projected states (PDM). All have the same flow, the
same number of steps and as many trials of their options on a condition that is not tested.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import matplotlib

matplotlib.use("Agg")  # a run has no screen
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from fluvial.claims.report import Report, open_run, write_report
from fluvial.claims.resumable import Resumable
from fluvial.claims.verdict import Comparison
from fluvial.core.gaussian.ode import Euler, Heun, Midpoint
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Field
from fluvial.core.steering.projection import Constraint, project, stack
from fluvial.networks import FNO
from fluvial.physics import PhysicsConstrainedFlow, pde
from fluvial.physics.constraints import (
    burgers_boundary,
    burgers_local,
    burgers_mass,
    constraint_floor,
    initial_condition,
    mass,
    reaction_diffusion_mass,
)
from fluvial.physics.physics_constrained_flow import (
    ECI,
    PCFM,
    DFlow,
    EmpiricalDenoiser,
    GuidedEuler,
    ProjectedState,
    field_scores,
    sample_under,
    steady_scales,
    worst_residual,
)
from fluvial.training.files import atomic

SYSTEM = "physics-constrained-flow"
CLAIM = (
    "Samples of physics-constrained flow matching satisfy values, balances and steps of a scheme "
    "to machine precision, on heat, reaction-diffusion, vorticity and shocks. Where a balance is "
    "not linear, at a shock, their mean field has at most 0.6 times the squared error of the flow "
    "alone and of overwriting, and a smaller one than projecting noisy states; on heat at most 0.6 "
    "times that of overwriting; elsewhere, and with trained networks, a smaller one than both."
)
SHARE = 0.6
"""Of the squared error of others, on heat and at the shock: the brief demonstration's."""
RESIDUAL = 1e-8
"""max |h| in double precision, at most."""
SINGLE = 64
"""max |h| of the fields in single precision, at most, in units of eps times their largest value."""

Task: TypeAlias = Literal["heat", "reaction", "vorticity", "shock, start", "shock, boundary"]
TASKS: tuple[Task, ...] = get_args(Task)
Source: TypeAlias = Literal["exact", "trained"]
LEARNED: tuple[Task, ...] = ("heat", "reaction")
Arm: TypeAlias = Literal[
    "PCFM", "PCFM, implied noise", "FFM", "ECI", "DiffusionPDE", "D-Flow", "PDM"
]
ARMS: tuple[Arm, ...] = get_args(Arm)
TRIALS: Mapping[Arm, tuple[Any, ...]] = {
    "PCFM": (0.0, 1.0, 10.0),  # guide_weight
    "PCFM, implied noise": (0.0, 1.0, 10.0),
    "FFM": ("Euler", "Heun", "Midpoint"),  # as many calls of the field
    "ECI": (1, 3, 5),  # mixing steps
    "DiffusionPDE": (0.1, 0.3, 0.9),  # share of a residual that a step takes away at most
    "D-Flow": (0.1, 0.3, 1.0),  # learning rate
    "PDM": (0.0, 1e-3, 1e-1),  # damping
}
"""The options that are tried, as many for all."""
VALIDATION, TEST, REFERENCE, PRIOR, DRAW = range(1_000, 6_000, 1_000)
"""Seeds of the draws."""
LOCAL = 5
"""Steps of Godunov's scheme that are imposed."""
MODEL = "model.safetensors"


@dataclass(frozen=True)
class Config:
    """Everything a run of the claim depends on.

    Args:
        heat, reaction, shock: grids (n_x, n_t).
        vorticity: (n, n, n_t).
        starts: different starts of the vorticity; ``rows`` are spread over phases of the forcing.
        dt: of the vorticity's solver.
        width_of_start: of the smoothed step that Burgers' equation starts from.
        rows: solutions that the flows know.
        reference: solutions that share a tested condition.
        samples: drawn under a tested condition.
        trial_samples: drawn for a trial.
        conditions: tested, of each task.
        steps: calls of the field for a sample, but for ECI, which mixes, and D-Flow.
        dflow: (steps, iterations) of D-Flow.
        modes, width, depth, lift: of the neural operator.
        training: optimiser steps.
        batch_size, lr: of the training.
        seeds: another set of solutions, conditions and samples each.
        side_by_side: two processes.
    """

    heat: tuple[int, int] = (24, 24)
    reaction: tuple[int, int] = (24, 20)
    shock: tuple[int, int] = (33, 33)
    vorticity: tuple[int, int, int] = (16, 16, 8)
    starts: int = 60
    dt: float = 0.05
    width_of_start: float = 0.05
    rows: int = 1_500
    reference: int = 256
    samples: int = 48
    trial_samples: int = 16
    conditions: int = 2
    steps: int = 40
    dflow: tuple[int, int] = (10, 8)
    modes: int = 8
    width: int = 16
    depth: int = 3
    lift: int = 32
    training: int = 600
    batch_size: int = 32
    lr: float = 2e-3
    seeds: tuple[int, ...] = (0,)
    side_by_side: bool = True

    def __post_init__(self) -> None:
        if not self.seeds:
            raise ValueError("seeds needs at least one value")
        for name in ("rows", "reference", "samples", "trial_samples"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name} must be at least 2, got {getattr(self, name)}")
        for name in ("starts", "conditions", "steps", "training", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.shock[1] <= LOCAL:
            raise ValueError(f"shock needs more than {LOCAL} saves, got {self.shock}")
        if self.vorticity[0] != self.vorticity[1]:
            raise ValueError(f"vorticity must be a square, got {self.vorticity}")


PRESETS: dict[str, Config] = {
    "smoke": Config(
        heat=(8, 6),
        reaction=(8, 6),
        shock=(9, 9),
        vorticity=(6, 6, 3),
        starts=4,
        dt=0.1,
        width_of_start=0.15,
        rows=16,
        reference=6,
        samples=3,
        trial_samples=2,
        conditions=1,
        steps=2,
        dflow=(2, 1),
        modes=4,
        width=4,
        depth=1,
        lift=8,
        training=2,
        batch_size=8,
        side_by_side=False,
    ),
    "laptop": Config(rows=1_000, samples=32, trial_samples=12, conditions=1, training=300),
    "record": Config(seeds=(0, 1, 2)),
    # the published sizes; the flows of vorticity and shocks stay exact
    "full": Config(
        heat=(100, 100),
        reaction=(128, 100),
        shock=(101, 101),
        vorticity=(64, 64, 50),
        starts=100,
        dt=1e-3,
        width_of_start=0.02,
        rows=6_400,
        reference=512,
        samples=512,
        trial_samples=64,
        conditions=20,
        steps=100,
        dflow=(100, 20),
        modes=32,
        width=64,
        depth=4,
        lift=256,
        training=20_000,
        batch_size=256,
        lr=3e-4,
        side_by_side=False,
    ),
}


# Solutions


def shape_of(config: Config, task: Task) -> tuple[int, ...]:
    """Of a field."""
    grids = {"heat": config.heat, "reaction": config.reaction, "vorticity": config.vorticity}
    return grids.get(task, config.shock)


@lru_cache(maxsize=2)
def prior(config: Config, task: Task, seed: int) -> Tensor:
    """The solutions that a flow knows, of all conditions; float64."""
    noise = KeyedNoise(PRIOR).at(seed)
    shape, rows = shape_of(config, task), config.rows
    if task == "heat":
        return pde.heat_fields(rows, cast(Any, shape), noise)[0]
    if task == "reaction":
        return pde.reaction_fields(rows, cast(Any, shape), noise)
    if task == "vorticity":
        starts = pde.vorticity_starts(config.starts, shape[0], noise)
        each = max(1, rows // config.starts)
        return _vorticity(config, starts.repeat_interleave(each, 0), noise)
    return pde.burgers_fields(rows, cast(Any, shape), noise, width=config.width_of_start)[0]


def _vorticity(config: Config, starts: Tensor, noise: KeyedNoise) -> Tensor:
    like = torch.empty(len(starts), 1, dtype=torch.float64)
    phases = math.pi / 2 * noise.uniform(like, "phase")[:, 0]
    return pde.vorticity_fields(starts, phases, saves=config.vorticity[2], dt=config.dt)


@dataclass(frozen=True, eq=False)
class Case:
    """A condition: its constraint, and solutions that have it."""

    constraint: Constraint
    reference: Tensor


@lru_cache(maxsize=8)
def case(config: Config, task: Task, seed: int, part: int, number: int) -> Case:
    """The condition ``number`` of a part, `VALIDATION` or `TEST`."""
    noise = KeyedNoise(part).at(seed).at(number)
    shape, rows = shape_of(config, task), config.reference
    reference = KeyedNoise(REFERENCE).at(part).at(seed).at(number)
    drawn = float(noise.uniform(torch.empty(1, 1, dtype=torch.float64), "condition"))
    grid = cast(Any, shape)
    if task == "heat":
        fields, _ = pde.heat_fields(rows, grid, reference, phase=math.pi * (0.15 + 0.7 * drawn))
        law = mass(shape, 2 * math.pi / shape[0])
    elif task == "reaction":
        start = pde.reaction_starts(1, shape[0], noise)[0]
        fields = pde.reaction_fields(rows, grid, reference, start=start)
        law = reaction_diffusion_mass(grid, 1 / shape[0], 1 / shape[1])
    elif task == "vorticity":
        start = pde.vorticity_starts(1, shape[0], noise)
        fields = _vorticity(config, start.expand(rows, -1, -1), reference)
        law = mass(shape, 1 / (shape[0] * shape[1]))
    else:
        dx, dt = 1 / (shape[0] - 1), 1 / (shape[1] - 1)
        law = burgers_mass(grid, dx, dt)
        place, left = (0.3 + 0.4 * drawn, None) if "start" in task else (None, 0.1 + 0.8 * drawn)
        fields, _ = pde.burgers_fields(
            rows, grid, reference, place=place, left=left, width=config.width_of_start
        )
        if left is not None:
            return Case(stack(burgers_boundary(left, grid), law), fields)
        law = stack(burgers_local(grid, dx, dt, LOCAL), law)
    return Case(stack(initial_condition(fields[0, ..., 0], shape), law), fields)


# Arms


def options(config: Config, arm: Arm, choice: Any, constraint: Constraint) -> dict[str, Any]:
    """How `sample_under` is called for an arm with one of its `TRIALS`."""
    made: dict[str, Any] = {"steps": config.steps, "final": False}
    method: Any
    match arm:
        case "PCFM":
            return {**made, "final": True, "method": partial(PCFM, guide_weight=choice)}
        case "PCFM, implied noise":
            method = partial(PCFM, guide_weight=choice, renoise="implied")
            return {**made, "final": True, "method": method}
        case "FFM":
            sampler = {"Euler": Euler, "Heun": Heun, "Midpoint": Midpoint}[choice]()
            steps = config.steps if choice == "Euler" else max(1, config.steps // 2)
            return {**made, "method": None, "sampler": sampler, "steps": steps}
        case "ECI":
            return {**made, "method": partial(ECI, mix=choice)}
        case "DiffusionPDE":
            scale = {name: choice * one for name, one in whole_steps(constraint).items()}
            return {**made, "method": partial(GuidedEuler, scale=scale)}
        case "D-Flow":
            steps, iterations = config.dflow
            method = partial(DFlow, lr=choice, iterations=iterations)
            return {**made, "method": method, "steps": steps}
    return {**made, "method": partial(ProjectedState, damp=choice)}


@lru_cache(maxsize=8)
def whole_steps(constraint: Constraint) -> Mapping[str, float]:
    """Scales of `GuidedEuler` at which a step takes the stiffest defect of a name away.

    They are of the point of the manifold next to a constant, which knows no solution.
    """
    middle = torch.full((1, *constraint.shape), 0.5, dtype=torch.float64)
    return steady_scales(constraint, project(middle, constraint, strict=False).u, 1.0)


def draw_samples(
    config: Config, field: Field, arm: Arm, choice: Any, case: Case, num: int, noise: KeyedNoise
) -> Tensor:
    """(num, *shape), float64; `ValueError` where the method diverges."""
    like = torch.zeros((), dtype=getattr(field, "dtype", torch.float64))
    return sample_under(
        field,
        case.constraint.shape,
        num,
        noise=noise,
        constraint=case.constraint,
        like=like,
        dtype=torch.float64,
        **options(config, arm, choice, case.constraint),
    ).u


# The run


def run(
    config: Config, preset: str, out: Path, *, force: bool = False, progress: bool = True
) -> Report:
    """Run the claim into the folder ``out``; go on where an interrupted run of it stopped.

    Raises:
        FileExistsError: ``out`` holds something else, or a finished run; see `open_run`.
    """
    run = _ClaimRun(config, open_run(out, preset, config, force=force), progress)
    problems: list[tuple[Source, Task]] = [("exact", task) for task in TASKS]
    problems += [("trained", task) for task in LEARNED]
    for seed in config.seeds:
        run.each("model", [(task, seed) for task in LEARNED])
        run.each("outcome", [(*problem, arm, seed) for problem in problems for arm in ARMS])
    outcomes = {
        problem: {arm: [run.outcome(*problem, arm, seed) for seed in config.seeds] for arm in ARMS}
        for problem in problems
    }
    floors = {task: run.floor(task) for task in TASKS}
    report = Report(
        system=SYSTEM,
        claim=CLAIM,
        preset=preset,
        config=config,
        comparisons=_comparisons(outcomes),
        table=_table(outcomes, floors),
        data={
            "name": "solutions of partial differential equations",
            "source": "made by the run itself: closed form (heat), SciPy's LSODA (reaction and "
            "diffusion), Godunov's scheme (Burgers), a pseudo-spectral solver (vorticity)",
            "licence": "none needed",
        },
        seconds=run.spent(),
        notes=_notes(config, outcomes, floors),
    )
    run.draw(outcomes)
    shutil.copyfile(run.folder("heat", config.seeds[0]) / MODEL, out / MODEL)
    write_report(report, out)
    return report


Outcome: TypeAlias = Mapping[str, Any]
Outcomes: TypeAlias = Mapping[tuple[Source, Task], Mapping[Arm, Sequence[Outcome]]]


class _ClaimRun(Resumable[Config]):
    """The steps of a run. Each leaves a file in ``out``, and is skipped where that file is."""

    def folder(self, task: Task, seed: int) -> Path:
        return self.out / f"trained-{_slug(task)}-{seed}"

    def model(self, task: Task, seed: int) -> PhysicsConstrainedFlow:
        """The trained flow of a task."""
        config, path = self.config, self.folder(task, seed) / MODEL
        if not path.exists():
            network = FNO(
                shape=shape_of(config, task),
                modes=config.modes,
                width=config.width,
                depth=config.depth,
                lift=config.lift,
                seed=seed,
            )
            model = PhysicsConstrainedFlow(network)
            model.fit(
                prior(config, task, seed).float(),
                steps=config.training,
                batch_size=min(config.batch_size, config.rows),
                lr=config.lr,
                schedule="cosine",
                ema=0.99,
                seed=seed,
                progress=self.progress,
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            model.save(path)
        return PhysicsConstrainedFlow.load(path)

    def field(self, source: Source, task: Task, seed: int) -> Field:
        if source == "exact":
            return EmpiricalDenoiser(prior(self.config, task, seed))
        return _Single(self.model(task, seed).field)

    def outcome(self, source: Source, task: Task, arm: Arm, seed: int) -> Outcome:
        """What is measured of an arm: means over the tested conditions."""
        name = f"{source}/{_slug(task)}/{_slug(arm)}-{seed}.json"
        return cast(Outcome, self.stored(name, lambda: self._measure(source, task, arm, seed)))

    def _measure(self, source: Source, task: Task, arm: Arm, seed: int) -> dict[str, Any]:
        config, field = self.config, self.field(source, task, seed)
        noise = KeyedNoise(DRAW).at(seed)
        tried = []
        validation = case(config, task, seed, VALIDATION, 0)
        for choice in TRIALS[arm]:
            try:
                u = draw_samples(
                    config, field, arm, choice, validation, config.trial_samples, noise.at(0)
                )
                found = field_scores(u, validation.reference, validation.constraint)["mmse"]
            except ValueError:  # it diverges, or its projection does
                found = math.inf
            tried.append(found if math.isfinite(found) else 1e300)
        best = TRIALS[arm][tried.index(min(tried))]
        scores, seconds = [], []
        for number in range(config.conditions):
            test = case(config, task, seed, TEST, number)
            begin = time.process_time()
            u = draw_samples(config, field, arm, best, test, config.samples, noise.at(1 + number))
            seconds.append((time.process_time() - begin) / config.samples)
            one = field_scores(u, test.reference, test.constraint)
            single = field_scores(u.float(), test.reference, test.constraint)
            size = float(u.abs().max()) * torch.finfo(torch.float32).eps
            scores.append(
                {
                    **{key: one[key] for key in ("mmse", "smse", "spread", "low", "high")},
                    "residual": worst_residual(one),
                    "single": worst_residual(single) / size,
                    **{f"residual of {key}": r["l2"] for key, r in one["residual"].items()},
                }
            )
        mean = {key: statistics.fmean(one[key] for one in scores) for key in scores[0]}
        for key, pick in (("residual", max), ("single", max), ("low", min), ("high", max)):
            mean[key] = pick(one[key] for one in scores)
        return {"choice": best, "trials": tried, "seconds": statistics.fmean(seconds), **mean}

    def floor(self, task: Task) -> Outcome:
        """Other solutions of a condition in the place of samples."""

        def make() -> dict[str, float]:
            found = []
            for seed in self.config.seeds:
                test = case(self.config, task, seed, TEST, 0)
                half = test.reference[: self.config.samples]
                rest = test.reference[len(half) :]
                rest = half if len(rest) < 2 else rest
                one = field_scores(half, rest, test.constraint)
                laws = constraint_floor(test.constraint, test.reference)
                worst = max(law["max"] for law in laws.values())
                found.append((one["mmse"], one["smse"], worst))
            mmse, smse, worst = map(statistics.fmean, zip(*found, strict=True))
            return {"mmse": mmse, "smse": smse, "residual": worst}

        return cast(Outcome, self.stored(f"floors/{_slug(task)}.json", make))

    def draw(self, outcomes: Outcomes) -> None:
        """``figure.png``."""
        config, seed = self.config, self.config.seeds[0]
        figure: Any = plt.figure(figsize=(10, 10.5), layout="constrained")
        top, middle, bottom = figure.subfigures(3, 1, height_ratios=(1, 1, 1.15))
        _bars(top.subplots(1, 2), outcomes)
        noise = KeyedNoise(DRAW).at(seed).at(1)
        shock: Task = "shock, start"
        test = case(config, shock, seed, TEST, 0)
        field = self.field("exact", shock, seed)
        shown: dict[str, Tensor] = {"solutions": test.reference}
        for arm in ("PCFM", "ECI", "PDM", "FFM"):
            choice = outcomes["exact", shock][arm][0]["choice"]
            shown[arm] = draw_samples(config, field, arm, choice, test, config.samples, noise)
        left, right = middle.subplots(1, 2)
        _profile(left, shown)
        self._rates(right, seed)
        _means(bottom.subplots(2, len(shown)), shown)
        with atomic(self.out / "figure.png") as path:
            figure.savefig(path, dpi=150, format="png")
        plt.close(figure)

    def _rates(self, axis: Any, seed: int) -> None:
        """The rate of decay in samples of heat, by the kind of noise; the right one is uniform."""
        config = self.config
        test, field = case(config, "heat", seed, TEST, 0), self.field("exact", "heat", seed)
        low, high = pde.RATES
        bins = np.linspace(low, high, 9)
        for k, kind in enumerate(("fixed", "implied", "fresh")):
            u = sample_under(
                field,
                config.heat,
                config.samples,
                noise=KeyedNoise(DRAW).at(seed).at(1),
                constraint=test.constraint,
                method=partial(PCFM, renoise=cast(Any, kind)),
                steps=config.steps,
            ).u
            rates = decay(u).clamp(low, high).numpy()
            axis.hist(
                rates, bins=bins, density=True, histtype="step", color=f"C{k}", lw=1.6, label=kind
            )
        axis.axhline(1 / (high - low), color="0.5", linestyle="--", lw=1, label="solutions")
        axis.set_xlabel("rate of decay of samples of heat")
        axis.set_ylabel("density")
        axis.legend(frameon=False, fontsize=8, title="noise of PCFM", title_fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)


class _Single:
    """A network's field, with the dtype in which it is called."""

    dtype = torch.float32

    def __init__(self, field: Field) -> None:
        self.field, self.predicts = field, field.predicts

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        return cast(Tensor, self.field(x, t, **cond))


def _slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "-").lower()


def decay(u: Tensor) -> Tensor:
    """The rate a of fields of heat, from their size at half time: |u(., t)| falls as exp(-a t)."""
    half = u.shape[2] // 2
    t = half / (u.shape[2] - 1)
    sizes = u.double().norm(dim=1)
    return -(sizes[:, half] / sizes[:, 0].clamp(min=1e-12)).clamp(min=1e-12).log() / t


# Verdict


def _comparisons(outcomes: Outcomes) -> list[Comparison]:
    def logs(problem: tuple[Source, Task], *rivals: Arm) -> list[float]:
        arms = outcomes[problem]
        ours = arms["PCFM"]
        return [
            math.log(min(arms[rival][k]["mmse"] for rival in rivals) / one["mmse"])
            for k, one in enumerate(ours)
        ]

    def words(problem: tuple[Source, Task], *rivals: str) -> str:
        return (
            f"log squared error of the mean field of {' or '.join(rivals)}, less that of PCFM "
            f"({problem[1]}, {problem[0]} flow)"
        )

    shock: tuple[Source, Task] = ("exact", "shock, start")
    heat: tuple[Source, Task] = ("exact", "heat")
    margin = -math.log(SHARE)
    result = [
        Comparison(words(shock, "FFM", "ECI"), logs(shock, "FFM", "ECI"), margin),
        Comparison(words(shock, "PDM"), logs(shock, "PDM")),
        Comparison(words(heat, "ECI"), logs(heat, "ECI"), margin),
    ]
    for problem in outcomes:
        if problem not in (shock, heat):
            result.append(Comparison(words(problem, "FFM", "ECI"), logs(problem, "FFM", "ECI")))
    seeds = range(len(outcomes[heat]["PCFM"]))
    for name, key, most in (
        (f"decades of max |h| below {RESIDUAL:g}, double precision", "residual", RESIDUAL),
        (f"decades of max |h| below {SINGLE} eps max |u|, single precision", "single", SINGLE),
    ):
        worst = [max(float(arms["PCFM"][k][key]) for arms in outcomes.values()) for k in seeds]
        decades = [math.log10(most / max(value, 1e-300)) for value in worst]
        result.append(Comparison(f"{name}, the worst of all tasks", decades))
    return result


def _table(outcomes: Outcomes, floors: Mapping[Task, Outcome]) -> list[dict[str, Any]]:
    """One row a flow, task and arm; means over seeds."""
    rows = []
    for (source, task), arms in outcomes.items():
        for arm, over in arms.items():
            mean = {
                key: statistics.fmean(float(one[key]) for one in over)
                for key in ("mmse", "smse", "spread", "residual", "seconds")
            }
            choices = sorted({str(one["choice"]) for one in over})
            rows.append(_row(source, task, arm, mean, ", ".join(choices)))
        rows.append(_row(source, task, "solutions (floor)", floors[task], ""))
    return rows


def _row(source: str, task: str, arm: str, mean: Outcome, choice: str) -> dict[str, Any]:
    return {
        "flow": source,
        "task": task,
        "arm": arm,
        "MMSE": mean["mmse"],
        "SMSE": mean["smse"],
        "spread": mean.get("spread"),
        "max |h|": mean["residual"],
        "s a sample": mean.get("seconds"),
        "option": choice,
    }


def _notes(config: Config, outcomes: Outcomes, floors: Mapping[Task, Outcome]) -> list[str]:
    better = []
    for (source, task), arms in outcomes.items():
        ours = statistics.fmean(one["mmse"] for one in arms["PCFM"])
        for arm in ARMS[2:]:
            theirs = statistics.fmean(one["mmse"] for one in arms[arm])
            if theirs <= ours:
                better.append(f"{arm} on {task} ({source}), {theirs:.2g} to {ours:.2g}")
    laws = ", ".join(f"{task} {floors[task]['residual']:.1g}" for task in TASKS)
    dearer = [
        statistics.fmean(one["seconds"] for one in arms["D-Flow"])
        / statistics.fmean(one["seconds"] for one in arms["PCFM"])
        for arms in outcomes.values()
    ]
    same = [
        f"{task} ({source}), seed {seed}"
        for (source, task), arms in outcomes.items()
        if task in ("heat", "vorticity")
        for seed, one, other in zip(config.seeds, arms["PCFM"], arms["ECI"], strict=True)
        if (one["choice"], other["choice"]) == (0.0, 1)
    ]
    return [
        f"Grids: heat {config.heat}, reaction {config.reaction}, shocks {config.shock}, vorticity "
        f"{config.vorticity}; the paper's are (100, 100), (128, 100), (101, 101) and (64, 64, 50). "
        f"The neural operator has {config.depth} layers of {config.width} channels and "
        f"{config.modes} modes, and {config.training} steps of training, to the paper's 4 of 64, "
        "32 and 20,000.",
        f"Each arm has {len(TRIALS['PCFM'])} trials, judged by the squared error of the mean "
        f"field on a condition of their own. {config.steps} calls of the field a sample; ECI mixes "
        f"1 to 5 times as many, D-Flow optimises for {config.dflow[1]} iterations through "
        f"{config.dflow[0]} steps, with a gradient through the field, and takes "
        f"{min(dearer):.2g} to {max(dearer):.2g} times the seconds of PCFM.",
        "For equations that are linear, PCFM without the correction is overwriting that mixes "
        "once. Both were chosen, and do not differ, on: " + ("; ".join(same) or "none") + ".",
        f"The balances of the paper are not obeyed by solutions exactly; max |h| of these: {laws}.",
        "Other methods whose mean field is as good as that of PCFM or better: "
        + ("; ".join(better) if better else "none")
        + ".",
        "Only PCFM ends with a projection in double precision. D-Flow and guidance take the mean "
        "square of every group of equations; ECI leaves out those that are not linear.",
    ]


# Figure


def _bars(axes: Any, outcomes: Outcomes) -> None:
    """Errors and residuals of the exact flows, by task and arm."""
    width = 0.8 / len(ARMS)
    names = ["\n".join(task.split(", ")) for task in TASKS]
    for axis, key, label in (
        (axes[0], "mmse", "squared error of the mean field"),
        (axes[1], "residual", "max |h|"),
    ):
        for k, arm in enumerate(ARMS):
            values = [
                statistics.fmean(
                    max(float(one[key]), 1e-17) for one in outcomes["exact", task][arm]
                )
                for task in TASKS
            ]
            places = np.arange(len(TASKS)) + (k - (len(ARMS) - 1) / 2) * width
            axis.bar(places, values, width, label=arm, color=f"C{k}")
        axis.set_yscale("log")
        axis.set_xticks(range(len(TASKS)), names, fontsize=8)
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(top=30 * axes[0].get_ylim()[1])
    axes[0].legend(frameon=False, fontsize=7, ncols=2, loc="upper left")


def _profile(axis: Any, shown: Mapping[str, Tensor]) -> None:
    """The shock at the end of time: means, and the band of the solutions."""
    x = np.linspace(0, 1, shown["solutions"].shape[1])
    for k, (name, u) in enumerate(shown.items()):
        end = u[..., -1]
        if name == "solutions":
            low, high = end.quantile(0.1, dim=0), end.quantile(0.9, dim=0)
            axis.fill_between(x, low, high, color="0.88", lw=0, label="solutions, 10 to 90 %")
        color = "black" if name == "solutions" else f"C{k - 1}"
        axis.plot(x, end.mean(0), color=color, label=f"mean of {name}", lw=1.4)
    axis.set_xlabel("x")
    axis.set_ylabel("u at the end of time, Burgers")
    axis.legend(frameon=False, fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def _means(axes: Any, shown: Mapping[str, Tensor]) -> None:
    """Mean and deviation over samples, x upwards and time to the right."""
    measures: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
        ("mean", lambda u: u.mean(0)),
        ("deviation", lambda u: u.std(0)),
    )
    for row, (title, measure) in zip(axes, measures, strict=True):
        most = float(measure(shown["solutions"]).max())
        for axis, (name, u) in zip(row, shown.items(), strict=True):
            axis.imshow(measure(u), origin="lower", vmin=0, vmax=most, aspect="auto")
            axis.set_title(f"{name}, {title}", fontsize=8)
            axis.set_xticks([])
            axis.set_yticks([])
