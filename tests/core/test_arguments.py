"""Arguments of the wrong kind are named, with what came and what was wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fluvial import KeyedNoise
from fluvial.core.arguments import kind_of, whole_number
from fluvial.core.gaussian.ode import Euler
from fluvial.core.gaussian.paths import Linear
from fluvial.core.simulate import simulate
from fluvial.core.time import uniform_grid
from fluvial.images import MeanFlow
from fluvial.networks import MLP


@pytest.mark.parametrize("value", [3, np.int64(3), torch.tensor(3)])
def test_whole_numbers_of_any_library(value: Any) -> None:
    found = whole_number("num", value)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [2.0, "2", None, torch.tensor(2.0), np.float64(2)])
def test_other_numbers_are_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="num must be a whole number, got"):
        whole_number("num", value)
    with pytest.raises(TypeError, match="num must be a whole number, got"):
        MeanFlow(MLP(shape=(2,), width=8, depth=1)).sample(value, noise=KeyedNoise(0))


def test_a_class_in_place_of_a_sampler() -> None:
    assert kind_of(Euler) == "the class Euler" and kind_of(1) == "int"
    x, pairs, field = torch.zeros(2, 2), uniform_grid(2), MLP(shape=(2,), width=8, depth=1)
    sampler: Any = Euler
    with pytest.raises(TypeError, match="sampler must be an instance, got the class Euler"):
        simulate(x, pairs, sampler, Linear(), field, KeyedNoise(0))
