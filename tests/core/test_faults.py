"""What is not finite spoils nobody else, is counted, and begins again where it can."""

from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import compressors, metrics, synchronizers, triggers

reconcile = synchronizers.reconcile
TWO = cd.replicas.simulated(2)
PARAMS = {"w": np.float32([1, -2, 0.5, 1]), "x": np.float32([2, 1])}
EXACT, FOUR_BITS = compressors.exact(), compressors.quantize(4, block=4)
NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)
# Sums of a few float32 of size one.
ATOL = 3e-6


def syncing(inner, synchronizer, k=2) -> Any:
    return lambda mesh: cd.adaptive_sync(inner, triggers.every_k(k), synchronizer, mesh)


MOMENTUM = optax.sgd(0.1, 0.9)
MATRICES = {"wide/kernel": helpers.make_params()["wide/kernel"], **PARAMS}
# How to make each, and its parameters.
OPTIMIZERS = {
    "reconcile": (syncing(MOMENTUM, reconcile(NESTEROV, compressor=EXACT)), PARAMS),
    "four bits": (syncing(MOMENTUM, reconcile(NESTEROV, compressor=FOUR_BITS)), PARAMS),
    "gradients": (syncing(MOMENTUM, synchronizers.average_gradients()), PARAMS),
    "factors": (
        syncing(cd.dion(0.1, rank=2), synchronizers.average_factors()),
        MATRICES,
    ),
    "reconcile-dion": (syncing(cd.dion(0.1, rank=2), reconcile()), MATRICES),
    "local_muon": (
        lambda mesh: cd.local_muon(
            0.1, weight_decay=0.1, mesh=mesh, trigger=triggers.every_k(2)
        ),
        MATRICES,
    ),
}
IN_CODES = ("four bits", "local_muon")
NAMES = helpers.slow_but(("reconcile", "gradients"), OPTIMIZERS)
every_optimizer = pytest.mark.parametrize("name", NAMES)


def gradients(params, steps, replicas=2):
    rng = np.random.default_rng(2)
    return [
        {
            name: rng.normal(size=(replicas, *np.shape(x))).astype(np.float32)
            for name, x in params.items()
        }
        for _ in range(steps)
    ]


def run(name, trees, change=None, mesh=TWO):
    make, params = OPTIMIZERS[name]
    return list(helpers.run(make(mesh), mesh, params, trees, change))


def arrays(state):
    """Those of parameters and of states, but the counters."""
    params, opt_state = state
    return params, opt_state._replace(counters=())


def row(state, index):
    params, opt_state = state
    rows = params, opt_state.rows.inner_state, opt_state.rows.residual
    return jax.tree.map(lambda x: x[index], rows)


@every_optimizer
@pytest.mark.parametrize("number", [np.nan, -np.inf, 1e20])
def test_a_gradient_without_a_norm_is_that_of_a_zero_gradient(name, number):
    """On a local step, and on a sync: momenta and decay go on."""
    bad = gradients(OPTIMIZERS[name][1], 3)
    zeros = jax.tree.map(np.copy, bad)
    for step, replicas in ((0, [0, 1]), (1, [1])):
        bad[step]["w"][replicas, 0] = number
        for x in zeros[step].values():
            x[replicas] = 0
    found, wanted = run(name, bad), run(name, zeros)
    chex.assert_tree_all_finite([arrays(state) for state in found])
    counters = found[-1][1].counters
    assert counters.nonfinite.tolist() == [1, 2]
    assert counters.zeroed.tolist() == [0, 0]
    # A sync that averages gradients leaves out who has none.
    left_out = name in ("gradients", "factors")
    assert counters.excluded.tolist() == [0, int(left_out)]
    helpers.assert_bitwise(arrays(found[0]), arrays(wanted[0]))
    if not left_out:
        helpers.assert_bitwise(arrays(found[-1]), arrays(wanted[-1]))


def test_a_mean_of_gradients_leaves_out_one_that_is_not_finite():
    trees = gradients(PARAMS, 2)
    trees[1]["w"][1, 0] = np.inf
    (before, _), (params, _) = run("gradients", trees)
    momentum = 0.9 * trees[0]["x"] + trees[1]["x"][0]
    np.testing.assert_allclose(params["x"], before["x"] - 0.1 * momentum, atol=ATOL)


PLACES = {
    "parameters": lambda state: state[0],
    "momentum": lambda state: state[1].rows.inner_state,
    "residual": lambda state: state[1].rows.residual,
}


def spoil(where, index, number=-np.inf):
    """Puts a number in a part of a replica in front of step 1, a sync."""

    def change(step, state):
        leaves = jax.tree.leaves(PLACES[where](state)) if step == 1 else []
        for x in leaves:
            if x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating):
                x[index].reshape(-1)[0] = number
        return state

    return change


