"""The one model of all replicas, what it costs to ask for it, and their divergence."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from curvadion_jax import _memory, compressors
from curvadion_jax.metrics import sync_bytes
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
      replicas, which costs what :func:`consensus_bytes` says. Of equal replicas that is
      their value, up to the rounding of a sum.

    Raises:
      ValueError: if leaves have no common leading axis, or the state has several
        anchors or one of other parameters.

    Example:
      >>> consensus({"w": jnp.array([[1.0], [3.0]])})["w"].tolist()
      [2.0]
    """
    leaves, structure = jax.tree.flatten(params)
    anchor = anchor_of(params, opt_state)
    means = iter(_means([x for x, a in zip(leaves, anchor, strict=True) if a is None]))
    own = _first if isinstance(jnp.zeros([]), Tracer) else _own  # in a program
    return structure.unflatten([next(means) if a is None else own(a) for a in anchor])


def consensus_bytes(params: Any, opt_state: Any = None) -> int:
    """Bytes that one replica sends when the consensus is asked for.

    Args:
      params: as for :func:`consensus`.
      opt_state: as for :func:`consensus`.

    Returns:
      0 where there is an anchor, else those of an all-reduce, of floating-point arrays
      in float32.

    Raises:
      ValueError: as for :func:`consensus`.

    Example:
      >>> consensus_bytes({"w": jnp.ones((8, 100))})  # 2 * 7 / 8 * 400
      700
    """
    replicas = count_leading(params, "parameters")
    anchor, leaves = anchor_of(params, opt_state), jax.tree.leaves(params)
    sent = [x for x, a in zip(leaves, anchor, strict=True) if a is None]
    floats = [x for x in sent if jnp.issubdtype(x.dtype, jnp.floating)]
    others = [x for x in sent if not jnp.issubdtype(x.dtype, jnp.floating)]
    payload = compressors.exact().payload(floats, {}).averaged
    payload += sum(x.size * x.dtype.itemsize for x in others)
    return round(sync_bytes(payload // replicas, replicas))


def _own(common: jax.Array) -> jax.Array:
    """An array that all replicas have alike, without their axis.

    Each reads its own: of an array divided over devices `common[0]` is an all-reduce.
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
    # Apart from the mesh that a caller has set.
    with jax.set_mesh(Mesh(np.array([device]), ("device",))):
        return part[0]


@jax.jit
def _means(leaves: list[jax.Array]) -> list[jax.Array]:
    """Over the replicas; of what is not floating-point that of the first."""
    return [
        jnp.mean(x.astype(jnp.promote_types(x, jnp.float32)), 0).astype(x.dtype)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else x[0]
        for x in _memory.to_device(leaves)
    ]


@jax.jit
def _divergence(params: Any) -> jax.Array:
    leaves = [
        # Infinite on all replicas, as a mask may be, is not apart.
        jnp.where(jnp.isinf(x) & (x == x[:1]), 0, x).astype(
            jnp.promote_types(x, jnp.float32)
        )
        for x in _memory.to_device(jax.tree.leaves(params))
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
