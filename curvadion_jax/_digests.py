"""Digests of arrays, by which a flipped bit is noticed.

They are computed where the arrays lie, one for each replica, and are the same for every
sharding. So an array may be read onto other devices than it was saved from.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from curvadion_jax import _memory


def of(x: jax.Array) -> np.ndarray:
    """uint32[N], a digest of each replica in this process; zero for the others."""
    found = _of_rows(_memory.to_device(x))
    digests = np.zeros(found.shape, found.dtype)
    for shard in found.addressable_shards:
        digests[shard.index] = shard.data
    return digests


def gathered(digests: list[np.ndarray]) -> np.ndarray:
    """uint32[arrays, N], of the replicas of all processes, which all call it."""
    mine = np.stack(digests)
    if jax.process_count() == 1:
        return mine
    return np.asarray(multihost_utils.process_allgather(mine)).max(axis=0)


@jax.jit
def _of_rows(x: jax.Array) -> jax.Array:
    """The sum of the hashes of all words of a row, each mixed with its place."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if jnp.issubdtype(x.dtype, jnp.inexact) or x.dtype.itemsize > 4:
        bits = min(32, 8 * x.dtype.itemsize)
        x = jax.lax.bitcast_convert_type(x, f"uint{bits}")
    words = x.astype(jnp.uint32)
    place = jnp.zeros([], jnp.uint32)
    for axis in range(1, words.ndim):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place = place * np.uint32(words.shape[axis]) + along
    # The finaliser of MurmurHash3, a permutation: one changed word changes the sum.
    mixed = words ^ (place * np.uint32(0x9E3779B9))
    mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> 16)
    return jnp.sum(mixed, axis=range(1, words.ndim), dtype=jnp.uint32)
