"""What a prediction costs at one state: the terms that every bound and loss is a mean of.

Each function returns nats a token, (batch, *event), at tokens ``x`` at ``t`` that came from ``x0``:

======================== =================================================================
`discrete_terms`         KL(q(x_s | x_t, x_0) || P(x_s | x_t)), D3PM's; at s = 0, -ln p(x_0)
`continuous_terms`       its limit a unit of time: MDLM's where absorbing, UDLM's where not
`score_entropy_terms`    the same of a score: SEDD's
`flow_terms`             the generalised KL of a mixture path, a unit of time
======================== =================================================================

All are minimised by the exact posterior, as is the cross-entropy. ``log_p`` are logarithms of clean
probabilities, (batch, *event, V), of float32 or float64; see `predictions.log_clean`. Divergences
near 0 are computed from differences, so that short steps and times near 1 lose no digits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fluvial.core.categorical.draws import at_class
from fluvial.core.categorical.matrices import MatrixPath, TokenPath
from fluvial.core.categorical.paths import CategoricalPath, MixturePath
from fluvial.core.protocols import left_broadcast

CEILING = 2.0**60
"""Where a weight diverges, which is where no token is noised, it is cut off here."""


def negative_log(log_p: Tensor, x0: Tensor) -> Tensor:
    """-ln p(x_0), (batch, *event)."""
    return -log_p.gather(-1, x0.unsqueeze(-1)).squeeze(-1)


def masked_loss(
    log_p: Tensor, x: Tensor, x0: Tensor, weight: Tensor, path: CategoricalPath
) -> Tensor:
    """``weight`` times -ln p(x_0) where masked, else 0."""
    loss = torch.where(path.masked(x), negative_log(log_p, x0), 0.0)
    return loss * left_broadcast(weight.clamp(max=CEILING), loss).to(loss)


def discrete_terms(
    path: TokenPath, log_p: Tensor, x: Tensor, x0: Tensor, t: Tensor, s: Tensor
) -> Tensor:
    """KL(q(x_s | x_t, x_0) || P(x_s | x_t)); where s = 0, -ln p(x_0) (Austin et al., 2021).

    Of a `MixturePath` that of its own step, a jump with rho = (alpha_s - alpha_t) / drop_t:

        x = x_0:   -ln(1 - rho + rho p(x)),
        x != x_0:  (1 - rho) ln((1 - rho) / (1 - rho + rho p(x))) - rho ln p(x_0).

    Of a `MatrixPath` in float64, of its own step; classes that x excludes are left out of p.
    """
    if isinstance(path, MatrixPath):
        return _matrix_terms(path, log_p, x, x0, t, s)
    if path.absorbing:
        weight = path.gap(s, t) / path._positive(path.drop(t))
        return masked_loss(log_p, x, x0, torch.where(s == 0, 1.0, weight), path)
    # where s = 0 the divergence is taken at s = t, finite, and not used
    first = left_broadcast((s == 0).expand(t.shape), x).to(x.device)
    s = torch.where(s == 0, t, s)
    if isinstance(path, MixturePath):
        rho = left_broadcast(path.gap(s, t) / path._positive(path.drop(t)), x).to(log_p)
        rho = rho.clamp(max=1 - torch.finfo(log_p.dtype).eps)
        log_here, nll = -negative_log(log_p, x), negative_log(log_p, x0)
        other = rho * nll - (1 - rho) * torch.log1p(rho / (1 - rho) * log_here.exp())
        terms = torch.where(x == x0, -torch.log1p(rho * torch.expm1(log_here)), other)
        return torch.where(first, nll, terms)
    alpha, drop = (left_broadcast(v, log_p).to(log_p) for v in (path.alpha(s), path.drop(s)))
    lost = left_broadcast(path._lost(s, t), log_p).to(log_p)
    # both laws are (r [j = x] + (1 - r) pi(x)) A_j / (drop_t pi(x)), A linear in p
    here, pi_x, off, on = _at_token(path, x, t, log_p)
    start, end = _one_hot(x, log_p), _one_hot(x0, log_p)
    step = (1 - lost) * start + lost * pi_x
    gain = torch.where(start > 0, off / on, 1.0)  # D_k / D_x, against classes k != x
    pi = path.pi.to(log_p)
    alpha_t = left_broadcast(path.alpha(t), log_p).to(log_p)
    true = alpha * end * gain + drop * pi * (1 - alpha_t / on * (x == x0).to(log_p).unsqueeze(-1))
    p = log_p.exp()
    extra = alpha * gain * (p - end) - drop * pi * alpha_t / on * (
        here - (x == x0).to(log_p).unsqueeze(-1)
    )
    # a token that the source never has is clean, and stays
    terms = torch.where(pi_x > 0, step / off * _divergence(true, extra), 0.0).sum(-1)
    return torch.where(first, negative_log(log_p, x0), terms)


def _matrix_terms(
    path: MatrixPath, log_p: Tensor, x: Tensor, x0: Tensor, t: Tensor, s: Tensor
) -> Tensor:
    likelihood = path.likelihood(x, t)
    some = likelihood > 0
    d = torch.where(some, likelihood, 1.0)
    p = torch.where(some, log_p.to(d).exp(), 0.0)
    total = p.sum(-1, keepdim=True).clamp(min=torch.finfo(d.dtype).tiny)
    nll = negative_log(log_p, x0).to(d) + total.squeeze(-1).log()
    w = p / total / d
    certain = torch.where(some, _one_hot(x0, d) / d, 0.0)
    true, extra = path.reached(certain, x, t, s), path.reached(w - certain, x, t, s)
    first = left_broadcast((s == 0).expand(t.shape), x).to(x.device)
    return torch.where(first, nll, _divergence(true, extra).sum(-1)).to(log_p.dtype)


def continuous_terms(
    path: CategoricalPath, log_p: Tensor, x: Tensor, x0: Tensor, t: Tensor
) -> Tensor:
    """Of a unit of time: the limit of `discrete_terms` / (t - s).

        absorbing:  -alpha' / drop * -ln p(x_0) at masked tokens (MDLM, MD4),
        otherwise:  beta pi(x) sum_{y != x} [s_y - c_y + c_y ln(c_y / s_y)]

    with s the score of the clean prediction, c_y = q(y | x_0) / q(x | x_0), beta = -alpha' / alpha;
    of a `MixturePath`, whose process is another, `flow_terms`.
    """
    speed = -path.alpha_rate(t)
    if path.absorbing:
        return masked_loss(log_p, x, x0, speed / path.drop(t).clamp(min=1 / CEILING), path)
    if isinstance(path, MixturePath):
        return flow_terms(path, log_p, x, x0, t)
    here, pi_x, off, on = _at_token(path, x, t, log_p)
    alpha, drop = left_broadcast(path.alpha(t), log_p).to(log_p), _drop(path, t, log_p)
    start, end = _one_hot(x, log_p), _one_hot(x0, log_p)
    same = (x == x0).to(log_p).unsqueeze(-1)
    pi = path.pi.to(log_p)
    p = log_p.exp()
    # c_y = true / q, s_y / c_y - 1 = alpha extra / true: what vanishes with alpha is factored out
    true = alpha * end + drop * pi
    flat = p - drop * pi * here / on - end
    level = alpha * p + drop * pi * (1 - here * alpha / on)
    extra = flat + same * level / off
    given = alpha * same + off
    terms = _divergence(true, alpha * extra) * (1 - start)
    beta = left_broadcast(speed / path.alpha(t).clamp(min=1e-30), log_p).to(log_p)
    return (beta * pi_x / given * terms).sum(-1)


def score_entropy_terms(
    path: CategoricalPath, log_s: Tensor, x: Tensor, x0: Tensor, t: Tensor
) -> Tensor:
    """beta pi(x) sum_{y != x} [s_y - c_y + c_y ln(c_y / s_y)] of any positive ratios s.

    The denoising score entropy of SEDD (Lou et al., ICML 2024), whose rate matrix of the uniform
    law, divided by V, is the one here.

    Args:
        log_s: (batch, *event, states) logarithms of the score; see `predictions.log_score`.
    """
    pi_x = path.source_at(x).expand(x.shape).to(log_s).unsqueeze(-1)
    alpha, drop = (left_broadcast(v, log_s).to(log_s) for v in (path.alpha(t), path.drop(t)))
    end = functional.one_hot(x0, path.states).to(log_s)
    given = alpha * (x == x0).to(log_s).unsqueeze(-1) + drop * pi_x
    ratio = (alpha * end + drop * path.pi.to(log_s)) / torch.where(given > 0, given, 1.0)
    terms = log_s.exp() - ratio + torch.special.xlogy(ratio, ratio)
    terms = terms - torch.where(ratio > 0, ratio * log_s, 0.0)  # a score may be 0 where it should
    others = 1 - functional.one_hot(x, path.states).to(log_s)
    beta = left_broadcast(-path.alpha_rate(t) / path.alpha(t).clamp(min=1e-30), log_s).to(log_s)
    # times of no noise and of no data meet the weights 0 / 0 of a state that cannot be
    return torch.where(pi_x > 0, beta * pi_x * terms * others, 0.0).sum(-1)


def flow_terms(path: CategoricalPath, log_p: Tensor, x: Tensor, x0: Tensor, t: Tensor) -> Tensor:
    """-alpha' / drop (1 - p(x) if x = x_0 else -ln p(x_0) - p(x)), the generalised KL of a mixture
    path (discrete flow matching). The bound it makes is that of `continuous_terms` where absorbing,
    and elsewhere a looser one: of the process that jumps once.
    """
    speed = -path.alpha_rate(t) / path.drop(t).clamp(min=1 / CEILING)
    if path.absorbing:
        return masked_loss(log_p, x, x0, speed, path)
    here = at_class(log_p.exp(), x).to(log_p)
    terms = torch.where(x == x0, 1 - here, negative_log(log_p, x0) - here)
    return terms * left_broadcast(speed.clamp(max=CEILING), terms).to(terms)


def prior_terms(path: TokenPath, x0: Tensor) -> Tensor:
    """KL(q(x_1 | x_0) || pi): 0 where alpha(1) = 0, infinite where absorbing and alpha(1) > 0."""
    if isinstance(path, MatrixPath):
        last = path.cumulative[-1]
        table = (torch.special.xlogy(last, last) - torch.special.xlogy(last, path.pi)).sum(1)
        return table.clamp(min=0).to(x0.device)[x0]
    one = torch.ones((), dtype=torch.float64, device=x0.device)
    alpha, drop = path.alpha(one), path.drop(one)
    if float(alpha) == 0:
        return torch.zeros(x0.shape, dtype=torch.float64, device=x0.device)
    if path.absorbing:
        return torch.full(x0.shape, torch.inf, dtype=torch.float64, device=x0.device)
    pi = path.source_at(x0).expand(x0.shape)
    kept = alpha + drop * pi
    return torch.special.xlogy(kept, kept / pi) + drop * (1 - pi) * drop.log()


def _at_token(
    path: CategoricalPath, x: Tensor, t: Tensor, like: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p(x), pi(x), D_k for k != x, and D_x, each (batch, *event, 1)."""
    here = like.gather(-1, x.unsqueeze(-1)).exp()
    pi = path.source_at(x).expand(x.shape).to(like).unsqueeze(-1)
    off = (_drop(path, t, like) * pi).clamp(min=torch.finfo(like.dtype).tiny)
    return here, pi, off, left_broadcast(path.alpha(t), like).to(like) + off


def _drop(path: CategoricalPath, t: Tensor, like: Tensor) -> Tensor:
    """drop(t), from where on ratios over it and their squares are numbers of the dtype."""
    least = 1e-30 if like.dtype == torch.float64 else 1e-12
    return left_broadcast(path.drop(t).clamp(min=least), like).to(like)


def _one_hot(x: Tensor, like: Tensor) -> Tensor:
    return functional.one_hot(x, like.shape[-1]).to(like)


def _divergence(true: Tensor, extra: Tensor) -> Tensor:
    """b - a + a ln(a / b), a = ``true`` and b = a + ``extra``, from the difference; b if a = 0."""
    some = true > 0
    ratio = extra / torch.where(some, true, 1.0)
    least = -1 + torch.finfo(true.dtype).eps
    ratio = torch.where(some, ratio, 0.0).clamp(min=least)
    return torch.where(some, true * (ratio - torch.log1p(ratio)), extra)
