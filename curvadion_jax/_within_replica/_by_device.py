"""Lets every device of a replica work on its own parts of arrays."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from curvadion_jax._layout import Layout, named_axes

# An array of fewer elements a device is sent whole by each: putting it together again
# is another message inside the replica.
_LEAST_PIECE = 256


def shared_by(x: Any, spec: PartitionSpec, layout: Layout) -> tuple[str, ...]:
    """Inner axes whose devices hold the same part, of which each takes a piece."""
    named = named_axes(spec)
    enough = x.size >= math.prod(layout.axes.values()) * _LEAST_PIECE
    return tuple(axis for axis in layout.axes if enough and axis not in named)


def by_device(
    function: Callable[[list[jax.Array]], list[tuple[jax.Array, ...]]],
    leaves: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    layout: Layout,
) -> list[tuple[jax.Array, ...]]:
    """What the function returns for the devices' own parts of arrays, put together.

    Args:
      function: takes parts to a tuple of arrays like each. Called once for all arrays
        that are divided over the same axes. Of a part that several devices hold, it
        gets the device's piece, in one dimension.
      leaves: arrays.
      specs: how each is divided over inner axes.
      layout: the inner axes.
    """
    together = defaultdict(list)
    for index, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        together[named_axes(spec), shared_by(leaf, spec, layout)].append(index)
    results: list[Any] = [None] * len(leaves)
    for (_, shared), members in together.items():
        divided = [specs[index] for index in members]
        mapped = jax.shard_map(
            functools.partial(_of_pieces, function, shared) if shared else function,
            in_specs=(divided,),
            out_specs=divided,
            axis_names=set(layout.axes),
        )
        found = mapped([leaves[index] for index in members])
        for index, each in zip(members, found, strict=True):
            results[index] = each
    return results


def _of_pieces(function, shared: tuple[str, ...], parts: list) -> list:
    number = lax.axis_size(shared)

    def piece(x):
        pieces = jnp.pad(x.reshape(-1), (0, -x.size % number)).reshape(number, -1)
        return lax.dynamic_index_in_dim(pieces, lax.axis_index(shared), keepdims=False)

    def joined(found, x):
        whole = lax.all_gather(found, shared, tiled=True, to="invarying")
        return whole[: x.size].reshape(x.shape)

    results = zip(function([piece(x) for x in parts]), parts, strict=True)
    return [tuple(joined(found, x) for found in result) for result, x in results]
