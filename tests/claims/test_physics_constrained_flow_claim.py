"""The claim of physics-constrained flow matching at the size of a test."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fluvial.claims import physics_constrained_flow as claim
from fluvial.physics import PhysicsConstrainedFlow, pde
from fluvial.training.loop import train
from fluvial.training.stage import Stage, Training

FILES = ("config.json", "table.md", "README.md", "result.json", "figure.png", claim.MODEL)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("smoke") / "run"
    report = claim.run(claim.PRESETS["smoke"], "smoke", out, progress=False)
    return out, json.loads(json.dumps(report.as_json()))


def test_schema_and_finiteness(smoke: tuple[Path, dict]):
    out, result = smoke
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["system"], result["preset"]) == (claim.SYSTEM, "smoke")
    assert result["verdict"] == "not judged"
    for name in FILES:
        assert (out / name).stat().st_size > 0, name
    problems = {(row["flow"], row["task"]) for row in result["table"]}
    assert problems == {("exact", t) for t in claim.TASKS} | {("trained", t) for t in claim.LEARNED}
    assert len(result["table"]) == len(problems) * (len(claim.ARMS) + 1)
    for row in result["table"]:
        assert np.isfinite([row["MMSE"], row["SMSE"], row["max |h|"]]).all()
        if row["arm"].startswith("PCFM"):
            assert row["max |h|"] <= 1e-10
    margins = [comparison["margin"] for comparison in result["comparisons"]]
    assert margins == pytest.approx([-math.log(0.6), 0.0, -math.log(0.6)] + [0.0] * 7)
    decades = {c["name"]: c["differences"][0] for c in result["comparisons"][-2:]}
    assert min(decades.values()) > 0
    assert PhysicsConstrainedFlow.load(out / claim.MODEL).shape == (8, 6)


def test_same_numbers_again_and_after_an_interruption(smoke: tuple[Path, dict], tmp_path: Path):
    out, result = smoke
    again = tmp_path / "again"
    shutil.copytree(out, again)
    (again / "result.json").unlink()  # as a run would leave it that was killed
    for name in ("exact/heat/pcfm-0.json", "trained/reaction/eci-0.json", "floors/heat.json"):
        (again / name).unlink()
    shutil.rmtree(again / "trained-reaction-0")
    report = claim.run(claim.PRESETS["smoke"], "smoke", again, progress=False)

    def untimed(table: list[dict]) -> list[dict]:
        return [{k: v for k, v in row.items() if k != "s a sample"} for row in table]

    assert untimed(list(report.table)) == untimed(result["table"])
    with pytest.raises(FileExistsError, match="finished run"):
        claim.run(claim.PRESETS["smoke"], "smoke", again, progress=False)
    with pytest.raises(FileExistsError, match="rows was 16"):
        claim.run(replace(claim.PRESETS["smoke"], rows=17), "smoke", again, progress=False)


def test_every_arm_has_as_many_trials():
    assert {len(trials) for trials in claim.TRIALS.values()} == {3}
    assert set(claim.TRIALS) == set(claim.ARMS)


def test_validation_and_test_conditions_differ():
    config = claim.PRESETS["smoke"]
    for task in claim.TASKS:
        one, other = (claim.case(config, task, 0, p, 0) for p in (claim.VALIDATION, claim.TEST))
        assert not torch.equal(one.reference[0], other.reference[0])
        # what is known is the same in all solutions of a condition, and met by them
        values = one.constraint.pinned[0]
        flat = one.reference.flatten(1)[:, values]
        assert (flat - one.constraint.pinned[1]).abs().max() < 1e-12


def test_rates_of_decay_are_found():
    fields, rate = pde.heat_fields(20, (24, 25), claim.KeyedNoise(1))
    assert (claim.decay(fields) - rate).abs().max() < 1e-10


def test_the_full_size_builds_and_takes_a_step():
    config = replace(claim.PRESETS["full"], heat=(40, 36), modes=(32), rows=4, lift=32, width=16)
    assert claim.PRESETS["full"].heat == (100, 100) and claim.PRESETS["full"].modes == 32
    network = claim.FNO(
        shape=config.heat, modes=config.modes, width=config.width, depth=4, lift=config.lift
    )
    model = PhysicsConstrainedFlow(network)
    rows = claim.prior(config, "heat", 0).float()
    train(Stage(model, {"x": rows}, Training(steps=1, batch_size=4)), progress=False)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seeds": ()}, "seeds"),
        ({"samples": 1}, "samples must be at least 2"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"shock": (9, 5)}, "more than 5 saves"),
        ({"vorticity": (6, 7, 3)}, "square"),
    ],
)
def test_bad_configurations_are_refused(wrong: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replace(claim.PRESETS["smoke"], **wrong)
