"""Begins an excluded replica's inner optimizer again, at the anchor."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _dion, _finite


def restarted(
    inner: optax.GradientTransformation, anchor: Any, state: Any, keep: jax.Array
) -> Any:
    """Begins the inner optimizer's state again at the anchor, unless `keep` is true.

    Integers and single numbers stay, such as counts of steps and hyperparameters.
    """
    # To draw Q takes longer to compile than a sync.
    fresh = _dion.with_states(
        inner.init(anchor),
        lambda dion: dion._replace(dion_q=jax.tree.map(_cosines, dion.dion_q)),
    )

    def choose(x, new):
        if not _finite.is_float(x):
            return x
        new = jnp.asarray(new, x.dtype)
        if jnp.ndim(x) == 0:
            return jnp.where(jnp.isnan(x), new, x)
        return jnp.where(keep, x, new)

    return jax.tree.map(choose, state, fresh)


def _cosines(q: jax.Array) -> jax.Array:
    """Orthonormal columns of the shape of Q, from a cosine transform.

    They cost little. Unit vectors would not do: one of them may pick a zero column of
    the matrix, such as that of an input that is never active, and find nothing.
    """
    if q.ndim < 2:  # a state of Dion without matrices has a number in its place
        return q
    cols, r = q.shape[-2:]
    frequency = jnp.arange(r, dtype=jnp.float32)[None]
    angles = (
        jnp.arange(0.5, cols, dtype=jnp.float32)[:, None] * frequency * (jnp.pi / cols)
    )
    waves = jnp.cos(angles) * jnp.where(frequency == 0, 1, 2**0.5) / cols**0.5
    return jnp.broadcast_to(waves, q.shape).astype(q.dtype)
