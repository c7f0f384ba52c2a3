"""The NumPy reference against arithmetic by hand and microsoft/dion's own update."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import reference as ref

# ColumnNormalize divides by ||R|| + 1e-8 where the hand arithmetic divides by ||R||;
# every norm below is at least 1, so a unit column is short by at most 1e-8.
HAND_ATOL = 1e-8
# Two float64 evaluations of the same expression, sums of a few dozen terms of order 10,
# through a QR of condition number below 1e3.
EQUIVALENT_ATOL = 1e-12
# optax computes in float32 here, on numbers of order 1.
OPTAX_ATOL = 1e-6
# dion_update casts to float32 inside its QR and its column normalisation. P and Q then
# carry 2^-24 = 6e-8 times the condition number of B Q, up to 1.8e3 in these cases; one
# step and five steps in a row differ by at most 2.1e-6 in X, 4.0e-7 in M, 2.6e-5 in Q.
# With float64 in place of float32 in that file: 2e-15, 9e-16, 3e-14.
MICROSOFT_ATOL = {"X": 5e-6, "M": 1e-6, "Q": 6e-5}

with np.load(Path(__file__).parent / "vectors" / "microsoft_dion.npz") as _file:
    VECTORS = dict(_file)
PROVENANCE = json.loads(str(VECTORS["provenance"]))

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


# Two replicas, one 2 x 2 kernel W (rank 1, Q = (1, 0)), one bias b; lr = mu = 1/2.
# For a square kernel K: B Q = K^T q, R = K p, P R^T is R p^T and the direction Q' p^T.
START = {"W": np.array([[1.0, 2], [3, 4]]), "b": np.array([1.0, 1])}
QUIET_GRADIENTS = [
    {"W": np.array([[0.0, 4], [2, 0]]), "b": np.array([2.0, 0])},
    {"W": np.array([[0.0, -8], [-2, 6]]), "b": np.array([0.0, 4])},
]


def after_quiet_step(synchronizer, **options):
    """Simulation after step 0 of every_k(2), which is quiet."""
    simulation = ref.ReplicaSimulation(
        START,
        {"W": np.array([[1.0], [0.0]])},
        2,
        learning_rate=0.5,
        mu=0.5,
        trigger=lambda local: ref.every_k(local.step, 2),
        synchronizer=synchronizer,
        **options,
    )
    simulation.step(QUIET_GRADIENTS)
    return simulation


def check(simulation, *, w, b, m, q):
    """Compare parameters, momenta and right factors, each a list over replicas."""
    close([p["W"] for p in simulation.params], w)
    close([p["b"] for p in simulation.params], b)
    close([each["W"] for each in simulation.momenta], m)
    close([each["W"][:, 0] for each in simulation.qs], q)


@pytest.mark.parametrize("synchronizer", ref.SYNCHRONIZERS)
def test_quiet_step_by_hand(synchronizer):
    # Replica 0: K = [[0, 4], [2, 0]], K^T q = (0, 4), p = (0, 1), R = K p = (4, 0),
    # q' = (1, 0); M' = K - [[0, 4], [0, 0]] / 2; direction [[0, 1], [0, 0]].
    # Replica 1: K = [[0, -8], [-2, 6]], K^T q = (0, -8), p = (0, -1), R = (8, -6),
    # q' = (.8, -.6); M' = K - [[0, -8], [0, 6]] / 2; direction [[0, -.8], [0, .6]].
    # b: (1, 1) - (2, 0) / 2 and (1, 1) - (0, 4) / 2.
    simulation = after_quiet_step(synchronizer)
    assert simulation.synced == [False]
    check(
        simulation,
        w=[[[1, 1.5], [3, 4]], [[1, 2.4], [3, 3.7]]],
        b=[[0, 1], [1, -1]],
        m=[[[0, 2], [2, 0]], [[0, -4], [-2, 3]]],
        q=[[1, 0], [0.8, -0.6]],
    )
    close(simulation.anchor["W"], START["W"], 0)


@pytest.mark.slow
def test_average_gradients_by_hand():
    # Mean gradient [[0, 2], [2, -3]] and (1, 1).
    # Replica 0: K = [[0, 4], [4, -3]], K^T q = (0, 4), p = (0, 1), R = (4, -3),
    # q' = (.8, -.6); M' = K - [[0, 4], [0, -3]] / 2; direction [[0, .8], [0, -.6]].
    # Replica 1: K = [[0, -2], [0, 0]], K^T (.8, -.6) = (0, -1.6), p = (0, -1),
    # R = (2, 0), q' = (1, 0); M' = K / 2; direction [[0, -1], [0, 0]].
    simulation = after_quiet_step("average_gradients")
    simulation.step(
        [
            {"W": np.array([[1.0, 5], [0, -3]]), "b": np.array([0.0, 2])},
            {"W": np.array([[-1.0, -1], [4, -3]]), "b": np.array([2.0, 0])},
        ]
    )
    assert simulation.synced == [False, True]
    check(
        simulation,
        w=[[[1, 1.1], [3, 4.3]], [[1, 2.9], [3, 3.7]]],
        b=[[-0.5, 0.5], [0.5, -1.5]],
        m=[[[0, 2], [4, -1.5]], [[0, -1], [0, 0]]],
        q=[[0.8, -0.6], [1, 0]],
    )


def test_average_factors_by_hand():
    # Replica 0: K = [[0, 6], [4, 1]], K^T (1, 0) = (0, 6).
    # Replica 1: K = [[0, 2], [0, 5]], K^T (1, 0) = (0, 2), with the Q of the start.
    # Mean (0, 4): p = (0, 1). R = mean((6, 1), (2, 5)) = (4, 3), q' = (.8, .6).
    # M' = K - R_k p^T / 2 with each one's K and R; direction [[0, .8], [0, .6]].
    simulation = after_quiet_step("average_factors")
    simulation.step(
        [
            {"W": np.array([[0.0, 4], [2, 1]]), "b": np.array([0.0, 2])},
            {"W": np.array([[0.0, 6], [2, 2]]), "b": np.array([2.0, 0])},
        ]
    )
    assert simulation.synced == [False, True]
    check(
        simulation,
        w=[[[1, 1.1], [3, 3.7]], [[1, 2], [3, 3.4]]],
        b=[[-0.5, 0.5], [0.5, -1.5]],
        m=[[[0, 3], [4, 0.5]], [[0, 1], [0, 2.5]]],
        q=[[0.8, 0.6], [0.8, 0.6]],
    )


# Replica 0: K = [[0, 4], [4, 3]], K^T (1, 0) = (0, 4), p = (0, 1), R = (4, 3),
# q' = (.8, .6); M' = [[0, 2], [4, 1.5]]; W = [[1, 1.1], [3, 3.7]], b = (0, 0).
# Replica 1: K = [[0, -8], [0, 0]], K^T (.8, -.6) = (0, -6.4), p = (0, -1), R = (8, 0),
# q' = (1, 0); M' = [[0, -4], [0, 0]]; W = [[1, 2.9], [3, 3.7]], b = (0, -1).
# Mean drift from START: [[0, 0], [0, -.3]] and (-1, -1.5).
# Mean M = [[0, -1], [2, .75]]; with Q_bar = (1, 0), the initial Q: M^T Q_bar =
# (0, -1), p = (0, -1), R = M p = (1, -.75), norm 1.25, Q = (.8, -.6).
RECONCILE_GRADIENTS = [
    {"W": np.array([[0.0, 2], [2, 3]]), "b": np.array([0.0, 2])},
    {"W": np.array([[0.0, -4], [2, -3]]), "b": np.array([2.0, 0])},
]
MEAN_MOMENTUM = {"m": [[[0, -1], [2, 0.75]]] * 2, "q": [[0.8, -0.6]] * 2}
LOCAL_MOMENTUM = {
    "m": [[[0, 2], [4, 1.5]], [[0, -4], [0, 0]]],
    "q": [[0.8, 0.6], [1, 0]],
}


@pytest.mark.parametrize(
    ("options", "w", "b", "momentum"),
    [
        pytest.param(
            {}, [[1, 2], [3, 3.7]], [0, -0.5], MEAN_MOMENTUM, id="plain-average"
        ),
        # First Nesterov step: t' = g, step = -lr (1 + momentum) g = 1.5 x 0.5 x drift.
        pytest.param(
            {"outer": ref.nesterov(0.5, 0.5)},
            [[1, 2], [3, 3.775]],
            [0.25, -0.125],
            MEAN_MOMENTUM,
            id="nesterov",
        ),
        pytest.param(
            {"average_momentum": False},
            [[1, 2], [3, 3.7]],
            [0, -0.5],
            LOCAL_MOMENTUM,
            id="momentum-stays-local",
        ),
    ],
)
def test_reconcile_by_hand(options, w, b, momentum):
    simulation = after_quiet_step("reconcile", **options)
    simulation.step(RECONCILE_GRADIENTS)
    assert simulation.synced == [False, True]
    check(simulation, w=[w, w], b=[b, b], **momentum)
    close(simulation.anchor["W"], w)
    close(simulation.anchor["b"], b)


def test_reconcile_recomputes_q_from_the_q_of_the_previous_sync():
    # At rank one Orthonormalize(M Q_bar) is M Q_bar / ||M Q_bar||, so the new Q is
    # M^T M Q_bar over its norm, in the view with rows >= columns (here K itself).
    rng = np.random.default_rng(1)
    simulation = ref.ReplicaSimulation(
        {"W": np.zeros((4, 3))},
        {"W": rng.normal(size=(3, 1))},
        3,
        learning_rate=0.1,
        mu=0.9,
        trigger=lambda local: ref.every_k(local.step, 2),
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
    outer, state, steps = ref.nesterov(0.5, 0.5), None, []
    optimizer = optax.sgd(0.5, momentum=0.5, nesterov=True)
    optimizer_state, updates = optimizer.init({"x": np.zeros(1)}), []
    for drift in (np.array([2.0]), np.array([-4.0])):
        step, state = outer({"x": drift}, state)
        steps.append(step["x"])
        update, optimizer_state = optimizer.update({"x": -drift}, optimizer_state)
        updates.extend(np.asarray(x) for x in jax.tree.leaves(update))
    close(steps, [[1.5], [-2.75]], 0)
    close(updates, steps, OPTAX_ATOL)


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


def test_every_k_syncs_after_k_steps():
    assert [ref.every_k(step, 3) for step in range(7)] == [0, 0, 1, 0, 0, 1, 0]
    assert all(ref.every_k(step, 1) for step in range(3))


def test_relative_momentum_change_decides_for_all_replicas():
    # Square kernels, full rank, mu = 1/2: M' = B / 2. Gradients c I keep M = m I, and
    # RMMC is |c| / m while c >= 0. Step 0 syncs: B = (3 + 5) / 2 = 4, m = 2 on both.
    # Step 1: RMMC .25 and .25, quiet, B = 2.5, m = 1.25. Step 2: .8 and 0, the first
    # fires. Step 3: NaN on the second.
    simulation = ref.ReplicaSimulation(
        {"W": np.zeros((2, 2))},
        {"W": np.eye(2)},
        2,
        learning_rate=0.5,
        mu=0.5,
        trigger=ref.relative_momentum_change_trigger(0.6),
        synchronizer="average_gradients",
    )
    for pair in ((3.0, 5.0), (0.5, 0.5), (1.0, 0.0), (0.0, np.nan)):
        simulation.step([{"W": c * np.eye(2)} for c in pair])
    assert simulation.synced == [True, False, True, True]


@pytest.mark.parametrize("floor", [0.0, 0.1], ids=["no-floor", "floor"])
def test_relative_momentum_change_always_fires_at_step_0(floor):
    trigger = ref.relative_momentum_change_trigger(np.inf, floor)
    zero = {"W": np.zeros((2, 2))}
    assert trigger(ref.LocalStep(0, zero, zero, zero))
    assert not trigger(ref.LocalStep(1, zero, zero, zero))


def test_a_trigger_that_returns_nan_fires():
    simulation = after_quiet_step("average_gradients")
    simulation.trigger = lambda local: np.nan if "b" in local.params else False
    simulation.step(QUIET_GRADIENTS)
    assert simulation.synced == [False, True]


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


@pytest.mark.parametrize("synchronizer", ["average_gradients", "average_factors"])
def test_always_within_the_step_is_one_big_batch(synchronizer):
    rng = np.random.default_rng(3)
    params = {"W": rng.normal(size=(5, 3)), "b": rng.normal(size=3)}
    q = {"W": rng.normal(size=(3, 2))}

    def simulate(n):
        return ref.ReplicaSimulation(
            params,
            q,
            n,
            learning_rate=0.1,
            mu=0.9,
            trigger=lambda local: True,
            synchronizer=synchronizer,
        )

    several, one = simulate(4), simulate(1)
    for _ in range(4):
        gradients = [
            {"W": rng.normal(size=(5, 3)), "b": rng.normal(size=3)} for _ in range(4)
        ]
        several.step(gradients)
        one.step([ref.tree_mean(gradients)])
    for replica in several.params:
        for name in params:
            close(replica[name], one.params[0][name], EQUIVALENT_ATOL)


def test_vectors_say_where_they_come_from():
    assert PROVENANCE["source"] == "https://github.com/microsoft/dion"
    assert len(PROVENANCE["commit"]) == 40
    assert {"torch", "date", "licence", "settings"} <= PROVENANCE.keys()
    stored = {key.rsplit("/")[0] for key in VECTORS if key != "provenance"}
    assert stored == PROVENANCE["cases"].keys()


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
        # Q is determined up to the signs of its columns. Their lengths differ only
        # after an all-zero momentum, see the next test.
        close(unit_columns(own[2], after[2]), after[2], MICROSOFT_ATOL["Q"])


@pytest.mark.parametrize("name", [n for n in PROVENANCE["cases"] if "zero_first" in n])
def test_all_zero_step_keeps_q_where_microsoft_dion_normalises_it(name):
    (first, second, *_), gradients = microsoft_states(name)
    _, _, q = reference_update(first, gradients[0], 0.1)
    assert not gradients[0].any()
    close(q, first[2], 0)
    close(second[2], unit_columns(first[2], first[2]), MICROSOFT_ATOL["Q"])
    close(second[0], first[0] * (1 - 0.1 * 0.1), EQUIVALENT_ATOL)  # weight decay alone
