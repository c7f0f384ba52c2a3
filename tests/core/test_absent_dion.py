"""An absent replica with Dion keeps its momentum and gradient."""

import helpers
import numpy as np
import pytest
import weighted_runs

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

ROUNDING = 1e-6  # of two float32 programs


def after_one_sync(weights):
    """Gradients, and parameters and Dion's state after a sync of its factors."""
    tx = cd.adaptive_sync(
        cd.dion(0.1, 2),
        triggers.always(),
        synchronizers.average_factors(),
        helpers.AXIS,
    )
    (gradients,) = helpers.make_gradients(1, 4)
    gradients = {key: x[: len(weights)] for key, x in gradients.items()}
    step = weighted_runs.train_on(tx, len(weights))
    first = weighted_runs.start(tx, len(weights))
    params, state = step(first, gradients, np.float32(weights))
    return gradients, params, helpers.dion_state(state)


@pytest.mark.slow
def test_an_absent_dion_keeps_its_momentum():
    """Its B = M + G waits whole; the step is the one of those who are there."""
    gradients, params, dion = after_one_sync([1, 1, 0, 0])
    _, pair, _ = after_one_sync([1, 1])
    for key in helpers.MATRICES:
        np.testing.assert_array_equal(dion.momentum[key][2:], gradients[key][2:])
        assert not np.allclose(dion.momentum[key][0], gradients[key][0])
        np.testing.assert_array_equal(params[key][2], params[key][0])
    for key in helpers.SHAPES:
        np.testing.assert_allclose(params[key][0], pair[key][0], atol=ROUNDING)
