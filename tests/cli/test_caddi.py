"""`fluvial train caddi-discrete-diffusion` and `fluvial sample`, from text to text."""

from __future__ import annotations

import json
import math
import os
import random
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fluvial
from fluvial import cli
from fluvial.images import MeanFlow
from fluvial.language import CaDDi
from fluvial.networks import MLP
from fluvial.training.files import load_model

Capture = pytest.CaptureFixture[str]

SYSTEM = "caddi-discrete-diffusion"
SMALL = shlex.split(
    "--length 12 --levels 3 --context 2 --width 16 --depth 1 --heads 2 --steps 6 --batch-size 8 "
    "--ema 0.5 0.9 --validate-every 3 --sample-every 6"
)
RUN = ["--data", "corpus.txt", *SMALL]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a user's text, in which the commands run."""
    folder = tmp_path_factory.mktemp("place")
    rng = random.Random(0)
    words = ["fire", "fine", "fish", "wine", "wish", "wind", "hire", "hind"]
    text = "".join(rng.choice(words) + rng.choice([" ", ", ", ".\n"]) for _ in range(500))
    (folder / "corpus.txt").write_text(text, encoding="utf-8")
    before = os.getcwd()
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLUVIAL_CACHE", str(folder / "cache"))
        yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    assert cli.main(["train", SYSTEM, *RUN, "--out", "run", "--quiet"]) == 0
    return place / "run"


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of single tests are not drawn: that of the module is."""
    monkeypatch.setattr("fluvial.training.run.draw", lambda *args: None)
    monkeypatch.setattr("fluvial.language.caddi.recipe.text_picture", lambda *args: None)


def error(argv: list[str], capsys: Capture) -> str:
    capsys.readouterr()
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("fluvial: ") and err.count("\n") == 1
    return err.removeprefix("fluvial: ").rstrip("\n")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# Training


def test_a_training_leaves_the_folder_of_a_run(run: Path) -> None:
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert {
        "run.json",
        "training.json",
        "metrics.jsonl",
        "result.json",
        "model.safetensors",
        "README.md",
        "figure.png",
        "samples/step-00000006.txt",
        "samples/step-00000006.png",
        "weights/best.safetensors",
    } <= names
    metrics = {metric["name"]: metric for metric in read_json(run / "result.json")["metrics"]}
    assert list(metrics)[:2] == ["bits per token", "bits per character"]
    assert "ELBO at T = 3" in metrics["bits per character"]["what"]
    # of a network that knows nothing: the weights of the levels, 1, 1/2 and 1/3, times log2 V
    size = len(set((run.parent / "corpus.txt").read_text()))
    ignorant = (1 + 1 / 2 + 1 / 3) * math.log2(size)
    assert 1 < metrics["bits per token"]["value"] < 1.02 * ignorant
    assert read_json(run / "run.json")["data"]["format"]["tokenizer"]["size"] == size
    card = (run / "README.md").read_text(encoding="utf-8")
    assert "texts = model.format.text(samples)" in card
    assert "fluvial sample . --n 16 --out samples.txt" in card
    assert 'pipeline_tag: "text-generation"' in card


def test_what_is_said_of_a_training(place: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "run"
    assert cli.main(["train", SYSTEM, *RUN, "--tokenizer", "bpe", "--out", str(out)]) == 0
    text, err = capsys.readouterr()
    assert "windows of 12 tokens to train on, " in err and "rows" not in err.split("steps, in")[0]
    assert "; the vocabulary has " in err and " tokens\n" in err
    assert "CausalTransformer of " in err
    lines = text.splitlines()
    assert (
        lines[0].startswith(f"{SYSTEM}, trained on ") and "windows of corpus.txt: 6 st" in lines[0]
    )
    assert any(line.startswith("  held-out nats_per_token") for line in lines)
    assert any(
        line.startswith("  bits per character") and "upper bound: ELBO" in line for line in lines
    )
    assert lines[-1] == f"next: fluvial sample {out} --n 16 --out samples.txt"
    assert (out / "tokenizer.json").is_file()
    assert cli.main(["train", "--resume", str(out)]) == 0
    assert capsys.readouterr().out == (
        f"{out} is finished, after 6 steps.\n"
        f"to sample:       fluvial sample {out} --n 16 --out samples.txt\n"
        "to train longer: begin another run; the learning rate of this one has fallen to its end\n"
    )


def test_interrupted_and_gone_on_with(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    out = tmp_path / "stopped"
    seen = 0

    def after_step(self: CaDDi) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(CaDDi, "after_step", after_step)
        assert cli.main(["train", SYSTEM, *RUN, "--out", str(out), "--quiet"]) == 130
    assert "stopped at step 2 of 6" in capsys.readouterr().err
    assert "--width was 16 and is 32" in error(
        ["train", "--resume", str(out), "--width", "32", "--quiet"], capsys
    )
    monkeypatch.chdir(tmp_path)  # from any folder
    assert cli.main(["train", "--resume", str(out), "--quiet"]) == 0
    for name in ("model", "weights/last", "weights/best"):
        a, b = (load_model(one / f"{name}.safetensors")[0] for one in (run, out))
        assert a.keys() == b.keys() and all(torch.equal(a[part], b[part]) for part in a)
    before, after = (read_json(one / "result.json") for one in (run, out))
    assert {**before, "seconds": 0} == {**after, "seconds": 0}


def test_another_text_is_not_gone_on_with(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    data, out = tmp_path / "x.txt", tmp_path / "run"
    data.write_text((place / "corpus.txt").read_text())

    def after_step(self: CaDDi) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(CaDDi, "after_step", after_step)
        argv = ["train", SYSTEM, "--data", str(data), *SMALL, "--out", str(out), "--quiet"]
        assert cli.main(argv) == 130
    data.write_text(data.read_text()[::-1])
    assert "the data have changed since" in error(
        ["train", "--resume", str(out), "--quiet"], capsys
    )


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (b"", [], "bad.txt is empty: it holds no text"),
        (
            b"abc",
            [],
            "--length: bad.txt holds 3 tokens, fewer than one window of --length 12; give",
        ),
        (
            b"gr\xfcn " * 99,
            [],
            'offset 2 is not utf-8; say which encoding the text has, --encoding "',
        ),
        (b"a\0" * 99, [], "bad.txt holds binary data, not text"),
        (
            b"ab " * 99,
            ["--vocabulary", "300"],
            "--vocabulary is that of --tokenizer 'bpe', got 300",
        ),
        (b"ab " * 99, ["--tokenizer", "bpe", "--vocabulary", "9"], "--vocabulary must exceed 256"),
        (b"ab " * 99, ["--held-out", "no.txt"], "no.txt is not there"),
        (b"ab " * 99, ["--column", "x", "--data", "bad.jsonl"], "bad.jsonl is not there"),
        (b"ab " * 99, ["--variant", "arr"], ", got 'arr'"),
        (b"ab " * 99, ["--length", "0"], "--length must be at least 1, got 0"),
        (b"ab " * 99, ["--target", "x"], "--target is for systems that join two data sets"),
        (b"ab " * 99, ["--weight-decay", "-1"], "--weight-decay must not be negative, got -1.0"),
        (
            b"ab " * 99,
            ["--betas", "1", "1"],
            "--betas must be two numbers in [0, 1), got (1.0, 1.0)",
        ),
        (b"ab " * 99, ["--data", ""], "the place of the text is empty; the folder at hand is '.'"),
        (b"\x7fELF\x00\xff" * 99, [], "bad.txt holds binary data, not utf-8 text: NUL bytes"),
        (b"ab " * 99, ["--tokenizer", "no/tokenizer.json"], "there is no no/tokenizer.json; it is"),
    ],
)
def test_mistakes(
    content: bytes, flags: list[str], message: str, place: Path, tmp_path: Path, capsys: Capture
) -> None:
    (place / "bad.txt").write_bytes(content)
    out = tmp_path / "run"
    text = error(["train", SYSTEM, "--data", "bad.txt", *SMALL, *flags, "--out", str(out)], capsys)
    assert message in text
    assert not out.exists()


def test_a_held_out_text_and_a_pretrained_model_are_named(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    (place / "short.txt").write_text("fire")
    argv = ["train", SYSTEM, *RUN, "--out", str(tmp_path / "run")]
    text = error([*argv, "--held-out", "short.txt"], capsys)
    assert text.startswith("--held-out: length: short.txt holds 4 tokens, fewer than one window")
    own = ["train", SYSTEM, "--data", "corpus.txt", "--out", str(tmp_path / "run")]
    text = error([*own, "--pretrained", "nope.gguf"], capsys)
    assert text == "--pretrained: there is no nope.gguf"
    (tmp_path / "empty").mkdir()
    text = error([*own, "--pretrained", str(tmp_path / "empty")], capsys)
    assert text.startswith("--pretrained: no tokenizer can be made of ")
    assert text.endswith("the folder holds no file of a tokenizer")
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def after_step(self: CaDDi) -> None:
        signal.raise_signal(signal.SIGINT)

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(CaDDi, "after_step", after_step)
        assert cli.main(["train", SYSTEM, *RUN, "--out", str(out), "--quiet"]) == 130
    (path,) = (out / "checkpoints").iterdir()
    path.write_bytes(path.read_bytes()[:999])
    text = error(["train", "--resume", str(out), "--quiet"], capsys)
    assert f"{path} is not a readable checkpoint" in text
    assert text.endswith("; delete it, or begin another run")


def test_text_for_a_system_of_numbers(place: Path, capsys: Capture) -> None:
    text = error(["train", "meanflow", "--data", "corpus.txt"], capsys)
    assert (
        "text is read by read_text, and learned by fluvial train caddi-discrete-diffusion" in text
    )


def test_an_existing_folder_is_refused(run: Path, capsys: Capture) -> None:
    text = error(["train", SYSTEM, *RUN, "--out", "run"], capsys)
    assert text == "--out: run holds a finished run; choose another folder"


# Sampling


def sample(*argv: str) -> int:
    return cli.main(["sample", "run", "--quiet", *argv])


def rows(path: str) -> list[str]:
    return [json.loads(line)["text"] for line in Path(path).read_text("utf-8").splitlines()]


def test_samples_are_texts(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert sample("--n", "5", "--out", "a.txt") == 0
    assert capsys.readouterr().out.startswith("5 samples in ")
    content = Path("a.txt").read_text("utf-8")
    assert [f"--- {k} ---\n" in content for k in range(1, 7)] == [True] * 5 + [False]
    assert sample("--n", "5", "--out", "a.jsonl", "--batch-size", "2") == 0
    texts = rows("a.jsonl")
    assert len(texts) == 5 and all(len(text) == 12 for text in texts)
    assert all(text.split("\n")[0] in content for text in texts)
    # by the file of the model alone
    (tmp_path / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    argv = [
        "sample",
        str(tmp_path / "model.safetensors"),
        "--n",
        "5",
        "--out",
        "b.jsonl",
        "--quiet",
    ]
    assert cli.main(argv) == 0 and rows("b.jsonl") == texts
    model = fluvial.load(run)
    tokens = model.sample(5, noise=fluvial.KeyedNoise(0))
    assert model.format.text(tokens) == texts
    assert sample("--n", "5", "--seed", "1", "--out", "c.jsonl") == 0 and rows("c.jsonl") != texts
    assert sample("--n", "2", "--out", "d.npy") == 0


def test_what_is_there_is_not_overwritten(run: Path, capsys: Capture) -> None:
    Path("keep.txt").write_text("mine")
    argv = ["sample", "run", "--out", "keep.txt", "--n", "2", "--quiet"]
    assert error(argv, capsys) == "--out: keep.txt exists; choose another, or --force"
    assert Path("keep.txt").read_text() == "mine"
    assert cli.main([*argv, "--force"]) == 0 and Path("keep.txt").read_text() != "mine"
    text = error(["sample", "run", "--out", "x.png", "--quiet"], capsys)
    assert text == "--out: texts are written as .txt, .jsonl, .npz or .npy, got x.png"


def test_prompts_and_endings(run: Path) -> None:
    assert sample("--n", "4", "--prompt", "fi", "--ending", "sh.", "--out", "p.jsonl") == 0
    texts = rows("p.jsonl")
    assert all(t.startswith("fi") and t.endswith("sh.") and len(t) == 12 for t in texts)
    assert len(set(texts)) > 1
    cold = ["--n", "4", "--temperature", "0", "--prompt", "fine w"]
    assert sample(*cold, "--out", "q.jsonl") == 0
    assert sample("--n", "4", "--top-p", "0.5", "--temperature", "0.7", "--out", "r.jsonl") == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "Ü"], "--prompt: the text holds 'Ü' (U+00DC, character 1), which is none of"),
        (["--prompt", "fi" * 7], "--prompt: it has 14 tokens, and there is room for 12"),
        (
            ["--prompt", "fine", "--ending", "i" * 9],
            "--ending: it has 9 tokens, and there is room fo",
        ),
        (["--steps", "4"], "--steps: the CaDDi in run has a number of steps of its own"),
        (["--top-p", "0"], "--top-p must lie in (0, 1], got 0.0"),
        (["--temperature", "-1"], "--temperature must be at least 0 and finite, got -1.0"),
        (["--temperature", "nan"], "--temperature must be at least 0 and finite, got nan"),
        (["--label", "x"], "--label x: these data have no labels"),
        (["--n", "0"], "--n must be at least 1, got 0"),
    ],
)
def test_samples_that_cannot_be(flags: list[str], message: str, run: Path, capsys: Capture) -> None:
    text = error(["sample", "run", "--out", "never.txt", "--quiet", *flags], capsys)
    assert message in text or message in text.replace("'", "")
    assert not Path("never.txt").exists()


def test_other_models_make_no_text(run: Path, tmp_path: Path, capsys: Capture) -> None:
    place = tmp_path / "model.safetensors"
    MeanFlow(MLP(shape=(2,), width=8, depth=1)).save(place)
    for flag, value in (("--prompt", "a"), ("--temperature", "1"), ("--top-p", "1")):
        argv = ["sample", str(place), "--out", "x.npy", flag, value]
        assert error(argv, capsys) == f"{flag}: the MeanFlow in {place} makes no text"


# Evaluation


def test_samples_are_evaluated(run: Path, tmp_path: Path, capsys: Capture) -> None:
    for name in ("e.txt", "e.jsonl"):
        assert sample("--n", "40", "--out", str(tmp_path / name)) == 0
    capsys.readouterr()
    found = []
    for name in ("e.txt", "e.jsonl"):
        argv = ["evaluate", str(tmp_path / name), "--against", "corpus.txt", "--json", "--quiet"]
        assert cli.main(argv) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["metrics"] == found[1]["metrics"] and found[0]["kind"] == "text"
    bits = found[0]["metrics"]["bits"]
    assert bits["value"]["low"] > bits["floor"]["high"] and bits["better"] == "near the floor"
    argv = ["evaluate", str(tmp_path / "e.txt"), "--against", "corpus.txt", "--quiet"]
    assert error([*argv, "--metrics", "kid"], capsys).startswith(
        "--metrics: there is no 'kid' of texts; there are bits, divergence, entropy, distinct"
    )
    assert error([*argv, "--size", "8"], capsys) == "--size is not of texts, got 8"
    argv = ["evaluate", "corpus.txt", "--against", "corpus.txt", "--quiet"]
    assert error(argv, capsys).startswith("SAMPLES: corpus.txt holds no samples, each below")


def test_texts_are_not_audited(run: Path, capsys: Capture) -> None:
    rest = ["--train", "corpus.txt", "--holdout", "corpus.txt", "--quiet"]
    assert "texts are not audited, got corpus.txt; fluvial evaluate" in error(
        ["audit", "run", *rest], capsys
    )
    rest = ["--train", "animals", "--holdout", "animals", "--quiet"]
    assert "texts are not audited, and run writes them" in error(["audit", "run", *rest], capsys)
