"""Features of anything that maps a batch to (batch, D)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fluvial.metrics.checks import Values, real

Extractor: TypeAlias = Callable[[Tensor], Tensor]
"""Maps a batch to (batch, D): a module, a bound method, any function."""


def extract(features: Extractor, x: Values, batch_size: int = 256) -> Tensor:
    """``features`` of every row of ``x``, (N, D), in eval mode and without gradients.

    ``ConvFeatures`` gives its features by its method: pass ``network.features``.

    Args:
        features: called with (n, *event), at most ``batch_size`` rows, of the type of ``x``.
        x: (N, *event), N at least 1.
        batch_size: rows at a time.

    Raises:
        TypeError: ``features`` cannot be called, or does not give a tensor of real numbers.
        ValueError: ``x`` has no rows, batch_size is below 1, or ``features`` does not give
            (batch, D).
    """
    return torch.cat(list(batches(features, x, batch_size)))


def batches(features: Extractor, x: Values, batch_size: int = 256) -> Iterator[Tensor]:
    """What `extract` joins, one batch after the other."""
    x = real("x", x)
    if not callable(features):
        raise TypeError(f"features must be callable, got {type(features).__name__}")
    if x.ndim == 0 or len(x) < 1:
        raise ValueError(f"x must have shape (N, ...) with N at least 1, got {tuple(x.shape)}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    for start in range(0, len(x), batch_size):
        part = x[start : start + batch_size]
        batch = part if isinstance(part, Tensor) else torch.from_numpy(part.copy())
        with torch.no_grad(), evaluating(features):
            found = features(batch)
        if not isinstance(found, Tensor) or found.is_complex():
            got = found.dtype if isinstance(found, Tensor) else type(found).__name__
            raise TypeError(f"features must give a tensor of real numbers, got {got}")
        if found.ndim != 2 or len(found) != len(batch) or found.shape[1] < 1:
            raise ValueError(
                f"features must give shape ({len(batch)}, D) for {len(batch)} rows, "
                f"got {tuple(found.shape)}"
            )
        yield found


@contextmanager
def evaluating(features: object) -> Iterator[None]:
    """A module in eval mode; every part's own mode is put back."""
    modules = tuple(features.modules()) if isinstance(features, nn.Module) else ()
    modes = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
