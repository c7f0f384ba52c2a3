"""The hand-worked example of test_reference_replicas.py, through the library."""

from typing import Any

import helpers
import jax
import numpy as np
import optax
import pytest
import test_reference_replicas as by_hand

from curvadion_jax import synchronizers, triggers

# float32 on the hand arithmetic's numbers, of order 1 to 8. Measured: 2e-7.
HAND_ATOL = 2e-6


def close(actual, expected, atol):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def hand_worked(synchronizer, second):
    """The library on the example: every_k(2), lr = mu = 1/2."""
    tx: Any = helpers.synced_dion(
        0.5,
        1,
        triggers.every_k(2),
        synchronizer,
        momentum=0.5,
        other_optimizer=optax.sgd(0.5),
        orthonormalize=helpers.householder_qr,
        axis_name=helpers.AXIS,
    )

    def from_first_column(x):
        return np.array([[1.0], [0.0]], np.float32) if x.shape == (2, 1) else x

    params = {k: np.float32(v) for k, v in by_hand.START.items()}
    state = jax.tree.map(from_first_column, tx.init(params))
    gradients = [
        {k: np.array([tree[k] for tree in pair], "float32") for k in params}
        for pair in (by_hand.LOCAL_GRADIENTS, second)
    ]
    given = tx._replace(init=lambda params: state)
    return list(helpers.run_mesh(given, params, gradients))


def check(step, *, w, b, m, q, synced):
    params, state = step
    momenta, qs = helpers.dion_state(state)
    assert state.metrics.synced.tolist() == [synced, synced]
    close(params["W"], w, HAND_ATOL)
    close(params["b"], b, HAND_ATOL)
    close(momenta["W"], m, HAND_ATOL)
    close(qs["W"][..., 0], q, HAND_ATOL)


def test_average_gradients_by_hand():
    local, synced = hand_worked(
        synchronizers.average_gradients(),
        [
            {"W": [[1.0, 5], [0, -3]], "b": [0.0, 2]},
            {"W": [[-1.0, -1], [4, -3]], "b": [2.0, 0]},
        ],
    )
    check(
        local,
        w=[[[1, 1.5], [3, 4]], [[1, 2.4], [3, 3.7]]],
        b=[[0, 1], [1, -1]],
        m=[[[0, 2], [2, 0]], [[0, -4], [-2, 3]]],
        q=[[1, 0], [0.8, -0.6]],
        synced=False,
    )
    check(
        synced,
        w=[[[1, 1.1], [3, 4.3]], [[1, 2.9], [3, 3.7]]],
        b=[[-0.5, 0.5], [0.5, -1.5]],
        m=[[[0, 2], [4, -1.5]], [[0, -1], [0, 0]]],
        q=[[0.8, -0.6], [1, 0]],
        synced=True,
    )


def test_average_factors_by_hand():
    # Two factors of two elements are no smaller than the matrix, so K = B itself is
    # averaged, [[0, 4], [2, 3]], and replicas step from the Q of the start, (1, 0):
    # K^T (1, 0) = (0, 4), p = (0, 1), R = (4, 3), q' = (.8, .6); direction q' p^T.
    _, synced = hand_worked(
        synchronizers.average_factors(),
        [
            {"W": [[0.0, 4], [2, 1]], "b": [0.0, 2]},
            {"W": [[0.0, 6], [2, 2]], "b": [2.0, 0]},
        ],
    )
    check(
        synced,
        w=[[[1, 1.1], [3, 3.7]], [[1, 2.0], [3, 3.4]]],
        b=[[-0.5, 0.5], [0.5, -1.5]],
        m=[[[0, 2], [2, 1.5]], [[0, 2], [2, 1.5]]],
        q=[[0.8, 0.6], [0.8, 0.6]],
        synced=True,
    )


@pytest.mark.parametrize(
    ("synchronizer", "w", "b", "momentum"),
    [
        pytest.param(
            synchronizers.reconcile(),
            [[1, 2], [3, 3.7]],
            [0, -0.5],
            by_hand.MEAN_MOMENTUM,
            id="plain-average",
        ),
        pytest.param(
            synchronizers.reconcile(optax.sgd(0.5, momentum=0.5, nesterov=True)),
            [[1, 2], [3, 3.775]],
            [0.25, -0.125],
            by_hand.MEAN_MOMENTUM,
            id="nesterov",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            synchronizers.reconcile(momentum=False),
            [[1, 2], [3, 3.7]],
            [0, -0.5],
            by_hand.LOCAL_MOMENTUM,
            id="momentum-stays-local",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_reconcile_by_hand(synchronizer, w, b, momentum):
    _, synced = hand_worked(synchronizer, by_hand.RECONCILE_GRADIENTS)
    check(synced, w=[w, w], b=[b, b], synced=True, **momentum)
    close(synced[1].sync_state.anchor["W"], [w, w], HAND_ATOL)
    close(synced[1].sync_state.anchor["b"], [b, b], HAND_ATOL)
