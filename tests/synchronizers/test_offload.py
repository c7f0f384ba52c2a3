"""State that only syncs touch, in host memory: same numbers, same place, few copies."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

pytestmark = pytest.mark.slow

HOST, DEVICE = {"pinned_host"}, {"device"}


def optimizer() -> Any:
    """Anchor, Q, outer momentum, error feedback."""
    synchronizer = synchronizers.reconcile(
        optax.sgd(0.7, 0.9, nesterov=True), compressor=compressors.quantize(4)
    )
    return helpers.synced_dion(
        0.1, 0.5, triggers.every_k(2), synchronizer, axis_name=helpers.AXIS
    )


def kinds(tree) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def split(state):
    """What lies under `sync_state`, and the rest of (params, optimizer state)."""
    params, opt_state = state
    return opt_state.sync_state, (params, opt_state._replace(sync_state=()))


@pytest.fixture(scope="module")
def run():
    """Four steps with the state on the device, and offloaded; donated."""
    tx, mesh = optimizer(), cd.replicas.make_mesh(3)
    step = helpers.replica_step(tx, mesh, donate=True)
    device = helpers.start(tx, helpers.make_params(), mesh)
    host = cd.replicas.offload(jax.tree.map(jnp.copy, device))
    history = []
    for tree in helpers.make_gradients(4, 3):
        device, host = step(device, tree)[0], step(host, tree)[0]
        history.append(jax.tree.map(jnp.copy, (device, host)))
    return history, step


def test_the_numbers_are_the_same_and_stay_where_they_were(run):
    history, step = run
    for device, host in history:
        helpers.assert_bitwise(host, device)
        at_syncs, rest = split(host)
        assert (kinds(at_syncs), kinds(rest)) == (HOST, DEVICE)
        assert kinds(device) == DEVICE
    # A local step and a sync step, for each of the two placements.
    assert len(step._programs) == 4


def transfers(jaxpr) -> int:
    return sum(x.primitive.name == "device_put" for x in helpers.equations(jaxpr))


def test_arrays_are_copied_at_a_sync_alone():
    tx, mesh = optimizer(), cd.replicas.make_mesh(3)
    host = cd.replicas.offload(helpers.start(tx, helpers.make_params(), mesh))
    step = helpers.replica_step(tx, mesh)
    (gradients,) = helpers.make_gradients(1, 3)
    there_and_back = 2 * len(jax.tree.leaves(host[1].sync_state))
    programs = {
        due: helpers.program_of(step, host, gradients, due=due)
        for due in (True, False, None)
    }
    assert [*map(transfers, programs.values())] == [there_and_back, 0, there_and_back]
    # Where the devices decide, inside of the condition alone.
    conditions = [
        [transfers(branch.jaxpr) for branch in equation.params["branches"]]
        for equation in helpers.equations(programs[None])
        if equation.primitive.name == "cond"
    ]
    assert [0, there_and_back] in conditions


def test_a_mended_state_stays_in_host_memory(run):
    params, opt_state = run[0][-1][1]
    anchor = opt_state.sync_state.anchor

    def spoil(x):
        numbers = np.array(x)
        numbers[2] = np.nan
        return jax.device_put(numbers, x.sharding)

    spoilt = jax.tree.map(spoil, anchor)
    state = (
        params,
        opt_state._replace(sync_state=opt_state.sync_state._replace(anchor=spoilt)),
    )
    mended, replaced = cd.replicas.repair(state)
    assert replaced == [2]
    at_syncs, rest = split(mended)
    assert (kinds(at_syncs), kinds(rest)) == (HOST, DEVICE)
    for x, y in zip(
        jax.tree.leaves(mended[1].sync_state.anchor),
        jax.tree.leaves(anchor),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(x)[2], np.asarray(y)[0])


def test_a_checkpoint_comes_back_into_host_memory(run, tmp_path):
    history, _ = run
    _, host = history[-1]
    cd.checkpoint.save(tmp_path, 4, host)
    tx, mesh = optimizer(), cd.replicas.make_mesh(3)
    fresh = helpers.start(tx, helpers.make_params(), mesh)
    for target, expected in ((cd.replicas.offload(fresh), HOST), (fresh, DEVICE)):
        restored = cd.checkpoint.restore(tmp_path, target)
        helpers.assert_bitwise(restored, host)
        at_syncs, rest = split(restored)
        assert (kinds(at_syncs), kinds(rest)) == (expected, DEVICE)


def test_the_consensus_is_the_anchor_on_the_device(run):
    history, _ = run
    device, host = history[-1]
    model = cd.replicas.anchor(host[1])
    assert kinds(model) == DEVICE
    helpers.assert_bitwise(model, cd.replicas.anchor(device[1]))


def test_one_replica_without_an_axis():
    tx = cd.local_muon(0.1, trigger=triggers.every_k(2))
    params = helpers.make_params()
    state = tx.init(params)
    step = jax.jit(tx.update)
    gradients = jax.tree.map(jnp.ones_like, params)
    host = cd.replicas.offload(state)
    for _ in range(2):
        one, state = step(gradients, state, params)
        other, host = step(gradients, host, params)
    helpers.assert_bitwise((one, state), (other, host))
    assert kinds(host.sync_state) == HOST


def test_what_is_anchored_anew_stays_there():
    mesh, tx = cd.replicas.make_mesh(2), optimizer()
    params = helpers.make_params()
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    opt_state = cd.replicas.reanchor(*cd.replicas.offload(state))
    assert kinds(opt_state.sync_state) == HOST


def test_an_nnx_state():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer_ = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)
    _, state = nnx.split((model, optimizer_))
    state = cd.replicas.replicate(state, cd.replicas.make_mesh(2))
    before = jax.tree.leaves(state)
    moved = jax.tree.leaves(cd.replicas.offload(state))
    anchors = [x for x in moved if x.sharding.memory_kind == "pinned_host"]
    expected = jax.tree.leaves(optimizer().init(nnx.state(model, nnx.Param)).sync_state)
    assert len(anchors) == len(expected)
    helpers.assert_bitwise(moved, before)
