"""Syncs that follow weights of the steps: against NumPy, the bytes, and afterwards."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax.triggers import Observation, evenly, weighted

REPLICAS = 4
STEPS = 120


def fired(trigger, steps: int, cost: float = 1.0) -> np.ndarray:
    """Whether each of so many steps synchronises."""
    decide = jax.vmap(
        lambda step: trigger.decide(Observation(steps=step, sync_cost=cost), ())[0].fire
    )
    return np.asarray(decide(jnp.arange(steps)))


def expected(syncs: int, weights: np.ndarray) -> np.ndarray:
    """The same in float64, step by step."""
    total, seen, wanted = weights.sum(), 0.0, []
    for weight in weights:
        before, seen = seen, seen + weight
        first, last = (np.floor(syncs * x / total + 1e-9) for x in (before, seen))
        wanted.append(last > first)
    return np.array(wanted)


@pytest.mark.parametrize("syncs", [1, 7, 30])
@pytest.mark.parametrize("cost", [1.0, 0.07])
def test_against_numpy(syncs, cost):
    random = np.random.default_rng(0)
    weights = random.uniform(0.0, 1.0, STEPS)
    weights[:5] = 0.0
    rate = syncs * cost / STEPS
    found = fired(weighted(rate, weights), STEPS, cost)
    np.testing.assert_array_equal(found, expected(syncs, weights))
    assert found.sum() == syncs
    assert not found[:5].any()
    assert found[-1]
    np.testing.assert_array_equal(
        found, fired(weighted(rate, weights, cost=cost), STEPS)
    )


def test_a_rate_that_pays_for_every_step_takes_each_that_weighs_enough():
    found = fired(weighted(5.0, [1.0, 1.0, 2.0, 0.0]), 4)
    assert found.tolist() == [True, True, True, False]


@pytest.mark.parametrize("number", [3, 41, 47, 300])
def test_where_every_step_is_due_none_is_lost(number):
    assert fired(weighted(1.0, np.ones(number), cost=1.0), 5 * number).all()


def test_the_last_step_has_a_sync_however_little_it_weighs():
    number = 2000
    weights = optax.cosine_decay_schedule(1.0, number)(np.arange(number))
    found = fired(weighted(0.1, weights, cost=1.0), number)
    assert found[-1]
    assert found.sum() == 200


def test_after_the_last_weight_distances_are_even():
    found = fired(weighted(0.25, [1.0, 1.0, 1.0, 9.0], cost=1.0), 16)
    assert np.flatnonzero(found).tolist() == [3, 7, 11, 15]


def test_too_short_a_run_has_no_sync():
    assert not fired(weighted(0.1, np.ones(8), cost=1.0), 8).any()


def steps_of_sync(trigger, schedule):
    """Steps that synchronised, how far apart others end, and what was counted."""
    tx = cd.local_muon(schedule, trigger=trigger, axis_name="replica")
    mesh = cd.replicas.make_mesh(REPLICAS, devices=jax.devices()[:REPLICAS])
    params = {"w": jnp.ones((16, 16))}
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    step = helpers.replica_step(tx, mesh)
    at, apart = [], []
    for index in range(STEPS):
        noise = jax.random.normal(jax.random.key(index), (REPLICAS, 16, 16))
        state, _ = step(state, {"w": noise})
        if int(cd.metrics.read(state[1])["syncs"]) > len(at):
            at.append(index)
        else:
            apart.append(float(jnp.ptp(state[0]["w"], axis=0).max()))
    return np.array(at), min(apart), cd.metrics.read(state[1])


def test_replicas_send_as_much_as_with_even_distances_and_step_alone_between():
    schedule = optax.cosine_decay_schedule(0.02, STEPS, alpha=0.01)
    weights = np.sqrt(schedule(np.arange(STEPS)))
    at, apart, read = steps_of_sync(weighted(0.02, weights), schedule)
    assert apart > 0  # nothing brought them together in between
    assert at[-1] == STEPS - 1
    distances = np.diff(at)
    assert distances[0] < distances[-1]
    even, _, read_even = steps_of_sync(evenly(0.02), schedule)
    assert len(even) == len(at) > 10
    assert read["bytes"] == read_even["bytes"]
