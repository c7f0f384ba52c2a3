"""A replica that is not finite spoils nobody else, and comes back where it can."""

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spoilt_runs import (
    NAMES,
    OPTIMIZERS,
    REPLICAS,
    ROUNDING,
    arrays,
    assert_finite,
    poisoned,
    rows,
    run,
    spoilt,
    without,
)

import curvadion_jax as cd

pytestmark = pytest.mark.slow  # many programs


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_not_finite_is_zero(name):
    """On local steps (1, 3) and on a sync (2): momenta and decay go on."""
    bad = zeros = helpers.make_gradients(4, REPLICAS)
    for step, replicas, number in (
        *((1, [5], np.inf), (2, [0, 7], np.nan), (2, [3], -np.inf)),
        (3, range(REPLICAS), np.nan),
    ):
        bad, zeros = poisoned(bad, step, replicas, number), poisoned(zeros, step, [])
        for x in zeros[step].values():
            x[list(replicas)] = 0
    history = run(name, bad)
    found = history[-1][1].metrics
    assert found.nonfinite.tolist() == [2, 1, 1, 2, 1, 2, 1, 2]
    # A sync that averages gradients leaves out who has none.
    left_out = not name.startswith(("reconcile", "local_muon", "adamw"))
    expected = [1, 0, 0, 1, 0, 0, 0, 1] if left_out else [0] * REPLICAS
    assert found.excluded.tolist() == expected
    assert found.zeroed.tolist() == [0] * REPLICAS
    for state in history:
        assert_finite(state)
    steps = 2 if left_out else 4
    for state, wanted in zip(history[:steps], run(name, zeros), strict=False):
        helpers.assert_bitwise(arrays(state), arrays(wanted))


@pytest.mark.parametrize("where", ["momentum", "residual", "parameters", "anchor"])
@pytest.mark.parametrize("name", NAMES)
def test_a_spoilt_replica_is_excluded(name, where):
    """Whatever of it is spoilt, the others do the same."""
    index, history = 2, spoilt(name, where)
    if history is None:
        pytest.skip("there is no such part")
    others, wanted = without(index), spoilt(name, "parameters")
    assert wanted is not None
    helpers.assert_bitwise(
        arrays(rows(history[-1], others)), arrays(rows(wanted[-1], others))
    )
    found = history[-1][1].metrics
    expected = [int(each == index) for each in range(REPLICAS)]
    assert found.excluded.tolist() == expected
    assert found.last_excluded[index] == 2
    if where in ("momentum", "residual"):
        assert_finite(history[-1])
        if name.startswith(("local_muon", "reconcile")):
            for x in history[-1][0].values():
                np.testing.assert_allclose(
                    x[index], x[others[0]], rtol=0, atol=ROUNDING
                )


@pytest.mark.parametrize("name", ["reconcile", "reconcile-outer", "gradients"])
def test_the_others_do_as_if_it_did_not_exist(name):
    found, others = spoilt(name, "parameters"), without(2)
    assert found is not None
    gradients = [
        {key: x[others] for key, x in tree.items()}
        for tree in helpers.make_gradients(4, REPLICAS)[:3]
    ]
    *_, wanted = helpers.run_vmap(OPTIMIZERS[name](), helpers.make_params(), gradients)
    chex.assert_trees_all_close(
        arrays(rows(found[-1], others)), arrays(wanted), rtol=0, atol=ROUNDING
    )


def spoiling(kind):
    """An outer optimizer that is not finite at one sync, or where nothing moves."""
    if kind == "schedule":
        return optax.sgd(lambda count: jnp.where(count == 1, jnp.nan, 1.0))
    return optax.adam(0.1, eps=0.0)  # zero over zero


def reconciled(outer, compressor=None):
    parts = cd.synchronizers.reconcile(outer, compressor=compressor)
    return cd.adaptive_sync(
        optax.sgd(0.01), cd.triggers.every_k(2), parts, helpers.AXIS
    )


@pytest.mark.parametrize("kind", ["schedule", "zero over zero"])
def test_an_outer_step_that_is_not_finite_is_zeroed(kind):
    """The anchor stays there, syncs go on, and nobody is excluded."""
    tx = reconciled(spoiling(kind))
    params = {"moved": jnp.ones(4), "still": jnp.ones(3)}
    moves = np.float32([[1, 2, 3, 4], [4, 3, 2, 1]])
    gradients = {"moved": moves, "still": np.zeros((2, 3), np.float32)}
    history = list(helpers.run_vmap(tx, params, [gradients] * 8))
    for after, state in history:
        chex.assert_tree_all_finite((after, state.sync_state))
    helpers.assert_bitwise(after["moved"][0], after["moved"][1])
    assert np.all(after["moved"] < 1)
    assert state.metrics.excluded.tolist() == [0, 0]
    syncs = 1 if kind == "schedule" else 4
    assert state.metrics.zeroed.tolist() == [syncs] * 2


@pytest.mark.parametrize("form", [None, cd.compressors.quantize(8)])
def test_what_a_zeroed_outer_step_would_have_brought_comes_with_the_next(form):
    """Nothing but that step's own update is lost, and nothing comes twice."""
    ends = []
    for outer in (optax.sgd(1.0), spoiling("schedule")):
        tx = reconciled(outer, form)
        moves = np.arange(16, dtype=np.float32).reshape(2, 8)
        gradients = [{"w": moves}] * 12
        *_, (params, state) = helpers.run_vmap(tx, {"w": jnp.zeros(8)}, gradients)
        owed = jax.tree.leaves(state.sync_state.residual) or [0.0]
        ends.append(np.mean(params["w"] + owed[0], axis=0))
    wanted, found = ends
    np.testing.assert_allclose(found, wanted * 11 / 12, rtol=0, atol=ROUNDING)
