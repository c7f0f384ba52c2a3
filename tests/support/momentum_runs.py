"""What the tests of triggers by the momentum share: one replica's metrics."""

from typing import Any

import jax
import numpy as np
import optax
from jax import lax

import curvadion_jax as cd
from curvadion_jax import synchronizers


def run(trigger, gradients, inner=None):
    """Metrics of every step of one replica; gradients is a tree of [steps, ...]."""
    inner = optax.sgd(0.1, momentum=0.5) if inner is None else inner
    tx = cd.adaptive_sync(inner, trigger, synchronizers.average_gradients())
    return run_optimizer(tx, gradients)


def run_optimizer(tx: Any, gradients):
    gradients = jax.tree.map(np.float32, gradients, is_leaf=lambda x: type(x) is list)
    params = jax.tree.map(lambda g: np.zeros(g.shape[1:], np.float32), gradients)

    def body(state, gradient):
        state = tx.update(gradient, state, params)[1]
        return state, state.metrics

    scan = jax.jit(lambda xs: lax.scan(body, tx.init(params), xs)[1])
    return jax.device_get(scan(gradients))
