"""The NumPy reference: Dion against microsoft/dion, two replicas against the hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import reference as ref
import reference_replicas as replicas

# dion_update casts to float32 inside its QR and its column normalisation. P and Q then
# carry 2^-24 = 6e-8 times the condition number of B Q, up to 1.8e3 in these cases; one
# step and five steps in a row differ by at most 2.1e-6 in X, 4.0e-7 in M, 2.6e-5 in Q.
# With float64 in place of float32 in that file: 2e-15, 9e-16, 3e-14.
MICROSOFT_ATOL = {"X": 5e-6, "M": 1e-6, "Q": 6e-5}
# Two float64 evaluations of one expression, through a QR of condition below 1e3.
EQUIVALENT_ATOL = 1e-12
# ColumnNormalize divides by ||R|| + 1e-8 where the hand divides by ||R||, at least 1.
HAND_ATOL = 1e-8

VECTORS = dict(np.load(Path(ref.__file__).parent / "vectors" / "microsoft_dion.npz"))
PROVENANCE = json.loads(str(VECTORS["provenance"]))


def close(actual, expected, atol=HAND_ATOL):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def microsoft_states(name):
    """Steps' (X, M, Q) and gradients in Flax's layout: X, M and G transposed."""
    x, m, q, g = (VECTORS[f"{name}/{key}"] for key in "XMQG")
    states = list(zip(x.swapaxes(1, 2), m.swapaxes(1, 2), q, strict=True))
    return states, g.swapaxes(1, 2)


def reference_update(state, gradient, weight_decay):
    """X' = X - lr wd X - lr D, with M' and Q'."""
    x, m, q = state
    mu, lr = PROVENANCE["settings"]["mu"], PROVENANCE["settings"]["learning_rate"]
    direction, m, q = ref.dion_step(gradient, m, q, mu=mu)
    return x - lr * weight_decay * x - lr * direction, m, q


def unit_columns(q, like):
    """Columns of norm one, with the signs that bring them closest to ``like``."""
    return q / np.linalg.norm(q, axis=0) * np.sign((q * like).sum(axis=0))


@pytest.mark.parametrize("in_a_row", [False, True], ids=["one-step", "five-steps"])
@pytest.mark.parametrize("name", PROVENANCE["cases"])
def test_reference_reproduces_microsoft_dion(name, in_a_row):
    decay = PROVENANCE["cases"][name]["weight_decay"]
    states, gradients = microsoft_states(name)
    own = states[0]
    for before, after, gradient in zip(states, states[1:], gradients, strict=False):
        own = reference_update(own if in_a_row else before, gradient, decay)
        close(own[0], after[0], MICROSOFT_ATOL["X"])
        close(own[1], after[1], MICROSOFT_ATOL["M"])
        # Up to the signs of Q's columns, and their lengths after an all-zero momentum:
        # microsoft/dion normalises Q then, and the reference keeps it.
        close(unit_columns(own[2], after[2]), after[2], MICROSOFT_ATOL["Q"])


def test_all_zero_step_keeps_q():
    zero, q = np.zeros((2, 3)), np.array([[2.0], [1.0]])
    direction, m, new_q = ref.dion_step(zero, zero, q, mu=0.9)
    close([direction, m], 0, 0)
    close(new_q, q, 0)


