"""One optimizer out of an inner one, a trigger and a synchronizer."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import (
    _collectives,
    _counters,
    _faults,
    _finite,
    _guards,
    _layout,
    _mapped,
    _memory,
    _momentum,
    _partition,
    _trees,
    _xla,
    triggers,
)
from curvadion_jax._collectives import Replicas
from curvadion_jax._counters import SyncMetrics, no_faults
from curvadion_jax._interfaces import (
    LocalStep,
    Observation,
    Payload,
    Synchronizer,
    SyncState,
    Trigger,
    Views,
)
from curvadion_jax._layout import Layout


class AdaptiveSyncState(NamedTuple):
    """State of `adaptive_sync`. Shared fields have equal values on all replicas.

    Attributes:
      inner_state: the inner optimizer's, as after a local step. Replica-varying.
      trigger_state: what the trigger remembers.
      sync_state: what the synchronizer keeps; changes at syncs only.
      metrics: `SyncMetrics`; changes on every step.

    Example:
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import adaptive_sync, synchronizers, triggers
      >>> tx = adaptive_sync(
      ...     optax.sgd(0.1), triggers.every_k(4), synchronizers.reconcile()
      ... )
      >>> state = tx.init({"w": jnp.ones(3)})
      >>> state.sync_state.anchor["w"].tolist()
      [1.0, 1.0, 1.0]
    """

    inner_state: optax.OptState
    trigger_state: Any
    sync_state: SyncState
    metrics: SyncMetrics


def adaptive_sync(
    inner: optax.GradientTransformation,
    trigger: Trigger,
    synchronizer: Synchronizer,
    axis_name: str | None = None,
    *,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    allow_unchecked: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Lets replicas take local steps, and synchronises them when the trigger says so.

    On a step on which a decision is due each replica's trigger answers, and the answers
    are reduced to one: if any replica requests a sync, all take a sync step; else all
    take a local step, which sends nothing. The two are the branches of one `lax.cond`;
    a sync that follows the local step, as `reconcile`'s, is in a loop of one pass or
    none.
    Triggers that go by the number of the step (`triggers.evenly`, `every_k`) need no
    vote.

    Call it inside `curvadion_jax.replicas.step`, or your own `shard_map` in which
    parameters and optimizer state have a leading replica axis (the body strips it) and
    nobody averages the gradients. It returns finished parameter updates: nothing may
    follow it in a chain. Wrappers that decide per replica (`optax.apply_if_finite`,
    `optax.MultiSteps` with a skip function) belong inside, around `inner`; outside,
    they would deadlock. To accumulate gradients over micro-batches add them up before
    `update`, as by `optax.microbatching`.

    A replica whose gradients are not finite takes the step of a zero gradient, one
    whose state is not finite is excluded from syncs, one of weight 0 is absent from
    them; all of that is counted (`curvadion_jax.metrics.read`).

    Args:
      inner: optimizer of one replica, learning rate included. It must not communicate
        over the axis itself (that is checked).
      trigger: when to synchronise, see `curvadion_jax.triggers`.
      synchronizer: what is sent, see `curvadion_jax.synchronizers`.
      axis_name: name of the replica axis; None means one replica.
      dimension_numbers: how parameters are seen as matrices, by triggers that look at
        layers and by `reconcile`; the same as given to the inner optimizer.
      allow_unchecked: accept `shard_map(..., check_vma=False)`, under which it cannot
        be seen whether the gradients were averaged already.

    Returns:
      A transformation with :class:`AdaptiveSyncState`. Updates have the parameters'
      dtypes, and are finite. `update` takes ``weight=w``, float32[], replica-varying:
      how much this replica counts in means over the replicas, such as the number of
      tokens in its batch; 0 means absent, None means 1. And ``due=True`` or
      ``due=False``, static and the same on all replicas: whether a decision is due on
      this step, in place of ``trigger.due``. A step that is not due is a program
      without a collective and without a condition. `replicas.step` passes it by itself;
      without it replicas vote on every step. (These two are not passed on to `inner`;
      all else is.)

    Raises:
      ValueError: at `update`, if `params` is missing, trees or shapes do not match, the
        axis is not bound, gradients were averaged before, or something that must stay
        local communicates.

    Example:
      >>> import jax.numpy as jnp
      >>> from curvadion_jax import synchronizers, triggers
      >>> local_sgd = adaptive_sync(
      ...     optax.sgd(0.1), triggers.every_k(4), synchronizers.reconcile()
      ... )
      >>> params = {"w": jnp.ones(3)}
      >>> state = local_sgd.init(params)
      >>> updates, state = local_sgd.update(params, state, params)
      >>> print(updates["w"], state.metrics.syncs)
      [-0.1 -0.1 -0.1] 0
    """
    inner = optax.with_extra_args_support(inner)
    _collectives.check_axis_name(axis_name)
    built_in_trace = _mapped.is_tracing()

    def init_fn(params):
        views = _partition.matrix_views(params, dimension_numbers)
        inner_state = inner.init(params)
        counted = trigger.init(params, inner_state, views), _counters.initial()
        # An array of its own for every field, so that the state can be donated.
        trigger_state, metrics = jax.tree.map(jnp.copy, counted)
        return AdaptiveSyncState(
            inner_state=inner_state,
            trigger_state=trigger_state,
            sync_state=synchronizer.init(params, inner_state, views),
            metrics=metrics,
        )

    def update_of_replica(updates, state, params, due=None, weight=None, **extra_args):
        _guards.require_local_gradients(
            updates,
            axis_name,
            # In a mapped step gradients are local by construction.
            allow_unchecked=allow_unchecked or _mapped.current() is not None,
        )
        finite = _finite.norms_finite(updates)
        replica = _Replica(
            inner=inner,
            synchronizer=synchronizer,
            axis_name=axis_name,
            extra_args=extra_args,
            views=_partition.matrix_views(params, dimension_numbers),
            layout=_layout.current(),
            weight=_faults.checked_weight(weight),
            finite=finite,
        )
        updates, counters = _finite.or_zeros(finite, updates), state.metrics

        # 1. Ask this replica's trigger.
        def decide(gradients, params, state):
            seen = replica.observation(gradients, params, state)
            decision, new = triggers.answer(trigger, seen, state.trigger_state)
            return decision, _trees.like(new, state.trigger_state)

        decision, trigger_state = replica.locally(decide, updates, params, state)

        # 2. Decide for all replicas alike. What a Python bool settles needs no vote.
        if due is None and trigger.due is not None:
            due = trigger.due(counters.steps, replica.sync_cost(params, state))
        fire: Any = due
        if due is not False and trigger.decide is not None:
            fire = decision.fire & _faults.may_request(counters, replica.weight)
            fire = fire if due is None else fire & due
        voted = not isinstance(fire, bool)
        if voted:
            fire = _collectives.any_replica(fire, axis_name)
            if axis_name is not None:
                fire = _guards.one_decision(fire)

        # 3. Take a local step, and a sync if any replica requested one.
        operands = (state.sync_state, updates, state.inner_state, params)
        if synchronizer.after_local_step:
            done = replica.locally(replica.local_step, *operands)
            results = _xla.run_once(
                fire, replica.sync_after, done, params, axis_name=axis_name
            )
        else:
            results = _guards.cond(
                fire,
                replica.sync_instead,
                replica.local_step,
                *operands,
                axis_name=axis_name,
                sharded=bool(replica.layout.axes),
            )
        updates, inner_state, sync_state, faults = results

        # 4. Count what happened.
        metrics = _counters.following(
            counters,
            decision,
            voted=voted and axis_name is not None,
            synced=fire,
            finite=finite,
            faults=faults,
            payload=replica.payload(params, state.inner_state),
            gradient_bytes=_trees.float32_bytes(params),
        )
        state = AdaptiveSyncState(inner_state, trigger_state, sync_state, metrics)
        return updates, _collectives.vary(state, axis_name)

    @jax.named_scope(_guards.SCOPE)
    def update_fn(
        updates, state, params: Any = None, *, due: bool | None = None, **extra_args
    ):
        _check_update(updates, state, params)
        if due is None:
            views = _partition.matrix_views(params, dimension_numbers)
            cost = functools.partial(
                sync_cost, synchronizer, params, state.inner_state, views
            )
            due = _mapped.known_due(trigger, cost)
        return _mapped.update(
            functools.partial(update_of_replica, due=due),
            axis_name,
            updates,
            state,
            params,
            has_constants=built_in_trace,
            **extra_args,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_update(gradients, state, params) -> None:
    _trees.check_gradients(gradients, params)
    if jnp.ndim(state.metrics.steps):
        raise ValueError(
            f"The optimizer state has a leading axis of {len(state.metrics.steps)}. "
            "Inside a shard_map of your own strip it from state, parameters and "
            "gradients; curvadion_jax.replicas.step does that by itself."
        )


def sync_cost(
    synchronizer: Synchronizer, params, inner_state, views: Views, replicas: int
) -> float:
    """See `Observation`."""
    payload = synchronizer.payload(params, inner_state, views)
    return payload.as_averaged(replicas) / max(_trees.float32_bytes(params), 1)


class _Replica(NamedTuple):
    """One replica on one step, and the branches that it may take.

    The branches return updates, inner state, sync state and `Faults`.

    Attributes:
      inner: see `adaptive_sync`, as `synchronizer` and `axis_name`.
      extra_args: for the inner optimizer.
      views: path of a parameter -> how it is seen as matrices, or None.
      layout: how the arrays of this replica lie on its devices.
      weight: float32[], how much it counts in a sync; None means 1.
      finite: bool[], whether its gradients are finite.
    """

    inner: optax.GradientTransformationExtraArgs
    synchronizer: Synchronizer
    axis_name: str | None
    extra_args: dict[str, Any]
    views: Views
    layout: Layout
    weight: jax.Array | None
    finite: jax.Array

    def locally(self, function: Callable[..., Any], *operands: Any) -> Any:
        """See `_guards.locally`."""
        return _guards.locally(
            function,
            *operands,
            axis_name=self.axis_name,
            sharded=bool(self.layout.axes),
        )

    def sync_cost(self, params, state: AdaptiveSyncState) -> float:
        size = _collectives.axis_size(self.axis_name)
        return sync_cost(self.synchronizer, params, state.inner_state, self.views, size)

    def observation(self, gradients, params, state: AdaptiveSyncState) -> Observation:
        """What the trigger sees."""
        counters, inner_state = state.metrics, state.inner_state

        def next_inner_state():
            return _momentum.after_local_step(
                self._update, gradients, inner_state, params
            )

        return Observation(
            gradients=gradients,
            finite=self.finite,
            inner_state=inner_state,
            params=params,
            views=self.views,
            next_inner_state=next_inner_state,
            steps=counters.steps,
            syncs=counters.syncs,
            local_steps=counters.local_steps,
            anchor=state.sync_state.anchor,
            sync_cost=self.sync_cost(params, state),
        )

    def payload(self, params, inner_state) -> Payload:
        """What a sync sends: nothing where there is one replica."""
        if self.axis_name is None:
            return Payload()
        found = self.synchronizer.payload(params, inner_state, self.views)
        return found + _counters.WEIGHT

    def local_step(self, sync_state, gradients, inner_state, params):
        """The step that sends nothing."""
        updates, inner_state = self._update(gradients, inner_state, params)
        zeroed = ~_finite.all_finite(updates)
        updates = _finite.finite_elements(updates)
        return updates, inner_state, sync_state, no_faults()._replace(zeroed=zeroed)

    def sync_after(self, done, params):
        """A sync that follows the local step, such as `reconcile`."""
        updates, inner_state, sync_state, faults = done

        def sync_unless_empty(local, kept, group):
            return _xla.if_any(
                local.anybody,
                lambda *before: self.synchronizer.sync(local, before[-1], group),
                *local.take(),
                kept,
                axis_name=self.axis_name,
            )

        local = LocalStep(
            (), inner_state, params, self.views, lambda own: (updates, own.inner_state)
        )
        moved = optax.apply_updates(params, updates)
        *results, missed = self._synchronised(
            sync_unless_empty, local, sync_state, moved
        )
        return *results, missed._replace(zeroed=faults.zeroed | missed.zeroed)

    def sync_instead(self, sync_state, gradients, inner_state, params):
        """A sync that replaces the local step, such as `average_gradients`."""

        def take(local, gradients=None, inner_state=None, **more):
            gradients = local.gradients if gradients is None else gradients
            inner_state = local.inner_state if inner_state is None else inner_state
            return self._update(gradients, inner_state, params, **more)

        local = LocalStep(gradients, inner_state, params, self.views, take)
        return self._synchronised(
            self.synchronizer.sync, local, sync_state, params, there=self.finite
        )

    def _synchronised(
        self, sync, local: LocalStep, sync_state, moved, there: Any = True
    ):
        """Updates, inner state and sync state after a sync, and who missed it.

        `moved` are the parameters that the replica comes with.
        """
        kept = _memory.to_device(sync_state)
        sound = _faults.is_finite(local.inner_state, moved)
        healthy = _faults.is_healthy(moved, kept, sound)
        own = _faults.contribution(self.weight, healthy, there)
        fresh = _faults.fresh_state(self.inner, local.params, local.inner_state)
        local = _faults.taking_part(local, fresh, sound, own, healthy, self.axis_name)
        local = local._replace(take=functools.partial(local.take, local))
        group = Replicas(self.axis_name, self.layout)
        updates, inner_state, new = sync(local, kept, group)
        updates, faults = _faults.after_sync(
            _trees.like(updates, local.params), local, own < 0
        )
        new = jax.tree.map(_memory.beside, new, sync_state)
        return updates, inner_state, new, faults

    def _update(self, gradients, inner_state, params, **more):
        """The inner optimizer's, in the dtypes of parameters and state."""
        if self.layout.axes:
            more["layout"] = self.layout
        updates, after = self.inner.update(
            gradients, inner_state, params, **self.extra_args, **more
        )
        return _trees.like(updates, params), _trees.like(after, inner_state)
