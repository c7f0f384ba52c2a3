"""How the arrays of one replica are divided between its devices.

Inside a step nobody can see it: axes inside a replica are automatic, and the compiler
divides the work. That is what matrix products and arithmetic by elements want. What
cuts an array into blocks wants it otherwise: the compiler would first gather the array
on every device. So `replicas.step`, which sees how the state is divided, notes it here
while the step is traced.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from curvadion_jax import _paths


class Divided(NamedTuple):
    """An array of the state: its path, its shape in one replica, and how it lies."""

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec


_noted: contextvars.ContextVar[tuple[Divided, ...]] = contextvars.ContextVar(
    "noted", default=()
)


@contextlib.contextmanager
def noting(arrays: Sequence[Divided]) -> Iterator[None]:
    """Lets `specs` know these arrays."""
    token = _noted.set(tuple(arrays))
    try:
        yield
    finally:
        _noted.reset(token)


def specs(tree: Any) -> list[PartitionSpec]:
    """How the arrays of a tree like the parameters are divided, leaf by leaf.

    As an array of the state whose path ends with the leaf's, of the same shape; else as
    any of that shape; what is not known is whole on every device.
    """
    noted = _noted.get()
    found = []
    for path, leaf in _paths.leaves_with_path(tree):
        alike = [each for each in noted if each.shape == leaf.shape]
        named = [each for each in alike if f"/{each.path}".endswith(f"/{path}")]
        best = next(iter(named or alike), None)
        found.append(PartitionSpec() if best is None else best.spec)
    return found


def named_axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that divide an array."""
    return frozenset(jax.tree.leaves(tuple(spec)))


def of_axes(by_axis: Sequence[Any], axes: Sequence[tuple[int, ...]]) -> list[Any]:
    """What holds for the parameter's axes, for axes that are made of those.

    Of several axes the first may be divided, and none behind it.
    """
    return [
        None if not of or any(by_axis[axis] for axis in of[1:]) else by_axis[of[0]]
        for of in axes
    ]


def place_like(
    x: jax.Array, parameter: Any, axes: Sequence[tuple[int, ...]]
) -> jax.Array:
    """An array placed as a parameter is, outside of a compiled function.

    Args:
      x: the array.
      parameter: what to follow; x is left where it is unless this lies on a mesh.
      axes: for every axis of x the axes of the parameter that it is made of, in order;
        none for an axis that is to stay whole.
    """
    if isinstance(parameter, Tracer) or not isinstance(parameter, jax.Array):
        return x
    if not isinstance(parameter.sharding, NamedSharding):
        return x
    mesh, spec = parameter.sharding.mesh, parameter.sharding.spec
    by_axis = (*spec, *[None] * (parameter.ndim - len(spec)))
    placed = PartitionSpec(*of_axes(by_axis, axes))
    return jax.device_put(x, NamedSharding(mesh, placed))


def like_tree(
    params: Any, arrays: Sequence[Any], axes: Sequence[Sequence[tuple[int, ...]]]
) -> Any:
    """Arrays in the structure of the parameters, each placed as its parameter.

    Where linen's boxes name the axes of the parameters, those of the arrays are named
    alike, so that `flax.linen.get_partition_spec` divides them in the same way.
    """
    nodes, structure = jax.tree.flatten(params, is_leaf=_paths.is_box)
    following = zip(arrays, axes, strict=True)

    def named(node):
        leaves, inside = jax.tree.flatten(node)
        if not leaves:  # of a parameter that another optimizer takes
            return node
        x, of = next(following)
        box = jax.tree.unflatten(inside, [place_like(x, leaves[0], of)])
        names = getattr(box, "names", None) if _paths.is_box(node) else None
        if names is None or len(names) != leaves[0].ndim:
            return box
        return box.replace(names=tuple(of_axes(names, of)))

    return structure.unflatten([named(node) for node in nodes])
