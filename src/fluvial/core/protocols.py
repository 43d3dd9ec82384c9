"""The parts every method is made of, as protocols.

Generation is transport. A *path* says how data becomes noise, a *field* is learned along it by
minimising an *objective*, a *sampler* simulates the field back, and *steering* bends the
simulation. A method is a choice of these parts; nothing here knows any method.

Conventions, the same in every public signature:

* time ``t`` lies in [0, 1]; ``t = 0`` is data, ``t = 1`` the source (noise);
* arguments come as ``(x, t)``; ``t`` has shape ``()`` or ``(batch,)`` and broadcasts from the left;
* every velocity and drift is d/dt with ``t`` increasing; a step uses the signed ``s - t``;
* dimension 0 of every tensor of a state is the batch, and never means anything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

State: TypeAlias = Tensor | Mapping[str, Tensor]
"""A tensor or a mapping of tensors, batch first. Ragged events: padding and a leaf ``"mask"``."""

# What a part receives is typed Any where it may accept tensors alone, or a mapping of its own.

Kind: TypeAlias = Literal["clean", "noise", "velocity", "score", "drift", "mean_velocity", "cavity"]
"""What a field predicts. Where the state is made of tokens, ``"clean"`` means probabilities of each
given the whole state, ``"cavity"`` given all of it but the token itself, and ``"score"`` ratios."""


def leaves(x: State) -> list[Tensor]:
    """The tensors of a state, in a fixed order."""
    return [x] if isinstance(x, Tensor) else [x[key] for key in sorted(x)]


def batch_size(x: State) -> int:
    """The common size of dimension 0; `ValueError` where leaves disagree or are none."""
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves(x)}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            f"a state needs one batch dimension in front of every leaf, got sizes {sizes}"
        )
    return int(sizes.pop())  # type: ignore[arg-type]


def take(x: Any, rows: Tensor) -> Any:
    """Rows of a state, of a memory (any nesting of mappings, tuples and lists), or of ``None``."""
    if isinstance(x, Tensor):
        return x[rows] if x.ndim else x
    if isinstance(x, Mapping):
        return {key: take(value, rows) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(take(value, rows) for value in x)
    return x


def left_broadcast(t: Tensor, x: Tensor) -> Tensor:
    """``t`` of shape () or (batch,), shaped to multiply ``x`` of shape (batch, *event)."""
    return t.reshape(t.shape + (1,) * (x.ndim - t.ndim)) if t.ndim else t


def per_row(t: Tensor, x: Tensor) -> Tensor:
    """``t`` as (batch,) in the dtype and on the device of ``x``, as networks want it.

    Raises:
        ValueError: its shape is neither () nor (batch,).
    """
    if t.shape not in ((), x.shape[:1]):
        raise ValueError(f"a time must have shape () or ({len(x)},), got {tuple(t.shape)}")
    return t.to(x.device, x.dtype).expand(x.shape[0])


def class_per_row(label: Tensor, x: Tensor) -> Tensor:
    """``label`` as (batch,) int64 on the device of ``x``, as tables of classes want it.

    Raises:
        TypeError: it is no tensor of integers.
        ValueError: its shape is neither () nor (batch,).
    """
    if not isinstance(label, Tensor) or label.dtype == torch.bool or label.is_floating_point():
        got = label.dtype if isinstance(label, Tensor) else type(label).__name__
        raise TypeError(f"label must be a tensor of integers, got {got}")
    if label.shape not in ((), x.shape[:1]):
        raise ValueError(f"label must have shape () or ({len(x)},), got {tuple(label.shape)}")
    return label.to(x.device, torch.int64).expand(len(x))


class Noise(Protocol):
    """A seed, not a stream: row ``i`` of a draw depends on (seed, row id, step, tag) only.

    Two draws of one step are independent if they differ in ``tag`` or in the kind of draw, and
    identical otherwise.
    """

    def normal(self, like: Tensor, tag: str = "") -> Tensor: ...
    def uniform(self, like: Tensor, tag: str = "") -> Tensor: ...
    def categorical(self, probs: Tensor, tag: str = "") -> Tensor: ...
    def at(self, step: int) -> Noise:
        """The noise of one step. Steps nest: ``noise.at(3).at(5)`` is not ``noise.at(5)``."""
        ...

    def rows(self, ids: Tensor) -> Noise:
        """The same noise for the rows ``ids`` (batch,): a split batch, a rank, modes of a basis."""
        ...


@runtime_checkable
class Scale(Protocol):
    """A linear map on states: scalar, diagonal, 2x2 block, spectral, range/null split.

    ``S @ x`` takes (batch, *event) to (batch, *event); ``S.solve`` is its (pseudo-)inverse,
    ``S.T`` its adjoint and ``S.logdet(x)`` log |det| of the map on one event of ``x``, (batch,).
    ``S @ other`` composes two scales of a kind.
    """

    @property
    def T(self) -> Scale: ...
    def __matmul__(self, x: Any) -> Any: ...
    def solve(self, x: Tensor) -> Tensor: ...
    def logdet(self, x: Tensor) -> Tensor: ...


@runtime_checkable
class LinearOperator(Protocol):
    """A linear map of rows, (batch, *event) to (batch, *measurement): what is measured of a state.

    Its adjoint and its pseudo-inverse (Moore and Penrose's) go back. Rows may have maps of their
    own. `fluvial.core.operators` has many; any object with these three methods serves.
    """

    def A(self, x: Tensor) -> Tensor: ...
    def A_adjoint(self, y: Tensor) -> Tensor: ...
    def A_dagger(self, y: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Draw:
    """A training sample of a path: ``x`` at ``t`` with the ends it came from.

    ``target(kind)`` is what a field of that kind should predict here; a path refuses a kind it
    does not have with a `ValueError` that lists those it has.
    """

    x: State
    x0: State
    x1: State | None
    t: Tensor
    target: Callable[[str], State]


class Path(Protocol):
    """How data becomes noise. ``t`` and ``s``: () or (batch,), in [0, 1], ``s <= t``.

    ``cond`` carries what a path may need per call: an operator, a mask, a label, levels.
    """

    def source(self, like: Any, noise: Noise, **cond: Any) -> State:
        """x_1: a draw of the source, shaped as ``like``."""
        ...

    def sample(self, x0: Any, t: Tensor, noise: Noise, x1: Any = None, **cond: Any) -> Draw:
        """A draw of q(x_t | x_0[, x_1])."""
        ...

    def posterior(
        self, x: Any, clean: Any, t: Tensor, s: Tensor, noise: Noise, **cond: Any
    ) -> State:
        """A draw of q(x_s | x_t = x, x_0 = clean)."""
        ...

    def transition(self, x: Any, s: Tensor, t: Tensor, noise: Noise, **cond: Any) -> State:
        """A draw of q(x_t | x_s = x): restarts, correctors, encoding."""
        ...

    def readout(self, x: Any, clean: Any) -> State:
        """The sample, from the last state and the last clean prediction."""
        ...


@runtime_checkable
class GaussianPath(Path, Protocol):
    """A path with x_t = M x_0 + L eps, the law of dx = F x dt + G dW.

    ``marginal(t)`` = (M, L). ``rates(t)`` = (M', L') with L' a derivative of a square root of the
    covariance, so that the velocity of the flow is M' x_0 + L' eps. ``sde(t)`` = (F, G).
    Only ODE and SDE samplers and `convert` ask for these.
    """

    def marginal(self, t: Tensor, **cond: Any) -> tuple[Scale, Scale]: ...
    def rates(self, t: Tensor, **cond: Any) -> tuple[Scale, Scale]: ...
    def sde(self, t: Tensor, **cond: Any) -> tuple[Scale, Scale]: ...


class Field(Protocol):
    """A prediction at (x, t): learned, analytic or wrapped.

    Nothing may ask a field for ``.parameters()`` or ``.eval()``. A ``"mean_velocity"`` takes the
    end of the jump as ``s=``: u(x, t, s), with x_s = x + (s - t) u.
    """

    @property
    def predicts(self) -> str: ...
    def __call__(self, x: Any, t: Tensor, **cond: Any) -> Any: ...


class Objective(nn.Module, ABC):
    """What is minimised. Owns everything it trains and its target copies.

    ``forward(batch, noise)`` returns a mapping with ``"loss"``, a scalar, and terms to log:
    scalars, means over the rows of the batch, or (batch,), one value a row. With ``"t"`` (batch,),
    the times of the rows, those of one value a row are logged by time too.

    The rows of a batch may be spread over parts and processes: the loss of the whole must be the
    mean of the losses of its equal parts.
    """

    criterion: str = "loss"
    """The term by which weights are compared on validation data; smaller is better."""

    @abstractmethod
    def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> Mapping[str, Tensor]: ...

    def after_step(self) -> None:  # noqa: B027 (most objectives have nothing to do here)
        """Called once after every optimiser step: Polyak copies, running tables."""

    def finish(self, average: Mapping[str, Tensor]) -> None:
        """Called at the end of a training with the averaged weights, which are then the model's."""
        self.load_state_dict(average)


class Sampler(Protocol):
    """One pair (t, s): s < t generates, s > t encodes, s == t is a Markov-chain step."""

    def start(self, x: Any) -> Any:
        """The sampler's memory, batched: multistep history, a key-value cache. Rows may move."""
        ...

    def step(self, x: Any, memory: Any, run: Run) -> tuple[State, Any, State | None]:
        """(x_s, memory, clean prediction at t). Of a run that is not watched None may stand in the
        place of the prediction."""
        ...


class Steering:
    """Bends a simulation. Every hook defaults to doing nothing; override those you need.

    ``aim`` is the steering's own batched memory, made by `start`.
    """

    def start(self, x: State) -> Any:
        return {}

    def bend(self, field: Field) -> Field:
        """Another field: classifier-free guidance, reward and property gradients."""
        return field

    def clean(self, clean: State, x: State, aim: Any, run: Run) -> State:
        """Corrects the clean prediction: projection, infilling, posterior sampling.

        Returns ``clean`` itself, untouched, or a new state; never one changed in place.
        """
        return clean

    def after(self, x: State, clean: State, aim: Any, run: Run) -> tuple[State, Any, Tensor | None]:
        """(x, aim, kept). ``kept`` (batch,) are the row indices that survived a resampling, already
        applied to ``x`` and ``aim``; the sampler's memory and ``clean`` follow. They may only move
        rows within a group that shares its conditions. ``None``: no row moved."""
        return x, aim, None

    def end(self, x0: State, aim: Any) -> State:
        """The last word: an exact projection, the best particle."""
        return x0


@dataclass(slots=True)
class Run:
    """What a step may see. ``watched``: will anybody read the clean prediction it returns?"""

    path: Path
    field: Field
    noise: Noise
    k: int
    t: Tensor
    s: Tensor
    cond: Mapping[str, Any]
    steer: Steering
    aim: Any
    watched: bool = True

    def clean(self, clean: State, x: State) -> State:
        """The clean prediction, corrected by the steering. A sampler calls this on every one."""
        return self.steer.clean(clean, x, self.aim, self)
