from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fluvial.training import files
from fluvial.training.files import (
    atomic,
    load_checkpoint,
    load_model,
    new_folder,
    read_header,
    save_checkpoint,
    save_model,
    write_json,
)
from fluvial.training.use import IntendedUse, read_use

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


def test_the_statement_goes_with_the_weights(tmp_path: Path) -> None:
    use = IntendedUse(intended=["drawing samples"]).for_system("x")
    save_model(tmp_path / "with", WEIGHTS, {"system": "x"}, use=use)
    loaded, header = load_model(tmp_path / "with")
    assert header == {"format": files.FORMAT, "system": "x", "use_digest": use.digest}
    assert read_use(tmp_path / "with") == use
    save_model(tmp_path / "again", loaded, {"system": "x"}, use=read_use(tmp_path / "with"))
    assert read_use(tmp_path / "again") == use
    assert load_model(tmp_path / "again")[1] == header
    save_model(tmp_path / "without", WEIGHTS, {"system": "x"})
    assert "use_digest" not in load_model(tmp_path / "without")[1]
    assert read_header(tmp_path / "with") == header


def test_tensors_of_every_kind_come_back(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    weights = {
        "tied": base,
        "tied too": base,
        "same values elsewhere": base.clone(),
        "row": base[1:7],
        "overlapping": base[3:9],
        "turned": base.reshape(4, 6).T,
        "every other": base[::2],
        "expanded": torch.ones(1).expand(5),
        "empty": torch.empty(0),
        "also empty": torch.empty(3, 0, 2, dtype=torch.int64),
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(base.bfloat16()[1:4]),
        "conjugated": torch.complex(base[:3], base[3:6]).conj(),
        "imaginary": torch.complex(base[:3], base[3:6]).conj().imag,
        "bool": base > 3,
        "bytes": torch.arange(7, dtype=torch.uint8)[1:],
        "float8": base.to(torch.float8_e4m3fn),
        "double": base.double(),
    }
    save_model(tmp_path / "model", weights, {})
    loaded, _ = load_model(tmp_path / "model")
    assert loaded.keys() == weights.keys()
    for name, value in weights.items():
        assert loaded[name].dtype == value.dtype and loaded[name].shape == value.shape, name
        assert loaded[name].tolist() == value.tolist(), name
    loaded["tied"] += 1
    assert torch.equal(loaded["tied too"], base)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1.0, TypeError, r"weights\['w'\] must be a tensor, got float"),
        (torch.eye(2).to_sparse(), ValueError, r"weights\['w'\] must be dense .*sparse_coo"),
        (torch.empty(2, device="meta"), ValueError, r"weights\['w'\] .* on the meta device"),
        (torch.zeros(2, dtype=torch.complex128), TypeError, "no dtype for torch.complex128"),
    ],
)
def test_weights_that_cannot_be_saved_are_named(
    value: object, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        save_model(tmp_path / "model", {**WEIGHTS, "w": value}, {})  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


def test_changed_weights_are_found_by_their_checksum(tmp_path: Path) -> None:
    path = tmp_path / "model"
    weights = {"a": torch.arange(100.0), "b": torch.arange(100.0, 200.0)}
    save_model(path, weights, {})
    whole = path.read_bytes()
    for position in (-1, -400, -401, -800):  # the last and the first byte of both
        damaged = bytearray(whole)
        damaged[position] ^= 16
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="weights are not those that were saved"):
            load_model(path)
    path.write_bytes(whole[:-200] + bytes(200))  # a hole, as an interrupted copy leaves it
    with pytest.raises(ValueError, match="weights are not those that were saved"):
        load_model(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({"a": weights["b"], "b": weights["a"]}, path, metadata)
    with pytest.raises(ValueError, match="weights are not those that were saved"):
        load_model(path)
    # files from before there was a checksum are read
    del metadata["fluvial.checksum"]
    save_file(weights, path, metadata)
    assert torch.equal(load_model(path)[0]["a"], weights["a"])


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
    whole = path.read_bytes()
    for damaged, what in (
        (b"", "cut short"),
        (b"nonsense", "cut short"),
        (whole[:-5], "cut short"),
        (whole[:20], "cut short"),
        (whole + b"x", "damaged"),
        (b"PK\3\4" + bytes(100), "another kind"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
    ):
        path.write_bytes(damaged)
        for read in (load_model, read_header, read_use):
            with pytest.raises(ValueError, match=f"model is not a readable .*{what}"):
                read(path)
    save_file(WEIGHTS, path)
    with pytest.raises(ValueError, match="not a model saved by fluvial"):
        load_model(path)
    for header in ("{", "[]", '{"system": "x"}', '{"format": "one"}'):
        save_file(WEIGHTS, path, {"fluvial": header})
        for read in (load_model, read_header):
            with pytest.raises(ValueError, match="header"):
                read(path)


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


def test_every_part_of_a_checkpoint_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    base = torch.arange(6.0)
    content = {
        "numbers": [1, -(2**70), 2.5, math.inf, True, None, "text \u2028", b"bytes"],
        "nested": ({"a": (1, [2, (3,)])}, [], (), {}),
        "tensors": {str(dtype): base.to(dtype) for dtype in DTYPES},
        "shapes": [torch.empty(0, 3), torch.tensor(1.0), base.reshape(2, 3).T],
        "shared": [base, base[2:4]],
        "optimizer": {
            "state": {0: {"step": torch.tensor(4.0), "exp_avg": base}, 7: {}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "fused": None, "params": [0, 7]}],
        },
        "weights": OrderedDict(b=base, a=base),
    }
    save_checkpoint(path, content)
    loaded = load_checkpoint(path)
    assert loaded.pop("format") == files.FORMAT
    assert same(loaded, content)
    assert list(loaded["weights"]) == ["b", "a"]
    assert loaded["shared"][0][2:4].data_ptr() == loaded["shared"][1].data_ptr()


DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64),
)


def same(a: object, b: object) -> bool:
    """Equal to the last bit, and of the same types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def test_an_optimiser_goes_on_from_a_checkpoint_with_the_same_bits(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        network = torch.nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        return network, torch.optim.AdamW(network.parameters(), 0.1)

    def step(network: torch.nn.Linear, optimizer: torch.optim.AdamW) -> None:
        network(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    network, optimizer = make()
    step(network, optimizer)
    path = tmp_path / "checkpoint"
    save_checkpoint(path, {"w": network.state_dict(), "o": optimizer.state_dict()})
    step(network, optimizer)
    other, resumed = make()
    saved = load_checkpoint(path)
    other.load_state_dict(saved["w"])
    resumed.load_state_dict(saved["o"])
    step(other, resumed)
    assert torch.equal(other.weight, network.weight) and torch.equal(other.bias, network.bias)


def test_checkpoints_leave_the_settings_of_torch_alone(tmp_path: Path) -> None:
    for crc32 in (True, False):
        torch.serialization.set_crc32_options(crc32)
        try:
            save_checkpoint(tmp_path / "checkpoint", {"a": 1})
            with pytest.raises(Exception, match="pickle|lambda"):
                save_checkpoint(tmp_path / "checkpoint", {"a": lambda: None})
            assert torch.serialization.get_crc32_options() is crc32
        finally:
            torch.serialization.set_crc32_options(True)


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
