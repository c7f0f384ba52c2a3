"""Lets every device of a replica work on its own parts of arrays.

Nothing moves between them, but where several hold the same part: then each works on a
piece of it, and they share what they found.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from curvadion_jax.mesh import _rows
from curvadion_jax.mesh._layout import Layout

# Elements per device. Every device sends a smaller array whole, because joining its
# pieces again takes another message inside the replica.
_LEAST_PIECE = 256


def shared_by(x: Any, spec: PartitionSpec, layout: Layout) -> tuple[str, ...]:
    """Inner axes whose devices hold the same part, of which each takes a piece."""
    named = _rows.named_axes(spec)
    enough = x.size >= layout.devices * _LEAST_PIECE
    return tuple(axis for axis in layout.axes if enough and axis not in named)


def _parts(tree: Any, layout: Layout) -> Any:
    """The shapes of what each device of a replica works on, of a tree of arrays."""
    if not layout.is_divided:
        return tree
    mesh = AbstractMesh(tuple(layout.axes.values()), tuple(layout.axes))

    def part(x, spec):
        shape = NamedSharding(mesh, spec).shard_shape(x.shape)
        if shared := shared_by(x, spec, layout):
            devices = math.prod(layout.axes[axis] for axis in shared)
            shape = (math.ceil(math.prod(shape) / devices),)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(map(part, leaves, layout.of(tree)))


def elements_per_device(tree: Any, layout: Layout) -> int:
    """How many elements of a tree each device of a replica works on."""
    return sum(x.size for x in jax.tree.leaves(_parts(tree, layout)))


def _alike(tree: Any, layout: Layout) -> dict[Any, list[int]]:
    """Which leaves of a tree lie alike: the keys are axes that shard and share."""
    found = defaultdict(list)
    pairs = zip(jax.tree.leaves(tree), layout.of(tree), strict=True)
    for index, (leaf, spec) in enumerate(pairs):
        found[_rows.named_axes(spec), shared_by(leaf, spec, layout)].append(index)
    return found


def calls(tree: Any, layout: Layout) -> list[Any]:
    """The shapes that a device is given in each call of `by_device`."""
    if not layout.is_divided:
        return [tree]
    shapes = jax.tree.leaves(_parts(tree, layout))
    alike = _alike(tree, layout).values()
    return [[shapes[index] for index in members] for members in alike]


def by_device(
    function: Callable[[list[jax.Array]], tuple[list[jax.Array], ...]],
    tree: Any,
    layout: Layout,
) -> tuple[Any, ...]:
    """Calls a function on every device's own parts of arrays, and joins the results.

    The function takes a list of parts and returns a tuple of lists like it. It is
    called once for all arrays that are sharded over the same axes. If several devices
    hold the same part, each call is given another piece of it, in one dimension.

    Returns:
      A tuple of trees like `tree`, one for each of those lists.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tuple(map(structure.unflatten, function([])))
    specs = layout.of(tree)
    of_leaves: list[Any] = [None] * len(leaves)  # each leaf's results

    def of_parts(parts):
        return [*zip(*function(parts), strict=True)]

    for (_, shared), members in _alike(tree, layout).items():
        sharded = [specs[index] for index in members]
        mapped = jax.shard_map(
            functools.partial(_of_pieces, of_parts, shared) if shared else of_parts,
            in_specs=(sharded,),
            out_specs=sharded,
            axis_names=set(layout.axes),
            check_vma=False,
        )
        found = mapped([leaves[index] for index in members])
        for index, each in zip(members, found, strict=True):
            of_leaves[index] = each
    return tuple(map(structure.unflatten, zip(*of_leaves, strict=True)))


def _of_pieces(function, shared: tuple[str, ...], parts: list) -> list:
    """Calls a function on this device's pieces of parts that `shared` axes share."""
    devices = lax.axis_size(shared)

    def piece(x):
        pieces = jnp.pad(x.reshape(-1), (0, -x.size % devices)).reshape(devices, -1)
        return lax.dynamic_index_in_dim(pieces, lax.axis_index(shared), keepdims=False)

    def joined(found, x):
        whole = lax.all_gather(found, shared, tiled=True)
        return whole[: x.size].reshape(x.shape)

    results = zip(function([piece(x) for x in parts]), parts, strict=True)
    return [tuple(joined(found, x) for found in result) for result, x in results]
