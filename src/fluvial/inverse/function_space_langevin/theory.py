"""Where the Langevin chain of a Gaussian prior goes, and how fast: closed forms, preconditioners.

Everything is in the coefficients of an orthonormal basis in which the prior covariance is diagonal.
Functions have the variances ``variance`` (J,) about their mean; N <= J modes are observed through
A, of which the Gram A^T A is what matters: ``gram``, (N,) if it is diagonal, else (N, N). The
Langevin equation

    dX = [S(X, t) + C A^T (y - A X) / obs_noise^2] dtau + sqrt(2 C) dW

has the preconditioner C = ``cov_noise``, (J,) if it is diagonal, else (J, J). C is also the
covariance of the noise that defines S, C times the score of sqrt(1 - t) X_0 + sqrt(t) C^(1/2) Z. A
learned score errs by S - S_theta = ``slope`` X + ``bias``, mode by mode.

Variances of smooth functions fall to 1e-193 and below: float64, and no formula here divides by one
of them alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

Preset: TypeAlias = Literal["identity", "prior", "posterior", "optimal"]

LARGEST = 4096
"""Modes up to which a matrix of all of them is formed."""
CLIP = 0.01
"""Least part of its value at t = 0 that an eigenvalue of the optimal preconditioner may have."""


def preconditioner(
    kind: Preset,
    variance: Tensor,
    gram: Tensor,
    obs_noise: float,
    *,
    t: float = 0.0,
    score_error: Tensor | float = 0.0,
    curvature: Tensor | float = 0.0,
) -> Tensor:
    """The covariance C of the noise, (J,), or (J, J) for the posterior with a Gram matrix.

    * ``"identity"``: 1, the plain Langevin equation. Not trace-class: its rates grow as
      1 / variance, and at t > 0 unobserved modes get the variance t each.
    * ``"prior"``: ``variance``. All unobserved modes have the rate 1.
    * ``"posterior"``: (1 / variance + G / obs_noise^2 + curvature)^-1. With a perfect score and
      t = 0 all modes have the rate 1.
    * ``"optimal"``: lambda_0 + tau lambda_1, the rate 1 to first order in tau = -log(1 - t) for a
      score with the slope ``score_error`` tau, where lambda_0 is the posterior's and
      lambda_1 = lambda_0^3 / variance^2 - lambda_0^2 / variance - score_error lambda_0. Where that
      would fall below 0.01 lambda_0 it is set to it: the expansion has ended there.

    Args:
        kind: which.
        variance: (J,) of the prior.
        gram: (N,) or (N, N), N <= J.
        obs_noise: standard deviation of the measurement noise.
        t: at which the chain will run; for ``"optimal"``.
        score_error: () or (J,), the slope of the error over tau; for ``"optimal"``.
        curvature: () or (J,), a lower bound of phi_j'' where the prior has the density
            exp(-sum_j phi_j) against the Gaussian; for ``"posterior"``.

    Raises:
        ValueError: a kind unknown, an argument that the kind does not use, a variance or the result
            not positive, a matrix for ``"optimal"`` or for more than 4,096 modes.
    """
    variance = check_positive("variance", variance)
    size = len(variance)
    gram = check_gram(gram, size)
    check_obs_noise(obs_noise)
    tau = -math.log1p(-_check_t(t))
    if kind not in get_args(Preset):
        raise ValueError(f"kind must be one of {', '.join(get_args(Preset))}, got {kind!r}")
    error, bend = (
        _modes(name, value, size, variance)
        for name, value in (("score_error", score_error), ("curvature", curvature))
    )
    if kind != "optimal" and bool(error.any()):
        raise ValueError(f"score_error is for kind='optimal', got it with {kind!r}")
    if kind != "posterior" and bool(bend.any()):
        raise ValueError(f"curvature is for kind='posterior', got it with {kind!r}")
    match kind:
        case "identity":
            return torch.ones_like(variance)
        case "prior":
            return variance.clone()
    if gram.ndim == 2:
        if kind == "optimal":
            raise ValueError("kind='optimal' needs a diagonal Gram, (N,), got a matrix")
        _check_size(size)
        root = variance.sqrt()
        inner = torch.diag(1 + bend * variance)
        inner[: len(gram), : len(gram)] += _scaled(gram, root) / obs_noise**2
        return _scaled(_inverse_spd("posterior precision", inner), root)
    ratio = 1 + variance * (_padded(gram, size) / obs_noise**2 + bend)
    if not bool((ratio > 0).all()):
        raise ValueError(
            f"curvature makes the posterior precision negative in mode {int(ratio.argmin())}"
        )
    if kind == "posterior":
        return variance / ratio
    growth = tau * (ratio**-2 - 1 / ratio - error)
    return variance / ratio * (1 + growth).clamp(min=CLIP)


class Principal(NamedTuple):
    """The modes in which a linear Langevin equation falls apart: X = frame z.

    Attributes:
        frame: W with W W^T = C; (J, J), or the (J,) diagonal of one.
        rates: kappa (J,), dz = -kappa (z - m) dtau + sqrt(2) dW in each.
    """

    frame: Tensor
    rates: Tensor

    def whiten(self, x: Tensor) -> Tensor:
        """W^-1 x of rows (batch, J)."""
        if self.frame.ndim == 1:
            return x / self.frame
        return torch.linalg.solve(self.frame, x.mT).mT

    def colour(self, z: Tensor) -> Tensor:
        """W z of rows (batch, J)."""
        return z * self.frame if self.frame.ndim == 1 else z @ self.frame.mT


def principal(
    variance: Tensor,
    cov_noise: Tensor,
    gram: Tensor,
    obs_noise: float,
    t: float = 0.0,
    slope: Tensor | float = 0.0,
) -> Principal:
    """The independent modes of the chain and their rates of mean reversion.

    The drift is -B (X - m) with B = diag(s + slope) + C G / obs_noise^2 and, for a diagonal C,
    s = C / ((1 - t) variance + t C); W^-1 B W is symmetric, and its eigenvalues are the rates. With
    all matrices diagonal W = C^(1/2) and

        kappa_j = C_j / ((1 - t) variance_j + t C_j) + C_j G_j / obs_noise^2 + slope_j.

    Args:
        variance, cov_noise, gram, obs_noise, slope: see above.
        t: of the score.

    Raises:
        ValueError: shapes that do not fit; a slope for a C that is a matrix; a rate that is not
            positive: that mode would run away. An unobserved one has the rate s + slope.
    """
    variance = check_positive("variance", variance)
    size = len(variance)
    gram = check_gram(gram, size)
    precision = gram / check_obs_noise(obs_noise) ** 2
    t = _check_t(t)
    slope = _modes("slope", slope, size, variance)
    cov = check_covariance(cov_noise, size)
    if cov.ndim == 2:
        if bool(slope.any()):
            raise ValueError("slope needs a diagonal cov_noise, (J,), got a matrix")
        root = variance.sqrt()
        lower = torch.linalg.cholesky(_scaled(cov, 1 / root))
        # in the whitened state the prior covariance is (L^T L)^-1 with L this root
        whitened = (1 - t) * torch.linalg.inv(lower.mT @ lower) + t * torch.eye(size).to(cov)
        bracket = _inverse_spd("prior covariance", whitened)
        factor = root[:, None] * lower
        precision = torch.diag(precision) if precision.ndim == 1 else precision
        part = factor[: len(gram)]
        bracket = bracket + part.mT @ precision @ part
    else:
        pull = cov / ((1 - t) * variance + t * cov) + slope
        if precision.ndim == 1:
            return Principal(cov.sqrt(), _pulling(pull + cov * _padded(precision, size)))
        _check_size(size)
        factor = cov.sqrt()
        bracket = torch.diag(pull)
        bracket[: len(gram), : len(gram)] += _scaled(precision, factor)
    rates, turn = torch.linalg.eigh(bracket)
    _pulling(rates)
    return Principal(factor[:, None] * turn if factor.ndim == 1 else factor @ turn, rates)


def rates(
    variance: Tensor,
    cov_noise: Tensor,
    gram: Tensor,
    obs_noise: float,
    t: float = 0.0,
    slope: Tensor | float = 0.0,
) -> Tensor:
    """The rates of mean reversion (J,); in the order of the modes if all matrices are diagonal.

    Euler's method is stable for steps below 2 / max(rates), and takes 1 / (h min(rates)) of them to
    forget. Arguments and errors: see `principal`.
    """
    return principal(variance, cov_noise, gram, obs_noise, t, slope).rates


@dataclass(frozen=True)
class Gaussian:
    """A normal law of coefficients.

    Attributes:
        mean: (J,).
        cov: (J,) variances of independent modes, or (J, J).
    """

    mean: Tensor
    cov: Tensor

    @property
    def variance(self) -> Tensor:
        """(J,)."""
        return self.cov if self.cov.ndim == 1 else self.cov.diagonal()


def stationary(
    variance: Tensor,
    cov_noise: Tensor,
    gram: Tensor,
    obs_noise: float,
    projected: Tensor,
    t: float = 0.0,
    slope: Tensor | float = 0.0,
    bias: Tensor | float = 0.0,
) -> Gaussian:
    """The law that the Langevin equation tends to (Proposition 3.1).

        covariance v = [C^-1 (diag s + diag slope) + G / obs_noise^2]^-1,
        mean v (A^T y / obs_noise^2 - C^-1 bias).

    With a perfect score it is that of the prior covariance (1 - t) diag(variance) + t C, so the
    posterior itself at t = 0, whatever C. A bias is amplified by 1 / C.

    Args:
        variance, cov_noise, gram, obs_noise, t, slope: see `principal`.
        projected: (N,), A^T y.
        bias: () or (J,), the constant part of the score's error.

    Raises:
        ValueError: as `principal`.
    """
    frame = principal(variance, cov_noise, gram, obs_noise, t, slope)
    size = len(frame.rates)
    data = _padded(torch.as_tensor(projected, dtype=torch.float64), size) / obs_noise**2
    shift = _modes("bias", bias, size, data)
    w, kappa = frame.frame, frame.rates
    if w.ndim == 1:
        return Gaussian((w.square() * data - shift) / kappa, w.square() / kappa)
    half = w / kappa.sqrt()
    force = w.mT @ data - torch.linalg.solve(w, shift)
    return Gaussian(w @ (force / kappa), half @ half.mT)


def law_after(
    steps: int,
    h: float,
    principal: Principal,
    target: Tensor,
    start: Gaussian,
    method: Literal["exact", "euler"] = "exact",
) -> Gaussian:
    """The law of the discrete chain after ``steps`` steps, where every mode is independent.

    With rho = exp(-h kappa), or 1 - h kappa of Euler's method, the distance of the mean from
    ``target`` shrinks by rho a step, and the variance tends to C / kappa, or to C / (kappa (1 - h
    kappa / 2)) of Euler's method: 4/3 of the right one at kappa = 1 and h = 1/2.

    Args:
        steps: how many.
        h: step.
        principal: of the chain, with a diagonal frame.
        target: (J,), the stationary mean.
        start: law of the first state, of independent modes.
        method: of the chain.

    Raises:
        ValueError: a frame or a start that is a matrix; Euler's method with h kappa >= 2.
    """
    w, kappa = principal
    if w.ndim != 1 or start.cov.ndim != 1:
        raise ValueError("principal and start must be diagonal, (J,), got a matrix")
    if method == "euler":
        check_step(h, kappa)
        rho, limit = 1 - h * kappa, w.square() / (kappa * (1 - h * kappa / 2))
    else:
        rho, limit = torch.exp(-h * kappa), w.square() / kappa
    left = rho**steps
    mean = target + left * (start.mean - target)
    return Gaussian(mean, limit + left.square() * (start.cov - limit))


def mode_kl(mean: Tensor, variance: Tensor, true_mean: Tensor, true_variance: Tensor) -> Tensor:
    """KL(N(mean, variance) | N(true_mean, true_variance)) mode by mode, shaped as these.

    (1/2) [(mean - true_mean)^2 / v + r - log(1 + r)] with r = variance / v - 1, by its series where
    r is small: the difference of two numbers near r would lose all digits of r^2 / 2.

    Raises:
        ValueError: a variance is not positive.
    """
    check_positive("variance", variance)
    true_variance = check_positive("true_variance", true_variance)
    r = (variance.double() - true_variance) / true_variance
    series = r.square() * (1 / 2 - r * (1 / 3 - r * (1 / 4 - r * (1 / 5 - r / 6))))
    excess = torch.where(r.abs() < 1e-3, series, r - torch.log1p(r))
    return 0.5 * ((mean - true_mean).double().square() / true_variance + excess)


def small_time_kl(
    variance: Tensor,
    cov_noise: Tensor,
    gram: Tensor,
    obs_noise: float,
    projected: Tensor,
    tau: float,
    slope: Tensor | float = 0.0,
    bias: Tensor | float = 0.0,
) -> Tensor:
    """`mode_kl` of the stationary law against the posterior to first order in tau and slope, (J,).

        v [q^2 / 2 - q (A^T y / obs_noise^2 - q) D / w],   q = bias / C,
        D = (p - 1) tau - slope / p,   p = C / variance,   w = 1 + variance G / obs_noise^2,

    and v = variance / w. The factor v is missing in the paper's expansion: variances stand there in
    the place of standard deviations. Without a bias the first order is 0.

    Args:
        variance, cov_noise, gram, projected: all (J,); see `stationary`.
        tau: -log(1 - t).
    """
    ratio = cov_noise / variance
    w = 1 + variance * gram / obs_noise**2
    q = torch.as_tensor(bias).to(variance) / cov_noise
    d = (ratio - 1) * tau - slope / ratio
    return variance / w * (0.5 * q.square() - q * (projected / obs_noise**2 - q) * d / w)


def is_trace_class(eigenvalues: Tensor) -> bool:
    """Do these eigenvalues fall fast enough that the sum of all, of infinitely many, is finite?

    Judged by their power law in the middle, from the 16th part to the half of them in falling
    order, which must be steeper than 1 / j: of a square grid of modes the smallest eigenvalues are
    those of its corners, which fall faster than all modes of their size. Fewer than 32 say nothing,
    and pass.
    """
    size = len(eigenvalues)
    if size < 32:
        return True
    first, last = size // 16, size // 2
    logs = eigenvalues.double().sort(descending=True)[0][first:last].log()
    index = torch.arange(first + 1, last + 1).double().log()
    centred = index - index.mean()
    return bool((centred * logs).sum() / centred.square().sum() < -1)


def _pulling(rates: Tensor) -> Tensor:
    """``rates``, all of which must be positive."""
    if not bool((rates > 0).all()):
        worst = int(rates.argmin())
        raise ValueError(
            f"slope: every mode must be pulled back, and mode {worst} has the rate "
            f"{rates[worst]:.3g}; unobserved, one runs away if its score errs by more than 100 %"
        )
    return rates


def check_step(h: float, kappa: Tensor) -> None:
    """Raise `ValueError` unless Euler's method is stable with step ``h``."""
    fastest = float(kappa.max())
    if h * fastest >= 2:
        raise ValueError(
            f"h must be below 2 / max(rates) = {2 / fastest:.3g} for Euler's method, got {h:.3g}"
        )


