"""Triggers that look at nothing but the number of steps."""

from curvadion_jax.triggers import _base


def always() -> _base.Trigger:
    """Every step synchronises.

    Returns:
      The trigger.

    Example:
      >>> from curvadion_jax.triggers import Observation
      >>> decision, _ = always().decide(Observation(), ())
      >>> bool(decision.fire)
      True
    """
    return _base.stateless(lambda observation: _base.decision(True))


def never() -> _base.Trigger:
    """No step synchronises; replicas train alone.

    Returns:
      The trigger.

    Example:
      >>> from curvadion_jax.triggers import Observation
      >>> decision, _ = never().decide(Observation(), ())
      >>> bool(decision.fire)
      False
    """
    return _base.stateless(lambda observation: _base.decision(False))


def every_k(k: int) -> _base.Trigger:
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
    _base.check_steps(k, "the period k")
    return _base.stateless(
        lambda observation: _base.decision((observation.steps + 1) % k == 0)
    )
