"""Convolutions of a mapped step: each replica's own, and nothing gathered for them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd

AXIS = "replica"
# Sums of a convolution in float32, in another order within a replica.
RTOL = 2e-5


class Network(nn.Module):
    """Strided, grouped and rematerialised convolutions, and one in a loop."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.remat(nn.Conv)(8, (3, 3), strides=(2, 2))(x)
        x = nn.Conv(8, (3, 3), feature_group_count=2)(nn.relu(x))
        shared = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        scan = nn.scan(lambda layer, x: (nn.relu(layer(x)), None), length=3, **shared)
        x, _ = scan(nn.Conv(8, (3, 3)), x)
        return nn.Dense(4)(x.mean((1, 2)))


def batches(number):
    rng = np.random.default_rng(0)
    for _ in range(number):
        x = rng.normal(size=(32, 8, 8, 3)).astype(np.float32)
        yield {"x": x, "y": x.mean((1, 2))[:, [0, 1, 2, 0]]}


def train_step(model, tx):
    def train(state, batch):
        params, opt_state = state

        def loss_fn(params):
            error = model.apply({"params": params}, batch["x"]) - batch["y"]
            return jnp.mean(error**2)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), {"loss": loss}

    return train


def in_shard_map(train, mesh):
    """The same by hand: everything in one `shard_map`."""

    def of_replica(state, batch):
        state = jax.tree.map(lambda x: x[0], state)
        results = train(state, batch)
        return jax.tree.map(lambda x: x[None], results)

    spec = PartitionSpec(AXIS)
    return jax.jit(
        jax.shard_map(
            of_replica, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={AXIS}
        )
    )


def trained(model, mesh, step_of, tx):
    params = model.init(jax.random.key(0), jnp.ones((1, 8, 8, 3)))["params"]
    state = cd.replicas.replicate((params, tx.init(params)), mesh)
    rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    step = step_of(train_step(model, tx))
    for batch in batches(4):
        state, metrics = step(state, jax.device_put(batch, rows))
    return state[0], metrics["loss"]


@pytest.mark.slow
def test_the_same_as_in_a_shard_map_of_ones_own():
    """Without a warning of what the compiler has replicas exchange."""
    mesh, model = cd.replicas.make_mesh(4, {"fsdp": 2}), Network()
    tx = cd.presets.local_sgd(0.1, 2, axis_name=AXIS)
    ours, losses = trained(model, mesh, lambda f: cd.replicas.step(f, mesh), tx)
    by_hand, expected = trained(model, mesh, lambda f: in_shard_map(f, mesh), tx)
    np.testing.assert_allclose(losses, expected, rtol=RTOL)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(by_hand), strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL)


def test_nothing_is_gathered():
    """A step that only convolves sends nothing at all."""
    mesh = cd.replicas.make_mesh(4)

    def train(state, batch):
        loss = lambda w: jnp.sum(lax.conv(batch, w, (1, 1), "SAME") ** 2)  # noqa: E731
        return state, {"gradient": jax.grad(loss)(state)}

    state = cd.replicas.replicate(jnp.ones((2, 3, 3, 3)), mesh)
    step = cd.replicas.step(train, mesh)
    images = jnp.arange(8 * 3 * 16.0).reshape(8, 3, 4, 4)
    text = step.lower(state, images).compile().as_text()
    assert "convolution" in text
    for collective in ("all-gather", "all-to-all", "all-reduce", "collective-permute"):
        assert f"{collective}(" not in text


def test_what_all_replicas_share():
    mesh = cd.replicas.make_mesh(2)
    weights = jnp.arange(54.0).reshape(2, 3, 3, 3)
    images = jnp.arange(4 * 48.0).reshape(4, 3, 4, 4)

    def train(state, batch, weights):
        return state, {"out": lax.conv(batch, weights, (1, 1), "SAME")}

    state = cd.replicas.replicate(0.0, mesh)
    _, metrics = cd.replicas.step(train, mesh)(state, images, weights)
    expected = lax.conv(images, weights, (1, 1), "SAME").reshape(2, 2, 2, 4, 4)
    np.testing.assert_array_equal(metrics["out"], expected)
