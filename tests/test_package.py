"""The package as it is installed: version, typing marker, imports, entry point."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
import tomllib
from importlib import import_module, metadata
from pathlib import Path

import pytest

import fluvial

ROOT = Path(__file__).parents[1]
MODULES = [m.name for m in pkgutil.walk_packages(fluvial.__path__, "fluvial.")]


def loaded_by(statement: str) -> set[str]:
    """The top-level modules a fresh interpreter holds after the statement."""
    code = f"{statement}; import sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_the_version_is_one_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/fluvial/__init__.py"
    assert metadata.version("fluvial") == fluvial.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (\S+)$", citation, re.MULTILINE)[1] == fluvial.__version__


def test_the_package_is_marked_as_typed():
    assert (Path(fluvial.__file__).parent / "py.typed").is_file()


def test_import_fluvial_is_light():
    loaded = loaded_by("import fluvial, fluvial.catalog")
    assert "fluvial" in loaded
    assert not loaded & {"torch", "numpy", "matplotlib", "scipy", "sklearn", "tyro", "PIL"}


def test_a_core_name_loads_torch_but_no_plotting_or_command_line():
    loaded = loaded_by("from fluvial import KeyedNoise")
    assert "torch" in loaded
    assert not loaded & {"matplotlib", "scipy", "sklearn", "tyro", "PIL"}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported_and_says_what_it_is(name: str):
    module = import_module(name)
    assert module.__doc__ and module.__doc__.strip()


@pytest.mark.parametrize("name", sorted(set(fluvial.__all__) - {"__version__"}))
def test_the_names_of_the_core_can_be_taken_from_fluvial(name: str):
    value = getattr(fluvial, name)
    assert value is getattr(import_module(fluvial._CORE[name]), name)
    assert name in dir(fluvial)


def test_every_lazy_name_is_exported():
    assert set(fluvial.__all__) == {*fluvial._CORE, "__version__"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'fluvial' has no attribute 'nothing'"):
        fluvial.nothing  # noqa: B018


def test_every_module_of_the_reference_exists():
    listed = re.findall(r"automodule:: (\S+)", (ROOT / "docs" / "api.md").read_text())
    assert len(listed) > 15
    assert set(listed) <= set(MODULES)


def test_the_command_line_is_installed():
    (script,) = metadata.entry_points(group="console_scripts", name="fluvial")
    assert script.value == "fluvial.cli:main"
    assert callable(script.load())
