"""The mean drift of the replicas, and the step of the anchor along it."""

import jax
import jax.numpy as jnp

from curvadion_jax import _finite
from curvadion_jax._local_step import LocalStep
from curvadion_jax.synchronizers import _base


def difference(new: jax.Array, old: jax.Array) -> jax.Array:
    wide = jnp.promote_types(new.dtype, jnp.float32)
    return new.astype(wide) - old.astype(wide)


def mean_drift(compressor, drift, residual, form_state, local: LocalStep, group):
    """How far replicas are from the anchor on average, what they owe, and its state."""
    if compressor is not None:
        return _base.mean_with_feedback(
            compressor, drift, residual, form_state, local, group
        )
    mean = jax.tree.map(
        # An absent replica brings its drift later.
        lambda x: x * jnp.asarray(local.expected, x.dtype),
        local.mean(drift, group),
    )
    return mean, residual, form_state


def outer_step(outer, drift, anchor, state, layout):
    """Anchor after the sync, in the anchor's dtype, and the outer state.

    Elements of the state that would not be finite stay as they are. The caller keeps
    those of the anchor (`_finite.where_finite`), which nothing could mend.
    """
    pseudo_gradient = jax.tree.map(jnp.negative, drift)
    more = {"layout": layout} if layout.axes else {}
    updates, new_state = outer.update(pseudo_gradient, state, anchor, **more)
    # `optax.apply_updates` would add in the anchor's dtype.
    anchor = jax.tree.map(lambda a, u: (a + u).astype(a.dtype), anchor, updates)
    same_dtype = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, state)
    return anchor, _finite.mended(same_dtype, state)


def move_to(target: jax.Array, params: jax.Array) -> jax.Array:
    """Update that takes the parameters to the target, to the last bit if it can.

    `params + (target - params)` may miss the target by a rounding; what it misses by
    is added to the update once.
    """
    update = target - params
    missed = target - (params + update)
    return update + missed
