"""Who takes part in a sync: weights, replicas that are absent, and nobody at all."""

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers
from curvadion_jax.triggers import Measured, Trigger

reconcile = synchronizers.reconcile
average_gradients = synchronizers.average_gradients
NESTEROV = optax.sgd(1.0, momentum=0.5, nesterov=True)
PARAMS = {"w": np.float32([1, -2, 0.5])}
BOTH = np.ones(2, np.float32)
# Sums of a few float32 of size one.
ATOL = 3e-6
every_kind = pytest.mark.parametrize("kind", ["simulated", "mesh"])


def sgd(synchronizer, k=1, rate=1.0, momentum=None):
    """Makes SGD with a sync every k steps, on a mesh."""
    return lambda mesh: cd.adaptive_sync(
        optax.sgd(rate, momentum), triggers.every_k(k), synchronizer, mesh
    )


def gradients(steps, replicas=2):
    rng = np.random.default_rng(1)
    return [
        {"w": rng.normal(size=(replicas, 3)).astype(np.float32)} for _ in range(steps)
    ]


def run(make, trees, weights, kind="simulated", params=PARAMS):
    mesh = helpers.mesh_of(kind, helpers.replicas_of(trees))
    tx = make(mesh)
    return list(helpers.run(tx, mesh, params, trees, weight=weights))


@every_kind
@pytest.mark.parametrize("synchronizer", [reconcile(), average_gradients()])
@pytest.mark.parametrize(
    "weights",
    [
        pytest.param(np.float32([3, 1]), id="unequal"),
        pytest.param(np.float32([3e38, 1e38]), id="a sum that float32 does not hold"),
        pytest.param(np.float32([3e-30, 1e-30]), id="tiny"),
        pytest.param(np.array([3, 1], np.int32), id="int"),
    ],
)
def test_a_mean_is_weighted(kind, synchronizer, weights):
    trees = gradients(1)
    ((params, state),) = run(sgd(synchronizer), trees, [weights], kind)
    mean = (3 * trees[0]["w"][0] + trees[0]["w"][1]) / 4
    np.testing.assert_allclose(params["w"], [PARAMS["w"] - mean] * 2, atol=ATOL)
    assert state.counters.absent.tolist() == [0, 0]


@every_kind
def test_a_sync_after_local_steps_counts_the_weights_of_all_of_them(kind):
    """Not of the last step alone."""
    trees = gradients(6)
    weights = np.float32([[1, 9], [2, 1], [3, 1], [1, 0], [4, 2], [2, 7]])
    states = run(sgd(reconcile(), k=2), trees, [*weights], kind)
    drift = [-sum(x["w"] for x in trees[i : i + 2]) for i in (0, 2, 4)]

    anchor = PARAMS["w"] + (3 * drift[0][0] + 10 * drift[0][1]) / 13
    np.testing.assert_allclose(states[1][0]["w"], [anchor] * 2, atol=ATOL)
    # The second replica is absent, and keeps its drift.
    anchor = anchor + drift[1][0] / 2
    np.testing.assert_allclose(states[3][0]["w"][0], anchor, atol=ATOL)
    assert states[3][1].rows.weight.tolist() == [0, 0]
    both = drift[2] + np.stack([np.zeros(3), drift[1][1]])
    anchor = anchor + (6 * both[0] + 9 * both[1]) / 15
    np.testing.assert_allclose(states[5][0]["w"], [anchor] * 2, atol=ATOL)


@every_kind
def test_weights_wait_with_the_drift_where_no_replica_takes_part(kind):
    trees = gradients(4)
    weights = np.float32([[9, 1], [0, 0], [1, 1], [1, 1]])
    states = run(sgd(reconcile(), k=2), trees, [*weights], kind)
    drift = -sum(x["w"] for x in trees)
    wanted = PARAMS["w"] + (11 * drift[0] + 3 * drift[1]) / 14
    np.testing.assert_allclose(states[-1][0]["w"], [wanted] * 2, atol=ATOL)


@every_kind
def test_a_drift_of_several_rounds_counts_by_its_length_alone(kind):
    """With equal gradients, who is absent at half of the syncs slows down nobody."""
    trees = [{"w": np.ones((2, 3), np.float32)}] * 8
    weights = [np.float32([1, 0 if i % 4 == 1 else 1]) for i in range(8)]
    states = run(sgd(reconcile(), k=2), trees, weights, kind)
    wanted = PARAMS["w"] - 8
    np.testing.assert_allclose(states[-1][0]["w"], [wanted] * 2, atol=ATOL)


