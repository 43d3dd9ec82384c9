"""Labels, times and batches of every type and shape, for every network of images and vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fluvial.core.protocols import class_per_row, per_row
from fluvial.networks import MLP, CausalTransformer, ContextTransformer, DiT, UNet

from .common import NOISE, awake

IMAGE: dict[str, Any] = {"size": 4, "channels": 1, "num_classes": 3}
NETWORKS: dict[str, nn.Module] = {
    "MLP": MLP(shape=(1, 4, 4), width=8, depth=1, num_classes=3),
    "UNet": UNet(**IMAGE, width=8, multipliers=(1,), blocks=1),
    "DiT": DiT(**IMAGE, patch=2, width=8, depth=1, heads=2, context=5),
    "ContextTransformer": ContextTransformer(**IMAGE, patch=2, width=8, depth=1, heads=2),
}
for network in NETWORKS.values():
    awake(network)
every_network = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)

X = NOISE.normal(torch.empty(5, 1, 4, 4, dtype=torch.float64))
T = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
LABEL = torch.tensor([0, 1, 2, 3, 0])


@every_network
def test_labels_of_any_integers(network: nn.Module) -> None:
    wanted = network(X, T, label=LABEL)
    for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8):
        assert torch.equal(network(X, T, label=LABEL.to(dtype)), wanted)
    one = network(X, T, label=torch.tensor(2))
    assert torch.equal(one, network(X, T, label=torch.full((5,), 2)))
    assert not torch.equal(one, wanted)
    assert torch.equal(network(X, T, label=torch.tensor(3)), network(X, T))


@every_network
def test_labels_that_are_none(network: nn.Module) -> None:
    for label, got in ((LABEL.double(), "torch.float64"), (LABEL > 0, "torch.bool"), (2, "int")):
        with pytest.raises(TypeError, match=f"label must be a tensor of integers, got {got}"):
            network(X, T, label=label)
    for label in (LABEL[:3], LABEL[:1], LABEL[:, None], LABEL[None]):
        with pytest.raises(ValueError, match=r"label must have shape \(\) or \(5,\), got"):
            network(X, T, label=label)
    for label, found in ((LABEL + 1, "1 to 4"), (LABEL - 1, "-1 to 2")):
        with pytest.raises(ValueError, match=rf"label must lie in 0 .. 3, got values from {found}"):
            network(X, T, label=label)


@every_network
def test_times_of_another_shape(network: nn.Module) -> None:
    # a ContextTransformer does not look at t
    for name in ["h"] if isinstance(network, ContextTransformer) else ["t", "h"]:
        for bad in (T[:3], T[:1], T[:, None], T[None]):
            with pytest.raises(ValueError, match=r"a time must have shape \(\) or \(5,\), got"):
                network(X, **{"t": T, name: bad})


@every_network
def test_batches_of_none_and_one(network: nn.Module) -> None:
    whole = network(X, T, label=LABEL)
    for rows in (slice(0, 0), slice(2, 3)):
        part = network(X[rows], T[rows], label=LABEL[rows])
        assert part.shape == X[rows].shape
        torch.testing.assert_close(part, whole[rows])
    strided = X.transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(network(strided, T, label=LABEL), whole)


@every_network
def test_images_of_another_shape(network: nn.Module) -> None:
    # a UNet takes any size
    for x in (X[0], X[:, 0], X.expand(5, 2, 4, 4) if isinstance(network, UNet) else X[:, :, :3]):
        with pytest.raises(ValueError, match="must have shape"):
            network(x, T)


def test_a_context_for_no_rows() -> None:
    out = NETWORKS["DiT"](X[:0], T[:0], context=torch.empty(0, 3, 5, dtype=torch.float64))
    assert out.shape == (0, 1, 4, 4)


def test_widths_of_nothing() -> None:
    with pytest.raises(ValueError, match="mlp_ratio=0"):
        DiT(**IMAGE, patch=2, width=8, depth=1, heads=2, mlp_ratio=0.0)


def test_tokens_of_any_integers() -> None:
    network = CausalTransformer(vocabulary=7, width=8, depth=1, heads=2)
    tokens = torch.tensor([[0, 6, 3], [1, 2, 5]])
    wanted = network(tokens)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert torch.equal(network(tokens.to(dtype)), wanted)
    with pytest.raises(ValueError, match="x must lie in 0 .. 6, got values from 1 to 7"):
        network(tokens + 1)
    with pytest.raises(TypeError, match="x must be integer tokens, got torch.bool"):
        network(tokens > 0)


def test_one_value_a_row() -> None:
    x = torch.empty(3, 2)
    assert per_row(torch.tensor(0.5).double(), x).tolist() == [0.5] * 3
    assert class_per_row(torch.tensor(1, dtype=torch.uint8), x).tolist() == [1, 1, 1]
    assert class_per_row(torch.tensor([1, 0, 2]), x).dtype == torch.int64
