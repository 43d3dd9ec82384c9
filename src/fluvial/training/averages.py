"""Exponential moving averages of weights, at several rates at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fluvial.training.sharding import local, put


class Averages:
    """One average of a module's state dict a rate: a <- d a + (1 - d) w after every step.

    The decay is d = min(rate, (1 + k) / (10 + k)) at step k, so that an average forgets its start.
    Entries that are not floating, counters for instance, are copied. A sharded module has sharded
    averages.

    Args:
        module: whose weights are averaged.
        rates: in [0, 1); one copy of the weights each, named "ema-0.9999" and the like.
    """

    def __init__(self, module: nn.Module, rates: Sequence[float]) -> None:
        live = {name: value.detach() for name, value in module.state_dict(keep_vars=True).items()}
        self.rates = {f"ema-{rate}": rate for rate in rates}
        self.of = {
            average: {name: value.clone() for name, value in live.items()} for average in self.rates
        }
        self._sharded: list[Any] = [part for part in module.modules() if hasattr(part, "reshard")]
        self._pairs = {
            average: [(local(weights[name]), local(value)) for name, value in live.items()]
            for average, weights in self.of.items()
        }
        self._floating = {
            average: (
                [mean for mean, _ in pairs if mean.is_floating_point()],
                [value for mean, value in pairs if mean.is_floating_point()],
            )
            for average, pairs in self._pairs.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after step number ``step``, counted from 0."""
        for average, pairs in self._pairs.items():
            decay = min(self.rates[average], (1 + step) / (10 + step))
            means, values = self._floating[average]
            if means:
                torch._foreach_lerp_(means, values, 1 - decay)
            for mean, value in pairs:
                if not mean.is_floating_point():
                    mean.copy_(value)

    @contextmanager
    def applied(self, average: str) -> Iterator[None]:
        """Within the block the module has the averaged weights."""
        self._exchange(average)
        try:
            yield
        finally:
            self._exchange(average)

    @torch.no_grad()
    def _exchange(self, average: str) -> None:
        # a sharded module may still hold the weights it gathered before
        for part in self._sharded:
            part.reshard()
        # contents change places, one tensor at a time: wrappers hold on to the storages
        for mean, value in self._pairs[average]:
            kept = value.clone()
            value.copy_(mean)
            mean.copy_(kept)

    def load(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take the averages of a checkpoint."""
        for average, weights in self.of.items():
            for name, value in weights.items():
                put(value, saved[average][name])
