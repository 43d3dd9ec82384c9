"""Command lines as dataclasses, through tyro; mistakes in one line, examples below the help."""

from __future__ import annotations

import io
import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields, make_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

T = TypeVar("T")

CONFIG = (tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
WORDS = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "STR": "text",
    "PATH": "a path",
    "INT INT": "two whole numbers",
    "FLOAT FLOAT": "two numbers",
    "[INT [INT ...]]": "whole numbers",
    "[FLOAT [FLOAT ...]]": "numbers",
}
"""What tyro's names of types mean."""


def parse(kind: type[T], argv: Sequence[str], *, prog: str, examples: str) -> T:
    """The flags in ``argv``.

    Args:
        kind: a dataclass; its docstring describes the fields.
        argv: without the name of the command.
        prog: as it is called.
        examples: lines below the help.

    Raises:
        ValueError: they cannot be understood; says why in a line.
        SystemExit: with 0, after the help.
    """
    helping = any(arg in ("-h", "--help") for arg in argv)
    said, complaint = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(complaint), _lines(whole=not helping):
            return tyro.cli(kind, args=argv, prog=prog, config=CONFIG)
    except SystemExit as stop:
        if stop.code:
            reason = _reason(complaint.getvalue())
            more = "" if reason.endswith("?") else f"; see {prog} --help"
            raise ValueError(f"{reason}{more}") from None
        _show_help(said.getvalue(), examples)
        raise


def with_options(command: type, options: type, default: Any, groups: Mapping[str, str]) -> type:
    """``command`` with the fields of ``options`` as further flags, under a heading a group.

    Args:
        command: a dataclass, whose own fields come first.
        options: another, whose docstring describes its fields under "Args:".
        default: of ``options``: the defaults of the flags.
        groups: the first field of every group, by its name.
    """
    hints = get_type_hints(options)
    names = [field.name for field in fields(options)]
    starts = {first: group for group, first in groups.items()}
    members: dict[str, list[Any]] = {}
    group = ""
    for name in names:
        group = starts.get(name, group)
        value = getattr(default, name)
        kind = hints[name]
        if value is None:  # said in the field's description, in words
            kind = Annotated[kind, tyro.conf.arg(help_behavior_hint="")]
        members.setdefault(group, []).append((name, kind, value))
    described = (options.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
    # in one line each: tyro keeps a line break before a sign
    described = re.sub(r"\n {9,}", " ", described)
    parts: list[tuple[str, Any, Any]] = []
    for group, of_group in members.items():
        part: Any = make_dataclass(group, of_group, frozen=True)
        part.__doc__ = f"\n\nArgs:{described}"
        parts.append((group, Annotated[part, tyro.conf.OmitArgPrefixes], part()))
    joined = make_dataclass("Flags", parts, bases=(command,), frozen=True)
    joined.__doc__ = command.__doc__
    return joined


def options_of(command: Any, options: Any) -> Any:
    """The ``options`` among the flags of `with_options`."""
    own = {field.name for field in fields(options)}
    values: dict[str, Any] = {}
    for part in vars(command).values():
        if hasattr(part, "__dataclass_fields__"):
            values |= {name: value for name, value in vars(part).items() if name in own}
    return options(**values)


def value_of(flag: str, argv: Sequence[str]) -> str | None:
    """What stands after a flag, before all flags are looked at."""
    found = [b for a, b in zip(argv, argv[1:], strict=False) if a == flag]
    found += [arg.partition("=")[2] for arg in argv if arg.startswith(f"{flag}=")]
    return found[-1] if found else None


def as_flags(text: str, *kinds: type) -> str:
    """A message of the library, with the arguments it names as the flags that they come from."""
    for name in (field.name for kind in kinds for field in fields(kind)):
        flag = f"--{name.replace('_', '-')}"
        text = re.sub(rf"\b{name}=True\b", flag, text)
        text = re.sub(rf"\b{name}=\((\d+), (\d+)\)", rf"{flag} \1 \2", text)
        text = re.sub(rf"(?<![\w-]){name}=(?=[\w'\"-])(?!False)", f"{flag} ", text)
        text = re.sub(rf"^{name}(?=:| (must|is|needs|holds) | '| \d)", flag, text)
    return text


def _show_help(text: str, examples: str) -> None:
    """tyro's help, its paragraphs in lines that fit the terminal, and examples."""
    width = min(100, shutil.get_terminal_size().columns)
    for line in map(str.rstrip, text.rstrip().splitlines()):
        print("\n".join(textwrap.wrap(line, width)) if len(line) > width else line)
    print("\nexamples:")
    for line in examples.splitlines():
        print(f"  {line}")


@contextmanager
def _lines(*, whole: bool) -> Iterator[None]:
    """Within the block tyro does not break lines, if they are to be ``whole``."""
    before = os.environ.get("COLUMNS")
    if whole:
        os.environ["COLUMNS"] = "2000"
    try:
        yield
    finally:
        if before is not None:
            os.environ["COLUMNS"] = before
        elif whole:
            del os.environ["COLUMNS"]


def _reason(complaint: str) -> str:
    """What tyro prints, a title, the reason and hints with rules between them, in one line."""
    parts = [part.strip() for part in re.split("[-─]{4,}", " ".join(complaint.split()))]
    _, first, *rest = [*parts, "", ""]
    if match := re.match(r"Unrecognized options: (.*)", first):
        token = match[1].split(", ")[0]
        if not token.startswith("-"):
            return f"{token!r} is one argument too many"
        near = [flag for flag in re.findall(r"--[\w-]+", " ".join(rest)) if flag != "--help"]
        return f"there is no flag {token}" + (f"; did you mean {near[0]}?" if near else "")
    if match := re.match(r"Missing from .*?: (\S+)(?: [A-Z]\S*)* (.*?)\.? ?\(required\)", first):
        return f"{match[1]} is missing: {match[2].partition('. ')[0]}"
    if match := re.match(
        r"invalid choice '(.*)' for argument '(.*)'. Expected one of (.*)\.", first
    ):
        choices = [word.strip("(), '") for word in match[3].split(",")]
        wanted = _either([choice for choice in choices if choice not in ("", "None")])
        return f"{match[2]} must be {wanted}, got {match[1]!r}"
    if match := re.match(r"Missing value for argument '(.*)'. Expected (\d+) values", first):
        return f"{match[1]} needs {'a value' if match[2] == '1' else match[2] + ' values'}"
    if match := re.match(r"Error parsing (--\S+): (.*)", first):
        flag, reason = match[1], match[2]
        metavar = re.search(rf"Argument helptext: {flag} (.*?)(?: [a-z(].*)?$", " ".join(rest))
        got = re.search(r"(?:from|arguments:) (\[.*?\])", reason) or re.search(
            r"('[^']*')$", reason
        )
        if metavar and got:
            kinds = [WORDS.get(kind.strip("{}"), kind) for kind in metavar[1].split("|")]
            value = got[1].strip("[]'").replace("', '", " ")
            return f"{flag} must be {_either(kinds)}, got {value!r}"
    return re.sub(r"^Error parsing \w+: ", "", first)


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
