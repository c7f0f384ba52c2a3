"""States of eight replicas to save, and what is the same of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

REPLICAS = 8


class SyncState(NamedTuple):
    """In the manner of the library's own states: counters, a factor, holes."""

    syncs: jax.Array
    q: Any
    inner: Any


def sharding(devices: int = REPLICAS) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("replica",), (AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("replica"))


def differ(tree: Any, replicas: int = REPLICAS) -> Any:
    """Leading replica axis on every leaf, another value on every replica."""

    def leaf(x):
        if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
            return jax.device_put(jax.random.split(x, replicas), sharding(replicas))
        x = np.asarray(jnp.asarray(x))
        stacked = np.stack([x + np.asarray(i).astype(x.dtype) for i in range(replicas)])
        return jax.device_put(stacked.astype(x.dtype), sharding(replicas))

    return jax.tree.map(leaf, tree)


def train_state() -> dict[str, Any]:
    """A flax TrainState with a partitioned optimizer, and a key, on one replica."""
    model = linen.Dense(8)
    params = model.init(jax.random.key(0), jnp.zeros((1, 16)))["params"]
    params["kernel"] = params["kernel"].astype(jnp.bfloat16)
    inner = {"matrix": optax.sgd(0.1, momentum=0.9), "other": optax.adamw(1e-3)}
    labels = {"kernel": "matrix", "bias": "other"}
    tx = optax.chain(optax.clip(1.0), optax.partition(inner, labels))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    sync = SyncState(
        jnp.int32(3), {"a": jnp.full((4, 2), 0.1), "b": optax.MaskedNode()}, None
    )
    return {"train": state, "sync": sync, "rng": jax.random.key(7), "on": jnp.bool_(1)}


def blank(tree: Any) -> Any:
    """The abstract target of a state."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def raw(x: jax.Array) -> bytes:
    key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if key else x).tobytes()


def assert_same(got: Any, want: Any) -> None:
    """Equal structure, dtypes, shardings and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert a.sharding == b.sharding, name
        assert raw(a) == raw(b), name
