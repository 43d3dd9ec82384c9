"""The recipe of `fluvial train caddi-discrete-diffusion`, without the command line."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fluvial
from fluvial.data import Tokenizer
from fluvial.data.tokenizer import LETTERS
from fluvial.language.caddi.recipe import PREVIEW, Recipe
from fluvial.training.recipe import as_json, from_json
from fluvial.training.stage import Training

SMALL: dict[str, Any] = {
    "length": 8,
    "levels": 3,
    "context": 2,
    "width": 16,
    "depth": 1,
    "heads": 2,
    "steps": 4,
    "batch_size": 8,
    "ema": (0.5, 0.9),
    "validate_every": 2,
    "sample_every": 4,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUVIAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    rng = random.Random(0)
    words = ["fire", "fine", "fish", "wine", "wish", "wind", "hire", "hind"]
    path.write_text(" ".join(rng.choice(words) for _ in range(400)))
    return path


def test_every_field_of_a_training_is_a_hyper_parameter() -> None:
    assert {field.name for field in fields(Training)} <= set(asdict(Recipe()))


def test_rules_for_what_is_not_given(corpus: Path) -> None:
    for steps, validate, sample in ((100, 100, 100), (2_000, 200, 400)):
        training = Recipe(steps=steps).training
        assert (training.validate_every, training.sample_every) == (validate, sample)
    assert Recipe().training.lr == pytest.approx(3e-3)
    assert Recipe(width=576).training.lr == pytest.approx(5e-4)
    assert Recipe(pretrained="a/b").training.lr == 1e-4
    job = Recipe(steps=4).prepare(corpus, progress=False)
    recipe = job.recipe
    assert (recipe.width, recipe.depth, recipe.heads, recipe.variant) == (96, 3, 4, "block")
    assert (recipe.lr, recipe.tokenizer) == (pytest.approx(3e-3), None)
    assert (job.model.steps, job.model.keep, job.model.length) == (8, 4, 64)
    # prepared again, as for a resume, it is the same
    assert Recipe(**asdict(recipe)).prepare(corpus, progress=False).recipe == recipe


def test_as_json_and_back() -> None:
    recipe = Recipe(tokenizer="bpe", vocabulary=300, ema=(0.5, 0.9), held_out="x.txt", clip=None)
    assert from_json(Recipe, json.loads(json.dumps(as_json(recipe)))) == recipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation": 1.0}, r"validation must be a share in \[0, 1\), got 1.0"),
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"levels": 0}, "levels must be at least 1, got 0"),
        ({"context": -1}, "context must be at least 1, or 0 for all, got -1"),
        ({"vocabulary": 300}, "vocabulary is that of tokenizer='bpe', got 300"),
        ({"pretrained": "a/b", "width": 64}, "width is that of the pretrained model; leave it out"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
    ],
)
def test_values_out_of_range(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**changes)


def test_what_does_not_fit_is_found_before_training(corpus: Path) -> None:
    for changes, error, message in (
        ({"heads": 3}, ValueError, "heads"),
        ({"length": 10_000}, ValueError, "length: corpus.txt holds 19.. tokens, fewer than one"),
        ({"validation": 1e-9}, ValueError, "leaves no window of corpus.txt"),
        ({"held_out": "nowhere.txt"}, FileNotFoundError, "nowhere.txt is not there"),
        ({"uniform_mix": 0.1, "source": "uniform"}, ValueError, "uniform_mix"),
        ({"augmented": True, "variant": "ar"}, ValueError, "augmented goes with variant='block'"),
        ({"tokenizer": "bpee"}, FileNotFoundError, "it is characters, bpe, a tokenizer.json"),
    ):
        with pytest.raises(error, match=message):
            Recipe(**{**SMALL, **changes}).prepare(corpus, progress=False)


def test_the_model_follows_the_recipe(corpus: Path) -> None:
    options = {
        **SMALL,
        "variant": "ar",
        "source": "uniform",
        "kept": "spread",
        "normalise": "letters",
    }
    job = Recipe(**options).prepare(corpus, progress=False)
    model = job.model
    assert (model.variant, model.levels.source, model.kept) == ("ar", "uniform", "spread")
    assert (model.classes, model.format) == (27, job.data.format)
    assert model.format.tokenizer == Tokenizer(LETTERS, normalise="letters")
    args = model.network.args
    assert (args["vocabulary"], args["width"], args["depth"], args["time"]) == (28, 16, 1, True)
    whole = Recipe(**{**SMALL, "context": 0}).prepare(corpus, progress=False).model
    assert whole.keep is None and whole.network.args["time"] is False
    assert Recipe(**{**SMALL, "levels": 1}).prepare(corpus, progress=False).model.keep is None


def test_the_rows_are_those_of_the_files(corpus: Path) -> None:
    job = Recipe(**SMALL).prepare(corpus, progress=False)
    rows, held = job.rows
    assert held is not None and rows["x"] is job.train.x and held["x"] is job.held.x
    about = job.about
    assert about["rows"] == {"train": len(job.train), "validation": len(job.held)}
    assert about["format"]["tokenizer"]["size"] == model_size(corpus)
    text = corpus.read_text()
    assert all(window in text for window in job.data.format.text(job.held.x))


def model_size(corpus: Path) -> int:
    return len(set(corpus.read_text()))


def test_a_text_of_its_own_is_held_out(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("fine wine, he wished! " * 10)
    job = Recipe(**SMALL, held_out=str(other)).prepare(corpus, progress=False)
    assert torch.equal(job.train.x, job.data.x) and job.held is not None
    assert "".join(job.held.format.text(job.held.x)) in other.read_text()
    tokenizer = job.data.format.tokenizer
    # its characters are known too; a vocabulary that is learned is learned from the data alone
    assert tokenizer is not None and {"!", ",", "f"} <= set(tokenizer.alphabet)
    pairs = Recipe(**SMALL, held_out=str(other), tokenizer="bpe", vocabulary=270)
    learned = pairs.prepare(corpus, progress=False).data.format.tokenizer
    assert learned == Tokenizer.bpe([corpus.read_text()], 270)


@pytest.mark.parametrize("tokenizer", ["characters", "bpe"])
def test_a_training_from_text_to_text(tokenizer: str, corpus: Path, tmp_path: Path) -> None:
    changes = {"tokenizer": tokenizer} | ({"vocabulary": 270} if tokenizer == "bpe" else {})
    job = Recipe(**SMALL, **changes).prepare(corpus, progress=False)
    out = tmp_path / "run"
    out.mkdir()
    job.fit(out, progress=False)
    assert (out / "tokenizer.json").is_file() == (tokenizer == "bpe")
    lines = (out / "samples" / "step-00000004.txt").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("at most ") and "bits a token over" in lines[0]
    assert "(ELBO at T = 3, independent levels, 2 kept (last))" in lines[0]
    assert lines[0].endswith("bits a character; held-out text")
    assert sum(line.startswith("--- ") for line in lines) == 12
    assert (out / "samples" / "step-00000004.png").stat().st_size > 1_000
    per_token, per_character = job.measure()
    assert (per_token["name"], per_character["name"]) == ("bits per token", "bits per character")
    assert per_token["what"].startswith("upper bound: ELBO at T = 3")
    held = job.held
    assert held is not None
    bound = job.model.bound(held.x.long(), PREVIEW)
    assert per_token["value"] == pytest.approx(bound.nats_per_token / math.log(2))
    ratio = job.data.format.characters_per_token
    assert per_character["value"] == pytest.approx(per_token["value"] / ratio)
    assert (ratio > 1.05) == (tokenizer == "bpe")
    # what is logged while training has both units
    measured = [
        row["validation"]["ema-0.5"]
        for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        if "validation" in row
    ]
    assert len(measured) == 2
    for terms in measured:
        nats = terms["nats_per_token"]
        assert terms["bits_per_character"] == pytest.approx(nats / math.log(2) / ratio, rel=1e-5)
    # the file of the model alone is enough
    job.model.save(tmp_path / "model.safetensors")
    again = fluvial.load(tmp_path / "model.safetensors")
    assert again.format == job.data.format
    noise = fluvial.KeyedNoise(3)
    assert torch.equal(again.sample(3, noise=noise), job.model.sample(3, noise=noise))
    if tokenizer == "bpe":
        assert Tokenizer.load(out) == replace(job.data.format.tokenizer, normalise="none")


def test_nothing_is_held_out(corpus: Path) -> None:
    job = Recipe(**SMALL, validation=0).prepare(corpus, progress=False)
    assert job.held is None and job.rows[1] is None and job.measure() == []
    assert "validation" not in job.about["rows"]


def test_a_pretrained_model(corpus: Path, tmp_path: Path) -> None:
    """A tiny one, built here: its network and its tokenizer, from one folder."""
    transformers = pytest.importorskip("transformers")
    place = tmp_path / "pretrained"
    made = Tokenizer.bpe([corpus.read_text()], 270)
    config = transformers.LlamaConfig(
        vocab_size=272,  # padded, as those of real models are
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(place)
    (place / "tokenizer.json").write_text(made.model, encoding="utf-8")
    own = {k: v for k, v in SMALL.items() if k not in ("width", "depth", "heads")}
    job = Recipe(**own, pretrained=str(place)).prepare(corpus, progress=False)
    assert (job.recipe.variant, job.recipe.width, job.recipe.lr) == ("ar", None, 1e-4)
    assert job.data.format.tokenizer == made and job.model.classes == 272
    out = tmp_path / "run"
    out.mkdir()
    job.fit(out, progress=False)
    assert len(job.measure()) == 2
    with pytest.raises(FileNotFoundError, match="pretrained: .* cannot be loaded"):
        Recipe(**own, pretrained=str(tmp_path / "none"), tokenizer="characters").prepare(
            corpus, progress=False
        )
