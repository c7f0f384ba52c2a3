"""Where arrays live: on the device, or in its host's memory.

The kind of memory is a part of an array's type, so it is known and kept inside a
compiled step. Only arrays on the device can be computed with.
"""

from typing import Any

import jax

HOST_KIND = "pinned_host"


def to_host(x: jax.Array) -> jax.Array:
    """The array in pinned memory of the hosts of its devices."""
    return jax.device_put(x, x.sharding.with_memory_kind(HOST_KIND))


def to_memory_of(x: Any, other: Any) -> Any:
    """An array on the device, moved to where another array is kept."""
    space = jax.typeof(other).memory_space
    return x if space == jax.memory.Space.Device else jax.device_put(x, space)


def to_device(tree: Any) -> Any:
    """The tree, its arrays in host memory copied to the device."""

    def move(x):
        if jax.typeof(x).memory_space == jax.memory.Space.Device:
            return x
        return jax.device_put(x, jax.memory.Space.Device)

    return jax.tree.map(move, tree)
