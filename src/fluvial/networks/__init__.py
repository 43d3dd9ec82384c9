"""Networks, called as ``network(x, t, **conditions)``.

Any `nn.Module` with that call serves. Those here say how they were built in ``.args``, so that a
saved model can be rebuilt from its file alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fluvial.networks.causal import CausalTransformer
from fluvial.networks.context import ContextTransformer
from fluvial.networks.dit import DiT
from fluvial.networks.fno import FNO
from fluvial.networks.mlp import MLP
from fluvial.networks.tokens import TokenTransformer
from fluvial.networks.unet import UNet

__all__ = [
    "MLP",
    "CausalTransformer",
    "ContextTransformer",
    "DiT",
    "TokenTransformer",
    "UNet",
    "describe",
    "rebuild",
]

NETWORKS: dict[str, type[nn.Module]] = {
    "CausalTransformer": CausalTransformer,
    "ContextTransformer": ContextTransformer,
    "DiT": DiT,
    "FNO": FNO,
    "MLP": MLP,
    "TokenTransformer": TokenTransformer,
    "UNet": UNet,
}


def describe(network: nn.Module) -> dict[str, Any]:
    """How to build ``network`` again: {"class", "args"}; ``args`` is None for a class not ours."""
    kind = type(network)
    if NETWORKS.get(kind.__name__) is kind:
        return {"class": kind.__name__, "args": dict(network.args)}  # type: ignore[arg-type]
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "args": None}


def rebuild(description: Mapping[str, Any]) -> nn.Module:
    """The network that `describe` described, with fresh weights.

    Raises:
        ValueError: it is not one of `NETWORKS`; build it yourself and hand it to ``load``.
    """
    name, args = description["class"], description["args"]
    if name not in NETWORKS or args is None:
        raise ValueError(
            f"{name} is not a network of fluvial ({', '.join(NETWORKS)}); build it as it was and "
            "pass it as network="
        )
    args = {key: tuple(value) if isinstance(value, list) else value for key, value in args.items()}
    return NETWORKS[name](**args)
