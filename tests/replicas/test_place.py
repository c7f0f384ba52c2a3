"""Rows, batches and common arrays: what they may be made of, and where they lie."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import curvadion_jax as cd
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


@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "mesh", [replicas.simulated(4), replicas.make_mesh(4)], ids=["simulated", "mesh"]
)
def test_replicas_have_keys_of_their_own(mesh, shape):
    """Equal dropout masks on all replicas would not show in any loss."""
    keys = jax.random.split(jax.random.key(0), shape) if shape else jax.random.key(0)
    rows = replicas.replicate({"key": keys}, mesh)["key"]
    assert rows.shape == (4, *shape)
    data = jax.random.key_data(rows).reshape(-1, 2)
    assert len(np.unique(data, axis=0)) == rows.size


def test_what_may_be_a_key_of_numbers_is_copied_with_a_warning():
    mesh = replicas.simulated(3)
    with pytest.warns(UserWarning, match=r"\['rng'\].*jax\.random\.key, which") as seen:
        rows = replicas.replicate({"rng": jax.random.PRNGKey(0)}, mesh)["rng"]
    assert [x.filename for x in seen] == [__file__]
    assert rows.tolist() == [[0, 0]] * 3
    replicas.replicate(jnp.zeros(3, jnp.uint32), mesh)  # a counter, say


def test_replicate_refuses_replicas_of_another_mesh():
    state = replicas.replicate({"w": jnp.ones(3)}, replicas.make_mesh(2))
    with pytest.raises(ValueError, match="sharded over 'replica' already"):
        replicas.replicate(state, replicas.make_mesh(4))


@pytest.mark.parametrize(
    "mesh", [None, replicas.simulated(3)], ids=["one", "simulated"]
)
def test_without_a_mesh_of_devices_rows_are_ordinary_arrays(mesh):
    params = {"w": jnp.arange(4.0), "weak": 1.0}
    rows = replicas.replicate(params, mesh)
    lead = () if mesh is None else (3,)
    assert rows["w"].shape == (*lead, 4)
    assert rows["w"].devices() == {jax.devices()[0]}
    assert rows["weak"].weak_type == (mesh is None)
    placed = replicas.place(params, mesh)
    assert placed["w"] is params["w"]
    assert not placed["weak"].weak_type
    batch = replicas.split({"x": np.arange(6)}, mesh)["x"]
    assert batch.shape == ((6,) if mesh is None else (3, 2))


def test_place_runs_under_jit():
    mesh = replicas.make_mesh(2)
    placed = jax.jit(lambda x: replicas.place(x, mesh))(jnp.ones(3))
    assert placed.tolist() == [1, 1, 1]


def test_placed_numbers_are_on_all_devices_and_arrays_on_the_mesh_stay():
    mesh = replicas.make_mesh(2)
    tx = optax.adam(0.1)
    rows = replicas.replicate({"w": jnp.ones(3)}, mesh)
    state = TrainState.create(apply_fn=None, params=rows, tx=tx)
    committed = jax.device_put(jnp.ones(2), jax.devices()[3])  # as if it was restored
    tree = state, jax.random.key(0), 2.5, np.arange(3), committed
    placed = replicas.place(tree, mesh)
    for x in jax.tree.leaves(placed):
        assert x.sharding.mesh == mesh
        assert not getattr(x, "weak_type", False)
    assert placed[0].params["w"] is rows["w"]
    assert placed[0].step.sharding.is_fully_replicated
    assert int(placed[0].step) == 0
    assert placed[3].tolist() == [0, 1, 2]


def test_the_second_call_of_a_step_does_not_compile_again(caplog):
    """With Flax's step number, which `place` puts on the mesh, and keys made of it."""
    mesh = replicas.make_mesh(2)
    tx = optax.chain(optax.ema(0.9), cd.local_muon(0.1, budget=0.1, mesh=mesh))
    rows = replicas.replicate({"w": jnp.ones((4, 8)), "b": jnp.ones(8)}, mesh)
    state = TrainState.create(apply_fn=None, params=rows, tx=tx)
    state = replicas.place(state, mesh)

    @jax.jit
    def my_step(state, x):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), state.step), 2)

        def loss_fn(params, x, key):
            x = x + jax.random.normal(key, x.shape)
            return jnp.mean((x @ params["w"] + params["b"][None]) ** 2)

        grads = replicas.map(jax.grad(loss_fn), mesh)(state.params, x, keys)
        return state.apply_gradients(grads=grads)

    with jax.log_compiles():
        for _ in range(4):
            state = my_step(state, replicas.split(np.ones((6, 4), np.float32), mesh))
    finished = "Finished XLA compilation of jit(my_step)"
    assert sum(finished in x.getMessage() for x in caplog.records) == 1
    assert my_step._cache_size() == 1
    assert int(state.step) == 4


