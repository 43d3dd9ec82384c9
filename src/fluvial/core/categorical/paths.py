"""Categorical paths: tokens that keep their data value with probability alpha(t), or are redrawn.

Given x_0 the tokens of a state are independent, each with

    q(x_t | x_0) = alpha_t [x_t = x_0] + (1 - alpha_t) pi(x_t),

where pi is the source: a mask symbol that data never has (absorbing), the uniform law, or any law
over the classes, such as their frequencies (marginal). A step from s to t > s is the matrix
r I + (1 - r) 1 pi^T with r = alpha_t / alpha_s; such matrices multiply as their alphas do, so that
discrete time, t = k / T, and continuous time are one path (Austin et al., NeurIPS 2021; Campbell et
al., NeurIPS 2022).

With p the law of the clean token given all of x_t, what the reverse step draws from is

    D_k = alpha_t [k = x_t] + drop_t pi(x_t),    w_k = p_k / D_k,    W = sum_k w_k,
    P(x_s = j) = (r [j = x_t] + (1 - r) pi(x_t)) (alpha_s w_j + drop_s pi(j) W).

D takes two values only, so nothing is ever of size V x V, and no more than p itself of size V.

Times may be (), (batch,) or shaped as the state: an element may have a clock of its own.
"""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fluvial.core.arguments import kind_of
from fluvial.core.categorical.draws import (
    Moves,
    at_class,
    check_mask,
    check_prediction,
    check_times,
    check_tokens,
    double,
    move,
    real_tokens,
    uniform,
)
from fluvial.core.categorical.schedules import Linear, Schedule
from fluvial.core.protocols import Draw, Noise, left_broadcast

Source = Literal["absorbing", "uniform"]