CASES = [
    pytest.param(name, where, marks=[] if name == "reconcile" else [pytest.mark.slow])
    for name in OPTIMIZERS
    for where in PLACES
    if where != "residual" or name in ("reconcile", "four bits", "local_muon")
]


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
@pytest.mark.parametrize("number", [np.nan, 1e20])
@pytest.mark.parametrize("synchronous", [True, False], ids=["gradients", "reconcile"])
def test_what_before_makes_of_a_gradient_may_have_no_norm(kind, synchronous, number):
    """Such as 0/0: it is a zero gradient's step, of this replica alone."""
    unit = optax.stateless(
        lambda g, _: jax.tree.map(
            lambda x: jnp.where(jnp.sum(x) == 0, number, x / jnp.sum(x)), g
        )
    )
    synchronizer = (
        synchronizers.average_gradients() if synchronous else synchronizers.reconcile()
    )
    mesh = helpers.mesh_of(kind, 2)
    tx = cd.adaptive_sync(
        optax.sgd(1.0, 0.9), triggers.always(), synchronizer, mesh, before=unit
    )
    params = cd.replicas.replicate({"x": jnp.zeros(2)}, mesh)
    gradients = {"x": jnp.array([[0.0, 0.0], [1.0, 3.0]])}
    updates, state = jax.jit(tx.update)(gradients, tx.init(params), params)
    # A mean of gradients leaves the first out, a mean of steps counts its zero.
    mean = np.array([0.25, 0.75]) / (1 if synchronous else 2)
    np.testing.assert_allclose(updates["x"], [-mean] * 2, rtol=1e-6)
    assert state.counters.nonfinite.tolist() == [1, 0]
    assert state.counters.excluded.tolist() == [int(synchronous), 0]
    momentum = np.abs(state.rows.inner_state[0].trace["x"])
    assert momentum.max() <= 1


def test_before_is_given_zeros_for_a_gradient_that_is_not_finite():
    """Its own momentum decays, and goes on."""
    tx = cd.adaptive_sync(
        *(optax.sgd(1.0), triggers.every_k(9), synchronizers.reconcile(), TWO),
        before=optax.trace(0.5),
    )
    params = cd.replicas.replicate({"x": jnp.zeros(2)}, TWO)
    state, update = tx.init(params), jax.jit(tx.update)
    bad = [[[np.nan, 1], [1, 1]], [[1e20, 1], [1, 1]]]
    found = []
    for gradient in [np.ones((2, 2)), *bad]:
        updates, state = update({"x": jnp.array(gradient)}, state, params)
        found.append(updates["x"].tolist())
    first = [[-1, -1], [-0.5, -0.5], [-0.25, -0.25]]
    assert [each[0] for each in found] == first
    assert [each[1] for each in found] == [[-1, -1], [-1.5, -1.5], [-1.75, -1.75]]
    assert state.counters.nonfinite.tolist() == [2, 0]


def test_a_state_of_before_that_overflows_is_put_back():
    """Else its replica would be excluded from every sync."""
    mesh = cd.replicas.simulated(2)
    trigger, synchronizer = triggers.every_k(2), synchronizers.reconcile()
    tx = cd.adaptive_sync(
        optax.sgd(0.1), trigger, synchronizer, mesh, before=optax.trace(0.9)
    )
    params = cd.replicas.replicate({"x": jnp.zeros(2, jnp.float16)}, mesh)
    state, update = tx.init(params), jax.jit(tx.update)
    large = jnp.array([[4e4, 1], [1, 1]], jnp.float16)
    for gradient in [large] * 3 + [jnp.ones_like(large)] * 3:
        updates, state = update({"x": gradient}, state, params)
        assert np.isfinite(updates["x"]).all()
    assert np.isfinite(state.rows.before_state.trace["x"]).all()
    assert state.rows.before_state.trace["x"].dtype == jnp.float16
    assert state.counters.excluded.tolist() == [0, 0]


@pytest.mark.parametrize(("name", "where"), CASES)
def test_a_spoilt_replica_is_excluded_and_others_do_as_if_it_did_not_exist(name, where):
    trees = gradients(OPTIMIZERS[name][1], 2, 3)
    found = run(name, trees, spoil(where, 2), cd.replicas.simulated(3))
    others = [jax.tree.map(lambda x: x[:2], tree) for tree in trees]
    wanted = run(name, others)
    if name not in IN_CODES:  # two replicas exchange them in another way
        for index in (0, 1):
            chex.assert_trees_all_close(
                row(found[1], index), row(wanted[1], index), rtol=0, atol=ATOL
            )
    assert found[1][1].counters.excluded.tolist() == [0, 0, 1]
    assert found[1][1].counters.absent.tolist() == [0, 0, 0]
    params, state = found[1]
    if where == "parameters":  # an update cannot mend them
        assert not np.isfinite(params["w"][2]).all()
        return
    chex.assert_tree_all_finite(arrays(found[1]))
    if state.common.anchor != ():
        for x in jax.tree.leaves(params):
            np.testing.assert_allclose(x[2], x[0], rtol=0, atol=ATOL)


