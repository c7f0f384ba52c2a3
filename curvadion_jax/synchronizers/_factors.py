"""Dion's compressed sync: it averages low-rank factors in place of gradients."""

import functools

import jax
import jax.numpy as jnp

from curvadion_jax import _momentum, _paths, compressors
from curvadion_jax._collectives import Group
from curvadion_jax._interfaces import LocalStep, Synchronizer, SyncState, Views
from curvadion_jax._matrices import MatrixView
from curvadion_jax._power_iteration import reduces_factors


def average_factors() -> Synchronizer:
    """Averages Dion's factors P and R at a sync, within the step.

    Each matrix sends (rows + cols) r elements in place of rows x cols, in two messages,
    and momenta stay on their replicas. If its factors would be larger than the matrix,
    momentum plus gradient is averaged. The gradients of other parameters are averaged
    in full. The update is Dion's on the replicas' mean momentum and gradient: with
    `always` (`presets.synchronous_dion`) and equal weights this is training on one big
    batch, at any rank. Like `average_gradients` it does not make replicas equal.

    Returns:
      A synchronizer for inner optimizers made of :func:`dion` or :func:`scale_by_dion`,
      which must pass on the extra argument `reduce_fn`. `common` holds Q of every state
      of Dion after the last sync: every replica starts the next power iteration there.

    References:
      Ahn et al., `Dion <https://arxiv.org/abs/2504.05295>`_, section on compressed
      data-parallel synchronisation
    """
    return Synchronizer(_init, _sync, _payload)


def _init(params, inner_state, views) -> SyncState:
    del params, views
    states = _momentum.dion_states(inner_state)
    if not states:
        raise ValueError(
            "average_factors needs Dion as the inner optimizer, and there is no "
            "DionState in its state. Use curvadion_jax.dion, or the synchronizer "
            "average_gradients or reconcile."
        )
    # Copies, so that both can be donated.
    return SyncState(common=[jax.tree.map(jnp.copy, state.dion_q) for state in states])


def _sync(local: LocalStep, state: SyncState, group: Group):
    before = local.inner_state
    ranks = _ranks(before, local.views)
    gradients = _mean_of_others(local, group, ranks)
    reduced = []  # arrays that Dion passed to reduce_fn

    def reduce_fn(arrays, made_of):
        reduced.extend(arrays)
        layout = group.layout.of_factors(arrays, made_of)
        return local.mean(arrays, group.laid_out(layout))

    inner_state = before
    if group.size > 1:  # one replica is plain Dion
        # On local steps every replica moves its own Q: products with them could cancel.
        common = iter(state.common)
        inner_state = _momentum.with_dion(
            before, lambda x: x._replace(dion_q=next(common))
        )
    updates, inner_state = local.take(gradients, inner_state, reduce_fn=reduce_fn)
    expected = len(ranks) + sum(reduces_factors(*pair) for pair in ranks.values())
    if len(reduced) < expected:
        raise ValueError(
            f"Of {expected} arrays of Dion {len(reduced)} were averaged: a "
            "transformation around it does not pass on the extra argument reduce_fn. "
            "Build it as an optax.GradientTransformationExtraArgs that forwards extra "
            "arguments."
        )
    q = [dion.dion_q for dion in _momentum.dion_states(inner_state)]
    if group.size > 1:
        # An absent replica keeps all of its momentum and gradient for a later sync.
        _, kept = local.take(gradients, before, momentum_only=True)
        whole = iter([dion.momentum for dion in _momentum.dion_states(kept)])
        if_present = functools.partial(jnp.where, local.present)
        inner_state = _momentum.with_dion(
            inner_state,
            lambda x: x._replace(
                momentum=jax.tree.map(if_present, x.momentum, next(whole))
            ),
        )
    return updates, inner_state, SyncState(common=q)


def _payload(params, inner_state, views, layout):
    ranks, form = _ranks(inner_state, views), compressors.exact()
    others = dict(_paths.leaves_with_path(params))
    factored = {n: others.pop(n) for n in ranks if reduces_factors(*ranks[n])}
    total = form.payload_by_device(others, layout)
    for side, axes in (("rows", "p_axes"), ("cols", "q_axes")):
        factors, made_of = {}, {}
        for name, leaf in factored.items():
            view, r = ranks[name]
            shape = (*view.batch, getattr(view, side), r)
            factors[name] = jax.ShapeDtypeStruct(shape, leaf.dtype)
            made_of[name] = view.shape, getattr(view, axes)
        total += form.payload_by_device(factors, layout.of_factors(factors, made_of))
    return total


def _ranks(inner_state, views: Views) -> dict[str, tuple[MatrixView, int]]:
    """The view and the rank of every matrix of Dion, by its path."""
    found = {}
    for state in _momentum.dion_states(inner_state):
        for name, q in _paths.leaves_with_path(state.dion_q):
            view = views.get(name)
            if view is None or (*view.batch, view.cols) != q.shape[:-1]:
                raise ValueError(
                    f"Dion sees the parameter {name!r} otherwise than adaptive_sync "
                    f"does (Q of shape {q.shape}, {view}). Pass adaptive_sync the same "
                    "dimension_numbers."
                )
            found[name] = (view, q.shape[-1])
    return found


def _mean_of_others(local: LocalStep, group: Group, ranks):
    """Averages the gradients of parameters that are not Dion's."""
    leaves = _paths.leaves_with_path(local.gradients)
    others = {name: leaf for name, leaf in leaves if name not in ranks}
    mean = local.mean(others, group)
    found = [mean.get(name, leaf) for name, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(local.gradients), found)
