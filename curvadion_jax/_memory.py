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


def to_memory_of(tree: Any, other: Any) -> Any:
    """The tree, each array moved to where the other tree's is kept."""

    def move(x, y):
        space = jax.typeof(y).memory_space
        return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)

    return jax.tree.map(move, tree, other)
