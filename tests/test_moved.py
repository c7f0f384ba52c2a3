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
    "one array of five numbers": optax.masked(
        optax.scale(0.9), {name: name == "bias" for name in helpers.SHAPES}
    ),
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
    half = optax.chain(tx, optax.scale(0.5))
    assert moved(half, params) == [SEEN] * REPLICAS


def test_a_number_that_goes_through_zero():
    """What `params + update` misses is as large as the anchor then, or larger."""
    tx = optimizer(reconcile())
    params = {**helpers.make_params(), "gate": jnp.zeros([])}
    rng = np.random.default_rng(0)

    def step(state, noise):
        params, opt_state = state
        gradients = jax.tree.map(jnp.zeros_like, params) | {"gate": noise}
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), params["gate"]

    def run(state, noise):
        return jax.lax.scan(step, state, noise)

    state = jax.tree.map(lambda x: jnp.stack([x] * 8), (params, tx.init(params)))
    noise = rng.normal(size=(8, 400)).astype(np.float32)
    state, gates = jax.jit(jax.vmap(run, axis_name=helpers.AXIS))(state, noise)
    assert np.diff(np.sign(gates), axis=1).any()
    assert metrics.observe(state).syncs[0] == 200
    assert not metrics.observe(state).moved.any()


def test_no_parameters():
    tx = cd.adaptive_sync(optax.sgd(0.1), triggers.always(), reconcile())
    state = tx.init({})
    for _ in range(2):
        _, state = tx.update({}, state, {})
    assert metrics.read(state, replicas=1)["moved"] == 0


def test_syncs_of_gradients_leave_parameters_nowhere_in_particular():
    tx = cd.presets.synchronous_dion(0.1, axis_name=helpers.AXIS)
    tx = optax.chain(tx, BEHIND["scale"])
    gradients = helpers.make_gradients(3, REPLICAS)
    *_, (_, state) = helpers.run_vmap(tx, helpers.make_params(), gradients)
    assert metrics.observe(state).moved.tolist() == [0] * REPLICAS


def with_weights(tx):
    """A step of all replicas: (state, gradients, weights) -> state."""

    def step(state, gradients, weight):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params, weight=weight)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(jax.vmap(step, axis_name=helpers.AXIS))


def begin(tx, replicas=REPLICAS):
    params = helpers.make_params()
    state = params, tx.init(params)
    return jax.tree.map(lambda x: jnp.stack([x] * replicas), state)


@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize("after_local_step", [True, False])
def test_what_one_without_weight_keeps_of_its_own_is_no_move(weights, after_local_step):
    synchronizer = reconcile()._replace(after_local_step=after_local_step)
    tx = optimizer(synchronizer)
    state, step = begin(tx), with_weights(tx)
    for gradients in helpers.make_gradients(STEPS, REPLICAS):
        state = step(state, gradients, jnp.array(weights))
    found = metrics.observe(state)
    assert (found.absent > 0).tolist() == [weight == 0 for weight in weights]
    assert found.moved.tolist() == [0, 0]
    distance = optax.tree.norm(jax.tree.map(lambda x: x[0] - x[1], state[0]))
    assert (distance > 0.1) == (weights != (1.0, 1.0))


def test_what_one_with_spoilt_gradients_keeps_of_its_own_is_no_move():
    """With a local step of its own a replica brings nothing then, and stays away."""
    tx = optimizer(reconcile(), local_step=optax.sgd(0.1))
    state, step = begin(tx), with_weights(tx)
    for number, gradients in enumerate(helpers.make_gradients(STEPS, REPLICAS)):
        if number % EVERY == EVERY - 1:
            gradients["bias"][0] = np.nan
        state = step(state, gradients, jnp.ones(REPLICAS))
    found = metrics.observe(state)
    assert found.left_out.tolist() == [SYNCS, 0]
    assert found.moved.tolist() == [0, 0]


@pytest.mark.parametrize("what", ["resize", "mend"])
def test_replicas_that_are_made_of_others(what):
    """Right after a sync that one of four, not the first, has missed."""
    tx = optimizer(reconcile())
    state, step = begin(tx, 4), with_weights(tx)
    gradients = helpers.make_gradients(EVERY + 1, 4)
    missing = 0 if what == "mend" else 1
    weights = jnp.ones(4).at[missing].set(0.0)
    for each in gradients[:EVERY]:
        state = step(state, each, weights)
    assert state[1].metrics.joined.tolist() == weights.tolist()
    if what == "mend":  # replica 2 gets the parameters of 0, which are not the anchor
        params = {**state[0], "bias": state[0]["bias"].at[2].set(np.nan)}
        state, replaced = cd.replicas.mend((params, state[1]))
        assert replaced == [2]
        last = gradients[EVERY]
    else:
        state = cd.replicas.resize(state, cd.replicas.make_mesh(2))
        assert state[1].metrics.joined.tolist() == [0.5, 1.0]
        last = jax.tree.map(lambda x: x[:2], gradients[EVERY])
    after = step(state, last, jnp.ones(len(last["bias"])))
    assert not metrics.observe(after).moved.any()
    # All the same there is something to see.
    params, opt_state = state
    joined = jnp.ones_like(opt_state.metrics.joined)
    counters = opt_state.metrics._replace(joined=joined)
    unaware = params, opt_state._replace(metrics=counters)
    after = step(unaware, last, jnp.ones(len(last["bias"])))
    assert metrics.observe(after).moved.any()


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
        if number == EVERY:
            what = r"parameters of replicas \[1\] were not where the last sync"
            with pytest.warns(RuntimeWarning, match=what):
                assert metrics.read(state)["moved"] == 1
    assert metrics.observe(state).moved.tolist() == [0, 1]
    assert metrics.read(state)["moved"] == 1  # and nothing is said of it any more


def test_who_wants_no_look():
    tx = optimizer(reconcile()._replace(settled=None))
    assert moved(optax.chain(tx, BEHIND["scale"])) == [0] * REPLICAS


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
