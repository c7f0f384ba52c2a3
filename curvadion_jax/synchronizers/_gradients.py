"""The paper's sync: all replicas step with the mean gradient."""

from curvadion_jax import compressors
from curvadion_jax._collectives import Group
from curvadion_jax._interfaces import LocalStep, Synchronizer, SyncState


def average_gradients() -> Synchronizer:
    """At a sync every replica takes its step with the mean gradient.

    This is what CurvaDion's formula and code send. It does not make replicas equal:
    what has drifted apart on local steps stays apart. (`reconcile` mends that.) With
    `always` it equals training on one big batch, whatever the inner optimizer.

    Returns:
      A synchronizer for any inner optimizer. It keeps nothing.

    Example:
      >>> import numpy as np
      >>> params = {"kernel": np.ones((16, 32), np.float32)}
      >>> average_gradients().payload(params, inner_state=(), views={})
      Payload(averaged=2048, gathered=0)

    References:
      `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025
    """

    def sync(local: LocalStep, state: SyncState, group: Group):
        mean = local.mean(local.gradients, group)
        return *local.take(mean, local.inner_state), state

    return Synchronizer(
        init=lambda params, inner_state, views: SyncState(),
        sync=sync,
        payload=lambda params, inner_state, views: compressors.exact().payload(params),
    )