class CategoricalPath:
    """x_t = x_0 with probability alpha(t), else a draw of the source; the discrete diffusion.

    Args:
        classes: V, the number of symbols of the data, 0 .. V - 1.
        source: "absorbing", with the mask symbol V (`mask_token`); "uniform"; or (V,)
            probabilities, the marginal path (DiGress, Vignac et al., ICLR 2023).
        schedule: alpha.

    Conditions: ``mask`` (batch, *event) bool, False for padding, which no method changes.

    Raises:
        ValueError: ``classes`` < 1, or probabilities that are negative, not finite, or do not sum
            to 1 within 1e-6; in a call, tokens out of range (on the CPU), a mask symbol in data,
            t < s, times out of [0, 1].
        TypeError: ``classes`` is no integer or ``schedule`` no `Schedule`; in a call, tokens that
            are not int64, times that are no tensors.
    """

    def __init__(
        self,
        classes: int,
        source: Source | Tensor = "absorbing",
        schedule: Schedule | None = None,
    ) -> None:
        try:
            self.classes = classes = operator.index(classes)
        except TypeError:
            raise TypeError(f"classes must be an integer, got {classes!r}") from None
        if classes < 1:
            raise ValueError(f"classes must be at least 1, got {classes}")
        self.schedule = Linear() if schedule is None else schedule
        if not isinstance(self.schedule, Schedule):
            raise TypeError(f"schedule must be a Schedule, such as Linear(), got {schedule!r}")
        self.mask_token: int | None = None
        self.kind: str = source if isinstance(source, str) else "marginal"
        if isinstance(source, Tensor):
            pi = source.detach().double().cpu()
            if (
                pi.shape != (classes,)
                or not bool((pi >= 0).all())
                or abs(float(pi.sum()) - 1) > 1e-6
            ):
                raise ValueError(
                    f"source must be ({classes},) probabilities that sum to 1, got {source}"
                )
            self.pi = pi / pi.sum()
        elif source == "uniform":
            self.pi = torch.full((classes,), 1 / classes, dtype=torch.float64)
        elif source == "absorbing":
            self.mask_token = classes
            self.pi = functional.one_hot(torch.tensor(classes), classes + 1).double()
        else:
            raise ValueError(
                f"source must be 'absorbing', 'uniform' or a tensor of probabilities, got {source}"
            )

    @property
    def states(self) -> int:
        """Symbols of x_t: V, or V + 1 with the mask symbol."""
        return len(self.pi)

    @property
    def absorbing(self) -> bool:
        return self.mask_token is not None

    def masked(self, x: Tensor) -> Tensor:
        """Which tokens hold the mask symbol, (batch, *event) bool; on other paths none do."""
        return x == self.classes

    # The schedule

    def alpha(self, t: Tensor) -> Tensor:
        """The probability that a token is still that of the data."""
        return self.schedule.alpha(t)

    def drop(self, t: Tensor) -> Tensor:
        """1 - alpha, precise at small t."""
        return self.schedule.drop(t)

    def alpha_rate(self, t: Tensor) -> Tensor:
        """d alpha / dt."""
        return self.schedule.alpha_rate(t)

    # Path

    def source(self, like: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """x_1: independent draws of pi, in the shape of ``like``; where padded, ``like`` itself."""
        mask = cond.get("mask")
        check_like(like, mask)
        x = self.draw_source(like, noise, "source")
        return x if mask is None else torch.where(mask, x, like)

    def sample(
        self, x0: Tensor, t: Tensor, noise: Noise, x1: Tensor | None = None, **cond: Any
    ) -> Draw:
        """A draw of q(x_t | x_0): each token of ``x1``, a draw of the source, with 1 - alpha."""
        self.check_data(x0, cond.get("mask"))
        check_times(x0, t)
        noised = uniform(x0, noise, "noised") < left_broadcast(self.drop(t), x0)
        mask = cond.get("mask")
        noised = noised if mask is None else noised & mask
        if x1 is None:
            x1 = self.draw_source(x0, noise, "source")
        else:
            self.check_end(x1, x0, mask)

        def target(kind: str) -> Tensor:
            if kind not in ("clean", "cavity"):
                raise ValueError(
                    f"{type(self).__name__} has targets 'clean' and 'cavity', got {kind!r}"
                )
            return x0

        return Draw(torch.where(noised, x1, x0), x0, x1, t, target)

    def posterior(
        self, x: Tensor, clean: Tensor, t: Tensor, s: Tensor, noise: Noise, **cond: Any
    ) -> Tensor:
        """A draw of P(x_s | x_t = x), ``clean`` the law of the clean token given all of x_t.

        Args:
            clean: (batch, *event, V) probabilities, or (batch, *event) tokens. Not a cavity: see
                `fluvial.core.categorical.predictions`.
        """
        moves = self.moves(real_tokens(x, cond.get("mask")), clean, t, s)
        return self.draw(x, moves, clean, noise, "posterior", **cond)

    def transition(self, x: Tensor, s: Tensor, t: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """A draw of q(x_t | x_s = x)."""
        self._check_step(x, t, s, cond.get("mask"))
        lost = self._lost(s, t)
        noised = uniform(x, noise, "transition") < left_broadcast(lost, x)
        mask = cond.get("mask")
        noised = noised if mask is None else noised & mask
        return torch.where(noised, self.draw_source(x, noise, "transition source"), x)

    def readout(self, x: Tensor, clean: Tensor) -> Tensor:
        return x

    # The reverse step

    def moves(self, x: Tensor, clean: Tensor, t: Tensor, s: Tensor) -> Moves:
        """P(x_s | x_t = x) as `Moves`: the chance to change at all, and where to."""
        self._check_step(x, t, s)
        check_prediction(clean, x, self.classes)
        if self.absorbing:
            reveal = left_broadcast(self.gap(s, t) / self._positive(self.drop(t)), x)
            leave = torch.where(self.masked(x), reveal.to(x.device), 0.0).to(double(x))
            return Moves(leave, torch.ones(()), None)
        p, pi = at_class(clean, x), self.source_at(x)
        alpha_s, drop_s, drop_t = (
            left_broadcast(value, x).to(x.device)
            for value in (self.alpha(s), self.drop(s), self.drop(t))
        )
        lost = left_broadcast(self._lost(s, t), x).to(x.device)
        spread = self.spread(p, pi, t)
        leave = lost / self._positive(drop_t) * (alpha_s * (1 - p) + drop_s * (1 - pi) * spread)
        return Moves(torch.where(pi > 0, leave, 0.0), alpha_s, drop_s * spread)

    def rates(self, x: Tensor, clean: Tensor, t: Tensor) -> Moves:
        """Rates of the reverse process, a unit of time travelled towards the data.

        R(y) = beta(t) pi(x) s_y for y != x, with beta = -alpha' / alpha and s the score: the limit
        of P(x_s = y) / (t - s). Only at alpha(t) > 0, unless absorbing.
        """
        self._check_step(x, t, t)
        check_prediction(clean, x, self.classes)
        speed = left_broadcast(-self.alpha_rate(t) / self._positive(self.drop(t)), x).to(x.device)
        if self.absorbing:
            leave = torch.where(self.masked(x), speed, 0.0).to(double(x))
            return Moves(leave, torch.ones(()), None)
        p, pi = at_class(clean, x), self.source_at(x)
        odds = left_broadcast(self.drop(t) / self.alpha(t), x).to(x.device)
        spread = self.spread(p, pi, t)
        leave = speed * ((1 - p) + odds * (1 - pi) * spread)
        one = torch.ones((), dtype=double(x))
        return Moves(torch.where(pi > 0, leave, 0.0), one, odds * spread)

    def noising(self, x: Tensor, t: Tensor) -> Tensor:
        """beta(t) = -alpha' / alpha, the rate of a redraw from pi on the way to the source."""
        return left_broadcast(-self.alpha_rate(t) / self.alpha(t), x).to(x.device)

    def draw(
        self, x: Tensor, moves: Moves, clean: Tensor, noise: Noise, tag: str, **cond: Any
    ) -> Tensor:
        """The tokens after moves."""
        return move(x, moves, clean, self.pi, self.classes, noise, tag, cond.get("mask"))

    # Pieces of the formulas

    def spread(self, p: Tensor, pi: Tensor, t: Tensor) -> Tensor:
        """drop_t pi(x_t) W = 1 - p_x alpha_t / D_x: in [0, 1], W the sum of p / D."""
        alpha, drop = (left_broadcast(v, p).to(p.device) for v in (self.alpha(t), self.drop(t)))
        off = drop * pi
        return 1 - p * alpha / self._positive(alpha + off)

    def source_at(self, x: Tensor) -> Tensor:
        """pi(x), (batch, *event) or (), float64."""
        if self.kind == "uniform":
            return torch.tensor(1 / self.classes, dtype=double(x), device=x.device)
        return self.pi.to(x.device, double(x))[x]

    def draw_source(self, like: Tensor, noise: Noise, tag: str) -> Tensor:
        """Independent draws of pi, (batch, *event) int64."""
        if self.absorbing:
            return torch.full(like.shape, self.classes, dtype=torch.int64, device=like.device)
        u = uniform(like, noise, tag)
        if self.kind == "uniform":
            return (u * self.classes).long().clamp(max=self.classes - 1)
        reach = self.pi.cumsum(0).to(u.device, u.dtype)
        reach = reach / reach[-1]
        # the first class that reaches beyond u: one of probability 0 reaches no further than that
        # before it
        return torch.searchsorted(reach, u, right=True).clamp(max=self._last)

    @property
    def _last(self) -> int:
        return int(self.pi.nonzero()[-1])

    def gap(self, s: Tensor, t: Tensor) -> Tensor:
        """alpha_s - alpha_t from whichever of alpha and drop is the smaller, so the preciser."""
        early = (self.drop(t) < 0.5) | (self.drop(s) == 0)  # at s = 0 all that is dropped
        return torch.where(early, self.drop(t) - self.drop(s), self.alpha(s) - self.alpha(t))

    def _lost(self, s: Tensor, t: Tensor) -> Tensor:
        """1 - alpha_t / alpha_s; where alpha_s is 0, all is lost unless s = t."""
        alpha = self.alpha(s)
        ratio = self.gap(s, t) / self._positive(alpha)
        return torch.where(alpha > 0, ratio, (t > s).to(alpha.dtype))

    @staticmethod
    def _positive(value: Tensor) -> Tensor:
        """``value``, and 1 where it is 0: what it divides is 0 there."""
        return torch.where(value > 0, value, 1.0)

    def check_data(self, x0: Tensor, mask: Tensor | None = None) -> None:
        """Raise unless ``x0`` is tokens of the data; values are looked at on the CPU only."""
        check_tokens(x0, self.classes, mask, self.mask_token)

    def check_end(self, x1: Tensor, x: Tensor, mask: Tensor | None = None) -> None:
        """Raise unless ``x1`` is states in the shape of ``x``, masks where absorbing; values on
        the CPU only."""
        if isinstance(x1, Tensor) and x1.shape != x.shape:
            raise ValueError(f"x1 must have shape {tuple(x.shape)}, got {tuple(x1.shape)}")
        check_tokens(x1, self.states, mask, name="x1")
        if self.absorbing and x1.device.type == "cpu":
            masks = self.masked(x1)
            if not bool((masks if mask is None else masks | ~mask).all()):
                raise ValueError(
                    f"x1 of an absorbing path must hold the mask symbol {self.classes} alone"
                )

    def _check_step(self, x: Tensor, t: Tensor, s: Tensor, mask: Tensor | None = None) -> None:
        check_tokens(x, self.states, mask, name="x")
        check_times(x, t, s)
        check_order(t, s)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.classes}, {self.kind!r}, {self.schedule})"


