"""State beside the optimizer's that a sync averages too, such as BatchNorm's."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from curvadion_jax import _counters, _finite, _paths
from curvadion_jax._payload import Payload


def check_names(average: Any) -> tuple[str, ...]:
    """Names given to `replicas.step(average=...)`."""
    names = tuple(average) if isinstance(average, Sequence) else None
    if isinstance(average, str) or names is None or set(map(type, names)) - {str}:
        raise TypeError(
            "average must be a sequence of names in the paths of the state, such as "
            f"('batch_stats',), got {average!r}"
        )
    return names


def average_where_synced(
    state: Any, average: Sequence[str], mesh: Mesh, axis_name: str
) -> Any:
    """The state [replicas, ...] with some arrays averaged if the step synchronised.

    Their bytes are added to those that the optimizer counts.

    Raises:
      ValueError: when traced, if a name is of no floating-point array, or the state
        holds no counters of an optimizer that synchronises.
    """
    leaves = _paths.leaves_with_names(state)
    chosen = _chosen(leaves, average)
    counters = [i for i, (names, _) in enumerate(leaves) if _is_sent(names)]
    flags = [i for i, (names, _) in enumerate(leaves) if names[-2:] == _SYNCED]
    if not flags:
        raise ValueError(
            f"average={tuple(average)} is averaged at syncs, and the state holds no "
            "optimizer that synchronises: return its state from the step as a part of "
            "the state"
        )
    arrays = [leaf for _, leaf in leaves]
    moving = [*chosen, counters[0]]
    size = sum(arrays[i][0].size * arrays[i].dtype.itemsize for i in chosen)

    def body(synced, *moving):
        synced, *moving = jax.tree.map(lambda x: jnp.squeeze(x, 0), (synced, *moving))

        def mean(*moving):
            *arrays, sent = moving
            arrays = _mean_of_finite(arrays, axis_name)
            return [*arrays, _counters.charged(sent, Payload(averaged=size))]

        new = lax.cond(synced, mean, lambda *kept: list(kept), *moving)
        return [jnp.expand_dims(x, 0) for x in new]

    new = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=P(axis_name),
        out_specs=P(axis_name),
        axis_names={axis_name},
    )(arrays[flags[0]], *(arrays[i] for i in moving))
    for index, x in zip(moving, new, strict=True):
        arrays[index] = x
    return jax.tree.unflatten(jax.tree.structure(state), arrays)


_SYNCED = ("metrics", "synced")


def _is_sent(names: tuple[str, ...]) -> bool:
    return names[-2:] == ("metrics", "sent")


def _chosen(leaves: Sequence[Any], average: Sequence[str]) -> list[int]:
    found = []
    for name in average:
        of_name = [
            index
            for index, (names, x) in enumerate(leaves)
            if name in names and jnp.issubdtype(x.dtype, jnp.floating)
        ]
        if not of_name:
            raise ValueError(
                f"average names {name!r}, and the path of no floating-point array of "
                "the state has that name; its arrays begin with "
                f"{', '.join('/'.join(names) for names, _ in leaves[:4])}"
            )
        found += [index for index in of_name if index not in found]
    return found


def _mean_of_finite(arrays: list[jax.Array], axis_name: str) -> list[jax.Array]:
    """Means over the replicas whose arrays are finite; as they are if none has such."""
    finite = _finite.all_finite(arrays)
    number = lax.psum(finite.astype(jnp.float32), axis_name)

    def mean(x):
        wide = jnp.where(finite, x.astype(jnp.float32), 0)
        total = lax.psum(wide, axis_name) / jnp.maximum(number, 1)
        return jnp.where(number > 0, total.astype(x.dtype), x)

    return [mean(x) for x in arrays]
