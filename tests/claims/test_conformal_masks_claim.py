"""The claim of conformal masks at the size of a test."""

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
from numpy.testing import assert_allclose
from PIL import Image

import fluvial
from fluvial.claims import conformal_masks as claim
from fluvial.core.noise import KeyedNoise

pytest.importorskip("skimage")  # which ships the photographs

SMOKE = claim.PRESETS["smoke"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("smoke") / "run"
    report = claim.run(SMOKE, "smoke", out, progress=False)
    return out, json.loads(json.dumps(report.as_json()))


def test_schema_and_finiteness(smoke: tuple[Path, dict[str, Any]]) -> None:
    out, result = smoke
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["system"], result["preset"]) == ("conformal-masks", "smoke")
    assert result["verdict"] == "not judged"
    arms = [*claim.SCORES, claim.PIXELWISE, claim.UNCALIBRATED]
    for name in claim.RESTORERS:
        masks = [row["masks"] for row in result["table"] if row["restorer"] == name]
        assert masks == [*arms, f"{claim.OURS}, 4 of 12 leaked"]
    for row in result["table"]:
        values = [value for value in row.values() if isinstance(value, float)]
        assert len(values) == 9 and all(0 <= value <= 1 for value in values)
        # level 0.05 with 12 images: bound / 13 is more, and every calibrated mask is empty
        calibrated = row["masks"] not in (claim.PIXELWISE, claim.UNCALIBRATED)
        assert (row["trusted, level 0.05"] == 0) == calibrated
    names = [comparison["name"] for comparison in result["comparisons"]]
    assert len(names) == len(set(names)) in (20, 21, 22)
    assert all(len(comparison["differences"]) == 4 for comparison in result["comparisons"])
    margins = {comparison["margin"] for comparison in result["comparisons"]}
    assert margins == {0.0, -0.002}
    for name in ("config.json", "table.md", "README.md", "model.safetensors", "figure.png"):
        assert (out / name).stat().st_size > 0, name
    model = fluvial.load(out)
    assert model.restore(torch.rand(1, 3, 3), 0.15).trusted.shape == (12, 12)


