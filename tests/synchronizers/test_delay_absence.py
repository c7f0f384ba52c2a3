"""Who is absent, spoilt, resumed or resized while a sync is under way."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from delayed_syncs import OUTER, optimizer, run, stepping

import curvadion_jax as cd
from curvadion_jax import compressors

AXIS, REPLICAS = helpers.AXIS, 2


@pytest.mark.parametrize(
    ("before", "steps", "after", "expected"),
    [
        # A sync that ended with step 3 is not taken up again with step 6.
        pytest.param(1, 3, 4, [-2, -2, -2], id="longer"),
        # One of step 2 is not ended: that of step 6 brings it all.
        pytest.param(4, 4, 1, [0, 0, -6], id="shorter"),
    ],
)
def test_resumed_with_another_delay(before, steps, after, expected, tmp_path):
    """SGD of rate 1, gradients 1 and 3, half of the drift."""
    tx, other = (optimizer(2, delay, optax.sgd(0.5)) for delay in (before, after))
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = run_weighted(tx, [(1, 1)] * steps)
    target = helpers.start(other, {"a": jnp.zeros(1)}, mesh)
    cd.checkpoint.save(tmp_path, steps, placed(tx, mesh, state))
    state, found = cd.checkpoint.restore(tmp_path, target), []
    for _ in expected:
        state = run_weighted(other, [(1, 1)], placed(other, mesh, state))
        found.append(state[1].sync_state.anchor["a"].ravel().tolist())
    assert found == [[x, x] for x in expected]
    assert state[1].metrics.empty.tolist() == [int(after > before)] * REPLICAS


def weighted(tx, mesh):
    """A step whose batch is gradients and weights."""

    def train(state, batch):
        params, opt_state = state
        gradients, weight = jax.tree.map(lambda x: x[0], batch)
        updates, opt_state = tx.update(gradients, opt_state, params, weight=weight)
        return (optax.apply_updates(params, updates), opt_state), {}

    return cd.replicas.step(train, mesh, donate=False)


def run_weighted(tx, weights, start=None):
    """Gradients 1 and 3, from 0, with these weights on every step."""
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, {"a": jnp.zeros(1)}, mesh) if start is None else start
    step = weighted(tx, mesh)
    for both in weights:
        batch = {"a": np.float32([[1], [3]])}, np.float32(both)
        state, _ = step(state, batch)
    return jax.device_get(state)


def test_who_was_absent_where_it_began_keeps_its_drift():
    # The weights of step 2 count, and not those of step 3, which ends the sync.
    tx = optimizer(2, 1)
    params, state = run_weighted(tx, [(1, 1), (1, 0), (0, 1)])
    # A mean over both, of -2 and of nothing yet: the other will bring its -6 later.
    assert state.sync_state.anchor["a"].ravel().tolist() == [-1, -1]
    assert params["a"].ravel().tolist() == [-1 - 1, -1 - 6 - 3]
    assert state.metrics.absent.total.tolist() == [0, 1]


def test_where_nobody_was_there_nothing_changes():
    tx = optimizer(2, 1)
    params, state = run_weighted(tx, [(1, 1), (0, 0), (1, 1)])
    assert params["a"].ravel().tolist() == [-3, -9]
    assert state.sync_state.anchor["a"].ravel().tolist() == [0, 0]
    assert state.metrics.empty.tolist() == [1, 1]


def test_who_was_not_finite_is_left_out():
    tx = optimizer(2, 1)
    mesh = cd.replicas.make_mesh(REPLICAS)
    params, state = helpers.start(tx, {"a": jnp.zeros(1)}, mesh)
    params = {"a": params["a"].at[1].set(jnp.nan)}
    state = state._replace(
        metrics=state.metrics._replace(steps=state.metrics.steps + 2)
    )
    params, state = run_weighted(tx, [(1, 1)] * 3, (params, state))
    assert state.metrics.excluded.total.tolist() == [0, 1]
    assert params["a"][0].tolist() == [-3]
    assert state.sync_state.anchor["a"].ravel().tolist() == [-2, -2]


def test_reanchored_under_way():
    """Parameters that were loaded are what is brought, and stay."""
    tx = optimizer(2, 1)
    mesh = cd.replicas.make_mesh(REPLICAS)
    _, state = run_weighted(tx, [(1, 1)] * 2)
    loaded = {"a": np.full((REPLICAS, 1), 5, np.float32)}
    given = cd.replicas.reanchor((loaded, state))
    sharding = helpers.start(tx, {"a": jnp.zeros(1)}, mesh)
    given = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), given, sharding)
    params, state = run_weighted(tx, [(1, 1)], given)
    assert params["a"].ravel().tolist() == [4, 2]
    assert state.sync_state.anchor["a"].ravel().tolist() == [5, 5]


@pytest.mark.parametrize("spoilt", ["anchor", "own"])
def test_what_is_spoilt_under_way_is_left_out(spoilt):
    """NaN in what one replica keeps, between the beginning of a sync and its end."""
    tx = optimizer(2, 1)
    mesh = cd.replicas.make_mesh(REPLICAS)
    params, state = run_weighted(tx, [(1, 1)] * 2)
    kept = state.sync_state
    bad = {"a": np.float32([[0 if spoilt == "anchor" else -2], [np.nan]])}
    new = bad if spoilt == "anchor" else kept.own._replace(params=bad)
    state = state._replace(sync_state=kept._replace(**{spoilt: new}))
    params, state = run_weighted(tx, [(1, 1)], placed(tx, mesh, (params, state)))
    assert state.metrics.excluded.total.tolist() == [0, 1]
    # The other alone is -2 from 0. The spoilt anchor stays so until `replicas.mend`.
    anchor = state.sync_state.anchor["a"].ravel()
    assert anchor[0] == -2
    assert np.isnan(anchor[1]) if spoilt == "anchor" else anchor[1] == -2
    assert params["a"][0].tolist() == [-3]
    # What it did since is not known: it has what all have.
    assert spoilt == "anchor" or params["a"][1].tolist() == [-2]


def test_resized_under_way_with_one_that_is_not_finite():
    """Weights 1 and -1 have a mean that says nothing."""
    tx = optimizer(2, 1)
    mesh, fewer = cd.replicas.make_mesh(4), cd.replicas.make_mesh(3)
    state = helpers.start(tx, {"a": jnp.zeros(1)}, mesh)
    step = helpers.replica_step(tx, mesh)
    batch = {"a": np.float32([[1], [2], [3], [4]])}
    (params, state), _ = step(state, batch)
    state, _ = step(({"a": params["a"].at[1].set(jnp.nan)}, state), batch)
    assert state[1].sync_state.own.weight.tolist() == [1, -1, 1, 1]
    state = cd.replicas.resize(state, fewer)
    step = helpers.replica_step(tx, fewer)
    _, state = step(state, {"a": np.ones((3, 1), np.float32)})[0]
    # The third stands in the place of a quarter of -6 and three of -8.
    assert state.sync_state.anchor["a"].ravel().tolist() == [-7.5] * 3
    assert state.metrics.excluded.total.tolist() == [1, 1, 0]


def placed(tx, mesh, state):
    like = helpers.start(tx, {"a": jnp.zeros(1)}, mesh)
    return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), state, like)


def test_what_was_saved_under_way_goes_on_to_the_bit():
    gradients = helpers.make_gradients(8, REPLICAS)
    form = compressors.quantize(4)
    tx = optimizer(3, 2, OUTER, compressor=form)
    whole = list(run(stepping, tx, gradients))
    mesh = cd.replicas.make_mesh(REPLICAS)
    like = helpers.start(tx, helpers.make_params(), mesh)
    saved = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), whole[3], like)
    step = helpers.replica_step(tx, mesh)
    for tree, expected in zip(gradients[4:], whole[4:], strict=True):
        saved, _ = step(saved, tree)
        helpers.assert_bitwise(jax.device_get(saved), expected)
