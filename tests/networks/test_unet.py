from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fluvial.networks import UNet, describe, rebuild
from fluvial.networks.layers import GroupNorm

from .common import JVP, NOISE, awake, check_checkpoint, check_derivative

SMALL: dict[str, Any] = {
    "size": (4, 8),
    "channels": 2,
    "width": 8,
    "multipliers": (1, 2),
    "blocks": 1,
    "attention": (4,),
    "heads": 2,
    "num_classes": 3,
    "vector": 2,
}


def build(**changes: Any) -> Any:
    return UNet(**(SMALL | changes))


def inputs(rows: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Tensor]]:
    x = NOISE.normal(torch.empty(rows, 2, 4, 8, dtype=dtype))
    t = NOISE.uniform(x[:, 0, 0, 0], "t")
    label, vector = torch.arange(rows) % 3, NOISE.normal(x[:, 0, 0, :2], "vector")
    return x, {"t": t, "h": 0.7 * t, "label": label, "vector": vector}


def test_zero_at_the_start_and_every_layer_learns() -> None:
    network = build()
    x, cond = inputs(dtype=torch.float32)
    out = network(x, **cond)
    assert out.shape == x.shape and out.dtype == x.dtype and not out.any()
    network = awake(network, 1e-2)
    x, cond = inputs()
    network(x, **cond).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in network.parameters())


@pytest.mark.parametrize(
    ("size", "multipliers", "factors", "attention"),
    [(4, (1,), None, ()), ((6, 12), (1, 1, 2), (3, 2), (6, 1)), (8, (2, 1), (4,), (2,))],
)
def test_shapes(size: Any, multipliers: Any, factors: Any, attention: Any) -> None:
    network = build(
        size=size, channels=3, multipliers=multipliers, factors=factors, attention=attention
    )
    shape = (3, *((size, size) if isinstance(size, int) else size))
    assert network.shape == shape
    awake(network).float()
    assert network(torch.ones(2, *shape), torch.ones(())).shape == (2, *shape)
    # another size, of the same multiples
    larger = torch.ones(1, 3, *(2 * side for side in shape[1:]))
    assert network(larger, torch.ones(())).shape == larger.shape


def test_sizes_of_the_feature_maps() -> None:
    """Of every block: what comes in, with the skip, and what goes out."""
    network = build(size=12, multipliers=(1, 2, 3), factors=(2, 3), blocks=2, attention=(6,))
    seen: list[tuple[int, ...]] = []
    for block in (*network.down, *network.middle, *network.up):
        block.register_forward_hook(
            lambda _, args, out: seen.append((*args[0].shape[1:3], *out.shape[1:3]))
        )
    network(torch.zeros(1, 2, 12, 12), torch.zeros(()))
    down = [(8, 12, 8, 12)] * 2 + [(8, 12, 8, 6), (8, 6, 16, 6), (16, 6, 16, 6), (16, 6, 16, 2)]
    deepest = [(16, 2, 24, 2), (24, 2, 24, 2)] + [(24, 2, 24, 2)] * 2
    up = [(48, 2, 24, 2), (48, 2, 24, 2), (40, 2, 24, 2), (24, 2, 24, 6)]
    up += [(40, 6, 16, 6), (32, 6, 16, 6), (24, 6, 16, 6), (16, 6, 16, 12)]
    up += [(24, 12, 8, 12), (16, 12, 8, 12), (16, 12, 8, 12)]
    assert seen == down + deepest + up
    attending = [
        block.attention is not None for block in (*network.down, *network.middle, *network.up)
    ]
    assert attending == [
        *(False, False, False, True, True, False, False, False),
        *(True, False),
        *(False, False, False, False, True, True, True, False, False, False, False),
    ]


def test_what_a_block_computes() -> None:
    """The formula of the docstring, with means going down and repetition going up."""
    network = awake(build())
    z, c = NOISE.normal(torch.empty(2, 8, 4, 8).double()), NOISE.normal(torch.empty(2, 32).double())

    def norm(z: Tensor) -> Tensor:  # of 8 channels in 2 groups
        groups = z.reshape(2, 2, 4, *z.shape[2:])
        mean, var = groups.mean((2, 3, 4), True), groups.var((2, 3, 4), correction=0, keepdim=True)
        return ((groups - mean) / (var + 1e-6).sqrt()).reshape(z.shape)

    block = network.down[1]  # halves the resolution
    scale, shift = block.modulation(c)[..., None, None].split(8, 1)
    gain, bias = block.norm1.gain[:, None, None], block.norm1.bias[:, None, None]
    halved = functional.silu(norm(z) * gain + bias).unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5))
    inner = functional.silu(norm(block.conv1(halved)) * (1 + scale) + shift)
    wanted = z.unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5)) + block.conv2(inner)
    assert torch.allclose(block(z, c), wanted, atol=1e-12)

    block = awake(build(multipliers=(1, 1))).up[2]  # doubles it
    doubled = torch.kron(functional.silu(block.norm1(z)), torch.ones(2, 2).double())
    scale, shift = block.modulation(c)[..., None, None].split(8, 1)
    inner = functional.silu(norm(block.conv1(doubled)) * (1 + scale) + shift)
    wanted = torch.kron(z, torch.ones(2, 2).double()) + block.conv2(inner)
    assert torch.allclose(block(z, c), wanted, atol=1e-12)


