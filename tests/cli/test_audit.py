"""`fluvial audit`, from files to files, as a user types it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fluvial import cli
from fluvial.images import MeanFlow
from fluvial.networks import MLP, DiT
from fluvial.trust import PairedFlow

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with training and held-out images, samples and two models."""
    folder = tmp_path_factory.mktemp("audit")
    images = np.random.default_rng(0).integers(0, 256, (180, 1, 4, 4), np.uint8)
    np.save(folder / "train.npy", images[:100])
    np.save(folder / "test.npy", images[100:140])
    np.save(folder / "samples.npy", np.concatenate([images[3:23], images[140:]]))
    np.save(folder / "rows.npy", images[:100, 0, 0].astype("f4"))
    np.save(folder / "more-rows.npy", images[100:, 0, 0].astype("f4"))
    model = MeanFlow(DiT(size=4, channels=1, patch=2, width=8, depth=1, heads=2, num_classes=2))
    labels = torch.arange(100) % 2
    model.fit(torch.from_numpy(images[:100]), labels, steps=1, progress=False)
    model.save(folder / "run" / "model.safetensors")
    PairedFlow(MLP(shape=(4,), width=8, depth=1)).save(folder / "flow.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def arguments(source: str, *more: str) -> list[str]:
    data = ["--train", "train.npy", "--holdout", "test.npy", "--level", "0.1", "--quiet"]
    return ["audit", source, *data, *more]


def test_samples_that_copy(place: Path, capsys: Capture) -> None:
    assert cli.main(arguments("samples.npy", "--out", "found")) == 0
    out, err = capsys.readouterr()
    assert "verdict: more samples copy training rows" in out and not err
    assert out.rstrip().endswith("Audit and figure of the closest pairs: found")
    content = json.loads((place / "found" / "audit.json").read_text())
    assert content["copies"] >= 20 and content["num"] == 60
    assert {(pair["sample"], pair["train"]) for pair in content["pairs"][:20]} == {
        (k, 3 + k) for k in range(20)
    }
    assert cli.main(arguments("samples.npy", "--out", "found")) == 2
    assert "--force" in capsys.readouterr().err
    assert cli.main(arguments("samples.npy", "--out", "found", "--force", "--n", "30")) == 0


@pytest.mark.parametrize("source", ["run", "run/model.safetensors"])
def test_a_model_is_sampled(place: Path, source: str, capsys: Capture) -> None:
    assert cli.main(arguments(source, "--n", "20", "--steps", "2", "--json")) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["num"] == 20 and content["verdict"] == "no sign of memorisation"


def test_arrays(place: Path, capsys: Capture) -> None:
    data = ["--train", "rows.npy", "--holdout", "more-rows.npy", "--level", "0.1", "--quiet"]
    for source in (["flow.safetensors", "--n", "10"], ["more-rows.npy"]):
        assert cli.main(["audit", *source, *data]) == 0
        assert "the 4 numbers of a row" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["samples.npy", "--steps", "2"], "steps are those of a model"),
        (["rows.npy"], "of one kind"),
        (["samples.npy", "--level", "0.01"], "at least 99 different rows"),
        (["samples.npy", "--holdout", "train.npy"], "--drop-duplicates"),
        (["missing.npy"], "missing.npy"),
        (["samples.npy", "--memory", "0"], "--memory must be at least 1 MiB"),
        (["samples.npy", "--seed", "-1"], "--seed must not be negative"),
        (["samples.npy", "--n", "1000"], "at most the 60 samples"),
    ],
)
def test_mistakes_are_said_in_a_line(
    place: Path, argv: list[str], message: str, capsys: Capture
) -> None:
    assert cli.main(arguments(*argv)) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.count("\n") == 1
