"""Whether numbers are finite, and choices between trees by one bool.

What is done about a NaN: `_adaptive_sync` takes zeros for gradients that are not finite
and for such elements of updates, `_step` excludes replicas whose state is not finite.
"""

from typing import Any

import jax
import jax.numpy as jnp

from curvadion_jax import _dtypes, _trees


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def all_finite(tree: Any) -> jax.Array:
    """Whether no floating-point array of the tree has a NaN or an infinity, bool[].

    ``x - x`` is NaN where x is NaN or Inf, else 0, so its sum shows either. On CPU this
    takes a third of the time of `all(isfinite(x))`, whose reduction is not vectorised.
    (`max(abs(x))` drops NaN; XLA simplifies ``(2 * x) * 0``, and overflow is missed.)
    """
    floats = [jnp.asarray(x) for x in jax.tree.leaves(tree) if is_float(x)]
    if not floats:
        return jnp.array(True)
    vectors = _trees.packed(floats)
    sums = jnp.stack([jnp.sum(x - x).astype(jnp.float32) for x in vectors])
    # XLA unrolls `any` into a chain of n operations, and repeats the chain in each of
    # the n fusions that read the result; a sum of squares stays one reduction.
    return jnp.sum(sums * sums) == 0


def is_kept(x: jax.Array) -> jax.Array:
    """Which elements of a state are as they should be; a single number may be infinite.

    Such as the best loss so far, or a loss scale.
    """
    return jnp.isfinite(x) if jnp.ndim(x) else ~jnp.isnan(x)


def is_sound(state: Any) -> jax.Array:
    """Whether all of a state `is_kept`, bool[]."""
    arrays = [x for x in jax.tree.leaves(state) if is_float(x)]
    single = [jnp.where(jnp.isinf(x), 0, x) for x in arrays if jnp.ndim(x) == 0]
    return all_finite([*single, *(x for x in arrays if jnp.ndim(x))])


def norms_finite(tree: Any) -> jax.Array:
    """Whether no array has a NaN or Inf, or a norm that overflows, bool[].

    The square of 1e20 overflows float32. (Small arrays have one norm for several.)
    """
    squares = lambda x: jnp.sum(jnp.square(jnp.abs(_dtypes.at_least_float32(x))))
    floats = [x for x in jax.tree.leaves(tree) if is_float(x)]
    return all_finite([squares(x) for x in _trees.packed(floats)])


def rows_finite(rows: Any) -> jax.Array:
    """Whether each replica's floating-point numbers are finite, bool[R] or bool[1]."""
    found = jnp.ones(1, bool)
    for x in jax.tree.leaves(rows):
        if is_float(x):
            found &= jnp.all(jnp.isfinite(x), tuple(range(1, jnp.ndim(x))))
    return found


def finite_elements(tree: Any) -> Any:
    """Replaces NaN and infinities by zeros."""
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), tree)


def repaired(state: Any, before: Any) -> Any:
    """Replaces what is not to be kept of a state by what was there before."""

    def either(x, old):
        return jnp.where(is_kept(x), x, old) if is_float(x) else x

    return jax.tree.map(either, state, before)


def or_zeros(condition: jax.Array | bool, tree: Any) -> Any:
    """Replaces the tree by zeros if the condition, bool[], is false."""
    return jax.tree.map(lambda x: jnp.where(condition, x, 0), tree)
