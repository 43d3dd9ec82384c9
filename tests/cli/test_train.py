"""`fluvial train` and `fluvial sample`, from files to files, as a user types them."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fluvial
from fluvial import cli
from fluvial.core.noise import KeyedNoise
from fluvial.images import MeanFlow
from fluvial.training.files import load_model

Capture = pytest.CaptureFixture[str]

SMALL = [
    "--steps",
    "6",
    "--batch-size",
    "8",
    "--width",
    "16",
    "--depth",
    "1",
    "--ema",
    "0.5",
    "0.9",
]
IMAGES = [*SMALL, "--heads", "2", "--patch", "4", "--validate-every", "3", "--quiet"]
SPECIES = ("setosa", "virginica")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a user's data, in which the commands run."""
    folder = tmp_path_factory.mktemp("place")
    rng = np.random.default_rng(0)
    for k in range(40):
        image = np.zeros((8, 8, 3), np.uint8)
        image[2 : 6 + k % 2, 2:5] = rng.integers(100, 255, 3)
        path = folder / "photos" / ("cat", "fox")[k % 2] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["length", "petals", "species"])
        for k in range(60):
            petals = int(rng.integers(3, 9))
            writer.writerow([round(float(rng.normal(5 + k % 2, 0.2)), 2), petals, SPECIES[k % 2]])
    np.save(folder / "points.npy", rng.normal(100, 3, (50, 2)))
    before = os.getcwd()
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLUVIAL_CACHE", str(folder / "cache"))
        yield folder
    os.chdir(before)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of single tests are not drawn, which takes a second: those of the module are."""
    monkeypatch.setattr("fluvial.training.run.draw", lambda *args: None)
    monkeypatch.setattr("fluvial.images.recipe.scatter", lambda *args: None)


@pytest.fixture(scope="module")
def photos(place: Path) -> Path:
    assert cli.main(["train", "meanflow", "--data", "photos", "--out", "photos-run", *IMAGES]) == 0
    return place / "photos-run"


@pytest.fixture(scope="module")
def table(place: Path) -> Path:
    argv = ["--data", "table.csv", "--label", "species", "--out", "table-run", *SMALL, "--quiet"]
    assert cli.main(["train", "meanflow", *argv]) == 0
    return place / "table-run"


@pytest.fixture(scope="module")
def points(place: Path) -> Path:
    argv = ["--data", "points.npy", "--out", "points-run", *SMALL, "--quiet"]
    assert cli.main(["train", "meanflow", *argv]) == 0
    return place / "points-run"


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def error(argv: list[str], capsys: Capture) -> str:
    capsys.readouterr()
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("fluvial: ") and err.count("\n") == 1
    return err.removeprefix("fluvial: ").rstrip("\n")


# Training


def test_a_training_leaves_the_folder_of_a_run(photos: Path) -> None:
    names = {path.relative_to(photos).as_posix() for path in photos.rglob("*") if path.is_file()}
    assert names == {
        ".lock",
        "run.json",
        "training.json",
        "metrics.jsonl",
        "checkpoints/step-00000006.pt",
        *(f"weights/{name}.safetensors" for name in ("last", "best", "ema-0.5", "ema-0.9")),
        "samples/step-00000006.png",
        "model.safetensors",
        "figure.png",
        "result.json",
        "README.md",
    }
    run = read_json(photos / "run.json")
    assert (run["format"], run["kind"], run["system"]) == (1, "training", "meanflow")
    assert run["command"].startswith(
        "fluvial train meanflow --data photos --out photos-run --steps 6"
    )
    assert run["source"] == str(photos.parent / "photos")
    recipe = run["recipe"]
    assert (recipe["size"], recipe["channels"], recipe["patch"], recipe["width"]) == (8, 3, 4, 16)
    assert recipe["lr"] == pytest.approx(0.384 / 16)
    assert run["data"]["rows"] == {"train": 36, "validation": 4}
    assert run["data"]["format"]["label_names"] == ["cat", "fox"]
    result = read_json(photos / "result.json")
    assert (result["format"], result["system"], result["steps"]) == (1, "meanflow", 6)
    assert result["weights"] in ("ema-0.5", "ema-0.9") and result["seconds"] > 0
    assert [metric["name"] for metric in result["metrics"]] == ["validation delta"]
    # the model holds the weights that are named
    weights = load_model(photos / "weights" / f"{result['weights']}.safetensors")[0]
    model = fluvial.load(photos)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    assert model.use.digest == run["use_digest"]
    parameters = sum(value.numel() for value in model.parameters())
    assert run["parameters"] == parameters


def test_pictures(photos: Path, points: Path) -> None:
    with Image.open(photos / "samples" / "step-00000006.png") as picture:
        # two classes in four rows of eight each, of 8 x 8 pixels with a line between, magnified
        assert picture.mode == "RGB" and picture.size == (9 * 71, 9 * 71)
    with Image.open(points / "samples" / "step-00000006.png") as picture:
        assert picture.size == (640, 640)
    for run in (photos, points):
        with Image.open(run / "figure.png") as picture:
            assert picture.width > 1500


def test_networks_fit_the_data(table: Path, points: Path) -> None:
    rows, arrays = fluvial.load(table), fluvial.load(points)
    assert type(rows.network).__name__ == type(arrays.network).__name__ == "MLP"
    assert rows.network.num_classes == 2 and arrays.network.num_classes == 0
    assert rows.guidance.drop == 0.1 and arrays.guidance is None
    assert rows.format.columns == ("length", "petals")
    assert rows.format.integers == ("petals",)


def test_the_result_is_said_in_text(
    place: Path, tmp_path: Path, capsys: Capture, points: Path
) -> None:
    capsys.readouterr()
    out = str(tmp_path / "run")
    argv = [
        "train",
        "meanflow",
        "--data",
        "points.npy",
        "--out",
        out,
        *SMALL,
        "--validation",
        "0.2",
    ]
    assert cli.main(argv) == 0
    text, err = capsys.readouterr()
    lines = text.splitlines()
    assert lines[0].startswith("meanflow, trained on 40 rows of points.npy: 6 steps in ")
    assert lines[1].startswith("  held-out delta      ") and "at step 6" in lines[1]
    assert lines[2].startswith("  Fréchet distance    ") and "real data" in lines[2]
    assert lines[-1] == f"next: fluvial sample {out} --n 64 --out samples.npz"
    assert "fluvial: points.npy: 40 rows of 2 to train on, 10 held out\n" in err
    assert f"on cpu, 6 steps, in {out}\n" in err
    assert "training: 100%" in err  # the progress bar, with the time that is left


def test_json_is_all_there_is(place: Path, tmp_path: Path, capsys: Capture) -> None:
    capsys.readouterr()
    out = tmp_path / "run"
    argv = ["--data", "points.npy", "--out", str(out), *SMALL, "--validation", "0", "--json"]
    assert cli.main(["train", "meanflow", *argv]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"run": str(out), **read_json(out / "result.json")}
    assert document["metrics"] == [] and document["weights"] == "ema-0.5"
    assert document["notes"] == [
        "The loss was not measured on held-out rows: the first of the averages was taken."
    ]
    target = tmp_path / "x.npy"
    assert cli.main(["sample", str(out), "--n", "3", "--out", str(target), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["n"], document["labels"], document["shape"]) == (3, None, [2])


def test_runs_are_numbered(place: Path, capsys: Capture) -> None:
    argv = ["train", "meanflow", "--data", "points.npy", *SMALL, "--quiet"]
    assert cli.main(argv) == cli.main(argv) == 0
    assert sorted(path.name for path in (place / "runs").iterdir()) == ["meanflow-1", "meanflow-2"]
    a, b = (load_model(place / "runs" / f"meanflow-{k}" / "model.safetensors") for k in (1, 2))
    assert all(torch.equal(value, b[0][name]) for name, value in a[0].items())
    shutil.rmtree(place / "runs")


# Interruption


def interrupted(
    out: Path, step: int, number: int, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> int:
    seen = 0

    def after_step(self: MeanFlow) -> None:
        nonlocal seen
        seen += 1
        if seen == step:
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(MeanFlow, "after_step", after_step)
        return cli.main(["train", *argv])


def test_killed_twice_and_gone_on_with(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    out = tmp_path / "my run"
    argv = ["meanflow", "--data", "photos", "--out", str(out), *IMAGES]
    assert interrupted(out, 2, signal.SIGINT, monkeypatch, argv) == 130
    err = capsys.readouterr().err
    again = f"fluvial train --resume '{out}'"
    assert err == (
        f"fluvial: stopped at step 2 of 6, kept in {out}/checkpoints/step-00000002.pt; "
        f"go on with: {again}\n"
    )
    monkeypatch.chdir(tmp_path)  # from any folder
    resume = ["--resume", str(out), "--quiet"]
    assert interrupted(out, 3, signal.SIGTERM, monkeypatch, resume) == 143
    assert "stopped at step 5 of 6" in capsys.readouterr().err
    assert not (out / "result.json").exists()
    # said where samples are wanted too early
    assert "not ended" in error(["sample", str(out), "--out", "x.png"], capsys)
    assert f"--out: {out} holds a run that is not finished; go on with it by --resume" in error(
        ["train", "meanflow", "--data", str(photos.parent / "photos"), "--out", str(out)], capsys
    )
    assert cli.main(["train", *resume]) == 0
    for name in ("model", "weights/last", "weights/best"):
        a, b = (load_model(run / f"{name}.safetensors")[0] for run in (photos, out))
        assert a.keys() == b.keys() and all(torch.equal(a[part], b[part]) for part in a)
    before, after = (read_json(run / "result.json") for run in (photos, out))
    assert {**before, "seconds": 0} == {**after, "seconds": 0}
    assert read_json(photos / "run.json")["recipe"] == read_json(out / "run.json")["recipe"]


def test_stopped_before_a_checkpoint(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    out = tmp_path / "run"

    def fit(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MeanFlow, "fit", fit)
        argv = ["train", "meanflow", "--data", "points.npy", "--out", str(out), *SMALL, "--quiet"]
        assert cli.main(argv) == 130
    assert capsys.readouterr().err == (
        f"fluvial: stopped before the first checkpoint; begin again with: "
        f"fluvial train --resume {out}\n"
    )
    assert cli.main(["train", "--resume", str(out), "--quiet"]) == 0
    assert (out / "result.json").exists()


def test_a_finished_run_says_so_and_can_be_made_longer(
    points: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "run"
    shutil.copytree(points, out)
    capsys.readouterr()
    assert cli.main(["train", "--resume", str(out)]) == 0
    assert capsys.readouterr().out == (
        f"{out} is finished, after 6 steps.\n"
        f"to sample:       fluvial sample {out} --n 64 --out samples.npz\n"
        f"to train longer: fluvial train --resume {out} --steps 12\n"
    )
    assert cli.main(["train", "--resume", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    longer = ["train", "meanflow", f"--resume={out}", "--steps", "8", "--keep", "3", "--quiet"]
    assert cli.main(longer) == 0
    assert read_json(out / "result.json")["steps"] == 8
    assert read_json(out / "run.json")["recipe"]["steps"] == 8
    whole = tmp_path / "whole"
    argv = ["--data", "points.npy", "--out", str(whole), *SMALL, "--steps", "8", "--quiet"]
    assert cli.main(["train", "meanflow", *argv]) == 0
    a, b = (load_model(run / "weights" / "last.safetensors")[0] for run in (out, whole))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_may_not_change(points: Path, capsys: Capture) -> None:
    resume = ["train", "--resume", "points-run"]
    assert error([*resume, "--lr", "1", "--depth", "2"], capsys) == (
        "a training goes on as it began, but --depth was 1 and is 2, --lr was 0.024 and is 1.0; "
        "leave that out, or begin another run"
    )
    assert error([*resume, "--steps", "3"], capsys) == (
        "--steps 3: the training is at step 6 already"
    )
    assert "--data was " in error([*resume, "--data", "photos"], capsys)
    assert "name two folders" in error([*resume, "--out", "other"], capsys)
    assert error(["train", "--resume", "nowhere"], capsys) == (
        "nowhere is not a training run: there is no such folder"
    )
    assert error(["train", "--resume", "photos"], capsys) == (
        "photos is not a training run: it has no run.json"
    )
    # what agrees may be said
    assert cli.main([*resume, "--data", "points.npy", "--lr", "0.024", "--out", "points-run"]) == 0


def test_a_falling_rate_ends_with_its_steps(place: Path, tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "run")
    argv = ["--data", "points.npy", "--out", out, *SMALL, "--schedule", "linear", "--quiet"]
    assert cli.main(["train", "meanflow", *argv]) == 0
    capsys.readouterr()
    assert cli.main(["train", "--resume", out]) == 0
    assert "begin another run; the learning rate" in capsys.readouterr().out
    said = error(["train", "--resume", out, "--steps", "9"], capsys)
    assert "(the linear schedule of its learning rate ends with its steps)" in said


def test_data_that_changed_are_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    data, out = tmp_path / "x.npy", tmp_path / "run"
    np.save(data, np.load("points.npy"))
    argv = ["meanflow", "--data", str(data), "--out", str(out), *SMALL, "--quiet"]
    assert interrupted(out, 2, signal.SIGINT, monkeypatch, argv) == 130
    np.save(data, np.load("points.npy")[:40])
    assert error(["train", "--resume", str(out), "--quiet"], capsys) == (
        f"the data have changed since {out} began (45 rows to train on then, 36 now): put them "
        "back as they were, or begin another run"
    )
    data.unlink()
    assert f"there is no {data}" in error(["train", "--resume", str(out), "--quiet"], capsys)


# Mistakes


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--data is missing: what to train on"),
        (["--data", "nowhere"], "there is no nowhere"),
        (["--data", "photos", "--patch", "3"], "--patch 3 does not divide 8 x 8; 1, 2, 4, 8 would"),
        (
            ["--data", "photos", "--size", "37"],
            "--patch: none fits images of 37 x 37, too little divides both sides; bring them to "
            "multiples of 8, --size 40",
        ),
        (
            ["--data", "photos", "--size", "20", "22", "--patch", "4"],
            "--patch 4 does not divide 20 x",
        ),
        (["--data", "photos", "--label", "x"], "--label: the classes of images are their folders"),
        (
            ["--data", "photos", "--heads", "3"],
            "--width must be a multiple of heads, got --width 128, --heads 3",
        ),
        (["--data", "photos", "--lr", "0"], "--lr must be positive, got 0.0"),
        (["--data", "photos", "--ema", "2"], "--ema needs decays in [0, 1), got (2.0,)"),
        (["--data", "photos", "--ratio", "2"], "--ratio must be a share in [0, 1], got 2.0"),
        (
            ["--data", "photos", "--validation", "1"],
            "--validation must be a share in [0, 1), got 1",
        ),
        (
            ["--data", "photos", "--validation", "0.01"],
            "--validation 0.01 leaves no image of class 'cat', which has 20 to share out; hold out "
            "another share, or nothing, --validation 0",
        ),
        (["--data", "photos", "--device", "cuda"], "--device cuda: PyTorch finds none"),
        (["--data", "photos", "--trackers", "x"], "--trackers: there is no tracker 'x'; known are"),
        (["--data", "photos", "--precision", "fp16"], "--precision 'fp16' needs an accelerator"),
        (
            ["--data", "photos", "--accumulation", "3"],
            "--batch-size 64 does not divide into 3 parts",
        ),
        (
            ["--data", "photos", "--out", "photos"],
            "--out: photos is not empty; choose another folder",
        ),
        (["--data", "photos", "--out", "table.csv"], "--out: table.csv is a file; choose another"),
        (
            ["--data", "table.csv"],
            "table.csv: columns that are not numbers: species",
        ),
        (["--data", "table.csv", "--label", "specie"], "--label: table.csv has no column 'specie'"),
        (["--data", "table.csv", "--label", "species", "--patch", "2"], "--patch is for images"),
        (["--data", "table.csv", "--size", "8"], "size"),
        (
            ["--data", "points.npy", "--kappa", "0.5"],
            "omega and kappa guide towards labels, and these data have none",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_found_before_the_first_step(
    argv: list[str], message: str, place: Path, capsys: Capture
) -> None:
    if torch.cuda.is_available() and "--device" in argv:
        pytest.skip("there is a GPU")
    before = sorted(place.iterdir())
    said = error(["train", "meanflow", *argv, "--quiet"], capsys)
    assert said.startswith(message), said
    runs = place / "runs"
    assert not runs.exists() or not any(runs.iterdir())
    shutil.rmtree(runs, ignore_errors=True)
    assert {*before} >= {*place.iterdir()} - {place / "cache"}


def test_a_folder_of_a_few_images_says_what_to_do(tmp_path: Path, capsys: Capture) -> None:
    for k, size in enumerate((20, 30)):
        Image.new("L", (size, size), 200).save(tmp_path / f"{k}.png")
    said = error(["train", "meanflow", "--data", str(tmp_path), "--quiet"], capsys)
    assert "--size 64 or --size 48 64" in said


def test_a_training_that_diverges_says_what_to_try(
    place: Path, tmp_path: Path, capsys: Capture
) -> None:
    argv = ["train", "meanflow", "--data", "points.npy", "--out", str(tmp_path / "run"), *SMALL]
    said = error([*argv, "--lr", "1e30", "--quiet"], capsys)
    assert "is not finite at step 6" in said
    assert said.endswith("; begin another run with a smaller --lr, or with --clip 1")


# Samples


def grid(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def test_samples_of_images_in_every_form(photos: Path, tmp_path: Path, capsys: Capture) -> None:
    sample = ["sample", "photos-run", "--n", "5", "--quiet", "--out"]
    capsys.readouterr()
    for name in ("x.png", "wide.png", "x.npy", "x.npz", "x"):
        argv = [*sample, str(tmp_path / name)]
        assert cli.main([*argv, *(["--columns", "5"] if name == "wide.png" else [])]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert out.splitlines()[0].startswith("5 samples in ")
    assert out.splitlines()[0].endswith(f": {tmp_path / 'x.png'}")
    array = np.load(tmp_path / "x.npy")
    assert array.shape == (5, 3, 8, 8) and array.dtype == np.uint8
    with np.load(tmp_path / "x.npz") as packed:
        assert np.array_equal(packed["x"], array)
        assert packed["label"].tolist() == ["cat", "fox", "cat", "fox", "cat"]
    folder = {
        path.relative_to(tmp_path / "x").as_posix() for path in (tmp_path / "x").rglob("*.png")
    }
    assert folder == {
        "cat/00000.png",
        "fox/00001.png",
        "cat/00002.png",
        "fox/00003.png",
        "cat/00004.png",
    }
    with Image.open(tmp_path / "x" / "fox" / "00003.png") as picture:
        assert np.array_equal(np.asarray(picture).transpose(2, 0, 1), array[3])
    assert grid(tmp_path / "wide.png") == (14 * 44, 14 * 8)
    assert grid(tmp_path / "x.png") == (24 * 26, 24 * 17)
    # what was written can be trained on
    for source in ("x", "x.npz"):
        data = fluvial.data.read(tmp_path / source)
        assert data.label_names == ("cat", "fox") and len(data) == 5


def test_samples_of_tables_and_arrays(table: Path, points: Path, tmp_path: Path) -> None:
    for run, name in (("table-run", "x.csv"), ("table-run", "x.parquet"), ("points-run", "x.npz")):
        argv = ["sample", run, "--n", "6", "--quiet", "--out", str(tmp_path / name)]
        assert cli.main(argv) == 0
    with (tmp_path / "x.csv").open(newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == ["length", "petals", "species"]
    assert [row[2] for row in rows] == ["setosa", "virginica"] * 3
    assert all(row[1].lstrip("-").isdigit() for row in rows)
    data = fluvial.data.read(tmp_path / "x.parquet", label="species")
    assert data.format.integers == ("petals",)
    assert np.allclose(data.x, [[float(v) for v in row[:2]] for row in rows], atol=1e-4)
    x = np.load(tmp_path / "x.npz")["x"]
    assert x.shape == (6, 2) and abs(x.mean() - 100) < 10  # in the user's units


def drawn(run: str, folder: Path, *argv: str) -> np.ndarray:
    path = folder / "drawn.npy"
    assert cli.main(["sample", run, "--quiet", "--force", "--out", str(path), *argv]) == 0
    return np.load(path).astype(np.float64)


def test_a_sample_depends_on_seed_and_number_alone(
    photos: Path, points: Path, tmp_path: Path
) -> None:
    few = drawn("points-run", tmp_path, "--n", "5")
    many = drawn("points-run", tmp_path, "--n", "12", "--batch-size", "4")
    assert np.allclose(few, many[:5], rtol=1e-6)
    assert not np.allclose(few, drawn("points-run", tmp_path, "--n", "5", "--seed", "1"), rtol=1e-6)
    assert not np.allclose(
        few, drawn("points-run", tmp_path, "--n", "5", "--steps", "2"), rtol=1e-9
    )
    last = drawn("points-run", tmp_path, "--n", "5", "--weights", "last")
    assert not np.allclose(few, last, rtol=1e-9)
    labels = drawn("photos-run", tmp_path, "--n", "4", "--label", "fox", "cat")
    foxes = drawn("photos-run", tmp_path, "--n", "3", "--label", "fox")
    assert np.abs(labels[::2] - foxes[::2]).max() <= 1  # a level, where a value lies on a half
    model = fluvial.load("points-run")
    direct = model.format.decode(model.sample(5, noise=KeyedNoise(0)))
    assert np.allclose(few, direct, rtol=1e-6)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["photos-run", "--out", "x.jpg"],
            "--out: images are written as .png, a folder (no suffix), .npz or .npy, got x.jpg",
        ),
        (["table-run", "--out", "x.png"], "--out: rows of a table are written as .csv, .parquet"),
        (["points-run", "--out", "x.csv"], "--out: arrays are written as .npz or .npy, got x.csv"),
        (
            ["photos-run", "--out", "points.npy"],
            "--out: points.npy exists; choose another, or --force",
        ),
        (
            ["photos-run", "--out", "photos"],
            "--out: photos is not empty; choose another, or --force",
        ),
        (
            ["photos-run", "--out", "x.png", "--label", "ct"],
            "--label: there is no class 'ct'; did you",
        ),
        (
            ["points-run", "--out", "x.npy", "--label", "a"],
            "--label 'a': these data have no labels",
        ),
        (
            ["photos-run", "--out", "x.png", "--weights", "ema"],
            "--weights: photos-run has no 'ema'",
        ),
        (["photos-run", "--out", "x.png", "--n", "0"], "--n must be at least 1, got 0"),
        (["photos-run", "--out", "x.png", "--seed", "-1"], "--seed must not be negative, got -1"),
        (["photos", "--out", "x.png"], "no model in photos"),
        (["nowhere", "--out", "x.png"], "no model at nowhere"),
        (["table.csv", "--out", "x.png"], "table.csv is not a readable safetensors file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_of_sampling(
    argv: list[str],
    message: str,
    photos: Path,
    table: Path,
    points: Path,
    capsys: Capture,
) -> None:
    said = error(["sample", *argv, "--quiet"], capsys)
    assert said.startswith(message), said
    assert not list(photos.parent.glob("x.*"))


# What reads runs


def test_card_and_page(photos: Path, tmp_path: Path, capsys: Capture) -> None:
    capsys.readouterr()
    (photos / "README.md").unlink()
    assert cli.main(["card", "photos-run"]) == 0
    assert capsys.readouterr().out == "photos-run/README.md\n"
    assert "meanflow, trained on photos" in (photos / "README.md").read_text(encoding="utf-8")
    page = tmp_path / "page"
    assert cli.main(["report", "photos-run", "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"{page / 'index.html'}\n"
    assert "photos-run" in (page / "index.html").read_text(encoding="utf-8")
    assert "not empty" in error(["report", "photos-run", "--out", str(page)], capsys)
    assert cli.main(["report", "photos-run", "--out", str(page), "--force"]) == 0


@pytest.mark.slow
def test_two_processes(points: Path, tmp_path: Path) -> None:
    """Only one of them prints and writes; the run and the samples are those of one process."""
    out, target = tmp_path / "run", tmp_path / "x.npy"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    train = ["train", "meanflow", "--data", "points.npy", "--out", str(out), *SMALL, "--quiet"]
    sample = ["sample", str(out), "--n", "7", "--batch-size", "2", "--out", str(target), "--json"]
    said = []
    for argv in (train, sample):
        done = subprocess.run(
            [*launcher, "-m", "--", "fluvial.cli", *argv],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0].count("meanflow, trained on") == 1 and json.loads(said[1])["n"] == 7
    a, b = (load_model(run / "model.safetensors")[0] for run in (points, out))
    assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)
    assert np.allclose(np.load(target), drawn(str(out), tmp_path, "--n", "7"), rtol=1e-5)
