"""What the study compares with, by hand: accumulated gradients and the outer step."""

import baselines
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import compressors, triggers

MESH = cd.replicas.simulated(2)
ATOL = 1e-6
"""Sums of a few float32 numbers of size 1."""


def gradients(steps):
    keys = jax.random.split(jax.random.key(0), steps)
    return [jax.random.normal(key, (2, 4, 8)) for key in keys]


def accumulated(compressor, period):
    return cd.adaptive_sync(
        baselines.accumulating(optax.sgd(1.0), period),
        triggers.every_k(period),
        baselines.average_accumulated(compressor),
        MESH,
    )


def trajectory(tx, all_gradients):
    params = jnp.ones((2, 4, 8))
    state = tx.init(params)
    update = jax.jit(tx.update)
    for gradient in all_gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        yield params, state


def test_one_step_follows_the_mean_of_a_period_and_nothing_moves_before():
    given = gradients(2)
    (first, _), (second, _) = trajectory(accumulated(compressors.exact(), 2), given)
    np.testing.assert_array_equal(first, 1.0)
    expected = 1 - (given[0] + given[1]).mean(0) / 2
    for row in second:
        np.testing.assert_allclose(row, expected, atol=ATOL)


def test_what_two_bits_do_not_send_is_owed():
    given = gradients(5)
    *_, (params, state) = trajectory(accumulated(compressors.quantize(2), 1), given)
    sent = sum(
        gradient.mean(0) for gradient in given
    ) - state.rows.inner_state.owed.mean(0)
    np.testing.assert_allclose(params[0], 1 - sent, atol=10 * ATOL)
    assert jnp.any(state.rows.inner_state.owed != 0)
    np.testing.assert_array_equal(params[0], params[1])


@pytest.mark.parametrize(("rate", "expected"), [(1.0, [-1.0, -2.0]), (0.5, [-1, -1])])
def test_the_outer_step_moves_from_the_last_anchor(rate, expected):
    outer = baselines.outer_nesterov(period=2, learning_rate=rate, momentum=0.0)
    tx = optax.chain(optax.sgd(1.0), outer)
    params, found = jnp.zeros(()), []
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(jnp.ones(()), state, params)
        params = optax.apply_updates(params, updates)
        found.append(float(params))
    assert found == expected
