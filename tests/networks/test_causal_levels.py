"""The causal transformer on sequences of sequences: levels, places, masks, room in its cache."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.protocols import take
from fluvial.networks import CausalTransformer, describe, rebuild
from fluvial.networks.causal import cache_length, cut, grow, rotary_angles
from fluvial.networks.layers import rotate

from .common import NOISE, awake

SMALL: dict[str, Any] = {"vocabulary": 11, "width": 16, "depth": 2, "heads": 2}
modes = pytest.mark.parametrize("mode", ["split", "additive"])


def build(**changes: Any) -> Any:
    return awake(CausalTransformer(**(SMALL | changes)))


def tokens(rows: int = 3, length: int = 6) -> Tensor:
    return (NOISE.uniform(torch.empty(rows, length), "tokens") * 11).long()


@modes
def test_scores_depend_on_differences_alone(mode: str) -> None:
    q, k = NOISE.normal(torch.empty(2, 8, dtype=torch.float64))

    def score(i: float, j: float, level: float, other: float, mode: str | None = mode) -> float:
        turned = []
        for z, place, at in ((q, i, level), (k, j, other)):
            places = torch.tensor([place], dtype=torch.float64), torch.tensor([at]).double()
            angles = rotary_angles(*places, dim=8, base=100.0, mode=mode)
            turned.append(rotate(z[None, None], angles.cos(), angles.sin()))
        return float((turned[0] * turned[1]).sum())

    assert abs(score(5, 2, 3, 1) - score(9, 6, 7, 5)) < 1e-12
    assert abs(score(5, 2, 3, 1) - score(5, 2, 3, 3)) > 1e-3
    assert abs(score(5, 2, 3, 1) - score(5, 4, 3, 1)) > 1e-3
    same = abs(score(5, 2, 3, 3) - score(5, 2, 0, 0, None))
    assert (same < 1e-12) == (mode == "additive")


def test_angles() -> None:
    i, k = torch.tensor([3.0]).double(), torch.tensor([5.0]).double()
    rates = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    for mode, places in (
        (None, [3, 3, 3, 3]),
        ("split", [3, 5, 3, 5]),
        ("additive", [3, 8, 3, 8]),
    ):
        got = rotary_angles(i, k, dim=8, base=10_000.0, mode=mode)
        assert got.shape == (1, 1, 4)
        assert torch.allclose(got.flatten(), torch.tensor(places) * rates, rtol=1e-14)


@modes
def test_the_same_level_everywhere(mode: str) -> None:
    """Additive levels that are all alike change nothing, nor do positions that are all moved."""
    network, plain = build(levels=mode), build()
    plain.load_state_dict(network.state_dict())
    x = tokens()
    out = network(x)
    level = torch.full((6,), 4)
    assert torch.allclose(network(x, levels=level), out, atol=1e-12)
    assert torch.allclose(network(x, positions=torch.arange(6) + 9), out, atol=1e-12)
    assert torch.allclose(plain(x), out, atol=1e-12) == (mode == "additive")
    rows = torch.arange(6) // 3
    mixed = network(x, levels=rows)
    assert (mixed - out)[:, 3:].abs().amax() > 1e-4 and torch.allclose(mixed[:, :3], out[:, :3])
    each = network(x, levels=rows.expand(3, 6), positions=torch.arange(6).expand(3, 6))
    assert torch.allclose(each, mixed, atol=1e-12)
    # without levels they are not looked at
    assert torch.equal(plain(x, levels=rows), plain(x))


def test_given_masks() -> None:
    network = build(levels="split")
    x = tokens()
    causal = torch.ones(6, 6).tril() > 0
    assert torch.allclose(network(x, allowed=causal), network(x), atol=1e-12)
    assert torch.allclose(network(x, allowed=causal.expand(3, 6, 6)), network(x), atol=1e-12)
    blocks = causal | (torch.arange(6) // 2 == torch.arange(6)[:, None] // 2)
    out = network(x, allowed=blocks)
    for place in range(6):
        changed = x.clone()
        changed[:, place] = (x[:, place] + 1) % 11
        moved = (network(changed, allowed=blocks) - out).abs().amax((0, 2))
        first = place // 2 * 2
        assert (moved[:first] == 0).all() and (moved[first:] > 1e-5).all()
    # each row its own, through a cache too
    first, cache = network(x[:, :4], allowed=blocks[:4, :4], cache={})
    rest, _ = network(x[:, 4:], allowed=blocks[4:].expand(3, 2, 6), cache=cache)
    assert torch.allclose(torch.cat([first, rest], 1), out, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"time": True}, {"time": True, "num_classes": 2}], ids=str)
def test_the_last_logits(options: dict[str, Any]) -> None:
    network = build(**options)
    x, t = tokens(), torch.linspace(0, 1, 6)[None].double()
    label = torch.tensor([0, 1, 2]) if "num_classes" in options else None
    whole = network(x, t, label=label)
    for last in (1, 4, 6):
        part = network(x, t, label=label, last=last)
        assert torch.allclose(part, whole[:, 6 - last :], atol=1e-12)
    # a row of times is that row for all
    assert torch.allclose(network(x, t.expand(3, 6), label=label), whole, atol=1e-12)


def test_labels() -> None:
    network = build(num_classes=3)
    x = tokens()
    none = network(x)
    assert torch.equal(none, network(x, label=torch.tensor(3)))
    out = network(x, label=torch.tensor([0, 1, 3]))
    assert torch.allclose(out[2], none[2]) and (out - none)[:2].abs().amax((1, 2)).min() > 1e-4
    with pytest.raises(ValueError, match="label must lie in 0 .. 3"):
        network(x, label=torch.tensor(4))
    with pytest.raises(ValueError, match="num_classes=0"):
        build()(x, label=torch.tensor(0))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_room_in_the_cache(checkpoint: bool) -> None:
    """Written in place, tokens leave what appending them leaves; the source stays as it was."""
    network = build(levels="split", kv_heads=1)
    network.checkpoint = checkpoint
    x = tokens()
    with torch.no_grad():
        _, cache = network(x[:, :2], cache={})
        before = {name: leaf.clone() for name, leaf in cache.items()}
        room = grow(cache, 4)
        plain = cache
        for place in range(2, 6):
            rows = 3 if place < 4 else 2  # rows leave on the way
            plain, room = take(plain, slice(rows)), take(room, slice(rows))
            piece = x[:rows, place : place + 1]
            wanted, plain = network(piece, cache=plain)
            got, room = network(piece, cache=room, place=place)
            assert torch.allclose(got, wanted, atol=1e-12)
    assert cache_length(room) == 6
    assert all(torch.allclose(room[name], plain[name], atol=1e-12) for name in plain)
    assert all(torch.equal(cache[name], before[name]) for name in cache)
    assert cache_length(cut(room, 3)) == 3
    with pytest.raises(ValueError, match="place must leave room for 2 of the 6 tokens .* got 5"):
        network(x[:2, :2], cache=room, place=5)
    for bad in ({}, cache | {"mask": torch.ones(3, 2) > 0}):
        with pytest.raises(ValueError, match="only a cache that holds tokens"):
            grow(bad, 2)


def test_described_and_rebuilt() -> None:
    network = build(levels="additive", num_classes=2)
    again: Any = rebuild(json.loads(json.dumps(describe(network))))
    again.load_state_dict(network.float().state_dict())
    x, levels = tokens(), torch.arange(6) // 2
    assert torch.equal(network(x, levels=levels), again(x, levels=levels))


def test_misuse() -> None:
    with pytest.raises(ValueError, match="levels must be 'split', 'additive' or None, got 'both'"):
        build(levels="both")
    with pytest.raises(ValueError, match="width / heads a multiple of 4, got width=12, heads=2"):
        build(levels="split", width=12)
    with pytest.raises(ValueError, match="num_classes=-1"):
        build(num_classes=-1)
    network, x = build(levels="split"), tokens()
    for name in ("positions", "levels"):
        with pytest.raises(
            ValueError, match=rf"{name} must have shape \(6,\) or \(3, 6\), got \(5"
        ):
            network(x, **{name: torch.arange(5)})
    with pytest.raises(ValueError, match=r"allowed must be bool of shape \(6, 6\) or \(3, 6, 6\)"):
        network(x, allowed=torch.ones(6, 5) > 0)
    with pytest.raises(ValueError, match="allowed stands in place of mask"):
        network(x, allowed=torch.ones(6, 6) > 0, mask=torch.ones(3, 6) > 0)
