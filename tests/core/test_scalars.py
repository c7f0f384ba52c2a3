"""Scalars of a state that are not finite: some are spoilt, and some meant to be."""

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import weighted_runs

import curvadion_jax as cd
from curvadion_jax import metrics, synchronizers, triggers

AXIS = helpers.AXIS


def test_a_random_key_in_the_state_is_left_alone():
    noise = optax.add_noise(0.1, 0.5, key=jax.random.key(3))
    inner = optax.chain(noise, optax.sgd(0.1, 0.9))
    tx = cd.adaptive_sync(inner, triggers.every_k(2), synchronizers.reconcile())
    params = helpers.make_params()
    state = tx.init(params)
    update = helpers.quick(jax.jit(tx.update), params, state, params)
    for _ in range(2):
        updates, state = update(params, state, params)
    chex.assert_tree_all_finite(updates)
    assert int(state.metrics.excluded) == 0


def overflowing(k):
    """SGD whose momentum of a scalar in half precision overflows, and a best loss."""
    plateau = optax.with_extra_args_support(optax.contrib.reduce_on_plateau())
    inner = optax.chain(plateau, optax.sgd(1e-4, 0.9))
    synchronizer = synchronizers.reconcile()
    tx = cd.adaptive_sync(inner, triggers.every_k(k), synchronizer, AXIS)

    def train(state, gradients):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params, value=jnp.inf)
        return optax.apply_updates(params, updates), opt_state

    return tx, jax.jit(jax.vmap(train, axis_name=AXIS))


@pytest.mark.parametrize("spoilt", [(0, 1, 2), (1,)], ids=["all", "one"])
def test_a_scalar_parameters_momentum_that_overflows_is_noticed(spoilt):
    """Gradients that float16 holds, and their sum that it does not."""
    replicas, k = 3, 4
    tx, step = overflowing(k)
    params = {"scale": np.float16(1), "w": np.ones(2, np.float32)}
    state = weighted_runs.start(tx, replicas, params)
    small = jax.tree.map(np.ones_like, state[0])
    large = {**small, "scale": small["scale"].copy()}
    large["scale"][list(spoilt)] = 60_000
    momentum = lambda state: np.asarray(state[1].inner_state[1][0].trace["scale"])
    expected = [int(index in spoilt) for index in range(replicas)]
    for gradients in (large, large, small):
        state = step(state, gradients)
    assert (~np.isfinite(momentum(state))).tolist() == [bool(x) for x in expected]
    found = state[1].metrics
    assert found.zeroed.tolist() == [2 * x for x in expected]
    assert found.excluded.tolist() == [0] * replicas  # no sync so far
    state = step(state, small)
    found = state[1].metrics
    assert found.synced.all()
    assert found.excluded.tolist() == expected
    chex.assert_tree_all_finite((state[0], momentum(state)))
    assert (momentum(state)[list(spoilt)] == 0).all()
    state = step(state, small)
    assert (momentum(state)[list(spoilt)] == 1).all()  # of that one gradient
    assert metrics.read(state[1])["excluded"] == sum(expected)
    assert np.isinf(state[1].inner_state[0].best_value).all()  # as is meant
