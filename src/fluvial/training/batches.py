"""The rows of every training step, as a function of (seed, step)."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise

FINGERPRINTED = 1 << 26
"""Bytes of a part of the data that are read to tell it from others."""


class Batches:
    """Rows of a data set in a shuffled order that is a function of (seed, step).

    Every epoch is a permutation of its own; a batch may reach into the next epoch, so all have the
    same size. The tensors may be memory-mapped: only the rows that are asked for are read.
    """

    def __init__(self, data: Mapping[str, Tensor], batch_size: int, seed: int) -> None:
        sizes = {name: len(value) for name, value in data.items()}
        if not any(sizes.values()):
            raise ValueError("data is empty")
        if len(set(sizes.values())) != 1:
            raise ValueError(f"data needs the same number of rows in every part, got {sizes}")
        self.data, self.batch_size, self.seed = data, batch_size, seed
        self.rows = next(iter(sizes.values()))
        self._orders: dict[int, Tensor] = {}

    def __call__(self, step: int, part: slice = slice(None)) -> dict[str, Tensor]:
        """The batch of a step, or a part of it."""
        positions = range(step * self.batch_size, (step + 1) * self.batch_size)
        first, last = positions.start // self.rows, (positions.stop - 1) // self.rows
        parts = [
            self._order(epoch)[
                max(0, positions.start - epoch * self.rows) : positions.stop - epoch * self.rows
            ]
            for epoch in range(first, last + 1)
        ]
        rows = torch.cat(parts)[part]
        return {name: value[rows.to(value.device)] for name, value in self.data.items()}

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            # a batch needs an epoch's order and perhaps the next: keep no more
            self._orders = {k: v for k, v in self._orders.items() if k >= epoch - 1}
            like = torch.empty(self.rows, dtype=torch.float64)
            self._orders[epoch] = KeyedNoise(self.seed).at(epoch).uniform(like, "order").argsort()
        return self._orders[epoch]

    def fingerprint(self) -> str:
        """Tells data sets apart: by all rows of up to 64 MB, else by as many, spread evenly."""
        digest = blake2b(digest_size=8)
        for name in sorted(self.data):
            value = self.data[name]
            most = max(1, FINGERPRINTED // (value[0].numel() * value.element_size()))
            rows = torch.linspace(0, len(value) - 1, min(most, len(value)), dtype=torch.float64)
            rows = rows.round().long()
            part = value[rows.to(value.device)].cpu()
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
