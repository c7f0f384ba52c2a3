r"""Dion: distributed orthonormalised updates, as Optax transformations.

The symbols of the paper, where they live and their shapes, for a parameter seen as
``[*batch, rows, cols]`` with rows >= cols (`_matrices`):

====== ====================== ========================= ===========================
symbol here                   shape                     on the replicas
====== ====================== ========================= ===========================
G      ``updates``            the parameter's           differs
M      ``momentum``           the parameter's           differs ("decoupled")
Q      ``q``                  ``[*batch, cols, r]``     the same after a reduction
P      local in `_low_rank`   ``[*batch, rows, r]``     the same after a reduction
R      local in `_low_rank`   ``[*batch, cols, r]``     the same after a reduction
====== ====================== ========================= ===========================
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import (
    _arguments,
    _bases,
    _collectives,
    _low_rank,
    _matrices,
    _orthonormalize,
    _partition,
    _paths,
    _sharding,
    _trees,
)
from curvadion_jax._matrices import MatrixView


class DionState(NamedTuple):
    """State of :func:`scale_by_dion`.

    Attributes:
      momentum: tree of the parameters' structure and shapes, in `mu_dtype` or the
        parameter's dtype, after error feedback. Replica-varying.
      q: tree of the parameters' structure; ``[*batch, smaller side, r]`` per matrix,
        unit columns, same dtype as the momentum. Shared while every step reduces the
        factors, replica-varying otherwise. Not parameter-shaped.

    Example:
      >>> state = scale_by_dion(rank=2).init({"kernel": jnp.zeros((3, 4, 8))})
      >>> state.momentum["kernel"].shape, state.q["kernel"].shape
      ((3, 4, 8), (3, 4, 2))
    """

    momentum: optax.Updates
    q: Any


def _is_placeholder(params: Any) -> bool:
    """Whether `optax.tree.map_params` asks what of the state is parameter-like."""
    structure = jax.tree.structure(params)
    known = Mapping | list | tuple | None
    empty = structure.num_leaves == 0 and structure.num_nodes == 1
    return empty and not isinstance(params, known)


def _matrix_leaves(
    tree: Any, dimension_numbers: _partition.DimensionNumbersOrFn
) -> list[tuple[str, jax.Array, MatrixView]]:
    views = _partition.matrix_views(tree, dimension_numbers)
    leaves = []
    for name, leaf in _paths.leaves_with_path(tree):
        view = views[name]
        if view is None:
            raise ValueError(
                f"scale_by_dion cannot take the parameter {name!r} of shape "
                f"{tuple(leaf.shape)}, which is not a matrix: use curvadion_jax.dion, "
                "which gives such parameters to another optimizer"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"Dion needs real floating-point arrays, got {leaf.dtype} for {name!r}:"
                " keep others out of the parameters, or freeze them with optax.masked "
                "around the whole"
            )
        leaves.append((name, leaf, view))
    return leaves


def _check_arguments(
    rank, momentum, mu_dtype, orthonormalize, error_feedback, seed, axis_name
) -> None:
    _matrices.check_rank(rank)
    _arguments.check_momentum(momentum)
    _arguments.check_dtype(mu_dtype, "mu_dtype")
    _arguments.check_orthonormalize(orthonormalize)
    _arguments.check_switch(error_feedback, "error_feedback")
    _arguments.check_seed(seed)
    _collectives.check_axis_name(axis_name)


def scale_by_dion(
    rank: int | float = 0.25,
    momentum: jax.typing.ArrayLike = 0.95,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    orthonormalize: _orthonormalize.Orthonormalize | None = None,
    error_feedback: bool = True,
    seed: jax.typing.ArrayLike = 0,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates of matrix parameters according to Dion.

    For every matrix, with momentum :math:`M`, gradient :math:`G` and right factor
    :math:`Q`, one step of power iteration gives a low-rank update with singular
    values near one, and leaves in the momentum what the update does not hold:

    .. math::
      B &= M + G \\
      P &= \mathrm{orth}(B Q), \quad R = B^\top P \\
      M &\leftarrow B - (1 - \mu) P R^\top \\
      Q &\leftarrow R\,/\,\text{column norms}

    and the result is :math:`\sqrt{\text{fan out}/\text{fan in}}\; P Q^\top`. Here
    :math:`\mu` is `momentum`, and the number of columns of Q comes from `rank`. The
    matrix is seen with rows >= cols, so P lies on the larger side, and on fan_out when
    they are equal. All algebra is done in float32 (float64 for float64 input).

    With `axis_name`, B Q and then B^T P are averaged over the replicas. The momentum
    stays on its replica, and the update equals that of Dion on the mean gradient, for
    (rows + cols) r elements instead of rows x cols. Where the factors would be larger
    than the matrix, B is averaged instead, to the same effect. Both hold while Q is
    the same on all replicas: as long as every step reduces.

    Args:
      rank: an int is a rank, clipped to each matrix; a float in (0, 1] is a fraction
        of the smaller side, rounded up. It sets shapes: static under
        `optax.inject_hyperparams`.
      momentum: decay rate mu, in [0, 1).
      mu_dtype: dtype of the momentum and of Q; None keeps the parameter's. Static
        under `optax.inject_hyperparams`.
      dimension_numbers: tree (or prefix) of `optax.contrib.MuonDimensionNumbers`, or a
        function of the parameters that returns one; axes not named are batch axes.
        None is :func:`default_dimension_numbers`. Static under
        `optax.inject_hyperparams`, which takes every function for a schedule.
      orthonormalize: function from [..., rows, r] to an orthonormal basis of the same
        shape; None is repeated Cholesky QR. Static under `optax.inject_hyperparams`.
      error_feedback: False gives the momentum of CurvaDion's formula instead,
        B = mu M + G and M <- B.
      seed: seed of the initial Q, which is the same on every replica.
      axis_name: replica axis to average the factors over, inside `shard_map` or
        `vmap`; None communicates nothing.

    Returns:
      A transformation with :class:`DionState`. Its `update` takes two optional extra
      arguments: `reduce_fn`, which replaces `axis_name` for that step: it takes a
      dictionary, path of the parameter -> array, to one of their means over replicas
      and to one of what this replica put in (None for all; the rest stays in the
      momentum), and `momentum_only=True`, which
      accumulates B into the momentum, keeps Q and returns zero updates.

    Raises:
      TypeError: for an argument of the wrong kind, such as a rank that is not a plain
        number, or arrays that are not real floating-point numbers.
      ValueError: for a rank or momentum out of range, an int rank above every
        matrix, a parameter that is not a matrix, or gradients that were averaged
        before they came here.

    Example:
      >>> tx = scale_by_dion(rank=1)
      >>> params = {"kernel": jnp.zeros((2, 2))}
      >>> state = tx.init(params)
      >>> gradients = {"kernel": jnp.array([[3.0, 0.0], [0.0, 0.0]])}
      >>> updates, state = jax.jit(tx.update)(gradients, state, params)
      >>> print(f"{abs(updates['kernel'][0, 0]):.3f}")
      1.000
      >>> print(f"{state.momentum['kernel'][0, 0]:.3f}")  # 3 - 0.05 * 3
      2.850

    References:
      Ahn et al., `Dion: Distributed Orthonormalized Updates
      <https://arxiv.org/abs/2504.05295>`_, 2025

      `microsoft/dion <https://github.com/microsoft/dion>`_, dion/dion_reference.py

    .. warning::
      Where the momentum has nothing along a column of P (an exactly low-rank or zero
      momentum), that column moves nothing and its column of Q stays. microsoft/dion
      has this rule for an all-zero momentum only, and otherwise steps along
      directions of rounding noise.
    """
    _check_arguments(
        *(rank, momentum, mu_dtype, orthonormalize, error_feedback, seed, axis_name)
    )
    orthonormalize = orthonormalize or _orthonormalize.cholesky_qr

    def init_fn(params):
        leaves = _matrix_leaves(params, dimension_numbers)
        largest = max((view.cols for _, _, view in leaves), default=None)
        if isinstance(rank, int) and largest is not None and rank > largest:
            raise ValueError(
                f"rank {rank} exceeds the smaller side of every matrix (the largest is "
                f"{largest}); pass a smaller rank, or rank=1.0 for full rank"
            )
        state_momentum = optax.tree.zeros_like(params, dtype=mu_dtype)
        if _is_placeholder(params):
            return DionState(state_momentum, q=jnp.zeros([]))
        qs = [
            _low_rank.initial_q(
                name,
                view,
                _matrices.resolve_rank(view.cols, rank),
                seed,
                mu_dtype or x.dtype,
            )
            for name, x, view in leaves
        ]
        axes = [view.q_axes for _, _, view in leaves]
        return DionState(state_momentum, _sharding.like_tree(params, qs, axes))

    def update_fn(
        updates,
        state,
        params=None,
        *,
        reduce_fn=None,
        momentum_only=False,
        **extra_args,
    ):
        del extra_args
        _trees.check_state_type(state, DionState)
        if params is not None:
            _trees.check_gradients(updates, params)
        _trees.check_state(state.momentum, updates)
        if reduce_fn is None and axis_name is not None:
            _collectives.require_local(updates, axis_name)
            reduce_fn = lambda arrays: (_collectives.mean(arrays, axis_name), None)  # noqa: E731
        leaves = _matrix_leaves(updates, dimension_numbers)
        decay = None if error_feedback else momentum
        momenta = jax.tree.leaves(state.momentum)
        total = [
            _accumulate(m, g, decay)
            for m, (_, g, _) in zip(momenta, leaves, strict=True)
        ]
        if momentum_only:
            return optax.tree.zeros_like(updates), state._replace(
                momentum=_like(state.momentum, total)
            )
        qs = jax.tree.leaves(state.q)
        names = [name for name, _, _ in leaves]
        views = [view for _, _, view in leaves]
        results = _low_rank.dion_step(
            names,
            views,
            total,
            qs,
            factor=(1 - momentum) if error_feedback else None,
            bases=functools.partial(_bases.of_factors, names, views, orthonormalize),
            reduce_fn=reduce_fn,
        )
        directions, total, qs = zip(*results, strict=True) if results else ((), (), ())
        return _like(updates, directions), DionState(
            _like(state.momentum, total), _like(state.q, qs)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _accumulate(momentum: jax.Array, gradient: jax.Array, decay) -> jax.Array:
    """decay M + G in the dtype of the algebra; decay None is 1."""
    both = jnp.promote_types(momentum.dtype, gradient.dtype)
    dtype = _orthonormalize.compute_dtype(both)
    decayed = momentum.astype(dtype)
    if decay is not None:
        decayed = decayed * jnp.asarray(decay, dtype)
    return decayed + gradient.astype(dtype)


def _like(tree: Any, leaves: Any) -> Any:
    """Leaves in the structure and dtypes of a tree."""
    old, structure = jax.tree.flatten(tree)
    cast = [new.astype(x.dtype) for new, x in zip(leaves, old, strict=True)]
    return jax.tree.unflatten(structure, cast)


def _mean_gradients(axis_name: str) -> optax.GradientTransformation:
    """Averages gradients over the replicas, unless `reduce_fn` says they are."""

    def update_fn(updates, state, params=None, *, reduce_fn=None, **extra_args):
        del params, extra_args
        if reduce_fn is None:
            _collectives.require_local(updates, axis_name)
            updates = _collectives.mean(updates, axis_name)
        return updates, state

    init = optax.identity().init
    return optax.GradientTransformationExtraArgs(init, update_fn)


def check_rates(learning_rate, weight_decay, other_learning_rate) -> None:
    """Refuses rates that are neither finite numbers of at least 0 nor schedules."""
    _arguments.check_rate(learning_rate)
    _arguments.check_rate(weight_decay, "weight_decay")
    if other_learning_rate is not None:
        _arguments.check_rate(other_learning_rate, "other_learning_rate")


def check_other_optimizer(other_optimizer: Any, other_learning_rate: Any) -> None:
    """Refuses what is none, and a rate for the default one beside one that is given."""
    _arguments.check_transformation(
        other_optimizer, "other_optimizer", "optax.adamw(1e-3)"
    )
    if other_learning_rate is not None:
        raise ValueError(
            "other_learning_rate belongs to the default other optimizer: give it to "
            f"other_optimizer itself, got both, {other_learning_rate!r} among them"
        )


def dion(
    learning_rate: optax.ScalarOrSchedule,
    rank: int | float = 0.25,
    momentum: jax.typing.ArrayLike = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    other_optimizer: optax.GradientTransformation | None = None,
    other_learning_rate: optax.ScalarOrSchedule | None = None,
    dimension_numbers: _partition.DimensionNumbersOrFn = None,
    orthonormalize: _orthonormalize.Orthonormalize | None = None,
    error_feedback: bool = True,
    seed: jax.typing.ArrayLike = 0,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Dion for the matrices, another optimizer for all other parameters.

    Matrices follow :func:`scale_by_dion`, then decoupled weight decay, then the
    learning rate: :math:`X \leftarrow X - \eta \sqrt{\text{fan out}/\text{fan in}}\,
    P Q^\top - \eta \lambda X`. A learning rate near 0.01 to 0.02 transfers across
    widths and depths.

    The other parameters (embeddings, output heads, norms, biases) go to
    `other_optimizer`. The default is AdamW with b1 = 0.9, b2 = 0.95, eps = 1e-7 and
    no weight decay: their gradients are sparse or of very unequal size, for which a
    step of its own size per element is the tried choice, the decay rates are those of
    published language-model runs, norms and embeddings are usually not decayed, and
    a smaller epsilon is zero in float16.

    With `axis_name` this is synchronous data-parallel Dion: factors of matrices are
    averaged in compressed form, other gradients in full. For steps that communicate
    only when it matters use :func:`curvadion`.

    Args:
      learning_rate: a number or a schedule.
      rank: as for :func:`scale_by_dion`; static under `optax.inject_hyperparams`.
      momentum: as for :func:`scale_by_dion`.
      weight_decay: strength of the decoupled weight decay of the matrices; it is
        multiplied with the learning rate.
      weight_decay_mask: tree (or prefix) of bools, or a function of the parameters
        that returns one, as for `optax.add_decayed_weights`.
      mu_dtype: dtype of Dion's momentum and Q, and of the default other optimizer's
        first moment; None keeps the parameters'.
      other_optimizer: any Optax optimizer, with its own learning rate; None is the
        default above.
      other_learning_rate: number or schedule for the default other optimizer; None is
        `learning_rate`.
      dimension_numbers: as for :func:`scale_by_dion`; None for a parameter sends it to
        the other optimizer. See :func:`describe_partition` for what was chosen.
      orthonormalize: as for :func:`scale_by_dion`.
      error_feedback: as for :func:`scale_by_dion`.
      seed: as for :func:`scale_by_dion`.
      axis_name: replica axis to synchronise over on every step; None communicates
        nothing.

    Returns:
      The optimizer, an `optax.partition` of the two.

    Raises:
      TypeError: as for :func:`scale_by_dion`, and for rates that are neither numbers
        nor schedules.
      ValueError: as for :func:`scale_by_dion`, for a rate or weight decay that is
        negative or not finite, and if both `other_optimizer` and `other_learning_rate`
        are given.

    Example:
      >>> params = {"embed": jnp.ones((9, 4)), "kernel": jnp.ones((4, 8))}
      >>> tx = dion(0.01)
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(params, state, params)
      >>> print(f"{optax.tree.norm(updates['kernel']):.4f}")  # 0.01 sqrt(8 / 4)
      0.0141

    References:
      Ahn et al., `Dion: Distributed Orthonormalized Updates
      <https://arxiv.org/abs/2504.05295>`_, 2025
    """
    check_rates(learning_rate, weight_decay, other_learning_rate)
    _check_arguments(
        *(rank, momentum, mu_dtype, orthonormalize, error_feedback, seed, axis_name)
    )

    def matrices(numbers):
        return optax.chain(
            scale_by_dion(
                rank,
                momentum,
                mu_dtype,
                dimension_numbers=numbers,
                orthonormalize=orthonormalize,
                error_feedback=error_feedback,
                seed=seed,
                axis_name=axis_name,
            ),
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        )

    if other_optimizer is not None:
        check_other_optimizer(other_optimizer, other_learning_rate)
    else:
        other_optimizer = optax.adamw(
            learning_rate if other_learning_rate is None else other_learning_rate,
            b1=0.9,
            b2=0.95,
            eps=1e-7,  # 1e-8 is zero in float16
            weight_decay=0.0,
            mu_dtype=mu_dtype,
        )
    if axis_name is not None:
        other_optimizer = optax.chain(_mean_gradients(axis_name), other_optimizer)
    return _partition.optimizer(matrices, other_optimizer, dimension_numbers)
