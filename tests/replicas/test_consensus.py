"""The one model, and how far the replicas are from each other."""

import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import curvadion_jax as cd
from curvadion_jax import replicas, synchronizers, triggers
from curvadion_jax.replicas import _consensus

# One float32 sum of some dozens of squares.
RTOL = 1e-5
# A sum of so many float32 numbers is off by so many roundings.
EPS = np.finfo(np.float32).eps
# A distance of one bit, 2^-23 of the numbers, is seen to a tenth of a per cent.
ONE_BIT_RTOL = 1e-3


def test_the_mean_over_replicas():
    params = {
        "w": jnp.array([[1.0, 2], [3, 6]]),
        "half": jnp.array([[256.0], [257], [258], [259]], jnp.float16)[:2],
        "count": jnp.array([5, 5]),
    }
    model = replicas.consensus(params)
    assert model["w"].tolist() == [2, 4]
    assert model["half"].dtype == jnp.float16
    assert model["half"].tolist() == [256.5]
    assert model["count"].tolist() == 5


def test_bytes_of_the_mean_are_those_of_an_all_reduce():
    params = {"w": jnp.ones((4, 10), jnp.bfloat16), "n": jnp.ones(4, jnp.int32)}
    assert replicas.consensus_bytes(params) == 2 * 3 / 4 * (40 + 4)


@pytest.mark.parametrize("number", [1, 2, 3, 5, 7, 8])
def test_equal_replicas(number):
    one = np.random.default_rng(0).normal(size=(400,)).astype(np.float32)
    params = {"w": jnp.asarray(np.stack([one] * number))}
    assert float(replicas.divergence(params)) == 0
    model = replicas.consensus(params)["w"]
    np.testing.assert_allclose(model, one, rtol=number * EPS)


@pytest.fixture
def stacked():
    """Parameters and state of four replicas, one a device."""
    mesh = replicas.make_mesh(4)
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    state = cd.local_muon(0.1, axis_name="replica").init(params)
    return replicas.replicate((params, state), mesh)


def test_the_anchor_is_read_without_asking_the_others(stacked):
    params, state = stacked
    parts = [shard.data for shard in state.sync_state.anchor["w"].addressable_shards]
    apart = [(part + i).at[0, 0].add(i) for i, part in enumerate(parts)]
    anchor = state.sync_state.anchor | {
        "w": jax.make_array_from_single_device_arrays(
            params["w"].shape, params["w"].sharding, apart
        )
    }
    state = state._replace(sync_state=state.sync_state._replace(anchor=anchor))
    model = replicas.consensus(params, state)["w"]
    assert model.shape == (8, 8)
    assert model.sharding.is_fully_replicated
    for shard, part in zip(model.addressable_shards, apart, strict=True):
        assert shard.device == part.device
        helpers.assert_bitwise(shard.data, part[0])  # its own: nothing moved


@pytest.mark.parametrize("inner_type", [AxisType.Auto, AxisType.Explicit])
def test_the_anchor_under_a_mesh_that_is_set(inner_type):
    mesh = replicas.make_mesh(2, {"fsdp": 2}, inner_type=inner_type)
    params = {"w": jnp.arange(8.0).reshape(2, 4)}
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, PartitionSpec("fsdp"))
        params = jax.device_put(params, place)
        state = cd.local_muon(0.1, axis_name="replica").init(params)
        params, state = replicas.replicate((params, state), mesh)
        model = replicas.consensus(params, state)["w"]
    assert model.sharding.spec[0] == "fsdp"
    np.testing.assert_array_equal(model, np.arange(8).reshape(2, 4))


def test_the_mean_sends_what_is_counted(stacked):
    params, _ = stacked
    program = _consensus._means.lower(jax.tree.leaves(params)).compile().as_text()
    sent = [line for line in program.splitlines() if " all-reduce(" in line]
    assert len(sent) == 1
    assert re.findall(r"f32\[[\d,]*\]", sent[0].partition(" all-reduce(")[0]) == [
        "f32[8]",
        "f32[8,8]",
    ]
    assert replicas.consensus_bytes(params) == 2 * 3 / 4 * 4 * (8 * 8 + 8)


def test_parameters_that_overflow_on_all_replicas_are_not_meant(stacked):
    params, state = stacked
    params = params | {"w": params["w"].at[:, 0].set(jnp.inf)}
    with pytest.raises(ValueError, match="none of the 4 replicas is finite"):
        replicas.mend((params, state))


@pytest.mark.parametrize("is_inside", [True, False])
def test_what_the_optimizer_remembers_must_be_finite_and_a_bound_need_not(
    stacked, is_inside
):
    params, state = stacked
    endless = jax.tree.map(lambda x: jnp.full_like(x, -jnp.inf), params)
    whole = {"params": params, "lower": endless, "opt_state": state}
    if is_inside:
        anchor = state.sync_state._replace(anchor=endless)
        whole["opt_state"] = state._replace(sync_state=anchor)
        with pytest.raises(ValueError, match="none of the 4 replicas is finite"):
            replicas.mend(whole)
    else:
        assert replicas.mend(whole) == (whole, [])


