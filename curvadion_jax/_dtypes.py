"""Dtypes to compute in, and casts to those that arrays are kept in.

These are chosen by `mu_dtype` of an optimizer, and `residual_dtype` of `reconcile`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def cast_like(tree: Any, other: Any) -> Any:
    """Casts a tree to the dtypes of another one of the same structure."""

    def cast(x, y):
        # A random key has no cast, not even to its own type.
        same = getattr(x, "dtype", None) == y.dtype
        return x if same else jnp.asarray(x).astype(y.dtype)

    return jax.tree.map(cast, tree, other)


def compute_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """Promotes a dtype to at least float32."""
    return promoted(jnp.float32, dtype)


def promoted(*dtypes: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype that holds all of them, in JAX's "strict" mode of promotion too."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(functools.reduce(jnp.promote_types, dtypes))


def at_least_float32(x: jax.Array) -> jax.Array:
    """Casts an array to at least float32."""
    return x.astype(compute_dtype(x.dtype))


def add_cast(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y in the dtype that holds both, cast to that of x."""
    dtype = promoted(x.dtype, y.dtype)
    return (x.astype(dtype) + y.astype(dtype)).astype(x.dtype)


def difference(tree: Any, other: Any) -> Any:
    """tree - other, in at least float32."""
    wide = at_least_float32
    return jax.tree.map(lambda x, y: wide(x) - wide(y), tree, other)


def rounded(tree: Any) -> Any:
    """The tree, of whose 16-bit numbers nothing is left that their dtype cannot hold.

    XLA may go on with more digits of a sum than its dtype has.
    """

    def each(x):
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 2:
            return x
        info = jnp.finfo(x.dtype)
        return lax.reduce_precision(x, info.nexp, info.nmant)

    return jax.tree.map(each, tree)
