"""When replicas synchronise.

A trigger looks at one replica's own quantities and says whether it wants a sync. It
knows no axis and moves nothing: `adaptive_sync` asks every replica's trigger and
synchronises all of them if one wants to. So a trigger decides *when*, and knows
neither what is sent (the synchronizer) nor what a step does (the inner optimizer).

`every_k(10)` looks at a counter; `relative_momentum_change(0.1)` at momenta;
`at_least_every(relative_momentum_change(0.1), 50)` at both.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments
from curvadion_jax._matrices import MatrixView


class Observation(NamedTuple):
    """What a trigger sees on every step, all of it this replica's own.

    The fields have defaults so that a trigger can be asked by hand, as in its tests.

    Attributes:
      gradients: this step's gradients, tree of the parameters.
      inner_state: state of the inner optimizer before this step.
      params: parameters before this step.
      views: path of a parameter -> how Dion sees it as matrices, or None.
      next_inner_state: function without arguments that returns the state that the
        inner optimizer would have after this step if nobody communicated, with its
        momentum before error feedback.
      steps: int32[], steps taken before this one.
      syncs: int32[], synchronised steps among them.
      quiet_steps: int32[], steps taken since the last sync, or since the start.
      anchor: the parameters that all replicas had after the last sync, tree of the
        parameters; None where the synchronizer keeps none.
      sync_cost: Python float, the bytes of one sync over those of an all-reduce of
        all gradients in float32.

    Example:
      >>> def decide(seen: Observation) -> Decision:
      ...     norm = optax.tree.norm(seen.gradients)
      ...     return decision(norm > 10, value=norm, threshold=10)
      >>> on_large_gradients = stateless(decide)
      >>> seen = Observation(gradients={"w": jnp.array([12.0, 16.0])})
      >>> float(on_large_gradients.decide(seen, ())[0].value)
      20.0
    """

    gradients: optax.Updates = ()
    inner_state: optax.OptState = ()
    params: optax.Params = ()
    views: Mapping[str, MatrixView | None] = MappingProxyType({})
    next_inner_state: Callable[[], optax.OptState] = tuple
    steps: jax.Array | int = 0
    syncs: jax.Array | int = 0
    quiet_steps: jax.Array | int = 0
    anchor: optax.Params | None = None
    sync_cost: float = 1.0


class Decision(NamedTuple):
    """What a trigger answers.

    Attributes:
      fire: bool[], whether this replica wants to synchronise on this step.
      value: float32[], what was compared with the threshold; NaN where nothing was.
      threshold: float32[], what it was compared with; NaN where nothing was.
      layer: int32[], index of the parameter, in the order of the parameters' leaves,
        whose value was the largest; -1 where no parameter is meant.

    Example:
      >>> answer = decision(True, value=0.5, threshold=0.25)
      >>> bool(answer.fire), float(answer.value), int(answer.layer)
      (True, 0.5, -1)
    """

    fire: jax.Array
    value: jax.Array
    threshold: jax.Array
    layer: jax.Array


class Trigger(NamedTuple):
    """A pair of functions that decide when to synchronise.

    Attributes:
      init: (params, inner_state) -> trigger state, a tree of arrays; called once,
        outside `shard_map` and possibly on abstract values.
      decide: (observation, trigger state) -> (Decision, trigger state); called on
        every step on every replica, traced, before anything is sent. It must not
        communicate (that is checked).

    Example:
      >>> def decide(observation, last):  # after steps 3, 7, 15, 31, ...
      ...     fire = observation.steps >= 2 * last
      ...     return decision(fire), jnp.where(fire, observation.steps + 1, last)
      >>> doubling = Trigger(lambda params, inner_state: jnp.ones([], int), decide)
      >>> last, fired = jnp.ones([], int), []
      >>> for step in range(8):
      ...     answer, last = doubling.decide(Observation(steps=step), last)
      ...     fired.append(int(answer.fire))
      >>> fired
      [0, 0, 1, 0, 0, 0, 1, 0]
    """

    init: Callable[[optax.Params, optax.OptState], Any]
    decide: Callable[[Observation, Any], tuple[Decision, Any]]


def decision(
    fire: jax.typing.ArrayLike,
    value: jax.typing.ArrayLike = jnp.nan,
    threshold: jax.typing.ArrayLike = jnp.nan,
    layer: jax.typing.ArrayLike = -1,
) -> Decision:
    """A `Decision` of the right dtypes.

    Args:
      fire: whether this replica wants to synchronise.
      value: what was compared with the threshold.
      threshold: what it was compared with.
      layer: index of the parameter with the largest value, -1 for none.

    Returns:
      The decision, all of it scalar arrays.

    Example:
      >>> decision(True).layer.dtype
      dtype('int32')
    """
    return Decision(
        jnp.asarray(fire, jnp.bool_),
        jnp.asarray(value, jnp.float32),
        jnp.asarray(threshold, jnp.float32),
        jnp.asarray(layer, jnp.int32),
    )


def stateless(decide: Callable[[Observation], Decision]) -> Trigger:
    """A trigger that remembers nothing.

    Args:
      decide: observation -> `Decision`, as the trigger's `decide` without a state.

    Returns:
      The trigger.

    Raises:
      TypeError: if it is not a function.

    Example:
      >>> on_even_steps = stateless(lambda seen: decision(seen.steps % 2 == 0))
      >>> bool(on_even_steps.decide(Observation(steps=4), ())[0].fire)
      True
    """
    _arguments.check_function(decide, "decide", "lambda seen: decision(True)", False)
    return Trigger(
        init=lambda params, inner_state: (),
        decide=lambda observation, state: (decide(observation), state),
    )


def check_answer(answer: Any, before: Any) -> tuple[Decision, Any]:
    """Returns what a trigger's `decide` returned, or refuses it.

    Args:
      answer: what it returned.
      before: the trigger's state before it.
    """
    pair = isinstance(answer, tuple) and len(answer) == 2
    if not pair or not isinstance(answer[0], Decision):
        raise TypeError(
            "a trigger's decide must return (triggers.decision(...), state), and the "
            f"function of triggers.stateless triggers.decision(...) alone; got {answer}"
        )
    for field, value in answer[0]._asdict().items():
        if jnp.shape(value):
            raise ValueError(
                f"{field} of a trigger's decision has shape {jnp.shape(value)} and "
                "must be a scalar: reduce it, as by jax.numpy.any or jax.numpy.max"
            )
    states = (before, answer[1])
    shapes = [jax.tree.map(jnp.shape, state) for state in states]
    # A user's own class of state need not know what is equal.
    known = [
        (jax.tree.structure(state), [jnp.shape(x) for x in jax.tree.leaves(state)])
        for state in states
    ]
    if known[0] != known[1]:
        raise ValueError(
            "a trigger's decide must return a state of the structure and shapes of the "
            f"one it was given, {shapes[0]}, got {shapes[1]}"
        )
    return answer


def check_trigger(trigger: Any, what: str = "trigger") -> None:
    """Refuses what is not a `Trigger`."""
    if not isinstance(trigger, Trigger):
        raise TypeError(
            f"{what} must be a curvadion_jax.triggers.Trigger such as every_k(10) or "
            f"relative_momentum_change(0.1), got {trigger!r}"
        )
