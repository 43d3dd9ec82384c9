"""What the methods share that learn to restore from pairs: the network, the pairs, the training."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from fluvial.core.noise import KeyedNoise
from fluvial.core.operators.base import check_operator
from fluvial.core.protocols import LinearOperator, Noise, Objective, per_row
from fluvial.core.time import Times, Uniform
from fluvial.data.format import Format
from fluvial.data.images import to_uint8
from fluvial.inverse.system_embedded_bridge.process import Deviation, scaled_noise
from fluvial.networks import describe
from fluvial.training.batches import Batches
from fluvial.training.loop import train
from fluvial.training.stage import Stage, Training
from fluvial.training.use import IntendedUse, derive

Loss: TypeAlias = Literal["absolute", "squared"]
OFF = 1e-3
"""How far from a projector A^+ A may be, relatively, in single precision and by iterations."""


class Systems(Protocol):
    """Draws the systems of a batch, such as a mask for every row.

    ``like`` is (batch, *event). The operator must have one map for all rows, or as many as rows.
    """

    def __call__(self, like: Tensor, noise: Noise) -> LinearOperator: ...


Simulate: TypeAlias = Callable[[Tensor, Tensor, LinearOperator, Noise], Tensor]
"""(y, A^+ y, operator, noise) -> restored rows."""


class PairedRestorer(Objective):
    """A network D(x_t, A^+ y, t) trained on pairs of an event x_0 and its measurement y.

        D = c + network(cat(x_t - c, c), t),    c = A^+ y,    loss = mean |D - x_0|.

    The network has twice the channels of an event (the first dimension after the batch), of which
    the first half of its output counts. Sizes that its ``factor`` does not divide are padded by
    reflection, very small ones by their border. A subclass says what x_t is, and how a measurement
    is restored.

    Args:
        network: called as ``network(x, t)``, (batch, 2 channels, ...).
        loss: of D: absolute (the published one, which learns medians), or squared (means).
        format: how the user's data become numbers, and back; None for numbers as they are.

    Raises:
        ValueError: the network has not twice the channels of ``format``, or ``loss`` is unknown.
    """

    times: Times = Uniform()
    """Law of t in training."""
    intended: tuple[str, ...] = ("restoring measurements of data like those it was trained on",)

    def __init__(
        self, network: nn.Module, *, loss: Loss = "absolute", format: Format | None = None
    ) -> None:
        super().__init__()
        if loss not in ("absolute", "squared"):
            raise ValueError(f"loss must be absolute or squared, got {loss!r}")
        channels = getattr(network, "shape", (None,))[0]
        if channels is not None and channels % 2:
            raise ValueError(
                f"network must have twice the channels of an event, for x_t and A^+ y; it has "
                f"{channels}"
            )
        if format is not None and channels not in (None, 2 * format.shape[0]):
            raise ValueError(
                f"network must have twice the {format.shape[0]} channels of the format, got "
                f"{channels}"
            )
        self.network = network
        self.loss, self.format = loss, format
        self.operator: LinearOperator | Systems | None = None
        self.obs_noise: Deviation = 0.0
        self.use: IntendedUse | None = IntendedUse(intended=self.intended)

    # What a method adds

    @abstractmethod
    def noised(
        self, x0: Tensor, t: Tensor, operator: LinearOperator, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """(x_t, A^+ y) of clean ``x0`` at ``t`` (batch,)."""

    # The network

    def denoise(self, x: Tensor, c: Tensor, t: Tensor) -> Tensor:
        """D(x, c, t); t () or (batch,).

        Raises:
            ValueError: the network returns another shape.
        """
        inputs, time = torch.cat([x - c, c], 1), per_row(t, x)
        factor = int(getattr(self.network, "factor", 1))
        high, wide = (-n % factor for n in x.shape[-2:]) if x.ndim == 4 else (0, 0)
        if high or wide:
            mirrors = (
                high < x.shape[-2] and wide < x.shape[-1]
            )  # else there is too little to mirror
            mode = "reflect" if mirrors else "replicate"
            inputs = functional.pad(inputs, (0, wide, 0, high), mode=mode)
        out = self.network(inputs, time)[:, : x.shape[1]]
        if high or wide:
            out = out[..., : x.shape[-2], : x.shape[-1]]
        if out.shape != x.shape:
            raise ValueError(f"the network returned {tuple(out.shape)} for {tuple(x.shape)}")
        return c + out

    # Training

    def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
        """The loss of a batch of ``"x"``, (batch, *event), as the network sees it.

        Returns:
            ``loss``, (); ``error``, that of every row; ``t``, the times of the rows.

        Raises:
            ValueError: there is no operator yet.
        """
        x0 = batch["x"]
        operator = self._system(x0, noise)
        t = self.times(x0, noise)
        x, c = self.noised(x0, t, operator, noise)
        gap = self.denoise(x, c, t) - x0
        gap = gap.abs() if self.loss == "absolute" else gap.square()
        error = gap.flatten(1).mean(1)
        return {"loss": error.mean(), "error": error.detach(), "t": t}

    def _system(self, like: Tensor, noise: Noise) -> LinearOperator:
        if self.operator is None:
            raise ValueError("operator is not known yet: fit with one")
        if isinstance(self.operator, LinearOperator):
            return self.operator
        system = self.operator(like, noise)
        if not isinstance(system, LinearOperator):
            raise ValueError(f"operator must draw operators, got {type(system).__name__}")
        return system

    def _check_channels(self, name: str, event: Sequence[int]) -> None:
        channels = getattr(self.network, "shape", (2 * event[0],))[0]
        if channels != 2 * event[0]:
            raise ValueError(
                f"{name} has {event[0]} channels, and the network {channels}, which must be twice "
                "as many"
            )

    def fit(
        self,
        images: Tensor,
        operator: LinearOperator | Systems | None = None,
        *,
        obs_noise: Deviation | None = None,
        steps: int,
        validation: Tensor | None = None,
        out: str | Path | None = None,
        resume: bool = True,
        progress: bool = True,
        trackers: Sequence[str] = (),
        preview: Callable[[Path], None] | None = None,
        **training: Any,
    ) -> Self:
        """Train on measurements of ``images`` that are simulated as they are needed.

        Args:
            images: (rows, *event) clean events; in the user's units if there is a format (uint8
                images), else floating.
            operator: A, of one map for all rows; or a function that draws the systems of a batch
                (`Systems`), for masks or frequencies that differ. By default the one at hand.
            obs_noise: standard deviation of the measurement's noise, in the units of the network
                ([-1, 1] of images), or one for each of its numbers; by default the one at hand, 0
                at first.
            steps: optimiser steps.
            validation: clean events that are not trained on.
            out, resume, progress, trackers: see `fluvial.training.loop.train`.
            preview: see `fluvial.training.stage.Stage`.
            **training: other fields of `fluvial.training.stage.Training`. Published: batch 8, a
                learning rate of 1e-4 halved four times, betas (.9, .99).

        Raises:
            TypeError: images that are no tensor, or not of the type that is wanted; an operator
                that is none.
            ValueError: no rows, another shape, values that are not finite; no operator; one that
                does not take these events, or whose A^+ A is no orthogonal projector; a deviation
                that is negative or does not fit a measurement; and as
                `fluvial.training.loop.train`.
        """
        x = self._encoded("images", images)
        held = None if validation is None else {"x": self._encoded("validation", validation)}
        self._check_channels("a row of images", x.shape[1:])
        if not (operator is None or callable(operator) or isinstance(operator, LinearOperator)):
            raise TypeError(
                "operator must have A, A_adjoint and A_dagger, or draw what has, got "
                f"{type(operator).__name__}"
            )
        own = getattr(operator, "rows", 1)
        if own != 1:
            raise ValueError(
                f"operator must have one map for all rows, got one of {own} maps; a function of "
                "(like, noise) may draw one for every row of a batch"
            )
        before = self.operator, self.obs_noise
        self.operator = self.operator if operator is None else operator
        self.obs_noise = self.obs_noise if obs_noise is None else obs_noise
        try:
            like = x[: min(len(x), 4)]
            system = self._system(like, KeyedNoise(0))
            seen = _checked(system, like)
            _check_deviation(self.obs_noise, seen)
            rule = Training(steps=steps, **{"betas": (0.9, 0.99), **training})
            stage = Stage(self, {"x": x}, rule, held, preview)
            train(
                stage,
                out=None if out is None else Path(out),
                resume=resume,
                progress=progress,
                config={
                    "restorer": {
                        "network": describe(self.network),
                        **self._options(),
                        "operator": f"{type(system).__name__} {float(seen.double().norm()):.6g}",
                        "obs_noise": _described(self.obs_noise),
                        "images": Batches({"x": x}, 1, 0).fingerprint(),
                    }
                },
                trackers=trackers,
            )
        except (TypeError, ValueError):  # refused: the weights are still those of the system before
            self.operator, self.obs_noise = before
            raise
        if self.use is not None and self.use.system is not None:
            # the statement of the model in a file that this one was made of
            self.use = derive([self.use], intended=self.intended)
        return self.eval()

    def _options(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def _encoded(self, name: str, x: Tensor) -> Tensor:
        """Rows as the network sees them."""
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.ndim < 2 or not len(x):
            raise ValueError(f"{name} must have shape (rows, *event), got {tuple(x.shape)}")
        if self.format is not None:
            x = self.format.encode(x)
        elif not x.is_floating_point():
            raise TypeError(f"{name} must be floating for a model without a format, got {x.dtype}")
        if not bool(x.isfinite().all()):
            raise ValueError(f"{name} holds values that are not finite")
        return x.detach().to(next(self.parameters()))

    # Use

    @torch.no_grad()
    def measure(
        self,
        images: Tensor,
        operator: LinearOperator | None = None,
        *,
        obs_noise: Deviation | None = None,
        noise: Noise = KeyedNoise(0),
    ) -> Tensor:
        """y = A x + S^(1/2) n: measurements to try things on, as floating numbers.

        Args:
            images: (rows, *event), as for `fit`.
            operator, obs_noise: by default those of the training.
            noise: keyed noise.

        Raises:
            TypeError, ValueError: as `fit`.
        """
        x = self._encoded("images", images)
        y = self._operator(operator).A(x)
        std = self.obs_noise if obs_noise is None else obs_noise
        _check_deviation(std, y)
        return y + scaled_noise(std, noise.normal(y, "measurement"))

    def _operator(self, operator: LinearOperator | None) -> LinearOperator:
        if not (operator is None or isinstance(operator, LinearOperator)):
            raise TypeError(
                f"operator must have A, A_adjoint and A_dagger, got {type(operator).__name__}"
            )
        operator = operator if operator is not None else cast(Any, self.operator)
        if operator is None or not isinstance(operator, LinearOperator):
            why = "differs from batch to batch" if operator is not None else "is not known"
            raise ValueError(f"operator must be given, as that of the training {why}")
        return operator

    def _restored(
        self,
        measurement: Tensor,
        operator: LinearOperator | None,
        obs_noise: Deviation,
        noise: Noise,
        batch_size: int,
        progress: bool,
        simulate: Simulate,
        decode: bool = True,
    ) -> Tensor:
        """Rows of ``measurement`` restored by ``simulate``, in the units of the data if decoded."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        operator = self._operator(operator)
        event, weights = self._event(operator), next(self.parameters())
        self._check_channels("an event of operator", event)
        seen = _checked(operator, weights.new_zeros(max(getattr(operator, "rows", 1), 2), *event))
        y, single = self._measurement(measurement, operator, seen)
        if len(seen) != len(y) and getattr(operator, "rows", 1) != 1:
            raise ValueError(f"operator has maps of {len(seen)} rows, got {len(y)} measurements")
        if y.shape[1:] != seen.shape[1:]:
            raise ValueError(
                f"measurement must have shape {tuple(seen.shape[1:])}, with or without a batch "
                f"dimension, got {tuple(measurement.shape)}"
            )
        _check_deviation(obs_noise, seen)
        # rows that have maps of their own stay together
        size = batch_size if getattr(operator, "rows", 1) == 1 else len(y)
        was_training = self.training
        self.eval()
        parts = []
        try:
            starts = range(0, len(y), size)
            for start in tqdm(starts, desc="restoring", leave=False, disable=not progress):
                part = y[start : start + size]
                rows = torch.arange(start, start + len(part))
                c = operator.A_dagger(part)
                parts.append(simulate(part, c, operator, noise.rows(rows)))
        finally:
            self.train(was_training)
        x = torch.cat(parts)
        if decode and self.format is not None:
            # images may be of another size than in training
            x = to_uint8(x) if self.format.kind == "images" else self.format.decode(x)
        return x[0] if single else x

    def _event(self, operator: LinearOperator) -> tuple[int, ...]:
        shape = getattr(operator, "in_shape", None)
        if shape is None and self.format is not None:
            shape = self.format.shape
        if shape is None:
            shape = getattr(self.network, "shape", None)
            shape = shape and (shape[0] // 2, *shape[1:])
        if shape is None:
            raise ValueError("operator must say its in_shape, as the network does not")
        return tuple(shape)

    def _measurement(
        self, y: Tensor, operator: LinearOperator, seen: Tensor
    ) -> tuple[Tensor, bool]:
        """(rows as the network sees them, was it a single one?), where A makes such as ``seen``."""
        if not isinstance(y, Tensor):
            raise TypeError(f"measurement must be a tensor, got {type(y).__name__}")
        single = y.shape == seen.shape[1:]
        y = y[None] if single else y
        if y.ndim < 2 or not len(y):
            raise ValueError(f"measurement must have rows, got shape {tuple(y.shape)}")
        weights = next(self.parameters())
        if y.dtype == torch.uint8 and self.format is not None and self.format.kind == "images":
            # x / 127.5 - 1 goes with the operator if it takes constants to themselves, or to 0
            ones = operator.A(weights.new_ones(len(seen), *self._event(operator)))
            same = ((ones - 1).abs() < 1e-3) | (ones.abs() < 1e-3)
            if not bool(same.all()):
                raise ValueError(
                    f"measurement must be floating, as {type(operator).__name__} does not make "
                    "images of images; measure makes such numbers"
                )
            y = (y.float() / 127.5 - 1).to(ones)
        elif not y.is_floating_point():
            raise TypeError(f"measurement must be floating, got {y.dtype}")
        if not bool(y.isfinite().all()):
            raise ValueError("measurement holds values that are not finite")
        return y.to(weights), single


def _checked(operator: LinearOperator, like: Tensor) -> Tensor:
    """A of random events. `ValueError` where A^+ A is no projector, or A takes no such events."""
    shape = getattr(operator, "in_shape", None)
    if shape is not None and tuple(shape) != tuple(like.shape[1:]):
        raise ValueError(f"operator takes events of {tuple(shape)}, got {tuple(like.shape[1:])}")
    try:
        seen = operator.A(KeyedNoise(0).normal(like, "u"))
        if not seen.is_floating_point() or seen.ndim < 2 or len(seen) != len(like):
            raise ValueError(
                f"operator must make a row of real numbers of each row, got {tuple(seen.shape)} of "
                f"{seen.dtype} from {tuple(like.shape)}"
            )
        check_operator(operator, like, OFF)
    except RuntimeError as error:
        raise ValueError(
            f"operator fails on {len(like)} events of {tuple(like.shape[1:])} ({error}); it says "
            "by in_shape if it takes others, and by rows if each row has a map of its own"
        ) from error
    return seen


def _described(obs_noise: Deviation) -> str:
    """What tells one from another."""
    if not isinstance(obs_noise, Tensor):
        return repr(obs_noise)
    return Batches({"obs_noise": obs_noise[None].cpu()}, 1, 0).fingerprint()


def _check_deviation(obs_noise: Deviation, seen: Tensor) -> None:
    """`ValueError` unless it is one deviation or one for each number of a measurement."""
    if isinstance(obs_noise, Tensor):
        try:
            fits = torch.broadcast_shapes(obs_noise.shape, seen.shape) == seen.shape
        except RuntimeError:
            fits = False
        # the same for all rows, as these are computed in batches
        fits = fits and (obs_noise.ndim < seen.ndim or len(obs_noise) == 1)
        if not fits or not bool(((obs_noise >= 0) & obs_noise.isfinite()).all()):
            raise ValueError(
                f"obs_noise must be at least 0 and finite, one or (1, *{tuple(seen.shape[1:])}), "
                f"got {tuple(obs_noise.shape)}"
            )
    elif not 0 <= obs_noise < math.inf:
        raise ValueError(f"obs_noise must be at least 0 and finite, got {obs_noise}")
