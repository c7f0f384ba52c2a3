"""The paper's sync: all replicas step with the mean gradient."""

from curvadion_jax.synchronizers import _base


def average_gradients() -> _base.Synchronizer:
    """At a sync every replica takes its step with the mean gradient.

    This is what CurvaDion's formula and code send. It does not bring replicas back
    together: what parameters and momenta have drifted apart on quiet steps stays
    apart (`reconcile` mends that). With `always` it equals training on one big batch,
    whatever the inner optimizer.

    Returns:
      A synchronizer that averages all gradients, in at least float32.

    Example:
      >>> import jax
      >>> params = {"kernel": jax.numpy.ones((4, 8))}
      >>> average_gradients().payload(params, inner_state=(), views={})
      128

    References:
      `CurvaDion <https://arxiv.org/abs/2512.13728>`_, 2025
    """

    def step(local: _base.LocalStep, state, mean: _base.Mean):
        updates, inner_state = local.take(mean(local.gradients), local.inner_state)
        return updates, inner_state, state

    return _base.Synchronizer(
        init=lambda params, inner_state: (),
        step=step,
        payload=lambda params, inner_state, views: _base.bytes_averaged(params),
    )
