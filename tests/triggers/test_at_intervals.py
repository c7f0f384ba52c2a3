"""Replicas that vote on every k-th step, and send nothing on the others."""

import helpers
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import metrics, synchronizers, triggers
from curvadion_jax.triggers import Measured, Trigger

PARAMS = {"b": np.ones(3, np.float32)}


def optimizer(trigger, mesh=None):
    inner, synchronizer = optax.sgd(0.1, 0.9), synchronizers.reconcile()
    return cd.adaptive_sync(inner, trigger, synchronizer, mesh)


def requesting():
    """A replica requests a sync where the first element of its gradient is positive."""
    look = lambda seen, state: (Measured(seen.gradients["b"][0], 5), state)
    return Trigger(look=look, threshold=lambda clock, state: 0.0)


def gradients_of(requests):
    noise = np.random.default_rng(0).normal(size=(*requests.shape, 3))
    noise[..., 0] = requests
    return [{"b": tree.astype(np.float32)} for tree in noise]


# Votes are on steps 2, 5, 8 and 11.
REQUESTS = np.array([0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0]) - 0.5


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
@pytest.mark.parametrize("replica", [0, 1])
def test_a_request_is_kept_until_the_next_vote_and_met_once(replica, kind):
    requests = np.full((len(REQUESTS), 2), -1.0)
    requests[:, replica] = REQUESTS
    mesh = helpers.mesh_of(kind, 2)
    tx = optimizer(triggers.at_intervals(requesting(), 3), mesh)
    history = list(helpers.run(tx, mesh, PARAMS, gradients_of(requests)))
    assert np.flatnonzero(helpers.decisions(history)).tolist() == [5, 8, 11]
    # What a vote compares is the largest since the last sync.
    values = np.stack([state.counters.value[replica] for _, state in history])
    largest = np.maximum.accumulate
    wanted = [*largest(REQUESTS[:6]), *largest(REQUESTS[6:9]), *largest(REQUESTS[9:])]
    np.testing.assert_array_equal(values, np.float32(wanted))
    report = metrics.read(history[-1][1])
    assert (report["votes"], report["syncs"]) == (4, 3)
    assert report["bytes"] == 3 * 12 + 4 * 4 + 3 * 4


def test_a_request_that_a_sync_has_met_is_cleared():
    """One at the vote itself too, and what comes after it counts anew."""
    requests = np.full((12, 2), -1.0)
    requests[[2, 3], 1] = 5
    mesh = cd.replicas.simulated(2)
    tx = optimizer(triggers.at_intervals(requesting(), 3), mesh)
    history = list(helpers.run(tx, mesh, PARAMS, gradients_of(requests)))
    assert np.flatnonzero(helpers.decisions(history)).tolist() == [2, 5]


def test_nan_is_kept_as_a_request():
    look = lambda seen, state: (Measured(jnp.log(seen.gradients["b"][0])), state)
    trigger = Trigger(look=look, threshold=lambda clock, state: 10.0)
    numbers = np.ones((6, 2))
    numbers[0, 1] = -1  # whose logarithm is NaN
    mesh = cd.replicas.simulated(2)
    tx = optimizer(triggers.at_intervals(trigger, 2), mesh)
    history = list(helpers.run(tx, mesh, PARAMS, gradients_of(numbers)))
    assert np.flatnonzero(helpers.decisions(history)).tolist() == [1]


@pytest.mark.slow
def test_the_first_request_of_a_change_is_met_at_the_first_vote():
    """And that of a step before gradients that are not finite."""
    change = triggers.relative_momentum_change(1e6)
    make = lambda mesh: optimizer(triggers.at_intervals(change, 3), mesh)
    gradients = helpers.make_gradients(7, 2)
    gradients[3]["wide/kernel"] *= 1e9
    gradients[4]["wide/kernel"][:] = np.nan
    history = list(helpers.run_simulated(make, helpers.make_params(), gradients))
    assert np.flatnonzero(helpers.decisions(history)).tolist() == [2, 5]


def test_an_interval_and_a_longest_distance_combine():
    """A sync waits for the next vote."""
    never = Trigger(
        look=lambda seen, state: (Measured(0.0), state), threshold=lambda *_: 1.0
    )
    trigger = triggers.at_intervals(triggers.at_least_every(never, 4), 3)
    make = lambda mesh: optimizer(trigger, mesh)
    history = list(helpers.run_simulated(make, PARAMS, gradients_of(np.ones((13, 2)))))
    assert np.flatnonzero(helpers.decisions(history)).tolist() == [5, 11]


@pytest.mark.parametrize(
    "combine",
    [
        lambda t: triggers.at_least_every(t, 100),
        lambda t: triggers.budget(0.1, t),
        lambda t: triggers.at_intervals(t, 3),
    ],
    ids=["at_least_every", "budget", "at_intervals"],
)
@pytest.mark.parametrize("trigger", [triggers.every_k(5), triggers.evenly(0.1)])
def test_combinators_take_triggers_that_measure(combine, trigger):
    with pytest.raises(ValueError, match="is for triggers that measure something"):
        combine(trigger)


@pytest.mark.parametrize("number", [int, jnp.int32])
def test_no_vote_takes_place_where_the_trigger_is_not_due(number):
    even = requesting()._replace(due=lambda clock: (clock.steps + 1) % 2 == 0)
    for trigger in (even, triggers.at_intervals(requesting(), 2)):
        due = triggers.at_intervals(trigger, 3).due
        found = [step + 1 for step in range(12) if due(triggers.Clock(number(step)))]
        assert found == [6, 12]
    assert triggers.at_intervals(even, 1) is even


def test_what_an_absent_replica_requests_does_not_wait_for_a_vote():
    mesh = cd.replicas.simulated(2)
    requests = np.full((6, 2), -1.0)
    requests[0, 1] = requests[3, 0] = 1
    weights = [np.float32([1, step > 0]) for step in range(6)]
    tx = optimizer(triggers.at_intervals(requesting(), 3), mesh)
    trees = gradients_of(requests)
    history = list(helpers.run(tx, mesh, PARAMS, trees, weight=weights))
    assert np.flatnonzero(helpers.decisions(history)).tolist() == [5]
