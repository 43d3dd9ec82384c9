"""Curves of a training: thinned, and whole in what they say."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fluvial.report import curves
from fluvial.report.curves import Curve, Snapshots, read_metrics


def read(path: Path, *lines: Any) -> curves.Metrics:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return read_metrics(path)


def test_few_points_are_kept_as_they_are() -> None:
    curve = Curve(limit=4)
    for x in range(4):
        curve.add(x, x**2)
    assert curve.points == [(0, 0), (1, 1), (2, 4), (3, 9)]
    assert curve.band == []


def test_many_points_become_means_of_equal_counts_within_their_extremes() -> None:
    curve = Curve(limit=4)
    for x in range(16):
        curve.add(x, (-1) ** x + x // 4)
    assert len(curve) <= 4 and curve.size == 4
    assert curve.points == [(1.5, 0), (5.5, 1), (9.5, 2), (13.5, 3)]
    assert curve.band == [(1.5, -1, 1), (5.5, 0, 2), (9.5, 1, 3), (13.5, 2, 4)]


def test_thinning_keeps_the_mean_whatever_the_count() -> None:
    for count in (1, 5, 99, 1000):
        curve = Curve(limit=10)
        for x in range(count):
            curve.add(x, float(x))
        assert 1 <= len(curve) <= 10
        assert sum(b.count for b in curve.buckets) == count
        assert sum(b.y for b in curve.buckets) == count * (count - 1) / 2


def test_steps_that_were_taken_again_replace_the_first() -> None:
    curve = Curve()
    for x, y in [(1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0), (3, 30.0)]:
        curve.add(x, y)
    assert curve.points == [(1, 1.0), (2, 20.0), (3, 30.0)]


def test_snapshots_are_the_first_the_middle_and_the_last() -> None:
    rows = Snapshots(limit=4)
    assert rows.first_middle_last() == []
    for step in range(1, 101):
        rows.add(step, [float(step), None])
    assert len(rows.rows) <= 4
    steps = [step for step, _ in rows.first_middle_last()]
    assert steps[0] == 1 and steps[-1] == 100 and 30 <= steps[1] <= 70
    rows.add(101, "no row")
    assert all(isinstance(row, list) for _, row in rows.first_middle_last())


def test_lines_of_training_and_of_validation(tmp_path: Path) -> None:
    metrics = read(
        tmp_path / "metrics.jsonl",
        {"step": 1, "seconds": 0.5, "lr": 0.1, "loss": 2.0, "by_time": {"loss": [1.0, None]}},
        {"step": 2, "seconds": 1.0, "lr": 0.1, "loss": 1.0, "by_time": {"loss": [0.5, 0.1]}},
        {
            "step": 2,
            "seconds": 1.5,
            "validation": {"last": {"loss": 3.0, "by_time": {"loss": [3, 3]}}, "ema": {"loss": 2}},
        },
    )
    assert metrics.step == 2 and metrics.seconds == 1.5 and metrics.problems == []
    (stage,) = metrics.stages.values()
    assert list(stage.training) == ["lr", "loss"]
    assert stage.training["loss"].points == [(1, 2.0), (2, 1.0)]
    assert {name: terms["loss"].points for name, terms in stage.validation.items()} == {
        "last": [(2, 3.0)],
        "ema": [(2, 2.0)],
    }
    assert stage.by_time[""]["loss"].first_middle_last() == [(1, [1.0, None]), (2, [0.5, 0.1])]
    assert stage.by_time["last"]["loss"].first_middle_last() == [(2, [3.0, 3.0])]


def test_stages_are_apart(tmp_path: Path) -> None:
    metrics = read(
        tmp_path / "metrics.jsonl",
        {"step": 1, "loss": 1.0, "stage": "coarse"},
        {"step": 1, "loss": 5.0, "stage": "fine"},
    )
    losses = {name: stage.training["loss"].points for name, stage in metrics.stages.items()}
    assert losses == {"coarse": [(1, 1.0)], "fine": [(1, 5.0)]}


def test_what_is_broken_is_counted_and_left_out(tmp_path: Path) -> None:
    metrics = read(
        tmp_path / "metrics.jsonl",
        {"step": 1, "loss": 1.0, "delta": 2.0},
        '{"step": 2, "loss": 1',
        "",
        "[1, 2]",
        '{"loss": 1.0}',
        '{"step": -1, "loss": 1.0}',
        '{"step": "3", "loss": 1.0}',
        '{"step": true, "loss": 1.0}',
        "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
        "[" * 100_000,
        {"step": 9, "loss": 3.0, "delta": "text", "validation": 3, "by_time": [1]},
    )
    (stage,) = metrics.stages.values()
    assert stage.training["loss"].points == [(1, 1.0), (9, 3.0)]
    assert metrics.problems == [
        "8 lines of metrics.jsonl could not be read and are left out, the first is line 2."
    ]


def test_values_that_are_not_finite_are_counted(tmp_path: Path) -> None:
    metrics = read(
        tmp_path / "metrics.jsonl",
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": math.nan},
        {"step": 3, "loss": math.inf, "validation": {"last": {"loss": None}}},
        '{"step": 4, "loss": 1' + "0" * 400 + "}",
    )
    (stage,) = metrics.stages.values()
    assert stage.training["loss"].points == [(1, 1.0)]
    assert metrics.problems == [
        "loss (training) was not finite 2 times, first at step 2.",
        "loss (validation of last) was not finite 1 time, first at step 3.",
    ]


def test_an_empty_file_has_no_curves(tmp_path: Path) -> None:
    assert read(tmp_path / "metrics.jsonl").stages == {}
    with pytest.raises(OSError):
        read_metrics(tmp_path)


def test_a_file_without_line_ends_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "LONGEST_LINE", 1000)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n' + b"x" * 5500 + b'\n{"step": 2, "loss": 2.0}')
    metrics = read_metrics(path)
    assert metrics.stages[None].training["loss"].points == [(1, 1.0), (2, 2.0)]
    assert "line 2" in metrics.problems[0]


def test_keys_without_end_do_not_fill_the_memory(tmp_path: Path) -> None:
    lines = [{"step": i, "loss": 1.0, f"term-{i}": 1.0, "stage": None} for i in range(1, 300)]
    metrics = read(tmp_path / "metrics.jsonl", *lines)
    (stage,) = metrics.stages.values()
    assert len(stage.training) <= curves.MOST_CURVES
    assert sum(b.count for b in stage.training["loss"].buckets) == 299
    assert "more than 100 curves" in metrics.problems[0]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    by_time = {"loss": [1.0] * 10}
    with path.open("w") as file:
        for step in range(1, 8_001):
            entry = {"step": step, "loss": 1 / step, "lr": 0.1, "by_time": by_time}
            file.write(json.dumps(entry) + "\n")
    tracemalloc.start()
    metrics = read_metrics(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert metrics.step == 8_000
    assert len(metrics.stages[None].training["loss"]) <= curves.LIMIT
    assert peak < 1e6 < path.stat().st_size
