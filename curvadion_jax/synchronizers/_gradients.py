"""The paper's sync: all replicas step with the mean gradient."""

import jax

from curvadion_jax import compressors
from curvadion_jax._collectives import Group
from curvadion_jax._interfaces import LocalStep, Synchronizer, SyncState
from curvadion_jax.synchronizers import _feedback


def average_gradients(
    compressor: compressors.Compressor | None = None,
) -> Synchronizer:
    """At a sync every replica takes its step with the mean gradient.

    This is what CurvaDion's formula and code send. It does not make replicas equal:
    what has drifted apart on local steps stays apart. (`reconcile` mends that.) With
    `always` it equals training on one big batch, whatever the inner optimizer.

    Args:
      compressor: form in which gradients are sent, with error feedback: what a
        replica's gradient holds and was not sent is added to its next one. None sends
        them as they are, in at least float32.

    Returns:
      A synchronizer for any inner optimizer. With a compressor `residual` holds what of
      earlier gradients a replica has not sent yet, at least float32. A replica that is
      absent then sends its gradient later.

    Example:
      >>> params = {"kernel": jax.numpy.ones((16, 32))}
      >>> average_gradients().payload(params, inner_state=(), views={})
      Payload(averaged=2048, gathered=0)
      >>> eight_bits = average_gradients(compressors.quantize(8))
      >>> eight_bits.payload(params, inner_state=(), views={})
      Payload(averaged=520, gathered=0)

    References:
      `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025

      Vogels et al., `PowerSGD <https://arxiv.org/abs/1905.13727>`_, 2019
    """
    form = compressors.exact() if compressor is None else compressor

    def init(params, inner_state, views):
        del inner_state, views
        if compressor is None:
            return SyncState()
        return SyncState(residual=_feedback.zero_residual(params))

    def sync(local: LocalStep, state: SyncState, group: Group):
        gradients = local.gradients
        if compressor is None:
            mean = local.mean(gradients, group)
        else:
            mean, residual = _feedback.mean_with_feedback(
                compressor, gradients, state.residual, local, group
            )
            mean = jax.tree.map(lambda m, g: m.astype(g.dtype), mean, gradients)
            state = SyncState(
                residual=_feedback.with_absent(local, residual, gradients)
            )
        return *local.take(mean, local.inner_state), state

    def payload(params, inner_state, views):
        del inner_state, views
        return form.payload(params)

    return Synchronizer(init, sync, payload)
