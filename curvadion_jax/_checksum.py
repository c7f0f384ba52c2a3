"""A number that changes with any array of a tree."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def of(tree: Any) -> jax.Array:
    """The sum of the bits of all arrays, uint32[].

    Integers, so it is the same in whatever order the compiler adds them up. Each array
    counts with an odd factor of its own, so that two of them cannot change places.
    """
    total = jnp.zeros([], jnp.uint32)
    for index, x in enumerate(jax.tree.leaves(tree)):
        bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        words = bits.astype(jnp.uint32)
        if x.dtype.itemsize == 8:
            words += (bits >> 32).astype(jnp.uint32)
        total += np.uint32(2 * index + 1) * jnp.sum(words, dtype=jnp.uint32)
    return total
