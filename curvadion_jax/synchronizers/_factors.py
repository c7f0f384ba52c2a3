"""Dion's compressed sync: the low-rank factors are averaged, not the gradients."""

import jax
import optax

from curvadion_jax import _partition
from curvadion_jax._low_rank import reduces_factors
from curvadion_jax.synchronizers import _base


def average_factors() -> _base.Synchronizer:
    """At a sync the factors P and R of Dion are averaged while the step is taken.

    Matrices send (rows + cols) r elements instead of rows x cols, in two messages one
    after the other, and momenta stay on their replicas. The gradients of the other
    parameters are averaged in full. The update equals that of Dion on the mean
    gradient, so with `always` this is training on one big batch, at any rank. Like
    `average_gradients` it does not bring drifted parameters back together.

    Returns:
      A synchronizer for inner optimizers made of :func:`dion` or
      :func:`scale_by_dion`.

    Raises:
      ValueError: at `init` if the inner optimizer's state holds none of Dion's, and
        when traced if something between swallows the extra argument `reduce_fn`.

    Example:
      >>> synchronizer = average_factors()

    References:
      Ahn et al., `Dion <https://arxiv.org/abs/2504.05295>`_, section on compressed
      data-parallel synchronisation
    """
    return _base.Synchronizer(_init, _step, _payload)


def _matrices(inner_state: optax.OptState) -> dict[str, jax.Array]:
    """Path of a parameter -> its Q, for the parameters that Dion takes."""
    return {
        _partition.path_name(path): q
        for state in _base.dion_states(inner_state)
        for path, q in jax.tree.leaves_with_path(state.q)
    }


def _init(params, inner_state):
    if not _base.dion_states(inner_state):
        raise ValueError(
            "average_factors needs Dion as the inner optimizer, and there is no "
            "DionState in its state: use curvadion_jax.dion, or the synchronizer "
            "average_gradients or reconcile"
        )
    return ()


def _step(local: _base.LocalStep, state, mean: _base.Mean):
    matrices = _matrices(local.inner_state)
    leaves, structure = jax.tree.flatten_with_path(local.gradients)
    others = {
        index: leaf
        for index, (path, leaf) in enumerate(leaves)
        if _partition.path_name(path) not in matrices
    }
    averaged = mean(others)
    gradients = [averaged.get(i, leaf) for i, (_, leaf) in enumerate(leaves)]
    called = []

    def reduce_fn(arrays):
        called.append(len(arrays))
        return mean(arrays)

    updates, inner_state = local.take(
        jax.tree.unflatten(structure, gradients), reduce_fn=reduce_fn
    )
    if matrices and not called:
        raise ValueError(
            "the factors of Dion were not averaged: a transformation around it does "
            "not pass on the extra argument reduce_fn. Build it as an "
            "optax.GradientTransformationExtraArgs that forwards extra arguments"
        )
    return updates, inner_state, state


def _payload(params, inner_state, views) -> int:
    matrices, total = _matrices(inner_state), 0
    for path, leaf in jax.tree.leaves_with_path(params):
        name = _partition.path_name(path)
        view, whole = views.get(name), _base.bytes_averaged(leaf)
        if name in matrices and view is not None:
            r = matrices[name].shape[-1]
            if reduces_factors(view, r):
                whole = whole * (view.rows + view.cols) * r // (view.rows * view.cols)
        total += whole
    return total
