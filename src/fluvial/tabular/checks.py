"""Arguments of one number: a mistake is named, with what came and what was wanted."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np


def whole(name: str, value: Any, least: int = 1) -> int:
    """The argument ``name`` as a whole number, which 2.0 is too.

    Raises:
        ValueError: it is none, or below ``least``.
    """
    wanted = f"be a whole number of at least {least}"
    return int(number(name, value, wanted, lambda x: x >= least and x % 1 == 0))


def number(name: str, value: Any, wanted: str, fits: Callable[[float], bool]) -> float:
    """The argument ``name``, a number that fits; a truth value is none.

    Args:
        wanted: what it must, in words, such as "be positive".

    Raises:
        ValueError: it is none, or does not fit.
    """
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not fits(value):
        raise ValueError(f"{name} must {wanted}, got {value if real else repr(value)}")
    result: float = value
    return result


def truth(name: str, value: Any) -> bool:
    """The argument ``name``, True or False.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)
