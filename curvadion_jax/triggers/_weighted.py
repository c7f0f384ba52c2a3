"""The bytes of `evenly`, spent where weights of the steps are high."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from curvadion_jax import _arguments
from curvadion_jax._protocols import Observation, Trigger
from curvadion_jax.triggers import _base
from curvadion_jax.triggers._budget import ROUNDING, share_of_steps


def weighted(
    rate: jax.typing.ArrayLike,
    weights: Sequence[float] | np.ndarray | jax.Array,
    *,
    cost: jax.typing.ArrayLike | None = None,
) -> Trigger:
    r"""Spends a share of the bytes of synchronous training where weights are high.

    For a run whose length is known, N steps. The rate pays for S syncs in the run. Each
    step is due a part of them in proportion to its weight, and step n synchronises
    where the running sum passes a whole number:

    .. math::
      \lfloor S c_n \rfloor > \lfloor S c_{n-1} \rfloor, \quad
      c_n = \sum_{t \le n} w_t \Big/ \sum_{t \le N} w_t, \quad
      S = \lfloor N \min(1, \mathrm{rate} / \mathrm{cost}) \rfloor

    So the last sync is on step N, or on the last one before it that weighs something.
    A step on which several are due takes one, and the others are lost. After step N
    syncs come at even distances. Where S is 0, the run is too short for a sync.

    .. note::
      It does not count syncs, as `evenly` does: one that is not possible is not made up
      for, and those of other triggers come on top. With a synchronizer's `delay` of k
      steps give the last k steps weight 0, so that the last sync ends in the run.

    Args:
      rate: share of the bytes of synchronous training, an all-reduce of all gradients
        in float32 on every step; 0.01 is one percent.
      weights: [N], of every step from the first, 0 or more and not all 0. The square
        root of the learning rate ended lower than even distances in small runs.
      cost: what a sync counts, in all-reduces of all gradients in float32. None takes
        what the synchronizer sends; with 1.0 the rate is a share of the steps.

    Returns:
      The trigger, without state; weights are constants of the program, 4 bytes a step.
      It looks at the number of steps alone, so a run that is restored goes on where it
      was.

    Raises:
      TypeError: if the rate or the cost is not a number, or the weights no plain array,
        such as a schedule.
      ValueError: if the rate is not above 0 and finite, the cost negative, or the
        weights are not as said.

    Example:
      >>> import optax
      >>> from curvadion_jax.triggers import Observation
      >>> learning_rate = optax.cosine_decay_schedule(0.02, 12)
      >>> trigger = weighted(0.5, learning_rate(np.arange(12)), cost=1.0)
      >>> seen = [Observation(steps=steps) for steps in range(12)]
      >>> [int(trigger.decide(each, ())[0].fire) for each in seen]
      [0, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 1]
    """
    _arguments.check_positive(rate, "rate")
    if cost is not None:
        _arguments.check_number(cost, "cost")
    remaining = _remaining(weights)
    number = len(remaining) - 1

    def decide(observation: Observation):
        paid = share_of_steps(rate, cost, observation) * number
        syncs = jnp.floor(paid * (1 + ROUNDING))
        steps = jnp.asarray(observation.steps) + jnp.arange(2)  # before and after
        left = jnp.asarray(remaining)[jnp.minimum(steps, number)]
        left = jnp.ceil(syncs * left * (1 - ROUNDING))
        beyond = jnp.floor(syncs * (steps - number) / number * (1 + ROUNDING))
        within = observation.steps < number
        return _base.decision(
            jnp.where(within, left[1] < left[0], beyond[1] > beyond[0])
        )

    return _base.stateless(decide, scheduled=True)


def _remaining(weights: Sequence[float] | np.ndarray | jax.Array) -> np.ndarray:
    """Of all weight what is left after the first 0, 1, ..., N steps, float32[N + 1].

    Summed from the end, since a sum from the start cannot tell a small last weight.
    """
    wanted = (
        "weights must be one finite number of at least 0 for every step, one-"
        "dimensional, such as np.sqrt(schedule(np.arange(steps))), got "
    )
    try:
        given = np.asarray(weights, np.float64)
    except (TypeError, ValueError):  # such as a schedule itself, or traced
        raise TypeError(wanted + f"{weights!r:.200}") from None
    if given.ndim != 1:
        raise ValueError(f"{wanted}an array of shape {given.shape}")
    if not np.all(np.isfinite(given)) or np.any(given < 0):
        raise ValueError(wanted + f"{weights!r:.200}")
    sums = np.append(np.cumsum(given[::-1])[::-1], 0.0)
    if not sums[0] > 0:
        raise ValueError(
            f"weights must not all be 0, got {len(given)} of them whose sum is "
            f"{sums[0]}: give a step that is to synchronise a weight"
        )
    return (sums / sums[0]).astype(np.float32)
