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


def local_muon(axis_name=AXIS):
    return cd.local_muon(0.02, trigger=cd.triggers.every_k(2), axis_name=axis_name)


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


def on_mesh(tx, steps=4, **options):
    """The state after some steps, and the losses [steps, replicas]."""
    mesh, losses = cd.replicas.make_mesh(REPLICAS), []
    step = cd.replicas.step(train_step(tx), mesh, **options)
    state = cd.replicas.replicate(start(tx), mesh)
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(metrics["loss"])
    return state, np.array(losses)


def test_batch_statistics_are_named_or_averaged():
    with pytest.warns(UserWarning, match="differ in 2 arrays: batch_stats/Batch"):
        apart, losses = on_mesh(local_muon())
    state, again = on_mesh(local_muon(), average=("batch_stats",))
    np.testing.assert_array_equal(losses, again)  # in training it does not matter
    for name in ("mean", "var"):
        assert np.std(apart["batch_stats"]["BatchNorm_0"][name], axis=0).max() > 1e-3
        assert not np.std(state["batch_stats"]["BatchNorm_0"][name], axis=0).any()


def test_a_part_under_another_optimizer_is_named():
    def label(path, _):
        return "muon" if "Dense_0" in jax.tree_util.keystr(path) else "adamw"

    labels = jax.tree.map_with_path(label, VARIABLES["params"])
    parts = {"muon": local_muon(), "adamw": optax.adamw(1e-3)}
    with pytest.warns(UserWarning, match="differ in 12 arrays: .*adamw"):
        state, _ = on_mesh(optax.partition(parts, labels), average=["batch_stats"])
    moved = {k: np.std(state["params"][k]["kernel"], axis=0).max() for k in DENSE}
    assert moved["Dense_0"] < ROUNDING < moved["Dense_1"]


DENSE = ("Dense_0", "Dense_1")


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
        (local_muon("data"), "axis_name='replica'"),
        (local_muon(None), "axis_name='replica'"),
        (optax.adamw(1e-3), "no optimizer in it synchronises"),
        (optax.MultiSteps(local_muon(), 2), r"inside a lax.cond .*optax\.microbatch"),
        (loop(local_muon()), "inside a lax.cond or while_loop"),
        (on_a_condition(local_muon()), "inside a lax.cond or while_loop"),
        (kept_where_finite(local_muon()), "keeps the old optimizer state"),
    ],
    ids=["another axis", "no axis", "adamw", "MultiSteps", "loop", "cond", "where"],
)
def test_what_would_not_train_one_model_is_rejected(tx, message):
    with pytest.raises(ValueError, match=message):
        on_mesh(tx, local=["batch_stats"])


def test_models_under_vmap_are_rejected():
    """Several decisions at once run both branches: each step would send all."""
    tx, models = local_muon(), 3

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
    tx = cd.local_muon(0.1, budget=0.5)
    params = jax.tree.map(lambda x: jnp.stack([x] * 2), helpers.make_params())
    state = jax.vmap(tx.init)(params)
    _, state = jax.jit(jax.vmap(tx.update))(params, state, params)
    assert cd.metrics.observe(state).steps.tolist() == [1, 1]


def test_several_steps_in_a_scan():
    tx = local_muon()

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
    often, seldom = local_muon(), cd.local_muon(0.1, budget=0.001, axis_name=AXIS)
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
    tx = local_muon()
    train = jax.jit(train_step(tx))
    with jax.default_device(jax.devices()[0]):
        simulated = jax.vmap(train, axis_name=AXIS)
        stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * 2), tree)  # noqa: E731
        rows = jax.tree.map(lambda x: x[:8].reshape(2, 4, -1), BATCH)
        expected, _ = simulated(stack(start(tx)), rows)
    half = jax.tree.map(lambda x: x[:8], BATCH)
    for devices in (jax.devices()[:2], jax.devices()[2:4]):
        mesh = cd.replicas.make_mesh(2, devices=devices)
        step = cd.replicas.step(train, mesh, average=["batch_stats"])
        state, _ = step(cd.replicas.replicate(start(tx), mesh), half)
        for name in DENSE:
            np.testing.assert_allclose(
                *(x["params"][name]["kernel"] for x in (state, expected)), atol=ROUNDING
            )
        assert state["params"]["Dense_0"]["kernel"].devices() == set(devices)


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
    tx, w, mesh = local_muon(), jnp.ones((8, 8)), cd.replicas.make_mesh(2)

    def train(state, batch):
        updates, opt_state = tx.update(batch, state["opt"], state["w"])
        w = optax.apply_updates(state["w"], updates)
        return {"a": 1.0, "w": w, "opt": opt_state}, {}

    state = cd.replicas.replicate({"w": w, "opt": tx.init(w), "gone": 1.0}, mesh)
    state, _ = cd.replicas.step(train, mesh)(state, np.ones((16, 8), np.float32))
    assert state.keys() == {"a", "w", "opt"}


def test_compiling_is_logged_once_for_each_program(caplog):
    tx, mesh = local_muon(), cd.replicas.make_mesh(2, devices=jax.devices()[:2])
    state = helpers.start(tx, helpers.make_params(), mesh)
    step = helpers.replica_step(tx, mesh)
    with caplog.at_level("INFO", logger="curvadion_jax"):
        for gradients in helpers.make_gradients(5, 2):
            state, _ = step(state, gradients)
    started = [r.message for r in caplog.records if r.message.startswith("compiling")]
    assert started == [
        f"compiling local ({kind} step) for {{'replica': 2}}"
        for kind in ("local", "sync")
    ]


def test_a_state_that_was_resharded_stays_as_it_is_given():
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    tx = cd.local_muon(0.1, trigger=cd.triggers.every_k(3), axis_name="replica")

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
