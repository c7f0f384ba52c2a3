"""A step written for a data-parallel `jit` runs as it is, or says what is wrong."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd

AXIS, REPLICAS = helpers.AXIS, 2
MESH = cd.replicas.make_mesh(REPLICAS, devices=jax.devices()[:REPLICAS])
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 6)).astype(np.float32)
W = jnp.ones((6, 4))

pytestmark = pytest.mark.slow  # many programs


def local_sgd(axis_name=AXIS, k=2):
    return cd.presets.local_sgd(0.02, k=k, axis_name=axis_name)


def loss_of(w, x):
    return jnp.mean((x @ w) ** 2)


def train_step(tx):
    """As for a data-parallel `jit`; nothing in it knows of replicas."""

    def train(state, x):
        loss, gradient = jax.value_and_grad(loss_of)(state["w"], x)
        updates, opt_state = tx.update(gradient, state["opt"], state["w"])
        w = optax.apply_updates(state["w"], updates)
        mean = 0.9 * state["mean"] + 0.1 * x.mean()
        return {"w": w, "opt": opt_state, "mean": mean}, {"loss": loss}

    return train


def start(tx, mesh=MESH):
    return cd.replicas.replicate({"w": W, "opt": tx.init(W), "mean": 0.0}, mesh)


def on_mesh(tx, steps=2, **options):
    """The state after some steps."""
    step, state = cd.replicas.step(train_step(tx), MESH, **options), start(tx)
    for _ in range(steps):
        state, _ = step(state, X)
    return state


def test_statistics_are_named_or_averaged():
    with pytest.warns(UserWarning, match="differ in 1 arrays: mean"):
        on_mesh(local_sgd())
    assert not np.std(on_mesh(local_sgd(), average=("mean",))["mean"])


def loop(tx):
    """Three updates in a while loop, in place of one."""

    def update(updates, state, params=None):
        def body(carry):
            count, _, state = carry
            return count + 1, *tx.update(updates, state, params)

        carry = lax.while_loop(lambda carry: carry[0] < 3, body, (0, updates, state))
        return carry[1:]

    return optax.GradientTransformation(tx.init, update)


def on_a_condition(tx):
    """As where a step is skipped on a spike of the replica's own gradients."""

    def update(updates, state, params=None):
        return lax.cond(
            optax.tree.norm(updates) > 1e3,
            lambda: (optax.tree.zeros_like(updates), state),
            lambda: tx.update(updates, state, params),
        )

    return optax.GradientTransformation(tx.init, update)


def kept_where_finite(tx, choose=jnp.where):
    """As Flax's examples do with loss scaling: the replica's own gradients decide."""

    def update(updates, state, params=None):
        finite = jnp.isfinite(optax.tree.norm(updates))
        updates, new = tx.update(updates, state, params)
        keep = lambda x, y: choose(finite, x, y) if x.dtype == "float32" else x
        return updates, jax.tree.map(keep, new, state)

    return optax.GradientTransformation(tx.init, update)


def by_a_factor(finite, new, old):
    return finite * new + (1 - finite) * old


def dropped_state(tx):
    def update(updates, state, params=None):
        return tx.update(updates, state, params)[0], state

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
        (kept_where_finite(local_sgd()), "keeps the old 'opt/sync_state/anchor'"),
        (kept_where_finite(local_sgd(), by_a_factor), "keeps the old 'opt/sync_state"),
        (dropped_state(local_sgd()), "synchronises.* and keep its state"),
    ],
    ids="axis no-axis adamw MultiSteps loop cond where factor dropped".split(),
)
def test_what_would_not_train_one_model_is_rejected(tx, message):
    with pytest.raises(ValueError, match=message):
        on_mesh(tx)


@pytest.mark.parametrize("wrap", [lambda train: train, jax.jit], ids=["", "jit"])
def test_parameters_that_would_miss_a_sync_are_refused(wrap):
    """As in Flax's loss scaling; the replica's drift would be sent twice."""
    update = train_step(local_sgd())

    def train(state, x):
        new, metrics = update(state, x)
        keep = lambda name: jnp.where(metrics["loss"] > 0, new[name], state[name])
        return new | {"mean": keep("mean"), "w": keep("w")}, metrics

    with pytest.raises(ValueError, match="keeps the old 'w' on a condition"):
        cd.replicas.step(wrap(train), MESH)(start(local_sgd()), X)


