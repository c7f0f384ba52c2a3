"""How far a replica has moved from what all had in common."""

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _memory
from curvadion_jax._protocols import Decision, Observation, Trigger
from curvadion_jax.triggers import _base


def _square(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))))


def _relative_drift(params: optax.Params, anchor: optax.Params) -> jax.Array:
    """|params - anchor| / |anchor| over all leaves; 0 where both are 0, NaN is inf."""
    wide = [
        a.astype(jnp.promote_types(a.dtype, jnp.float32))
        for a in jax.tree.leaves(anchor)
    ]
    pairs = zip(jax.tree.leaves(params), wide, strict=True)
    zero = jnp.zeros([], jnp.float32)
    drift = jnp.sqrt(sum((_square(x - a) for x, a in pairs), start=zero))
    size = jnp.sqrt(sum(map(_square, wide), start=zero))
    ratio = drift / jnp.where(size == 0, 1, size)
    ratio = jnp.where((size == 0) & (drift > 0), jnp.inf, ratio)
    return jnp.where(jnp.isnan(ratio), jnp.inf, ratio)


def drift(threshold: optax.ScalarOrSchedule) -> Trigger:
    r"""Synchronises when a replica has moved far from the anchor.

    With :math:`\theta_i` the parameters of replica i before this step and :math:`a` the
    anchor, the parameters that all had after the last sync, its relative drift is

    .. math::
      \|\theta_i - a\| \,/\, \|a\|

    with the norm over all parameters together. `adaptive_sync` synchronises if it
    exceeds `threshold` on any replica. NaN counts as infinite.

    Federated Dynamic Averaging bounds the variance of the replicas' parameters,
    :math:`\tfrac1N \sum_i \|d_i - \bar d\|^2` with :math:`d_i = \theta_i - a`, which it
    estimates from a sketch of the drift that is averaged on every step. The variance
    is the mean of :math:`\|d_i\|^2` less :math:`\|\bar d\|^2`. Here the first term is
    bounded, on every replica: while none wants to synchronise, the variance is at most
    :math:`(\mathrm{threshold} \cdot \|a\|)^2`. Nothing but the flag is sent for it.
    What replicas drift in common counts too, so the threshold is reached sooner.

    Args:
      threshold: number, or schedule of the number of steps taken, such as one value a
        stage of training by `optax.join_schedules`. Under `optax.inject_hyperparams`
        pass it through a factory of your own.

    Returns:
      The trigger, for synchronizers that keep an anchor. Its value is the relative
      drift. It reads the anchor on every step, from the host's memory if it was moved
      there (`curvadion_jax.replicas.offload`).

    Raises:
      TypeError: for a threshold that is neither a number nor a schedule.
      ValueError: for a negative or NaN threshold; when traced, if the synchronizer
        keeps no anchor.

    Example:
      >>> from curvadion_jax.triggers import Observation
      >>> stages = optax.join_schedules(
      ...     [optax.constant_schedule(0.01), optax.constant_schedule(0.2)], [1000]
      ... )
      >>> seen = Observation(
      ...     params={"w": jnp.array([3.0, 4.5])},
      ...     anchor={"w": jnp.array([3.0, 4.0])},
      ...     steps=jnp.array(999),
      ... )
      >>> for each in (seen, seen._replace(steps=jnp.array(1000))):
      ...     decision, _ = drift(stages).decide(each, ())
      ...     print(f"{decision.value:.2f} {decision.threshold:.2f} {decision.fire}")
      0.10 0.01 True
      0.10 0.20 False

    References:
      Theologitis et al., `Federated Dynamic Averaging
      <https://arxiv.org/abs/2405.20988>`_, 2024
    """
    _arguments.check_number(threshold, "threshold")

    def decide(observation: Observation) -> Decision:
        if not jax.tree.leaves(observation.anchor):
            raise ValueError(
                "drift is measured from the parameters after the last sync, and this "
                "synchronizer keeps no such anchor: use synchronizers.reconcile(), or "
                "another trigger"
            )
        anchor = _memory.to_device(observation.anchor)
        value = _relative_drift(observation.params, anchor)
        limit = threshold(observation.steps) if callable(threshold) else threshold
        return _base.decision(~(value <= limit), value, limit)

    return _base.stateless(decide)
