"""States of replicas that all differ, to change the number of."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax

import curvadion_jax as cd

# Means of a few float32 of size one.
ATOL = 1e-6
EVERY_5 = cd.triggers.every_k(5)
OPTIMIZERS = {
    "local_sgd": lambda mesh: cd.presets.local_sgd(0.05, k=5, mesh=mesh),
    "dion": lambda mesh: helpers.averaging_dion(0.05, 2, mesh=mesh),
    "factors": lambda mesh: cd.presets.synchronous_dion(0.05, rank=2, mesh=mesh),
    "residual": lambda mesh: cd.adaptive_sync(
        optax.adam(0.05),
        EVERY_5,
        cd.synchronizers.reconcile(
            optax.sgd(0.7, 0.9), compressor=cd.compressors.quantize(2)
        ),
        mesh,
    ),
}


def make_state(number, name, seed=0):
    """Parameters, optimizer state, keys: every row other numbers."""
    rng, mesh = np.random.default_rng(seed), cd.replicas.make_mesh(number)
    params, state = helpers.start(OPTIMIZERS[name](mesh), helpers.make_params(), mesh)

    def apart(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jax.device_put(x + rng.normal(size=x.shape).astype(x.dtype), x.sharding)

    keys = jax.random.split(jax.random.key(1), number)
    train = jax.tree.map(apart, (params, state))
    return cd.replicas.place({"train": train, "key": keys, "step": 7}, mesh)
