"""A replica that is spoilt gets another one's numbers."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spoilt_runs import QUICK, REPLICAS, arrays, rows, run, spoil, spoilt, without

import curvadion_jax as cd

AXIS = helpers.AXIS


@pytest.mark.parametrize("name", QUICK)
def test_parameters_that_are_spoilt_are_repaired(name):
    gradients = helpers.make_gradients(3, REPLICAS)

    def change(step, state):
        if step == 1:
            spoil(state, "parameters", 4)
        return state

    state = run(name, gradients, change=change)[-1]
    assert not np.isfinite(state[0]["bias"][4]).all()
    assert np.isfinite(np.delete(state[0]["bias"], 4, 0)).all()
    repaired, replaced = cd.replicas.repair(jax.tree.map(jnp.asarray, state))
    assert replaced == [4]
    helpers.assert_bitwise(rows(repaired[0], 4), rows(state[0], 0))
    inner = repaired[1].inner_state, state[1].inner_state
    helpers.assert_bitwise(rows(inner[0], 4), rows(inner[1], 0))
    for x in jax.tree.leaves(repaired[1].sync_state.residual):
        assert not np.any(x[4])  # what the other holds back comes once
    helpers.assert_bitwise(repaired[1].metrics, state[1].metrics)
    helpers.assert_bitwise(rows(repaired, without(4)), rows(state, without(4)))
    again, replaced = cd.replicas.repair(repaired)
    assert replaced == []
    assert again is repaired


def test_metrics_of_ones_own_are_repaired_too():
    own = {"metrics": {"per_class": jnp.ones((3, 2)).at[1].set(jnp.nan)}}
    repaired, replaced = cd.replicas.repair(own)
    assert replaced == [1]
    assert repaired["metrics"]["per_class"].tolist() == [[1, 1]] * 3


def test_a_replica_that_is_finite_but_another_one_is_repaired_by_name():
    """Where gradients are averaged, one whose momentum started afresh."""
    spoilt_run = spoilt("gradients", "momentum")
    assert spoilt_run is not None
    state = jax.tree.map(jnp.asarray, spoilt_run[-1])
    assert cd.replicas.repair(state) == (state, [])
    assert float(cd.replicas.divergence(state[1].inner_state)) > 0
    repaired, replaced = cd.replicas.repair(state, also=[2])
    assert replaced == [2]
    for x in jax.tree.leaves(arrays(repaired)):
        np.testing.assert_array_equal(x[2], x[0])


def test_repair_without_anybody_is_rejected():
    with pytest.raises(ValueError, match="None of the 3 replicas is finite"):
        cd.replicas.repair({"w": jnp.full((3, 2), jnp.nan)})


def test_repair_leaves_arrays_where_they_are():
    mesh = cd.replicas.make_mesh(4, {"fsdp": 2})
    spec = jax.sharding.PartitionSpec(AXIS, "fsdp")
    place = jax.sharding.NamedSharding(mesh, spec)
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    x[1, 2] = np.nan
    repaired, replaced = cd.replicas.repair({"w": jax.device_put(x, place)})
    assert replaced == [1]
    assert repaired["w"].sharding == place
    np.testing.assert_array_equal(repaired["w"][1], x[0])


def test_a_copy_draws_random_numbers_of_its_own():
    keys = jax.random.split(jax.random.key(0), 3)
    state = {"w": jnp.ones((3, 2)).at[1].set(jnp.nan), "key": keys}
    repaired, replaced = cd.replicas.repair(state)
    assert replaced == [1]
    found = jax.random.key_data(repaired["key"])
    np.testing.assert_array_equal(found[::2], jax.random.key_data(keys)[::2])
    assert len(np.unique(found, axis=0)) == 3
