"""Copies of replicas: in place of a spoilt one, and for another number of them."""

import subprocess
import sys
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import resized_main as run
from jax.sharding import NamedSharding, PartitionSpec
from resized_states import ATOL, AXIS, make_state
from spoilt_runs import QUICK, REPLICAS, arrays, rows, spoil, spoilt, without
from spoilt_runs import run as run_spoilt

import curvadion_jax as cd
from curvadion_jax import checkpoint, metrics
from curvadion_jax.replicas import _recover

pytestmark = pytest.mark.slow  # many programs
# The loss at the end may lie half a percent above that of a run that kept its replicas.
MAX_LOSS_INCREASE = 0.005


@pytest.mark.parametrize("name", QUICK)
def test_parameters_that_are_spoilt_are_repaired(name):
    gradients = helpers.make_gradients(3, REPLICAS)

    def change(step, state):
        if step == 1:
            spoil(state, "parameters", 4)
        return state

    state = run_spoilt(name, gradients, change=change)[-1]
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


def test_a_repaired_state_of_ones_own():
    """Arrays stay where they are, and names are not taken for the optimizer's."""
    mesh = cd.replicas.make_mesh(4, {"fsdp": 2})
    place = NamedSharding(mesh, PartitionSpec(AXIS, "fsdp"))
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    x[1, 2] = np.nan
    keys = jax.random.split(jax.random.key(0), 4)
    best = jnp.full(4, jnp.inf)  # of losses, as in `reduce_on_plateau` at the start
    others = NamedSharding(mesh, PartitionSpec(AXIS))
    state = jax.device_put({"metrics": {"best": best}, "key": keys}, others)
    state["sync_state"] = {"residual": jax.device_put(x, place)}
    repaired, replaced = cd.replicas.repair(state)
    assert replaced == [1]
    found = repaired["sync_state"]["residual"]
    assert found.sharding == place
    np.testing.assert_array_equal(found[1], x[0])
    assert (repaired["key"] == keys[jnp.array([0, 0, 2, 3])]).all()
    with pytest.raises(ValueError, match="None of the 3 replicas is finite"):
        cd.replicas.repair({"w": jnp.full((3, 2), jnp.nan)})


@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 8)])
def test_the_mean_over_the_replicas_stays(old, new):
    state = make_state(old, "dion")
    found = cd.replicas.resize(state, cd.replicas.make_mesh(new))
    assert jax.tree.structure(found) == jax.tree.structure(state)
    first = np.arange(new) * old // new
    averaged = _recover.is_averaged(state)
    assert 0 < sum(averaged) < len(averaged)
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(found), averaged, strict=True)
    for before, after, is_mean in leaves:
        assert after.shape == (new, *before.shape[1:])
        assert after.dtype == before.dtype
        if jnp.issubdtype(before.dtype, jax.dtypes.prng_key):
            continue
        before, after = np.asarray(before), np.asarray(after)
        if not is_mean:
            np.testing.assert_array_equal(after, before[first])
        else:
            np.testing.assert_allclose(after.mean(0), before.mean(0), atol=ATOL)


def test_resized_by_hand():
    """Names of one's own, such as `q` beside `momentum`, are not Dion's."""
    keys = jax.random.split(jax.random.key(1), 6)
    state: Any = {"q": jnp.arange(6.0)[:, None], "c": 1j * jnp.arange(6.0), "key": keys}
    state |= {"best": jnp.full(6, jnp.inf), "momentum": jnp.full(6, 0.1)}
    state["sync_state"] = {"anchor": jnp.arange(6.0)}
    fewer = cd.replicas.resize(state, cd.replicas.make_mesh(2))
    assert fewer["q"].ravel().tolist() == [1, 4]
    assert fewer["sync_state"]["anchor"].tolist() == [1, 4]
    assert fewer["c"].tolist() == [1j, 4j]
    assert fewer["best"].tolist() == [float("inf")] * 2
    assert (fewer["momentum"] == state["momentum"][0]).all()
    more = cd.replicas.resize(fewer, cd.replicas.make_mesh(4))
    assert more["q"].ravel().tolist() == [1, 1, 4, 4]
    data = np.asarray(jax.random.key_data(fewer["key"]))
    np.testing.assert_array_equal(jax.random.key_data(more["key"]), data[[0, 0, 1, 1]])
    with pytest.raises(ValueError, match="of 6 replicas cannot become one of 4"):
        cd.replicas.resize(state, cd.replicas.make_mesh(4))


