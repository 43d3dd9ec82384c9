"""The number of threads holds within the block alone, and a small network trains on one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fluvial.core.noise import KeyedNoise
from fluvial.tabular.miri.rounds import SMALL, Rounds, VelocityMLP, train_round
from fluvial.training.threads import threads


def test_they_are_as_before_also_after_an_error() -> None:
    with threads(2):
        with pytest.raises(RuntimeError, match="on purpose"), threads(1):
            assert torch.get_num_threads() == 1
            raise RuntimeError("on purpose")
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("width", "expected"), [(8, 1), (1_100, 2)])
def test_a_round_takes_as_many_as_its_network_is_worth(width: int, expected: int) -> None:
    seen = []

    class Watched(VelocityMLP):
        def forward(self, *inputs: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return super().forward(*inputs)

    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(20, 3, dtype=torch.bool)
    mask[:10, 1] = False
    net = Watched(3, (width, width, width), seed=0)
    weights = sum(weight.numel() for weight in net.parameters())
    assert (10 * weights < SMALL) == (expected == 1)
    with threads(2):
        train_round(net, x, mask, Rounds(epochs=1), KeyedNoise(0))
        assert torch.get_num_threads() == 2
    assert seen and set(seen) == {expected}
