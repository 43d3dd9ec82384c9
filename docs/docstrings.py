"""Docstrings are plain text with a few marks; this makes them sound reStructuredText.

The formulas of this library are full of characters that reStructuredText reads as markup:
``q(x_s | x_t)``, ``|det S|``, ``(batch, *event)``, ``coef_``. Those that are not part of a
well-formed mark (a literal, *emphasis*, a role) are escaped; literal blocks are left alone.
"""

from __future__ import annotations

import re
from typing import Any

MARK = re.compile(
    r"^[ ]*\*(?=[ ])"  # the bullet of a list
    r"|``.+?``"  # a literal
    r"|:[\w:-]+:`[^`]+`|`[^`]+`_{0,2}"  # a role, a reference, a link
    r"|\*\*(?=\S)[^*]*?[^\s*]\*\*(?!\w)"  # strong
    r"|(?<![\w*])\*(?=[^\s*])[^*]*?[^\s*]\*(?![\w*])"  # emphasis
    r"|\\."  # escaped already
    r"|(?P<lone>[*|]|(?<=\w)_(?![\w`]))",  # none of these: as it stands
    re.MULTILINE | re.DOTALL,
)
LITERAL = re.compile(r"(^|[^:]):: *$|^\s*\.\. (math|code|code-block|sourcecode)::")


def escape(text: str) -> str:
    """``text``, a paragraph, with every lone mark escaped."""
    return MARK.sub(lambda match: rf"\{match[0]}" if match["lone"] else match[0], text)


def escape_lines(lines: list[str]) -> list[str]:
    """`escape` for each paragraph outside literal blocks, directives and doctests."""
    result: list[str] = []
    paragraph: list[str] = []
    literal: int | None = None  # indentation of the line that opened a literal block

    def flush() -> None:
        result.extend(escape("\n".join(paragraph)).split("\n") if paragraph else [])
        paragraph.clear()

    for line in lines:
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        if literal is not None or not line.strip() or line.lstrip().startswith((">>>", "..")):
            flush()
            result.append(line)
        else:
            paragraph.append(line)
        if literal is None and LITERAL.search(line):
            literal = indent
    flush()
    return result


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Sphinx's hook ``autodoc-process-docstring``, to be called before napoleon's."""
    lines[:] = escape_lines(lines)
    if what in {"attribute", "data", "property"}:
        # An empty comment first, or napoleon reads a sentence up to its colon as a type.
        lines[:0] = ["..", ""]
