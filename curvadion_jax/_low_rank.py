"""Dion's arithmetic on one stack of matrices: factors, error feedback, next Q.

Pure mathematics: no Optax, no axis names. Communication comes in as functions that
are applied between the two products. Symbols as in Ahn et al. (arXiv
2504.05295), with matrices seen as [*batch, rows, cols], rows >= cols:

====== ======================== ====================================================
symbol shape                    meaning
====== ======================== ====================================================
B      [*batch, rows, cols]     momentum plus gradient
P      [*batch, rows, r]        orthonormal left factor
R      [*batch, cols, r]        right factor with its lengths, R = B^T P
Q      [*batch, cols, r]        R with unit columns; the next step starts from it
====== ======================== ====================================================
"""

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from curvadion_jax import _sharding
from curvadion_jax._matrices import MatrixView, matmul
from curvadion_jax._sharding import keep_whole

Named = dict[str, jax.Array]
ReduceFn = Callable[[Named], tuple[Named, Named | None]]
"""Takes arrays by the paths of their parameters to their means over replicas, and to
what of its own arrays this replica put into them; None says all of them."""
OfFactors = Callable[[list[jax.Array]], list[jax.Array]]
"""Takes factors, one for each parameter, to as many of the same shapes."""

# The paper's and microsoft/dion's epsilon in the column normalisation.
_EPSILON = 1e-8


def initial_q(
    name: str, view: MatrixView, r: int, seed: jax.typing.ArrayLike, dtype
) -> jax.Array:
    """Random unit columns [*batch, cols, r] to start from.

    The key depends on the path alone: the same on every replica, whatever else is in
    the tree.
    """
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
    q = jax.random.normal(key, (*view.batch, view.cols, r), jnp.float32)
    return (q / jnp.linalg.norm(q, axis=-2, keepdims=True)).astype(dtype)


def left_product(B: jax.Array, Q: jax.Array) -> jax.Array:
    """B Q, the start of the power iteration, shape [*batch, rows, r]."""
    return matmul(B, Q.astype(B.dtype))


def right_product(B: jax.Array, P: jax.Array) -> jax.Array:
    """R = B^T P, shape [*batch, cols, r]."""
    return matmul(B.mT, P)


def unit_columns(R: jax.Array, Q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Next Q: R with unit columns, and which columns hold anything.

    A column of R that is zero up to rounding, beside the others, says that the
    momentum has nothing along that column of P. Its column of Q is kept, and it must
    not move the parameters: P Q^T would turn rounding noise into a step of full
    length. (microsoft/dion has this rule for an all-zero matrix.) Only R decides,
    which all replicas share after a reduction.

    Args:
      R: [*batch, cols, r].
      Q: [*batch, cols, r], the previous one.

    Returns:
      The next Q in the dtype of R, and a bool [*batch, 1, r] that is True where the
      column holds something (NaN does).
    """
    # In units of the largest element, so that squares neither overflow nor vanish.
    largest = jnp.max(jnp.abs(R), axis=(-2, -1), keepdims=True)
    largest = jnp.where(largest == 0, 1, largest)
    R = R / largest
    length = jnp.linalg.norm(R, axis=-2, keepdims=True)
    total = jnp.linalg.norm(length, axis=-1, keepdims=True)
    present = ~(length <= 100 * jnp.finfo(R.dtype).eps * total)
    unit = R / (length + _EPSILON / largest)
    return keep_whole(jnp.where(present, unit, Q.astype(R.dtype))), present


def direction(P: jax.Array, Q: jax.Array, present: jax.Array) -> jax.Array:
    """The update P Q^T, shape [*batch, rows, cols], without the absent columns."""
    return matmul(jnp.where(present, P, 0), Q.mT)


def reduces_factors(view: MatrixView, r: int) -> bool:
    """Whether P and R together are smaller than the matrix they stand for."""
    return (view.rows + view.cols) * r < view.rows * view.cols


def power_iteration(
    matrices: list[jax.Array],
    qs: list[jax.Array],
    bases: OfFactors,
    reduce: OfFactors = lambda factors: factors,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """P = bases(reduce(B Q)) and this replica's R = B^T P, for stacks of matrices."""
    qs = [keep_whole(q) for q in qs]
    left = reduce([left_product(b, q) for b, q in zip(matrices, qs, strict=True)])
    left = [keep_whole(p) for p in bases(left)]
    return left, [right_product(b, p) for b, p in zip(matrices, left, strict=True)]


def _reduce_where(
    names: list[str],
    arrays: list[jax.Array],
    wanted: list[bool],
    reduce_fn: ReduceFn | None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The arrays with means in place of those wanted, and with what was put in."""
    by_name = dict(zip(names, arrays, strict=True))
    chosen = {
        name: by_name[name] for name, want in zip(names, wanted, strict=True) if want
    }
    if reduce_fn is None or not chosen:
        return arrays, arrays
    means, sent = reduce_fn(chosen)
    if sent is None:
        sent = {}
    return [*(by_name | means).values()], [*(by_name | sent).values()]


def dion_step(
    names: list[str],
    views: list[MatrixView],
    total: list[jax.Array],
    qs: list[jax.Array],
    *,
    factor: jax.typing.ArrayLike | None,
    bases: OfFactors,
    reduce_fn: ReduceFn | None,
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """One step of Dion for a list of parameters.

    Args:
      names: path of each parameter, all different.
      views: how each parameter is seen as matrices.
      total: B = M + G of each, in the parameter's shape.
      qs: Q of each, [*batch, cols, r].
      factor: 1 - mu for error feedback, None to leave B as it is.
      bases: takes factors [*batch, rows, r] to their orthonormal bases; see `_bases`.
      reduce_fn: mean over replicas, applied to the factors or, where those are
        larger, to B; None for one replica. What it does not send of R or B stays in
        the momentum of the replica.

    Returns:
      For each parameter the direction sqrt(fan_out / fan_in) P Q^T and the momentum,
      both in its shape, and the next Q.
    """
    compressed = [
        reduces_factors(v, q.shape[-1]) for v, q in zip(views, qs, strict=True)
    ]
    given = total
    total, put_in = _reduce_where(names, total, [not c for c in compressed], reduce_fn)
    matrices = [view.to_matrix(b) for view, b in zip(views, total, strict=True)]

    def reduce(factors, axes):
        made_of = [(v.shape, of) for v, of in zip(views, axes, strict=True)]
        with _sharding.noting_made_of(names, factors, made_of):
            return _reduce_where(names, factors, compressed, reduce_fn)

    left, own = power_iteration(
        matrices,
        qs,
        bases,
        lambda factors: reduce(factors, [view.p_axes for view in views])[0],
    )
    common, own = reduce(own, [view.q_axes for view in views])
    results = []
    for view, momentum, p, r, mean_r, q, all_, sent in zip(
        views, total, left, own, common, qs, given, put_in, strict=True
    ):
        new_q, present = unit_columns(mean_r, q)
        if factor is not None:
            # Each replica takes away what it gave. With the mean of R the update would
            # be the same, but replicas' differences would add up in momenta for ever.
            momentum -= jnp.asarray(factor, p.dtype) * view.product(p, r)
        if sent is not all_:
            momentum += all_ - sent
        update = view.product(jnp.where(present, view.scale * p, 0), new_q)
        results.append((update, momentum, new_q))
    return results
