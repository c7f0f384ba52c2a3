"""Replicas as a list: what any inner optimizer with `reconcile` should do.

One Python loop, means and the anchor in NumPy's float64, Optax for one replica.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def with_keys_of(index: int, state: Any) -> Any:
    """The state, with every random key folded with an index."""
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    fold = lambda x: jax.random.fold_in(x, index) if is_key(x) else x
    return jax.tree.map(fold, state)


def run(inner: Any, params: Any, gradients: list, k: int, outer: Any = None) -> list:
    """Parameters of all replicas, [R, ...], after each step.

    A random key in a replica's state has its index folded in. A gradient that is not
    finite is that of a zero gradient. Syncs follow every k-th step: the plain mean, or
    an outer step along the mean.
    """
    inner = optax.with_extra_args_support(inner)
    replicas = len(jax.tree.leaves(gradients[0])[0])
    rows = [jax.tree.map(jnp.asarray, params)] * replicas
    states = [with_keys_of(index, inner.init(params)) for index in range(replicas)]
    outer = optax.scale(-1.0) if outer is None else outer
    anchor, outer_state = params, outer.init(params)
    update, history = jax.jit(inner.update), []
    for step, tree in enumerate(gradients):
        for index in range(replicas):
            own = jax.tree.map(lambda g, index=index: g[index], tree)
            if not all(np.isfinite(x).all() for x in jax.tree.leaves(own)):
                own = jax.tree.map(np.zeros_like, own)
            updates, states[index] = update(own, states[index], rows[index])
            rows[index] = optax.apply_updates(rows[index], updates)
        if (step + 1) % k == 0:
            less = lambda a, *x: np.mean([np.float64(a) - np.float64(y) for y in x], 0)
            away = jax.tree.map(less, anchor, *rows)
            away = jax.tree.map(lambda d: jnp.asarray(d, jnp.float32), away)
            moves, outer_state = outer.update(away, outer_state, anchor)
            anchor = optax.apply_updates(anchor, moves)
            rows = [anchor] * replicas
        history.append(jax.tree.map(lambda *x: np.stack(x), *rows))
    return history
