"""The bidirectional transformer of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fluvial.core.noise import KeyedNoise
from fluvial.networks import TokenTransformer, describe, rebuild

SMALL: dict[str, Any] = {"vocabulary": 6, "outputs": 5, "width": 16, "depth": 2, "heads": 2}
X = torch.tensor([[0, 1, 2, 3, 4], [5, 4, 3, 2, 1]])


def awake(**changes: Any) -> TokenTransformer:
    """A network whose every weight is something."""
    network = TokenTransformer(**(SMALL | changes)).double()
    noise = KeyedNoise(1)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight += 0.2 * noise.normal(weight.reshape(1, -1), name).reshape(weight.shape)
    return network


def test_every_token_sees_every_other_and_its_distance() -> None:
    network = awake()
    whole = network(X)
    assert whole.shape == (2, 5, 5)
    for token in range(5):
        changed = X.clone()
        changed[:, token] = 0 if token else 3
        assert bool(((network(changed) - whole).abs().amax(-1) > 1e-9).all())
    # only distances count, so that moving all tokens together changes nothing but which is where
    swapped = network(X.flip(1))
    assert not torch.allclose(swapped.flip(1), whole)


def test_conditions_enter_and_padding_does_not() -> None:
    network = awake(time=True, num_classes=2)
    t = torch.tensor([0.2, 0.7])
    label = torch.tensor([0, 1])
    base = network(X, t, label=label)
    assert not torch.allclose(network(X, t + 0.1, label=label), base)
    assert not torch.allclose(network(X, t, label=1 - label), base)
    torch.testing.assert_close(network(X, t), network(X, t, label=torch.tensor([2, 2])))
    mask = torch.tensor([[True] * 3 + [False] * 2] * 2)
    padded = network(X, t, label=label, mask=mask)[:, :3]
    torch.testing.assert_close(padded, network(X[:, :3], t, label=label), rtol=1e-10, atol=1e-10)
    network.checkpoint = True
    torch.testing.assert_close(network(X, t, label=label), base, rtol=1e-12, atol=1e-12)


def test_places_tell_masks_apart() -> None:
    masks = torch.full((1, 4), 5)
    same, apart = awake()(masks), awake(length=4)(masks)
    torch.testing.assert_close(same, same[:, :1].expand_as(same))
    assert bool((apart[:, 1:] - apart[:, :1]).abs().amax(-1).min() > 1e-3)
    with pytest.raises(ValueError, match="at most 4"):
        awake(length=4)(X)


def test_built_again_from_its_description() -> None:
    network = TokenTransformer(**SMALL, time=True, num_classes=2)
    other = rebuild(describe(network))
    for a, b in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    again = TokenTransformer(**SMALL, seed=1)
    assert not torch.equal(again.out.weight, network.out.weight)


def test_misuse() -> None:
    for changes in (
        {"width": 6},
        {"heads": 3},
        {"depth": 0},
        {"outputs": 0},
        {"num_classes": -1},
        {"length": 0},
    ):
        with pytest.raises(ValueError, match="got"):
            TokenTransformer(**(SMALL | changes))
    network = TokenTransformer(**SMALL)
    for x, error in ((X.float(), TypeError), (X[0], ValueError), (X + 1, ValueError)):
        with pytest.raises(error, match="x must"):
            network(x)
    with pytest.raises(ValueError, match="mask"):
        network(X, mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="num_classes=0"):
        network(X, label=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="time=True"):
        TokenTransformer(**SMALL, time=True)(X)
