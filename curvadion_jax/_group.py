"""What replicas may do together at a sync."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from curvadion_jax import _trees, _within_replica
from curvadion_jax._layout import ONE_DEVICE, Layout


@dataclasses.dataclass(frozen=True)
class Group:
    """All replicas, as one of them sees them at a sync.

    Every method communicates, and works on arrays of one replica. A mean is over all N
    replicas: one that takes no part contributes zeros, and its residual.

    Attributes:
      axis_name: the replica axis; None is one replica, which sends nothing.
      layout: how the parameters of a replica lie on its devices.
    """

    axis_name: str | None = None
    layout: Layout = ONE_DEVICE

    @property
    def size(self) -> int:
        """Number of replicas N."""
        return 1 if self.axis_name is None else lax.axis_size(self.axis_name)

    @property
    def replica(self) -> jax.Array | int:
        """Which of them this one is, int32[]."""
        return 0 if self.axis_name is None else lax.axis_index(self.axis_name)

    def mean(self, tree: Any) -> Any:
        """Means over the replicas, in at least float32, cast back; an all-reduce."""
        if self.size == 1:  # XLA may fail to compile an all-reduce of one
            return tree
        sums = self._sums(jax.tree.map(_trees.wide, tree))
        return jax.tree.map(lambda s, x: (s / self.size).astype(x.dtype), sums, tree)

    def first(self, tree: Any) -> Any:
        """The first replica's arrays, on all of them; an all-reduce."""
        if self.size == 1:
            return tree
        is_first = self.replica == 0
        return self._sums(jax.tree.map(lambda x: jnp.where(is_first, x, 0), tree))

    def any(self, request: jax.Array) -> jax.Array:
        """Whether any replica says so, bool[]; an all-reduce of one int32."""
        if self.axis_name is None:
            return request
        # An integer: on a CPU a maximum of floats drops NaN.
        return lax.pmax(request.astype(jnp.int32), self.axis_name) > 0

    def all_to_all(self, tree: Any) -> Any:
        """Arrays [N, ...]: part k goes to replica k, and part k is from replica k."""
        if self.size == 1:
            return tree
        return jax.tree.map(lambda x: lax.all_to_all(x, self.axis_name, 0, 0), tree)

    def all_gather(self, tree: Any) -> Any:
        """Arrays [...] as [N, ...], of which part k is replica k's."""
        if self.size == 1:
            return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
        return jax.tree.map(lambda x: lax.all_gather(x, self.axis_name), tree)

    def of_factors(self, factors: Any, made_of: Any) -> "Group":
        """The same replicas, for factors of matrices, by the paths of parameters."""
        return Group(self.axis_name, self.layout.of_factors(factors, made_of))

    def by_device(
        self, function: Callable[["Group", Any], list], tree: Any
    ) -> list[tuple[jax.Array, ...]]:
        """What ``function(group, tree)`` returns, for every device's part of the tree.

        For each leaf that is a tuple of arrays of its shape. Where a replica has
        several devices, each calls the function with a list of its own parts, and the
        group to use there (see `_within_replica.by_device`). So taking an array apart
        moves nothing inside, and nothing crosses between replicas twice.
        """
        if self.size == 1 or not self.layout.axes:
            return function(self, tree)
        run = functools.partial(function, Group(self.axis_name))
        return _within_replica.by_device(run, tree, self.layout)

    def _sums(self, tree: Any) -> Any:
        """Sums over the replicas. What several devices hold is sent in pieces, once."""
        psum = functools.partial(lax.psum, axis_name=self.axis_name)
        if not self.layout.axes:
            return psum(tree)
        one_each = lambda parts: [(total,) for total in psum(parts)]
        sums = _within_replica.by_device(one_each, tree, self.layout)
        return jax.tree.unflatten(jax.tree.structure(tree), [x for (x,) in sums])
