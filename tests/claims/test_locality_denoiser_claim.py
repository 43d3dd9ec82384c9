"""The claim of the locality denoiser at the size of a test."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fluvial
from fluvial.claims import locality_demonstrations as demonstrations
from fluvial.claims import locality_denoiser as claim
from fluvial.core.noise import KeyedNoise
from fluvial.images import LocalityDenoiser
from fluvial.training.loop import train
from fluvial.training.stage import Stage, Training


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("smoke") / "run"
    report = claim.run(claim.PRESETS["smoke"], "smoke", out, progress=False)
    return out, json.loads(json.dumps(report.as_json()))


def test_schema_and_finiteness(smoke: tuple[Path, dict]) -> None:
    out, result = smoke
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["system"], result["preset"]) == ("locality-denoiser", "smoke")
    assert result["verdict"] == "not judged"
    rows = {(row["network"], row["alpha^2"], row["denoiser"]): row for row in result["table"]}
    assert len(rows) == len(result["table"]) == 2 * 2 * 7
    for (_, _, name), row in rows.items():
        assert np.isfinite([row["R^2"], row["correlation"], row["MSE to the clean image"]]).all()
        assert (row["tau or side"] != "") == (name in ("locality", "local", "equivariant"))
        assert (row["R^2"] == 1) == (name == "the network itself")
    names = [comparison["name"] for comparison in result["comparisons"]]
    assert len(names) == 10 and all(name.split(" less ")[1] in claim.BASELINES for name in names)
    # a comparison is the mean over levels of what the table shows
    first = result["comparisons"][1]
    assert first["name"].startswith("R^2 to the U-Net") and first["name"].endswith("less Wiener")
    wanted = [
        rows["U-Net", a, "locality"]["R^2"] - rows["U-Net", a, "Wiener"]["R^2"]
        for a in (0.394, 0.895)
    ]
    assert first["mean"] == pytest.approx(sum(wanted) / 2)


def test_everything_lands_in_the_folder(smoke: tuple[Path, dict]) -> None:
    out, _ = smoke
    for name in ("config.json", "table.md", "README.md", "result.json"):
        assert (out / name).stat().st_size > 0, name
    for name in ("figure.png", "samples.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    model = fluvial.load(out)
    assert isinstance(model, LocalityDenoiser) and isinstance(model.tau, dict)
    assert model.sample(2, noise=KeyedNoise(0), steps=2).shape == (2, 1, 28, 28)


def test_same_numbers_again_after_an_interruption(smoke: tuple[Path, dict], tmp_path: Path) -> None:
    """As a killed run would leave it: one network trained, the other not, half of the outputs."""
    out, result = smoke
    again = tmp_path / "again"
    for name in ("config.json", "dit-0/network.safetensors", "validation/locality.safetensors"):
        (again / name).parent.mkdir(parents=True, exist_ok=True)
        (again / name).write_bytes((out / name).read_bytes())
    for name in ("digits.json", "photographs.json", "maps.safetensors"):
        (again / name).write_bytes((out / name).read_bytes())
    report = claim.run(claim.PRESETS["smoke"], "smoke", again, progress=False)
    resumed = json.loads(json.dumps(report.as_json()))
    assert resumed["table"] == result["table"]
    assert resumed["comparisons"] == result["comparisons"]


def test_scales_are_chosen_on_validation_images_only(smoke: tuple[Path, dict]) -> None:
    out, result = smoke
    config = claim.PRESETS["smoke"]
    run = claim._ClaimRun(config, out, False)
    a = config.levels[1]
    target = run.field("U-Net", 0)(run.states(a, None), demonstrations.time_at(a)).detach()
    tried = run.estimates("local", None)
    best = demonstrations.best_scale(
        [tried[claim._key(a, side)] for side in config.sides], target, config.sides
    )
    assert run.choice("U-Net", 0)["local"][a] == best
    assert set(run.estimates("local", 0)) == {
        claim._key(a, run.choice(arm, 0)["local"][a]) for arm in claim.ARMS for a in config.levels
    }
    parts = [run.data.parts[name].flatten(1) for name in ("train", "validation", "test")]
    together = torch.cat(parts)
    assert len(together.unique(dim=0)) == len(together)


def test_states_have_the_noise_they_should() -> None:
    assert float(demonstrations.PATH.alpha(demonstrations.time_at(0.394)) ** 2) == pytest.approx(
        0.394, abs=1e-12
    )
    x = torch.zeros(400, 1, 8, 8)
    spread = demonstrations.noisy(x, 0.75, KeyedNoise(0)).std()
    assert float(spread) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(2 * x.numel()))


@pytest.mark.slow
def test_full_preset_builds_and_takes_one_step() -> None:
    config = claim.PRESETS["full"]
    x = KeyedNoise(0).normal(torch.empty(2, 3, 32, 32))
    for arm, least in (("U-Net", 5e7), ("DiT", 3e7)):
        objective = claim.build(config, arm, (3, 32, 32), seed=0)  # type: ignore[arg-type]
        assert sum(p.numel() for p in objective.parameters()) > least
        before = objective.network.out.weight.detach().clone()
        training = Training(steps=1, batch_size=2, lr=config.lr)
        train(Stage(objective, {"x": x}, training), progress=False)
        assert not torch.equal(objective.network.out.weight, before)


def test_bad_configurations(tmp_path: Path) -> None:
    smoke = claim.PRESETS["smoke"]
    for changes, message in (
        ({"seeds": ()}, "seeds needs at least one"),
        ({"taus": (0.1,)}, "equally many trials"),
        ({"levels": (0.5, 1.0)}, r"levels must lie in \(0, 1\)"),
        ({"test": 1}, "test must be at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(smoke, **changes)  # type: ignore[arg-type]
    path = tmp_path / "vectors.npy"
    np.save(path, np.zeros((40, 3), "f4") + np.arange(40)[:, None])
    with pytest.raises(ValueError, match="need images"):
        claim._read(replace(smoke, data=str(path)))
