from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fluvial.core.noise import KeyedNoise

NOISE = KeyedNoise(7)
JVP: Any = torch.func.jvp  # whose type forgets about tuples


def awake(network: Any, scale: float = 0.2) -> Any:
    """No weight at zero, double precision."""
    for name, value in network.named_parameters():
        value.data = value + scale * NOISE.normal(value, name)
    return network.double()


def check_derivative(
    f: Callable[..., Tensor], at: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> None:
    """The jvp of ``f`` equals central differences, in float64."""
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        out, derivative = JVP(f, at, tangents)
        step = 1e-5
        ahead, behind = (
            f(*(v + sign * step * d for v, d in zip(at, tangents, strict=True))) for sign in (1, -1)
        )
        assert torch.allclose(out, f(*at), atol=1e-12)
    assert derivative.abs().max() > 1e-2
    assert torch.allclose(derivative, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


def check_checkpoint(network: Any, run: Callable[[], Tensor], blocks: list[nn.Module]) -> None:
    """With ``checkpoint`` every block runs twice and gives the same gradients, bit for bit."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handles = [block.register_forward_pre_hook(count) for block in blocks]
    gradients, outputs = [], []
    for checkpoint in (False, True):
        network.checkpoint = checkpoint
        calls = 0
        outputs.append(run())
        network.zero_grad()
        outputs[-1].square().sum().backward()
        assert calls == len(blocks) * (1 + checkpoint)
        gradients.append([p.grad for p in network.parameters() if p.grad is not None])
    assert torch.equal(*outputs)
    assert len(gradients[0]) == len(gradients[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    with torch.no_grad():
        calls = 0
        run()
        assert calls == len(blocks)
    for handle in handles:
        handle.remove()
