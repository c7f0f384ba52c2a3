"""The one model, the anchor, and how far the replicas are from each other."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import curvadion_jax as cd
from curvadion_jax import replicas

# One float32 sum of some dozens of squares.
RTOL = 1e-5
# A sum of so many float32 numbers is off by so many roundings.
EPS = np.finfo(np.float32).eps
SMALL = replicas.simulated(2)


def local_sgd(mesh=SMALL):
    return cd.presets.local_sgd(0.1, k=2, mesh=mesh)


def test_the_mean_over_replicas():
    params = {
        "w": jnp.array([[1.0, 2], [3, 6]]),
        "half": jnp.array([[256.0], [257]], jnp.float16),
        "complex": jnp.array([1 + 2j, 3 - 1j]),
        "count": jnp.array([5, 5]),
        "none": jnp.zeros((2, 0)),
    }
    model = replicas.consensus(params)
    assert model["w"].tolist() == [2, 4]
    assert model["half"].dtype == jnp.float16
    assert model["half"].tolist() == [256.5]
    assert model["complex"] == 2 + 0.5j
    assert model["count"] == 5
    assert model["none"].shape == (0,)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mesh", [replicas.make_mesh, replicas.simulated])
def test_a_replica_that_is_not_finite_is_left_out(mesh, value):
    """Of all arrays, also of those that are finite."""
    rows = {
        "a": np.array([[9.0, value], [1, 2], [3, 4], [5, 6]], np.float32),
        "b": np.array([9.0, 1, 2, 3], np.float16),
        "n": np.array([9, 1, 2, 3]),
        "empty": np.zeros((4, 0), np.float32),
    }
    placed = jax.tree.map(lambda x: replicas.split(x, mesh(4))[:, 0], rows)
    with pytest.warns(UserWarning, match=r"leaves out replicas \[0\].*repair"):
        model = replicas.consensus(placed)
    assert model["a"].tolist() == [3, 4]
    assert model["b"] == 2
    assert model["n"] == 1
    under_jit = jax.jit(replicas.consensus)(rows)  # without a warning
    helpers.assert_bitwise(under_jit, jax.tree.map(np.asarray, model))


def test_a_consensus_of_no_finite_replica_is_not_finite():
    with pytest.warns(UserWarning, match="No replica is finite"):
        model = replicas.consensus({"w": np.array([[1.0, np.nan], [np.inf, 1]])})
    assert not np.isfinite(model["w"]).any()


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_the_mean_of_large_numbers_does_not_overflow(value):
    rows = {"w": np.full((8, 2), value, np.float32)}
    np.testing.assert_allclose(replicas.consensus(rows)["w"], value, rtol=8 * EPS)
    half = {"w": np.full((8, 2), 6e4, np.float16)}
    assert (replicas.consensus(half)["w"] == half["w"][0]).all()


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
    assert state["w"].sharding.spec == P("replica")


@pytest.mark.parametrize("function", [replicas.consensus, replicas.divergence])
def test_what_has_no_rows_has_no_consensus_and_no_divergence(function):
    """Such as a consensus, or a whole training state."""
    mesh = replicas.make_mesh(4)
    rows = replicas.replicate({"w": jnp.ones((16, 16)), "b": jnp.ones(7)}, mesh)
    with pytest.raises(
        ValueError, match=r"\['b'\] of shape \(7,\) has no row for each"
    ):
        function(replicas.consensus(rows))
    with pytest.raises(ValueError, match=r"such as state\.params"):
        function({"params": rows, "step": jnp.array(3)})
    with pytest.raises(ValueError, match=r"\['b'\] of shape \(3,\)"):
        function({"a": jnp.ones((2, 4)), "b": jnp.ones(3)})


def by_hand(tree):
    """The RMS distance from the mean over the RMS, in float64."""
    parts = [np.asarray(x) for x in jax.tree.leaves(tree)]
    wide = [
        x.astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in parts
    ]
    square = lambda x: np.sum(np.abs(x) ** 2)
    spread = sum(square(x - x.mean(0)) for x in wide)
    return np.sqrt(spread / sum(map(square, wide)))


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25, 3e38])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.complex64])
def test_divergence_equals_that_of_float64(dtype, scale):
    trees = [helpers.make_params(seed) for seed in range(5)]
    largest = max(np.max(np.abs(x)) for x in jax.tree.leaves(trees))
    turned = 1j if dtype == np.complex64 else 1
    stacked = jax.tree.map(
        lambda *x: (np.stack(x) * (turned * scale / largest)).astype(dtype), *trees
    )
    expected = by_hand(stacked)
    assert expected > 0.1
    stacked |= {"n": np.arange(5), "none": np.zeros((5, 0), np.float32)}
    stacked["keys"] = jax.random.split(jax.random.key(0), 5)
    np.testing.assert_allclose(replicas.divergence(stacked), expected, rtol=RTOL)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_divergence_of_what_is_not_finite_is_not(value):
    found = replicas.divergence({"w": np.array([[1.0], [value]], np.float32)})
    assert not np.isfinite(found)


def test_without_numbers_nothing_diverges():
    assert float(replicas.divergence({"n": jnp.arange(3)})) == 0
    assert float(replicas.divergence({})) == 0


def test_anchor_and_consensus_after_a_local_step():
    """The export is what the replicas have; the anchor, what they had at the sync."""
    history = list(
        helpers.run_mesh(local_sgd, helpers.make_params(), helpers.make_gradients(3, 4))
    )
    (synced, _), (params, state) = history[-2:]
    anchor, model = replicas.anchor(state), replicas.consensus(params)
    assert jax.tree.structure(anchor) == jax.tree.structure(params)
    for name in params:
        np.testing.assert_allclose(anchor[name], synced[name][0], rtol=RTOL)
        np.testing.assert_allclose(model[name], params[name].mean(0), rtol=RTOL)
        assert np.abs(model[name] - anchor[name]).max() > 0.01


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cd.presets.synchronous_dion(0.1, mesh=SMALL), "holds 0 anchors"),
        (lambda: optax.chain(local_sgd(), local_sgd()), "holds 2 anchors"),
    ],
)
def test_there_is_one_anchor(make, message):
    _, state = helpers.start(make(), helpers.make_params(), SMALL)
    with pytest.raises(ValueError, match=message):
        replicas.anchor(state)


def test_the_consensus_has_what_was_changed_after_the_update():
    """Such as a frozen layer, which the anchor has not."""
    frozen = optax.masked(optax.set_to_zero(), {"a": True, "b": False})
    tx = optax.chain(local_sgd(), frozen)
    state = helpers.start(tx, {"a": jnp.ones(3), "b": jnp.ones([])}, SMALL)
    down = -np.ones(2, np.float32)
    step = jax.jit(helpers.train_step(tx))
    for _ in range(3):  # a change of a sync's update is seen on the step after it
        state, _ = step(state, {"a": np.stack([down] * 3, 1), "b": down})
    np.testing.assert_array_equal(replicas.consensus(state[0])["a"], 1)
    with pytest.warns(UserWarning, match="changed after the optimizer's update"):
        assert (replicas.anchor(state[1])["a"] > 1).all()


def test_training_may_begin_anew_from_the_consensus():
    """With a new optimizer state, whose anchor it is."""
    mesh, tx = SMALL, local_sgd()
    *_, (params, _) = helpers.run(
        tx, mesh, helpers.make_params(), helpers.make_gradients(3, 2)
    )
    with pytest.raises(ValueError, match="replicas' parameters differ"):
        tx.init(jax.tree.map(jnp.asarray, params))
    model = replicas.consensus(params)
    state = tx.init(replicas.replicate(model, mesh))
    helpers.assert_bitwise(replicas.anchor(state), model)
