"""Model cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from fluvial.training.card import (
    MARKER,
    card_digest,
    read_card_use,
    write_claim_card,
    write_training_card,
)
from fluvial.training.files import save_model, write_json
from fluvial.training.use import IntendedUse, digest

ABOUT = {"toy": ("numbers from noise", "*On toys*, NeurIPS 2025")}
USE = IntendedUse(intended=["drawing samples"]).for_system("toy")
FORMAT = {"kind": "images", "shape": [1, 8, 8], "label_names": ["no", "yes"]}
DATA = {
    "name": "my photos",
    "source": "Hugging Face, someone/Photos",
    "licence": "CC0",
    "citation": "Someone, Photos, 2025",
    "rows": {"train": 4000, "validation": 0},
    "notes": ["2 files were not images"],
    "format": FORMAT,
}
RUN = {
    "format": 1,
    "kind": "training",
    "system": "toy",
    "recipe": {"lr": 1e-3, "times": {"ratio": 0.25}, "name|with": "a | bar"},
    "parameters": 1234567,
    "data": DATA,
    "versions": {"fluvial": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
}
RESULT = {
    "format": 1,
    "system": "toy",
    "seconds": 3723.4,
    "steps": 5000,
    "metrics": [
        {"name": "Fréchet distance", "value": 12.3456, "floor": 1.25, "what": "500 against 500"},
        {"name": "accuracy", "value": None, "floor": None, "what": "not done"},
    ],
    "weights": "ema-0.999",
    "notes": ["one seed"],
}


def run(folder: Path, use: IntendedUse | None = USE, **files: Any) -> Path:
    """A folder as a training leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {"system": "toy", "network": {"class": "DiT"}, "data": FORMAT}
    save_model(
        folder / "model.safetensors", {"w": torch.zeros(3, 5)}, header, use=use, overwrite=True
    )
    contents = {"run": RUN, "training": {"steps": 5000, "lr": 2.0, "data": "fingerprint"}}
    for name, content in {**contents, "result": RESULT, **files}.items():
        if content is not None:
            write_json(folder / f"{name}.json", content)
    return folder


def front(path: Path) -> dict[str, Any]:
    """The front matter, read by a plain YAML parser."""
    return yaml.safe_load(path.read_text(encoding="utf-8").split("---\n")[1])


# Front matter


def test_metadata_of_the_hub(tmp_path: Path) -> None:
    path = write_training_card(run(tmp_path), ABOUT)
    assert path == tmp_path / "README.md"
    content = front(path)
    assert content.pop("fluvial_use") == USE.as_json()
    assert content.pop("model-index") == [
        {
            "name": "toy-my-photos",
            "results": [
                {
                    "task": {"type": "unconditional-image-generation"},
                    "dataset": {"type": "my-photos", "name": "my photos"},
                    "metrics": [
                        {"type": "frechet-distance", "name": "Fréchet distance", "value": 12.3456}
                    ],
                }
            ],
        }
    ]
    assert content == {
        "library_name": "fluvial",
        "tags": ["fluvial", "toy"],
        "datasets": ["someone/Photos"],
        "metrics": ["frechet-distance"],
        "pipeline_tag": "unconditional-image-generation",
    }
    # and it is a card to the hub's own reader
    card = ModelCard.load(path)
    assert card.data.eval_results[0].metric_value == 12.3456
    assert digest(card.data.to_dict()["fluvial_use"]) == USE.digest


def test_texts_that_yaml_reads_as_something_else(tmp_path: Path) -> None:
    texts = ["no", "2025-01-01", "1.10", "1e3", "0x1F", "null", "~", "12:30:45", "=", "<<"]
    texts += ["---", "a: b", "- c", "# d", "multi\nline\n---\n", "tab\t", "„ß“\u2028", "\x07", "{}"]
    use = IntendedUse(
        intended=texts,
        out_of_scope=[{"id": "on", "text": "off", "source": "1_000"}],
        removed=[{"id": "weapon-control", "reason": "0o7"}],
        system="yes",
        version="1.10",
        weights_license="other",
        license_name="2025-01-01",
        license_link="123",
        reliability={"digest": "1234e5", "summary": "x" * 500 + " " + "y" * 500},
    )
    data = {**DATA, "name": "1e3", "source": "Hugging Face, 1e3"}
    path = write_training_card(run(tmp_path, use, run={**RUN, "data": data}), ABOUT)
    content = front(path)
    assert digest(content["fluvial_use"]) == use.digest
    assert content["license_name"] == "2025-01-01" and content["license_link"] == "123"
    assert content["datasets"] == ["1e3"] and content["tags"][1] == "toy"
    assert card_digest(tmp_path) == use.digest
    assert read_card_use(tmp_path) == use