def test_parameters_and_anchor_may_be_moved_alike():
    """A sum is a choice only of products with factors of 0 and 1."""

    def shifted(tx):
        def update(updates, state, params=None):
            updates, state = tx.update(updates, state, params)
            both = state.sync_state.anchor, updates
            anchor, updates = jax.tree.map(lambda x: x + 0.5, both)
            sync_state = state.sync_state._replace(anchor=anchor)
            return updates, state._replace(sync_state=sync_state)

        return optax.GradientTransformation(tx.init, update)

    assert on_mesh(shifted(local_sgd()), average=("mean",))


def test_a_mean_of_gradients_is_no_choice():
    tx = local_sgd()

    def update(updates, state, params=None):
        mean = 0.9 * state[0] + 0.1 * updates
        updates, inner = tx.update(mean, state[1], params)
        return updates, (mean, inner)

    smoothed = optax.GradientTransformation(lambda w: (0 * w, tx.init(w)), update)
    assert on_mesh(smoothed, average=("mean",), local=("opt/0",))


def test_models_under_vmap_are_rejected():
    """Several decisions at once run both branches: each step would send all."""
    tx, models = local_sgd(), 3

    def train(state, gradients):
        params, opt_state = state
        updates, opt_state = jax.vmap(tx.update)(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    state = jax.tree.map(lambda x: jnp.stack([x] * models), (W, tx.init(W)))
    step = cd.replicas.step(train, MESH)
    with pytest.raises(ValueError, match="under vmap, for 3 models"):
        step(cd.replicas.replicate(state, MESH), np.ones((6, 6, 4), np.float32))
    # Of one replica they are an ensemble.
    tx = local_sgd(None)
    params, state = state[0], jax.vmap(tx.init)(state[0])
    _, state = jax.jit(jax.vmap(tx.update))(params, state, params)
    assert cd.metrics.observe(state).steps.tolist() == [1, 1, 1]


def test_several_steps_in_a_scan():
    tx = local_sgd()
    train = lambda state, batch: lax.scan(train_step(tx), state, batch.reshape(4, 2, 6))
    state, metrics = cd.replicas.step(train, MESH, average=["mean"])(start(tx), X)
    assert state["opt"].metrics.steps.tolist() == [4, 4]
    assert state["opt"].metrics.syncs.tolist() == [2, 2]
    assert metrics["loss"].shape == (REPLICAS, 4)


def test_a_step_may_update_by_what_its_batch_is():
    """Such as evaluate on a batch of another shape, or take several at once."""
    tx = local_sgd()

    def train(state, batches):
        for x in batches:
            state = train_step(tx)(state, x)[0]
        return state, {}

    step, state = cd.replicas.step(train, MESH, average=["mean"]), start(tx)
    for number in (1, 0, 1, 0, 1, 2, 1):
        state, _ = step(state, [X] * number)
    assert state["opt"].metrics.syncs.tolist() == [3, 3]
    assert not np.ptp(state["w"], axis=0).any()


@pytest.mark.parametrize("other", [X[:4], X.astype(int)], ids=["shape", "dtype"])
def test_an_update_that_is_only_looked_at_is_no_step(other):
    train = train_step(local_sgd())

    def look(state, x):
        new, metrics = train(state, x)
        trains = x.shape == (8, 6) and x.dtype == "float32"
        return (new if trains else state), metrics

    look = jax.jit(look) if other.dtype == int else look
    step, state = cd.replicas.step(look, MESH, local=["mean"]), start(local_sgd())
    for x in (X, other, X):
        state, _ = step(state, x)
    assert state["opt"].metrics.syncs.tolist() == [1, 1]
    assert not np.ptp(state["w"], axis=0).any()


def test_labels_may_come_from_the_host_or_lie_on_the_device():
    """There int64 is int32, for which JAX keeps the trace of a step."""
    tx, rows = local_sgd(), np.zeros((4, 6), np.int64)
    update = train_step(tx)
    train = lambda state, x: (state, {}) if x.dtype == "int32" else update(state, x)
    step, state = cd.replicas.step(train, MESH, average=["mean"]), start(tx)
    for x in (X, rows, X[:8], X, jnp.asarray(rows), X, jnp.asarray(rows), X):
        state, _ = step(state, x)
    assert state["opt"].metrics.syncs.tolist() == [2, 2]


def test_a_larger_model_spends_a_budget_of_its_own():
    """A sync of few elements costs more than their gradients: blocks are padded."""
    reconcile = cd.synchronizers.reconcile(compressor=cd.compressors.quantize(2))
    evenly = cd.triggers.evenly(0.1)
    tx = cd.adaptive_sync(optax.sgd(0.1), evenly, reconcile, AXIS)

    def train(w, opt):
        updates, opt = tx.update(w, opt, w)
        return optax.apply_updates(w, updates), opt

    step = cd.replicas.step(lambda state, _: (train(*state), {}), MESH)
    for size, syncs in ((2, 0), (512, 2)):
        w = jnp.ones(size)
        state = cd.replicas.replicate((w, tx.init(w)), MESH)
        for _ in range(2):
            state, _ = step(state, None)
        assert state[1].metrics.syncs.tolist() == [syncs] * 2


def test_averages_are_taken_at_a_sync_of_any_optimizer():
    """The second of three updates a call, and of the second of two optimizers."""
    often, seldom = local_sgd(), local_sgd(k=100)

    def train(state, x):
        for _ in range(3):
            state |= {"often": train_step(often)(state["often"], x)[0]}
        state |= {"seldom": train_step(seldom)(state["seldom"], x)[0]}
        return state | {"rows": x.mean()}, {}

    state = {"often": start(often), "seldom": start(seldom), "rows": jnp.zeros(2)}
    step = cd.replicas.step(train, MESH, average=["rows"])
    after, _ = step(state, X)
    counters = after["often"]["opt"].metrics
    assert counters.syncs.tolist() == [1, 1]
    assert not counters.synced.any()
    np.testing.assert_allclose(after["rows"], [X.mean()] * 2, rtol=1e-5)


def test_a_jitted_step_on_one_mesh_and_then_another():
    """A trace of it is kept by JAX; which mesh it runs on is not."""
    tx, rows = local_sgd(), X.reshape(REPLICAS, 8, 6)
    train = jax.jit(train_step(tx))
    expected = np.stack([W - 0.02 * jax.grad(loss_of)(W, x) for x in rows])
    for devices in (jax.devices()[:2], jax.devices()[2:4]):
        mesh = cd.replicas.make_mesh(2, devices=devices)
        state, _ = cd.replicas.step(train, mesh)(start(tx, mesh), X)
        np.testing.assert_allclose(state["w"], expected, rtol=1e-6)
        assert state["w"].devices() == set(devices)


def test_what_a_step_is_given_and_gives_back():
    """Its number, what all share, and metrics of every replica; traced once."""
    traces = []

    def my_step(state, batch, number, table):
        """Words."""
        traces.append(0)
        metrics = {"sum": batch["x"].sum(), "rows": batch["x"], "number": 1.5}
        shared = number * table["x"][1] + lax.axis_index(AXIS)
        return state, metrics | {"shared": shared}

    step = cd.replicas.step(my_step, MESH)
    assert (step.__name__, step.__doc__) == ("my_step", "Words.")
    # Weakly typed: it would change its type on the first step.
    state = {"weak": jnp.asarray(0.0), "key": jax.random.key(0), "count": 0}
    state = cd.replicas.replicate(state, MESH)
    batch = {"x": jnp.arange(8.0).reshape(4, 2)}
    for number in range(3):
        state, metrics = step(state, batch, number, {"x": jnp.array([0.0, 7.0])})
    assert len(traces) == 1
    assert metrics["sum"].tolist() == [6, 22]
    assert metrics["sum"].sharding.spec == PartitionSpec(AXIS)
    assert metrics["rows"].shape == (2, 2, 2)
    assert metrics["number"].tolist() == [1.5] * 2
    assert metrics["shared"].tolist() == [14, 15]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X, "class_weights": np.ones(4)}, "'x' has 16.*comes after"),
        ({"x": X, "key": jax.random.key(0)}, "'key' has 0"),
        ({"x": X[:5]}, "divisible by 2"),
    ],
    ids=["a table", "a key", "odd"],
)
def test_a_batch_is_of_rows(batch, message):
    step = cd.replicas.step(lambda state, _: (state, {}), MESH)
    with pytest.raises(ValueError, match=message):
        step(cd.replicas.replicate(jnp.ones(3), MESH), batch)


