"""What went wrong is counted, and told once it goes on."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spoilt_runs import EVERY, REPLICAS, arrays, assert_finite, prepare, run, spoil

import curvadion_jax as cd
from curvadion_jax import metrics, synchronizers, triggers

AXIS = helpers.AXIS


def test_one_that_stays_bad_does_not_force_syncs():
    """Its momentum is spoilt on every step, which makes the trigger request a sync."""
    tx = cd.adaptive_sync(
        optax.sgd(0.1, 0.9),
        triggers.relative_momentum_change(1e6),
        synchronizers.reconcile(),
        AXIS,
    )
    gradients = helpers.make_gradients(1, 2)[0]
    params = helpers.make_params()
    state = jax.tree.map(
        lambda x: np.broadcast_to(x, (2, *np.shape(x))), (params, tx.init(params))
    )
    step = helpers.quick(
        jax.jit(jax.vmap(helpers.train_step(tx), axis_name=AXIS)), state, gradients
    )
    synced = []
    for _ in range(26):
        state = jax.tree.map(np.array, jax.device_get(step(state, gradients)[0]))
        synced.append(bool(state[1].metrics.synced[0]))
        spoil(state, "momentum", 1)
        params = state[0]
        assert all(np.isfinite(x).all() for x in params.values())
    # The first step always; the second heals it; then it has to wait.
    assert np.flatnonzero(synced).tolist() == [0, 1, 12, 23]
    assert state[1].metrics.excluded.total.tolist() == [0, 3]
    with pytest.warns(RuntimeWarning, match="replica 1 had updates .* last 25 steps"):
        read = metrics.read(state[1])
    assert (read["excluded"], read["contained"]) == (3, 25)
    trouble = {"skipped": 0, "contained": 25, "excluded": 3, "last": 25}
    assert read["troubled"] == {1: trouble}


@pytest.mark.parametrize("k", [20, 2])
def test_one_replica_alone_skips_what_is_not_finite(k):
    tx = cd.adaptive_sync(
        optax.adam(0.1), triggers.every_k(k), synchronizers.reconcile()
    )
    gradients = [{k: v[0] for k, v in g.items()} for g in helpers.make_gradients(3, 1)]
    gradients[1]["tall"][:] = np.nan
    first, second, third = helpers.run_alone(tx, helpers.make_params(), gradients)
    if k > 2:
        helpers.assert_bitwise(arrays(first), arrays(second))
    else:  # its sync moves the anchor to where the first step has led
        helpers.assert_bitwise(first[0], second[0])
        helpers.assert_bitwise(first[1].inner_state, second[1].inner_state)
        helpers.assert_bitwise(second[1].sync_state.anchor, first[0])
    assert_finite(third)
    assert metrics.read(third[1], replicas=1)["skipped"] == 1


def test_a_long_run_of_skipped_steps_is_reported():
    tx = cd.adaptive_sync(
        optax.sgd(0.1), triggers.every_k(20), synchronizers.reconcile()
    )
    params = helpers.make_params()
    state, bad = tx.init(params), jax.tree.map(lambda x: x * np.nan, params)
    update = jax.jit(tx.update)
    for _ in range(10):
        assert metrics.read(state, replicas=1)["synced"] is False
        _, state = update(bad, state, params)
    with pytest.warns(RuntimeWarning, match="replica 0 has skipped its last 10 steps"):
        read = metrics.read(state, replicas=1)
    assert read["troubled"][0]["skipped"] == 10
    assert metrics.read(state, replicas=1, patience=11)["skipped"] == 10


def nan_at_first(steps, elements=None):
    """An optimizer that returns NaN, of finite gradients, for so many steps."""

    def update(updates, count, params=None):
        def spoilt(name, x):
            chosen = elements is None or name == elements
            return jnp.where((count < steps) & chosen, jnp.nan, -0.1 * x)

        return {name: spoilt(name, x) for name, x in updates.items()}, count + 1

    return optax.GradientTransformation(lambda _: jnp.zeros([], jnp.int32), update)


@pytest.mark.parametrize("elements", [None, "tall"], ids=["all", "some"])
@pytest.mark.parametrize(
    "synchronizer",
    [
        pytest.param(synchronizers.reconcile(momentum=False), id="reconcile"),
        pytest.param(synchronizers.average_gradients(), id="gradients"),
    ],
)
def test_updates_that_are_not_finite_are_contained_and_reported(synchronizer, elements):
    """Fifty steps of it, local ones and syncs; then the optimizer is well again."""
    number = 50
    tx = cd.adaptive_sync(
        nan_at_first(number, elements), triggers.every_k(5), synchronizer
    )
    start = params = helpers.make_params()
    gradients = jax.tree.map(jnp.ones_like, params)
    state, step = tx.init(params), jax.jit(helpers.train_step(tx))
    for count in range(number):
        if count < 10:  # without a warning
            assert metrics.read(state, replicas=1)["contained"] == count
        (params, state), _ = step((params, state), gradients)
        assert_finite((params, state))
    helpers.assert_bitwise(params["tall"], start["tall"])
    moved = not np.array_equal(params["wide"], start["wide"])
    assert moved == (elements is not None)
    report = "replica 0 had updates that were not finite on its last 50 steps"
    with pytest.warns(RuntimeWarning, match=report):
        read = metrics.read(state, replicas=1)
    assert (read["contained"], read["skipped"], read["excluded"]) == (number, 0, 0)
    trouble = {"skipped": 0, "contained": number, "excluded": 0, "last": number - 1}
    assert read["troubled"] == {0: trouble}
    assert metrics.read(state, replicas=1, patience=51)["contained"] == number
    (params, state), _ = step((params, state), gradients)
    assert metrics.read(state, replicas=1)["contained"] == number  # no warning again
    assert not np.array_equal(params["tall"], start["tall"])


def test_a_replica_that_no_sync_takes_is_reported():
    """Its gradients are sound, so that it skips no step."""

    def change(step, state):
        if step == 0:
            spoil(state, "anchor", 3)
        return state

    gradients = helpers.make_gradients(7, REPLICAS)
    state = run("reconcile-quantize", gradients, change=change)[-1]
    report = "replica 3 was excluded from the last 2 syncs"
    with pytest.warns(RuntimeWarning, match=report):
        read = metrics.read(state, patience=2)
    assert read["troubled"] == {
        3: {"skipped": 0, "contained": 0, "excluded": 2, "last": 5}
    }
    assert metrics.read(state, patience=3)["excluded"] == 2
    state, replaced = cd.replicas.repair(jax.tree.map(jnp.asarray, state))
    assert replaced == [3]
    assert metrics.read(state, patience=1)["excluded"] == 2
    step, _ = prepare("reconcile-quantize")
    for each in gradients[:EVERY]:
        state = step(state, each, np.ones(REPLICAS, np.float32))
    assert metrics.read(state, patience=1)["excluded"] == 2
