"""One optimizer out of an inner one, a trigger and a synchronizer."""

import dataclasses
import functools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import (
    _branches,
    _collectives,
    _counters,
    _memory,
    _partition,
    _paths,
    _payload,
)
from curvadion_jax._counters import SyncMetrics
from curvadion_jax._matrices import MatrixView
from curvadion_jax.synchronizers import LocalStep, Synchronizer
from curvadion_jax.synchronizers import _base as _synchronizers
from curvadion_jax.synchronizers._base import dion_states
from curvadion_jax.triggers import Observation, Trigger, remembered
from curvadion_jax.triggers._base import check_steps, check_trigger


class AdaptiveSyncState(NamedTuple):
    """State of `adaptive_sync`. Shared fields have equal values on all replicas.

    Attributes:
      inner_state: the inner optimizer's, as after a local step. Replica-varying.
      trigger_state: what the trigger remembers.
      local_state: state of `local_step`, empty without one. Replica-varying.
      sync_state: what the synchronizer keeps; changes at syncs only.
      metrics: `SyncMetrics`; changes on every step.

    Example:
      >>> from curvadion_jax import synchronizers, triggers
      >>> tx = adaptive_sync(
      ...     optax.sgd(0.1), triggers.every_k(4), synchronizers.reconcile()
      ... )
      >>> state = tx.init({"w": jnp.ones(3)})
      >>> state.sync_state.anchor["w"].tolist()
      [1.0, 1.0, 1.0]
    """

    inner_state: optax.OptState
    trigger_state: Any
    local_state: optax.OptState
    sync_state: Any
    metrics: SyncMetrics


def _check_trees(updates: Any, params: Any) -> None:
    if jax.tree.structure(updates) != jax.tree.structure(params):
        raise ValueError(
            "gradients and parameters must be trees of the same structure, got\n"
            f"{jax.tree.structure(updates)}\nand\n{jax.tree.structure(params)}"
        )
    pairs = zip(_paths.leaves_with_path(params), jax.tree.leaves(updates), strict=True)
    for (name, param), gradient in pairs:
        if param.shape != gradient.shape:
            raise ValueError(
                f"the gradient of {name!r} has shape {gradient.shape}, the parameter "
                f"{param.shape}"
            )
        if not jnp.issubdtype(param.dtype, jnp.floating):
            raise TypeError(
                f"the parameter {name!r} has dtype {param.dtype}; only real "
                "floating-point parameters can be trained. Keep others out of the "
                "parameters, or freeze them with optax.masked around the whole"
            )


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
    follow it in a chain. Wrappers that decide per replica (`optax.apply_if_finite`,
    `optax.MultiSteps` with a skip function) belong inside, around `inner`; outside,
    replicas would wait for each other for ever. To accumulate gradients over
    micro-batches add them up before `update`: `optax.MultiSteps` around the whole runs
    it on every micro-step, syncs included, and throws away what it counted.

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
      dtypes.

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
        check_steps(ask_every, "ask_every")
        trigger = remembered(trigger)
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
                _gradient_payload(params),
            ),
        )

    def update_fn(updates, state, params=None, *, step=None, **extra_args):
        if params is None:
            raise ValueError(
                "adaptive_sync needs the parameters: call update(gradients, state, "
                "params)"
            )
        _check_trees(updates, params)
        _collectives.require_local(updates, axis_name, allow_unchecked=allow_unchecked)
        views = _partition.matrix_views(params, dimension_numbers)
        asked = None if ask_every is None else _is_asked(step, ask_every)
        one_step = _Step(
            *(inner, trigger, synchronizer, axis_name, local_step),
            *(views, extra_args, asked),
        )
        return one_step.take(updates, state, params)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@dataclasses.dataclass(frozen=True)
