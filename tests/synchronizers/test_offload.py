"""State that only syncs touch, in host memory: same numbers, same place, few copies."""

import functools
from typing import Any

import helpers
import jax
import numpy as np
import optax
import pytest
from flax import nnx

import curvadion_jax as cd
from curvadion_jax import compressors, synchronizers, triggers

REPLICAS, STEPS = 3, 4
HOST, DEVICE = {"pinned_host"}, {"device"}
MESH = cd.replicas.make_mesh(REPLICAS)


def optimizer(mesh: Any = MESH) -> Any:
    """Anchor, outer momentum, error feedback."""
    synchronizer = synchronizers.reconcile(
        optax.sgd(0.7, 0.9, nesterov=True), compressor=compressors.quantize(4)
    )
    inner = optax.sgd(0.1, 0.9)
    return cd.adaptive_sync(inner, triggers.every_k(2), synchronizer, mesh)


def kinds(tree) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def parts(state):
    """What syncs alone touch, and the rest of (params, optimizer state)."""
    params, opt = state
    rest = opt._replace(common=(), rows=opt.rows._replace(residual=()))
    at_syncs = opt.common.anchor, opt.common.sync_state, opt.rows.residual
    return at_syncs, (params, rest)


def start(mesh=MESH):
    params, state = helpers.start(optimizer(mesh), helpers.make_params(), mesh)
    return (params, state), (params, cd.replicas.offload(state))


@functools.cache
def run():
    """Some steps with the state on the device, and offloaded."""
    step = jax.jit(helpers.train_step(optimizer()))
    device, host = start()
    history = []
    for tree in helpers.make_gradients(STEPS, REPLICAS):
        device, host = step(device, tree)[0], step(host, tree)[0]
        history.append((device, host))
    assert step._cache_size() == 2  # one program of each
    return history


def test_the_numbers_are_the_same_and_stay_where_they_were():
    for device, host in run():
        helpers.assert_bitwise(host, device)
        at_syncs, rest = parts(host)
        assert len(jax.tree.leaves(at_syncs)) == 3 * len(helpers.SHAPES)
        assert (kinds(at_syncs), kinds(rest)) == (HOST, DEVICE)
        assert kinds(device) == DEVICE
    assert int(host[1].counters.syncs) == STEPS // 2


def transfers(jaxpr: Any) -> tuple[int, int]:
    """Copies between memories inside of conditions, and outside."""
    inside = outside = 0
    for equation in jaxpr.eqns:
        outside += equation.primitive.name == "device_put"
        for inner in jax.tree.leaves([*equation.params.values()], is_leaf=is_program):
            if is_program(inner):
                found = transfers(getattr(inner, "jaxpr", inner))
                if equation.primitive.name == "cond":
                    inside += sum(found)
                else:
                    inside, outside = inside + found[0], outside + found[1]
    return inside, outside


def is_program(x: Any) -> bool:
    return hasattr(getattr(x, "jaxpr", x), "eqns")


@pytest.mark.parametrize(
    ("due", "inside", "outside"),
    [(None, True, False), (True, False, True), (False,) * 3],
)
def test_arrays_are_copied_at_a_sync_alone(due, inside, outside):
    """There and back, on one side of the condition where there is one."""
    update = helpers.train_step(helpers.when(optimizer(), due))
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    kept = start()[1]
    there_and_back = 2 * len(jax.tree.leaves(parts(kept)[0]))
    found = transfers(jax.make_jaxpr(update)(kept, gradients).jaxpr)
    assert found == (inside * there_and_back, outside * there_and_back)


def test_a_donated_state_stays_on_the_host():
    step = jax.jit(helpers.train_step(optimizer()), donate_argnums=0)
    _, host = start()
    for tree in helpers.make_gradients(STEPS, REPLICAS):
        host, _ = step(host, tree)
    helpers.assert_bitwise(host, run()[-1][0])
    assert kinds(parts(host)[0]) == HOST


def test_a_checkpoint_comes_back_into_host_memory(tmp_path):
    _, host = run()[-1]
    cd.checkpoint.save(tmp_path, STEPS, host)
    fresh, offloaded = start()
    for target, expected in ((offloaded, HOST), (fresh, DEVICE)):
        restored = cd.checkpoint.restore(tmp_path, target)
        helpers.assert_bitwise(restored, host)
        at_syncs, rest = parts(restored)
        assert (kinds(at_syncs), kinds(rest)) == (expected, DEVICE)


@pytest.mark.parametrize("number", [1, 6])
def test_a_state_for_another_number_stays_on_the_host(tmp_path, number):
    _, host = run()[-1]
    mesh = cd.replicas.make_mesh(number)
    cd.checkpoint.save(tmp_path, STEPS, host)
    target = start(mesh)[1]
    resized = cd.replicas.resize(host, mesh)
    restored = cd.checkpoint.restore(tmp_path, target, resize=True)
    for state in (resized, restored):
        at_syncs, rest = parts(state)
        assert (kinds(at_syncs), kinds(rest)) == (HOST, DEVICE)
        assert state[1].rows.residual["tall/kernel"].shape == (number, 6, 4)
    helpers.assert_bitwise(restored[1].common.anchor, host[1].common.anchor)


def test_the_anchor_is_read_on_the_device():
    device, host = run()[-1]
    model = cd.replicas.anchor(host[1])
    assert kinds(model) == DEVICE
    helpers.assert_bitwise(model, cd.replicas.anchor(device[1]))


@pytest.mark.parametrize("mesh", [None, cd.replicas.simulated(2)], ids=["one", "two"])
def test_without_a_mesh_of_devices(mesh):
    params, state = helpers.start(optimizer(mesh), helpers.make_params(), mesh)
    update = jax.jit(optimizer(mesh).update)
    host = cd.replicas.offload(state)
    for _ in range(2):
        one, state = update(params, state, params)
        other, host = update(params, host, params)
    helpers.assert_bitwise((one, state), (other, host))
    assert kinds((host.common, host.rows.residual)) == HOST


def test_dions_common_q():
    mesh = cd.replicas.simulated(2)
    tx = cd.presets.synchronous_dion(0.1, rank=2, mesh=mesh)
    params, state = helpers.start(tx, helpers.make_params(), mesh)
    host = cd.replicas.offload(state)
    update = jax.jit(tx.update)
    for _ in range(2):
        one, state = update(params, state, params)
        other, host = update(params, host, params)
    helpers.assert_bitwise((one, state), (other, host))
    assert kinds(host.common.sync_state) == HOST
    assert kinds(host.rows.inner_state) == DEVICE


def test_a_whole_training_state():
    """Also of nnx, whose variables hold the arrays."""
    model = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    mesh = cd.replicas.simulated(2)
    rows = cd.replicas.replicate(nnx.state(model, nnx.Param), mesh)
    state = {"params": rows, "opt": optimizer(mesh).init(rows), "step": 0}
    moved = cd.replicas.offload(state)
    assert kinds(parts((rows, moved["opt"]))[0]) == HOST
    assert moved["step"] == 0
    assert kinds(moved["params"]) == DEVICE
    helpers.assert_bitwise(moved["opt"], state["opt"])
    assert np.size(moved["opt"].common.anchor["kernel"].get_value()) == 24


def test_a_state_without_a_synchronizing_optimizer_has_nothing_to_offload():
    state = optax.adam(0.1).init(helpers.make_params())
    with pytest.raises(ValueError, match="no state of an optimizer that synchronises"):
        cd.replicas.offload(state)
