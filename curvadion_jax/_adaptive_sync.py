"""Makes one optimizer from an inner optimizer, a trigger and a synchronizer.

`_Replica.step` is the algorithm: the trigger looks, the replicas vote, one `lax.cond`
takes a local step or a sync, and what happened is counted. `_nan_policy` says who takes
part in a sync, and `_guards` what a branch may not do.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer

from curvadion_jax import (
    _collectives,
    _counters,
    _finite,
    _guards,
    _mapped,
    _memory,
    _momentum,
    _nan_policy,
    _partition,
    _trees,
    _within_replica,
    triggers,
)
from curvadion_jax._counters import SyncMetrics
from curvadion_jax._interfaces import (
    LocalStep,
    Observation,
    Payload,
    Synchronizer,
    SyncState,
    Trigger,
    Views,
)
from curvadion_jax._jax_internals import SCOPE, trace, varying

Branch = Callable[..., Any]  # of a `lax.cond`


class AdaptiveSyncState(NamedTuple):
    """State of `adaptive_sync`.

    Attributes:
      inner_state: the inner optimizer's. Replica-varying.
      trigger_state: what the trigger remembers. Replica-varying.
      sync_state: what the synchronizer keeps; changes at syncs only.
      metrics: `SyncMetrics`, which says what varies; changes on every step.
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

    On a step on which a decision is due each replica's trigger answers. If any replica
    requests a sync, all take a sync step; else all take a local step, which sends
    nothing. Triggers that go by the step number alone (`triggers.evenly`, `every_k`)
    need no vote under `replicas.step`, or where `due` is passed.

    Call it inside `curvadion_jax.replicas.step`, or your own `shard_map` in which
    parameters and optimizer state have a leading replica axis (the body strips it) and
    gradients are not averaged. It returns finished parameter updates: nothing may
    follow it in a chain. Wrappers that decide per replica (`optax.apply_if_finite`,
    `optax.MultiSteps` with a skip function) belong inside, around `inner`; outside,
    they would deadlock. To accumulate gradients over micro-batches add them up before
    `update`, as by `optax.microbatch`.

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
        layers and by `average_factors`; the same as given to the inner optimizer.
      allow_unchecked: accept `shard_map(..., check_vma=False)`, which hides whether the
        gradients were already averaged.

    Returns:
      A transformation with :class:`AdaptiveSyncState`. Updates have the parameters'
      dtypes, and are finite. `update` takes ``weight=w``, float32[], replica-varying:
      how much this replica counts in means over the replicas, such as the number of
      tokens in its batch; 0 means absent, None means 1. It also takes ``due=True`` or
      ``due=False``, static and the same on all replicas: whether a decision is due on
      this step, in place of ``trigger.due``. A step that is not due is a program
      without collectives or conditionals. `replicas.step` passes `due` by itself;
      without it replicas vote on every step. (These two are not passed on to `inner`;
      everything else is.)

    Raises:
      ValueError: at `update`, if `params` is missing, trees or shapes do not match,
        gradients were averaged before, or something that must stay local communicates.

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
    inner = optax.with_extra_args_support(inner)
    if not isinstance(axis_name, str | None):  # the guards would overlook a tuple
        raise TypeError(f"axis_name must be a string or None, got {axis_name!r}.")
    built_while_tracing = isinstance(jnp.zeros([]), Tracer)

    def init_fn(params):
        views = _partition.matrix_views(params, dimension_numbers)
        inner_state = inner.init(params)
        initial = trigger.init(params, inner_state, views), _counters.initial()
        # An array of its own for every field, so that the state can be donated.
        trigger_state, metrics = jax.tree.map(jnp.copy, initial)
        return AdaptiveSyncState(
            inner_state=inner_state,
            trigger_state=trigger_state,
            sync_state=synchronizer.init(params, inner_state, views),
            metrics=metrics,
        )

    def update_of_replica(
        gradients, state, params, *, make, due, weight=None, **extra_args
    ):
        _guards.require_local_gradients(
            gradients,
            axis_name,
            # In a mapped step gradients are local by construction.
            allow_unchecked=allow_unchecked or _mapped.current() is not None,
        )
        finite = _finite.norms_finite(gradients)
        replica: _Replica = make(
            params=params,
            finite=finite,
            weight=_nan_policy.checked_weight(weight),
            extra_args=extra_args,
        )
        return replica.step(_finite.or_zeros(finite, gradients), state, due)

    @jax.named_scope(SCOPE)
    def update_fn(
        updates, state, params: Any = None, *, due: bool | None = None, **extra_args
    ):
        _check_update(updates, state, params)
        views = _partition.matrix_views(params, dimension_numbers)
        group = _collectives.Group(axis_name, _mapped.layout())
        payload = synchronizer.payload(params, state.inner_state, views, group.layout)
        parts = _within_replica.parts(params, group.layout)
        whole = 4 * group.layout.devices * sum(x.size for x in jax.tree.leaves(parts))
        cost = lambda replicas: payload.as_averaged(replicas) / max(whole, 1)
        due = _mapped.known_due(trigger, cost) if due is None else due
        due = None if due is None else bool(due)  # it may be a NumPy bool
        make = functools.partial(
            _Replica, inner, trigger, synchronizer, group, views, payload, whole, cost
        )
        return _mapped.update(
            functools.partial(update_of_replica, make=make, due=due),
            axis_name,
            updates,
            state,
            params,
            has_constants=built_while_tracing,
            **extra_args,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@dataclasses.dataclass(frozen=True, eq=False)
class _Replica:
    """One replica on one step.

    Attributes:
      group: all replicas, and how the arrays of one lie on its devices.
      payload, gradient_bytes: what one sync sends, and an all-reduce of all gradients.
      cost: from the number of replicas to `Observation.sync_cost`.
      params: parameters before the step.
      finite: whether the gradients are finite, bool[]; `step` is given zeros if not.
      weight: how much this replica counts in a sync, float32[]; None is 1.
      extra_args: what the caller passed for the inner optimizer.
    """

    inner: optax.GradientTransformationExtraArgs
    trigger: Trigger
    synchronizer: Synchronizer
    group: _collectives.Group
    views: Views
    payload: Payload
    gradient_bytes: int
    cost: Callable[[int], float]
    params: optax.Params
    finite: jax.Array
    weight: jax.Array | None
    extra_args: dict[str, Any]

    def step(self, gradients, state: AdaptiveSyncState, due: bool | None):
        """The updates, and the optimizer state after the step."""
        axis_name = self.group.axis_name

        # 1. The trigger looks at this replica.
        decision, trigger_state = _guards.locally(
            self.look, gradients, state, axis_name=axis_name
        )

        # 2. The replicas vote.
        fire = self.vote(decision, state.metrics, due)

        # 3. A local step; a sync follows or replaces it if any replica requested one.
        operands = gradients, state.inner_state, state.sync_state
        if self.synchronizer.after_local_step:
            stepped = _guards.locally(self.local_step, *operands, axis_name=axis_name)
            results = _then_once(fire, self.sync_after, stepped, axis_name)
        else:
            branches = _branches(
                self.sync_instead, self.local_step, *operands, axis_name=axis_name
            )
            results = _choose(fire, branches, operands)
        updates, inner_state, sync_state, faults = results

        # 4. What happened is counted. One replica sends nothing.
        alone, devices = axis_name is None, self.group.layout.devices
        weights = Payload(gathered=4 * devices)  # a float32 of each
        metrics = _counters.update(
            state.metrics,
            decision,
            voters=0 if alone or isinstance(fire, bool) else devices,
            synced=fire,
            finite=self.finite,
            faults=faults,
            payload=Payload() if alone else self.payload + weights,
            gradient_bytes=self.gradient_bytes,
        )
        state = AdaptiveSyncState(inner_state, trigger_state, sync_state, metrics)
        return updates, _collectives.vary(state, axis_name)

    def look(self, gradients, state: AdaptiveSyncState):
        """The trigger's decision, and its state after it."""
        if self.trigger.decide is None:
            return triggers.decision(True), state.trigger_state
        observation = Observation(
            gradients=gradients,
            finite=self.finite,
            inner_state=state.inner_state,
            params=self.params,
            views=self.views,
            next_inner_state=lambda: _momentum.after_local_step(
                self.inner_update, gradients, state.inner_state
            ),
            steps=state.metrics.steps,
            syncs=state.metrics.syncs,
            local_steps=state.metrics.local_steps,
            anchor=_memory.to_device(state.sync_state.anchor),
            sync_cost=self.cost(self.group.size),
        )
        decision, new_state = self.trigger.decide(observation, state.trigger_state)
        return decision, _trees.like(new_state, state.trigger_state)

    def vote(self, decision, counters: SyncMetrics, due: Any) -> jax.Array | bool:
        """Whether to synchronise; a Python bool where that is known without a vote."""
        if due is None and self.trigger.due is not None:
            due = self.trigger.due(counters.steps, self.cost(self.group.size))
        fire = True if due is None else due
        if self.trigger.decide is not None and fire is not False:
            fire &= decision.fire & _nan_policy.may_request(counters, self.weight)
        if isinstance(fire, bool):
            return fire
        fire = _collectives.any_replica_requests(fire, self.group.axis_name)
        return fire if self.group.axis_name is None else _guards.one_decision(fire)

    def local_step(self, gradients, inner_state, sync_state):
        """A step that sends nothing."""
        updates, inner_state = self.inner_update(gradients, inner_state)
        no, zeroed = jnp.zeros([], jnp.bool_), ~_finite.all_finite(updates)
        faults = _counters.Faults(zeroed, no, no, weight=jnp.zeros([], jnp.float32))
        return _finite.finite_elements(updates), inner_state, sync_state, faults

    def sync_instead(self, gradients, inner_state, sync_state):
        """A sync that replaces the local step, such as `average_gradients`."""
        local = LocalStep(
            inner_state, self.params, self.views, gradients, take=self.inner_update
        )
        return self.synchronise(local, self.params, sync_state, self.finite)

    def sync_after(self, updates, inner_state, sync_state, faults):
        """A sync that follows the local step, such as `reconcile`."""
        local = LocalStep(inner_state, self.params, self.views, updates=updates)
        moved = optax.apply_updates(self.params, updates)
        *results, new_faults = self.synchronise(local, moved, sync_state)
        zeroed = faults.zeroed | new_faults.zeroed
        return *results, new_faults._replace(zeroed=zeroed)

    def synchronise(self, local, moved, sync_state, contributes: Any = True):
        """A sync of this replica, whose parameters are now `moved`."""
        before, axis = _memory.to_device(sync_state), self.group.axis_name
        local, excluded, keep = _nan_policy.participation(
            local, moved, before, self.weight, contributes, axis
        )
        inner_state = _nan_policy.restarted(
            self.inner, self.params, local.inner_state, keep
        )
        local = local._replace(inner_state=inner_state)
        updates, inner_state, after = self.synchronizer.sync(local, before, self.group)
        updates = _trees.like(updates, self.params)
        faults = _counters.Faults(
            zeroed=local.healthy & ~_finite.all_finite(updates),
            excluded=excluded,
            absent=~excluded & ~local.present,
            weight=jnp.asarray(local.weight),
        )
        after = jax.tree.map(_memory.to_memory_of, after, sync_state)
        return _finite.finite_elements(updates), inner_state, after, faults

    def inner_update(self, gradients, inner_state, **more):
        """The inner optimizer's update, in the dtypes of parameters and state."""
        if self.group.layout.axes:
            more["layout"] = self.group.layout
        updates, new_state = self.inner.update(
            gradients, inner_state, self.params, **self.extra_args, **more
        )
        return _trees.like(updates, self.params), _trees.like(new_state, inner_state)


def _check_update(gradients, state, params) -> None:
    _trees.check_gradients(gradients, params)
    if jnp.ndim(state.metrics.steps):
        raise ValueError(
            f"The optimizer state has a leading axis of {len(state.metrics.steps)}. "
            "Inside a shard_map of your own strip it from state, parameters and "
            "gradients; curvadion_jax.replicas.step does that by itself."
        )


def _branches(sync: Branch, local: Branch, *operands, axis_name: str | None):
    """Both branches checked, with results marked as varying over the same axes.

    Both, even if `fire` is known: a faulty sync is reported on the first step.
    """
    synced = trace(sync, *operands)
    _guards.require_no_deadlock(synced.program.jaxpr, axis_name)
    alone = _guards.trace_local(local, *operands, axis_name=axis_name)
    avals = zip(synced.program.out_avals, alone.program.out_avals, strict=False)
    axes = [varying(x) | varying(y) for x, y in avals]

    def marked(branch):
        return lambda *args: _collectives.vary(
            _collectives.vary_over(branch(*args), axes), axis_name
        )

    return marked(synced), marked(alone)


def _choose(fire, branches: tuple[Branch, Branch], operands: tuple) -> Any:
    """The results of a sync, or of a step that sends nothing, by the one `lax.cond`.

    `fire` is the same on all replicas. A Python bool makes that branch the program.
    """
    sync, local = branches
    if isinstance(fire, bool):
        return sync(*operands) if fire else local(*operands)
    return lax.cond(fire, sync, local, *operands)


def _then_once(fire, sync: Branch, stepped: tuple, axis_name: str | None):
    """The results of a local step, or of a sync that follows it.

    The conditional is inside a loop that runs once or not at all. A bare conditional
    copies what it passes through (https://github.com/jax-ml/jax/issues/39449); a loop
    that does not run copies nothing. A bare loop would not do either: XLA hoists
    loop-invariant work out of it, and would then do that work on every step.
    """
    keep = lambda *stepped: stepped
    stepped = _collectives.vary(stepped, axis_name)
    branches = _branches(sync, keep, *stepped, axis_name=axis_name)
    if isinstance(fire, bool):
        return _choose(fire, branches, stepped)
    # A loop must begin with the types that it ends with, and these say what varies. If
    # the results of a sync vary in more than the step's, it is traced again for those.
    _, kept = branches
    begin = kept(*stepped)
    if jax.tree.map(jax.typeof, begin) != jax.tree.map(jax.typeof, stepped):
        branches = _branches(sync, keep, *begin, axis_name=axis_name)
    once = lambda _, stepped: _choose(fire, branches, stepped)
    return lax.fori_loop(0, fire.astype(jnp.int32), once, begin)
