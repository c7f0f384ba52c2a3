"""Where arrays live: on the device, or in its host's memory.

The kind of memory is a part of an array's type, so that inside a compiled step it is
known and kept. Only arrays on the device can be computed with.
"""

from typing import Any

import jax

HOST_KIND = "pinned_host"


def to_host(name: str, x: Any) -> jax.Array:
    """The array, named for messages, in pinned memory of the hosts of its devices.

    Raises:
      TypeError: if it is no array on devices.
      ValueError: if one of its devices has no such memory.
    """
    if not isinstance(x, jax.Array):
        raise TypeError(
            f"{name!r} is a {type(x).__name__}, not a jax.Array on devices: move what "
            "curvadion_jax.replicas.replicate returned"
        )
    for device in x.sharding.addressable_devices:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if HOST_KIND not in kinds:
            raise ValueError(
                f"{device} has no memory of the kind {HOST_KIND!r}, only {kinds}: "
                "leave the state on the device"
            )
    return jax.device_put(x, x.sharding.with_memory_kind(HOST_KIND))


def beside(x: Any, other: Any) -> Any:
    """An array on the device, in the memory of another."""
    space = jax.typeof(other).memory_space
    return x if space == jax.memory.Space.Device else jax.device_put(x, space)


def to_device(tree: Any) -> Any:
    """The tree with the arrays that lie in host memory copied to the device."""

    def move(x):
        if jax.typeof(x).memory_space == jax.memory.Space.Device:
            return x
        return jax.device_put(x, jax.memory.Space.Device)

    return jax.tree.map(move, tree)


def put_back(tree: Any, moved: Any, original: Any) -> Any:
    """The tree in the memories of the original, of which `moved` is the device copy.

    What of the copy is unchanged is not copied again: the original's array is taken.
    """
    if jax.tree.structure(tree) != jax.tree.structure(original):
        return tree

    def put(new, copy, old):
        return old if new is copy else beside(new, old)

    return jax.tree.map(put, tree, moved, original)
