"""The sync after which all replicas continue from common parameters, the anchor."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _finite, _trees, compressors
from curvadion_jax._collectives import Group
from curvadion_jax._interfaces import LocalStep, Synchronizer, SyncState


def reconcile(
    outer: optax.GradientTransformation | None = None,
    *,
    compressor: compressors.Compressor | None = None,
    residual_dtype: jax.typing.DTypeLike | None = None,
) -> Synchronizer:
    r"""Moves replicas to a common anchor at a sync, after their own steps.

    With :math:`\theta_i` the parameters of replica i after its local step and
    :math:`a` the anchor, the parameters all had after the last sync, the outer
    optimizer is given the mean pseudo-gradient:

    .. math::
      d = \tfrac1N \textstyle\sum_i (a - \theta_i), \qquad
      a \leftarrow a + \mathrm{outer}(d), \qquad \theta_i \leftarrow a

    Afterwards the replicas' anchors agree to the bit, and their parameters up to the
    rounding of `params + update`. It does not add up, because pseudo-gradients are
    measured from the anchor. Each replica keeps the state of its inner optimizer.

    Args:
      outer: Optax transformation for the outer step. It is given the pseudo-gradient
        with the anchor as parameters; schedules count syncs. None: the plain average.
      compressor: form in which pseudo-gradients are sent, with error feedback: what a
        replica did not send is added to its next one. None means at least float32.
      residual_dtype: dtype in which error feedback is kept from sync to sync; None is
        float32. (For the outer step `optax.sgd` has `accumulator_dtype`.)

    Returns:
      A synchronizer for any inner optimizer. It keeps a copy of the parameters, with a
      compressor another, and as `common` the outer optimizer's state. The copy has the
      parameters' dtype: in bfloat16 a mean move of less than half of a last digit
      (1/512 of the parameter) is rounded away at every sync, so keep parameters in
      float32 and compute in bfloat16.

    Example:
      >>> diloco = reconcile(optax.sgd(0.7, momentum=0.9, nesterov=True))

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023
    """
    outer = optax.with_extra_args_support(optax.scale(-1) if outer is None else outer)
    form = compressors.exact() if compressor is None else compressor

    def init(params, inner_state, views) -> SyncState:
        del inner_state, views
        anchor = jax.tree.map(jnp.copy, params)  # so that both can be donated

        def zeros(x):
            return jnp.zeros_like(x, residual_dtype or _trees.compute_dtype(x.dtype))

        residual = () if compressor is None else jax.tree.map(zeros, params)
        return SyncState(anchor=anchor, common=outer.init(anchor), residual=residual)

    def sync(local: LocalStep, state: SyncState, group: Group):
        anchor, params = state.anchor, local.params
        moved = optax.apply_updates(params, local.updates)
        drift = jax.tree.map(
            lambda x, a: _trees.wide(x) - _trees.wide(a), moved, anchor
        )

        # 1. The mean drift, and what is left unsent. An absent replica sends its later.
        mean, residual = mean_with_feedback(
            compressor, drift, state.residual, local, group
        )

        # 2. The outer step, from the anchor. (`optax.apply_updates` would add in the
        # anchor's dtype.)
        pseudo_gradient = jax.tree.map(jnp.negative, mean)
        more = {"layout": group.layout} if group.layout.axes else {}
        step, outer_state = outer.update(pseudo_gradient, state.common, anchor, **more)
        new = jax.tree.map(lambda a, u: (a + u).astype(a.dtype), anchor, step)
        # Where the new anchor is not finite the old one stays, and the next sync sends
        # what this one would have sent.
        outer_state = _trees.like(outer_state, state.common)
        outer_state = _finite.repaired(outer_state, state.common)
        if compressor is not None:
            unsent = _finite.or_zeros(local.healthy, state.residual)
            residual = _finite.where_finite(new, residual, unsent)

        # 3. Parameters go to the new anchor; an absent replica keeps its drift on top.
        kept = _finite.or_zeros(~local.present & local.healthy, drift)
        target = jax.tree.map(lambda a, d: (a + d).astype(a.dtype), new, kept)
        updates = jax.tree.map(_move_to, target, params)
        anchor = _finite.where_finite(new, new, anchor)
        state = SyncState(anchor=anchor, common=outer_state, residual=residual)
        return updates, local.inner_state, state

    return Synchronizer(
        init=init,
        sync=sync,
        payload=lambda params, _, __, layout: form.payload_by_device(params, layout),
        after_local_step=True,
    )


def mean_with_feedback(
    compressor: compressors.Compressor | None,
    tree: Any,
    residual: Any,
    local: LocalStep,
    group: Group,
) -> tuple[Any, Any]:
    """Averages arrays in a compressor's form; returns the mean and the new residual.

    A residual is already multiplied by its weight, so it is sent in full at any later
    weight. A replica that takes no part contributes its residual alone. The mean is
    over all expected replicas: over those that take part, the drift of a replica that
    takes part every second time would count twice.
    """
    expected = lambda x: x * jnp.asarray(local.expected, x.dtype)
    if compressor is None:
        return jax.tree.map(expected, local.mean(tree, group)), residual
    whole = jax.tree.map(
        lambda x, r: expected(x) + r,
        local.weighted(tree),
        _finite.or_zeros(local.healthy, residual),
    )
    mean, unsent = compressor.average_by_device(whole, group)
    return mean, jax.tree.map(lambda new, r: new.astype(r.dtype), unsent, residual)


def _move_to(target: jax.Array, params: jax.Array) -> jax.Array:
    """The update from the parameters to the target, to the last bit if possible.

    `params + (target - params)` may miss by a rounding error, which is added once.
    """
    update = target - params
    missed = target - (params + update)
    return update + missed
