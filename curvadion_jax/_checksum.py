"""Numbers that change with any bit of an array, or of a tree."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from curvadion_jax import _trees


def of(tree: Any) -> jax.Array:
    """One number for all arrays of a tree, uint32[]."""
    total, start = jnp.zeros([], jnp.uint32), 0
    for x in _trees.packed(jax.tree.leaves(tree)):
        total += of_array(x, start)
        start += _words(x)
    return total


def _words(x: jax.Array) -> int:
    """The number of words that `of_array` makes of an array."""
    return x.size * max(1, x.dtype.itemsize // 4)


def of_array(x: jax.Array, start: int = 0) -> jax.Array:
    """The sum of all words of an array, each mixed with its place, uint32[].

    `start` is the place of the first.

    A sum of integers is the same in whatever order the compiler adds them up, and
    however the array is sharded. A plain sum would not change where elements change
    places, or change by amounts that add up to a multiple of 2^32, as in 2 x and -x.
    """
    if _trees.is_key(x):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if jnp.issubdtype(x.dtype, jnp.inexact) or x.dtype.itemsize > 4:
        # 64 bits become two words on a last axis.
        x = lax.bitcast_convert_type(x, f"uint{min(32, 8 * x.dtype.itemsize)}")
    words = x.astype(jnp.uint32)
    place = jnp.zeros([], jnp.uint32)
    for axis in range(words.ndim):
        along = lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place = place * np.uint32(words.shape[axis]) + along
    place += np.uint32(start % 2**32)
    mixed = (words ^ (place * np.uint32(0x9E3779B9))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0xC2B2AE35)
    mixed ^= mixed >> 13
    return jnp.sum(mixed, dtype=jnp.uint32)
