"""The paper's sync: every replica takes its step with the mean gradient."""

from __future__ import annotations

from curvadion_jax import _dtypes, compressors
from curvadion_jax.synchronizers._types import Part, WithinStep


def average_gradients(
    compressor: compressors.Compressor | None = None,
) -> WithinStep:
    """Averages gradients at a sync, within the step.

    CurvaDion's formula and code do this. It does not make replicas equal: their drift
    on local steps stays (`reconcile` removes it). With `always` it equals training on
    one big batch, for any inner optimizer.

    Args:
      compressor: form in which gradients are sent, with error feedback: what a replica
        did not send is added to its next gradient that is sent. None means at least
        float32.

    Returns:
      A synchronizer for any inner optimizer. With a compressor it keeps a residual for
      each replica, in at least float32.

    Example:
      >>> import optax
      >>> from curvadion_jax import adaptive_sync, compressors, triggers
      >>> synchronous = adaptive_sync(
      ...     optax.adam(1e-3), triggers.always(), average_gradients()
      ... )
      >>> in_two_bits = average_gradients(compressors.quantize(2))
    """
    form = compressors.exact() if compressor is None else compressor

    def sync(take, gradients, inner_state, state, residual, part: Part):
        if compressor is None:
            mean = part.mean(gradients)
        else:
            own = part.weighted(gradients)
            mean, residual = compressor.mean_with_feedback(own, residual, part.group)
            mean = _dtypes.cast_like(mean, gradients)
        return *take(mean, inner_state), state, residual

    def payload(params, inner_state, layout):
        return form.payload_by_device(params, layout)

    return WithinStep(sync, payload, init_residual=compressors.residual_of(compressor))
