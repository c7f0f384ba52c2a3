"""Training loops of Flax, linen's TrainState and nnx's Optimizer, on 8 replicas."""

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

import curvadion_jax as cd
from curvadion_jax import triggers

REPLICAS, STEPS, VOCABULARY, WIDTH = 8, 6, 9, 8
# Replicas after a sync: parameters of order 1 to a rounding of their last update.
SAME_ATOL = 1e-6
OPTIMIZERS = {
    "curvadion": (
        helpers.averaging_dion(0.05, axis_name="replica", trigger=triggers.every_k(3)),
        [False, False, True] * 2,
    ),
    "synchronous_dion": (
        cd.presets.synchronous_dion(0.05, axis_name="replica"),
        [True] * STEPS,
    ),
}


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


def train_linen(tx):
    """Losses and metrics of every step, final parameters and optimizer state."""
    model, mesh = Linen(), cd.replicas.make_mesh(REPLICAS)
    params = model.init(jax.random.key(0), tokens()[:, :-1])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def train(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch[:, :-1])
            return cross_entropy(logits, batch)

        loss, gradients = jax.value_and_grad(loss_fn)(state.params)
        state = state.apply_gradients(grads=gradients)
        sync = cd.metrics.observe(state.opt_state)
        return state, {"loss": loss, "sync": sync}

    state, step = cd.replicas.replicate(state, mesh), cd.replicas.step(train, mesh)
    history = []
    for _ in range(STEPS):
        state, out = step(state, tokens())
        history.append(jax.device_get(out))
    assert state.step.tolist() == [STEPS] * REPLICAS
    return history, state.params, state.opt_state


def train_nnx(tx):
    model, mesh = NNX(nnx.Rngs(0)), cd.replicas.make_mesh(REPLICAS)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def loss_fn(model, batch):
        return cross_entropy(model(batch[:, :-1]), batch)

    def train(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, gradients)
        sync = cd.metrics.observe(optimizer.opt_state)
        return nnx.state((model, optimizer)), {"loss": loss, "sync": sync}

    state, step = cd.replicas.replicate(state, mesh), cd.replicas.step(train, mesh)
    history = []
    for _ in range(STEPS):
        state, out = step(state, tokens())
        history.append(jax.device_get(out))
    model, optimizer = nnx.merge(graph, state)
    return history, nnx.state(model, nnx.Param), optimizer.opt_state


RUNS = {
    "linen": (train_linen, *OPTIMIZERS["synchronous_dion"]),
    "nnx": (train_nnx, *OPTIMIZERS["curvadion"]),
}


@pytest.fixture(scope="module", params=RUNS)
def trained(request):
    train, tx, synced = RUNS[request.param]
    return (*train(tx), synced)


@pytest.mark.slow
def test_the_loss_falls(trained):
    history, *_ = trained
    losses = [out["loss"] for out in history]
    assert all(loss.shape == (REPLICAS,) for loss in losses)
    assert np.std(losses[0]) > 0  # each replica's own batch
    assert np.mean(losses[-1]) < 0.9 * np.mean(losses[0])


@pytest.mark.slow
def test_metrics(trained):
    history, _, opt_state, synced = trained
    assert [cd.metrics.read(out)["synced"] for out in history] == synced
    read = cd.metrics.read(opt_state)
    assert (read["steps"], read["syncs"]) == (STEPS, sum(synced))
    assert read["replicas"] == REPLICAS
    # embed 72, mlp 64 + 8, norm 16, lm_head 72 + 9 elements.
    assert read["synchronous_bytes"] == 7 / 4 * STEPS * 4 * 241


@pytest.fixture(params=["merged", "split"])
def nnx_state(request):
    """An nnx optimizer's state on two replicas, parameters beside the anchor, anchor.

    `nnx.split` makes dictionaries of the named tuples; `nnx.merge` restores them.
    """
    tx, _ = OPTIMIZERS["curvadion"]
    model, mesh = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), cd.replicas.make_mesh(2)
    graph, state = nnx.split(nnx.Optimizer(model, tx, wrt=nnx.Param))
    anchor, state = nnx.state(model, nnx.Param), cd.replicas.replicate(state, mesh)
    params = jax.tree.map(lambda x: x + 1, cd.replicas.replicate(anchor, mesh))
    if request.param == "merged":
        state = nnx.merge(graph, state).opt_state
    return state, params, anchor


def test_counters_are_found_in_nnx_states(nnx_state):
    assert cd.metrics.read(nnx_state[0])["replicas"] == 2


def test_the_anchor_is_found_in_nnx_states(nnx_state):
    state, _, anchor = nnx_state
    helpers.assert_bitwise(cd.replicas.anchor(state), anchor)


def test_q_starts_alike_with_and_without_nnx():
    # The initial Q depends on the parameter's path alone, nnx's `value` left out.
    tx, _ = OPTIMIZERS["curvadion"]
    variables = nnx.state(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Param)
    pure = nnx.to_pure_dict(variables)
    states = [
        jax.tree.leaves(helpers.dion_state(tx.init(params)).q)
        for params in (variables, pure)
    ]
    helpers.assert_bitwise(*states)


class NamedAxes(linen.Module):
    """Kernels whose axes have names, as in models that are divided over devices."""

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        heads = linen.with_partitioning(init, ("embed", "heads", "kv"))
        x = linen.LayerNorm()(x)
        attention = linen.MultiHeadDotProductAttention(
            4, kernel_init=heads, out_kernel_init=init, name="attention"
        )
        x = attention(x, x)
        up = linen.with_partitioning(init, ("embed", "mlp"))
        return linen.Dense(64, kernel_init=up, name="up")(x)


def test_boxes_with_names_of_axes_are_seen_through():
    init = jax.jit(NamedAxes().init)
    boxed = init(jax.random.key(0), jnp.ones((1, 3, 16)))["params"]
    assert cd.describe_partition(boxed) == cd.describe_partition(
        linen.meta.unbox(boxed)
    )
    tx = cd.curvadion(0.01, rank=0.25)
    state = jax.jit(tx.init)(boxed)
    spec = linen.get_partition_spec(state)
    dion = spec.inner_state.inner_states["dion"].inner_state[0]
    assert dion.momentum["up"]["kernel"] == PartitionSpec("embed", "mlp")
    assert dion.q["up"]["kernel"] == PartitionSpec()  # which has no box
    gradients = jax.tree.map(jnp.ones_like, boxed)
    updates, after = jax.jit(tx.update)(gradients, state, boxed)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    plain = linen.meta.unbox(boxed)
    state = jax.jit(tx.init)(plain)
    expected, _ = jax.jit(tx.update)(linen.meta.unbox(gradients), state, plain)
    chex.assert_trees_all_equal(linen.meta.unbox(updates), expected)


class NamedAxesOfNNX(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        up = nnx.with_partitioning(init, ("fsdp", "tensor"))
        self.up = nnx.Linear(16, 64, use_bias=False, kernel_init=up, rngs=rngs)


def test_variables_with_names_of_axes_place_their_state():
    mesh = cd.replicas.make_mesh(2, {"fsdp": 2, "tensor": 2})
    tx = cd.curvadion(0.01, rank=3)  # which no axis divides
    with jax.set_mesh(mesh):
        model = NamedAxesOfNNX(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    dion = optimizer.opt_state.inner_state.inner_states["dion"].inner_state[0]
    momentum, q = dion.momentum["up"]["kernel"], dion.q["up"]["kernel"]
    assert momentum.get_metadata()["out_sharding"] == ("fsdp", "tensor")
    assert q.get_value().sharding.spec == PartitionSpec("fsdp", None)
