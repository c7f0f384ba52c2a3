"""Training loops of Flax, linen's TrainState and nnx's Optimizer, on replicas."""

import dataclasses
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import synchronizers, triggers

REPLICAS, STEPS, VOCABULARY, WIDTH = 4, 6, 9, 8


def optimizer(mesh, partition=None) -> Any:
    return helpers.averaging_dion(
        0.05,
        mesh=mesh,
        trigger=triggers.every_k(3),
        dimension_numbers=partition,
    )


def sgd(mesh, k=3) -> Any:
    synchronizer = synchronizers.reconcile()
    return cd.adaptive_sync(optax.sgd(0.1), triggers.every_k(k), synchronizer, mesh)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        x = x + linen.Dense(WIDTH, name="mlp")(linen.relu(x))
        return linen.Dense(VOCABULARY, name="lm_head")(linen.LayerNorm(name="norm")(x))


class NNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.lm_head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.mlp(nnx.relu(x))
        return self.lm_head(self.norm(x))


def tokens():
    """Every token is followed by the next one; the replicas start elsewhere."""
    start = np.arange(2 * REPLICAS)[:, None] % VOCABULARY
    return jnp.asarray((start + np.arange(7)) % VOCABULARY)


def cross_entropy(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    return losses.mean()


def with_linen(mesh):
    model = Linen()
    params = model.init(jax.random.key(0), tokens()[:, :-1])["params"]

    def loss_fn(params, batch):
        return cross_entropy(model.apply({"params": params}, batch[:, :-1]), batch)

    @jax.jit
    def train(state, batch):
        run = cd.replicas.map(jax.value_and_grad(loss_fn), mesh)
        loss, gradients = run(state.params, batch)
        state = state.apply_gradients(grads=gradients)
        return state, (loss, cd.metrics.observe(state.opt_state))

    partition = cd.dimension_numbers.from_loss(loss_fn, params, tokens())
    params, tx = cd.replicas.replicate(params, mesh), optimizer(mesh, partition)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    return cd.replicas.place(state, mesh), train


def with_nnx(mesh):
    graph, params = nnx.split(NNX(nnx.Rngs(0)))

    def loss_fn(params, batch):
        return cross_entropy(nnx.merge(graph, params)(batch[:, :-1]), batch)

    partition = cd.dimension_numbers.from_loss(loss_fn, params, tokens())
    model = nnx.merge(graph, cd.replicas.replicate(params, mesh))
    optimizer_ = nnx.Optimizer(model, optimizer(mesh, partition), wrt=nnx.Param)
    whole, state = nnx.split((model, optimizer_))

    @jax.jit
    def train(state, batch):
        model, optimizer_ = nnx.merge(whole, state)
        run = cd.replicas.map(jax.value_and_grad(loss_fn), mesh)
        loss, gradients = run(nnx.state(model, nnx.Param), batch)
        optimizer_.update(model, gradients)
        sync = cd.metrics.observe(optimizer_.opt_state)
        return nnx.state((model, optimizer_)), (loss, sync)

    return cd.replicas.place(state, mesh), train


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simulated", "mesh"])
@pytest.mark.parametrize("make", [with_linen, with_nnx])
def test_a_training_loop_learns_and_compiles_once(make: Any, kind):
    mesh = helpers.mesh_of(kind, REPLICAS)
    state, train = make(mesh)
    losses, synced = [], []
    for _ in range(STEPS):
        state, (loss, sync) = train(state, cd.replicas.split(tokens(), mesh))
        losses.append(jax.device_get(loss))
        report = cd.metrics.read(sync)
        synced.append(report["since"] == 0)
    if kind == "mesh":  # else the step number of Flax starts as an int
        assert train._cache_size() == 1
    assert losses[0].shape == (REPLICAS,)
    assert np.std(losses[0]) > 0  # each replica's own batch
    assert np.mean(losses[-1]) < 0.9 * np.mean(losses[0])
    assert synced == [False, False, True] * 2
    assert not {"displaced", "alike", "anchors_differ"} & set(report)
    # embed 72, mlp 64 + 8, norm 16, lm_head 72 + 9 elements.
    assert report["synchronous_bytes"] == 2 * 3 / 4 * STEPS * 4 * 241


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "split"])
def test_counters_and_the_anchor_are_found_in_nnx_states(merged):
    """`nnx.split` makes dictionaries of the named tuples; `nnx.merge` restores them."""
    mesh = cd.replicas.simulated(2)
    graph, params = nnx.split(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    model = nnx.merge(graph, cd.replicas.replicate(params, mesh))
    optimizer_ = nnx.Optimizer(model, sgd(mesh), wrt=nnx.Param)
    state = optimizer_.opt_state
    if not merged:
        whole, variables = nnx.split(optimizer_)
        state = nnx.merge(whole, variables).opt_state
    assert cd.metrics.read(state)["replicas"] == 2
    helpers.assert_bitwise(cd.replicas.anchor(state), params)


class Twice(nnx.Module):
    """A layer that is used twice, a kernel that two layers have, random streams."""

    def __init__(self, rngs):
        layer = nnx.Linear(4, 4, rngs=rngs)
        self.layers = nnx.List([layer, layer])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.tied = nnx.Linear(4, 4, rngs=rngs)
        self.tied.kernel = layer.kernel


def restored(module, folder):
    cd.checkpoint.save(folder, 1, {"module": module})
    return cd.checkpoint.restore(folder, {"module": module})["module"]


SIMULATED = cd.replicas.simulated(2)
OF_ROWS = {
    "consensus": lambda rows, _: cd.replicas.consensus(rows),
    "in a tree": lambda rows, _: cd.replicas.consensus({"a": rows})["a"],
    "repair": lambda rows, _: cd.replicas.repair(rows),
    "resize": lambda rows, _: cd.replicas.resize(rows, cd.replicas.simulated(4)),
    "replicate": lambda rows, _: cd.replicas.replicate(
        cd.replicas.consensus(rows), SIMULATED
    ),
    "place": lambda rows, _: cd.replicas.place(rows, cd.replicas.make_mesh(1)),
    "restore": restored,
}


@pytest.mark.parametrize("name", OF_ROWS)
def test_what_an_nnx_module_shares_stays_shared(name, tmp_path):
    """JAX takes a module for a tree, and makes two of what is used twice."""
    graph, state = nnx.split(Twice(nnx.Rngs(0)))
    rows = cd.replicas.replicate(state, SIMULATED)
    found = OF_ROWS[name](nnx.merge(graph, rows), tmp_path)
    assert found.layers[0] is found.layers[1]
    assert found.tied.kernel is found.layers[0].kernel
    wanted = OF_ROWS[name](rows, tmp_path / "state")
    assert nnx.split(found)[0] == graph
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    numbers = lambda x: jax.random.key_data(x) if is_key(x) else x
    helpers.assert_bitwise(*jax.tree.map(numbers, (nnx.state(found), wanted)))


def test_what_is_shared_diverges_once():
    graph, state = nnx.split(Twice(nnx.Rngs(0)))
    rows = cd.replicas.replicate(state, SIMULATED)
    apart = jax.tree.map(
        lambda x: x.at[1].multiply(2) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        rows,
    )
    apart["tied"]["bias"][...] += 1.0  # else shared arrays count as the others do
    found = cd.replicas.divergence(nnx.merge(graph, apart))
    assert found == cd.replicas.divergence(apart)


def test_an_nnx_optimizer_is_resized():
    graph, state = nnx.split(Twice(nnx.Rngs(0)))
    network = nnx.merge(graph, cd.replicas.replicate(state, SIMULATED))
    before = nnx.Optimizer(network, sgd(SIMULATED), wrt=nnx.Param)
    after = cd.replicas.resize(before, cd.replicas.simulated(4))
    assert cd.metrics.read(after.opt_state)["replicas"] == 4


def test_specs_of_an_nnx_model_whose_kernel_is_divided():
    """`nnx.Optimizer` gives `init` variables, and `update` their arrays."""
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2})
    init = nnx.with_partitioning(nnx.initializers.ones_init(), (None, "fsdp"))
    with jax.set_mesh(jax.make_mesh((2,), ("fsdp",), (AxisType.Auto,))):
        one = nnx.Linear(4, 4, kernel_init=init, rngs=nnx.Rngs(0))
    graph, params = nnx.split(one)
    model = nnx.merge(graph, cd.replicas.replicate(params, mesh))
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable):  # an axis less than rows have
            variable.set_metadata("out_sharding", None)
    specs = nnx.as_pure(nnx.get_partition_spec(params))
    tx = cd.local_muon(0.1, budget=0.5, mesh=mesh, specs=specs)
    optimizer_ = nnx.Optimizer(model, tx, wrt=nnx.Param)
    gradients = jax.tree.map(jnp.ones_like, nnx.state(model))
    optimizer_.update(model, gradients)
    assert model.kernel[...].sharding.spec == PartitionSpec("replica", None, "fsdp")


