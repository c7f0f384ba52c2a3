"""Talks over the replica axis."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from curvadion_jax import _sharding
from curvadion_jax._collectives import _devices
from curvadion_jax._collectives._axes import (
    axes_of,
    axis_size,
    is_checked,
    is_varying,
    vary,
)
from curvadion_jax._group import Group, brought, chosen, single

# Bytes: over 1 Gbit/s an array takes less time than a message from one site to another.
_SMALL = 2**20
# Of arrays that travel together, but for the last of them.
_MESSAGE = 2**24


def mean(tree: Any, axis_name: str | None, weights: jax.Array | None = None) -> Any:
    """Mean over replicas of every array, in at least float32, cast back.

    Args:
      tree: arrays.
      axis_name: replica axis.
      weights: float32[N], one for each replica; what one of weight 0 has does not
        matter, NaN included. All zero gives 0. None weighs all alike.
    """
    if axis_name is None:
        return tree
    leaves, structure = jax.tree.flatten(vary(tree, axis_name))
    wide = [x.astype(jnp.promote_types(x, jnp.float32)) for x in leaves]
    means = _means(jax.tree.unflatten(structure, wide), axis_name, weights)
    cast = [new.astype(x.dtype) for new, x in zip(means, leaves, strict=True)]
    return jax.tree.unflatten(structure, cast)


def _means(tree: Any, axis_name: str, weights: jax.Array | None) -> list[jax.Array]:
    """Means of varying arrays, each element sent once where it can be seen how."""
    leaves, axes = jax.tree.leaves(tree), _sharding.inner_axes()
    specs = _sharding.specs(tree, axes, by_shape=False) if axes else []
    cut = {
        index: (leaves[index], spec)
        for index, spec in enumerate(specs)
        if spec is not None and _devices.shared_by(leaves[index], spec, axes)
    }
    rest = {index: x for index, x in enumerate(leaves) if index not in cut}
    means = _weighted(rest, axis_name, weights)
    if cut:
        arrays, divisions = zip(*cut.values(), strict=True)
        found = _devices.by_device(
            lambda parts, weights: [(x,) for x in _weighted(parts, axis_name, weights)],
            arrays,
            divisions,
            weights,
        )
        means |= {index: x for index, (x,) in zip(cut, found, strict=True)}
    return [means[index] for index in range(len(leaves))]


def _weighted(tree: Any, axis_name: str, weights: jax.Array | None) -> Any:
    if weights is None:
        number = axis_size(axis_name)
        return jax.tree.map(lambda x: x / number, _summed(tree, axis_name))
    own, total = weights[lax.axis_index(axis_name)], jnp.sum(weights)
    total = jnp.where(total > 0, total, 1)
    weighted = jax.tree.map(functools.partial(brought, own), tree)
    summed = _summed(weighted, axis_name)
    return jax.tree.map(lambda x: x / total.astype(x.dtype), summed)


def _summed(tree: Any, axis_name: str) -> Any:
    """Sums over the replicas; small arrays travel together.

    On CPUs the arrays of an all-reduce are sent one after another, and on a long link
    each costs two round trips. Not where the compiler divides arrays inside a replica:
    it would gather them.
    """
    leaves, structure = jax.tree.flatten(tree)
    for indices in _messages(leaves):
        parts = [leaves[index] for index in indices]
        if len(parts) == 1:
            sums = [lax.psum(parts[0], axis_name)]
        else:
            message = jnp.concatenate([x.reshape(-1) for x in parts])
            ends = itertools.accumulate(x.size for x in parts)
            sums = jnp.split(lax.psum(message, axis_name), list(ends)[:-1])
        for index, x, total in zip(indices, parts, sums, strict=True):
            leaves[index] = total.reshape(x.shape)
    return jax.tree.unflatten(structure, leaves)


def _messages(leaves: list[jax.Array]) -> Iterable[list[int]]:
    """Which arrays travel together: those of a dtype that vary over the same axes."""
    if _sharding.inner_axes():
        return [[index] for index in range(len(leaves))]
    messages, sizes = defaultdict(list), defaultdict(int)
    for index, x in enumerate(leaves):
        size, kind = x.size * x.dtype.itemsize, (x.dtype, axes_of(x))
        if size > _SMALL:
            kind = index
        messages[kind, sizes[kind] // _MESSAGE].append(index)
        sizes[kind] += size
    return messages.values()


def group(
    axis_name: str | None,
    weight: jax.typing.ArrayLike = 1.0,
    healthy: jax.typing.ArrayLike = True,
) -> Group:
    """What a synchronizer may do over the axis.

    Results are marked as varying, for code whose conditions mix them with local state.

    Args:
      axis_name: replica axis.
      weight: how much this replica counts, float32[], 0 if it does later, and below 0
        if what it has is lost; a Python number is that of all.
      healthy: see `Group`.
    """
    if axis_name is None:
        return single(weight, healthy)
    if isinstance(weight, int | float):
        given = jnp.full(axis_size(axis_name), weight, jnp.float32)
    else:
        given = _gathered(jnp.asarray(weight, jnp.float32), axis_name)
    known = (jnp.maximum(given, 0), given >= 0)
    return _group(axis_name, *known, vary(jnp.asarray(healthy), axis_name))


def _gathered(x: jax.Array, axis_name: str) -> jax.Array:
    """One number of each replica, the same on all by its type."""
    to = "invarying" if is_checked(axis_name) else "varying"
    return lax.all_gather(vary(x, axis_name), axis_name, to=to)


def _group(
    axis_name: str, weights: jax.Array, expected: jax.Array, healthy: jax.Array
) -> Group:
    def over(collective):
        def apply(tree):
            tree = vary(tree, axis_name)
            return vary(jax.tree.map(collective, tree), axis_name)

        return apply

    return Group(
        size=axis_size(axis_name),
        replica=lax.axis_index(axis_name),
        weights=weights,
        expected=expected,
        healthy=healthy,
        mean=lambda tree: vary(mean(tree, axis_name, weights), axis_name),
        all_to_all=over(lambda x: lax.all_to_all(x, axis_name, 0, 0)),
        all_gather=over(lambda x: lax.all_gather(x, axis_name)),
        by_device=functools.partial(
            _by_device, axis_name, (weights, expected, healthy)
        ),
        if_anybody=functools.partial(chosen, jnp.any(weights > 0)),
    )


def _by_device(
    axis_name: str, known: Any, function: Callable[[Group, list], list], tree: Any
) -> list:
    """See `Group.by_device`."""
    leaves, axes = jax.tree.leaves(vary(tree, axis_name)), _sharding.inner_axes()
    if not axes:
        return function(_group(axis_name, *known), leaves)
    _sharding.check_noted()
    specs = [spec or PartitionSpec() for spec in _sharding.specs(tree, axes)]
    # The group is made where it is used: its arrays belong to that place.
    return _devices.by_device(
        lambda parts, known: function(_group(axis_name, *known), parts),
        leaves,
        specs,
        known,
    )


def largest(
    number: jax.Array, axis_name: str | None, asked: jax.Array | None = None
) -> jax.Array:
    """The largest of the replicas' numbers, int32[]: one int32 scalar all-reduce.

    Integers, because a float maximum drops NaN in shard_map on CPU.

    Args:
      number: that of one replica.
      axis_name: replica axis.
      asked: bool[], the same on all replicas; where it is false nothing is reduced, and
        the answer is 0. None always asks.

    Raises:
      ValueError: if `asked` may differ between replicas.
    """
    if axis_name is not None and asked is not None and is_varying(asked, axis_name):
        raise ValueError(
            f"the step differs between the replicas of axis {axis_name!r}; some would "
            "wait for ever for the others. A counter in the state cannot be seen to be "
            "the same on all of them: give them the number of the step from outside, "
            "as a further argument of the function that replicas.step returns, "
            "train(state, batch, step)"
        )

    def reduce(number):
        if axis_name is None:
            return number
        return lax.pmax(vary(number, axis_name), axis_name)

    if asked is None:
        return reduce(number)
    return lax.cond(asked, reduce, lambda _: jnp.zeros([], jnp.int32), number)
