"""What went wrong is counted, and told once it goes on."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spoilt_runs import REPLICAS, assert_finite, run, spoil

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
    (gradients,) = helpers.make_gradients(1, 2)
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
        assert all(np.isfinite(x).all() for x in state[0].values())
    # The first step always; the second heals it; then it has to wait.
    assert np.flatnonzero(synced).tolist() == [0, 1, 12, 23]
    read = metrics.read(state[1])
    assert (read["excluded"], read["zeroed"]) == (3, 25)
    assert read["troubled"] == {1: {"zeroed": 25, "excluded": 3}}


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
        pytest.param(synchronizers.reconcile(), id="reconcile"),
        pytest.param(synchronizers.average_gradients(), id="gradients"),
    ],
)
def test_updates_that_are_not_finite_are_zeroed_and_reported(synchronizer, elements):
    """Ten steps of it, local ones and syncs; then the optimizer is well again."""
    number = 10
    inner = nan_at_first(number, elements)
    tx = cd.adaptive_sync(inner, triggers.every_k(5), synchronizer)
    start = params = helpers.make_params()
    gradients = jax.tree.map(jnp.ones_like, params)
    state, step = tx.init(params), jax.jit(helpers.train_step(tx))
    for _ in range(number):
        (params, state), _ = step((params, state), gradients)
        assert_finite((params, state))
    helpers.assert_bitwise(params["tall"], start["tall"])
    moved = not np.array_equal(params["wide"], start["wide"])
    assert moved == (elements is not None)
    read = metrics.read(state)
    assert (read["nonfinite"], read["excluded"]) == (0, 0)
    assert read["troubled"] == {0: {"zeroed": number}}
    for _ in range(number):
        (params, state), _ = step((params, state), gradients)
    assert metrics.read(state)["zeroed"] == number
    assert not np.array_equal(params["tall"], start["tall"])


def test_a_replica_that_no_sync_takes_is_reported():
    """Its gradients are sound."""

    def change(step, state):
        if step == 0:
            spoil(state, "anchor", 3)
        return state

    gradients = helpers.make_gradients(9, REPLICAS)
    state = run("reconcile-quantize", gradients, change=change)[-1]
    read = metrics.read(state)
    assert read["troubled"] == {3: {"excluded": 3}}
