"""Cuts a joined array apart, without a kernel for every part."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def cut(table: jax.Array, lengths: Sequence[int]) -> list[jax.Array]:
    """Cuts a table into parts of so many rows, [sum of lengths, ...] -> [length, ...].

    Where a part begins is a constant of its kernel, so XLA compiles one for each part,
    and one for each use of it: on a CPU, whose other kernels serve all parameters of a
    shape, that was a third of the first step. There the places are read at run time.
    (So the rows must not be sharded: the compiler would gather the table.) On
    accelerators constants let the cut be fused with what follows it.
    """
    if len(lengths) == 1:
        return [table]
    ends = np.cumsum(lengths).tolist()

    def at_constants(table):
        return jnp.split(table, ends[:-1])

    def at_run_time(table):
        # XLA does not look into a loop that runs twice, so its results are unknown.
        nowhere = [jnp.int32(-1) for _ in ends]
        known = [jnp.int32(start) for start in [0, *ends[:-1]]]
        read = lax.fori_loop(0, 2, lambda _, __: known, nowhere)
        take = functools.partial(lax.dynamic_slice_in_dim, allow_negative_indices=False)
        return [take(table, start, n) for start, n in zip(read, lengths, strict=True)]

    return lax.platform_dependent(table, cpu=at_run_time, default=at_constants)
