"""Feynman-Kac particles: samples of p(x_0) exp(scale * reward(x_0)) without gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fluvial.core.protocols import Noise, Run, State, Steering, batch_size, take


@dataclass
class FeynmanKac(Steering):
    """Groups of particles, weighted by potentials as they go, and resampled by their weights.

    Rows g n .. g n + g - 1 are the particles of output n, g = ``group``. With r_k the reward of the
    clean prediction in step k, and of the sample itself where s = 0, the potentials of step k are

        difference   exp(scale (r_k - r_(k-1))), r_(-1) = 0
        max          exp(scale max_(j <= k) r_j)
        sum          exp(scale sum_(j <= k) r_j)

    and at s = 0 what makes the product of all potentials exp(scale reward(x_0)). So the particles
    follow the law of the sampler's own x_0 tilted by exp(scale reward), as their number grows,
    whichever the potential and however rough the rewards on the way.

    A group is resampled where its effective sample size (sum w)^2 / sum w^2 is at most
    ``threshold`` times g, and always at s = 0, so that what comes out has equal weights. The
    sampler must draw noise, or else copies stay copies.

    Args:
        reward: called as ``reward(clean, **conditions)``, (batch,), and at s = 0 with the sample;
            no gradient is taken. It should be of the order of 1 / scale. -inf forbids, at positive
            scales; a group whose particles are all forbidden stays as it is.
        group: g, at least 2. A batch may be split at multiples of g only.
        scale: of the reward.
        potential: ``"difference"`` weighs gains, ``"max"`` favours particles that once were good,
            ``"sum"`` those that always are.
        resampling: ``"systematic"`` has the least noise; ``"multinomial"`` draws independently.
        threshold: in [0, 1]; 1 resamples in every step, 0 at the end only (importance sampling).
        best: return the particle of highest reward of every group, (batch / g, *event). It is not a
            draw of the tilted law.

    Raises:
        TypeError: in a call, a reward that is not a tensor.
        ValueError: a number out of range or an unknown name; in a call, a batch that is no multiple
            of ``group``, rewards that are not (batch,), or on the CPU one that is NaN or makes a
            weight infinite.

    Citation: Singhal et al., ICML 2025, arXiv 2501.06848; Del Moral, 2004.
    """

    reward: Callable[..., Tensor]
    group: int
    scale: float = 1.0
    potential: Literal["difference", "max", "sum"] = "difference"
    resampling: Literal["systematic", "multinomial"] = "systematic"
    threshold: float = 0.5
    best: bool = False

    def __post_init__(self) -> None:
        if (
            self.group < 2
            or self.group % 1
            or not math.isfinite(self.scale)
            or not 0 <= self.threshold <= 1
        ):
            raise ValueError(
                "need group >= 2, a finite scale and a threshold in [0, 1], got "
                f"{self.group}, {self.scale} and {self.threshold}"
            )
        if self.potential not in ("difference", "max", "sum"):
            raise ValueError(
                f"potential must be 'difference', 'max' or 'sum', got {self.potential!r}"
            )
        if self.resampling not in ("systematic", "multinomial"):
            raise ValueError(
                f"resampling must be 'systematic' or 'multinomial', got {self.resampling!r}"
            )

    def start(self, x: State) -> dict[str, Tensor]:
        """Of every particle: the highest and summed reward, the logarithm of all potentials so far,
        and what that was when its group was last resampled."""
        size = batch_size(x)
        if size == 0 or size % self.group:
            raise ValueError(f"a batch must be a multiple of group={self.group}, got {size}")
        like = x if isinstance(x, Tensor) else next(iter(x.values()))
        zero = torch.zeros(size, dtype=torch.float64, device=like.device)
        return {
            "reward": zero,
            "highest": zero - math.inf,
            "sum": zero,
            "total": zero,
            "before": zero,
        }

    def after(self, x: State, clean: State, aim: Any, run: Run) -> tuple[State, Any, Tensor | None]:
        last = bool(run.s == 0)
        judged = run.path.readout(x, clean) if last else clean
        reward = self.reward(judged, **run.cond)
        if not isinstance(reward, Tensor):
            raise TypeError(f"reward must give a tensor, got {type(reward).__name__}")
        if reward.shape != aim["reward"].shape:
            raise ValueError(f"reward must be ({len(aim['reward'])},), got {tuple(reward.shape)}")
        reward = reward.detach().double()
        highest, sum_ = torch.maximum(aim["highest"], reward), aim["sum"] + reward
        match "difference" if last else self.potential:  # whose product is exp(scale reward)
            case "difference":
                total = self.scale * reward
            case "max":
                total = aim["total"] + self.scale * highest
            case _:
                total = aim["total"] + self.scale * sum_
        if total.device.type == "cpu" and not bool((total < math.inf).all()):
            raise ValueError(
                "reward must be finite, or -inf to forbid, got NaN or an infinite weight"
            )
        kept, fresh = self._resample(total - aim["before"], run.noise, last)
        before = torch.where(fresh, total, aim["before"])
        aim = {"reward": reward, "highest": highest, "sum": sum_, "total": total, "before": before}
        return take(x, kept), take(aim, kept), kept

    def end(self, x0: State, aim: Any) -> State:
        if not self.best:
            return x0
        reward = aim["reward"].reshape(-1, self.group)
        return take(x0, reward.argmax(1) + self._first(aim["reward"])[:: self.group])

    def _first(self, rows: Tensor) -> Tensor:
        """The first row of the group of every row."""
        index = torch.arange(len(rows), device=rows.device)
        return index - index % self.group

    def _resample(self, log_weight: Tensor, noise: Noise, last: bool) -> tuple[Tensor, Tensor]:
        """(rows that take the place of each row, which rows were resampled)."""
        g = self.group
        weights = log_weight.reshape(-1, g).softmax(1)
        alive = ~weights[:, :1].isnan()
        reach = torch.where(alive, weights, 1 / g).cumsum(1)
        u = noise.uniform(log_weight, "resample").reshape(-1, g)
        if self.resampling == "systematic":  # one draw a group, that of its first row
            u = (u[:, :1] + torch.arange(g, device=u.device)) / g
        # past particles of weight 0, and below the last reach, whatever the rounding
        end = reach[:, -1:]
        level = torch.minimum(u * end, torch.nextafter(end, torch.zeros_like(end)))
        drawn = torch.searchsorted(reach, level, right=True)
        fresh = alive
        if not last:
            size = 1 / weights.square().sum(1, keepdim=True)
            fresh = size <= self.threshold * g * (1 + 1e-9)  # not where NaN
        fresh = fresh.expand_as(weights)
        own = torch.arange(g, device=u.device).expand_as(drawn)
        rows = torch.where(fresh, drawn, own).flatten() + self._first(log_weight)
        return rows, fresh.flatten()
