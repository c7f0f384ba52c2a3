"""Dion: distributed orthonormalised updates, as Optax transformations of one replica.

Extra arguments of `update` tell of other replicas, and of this one's devices.
`_power_iteration` has the mathematics and the paper's symbols.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _arguments, _dtypes, _matrix_view, _trees
from curvadion_jax._matrix_view import MatrixView, Named
from curvadion_jax.dimension_numbers import _record
from curvadion_jax.matrices import (
    _adamw_for_the_rest,
    _joined,
    _orthonormalize,
    _power_iteration,
    _two_optimizers,
    _whole_matrices,
)
from curvadion_jax.matrices._power_iteration import ReduceFn
from curvadion_jax.matrices._two_optimizers import DimensionNumbersOrFn
from curvadion_jax.mesh import _layout
from curvadion_jax.mesh._layout import Layout

# The default is None: `optax.inject_hyperparams` would trace a number.
_RANK = 0.25


class DionState(NamedTuple):
    """State of :func:`scale_by_dion`.

    Attributes:
      momentum: tree like the parameters, in `mu_dtype` or their dtype, after error
        feedback.
      dion_q: right factor Q of every parameter, ``[*batch, smaller side, r]`` with
        unit columns, in the momentum's dtype.
      partition: along which axes the parameters are matrices; no array.
    """

    momentum: optax.Updates
    dion_q: Any
    partition: Any = ()


def states_of(state: optax.OptState) -> list[DionState]:
    """Dion's states in the state of an optimizer."""
    return _trees.nodes_of(DionState, state)


def with_states(
    state: optax.OptState, function: Callable[[DionState], DionState]
) -> optax.OptState:
    """Replaces Dion's states in the state of an optimizer, in order."""
    return _trees.map_nodes(DionState, function, state)


def with_new_momentum(
    update: Callable[..., tuple[Any, Any]], gradients: Any, state: optax.OptState
) -> tuple[optax.OptState, bool]:
    """The state with the momentum that a local step of any optimizer would give.

    Dion gives it before error feedback, M + G, with Q as it was. `momentum_only` asks
    for that: an extra argument, which `optax.chain` and `optax.partition` hand down to
    `scale_by_dion`. It is not known where a transformation around Dion passes no extra
    arguments on. Other optimizers run their whole update, and the compiler drops what
    is not used.

    Returns:
      The state, and whether the momentum is known.
    """
    if not states_of(state):
        return update(gradients, state)[1], True
    (_, after), is_known = update_with(update, gradients, state, momentum_only=True)
    return after, is_known


def update_with(
    update: Callable[..., Any], gradients: Any, state: optax.OptState, **extra_args
) -> tuple[Any, bool]:
    """Updates with extra arguments, and says whether every Dion was given them.

    A transformation around it may pass none on.
    """
    reached: list[None] = []
    notify = lambda: reached.append(None)
    result = update(gradients, state, notify=notify, **extra_args)
    return result, len(reached) >= len(states_of(state))


