"""Numbers that change while an optimizer runs: injected, and as extra arguments."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import optax
from small_optimizers import NAMES, one_replica, small

from curvadion_jax import synchronizers, triggers


def test_injected_threshold():
    def factory(learning_rate, threshold):
        trigger = triggers.relative_momentum_change(threshold)
        inner = optax.sgd(learning_rate, 0.9)
        return small(trigger, synchronizers.average_gradients(), inner=inner)

    tx: Any = optax.inject_hyperparams(factory)(0.1, threshold=1e6)
    params = {name: helpers.make_params()[name] for name in NAMES}
    state, traces = tx.init(params), []

    @jax.jit
    def update(gradients, state):
        traces.append(0)
        return tx.update(gradients, state, params)[1]

    decided = []
    for tree, threshold in zip(one_replica(4), (1e6, 1e6, 0, 1e6), strict=True):
        state.hyperparams["threshold"] = jnp.float32(threshold)
        state = update(tree, state)
        decided.append(bool(optax.tree.get(state, "synced")))
    assert decided == [True, False, True, False]
    assert len(traces) == 1


def test_extra_arguments_reach_the_inner_optimizer():
    def update(updates, state, params=None, **extra_args):
        del params
        return jax.tree.map(lambda g: extra_args["value"] * g, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.identity().init, update)
    tx, params = small(inner=inner), {"w": jnp.ones(2)}
    updates, _ = tx.update(params, tx.init(params), params, value=3.0)
    assert updates["w"].tolist() == [3, 3]
