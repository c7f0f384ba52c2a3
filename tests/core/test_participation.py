"""Replicas of weight 0: they lose nothing, and send nothing."""

import functools

import helpers
import jax
import numpy as np
import optax
import pytest
import weighted_runs

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

pytestmark = pytest.mark.slow  # many programs
AXIS = cd.replicas.AXIS
REPLICAS = 4
ONES = np.ones(REPLICAS, np.float32)
# Sums of a few float32 of size one.
ATOL = 3e-6
train_on = functools.partial(weighted_runs.train_on, replicas=REPLICAS)
start = functools.partial(weighted_runs.start, replicas=REPLICAS)
reconcile = synchronizers.reconcile
NESTEROV = optax.sgd(1.0, momentum=0.5, nesterov=True)


def sgd(synchronizer, k=1, rate=0.1, momentum=None):
    inner = optax.sgd(rate, momentum)
    return cd.adaptive_sync(inner, triggers.every_k(k), synchronizer, AXIS)


@pytest.mark.parametrize(
    "compressor", [None, compressors.exact()], ids=["plain", "error feedback"]
)
def test_reconcile_by_hand(compressor):
    """Two syncs after two steps each; replica 1 is away at the first."""
    tx = sgd(reconcile(compressor=compressor), k=2)
    step, state = train_on(tx), start(tx)
    gradients = helpers.make_gradients(4, REPLICAS)
    key, away = "tall", np.float32([1, 0, 1, 1])
    first = np.asarray(helpers.make_params()[key], np.float64)
    drift = -0.1 * (gradients[0][key] + gradients[1][key]).astype(np.float64)
    anchor = first + drift[[0, 2, 3]].sum(0) / REPLICAS  # what is kept comes later
    for index in (0, 1):
        state = step(state, gradients[index], away)
    kept = np.where(np.arange(REPLICAS)[:, None, None] == 1, drift, 0)
    found = jax.device_get(state)
    np.testing.assert_allclose(found[1].sync_state.anchor[key][0], anchor, atol=ATOL)
    np.testing.assert_allclose(found[0][key], anchor + kept, atol=ATOL)
    if compressor is not None:  # nothing was rounded, so nothing is held back
        np.testing.assert_allclose(found[1].sync_state.residual[key], 0, atol=ATOL)
    assert found[1].metrics.absent.tolist() == [0, 1, 0, 0]
    assert found[1].metrics.excluded.tolist() == [0] * REPLICAS
    for index in (2, 3):
        state = step(state, gradients[index], ONES)
    drift = kept - 0.1 * (gradients[2][key] + gradients[3][key]).astype(np.float64)
    wanted = anchor + drift.mean(0)
    for x in jax.device_get(state[0][key]):
        np.testing.assert_allclose(x, wanted, atol=ATOL)
    everything = -0.1 * sum(each[key].astype(np.float64) for each in gradients)
    np.testing.assert_allclose(wanted, first + everything.mean(0), atol=ATOL)


def test_what_overflows_on_its_way_to_a_sync_is_excluded():
    """Parameters and updates are finite, and their sum is not."""
    tx = sgd(reconcile(), rate=1.0)
    params = {"w": np.full(3, 6e4, np.float16)}
    gradients = {"w": np.zeros((REPLICAS, 3), np.float16)}
    gradients["w"][1] = -6e4
    step = train_on(tx, params=params)
    state = jax.device_get(step(start(tx, params=params), gradients, ONES))
    assert state[1].metrics.excluded.tolist() == [0, 1, 0, 0]
    for found in (state[0]["w"], state[1].sync_state.anchor["w"]):
        np.testing.assert_array_equal(found, np.float16(6e4))


def test_who_has_no_weight_requests_nothing():
    """Others do; so does who has one again."""
    seen = triggers.stateless(
        lambda seen: triggers.decision(seen.gradients["bias"][0] > 0)
    )
    tx = cd.adaptive_sync(optax.sgd(0.1), seen, reconcile(), AXIS)
    step, state = train_on(tx), start(tx)
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    gradients["bias"][:, 0] = [-1, 1, -1, -1]
    synced = []
    for weights in ([1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]):
        state = step(state, gradients, np.float32(weights))
        synced.append(bool(state[1].metrics.synced[0]))
    assert synced == [False, False, True, True]


@pytest.mark.parametrize("outer", [None, NESTEROV], ids=["mean", "nesterov"])
def test_where_nobody_takes_part_the_mean_is_zero(outer):
    """Each replica keeps what it has moved by, on top of where the anchor goes."""
    tx = sgd(reconcile(outer))
    step, state = train_on(tx), start(tx)
    first, last = helpers.make_gradients(2, REPLICAS)
    before = jax.device_get(step(state, first, ONES))
    params, after = jax.device_get(step(before, last, 0 * ONES))
    for name, anchor in before[1].sync_state.anchor.items():
        if outer is None:
            wanted = anchor
        else:  # pseudo-gradient 0: trace 0.5 t, update 0.25 t
            trace = before[1].sync_state.common[0].trace[name]
            wanted = anchor - 0.25 * trace
        found = after.sync_state.anchor[name]
        np.testing.assert_allclose(found, wanted, atol=ATOL)
        np.testing.assert_allclose(
            params[name],
            found + (before[0][name] - anchor) - 0.1 * last[name],
            atol=ATOL,
        )
    assert after.metrics.absent.tolist() == [1] * REPLICAS


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_what_is_no_weight_is_none(weight):
    tx = sgd(synchronizers.average_gradients(), rate=1.0)
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    weights = np.float32([1, weight, 1, 1])
    params, state = train_on(tx)(start(tx), gradients, weights)
    wanted = helpers.make_params()["wide"] - gradients["wide"][[0, 2, 3]].mean(0)
    np.testing.assert_allclose(params["wide"][1], wanted, atol=ATOL)
    assert state.metrics.absent.tolist() == [0, 1, 0, 0]
