"""Samplers of absorbing paths: what a mask allows that other sources do not.

============== =================================================== ================================
sampler        what a call of the field gives                      the law it samples
============== =================================================== ================================
`FirstHitting` one token a row, at the time it is revealed         the model's, no step error
`Confident`    the tokens of which the field is surest             not the model's
`Remasking`    revealed tokens, and some that are masked again     the model's one-time marginals
`Gibbs`        one visible token a row, drawn again                leaves the model's as it is
============== =================================================== ================================

All draw a token by inversion in float64, see `fluvial.core.categorical.draws`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from torch import Tensor

from fluvial.core.arguments import whole_number
from fluvial.core.categorical.draws import (
    Moves,
    at_class,
    check_law,
    check_prediction,
    check_tokens,
    double,
    move,
    real_number,
    uniform,
)
from fluvial.core.categorical.paths import CategoricalPath
from fluvial.core.categorical.samplers import clean_at
from fluvial.core.protocols import Run
from fluvial.core.time import grid_pairs


class FirstHitting:
    """Reveals the masked tokens of a row one by one, at the times at which the exact process would.

        drop(t') = drop(t) U^{1/n} with n tokens masked;  a masked token at random;  a draw at t'

    No step error: it samples the model's own law, with one call of the field a token (Zheng et al.,
    ICLR 2025). Rows have clocks of their own, and a field that sees the time is asked at the new
    one. Of the grid only its length counts, one pair a token, ``uniform_grid(L)``, and where it
    begins. In the last pair all that is still masked is drawn.

    Args:
        per_call: tokens a row and call; more than one is faster and no longer exact.

    Raises:
        ValueError: ``per_call`` < 1; in a step, a path that is not absorbing, or s > t.
    """

    def __init__(self, per_call: int = 1) -> None:
        per_call = whole_number("per_call", per_call)
        if per_call < 1:
            raise ValueError(f"per_call must be at least 1, got {per_call}")
        self.per_call = per_call

    def start(self, x: Tensor) -> Tensor:
        """drop(t) of every row; the first step sets it."""
        return torch.ones(len(x), dtype=double(x), device=x.device)

    def step(self, x: Tensor, memory: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        path = _absorbing(x, run, "FirstHitting")
        drop = path.drop(run.t).to(memory).expand_as(memory) if run.k == 0 else memory
        hidden = _hidden(x, path, run)
        left = hidden.flatten(1).sum(1)
        for k in range(self.per_call):  # the clock of each token that is revealed
            u = run.noise.uniform(drop, f"clock {k}")
            count = (left - k).clamp(min=1)
            drop = torch.where(left > k, drop * u ** (1 / count), drop)
        t = path.schedule.time(drop)
        clean = clean_at(x, run, t)
        check_prediction(clean, x, path.classes)
        chosen = hidden
        if run.s > 0:
            chosen = _first(uniform(x, run.noise, "order"), hidden, self.per_call)
        return _revealed(x, chosen, clean, path, run), drop, clean


class Confident:
    """Reveals the masked tokens of which the field is surest: MaskGIT's and LLaDA's decoding.

    After a step from t to s, ceil(N drop(s) / drop(t_0)) tokens of the N that a row began with are
    masked. It does not sample the model's law, but for ``score="random"``: taking what is likely
    first makes likely sequences likelier.

    Args:
        score: of a token: "max", its largest probability; "drawn", the probability of the token
            that was drawn for it (LLaDA); "margin", the largest less the second; "entropy", minus
            the entropy; "random". Ties go to the lower position.
        temperature: of Gumbel noise on the logarithm of the score, times t (MaskGIT, Chang et al.,
            CVPR 2022).

    Raises:
        ValueError: an unknown score, a negative temperature; in a step, a path not absorbing, or
            s > t.
    """

    def __init__(
        self,
        score: Literal["max", "drawn", "margin", "entropy", "random"] = "drawn",
        temperature: float = 0.0,
    ) -> None:
        if score not in ("max", "drawn", "margin", "entropy", "random"):
            raise ValueError(f"score must be max, drawn, margin, entropy or random, got {score!r}")
        real_number("temperature", temperature)
        if not 0 <= temperature < math.inf or (temperature and score in ("entropy", "random")):
            raise ValueError(
                "temperature must be finite and >= 0, and 0 for a score that is no probability, "
                f"got {temperature} with {score!r}"
            )
        self.score, self.temperature = score, temperature

    def start(self, x: Tensor) -> Tensor:
        """(batch, 2): tokens masked, and drop, at the start; the first step sets them."""
        return torch.ones(len(x), 2, dtype=double(x), device=x.device)

    def step(self, x: Tensor, memory: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        path = _absorbing(x, run, "Confident")
        hidden = _hidden(x, path, run)
        left = hidden.flatten(1).sum(1)
        if run.k == 0:
            first = path.drop(run.t).to(memory).expand(len(x))
            memory = torch.stack([left.to(memory), first], dim=1)
        clean = clean_at(x, run)
        check_prediction(clean, x, path.classes)
        # a rounding must not keep a token more
        share = memory[:, 0] * path.drop(run.s).to(memory) / memory[:, 1]
        keep = (share - 1e-9).ceil().clamp(min=0).long()
        tokens = _revealed(x, hidden, clean, path, run)
        score = self._score(clean, tokens, x, run)
        chosen = _first(score, hidden, left - keep)
        return torch.where(chosen, tokens, x), memory, clean

    def _score(self, clean: Tensor, tokens: Tensor, x: Tensor, run: Run) -> Tensor:
        if self.score == "random":
            return uniform(x, run.noise, "order")
        if self.score != "drawn":
            check_law("clean", clean, x, cast(CategoricalPath, run.path).classes)
        if self.score == "entropy":
            return torch.special.xlogy(clean, clean).sum(-1).to(double(x))
        if self.score == "drawn":
            value = at_class(clean, tokens)
        else:
            top = clean.topk(min(2, clean.shape[-1]), dim=-1).values.to(double(x))
            value = top[..., 0]
            if self.score == "margin" and top.shape[-1] > 1:
                value = value - top[..., 1]
        if not self.temperature:
            return value
        u = uniform(x, run.noise, "gumbel").clamp(min=2.0**-54)
        return value.log() - self.temperature * float(run.t) * (-u.log()).log()


class Remasking:
    """Ancestral steps in which visible tokens are masked again with a probability sigma (ReMDM).

        visible -> mask with sigma;   masked -> j with (alpha_s - (1 - sigma) alpha_t) / drop_t p_j

    The law of x_s given x_0 stays what it is, for 0 <= sigma <= min(1, drop_s / alpha_t) (Wang et
    al., NeurIPS 2025). Meant to repair errors of a network: with a perfect one, and equal steps,
    the dependence between tokens that is lost is more, not less.

    With "confidence" a visible token is masked with sigma n w, n the visible tokens of the row and
    w the softmax over them of minus the probability each had when it was drawn. So their mean is
    sigma, as many tokens of a row are masked in the mean as the schedule says (for eta <= 1/e,
    above which some sigma n w may be cut at 1), and one token alone, or equal probabilities, give
    "rescale". The law of a single x_s given x_0 is not kept: what was unlikely when drawn is masked
    more often, which is the purpose. Weights that sum to 1 instead, as in the published code, mask
    n times fewer, and without a reveal that makes up for it leave more masks than the schedule.

    Args:
        rule: of sigma: "cap", min(eta, largest); "rescale", eta times the largest; "confidence",
            the latter shared out, see below; "loop", "cap" in pairs (t, t) and 0 in others, on a
            grid of `remasking_loop`.
        eta: >= 0; by default 0.04 ("cap"), 0.015 ("rescale", "confidence"), 0.02 ("loop").

    Raises:
        ValueError: ``rule`` is unknown or ``eta`` out of range; in a step, a path not absorbing, or
            s > t.
    """

    def __init__(
        self,
        rule: Literal["cap", "rescale", "confidence", "loop"] = "cap",
        eta: float | None = None,
    ) -> None:
        defaults = {"cap": 0.04, "rescale": 0.015, "confidence": 0.015, "loop": 0.02}
        if rule not in defaults:
            raise ValueError(f"rule must be one of {', '.join(defaults)}, got {rule!r}")
        eta = defaults[rule] if eta is None else real_number("eta", eta)
        if not 0 <= eta < math.inf or (rule in ("rescale", "confidence") and eta > 1):
            raise ValueError(f"eta must be >= 0, and a share in [0, 1] for {rule!r}, got {eta}")
        self.rule, self.eta = rule, eta

    def start(self, x: Tensor) -> Tensor:
        """The probability each token had when it was drawn; given ones are certain."""
        return torch.ones(x.shape, dtype=double(x), device=x.device)

    def step(self, x: Tensor, memory: Tensor, run: Run) -> tuple[Tensor, Tensor, Tensor]:
        path = _absorbing(x, run, "Remasking")
        clean = clean_at(x, run)
        check_prediction(clean, x, path.classes)
        mask = run.cond.get("mask")
        remask, reveal = self.shares(x, memory, run.t, run.s, path, mask)
        hidden = path.masked(x)
        moves = Moves(torch.where(hidden, reveal, 0.0), torch.ones(()), None)
        new = path.draw(x, moves, clean, run.noise, "reveal", **run.cond)
        again = (uniform(x, run.noise, "remask") < remask) & ~hidden
        again = again if mask is None else again & mask
        new = torch.where(again, path.classes, new)
        revealed = hidden & (new < path.classes)
        memory = torch.where(revealed, at_class(clean, new), memory)
        return new, memory, clean

    def shares(
        self,
        x: Tensor,
        drawn: Tensor,
        t: Tensor,
        s: Tensor,
        path: CategoricalPath,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(sigma of the visible tokens, probability that a masked one is revealed)."""
        alpha_t, drop_t, drop_s = (
            v.to(drawn.device) for v in (path.alpha(t), path.drop(t), path.drop(s))
        )
        most = (drop_s / path._positive(alpha_t)).clamp(max=1)
        if self.rule == "cap" or (self.rule == "loop" and bool(s == t)):
            sigma = most.clamp(max=self.eta)
        elif self.rule == "loop":
            sigma = torch.zeros_like(most)
        else:
            sigma = self.eta * most
        reveal = (path.gap(s, t).to(sigma) + sigma * alpha_t) / path._positive(drop_t)
        if self.rule != "confidence":
            return sigma, reveal
        visible = ~path.masked(x)
        visible = (visible if mask is None else visible & mask).flatten(1)
        scores = torch.where(visible, -drawn.flatten(1), -torch.inf)
        weights = scores.softmax(1).nan_to_num(0.0) * visible.sum(1, keepdim=True)
        return (weights.reshape(x.shape) * sigma).clamp(max=1), reveal


