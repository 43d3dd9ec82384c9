"""`fluvial evaluate`, from files to what is printed, as a user types it."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fluvial import cli
from fluvial.metrics import evaluate
from fluvial.metrics.evaluate import IMAGES, METRICS, ROWS

Capture = pytest.CaptureFixture[str]
RNG = np.random.default_rng


def pictures(count: int, seed: int, side: int = 8, channels: int = 3, low: int = 0) -> np.ndarray:
    return RNG(seed).integers(low, 256, (count, side, side, channels), dtype=np.uint8)


def write_folder(folder: Path, images: np.ndarray) -> None:
    folder.mkdir(parents=True)
    for k, image in enumerate(images):
        Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(folder / f"{k}.png")


def write_table(file: Path, columns: Sequence[str], rows: np.ndarray, kind: str = "") -> None:
    """With a column of classes, if ``kind`` names one."""
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*columns, *([kind] if kind else [])])
        for k, row in enumerate(rows.tolist()):
            writer.writerow([*row, *([("cat", "fox")[k % 2]] if kind else [])])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a user's data and samples, in which the command runs."""
    folder = tmp_path_factory.mktemp("place")
    write_folder(folder / "photos" / "cat", pictures(40, 0))
    write_folder(folder / "photos" / "fox", pictures(40, 1))
    write_folder(folder / "samples", pictures(30, 2, low=128))
    write_folder(folder / "large", pictures(30, 3, side=10))
    write_folder(folder / "grey", pictures(30, 4, channels=1))
    write_folder(folder / "few", pictures(5, 5))
    np.savez(folder / "samples.npz", x=pictures(50, 6), label=np.arange(50) % 2)
    np.save(folder / "photos.npy", pictures(70, 7))
    rows = RNG(8).normal(size=(80, 3)) * [1, 10, 100]
    np.save(folder / "rows.npy", rows)
    np.save(folder / "drawn.npy", rows[:40] + [3, 0, 0])
    np.save(folder / "wide.npy", RNG(9).normal(size=(40, 4)))
    np.save(folder / "broken.npy", np.full((40, 3), np.nan))
    write_table(folder / "table.csv", "abc", rows, kind="species")
    write_table(folder / "drawn.csv", "cab", (rows[:40] + [3, 0, 0])[:, [2, 0, 1]])
    write_table(folder / "labelled.csv", "abc", rows[:40] + [3, 0, 0], kind="species")
    write_table(folder / "narrow.csv", "ab", rows[:40, :2])
    before = os.getcwd()
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLUVIAL_CACHE", str(folder / "cache"))
        yield folder
    os.chdir(before)


