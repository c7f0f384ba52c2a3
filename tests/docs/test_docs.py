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
    modules = [getattr(cd, name) for name in cd.__all__]
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in [cd, *(x for x in modules if isinstance(x, ModuleType))]
        for name in _public_names(module)
    }


PUBLIC = _public()


@pytest.mark.slow
def test_every_public_name_has_an_anchor_in_the_site(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    build = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr
    anchors = set()
    for page in tmp_path.glob("html/**/*.html"):
        anchors.update(re.findall(r'\bid="([^"]+)"', page.read_text("utf-8")))
    expected = {
        f"module-{value.__name__}" if isinstance(value, ModuleType) else path
        for path, value in PUBLIC.items()
    }
    assert expected - anchors == set()


def test_examples_on_the_pages_run():
    results = [
        doctest.testfile(str(page), module_relative=False)
        for page in sorted((DOCS / "api").glob("*.rst"))
    ]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0
