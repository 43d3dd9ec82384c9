"""The page about runs: complete, self-contained, well-formed, and never stopped by a bad folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fluvial.report import pictures, write_report_page
from fluvial.report.sections import count, duration, figure

from . import folders

VOID = {"meta", "link", "img", "br", "hr", "path", "line", "circle"}


class Page(HTMLParser):
    """A parsed page; fails where tags do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> after {self.open[-3:]}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def check(path: Path) -> Page:
    """What is true of every page."""
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    assert html.startswith("<!doctype html>\n")
    # nothing is loaded, nothing runs
    assert not {"script", "iframe", "object", "form"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src", "data:image/").startswith("data:image/")
        href = attributes.get("href", "#top")
        assert href.startswith(("#", "http", "data:,")) if tag in ("a", "link") else True
    assert "url(" not in html and "@import" not in html
    assert page.all("meta")[3]["content"].startswith("default-src 'none'")
    # links lead somewhere, and to one place
    ids = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    assert max(ids.values()) == 1
    for link in page.all("a"):
        assert not link["href"].startswith("#") or link["href"][1:] in ids
    # for those who cannot see it
    assert page.all("html")[0]["lang"] == "en"
    assert all(image["alt"] for image in page.all("img"))
    assert all(svg.get("aria-label") or svg["aria-hidden"] == "true" for svg in page.all("svg"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(deeper <= level + 1 for level, deeper in zip(levels, levels[1:], strict=False))
    return page


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    return {
        "finished": folders.training(root / "photos", steps=1500),
        "stopped": folders.training(root / "photos-wide", stop=700, recipe={"width": 256}),
        "claim": folders.claim(root / "record"),
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.training(tmp_path_factory.mktemp("small") / "run", steps=500, every=50)


@pytest.fixture(scope="module")
def page(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Page:
    out = tmp_path_factory.mktemp("out") / "report"
    path = write_report_page(list(runs.values()), out)
    assert path == out / "index.html" and [p.name for p in out.iterdir()] == ["index.html"]
    return check(path)


def test_the_summary_says_what_became_of_each_run(page: Page) -> None:
    assert "2 trainings and 1 claim: 2 finished, 1 stopped." in page.text
    assert "3 runs of meanflow" in page.text
    assert "stopped at step 700 of 3 000" in page.text
    assert "3.211 floor 0.5879 Fréchet distance" in page.text
    assert "2 of 3 comparisons that hold" in page.text and "32 min 52 s" in page.text
    assert "1 034 256" in page.text


def test_the_section_of_a_training(page: Page) -> None:
    for words in (
        "Images in one network call",
        "fluvial train meanflow --data photographs/ --lr 0.003 --steps 1500",
        "969 samples against 969 held-out images, in 64 features.",
        "licence unknown",
        "train rows 7775",
        "3 files could not be read and were left out",
        "The last tenth of the training",
        "Output used to control a weapon.",
        "model-index.0.results.0.metrics.0.value 3.21",
        "betas 0.9, 0.95",
        "torch 2.13.0",
    ):
        assert words in page.text
    assert "https://arxiv.org/abs/2505.13447" in {link["href"] for link in page.all("a")}
    grids = [image["alt"] for image in page.all("img") if image["alt"].startswith("Grid")]
    steps = ("500", "1\u202f000", "1\u202f500")
    assert grids[:3] == [f"Grid of samples of photos at step {step}." for step in steps]


def test_the_curves_of_a_training(page: Page) -> None:
    plots = [svg["aria-label"] for svg in page.all("svg") if "aria-label" in svg]
    loss = next(label for label in plots if label.startswith("Loss: "))
    assert re.fullmatch(
        r"Loss: training from [\d.]+ to [\d.]+; validation, last from [\d.]+ to [\d.]+; "
        r"validation, ema-0.999 from [\d.]+ to [\d.]+",
        loss,
    )
    times = next(p for p in plots if p.startswith("Loss by time (validation, ema-0.999)"))
    assert "step 100 from" in times and "step 1\u202f500 from" in times
    titles = {label.split(":")[0] for label in plots}
    assert {"delta", "Learning rate", "Rows a second", "Validation loss"} <= titles


def test_runs_of_one_system_are_compared(page: Page) -> None:
    assert "2 trainings side by side" in page.text
    differs = page.text.split("What differs")[1].split("Training · meanflow")[0]
    assert "width 128 256" in differs and "steps 1500 3000" in differs
    assert "lr" not in differs and "batch_size" not in differs


def test_the_section_of_a_claim(page: Page) -> None:
    record = json.loads(folders.RECORD.read_text(encoding="utf-8"))
    assert record["claim"] in page.text
    assert "The runs do not decide the claim." in page.text
    assert all(note in page.text for note in record["notes"])
    assert "2.04 (1.90 to 2.18), margin 0 holds" in page.text
    assert "0.0665 (−0.0601 to 0.193), margin 0 undecided" in page.text
    assert "flow matching 64 4696 8.084 6.893 9.606" in page.text
    assert sum("interval" in svg.get("class", "") for svg in page.all("svg")) == 3


def test_pictures_are_embedded_once(page: Page) -> None:
    # figure and three grids, one grid, figure and samples; the cards link to theirs
    assert len(page.all("img")) == 4 + 1 + 2
    assert "figure.png, shown above" in page.text


def test_a_claim_that_is_not_judged_and_one_that_was_stopped(tmp_path: Path) -> None:
    paths = [
        folders.claim(tmp_path / "laptop", preset="laptop"),
        folders.claim(tmp_path / "begun", finished=False),
    ]
    text = check(write_report_page(paths, tmp_path / "out")).text
    assert "Not judged: only the preset record gives a verdict." in text
    assert "stopped before its result" in text and "classifier_epochs 6" in text


def test_stages_have_curves_of_their_own(tmp_path: Path) -> None:
    run = folders.training(tmp_path / "run", steps=500)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    staged = [
        json.dumps({**json.loads(line), "stage": stage})
        for stage in ("one", "two")
        for line in lines
    ]
    (run / "metrics.jsonl").write_text("\n".join(staged))
    text = check(write_report_page([run], tmp_path / "out")).text
    assert "Stage one" in text and "Stage two" in text and "delta, stage two" in text


HOSTILE = "<script>alert('&amp;')</script>\u202e\x00\x1b\ud800"


def hostile(value: Any) -> Any:
    """Every text of a JSON value replaced, names included."""
    if isinstance(value, dict):
        kept = ("step", "loss", "by_time", "validation", "metrics", "comparisons", "data", "recipe")
        return {
            key if key in kept or i else f"{key}{HOSTILE}": hostile(item)
            for i, (key, item) in enumerate(value.items())
        } | {key: hostile(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def test_names_and_texts_are_escaped(tmp_path: Path) -> None:
    name = "<b>bold & 'quoted' \"name\" ümläut \n{{ 7 * 7 }}"
    paths = [folders.training(tmp_path / name, steps=500), folders.claim(tmp_path / "<i>claim")]
    paths.append(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")))
    folders.training(paths[-1], steps=500)
    for path in paths:
        for file in path.glob("*.json"):
            file.write_text(json.dumps(hostile(json.loads(file.read_text()))))
        (path / "README.md").write_text(f"# {HOSTILE[:30]}\n\n![{HOSTILE[:30]}](figure.png)")
    metrics = paths[0] / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join(json.dumps(hostile(json.loads(line))) for line in lines))
    page = check(write_report_page(paths, tmp_path / "out"))
    assert "<script>alert" in page.text and "{{ 7 * 7 }}" in page.text and "<b>bold" in page.text


def damage_run(folder: Path) -> None:
    (folder / "run.json").write_text('{"format": 1, "sys')


def damage_result(folder: Path) -> None:
    (folder / "result.json").write_bytes(b"\xff\xfe")


def damage_picture(folder: Path) -> None:
    (folder / "figure.png").write_bytes((folder / "figure.png").read_bytes()[:500])


def damage_samples(folder: Path) -> None:
    (folder / "samples" / "step-00000500.png").write_text("no picture")


def damage_card(folder: Path) -> None:
    (folder / "README.md").write_bytes(b"\xff")


def damage_metrics(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 501, "loss": NaN}\n{"step": 502, "lo')


def remove(name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        (folder / name).unlink()

    return act


def replace_by_folder(name: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return act


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        (folder / name).write_text(text)

    return act


@pytest.mark.parametrize(
    ("act", "state", "words"),
    [
        (damage_run, "damaged", "run.json cannot be read: it is not JSON (line 1)."),
        (damage_result, "damaged", "result.json cannot be read: it is not UTF-8."),
        (damage_picture, "finished", "figure.png cannot be shown: it is damaged, or no picture."),
        (damage_samples, "finished", "samples/step-00000500.png cannot be shown"),
        (damage_card, "finished", "README.md cannot be read: it is not UTF-8."),
        (damage_metrics, "finished", "1 line of metrics.jsonl could not be read and is left out"),
        (damage_metrics, "finished", "loss (training) was not finite 1 time, first at step 501."),
        (remove("run.json"), "damaged", "run.json is missing."),
        (remove("result.json"), "stopped at step 500", "stopped at step 500 of 500"),
        (remove("metrics.jsonl"), "finished", "metrics.jsonl is missing: there are no curves."),
        (remove("README.md"), "finished", "README.md, the card, is missing."),
        (remove("figure.png"), "finished", "figure.png is missing."),
        (replace_by_folder("run.json"), "damaged", "run.json cannot be read: it is not a file."),
        (replace_by_folder("metrics.jsonl"), "finished", "metrics.jsonl cannot be read"),
        (replace_by_folder("README.md"), "finished", "README.md, the card, is missing."),
        (replace_by_folder("figure.png"), "finished", "figure.png cannot be shown"),
        (rewrite("run.json", "[]"), "damaged", "it holds a list, not an object"),
        (rewrite("run.json", '{"format": 2}'), "finished", "run.json has format 2"),
        (rewrite("run.json", '{"data": [1], "recipe": 3, "parameters": "x"}'), "finished", "run"),
        (rewrite("result.json", '{"metrics": 3, "notes": {}, "steps": "x"}'), "finished", "run"),
        (rewrite("result.json", '{"metrics": [{"value": NaN}, 3, {}]}'), "finished", "nan"),
        (rewrite("result.json", "[" * 100_000), "damaged", "it is nested too deeply"),
        (rewrite("metrics.jsonl", ""), "finished", "run"),
        (rewrite("training.json", "{"), "damaged", "training.json cannot be read"),
    ],
)
def test_damage_is_named(
    tmp_path: Path, small: Path, act: Callable[[Path], None], state: str, words: str
) -> None:
    run = shutil.copytree(small, tmp_path / "run")
    act(run)
    text = check(write_report_page([run], tmp_path / "out")).text
    assert f"run {state}" in text and words in text


def test_a_claim_with_odd_rows(tmp_path: Path) -> None:
    run = folders.claim(tmp_path / "run")
    record = json.loads(folders.RECORD.read_text(encoding="utf-8"))
    record["comparisons"] = [
        {"name": "one seed", "mean": 1.0, "low": None, "high": None, "differences": [1.0]},
        {"name": "nothing"},
        {"name": "tiny", "mean": 1e-6, "low": 0.5e-6, "high": 2e-6, "margin": 0.0},
        {"name": "large", "mean": 1e6, "low": -1e6, "high": 2e6, "differences": "x"},
        "text",
    ]
    record["table"] = [{"a": 1}, {"b": [1, {"c": None}]}, *({"a": i} for i in range(300))]
    folders.write(run / "result.json", record)
    text = check(write_report_page([run], tmp_path / "out")).text
    assert "1.00 (no interval), margin 0" in text
    assert "102 more rows are not shown." in text


def test_a_training_before_its_first_step(tmp_path: Path) -> None:
    run = folders.training(tmp_path / "run", stop=0)
    text = check(write_report_page([run], tmp_path / "out")).text
    assert "stopped before its first line of metrics" in text


def test_paths_that_are_no_runs(tmp_path: Path, runs: dict[str, Path]) -> None:
    empty, other, file = tmp_path / "empty", tmp_path / "other", tmp_path / "file"
    empty.mkdir()
    other.mkdir()
    (other / "thesis.tex").touch()
    (other / "config.json").write_text('{"model_type": "bert"}')
    file.touch()
    finished = runs["finished"]
    again = finished.parent / "." / "x" / ".." / finished.name
    (finished.parent / "x").mkdir(exist_ok=True)
    text = check(write_report_page([finished, empty, other, file, again], tmp_path / "out")).text
    assert "One run of meanflow" in text
    assert f"{empty} : it is empty." in text
    assert f"{other} : it has neither run.json (a training) nor config.json (a claim)." in text
    assert f"{file} : it is a file, and a run is a folder." in text
    assert "it was given twice, and is shown once." in text
    with pytest.raises(
        ValueError, match=r"runs: need .* got .*empty: it is empty; .*other: it has"
    ):
        write_report_page([empty, other], tmp_path / "out2")
    with pytest.raises(ValueError, match=r"; its folder photos is a run"):
        write_report_page([finished.parent], tmp_path / "out2")
    with pytest.raises(FileNotFoundError, match="runs: there is no folder .*nowhere"):
        write_report_page([finished, tmp_path / "nowhere"], tmp_path / "out2")
    with pytest.raises(ValueError, match="runs: need one folder of a run or more, got none"):
        write_report_page([], tmp_path / "out2")
    with pytest.raises(TypeError, match="runs: need a sequence of folders, got the single path"):
        write_report_page(finished, tmp_path / "out2")  # type: ignore[arg-type]
    assert not (tmp_path / "out2").exists()


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    paths = [folders.training(tmp_path / part / "run", stop=0) for part in ("a", "b")]
    paths.append(folders.training(tmp_path / "c", stop=0))
    headings = re.findall(
        r"<h2 id=\"run-\d\">(.*)</h2>", write_report_page(paths, tmp_path / "out").read_text()
    )
    assert headings == ["a/run", "b/run", "c"]


def test_the_folder_of_the_page(tmp_path: Path, runs: dict[str, Path]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="not empty"):
        write_report_page([runs["claim"]], out)
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    first = write_report_page([runs["claim"]], out, force=True).read_text()
    assert write_report_page([runs["claim"]], out, force=True).read_text() == first
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "thesis.tex"]


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    Image.new("L", (30, 20)).save(path)
    picture = pictures.embed(path)
    assert (picture.width, picture.height) == (30, 20)
    assert picture.uri.startswith("data:image/png;base64,")
    wide = Image.new("RGBA", (2 * pictures.WIDEST, 10))
    wide.save(path)
    picture = pictures.embed(path)
    assert (picture.width, picture.height) == (pictures.WIDEST, 5)
    assert picture.uri.startswith("data:image/jpeg;base64,")
    Image.new("L", (30, 20)).save(tmp_path / "a.tif")
    assert pictures.embed(tmp_path / "a.tif").uri.startswith("data:image/jpeg")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="too many pixels"):
        pictures.embed(path)
    (tmp_path / "b.png").write_text("<svg onload='alert(1)'/>")
    with pytest.raises(ValueError, match="no picture"):
        pictures.embed(tmp_path / "b.png")


def test_numbers_in_words() -> None:
    assert [figure(v) for v in (0.0, 1.0, -12.3456, 217.39, 123456.7, 2e-7, None, True, 12)] == [
        "0", "1.000", "−12.35", "217.4", "123457", "2.000e−07", "–", "yes", "12",
    ]  # fmt: skip
    assert [duration(s) for s in (None, 5.25, 59.0, 61, 3600, 172800 + 7200)] == [
        "", "5.25 s", "59 s", "1 min 1 s", "1 h 0 min", "2 d 2 h",
    ]  # fmt: skip
    assert count(1234567.0) == "1\u202f234\u202f567" and count(None) == ""
