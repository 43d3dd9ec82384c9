from __future__ import annotations

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
    monkeypatch.setitem(__import__("sys").modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fluvial\[features\]'"):
        EfficientNetLite()
