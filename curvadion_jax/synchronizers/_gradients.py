"""The paper's sync: every replica takes its step with the mean gradient."""

from curvadion_jax import compressors
from curvadion_jax._collectives import Group
from curvadion_jax._interfaces import LocalStep, Synchronizer, SyncState


def average_gradients() -> Synchronizer:
    """Averages gradients at a sync, within the step.

    CurvaDion's formula and code do this. It does not make replicas equal: their drift
    on local steps stays (`reconcile` removes it). With `always` it equals training on
    one big batch, for any inner optimizer.

    Returns:
      A synchronizer for any inner optimizer. It keeps nothing.
    """

    def sync(local: LocalStep, state: SyncState, group: Group):
        mean = local.mean(local.gradients, group)
        return *local.take(mean, local.inner_state), state

    form = compressors.exact()
    return Synchronizer(
        init=lambda params, inner_state, views: SyncState(),
        sync=sync,
        payload=lambda params, _, __, layout: form.payload_by_device(params, layout),
    )
