"""States of replicas that all differ, to change the number of."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd

AXIS = helpers.AXIS
# Means of a few float32 of size one.
ATOL = 1e-6


def optimizer(name):
    return {
        "local_sgd": lambda: cd.presets.local_sgd(0.05, k=5, axis_name=AXIS),
        "dion": lambda: helpers.averaging_dion(0.05, 2, axis_name=AXIS),
    }[name]()


def make_state(number, name, seed=0):
    """Parameters, optimizer state, keys: every array other numbers on every replica."""
    rng, tx = np.random.default_rng(seed), optimizer(name)
    params = helpers.make_params()

    def apart(x):
        stacked = np.broadcast_to(x, (number, *np.shape(x)))
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return stacked
        return (stacked + rng.normal(size=stacked.shape)).astype(x.dtype)

    state = jax.tree.map(apart, (params, tx.init(params)))
    keys = jax.random.split(jax.random.key(1), number)
    mesh = cd.replicas.make_mesh(number)
    place = NamedSharding(mesh, PartitionSpec(AXIS))
    return {"train": jax.device_put(state, place), "key": jax.device_put(keys, place)}
