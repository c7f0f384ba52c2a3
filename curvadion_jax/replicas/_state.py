"""Makes state with a leading replica axis, and keeps some of it in host memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _counters, _memory, _paths
from curvadion_jax.replicas._arrays import check_unshared
from curvadion_jax.replicas._mesh import AXIS, check_mesh


def replicate(tree: Any, mesh: Mesh, *, axis_name: str = AXIS) -> Any:
    """Copies a state to every replica: gives every array a leading replica axis.

    Args:
      tree: any tree of arrays and numbers, such as a whole Flax `TrainState`.
      mesh: mesh with the replica axis.
      axis_name: name of the replica axis.

    Returns:
      The tree with leaves [replicas, ...], sharded over the replica axis. An array that
      is sharded over other axes of this mesh stays so within each replica; one that
      lies elsewhere, such as a restored array, is copied.

    Raises:
      ValueError: if an array is sharded over the axis already, or an nnx variable is
        shared (give ``nnx.split(model)[1]``).

    Example:
      >>> from curvadion_jax.replicas import make_mesh
      >>> replicate({"w": jnp.ones(3)}, make_mesh(1))["w"].shape
      (1, 3)
    """
    check_mesh(mesh, axis_name)
    check_unshared(tree)
    replicas = mesh.shape[axis_name]

    def broadcast(x):
        x = jnp.broadcast_to(x, (replicas, *jnp.shape(x)))
        # A weakly typed number would change its type on the first step.
        return jnp.asarray(x, x.dtype)

    def sharding(x):
        inner = getattr(x, "sharding", None)
        if isinstance(inner, NamedSharding) and inner.mesh == mesh:
            return NamedSharding(mesh, P(axis_name, *inner.spec))
        return NamedSharding(mesh, P(axis_name))

    tree = jax.tree.map(lambda x: _on_mesh(x, mesh, axis_name), tree)
    copy = jax.jit(
        lambda tree: jax.tree.map(broadcast, tree),
        out_shardings=jax.tree.map(sharding, tree),
    )
    return copy(tree)


def _on_mesh(x: Any, mesh: Mesh, axis_name: str) -> Any:
    """Moves an array of one replica to this mesh.

    Checkpoints are restored to one device, and Flax (0.12.8) wants one type of axes.
    """
    sharding = getattr(x, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else P()
    axes = jax.tree.leaves(tuple(spec))
    if axis_name in axes:
        raise ValueError(
            f"An array of shape {x.shape} is sharded over {axis_name!r} already. Give "
            "replicate the state of one replica, once."
        )
    if sharding is None or not x.committed:
        return x
    if any(mesh.shape.get(axis) != sharding.mesh.shape[axis] for axis in axes):
        spec = P()
    if x.is_fully_addressable and mesh.is_multi_process:
        # `device_put` takes no arrays of one process. Every process has the value.
        place = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(x.shape, place, lambda index: x[index])
    return jax.device_put(x, NamedSharding(mesh, spec))


def offload(state: Any) -> Any:
    """Moves what only syncs touch, such as the anchor, to the hosts' memory.

    A sync copies it to the device and back. Steps and checkpoints leave it there, and
    the numbers are the same.

    Args:
      state: a training or optimizer state that :func:`replicate` returned. Drop it
        afterwards to free the device's memory.

    Returns:
      The state with the arrays of `sync_state` in `pinned_host`, sharded as before.

    Raises:
      ValueError: if a device has no such memory.

    Example:
      >>> import curvadion_jax as cd
      >>> state = cd.curvadion(0.01).init({"w": jnp.ones((2, 2))})
      >>> state = offload(replicate(state, cd.replicas.make_mesh(1)))
      >>> state.sync_state.anchor["w"].sharding.memory_kind
      'pinned_host'
    """
    leaves = _paths.leaves_with_names(state)
    optimizers = _counters.optimizer_paths(state)
    moved = [
        jax.device_put(x, x.sharding.with_memory_kind(_memory.HOST_KIND))
        if _counters.is_within(names, optimizers, "sync_state")
        else x
        for names, x in leaves
    ]
    return jax.tree.unflatten(jax.tree.structure(state), moved)
