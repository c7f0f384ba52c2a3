"""State with a leading replica axis: made, averaged, and kept in host memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _memory, _paths
from curvadion_jax.replicas._mesh import AXIS, check_axis
from curvadion_jax.replicas._placed import check_unshared, count_replicas


def replicate(tree: Any, mesh: Mesh, *, axis_name: str = AXIS) -> Any:
    """The same state on every replica: gives every array a leading replica axis.

    A PRNG key is the same on every replica as well. For noise of its own a replica
    folds its number in: ``jax.random.fold_in(key, jax.lax.axis_index("replica"))``.

    Args:
      tree: any tree of arrays and numbers, such as a whole Flax `TrainState`.
      mesh: mesh with the replica axis.
      axis_name: name of the replica axis.

    Returns:
      The tree with leaves [replicas, ...], sharded over the replica axis. An array that
      is sharded over other axes of this mesh stays so within each replica; one that
      lies elsewhere, such as a restored array, is copied.

    Raises:
      ValueError: if the mesh has no such axis, an array is sharded over it already, or
        an nnx variable is shared (give ``nnx.split(model)[1]``).

    Example:
      >>> from curvadion_jax.replicas import make_mesh
      >>> replicate({"w": jnp.ones(3)}, make_mesh(1))["w"].shape
      (1, 3)
    """
    check_axis(mesh, axis_name)
    check_unshared(tree)
    number = mesh.shape[axis_name]

    def strong(x):
        # A weakly typed number would change its type on the first step.
        if not isinstance(x, jax.Array):
            return jnp.asarray(x, jnp.result_type(x))
        weak = getattr(jax.typeof(x), "weak_type", False)  # A key has no such type.
        return lax.convert_element_type(x, x.dtype) if weak else x

    def sharding(x):
        within = getattr(x, "sharding", None)
        if isinstance(within, NamedSharding) and within.mesh == mesh:
            return NamedSharding(mesh, P(axis_name, *within.spec))
        return NamedSharding(mesh, P(axis_name))

    def broadcast(tree):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *x.shape)), tree)

    tree = jax.tree.map(lambda x: strong(_on_mesh(x, mesh, axis_name)), tree)
    return jax.jit(broadcast, out_shardings=jax.tree.map(sharding, tree))(tree)


def _on_mesh(x: Any, mesh: Mesh, axis_name: str) -> Any:
    """An array of one replica on this mesh, wherever it was put before.

    Checkpoints are restored to one device, and Flax (0.12.8) makes models on meshes of
    one type of axes alone.
    """
    sharding = getattr(x, "sharding", None)
    named = sharding if isinstance(sharding, NamedSharding) else None
    spec = named.spec if named else P()
    axes = jax.tree.leaves(tuple(spec))
    if axis_name in axes:
        raise ValueError(
            f"An array of shape {x.shape} is sharded over {axis_name!r} already. Give "
            "replicate the state of one replica, once."
        )
    if sharding is None or not x.committed:
        return x
    if named and any(mesh.shape.get(a) != named.mesh.shape[a] for a in axes):
        spec = P()
    if x.is_fully_addressable and mesh.is_multi_process:
        return _on_host(x)
    return jax.device_put(x, NamedSharding(mesh, spec))


def _on_host(x: jax.Array) -> Any:
    """The value, which every process has: arrays of one are not put on all."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jnp.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return np.asarray(x)


def consensus(params: Any) -> Any:
    """The one model, to evaluate, export and keep: the mean over the replicas.

    Costs a full all-reduce. The last common point, :func:`anchor`, costs nothing.

    Args:
      params: parameters with a leading replica axis, or other state of this kind.

    Returns:
      The tree without the replica axis. Means are taken in at least float32, and of
      integers and keys the first replica's value.

    Raises:
      ValueError: if leaves have no common leading axis, or an nnx variable is shared.

    Example:
      >>> consensus({"w": jnp.array([[1.0], [3.0]])})["w"].tolist()
      [2.0]
    """
    count_replicas(params, "parameters")
    check_unshared(params)
    return _mean(params)


@jax.jit
def _mean(params: Any) -> Any:
    def mean(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[0]
        return jnp.mean(x.astype(jnp.promote_types(x, jnp.float32)), 0).astype(x.dtype)

    return jax.tree.map(mean, _memory.to_device(params))


def divergence(params: Any) -> jax.Array:
    """How far apart the replicas are, relative to the size of the parameters.

    Right after a sync it is rounding, below 1e-6 in float32. If it stays larger,
    something moves parameters after the optimizer, such as a transformation that
    follows it in `optax.chain`.

    Args:
      params: parameters with a leading replica axis.

    Returns:
      A scalar, the RMS distance of the replicas from their mean, over the RMS of the
      parameters. 0 if all are equal.

    Raises:
      ValueError: if leaves have no common leading axis, or an nnx variable is shared.

    Example:
      >>> apart = divergence({"w": jnp.array([[3.0], [5.0]])})
      >>> print(f"{apart:.4f}")  # 1 / sqrt(17)
      0.2425
    """
    count_replicas(params, "parameters")
    check_unshared(params)
    return _divergence(jax.tree.leaves(params))


@jax.jit
def _divergence(params: list[jax.Array]) -> jax.Array:
    leaves = [
        x.astype(jnp.promote_types(x, jnp.float32))
        for x in _memory.to_device(params)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    ]

    def square(x):
        return jnp.sum(jnp.real(x * jnp.conj(x)))

    # From the first replica, so that equal replicas give exactly zero: the mean of
    # equal numbers may be rounded.
    apart = [x - x[:1] for x in leaves]
    apart = sum(square(x - jnp.mean(x, 0, keepdims=True)) for x in apart)
    size = sum(map(square, leaves))
    return jnp.sqrt(apart / jnp.where(size == 0, 1, size))


def offload(state: Any) -> Any:
    """Keeps what only syncs touch, such as the anchor, in the hosts' memory.

    A sync copies it to the device and back. Steps and checkpoints keep it where it is,
    and the numbers are the same. (On CPU the two kinds are one memory.)

    Args:
      state: what :func:`replicate` returned: a training state, or an optimizer state.
        Drop it afterwards to free the device's memory.

    Returns:
      The state with the arrays of `sync_state` in memory of the kind `pinned_host`,
      sharded as before.

    Raises:
      ValueError: if a device has no such memory, or the state holds no array that
        belongs to a synchronizer.

    Example:
      >>> import curvadion_jax as cd
      >>> params = {"w": jnp.ones((2, 2))}
      >>> mesh = cd.replicas.make_mesh(1)
      >>> state = replicate(cd.curvadion(0.01).init(params), mesh)
      >>> offload(state).sync_state.anchor["w"].sharding.memory_kind
      'pinned_host'
    """
    leaves = _paths.leaves_with_names(state)
    # By name and not by type: `flax.nnx.split` makes dictionaries of named tuples.
    if not any("sync_state" in names[:-1] for names, _ in leaves):
        raise ValueError(
            "The state holds no array of a synchronizer to keep in host memory. Give "
            "the state of an optimizer that keeps some, such as curvadion or diloco."
        )
    moved = [
        _memory.to_host("/".join(names), x) if "sync_state" in names[:-1] else x
        for names, x in leaves
    ]
    return jax.tree.unflatten(jax.tree.structure(state), moved)
