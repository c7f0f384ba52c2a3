"""Dion's mathematics: one step of power iteration from a right factor.

Without Optax, axes, layouts or replicas: `_dion._dion_step` has the order
of a step, and averages in between. Symbols as in Ahn et al. (arXiv 2504.05295), for
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

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from curvadion_jax._matrix_view import MadeOf, MatrixView, Named

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


def direction(
    view: MatrixView,
    P: jax.Array,
    Q: jax.Array,
    present: jax.Array,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """sqrt(fan_out / fan_in) P Q^T of the columns that are present, [shape]."""
    scale = math.sqrt(view.fan_out / view.fan_in)
    return view.product(jnp.where(present, scale * P, 0), Q, precision)


def with_feedback(
    view: MatrixView,
    B: jax.Array,
    P: jax.Array,
    R: jax.Array,
    feedback: jax.typing.ArrayLike,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """M = B - (1 - mu) P R^T, [shape]; `feedback` is 1 - mu.

    Each replica takes away its own contribution, by its own R: with the mean of R the
    replicas' differences would add up in their momenta.
    """
    # Full rank: P R^T = P P^T B = B, unless Q is singular.
    applied = B if R.shape[-1] == view.cols else view.product(P, R, precision)
    return B - jnp.asarray(feedback, P.dtype) * applied