def scale_by_dion(
    rank: int | float | None = None,
    momentum: jax.typing.ArrayLike = 0.95,
    mu_dtype: jax.typing.DTypeLike | None = None,
    *,
    dimension_numbers: DimensionNumbersOrFn = _two_optimizers.DEFAULT,
    error_feedback: bool = True,
    precision: jax.lax.PrecisionLike = "highest",
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates of matrix parameters according to Dion.

    One step of power iteration on momentum :math:`M` plus gradient :math:`G`, from the
    right factor :math:`Q`, gives an update of low rank with singular values near one.
    The momentum keeps what the update does not hold:

    .. math::
      B &= M + G \\
      P &= \mathrm{orth}(B Q), \quad R = B^\top P \\
      M &\leftarrow B - (1 - \mu) P R^\top \\
      Q &\leftarrow R\,/\,\text{column norms}

    (as in microsoft/dion with 1e-8 added to the norms, so that updates shrink where
    momenta do not exceed that). The update is
    :math:`\sqrt{\text{fan out}/\text{fan in}}\; P Q^\top`. P lies on the
    larger side of the matrix, on fan_out if they are equal. All algebra is done in
    float32 (float64 for float64 input).

    Args:
      rank: number of columns of Q. An int is clipped to each matrix; a float in (0, 1]
        is a fraction of the smaller side, rounded up. None means 0.25. Static under
        `optax.inject_hyperparams`.
      momentum: decay rate mu, in [0, 1).
      mu_dtype: dtype of the momentum and of Q. None means the parameter's.
      dimension_numbers: tree (or prefix) of `optax.contrib.MuonDimensionNumbers`, or a
        function of the parameters that returns one; axes not named are batch axes.
        `dimension_numbers.from_loss` reads them from a loss. "default" or None means
        `dimension_numbers.by_name`, which asks about most. A function is static under
        `optax.inject_hyperparams`.
      error_feedback: False gives the momentum of CurvaDion's formula instead,
        B = mu M + G and M <- B.
      precision: of the four products with M or of its size, as for `jax.numpy.matmul`;
        a CPU computes all in float32. With less than the highest, a column of P that
        meets no momentum moves by rounding noise. Bases are made in the highest.
        Static under `optax.inject_hyperparams`.

    Returns:
      A transformation with :class:`DionState`. `update` takes these optional arguments:
      `momentum_only=True`, static, accumulates B into the momentum, keeps Q and returns
      zero updates (`relative_momentum_change` asks for it, so `update` must not be
      under a jit of its own there). `reduce_fn` averages B Q, then B^T P, over replicas
      (B itself where the factors are no smaller): the update is that of Dion on the
      mean gradient if Q is the same on all replicas. `layout` tells how this replica is
      sharded.

    Raises:
      TypeError: if `rank` is traced, or `dimension_numbers` was taken for a schedule.
      ValueError: if `rank` or `momentum` is out of range, or `mu_dtype` is one of
        integers; at `init`, if a parameter is not a matrix.

    Example:
      >>> tx = scale_by_dion(rank=1)
      >>> params = {"kernel": jnp.zeros((2, 2))}
      >>> state = tx.init(params)
      >>> gradients = {"kernel": jnp.array([[3.0, 0.0], [0.0, 0.0]])}
      >>> updates, state = jax.jit(tx.update)(gradients, state, params)
      >>> print(f"{abs(updates['kernel'][0, 0]):.3f}")
      1.000

    References:
      Ahn et al., `Dion: Distributed Orthonormalized Updates
      <https://arxiv.org/abs/2504.05295>`_, 2025

      `microsoft/dion <https://github.com/microsoft/dion>`_, dion/dion_reference.py;
      there a column of P that meets no momentum moves by rounding noise; here it stays
    """
    rank = _RANK if rank is None else rank
    _matrix_view.check_rank(rank)
    _arguments.check_numbers(below=1, momentum=momentum)
    _arguments.check_dtype(mu_dtype, "mu_dtype")
    _two_optimizers.check_injected(dimension_numbers, momentum)

    def init_fn(params):
        zeros = optax.tree.zeros_like(params, dtype=mu_dtype)
        if not jax.tree.leaves(params):  # as where Optax looks for what is like them
            return DionState(zeros, jnp.zeros([]), _record.record(params, {}))
        views = _two_optimizers.matrices_only(params, dimension_numbers)
        partition = _record.record(params, views)
        return DionState(zeros, _initial_qs(params, views, rank, mu_dtype), partition)

    def update_fn(
        updates,
        state,
        params=None,
        *,
        reduce_fn: ReduceFn | None = None,
        layout: Layout = _layout.ONE_DEVICE,
        momentum_only: bool = False,
        notify: Callable[[], None] = lambda: None,
        **extra_args,
    ):
        del params, extra_args
        notify()  # `update_with`: no transformation around this one hid arguments
        _trees.check_shapes(updates, state.momentum)
        views = _two_optimizers.matrices_only(updates, dimension_numbers)
        _record.check(state.partition, _record.record(updates, views))
        decay = 1 if error_feedback else momentum
        if not views:
            return updates, state
        leaves = (views, jax.tree.leaves(state.momentum), jax.tree.leaves(updates))
        total = {
            name: _accumulate(m, g, decay) for name, m, g in zip(*leaves, strict=True)
        }
        qs = dict(zip(views, jax.tree.leaves(state.dion_q), strict=True))
        of_qs = layout.of_factors({name: x.q_axes for name, x in views.items()})

        def state_of(momenta, qs):
            qs = of_qs.place(qs)
            trees = _like(state.momentum, momenta), _like(state.dion_q, qs)
            return DionState(*trees, state.partition)

        if momentum_only:
            return optax.tree.zeros_like(updates), state_of(total, qs)
        # From here on matrices of one shape are a stack, until `apart`: the program
        # has one product for all of them. The results are the same.
        joined = _joined.join(views, total, qs)
        stepped = _dion_step(
            joined.views(views),
            joined.together(total),
            joined.together(qs),
            feedback=1 - momentum if error_feedback else None,
            layout=layout,
            reduce_fn=joined.reduce_fn(reduce_fn),
            precision=precision,
        )
        directions, momenta, qs = map(joined.apart, stepped)
        return _like(updates, directions), state_of(momenta, qs)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _dion_step(
    views: Mapping[str, MatrixView],
    total: Named,
    qs: Named,
    *,
    feedback: jax.typing.ArrayLike | None,
    layout: Layout,
    reduce_fn: ReduceFn | None,
    precision: jax.lax.PrecisionLike,
) -> tuple[Named, Named, Named]:
    """One step of Dion for all parameters, in the symbols of `_power_iteration`.

    Args:
      views: how each parameter is seen as matrices.
      total: B = M + G of each, in the parameter's shape.
      qs: Q of each.
      feedback: 1 - mu for error feedback, None to leave B as it is.
      layout: how a replica is sharded. Right factors stay unsharded along r.
      reduce_fn: means over replicas of B Q, then of B^T P; of B where the factors are
        no smaller; None for one replica.
      precision: of the products with matrices. The algebra of factors has the highest.

    Returns:
      sqrt(fan_out / fan_in) P Q^T, momenta (like the parameters), and the next Qs.
    """
    qs = {name: layout.keep_whole(q) for name, q in qs.items()}
    compressed = {
        n
        for n, q in qs.items()
        if _power_iteration.reduces_factors(views[n], q.shape[-1])
    }

    # For one replica this returns the arrays: B -> B Q -> P -> B^T P.
    def averaged(names, arrays, axes):
        """Averages some of the arrays; `axes` tells what their axes merge."""
        some = {name: x for name, x in arrays.items() if name in names}
        if reduce_fn is None or not some:
            return arrays
        made_of = {name: axes(views[name]) for name in some}
        return arrays | reduce_fn(some, made_of)

    itself = lambda view: [(axis,) for axis in range(len(view.shape))]
    total = averaged(total.keys() - compressed, total, itself)
    matrices = {name: views[name].to_matrix(b) for name, b in total.items()}
    multiply = functools.partial(_matrix_view.matmul, precision=precision)
    products = {n: multiply(B, qs[n].astype(B.dtype)) for n, B in matrices.items()}
    products = averaged(compressed, products, lambda view: view.p_axes)
    left = _bases(products, views, layout)
    right = {name: multiply(B.mT, left[name]) for name, B in matrices.items()}
    mean_right = averaged(compressed, right, lambda view: view.q_axes)
    directions, momenta, new_qs = {}, {}, {}
    for name, view in views.items():
        B, P, R = total[name], left[name], right[name]
        Q, present = _power_iteration.unit_columns(mean_right[name], qs[name])
        Q = layout.keep_whole(Q)
        if feedback is not None:
            B = _power_iteration.with_feedback(view, B, P, R, feedback, precision)
        directions[name] = _power_iteration.direction(view, P, Q, present, precision)
        momenta[name], new_qs[name] = B, Q
    return directions, momenta, new_qs


def _initial_qs(params, views, rank: int | float, dtype) -> Any:
    """Q of every parameter before the first step."""
    leaves = iter(_trees.leaves_with_path(params))

    def initial(node):
        if not jax.tree.leaves(node):  # another optimizer's
            return node
        name, leaf = next(leaves)
        view = views[name]
        r = _matrix_view.resolve_rank(view.cols, rank)
        return _random_columns(name, (*view.batch, view.cols, r), dtype or leaf.dtype)

    # Without Flax's box around a parameter, whose names of axes are not Q's.
    return jax.tree.map(initial, params, is_leaf=_trees.is_box)


def _random_columns(name: str, shape: tuple[int, ...], dtype) -> jax.Array:
    """Draws unit columns; the key depends on the parameter's path alone."""
    key = jax.random.fold_in(jax.random.key(0), zlib.crc32(name.encode()))
    q = jax.random.normal(key, shape, jnp.float32)
    return (q / jnp.linalg.norm(q, axis=-2, keepdims=True)).astype(dtype)


def with_cosine_qs(state: optax.OptState) -> optax.OptState:
    """A fresh state that begins at a cosine transform in place of random Qs.

    To draw those inside of a step would take longer to compile than a sync.
    """

    def begun(dion):
        return dion._replace(dion_q=jax.tree.map(_cosines, dion.dion_q))

    return with_states(state, begun)


def _cosines(q: jax.Array) -> jax.Array:
    """Orthonormal columns of the shape of Q, from a cosine transform.

    They cost little. Unit vectors would not do: one of them may pick a zero column of
    the matrix, such as that of an input that is never active, and find nothing.
    """
    if q.ndim < 2:  # a state of Dion without matrices has a number in its place
        return q
    cols, r = q.shape[-2:]
    frequency = jnp.arange(r, dtype=jnp.float32)[None]
    angles = (
        jnp.arange(0.5, cols, dtype=jnp.float32)[:, None] * frequency * (jnp.pi / cols)
    )
    waves = jnp.cos(angles) * jnp.where(frequency == 0, 1, 2**0.5) / cols**0.5
    return jnp.broadcast_to(waves, q.shape).astype(q.dtype)


def _bases(products: Named, views: Mapping[str, MatrixView], layout: Layout) -> Named:
    """Orthonormal bases of B Q, each by `_orthonormalize.orthonormal`.

    If a replica has several devices, each makes some of them.

    Left to itself, the compiler makes all of them on every device where an axis shards
    the matrix along its other side. `views` and `layout` are the parameters'.
    """
    found = _whole_matrices.by_matrix(
        lambda stacks: _joined.by_shape(_orthonormalize.orthonormal, stacks),
        products,
        {name: _matrix_view.make_view(x.shape, -2, -1) for name, x in products.items()},
        layout.of_factors({name: view.p_axes for name, view in views.items()}),
    )
    return {name: layout.keep_whole(x) for name, x in found.items()}


def _accumulate(momentum: jax.Array, gradient: jax.Array, decay) -> jax.Array:
    """Computes decay M + G in at least float32."""
    dtype = _dtypes.promoted(jnp.float32, momentum.dtype, gradient.dtype)
    return jnp.asarray(decay, dtype) * momentum.astype(dtype) + gradient.astype(dtype)


def _like(tree: Any, new: Named) -> Any:
    """Returns arrays by path in the structure and the dtypes of a tree."""
    return _trees.map_with_path(lambda name, x: new[name].astype(x.dtype), tree)


def dion(
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank: int | float | None = None,
    momentum: optax.ScalarOrSchedule = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Any | None = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    other_optimizer: optax.GradientTransformation | None = None,
    dimension_numbers: DimensionNumbersOrFn = _two_optimizers.DEFAULT,
    error_feedback: bool = True,
    precision: jax.lax.PrecisionLike = "highest",
) -> optax.GradientTransformationExtraArgs:
    r"""Dion for the matrices, another optimizer for all other parameters.

    Matrices follow :func:`scale_by_dion`, then decoupled weight decay, then the
    learning rate: :math:`X \leftarrow X - \eta \sqrt{\text{fan out}/\text{fan in}}\,
    P Q^\top - \eta \lambda X`. Start at a learning rate of 0.02. It
    communicates nothing: for replicas that share every step see
    `presets.synchronous_dion`, for local steps :func:`curvadion`.

    Args:
      learning_rate: number or schedule.
      rank, error_feedback, precision: see :func:`scale_by_dion`.
      momentum: decay rate mu; a number in [0, 1) or a schedule.
      weight_decay: decoupled, of the matrices, times the learning rate.
      weight_decay_mask: as for `optax.add_decayed_weights`.
      mu_dtype: dtype of momentum, Q and AdamW's first moment. None: the parameters'.
      adam_learning_rate: learning rate of AdamW, which trains all other parameters
        (embeddings, output heads, norms, biases) with b1 = 0.9, b2 = 0.95 and
        eps = 1e-7. None means `learning_rate`.
      other_optimizer: replaces that AdamW. Not with `adam_learning_rate`.
      dimension_numbers: as for :func:`scale_by_dion`. None for a parameter sends it to
        the other optimizer. :func:`describe_partition` shows the result.

    Returns:
      An `optax.partition` of the two. `update` takes :func:`scale_by_dion`'s arguments.

    Raises:
      TypeError: if `rank` is traced.
      ValueError: if an argument is out of range, or both `other_optimizer` and
        `adam_learning_rate` are given; at `init`, if no parameter is a matrix.

    Example:
      >>> params = {"embedding": jnp.ones((9, 4)), "kernel": jnp.ones((4, 8))}
      >>> tx = dion(0.01)
      >>> state = tx.init(params)
      >>> updates, state = jax.jit(tx.update)(params, state, params)
      >>> print(f"{optax.tree.norm(updates['kernel']):.4f}")  # 0.01 sqrt(8 / 4)
      0.0141
    """
    rank = _RANK if rank is None else rank
    _matrix_view.check_rank(rank)
    _arguments.check_numbers(below=1, momentum=momentum)
    _arguments.check_numbers(weight_decay=weight_decay)
    _arguments.check_mask(weight_decay_mask)
    other_optimizer = _adamw_for_the_rest.choose(
        other_optimizer, learning_rate, adam_learning_rate, mu_dtype=mu_dtype
    )

    def matrices(numbers_of):
        def scale(momentum):
            return scale_by_dion(
                rank,
                momentum,
                mu_dtype,
                dimension_numbers=numbers_of,
                error_feedback=error_feedback,
                precision=precision,
            )

        return optax.chain(
            _arguments.with_schedule(scale, momentum),
            _arguments.decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        )

    # An `optax.partition`, made of the parameters on every call.
    return _two_optimizers.optimizer(
        matrices, other_optimizer, dimension_numbers, learning_rate
    )
