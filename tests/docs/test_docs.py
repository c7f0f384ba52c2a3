"""The documentation site builds without a warning and covers every public name."""

import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import curvadion_jax as cd

DOCS = Path(__file__).parents[2] / "docs"
MODULES = [cd, *(getattr(cd, name) for name in cd.__all__)]
MODULES = [module for module in MODULES if isinstance(module, ModuleType)]


def _public_names(module: ModuleType) -> list[str]:
    """`__all__`, or the functions and classes that a module defines itself."""
    if hasattr(module, "__all__"):
        return module.__all__
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    ]


def _public() -> dict[str, Any]:
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in MODULES
        for name in _public_names(module)
    }


PUBLIC = _public()
# Classes of other libraries under a name of ours have their own docstrings.
OURS = {
    path: value
    for path, value in PUBLIC.items()
    if (inspect.isfunction(value) or inspect.isclass(value))
    and value.__module__.startswith(cd.__name__)
}
RETURNING = [
    path
    for path, value in OURS.items()
    if inspect.isfunction(value)
    and inspect.signature(value).return_annotation is not None
]


def _section(docstring: str, title: str) -> str:
    """The indented lines under `Title:`; empty if there is no such section."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
    return found[1] if found else ""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    build = subprocess.run(
        [*command, "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    return folder / "html"


@pytest.mark.slow
def test_every_public_name_has_an_anchor_in_the_site(site):
    anchors = set()
    for page in site.rglob("*.html"):
        anchors.update(re.findall(r'\bid="([^"]+)"', page.read_text("utf-8")))
    expected = {
        f"module-{value.__name__}" if isinstance(value, ModuleType) else path
        for path, value in PUBLIC.items()
    }
    assert expected - anchors == set()


@pytest.mark.parametrize("path", OURS)
def test_docstring_has_an_example(path):
    assert ">>> " in (OURS[path].__doc__ or "")


@pytest.mark.parametrize("path", OURS)
def test_docstring_names_every_argument(path):
    docstring = inspect.getdoc(OURS[path]) or ""
    section = _section(docstring, "Args")
    if getattr(OURS[path], "_is_protocol", False):
        return  # nobody calls it
    if inspect.isclass(OURS[path]):
        section += _section(docstring, "Attributes")
    missing = [
        name
        for name in inspect.signature(OURS[path]).parameters
        # One line may speak of several arguments.
        if not re.search(
            rf"^  (\w+, )*\*{{0,2}}{name}(, \w+)*: ", section, re.MULTILINE
        )
    ]
    assert missing == []


@pytest.mark.parametrize("path", RETURNING)
def test_docstring_says_what_is_returned(path):
    assert _section(inspect.getdoc(OURS[path]) or "", "Returns")


def test_examples_on_the_pages_run():
    results = [
        doctest.testfile(str(page), module_relative=False)
        for page in sorted((DOCS / "api").glob("*.rst"))
    ]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0