def run(capsys: Capture, *argv: str) -> str:
    """What is printed; nothing else is, as nothing is wrong and nobody asked for progress."""
    capsys.readouterr()
    assert cli.main(["evaluate", *argv, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def document(capsys: Capture, *argv: str) -> Any:
    return json.loads(run(capsys, *argv, "--json"))


def error(capsys: Capture, *argv: str) -> str:
    capsys.readouterr()
    assert cli.main(["evaluate", *argv, "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("fluvial: ") and err.count("\n") == 1
    return err.removeprefix("fluvial: ").rstrip("\n")


def test_folders_of_images(place: Path, capsys: Capture) -> None:
    lines = run(capsys, "samples", "--against", "photos").splitlines()
    assert lines[0].split("  ")[0] == "metric" and lines[0].endswith("better")
    titles = ["Fréchet distance", "KID", "precision", "recall", "density", "coverage"]
    assert [line.split("  ")[0] for line in lines[1:7]] == titles
    assert titles == [METRICS[name].title for name in IMAGES]
    assert "floor: 30 other real rows in place of the samples" in lines
    assert "30 of 30 samples and 2 x 30 of 80 real rows used" in lines
    assert max(map(len, lines[:7])) <= 100


def test_json_is_what_the_function_gives(place: Path, capsys: Capture) -> None:
    names = ("frechet", "recall")
    found = document(capsys, "samples", "--against", "photos", "--seed", "3", "--metrics", *names)
    assert found == evaluate("samples", "photos", seed=3, metrics=names).as_json()
    worse = found["metrics"]["frechet"]
    assert worse["value"]["low"] > worse["floor"]["high"]  # brighter by half


def test_arrays_of_images_and_unequal_numbers(place: Path, capsys: Capture) -> None:
    """n is what both can give: all samples, or half of the data."""
    for samples, against, n, of, real in (
        ("samples.npz", "photos", 40, 50, 80),
        ("samples.npz", "photos.npy", 35, 50, 70),
        ("samples", "photos.npy", 30, 30, 70),
    ):
        found = document(capsys, samples, "--against", against, "--metrics", "kid")
        drawn = ", drawn at random" if n < of else ""
        assert found["kind"] == "images" and found["rows"] == n
        assert found["notes"][0] == (
            f"{n} of {of} samples and 2 x {n} of {real} real rows used{drawn}"
        )
    found = document(capsys, "samples", "--against", "photos", "--rows", "20", "--metrics", "kid")
    assert found["rows"] == 20


def test_arrays_of_numbers(place: Path, capsys: Capture) -> None:
    found = document(capsys, "drawn.npy", "--against", "rows.npy")
    assert found["kind"] == "arrays" and found["rows"] == 40
    assert list(found["metrics"]) == list(ROWS)
    for name in ("sliced", "energy", "mmd", "classifier"):
        metric = found["metrics"][name]
        assert metric["value"]["low"] > metric["floor"]["high"], name


def test_intervals_stay_where_values_can_be(place: Path, capsys: Capture) -> None:
    names = ("precision", "recall", "coverage", "classifier", "density", "frechet")
    flags = ("--against", "rows.npy", "--rows", "16", "--metrics", *names)
    found = document(capsys, "rows.npy", *flags)["metrics"]
    for name in names:
        for which in ("value", "floor"):
            interval = found[name][which]
            assert 0 <= interval["low"] <= interval["estimate"] <= interval["high"], name
            assert interval["high"] <= 1 or name in names[4:]


def test_tables_with_and_without_labels(place: Path, capsys: Capture) -> None:
    """Columns go by their names, and labels may be in one of the two."""
    flags = ("--against", "table.csv", "--label", "species", "--metrics", "energy")
    found = [document(capsys, name, *flags) for name in ("drawn.csv", "labelled.csv")]
    assert found[0] == found[1] and found[0]["kind"] == "table"
    plain = document(capsys, "drawn.npy", "--against", "rows.npy", "--metrics", "energy")
    value, known = (found["metrics"]["energy"]["value"] for found in (found[0], plain))
    assert value["estimate"] == pytest.approx(known["estimate"], rel=1e-5)  # float32 in a table
    flags = ("--against", "drawn.csv", "--label", "species", "--metrics", "energy")
    assert document(capsys, "labelled.csv", *flags)["rows"] == 20


def test_sizes_and_channels_are_brought_to_one(place: Path, capsys: Capture) -> None:
    flags = ("--against", "photos", "--metrics", "kid")
    found = document(capsys, "large", *flags, "--size", "8")
    assert found == document(capsys, "large", *flags, "--size", "8", "8")
    assert any(note.startswith("samples: brought to 8 x 8") for note in found["notes"])
    assert document(capsys, "grey", *flags, "--channels", "3")["rows"] == 30


def test_depends_on_the_seed_alone(place: Path, capsys: Capture) -> None:
    before = torch.random.get_rng_state()
    flags = ("drawn.npy", "--against", "rows.npy", "--metrics", "energy", "classifier")
    one, same = (run(capsys, *flags, "--seed", "1") for _ in range(2))
    assert one == same != run(capsys, *flags, "--seed", "2")
    assert run(capsys, *flags) == run(capsys, *flags, "--seed", "0")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_same_rows_are_named(place: Path, capsys: Capture) -> None:
    found = run(capsys, "rows.npy", "--against", "./rows.npy", "--metrics", "energy")
    assert "SAMPLES AND DATA ARE THE SAME" in found
    np.save(place / "copied.npy", np.load("rows.npy")[:40])
    found = run(capsys, "copied.npy", "--against", "rows.npy", "--metrics", "energy")
    assert "EVERY SAMPLE EQUALS A ROW OF THE DATA" in found


def test_progress_goes_where_errors_go(place: Path, capsys: Capture) -> None:
    capsys.readouterr()
    argv = ["evaluate", "drawn.npy", "--against", "rows.npy", "--metrics", "energy", "--json"]
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["rows"] == 40 and "metrics: 100%" in err


def test_samples_of_a_trained_model(
    place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train, sample, evaluate; the run itself holds no samples."""
    monkeypatch.setattr("fluvial.training.run.draw", lambda *args: None)
    monkeypatch.setattr("fluvial.images.recipe.scatter", lambda *args: None)
    small = ["--steps", "4", "--batch-size", "8", "--width", "16", "--depth", "1", "--quiet"]
    train = ["train", "meanflow", "--data", "table.csv", "--label", "species", "--out", "run"]
    assert cli.main([*train, *small]) == 0
    assert cli.main(["sample", "run", "--n", "40", "--out", "gen.csv", "--quiet"]) == 0
    flags = ("--label", "species", "--metrics", "energy")
    found = document(capsys, "gen.csv", "--against", "table.csv", *flags)
    assert found["kind"] == "table" and found["rows"] == 40
    for path in ("run", "run/model.safetensors"):
        message = error(capsys, path, "--against", "table.csv")
        assert message.startswith(f"SAMPLES: {path} is a trained model: draw samples of it first")
        assert f"`fluvial sample {path} --n 1000 --out FILE`" in message


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["samples"], "--against is missing: real data"),
        (["--against", "photos"], "SAMPLES is missing: a folder of images"),
        (["sample", "--against", "photos"], "SAMPLES: there is no sample (did you mean samples?)"),
        (["samples", "--against", "photo"], "--against: there is no photo (did you mean photos"),
        (["samples", "--against", "rows.npy"], "samples are images of shape 3 x 8 x 8 and against"),
        (["wide.npy", "--against", "rows.npy"], "samples are arrays of shape 4 and against arrays"),
        (["broken.npy", "--against", "rows.npy"], "SAMPLES: x holds 120 numbers that are NaN"),
        (["drawn.npy", "--against", "broken.npy"], "--against: x holds 120 numbers that are NaN"),
        (["few", "--against", "photos"], "SAMPLES must have at least 16 rows"),
        (["samples", "--against", "few"], "SAMPLES must have at least 16 rows, and against 32"),
        (["narrow.csv", "--against", "drawn.csv"], "SAMPLES must have the columns of against: mis"),
        (["drawn.csv", "--against", "table.csv"], "--against: table.csv: columns that are not num"),
        (
            ["drawn.csv", "--against", "table.csv", "--label", "kind"],
            "SAMPLES: label: drawn.csv has no column 'kind'",
        ),
        (["samples", "--against", "photos", "--metrics", "fid"], "--metrics: there is no 'fid'"),
        (["samples", "--against", "photos", "--rows", "3"], "--rows must be at least 16, got 3"),
        (["samples", "--against", "photos", "--rows", "x"], "--rows must be a whole number"),
        (["samples", "--against", "photos", "--seed", "-1"], "--seed must not be negative"),
        (["samples", "--against", "photos", "--features", "vgg"], "--features must be"),
        (["rows.npy", "--against", "rows.npy", "--features", "pixels"], "--features 'pixels' is f"),
        (["samples", "--against", "photos", "--channels", "2"], "SAMPLES: channels must be 1"),
        (["drawn.npy", "--against", "rows.npy", "--size", "8"], "SAMPLES: size and channels are"),
    ],
    ids=" ".join,
)
def test_mistakes_are_said_in_one_line(
    argv: list[str], message: str, place: Path, capsys: Capture
) -> None:
    assert error(capsys, *argv).startswith(message)


@pytest.mark.parametrize(
    ("samples", "flags"),
    [("large", "--size 8 8"), ("grey", "--channels 3")],
)
def test_the_flags_that_help_are_named(
    samples: str, flags: str, place: Path, capsys: Capture
) -> None:
    assert error(capsys, samples, "--against", "photos").endswith(f"give {flags}")
    assert run(capsys, samples, "--against", "photos", "--metrics", "kid", *flags.split())


def test_help_of_the_command(capsys: Capture) -> None:
    assert cli.main(["evaluate", "--help"]) == 0
    out = capsys.readouterr().out
    assert "None" not in out
    for flag in ("--against", "--metrics", "--rows", "--size", "--channels", "--label", "--seed"):
        assert f"  {flag} " in out