def half_of_the_way():
    """As short as a synchronizer can be: it says nothing of who takes part."""

    def sync(moved, anchor, state, residual, part):
        mean = part.mean(jax.tree.map(jnp.subtract, moved, anchor))
        half = 0.5 * part.share_present
        anchor = jax.tree.map(lambda a, d: a + half * d, anchor, mean)
        return anchor, anchor, state, residual

    payload = reconcile().payload
    return synchronizers.AfterStep(sync, payload)


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        pytest.param([1, 1], [-2, -2], id="both"),
        pytest.param([1, 0], [-0.5, -6.5], id="the second keeps its drift"),
        pytest.param([0, 0], [-2, -6], id="nobody moves"),
        pytest.param([1, np.nan], [-0.5, -6.5], id="no number is absence"),
    ],
)
def test_any_synchronizer_leaves_absent_replicas_their_drift(weights, wanted):
    trees = [{"w": np.float32([[1] * 3, [3] * 3])}] * 2
    params = {"w": np.zeros(3, np.float32)}
    every = [BOTH, np.float32(weights)]
    *_, (found, _) = run(sgd(half_of_the_way(), k=2), trees, every, params=params)
    np.testing.assert_allclose(found["w"][:, 0], wanted, atol=ATOL)


def test_states_of_other_types_keep_theirs():
    """A number of Python's as a state, and a trigger that counts in float32."""

    def update(updates, state, params=None):
        return updates, 1 if state is None else 2  # forgets what it was given

    inner = optax.GradientTransformation(lambda params: jnp.float32(0), update)
    half = jnp.bfloat16
    trigger = Trigger(
        look=lambda seen, _: (Measured(1.0), 3),
        decide=lambda clock, requested, state: (requested, state + jnp.float32(1)),
        init=lambda params, inner_state: jnp.int32(0),
        init_state=lambda: jnp.zeros(2, half),
    )
    tx = cd.adaptive_sync(inner, trigger, reconcile(), cd.replicas.simulated(2))
    rows = cd.replicas.replicate(PARAMS, cd.replicas.simulated(2))
    state = tx.init(rows)
    _, after = tx.update(rows, state, rows)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    assert after.common.trigger_state.tolist() == [1, 1]
    assert after.rows.inner_state.tolist() == [2, 2]


def test_what_a_dtype_cannot_hold_is_no_drift():
    """XLA goes on with more digits of a sum than bfloat16 has."""
    mesh = cd.replicas.simulated(2)
    outer = reconcile(optax.sgd(100.0))
    tx = cd.adaptive_sync(optax.sgd(1.0), triggers.always(), outer, mesh)
    rows = cd.replicas.replicate({"w": jnp.ones(4, jnp.bfloat16)}, mesh)
    gradients = jax.tree.map(lambda x: x * jnp.bfloat16(1e-3), rows)

    @jax.jit
    def step(rows, state):
        updates, state = tx.update(gradients, state, rows)
        return optax.apply_updates(rows, updates), state

    state = tx.init(rows)
    for _ in range(10):
        rows, state = step(rows, state)
    np.testing.assert_array_equal(rows["w"], np.ones((2, 4), jnp.bfloat16))


def test_a_spoilt_residual_begins_again_where_nobody_takes_part():
    """Else its replica would be excluded from then on."""
    synchronizer = reconcile(compressor=compressors.quantize(8))
    tx = cd.adaptive_sync(optax.sgd(0.1), triggers.always(), synchronizer)
    params = {"w": jnp.ones(4)}
    state = tx.init(params)
    spoilt = jax.tree.map(lambda x: x * jnp.nan, state.rows.residual)
    state = state._replace(rows=state.rows._replace(residual=spoilt))
    for _ in range(3):
        _, state = tx.update(params, state, params)
    assert state.counters.excluded == 1


