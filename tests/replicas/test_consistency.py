"""Replicas start from one model, and a step warns of what a sync did not make equal."""

import contextlib

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import compressors, triggers
from curvadion_jax.replicas import _consistency
from curvadion_jax.synchronizers import reconcile

pytestmark = pytest.mark.slow  # many programs
REPLICAS, STEPS, EVERY = 2, 6, 2
MESH = cd.replicas.make_mesh(REPLICAS, devices=jax.devices()[:REPLICAS])
MODELS = [helpers.make_params(seed) for seed in range(REPLICAS)]


def optimizer(trigger=None, inner=None, **options):
    trigger = trigger or triggers.every_k(EVERY)
    inner = inner or optax.sgd(0.1, momentum=0.9)
    return cd.adaptive_sync(inner, trigger, reconcile(**options), helpers.AXIS)


TX = optimizer()
NO_REQUEST = triggers.stateless(lambda seen: triggers.decision(False))
VOTING = cd.local_muon(0.1, trigger=NO_REQUEST, axis_name=helpers.AXIS)
TUPLE = optax.GradientTransformation(
    lambda params: TX.init((params,)),
    lambda g, s, p: (lambda u, s: (u[0], s))(*TX.update((g,), s, (p,))),
)
NO_ANCHOR = cd.presets.synchronous_dion(0.1, axis_name=helpers.AXIS)


def trained(tx, dtype=jnp.float32, mesh=MESH, params=None):
    """Takes steps in `replicas.step`; gradients differ between the replicas."""
    params = helpers.make_params(dtype=dtype) if params is None else params
    if "fsdp" in mesh.shape:
        rows = NamedSharding(mesh, PartitionSpec("fsdp"))
        params |= {k: jax.device_put(params[k], rows) for k in helpers.MATRICES}
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    step = helpers.replica_step(tx, mesh)
    for gradients in helpers.make_gradients(STEPS, REPLICAS):
        state, _ = step(state, gradients)


def warns(yes=True):
    if not yes:
        return contextlib.nullcontext()  # warnings are errors
    return pytest.warns(UserWarning, match="After a sync the replicas still differ in")


SELDOM = triggers.at_least_every(triggers.relative_momentum_change(1e9), 5)
WRAPPED = {
    "nothing": lambda tx: tx,
    # With a state of the parameters' shapes.
    "average": lambda tx: optax.chain(tx, optax.scale(0.999), optax.ema(0.9)),
    "apply_every": lambda tx: optax.chain(tx, optax.apply_every(3)),
    # Parameters of its own, and slow ones.
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 0.1),
    "lookahead": lambda tx: optax.lookahead(tx, sync_period=3, slow_step_size=0.5),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_what_wraps_or_follows_the_optimizer(name):
    params = helpers.make_params()
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    with warns(name != "nothing") as found:
        trained(WRAPPED[name](optimizer()), params=params)
    assert found is None or len(found) == 1


def test_replicas_of_two_devices_and_a_sync_of_which_only_devices_know():
    """And which is on none of the steps 1, 2, 4, 8, ..."""
    mesh = cd.replicas.make_mesh(REPLICAS, {"fsdp": 2})
    with warns():
        trained(optax.chain(optimizer(SELDOM), optax.scale(0.999)), mesh=mesh)


@pytest.mark.parametrize("moved", [True, False])
def test_roundings_of_bfloat16(moved):
    # Each parameter is left one to four roundings, of 0.8%, from its anchor.
    after = optax.scale(0.5) if moved else optax.identity()
    with warns(moved):
        trained(optax.chain(optimizer(inner=optax.sgd(0.03)), after), jnp.bfloat16)


CLEAN = {
    "2 bits": lambda: optimizer(compressor=compressors.quantize(2)),
    "nesterov": lambda: optimizer(outer=optax.sgd(0.7, 0.9, nesterov=True)),
    "curvadion": lambda: cd.curvadion(0.1, budget=0.5, axis_name=helpers.AXIS),
    # Where gradients are averaged replicas stay apart by design.
    "paper": lambda: cd.presets.paper(0.1, axis_name=helpers.AXIS),
}


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_said_of_a_clean_run(name):
    trained(CLEAN[name](), jnp.bfloat16 if name == "2 bits" else jnp.float32)