def equal(*trees):
    return all(
        np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, trees), strict=True)
    )


@pytest.mark.parametrize("own", [True, False], ids=["split keys", "one key"])
def test_dropout_takes_a_key_of_each_replica_as_rows(own):
    """With one key for all by keyword, masks are equal."""
    mesh = cd.replicas.simulated(2)

    def masked(x, key):
        return nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=key))(x)

    x, key = jnp.ones((2, 64)), jax.random.key(0)
    if own:
        found = cd.replicas.map(masked, mesh)(x, jax.random.split(key, 2))
    else:
        with pytest.warns(UserWarning, match="a random key"):
            found = cd.replicas.map(masked, mesh)(x, key=key)
    assert np.array_equal(found[0], found[1]) == (not own)
    for row in range(2):
        one = masked(x[row], jax.random.split(key, 2)[row] if own else key)
        np.testing.assert_array_equal(found[row], one)


class Normalised(linen.Module):
    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.Conv(4, (3,), name="conv")(x)
        return linen.BatchNorm(use_running_average=not train, momentum=0.5)(x)


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
def test_batch_norm_has_statistics_of_each_replica(kind):
    """Rows into map and out of it; a line that the reader sees averages them."""
    mesh, model = helpers.mesh_of(kind, 2), Normalised()
    batch = np.random.default_rng(0).normal(size=(8, 6, 3)).astype(np.float32)
    variables = model.init(jax.random.key(0), batch[:1], train=False)
    params, stats = variables["params"], variables["batch_stats"]
    tx = sgd(mesh, k=1)

    def loss_fn(params, stats, batch):
        out, new = model.apply(
            {"params": params, "batch_stats": stats},
            batch,
            train=True,
            mutable=["batch_stats"],
        )
        return jnp.mean(out**4), new["batch_stats"]

    gradient = jax.value_and_grad(loss_fn, has_aux=True)

    @jax.jit
    def train(params, stats, opt_state, batch):
        run = cd.replicas.map(gradient, mesh)
        (loss, stats), gradients = run(params, stats, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state, loss

    rows = cd.replicas.replicate((params, stats), mesh)
    halves = cd.replicas.split(batch, mesh)
    _, found, _, loss = train(*rows, tx.init(rows[0]), halves)
    assert loss.shape == (2,)
    alone = [gradient(params, stats, x)[0] for x in batch.reshape(2, 4, 6, 3)]
    for row, (value, wanted) in enumerate(alone):
        np.testing.assert_allclose(loss[row], value, rtol=1e-5)
        own = jax.tree.map(lambda x, row=row: x[row], found)
        chex.assert_trees_all_close(own, wanted, rtol=1e-4, atol=1e-6)
    assert not equal(alone[0][1], alone[1][1])
    averaged = cd.replicas.consensus(found)
    mean = jax.tree.map(lambda x, y: (x + y) / 2, *(stats for _, stats in alone))
    chex.assert_trees_all_close(averaged, mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["simulated", "mesh"])
def test_an_average_of_the_weights_is_one_of_rows(kind):
    """An EMA of rows is elementwise, and its consensus that of the consensus."""
    mesh = helpers.mesh_of(kind, 2)
    tx, ema = sgd(mesh, k=2), optax.ema(0.5, debias=False)
    params = cd.replicas.replicate({"w": jnp.ones(3)}, mesh)

    @jax.jit
    def train(params, opt_state, average, gradients):
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, ema.update(params, average)[1]

    state = params, tx.init(params), ema.init(params)
    wanted = np.zeros(3)
    for step in range(4):
        gradients = {"w": np.float32([[1, 2, 3], [step, 0, 1]])}
        state = train(*state, gradients)
        wanted = (wanted + cd.replicas.consensus(state[0])["w"]) / 2
    found = cd.replicas.consensus(state[2].ema)["w"]
    np.testing.assert_allclose(found, wanted, atol=3e-6)
    assert "displaced" not in cd.metrics.read(state[1])


def test_an_equinox_style_loop_of_arrays_and_static_parts():
    """A module is a tree, whose arrays are rows and the rest is the function's."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        weight: jax.Array
        bias: jax.Array
        name: str = dataclasses.field(metadata={"static": True})

        def __call__(self, x):
            return x @ self.weight + self.bias[None]

    mesh = cd.replicas.simulated(2)
    tx = sgd(mesh, k=2)
    model = cd.replicas.replicate(Layer(jnp.ones((3, 2)), jnp.zeros(2), "first"), mesh)

    def loss_fn(model, batch):
        assert model.name == "first"
        return jnp.mean((model(batch) - 1) ** 2)

    @jax.jit
    def train(model, opt_state, batch):
        run = cd.replicas.map(jax.value_and_grad(loss_fn), mesh)
        loss, gradients = run(model, batch)
        updates, opt_state = tx.update(gradients, opt_state, model)
        return optax.apply_updates(model, updates), opt_state, loss

    batch = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
    opt_state, losses = tx.init(model), []
    for _ in range(4):
        model, opt_state, loss = train(model, opt_state, batch)
        losses.append(np.mean(loss))
    assert losses[-1] < 0.8 * losses[0]
    assert cd.metrics.read(opt_state)["syncs"] == 2
    assert cd.replicas.divergence(model) < 1e-6


def test_q_starts_alike_with_and_without_nnx():
    # The initial Q depends on the parameter's path alone, nnx's `value` left out.
    variables = nnx.state(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Param)
    pure = nnx.to_pure_dict(variables)
    states = [
        jax.tree.leaves(helpers.dion_state(optimizer(None).init(params)).dion_q)
        for params in (variables, pure)
    ]
    helpers.assert_bitwise(*states)


class NamedAxes(linen.Module):
    """A kernel whose axes have names, as in models that are sharded over devices."""

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        up = linen.with_partitioning(init, ("embed", "mlp"))
        return linen.Dense(64, kernel_init=up, name="up")(linen.LayerNorm()(x))


def test_boxes_with_names_of_axes_are_seen_through():
    boxed = NamedAxes().init(jax.random.key(0), jnp.ones((1, 3, 16)))["params"]
    plain, tx = linen.meta.unbox(boxed), cd.dion(0.01)
    assert cd.describe_partition(boxed) == cd.describe_partition(plain)
    state = tx.init(boxed)
    dion = linen.get_partition_spec(state).inner_states["matrix"].inner_state[0]
    assert dion.momentum["up"]["kernel"] == PartitionSpec("embed", "mlp")
    assert dion.dion_q["up"]["kernel"] == PartitionSpec()
    updates, after = jax.jit(tx.update)(boxed, state, boxed)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    expected, _ = jax.jit(tx.update)(plain, tx.init(plain), plain)
    chex.assert_trees_all_equal(linen.meta.unbox(updates), expected)


class NamedAxesOfNNX(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        up = nnx.with_partitioning(init, ("fsdp", "tensor"))
        self.up = nnx.Linear(16, 64, use_bias=False, kernel_init=up, rngs=rngs)


@pytest.mark.parametrize("inner", [{}, {"tp": 2}], ids=["no axis", "another"])
def test_boxes_with_axes_that_the_mesh_lacks_are_to_be_taken_off(inner):
    mesh = cd.replicas.make_mesh(2, inner)
    init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "fsdp"))
    model, x = linen.Dense(4, kernel_init=init), jnp.ones((1, 6))
    params = model.init(jax.random.key(0), x)["params"]
    loss = lambda params, x: jnp.mean(model.apply({"params": params}, x) ** 2)
    run = cd.replicas.map(jax.grad(loss), mesh)
    with pytest.raises(ValueError, match=r"fsdp.* not found.*meta\.unbox\(params\)"):
        run(cd.replicas.replicate(params, mesh), jnp.ones((2, 3, 6)))
    plain = cd.replicas.replicate(linen.meta.unbox(params), mesh)
    assert run(plain, jnp.ones((2, 3, 6)))["kernel"].shape == (2, 6, 4)


def test_variables_with_names_of_axes_place_the_momentum_and_not_q():
    """Whose axes are others: its last one is the rank, which no axis divides."""
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2, "tensor": 2})
    tx = cd.curvadion(0.01, rank=3)
    with jax.set_mesh(mesh):
        model = NamedAxesOfNNX(nnx.Rngs(0))
        optimizer_ = nnx.Optimizer(model, tx, wrt=nnx.Param)
    dion = optimizer_.opt_state.rows.inner_state.inner_states["matrix"].inner_state[0]
    momentum, q = dion.momentum["up"]["kernel"], dion.dion_q["up"]["kernel"]
    assert momentum.get_metadata()["out_sharding"] == ("fsdp", "tensor")
    assert "out_sharding" not in q.get_metadata()
    assert q.get_value().sharding.is_fully_replicated
    ones = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer_.update(model, ones)
    assert dion.dion_q["up"]["kernel"].shape == (16, 3)
