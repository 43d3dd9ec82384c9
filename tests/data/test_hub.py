from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fluvial.data import DataSet, packages, read

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches in the test's folder, and no connection."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def quiet(source: str, **options: Any) -> DataSet:
    return read(source, progress=False, **options)


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (5, 7, 3)).astype(np.uint8)


def rows(*seeds: int, label: str = "label") -> Any:
    return datasets.Dataset.from_dict(
        {
            "image": [Image.fromarray(pixels(seed)) for seed in seeds],
            label: [seed % 2 for seed in seeds],
            "note": [f"n{seed}" for seed in seeds],
        },
        features=datasets.Features(
            {
                "image": datasets.Image(),
                label: datasets.ClassLabel(names=["cat", "dog"]),
                "note": datasets.Value("string"),
            }
        ),
    )


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """As a data set of Hugging Face lies there: Parquet files and a card."""
    for split, seeds in (("train", range(6)), ("test", (7, 8))):
        path = tmp_path / "pets" / "data" / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows(*seeds).to_parquet(path)
    (tmp_path / "pets" / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n# Pets\n")
    return "hf:./pets"


def test_images_and_classes(folder: str) -> None:
    data = quiet(folder)
    assert data.label_names == ("cat", "dog") and data.label.tolist() == [0, 1, 0, 1, 0, 1]
    for seed, row in enumerate(data.x):
        assert np.array_equal(row.permute(1, 2, 0), pixels(seed))
    assert (data.name, data.licence, data.source) == ("pets", "cc-by-4.0", "the user's files")
    assert data.notes == ("split train; not read: test", "columns not used: note")
    assert data.format.kind == "images"


def test_split_size_and_label(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(quiet(f"{folder}@test")) == 2
    with pytest.raises(ValueError, match="no split 'tset'; did you mean test"):
        quiet(f"{folder}@tset")
    data = quiet(folder, size=4, channels=1, label="note")
    assert data.x.shape == (6, 1, 4, 4) and data.label_names == tuple(f"n{k}" for k in range(6))
    with pytest.raises(ValueError, match="no column 'nte'; did you mean note"):
        quiet(folder, label="nte")
    monkeypatch.setattr("fluvial.data.images.decode", lambda *_: 1 / 0)
    assert torch.equal(quiet(folder, size=4, channels=1).x, data.x)  # from the cache


def test_bad_images_are_named(tmp_path: Path) -> None:
    data = rows(0, 1, 2)
    table = data.cast_column("image", datasets.Image(decode=False)).to_list()
    table[1]["image"]["bytes"] = b"no image"
    table[2]["image"] = None
    datasets.Dataset.from_list(table, features=data.features).save_to_disk(tmp_path / "bad")
    with pytest.raises(
        ValueError, match=r"2 of 3 images .*row 1 \(not an image.*row 2 \(missing\)"
    ):
        quiet("hf:./bad")
    left = quiet("hf:./bad", skip_bad=True)
    assert left.label.tolist() == [0] and np.array_equal(left.x[0].permute(1, 2, 0), pixels(0))


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    rows(0, 1, label="species").save_to_disk(tmp_path / "saved")
    assert quiet("hf:./saved").label_names == ("cat", "dog")
    both = datasets.DatasetDict({"a": rows(0, 1), "b": rows(2)})
    both.save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match="splits a, b; choose one, as hf:./both@a"):
        quiet("hf:./both")
    assert len(quiet("hf:./both@b")) == 1


def saved(tmp_path: Path, columns: dict[str, Any], features: Any = None) -> str:
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(tmp_path / "saved")
    return "hf:./saved"


def test_numbers_are_a_table(tmp_path: Path) -> None:
    data = quiet(saved(tmp_path, {"p": [1, 2], "q": [0.5, 0.25], "label": [3, 1]}))
    assert (data.format.kind, data.format.columns) == ("table", ("p", "q"))
    assert data.x.tolist() == [[1, 0.5], [2, 0.25]] and data.format.integers == ("p",)
    assert data.label.tolist() == [1, 0] and data.label_names == ("1", "3")


def test_arrays(tmp_path: Path) -> None:
    features = datasets.Features({"v": datasets.Array2D((3, 3), "float32")})
    data = quiet(saved(tmp_path, {"v": [np.eye(3), np.ones((3, 3))]}, features))
    assert (data.format.kind, data.format.shape) == ("arrays", (3, 3))
    assert torch.equal(data.x, torch.stack([torch.eye(3), torch.ones(3, 3)]))


def test_lists(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluvial.data.hub.SMALL", 0)
    source = saved(tmp_path, {"v": [[1.0, 2.0], [3.0, 4.0]], "kind": ["u", "v"]})
    data = quiet(source, label="kind")
    assert data.x.tolist() == [[1, 2], [3, 4]] and data.label_names == ("u", "v")
    assert len(list(cache.rglob("x.npy"))) == 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"v": [[1.0, 2.0], [3.0]]}, r"column v must hold arrays .* of shape \(1,\) in row 1"),
        ({"v": [["a"], ["b"]]}, "column v must hold arrays of numbers"),
        ({"text": ["hello", "you"]}, r"not numbers: text \('hello', 'you'\)"),
        ({"a": [[1], [2]], "b": [[1], [2]]}, "2 columns of images or arrays, a, b"),
        ({"p": [1, 2], "label": [None, 1]}, "label: 1 of 2 are missing"),
        ({"p": [1, None]}, r"missing in p \(1\) of 2"),
        ({"p": []}, "hf:./saved (cannot be loaded|has no rows)"),
    ],
)
def test_columns_that_are_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quiet(saved(tmp_path, columns))


def test_several_columns_of_classes(tmp_path: Path) -> None:
    classes = datasets.ClassLabel(names=["u", "v"])
    features = datasets.Features({"a": classes, "b": classes, "x": datasets.Value("float32")})
    source = saved(tmp_path, {"a": [0, 1], "b": [1, -1], "x": [0.0, 1.0]}, features)
    with pytest.raises(ValueError, match="label: choose one of the columns of classes: a, b"):
        quiet(source)
    with pytest.raises(ValueError, match="label: 1 of 2 are missing"):
        quiet(source, label="b")
    data = quiet(source, label="a")
    assert data.label.tolist() == [0, 1] and data.format.columns == ("b", "x")


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder ./nowhere"):
        quiet("hf:./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="hf:./empty cannot be loaded"):
        quiet("hf:./empty")

    def unreachable(name: str, config: str | None) -> Any:
        raise ConnectionError(f"cannot reach {name},\nconfiguration {config}")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        FileNotFoundError, match="hf:o/n:c cannot be loaded: cannot reach o/n, configuration c"
    ):
        quiet("hf:o/n:c@train")


def test_a_name_of_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    found = datasets.DatasetDict({"train": rows(0, 1)})
    found["train"].info.citation = "@article{pets,\n  title={Pets}}"
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names: asked.append(names) or found)
    data = quiet("hf:o/n:c")
    assert asked == [("o/n", "c")]
    assert (data.name, data.source) == ("o/n:c", "Hugging Face, o/n:c")
    assert data.licence == "unknown"  # its card cannot be reached
    assert data.citation == "@article{pets, title={Pets}}"
    found["train"].info.license = "mit"
    assert quiet("hf:o/n").licence == "mit"


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(packages, "import_module", absent)
    with pytest.raises(ModuleNotFoundError, match=r"datasets.*fluvial\[hub\]"):
        quiet("hf:o/n")