class _Step:
    """One step of one replica: the parts of the optimizer, and what they need."""

    inner: optax.GradientTransformationExtraArgs
    trigger: Trigger
    synchronizer: Synchronizer
    axis_name: str | None
    local_step: optax.GradientTransformationExtraArgs | None
    views: Mapping[str, MatrixView | None]
    extra_args: Mapping[str, Any]
    asked: jax.Array | None

    def take(self, gradients, state: AdaptiveSyncState, params):
        """The updates and the state after the step, quiet or synchronised."""
        axis_name = self.axis_name
        decision, trigger_state = _branches.run_locally(
            self._decide, gradients, params, state, axis_name=axis_name
        )
        which = _collectives.largest(
            self._wish(decision.fire, state.metrics.syncs), axis_name, self.asked
        )
        local_updates, local_state = gradients, state.local_state
        if self.local_step is not None:
            local_updates, local_state = _branches.run_locally(
                functools.partial(self.local_step.update, **self.extra_args),
                *(gradients, state.local_state, params),
                axis_name=axis_name,
            )
        updates, inner_state, sync_state = self._quiet_or_sync(
            which, gradients, local_updates, state, params
        )
        asked = True if self.asked is None else self.asked
        metrics = _counters.following(state.metrics, decision, asked, which)
        after = AdaptiveSyncState(
            inner_state, trigger_state, local_state, sync_state, metrics
        )
        return updates, _collectives.vary(after, axis_name)

    def _quiet_or_sync(self, which, gradients, local_updates, state, params):
        """Updates, inner state and state of the synchronizer after the step."""
        axis_name = self.axis_name
        before = (gradients, state.inner_state, params)
        steps = _synchronizers.steps(self.synchronizer)
        if self.synchronizer.after_local_step and self.local_step is None:
            taken = _branches.run_locally(
                self._inner_step, *before, axis_name=axis_name
            )
            return _branches.then_sync(
                which,
                [functools.partial(self._sync_after, step) for step in steps],
                (*taken, state.sync_state),
                *before,
                axis_name=axis_name,
            )
        return _branches.switch(
            which,
            self._quiet,
            [functools.partial(self._sync, step) for step in steps],
            *(local_updates, state.sync_state, *before),
            axis_name=axis_name,
        )

    def _wish(self, fire, syncs):
        """0 for a quiet step, else 1 + the variant of the sync that is due, int32[]."""
        cycle = self.synchronizer.cycle
        if len(set(cycle)) == 1:
            return fire.astype(jnp.int32)
        due = jnp.array(cycle, jnp.int32)[syncs % len(cycle)]
        return jnp.where(fire, 1 + due, 0)

    def _inner_step(self, gradients, inner_state, params, **more):
        updates, after = self.inner.update(
            gradients, inner_state, params, **self.extra_args, **more
        )
        return _like(updates, params), _like(after, inner_state)

    def _accumulate(self, gradients, inner_state, params):
        """The inner state with this step's momentum, and no step taken."""
        asked = _Asked()
        _, after = self._inner_step(gradients, inner_state, params, momentum_only=asked)
        if dion_states(inner_state) and not asked.seen:
            raise ValueError(
                "a transformation around Dion does not pass on the extra argument "
                "momentum_only. Build it as an optax.GradientTransformationExtraArgs "
                "that forwards extra arguments"
            )
        return after

    def _decide(self, gradients, params, state: AdaptiveSyncState):
        observation = Observation(
            gradients,
            state.inner_state,
            params,
            self.views,
            lambda: self._accumulate(gradients, state.inner_state, params),
            state.metrics.steps,
            state.metrics.syncs,
            state.metrics.quiet_steps,
            getattr(state.sync_state, "anchor", None),
            self._sync_cost(params, state.inner_state),
        )
        return self.trigger.decide(observation, state.trigger_state)

    def _sync_cost(self, params, inner_state) -> float:
        """Bytes of a sync over those of an all-reduce of all gradients in float32."""
        cycle = self.synchronizer.cycle
        variants = _synchronizers.payloads(
            self.synchronizer, params, inner_state, self.views
        )
        sent = _payload.total(variants[variant] for variant in cycle)
        averaged = sent.as_averaged(_collectives.axis_size(self.axis_name))
        return averaged / len(cycle) / max(_gradient_payload(params), 1)

    def _sync_after(self, step, done, gradients, inner_state, params):
        updates, after, sync_state = done

        def taken(given_gradients, given_state, **more):
            given = jax.tree.leaves((given_gradients, given_state))
            own = jax.tree.leaves((gradients, inner_state))
            same = len(given) == len(own) and all(map(operator.is_, given, own))
            if more or not same:
                raise ValueError(
                    "a synchronizer with after_local_step=True takes the local step as "
                    "it is: call local.take(local.gradients, local.inner_state), or "
                    "leave after_local_step out"
                )
            return updates, after

        return self._synced(step, taken, sync_state, gradients, inner_state, params)

    def _sync(self, step, local_updates, sync_state, gradients, inner_state, params):
        del local_updates

        def take(given_gradients, given_state, **more):
            return self._inner_step(given_gradients, given_state, params, **more)

        return self._synced(step, take, sync_state, gradients, inner_state, params)

    def _synced(self, step, take, sync_state, gradients, inner_state, params):
        local = LocalStep(gradients, inner_state, params, self.views, take)
        kept = _memory.to_device(sync_state)
        updates, inner_state, new = step(
            local, kept, _collectives.group(self.axis_name)
        )
        sync_state = _memory.put_back(new, kept, sync_state)
        return _like(updates, params), inner_state, sync_state

    def _quiet(self, local_updates, sync_state, gradients, inner_state, params):
        if self.local_step is None:
            updates, inner_state = self._inner_step(gradients, inner_state, params)
        else:
            updates = _like(local_updates, params)
            inner_state = self._accumulate(gradients, inner_state, params)
        return updates, inner_state, sync_state


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


def _gradient_payload(params) -> int:
    """Bytes of all gradients in float32."""
    return 4 * sum(leaf.size for leaf in jax.tree.leaves(params))


def _check_arguments(inner, synchronizer, axis_name, local_step) -> None:
    for name, value in (("inner", inner), ("local_step", local_step)):
        optional = name == "local_step" and value is None
        if not optional and not isinstance(value, optax.GradientTransformation):
            raise TypeError(
                f"{name} must be an Optax transformation such as optax.adamw(1e-3), "
                f"got {value!r}"
            )
    if not isinstance(synchronizer, Synchronizer):
        raise TypeError(
            "synchronizer must be a curvadion_jax.synchronizers.Synchronizer such as "
            f"reconcile(), got {synchronizer!r}"
        )
    _synchronizers.check_cycle(synchronizer.cycle)
    if not isinstance(synchronizer.after_local_step, bool):
        raise TypeError(
            "a synchronizer's after_local_step must be True or False, got "
            f"{synchronizer.after_local_step!r}"
        )
    _collectives.check_axis_name(axis_name)


class _Asked:
    """A true value that knows whether anyone has looked at it."""

    seen = False

    def __bool__(self) -> bool:
        self.seen = True
        return True


def _like(tree: Any, like: Any) -> Any:
    """A tree with the dtypes of another, where the structures agree."""
    if jax.tree.structure(tree) != jax.tree.structure(like):
        return tree
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)
