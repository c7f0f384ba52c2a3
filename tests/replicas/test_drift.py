"""What changes updates or parameters behind the optimizer shows in the drift."""

import contextlib

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvadion_jax as cd
from curvadion_jax import compressors, triggers
from curvadion_jax.synchronizers import reconcile

REPLICAS, STEPS, EVERY = 2, 4, 2
# A sync misses a parameter by a rounding at most, and where it at most halves or
# doubles it by none: half a rounding of all together.
ROUNDINGS = 0.5

SYNCHRONIZERS = {
    "average": reconcile(),
    "outer": reconcile(optax.sgd(0.7, 0.9, nesterov=True), momentum=False),
    "2 bits": reconcile(compressor=compressors.quantize(2)),
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


def drift_after_a_sync(tx, params=None, steps=STEPS):
    """In roundings of the parameters' dtype."""
    params = helpers.make_params() if params is None else params
    gradients = helpers.make_gradients(steps, REPLICAS)
    *_, (params, state) = helpers.run_vmap(tx, params, gradients)
    assert cd.metrics.observe(state).synced.all()
    unit = float(jnp.finfo(params["bias"].dtype).eps)
    return np.asarray(cd.replicas.drift(params, state)) / unit


@pytest.mark.parametrize("behind", BEHIND)
def test_a_transformation_behind_it(behind):
    tx = optax.chain(optimizer(reconcile()), BEHIND[behind])
    assert (drift_after_a_sync(tx) > ROUNDINGS).all()


@pytest.mark.parametrize(
    "name",
    # `test_rounding_is_no_move` is of two bits too.
    ["average", "outer", pytest.param("2 bits", marks=pytest.mark.slow)],
)
def test_every_sync(name):
    tx = optimizer(SYNCHRONIZERS[name])
    assert (drift_after_a_sync(tx) <= ROUNDINGS).all()
    assert (drift_after_a_sync(optax.chain(tx, BEHIND["scale"])) > ROUNDINGS).all()


@pytest.mark.parametrize(
    "dtype",
    [
        jnp.bfloat16,
        pytest.param(jnp.float16, marks=pytest.mark.slow),
        pytest.param(jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_rounding_is_no_move(dtype):
    """Updates that are smaller than the parameters' rounding, and larger."""
    params = helpers.make_params(dtype=dtype)
    far = jax.tree.map(lambda x: 100 * x, params)
    tx = optimizer(SYNCHRONIZERS["2 bits"])
    assert (drift_after_a_sync(tx, params, steps=40) <= ROUNDINGS).all()
    assert (drift_after_a_sync(tx, far, steps=40) <= ROUNDINGS).all()
    half = optax.chain(tx, optax.scale(0.5))
    assert (drift_after_a_sync(half, params) > ROUNDINGS).all()


def test_by_hand():
    """Norms over all parameters together: |(0, 3, 4)| / |(2, 3, 6)| = 5 / 7."""
    anchor = {"a": jnp.array([2.0, 3.0]), "b": jnp.array([6.0])}
    tx = cd.adaptive_sync(optax.sgd(0.1), triggers.never(), reconcile())
    state = jax.tree.map(lambda x: jnp.stack([x, x]), tx.init(anchor))
    params = {
        "a": jnp.array([[2.0, 3.0], [2.0, 6.0]]),
        "b": jnp.array([[6.0], [2.0]]),
    }
    np.testing.assert_allclose(cd.replicas.drift(params, state), [0, 5 / 7], rtol=1e-6)


@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize("after_local_step", [True, False])
def test_who_has_no_weight_keeps_its_drift(weights, after_local_step):
    synchronizer = reconcile()._replace(after_local_step=after_local_step)
    tx = optimizer(synchronizer)

    def step(state, gradients, weight):
        params, opt_state = state
        updates, opt_state = tx.update(gradients, opt_state, params, weight=weight)
        return optax.apply_updates(params, updates), opt_state

    step = jax.jit(jax.vmap(step, axis_name=helpers.AXIS))
    params = helpers.make_params()
    state = params, tx.init(params)
    state = jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), state)
    for gradients in helpers.make_gradients(STEPS, REPLICAS):
        state = step(state, gradients, jnp.array(weights))
    found = cd.metrics.observe(state)
    assert (found.absent > 0).tolist() == [weight == 0 for weight in weights]
    far = np.asarray(cd.replicas.drift(*state)) > 1e-3
    assert far.tolist() == [weight == 0 for weight in weights]


def test_without_an_anchor_it_is_rejected():
    tx = cd.presets.synchronous_dion(0.1)
    params = helpers.make_params()
    stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x]), tree)  # noqa: E731
    with pytest.raises(ValueError, match=r"only synchronizers\.reconcile keeps one"):
        cd.replicas.drift(stack(params), stack(tx.init(params)))


