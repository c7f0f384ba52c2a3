"""Dion's step: one step of power iteration from a right factor.

Mathematics without Optax, axes or layouts: communication comes in as functions, applied
to B or to each of the two products. Symbols as in Ahn et al. (arXiv 2504.05295), for
parameters seen as stacks [..., rows, cols] with rows >= cols:

====== ==================== ==================== ===================================
symbol shape                in Dion's state      on the replicas
====== ==================== ==================== ===================================
G      the parameter's      the gradient         differs
M      the parameter's      ``momentum``         differs ("decoupled")
B      the parameter's      M + G                differs
P      [..., rows, r]       orthonormal          the same after a reduction
R      [..., cols, r]       B^T P                the same after a reduction
Q      [..., cols, r]       ``dion_q``, R with   the same after a reduction
                            unit columns
====== ==================== ==================== ===================================
"""

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from curvadion_jax._matrix_view import MadeOf, MatrixView, Named, matmul

ReduceFn = Callable[[Named, Mapping[str, MadeOf]], Named]
"""(arrays, the axes that they merge) -> their means over replicas."""

# The paper's and microsoft/dion's epsilon in the column normalisation.
_EPSILON = 1e-8


def reduces_factors(view: MatrixView, r: int) -> bool:
    """Whether P and R together are smaller than the matrix they stand for."""
    return (view.rows + view.cols) * r < view.rows * view.cols


def unit_columns(R: jax.Array, Q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scales R to the next Q, and tells which columns are present, bool[*batch, 1, r].

    If a column of R is zero up to rounding, the matrix has nothing along that column
    of P. Then Q keeps its column, which must not move the parameters: P Q^T would turn
    rounding noise into a step of full length. (microsoft/dion has this rule for an
    all-zero matrix.) NaN counts as present.
    """
    # In units of the largest element, so that squares neither overflow nor vanish.
    largest = jnp.max(jnp.abs(R), axis=(-2, -1), keepdims=True)
    largest = jnp.where(largest == 0, 1, largest)
    R = R / largest
    length = jnp.linalg.norm(R, axis=-2, keepdims=True)
    total = jnp.linalg.norm(length, axis=-1, keepdims=True)
    present = ~(length <= 100 * jnp.finfo(R.dtype).eps * total)
    unit = R / (length + _EPSILON / largest)
    return jnp.where(present, unit, Q.astype(R.dtype)), present


def dion_step(
    views: dict[str, MatrixView],
    total: Named,
    qs: Named,
    *,
    feedback: jax.typing.ArrayLike | None,
    bases: Callable[[Named], Named],
    keep_whole: Callable[[jax.Array], jax.Array],
    reduce_fn: ReduceFn | None,
    precision: jax.lax.PrecisionLike,
) -> tuple[Named, Named, Named]:
    """One step of Dion for all parameters.

    Args:
      views: how each parameter is seen as matrices.
      total: B = M + G of each, in the parameter's shape.
      qs: Q of each.
      feedback: 1 - mu for error feedback, None to leave B as it is.
      bases: function from B Q to orthonormal bases of its columns.
      keep_whole: function that leaves a right factor unsharded along r.
      reduce_fn: means over replicas of B Q, then of B^T P; of B where the factors are
        no smaller; None for one replica.
      precision: of the products with matrices. The algebra of factors has the highest.

    Returns:
      sqrt(fan_out / fan_in) P Q^T, momenta (like the parameters), and the next Qs.
    """
    qs = {name: keep_whole(q) for name, q in qs.items()}
    compressed = {n for n, q in qs.items() if reduces_factors(views[n], q.shape[-1])}

    # For one replica `reduced` returns the arrays: B -> B Q -> P -> B^T P.
    def reduced(names, arrays, axes):
        """Averages some of the arrays; `axes` tells what their axes merge."""
        some = {name: x for name, x in arrays.items() if name in names}
        if reduce_fn is None or not some:
            return arrays
        made_of = {name: (views[name].shape, axes(views[name])) for name in some}
        return arrays | reduce_fn(some, made_of)

    itself = lambda view: [(axis,) for axis in range(len(view.shape))]
    total = reduced(total.keys() - compressed, total, itself)
    matrices = {name: views[name].to_matrix(b) for name, b in total.items()}
    multiply = functools.partial(matmul, precision=precision)
    products = {n: multiply(B, qs[n].astype(B.dtype)) for n, B in matrices.items()}
    left = bases(reduced(compressed, products, lambda view: view.p_axes))
    right = {name: multiply(B.mT, left[name]) for name, B in matrices.items()}
    mean_right = reduced(compressed, right, lambda view: view.q_axes)
    directions, momenta, new_qs = {}, {}, {}
    for name, view in views.items():
        P, momentum = left[name], total[name]
        Q, present = unit_columns(mean_right[name], qs[name])
        Q = keep_whole(Q)
        if feedback is not None:
            applied = jnp.asarray(feedback, P.dtype)
            # Full rank: P R^T = P P^T B = B, unless Q is singular.
            if Q.shape[-1] == view.cols:
                momentum -= applied * momentum
            else:
                # Each replica takes away its own contribution: with the mean of R the
                # replicas' differences would add up in their momenta.
                momentum -= applied * view.product(P, right[name], precision)
        scale = math.sqrt(view.fan_out / view.fan_in)
        left_factor = jnp.where(present, scale * P, 0)
        directions[name] = view.product(left_factor, Q, precision)
        momenta[name], new_qs[name] = momentum, Q
    return directions, momenta, new_qs
