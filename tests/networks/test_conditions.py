"""A vector and a sequence as conditions of a DiT."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from fluvial.networks import DiT, describe, rebuild

from .common import NOISE, awake, check_checkpoint, check_derivative

SMALL: dict[str, Any] = {
    "size": 4,
    "channels": 1,
    "patch": 2,
    "width": 16,
    "depth": 2,
    "heads": 2,
    "vector": 3,
    "context": 5,
}


def build(**changes: Any) -> Any:
    return DiT(**(SMALL | changes))


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = NOISE.normal(torch.empty(4, 1, 4, 4, dtype=dtype))
    cond = {
        "vector": NOISE.normal(x.new_empty(4, 3), "vector"),
        "context": NOISE.normal(x.new_empty(4, 6, 5), "context"),
        "context_mask": torch.arange(6) < torch.tensor([[6], [3], [1], [0]]),
    }
    return x, NOISE.uniform(x[:, 0, 0, 0], "t"), cond


def test_zero_at_the_start_and_every_layer_learns() -> None:
    network = build()
    x, t, cond = inputs(torch.float32)
    assert not network(x, t, **cond).any()
    network = awake(network, 1e-2)
    x, t, cond = inputs()
    network(x, t, **cond).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in network.parameters())


def test_context_starts_without_effect() -> None:
    """Its last layers start at zero, so that it can be added to a trained network."""
    plain, more = awake(build(context=0)), build()
    more.load_state_dict(plain.state_dict(), strict=False)
    x, t, cond = inputs()
    vector = cond["vector"]
    assert torch.equal(more.double()(x, t, **cond), plain(x, t, vector=vector))


def test_derivative_equals_finite_differences() -> None:
    network = awake(build())
    x, t, cond = inputs()
    mask = cond.pop("context_mask")

    def f(x: Tensor, t: Tensor, vector: Tensor, context: Tensor) -> Tensor:
        return network(x, t, vector=vector, context=context, context_mask=mask)

    at = (x, t, *cond.values())
    check_derivative(f, at, tuple(NOISE.normal(value, f"along {i}") for i, value in enumerate(at)))


def test_hidden_tokens_do_not_count() -> None:
    network = awake(build())
    x, t, cond = inputs()
    whole = network(x, t, **cond)
    assert whole.isfinite().all()
    mask = cond["context_mask"]
    other = torch.where(mask[..., None], cond["context"], 1e6)
    assert torch.equal(whole, network(x, t, **{**cond, "context": other}))
    for row, count in enumerate(mask.sum(1).tolist()):
        one = slice(row, row + 1)
        short = {"vector": cond["vector"][one], "context": cond["context"][one, :count]}
        assert torch.allclose(network(x[one], t[one], **short), whole[one], atol=1e-12)


def test_order_of_the_tokens_does_not_count_and_each_does() -> None:
    network = awake(build())
    x, t, cond = inputs()
    context = cond["context"]
    out = network(x, t, context=context)
    assert torch.allclose(out, network(x, t, context=context.flip(1)), atol=1e-12)
    changed = context.clone()
    changed[:, 4] += 1
    difference = (out - network(x, t, context=changed)).abs().amax((1, 2, 3))
    assert difference.min() > 1e-5


def test_no_condition_is_a_condition() -> None:
    network = awake(build())
    x, t, cond = inputs()
    none = network(x, t)
    zeros = {"vector": torch.zeros_like(cond["vector"]), "context": cond["context"][:, :0]}
    assert torch.equal(none, network(x, t, **zeros))
    hidden = torch.zeros_like(cond["context_mask"])
    nothing = network(x, t, context=cond["context"], context_mask=hidden)
    assert torch.allclose(none, nothing, atol=1e-12)
    for name in ("vector", "context"):
        assert (network(x, t, **{name: cond[name]}) - none).abs().amax((1, 2, 3)).min() > 1e-4
    # a condition of another precision takes the network's
    assert (
        network(x, t, vector=cond["vector"].float(), context=cond["context"].half()).dtype
        == x.dtype
    )


def test_blocks_computed_again() -> None:
    network = awake(build())
    x, t, cond = inputs()
    check_checkpoint(network, lambda: network(x, t, **cond), list(network.blocks))


def test_described_and_rebuilt() -> None:
    network = build(checkpoint=True, num_classes=2)
    again: Any = rebuild(json.loads(json.dumps(describe(network))))
    assert again.args == network.args and network.args["vector"] == 3
    assert not again.checkpoint  # how gradients are computed is not what the network is
    again.load_state_dict(network.state_dict())
    x, t, cond = inputs(torch.float32)
    assert torch.equal(network(x, t, **cond), again(x, t, **cond))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vector": torch.zeros(4, 2)}, r"vector must have shape \(4, 3\), got \(4, 2\)"),
        ({"vector": torch.zeros(3)}, r"vector must have shape \(4, 3\), got \(3,\)"),
        (
            {"context": torch.zeros(4, 6, 4)},
            r"context must have shape \(4, n, 5\), got \(4, 6, 4\)",
        ),
        ({"context": torch.zeros(1, 6, 5)}, r"context must have shape \(4, n, 5\)"),
        ({"context": torch.zeros(4, 5)}, r"context must have shape \(4, n, 5\)"),
        ({"context_mask": torch.ones(4, 6)}, r"context_mask must be bool of shape \(4, 6\)"),
        ({"context_mask": torch.ones(4, 5) > 0}, r"context_mask must be bool of shape \(4, 6\)"),
        ({"context": None}, "context_mask given without context"),
    ],
)
def test_bad_conditions(changes: dict[str, Any], message: str) -> None:
    x, t, cond = inputs(torch.float32)
    with pytest.raises(ValueError, match=message):
        build()(x, t, **{**cond, **changes})


def test_conditions_that_the_network_does_not_have() -> None:
    x, t, cond = inputs(torch.float32)
    with pytest.raises(ValueError, match="network with vector=0"):
        build(vector=0)(x, t, vector=cond["vector"])
    for name in ("context", "context_mask"):
        with pytest.raises(ValueError, match="network with context=0"):
            build(context=0)(x, t, **{name: cond[name]})
    for name in ("vector", "context"):
        with pytest.raises(ValueError, match=f"{name}=-1"):
            build(**{name: -1})