def outer_that(kind):
    """An outer optimizer whose step is not finite at the second sync, or state."""
    if kind == "step":
        return optax.sgd(lambda count: jnp.where(count == 1, jnp.nan, 1.0))
    return optax.adam(0.1)  # the square of 1e22 overflows its second moment


@pytest.mark.parametrize("form", [None, FOUR_BITS], ids=["exact", "four bits"])
def test_what_an_outer_step_that_is_not_finite_held_comes_with_the_next(form):
    """Only that step of the replicas is lost; who owes something still does."""
    make = syncing(optax.sgd(0.1), reconcile(outer_that("step"), compressor=form))
    trees = gradients(PARAMS, 6)
    _, first, _, second, _, third = helpers.run_simulated(make, PARAMS, trees)
    helpers.assert_bitwise(second[1].common.anchor, first[1].common.anchor)
    helpers.assert_bitwise(second[1].rows.residual, first[1].rows.residual)
    chex.assert_tree_all_finite(arrays(second))
    assert second[1].counters.excluded.tolist() == [0, 0]
    assert third[1].counters.zeroed.tolist() == [1, 1]
    if form is None:
        taken = sum(trees[index]["w"].mean(0) for index in (2, 4, 5))
        wanted = first[1].common.anchor["w"] - 0.1 * taken
        np.testing.assert_allclose(third[1].common.anchor["w"], wanted, atol=ATOL)
    np.testing.assert_allclose(third[0]["w"][0], third[0]["w"][1], atol=ATOL)


def test_an_outer_state_that_overflows_is_put_back():
    """Adam's step is then finite, m / inf = 0, and would be zero ever after."""
    make = syncing(optax.sgd(1e3), reconcile(outer_that("state")), 1)
    trees = [{"w": np.ones((2, 2), np.float32)} for _ in range(3)]
    trees[1]["w"][:, 0] = 1e18
    params = {"w": np.zeros(2, np.float32)}
    first, second, third = helpers.run_simulated(make, params, trees)
    nu = [state.common.sync_state[0].nu["w"] for _, state in (first, second, third)]
    assert np.isfinite(nu).all()
    assert nu[1][0] == nu[0][0]
    assert nu[1][1] > nu[0][1]
    assert nu[2][0] > nu[1][0]
    assert np.all(third[0]["w"][:, 0] != second[0]["w"][:, 0])


def nan_at_first(steps):
    """An optimizer that returns NaN for finite gradients of `w`, for so many steps."""

    def update(updates, count, params=None):
        spoilt = {"w": jnp.where(count < steps, jnp.nan, -0.1 * updates["w"])}
        return {"x": -0.1 * updates["x"], **spoilt}, count + 1

    return optax.GradientTransformation(lambda _: jnp.zeros([], jnp.int32), update)


@pytest.mark.parametrize(
    "synchronizer", [reconcile(), synchronizers.average_gradients()]
)
def test_updates_that_are_not_finite_are_zeroed_and_counted_at_syncs(synchronizer):
    """On two local steps and two syncs; then the optimizer is well again."""
    make = syncing(nan_at_first(4), synchronizer)
    history = list(helpers.run_simulated(make, PARAMS, gradients(PARAMS, 6)))
    chex.assert_tree_all_finite([arrays(state) for state in history])
    params, state = history[3]
    np.testing.assert_array_equal(params["w"], [PARAMS["w"]] * 2)
    assert np.all(params["x"] != PARAMS["x"])
    assert state.counters.zeroed.tolist() == [2, 2]
    params, state = history[5]
    assert np.all(params["w"] != PARAMS["w"])
    report = metrics.read(state)
    assert report["zeroed"] == [2, 2]
    assert not {"nonfinite", "excluded", "absent", "displaced"} & set(report)


def test_updates_of_gradients_that_are_not_finite_are_not_counted_twice():
    trees = gradients(PARAMS, 1)
    trees[0]["x"][1, 0] = np.nan
    ((_, state),) = helpers.run_simulated(
        syncing(nan_at_first(1), reconcile(), 1), PARAMS, trees
    )
    assert state.counters.nonfinite.tolist() == [0, 1]
    assert state.counters.zeroed.tolist() == [1, 0]


