"""Communication over the replica axis."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from curvadion_jax import _within_replica
from curvadion_jax._collectives._axes import axes_of, axis_size, is_checked, vary
from curvadion_jax._layout import ONE_DEVICE, Layout
from curvadion_jax._protocols import Group

# Bytes: over 1 Gbit/s an array takes less time than a message from one site to another.
_SMALL = 2**20
# Of arrays that travel together, but for the last of them.
_MESSAGE = 2**24


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The :class:`Group` over an axis; results are marked as varying over it.

    Attributes:
      axis_name: replica axis; None is one replica, which sends nothing.
      layout: how arrays lie within a replica.
    """

    axis_name: str | None = None
    layout: Layout = ONE_DEVICE

    @property
    def size(self) -> int:
        return axis_size(self.axis_name)

    @property
    def replica(self) -> jax.Array | int:
        return 0 if self.axis_name is None else lax.axis_index(self.axis_name)

    def laid_out(self, layout: Layout) -> "Replicas":
        return dataclasses.replace(self, layout=layout)

    def mean(self, tree: Any) -> Any:
        if self.axis_name is None:
            return tree
        leaves, structure = jax.tree.flatten(vary(tree, self.axis_name))
        wide = [x.astype(jnp.promote_types(x, jnp.float32)) for x in leaves]
        sums = self._sums(jax.tree.unflatten(structure, wide))
        means = [
            (total / self.size).astype(x.dtype)
            for total, x in zip(sums, leaves, strict=True)
        ]
        return vary(jax.tree.unflatten(structure, means), self.axis_name)

    def all_to_all(self, tree: Any) -> Any:
        return self._each(lambda x: lax.all_to_all(x, self.axis_name, 0, 0), tree)

    def all_gather(self, tree: Any) -> Any:
        if self.axis_name is None:
            return jax.tree.map(lambda x: x[None], tree)
        return self._each(lambda x: lax.all_gather(x, self.axis_name), tree)

    def by_device(
        self, function: Callable[[Group, list], list], tree: Any
    ) -> list[tuple[jax.Array, ...]]:
        leaves = jax.tree.leaves(vary(tree, self.axis_name))
        if not self.layout.axes:
            return function(self, leaves)
        self.layout.check_known()
        specs = self.layout.specs(tree, by_shape=True)
        specs = [spec or PartitionSpec() for spec in specs]
        alone = self.laid_out(ONE_DEVICE)
        return _within_replica.by_device(
            lambda parts: function(alone, parts), leaves, specs, self.layout
        )

    def _each(self, collective: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
        if self.axis_name is None:
            return tree
        tree = jax.tree.map(collective, vary(tree, self.axis_name))
        return vary(tree, self.axis_name)

    def _sums(self, tree: Any) -> list[jax.Array]:
        """Sums of varying arrays, each element sent once where it can be seen how."""
        leaves, layout = jax.tree.leaves(tree), self.layout
        specs = layout.specs(tree, by_shape=False) if layout.axes else []
        cut = {
            index: (leaves[index], spec)
            for index, spec in enumerate(specs)
            if spec is not None
            and _within_replica.shared_by(leaves[index], spec, layout)
        }
        rest = [x for index, x in enumerate(leaves) if index not in cut]
        found = iter(_summed(rest, self.axis_name, together=not layout.axes))
        pieces = iter(())
        if cut:
            arrays, divisions = zip(*cut.values(), strict=True)
            of_parts = lambda parts: [  # noqa: E731
                (x,) for x in _summed(parts, self.axis_name, together=True)
            ]
            pieces = iter(
                _within_replica.by_device(of_parts, arrays, divisions, layout)
            )
        return [
            next(pieces)[0] if index in cut else next(found)
            for index in range(len(leaves))
        ]


def _summed(leaves: list, axis_name: str | None, together: bool) -> list[jax.Array]:
    """Sums over the replicas; small arrays travel together.

    On CPUs the arrays of an all-reduce are sent one after another, and on a long link
    each costs two round trips. Not where the compiler divides arrays inside a replica:
    it would gather them.
    """
    results = list(leaves)
    for indices in _messages(leaves) if together else ([i] for i in range(len(leaves))):
        parts = [leaves[index] for index in indices]
        if len(parts) == 1:
            sums = [lax.psum(parts[0], axis_name)]
        else:
            message = jnp.concatenate([x.reshape(-1) for x in parts])
            ends = itertools.accumulate(x.size for x in parts)
            sums = jnp.split(lax.psum(message, axis_name), list(ends)[:-1])
        for index, x, total in zip(indices, parts, sums, strict=True):
            results[index] = total.reshape(x.shape)
    return results


def _messages(leaves: list[jax.Array]) -> Iterable[list[int]]:
    """Which arrays travel together: those of a dtype that vary over the same axes."""
    messages, sizes = defaultdict(list), defaultdict(int)
    for index, x in enumerate(leaves):
        size, kind = x.size * x.dtype.itemsize, (x.dtype, axes_of(x))
        if size > _SMALL:
            kind = index
        messages[kind, sizes[kind] // _MESSAGE].append(index)
        sizes[kind] += size
    return messages.values()


def gathered(x: jax.Array, axis_name: str | None) -> jax.Array:
    """One number of each replica [N], the same on all of them by its type."""
    if axis_name is None:
        return jnp.reshape(x, 1)
    to = "invarying" if is_checked(axis_name) else "varying"
    return lax.all_gather(vary(x, axis_name), axis_name, to=to)


def largest(number: jax.Array, axis_name: str | None) -> jax.Array:
    """The largest of the replicas' numbers, int32[]: one int32 scalar all-reduce.

    Integers, because a float maximum drops NaN in shard_map on CPU.
    """
    if axis_name is None:
        return number
    return lax.pmax(vary(number, axis_name), axis_name)
