"""Imports point downward, and one part alone talks across replicas."""

import ast
import graphlib
from pathlib import Path

import pytest

PACKAGE = "curvadion_jax"
ROOT = Path(__file__).parents[2] / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))
COLLECTIVES = {
    *("psum", "pmean", "pmax", "pmin", "ppermute", "pshuffle", "pswapaxes", "pcast"),
    *("pvary", "pbroadcast", "psum_scatter", "all_gather", "all_gather_invariant"),
    *("all_to_all", "ragged_all_to_all", "axis_index", "axis_size"),
}
# Communication between replicas, and between the devices of one.
TALKING = ("_collectives", "_within_replica")
MATHS = {"_orthonormalize", "_power_iteration", "_matrices"}
# The rooms of the house from the ground up: nobody imports what stands above.
LEVELS = [
    {
        "_axis_types",
        "_closures",
        "_matrices",
        "_orthonormalize",
        "_paths",
        "_finite",
        "_payload",
        "_layout",
        "_version",
    },
    {"_arguments", "_digests", "_memory", "_placement", "_power_iteration", "_trees"},
    {"_partition", "_protocols", "_within_replica"},
    {"_collectives", "_dion", "_muon"},
    {"_guards", "_jaxprs", "_local_step", "_momentum", "_counters", "_xla"},
    {"compressors", "triggers"},
    {"_schedule"},
    {"_faults", "_mapped", "_requests", "synchronizers"},
    {"_branches"},
    {"_adaptive_sync"},
    {"_local_muon"},
    {"_curvadion", "presets"},
    {"metrics"},
    {"replicas"},
    {"checkpoint", "sites"},
]
# What users call around training; nothing that computes a step knows of it.
OUTER = {"replicas", "checkpoint", "metrics", "presets", "sites"}


def module_name(path: Path) -> str:
    """`curvadion_jax/triggers/_base.py` -> `triggers._base`, packages by their name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


NAMES = {module_name(path): path for path in FILES}


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
            while rest and rest not in NAMES:
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
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) not in ("_collectives", "group")
    }
    used |= {name.rpartition(".")[2] for name in imported(source)}
    return used & COLLECTIVES


def switched_off(source: str) -> bool:
    """Whether a file passes check_vma=False."""
    return any(
        isinstance(node, ast.keyword)
        and node.arg == "check_vma"
        and isinstance(node.value, ast.Constant)
        and node.value.value is False
        for node in ast.walk(ast.parse(source))
    )


def test_the_readers_see_what_they_look_for():
    source = (
        "import jax.lax\nfrom jax.lax import pmean\n"
        "from curvadion_jax import replicas\n"
        "from curvadion_jax.triggers._base import Trigger\n"
        "f = jax.shard_map(g, check_vma=False)\nx = jax.lax.psum(1, 'i')\n"
    )
    assert imported(source) >= {"jax.lax", "jax.lax.pmean", "curvadion_jax.replicas"}
    assert own_modules(source) == {"replicas", "triggers._base"}
    assert collectives(source) == {"psum", "pmean"}
    assert collectives("n = _collectives.axis_size('i')") == set()
    assert switched_off(source)
    assert not switched_off("f = jax.shard_map(g, check_vma=True)")
    assert {"", "_collectives", "triggers", "triggers._base", "replicas"} <= set(NAMES)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if not name.startswith(TALKING)]
)
def test_two_parts_alone_use_collectives(name):
    assert collectives(NAMES[name].read_text()) == set()


@pytest.mark.parametrize("name", sorted(MATHS))
def test_pure_mathematics_knows_no_optimizer_axis_or_layout(name):
    source = NAMES[name].read_text()
    assert own_modules(source) <= MATHS
    assert not any(module.startswith("optax") for module in imported(source))


def test_dion_stands_alone():
    """For one replica; replicas and devices come in through arguments."""
    found = {name.split(".")[0] for name in reached("_dion")}
    assert not found & {"_collectives", "_within_replica", "_protocols", "_guards"}


def reached(name: str) -> set[str]:
    """All modules of this package that one imports, directly or not."""
    found, waiting = set(), [name]
    while waiting:
        for other in own_modules(NAMES[waiting.pop()].read_text()) - found:
            found.add(other)
            waiting.append(other)
    return found


def test_every_room_has_a_level():
    rooms = {name.split(".")[0] for name in NAMES} - {"", "__main__"}
    assert rooms == set().union(*LEVELS)


@pytest.mark.parametrize("name", [name for name in NAMES if name])
def test_imports_point_downward(name):
    room = name.split(".")[0]
    (level,) = [i for i, rooms in enumerate(LEVELS) if room in rooms]
    allowed = set().union(*LEVELS[:level]) | {room} | LEVELS[level]
    found = {module.split(".")[0] for module in own_modules(NAMES[name].read_text())}
    assert found <= allowed


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name.startswith("triggers")]
)
def test_triggers_know_no_axis_and_no_synchronizer(name):
    found = own_modules(NAMES[name].read_text())
    assert not any(x.startswith(("_collectives", "synchronizers")) for x in found)


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name and name.split(".")[0] not in OUTER]
)
def test_the_core_knows_nothing_around_it(name):
    found = {module.split(".")[0] for module in own_modules(NAMES[name].read_text())}
    assert not found & OUTER
    assert "" not in found  # not the package itself, whose import brings all of it


def test_imports_form_no_circle():
    graph = {
        name: own_modules(path.read_text()) - {name}
        for name, path in NAMES.items()
        if name
    }
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", NAMES)
def test_no_private_optax_and_no_unchecked_shard_map(name):
    source = NAMES[name].read_text()
    assert not any(module.startswith("optax._src") for module in imported(source))
    assert "optax._src" not in source
    assert not switched_off(source)


@pytest.mark.parametrize("name", NAMES)
def test_no_assert_for_users(name):
    nodes = ast.walk(ast.parse(NAMES[name].read_text()))
    assert not [node.lineno for node in nodes if isinstance(node, ast.Assert)]
