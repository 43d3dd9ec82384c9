"""The claim of the memorisation study at the size of a test."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fluvial.claims import rectified_flow_memorization as claim
from fluvial.claims.rectified_flow_memorization import Arm
from fluvial.core.noise import KeyedNoise
from fluvial.training.loop import Stage, Training, train
from fluvial.trust import PairedFlow

SMOKE = claim.PRESETS["smoke"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("smoke") / "run"
    report = claim.run(SMOKE, "smoke", out, progress=False)
    return out, json.loads(json.dumps(report.as_json()))


def test_schema_and_finiteness(smoke: tuple[Path, dict]) -> None:
    out, result = smoke
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["system"], result["preset"]) == ("rectified-flow-memorization", "smoke")
    assert result["verdict"] == "not judged"
    arms = {(row["set"], row["pairs"], row["noise"]): row for row in result["table"]}
    assert set(arms) == {
        *((part, "shuffled", 0.0) for part in ("digits", "images")),
        *(("digits", "shuffled", 0.2), ("images", "shuffled", 0.4)),
        ("digits", "reflow", 0.0),
        *((part, kind, None) for part in ("digits", "images") for kind in ("no flow",)),
        *((part, "real rows (floor)", None) for part in ("digits", "images")),
    }
    for row in arms.values():
        values = [value for value in row.values() if isinstance(value, float)]
        assert np.isfinite(values).all()
    # untrained flows stay where they are
    start, end = arms["digits", "no flow", None], arms["digits", "shuffled", 0.0]
    assert end["to optimal partner"] == pytest.approx(start["to optimal partner"], rel=0.05)
    margins = [comparison["margin"] for comparison in result["comparisons"]]
    assert margins == pytest.approx([math.log(2), math.log(4 / 3), 0.0] * 2)


def test_everything_lands_in_the_folder(smoke: tuple[Path, dict]) -> None:
    out, _ = smoke
    for name in ("config.json", "table.md", "README.md", "result.json"):
        assert (out / name).stat().st_size > 0, name
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    model = PairedFlow.load(out / "model.safetensors")
    assert model.sample(2, noise=KeyedNoise(0), steps=2).shape == (2, 4)


def test_a_training_is_skipped_or_made_again_the_same(
    smoke: tuple[Path, dict], tmp_path: Path
) -> None:
    out, _ = smoke
    again = tmp_path / "again"
    shutil.copytree(out, again)
    lost = Arm("digits", "reflow", 0.0), Arm("images", "shuffled", 0.4)
    for arm in lost:
        shutil.rmtree(again / arm.folder(0))
    run = claim._ClaimRun(SMOKE, again, False)
    run.train([(arm, 0) for round_ in claim.arms(SMOKE) for arm in round_])
    for arm in lost:
        old, new = (folder / arm.folder(0) / "scores.json" for folder in (out, again))
        assert json.loads(new.read_text()) == json.loads(old.read_text())
    kept = Arm("digits", "shuffled", 0.0).folder(0) + "/scores.json"
    assert (again / kept).stat().st_mtime_ns == (out / kept).stat().st_mtime_ns


def test_pairs_keep_their_optimal_partners(tmp_path: Path) -> None:
    run = claim._ClaimRun(SMOKE, tmp_path, False)
    for part in ("digits", "images"):
        pairs = run.pairs(Arm(part, "shuffled", 0.2), seed=1)
        same = run.pairs(Arm(part, "shuffled", 0.0), seed=1)
        assert all(torch.equal(a, b) for a, b in zip(pairs, same, strict=True))
        assert sorted(pairs.target.tolist()) == sorted(pairs.optimal.tolist())
        cost = (pairs.source - pairs.optimal).square().sum()
        assert cost < (pairs.source - pairs.target).square().sum()
        other = run.pairs(Arm(part, "shuffled", 0.0), seed=2)
        assert not torch.equal(pairs.source, other.source)


def test_components_are_on_one_scale_and_decode() -> None:
    data = claim._read(SMOKE, "images")
    assert data.rows.shape[1:] == (4,) and float(data.rows.std()) == pytest.approx(1)
    assert (data.rows.std(0).diff() < 0).all()  # from the first component to the last
    decoded = data.decode(data.rows[:2])
    assert decoded.shape == (2, 1, 28, 28) and decoded.abs().max() < 2
    whole = claim._read(replace(SMOKE, components=0), "images")
    assert whole.rows.shape[1:] == (1, 28, 28)


def test_arms_start_from_the_same_weights() -> None:
    a, b = (claim.build(SMOKE, "digits", (3,), noise, seed=3) for noise in (0.0, 0.2))
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)
    assert (a.path.interpolant_noise, b.path.interpolant_noise) == (0.0, 0.2)


@pytest.mark.slow
def test_full_preset_builds_and_takes_one_step() -> None:
    config = claim.PRESETS["full"]
    model = claim.build(config, "images", (3, 64, 64), config.cure, seed=0)
    before = model.network.out.weight.detach().clone()
    images = KeyedNoise(0).normal(torch.empty(2, 3, 64, 64))
    data = {"x": images, "x1": images.flip(0)}
    train(Stage(model, data, Training(steps=1, batch_size=2, lr=config.lr)), progress=False)
    assert not torch.equal(model.network.out.weight, before)


def test_users_file_and_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    images = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8), np.uint8)
    np.savez(path, x=images)
    data = claim._read(replace(SMOKE, data=str(path)), "images")
    assert (len(data.rows), len(data.held)) == (48, 12)
    with pytest.raises(FileNotFoundError, match="no-such-set"):
        claim._read(replace(SMOKE, data="no-such-set"), "images")
    np.savez(path, x=images[:10])
    with pytest.raises(ValueError, match="24 rows or more"):
        claim._read(replace(SMOKE, data=str(path)), "images")
    for change in ({"seeds": ()}, {"noises": (0.0,)}, {"digits_noises": (0.2,)}):
        with pytest.raises(ValueError, match=next(iter(change))):
            replace(SMOKE, **change)
