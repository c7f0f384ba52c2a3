"""Places arrays that are made of parameters as their parameters lie, and names them."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from curvadion_jax import _paths
from curvadion_jax._layout import of_axes


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
    placement = NamedSharding(mesh, PartitionSpec(*of_axes(by_axis, axes)))
    if placement.is_fully_addressable:
        return jax.device_put(x, placement)
    # For `device_put` all processes would compare their arrays, one message for each.
    return jax.jit(lambda x: x, out_shardings=placement)(x)


def like_tree(
    params: Any, arrays: Sequence[Any], axes: Sequence[Sequence[tuple[int, ...]]]
) -> Any:
    """Arrays in the structure of the parameters, each placed as its parameter.

    Where linen's boxes name the axes of the parameters, those of the arrays are named
    alike, so that `flax.linen.get_partition_spec` divides them in the same way.
    """
    nodes, structure = jax.tree.flatten(params, is_leaf=_paths.is_box)
    following = zip(arrays, axes, strict=True)

    def placed(node):
        leaves, inside = jax.tree.flatten(node)  # none where another optimizer takes it
        pairs = [(leaf, *next(following)) for leaf in leaves]
        new = [place_like(x, leaf, of) for leaf, x, of in pairs]
        box = jax.tree.unflatten(inside, new)
        if not _paths.is_box(node) or len(pairs) != 1:
            return box
        return _with_names(box, len(leaves[0].shape), pairs[0][-1])

    return structure.unflatten([placed(node) for node in nodes])


def _with_names(box: Any, ndim: int, axes: Sequence[tuple[int, ...]]) -> Any:
    """Flax's box of an array made of a parameter's axes, which it has the names of."""

    def renamed(names):
        known = isinstance(names, tuple | list) and len(names) == ndim
        return tuple(of_axes(names, axes)) if known else names

    if hasattr(box, "set_metadata"):  # a variable of nnx
        metadata = box.get_metadata()
        for key in {"out_sharding", "sharding_names", "sharding"} & set(metadata):
            box.set_metadata(key, renamed(metadata[key]))
        return box
    if getattr(box, "names", None) is None:
        return box
    return box.replace(names=renamed(box.names))
