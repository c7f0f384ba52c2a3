"""Where arrays live: on the device, or in its host's memory.

The kind of memory is a part of an array's type, so it is known and kept inside a
compiled step. Only arrays on the device can be computed with.
"""

from typing import Any

import jax

HOST_KIND = "pinned_host"


def is_on_device(x: Any) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Device


def to_device(tree: Any) -> Any:
    """The tree, its arrays in host memory copied to the device."""
    space = jax.memory.Space.Device
    move = lambda x: x if is_on_device(x) else jax.device_put(x, space)
    return jax.tree.map(move, tree)


def put(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """`jax.device_put`, where devices and memories change one after the other.

    Both at once is an error of JAX 0.10.2 if there is one device.
    """
    on_device: Any = sharding.with_memory_kind
    x = jax.device_put(to_device(x), on_device(None))
    return jax.device_put(x, sharding) if sharding.memory_kind == HOST_KIND else x


def to_memory_of(tree: Any, other: Any) -> Any:
    """The tree, each array moved to where the other tree's is kept."""

    def move(x, y):
        space = jax.typeof(y).memory_space
        return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)

    return jax.tree.map(move, tree, other)
