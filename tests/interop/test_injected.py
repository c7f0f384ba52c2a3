"""Numbers that change while an optimizer runs: injected, and as extra arguments."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_optimizers import NAMES, alone, close, one_replica, small

import curvadion_jax as cd
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "static_args", "options"),
    [
        pytest.param(
            *(cd.curvadion, ("rank", "error_feedback", "seed"), {"rank": 2}), id="rank"
        ),
        pytest.param(cd.curvadion, (), {}, id="curvadion"),
        pytest.param(cd.curvadion, (), {"threshold": 0.3}, id="threshold"),
        pytest.param(cd.local_muon, (), {"budget": 0.5}, id="local_muon"),
    ],
)
def test_injected_curvadion(factory, static_args, options):
    tx = optax.inject_hyperparams(factory, static_args=static_args)
    rate = optax.linear_schedule(0.1, 0.0, 5)
    gradients = one_replica(3, names=helpers.SHAPES)
    injected = alone(tx(rate, momentum=0.9, **options), gradients)
    plain = alone(factory(rate, momentum=0.9, **options), gradients)
    for (params, _), (expected, _) in zip(injected, plain, strict=True):
        close(params, expected)
    assert injected[-1][1].hyperparams["momentum"] == np.float32(0.9)


def test_extra_arguments_reach_the_inner_optimizer():
    def update(updates, state, params=None, **extra_args):
        del params
        return jax.tree.map(lambda g: extra_args["value"] * g, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.identity().init, update)
    tx, params = small(inner=inner), {"w": jnp.ones(2)}
    updates, _ = tx.update(params, tx.init(params), params, value=3.0)
    assert updates["w"].tolist() == [3, 3]
