"""The score without a density, S = C times the score of X_t: exact, by quadrature, or learned.

X_t = sqrt(1 - t) X_0 + sqrt(t) C^(1/2) Z is the Ornstein-Uhlenbeck process of the paper at its time
tau = -log(1 - t), on the clock on which the data are X_0 and X_1 is noise. In function space no law
has a density, and S is defined by the clean prediction,

    S(x, t) = -(x - sqrt(1 - t) E[X_0 | X_t = x]) / t.

Priors here are fields that predict this ``"drift"``, the one of the Langevin equation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fluvial.core.gaussian.linear import CustomClock, OrnsteinUhlenbeck
from fluvial.core.protocols import Field, left_broadcast
from fluvial.core.scales import Diagonal, Scalar
from fluvial.inverse.function_space_langevin.theory import (
    check_covariance,
    check_positive,
)

SHARP, REACH, NODES = 8.0, 9.0, 257
"""Of the table of a learned score: see `LearnedDrift`."""
CHUNK = 1 << 18
"""Numbers that a network is tabulated for at once."""

Potential = Callable[[Tensor], Tensor]
"""phi of coefficients (batch, J, nodes), elementwise; a number a mode has the shape (J, 1)."""


def coloured_path(cov_noise: Tensor) -> OrnsteinUhlenbeck:
    """x_t = sqrt(1 - t) x_0 + sqrt(t) C^(1/2) z with a diagonal C, (J,)."""
    clock = CustomClock(lambda t: -torch.log1p(-t))
    return OrnsteinUhlenbeck(
        Scalar(torch.tensor(-0.5, dtype=torch.float64)), Diagonal(cov_noise.double()[None]), clock
    )


class GaussianPrior:
    """S of X_0 ~ N(0, diag(variance)): -C ((1 - t) diag(variance) + t C)^-1 x.

    Args:
        variance: (J,).
        cov_noise: C, (J,) or (J, J).

    Raises:
        ValueError: a variance or C is not positive.
    """

    predicts = "drift"
    diagonal: bool
    linear = True

    def __init__(self, variance: Tensor, cov_noise: Tensor) -> None:
        self.variance = check_positive("variance", variance)
        self.cov = check_covariance(cov_noise, len(self.variance))
        self.diagonal = self.cov.ndim == 1
        # a chain stays at one t, and asks for this at every step
        self._pull = functools.lru_cache(1)(self._pull_at)

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        pull = self._pull(float(t), x.dtype, x.device)
        return -pull * x if self.diagonal else -x @ pull.mT

    def _pull_at(self, t: float, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.diagonal:
            pull = self.cov / ((1 - t) * self.variance + t * self.cov)
        else:
            smoothed = (1 - t) * torch.diag(self.variance) + t * self.cov
            root = self.variance.rsqrt()  # to equal size, for the digits of the small ones
            solved = torch.linalg.solve(root[:, None] * smoothed * root, root[:, None] * self.cov)
            pull = (root[:, None] * solved).mT
        return pull.to(device, dtype)


class ProductPrior:
    """S of a prior of independent modes with the density exp(-phi_j) against N(0, variance_j).

        S_j(x) = -C_j phit_j'(x) - s_j x,    phit_j(x) = -log E[exp(-phi_j(X_0)) | X_t = x],

    s_j = C_j / v_j, v_j = (1 - t) variance_j + t C_j, and X_0 given X_t = x normal with the mean
    sqrt(1 - t) variance_j x / v_j and the variance variance_j t C_j / v_j, by Gauss and Hermite's
    rule: exact to rounding for a smooth phi that does not vary much over a few of its deviations.

    Args:
        variance: (J,) of the Gaussian.
        cov_noise: C, (J,).
        potential: phi, differentiable by torch; see `Potential`.
        nodes: of the rule.

    Raises:
        ValueError: a variance or C is not positive, C a matrix, ``nodes`` below 1.
    """

    predicts = "drift"
    diagonal = True
    linear = False

    def __init__(
        self, variance: Tensor, cov_noise: Tensor, potential: Potential, nodes: int = 64
    ) -> None:
        self.variance = check_positive("variance", variance)
        self.cov = check_covariance(cov_noise, len(self.variance))
        if self.cov.ndim != 1:
            raise ValueError("cov_noise must be diagonal, (J,), for a prior that is not Gaussian")
        if nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {nodes}")
        self.potential = potential
        points, weights = np.polynomial.hermite_e.hermegauss(nodes)
        self.points = torch.from_numpy(points)
        # the weights of far points underflow
        with np.errstate(divide="ignore"):
            self.log_weights = torch.from_numpy(np.log(weights))

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        t = float(t)  # type: ignore[assignment]
        smoothed = (1 - t) * self.variance + t * self.cov
        slope = math.sqrt(1 - t) * self.variance / smoothed
        spread = (self.variance * t * self.cov / smoothed).sqrt()
        steps = (spread[:, None] * self.points).to(x)
        with torch.enable_grad():
            mean = (slope.to(x) * x).detach().requires_grad_()
            logs = self.log_weights.to(x) - self.potential(mean[..., None] + steps)
            (gradient,) = torch.autograd.grad(logs.logsumexp(-1).sum(), mean)
        return (self.cov * slope).to(x) * gradient - (self.cov / smoothed).to(x) * x


class LearnedPrior(nn.Module):
    """S of a network: of eps, the white noise in x_t, by S = -(C / t)^(1/2) eps.

    Mode by mode x_t is a one-dimensional diffusion of its own time t_j = t C_j / v_j, v_j =
    (1 - t) variance_j + t C_j. With xh = x / v^(1/2) the whitened state, the network g corrects the
    Gaussian score of the same variances,

        eps = t_j^(1/2) (xh + g(xh, time)),    S = -C v^(-1/2) (xh + g),

    so one that starts at 0 starts there, nothing diverges at t = 0, and the squared error of eps is
    that of S over t_j C: the loss weighted as it should be, by t and mode by mode by 1 / C. A
    network of independent modes (``network.independent``) is told the time t_j of each, all that
    its law depends on; any other gets t.

    Args:
        network: called as ``network(xh, time)`` with xh (batch, J) in the dtype of its weights.
        variance, cov_noise: (J,).
    """

    predicts = "drift"
    linear = False
    variance: Tensor
    cov: Tensor

    def __init__(self, network: nn.Module, variance: Tensor, cov_noise: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("variance", variance, persistent=False)
        self.register_buffer("cov", cov_noise, persistent=False)

    @property
    def diagonal(self) -> bool:
        """Are the modes independent?"""
        return bool(getattr(self.network, "independent", False))

    def whitened(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(xh + g, v, t_j), the last two (1 or batch, J) in float64."""
        t = left_broadcast(t.double(), x) if t.ndim else t.double().reshape(1, 1).to(x.device)
        smoothed = (1 - t) * self.variance + t * self.cov
        time = t * self.cov / smoothed
        dtype = next(self.network.parameters()).dtype
        white = (x / smoothed.sqrt()).to(dtype)
        told = time if self.diagonal else t[:, 0].expand(len(x))
        return white + self.network(white, told.to(dtype)), smoothed, time

    def forward(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        """eps of (batch, J): what is trained."""
        score, _, time = self.whitened(x, t)
        return time.sqrt().to(score) * score

    def drift(self, x: Tensor, t: Tensor) -> Tensor:
        """S, in the dtype of ``x``."""
        score, smoothed, _ = self.whitened(x, t)
        return -(self.cov / smoothed.sqrt()).to(x) * score.to(x)


class LearnedDrift:
    """A `LearnedPrior` as the field S, for chains, which stay at one t.

    Where modes are independent, g is one function of one number for each mode, and is tabulated at
    the first call: `NODES` values of asinh(8 xh) in [-9, 9], with straight lines between them and
    constants outside. A step then costs as much as one of a Gaussian prior. Where gradients are
    asked for, the network is called.
    """

    predicts = "drift"
    linear = False

    def __init__(self, prior: LearnedPrior) -> None:
        self.prior = prior
        self._table = functools.lru_cache(1)(self._tabulate)

    @property
    def diagonal(self) -> bool:
        return self.prior.diagonal

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        if t.ndim or not self.diagonal or torch.is_grad_enabled():
            return self.prior.drift(x, t)
        values, slopes, root, front = self._table(float(t), x.dtype, x.device)
        white = x / root
        place = (torch.asinh(SHARP * white) + REACH).mul_((NODES - 1) / (2 * REACH))
        place = place.nan_to_num_(0.0).clamp_(0, NODES - 1)
        left = place.long().clamp_(max=NODES - 2)
        rest = place.sub_(left)
        left += torch.arange(x.shape[1], device=x.device) * NODES
        g = torch.addcmul(values.take(left), slopes.take(left), rest)
        return (white + g).mul_(front)

    def _tabulate(
        self, t: float, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(values, their differences, v^(1/2), -C v^(-1/2)), the first two (J * NODES,)."""
        prior, count = self.prior, len(self.prior.variance)
        nodes = torch.sinh(torch.linspace(-REACH, REACH, NODES, dtype=torch.float64)) / SHARP
        own = next(prior.network.parameters())
        time = torch.tensor(t, dtype=torch.float64, device=own.device)
        root = ((1 - t) * prior.variance + t * prior.cov).sqrt()
        rows = max(1, CHUNK // count)
        parts = []
        for part in nodes.to(own.device).split(rows):
            white = part[:, None].expand(-1, count)
            parts.append(prior.whitened(white * root, time)[0] - white.to(own.dtype))
        values = torch.cat(parts).mT.to(device, dtype)
        slopes = torch.nn.functional.pad(values.diff(dim=1), (0, 1))
        return (
            values.flatten(),
            slopes.flatten(),
            root.to(device, dtype),
            -(prior.cov / root).to(device, dtype),
        )


@dataclass(frozen=True, eq=False)
class ScoreError:
    """A prior whose score errs by S - S_theta = ``slope`` X + ``bias``, mode by mode.

    Args:
        prior: a field that predicts S.
        slope, bias: (J,), or numbers.
    """

    prior: Field
    slope: Tensor | float = 0.0
    bias: Tensor | float = 0.0
    predicts: str = "drift"

    @property
    def diagonal(self) -> bool:
        return bool(getattr(self.prior, "diagonal", False))

    @property
    def linear(self) -> bool:
        return bool(getattr(self.prior, "linear", False))

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        slope, bias = (torch.as_tensor(part).to(x) for part in (self.slope, self.bias))
        return cast(Tensor, self.prior(x, t, **cond)) - slope * x - bias


def clean_prediction(prior: Field, x: Tensor, t: Tensor) -> Tensor:
    """E[X_0 | X_t = x] = (x + t S) / sqrt(1 - t): the denoised function."""
    return (x + t * cast(Tensor, prior(x, t))) / math.sqrt(1 - float(t))


def regress_error(
    prior: Field, variance: Tensor, cov_noise: Tensor, x: Tensor, t: Tensor
) -> tuple[Tensor, Tensor]:
    """(slope, bias) of a learned prior, (J,) each: S - S_theta regressed on X, mode by mode.

    S is that of the Gaussian with the same variances; what is not Gaussian in the functions counts
    as an error, as the theory wants it.

    Args:
        prior: a field that predicts S_theta.
        variance, cov_noise: (J,).
        x: draws of X_t, (batch, J).
        t: of them.
    """
    error = GaussianPrior(variance, cov_noise)(x, t) - cast(Tensor, prior(x, t))
    centred = x - x.mean(0)
    slope = (centred * error).sum(0) / centred.square().sum(0)
    return slope, error.mean(0) - slope * x.mean(0)