def remasking_loop(
    path: CategoricalPath, steps: int, *, on: float = 0.55, off: float = 0.05, hold: float = 0.9
) -> Tensor:
    """The grid of `Remasking`'s "loop": reveal up to alpha = ``hold``, stay, reveal the rest.

    Shares 1 - on, on - off and off of the steps fall to the three parts; each of the three has one
    at least. Pairs (K, 2) of the path's own time.

    Raises:
        ValueError: a path that is not absorbing; not 0 < off < on < 1, ``hold`` not in (0, 1), or
            fewer than 3 steps.
    """
    if not isinstance(path, CategoricalPath) or not path.absorbing:
        raise ValueError(f"remasking_loop needs an absorbing path, got {path!r}")
    steps = whole_number("steps", steps)
    if not 0 < off < on < 1 or not 0 < hold < 1 or steps < 3:
        raise ValueError(
            "need 0 < off < on < 1, 0 < hold < 1 and steps >= 3, got "
            f"off={off}, on={on}, hold={hold}, steps={steps}"
        )
    first = min(max(1, round((1 - on) * steps)), steps - 2)
    last = min(max(1, round(off * steps)), steps - first - 1)
    held = path.schedule.time(torch.tensor(1 - hold, dtype=torch.float64))
    begin = held + (1 - held) * torch.linspace(1, 0, first + 1, dtype=torch.float64)
    end = held * torch.linspace(1, 0, last + 1, dtype=torch.float64)
    middle = held.expand(steps - first - last)
    return grid_pairs(torch.cat([begin, middle, end[1:]]))


