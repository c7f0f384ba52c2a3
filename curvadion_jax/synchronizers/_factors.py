"""Dion's compressed sync: it averages low-rank factors in place of gradients."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _trees, compressors
from curvadion_jax._matrix_view import MatrixView
from curvadion_jax.matrices import _dion, _two_optimizers
from curvadion_jax.matrices._power_iteration import reduces_factors
from curvadion_jax.matrices._two_optimizers import DimensionNumbersOrFn
from curvadion_jax.mesh._group import Part
from curvadion_jax.mesh._layout import Layout
from curvadion_jax.synchronizers._types import WithinStep


def average_factors(
    dimension_numbers: DimensionNumbersOrFn = None,
) -> WithinStep:
    """Averages Dion's factors P and R at a sync, within the step.

    Each matrix sends (rows + cols) r elements in place of rows x cols, in two messages,
    and momenta stay on their replicas. If its factors would be no smaller than the
    matrix, momentum plus gradient is averaged. The gradients of other parameters are
    averaged in full. The update is Dion's on the replicas' mean momentum and gradient:
    with `always` (`presets.synchronous_dion`) and equal weights this is training on one
    big batch, at any rank. Like `average_gradients` it does not make replicas equal.
    The gradient of a replica that takes no part counts for nothing. Where factors are
    averaged its momentum stays as it was; where momentum plus gradient is, every
    replica's becomes that of the mean.

    Args:
      dimension_numbers: the same as given to Dion.

    Returns:
      A synchronizer for inner optimizers made of :func:`dion` or :func:`scale_by_dion`,
      which must pass on the extra argument `reduce_fn`. Its state is Q of every state
      of Dion after the last sync: every replica starts the next power iteration there.

    Raises:
      ValueError: at `init`, if the inner optimizer is not made of Dion; at `update`, if
        Dion was given other dimension numbers, or a transformation around it passes no
        extra arguments on.

    Example:
      >>> import curvadion_jax as cd
      >>> tx = cd.adaptive_sync(
      ...     cd.dion(0.01, rank=2), cd.triggers.every_k(4), average_factors()
      ... )
      >>> state = tx.init({"kernel": jnp.ones((8, 4))})
      >>> state.common.sync_state[0]["kernel"].shape  # Q of all replicas
      (4, 2)

    References:
      Ahn et al., `Dion <https://arxiv.org/abs/2504.05295>`_, section on compressed
      data-parallel synchronisation
    """

    def ranks_of(tree, inner_state):
        return _ranks(
            inner_state, _two_optimizers.matrix_views(tree, dimension_numbers)
        )

    def sync(take, gradients, before, qs, residual, part: Part):
        ranks = ranks_of(gradients, before)
        mean = _mean_of_others(part, gradients, ranks)
        if part.group.size == 1:  # plain Dion
            updates, inner_state = take(mean, before)
            return updates, inner_state, _qs(inner_state), residual

        def reduce_fn(factors, made_of):
            return part.mean(factors, part.group.of_factors(made_of))

        # All start from the common Q: on local steps every replica moves its own, and
        # products with those could cancel.
        start = _with_qs(before, qs)
        result, was_reduced = _dion.update_with(take, mean, start, reduce_fn=reduce_fn)
        if not was_reduced:
            raise ValueError(
                "A transformation around Dion does not pass on the extra argument "
                "reduce_fn, so nothing was averaged. Build it as an "
                "optax.GradientTransformationExtraArgs that forwards extra arguments."
            )
        updates, inner_state = result

        # A replica that takes no part keeps the momentum that it had. Where momentum
        # plus gradient is averaged, all have that mean.
        local = {name for name, pair in ranks.items() if reduces_factors(*pair)}
        inner_state = _keep_momenta(inner_state, before, local, ~part.present)
        return updates, inner_state, _qs(inner_state), residual

    def payload(params, inner_state, layout):
        return _payload(params, ranks_of(params, inner_state), layout)

    return WithinStep(sync, payload, init_state=_initial_qs)


def _initial_qs(inner_state) -> list[Any]:
    if not _dion.states_of(inner_state):
        raise ValueError(
            "average_factors needs Dion as the inner optimizer, and there is no "
            "DionState in its state. Use curvadion_jax.dion, or the synchronizer "
            "average_gradients or reconcile."
        )
    return _qs(inner_state)


def _qs(inner_state) -> list[Any]:
    """Q of every state of Dion."""
    return [dion.dion_q for dion in _dion.states_of(inner_state)]


def _with_qs(inner_state, qs: list[Any]):
    """The state with these Qs in Dion's states."""
    new = iter(qs)
    return _dion.with_states(inner_state, lambda dion: dion._replace(dion_q=next(new)))


def _keep_momenta(inner_state, before, names: Container[str], keep: jax.Array):
    """The state with the named momenta of the one before, if `keep` is true."""
    others = iter(_dion.states_of(before))

    def choose(dion):
        old = dict(_trees.leaves_with_path(next(others).momentum))
        either = lambda name, new: (
            jnp.where(keep, old[name], new) if name in names else new
        )
        return dion._replace(momentum=_trees.map_with_path(either, dion.momentum))

    return _dion.with_states(inner_state, choose)


def _payload(params, ranks, layout: Layout) -> compressors.Payload:
    """The bytes of all factors, and of the parameters that are not Dion's."""
    others = dict(_trees.leaves_with_path(params))
    rows, cols, made_of_rows, made_of_cols = {}, {}, {}, {}
    for name, (view, r) in ranks.items():
        if reduces_factors(view, r):
            dtype = others.pop(name).dtype
            rows[name] = jax.ShapeDtypeStruct((*view.batch, view.rows, r), dtype)
            cols[name] = jax.ShapeDtypeStruct((*view.batch, view.cols, r), dtype)
            made_of_rows[name] = view.p_axes
            made_of_cols[name] = view.q_axes
    form = compressors.exact()
    payloads = [
        form.payload_by_device(others, layout),
        form.payload_by_device(rows, layout.of_factors(made_of_rows)),
        form.payload_by_device(cols, layout.of_factors(made_of_cols)),
    ]
    return compressors.Payload(
        averaged=sum(payload.averaged for payload in payloads),
        gathered=sum(payload.gathered for payload in payloads),
    )


def _ranks(inner_state, views) -> dict[str, tuple[MatrixView, int]]:
    """The view and the rank of every matrix of Dion, by its path."""
    found = {}
    for state in _dion.states_of(inner_state):
        # One without matrices has a number in place of Q.
        qs = state.dion_q if jax.tree.leaves(state.momentum) else ()
        for name, q in _trees.leaves_with_path(qs):
            view = views.get(name)
            if view is None or (*view.batch, view.cols) != q.shape[:-1]:
                raise ValueError(
                    f"Dion sees the parameter {name!r} otherwise than average_factors "
                    f"does (Q of shape {q.shape}, {view}). Pass both the same "
                    "dimension_numbers."
                )
            found[name] = (view, q.shape[-1])
    return found


def _mean_of_others(part: Part, gradients, ranks):
    """Averages the gradients of parameters that are not Dion's."""
    leaves = _trees.leaves_with_path(gradients)
    others = {name: leaf for name, leaf in leaves if name not in ranks}
    mean = part.mean(others)
    found = [mean.get(name, leaf) for name, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(gradients), found)
