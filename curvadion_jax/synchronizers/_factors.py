"""Dion's compressed sync: the low-rank factors are averaged, not the gradients."""

import jax
import jax.numpy as jnp

from curvadion_jax import _finite, _momentum, _paths, _trees, compressors
from curvadion_jax._collectives import Group
from curvadion_jax._interfaces import LocalStep, Synchronizer, SyncState
from curvadion_jax._orthonormalize import compute_dtype
from curvadion_jax._power_iteration import reduces_factors
from curvadion_jax.synchronizers import _feedback


def average_factors(
    compressor: compressors.Compressor | None = None,
) -> Synchronizer:
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
        other parameters are sent, such as `quantize(8)`. What it does
        not send of a gradient is added to the next one. None sends them as they are, in
        at least float32.

    Returns:
      A synchronizer for inner optimizers made of :func:`dion` or
      :func:`scale_by_dion`. `common` holds Q of every state of Dion after the last
      sync, in order: the power iteration of the next starts from it on every replica.
      With a compressor `residual` holds what of their gradients a replica has not sent,
      path -> array, of the parameters that Dion does not take.

    Raises:
      ValueError: at `init` if the inner optimizer's state holds none of Dion's, and
        when traced if something between swallows the
        extra argument `reduce_fn`.

    .. warning::
      Without error feedback in Dion (`error_feedback=False`) what rounding loses of R
      is lost.

    Example:
      >>> from curvadion_jax import dion
      >>> from curvadion_jax._matrices import make_view
      >>> params = {"kernel": jnp.ones((32, 64))}  # its gradients have 8192 bytes
      >>> views = {"kernel": make_view((32, 64), 0, 1)}
      >>> state = dion(0.01, rank=8).init(params)
      >>> for form in (None, compressors.quantize(8)):
      ...     average_factors(form).payload(params, state, views).averaged
      3072
      780

    References:
      Ahn et al., `Dion <https://arxiv.org/abs/2504.05295>`_, section on compressed
      data-parallel synchronisation
    """
    form = compressors.exact() if compressor is None else compressor

    def init(params, inner_state, views):
        del views
        states = _momentum.dion_states(inner_state)
        if not states:
            raise ValueError(
                "average_factors needs Dion as the inner optimizer, and there is no "
                "DionState in its state. Use curvadion_jax.dion, or the synchronizer "
                "average_gradients or reconcile."
            )
        taken = {name for s in states for name, _ in _paths.leaves_with_path(s.q)}
        # Copies, so that both can be donated.
        q = [jax.tree.map(jnp.copy, state.q) for state in states]
        residual = () if compressor is None else _without(params, taken)
        return SyncState(common=q, residual=_feedback.zero_residual(residual))

    def sync(local: LocalStep, state: SyncState, group: Group):
        return _sync(compressor, local, state, group)

    def payload(params, inner_state, views):
        ranks, sent = _ranks(inner_state, views), []
        for name, leaf in _paths.leaves_with_path(params):
            shapes = [leaf.shape]
            if name in ranks and reduces_factors(*ranks[name]):
                view, r = ranks[name]
                shapes = [(*view.batch, side, r) for side in (view.rows, view.cols)]
            dtype = compute_dtype(leaf.dtype)
            sent += [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        return form.payload(sent)

    return Synchronizer(init, sync, payload)


def _without(tree, taken) -> dict[str, jax.Array]:
    """Path -> leaf, of the parameters that Dion does not take."""
    leaves = _paths.leaves_with_path(tree)
    return {name: leaf for name, leaf in leaves if name not in taken}


def _ranks(inner_state, views):
    """Path -> view and rank, for the parameters that Dion takes."""
    states = _momentum.dion_states(inner_state)
    return {n: pair for s in states for n, pair in _feedback.matrices(s, views).items()}


def _sync(compressor, local: LocalStep, state: SyncState, group: Group):
    ranks, before = _ranks(local.inner_state, local.views), local.inner_state
    gradients, residual = _mean_of_others(compressor, local, state, group, ranks)
    factored = {name for name, pair in ranks.items() if reduces_factors(*pair)}
    reduced, lost = [], {}

    def reduce_fn(arrays, made_of):
        reduced.extend(arrays)
        there = group.laid_out(group.layout.of_factors(arrays, made_of))
        if compressor is None:
            return local.mean(arrays, there), None
        result = compressor.average(local.weighted(arrays), there)
        unsent = _feedback.own_unsent(local, result.unsent)
        lost.update({n: x for n, x in unsent.items() if n not in factored})
        # One that is absent put nothing in; it may hold what rounding lost of the mean.
        own = _finite.or_zeros(local.present, arrays)
        put_in = jax.tree.map(jnp.subtract, own, unsent)
        return _trees.like(result.mean, arrays), _trees.like(put_in, arrays)

    inner_state = before
    if group.size > 1:  # one replica is plain Dion
        # On local steps every replica moves its own Q: products with them could cancel.
        common = iter(state.common)
        inner_state = _momentum.with_dion(before, lambda x: x._replace(q=next(common)))
    updates, inner_state = local.take(gradients, inner_state, reduce_fn=reduce_fn)
    expected = len(ranks) + len(factored)
    if len(reduced) < expected:
        raise ValueError(
            f"Of {expected} arrays of Dion {len(reduced)} were averaged: a "
            "transformation around it does not pass on the extra argument reduce_fn. "
            "Build it as an optax.GradientTransformationExtraArgs that forwards extra "
            "arguments."
        )
    q = [dion.q for dion in _momentum.dion_states(inner_state)]
    if group.size > 1:
        _, whole = local.take(gradients, before, momentum_only=True)

        def of_replica(name, own, whole):
            if compressor is not None and name in factored:
                return own  # by what it put in, absent or not
            if name in lost:
                whole = (whole + lost[name]).astype(own.dtype)
            return jnp.where(local.present, own, whole)

        inner_state = _with_momenta(inner_state, whole, of_replica)
    return updates, inner_state, SyncState(common=q, residual=residual)


def _mean_of_others(compressor, local: LocalStep, state: SyncState, group, ranks):
    """Gradients, of which those that Dion does not take are averaged, and the residual.

    What an absent replica has of these it sends later, if there is a compressor.
    """
    others, residual = _without(local.gradients, ranks), state.residual
    if compressor is None:
        mean = local.mean(others, group)
    else:
        mean, residual = _feedback.mean_with_feedback(
            compressor, others, residual, local, group
        )
        residual = _feedback.with_absent(local, residual, others)
    leaves = _paths.leaves_with_path(local.gradients)
    found = [mean.get(name, leaf).astype(leaf.dtype) for name, leaf in leaves]
    structure = jax.tree.structure(local.gradients)
    return jax.tree.unflatten(structure, found), residual


def _with_momenta(inner_state, other, choose):
    """The state of an optimizer, Dion's momenta chosen of its own and another's."""
    others = iter(_momentum.dion_states(other))

    def chosen(x):
        theirs = dict(_paths.leaves_with_path(next(others).momentum))
        momentum = _paths.map_with_path(
            lambda name, own: choose(name, own, theirs[name]), x.momentum
        )
        return x._replace(momentum=momentum)

    return _momentum.with_dion(inner_state, chosen)