class Gibbs:
    """Pairs (t, t): one visible token of each row, at random, is masked and drawn again.

    With the exact conditional law it leaves the law of the visible tokens as it is, and so corrects
    what other samplers left there. `fluvial.core.gaussian.sde.PredictorCorrector` puts it beside a
    predictor. A row without visible tokens stays. The field is asked at t, with one token masked
    more than there are.

    Raises:
        ValueError: in a step, s != t, or a path that is not absorbing.
    """

    def start(self, x: Tensor) -> None:
        return None

    def step(self, x: Tensor, memory: Any, run: Run) -> tuple[Tensor, Any, Tensor]:
        path = _absorbing(x, run, "Gibbs")
        if run.s != run.t:
            raise ValueError(f"Gibbs takes pairs (t, t), got ({float(run.t)}, {float(run.s)})")
        mask = run.cond.get("mask")
        visible = ~path.masked(x)
        visible = visible if mask is None else visible & mask
        chosen = _first(uniform(x, run.noise, "which"), visible, 1)
        x = torch.where(chosen, path.classes, x)
        clean = clean_at(x, run)
        check_prediction(clean, x, path.classes)
        return _revealed(x, chosen, clean, path, run), memory, clean


def _absorbing(x: Tensor, run: Run, sampler: str) -> CategoricalPath:
    path = run.path
    if getattr(path, "mask_token", None) is None:
        raise ValueError(f"{sampler} needs an absorbing path, got {path!r}")
    check_tokens(x, cast(CategoricalPath, path).states, run.cond.get("mask"), name="x")
    if run.s > run.t:
        raise ValueError(f"{sampler} takes pairs with s <= t, got ({float(run.t)}, {float(run.s)})")
    return cast(CategoricalPath, path)


def _hidden(x: Tensor, path: CategoricalPath, run: Run) -> Tensor:
    mask = run.cond.get("mask")
    hidden = path.masked(x)
    return hidden if mask is None else hidden & mask


def _first(score: Tensor, among: Tensor, count: Tensor | int) -> Tensor:
    """Of every row, where the ``count`` largest scores ``among`` these are; ties by position."""
    flat = torch.where(among, score, -torch.inf).flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    limit = count if isinstance(count, int) else count.unsqueeze(1)
    return (rank < limit).reshape(among.shape) & among


def _revealed(x: Tensor, chosen: Tensor, clean: Tensor, path: CategoricalPath, run: Run) -> Tensor:
    """``x`` with a draw of ``clean`` at the chosen tokens."""
    moves = Moves(chosen.to(double(x)), torch.ones(()), None)
    return move(x, moves, clean, path.pi, path.classes, run.noise, "reveal")
