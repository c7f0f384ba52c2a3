"""Dion's compressed sync: the low-rank factors are averaged, not the gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _health, _paths, compressors
from curvadion_jax._group import Group
from curvadion_jax._low_rank import reduces_factors
from curvadion_jax._orthonormalize import compute_dtype
from curvadion_jax._payload import total
from curvadion_jax.compressors._base import check_compressor, check_stateless
from curvadion_jax.synchronizers import _base


class FactorsState(NamedTuple):
    """State of `average_factors`; it moves at syncs.

    Attributes:
      common_q: Q of every state of Dion after the last sync, in order: the power
        iteration of the next sync starts from it on every replica. The same on all
        replicas.
      error: what of their gradients this replica has not sent yet, path -> array, at
        least float32, of the parameters that Dion does not take; empty without a
        compressor. Replica-varying.

    Example:
      >>> from curvadion_jax import scale_by_dion
      >>> params = {"kernel": jnp.ones((4, 8))}
      >>> state = average_factors().init(params, scale_by_dion(2).init(params), {})
      >>> state.common_q[0]["kernel"].shape
      (4, 2)
    """

    common_q: list[Any]
    error: dict[str, jax.Array]


def average_factors(
    compressor: compressors.Compressor | None = None,
) -> _base.Synchronizer:
    r"""At a sync the factors P and R of Dion are averaged while the step is taken.

    Matrices send (rows + cols) r elements instead of rows x cols, in two messages one
    after the other, and momenta stay on their replicas; where the factors would be
    larger than the matrix, momentum plus gradient is averaged instead. The gradients
    of the other parameters are averaged in full. The update is that of Dion on the
    replicas' mean momentum and gradient: with `always` this is training on one big
    batch, at any rank. Like `average_gradients` it does not bring drifted parameters
    back together.

    With a compressor, B Q and R are sent in its form. P is a basis of what arrived: the
    same on all replicas, and any basis will do. Of R each replica takes away what it
    really put in, :math:`M_i = B_i - (1 - \mu) P \hat R_i^\top`, with
    :math:`\mathrm{mean}(\hat R_i) = R` for all, so that what rounding lost stays in the
    momenta and comes again.

    Args:
      compressor: form in which factors, momenta sent whole and the gradients of the
        other parameters are sent, such as `quantize(8)`, without a state. What it does
        not send of a gradient is added to the next one. None sends them as they are, in
        at least float32.

    Returns:
      A synchronizer for inner optimizers made of :func:`dion` or
      :func:`scale_by_dion`. Its state costs one copy of Q, and with a compressor one of
      the parameters that Dion does not take.

    Raises:
      TypeError: if `compressor` is none.
      ValueError: if the compressor has a state; at `init` if the inner optimizer's
        state holds none of Dion's, and when traced if something between swallows the
        extra argument `reduce_fn`.

    .. warning::
      Without error feedback in Dion (`error_feedback=False`) what rounding loses of R
      is lost.

    Example:
      >>> from curvadion_jax import curvadion
      >>> params = {"kernel": jnp.ones((32, 64))}
      >>> for form in (None, compressors.quantize(8)):
      ...     tx = curvadion(0.01, rank=8, synchronizer=average_factors(form))
      ...     sent = tx.init(params).metrics.sync_payload
      ...     print(int(sent[1]))  # bytes; its gradients have 8192
      3072
      780

    References:
      Ahn et al., `Dion <https://arxiv.org/abs/2504.05295>`_, section on compressed
      data-parallel synchronisation
    """
    if compressor is not None:
        compressor = check_compressor(compressor)
        check_stateless(compressor, "compressor")
    form = compressors.exact() if compressor is None else compressor

    def init(params, inner_state, views):
        del views
        states = _base.dion_states(inner_state)
        if not states:
            raise ValueError(
                "average_factors needs Dion as the inner optimizer, and there is no "
                "DionState in its state: use curvadion_jax.dion, or curvadion with a "
                "rank, or the synchronizer average_gradients or reconcile"
            )
        taken = {name for s in states for name, _ in _paths.leaves_with_path(s.q)}
        # Copies, so that both can be donated.
        q = [jax.tree.map(jnp.copy, state.q) for state in states]
        if compressor is None:
            return FactorsState(q, {})
        return FactorsState(q, _base.zero_error(_without(params, taken)))

    def step(local: _base.LocalStep, state: FactorsState, group: Group):
        return _step(compressor, local, state, group)

    def payload(params, inner_state, views):
        ranks, parts = _ranks(inner_state, views), []
        for name, leaf in _paths.leaves_with_path(params):
            shapes = [leaf.shape]
            if name in ranks and reduces_factors(*ranks[name]):
                view, r = ranks[name]
                shapes = [(*view.batch, side, r) for side in (view.rows, view.cols)]
            dtype = compute_dtype(leaf.dtype)
            sent = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
            parts.append(form.payload(sent, {}))
        return total(parts)

    return _base.Synchronizer(init, step, payload)


def _without(tree, taken) -> dict[str, jax.Array]:
    """Path -> leaf, of the parameters that Dion does not take."""
    leaves = _paths.leaves_with_path(tree)
    return {name: leaf for name, leaf in leaves if name not in taken}


def _ranks(inner_state: optax.OptState, views) -> dict[str, tuple[Any, int]]:
    """Path -> view and rank, for the parameters that Dion takes."""
    return {
        name: (view, r)
        for state in _base.dion_states(inner_state)
        for name, view, r in _base.matrices(state, views)
    }


def _step(compressor, local: _base.LocalStep, state: FactorsState, group: Group):
    ranks = _ranks(local.inner_state, local.views)
    averaged, error, _ = _base.mean_with_feedback(
        compressor, _without(local.gradients, ranks), state.error, (), group, {}
    )
    gradients = [
        averaged.get(name, leaf).astype(leaf.dtype)
        for name, leaf in _paths.leaves_with_path(local.gradients)
    ]
    gradients = jax.tree.unflatten(jax.tree.structure(local.gradients), gradients)
    reduced = []

    def reduce_fn(arrays):
        reduced.extend(arrays)
        if compressor is None:
            return group.mean(arrays), None
        result = compressor.average(arrays, (), group, {})
        sent = jax.tree.map(jnp.subtract, arrays, result.unsent)
        return _like(result.mean, arrays), _like(sent, arrays)

    inner_state = before = local.inner_state
    if group.size > 1:  # one replica is plain Dion
        # On quiet steps every replica moves its own Q: products with them could cancel.
        inner_state = _base.with_q(inner_state, state.common_q)
    updates, inner_state = local.take(gradients, inner_state, reduce_fn=reduce_fn)
    expected = sum(2 if reduces_factors(*pair) else 1 for pair in ranks.values())
    if len(reduced) < expected:
        raise ValueError(
            f"of {expected} arrays of Dion {len(reduced)} were averaged: a "
            "transformation around it does not pass on the extra argument reduce_fn. "
            "Build it as an optax.GradientTransformationExtraArgs that forwards extra "
            "arguments"
        )
    q = [dion.q for dion in _base.dion_states(inner_state)]
    if group.size > 1:
        # One that sent nothing of its momentum and gradient has all of them still.
        _, unsent = local.take(gradients, before, momentum_only=True)
        inner_state = _base.with_momenta(inner_state, unsent, group.present)
        waiting = _base.with_momenta(before, unsent, group.anybody)
        inner_state = _health.where(group.anybody, inner_state, waiting)
        q = _health.where(group.anybody, q, state.common_q)
    updates = _health.or_zeros(group.anybody, updates)
    return updates, inner_state, FactorsState(q, error)


def _like(arrays, others):
    return jax.tree.map(lambda x, y: x.astype(y.dtype), arrays, others)
