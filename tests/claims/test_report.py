"""The folder of a run."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard

from fluvial.claims import report
from fluvial.claims.report import Report, markdown_table, open_run, write_report
from fluvial.claims.verdict import Comparison


@dataclass(frozen=True)
class Config:
    steps: int = 3
    lr: tuple[float, ...] = (0.1, 0.2)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim of the system that the reports are of."""
    claim = SimpleNamespace(PRESETS={"record": Config()})
    monkeypatch.setitem(sys.modules, "fluvial.claims.toy", claim)


def make(preset: str) -> Report:
    return Report(
        system="toy",
        claim="One is more than nothing.",
        preset=preset,
        config=Config(),
        comparisons=[Comparison("one less nothing", [1.0, 1.1, 0.9])],
        table=[{"arm": "a", "distance": 1.23456, "steps": None}],
        data={"name": "none"},
        seconds=1.0,
    )


def test_a_run_goes_on_in_its_own_folder_until_it_is_finished(tmp_path: Path) -> None:
    out = open_run(tmp_path / "run", "laptop", Config(), force=False)
    (out / "half-done.txt").write_text("kept")
    assert open_run(out, "laptop", Config(), force=False) == out
    assert (out / "half-done.txt").read_text() == "kept"
    write_report(make("laptop"), out)
    with pytest.raises(FileExistsError, match="finished"):
        open_run(out, "laptop", Config(), force=False)
    open_run(out, "laptop", Config(), force=True)
    assert sorted(path.name for path in out.iterdir()) == ["config.json"]


def test_another_configuration_is_refused_and_named(tmp_path: Path) -> None:
    out = open_run(tmp_path / "run", "laptop", Config(), force=False)
    with pytest.raises(FileExistsError, match=r"steps was 3, is 4"):
        open_run(out, "laptop", Config(steps=4), force=False)
    with pytest.raises(FileExistsError, match="preset was 'laptop', is 'record'"):
        open_run(out, "record", Config(), force=False)


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_run_is_never_touched(tmp_path: Path, force: bool) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="force deletes runs only" if force else "not empty"):
        open_run(tmp_path, "laptop", Config(), force=force)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_only_a_record_is_judged_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results"
    monkeypatch.setattr(report, "RESULTS", results)
    changed = replace(make("record"), config=Config(steps=4))
    write_report(changed, tmp_path / "c")
    assert not results.exists()  # nor one with other options
    assert json.loads((tmp_path / "c" / "result.json").read_text())["verdict"] == "holds"
    write_report(make("laptop"), tmp_path / "a")
    assert not results.exists()
    assert json.loads((tmp_path / "a" / "result.json").read_text())["verdict"] == "not judged"
    write_report(make("record"), tmp_path / "b")
    kept = json.loads((results / "toy.json").read_text())
    assert kept["verdict"] == "holds"
    assert kept == json.loads((tmp_path / "b" / "result.json").read_text())
    card = (tmp_path / "b" / "README.md").read_text()
    for part in (
        "the claim holds",
        markdown_table(make("record").table),
        '"steps": 3',
        "- Name: none",
    ):
        assert part in card, part
    assert ModelCard(card).data.tags == ["fluvial", "toy"]


def test_table_is_markdown_with_blanks_for_none() -> None:
    lines = markdown_table([{"arm": "a", "distance": 1.23456, "steps": None}]).splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == ["arm", "distance", "steps"]
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == ["a", "1.23", ""]
    assert len({len(line) for line in lines}) == 1