@pytest.mark.parametrize(("channels", "groups"), [(3, 1), (8, 2), (24, 6), (100, 25), (256, 32)])
def test_group_norm(channels: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = awake(GroupNorm(channels))
    assert norm.groups == groups
    x = NOISE.normal(torch.empty(2, channels, 2, 3, dtype=torch.float64)) + 1
    wanted = functional.group_norm(x, groups, norm.gain, norm.bias, 1e-6)
    assert torch.equal(norm(x), wanted)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # written out
    assert torch.allclose(norm(x), wanted, atol=1e-12)
    plain = GroupNorm(channels, affine=False)
    assert torch.allclose(plain(x), functional.group_norm(x, groups, eps=1e-6), atol=1e-12)


def test_derivative_equals_finite_differences() -> None:
    network = awake(build())
    x, cond = inputs()
    label = cond.pop("label")

    def f(x: Tensor, t: Tensor, h: Tensor, vector: Tensor) -> Tensor:
        return network(x, t, h=h, label=label, vector=vector)

    at = (x, *cond.values())
    check_derivative(f, at, tuple(NOISE.normal(value, f"along {i}") for i, value in enumerate(at)))


def test_rows_are_apart() -> None:
    network = awake(build())
    x, cond = inputs(5)
    whole = network(x, **cond)
    for rows in torch.arange(5).split(3):
        part = network(x[rows], **{name: value[rows] for name, value in cond.items()})
        assert (part - whole[rows]).abs().max() < 1e-12


def test_every_condition_matters_and_has_its_default() -> None:
    network = awake(build())
    x, cond = inputs()
    t = cond["t"]
    plain = network(x, t)
    assert torch.equal(
        plain, network(x, t, h=0 * t, label=torch.full((4,), 3), vector=x.new_zeros(4, 2))
    )
    for name in ("h", "label", "vector"):
        other = network(x, t, **{name: cond[name]})
        assert (other - plain).abs().amax((1, 2, 3)).min() > 1e-4
    assert (network(x, 0.5 * t) - plain).abs().amax((1, 2, 3)).min() > 1e-4
    with pytest.raises(ValueError, match="num_classes=0"):
        build(num_classes=0)(x.float(), t, label=cond["label"])
    with pytest.raises(ValueError, match="vector=0"):
        build(vector=0)(x.float(), t, vector=cond["vector"])


def test_blocks_computed_again() -> None:
    network = awake(build())
    x, cond = inputs()
    blocks = [*network.down, *network.middle, *network.up]
    check_checkpoint(network, lambda: network(x, **cond), blocks)


def test_start_is_a_function_of_the_seed() -> None:
    before = torch.get_rng_state()
    one, two, three = (build(seed=seed).state_dict() for seed in (4, 4, 5))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["enter.weight"], three["enter.weight"])
    weight = build(width=32).state_dict()["down.0.conv1.weight"]
    bound = (6 / (9 * (32 + 32))) ** 0.5  # Xavier, of 3 x 3 pixels of 32 channels to as many
    assert bound * 0.98 < weight.abs().max() <= bound
    for name, value in one.items():
        if name.endswith("bias") or ".conv2." in name or "mix" in name or name.startswith("out."):
            assert not value.any(), name


def test_described_and_rebuilt() -> None:
    network = build(factors=(2,), checkpoint=True)
    again: Any = rebuild(json.loads(json.dumps(describe(network))))
    assert type(again) is UNet and again.args == network.args
    awake(network).float()
    again.load_state_dict(network.state_dict())
    x, cond = inputs(dtype=torch.float32)
    assert torch.equal(network(x, **cond), again(x, **cond))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": (4, 7)}, r"multiples of 2, by which this network shrinks them; got \(2, 4, 7\)"),
        ({"size": 0}, "need positive sizes"),
        ({"channels": 0}, "need positive sizes"),
        ({"width": 0}, "need positive sizes"),
        ({"blocks": 0}, "need positive sizes"),
        ({"multipliers": ()}, "need positive sizes"),
        ({"multipliers": (1, 0)}, "need positive sizes"),
        ({"factors": (0,)}, "need positive sizes"),
        ({"num_classes": -1}, "num_classes and vector >= 0"),
        ({"vector": -1}, "num_classes and vector >= 0"),
        ({"factors": (2, 2)}, r"one fewer than multipliers, got \(2, 2\) and \(1, 2\)"),
        ({"attention": (4, 3)}, r"attention must be among the heights \[4, 2\], got \[3\]"),
        ({"heads": 3}, r"heads must divide the channels, got 3 and \[8, 16\]"),
        ({"heads": 0}, "need positive sizes"),
    ],
    ids=str,
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changes)


@pytest.mark.parametrize("shape", [(1, 2, 5, 8), (1, 2, 4, 7), (1, 3, 4, 8), (2, 4, 8)])
def test_bad_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"images must have shape \(2, height, width\)"):
        build()(torch.zeros(shape), torch.zeros(()))


@pytest.mark.slow
def test_compiled_derivative_agrees() -> None:
    """Traced whole; code generation, which takes minutes, is left out."""
    network = awake(build(multipliers=(1, 1), attention=())).float()
    x, cond = inputs(dtype=torch.float32)
    label, vector = cond.pop("label"), cond.pop("vector")

    def derivative(x: Tensor, t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return JVP(
                lambda x, t, h: network(x, t, h=h, label=label, vector=vector),
                (x, t, h),
                (torch.ones_like(x), torch.ones_like(t), torch.ones_like(h)),
            )

    eager = derivative(x, **cond)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(derivative, backend="aot_eager", fullgraph=True)(x, **cond)
        network.checkpoint = True
        again = torch.compile(network, backend="aot_eager", fullgraph=True)(
            x, **cond, label=label, vector=vector
        )
    for mine, theirs in zip(compiled, eager, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert torch.allclose(again, eager[0], rtol=1e-4, atol=1e-5)
