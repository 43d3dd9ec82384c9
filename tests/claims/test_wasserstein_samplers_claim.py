"""The claim of the samplers with Wasserstein bounds at the size of a test."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fluvial.claims import wasserstein_samplers as claim
from fluvial.core.gaussian.paths import VPLinear
from fluvial.core.noise import KeyedNoise
from fluvial.core.simulate import simulate
from fluvial.core.time import uniform_grid
from fluvial.dynamics.wasserstein_samplers import WassersteinSampler
from fluvial.training.loop import train
from fluvial.training.stage import Stage, Training

from ..core.toys import Constant

FILES = ("config.json", "table.md", "README.md", "result.json", "figure.png")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("smoke") / "run"
    report = claim.run(claim.PRESETS["smoke"], "smoke", out, progress=False)
    return out, json.loads(json.dumps(report.as_json()))


def test_schema_and_finiteness(smoke: tuple[Path, dict]) -> None:
    out, result = smoke
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["system"], result["preset"]) == ("wasserstein-samplers", "smoke")
    assert result["verdict"] == "not judged"
    for name in FILES:
        assert (out / name).stat().st_size > 0, name
    assert {row["target"] for row in result["table"]} == {*claim.ARMS, "real images (floor)"}
    for row in result["table"][:-1]:
        assert row["error"] > 0 and np.isfinite([row["error"], row["evaluations"]]).all()
        assert (row["sliced W2"] is None) == (row["target"] not in claim.IMAGE_ARMS)
    assert result["table"][-1]["sliced W2"] > 0
    margins = [comparison["margin"] for comparison in result["comparisons"]]
    assert margins == pytest.approx([0.0, 0.4, math.log(3), math.log(2), math.log(2)])


def test_same_numbers_again_and_after_an_interruption(
    smoke: tuple[Path, dict], tmp_path: Path
) -> None:
    out, result = smoke
    again = tmp_path / "again"
    again.mkdir()
    # as a killed run would leave it: two targets done, the network of a third
    kept = ["config.json", "log-concave-0.json", "u-net-0.json"]
    kept += [path.name for path in out.glob("cost-*.json")]  # times, which are never the same
    for name in kept:
        shutil.copy(out / name, again / name)
    shutil.copytree(out / "digits-0", again / "digits-0")
    report = claim.run(claim.PRESETS["smoke"], "smoke", again, progress=False)
    resumed = json.loads(json.dumps(report.as_json()))
    assert resumed["table"] == result["table"]
    assert resumed["comparisons"] == result["comparisons"]


def test_clean_prediction_of_points_is_their_weighted_mean() -> None:
    path = VPLinear(5.0, 5.0)
    points = torch.tensor([[0.0, 1.0], [2.0, -1.0], [0.5, 0.5]], dtype=torch.float64)
    log = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    field = claim.Points(path, points, log)
    x = KeyedNoise(0).normal(torch.empty(4, 2, dtype=torch.float64))
    t = torch.tensor(0.3, dtype=torch.float64)
    ways = (x[:, None] - path.alpha(t) * points).square().sum(-1)
    weights = (log - ways / (2 * path.sigma(t) ** 2)).exp()
    exact = (weights @ points) / weights.sum(1, keepdim=True)
    torch.testing.assert_close(field(x, t), exact)
    torch.testing.assert_close(field(x, t.expand(4)), exact)


def test_posterior_is_a_density_on_its_grid() -> None:
    field = claim.posterior(0)
    weights = field.log_weights.softmax(0)
    mean = weights @ field.points
    edge = field.points.abs().amax(1) > 3.9
    assert float(weights[edge].sum()) < 0.01 and 500 < len(weights) < 61 * 61
    assert torch.equal(field.points, claim.posterior(0).points)
    assert not torch.allclose(mean, (w := claim.posterior(1)).log_weights.softmax(0) @ w.points)


def test_orders_and_steps_of_a_power_law() -> None:
    errors = {n: {"error": 3.0 * n**-1.5} for n in (8, 16, 64)}
    assert claim.slope(errors) == pytest.approx(1.5)
    for steps in (4, 8, 11, 40, 64, 100):
        assert claim.steps_to_reach(errors, 3.0 * steps**-1.5) == pytest.approx(steps)
    flat = {8: {"error": 1.0}, 16: {"error": 1.0}}
    assert claim.steps_to_reach(flat, 0.5) == math.inf


def test_reference_of_digits_has_the_times_of_the_schemes_and_short_last_steps() -> None:
    for cells, count in ((16, 4), (800, 200), (1600, 200)):
        grid = claim.refined(cells, count)
        times = [*grid[:, 0].tolist(), 0.0]
        assert grid[0, 0] == 1 and grid[-1, 1] == 0 and len(grid) % 2 == 0
        assert (grid[:, 0] > grid[:, 1]).all() and times[-2] <= claim.SHORTEST
        assert all(min(abs(t - k / count) for t in times) < 1e-12 for k in range(count + 1))
        # no step is more than the part of its time that the first of the short ones is
        steps = (grid[:-1, 0] - grid[:-1, 1]) / grid[:-1, 0]
        assert steps.max() < count / cells + 1e-9


def test_reference_of_digits_converges_where_the_score_grows_as_a_root() -> None:
    """A network's noise that does not vanish at t = 0, as of one trained for a while.

    In closed form: a noise prediction of 1 moves x by the integral of -e^(s / 2) / sqrt(1 - e^-s),
    which is -2 sqrt(e^T - 1).
    """

    class Ones:
        predicts = "noise"

        def __call__(self, x: Tensor, t: Tensor, **cond: object) -> Tensor:
            return torch.ones_like(x)

    path, x = VPLinear(5.0, 5.0), torch.zeros(1, 1, dtype=torch.float64)
    mean = -2 * math.sqrt(math.expm1(5.0))

    def error(grid: Tensor) -> float:
        sampler = WassersteinSampler("so-jvp")
        out = simulate(x, grid, sampler, path, Ones(), Constant(0.0))  # type: ignore[arg-type]
        return abs(float(out) - mean)

    equal = [error(uniform_grid(cells)) for cells in (200, 400)]
    assert equal[0] / equal[1] < 2**0.75  # and towards a root of 2
    first = [error(claim.refined(cells, 25)) for cells in (200, 400)]
    assert first[0] / first[1] > 2**0.9 and first[1] < equal[1]


def test_a_product_counts_what_it_costs() -> None:
    assert claim.evaluations("DiT", "so-jvp", 10, 3.5) == 35
    assert claim.evaluations("DiT", "so", 10, 3.5) == 210
    assert claim.evaluations("log-concave", "so", 10, 3.5) == 80
    assert claim.evaluations("digits", "rem", 10, 3.5) == 20


@pytest.mark.slow
def test_full_preset_builds_and_takes_one_step() -> None:
    config = claim.PRESETS["full"]
    for arm in claim.IMAGE_ARMS:
        model = claim.build(config, arm, (1, 28, 28), 10, seed=0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        x = KeyedNoise(0).normal(torch.empty(2, 1, 28, 28))
        data = {"x": x, "label": torch.tensor([3, 9])}
        train(Stage(model, data, Training(steps=1, batch_size=2, lr=config.lr)), progress=False)
        assert any(not torch.equal(before[name], v) for name, v in model.state_dict().items())


def test_bad_configurations() -> None:
    smoke = claim.PRESETS["smoke"]
    for changed, message in (
        ({"seeds": ()}, "seeds needs"),
        ({"counts": (4, 4)}, "counts needs two values"),
        ({"end": 0.0}, "end must lie"),
        ({"images": 1}, "need images"),
        ({"digits_cells": 8}, "digits_cells must be a multiple of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(smoke, **changed)
    with pytest.raises(ValueError, match="animals, digits"):
        claim._read(replace(smoke, data="no-such-set"))
    with pytest.raises(ValueError, match="are wanted"):
        claim._read(smoke).held(10_000)
