"""Steps that are not taken, their gradients not finite, and what asks for a sync."""

import helpers
import jax
import numpy as np
import optax
import pytest
from momentum_runs import run

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

change = triggers.relative_momentum_change
INF = np.inf
REPLICAS = 8


@pytest.fixture(scope="module")
def poisoned():
    """Runs three steps on 8 devices, with a bad number on replica k in the third."""
    tx = cd.adaptive_sync(
        optax.sgd(0.1, 0.9), change(1e6), synchronizers.average_gradients(), "replica"
    )
    mesh = cd.replicas.make_mesh(REPLICAS)
    first = helpers.start(tx, helpers.make_params(), mesh)
    (batch,) = helpers.make_gradients(1, REPLICAS)
    step = helpers.quick(helpers.replica_step(tx, mesh), first, batch)

    def run(replica, number):
        state = first
        gradients = helpers.make_gradients(3, REPLICAS)
        gradients[2]["wide"][replica, 1, 1] = number
        history = []
        for tree in gradients:
            state, _ = step(state, tree)
            history.append(jax.device_get(state))
        return history

    return run


def test_nan_asks_for_nothing():
    metrics = run(change(0.1, floor=1e6), {"a": [[4.0], [3], [float("nan")]]})
    assert metrics.synced.tolist() == [True, False, False]
    assert metrics.skipped.last[-1] == 2


def test_a_step_that_is_not_taken_is_not_compared_with():
    """Dion's momentum after error feedback is smaller than what is remembered."""
    gradients = {"w": [np.eye(3)] * 30}
    gradients["w"][20] = np.full((3, 3), np.nan)
    metrics = run(change(0.1), gradients, cd.dion(0.01, momentum=0.8))
    assert metrics.nonfinite[-1] == 1
    assert not metrics.synced[15:].any()
    assert metrics.value[20] == 0


def test_the_first_step_asks_whatever_its_gradients_are():
    metrics = run(change(0.1, floor=1.0), {"a": [[np.nan], [4.0], [4]]})
    assert metrics.synced.tolist()[0]
    assert metrics.value[0] == np.inf


@pytest.mark.parametrize(
    ("trigger", "due"),
    [
        (triggers.at_least_every(change(10), 3), [0, 3]),
        (triggers.any_of(triggers.every_k(3), change(10)), [0, 2]),
        (triggers.delayed(change(0.6)), [0, 3]),
    ],
    ids=["at_least_every", "any_of", "delayed"],
)
def test_a_clock_goes_on_where_a_step_is_not_taken(trigger, due):
    """What is due on such a step, or was asked for before it, is heard."""
    gradients = {"a": [[4.0], [4], [8], [4], [4]]}
    gradients["a"][due[-1]] = [np.nan]
    metrics = run(trigger, gradients)
    assert metrics.nonfinite[-1] == 1
    assert np.flatnonzero(metrics.synced).tolist()[:2] == due


@pytest.mark.parametrize("replica", [0, 3, 7])
@pytest.mark.parametrize("number", [np.nan, INF, -INF])
def test_a_bad_number_on_one_replica_asks_for_nothing(poisoned, replica, number):
    history = poisoned(replica, number)
    assert helpers.decisions(history) == [True, False, False]
    metrics = history[-1][1].metrics
    assert np.isfinite(metrics.value).all()
    assert np.flatnonzero(metrics.nonfinite).tolist() == [replica]
