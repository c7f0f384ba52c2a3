"""A step written for a data-parallel `jit` runs as it is, or says what is wrong."""

import contextlib

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd

AXIS, REPLICAS, ROWS = helpers.AXIS, 4, 16
# Sums of rows in another order.
ROUNDING = 1e-6
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype(np.float32)
BATCH = {"x": X, "y": X[:, :1]}


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
        return nn.Dense(1)(nn.relu(x))


MODEL = Network()
VARIABLES = MODEL.init(jax.random.key(0), X)


def local_sgd(axis_name=AXIS):
    return cd.presets.local_sgd(0.02, k=2, axis_name=axis_name)


def start(tx):
    return {**VARIABLES, "opt_state": tx.init(VARIABLES["params"])}


def train_step(tx):
    """As for a data-parallel `jit`; nothing in it knows of replicas."""

    def train(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state["batch_stats"]}
            out, new = MODEL.apply(variables, batch["x"], mutable=["batch_stats"])
            return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]

        differentiate = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, stats), gradients = differentiate(state["params"])
        updates, opt_state = tx.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "opt_state": opt_state, "batch_stats": stats}
        return new, {"loss": loss}

    return train


def on_mesh(tx, steps=2, **options):
    """The state after some steps, and the metrics of the last."""
    mesh = cd.replicas.make_mesh(REPLICAS)
    step = cd.replicas.step(train_step(tx), mesh, **options)
    state = cd.replicas.replicate(start(tx), mesh)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
    return state, metrics


def test_batch_statistics_are_named_or_averaged():
    with pytest.warns(UserWarning, match="differ in 2 arrays: batch_stats/Batch"):
        on_mesh(local_sgd())
    state, _ = on_mesh(local_sgd(), average=("batch_stats/BatchNorm_0",))
    for x in jax.tree.leaves(state["batch_stats"]):
        assert not np.std(x, axis=0).any()


def loop(tx):
    """Three updates in a while loop, in place of one."""

    def update(gradients, state, params):
        def body(carry):
            params, state, count = carry
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, count + 1

        carry = (params, state, 0)
        params, state, _ = lax.while_loop(lambda carry: carry[2] < 3, body, carry)
        return params, state

    return optax.GradientTransformation(tx.init, update)


def on_a_condition(tx):
    """As where a step is skipped on a spike of the replica's own gradients."""

    def update(gradients, state, params):
        return lax.cond(
            optax.tree.norm(gradients) > 1e3,
            lambda: (optax.tree.zeros_like(gradients), state),
            lambda: tx.update(gradients, state, params),
        )

    return optax.GradientTransformation(tx.init, update)


def kept_where_finite(tx):
    """As Flax's examples do with loss scaling: the replica's own gradients decide."""

    def update(gradients, state, params):
        updates, new = tx.update(gradients, state, params)
        finite = jnp.isfinite(optax.tree.norm(gradients))
        return updates, jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, state)

    return optax.GradientTransformation(tx.init, update)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (local_sgd("data"), "axis_name='replica'"),
        (local_sgd(None), "axis_name='replica'"),
        (optax.adamw(1e-3), "no optimizer in it synchronises"),
        (optax.MultiSteps(local_sgd(), 2), r"inside a lax.cond .*optax\.microbatch"),
        (loop(local_sgd()), "inside a lax.cond or while_loop"),
        (on_a_condition(local_sgd()), "inside a lax.cond or while_loop"),
        (kept_where_finite(local_sgd()), "keeps the old optimizer state"),
    ],
    ids=["another axis", "no axis", "adamw", "MultiSteps", "loop", "cond", "where"],
)
def test_what_would_not_train_one_model_is_rejected(tx, message):
    with pytest.raises(ValueError, match=message):
        on_mesh(tx, local=["batch_stats"])


