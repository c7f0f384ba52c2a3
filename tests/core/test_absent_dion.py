"""An absent replica with Dion: it keeps its momentum, and has the common Q again."""

import functools

import helpers
import jax
import numpy as np
import pytest
import weighted_runs
from weighted_runs import FORMS

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

AXIS = cd.replicas.AXIS
REPLICAS = 4
SUMS = 2e-5  # of a few dozen float32 numbers of size 1, and of a product with Q
train_on = functools.partial(weighted_runs.train_on, replicas=REPLICAS)
start = functools.partial(weighted_runs.start, replicas=REPLICAS)


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, FORMS["int8"]], ids=["exact", "int8"])
def test_an_absent_dion_keeps_its_momentum(form):
    """Its B = M + G waits whole; the step is the one of those who are there."""
    tx = cd.adaptive_sync(
        cd.dion(0.1, 2),
        triggers.always(),
        synchronizers.average_factors(form),
        AXIS,
    )
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    params, state = train_on(tx)(start(tx), gradients, np.float32([1, 0, 0, 1]))
    dion = helpers.dion_state(state)
    close = 1e-6 if form is None else 2e-2
    lost = 0 if form is None else close  # of the mean, which waits with it
    for key in helpers.MATRICES:
        found, whole = dion.momentum[key][1:3], gradients[key][1:3]
        np.testing.assert_allclose(found, whole, atol=lost)
        assert not np.allclose(dion.momentum[key][0], gradients[key][0])
        np.testing.assert_array_equal(params[key][1], params[key][0])
    few = {key: x[[0, 3]] for key, x in gradients.items()}
    pair, _ = helpers.last(helpers.run_vmap(tx, helpers.make_params(), [few]))
    for key in helpers.SHAPES:
        np.testing.assert_allclose(params[key][0], pair[key][0], atol=close)


def after_one_sync(rank, momentum, away):
    """Gradients, and Dion's state after a sync in a form that rounds the mean, too."""
    tx = cd.adaptive_sync(
        cd.dion(0.1, rank, momentum=momentum),
        triggers.always(),
        synchronizers.average_factors(FORMS["int2-mean4"]),
        AXIS,
    )
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    weights = np.float32([index != away for index in range(REPLICAS)])
    _, state = train_on(tx)(start(tx), gradients, weights)
    return gradients, helpers.dion_state(state)


@pytest.mark.slow
@pytest.mark.parametrize("away", range(REPLICAS))
def test_what_rounding_loses_of_a_mean_factor_waits_with_who_is_absent(away):
    """What leaves all momenta together is (1 - mu) P R^T: its rows are those of R.

    Every replica rounds blocks of the mean, and holds what that loses.
    """
    gradients, dion = after_one_sync(2, 0.5, away)
    for key in helpers.MATRICES:
        taken = (gradients[key] - dion.momentum[key]).sum(0)
        q = np.asarray(dion.q[key][0])
        rows = taken if len(q) == taken.shape[1] else taken.T
        left = rows - rows @ q @ np.linalg.pinv(q)
        np.testing.assert_allclose(left, 0, atol=SUMS)


@pytest.mark.slow
@pytest.mark.parametrize("away", range(REPLICAS))
def test_what_rounding_loses_of_a_whole_mean_waits_with_who_is_absent(away):
    """At full rank half of the mean stays with mu = 0.5, and nothing of it with 0."""
    gradients, half = after_one_sync(1.0, 0.5, away)
    _, nothing = after_one_sync(1.0, 0.0, away)
    there = (away + 1) % REPLICAS
    for key in helpers.MATRICES:
        mean = 2 * (half.momentum[key] - nothing.momentum[key])[there]
        sent = (gradients[key] - nothing.momentum[key]).sum(0)
        np.testing.assert_allclose(sent, (REPLICAS - 1) * mean, atol=SUMS)


def test_who_was_away_once_has_the_common_q_again():
    """It is made of the mean momenta, which an absent replica does without."""
    tx = cd.adaptive_sync(
        cd.dion(0.1, 2), triggers.every_k(2), synchronizers.reconcile(), AXIS
    )
    step, state = train_on(tx), start(tx)
    away, all_there = np.float32([0, 1, 1, 1]), np.ones(REPLICAS, np.float32)
    for index, gradients in enumerate(helpers.make_gradients(4, REPLICAS)):
        state = step(state, gradients, away if index < 2 else all_there)
        for q in jax.tree.leaves(state[1].sync_state.common):
            for replica in range(1, REPLICAS):
                np.testing.assert_array_equal(q[replica], q[0])
        absent = state[1].metrics.absent.tolist()
        assert absent == [int(index > 0), 0, 0, 0]
    for q in jax.tree.leaves(helpers.dion_state(state).q):
        for replica in range(1, REPLICAS):
            np.testing.assert_array_equal(q[replica], q[0])
