"""What happens to replicas whose numbers are not finite, or who are not there.

The whole policy, as wrappers around the inner optimizer and the synchronizer:

* *Skipped.* A replica whose gradients hold a NaN or an infinity takes no local step:
  its updates are zero, its state stays, and its trigger sees zeros.
* *Contained.* Where the inner or the outer optimizer makes updates that are not finite
  of what is, the bad elements are zero: parameters, to which updates are added, cannot
  be mended by adding. Of an outer step anchor and outer state stay there as they were,
  replicas stay apart, and the next sync brings them together.
* *Excluded.* At a sync a replica counts nothing in any mean if its parameters, its
  inner state or its sync state hold a NaN or an infinity (or its gradients, where these
  are what is averaged). Its inner state starts afresh and its residual is dropped; with
  `reconcile` it gets the common model. Spoilt parameters stay so until `replicas.mend`
  replaces them.
* *Absent.* A replica of weight 0 counts nothing and loses nothing: it keeps its own
  momentum and drift, or, where gradients are averaged by a compressor, owes them. It
  pays what it owed before.
* *Empty.* Where nobody takes part a sync changes nothing.
* *Cooldown.* Whom a sync did not help must not force the next one: an excluded replica
  requests none for 10 steps, one that was absent none while it has no weight. (Syncs of
  a schedule nobody requests: they take place when they are due.)

All of it is counted (`_counters`). Scalars of a state are looked at where they belong
to a scalar parameter; others may be meant to be infinite, as the best loss so far is.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import (
    _collectives,
    _finite,
    _momentum,
    _paths,
    _power_iteration,
)
from curvadion_jax._counters import Faults, SyncMetrics
from curvadion_jax._local_step import LocalStep
from curvadion_jax._protocols import SyncState

# In steps, before an excluded replica may request a sync.
COOLDOWN = 10


def local_step(
    update: Callable[..., tuple[Any, Any]],
    gradients: optax.Updates,
    state: optax.OptState,
    params: optax.Params,
    usable: jax.Array,
) -> tuple[optax.Updates, optax.OptState, jax.Array]:
    """A replica's own step: none where gradients are not finite, and finite updates.

    Args:
      update: of the optimizer.
      gradients: as they are.
      state: of the optimizer.
      params: before the step.
      usable: bool[], whether the gradients are finite.

    Returns:
      Updates, the state after the step, and bool[], whether updates were contained.
    """
    updates, after = update(gradients, state, params)
    contained = usable & ~_finite.all_finite(updates)
    updates = _finite.finite_elements(_finite.or_zeros(usable, updates))
    return updates, _finite.where(usable, after, state), contained


def checked_weight(weight: Any) -> jax.Array | None:
    """The weight of a replica; 0 for what is none, such as NaN."""
    if weight is None:
        return None
    if isinstance(weight, int | float) and not 0 <= weight < math.inf:
        raise ValueError(f"weight must be finite and not negative, got {weight}")
    number = isinstance(weight, int | float) or hasattr(weight, "dtype")
    given = jnp.asarray(weight) if number else None
    if given is None or given.shape or not jnp.issubdtype(given.dtype, jnp.number):
        raise TypeError(
            "weight must be one number, how much this replica counts in a sync, got "
            f"{weight!r}"
        )
    return jnp.where(jnp.isfinite(given) & (given > 0), given, 0)


def in_cooldown(counters: SyncMetrics, weight: jax.Array | None) -> jax.Array:
    """Whether a replica missed the last sync and would miss this one, bool[]."""
    last = counters.steps - counters.local_steps - 1
    excluded, absent = counters.excluded.last == last, counters.absent.last == last
    cooling = excluded & (counters.local_steps < COOLDOWN)
    if weight is not None:
        cooling |= (excluded | absent) & (weight == 0)
    return cooling & (last >= 0)


def is_healthy(params: optax.Params, state: SyncState, sound: jax.Array) -> jax.Array:
    """Whether all that a replica has is finite, bool[]; `sound` is its inner state."""
    return sound & _finite.all_finite(params) & is_finite(state, params)


def brought(
    weight: jax.Array | None, healthy: jax.Array, brings: jax.Array | bool = True
) -> jax.Array:
    """The weight of a replica, 0 if it is absent, -1 if what it has is not finite."""
    own = jnp.asarray(1 if weight is None else weight, jnp.float32)
    return jnp.where(healthy & brings, own, -1)


def taking_part(
    local: LocalStep,
    fresh: optax.OptState,
    sound: jax.Array,
    own: jax.Array,
    healthy: jax.Array,
    axis_name: str | None,
) -> LocalStep:
    """A local step with this replica's part in the sync, and a sound inner state.

    Every replica gathers one number of each, `brought`. So all know who takes part.

    Args:
      local: the step, with the inner state as it is.
      fresh: inner state to start afresh from.
      sound: bool[], whether the inner state is finite.
      own: float32[], what this replica has `brought`.
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
        inner_state=restarted(local.inner_state, fresh, sound),
        weight=jnp.maximum(own, 0) / unit / jnp.where(anybody, mean, 1),
        expected=jnp.sum(there) / jnp.maximum(jnp.sum(expected), 1),
        healthy=healthy,
        anybody=anybody,
    )


