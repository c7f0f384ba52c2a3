"""The sync after which all replicas continue from common parameters, the anchor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _dtypes, _finite, compressors
from curvadion_jax.mesh._rows import Replicas
from curvadion_jax.synchronizers._types import AfterStep, Part


def reconcile(
    outer: optax.GradientTransformation | None = None,
    *,
    compressor: compressors.Compressor | None = None,
    residual_dtype: jax.typing.DTypeLike | None = None,
) -> AfterStep:
    r"""Moves replicas to a common anchor at a sync, after their own steps.

    This is DiLoCo's sync; the anchor are its outer, or global, parameters. With
    :math:`\theta_i` the parameters of replica i after its local step and :math:`a` the
    anchor, the parameters all had after the last sync, the outer optimizer is given the
    mean pseudo-gradient:

    .. math::
      d = \tfrac1N \textstyle\sum_i (a - \theta_i), \qquad
      a \leftarrow a + \mathrm{outer}(d), \qquad \theta_i \leftarrow a

    Afterwards all replicas have the parameters of the one anchor, up to the rounding of
    `params + update`. It does not add up, because pseudo-gradients are measured from
    the anchor. Each replica keeps the state of its inner optimizer.

    Args:
      outer: Optax transformation for the outer step. It is given the pseudo-gradient
        with the anchor as parameters; schedules count syncs. None: the plain average.
      compressor: form in which pseudo-gradients are sent, with error feedback: what a
        replica did not send is added to its next one. None means at least float32.
      residual_dtype: dtype in which error feedback is kept from sync to sync; None is
        float32. (For the outer step `optax.sgd` has `accumulator_dtype`.)

    Returns:
      A synchronizer for any inner optimizer. It keeps one anchor, the outer optimizer's
      state, and with a compressor a residual for each replica. The anchor has the
      parameters' dtype: in bfloat16 a mean move of less than half of a last digit
      (1/512 of the parameter) is rounded away at every sync, so keep parameters in
      float32 and compute in bfloat16.

    Raises:
      ValueError: if `residual_dtype` is one of integers.

    Example:
      >>> diloco = reconcile(optax.sgd(0.7, momentum=0.9, nesterov=True))

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023
    """
    _arguments.check_dtype(residual_dtype, "residual_dtype")
    outer = optax.with_extra_args_support(optax.scale(-1) if outer is None else outer)
    form = compressors.exact() if compressor is None else compressor

    def sync(moved, anchor, state, residual, part: Part):
        # 1. The mean drift. A replica sends its drift times its weight, and what it has
        # not sent before, which was multiplied then.
        times_share = lambda x: x * jnp.asarray(part.share_present, x.dtype)
        drift = _dtypes.difference(moved, anchor)
        contribution = jax.tree.map(times_share, part.weighted(drift))
        if compressor is None:
            mean, new_residual = part.group.mean(contribution), ()
        else:
            mean, new_residual = compressor.mean_with_feedback(
                contribution, residual, part.group
            )

        # 2. The outer step, from the anchor.
        pseudo_gradient = jax.tree.map(jnp.negative, mean)
        layout = part.group.layout
        more = {"layout": layout} if layout.is_divided else {}
        step, outer_state = outer.update(pseudo_gradient, state, anchor, **more)
        target = jax.tree.map(_dtypes.add_cast, anchor, step)

        # 3. Elements that would not be finite stay as they are in what is kept, and the
        # next sync sends what this one would have sent. In the target they are counted.
        is_finite = jax.tree.map(jnp.isfinite, target)
        anchor = jax.tree.map(jnp.where, is_finite, target, anchor)
        state = _finite.repaired(_dtypes.cast_like(outer_state, state), state)
        if compressor is not None:
            new_residual = jax.tree.map(jnp.where, is_finite, new_residual, residual)
        return target, anchor, state, new_residual

    def payload(params, inner_state, layout):
        return form.payload_by_device(params, layout)

    init_residual = compressors.residual_of(compressor, residual_dtype)
    return AfterStep(sync, payload, outer.init, init_residual)


# What `local_muon` and `curvadion` do unless told otherwise. MuLoCo's outer step has
# 0.7 and 0.6; these lost less in benchmarks/study/gap.md.
_BITS = 2
_OUTER_LEARNING_RATE, _OUTER_MOMENTUM = 1.0, 0.4
# Dtype of the sync's state. It changes the loss by less than the spread over seeds.
_DTYPE = jnp.bfloat16


def reconcile_in_few_bits(bits: int | None, mesh: Replicas) -> AfterStep:
    """A Nesterov outer step along the mean pseudo-gradient, sent in few bits."""
    outer = optax.sgd(
        _OUTER_LEARNING_RATE, _OUTER_MOMENTUM, nesterov=True, accumulator_dtype=_DTYPE
    )
    return reconcile(
        # With one replica an outer step would only change the inner optimizer. (A mesh
        # of one has it, so that its state can be resized to more.)
        None if mesh is None else outer,
        compressor=compressors.quantize(_BITS if bits is None else bits),
        residual_dtype=_DTYPE,
    )
