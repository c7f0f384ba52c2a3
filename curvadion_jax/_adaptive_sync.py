"""One optimizer out of an inner one, a trigger and a synchronizer."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import (
    _arguments,
    _collectives,
    _counters,
    _health,
    _partition,
    _trees,
)
from curvadion_jax._step import AdaptiveSyncState, Step, gradient_payload
from curvadion_jax.synchronizers import Synchronizer
from curvadion_jax.synchronizers import _base as _synchronizers
from curvadion_jax.triggers import Trigger, remembered
from curvadion_jax.triggers._base import check_trigger


def adaptive_sync(
    inner: optax.GradientTransformation,
    trigger: Trigger,
    synchronizer: Synchronizer,
    axis_name: str | None = None,
    *,
    local_step: optax.GradientTransformation | None = None,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    ask_every: int | None = None,
    allow_unchecked: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Lets replicas step alone, and synchronises them when the trigger says so.

    On every step each replica's trigger is asked, and the answers are reduced to one
    number (a maximum over one int32). If any replica wants to, all take the
    synchronizer's step; else all take a quiet step, which sends nothing. The two are
    the branches of one `lax.cond`, so that a quiet step does not pay for the other
    (of one `lax.switch` for a synchronizer with several variants of a sync). Where a
    sync begins with a quiet step (`reconcile`, without `local_step`), that is taken in
    front, and what follows it stands in a loop of one pass or none; such an optimizer
    cannot be differentiated in reverse under `jit`.

    Call it inside `curvadion_jax.replicas.step`, or your own `shard_map` in which
    parameters and optimizer state have a leading replica axis (the body strips it) and
    nobody averages the gradients. It returns finished parameter updates: nothing may
    follow it in a chain (`curvadion_jax.metrics.read` warns of what moved parameters
    after a sync of `reconcile`). Wrappers that decide per replica
    (`optax.apply_if_finite`, `optax.MultiSteps` with a skip function) belong inside,
    around `inner`; outside, replicas would wait for each other for ever. To accumulate
    gradients over micro-batches add them up before `update`: `optax.MultiSteps` around
    the whole runs it on every micro-step, syncs included, and throws away what it
    counted.

    *What is not finite.* A replica whose gradients hold a NaN or an infinity does not
    take the step: its updates are zero, its state stays as it is, and its trigger sees
    zeros; where syncs average gradients it is left out of the mean, and takes that
    step. At a sync a replica is left out of all means, and asks for no other for 10
    steps, if its parameters, its inner state or what the synchronizer keeps hold one.
    An inner state that is not finite starts afresh, and what was held back by error
    feedback is dropped. (`reconcile` then gives the replica the common model. Where
    syncs average gradients or factors its momentum is now another one than the others',
    and its parameters will be: name it to `curvadion_jax.replicas.mend`.) Scalars of
    the state are not looked at. The counters say who and when
    (`curvadion_jax.metrics.read`); parameters that are not finite stay so, since
    updates are added to them, until `mend` replaces them.

    *Who is not there.* A replica of weight 0 puts nothing into the means, and loses
    nothing: with `reconcile` it keeps its own momentum, and stays as far from the
    common model as it has drifted; where gradients or factors are averaged it holds
    them back for the next time if there is a compressor. (Else they are dropped.) Means
    to which it will add are over all who are expected, each of them counted as one.
    Where nobody takes part a sync changes nothing. A replica that missed the last
    sync asks for no other until it has a weight again.

    Args:
      inner: optimizer of one replica, learning rate included. It must not communicate
        over the axis itself (that is checked).
      trigger: when to synchronise, see `curvadion_jax.triggers`.
      synchronizer: what is sent, see `curvadion_jax.synchronizers`.
      axis_name: name of the replica axis; None is one replica.
      local_step: what a quiet step does instead of the inner optimizer's step, any
        Optax transformation. The inner optimizer then only accumulates its momentum.
        It advances (its schedules count) on every step.
      dimension_numbers: how parameters are seen as matrices, by triggers that look at
        layers and by `reconcile`; the same as given to the inner optimizer.
      ask_every: number of steps for which replicas reduce their answers once, and send
        nothing at all on the others; what a trigger wants on those is remembered
        (`triggers.remembered`) and done when they are next asked. All must know when
        that is, so ``update(gradients, state, params, step=step)`` needs the number of
        the step, int[] from 0: they are asked on those that `ask_every` divides. It
        must be given from outside, the same to all replicas, as by `replicas.step`; a
        counter in their states could differ, and is refused. None asks on every step.
      allow_unchecked: accept `shard_map(..., check_vma=False)`, under which it cannot
        be seen whether the gradients were averaged already.

    Returns:
      A transformation with :class:`AdaptiveSyncState`. Updates have the parameters'
      dtypes, and are finite. `update` takes ``weight=w``, float32[], replica-varying:
      how much this replica counts in means over the replicas, such as the number of
      tokens in its batch; 0 is one that takes no part in a sync on this step. None
      is 1. (It is not passed on to `inner`.)

    Raises:
      TypeError: if an argument is of the wrong kind, or a parameter not a real
        floating-point array.
      ValueError: if `ask_every` is below 1; at `update`, if `params` is missing, trees
        or shapes do not match, the axis is not bound, gradients were averaged before,
        something that must stay local communicates, or with `ask_every` the step is
        missing or may differ between replicas.

    Example:
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
    if ask_every is not None:
        _arguments.check_steps(ask_every, "ask_every")
        trigger = remembered(trigger)
    _arguments.check_switch(allow_unchecked, "allow_unchecked")
    _check_arguments(inner, synchronizer, axis_name, local_step)
    inner = optax.with_extra_args_support(inner)
    if local_step is not None:
        local_step = optax.with_extra_args_support(local_step)

    def init_fn(params):
        views = _partition.matrix_views(params, dimension_numbers)
        inner_state = inner.init(params)
        return AdaptiveSyncState(
            inner_state=inner_state,
            trigger_state=trigger.init(params, inner_state),
            local_state=() if local_step is None else local_step.init(params),
            sync_state=synchronizer.init(params, inner_state, views),
            metrics=_counters.initial(
                _synchronizers.payloads(synchronizer, params, inner_state, views),
                gradient_payload(params),
            ),
        )

    def update_fn(updates, state, params=None, *, step=None, weight=None, **extra_args):
        if params is None:
            raise ValueError(
                "adaptive_sync needs the parameters, got params=None: call "
                "update(gradients, state, params)"
            )
        _trees.check_state_type(state, AdaptiveSyncState)
        _trees.check_gradients(updates, params)
        _collectives.require_local(updates, axis_name, allow_unchecked=allow_unchecked)
        _trees.check_state(state, jax.eval_shape(init_fn, params))
        views = _partition.matrix_views(params, dimension_numbers)
        asked = None if ask_every is None else _is_asked(step, ask_every)
        one_step = Step(
            *(inner, trigger, synchronizer, axis_name, local_step),
            *(views, extra_args, asked, _checked_weight(weight)),
            usable=_health.all_finite(updates),
        )
        return one_step.take(updates, state, params)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_asked(step: Any, ask_every: int) -> jax.Array:
    """Whether replicas reduce their flags on this step."""
    if step is None:
        raise ValueError(
            f"adaptive_sync(ask_every={ask_every}) needs the number of the step, from "
            "outside and the same on all replicas: call update(gradients, state, "
            "params, step=step), with the step as a further argument of the training "
            "step, which replicas.step passes on as train(state, batch, step)"
        )
    step = jnp.asarray(step)
    if step.shape or not jnp.issubdtype(step.dtype, jnp.integer):
        raise TypeError(
            f"step must be one integer, the number of the step, got {step.dtype}"
            f"{list(step.shape)}"
        )
    return step % ask_every == 0


def _checked_weight(weight: Any) -> jax.Array | None:
    """What is not a weight, such as NaN, is none: the replica takes no part."""
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


def _check_arguments(inner, synchronizer, axis_name, local_step) -> None:
    _arguments.check_transformation(inner, "inner", "optax.adamw(1e-3)")
    if local_step is not None:
        _arguments.check_transformation(local_step, "local_step", "optax.sgd(0.1)")
    if not isinstance(synchronizer, Synchronizer):
        raise TypeError(
            "synchronizer must be a curvadion_jax.synchronizers.Synchronizer such as "
            f"reconcile(), got {synchronizer!r}"
        )
    _synchronizers.check_cycle(synchronizer.cycle)
    what = "a synchronizer's after_local_step"
    _arguments.check_switch(synchronizer.after_local_step, what)
    _collectives.check_axis_name(axis_name)
