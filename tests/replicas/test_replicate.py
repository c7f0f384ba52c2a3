"""State with a replica axis: what it may be made of, and where it lies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from curvadion_jax import replicas


def test_replicate_keeps_the_sharding_within_a_replica():
    mesh = replicas.make_mesh(2, {"fsdp": 4})
    within = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    w = jax.device_put(jnp.arange(32.0).reshape(4, 8), within)
    copies = replicas.replicate({"w": w, "b": jnp.ones(4)}, mesh)
    assert copies["w"].sharding.spec == PartitionSpec("replica", None, "fsdp")
    assert copies["w"].addressable_shards[0].data.shape == (1, 4, 2)
    assert copies["b"].sharding.spec == PartitionSpec("replica")
    np.testing.assert_array_equal(copies["w"], np.stack([w, w]))


def test_replicate_takes_what_was_put_elsewhere():
    """On one device, as a checkpoint is restored, or on a mesh of other devices."""
    mesh = replicas.make_mesh(4, {"fsdp": 2})
    other = replicas.make_mesh(1, {"fsdp": 2}, devices=jax.devices()[-2:])
    x, rows = jnp.arange(12.0).reshape(6, 2), PartitionSpec("fsdp")
    divided = jax.device_put(x, NamedSharding(other, rows))
    for given in (jax.device_put(x, jax.devices()[5]), divided, jax.random.key(3)):
        found = replicas.replicate({"w": given}, mesh)["w"]
        assert found.sharding.mesh == mesh
        assert found.shape == (4, *given.shape)
        if given.dtype == x.dtype:
            np.testing.assert_array_equal(found[3], given)
    assert replicas.replicate(divided, mesh).sharding.spec == PartitionSpec(
        "replica", "fsdp"
    )


def test_replicate_refuses_replicas_of_another_mesh():
    state = replicas.replicate({"w": jnp.ones(3)}, replicas.make_mesh(2))
    with pytest.raises(ValueError, match="sharded over 'replica' already"):
        replicas.replicate(state, replicas.make_mesh(4))


def test_replicate_takes_whatever_a_training_state_holds():
    params, tx = {"w": jnp.ones(3, jnp.bfloat16)}, optax.adamw(0.1)
    state = {
        # Its step is a Python int.
        "train": TrainState.create(apply_fn=None, params=params, tx=tx),
        "key": jax.random.key(7),
        "number": 2.5,
        "flag": True,
        "numpy": np.arange(3),
    }
    copies = replicas.replicate(state, replicas.make_mesh(4))
    assert jax.tree.structure(copies) == jax.tree.structure(state)
    pairs = zip(jax.tree.leaves(copies), jax.tree.leaves(state), strict=True)
    for copy, leaf in pairs:
        assert copy.shape == (4, *np.shape(leaf))
        assert copy.dtype == jnp.asarray(leaf).dtype
        assert copy.sharding.spec == PartitionSpec("replica")
        for row in copy:
            assert (row == leaf).all()
    assert copies["train"].step.dtype == jnp.int32
    assert copies["train"].params["w"].dtype == jnp.bfloat16
    assert copies["number"].dtype == jnp.float32
