from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fluvial.training import files
from fluvial.training.files import (
    atomic,
    load_checkpoint,
    load_model,
    new_folder,
    save_checkpoint,
    save_model,
    write_json,
)

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.int64)}


def write(path: Path) -> None:
    with atomic(path) as temporary:
        temporary.write_text("new")


def test_atomic_write(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write(path)
    write(path)
    assert path.read_text() == "new"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def failing_block(path: Path) -> None:
    with atomic(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("power cut")


def failing_json(path: Path) -> None:
    write_json(path, {"loss": math.nan})


def failing_header(path: Path) -> None:
    save_model(path, WEIGHTS, {"loss": math.inf}, overwrite=True)


def failing_checkpoint(path: Path) -> None:
    save_checkpoint(path, {"what": lambda: None})


@pytest.mark.parametrize("fail", [failing_block, failing_json, failing_header, failing_checkpoint])
def test_a_failed_write_leaves_the_old_file(fail: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(Exception, match="power cut|JSON|lambda|pickle"):
        fail(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_json(tmp_path: Path) -> None:
    content = {"name": "Fréchet", "values": [1, 2.5, None]}
    write_json(tmp_path / "a.json", content)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8")) == content
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError):
            write_json(tmp_path / "b.json", [value])
    assert not (tmp_path / "b.json").exists()


def test_model_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "model"
    weights = {**WEIGHTS, "strided": torch.arange(6.0).reshape(2, 3).T}
    save_model(path, weights, {"system": "x", "options": [1, None]})
    loaded, header = load_model(path)
    assert header == {"format": files.FORMAT, "system": "x", "options": [1, None]}
    assert loaded.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.equal(loaded[name], value) and loaded[name].dtype == value.dtype


def test_model_is_not_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_model(path, WEIGHTS, {"n": 1})
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_model(path, WEIGHTS, {"n": 2})
    assert load_model(path)[1]["n"] == 1
    save_model(path, WEIGHTS, {"n": 3}, overwrite=True)
    assert load_model(path)[1]["n"] == 3


def test_models_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "model"
    for missing in (path, tmp_path):
        with pytest.raises(FileNotFoundError):
            load_model(missing)
    save_model(path, WEIGHTS, {})
    for damaged in (b"", b"nonsense", path.read_bytes()[:-5], path.read_bytes()[:20]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="readable"):
            load_model(path)
    save_file(WEIGHTS, path)
    with pytest.raises(ValueError, match="not a model saved by fluvial"):
        load_model(path)
    for header in ("{", "[]", '{"system": "x"}', '{"format": "one"}'):
        save_file(WEIGHTS, path, {"fluvial": header})
        with pytest.raises(ValueError, match="header"):
            load_model(path)


def test_newer_formats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files, "FORMAT", files.FORMAT + 1)
        save_model(tmp_path / "model", WEIGHTS, {})
        save_checkpoint(tmp_path / "checkpoint", {})
    with pytest.raises(ValueError, match="format 2"):
        load_model(tmp_path / "model")
    with pytest.raises(ValueError, match="format 1"):
        load_checkpoint(tmp_path / "checkpoint")


def test_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    content = {"step": 3, "weights": WEIGHTS, "betas": (0.9, 0.95), "clip": None}
    save_checkpoint(path, content)
    loaded = load_checkpoint(path)
    assert torch.equal(loaded["weights"]["a"], WEIGHTS["a"])
    assert loaded["betas"] == (0.9, 0.95) and loaded["clip"] is None
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none")
    whole = path.read_bytes()
    for damaged in (b"", b"nonsense", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="readable checkpoint"):
            load_checkpoint(path)
    torch.save([1], path)
    with pytest.raises(ValueError, match="not a checkpoint"):
        load_checkpoint(path)


def test_new_folder(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "a" / "b")
    assert folder.is_dir() and new_folder(folder) == folder
    (folder / "file").touch()
    with pytest.raises(FileExistsError, match="not empty"):
        new_folder(folder)
    assert new_folder(folder, force=True) == folder and (folder / "file").exists()
    for force in (False, True):
        with pytest.raises(FileExistsError, match="is a file"):
            new_folder(folder / "file", force=force)