def test_nothing_is_said_of_parameters_that_begin_at_zero():
    """Before a sync they are larger than their mean, and so is its rounding."""
    params, step = {"bias": jnp.zeros(99)}, helpers.replica_step(TX, MESH)
    state = cd.replicas.replicate((params, TX.init(params)), MESH)
    gradients = {"bias": np.outer([1, -0.97], np.linspace(0.1, 1, 99))}
    for _ in range(EVERY):
        state, _ = step(state, gradients)
    assert np.ptp(state[0]["bias"])  # The sync was not exact.


def test_nothing_is_said_where_a_replica_takes_no_part():
    tx = optimizer(inner=optax.sgd(0.1))

    def update(updates, state, params=None):
        weight = jnp.array([0.0, 1.0])[jax.lax.axis_index(helpers.AXIS)]
        return tx.update(updates, state, params, weight=weight)

    trained(optax.GradientTransformationExtraArgs(tx.init, update))


@pytest.mark.parametrize("tx", [TX, NO_ANCHOR])
def test_a_replica_that_keeps_its_old_state_is_an_error(tx):
    """By indexing, which the step's program does not show."""

    def update(updates, state, params=None):
        updates, new = tx.update(updates, state, params)
        index = jnp.array([1, 0])[jax.lax.axis_index(helpers.AXIS)]
        return updates, jax.tree.map(lambda *x: jnp.stack(x)[index], state, new)

    with pytest.raises(ValueError, match="counted different steps"):
        trained(optax.GradientTransformationExtraArgs(tx.init, update))


@pytest.mark.parametrize("tx", [optimizer(), NO_ANCHOR])
@pytest.mark.parametrize("local", [(), ("critic",), ("critic", "adam/0")])
def test_parameters_of_another_optimizer(local, tx):
    """They learn from a replica's own data, and no sync reaches them."""
    other = optax.adam(0.1)
    train = helpers.train_step(tx)

    def step(state, gradients):
        gradients = jax.tree.map(lambda g: g[0], gradients)
        pair, metrics = train(state["train"], gradients)
        loss = lambda critic: jnp.sum((critic @ gradients["tall"]) ** 2)
        updates, adam = other.update(jax.grad(loss)(state["critic"]), state["adam"])
        critic = optax.apply_updates(state["critic"], updates)
        return {"train": pair, "critic": critic, "adam": adam}, metrics

    params, critic = helpers.make_params(), jnp.ones((2, 6))
    state = {"train": (params, tx.init(params)), "critic": critic}
    state = cd.replicas.replicate(state | {"adam": other.init(critic)}, MESH)
    step = cd.replicas.step(step, MESH, local=local)
    with warns(len(local) < 2) as found:
        for gradients in helpers.make_gradients(2, REPLICAS):
            state, _ = step(state, gradients)
    if found is not None:
        number, name = (2, "adam/0/mu") if local else (3, "critic")
        assert f"differ in {number} arrays" in str(found[0].message)
        assert name in str(found[0].message)


LOOKS = {
    "sync": [2**n for n in range(11)],
    "no sync": [*range(1, 101), *range(101, 2001, 101)],
    50: [*range(1, 51), *range(100, 200), *range(200, 2001, 101)],
}


@pytest.mark.parametrize("syncs", LOOKS)
def test_comparisons_are_few(monkeypatch, syncs):
    """After 1, 2, 4, ... steps that may have synchronised, and never on others."""
    found = []
    look = lambda _, n: found.append(n) or ([] if syncs in ("sync", n) else None)
    monkeypatch.setattr(_consistency.ConsistencyCheck, "_differing", look)
    check = _consistency.ConsistencyCheck(())
    for number in range(1, 2001):
        check.after_step(number, due=False)
        check.after_step(number, due=True)
    assert found == LOOKS[syncs]


def train(tx, wrap=lambda f: f):
    """A step on state with an average of the weights, beside which they are known."""

    @wrap
    def step(state, batch):
        batch = jax.tree.map(lambda g: g[0], batch)
        params, opt_state = state["model"], state["opt_state"]
        updates, opt_state = tx.update(batch, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, state["average"], 0.1)
        return {"model": params, "opt_state": opt_state, "average": average}, {}

    return cd.replicas.step(step, MESH, average=["average"], donate=False)