def test_models_under_vmap_are_rejected():
    """Several decisions at once run both branches: each step would send all."""
    tx, models = local_sgd(), 3

    def train(state, gradients):
        params, opt_state = state
        updates, opt_state = jax.vmap(tx.update)(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    params = {"w": jnp.ones((8, 8))}
    state = jax.tree.map(lambda x: jnp.stack([x] * models), (params, tx.init(params)))
    mesh = cd.replicas.make_mesh(models)
    step = cd.replicas.step(train, mesh)
    with pytest.raises(ValueError, match="under vmap, for 3 models"):
        step(cd.replicas.replicate(state, mesh), {"w": np.ones((9, 8, 8), np.float32)})


def test_one_replica_under_vmap_is_an_ensemble():
    """Nothing is sent, and nothing is wrong."""
    tx = cd.presets.local_sgd(0.1, k=2)
    params = jax.tree.map(lambda x: jnp.stack([x] * 2), helpers.make_params())
    state = jax.vmap(tx.init)(params)
    _, state = jax.jit(jax.vmap(tx.update))(params, state, params)
    assert cd.metrics.observe(state).steps.tolist() == [1, 1]


def test_several_steps_in_a_scan():
    tx = local_sgd()

    def train(state, batch):
        def body(state, gradient):
            params, opt_state = state
            updates, opt_state = tx.update(gradient, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), ()

        return lax.scan(body, state, batch)

    mesh = cd.replicas.make_mesh(2)
    params = jnp.ones((8, 8))
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    gradients = np.random.default_rng(0).normal(size=(8, 8, 8)).astype(np.float32)
    _, opt_state = cd.replicas.step(train, mesh)(state, gradients)[0]
    assert opt_state.metrics.steps.tolist() == [4, 4]
    assert opt_state.metrics.syncs.tolist() == [2, 2]


def test_averages_are_taken_at_a_sync_of_any_optimizer():
    """The second of three updates a call, and of the second of two optimizers."""
    often, seldom = local_sgd(), cd.presets.local_sgd(0.1, k=100, axis_name=AXIS)
    w = jnp.ones((8, 8))

    def taken(tx, state, gradient):
        updates, opt_state = tx.update(gradient, state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt_state}

    def train(state, batch):
        for _ in range(3):
            state = state | {"often": taken(often, state["often"], batch)}
        state = state | {"seldom": taken(seldom, state["seldom"], batch)}
        return state | {"mean": batch.mean()}, {}

    state = {
        "seldom": {"w": w, "opt": seldom.init(w)},
        "often": {"w": w, "opt": often.init(w)},
        "mean": 0.0,
    }
    mesh = cd.replicas.make_mesh(2)
    gradients = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    step = cd.replicas.step(train, mesh, average=["mean"])
    after, _ = step(cd.replicas.replicate(state, mesh), gradients)
    assert after["often"]["opt"].metrics.syncs.tolist() == [1, 1]
    assert not after["often"]["opt"].metrics.synced.any()
    np.testing.assert_allclose(after["mean"], [gradients.mean()] * 2, rtol=1e-6)


def test_a_jitted_step_on_one_mesh_and_then_another():
    """A trace of it is kept by JAX; which mesh it runs on is not."""
    tx, w = local_sgd(), jnp.arange(4.0)

    @jax.jit
    def train(state, rows):
        updates, opt_state = tx.update(rows.mean(0), state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt_state}, {}

    rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    expected = np.arange(4) - 0.02 * rows.reshape(2, 4, 4).mean(1)
    for devices in (jax.devices()[:2], jax.devices()[2:4]):
        mesh = cd.replicas.make_mesh(2, devices=devices)
        state = cd.replicas.replicate({"w": w, "opt": tx.init(w)}, mesh)
        state, _ = cd.replicas.step(train, mesh)(state, rows)
        np.testing.assert_allclose(state["w"], expected, atol=ROUNDING)
        assert state["w"].devices() == set(devices)


def test_what_a_step_is_given_and_gives_back():
    """Its number, what all share, and metrics of every replica; traced once."""
    mesh, traces = cd.replicas.make_mesh(REPLICAS), []

    def my_step(state, batch, number, table):
        """Words."""
        traces.append(0)
        metrics = {"sum": batch["x"].sum(), "rows": batch["x"], "number": 1.5}
        shared = number * table["x"][1] + lax.axis_index(AXIS)
        return state, metrics | {"shared": shared}

    step = cd.replicas.step(my_step, mesh)
    assert (step.__name__, step.__doc__) == ("my_step", "Words.")
    # Weakly typed: it would change its type on the first step.
    state = {"weak": jnp.asarray(0.0), "key": jax.random.key(0), "count": 0}
    state = cd.replicas.replicate(state, mesh)
    batch = {"x": jnp.arange(16.0).reshape(8, 2)}
    for number in range(3):
        state, metrics = step(state, batch, number, {"x": jnp.array([0.0, 7.0])})
    assert len(traces) == 1
    assert metrics["sum"].tolist() == [6, 22, 38, 54]
    assert metrics["sum"].sharding.spec == PartitionSpec("replica")
    assert metrics["rows"].shape == (4, 2, 2)
    assert metrics["number"].tolist() == [1.5] * 4
    assert metrics["shared"].tolist() == [14, 15, 16, 17]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": np.ones((8, 2)), "class_weights": np.ones(4)},
            "'x' has 8.*comes after",
        ),
        ({"x": np.ones((8, 2)), "key": jax.random.key(0)}, "'key' has 0"),
        ({"x": np.ones((6, 2))}, "divisible by 4"),
        ({"x": np.ones((8, 2)), "y": np.ones((8,))}, None),
    ],
)
def test_every_leaf_of_a_batch_is_one_of_rows(batch, message):
    mesh = cd.replicas.make_mesh(4)
    step = cd.replicas.step(lambda state, _: (state, {}), mesh)
    state = cd.replicas.replicate(jnp.ones(3), mesh)
    rejected = pytest.raises(ValueError, match=message) if message else None
    with rejected or contextlib.nullcontext():
        step(state, batch)


