"""What happens to replicas whose numbers are not finite, or that are not there.

The whole policy; `_adaptive_sync` calls what is here around a step and a sync:

* *Non-finite gradients.* A replica whose gradients hold a NaN or an infinity, or whose
  norms are infinite, takes the step of a zero gradient, and its trigger sees zeros.
* *Zeroed updates.* Where the inner or the outer optimizer makes updates that are not
  finite of what is, these elements are zero: parameters, to which updates are added,
  cannot be repaired by adding. Of an outer step anchor and outer state stay there as
  they were, replicas stay apart, and the next sync makes them equal.
* *Excluded.* A replica contributes nothing to a sync if its parameters, its inner state
  or its sync state hold a NaN or an infinity (or its gradients, where these are what is
  averaged). An inner state that is not finite starts afresh, and the residual is
  dropped; with `reconcile` its finite parameters go to the anchor. Parameters that are
  not finite stay so until `replicas.repair` replaces them.
* *Absent.* A replica of weight 0 contributes nothing. With `reconcile` it keeps its own
  momentum and drift; where a compressor averages gradients, it adds them to its
  residual. (Without one, a gradient that is averaged is that of the others.) It
  contributes the residual that it had before.
* *Empty.* Where nobody takes part a sync changes nothing.
* *Cooldown.* A replica that a sync could not help must not trigger the next one: an
  excluded replica requests none for 10 steps, and one without weight none at all.
  (Syncs that are due by the number of the step take place all the same.)

All of it is counted (`_counters`). Scalars of a state are looked at where they belong
to a scalar parameter; others may be meant to be infinite, as the best loss so far is.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _collectives, _finite, _momentum, _paths, _power_iteration
from curvadion_jax._counters import Faults, SyncMetrics
from curvadion_jax._interfaces import LocalStep, SyncState

# In steps, before an excluded replica may request a sync.
COOLDOWN = 10


def checked_weight(weight: Any) -> jax.Array | None:
    """The weight of a replica, float32[]; 0 for NaN and the like."""
    if weight is None:
        return None
    if isinstance(weight, int | float) and not 0 <= weight < math.inf:
        raise ValueError(
            f"weight must be finite and not negative, got {weight}. It is how much "
            "this replica counts in a sync."
        )
    given = jnp.asarray(weight)
    if given.shape:
        raise ValueError(
            f"weight has shape {given.shape} and must be one number per replica. "
            "Reduce it, as by jax.numpy.sum."
        )
    return jnp.where(jnp.isfinite(given) & (given > 0), given, 0).astype(jnp.float32)


def may_request(counters: SyncMetrics, weight: jax.Array | None) -> jax.Array:
    """Whether a sync could help this replica, bool[]."""
    last = counters.steps - counters.local_steps - 1
    excluded = (counters.last_excluded == last) & (last >= 0)
    may = ~excluded | (counters.local_steps >= COOLDOWN)
    return may if weight is None else may & (weight > 0)


def is_healthy(params: optax.Params, state: SyncState, sound: jax.Array) -> jax.Array:
    """Whether all that a replica has is finite, bool[]; `sound` is its inner state."""
    return sound & _finite.all_finite(params) & is_finite(state, params)


def contribution(
    weight: jax.Array | None, healthy: jax.Array, there: jax.Array | bool = True
) -> jax.Array:
    """The weight of a replica, 0 if it is absent, -1 if what it has is not finite."""
    own = jnp.asarray(1 if weight is None else weight, jnp.float32)
    return jnp.where(healthy & there, own, -1)


def taking_part(
    local: LocalStep,
    fresh: optax.OptState,
    sound: jax.Array,
    own: jax.Array,
    healthy: jax.Array,
    axis_name: str | None,
) -> LocalStep:
    """A local step with this replica's part in the sync, and a sound inner state.

    Every replica gathers one number of each, its `contribution`. So all know who takes
    part.

    Args:
      local: the step, with the inner state as it is.
      fresh: inner state to start afresh from.
      sound: bool[], whether the inner state is finite.
      own: float32[], this replica's `contribution`.
      healthy: see `LocalStep`.
      axis_name: replica axis.
    """
    given = _collectives.gathered(own, axis_name)
    there, expected = given > 0, given >= 0
    anybody = jnp.any(there)
    # In units of the largest, so that the sum does not overflow.
    unit = jnp.where(anybody, jnp.max(given), 1)
    mean = jnp.sum(jnp.maximum(given, 0) / unit) / given.size
    return local._replace(
        inner_state=_restarted(local.inner_state, fresh, sound),
        weight=jnp.maximum(own, 0) / unit / jnp.where(anybody, mean, 1),
        expected=jnp.sum(there) / jnp.maximum(jnp.sum(expected), 1),
        healthy=healthy,
        anybody=anybody,
    )


def after_sync(
    updates: optax.Updates, local: LocalStep, excluded: jax.Array
) -> tuple[optax.Updates, Faults]:
    """Finite updates, and what kept this replica from the sync.

    Args:
      updates: of the synchronizer.
      local: the step, as `taking_part` returned it.
      excluded: whether this replica was.
    """
    faults = Faults(
        zeroed=jnp.asarray(local.healthy) & ~_finite.all_finite(updates),
        excluded=excluded,
        absent=~excluded & ~local.present,
        empty=~jnp.asarray(local.anybody),
        weight=jnp.asarray(local.weight, jnp.float32),
    )
    return _finite.finite_elements(updates), faults


def is_finite(state: Any, params: optax.Params) -> jax.Array:
    """Whether a state's arrays, and its scalars of scalar parameters, are finite."""
    leaves = _paths.leaves_with_names(params)
    scalars = {names for names, x in leaves if names and not jnp.ndim(x)}

    def looked_at(names, x):
        ends = (names[start:] for start in range(len(names)))
        return jnp.ndim(x) > 0 or any(end in scalars for end in ends)

    found = _paths.leaves_with_names(state)
    return _finite.all_finite(
        [x for names, x in found if looked_at(names, x) and _finite.is_float(x)]
    )


def fresh_state(inner: optax.GradientTransformation, params, state) -> optax.OptState:
    """The inner optimizer's state at the start, with Q as Dion restarts it.

    Where schedules have come to and hyperparameters that were injected
    (`optax.inject_hyperparams`) stay. To draw Q at random, as at the start, takes
    longer than the rest of a sync.
    """
    own = iter(_momentum.dion_states(state))
    fresh = _momentum.with_dion(
        inner.init(params),
        lambda x: x._replace(q=jax.tree.map(_power_iteration.cosines, next(own).q)),
    )
    return _keeping_schedules(state, fresh)


def _keeping_schedules(state: Any, fresh: Any) -> Any:
    def is_injected(node):
        return "hyperparams" in getattr(node, "_fields", ())

    def is_kept(node):
        return isinstance(node, optax.ScaleByScheduleState) or is_injected(node)

    def choose(old, new):
        if is_injected(old):
            inner = _keeping_schedules(old.inner_state, new.inner_state)
            return old._replace(inner_state=inner)
        return old if is_kept(old) else new

    return jax.tree.map(choose, state, fresh, is_leaf=is_kept)


def _restarted(state: Any, fresh: Any, is_sound: jax.Array) -> Any:
    """The state, or a fresh one if it is not sound."""

    def either(x, new):
        return x if x is new else jnp.where(is_sound, x, jnp.asarray(new, x.dtype))

    return jax.tree.map(either, state, fresh)
