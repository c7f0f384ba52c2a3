"""The NumPy reference of replicas against arithmetic by hand."""

import jax
import numpy as np
import optax
import pytest
import reference_replicas as ref
from reference import tree_mean

# ColumnNormalize divides by ||R|| + 1e-8 where the hand arithmetic divides by ||R||;
# every norm below is at least 1, so a unit column is short by at most 1e-8.
HAND_ATOL = 1e-8
# Two float64 evaluations of the same expression, sums of a few dozen terms of order 10,
# through a QR of condition number below 1e3.
EQUIVALENT_ATOL = 1e-12
# optax computes in float32 here, on numbers of order 1.
OPTAX_ATOL = 1e-6


def close(actual, expected, atol=HAND_ATOL):
    """Assert that two arrays agree to an absolute tolerance."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


# Two replicas, one 2 x 2 kernel W (rank 1, Q = (1, 0)), one bias b; lr = mu = 1/2.
# For a square kernel K: B Q = K^T q, R = K p, P R^T is R p^T and the direction Q' p^T.
START = {"W": np.array([[1.0, 2], [3, 4]]), "b": np.array([1.0, 1])}
LOCAL_GRADIENTS = [
    {"W": np.array([[0.0, 4], [2, 0]]), "b": np.array([2.0, 0])},
    {"W": np.array([[0.0, -8], [-2, 6]]), "b": np.array([0.0, 4])},
]


def after_local_step(synchronizer, **options):
    """Simulation after step 0 of every_k(2), which is local."""
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
    simulation.step(LOCAL_GRADIENTS)
    return simulation


def check(simulation, *, w, b, m, q):
    """Compare parameters, momenta and right factors, each a list over replicas."""
    close([p["W"] for p in simulation.params], w)
    close([p["b"] for p in simulation.params], b)
    close([each["W"] for each in simulation.momenta], m)
    close([each["W"][:, 0] for each in simulation.qs], q)


@pytest.mark.parametrize("synchronizer", ref.SYNCHRONIZERS)
def test_local_step_by_hand(synchronizer):
    # Replica 0: K = [[0, 4], [2, 0]], K^T q = (0, 4), p = (0, 1), R = K p = (4, 0),
    # q' = (1, 0); M' = K - [[0, 4], [0, 0]] / 2; direction [[0, 1], [0, 0]].
    # Replica 1: K = [[0, -8], [-2, 6]], K^T q = (0, -8), p = (0, -1), R = (8, -6),
    # q' = (.8, -.6); M' = K - [[0, -8], [0, 6]] / 2; direction [[0, -.8], [0, .6]].
    # b: (1, 1) - (2, 0) / 2 and (1, 1) - (0, 4) / 2.
    simulation = after_local_step(synchronizer)
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
    simulation = after_local_step("average_gradients")
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
    simulation = after_local_step("average_factors")
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
    simulation = after_local_step("reconcile", **options)
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


def test_every_k_syncs_after_k_steps():
    assert [ref.every_k(step, 3) for step in range(7)] == [0, 0, 1, 0, 0, 1, 0]
    assert all(ref.every_k(step, 1) for step in range(3))


def test_relative_momentum_change_decides_for_all_replicas():
    # Square kernels, full rank, mu = 1/2: M' = B / 2 for gradients c I. Step 0 syncs:
    # B = 3 and 5, or 4 with the mean gradient, m = 2 on both. Step 1: B = 2.5 after 3
    # and 5, RMMC .17 and .5, local, m = 1.25. Step 2: B = 4.25 and 1.25 after 2.5, RMMC
    # .7 and .5, the first fires. Step 3: NaN on the second.
    simulation = ref.ReplicaSimulation(
        {"W": np.zeros((2, 2))},
        {"W": np.eye(2)},
        2,
        learning_rate=0.5,
        mu=0.5,
        trigger=ref.relative_momentum_change_trigger(0.6),
        synchronizer="average_gradients",
    )
    for pair in ((3.0, 5.0), (0.5, 0.5), (3.0, 0.0), (1.0, np.nan)):
        simulation.step([{"W": c * np.eye(2)} for c in pair])
    assert simulation.synced == [True, False, True, True]


@pytest.mark.parametrize("floor", [0.0, 0.1], ids=["no-floor", "floor"])
def test_relative_momentum_change_always_fires_at_step_0(floor):
    trigger = ref.relative_momentum_change_trigger(np.inf, floor)
    zero = {"W": np.zeros((2, 2))}
    assert trigger(ref.LocalStep(0, zero, zero, zero, zero))
    assert not trigger(ref.LocalStep(1, zero, zero, zero, zero))


def test_a_trigger_that_returns_nan_fires():
    simulation = after_local_step("average_gradients")
    simulation.trigger = lambda local: np.nan if "b" in local.params else False
    simulation.step(LOCAL_GRADIENTS)
    assert simulation.synced == [False, True]


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
        one.step([tree_mean(gradients)])
    for replica in several.params:
        for name in params:
            close(replica[name], one.params[0][name], EQUIVALENT_ATOL)
