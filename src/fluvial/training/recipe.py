"""Recipes, the dataclasses of hyper-parameters behind `fluvial train`, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any


def as_json(recipe: Any) -> dict[str, Any]:
    """The hyper-parameters of a recipe by name, as JSON holds them: tuples become lists."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(recipe).items()
    }


def from_json(kind: Any, content: Mapping[str, Any]) -> Any:
    """The recipe of the class ``kind`` that `as_json` wrote.

    Raises:
        ValueError: a hyper-parameter is unknown, or out of its range.
    """
    unknown = set(content) - {field.name for field in fields(kind)}
    if unknown:
        raise ValueError(f"the recipe has hyper-parameters of another version: {sorted(unknown)}")
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in content.items()
        }
    )
