"""The claim of MIRI at the size of a test."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fluvial
from fluvial.claims import miri_imputation as claim
from fluvial.tabular.miri.rounds import VelocityMLP, round_loss


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("smoke") / "run"
    report = claim.run(claim.PRESETS["smoke"], "smoke", out, progress=False)
    return out, json.loads(json.dumps(report.as_json()))


def test_schema_and_finiteness(smoke: tuple[Path, dict[str, Any]]) -> None:
    out, result = smoke
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["system"], result["preset"]) == ("miri-imputation", "smoke")
    assert result["verdict"] == "not judged"
    wanted = [(m, arm) for m in ("MCAR", "MAR", "MNAR") for arm in (*claim.ARMS, claim.MEAN)]
    assert [(row["missing"], row["arm"]) for row in result["table"]] == wanted
    for row in result["table"]:
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))
        assert row["distance"] >= 0 and row["RMSE"] >= row["MAE"] > 0
        assert (row["mean rank"] is None) == (row["arm"] == claim.MEAN)
    for mechanism in ("MCAR", "MAR", "MNAR"):
        ranks = [
            row["mean rank"]
            for row in result["table"]
            if row["missing"] == mechanism and row["mean rank"]
        ]
        assert sum(ranks) == pytest.approx(sum(range(1, len(claim.ARMS) + 1)))
    margins = [comparison["margin"] for comparison in result["comparisons"]]
    assert margins == [0.0] * 3 + [-math.log(0.8), -math.log(0.3), math.log(2), math.log(2)]
    for name in ("config.json", "table.md", "README.md", "model.safetensors", "figure.png"):
        assert (out / name).stat().st_size > 0, name
    assert "imputer.transform(rows)" in (out / "README.md").read_text()
    holed = np.full((2, 4), np.nan)
    assert np.isfinite(fluvial.load(out).transform(holed)).all()


def test_same_numbers_again_and_after_an_interruption(
    smoke: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, result = smoke
    again = tmp_path / "again"
    again.mkdir()
    # as a killed run would leave it: all done but one table
    done = [out / "config.json", out / "tuned-iris-0.json", out / "demonstration-0.json"]
    for path in (*done, *out.glob("iris-*.json")):
        shutil.copy(path, again)
    report = claim.run(claim.PRESETS["smoke"], "smoke", again, progress=False)
    resumed = json.loads(json.dumps(report.as_json()))
    assert resumed["comparisons"] == result["comparisons"]
    for one, two in zip(resumed["table"], result["table"], strict=True):
        assert {**one, "CPU s": 0} == {**two, "CPU s": 0}


def test_comparisons_follow_the_scores() -> None:
    config = replace(claim.PRESETS["smoke"], seeds=(0, 1))

    def scores(best: str) -> dict[claim.Key, claim.Scores]:
        return {
            key: {arm: {"distance": 0.5 if arm == best else 1.0} for arm in claim.ARMS}
            for key in claim.keys_of(config)
        }

    shown = [
        {
            "curves": {"auc": [0.7, 0.55]},
            "diabetes": {"IterativeImputer": 0.02, "KNN": 0.04, "MIRI": 0.01},
            "mixture": {claim.POSTERIOR: 0.03, "MIRI": 0.01},
        }
    ] * 2
    found = claim.comparisons(config, scores("MIRI"), shown)
    # one is the best of eleven, and the other ten share the ranks 2 to 11
    assert len(claim.ARMS) == 11
    assert [list(one.differences) for one in found[:3]] == [[5.5, 5.5]] * 3
    assert [one.differences[0] for one in found[3:]] == pytest.approx(
        [math.log(2), math.log(4), math.log(4), math.log(3)]
    )
    lost = claim.comparisons(config, scores("GAIN"), shown)
    assert lost[0].differences[0] == pytest.approx(-5.5)
    # posterior draws are no rival of the claim
    shared = claim.comparisons(config, scores(claim.POSTERIOR), shown)
    assert shared[0].differences[0] == 0


def test_every_method_is_given_as_many_settings() -> None:
    for preset in claim.PRESETS.values():
        for arm in claim.ARMS:
            settings = claim.settings_of(preset, arm)
            assert len(settings) == preset.tuning
            assert len({json.dumps(dict(one), default=str) for one in settings}) == preset.tuning


def test_tuning_sees_no_value_that_is_missing_in_a_test() -> None:
    config = replace(claim.PRESETS["record"], rates=(0.2, 0.4))
    for seed in (0, 1):
        x = claim.seen_in_tuning(config, "wine", seed)
        for mechanism in config.mechanisms:
            for rate in config.rates:
                truth, made = claim.holed(config, "wine", mechanism, rate, seed)
                assert np.isnan(x[~made.mask]).all()
        seen = ~np.isnan(x)
        assert (x[seen] == truth[seen]).all() and 0.3 < seen.mean() < 0.6
        assert len(truth) == len(claim.split(claim.read(config, "wine"), seed)[0])


def test_tables_are_whole_and_splits_part_them() -> None:
    config = claim.PRESETS["record"]
    sizes = {}
    for name in config.tables:
        table = claim.read(config, name)
        sizes[name] = table.x.shape
        assert np.isfinite(table.x).all() and len(table.x) == len(table.y)
        assert abs(table.x.mean(0)).max() < 1e-9
        rows, held = claim.split(table, 3)
        assert sorted([*rows, *held]) == list(range(len(table.x)))
        assert len(held) == round(0.3 * len(table.x))
    assert len(sizes) >= 6 and sizes["auto mpg"] == (392, 7)
    points = claim.mixture(400, 0)
    near = np.minimum(abs(points - 2).max(1), abs(points + 2).max(1))
    assert (near < 2).mean() > 0.99 and 0.4 < (points[:, 0] > 0).mean() < 0.6


def test_files_of_ones_own_and_bad_configurations(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "own.csv"
    lines = ["a,b,y", *(",".join(f"{v:.3f}" for v in row) for row in rng.normal(size=(30, 3)))]
    path.write_text("\n".join(lines))
    config = replace(claim.PRESETS["full"], files=(str(path),))
    assert claim.read(config, str(path)).x.shape == (30, 2)
    with pytest.raises(FileNotFoundError, match="files: there is no nowhere.csv"):
        claim.run(replace(config, files=("nowhere.csv",)), "full", tmp_path / "out")
    for changes, message in (
        ({"seeds": ()}, "seeds needs at least one value"),
        ({"tables": ("adult",)}, "tables must be of iris"),
        ({"mechanisms": ("odd",)}, "mechanisms must be of"),
        ({"rates": (1.0,)}, "rates must lie in"),
        ({"tuning": 4}, "tuning must be 1, 2 or 3"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(config, **changes)


def test_long_tables_are_measured_by_slices() -> None:
    a = np.zeros((claim.SLICED_FROM + 1, 1))
    assert claim.distance(a, a + 3) == pytest.approx(3)
    assert claim.distance(a[:50], a[:50] + 3) == pytest.approx(6)  # energy: twice the distance


def test_full_preset_builds_and_takes_one_step() -> None:
    config = claim.PRESETS["full"]
    assert len(config.files) == 10 and config.rates == (0.2, 0.4, 0.6) and len(config.seeds) == 10
    net = VelocityMLP(9, config.hidden)
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.linspace(-1, 1, 36).reshape(4, 9)
    before = net.out.weight.detach().clone()
    round_loss(net, x, -x, x > 0, torch.full((4,), 0.5)).backward()
    optimizer.step()
    assert not torch.equal(net.out.weight, before)
