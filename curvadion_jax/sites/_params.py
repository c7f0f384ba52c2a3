"""Parameters on the devices of a site: what they must be, and how they move."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Change(NamedTuple):
    """What becomes of a parameter: new + keep x (now - base).

    Attributes:
      leaf: which of the parameters' leaves.
      base: what progress is counted from; None leaves no progress.
      new: the outer parameter.
      counted: whether what lay before the base has been counted in a round.
    """

    leaf: int
    base: np.ndarray | None
    new: np.ndarray
    counted: bool


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
        if len({device.process_index for device in x.sharding.device_set}) != (
            jax.process_count()
        ):
            raise ValueError(
                f"{name} lies on devices of some of this program's "
                f"{jax.process_count()} processes, which are one site: give parameters "
                "that lie on a mesh of all of them (jax.make_mesh takes all devices)"
            )


def check_same(params: Any, shapes: list[Any]) -> None:
    """Rejects parameters that have become others than those of the start."""
    for (path, x), then in zip(jax.tree.leaves_with_path(params), shapes, strict=True):
        dtype, shape = getattr(x, "dtype", type(x).__name__), np.shape(x)
        if shape != then.shape or dtype != then.dtype:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} is {dtype}{list(shape)}, and was "
                f"{then.dtype}{list(then.shape)} at start: keep the parameters' shapes "
                "and dtypes"
            )


def placed(x: np.ndarray, like: jax.Array) -> jax.Array:
    """The array where another lies, with memory of its own: it may be donated."""
    if like.is_fully_addressable:
        return jax.device_put(x, like.sharding, may_alias=False)
    return jax.make_array_from_callback(
        x.shape, like.sharding, lambda index: x[index].copy()
    )


_copy = jax.jit(jnp.copy)


def copies(arrays: list[Any]) -> list[jax.Array]:
    """So that the arrays may be donated while the copies are read.

    One by one: they may lie on different devices.
    """
    return [_copy(x) for x in arrays]


def moved(now: jax.Array, change: Change, keep: float) -> jax.Array:
    new = placed(change.new, now)
    if change.base is None:
        return new
    share = np.float32(keep if change.counted else 1)
    return _progressed(now, placed(change.base, now), new, share)


@jax.jit
def _progressed(now, base, new, share):
    """new + share x (now - base), to the bit `new` if there was no progress."""
    wide = jnp.promote_types(now.dtype, jnp.float32)
    progress = now.astype(wide) - base.astype(wide)
    return (new.astype(wide) + share.astype(wide) * progress).astype(now.dtype)
