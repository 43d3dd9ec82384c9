"""The statement of intended use: what a model is for and what it is not for, inside its weights.

The first default is the demand of Cummings, "Prohibiting Generative AI in any Form of Weapon
Control", NeurIPS 2025 position papers. The statement informs whoever receives a model. It changes
no licence, and nothing is refused or altered because of it.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from typing import Any, Self

import fluvial
from fluvial.training.files import open_safetensors

SCHEMA = "fluvial-use/1"
"""Name and major version of the layout."""

NATURE = "informational, and does not change the licence of the code or of the weights"
"""What the statement is; part of every statement."""

LARGEST = 16_384
"""Bytes of a statement, at most: whoever opens a model reads it."""


@dataclass(frozen=True)
class OutOfScope:
    """A use that the model is not for.

    Args:
        id: by which it is removed or replaced.
        text: the use, in words.
        source: who says so; None for no one else.
    """

    id: str
    text: str
    source: str | None = None


@dataclass(frozen=True)
class Removal:
    """A default that was taken out.

    Args:
        id: of the entry.
        reason: at least one word.
    """

    id: str
    reason: str


@dataclass(frozen=True)
class Reliability:
    """A report of the model's measured reliability.

    Args:
        digest: SHA-256 of the report.
        summary: the report in one line.
    """

    digest: str
    summary: str


DEFAULTS = (
    OutOfScope(
        "weapon-control",
        "output used to control, direct, guide or govern a weapon, on site or remotely",
        'Cummings, "Prohibiting Generative AI in any Form of Weapon Control", NeurIPS 2025 '
        "position papers",
    ),
    OutOfScope(
        "unverified-safety-critical",
        "output acted on without independent verification where an error can injure or kill",
    ),
)
"""What no model is for."""

_ORDER = (
    "schema",
    "system",
    "version",
    "base_model",
    "intended",
    "out_of_scope",
    "removed",
    "nature",
    "weights_license",
    "license_name",
    "license_link",
    "reliability",
)


def canonical(content: Mapping[str, Any]) -> str:
    """``content`` as JSON with sorted keys and no spaces: one text for equal content."""
    text = json.dumps(
        content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    text.encode()  # fails here and not at the first digest: half of a surrogate pair has no UTF-8
    return text


def digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of the canonical JSON, in UTF-8, as hexadecimal digits."""
    return sha256(canonical(content).encode()).hexdigest()


