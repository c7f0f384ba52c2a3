"""Moves what only syncs touch to the hosts' memory."""

from typing import Any

import jax

from curvadion_jax import _memory, _trees
from curvadion_jax.step._sync_state import AdaptiveSyncState


def offload(opt_state: Any) -> Any:
    """Moves what only syncs touch to the hosts' memory.

    That is the anchor, the outer optimizer's state and the residuals. A sync copies
    them to the device and back. Steps and checkpoints leave them there, and the numbers
    are the same.

    Args:
      opt_state: optimizer state, or a training state. Drop it afterwards to free the
        device's memory.

    Returns:
      The state with these arrays in `pinned_host`, sharded as before.

    Raises:
      ValueError: if the state holds no optimizer that synchronises.

    Example:
      >>> import curvadion_jax as cd, jax.numpy as jnp
      >>> state = offload(cd.local_muon(0.01).init({"kernel": jnp.ones((2, 2))}))
      >>> state.common.anchor["kernel"].sharding.memory_kind
      'pinned_host'
    """

    if not _trees.nodes_of(AdaptiveSyncState, opt_state):
        raise ValueError(
            f"A {type(opt_state).__name__} holds no state of an optimizer that "
            "synchronises, so there is nothing to offload. Give the opt_state of one, "
            "such as local_muon."
        )

    def to_host(x):
        return jax.device_put(x, x.sharding.with_memory_kind(_memory.HOST_KIND))

    def of_state(node):
        anchor, sync_state, residual = jax.tree.map(
            to_host, (node.common.anchor, node.common.sync_state, node.rows.residual)
        )
        return node._replace(
            common=node.common._replace(anchor=anchor, sync_state=sync_state),
            rows=node.rows._replace(residual=residual),
        )

    return _trees.map_nodes(AdaptiveSyncState, of_state, opt_state)
