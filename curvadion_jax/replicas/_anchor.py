"""The anchor, the last common point: read, set, and compared with the parameters."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from curvadion_jax import _memory, _paths
from curvadion_jax.replicas._placed import count_replicas, look


def anchor(opt_state: Any) -> Any:
    """The parameters that all replicas had after the last sync.

    They cost no communication. Before the first sync they are the parameters at the
    start. To evaluate and to export use :func:`consensus`.

    Args:
      opt_state: the optimizer state with a leading replica axis, nnx's included.

    Returns:
      A tree like the parameters, without the replica axis.

    Raises:
      ValueError: if leaves have no common leading axis, or the state does not hold one
        anchor.

    Example:
      >>> import curvadion_jax as cd
      >>> state = cd.local_muon(0.1).init({"w": jnp.ones(4)})
      >>> anchor(cd.replicas.replicate(state, cd.replicas.make_mesh(1)))["w"].tolist()
      [1.0, 1.0, 1.0, 1.0]
    """
    count_replicas(opt_state, "optimizer state")
    nodes = jax.tree.leaves_with_path(
        opt_state,
        is_leaf=lambda path, _: _names(path)[-2:] == ("sync_state", "anchor"),
        is_leaf_takes_path=True,
    )
    found = [
        node
        for path, node in nodes
        if _names(path)[-2:] == ("sync_state", "anchor") and jax.tree.leaves(node)
    ]
    if len(found) != 1:
        raise ValueError(
            f"The optimizer state holds {len(found)} anchors. Give the state of one "
            "optimizer with synchronizers.reconcile; others keep no anchor."
        )
    inside = isinstance(jnp.zeros([]), Tracer)
    return jax.tree.map(_first if inside else _own, found[0])


def _names(path: Any) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _own(common: jax.Array) -> jax.Array:
    """An array that is the same on all replicas, without their axis.

    Each reads its own copy: `common[0]` of a sharded array is an all-reduce.
    """
    common = _memory.to_device(common)
    placement = getattr(common, "sharding", None)
    if not isinstance(placement, NamedSharding):
        return _first(common)
    return jax.make_array_from_single_device_arrays(
        common.shape[1:],
        placement.update(spec=PartitionSpec(*placement.spec[1:])),
        [
            _first_row(common.addressable_data(index))
            for index in range(len(common.addressable_shards))
        ],
    )


def _first(common: jax.Array) -> jax.Array:
    return jnp.asarray(_memory.to_device(common))[0]


def _first_row(part: jax.Array) -> jax.Array:
    (device,) = part.devices()
    # A caller may have set a mesh, and this array lies on one device.
    with jax.set_mesh(Mesh(np.array([device]), ("device",))):
        return part[0]


def reanchor(params: Any, opt_state: Any) -> Any:
    """Makes the parameters the anchor, and residuals zero.

    For parameters that were loaded or changed after ``tx.init``. Momenta, outer
    momentum and counters stay.

    Args:
      params: the parameters, the same on all replicas; of nnx, the model or its state.
      opt_state: the optimizer state. Both have a leading replica axis, or neither has.

    Returns:
      The optimizer state.

    Raises:
      ValueError: if the state holds no anchor, a parameter of the anchor is missing, or
        parameters differ between replicas.

    Example:
      >>> import curvadion_jax as cd
      >>> state = cd.local_muon(0.1).init({"w": jnp.zeros(2)})
      >>> reanchor({"w": jnp.ones(2)}, state).sync_state.anchor["w"].tolist()
      [1.0, 1.0]
    """
    given = dict(_paths.leaves_with_names(params))
    leaves = _paths.leaves_with_names(opt_state)
    has_axis = any(names[-1:] == ("steps",) and np.ndim(x) for names, x in leaves)
    used, new = {}, []
    for names, leaf in leaves:
        below = _below(names, "anchor")
        if below is not None:
            shape = np.shape(given[below]) if below in given else None
            if shape != leaf.shape:
                raise ValueError(
                    f"The anchor {'/'.join(below)!r} has shape {leaf.shape}, and the "
                    f"parameter has {shape}. Give the parameters that this optimizer "
                    "was initialised with."
                )
            used[below] = given[below]
            leaf = _memory.beside(jnp.array(given[below], leaf.dtype), leaf)
        elif _below(names, "residual") is not None:
            leaf = jnp.zeros_like(leaf)
        new.append(leaf)
    if not used:
        raise ValueError(
            "The optimizer state holds no anchor. Only synchronizers.reconcile keeps "
            "one; with other synchronizers there is nothing to do."
        )
    if has_axis and any(look(_apart, list(used.values()))):
        raise ValueError(
            "The parameters differ between the replicas, and an anchor must not. Give "
            "those of replicas.replicate(replicas.consensus(params), mesh)."
        )
    return jax.tree.unflatten(jax.tree.structure(opt_state), new)


def _below(names: _paths.Names, field: str) -> _paths.Names | None:
    """The names after `sync_state/field` on a path, if it leads there."""
    for index in range(len(names) - 1):
        if names[index : index + 2] == ("sync_state", field):
            return names[index + 2 :]
    return None


def _apart(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Whether each array [replicas, ...] differs between replicas."""
    return [jnp.any((x != x[:1]) & ~jnp.isnan(x)) for x in arrays]
