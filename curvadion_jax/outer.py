"""Outer optimizers: what the mean pseudo-gradient of the replicas becomes at a sync.

Any Optax transformation can be the outer step of `synchronizers.reconcile`;
``optax.sgd(0.7, momentum=0.9, nesterov=True)`` is DiLoCo's. Here is the one that Optax
does not have.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import (
    _arguments,
    _matrices,
    _orthonormalize,
    _partition,
    _paths,
    _placement,
    _power_iteration,
)
from curvadion_jax._layout import ONE_DEVICE
from curvadion_jax._orthonormalize import compute_dtype
from curvadion_jax._within_replica import Devices


class OrthonormalState(NamedTuple):
    """State of the orthonormalisation in :func:`orthonormal`.

    Attributes:
      q: path of a matrix -> Q, ``[*batch, smaller side, r]``, at least float32; the
        same on all replicas, as is what comes in.

    Example:
      >>> params = {"kernel": jnp.ones((3, 4, 8))}
      >>> orthonormal().init(params)[1].q["kernel"].shape
      (3, 4, 4)
    """

    q: dict[str, jax.Array]


def orthonormal(
    learning_rate: optax.ScalarOrSchedule = 1.0,
    momentum: jax.typing.ArrayLike | None = None,
    *,
    rank: int | float = 1.0,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    orthonormalize: _orthonormalize.Orthonormalize | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""A Dion update along the mean pseudo-gradient, and as long as that.

    The mean of orthonormalised local steps is not orthonormal: it is shorter along
    directions on which replicas agree less. This gives it singular values of one size
    again. For every matrix, with :math:`D` the pseudo-gradient of the sync (minus the
    mean drift, with Nesterov momentum if there is one) and :math:`Q` from the last one:

    .. math::
      P &= \mathrm{orth}(D Q), \quad R = D^\top P, \quad
      Q \leftarrow R \,/\, \text{column norms} \\
      U &= P Q^\top \, \|D\| \,/\, \|P Q^\top\|

    with Frobenius norms. The anchor moves by :math:`-\eta\, U`, with :math:`\eta` the
    learning rate: at 1 as far as the mean of the replicas. Other parameters take a
    step of :math:`-\eta\, D`. Nothing is sent for it, and as D is the same on all
    replicas, so is all of this.

    Args:
      learning_rate: of the outer step, a number or a schedule of the number of syncs.
      momentum: decay rate of a Nesterov momentum in [0, 1); None is none, and keeps no
        buffer.
      rank: as for :func:`curvadion_jax.scale_by_dion`, of the outer step. Less than
        full rank moves the model less than its replicas, and what is left out is lost.
      dimension_numbers: as for :func:`curvadion_jax.dion`.
      orthonormalize: as for :func:`curvadion_jax.scale_by_dion`.

    Returns:
      A transformation for ``reconcile(outer=...)``; its `update` needs the parameters
      (the anchor).

    Raises:
      TypeError: for an argument of the wrong kind.
      ValueError: for a rate, rank or momentum out of range; at `init`, for a part of
        the parameters (``reconcile(fragments=n)``); at `update`, without parameters.

    Example:
      >>> tx = orthonormal()
      >>> params = {"kernel": jnp.zeros((2, 2))}
      >>> state = tx.init(params)
      >>> drift = jnp.array([[3.0, 0.0], [0.0, 0.1]])
      >>> for _ in range(8):  # Q turns to the singular vectors from sync to sync
      ...     updates, state = tx.update({"kernel": -drift}, state, params)
      >>> print(jnp.round(updates["kernel"], 2) + 0.0)  # |drift| / sqrt(2) each
      [[2.12 0.  ]
       [0.   2.12]]

    References:
      Ahn et al., `Dion <https://arxiv.org/abs/2504.05295>`_, for the update
    """
    _matrices.check_rank(rank)
    _arguments.check_rate(learning_rate)
    _arguments.check_orthonormalize(orthonormalize)
    if momentum is None:
        accumulate = optax.identity()
    else:
        _arguments.check_momentum(momentum)
        accumulate = optax.trace(momentum, nesterov=True)  # pyright: ignore[reportArgumentType]
    return optax.with_extra_args_support(
        optax.chain(
            accumulate,
            _alike(rank, dimension_numbers, orthonormalize),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def _alike(
    rank, dimension_numbers, orthonormalize
) -> optax.GradientTransformationExtraArgs:
    """Singular values of one size, the Frobenius norm as it was."""
    orthonormalize = orthonormalize or _orthonormalize.cholesky_qr

    def matrices(params):
        is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
        if any(map(is_masked, jax.tree.leaves(params, is_leaf=is_masked))):
            raise ValueError(
                "the orthonormal outer step must see all parameters at once to tell "
                "which axes of them are matrices: use it with reconcile(fragments=1)"
            )
        views = _partition.matrix_views(params, dimension_numbers)
        return {name: view for name, view in views.items() if view is not None}

    def init(params):
        leaves, q = dict(_paths.leaves_with_path(params)), {}
        for name, view in matrices(params).items():
            r = _matrices.resolve_rank(view.cols, rank)
            dtype = compute_dtype(leaves[name].dtype)
            start = _power_iteration.initial_q(name, view, r, seed=0, dtype=dtype)
            q[name] = _placement.place_like(start, leaves[name], view.q_axes)
        return OrthonormalState(q)

    def update(updates, state, params=None, *, layout=ONE_DEVICE, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(
                "the orthonormal outer step needs the parameters, by which it knows "
                "matrices, got params=None: call update(updates, state, params)"
            )
        views, devices = matrices(params), Devices(layout)
        leaves = dict(_paths.leaves_with_path(updates))
        drifts = {
            name: view.to_matrix(leaves[name].astype(state.q[name].dtype))
            for name, view in views.items()
        }
        left, right = _power_iteration.power_iteration(
            drifts,
            {name: devices.whole(q) for name, q in state.q.items()},
            functools.partial(
                devices.bases, views=views, orthonormalize=orthonormalize
            ),
        )
        new = {}
        for name, view in views.items():
            q, present = _power_iteration.unit_columns(right[name], state.q[name])
            new[name] = devices.whole(q)
            p = jnp.where(present, left[name], 0)
            step = _matrices.matmul(p, new[name].mT)
            leaf = view.from_matrix(step * _ratio(drifts[name], step))
            leaves[name] = leaf.astype(leaves[name].dtype)
        tree = jax.tree.unflatten(jax.tree.structure(updates), leaves.values())
        return tree, OrthonormalState(new)

    return optax.GradientTransformationExtraArgs(init, update)


def _ratio(drift: jax.Array, step: jax.Array) -> Any:
    """|drift| / |step| of every matrix, 0 where there is no step."""
    length = jnp.linalg.norm(step, axis=(-2, -1), keepdims=True)
    wanted = jnp.linalg.norm(drift, axis=(-2, -1), keepdims=True)
    return jnp.where(length == 0, 0, wanted / jnp.where(length == 0, 1, length))