def check_positive(name: str, values: Tensor) -> Tensor:
    """``values`` in float64; `ValueError` unless they are positive and finite."""
    values = torch.as_tensor(values).double()
    good = (values > 0) & values.isfinite()
    if not bool(good.all()):
        bad = int(good.logical_not().flatten().nonzero()[0])
        raise ValueError(
            f"{name} must be positive and finite, got {values.flatten()[bad]:.3g} at {bad}"
        )
    return values


def check_covariance(cov: Tensor, size: int) -> Tensor:
    """``cov_noise`` in float64, (size,) or (size, size)."""
    cov = torch.as_tensor(cov).double()
    if cov.ndim == 1:
        cov = check_positive("cov_noise", cov)
    elif not bool(cov.isfinite().all()) or not torch.allclose(cov, cov.mT, rtol=1e-8, atol=0):
        raise ValueError("cov_noise must be symmetric and finite")
    if tuple(cov.shape) not in ((size,), (size, size)):
        raise ValueError(f"cov_noise must be ({size},) or ({size}, {size}), got {tuple(cov.shape)}")
    if cov.ndim == 2:
        _check_size(size)
        root = cov.diagonal().clamp(min=0).rsqrt()  # to equal size: variances may be 1e-193
        if bool(torch.linalg.cholesky_ex(_scaled(cov, root))[1]):
            raise ValueError("cov_noise must be positive definite")
    return cov


