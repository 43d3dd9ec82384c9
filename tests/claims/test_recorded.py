"""The list of recorded verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fluvial import catalog
from fluvial.claims import recorded
from fluvial.claims.recorded import Figure, Recorded, claims_text, recorded_claims

RECORD: dict[str, Any] = {
    "system": "meanflow",
    "claim": "One is more than nothing.",
    "verdict": "undecided",
    "date": "2026-11-30",
    "config": {"seeds": [0, 1, 2], "steps": 5},
    "comparisons": [
        {"name": "a", "margin": 0.0, "mean": 2.0, "low": 1.5, "high": 2.5, "verdict": "holds"},
        {"name": "b", "margin": 0.1, "mean": 2, "low": None, "high": None, "verdict": "undecided"},
    ],
}


def put(folder: Path, content: Any, name: str = "meanflow") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_record_is_read(tmp_path: Path) -> None:
    claims = {claim.system: claim for claim in recorded_claims(put(tmp_path / "results", RECORD))}
    assert claims["meanflow"] == Recorded(
        system="meanflow",
        verdict="undecided",
        claim="One is more than nothing.",
        date="2026-11-30",
        seeds=(0, 1, 2),
        figures=(
            Figure("a", 2.0, 1.5, 2.5, 0.0, "holds"),
            Figure("b", 2.0, None, None, 0.1, "undecided"),
        ),
    )


def test_every_available_system_has_a_row_in_the_order_of_the_catalog(tmp_path: Path) -> None:
    rows = recorded_claims(tmp_path / "none")
    assert [row.system for row in rows] == [system.name for system in catalog.available()]
    assert {row.verdict for row in rows} == {"not recorded"}
    assert all(row.claim is None and row.figures == () for row in rows)


def test_what_the_package_ships_can_be_read() -> None:
    files = {path.stem for path in recorded.RESULTS.glob("*.json")}
    found = {row.system for row in recorded_claims() if row.verdict != "not recorded"}
    assert found == files and "meanflow" in files


def test_json_and_text(tmp_path: Path) -> None:
    rows = (*recorded_claims(put(tmp_path / "results", RECORD)), Recorded("other-system"))
    assert json.loads(json.dumps(rows[0].as_json()))["figures"][1]["low"] is None
    lines = claims_text(rows).splitlines()
    assert " ".join(lines[0].split()) == "system verdict date seeds comparisons that hold"
    assert " ".join(lines[1].split()) == "meanflow undecided 2026-11-30 0, 1, 2 1 of 2"
    assert "other-system not recorded" in [" ".join(line.split()) for line in lines]
    assert "- a: 2, 95 % interval 1.5 to 2.5, margin 0: holds" in lines
    assert "- b: 2, no interval, margin 0.1: undecided" in lines
    assert max(map(len, lines)) <= 88


@pytest.mark.parametrize("key", ["system", "verdict", "claim", "date", "config", "comparisons"])
def test_a_record_without_a_key_is_named(tmp_path: Path, key: str) -> None:
    content = {name: value for name, value in RECORD.items() if name != key}
    with pytest.raises(ValueError, match=rf"meanflow\.json: .*'{key}'"):
        recorded_claims(put(tmp_path / "results", content))


@pytest.mark.parametrize(
    "content",
    [[], None, "text", {**RECORD, "config": None}, {**RECORD, "comparisons": [3]}],
)
def test_what_is_no_record_is_named(tmp_path: Path, content: Any) -> None:
    with pytest.raises(ValueError, match=r"meanflow\.json is not a recorded result"):
        recorded_claims(put(tmp_path / "results", content))


def test_files_that_belong_to_no_system_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"meanflow\.json is not .*'system' is 'other'"):
        recorded_claims(put(tmp_path / "a", {**RECORD, "system": "other"}))
    with pytest.raises(ValueError, match=r"other\.json: there is no available system"):
        recorded_claims(put(tmp_path / "b", {**RECORD, "system": "other"}, "other"))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "meanflow.json").write_text('{"system"')
    with pytest.raises(ValueError, match=r"meanflow\.json is not a recorded result"):
        recorded_claims(tmp_path / "c")
