"""A step written for a data-parallel `jit` runs as it is, or says what is wrong."""

import warnings

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


def local_muon():
    return cd.local_muon(0.02, trigger=cd.triggers.every_k(2), axis_name=AXIS)


def start(tx):
    params = VARIABLES["params"]
    return {"params": params, "opt_state": tx.init(params)} | {
        "batch_stats": VARIABLES["batch_stats"]
    }


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
    with pytest.warns(UserWarning, match=r"in 2 arrays: batch_stats/BatchNorm_0/"):
        drifted, losses = on_mesh(local_muon())
    state, again = on_mesh(local_muon(), average=("batch_stats",))
    np.testing.assert_array_equal(losses, again)  # in training it does not matter
    assert drifted["opt_state"].metrics.syncs.tolist() == [2] * REPLICAS
    assert state["opt_state"].metrics.synced.all()
    for name in ("mean", "var"):
        own = drifted["batch_stats"]["BatchNorm_0"][name]
        mean = state["batch_stats"]["BatchNorm_0"][name]
        assert np.std(own, axis=0).max() > 1e-3
        for replica in range(REPLICAS):
            np.testing.assert_array_equal(mean[replica], mean[0])
    # Two syncs of a mean and a variance of eight.
    more = cd.metrics.read(state["opt_state"], replicas=REPLICAS)["bytes"]
    less = cd.metrics.read(drifted["opt_state"], replicas=REPLICAS)["bytes"]
    assert more - less == 2 * 2 * 8 * 4 * 2 * (REPLICAS - 1) / REPLICAS


def test_averages_of_halves_are_counted_as_they_are_sent():
    """In float32, whatever the array is kept in."""
    tx, mesh = local_muon(), cd.replicas.make_mesh(REPLICAS)

    def train(state, batch):
        kept = {name: state[name] for name in ("batch_stats", "half")}
        new, metrics = train_step(tx)(state, batch)
        return new | kept, metrics

    sent = []
    for average in ((), ("half",)):
        state = start(tx) | {"half": jnp.ones(100, jnp.bfloat16)}
        state = cd.replicas.replicate(state, mesh)
        step = cd.replicas.step(train, mesh, average=average)
        for _ in range(2):
            state, _ = step(state, BATCH)
        assert state["half"].dtype == jnp.bfloat16
        sent.append(cd.metrics.read(state["opt_state"], replicas=REPLICAS)["bytes"])
    assert sent[1] - sent[0] == 2 * (REPLICAS - 1) / REPLICAS * 4 * 100


def test_statistics_that_are_not_finite_spoil_no_others():
    tx, mesh = local_muon(), cd.replicas.make_mesh(REPLICAS)
    step = cd.replicas.step(train_step(tx), mesh, average=["batch_stats"])
    state = cd.replicas.replicate(start(tx), mesh)
    stats = state["batch_stats"]["BatchNorm_0"]
    stats["mean"] = stats["mean"].at[1].set(jnp.nan)
    alone = cd.replicas.step(train_step(tx), mesh, donate=False)
    with pytest.warns(UserWarning, match="replicas still differ in 2 arrays"):
        own, _ = alone(alone(state, BATCH)[0], BATCH)
    for _ in range(2):
        state, _ = step(state, BATCH)
    own, found = (x["batch_stats"]["BatchNorm_0"]["mean"] for x in (own, state))
    expected = np.broadcast_to(np.delete(own, 1, axis=0).mean(0), found.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_names_of_what_is_averaged():
    with pytest.raises(ValueError, match="statistics"):
        on_mesh(local_muon(), average=("statistics",))


@pytest.mark.parametrize("average", [(), ("batch_stats",)])
def test_a_step_without_an_optimizer_that_synchronises_is_rejected(average):
    with pytest.raises(ValueError, match=r"no optimizer (in it|that) synchronises"):
        on_mesh(optax.sgd(0.1), average=average)


def test_what_another_optimizer_of_a_partition_has_is_named():
    def label(path, _):
        return "muon" if "Dense_0" in jax.tree_util.keystr(path) else "adamw"

    parts = {"muon": local_muon(), "adamw": optax.adamw(1e-3)}
    labels = jax.tree.map_with_path(label, VARIABLES["params"])
    tx = optax.partition(parts, labels)
    # Four parameters, and their moments.
    with pytest.warns(UserWarning, match="still differ in 12 arrays: ") as found:
        state, _ = on_mesh(tx, average=("batch_stats",))
    assert len(found) == 1
    moved = {k: np.std(v["kernel"], axis=0).max() for k, v in params_of(state)}
    assert moved["Dense_0"] <= ROUNDING < moved["Dense_1"]


def params_of(state):
    return [(k, v) for k, v in state["params"].items() if "kernel" in v]


@pytest.mark.parametrize("axis_name", [None, "data"])
def test_another_axis_is_rejected(axis_name):
    tx = cd.local_muon(0.1, axis_name=axis_name)
    with pytest.raises(ValueError, match="with axis_name='replica'"):
        on_mesh(tx)


def test_multi_steps_is_rejected():
    tx = optax.MultiSteps(local_muon(), 2)
    with pytest.raises(ValueError, match=r"by optax\.microbatch"):
        on_mesh(tx)


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
        for name, value in params_of(state):
            np.testing.assert_allclose(
                value["kernel"], expected["params"][name]["kernel"], atol=ROUNDING
            )
        assert state["params"]["Dense_0"]["kernel"].devices() == set(devices)


def test_a_replica_has_a_number():
    def train(state, batch):
        del batch
        return state, {"number": lax.axis_index(AXIS)}

    mesh = cd.replicas.make_mesh(REPLICAS)
    step = cd.replicas.step(train, mesh)
    _, metrics = step(cd.replicas.replicate(0.0, mesh), X)
    assert metrics["number"].tolist() == [0, 1, 2, 3]


def test_a_step_may_return_another_structure():
    tx, mesh = local_muon(), cd.replicas.make_mesh(2)

    def train(state, batch):
        new, metrics = train_step(tx)({k: state[k] for k in start(tx)}, batch)
        return new | {"a": 1.0}, metrics

    state = cd.replicas.replicate(start(tx) | {"gone": 1.0}, mesh)
    state, _ = cd.replicas.step(train, mesh)(state, BATCH)
    assert state["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X, "y": X[:8]}, r"x'\] has 16 rows, and the batch\['y'\] 8"),
        ({"x": X, "y": X[:15]}, r"y'\] of shape \(15, 6\) cannot be divided over 2"),
        ({"x": X, "y": 1.0}, r"y'\] of shape \(\) cannot be divided over 2"),
    ],
)
def test_a_batch_has_one_number_of_rows(batch, message):
    mesh = cd.replicas.make_mesh(2)
    step = cd.replicas.step(lambda state, batch: (state, batch), mesh)
    with pytest.raises(ValueError, match=message):
        step(cd.replicas.replicate(0.0, mesh), batch)


