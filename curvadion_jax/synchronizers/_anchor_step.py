"""The step of the anchor along the mean drift of the replicas."""

import jax
import jax.numpy as jnp

from curvadion_jax import _finite, _trees


def difference(new: jax.Array, old: jax.Array) -> jax.Array:
    wide = jnp.promote_types(new.dtype, jnp.float32)
    return new.astype(wide) - old.astype(wide)


def outer_step(outer, drift, anchor, state, layout):
    """Anchor after the sync, in the anchor's dtype, and the outer state.

    Elements of the state that would not be finite stay as they are. The caller keeps
    those of the anchor, which nothing could repair.
    """
    pseudo_gradient = jax.tree.map(jnp.negative, drift)
    more = {"layout": layout} if layout.axes else {}
    updates, new_state = outer.update(pseudo_gradient, state, anchor, **more)
    # `optax.apply_updates` would add in the anchor's dtype.
    anchor = jax.tree.map(lambda a, u: (a + u).astype(a.dtype), anchor, updates)
    return anchor, _finite.repaired(_trees.like(new_state, state), state)


def move_to(target: jax.Array, params: jax.Array) -> jax.Array:
    """Update that takes the parameters to the target, to the last bit if it can.

    `params + (target - params)` may miss the target by a rounding; what it misses by
    is added to the update once.
    """
    update = target - params
    missed = target - (params + update)
    return update + missed
