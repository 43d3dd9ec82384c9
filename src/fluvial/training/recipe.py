"""Recipes, the dataclasses of hyper-parameters behind `fluvial train`, as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from fluvial.training.stage import Training


def training_of(recipe: Any, **chosen: Any) -> Training:
    """How the loop trains: what a recipe names as `Training` does, but for what is ``chosen``.

    Measurements and previews for which it has None come every tenth and fifth of the steps, at
    least 100 apart.

    Raises:
        ValueError: a value is out of its range.
    """
    own = {field.name for field in fields(recipe)}
    given = {f.name: getattr(recipe, f.name) for f in fields(Training) if f.name in own} | chosen
    for name, parts in (("validate_every", 10), ("sample_every", 5)):
        if name in given and given[name] is None:
            given[name] = max(100, recipe.steps // parts)
    return Training(**given)


def absolute(place: str | None) -> str | None:
    """The path of what is there, so that a run goes on from any folder; names as they are."""
    return os.path.abspath(place) if place is not None and os.path.exists(place) else place


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
