"""Triggers made of other triggers."""

import jax.numpy as jnp

from curvadion_jax import _arguments
from curvadion_jax._protocols import Decision, Trigger
from curvadion_jax.triggers import _base


def any_of(*triggers: Trigger) -> Trigger:
    """Synchronises when one of several triggers wants to.

    Value, threshold and layer are those of the first trigger that fires, or of the
    first one when none does.

    Args:
      *triggers: one or more.

    Returns:
      The trigger. It asks all of them on every step.

    Raises:
      TypeError: if one is not a trigger.
      ValueError: if there is none.

    Example:
      >>> from curvadion_jax import triggers
      >>> trigger = any_of(triggers.every_k(100), triggers.every_k(30))
      >>> decision, _ = trigger.decide(triggers.Observation(steps=89), ((), ()))
      >>> bool(decision.fire)
      True
    """
    if not triggers:
        raise ValueError("any_of needs at least one trigger, got none")
    for trigger in triggers:
        _base.check_trigger(trigger)

    def init(params, inner_state, views):
        return tuple(trigger.init(params, inner_state, views) for trigger in triggers)

    def decide(observation, states):
        pairs = zip(triggers, states, strict=True)
        results = [trigger.decide(observation, state) for trigger, state in pairs]
        chosen, *rest = [decision for decision, _ in results]
        for other in rest:
            take = ~chosen.fire & other.fire
            both = zip(other, chosen, strict=True)
            chosen = Decision(*(jnp.where(take, new, old) for new, old in both))
        return chosen, tuple(state for _, state in results)

    return Trigger(init, decide, all(trigger.scheduled for trigger in triggers))


def at_least_every(trigger: Trigger, k: int) -> Trigger:
    """Synchronises when the trigger says so, and in any case k steps after a sync.

    Args:
      trigger: any trigger.
      k: largest number of steps from one sync to the next, at least 1.

    Returns:
      The trigger, with the value, threshold and layer of the one that was given.

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if k is below 1.

    Example:
      >>> from curvadion_jax import triggers
      >>> trigger = at_least_every(triggers.never(), 50)
      >>> decision, _ = trigger.decide(triggers.Observation(local_steps=49), ())
      >>> bool(decision.fire)
      True
    """
    _base.check_trigger(trigger)
    _arguments.check_int(k, "the largest interval k")

    def decide(observation, state):
        chosen, state = trigger.decide(observation, state)
        due = observation.local_steps + 1 >= k
        return chosen._replace(fire=chosen.fire | due), state

    return trigger._replace(decide=decide)


def at_most_every(trigger: Trigger, k: int) -> Trigger:
    """Synchronises when the trigger says so, but no sooner than k steps after a sync.

    Requests in between are dropped, one because of NaN included. The
    first sync may come at any time.

    Args:
      trigger: any trigger.
      k: smallest number of steps from one sync to the next, at least 1.

    Returns:
      The trigger, with the value, threshold and layer of the one that was given.

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if k is below 1.

    Example:
      >>> from curvadion_jax import triggers
      >>> trigger = at_most_every(triggers.always(), 5)
      >>> seen = triggers.Observation(syncs=1, local_steps=3)
      >>> bool(trigger.decide(seen, ())[0].fire)
      False
    """
    _base.check_trigger(trigger)
    _arguments.check_int(k, "the smallest interval k")

    def decide(observation, state):
        chosen, state = trigger.decide(observation, state)
        allowed = (observation.local_steps + 1 >= k) | (observation.syncs == 0)
        return chosen._replace(fire=chosen.fire & allowed), state

    return trigger._replace(decide=decide)


def after_steps(trigger: Trigger, steps: int) -> Trigger:
    """Synchronises on every one of the first steps, and leaves it to the trigger then.

    This is what makes local SGD post-local SGD (https://arxiv.org/abs/1808.07217).

    Args:
      trigger: any trigger; it is asked from the first step on, so that what it
        remembers is up to date.
      steps: number of synchronous steps at the start, 0 or more.

    Returns:
      The trigger, with the value, threshold and layer of the one that was given.

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if steps is negative.

    Example:
      >>> from curvadion_jax import triggers
      >>> trigger = after_steps(triggers.every_k(30), 1000)
      >>> seen = [triggers.Observation(steps=steps) for steps in (999, 1000)]
      >>> [bool(trigger.decide(each, ())[0].fire) for each in seen]
      [True, False]
    """
    _base.check_trigger(trigger)
    _arguments.check_int(steps, "the number of synchronous steps", at_least=0)

    def decide(observation, state):
        chosen, state = trigger.decide(observation, state)
        early = observation.steps < steps
        return chosen._replace(fire=chosen.fire | early), state

    return trigger._replace(decide=decide)
