"""EDM's preconditioning of a denoiser, for any path of scalars."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from fluvial.core.gaussian.losses import LEAST, MOST
from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.protocols import left_broadcast, per_row


class EDMPreconditioned(nn.Module):
    """D(x, t) = c_skip z + c_out F(c_in z, c_noise), z = x / alpha: a field that predicts clean.

    With r = sigma / alpha, the level of noise in z = x_0 + r eps, and s = ``std``,

        c_skip = s^2 / (r^2 + s^2),         c_out = r s / sqrt(r^2 + s^2),
        c_in = 1 / sqrt(r^2 + s^2),         c_noise = log(r) / 4,

    so that, for data of standard deviation s, what the network F sees and what it should return
    both have unit variance at every t, and errors of F are amplified least. At t = 0 D is the
    identity; where F = 0 it is the best linear denoiser. On data N(0, s^2) that is exact.

    In terms of x, with q = sqrt(sigma^2 + alpha^2 s^2): c_skip z = (alpha s^2 / q^2) x,
    c_out = sigma s / q and c_in z = x / q, finite also where alpha = 0.

    Args:
        network: F, called as ``network(x, c_noise, **conditions)`` with c_noise (batch,), about
            -1.6 to 1.1 where r is 0.002 to 80, and within 5.2 of 0 at the ends of a path.
        path: along which the field is trained and sampled.
        std: standard deviation of the data.

    Raises:
        TypeError: a path without scalar coefficients.
        ValueError: ``std`` is not positive.

    Citation: Karras et al., NeurIPS 2022. Train it with `Matching`, weight `EDM` and times
    `LogNormalSigma`.
    """

    predicts = "clean"

    def __init__(self, network: nn.Module, path: AlphaSigmaPath, std: float = 0.5) -> None:
        super().__init__()
        if not isinstance(path, AlphaSigmaPath):
            raise TypeError(f"path must have scalar coefficients, got {type(path).__name__}")
        if not 0 < std < math.inf:
            raise ValueError(f"std must be positive and finite, got {std}")
        self.network, self.path, self.std = network, path, std

    @property
    def num_classes(self) -> int:
        return int(getattr(self.network, "num_classes", 0))

    def forward(self, x: Tensor, t: Tensor, **cond: Any) -> Tensor:
        """Args:
        x: (batch, *event).
        t: () or (batch,).
        """
        alpha, sigma = self.path.alpha(t.double()), self.path.sigma(t.double())
        norm = (sigma.square() + (alpha * self.std).square()).sqrt()
        c_noise = (sigma / alpha).clamp(LEAST, MOST).log() / 4
        inner = self.network(_times(1 / norm, x), per_row(c_noise, x), **cond)
        skip = _times(alpha * (self.std / norm).square(), x)
        return skip + _times(sigma * self.std / norm, inner)


def _times(value: Tensor, x: Tensor) -> Tensor:
    return left_broadcast(value.to(x.dtype), x) * x
