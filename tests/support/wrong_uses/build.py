"""What several sections of the table build: optimizers of parts, traced steps."""

from typing import Any

import helpers
import jax
import optax

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

SGD = optax.sgd(0.1, 0.9)
PARAMS = helpers.make_params()


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