def check_like(like: Tensor, mask: Tensor | None) -> None:
    """Raise unless ``like`` is a tensor, and, where padding is taken from it, of int64."""
    if not isinstance(like, Tensor):
        raise TypeError(f"like must be a tensor, got {kind_of(like)}")
    check_mask(like, mask)
    if mask is not None and like.dtype != torch.int64:
        raise TypeError(f"like must be int64 tokens where there is a mask, got {like.dtype}")


def check_order(t: Tensor, s: Tensor) -> None:
    """Raise unless s <= t; looked at where both are on the host."""
    if t.device.type == s.device.type == "cpu" and bool((s > t).any()):
        raise ValueError(f"s must not exceed t, got s={s.tolist()} and t={t.tolist()}")


class MixturePath(CategoricalPath):
    """The mixture path of discrete flow matching: x_t = x_0 with probability alpha(t), else x_1.

    The law of x_t given x_0 is that of `CategoricalPath`; the process is another. Here a token
    jumps once, between its two ends, so that the reverse step is: with probability
    rho = (alpha_s - alpha_t) / drop_t redraw the token from the clean prediction, else stay. Its
    probability velocity (Gat et al., NeurIPS 2024; Campbell et al., ICML 2024) is, a unit of time
    travelled,

        towards the data:    -alpha' / drop  (p - [. = x]),
        towards the source:  -alpha' / alpha (pi - [. = x]),  or with [. = x_1] for pi,

    and any multiple of both together leaves every x_t as it is (`TauLeaping`'s ``corrector``).
    Absorbing, it is the diffusion. With data as x_1 (a coupling, retrosynthesis) it is the jump
    bridge (Igashov et al., ICLR 2024): give ``x1`` to `sample`, and to `simulate` as a condition,
    for `transition`, the corrector and the field, which must see x_1 for the corrector to be exact.

    Args:
        classes, source, schedule: as `CategoricalPath`.
    """

    def moves(self, x: Tensor, clean: Tensor, t: Tensor, s: Tensor) -> Moves:
        self._check_step(x, t, s)
        check_prediction(clean, x, self.classes)
        jump = left_broadcast(self.gap(s, t) / self._positive(self.drop(t)), x).to(x.device)
        return Moves(jump * (1 - at_class(clean, x)), torch.ones((), dtype=double(x)), None)

    def rates(self, x: Tensor, clean: Tensor, t: Tensor) -> Moves:
        self._check_step(x, t, t)
        check_prediction(clean, x, self.classes)
        speed = left_broadcast(-self.alpha_rate(t) / self._positive(self.drop(t)), x).to(x.device)
        return Moves(speed * (1 - at_class(clean, x)), torch.ones((), dtype=double(x)), None)

    def source_at(self, x: Tensor, x1: Tensor | None = None) -> Tensor:
        """pi(x), or [x = x_1] of a given end."""
        if x1 is None or self.absorbing:  # where absorbing all ends are masks
            return super().source_at(x)
        return (x == x1).to(double(x))

    def draw(
        self, x: Tensor, moves: Moves, clean: Tensor, noise: Noise, tag: str, **cond: Any
    ) -> Tensor:
        x1, mask = cond.get("x1"), cond.get("mask")
        if x1 is not None:
            self.check_end(x1, x, mask)
        pi = self.pi if x1 is None or self.absorbing else x1
        return move(x, moves, clean, pi, self.classes, noise, tag, mask)

    def transition(self, x: Tensor, s: Tensor, t: Tensor, noise: Noise, **cond: Any) -> Tensor:
        """A draw of q(x_t | x_s = x): a jump to ``x1``, or to a draw of the source."""
        x1 = cond.get("x1")
        if x1 is None:
            return super().transition(x, s, t, noise, **cond)
        mask = cond.get("mask")
        self.check_end(x1, x, mask)
        self._check_step(x, t, s, mask)
        jumps = uniform(x, noise, "transition") < left_broadcast(self._lost(s, t), x)
        return torch.where(jumps if mask is None else jumps & mask, x1, x)


