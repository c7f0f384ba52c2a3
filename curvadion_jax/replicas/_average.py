"""State beside the optimizer's that a sync averages too, such as BatchNorm's."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from curvadion_jax import (
    _axis_types,
    _collectives,
    _counters,
    _finite,
    _guards,
    _layout,
    _mapped,
    _orthonormalize,
    _paths,
    compressors,
)
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


def check_average(state: Any, average: Sequence[str]) -> None:
    """Rejects names of nothing, and a state without counters of syncs.

    Raises:
      ValueError: if a name is of no floating-point array, or the state holds no
        optimizer that synchronises.
    """
    leaves = _paths.leaves_with_names(state)
    _chosen(leaves, average)
    if not _counters.optimizers(names for names, _ in leaves):
        raise ValueError(
            f"average={tuple(average)} is averaged at syncs, and the state holds no "
            "optimizer that synchronises: return its state from the step as a part of "
            "the state"
        )


@jax.named_scope(_guards.SCOPE)
def average_where_synced(
    state: Any, before: Any, average: Sequence[str], mesh: Mesh, axis_name: str
) -> Any:
    """The state [replicas, ...] with some arrays averaged if the step synchronised.

    That is, if an optimizer in it has counted more syncs than before the step. The
    bytes are added to those that the first one counts.
    """
    step = _mapped.current()
    known = step.known_sync if step else None
    if known is False:
        return state
    leaves = _paths.leaves_with_names(state)
    chosen = _chosen(leaves, average)
    index = {names: i for i, (names, _) in enumerate(leaves)}
    sent = min(index[*way, "metrics", "sent"] for way in _counters.optimizers(index))
    syncs = [_syncs(tree) for tree in (state, before)]
    synced = functools.reduce(operator.or_, map(operator.ne, *syncs))
    arrays = [leaf for _, leaf in leaves]
    moving = [*chosen, sent]
    size = compressors.exact().payload([arrays[i][0] for i in chosen], {}).averaged

    def body(synced, *moving):
        synced, *moving = jax.tree.map(lambda x: jnp.squeeze(x, 0), (synced, *moving))

        def mean(*moving):
            *arrays, sent = moving
            arrays = _mean_of_finite(arrays, axis_name)
            return [*arrays, _counters.charged(sent, Payload(averaged=size))]

        if known:
            new = mean(*moving)
        else:
            new = lax.cond(synced, mean, lambda *kept: list(kept), *moving)
        return [jnp.expand_dims(x, 0) for x in new]

    operands = [arrays[i] for i in moving]
    like = _axis_types.specs(operands, [True] * len(operands))
    new = _axis_types.over_replicas(body, mesh, axis_name, P(axis_name), like)(
        synced, *operands
    )
    for index, x in zip(moving, new, strict=True):
        arrays[index] = x
    return jax.tree.unflatten(jax.tree.structure(state), arrays)


def _syncs(state: Any) -> list[jax.Array]:
    """Counters of syncs [replicas], of every optimizer in the state."""
    leaves = dict(_paths.leaves_with_names(state))
    return [leaves[*way, "metrics", "syncs"] for way in _counters.optimizers(leaves)]


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
    wide = [x.astype(_orthonormalize.compute_dtype(x.dtype)) for x in arrays]
    given = [jnp.where(finite, x, 0) for x in wide]
    group = _collectives.Replicas(axis_name, _layout.current())
    *means, present = group.mean([*given, finite.astype(jnp.float32)])
    return [
        jnp.where(present > 0, mean / present, x).astype(x.dtype)
        for mean, x in zip(means, arrays, strict=True)
    ]