def test_any_synchronizer_keeps_the_dtypes_of_what_it_is_given():
    """Weights are float32, and the parameters of half of the way bfloat16."""
    params = {"w": np.zeros(3, jnp.bfloat16)}
    trees = [{"w": np.ones((2, 3), jnp.bfloat16)}] * 2
    *_, (found, state) = run(
        sgd(half_of_the_way(), k=2), trees, [BOTH] * 2, params=params
    )
    assert found["w"].dtype == state.common.anchor["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["w"], np.full((2, 3), -1, jnp.bfloat16))


def test_an_absent_replica_keeps_its_drift_once_where_a_sync_is_of_a_part():
    """As of fragments in turn: the rest of its target is where it is."""

    def sync(moved, anchor, state, residual, part):
        mean = part.mean(moved["w"] - anchor["w"])
        anchor = anchor | {"w": anchor["w"] + part.share_present * mean}
        return moved | anchor | {"b": moved["b"]}, anchor, state, residual

    fragment = synchronizers.AfterStep(sync, reconcile().payload)
    ones = np.ones(1, np.float32)
    trees = [{"w": np.float32([[1], [3]]), "b": np.float32([[1], [3]])}]
    params = {"w": 0 * ones, "b": 0 * ones}
    ((found, _),) = run(sgd(fragment), trees, [np.float32([1, 0])], params=params)
    np.testing.assert_allclose(found["b"][:, 0], [-1, -3], atol=ATOL)
    np.testing.assert_allclose(found["w"][:, 0], [-0.5, -3.5], atol=ATOL)


def test_a_weight_that_int32_does_not_hold_counts():
    """It would wrap around to 0, and the replica be absent."""
    tx = sgd(average_gradients())(cd.replicas.simulated(2))
    rows = cd.replicas.replicate(PARAMS, cd.replicas.simulated(2))
    _, state = tx.update(rows, tx.init(rows), rows, weight=[2**40, 2**40])
    assert state.counters.absent.tolist() == [0, 0]


def test_a_weight_that_vanishes_beside_another_is_absence():
    """Else the mean would count its replica, which adds nothing."""
    trees = gradients(1)
    runs = [run(sgd(reconcile()), trees, [np.float32([1e30, x])]) for x in (1e-30, 0)]
    (tiny, state), (none, _) = [steps[0] for steps in map(list, runs)]
    assert state.counters.absent.tolist() == [0, 1]
    np.testing.assert_array_equal(tiny["w"], none["w"])


@pytest.mark.parametrize("synchronizer", [reconcile(), average_gradients()])
@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf, -np.inf])
def test_what_is_no_weight_is_absence(weight, synchronizer):
    trees = gradients(1)
    weights = np.float32([1, weight])
    ((params, state),) = run(sgd(synchronizer), trees, [weights])
    # The drift of one that is absent comes later; its gradient never does.
    share = 1 / 2 if isinstance(synchronizer, synchronizers.AfterStep) else 1
    wanted = PARAMS["w"] - share * trees[0]["w"][0]
    np.testing.assert_allclose(params["w"][0], wanted, atol=ATOL)
    assert state.counters.absent.tolist() == [0, 1]
    assert state.counters.excluded.tolist() == [0, 0]


@every_kind
@pytest.mark.parametrize(
    "compressor", [None, compressors.exact()], ids=["plain", "error feedback"]
)
def test_an_absent_replica_keeps_its_drift_and_the_mean_is_over_all(kind, compressor):
    """Two syncs after two steps each; replica 1 of three is away at the first."""
    trees = gradients(4, 3)
    away, here = np.float32([1, 0, 1]), np.ones(3, np.float32)
    weights = [away, away, here, here]
    history = run(sgd(reconcile(compressor=compressor), k=2), trees, weights, kind)
    drift = -np.float64(trees[0]["w"]) - trees[1]["w"]
    anchor = PARAMS["w"] + drift[[0, 2]].sum(0) / 3  # what is kept comes later
    kept = drift * np.float64([[0], [1], [0]])
    params, state = history[1]
    np.testing.assert_allclose(state.common.anchor["w"], anchor, atol=ATOL)
    np.testing.assert_allclose(params["w"], anchor + kept, atol=ATOL)
    for x in jax.tree.leaves(state.rows.residual):
        np.testing.assert_allclose(x, 0, atol=ATOL)
    assert state.counters.absent.tolist() == [0, 1, 0]
    assert state.counters.excluded.tolist() == [0, 0, 0]
    params, state = history[3]
    everything = -sum(np.float64(tree["w"]) for tree in trees)
    wanted = PARAMS["w"] + everything.mean(0)
    np.testing.assert_allclose(params["w"], [wanted] * 3, atol=ATOL)
    assert state.counters.absent.tolist() == [0, 1, 0]