def start(tx, initialised, params):
    """For each replica parameters, and an optimizer and an average of others."""
    average = initialised[0]
    pairs = zip(params, initialised, strict=True)
    each = [{"model": x, "opt_state": tx.init(y), "average": average} for x, y in pairs]
    return jax.tree.map(lambda *x: jnp.stack(x), *each)


SAME, OTHER = [MODELS[0]] * REPLICAS, [MODELS[1]] * REPLICAS
APART = r"start from different values \('model/bias'\)"
SPOILT = [MODELS[0] | {"bias": jnp.full(5, -jnp.inf)}] * REPLICAS  # as a mask
LOWEST = optax.GradientTransformation(
    lambda _: jnp.full(3, jnp.inf),  # as of the lowest losses so far
    lambda updates, state, params=None: (updates, state),
)
IN_STATE = "'opt_state/inner_state' holds NaN or Inf"
MOVED = "not those of 'opt_state/sync_state/anchor/bias', which tx.init was"


@pytest.mark.parametrize(
    ("tx", "initialised", "params", "message"),
    [
        (TX, SAME, SAME, None),
        (VOTING, SAME, SAME, None),
        (TX, MODELS, MODELS, APART),
        (TX, SAME, MODELS, APART),
        (TX, SAME, OTHER, MOVED),
        (TUPLE, SAME, OTHER, "not those of 'opt_state/sync_state/anchor/0/bias'"),
        (NO_ANCHOR, MODELS, MODELS, APART),
        (TX, SPOILT, SPOILT, "anchor/bias' holds NaN or Inf"),
        (optimizer(inner=LOWEST), SAME, SAME, IN_STATE),
    ],
    ids="one voting seeds apart loaded tuple no-anchor a-mask in-state".split(),
)
def test_the_first_step_rejects_another_model(tx, initialised, params, message):
    state, (batch,) = start(tx, initialised, params), helpers.make_gradients(1, 2)
    if message is None:
        step = train(tx)
        state, _ = step(state, batch)
        train(tx)(state, batch)  # it has started, and replicas may differ
        state["opt_state"] = jax.vmap(tx.init)(state["model"])  # made anew
        message = "start from different values"
        with pytest.raises(ValueError, match=message):
            step(state, batch)
        return
    for wrap in (lambda f: f, jax.checkpoint):
        with pytest.raises(ValueError, match=message):
            train(tx, wrap)(state, batch)


def test_an_nnx_model_that_was_loaded_after_the_optimizer():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    model.kernel[...] += 1
    graph, state = nnx.split((model, optimizer))

    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        grads = nnx.grad(lambda model: jnp.sum(model(x)))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {}

    step, x = cd.replicas.step(step, MESH), np.ones((REPLICAS, 3), np.float32)
    with pytest.raises(ValueError, match=r"not those of .*anchor/kernel'"):
        step(cd.replicas.replicate(state, MESH), x)
    state[1]["opt_state"] = cd.replicas.reanchor(state[0], state[1]["opt_state"])
    state, _ = step(cd.replicas.replicate(state, MESH), x)
    anchor = cd.replicas.anchor(nnx.merge(graph, state)[1].opt_state)
    helpers.assert_bitwise(anchor["kernel"], model.kernel)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("loaded", [None, "d", "g"])
def test_each_of_two_optimizers_has_an_anchor_of_its_own(loaded, together):
    """Networks of one architecture, as in a GAN, in one step or in a step each."""
    pairs = {k: (x, TX.init(x)) for k, x in zip("dg", MODELS, strict=True)}
    if loaded:
        params, state = pairs[loaded]
        pairs[loaded] = {x: y + 1 for x, y in params.items()}, state

    def train(names):
        def step(state, batch):
            new = {k: helpers.train_step(TX)(state[k], state[k][0])[0] for k in names}
            return state | new, batch

        return cd.replicas.step(step, MESH)

    state, steps = cd.replicas.replicate(pairs, MESH), ["dg"] if together else "dg"
    error = pytest.raises(ValueError, match=rf"not those of '{loaded}/1/.*anchor")
    with error if loaded else contextlib.nullcontext():
        for names in steps:
            state, _ = train(names)(state, np.ones(REPLICAS))
