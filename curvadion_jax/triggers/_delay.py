"""Triggers whose answer comes later than the question."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curvadion_jax._protocols import Decision, Trigger
from curvadion_jax.triggers import _base


class DelayedState(NamedTuple):
    """State of `delayed`. Replica-varying.

    Attributes:
      trigger_state: what the trigger remembers.
      decision: what it said on the step before.

    Example:
      >>> from curvadion_jax import triggers
      >>> state = delayed(triggers.never()).init({"w": jnp.ones(2)}, (), {})
      >>> bool(state.decision.fire), float(state.decision.value)  # before any step
      (True, inf)
    """

    trigger_state: Any
    decision: Decision


def delayed(trigger: Trigger) -> Trigger:
    """Decides with what a trigger said on the step before.

    The flag is then known before a step begins, and depends on none of its gradients:
    the all-reduce can run during the forward and backward pass, which hides its round
    trip where it is the shorter one. What it costs is that every sync of the trigger
    comes one step later.

    The first step synchronises: without a decision the value counts as infinite. What
    the trigger says on a step that synchronises is dropped, for that sync answers it.
    So there is at least a local step between two syncs, and ``delayed(always())``
    synchronises on every second step.

    `at_least_every`, `every_k` and what else looks at counters alone needs no delay:
    put it around, ``at_least_every(delayed(trigger), 50)``. Inside, it is a step late.
    `budget` belongs inside: its lower bound is then kept to within one sync more, for
    budgets of at most half of the steps.

    Args:
      trigger: any trigger; it is asked on every step.

    Returns:
      The trigger, with the value, threshold and layer of the step before. Its state is
      :class:`DelayedState`.

    Raises:
      TypeError: if it is not a trigger.

    Example:
      >>> from curvadion_jax import triggers
      >>> trigger = delayed(triggers.every_k(3))
      >>> state, since, fired = trigger.init(None, None, {}), 0, []
      >>> for steps in range(9):
      ...     seen = triggers.Observation(steps=steps, local_steps=since)
      ...     decision, state = trigger.decide(seen, state)
      ...     since = 0 if decision.fire else since + 1
      ...     fired.append(int(decision.fire))
      >>> fired
      [1, 0, 0, 1, 0, 0, 1, 0, 0]
    """
    _base.check_trigger(trigger)

    def init(params, inner_state, views):
        before = _base.decision(True, jnp.inf)
        return DelayedState(trigger.init(params, inner_state, views), before)

    def decide(observation, state: DelayedState):
        now, trigger_state = trigger.decide(observation, state.trigger_state)
        open_ = (observation.local_steps > 0) | (observation.steps == 0)
        before = state.decision._replace(fire=state.decision.fire & open_)
        return before, DelayedState(trigger_state, _base.decision(*now))

    return Trigger(init, decide, trigger.scheduled)


class RememberedState(NamedTuple):
    """State of `remembered`. Replica-varying.

    Attributes:
      trigger_state: what the trigger remembers.
      requested: bool[], whether it has requested a sync since the last one.

    Example:
      >>> from curvadion_jax import triggers
      >>> state = remembered(triggers.always()).init({"w": jnp.ones(2)}, (), {})
      >>> bool(state.requested)
      False
    """

    trigger_state: Any
    requested: jax.Array


def remembered(trigger: Trigger) -> Trigger:
    """Keeps a trigger's request until the next sync.

    For steps on which requests are not reduced or a sync is not possible: what was
    requested on them is done as soon as it can be, and not lost. `adaptive_sync` wraps
    its trigger in this where it asks only on every k-th step.

    Args:
      trigger: any trigger; it is asked on every step.

    Returns:
      The trigger, with the value, threshold and layer of this step. Its state is
      :class:`RememberedState`.

    Raises:
      TypeError: if it is not a trigger.

    Example:
      >>> from curvadion_jax import triggers
      >>> trigger = triggers.at_most_every(remembered(triggers.every_k(4)), 6)
      >>> state, syncs, since, fired = trigger.init(None, None, {}), 0, 0, []
      >>> for steps in range(16):
      ...     seen = triggers.Observation(steps=steps, syncs=syncs, local_steps=since)
      ...     decision, state = trigger.decide(seen, state)
      ...     syncs += int(decision.fire)
      ...     since = 0 if decision.fire else since + 1
      ...     fired += [1 + steps] if decision.fire else []
      >>> fired  # requested at 8, done at 10; requested at 12, done at 16
      [4, 10, 16]
    """
    _base.check_trigger(trigger)

    def init(params, inner_state, views):
        no = jnp.zeros([], jnp.bool_)
        return RememberedState(trigger.init(params, inner_state, views), no)

    def decide(observation, state: RememberedState):
        now, trigger_state = trigger.decide(observation, state.trigger_state)
        requested = (state.requested & (observation.local_steps > 0)) | now.fire
        return now._replace(fire=requested), RememberedState(trigger_state, requested)

    return Trigger(init, decide, trigger.scheduled)
