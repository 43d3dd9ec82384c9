"""The claim of iterative Markovian fitting at the size of a test."""

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
from fluvial.claims import schrodinger_bridge_imf as claim
from fluvial.core.noise import KeyedNoise


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("smoke") / "run"
    report = claim.run(claim.PRESETS["smoke"], "smoke", out, progress=False)
    return out, json.loads(json.dumps(report.as_json()))


def test_schema_and_finiteness(smoke: tuple[Path, dict[str, Any]]) -> None:
    out, result = smoke
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["system"], result["preset"]) == ("schrodinger-bridge-imf", "smoke")
    assert result["verdict"] == "not judged"
    assert [row["arm"] for row in result["table"]] == [a for a in claim.ARMS for _ in range(2)]
    for row in result["table"]:
        assert all(math.isfinite(v) and v >= 0 for v in row.values() if isinstance(v, float))
        assert row["cost error"] == pytest.approx(abs(row["cost"] / row["entropic OT"] - 1))
    names = [comparison["name"] for comparison in result["comparisons"]]
    assert len(names) == len(set(names)) == 10
    margins = [comparison["margin"] for comparison in result["comparisons"]]
    assert margins == [0.0] * 7 + [math.log(2), -math.log(1.2), 0.0]
    for name in ("config.json", "table.md", "README.md", "model.safetensors", "figure.png"):
        assert (out / name).stat().st_size > 0, name
    model = fluvial.load(out)
    assert model.translate(torch.zeros(3, 8), "forward").shape == (3, 8)


def test_exact_part_is_exponential_at_any_size(smoke: tuple[Path, dict[str, Any]]) -> None:
    # what the networks of a test cannot show, the exact problems of a test do
    exact = json.loads((smoke[0] / "exact-0.json").read_text())
    for problem, horizons in claim.HORIZONS.items():
        ratios = []
        for s in horizons:
            kls = exact[problem][str(s)]["imf"]
            assert all(after < before for before, after in zip(kls, kls[1:], strict=False))
            ratios.append(claim.ratio(kls))
        judged = [r for s, r in zip(horizons, ratios, strict=True) if s in claim.JUDGED]
        assert judged == sorted(judged, reverse=True)


def test_same_numbers_again_and_after_an_interruption(
    smoke: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, result = smoke
    again = tmp_path / "again"
    again.mkdir()
    # as a killed run would leave it: the exact part and the first arm done, the others not
    for name in ("config.json", "exact-0.json"):
        shutil.copy(out / name, again / name)
    shutil.copytree(out / "DSBM-0", again / "DSBM-0")
    report = claim.run(claim.PRESETS["smoke"], "smoke", again, progress=False)
    resumed = json.loads(json.dumps(report.as_json()))
    assert resumed["table"] == result["table"]
    assert resumed["comparisons"] == result["comparisons"]


def test_how_straight_a_curve_is() -> None:
    straight = [10.0 ** (-1.5 * n) for n in range(8)]
    assert claim.bend(straight) == pytest.approx(0, abs=1e-12)
    assert claim.ratio(straight) == pytest.approx(10**-1.5)
    # a corner of 0.3 decades in the middle of 4: the line takes half of it off
    bent = [1, 10**-1.0, 10**-1.7, 10**-3.0, 10**-4.0]
    logs = np.log10(bent[:4])
    n = np.arange(4)
    line = np.polyval(np.polyfit(n, logs, 1), n)
    assert claim.bend(bent) == pytest.approx(np.abs(logs - line).max() / 3, rel=1e-9)
    assert claim.bend(bent) > claim.BEND
    assert claim.bend([1, 0.5, 0.25, 0.125]) == math.inf


def test_arms_share_networks_and_weights() -> None:
    config = claim.PRESETS["smoke"]
    one, two = (claim.bridge(config, (8,), 3) for _ in range(2))
    assert all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    )
    flow = claim.network(config, (8,), 6)
    for name, value in flow.state_dict().items():
        assert torch.equal(value, one.network0.state_dict()[name])


def test_entropic_cost_lies_between_the_best_and_independence() -> None:
    x0, x1 = (KeyedNoise(k).normal(torch.empty(60, 3)) for k in range(2))
    costs = torch.cdist(x0.double(), x1.double()).square()
    near, far = claim.entropic_cost(x0, x1, 1.0), claim.entropic_cost(x0, x1, 30.0)
    assert near < claim.entropic_cost(x0, x1, 2.0) < far
    assert far == pytest.approx(float(costs.mean()), rel=0.01)


def test_rows_of_files_and_bad_configurations(tmp_path: Path) -> None:
    files = []
    for k in range(2):
        path = tmp_path / f"{k}.npz"
        np.savez(path, x=np.full((40, 1, 6, 7), 100 * k, np.uint8))
        files.append(str(path))
    config = replace(claim.PRESETS["full"], files=tuple(files), rows=30)
    sides = claim.read_sides(config, 0)
    assert [len(part) for part in (*sides.x0, *sides.x1)] == [27, 3, 27, 3]
    assert sides.x0[0].shape[1:] == (1, 8, 8)  # padded to multiples of 4
    assert float(sides.x1[0].max()) == -1 and float(sides.x0[0].max()) < 0
    assert sides.picture(sides.x0[1]).shape == (3, 8, 8)
    with pytest.raises(FileNotFoundError, match="files: there is no nowhere.npz"):
        claim.read_sides(replace(config, files=("nowhere.npz", files[0])), 0)
    (tmp_path / "bad.npz").write_bytes(b"junk")
    with pytest.raises(ValueError, match="is no .npz file with an array x"):
        claim.read_sides(replace(config, files=(files[0], str(tmp_path / "bad.npz"))), 0)
    np.savez(tmp_path / "bad.npz", x=np.zeros((40, 3)))
    with pytest.raises(ValueError, match=r"must hold x \(rows, channels, height, width\)"):
        claim.read_sides(replace(config, files=(files[0], str(tmp_path / "bad.npz"))), 0)
    for changes, message in (
        ({"seeds": ()}, "seeds needs at least one value"),
        ({"files": ("one.npz",)}, "files must be two, or none"),
        ({"share": 0.0}, r"share must lie in \(0, 1\]"),
        ({"half_iterations": 1}, "half_iterations must be at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(config, **changes)


@pytest.mark.slow
def test_full_preset_builds_and_takes_one_step() -> None:
    config = claim.PRESETS["full"]
    model = claim.bridge(config, (1, 28, 28), 0)
    before = model.network0.out.weight.detach().clone()
    x0, x1 = (KeyedNoise(k).normal(torch.empty(4, 1, 28, 28)) for k in range(2))
    model.fit(x0, x1, half_iterations=1, steps=1, batch_size=2, lr=config.lr, progress=False)
    assert not torch.equal(model.network0.out.weight, before)
