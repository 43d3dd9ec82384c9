"""The claim of MeanFlow at the size of a test."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fluvial.claims import meanflow as claim
from fluvial.core.noise import KeyedNoise
from fluvial.images import MeanFlow
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
    assert (result["system"], result["preset"]) == ("meanflow", "smoke")
    assert result["verdict"] == "not judged"
    rows = {(row["arm"], row["evaluations"]): row for row in result["table"]}
    assert {count for arm, count in rows if arm == "meanflow"} == {1, 2, 4}
    assert {count for arm, count in rows if arm == "flow matching"} == {1, 2, 4, 8, 64}
    for row in rows.values():
        assert np.isfinite([row["Fréchet distance"], row["low"], row["high"]]).all()
    # untrained samples are noise: further from real images than real images are
    assert rows["meanflow", 1]["Fréchet distance"] > rows["real images (floor)", None]["high"]
    assert [comparison["margin"] for comparison in result["comparisons"]] == [0.0] * 3


def test_everything_lands_in_the_folder(smoke: tuple[Path, dict]) -> None:
    out, _ = smoke
    for name in ("config.json", "table.md", "README.md", "result.json", "model.safetensors"):
        assert (out / name).stat().st_size > 0, name
    for name in ("figure.png", "samples.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert MeanFlow.load(out / "model.safetensors").sample(
        2, label=1, noise=KeyedNoise(0)
    ).shape == (2, 1, 28, 28)


def test_same_numbers_again_and_after_an_interruption(
    smoke: tuple[Path, dict], tmp_path: Path
) -> None:
    out, result = smoke
    again = tmp_path / "again"
    # as a killed run would leave it: the first arm done, the second not
    again.mkdir()
    for name in ("config.json", "step_seconds.json", "classifier.safetensors"):
        (again / name).write_bytes((out / name).read_bytes())
    shutil.copytree(out / "meanflow-0", again / "meanflow-0")
    report = claim.run(claim.PRESETS["smoke"], "smoke", again, progress=False)
    resumed = json.loads(json.dumps(report.as_json()))
    assert resumed["table"] == result["table"]
    assert resumed["comparisons"] == result["comparisons"]


def test_arms_share_network_and_weights_and_the_rival_is_flow_matching() -> None:
    config = claim.PRESETS["smoke"]
    ours = claim.build(config, "meanflow", (1, 28, 28), 10, seed=3)
    rival = claim.build(config, "flow matching", (1, 28, 28), 10, seed=3)
    for (name, a), (other, b) in zip(
        ours.named_parameters(), rival.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b)
    x = KeyedNoise(1).normal(torch.empty(8, 1, 28, 28))
    terms = rival.loss(x, torch.arange(8), noise=KeyedNoise(2))
    assert terms["loss"].item() == pytest.approx(terms["fm_error"].item(), rel=1e-6)


@pytest.mark.slow
def test_full_preset_builds_and_takes_one_step() -> None:
    config = claim.PRESETS["full"]
    model = claim.build(config, "meanflow", (4, 32, 32), 1000, seed=0)
    assert sum(p.numel() for p in model.parameters()) > 1.25e8
    before = model.network.out.weight.detach().clone()
    latents = KeyedNoise(0).normal(torch.empty(2, 4, 32, 32))
    data = {"x": latents, "label": torch.tensor([3, 999])}
    train(Stage(model, data, Training(steps=1, batch_size=2, lr=config.lr[0])), progress=False)
    assert not torch.equal(model.network.out.weight, before)


def test_users_file_of_latents(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "latents.npz"
    x = rng.normal(size=(60, 4, 8, 8)).astype("f4")
    np.savez(path, x=x, label=10 * (np.arange(60) % 3) - 1)
    data = claim._read(str(path))
    assert {name: len(part[0]) for name, part in data.parts.items()} == {
        "train": 48,
        "validation": 6,
        "test": 6,
    }
    assert data.num_classes == 3
    together = torch.cat([part[0] for part in data.parts.values()])
    assert torch.equal(
        together.flatten(1).sum(1).sort()[0], torch.from_numpy(x).flatten(1).sum(1).sort()[0]
    )


def test_bad_data(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="animals, digits"):
        claim._read("no-such-set")
    path = tmp_path / "x.npz"
    np.savez(path, x=np.zeros((40, 1, 8, 8), "f4"))
    with pytest.raises(ValueError, match="label"):
        claim._read(str(path))
    path.write_bytes(b"junk")
    with pytest.raises(ValueError, match="not an .npz file"):
        claim._read(str(path))
    images = np.zeros((40, 1, 8, 8), "f4")
    for x, label, message in (
        (images, np.zeros(40, int), "two classes"),
        (images, np.linspace(0, 1, 40), "integers"),
        (images * np.nan, np.arange(40) % 2, "finite"),
    ):
        np.savez(path, x=x, label=label)
        with pytest.raises(ValueError, match=message):
            claim._read(str(path))
    np.savez(path, x=np.zeros((40, 8, 8), "f4"), label=np.zeros(40, int))
    with pytest.raises(ValueError, match="rows, channels"):
        claim._read(str(path))
    with pytest.raises(ValueError, match="seeds"):
        replace(claim.PRESETS["smoke"], seeds=())
