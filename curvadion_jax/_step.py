"""One step of one replica, quiet or synchronised."""

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
    _health,
    _memory,
    _payload,
)
from curvadion_jax._counters import Presence, SyncMetrics, nobody_missing
from curvadion_jax._group import Group
from curvadion_jax._matrices import MatrixView
from curvadion_jax.synchronizers import LocalStep, Synchronizer
from curvadion_jax.synchronizers import _base as _synchronizers
from curvadion_jax.synchronizers._base import dion_states
from curvadion_jax.triggers import Observation, Trigger
from curvadion_jax.triggers._base import check_answer

# A replica that was left out of a sync asks for no other one for so many steps.
_REST = 10


class AdaptiveSyncState(NamedTuple):
    """State of `adaptive_sync`. Shared fields have equal values on all replicas.

    Attributes:
      inner_state: the inner optimizer's, as after a local step. Replica-varying.
      trigger_state: what the trigger remembers.
      local_state: state of `local_step`, empty without one. Replica-varying.
      sync_state: what the synchronizer keeps; changes at syncs only.
      metrics: `SyncMetrics`; changes on every step.

    Example:
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
    local_state: optax.OptState
    sync_state: Any
    metrics: SyncMetrics


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of one replica: the parts of the optimizer, and what they need.

    Attributes:
      inner: see `adaptive_sync`, as `trigger`, `synchronizer`, `axis_name` and
        `local_step`.
      views: path of a parameter -> how Dion sees it as matrices, or None.
      extra_args: for the inner optimizer.
      asked: bool[], whether replicas reduce their answers on this step; None is yes.
      weight: float32[], how much this replica counts in a sync; None is 1.
      usable: bool[], whether its gradients are finite. All that is written in place of
        old parameters and state depends on it.
    """

    inner: optax.GradientTransformationExtraArgs
    trigger: Trigger
    synchronizer: Synchronizer
    axis_name: str | None
    local_step: optax.GradientTransformationExtraArgs | None
    views: Mapping[str, MatrixView | None]
    extra_args: Mapping[str, Any]
    asked: jax.Array | None
    weight: jax.Array | None
    usable: jax.Array

    def take(self, gradients, state: AdaptiveSyncState, params):
        """The updates and the state after the step, quiet or synchronised."""
        moved = self._moved(params, state)
        # The parameters are written over where they are, so what is written must wait
        # for the look at them; else the compiler keeps a copy of them for it.
        usable = self.usable & (moved <= 1)
        step = dataclasses.replace(self, usable=usable)
        return step._take(gradients, state, params, moved == 1)

    def _take(self, gradients, state: AdaptiveSyncState, params, was_moved):
        axis_name = self.axis_name
        # What a trigger remembers goes on, or an answered wish would be a new one. And
        # one that is not to wait for the gradients must not wait for a look at them.
        seen = _health.or_zeros(self.usable, gradients)
        decision, trigger_state = _branches.run_locally(
            self._decide, seen, params, state, axis_name=axis_name
        )
        fire = decision.fire & ~self._rests(state.metrics)
        which = _collectives.largest(
            self._wish(fire, state.metrics.syncs), axis_name, self.asked
        )
        local_updates, local_state = gradients, state.local_state
        if self.local_step is not None:
            updates, after = _branches.run_locally(
                functools.partial(self.local_step.update, **self.extra_args),
                *(gradients, state.local_state, params),
                axis_name=axis_name,
            )
            local_updates, local_state = self._if_usable(
                _like(updates, params), after, state.local_state
            )
        updates, inner_state, sync_state, presence = self._quiet_or_sync(
            which, gradients, local_updates, state, params
        )
        if self.local_step is not None:
            sound = (which == 0) | _health.sound(local_state)
            fresh = self.local_step.init(params)
            local_state = _health.restarted(local_state, fresh, sound)
        metrics = _counters.following(
            state.metrics,
            decision,
            True if self.asked is None else self.asked,
            which,
            self.usable,
            presence,
            was_moved,
        )
        after = AdaptiveSyncState(
            inner_state, trigger_state, local_state, sync_state, metrics
        )
        return updates, _collectives.vary(after, axis_name)

    def _if_usable(self, updates, after, before):
        """No step where the gradients are not finite, and finite updates in any case.

        An update that is not finite would make the parameters so for ever.
        """
        updates = _health.or_zeros(self.usable, updates)
        after = _health.where(self.usable, after, before)
        return _health.finite_elements(updates), after

    def _quiet_or_sync(self, which, gradients, local_updates, state, params):
        """Updates, inner state, state of the synchronizer, and who took part."""
        axis_name = self.axis_name
        before = (gradients, state.inner_state, params)
        steps = _synchronizers.steps(self.synchronizer)
        nothing = nobody_missing()
        if self.synchronizer.after_local_step and self.local_step is None:
            taken = _branches.run_locally(
                self._local_step, *before, axis_name=axis_name
            )
            return _branches.then_sync(
                which,
                [functools.partial(self._sync_after, step) for step in steps],
                (*taken, state.sync_state, nothing),
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

    def _moved(self, params, state: AdaptiveSyncState) -> jax.Array:
        """1 if its parameters are not where the last step's sync left them, else 0.

        An int32[], of which the compiler does not know how large it can be.
        """
        looks = _synchronizers.looks(self.synchronizer)
        if not looks:
            return jnp.zeros([], jnp.int32)

        def found(look, params, kept):
            return (~look(params, kept)).astype(jnp.int32)

        metrics = state.metrics
        variant = self._variant(metrics.syncs - 1)
        moved = _branches.local_switch(
            # As all replicas do: in one of several devices these talk to each other.
            jnp.where(metrics.synced, 1 + variant, 0),
            [
                lambda *_: jnp.zeros([], jnp.int32),
                *(functools.partial(found, look) for look in looks),
            ],
            *(params, state.sync_state),
            axis_name=self.axis_name,
        )
        # One that missed it has its own drift in its parameters.
        return jnp.where(metrics.joined == 1, moved, 0)

    def _rests(self, metrics: SyncMetrics) -> jax.Array:
        """Whether it missed the last sync, and would miss this one.

        One that was left out rests for some steps, and one without weight for as long
        as it has none: its drift stays, so that a trigger which looks at that would ask
        on every step.
        """
        last = metrics.steps - metrics.quiet_steps - 1
        left_out, absent = (
            at == last for at in (metrics.left_out_at, metrics.absent_at)
        )
        rests = left_out & (metrics.quiet_steps < _REST)
        if self.weight is not None:
            rests |= (left_out | absent) & (self.weight == 0)
        return rests & (last >= 0)

    def _wish(self, fire, syncs):
        """0 for a quiet step, else 1 + the variant of the sync that is due, int32[]."""
        return jnp.where(fire, 1 + self._variant(syncs), 0)

    def _variant(self, number):
        """The variant of the sync of this number, from 0, int32[]."""
        cycle = self.synchronizer.cycle
        if len(set(cycle)) == 1:
            return jnp.zeros([], jnp.int32)
        return jnp.array(cycle, jnp.int32)[number % len(cycle)]

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
        answer = self.trigger.decide(observation, state.trigger_state)
        return check_answer(answer, state.trigger_state)

    def _sync_cost(self, params, inner_state) -> float:
        """Bytes of a sync over those of an all-reduce of all gradients in float32."""
        cycle = self.synchronizer.cycle
        variants = _synchronizers.payloads(
            self.synchronizer, params, inner_state, self.views
        )
        sent = _payload.total(variants[variant] for variant in cycle)
        averaged = sent.as_averaged(_collectives.axis_size(self.axis_name))
        return averaged / len(cycle) / max(gradient_payload(params), 1)

    def _local_step(self, gradients, inner_state, params):
        taken = self._inner_step(gradients, inner_state, params)
        return self._if_usable(*taken, inner_state)

    def _sync_after(self, step, done, gradients, inner_state, params):
        updates, after, sync_state, _ = done
        kept = _memory.to_device(sync_state)
        sound = _health.sound(after)
        after = self._clean(after, sound, params)
        healthy = sound & _health.all_finite(params) & _health.sound(kept)
        group = self._group(healthy, healthy)

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

        local = LocalStep(gradients, inner_state, params, self.views, taken)
        done = step(local, kept, group)
        return self._synced(done, params, kept, sync_state, group, healthy)

    def _sync(self, step, local_updates, sync_state, gradients, inner_state, params):
        del local_updates
        kept = _memory.to_device(sync_state)
        sound = _health.sound(inner_state)
        inner_state = self._clean(inner_state, sound, params)
        gradients = _health.or_zeros(self.usable, gradients)
        healthy = sound & _health.all_finite(params) & _health.sound(kept)
        brings = healthy & self.usable
        group = self._group(healthy, brings)

        def take(given_gradients, given_state, **more):
            return self._inner_step(given_gradients, given_state, params, **more)

        local = LocalStep(gradients, inner_state, params, self.views, take)
        done = step(local, kept, group)
        return self._synced(done, params, kept, sync_state, group, brings)

    def _clean(self, inner_state, sound, params):
        fresh, own = self.inner.init(params), dion_states(inner_state)
        if own:  # Q is drawn at random, which takes longer than the rest of a sync
            qs = [state.q for state in own]
            axes = [_collectives.axes_of(x) for x in jax.tree.leaves(qs)]

            def drawn():
                drawn = [state.q for state in dion_states(self.inner.init(params))]
                like = jax.tree.map(lambda x, q: x.astype(q.dtype), drawn, qs)
                return _collectives.vary_over(like, axes)

            fresh = _synchronizers.with_q(fresh, jax.lax.cond(sound, lambda: qs, drawn))
        return _health.restarted(inner_state, fresh, sound)

    def _group(self, healthy, brings) -> Group:
        """The replicas, of which those with nothing sound to bring count nothing."""
        weight = jnp.asarray(1 if self.weight is None else self.weight, jnp.float32)
        weight = jnp.where(brings, weight, -1)
        group = _collectives.group(self.axis_name, weight, healthy)

        def if_anybody(function, *before):
            # With a choice between old and new for every array all old ones would stay
            # in memory until the new ones are there.
            return _branches.switch(
                group.anybody.astype(jnp.int32),
                lambda *before: before,
                [function],
                *before,
                axis_name=self.axis_name,
            )

        return group._replace(if_anybody=if_anybody)

    def _synced(self, after, params, kept, sync_state, group: Group, brings):
        """What follows a sync, and who took part in it.

        Args:
          after: updates, inner state and synchronizer state after the sync.
          params: those before it.
          kept: the synchronizer state before it, in the device's memory.
          sync_state: where that came from.
          group: the replicas.
          brings: whether this replica had anything sound to bring.
        """
        updates, inner_state, new = after
        presence = Presence(
            left_out=~brings,
            absent=brings & ~group.present,
            empty=~group.anybody,
            # Without a sync a replica with averaged gradients would step alone.
            over=group.anybody | self.synchronizer.after_local_step,
        )
        sync_state = _memory.put_back(new, kept, sync_state)
        # At a sync too: NaN added to the parameters would never go away.
        updates = _health.finite_elements(_like(updates, params))
        return updates, inner_state, sync_state, presence

    def _quiet(self, local_updates, sync_state, gradients, inner_state, params):
        if self.local_step is None:
            updates, inner_state = self._local_step(gradients, inner_state, params)
        else:
            updates = _like(local_updates, params)
            after = self._accumulate(gradients, inner_state, params)
            inner_state = _health.where(self.usable, after, inner_state)
        return updates, inner_state, sync_state, nobody_missing()


def gradient_payload(params) -> int:
    """Bytes of all gradients in float32."""
    return 4 * sum(leaf.size for leaf in jax.tree.leaves(params))


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
    # A random key has no cast, not even to its own type.
    return jax.tree.map(
        lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), tree, like
    )
