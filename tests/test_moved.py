"""What changes updates or parameters behind the optimizer is noticed after a sync."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import compressors, metrics, triggers
from curvadion_jax.synchronizers import reconcile

REPLICAS, STEPS, EVERY = 2, 8, 2
SYNCS = STEPS // EVERY
# The last sync is the last step, and what is behind it is seen on the next.
SEEN = SYNCS - 1

SYNCHRONIZERS = {
    "average": reconcile(),
    "outer": reconcile(optax.sgd(0.7, 0.9, nesterov=True), momentum=False),
    "2 bits": reconcile(compressor=compressors.quantize(2)),
    "fragments": reconcile(fragments=2, momentum_every=2),
}
BEHIND = {
    "scale": optax.scale(0.999),
    "decay": optax.add_decayed_weights(-1e-5),
    "clip": optax.clip_by_global_norm(0.01),
}


def optimizer(synchronizer, **options):
    return cd.adaptive_sync(
        optax.sgd(0.1, momentum=0.9),
        triggers.every_k(EVERY),
        synchronizer,
        helpers.AXIS,
        **options,
    )


def moved(tx, params=None, steps=STEPS):
    """How often that was noticed on each replica."""
    params = helpers.make_params() if params is None else params
    gradients = helpers.make_gradients(steps, REPLICAS)
    *_, (_, state) = helpers.run_vmap(tx, params, gradients)
    found = metrics.observe(state)
    assert found.syncs.tolist() == [steps // EVERY] * REPLICAS
    return found.moved.tolist()


@pytest.mark.parametrize("behind", BEHIND)
def test_a_transformation_behind_it(behind):
    tx = optax.chain(optimizer(reconcile()), BEHIND[behind])
    assert moved(tx) == [SEEN] * REPLICAS


@pytest.mark.parametrize("name", SYNCHRONIZERS)
def test_every_sync(name):
    tx = optimizer(SYNCHRONIZERS[name])
    assert moved(tx) == [0] * REPLICAS
    assert moved(optax.chain(tx, BEHIND["scale"])) == [SEEN] * REPLICAS


def test_a_local_step_of_its_own():
    tx = optimizer(reconcile(), local_step=optax.sgd(0.1))
    assert moved(tx) == [0] * REPLICAS
    assert moved(optax.chain(tx, BEHIND["scale"])) == [SEEN] * REPLICAS


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rounding_is_no_move(dtype):
    """Updates that are smaller than the parameters' rounding, and larger."""
    params = helpers.make_params(dtype=dtype)
    far = jax.tree.map(lambda x: 100 * x, params)
    tx = optimizer(SYNCHRONIZERS["2 bits"])
    assert moved(tx, params, steps=40) == [0] * REPLICAS
    assert moved(tx, far, steps=40) == [0] * REPLICAS


def test_syncs_of_gradients_leave_parameters_nowhere_in_particular():
    tx = cd.presets.synchronous_dion(0.1, axis_name=helpers.AXIS)
    tx = optax.chain(tx, BEHIND["scale"])
    gradients = helpers.make_gradients(3, REPLICAS)
    *_, (_, state) = helpers.run_vmap(tx, helpers.make_params(), gradients)
    assert metrics.observe(state).moved.tolist() == [0] * REPLICAS


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_what_one_without_weight_keeps_of_its_own_is_no_move(weight):
    tx = optimizer(reconcile())

    def step(state, gradients):
        params, opt_state = state
        own = jnp.where(jax.lax.axis_index(helpers.AXIS) == 0, weight, 1.0)
        updates, opt_state = tx.update(gradients, opt_state, params, weight=own)
        return optax.apply_updates(params, updates), opt_state

    params = helpers.make_params()
    state = jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), (params, tx.init(params)))
    step = jax.jit(jax.vmap(step, axis_name=helpers.AXIS))
    for gradients in helpers.make_gradients(STEPS, REPLICAS):
        state = step(state, gradients)
    found = metrics.observe(state)
    assert found.absent.tolist() == [0 if weight else SYNCS, 0]
    assert found.moved.tolist() == [0, 0]
    distance = optax.tree.norm(jax.tree.map(lambda x: x[0] - x[1], state[0]))
    assert (distance > 0.1) == (weight == 0)


def test_parameters_moved_by_hand_on_one_replica():
    """Between a sync and the next step; elsewhere that is the user's business."""
    tx, params = optimizer(reconcile()), helpers.make_params()
    mesh = cd.replicas.make_mesh(REPLICAS)
    state = helpers.start(tx, params, mesh)
    gradients = helpers.make_gradients(STEPS, REPLICAS)
    step = helpers.quick(helpers.replica_step(tx, mesh), state, gradients[0])
    for number, each in enumerate(gradients):
        if number in (EVERY, 2 * EVERY + 1):  # right after a sync, and a step later
            bias = np.array(state[0]["bias"])
            bias[1] += 0.01
            state[0]["bias"] = jax.device_put(bias, state[0]["bias"].sharding)
        state, _ = step(state, each)
    assert metrics.observe(state).moved.tolist() == [0, 1]
    what = f"after 1 of {SYNCS} syncs a replica's parameters were not where"
    with pytest.warns(RuntimeWarning, match=what):
        assert metrics.read(state)["moved"] == 1


def test_a_replica_of_two_devices():
    mesh = cd.replicas.make_mesh(REPLICAS, {"fsdp": 2})
    params = helpers.make_params()
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    for name in helpers.MATRICES:
        params[name] = jax.device_put(params[name], rows)
    for behind, seen in ((optax.identity(), 0), (BEHIND["scale"], 1)):
        tx = optax.chain(optimizer(reconcile()), behind)
        state = cd.replicas.replicate((params, tx.init(params)), mesh)
        step = helpers.replica_step(tx, mesh)
        for gradients in helpers.make_gradients(EVERY + 1, REPLICAS):
            state, _ = step(state, gradients)
        assert metrics.observe(state).moved.tolist() == [seen] * REPLICAS
