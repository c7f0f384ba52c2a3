"""The arrays of a state: with a replica axis, and placed on the mesh."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _layout, _memory, _paths

Placements = tuple[NamedSharding | None, ...]


def is_array(x: Any) -> bool:
    """Whether it is an array on devices."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def count_replicas(tree: Any, what: str) -> int:
    """The length of the replica axis, which all leaves must have."""
    leaves = jax.tree.leaves(tree)
    number = len(leaves[0]) if leaves and np.ndim(leaves[0]) else 1
    check_replica_axis(tree, number, what)
    return number


def check_replica_axis(tree: Any, number: int, what: str) -> None:
    """Rejects a tree with a leaf that lacks the replica axis."""
    for name, leaf in _paths.leaves_with_path(tree):
        if np.shape(leaf)[:1] != (number,):
            raise ValueError(
                f"The {what} {name!r} has shape {np.shape(leaf)}, and needs a leading "
                f"axis of {number} replicas. Give what replicas.replicate or a step "
                "returned."
            )


def check_unshared(tree: Any) -> None:
    """Rejects a tree that holds one variable of Flax nnx at two places."""
    found: dict[int, str] = {}
    for path, node in jax.tree.leaves_with_path(tree, is_leaf=_paths.is_box):
        if not _paths.is_box(node):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if (first := found.setdefault(id(node), name)) != name:
            raise ValueError(
                f"{first!r} and {name!r} are one shared variable, which would become "
                "two. Give the state of the model, nnx.state(model) or "
                "nnx.split(model)[1]."
            )


def placement(leaf: Any, mesh: Mesh, axis_name: str) -> NamedSharding | None:
    """How an array lies on the mesh, over its replicas; None if it does not."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, Tracer) or not isinstance(sharding, NamedSharding):
        return None
    if sharding.mesh != mesh:
        return None
    return sharding.update(spec=P(axis_name, *sharding.spec[1:]))


def within_replica(state: Any, placements: Placements) -> tuple[_layout.Placed, ...]:
    """How the arrays of the state are sharded within a replica."""
    leaves = _paths.leaves_with_path(state)
    return tuple(
        _layout.Placed(name, leaf.shape[1:], P(*placement.spec[1:]))
        for (name, leaf), placement in zip(leaves, placements, strict=True)
        if placement is not None
    )


def on_host(function: Callable[..., Any], *trees: Any) -> Any:
    """What a function of arrays returns, on the host, in every process."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(trees))
    meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding))
    mesh = next(meshes, None)
    replicated = None if mesh is None else NamedSharding(mesh, P())
    compiled = jax.jit(function, out_shardings=replicated)
    return jax.device_get(compiled(*_memory.to_device(trees)))