def test_averages_are_taken_at_a_sync_of_any_optimizer():
    """The second of three updates a call, and of one of two optimizers."""
    often, seldom = local_muon(), cd.local_muon(0.1, budget=0.001, axis_name=AXIS)
    w, mesh = jnp.ones((8, 8)), cd.replicas.make_mesh(2)

    def taken(tx, state, gradient):
        updates, opt = tx.update(gradient, state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}

    def train(state, batch):
        for _ in range(3):  # syncs on the second
            state = state | {"often": taken(often, state["often"], batch)}
        state = state | {"seldom": taken(seldom, state["seldom"], batch)}
        return state | {"mean": batch.mean()}, {}

    state = {
        "seldom": {"w": w, "opt": seldom.init(w)},
        "often": {"w": w, "opt": often.init(w)},
        "mean": 0.0,
    }
    step = cd.replicas.step(train, mesh, average=["mean"])
    rows = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    after, _ = step(cd.replicas.replicate(state, mesh), rows)
    assert after["often"]["opt"].metrics.syncs.tolist() == [1, 1]
    assert not after["often"]["opt"].metrics.synced.any()
    assert after["mean"][0] == after["mean"][1]


def test_compiling_is_logged_once_for_each_program(caplog):
    mesh = cd.replicas.make_mesh(2, devices=jax.devices()[:2])
    state = cd.replicas.replicate(start(local_muon()), mesh)
    step = cd.replicas.step(train_step(local_muon()), mesh, average=["batch_stats"])
    with caplog.at_level("INFO", logger="curvadion_jax"):
        for _ in range(4):
            state, _ = step(state, BATCH)
    said = [record.message for record in caplog.records]
    assert [x[: x.index(")") + 1] for x in said] == [
        f"{word} train ({kind} step)"
        for kind in ("local", "sync")
        for word in ("compiling", "compiled")
    ]


@pytest.mark.parametrize("constrained", [False, True])
def test_messages_that_the_compiler_adds(constrained):
    """Labels looked up in logits that are divided by rows and by words at once."""
    mesh = cd.replicas.make_mesh(4, {"fsdp": 2})
    tx = local_muon()

    def train(state, batch):
        params, opt_state = state

        def loss_fn(params):
            logits = params["embed"][batch] @ params["head"]
            if constrained:
                by_rows = NamedSharding(mesh, PartitionSpec("fsdp"))
                logits = lax.with_sharding_constraint(logits, by_rows)
            cross_entropy = optax.softmax_cross_entropy_with_integer_labels
            return cross_entropy(logits, batch).mean()

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    def place(x):
        spec = PartitionSpec(AXIS, None, "fsdp") if x.ndim == 3 else PartitionSpec(AXIS)
        return jax.device_put(x, NamedSharding(mesh, spec))

    params = {"embed": jnp.eye(64, 32), "head": jnp.eye(32, 64)}
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    rows = NamedSharding(mesh, PartitionSpec((AXIS, "fsdp")))
    tokens = jax.device_put(np.arange(512).reshape(32, 16) % 64, rows)
    step = cd.replicas.step(train, mesh)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step(jax.tree.map(place, state), tokens)
    said = [str(warning.message) for warning in found]
    assert len(said) == (0 if constrained else 1)
    assert all("take_along_axis" in message for message in said)
