"""Means of gradients in few bits: what a replica did not send is sent later."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

STEPS = 4
ATOL = 1e-5
"""Sums of ten float32 numbers of size 1."""
MESHES = {
    "simulated": (cd.replicas.simulated(2), None),
    "mesh": (cd.replicas.make_mesh(2), None),
    "two devices each": (cd.replicas.make_mesh(2, {"fsdp": 2}), P("fsdp")),
}


def optimizer(compressor, mesh, specs=None, trigger=None):
    return cd.adaptive_sync(
        optax.sgd(1.0),
        trigger or triggers.always(),
        synchronizers.average_gradients(compressor),
        mesh,
        specs=specs,
    )


def gradients() -> np.ndarray:
    """[steps, replicas, ...]"""
    return np.random.default_rng(0).normal(size=(STEPS, 2, 4, 8)).astype(np.float32)


def trajectory(tx, mesh, weights=None, given=None):
    """Parameters and states after each step, from zeros."""
    params = cd.replicas.replicate({"w": jnp.zeros((4, 8))}, mesh)
    state, update = tx.init(params), jax.jit(tx.update)
    history = []
    for step, gradient in enumerate(gradients() if given is None else given):
        weight = None if weights is None else jnp.array(weights[step], jnp.float32)
        updates, state = update(
            {"w": jnp.array(gradient)}, state, params, weight=weight
        )
        params = optax.apply_updates(params, updates)
        history.append((np.asarray(params["w"]), state))
    return history


@pytest.mark.parametrize("kind", MESHES)
def test_what_was_sent_and_what_is_owed_are_all_gradients(kind):
    mesh, specs = MESHES[kind]
    tx = optimizer(compressors.quantize(2), mesh, specs)
    *_, (params, state) = trajectory(tx, mesh)
    owed = np.asarray(state.rows.residual["w"])
    assert np.any(owed != 0)
    sent = gradients().mean(1).sum(0) - owed.mean(0)
    for row in params:
        np.testing.assert_allclose(row, -sent, atol=ATOL)
    np.testing.assert_array_equal(params[0], params[1])


def test_an_exact_compressor_is_as_none():
    mesh = cd.replicas.simulated(2)
    exact, plain = (
        [x for x, _ in trajectory(optimizer(compressor, mesh), mesh)]
        for compressor in (compressors.exact(), None)
    )
    np.testing.assert_array_equal(exact, plain)


@pytest.mark.parametrize("how", ["absent", "not finite"])
def test_a_replica_that_takes_no_part_sends_what_it_owed(how):
    mesh = cd.replicas.simulated(2)
    given, weights = gradients()[:2], [[1, 1], [1, 1]]
    if how == "absent":
        weights[1] = [1, 0]
    else:
        given[1, 1, 0, 0] = np.nan
    tx = optimizer(compressors.quantize(2), mesh)
    (first, before), (second, after) = trajectory(tx, mesh, weights, given)
    owed = lambda state: np.asarray(state.rows.residual["w"], np.float64)
    # Replica 0 alone takes part, so that the mean of gradients is its own.
    moved = given[1, 0] + (owed(before) - owed(after)).mean(0)
    np.testing.assert_allclose(second[0] - first[0], -moved, atol=ATOL)


def test_nothing_moves_where_nobody_takes_part():
    mesh = cd.replicas.simulated(2)
    tx = optimizer(compressors.quantize(2), mesh)
    (first, before), (second, after) = trajectory(
        tx, mesh, [[1, 1], [0, 0]], gradients()[:2]
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(before.rows.residual["w"], after.rows.residual["w"])


def test_a_local_step_leaves_what_is_owed():
    mesh = cd.replicas.simulated(2)
    tx = optimizer(compressors.quantize(2), mesh, trigger=triggers.every_k(2))
    *_, (_, before), (_, after) = trajectory(tx, mesh, given=gradients()[:3])
    assert int(after.counters.since) == 1
    np.testing.assert_array_equal(before.rows.residual["w"], after.rows.residual["w"])


def test_a_residual_that_is_not_finite_begins_again():
    mesh = cd.replicas.simulated(2)
    tx = optimizer(compressors.quantize(2), mesh)
    ((params, state),) = trajectory(tx, mesh, given=gradients()[:1])
    spoilt = {"w": state.rows.residual["w"].at[1, 0, 0].set(jnp.nan)}
    state = state._replace(rows=state.rows._replace(residual=spoilt))
    updates, state = tx.update({"w": gradients()[1]}, state, {"w": params})
    assert np.isfinite(updates["w"]).all()
    assert np.isfinite(state.rows.residual["w"]).all()
    assert cd.metrics.read(state)["excluded"] == [0, 1]


def test_two_bits_are_counted_as_they_are_sent():
    mesh = cd.replicas.make_mesh(2)
    params = cd.replicas.replicate({"w": jnp.zeros((64, 64))}, mesh)
    shares = {}
    for bits in (None, 8, 2):
        tx = optimizer(bits and compressors.quantize(bits), mesh)
        state, update = tx.init(params), jax.jit(tx.update)
        _, state = update(params, state, params)
        shares[bits] = cd.metrics.read(state)["share"]
    assert shares[8] < 0.27 < 0.99 < shares[None]
    assert shares[2] < 0.075
