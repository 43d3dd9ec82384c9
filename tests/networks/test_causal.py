from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fluvial.core.protocols import batch_size, take
from fluvial.networks import CausalTransformer, describe, rebuild
from fluvial.networks.causal import cache_length, cut

from .common import JVP, NOISE, awake, check_checkpoint, check_derivative

SMALL: dict[str, Any] = {"vocabulary": 11, "width": 16, "depth": 2, "heads": 4}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"kv_heads": 2},
    {"kv_heads": 1, "tied": True},
    {"time": True, "mlp_ratio": 2.0},
]


def build(**changes: Any) -> Any:
    return CausalTransformer(**(SMALL | changes))


def tokens(rows: int = 3, length: int = 7) -> Tensor:
    return (NOISE.uniform(torch.empty(rows, length), "tokens") * 11).long()


def times(network: Any, rows: int = 3) -> Tensor | None:
    return NOISE.uniform(torch.empty(rows, dtype=torch.float64), "t") if network.time else None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_look_ahead(options: dict[str, Any]) -> None:
    network = awake(build(**options))
    x = tokens()
    t = times(network)
    out = network(x, t)
    assert out.shape == (3, 7, 11) and out.dtype == torch.float64
    for place in range(7):
        changed = x.clone()
        changed[:, place] = (x[:, place] + 1) % 11
        difference = (network(changed, t) - out).abs().amax((0, 2))
        assert (difference[:place] < 1e-12).all() and (difference[place:] > 1e-4).all()
        assert torch.allclose(network(x[:, : place + 1], t), out[:, : place + 1], atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("parts", [(7,), (1,) * 7, (3, 1, 3), (2, 0, 5)], ids=str)
def test_cache_is_exact(options: dict[str, Any], parts: tuple[int, ...]) -> None:
    network = awake(build(**options))
    x = tokens()
    t = times(network)
    cache: dict[str, Tensor] = {}
    pieces = []
    for piece in x.split(list(parts), 1):
        logits, cache = network(piece, t, cache=cache)
        pieces.append(logits)
    assert torch.allclose(torch.cat(pieces, 1), network(x, t), atol=1e-12)
    assert cache_length(cache) == 7 and batch_size(cache) == 3
    heads = options.get("kv_heads", 4)
    assert all(leaf.shape == (3, 7, heads, 4) for leaf in cache.values()) and len(cache) == 4


def test_cache_is_a_value() -> None:
    """Calls leave it as it was; rows move by `take`; it is cut back to a length."""
    network = awake(build(kv_heads=2))
    x = tokens()
    _, cache = network(x, cache={})
    before = {name: leaf.clone() for name, leaf in cache.items()}
    first, _ = network(x[:, :1], cache=cache)
    again, longer = network(x[:, :1], cache=cache)
    assert torch.equal(first, again)
    assert all(torch.equal(cache[name], before[name]) for name in cache)

    rows = torch.tensor([2, 2, 0, 1])
    moved, _ = network(x[rows, :1], cache=take(cache, rows))
    assert torch.allclose(moved, first[rows], atol=1e-12)

    back = cut(longer, 7)
    assert all(torch.equal(back[name], cache[name]) for name in cache)
    short, _ = network(x[:, 3:], cache=cut(longer, 3))
    assert torch.allclose(short, network(x)[:, 3:], atol=1e-12)
    assert cut(longer, 0) == {} == cut({}, 0) and cache_length({}) == 0
    for length in (-1, 9):
        with pytest.raises(ValueError, match=f"length must lie in 0 .. 8, got {length}"):
            cut(longer, length)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_padding_on_the_left_changes_nothing(options: dict[str, Any]) -> None:
    """Rows of different lengths, at once and through a cache, as if each were alone."""
    network = awake(build(**options))
    lengths = [7, 4, 1]
    x, more = tokens(), tokens(3, 9)[:, 7:]
    t = times(network)
    mask = torch.arange(7) >= 7 - torch.tensor(lengths)[:, None]
    whole = network(x, t, mask=mask)
    assert whole.isfinite().all()
    logits, cache = network(x, t, mask=mask, cache={})
    assert torch.equal(logits, whole)
    later, cache = network(more, t, cache=cache)
    assert cache["mask"].tolist() == torch.cat([mask, torch.ones_like(more) > 0], 1).tolist()
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = torch.cat([x[one, 7 - length :], more[one]], 1)
        wanted = network(alone, None if t is None else t[one])
        assert torch.allclose(whole[one, 7 - length :], wanted[:, :length], atol=1e-12)
        assert torch.allclose(later[one], wanted[:, length:], atol=1e-12)
    # a mask that comes later, and one that hides nothing
    _, plain = network(x, t, cache={})
    hidden, masked = network(more, t, mask=torch.ones_like(more) > 0, cache=plain)
    assert torch.allclose(hidden, network(more, t, cache=plain)[0], atol=1e-12)
    assert masked["mask"].all() and masked["mask"].shape == (3, 9)


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    network = awake(build())
    x = tokens()
    mask = torch.arange(7) < torch.tensor([[7], [4], [1]])
    out, plain = network(x, mask=mask), network(x)
    assert torch.allclose(out[mask], plain[mask], atol=1e-12)


def test_positions_are_relative_and_count() -> None:
    network = awake(build(depth=1))
    x = torch.tensor([[3, 5, 5, 2], [5, 3, 5, 2]])
    out = network(x)[:, -1]
    assert (out[0] - out[1]).abs().max() > 1e-4


def test_shared_heads_are_repeated_heads() -> None:
    """Grouped queries are ordinary attention with equal weights for the keys of a group."""
    shared, plain = awake(build(kv_heads=2, depth=1)), awake(build(depth=1))
    state = shared.state_dict()
    weight = state["blocks.0.qkv.weight"]
    q, k, v = weight.split([16, 8, 8])
    k, v = (part.reshape(2, 4, 16).repeat_interleave(2, 0).reshape(16, 16) for part in (k, v))
    plain.load_state_dict(state | {"blocks.0.qkv.weight": torch.cat([q, k, v])})
    assert torch.allclose(shared(tokens()), plain(tokens()), atol=1e-12)


def test_what_is_computed() -> None:
    """One block and one head, written out."""
    network = awake(build(depth=1, heads=1, width=4, tied=True))
    x = tokens(2, 3)
    block = network.blocks[0]

    def norm(z: Tensor, gain: Tensor) -> Tensor:
        return z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    z = network.embed.weight[x]
    q, k, v = (norm(z, block.norm1.gain) @ block.qkv.weight.T).split(4, -1)
    angles = torch.arange(3.0)[:, None].double() * torch.tensor([1.0, 0.01]).double()
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotated(z: Tensor) -> Tensor:  # pairs (z_0, z_2) and (z_1, z_3) as complex numbers
        pairs = torch.complex(z[..., :2], z[..., 2:]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    scores = rotated(q) @ rotated(k).mT / 2
    weights = scores.masked_fill(torch.ones(3, 3).triu(1) > 0, -torch.inf).softmax(-1)
    z = z + weights @ v @ block.mix.weight.T
    gate, value = (norm(z, block.norm2.gain) @ block.expand.weight.T).chunk(2, -1)
    z = z + (gate * gate.sigmoid() * value) @ block.contract.weight.T
    wanted = norm(z, network.norm.gain) @ network.embed.weight.T
    assert torch.allclose(network(x), wanted, atol=1e-12)


def test_times() -> None:
    network = awake(build(time=True))
    x = tokens()
    one = network(x, torch.tensor(0.3))
    assert torch.equal(one, network(x, torch.full((3,), 0.3)))
    assert torch.allclose(one, network(x, torch.full((3, 7), 0.3)), atol=1e-12)
    levels = torch.full((3, 7), 0.3)
    levels[:, 4] = 0.9  # one token's level touches it and those that see it
    difference = (network(x, levels) - one).abs().amax((0, 2))
    assert (difference[:4] < 1e-12).all() and (difference[4:] > 1e-5).all()
    plain = build()
    assert torch.equal(plain(x), plain(x, torch.tensor(0.3)))
    # gates start at zero: blocks do nothing, whatever the time
    fresh = build(time=True)
    wanted = fresh.out(fresh.norm(fresh.embed(x)))
    assert torch.equal(fresh(x, torch.tensor(0.3)), wanted)


def test_derivative_equals_finite_differences() -> None:
    network = awake(build(time=True, kv_heads=2))
    x, levels = tokens(), NOISE.uniform(torch.empty(3, 7).double(), "t")
    mask = torch.arange(7) >= torch.tensor([[0], [2], [6]])

    def f(t: Tensor) -> Tensor:
        return network(x, t, mask=mask)

    check_derivative(f, (levels,), (torch.ones_like(levels),))
    check_derivative(lambda t: network(x, t), (levels,), (torch.ones_like(levels),))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_blocks_computed_again(options: dict[str, Any]) -> None:
    network = awake(build(**options))
    x = tokens()
    t = times(network)
    check_checkpoint(network, lambda: network(x, t), list(network.blocks))


def test_start_is_a_function_of_the_seed() -> None:
    before = torch.get_rng_state()
    one, two, three = (build(seed=seed).state_dict() for seed in (4, 4, 5))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["embed.weight"], three["embed.weight"])
    # a layer starts the same whatever else there is
    deeper = build(seed=4, depth=3).state_dict()
    assert all(torch.equal(one[name], deeper[name]) for name in one)
    assert "out.weight" not in build(tied=True).state_dict()
    assert not any(name.endswith("bias") for name in one)
    # the law of an untrained network is nearly uniform
    assert (build(width=64)(tokens()).log_softmax(-1) + torch.tensor(11.0).log()).abs().max() < 1


def test_described_and_rebuilt() -> None:
    network = build(kv_heads=2, tied=True, time=True, base=500.0, checkpoint=True)
    again: Any = rebuild(json.loads(json.dumps(describe(network))))
    assert type(again) is CausalTransformer and again.args == network.args
    awake(network).float()
    again.load_state_dict(network.state_dict())
    t = torch.tensor(0.5)
    assert torch.equal(network(tokens(), t), again(tokens(), t))
    assert not torch.equal(build()(tokens()), build(base=500.0)(tokens()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 0}, "vocabulary=0"),
        ({"depth": 0}, "depth=0"),
        ({"width": 18}, "multiple of heads"),
        ({"heads": 0}, "multiple of heads"),
        ({"width": 12}, "width / heads even"),
        ({"kv_heads": 3}, "kv_heads must divide heads"),
        ({"kv_heads": 0}, "kv_heads must divide heads"),
        ({"mlp_ratio": 0.0}, "mlp_ratio=0.0"),
        ({"base": 1.0}, "base=1.0"),
    ],
    ids=str,
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_bad_calls() -> None:
    network = build(time=True)
    x = tokens()
    t = torch.tensor(0.5)
    with pytest.raises(TypeError, match="x must be integer tokens, got torch.float32"):
        network(x.float(), t)
    with pytest.raises(ValueError, match=r"x must have shape \(batch, n\), got \(7,\)"):
        network(x[0], t)
    with pytest.raises(ValueError, match=r"t must have shape \(\), \(3,\) or \(3, 7\), got None"):
        network(x)
    with pytest.raises(ValueError, match=r"t must have shape .* got \(7,\)"):
        network(x, torch.zeros(7))
    with pytest.raises(ValueError, match=r"mask must be bool of shape \(3, 7\), got torch.float32"):
        network(x, t, mask=torch.ones(3, 7))
    with pytest.raises(ValueError, match=r"mask must be bool of shape \(3, 7\)"):
        network(x, t, mask=torch.ones(3, 6) > 0)
    _, cache = network(x, t, cache={})
    with pytest.raises(ValueError, match="x has 2 rows, the cache 3"):
        network(x[:2], t, cache=cache)


@pytest.mark.slow
def test_compiled_agrees() -> None:
    network = awake(build(time=True, kv_heads=2, depth=1)).float()
    x, t = tokens(), times(network)
    assert t is not None

    def derivative(t: Tensor) -> tuple[Tensor, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return JVP(lambda t: network(x, t), (t,), (torch.ones_like(t),))

    eager = derivative(t.float())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(derivative, backend="aot_eager", fullgraph=True)(t.float())
        plain = torch.compile(network, backend="aot_eager", fullgraph=True)
        first, cache = plain(x[:, :4], t, cache={})
        second, _ = plain(x[:, 4:], t, cache=cache)
    for mine, theirs in zip(compiled, eager, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert torch.allclose(torch.cat([first, second], 1), eager[0], rtol=1e-4, atol=1e-5)
