"""Iterative Markovian fitting and Sinkhorn's algorithm on a finite state space, exactly.

States are x_1 .. x_m, of any dimension; times 0 = t_0 < ... < t_K = 1. The reference is a Markov
chain of K kernels Q_k (m, m), Q_k[x, y] = P(X_{k+1} = y | X_k = x). All is in float64. Kernels and
couplings may have further dimensions in front, which are problems of their own.
"""

from __future__ import annotations

from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor
from tqdm import tqdm

from fluvial.transport.schrodinger_bridge.reference import Reference

TINY = 1e-300
"""The smallest probability that is divided by."""
OFF = 1e-9
"""How far sums of probabilities may be from 1."""


def transition_kernels(points: Tensor, reference: Reference, steps: int) -> Tensor:
    """Kernels of the reference on a grid: its transitions over 1 / K, rows normalised.

    Q[x, y] is proportional to exp(-|y - M x|^2 / (2 C)), M and C those of the process. With a
    spacing of the grid above the root of C the chain cannot follow the process.

    Args:
        points: (m, d) or (m,), finite.
        reference: the process.
        steps: K, at least 1.

    Returns:
        (K, m, m), K times the same: a view, which takes the memory of one.

    Raises:
        ValueError: ``points`` is of another shape or not finite, ``steps`` below 1.
    """
    points = points.double()
    points = points[:, None] if points.ndim == 1 else points
    if points.ndim != 2 or not len(points) or not bool(points.isfinite().all()):
        raise ValueError(f"points must be finite, (m, d) or (m,), got {tuple(points.shape)}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    step = torch.tensor(1 / steps, dtype=torch.float64)
    scale, level = (float(part.value) for part in reference.marginal(step))
    exact = "donot_use_mm_for_euclid_dist"
    squares = torch.cdist(scale * points, points, compute_mode=exact).square()
    return torch.softmax(-squares / (2 * level**2), -1).expand(steps, -1, -1)


def whole_kernel(kernels: Tensor) -> Tensor:
    """Q_{0:K} = Q_0 ... Q_{K-1}, (*batch, m, m), of kernels (*batch, K, m, m)."""
    return reduce(torch.matmul, kernels.unbind(-3))


def grid_imf(
    p0: Tensor,
    p1: Tensor,
    kernels: Tensor,
    iterations: int,
    *,
    coupling: Tensor | None = None,
    progress: bool = False,
) -> list[Tensor]:
    """Couplings of exact IMF on a grid, the first one first.

    The reciprocal process of a coupling pi fills it in with the bridges of the reference. With
    R = pi / Q_{0:K}, A_k = Q_0 ... Q_{k-1} and B_k = Q_k ... Q_{K-1} its neighbouring pairs have
    the law

        P(X_k = x, X_{k+1} = y) = Q_k[x, y] (A_k^T R B_{k+1}^T)[x, y],

    and its Markovian projection has the transitions T_k, which are the rows of these divided by
    their sums. The next coupling is diag(p_0) T_0 ... T_{K-1}. It has the same marginals. An
    iteration is 3 K products of m x m matrices.

    A kernel Q_{0:K} that falls below 1e-300, where two states are too far from one another for the
    reference, cannot be divided by.

    Args:
        p0, p1: (m,), the marginals at t = 0 and t = 1, at least 0, of sum 1.
        kernels: (*batch, K, m, m), rows of sum 1.
        iterations: at least 0.
        coupling: (*batch, m, m), with these marginals; their product by default.
        progress: show a progress bar.

    Returns:
        ``iterations + 1`` couplings (*batch, m, m).

    Raises:
        TypeError: an argument is no floating tensor.
        ValueError: shapes that do not fit, negative or non-finite probabilities, sums that are not
            1, a coupling of other marginals, a reference that does not reach from x to y where the
            coupling is positive.

    Citation: Shi et al., NeurIPS 2023, arXiv 2303.16852, in discrete time.
    """
    p0, p1, kernels = _checked(p0, p1, kernels)
    if iterations < 0:
        raise ValueError(f"iterations must be at least 0, got {iterations}")
    if kernels.ndim < 3 or kernels.shape[-3] < 1:
        raise ValueError(f"kernels must have shape (*batch, K, m, m), got {tuple(kernels.shape)}")
    pi = p0[:, None] * p1 if coupling is None else _coupling(coupling, p0, p1)
    steps = kernels.unbind(-3)
    before = list(accumulate(steps, torch.matmul))  # A_1 .. A_K
    after = list(accumulate(reversed(steps), lambda b, q: q @ b))[-2::-1]  # B_1 .. B_{K-1}
    whole = before[-1]
    pi = pi.expand(whole.shape)
    if bool(((whole < TINY) & (pi > 0)).any()):
        raise ValueError(
            "kernels: their product is 0, or below 1e-300, between states that the coupling joins; "
            "take a reference with a larger diffusion, or fewer far states"
        )
    couplings = [pi]
    for _ in tqdm(range(iterations), desc="IMF", disable=not progress):
        ratio = torch.where(couplings[-1] > 0, couplings[-1] / whole.clamp(min=TINY), 0.0)
        moves = []
        for k, step in enumerate(steps):
            pair = before[k - 1].mT @ ratio if k else ratio
            pair = step * (pair @ after[k].mT if k + 1 < len(steps) else pair)
            mass = pair.sum(-1, keepdim=True)
            # from where the process never is it may go as the reference does
            moves.append(torch.where(mass > TINY, pair / mass.clamp(min=TINY), step))
        couplings.append(reduce(torch.matmul, moves[1:], p0[:, None] * moves[0]))
    return couplings


def grid_ipf(p0: Tensor, p1: Tensor, kernel: Tensor, iterations: int) -> list[Tensor]:
    """Couplings of iterative proportional fitting, Sinkhorn's algorithm: diag(p_0) Q first.

    Iterations 1, 3, ... make p_1 the marginal at t = 1, iterations 2, 4, ... p_0 that at t = 0.

    Args:
        p0, p1: (m,), the marginals, at least 0, of sum 1.
        kernel: (*batch, m, m), the reference from t = 0 to t = 1, at least 0; `whole_kernel`.
        iterations: at least 0.

    Raises:
        TypeError, ValueError: as `grid_imf`.
    """
    if iterations < 0:
        raise ValueError(f"iterations must be at least 0, got {iterations}")
    log_p0, log_p1, log_q = _logs(p0, p1, kernel)
    u, v = log_p0.expand(log_q.shape[:-1]), torch.zeros(log_q.shape[:-1], dtype=torch.float64)
    couplings = [_plan(log_q, u, v)]
    for k in range(iterations):
        if k % 2:
            u = _fit(log_p0, log_q, v)
        else:
            v = _fit(log_p1, log_q.mT, u)
        couplings.append(_plan(log_q, u, v))
    return couplings


def sinkhorn(
    p0: Tensor, p1: Tensor, kernel: Tensor, *, tolerance: float = 1e-13, most: int = 100_000
) -> Tensor:
    """The coupling of the Schrödinger bridge, diag(u) Q diag(v) with the marginals p_0 and p_1.

    Sinkhorn's algorithm in the log domain: u <- p_0 / (Q v), v <- p_1 / (Q^T u).

    Args:
        p0, p1: (m,), the marginals, at least 0, of sum 1.
        kernel: (*batch, m, m), the reference from t = 0 to t = 1, at least 0; `whole_kernel`.
        tolerance: on the sum of |sum_y pi[x, y] - p_0[x]|; the other marginal is exact.
        most: cycles.

    Returns:
        (*batch, m, m).

    Raises:
        TypeError, ValueError: as `grid_imf`.
        RuntimeError: the tolerance is not met after the most cycles.
    """
    if not tolerance > 0 or most < 1:
        raise ValueError(f"need tolerance > 0 and most >= 1, got {tolerance} and {most}")
    log_p0, log_p1, log_q = _logs(p0, p1, kernel)
    v = torch.zeros(log_q.shape[:-1], dtype=torch.float64)
    off = torch.tensor(torch.inf)
    for _ in range(most):
        u = _fit(log_p0, log_q, v)
        v = _fit(log_p1, log_q.mT, u)
        plan = _plan(log_q, u, v)
        off = (plan.sum(-1) - log_p0.exp()).abs().sum(-1).amax()
        if off <= tolerance:
            return plan
    raise RuntimeError(
        f"Sinkhorn's plan misses its marginal by {float(off):.2g} after {most} cycles; raise most "
        f"or tolerance={tolerance}"
    )


def coupling_kl(coupling: Tensor, other: Tensor) -> Tensor:
    """KL(coupling | other) in nats, (*batch,), of couplings (*batch, m, m).

    The sum of p log(p / q) - p + q, in which every term is at least 0 and is worked out from p - q:
    a small value keeps its digits.
    """
    p, q = coupling.double(), other.double()
    there = q > 0
    u = torch.where(there, (p - q) / torch.where(there, q, 1.0), 0.0)
    small = u.square() * (0.5 - u / 6 + u.square() / 12 - u.pow(3) / 20)
    large = torch.where(u > -1, (1 + u) * torch.log1p(u.clamp(min=-1 + 1e-16)), 0.0) - u
    terms = torch.where(u.abs() < 1e-3, small, large) * q
    return torch.where(there, terms, torch.where(p > 0, torch.inf, 0.0)).sum((-2, -1))


def _fit(log_p: Tensor, log_q: Tensor, other: Tensor) -> Tensor:
    """log p - log (Q exp other): -inf where p is 0."""
    return log_p - torch.logsumexp(log_q + other[..., None, :], -1)


def _plan(log_q: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return torch.exp(u[..., :, None] + log_q + v[..., None, :])


def _logs(p0: Tensor, p1: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p0, p1, kernel = _checked(p0, p1, kernel, rows=False)
    reached = (p0[:, None] * kernel).sum(-2) > 0
    reaching = (kernel * p1).sum(-1) > 0
    if bool(((p1 > 0) & ~reached).any() | ((p0 > 0) & ~reaching).any()):
        raise ValueError("kernel must be positive between the states that p0 and p1 join, it is 0")
    return p0.log(), p1.log(), kernel.log()


def _checked(
    p0: Tensor, p1: Tensor, kernels: Tensor, *, rows: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    result = []
    for name, value in (("p0", p0), ("p1", p1), ("kernels", kernels)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be a floating tensor, got {got}")
        value = value.double()
        if not bool((value.isfinite() & (value >= 0)).all()):
            raise ValueError(f"{name} must be finite and at least 0")
        result.append(value)
    m = result[0].shape[:1]
    if p0.ndim != 1 or not len(p0) or p1.shape != m or kernels.shape[-2:] != m * 2:
        raise ValueError(
            "p0 and p1 must have shape (m,) and kernels (..., m, m), got "
            f"{tuple(p0.shape)}, {tuple(p1.shape)} and {tuple(kernels.shape)}"
        )
    for name, value in (("p0", result[0]), ("p1", result[1])):
        if abs(float(value.sum()) - 1) > OFF:
            raise ValueError(f"{name} must sum to 1, got {float(value.sum())}")
    if rows and float((result[2].sum(-1) - 1).abs().amax()) > OFF:
        raise ValueError("kernels must have rows that sum to 1")
    return result[0], result[1], result[2]


def _coupling(coupling: Tensor, p0: Tensor, p1: Tensor) -> Tensor:
    coupling = coupling.double()
    if coupling.shape[-2:] != (len(p0), len(p0)) or not bool((coupling >= 0).all()):
        raise ValueError(
            f"coupling must have shape (..., {len(p0)}, {len(p0)}) and be at least 0, got "
            f"{tuple(coupling.shape)}"
        )
    sides = ((coupling.sum(-1), p0), (coupling.sum(-2), p1))
    if any(float((found - wanted).abs().amax()) > OFF for found, wanted in sides):
        raise ValueError("coupling must have the marginals p0 and p1")
    return coupling