def test_a_step_may_return_another_structure():
    tx, w, mesh = local_sgd(), jnp.ones((8, 8)), cd.replicas.make_mesh(2)

    def train(state, batch):
        updates, opt_state = tx.update(batch, state["opt"], state["w"])
        w = optax.apply_updates(state["w"], updates)
        return {"a": 1.0, "w": w, "opt": opt_state}, {}

    state = cd.replicas.replicate({"w": w, "opt": tx.init(w), "gone": 1.0}, mesh)
    state, _ = cd.replicas.step(train, mesh)(state, np.ones((16, 8), np.float32))
    assert state.keys() == {"a", "w", "opt"}


def test_compiling_is_logged_once_for_each_program(caplog):
    tx, mesh, w = local_sgd(), cd.replicas.make_mesh(2), jnp.ones(3)
    state = cd.replicas.replicate((w, tx.init(w)), mesh)
    step = helpers.replica_step(tx, mesh)
    with caplog.at_level("INFO", logger="curvadion_jax"):
        for _ in range(5):
            state, _ = step(state, np.ones((2, 3), np.float32))
    started = [r.message for r in caplog.records if r.message.startswith("compiling")]
    assert started == [
        f"compiling local ({kind} step) for {{'replica': 2}}"
        for kind in ("local", "sync")
    ]


def add(state, batch, more=0.0):
    """Parameters that move, and others that do not."""
    return {"w": state["w"] + batch.mean() + jnp.sum(more), "old": state["old"]}, {}


def test_an_array_that_is_given_twice_is_copied():
    """As a target network is set, or an average begun anew; XLA would end here."""
    mesh = cd.replicas.make_mesh(2)
    state = cd.replicas.replicate({"w": jnp.ones(4), "old": jnp.zeros(4)}, mesh)
    step = cd.replicas.step(add, mesh, local=["w"])
    state, _ = step(state, np.ones(2))
    state["old"] = state["w"]
    state, _ = step(state, np.ones(2), state["w"])
    assert state["w"].tolist() == [[19.0] * 4] * 2
    assert state["old"].tolist() == [[2.0] * 4] * 2


@pytest.mark.parametrize("calls", [0, 1])
def test_a_state_without_replica_axis_is_named(calls):
    mesh, state = cd.replicas.make_mesh(2), {"w": jnp.ones([]), "old": jnp.zeros([])}
    step = cd.replicas.step(add, mesh, local=["w"])
    stacked = cd.replicas.replicate(state, mesh)
    for _ in range(calls):
        stacked, _ = step(stacked, np.ones(2))
        state = jax.tree.map(lambda x: x[0], stacked)
    with pytest.raises(ValueError, match=r"'old' has .*needs a leading axis of 2 repl"):
        step(state, np.ones(2))


def test_a_step_of_parameters_and_optimizer_state_is_rejected():
    tx, mesh = local_sgd(), cd.replicas.make_mesh(2)
    pair = cd.replicas.replicate((jnp.ones(3), tx.init(jnp.ones(3))), mesh)
    with pytest.raises(ValueError, match="The batch holds an optimizer state"):
        cd.replicas.step(lambda params, opt_state, batch: pair, mesh)(*pair, np.ones(2))


def test_callbacks_are_named_as_what_replicas_wait_for():
    def train(state, batch):
        jax.debug.callback(lambda x: None, batch.mean())
        return state, {}

    mesh = cd.replicas.make_mesh(2)
    with pytest.warns(UserWarning, match="in place of jax.debug return metrics"):
        cd.replicas.step(train, mesh)(cd.replicas.replicate(0.0, mesh), np.ones(2))


def test_micro_batches_are_the_whole_batch():
    def loss_of(w, x):
        return jnp.mean((x @ w) ** 2)

    whole = jax.value_and_grad(loss_of)
    mean = optax.microbatching.AccumulationType.MEAN
    parts = optax.microbatch(whole, 1, microbatch_size=2, accumulator=mean)
    step = cd.replicas.step(lambda w, x: (w, parts(w, x)), cd.replicas.make_mesh(2))
    w = jnp.ones((6, 2))
    _, found = step(cd.replicas.replicate(w, cd.replicas.make_mesh(2)), X)
    expected = jax.tree.map(
        lambda *x: np.stack(x), *[whole(w, x) for x in (X[:8], X[8:])]
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_a_state_that_was_resharded_stays_as_it_is_given():
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    tx = local_sgd()

    def train(state, batch):
        params, opt_state = state
        gradients = jax.tree.map(lambda x: x * batch["x"].mean(), params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    step, batch = cd.replicas.step(train, mesh), {"x": jnp.ones((4, 1))}
    params = {"kernel": jnp.ones((4, 6))}
    state, _ = step(cd.replicas.replicate((params, tx.init(params)), mesh), batch)
    place = NamedSharding(mesh, PartitionSpec("replica", "fsdp"))
    params = {"kernel": jax.device_put(state[0]["kernel"], place)}
    (params, _), _ = step((params, state[1]), batch)
    assert params["kernel"].sharding.is_equivalent_to(place, 3)
