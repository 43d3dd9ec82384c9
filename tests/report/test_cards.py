"""Cards as HTML."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluvial.report import cards
from fluvial.report.cards import Card, flat, read_card


def card(folder: Path, text: str) -> Card:
    path = folder / "README.md"
    path.write_text(text, encoding="utf-8")
    return read_card(path, lambda target: f"<img alt='{target.name}'>" if target.exists() else None)


def test_front_matter_becomes_rows(tmp_path: Path) -> None:
    read = card(tmp_path, "---\nlicense: mit\ntags: [a, b]\ndata:\n  rows: 3\n---\n# Title\n")
    assert read.facts == [("license", "mit"), ("tags", "a, b"), ("data.rows", "3")]
    assert read.html == "<h4>Title</h4>\n"


@pytest.mark.parametrize(
    ("text", "facts", "html"),
    [
        ("", [], ""),
        ("---\n", [], "<hr />\n"),
        ("---\n---\ntext", [], "<p>text</p>\n"),
        ("text\n---\n", [], "<h5>text</h5>\n"),
        ("---\n{a: [\n---\ntext", [("front matter", "{a: [")], "<p>text</p>\n"),
        ("---\njust words\n---\ntext", [("front matter", "just words")], "<p>text</p>\n"),
        ("\ufeff---\r\na: 1\r\n---\r\ntext", [("a", "1")], "<p>text</p>\n"),
    ],
)
def test_cards_without_it(tmp_path: Path, text: str, facts: list[str], html: str) -> None:
    assert card(tmp_path, text) == Card(facts, html)


def test_aliases_do_not_multiply(tmp_path: Path) -> None:
    levels = "".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 9)}]\n" for i in range(1, 12))
    read = card(tmp_path, f"---\nb0: &b0 [x, x]\n{levels}---\n")
    assert len(read.facts) == cards.MOST_ROWS
    assert card(tmp_path, "---\na: &a [1, *a]\n---\n").facts


def test_headings_stand_below_those_of_the_page(tmp_path: Path) -> None:
    html = card(tmp_path, "# a\n## b\n###### c\n").html
    assert html == "<h4>a</h4>\n<h5>b</h5>\n<h6>c</h6>\n"


def test_html_is_shown_as_text(tmp_path: Path) -> None:
    html = card(tmp_path, "<script>alert(1)</script>\n\na <b onclick=x>b</b>").html
    assert "<script" not in html and "<b" not in html and "&lt;script&gt;" in html
    html = card(tmp_path, "one <!-- two\n\n<b> --> three <!-- <!-- --> four <!-- five").html
    assert html == "<p>one  three  four &lt;!-- five</p>\n"


def test_only_links_to_the_web_are_links(tmp_path: Path) -> None:
    html = card(
        tmp_path,
        "[a](https://x.org/?q=1&r=2) [b](model.safetensors) [c](javascript:alert(1)) "
        "[d](#top) [e](//x.org) [f](file:///etc/passwd) <https://y.org>",
    ).html
    assert html.count("<a ") == 2
    assert 'href="https://x.org/?q=1&amp;r=2" rel="noreferrer"' in html
    assert "<span>b</span>" in html and "<span>d</span>" in html and "<span>e</span>" in html


def test_only_pictures_of_the_run_are_pictures(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for path in (run / "in side.png", tmp_path / "outside.png"):
        path.touch()
    html = card(
        run,
        "![one](in%20side.png) ![*two*](../outside.png) ![three](https://x.org/a.png) "
        f"![four](missing.png) ![five](<{tmp_path}/outside.png>) ![](data:image/png;base64,AAAA)",
    ).html
    assert html.count("<img") == 1 and "<img alt='in side.png'>" in html
    for name in ("two", "three", "four", "five", "picture"):
        assert f"{name}" in html
    assert "x.org" not in html and "AAAA" not in html


def test_files_that_cannot_be_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "README.md"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError):
        read_card(path, lambda _: None)
    monkeypatch.setattr(cards, "LARGEST_CARD", 10)
    with pytest.raises(ValueError, match="larger"):
        card(tmp_path, "x" * 11)


def test_settings_as_rows() -> None:
    settings = {
        "a": {"b": 1.5e-7, "c": [1, 2]},
        "d": None,
        "e": True,
        "f": [{"g": "x"}, 2],
        "h": [],
    }
    assert flat(settings) == [
        ("a.b", "1.5e-07"),
        ("a.c", "1, 2"),
        ("d", "none"),
        ("e", "yes"),
        ("f.0.g", "x"),
        ("f.1", "2"),
        ("h", "none"),
    ]
    assert flat({}) == []
    assert len(flat({str(i): i for i in range(1000)})) == cards.MOST_ROWS
    assert len(flat({"a": "x" * 10_000})[0][1]) == cards.LONGEST