def test_paper_momentum_by_hand():
    # B = M / 2 + G = [[0, 4], [2, 7.5]] = M'; row 0 gives P = (0, 1), so R = column 1 =
    # (4, 7.5), of norm 8.5.
    gradient, momentum = np.array([[0, 2.0], [2, 7]]), np.array([[0, 4.0], [0, 1]])
    q = np.array([[1.0], [0.0]])
    direction, m, q = ref.dion_step(gradient, momentum, q, mu=0.5, error_feedback=False)
    close(m, [[0, 4], [2, 7.5]])
    close(q, [[8 / 17], [15 / 17]])
    close(direction, [[0, 8 / 17], [0, 15 / 17]])


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        pytest.param([(0, 0), (0, 2)], [(0, 0), (0, 1)], id="zero"),
        pytest.param([(2, 0), (5, 0), (1, -7)], [(1, 0), (0, 0), (0, -1)], id="same"),
        pytest.param([(1, 0), (1, 1e-10)], [(1, 0), (0, 0)], id="below-threshold"),
        pytest.param([(1, 0), (1, 1e-8)], [(1, 0), (0, 1)], id="above-threshold"),
    ],
)
def test_orthonormal_factor_of_dependent_columns(columns, expected):
    columns = np.pad(np.array(columns, float), ((0, 0), (0, 1)))
    factor = ref.orthonormal_factor(columns.T)
    close(factor.T[:, :2], expected)


@pytest.mark.parametrize(
    ("new", "old", "floor", "expected"),
    [
        pytest.param([[3, 4]], [[0, 4]], 0, 0.25, id="grows"),
        pytest.param([[0, 1]], [[0, 4]], 0, 0.75, id="shrinks"),
        pytest.param([[3, 4]], [[0, 0]], 0, np.inf, id="from-zero"),
        pytest.param([[0, 0]], [[0, 0]], 0, 0, id="both-zero"),
        pytest.param([[3, 4]], [[0, 0.25]], 0.5, 0, id="below-floor"),
        pytest.param([[1, 0]], [[0, 0.5]], 0.5, 1, id="at-floor"),
        pytest.param([[np.nan, 0]], [[0, 1]], 0, np.nan, id="nan"),
    ],
)
def test_relative_momentum_change(new, old, floor, expected):
    actual = ref.relative_momentum_change(np.array(new), np.array(old), floor)
    np.testing.assert_equal(actual, expected)


@pytest.mark.parametrize("rank", [1, 5])
@pytest.mark.parametrize("shape", [(8, 5), (5, 8), (6, 6)])
def test_average_factors_is_dion_on_the_mean_gradient(shape, rank):
    rng = np.random.default_rng(2)
    q = rng.normal(size=(min(shape), rank))
    common_q, momenta, momentum = q, [np.zeros(shape)] * 3, np.zeros(shape)
    for _ in range(4):
        gradients = list(rng.normal(size=(3, *shape)))
        common, momenta, common_q = ref.dion_step_average_factors(
            gradients, momenta, common_q, mu=0.9
        )
        expected, momentum, q = ref.dion_step(
            np.mean(gradients, axis=0), momentum, q, mu=0.9
        )
        close(common, expected, EQUIVALENT_ATOL)
        close(common_q, q, EQUIVALENT_ATOL)
        close(np.mean(momenta, axis=0), momentum, EQUIVALENT_ATOL)
    # Momenta stay local where factors are smaller than the matrix.
    assert (np.abs(momenta[0] - momenta[1]).max() > 0.1) == (rank == 1)


def dion(q):
    return replicas.Matrices(["W"], 0.5, 0.5, replicas.Sgd(0.5), qs=q)


def test_relative_momentum_change_decides_for_all_replicas():
    # Square kernels, full rank, mu = 1/2: M' = B / 2 for gradients c I. Step 0 syncs:
    # B = 3 and 5, or 4 with the mean gradient, m = 2 on both. Step 1: B = 2.5 after 3
    # and 5, RMMC .17 and .5, local, m = 1.25. Step 2: B = 4.25 and 1.25 after 2.5, RMMC
    # .7 and .5, the first fires; m = 1.375. Step 3: B = 2.375 after 4.25, RMMC .44, and
    # NaN says nothing.
    simulation = replicas.Run(
        {"W": np.zeros((2, 2))},
        dion({"W": np.eye(2)}),
        2,
        replicas.MomentumChange(0.6),
        replicas.AverageGradients(),
    )
    for pair in ((3.0, 5.0), (0.5, 0.5), (3.0, 0.0), (1.0, np.nan)):
        simulation.step([{"W": c * np.eye(2)} for c in pair])
    assert simulation.synced == [True, False, True, False]


