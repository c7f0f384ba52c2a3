"""The consensus, the anchor and the divergence of all replicas."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _dtypes, _finite, _memory, _trees
from curvadion_jax._rows import AXIS
from curvadion_jax._sync_state import AdaptiveSyncState


def consensus(rows: Any) -> Any:
    """The mean over the replicas: the model to evaluate and export.

    Costs a full all-reduce.

    Args:
      rows: parameters, or other rows [R, ...].

    Returns:
      The tree without the replica axis. Means are taken in at least float32, and of
      integers and keys the first replica's value.

    Raises:
      ValueError: if an array is known to have no row for each replica: a single number,
        or an array of another length on a mesh of replicas.

    Example:
      >>> consensus({"w": jnp.array([[1.0], [3.0]])})["w"].tolist()
      [2.0]
    """

    for path, x in jax.tree.leaves_with_path(rows):
        shape, mesh = jnp.shape(x), getattr(getattr(x, "sharding", None), "mesh", None)
        replicas = (
            None if isinstance(x, Tracer) or mesh is None else mesh.shape.get(AXIS)
        )
        if not shape or shape[0] != (replicas or shape[0]):
            raise ValueError(
                f"{jax.tree_util.keystr(path) or 'The array'} of shape {shape} has no "
                "row for each replica. Give the parameters that are trained, such as "
                "state.params."
            )

    def sharding_of_one(x):
        sharding = getattr(x, "sharding", None)
        if isinstance(x, Tracer) or not isinstance(sharding, NamedSharding):
            return None
        return NamedSharding(sharding.mesh, P(*sharding.spec[1:]))

    # Left to XLA, arrays of one replica lie divided over the axis of replicas.
    return jax.jit(_means, out_shardings=jax.tree.map(sharding_of_one, rows))(rows)


def _means(rows: Any) -> Any:
    def mean(x):
        if not _finite.is_float(x):
            return x[0]
        # Parts of the mean, because the sum may overflow.
        return jnp.sum(_dtypes.at_least_float32(x) / len(x), 0).astype(x.dtype)

    return jax.tree.map(mean, _memory.to_device(rows))


def divergence(rows: Any) -> jax.Array:
    """Measures how far apart the replicas are, relative to the parameters.

    Right after a sync this is rounding, below 1e-6 in float32.

    Args:
      rows: parameters [R, ...]. Integers and keys do not count.

    Returns:
      float32[], the replicas' RMS distance from their mean, over the parameters' RMS.

    Example:
      >>> spread = divergence({"w": jnp.array([[3.0], [5.0]])})
      >>> print(f"{spread:.4f}")  # 1 / sqrt(17)
      0.2425
    """
    return _divergence(jax.tree.leaves(rows))


@jax.jit
def _divergence(arrays: list[jax.Array]) -> jax.Array:
    is_number = lambda x: _finite.is_float(x) and x.size
    numbers = [x for x in arrays if is_number(x)]
    if not numbers:
        return jnp.zeros([], jnp.float32)
    leaves = [_dtypes.at_least_float32(x) for x in _memory.to_device(numbers)]
    # In units of the largest number, so that squares neither overflow nor vanish.
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in leaves]))
    unit = jnp.where(largest > 0, largest, 1)
    leaves = [x / unit for x in leaves]
    # From the first replica: the mean of equal numbers may be rounded.
    distances = [x - x[:1] for x in leaves]
    squares = lambda x: jnp.sum(jnp.square(jnp.abs(x)))
    spread = sum(squares(x - jnp.mean(x, 0, keepdims=True)) for x in distances)
    size = sum(squares(x) for x in leaves)
    return jnp.sqrt(spread / jnp.where(size == 0, 1, size)).astype(jnp.float32)


def anchor(opt_state: Any) -> Any:
    """The parameters that all replicas had after the last sync.

    Without communication. Before the first sync they are the initial parameters, so
    evaluate and export :func:`consensus`.

    Args:
      opt_state: state that holds one optimizer with an anchor.

    Returns:
      A tree like the parameters, without the replica axis.

    Raises:
      ValueError: if it holds no anchor, or several.

    Example:
      >>> import curvadion_jax as cd
      >>> state = cd.local_muon(0.1).init({"kernel": jnp.ones((2, 2))})
      >>> anchor(state)["kernel"].tolist()
      [[1.0, 1.0], [1.0, 1.0]]
    """
    anchors = [x.common.anchor for x in _trees.nodes_of(AdaptiveSyncState, opt_state)]
    anchors = [tree for tree in anchors if jax.tree.leaves(tree)]
    if len(anchors) != 1:
        raise ValueError(
            f"The optimizer state holds {len(anchors)} anchors. Give the state of one "
            "optimizer with synchronizers.reconcile; others keep no anchor."
        )
    return _memory.to_device(anchors[0])
