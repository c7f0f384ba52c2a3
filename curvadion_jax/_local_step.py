"""What a synchronizer is given of one replica."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _finite
from curvadion_jax._orthonormalize import compute_dtype
from curvadion_jax._protocols import Group, Views


class LocalStep(NamedTuple):
    """One replica's step, and its part in this sync.

    Attributes:
      gradients: this replica's gradients, tree of the parameters.
      inner_state: state of the inner optimizer; before the step, or after it for
        synchronizers with `after_local_step`.
      params: this replica's parameters before the step.
      views: path of a parameter -> how it is seen as matrices, or None.
      take: ``(gradients, inner_state, **extra_args)`` -> (updates, inner state after
        the step), the inner optimizer's update; ``take()`` is the plain local step, and
        all that there is with `after_local_step`. It communicates nothing.
      weight: float32[], how much this replica counts in the means of this sync. 1 if
        all count alike, 0 if it takes no part; all replicas' add up to N, or to 0.
        Replica-varying.
      expected: float32[], the share of the expected replicas that takes part. The
        others keep what they have for a later sync, so a mean to which they will add
        is to be multiplied by this.
      healthy: bool[], whether all that this replica has is finite. Replica-varying.
      anybody: bool[], whether any replica takes part.

    Example:
      >>> inner, params = optax.sgd(0.5), {"w": jnp.ones(2)}
      >>> state = inner.init(params)
      >>> take = lambda: inner.update(params, state, params)
      >>> local = LocalStep(params, state, params, {}, take)
      >>> local.take()[0]["w"].tolist()
      [-0.5, -0.5]
    """

    gradients: optax.Updates
    inner_state: optax.OptState
    params: optax.Params
    views: Views
    take: Callable[..., tuple[optax.Updates, optax.OptState]]
    weight: jax.Array | float = 1.0
    expected: jax.Array | float = 1.0
    healthy: jax.Array | bool = True
    anybody: jax.Array | bool = True

    @property
    def present(self) -> jax.Array:
        """Whether this replica takes part, bool[]."""
        return jnp.asarray(self.weight) > 0

    @property
    def joins(self) -> jax.Array:
        """Whether it takes over what is common, bool[].

        If it takes part, or has nothing of its own that is worth keeping.
        """
        return self.present | ~jnp.asarray(self.healthy)

    def weighted(self, tree: Any) -> Any:
        """What this replica brings to a mean: its arrays times its weight.

        In at least float32, and zeros if it takes no part, whatever is in the tree.
        """

        def brought(x):
            wide = x.astype(compute_dtype(x.dtype))
            return jnp.where(
                self.present, jnp.asarray(self.weight, wide.dtype) * wide, 0
            )

        return jax.tree.map(brought, tree)

    def mean(self, tree: Any, group: Group) -> Any:
        """Weighted mean over those who take part, in the dtypes of the tree."""
        means = group.mean(self.weighted(tree))
        return jax.tree.map(lambda m, x: m.astype(x.dtype), means, tree)

    def finite(self, tree: Any) -> Any:
        """The tree, zeros if what this replica has is not finite."""
        return _finite.or_zeros(jnp.asarray(self.healthy), tree)
