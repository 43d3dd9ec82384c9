"""The claim of critically damped Langevin diffusion at the size of a test."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fluvial.claims import critically_damped_langevin as claim
from fluvial.core.gaussian.losses import Matching
from fluvial.core.noise import KeyedNoise
from fluvial.dynamics import CriticallyDampedLangevin
from fluvial.training.loop import train
from fluvial.training.stage import Stage, Training

SMOKE = claim.PRESETS["smoke"]


class Seen:
    """Counts the calls of a network."""

    calls = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("smoke") / "run"
    report = claim.run(SMOKE, "smoke", out, progress=False)
    return out, json.loads(json.dumps(report.as_json()))


def test_schema_and_finiteness(smoke: tuple[Path, dict]) -> None:
    out, result = smoke
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["system"], result["preset"]) == ("critically-damped-langevin", "smoke")
    assert result["verdict"] == "not judged"
    arms = {row["arm"] for row in result["table"]}
    assert len(arms) == 11 and {"VP", "floor", "CLD a=0.25 epsilon=0, matched prior"} <= arms
    assert len(result["table"]) == 4 * 10 + 1
    for row in result["table"]:
        assert math.isfinite(row["sliced W2"])
        exact = row["exact W2 on N(0, 1)"]
        assert (exact is None) == (row["arm"] in ("VP", "floor"))
    margins = [comparison["margin"] for comparison in result["comparisons"]]
    assert margins == [math.log(2), -math.log(1.05), -math.log(1.05), 0.0]
    # untrained samples are further from real rows than real rows are
    rows = {(row["arm"], row["sampler"], row["calls"]): row["sliced W2"] for row in result["table"]}
    assert rows["VP", "EM", SMOKE.few] > rows["floor", None, None]
    assert any("matches" in note or "matched" in note for note in result["notes"])


def test_everything_lands_in_the_folder(smoke: tuple[Path, dict]) -> None:
    out, _ = smoke
    for name in ("config.json", "table.md", "README.md", "exact.json", "slopes.json"):
        assert (out / name).stat().st_size > 0, name
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    model = CriticallyDampedLangevin.load(out / "model.safetensors")
    assert (model.path.a, model.path.epsilon) == (1.0, 0.25)
    assert model.sample(2, noise=KeyedNoise(0), steps=2).shape == (2, 3)


def test_same_numbers_again_and_after_an_interruption(
    smoke: tuple[Path, dict], tmp_path: Path
) -> None:
    out, result = smoke
    again = tmp_path / "again"
    # as a killed run would leave it: some arms done, others not
    again.mkdir()
    shutil.copy(out / "config.json", again)
    done = sorted(path for path in out.iterdir() if path.is_dir())
    for folder in done[::2]:
        shutil.copytree(folder, again / folder.name)
    report = claim.run(SMOKE, "smoke", again, progress=False)
    resumed = json.loads(json.dumps(report.as_json()))
    assert resumed["comparisons"] == result["comparisons"]
    timed = "CPU s per 1,000"
    assert [{**row, timed: None} for row in resumed["table"]] == [
        {**row, timed: None} for row in result["table"]
    ]


def test_the_exact_errors_are_those_of_the_papers_grid() -> None:
    """|sd - 1| of normal data, Euler and Maruyama in 1,000 steps."""
    for a, epsilon, wanted in ((0.1, 0.25, 0.0285), (0.25, 0.5, 0.0199), (1.0, 0.0, 7.1e-4)):
        assert claim.exact(claim.Arm(a, epsilon), "EM", 1_000) == pytest.approx(wanted, abs=5e-5)
    assert [round(claim._matched(a), 3) for a in claim.EXACT_A] == [0.276, 0.418, 0.548, 0.632, 0]


def test_arms_share_network_data_and_loss() -> None:
    config = replace(SMOKE, output="score", components=10, width=64, depth=3)
    models = [claim.build(config, arm, seed=3) for arm in config.arms]
    sizes = [sum(p.numel() for p in model.network.parameters()) for model in models]
    assert max(sizes) / min(sizes) < 1.08
    inner = [model.network.layers[0].weight for model in models]
    assert all(torch.equal(weight, inner[0]) for weight in inner)
    assert isinstance(models[-1], Matching)
    matched = [arm for arm in config.arms if arm.name.endswith("matched prior")]
    assert [arm.a for arm in matched] == [0.25, 1.0]
    for arm in matched:
        assert float(arm.path.stationary.matrix[0, 0]) == pytest.approx(1.0)
    # every way of sampling takes the calls it says
    for model, arm in zip(models, config.arms, strict=True):
        for sampler, calls in config.ways(arm):
            seen = Seen()
            hook = model.network.register_forward_hook(seen)
            claim.draw(model, sampler, calls, 3, KeyedNoise(0))
            hook.remove()
            assert seen.calls == calls


@pytest.mark.parametrize("name", ["digits", "funnel", "mg25"])
def test_data(name: str) -> None:
    config = replace(SMOKE, data=name, rows=2_400, components=5)
    parts, about = claim.SETS[name](config)
    assert set(about) == {"name", "source", "licence"}
    assert sum(map(len, parts.values())) == (1_797 if name == "digits" else 2_400)
    whole = torch.cat(list(parts.values())) if name != "digits" else parts["train"]
    torch.testing.assert_close(whole.mean(0), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(whole.std(0), torch.ones(5), atol=1e-3, rtol=0)
    if name == "digits":  # principal components do not correlate
        torch.testing.assert_close(whole.T.cov(), torch.eye(5), atol=1e-3, rtol=0)
    rows = {tuple(row) for row in parts["train"].tolist()}
    assert not rows & {tuple(row) for row in parts["test"].tolist()}


def test_the_full_size_is_the_published_one() -> None:
    full = claim.PRESETS["full"]
    parts, _ = claim.SETS["funnel"](replace(full, components=1))
    assert len(parts["train"]) == 50_000
    assert full.steps * full.batch_size == 2_000 * 50_000


def test_bad_configurations() -> None:
    for options, message in (
        ({"seeds": ()}, "seeds needs"),
        ({"a": (1.0,)}, "a must hold"),
        ({"epsilon": (0.0, 0.5)}, "epsilon must hold"),
        ({"few": 3}, "few must be even"),
        ({"draws": 0}, "draws must be at least 1"),
        ({"data": "none"}, "data must be one of digits, funnel, mg25"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SMOKE, **options)


@pytest.mark.slow
def test_full_preset_builds_and_takes_one_step() -> None:
    config = claim.PRESETS["full"]
    parts, _ = claim.SETS[config.data](replace(config, rows=3_000))
    assert parts["train"].shape[1] == 100
    for arm in (claim.Arm(1.0, 0.25), claim.Arm(None)):
        model = claim.build(config, arm, seed=0)
        before = model.network.out.weight.detach().clone()
        stage = Stage(model, {"x": parts["train"]}, Training(steps=1, lr=config.lr[0]))
        train(stage, progress=False)
        assert not torch.equal(model.network.out.weight, before)
