"""What several sections share: optimizers, states, meshes, traced updates, advice."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import curvadion_jax as cd
from curvadion_jax import replicas, synchronizers, triggers

SGD = optax.sgd(0.1, 0.9)
PARAMS = helpers.make_params()
TWO = replicas.make_mesh(2)
OF_DATA = Mesh(np.array(jax.devices()[:2]), ("data",))
PAIR = {"w": jnp.ones((2, 3))}
INT = "must be an int"
NEGATIVE = "must not be negative or NaN"
RATE = "learning_rate must be a number or a schedule"


def parts(**changed: Any) -> Any:
    """`adaptive_sync` with one part exchanged."""
    arguments = {
        "inner": SGD,
        "trigger": triggers.every_k(2),
        "synchronizer": synchronizers.reconcile(),
    }
    return cd.adaptive_sync(**{**arguments, **changed})


def initialised(tx: Any, params: Any = PARAMS) -> Any:
    """Shapes of the state."""
    return jax.eval_shape(tx.init, params)


def updated(
    tx: Any,
    gradients: Any = PARAMS,
    params: Any = PARAMS,
    initial: Any = None,
    **more: Any,
) -> Any:
    """Shapes of an update, with the state of other parameters where they are given."""
    state = initialised(tx, params if initial is None else initial)
    return jax.eval_shape(
        lambda g, s, p: tx.update(g, s, p, **more), gradients, state, params
    )


def on_replicas(tx: Any, **more: Any) -> None:
    """Traces an update on one of two replicas, `more` made of the state."""

    def step(params, state, gradients):
        made = {name: make(state) for name, make in more.items()}
        return tx.update(gradients, state, params, **made)

    helpers.trace(step, tx)


def loaded() -> Any:
    """Other parameters than `PARAMS`, of the same shapes."""
    return {name: x + 1 for name, x in PARAMS.items()}


def counted() -> Any:
    """The state of one replica."""
    return cd.curvadion(0.1).init(PARAMS)


def anchored(number: int = 2) -> Any:
    """Parameters and states of replicas that have not stepped."""
    return jax.tree.map(
        lambda x: np.broadcast_to(x, (number, *np.shape(x))), (PARAMS, counted())
    )