def test_a_step_may_return_another_structure():
    tx = local_sgd()
    train = lambda state, x: (({"a": 1.0} | train_step(tx)(state, x)[0]), {})
    state, _ = cd.replicas.step(train, MESH)(start(tx) | {"gone": jnp.ones(2)}, X)
    assert state.keys() == {"a", "w", "opt", "mean"}


def test_each_program_is_compiled_once(caplog):
    with jax.log_compiles():
        on_mesh(local_sgd(), steps=5, average=["mean"])
    finished = "Finished XLA compilation of jit(train)"
    assert sum(finished in x.getMessage() for x in caplog.records) == 2  # local, sync


def add(state, batch, more=0.0):
    """Parameters that move, and others that do not."""
    return {"w": state["w"] + batch.mean() + jnp.sum(more), "old": state["old"]}, {}


def test_an_array_that_is_given_twice_is_copied():
    """As a target network is set, or an average begun anew; XLA would end here."""
    state = cd.replicas.replicate({"w": jnp.ones(4), "old": jnp.zeros(4)}, MESH)
    step = cd.replicas.step(add, MESH, local=["w"])
    state, _ = step(state, np.ones(2))
    state["old"] = state["w"]
    with pytest.warns(UserWarning, match="XLA added"):  # the sum over all replicas
        state, _ = step(state, np.ones(2), state["w"])
    assert state["w"].tolist() == [[19.0] * 4] * 2
    assert state["old"].tolist() == [[2.0] * 4] * 2