def test_what_is_averaged_and_what_is_taken():
    tx = cd.adaptive_sync(
        cd.dion(0.1, 2),
        cd.triggers.every_k(3),
        cd.synchronizers.reconcile(
            optax.sgd(0.7, 0.9), compressor=cd.compressors.quantize(2)
        ),
        AXIS,
    )
    params = {"q": {"kernel": jnp.ones((4, 8))}, "momentum": jnp.ones((8, 4))}
    state = params, tx.init(params), cd.dion(0.1, 2).init(params)
    state = jax.tree.map(lambda x: jnp.stack([x] * 2), state)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    averaged = dict(zip(paths, _recover.is_averaged(state), strict=True))
    # Parameters, momenta and residuals, whatever the names of parameters are.
    for name in ("['q']['kernel']", "['momentum']"):
        assert averaged["[0]" + name]
        assert averaged["[1].sync_state.residual" + name]
        assert not averaged["[1].sync_state.anchor" + name]
        for field, yes in ((".momentum", True), (".dion_q", False)):
            found = [averaged[path] for path in paths if field + name in path]
            assert found == [yes] * 2
    assert not any(averaged[path] for path in paths if ".metrics" in path)
    assert not any(averaged[path] for path in paths if "outer_state" in path)


def test_arrays_stay_divided_within_a_replica():
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    spec = PartitionSpec(AXIS, None, "fsdp")
    x = jax.device_put(np.ones((2, 4, 6), np.float32), NamedSharding(mesh, spec))
    found = cd.replicas.resize({"w": x}, cd.replicas.make_mesh(4, {"fsdp": 2}))["w"]
    assert found.sharding.spec == spec
    mesh = cd.replicas.make_mesh(4)
    found = cd.replicas.resize({"w": x}, mesh)["w"].sharding
    assert found.is_equivalent_to(NamedSharding(mesh, PartitionSpec(AXIS)), 3)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4)])
def test_a_checkpoint_of_another_number(tmp_path, old, new):
    state = make_state(old, "local_sgd")
    checkpoint.save(tmp_path, 3, state)
    target = make_state(new, "local_sgd", seed=5)
    with pytest.raises(ValueError, match=f"Pass replicas={new} to change their number"):
        checkpoint.restore(tmp_path, target)
    found = checkpoint.restore(tmp_path, target, replicas=new)
    wanted = cd.replicas.resize(state, cd.replicas.make_mesh(new))
    leaves = zip(*map(jax.tree.leaves, (found, wanted, target)), strict=True)
    for x, y, place in leaves:
        assert x.sharding == place.sharding
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=ATOL)


def test_a_checkpoint_lies_divided_on_another_mesh(tmp_path):
    spec = PartitionSpec(AXIS, "fsdp")
    four, two = (
        NamedSharding(cd.replicas.make_mesh(n, {"fsdp": 2}), spec) for n in (4, 2)
    )
    x = np.random.default_rng(0).normal(size=(4, 6, 2)).astype(np.float32)
    checkpoint.save(tmp_path, 1, {"w": jax.device_put(x, four)})
    target = {"w": jax.device_put(jnp.zeros((2, 6, 2), jnp.float32), two)}
    found = checkpoint.restore(tmp_path, target, replicas=2)["w"]
    assert found.sharding.spec == spec
    np.testing.assert_allclose(found, x.reshape(2, 2, 6, 2).mean(1), atol=ATOL)


@pytest.mark.parametrize("number", [4, 1, 16])
def test_training_goes_on_with_another_number(tmp_path, number):
    """In the middle of a round; loss as in a run that kept its eight replicas."""
    checkpoint.save(tmp_path, run.MIDDLE, run.trained_by_eight(run.MIDDLE))
    if number == 16:  # more than there are devices here
        command = [sys.executable, run.__file__, str(tmp_path), "16"]
        printed = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=True
        )
        loss = float(printed.stdout.splitlines()[-1])
    else:
        state = run.restored(tmp_path, number)
        assert metrics.read(state[1])["steps"] == run.MIDDLE
        state = run.trained(state, number, range(run.MIDDLE, run.STEPS))
        loss = run.final_loss(state)
    wanted = run.final_loss(run.trained_by_eight(run.STEPS))
    assert wanted < 1.1  # of 2 at the start, and 1 for the teacher
    # Fewer replicas may do better, as one big batch does.
    assert loss / wanted - 1 < MAX_LOSS_INCREASE
