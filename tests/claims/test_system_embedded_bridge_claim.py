"""The claim of system-embedded bridges at the size of a test."""

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
from PIL import Image

import fluvial
from fluvial.claims import system_embedded_bridge as claim
from fluvial.core.noise import KeyedNoise

SMOKE = claim.PRESETS["smoke"]
NOISE = KeyedNoise(0)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("smoke") / "run"
    report = claim.run(SMOKE, "smoke", out, progress=False)
    return out, json.loads(json.dumps(report.as_json()))


def test_schema_and_finiteness(smoke: tuple[Path, dict[str, Any]]) -> None:
    out, result = smoke
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["system"], result["preset"]) == ("system-embedded-bridge", "smoke")
    assert result["verdict"] == "not judged"
    assert len(result["table"]) == sum(map(len, claim.CONDITIONS.values())) * (len(claim.ARMS) + 1)
    for row in result["table"]:
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))
    rows = {(row["system"], row["at test"], row["arm"]): row for row in result["table"]}
    kept = rows["inpainting", "as trained", "system-embedded bridge"]
    assert kept["|A x - y| / |y|"] < 1e-5
    # what is twice as noisy is harder for those that barely trained
    for name in ("pooling", "fourier"):
        dirty = rows[name, "twice the noise", "A^+ y"]["PSNR, dB"]
        assert dirty < rows[name, "as trained", "A^+ y"]["PSNR, dB"] - 1
    margins = [comparison["margin"] for comparison in result["comparisons"]]
    assert margins == [0.3, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0]
    for name in ("config.json", "table.md", "README.md", "model.safetensors", "figure.png"):
        assert (out / name).stat().st_size > 0, name
    model = fluvial.load(out)
    operator, _ = claim.under(SMOKE, "pooling", "as trained", 2)
    small = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    assert model.restore(small, operator).shape == (2, 1, 16, 16)


