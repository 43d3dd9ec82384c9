"""The catalog: complete, consistent with the code, and shown in the README as it is."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest

from fluvial import catalog
from fluvial.catalog import BEGIN, END, SYSTEMS, WINGS, System
from fluvial.training.recipe import as_json

ROOT = Path(__file__).parents[1]


def test_there_are_38_systems_with_names_of_their_own():
    names = [system.name for system in SYSTEMS]
    assert len(names) == len(set(names)) == 38
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)


def test_systems_stand_by_wing_in_the_order_of_the_wings():
    assert list(dict.fromkeys(system.wing for system in SYSTEMS)) == list(WINGS)
    assert sorted(SYSTEMS, key=lambda s: WINGS.index(s.wing)) == list(SYSTEMS)


def test_wings_have_the_sizes_of_the_plan():
    sizes = Counter(system.wing for system in SYSTEMS)
    assert [sizes[wing] for wing in WINGS] == [3, 2, 3, 2, 2, 1, 2, 2, 4, 5, 4, 1, 3, 4]


def test_arxiv_ids_are_well_formed_and_no_two_systems_share_one():
    ids = [system.arxiv for system in SYSTEMS if system.arxiv]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"2[0-9](0[1-9]|1[0-2])\.[0-9]{5}", arxiv) for arxiv in ids)


def test_every_purpose_is_one_short_line():
    for system in SYSTEMS:
        assert 20 <= len(system.purpose) <= 90, system.name
        assert "\n" not in system.purpose and not system.purpose.endswith("."), system.name


def test_meanflow_is_available():
    assert "meanflow" in [system.name for system in catalog.available()]


@pytest.mark.parametrize("system", catalog.available(), ids=lambda system: system.name)
def test_an_available_system_has_its_class_claim_and_extra(system: System):
    assert isinstance(system.load(), type)
    assert system.cls is not None and system.cls.startswith(f"fluvial.{system.wing}.")
    assert system.claim is not None
    assert import_module(system.claim).__name__ == system.claim
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert system.extra is None or system.extra in project["optional-dependencies"]


def test_a_planned_system_has_nothing_to_load():
    planned = [system for system in SYSTEMS if system.planned]
    assert all(system.claim is None and system.status == "planned" for system in planned)
    with pytest.raises(ValueError, match=f"'{planned[0].name}' is planned"):
        planned[0].load()


def test_get_finds_by_name_and_hints_at_near_names():
    assert catalog.get("meanflow").title == "Mean Flows for One-step Generative Modeling"
    with pytest.raises(ValueError, match="no system 'meanflo'; did you mean 'meanflow'"):
        catalog.get("meanflo")
    with pytest.raises(ValueError, match="no system 'zzzz'; `fluvial list`"):
        catalog.get("zzzz")


def test_a_citation_leaves_out_what_is_not_known():
    assert catalog.get("meanflow").citation == (
        "Mean Flows for One-step Generative Modeling, Geng et al., NeurIPS 2025, arXiv:2505.13447"
    )
    assert System(name="a", wing="b", purpose="c").citation == "title not known, NeurIPS 2025"


def test_the_table_has_one_row_a_system_and_escapes_pipes():
    rows = catalog.markdown_table().splitlines()
    assert len(rows) == 2 + len(SYSTEMS)
    assert {row.count("|") for row in rows} == {6}
    row = catalog.markdown_table([System(name="a", wing="b", purpose="p(x|y)")]).splitlines()[-1]
    assert r"p(x\|y)" in row


def test_the_readme_shows_the_present_table():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    message = "refresh it: python -m fluvial.catalog --write README.md"
    assert catalog.with_table(text) == text, message


def test_write_replaces_what_is_between_the_markers_only(tmp_path: Path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    path.chmod(0o640)
    catalog.main(["--write", str(path)])
    assert path.read_text() == f"before\n{BEGIN}\n{catalog.markdown_table()}\n{END}\nafter\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{END}{BEGIN}{END}"])
def test_write_refuses_a_file_without_its_markers_and_leaves_it(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        catalog.main(["--write", str(path)])
    assert stop.value.code == 2
    assert "once each" in capsys.readouterr().err
    assert path.read_text() == text


def test_write_names_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        catalog.main(["--write", str(tmp_path / "none.md")])
    assert stop.value.code == 2
    assert "none.md" in capsys.readouterr().err


def test_without_arguments_the_table_is_printed(capsys: pytest.CaptureFixture[str]):
    catalog.main([])
    assert capsys.readouterr().out == catalog.markdown_table() + "\n"


@pytest.mark.parametrize("system", [s for s in SYSTEMS if s.recipe], ids=lambda s: s.name)
def test_a_system_joins_two_data_sets_if_its_recipe_reads_two(system: System):
    parameters = signature(system.load_recipe().prepare).parameters
    assert ("target" in parameters) == system.joins


def test_a_recipe_makes_models_of_a_users_data():
    assert {"meanflow"} <= {system.name for system in SYSTEMS if system.recipe}
    recipe = catalog.get("meanflow").load_recipe()
    assert as_json(recipe())["steps"] > 0
    with pytest.raises(ValueError, match="'saemark-watermark' has no recipe"):
        catalog.get("saemark-watermark").load_recipe()