def test_the_licence_is_that_of_the_weights_and_never_the_statement(tmp_path: Path) -> None:
    content = front(write_training_card(run(tmp_path / "a"), ABOUT))
    assert not {"license", "license_name", "license_link"} & content.keys()
    assert "No licence of the weights is stated." in (tmp_path / "a" / "README.md").read_text()
    use = IntendedUse(intended=["x"], weights_license="bigscience-openrail-m")
    path = write_training_card(run(tmp_path / "b", use), ABOUT)
    assert front(path)["license"] == "bigscience-openrail-m"
    # what such a licence restricts is for its text to say
    assert "what it allows and restricts is in its text" in path.read_text()


def test_without_a_statement_there_is_none_in_the_card(tmp_path: Path) -> None:
    path = write_training_card(run(tmp_path, None), ABOUT)
    assert "fluvial_use" not in front(path)
    assert "no statement of intended use" in path.read_text()
    assert read_card_use(tmp_path) is None and card_digest(tmp_path) is None
    assert read_card_use(tmp_path / "nowhere") is None


# Text


def test_headings_in_the_order_of_the_hub(tmp_path: Path) -> None:
    text = write_training_card(run(tmp_path), ABOUT).read_text()
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        "# toy, trained on my photos",
        "## Model description",
        "## Uses",
        "### Direct use",
        "### Out-of-scope use",
        "## Bias, risks and limitations",
        "### Recommendations",
        "## How to use",
        "## Training data",
        "## Training procedure",
        "## Evaluation",
        "## Reliability",
        "## Citation",
    ]


def test_what_the_text_says(tmp_path: Path) -> None:
    (run(tmp_path) / "figure.png").touch()
    text = write_training_card(tmp_path, ABOUT).read_text()
    for part in (
        "(figure.png)",
        "`toy`: numbers from noise. *On toys*, NeurIPS 2025.",
        "- Parameters: 1,234,567",
        "- Shape: images, 1 x 8 x 8",
        f"digest `{USE.digest}`",
        "informational, and does not change the licence",
        "- drawing samples",
        "- `weapon-control`: output used to control",
        "- Licence: CC0",
        "- Source: Hugging Face, someone/Photos\n",
        "- Rows: train 4,000\n",
        "- Classes: no, yes",
        "- 2 files were not images",
        "5,000 steps in 1 h 2 min. The model holds the weights `ema-0.999`.",
        "| `lr` | 0.001 |",  # the recipe's, and once
        '| `times` | {"ratio": 0.25} |',
        r"| `name\|with` | a \| bar |",
        "Made with fluvial 0.1.0, torch 2.13.0, python 3.11.2.",
        "| Fréchet distance | 12.35 | 1.25 | 500 against 500 |",
        "| accuracy | not measured | not measured | not done |",
        "- one seed",
        "## Reliability\n\nNot measured.",
        "Data: Someone, Photos, 2025",
        'fluvial.load(".")',
        "label='no'",
    ):
        assert part in text, part
    for part in ("fingerprint", "| `lr` | 2.0 |", "samples.png)"):
        assert part not in text, part


def test_removed_entries_stand_where_they_stood(tmp_path: Path) -> None:
    use = IntendedUse(
        intended=["x"],
        out_of_scope=[{"id": "own", "text": "y", "source": "z"}],
        removed=[{"id": "weapon-control", "reason": "a museum"}],
        reliability={"digest": "ab12", "summary": "5 of 100 failed"},
    )
    text = write_training_card(run(tmp_path, use), ABOUT).read_text()
    part = text.partition("### Out-of-scope use\n\n")[2].partition("\n\n")[0].splitlines()
    assert part[0] == "- `weapon-control`: removed, because: a museum"
    assert part[1].startswith("- `unverified-safety-critical`: output acted on")
    assert part[2] == "- `own`: y (z)"
    assert "5 of 100 failed (report `ab12`)" in text


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    folder = run(tmp_path, result=None)
    (folder / "model.safetensors").unlink()
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (50, 1200)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 12']))
    text = write_training_card(folder, ABOUT).read_text()
    assert "The run is not finished: 1,200 of 5,000 steps are logged." in text
    assert "There is no model.safetensors yet" in text
    assert "## Evaluation\n\nNot measured." in text
    assert "metrics" not in front(folder / "README.md")


def test_a_model_alone_has_a_card(tmp_path: Path) -> None:
    save_model(tmp_path / "model.safetensors", {"w": torch.zeros(3, 5)}, {"system": "toy"}, use=USE)
    text = write_training_card(tmp_path, {}).read_text()
    assert "- Parameters: 15" in text and "A model of the system `toy`." in text
    assert "- Licence: unknown" in text and "licence of the training data is not known" in text
    assert "format.decode" not in text and "pipeline_tag" not in text


