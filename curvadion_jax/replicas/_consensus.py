"""The one model of all replicas, what it costs to ask for it, and their divergence."""

from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _memory, compressors
from curvadion_jax.cost_model import sync_bytes
from curvadion_jax.replicas._anchor import anchor_of, check_replicas
from curvadion_jax.replicas._checks import count_leading


def consensus(params: Any, opt_state: Any = None) -> Any:
    """The one model: what to evaluate, export and keep.

    Args:
      params: parameters with a leading replica axis.
      opt_state: the optimizer state with a leading replica axis, nnx's included. If
        it holds the anchor of `reconcile`, that is the model: common to all replicas,
        and free to read. It is the model of the last sync (with ``fragments=n``, each
        fragment as of its own last sync; with ``delay=k``, of the last that has ended),
        before the first that of the start: for that of this step, after the last one of
        a run say, leave out `opt_state`.

    Returns:
      The parameters without the replica axis, the anchor or else the mean over the
      replicas, which costs what :func:`consensus_bytes` says.

    Raises:
      ValueError: if leaves have no common leading axis, or the state has several
        anchors or one of other parameters.

    Example:
      >>> consensus({"w": jnp.array([[1.0], [3.0]])})["w"].tolist()
      [2.0]
    """
    return _consensus(params, anchor_of(params, opt_state))


def consensus_bytes(params: Any, opt_state: Any = None) -> int:
    """Bytes that one replica sends when the consensus is asked for.

    Args:
      params: as for :func:`consensus`.
      opt_state: as for :func:`consensus`.

    Returns:
      0 where there is an anchor, else those of an all-reduce in float32.

    Raises:
      ValueError: as for :func:`consensus`.

    Example:
      >>> consensus_bytes({"w": jnp.ones((8, 100))})  # 2 * 7 / 8 * 400
      700
    """
    replicas = count_leading(params, "parameters")
    sent = [
        leaf
        for leaf, anchor in zip(
            jax.tree.leaves(params), anchor_of(params, opt_state), strict=True
        )
        if anchor is None and jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    payload = compressors.exact().payload(sent, {}).averaged // replicas
    return round(sync_bytes(payload, replicas))


@jax.jit
def _consensus(params: Any, anchor: list[jax.Array | None]) -> Any:
    leaves, structure = jax.tree.flatten(params)
    return jax.tree.unflatten(
        structure,
        [
            _mean(x) if common is None else _memory.to_device(common)[0]
            for x, common in zip(leaves, anchor, strict=True)
        ],
    )


def _mean(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x[0]
    # From the first replica, so that equal replicas give their own value.
    wide = x.astype(jnp.promote_types(x, jnp.float32))
    return (wide[0] + jnp.mean(wide - wide[:1], 0)).astype(x.dtype)


@jax.jit
def _divergence(params: Any) -> jax.Array:
    leaves = [
        x.astype(jnp.promote_types(x, jnp.float32))
        for x in jax.tree.leaves(params)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    size = sum(jnp.sum(jnp.square(x)) for x in leaves)
    # From the first replica, so that equal replicas give exactly zero: the mean of
    # equal numbers may be rounded.
    apart = [x - x[:1] for x in leaves]
    apart = sum(jnp.sum(jnp.square(x - jnp.mean(x, 0, keepdims=True))) for x in apart)
    return jnp.sqrt(apart / jnp.where(size == 0, 1, size))


def divergence(params: Any) -> jax.Array:
    """How far apart the replicas are, relative to the size of the parameters.

    Args:
      params: parameters with a leading replica axis.

    Returns:
      A scalar, the RMS distance of the replicas from their mean, over the RMS of the
      parameters. 0 if all are equal.

    Raises:
      ValueError: if leaves have no common leading axis.

    Example:
      >>> apart = divergence({"w": jnp.array([[3.0], [5.0]])})
      >>> print(f"{apart:.4f}")  # 1 / sqrt(17)
      0.2425
    """
    check_replicas(params)
    return _divergence(params)
