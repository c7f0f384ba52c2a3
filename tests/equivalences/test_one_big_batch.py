"""`always` is one big batch, and one replica is plain Dion."""

import functools
from typing import Any

import helpers
import jax
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

# Two float32 programs of the same mathematics, which sum in another order, over 6
# steps of size 0.1 on numbers of order 1. Measured: 9e-7.
SAME_ATOL = 5e-6
# One replica compiles to other fusions than plain Dion. Measured: 2e-8.
ALONE_ATOL = 1e-6
STEPS, LEARNING_RATE, MOMENTUM = 6, 0.1, 0.95
WITHIN = {
    "average_gradients": synchronizers.average_gradients(),
    "average_factors": synchronizers.average_factors(),
}
ALL = {**WITHIN, "reconcile": synchronizers.reconcile()}


def close(actual, expected, atol):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def optimizer(trigger, synchronizer, rank=0.5, axis_name: Any = helpers.AXIS) -> Any:
    return helpers.synced_dion(
        LEARNING_RATE,
        rank,
        trigger,
        synchronizer,
        momentum=MOMENTUM,
        other_optimizer=optax.adamw(LEARNING_RATE),
        axis_name=axis_name,
    )


def plain(rank=0.5) -> Any:
    other = optax.adamw(LEARNING_RATE)
    return cd.dion(LEARNING_RATE, rank, MOMENTUM, other_optimizer=other)


@functools.lru_cache(typed=True)  # 1 is rank one, 1.0 full
def one_batch(rank):
    """Plain Dion's trajectory on the mean gradients."""
    means = [
        jax.tree.map(lambda g: g.mean(0), tree)
        for tree in helpers.make_gradients(STEPS, 8)
    ]
    return list(helpers.run_alone(plain(rank), helpers.make_params(), means))


@pytest.mark.parametrize(
    ("rank", "name"),
    [
        (1, "average_factors"),
        pytest.param(1.0, "average_factors", marks=pytest.mark.slow),
        pytest.param(1, "average_gradients", marks=pytest.mark.slow),
    ],
)
def test_always_within_the_step_is_one_big_batch(rank, name):
    tx = optimizer(triggers.always(), WITHIN[name], rank)
    params, gradients = helpers.make_params(), helpers.make_gradients(STEPS, 8)
    run = list(helpers.run_mesh(tx, params, gradients))
    assert helpers.decisions(run) == [True] * STEPS
    for (params, state), (expected, one) in zip(run, one_batch(rank), strict=True):
        momenta, qs = helpers.dion_state(state)
        one = helpers.dion_state(one)
        for name, value in expected.items():
            close(params[name], np.broadcast_to(value, params[name].shape), SAME_ATOL)
        for name in helpers.MATRICES:
            close(momenta[name].mean(0), one.momentum[name], SAME_ATOL)
            q = np.broadcast_to(one.dion_q[name], qs[name].shape)
            close(qs[name], q, SAME_ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_one_replica_is_plain_dion(name):
    # Two syncs with local steps between them, from which the momentum goes on.
    tx = optimizer(triggers.every_k(3), ALL[name], axis_name=None)
    gradients = [
        jax.tree.map(lambda g: g[0], tree)
        for tree in helpers.make_gradients(9, 1, seed=3)
    ]
    dion = helpers.run_alone(plain(), helpers.make_params(), gradients)
    run = helpers.run_alone(tx, helpers.make_params(), gradients)
    for (params, state), (expected, dion_state) in zip(run, dion, strict=True):
        one, other = helpers.dion_state(state), helpers.dion_state(dion_state)
        for name in helpers.SHAPES:
            close(params[name], expected[name], ALONE_ATOL)
        for name in helpers.MATRICES:
            close(one.momentum[name], other.momentum[name], 10 * ALONE_ATOL)
            close(one.dion_q[name], other.dion_q[name], 10 * ALONE_ATOL)