def check_gram(gram: Tensor, size: int) -> Tensor:
    """``gram`` in float64, (N,) or (N, N) with N <= size."""
    gram = torch.as_tensor(gram).double()
    square = gram.ndim == 1 or (gram.ndim == 2 and gram.shape[0] == gram.shape[1])
    if not square or not 1 <= len(gram) <= size:
        raise ValueError(
            f"gram must be (N,) or (N, N) with 1 <= N <= {size}, got {tuple(gram.shape)}"
        )
    diagonal = gram if gram.ndim == 1 else gram.diagonal()
    if not bool(gram.isfinite().all()) or bool((diagonal < 0).any()):
        raise ValueError("gram must be finite, with no negative number on its diagonal")
    return gram


def check_obs_noise(obs_noise: float) -> float:
    """Raise `ValueError` unless the noise of a measurement is positive."""
    if not 0 < obs_noise < math.inf:
        raise ValueError(f"obs_noise must be positive and finite, got {obs_noise}")
    return obs_noise


def _check_t(t: float) -> float:
    t = float(t)
    if not 0 <= t < 1:
        raise ValueError(f"t must lie in [0, 1), got {t}")
    return t


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise ValueError(f"a matrix of {size} modes is not formed, {LARGEST} are the most")


def _modes(name: str, value: Tensor | float, size: int, like: Tensor) -> Tensor:
    """() or (size,) as (size,)."""
    value = torch.as_tensor(value).to(like)
    if tuple(value.shape) not in ((), (size,)) or not bool(value.isfinite().all()):
        raise ValueError(f"{name} must be a number or ({size},), finite, got {tuple(value.shape)}")
    return value.expand(size)


def _padded(values: Tensor, size: int) -> Tensor:
    """Zeros for the modes that are not observed."""
    return torch.nn.functional.pad(values, (0, size - len(values)))


def _scaled(matrix: Tensor, root: Tensor) -> Tensor:
    """diag(root) matrix diag(root)."""
    root = root[: len(matrix)]
    return root[:, None] * matrix * root


def _inverse_spd(name: str, matrix: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed):
        raise ValueError(f"the {name} is not positive definite")
    return torch.cholesky_inverse(factor)
