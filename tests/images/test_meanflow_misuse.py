"""Mistakes that a user of MeanFlow makes, each named at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fluvial import Ancestral, KeyedNoise, simulate
from fluvial.core.gaussian.fields import convert
from fluvial.core.gaussian.paths import Linear
from fluvial.core.time import uniform_grid
from fluvial.images import FreeGuidance, Guidance, MeanFlow
from fluvial.networks import ContextTransformer, DiT

NOISE = KeyedNoise(0)


class Affine(nn.Module):
    """The field's (x, t, h) through one linear layer."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(4, outputs)

    def forward(self, x: Tensor, t: Tensor, *, h: Tensor) -> Tensor:
        return self.layer(torch.cat([x, t[:, None], h[:, None]], dim=1))


def points(rows: int, width: int = 2) -> Tensor:
    return NOISE.normal(torch.empty(rows, width))


def fit(model: MeanFlow, x: Any, **options: Any) -> MeanFlow:
    return model.fit(x, **{"steps": 2, "batch_size": 8, "progress": False, **options})


def test_network_of_another_output_shape_is_refused():
    with pytest.raises(ValueError, match=r"returned \(\d+, 1\) for x of \(\d+, 2\)"):
        fit(MeanFlow(Affine(outputs=1)), points(20))


def test_dtype_of_data_and_network_must_agree():
    with pytest.raises(TypeError, match="x0 is torch.float64 and the network torch.float32"):
        fit(MeanFlow(Affine()), points(20).double())


@pytest.mark.parametrize("x", [np.zeros((20, 2), "f4"), [[0.0, 1.0]], None])
def test_data_that_is_no_tensor_is_named(x: Any):
    with pytest.raises(TypeError, match=f"x0 must be a tensor, got {type(x).__name__}"):
        fit(MeanFlow(Affine()), x)


def test_a_failed_fit_leaves_no_shape_behind():
    model = MeanFlow(Affine())
    with pytest.raises(RuntimeError):
        fit(model, points(20, width=3))
    assert model.shape is None
    assert fit(model, points(20)).shape == (2,)


def test_guidance_must_be_an_instance():
    network = DiT(size=4, channels=1, patch=2, width=8, depth=1, heads=1, num_classes=2)
    with pytest.raises(TypeError, match="guidance must be"):
        MeanFlow(network, guidance=Guidance)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"omega": 0.0}, {"omega": float("nan")}, {"t_min": 0.9, "t_max": 0.1}, {"t_min": -1.0}],
)
def test_impossible_free_guidance_is_refused(options: dict[str, float]):
    network = ContextTransformer(
        size=4, channels=1, patch=2, width=16, depth=1, heads=2, num_classes=2
    )
    model = MeanFlow(network, guidance=FreeGuidance())
    with pytest.raises(ValueError, match="omega|t_min"):
        model.sample(2, label=0, noise=NOISE, **options)


def test_ancestral_asks_for_a_clean_prediction_and_takes_a_converted_field():
    model = MeanFlow(Affine(), shape=(2,))
    with pytest.raises(ValueError, match="'mean_velocity'.*convert"):
        model.sample(3, sampler=Ancestral(), noise=NOISE)
    clean = convert(model.field, "clean", Linear())
    with torch.no_grad():
        x = simulate(points(3), uniform_grid(4), Ancestral(), Linear(), clean, NOISE)
    assert x.shape == (3, 2)


def test_resuming_on_other_data_is_refused(tmp_path: Path):
    fit(MeanFlow(Affine()), points(20), out=tmp_path)
    with pytest.raises(ValueError, match="data was"):
        fit(MeanFlow(Affine()), points(20) + 1, out=tmp_path)
    # how often a training is saved does not change it
    fit(MeanFlow(Affine()), points(20), out=tmp_path, checkpoint_every=7)


def test_a_network_wrapped_by_compile_is_saved_as_the_one_inside(tmp_path: Path):
    network = DiT(size=4, channels=1, patch=2, width=8, depth=1, heads=1)
    MeanFlow(torch.compile(network), shape=(1, 4, 4)).save(tmp_path / "m.safetensors")
    loaded = MeanFlow.load(tmp_path / "m.safetensors")
    for name, value in network.state_dict().items():
        assert torch.equal(loaded.network.state_dict()[name], value), name