def test_a_local_name_of_nothing_is_refused():
    state = cd.replicas.replicate({"w": jnp.ones(4), "old": jnp.zeros(4)}, MESH)
    step = cd.replicas.step(add, MESH, local=["w", "ema"])
    with pytest.raises(ValueError, match="local names 'ema', and no such array"):
        step(state, np.ones(2))


def test_a_state_without_replica_axis_is_named():
    state = {"w": jnp.ones([]), "old": jnp.zeros([])}
    step = cd.replicas.step(add, MESH, local=["w"])
    after, _ = step(cd.replicas.replicate(state, MESH), np.ones(2))
    for wrong in (state, jax.tree.map(lambda x: x[0], after)):
        with pytest.raises(ValueError, match=r"'old' has .* axis of 2 replicas\. Give"):
            step(wrong, np.ones(2))


def test_callbacks_are_named_as_what_replicas_wait_for():
    def train(state, batch):
        jax.debug.callback(lambda x: None, batch.mean())
        return state, {}

    with pytest.warns(UserWarning, match="in place of jax.debug return metrics"):
        cd.replicas.step(train, MESH)(cd.replicas.replicate(0.0, MESH), np.ones(2))


def test_micro_batches_are_the_whole_batch():
    whole = jax.value_and_grad(loss_of)
    mean = optax.microbatching.AccumulationType.MEAN
    parts = optax.microbatch(whole, 1, microbatch_size=2, accumulator=mean)
    step = cd.replicas.step(lambda w, x: (w, parts(w, x)), MESH)
    _, (loss, gradient) = step(cd.replicas.replicate(W, MESH), X)
    for replica, x in enumerate((X[:8], X[8:])):
        expected = whole(W, x)
        np.testing.assert_allclose(loss[replica], expected[0], rtol=1e-5)
        np.testing.assert_allclose(gradient[replica], expected[1], rtol=1e-5)


def test_a_state_that_was_resharded_stays_as_it_is_given():
    mesh, tx = cd.replicas.make_mesh(2, {"fsdp": 2}), local_sgd()
    step = cd.replicas.step(train_step(tx), mesh, average=["mean"])
    state, _ = step(start(tx, mesh), X)
    place = NamedSharding(mesh, PartitionSpec(AXIS, "fsdp"))
    state["w"] = jax.device_put(state["w"], place)
    state, _ = step(state, X)
    assert state["w"].sharding.is_equivalent_to(place, 3)
