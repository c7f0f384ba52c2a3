"""State beside the optimizer's that a sync averages too, such as BatchNorm's."""

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
    _paths,
    compressors,
)
from curvadion_jax._payload import Payload


def check_average(state: Any, average: Sequence[str]) -> None:
    """Rejects names of nothing, and a state without counters of syncs."""
    leaves = _paths.leaves_with_names(state)
    _chosen(leaves, average)
    if not _counters.optimizers(names for names, _ in leaves):
        raise ValueError(
            f"average={tuple(average)} is averaged at syncs, and the state holds no "
            "optimizer that synchronises. Return its state from the step."
        )


@jax.named_scope(_guards.SCOPE)
def average_where_synced(
    state: Any, before: Any, average: Sequence[str], mesh: Mesh, axis_name: str
) -> Any:
    """The state [replicas, ...] with some arrays averaged if the step synchronised.

    That is, if an optimizer in it has counted more syncs than before the step. Replicas
    count as in that sync: by their weights, and not at all where they were excluded.
    The first optimizer counts the bytes.
    """
    step = _mapped.current()
    known = step.known_sync if step else None
    if known is False:
        return state
    leaves = _paths.leaves_with_names(state)
    arrays, old = dict(leaves), dict(_paths.leaves_with_names(before))
    chosen = [leaves[index][0] for index in _chosen(leaves, average)]
    counters = [(*way, "metrics") for way in _counters.optimizers(arrays)]
    synced, weight = jnp.zeros([], jnp.bool_), jnp.zeros([])
    for way in counters:
        own = arrays[*way, "syncs"] != old[*way, "syncs"]
        weight = jnp.maximum(weight, jnp.where(own, arrays[*way, "weight"], 0))
        synced |= own
    sent = (*counters[0], "sent")
    given = [arrays[names] for names in (*chosen, sent)]
    size = compressors.exact().payload([x[0] for x in given[:-1]], {}).averaged

    def mean(weight, *given):
        *given, sent = given
        means = _weighted(given, weight, axis_name)
        return [*means, _counters.charged(sent, Payload(averaged=size))]

    def body(synced, weight, *given):
        synced, weight, *given = (jnp.squeeze(x, 0) for x in (synced, weight, *given))
        if known:
            new = mean(weight, *given)
        else:
            new = lax.cond(synced, mean, lambda _, *x: list(x), weight, *given)
        return [jnp.expand_dims(x, 0) for x in new]

    like = _axis_types.specs(given, [True] * len(given))
    over = _axis_types.over_replicas(body, mesh, axis_name, P(axis_name), like)
    arrays.update(zip((*chosen, sent), over(synced, weight, *given), strict=True))
    return jax.tree.unflatten(jax.tree.structure(state), arrays.values())


def _chosen(leaves: Sequence[Any], average: Sequence[str]) -> list[int]:
    found = []
    for name in average:
        of_name = [
            index
            for index, (names, x) in enumerate(leaves)
            if name in names and jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        if not of_name:
            some = ", ".join("/".join(names) for names, _ in leaves[:4])
            raise ValueError(
                f"average names {name!r}, and no floating-point array of the state has "
                f"it in its path. The state begins with {some}."
            )
        found += [index for index in of_name if index not in found]
    return found


def _weighted(arrays: list, weight: jax.Array, axis_name: str) -> list[jax.Array]:
    """Means over replicas whose arrays are finite; without any, arrays as they are."""
    weight = jnp.where(_finite.all_finite(arrays), weight, 0)
    wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays]
    given = [jnp.where(weight > 0, weight.astype(x.dtype) * x, 0) for x in wide]
    group = _collectives.Replicas(axis_name, _layout.current())
    *sums, total = group.mean([*given, weight])
    return [
        jnp.where(total > 0, each / total, x).astype(x.dtype)
        for each, x in zip(sums, arrays, strict=True)
    ]
