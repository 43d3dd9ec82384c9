"""Data with provenance: sets that ship inside packages, and the user's own files.

`read` takes every source and gives a `DataSet`, whose `Format` says how its rows become the numbers
that a model sees, and back. `read_text` does so for text, with a `Tokenizer`.
"""

from __future__ import annotations

from fluvial.data.animals import animals
from fluvial.data.dataset import DataSet
from fluvial.data.digits import digits
from fluvial.data.format import Format
from fluvial.data.images import scaled, to_uint8
from fluvial.data.read import SETS, read
from fluvial.data.text import read_text
from fluvial.data.tokenizer import Tokenizer

__all__ = [
    "SETS",
    "DataSet",
    "Format",
    "Tokenizer",
    "animals",
    "digits",
    "read",
    "read_text",
    "scaled",
    "to_uint8",
]
