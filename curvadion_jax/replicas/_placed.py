"""How the arrays of a state lie on the mesh, and stay so."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from curvadion_jax import _axis_types, _layout, _memory, _paths
from curvadion_jax.replicas._checks import is_array


@functools.lru_cache(maxsize=4096)  # looked up for every array on every step
def over_replicas(placement: NamedSharding, axis_name: str) -> NamedSharding:
    """Divided over the replicas, whether it is yet or not, and within as it is."""
    sizes = placement.mesh.shape

    def used(entry):
        names = tuple(name for name in jax.tree.leaves(entry) if sizes[name] > 1)
        return (names[0] if len(names) == 1 else names) or None

    spec = [axis_name, *map(used, placement.spec[1:])]
    while spec[-1] is None:  # P("replica", None) is P("replica")
        spec.pop()
    return placement.update(spec=P(*spec))


def everywhere(arrays: Iterable[Any]) -> NamedSharding | None:
    """Whole on every device of the arrays' mesh, so that all processes can read it."""
    placements = (getattr(x, "sharding", None) for x in arrays)
    found = (x for x in placements if isinstance(x, NamedSharding))
    first = next(found, None)
    return None if first is None else NamedSharding(first.mesh, P())


def without_empty_axes(leaf: Any, placement: NamedSharding | None) -> Any:
    """The array, placed as after a step: without mesh axes of one device."""
    if placement is None or not is_array(leaf) or placement == leaf.sharding:
        return leaf
    if leaf.sharding.is_equivalent_to(placement, leaf.ndim):
        return jax.device_put(leaf, placement)
    return leaf


def divided(state: Any, placements) -> list[_layout.Placed]:
    """How the arrays of the state lie within a replica."""
    leaves = _paths.leaves_with_path(state)
    return [
        _layout.Placed(name, leaf.shape[1:], P(*placement.spec[1:]))
        for (name, leaf), placement in zip(leaves, placements, strict=True)
        if placement is not None
    ]


def keep(x: jax.Array, placement: NamedSharding | None) -> jax.Array:
    if placement is None or placement.memory_kind == _memory.HOST_KIND:
        return x  # an array in host memory stays by its type
    return _axis_types.constrain(x, placement)
