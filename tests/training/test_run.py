from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from fluvial.training.files import save_model, write_json
from fluvial.training.loop import Stage, Training, train
from fluvial.training.processes import shared
from fluvial.training.run import (
    Curves,
    begin,
    check_new,
    draw,
    go_on,
    last_checkpoint,
    read_result,
    read_settings,
    train_job,
)
from fluvial.training.use import IntendedUse

from .script import Flow, points


class Model(Flow):
    out_of_scope = ({"id": "a", "text": "b"},)

    def __init__(self) -> None:
        super().__init__(width=4)
        self.use = IntendedUse(intended=("tests",))

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        save_model(path, self.state_dict(), {"system": "toy"}, overwrite=overwrite)


@dataclass(frozen=True)
class Recipe:
    steps: int = 4
    lr: float = 0.01


@dataclass
class Job:
    """The smallest of jobs."""

    recipe: Recipe = field(default_factory=Recipe)
    model: Any = field(default_factory=Model)
    train: dict[str, Tensor] = field(default_factory=lambda: points(20, 1))
    held: dict[str, Tensor] | None = field(default_factory=lambda: points(6, 2))
    system: str = "toy"

    @property
    def about(self) -> dict[str, Any]:
        return {"name": "points"}

    @property
    def rows(self) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        return self.train, self.held

    def fit(self, out: Path, *, progress: bool, trackers: Sequence[str]) -> None:
        training = Training(
            steps=self.recipe.steps, batch_size=4, lr=0.01, ema=(0.5, 0.9), validate_every=2
        )
        train(Stage(self.model, self.train, training, self.held), out=out, progress=progress)

    def measure(self) -> list[dict[str, Any]]:
        return [{"name": "distance", "value": 2.0, "floor": 1.0, "what": "of points"}]


def start(job: Job, out: Path | None) -> Path:
    return begin(job, out, source="here", command="fluvial train toy")


def test_a_run_from_begin_to_end(tmp_path: Path) -> None:
    job, out = Job(), tmp_path / "deep" / "run"
    assert start(job, out) == out
    settings = read_settings(out)
    assert settings == json.loads((out / "run.json").read_text())
    use = job.model.use.for_system("toy", job.model.out_of_scope)
    assert {name: settings[name] for name in settings if name != "versions"} == {
        "format": 1,
        "kind": "training",
        "system": "toy",
        "command": "fluvial train toy",
        "source": "here",
        "recipe": {"steps": 4, "lr": 0.01},
        "device": "cpu",
        "trackers": [],
        "parameters": sum(value.numel() for value in job.model.parameters()),
        "data": {"name": "points"},
        "use_digest": use.digest,
    }
    assert set(settings["versions"]) == {"fluvial", "torch", "python"}
    assert read_result(out) is None and last_checkpoint(out) is None
    result = train_job(job, out, progress=False)
    assert result == read_result(out)
    assert last_checkpoint(out) == (4, out / "checkpoints" / "step-00000004.pt")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = lines[-1]["validation"]
    assert result["weights"] == min(("ema-0.5", "ema-0.9"), key=lambda name: last[name]["loss"])
    assert result["metrics"][0] == job.measure()[0]
    assert result["metrics"][1]["value"] == last[result["weights"]]["loss"]
    assert (result["format"], result["system"], result["steps"]) == (1, "toy", 4)
    assert result["seconds"] == lines[-1]["seconds"]
    assert (out / "model.safetensors").exists() and (out / "figure.png").exists()


def test_runs_without_a_name_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "toy-2").mkdir(parents=True)
    assert [str(start(Job(), None)) for _ in range(2)] == ["runs/toy-1", "runs/toy-3"]


