"""Two replicas by hand, as the NumPy reference has them."""

import numpy as np
import pytest
import reference_replicas as ref

# ColumnNormalize divides by ||R|| + 1e-8 where the hand divides by ||R||, at least 1.
ATOL = 1e-8

# One 2 x 2 kernel W (rank 1, Q = (1, 0)), one bias b; lr = mu = 1/2; a sync every two
# steps. For a square kernel K: B Q = K^T q, R = K p, P R^T is R p^T and the direction
# Q' p^T.
START = {"W": np.array([[1.0, 2], [3, 4]]), "b": np.array([1.0, 1])}
LOCAL_GRADIENTS = [
    {"W": np.array([[0.0, 4], [2, 0]]), "b": np.array([2.0, 0])},
    {"W": np.array([[0.0, -8], [-2, 6]]), "b": np.array([0.0, 4])},
]
# Replica 0: K = [[0, 4], [2, 0]], K^T q = (0, 4), p = (0, 1), R = K p = (4, 0),
# q' = (1, 0); M' = K - [[0, 4], [0, 0]] / 2; direction [[0, 1], [0, 0]].
# Replica 1: K = [[0, -8], [-2, 6]], K^T q = (0, -8), p = (0, -1), R = (8, -6),
# q' = (.8, -.6); M' = K - [[0, -8], [0, 6]] / 2; direction [[0, -.8], [0, .6]].
# b: (1, 1) - (2, 0) / 2 and (1, 1) - (0, 4) / 2.
LOCAL = {
    "w": [[[1, 1.5], [3, 4]], [[1, 2.4], [3, 3.7]]],
    "b": [[0, 1], [1, -1]],
    "m": [[[0, 2], [2, 0]], [[0, -4], [-2, 3]]],
    "q": [[1, 0], [0.8, -0.6]],
}

# Mean gradient [[0, 2], [2, -3]] and (1, 1).
# Replica 0: K = [[0, 4], [4, -3]], K^T q = (0, 4), p = (0, 1), R = (4, -3),
# q' = (.8, -.6); M' = K - [[0, 4], [0, -3]] / 2; direction [[0, .8], [0, -.6]].
# Replica 1: K = [[0, -2], [0, 0]], K^T (.8, -.6) = (0, -1.6), p = (0, -1),
# R = (2, 0), q' = (1, 0); M' = K / 2; direction [[0, -1], [0, 0]].
GRADIENTS = [
    {"W": np.array([[1.0, 5], [0, -3]]), "b": np.array([0.0, 2])},
    {"W": np.array([[-1.0, -1], [4, -3]]), "b": np.array([2.0, 0])},
]
AVERAGED_GRADIENTS = {
    "w": [[[1, 1.1], [3, 4.3]], [[1, 2.9], [3, 3.7]]],
    "b": [[-0.5, 0.5], [0.5, -1.5]],
    "m": [[[0, 2], [4, -1.5]], [[0, -1], [0, 0]]],
    "q": [[0.8, -0.6], [1, 0]],
}

# Replica 0: K = [[0, 6], [4, 1]], K^T (1, 0) = (0, 6).
# Replica 1: K = [[0, 2], [0, 5]], K^T (1, 0) = (0, 2), with the Q of the start.
# Mean (0, 4): p = (0, 1). R = mean((6, 1), (2, 5)) = (4, 3), q' = (.8, .6).
# M' = K - R_k p^T / 2 with each one's K and R; direction [[0, .8], [0, .6]].
FACTORS = [
    {"W": np.array([[0.0, 4], [2, 1]]), "b": np.array([0.0, 2])},
    {"W": np.array([[0.0, 6], [2, 2]]), "b": np.array([2.0, 0])},
]
AVERAGED_FACTORS = {
    "w": [[[1, 1.1], [3, 3.7]], [[1, 2], [3, 3.4]]],
    "b": [[-0.5, 0.5], [0.5, -1.5]],
    "m": [[[0, 3], [4, 0.5]], [[0, 1], [0, 2.5]]],
    "q": [[0.8, 0.6], [0.8, 0.6]],
}

# Replica 0: K = [[0, 4], [4, 3]], K^T (1, 0) = (0, 4), p = (0, 1), R = (4, 3),
# q' = (.8, .6); M' = [[0, 2], [4, 1.5]]; W = [[1, 1.1], [3, 3.7]], b = (0, 0).
# Replica 1: K = [[0, -8], [0, 0]], K^T (.8, -.6) = (0, -6.4), p = (0, -1), R = (8, 0),
# q' = (1, 0); M' = [[0, -4], [0, 0]]; W = [[1, 2.9], [3, 3.7]], b = (0, -1).
# Mean drift from START: [[0, 0], [0, -.3]] and (-1, -1.5).
# Mean M = [[0, -1], [2, .75]]; with Q_bar = (1, 0), the initial Q: M^T Q_bar =
# (0, -1), p = (0, -1), R = M p = (1, -.75), norm 1.25, Q = (.8, -.6).
RECONCILED = [
    {"W": np.array([[0.0, 2], [2, 3]]), "b": np.array([0.0, 2])},
    {"W": np.array([[0.0, -4], [2, -3]]), "b": np.array([2.0, 0])},
]
COMMON = {
    "w": [[[1, 2], [3, 3.7]]] * 2,
    "b": [[0, -0.5]] * 2,
    "m": [[[0, -1], [2, 0.75]]] * 2,
    "q": [[0.8, -0.6]] * 2,
}
# First Nesterov step: t' = g, step = -lr (1 + momentum) g = 1.5 x 0.5 x drift.
NESTEROV = {**COMMON, "w": [[[1, 2], [3, 3.775]]] * 2, "b": [[0.25, -0.125]] * 2}
LOCAL_MOMENTUM = {
    **COMMON,
    "m": [[[0, 2], [4, 1.5]], [[0, -4], [0, 0]]],
    "q": [[0.8, 0.6], [1, 0]],
}


def close(actual, expected, atol=ATOL):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def check(simulation, *, w, b, m, q):
    """Compare parameters, momenta and right factors, each a list over replicas."""
    close([p["W"] for p in simulation.params], w)
    close([p["b"] for p in simulation.params], b)
    close([each["W"] for each in simulation.momenta], m)
    close([each["W"][:, 0] for each in simulation.qs], q)


CASES = {
    "average_gradients": ({}, GRADIENTS, AVERAGED_GRADIENTS),
    "average_factors": ({}, FACTORS, AVERAGED_FACTORS),
    "reconcile": ({}, RECONCILED, COMMON),
    "reconcile-nesterov": ({"outer": ref.nesterov(0.5, 0.5)}, RECONCILED, NESTEROV),
    "reconcile-local": ({"average_momentum": False}, RECONCILED, LOCAL_MOMENTUM),
}


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name):
    options, second, expected = CASES[name]
    simulation = ref.ReplicaSimulation(
        START,
        {"W": np.array([[1.0], [0.0]])},
        2,
        learning_rate=0.5,
        mu=0.5,
        trigger=lambda local: ref.every_k(local.step, 2),
        synchronizer=name.split("-")[0],
        **options,
    )
    simulation.step(LOCAL_GRADIENTS)
    check(simulation, **LOCAL)
    close(simulation.anchor["W"], START["W"], 0)
    simulation.step(second)
    check(simulation, **expected)
    assert simulation.synced == [False, True]
    if name.startswith("reconcile"):
        close(simulation.anchor["W"], simulation.params[0]["W"], 0)
