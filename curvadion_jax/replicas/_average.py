"""Averages other state at a sync, such as BatchNorm's statistics."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from curvadion_jax import (
    _collectives,
    _counters,
    _finite,
    _jax_internals,
    _layout,
    _mapped,
    _paths,
    _trees,
    compressors,
)


@jax.named_scope(_jax_internals.SCOPE)
def average_where_synced(
    state: Any, before: Any, average: Sequence[str], step: _mapped.MappedStep
) -> Any:
    """Averages some arrays of the state [replicas, ...] if the step synchronised.

    It did if an optimizer in it counted a sync. Replicas have their weights in that
    sync, 0 where they were excluded. The first optimizer counts the bytes.
    """
    arrays, old = (dict(_paths.leaves_with_names(each)) for each in (state, before))
    optimizers = _counters.optimizer_paths(state)
    floating = [names for names, x in arrays.items() if _finite.is_float(x)]
    others = [names for names in floating if not _counters.inside(names, optimizers)]
    _paths.check_named(others, average, "average")
    averaged = [names for names in others if _paths.lies_in(names, average)]
    counters = [(*path, "metrics") for path in optimizers]
    if not counters or (step.due_of and step.due is False):  # a local step
        return state
    synced, weight = jnp.zeros([], jnp.bool_), jnp.zeros([])
    for path in counters:
        now = arrays[*path, "syncs"] != old[*path, "syncs"]
        weight = jnp.maximum(weight, jnp.where(now, arrays[*path, "weight"], 0))
        synced |= now
    sent = (*counters[0], "sent")
    operands = [arrays[names] for names in (*averaged, sent)]
    paths = ["/".join(names) for names in averaged]
    if len({*paths}) < len(paths):  # as of "a/b" and "b" in "a"
        paths = [*map(str, range(len(paths)))]

    def mean(weight, *operands):
        """Means over replicas with finite arrays; if there is none, the old arrays."""
        *local, sent = operands
        weight = jnp.where(_finite.all_finite(local), weight, 0)
        wide = map(_trees.wide, local)
        weighted = [jnp.where(weight > 0, weight.astype(x.dtype) * x, 0) for x in wide]
        group = _collectives.Group(step.axis_name, _mapped.layout())
        tree = {**dict(zip(paths, weighted, strict=True)), "": weight}
        sums = group.mean(tree)
        total = sums[""]
        payload = compressors.exact().payload_by_device(tree, group.layout)
        means = [
            jnp.where(total > 0, sums[path] / total, x).astype(x.dtype)
            for path, x in zip(paths, local, strict=True)
        ]
        return [*means, _counters.charged(sent, payload)]

    def of_replica(*operands):
        synced, weight, *operands = (jnp.squeeze(x, 0) for x in operands)
        new = lax.cond(synced, mean, lambda _, *x: list(x), weight, *operands)
        return [jnp.expand_dims(x, 0) for x in new]

    like = _layout.explicit_specs(operands, [True] * len(operands))
    over_replicas = _layout.over_replicas(
        of_replica, step.mesh, step.axis_name, P(step.axis_name), like
    )
    new = over_replicas(synced, weight, *operands)
    arrays.update(zip((*averaged, sent), new, strict=True))
    return jax.tree.unflatten(jax.tree.structure(state), arrays.values())
