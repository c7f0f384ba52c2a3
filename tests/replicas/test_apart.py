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
from curvadion_jax.replicas import _consistency
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
    "apply_every": optax.apply_every(3),
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


CLEAN = {
    "2 bits": lambda: optimizer(compressor=compressors.quantize(2), momentum=False),
    "nesterov": lambda: optimizer(outer=optax.sgd(0.7, 0.9, nesterov=True)),
    "adam": lambda: optimizer(inner=optax.adam(0.1)),
    "local_muon": lambda: cd.local_muon(0.1, budget=0.5, axis_name=helpers.AXIS),
    "curvadion": lambda: cd.curvadion(0.1, budget=0.5, axis_name=helpers.AXIS),
    # Where gradients are averaged replicas stay apart by design.
    "paper": lambda: cd.presets.paper(0.1, axis_name=helpers.AXIS),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_said_of_a_clean_run(name, dtype):
    trained(CLEAN[name](), dtype)


@pytest.mark.parametrize("weights", [(0.0, 0.0), (0.0, 1.0)])
def test_nothing_is_said_where_a_replica_takes_no_part(weights):
    tx = optimizer(inner=optax.sgd(0.1))

    def update(gradients, state, params):
        weight = jnp.array(weights)[jax.lax.axis_index(helpers.AXIS)]
        return tx.update(gradients, state, params, weight=weight)

    trained(optax.GradientTransformationExtraArgs(tx.init, update))


@pytest.mark.parametrize("local", [(), ("critic",), ("critic", "adam")])
def test_parameters_of_another_optimizer(local):
    """They learn from what a sync reaches, and are not reached by one."""
    mesh, tx, other = cd.replicas.make_mesh(REPLICAS), optimizer(), optax.adam(0.1)
    train = helpers.train_step(tx)

    def step(state, gradients):
        gradients = jax.tree.map(lambda g: g[0], gradients)
        pair, metrics = train(state["train"], gradients)
        loss = lambda critic: jnp.sum((critic @ pair[0]["tall"]) ** 2)  # noqa: E731
        updates, adam = other.update(jax.grad(loss)(state["critic"]), state["adam"])
        critic = optax.apply_updates(state["critic"], updates)
        return {"train": pair, "critic": critic, "adam": adam}, metrics

    params, critic = helpers.make_params(), jnp.ones((2, 6))
    state = {"train": (params, tx.init(params)), "critic": critic}
    state = cd.replicas.replicate(state | {"adam": other.init(critic)}, mesh)
    step = cd.replicas.step(step, mesh, local=local)
    with expected(len(local) < 2) as seen:
        for gradients in helpers.make_gradients(STEPS, REPLICAS):
            state, _ = step(state, gradients)
    if seen is not None:
        (message,) = seen
        number, name = (2, "adam/0/mu") if local else (3, "critic")
        assert f"differ in {number} arrays" in str(message.message)
        assert name in str(message.message)


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


def test_looks_are_few(monkeypatch):
    """After 1, 2, 4, 8, ... steps that may have synchronised, and never on others."""
    calls, looks = [], []
    count = lambda *_: looks.append(len(calls)) or []  # noqa: E731
    monkeypatch.setattr(_consistency.ConsistencyCheck, "_differing", count)
    look = _consistency.ConsistencyCheck(())
    for _ in range(2000):
        look.after_step({}, due=False)
        calls.append(0)
        look.after_step({}, due=True)
    assert looks == [1, 2, 4, 8, 16, 32, 64, 128]


def test_an_optimizer_made_anew_on_replicas_that_differ_is_refused():
    """As for warm restarts: their anchors would differ, and they would never meet."""
    mesh = cd.replicas.make_mesh(2)
    tx = cd.local_muon(0.05, trigger=cd.triggers.every_k(4), axis_name="replica")
    params = {"kernel": jnp.ones((8, 4))}

    def train(state, batch):
        params, opt_state = state
        loss_fn = lambda p: jnp.mean((batch["x"] @ p["kernel"]) ** 2)  # noqa: E731
        updates, opt_state = tx.update(jax.grad(loss_fn)(params), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    step = cd.replicas.step(train, mesh)
    batch = {"x": jax.random.normal(jax.random.key(0), (16, 8))}
    state, _ = step(cd.replicas.replicate((params, tx.init(params)), mesh), batch)
    anew = state[0], jax.vmap(tx.init)(state[0])
    with pytest.raises(ValueError, match="Replicas start from different values"):
        step(anew, batch)
