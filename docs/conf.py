"""Sphinx configuration. Builds without a network, and with every warning an error."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import docstrings  # noqa: E402
import systems  # noqa: E402

import fluvial  # noqa: E402

project = "Fluvial"
author = "The Fluvial authors"
copyright = author
version = release = fluvial.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "generated/table.md"]
default_role = "py:obj"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 2

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "show-inheritance": True,
    # made by scikit-learn, with references into its own documentation
    "exclude-members": "set_fit_request, set_transform_request",
}
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"Fluvial {release}"


def drop_missing_modules(app: Any, name: str, source: list[str]) -> None:
    """Leave modules that are not there out of the reference; a test says that all of them are."""

    def block(match: re.Match[str]) -> str:
        try:
            found = find_spec(match[1]) is not None
        except ModuleNotFoundError:
            found = False
        return match[0] if found else f"`{match[1]}`: not in this version."

    if name == "api":
        source[0] = re.sub(
            r"^```\{eval-rst\}\n\.\. automodule:: (\S+)\n```$", block, source[0], flags=re.MULTILINE
        )


def setup(app: Any) -> None:
    systems.write(HERE / "generated")
    app.connect("source-read", drop_missing_modules)
    app.connect("autodoc-process-docstring", docstrings.process, priority=400)
