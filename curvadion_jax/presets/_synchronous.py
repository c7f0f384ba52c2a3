"""Methods that average on every step."""

from typing import Any

import optax

from curvadion_jax import _partition, synchronizers, triggers
from curvadion_jax._adaptive_sync import adaptive_sync
from curvadion_jax._dion import dion


def synchronous_dion(
    learning_rate: optax.ScalarOrSchedule,
    *,
    axis_name: str | None = None,
    allow_unchecked: bool = False,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    **dion_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """Dion that synchronises its factors on every step: the reference of all others.

    Args:
      learning_rate: a number or a schedule.
      axis_name: name of the replica axis; None is one replica.
      allow_unchecked: as for :func:`adaptive_sync`.
      dimension_numbers: as for :func:`dion`.
      **dion_arguments: other arguments of :func:`dion`.

    Returns:
      The optimizer, with :class:`AdaptiveSyncState`.

    Example:
      >>> import jax
      >>> tx = synchronous_dion(0.01, rank=0.25, axis_name="replica")
      >>> state = tx.init({"kernel": jax.numpy.ones((4, 8))})
      >>> state.sync_state.common[0]["kernel"].shape  # Q
      (4, 1)
    """
    return adaptive_sync(
        dion(learning_rate, dimension_numbers=dimension_numbers, **dion_arguments),
        triggers.always(),
        synchronizers.average_factors(),
        axis_name,
        dimension_numbers=dimension_numbers,
        allow_unchecked=allow_unchecked,
    )
