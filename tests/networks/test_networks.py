from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fluvial.networks import ContextTransformer, DiT, describe, rebuild
from fluvial.networks.layers import Patches, ScalarEmbedding

from .common import JVP, NOISE, awake, check_checkpoint, check_derivative

KINDS: list[type[nn.Module]] = [DiT, ContextTransformer]
SMALL: dict[str, Any] = {
    "size": (4, 6),
    "channels": 2,
    "patch": 2,
    "width": 16,
    "depth": 2,
    "heads": 2,
    "num_classes": 3,
}


def build(kind: Callable[..., nn.Module], **changes: Any) -> Any:
    return kind(**(SMALL | changes))


def inputs(rows: int = 5, dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Tensor]]:
    x = NOISE.normal(torch.empty(rows, 2, 4, 6, dtype=dtype))
    t = NOISE.uniform(x[:, 0, 0, 0], "t")
    label = torch.arange(rows) % 3
    return x, {"t": t, "h": 0.7 * t, "label": label}


@pytest.mark.parametrize("kind", KINDS)
def test_zero_at_the_start(kind: type[nn.Module]) -> None:
    x, cond = inputs(dtype=torch.float32)
    out = build(kind)(x, **cond)
    assert out.shape == x.shape and out.dtype == x.dtype and not out.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [4, (2, 6), (8, 4)])
def test_shapes(kind: type[nn.Module], size: int | tuple[int, int]) -> None:
    network = build(kind, size=size, channels=3, num_classes=0)
    shape = (3, *((size, size) if isinstance(size, int) else size))
    assert network.shape == shape
    x = torch.zeros(2, *shape)
    assert network(x, torch.ones(())).shape == x.shape
    with pytest.raises(ValueError, match="shape"):
        network(torch.zeros(2, 3, 6, 6), torch.ones(()))
    with pytest.raises(ValueError, match="shape"):
        network(torch.zeros(2, 1, *shape[1:]), torch.ones(()))


