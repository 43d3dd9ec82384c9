"""The command line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fluvial
from fluvial import catalog, cli
from fluvial.claims import meanflow


def test_list_as_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(catalog.SYSTEMS)
    assert next(line for line in lines if line.startswith("meanflow")).split()[2] == "available"
    assert cli.main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [system.name for system in catalog.SYSTEMS]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def run(config: Any, preset: str, out: Path, *, force: bool, progress: bool) -> Any:
        calls.append(SimpleNamespace(config=config, preset=preset, out=out, force=force))
        return SimpleNamespace(as_json=lambda: {"system": "meanflow"}, as_text=lambda: "table")

    monkeypatch.setattr(meanflow, "run", run)
    return calls


def test_presets_are_defaults_of_the_flags(seen: list[Any]) -> None:
    assert cli.main(["run", "meanflow"]) == 0
    assert cli.main(["run", "meanflow", "--preset", "record", "--steps", "7", "--out", "x"]) == 0
    assert cli.main(["run", "meanflow", "--seeds", "4", "5", "--preset=smoke", "--force"]) == 0
    laptop, record, smoke = seen
    assert (laptop.config, laptop.preset) == (meanflow.PRESETS["laptop"], "laptop")
    assert laptop.out == Path("runs/meanflow-laptop")
    assert asdict(record.config) == {**asdict(meanflow.PRESETS["record"]), "steps": 7}
    assert record.out == Path("x")
    assert smoke.config.seeds == (4, 5)
    assert smoke.force
    assert not laptop.force


def test_result_as_json(seen: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "meanflow", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"system": "meanflow"}


@pytest.mark.parametrize(
    ("name", "message"), [("meanfolw", "did you mean 'meanflow'"), ("saemark-watermark", "planned")]
)
def test_unknown_and_planned_systems(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", name]) == 2
    assert message in capsys.readouterr().err


def test_existing_output_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    assert cli.main(["run", "meanflow", "--preset", "smoke", "--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_help_names_the_flags_of_the_claim(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "meanflow", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--rival-lr" in text
    assert "--preset" in text


def test_interruption_has_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(meanflow, "run", run)
    assert cli.main(["run", "meanflow"]) == 130
    assert "goes on" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == fluvial.__version__
