"""State with a leading replica axis: made, and kept in the hosts' memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _memory, _paths
from curvadion_jax.replicas._mesh import AXIS, check_axis
from curvadion_jax.replicas._start import check_start


def replicate(tree: Any, mesh: Mesh, *, axis_name: str = AXIS) -> Any:
    """The same state on every replica: gives every array a leading replica axis.

    A PRNG key is the same on every replica as well. For noise of its own a replica
    folds its number in: ``jax.random.fold_in(key, jax.lax.axis_index("replica"))``.

    Args:
      tree: any tree of arrays and numbers, such as a whole Flax `TrainState`.
      mesh: mesh with the replica axis.
      axis_name: name of the replica axis.

    Returns:
      The tree with leaves [replicas, ...], sharded over the replica axis; an array that
      is sharded over other axes of this mesh, of either type, stays so within each
      replica. One that was put elsewhere, as a restored one, is copied.

    Raises:
      TypeError: if a leaf is neither an array nor a number, or the mesh is none.
      ValueError: if the mesh has no such axis, an array is divided over it already, or
        the parameters in the tree are not those that the optimizer in it was
        initialised with (see :func:`reanchor`).

    Example:
      >>> from curvadion_jax.replicas import make_mesh
      >>> replicate({"w": jnp.ones(3)}, make_mesh(1))["w"].shape
      (1, 3)
    """
    check_axis(mesh, axis_name)
    number = mesh.shape[axis_name]

    def strong(path, x):
        # A weakly typed number would change its type on the first step.
        if not isinstance(x, jax.Array):
            if not isinstance(x, np.ndarray | np.generic | int | float | complex):
                raise TypeError(
                    f"the state{jax.tree_util.keystr(path)} is {x!r}, and a state is "
                    "made of arrays and numbers: keep all else out of it"
                )
            return jnp.asarray(x, jnp.result_type(x))
        weak = getattr(jax.typeof(x), "weak_type", False)  # a key has no such type
        return lax.convert_element_type(x, x.dtype) if weak else x

    def sharding(x):
        within = getattr(x, "sharding", None)
        if isinstance(within, NamedSharding) and within.mesh == mesh:
            return NamedSharding(mesh, P(axis_name, *within.spec))
        return NamedSharding(mesh, P(axis_name))

    def broadcast(tree):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *x.shape)), tree)

    tree = jax.tree.map(lambda x: _on_mesh(x, mesh, axis_name), tree)
    tree = jax.tree.map_with_path(strong, tree)
    check_start(tree, has_axis=False)
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
            f"an array of shape {x.shape} is divided over {axis_name!r} already: give "
            "replicate the state of one replica, once"
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


def offload(state: Any) -> Any:
    """Keeps what only syncs touch in the hosts' memory, such as the anchor.

    A sync copies it to the device and back; local steps do not touch it, and the device
    has that much less to hold in between.
    Every step keeps it where it is, and so do `curvadion_jax.checkpoint.save` and
    `restore`, given a target that was offloaded. The numbers are the same. (On CPU the
    two kinds are one memory.)

    Args:
      state: what :func:`replicate` returned: a training state with an optimizer state
        of `adaptive_sync`, `curvadion` or another optimizer made of it, nnx's included.
        It is left as it is: drop it to free the device's memory.

    Returns:
      The state with the arrays of `sync_state` in memory of the kind `pinned_host`,
      divided over the replicas as before.

    Raises:
      TypeError: if one of these arrays is not on devices yet.
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
    if not any(_at_syncs_only(names) for names, _ in leaves):
        raise ValueError(
            "there is nothing to keep in host memory: the state holds no array of a "
            "synchronizer. Give the state of an optimizer that keeps some between "
            "syncs, such as curvadion's or diloco's"
        )
    moved = [
        _memory.to_host("/".join(names), leaf) if _at_syncs_only(names) else leaf
        for names, leaf in leaves
    ]
    return jax.tree.unflatten(jax.tree.structure(state), moved)


def _at_syncs_only(names: tuple[str, ...]) -> bool:
    """By name and not by type: `flax.nnx.split` makes dictionaries of named tuples."""
    return "sync_state" in names[:-1]