def after_sync(
    updates: optax.Updates, local: LocalStep, excluded: jax.Array, closes: bool
) -> tuple[optax.Updates, Faults]:
    """Finite updates, and what kept this replica from the sync.

    Args:
      updates: of the synchronizer.
      local: the step, as `taking_part` returned it.
      excluded: the same.
      closes: whether a sync that nobody took part in counts as one.
    """
    contained = jnp.asarray(local.healthy) & ~_finite.all_finite(updates)
    faults = Faults(
        skipped=jnp.zeros([], jnp.bool_),
        contained=contained,
        excluded=excluded,
        absent=~excluded & ~local.present,
        empty=~jnp.asarray(local.anybody),
        closed=jnp.asarray(local.anybody | closes),
    )
    return _finite.finite_elements(updates), faults


def is_finite(state: Any, params: optax.Params) -> jax.Array:
    """Whether a state's arrays, and its scalars of scalar parameters, are finite."""
    return _finite.all_finite(_looked_at(state, params))


def is_finite_apart(state: Any, params: optax.Params) -> jax.Array:
    """The same, not to be waited for together with local steps.

    Where a replica has several devices either is an all-reduce, and XLA joins those of
    one operator and dtype: what a sync with a delay sends would wait for local steps.
    So this is an `or` in place of a sum (and slower on CPU, see `_finite.all_finite`).
    """
    bad = [jnp.any(~jnp.isfinite(x)) for x in _looked_at(state, params)]
    return _finite.none_of(bad)


def _looked_at(state: Any, params: optax.Params) -> list[Any]:
    leaves = _paths.leaves_with_names(params)
    scalars = {names for names, x in leaves if names and not jnp.ndim(x)}

    def looked_at(names, x):
        ends = (names[start:] for start in range(len(names)))
        return jnp.ndim(x) > 0 or any(end in scalars for end in ends)

    leaves = _paths.leaves_with_names(state)
    return [x for names, x in leaves if looked_at(names, x) and _finite.is_float(x)]


def fresh_state(inner: optax.GradientTransformation, params, state) -> optax.OptState:
    """The inner optimizer's state at the start, with Q as Dion restarts it.

    To draw Q at random, as at the start, takes longer than the rest of a sync.
    """
    own = iter(_momentum.dion_states(state))
    return _momentum.with_dion(
        inner.init(params),
        lambda x: x._replace(q=jax.tree.map(_power_iteration.cosines, next(own).q)),
    )


def restarted(state: Any, fresh: Any, is_sound: jax.Array) -> Any:
    """A state that is not sound as at the start.

    Named tuples with arrays in them start afresh as a whole: Adam's count corrects the
    bias of its moments. Of all else floating-point arrays do, and scalars that are not
    finite: learning rates that were set, and the counts of schedules, stay.
    """

    def leaf(x, new, alone=True):
        new = jnp.asarray(new, x.dtype) if _finite.is_float(x) else new
        if not alone:
            return jnp.where(is_sound, x, new)
        if not _finite.is_float(x):
            return x
        return jnp.where(is_sound | (jnp.isfinite(x) & (jnp.ndim(x) == 0)), x, new)

    def node(x, new):
        whole = _is_innermost(x) and any(map(jnp.ndim, jax.tree.leaves(x)))
        return jax.tree.map(lambda a, b: leaf(a, b, alone=not whole), x, new)

    return jax.tree.map(node, state, fresh, is_leaf=_is_innermost)


def _is_named(x: Any) -> bool:
    is_masked = isinstance(x, optax.MaskedNode)  # in place of others' parameters
    return isinstance(x, tuple) and hasattr(x, "_fields") and not is_masked


def _is_innermost(x: Any) -> bool:
    """Whether a node is a named tuple without others in it."""
    if not _is_named(x):
        return False
    inside = jax.tree.leaves(tuple(x), is_leaf=_is_named)
    return not any(map(_is_named, inside))
