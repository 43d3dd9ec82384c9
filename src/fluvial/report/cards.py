"""The card of a run: Markdown as HTML that asks for nothing outside the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from markdown_it.token import Token

LARGEST_CARD = 1 << 20
"""In bytes: a longer card is not shown."""

MOST_ROWS = 300
"""Most rows of a table of settings."""

DEEPEST = 8
"""Deepest level of nested settings that is shown."""

LONGEST = 600
"""Most characters of a cell."""


COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
"""Markdown that is not shown."""


@dataclass(frozen=True)
class Card:
    """A card: the rows of its front matter, and the rest as HTML."""

    facts: list[tuple[str, str]]
    html: str


def read_card(path: Path, picture: Callable[[Path], str | None]) -> Card:
    """The card at ``path``.

    Comments are left out, other HTML is shown as text. A picture is what ``picture`` makes of its
    path, and its description where the path is not in the card's folder or ``picture`` gives
    ``None``; a link that does not lead to the web is its text.

    Raises:
        ValueError: the file is too large, or not UTF-8.
        OSError: it cannot be read.
    """
    from markdown_it import MarkdownIt

    if path.stat().st_size > LARGEST_CARD:
        raise ValueError(f"it is larger than {LARGEST_CARD >> 20} MB")
    header, body = _front_matter(path.read_text(encoding="utf-8"))
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(COMMENT.sub("", body))
    folder = path.parent.resolve()

    def html(token: Token) -> str:
        source = unquote(str(token.attrGet("src") or ""))
        found = None
        if source and ":" not in source:
            try:
                target = (folder / source).resolve()
                if target.is_relative_to(folder):
                    found = picture(target)
            except (OSError, ValueError):  # a name that no file can have
                found = None
        return found or f"<em>{escape(token.content or 'picture')}</em>"

    _tame(tokens, html)
    return Card(_facts(header), markdown.renderer.render(tokens, markdown.options, {}))


def _front_matter(content: str) -> tuple[str, str]:
    """(YAML, Markdown) of a file that may begin with YAML between two lines of dashes."""
    lines = content.removeprefix("\ufeff").splitlines()
    if lines and lines[0].rstrip() == "---":
        for i, line in enumerate(lines[1:], 1):
            if line.rstrip() == "---":
                return "\n".join(lines[1:i]), "\n".join(lines[i + 1 :])
    return "", "\n".join(lines)


def _facts(header: str) -> list[tuple[str, str]]:
    import yaml  # type: ignore[import-untyped]

    if not header.strip():
        return []
    try:
        content = yaml.safe_load(header)
    except (yaml.YAMLError, ValueError, RecursionError):
        content = None
    # not YAML of names and values: shown as it stands
    return flat(content) if isinstance(content, dict) else [("front matter", header[:LONGEST])]


def flat(content: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Nested settings as rows (dotted name, value), bounded in number, depth and length."""
    return list(islice(_flat("", content, 0), MOST_ROWS)) if content else []


def _flat(name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    if depth >= DEEPEST:
        yield name, "…"
    elif isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key)[:LONGEST], item, depth + 1)
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in value):
        for i, item in enumerate(value):
            yield from _flat(f"{name}.{i}", item, depth + 1)
    elif isinstance(value, list):
        shown = ", ".join(exact(item) for item in value[:50]) + ", …" * (len(value) > 50)
        yield name, shown[:LONGEST] or "none"
    else:
        yield name, exact(value)


def exact(value: Any) -> str:
    """A setting as text, without rounding."""
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    shown = str(value)
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST - 1]}…"


def _tame(tokens: list[Token], picture: Callable[[Token], str]) -> None:
    """Change parsed Markdown in place: headings below those of the page, pictures, links."""
    links: list[bool] = []
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + 3)}"
        elif token.type == "image":
            # the page's own HTML, made from escaped parts
            token.type, token.content = "html_inline", picture(token)
        elif token.type == "link_open":
            target = str(token.attrGet("href") or "")
            links.append(target.startswith(("http://", "https://", "mailto:")))
            token.attrs = {"href": target, "rel": "noreferrer"} if links[-1] else {}
            token.tag = "a" if links[-1] else "span"
        elif token.type == "link_close":
            token.tag = "a" if links.pop() else "span"
        if token.children:
            _tame(token.children, picture)
