"""Where arrays live: on the device, or in its host's memory.

The kind of memory is a part of an array's type, so it is known and kept inside a
compiled step. Only arrays on the device can be computed with.
"""

from typing import Any

import jax

HOST_KIND = "pinned_host"


def to_memory(x: Any, space: Any) -> Any:
    """An array, copied if it is not there already."""
    return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)


def to_memory_of(x: Any, other: Any) -> Any:
    """An array, moved to where another array is kept."""
    return to_memory(x, jax.typeof(other).memory_space)


def to_device(tree: Any) -> Any:
    """The tree, its arrays in host memory copied to the device."""
    return jax.tree.map(lambda x: to_memory(x, jax.memory.Space.Device), tree)
