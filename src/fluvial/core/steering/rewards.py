"""Gradients of a function of the clean prediction, such as a reward, as a change of it.

On a Gaussian path x = M x_0 + L eps the posterior covariance is a Jacobian (Tweedie's formula, of
second order),

    C_t = Cov[x_0 | x_t] = M^-1 L L^T (d x_hat / d x)^T,      x_hat(x) = E[x_0 | x_t = x],

so tilting p(x_t) by exp(f(x_hat)) moves the clean prediction by C_t grad f(x_hat): one product with
a vector, one backward pass through the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fluvial.core.gaussian.fields import ends, predict
from fluvial.core.protocols import Field, GaussianPath, Run, State, Steering, left_broadcast
from fluvial.core.scales import Scalar

WITHOUT_GRADIENT = (
    "this steering needs a field that can be differentiated in x, got a value without a gradient "
    "(torch.inference_mode takes it away, torch.no_grad does not)"
)


class Differentiable:
    """A field that keeps the graph of its last call, so that steering need not call it again.

    Its value carries no gradient: what is simulated is not differentiated through.
    """

    def __init__(self, field: Field) -> None:
        self.field = field
        self.last: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    @property
    def predicts(self) -> str:
        return self.field.predicts

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        self.last = None  # free the graph before the next one grows
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value: Tensor = self.field(leaf, t, **cond)
        self.last = x, t, leaf, value
        return value.detach()


class GradientSteering(Steering):
    """Steering that differentiates the clean prediction with respect to the state."""

    def bend(self, field: Field) -> Field:
        return Differentiable(field)


def clean_and_covariance(
    x: Tensor, run: Run, std: float
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(x_hat, v -> C_t v) at (x, run.t), x_hat with the graph that leads to x.

    Uses the graph of the sampler's own call if the field is `Differentiable` and was called at x
    last, or else calls the field. Where M is 0 nothing is known of x_0, and C_t is std^2 I.

    Raises:
        ValueError: the field cannot be differentiated.
    """
    path = cast(GaussianPath, run.path)
    field = run.field.field if isinstance(run.field, Differentiable) else run.field
    last = run.field.last if isinstance(run.field, Differentiable) else None
    with torch.enable_grad():
        if last and last[0] is x and last[1] is run.t and field.predicts != "mean_velocity":
            kind, leaf, value = field.predicts, last[2], last[3]
        else:
            leaf = x.detach().requires_grad_()
            kind, value = predict(field, leaf, run.t, **run.cond)
        if not value.requires_grad:
            raise ValueError(WITHOUT_GRADIENT)
        clean, _ = ends(kind, value, leaf, run.t, path, **run.cond)
    scale, level = path.marginal(run.t, **run.cond)

    def covariance(v: Tensor) -> Tensor:
        if isinstance(scale, Scalar) and scale.value == 0:
            return std**2 * v
        (pulled,) = torch.autograd.grad(clean, leaf, v, retain_graph=True)
        return scale.solve(level @ (level.T @ pulled))

    return clean, covariance


def isotropic_variance(run: Run, std: float) -> Tensor:
    """r_t^2 = std^2 sigma^2 / (alpha^2 std^2 + sigma^2): C_t = r_t^2 I for data N(mean, std^2 I).

    A float64 scalar on the host.

    Raises:
        TypeError: the path's scales are not scalars.
    """
    scale, level = cast(GaussianPath, run.path).marginal(run.t, **run.cond)
    if not (isinstance(scale, Scalar) and isinstance(level, Scalar)):
        raise TypeError(
            f"this steering needs a path with scalar coefficients, got {type(run.path).__name__}"
        )
    signal, noise = (scale.value * std).square(), level.value.square()
    return std**2 * noise / (signal + noise)


@dataclass
class RewardGradient(GradientSteering):
    """x_hat <- x_hat + scale * C_t grad reward(x_hat): towards p(x_0) exp(scale * reward(x_0)).

    The tilted law itself if the data are Gaussian and the reward is linear; or else up to replacing
    E[exp(scale * reward(x_0)) | x_t] by its value at the mean x_hat.

    Args:
        reward: called as ``reward(x_0, **conditions)``, (batch,), differentiable; of one row each.
        scale: of the reward.
        through: ``"network"`` takes C_t from the field's Jacobian, one backward pass through it a
            step. ``"clean"`` takes C_t = r_t^2 I, the covariance under data N(mean, std^2 I),
            without a pass through the field.
        normalise: the shift gets the length scale * r_t sqrt(d), d the number of coordinates, that
            is, ``scale`` posterior standard deviations: for rewards whose size says nothing. It
            keeps the direction of the shift.
        std: standard deviation of the data about their mean, for r_t.

    Raises:
        ValueError: a ``scale`` that is not finite, an unknown ``through``, ``std`` not positive; in
            a call, a reward that is not (batch,), or a field or reward without gradient.

    Citation: Bansal et al., ICLR 2024 (gradients at the clean prediction); Chung et al., ICLR 2023
    (through the network); Yang et al., ICML 2024 (normalised).
    """

    reward: Callable[..., Tensor]
    scale: float = 1.0
    through: Literal["network", "clean"] = "network"
    normalise: bool = False
    std: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"scale must be finite, got {self.scale}")
        if self.through not in ("network", "clean"):
            raise ValueError(f"through must be 'network' or 'clean', got {self.through!r}")
        check_std(self.std)

    def bend(self, field: Field) -> Field:
        return super().bend(field) if self.through == "network" else field

    def clean(self, clean: State, x: State, aim: Any, run: Run) -> State:
        clean, x = cast(Tensor, clean), cast(Tensor, x)
        gradient = self._gradient(clean, run)
        if self.through == "network":
            shift = clean_and_covariance(x, run, self.std)[1](gradient)
        else:
            shift = isotropic_variance(run, self.std) * gradient
        if self.normalise:
            length = shift.unsqueeze(1).flatten(1).norm(dim=1)
            wanted = isotropic_variance(run, self.std).sqrt() * math.sqrt(math.prod(x.shape[1:]))
            ratio = torch.where(length > 0, wanted / length, 0).to(x)
            shift = left_broadcast(ratio, shift) * shift
        return clean + self.scale * shift

    def _gradient(self, clean: Tensor, run: Run) -> Tensor:
        with torch.enable_grad():
            leaf = clean.detach().requires_grad_()
            value = self.reward(leaf, **run.cond)
            if not isinstance(value, Tensor):
                raise TypeError(f"reward must give a tensor, got {type(value).__name__}")
            if value.shape != leaf.shape[:1] or not value.requires_grad:
                raise ValueError(
                    f"reward must be differentiable, ({len(leaf)},), got {tuple(value.shape)}"
                    f"{'' if value.requires_grad else ' without a gradient'}"
                )
            return torch.autograd.grad(value.sum(), leaf)[0]


def check_std(std: float) -> None:
    if not 0 < std < math.inf:
        raise ValueError(f"std must be positive and finite, got {std}")
