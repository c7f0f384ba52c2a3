"""Imports form no circle, and one part alone talks across replicas."""

import ast
import graphlib
from pathlib import Path

import pytest

PACKAGE = "curvadion_jax"
ROOT = Path(__file__).parents[2] / PACKAGE
COLLECTIVES = {
    *("psum", "pmean", "pmax", "pmin", "ppermute", "pshuffle", "pswapaxes", "pcast"),
    *("pvary", "pbroadcast", "psum_scatter", "all_gather", "all_gather_invariant"),
    *("all_to_all", "ragged_all_to_all", "axis_index", "axis_size"),
}
# Communication between replicas, and between the devices of one.
TALKING = {"mesh._group", "mesh._within_replica", "matrices._whole_matrices"}
MATHS = {"matrices._orthonormalize", "matrices._power_iteration", "_matrix_view"}
# What enters a `shard_map`: over the replicas, and over the devices of one.
ENTERING = {"mesh._rows", "mesh._within_replica", "matrices._whole_matrices"}
# What users call around training; nothing that computes a step knows of it.
OUTER = {"replicas", "checkpoint", "methods", "presets", "sites"}


def module_name(path: Path) -> str:
    """`curvadion_jax/replicas/_step.py` -> `replicas._step`, packages by their name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


SOURCES = {module_name(path): path.read_text() for path in ROOT.rglob("*.py")}


def room(name: str) -> str:
    return name.split(".")[0]


def imported(source: str) -> set[str]:
    """Full names of what a file imports, `from a import b` as `a.b`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_modules(source: str) -> set[str]:
    """Modules of this package that a file imports, or imports names from."""
    found = set()
    for name in imported(source):
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            rest = name[len(PACKAGE) + 1 :]
            while rest and rest not in SOURCES:
                rest = rest.rpartition(".")[0]
            found.add(rest)
    return found


def collectives(source: str) -> set[str]:
    """Collectives that a file uses, as `lax.psum` or imported by name.

    What it does through the `Group` that it was given is not its own doing.
    """
    used = {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "group"
    }
    used |= {name.rpartition(".")[2] for name in imported(source)}
    return used & COLLECTIVES


@pytest.mark.parametrize("name", [x for x in SOURCES if x not in TALKING])
def test_the_talking_parts_alone_use_collectives(name):
    assert collectives(SOURCES[name]) == set()


@pytest.mark.parametrize("name", sorted(MATHS))
def test_pure_mathematics_knows_no_optimizer_axis_or_layout(name):
    assert own_modules(SOURCES[name]) <= MATHS
    assert not any(x.startswith("optax") for x in imported(SOURCES[name]))


@pytest.mark.parametrize("name", [x for x in SOURCES if x and room(x) not in OUTER])
def test_the_core_knows_nothing_around_it(name):
    found = {room(module) for module in own_modules(SOURCES[name])}
    assert not found & OUTER
    assert "" not in found  # not the package itself, whose import brings all of it


@pytest.mark.parametrize("of", [str, room], ids=["files", "folders"])
def test_imports_form_no_circle(of):
    graph = {}
    for name, source in SOURCES.items():
        if name:
            others = {of(x) for x in own_modules(source)} - {of(name)}
            graph[of(name)] = graph.get(of(name), set()) | others
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", SOURCES)
def test_no_private_optax_and_three_parts_alone_enter_a_shard_map(name):
    assert "optax._src" not in SOURCES[name]
    nodes = [x for x in ast.walk(ast.parse(SOURCES[name])) if isinstance(x, ast.Call)]
    called = {ast.unparse(call.func).rpartition(".")[2] for call in nodes}
    assert ("shard_map" in called) == (name in ENTERING)
