"""Checkpoints of some replicas for another number of them, and of one model."""

import subprocess
import sys

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import resized_main as run
from jax.sharding import NamedSharding, PartitionSpec
from resized_states import ATOL, AXIS, make_state, optimizer

import curvadion_jax as cd
from curvadion_jax import checkpoint, metrics

# The loss at the end may lie half a percent above that of a run that kept its replicas.
MAX_LOSS_INCREASE = 0.005


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 8), (8, 1), (1, 8), (6, 2)])
def test_a_checkpoint_of_another_number(tmp_path, old, new):
    state = make_state(old)
    checkpoint.save(tmp_path, 3, state)
    target = make_state(new, seed=5)
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


def test_the_same_number_is_read_bit_for_bit(tmp_path):
    state = make_state(2)["train"]
    checkpoint.save(tmp_path, 1, state)
    found = checkpoint.restore(tmp_path, state, replicas=2)
    helpers.assert_bitwise(jax.device_get(found), jax.device_get(state))


def test_a_checkpoint_lies_divided_on_another_mesh(tmp_path):
    specs = {2: PartitionSpec(AXIS, "fsdp"), 4: PartitionSpec(AXIS, "fsdp")}
    meshes = {n: cd.replicas.make_mesh(n, {"fsdp": 2}) for n in specs}
    x = np.random.default_rng(0).normal(size=(4, 6, 2)).astype(np.float32)
    state = {"w": jax.device_put(x, NamedSharding(meshes[4], specs[4]))}
    checkpoint.save(tmp_path, 1, state)
    target = {"w": jnp.zeros((2, 6, 2), jnp.float32)}
    target = jax.device_put(target, NamedSharding(meshes[2], specs[2]))
    found = checkpoint.restore(tmp_path, target, replicas=2)["w"]
    assert found.sharding.spec == specs[2]
    np.testing.assert_allclose(found, x.reshape(2, 2, 6, 2).mean(1), atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 2, 1])
def test_training_goes_on_with_another_number(tmp_path, number):
    """In the middle of a round; loss as in a run that kept its eight replicas."""
    checkpoint.save(tmp_path, run.MIDDLE, run.trained_by_eight(run.MIDDLE))
    state = run.restored(tmp_path, number)
    assert metrics.read(state[1])["steps"] == run.MIDDLE
    state = run.trained(state, number, range(run.MIDDLE, run.STEPS))
    wanted = run.final_loss(run.trained_by_eight(run.STEPS))
    assert wanted < 1.1  # of 2 at the start, and 1 for the teacher
    # Fewer replicas may do better, as one big batch does.
    assert run.final_loss(state) / wanted - 1 < MAX_LOSS_INCREASE


@pytest.mark.slow
def test_sixteen_replicas_in_a_process_of_their_own(tmp_path):
    checkpoint.save(tmp_path, run.MIDDLE, run.trained_by_eight(run.MIDDLE))
    done = subprocess.run(
        [sys.executable, run.__file__, str(tmp_path), "16"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = float(done.stdout.splitlines()[-1])
    assert (
        found / run.final_loss(run.trained_by_eight(run.STEPS)) - 1 < MAX_LOSS_INCREASE
    )


def test_plain_checkpoints_come_and_go(tmp_path):
    """The one model as orbax writes it, and replicas of what orbax has read."""
    state = make_state(8)["train"]
    model = cd.replicas.consensus(state[0])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", model)
        checkpointer.wait_until_finished()
        plain = checkpointer.restore(tmp_path / "model", model)
    chex.assert_trees_all_equal(plain, model)
    mesh = cd.replicas.make_mesh(8)
    params, _ = cd.replicas.replicate((plain, optimizer().init(plain)), mesh)
    for name, x in params.items():
        np.testing.assert_array_equal(x[5], model[name])