@pytest.mark.parametrize("kind", KINDS)
def test_derivative_equals_finite_differences(kind: type[nn.Module]) -> None:
    network = awake(build(kind))
    x, cond = inputs()
    label, direction = cond.pop("label"), NOISE.normal(x, "direction")

    def f(x: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return network(x, t, h=h, label=label)

    tangents = (direction, torch.ones_like(cond["t"]), 0.5 * torch.ones_like(cond["t"]))
    check_derivative(f, (x, *cond.values()), tangents)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_computed_again(kind: type[nn.Module]) -> None:
    network = awake(build(kind))
    x, cond = inputs()
    blocks = network.blocks if kind is DiT else network.trunk
    check_checkpoint(network, lambda: network(x, **cond), list(blocks))


def test_blocks_are_not_computed_again_where_a_tangent_passes() -> None:
    """The loss of a MeanFlow, backwards through a jvp, works with and without and is the same."""
    x, cond = inputs()
    t, label = cond["t"], cond["label"]
    gradients = []
    for checkpoint in (False, True):
        network = awake(build(DiT, checkpoint=checkpoint))
        with sdpa_kernel(SDPBackend.MATH):
            u, du = JVP(
                lambda x, t, net=network: net(x, t, h=0.5 * t, label=label),
                (x, t),
                (torch.ones_like(x), torch.ones_like(t)),
            )
        (u.square().sum() + du.square().sum()).backward()
        gradients.append([p.grad for p in network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_dit_without_the_newer_conditions_is_what_it_was() -> None:
    """Numbers of the DiT that the recorded MeanFlow was trained with."""
    network = build(DiT)
    digest = hashlib.sha256()
    uniform = ("embed", "qkv", "mix", "expand", "contract", "modulation", "out")
    for name, value in network.state_dict().items():
        digest.update(f"{name}{tuple(value.shape)}".encode())
        if name.split(".")[-2] in uniform:  # uniforms have the same bits on every machine
            digest.update(value.numpy().tobytes())
    assert digest.hexdigest()[:16] == "79bf37a6aa9922f6"
    assert network.args == SMALL | {"mlp_ratio": 4.0}
    for name, value in network.named_parameters():
        value.data = value + 0.2 * NOISE.normal(value, name)
    x, t = NOISE.normal(torch.empty(5, 2, 4, 6)), NOISE.uniform(torch.empty(5), "t")
    cond = {"h": (0.7 * t).double(), "label": torch.arange(5) % 3}
    out = network.double()(x.double(), t.double(), **cond).detach()
    wanted = [0.9173327950687058, 1.2118245938748429, 0.5567861926101849, 0.7140442498695424]
    assert out.flatten()[:4].tolist() == pytest.approx(wanted, rel=1e-5)
    assert float(out.sum()) == pytest.approx(65.9630646624444, rel=1e-5)
    assert float(out.square().sum()) == pytest.approx(543.0101999974428, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_apart(kind: type[nn.Module]) -> None:
    network = awake(build(kind))
    x, cond = inputs(7)
    whole = network(x, **cond)
    for rows in torch.arange(7).split(3):
        part = network(x[rows], **{name: value[rows] for name, value in cond.items()})
        assert (part - whole[rows]).abs().max() < 1e-12
    scalar = network(x, torch.tensor(0.5), h=torch.tensor(0.25), label=cond["label"])
    each = network(x, torch.full((7,), 0.5), h=torch.full((7,), 0.25), label=cond["label"])
    assert torch.equal(scalar, each)


@pytest.mark.parametrize("kind", KINDS)
def test_labels(kind: type[nn.Module]) -> None:
    network = awake(build(kind))
    x, cond = inputs()
    label = cond.pop("label")
    none = network(x, **cond)
    assert torch.equal(none, network(x, **cond, label=torch.full_like(label, 3)))
    assert torch.equal(none, network(x, **cond, label=None))
    with_label = network(x, **cond, label=label)
    assert torch.equal(with_label, network(x, **cond, label=label.int()))
    assert (with_label - none).abs().amax((1, 2, 3)).min() > 1e-4
    with pytest.raises(ValueError, match="num_classes=0"):
        build(kind, num_classes=0)(x.float(), cond["t"], label=label)


@pytest.mark.parametrize("kind", KINDS)
def test_every_condition_matters_and_has_its_default(kind: type[nn.Module]) -> None:
    network = awake(build(kind))
    x, cond = inputs()
    t = cond["t"]
    plain = network(x, t)
    assert torch.equal(plain, network(x, t, h=0 * t))
    assert not torch.allclose(plain, network(x, t, h=t))
    assert torch.equal(plain, network(x, 0.5 * t)) == (kind is ContextTransformer)
    if kind is ContextTransformer:
        for name, default in (("omega", 1.0), ("t_min", 0.0), ("t_max", 1.0)):
            value = torch.full_like(t, default)
            assert torch.equal(plain, network(x, t, **{name: value}))
            assert not torch.allclose(plain, network(x, t, **{name: value + 1}))


@pytest.mark.parametrize("kind", KINDS)
def test_start_is_a_function_of_the_seed(kind: type[nn.Module]) -> None:
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    one = build(kind, seed=4).state_dict()
    after = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    torch.manual_seed(5)
    two, three = build(kind, seed=4).state_dict(), build(kind, seed=5).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["embed.weight"], three["embed.weight"])
    # a layer starts the same whatever else there is
    deeper = build(kind, seed=4, depth=4).state_dict()
    assert torch.equal(one["embed.weight"], deeper["embed.weight"])


def test_start_of_the_layers() -> None:
    net = build(DiT, width=64, channels=4)
    state = net.state_dict()
    bound = (6 / (64 + 192)) ** 0.5  # Xavier, of 64 to 192
    weight = state["blocks.0.qkv.weight"]
    assert bound * 0.98 < weight.abs().max() <= bound
    assert abs(float(weight.std()) - bound / 3**0.5) < 0.02 * bound
    for name in ("time.inner.weight", "interval.outer.weight"):
        assert abs(float(state[name].std()) / 0.02 - 1) < 0.05
    for name, value in state.items():
        if name.endswith("bias") or "modulation" in name or name.startswith("out."):
            assert not value.any(), name


def test_gates_of_the_context_transformer_start_at_zero() -> None:
    net = build(ContextTransformer, velocity_depth=1)
    for name, value in net.state_dict().items():
        if "gate" in name or ".out." in name:
            assert not value.any(), name


@pytest.mark.parametrize(
    ("kind", "patch", "width", "depth", "heads", "millions"),
    [
        (DiT, 4, 768, 12, 12, 131),
        (DiT, 2, 768, 12, 12, 131),
        (DiT, 2, 1152, 28, 16, 676),
        (ContextTransformer, 2, 768, 12, 12, 89),
        (ContextTransformer, 2, 1024, 48, 16, 610),
    ],
)
def test_published_sizes(
    kind: type[nn.Module],
    patch: int,
    width: int,
    depth: int,
    heads: int,
    millions: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("dit", "context"):
        monkeypatch.setattr(f"fluvial.networks.{module}.initialise", lambda network, seed: None)
    sizes = {"patch": patch, "width": width, "depth": depth, "heads": heads}
    net = build(kind, size=32, channels=4, num_classes=1000, **sizes)
    count = sum(value.numel() for value in net.parameters())
    assert abs(count / 1e6 - millions) < 0.01 * millions


def test_embedding_of_a_scalar() -> None:
    """cos, then sin, of the raw time; frequencies from 1 to 1 / 10000."""
    layer = ScalarEmbedding(8).double()
    t = torch.tensor([0.3, 1.0], dtype=torch.float64)
    seen: list[Tensor] = []
    layer.inner.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    layer(t)
    i = torch.arange(128, dtype=torch.float64)
    angles = t[:, None] * 10_000.0 ** (-i / 128)
    assert torch.allclose(seen[0], torch.cat([angles.cos(), angles.sin()], 1), atol=1e-7)


def test_patches_come_back() -> None:
    patches = Patches((4, 6), 3, 2)
    x = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    tokens = patches(x)
    assert tokens.shape == (2, 6, 12)
    assert torch.equal(tokens[0, 1], x[0, :, :2, 2:4].flatten())  # row 0, column 1
    assert torch.equal(patches.join(tokens), x)


def test_positions() -> None:
    net = build(DiT, width=16)
    rates = 10_000.0 ** (-torch.arange(4) / 4)
    row, column = 1, 2  # of a grid of 2 x 3
    wanted = torch.cat([wave(a * rates) for a in (column, row) for wave in (torch.sin, torch.cos)])
    assert torch.allclose(net.positions[row * 3 + column], wanted, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_matter(kind: type[nn.Module]) -> None:
    """Without them a transformer would commute with a swap of two patches."""
    network = awake(build(kind))
    x, cond = inputs()
    swapped = torch.cat([x[..., 2:4], x[..., :2], x[..., 4:]], -1)
    out = network(swapped, **cond)
    back = torch.cat([out[..., 2:4], out[..., :2], out[..., 4:]], -1)
    assert not torch.allclose(back, network(x, **cond), atol=1e-3)


def test_velocity_head() -> None:
    network = awake(build(ContextTransformer, depth=3, velocity_depth=2))
    x, cond = inputs()
    assert network.has_velocity_head
    u, v = network(x, **cond, velocity=True)
    assert v.shape == x.shape and not torch.allclose(u, v)
    assert torch.equal(u, network(x, **cond))
    v.sum().backward()
    assert all(p.grad is None for p in network.heads[0].parameters())
    assert all(p.grad is not None for p in network.heads[1].parameters())
    assert len(network.trunk) == 1 and all(len(head.blocks) == 2 for head in network.heads)
    plain = build(ContextTransformer)
    assert not plain.has_velocity_head
    with pytest.raises(ValueError, match="velocity_depth"):
        plain(x.float(), cond["t"], velocity=True)


@pytest.mark.parametrize(
    "network",
    [build(DiT, mlp_ratio=2.5), build(ContextTransformer, velocity_depth=1)],
    ids=["DiT", "ContextTransformer"],
)
def test_described_and_rebuilt(network: Any) -> None:
    again = rebuild(json.loads(json.dumps(describe(network))))
    assert type(again) is type(network) and again.args == network.args
    awake(network).float()
    again.load_state_dict(network.state_dict())
    x, cond = inputs(dtype=torch.float32)
    assert torch.equal(network(x, **cond), again(x, **cond))


def test_networks_of_others_are_not_rebuilt() -> None:
    class DiT(nn.Module):
        """Not ours, whatever its name."""

    description = describe(DiT())
    assert description["args"] is None and description["class"] != "DiT"
    with pytest.raises(ValueError, match="network="):
        rebuild(description)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"patch": 3},
        {"patch": 0},
        {"channels": 0},
        {"size": 0},
        {"width": 15},
        {"width": 0},
        {"width": 18, "heads": 1},
        {"heads": 0},
        {"heads": 3},
        {"depth": 0},
        {"num_classes": -1},
    ],
    ids=str,
)
def test_bad_arguments(kind: type[nn.Module], changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        build(kind, **changes)


@pytest.mark.parametrize(
    "changes", [{"velocity_depth": 2}, {"velocity_depth": -1}, {"width": 12}], ids=str
)
def test_bad_arguments_of_the_context_transformer(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        build(ContextTransformer, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_derivative_agrees(kind: type[nn.Module]) -> None:
    network = awake(build(kind, depth=1)).float()
    x, cond = inputs(dtype=torch.float32)
    label = cond.pop("label")

    def derivative(x: Tensor, t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return JVP(
                lambda x, t, h: network(x, t, h=h, label=label),
                (x, t, h),
                (torch.ones_like(x), torch.ones_like(t), torch.ones_like(h)),
            )

    eager = derivative(x, **cond)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(derivative)(x, **cond)
    for mine, theirs in zip(compiled, eager, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)
