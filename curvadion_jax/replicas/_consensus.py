"""The consensus, the anchor and the divergence of all replicas."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _dtypes, _finite, _memory, _trees, metrics
from curvadion_jax.mesh._rows import AXIS, known_sharding
from curvadion_jax.step._sync_state import AdaptiveSyncState


def consensus(rows: Any) -> Any:
    """The mean over the replicas: the model to evaluate and export.

    Costs a full all-reduce. A replica with a NaN or an infinity in any of the arrays is
    left out, unless all have one.

    Args:
      rows: parameters, or other rows [R, ...].

    Returns:
      The tree without the replica axis. Means are taken in at least float32, and of
      integers and keys the value of the first replica that is not left out.

    Raises:
      ValueError: if an array has no row for each replica: a single number, or an array
        of another length than the first one, or than the replicas of its mesh.

    Warns:
      UserWarning: if a replica is left out, or none is finite; not under jit.

    Example:
      >>> consensus({"w": jnp.array([[1.0], [3.0]])})["w"].tolist()
      [2.0]
    """
    known = _check_rows(rows)

    def sharding_of_one(x):
        sharding = known_sharding(x)
        return sharding and NamedSharding(sharding.mesh, P(*sharding.spec[1:]))

    # Left to XLA, arrays of one replica lie divided over the axis of replicas.
    shardings = jax.tree.map(sharding_of_one, rows)
    of_flags = NamedSharding(known[0], P()) if known else None
    run = jax.jit(_means, out_shardings=(shardings, of_flags))
    means, finite = run(rows)
    if not isinstance(finite, Tracer):
        _warn_of_left_out(jax.device_get(finite))
    return _trees.shared_as(rows, means)


def _check_rows(rows: Any) -> list[Any]:
    """Rejects arrays without a row for each replica; returns the meshes of the rest."""
    leaves = jax.tree.leaves_with_path(rows)
    known = [s.mesh for _, x in leaves if (s := known_sharding(x))]
    lengths = [mesh.shape[AXIS] for mesh in known if AXIS in mesh.shape]
    lengths += [jnp.shape(x)[0] for _, x in leaves if jnp.ndim(x)]
    for path, x in leaves:
        if not jnp.ndim(x) or len(x) != lengths[0]:
            raise ValueError(
                f"{jax.tree_util.keystr(path) or 'The array'} of shape {jnp.shape(x)} "
                "has no row for each replica. Give the parameters that are trained, "
                "such as state.params."
            )
    return known


def _means(rows: Any) -> tuple[Any, jax.Array]:
    """The means of the replicas that are finite, and which are, bool[R] or bool[1]."""
    rows = _memory.to_device(rows)
    finite = _finite.rows_finite(rows)
    taken = finite | ~jnp.any(finite)

    def mean(x):
        if not _finite.is_float(x):
            return x[jnp.argmax(taken)]
        # Parts of the mean, because the sum may overflow.
        parts = _dtypes.at_least_float32(x) / jnp.sum(taken)
        is_taken = taken.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.sum(jnp.where(is_taken, parts, 0), 0).astype(x.dtype)

    return jax.tree.map(mean, rows), finite


def _warn_of_left_out(finite: np.ndarray) -> None:
    left_out = np.flatnonzero(~finite).tolist()
    if len(left_out) == len(finite):
        warnings.warn(
            "No replica is finite, and neither is their consensus. Restore an older "
            "checkpoint, or take replicas.anchor(opt_state).",
            stacklevel=3,
        )
    elif left_out:
        warnings.warn(
            f"The consensus leaves out replicas {left_out}, whose rows hold NaN or "
            "Inf. Mend these in training: replicas.repair(params, "
            "replicas.anchor(opt_state)).",
            stacklevel=3,
        )


def divergence(rows: Any) -> jax.Array:
    """Measures how far apart the replicas are, relative to the parameters.

    Right after a sync this is rounding, below 1e-6 in float32.

    Args:
      rows: parameters [R, ...]. Integers and keys do not count.

    Returns:
      float32[], the replicas' RMS distance from their mean, over the parameters' RMS.

    Raises:
      ValueError: if an array has no row for each replica, as for :func:`consensus`.

    Example:
      >>> spread = divergence({"w": jnp.array([[3.0], [5.0]])})
      >>> print(f"{spread:.4f}")  # 1 / sqrt(17)
      0.2425
    """
    _check_rows(rows)
    # What is shared, such as a layer that is used twice, counts once.
    return _divergence([*{id(x): x for x in jax.tree.leaves(rows)}.values()])


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

    Warns:
      UserWarning: if parameters were changed behind the optimizer (`displaced` in
        :func:`curvadion_jax.metrics.read`); not under jit.

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
            "optimizer with synchronizers.reconcile (others keep no anchor, and a "
            "checkpoint restored without a target is made of dictionaries)."
        )
    metrics.warn_of_displaced(opt_state)
    return _memory.to_device(anchors[0])
