"""The parts of the documentation that are made when it is built."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from fluvial import catalog

DOCS = Path(__file__).parents[1] / "docs"


def load(name: str) -> ModuleType:
    spec = spec_from_file_location(f"fluvial_docs_{name}", DOCS / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docstrings, systems = load("docstrings"), load("systems")

RECORD = {
    "system": "meanflow",
    "claim": "q(x|y) is closer",
    "preset": "record",
    "verdict": "holds",
    "rule": "low > margin",
    "date": "2026-01-31",
    "versions": {"torch": "2.13.0"},
    "seconds": 1503.25,
    "config": {"steps": 2000},
    "comparisons": [
        {"name": "one_step", "margin": 0.5, "differences": [1.23456, 2.0], "verdict": "holds"}
    ],
    "table": [{"arm": "a", "fd": 12.34567}, {"arm": "b", "fd": None, "extra": "x|y"}],
    "notes": ["width *128*"],
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a *path* of (batch, *event) to (batch, *event)", r"a *path* of (batch, \*event) to "),
        ("q(x_s | x_t), |det S|", r"q(x_s \| x_t), \|det S\|"),
        ("``a|b`` and `c_` and coef_, x_0", r"``a|b`` and `c_` and coef\_, x_0"),
        ("* one\n* two a * b", "* one\n* two a \\* b"),
        ("**kwargs: and **strong**", r"\*\*kwargs: and **strong**"),
        (r"done \| already", r"done \| already"),
        ("*over\ntwo lines*", "*over\ntwo lines*"),
    ],
)
def test_lone_marks_are_escaped_and_markup_is_kept(text: str, expected: str):
    result = "\n".join(docstrings.escape_lines(text.split("\n")))
    assert result.startswith(expected)
    assert docstrings.escape(result) == result


@pytest.mark.parametrize("opening", ["Thus::", ".. math::", "    >>> 1 | 2"])
def test_literal_blocks_are_left_alone(opening: str):
    lines = [opening, "", "    a | b_ *c", "", "Back |x|."]
    if ">>>" in opening:
        lines = [opening, "", "Back |x|."]
    result = docstrings.escape_lines(lines)
    assert result[:-1] == lines[:-1]
    assert result[-1] == r"Back \|x\|."


def test_a_table_has_the_columns_of_its_rows_in_their_order():
    rows = systems.table(RECORD["table"]).splitlines()
    assert rows == [
        "| arm | fd | extra |",
        "| --- | ---: | --- |",
        "| a | 12.35 |  |",
        "| b | – | x\\|y |",
    ]


def test_a_result_shows_verdict_rule_numbers_and_run():
    text = systems.result(RECORD)
    assert text.startswith("**The claim holds.**")
    assert r"What was claimed: q(x\|y) is closer" in text
    assert r"low \> margin" in text
    assert r"| one\_step | 0.5 | 1.235, 2 | holds |" in text
    assert r"- width \*128\*" in text
    assert "- seconds: 1503\n- versions: torch: 2.13.0" in text
    assert '"steps": 2000' in text


def test_a_result_with_a_verdict_only_is_enough():
    text = systems.result({"system": "meanflow", "verdict": "undecided"})
    assert text.startswith("**The runs do not decide the claim.**")
    assert "###" not in text.replace("### The run", "")


def test_pages_are_written_with_and_without_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(systems, "RESULTS", tmp_path / "results")
    systems.write(tmp_path / "out")
    page = tmp_path / "out" / "systems" / "meanflow.md"
    assert "Not recorded yet." in page.read_text()
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "meanflow.json").write_text(json.dumps(RECORD))
    systems.write(tmp_path / "out")
    assert "**The claim holds.**" in page.read_text()
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.count("\n") == 2 + len(catalog.SYSTEMS)
    assert "[`meanflow`](generated/systems/meanflow.md)" in table


@pytest.mark.parametrize("record", [[], {"system": "other"}, {"system": "meanflow"}])
def test_a_file_that_is_no_result_of_the_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: object
):
    monkeypatch.setattr(systems, "RESULTS", tmp_path)
    (tmp_path / "meanflow.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"meanflow\.json"):
        systems.read_result(catalog.get("meanflow"))


@pytest.mark.parametrize(
    ("page", "count"),
    [
        ("bridges", 3),
        ("constraints", 8),
        ("concepts", 7),
        ("own", 4),
        ("training", 5),
        ("samplers", 9),
        ("discrete", 8),
        ("metrics", 5),
        ("pretrained", 6),
        ("imputation", 4),
        ("restoration", 3),
        ("masks", 4),
        ("language", 5),
    ],
)
def test_code_of_a_page_runs(page: str, count: int, monkeypatch: pytest.MonkeyPatch):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == count
    # one program: later blocks use what earlier ones define; they hold their own assertions
    module = ModuleType(f"fluvial_docs_page_{page}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
    exec(compile("\n".join(blocks), f"{page}.md", "exec"), module.__dict__)
