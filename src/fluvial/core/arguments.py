"""Arguments of the wrong kind: what came, in words, and whole numbers."""

from __future__ import annotations

import operator
from typing import Any


def kind_of(value: Any) -> str:
    """What a value is, for a message: the name of its type; of a class, that it is one."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def whole_number(name: str, value: Any) -> int:
    """The argument ``name`` as an int; 2.0 is none.

    Raises:
        TypeError: it is no whole number.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from None
