"""Packages that may be missing, and files inside installed packages."""

from __future__ import annotations

import gzip
import hashlib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def extra(package: str, name: str, what: str) -> Any:
    """A package that an extra of fluvial installs, imported at its first use.

    Args:
        package: its name.
        name: of the extra.
        what: needs it, for the error message.

    Raises:
        ModuleNotFoundError: the package is not installed; the message says how to.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and misses another one
            raise
        raise ModuleNotFoundError(
            f"{what} need the package {package}; install it with `pip install 'fluvial[{name}]'`",
            name=package,
        ) from error


def read_gzip(package: str, file: str, sha256: str, install: str) -> bytes:
    """The unpacked content of a gzip file inside an installed package, which is not imported.

    Args:
        package: name by which the package would be imported, without dots.
        file: path of the file inside it.
        sha256: hexadecimal digest of the file as it lies there, packed.
        install: the command that installs the package, for the error messages.

    Raises:
        ModuleNotFoundError: the package is not installed.
        FileNotFoundError: it is, without this file.
        ValueError: the file is damaged or of another version: its digest differs.
    """
    # a package is looked up here and not imported: importing one may need what it depends on
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(
            f"the package {package} is not installed; install it with `{install}`", name=package
        )
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / file
        if path.is_file():
            packed = path.read_bytes()
            break
    else:
        raise FileNotFoundError(
            f"the installed package {package} has no file {file}; install it with `{install}`"
        )
    digest = hashlib.sha256(packed).hexdigest()
    if digest != sha256:
        raise ValueError(
            f"{path} is damaged or of another version: its SHA-256 is {digest}, wanted {sha256}; "
            f"install it with `{install}`"
        )
    return gzip.decompress(packed)
