"""The statement of intended use."""

from __future__ import annotations

import json
import warnings
from dataclasses import FrozenInstanceError, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fluvial
from fluvial.training import files
from fluvial.training.files import load_model, save_model
from fluvial.training.use import (
    DEFAULTS,
    LARGEST,
    IntendedUse,
    OutOfScope,
    Reliability,
    Removal,
    canonical,
    derive,
    digest,
    read_use,
)

WEIGHTS = {"a": torch.arange(4.0)}
OWN = {"id": "as-evidence", "text": "treating generated detail as evidence"}


def ids(statement: IntendedUse) -> list[str]:
    return [entry.id for entry in statement.out_of_scope]


# The canonical form


def test_digest_of_a_known_statement_whatever_the_order_of_its_keys() -> None:
    wanted = "548c224efe2206434ed1c7276941f14bc7a5b24c78c16df2b1d1791875f70d08"
    content = {
        "schema": "fluvial-use/1",
        "intended": ["research"],
        "out_of_scope": [{"id": "weapon-control", "text": "x"}],
    }
    turned = {name: content[name] for name in reversed(content)}
    turned["out_of_scope"] = [{"text": "x", "id": "weapon-control"}]
    assert digest(content) == digest(turned) == wanted
    # read from a file it is the same statement: nothing is added
    for source in (content, turned, json.dumps(turned, indent=3)):
        statement = IntendedUse.from_json(source)
        assert statement.digest == wanted
        assert ids(statement) == ["weapon-control"] and statement.intended == ("research",)
        assert statement.as_json() == content


def test_canonical_json() -> None:
    assert canonical({"b": [1, None], "a": "Fréchet\n"}) == '{"a":"Fréchet\\n","b":[1,null]}'
    with pytest.raises(ValueError):
        canonical({"a": float("nan")})


def test_what_a_statement_holds() -> None:
    statement = IntendedUse(intended=["drawing samples"])
    assert list(statement.as_json()) == [
        "schema",
        "system",
        "version",
        "base_model",
        "intended",
        "out_of_scope",
        "removed",
        "nature",
        "weights_license",
        "license_name",
        "license_link",
        "reliability",
    ]
    assert statement.schema == "fluvial-use/1" and statement.version == fluvial.__version__
    assert ids(statement) == ["weapon-control", "unverified-safety-critical"]
    assert "weapon" in DEFAULTS[0].text and "Cummings" in (DEFAULTS[0].source or "")
    assert "does not change the licence" in statement.as_json()["nature"]
    assert statement.canonical == canonical(statement.as_json())
    assert statement.digest == sha256(statement.canonical.encode()).hexdigest()
    assert not statement.canonical.endswith("\n")
    # equal content, equal digest, however it was given
    same = IntendedUse(intended=("drawing samples",), out_of_scope=list(DEFAULTS))
    assert same == statement and same.digest == statement.digest and hash(same) == hash(statement)
    assert IntendedUse(intended=["other"]).digest != statement.digest


def test_a_statement_cannot_be_changed_but_replaced() -> None:
    statement = IntendedUse(intended=["drawing samples"])
    with pytest.raises(FrozenInstanceError):
        statement.system = "x"  # type: ignore[misc]
    measured = replace(statement, reliability={"digest": "ab", "summary": "5 of 100 failed"})
    assert measured.reliability == Reliability("ab", "5 of 100 failed")
    assert measured.digest != statement.digest
    assert replace(measured, reliability=None) == statement


def test_json_comes_back() -> None:
    statement = IntendedUse(
        intended=["drawing samples", "imputing „Zahlen“ \u2028 no"],
        out_of_scope=[OWN, OutOfScope("b", "text", "source")],
        removed=[Removal("weapon-control", "a museum's model")],
        system="meanflow",
        version="1.0",
        base_model=["ab"],
        weights_license="other",
        license_name="Ours",
        license_link="LICENSE",
        reliability={"digest": "cd", "summary": "one line"},
    )
    for source in (statement.canonical, statement.as_json()):
        read = IntendedUse.from_json(source)
        assert read == statement and read.digest == statement.digest
    assert ids(statement) == ["unverified-safety-critical", "as-evidence", "b"]


# Entries


def test_a_default_is_removed_only_with_a_reason() -> None:
    statement = IntendedUse(
        intended=["x"], removed=[{"id": "weapon-control", "reason": "history archive"}]
    )
    assert ids(statement) == ["unverified-safety-critical"]
    assert statement.as_json()["removed"] == [{"id": "weapon-control", "reason": "history archive"}]
    for reason in ("", " ", "..."):
        with pytest.raises(ValueError, match="reason"):
            IntendedUse(intended=["x"], removed=[{"id": "weapon-control", "reason": reason}])
    with pytest.raises(TypeError, match=r"removed\[0\].reason must be text"):
        IntendedUse(intended=["x"], removed=[{"id": "weapon-control"}])


