"""Whether a run starts from one model, which is that of the anchor."""

import functools
import warnings
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

from curvadion_jax import _counters, _paths
from curvadion_jax._adaptive_sync import AdaptiveSyncState
from curvadion_jax.replicas import _anchor
from curvadion_jax.replicas._anchor import Anchored, Names


def check_start(state: Any, has_axis: bool) -> None:
    """Rejects a run that would start from another model than its anchor.

    Replicas that start from different parameters never meet, and parameters that were
    loaded after ``tx.init`` would be thrown back by the first sync. Only looks at
    optimizers that have taken no step. Where none keeps an anchor it cannot tell
    parameters from what may differ, and warns.

    Args:
      state: parameters and optimizer state, in any tree.
      has_axis: whether its arrays have a leading replica axis.
    """
    leaves = dict(_paths.leaves_with_names(state))
    if any(isinstance(x, Tracer) for x in leaves.values()):
        return
    found = _anchor.with_params(state)
    for each in found:
        steps = leaves.get((*each.optimizer, "metrics", "steps"))
        if steps is None or not each.copies:
            continue
        if jnp.ndim(steps) or not has_axis:  # what was not replicated is told elsewhere
            _check_anchor(each, steps, has_axis)
    if has_axis and not found:
        _check_equal(leaves)


def _check_anchor(each: Anchored, steps: Any, has_axis: bool) -> None:
    compare = functools.partial(_compared, has_axis=has_axis)
    copies = list(each.copies.values()) if each.params is None else [each.params]
    seen = [_anchor.read(compare, steps, copy, each.anchor) for copy in copies]
    began, moved, apart = seen[0]
    if began:
        return
    if any(apart):
        raise ValueError(
            f"replicas start from different parameters ({_first(each.anchor, apart)}), "
            "and would never meet: give replicas.replicate the state of one replica, "
            "made once, and do not map init over the replicas"
        )
    if all(any(moved) for _, moved, _ in seen):  # a copy may be an average of zeros
        raise ValueError(
            f"the parameters ({_first(each.anchor, moved)}) are not those that the "
            "optimizer was initialised with, and the first sync would throw the model "
            "back to these: call tx.init with the parameters that training starts "
            "from, or curvadion_jax.replicas.reanchor(state)"
        )


def _first(anchor: dict[Names, Any], differs: list[bool]) -> str:
    return repr("/".join(list(anchor)[differs.index(True)]))


def _compared(steps, pairs, has_axis: bool) -> Any:
    """Whether a step was taken, and for every parameter if it moved, or differs."""
    moved = [jnp.any((x != a) & ~(jnp.isnan(x) & jnp.isnan(a))) for x, a in pairs]
    return jnp.any(steps > 0), moved, [_differs(a) for _, a in pairs if has_axis]


def _differs(x: Any) -> Any:
    """Whether an array [replicas, ...] is another one on some replica."""
    return jnp.any((x != x[:1]) & ~jnp.isnan(x))


def _check_equal(leaves: dict[Names, Any]) -> None:
    """Warns of floating-point arrays beside the optimizers that differ at the start."""
    optimizers = _counters.optimizers(leaves)
    steps = [leaves[*way, "metrics", "steps"] for way in optimizers]
    if not steps or not all(map(jnp.ndim, steps)):
        return
    beside = {
        names: x
        for names, x in leaves.items()
        if jnp.issubdtype(jnp.result_type(x), jnp.floating)
        and jnp.shape(x)[:1] == steps[0].shape
        and not _counters.is_within(names, optimizers, AdaptiveSyncState._fields)
    }

    def compare(steps, pairs):
        return jnp.any(sum(steps) > 0), [_differs(x) for x, _ in pairs]

    began, apart = _anchor.read(compare, steps, beside, beside)
    if any(apart) and not began:
        warnings.warn(
            f"replicas start with different values ({_first(beside, apart)}). If these "
            "are parameters they never meet, since this synchronizer brings none "
            "together: give replicas.replicate the state of one replica, made once",
            stacklevel=4,
        )
