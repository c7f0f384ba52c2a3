"""Gives a replica whose numbers are spoilt another one's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curvadion_jax.replicas._state import check_leading


def mend(state: Any) -> tuple[Any, list[int]]:
    """Replaces replicas that are not finite by copies of the first one that is.

    A sync leaves such a replica out, and starts its momenta and errors afresh. But an
    optimizer adds to the parameters, and NaN plus anything is NaN: parameters that were
    spoilt, by memory or by a step that went past the optimizer, stay so until they are
    replaced. That costs what one state costs to send, and waits for the devices; call
    it when `curvadion_jax.metrics.read` shows a replica as left out again and again.

    Args:
      state: parameters and optimizer state, in any tree, with a leading replica axis.
        What is a scalar on one replica is not looked at.

    Returns:
      The state, and the numbers of the replicas that were replaced. Without any it is
      the state as it was.

    Raises:
      ValueError: if leaves have no common leading axis, or no replica is finite.

    Example:
      >>> state = {"w": jnp.array([[1.0], [jnp.nan], [3.0]])}
      >>> state, replaced = mend(state)
      >>> state["w"].ravel().tolist(), replaced
      ([1.0, 1.0, 3.0], [1])
    """
    # Of one replica a scalar: it may be meant so, as a trigger's value is.
    leaves = [leaf for leaf in jax.tree.leaves(state) if jnp.ndim(leaf) > 1]
    if not leaves:
        return state, []
    number = leaves[0].shape[0]
    check_leading(state, number, "state", "replicas; see replicas.replicate")
    finite = np.asarray(jax.device_get(_finite(leaves)))
    spoilt = [int(index) for index in np.flatnonzero(~finite)]
    if not spoilt:
        return state, []
    if len(spoilt) == number:
        raise ValueError(
            f"none of the {number} replicas is finite: restore a checkpoint"
        )
    healthy = int(np.flatnonzero(finite)[0])
    source = np.where(finite, np.arange(number), healthy)
    return _taken(state, jnp.asarray(source)), spoilt


@jax.jit
def _finite(leaves: list[jax.Array]) -> jax.Array:
    """Which replicas have finite numbers alone, bool[N]."""
    found = jnp.ones(leaves[0].shape[0], jnp.bool_)
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            found &= jnp.all(jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim)))
    return found


def _taken(state: Any, source: jax.Array) -> Any:
    """The state with every replica's row taken from another's, placed as it was."""

    def take(tree):
        return jax.tree.map(lambda x: x[source], tree)

    placements = jax.tree.map(lambda x: getattr(x, "sharding", None), state)
    return jax.jit(take, out_shardings=placements)(state)
