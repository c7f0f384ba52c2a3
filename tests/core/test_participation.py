"""Replicas of weight 0: they lose nothing, and syncs without anybody change nothing."""

import functools

import helpers
import jax
import numpy as np
import optax
import pytest
import weighted_runs
from weighted_runs import FORMS

import curvadion_jax as cd
from curvadion_jax import compressors, metrics, synchronizers, triggers

AXIS = cd.replicas.AXIS
REPLICAS = 4
# Sums of a few float32 of size one.
ATOL = 3e-6
train_on = functools.partial(weighted_runs.train_on, replicas=REPLICAS)
start = functools.partial(weighted_runs.start, replicas=REPLICAS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "int8", "sign"])
def test_error_feedback_keeps_what_an_absent_replica_has(name):
    """Gradients of six steps of which some were not there: all arrive or are held."""
    tx = cd.adaptive_sync(
        optax.sgd(1.0),
        triggers.always(),
        synchronizers.average_gradients(FORMS[name]),
        AXIS,
    )
    step, state = train_on(tx), start(tx)
    rng = np.random.default_rng(3)
    arrived = {key: 0.0 for key in helpers.SHAPES}
    gradients = helpers.make_gradients(6, REPLICAS)
    for each in gradients:
        weights = rng.integers(0, 2, REPLICAS).astype(np.float32)
        before = jax.device_get(state[0])
        state = step(state, each, weights)
        for key in arrived:
            moved = before[key][0] - np.asarray(state[0][key][0], np.float64)
            arrived[key] += REPLICAS * moved
    for key, found in arrived.items():
        given = sum(each[key].sum(0, np.float64) for each in gradients)
        held = np.asarray(state[1].sync_state.residual[key], np.float64).sum(0)
        np.testing.assert_allclose(found + held, given, rtol=0, atol=4 * ATOL)


