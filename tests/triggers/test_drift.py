"""The drift from the anchor: its values, and the variance that it bounds."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import synchronizers
from curvadion_jax.triggers import Observation, drift

# Sums of squares of 74 numbers in float32, and their root.
RTOL = 1e-5


def value(params, anchor, threshold=0.1):
    return drift(threshold).decide(Observation(params=params, anchor=anchor), ())[0]


def relative(params, anchor):
    """|params - anchor| / |anchor| in float64, over all leaves together."""
    squares = [
        [np.sum(np.square(np.float64(x))) for x in pair]
        for pair in ((p - a, a) for p, a in zip(params, anchor, strict=True))
    ]
    moved, size = np.sum(squares, axis=0)
    return np.sqrt(moved / size)


def test_by_hand():
    # |(0, 3, 0)| / |(3, 4, 12)| = 3 / 13, and the order of the leaves does not matter.
    anchor = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([[12.0]])}
    params = {"a": jnp.array([3.0, 7.0]), "b": jnp.array([[12.0]])}
    decision = value(params, anchor, 0.25)
    np.testing.assert_allclose(decision.value, 3 / 13, rtol=RTOL)
    assert (float(decision.threshold), bool(decision.fire)) == (0.25, False)
    assert int(decision.layer) == -1
    assert value(params, anchor, 0.2).fire


@pytest.mark.parametrize(
    ("params", "anchor", "expected", "fire"),
    [
        pytest.param(0.0, 0.0, 0.0, False, id="nothing"),
        pytest.param(2.0, 2.0, 0.0, False, id="no-drift"),
        pytest.param(1.0, 0.0, np.inf, True, id="from-zero"),
        pytest.param(np.nan, 1.0, np.inf, True, id="nan"),
        pytest.param(np.inf, 1.0, np.inf, True, id="infinite"),
    ],
)
def test_edges(params, anchor, expected, fire):
    decision = value({"w": jnp.full(3, params)}, {"w": jnp.full(3, anchor)}, 0.0)
    assert (decision.value, decision.fire) == (expected, fire)


def test_small_numbers_are_added_up_in_float32():
    # 2^16 squares of 2^-8 overflow nothing, but a bfloat16 sum stops at 2^8 of them.
    anchor = {"w": jnp.full(2**16, 1.0, jnp.bfloat16)}
    params = {"w": jnp.full(2**16, 1 + 2**-4, jnp.bfloat16)}
    np.testing.assert_allclose(value(params, anchor).value, 2**-4, rtol=RTOL)


def test_thresholds_by_stage_of_training():
    anchor, params = {"w": jnp.array([10.0])}, {"w": jnp.array([11.0])}
    stages = optax.join_schedules(
        [optax.constant_schedule(0.05), optax.linear_schedule(0.05, 0.45, 4)], [3]
    )

    def decide(steps):
        seen = Observation(params=params, anchor=anchor, steps=steps)
        return drift(stages).decide(seen, ())[0]

    decisions = jax.vmap(decide)(jnp.arange(8))
    np.testing.assert_allclose(
        decisions.threshold,
        [0.05, 0.05, 0.05, 0.05, 0.15, 0.25, 0.35, 0.45],
        rtol=RTOL,
    )
    assert decisions.fire.tolist() == [True] * 4 + [False] * 4


LIMIT = 0.05


@pytest.fixture(scope="module")
def history():
    """(Parameters before, state before, synced) of 30 steps on eight replicas."""
    tx = cd.adaptive_sync(
        optax.sgd(0.02, 0.9), drift(LIMIT), synchronizers.reconcile(), helpers.AXIS
    )
    params = helpers.make_params()
    gradients = helpers.make_gradients(30, 8)
    states = list(helpers.run_mesh(tx, params, gradients))
    start = jax.device_get(helpers.start(tx, params, cd.replicas.make_mesh(8)))
    return list(zip([start, *states[:-1]], states, strict=True))


def test_replicas_synchronise_when_one_has_drifted_too_far(history):
    fired = []
    for before, after in history:
        params, state = before
        anchors = jax.tree.leaves(state.sync_state.anchor)
        drifts = [
            relative(
                [x[replica] for x in jax.tree.leaves(params)],
                [x[replica] for x in anchors],
            )
            for replica in range(8)
        ]
        values = after[1].metrics.value
        np.testing.assert_allclose(values, drifts, rtol=RTOL, atol=1e-7)
        synced = bool(after[1].metrics.synced[0])
        assert synced == (max(drifts) > LIMIT)
        fired.append(synced)
    assert 3 <= sum(fired) <= 15


def test_the_variance_of_the_replicas_is_bounded_while_they_step_alone(history):
    shares = []
    for (params, state), (_, after) in history:
        if after.metrics.synced[0]:
            continue
        anchor = jax.tree.leaves(state.sync_state.anchor)
        size = np.sqrt(sum(np.sum(np.square(x[0])) for x in anchor))
        spread = sum(
            np.sum(np.square(x - x.mean(0))) / 8 for x in jax.tree.leaves(params)
        )
        shares.append(spread / (LIMIT * size) ** 2)
    assert 0.1 < max(shares) <= 1  # and the bound is not a trivial one
