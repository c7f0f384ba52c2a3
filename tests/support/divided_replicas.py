"""Replicas of several devices: parameters, optimizers and meshes of the tests."""

import functools
import math
from typing import Any

import chex
import helpers
import hlo
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS = cd.replicas.AXIS
RANK = 2
reconcile = synchronizers.reconcile
SHAPES = {
    "down": (192, 128),
    "embed": (256, 128),
    "scale": (128,),
    "out": (128, 128),
    "stack": (4, 128, 192),
    "up": (128, 192),
}


# Replicas, and axes inside each.
MESHES = {
    "2x2x2": (2, {"fsdp": 2, "tensor": 2}),
    "4x2": (4, {"fsdp": 2}),
    "2x4": (2, {"tensor": 4}),
    "1x2": (1, {"fsdp": 2}),
}


def divided(name: str, inner: Any) -> PartitionSpec:
    """Rows over fsdp and columns over tensor, as far as there are such axes."""
    rows, columns = (axis if axis in inner else None for axis in ("fsdp", "tensor"))
    if name == "down":  # as in Megatron: what is split by columns goes in by rows
        rows, columns = columns, rows
    return {
        "scale": PartitionSpec(columns),
        "stack": PartitionSpec(None, rows, columns),
    }.get(name, PartitionSpec(rows, columns))


def reconciling(synchronizer, rank=RANK):
    """Dion, and what `adaptive_sync` is given besides."""
    return lambda **where: cd.adaptive_sync(
        cd.dion(0.01, rank=rank, dimension_numbers=helpers.matrices),
        triggers.every_k(2),
        synchronizer,
        **where,
    )


MATRICES: Any = {"dimension_numbers": helpers.matrices}
# Of a mesh and specs.
OPTIMIZERS: dict[str, Any] = {
    "synchronous_dion": functools.partial(
        cd.presets.synchronous_dion, 0.01, rank=RANK, **MATRICES
    ),
    "curvadion": functools.partial(
        cd.curvadion, 0.01, threshold=0.3, rank=RANK, **MATRICES
    ),
    "everything": reconciling(reconcile()),
    "factors": reconciling(synchronizers.average_factors(helpers.matrices)),
    "local_muon": functools.partial(cd.local_muon, 0.01, budget=0.05, **MATRICES),
}


# On 2x2x2 rows and columns are sharded, and on the others one of them.
CASES = [
    *((name, "2x2x2") for name in OPTIMIZERS),
    *[("curvadion", "4x2"), ("synchronous_dion", "2x4"), ("everything", "1x2")],
]


def mesh_of(name: str):
    number, inner = MESHES[name]
    return cd.replicas.make_mesh(number, inner)


def specs_of(mesh) -> Any:
    """How a replica's parameters are sharded over its devices; None on one device."""
    inner = _inner(mesh)
    return {name: divided(name, inner) for name in SHAPES} if inner else None


def _inner(mesh) -> set[str]:
    return set(getattr(mesh, "axis_names", ())) - {AXIS}


def make_optimizer(name: str, mesh):
    return OPTIMIZERS[name](mesh=mesh, specs=specs_of(mesh))


def make_state(tx, mesh, dtype=np.float32):
    """(Parameters, optimizer state) of all replicas, parameters as `divided`."""
    rng, specs = np.random.default_rng(0), specs_of(mesh)
    params = {x: rng.normal(size=SHAPES[x]).astype(dtype) for x in SHAPES}
    if specs:
        params = {x: put(params[x], mesh, specs[x]) for x in SHAPES}
    return helpers.start(tx, params, mesh)


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def make_gradients(mesh, seed=1):
    """Gradients of all replicas, which lie as their parameters do."""
    rng, specs = np.random.default_rng(seed), specs_of(mesh)
    number = mesh.replicas if hasattr(mesh, "replicas") else mesh.shape[AXIS]
    found = {}
    for name, shape in SHAPES.items():
        found[name] = rng.normal(size=(number, *shape)).astype(np.float32)
        if specs:
            found[name] = put(found[name], mesh, PartitionSpec(AXIS, *specs[name]))
    return found


def moved_inside(program: hlo.Program, mesh) -> list[hlo.Instruction]:
    """Collectives in which several devices of a replica take part, of all steps."""
    devices = mesh.size // mesh.shape[AXIS]
    found = program.collectives([*program.computations])
    return [each for each in found if each.joins(devices)]


def largest(instructions) -> int:
    """Elements of the largest array that they send or receive.

    An all-to-all or a permutation has an array in several parts.
    """
    sizes = [0]
    for each in instructions:
        parts = [math.prod(shape) for _, shape in each.arrays]
        whole = each.opcode.startswith(("all-to-all", "collective-permute"))
        sizes.append(sum(parts) if whole else max(parts))
    return max(sizes)


def least_part(mesh) -> int:
    """Elements of the smallest part of a matrix that a device holds."""
    devices = mesh.size // mesh.shape[AXIS]
    sizes = [math.prod(shape) for shape in SHAPES.values() if len(shape) > 1]
    return min(sizes) // devices


@functools.cache
def prepare(name: str, mesh):
    """A compiled step, and a state to start from."""
    tx = make_optimizer(name, mesh)
    state = make_state(tx, mesh)
    step = jax.jit(helpers.train_step(tx))
    return helpers.quick(step, state, make_gradients(mesh)), state


def assert_as_before(state, before):
    """Shapes, dtypes, and where every array lies."""
    chex.assert_trees_all_equal_shapes_and_dtypes(state, before)
    pairs = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(before), strict=True)
    for (path, x), old in pairs:
        name = jax.tree_util.keystr(path)
        assert x.sharding.is_equivalent_to(old.sharding, x.ndim), name


@functools.cache
def run(name: str, mesh, steps: int = 4):
    """Parameters after some steps, and before; the state stays divided as it was."""
    step, state = prepare(name, mesh)
    before = state
    for index in range(steps):
        state, _ = step(state, make_gradients(mesh, seed=index))
    assert_as_before(state, before)
    return jax.device_get((state[0], before[0]))
