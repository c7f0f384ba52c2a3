"""Begins an excluded replica's inner optimizer again, at the anchor."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from curvadion_jax import _dion, _finite, _power_iteration


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

    fresh = _dion.with_states(
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
