"""Networks of the whitened score, over the coefficients of functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluvial.inverse.function_space_langevin.modes import Modes
from fluvial.networks.layers import ScalarEmbedding, initialise, linear


class ModeNetwork(nn.Module):
    """One small perceptron for all modes, each on its own coefficient: ``network(x, time)``.

    z = silu(W asinh([x, 8 x]) + c), z <- z + silu(V z + b) in every further layer, g = w z, with c
    a perceptron of the logit of the mode's time and of log(1 + |k_i|) of its frequencies. Weights
    are shared, so it serves any number of modes. It starts at 0, and grows with x as a logarithm:
    far out the Gaussian score it corrects prevails, and the chain comes back. The second scale of
    x serves the cusp that coefficients of images have at 0.

    Args:
        frequencies: (J, d), those of `Modes`.
        width: of a layer.
        depth: layers.
        seed: of the initial weights.

    Raises:
        ValueError: ``width`` or ``depth`` is not positive; in a call, too many modes.
    """

    independent = True
    frequencies: Tensor

    def __init__(
        self, frequencies: Tensor, *, width: int = 32, depth: int = 2, seed: int = 0
    ) -> None:
        super().__init__()
        _check_counts(width=width, depth=depth)
        self.args = {"width": width, "depth": depth}
        self.register_buffer("frequencies", frequencies.abs().float().log1p(), persistent=False)
        self.inner = linear(2, width)
        self.condition = nn.Sequential(
            linear(2 + frequencies.shape[1], width), nn.SiLU(), linear(width, width)
        )
        self.layers = nn.ModuleList(linear(width, width) for _ in range(depth - 1))
        self.outer = linear(width, 1, start="zero", bias=False)
        initialise(self, seed)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Args:
        x: (batch, J), of variance 1.
        time: (1 or batch, J), in [0, 1].
        """
        count = x.shape[1]
        if count > len(self.frequencies):
            raise ValueError(f"x must have at most {len(self.frequencies)} modes, got {count}")
        level = torch.logit(time.double(), 1e-12).to(x.dtype)[..., None]
        place = self.frequencies[:count].to(x).expand(*time.shape, -1)
        known = torch.cat([level / 8, torch.sigmoid(level / 2), place], -1)
        z = functional.silu(self.inner(torch.stack([x, 8 * x], -1).asinh()) + self.condition(known))
        for layer in self.layers:
            z = z + functional.silu(layer(z))
        return self.outer(z)[..., 0]


class OperatorNetwork(nn.Module):
    """A Fourier-type operator network in the basis, for modes that depend on each other.

    On the grid u = P [f, xh], the whitened coefficients as a function, and scaled to the decay of
    ``variance`` as well, then in every layer

        u <- u + silu(K u + W u + c(t)),    K = T^-1 R T,

    T the transform of the basis and R a matrix over channels for each of the ``kept`` lowest modes
    of an axis, 0 for the others (Li et al., ICLR 2021); g = T Q u. The weights do not depend on the
    number of modes. It starts at 0.

    Args:
        modes: of the functions; a call may have fewer modes than these, the first ones.
        kept: modes an axis that layers mix, cut at what the grid has.
        width: channels.
        depth: layers.
        decay: f has the coefficients xh |k + 1|^-decay, scaled to the norm of xh.
        seed: of the initial weights.

    Raises:
        ValueError: a count is not positive.
    """

    independent = False
    smooth: Tensor

    def __init__(
        self,
        modes: Modes,
        *,
        kept: int = 12,
        width: int = 16,
        depth: int = 3,
        decay: float = 1.5,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check_counts(kept=kept, width=width, depth=depth)
        self.args = {"kept": kept, "width": width, "depth": depth, "decay": decay}
        self.modes = modes
        smooth = (1 + modes.frequencies.double().square().sum(1).sqrt()) ** -decay
        smooth = smooth * math.sqrt(len(smooth) / float(smooth.square().sum()))
        self.register_buffer("smooth", smooth.float(), persistent=False)
        self.kept = tuple(min(kept, side) for side in modes.shape)
        self.lift = linear(2, width)
        self.time = ScalarEmbedding(width)
        count = math.prod(self.kept)
        self.spectral = nn.ModuleList(
            linear(width, count * width, bias=False) for _ in range(depth)
        )
        self.local = nn.ModuleList(linear(width, width) for _ in range(depth))
        self.outer = linear(width, 1, start="zero", bias=False)
        initialise(self, seed)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Args:
        x: (batch, J), of variance 1.
        time: (batch,), in [0, 1].
        """
        count = x.shape[1]
        white = torch.stack([x * self.smooth[:count].to(x), x], 1)
        u = self.lift(self._grid(white).movedim(1, -1))
        # embeddings see digits of t as they see those of a time: by its logit, brought to [0, 1]
        told = torch.sigmoid(torch.logit(time.double(), 1e-12) / 4).to(x.dtype)
        shift = self.time(told).reshape(len(x), *[1] * len(self.modes.shape), -1)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            u = u + functional.silu(self._mixed(u, spectral) + local(u) + shift)
        return self._modes(self.outer(u).movedim(-1, 1))[:, 0, :count]

    def _grid(self, x: Tensor) -> Tensor:
        """(batch, channels, J) to values (batch, channels, *shape), of the same norm."""
        padded = functional.pad(x, (0, len(self.modes) - x.shape[-1]))
        place = self.modes.place.to(x.device)
        return self.modes.basis.inverse(padded[..., place].unflatten(-1, self.modes.shape))

    def _modes(self, u: Tensor) -> Tensor:
        order = self.modes.order.to(u.device)
        return self.modes.basis.forward(u).flatten(2)[..., order]

    def _mixed(self, u: Tensor, layer: nn.Module) -> Tensor:
        """K u."""
        spectrum = self.modes.basis.forward(u.movedim(-1, 1))
        corner: Any = (..., *[slice(side) for side in self.kept])
        low = spectrum[corner].flatten(2)
        width = low.shape[1]
        weight = layer.weight.unflatten(0, (low.shape[2], width))  # type: ignore[operator]
        mixed = torch.einsum("bim,moi->bom", low, weight).unflatten(2, self.kept)
        pads = [
            pad
            for side, kept in zip(self.modes.shape[::-1], self.kept[::-1], strict=True)
            for pad in (0, side - kept)
        ]
        return self.modes.basis.inverse(functional.pad(mixed, pads)).movedim(1, -1)


NETWORKS: Mapping[str, Any] = {
    "ModeNetwork": lambda modes, **args: ModeNetwork(modes.frequencies, **args),
    "OperatorNetwork": OperatorNetwork,
}
"""How a saved network is built again, from its modes and arguments."""


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


def describe(network: nn.Module) -> dict[str, Any]:
    """{"class", "args"}; ``args`` is None for a class that is not of this module."""
    kind = type(network).__name__
    if type(network) in (ModeNetwork, OperatorNetwork):
        return {"class": kind, "args": dict(network.args)}  # type: ignore[arg-type]
    return {"class": kind, "args": None}


def rebuild(description: Mapping[str, Any], modes: Modes) -> nn.Module:
    """The network that `describe` described, with fresh weights.

    Raises:
        ValueError: its class is not of this module.
    """
    if description["args"] is None:
        raise ValueError(
            f"{description['class']} is not a network of fluvial; build it as it was and pass it "
            "as network="
        )
    return NETWORKS[description["class"]](modes, **description["args"])


__all__: Sequence[str] = ["ModeNetwork", "OperatorNetwork", "describe", "rebuild"]