def test_parameters_in_the_memory_of_the_host(stacked):
    params, state = stacked
    away = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), params
    )
    helpers.assert_bitwise(replicas.consensus(away), replicas.consensus(params))
    assert replicas.consensus(away)["w"].sharding.memory_kind == "device"
    assert float(replicas.divergence(away)) == 0
    assert not replicas.drift(away, state).any()


def test_the_anchor_in_a_program_that_closes_over_the_state(stacked):
    params, state = stacked
    found = jax.jit(lambda x: replicas.consensus(x, state))(params)
    helpers.assert_bitwise(found, replicas.consensus(params, state))


def test_what_is_infinite_on_all_replicas_stays_so_and_is_not_apart():
    mask = {"mask": jnp.array([[1.0, -jnp.inf]] * 3)}
    assert replicas.consensus(mask)["mask"].tolist() == [1, -np.inf]
    assert float(replicas.divergence(mask)) == 0
    assert replicas.mend(mask)[1] == []
    spoilt = {"mask": mask["mask"].at[1, 0].set(jnp.inf)}
    mended, replaced = replicas.mend(spoilt)
    assert replaced == [1]
    helpers.assert_bitwise(mended["mask"], mask["mask"])


def test_equal_zeros_do_not_diverge():
    assert float(replicas.divergence({"w": jnp.zeros((4, 3))})) == 0


def test_divergence_by_hand():
    # Leaves together: (1, 2) and (1, 4); mean (1, 3); distances 1 and 1, mean of the
    # squares (5 + 17) / 2 = 11. Integers do not count.
    params = {
        "w": jnp.ones((2, 1, 1)),
        "b": jnp.array([[2.0], [4.0]]),
        "n": jnp.array([0, 9]),
    }
    np.testing.assert_allclose(replicas.divergence(params), 1 / np.sqrt(11), rtol=RTOL)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_divergence_is_the_references(dtype):
    trees = [helpers.make_params(seed, dtype) for seed in range(5)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
    expected = reference.divergence([jax.tree.map(np.float64, tree) for tree in trees])
    np.testing.assert_allclose(replicas.divergence(stacked), expected, rtol=RTOL)


def test_small_distances_are_seen_beside_large_parameters():
    # 1024 +- 2^-13, a single bit: 2^-23 of the parameters.
    params = {"w": jnp.array([[1024.0 - 2.0**-13], [1024.0], [1024.0 + 2.0**-13]])}
    expected = reference.divergence([{"w": np.asarray(x, float)} for x in params["w"]])
    np.testing.assert_allclose(replicas.divergence(params), expected, rtol=ONE_BIT_RTOL)


@pytest.fixture(scope="module")
def drifted():
    """Parameters and state after a sync and a local step, and the common start."""
    tx = cd.adaptive_sync(
        optax.chain(optax.sgd(0.1, 0.9)),
        triggers.every_k(2),
        synchronizers.reconcile(),
        helpers.AXIS,
    )
    params = helpers.make_params()
    return helpers.last(helpers.run_mesh(tx, params, helpers.make_gradients(3, 4)))


def test_the_anchor_is_the_model(drifted):
    params, state = drifted
    model = replicas.consensus(params, state)
    for name, value in model.items():
        helpers.assert_bitwise(value, state.sync_state.anchor[name][2])
        assert np.abs(value - params[name].mean(0)).max() > 0.01
    assert float(replicas.divergence(params)) > 0.01


def test_without_an_anchor_the_mean_is_the_model(drifted):
    params, state = drifted
    for model in (
        replicas.consensus(params),
        replicas.consensus(params, state.inner_state),
    ):
        for name, value in model.items():
            np.testing.assert_allclose(value, params[name].mean(0), rtol=RTOL)


def test_the_anchor_is_found_by_name(drifted):
    params, state = drifted
    assert replicas.consensus_bytes(params, state) == 0
    # A parameter that the optimizer does not train is averaged.
    more = {"a_frozen": jnp.array([[1.0], [3], [5], [7]]), **params}
    model = replicas.consensus(more, state)
    assert model["a_frozen"].tolist() == [4]
    helpers.assert_bitwise(model["tall"], replicas.consensus(params, state)["tall"])
    assert replicas.consensus_bytes(more, state) == 2 * 3 / 4 * 4
    renamed = {f"new_{name}": leaf for name, leaf in params.items()}
    with pytest.raises(ValueError, match="not one of these parameters"):
        replicas.consensus(renamed, state)
