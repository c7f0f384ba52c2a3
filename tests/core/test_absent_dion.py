"""An absent replica with Dion: it keeps its momentum, and has the common Q again."""

import functools

import helpers
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


def after_one_sync(form, weights, rank=2, momentum=0.95):
    """Gradients, and parameters and Dion's state after a sync of its factors."""
    tx = cd.adaptive_sync(
        cd.dion(0.1, rank, momentum=momentum),
        triggers.always(),
        synchronizers.average_factors(form),
        AXIS,
    )
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    gradients = {key: x[: len(weights)] for key, x in gradients.items()}
    step = weighted_runs.train_on(tx, len(weights))
    first = weighted_runs.start(tx, len(weights))
    params, state = step(first, gradients, np.float32(weights))
    return gradients, params, helpers.dion_state(state)


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, FORMS["int8"]], ids=["exact", "int8"])
def test_an_absent_dion_keeps_its_momentum(form):
    """Its B = M + G waits whole; the step is the one of those who are there."""
    gradients, params, dion = after_one_sync(form, [1, 1, 0, 0])
    _, pair, _ = after_one_sync(form, [1, 1])
    close = 1e-6 if form is None else 2e-2
    lost = 0 if form is None else close  # of the mean, which waits with it
    for key in helpers.MATRICES:
        found, whole = dion.momentum[key][2:], gradients[key][2:]
        np.testing.assert_allclose(found, whole, atol=lost)
        assert not np.allclose(dion.momentum[key][0], gradients[key][0])
        np.testing.assert_array_equal(params[key][2], params[key][0])
    for key in helpers.SHAPES:
        np.testing.assert_allclose(params[key][0], pair[key][0], atol=close)


@pytest.mark.slow
@pytest.mark.parametrize("away", range(REPLICAS))
def test_what_rounding_loses_of_a_mean_waits_with_who_is_absent(away):
    """Every replica rounds blocks of the mean, and holds what that loses.

    What leaves all momenta together is (1 - mu) P R^T: its rows are those of R. At full
    rank half of the mean stays with mu = 0.5, and nothing of it with 0.
    """
    weights = [index != away for index in range(REPLICAS)]
    run = functools.partial(after_one_sync, FORMS["int2"], weights)
    gradients, _, dion = run(2, 0.5)
    _, _, half = run(1.0, 0.5)
    _, _, nothing = run(1.0, 0.0)
    there = (away + 1) % REPLICAS
    for key in helpers.MATRICES:
        taken = (gradients[key] - dion.momentum[key]).sum(0)
        q = np.asarray(dion.q[key][0])
        rows = taken if len(q) == taken.shape[1] else taken.T
        left = rows - rows @ q @ np.linalg.pinv(q)
        np.testing.assert_allclose(left, 0, atol=SUMS)
        mean = 2 * (half.momentum[key] - nothing.momentum[key])[there]
        sent = (gradients[key] - nothing.momentum[key]).sum(0)
        np.testing.assert_allclose(sent, (REPLICAS - 1) * mean, atol=SUMS)
