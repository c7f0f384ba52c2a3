"""The paper's sync: every replica takes its step with the mean gradient."""

from curvadion_jax import compressors
from curvadion_jax.synchronizers._types import WithinStep


def average_gradients() -> WithinStep:
    """Averages gradients at a sync, within the step.

    CurvaDion's formula and code do this. It does not make replicas equal: their drift
    on local steps stays (`reconcile` removes it). With `always` it equals training on
    one big batch, for any inner optimizer.

    Returns:
      A synchronizer for any inner optimizer. It keeps nothing.

    Example:
      >>> from curvadion_jax import adaptive_sync, triggers
      >>> import optax
      >>> synchronous = adaptive_sync(
      ...     optax.adam(1e-3), triggers.always(), average_gradients()
      ... )
    """

    def sync(take, gradients, inner_state, common, part):
        return *take(part.mean(gradients), inner_state), common

    def payload(params, inner_state, layout):
        return compressors.exact().payload_by_device(params, layout)

    return WithinStep(sync, payload)
