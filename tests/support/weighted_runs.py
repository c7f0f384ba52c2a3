"""What the tests of weights share: forms, and replicas that count unequally."""

from typing import Any

import helpers
import jax
import numpy as np
import optax

from curvadion_jax import compressors

FORMS = {
    "exact": compressors.exact(),
    "int8": compressors.quantize(8, block=8),
    "int2": compressors.quantize(2, block=8),
    "sign": compressors.quantize(1, block=8),
}


def start(tx: Any, replicas: int, params: Any = None) -> Any:
    """(Parameters, optimizer state) of all replicas."""
    params = helpers.make_params() if params is None else params
    return helpers.stacked(tx, params, replicas)


def train_on(tx: Any, replicas: int, params: Any = None, **options: Any) -> Any:
    """Compiled (state, gradients, weights) -> state, for gradients that are given.

    With further options of `update`.
    """

    def train(state, gradients, weight):
        params, opt_state = state
        updates, opt_state = tx.update(
            gradients, opt_state, params, weight=weight, **options
        )
        return optax.apply_updates(params, updates), opt_state

    state = start(tx, replicas, params)
    gradients = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state[0])
    given = (state, gradients, np.ones(replicas, np.float32))
    return helpers.quick(jax.jit(jax.vmap(train, axis_name=helpers.AXIS)), *given)
