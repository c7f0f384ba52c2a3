"""Optimizers whose syncs end later, and runs of them."""

from typing import Any

import helpers
import jax
import optax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS = helpers.AXIS
OUTER = optax.sgd(0.7, momentum=0.6, nesterov=True)


def optimizer(k: int, delay: int, outer=None, inner=None, **options) -> Any:
    inner = optax.sgd(1.0) if inner is None else inner
    synchronizer = synchronizers.reconcile(
        outer, momentum=False, delay=delay, **options
    )
    return cd.adaptive_sync(inner, triggers.every_k(k), synchronizer, AXIS)


def stepping(tx, mesh):
    """As a user steps: the host knows what is due."""
    return helpers.replica_step(tx, mesh)


def asking(tx, mesh):
    """In a program of the user's own, which decides."""
    step = helpers.replica_step(tx, mesh)
    return jax.jit(lambda state, batch: step(state, batch))


def run(make, tx, gradients, params=None):
    mesh = cd.replicas.make_mesh(helpers.replicas_of(gradients))
    state = helpers.start(tx, params or helpers.make_params(), mesh)
    step = make(tx, mesh)
    for tree in gradients:
        state, _ = step(state, tree)
        yield jax.device_get(state)
