"""When replicas synchronise.

A trigger looks at one replica's own quantities and says whether it wants a sync. It
knows no axis and moves nothing: `adaptive_sync` asks every replica's trigger and
synchronises all of them if one wants to. So a trigger decides *when*, and knows
neither what is sent (the synchronizer) nor what a step does (the inner optimizer).

`every_k(10)` looks at a counter; `relative_momentum_change(0.1)` at momenta;
`at_least_every(relative_momentum_change(0.1), 50)` at both.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _trees
from curvadion_jax._protocols import Decision, Observation, Trigger


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


def stateless(
    decide: Callable[[Observation], Decision], *, scheduled: bool = False
) -> Trigger:
    """A trigger that remembers nothing.

    Args:
      decide: observation -> `Decision`, as the trigger's `decide` without a state.
      scheduled: whether it looks at counters alone, see `Trigger`.

    Returns:
      The trigger.

    Raises:
      TypeError: if it is not a function.

    Example:
      >>> on_even_steps = stateless(lambda seen: decision(seen.steps % 2 == 0))
      >>> bool(on_even_steps.decide(Observation(steps=4), ())[0].fire)
      True
    """
    return Trigger(
        init=lambda *_: (),
        decide=lambda observation, state: (decide(observation), state),
        scheduled=scheduled,
    )


def check_answer(answer: Any, before: Any) -> tuple[Decision, Any]:
    """Returns what a trigger's `decide` returned, in the state's dtypes, or rejects it.

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
    if not _trees.are_alike(before, answer[1]):
        shapes = [jax.tree.map(jnp.shape, state) for state in (before, answer[1])]
        raise ValueError(
            "a trigger's decide must return a state of the structure and shapes of the "
            f"one it was given, {shapes[0]}, got {shapes[1]}"
        )
    decided, new = answer
    return decided, jax.tree.map(_in_dtype_of, before, new)


def _in_dtype_of(before: Any, new: Any) -> Any:
    """A state whose dtype changes would be another program on every step."""
    changes = hasattr(before, "dtype") and jnp.result_type(new) != before.dtype
    return jnp.asarray(new, before.dtype) if changes else new


def check_trigger(trigger: Any, what: str = "trigger") -> None:
    """Rejects what is not a `Trigger`."""
    if not isinstance(trigger, Trigger):
        raise TypeError(
            f"{what} must be a curvadion_jax.triggers.Trigger such as every_k(10) or "
            f"relative_momentum_change(0.1), got {trigger!r}"
        )
