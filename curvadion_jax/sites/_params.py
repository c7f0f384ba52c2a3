"""Parameters on the devices of a site: what they must be, and how they move."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from curvadion_jax.sites._worker import Change


def check(params: Any) -> None:
    leaves = jax.tree.leaves_with_path(params)
    if not leaves:
        raise ValueError("the parameters have no arrays: give the tree of the model's")
    for path, x in leaves:
        name = jax.tree_util.keystr(path)
        if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.floating):
            kind = x.dtype if hasattr(x, "dtype") else type(x).__name__
            raise TypeError(
                f"{name} is {kind}, and parameters must be real floating-point "
                "jax.Arrays: give the parameters alone, without the optimizer's state"
            )
        if not x.is_fully_addressable:
            raise ValueError(
                f"{name} lies on devices of several processes, and a site is one "
                "process so far: give each process a site of its own"
            )


def placed(x: np.ndarray, like: jax.Array) -> jax.Array:
    """The array where another lies, with memory of its own: it may be donated."""
    return jax.device_put(x, like.sharding, may_alias=False)


@jax.jit
def copies(arrays: list[jax.Array]) -> list[jax.Array]:
    """So that the arrays may be donated while the copies are read."""
    return [jnp.copy(x) for x in arrays]


def moved(now: jax.Array, change: Change, keep: float) -> jax.Array:
    if change.base is None:
        return placed(change.new, now)
    new = jax.device_put(change.new, now.sharding)
    share = np.float32(keep if change.counted else 1)
    base = jax.device_put(change.base, now.sharding)
    return _progressed(now, base, new, share)


@jax.jit
def _progressed(now, base, new, share):
    """new + share x (now - base), to the bit `new` if there was no progress."""
    wide = jnp.promote_types(now.dtype, jnp.float32)
    progress = now.astype(wide) - base.astype(wide)
    return (new.astype(wide) + share.astype(wide) * progress).astype(now.dtype)