# One 2 x 2 kernel W (rank 1, Q = (1, 0)), one bias b; lr = mu = 1/2; a sync every two
# steps. For a square K: B Q = K^T q, R = K p, P R^T is R p^T, the direction Q' p^T.
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
# Factors of 2 + 2 numbers are no smaller than K, so K = mean = [[0, 4], [2, 3]] for
# both, and M' = K - R p^T / 2; direction [[0, .8], [0, .6]].
FACTORS = [
    {"W": np.array([[0.0, 4], [2, 1]]), "b": np.array([0.0, 2])},
    {"W": np.array([[0.0, 6], [2, 2]]), "b": np.array([2.0, 0])},
]
AVERAGED_FACTORS = {
    "w": [[[1, 1.1], [3, 3.7]], [[1, 2], [3, 3.4]]],
    "b": [[-0.5, 0.5], [0.5, -1.5]],
    "m": [[[0, 2], [2, 1.5]]] * 2,
    "q": [[0.8, 0.6], [0.8, 0.6]],
}

# Replica 0: K = [[0, 4], [4, 3]], K^T (1, 0) = (0, 4), p = (0, 1), R = (4, 3),
# q' = (.8, .6); M' = [[0, 2], [4, 1.5]]; W = [[1, 1.1], [3, 3.7]], b = (0, 0).
# Replica 1: K = [[0, -8], [0, 0]], K^T (.8, -.6) = (0, -6.4), p = (0, -1), R = (8, 0),
# q' = (1, 0); M' = [[0, -4], [0, 0]]; W = [[1, 2.9], [3, 3.7]], b = (0, -1).
# Mean drift from START: [[0, 0], [0, -.3]] and (-1, -1.5).
RECONCILED = [
    {"W": np.array([[0.0, 2], [2, 3]]), "b": np.array([0.0, 2])},
    {"W": np.array([[0.0, -4], [2, -3]]), "b": np.array([2.0, 0])},
]
COMMON = {
    "w": [[[1, 2], [3, 3.7]]] * 2,
    "b": [[0, -0.5]] * 2,
    "m": [[[0, 2], [4, 1.5]], [[0, -4], [0, 0]]],
    "q": [[0.8, 0.6], [1, 0]],
}
# First Nesterov step: t' = g, step = -lr (1 + momentum) g = 1.5 x 0.5 x drift.
NESTEROV = {**COMMON, "w": [[[1, 2], [3, 3.775]]] * 2, "b": [[0.25, -0.125]] * 2}


def check(simulation, *, w, b, m, q):
    """Compare parameters, momenta and right factors, each a list over replicas."""
    close([p["W"] for p in simulation.params], w)
    close([p["b"] for p in simulation.params], b)
    close([state["momentum"]["W"] for state in simulation.states], m)
    close([state["q"]["W"][:, 0] for state in simulation.states], q)


CASES = {
    "average_gradients": (replicas.AverageGradients(), GRADIENTS, AVERAGED_GRADIENTS),
    "average_factors": (replicas.AverageFactors(), FACTORS, AVERAGED_FACTORS),
    "reconcile": (replicas.Reconcile(), RECONCILED, COMMON),
    "reconcile-nesterov": (
        replicas.Reconcile(replicas.Nesterov(0.5, 0.5)),
        RECONCILED,
        NESTEROV,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_by_hand(name):
    sync, second, expected = CASES[name]
    simulation = replicas.Run(
        START, dion({"W": np.array([[1.0], [0.0]])}), 2, replicas.every_k(2), sync
    )
    simulation.step(LOCAL_GRADIENTS)
    check(simulation, **LOCAL)
    close(simulation.anchor["W"], START["W"], 0)
    simulation.step(second)
    check(simulation, **expected)
    assert simulation.synced == [False, True]
    if name.startswith("reconcile"):
        close(simulation.anchor["W"], simulation.params[0]["W"], 0)