def test_same_numbers_again_and_after_an_interruption(
    smoke: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, result = smoke
    again = tmp_path / "again"
    again.mkdir()
    # as a killed run would leave it: most trained, some measured
    names = ["config.json", "scores-DDNM-0.json", "scores-PiGDM-0.json"]
    for path in out.iterdir():
        if path.is_dir() and path.name != "scalar-bridge-pooling-0":
            shutil.copytree(path, again / path.name)
        elif path.name in names:
            shutil.copy(path, again / path.name)
    report = claim.run(SMOKE, "smoke", again, progress=False)
    resumed = json.loads(json.dumps(report.as_json()))
    assert resumed["table"] == result["table"]
    assert resumed["comparisons"] == result["comparisons"]


def found(**changes: dict[str, float]) -> dict[str, Any]:
    """Scores of two arms, by a PSNR of system and condition."""
    result = {}
    for arm in ("system-embedded bridge", "scalar bridge"):
        psnrs = changes[arm.split()[-1] if arm == "scalar bridge" else "ours"]
        scores = {
            name: {
                condition: {
                    "PSNR": psnrs.get(f"{name}, {condition}", psnrs[name]),
                    "consistency": psnrs["kept"],
                }
                for condition in claim.CONDITIONS[name]
            }
            for name in claim.SYSTEMS
        }
        result[arm] = [scores]
    return result


def test_what_is_compared() -> None:
    ours = {"inpainting": 20.0, "pooling": 30.0, "fourier": 28.0, "kept": 1e-7}
    theirs = {"inpainting": 20.0, "pooling": 29.5, "fourier": 28.1, "kept": 0.1}
    ours |= {"pooling, twice the noise": 28.0, "fourier, twice the noise": 27.0}
    theirs |= {"pooling, twice the noise": 27.0, "fourier, twice the noise": 26.0}
    ours |= {"pooling, twice the noise, told": 28.0, "fourier, twice the noise, told": 26.0}
    theirs |= {"pooling, twice the noise, told": 28.5, "fourier, twice the noise, told": 26.9}
    ours["fourier, a column fewer"], theirs["fourier, a column fewer"] = 27.5, 27.0
    compared = claim.comparisons(found(ours=ours, bridge=theirs))
    means = [comparison.mean for comparison in compared]
    # drops: (2.5 - 2 + 2.1 - 1) / 2, the other way round, and 1.1 - .5
    assert means == pytest.approx([0.5, -0.1, 2.0, 1.0, 0.8, -0.9, 0.6])
    assert len({comparison.name for comparison in compared}) == 7


def test_systems() -> None:
    config = claim.Config()
    half, _ = claim.under(config, "inpainting", "as trained", 3)
    assert float(half.A(torch.ones(1, 1, 16, 16)).sum()) == 128
    spectrum, std = claim.under(config, "fourier", "as trained", 3)
    fewer, same = claim.under(config, "fourier", "a column fewer", 3)
    twice, double = claim.under(config, "fourier", "twice the noise", 3)
    assert spectrum.out_shape == twice.out_shape == (1, 48, 2) and fewer.out_shape == (1, 32, 2)
    assert (std, same, double) == (0.05, 0.05, 0.1)
    x = NOISE.normal(torch.empty(3, 1, 16, 16))
    # the columns that are left are among those before
    assert torch.allclose(fewer.project(spectrum.project(x)), fewer.project(x), atol=1e-5)
    one = claim.measure(x, spectrum, std, 0) - spectrum.A(x)
    two = claim.measure(x, twice, double, 0) - twice.A(x)
    assert torch.allclose(2 * one, two, atol=1e-5)


def test_arms_share_network_and_weights() -> None:
    models = [claim.build(SMOKE, arm, 3) for arm in (*claim.TRAINED, claim.FLOW)]
    first = models[0].network.state_dict()
    for model in models[1:3]:
        assert all(torch.equal(v, first[k]) for k, v in model.network.state_dict().items())
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert sizes[0] == sizes[1] == sizes[2] and 1 <= sizes[0] / sizes[3] < 1.02


def test_distance_is_of_texture() -> None:
    x = NOISE.normal(torch.empty(40, 1, 16, 16))
    assert claim.distance(x, x + 3) == pytest.approx(0.0, abs=1e-6)
    assert claim.distance(x, 0 * x) > claim.distance(x, 0.5 * x) > 1


def test_own_folder_and_bad_configurations(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for k in range(30):
        pixels = (NOISE.at(k).uniform(torch.empty(16, 16)) * 255).byte().numpy()
        Image.fromarray(np.asarray(pixels)).save(tmp_path / "photos" / f"{k}.png")
    config = replace(SMOKE, data=str(tmp_path / "photos"), test=2)
    train, clean, other = claim.pictures(config, 0)
    assert train.shape[1:] == clean.shape[1:] == (1, 16, 16) and len(clean) + len(other) == 3
    assert claim._shown(config, 0)[1] == 4
    for changes, message in (
        ({"seeds": ()}, "seeds needs at least one value"),
        ({"channels": 2}, "channels must be 1 or 3"),
        ({"test": 0}, "test must be at least 1"),
        ({"size": 18}, "size must be a multiple of 4"),
        ({"columns": (8, 3)}, "columns must be two positive numbers of at most 9 in all"),
        ({"schedule": "edm"}, "schedule must be sb, vp or ve"),
        ({"beta_min": 0.0}, "beta_min must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SMOKE, **changes)


@pytest.mark.slow
def test_full_preset_builds_and_takes_one_step() -> None:
    config = replace(claim.PRESETS["full"], steps=1, batch_size=1)
    x = NOISE.uniform(torch.empty(2, 3, 256, 256)) * 2 - 1
    model = claim.fit(config, "system-embedded bridge", "fourier", 0, x, progress=False)
    before = claim.build(config, "system-embedded bridge", 0)
    assert not torch.equal(model.network.out.weight, before.network.out.weight)