def test_a_batch_is_divided_among_the_replicas():
    mesh = replicas.make_mesh(4)
    batch = {
        "x": np.arange(24).reshape(8, 3),
        "key": jax.random.split(jax.random.key(0), 8),
    }
    found = replicas.split(batch, mesh)
    np.testing.assert_array_equal(found["x"], batch["x"].reshape(4, 2, 3))
    assert found["key"].shape == (4, 2)
    for x in jax.tree.leaves(found):
        assert x.sharding.spec[:1] == ("replica",)
        assert x.addressable_shards[0].data.shape[0] == 1
    inside = jax.jit(lambda batch: replicas.split(batch, mesh))(batch)
    np.testing.assert_array_equal(inside["x"], found["x"])


def test_the_devices_of_a_replica_share_its_batch_as_the_caller_says():
    mesh, batch = replicas.make_mesh(2, {"fsdp": 4}), np.arange(16).reshape(8, 2)
    found = replicas.split(batch, mesh, PartitionSpec("fsdp"))
    assert found.sharding.spec == PartitionSpec("replica", "fsdp")
    assert found.addressable_shards[0].data.shape == (1, 1, 2)
    whole = replicas.split(batch, mesh, PartitionSpec())
    assert whole.addressable_shards[0].data.shape == (1, 4, 2)
    with pytest.warns(
        UserWarning, match=r"gets its whole batch.*PartitionSpec\('fsdp'\)"
    ):
        found = replicas.split(batch, mesh)
    assert found.sharding == whole.sharding
    jax.jit(lambda batch: replicas.split(batch, mesh))(batch)  # without a warning


@pytest.mark.parametrize(
    ("shape", "hint"),
    [((6, 2), "a multiple of 4"), ((0, 2), "a multiple of 4"), ((), "by keyword")],
)
def test_a_batch_that_cannot_be_divided_is_refused(shape, hint):
    told = rf"batch\['x'\] has shape .* among 4 replicas.*{hint}"
    with pytest.raises(ValueError, match=told):
        replicas.split({"x": np.zeros(shape)}, replicas.make_mesh(4))


# What is no list of examples -> what the message names.
ODD = {
    "class weights": ({"x": (8, 3), "y": (8,), "w": (4,)}, r"batch\['w'\] .*\(4,\)"),
    "table of positions": ({"x": (8, 3), "y": (8,), "t": (6, 3)}, r"batch\['t'\]"),
    "offsets of documents": ([(20,), (10,), (20,)], r"batch\[1\] of shape \(10,\)"),
    "edges of a graph": (((8, 2), (12, 2)), r"batch\[1\] of shape \(12, 2\)"),
    "what does not divide": ({"x": (8, 3), "y": (8,), "m": (3,)}, r"batch\['m'\]"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("under_jit", [False, True], ids=["eager", "jit"])
def test_a_batch_of_different_numbers_of_examples_is_refused(name, under_jit):
    """Cut among replicas, a table would be indexed beyond its end in silence."""
    shapes, odd = ODD[name]
    is_shape = lambda x: isinstance(x, tuple) and isinstance(x[0], int)
    batch = jax.tree.map(np.zeros, shapes, is_leaf=is_shape)
    divide = lambda batch: replicas.split(batch, replicas.simulated(2))
    with pytest.raises(ValueError, match=f"examples, but not {odd}.*by keyword"):
        (jax.jit(divide) if under_jit else divide)(batch)


class Tensor:
    """An array of another library: NumPy can convert it, and JAX refuses it."""

    def __init__(self, x):
        self.x, self.shape = x, x.shape

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.x, dtype)


@pytest.mark.parametrize("mesh", [replicas.make_mesh, replicas.simulated])
def test_tensors_of_other_libraries_are_divided(mesh):
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    found = replicas.split({"x": Tensor(x)}, mesh(2))["x"]
    sums = jax.jit(replicas.map(jnp.sum, mesh(2)))(found)
    assert sums.tolist() == [6.0, 22.0]


@pytest.mark.parametrize("put", [replicas.place, replicas.replicate])
@pytest.mark.parametrize("mesh", [replicas.make_mesh(2), replicas.simulated(2), None])
def test_a_number_that_needs_64_bits_is_refused(mesh, put):
    large = 5_000_000_000
    for tokens in (large, np.int64(large), np.uint64(large), np.array([0, -large])):
        with pytest.raises(OverflowError):
            put({"tokens": tokens}, mesh)
    placed = put({"tokens": np.int64(5)}, mesh)["tokens"]
    assert placed.dtype == jnp.int32
    assert (placed == 5).all()


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
        if not jnp.issubdtype(copy.dtype, jax.dtypes.prng_key):  # split
            assert all((row == leaf).all() for row in copy)
    assert copies["train"].step.dtype == jnp.int32
    assert copies["train"].params["w"].dtype == jnp.bfloat16
    assert copies["number"].dtype == jnp.float32
