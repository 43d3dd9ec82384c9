"""How fast iterative Markovian fitting converges: bounds that are proved, as functions."""

from __future__ import annotations

import math

from torch import Tensor

from fluvial.transport.schrodinger_bridge.reference import Reference


def imf_rate_bound(convexity0: float, convexity1: float, reference: Reference) -> float:
    """rho with KL(pi^{n+1} | pi*) <= rho KL(pi^n | pi*), for exact IMF of log-concave marginals.

    With pi_0 = exp(-U), Hess U >= convexity0, and pi_1 the same with convexity1, and a Brownian
    motion of diffusion sigma,

        rho = log(1 + 1 / (convexity0 sigma^2)) + log(1 + 1 / (convexity1 sigma^2)),

    from any coupling with a finite divergence. It says something where it is below 1: for two
    unit Gaussians from sigma^2 = 1.5415 on. N(m, S) has the convexity 1 / (largest eigenvalue of
    S).

    Why: (i) of the projection M and the bridge P*, which share both marginals, KL(M | P*) is at
    most the sum of the forward drifts' differences on [0, 1/2] and the backward ones' on [1/2, 1],
    by Girsanov from either end. (ii) A drift is a conditional mean, so |v - v*| is at most the W_1
    distance of the laws of x_1 given x_t, over 1 - t. (iii) Under P* that law is strongly
    log-concave with constant convexity1 + t / (sigma^2 (1 - t)), and Talagrand's inequality bounds
    W_1^2 by 2 / constant times a divergence, (iv) whose mean is at most KL(pi^n | pi*). (v) The
    integral over [0, 1/2] is the second logarithm; the other half gives the first.

    Args:
        convexity0, convexity1: positive, may be infinite.
        reference: a Brownian motion.

    Raises:
        ValueError: a convexity is not positive, or the reference has a reversion.

    Citation: Gentiloni Silveri, Conforti and Durmus, NeurIPS 2025, arXiv 2510.20871, for the
        statement that IMF contracts at long horizons; the constant is this library's.
    """
    for name, value in (("convexity0", convexity0), ("convexity1", convexity1)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    if reference.reversion:
        raise ValueError(f"reference must be a Brownian motion, got {reference}")
    variance = reference.diffusion**2
    return math.log1p(1 / (convexity0 * variance)) + math.log1p(1 / (convexity1 * variance))


def finite_state_rate_bound(p0: Tensor, p1: Tensor, kernels: Tensor) -> float:
    """rho with KL(pi^n | pi*) <= rho^(n - 1) KL(pi^0 | pi*), for exact IMF on a finite state space.

    rho = 1 - (q^(N + 2) m_0 m_1)^3 / 4 with q, m_0 and m_1 the smallest entries of the kernels and
    of the marginals, and N the number of times between 0 and 1. True, and too near 1 to say much.

    Args:
        p0, p1: (m,), positive.
        kernels: (K, m, m), positive, K = N + 1.

    Raises:
        ValueError: an entry is not positive, or ``kernels`` has another shape.

    Citation: Sokolov and Korotin, arXiv 2508.02770.
    """
    if kernels.ndim != 3:
        raise ValueError(f"kernels must have shape (K, m, m), got {tuple(kernels.shape)}")
    least = [float(value.min()) for value in (p0, p1, kernels)]
    if not min(least) > 0:
        raise ValueError(f"p0, p1 and kernels must be positive, got {least} as their least entries")
    m0, m1, q = least
    return 1 - (q ** (len(kernels) + 1) * m0 * m1) ** 3 / 4
