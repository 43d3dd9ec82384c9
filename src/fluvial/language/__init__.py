"""Language: text that is generated, revised and filled in."""

from __future__ import annotations

from fluvial.language.caddi import CaDDi

__all__ = ["CaDDi"]
