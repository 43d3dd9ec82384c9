"""MeanFlow: one-step generation by learning the average velocity of a flow.

Geng, Deng, Bai, Kolter and He, "Mean Flows for One-step Generative Modeling", NeurIPS 2025,
arXiv 2505.13447; and its improvement, Geng et al., "Improved Mean Flows", CVPR 2026,
arXiv 2512.02012: ``MeanFlow(ContextTransformer(..., velocity_depth=8), tangent="head",
times=TimePairs(ratio=0.5), guidance=FreeGuidance())``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from fluvial.core.arguments import whole_number
from fluvial.core.gaussian.paths import Linear
from fluvial.core.protocols import (
    Noise,
    Objective,
    Run,
    Sampler,
    Steering,
    left_broadcast,
    per_row,
    take,
)
from fluvial.core.simulate import simulate
from fluvial.core.time import LogitNormal, Uniform, grid_pairs, uniform_grid
from fluvial.data.format import Format
from fluvial.networks import describe, rebuild
from fluvial.training.files import load_model, put_weights, save_model
from fluvial.training.loop import Stage, Training, train
from fluvial.training.processes import is_main
from fluvial.training.sharding import whole_state
from fluvial.training.use import IntendedUse, derive, read_use

PATH = Linear()
BLOCK = 1 << 24
"""Numbers looked at together when a whole data set is checked."""


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a share in [0, 1], got {value}")


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance learnt in training, so that a sample stays one call.

    For rows with t in ``interval`` the velocity to learn is v_g = omega v_c + (1 - omega - kappa)
    u(x_t, t, t | null) + kappa u(x_t, t, t | label); elsewhere v_g = v_c. At the fixed point this
    is the field guided with scale omega / (1 - kappa).

    Args:
        omega, kappa: the two knobs. Published: (1, 0.5) for B/2, (0.2, 0.92) for L/2 and XL/2.
        interval: times at which to guide.
        drop: share of rows whose label is replaced by the null label, and v_g by v_c.
    """

    omega: float = 1.0
    kappa: float = 0.5
    interval: tuple[float, float] = (0.0, 1.0)
    drop: float = 0.1

    def __post_init__(self) -> None:
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            raise ValueError(f"interval must satisfy 0 <= low <= high <= 1, got {self.interval}")
        if not 0 <= self.kappa < 1:
            raise ValueError(f"kappa must lie in [0, 1), got {self.kappa}")
        if not math.isfinite(self.omega):
            raise ValueError(f"omega must be finite, got {self.omega}")
        _check_share("drop", self.drop)

    @property
    def scale(self) -> float:
        """The effective guidance scale, omega / (1 - kappa)."""
        return self.omega / (1 - self.kappa)


