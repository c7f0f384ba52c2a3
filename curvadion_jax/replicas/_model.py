"""The consensus, the anchor and the divergence of all replicas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _counters, _layout, _memory, _paths, _trees
from curvadion_jax.replicas._arrays import count_replicas, differ, on_host


def consensus(params: Any) -> Any:
    """The mean over the replicas: the model to evaluate and export.

    Costs a full all-reduce.

    Args:
      params: parameters with a leading replica axis, or other state of this kind.

    Returns:
      The tree without the replica axis. Means are taken in at least float32, and of
      integers and keys the first replica's value.

    Example:
      >>> consensus({"w": jnp.array([[1.0], [3.0]])})["w"].tolist()
      [2.0]
    """
    count_replicas(params, "parameters")

    def place(x):
        sharding = _layout.named_sharding(x)
        return sharding and NamedSharding(sharding.mesh, P(*sharding.spec[1:]))

    # Left to XLA, arrays of one replica lie divided over the axis of replicas.
    places = jax.tree.map(place, params)
    return jax.jit(_mean, out_shardings=places)(params)


def _mean(params: Any) -> Any:
    def mean(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[0]
        return jnp.mean(_trees.wide(x), 0).astype(x.dtype)

    return jax.tree.map(mean, _memory.to_device(params))


def divergence(params: Any) -> jax.Array:
    """Measures how far apart the replicas are, relative to the parameters.

    Right after a sync this is rounding, below 1e-6 in float32.

    Args:
      params: parameters with a leading replica axis.

    Returns:
      float32[], the replicas' RMS distance from their mean, over the parameters' RMS.

    Example:
      >>> spread = divergence({"w": jnp.array([[3.0], [5.0]])})
      >>> print(f"{spread:.4f}")  # 1 / sqrt(17)
      0.2425
    """
    count_replicas(params, "parameters")
    return _divergence(jax.tree.leaves(params))


@jax.jit
def _divergence(params: list[jax.Array]) -> jax.Array:
    floating = [x for x in params if jnp.issubdtype(x.dtype, jnp.floating)]
    leaves = [_trees.wide(x) for x in _memory.to_device(floating)]
    # From the first replica: the mean of equal numbers may be rounded.
    distances = [x - x[:1] for x in leaves]
    spread = sum(jnp.sum((x - jnp.mean(x, 0, keepdims=True)) ** 2) for x in distances)
    size = sum(jnp.sum(x**2) for x in leaves)
    return jnp.sqrt(spread / jnp.where(size == 0, 1, size))


def anchor(opt_state: Any) -> Any:
    """The parameters that all replicas had after the last sync.

    Without communication. Before the first sync they are the initial parameters, so
    evaluate and export :func:`consensus`.

    Args:
      opt_state: state of one optimizer with an anchor, with a leading replica axis.

    Returns:
      A tree like the parameters, without the replica axis.

    Example:
      >>> import curvadion_jax as cd
      >>> state = cd.local_muon(0.1).init({"w": jnp.ones(4)})
      >>> anchor(cd.replicas.replicate(state, cd.replicas.make_mesh(1)))["w"].tolist()
      [1.0, 1.0, 1.0, 1.0]
    """
    count_replicas(opt_state, "optimizer state")

    optimizers = _counters.optimizer_paths(opt_state)

    def is_anchor(path, node):
        field = _counters.inside(_paths.names_of(path), optimizers)
        return field == ("sync_state", "anchor") and bool(jax.tree.leaves(node))

    nodes = jax.tree.leaves_with_path(
        opt_state, is_leaf=is_anchor, is_leaf_takes_path=True
    )
    anchors = [node for path, node in nodes if is_anchor(path, node)]
    if len(anchors) != 1:
        raise ValueError(
            f"The optimizer state holds {len(anchors)} anchors. Give the state of one "
            "optimizer with synchronizers.reconcile; others keep no anchor."
        )
    return jax.tree.map(_of_one_replica, _memory.to_device(anchors[0]))


def _of_one_replica(x: jax.Array) -> jax.Array:
    """An array that is the same on all replicas, without their axis."""
    if (sharding := _layout.named_sharding(x)) is None:
        return jnp.asarray(x)[0]
    # Each device reads its own copy: `x[0]` of a sharded array is an all-reduce.
    first = jax.shard_map(
        lambda x: x[0],
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=P(*sharding.spec[1:]),
        check_vma=False,
    )
    return first(x)


def reanchor(params: Any, opt_state: Any) -> Any:
    """Makes the parameters the anchor, and residuals zero.

    For parameters that were loaded or changed after ``tx.init``. Momenta, outer
    momentum and counters stay.

    Args:
      params: the parameters, the same on all replicas; of nnx, the model or its state.
      opt_state: the optimizer state. Both have a leading replica axis, or neither has.

    Returns:
      The optimizer state; without an anchor as it is.

    Raises:
      ValueError: if a parameter of the anchor is missing, or replicas differ.

    Example:
      >>> import curvadion_jax as cd
      >>> state = cd.local_muon(0.1).init({"w": jnp.zeros(2)})
      >>> reanchor({"w": jnp.ones(2)}, state).sync_state.anchor["w"].tolist()
      [1.0, 1.0]
    """
    given = dict(_paths.leaves_with_names(params))
    leaves = _paths.leaves_with_names(opt_state)
    optimizers = _counters.optimizer_paths(opt_state)
    steps = {(*path, "metrics", "steps") for path in optimizers}
    has_axis = any(names in steps and np.ndim(x) for names, x in leaves)
    anchors, new = {}, []
    for names, leaf in leaves:
        inside = _counters.inside(names, optimizers)
        field, name = inside[:2], inside[2:]
        if field == ("sync_state", "anchor"):
            shape = np.shape(given[name]) if name in given else "missing"
            if shape != leaf.shape:
                raise ValueError(
                    f"The anchor {'/'.join(name)!r} has shape {leaf.shape}, and the "
                    f"parameter is {shape}. Give the parameters that this optimizer "
                    "was initialised with."
                )
            anchors[name] = given[name]
            leaf = _memory.to_memory_of(jnp.array(given[name], leaf.dtype), leaf)
        elif field == ("sync_state", "residual"):
            leaf = jnp.zeros_like(leaf)
        new.append(leaf)
    between = lambda arrays: [differ(x, x[:1]) for x in arrays]
    if has_axis and any(on_host(between, [*anchors.values()])):
        raise ValueError(
            "The parameters differ between the replicas, and an anchor must not. Give "
            "those of replicas.replicate(replicas.consensus(params), mesh)."
        )
    return jax.tree.unflatten(jax.tree.structure(opt_state), new)
