"""Training loops of Flax, linen's TrainState and nnx's Optimizer, on replicas."""

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
from jax.sharding import PartitionSpec

import curvadion_jax as cd
from curvadion_jax import triggers

REPLICAS, STEPS, VOCABULARY, WIDTH = 4, 6, 9, 8
TX = helpers.averaging_dion(0.05, axis_name="replica", trigger=triggers.every_k(3))


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


def with_linen():
    model = Linen()
    params = model.init(jax.random.key(0), tokens()[:, :-1])["params"]

    def train(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch[:, :-1])
            return cross_entropy(logits, batch)

        loss, gradients = jax.value_and_grad(loss_fn)(state.params)
        state = state.apply_gradients(grads=gradients)
        return state, (loss, cd.metrics.observe(state.opt_state))

    return TrainState.create(apply_fn=model.apply, params=params, tx=TX), train


def with_nnx():
    model = NNX(nnx.Rngs(0))
    graph, state = nnx.split((model, nnx.Optimizer(model, TX, wrt=nnx.Param)))

    def train(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(
            lambda model: cross_entropy(model(batch[:, :-1]), batch)
        )(model)
        optimizer.update(model, gradients)
        sync = cd.metrics.observe(optimizer.opt_state)
        return nnx.state((model, optimizer)), (loss, sync)

    return state, train


@pytest.mark.slow
@pytest.mark.parametrize("make", [with_linen, with_nnx])
def test_a_training_loop(make: Any):
    state, train = make()
    mesh = cd.replicas.make_mesh(REPLICAS)
    state, step = cd.replicas.replicate(state, mesh), cd.replicas.step(train, mesh)
    losses, synced = [], []
    for _ in range(STEPS):
        state, (loss, sync) = step(state, tokens())
        losses.append(jax.device_get(loss))
        read = cd.metrics.read(sync)
        synced.append(read["synced"])
    assert losses[0].shape == (REPLICAS,)
    assert np.std(losses[0]) > 0  # each replica's own batch
    assert np.mean(losses[-1]) < 0.9 * np.mean(losses[0])
    assert synced == [False, False, True] * 2
    # embed 72, mlp 64 + 8, norm 16, lm_head 72 + 9 elements.
    assert read["synchronous_bytes"] == 2 * 3 / 4 * STEPS * 4 * 241


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "split"])
def test_counters_and_the_anchor_are_found_in_nnx_states(merged):
    """`nnx.split` makes dictionaries of the named tuples; `nnx.merge` restores them."""
    model, mesh = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), cd.replicas.make_mesh(2)
    graph, state = nnx.split(nnx.Optimizer(model, TX, wrt=nnx.Param))
    anchor, state = nnx.state(model, nnx.Param), cd.replicas.replicate(state, mesh)
    if merged:
        state = nnx.merge(graph, state).opt_state
    assert cd.metrics.read(state)["replicas"] == 2
    helpers.assert_bitwise(cd.replicas.anchor(state), anchor)


def test_q_starts_alike_with_and_without_nnx():
    # The initial Q depends on the parameter's path alone, nnx's `value` left out.
    variables = nnx.state(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Param)
    pure = nnx.to_pure_dict(variables)
    states = [
        jax.tree.leaves(helpers.dion_state(TX.init(params)).dion_q)
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
    assert dion.dion_q["up"]["kernel"] == PartitionSpec("embed", None)
    updates, after = jax.jit(tx.update)(boxed, state, boxed)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    expected, _ = jax.jit(tx.update)(plain, tx.init(plain), plain)
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
    dion = optimizer.opt_state.inner_state.inner_states["matrix"].inner_state[0]
    momentum, q = dion.momentum["up"]["kernel"], dion.dion_q["up"]["kernel"]
    assert momentum.get_metadata()["out_sharding"] == ("fsdp", "tensor")
    assert q.get_metadata()["out_sharding"] == ("fsdp", None)
    assert q.get_value().sharding.spec == PartitionSpec("fsdp", None)