def test_folders_that_are_taken(tmp_path: Path) -> None:
    check_new(tmp_path / "new")
    check_new(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="file is a file; choose another"):
        check_new(tmp_path / "file")
    with pytest.raises(FileExistsError, match="is not empty; choose another"):
        start(Job(), tmp_path)
    out = start(Job(), tmp_path / "run")
    with pytest.raises(FileExistsError, match=f"not finished; go on with it by --resume {out}"):
        check_new(out)
    write_json(out / "result.json", {})
    with pytest.raises(FileExistsError, match="holds a finished run"):
        check_new(out)


def test_trackers_are_looked_at_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tracker 'x'"):
        begin(Job(), tmp_path / "run", source="", command="", trackers=["x"])
    assert not (tmp_path / "run").exists()


def test_settings_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        read_settings(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="it has no run.json"):
        read_settings(tmp_path)
    for text in ("{", "[]", "3", '{"format": 1}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match="run.json is damaged"):
            read_settings(tmp_path)
    out = start(Job(), tmp_path / "run")
    write_json(out / "run.json", {**read_settings(out), "format": 2})
    with pytest.raises(ValueError, match="has format 2, this version of fluvial reads up to 1"):
        read_settings(out)
    (out / "result.json").write_text("{")
    with pytest.raises(ValueError, match="result.json is damaged"):
        read_result(out)


def test_a_run_that_is_made_longer_is_not_finished(tmp_path: Path) -> None:
    out = start(Job(), tmp_path / "run")
    go_on(Job(), out)  # before its first step
    train_job(Job(), out, progress=False)
    longer = Job(Recipe(6))
    go_on(longer, out)
    assert read_result(out) is None and read_settings(out)["recipe"]["steps"] == 6
    assert train_job(longer, out, progress=False)["steps"] == 6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train": points(20, 3)}, "began: put them back"),
        ({"train": points(19, 1)}, r"\(20 rows to train on then, 19 now\)"),
        ({"held": points(6, 3)}, "began: put them back"),
    ],
    ids=["train", "rows", "held"],
)
def test_other_data_are_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    out = start(Job(), tmp_path / "run")
    train_job(Job(), out, progress=False)
    with pytest.raises(ValueError, match=f"the data have changed since {out} .*{message}"):
        go_on(Job(Recipe(6), **changed), out)
    assert read_result(out) is not None


def curves(**validation: list[tuple[int, float]]) -> Curves:
    named = {name.replace("_", "."): curve for name, curve in validation.items()}
    return Curves("loss", "a", 1.0, [(1, 3.0), (2, 2.0)], named)


def test_a_model_that_began_to_repeat_its_data() -> None:
    assert curves(a=[(1, 3.0), (2, 2.0), (3, 2.1)], last=[(1, 0.1)]).notes() == []
    (note,) = curves(a=[(1, 3.0), (2, 2.0), (3, 2.5)], last=[(1, 0.1)]).notes()
    assert note.startswith("The validation loss was lowest at step 2 (2, a) and is 2.5 at the end")
    assert "weights/best.safetensors" in note
    (note,) = curves().notes()
    assert "not measured" in note and curves().metrics() == []


def test_without_held_out_rows_the_first_average_is_taken(tmp_path: Path) -> None:
    job = Job(held=None)
    result = train_job(job, start(job, tmp_path / "run"), progress=False)
    assert result["weights"] == "ema-0.5" and len(result["metrics"]) == 1


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("high", [3.0, 3000.0])
def test_the_figure(samples: bool, high: float, tmp_path: Path) -> None:
    if samples:
        (tmp_path / "samples").mkdir()
        Image.new("L", (20, 10), 100).save(tmp_path / "samples" / "step-00000002.png")
    draw(tmp_path, curves(last=[(1, high), (2, 1.0)], a=[(1, 2.0), (2, 1.5)]))
    with Image.open(tmp_path / "figure.png") as picture:
        assert picture.size == ((1650 if samples else 900), 750)


def test_work_is_shared() -> None:
    assert shared(lambda: torch.ones(1)).item() == 1

    def fails() -> None:
        raise FileExistsError("taken")

    with pytest.raises(FileExistsError, match="taken"):
        shared(fails)
