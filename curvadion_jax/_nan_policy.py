"""The policy for replicas that are not finite, and for absent ones.

* *Non-finite gradients.* A replica whose gradients hold a NaN or an infinity, or whose
  norms are infinite, takes the step of a zero gradient, and its trigger sees zeros.
* *Zeroed updates.* Where finite gradients give updates that are not finite, in the
  inner or the outer optimizer, these elements of the updates are set to zero: no later
  update could repair the parameters. In an outer step those elements of the anchor and
  of the outer state stay as they were, and the next sync makes the replicas equal.
* *Excluded.* A replica contributes nothing to a sync if its parameters, its inner state
  or its sync state hold a NaN or an infinity (or its gradients, where these are what is
  averaged). An inner state that is not finite starts afresh, and the residual is
  dropped; with `reconcile` its finite parameters go to the anchor. Parameters that are
  not finite stay so until `replicas.repair` replaces them.
* *Absent.* A replica of weight 0 contributes nothing but the residual that it had
  before. With `reconcile` it keeps its drift; of gradients, only others' are averaged.
* *Empty.* If no replica takes part the mean is zero, apart from residuals.
* *Cooldown.* A replica that a sync could not help must not trigger the next one: an
  excluded replica requests none for 10 steps, and one without weight none at all.
  (Syncs that the step number makes due take place all the same.)

`_adaptive_sync` applies the policy around a step and a sync, and `_counters` counts.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _collectives, _finite, _momentum, _paths, _power_iteration
from curvadion_jax._counters import SyncMetrics
from curvadion_jax._interfaces import LocalStep, SyncState

# In steps, before an excluded replica may request a sync.
COOLDOWN = 10


def checked_weight(weight: Any) -> jax.Array | None:
    """The weight of a replica, float32[]; 0 where it is not finite, or negative."""
    if weight is None:
        return None
    if isinstance(weight, int | float) and not 0 <= weight < math.inf:
        raise ValueError(
            f"weight must be finite and not negative, got {weight}. It is how much "
            "this replica counts in a sync."
        )
    given = jnp.asarray(weight, jnp.float32)  # 2**40 tokens are more than int32 holds
    if given.shape:
        raise ValueError(
            f"weight has shape {given.shape} and must be one number per replica. "
            "Reduce it, as by jax.numpy.sum."
        )
    return jnp.where(jnp.isfinite(given) & (given > 0), given, 0)


def may_request(counters: SyncMetrics, weight: jax.Array | None) -> jax.Array:
    """Whether a sync could help this replica, bool[]."""
    last = counters.steps - counters.local_steps - 1  # the last sync step, or -1
    excluded = (counters.last_excluded == last) & (last >= 0)
    may = ~excluded | (counters.local_steps >= COOLDOWN)
    return may if weight is None else may & (weight > 0)


def participation(
    local: LocalStep,
    params: optax.Params,
    sync_state: SyncState,
    weight: jax.Array | None,
    contributes: jax.Array | bool,
    axis_name: str | None,
) -> tuple[LocalStep, jax.Array, jax.Array]:
    """Finds out who takes part in a sync, by gathering one number of each replica.

    `contributes` says whether what this replica would send is finite. Returns its step
    with its part in the sync, whether it is excluded, and whether its inner state is
    finite.
    """
    inner_finite = is_finite(local.inner_state, params)
    healthy = inner_finite & _finite.all_finite(params) & is_finite(sync_state, params)
    excluded = ~(healthy & contributes)
    own = jnp.asarray(1 if weight is None else weight, jnp.float32)
    # -1 marks an excluded replica.
    weights = _collectives.gathered(jnp.where(excluded, -1, own), axis_name)
    present = weights > 0
    # In units of the largest, so that the sum does not overflow.
    unit = jnp.where(jnp.any(present), jnp.max(weights), 1)
    mean = jnp.sum(jnp.where(present, weights, 0) / unit) / weights.size
    local = local._replace(
        weight=jnp.where(excluded, 0, own) / unit / jnp.where(mean > 0, mean, 1),
        expected=jnp.sum(present) / jnp.maximum(jnp.sum(weights >= 0), 1),
        healthy=healthy,
    )
    return local, excluded, inner_finite


def is_finite(state: Any, params: optax.Params) -> jax.Array:
    """Whether a state is finite; scalars that belong to no parameter may be Inf."""
    leaves = _paths.leaves_with_names(params)
    scalars = {names for names, x in leaves if names and not jnp.ndim(x)}

    def without_infinity(names, x):
        ends = (names[start:] for start in range(len(names)))
        if jnp.ndim(x) > 0 or any(end in scalars for end in ends):
            return x
        return jnp.where(jnp.isinf(x), 0, x)

    arrays = _paths.leaves_with_names(state)
    return _finite.all_finite(
        [without_infinity(names, x) for names, x in arrays if _finite.is_float(x)]
    )


def restarted(
    inner: optax.GradientTransformation, params, state, keep: jax.Array
) -> optax.OptState:
    """Restarts the inner optimizer's state unless `keep` is true.

    Counts of schedules and injected hyperparameters (`optax.inject_hyperparams`) stay.
    """
    # Drawing Dion's Q at random, as `init` does, takes longer than the rest of a sync.
    fresh = _momentum.with_dion(
        inner.init(params),
        lambda x: x._replace(dion_q=jax.tree.map(_power_iteration.cosines, x.dion_q)),
    )
    return jax.tree.map(
        lambda x, new: x if x is new else jnp.where(keep, x, jnp.asarray(new, x.dtype)),
        state,
        _keeping_schedules(state, fresh),
    )


def _keeping_schedules(state: Any, fresh: Any) -> Any:
    """A fresh state with the schedules and injected hyperparameters of another."""
    is_injected = lambda node: "hyperparams" in getattr(node, "_fields", ())
    is_count = lambda node: isinstance(node, optax.ScaleByScheduleState)
    is_kept = lambda node: is_count(node) or is_injected(node)

    def choose(old, new):
        if is_injected(old):
            inner = _keeping_schedules(old.inner_state, new.inner_state)
            return old._replace(inner_state=inner)
        return old if is_kept(old) else new

    return jax.tree.map(choose, state, fresh, is_leaf=is_kept)
