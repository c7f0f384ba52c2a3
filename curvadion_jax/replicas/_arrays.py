"""The arrays of a state: with a replica axis, and placed on the mesh."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _layout, _memory, _paths


def count_replicas(tree: Any, what: str, expected: int | None = None) -> int:
    """Counts the replicas of a tree; rejects a leaf without their axis."""
    check_unshared(tree)
    leaves = _paths.leaves_with_path(tree)
    replicas = expected or next((len(x) for _, x in leaves if np.ndim(x)), 1)
    for name, leaf in leaves:
        if np.shape(leaf)[:1] != (replicas,):
            raise ValueError(
                f"The {what} {name!r} has shape {np.shape(leaf)}, and needs a leading "
                f"axis of {replicas} replicas. Give what replicas.replicate or a step "
                "returned."
            )
    return replicas


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
    """The sharding of an array over the replicas of the mesh; None if it has none."""
    sharding = _layout.named_sharding(leaf)
    if sharding is None or sharding.mesh != mesh:
        return None
    return _over_replicas(sharding, axis_name)


@functools.cache  # for every array on every step
def _over_replicas(sharding: NamedSharding, axis_name: str) -> NamedSharding:
    return sharding.update(spec=P(axis_name, *sharding.spec[1:]))


def within_replica(
    state: Any, placements: Sequence[NamedSharding | None]
) -> tuple[_layout.Placed, ...]:
    """The shardings of a state's arrays within a replica."""
    leaves = _paths.leaves_with_path(state)
    return tuple(
        _layout.Placed(name, leaf.shape[1:], P(*placement.spec[1:]))
        for (name, leaf), placement in zip(leaves, placements, strict=True)
        if placement is not None
    )


def differ(x: jax.Array, other: jax.Array) -> jax.Array:
    """Whether any element differs; NaN equals NaN."""
    return jnp.any((x != other) & ~(jnp.isnan(x) & jnp.isnan(other)))


def on_host(function: Callable[..., Any], *trees: Any) -> Any:
    """Calls a jitted function, and copies its results to the host in every process."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(trees))
    meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding))
    mesh = next(meshes, None)
    replicated = None if mesh is None else NamedSharding(mesh, P())
    compiled = jax.jit(function, out_shardings=replicated)
    return jax.device_get(compiled(*_memory.to_device(trees)))