def test_a_replica_of_two_devices():
    mesh = cd.replicas.make_mesh(REPLICAS, {"fsdp": 2})
    params = helpers.make_params()
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    for name in helpers.MATRICES:
        params[name] = jax.device_put(params[name], rows)
    for behind, moved in ((optax.identity(), False), (BEHIND["scale"], True)):
        tx = optax.chain(optimizer(reconcile()), behind)
        state = cd.replicas.replicate((params, tx.init(params)), mesh)
        step = helpers.replica_step(tx, mesh)
        warned = pytest.warns(UserWarning, match="behind the optimizer")
        with warned if moved else contextlib.nullcontext():
            for gradients in helpers.make_gradients(EVERY, REPLICAS):
                state, _ = step(state, gradients)
        unit = float(jnp.finfo(jnp.float32).eps)
        assert (cd.replicas.drift(*state) / unit > ROUNDINGS).tolist() == [moved] * 2


TRIGGERS = {
    "known": triggers.every_k(EVERY),
    "votes": triggers.drift(1e-9),
}


def trained(tx, steps=STEPS, dtype=jnp.float32):
    """Takes steps in `replicas.step`; gradients differ between the replicas."""
    mesh = cd.replicas.make_mesh(REPLICAS)
    params = jax.tree.map(lambda x: x.astype(dtype), helpers.make_params())
    state = helpers.start(tx, params, mesh)
    step = helpers.replica_step(tx, mesh)
    for gradients in helpers.make_gradients(steps, REPLICAS):
        state, _ = step(state, gradients)


@pytest.mark.parametrize("trigger", TRIGGERS)
@pytest.mark.parametrize("behind", ["scale", "decay", "clip"])
def test_a_step_warns_of_what_is_behind_the_optimizer(behind, trigger):
    inner = optax.sgd(0.1, momentum=0.9)
    tx = cd.adaptive_sync(inner, TRIGGERS[trigger], reconcile(), helpers.AXIS)
    with pytest.warns(
        UserWarning, match=r"something changes the updates behind"
    ) as seen:
        trained(optax.chain(tx, BEHIND[behind]), steps=6)
    assert len(seen) == 1


def test_it_warns_of_some_roundings_in_bfloat16():
    # Each parameter is left one to four of them, of 0.8%, from its anchor.
    tx = cd.adaptive_sync(optax.sgd(0.03), TRIGGERS["known"], reconcile(), helpers.AXIS)
    with pytest.warns(UserWarning, match="behind the optimizer"):
        trained(optax.chain(tx, optax.scale(0.5)), dtype=jnp.bfloat16)


def test_it_warns_in_programs_of_several_steps():
    tx = optax.chain(optimizer(reconcile()), BEHIND["scale"])
    mesh, train = cd.replicas.make_mesh(REPLICAS), helpers.train_step(tx)
    state = helpers.start(tx, helpers.make_params(), mesh)
    gradients = helpers.make_gradients(STEPS, REPLICAS)
    run = cd.replicas.steps(
        lambda state, batch: train(state, jax.tree.map(lambda g: g[0], batch)), mesh
    )
    with pytest.warns(UserWarning, match="behind the optimizer"):
        run(state, jax.tree.map(lambda *x: jnp.stack(x), *gradients))


def test_it_warns_when_the_first_updates_are_zero():
    inner = optax.sgd(lambda count: jnp.where(count < 1, 0.0, 0.1))
    tx = cd.adaptive_sync(inner, triggers.always(), reconcile(), helpers.AXIS)
    with pytest.warns(UserWarning, match="behind the optimizer"):
        trained(optax.chain(tx, BEHIND["scale"]))


# Warnings are errors.
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"fragments": 2}, {"delay": 1, "momentum": False}),
        {"compressor": compressors.quantize(2), "momentum": False},
    ],
    ids=["whole", "fragments", "delay", "2 bits"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_step_does_not_warn_of_a_sync(options, dtype):
    trained(optimizer(reconcile(**options)), steps=6, dtype=dtype)


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_a_step_does_not_warn_where_nobody_takes_part(trigger):
    tx = cd.adaptive_sync(optax.sgd(0.1), TRIGGERS[trigger], reconcile(), helpers.AXIS)
    absent = optax.GradientTransformationExtraArgs(
        tx.init, lambda g, s, p: tx.update(g, s, p, weight=jnp.zeros([]))
    )
    trained(absent)
