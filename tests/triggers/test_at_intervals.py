"""Replicas that vote on every k-th step, and send nothing on the others."""

from typing import Any

import helpers
import jax
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import metrics, synchronizers, triggers

pytestmark = pytest.mark.slow  # many programs


def optimizer(trigger) -> Any:
    inner, synchronizer = optax.sgd(0.1, 0.9), synchronizers.reconcile()
    return cd.adaptive_sync(inner, trigger, synchronizer, helpers.AXIS)


def requesting():
    """A replica requests a sync where the first element of its gradient is positive."""

    def decide(seen: Any):
        first = seen.gradients["bias"][0]
        return triggers.decision(first > 0, first, 0)

    return triggers.stateless(decide)


def gradients_of(requests):
    gradients = helpers.make_gradients(len(requests), len(requests[0]))
    for tree, row in zip(gradients, requests, strict=True):
        tree["bias"][:, 0] = row
    return gradients


def by_step(tx, params, gradients):
    """As a user steps: the host knows when a decision is due."""
    mesh = cd.replicas.make_mesh(helpers.replicas_of(gradients))
    state, step = helpers.start(tx, params, mesh), helpers.replica_step(tx, mesh)
    for tree in gradients:
        state, _ = step(state, tree)
        yield jax.device_get(state)
    # A step on which none is due, and one on which it is.
    assert {due for _, due in step._programs} == {False, True}


# Votes are on steps 2, 5, 8 and 11.
REQUESTS = np.array([0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0]) - 0.5


@pytest.mark.parametrize("run", [by_step, helpers.run_vmap])
@pytest.mark.parametrize("replica", [0, 2])
def test_a_request_is_kept_until_the_next_vote_and_met_once(replica, run):
    requests = np.full((len(REQUESTS), 3), -1.0)
    requests[:, replica] = REQUESTS
    tx = optimizer(triggers.at_intervals(requesting(), 3))
    history = list(run(tx, helpers.make_params(), gradients_of(requests)))
    assert np.flatnonzero(helpers.decisions(history)).tolist() == [5, 8, 11]
    values = np.stack([state.metrics.value for _, state in history])
    np.testing.assert_array_equal(values, np.float32(requests))
    read = metrics.read(history[-1][1])
    if run is by_step:
        assert read["votes"] == 4
        payload = 4 * 74
        assert read["bytes"] == round(4 / 3 * (3 * payload + 4 * 4)) + 3 * 2 * 4


def test_the_first_request_of_a_change_is_met_at_the_first_vote():
    """And that of a step with gradients that are not finite."""
    change = triggers.relative_momentum_change(1e6)
    tx, gradients = (
        optimizer(triggers.at_intervals(change, 3)),
        helpers.make_gradients(7, 2),
    )
    gradients[3]["wide"] *= 1e9
    gradients[4]["wide"][:] = np.nan
    history = list(by_step(tx, helpers.make_params(), gradients))
    assert np.flatnonzero(helpers.decisions(history)).tolist() == [2, 5]


@pytest.mark.parametrize(
    "combine",
    [
        lambda t: triggers.at_least_every(t, 100),
        lambda t: triggers.budget(0.1, t),
        lambda t: triggers.at_intervals(t, 3),
    ],
    ids=["at_least_every", "budget", "at_intervals"],
)
@pytest.mark.parametrize(
    "trigger", [triggers.at_intervals(requesting(), 4), triggers.every_k(5)]
)
def test_combinators_take_triggers_that_measure_on_every_step(combine, trigger):
    """Inside them replicas would vote on every step, or lose what it has kept."""
    with pytest.raises(ValueError, match="is for triggers that measure something"):
        combine(trigger)


def test_the_caller_says_when_a_decision_is_due():
    """In place of the trigger: step 1 is none of its own."""
    always = triggers.stateless(lambda seen: triggers.decision(True))
    trigger = triggers.at_intervals(always, 4)
    tx = cd.adaptive_sync(optax.sgd(0.1), trigger, synchronizers.reconcile())
    params = helpers.make_params()
    for due, synced in ((True, True), (None, False), (False, False)):
        _, state = tx.update(params, tx.init(params), params, due=due)
        assert bool(state.metrics.synced) == synced
