"""The reverse process of CaDDi: guess the clean tokens, noise the guess to the next level, append.

Guesses of CaDDi-AR are decoded from left to right, with the guess of the level before as draft
(semi-speculative decoding), or all tokens at once until none changes (Jacobi decoding).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from fluvial.core.categorical.draws import check_tokens, draw_classes, uniform
from fluvial.core.categorical.predictions import Tempered
from fluvial.core.protocols import Noise
from fluvial.language.caddi.context import Calls
from fluvial.networks.causal import cut

if TYPE_CHECKING:
    from fluvial.language.caddi.model import CaDDi

Rule: TypeAlias = Literal["match", "jacobi", "greedy", "ratio", "off"]
Disturb: TypeAlias = Callable[[Tensor, int, Noise], Tensor]


@dataclass(frozen=True)
class Trace:
    """How samples came to be. Of level k the index is k - 1.

    Args:
        levels: (num, T, L), x_k.
        guesses: (num, T, L), the clean tokens guessed from x_{k:T}; those of k = 1 are the samples.
        passes: (num, T) calls of the network that the row took part in.
    """

    levels: Tensor
    guesses: Tensor
    passes: Tensor

    @property
    def revised(self) -> Tensor:
        """(T,) share of the tokens whose guess at level k is not that at level k + 1; 0 at T."""
        changed = (self.guesses[:, :-1] != self.guesses[:, 1:]).double().mean((0, 2))
        return torch.cat([changed, changed.new_zeros(1)])


@dataclass(frozen=True)
class Choice:
    """How a token is chosen by its probabilities: drawn, sharpened before, or the likeliest.

    Args:
        temperature: p^(1 / temperature); 0 takes the likeliest.
        top_p: of the nucleus, in (0, 1].
    """

    temperature: float = 1.0
    top_p: float = 1.0

    def law(self, log_p: Tensor) -> Tensor:
        """(..., V) probabilities of what is drawn."""
        p = log_p.exp()
        if self.temperature in (0, 1) and self.top_p == 1:
            return p
        return Tempered(_Given(p), self.temperature or 1.0, top_p=self.top_p)(p, p)

    def draw(self, p: Tensor, u: Tensor) -> Tensor:
        """(...) classes, by inversion of ``u`` in float64."""
        return draw_classes(p, u) if self.temperature else p.argmax(-1)


@dataclass(frozen=True)
class _Given:
    """Probabilities as a field, for `Tempered`."""

    p: Tensor
    predicts: str = "clean"

    def __call__(self, x: Any, t: Any, **cond: Any) -> Tensor:
        return self.p


def verify(
    p: Tensor,
    draft: Tensor,
    u: Tensor,
    *,
    rule: Rule = "match",
    q: Tensor | None = None,
    v: Tensor | None = None,
    choice: Choice = Choice(),  # noqa: B008 (frozen)
) -> tuple[Tensor, Tensor]:
    """What the tokens of a draft become, each given the draft before it, and which are accepted.

    * "match": y_i ~ p_i, accepted where y_i is the draft's. As y_i is drawn from p_i whatever the
      draft, the result has the law of decoding without one.
    * "ratio": the draft's is accepted with probability min(1, p_i / q_i), else y_i is drawn from
      max(p_i - q_i, 0), normalised, as speculative decoding does (Leviathan et al., ICML 2023).
      Right for a draft of the law q given all that p is given. Here it is not: x_k was made of the
      draft, so that given x_k the draft is no draw of q, and what x_k shows is kept too often.

    Args:
        p: (batch, n, V) probabilities.
        draft: (batch, n) tokens.
        u: (batch, n) uniforms.
        q: (batch, n, V), the law that the draft was drawn from; of "ratio".
        v: (batch, n) further uniforms; of "ratio".

    Returns:
        (y, accepted), each (batch, n).
    """
    if rule != "ratio":
        y = choice.draw(p, u)
        return y, y == draft
    if q is None or v is None:
        raise ValueError("the ratio rule needs q and v")
    here, before = (value.gather(-1, draft.unsqueeze(-1)).squeeze(-1) for value in (p, q))
    accepted = v * before < here
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.amax(-1, keepdim=True) > 0, rest, p)
    return torch.where(accepted, draft, choice.draw(rest, u)), accepted


@dataclass
class Known:
    """Tokens that are given.

    Args:
        tokens: (batch, L).
        where: (batch, L) bool.
    """

    tokens: Tensor
    where: Tensor

    def put(self, x: Tensor) -> Tensor:
        """``x`` with the known tokens."""
        return torch.where(self.where, self.tokens, x)


def generate(
    model: CaDDi,
    like: Tensor,
    noise: Noise,
    *,
    choice: Choice,
    rule: Rule,
    known: Known | None,
    label: Tensor | None,
    guidance: float,
    disturb: Disturb | None,
) -> Trace:
    """Samples of the rows of ``like`` (batch, L), with all that led to them."""
    process, steps = model.levels, model.steps
    shape = len(like), steps, model.length
    levels, guesses = like.new_empty(shape), like.new_empty(shape)
    passes = like.new_ones(shape[:2])
    calls = Calls(model, label, guidance)
    decoder = Decoder(calls, choice, rule, known) if model.variant == "ar" else None
    guess = like
    for k in range(steps, 0, -1):
        part = noise.at(k)
        if k < steps:
            x = process.renoise(guess, k, part)
        else:
            x = process.path.draw_source(like, part, "source")
            if known is not None and process.alphas[k] > 0:
                x = torch.where(known.where, process.renoise(known.tokens, k, part), x)
        levels[:, k - 1] = x if disturb is None else _disturbed(disturb, x, k, part, process.states)
        u = uniform(like, part, "guess")
        if decoder is not None:
            v = uniform(like, part, "accept") if rule == "ratio" else None
            guess, passes[:, k - 1] = decoder(levels, k, u, v)
        else:
            if model.augmented:
                log_p = calls.tail(levels, k, levels[:, k - 1, :-1], at=k)
            else:
                log_p = calls.blocks(levels[:, k - 1 : k], (k,)).squeeze(1)
            guess = choice.draw(choice.law(log_p), u)
            guess = guess if known is None else known.put(guess)
        guesses[:, k - 1] = guess
    return Trace(levels, guesses, passes)


def _disturbed(disturb: Disturb, x: Tensor, k: int, noise: Noise, states: int) -> Tensor:
    """What stands for the level x_k; one row or number for all would be copied without a word."""
    found = disturb(x, k, noise.at(0))
    check_tokens(found, states, None, name="what disturb returns")
    if found.shape != x.shape:
        raise ValueError(f"disturb must return {tuple(x.shape)}, got {tuple(found.shape)}")
    return found


class Decoder:
    """Guesses from left to right, with the last guess as draft; of "jacobi" see `_at_once`.

    One call verifies the draft. Of each row the tokens before the first that is refused stay, that
    one is corrected, and those after it are decoded one a call. Rows go on from where they are:
    each with its own position, and blind to what of its own draft was refused; rows that are done
    leave the batch. How many go on in each call is asked of an accelerator once a level.
    """

    def __init__(self, calls: Calls, choice: Choice, rule: Rule, known: Known | None) -> None:
        self.calls, self.choice, self.rule, self.known = calls, choice, rule, known
        self.draft: Tensor | None = None
        self.law: Tensor | None = None  # (batch, L, V) that the draft was drawn from

    def __call__(
        self, levels: Tensor, k: int, u: Tensor, v: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(guess (batch, L), calls of each row)."""
        if self.rule == "jacobi":
            return self._at_once(levels, k, u)
        calls, choice, known = self.calls, self.choice, self.known
        batch, length = u.shape
        trusted = self.draft is not None and self.rule != "off"
        draft = self.draft if trusted else None
        if draft is None and known is not None:
            draft = known.put(torch.zeros_like(known.tokens))
        tail = levels.new_empty(batch, 0) if draft is None else draft[:, :-1]
        p = choice.law(calls.tail(levels, k, tail, at=0))
        law = p.new_empty(batch, length, p.shape[-1]) if self.rule == "ratio" else None
        if law is not None:
            law[:, : p.shape[1]] = p
        if draft is None:
            x = torch.zeros_like(levels[:, 0])
            x[:, :1] = choice.draw(p, u[:, :1])
            first = torch.zeros(batch, dtype=torch.int64)  # on the host: no need to ask
        else:
            if trusted:
                y, accepted = verify(p, draft, u, rule=self.rule, q=self.law, v=v, choice=choice)
            else:
                y, accepted = choice.draw(p, u), torch.zeros_like(draft, dtype=torch.bool)
            if known is not None:
                y, accepted = known.put(y), accepted | known.where
            refused = torch.cat([~accepted, torch.ones_like(accepted[:, :1])], 1)
            first = refused.to(torch.uint8).argmax(1)
            # up to the first that is refused, y is the draft itself
            x = y
        left = (length - 1 - first).clamp(min=0)
        order = left.argsort(descending=True, stable=True)
        counts = left[order].tolist()
        if counts[0]:
            x, law = self._rest(x, first, order.to(x.device), counts, u, tail.shape[1], law)
        self.draft, self.law = x, law
        return x, left.to(x.device) + 1

    def _at_once(self, levels: Tensor, k: int, u: Tensor) -> tuple[Tensor, Tensor]:
        """The fixed point of y_i = F^-1(u_i; p(. | y_<i)), F the distribution function: all tokens
        from those that stand, and again with the same uniforms, until none changes.

        Up to the first token that changes, and with it, a row is what decoding one by one draws, so
        that a call settles a token or more. What follows changes as little as p does with the token
        before it. Which rows go on is asked after every call.
        """
        calls, choice, known = self.calls, self.choice, self.known
        batch, length = u.shape
        x = torch.zeros_like(levels[:, 0]) if self.draft is None else self.draft.clone()
        x = x if known is None else known.put(x)
        p = choice.law(calls.tail(levels, k, x[:, :-1], at=0))
        kept, label = cut(calls.cache, calls.prompt), calls.label
        passes = torch.ones(batch, dtype=torch.int64, device=x.device)
        rows, begin = torch.arange(batch, device=x.device), 0  # tokens before begin are settled
        while True:
            before = x[rows, begin:]
            drawn = choice.draw(p, u[rows, begin:])
            if known is not None:
                drawn = torch.where(known.where[rows, begin:], known.tokens[rows, begin:], drawn)
            x[rows, begin:] = drawn
            changed = torch.cat(
                [drawn != before, torch.ones_like(drawn[:, :1], dtype=torch.bool)], 1
            )
            first = begin + changed.to(torch.uint8).argmax(1)
            stays = (first < length - 1).nonzero().squeeze(1)
            if not len(stays):
                break
            rows, least = rows[stays], int(first[stays].min())
            calls.cache = cut(calls.cache, calls.prompt + least)
            if len(stays) < len(drawn):
                calls.take(stays)
            place = torch.arange(least, length - 1, device=x.device)
            offset = 1 if calls.model.plain else 0
            p = choice.law(calls(x[rows, least:-1], torch.zeros_like(place), place + offset))
            passes[rows] += 1
            begin = least + 1
        calls.cache, calls.label = kept, label
        self.draft = x
        return x, passes

    def _rest(
        self,
        x: Tensor,
        first: Tensor,
        order: Tensor,
        counts: list[int],
        u: Tensor,
        tail: int,
        law: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """``x`` with all that comes after ``first`` decoded; the prompt's cache stays."""
        calls, choice, known, prompt = self.calls, self.choice, self.known, self.calls.prompt
        cache, label = calls.cache, calls.label
        plain = tail == 0  # all rows are at one place, and see all that there is
        if not plain:
            calls.take(order)
            x, first, u = x[order], first.to(x.device)[order], u[order]
            law = None if law is None else law[order]
            known = None if known is None else Known(known.tokens[order], known.where[order])
            sees = x.new_ones((len(x), prompt + tail + counts[0]), dtype=torch.bool)
            sees[:, prompt : prompt + tail] = torch.arange(tail, device=x.device) < first[:, None]
        calls.grow(counts[0])
        offset = 1 if calls.model.plain else 0
        rows = len(x)
        for step in range(counts[0]):
            active = bisect_left(counts, -step, key=lambda count: -count)  # counts > step
            if active < rows:
                rows = active
                calls.take(slice(rows))
            allowed = None
            if plain:
                place = torch.full((rows, 1), step, device=x.device)
            else:
                place = first[:rows, None] + step
                allowed = sees[:rows, None, : prompt + tail + step + 1]
            token = x[:rows].gather(1, place)
            p = choice.law(calls(token, torch.zeros_like(place), place + offset, allowed=allowed))
            y = choice.draw(p, u[:rows].gather(1, place + 1))
            if known is not None:
                there = known.where[:rows].gather(1, place + 1)
                y = torch.where(there, known.tokens[:rows].gather(1, place + 1), y)
            x[:rows].scatter_(1, place + 1, y)
            if law is not None:
                index = (place + 1).unsqueeze(-1).expand(-1, -1, p.shape[-1])
                law[:rows].scatter_(1, index, p)
        calls.cache, calls.label, calls.place = cache, label, None
        if not plain:
            back = order.argsort()
            x, law = x[back], None if law is None else law[back]
        return x, law
