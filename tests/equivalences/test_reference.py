"""The NumPy reference, of Dion and of replicas, against arithmetic by hand."""

import jax
import numpy as np
import optax
import pytest
import reference as ref
import reference_replicas as replicas

# ColumnNormalize divides by ||R|| + 1e-8 where the hand arithmetic divides by ||R||;
# every norm below is at least 1, so a unit column is short by at most 1e-8.
HAND_ATOL = 1e-8
# Two float64 evaluations of the same expression, sums of a few dozen terms of order 10,
# through a QR of condition number below 1e3.
EQUIVALENT_ATOL = 1e-12

E1, E2, E3 = np.eye(3)


def close(actual, expected, atol=HAND_ATOL):
    """Assert that two arrays agree to an absolute tolerance."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        pytest.param([-4 * E2, 3 * E1], [-E2, E1], id="positive-diagonal"),
        pytest.param([0 * E1, 2 * E2], [0 * E1, E2], id="zero-column"),
        pytest.param([2 * E1, 5 * E1, E1 - 7 * E2], [E1, 0 * E1, -E2], id="dependent"),
        pytest.param([1e-30 * E3, E3 + E1], [E3, E1], id="tiny-but-independent"),
        pytest.param([E1, E1 + 1e-10 * E2, E2], [E1, 0 * E1, E2], id="below-threshold"),
        pytest.param([E1, E1 + 1e-8 * E2, E3], [E1, E2, E3], id="above-threshold"),
        pytest.param([0 * E1, 0 * E1], [0 * E1, 0 * E1], id="all-zero"),
    ],
)
def test_orthonormal_factor_of_simple_columns(columns, expected):
    close(ref.orthonormal_factor(np.stack(columns, axis=1)), np.stack(expected, axis=1))


def test_orthonormal_factor_leaves_a_positive_triangle():
    a = np.random.default_rng(0).normal(size=(7, 4))
    p = ref.orthonormal_factor(a)
    t = p.T @ a
    close(p.T @ p, np.eye(4), EQUIVALENT_ATOL)
    close(p @ t, a, EQUIVALENT_ATOL)
    close(np.tril(t, -1), 0, EQUIVALENT_ATOL)
    assert (np.diag(t) > 0).all()


def test_column_normalize_keeps_the_previous_column_of_a_zero():
    r = np.array([[3.0, 0.0], [-4.0, 0.0]])
    previous = np.array([[9.0, 0.25], [9.0, -2.0]])
    close(ref.column_normalize(r, previous), [[0.6, 0.25], [-0.8, -2.0]])


@pytest.mark.parametrize(
    ("kernel", "q", "direction"),
    [
        # fan_out = 4 fan_in: scale 2; P = (.6, 0, .8, 0) on fan_out, Q = (1).
        pytest.param([[3, 0, 4, 0]], [[1]], [[1.2, 0, 1.6, 0]], id="fan_out-larger"),
        # fan_in = 4 fan_out: scale 1/2; P = (.6, 0, .8, 0) on fan_in, Q = (1).
        pytest.param(
            [[3], [0], [4], [0]], [[1]], [[0.3], [0], [0.4], [0]], id="fan_in"
        ),
        # Equal sides: P on fan_out. B Q is the kernel's row 0, (0, 5): P = (0, 1), and
        # R is the kernel's column 1, (5, 0). With P on fan_in B Q would be (0, 2).
        pytest.param([[0, 5], [2, 0]], [[1], [0]], [[0, 1], [0, 0]], id="equal-sides"),
    ],
)
def test_dion_step_orientation_and_scale(kernel, q, direction):
    kernel, q = np.array(kernel, float), np.array(q, float)
    actual, _, _ = ref.dion_step(kernel, np.zeros_like(kernel), q, mu=0.5)
    close(actual, direction)


@pytest.mark.parametrize(
    ("error_feedback", "new_momentum", "new_q"),
    [
        # B = M + G = [[0, 6], [2, 8]]; row 0 is (0, 6), so P = (0, 1), R = column 1 =
        # (6, 8), Q = (.6, .8). R P^T = [[0, 6], [0, 8]] in the kernel's layout, half of
        # which leaves B: M' = [[0, 3], [2, 4]].
        pytest.param(True, [[0, 3], [2, 4]], [[0.6], [0.8]], id="error-feedback"),
        # B = M / 2 + G = [[0, 4], [2, 7.5]] = M'; R = (4, 7.5), norm 8.5.
        pytest.param(False, [[0, 4], [2, 7.5]], [[8 / 17], [15 / 17]], id="paper"),
    ],
)
def test_dion_step_momentum(error_feedback, new_momentum, new_q):
    gradient, momentum = np.array([[0, 2.0], [2, 7]]), np.array([[0, 4.0], [0, 1]])
    q = np.array([[1.0], [0.0]])
    direction, m, q = ref.dion_step(
        gradient, momentum, q, mu=0.5, error_feedback=error_feedback
    )
    close(m, new_momentum)
    close(q, new_q)
    close(direction, [[0, new_q[0][0]], [0, new_q[1][0]]])  # Q P^T, P = (0, 1)


def test_dion_step_of_nothing_changes_nothing():
    zero, q = np.zeros((2, 3)), np.array([[2.0], [1.0]])
    direction, m, new_q = ref.dion_step(zero, zero, q, mu=0.9)
    close([direction, m], 0, 0)
    close(new_q, q, 0)


@pytest.mark.parametrize(
    ("new", "old", "floor", "expected"),
    [
        pytest.param([[3, 4]], [[0, 4]], 0, 0.25, id="grows"),
        pytest.param([[0, 1]], [[0, 4]], 0, 0.75, id="shrinks"),
        pytest.param([[3, 4]], [[0, 0]], 0, np.inf, id="from-zero"),
        pytest.param([[0, 0]], [[0, 0]], 0, 0, id="both-zero"),
        pytest.param([[3, 4]], [[0, 0.25]], 0.5, 0, id="below-floor"),
        pytest.param([[3, 4]], [[0, 0]], 0.5, 0, id="zero-is-below-floor"),
        pytest.param([[1, 0]], [[0, 0.5]], 0.5, 1, id="at-floor"),
        pytest.param([[np.nan, 0]], [[0, 1]], 0, np.nan, id="nan"),
    ],
)
def test_relative_momentum_change(new, old, floor, expected):
    actual = ref.relative_momentum_change(np.array(new), np.array(old), floor)
    np.testing.assert_equal(actual, expected)


def test_divergence_by_hand():
    # Leaves together: (1, 2) and (1, 4), mean (1, 3), distances 1 and 1;
    # mean of the squares (5 + 17) / 2 = 11.
    params = [{"W": np.ones((1, 1)), "b": np.array([b])} for b in (2.0, 4.0)]
    close(ref.divergence(params), 1 / np.sqrt(11), EQUIVALENT_ATOL)


SHAPES = [(8, 5), (5, 8), (6, 6)]


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize(
    "shape", SHAPES, ids=["fan_in-larger", "fan_out-larger", "even"]
)
def test_average_factors_is_dion_on_the_mean_gradient(shape, rank):
    rng = np.random.default_rng(2)
    q = rng.normal(size=(min(shape), rank))
    qs, momenta, momentum = [q] * 3, [np.zeros(shape)] * 3, np.zeros(shape)
    for _ in range(4):
        gradients = list(rng.normal(size=(3, *shape)))
        directions, momenta, qs = ref.dion_step_average_factors(
            gradients, momenta, qs, mu=0.9
        )
        expected, momentum, q = ref.dion_step(
            np.mean(gradients, axis=0), momentum, q, mu=0.9
        )
        close(directions, [expected] * 3, EQUIVALENT_ATOL)
        close(qs, [q] * 3, EQUIVALENT_ATOL)
        close(np.mean(momenta, axis=0), momentum, EQUIVALENT_ATOL)
    assert np.abs(momenta[0] - momenta[1]).max() > 0.1  # the momenta stay local


def test_reconcile_recomputes_q_from_the_q_of_the_previous_sync():
    # At rank one Orthonormalize(M Q_bar) is M Q_bar / ||M Q_bar||, so the new Q is
    # M^T M Q_bar over its norm, in the view with rows >= columns (here K itself).
    rng = np.random.default_rng(1)
    simulation = replicas.ReplicaSimulation(
        {"W": np.zeros((4, 3))},
        {"W": rng.normal(size=(3, 1))},
        3,
        learning_rate=0.1,
        mu=0.9,
        trigger=lambda local: replicas.every_k(local.step, 2),
        synchronizer="reconcile",
    )
    for _ in range(2):
        q_bar = simulation.qs[0]["W"]
        for _ in range(2):
            simulation.step([{"W": g} for g in rng.normal(size=(3, 4, 3))])
        m = simulation.momenta[0]["W"]
        expected = m.T @ m @ q_bar
        for q in simulation.qs:
            close(q["W"], expected / np.linalg.norm(expected))
        close([p["W"] for p in simulation.params], [simulation.anchor["W"]] * 3, 0)
    assert simulation.synced == [False, True, False, True]


def test_nesterov_by_hand_and_in_optax():
    # drift 2: g = -2, t = -2, step = -(-2 + .5 (-2)) / 2 = 1.5.
    # drift -4: g = 4, t = 4 - 1 = 3, step = -(4 + 1.5) / 2 = -2.75.
    outer, state, steps = replicas.nesterov(0.5, 0.5), None, []
    optimizer = optax.sgd(0.5, momentum=0.5, nesterov=True)
    optimizer_state, updates = optimizer.init({"x": np.zeros(1)}), []
    for drift in (np.array([2.0]), np.array([-4.0])):
        step, state = outer({"x": drift}, state)
        steps.append(step["x"])
        update, optimizer_state = optimizer.update({"x": -drift}, optimizer_state)
        updates.extend(np.asarray(x) for x in jax.tree.leaves(update))
    close(steps, [[1.5], [-2.75]], 0)
    close(updates, steps, 1e-6)  # Optax computes in float32


def test_relative_momentum_change_decides_for_all_replicas():
    # Square kernels, full rank, mu = 1/2: M' = B / 2 for gradients c I. Step 0 syncs:
    # B = 3 and 5, or 4 with the mean gradient, m = 2 on both. Step 1: B = 2.5 after 3
    # and 5, RMMC .17 and .5, local, m = 1.25. Step 2: B = 4.25 and 1.25 after 2.5, RMMC
    # .7 and .5, the first fires. Step 3: NaN on the second.
    simulation = replicas.ReplicaSimulation(
        {"W": np.zeros((2, 2))},
        {"W": np.eye(2)},
        2,
        learning_rate=0.5,
        mu=0.5,
        trigger=replicas.relative_momentum_change_trigger(0.6),
        synchronizer="average_gradients",
    )
    for pair in ((3.0, 5.0), (0.5, 0.5), (3.0, 0.0), (1.0, np.nan)):
        simulation.step([{"W": c * np.eye(2)} for c in pair])
    assert simulation.synced == [True, False, True, True]


@pytest.mark.parametrize("floor", [0.0, 0.1], ids=["no-floor", "floor"])
def test_relative_momentum_change_always_fires_at_step_0(floor):
    trigger = replicas.relative_momentum_change_trigger(np.inf, floor)
    zero = {"W": np.zeros((2, 2))}
    assert trigger(replicas.LocalStep(0, zero, zero, zero, zero))
    assert not trigger(replicas.LocalStep(1, zero, zero, zero, zero))