def test_an_entry_stands_in_the_place_of_its_namesake() -> None:
    statement = IntendedUse(intended=["x"], out_of_scope=[OWN, {**OWN, "id": "weapon-control"}])
    assert ids(statement) == ["weapon-control", "unverified-safety-critical", "as-evidence"]
    assert statement.out_of_scope[0].text == OWN["text"]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"intended": []}, ValueError, "intended is empty"),
        ({"intended": "research"}, TypeError, "intended must be a list, got str"),
        ({"intended": ["research", 1]}, TypeError, r"intended\[1\] must be text, got int"),
        ({"intended": [" "]}, ValueError, r"intended\[0\] is empty"),
        ({"out_of_scope": [OWN, OWN]}, ValueError, "'as-evidence' twice"),
        ({"out_of_scope": OWN}, TypeError, "out_of_scope must be a list, got dict"),
        ({"out_of_scope": ["x"]}, TypeError, "OutOfScope or a mapping"),
        ({"out_of_scope": [{"id": "a"}]}, TypeError, r"out_of_scope\[0\].text must be text"),
        ({"out_of_scope": [{**OWN, "sauce": "x"}]}, TypeError, "sauce"),
        (
            {"out_of_scope": [OWN], "removed": [{"id": "as-evidence", "reason": "x"}]},
            ValueError,
            "'as-evidence' is in out_of_scope and in removed",
        ),
        ({"system": 3}, TypeError, "system must be text, got int"),
        ({"version": ""}, ValueError, "version is empty"),
        ({"base_model": "ab"}, TypeError, "base_model must be a list"),
        ({"weights_license": "other"}, ValueError, "needs license_name and license_link"),
        ({"reliability": {}}, TypeError, "reliability.digest must be text"),
        ({"intended": ["x" * LARGEST]}, ValueError, f"at most {LARGEST}"),
    ],
)
def test_bad_input_is_named(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        IntendedUse(**{"intended": ["x"], **fields})


def test_licences_of_weights_are_passed_through() -> None:
    assert IntendedUse(intended=["x"]).weights_license is None
    for name in ("openrail", "bigscience-openrail-m", "mit"):
        assert IntendedUse(intended=["x"], weights_license=name).weights_license == name


# Of a system


def test_a_system_adds_its_own_entries_once() -> None:
    statement = IntendedUse(intended=["x"], out_of_scope=[{"id": "user", "text": "y"}])
    saved = statement.for_system("meanflow", [OWN])
    assert saved.system == "meanflow"
    assert ids(saved) == ["weapon-control", "unverified-safety-critical", "as-evidence", "user"]
    # saved, loaded and saved again it stays as it is
    again = IntendedUse.from_json(saved.canonical).for_system("meanflow", [OWN, {**OWN, "id": "c"}])
    assert again == saved
    removed = IntendedUse(intended=["x"], removed=[{"id": "as-evidence", "reason": "why not"}])
    assert ids(removed.for_system("meanflow", [OWN])) == [entry.id for entry in DEFAULTS]
    with pytest.raises(ValueError, match="no 'as-evidence' to remove from meanflow, only weapon-c"):
        removed.for_system("meanflow")


def test_derived_models_inherit_what_they_are_not_for() -> None:
    first = IntendedUse(
        intended=["a"],
        out_of_scope=[OWN],
        removed=[{"id": "weapon-control", "reason": "museum"}],
        weights_license="openrail",
        reliability={"digest": "d", "summary": "s"},
    ).for_system("meanflow")
    second = IntendedUse(intended=["b"], out_of_scope=[{"id": "c", "text": "z"}])
    tuned = derive([first], intended=["tuned"])
    assert ids(tuned) == ["unverified-safety-critical", "as-evidence"]
    assert tuned.removed == first.removed and tuned.base_model == (first.digest,)
    assert tuned.intended == ("tuned",) and tuned.reliability is None and tuned.system is None
    assert tuned.weights_license == "openrail"
    merged = derive([first, second, None], intended=["merged"])
    # what one of the parents has removed, another has kept
    assert set(ids(merged)) == {*(e.id for e in DEFAULTS), "as-evidence", "c"}
    assert merged.removed == () and merged.base_model == (first.digest, second.digest)
    assert merged.for_system("meanflow", [OWN]).system == "meanflow"
    assert tuned.for_system("meanflow").removed == first.removed
    own = derive([second], intended=["x"], removed=[{"id": "c", "reason": "not any more"}])
    assert ids(own) == [e.id for e in DEFAULTS] and own.removed == (Removal("c", "not any more"),)
    assert own.for_system("meanflow").removed == own.removed
    assert derive([None], intended=["x"]) == IntendedUse(intended=["x"])
    removal = {"id": "weapon-control", "reason": "museum"}
    assert derive([None], intended=["x"], removed=[removal]).removed == first.removed


def test_what_cannot_be_derived() -> None:
    openrail, mit = (
        IntendedUse(intended=["x"], weights_license=name) for name in ("openrail", "mit")
    )
    with pytest.raises(ValueError, match="weights_license must be given: .*'openrail', 'mit'"):
        derive([openrail, mit], intended=["x"])
    assert derive([openrail, mit], intended=["x"], weights_license="mit").weights_license == "mit"
    with pytest.raises(ValueError, match="parents is empty"):
        derive([], intended=["x"])
    with pytest.raises(ValueError, match="intended is empty"):
        derive([mit], intended=[])
    with pytest.raises(ValueError, match="no 'c' to remove, only weapon-control"):
        derive([mit], intended=["x"], removed=[{"id": "c", "reason": "why not"}])
    with pytest.warns(UserWarning, match="fluvial-use/9"):
        later = IntendedUse.from_json({"schema": "fluvial-use/9"})
    with pytest.warns(UserWarning, match="parents: a statement has schema 'fluvial-use/9'"):
        assert derive([later], intended=["x"]).base_model == (later.digest,)


# Files


def test_read_from_a_file_without_reading_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "renamed.bin"
    statement = IntendedUse(intended=["x"]).for_system("toy", [OWN])
    save_model(path, WEIGHTS, {"system": "toy"}, use=statement)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["fluvial.use"] == statement.canonical
    _, header = load_model(path)
    assert header["use_digest"] == statement.digest

    class NoTensors:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> NoTensors:
            return self

        def __exit__(self, *args: object) -> None: ...

        def metadata(self) -> dict[str, str]:
            return self.file.metadata()  # and nothing else

    monkeypatch.setattr(files, "safe_open", NoTensors)
    assert read_use(path) == statement


def test_any_safetensors_file_can_be_asked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    save_file(WEIGHTS, path)
    assert read_use(path) is None
    save_file(WEIGHTS, path, {"fluvial.use": '{"schema":"fluvial-use/1","intended":["y"]}'})
    statement = read_use(path)
    assert statement is not None and statement.intended == ("y",)
    assert statement.out_of_scope == () and statement.reliability is None
    path.write_bytes(b"nonsense and more")
    with pytest.raises(ValueError, match="safetensors"):
        read_use(path)
    with pytest.raises(FileNotFoundError):
        read_use(tmp_path / "none")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"schema":1}',
        '{"schema":"other/1"}',
        '{"schema":"fluvial-use/1","intended":"x"}',
        '{"schema":"fluvial-use/1","removed":[1]}',
        '{"schema":"fluvial-use/1","x":NaN}',
        r'{"schema":"fluvial-use/1","x":"\ud800"}',
        '{"schema":"fluvial-use/1","x":' + 100_000 * "[",
    ],
    ids=lambda text: text[:30],
)
def test_a_damaged_statement_is_left_out_with_a_warning(text: str, tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "file", {"fluvial.use": text})
    with pytest.warns(UserWarning, match="file is damaged") as caught:
        assert read_use(tmp_path / "file") is None
    assert len(caught) == 1
    with pytest.raises((ValueError, TypeError, RecursionError)):
        IntendedUse.from_json(text)


def test_a_later_statement_is_kept_whole(tmp_path: Path) -> None:
    content = {"schema": "fluvial-use/2", "intended": {"de": "x"}, "new": [1.5]}
    save_file(WEIGHTS, tmp_path / "a", {"fluvial.use": canonical(content)})
    with pytest.warns(
        UserWarning, match="'fluvial-use/2', this version of fluvial reads"
    ) as caught:
        statement = read_use(tmp_path / "a")
    assert len(caught) == 1
    assert statement is not None and not statement.known and statement.intended == ()
    assert statement.as_json() == content and statement.digest == digest(content)
    kept = statement.for_system("meanflow", [OWN])
    save_model(tmp_path / "b", WEIGHTS, {"system": "meanflow"}, use=kept)
    with pytest.warns(UserWarning):
        assert read_use(tmp_path / "b") == statement


def test_a_minor_version_is_read_and_what_it_adds_is_kept() -> None:
    content = {
        "schema": "fluvial-use/1.2",
        "intended": ["x"],
        "out_of_scope": [{**OWN, "since": 3}],
        "new": True,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        statement = IntendedUse.from_json(content)
    assert statement.known and statement.out_of_scope == (OutOfScope(**OWN),)
    assert statement.as_json() == content and statement.digest == digest(content)