@dataclass(frozen=True, init=False)
class IntendedUse:
    """What a model is for and what it is not for. There is no date, host or user in it.

    Args:
        intended: what the model is for: short sentences, one or more.
        out_of_scope: what else it is not for than `DEFAULTS`. An entry with the id of a default
            stands in its place.
        removed: defaults that are taken out, each with a reason.
        system: name of the model's system; None before the statement is saved with a model.
        version: of fluvial, which wrote the statement.
        base_model: digests of the statements of the models that this one was made from.
        weights_license: identifier of the licence of the weights; None: nothing is said about it.
            "other" needs a name and a link.
        license_name, license_link: its name, and where its text is.
        reliability: what was measured; None for nothing.

    Attributes:
        schema: `SCHEMA`, or what a file of another version says.
        canonical: the whole content as canonical JSON.

    Raises:
        TypeError: a field is of another type.
        ValueError: ``intended`` is empty; a text is empty; an id occurs twice, or is listed and
            removed; a removal has no reason; the licence "other" has no name or link; the
            statement is larger than `LARGEST`.
    """

    intended: tuple[str, ...]
    out_of_scope: tuple[OutOfScope, ...]
    removed: tuple[Removal, ...]
    system: str | None
    version: str
    base_model: tuple[str, ...]
    weights_license: str | None
    license_name: str | None
    license_link: str | None
    reliability: Reliability | None
    schema: str = field(init=False)
    canonical: str = field(init=False, repr=False)

    def __init__(
        self,
        *,
        intended: Sequence[str],
        out_of_scope: Iterable[OutOfScope | Mapping[str, Any]] = (),
        removed: Iterable[Removal | Mapping[str, Any]] = (),
        system: str | None = None,
        version: str = fluvial.__version__,
        base_model: Sequence[str] = (),
        weights_license: str | None = None,
        license_name: str | None = None,
        license_link: str | None = None,
        reliability: Reliability | Mapping[str, Any] | None = None,
    ) -> None:
        gone = _entries("removed", removed, Removal)
        self._fill(
            schema=SCHEMA,
            intended=_texts("intended", intended),
            out_of_scope=_merged(
                DEFAULTS, _entries("out_of_scope", out_of_scope, OutOfScope), gone
            ),
            removed=gone,
            system=_optional("system", system),
            version=_text("version", version),
            base_model=_texts("base_model", base_model),
            weights_license=_optional("weights_license", weights_license),
            license_name=_optional("license_name", license_name),
            license_link=_optional("license_link", license_link),
            reliability=_measured(reliability),
        )
        if not self.intended:
            raise ValueError("intended is empty: say in one sentence or more what the model is for")
        for removal in gone:
            if not re.search(r"\w", removal.reason):
                raise ValueError(f"removed: {removal.id!r} needs a reason of at least one word")
        if weights_license == "other" and not (license_name and license_link):
            raise ValueError("weights_license 'other' needs license_name and license_link")
        content = asdict(self._fill(canonical=""))
        del content["canonical"]
        self._fill(canonical=canonical({**content, "nature": NATURE}))
        if (size := len(self.canonical.encode())) > LARGEST:
            raise ValueError(f"the statement has {size} bytes, at most {LARGEST} are allowed")

    def _fill(self, **values: Any) -> Self:
        for name, value in values.items():
            object.__setattr__(self, name, value)
        return self

    @property
    def known(self) -> bool:
        """Whether this version of fluvial reads the schema."""
        return self.schema.split(".")[0] == SCHEMA

    @property
    def digest(self) -> str:
        """SHA-256 of `canonical`, in UTF-8, as hexadecimal digits: equal content, equal digest."""
        return sha256(self.canonical.encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """The whole content, what the fields do not hold included: its `digest` is this one's."""
        content = json.loads(self.canonical)
        return {name: content[name] for name in (*_ORDER, *content) if name in content}

    @classmethod
    def from_json(cls, content: str | Mapping[str, Any]) -> Self:
        """The statement of a file as it stands there: nothing is added, and the digest is the same.

        One of another major version is kept with a warning; all fields but ``schema`` are empty.

        Raises:
            TypeError, ValueError: ``content`` is no statement of intended use; says why.
        """
        found = json.loads(content) if isinstance(content, str) else content
        if not isinstance(found, Mapping):
            raise TypeError(f"a statement must be a mapping, got {type(found).__name__}")
        schema = found.get("schema")
        match = re.fullmatch(r"(fluvial-use/\d+)(\.\d+)*", schema) if type(schema) is str else None
        if match is None:
            raise ValueError(f"schema must be {SCHEMA!r} or alike, got {schema!r}")
        known = found if match[1] == SCHEMA else {}
        if not known:
            warnings.warn(
                f"a statement of intended use has schema {schema!r}, this version of fluvial reads "
                f"{SCHEMA!r}: it is kept as it is, with empty fields",
                stacklevel=2,
            )
        return cls.__new__(cls)._fill(
            schema=schema,
            intended=_texts("intended", known.get("intended", ())),
            out_of_scope=_entries(
                "out_of_scope", known.get("out_of_scope", ()), OutOfScope, exact=False
            ),
            removed=_entries("removed", known.get("removed", ()), Removal, exact=False),
            version=_optional("version", known.get("version")) or "",
            base_model=_texts("base_model", known.get("base_model", ())),
            reliability=_measured(known.get("reliability"), exact=False),
            canonical=canonical(dict(found)),
            **{
                name: _optional(name, known.get(name))
                for name in ("system", "weights_license", "license_name", "license_link")
            },
        )

    def for_system(
        self, system: str, out_of_scope: Iterable[OutOfScope | Mapping[str, Any]] = ()
    ) -> IntendedUse:
        """The statement as it is saved with a model of ``system``.

        What the system itself is not for comes after the defaults. A statement that names a system
        was saved before, and is returned as it is.

        Args:
            system: name of the system.
            out_of_scope: the system's own entries.

        Raises:
            ValueError: an entry is removed that is neither a default nor the system's.
        """
        if self.system is not None or not self.known:
            return self
        own = (*DEFAULTS, *_entries("out_of_scope", out_of_scope, OutOfScope))
        names = [entry.id for entry in own]
        for removal in () if self.base_model else self.removed:
            if removal.id not in names:
                raise ValueError(
                    f"removed: there is no {removal.id!r} to remove from {system}, only "
                    f"{', '.join(names)}"
                )
        return replace(
            self, system=system, out_of_scope=_merged(own, self.out_of_scope, self.removed)
        )


def derive(
    parents: Iterable[IntendedUse | None],
    *,
    intended: Sequence[str],
    out_of_scope: Iterable[OutOfScope | Mapping[str, Any]] = (),
    removed: Iterable[Removal | Mapping[str, Any]] = (),
    weights_license: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
) -> IntendedUse:
    """The statement of a model that was fine-tuned, edited, distilled or merged from others.

    What one of the parents is not for, the new model is not for either. What it is for is said
    anew, its reliability measured anew. A licence that the parents share is passed on. Of a parent
    whose schema is not known only the digest is, and a warning says so.

    Args:
        parents: statements of the models it was made from; None for a model without one.
        intended: what the new model is for.
        out_of_scope: what else it is not for.
        removed: entries of the parents that do not hold for it, each with a reason.
        weights_license, license_name, license_link: its own licence.

    Raises:
        ValueError: there is no parent; their licences differ and none is given; an entry to remove
            is not there; and as `IntendedUse`.
    """
    parents = list(parents)
    if not parents:
        raise ValueError("parents is empty: a derived model has one or more")
    stated = [parent for parent in parents if parent is not None]
    for parent in stated:
        if not parent.known:
            warnings.warn(
                f"parents: a statement has schema {parent.schema!r}, this version of fluvial reads "
                f"{SCHEMA!r}: only its digest is passed on",
                stacklevel=2,
            )
    entries: dict[str, OutOfScope] = {}
    gone: dict[str, Removal] = {}
    for parent in stated:
        for entry in parent.out_of_scope:
            entries.setdefault(entry.id, entry)
        for removal in parent.removed:
            gone.setdefault(removal.id, removal)
    gone = {name: removal for name, removal in gone.items() if name not in entries}
    for removal in _entries("removed", removed, Removal):
        there = dict.fromkeys([*(entry.id for entry in DEFAULTS), *entries])
        if removal.id not in there:
            raise ValueError(
                f"removed: there is no {removal.id!r} to remove, only {', '.join(there)}"
            )
        entries.pop(removal.id, None)
        gone[removal.id] = removal
    removals = tuple(gone.values())
    own = _entries("out_of_scope", out_of_scope, OutOfScope)
    if weights_license is None:
        licences = {
            (parent.weights_license, parent.license_name, parent.license_link): None
            for parent in stated
            if parent.weights_license
        }
        if len(licences) > 1:
            names = ", ".join(repr(licence[0]) for licence in licences)
            raise ValueError(f"weights_license must be given: the parents have {names}")
        for licence in licences:
            weights_license, license_name, license_link = licence
    return IntendedUse(
        intended=intended,
        out_of_scope=_merged(tuple(entries.values()), own, removals),
        removed=removals,
        base_model=[parent.digest for parent in stated],
        weights_license=weights_license,
        license_name=license_name,
        license_link=license_link,
    )


def read_use(path: str | os.PathLike[str]) -> IntendedUse | None:
    """The statement in a safetensors file, whoever wrote the file; no tensor is read.

    None where there is none, and, with a warning, where it is damaged.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a safetensors file.
    """
    with open_safetensors(path) as file:
        text = (file.metadata() or {}).get("fluvial.use")
    if text is None:
        return None
    try:
        return IntendedUse.from_json(text)
    except (TypeError, ValueError, RecursionError) as error:
        warnings.warn(
            f"the statement of intended use in {path} is damaged and left out: {error}",
            stacklevel=2,
        )
        return None


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{name} is empty text")
    return value


def _optional(name: str, value: Any) -> str | None:
    return None if value is None else _text(name, value)


def _texts(name: str, values: Any) -> tuple[str, ...]:
    return tuple(_text(f"{name}[{k}]", value) for k, value in enumerate(_list(name, values)))


def _list(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list, got {type(values).__name__}")
    return list(values)


def _entry(name: str, value: Any, kind: type[Any], *, exact: bool = True) -> Any:
    """``value``, a ``kind`` or a mapping of its fields, with every field checked.

    What a later minor version put beside the fields is passed over unless ``exact``.
    """
    names = [part.name for part in fields(kind)]
    found = asdict(value) if isinstance(value, kind) else value
    if not isinstance(found, Mapping) or (exact and not found.keys() <= set(names)):
        raise TypeError(f"{name} must be a {kind.__name__} or a mapping of {names}, got {value!r}")
    # only the source of a use may be missing
    return kind(
        **{
            part: (_optional if part == "source" else _text)(f"{name}.{part}", found.get(part))
            for part in names
        }
    )


def _entries(
    name: str, values: Any, kind: type[OutOfScope] | type[Removal], *, exact: bool = True
) -> tuple[Any, ...]:
    entries = tuple(
        _entry(f"{name}[{k}]", value, kind, exact=exact)
        for k, value in enumerate(_list(name, values))
    )
    ids = [entry.id for entry in entries]
    for id_ in ids:
        if ids.count(id_) > 1:
            raise ValueError(f"{name} has {id_!r} twice")
    return entries


def _measured(value: Any, *, exact: bool = True) -> Reliability | None:
    return None if value is None else _entry("reliability", value, Reliability, exact=exact)


def _merged(
    first: tuple[OutOfScope, ...], then: tuple[OutOfScope, ...], removed: tuple[Removal, ...]
) -> tuple[OutOfScope, ...]:
    """``first`` less what is removed, replaced by namesakes in ``then``, and the rest of it."""
    gone, new = {entry.id for entry in removed}, {entry.id: entry for entry in then}
    if both := gone & new.keys():
        raise ValueError(f"{min(both)!r} is in out_of_scope and in removed")
    kept = [new.pop(entry.id, entry) for entry in first if entry.id not in gone]
    return (*kept, *new.values())
