"""A step warns of what a sync should have made equal, and did not."""

import contextlib

import helpers
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import compressors, triggers
from curvadion_jax.synchronizers import reconcile

REPLICAS, STEPS, EVERY = 2, 6, 2
AFTER = {
    "nothing": optax.identity(),
    "scale": optax.scale(0.999),
    "decay": optax.add_decayed_weights(-1e-5),
    "clip": optax.clip_by_global_norm(0.01),
    "average": optax.chain(
        optax.scale(0.999), optax.ema(0.9)
    ),  # the parameters' shapes
}


def optimizer(trigger=None, inner=None, **options):
    trigger = trigger or triggers.every_k(EVERY)
    inner = inner or optax.sgd(0.1, momentum=0.9)
    return cd.adaptive_sync(inner, trigger, reconcile(**options), helpers.AXIS)


def trained(tx, dtype=jnp.float32, mesh=None):
    """Takes steps in `replicas.step`; gradients differ between the replicas."""
    mesh = mesh or cd.replicas.make_mesh(REPLICAS)
    params = helpers.make_params(dtype=dtype)
    if "fsdp" in mesh.shape:
        rows = NamedSharding(mesh, PartitionSpec("fsdp"))
        params |= {k: jax.device_put(params[k], rows) for k in helpers.MATRICES}
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    step = helpers.replica_step(tx, mesh)
    for gradients in helpers.make_gradients(STEPS, REPLICAS):
        state, _ = step(state, gradients)


def expected(moved):
    if not moved:
        return contextlib.nullcontext()  # warnings are errors
    return pytest.warns(UserWarning, match="After a sync the replicas still differ in")


@pytest.mark.parametrize("after", AFTER)
def test_a_transformation_after_the_optimizer(after):
    tx = optax.chain(optimizer(), AFTER[after])
    with expected(after != "nothing") as seen:
        trained(tx)
    assert seen is None or len(seen) == 1


@pytest.mark.parametrize("moved", [True, False])
def test_replicas_of_two_devices(moved):
    after = optax.scale(0.999) if moved else optax.identity()
    with expected(moved):
        trained(
            optax.chain(optimizer(), after),
            mesh=cd.replicas.make_mesh(REPLICAS, {"fsdp": 2}),
        )


@pytest.mark.parametrize("moved", [True, False])
def test_roundings_of_bfloat16(moved):
    # Each parameter is left one to four roundings, of 0.8%, from its anchor.
    after = optax.scale(0.5) if moved else optax.identity()
    with expected(moved):
        trained(optax.chain(optimizer(inner=optax.sgd(0.03)), after), jnp.bfloat16)


def test_the_first_updates_may_be_zero():
    inner = optax.sgd(lambda count: jnp.where(count < EVERY, 0.0, 0.1))
    with expected(True):
        trained(optax.chain(optimizer(inner=inner), AFTER["scale"]))


def test_a_sync_in_two_bits_is_no_move():
    trained(optimizer(compressor=compressors.quantize(2), momentum=False))


def test_nobody_takes_part():
    tx = optimizer(inner=optax.sgd(0.1))
    trained(
        optax.GradientTransformationExtraArgs(
            tx.init, lambda g, s, p: tx.update(g, s, p, weight=jnp.zeros([]))
        )
    )


@pytest.mark.parametrize("local", [(), ("log",)], ids=["named", "declared"])
def test_state_that_no_sync_reaches(local):
    mesh, tx = cd.replicas.make_mesh(REPLICAS), optimizer(triggers.always())
    train = helpers.train_step(tx)

    def step(state, gradients):
        gradients = jax.tree.map(lambda g: g[0], gradients)
        pair, metrics = train(state["train"], gradients)
        return {"train": pair, "log": state["log"] + gradients["bias"].sum()}, metrics

    params = helpers.make_params()
    state = {"train": (params, tx.init(params)), "log": jnp.zeros([])}
    step = cd.replicas.step(step, mesh, local=local)
    (gradients,) = helpers.make_gradients(1, REPLICAS)
    with expected(not local):
        step(cd.replicas.replicate(state, mesh), gradients)
