from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.networks import MLP, describe, rebuild

NOISE = KeyedNoise(7)
JVP: Any = torch.func.jvp  # whose type forgets about tuples


def build(**changes: Any) -> Any:
    return MLP(**({"shape": (5,), "width": 16, "depth": 2, "num_classes": 3} | changes))


def awake(network: Any) -> Any:
    """No weight at zero, double precision."""
    for name, value in network.named_parameters():
        value.data = value + 0.2 * NOISE.normal(value, name)
    return network.double()


def inputs(rows: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict[str, Tensor]]:
    x = NOISE.normal(torch.empty(rows, 5, dtype=dtype))
    t = NOISE.uniform(x[:, 0], "t")
    return x, {"t": t, "h": 0.7 * t, "label": torch.arange(rows) % 3}


def test_zero_at_the_start() -> None:
    x, cond = inputs(dtype=torch.float32)
    out = build()(x, **cond)
    assert out.shape == x.shape and out.dtype == x.dtype and not out.any()


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (2, 3, 4)])
def test_shapes(shape: tuple[int, ...]) -> None:
    network = build(shape=shape, num_classes=0)
    assert network.shape == shape
    assert network(torch.zeros(2, *shape), torch.ones(())).shape == (2, *shape)
    for wrong in (torch.zeros(2, *shape, 1), torch.zeros(2, 7)):
        with pytest.raises(ValueError, match=r"x must have shape \(batch, "):
            network(wrong, torch.ones(()))


def test_what_is_computed() -> None:
    """The formula of the docstring, with one block."""
    network = awake(build(depth=1, num_classes=0))
    x, cond = inputs()
    c = torch.nn.functional.silu(network.time(cond["t"]) + network.interval(cond["h"]))

    def norm(z: Tensor) -> Tensor:
        return (z - z.mean(1, keepdim=True)) / (z.var(1, keepdim=True, correction=0) + 1e-6).sqrt()

    z = network.embed(x)
    block = network.blocks[0]
    shift, scale, gate = block.modulation(c).split(16, 1)
    hidden = block.expand(norm(z) * (1 + scale) + shift)
    z = z + gate * block.contract(torch.nn.functional.gelu(hidden, approximate="tanh"))
    shift, scale = network.modulation(c).split(16, 1)
    wanted = network.out(norm(z) * (1 + scale) + shift)
    assert torch.allclose(network(x, cond["t"], h=cond["h"]), wanted, atol=1e-12)


def test_derivative_equals_finite_differences() -> None:
    network = awake(build())
    x, cond = inputs()
    label, direction = cond.pop("label"), NOISE.normal(x, "direction")

    def f(x: Tensor, t: Tensor, h: Tensor) -> Tensor:
        return network(x, t, h=h, label=label)

    at = (x, cond["t"], cond["h"])
    tangents = (direction, torch.ones_like(at[1]), 0.5 * torch.ones_like(at[1]))
    with torch.no_grad():
        out, derivative = JVP(f, at, tangents)
        step = 1e-5
        ahead, behind = (
            f(*(v + sign * step * d for v, d in zip(at, tangents, strict=True))) for sign in (1, -1)
        )
        assert torch.equal(out, f(*at))
    assert derivative.abs().max() > 1e-2
    assert torch.allclose(derivative, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


def test_rows_are_apart() -> None:
    network = awake(build())
    x, cond = inputs(7)
    whole = network(x, **cond)
    for rows in torch.arange(7).split(3):
        part = network(x[rows], **{name: value[rows] for name, value in cond.items()})
        assert (part - whole[rows]).abs().max() < 1e-12


def test_labels_and_defaults() -> None:
    network = awake(build())
    x, cond = inputs()
    label = cond.pop("label")
    none = network(x, **cond)
    assert torch.equal(none, network(x, **cond, label=torch.full_like(label, 3)))
    assert (network(x, **cond, label=label) - none).abs().amax(1).min() > 1e-4
    t = cond["t"]
    assert torch.equal(network(x, t), network(x, t, h=0 * t))
    assert not torch.allclose(network(x, t), network(x, t, h=t))
    with pytest.raises(ValueError, match="num_classes=0"):
        build(num_classes=0)(x.float(), t.float(), label=label)


def test_start_is_a_function_of_the_seed() -> None:
    before = torch.get_rng_state()
    one, two, three = (build(seed=seed).state_dict() for seed in (4, 4, 5))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["embed.weight"], three["embed.weight"])


def test_described_and_rebuilt() -> None:
    network = build(shape=(2, 3), ratio=2.5)
    again = rebuild(json.loads(json.dumps(describe(network))))
    assert type(again) is MLP and again.args == network.args
    awake(network).float()
    again.load_state_dict(network.state_dict())
    x = NOISE.normal(torch.empty(4, 2, 3))
    assert torch.equal(network(x, torch.tensor(0.5)), again(x, torch.tensor(0.5)))


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": ()},
        {"shape": (0,)},
        {"shape": (3, -1)},
        {"width": 0},
        {"depth": 0},
        {"num_classes": -1},
        {"ratio": 0.01},
    ],
    ids=str,
)
def test_bad_arguments(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="need positive sizes"):
        build(**changes)


@pytest.mark.slow
def test_compiled_derivative_agrees() -> None:
    network = awake(build(depth=1)).float()
    x, cond = inputs(dtype=torch.float32)
    label = cond.pop("label")

    def derivative(x: Tensor, t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
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
