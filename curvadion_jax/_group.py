"""What may be done across replicas, for parts that know no axis."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from curvadion_jax import _health


class Group(NamedTuple):
    """The replicas of a sync, as one of them sees them. All functions communicate.

    Attributes:
      size: number of replicas N, an int.
      replica: which of them this one is, int32[]. Replica-varying.
      weights: float32[N], how much each replica counts in this sync; 0 is one that
        takes no part, and what it has may be anything, NaN included. The same on all
        replicas. All zero if none takes part: then means are 0.
      expected: bool[N], which replicas take part or hold back what they have for a
        later sync; of the others it is lost. The same on all replicas.
      healthy: bool[], whether what this replica has is finite. Replica-varying.
      mean: tree of arrays -> tree of their means over the replicas, weighted, computed
        in at least float32; an all-reduce.
      all_to_all: tree of arrays [N, ...] -> the same shapes: part k goes to replica k,
        and part k of the result came from replica k.
      all_gather: tree of arrays [...] -> tree of [N, ...], part k is replica k's.
      by_device: (function, tree) -> what ``function(group, leaves)`` returns: for every
        leaf of the tree a tuple of arrays like it. Where a replica has several devices,
        each of them calls it with its own parts of the leaves, and the group to use
        there; once for all leaves that are divided over the same axes. So taking an
        array apart moves nothing inside the replica. Of a part that several devices
        hold, each gets a piece, in one dimension, and the results are put together
        inside the replica: nothing crosses between replicas twice. Results must have
        the shapes of what the function was given.
      if_anybody: (function, trees...) -> what ``function(*trees)`` returns, a tuple of
        as many trees of the same shapes and dtypes, or the trees as they are where no
        replica takes part in the sync.

    Example:
      >>> alone = single()
      >>> alone.mean({"w": jax.numpy.ones(2)})["w"].tolist(), alone.size
      ([1.0, 1.0], 1)
    """

    size: int
    replica: jax.Array | int
    weights: jax.Array
    expected: jax.Array
    healthy: jax.Array
    mean: Callable[[Any], Any]
    all_to_all: Callable[[Any], Any]
    all_gather: Callable[[Any], Any]
    by_device: Callable[[Callable[[Any, list], list], Any], list]
    if_anybody: Callable[..., tuple[Any, ...]]

    @property
    def present(self) -> jax.Array:
        """Whether this replica takes part, bool[]. Replica-varying."""
        return self.weights[self.replica] > 0

    @property
    def share(self) -> jax.Array:
        """Of those who are expected how many take part, float32[].

        What comes later from the others is as much as what came from these now: a mean
        that they are going to add to counts them already.
        """
        number = jnp.maximum(jnp.sum(self.expected), 1)
        there = jnp.sum(self.expected & (self.weights > 0))
        return there / number

    @property
    def anybody(self) -> jax.Array:
        """Whether any replica takes part, bool[]."""
        return jnp.any(self.weights > 0)

    @property
    def joins(self) -> jax.Array:
        """Whether this replica takes over what the others have, bool[].

        If it takes part, or has nothing of its own that is worth keeping.
        """
        return self.present | ~self.healthy

    @property
    def total(self) -> jax.Array:
        """Sum of the weights, 1 if none takes part, float32[]; to divide by."""
        total = jnp.sum(self.weights)
        return jnp.where(total > 0, total, 1)

    def finite(self, tree: Any) -> Any:
        """What this replica has, zeros where that is not finite."""
        return _health.or_zeros(self.healthy, tree)


def brought(weight: jax.Array, x: jax.Array) -> jax.Array:
    """What goes into a sum over replicas: x times its weight, 0 where that is 0."""
    return jnp.where(weight > 0, weight.astype(x.dtype) * x, 0)


def single(
    weight: jax.typing.ArrayLike = 1.0, healthy: jax.typing.ArrayLike = True
) -> Group:
    """One replica, which sends nothing."""
    given = jnp.asarray(weight, jnp.float32).reshape(1)
    return Group(
        size=1,
        replica=0,
        weights=jnp.maximum(given, 0),
        expected=given >= 0,
        healthy=jnp.asarray(healthy),
        mean=lambda tree: _health.or_zeros(given[0] > 0, tree),
        all_to_all=lambda tree: tree,
        all_gather=lambda tree: jax.tree.map(lambda x: x[None], tree),
        by_device=lambda function, tree: function(
            single(weight, healthy), jax.tree.leaves(tree)
        ),
        if_anybody=functools.partial(chosen, jnp.any(given > 0)),
    )


def chosen(
    anybody: jax.Array, function: Callable[..., tuple[Any, ...]], *before: Any
) -> tuple[Any, ...]:
    """`Group.if_anybody` without a conditional."""
    return _health.where(anybody, function(*before), before)
