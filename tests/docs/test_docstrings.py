"""Every public function says what it takes, returns and raises, and has an example."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator

import pytest

import curvadion_jax as cd

MODULES = [
    importlib.import_module(f"{cd.__name__}.{name}")
    for name in cd.__all__
    if inspect.ismodule(getattr(cd, name))
]
FUNCTIONS = {
    f"{module.__name__.removeprefix('curvadion_jax').lstrip('.')}.{name}".lstrip(
        "."
    ): function
    for module in (cd, *MODULES)
    for name in module.__all__
    if inspect.isfunction(function := getattr(module, name))
}
# Longest signature that `help` may begin with: Optax's own types alone take 240
# characters each where they are written out.
LONGEST_SIGNATURE = 800


def sections(function) -> dict[str, str]:
    """The text of each section of a docstring, by its heading."""
    parts = re.split(r"^(\w+):\n", inspect.getdoc(function) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def described(text: str) -> set[str]:
    """The arguments that a section Args has an entry for: `b1, b2: ...` has two."""
    entries = re.findall(r"^  ((?:\*{0,2}\w+(?:, )?)+):", text, flags=re.MULTILINE)
    return {name.lstrip("*") for entry in entries for name in entry.split(", ")}


def may_raise(function) -> Iterator[ast.AST]:
    """What raises in the source of a function: a statement, or a check by name."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Raise):
            yield node
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")[-1]
            if called.lstrip("_").startswith("check_"):
                yield node


def test_all_modules_have_a_list_of_names():
    assert [m.__name__ for m in MODULES if not hasattr(m, "__all__")] == []
    assert len(FUNCTIONS) >= 45


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_has_every_argument_the_result_the_errors_and_an_example(name):
    function = FUNCTIONS[name]
    found, signature = sections(function), inspect.signature(function)
    assert described(found.get("Args", "")) == set(signature.parameters)
    assert ("Returns" in found) == (signature.return_annotation not in (None, "None"))
    if any(may_raise(function)):
        assert re.match(r"\s+\w+(Error|, )", found.get("Raises", ""))
    assert ">>> " in found.get("Example", "")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_begins_with_types_by_their_names(name):
    signature = str(inspect.signature(FUNCTIONS[name]))
    assert len(signature) <= LONGEST_SIGNATURE
    assert "Union[" not in signature


def test_the_recommended_function_sends_nobody_to_another_one():
    found = sections(cd.local_muon)
    assert "as for" not in found["Args"]
