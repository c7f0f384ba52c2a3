"""All communication between replicas in a training step.

Everything takes `axis_name: str | None`; None is one replica, for which every reduction
is the identity. First what JAX knows of which arrays differ, then what communicates.
What moves between the devices of one replica is in `_within_replica`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvadion_jax import _trees, _within_replica
from curvadion_jax._jax_internals import varying
from curvadion_jax._layout import ONE_DEVICE, Layout


def is_checked(axis_name: str | None) -> bool:
    """Whether JAX tracks here what differs over the axis (shard_map, check_vma on)."""
    return is_manual(axis_name) and axis_name in varying(lax.axis_index(axis_name))


def is_manual(axis_name: str | None) -> bool:
    """Whether the axis is one of an enclosing shard_map (and not of a vmap)."""
    return axis_name in jax.sharding.get_abstract_mesh().manual_axes


def vary(tree: Any, axis_name: str | None) -> Any:
    """Marks every array as one that may differ over the axis; no communication."""
    if axis_name is None or not is_checked(axis_name):
        return tree
    axes = [frozenset([axis_name])] * len(jax.tree.leaves(tree))
    return vary_over(tree, axes)


def vary_over(tree: Any, axes: Sequence[frozenset[str]]) -> Any:
    """Marks every array as one that may differ over these axes; no communication."""

    def cast(x, wanted):
        missing = tuple(wanted - varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(map(cast, leaves, axes))


@dataclasses.dataclass(frozen=True)
class Group:
    """What may be done across replicas, for parts that know no axis.

    All methods communicate, and all replicas must call them in the same order. Results
    are marked as varying over the axis. A mean is over all N replicas: one that takes
    no part contributes zeros (`LocalStep.weighted`), and its residual.

    Attributes:
      axis_name: replica axis; None is one replica, which sends nothing.
      layout: how the arrays of a replica lie on its devices.
    """

    axis_name: str | None = None
    layout: Layout = ONE_DEVICE

    @property
    def size(self) -> int:
        """Number of replicas N."""
        return 1 if self.axis_name is None else lax.axis_size(self.axis_name)

    @property
    def replica(self) -> jax.Array | int:
        """Which of them this one is, int32[]. Replica-varying."""
        return 0 if self.axis_name is None else lax.axis_index(self.axis_name)

    def laid_out(self, layout: Layout) -> "Group":
        """The same replicas, for arrays that lie otherwise, such as factors."""
        return dataclasses.replace(self, layout=layout)

    def mean(self, tree: Any) -> Any:
        """Means over the replicas, in at least float32, cast back; an all-reduce."""
        tree = vary(tree, self.axis_name)
        if self.size == 1:  # XLA may fail to compile an all-reduce of one
            return tree
        sums = self._sums(jax.tree.map(_trees.wide, tree))
        mean = lambda total, x: (total / self.size).astype(x.dtype)
        return vary(jax.tree.map(mean, sums, tree), self.axis_name)

    def all_to_all(self, tree: Any) -> Any:
        """Arrays [N, ...]: part k goes to replica k, and part k is from replica k."""
        return self._each(lambda x: lax.all_to_all(x, self.axis_name, 0, 0), tree)

    def all_gather(self, tree: Any) -> Any:
        """Arrays [...] as [N, ...], of which part k is replica k's."""
        if self.size == 1:
            return jax.tree.map(lambda x: x[None], vary(tree, self.axis_name))
        return self._each(lambda x: lax.all_gather(x, self.axis_name), tree)

    def by_device(
        self, function: Callable[["Group", Any], list], tree: Any
    ) -> list[tuple[jax.Array, ...]]:
        """What ``function(group, tree)`` returns, for every device's part of the tree.

        For each leaf that is a tuple of arrays of its shape. Where a replica has
        several devices, each calls the function with lists of its own parts, and the
        group to use there (see `_within_replica.by_device`). So taking an array apart
        moves nothing inside, and nothing crosses between replicas twice. Arrays whose
        sharding is unknown are gathered.
        """
        tree = vary(tree, self.axis_name)
        if self.size == 1 or not self.layout.axes:
            return function(self, tree)
        run = functools.partial(function, self.laid_out(ONE_DEVICE))
        return _within_replica.by_device(run, tree, self.layout)

    def _each(self, collective: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
        tree = vary(tree, self.axis_name)
        if self.size == 1:
            return tree
        return vary(jax.tree.map(collective, tree), self.axis_name)

    def _sums(self, tree: Any) -> Any:
        """Sums of varying arrays. What several devices hold is sent in pieces, once."""
        psum = functools.partial(lax.psum, axis_name=self.axis_name)
        if not self.layout.placed:  # the compiler divides the sums
            return psum(tree)
        one_each = lambda parts: [(total,) for total in psum(parts)]
        sums = _within_replica.by_device(one_each, tree, self.layout)
        return jax.tree.unflatten(jax.tree.structure(tree), [x for (x,) in sums])


def gathered(x: jax.Array, axis_name: str | None) -> jax.Array:
    """One number of each replica [N], the same on all of them by its type."""
    if axis_name is None:
        return jnp.reshape(x, 1)
    to = "invarying" if is_checked(axis_name) else "varying"
    return lax.all_gather(vary(x, axis_name), axis_name, to=to)


def any_replica_requests(flag: jax.Array, axis_name: str | None) -> jax.Array:
    """Whether any replica says so, bool[]: one int32 scalar all-reduce.

    An integer, because a float maximum drops NaN in shard_map on CPU.
    """
    if axis_name is None:
        return flag
    return lax.pmax(vary(flag.astype(jnp.int32), axis_name), axis_name) > 0
