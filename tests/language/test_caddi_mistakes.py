"""What `CaDDi` refuses: classes for instances, numbers that are none, data of another kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fluvial import KeyedNoise
from fluvial.data import read_text
from fluvial.language import CaDDi
from fluvial.networks import CausalTransformer

DATA = read_text(["abcd" * 40], length=6)
NOISE = KeyedNoise(0)


def model(**options: Any) -> CaDDi:
    network = CausalTransformer(vocabulary=5, width=8, depth=1, heads=2, levels="split")
    given = {"network": network, "classes": 4, "length": 6, "steps": 3, "format": DATA.format}
    return CaDDi(**{**given, **options})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"network": CausalTransformer}, TypeError, "network must be a module, got the class Caus"),
        ({"steps": 2.0}, TypeError, "steps must be a whole number, got 2.0"),
        ({"length": "6"}, TypeError, "length must be a whole number, got '6'"),
        ({"keep": 1.5}, TypeError, "keep must be a whole number, got 1.5"),
        ({"format": "text"}, TypeError, "format must be a Format, as data.format, got str"),
        ({"classes": 3}, ValueError, "classes must be at least 4, the tokens of format, got 3"),
    ],
)
def test_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        model(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num": 2.0}, "num must be a whole number, got 2.0"),
        ({"num": None}, "num must be a whole number, got None"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, got 2.5"),
        ({"noise": 0}, r"noise must be keyed, as KeyedNoise\(0\), got int"),
        ({"noise": KeyedNoise}, "got the class KeyedNoise"),
        ({"noise": torch.Generator()}, "got Generator"),
        ({"temperature": "0.5"}, "temperature must be a number, got '0.5'"),
        ({"top_p": None}, "top_p must be a number, got None"),
        ({"guidance": "2"}, "guidance must be a number, got '2'"),
        ({"known": "ab"}, "known must be a tensor, got str"),
        ({"known": np.zeros(6, dtype=np.int64)}, "known must be a tensor, got ndarray"),
        (
            {"known": torch.zeros(6).long(), "keep_known": [True] * 6},
            "keep_known must be a tensor, got list",
        ),
        ({"disturb": lambda x, k, noise: x.float()}, "what disturb returns must be int64 tokens"),
    ],
    ids=str,
)
def test_samples(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        model().sample(**{"num": 2, "noise": NOISE, **options})


@pytest.mark.parametrize(
    ("disturb", "message"),
    [
        (lambda x, k, noise: x[:1], r"disturb must return \(2, 6\), got \(1, 6\)"),
        (lambda x, k, noise: x + 9, "what disturb returns must hold tokens 0 .. 4, got"),
    ],
)
def test_levels_that_are_disturbed(disturb: Callable[..., Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model().sample(2, noise=NOISE, disturb=disturb)


def test_training_and_bounds() -> None:
    for x, got in ((DATA, "DataSet"), ("abcd", "str"), (DATA.x.numpy(), "ndarray")):
        with pytest.raises(TypeError, match=f"x0 must be int64 tokens.* got {got}"):
            model().fit(x, steps=1, progress=False)
    for validation in (DATA.x, (DATA.x, None, None)):
        with pytest.raises(TypeError, match=r"validation must be \(x, label or None\), got"):
            model().fit(DATA.x, validation=validation, steps=1, progress=False)
    with pytest.raises(TypeError, match="noise must be keyed"):
        model().bound(DATA.x, KeyedNoise)
    with pytest.raises(TypeError, match="batch_size must be a whole number"):
        model().bound(DATA.x, NOISE, batch_size=1.5)