@dataclass(frozen=True)
class FreeGuidance:
    """Guidance whose scale and interval are inputs of the network, free at sampling (iMF).

    In training omega in [1, omega_max] has density proportional to omega^-beta, t_min ~ U(0, 1/2)
    and t_max ~ U(1/2, 1); rows with r = t have the interval [0, 1]. The velocity to learn is
    v_g = v_c + (1 - 1 / omega) (v(. | label, omega) - v(. | null, 1)), with omega = 1 where t is
    outside the interval. Its fixed point is v_null + omega (v - v_null).
    """

    omega_max: float = 8.0
    beta: float = 1.0
    drop: float = 0.1

    def __post_init__(self) -> None:
        if not 1 < self.omega_max < math.inf:
            raise ValueError(f"omega_max must exceed 1, got {self.omega_max}")
        if not math.isfinite(self.beta):
            raise ValueError(f"beta must be finite, got {self.beta}")
        _check_share("drop", self.drop)

    def draw(self, like: Tensor, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
        """(omega, t_min, t_max), each (batch,)."""
        u = noise.uniform(like, "omega")
        if self.beta == 1:
            omega = self.omega_max**u
        else:
            power = 1 - self.beta
            omega = (1 + u * (self.omega_max**power - 1)) ** (1 / power)
        return (
            omega,
            Uniform(0.0, 0.5)(like, noise, "t_min"),
            Uniform(0.5, 1.0)(like, noise, "t_max"),
        )


@dataclass(frozen=True)
class TimePairs:
    """The law of the two times, r <= t.

    With ``r_law=None`` two draws of ``t_law`` are sorted, and r is set to t with probability
    1 - ratio (the paper). With an ``r_law`` of its own, r is set to t with probability 1 - ratio,
    and to min(r, t) otherwise (the authors' later CIFAR-10 setting: LogitNormal(-0.6, 1.6),
    LogitNormal(-4.0, 1.6), ratio 0.75).

    Args:
        t_law, r_law: laws of single times.
        ratio: share of rows drawn with r < t; 0 is flow matching.
    """

    t_law: LogitNormal | Uniform = LogitNormal(-0.4, 1.0)
    r_law: LogitNormal | Uniform | None = None
    ratio: float = 0.25

    def __post_init__(self) -> None:
        _check_share("ratio", self.ratio)

    def __call__(self, like: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """(t, r), each (batch,)."""
        t = self.t_law(like, noise, "t")
        if self.r_law is None:
            other = self.t_law(like, noise, "r")
            t, r = torch.maximum(t, other), torch.minimum(t, other)
        else:
            r = torch.minimum(self.r_law(like, noise, "r"), t)
        if self.ratio == 0:
            return t, t
        flow = noise.uniform(like.new_empty(like.shape[:1]), "flow") >= self.ratio
        return t, torch.where(flow, t, r)


class AverageVelocity:
    """x_s = x_t + (s - t) u(x_t, t, s): a jump, exact if u is the average velocity.

    The clean prediction is where the jump would end if it went on to 0, x_t - t u: the sample
    itself when s = 0. Steering that moves it turns the jump towards it.
    """

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor]:
        u = cast(Tensor, run.field(x, run.t, **{**run.cond, "s": run.s}))
        clean = x - run.t * u
        steered = cast(Tensor, run.clean(clean, x))
        if steered is not clean:
            u = (x - steered) / run.t
        return x + (run.s - run.t) * u, memory, steered


class MeanFlow(Objective):
    """Learns the average velocity u(x, t, r) of the linear path, and samples in one call.

    With v the marginal velocity of x_t = (1 - t) x_0 + t eps,

        (t - r) u(x_t, t, r) = integral of v(x_tau, tau) over tau from r to t,

    so x_r = x_t - (t - r) u exactly. Differentiating in t along the flow gives the identity that
    is trained on, u = v - (t - r) du/dt, with du/dt = v . grad_x u + d_t u one Jacobian-vector
    product:

        V = u_theta + (t - r) stopgrad(du_theta/dt),   delta = |V - v_g|^2 (a sum),
        loss = mean over rows of delta / stopgrad(delta + c)^p.

    The product is taken on rows with r < t only; the rest is flow matching. ``v_g`` is the
    conditional velocity eps - x_0, or its guided form (`Guidance`, `FreeGuidance`).

    Args:
        network: called as ``network(x, t, h=t - r, label=)``, differentiable in forward mode.
        times: law of (t, r). Default: the paper's for ImageNet.
        p, c: of the adaptive weight. ``p=0`` is the plain squared error. Defaults: ImageNet's;
            CIFAR-10's are 0.75 and 1e-3. delta sums over coordinates: read c against that.
        guidance: learnt in training; None for none. Needs labels.
        tangent: the velocity along which u is differentiated: ``"target"`` is v_g (MeanFlow),
            ``"boundary"`` the network's own u(x_t, t, t), ``"head"`` its velocity head, trained
            beside it by the same weighted error (both Improved Mean Flows, published with
            ``TimePairs(ratio=0.5)``).
        shape: of one event; taken from the network, ``format`` or the data if left out.
        format: how the user's data become numbers of the order of 1, and back; `fit` encodes with
            it, and it is saved with the model. None: the data are such numbers already, except that
            uint8 images get the format of images when they are fitted.

    Raises:
        ValueError: a network without the inputs that ``guidance`` or ``tangent`` needs; a network,
            ``shape`` and ``format`` that disagree.

    Citation: Geng et al., NeurIPS 2025, arXiv 2505.13447; iMF: CVPR 2026, arXiv 2512.02012.
    """

    criterion = "delta"
    intended: tuple[str, ...] = ("drawing new samples that resemble the training data",)
    out_of_scope: tuple[dict[str, str], ...] = ()

    def __init__(
        self,
        network: nn.Module,
        *,
        times: TimePairs = TimePairs(),  # noqa: B008 (frozen)
        p: float = 1.0,
        c: float = 1e-2,
        guidance: Guidance | FreeGuidance | None = None,
        tangent: Literal["target", "boundary", "head"] = "target",
        shape: Sequence[int] | None = None,
        format: Format | None = None,
    ) -> None:
        super().__init__()
        if tangent not in ("target", "boundary", "head"):
            raise ValueError(f"tangent must be 'target', 'boundary' or 'head', got {tangent!r}")
        if tangent == "head" and not getattr(network, "has_velocity_head", False):
            raise ValueError("tangent='head' needs a network with a velocity head")
        if not isinstance(guidance, Guidance | FreeGuidance | None):
            raise TypeError(f"guidance must be a Guidance or a FreeGuidance, got {guidance!r}")
        if not (0 <= p < math.inf and 0 < c < math.inf):
            raise ValueError(f"need p >= 0 and c > 0, both finite, got p={p}, c={c}")
        num_classes = getattr(network, "num_classes", None)
        if guidance is not None and not num_classes:
            raise ValueError(
                f"guidance needs a network with a positive num_classes, got {num_classes}: the "
                "label of that number means none"
            )
        if isinstance(guidance, FreeGuidance):
            missing = {"omega", "t_min", "t_max"} - set(
                inspect.signature(network.forward).parameters
            )
            if missing:
                raise ValueError(
                    f"FreeGuidance needs a network that takes {', '.join(sorted(missing))}"
                )
        self.network: Any = network  # nn.Module says too little of its attributes
        self.times, self.p, self.c = times, p, c
        self.guidance, self.tangent = guidance, tangent
        said = {
            "shape": shape,
            "network": getattr(network, "shape", None),
            "format": None if format is None else format.shape,
        }
        shapes = {
            name: tuple(int(size) for size in value)
            for name, value in said.items()
            if value is not None
        }
        if len(set(shapes.values())) > 1:
            raise ValueError(f"the shape of an event differs: {shapes}")
        self.shape: tuple[int, ...] | None = next(iter(shapes.values()), None)
        self.format = format
        self.use: IntendedUse | None = IntendedUse(intended=self.intended)

    # Training

    def forward(self, batch: Mapping[str, Tensor], noise: Noise) -> dict[str, Tensor]:
        x = batch["x"]
        if self.format is not None:
            x = self.format.encode(x).to(next(self.parameters()).dtype)
        label = batch.get("label")
        self._check(x, label, values=False)  # `fit` has looked at them, once
        return self._loss(x, label, noise)

    def loss(
        self,
        x0: Float[Tensor, "batch *event"],
        label: Int[Tensor, " batch"] | None = None,
        *,
        noise: Noise,
    ) -> dict[str, Tensor]:
        """The objective on one batch.

        Returns:
            ``loss``; ``delta``, |V - v_g|^2 of every row, and ``t``, their times; ``fm_error``, the
            mean of delta over the rows with r = t (the flow-matching error; NaN-free: 0 if there
            are none). With p = 1 the loss stays near 1 while samples improve: watch these.

        Raises:
            TypeError: ``x0`` is not floating or ``label`` not an integer tensor.
            ValueError: no rows, a label missing where guidance needs one, a wrong number of labels;
                on the CPU also a value that is not finite and a label out of range (elsewhere
                looking would wait for the device; `fit` looks at the data once).
        """
        self._check(x0, label, values=x0.device.type == "cpu")
        return self._loss(x0, label, noise)

    def _loss(self, x0: Tensor, label: Tensor | None, noise: Noise) -> dict[str, Tensor]:
        # the laws of single rows are drawn on the host: which rows need the product decides shapes
        host = torch.empty(len(x0), dtype=x0.dtype)
        t, r = self.times(host, noise)
        cond, dropped = self._conditions(label, t, r, noise)
        jump, flow = (r < t).nonzero().squeeze(1), (r >= t).nonzero().squeeze(1)
        t, r, jump, flow, dropped = (
            part.to(x0.device, non_blocking=True) for part in (t, r, jump, flow, dropped)
        )
        cond = {name: value.to(x0.device, non_blocking=True) for name, value in cond.items()}

        draw = PATH.sample(x0, t, noise)
        x, v_c = cast(Tensor, draw.x), cast(Tensor, draw.target("velocity"))
        target, along = self._velocities(x, t, v_c, cond, dropped)
        errors, head_errors = [], []
        if len(flow):
            parts = (x, t, target, cond)
            # flow matching alone needs no copies of its rows
            x_f, t_f, target_f, cond_f = take(parts, flow) if len(jump) else parts
            u, v = self._predict(x_f, t_f, torch.zeros_like(t_f), cond_f)
            errors.append(u - target_f)
            if self.tangent == "head":
                head_errors.append(v - target_f)
        if len(jump):
            u, v, du = self._derivative(*take((x, t, r, along, cond), jump))
            span = left_broadcast((t - r)[jump], u)
            errors.append(u + span * du - target[jump])
            if self.tangent == "head":
                head_errors.append(v - target[jump])
        delta = _squared(errors)
        loss = self._weighted(delta)
        if self.tangent == "head":
            loss = loss + self._weighted(_squared(head_errors))
        delta = delta.detach()
        fm_error = delta[: len(flow)].sum() / max(len(flow), 1)
        in_order = torch.empty_like(delta).index_copy_(0, torch.cat([flow, jump]), delta)
        return {"loss": loss, "delta": in_order, "t": t, "fm_error": fm_error}

    def _weighted(self, delta: Tensor) -> Tensor:
        return (delta / (delta.detach() + self.c) ** self.p).mean()

    def _conditions(
        self, label: Tensor | None, t: Tensor, r: Tensor, noise: Noise
    ) -> tuple[dict[str, Tensor], Tensor]:
        """(conditions of the network, rows whose label was dropped), drawn on the host."""
        dropped = torch.zeros(len(t), dtype=torch.bool)
        cond = {} if label is None else {"label": label}
        if label is not None and self.guidance is not None:
            dropped = noise.uniform(t, "drop") < self.guidance.drop
            mask = dropped.to(label.device, non_blocking=True)
            cond["label"] = label.masked_fill(mask, self.network.num_classes)
        if isinstance(self.guidance, FreeGuidance):
            omega, t_min, t_max = self.guidance.draw(t, noise)
            # rows with r = t, where velocities are learnt, are guided at every time
            cond["omega"] = omega
            cond["t_min"] = torch.where(r == t, 0.0, t_min)
            cond["t_max"] = torch.where(r == t, 1.0, t_max)
        return cond, dropped

    def _velocities(
        self, x: Tensor, t: Tensor, v_c: Tensor, cond: dict[str, Tensor], dropped: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(v_g, the velocity along which u is differentiated), both without gradient."""
        guidance = self.guidance
        target = own = null = v_c
        if self.tangent != "target" or self._guided_by_itself:
            own = self._velocity(x, t, cond)
        match guidance:
            case Guidance(omega=omega, kappa=kappa, interval=(low, high)):
                if omega + kappa != 1:
                    null = self._velocity(x, t, self._null(cond))
                guided = omega * v_c + (1 - omega - kappa) * null + kappa * own
                inside = (t >= low) & (t <= high) & ~dropped
                target = torch.where(left_broadcast(inside, x), guided, v_c)
            case FreeGuidance():
                null = self._velocity(x, t, self._null(cond))
                inside = (t >= cond["t_min"]) & (t <= cond["t_max"]) & ~dropped
                weight = torch.where(inside, 1 - 1 / cond["omega"], 0.0)
                target = v_c + left_broadcast(weight, x) * (own - null)
        return target, target if self.tangent == "target" else own

    @property
    def _guided_by_itself(self) -> bool:
        """Does v_g hold the network's own velocity under the row's label?"""
        guidance = self.guidance
        return guidance.kappa != 0 if isinstance(guidance, Guidance) else guidance is not None

    def _null(self, cond: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"label": torch.full_like(cond["label"], self.network.num_classes)}

    def _predict(
        self, x: Tensor, t: Tensor, h: Tensor, cond: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(average velocity, velocity of the second head, or the average velocity again)."""
        if self.tangent == "head":
            return self.network(x, t, h=h, velocity=True, **cond)
        u = self.network(x, t, h=h, **cond)
        if u.shape != x.shape:
            raise ValueError(f"the network returned {tuple(u.shape)} for x of {tuple(x.shape)}")
        return u, u

    @torch.no_grad()
    def _velocity(self, x: Tensor, t: Tensor, cond: dict[str, Tensor]) -> Tensor:
        return self._predict(x, t, torch.zeros_like(t), cond)[1]

    def _derivative(
        self, x: Tensor, t: Tensor, r: Tensor, along: Tensor, cond: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(u, v, du/dt) with du/dt the derivative along (dx, dt, dr) = (along, 1, 0), detached."""

        def average(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            return self._predict(x, t, t - r, cond)

        # the fused attention kernels have no forward-mode derivative
        with sdpa_kernel(SDPBackend.MATH):
            parts: Any = torch.func.jvp(average, (x, t), (along, torch.ones_like(t)), has_aux=True)
        u, du, v = parts
        return u, v, du.detach()

    def _check(self, x0: Tensor, label: Tensor | None, *, values: bool) -> None:
        if not isinstance(x0, Tensor):
            raise TypeError(f"x0 must be a tensor, got {type(x0).__name__}")
        if not x0.is_floating_point():
            raise TypeError(f"x0 must be floating (in fit also uint8), got {x0.dtype}")
        wanted = next((p.dtype for p in self.parameters()), x0.dtype)
        if x0.dtype != wanted:
            raise TypeError(f"x0 is {x0.dtype} and the network {wanted}; convert one of them")
        self._check_event(x0)
        if values and not bool(x0.isfinite().all()):
            raise ValueError("x0 holds values that are not finite")
        self._check_labels(label, len(x0), values=values)

    def _check_event(self, x0: Tensor) -> None:
        if x0.ndim < 2 or len(x0) == 0:
            raise ValueError(f"x0 needs rows and an event shape, got shape {tuple(x0.shape)}")
        if self.shape is not None and tuple(x0.shape[1:]) != self.shape:
            event = ", ".join(map(str, self.shape))
            raise ValueError(f"x0 must have shape (batch, {event}), got {tuple(x0.shape)}")

    def _check_labels(self, label: Tensor | None, rows: int, *, values: bool) -> None:
        if label is None:
            if self.guidance is not None:
                raise ValueError("label is missing, and guidance needs one for every row")
            return
        if not isinstance(label, Tensor):
            raise TypeError(f"label must be a tensor, got {type(label).__name__}")
        self._check_label(label, rows, values=values)

    def _check_label(self, label: Tensor, rows: int, *, values: bool) -> None:
        if label.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"label must be an integer tensor (int64 or int32), got {label.dtype}")
        if tuple(label.shape) != (rows,):
            raise ValueError(f"label must have shape ({rows},), got {tuple(label.shape)}")
        num_classes = getattr(self.network, "num_classes", None)
        if num_classes == 0:
            raise ValueError("label given, and the network has num_classes=0")
        if values and num_classes and rows:
            low, high = int(label.min()), int(label.max())
            if low < 0 or high >= num_classes:
                raise ValueError(f"label must lie in 0 .. {num_classes - 1}, got {low} .. {high}")

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
        trackers: Sequence[str] = (),
        preview: Callable[[Path], None] | None = None,
        **training: Any,
    ) -> Self:
        """Train on data, then hold the averaged weights.

        Args:
            x: (rows, *event), in the user's units if the model has a format; else floating and of
                the order of 1, or uint8 images. May be memory-mapped.
            label: (rows,) classes.
            steps: optimiser steps. A training that is resumed ends where it was going to end; with
                a constant learning rate it can be made longer.
            validation: (x, label) that are not trained on: measured now and then, and used to
                choose among the averages of the weights.
            out: folder for checkpoints, metrics and weights; see `fluvial.training.loop.train`.
            resume: go on from the latest checkpoint in ``out``, if there is one.
            progress: show a progress bar.
            trackers: see `fluvial.training.loop.train`.
            preview: see `fluvial.training.loop.Stage`.
            **training: other fields of `fluvial.training.loop.Training`. Its learning rate, 1e-4,
                is the paper's for ImageNet; small networks take ten times as much.

        Raises:
            As `loss`, for all rows at once and before any step; and as
            `fluvial.training.loop.train`, where the options of this model and those of the network
            count as configuration.
        """
        before = self.format
        if self.format is None and isinstance(x, Tensor) and x.dtype == torch.uint8:
            self._check_event(x)
            self.format = Format("images", tuple(x.shape[1:]))
        try:
            data = self._rows(x, label)
            held = None if validation is None else self._rows(*validation)
            # the shape may be learnt from the data, which have a fingerprint of their own
            config = {"network": describe(self.network), **self._options(), "shape": None}
            if self.format is not None:
                config["format"] = self.format.as_json()
            train(
                Stage(self, data, Training(steps=steps, **training), held, preview),
                out=None if out is None else Path(out),
                resume=resume,
                progress=progress,
                config=config,
                trackers=trackers,
            )
        except BaseException:
            self.format = before
            raise
        self.shape = tuple(x.shape[1:])
        if self.use is not None and self.use.system is not None:
            # the statement of the model in a file that this one was made of
            self.use = derive([self.use], intended=self.intended)
        return self.eval()

    def _rows(self, x: Tensor, label: Tensor | None) -> dict[str, Tensor]:
        """Data to train on, checked in blocks: they may be larger than the memory."""
        if self.format is None:
            self._check(x, label, values=False)
        else:
            self._check_event(x)
            self.format.encode(x[:1])
            self._check_labels(label, len(x), values=False)
        size = max(1, BLOCK // max(1, x[0].numel()))
        for start in range(0, len(x), size) if x.is_floating_point() else ():
            finite = x[start : start + size].flatten(1).isfinite().all(1)
            if not bool(finite.all()):
                row = start + int(finite.logical_not().nonzero()[0])
                raise ValueError(f"x0 holds values that are not finite, in row {row} first")
        self._check_labels(label, len(x), values=True)
        return {"x": x} if label is None else {"x": x, "label": label}

    # Sampling

    @property
    def field(self) -> AverageVelocityField:
        """u(x, t, s) as a field of kind ``"mean_velocity"``; at s = t it is the velocity."""
        return AverageVelocityField(self.network)

    @torch.no_grad()
    def average_velocity(
        self, x: Tensor, t: Tensor | float, s: Tensor | float, **cond: Any
    ) -> Tensor:
        """u(x, t, s), the mean of the velocity between s <= t; x_s = x - (t - s) u.

        Raises:
            ValueError: s > t, or a time outside [0, 1].
        """
        t, s = _number(t), _number(s)
        if not bool(((s >= 0) & (s <= t) & (t <= 1)).all()):
            raise ValueError(f"need 0 <= s <= t <= 1, got s={s.tolist()}, t={t.tolist()}")
        return self.field(x, t, s=s, **cond)

    @torch.no_grad()
    def sample(
        self,
        num: int,
        *,
        noise: Noise,
        sampler: Sampler | None = None,
        steps: int = 1,
        grid: Sequence[float] | None = None,
        label: int | str | Tensor | None = None,
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
            sampler: `AverageVelocity` by default, one network call a step; `Euler` and others
                integrate the velocity u(x, t, t).
            steps: equal steps from 1 to 0. More than four can be worse than fewer.
            grid: other times, falling from 1 to 0, in place of ``steps``.
            label: one class for all, by number or by the name it has in the format, or (num,); None
                samples without.
            x1: (num, *event) start to use in place of a draw of the source.
            steer: bends the simulation, `ClassifierFree` for instance.
            batch_size: rows at a time.
            progress: show a progress bar over batches.
            **cond: further inputs of the network, numbers or (num,): ``omega``, ``t_min`` and
                ``t_max`` of `FreeGuidance`.

        Raises:
            TypeError: a number that has to be whole is not.
            ValueError: the event's shape is not known yet, ``grid`` does not fall from 1 to 0,
                ``num`` is negative, another count not positive, labels out of range, the scale or
                interval of `FreeGuidance` is impossible, ``x1`` not finite, something that is
                given row by row in another number.
        """
        num, batch_size = whole_number("num", num), whole_number("batch_size", batch_size)
        if num < 0 or batch_size < 1:
            raise ValueError(f"need num >= 0 and batch_size >= 1, got {num} and {batch_size}")
        if self.shape is None:
            raise ValueError("the event's shape is unknown: fit first, or give shape=")
        pairs = uniform_grid(steps) if grid is None else grid_pairs(grid)
        if pairs[0, 0] != 1 or pairs[-1, 1] != 0 or not bool((pairs[:, 1] < pairs[:, 0]).all()):
            raise ValueError(f"grid must fall from 1 to 0, got {grid}")
        parameter = next(self.parameters())
        if isinstance(label, str):
            if self.format is None:
                raise ValueError(f"label {label!r}: the model knows no names of classes")
            label = self.format.label(label)
        if label is not None:
            label = torch.as_tensor(label)
            label = label.expand(num) if label.ndim == 0 else label
            self._check_label(label, num, values=True)
            cond["label"] = label
        cond = {name: _number(value).to(parameter.device) for name, value in cond.items()}
        for name, value in cond.items():
            if value.shape not in ((), (num,)):
                raise ValueError(
                    f"{name} must be a number or ({num},), got shape {tuple(value.shape)}"
                )
        if isinstance(self.guidance, FreeGuidance):
            omega = cond.get("omega", torch.ones(()))
            low, high = cond.get("t_min", torch.zeros(())), cond.get("t_max", torch.ones(()))
            if not bool(((omega >= 1) & omega.isfinite()).all()):
                raise ValueError(f"omega must be finite and at least 1, got {omega.tolist()}")
            if not bool(((low >= 0) & (low <= high) & (high <= 1)).all()):
                raise ValueError(
                    f"need 0 <= t_min <= t_max <= 1, got {low.tolist()} and {high.tolist()}"
                )
        if x1 is not None and tuple(x1.shape) != (num, *self.shape):
            raise ValueError(f"x1 must have shape {(num, *self.shape)}, got {tuple(x1.shape)}")
        if x1 is not None and not bool(x1.isfinite().all()):
            raise ValueError("x1 holds values that are not finite")

        simulated: Any = simulate  # whose parts take any state, and these only tensors
        was_training = self.training
        self.eval()
        result = parameter.new_empty(num, *self.shape)
        starts = range(0, num, batch_size)
        try:
            for start in tqdm(starts, desc="sampling", unit="batch", disable=not progress):
                rows = torch.arange(start, min(num, start + batch_size))
                part = noise.rows(rows)
                x = PATH.source(result[rows], part) if x1 is None else x1[rows].to(parameter)
                result[rows] = simulated(
                    x,
                    pairs,
                    AverageVelocity() if sampler is None else sampler,
                    PATH,
                    self.field,
                    part,
                    steer,
                    **take(cond, rows),
                )
        finally:
            self.train(was_training)
        return result

    # Files

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """One safetensors file: the weights, all that `load` needs, and the statement of use.

        Of several processes all have to call it, and the main one writes.
        """
        network = getattr(self.network, "_orig_mod", self.network)  # what torch.compile wrapped
        header = {
            "system": "meanflow",
            "network": describe(network),
            "options": self._options(),
            "data": None if self.format is None else self.format.as_json(),
        }
        use = self.use and self.use.for_system("meanflow", self.out_of_scope)
        weights = whole_state(network.state_dict())
        if is_main():
            save_model(path, weights, header, use=use, overwrite=overwrite)

    def _options(self) -> dict[str, Any]:
        """The arguments of the constructor, but the network."""
        return {
            "times": _encode(self.times),
            "p": self.p,
            "c": self.c,
            "guidance": _encode(self.guidance),
            "tangent": self.tangent,
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
            ValueError: not a MeanFlow, or the weights do not fit the network.
        """
        weights, header = load_model(path, "meanflow")
        network = rebuild(header["network"]) if network is None else network
        put_weights(network, weights, path)
        options = {name: _decode(value) for name, value in header["options"].items()}
        data = header.get("data")
        model = cls(network, format=data and Format.from_json(data), **options).eval()
        model.use = read_use(path)
        return model


@dataclass(frozen=True)
class AverageVelocityField:
    """A network of average velocities as a field: u(x, t, s) = network(x, t, h=t - s)."""

    network: nn.Module
    predicts: str = "mean_velocity"

    def __call__(self, x: Tensor, t: Tensor, *, s: Tensor, **cond: Any) -> Tensor:
        return self.network(x, per_row(t, x), h=per_row(t - s, x), **cond)


def _squared(errors: list[Tensor]) -> Tensor:
    """|error|^2 of every row."""
    return torch.cat([error.flatten(1).square().sum(1) for error in errors])


def _number(value: Any) -> Tensor:
    """A tensor as it is, other numbers without loss."""
    return value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))


_OPTIONS: dict[str, Any] = {
    kind.__name__: kind for kind in (Guidance, FreeGuidance, TimePairs, LogitNormal, Uniform)
}


def _encode(option: Any) -> Any:
    """A dataclass of `_OPTIONS` as JSON."""
    if not is_dataclass(option):
        return option
    return {
        "class": type(option).__name__,
        **{part.name: _encode(getattr(option, part.name)) for part in fields(option)},
    }


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict):
        return value
    arguments = {name: _decode(part) for name, part in value.items() if name != "class"}
    return _OPTIONS[value["class"]](**arguments)
