"""Data with provenance: sets that ship inside packages, and the user's own files.

`read` takes every source and gives a `DataSet`, whose `Format` says how its rows become the numbers
that a model sees, and back.
"""

from __future__ import annotations

from fluvial.data.animals import animals
from fluvial.data.dataset import DataSet
from fluvial.data.digits import digits
from fluvial.data.format import Format
from fluvial.data.images import scaled, to_uint8
from fluvial.data.read import SETS, read

__all__ = ["SETS", "DataSet", "Format", "animals", "digits", "read", "scaled", "to_uint8"]
