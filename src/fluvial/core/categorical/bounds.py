"""Bounds on the likelihood of token data, each under its name.

A likelihood of a diffusion is a bound, and bounds differ: at T steps, in continuous time, of the
process that jumps once, with or without the prior's term. `elbo` returns a `Bound`, which says
which one it is wherever it is printed; two are comparable where their names agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fluvial.core.arguments import kind_of, whole_number
from fluvial.core.categorical.draws import (
    TOLERANCE,
    check_law,
    real_tokens,
    uniform,
)
from fluvial.core.categorical.losses import (
    continuous_terms,
    discrete_terms,
    flow_terms,
    masked_loss,
    negative_log,
    prior_terms,
    score_entropy_terms,
)
from fluvial.core.categorical.masked import Remasking
from fluvial.core.categorical.matrices import MatrixPath, TokenPath
from fluvial.core.categorical.paths import CategoricalPath, MixturePath
from fluvial.core.categorical.predictions import check_field, check_path, check_values, clean_of
from fluvial.core.noise import KeyedNoise
from fluvial.core.protocols import Field
from fluvial.core.time import Stratified

Form = Literal["discrete", "continuous", "count", "flow"]


@dataclass(frozen=True)
class Bound:
    """An upper bound on -ln p(x_0) of every row, with the name of what bounds it.

    Args:
        name: which bound, for example "ELBO at T = 1000".
        nats: (batch,) of the whole sequence, an unbiased estimate.
        tokens: (batch,) that were counted; padding is not.
    """

    name: str
    nats: Tensor
    tokens: Tensor

    @property
    def nats_per_token(self) -> float:
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def bits_per_token(self) -> float:
        return self.nats_per_token / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)

    def __str__(self) -> str:
        return (
            f"at most {self.bits_per_token:.4f} bits a token over {int(self.tokens.sum())} tokens "
            f"({self.name})"
        )


@torch.no_grad()
def elbo(
    path: TokenPath,
    field: Field,
    x0: Tensor,
    noise: KeyedNoise,
    form: Form = "continuous",
    *,
    steps: int | None = None,
    draws: int = 16,
    remasking: Remasking | None = None,
    mask: Tensor | None = None,
    **cond: Any,
) -> Bound:
    """A bound on -ln p(x_0) under the model that ``field`` makes of ``path``.

    * "discrete": of ``steps`` ancestral steps of `uniform_grid`, all of them summed (D3PM). The
      only one of a `MatrixPath`, with steps that divide its own. With ``remasking`` of its steps:
      at masked tokens (alpha_s - (1 - sigma) alpha_t) / drop_t * -ln p(x_0) (ReMDM).
    * "continuous": of the process in continuous time, by ``draws`` times a row, spread evenly
      (MDLM where absorbing, UDLM otherwise; SEDD's if the field predicts a score).
    * "count": absorbing only. The continuous bound as a sum over how many tokens are masked, which
      does not see the schedule: L / n times the loss of n masked tokens, n uniform on 1 .. L. The
      mean over all orders of the autoregressive loss; of least variance. For a field that sees t,
      its time is the one with that share of masked tokens.
    * "flow": of the mixture path; elsewhere than on absorbing paths looser than "continuous".

    Of a `MixturePath` that is not absorbing all are of its jumps: "continuous" is "flow".

    Included: the term of the prior, if alpha(1) > 0 (infinite where absorbing), and that of the
    reconstruction, if the schedule begins below 1.

    Args:
        field: of any kind; converted to a clean prediction, but for a score in "continuous".
        x0: (batch, *event) tokens.
        noise: keyed; rows default to 0 .. batch - 1.
        form: see above.
        steps: T of "discrete".
        draws: calls of the field in the other forms, over which the estimate is averaged.
        remasking: of "discrete" on an absorbing path, with the rule "cap" or "rescale".
        mask: (batch, *event) bool, False for padding, whose symbols are those of the field alone:
            never noised, never counted.
        **cond: passed on to the field, as is ``mask`` if given.

    Raises:
        ValueError: ``form`` is unknown, "count" on a path that is not absorbing, "discrete" without
            ``steps``, a number below 1; ``remasking`` with another form, path or rule; no tokens,
            or tokens out of range; a field made for another kind of path, or whose predictions are
            no probabilities, or no ratios.
        TypeError: an argument is of another type, or a class in the place of an instance.
    """
    check_path(path)
    check_field(field, path)
    if remasking is not None and not isinstance(remasking, Remasking):
        raise TypeError(f"remasking must be a Remasking, got {kind_of(remasking)}")
    draws = whole_number("draws", draws)
    if steps is not None:
        steps = whole_number("steps", steps)
    path.check_data(x0, mask)
    if not x0.numel() or (mask is not None and not bool(mask.any())):
        raise ValueError(f"x0 must hold tokens, not padding alone, got shape {tuple(x0.shape)}")
    if form not in ("discrete", "continuous", "count", "flow"):
        raise ValueError(f"form must be discrete, continuous, count or flow, got {form!r}")
    if form == "count" and not path.absorbing:
        raise ValueError(f"form 'count' needs an absorbing path, got {path!r}")
    if (form == "discrete") != (steps is not None) or min(draws, 1 if steps is None else steps) < 1:
        raise ValueError(
            f"form 'discrete', and no other, takes steps >= 1, and draws >= 1; got form={form!r}, "
            f"steps={steps}, draws={draws}"
        )
    if isinstance(path, MatrixPath) and (steps is None or path.steps % steps):
        raise ValueError(
            f"{path} has the form 'discrete' alone, with steps that divide its own, got "
            f"form={form!r} and steps={steps}"
        )
    if remasking is not None and (
        form != "discrete" or not path.absorbing or remasking.rule not in ("cap", "rescale")
    ):
        # of "confidence" sigma depends on what was drawn before, "loop" has a grid of its own
        raise ValueError(
            "remasking goes with form 'discrete', an absorbing path and the rules cap and rescale, "
            f"got {remasking.rule!r} with form={form!r} and {path!r}"
        )
    cond = cond if mask is None else {**cond, "mask": mask}
    jumps = isinstance(path, MixturePath) and not path.absorbing
    form = "flow" if jumps and form == "continuous" else form
    data = real_tokens(x0, mask)  # what terms are of; the field sees the padding as it is
    real = torch.ones_like(x0, dtype=torch.bool) if mask is None else mask
    tokens = real.flatten(1).sum(1)
    like = torch.empty(len(x0), dtype=torch.float64, device=x0.device)

    def log_clean(x: Tensor, t: Tensor) -> Tensor:
        p = clean_of(field, x, t, path, cond, check=True)
        check_law("a clean prediction", p, x, path.classes)
        total, least = p.sum(-1), p.amin(-1)
        fine = ((total - 1).abs() <= TOLERANCE) & (least >= 0)  # a NaN compares with nothing
        if not bool((fine | ~real).all()):
            raise ValueError(
                "the field must predict probabilities that sum to 1, got sums from "
                f"{float(total.min()):.4g} to {float(total.max()):.4g} and a least value of "
                f"{float(least.min()):.4g}"
            )
        return p.log()

    def noised(t: Tensor, noise: KeyedNoise) -> Tensor:
        return cast(Tensor, path.sample(x0, t, noise, **cond).x)

    def summed(terms: Tensor) -> Tensor:
        return torch.where(real, terms, 0).flatten(1).sum(1, dtype=torch.float64)

    total = torch.zeros_like(like)
    # the times of a row cover [0, 1] evenly, and so do those of a draw
    first = Stratified()(like, noise, "time")
    if form == "discrete":
        assert steps is not None
        for k in range(1, steps + 1):
            t, s = (torch.tensor(i / steps, dtype=torch.float64) for i in (k, k - 1))
            x = noised(t, noise.at(k))
            now, log_p = real_tokens(x, mask), log_clean(x, t)
            if remasking is None:
                terms = discrete_terms(path, log_p, now, data, t, s)
            else:
                absorbing = cast(CategoricalPath, path)
                _, reveal = remasking.shares(now, torch.ones(()).to(t), t, s, absorbing)
                terms = masked_loss(log_p, now, data, reveal, absorbing)
            total += summed(terms)
        name = f"ELBO{' of the mixture path' if jumps else ''} at T = {steps}"
        if remasking is not None:
            name += f", remasking ({remasking.rule}, {remasking.eta:g})"
        return Bound(name, total + summed(prior_terms(path, data)), tokens)
    path = cast(CategoricalPath, path)
    if form == "count":
        for k in range(draws):
            u = uniform(x0, noise.at(k), "order").masked_fill(~real, 2.0).flatten(1)
            share = (first + k / draws) % 1
            count = (share * tokens).floor().clamp(max=tokens - 1) + 1
            hidden = (u.argsort(1).argsort(1) < count.unsqueeze(1)).reshape(x0.shape)
            x = torch.where(hidden & real, path.classes, x0)
            t = path.schedule.time(count / tokens.clamp(min=1))
            terms = torch.where(hidden, negative_log(log_clean(x, t), data), 0)
            total += summed(terms) * tokens / count.clamp(min=1)
        return Bound("ELBO in continuous time, by counts", total / draws, tokens)
    for k in range(draws):
        # few tokens are noised at small t, and count as much: with t = u^2 the variance is finite
        u = ((first + k / draws) % 1).clamp(min=1e-12)
        t = u.square()
        x = noised(t, noise.at(k))
        now = real_tokens(x, mask)
        if form == "flow":
            terms = flow_terms(path, log_clean(x, t), now, data, t)
        elif field.predicts == "score":
            score = field(x, t, **cond)
            check_law("a score", score, x, path.states)
            check_values(score, "score", x, path, mask)
            log_s = score.scatter(-1, now.unsqueeze(-1), 1.0).log()  # 1 at y = x, as it is defined
            terms = score_entropy_terms(path, log_s, now, data, t)
        else:
            terms = continuous_terms(path, log_clean(x, t), now, data, t)
        total += summed(terms) * 2 * u / draws
    if path.schedule.begin < 1:
        t = torch.full_like(like, torch.finfo(torch.float64).tiny)
        x = noised(t, noise.at(draws))
        total += summed(negative_log(log_clean(x, t), data))
    name = {"flow": "ELBO of the mixture path in continuous time"}.get(
        form, "ELBO in continuous time"
    )
    return Bound(name, total + summed(prior_terms(path, data)), tokens)
