"""One optimizer out of an inner one, a trigger and a synchronizer."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import (
    _arguments,
    _collectives,
    _counters,
    _faults,
    _finite,
    _guards,
    _layout,
    _mapped,
    _partition,
    _requests,
    _trees,
    _xla,
)
from curvadion_jax._branches import Branches, sync_cost
from curvadion_jax._counters import SyncMetrics
from curvadion_jax._protocols import Synchronizer, SyncState, Trigger
from curvadion_jax._schedule import Due
from curvadion_jax.synchronizers._base import check_synchronizer, initial_state
from curvadion_jax.triggers._base import check_answer, check_trigger
from curvadion_jax.triggers._delay import remembered


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
    ask_every: int | None = None,
    allow_unchecked: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Lets replicas step alone, and synchronises them when the trigger says so.

    On every step each replica's trigger answers, and the answers are reduced to one: if
    any replica requests a sync, all take a sync step; else all take a local step, which
    sends nothing. The two are the branches of one `lax.cond`.

    Call it inside `curvadion_jax.replicas.step`, or your own `shard_map` in which
    parameters and optimizer state have a leading replica axis (the body strips it) and
    nobody averages the gradients. It returns finished parameter updates: nothing may
    follow it in a chain. Wrappers that decide per replica (`optax.apply_if_finite`,
    `optax.MultiSteps` with a skip function) belong inside, around `inner`; outside,
    replicas would wait for each other for ever. To accumulate gradients over
    micro-batches add them up before `update`: `optax.MultiSteps` around the whole runs
    it on every micro-step, syncs included, and throws away what it counted.

    A replica whose gradients are not finite skips the step, one whose state is not is
    excluded from syncs, one of weight 0 is absent from them and loses nothing; all of
    that is counted (`curvadion_jax.metrics.read`).

    Args:
      inner: optimizer of one replica, learning rate included. It must not communicate
        over the axis itself (that is checked).
      trigger: when to synchronise, see `curvadion_jax.triggers`.
      synchronizer: what is sent, see `curvadion_jax.synchronizers`.
      axis_name: name of the replica axis; None is one replica.
      dimension_numbers: how parameters are seen as matrices, by triggers that look at
        layers and by `reconcile`; the same as given to the inner optimizer.
      ask_every: number of steps for which replicas reduce their answers once, and send
        nothing at all on the others; requests on those are remembered
        (`triggers.remembered`). All must know when that is, so ``update(gradients,
        state, params, step=step)`` needs the number of the step, int[] from 0, given
        from outside and the same to all replicas, as by `replicas.step`.
      allow_unchecked: accept `shard_map(..., check_vma=False)`, under which it cannot
        be seen whether the gradients were averaged already.

    Returns:
      A transformation with :class:`AdaptiveSyncState`. Updates have the parameters'
      dtypes, and are finite. `update` takes ``weight=w``, float32[], replica-varying:
      how much this replica counts in means over the replicas, such as the number of
      tokens in its batch; 0 is absent, None is 1. And ``sync=True`` or ``sync=False``
      in place of the trigger's answer: the program is then that of a sync step, or of a
      local step, alone. A Python bool, static under `jit`, and the same on all
      replicas and processes. `replicas.step` does so by itself where the trigger is
      `scheduled`. (These two and `step` are not passed on to `inner`; all else is.)

    Raises:
      TypeError: if an argument is of the wrong kind, or a parameter not a real
        floating-point array.
      ValueError: if `ask_every` is below 1; at `update`, if `params` is missing, trees
        or shapes do not match, the axis is not bound, gradients were averaged before,
        something that must stay local communicates, or with `ask_every` the step is
        missing or may differ between replicas.

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
    check_trigger(trigger)
    check_synchronizer(synchronizer)
    _arguments.check_transformation(inner, "inner")
    inner = optax.with_extra_args_support(inner)
    if not trigger.scheduled:
        _check_no_delay(synchronizer, "trigger", "one that looks at more than counters")
    if ask_every is not None:
        _check_no_delay(synchronizer, "ask_every", ask_every)
        _arguments.check_int(ask_every, "ask_every")
        trigger = remembered(trigger)
    _collectives.check_axis_name(axis_name)

    def init_fn(params):
        views = _partition.matrix_views(params, dimension_numbers)
        inner_state = inner.init(params)
        counted = trigger.init(params, inner_state, views), _counters.initial()
        # An array of its own for every field, so that the state can be donated.
        trigger_state, metrics = jax.tree.map(jnp.copy, counted)
        return AdaptiveSyncState(
            inner_state=inner_state,
            trigger_state=trigger_state,
            sync_state=initial_state(synchronizer, params, inner_state, views),
            metrics=metrics,
        )

    def update_of_replica(
        updates, state, params, due=None, step=None, weight=None, **extra_args
    ):
        _guards.require_local_gradients(
            updates,
            axis_name,
            # In a mapped step gradients are local by construction.
            allow_unchecked=allow_unchecked or _mapped.current() is not None,
        )
        replica = Branches(
            inner=inner,
            synchronizer=synchronizer,
            axis_name=axis_name,
            extra_args=extra_args,
            views=_partition.matrix_views(params, dimension_numbers),
            layout=_layout.current(),
            weight=_faults.checked_weight(weight),
            usable=_finite.all_finite(updates),
        )
        counters = state.metrics

        # 1. This replica's trigger answers, and the largest answer is everybody's.
        def decide(gradients, params, state):
            seen = replica.observation(gradients, params, state, trigger.scheduled)
            return check_answer(
                trigger.decide(seen, state.trigger_state), state.trigger_state
            )

        seen = _finite.or_zeros(replica.usable, updates)
        decision, trigger_state = replica.locally(decide, seen, params, state)
        fire = decision.fire if due is None else due.sync
        if due is None and not trigger.scheduled:
            fire &= ~_faults.in_cooldown(counters, replica.weight)
        request, asked = replica.request(fire, counters, due), False
        if not isinstance(request, int):  # what is known to all is not asked
            forced = due is not None
            asked = forced or _requests.is_asked(step, ask_every, axis_name)
            request = _requests.largest(request, asked, axis_name)
        begins, ends = replica.begins_and_ends(request)

        # 2. A local step, and a sync if any replica requested one.
        operands = (state.sync_state, updates, state.inner_state, params)
        if synchronizer.after_local_step:
            alone = replica.locally(replica.local_step, *operands)
            results = _xla.run_once(
                ends, replica.syncs_after, alone, params, axis_name=axis_name
            )
            if synchronizer.delay:
                results = _xla.run_once(
                    begins, [replica.begin], results, params, axis_name=axis_name
                )
        else:
            results = _guards.switch(
                ends,
                replica.local_step,
                replica.syncs_instead,
                *operands,
                axis_name=axis_name,
                divided=replica.divided,
            )
        updates, inner_state, sync_state, faults = results

        # 3. What happened is counted.
        metrics = _counters.following(
            counters,
            decision,
            axis_name is not None and asked,
            begins,
            ends,
            faults=faults._replace(skipped=~replica.usable),
            payloads=replica.payloads(params, state.inner_state),
            gradient_bytes=_trees.float32_bytes(params),
        )
        state = AdaptiveSyncState(inner_state, trigger_state, sync_state, metrics)
        return updates, _collectives.vary(state, axis_name)

    @jax.named_scope(_guards.SCOPE)
    def update_fn(
        updates, state, params: Any = None, *, sync: bool | None = None, **extra_args
    ):
        _check_update(updates, state, params, init_fn)
        due = None
        if sync is not None:
            _check_no_delay(synchronizer, "sync", sync)
            due = Due(sync)
        elif trigger.scheduled and ask_every is None:
            views = _partition.matrix_views(params, dimension_numbers)
            cost = functools.partial(
                sync_cost, synchronizer, params, state.inner_state, views
            )
            due = _mapped.known_due(trigger, state.trigger_state, synchronizer, cost)
        return _mapped.update(
            functools.partial(update_of_replica, due=due),
            axis_name,
            updates,
            state,
            params,
            **extra_args,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_no_delay(synchronizer: Synchronizer, name: str, given: Any) -> None:
    """Rejects what leaves it open when a sync begins, where all must know it."""
    if synchronizer.delay:
        raise ValueError(
            f"a synchronizer with delay={synchronizer.delay} needs a trigger that "
            "looks at counters alone, such as triggers.evenly or every_k, by which all "
            f"know when a sync begins and ends; got {name}: {given}. Change that, or "
            "give delay=0"
        )


def _check_update(gradients, state, params, init_fn) -> None:
    _trees.check_state_type(state, AdaptiveSyncState)
    _trees.check_gradients(gradients, params)
    _trees.check_state(state, jax.eval_shape(init_fn, params))