def test_same_numbers_again_and_after_an_interruption(
    smoke: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, result = smoke
    again = tmp_path / "again"
    again.mkdir()
    # as a killed run would leave it: one restorer done, the other one trained and not measured
    shutil.copy(out / "config.json", again / "config.json")
    shutil.copytree(out / "ridge", again / "ridge")
    shutil.copytree(out / "flow" / "training", again / "flow" / "training")
    report = claim.run(SMOKE, "smoke", again, progress=False)
    resumed = json.loads(json.dumps(report.as_json()))
    assert resumed["table"] == result["table"]
    assert resumed["comparisons"] == result["comparisons"]


def test_a_ridge_draws_residuals_of_the_class(smoke: tuple[Path, dict[str, Any]]) -> None:
    run = claim._ClaimRun(SMOKE, smoke[0], False)
    training, validation, pool = run.data()
    assert (len(training), len(validation), len(pool)) == (60, 12, 24)
    ridge = claim.Ridge(SMOKE, training, validation)
    drawn = ridge.draw(pool, 5, KeyedNoise(0))
    assert drawn.shape == (5, 24, 1, 12, 12) and drawn.std(0).max() > 0
    alone = ridge.draw(pool[3:4], 5, KeyedNoise(0).rows(torch.tensor([3])))
    assert_allclose(alone[:, 0], drawn[:, 3], atol=1e-12)
    # predictions and residuals of a training square add up to it
    x, missing = ridge._parts(training)
    assert_allclose(ridge._predicted(x) + ridge.residuals, missing, atol=1e-12)
    assert ridge.penalty in claim.PENALTIES


def maps_of(score: np.ndarray, error: np.ndarray) -> claim.Maps:
    return claim.Maps(error, {claim.OURS: score})


def test_intervals_of_each_pixel_cover_each_pixel() -> None:
    rng = np.random.default_rng(0)
    score = rng.random((600, 5)) ** 2 + 0.01
    error = np.clip(np.sqrt(score) * np.abs(rng.normal(size=(600, 5))) / 8, 0, 1)
    ours, test = maps_of(score[:300], error[:300]), maps_of(score[300:], error[300:])
    limits = np.linspace(0.0, 1.0, 400)
    masks = np.array(claim.pixelwise(ours, test, limits))
    half = limits[np.argmax(masks, axis=0)]  # the level from which a pixel is trusted
    covered = (test.error <= half).mean()
    assert abs(covered - claim.COVERAGE) < 4 * math.sqrt(0.1 * 0.9 * (1 / 1500 + 1 / 1500))
    # and the largest of the pixels is not covered as often
    assert (test.error <= half).all(1).mean() < 0.75


def test_a_kernel_is_chosen_by_the_area_it_trusts() -> None:
    rng = np.random.default_rng(1)
    error = 0.1 * rng.random((80, 40))
    config = replace(SMOKE, levels=(0.05, 0.06))
    found = {1: maps_of(rng.random((80, 40)), error), 3: maps_of(error**2, error)}
    assert claim.chosen_kernel(config, found) == 3


def test_comparisons_are_in_favour_of_the_claim() -> None:
    config = replace(SMOKE, levels=(0.05, 0.1), calibration=300, leaked=60, splits=60, pool=0)

    def arm(error: tuple[float, float], trusted: tuple[float, float]) -> dict[str, Any]:
        noise = 1e-4 * np.random.default_rng(2).normal(size=60)[:, None]
        return {
            "error": (np.array(error) + noise).tolist(),
            "trusted": (np.array(trusted) + noise).tolist(),
        }

    good = {name: arm((0.045, 0.095), (0.2, 0.6)) for name in claim.SCORES}
    good["random"] = arm((0.045, 0.095), (0.05, 0.3))
    good[claim.PIXELWISE] = arm((0.08, 0.14), (0.3, 0.7))
    good["leakage"] = arm((0.055, 0.11), (0.3, 0.7))
    made = claim.comparisons(config, "ridge", good)
    assert len(made) == 11 and {comparison.verdict for comparison in made} == {"holds"}
    assert all(len(comparison.differences) == claim.BATCHES for comparison in made)
    for arm_name, worse, word in (
        ("random", arm((0.045, 0.11), (0.05, 0.3)), "score random (level 0.1"),
        (claim.OURS, arm((0.01, 0.095), (0.2, 0.6)), "less level - 1/(n + 1)"),
        ("random", arm((0.045, 0.095), (0.15, 0.3)), "times that of a random score"),
        (claim.PIXELWISE, arm((0.04, 0.14), (0.3, 0.7)), "largest error of intervals"),
        ("leakage", arm((0.055, 0.14), (0.3, 0.7)), "bound under leakage"),
    ):
        failing = claim.comparisons(config, "ridge", {**good, arm_name: worse})
        assert [word in one.name for one in failing if one.verdict == "fails"] == [True]


def test_bad_configurations() -> None:
    for changes, message in (
        ({"size": 13}, "size 13 does not divide by factor 4"),
        ({"leaked": 12}, "leaked must lie between 0 and calibration 12"),
        ({"pool": 12}, "pool must exceed calibration 12"),
        ({"splits": 1}, "splits must be at least 2"),
        ({"files": "x"}, "files and pipeline are given together"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SMOKE, **changes)


def test_a_folder_of_photographs_is_checked(tmp_path: Path) -> None:
    full = replace(claim.PRESETS["full"], files=str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="files: there is no folder"):
        claim.run(full, "full", tmp_path / "out")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="holds 1 images, more than calibration 1600 are needed"):
        claim.run(replace(full, files=str(tmp_path)), "full", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_full_preset_restores_with_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)  # diffusers draws initial weights from the global generator
    unet = diffusers.UNet2DModel(
        sample_size=32,
        in_channels=6,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 32),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    vqvae = diffusers.VQModel(
        block_out_channels=(32, 32, 32),
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=3,
    )
    scheduler = diffusers.DDIMScheduler(prediction_type="epsilon")
    pipeline = diffusers.LDMSuperResolutionPipeline(vqvae, unet, scheduler)
    pipeline.save_pretrained(tmp_path / "pipeline")
    photographs = tmp_path / "photographs"
    photographs.mkdir()
    rng = np.random.default_rng(3)
    for k in range(4):
        pixels = rng.integers(0, 256, (140, 150, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(photographs / f"{k}.png")
    config = replace(
        claim.PRESETS["full"],
        files=str(photographs),
        pipeline=str(tmp_path / "pipeline"),
        evaluations=1,
        size=128,  # the pipeline wants multiples of 32 when made four times smaller
        kernel=3,
        blur=2.0,
        draws=2,
        calibration=2,
        leaked=1,
        levels=(1.5, 2.9),
    )
    report = claim.run(config, "full", tmp_path / "out")
    assert [row["level"] for row in report.table] == [1.5, 2.9]
    assert report.verdict == "not judged" and (tmp_path / "out" / "calibration.json").is_file()
    assert "blurred by 2" in report.notes[0] and "Gaussian 2" in report.notes[0]