@pytest.mark.parametrize("compressor", [None, FORMS["exact"]], ids=["plain", "error"])
def test_reconcile_by_hand(compressor):
    """Two syncs after two steps each; replica 1 is away at the first."""
    tx = cd.adaptive_sync(
        optax.sgd(0.1),
        triggers.every_k(2),
        synchronizers.reconcile(compressor=compressor, momentum=False),
        AXIS,
    )
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
        state = step(state, gradients[index], np.ones(REPLICAS, np.float32))
    drift = kept - 0.1 * (gradients[2][key] + gradients[3][key]).astype(np.float64)
    wanted = anchor + drift.mean(0)
    for x in jax.device_get(state[0][key]):
        np.testing.assert_allclose(x, wanted, atol=ATOL)
    everything = -0.1 * sum(each[key].astype(np.float64) for each in gradients)
    np.testing.assert_allclose(wanted, first + everything.mean(0), atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int2-mean4", "sign"])
def test_drift_arrives_or_is_kept(name):
    """Of all gradients: in the anchor, on top of it, or left by the compressor."""
    tx = cd.adaptive_sync(
        optax.sgd(0.1),
        triggers.every_k(2),
        synchronizers.reconcile(compressor=FORMS[name], momentum=False),
        AXIS,
    )
    step, state = train_on(tx), start(tx)
    rng, gradients = np.random.default_rng(5), helpers.make_gradients(8, REPLICAS)
    for each in gradients:
        state = step(state, each, rng.integers(0, 2, REPLICAS).astype(np.float32))
    params, (*_, kept, counted) = jax.device_get(state)
    assert counted.absent.sum() > REPLICAS
    for key, first in helpers.make_params().items():
        anchor = np.asarray(kept.anchor[key], np.float64)
        held = np.asarray(kept.residual[key], np.float64)
        assert np.abs(held).max() > 1e-3
        moved = (anchor - np.asarray(first)) + (params[key] - anchor) + held
        given = -0.1 * sum(each[key].sum(0, np.float64) for each in gradients)
        np.testing.assert_allclose(moved.sum(0), given, rtol=0, atol=8 * ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [True, FORMS["int8"]], ids=["exact", "int8"])
def test_an_absent_replica_keeps_its_momentum(momentum):
    tx = cd.adaptive_sync(
        optax.sgd(0.1, 0.5),
        triggers.always(),
        synchronizers.reconcile(momentum=momentum),
        AXIS,
    )
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    _, state = train_on(tx)(start(tx), gradients, np.float32([1, 1, 0, 1]))
    found = state.inner_state[0].trace["wide"]
    own = gradients["wide"]
    mean = own[[0, 1, 3]].mean(0)
    close = 1e-6 if momentum is True else 2 * np.abs(own).max() / 127
    np.testing.assert_allclose(found[2], own[2], atol=close)
    if momentum is True:
        np.testing.assert_allclose(found[0], mean, atol=close)
    else:  # and nothing of all momenta is lost
        np.testing.assert_allclose(found.sum(0), own.sum(0), atol=ATOL)


def test_what_overflows_on_its_way_to_a_sync_is_excluded():
    """Parameters and updates are finite, and their sum is not."""
    tx = cd.adaptive_sync(
        optax.sgd(1.0), triggers.always(), synchronizers.reconcile(), AXIS
    )
    params = {"w": np.full(3, 6e4, np.float16)}
    gradients = {"w": np.zeros((REPLICAS, 3), np.float16)}
    gradients["w"][1] = -6e4
    step = train_on(tx, params=params)
    weights = np.ones(REPLICAS, np.float32)
    state = jax.device_get(step(start(tx, params=params), gradients, weights))
    assert state[1].metrics.excluded.tolist() == [0, 1, 0, 0]
    for found in (state[0]["w"], state[1].sync_state.anchor["w"]):
        np.testing.assert_array_equal(found, np.float16(6e4))


@pytest.mark.parametrize("away", [(1,), (1, 3), (0, 1, 2, 3)], ids=str)
def test_who_stays_away_asks_once(away):
    """Its drift stays, and is beyond the threshold on every later step.

    Others do not drift. Who is there again asks.
    """
    tx = cd.adaptive_sync(
        optax.sgd(1.0),
        triggers.drift(0.1),
        synchronizers.reconcile(momentum=False),
        AXIS,
    )
    step, state = train_on(tx), start(tx)
    weights = np.ones(REPLICAS, np.float32)
    weights[list(away)] = 0
    (moving,) = helpers.make_gradients(1, REPLICAS)
    for x in moving.values():
        x[[index not in away for index in range(REPLICAS)]] = 0
    still, found = jax.tree.map(np.zeros_like, moving), []
    for gradients in (moving, *[still] * 15):
        state = step(state, gradients, weights)
        found.append(bool(state[1].metrics.synced[0]))
    assert found == [False, True, *[False] * 14]
    state = step(state, still, np.ones(REPLICAS, np.float32))
    assert state[1].metrics.synced.all()
    params, anchor = state[0]["wide"], state[1].sync_state.anchor["wide"]
    np.testing.assert_allclose(params, anchor, rtol=0, atol=ATOL)
    assert not step(state, still, weights)[1].metrics.synced.any()


@pytest.mark.slow
def test_nobody_changes_nothing():
    tx = cd.local_muon(0.1, axis_name=AXIS, trigger=triggers.every_k(2))
    step, state = train_on(tx), start(tx)
    gradients = helpers.make_gradients(2, REPLICAS)
    weights = np.zeros(REPLICAS, np.float32)
    for each in gradients:
        state = step(state, each, weights)
    params, found = jax.device_get(state)
    never = cd.local_muon(0.1, axis_name=AXIS, trigger=triggers.never())
    alone, local_step = start(never), train_on(never)
    for each in gradients:
        alone = local_step(alone, each, weights)
    helpers.assert_bitwise(params, jax.device_get(alone[0]))
    read = metrics.read(found)
    assert (read["syncs"], read["empty_syncs"], read["absent"]) == (1, 1, REPLICAS)


def test_an_empty_sync_leaves_what_syncs_keep():
    """The outer momentum would move the anchor also where the mean drift is zero."""
    form = synchronizers.reconcile(
        optax.sgd(0.7, momentum=0.9, nesterov=True),
        compressor=compressors.quantize(4, 4),
    )
    tx = cd.adaptive_sync(optax.sgd(0.1, 0.9), triggers.always(), form, AXIS)
    step, state = train_on(tx), start(tx)
    *first, last = helpers.make_gradients(3, REPLICAS)
    for each in first:
        state = step(state, each, np.ones(REPLICAS, np.float32))
    before = jax.device_get(state)
    after = jax.device_get(step(state, last, np.zeros(REPLICAS, np.float32)))
    assert after[1].metrics.empty.tolist() == [1] * REPLICAS
    helpers.assert_bitwise(after[1].sync_state, before[1].sync_state)
    moved = jax.tree.map(lambda x, y: np.any(x != y), after[0], before[0])
    assert all(jax.tree.leaves(moved))  # by the local step


@pytest.mark.slow
def test_equal_weights_change_nothing():
    tx = cd.local_muon(0.1, axis_name=AXIS, trigger=triggers.every_k(2))
    gradients = helpers.make_gradients(4, REPLICAS)
    *_, expected = helpers.run_vmap(tx, helpers.make_params(), gradients)
    step, state = train_on(tx), start(tx)
    for each in gradients:
        state = step(state, each, np.full(REPLICAS, 8192, np.float32))
    for x, y in zip(
        jax.tree.leaves(state[0]), jax.tree.leaves(expected[0]), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=0, atol=ATOL)


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf])
def test_what_is_no_weight_is_none(weight):
    tx = cd.adaptive_sync(
        optax.sgd(1.0), triggers.always(), synchronizers.average_gradients(), AXIS
    )
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    weights = np.float32([1, weight, 1, 1])
    params, state = train_on(tx)(start(tx), gradients, weights)
    wanted = helpers.make_params()["wide"] - gradients["wide"][[0, 2, 3]].mean(0)
    np.testing.assert_allclose(params["wide"][1], wanted, atol=ATOL)
    assert state.metrics.absent.tolist() == [0, 1, 0, 0]
    if not np.isnan(weight):
        alone = cd.adaptive_sync(
            optax.sgd(1.0), triggers.always(), synchronizers.average_gradients()
        )
        params = helpers.make_params()
        with pytest.raises(ValueError, match="weight must be finite and not negative"):
            alone.update(params, alone.init(params), params, weight=weight)
