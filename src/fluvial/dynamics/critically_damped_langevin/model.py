"""Critically damped Langevin diffusion as a model of data: score matching, sampling, files.

Strasman, Surendran, Boyer, Le Corff, Lemaire and Ocello, "Wasserstein Convergence of Critically
Damped Langevin Diffusions", NeurIPS 2025, arXiv 2511.02419; it generalises Dockhorn, Vahdat and
Kreis, "Score-Based Generative Modeling with Critically-Damped Langevin Diffusion", ICLR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from fluvial.core.arguments import whole_number
from fluvial.core.gaussian.linear import LinearClock
from fluvial.core.protocols import (
    Noise,
    Objective,
    Sampler,
    Steering,
    left_broadcast,
    per_row,
    take,
)
from fluvial.core.scales import Block
from fluvial.core.simulate import simulate
from fluvial.core.time import LogitNormal, Times, Uniform, check_pairs, uniform_grid
from fluvial.data.format import Format
from fluvial.dynamics.critically_damped_langevin.network import ResidualMLP
from fluvial.dynamics.critically_damped_langevin.path import CriticallyDamped
from fluvial.dynamics.critically_damped_langevin.samplers import EM, Denoised
from fluvial.networks import describe, rebuild
from fluvial.training.files import load_model, put_weights, save_model
from fluvial.training.loop import Stage, Training, train
from fluvial.training.processes import is_main
from fluvial.training.sharding import whole_state
from fluvial.training.use import IntendedUse, derive, read_use

SYSTEM = "critically-damped-langevin"
OFFICIAL: dict[str, Any] = {
    "lr": 2e-4,
    "betas": (0.9, 0.999),
    "clip": 1.0,
    "batch_size": 256,
    "ema": 0.9999,
}
"""Of the published training, which takes 2,000 epochs of 50,000 points."""

Output: TypeAlias = Literal["score", "noise", "mixed"]
Given: TypeAlias = Literal["hybrid", "denoising"]

_TIMES: dict[str, Any] = {kind.__name__: kind for kind in (Uniform, LogitNormal)}


@dataclass(frozen=True)
class NetworkScore:
    """A network as the field of the score, (batch, 2, *event).

    The network is called as ``network(u, t, **conditions)`` with positions and momenta one after
    the other along dimension 1: (batch, 2 d), or (batch, 2 channels, height, width).

    Where epsilon = 0 it gives the momentum part of the score alone. Samplers need no more, but the
    clean end does, and there is one position part s_x with which it is (position, 0): with w the
    second row of M^-1 and C the covariance of ``path``, w (U + C s) = 0.

    Args:
        network: any `nn.Module`.
        path: of the process.
        output: what the network gives: the score; or noise, which stands for the score -L^-T noise;
            or noise beside the score of a momentum without data, -momentum / C_vv (mixed).
        matching: "hybrid" where the C = L L^T that ``output`` means is that given the position
            of the data alone, "denoising" where their momentum is given too.
        jitter: added to the diagonal of that C.
    """

    network: nn.Module
    path: CriticallyDamped
    output: Output = "score"
    matching: Given = "hybrid"
    jitter: float = 0.0
    predicts: str = "score"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        learned = self.learned(x, t, self.moments(t)[1], **cond)
        return learned if self.path.epsilon else self._completed(x, learned[:, 0], t)

    def moments(self, t: Tensor) -> tuple[Block, Block]:
        """(M, C), with the jitter."""
        hybrid = self.matching == "hybrid"
        scale, cov = self.path.moments(t) if hybrid else self.path.kernel(torch.zeros_like(t), t)
        return scale, cov + self.jitter * cov.identity()

    def learned(self, x: Tensor, t: Tensor, cov: Block, **cond: Any) -> Tensor:
        """The part of the score that is learned, (batch, 1 or 2, *event)."""
        parts = 2 if self.path.epsilon else 1
        u = x.flatten(1, 2)
        value = self.network(u, per_row(t, x), **cond)
        if value.shape != (len(x), parts * x.shape[2], *x.shape[3:]):
            raise ValueError(
                f"the network must return {parts} x {x.shape[2]} numbers along dimension 1 where "
                f"epsilon is {self.path.epsilon}, got {tuple(value.shape)} for {tuple(u.shape)}"
            )
        # in half precision its multiples by 1 / L would overflow
        value = value.unflatten(1, (parts, x.shape[2])).to(x.dtype)
        if self.output == "score":
            return value
        if parts == 1:
            value = self.path.state(torch.zeros_like(value[:, 0]), value[:, 0])
        score = -cov.cholesky().T.solve(value)
        if self.output == "mixed":
            free = x[:, 1] / left_broadcast(cov.matrix[..., 1, 1].to(x), x[:, 1])
            score = score - self.path.state(torch.zeros_like(free), free)
        return score[:, -parts:]

    def _completed(self, x: Tensor, momentum: Tensor, t: Tensor) -> Tensor:
        scale, cov = self.path.moments(t)
        row = scale.inverse().matrix[..., 1, :]
        pull = (row.unsqueeze(-2) @ cov.matrix).squeeze(-2)
        both = torch.cat([row, pull[..., 1:]], -1) / torch.where(
            pull[..., :1] == 0, torch.inf, pull[..., :1]
        )
        a, b, c = (left_broadcast(part, momentum).to(x) for part in both.unbind(-1))
        return self.path.state(-(a * x[:, 0] + b * x[:, 1] + c * momentum), momentum)


class CriticallyDampedLangevin(Objective):
    """Learns the score of positions and momenta, and samples positions by the reverse process.

    The forward process, `CriticallyDamped`, carries (x_0, v_0), v_0 ~ N(0, v0), to a Gaussian.
    With C = L L^T the covariance of its state given x_0 and r the noise of a draw M (x_0, 0) + L r,
    hybrid score matching minimises the mean over t of

        epsilon = 0:  |l s_v + r_v|^2,       l = L_vv,    s_v the momentum part of the score,
        epsilon > 0:  det C |s + L^-T r|^2,  with det C that of one coordinate,

    summed over coordinates. Denoising score matching, ``matching="denoising"``, conditions on v_0
    too, and has no weight. Both have the marginal score for their minimum.

    Args:
        network: see `NetworkScore`; `ResidualMLP` is the published one.
        path: the forward process.
        output: what the network gives: the score (official), or noise or mixed (Dockhorn et al.).
        matching: "hybrid" or "denoising".
        times: law of t.
        jitter: added to the variances of C in training, 1e-6 in the official code, and 1e-9 for
            images in that of Dockhorn et al.
        shape: of one event; taken from ``format`` or the data if left out.
        format: how the user's data become numbers of mean 0 and variance 1, and back; `fit` encodes
            with it, and it is saved with the model. None: the data are such numbers already.

    Raises:
        ValueError: an unknown ``output`` or ``matching``, ``jitter`` below 0, or ``shape`` and
            ``format`` that disagree.

    Citation: Strasman et al., NeurIPS 2025, arXiv 2511.02419; Dockhorn et al., ICLR 2022.
    """

    intended: tuple[str, ...] = ("drawing new samples that resemble the training data",)
    out_of_scope: tuple[dict[str, str], ...] = ()

    def __init__(
        self,
        network: nn.Module,
        *,
        path: CriticallyDamped = CriticallyDamped(),  # noqa: B008 (frozen)
        output: Output = "score",
        matching: Given = "hybrid",
        times: Times = Uniform(1e-5, 1.0),  # noqa: B008 (frozen)
        jitter: float = 1e-6,
        shape: Sequence[int] | None = None,
        format: Format | None = None,
    ) -> None:
        super().__init__()
        if output not in get_args(Output):
            raise ValueError(f"output must be 'score', 'noise' or 'mixed', got {output!r}")
        if matching not in get_args(Given):
            raise ValueError(f"matching must be 'hybrid' or 'denoising', got {matching!r}")
        if not 0 <= jitter < math.inf:
            raise ValueError(f"jitter must be finite and not negative, got {jitter}")
        if shape is not None and format is not None and tuple(shape) != format.shape:
            raise ValueError(f"shape is {tuple(shape)} and that of format {format.shape}")
        self.network: Any = network
        self.path, self.times, self.jitter = path, times, jitter
        self.output, self.matching = output, matching
        shape = format.shape if format is not None else shape
        self.shape: tuple[int, ...] | None = None if shape is None else tuple(map(int, shape))
        self.format = format
        self.use: IntendedUse | None = IntendedUse(intended=self.intended)

    @property
    def field(self) -> NetworkScore:
        """The score, a field of kind ``"score"``."""
        return NetworkScore(self.network, self.path, self.output, self.matching, self.jitter)

    # Training

    def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
        x = batch["x"]
        if self.format is not None:
            x = self.format.encode(x).to(next(self.parameters()).dtype)
        cond = {name: value for name, value in batch.items() if name != "x"}
        return self._loss(x, noise, cond)

    def loss(
        self, x0: Float[Tensor, "batch *event"], *, noise: Noise, **cond: Any
    ) -> dict[str, Tensor]:
        """The objective on one batch.

        Args:
            x0: positions, of mean 0 and variance 1; `forward` encodes the user's by ``format``.
            noise: keyed noise of times, momenta and states.
            **cond: further inputs of the network.

        Returns:
            ``loss``; ``error``, its value for every row, and ``t``, their times.

        Raises:
            TypeError: ``x0`` is not floating, or of another dtype than the network.
            ValueError: no rows, another shape, or values that are not finite.
        """
        self._check(x0, encoded=True)
        if not bool(x0.isfinite().all()):
            raise ValueError("x0 holds values that are not finite")
        return self._loss(x0, noise, cond)

    def _loss(self, x0: Tensor, noise: Noise, cond: Mapping[str, Any]) -> dict[str, Tensor]:
        t = self.times(x0, noise)
        field, momentum = self.field, None
        if self.matching == "denoising":
            momentum = math.sqrt(self.path.v0) * noise.normal(x0, "momentum")
        clean = self.path.state(x0, momentum)
        scale, cov = field.moments(t)
        level = cov.cholesky()
        r = noise.normal(clean, "source")
        score = field.learned(scale @ clean + level @ r, t, cov, **cond)
        error = score + level.T.solve(r)[:, -score.shape[1] :]
        total = error.square().flatten(1).sum(1)
        if self.matching == "hybrid":
            pivots = level.matrix.diagonal(dim1=-2, dim2=-1).square()  # whose product is det C
            weight = pivots.prod(-1) if self.path.epsilon else pivots[..., 1]
            total = weight.to(total) * total
        return {"loss": total.mean(), "error": total.detach(), "t": t}

    def _check(self, x0: Tensor, *, encoded: bool) -> None:
        if not isinstance(x0, Tensor):
            raise TypeError(f"x0 must be a tensor, got {type(x0).__name__}")
        wanted = next((p.dtype for p in self.parameters()), x0.dtype)
        if encoded and x0.dtype != wanted:
            raise TypeError(f"x0 is {x0.dtype} and the network {wanted}; convert one of them")
        if x0.ndim < 2 or len(x0) == 0:
            raise ValueError(f"x0 needs rows and an event shape, got shape {tuple(x0.shape)}")
        if self.shape is not None and tuple(x0.shape[1:]) != self.shape:
            event = ", ".join(map(str, self.shape))
            raise ValueError(f"x0 must have shape (batch, {event}), got {tuple(x0.shape)}")

    def fit(
        self,
        x: Tensor,
        label: Tensor | None = None,
        *,
        steps: int,
        validation: tuple[Tensor, Tensor | None] | None = None,
        out: str | Path | None = None,
        resume: bool = True,
        progress: bool = True,
        **training: Any,
    ) -> Self:
        """Train on data, then hold the averaged weights.

        Args:
            x: (rows, *event), in the user's units if the model has a format; else floating, of mean
                0 and variance 1 in every coordinate: the process knows no other scale.
            label: (rows,) classes, for a network that takes ``label=``.
            steps: optimiser steps.
            validation: (x, label) that are not trained on: measured now and then, and used to
                choose among the averages of the weights.
            out: folder for checkpoints, metrics and weights; see `fluvial.training.loop.train`.
            resume: go on from the latest checkpoint in ``out``, if there is one.
            progress: show a progress bar.
            **training: other fields of `fluvial.training.loop.Training`; by default those of
                `OFFICIAL`.

        Raises:
            As `loss`, for all rows at once and before any step; and as
            `fluvial.training.loop.train`.
        """
        data = self._rows(x, label)
        held = None if validation is None else self._rows(*validation)
        config = {"network": _describe(self.network), **self._options(), "shape": None}
        if self.format is not None:
            config["format"] = self.format.as_json()
        train(
            Stage(self, data, Training(steps=steps, **{**OFFICIAL, **training}), held),
            out=None if out is None else Path(out),
            resume=resume,
            progress=progress,
            config=config,
        )
        self.shape = tuple(x.shape[1:])
        if self.use is not None and self.use.system is not None:
            self.use = derive([self.use], intended=self.intended)
        return self.eval()

    def _rows(self, x: Tensor, label: Tensor | None) -> dict[str, Tensor]:
        self._check(x, encoded=self.format is None)
        if self.format is not None:
            self.format.encode(x[:1])
        if x.is_floating_point() and not bool(x.isfinite().all()):
            row = int(x.flatten(1).isfinite().all(1).logical_not().nonzero()[0])
            raise ValueError(f"x0 holds values that are not finite, in row {row} first")
        if label is None:
            return {"x": x}
        if not isinstance(label, Tensor) or label.shape != x.shape[:1]:
            raise ValueError(f"label must be a tensor ({len(x)},), one for every row, got {label}")
        return {"x": x, "label": label}

    # Sampling

    @torch.no_grad()
    def sample(
        self,
        num: int,
        *,
        noise: Noise,
        sampler: Sampler | None = None,
        steps: int = 1000,
        t_min: float = 0.0,
        grid: Tensor | None = None,
        denoise: bool = False,
        momentum: bool = False,
        x1: Tensor | None = None,
        steer: Steering | None = None,
        batch_size: int = 500,
        progress: bool = False,
        **cond: Any,
    ) -> Tensor:
        """Samples (num, *event), of the order of 1: ``format.decode`` brings them to data's units.

        Args:
            num: how many.
            noise: keyed noise; row i of the result depends on row i of it only.
            sampler: `EM` by default, as published; `SSCS` needs fewer steps. `Leapfrog`, and those
                of `fluvial.core.gaussian` that take paths of matrices, such as `RK4` for the
                probability flow, serve too.
            steps: equal steps from 1 to ``t_min``; 1,000 are published for `EM`.
            t_min: where the sampler ends.
            grid: pairs (K, 2) in place of ``steps`` and ``t_min``, such as
                ``quadratic_grid(steps, end=1e-3)`` of `fluvial.core.gaussian.schedule`.
            denoise: a last step from there to 0 without noise; see `Denoised`.
            momentum: return positions and momenta, (num, 2, *event).
            x1: (num, 2, *event) start to use in place of a draw of the source.
            steer: bends the simulation.
            batch_size: rows at a time.
            progress: show a progress bar over batches.
            **cond: further inputs of the network, numbers or (num, ...): ``label`` for instance.

        Raises:
            TypeError: a number that has to be whole is not.
            ValueError: the event's shape is not known yet, ``num`` is negative, ``batch_size`` not
                positive, the grid does not fall from 1, ``denoise`` where it ends at 0, ``x1`` or a
                condition has another shape, ``x1`` is not finite.
        """
        num, batch_size = whole_number("num", num), whole_number("batch_size", batch_size)
        if num < 0 or batch_size < 1:
            raise ValueError(f"need num >= 0 and batch_size >= 1, got {num} and {batch_size}")
        if self.shape is None:
            raise ValueError("the event's shape is unknown: fit first, or give shape=")
        pairs = uniform_grid(steps, end=t_min) if grid is None else grid
        check_pairs(pairs)
        if pairs[0, 0] != 1 or not bool((pairs[:, 1] < pairs[:, 0]).all()):
            raise ValueError(f"grid must fall from 1, got {pairs.tolist()}")
        sampler = EM() if sampler is None else sampler
        if denoise:
            if not pairs[-1, 1] > 0:
                raise ValueError("denoise needs a grid that ends above 0: set t_min, 1e-3 say")
            last = torch.stack([pairs[-1, 1], torch.zeros_like(pairs[-1, 1])])
            pairs, sampler = torch.cat([pairs, last[None]]), Denoised(sampler)
        shape = (2, *self.shape)
        if x1 is not None and x1.shape != (num, *shape):
            raise ValueError(f"x1 must have shape {(num, *shape)}, got {tuple(x1.shape)}")
        if x1 is not None and not bool(x1.isfinite().all()):
            raise ValueError("x1 holds values that are not finite")
        parameter = next(self.parameters())
        cond = {name: torch.as_tensor(value).to(parameter.device) for name, value in cond.items()}
        for name, value in cond.items():
            if value.ndim and len(value) != num:
                raise ValueError(
                    f"{name} must be a number or ({num}, ...), got shape {tuple(value.shape)}"
                )

        path = _Whole(**_fields(self.path)) if momentum else self.path
        simulated: Any = simulate
        was_training = self.training
        self.eval()
        result = parameter.new_empty(num, *(shape if momentum else self.shape))
        starts = range(0, num, batch_size)
        try:
            for start in tqdm(starts, desc="sampling", unit="batch", disable=not progress):
                rows = torch.arange(start, min(num, start + batch_size))
                part = noise.rows(rows)
                like = parameter.new_empty(len(rows), *shape)
                x = path.source(like, part) if x1 is None else x1[rows].to(parameter)
                result[rows] = simulated(
                    x, pairs, sampler, path, self.field, part, steer, **take(cond, rows)
                )
        finally:
            self.train(was_training)
        return result

    # Files

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """One safetensors file: the weights, all that `load` needs, and the statement of use.

        Of several processes all have to call it, and the main one writes.

        Raises:
            ValueError: the clock or the law of times is a function that a file cannot hold.
        """
        network = getattr(self.network, "_orig_mod", self.network)  # what torch.compile wrapped
        for name, part, kinds in (
            ("clock", self.path.clock, {"LinearClock": LinearClock}),
            ("times", self.times, _TIMES),
        ):
            if type(part) not in kinds.values():
                raise ValueError(
                    f"{name} is a {type(part).__name__}, which a file cannot hold; "
                    f"{' and '.join(kinds)} can be saved"
                )
        header = {
            "system": SYSTEM,
            "network": _describe(network),
            "options": self._options(),
            "data": None if self.format is None else self.format.as_json(),
        }
        use = self.use and self.use.for_system(SYSTEM, self.out_of_scope)
        weights = whole_state(network.state_dict())
        if is_main():
            save_model(path, weights, header, use=use, overwrite=overwrite)

    def _options(self) -> dict[str, Any]:
        """The arguments of the constructor, but the network and the format, as JSON holds them."""
        return {
            "path": {**_fields(self.path), "clock": _as_json(self.path.clock)},
            "output": self.output,
            "matching": self.matching,
            "times": _as_json(self.times),
            "jitter": self.jitter,
            "shape": self.shape,
        }

    @classmethod
    def load(cls, path: str | Path, *, network: nn.Module | None = None) -> Self:
        """The model that `save` wrote, on the CPU.

        Args:
            path: of the file.
            network: the network, built as it was; needed only for a class that is not fluvial's.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a model of another system, or the weights do not fit the network.
        """
        weights, header = load_model(path, SYSTEM)
        if network is None:
            described = header["network"]
            ours = described["class"] == ResidualMLP.__name__
            network = ResidualMLP(**described["args"]) if ours else rebuild(described)
        put_weights(network, weights, path)
        options = dict(header["options"])
        process, times, data = options["path"], dict(options["times"]), header.get("data")
        clock = {name: value for name, value in process["clock"].items() if name != "class"}
        options["path"] = CriticallyDamped(**{**process, "clock": LinearClock(**clock)})
        options["times"] = _TIMES[times.pop("class")](**times)
        model = cls(network, format=data and Format.from_json(data), **options).eval()
        model.use = read_use(path)
        return model


class _Whole(CriticallyDamped):
    """The process, of which a simulation returns positions and momenta."""

    def readout(self, x: Tensor, clean: Any) -> Tensor:
        return x


def _fields(part: Any) -> dict[str, Any]:
    return {field.name: getattr(part, field.name) for field in fields(part)}


def _as_json(part: Any) -> dict[str, Any]:
    """A dataclass of numbers; of anything else the name, which a training's configuration shows."""
    values = _fields(part) if is_dataclass(part) else {}
    numbers = {name: value for name, value in values.items() if isinstance(value, float | int)}
    return {"class": type(part).__name__, **numbers}


def _describe(network: nn.Module) -> dict[str, Any]:
    if isinstance(network, ResidualMLP):
        return {"class": ResidualMLP.__name__, "args": network.args}
    return describe(network)
