"""The documentation site builds without a warning and covers every public name."""

import doctest
import importlib
import inspect
import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest

import curvadion_jax as cd

DOCS = Path(__file__).parents[2] / "docs"


def public() -> set[str]:
    """Anchors of all modules of the package, and of all that is public in them."""
    modules = [x for x in vars(cd).values() if inspect.ismodule(x)]
    modules = [x for x in modules if x.__name__.split(".")[-1] in cd.__all__]
    found = {f"module-{module.__name__}" for module in modules}
    for module in [cd, *modules]:
        default = [
            name
            for name, x in vars(module).items()
            if not name.startswith("_")
            and getattr(x, "__module__", None) == module.__name__
        ]
        names = getattr(module, "__all__", default)
        found |= {f"{module.__name__}.{x}" for x in names}
    return found - {module.__name__ for module in modules}


def test_the_reference_names_what_is_there():
    for page in (DOCS / "api").glob("*.rst"):
        module = cd
        directives = re.findall(
            r"^\.\. (\w+):: ([\w.]+)", page.read_text(), re.MULTILINE
        )
        for kind, name in directives:
            if kind in ("automodule", "currentmodule"):
                module = importlib.import_module(name)
            elif kind.startswith("auto"):
                where = cd if name.startswith("curvadion_jax.") else module
                operator.attrgetter(name.removeprefix("curvadion_jax."))(where)


def test_the_first_page_of_the_reference_lists_every_function():
    listed = re.findall(r"^   ([\w.]+)$", (DOCS / "api/index.rst").read_text(), re.M)
    modules = {name: x for name, x in vars(cd).items() if inspect.ismodule(x)}
    functions = {
        f"{name}.{each}".removeprefix(".")
        for name in ("", *(modules.keys() & set(cd.__all__)))
        for each in (modules[name] if name else cd).__all__
        if inspect.isfunction(getattr(modules[name] if name else cd, each))
    }
    assert functions - set(listed) == {"triggers.requests"}  # for triggers of your own


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
    assert public() - anchors == set()


def test_examples_on_the_pages_run():
    results = [
        doctest.testfile(str(page), module_relative=False)
        for page in sorted((DOCS / "api").glob("*.rst"))
    ]
    assert sum(result.attempted for result in results) > 0
    assert sum(result.failed for result in results) == 0
