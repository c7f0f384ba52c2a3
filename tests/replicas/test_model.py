"""The one model, the anchor, and how far the replicas are from each other."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from flax.training.train_state import TrainState

import curvadion_jax as cd
from curvadion_jax import replicas, synchronizers, triggers

# One float32 sum of some dozens of squares.
RTOL = 1e-5
pytestmark = pytest.mark.slow  # many programs
# A sum of so many float32 numbers is off by so many roundings.
EPS = np.finfo(np.float32).eps
MODELS = [helpers.make_params(seed) for seed in range(2)]
LOCAL_SGD = cd.presets.local_sgd(0.1, k=2, axis_name=helpers.AXIS)


def test_the_mean_over_replicas():
    params = {
        "w": jnp.array([[1.0, 2], [3, 6]]),
        "half": jnp.array([[256.0], [257]], jnp.float16),
        "complex": jnp.array([1 + 2j, 3 - 1j]),
        "count": jnp.array([5, 5]),
    }
    model = replicas.consensus(params)
    assert model["w"].tolist() == [2, 4]
    assert model["half"].dtype == jnp.float16
    assert model["half"].tolist() == [256.5]
    assert model["complex"] == 2 + 0.5j
    assert model["count"] == 5


def test_equal_replicas():
    one = np.random.default_rng(0).normal(size=(400,)).astype(np.float32)
    params = {"w": jnp.asarray(np.stack([one] * 3)), "zero": jnp.zeros(3)}
    assert float(replicas.divergence(params)) == 0
    assert float(replicas.divergence({"zero": params["zero"]})) == 0
    np.testing.assert_allclose(replicas.consensus(params)["w"], one, rtol=3 * EPS)


def test_the_consensus_of_one_replica_can_be_replicated_anew():
    one = replicas.make_mesh(1)
    stacked = replicas.replicate({"w": jnp.ones((16, 16)), "b": jnp.ones(7)}, one)
    state = replicas.replicate(replicas.consensus(stacked), replicas.make_mesh(4))
    assert state["w"].sharding.spec == jax.sharding.PartitionSpec("replica")


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_divergence_is_the_references(dtype):
    trees = [helpers.make_params(seed, dtype) for seed in range(5)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
    expected = reference.divergence([jax.tree.map(np.float64, tree) for tree in trees])
    stacked["n"] = np.arange(5)  # integers do not count
    np.testing.assert_allclose(replicas.divergence(stacked), expected, rtol=RTOL)


def test_the_anchor_of_each_device_is_its_own():
    """It is read without communication: what a device returns is what it had."""
    mesh = replicas.make_mesh(4)
    state = replicas.replicate(LOCAL_SGD.init({"w": jnp.ones((8, 8))}), mesh)
    w = state.sync_state.anchor["w"]
    parts = [shard.data + i for i, shard in enumerate(w.addressable_shards)]
    w = jax.make_array_from_single_device_arrays(w.shape, w.sharding, parts)
    state = state._replace(sync_state=state.sync_state._replace(anchor={"w": w}))
    anchor = replicas.anchor(state)["w"]
    assert anchor.shape == (8, 8)
    assert anchor.sharding.is_fully_replicated
    for shard, part in zip(anchor.addressable_shards, parts, strict=True):
        assert shard.device == part.device
        helpers.assert_bitwise(shard.data, part[0])
    helpers.assert_bitwise(jax.jit(replicas.anchor)(state)["w"], parts[0][0])


def test_anchor_and_consensus_after_a_local_step():
    """The export is what the replicas have; the anchor, what they had at the sync."""
    tx = LOCAL_SGD
    history = list(
        helpers.run_mesh(tx, helpers.make_params(), helpers.make_gradients(3, 4))
    )
    (synced, _), (params, state) = history[-2:]
    anchor, model = replicas.anchor(state), replicas.consensus(params)
    assert jax.tree.structure(anchor) == jax.tree.structure(params)
    for name in params:
        np.testing.assert_allclose(anchor[name], synced[name][0], rtol=RTOL)
        np.testing.assert_allclose(model[name], params[name].mean(0), rtol=RTOL)
        assert np.abs(model[name] - anchor[name]).max() > 0.01


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (cd.presets.synchronous_dion(0.1), "holds 0 anchors"),
        (optax.chain(*[cd.presets.local_sgd(0.1, k=2)] * 2), "holds 2 anchors"),
    ],
)
def test_there_is_one_anchor(state, message):
    state = jax.tree.map(lambda x: jnp.stack([x]), state.init(helpers.make_params()))
    with pytest.raises(ValueError, match=message):
        replicas.anchor(state)


def test_a_state_without_replica_axis_is_rejected():
    state = LOCAL_SGD.init(helpers.make_params())
    for read in (replicas.anchor, replicas.divergence, replicas.consensus):
        with pytest.raises(ValueError, match="needs a leading axis"):
            read(state)


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        self.head = self.embed.embedding
        self.up = nnx.Linear(4, 4, use_bias=False, rngs=rngs)


def test_shared_variables_of_nnx():
    """As one tree they would become two; `nnx.split` keeps them one."""
    mesh, tx = replicas.make_mesh(2), LOCAL_SGD
    model = Tied(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"'embed/embedding' and 'head' are one"):
        replicas.replicate(model, mesh)
    graph, state = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))
    model, optimizer = nnx.merge(graph, replicas.replicate(state, mesh))
    assert model.head is model.embed.embedding
    assert cd.metrics.read(optimizer.opt_state)["steps"] == 0
    for read in (replicas.consensus, replicas.divergence):
        with pytest.raises(ValueError, match="are one shared variable"):
            read(model)
        read(nnx.state(model))
    assert len(jax.tree.leaves(replicas.consensus(nnx.state(model, nnx.Param)))) == 2
    assert len(jax.tree.leaves(replicas.anchor(optimizer.opt_state))) == 2


def test_the_consensus_has_what_was_changed_after_the_update():
    """Such as a frozen layer, which the anchor has not."""
    frozen = optax.masked(optax.set_to_zero(), {"a": True, "b": False})
    tx = optax.chain(LOCAL_SGD, frozen)
    mesh, params = replicas.make_mesh(2), {"a": jnp.ones(3), "b": jnp.ones([])}
    state = helpers.start(tx, params, mesh)
    step, down = helpers.replica_step(tx, mesh), -np.ones(2, np.float32)
    for _ in range(2):
        state, _ = step(state, {"a": np.stack([down] * 3, 1), "b": down})
    np.testing.assert_array_equal(replicas.consensus(state[0])["a"], 1)
    assert (replicas.anchor(state[1])["a"] > 1).all()


def stacked(*trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def test_the_first_sync_keeps_parameters_that_were_reanchored():
    state = TrainState.create(apply_fn=None, params=MODELS[0], tx=LOCAL_SGD)
    state = state.replace(params=MODELS[1])
    opt_state = replicas.reanchor(state.params, state.opt_state)
    helpers.assert_bitwise(opt_state.sync_state.anchor, MODELS[1])
    zeros = jax.tree.map(np.zeros_like, helpers.make_gradients(1, 2)[0])
    mesh = replicas.make_mesh(2)
    pair = replicas.replicate((state.params, opt_state), mesh)
    step = helpers.replica_step(LOCAL_SGD, mesh)
    for _ in range(2):
        pair, _ = step(pair, zeros)
    assert int(cd.metrics.read(pair[1])["syncs"]) == 1
    helpers.assert_bitwise(pair[0], stacked(*[MODELS[1]] * 2))
    named = {"steps": jnp.zeros(2), "w": jnp.ones(3)}  # not the optimizer's steps
    replicas.reanchor(named, LOCAL_SGD.init(named))


def test_reanchor_drops_residuals_and_keeps_the_rest():
    compressed = synchronizers.reconcile(
        optax.sgd(0.7, 0.9), compressor=cd.compressors.quantize(4)
    )
    tx = cd.adaptive_sync(
        optax.sgd(0.1, 0.9), triggers.every_k(3), compressed, helpers.AXIS
    )
    *_, (params, opt_state) = helpers.run_vmap(
        tx, helpers.make_params(), helpers.make_gradients(4, 2)
    )
    assert any(np.any(x) for x in jax.tree.leaves(opt_state.sync_state.residual))
    with pytest.raises(ValueError, match="differ between the replicas"):
        replicas.reanchor(params, opt_state)
    same = stacked(*[MODELS[1]] * 2)
    after = replicas.reanchor(same, opt_state)
    assert not any(np.any(x) for x in jax.tree.leaves(after.sync_state.residual))
    helpers.assert_bitwise(after.sync_state.anchor, same)
    helpers.assert_bitwise(after.sync_state.common, opt_state.sync_state.common)
    helpers.assert_bitwise(after.inner_state, opt_state.inner_state)
    helpers.assert_bitwise(after.metrics, opt_state.metrics)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bias": MODELS[0]["bias"]}, "the parameter is missing"),
        (stacked(*MODELS), r"the parameter is \(2, 5\)"),
    ],
)
def test_reanchor_needs_the_anchor_of_these_parameters(params, message):
    with pytest.raises(ValueError, match=message):
        replicas.reanchor(params, LOCAL_SGD.init(MODELS[0]))