def test_what_begins_again_are_arrays_and_what_stays_are_single_numbers():
    """Such as a count, and a rate that is injected."""
    inner = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0, 9))
    mesh, trees = TWO, gradients(PARAMS, 2)

    def change(step, state):
        if step == 1:
            state[1].rows.inner_state.inner_state[0].mu["w"][1, 0] = np.nan
        return state

    make = syncing(inner, reconcile())
    _, (_, state) = helpers.run(make(mesh), mesh, PARAMS, trees, change)
    found = state.rows.inner_state
    np.testing.assert_array_equal(found.count, [2, 2])
    adam = found.inner_state[0]
    np.testing.assert_array_equal(adam.count, [2, 2])
    rates = found.hyperparams["learning_rate"]
    assert rates[0] == rates[1] > 0
    for moment in (adam.mu, adam.nu):
        for x in moment.values():
            assert np.all(x[1] == 0)
            assert np.all(x[0] != 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reconcile-dion", "factors"])
def test_q_of_a_spoilt_dion_begins_again_with_orthonormal_columns(name):
    def change(step, state):
        if step == 1:
            dion = helpers.dion_state(state[1])
            dion.momentum["wide/kernel"][1], dion.dion_q["wide/kernel"][1] = (
                np.nan,
                np.nan,
            )
        return state

    history = run(name, gradients(MATRICES, 4), change)
    chex.assert_tree_all_finite([arrays(state) for state in history[1:]])
    assert history[-1][1].counters.excluded.tolist() == [0, 1]
    q = helpers.dion_state(history[1][1]).dion_q["wide/kernel"][1]
    np.testing.assert_allclose(np.linalg.norm(q, axis=-2), 1, atol=ATOL)
    last = helpers.dion_state(history[-1][1])
    assert np.abs(last.momentum["wide/kernel"][1]).max() > 0.1  # it takes part again


def test_a_single_number_may_be_infinite_and_not_nan():
    """As the best loss so far, which is infinite at first."""
    plateau = optax.with_extra_args_support(optax.contrib.reduce_on_plateau())
    inner = optax.chain(plateau, optax.sgd(0.1))
    make, trees = syncing(inner, reconcile(), 1), gradients(PARAMS, 2)

    def change(step, state):
        if step == 1:
            state[1].rows.inner_state[0].best_value[1] = np.nan
        return state

    values = [np.float32(np.inf)] * 2
    first, (_, second) = helpers.run(
        make(TWO), TWO, PARAMS, trees, change, value=values
    )
    assert first[1].counters.excluded.tolist() == [0, 0]
    assert np.isinf(first[1].rows.inner_state[0].best_value).all()
    assert second.counters.excluded.tolist() == [0, 1]
    assert np.isinf(second.rows.inner_state[0].best_value).all()


def test_a_random_key_in_the_state_is_left_alone():
    noise = optax.add_noise(0.1, 0.5, key=jax.random.key(3))
    tx = syncing(optax.chain(noise, optax.sgd(0.1, 0.9)), reconcile())(TWO)
    rows = cd.replicas.replicate(PARAMS, TWO)
    state, update = tx.init(rows), jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(rows, state, rows)
    chex.assert_tree_all_finite(updates)
    assert state.counters.excluded.tolist() == [0, 0]
    assert state.counters.syncs == 1


def test_one_that_stays_bad_is_excluded_from_every_sync_and_counted():
    """Its momentum is spoilt on every step, which requests a sync each time."""
    make = lambda mesh: cd.adaptive_sync(
        optax.sgd(0.1, 0.9),
        triggers.relative_momentum_change(1e6),
        reconcile(),
        mesh,
    )

    def change(step, state):
        if step:
            state[1].rows.inner_state[0].trace["w"][1, 0] = np.nan
        return state

    trees = gradients(PARAMS, 5)
    history = list(helpers.run(make(TWO), TWO, PARAMS, trees, change))
    assert helpers.decisions(history) == [True] * 5
    report = metrics.read(history[-1][1])
    assert report["excluded"] == [0, 4]
    chex.assert_tree_all_finite(history[-1][0])


@pytest.mark.parametrize("build", [cd.local_muon, cd.curvadion])
def test_one_replica_takes_a_zero_gradients_step_too(build):
    tx, params = build(0.1), {"kernel": jnp.ones((4, 6))}
    update, state = jax.jit(tx.update), tx.init(params)
    (huge, counted), (zero, _) = (
        update(jax.tree.map(lambda x, size=size: size * x, params), state, params)
        for size in (1e20, 0.0)
    )
    chex.assert_trees_all_equal(huge, zero)
    assert int(counted.counters.nonfinite) == 1
