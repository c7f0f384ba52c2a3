"""Triggers that look at nothing but the numbers of steps and syncs."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments
from curvadion_jax._protocols import Observation, Trigger
from curvadion_jax.triggers import _base

# Longer than any run, and short enough to be an int32.
_LONGEST = 2**30


def always() -> Trigger:
    """Every step synchronises.

    Returns:
      The trigger.

    Example:
      >>> from curvadion_jax.triggers import Observation
      >>> decision, _ = always().decide(Observation(), ())
      >>> bool(decision.fire)
      True
    """
    return _base.stateless(lambda observation: _base.decision(True), scheduled=True)


def never() -> Trigger:
    """No step synchronises; replicas train alone.

    Returns:
      The trigger.

    Example:
      >>> from curvadion_jax.triggers import Observation
      >>> decision, _ = never().decide(Observation(), ())
      >>> bool(decision.fire)
      False
    """
    return _base.stateless(lambda observation: _base.decision(False), scheduled=True)


def every_k(k: int) -> Trigger:
    """Synchronises after steps k, 2k, 3k, ...

    Args:
      k: period in steps, at least 1; `every_k(1)` is `always()`.

    Returns:
      The trigger.

    Raises:
      TypeError: if k is not an int.
      ValueError: if k is below 1.

    Example:
      >>> from curvadion_jax.triggers import Observation
      >>> trigger = every_k(30)
      >>> decisions = [
      ...     trigger.decide(Observation(steps=steps), ())[0] for steps in range(60)
      ... ]
      >>> [1 + step for step, decision in enumerate(decisions) if decision.fire]
      [30, 60]
    """
    _arguments.check_int(k, "the period k")
    return _base.stateless(
        lambda observation: _base.decision((observation.steps + 1) % k == 0),
        scheduled=True,
    )


def quadratic_period(
    learning_rate: optax.ScalarOrSchedule,
    alpha: jax.typing.ArrayLike,
    k: int = 1,
    *,
    warmup: int = 0,
) -> Trigger:
    r"""Synchronises the more rarely, the smaller the learning rate.

    The quadratic synchronization rule (QSR): a round that begins at step t, with
    learning rate :math:`\eta_t`, is of

    .. math::
      H = \max\bigl(k,\; \lfloor (\alpha / \eta_t)^2 \rfloor\bigr)

    steps, the last of which synchronises. It is computed once a round, after the sync
    (another trigger's as well, in `any_of`) or at the start.

    Args:
      learning_rate: number, or schedule of the number of steps taken: that of the
        inner optimizer.
      alpha: growth coefficient, in units of the learning rate; at a learning rate of
        alpha / sqrt(k) the period begins to grow.
      k: smallest period in steps, at least 1.
      warmup: steps over which the learning rate rises. The rule is for one that falls:
        a rate of nearly zero would make the first round last for ever. Rounds that
        begin in these steps have the period of the learning rate right after them;
        this is our choice, and the authors' code has a period of its own for them.

    Returns:
      The trigger. Its state is the period, int32[]. Unlike in the authors' code, the
      last round does not end with training: for the model at the end see
      `replicas.consensus`.

    Raises:
      TypeError: if an argument is of the wrong type.
      ValueError: if k is below 1, warmup negative, or a number negative or NaN.

    Example:
      >>> from curvadion_jax.triggers import Observation
      >>> decay = optax.piecewise_constant_schedule(0.1, {6: 0.5})  # 0.05 from 6 on
      >>> trigger = quadratic_period(decay, alpha=0.15, k=2)
      >>> period, quiet, fired = trigger.init(None, None, {}), 0, []
      >>> for steps in range(24):
      ...     seen = Observation(steps=steps, local_steps=quiet)
      ...     decision, period = trigger.decide(seen, period)
      ...     quiet = 0 if decision.fire else quiet + 1
      ...     fired += [1 + steps] if decision.fire else []
      >>> fired  # 1.5^2 and then 3^2 steps
      [2, 4, 6, 15, 24]

    References:
      Gu et al., `A Quadratic Synchronization Rule for Distributed Deep Learning
      <https://arxiv.org/abs/2310.14423>`_, 2023

      `The authors' code <https://github.com/hmgxr128/QSR>`_, `adjust_h` in localopt.py
    """
    _arguments.check_number(learning_rate, "learning_rate")
    _arguments.check_number(alpha, "alpha")
    _arguments.check_int(k, "the smallest period k")
    _arguments.check_int(warmup, "warmup", at_least=0)

    def init(params, inner_state, views) -> Any:
        del params, inner_state, views
        return jnp.full([], k, jnp.int32)

    def decide(observation: Observation, period: jax.Array):
        rate = learning_rate
        if callable(rate):
            rate = rate(jnp.maximum(observation.steps, warmup))
        ratio = jnp.asarray(alpha, jnp.float32) / jnp.asarray(rate, jnp.float32)
        # A hair above, so that rounding to float32 does not take a step away.
        steps = jnp.nan_to_num(jnp.square(ratio) * (1 + 2.0**-20), nan=0.0)
        steps = jnp.minimum(steps, _LONGEST).astype(jnp.int32)
        following = jnp.maximum(steps, k)
        period = jnp.where(observation.local_steps == 0, following, period)
        return _base.decision(observation.local_steps + 1 >= period), period

    return Trigger(init, decide, scheduled=True)
