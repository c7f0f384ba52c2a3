"""Who takes part in a sync, and how much each replica counts.

* *Excluded*: a replica with a NaN or an infinity in its parameters, its inner state or
  its residual (or in its gradients, where these are what is averaged). It contributes
  nothing. An inner state that is not finite begins again as at the anchor.
* *Absent*: a replica of weight 0. It contributes only the residual that it had before,
  and keeps its drift for a later sync.
* If no replica takes part, nothing moves.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from curvadion_jax import _finite, _momentum, _power_iteration
from curvadion_jax._group import Group
from curvadion_jax._trees import like, plus, wide
from curvadion_jax.compressors import Compressor


class Part(NamedTuple):
    """One replica's part in a sync: how much it counts, and how to average.

    Attributes:
      group: all replicas, for what they send.
      weight: float32[], weight of this replica in means; 0 if it takes no part. Weights
        have a mean of 1 over the replicas, so that `group.mean` of weight times x is
        the weighted mean.
      expected: float32[], replicas that take part over those that are not excluded.
        Multiply a mean by it if absent replicas will add their part later: over those
        present, the drift of one that takes part every second time would count twice.
      healthy: bool[], whether all that this replica has is finite.
      someone: bool[], whether any replica takes part.
    """

    group: Group
    weight: jax.Array | float = 1.0
    expected: jax.Array | float = 1.0
    healthy: jax.Array | bool = True
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
            x = wide(x)
            return jnp.where(self.present, jnp.asarray(self.weight, x.dtype) * x, 0)

        return jax.tree.map(contribution, tree)

    def mean(self, tree: Any, group: Group | None = None) -> Any:
        """The weighted mean over participating replicas, in the dtypes of the tree."""
        means = (group or self.group).mean(self.weighted(tree))
        return jax.tree.map(lambda m, x: m.astype(x.dtype), means, tree)

    def compressed_mean(
        self, compressor: Compressor, contribution: Callable[[], Any], owed: Any
    ) -> tuple[Any, Any]:
        """The mean of contributions and what was owed, and what is owed now.

        Nothing is sent if no replica takes part. The condition has a second use: no
        compiler fuses what follows it with the cutting out of each array from the codes
        of all, so what follows is compiled once for each shape, not for each array. The
        contribution is computed inside it, where its memory serves for what is owed.
        """

        def send():
            whole = jax.tree.map(plus, contribution(), owed)
            mean, unsent = compressor.average_by_device(whole, self.group)
            return like(mean, whole), like(unsent, whole)

        def keep():
            shapes = jax.eval_shape(contribution)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return zeros, like(owed, zeros)

        return lax.cond(self.someone, send, keep)


def take_part(
    group: Group, weight: jax.Array, healthy: jax.Array, able: jax.Array
) -> Part:
    """Finds out who takes part in a sync, by gathering one number of each replica.

    `healthy` says whether all that this replica has is finite, and `able` whether what
    it would send is.
    """
    weights = group.all_gather(jnp.where(able, weight, -1))  # -1 is excluded
    present = weights > 0
    someone = jnp.any(present)
    # In units of the largest, so that the sum does not overflow.
    unit = jnp.where(someone, jnp.max(weights), 1)
    mean = jnp.sum(jnp.where(present, weights, 0) / unit) / weights.size
    return Part(
        group=group,
        weight=jnp.where(able, weight, 0) / unit / jnp.where(mean > 0, mean, 1),
        expected=jnp.sum(present) / jnp.maximum(jnp.sum(weights >= 0), 1),
        healthy=healthy,
        someone=someone,
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


def restarted(
    inner: optax.GradientTransformation, anchor: Any, state: Any, keep: jax.Array
) -> Any:
    """Begins the inner optimizer's state again at the anchor, unless `keep` is true.

    Integers and single numbers stay, such as counts of steps and hyperparameters.
    """

    def cosines(q):
        # To draw Q takes longer to compile than a sync. (A state of Dion without
        # matrices has a number in its place.)
        return _power_iteration.cosines(q) if q.ndim > 1 else q

    fresh = _momentum.with_dion(
        inner.init(anchor),
        lambda dion: dion._replace(dion_q=jax.tree.map(cosines, dion.dion_q)),
    )

    def choose(x, new):
        if not _finite.is_float(x):
            return x
        new = jnp.asarray(new, x.dtype)
        if jnp.ndim(x) == 0:
            return jnp.where(jnp.isnan(x), new, x)
        return jnp.where(keep, x, new)

    return jax.tree.map(choose, state, fresh)
