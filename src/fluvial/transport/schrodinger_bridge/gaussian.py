"""Iterative Markovian fitting and iterative proportional fitting of Gaussians, in closed form.

Everything is in float64 and batched: means are (*batch, d), matrices (*batch, d, d).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fluvial.core.protocols import Noise
from fluvial.transport.schrodinger_bridge.reference import ONE, Reference

STEPS = 400
"""Of the classical method of Runge and Kutta along the path: an error of about 1e-9."""


@dataclass(frozen=True, eq=False)
class GaussianCoupling:
    """(X_0, X_1) ~ N((m_0, m_1), [[S_0, C], [C^T, S_1]]).

    Args:
        mean0, mean1: (*batch, d).
        cov0, cov1: (*batch, d, d), symmetric and positive definite.
        cross: C = Cov(X_0, X_1), (*batch, d, d).

    Raises:
        TypeError: an argument is no floating tensor.
        ValueError: shapes that do not fit, values that are not finite, a covariance that is not
            symmetric or not positive definite, a ``cross`` that is too large for the covariances.
    """

    mean0: Tensor
    cov0: Tensor
    mean1: Tensor
    cov1: Tensor
    cross: Tensor

    def __post_init__(self) -> None:
        for name in ("mean0", "cov0", "mean1", "cov1", "cross"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) or not value.is_floating_point():
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"{name} must be a floating tensor, got {kind}")
        shape = tuple(self.mean0.shape)
        square = (*shape, *shape[-1:])
        wanted = {"mean1": shape, "cov0": square, "cov1": square, "cross": square}
        if not shape or any(
            tuple(getattr(self, name).shape) != size for name, size in wanted.items()
        ):
            got = {name: tuple(getattr(self, name).shape) for name in ("mean0", *wanted)}
            raise ValueError(f"means must be (*batch, d) and matrices (*batch, d, d), got {got}")
        for name in ("mean0", *wanted):
            value = getattr(self, name).double()
            if not bool(value.isfinite().all()):
                raise ValueError(f"{name} holds values that are not finite")
            object.__setattr__(self, name, value)
        for name in ("cov0", "cov1"):
            value = getattr(self, name)
            if not torch.allclose(value, value.mT, rtol=1e-9, atol=1e-12):
                raise ValueError(f"{name} must be symmetric, got {value.tolist()}")
            if not _definite(value):
                raise ValueError(f"{name} must be positive definite, got {value.tolist()}")
        if not _definite(self.covariance):
            raise ValueError(
                "cross is too large: cov0, cov1 and cross make no positive definite covariance, "
                f"got cross={self.cross.tolist()}"
            )

    @classmethod
    def independent(
        cls, mean0: Tensor, cov0: Tensor, mean1: Tensor, cov1: Tensor
    ) -> GaussianCoupling:
        """The product of N(m_0, S_0) and N(m_1, S_1)."""
        return cls(mean0, cov0, mean1, cov1, torch.zeros_like(cov0))

    @classmethod
    def from_reference(cls, mean0: Tensor, cov0: Tensor, reference: Reference) -> GaussianCoupling:
        """The ends of the reference process that starts from N(m_0, S_0)."""
        scale, level = (float(part.value) for part in reference.marginal(ONE))
        cov0 = cov0.double()
        cov1 = scale**2 * cov0 + level**2 * torch.eye(cov0.shape[-1], dtype=torch.float64)
        return cls(mean0, cov0, scale * mean0.double(), cov1, scale * cov0)

    @property
    def covariance(self) -> Tensor:
        """[[S_0, C], [C^T, S_1]], (*batch, 2 d, 2 d)."""
        upper = torch.cat([self.cov0, self.cross], -1)
        return torch.cat([upper, torch.cat([self.cross.mT, self.cov1], -1)], -2)

    @property
    def mean(self) -> Tensor:
        """(*batch, 2 d)."""
        return torch.cat([self.mean0, self.mean1], -1)

    @property
    def mirrored(self) -> GaussianCoupling:
        """The law of (X_1, X_0)."""
        return GaussianCoupling(self.mean1, self.cov1, self.mean0, self.cov0, self.cross.mT)

    @property
    def cost(self) -> Tensor:
        """E |X_0 - X_1|^2, (*batch,)."""
        shift = (self.mean0 - self.mean1).square().sum(-1)
        return shift + _trace(self.cov0 + self.cov1 - 2 * self.cross)

    def kl(self, other: GaussianCoupling) -> Tensor:
        """KL(self | other) in nats, (*batch,).

        With u the eigenvalues of the relative difference of the covariances, (|shift|^2 + sum of u
        - log(1 + u)) / 2: what is small is computed from small numbers, and keeps its digits.
        """
        root = torch.linalg.cholesky(other.covariance)
        change = _whitened(self.covariance - other.covariance, root)
        u = torch.linalg.eigvalsh((change + change.mT) / 2).clamp(min=-1 + 1e-300)
        shift = torch.linalg.solve_triangular(
            root, (self.mean - other.mean)[..., None], upper=False
        )
        # below 1e-4 the series, whose first term left out is u^5 / 10
        small = u.square() * (0.5 - u / 3 + u.square() / 4 - u.pow(3) / 5)
        gain = torch.where(u.abs() < 1e-4, small, u - torch.log1p(u))
        return 0.5 * (gain.sum(-1) + shift.square().sum((-2, -1)))

    def sample(self, num: int, noise: Noise) -> tuple[Tensor, Tensor]:
        """``num`` pairs (x_0, x_1), each (num, d), of one coupling without a batch.

        Raises:
            ValueError: the coupling is a batch of them.
        """
        if self.mean0.ndim != 1:
            raise ValueError(f"sample needs one coupling, got a batch of {self.mean0.shape[:-1]}")
        z = noise.normal(self.mean.new_empty(num, len(self.mean)), "coupling")
        both = self.mean + z @ torch.linalg.cholesky(self.covariance).mT
        x0, x1 = both.chunk(2, dim=1)
        return x0.contiguous(), x1.contiguous()


def gaussian_bridge(marginals: GaussianCoupling, reference: Reference) -> GaussianCoupling:
    """The ends of the Schrödinger bridge between two Gaussians.

    With r = `Reference.regularisation`, which is sigma^2 for Brownian motion,

        C = (S_0^1/2 D S_0^-1/2 - r I) / 2,    D = (4 S_0^1/2 S_1 S_0^1/2 + r^2 I)^1/2.

    Args:
        marginals: the two Gaussians; their ``cross`` is not used.
        reference: the reference process.

    Citation: Janati, Muzellec, Peyré and Cuturi, NeurIPS 2020; Bunne et al., AISTATS 2023.
    """
    strength = reference.regularisation
    root, back = _power(marginals.cov0, 0.5), _power(marginals.cov0, -0.5)
    identity = torch.eye(root.shape[-1], dtype=torch.float64)
    inner = _power(4 * root @ marginals.cov1 @ root + strength**2 * identity, 0.5)
    return replace(marginals, cross=0.5 * (root @ inner @ back - strength * identity))


def gaussian_imf(
    start: GaussianCoupling, reference: Reference, iterations: int, *, steps: int = STEPS
) -> list[GaussianCoupling]:
    """Couplings of ``iterations`` iterations of exact IMF, ``start`` first.

    Under each of them x_t has the mean m_t = w_0 m_0 + w_1 m_1 and a covariance Sig(t), by
    `Reference.weights`; the Markovian projection has the drift m_t' + K(t) (x - m_t) with K = E[u
    x_t^T] Sig^-1, u the drift of the bridge. With Phi' = K Phi, Phi(0) = I the new C is S_0
    Phi(1)^T. The marginals stay.

    Args:
        start: any coupling of the marginals.
        reference: the reference process.
        iterations: at least 0.
        steps: of the integrator of Phi, which is of fourth order.

    Raises:
        ValueError: a negative number of iterations, or no steps.

    Citation: Peluchetti, JMLR 2023; Shi et al., NeurIPS 2023, arXiv 2303.16852.
    """
    if iterations < 0 or steps < 1:
        raise ValueError(f"need iterations >= 0 and steps >= 1, got {iterations} and {steps}")
    couplings = [start]
    for _ in range(iterations):
        flow = _flow(couplings[-1], reference, steps)
        couplings.append(replace(start, cross=start.cov0 @ flow.mT))
    return couplings


def gaussian_ipf(
    marginals: GaussianCoupling, reference: Reference, iterations: int
) -> list[GaussianCoupling]:
    """Couplings of iterative proportional fitting (Sinkhorn's algorithm), the reference first.

    The reference process from N(m_0, S_0) comes first. Iterations 1, 3, ... put the marginal N(m_1,
    S_1) in the place of the present one at t = 1 and keep the law of x_0 given x_1; iterations 2,
    4, ... do the same with the ends exchanged. So one marginal is right at a time.

    Args:
        marginals: the marginals to fit; their ``cross`` is not used.
        reference: the reference process.
        iterations: half-cycles, at least 0.

    Raises:
        ValueError: a negative number of iterations.
    """
    if iterations < 0:
        raise ValueError(f"need iterations >= 0, got {iterations}")
    couplings = [GaussianCoupling.from_reference(marginals.mean0, marginals.cov0, reference)]
    for k in range(iterations):
        if k % 2:
            couplings.append(_refit(couplings[-1], marginals.mean0, marginals.cov0))
        else:
            back = _refit(couplings[-1].mirrored, marginals.mean1, marginals.cov1)
            couplings.append(back.mirrored)
    return couplings


def _refit(coupling: GaussianCoupling, mean: Tensor, cov: Tensor) -> GaussianCoupling:
    """The coupling with N(mean, cov) at its first end, x_1 given x_0 as before."""
    gain = torch.linalg.solve(
        coupling.cov0, coupling.cross
    ).mT  # E[x_1 | x_0] = m_1 + gain (x_0 - m_0)
    mean1 = coupling.mean1 + (gain @ (mean - coupling.mean0)[..., None])[..., 0]
    cov1 = coupling.cov1 + gain @ (cov - coupling.cov0) @ gain.mT
    return GaussianCoupling(mean, cov, mean1, (cov1 + cov1.mT) / 2, cov @ gain.mT)


def scalar_imf(c: float, cov0: float, cov1: float, reference: Reference) -> float:
    """One iteration of exact IMF of two numbers, whose covariance ``c`` becomes

        sqrt(S_0 S_1) exp(-(sigma^2 / 2) I(b)),    b = c + sigma^2 / 2, D = S_0 S_1 - b^2,

    with I = (pi / 2 - arctan(b / sqrt D)) / sqrt D, or arcoth(b / sqrt(-D)) / sqrt(-D) where D < 0.

    Args:
        c: |c| < sqrt(S_0 S_1).
        cov0, cov1: variances.
        reference: a Brownian motion.

    Raises:
        ValueError: variances that are not positive, a covariance that is too large, a reference
            with a reversion, for which `gaussian_imf` serves.
    """
    if not (min(cov0, cov1) > 0 and c * c < cov0 * cov1):
        raise ValueError(f"need c^2 < cov0 cov1, both positive, got c={c}, {cov0} and {cov1}")
    if reference.reversion:
        raise ValueError(f"reference must be a Brownian motion, got {reference}")
    half = reference.diffusion**2 / 2
    b, whole = c + half, cov0 * cov1
    gap = whole - b * b
    root = math.sqrt(abs(gap))
    # where D is near 0, the common series of both forms: (1 - D / (3 b^2)) / b
    if root < 1e-4 * abs(b):
        integral = (1 - gap / (3 * b * b)) / b
    elif gap > 0:
        integral = math.atan2(root, b) / root
    else:
        integral = math.atanh(root / b) / root
    return math.sqrt(whole) * math.exp(-half * integral)


@dataclass(frozen=True)
class GaussianField:
    """E[x_0 | x_t] of the bridges between the ends of one Gaussian coupling, (batch, d).

    The backward drift of the coupling's Markovian projection, as a field: exact, for a check of
    samplers and of networks. ``GaussianField(coupling.mirrored, reference)`` is the forward one,
    on the clock 1 - t.
    """

    coupling: GaussianCoupling
    reference: Reference
    predicts: str = "clean"

    def __call__(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        here = self.coupling
        w0, w1, _ = (w.double()[..., None, None] for w in self.reference.weights(t.double()))
        mean = w0[..., 0] * here.mean0 + w1[..., 0] * here.mean1
        gain = (w0 * here.cov0 + w1 * here.cross) @ torch.linalg.inv(
            spread(here, self.reference, t.double())
        )
        centred = (x.double() - mean)[..., None]
        return (here.mean0 + (gain @ centred)[..., 0]).to(x)


def spread(coupling: GaussianCoupling, reference: Reference, t: Tensor) -> Tensor:
    """Cov(x_t) of the bridges between the ends of a coupling, (*t, *batch, d, d)."""
    w0, w1, v = (_over(w, coupling.cov0) for w in reference.weights(t))
    identity = torch.eye(coupling.cov0.shape[-1], dtype=torch.float64)
    both = coupling.cross + coupling.cross.mT
    return w0**2 * coupling.cov0 + w1**2 * coupling.cov1 + w0 * w1 * both + v * identity


def drift_matrix(coupling: GaussianCoupling, reference: Reference, t: Tensor) -> Tensor:
    """K(t) of the forward drift m_t' + K(t) (x - m_t) of the Markovian projection.

    E[u x_t^T] is written out in the weights and their rates: nothing in it is singular at t = 1,
    where the drift of one bridge is.

    Args:
        coupling: of the ends, with a batch.
        reference: the reference process.
        t: any shape.

    Returns:
        (*t, *batch, d, d).
    """
    w0, w1, _ = (_over(w, coupling.cov0) for w in reference.weights(t))
    r0, r1, rate = (_over(w, coupling.cov0) for w in reference.weight_rates(t))
    identity = torch.eye(coupling.cov0.shape[-1], dtype=torch.float64)
    ends = w0 * r0 * coupling.cov0 + w1 * r1 * coupling.cov1
    cross = r0 * w1 * coupling.cross + r1 * w0 * coupling.cross.mT
    moment = ends + cross + 0.5 * (rate - reference.diffusion**2) * identity
    return torch.linalg.solve(spread(coupling, reference, t), moment.mT).mT


def _flow(coupling: GaussianCoupling, reference: Reference, steps: int) -> Tensor:
    """Phi(1), by the classical method of Runge and Kutta.

    Each step is a matrix, that of a polynomial in three values of K, so all are worked out at once
    and multiplied in pairs.
    """
    times = torch.linspace(0, 1, 2 * steps + 1, dtype=torch.float64)
    K = drift_matrix(coupling, reference, times)
    first, middle, last = K[:-1:2], K[1::2], K[2::2]
    h = 1 / steps
    identity = torch.eye(K.shape[-1], dtype=torch.float64).expand_as(first)
    k2 = middle @ (identity + h / 2 * first)
    k3 = middle @ (identity + h / 2 * k2)
    k4 = last @ (identity + h * k3)
    return _product(identity + h / 6 * (first + 2 * k2 + 2 * k3 + k4))


def _product(factors: Tensor) -> Tensor:
    """factors[-1] ... factors[1] factors[0]."""
    while len(factors) > 1:
        odd = factors[-1:] if len(factors) % 2 else factors[:0]
        factors = torch.cat([factors[1::2] @ factors[: len(factors) // 2 * 2 : 2], odd])
    return factors[0]


def _over(w: Tensor, like: Tensor) -> Tensor:
    """``w`` (*t,) shaped to multiply (*t, *batch, d, d)."""
    return w.double().reshape(*w.shape, *(1,) * like.ndim)


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    return (vectors * values[..., None, :] ** exponent) @ vectors.mT


def _whitened(matrix: Tensor, root: Tensor) -> Tensor:
    """root^-1 matrix root^-T."""
    left = torch.linalg.solve_triangular(root, matrix, upper=False)
    return torch.linalg.solve_triangular(root, left.mT, upper=False).mT


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def _definite(matrix: Tensor) -> bool:
    return not bool(torch.linalg.cholesky_ex(matrix).info.any())
