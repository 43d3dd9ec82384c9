"""What every metric of two sets takes, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fluvial.metrics import (
    classifier_test,
    density_coverage,
    energy_distance,
    frechet_distance,
    frechet_infinity,
    kid,
    kid_subsets,
    max_sliced_wasserstein,
    median_distance,
    mmd,
    precision_recall,
    sliced_wasserstein,
    wasserstein,
)

METRICS: dict[str, Callable[[Any, Any], Any]] = {
    "frechet": frechet_distance,
    "frechet infinity": lambda a, b: frechet_infinity(a, b, levels=2),
    "kid": kid,
    "kid of subsets": lambda a, b: kid_subsets(a, b, size=5, subsets=2),
    "mmd": mmd,
    "median distance": median_distance,
    "energy": energy_distance,
    "sliced": sliced_wasserstein,
    "max-sliced": max_sliced_wasserstein,
    "wasserstein": wasserstein,
    "precision and recall": precision_recall,
    "density and coverage": density_coverage,
    "classifier": lambda a, b: classifier_test(a, b).accuracy,
}
every_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)


def whole(rows: int, seed: int) -> Tensor:
    """Whole numbers, which all types hold exactly."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 60, (rows, 3))).double()


@every_metric
def test_types_and_layouts_change_nothing(metric: Callable[[Any, Any], Any]) -> None:
    a, b = whole(21, 0), whole(17, 1)
    wanted = pytest.approx(metric(a, b), rel=1e-12)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.uint8):
        assert metric(a.to(dtype), b.to(dtype)) == wanted, dtype
    assert metric(a.T.contiguous().T, b.repeat(1, 2)[:, :3]) == wanted
    assert metric(a.numpy()[::-1][::-1], np.asfortranarray(b.numpy().astype(">f4"))) == wanted
    assert metric(a.clone().requires_grad_(), b) == wanted
    flags = a > 30, b > 30
    assert metric(*flags) == metric(*(flag.numpy() for flag in flags))


@every_metric
@pytest.mark.parametrize("which", [0, 1])
def test_refuses(metric: Callable[[Any, Any], Any], which: int) -> None:
    good = whole(21, 0)
    for bad, error, message in (
        (good * math.nan, ValueError, "must be finite, got NaN or inf"),
        (good / 0, ValueError, "must be finite, got NaN or inf"),
        (good * 1e160, ValueError, "must lie within 1e.150 of 0, as larger squares overflow"),
        (good[:0], ValueError, r"must have shape \(N, D\) with N at least"),
        (good[:, :0], ValueError, "D at least 1"),
        (good[:, 0], ValueError, r"must have shape \(N, D\)"),
        (good.to_sparse(), TypeError, "got torch.sparse_coo"),
        (good.tolist(), TypeError, "got list"),
        (good + 0j, TypeError, "got torch.complex128"),
        (good[:, :2], ValueError, "same number of columns"),
    ):
        pair = (bad, good) if which == 0 else (good, bad)
        with pytest.raises(error, match=message):
            metric(*pair)


@pytest.mark.parametrize("p", [1, 2, 60, 1000])
@pytest.mark.parametrize("unit", [1e-30, 1.0, 1e30])
def test_high_powers_neither_overflow_nor_vanish(p: float, unit: float) -> None:
    """As p grows W_p goes to the largest distance that mass is moved."""
    points = whole(20, 2)
    x, y = points, points.clone()
    x[:, 0] = 100 * x[:, 0].sort().values
    y[:, 0] = x[:, 0] + torch.arange(20)
    x, y = unit * x, unit * y
    wanted = unit * float((torch.arange(20.0).double() / 19).pow(p).mean() ** (1 / p) * 19)
    assert wasserstein(x[:, :1], y[:, :1], p=p) == pytest.approx(wanted)
    assert sliced_wasserstein(x[:, :1], y[:, :1], p=p, projections=3) == pytest.approx(wanted)
    assert max_sliced_wasserstein(x, y, p=p, projections=3) <= wanted * (1 + 1e-9)
    flat = sliced_wasserstein(x, y, p=p, projections=3)
    assert flat / unit == pytest.approx(sliced_wasserstein(x / unit, y / unit, p=p, projections=3))
    assert flat > 0
