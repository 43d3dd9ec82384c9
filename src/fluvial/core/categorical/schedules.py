"""Schedules: alpha(t), the probability that a token still carries its data value at t.

alpha(0) = 1 and alpha falls. Each schedule is five functions of t, elementwise:

* ``alpha(t)`` and ``drop(t)`` = 1 - alpha(t), each by a formula of its own, as 1 - alpha loses its
  digits at small t and 1 - drop at t near 1;
* ``alpha_rate(t)`` = d alpha / dt <= 0;
* ``time(drop)``, the inverse of ``drop``.

What the literature calls alpha-bar (D3PM, DiGress), alpha (MDLM, MD4) and exp(-sigma-bar) (SEDD) is
alpha here; the kappa of flow matching, whose time runs the other way, is alpha(1 - t).

======================= =============================== ====================================
class                   alpha(t)                        known as
======================= =============================== ====================================
`Linear`                1 - (1 - end) t                 "log-linear" of SEDD and MDLM
`Cosine` (1)            cos(pi t / 2)                   cosine of MDLM; of D3PM with an offset
`Cosine` (2)            cos^2(pi t / 2)                 cosine of DiGress, with an offset
`Sine`                  1 - sin(pi t / 2)               cosine of MaskGIT and MD4
`Power`                 (1 - t)^n                       polynomial of flow matching
`Polynomial`            1 - t^w                         polynomial of MD4
`Geometric`             exp(-low^(1 - t) high^t)        geometric of SEDD
`ExponentialTilted`     -ln(1 - (1 - 1/e) (1 - t))      "log-linear" of RetroSynFlow
`Table`, `Custom`       the user's
======================= =============================== ====================================
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fluvial.core.arguments import kind_of, whole_number
from fluvial.core.categorical.draws import real_number
from fluvial.core.protocols import Noise

HALF_PI = 0.5 * math.pi


class Schedule(ABC):
    """alpha, its complement, its rate and its inverse; see the module."""

    begin: float = 1.0
    """The limit of alpha(t) for t -> 0 from above. alpha(0) itself is 1: at t = 0 there is data."""

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def drop(self, t: Tensor) -> Tensor:
        """1 - alpha, to full relative precision at small t."""

    @abstractmethod
    def alpha_rate(self, t: Tensor) -> Tensor:
        """d alpha / dt, never positive."""

    @abstractmethod
    def time(self, drop: Tensor) -> Tensor:
        """t with drop(t) = ``drop``; 1 where the schedule ends below it."""


@dataclass(frozen=True)
class Linear(Schedule):
    """alpha = 1 - (1 - end) t. With ``end`` = 1e-3 the "log-linear" noise of SEDD and MDLM.

    On an absorbing path it is the schedule 1 / (T - k + 1) of D3PM.

    Raises:
        ValueError: ``end`` = alpha(1) is not in [0, 1).
    """

    end: float = 0.0

    def __post_init__(self) -> None:
        real_number("end", self.end)
        if not 0 <= self.end < 1:
            raise ValueError(f"end must lie in [0, 1), got {self.end}")

    def alpha(self, t: Tensor) -> Tensor:
        return (1 - t) + self.end * t

    def drop(self, t: Tensor) -> Tensor:
        return (1 - self.end) * t

    def alpha_rate(self, t: Tensor) -> Tensor:
        return torch.full_like(t, self.end - 1)

    def time(self, drop: Tensor) -> Tensor:
        return (drop / (1 - self.end)).clamp(max=1)


@dataclass(frozen=True)
class Cosine(Schedule):
    """alpha = (cos a(t) / cos a(0))^power, a(t) = (pi / 2) (t + offset) / (1 + offset).

    Power 1 is the cosine of MDLM and, with ``offset`` 0.008 and its last step clamped
    (`d3pm_cosine`), of D3PM; power 2 with ``offset`` 0.008 that of DiGress.

    Raises:
        ValueError: ``power`` or ``offset`` is not positive (an offset may be 0) and finite.
    """

    power: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        real_number("power", self.power)
        real_number("offset", self.offset)
        if not (0 < self.power < math.inf and 0 <= self.offset < math.inf):
            raise ValueError(
                f"need power > 0 and offset >= 0, finite, got {self.power} and {self.offset}"
            )

    @property
    def _first(self) -> float:
        return HALF_PI * self.offset / (1 + self.offset)

    def alpha(self, t: Tensor) -> Tensor:
        # a sine of 1 - t is 0 at t = 1 exactly
        cosine = torch.sin(HALF_PI / (1 + self.offset) * (1 - t))
        return (cosine / math.cos(self._first)) ** self.power

    def drop(self, t: Tensor) -> Tensor:
        half = 0.5 * HALF_PI / (1 + self.offset) * t
        fall = 2 * torch.sin(half + self._first) * torch.sin(half) / math.cos(self._first)
        return -torch.expm1(self.power * torch.log1p(-fall.clamp(max=1)))

    def alpha_rate(self, t: Tensor) -> Tensor:
        speed = HALF_PI / (1 + self.offset)
        cosine, first = torch.sin(speed * (1 - t)), math.cos(self._first)
        sine = torch.sin(speed * (t + self.offset))
        return -self.power * speed * sine / first * (cosine / first) ** (self.power - 1)

    def time(self, drop: Tensor) -> Tensor:
        fall = -torch.expm1(torch.log1p(-drop) / self.power)
        versine = 2 * math.sin(0.5 * self._first) ** 2 + math.cos(self._first) * fall
        angle = 2 * torch.asin((0.5 * versine).sqrt())
        return ((angle - self._first) * (1 + self.offset) / HALF_PI).clamp(0, 1)


@dataclass(frozen=True)
class Sine(Schedule):
    """alpha = 1 - sin(pi t / 2): the "cosine" of MaskGIT (Chang, 2022) and MD4 (Shi, 2024)."""

    def alpha(self, t: Tensor) -> Tensor:
        return 2 * torch.sin(0.5 * HALF_PI * (1 - t)).square()

    def drop(self, t: Tensor) -> Tensor:
        return torch.sin(HALF_PI * t)

    def alpha_rate(self, t: Tensor) -> Tensor:
        return -HALF_PI * torch.sin(HALF_PI * (1 - t))

    def time(self, drop: Tensor) -> Tensor:
        return torch.asin(drop) / HALF_PI


@dataclass(frozen=True)
class Power(Schedule):
    """alpha = (1 - t)^n: the polynomial schedule of discrete flow matching (Gat et al., 2024).

    Raises:
        ValueError: ``n`` is not positive and finite.
    """

    n: float = 2.0

    def __post_init__(self) -> None:
        real_number("n", self.n)
        if not 0 < self.n < math.inf:
            raise ValueError(f"n must be positive and finite, got {self.n}")

    def alpha(self, t: Tensor) -> Tensor:
        return (1 - t) ** self.n

    def drop(self, t: Tensor) -> Tensor:
        return -torch.expm1(self.n * torch.log1p(-t))

    def alpha_rate(self, t: Tensor) -> Tensor:
        return -self.n * (1 - t) ** (self.n - 1)

    def time(self, drop: Tensor) -> Tensor:
        return -torch.expm1(torch.log1p(-drop) / self.n)


@dataclass(frozen=True)
class Polynomial(Schedule):
    """alpha = 1 - t^w (MD4, Shi et al., 2024).

    Raises:
        ValueError: ``w`` is not positive and finite.
    """

    w: float = 2.0

    def __post_init__(self) -> None:
        real_number("w", self.w)
        if not 0 < self.w < math.inf:
            raise ValueError(f"w must be positive and finite, got {self.w}")

    def alpha(self, t: Tensor) -> Tensor:
        return -torch.expm1(self.w * t.log())

    def drop(self, t: Tensor) -> Tensor:
        return t**self.w

    def alpha_rate(self, t: Tensor) -> Tensor:
        return -self.w * t ** (self.w - 1)

    def time(self, drop: Tensor) -> Tensor:
        return drop ** (1 / self.w)


@dataclass(frozen=True)
class Geometric(Schedule):
    """alpha = exp(-low^(1 - t) high^t) for t > 0 (SEDD's uniform noise, Lou et al., 2024).

    It begins at exp(-low), and ends at exp(-high) > 0.

    Raises:
        ValueError: not 0 < low < high < inf.
    """

    low: float = 1e-4
    high: float = 20.0

    def __post_init__(self) -> None:
        real_number("low", self.low)
        real_number("high", self.high)
        if not 0 < self.low < self.high < math.inf:
            raise ValueError(f"need 0 < low < high < inf, got low={self.low}, high={self.high}")

    @property
    def begin(self) -> float:  # type: ignore[override]
        return math.exp(-self.low)

    def _total(self, t: Tensor) -> Tensor:
        return self.low ** (1 - t) * self.high**t

    def alpha(self, t: Tensor) -> Tensor:
        return torch.where(t == 0, 1.0, torch.exp(-self._total(t)))

    def drop(self, t: Tensor) -> Tensor:
        return torch.where(t == 0, 0.0, -torch.expm1(-self._total(t)))

    def alpha_rate(self, t: Tensor) -> Tensor:
        total = self._total(t)
        return -math.log(self.high / self.low) * total * torch.exp(-total)

    def time(self, drop: Tensor) -> Tensor:
        total = -torch.log1p(-drop)
        return (torch.log(total / self.low) / math.log(self.high / self.low)).clamp(0, 1)


@dataclass(frozen=True)
class ExponentialTilted(Schedule):
    """alpha = -ln(1 - (1 - 1/e) (1 - t)), the "log-linear" schedule of RetroSynFlow."""

    def alpha(self, t: Tensor) -> Tensor:
        return -torch.log1p(math.expm1(-1) * (1 - t))

    def drop(self, t: Tensor) -> Tensor:
        return torch.log1p(math.expm1(1) * t)

    def alpha_rate(self, t: Tensor) -> Tensor:
        return -math.expm1(1) / (1 + math.expm1(1) * t)

    def time(self, drop: Tensor) -> Tensor:
        return (torch.expm1(drop) / math.expm1(1)).clamp(max=1)  # a rounding exceeds 1


class Table(Schedule):
    """alpha at t = 1/T, 2/T, ..., 1, linear in between: a schedule of discrete steps.

    Args:
        values: T numbers that fall strictly, or stay at 0, within [0, 1).

    Raises:
        ValueError: they do not.
    """

    def __init__(self, values: Sequence[float] | Tensor) -> None:
        try:
            given = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"values must be numbers, got {values!r}") from None
        if given.ndim != 1 or len(given) == 0:
            raise ValueError(f"values must have shape (T,) with T >= 1, got {tuple(given.shape)}")
        self.values = torch.cat([torch.ones(1, dtype=torch.float64), given])
        falls = (self.values.diff() < 0) | ((self.values[1:] == 0) & (self.values[:-1] == 0))
        if not bool((falls & (given >= 0)).all()):
            raise ValueError(f"values must fall from below 1 to 0 or more, got {given.tolist()}")
        self.steps = len(given)

    def _left(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(alpha at the left end of the interval of t, alpha at the right end, share of the way)"""
        table = self.values.to(t.device, t.dtype)
        position = t * self.steps
        near = position.round()
        # k / T times T may miss k by a rounding
        position = torch.where((position - near).abs() < 1e-9 * self.steps, near, position)
        index = position.floor().long().clamp(0, self.steps - 1)
        return table[index], table[index + 1], position - index

    def alpha(self, t: Tensor) -> Tensor:
        left, right, share = self._left(t)
        return left + (right - left) * share

    def drop(self, t: Tensor) -> Tensor:
        left, right, share = self._left(t)
        return (1 - left) + (left - right) * share

    def alpha_rate(self, t: Tensor) -> Tensor:
        left, right, _ = self._left(t)
        return (right - left) * self.steps

    def time(self, drop: Tensor) -> Tensor:
        table = (1 - self.values).to(drop.device, drop.dtype)
        index = torch.searchsorted(table, drop.contiguous()).clamp(1, self.steps)
        left, right = table[index - 1], table[index]
        share = (drop - left) / torch.where(right > left, right - left, 1.0)
        return ((index - 1 + share) / self.steps).clamp(0, 1)


def d3pm_cosine(steps: int) -> Table:
    """The cosine schedule of D3PM with ``steps`` steps: alpha-bar of 1 - beta_k, beta_k <= 0.999.

    It does not end at 0: with 4 steps at 3.8e-4 (Austin et al., NeurIPS 2021).
    """
    steps = whole_number("steps", steps)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    times = torch.arange(steps + 1, dtype=torch.float64) / steps
    whole = torch.cos(HALF_PI * (times + 0.008) / 1.008)
    return Table((whole[1:] / whole[:-1]).clamp(min=1e-3).cumprod(0))


class Custom(Schedule):
    """The user's alpha; its rate by forward-mode differentiation, its inverse by bisection.

    Args:
        alpha_of: elementwise function of a tensor of times, differentiable by torch.
        drop_of: 1 - alpha; by default computed so, which loses digits at small t.

    Raises:
        ValueError: alpha(0) is not 1, or alpha leaves [0, 1] or does not fall.
    """

    def __init__(
        self,
        alpha_of: Callable[[Tensor], Tensor],
        drop_of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        for name, function in (("alpha_of", alpha_of), ("drop_of", drop_of)):
            if not callable(function) and (function is not None or name == "alpha_of"):
                raise TypeError(f"{name} must be a function of times, got {kind_of(function)}")
        grid = torch.linspace(0, 1, 1001, dtype=torch.float64)
        values = alpha_of(grid)
        if getattr(values, "shape", None) != grid.shape or not bool(
            ((values >= 0) & (values <= 1 + 1e-9)).all()
        ):
            raise ValueError(f"alpha_of must map (n,) times to (n,) values in [0, 1], got {values}")
        if abs(float(values[0]) - 1) > 1e-6:
            raise ValueError(f"alpha_of(0) must be 1, got {float(values[0])}")
        if not bool((values.diff() <= 0).all()):
            raise ValueError("alpha_of must not rise as t grows from 0 to 1")
        self.alpha_of, self.drop_of = alpha_of, drop_of

    def alpha(self, t: Tensor) -> Tensor:
        return self.alpha_of(t)

    def drop(self, t: Tensor) -> Tensor:
        return 1 - self.alpha_of(t) if self.drop_of is None else self.drop_of(t)

    def alpha_rate(self, t: Tensor) -> Tensor:
        t = t.contiguous()  # jvp refuses a time that was expanded to the rows
        return torch.func.jvp(self.alpha_of, (t,), (torch.ones_like(t),))[1].to(t.dtype)

    def time(self, drop: Tensor) -> Tensor:
        low, high = torch.zeros_like(drop), torch.ones_like(drop)
        for _ in range(60):
            middle = (low + high) / 2
            below = self.drop(middle) < drop
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high


# Laws of training times that follow the schedule, for `fluvial.core.time.Stratified` or alone.


def _check_schedule(schedule: object) -> None:
    if not isinstance(schedule, Schedule):
        got = kind_of(schedule)
        raise TypeError(f"schedule must be a Schedule, such as Linear(), got {got}")


@dataclass(frozen=True)
class UniformDrop:
    """Training times with drop(t) uniform on [0, drop(1)]: as many noised tokens of each share.

    The bound of a network without time does not change, its variance does.
    """

    schedule: Schedule

    def __post_init__(self) -> None:
        _check_schedule(self.schedule)

    def __call__(self, like: Tensor, noise: Noise, tag: str = "time") -> Tensor:
        """(batch,) times in the dtype and on the device of ``like``."""
        return self.quantile(noise.uniform(like.new_empty(like.shape[:1]), tag))

    def quantile(self, u: Tensor) -> Tensor:
        return self.schedule.time(u * self._last(u))

    def density(self, t: Tensor) -> Tensor:
        return -self.schedule.alpha_rate(t) / self._last(t)

    def _last(self, like: Tensor) -> Tensor:
        return self.schedule.drop(torch.ones_like(like))


@dataclass(frozen=True)
class LogDrop:
    """Training times with ln drop(t) uniform on [ln low, ln drop(1)].

    On an absorbing path the weight of the continuous bound over this density is constant. The strip
    drop < ``low``, about low * L of a token's loss, is left out.

    Raises:
        ValueError: ``low`` is not in (0, 1).
    """

    schedule: Schedule
    low: float = 1e-4

    def __post_init__(self) -> None:
        _check_schedule(self.schedule)
        real_number("low", self.low)
        if not 0 < self.low < 1:
            raise ValueError(f"low must lie in (0, 1), got {self.low}")

    def __call__(self, like: Tensor, noise: Noise, tag: str = "time") -> Tensor:
        """(batch,) times in the dtype and on the device of ``like``."""
        return self.quantile(noise.uniform(like.new_empty(like.shape[:1]), tag))

    def quantile(self, u: Tensor) -> Tensor:
        return self.schedule.time(self.low * torch.exp(u * self._span(u)))

    def density(self, t: Tensor) -> Tensor:
        return -self.schedule.alpha_rate(t) / (self.schedule.drop(t) * self._span(t))

    def _span(self, like: Tensor) -> Tensor:
        return torch.log(self.schedule.drop(torch.ones_like(like)) / self.low)
