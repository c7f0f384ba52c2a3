"""Models whose local steps XLA would make communicate, if replicas were not rows."""

import functools
from typing import Any

import chex
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd

REPLICAS, IMAGES, STEPS, EVERY = 4, 4, 4, 2
# Convolutions of float32 in another order, over some steps.
CLOSE = 2e-4
pytestmark = pytest.mark.slow  # many programs
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(REPLICAS * IMAGES, 8, 8, 3)).astype(np.float32)
Y = DRAW.integers(0, 4, REPLICAS * IMAGES)


class VisionTransformer(nn.Module):
    """A patch embedding by a convolution, attention, dropout."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(16, (4, 4), (4, 4), name="patches")(x)
        x = x.reshape(len(x), -1, 16)
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2, use_bias=False)(y, y)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(4, name="head")(x.mean(1))


class ResNet(nn.Module):
    """A residual block with batch norms."""

    @nn.compact
    def __call__(self, x, train=True):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train)
        x = nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
        x = x + nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
        return nn.Dense(4, name="head")(x.mean((1, 2)))


class Scanned(nn.Module):
    """Layers by `nn.scan` of `nn.remat`, and a constraint over the whole mesh."""

    mesh: Any = None

    @nn.compact
    def __call__(self, x, train=True):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                y = nn.tanh(nn.Dense(32)(nn.LayerNorm()(x)))
                return x + nn.Dense(x.shape[-1])(y), None

        x = nn.Dense(16)(x.reshape(len(x), -1))
        if "fsdp" in getattr(self.mesh, "shape", ()):
            x = lax.with_sharding_constraint(x, NamedSharding(self.mesh, P("fsdp")))
        layers = nn.scan(
            nn.remat(Layer), {"params": 0}, split_rngs={"params": True}, length=3
        )
        x, _ = layers()(x, None)
        return nn.Dense(4, name="head")(x)


MODELS = {"vit": VisionTransformer, "resnet": ResNet, "scanned": Scanned}
MESHES = {
    "8x1": lambda: cd.replicas.make_mesh(REPLICAS, devices=jax.devices()[:REPLICAS]),
    "4x2": lambda: cd.replicas.make_mesh(REPLICAS, {"fsdp": 2}),
    "simulated": lambda: cd.replicas.simulated(REPLICAS),
}


class State(TrainState):
    stats: Any


def spec_of(x):
    """The last axis over fsdp, where it can be divided."""
    return P(*[None] * (x.ndim - 1), "fsdp") if x.ndim > 1 and x.shape[-1] > 4 else P()


@functools.cache
def trained(name: str, where: str):
    """Losses and the state of a loop as users write it, and what the step sends."""
    mesh = MESHES[where]()
    model = MODELS[name](mesh) if name == "scanned" else MODELS[name]()
    variables = MODELS[name]().init(jax.random.key(0), X[:1], train=False)
    params, stats = variables["params"], variables.get("batch_stats", {})
    specs = None
    if where == "4x2":
        specs = jax.tree.map(spec_of, params)
        place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        params = jax.tree.map(place, params, specs)
    tx = cd.presets.diloco(1e-2, k=EVERY, mesh=mesh, specs=specs)
    params, stats = cd.replicas.replicate((params, stats), mesh)
    state = State.create(apply_fn=model.apply, params=params, tx=tx, stats=stats)
    state = cd.replicas.place(state, mesh)

    def loss_fn(params, stats, key, x, y):
        logits, new = model.apply(
            {"params": params, "batch_stats": stats},
            x,
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean(), new.get("batch_stats", {})

    @jax.jit
    def train_step(state, x, y):
        key = jax.random.fold_in(jax.random.key(1), state.step)
        keys = jax.random.split(key, REPLICAS)
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = cd.replicas.map(gradient, mesh)(
            state.params, state.stats, keys, x, y
        )
        return state.apply_gradients(grads=grads, stats=stats), loss

    spec = P("fsdp") if where == "4x2" else P()
    x, y = cd.replicas.split((X, Y), mesh, spec)
    sent = None
    if where != "simulated":
        sent = cd.replicas.audit(train_step, mesh, state, x, y)
    losses = []
    for _ in range(STEPS):
        state, loss = train_step(state, x, y)
        losses.append(loss)
    return np.asarray(losses), jax.device_get((state.params, state.stats)), sent, state


@pytest.mark.parametrize("where", ["8x1", "4x2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_local_step_sends_nothing(name, where):
    _, _, sent, state = trained(name, where)
    assert sent.every_step == []
    assert {x.kind for x in sent.sync} == {"all-reduce", "all-gather"}
    report = cd.metrics.read(state.opt_state)
    assert (report["syncs"], report["votes"]) == (STEPS // EVERY, 0)
    assert "displaced" not in report


@pytest.mark.parametrize("where", ["8x1", "4x2"])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_a_simulation(name, where):
    losses, state, *_ = trained(name, where)
    expected, simulated, *_ = trained(name, "simulated")
    assert (losses[-1] < losses[0]).all()
    assert len(set(losses[0].tolist())) == REPLICAS  # each has its own batch
    np.testing.assert_allclose(losses, expected, rtol=CLOSE)
    chex.assert_trees_all_close(state, simulated, rtol=CLOSE, atol=CLOSE)


def test_statistics_of_batch_norm_stay_apart_and_are_averaged_by_a_line():
    *_, state = trained("resnet", "8x1")
    for x in jax.tree.leaves(state.stats):
        assert np.ptp(np.asarray(x), axis=0).any()
    mean = cd.replicas.replicate(cd.replicas.consensus(state.stats), MESHES["8x1"]())
    for x, y in zip(*map(jax.tree.leaves, (mean, state.stats)), strict=True):
        np.testing.assert_allclose(x[1], np.asarray(y).mean(0), rtol=1e-5, atol=1e-6)
        assert not np.ptp(np.asarray(x), axis=0).any()
