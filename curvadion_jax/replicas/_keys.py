"""Random keys as rows: every replica draws its own numbers."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp


def split_keys(keys: jax.Array, number: int) -> jax.Array:
    """Splits every key, [...] -> [number, ...]."""
    split = jax.vmap(lambda key: jax.random.split(key, number), out_axes=1)
    return split(keys.reshape(-1)).reshape(number, *keys.shape)


def warn_of_raw_keys(tree: Any, lead: tuple[int, ...], caller: str) -> None:
    """Warns of numbers that may be keys of PRNGKey, which are copied and not split.

    They are uint32[2] behind the leading axes. The warning is at the line that called
    the caller.
    """
    for path, x in jax.tree.leaves_with_path(tree):
        shape = jnp.shape(x)
        if shape == (*lead, 2) and jnp.result_type(x) == jnp.uint32:
            warnings.warn(
                f"{caller} copies {jax.tree_util.keystr(path) or 'an array'}, uint32 "
                f"of shape {shape}. If these are keys of jax.random.PRNGKey, replicas "
                "draw the same numbers: use jax.random.key, which is split.",
                stacklevel=3,
            )
