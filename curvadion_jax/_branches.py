"""What one replica does on a step: what its trigger sees, a local step, a sync."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import (
    _collectives,
    _faults,
    _finite,
    _guards,
    _memory,
    _momentum,
    _payload,
    _trees,
    _xla,
)
from curvadion_jax._collectives import Replicas
from curvadion_jax._counters import SyncMetrics, no_faults
from curvadion_jax._layout import Layout
from curvadion_jax._local_step import LocalStep
from curvadion_jax._protocols import Measured, Observation, Synchronizer, Views
from curvadion_jax._schedule import Due, ending
from curvadion_jax._within_replica import Devices
from curvadion_jax.synchronizers._base import variants


@dataclasses.dataclass(frozen=True)
class Branches:
    """One replica on one step.

    The branches return updates, inner state, sync state and `Faults`.

    Attributes:
      inner: see `adaptive_sync`, as `synchronizer` and `axis_name`.
      extra_args: for the inner optimizer.
      views: path of a parameter -> how it is seen as matrices, or None.
      layout: how the arrays of this replica lie on its devices.
      weight: float32[], how much it counts in a sync; None is 1.
      usable: bool[], whether its gradients are finite.
    """

    inner: optax.GradientTransformationExtraArgs
    synchronizer: Synchronizer
    axis_name: str | None
    extra_args: Mapping[str, Any]
    views: Views
    layout: Layout
    weight: jax.Array | None
    usable: jax.Array

    @property
    def divided(self) -> bool:
        """Whether a replica has several devices."""
        return bool(self.layout.axes)

    def locally(self, function: Callable[..., Any], *operands: Any) -> Any:
        """See `_guards.locally`."""
        return _guards.locally(
            function, *operands, axis_name=self.axis_name, divided=self.divided
        )

    def observation(self, gradients, params, state, scheduled: bool) -> Observation:
        """What the trigger sees: the counters alone, or all."""
        counters, inner_state = state.metrics, state.inner_state
        size = _collectives.axis_size(self.axis_name)
        seen = Observation(
            steps=counters.steps,
            syncs=counters.syncs,
            local_steps=counters.local_steps,
            sync_cost=sync_cost(
                self.synchronizer, params, inner_state, self.views, size
            ),
        )
        if scheduled:
            return seen
        return seen._replace(
            gradients=gradients,
            inner_state=inner_state,
            params=params,
            views=self.views,
            usable=self.usable,
            next_inner_state=lambda: self._accumulated(gradients, inner_state, params),
            anchor=state.sync_state.anchor,
        )

    def request(
        self, fire: jax.Array | bool, counters: SyncMetrics, due: Due | None
    ) -> jax.Array | int:
        """0 for a local step, else 1 + the variant of the next sync.

        With a delay twice that of the sync that ends, and 1 more if one begins. An int
        where it is known, by no counter on the devices, what all replicas do.
        """
        cycle, delay = self.synchronizer.cycle, self.synchronizer.delay
        if delay and due is not None:
            return 2 * due.ends + due.sync
        if delay:
            syncs, local_steps = counters.syncs, counters.local_steps
            ends, goes_on = ending(syncs, local_steps, delay, cycle)
            return 2 * ends + (fire & ~goes_on)
        if fire is False or (fire is True and len(set(cycle)) == 1):
            return int(fire)
        variants = jnp.array(cycle, jnp.int32)
        return jnp.where(fire, 1 + variants[counters.syncs % len(cycle)], 0)

    def begins_and_ends(self, request: Any) -> tuple[Any, Any]:
        """Whether a sync begins, above 0, and 0 or 1 + the variant of that which ends.

        Both are the request if a sync has no delay.
        """
        if self.synchronizer.delay:
            return request % 2, request // 2
        return request, request

    def payloads(self, params, inner_state) -> list[_payload.Payload]:
        """What a sync of each variant sends: nothing where there is one replica."""
        found = payloads(self.synchronizer, params, inner_state, self.views)
        if self.axis_name is None:
            return [_payload.Payload()] * len(found)
        return [payload + _payload.WEIGHT for payload in found]

    def local_step(self, sync_state, gradients, inner_state, params):
        """The branch that sends nothing."""
        updates, inner_state, contained = _faults.local_step(
            self._update, gradients, inner_state, params, self.usable
        )
        faults = no_faults()._replace(contained=contained)
        return updates, inner_state, sync_state, faults

    @property
    def syncs_after(self) -> list[Callable[..., Any]]:
        """Of every variant the sync that follows a local step."""
        found = variants(self.synchronizer)
        return [functools.partial(self._sync_after, sync) for sync, _ in found]

    @property
    def syncs_instead(self) -> list[Callable[..., Any]]:
        """Of every variant the branch that is taken in place of a local step."""
        found = variants(self.synchronizer)
        return [functools.partial(self._sync_instead, sync) for sync, _ in found]

    def _sync_after(self, sync, alone, params):
        updates, inner_state, sync_state, faults = alone

        def take(local, *arguments, **more):
            if arguments or more:
                raise TypeError(
                    "a synchronizer with after_local_step=True takes the local step as "
                    "it is: call local.take() without arguments"
                )
            return updates, local.inner_state

        def unless_empty(local, kept, group):
            def run(*before):
                return sync(local, before[-1], group)

            before = (*local.take(), kept)
            if self.synchronizer.delay:
                # Nothing that is sent stands in a condition, which would not be started
                # before the steps that it does not depend on.
                return _finite.where(local.anybody, run(*before), before)
            return _xla.if_any(local.anybody, run, *before, axis_name=self.axis_name)

        local = LocalStep((), inner_state, params, self.views, take)
        moved = optax.apply_updates(params, updates)
        *results, missed = self._synchronised(
            unless_empty, local, sync_state, moved, brings=True
        )
        contained = faults.contained | missed.contained
        return *results, missed._replace(contained=contained)

    def begin(self, done, params):
        """What a step has done, with what the replica then has noted for a sync."""
        updates, inner_state, sync_state, faults = done
        kept = _memory.to_device(sync_state)
        moved = optax.apply_updates(params, updates)
        sound = _faults.is_finite(inner_state, moved)
        healthy = _faults.is_healthy(moved, kept._replace(own=()), sound)
        own = Measured(moved, _faults.brought(self.weight, healthy))
        new = _memory.put_back(kept._replace(own=own), kept, sync_state)
        return updates, inner_state, new, faults

    def _sync_instead(self, sync, sync_state, gradients, inner_state, params):
        def take(local, gradients=None, inner_state=None, **more):
            gradients = local.gradients if gradients is None else gradients
            inner_state = local.inner_state if inner_state is None else inner_state
            return self._update(gradients, inner_state, params, **more)

        gradients = _finite.or_zeros(self.usable, gradients)
        local = LocalStep(gradients, inner_state, params, self.views, take)
        return self._synchronised(sync, local, sync_state, params, brings=self.usable)

    def _synchronised(self, sync, local: LocalStep, sync_state, moved, brings):
        """Updates, inner state and sync state after a sync, and who missed it.

        `moved` are the parameters that the replica comes with.
        """
        kept = _memory.to_device(sync_state)
        sound = _faults.is_finite(local.inner_state, moved)
        if self.synchronizer.delay:  # as it was where this sync began
            own = kept.own.weight
            # What it was noted with may have been replaced since.
            healthy = (own >= 0) & _faults.is_finite_apart(kept, local.params)
            own = jnp.where(healthy, own, -1)
        else:
            healthy = _faults.is_healthy(moved, kept, sound)
            own = _faults.brought(self.weight, healthy, brings)
        fresh = _faults.fresh_state(self.inner, local.params, local.inner_state)
        local = _faults.taking_part(local, fresh, sound, own, healthy, self.axis_name)
        local = local._replace(take=functools.partial(local.take, local))
        group = Replicas(self.axis_name, self.layout)
        updates, inner_state, new = sync(local, kept, group)
        if self.synchronizer.delay:  # once: a longer delay must not end it again
            weight = jnp.zeros_like(new.own.weight)
            new = new._replace(own=new.own._replace(weight=weight))
        updates, faults = _faults.after_sync(
            _trees.like(updates, local.params),
            local,
            own < 0,
            # Without a sync a replica with averaged gradients would step alone.
            closes=self.synchronizer.after_local_step,
        )
        return updates, inner_state, _memory.put_back(new, kept, sync_state), faults

    def _update(self, gradients, inner_state, params, **more):
        """The inner optimizer's, in the dtypes of parameters and state."""
        if self.divided:
            more["devices"] = Devices(self.layout)
        updates, after = self.inner.update(
            gradients, inner_state, params, **self.extra_args, **more
        )
        return _trees.like(updates, params), _trees.like(after, inner_state)

    def _accumulated(self, gradients, inner_state, params):
        """The inner state with the momentum of a local step, and no step taken."""
        return _momentum.after_local_step(self._update, gradients, inner_state, params)


def payloads(synchronizer: Synchronizer, params, inner_state, views: Views):
    """Of a sync of each variant."""
    return [
        _payload.check_payload(payload(params, inner_state, views))
        for _, payload in variants(synchronizer)
    ]


def sync_cost(
    synchronizer: Synchronizer, params, inner_state, views: Views, replicas: int
) -> float:
    """See `Observation`; the mean over the variants."""
    found = payloads(synchronizer, params, inner_state, views)
    sent = _payload.total(found[variant] for variant in synchronizer.cycle)
    averaged = sent.as_averaged(replicas) / len(synchronizer.cycle)
    return averaged / max(_trees.float32_bytes(params), 1)
