"""Talks inside a replica of several devices, over its automatic axes."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from curvadion_jax import _sharding

# An array of fewer elements a device is sent whole by each: putting it together again
# is another message inside the replica.
_LEAST_PIECE = 256


def shared_by(x: Any, spec: PartitionSpec, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Inner axes whose devices hold the same part, of which each takes a piece."""
    named = _sharding.named_axes(spec)
    enough = x.size >= math.prod(axes.values()) * _LEAST_PIECE
    return tuple(axis for axis in axes if enough and axis not in named)


def by_device(
    function: Callable[[list[jax.Array], Any], list[tuple[jax.Array, ...]]],
    leaves: Sequence[jax.Array],
    specs: Sequence[PartitionSpec],
    known: Any = None,
) -> list[tuple[jax.Array, ...]]:
    """What the function returns for the devices' own parts of arrays, put together.

    Args:
      function: takes parts to a tuple of arrays like each. Called once for all arrays
        that are divided over the same axes. Of a part that several devices hold, it
        gets the device's piece, in one dimension. Its last argument is `known`.
      leaves: arrays.
      specs: how each is divided over inner axes.
      known: tree of arrays that all devices of the replica have.
    """
    axes = _sharding.inner_axes()
    together = defaultdict(list)
    for index, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        shared = shared_by(leaf, spec, axes)
        together[_sharding.named_axes(spec), shared].append(index)
    results: list[Any] = [None] * len(leaves)
    for (_, shared), members in together.items():
        divided = [specs[index] for index in members]
        mapped = jax.shard_map(
            functools.partial(_of_pieces, function, shared) if shared else function,
            in_specs=(divided, PartitionSpec()),
            out_specs=divided,
            axis_names=set(axes),
        )
        found = mapped([leaves[index] for index in members], known)
        for index, each in zip(members, found, strict=True):
            results[index] = each
    return results


def _of_pieces(function, shared: tuple[str, ...], parts: list, known: Any) -> list:
    number = lax.axis_size(shared)

    def piece(x):
        pieces = jnp.pad(x.reshape(-1), (0, -x.size % number)).reshape(number, -1)
        return lax.dynamic_index_in_dim(pieces, lax.axis_index(shared), keepdims=False)

    def joined(found, x):
        whole = lax.all_gather(found, shared, tiled=True, to="invarying")
        return whole[: x.size].reshape(x.shape)

    results = zip(function([piece(x) for x in parts], known), parts, strict=True)
    return [tuple(joined(found, x) for found in result) for result, x in results]
