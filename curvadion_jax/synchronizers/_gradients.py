"""The paper's sync: all replicas step with the mean gradient."""

from typing import Any, NamedTuple

import jax
import optax

from curvadion_jax import _health, compressors
from curvadion_jax._group import Group
from curvadion_jax.compressors._base import check_compressor
from curvadion_jax.synchronizers import _base


class GradientsState(NamedTuple):
    """State of `average_gradients` with a compressor; it moves at syncs.

    Attributes:
      error: what of earlier gradients this replica has not sent yet, tree of the
        parameters, at least float32. Replica-varying.
      compressor_state: state of the compressor, the same on all replicas.

    Example:
      >>> state = average_gradients(compressors.quantize(8)).init(
      ...     {"w": jax.numpy.ones(2)}, inner_state=(), views={}
      ... )
      >>> state.error["w"].tolist()
      [0.0, 0.0]
    """

    error: optax.Updates
    compressor_state: Any


def average_gradients(
    compressor: compressors.Compressor | None = None,
) -> _base.Synchronizer:
    """At a sync every replica takes its step with the mean gradient.

    This is what CurvaDion's formula and code send. It does not bring replicas back
    together: what parameters and momenta have drifted apart on quiet steps stays
    apart (`reconcile` mends that). With `always` it equals training on one big batch,
    whatever the inner optimizer.

    Args:
      compressor: form in which gradients are sent, with error feedback: what a
        replica's gradient holds and was not sent is added to its next one. With
        `low_rank` and `always` this is PowerSGD. None sends them as they are, in at
        least float32.

    Returns:
      A synchronizer for any inner optimizer.

    Raises:
      TypeError: if `compressor` is none.

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
    if compressor is not None:
        compressor = check_compressor(compressor)
    form = compressors.exact() if compressor is None else compressor

    def init(params, inner_state, views):
        if compressor is None:
            return ()
        return GradientsState(_base.zero_error(params), form.init(params, views))

    def step(local: _base.LocalStep, state, group: Group):
        error, form_state = ((), ()) if compressor is None else state
        mean, error, form_state = _base.mean_with_feedback(
            compressor, local.gradients, error, form_state, group, local.views
        )
        if compressor is not None:
            state = GradientsState(error, form_state)
        mean = jax.tree.map(lambda m, g: m.astype(g.dtype), mean, local.gradients)
        updates, inner_state = local.take(mean, local.inner_state)
        updates = _health.or_zeros(group.anybody, updates)
        inner_state = _health.where(group.anybody, inner_state, local.inner_state)
        return updates, inner_state, state

    return _base.Synchronizer(
        init, step, lambda params, inner_state, views: form.payload(params, views)
    )
