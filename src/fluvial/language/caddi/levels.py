"""The forward process of CaDDi: every noise level is a corruption of the data of its own."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fluvial.core.categorical.draws import check_tokens, uniform
from fluvial.core.categorical.losses import negative_log
from fluvial.core.categorical.paths import CategoricalPath
from fluvial.core.categorical.schedules import Linear, Schedule
from fluvial.core.protocols import Noise

Source = Literal["absorbing", "uniform"]


class IndependentLevels:
    """x_1, ..., x_T, each drawn from the data alone; tokens of all levels are independent given it.

        q(x_{1:T} | x_0) = prod_k q(x_k | x_0),
        x_k^i = x_0^i with probability alpha_k, else the mask symbol, or a uniform class.

    So a token that is masked at level k may be visible at level k + 1, and x_{k:T} says more than
    x_k. Level k stands for the time k / T.

    The derived schedule reveals as much as a Markov chain does whose tokens are kept with
    probability b_k: 1 - alpha_k = (1 - b_k) / (1 - b_{k+1}), alpha_T = b_T. Then prod_{s >= k}
    (1 - alpha_s) = 1 - b_k, so that of absorbing noise I(x_0; x_{k:T}) is the chain's I(x_0; x_k)
    whatever the data. With b_k = 1 - k / T it is alpha_k = 1 / (k + 1), alpha_T = 0. (Of uniform
    noise it is a default without that property.)

    Args:
        classes: V, symbols of the data, 0 .. V - 1.
        steps: T.
        source: "absorbing", with the mask symbol V (`mask_token`), or "uniform".
        alphas: (T + 1,) in [0, 1] from alpha_0 = 1 on, in any order else; by default
            ``schedule(steps)``.

    Attributes:
        alphas: (T + 1,) float64, on the host.
        states: symbols of a level, V or V + 1.
        mask_token: V, or None.

    Raises:
        ValueError: a count below 1, an unknown source; ``alphas`` that do not begin at 1, lie
            outside [0, 1], or are not T + 1.
    """

    def __init__(
        self,
        classes: int,
        *,
        steps: int,
        source: Source = "absorbing",
        alphas: Any = None,
    ) -> None:
        if source not in ("absorbing", "uniform"):
            raise ValueError(f"source must be 'absorbing' or 'uniform', got {source!r}")
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        self.path = CategoricalPath(classes, source)
        self.classes, self.steps, self.source = classes, steps, source
        self.states, self.mask_token = self.path.states, self.path.mask_token
        if alphas is None:
            alphas = self.schedule(steps)
        self.alphas = torch.as_tensor(alphas, dtype=torch.float64).detach().cpu().clone()
        if self.alphas.shape != (steps + 1,):
            raise ValueError(
                f"alphas must have shape ({steps + 1},) for steps={steps}, got "
                f"{tuple(self.alphas.shape)}"
            )
        if not bool(((self.alphas >= 0) & (self.alphas <= 1)).all()) or self.alphas[0] != 1:
            raise ValueError(
                f"alphas must begin with 1 and lie in [0, 1], got {self.alphas.tolist()}"
            )

    @staticmethod
    def schedule(steps: int, base: Literal["linear"] | Schedule = "linear") -> Tensor:
        """(T + 1,) alphas that reveal as much as the Markov chain with b_k = base.alpha(k / T).

        Raises:
            ValueError: ``steps`` < 1, ``base`` is neither "linear" nor a schedule, or does not
                fall within the T steps.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if base == "linear":
            base = Linear()
        if not isinstance(base, Schedule):
            raise ValueError(f"base must be 'linear' or a schedule of the core, got {base!r}")
        t = torch.arange(steps + 1, dtype=torch.float64) / steps
        lost = base.drop(t)  # 1 - b_k
        lost[0] = 0.0
        if not bool((lost.diff() >= 0).all() and lost[1] > 0):
            raise ValueError(f"base must fall from 1 within {steps} steps, got {1 - lost}")
        alphas = (lost.diff() / lost[1:]).tolist()
        # of alpha_T = b_T, for which there is no later level, 1 - alpha loses the digits
        return torch.tensor([*alphas, float(base.alpha(t[-1]))], dtype=torch.float64)

    def revealed(self) -> Tensor:
        """(T + 1,) float64: entry k is 1 - prod (1 - alpha), the share that x_{k:T} shows."""
        return 1 - (1 - self.alphas).flip(0).cumprod(0).flip(0)

    def sample(self, x0: Tensor, noise: Noise, levels: Tensor | None = None) -> Tensor:
        """x_1 .. x_T, or some of them.

        Args:
            x0: (batch, length) tokens of the data.
            noise: keyed.
            levels: (batch, c) int64, which ones, on the host; all by default.

        Returns:
            (batch, T, length) int64, level k at index k - 1, or (batch, c, length).

        Raises:
            TypeError, ValueError: ``x0`` holds no tokens of the data.
        """
        self.check(x0)
        keep = self.alphas[1:].expand(len(x0), -1) if levels is None else self.alphas[levels]
        keep = keep.to(x0.device, non_blocking=True)
        x = x0.unsqueeze(1).expand(*keep.shape, x0.shape[1])
        noised = uniform(x, noise, "noised") >= keep.unsqueeze(-1)
        return torch.where(noised, self.path.draw_source(x, noise, "source"), x)

    def renoise(self, x0: Tensor, k: int, noise: Noise) -> Tensor:
        """A draw of q(x_k | x_0), (batch, length)."""
        noised = uniform(x0, noise, "noised") >= float(self.alphas[k])
        return torch.where(noised, self.path.draw_source(x0, noise, "source"), x0)

    def check(self, x0: Tensor) -> None:
        """Raise unless ``x0`` is (batch, length) int64 tokens of the data, no mask symbol."""
        check_tokens(x0, self.classes, None, self.mask_token)
        if x0.ndim != 2:
            raise ValueError(f"x0 must have shape (batch, length), got {tuple(x0.shape)}")

    def terms(self, log_p: Tensor, x0: Tensor, k: Tensor) -> Tensor:
        """KL(q(x_{k-1} | x_0) || q(x_{k-1} | p)), nats a token, of independent clean predictions.

            absorbing:  -alpha ln p(x_0)
            uniform:    sum_v q_v ln(q_v / (alpha p_v + (1 - alpha) / V))

        with alpha = alpha_{k-1} and q_v = alpha [v = x_0] + (1 - alpha) / V; where k = 1 both are
        -ln p(x_0).

        Args:
            log_p: (batch, *event, V) logarithms of clean probabilities at level k.
            x0: (batch, *event) tokens.
            k: levels, that broadcast to ``x0``, on the host.
        """
        alpha = self.alphas[k - 1].to(x0.device, log_p.dtype, non_blocking=True)
        nll = negative_log(log_p, x0)
        if self.source == "absorbing":
            return alpha * nll
        rest = (1 - alpha) / self.classes
        log_alpha, log_rest = alpha.log(), rest.log()
        here = (alpha + rest).log() - torch.logaddexp(log_alpha - nll, log_rest)
        # the other classes: -rest ln(1 + alpha p_v / rest), of which that of x_0 is taken out
        ratio = alpha / torch.where(rest > 0, rest, 1.0)
        others = torch.log1p(ratio.unsqueeze(-1) * log_p.exp()).sum(-1)
        others = others - torch.log1p(ratio * (-nll).exp())
        return (alpha + rest) * here - torch.where(rest > 0, rest * others, 0.0)

    def prior(self, x0: Tensor) -> Tensor:
        """KL(q(x_T | x_0) || p(x_T)), nats of every row: 0 if alpha_T = 0, infinite if absorbing
        and alpha_T > 0."""
        alpha = float(self.alphas[-1])
        zero = torch.zeros(len(x0), dtype=torch.float64, device=x0.device)
        if alpha == 0:
            return zero
        if self.source == "absorbing":
            return zero + torch.inf
        q = torch.full((self.classes,), (1 - alpha) / self.classes, dtype=torch.float64)
        q[0] += alpha
        each = float(torch.special.xlogy(q, q * self.classes).sum())
        return zero + each * x0.shape[1]

    def mixed(self, x: Tensor, share: float, noise: Noise) -> Tensor:
        """``x`` with a share of its visible tokens replaced by uniform classes."""
        wrong = uniform(x, noise, "wrong") < share
        there = (uniform(x, noise, "wrong class") * self.classes).long()
        return torch.where(wrong & (x < self.classes), there.clamp(max=self.classes - 1), x)
