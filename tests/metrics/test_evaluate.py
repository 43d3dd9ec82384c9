from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fluvial.data import Format
from fluvial.data.write import write_samples
from fluvial.metrics import evaluate, frechet_distance
from fluvial.metrics.evaluate import IMAGES, METRICS, ROWS, Evaluation

RNG = np.random.default_rng
QUICK = {"resamples": 40, "cache": None}


def rows(count: int, seed: int, shift: float = 0.0) -> np.ndarray:
    return RNG(seed).normal(size=(count, 3)) * [1.0, 10.0, 100.0] + shift


def pictures(count: int, seed: int, low: int = 0) -> np.ndarray:
    return RNG(seed).integers(low, 256, (count, 1, 8, 8), dtype=np.uint8)


def by_name(found: Evaluation) -> dict:
    return {m.name: m for m in found.measured}


def test_samples_of_the_law_reach_the_floor() -> None:
    found = evaluate(rows(200, 0), rows(300, 1), **QUICK)
    assert found.kind == "arrays" and found.rows == 150
    assert [m.name for m in found.measured] == list(ROWS)
    for m in found.measured:
        assert m.value.low <= m.floor.high and m.floor.low <= m.value.high, m.name
    assert "150 of 200 samples and 2 x 150 of 300 real rows used, drawn at random" in found.notes


def test_samples_of_another_law_do_not() -> None:
    found = by_name(evaluate(rows(100, 0, shift=3.0), rows(200, 1), metrics=None, **QUICK))
    for name in ("sliced", "energy", "mmd", "classifier"):
        assert found[name].value.low > found[name].floor.high, name
    assert found["recall"].value.high < found["recall"].floor.low


def test_every_metric_is_the_one_of_its_name() -> None:
    """In the standardised numbers of the rows drawn; all of them where N fits."""
    samples, real = rows(40, 0, 1.0), rows(80, 1)
    names = tuple(METRICS)
    found = by_name(evaluate(samples, real, metrics=names, **QUICK))
    assert list(found) == list(names)
    mean, std = real.mean(0), real.std(0)
    # the reference is a half of the real rows, so only bounds are known here
    for m in found.values():
        assert m.value.low <= m.value.high and np.isfinite(m.value).all()
    whole = frechet_distance((samples - mean) / std, (real - mean) / std)
    assert found["frechet"].value.estimate == pytest.approx(whole, rel=0.5)


def test_images_in_principal_components(tmp_path: Path) -> None:
    real = tmp_path / "real"
    write_samples(real, torch.from_numpy(pictures(80, 0)), None, Format("images", (1, 8, 8)))
    np.savez(tmp_path / "samples.npz", x=pictures(40, 1, low=128))
    found = evaluate(str(tmp_path / "samples.npz"), real, **QUICK)
    assert found.kind == "images" and found.rows == 40
    assert [m.name for m in found.measured] == list(IMAGES)
    assert "the first 10 principal components of the pixels" in found.features
    assert "not content" in found.features and "efficientnet" not in found.features
    frechet = by_name(found)["frechet"]
    assert frechet.value.low > frechet.floor.high
    large = RNG(2).integers(0, 256, (40, 3, 72, 65), dtype=np.uint8)
    found = evaluate(large[:20], large, metrics=["frechet"], **QUICK)
    assert "for images of this size give features" in found.features