class ReferenceBridge(CategoricalPath):
    """The Markov chain of `CategoricalPath` pinned at both ends: the reciprocal class of bridges.

        q(x_t | x_0, x_1) = Q_0t(x_0, x_t) Q_t1(x_t, x_1) / Q_01(x_0, x_1)

    with Q_st the step matrices. The posterior given x_t and the clean token is that of the chain.
    As alpha(1) tends to 0 so does the dependence on x_1, and the bridge becomes the diffusion.

    Args:
        classes, source: as `CategoricalPath`, but not absorbing: its chain has one end.
        schedule: with alpha(1) > 0, such as ``Custom(lambda t: 0.2**t)``.

    Raises:
        ValueError: the source is absorbing, or alpha(1) = 0.
    """

    def __init__(self, classes: int, source: Source | Tensor, schedule: Schedule) -> None:
        super().__init__(classes, source, schedule)
        schedule = self.schedule  # None is Linear(), which ends at 0
        if self.absorbing:
            raise ValueError("source must be 'uniform' or probabilities: a mask is no end to pin")
        if not float(schedule.alpha(torch.ones((), dtype=torch.float64))) > 0:
            raise ValueError("schedule must have alpha(1) > 0: else x_1 says nothing about x_t")

    def sample(
        self, x0: Tensor, t: Tensor, noise: Noise, x1: Tensor | None = None, **cond: Any
    ) -> Draw:
        """A draw of q(x_t | x_0, x_1); x_1 by the chain itself if not given."""
        draw = super().sample(x0, t, noise, x1, **cond)
        if x1 is None:
            one = torch.ones((), dtype=torch.float64)
            x1 = self.transition(x0, torch.zeros_like(one), one, noise, **cond)
        # the product of the two matrices is a mixture: x_0, x_1, or a draw of pi
        mask = cond.get("mask")
        at_0, at_1 = self.bridge_shares(x0, real_tokens(x1, mask), t)
        u = uniform(x0, noise, "bridge")
        x = self.draw_source(x0, noise, "bridge source")
        x = torch.where(u < at_0 + at_1, x1, x)
        x = torch.where(u < at_0, x0, x)
        x = x if mask is None else torch.where(mask, x, x0)
        return Draw(x, x0, x1, t, draw.target)

    def bridge_shares(self, x0: Tensor, x1: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The shares of x_0 and x_1 in the mixture that x_t is; the rest is pi. (batch, *event)"""
        one = torch.ones((), dtype=torch.float64)
        alpha, drop = (left_broadcast(v, x0).to(x0.device) for v in (self.alpha(t), self.drop(t)))
        lost = left_broadcast(self._lost(t, one), x0).to(x0.device)
        last, pi, same = self.alpha(one).to(x0.device), self.source_at(x1), x0 == x1
        total = last * same + (1 - last) * pi
        return (
            (alpha * lost * pi + alpha * (1 - lost) * same) / total,
            drop * (1 - lost) * pi / total,
        )


# The same laws written out, (batch, *event, states): for small V, for exact evaluation and tests.


def marginal_probs(path: CategoricalPath, x0: Tensor, t: Tensor) -> Tensor:
    """q(x_t | x_0)."""
    _check_written(path, x0, t)
    start = functional.one_hot(x0, path.states).to(double(x0))
    alpha, drop = (left_broadcast(v, start).to(x0.device) for v in (path.alpha(t), path.drop(t)))
    return alpha * start + drop * path.pi.to(start)


def transition_probs(path: CategoricalPath, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
    """q(x_t | x_s = x)."""
    _check_written(path, x, s, t)
    check_order(t, s)
    start = functional.one_hot(x, path.states).to(double(x))
    lost = left_broadcast(path._lost(s, t), start).to(x.device)
    return (1 - lost) * start + lost * path.pi.to(start)


def _check_written(path: CategoricalPath, x: Tensor, *times: Tensor) -> None:
    if not isinstance(path, CategoricalPath):
        raise TypeError(f"path must be a CategoricalPath, got {path!r}")
    check_tokens(x, path.states, None, name="x")
    check_times(x, *times)


def posterior_probs(
    path: CategoricalPath, x: Tensor, clean: Tensor, t: Tensor, s: Tensor
) -> Tensor:
    """P(x_s | x_t = x): what `posterior` draws from."""
    return moves_probs(path, x, clean, path.moves(x, clean, t, s))


def rate_matrix_rows(path: CategoricalPath, x: Tensor, clean: Tensor, t: Tensor) -> Tensor:
    """Rates of the reverse process from x to every state, at x itself minus their sum."""
    moves = path.rates(x, clean, t)
    start = functional.one_hot(x, path.states).to(double(x))
    targets = _targets(path, x, clean, moves)
    return moves.leave.unsqueeze(-1) * (targets - start)


def moves_probs(
    path: CategoricalPath, x: Tensor, clean: Tensor, moves: Moves, x1: Tensor | None = None
) -> Tensor:
    """The law of the tokens after the moves, to ``x1`` if given in the place of the source."""
    start = functional.one_hot(x, path.states).to(double(x))
    leave = moves.leave.unsqueeze(-1)
    return (1 - leave) * start + leave * _targets(path, x, clean, moves, x1)


def _targets(
    path: CategoricalPath, x: Tensor, clean: Tensor, moves: Moves, x1: Tensor | None = None
) -> Tensor:
    """(batch, *event, states): where a token goes that leaves."""
    p = clean if clean.is_floating_point() else functional.one_hot(clean, path.classes)
    weights = torch.zeros((*x.shape, path.states), dtype=double(x), device=x.device)
    if moves.on_clean is not None:
        p = functional.pad(p.to(weights), (0, path.states - path.classes))
        weights = weights + p * _last_axis(moves.on_clean)
    if moves.on_source is not None:
        pi = path.pi if x1 is None else functional.one_hot(x1, path.states)
        weights = weights + pi.to(weights) * _last_axis(moves.on_source)
    weights = weights.scatter(-1, x.unsqueeze(-1), 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def _last_axis(value: Tensor) -> Tensor:
    return value.unsqueeze(-1) if value.ndim else value
