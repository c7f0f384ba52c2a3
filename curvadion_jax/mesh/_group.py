"""What replicas do together at a sync: who takes part, and how much each counts.

`_step` says who is able to.

* *Excluded*: a replica with a NaN or an infinity in its parameters, its inner state or
  its residual. It contributes nothing, its residual becomes zeros, and an inner state
  that is not finite begins again. So is one with such gradients, where these are
  averaged: it contributes its residual alone.
* *Absent*: a replica of weight 0. It contributes only the residual that it had before,
  and keeps its drift for a later sync.
* If no replica takes part, nothing moves.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from curvadion_jax import _dtypes, _trees
from curvadion_jax.mesh import _within_replica
from curvadion_jax.mesh._layout import ONE_DEVICE, Layout


@dataclasses.dataclass(frozen=True)
class Group:
    """All replicas, as one of them sees them at a sync.

    Methods work on arrays of one replica. All but `own_keys` and `of_factors` send. A
    mean is over all N replicas: one that takes no part contributes zeros, and its
    residual.

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

    def own_keys(self, tree: Any) -> Any:
        """Gives this replica random keys of its own, made of those that all have."""
        if self.axis_name is None:
            return tree

        def own(x):
            if not _trees.is_key(x):
                return x
            fold = jax.vmap(jax.random.fold_in, (0, None))
            return fold(x.reshape(-1), self.replica).reshape(x.shape)

        return jax.tree.map(own, tree)

    def mean(self, tree: Any) -> Any:
        """Means over the replicas, in at least float32, cast back; an all-reduce."""
        if self.size == 1:  # XLA may fail to compile an all-reduce of one
            return tree
        sums = self._sums(jax.tree.map(_dtypes.at_least_float32, tree))
        return jax.tree.map(lambda s, x: (s / self.size).astype(x.dtype), sums, tree)

    def first(self, tree: Any) -> Any:
        """The first replica's arrays, on all of them; an all-reduce."""
        if self.size == 1:
            return tree
        is_first = self.replica == 0
        return self._sums(jax.tree.map(lambda x: jnp.where(is_first, x, 0), tree))

    def any(self, request: jax.Array) -> jax.Array:
        """Whether any replica says so, bool[]; an all-reduce of one int32."""
        if self.size == 1:
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

    def of_factors(self, made_of: Any) -> Group:
        """The same replicas, for factors of matrices, by the paths of parameters."""
        return Group(self.axis_name, self.layout.of_factors(made_of))

    def _sums(self, tree: Any) -> Any:
        """Sums over the replicas. What several devices hold is sent in pieces, once."""
        psum = functools.partial(lax.psum, axis_name=self.axis_name)
        if not self.layout.is_divided:
            return psum(tree)
        of_parts = lambda parts: (psum(parts),)
        return _within_replica.by_device(of_parts, tree, self.layout)[0]


class Part(NamedTuple):
    """One replica's part in a sync: how much it counts, and how to average.

    Attributes:
      group: all replicas, for what they send.
      weight: float32[], weight of this replica in means; 0 if it takes no part. Weights
        have a mean of 1 over the replicas, so that `group.mean` of weight times x is
        the weighted mean.
      share_present: float32[], replicas that take part over those that are not
        excluded. Multiply a mean by it if absent replicas will add their part later:
        over those present, the drift of one that takes part every second time would
        count twice.
      someone: bool[], whether any replica takes part.
    """

    group: Group
    weight: jax.Array | float = 1.0
    share_present: jax.Array | float = 1.0
    someone: jax.Array | bool = True

    @property
    def present(self) -> jax.Array:
        """Whether this replica takes part, bool[]."""
        return jnp.asarray(self.weight) > 0

    def weighted(self, tree: Any) -> Any:
        """Multiplies arrays by the weight, in at least float32.

        The result is zero, whatever is in the tree, if this replica takes no part.
        """

        def contribution(x):
            x = _dtypes.at_least_float32(x)
            return jnp.where(self.present, jnp.asarray(self.weight, x.dtype) * x, 0)

        return jax.tree.map(contribution, tree)

    def mean(self, tree: Any, group: Group | None = None) -> Any:
        """The weighted mean over participating replicas, in the dtypes of the tree."""
        means = (group or self.group).mean(self.weighted(tree))
        return jax.tree.map(lambda m, x: m.astype(x.dtype), means, tree)


def take_part(group: Group, weight: jax.Array, able: jax.Array) -> Part:
    """Finds out who takes part in a sync, by gathering one number of each replica.

    `able` says whether this replica is finite, as far as a sync needs it.
    """
    own = jnp.where(able, weight, -1)  # -1 is excluded
    weights = group.all_gather(own)
    awaited = jnp.sum(weights >= 0)  # of those that are not excluded
    # In units of the largest, so that the sum does not overflow.
    unit = jnp.where(jnp.any(weights > 0), jnp.max(weights), 1)
    own, weights = own / unit, weights / unit
    present = weights > 0
    mean = jnp.sum(jnp.where(present, weights, 0)) / weights.size
    return Part(
        group=group,
        weight=jnp.where(own > 0, own, 0) / jnp.where(mean > 0, mean, 1),
        share_present=jnp.sum(present) / jnp.maximum(awaited, 1),
        someone=jnp.any(present),
    )


def checked_weight(weight: Any, like: jax.Array) -> jax.Array:
    """The weights of the replicas; 0 where one is not finite, or negative."""
    if weight is None:
        return jnp.ones_like(like, jnp.float32)
    given = jnp.asarray(weight, jnp.float32)  # 2**40 tokens are more than int32 holds
    if given.shape != like.shape:
        raise ValueError(
            f"weight has shape {given.shape}, and must be {like.shape}: one number for "
            "each replica, such as the tokens in its batch."
        )
    return jnp.where(jnp.isfinite(given) & (given > 0), given, 0)