@pytest.mark.parametrize(("kind", "suffix"), [("arrays", "npz"), ("table", "csv")])
def test_other_kinds_of_data(kind: str, suffix: str, tmp_path: Path) -> None:
    header = {"system": "toy", "data": {"kind": kind, "shape": [3], "columns": ["a", "b", "c"]}}
    save_model(tmp_path / "model.safetensors", {}, header, use=USE)
    path = write_training_card(tmp_path, ABOUT)
    assert f"--out samples.{suffix}" in path.read_text()
    assert "pipeline_tag" not in front(path)


# Rewriting


def test_what_the_user_wrote_stays(tmp_path: Path) -> None:
    path = write_training_card(run(tmp_path), ABOUT)
    text = path.read_text()
    assert text.endswith(f"{MARKER}\n")
    own = "\n## Ours\n\nThanks to the photographers: 100 %, „Grüße“.\n\n---\n\n| a | b |\n"
    edited = text.replace("---\n\n# toy", 'language: "de"\nlicense: mit\n---\n\n# toy', 1)
    path.write_text(edited.replace("1,234,567", "many") + own, encoding="utf-8")
    for _ in range(2):
        write_training_card(run(tmp_path, result={**RESULT, "steps": 6000}), ABOUT)
        text = path.read_text(encoding="utf-8")
        assert text.partition(MARKER)[2] == f"\n{own}"
        assert "6,000 steps" in text and "1,234,567" in text and "many" not in text
        assert front(path)["language"] == "de" and front(path)["license"] == "mit"


def test_a_licence_leaves_the_card_with_the_statement(tmp_path: Path) -> None:
    use = IntendedUse(intended=["x"], weights_license="openrail")
    assert front(write_training_card(run(tmp_path, use), ABOUT))["license"] == "openrail"
    assert "license" not in front(write_training_card(run(tmp_path), ABOUT))


def test_a_readme_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    path = run(tmp_path) / "README.md"
    for text in ("# My photos\n", "---\nlibrary_name: other\n---\n# Mine\n", ""):
        path.write_text(text)
        with pytest.raises(FileExistsError, match=r"README.md is not a card of fluvial's"):
            write_training_card(tmp_path, ABOUT)
        assert path.read_text() == text


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"not a run: .* neither model.safetensors nor run"):
        write_training_card(tmp_path, ABOUT)
    path = write_training_card(run(tmp_path), ABOUT)
    card = path.read_text()
    path.write_text(card.replace("tags:", "tags: [", 1))
    for read in (read_card_use, card_digest, lambda folder: write_training_card(folder, ABOUT)):
        with pytest.raises(ValueError, match=r"front matter of .*README.md is not readable YAML"):
            read(tmp_path)
    path.unlink()
    for content, message in (
        ("{", "run.json is not JSON"),
        ("[]", "run.json must hold an object, it holds a list"),
        ('{"format": 2}', "run.json has format 2, this version of fluvial reads up to 1"),
    ):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            write_training_card(tmp_path, ABOUT)


def test_an_edited_card_has_another_digest(tmp_path: Path) -> None:
    path = write_training_card(run(tmp_path), ABOUT)
    text = path.read_text()
    assert card_digest(tmp_path) == USE.digest
    for old, new in (
        ("drawing samples", "everything"),
        ('version: "0.1.0"', "version: 2025-01-01"),
        ("  intended:\n", "  1: x\n  intended:\n"),
        ('schema: "fluvial-use/1"', 'schema: "fluvial-use/9"'),
    ):
        assert text.count(old) >= 1
        path.write_text(text.replace(old, new))
        assert card_digest(tmp_path) not in (None, USE.digest)


# Claims


def test_card_of_a_claim(tmp_path: Path) -> None:
    (run(tmp_path) / "samples.png").touch()
    path = write_claim_card(
        tmp_path,
        system="toy",
        preset="record",
        evaluation="One is more.\n\n| arm | distance |\n|---|---|\n| a | 1 |",
        data={"name": "digits", "licence": "BSD-3-Clause", "train images": "100"},
        notes=["one seed"],
        config={"steps": 3},
        seconds=75.0,
        versions=RUN["versions"],
        about=ABOUT,
    )
    text = path.read_text()
    for part in (
        "# toy, preset record",
        "(samples.png)",
        "- Train images: 100",
        "| a | 1 |",
        '"steps": 3',
        "The run took 1 min 15 s. Made with fluvial 0.1.0",
        "*On toys*",
    ):
        assert part in text, part
    assert "figure.png" not in text
    content = front(path)
    assert content["fluvial_use"] == USE.as_json()
    # there may be data of that name on the hub, and they would be others
    assert not {"datasets", "model-index"} & content.keys()