def test_features_of_ones_own() -> None:
    seen = []

    def brightness(batch: torch.Tensor) -> torch.Tensor:
        seen.append((batch.dtype, float(batch.min()), float(batch.max())))
        return batch.flatten(1).mean(1, keepdim=True)

    real = pictures(80, 0)
    found = evaluate(real[:40] // 2, real, features=brightness, metrics=["frechet"], **QUICK)
    assert found.features == "1, of the function given"
    assert all(dtype == torch.float32 and -1 <= low < high <= 1 for dtype, low, high in seen)
    # half as bright: (255 / 4) / 127.5 darker, squared
    assert found.measured[0].value.estimate == pytest.approx(0.25, rel=0.1)


def test_tables_by_the_names_of_their_columns(tmp_path: Path) -> None:
    x = rows(60, 0)
    for name, order, data in (("data", [0, 1, 2], x), ("samples", [2, 0, 1], rows(30, 1))):
        head = ",".join("abc"[k] for k in order)
        lines = [head, *(",".join(map(str, row)) for row in data[:, order].tolist())]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    found = evaluate(tmp_path / "samples.csv", tmp_path / "data.csv", metrics=["sliced"], **QUICK)
    assert found.kind == "table" and found.rows == 30
    plain = evaluate(rows(30, 1), x, metrics=["sliced"], **QUICK)
    assert found.measured[0].value.estimate == pytest.approx(plain.measured[0].value.estimate)
    (tmp_path / "other.csv").write_text("a,b,label\n" + "1,2,3\n" * 40)
    with pytest.raises(ValueError, match=r"missing c; unknown label \(a column of labels is named"):
        evaluate(tmp_path / "other.csv", tmp_path / "data.csv", **QUICK)


def test_the_same_file_and_memorised_rows_are_named(tmp_path: Path) -> None:
    real, other = pictures(80, 0), pictures(40, 1)
    np.save(tmp_path / "data.npy", real)
    (tmp_path / "link").symlink_to(tmp_path)
    path, again = tmp_path / "data.npy", tmp_path / "link" / "data.npy"
    quick = {"metrics": ["frechet"], **QUICK}
    for first, second in ((path, path), (path, again), (real, real)):
        found = evaluate(first, second, **quick)
        assert any("SAMPLES AND DATA ARE THE SAME" in note for note in found.notes)
    found = evaluate(real[5:45], path, **quick)
    assert any("EVERY SAMPLE EQUALS A ROW OF THE DATA" in note for note in found.notes)
    found = evaluate(np.concatenate([real[:7], other[:33]]), path, **quick)
    assert "7 of 40 samples equal a row of the data" in found.notes
    assert not any("equal" in note.lower() for note in evaluate(other, path, **quick).notes)


def test_as_text_and_json() -> None:
    found = evaluate(rows(40, 0), rows(80, 1), metrics=["energy", "recall"], level=0.9, **QUICK)
    lines = str(found).splitlines()
    assert lines[0].split() == (
        ["metric", "samples", "90", "%", "interval", "floor", "90", "%", "interval", "better"]
    )
    assert lines[1].startswith("energy distance") and lines[1].endswith("lower")
    assert lines[2].startswith("recall") and lines[2].endswith("higher")
    assert "floor: 40 other real rows in place of the samples" in lines
    assert any("scaled by the mean and deviation" in line for line in lines)
    content = json.loads(json.dumps(found.as_json()))
    assert content["metrics"]["energy"]["value"] == found.measured[0].value._asdict()
    assert content["rows"] == 40 and content["level"] == 0.9


def test_depends_on_the_seed_alone() -> None:
    before = torch.random.get_rng_state()
    one, same, other = (
        evaluate(rows(60, 0), rows(80, 1), metrics=["sliced", "classifier"], seed=seed, **QUICK)
        for seed in (1, 1, 2)
    )
    assert one == same != other
    assert torch.equal(torch.random.get_rng_state(), before)
    assert one.rows == 40
    fewer = evaluate(rows(60, 0), rows(80, 1), metrics=["sliced"], rows=20, **QUICK)
    assert fewer.rows == 20


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tensors_of_any_precision(dtype: torch.dtype) -> None:
    x, y = torch.from_numpy(rows(40, 0)), torch.from_numpy(rows(80, 1))
    found, wanted = (
        evaluate(a, b, metrics="sliced", **QUICK).measured[0]
        for a, b in ((x.to(dtype), y.to(dtype)), (x, y))
    )
    assert found.value.estimate == pytest.approx(wanted.value.estimate, rel=0.02)


def test_intervals_are_cut_to_what_can_be() -> None:
    names = ["precision", "recall", "coverage", "density", "frechet", "kid"]
    found = by_name(evaluate(rows(40, 0), rows(80, 1), metrics=[*names, "kid"], **QUICK))
    assert list(found) == names
    for name in names[:5]:
        for m in (found[name].value, found[name].floor):
            assert 0 <= m.low <= m.estimate <= m.high
            assert m.high <= 1 or name in ("density", "frechet")
    assert found["kid"].floor.low < 0  # an estimate without bias


def test_too_many_rows_for_the_exact_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fluvial.metrics.evaluate"], "LIMIT", 30)
    exact = {"metrics": ["wasserstein"], **QUICK}
    with pytest.raises(ValueError, match="wasserstein takes 30 rows at most, got 40: give rows=30"):
        evaluate(rows(40, 0), rows(80, 1), **exact)
    assert evaluate(rows(40, 0), rows(80, 1), rows=30, **exact).rows == 30


def test_one_picture_of_many_is_refused(tmp_path: Path) -> None:
    Image.new("L", (64, 64)).save(tmp_path / "samples.png")
    with pytest.raises(ValueError, match="samples: .* is one picture; many samples in one"):
        evaluate(tmp_path / "samples.png", pictures(80, 0))
    with pytest.raises(FileNotFoundError):
        evaluate(pictures(40, 0), tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("samples", "against", "settings", "error", "message"),
    [
        (rows(15, 0), rows(80, 1), {}, ValueError, "samples must have at least 16 rows"),
        (rows(40, 0), rows(31, 1), {}, ValueError, "got 40 and 31"),
        (pictures(40, 0), rows(80, 1), {}, ValueError, "samples are images of shape 1 x 8 x 8"),
        (rows(40, 0)[:, :2], rows(80, 1), {}, ValueError, "shape 2 and against arrays of shape 3"),
        (pictures(40, 0)[..., :7], pictures(80, 1), {}, ValueError, r"give size=\(8, 8\)"),
        (rows(40, 0) * np.nan, rows(80, 1), {}, ValueError, "samples: x holds 120 numbers"),
        ([[1.0]], rows(80, 1), {}, TypeError, "samples must be a path, a tensor"),
        (rows(40, 0), rows(80, 1), {"metrics": ["fid"]}, ValueError, "metrics: there is no 'fid'"),
        (rows(40, 0), rows(80, 1), {"rows": 5}, ValueError, "rows must be at least 16"),
        (rows(40, 0), rows(80, 1), {"features": "pixels"}, ValueError, "'pixels' is for images"),
        (rows(40, 0), rows(80, 1), {"features": "vgg"}, ValueError, "features must be pixels, eff"),
        (rows(40, 0), rows(80, 1), {"resamples": 5}, ValueError, "resamples must be at least 40"),
        (rows(40, 0), "nowhere.npy", {"level": 1.0}, ValueError, r"level must lie in \(0, 1\)"),
        (rows(40, 0), rows(80, 1), {"metrics": []}, ValueError, "metrics must name at least one"),
        (rows(40, 0), rows(80, 1), {"features": torch.log}, ValueError, "features must be finite"),
        (rows(40, 0), "nowhere.npy", {"seed": -1}, ValueError, "seed must not be negative"),
        (rows(40, 0), rows(80, 1) * 0, {}, ValueError, "mmd has no bandwidth, as most rows of aga"),
    ],
)
def test_refuses(samples, against, settings, error, message) -> None:
    with pytest.raises(error, match=message):
        evaluate(samples, against, **{"cache": None, **settings})
