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
    "square": (128, 128),
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
    return cd.adaptive_sync(
        cd.dion(0.01, rank), triggers.every_k(2), synchronizer, AXIS
    )


OPTIMIZERS = {
    "synchronous_dion": lambda: cd.presets.synchronous_dion(
        0.01, rank=RANK, axis_name=AXIS
    ),
    "curvadion": lambda: cd.curvadion(0.01, 0.3, RANK, axis_name=AXIS),
    "everything": lambda: reconciling(reconcile()),
    "factors": lambda: reconciling(synchronizers.average_factors()),
    "local_muon": lambda: cd.local_muon(0.01, budget=0.05, axis_name=AXIS),
}


# On 2x2x2 rows and columns are sharded, and on the others one of them.
CASES = [
    *((name, "2x2x2") for name in OPTIMIZERS),
    *[("curvadion", "4x2"), ("synchronous_dion", "2x4"), ("everything", "1x2")],
]


def mesh_of(name: str):
    number, inner = MESHES[name]
    return cd.replicas.make_mesh(number, inner)


def make_state(tx, mesh, dtype=np.float32):
    """(Parameters, optimizer state) of all replicas, parameters as `divided`."""
    rng = np.random.default_rng(0)
    inner = set(mesh.axis_names) - {AXIS}
    params = {
        name: jax.device_put(
            rng.normal(size=shape).astype(dtype),
            NamedSharding(mesh, divided(name, inner)),
        )
        for name, shape in SHAPES.items()
    }
    return cd.replicas.replicate((params, tx.init(params)), mesh)


def make_gradients(mesh, seed=1):
    rng = np.random.default_rng(seed)
    number, inner = mesh.shape[AXIS], set(mesh.axis_names) - {AXIS}
    return {
        name: jax.device_put(
            rng.normal(size=(number, *shape)).astype(np.float32),
            NamedSharding(mesh, PartitionSpec(AXIS, *divided(name, inner))),
        )
        for name, shape in SHAPES.items()
    }


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
    tx = OPTIMIZERS[name]()
    state = make_state(tx, mesh)
    step = helpers.replica_step(tx, mesh)
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