def test_an_absent_replica_sends_what_it_owes():
    """Nobody moves at the second sync, and residuals alone move the anchor."""
    sync = reconcile(compressor=compressors.quantize(1, block=8))
    trees = [gradients(1)[0], {"w": np.zeros((2, 3), np.float32)}]
    weights = [BOTH, np.float32([1, 0])]
    (_, before), (_, after) = run(sgd(sync), trees, weights)
    assert np.all(before.rows.residual["w"] != 0)
    sent = before.rows.residual["w"] - after.rows.residual["w"]
    assert np.all(sent[1] != 0)
    moved = after.common.anchor["w"] - before.common.anchor["w"]
    np.testing.assert_allclose(moved, sent.mean(0), atol=ATOL)


@every_kind
@pytest.mark.parametrize("outer", [None, NESTEROV], ids=["mean", "nesterov"])
def test_where_nobody_takes_part_nothing_moves_but_replicas_by_themselves(kind, outer):
    """Neither the anchor, nor the outer momentum, nor what replicas owe."""
    sync = reconcile(outer, compressor=compressors.quantize(8, block=8))
    trees = gradients(4)
    weights = [BOTH, 0 * BOTH, 0 * BOTH, 0 * BOTH]
    (first, before), *_, (params, after) = run(
        sgd(sync, rate=0.1), trees, weights, kind
    )
    assert np.any(before.rows.residual["w"] != 0)
    helpers.assert_bitwise(after.common, before.common)
    helpers.assert_bitwise(after.rows.residual, before.rows.residual)
    own = -0.1 * sum(np.float64(tree["w"]) for tree in trees[1:])
    np.testing.assert_allclose(params["w"], first["w"] + own, atol=ATOL)
    assert after.counters.absent.tolist() == [3, 3]
    assert after.counters.syncs == 4


@pytest.mark.parametrize("preset", ["synchronous_adamw", "synchronous_dion"])
def test_where_nobody_takes_part_in_a_mean_nothing_moves(preset):
    """Neither by momenta nor by weight decay."""
    mesh = cd.replicas.simulated(2)
    tx = getattr(cd.presets, preset)(0.1, weight_decay=0.1, mesh=mesh)
    params = {"kernel": np.float32(np.arange(12).reshape(3, 4))}
    rows = {
        "kernel": np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    }
    weights = [BOTH, 0 * BOTH]
    first, second = helpers.run(tx, mesh, params, [rows, rows], weight=weights)
    helpers.assert_bitwise(second[0], first[0])
    helpers.assert_bitwise(second[1].common.sync_state, first[1].common.sync_state)
    assert np.any(first[0]["kernel"] != params["kernel"])


def test_where_all_momenta_are_spoilt_all_begin_again():
    """Nobody takes part in that step, and all in the next."""
    mesh = cd.replicas.simulated(2)
    tx = sgd(average_gradients(), rate=0.1, momentum=0.9)(mesh)
    rows, state = helpers.start(tx, PARAMS, mesh)
    nan = lambda x: jnp.full_like(x, jnp.nan)
    inner_state = jax.tree.map(nan, state.rows.inner_state)
    state = state._replace(rows=state.rows._replace(inner_state=inner_state))
    (tree,) = gradients(1)
    first, state = tx.update(tree, state, rows)
    assert not np.any(first["w"])
    second, state = tx.update(tree, state, rows)
    mean = np.broadcast_to(tree["w"].mean(0), tree["w"].shape)
    np.testing.assert_allclose(second["w"], -0.1 * mean, atol=ATOL)
    assert state.counters.excluded.tolist() == [1, 1]


@pytest.mark.parametrize("synchronizer", [reconcile(NESTEROV), average_gradients()])
def test_where_all_are_excluded_nothing_moves(synchronizer):
    def spoil(index, state):
        if index == 1:
            state[0]["w"][:, 0] = np.nan
        return state

    mesh = cd.replicas.simulated(2)
    tx = sgd(synchronizer)(mesh)
    (_, before), (params, after) = helpers.run(tx, mesh, PARAMS, gradients(2), spoil)
    helpers.assert_bitwise(after.common.anchor, before.common.anchor)
    helpers.assert_bitwise(after.common.sync_state, before.common.sync_state)
    assert after.counters.excluded.tolist() == [1, 1]
    assert np.isfinite(params["w"][:, 1:]).all()


