"""Networks with the calling convention of EDM: D(x, sigma, class_labels), a denoiser."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.core.gaussian.paths import AlphaSigmaPath
from fluvial.core.gaussian.schedule import karras_grid
from fluvial.core.protocols import class_per_row, per_row


@dataclass(frozen=True)
class EDMPath(AlphaSigmaPath):
    """alpha = 1, sigma = sigma_max t: EDM's schedule, whose time is sigma (Karras et al., 2022).

    In this time `fluvial.core.gaussian.ode.Heun` is EDM's deterministic sampler; with churn it is
    `fluvial.core.gaussian.sde.EDMHeun`.

    Raises:
        ValueError: ``sigma_max`` is not positive and finite.
    """

    sigma_max: float = 80.0

    def __post_init__(self) -> None:
        if not 0 < self.sigma_max < math.inf:
            raise ValueError(f"sigma_max must be positive and finite, got {self.sigma_max}")

    def alpha(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def sigma(self, t: Tensor) -> Tensor:
        return self.sigma_max * t

    def alpha_rate(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)

    def sigma_rate(self, t: Tensor) -> Tensor:
        return torch.full_like(t, self.sigma_max)


class PretrainedEDM(NamedTuple):
    """What `simulate` needs of such a network.

    Attributes:
        field: the network.
        path: along which it was trained.
        grid: ``grid(steps)`` gives EDM's pairs of times, from ``sigma_max`` to ``sigma_min`` to 0;
            ``rho`` may be given too.
    """

    field: EDMField
    path: EDMPath
    grid: Callable[..., Tensor]


def from_edm(
    network: nn.Module,
    *,
    weights: str | os.PathLike[str] | None = None,
    sigma_min: float = 0.002,
    sigma_max: float = 80.0,
) -> PretrainedEDM:
    """A network of EDM's calling convention, such as one preconditioned by EDMPrecond.

        field, path, grid = from_edm(network, weights="edm-cifar10.safetensors")
        x = path.source(torch.empty(16, 3, 32, 32), noise)
        x = simulate(x, grid(18), Heun(), path, field, noise, label=label)

    Published checkpoints are pickles, which run code when they are read: no pickle is read here.
    Build the module, and read its weights from safetensors.

    Args:
        network: called as ``network(x, sigma, class_labels)`` with sigma (batch,) and class_labels
            (batch, label_dim) one-hot or None; returns the denoised x. It is put into evaluation
            mode.
        weights: a safetensors file with all of its weights, loaded into it; none by default.
        sigma_min, sigma_max: the levels that a run goes through.

    Raises:
        FileNotFoundError: no such file of weights.
        TypeError: ``network`` is no module.
        ValueError: the weights are not of safetensors or do not fit, or not
            0 < sigma_min < sigma_max.
    """
    if not isinstance(network, nn.Module):
        raise TypeError(f"network must be a module, got {type(network).__name__}")
    if not 0 < sigma_min < sigma_max < math.inf:
        raise ValueError(f"need 0 < sigma_min < sigma_max, got {sigma_min} and {sigma_max}")
    if weights is not None:
        _load(network, Path(weights))
    path = EDMPath(sigma_max)
    grid = partial(karras_grid, path, level_max=sigma_max, level_min=sigma_min)
    return PretrainedEDM(EDMField(network.eval(), path), path, grid)


@dataclass(frozen=True)
class EDMField:
    """D(x, sigma(t), class_labels) as a field of clean predictions; made by `from_edm`.

    ``label``: () or (batch,) classes, ``label_dim`` of the network meaning none; none by default.
    Other conditions are passed on by name. The result has the dtype of x.

    Raises:
        TypeError: in a call, a label that is not of integers.
        ValueError: in a call, a label of another shape, of no class, or for a network without
            ``label_dim``.
    """

    network: nn.Module
    path: EDMPath
    predicts: str = "clean"

    def __call__(self, x: Tensor, t: Tensor, label: Tensor | None = None, **cond: object) -> Tensor:
        sigma = per_row(self.path.sigma(t), x)
        one_hot = None
        if label is not None:
            classes = getattr(self.network, "label_dim", 0)
            if not classes:
                raise ValueError("label given to a network without classes (label_dim)")
            label = class_per_row(label, x)
            try:
                one_hot = functional.one_hot(label, classes + 1)[:, :classes].to(x.dtype)
            except RuntimeError:
                raise ValueError(
                    f"label must lie in 0 .. {classes}, got values from {int(label.min())} to "
                    f"{int(label.max())}"
                ) from None
        return self.network(x, sigma, one_hot, **cond).to(x.dtype)


def _load(network: nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        network.load_state_dict(load_file(path))
    except SafetensorError as error:
        raise ValueError(f"weights must be a safetensors file, got {path}: {error}") from error
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} do not fit the network: {error}") from error
