from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fluvial import KeyedNoise, simulate
from fluvial.adapters import from_edm
from fluvial.adapters.edm import EDMPath
from fluvial.core.gaussian.ode import Heun
from fluvial.core.gaussian.sde import EDMHeun

NOISE = KeyedNoise(5)


class Precond(nn.Module):
    """The calling convention: D(x, sigma, class_labels), one-hot labels, zeros meaning none."""

    def __init__(self, label_dim: int = 3, spread: float = 0.5) -> None:
        super().__init__()
        self.label_dim, self.spread = label_dim, spread
        self.inner = nn.utils.skip_init(nn.Linear, 5 + label_dim, 4)
        self.inner.weight.data = NOISE.normal(self.inner.weight, "weight")
        self.inner.bias.data = NOISE.normal(self.inner.bias[:, None], "bias")[:, 0]

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor | None = None) -> Tensor:
        sigma = sigma.reshape(-1, 1).expand(len(x), 1)
        if class_labels is None:
            class_labels = x.new_zeros(len(x), self.label_dim)
        total = (sigma**2 + self.spread**2).sqrt()
        features = torch.cat([x / total, sigma.log() / 4, class_labels], 1)
        guess = torch.tanh(self.inner(features))
        return (self.spread / total) ** 2 * x + sigma * self.spread / total * guess


def deterministic(network: Any, x: Tensor, steps: int, label: Tensor | None) -> Tensor:
    """Algorithm 1 of the paper, in its own time, with the published levels."""
    i = torch.arange(steps, dtype=torch.float64)
    levels = (80 ** (1 / 7) + i / (steps - 1) * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    levels = torch.cat([levels, torch.zeros(1)])
    for now, then in zip(levels[:-1], levels[1:], strict=True):
        slope = (x - network(x, now, label)) / now
        euler = x + (then - now) * slope
        if then > 0:
            slope = (slope + (euler - network(euler, then, label)) / then) / 2
        x = x + (then - now) * slope
    return x


@pytest.mark.parametrize("sampler", [Heun(), EDMHeun()], ids=["Heun", "EDMHeun"])
@pytest.mark.parametrize("labelled", [False, True])
def test_their_sampler(sampler: Any, labelled: bool) -> None:
    network = Precond().double()
    field, path, grid = from_edm(network)
    x = path.source(torch.empty(6, 4, dtype=torch.float64), NOISE)
    assert x.std() > 40
    label = torch.tensor([0, 1, 2, 2, 1, 0]) if labelled else None
    one_hot = torch.eye(3, dtype=torch.float64)[label] if labelled else None
    with torch.no_grad():
        wanted = deterministic(network, x, 12, one_hot)
        cond = {"label": label} if labelled else {}
        mine = simulate(x, grid(12), sampler, path, field, NOISE, **cond)
    assert (mine - wanted).abs().max() < 1e-9 and wanted.abs().max() > 0.1


def test_field() -> None:
    network = Precond().train()
    field, path, _ = from_edm(network, sigma_max=10.0)
    assert field.predicts == "clean" and not network.training
    x = NOISE.normal(torch.empty(2, 4))
    t = torch.tensor([0.3, 0.7])
    assert torch.equal(field(x, t), network(x, 10 * t))
    assert torch.equal(field(x, torch.tensor(0.3)), network(x, torch.full((2,), 3.0)))
    labels = torch.tensor([1, 3])  # and none
    rows = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert torch.equal(field(x, t, label=labels), network(x, 10 * t, rows))
    assert torch.equal(field(x, t, label=torch.tensor(3)), field(x, t))
    with pytest.raises(ValueError, match="without classes"):
        from_edm(Precond(label_dim=0)).field(x, t, label=labels)


def test_labels() -> None:
    field = from_edm(Precond()).field
    x, t, labels = NOISE.normal(torch.empty(4, 4)), torch.tensor(0.5), torch.tensor([0, 1, 2, 3])
    wanted = field(x, t, label=labels)
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(field(x, t, label=labels.to(dtype)), wanted)
    for label, got in ((labels.float(), "torch.float32"), (labels > 0, "torch.bool"), (1, "int")):
        with pytest.raises(TypeError, match=f"label must be a tensor of integers, got {got}"):
            field(x, t, label=label)
    for label in (labels[:2], labels[:, None]):
        with pytest.raises(ValueError, match=r"label must have shape \(\) or \(4,\)"):
            field(x, t, label=label)
    for label in (labels + 1, labels - 1):
        with pytest.raises(ValueError, match=r"label must lie in 0 .. 3, got values from"):
            field(x, t, label=label)
    with pytest.raises(TypeError, match="network must be a module, got function"):
        from_edm(lambda x, sigma, class_labels: x)  # type: ignore[arg-type]


def test_path() -> None:
    path = EDMPath(20.0)
    t = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    assert path.alpha(t).tolist() == [1, 1, 1] and path.sigma(t).tolist() == [0, 5, 20]
    assert path.alpha_rate(t).tolist() == [0, 0, 0] and path.sigma_rate(t).tolist() == [20, 20, 20]
    drift, diffusion = path.sde(t)
    assert not drift.value.any()
    assert torch.allclose(diffusion.value.square(), 2 * 400 * t)  # d sigma^2 / dt
    for sigma_max in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="sigma_max must be positive and finite"):
            EDMPath(sigma_max)


def test_grid() -> None:
    _, path, grid = from_edm(Precond(), sigma_min=0.1, sigma_max=10.0)
    levels = path.sigma(grid(5))
    assert levels[0, 0] == pytest.approx(10) and levels[-1, 0] == pytest.approx(0.1)
    assert levels[-1, 1] == 0 and len(levels) == 5
    roots = levels[:, 0] ** (1 / 7)
    assert torch.allclose(roots.diff(), roots.diff()[0], rtol=1e-9)
    assert torch.allclose(path.sigma(grid(5, rho=1.0))[:, 0].diff(), torch.tensor(-2.475).double())


def test_weights(tmp_path: Path) -> None:
    source = Precond()
    file = tmp_path / "weights.safetensors"
    save_file(source.state_dict(), file)
    target = Precond()
    target.inner.weight.data.zero_()
    field = from_edm(target, weights=file).field
    x, t = NOISE.normal(torch.empty(2, 4)), torch.tensor(0.5)
    assert torch.equal(field(x, t), from_edm(source).field(x, t))

    with pytest.raises(FileNotFoundError, match=r"no file .*nothing\.safetensors"):
        from_edm(target, weights=tmp_path / "nothing.safetensors")
    torch.save(source.state_dict(), tmp_path / "weights.pkl")
    with pytest.raises(ValueError, match="weights must be a safetensors file, got .*weights.pkl"):
        from_edm(target, weights=tmp_path / "weights.pkl")
    with pytest.raises(ValueError, match="do not fit the network"):
        from_edm(Precond(label_dim=2), weights=str(file))


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 1.0), (0.1, float("inf"))])
def test_bad_levels(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="need 0 < sigma_min < sigma_max"):
        from_edm(Precond(), sigma_min=low, sigma_max=high)