def test_what_overflows_on_its_way_to_a_sync_is_excluded():
    """Parameters and updates are finite, and their sum is not."""
    params = {"w": np.full(3, 6e4, np.float16)}
    tree = {"w": np.zeros((2, 3), np.float16)}
    tree["w"][1] = -6e4
    ((after, state),) = run(sgd(reconcile()), [tree], [BOTH], params=params)
    assert state.counters.excluded.tolist() == [0, 1]
    for found in (after["w"], state.common.anchor["w"]):
        np.testing.assert_array_equal(found, np.float16(6e4))


def asking():
    """A replica requests a sync where the first number of its gradient is positive."""
    look = lambda seen, state: (Measured(seen.gradients["w"][0]), state)
    return Trigger(look=look, threshold=lambda clock, state: 0.0)


def test_who_has_no_weight_requests_nothing():
    """Others do; so does who has one again."""
    mesh = cd.replicas.simulated(2)
    tx = cd.adaptive_sync(optax.sgd(0.1), asking(), reconcile(), mesh)
    trees = gradients(4)
    for tree in trees:
        tree["w"][:, 0] = [-1, 1]
    weights = [np.float32(x) for x in ([1, 0], [0, 0], [1, 1], [0, 1])]
    history = list(helpers.run(tx, mesh, PARAMS, trees, weight=weights))
    assert helpers.decisions(history) == [False, False, True, True]


def dion(rank, synchronizer):
    """Of the matrix `wide` of the helpers; it syncs on every step."""
    make = lambda mesh: cd.adaptive_sync(
        cd.dion(0.1, rank=rank), triggers.always(), synchronizer, mesh
    )
    params = {"wide/kernel": helpers.make_params()["wide/kernel"]}
    trees = [
        {"wide/kernel": tree["wide/kernel"]} for tree in helpers.make_gradients(4, 3)
    ]
    weights = [np.float32(x) for x in ([1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 1, 1])]
    run = lambda trees, weights: list(
        helpers.run_simulated(make, params, trees, weight=weights)
    )
    return run, trees, weights


def test_a_dion_without_weight_keeps_its_momentum_of_factors():
    """And the step is the one of those who are there."""
    run, trees, weights = dion(1, synchronizers.average_factors())
    (_, before), (found, state) = run(trees[:2], weights[:2])
    before, after = (
        helpers.dion_state(x).momentum["wide/kernel"] for x in (before, state)
    )
    np.testing.assert_array_equal(after[2], before[2])
    assert not np.allclose(after[0], before[0])
    np.testing.assert_array_equal(found["wide/kernel"][2], found["wide/kernel"][0])
    two = [{"wide/kernel": tree["wide/kernel"][:2]} for tree in trees[:1]]
    ((wanted, _),) = run(two, [weights[0][:2]])
    ((found, _),) = run(trees[:1], [weights[1]])
    np.testing.assert_allclose(
        found["wide/kernel"][0], wanted["wide/kernel"][0], atol=ATOL
    )


@pytest.mark.parametrize("spoilt", [False, True], ids=["finite", "nan"])
def test_a_gradient_without_weight_counts_for_nothing_where_factors_are_no_less(spoilt):
    """Momentum plus gradient is averaged: that is as with mean gradients."""
    found = []
    for synchronizer in (
        synchronizers.average_factors(),
        synchronizers.average_gradients(),
    ):
        run, trees, weights = dion(1.0, synchronizer)
        trees[1]["wide/kernel"][2] *= 1000
        if spoilt:
            trees[2]["wide/kernel"][0, 0] = np.nan
        found.append([params["wide/kernel"] for params, _ in run(trees, weights)])
    np.testing.assert_allclose(*found, atol=ATOL)
    np.testing.assert_array_equal(found[0][-1][2], found[0][-1][0])


def test_weights_of_another_number_of_replicas_are_refused():
    tx = sgd(reconcile())(cd.replicas.simulated(2))
    rows = cd.replicas.replicate(PARAMS, cd.replicas.simulated(2))
    for weight in (1.0, jnp.ones(3), jnp.ones((2, 1))):
        with pytest.raises(ValueError, match="one number for each replica"):
            tx.update(rows, tx.init(rows), rows, weight=weight)


@pytest.mark.parametrize("weight", [-1, np.nan, np.inf])
def test_a_weight_that_is_none_adds_nothing_to_the_sum(weight):
    weights = [np.float32([1, 2]), np.float32([weight, 2]), np.float32([1, 2])]
    states = run(sgd(reconcile(), k=9), gradients(3), weights)
    assert states[-1][1].rows.weight.tolist() == [2, 6]
